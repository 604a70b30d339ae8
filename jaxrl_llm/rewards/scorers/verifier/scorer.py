"""The task's own verifier: what the generator of a procedural task says about an answer to it.

Value 1.0 if the verifier says exactly 1, else 0.0: verifiers that give partial credit sum it in floats, and a right
answer with junk behind it can come to 0.9999999999999999, so there is no tolerance.

Some verifiers of reasoning-gym pass the answer to `eval` or to `sympy.parse_expr`, which is the same. These get only
answers within a strict grammar, and run in a sandbox (`evaluating`). The others run here, under a watch (`watch`).
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.rewards.api import Attempt, OverrunIsZero, Scorer, ScorerConfig, Verdict, in_force, read_options
from jaxrl_llm.rewards.sandbox.isolation import Isolation, NoIsolation
from jaxrl_llm.rewards.scorers.answer.extraction import Method, extract
from jaxrl_llm.rewards.scorers.verifier.evaluating import (
  GRAMMARS,
  check_isolation,
  evaluates,
  is_list,
  may_evaluate,
  score_in_sandbox,
)
from jaxrl_llm.rewards.watch import watched

LIBRARIES = ('reasoning_gym',)
"""Libraries that functions of this module import at their first call."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifierOptions:
  extraction: Method = 'whole'
  tag: str = 'answer'
  strip: bool = True
  """Remove white space at both ends of the answer (always done by extractions other than `whole`)."""
  partial_credit: bool = False
  """Pass on the verifier's own number instead of 1.0 or 0.0."""
  on_timeout: Literal['zero', 'none'] = 'zero'
  isolation: Isolation = 'auto'
  """Isolation of verifiers that evaluate answers; the values are those of scorer `code`."""


@functools.cache
def _score_answer(name: str) -> Callable[..., float]:
  # Imported here: it takes nearly a second, which every launch script would pay. The workers preload it.
  import reasoning_gym

  return reasoning_gym.get_score_answer_fn(name)


_HARMLESS = {
  'abs',
  'dict',
  'float',
  'frozenset',
  'int',
  'list',
  'max',
  'min',
  'range',
  'round',
  'set',
  'sorted',
  'sum',
  'tuple',
}
_BUILTINS = set(dir(builtins)) - _HARMLESS


def runs_code(answer: str) -> bool:
  """Whether `eval` of the answer could do more than compute: a call of a builtin or method or with text, a dunder.

  A fence for verifiers without a known grammar, which keeps answers from deciding their scores. The sandbox is what
  protects the host: a verifier may rewrite what Python cannot parse (`3!`) before it evaluates.
  """
  try:
    tree = ast.parse(answer.strip(), mode='eval')
  except (SyntaxError, ValueError, MemoryError, RecursionError):
    return False  # So eval refuses it as well.
  for node in ast.walk(tree):
    match node:
      case ast.Call(func=ast.Name(id=name)) if name not in _BUILTINS:
        if any(isinstance(inner, ast.Constant) and isinstance(inner.value, str | bytes) for inner in ast.walk(node)):
          return True
      case ast.Call() | ast.Lambda():
        return True
      case ast.Name(id=name) | ast.Attribute(attr=name) if '__' in name and name.strip('_'):
        return True
  return False


def _ask(name: str, answer: str, entry: dict[str, Any]) -> float:
  """The verifier's number; if it raises on this answer but not on the reference answer, the answer is to blame: 0."""
  score_answer = _score_answer(name)
  # Some evaluate the reference answer (`number_sorting`), which is a list.
  with watched(name, entry['answer'] if is_list(str(entry['answer'])) else None):
    try:
      return float(score_answer(answer=answer, entry=entry))
    except Exception:
      score_answer(answer=entry['answer'], entry=entry)
      return 0.0


def _refusal(name: str, answer: str, reference: str) -> str | None:
  """Why verifier `name`, which evaluates, must not see the answer."""
  if not may_evaluate(name, answer, reference):
    return 'the answer is not in the grammar of what its verifier evaluates'
  if name not in GRAMMARS and answer != reference and runs_code(answer):
    return 'the answer is code'
  return None


def _ask_in_sandbox(name: str, answer: str, entry: dict[str, Any], options: VerifierOptions) -> float | Verdict:
  """As `_ask`; a verdict where the verifier was not asked, or came to no end."""
  if reason := _refusal(name, answer, entry['answer']):
    return Verdict(value=0.0, evidence={'reason': reason, 'answer': answer[:200]})
  score, outcome = score_in_sandbox(name, answer, entry, options.isolation)
  if score is not None:
    return score
  reason = f'the verifier met a limit of its sandbox ({outcome.ended})'
  if options.on_timeout == 'none':
    raise TimeoutError(reason)
  return Verdict(value=0.0, evidence={'reason': reason, 'answer': answer[:200], 'detail': outcome.detail})


def score_verifier(attempt: Attempt, *, options: VerifierOptions) -> Verdict:
  """What the task's verifier says of the completion's answer; None for a task that has no verifier."""
  fields = attempt.task.fields
  if 'reasoning_gym' not in fields or 'entry' not in fields:
    return Verdict(value=None, evidence={'reason': 'the task has no verifier (fields reasoning_gym, entry)'})
  if options.extraction == 'whole':
    answer, reason = attempt.completion.strip() if options.strip else attempt.completion, 'no answer'
  else:
    prompts = [message['content'] for message in attempt.task.prompt]
    found = extract(attempt.completion, method=options.extraction, tag=options.tag, prompts=prompts)
    answer, reason = found.answer, found.reason
  if not answer:
    return Verdict(value=0.0, evidence={'reason': reason})
  name, entry = fields['reasoning_gym'], fields['entry']
  _score_answer(name)  # Raises for an unknown one.
  score = _ask_in_sandbox(name, answer, entry, options) if evaluates(name) else _ask(name, answer, entry)
  if isinstance(score, Verdict):
    return score
  evidence = {'answer': answer[:200], 'verifier': score if math.isfinite(score) else str(score)}
  return Verdict(value=score if options.partial_credit else float(score == 1.0), evidence=evidence)


def check_verifiers(tasks: Iterable[Task], scorers: Sequence[ScorerConfig]) -> None:
  """Raises UserError for tasks whose verifiers evaluate, where this machine has no sandbox for them."""
  if not any(scorer.implementation == 'verifier' for scorer in scorers):
    return
  named = {
    (task.domain, task.taskset, name) for task in tasks if isinstance(name := task.fields.get('reasoning_gym'), str)
  }
  for domain, taskset, name in sorted(named):
    for scorer in in_force(scorers, domain, taskset) if evaluates(name) else ():
      if scorer.implementation != 'verifier':
        continue
      try:
        check_isolation(read_options(VerifierOptions, scorer.options, 'verifier').isolation)
      except NoIsolation as error:
        raise UserError(
          f'taskset {taskset}: verifier {name!r} evaluates answers, which needs a sandbox, and this machine does not '
          f'isolate programs ({error.reasons}); permit unprivileged user namespaces, install bubblewrap, or set the '
          "scorer's option isolation='none' to accept that an answer might do what this user can"
        ) from None


def verifier_scorer(**options: Any) -> Scorer:
  """The task's own verifier (reasoning-gym); options: `VerifierOptions`."""
  read = read_options(VerifierOptions, options, 'verifier')
  scorer = functools.partial(score_verifier, options=read)
  return OverrunIsZero(scorer) if read.on_timeout == 'zero' else scorer
