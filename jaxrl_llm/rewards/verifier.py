"""The task's own verifier: what the generator of a procedural task says about an answer to it.

Value 1.0 if the verifier says exactly 1, else 0.0: verifiers that give partial credit sum it in floats, and a right
answer with junk behind it can come to 0.9999999999999999, so there is no tolerance.

Some verifiers of reasoning-gym pass the answer to `eval` or to `sympy.parse_expr`, which is the same: an answer that
is a call of anything but a mathematical function scores 0 unseen. This is a fence and not a sandbox.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

from jaxrl_llm.rewards.answers.extraction import Method, extract
from jaxrl_llm.rewards.api import Attempt, OverrunIsZero, Scorer, Verdict, read_options


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifierOptions:
  extraction: Method = 'whole'
  tag: str = 'answer'
  strip: bool = True
  """Remove white space at both ends of the answer (always done by extractions other than `whole`)."""
  partial_credit: bool = False
  """Pass on the verifier's own number instead of 1.0 or 0.0."""
  on_timeout: Literal['zero', 'none'] = 'zero'


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
  """Whether `eval` of the answer could do more than compute: a call of a builtin or method or with text, a dunder."""
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
  try:
    return float(score_answer(answer=answer, entry=entry))
  except Exception:
    score_answer(answer=entry['answer'], entry=entry)
    return 0.0


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
  if runs_code(answer) and answer != fields['entry']['answer']:
    return Verdict(value=0.0, evidence={'reason': 'the answer is code', 'answer': answer[:200]})
  score = _ask(fields['reasoning_gym'], answer, fields['entry'])
  evidence = {'answer': answer[:200], 'verifier': score if math.isfinite(score) else str(score)}
  return Verdict(value=score if options.partial_credit else float(score == 1.0), evidence=evidence)


def verifier_scorer(**options: Any) -> Scorer:
  """The task's own verifier (reasoning-gym); options: `VerifierOptions`."""
  read = read_options(VerifierOptions, options, 'verifier')
  scorer = functools.partial(score_verifier, options=read)
  return OverrunIsZero(scorer) if read.on_timeout == 'zero' else scorer
