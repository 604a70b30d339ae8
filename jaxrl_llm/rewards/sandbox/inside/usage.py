"""Measures a program's processor time, and the time that it waits for a processor on a busy
machine.

Invariant: a program cannot make its own delays look like those of a busy machine. A thread of the
program waits for a processor only while the processor runs something else: either another thread of
the program, whose processor time counts against the program, or another process of the machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import resource

_TICK_S = 1 / os.sysconf('SC_CLK_TCK')
_NANO = 1e-9
_LEAST_WAIT, _MOST_IDLE = 0.1, 0.5
"""Fractions of the wall-clock limit. A program is starved of processor time if it waited for
processors for at least `_LEAST_WAIT` of the limit and slept for at most `_MOST_IDLE` of it.
"""


@dataclasses.dataclass(frozen=True)
class _Look:
  """Processor times of one process, as read at one moment. All values are in seconds."""

  used_s: float
  children_s: float
  """Processor time of ended child processes that the process has reaped."""
  thread_waited_s: float
  thread_used_s: float
  """Processor time of the thread that waited longest for a processor."""


class Usage:
  """Sums the processor time and the waits of all runs of one program.

  Args:
    proc: procfs directory.
    nice: nice value with which processes start. If None, the nice value of this process.

  Attributes:
    used_s: processor time of all processes in seconds.
  """

  def __init__(self, proc: str = '/proc', *, nice: int | None = None):
    self._proc = pathlib.Path(proc)
    self._nice = os.getpriority(os.PRIO_PROCESS, 0) if nice is None else nice
    self.used_s = 0.0
    self._before_s, self._reaped_s = 0.0, 0.0
    self._waited_before_s = 0.0
    self._seen: dict[tuple[int, int], _Look] = {}

  def look(self, pids: list[int]) -> None:
    """Records the processor time of the processes `pids` that are still alive."""
    living_s = 0.0
    for pid in pids:
      with contextlib.suppress(OSError, IndexError, ValueError):
        start, look = _look(self._proc / str(pid), self._nice)
        self._seen[pid, start] = look
        living_s += look.used_s + look.children_s
    # The kernel reports no usage for children that no process waits for. The last snapshots of such
    # children count instead.
    seen_s = sum(look.used_s for look in self._seen.values())
    self._raise_to(max(living_s + self._reaped_s, seen_s))

  def add_reaped(self, usage: resource.struct_rusage) -> None:
    """Records the processor time of an ended process and its children."""
    self._reaped_s += usage.ru_utime + usage.ru_stime
    self._raise_to(self._reaped_s)

  def _raise_to(self, run_s: float) -> None:
    self.used_s = max(self.used_s, self._before_s + run_s)

  def close_run(self) -> None:
    """Ends the measurement of one run. Later calls of `look` see the processes of the next run."""
    self._waited_before_s += self._waited_s()
    self._before_s, self._reaped_s = self.used_s, 0.0
    self._seen.clear()

  def _waited_s(self) -> float:
    """Returns the seconds for which the run waited for a processor that was used by other programs.

    A thread may also have waited for the run's other threads, so their processor time is subtracted
    from its wait. The result is the sum over the two processes with the longest waits: the tests'
    process and the program's process, which run in turn.
    """
    longest = sorted(self._seen.values(), key=lambda look: look.thread_waited_s)[-2:]
    run_s = self.used_s - self._before_s
    return sum(max(0.0, look.thread_waited_s - (run_s - look.thread_used_s)) for look in longest)

  def is_starved(self, wall_s: float) -> bool:
    """Returns whether a program reached its wall-clock limit because other processes used the
    processors.
    """
    waited_s = self._waited_before_s + self._waited_s()
    idle_s = wall_s - self.used_s - waited_s
    return waited_s >= _LEAST_WAIT * wall_s and idle_s <= _MOST_IDLE * wall_s


def _look(process: pathlib.Path, nice: int) -> tuple[int, _Look]:
  """Returns a process's start time and its snapshot. Raises OSError if the process no longer
  exists.
  """
  # The file is read as bytes, because it contains the process's name, which can be any bytes.
  fields = (process / 'stat').read_bytes().rpartition(b')')[2].split()
  user, system, child_user, child_system = (int(field) * _TICK_S for field in fields[11:15])
  # If the process has lowered its own priority or changed its scheduler, its waits do not count.
  polite = int(fields[16]) > nice or int(fields[38]) != os.sched_getscheduler(0)
  waited_s, used_s = (0.0, 0.0) if polite else _longest_wait(process)
  return int(fields[19]), _Look(user + system, child_user + child_system, waited_s, used_s)


def _longest_wait(process: pathlib.Path) -> tuple[float, float]:
  """Returns (seconds of waiting for a processor, seconds of using one) of the thread that has
  waited longest.
  """
  longest = 0.0, 0.0
  with contextlib.suppress(OSError):
    for thread in os.listdir(process / 'task'):
      used, waited, _ = map(int, (process / 'task' / thread / 'schedstat').read_text().split())
      longest = max(longest, (waited * _NANO, used * _NANO))
  return longest
