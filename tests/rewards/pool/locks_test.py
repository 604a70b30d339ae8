"""A lock between processes that is not a file: nothing of it is left where all that use it are
killed.
"""

import asyncio
import collections
import multiprocessing
import pathlib
import threading
import time

import pytest
from fixtures.rewards_scorers import length

from jaxrl_llm.rewards.pool.locks import NamelessLocks
from jaxrl_llm.rewards.pool.processes import Workers


def count_up(lock, file: str, times: int) -> None:
  """Reads and writes a number, which loses counts where others do so at the same time."""
  path = pathlib.Path(file)
  for _ in range(times):
    with_lock(lock, lambda: path.write_text(str(int(path.read_text()) + 1)))


def with_lock(lock, act) -> None:
  assert lock.acquire() and lock.acquire()  # reentrant
  act()
  lock.release()
  lock.release()


def in_dev_shm() -> list[str]:
  """What of /dev/shm this process has mapped: its semaphores, though not under their names."""
  return [
    line for line in pathlib.Path('/proc/self/maps').read_text().splitlines() if '/dev/shm/' in line
  ]


def in_thread(act):
  results = []
  thread = threading.Thread(target=lambda: results.append(act()))
  thread.start()
  thread.join(60)
  return results[0]


def test_one_holds_it_at_a_time_as_often_as_it_likes():
  lock = NamelessLocks().RLock()
  assert lock.acquire() and lock.acquire(block=False)
  assert not in_thread(lambda: lock.acquire(block=False))
  lock.release()
  started = time.monotonic()
  assert not in_thread(lambda: lock.acquire(timeout=0.05)), 'it was taken twice and released once'
  assert time.monotonic() - started >= 0.05
  lock.release()
  assert in_thread(lambda: lock.acquire(timeout=60))


def test_who_waits_gets_it_when_it_is_released():
  lock, got = NamelessLocks().RLock(), threading.Event()
  lock.acquire()
  waiting = threading.Thread(target=lambda: (lock.acquire(), got.set()))
  waiting.start()
  assert not got.is_set()
  lock.release()
  assert got.wait(60)
  waiting.join(60)


def test_only_its_holder_releases_it():
  lock = NamelessLocks().RLock()
  with pytest.raises(RuntimeError, match='not held by this thread'):
    lock.release()
  lock.acquire()

  def release():
    with pytest.raises(RuntimeError, match='not held by this thread'):
      lock.release()
    return True

  assert in_thread(release)


def test_processes_exclude_each_other(tmp_path):
  context, file = NamelessLocks(), tmp_path / 'number'
  file.write_text('0')
  lock = context.RLock()
  started = [context.Process(target=count_up, args=(lock, str(file), 300)) for _ in range(2)]
  for process in started:
    process.start()
  count_up(lock, str(file), 300)
  for process in started:
    process.join(60)
  assert file.read_text() == '900'


def test_scorer_processes_have_no_semaphores_that_a_kill_would_leave():
  async def check():
    before = in_dev_shm()
    counts = collections.Counter()
    workers = Workers(
      {'length': length},
      count=2,
      memory_limit_bytes=0,
      environment=(),
      longest_s=60.0,
      counts=counts,
    )
    try:
      await workers.start()
      assert set(in_dev_shm()) <= set(before)
    finally:
      await workers.close()
    named = multiprocessing.get_context('forkserver').RLock()
    assert in_dev_shm() != before, f'this is how one shows: {named}'

  asyncio.run(check())
