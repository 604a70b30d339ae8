"""Scorer `verifier`: checks answers to procedural tasks with the verifier of the task's generator.

By default, the value is 1.0 if the verifier returns exactly 1, else 0.0. There is no tolerance:
some verifiers give partial credit as a sum of floats, so a right answer followed by junk can get
0.9999999999999999.

Some reasoning-gym verifiers pass the answer to `eval` or, equivalently, `sympy.parse_expr`. Such
verifiers run in a sandbox, and only get answers that match a strict grammar (`evaluating`). Unknown
verifiers run in a sandbox, too, and get any answer that is not code (`runs_code`). All other
verifiers run in this process, where an audit hook refuses forbidden operations (`watch`).
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.extras import check_library, defer
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.rewards.api import (
  Attempt,
  OverrunIsZero,
  Scorer,
  ScorerConfig,
  Verdict,
  in_force,
  read_options,
)
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
"""Libraries that the functions of this module import at their first call."""

# Imported by reasoning-gym for two of its datasets. It imports matplotlib, which would take half of
# the time in which workers start.
defer('cellpylib')


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifierOptions:
  extraction: Method = 'whole'
  tag: str = 'answer'
  strip: bool = True
  """Whether extraction `whole` strips white space around the answer. Other extractions always
  strip it.
  """
  partial_credit: bool = False
  """Whether the value is the verifier's own number. If False, it is 1.0 or 0.0."""
  on_timeout: Literal['zero', 'none'] = 'zero'
  isolation: Isolation = 'auto'
  """Kind of isolation of the sandboxes in which verifiers evaluate answers, as in scorer `code`."""


@functools.cache
def _score_answer(name: str) -> Callable[..., float]:
  # The import is here, because it would add nearly a second to every launch script. Workers import
  # the library when they start.
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
  """Returns whether `eval` of the answer could do more than compute.

  This is the case if the answer calls a method or a builtin other than those in `_HARMLESS`, passes
  a string to any call, contains a lambda, or uses a dunder name.

  The check is for verifiers without a known grammar, and keeps answers from deciding their own
  scores. It does not protect the host, since a verifier may rewrite an answer that Python cannot
  parse (`3!`) before it evaluates the answer. The sandbox protects the host.
  """
  try:
    tree = ast.parse(answer.strip(), mode='eval')
  except (SyntaxError, ValueError, MemoryError, RecursionError):
    return False  # `eval` would also reject such an answer.
  for node in ast.walk(tree):
    match node:
      case ast.Call(func=ast.Name(id=name)) if name not in _BUILTINS:
        if any(
          isinstance(inner, ast.Constant) and isinstance(inner.value, str | bytes)
          for inner in ast.walk(node)
        ):
          return True
      case ast.Call() | ast.Lambda():
        return True
      case ast.Name(id=name) | ast.Attribute(attr=name) if '__' in name and name.strip('_'):
        return True
  return False


def _ask(name: str, answer: str, entry: dict[str, Any]) -> float:
  """Returns the verifier's number.

  If the verifier raises an exception on this answer, but not on the reference answer, returns 0.
  """
  score_answer = _score_answer(name)
  # Some verifiers (`number_sorting`) evaluate the reference answer if it is a list, so compiling
  # its text is permitted.
  with watched(name, entry['answer'] if is_list(str(entry['answer'])) else None):
    try:
      return float(score_answer(answer=answer, entry=entry))
    except Exception:
      score_answer(answer=entry['answer'], entry=entry)
      return 0.0


_NO_NUMBER = re.compile(r'(?<![a-z])(?:nan|inf|infinity)[ij]?(?![a-z])', re.IGNORECASE)


def is_no_number(answer: str, reference: str) -> bool:
  """Returns whether an answer contains NaN or infinity, and the reference answer contains digits,
  but neither NaN nor infinity.

  Verifiers that compare distances may accept such an answer: `min(1.0, math.exp(-distance))` is 1
  for NaN.
  """
  return (
    _NO_NUMBER.search(answer) is not None
    and _NO_NUMBER.search(reference) is None
    and any(map(str.isdigit, reference))
  )


def _refusal(name: str, answer: str, reference: str) -> str | None:
  """Returns the reason why verifier `name`, which evaluates answers, must not get this answer.
  Returns None if it may get the answer.
  """
  if not may_evaluate(name, answer, reference):
    return 'the answer is not in the grammar of what its verifier evaluates'
  if name not in GRAMMARS and answer != reference and runs_code(answer):
    return 'the answer is code'
  return None


def _ask_in_sandbox(
  name: str, answer: str, entry: dict[str, Any], options: VerifierOptions
) -> float | Verdict:
  """Returns the verifier's number like `_ask`, but runs the verifier in a sandbox.

  Returns a Verdict with the value 0 if the answer is refused or the verifier reaches a limit of the
  sandbox. With `on_timeout='none'`, such a limit raises TimeoutError instead.
  """
  if reason := _refusal(name, answer, entry['answer']):
    return Verdict(value=0.0, evidence={'reason': reason, 'answer': answer[:200]})
  score, outcome = score_in_sandbox(name, answer, entry, options.isolation)
  if score is not None:
    return score
  reason = f'the verifier met a limit of its sandbox ({outcome.ended})'
  if options.on_timeout == 'none':
    raise TimeoutError(reason)
  return Verdict(
    value=0.0, evidence={'reason': reason, 'answer': answer[:200], 'detail': outcome.detail}
  )


def score_verifier(attempt: Attempt, *, options: VerifierOptions) -> Verdict:
  """Scores the completion's answer with the task's verifier. The value is None if the task has no
  verifier.
  """
  fields = attempt.task.fields
  if 'reasoning_gym' not in fields or 'entry' not in fields:
    return Verdict(
      value=None, evidence={'reason': 'the task has no verifier (fields reasoning_gym, entry)'}
    )
  if options.extraction == 'whole':
    answer, reason = (
      attempt.completion.strip() if options.strip else attempt.completion,
      'no answer',
    )
  else:
    prompts = [message['content'] for message in attempt.task.prompt]
    extraction = extract(
      attempt.completion, method=options.extraction, tag=options.tag, prompts=prompts
    )
    answer, reason = extraction.answer, extraction.reason
  if not answer:
    return Verdict(value=0.0, evidence={'reason': reason})
  name, entry = fields['reasoning_gym'], fields['entry']
  if is_no_number(answer, str(entry.get('answer', ''))):
    reason = 'the answer has NaN or infinity where a number is wanted'
    return Verdict(value=0.0, evidence={'reason': reason, 'answer': answer[:200]})
  _score_answer(name)  # Raises an exception if the verifier is unknown.
  score = (
    _ask_in_sandbox(name, answer, entry, options) if evaluates(name) else _ask(name, answer, entry)
  )
  if isinstance(score, Verdict):
    return score
  evidence = {'answer': answer[:200], 'verifier': score if math.isfinite(score) else str(score)}
  return Verdict(value=score if options.partial_credit else float(score == 1.0), evidence=evidence)


def check_verifiers(tasks: Iterable[Task], scorers: Sequence[ScorerConfig]) -> None:
  """Raises UserError if the verifier of a task evaluates answers and this machine cannot provide
  the sandbox that the verifier needs.
  """
  if not any(scorer.implementation == 'verifier' for scorer in scorers):
    return
  named = {
    (task.domain, task.taskset, name)
    for task in tasks
    if isinstance(name := task.fields.get('reasoning_gym'), str)
  }
  for domain, taskset, name in sorted(named):
    for scorer in in_force(scorers, domain, taskset) if evaluates(name) else ():
      if scorer.implementation != 'verifier':
        continue
      try:
        check_isolation(read_options(VerifierOptions, scorer.options, 'verifier').isolation)
      except NoIsolation as error:
        raise UserError(
          f'taskset {taskset}: verifier {name!r} evaluates answers, which needs a sandbox, and '
          'this machine cannot '
          f'isolate programs ({error.reasons}); permit unprivileged user namespaces, install '
          'bubblewrap, or set the '
          "scorer's option isolation='none' to accept that an answer might do whatever this user "
          'can'
        ) from None


def verifier_scorer(**options: Any) -> Scorer:
  """Returns a scorer that checks the answer with the verifier of the task's own generator
  (reasoning-gym). The options are `VerifierOptions`.
  """
  read = read_options(VerifierOptions, options, 'verifier')
  for library in LIBRARIES:
    check_library(library, "scorer 'verifier'")
  scorer = functools.partial(score_verifier, options=read)
  return OverrunIsZero(scorer) if read.on_timeout == 'zero' else scorer
