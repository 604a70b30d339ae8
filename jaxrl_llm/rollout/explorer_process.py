"""An explorer of this machine as a process: started under a guard, watched, started again, ended."""

from __future__ import annotations

import os
import pathlib
import secrets
import subprocess
import sys
import time

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.rollout.server import GUARD, stopped

_MAX_FAILURES = 3
_AGAIN_WITHIN_S = 60.0
_LAST_LINE = 400
_TAIL_BYTES = 8192


class ExplorerProcess:
  """One explorer process."""

  def __init__(self, name: str, address: str, logs: pathlib.Path):
    """
    Args:
      name: its name in the log and in messages.
      address: of the master, `unix:PATH`; the socket's folder goes too when this process dies without a word.
      logs: directory of its log.
    """
    self.name, self._address, self._log = name, address, logs / f'{name}.log'
    self.identity = f'{name}.{secrets.token_hex(4)}'
    """Name by which it speaks to the master; no host has it."""
    self._process: subprocess.Popen | None = None
    self._started: list[float] = []
    self._log_start = 0

  def start(self) -> None:
    """Under the guard: it ends with this process, however that ends."""
    self._log.parent.mkdir(parents=True, exist_ok=True)
    self._log_start = self._log.stat().st_size if self._log.exists() else 0
    self._started.append(time.monotonic())
    # Modules are found where the run finds them, beside its configuration too.
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(path for path in sys.path if path)}
    folder = pathlib.Path(self._address.removeprefix('unix:')).parent
    names = (f'--master={self._address}', f'--name={self.identity}')
    explore = [sys.executable, '-P', '-m', 'jaxrl_llm.app.explore', *names]
    guard = [sys.executable, '-P', str(GUARD), f'--log={self._log}', f'--remove_orphaned={folder}', '--grace_s=1']
    self._process = subprocess.Popen(
      [*guard, '--', *explore],
      stdin=subprocess.PIPE,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      env=environment,
      start_new_session=True,
    )

  def start_again(self) -> None:
    """Raises RunError where it has just ended several times."""
    if len(self._started) > _MAX_FAILURES and time.monotonic() - self._started[-_MAX_FAILURES] < _AGAIN_WITHIN_S:
      raise RunError(
        f'explorers: {self.name} ended {_MAX_FAILURES + 1} times within {_AGAIN_WITHIN_S:g} s; its last line, of '
        f'{self._log}: {self.last_line()}'
      )
    self._process.stdin.close()
    self.start()

  def is_running(self) -> bool:
    return self._process.poll() is None

  def terminate(self) -> None:
    """Asks the guard to end the explorer; the guard kills whatever survives SIGTERM."""
    self._process.terminate()

  def last_line(self) -> str:
    """The last line that it has printed since its start."""
    if not self._log.exists():
      return 'it said nothing'
    with self._log.open('rb') as file:
      file.seek(max(self._log_start, self._log.stat().st_size - _TAIL_BYTES))
      lines = file.read().decode(errors='replace').splitlines()
    told = [line.strip() for line in lines if line.strip() and not line.startswith('guard:')]
    return told[-1][-_LAST_LINE:] if told else 'it said nothing'

  async def stop(self) -> None:
    """Ends the explorer; the guard kills whatever does not end by itself. Raises WaitExpired if the guard is stuck."""
    if self._process is None:
      return
    self._process.terminate()
    try:
      await stopped(self._process, owner='the run', what=f'explorer {self.name}', log=self._log)
    finally:
      self._process.stdin.close()
