"""Scorers for the length of responses: DAPO's overlong penalty for single samples, and Kimi's
length reward, which compares the samples of a group.

The formulas come from `advantages.shaping`. Algorithms have options that add the same rewards
(`overlong_buffer_len`, `length_reward_weight`), so use either the scorer or the option, but not
both. Kimi's length reward has a warm-up in steps, which only the option can provide, because a
scorer does not know the step.
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
  """Number of tokens below `max_length` over which the penalty grows from 0 to its full size."""
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
  """Returns a scorer that penalises responses near the length limit as DAPO does, with values in
  [−factor, 0]. The options are `OverlongOptions`.
  """
  read = read_options(OverlongOptions, options, 'overlong')
  # Raises an error for an impossible buffer when the scorer is built.
  overlong_penalty([], max_length=read.max_length, buffer=read.buffer)
  return functools.partial(score_overlong, options=read)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthOptions:
  correct_by: str = ''
  """Name of the scorer that decides correctness: a value of at least 1 counts as correct. If empty,
  the first scorer that applies to the task decides. Scorers of groups, delayed scorers and the
  trainer's reward model cannot decide.
  """


def score_length(
  attempts: tuple[Attempt, ...], scores: tuple[tuple[Score, ...], ...], *, options: LengthOptions
) -> tuple[Verdict, ...]:
  """Returns a verdict for each attempt, with the reward as its value, in [−0.5, 0.5]. The value is
  None if it is unknown whether the attempt is correct.
  """
  correct = [_correct(sample_scores, options.correct_by) for sample_scores in scores]
  lengths = [attempt.response_len for attempt in attempts]
  rewards = length_rewards(lengths, correct, ['group'] * len(attempts))
  return tuple(
    Verdict(value=None, evidence={'reason': 'no score tells whether the answer is correct'})
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
  """Returns a scorer that gives Kimi's length reward: in a group, shorter correct answers gain and
  longer answers lose. The options are `LengthOptions`.
  """
  return PerGroup(
    functools.partial(score_length, options=read_options(LengthOptions, options, 'length'))
  )
