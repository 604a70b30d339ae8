"""Deadlines by which the processes of a job detect that one of them has died or is stuck."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxrl_llm.core.errors import UserError

GRACE = 'JAXRL_GRACE_S'
"""Environment variable with the grace period in seconds, which launchers set. It is read if
`grace_s` is None.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordinationConfig:
  """Time limits for the processes of a job: how long they wait for one another, and how long they
  may take to stop after a signal. They do not affect results.
  """

  join_s: float = 300.0
  """Maximum time in seconds that all processes may take to connect to process 0 at the start."""
  heartbeat_s: int = 20
  """Number of seconds without a sign of life after which JAX considers a process or its host lost.
  The other processes then exit.
  """
  beat_s: float = 5.0
  """Seconds between the heartbeats that all processes exchange, in a collective operation, while
  process 0 is busy. A dead process, or a signal that reached only one process, is noticed at the
  next heartbeat.
  """
  silence_s: float = 1800.0
  """Maximum wait in seconds for another process at an exchange. It must exceed the longest work
  between two exchanges, such as the engine's start or compilation.
  """
  device_s: float = 3600.0
  """Maximum duration in seconds of one call on the devices in a job of several processes. The value
  must exceed `silence_s`.
  """
  leave_s: float = 30.0
  """Maximum time in seconds that process 0 waits at the end for the other processes to leave."""
  grace_s: float | None = None
  """Seconds between SIGTERM and SIGKILL that the job's system grants. A process that is still
  stopping after nine tenths of this time exits without another commit. If None, the variable
  JAXRL_GRACE_S is used, and without the variable there is no limit.
  """

  def __post_init__(self):
    for name in ('join_s', 'heartbeat_s', 'beat_s', 'silence_s', 'device_s', 'leave_s', 'grace_s'):
      value = getattr(self, name)
      # This also rejects NaN, because every comparison with NaN is false.
      if value is not None and not 0 < value < _MOST_S:
        raise UserError(
          f'coordination.{name}: {value}, wanted a number of seconds above 0 and below {_MOST_S:g}'
        )
    for name, longer in (('beat_s', 'silence_s'), ('silence_s', 'device_s')):
      if getattr(self, name) >= getattr(self, longer):
        raise UserError(
          f'coordination.{name}: {getattr(self, name):g} s, wanted less than {longer}='
          f'{getattr(self, longer):g} s; lower it, or raise {longer}'
        )


def grace_of(config: CoordinationConfig, environment: Mapping[str, str]) -> float | None:
  """Returns the grace period in seconds, from the configuration or otherwise from the environment
  variable. None means no limit. Raises UserError if the variable is not a valid number of seconds.
  """
  text = environment.get(GRACE)
  if config.grace_s is not None or not text:
    return config.grace_s
  try:
    return CoordinationConfig(grace_s=float(text)).grace_s
  except (ValueError, UserError):
    raise UserError(
      f'{GRACE}={text!r:.60}: wanted a number of seconds above 0 and below {_MOST_S:g}'
    ) from None


_MOST_S = 1e6
"""Exclusive upper bound of each time limit in `CoordinationConfig`, in seconds (about twelve days).
Much larger values would overflow timers in the libraries that receive them.
"""
