"""Handles the signals that stop a run. During set-up, a signal ends the process at once. Later, the
first signal requests a commit. A second one, or the end of the grace period, ends the process at
once.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Callable

import jax
from absl import logging

from jaxrl_llm.core import script
from jaxrl_llm.core.errors import RunError
from jaxrl_llm.parallel.coordinator import Coordinator
from jaxrl_llm.parallel.device import PeerFailed

_ECHO_S = 1.0
"""Seconds during which another SIGTERM is considered a copy of the first. A scheduler that signals
the whole process tree reaches a process twice: directly and through its supervisor.
"""
_FIRST_S = 1.0
"""Seconds that process 0 waits for the other processes to exit, since its own exit would abort
them.
"""
_SHARE = 0.9
"""Share of the grace period after which a process exits, so that it is not killed."""


class Interrupted(RunError):
  """Raised when a run that is being stopped cannot commit, because it has lost another process."""

  def __init__(self, signum: int, message: str):
    super().__init__(message)
    self.exit_code = 128 + signum


class Stopping:
  """Handles the signals that stop this process."""

  def __init__(
    self,
    coordinator: Coordinator,
    request: Callable[[int], object],
    *,
    grace_s: float | None,
    newest: Callable[[], int],
    echo_s: float = _ECHO_S,
  ):
    """
    Args:
      request: called, in process 0 only, with the number of the first signal.
      grace_s: seconds between SIGTERM and SIGKILL; None if there is no limit.
      newest: returns the step of the newest commit, or 0 if there is none. It may be called in
        another thread.
      echo_s: seconds during which another SIGTERM is ignored after the first one.
    """
    self._coordinator, self._request = coordinator, request
    self._grace_s, self._newest, self._echo_s = grace_s, newest, echo_s
    self._begun = False
    self._echo_until = 0.0
    """Time on the monotonic clock until which another SIGTERM is ignored."""
    self.signum = 0
    """Number of the signal that this process has received; 0 if none."""

  def install(self) -> None:
    """Installs the handlers of SIGINT and SIGTERM. Call it in the main thread."""
    for signum in (signal.SIGINT, signal.SIGTERM):
      asyncio.get_running_loop().add_signal_handler(signum, self._receive, signum)

  def begin(self) -> None:
    """Records that the loop has begun. Before this call, a signal ends the process at once;
    afterwards, it makes the loop commit and stop.
    """
    self._begun = True

  def explain(self, error: PeerFailed) -> Exception:
    """Returns the error to raise after another process was lost: an `Interrupted` error if this
    process is being stopped, otherwise `error` itself.
    """
    if not self.signum:
      return error
    name = signal.Signals(self.signum).name
    return Interrupted(
      self.signum,
      f'stopped by {name}, without another commit, because another process has left: '
      f'{self._committed()} ({error})',
    )

  def _receive(self, signum: int) -> None:
    name = signal.Signals(signum).name
    if signum == self.signum == signal.SIGTERM and time.monotonic() < self._echo_until:
      return
    if self.signum:
      _say('second signal: exiting without a commit')
      # Do not use sys.exit, which would wait for threads that may be in the middle of device work.
      signal.signal(signum, signal.SIG_DFL)
      signal.raise_signal(signum)
    if not self._begun:
      _say(f'stopped by {name} during set-up; start the same command again')
      if jax.distributed.is_initialized() and self._coordinator.leads:
        time.sleep(_FIRST_S)
      # Do not use sys.exit, which would wait for threads that load or compile. These are safe to
      # kill.
      script.leave_at_once(128 + signum)
    self.signum, self._echo_until = signum, time.monotonic() + self._echo_s
    _say(f'{name}: committing the finished steps, then exiting (after a second signal, at once)')
    if signum == signal.SIGTERM and self._grace_s is not None:
      timer = threading.Timer(_SHARE * self._grace_s, self._expire)
      timer.daemon = True
      timer.start()
    self._coordinator.report_signal(signum)
    if self._coordinator.leads:
      self._request(signum)

  def _expire(self) -> None:
    _say(
      f'SIGTERM: still stopping after {_SHARE * self._grace_s:g} s of {self._grace_s:g} s '
      f'(coordination.grace_s), exiting without another commit; {self._committed()}'
    )
    script.leave_at_once(128 + signal.SIGTERM)

  def _committed(self) -> str:
    try:
      step = self._newest()
    except OSError as error:
      logging.warning('The newest commit is not known: %s', error)
      return 'start the same command again to resume'
    newest = f'the newest commit is step {step}' if step else 'there is no commit'
    return f'{newest}; start the same command again to resume'


def _say(line: str) -> None:
  sys.stderr.write(f'{line}\n')
  sys.stderr.flush()
