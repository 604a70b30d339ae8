"""Length rewards as scorers: DAPO's overlong penalty per sample, Kimi's length reward per group.

The formulas are those of `advantages.shaping`. An algorithm with the same option
(`overlong_buffer_len`, `length_reward_weight`) adds them too: use one or the other. Kimi's warm-up
counts steps, which a scorer does not know, so the warm-up is available in the algorithm only.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jaxrl_llm.advantages.shaping import length_rewards, overlong_penalty
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.score import Score
from jaxrl_llm.rewards.api import Attempt, PerGroup, Scorer, Verdict, read_options


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlongOptions:
  max_length: int
  """Response length in tokens at which the full penalty is reached."""
  buffer: int
  """Number of tokens before `max_length` over which the penalty grows."""
  factor: float = 1.0
  """Magnitude of the full penalty."""


def score_overlong(attempt: Attempt, *, options: OverlongOptions) -> Verdict:
  """Returns the penalty of one response, in [−factor, 0]."""
  penalty = overlong_penalty(
    [attempt.response_len],
    max_length=options.max_length,
    buffer=options.buffer,
    factor=options.factor,
  )
  return Verdict(value=float(penalty[0]), evidence={'length': attempt.response_len})


def overlong_scorer(**options: Any) -> Scorer:
  """DAPO's penalty for responses near the limit, in [-factor, 0]; options: `OverlongOptions`."""
  read = read_options(OverlongOptions, options, 'overlong')
  # Raises an error for an impossible buffer when the scorer is built.
  overlong_penalty([], max_length=read.max_length, buffer=read.buffer)
  return functools.partial(score_overlong, options=read)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthOptions:
  correct_by: str = ''
  """Name of the scorer that decides correctness: a value of at least 1 is correct. Empty: the first
  scorer in force for the sample.
  """


def score_length(
  attempts: tuple[Attempt, ...], scores: tuple[tuple[Score, ...], ...], *, options: LengthOptions
) -> tuple[Verdict, ...]:
  """Returns each attempt's reward, in [−0.5, 0.5]; None if its correctness is unknown."""
  correct = [_correct(sample_scores, options.correct_by) for sample_scores in scores]
  lengths = [attempt.response_len for attempt in attempts]
  rewards = length_rewards(lengths, correct, ['group'] * len(attempts))
  return tuple(
    Verdict(value=None, evidence={'reason': 'nothing says whether the answer is right'})
    if right is None
    else Verdict(value=float(reward), evidence={'length': length, 'correct': right})
    for right, reward, length in zip(correct, rewards, lengths, strict=True)
  )


def _correct(scores: tuple[Score, ...], by: str) -> bool | None:
  values = [score.value for score in scores if not by or score.scorer == by]
  if by and not values:
    raise UserError(
      f"scorer 'length': no scorer {by!r} judged {scores[0].uid if scores else 'the sample'}; "
      f'wanted one of {[score.scorer for score in scores]}'
    )
  return values[0] >= 1.0 if values and values[0] is not None else None


def length_scorer(**options: Any) -> PerGroup:
  """Kimi's length reward: in a group, shorter correct answers gain, longer ones lose; options:
  `LengthOptions`.
  """
  return PerGroup(
    functools.partial(score_length, options=read_options(LengthOptions, options, 'length'))
  )
