"""How long a group of rollouts may take."""

from __future__ import annotations

import dataclasses

from jaxrl_llm.core.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskLimits:
  """How long a group may take, from its request to its last score. A group given up is dropped, and another starts.

  These are decisions by the clock: a run in which one is taken is not repeatable bit for bit, and
  `run/clock_decisions` counts it.
  """

  timeout_s: float | None = 900.0
  """Seconds of one try, waiting for a free slot of the engine included; None: no limit."""
  retries: int = 2
  """Further tries of a group that ran out of time."""
  straggler_factor: float | None = None
  """Give a group up, without another try, after so many times the mean time of groups; None: never.

  The mean is of the tries of the last `4 * groups_per_batch` groups that ended, as soon as a batch of them has; those
  that were given up are not in it. What is slow is often long, so this biases a policy against long answers.
  """

  def __post_init__(self):
    if (self.timeout_s is not None and not self.timeout_s > 0) or self.retries < 0:
      raise UserError(f'limits: timeout_s {self.timeout_s} and retries {self.retries}, wanted above 0 and at least 0')
    if self.straggler_factor is not None and not self.straggler_factor > 1:
      raise UserError(f'limits.straggler_factor: {self.straggler_factor}, wanted above 1, or null for none')

  def check(self, collect_deadline_s: float, where: str) -> None:
    """Raises UserError for limits that were set and that the wait for a batch would always expire before."""
    if self == TaskLimits() or self.timeout_s is None:
      return
    longest = self.timeout_s * (self.retries + 1)
    if longest >= collect_deadline_s:
      raise UserError(
        f'{where}limits: {self.retries + 1} tries of {self.timeout_s:g} s are {longest:g} s, and the wait for a batch '
        f'ends after rollout.collect_deadline_s={collect_deadline_s:g}; lower them, or raise it'
      )
