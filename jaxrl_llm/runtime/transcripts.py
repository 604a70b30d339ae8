"""Rollouts and evaluation answers of a run, in the compact form that a report embeds.

The size of the report is bounded even for a large run, because only some of the rollouts and
answers are embedded. They are selected by fixed rules (`ROLLOUT_BYTES`, `MAX_ANSWERS`) that depend
only on the files. The page states what was left out. Invalid rows are counted and skipped.
"""

from __future__ import annotations

import itertools
import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl_llm.runtime import writers

ROLLOUT_BYTES = 12_000_000
"""Approximate maximum size of the rollouts files to embed, in bytes.

If a run's files are larger, only some steps are embedded. They are evenly spaced and include the
first and the last step of each stage. If these files are still too large, only the first groups of
each are embedded.
"""
MAX_ANSWERS = 300
"""Maximum number of tasks of each suite whose answers are embedded. They are the first tasks in the
file of the suite's first evaluation.
"""

Row = dict[str, Any]
File = tuple[int, int, pathlib.Path]
"""Index of the stage, number of the step, and path of the step's file."""


def is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def short(value: Any, digits: int = 6) -> Any:
  """Rounds a float to `digits` significant digits, to keep pages small.

  Other values are returned unchanged.
  """
  return float(f'{value:.{digits}g}') if type(value) is float and math.isfinite(value) else value


def _files(directory: pathlib.Path, stages: list[Row]) -> list[File]:
  """Returns the rollouts or evals files of a run's stages, ordered by stage, step and path.

  Args:
    directory: the run's directory of rollouts or of evals.
  """
  files = []
  for index, stage in enumerate(stages):
    for path in directory.glob(f'{stage["name"]}/*.jsonl'):
      if step := re.match(r'\d+', path.name):
        files.append((index, int(step[0]), path))
  return sorted(files)


def _text(value: Any) -> str:
  return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def answers(workdir: pathlib.Path, stages: list[Row]) -> tuple[list[Row], int]:
  """Returns the greedy answers of a run to the tasks of each suite, and the number of invalid rows.

  For each prompt, these are the answers at the first evaluation of the suite and at the last
  evaluation of each stage.
  """
  suites: dict[str, list[File]] = {}
  for file in _files(workdir / writers.EVALS_DIR, stages):
    suites.setdefault(file[2].stem.partition('-')[2], []).append(file)
  result, corrupt = [], 0
  for suite, files in suites.items():
    chosen = sorted({files[0], *{file[0]: file for file in files}.values()})
    rows: dict[str, Row] = {}
    total = 0
    for column, (_, _, path) in enumerate(chosen):
      read, bad = writers.read_jsonl(path)
      corrupt += bad
      greedy = [row for row in read if row.get('mode') == 'greedy']
      total = max(total, len(greedy))
      for row in greedy:
        prompt = _text(row.get('prompt'))
        if prompt not in rows and (column or len(rows) >= MAX_ANSWERS):
          continue
        entry = rows.setdefault(
          prompt, {'prompt': prompt, 'truth': row.get('truth'), 'answers': [None] * len(chosen)}
        )
        entry['answers'][column] = (_text(row.get('completion')), row.get('correct') is True)
    columns = [{'stage': stages[stage]['name'], 'step': step} for stage, step, _ in chosen]
    if rows:
      result.append(
        {'suite': suite, 'columns': columns, 'rows': list(rows.values()), 'total': total}
      )
  return result, corrupt


def _spread_evenly(items: Sequence[Any], count: int) -> list[Any]:
  """Selects `count` items at even spacing, including the first and the last item.

  If there are at most `count` items, all are selected.
  """
  if len(items) <= count:
    return list(items)
  return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _chosen(files: list[File], budget: int) -> tuple[list[File], float]:
  """Selects the rollouts files to embed, as described at `ROLLOUT_BYTES`.

  Returns the files, and the number of bytes after which the rest of each file is left out.

  Args:
    budget: approximate maximum of the total size in bytes.
  """
  total = sum(path.stat().st_size for _, _, path in files)
  if total <= budget:
    return files, math.inf
  chosen = []
  for _, group in itertools.groupby(files, key=lambda file: file[0]):
    of_stage = list(group)
    chosen += _spread_evenly(of_stage, max(2, int(len(of_stage) * budget / total)))
  size = sum(path.stat().st_size for _, _, path in chosen)
  return chosen, math.inf if size <= 1.5 * budget else budget / len(chosen)


def _leading_groups(path: pathlib.Path, limit: float) -> Iterator[Row | None]:
  """Yields the rows of a rollouts file, with None for each invalid line.

  Once more than `limit` bytes have been read, stops at the end of the current group.
  """
  size, last = 0, None
  with path.open('rb') as file:
    for line in file:
      try:
        row = json.loads(line)
      except ValueError:
        row = None
      group = row.get('group_id') if isinstance(row, dict) else last
      if size > limit and group != last:
        return
      size, last = size + len(line), group
      yield row if isinstance(row, dict) else None


class _Indices(dict):
  """Assigns an index to each distinct value, in the order in which the values first occur."""

  def place(self, value: Any) -> int:
    return self.setdefault(value, len(self))


def rollouts(
  workdir: pathlib.Path, stages: list[Row], budget: int | None = None
) -> tuple[Row, int]:
  """Returns the rollouts to embed and the number of invalid rows.

  Tokens, tasks and scores are stored once, in tables, and the rollouts refer to them by index.

  Args:
    budget: approximate maximum size in bytes of the files to embed. If None, `ROLLOUT_BYTES`
      applies.
  """
  files = _files(workdir / writers.ROLLOUTS_DIR, stages)
  chosen, limit = _chosen(files, ROLLOUT_BYTES if budget is None else budget)
  tokens, scores, groups, tasks = _Indices(), _Indices(), _Indices(), {}
  contexts, episodes = _Indices(), _Indices()
  rows, corrupt, samples = [], 0, {}
  for stage, step, path in chosen:
    texts: dict[str, str] = {}
    """Text of each prompt that the file contains, keyed by the uid of its row."""
    for row in _leading_groups(path, limit):
      try:
        row = None if row is None else writers.unpacked(row)
      except ValueError:
        row = None
      compact = None if row is None else _compact(row, tokens, scores)
      if compact is None:
        corrupt += 1
        continue
      task = (_text(row.get('task_id')), _text(row.get('prompt')))
      kind = (row.get('taskset'), row.get('domain'))
      place = tasks.setdefault(task, (len(tasks), row.get('truth'), *kind))[0]
      group = groups.place((stage, step, _text(row.get('group_id')), place))
      count = row.get('step_samples')
      if isinstance(count, int):
        samples[stage, step] = count
      episode = episodes.place((group, _text(row.get('trajectory_id', row.get('uid')))))
      where = {'s': stage, 'p': step, 'x': step + stages[stage]['offset'], 'k': place, 'g': group}
      if isinstance(text := row.get('context'), str):
        texts[_text(row.get('uid'))] = text
      else:
        text = texts.get(_text(row.get('context_of')))
      if text is not None:
        where['o'] = contexts.place(text)
      rows.append({**where, 'e': episode, **compact})
  return {
    'tokens': list(tokens),
    'contexts': list(contexts),
    'scores': [json.loads(score) for score in scores],
    'tasks': [
      {'id': i, 'prompt': p, 'truth': t, 'taskset': s, 'domain': d}
      for (i, p), (_, t, s, d) in tasks.items()
    ],
    'rows': rows,
    'shown': _shown(len(rows), len(chosen), len(files), limit) + _sampled(samples),
  }, corrupt


def _shown(rows: int, chosen: int, files: int, limit: float) -> str:
  if chosen == files and limit == math.inf:
    return f'All {rows:,} rollouts of {files:,} steps.'
  extent = 'the first groups' if limit < math.inf else 'all'
  spacing = 'evenly spaced, the first and last of each stage included'
  return (
    f'{rows:,} rollouts: {extent} of {chosen:,} steps out of {files:,} ({spacing}). All of them '
    'are in rollouts/.'
  )


def _sampled(samples: Mapping[Any, int]) -> str:
  """Returns the page's note about steps that were transcribed only in part. The note is empty if
  there are none.

  Args:
    samples: number of samples of each step that was transcribed only in part.
  """
  if not samples:
    return ''
  return (
    f' The files of {len(samples):,} of these steps hold some groups of their '
    f'{sum(samples.values()):,} samples (logging.transcript_tokens).'
  )


def _compact(row: Row, tokens: _Indices, scores: _Indices) -> Row | None:
  """Returns a rollout in the page's compact form.

  Returns None if one of its per-token lists is invalid or does not have an entry for each token.
  """
  texts, ids = row.get('tokens'), row.get('token_ids')
  lists = {
    name: row.get(name) or None for name in ('advantages', 'behaviour_logprobs', 'trainer_logprobs')
  }
  if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
    return None
  ids = ids if isinstance(ids, list) and len(ids) == len(texts) else [None] * len(texts)
  if any(
    v is not None and (not isinstance(v, list) or len(v) != len(texts)) for v in lists.values()
  ):
    return None
  advantages, sampler, trainer = lists.values()
  if not all(is_number(v) or v is None for values in lists.values() for v in values or []):
    return None
  reward = row.get('reward')
  completion = _text(row.get('completion', ''))
  compact = {
    'u': row.get('uid'),
    't': [tokens.place((token, text)) for token, text in zip(ids, texts)],
    'r': short(float(reward), 5) if is_number(reward) else None,
    'f': row.get('finish_reason'),
    'v': row.get('version_step'),
    'c': scores.place(json.dumps(row.get('scores') or {}, sort_keys=True)),
    'a': None if advantages is None else [short(v, 4) for v in advantages],
    'b': None if sampler is None else [short(v, 5) for v in sampler],
  }
  try:
    compact |= _turns(row, len(texts))
  except (TypeError, ValueError):
    return None
  step, steps = row.get('step_index'), row.get('steps')
  if is_number(step) and is_number(steps) and steps > 1:
    compact['i'] = f'{step + 1} of {steps}'
  if advantages and len(set(advantages)) == 1:
    compact['a'] = compact['a'][0]
  if sampler is not None and trainer is not None:
    compact['d'] = [
      None if a is None or b is None else short(a - b, 3) for a, b in zip(trainer, sampler)
    ]
  if completion != ''.join(texts):
    compact['q'] = completion
  return compact


def _turns(row: Row, length: int) -> Row:
  """Returns the turns of a rollout in the page's compact form, a mapping with up to three keys.

  `w` has one list for each turn: 1 for an observation or 0 for the policy, the index of the token
  after the turn and, if the turn's tokens do not spell its text, the text. `h` has the rewards of
  the policy's turns. `l` has one list for each range of tokens that one weights version generated:
  the range's start, its end, and the step of the version.

  Args:
    length: number of tokens of the rollout.

  Raises:
    TypeError, ValueError: a value is invalid.
  """
  compact: Row = {}
  if row.get('turns') is not None:
    compact['w'], at = [], 0
    for kind, start, end, *text in row['turns']:
      if start != at or kind not in ('policy', 'observation') or not all(map(_is_text, text)):
        raise ValueError(kind)
      at = _place(end, start + 1, length)
      compact['w'].append([int(kind == 'observation'), at, *text[:1]])
    if at != length:
      raise ValueError(at)
  if row.get('turn_rewards') is not None:
    if not all(map(is_number, row['turn_rewards'])):
      raise ValueError(row['turn_rewards'])
    compact['h'] = [short(value, 5) for value in row['turn_rewards']]
  if row.get('versions') is not None:
    compact['l'] = [
      [_place(start, 0, length), _place(end, start, length), _place(step, -math.inf, math.inf)]
      for start, end, step in row['versions']
    ]
  return compact


def _place(value: Any, low: float, high: float) -> int:
  if not isinstance(value, int) or not low <= value <= high:
    raise ValueError(value)
  return value


def _is_text(value: Any) -> bool:
  return isinstance(value, str)
