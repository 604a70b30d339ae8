"""Blame for a wall-clock limit that a program met: its own or the machine's, from the kernel's
accounts.
"""

import os

import pytest

from jaxrl_llm.rewards.sandbox.inside.usage import Usage

TICKS = os.sysconf('SC_CLK_TCK')
WALL_S = 10.0


class Processes:
  """A directory like /proc."""

  def __init__(self, directory):
    self._directory = directory
    self.usage = Usage(str(directory), nice=10)

  def look(self, *, children_s=0.0, nice=10, **threads_s):
    """One process for each argument, with (used, waited) seconds of each of its threads."""
    for pid, threads in enumerate(threads_s.values(), 2):
      place = self._directory / str(pid)
      used_s = sum(used for used, _ in threads)
      fields = ['0'] * 50
      fields[38] = str(os.sched_getscheduler(0))
      fields[11], fields[13], fields[16] = (
        str(round(used_s * TICKS)),
        str(round(children_s * TICKS)),
        str(nice),
      )
      place.mkdir(exist_ok=True)
      (place / 'stat').write_text(f'{pid} (a) b) {" ".join(fields)}')
      for thread, (used, waited) in enumerate(threads):
        (place / 'task' / str(thread)).mkdir(parents=True, exist_ok=True)
        (place / 'task' / str(thread) / 'schedstat').write_text(
          f'{round(used * 1e9)} {round(waited * 1e9)} 7'
        )
    self.usage.look(list(range(2, 2 + len(threads_s))))


@pytest.fixture
def processes(tmp_path):
  return Processes(tmp_path)


def test_the_time_of_all_processes_and_runs_is_added(processes):
  processes.look(a=[(1.0, 0.0), (0.5, 0.0)], b=[(0.25, 0.0)], children_s=2.0)
  assert processes.usage.used_s == pytest.approx(1.75 + 2 * 2.0)
  processes.usage.close_run()
  processes.look(a=[(1.0, 0.0)])
  assert processes.usage.used_s == pytest.approx(6.75)


def test_a_process_that_has_ended_unnoticed_counts_with_what_it_was_seen_to_use(processes):
  processes.look(a=[(1.0, 0.0)], b=[(2.0, 0.0)])
  processes.look(a=[(1.5, 0.0)])
  assert processes.usage.used_s == pytest.approx(3.5)


@pytest.mark.parametrize(
  ('threads', 'nice', 'starved'),
  [
    ({'a': [(3.0, 7.0)]}, 10, True),  # It had 30 % of a processor.
    ({'a': [(8.9, 1.1)]}, 10, True),  # With 1.1 s more it might have ended.
    ({'a': [(0.0, 0.1)]}, 10, False),  # It slept.
    ({'a': [(2.0, 2.0)]}, 10, False),  # It slept 6 s.
    ({'a': [(9.0, 0.5)]}, 10, False),
    ({'a': [(3.0, 7.0)]}, 19, False),  # It let others go first.
    ({'a': [(2.0, 4.0)], 'b': [(1.0, 3.0)]}, 10, True),  # A program and its tests, in turns.
    ({'a': [(0.5, 7.5)] * 16}, 10, False),  # Its own threads were in its way: 16 * 0.5 s.
    ({name: [(0.5, 7.5)] for name in 'abcdefghijklmnop'}, 10, False),
    ({'a': [(3.0, 3.0), (3.0, 3.0)]}, 10, False),  # Two threads on one processor.
  ],
)
def test_a_program_starved_only_where_others_had_the_processors(processes, threads, nice, starved):
  processes.look(nice=nice, **threads)
  assert processes.usage.is_starved(WALL_S) is starved


def test_waits_of_earlier_runs_count(processes):
  for _ in range(10):
    processes.look(a=[(0.5, 0.5)])
    processes.usage.close_run()
  assert processes.usage.is_starved(WALL_S)


def test_a_process_that_is_gone_is_passed_over(processes):
  processes.usage.look([12345])
  assert processes.usage.used_s == 0.0 and not processes.usage.is_starved(WALL_S)
