"""Device thread: the only thread that runs programs on a process's devices, so that device work
never blocks the event loop. As an exception, the loader places arrays from a separate thread, and
so does the transfer of published files to a server that comes back during training.

If a collective fails because another process is gone, PeerFailed is raised in place of the
runtime's own error.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.waits import bounded
from jaxrl_llm.parallel.coordination import CoordinationConfig

_TRANSPORT = ('Gloo', 'NCCL', 'UNAVAILABLE', 'closed by peer', 'reset by peer', 'heartbeat')
"""Substrings that identify runtime errors caused by the loss of another process. The types of these
errors differ between platforms.
"""


class PeerFailed(RunError):
  """Raised when another process of the job has failed or disappeared, while this process is
  healthy.
  """

  exit_code = 75
  """EX_TEMPFAIL, which tells a supervisor that the cause is in another process."""


class DeviceThread:
  """Runs device work in the order of submission. All processes submit collectives in the same
  order, so the collectives of different processes match.

  Work that dispatches many programs must wait for earlier ones, so that fewer than 32 are in
  flight. That is the limit of a CPU device. If a process has several CPU devices and the programs
  contain collectives, JAX 0.10 can deadlock at this limit, though 0.12 does not: the threads that
  could run a program wait to dispatch another one.
  """

  def __init__(self, *, deadline_s: float = CoordinationConfig.device_s):
    """
    Args:
      deadline_s: maximum duration of a call in seconds, in a job of several processes. With one
        process there is no limit.
    """
    self._deadline_s = deadline_s
    self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='device')

  async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs `function(*args, **kwargs)` on the device thread and returns its result.

    Raises:
      PeerFailed: another process of the job is gone.
      WaitExpired: in a job of several processes, the call has taken longer than `deadline_s`,
        because another process is stuck.
    """
    work = functools.partial(function, *args, **kwargs)
    call = asyncio.get_running_loop().run_in_executor(self._executor, work)
    try:
      if jax.process_count() == 1:
        return await call  # Wait 'device': bounded by the computation of this single process.
      return await bounded(
        call,
        name='device',
        owner=f'process {jax.process_index()}',
        waits_for=(
          'its device work, which needs the other processes of the job to reach the same collective'
        ),
        deadline_s=self._deadline_s,
      )
    except (ValueError, jax.errors.JaxRuntimeError) as error:
      if jax.process_count() == 1 or not any(sign in str(error) for sign in _TRANSPORT):
        raise
      raise PeerFailed(
        f'process {jax.process_index()}: another process of the job is gone '
        f'({str(error).splitlines()[0][:200]}); its own message says why; start the job again with '
        'the same command'
      ) from error

  def close(self) -> None:
    """Waits for the work in progress and cancels queued work."""
    # Wait 'device': unbounded for a single process, which waits for its own computation.
    self._executor.shutdown(wait=True, cancel_futures=True)
