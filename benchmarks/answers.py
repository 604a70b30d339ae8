"""Precision, recall and speed of the `answer` scorer on labelled pairs.

.venv/bin/python benchmarks/answers.py --pairs=tests/support/fixtures/answers_blind_dev.jsonl
.venv/bin/python benchmarks/answers.py --math_verify=DIR

DIR is the directory tests/ of huggingface/Math-Verify.
Pairs are JSON lines {"gold", "completion", "right", "mode", "kind"}; a mode of null is chosen as in
a run, from the truths of all such rows. Cases of math-verify's tests that test its own options or
have wrong labels are left out (`DISPUTED`).
"""

from __future__ import annotations

import ast
import collections
import hashlib
import json
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import app, flags

from jaxrl_llm.core.records.task import Task
from jaxrl_llm.rewards.api import Attempt
from jaxrl_llm.rewards.scorers.answer.choosing import choose
from jaxrl_llm.rewards.scorers.answer.scorer import answer_scorer

_PAIRS = flags.DEFINE_string('pairs', None, 'File of pairs, .jsonl.')
_MATH_VERIFY = flags.DEFINE_string('math_verify', None, "Directory with math-verify's tests.")
_MISTAKES = flags.DEFINE_boolean('mistakes', True, 'Print what is judged wrongly.')

DISPUTED: Mapping[str, str] = {
  'a3cbd21c55ac': 'claims that 1/2 is 10/9, and is labelled right',
  '9f05bcaf8b4f': 'claims that 7 is 11, and is labelled right',
  '73b729458264': 'claims that 11 is 1/3, and is labelled right',
  'cdf4de653f96': 'claims that 1/3 is about 1.3, and is labelled right',
  'fb8f0eb269c1': 'claims that 6 is 2, and is labelled right',
  'ba922da01d93': 'has another sign than the truth, and is labelled right',
  '597fd8ad6227': (
    'a set for an ordered pair, labelled right; the one in another order is labelled wrong'
  ),
  '61ac8733dfa9': 'is the truth, and is labelled wrong for a line break within $…$',
  '97216daf85e8': r'is the truth, and is labelled wrong for a line break within \(…\)',
}
"""Cases of math-verify's tests that are left out: digest to reason."""

ANYWHERE = ('boxed', 'tags', 'hashes', 'phrase', 'bold', 'formula', 'whole', 'number')
"""Places where math-verify looks for an answer, including the last formula or number of a text
without a box.
"""

Pair = Mapping[str, Any]


def digest(gold: str, completion: str) -> str:
  return hashlib.sha256(f'{gold}\0{completion}'.encode()).hexdigest()[:12]


def math_verify_pairs(directory: pathlib.Path) -> Iterator[Pair]:
  """Yields the parametrised cases (gold, pred, expected) of math-verify's tests, each once."""
  seen = set()
  for file in sorted(directory.glob('test_*.py')):
    for function in ast.walk(ast.parse(file.read_text())):
      if isinstance(function, ast.FunctionDef):
        for names, case in _cases(function):
          row = dict(zip(names, case))
          wanted = row.get('expected', row.get('result'))
          if not {'gold', 'pred'} <= row.keys():
            continue
          key = digest(row['gold'], row['pred'])
          usual = (
            row.get('precision', 6) == 6
            and row.get('allow_set_relation_comp', True)
            and row.get('strict', True)
          )
          if key not in seen and key not in DISPUTED and usual:
            seen.add(key)
            yield {
              'gold': row['gold'],
              'completion': row['pred'],
              'right': bool(wanted),
              'kind': function.name,
            }


def _cases(function: ast.FunctionDef) -> Iterator[tuple[list[str], tuple[Any, ...]]]:
  """Yields the names and values of each literal case of a parametrised test."""
  for decorator in function.decorator_list:
    if not (
      isinstance(decorator, ast.Call) and getattr(decorator.func, 'attr', '') == 'parametrize'
    ):
      continue
    names = [name.strip() for name in ast.literal_eval(decorator.args[0]).split(',')]
    for case in decorator.args[1].elts:
      try:
        yield names, ast.literal_eval(case)
      except ValueError:  # An f-string.
        continue


def file_pairs(file: pathlib.Path) -> list[Pair]:
  return [json.loads(line) for line in file.read_text().splitlines()]


def _attempt(pair: Pair) -> Attempt:
  task = Task(
    taskset='pairs',
    domain='math',
    prompt=({'role': 'user', 'content': ''},),
    truth=pair['gold'],
    fields={},
  )
  return Attempt(
    uid='', task=task, completion=pair['completion'], finish_reason='stop', response_len=1
  )


def report(name: str, pairs: Sequence[Pair], **options: Any) -> None:
  """Judges all pairs and prints precision, recall and speed."""
  chosen = choose([pair['gold'] for pair in pairs if pair.get('mode') is None]).options
  scorers: dict[Any, Any] = {}
  judged = []
  start = time.process_time()
  for pair in pairs:
    mode = pair.get('mode')
    if mode not in scorers:
      scorers[mode] = answer_scorer(
        **{**chosen, **({} if mode is None else {'mode': mode}), **options}
      )
    judged.append((pair, scorers[mode](_attempt(pair))))
  seconds = time.process_time() - start
  accepted = [pair for pair, verdict in judged if verdict.value == 1.0]
  right = [pair for pair in pairs if pair['right']]
  hits = sum(pair['right'] for pair in accepted)
  print(f'{name}: {len(pairs)} pairs, {len(right)} right; chosen {json.dumps(chosen)}')
  print(
    f'precision {hits / max(1, len(accepted)):.4f} ({len(accepted) - hits} wrong accepted), recall '
    f'{hits / max(1, len(right)):.4f} ({len(right) - hits} right rejected), '
    f'{sum(verdict.value is None for _, verdict in judged)} unscorable, {len(pairs) / seconds:.0f} '
    'answers a second of CPU time'
  )
  if _MISTAKES.value:
    for pair, verdict in judged:
      if (verdict.value == 1.0) != pair['right']:
        kind = 'accepted' if verdict.value == 1.0 else 'rejected'
        print(
          f'  {kind} {digest(pair["gold"], pair["completion"])} {pair.get("kind")}: '
          f'{dict(verdict.evidence)}'
        )
  missed = collections.Counter(
    pair.get('kind') for pair, v in judged if (v.value == 1.0) != pair['right']
  )
  print('  by kind:', dict(missed.most_common()))


def main(argv: Sequence[str]) -> None:
  del argv
  if _PAIRS.value:
    report(_PAIRS.value, file_pairs(pathlib.Path(_PAIRS.value)))
  if _MATH_VERIFY.value:
    pairs = list(math_verify_pairs(pathlib.Path(_MATH_VERIFY.value)))
    report("math-verify's tests", pairs, mode='latex', extraction=ANYWHERE)


if __name__ == '__main__':
  app.run(main)
