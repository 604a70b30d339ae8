"""Times within which the processes of a job notice that one of them is gone or stuck."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxrl_llm.core.errors import UserError

GRACE = 'JAXRL_GRACE_S'
"""Environment variable of launchers, read if `grace_s` is None."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordinationConfig:
  """Deadlines among the processes of a job and after a signal; none affects results."""

  join_s: float = 300.0
  """Maximum wait in seconds, at the start, for all processes to reach process 0."""
  heartbeat_s: int = 20
  """Seconds without a sign of life after which JAX counts a process or its host as lost and the
  others end.
  """
  beat_s: float = 5.0
  """Seconds between exchanges while process 0 is busy; a dead peer or a signal that reached one
  process is noticed at the next.
  """
  silence_s: float = 1800.0
  """Maximum wait in seconds for another process at an exchange; must exceed the longest work
  between two exchanges (the engine's start, compilation).
  """
  device_s: float = 3600.0
  """Maximum seconds of one piece of device work in a job of several processes; above
  `silence_s`.
  """
  leave_s: float = 30.0
  """Maximum seconds that process 0 waits at the end for the other processes to leave."""
  grace_s: float | None = None
  """Seconds between SIGTERM and SIGKILL that the job's system grants: when nine tenths are over, a
  process that is still stopping exits without a further commit. None: the variable JAXRL_GRACE_S,
  or else no limit.
  """

  def __post_init__(self):
    for name in ('join_s', 'heartbeat_s', 'beat_s', 'silence_s', 'device_s', 'leave_s', 'grace_s'):
      value = getattr(self, name)
      # Not `value <= 0`, which NaN is not either.
      if value is not None and not 0 < value < _MOST_S:
        raise UserError(f'coordination.{name}: {value}, wanted seconds above 0, below {_MOST_S:g}')
    for name, longer in (('beat_s', 'silence_s'), ('silence_s', 'device_s')):
      if getattr(self, name) >= getattr(self, longer):
        raise UserError(
          f'coordination.{name}: {getattr(self, name):g} s, wanted less than {longer}='
          f'{getattr(self, longer):g} s; lower it, or raise {longer}'
        )


def grace_of(config: CoordinationConfig, environment: Mapping[str, str]) -> float | None:
  """Returns the grace period in seconds, from the configuration or else the variable; None: no
  limit. Raises UserError for a variable that is no number of seconds.
  """
  text = environment.get(GRACE)
  if config.grace_s is not None or not text:
    return config.grace_s
  try:
    return CoordinationConfig(grace_s=float(text)).grace_s
  except (ValueError, UserError):
    raise UserError(f'{GRACE}={text!r:.60}: wanted seconds above 0, below {_MOST_S:g}') from None


_MOST_S = 1e6
"""About twelve days; larger numbers overflow timers of libraries."""
