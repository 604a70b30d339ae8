"""Watch over the other processes of a job. If one of them has given no sign of life for some time,
this process names the lost process and exits.

A killed process closes its connections, so the next collective fails at once. A process that is
stopped, or whose host or network is gone, closes no connections. Without the watch, the other
processes would then wait until the deadline of the collective.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Collection

import jax
from absl import logging
from jax.experimental import multihost_utils

from jaxrl_llm.core import script
from jaxrl_llm.core.errors import one_line
from jaxrl_llm.parallel.device import PeerFailed

_LOOKS = 8
"""Number of checks within `heartbeat_s` seconds."""
_FIRST_S = 2.0
"""Seconds that process 0 waits before it exits. Its exit aborts the other processes, which need
this time to name the lost process first.
"""


class PeerWatch:
  """Thread that compares the processes of the job with those that JAX's coordination service finds
  alive.

  Signs of life are sent only by JAX's own threads, so computations in Python do not delay them.
  """

  def __init__(self, heartbeat_s: float):
    """
    Args:
      heartbeat_s: seconds without a sign of life after which a process counts as lost, as in
        `jax.distributed.initialize`.
    """
    self._heartbeat_s = heartbeat_s
    self._stopped = threading.Event()
    self._devices = jax.devices()
    threading.Thread(target=self._look_always, name='peer watch', daemon=True).start()

  def stop(self) -> None:
    """Ends the watch. Every process must call this method before any process leaves the job."""
    self._stopped.set()

  def _look_always(self) -> None:
    wanted = {device.process_index for device in self._devices}
    while not self._stopped.wait(self._heartbeat_s / _LOOKS):
      lost = wanted - self._alive(wanted)
      if lost and not self._stopped.is_set():
        self._end(lost)

  def _alive(self, wanted: Collection[int]) -> set[int]:
    """Waits until every living process has also called this method. Returns the numbers of the
    living processes.
    """
    # If process 0 is lost, JAX itself ends this process. Print a warning shortly before this.
    late = threading.Timer(0.9 * self._heartbeat_s, self._warn)
    late.daemon = True
    if jax.process_index() > 0:
      late.start()
    try:
      # Wait 'peers': bounded by `heartbeat_s`, after which JAX drops a lost process.
      with multihost_utils.live_devices(self._devices) as alive:
        return {device.process_index for device in alive}
    except multihost_utils.ProcessFailureError as error:
      return set(wanted) - {device.process_index for device in error.failed_devices}
    except RuntimeError as error:
      if not self._stopped.is_set():
        logging.warning('Watch over the other processes: %s', one_line(error))
      return set(wanted)
    finally:
      late.cancel()

  def _warn(self) -> None:
    if not self._stopped.is_set():
      sys.stderr.write(
        f'process {jax.process_index()}: no answer from process 0 for {0.9 * self._heartbeat_s:g} '
        's; if JAX ends this process now, process 0 or its host is lost\n'
      )
      sys.stderr.flush()

  def _end(self, lost: Collection[int]) -> None:
    names = ', '.join(str(index) for index in sorted(lost))
    sys.stderr.write(
      f'run stopped: process {jax.process_index()}: no sign of life from process {names} for '
      f'{self._heartbeat_s:g} s (coordination.heartbeat_s): killed, stopped, or its host or '
      'network is gone; start the job again with the same command\n'
    )
    sys.stderr.flush()
    if jax.process_index() == 0:
      time.sleep(_FIRST_S)
    script.leave_at_once(PeerFailed.exit_code)
