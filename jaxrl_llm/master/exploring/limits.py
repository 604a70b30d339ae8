"""Time limits of a group of rollouts."""

from __future__ import annotations

import dataclasses

from jaxrl_llm.core.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskLimits:
  """Time limits of a group, from its request to its last score. A group that exceeds them is
  dropped and replaced.

  They depend on the clock: a run in which a limit takes effect is not reproducible bit for bit.
  `run/clock_decisions` counts these cases.
  """

  timeout_s: float | None = 900.0
  """Seconds per try, including the wait for a free engine slot; None: no limit."""
  retries: int = 2
  """Further tries of a group that timed out."""
  straggler_factor: float | None = None
  """Give a group up, without another try, after this multiple of the mean group time; None: never.

  The mean covers the final tries of the last `4 * groups_per_batch` groups that were not given up.
  The limit applies once `groups_per_batch` groups have ended. Slow groups often have long answers,
  so this biases a policy against long answers.
  """

  def __post_init__(self):
    if (self.timeout_s is not None and not self.timeout_s > 0) or self.retries < 0:
      raise UserError(
        f'limits: timeout_s {self.timeout_s} and retries {self.retries}, wanted above 0 and at '
        'least 0'
      )
    if self.straggler_factor is not None and not self.straggler_factor > 1:
      raise UserError(
        f'limits.straggler_factor: {self.straggler_factor}, wanted above 1, or null for none'
      )

  def check(self, collect_deadline_s: float, where: str) -> None:
    """Raises UserError if changed limits allow a group's tries to outlast the wait for a batch."""
    if self == TaskLimits() or self.timeout_s is None:
      return
    longest = self.timeout_s * (self.retries + 1)
    if longest >= collect_deadline_s:
      raise UserError(
        f'{where}limits: {self.retries + 1} tries of {self.timeout_s:g} s are {longest:g} s, and '
        f'the wait for a batch ends after rollout.collect_deadline_s={collect_deadline_s:g}; lower '
        'them, or raise it'
      )
