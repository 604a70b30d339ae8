"""Pure functions for reward shaping and for coefficients that depend on the step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float64, Int

from jaxrl_llm.core.errors import UserError

Lengths = Sequence[int] | Int[np.ndarray, 'samples']


def overlong_penalty(
  lengths: Lengths, *, max_length: int, buffer: int, factor: float = 1.0
) -> Float64[np.ndarray, 'samples']:
  """Returns DAPO's soft overlong penalty of each response.

  factor · clip((max_length - buffer - length) / buffer, -1, 0)

  Source: DAPO (arXiv:2503.14476), eq. 13. The penalty is 0 for lengths up to max_length - buffer.
  From there it falls linearly to -factor at max_length, and stays at -factor for longer responses.

  Args:
    lengths: length of each response, in tokens. The caller may count the whole response, or only
      trained tokens, so that tool tokens cost nothing. `max_length` must count the same kind of
      tokens.
    max_length: length at which the penalty reaches its full size.
    buffer: number of tokens over which the penalty grows, 1 to `max_length`.
    factor: full size of the penalty.

  Raises:
    UserError: `buffer` is out of its range.
  """
  if not 1 <= buffer <= max_length:
    raise UserError(
      f'overlong penalty: buffer {buffer}, wanted 1 to max_length={max_length} tokens'
    )
  room = max_length - buffer - np.asarray(lengths, np.float64)
  return factor * np.clip(room / buffer, -1.0, 0.0)


def length_rewards(
  lengths: Lengths, correct: Sequence[bool | None], groups: Sequence[str]
) -> Float64[np.ndarray, 'samples']:
  """Returns Kimi's length reward λ_i = 0.5 - (length_i - min) / (max - min), with min and max over
  the group. Wrong answers get min(0, λ_i).

  Source: Kimi k1.5 (arXiv:2501.12599), section 2.3.3. If all lengths of a group are equal, as in a
  group of one, all its rewards are 0.

  Args:
    lengths: length of each response, in tokens.
    correct: whether each answer is right; None if it is unscorable. An unscorable answer gets 0 and
      is left out of min and max.
    groups: the group id of each sample. All samples of a group must be given, because the reward
      compares their lengths.
  """
  members: dict[str, list[int]] = {}
  for i, (right, group) in enumerate(zip(correct, groups, strict=True)):
    if right is not None:
      members.setdefault(group, []).append(i)
  length = np.asarray(lengths, np.float64)
  rewards = np.zeros(len(correct), np.float64)
  for indices in members.values():
    group_lengths = length[indices]
    if group_lengths.max() == group_lengths.min():
      continue
    short = 0.5 - (group_lengths - group_lengths.min()) / (
      group_lengths.max() - group_lengths.min()
    )
    rewards[indices] = np.where([correct[i] for i in indices], short, np.minimum(short, 0.0))
  return rewards


def warmup_weight(step: int, *, warmup_steps: int, weight: float) -> float:
  """Returns 0 in the first `warmup_steps` steps and `weight` afterwards. `step` is the number of
  completed steps.

  Source: Kimi k1.5 (arXiv:2501.12599), section 2.3.3, which trains without a length reward at first
  and then gives it a constant weight.
  """
  return weight if step >= warmup_steps else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveKl:
  """Settings of a KL coefficient that is adapted to keep the KL near a target; see `adapted`."""

  init_coef: float
  target: float
  """Target KL, in the unit of the measured KL (per token or per sequence)."""
  horizon: float
  """Number of samples or tokens after which the coefficient has changed by up to 20 %. It has the
  same unit as `n` in `adapted`.
  """

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not (value > 0 and math.isfinite(value)):
        raise UserError(f'adaptive KL: {field.name} {value}, wanted above 0 and finite')


def adapted(coef: float, measured_kl: float, n: int, config: AdaptiveKl) -> float:
  """Returns the next coefficient, coef · (1 + clip(KL / target - 1, ±0.2) · n / horizon).

  Source: Ziegler et al. 2019 (arXiv:1909.08593), section 2.2, with the step size written as n /
  horizon, as is customary. Here n is the number of samples or tokens since the last change, in the
  unit of the horizon. A negative estimate of the KL counts as below the target.

  Raises:
    UserError: n is at least 5 · horizon, so that one step could make the coefficient 0 or negative.
    ValueError: `measured_kl` is not finite.
  """
  if not math.isfinite(measured_kl):
    raise ValueError(f'measured KL {measured_kl} is not finite')
  if n >= 5 * config.horizon:
    raise UserError(
      f'adaptive KL: with horizon {config.horizon} and {n} samples or tokens per change, the '
      f'coefficient can reach 0; set the horizon above {n / 5:g}'
    )
  error = min(max(measured_kl / config.target - 1.0, -0.2), 0.2)
  return coef * (1.0 + error * n / config.horizon)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuSchedule:
  """Weight μ of the expert loss as a function of the step. The rollouts' loss has the weight 1 - μ.

  'constant': μ is always `mu`. 'linear': μ changes linearly from `peak` at step 0 to `valley` at
  step `decay_steps`, and then stays at `valley`. 'chord': μ rises linearly from 0 to `peak` over
  `warmup_steps` steps, falls along half a cosine to `valley` over the next `decay_steps` steps, and
  then stays at `valley` (CHORD-μ, arXiv:2508.11408).
  """

  kind: Literal['constant', 'linear', 'chord'] = 'constant'
  mu: float = 0.1
  peak: float = 0.1
  valley: float = 0.1
  warmup_steps: int = 0
  decay_steps: int = 0

  def __post_init__(self):
    for name in ('mu', 'peak', 'valley'):
      if not 0 <= getattr(self, name) <= 1:
        raise UserError(f'mu schedule: {name} {getattr(self, name)}, wanted 0 to 1')
    if self.kind != 'constant' and self.mu != 0.1:
      raise UserError(
        f'mu schedule: mu {self.mu} is set, but only kind constant reads it; kind {self.kind} '
        'reads peak and valley'
      )
    for name in ('warmup_steps', 'decay_steps'):
      if getattr(self, name) < 0:
        raise UserError(f'mu schedule: {name} {getattr(self, name)}, wanted at least 0')

  def at(self, step: int) -> float:
    """Returns μ for the step that follows `step` completed steps."""
    if self.kind == 'constant':
      return self.mu
    if self.kind == 'linear':
      return self._between(1.0 - self._decayed(step))
    if step < self.warmup_steps:
      return self.peak * step / self.warmup_steps
    return self._between(0.5 * (1.0 + math.cos(math.pi * self._decayed(step - self.warmup_steps))))

  def _decayed(self, steps: int) -> float:
    return steps / self.decay_steps if steps < self.decay_steps else 1.0

  def _between(self, height: float) -> float:
    """Interpolates between the valley (`height` 0) and the peak (`height` 1)."""
    return self.valley + (self.peak - self.valley) * height
