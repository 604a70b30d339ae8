"""The outcome of one scorer call: validated verdicts, or the reason for the failure."""

from __future__ import annotations

import dataclasses
import json
import traceback
from collections.abc import Mapping, Sequence

from jaxrl_llm.core.files import check_depth
from jaxrl_llm.core.records.score import Status
from jaxrl_llm.core.types import Json
from jaxrl_llm.rewards.api import Verdict

MAX_SCORE = 1e9
"""Maximum magnitude of a value, part or turn value. It keeps squares and sums over a batch finite
in float32.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallOutcome:
  """Outcome of one scorer call, in a worker or on the event loop."""

  status: Status = Status.OK
  verdicts: tuple[Verdict, ...] = ()
  """One verdict per attempt; empty if the call failed."""
  evidence: Mapping[str, Json] = dataclasses.field(default_factory=dict)
  """Details of the failure; empty if the call succeeded."""
  seconds: float = 0.0
  overran: bool = False
  """Whether the call failed because it ran out of time, memory or stack."""


def checked(verdicts: Sequence[Verdict], count: int) -> tuple[Verdict, ...]:
  """Validates the verdicts of a scorer, and converts their contents to plain floats and JSON.

  Raises TypeError or ValueError if there are not exactly `count` verdicts, if one has a wrong type,
  if a number is not finite or its magnitude exceeds `MAX_SCORE`, or if evidence cannot be converted
  to JSON or is nested too deeply.
  """
  if not isinstance(verdicts, Sequence):
    raise TypeError(
      f'scorer returned {type(verdicts).__name__} for a group, wanted a tuple of Verdicts'
    )
  if len(verdicts) != count:
    raise ValueError(f'scorer returned {len(verdicts)} verdicts for a group of {count}')
  return tuple(map(_checked, verdicts))


def _checked(verdict: Verdict) -> Verdict:
  if not isinstance(verdict, Verdict):
    raise TypeError(f'scorer returned {type(verdict).__name__}, wanted Verdict')
  value = None if verdict.value is None else float(verdict.value)
  parts = {name: float(part) for name, part in verdict.parts.items()}
  turns = tuple(float(turn) for turn in verdict.turn_values)
  numbers = (value or 0.0, *parts.values(), *turns)
  # The comparison is also false for NaN.
  if not all(abs(number) <= MAX_SCORE for number in numbers):
    raise ValueError(
      f'scorer returned value {value}, parts {parts} and turns {turns}, wanted finite numbers of '
      f'at most {MAX_SCORE:g}'
    )
  evidence = json.loads(json.dumps(dict(verdict.evidence)))
  check_depth(evidence)
  return Verdict(value=value, parts=parts, turn_values=turns, evidence=evidence)


def failed(raised: BaseException, seconds: float) -> CallOutcome:
  """Returns the outcome of a call that raised an exception."""
  *_, (frame, line) = traceback.walk_tb(raised.__traceback__)
  evidence = {'error': _text(raised), 'where': f'{frame.f_code.co_filename}:{line}'}
  overran = isinstance(raised, MemoryError | RecursionError)
  return CallOutcome(status=Status.ERROR, evidence=evidence, seconds=seconds, overran=overran)


def _text(raised: BaseException) -> str:
  try:
    return f'{type(raised).__name__}: {raised}'[:500]
  except Exception as error:  # `__str__` may be the scorer's own code, which may also raise.
    return f'{type(raised).__name__}, which cannot be printed ({type(error).__name__})'


def timed_out(deadline_s: float) -> CallOutcome:
  """Returns the outcome of a call that missed its deadline."""
  evidence = {'error': f'ran past its deadline of {deadline_s:g} s'}
  return CallOutcome(status=Status.TIMEOUT, evidence=evidence, seconds=deadline_s, overran=True)
