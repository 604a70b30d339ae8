"""Time limits of a group of rollouts."""

from __future__ import annotations

import dataclasses

from jaxrl_llm.core.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskLimits:
  """Time limits of a group, from its request to its last score. A try (one run of the group) that
  exceeds a limit is ended. If no retry is left, the group is dropped, and another group replaces
  it.

  Since the limits depend on the clock, a run in which a limit ends a try is not reproducible bit
  for bit. The metric `run/clock_decisions` counts these tries.
  """

  timeout_s: float | None = 900.0
  """Maximum seconds per try, including the wait for a free engine slot; None for no limit."""
  retries: int = 2
  """Maximum number of retries of a group whose first try timed out."""
  straggler_factor: float | None = None
  """Maximum duration of a try, as a multiple of the mean duration. A try that takes longer is
  ended, and the group is dropped without another try. If None, no group is dropped for this reason.

  The mean is over the successful tries of the last `4 * groups_per_batch` groups. The limit applies
  once `groups_per_batch` groups have succeeded. The limit biases the policy against long answers,
  because slow groups are often those with long answers.
  """

  def __post_init__(self):
    if (self.timeout_s is not None and not self.timeout_s > 0) or self.retries < 0:
      raise UserError(
        f'limits: timeout_s {self.timeout_s} and retries {self.retries}, wanted timeout_s above 0 '
        'and retries at least 0'
      )
    if self.straggler_factor is not None and not self.straggler_factor > 1:
      raise UserError(
        f'limits.straggler_factor: {self.straggler_factor}, wanted above 1, or null for none'
      )

  def check(self, collect_deadline_s: float, where: str) -> None:
    """Raises UserError if all permitted tries of a group may together take longer than the wait for
    a batch. The default limits always pass.

    Args:
      collect_deadline_s: maximum wait for a batch, in seconds.
      where: prefix of the error message.
    """
    if self == TaskLimits() or self.timeout_s is None:
      return
    longest = self.timeout_s * (self.retries + 1)
    if longest >= collect_deadline_s:
      raise UserError(
        f'{where}limits: {self.retries + 1} tries of {self.timeout_s:g} s are {longest:g} s, and '
        f'the wait for a batch ends after rollout.collect_deadline_s={collect_deadline_s:g}; lower '
        'timeout_s or retries, or raise collect_deadline_s'
      )
