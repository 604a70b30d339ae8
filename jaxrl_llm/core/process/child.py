"""Child processes that run under a guard.

Invariant: neither a child nor anything that it starts outlives this process
(`core.process.guard`).
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from jaxrl_llm.core.process import guard
from jaxrl_llm.core.waits import WaitExpired, ended

GUARD = pathlib.Path(guard.__file__)
_STOP_S = 45.0
"""Maximum seconds to wait for a guard to end. With the default grace period, a guard needs at most
5 s before SIGKILL and 30 s after it.
"""
_REAP_S = 10.0
"""Maximum seconds to wait for the exit code of a guard that has ended."""
LOG_BYTES = 64 << 20
"""Default maximum size in bytes of a child's log."""
_TAIL_BYTES = 1 << 20
"""Maximum number of bytes read from the end of a log."""
_GUARD_SAYS, _NOT_STARTED = 'guard:', ' cannot be started: '


class Child:
  """A child process with a guard: neither the child nor its descendants outlive this process.

  The child can be started again after it has ended.
  """

  def __init__(
    self,
    name: str,
    *,
    log: pathlib.Path,
    log_bytes: int = LOG_BYTES,
    remove: Sequence[pathlib.Path] = (),
    grace_s: float = 5.0,
  ):
    """
    Args:
      name: name of the child in messages.
      log: file to which the child's output is appended.
      log_bytes: approximate maximum size of this file in bytes. When the file is larger, only its
        end is kept.
      remove: files and directories that the guard removes if this process dies.
      grace_s: seconds between SIGTERM and SIGKILL.
    """
    self.name, self.log, self._log_bytes = name, log, log_bytes
    self._remove, self._grace_s = remove, grace_s
    self._guard: subprocess.Popen | None = None
    self._log_start = 0

  @property
  def pid(self) -> int | None:
    """Process ID of the guard, which is the parent of the command; None before `start` and after
    `stop`.
    """
    return self._guard.pid if self._guard else None

  @property
  def exit_code(self) -> int | None:
    """Exit code of the guard. Without an order to stop, it is the exit code of the command, or
    128 + N if signal N ended the command. After an order to stop, it is 0, or 1 if a process
    survived SIGKILL.

    None before `start`, while the command runs, and after `stop`.
    """
    return self._guard.poll() if self._guard else None

  def is_running(self) -> bool:
    return self._guard is not None and self._guard.poll() is None

  def start(
    self,
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    first_line: str = '',
    channel: socket.socket | None = None,
  ) -> None:
    """Starts `command` with the environment `env`; an earlier command must have ended.

    Args:
      first_line: line written to the log before the command's output.
      channel: socket to use as the command's stdin and stdout. The caller closes it after this
        call. The socket's other end reads end-of-file once no process of the command is left. If
        None, the command has no input, and its stdout goes to the log.
    """
    if self.is_running():
      raise RuntimeError(f'{self.name} is running')
    self._close_pipe()
    self.log.parent.mkdir(parents=True, exist_ok=True)
    with self.log.open('a') as log:
      log.write(f'{first_line}\n' if first_line else '')
    self._log_start = self.log.stat().st_size
    orphaned = [f'--remove_orphaned={path}' for path in self._remove]
    # -P keeps the guard from importing modules from its own directory.
    guard_command = [
      sys.executable,
      '-P',
      str(GUARD),
      f'--log={self.log}',
      f'--grace_s={self._grace_s:g}',
      f'--log_bytes={self._log_bytes}',
      *orphaned,
    ]
    self._guard = subprocess.Popen(
      [*guard_command, *(['--channel'] if channel else []), '--', *command],
      stdin=subprocess.PIPE,
      stdout=channel or subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      env=env,
      start_new_session=True,
    )

  def lines(self) -> list[str]:
    """Returns the last nonempty lines that were added to the log since the start.

    They are the command's output, or the guard's message that the command could not be started.
    """
    if not self.log.exists():
      return []
    with self.log.open('rb') as file:
      size = self.log.stat().st_size
      # If the log is now shorter than at the start, its beginning has been removed.
      start = self._log_start if self._log_start <= size else 0
      file.seek(max(start, size - _TAIL_BYTES))
      lines = [line.strip() for line in file.read().decode(errors='replace').splitlines()]
    return [
      line for line in lines if line and (_NOT_STARTED in line or not line.startswith(_GUARD_SAYS))
    ]

  def terminate(self) -> None:
    """Orders the guard to end the command, and returns at once.

    The guard kills processes that survive SIGTERM.
    """
    if self._guard is not None:
      # Keep the pipe open: if it were closed, the guard would conclude that this process has died.
      self._guard.terminate()

  async def wait(self) -> int:
    """Waits until the command has ended, without ordering a stop. Returns `exit_code`."""
    assert self._guard is not None, 'not started'
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    process = os.pidfd_open(self._guard.pid)
    loop.add_reader(process, ended.set)
    try:
      # Wait 'command': bounded by the caller.
      await ended.wait()
    finally:
      loop.remove_reader(process)
      os.close(process)
    return self._guard.wait(_REAP_S)

  async def stop(self, *, owner: str) -> None:
    """Ends the command and all processes that it started, and returns once they are gone.

    If this call is cancelled, the next call waits for processes that are still ending.

    Raises:
      WaitExpired: the guard did not end in time. It is then killed, and this object no longer
        tracks it.
    """
    if self._guard is None:
      return
    self.terminate()
    waits_for = f'the guard of {self.name} to end it (see {self.log})'
    try:
      await ended(
        self._guard, name='guarded_stop', owner=owner, waits_for=waits_for, deadline_s=_STOP_S
      )
    except WaitExpired:
      self._close_pipe()
      raise
    self._close_pipe()

  def _close_pipe(self) -> None:
    if self._guard is not None:
      self._guard.stdin.close()
      self._guard = None
