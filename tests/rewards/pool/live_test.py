"""More or fewer scorer processes and other addresses while calls are under way: none is lost or
made twice.
"""

import asyncio
import contextlib
import json
import os
import threading
import time
from collections import Counter
from concurrent.futures.process import BrokenProcessPool

import pebble
import pytest
from fixtures import rewards_scorers
from fixtures.rewards_scorers import attempt
from scoring import awaited, pool, started, using, using_simulated

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.records.score import Status
from jaxrl_llm.rewards.api import Awaited, Verdict
from jaxrl_llm.rewards.pool.live import CHECK_S, FILE, Live, LiveFile, parse


@pytest.mark.full
def test_a_resized_pool_answers_every_call_once(tmp_path):
  """50 calls have just been made each time that there are 1, 4, 2 and 3 processes instead."""
  log, calls = tmp_path / 'log', []

  async def use(one):
    for workers in (1, 4, 2, 3):
      more = [attempt(uid=f'u{len(calls) + i}', fields={'log': str(log)}) for i in range(50)]
      calls.extend(asyncio.create_task(one.score(a)) for a in more)
      await asyncio.sleep(0)
      await one.resize(workers)
      assert one.workers == workers
    return await asyncio.gather(*calls)

  scores = using(pool({'log': (rewards_scorers.log_uid, {})}, workers=2), use)
  assert [score.evidence['uid'] for (score,) in scores] == [f'u{i}' for i in range(200)]
  assert {score.status for (score,) in scores} == {Status.OK}
  assert Counter(log.read_text().split()) == Counter({f'u{i}': 1 for i in range(200)})


def test_calls_that_wait_go_to_the_new_processes_while_an_old_one_is_held_up(tmp_path):
  """The only worker waits for what comes after the calls behind it: more workers are the way
  out.
  """
  go, log = tmp_path / 'go', tmp_path / 'log'
  fields = {'awaited': str(go), 'log': str(log)}

  async def use(one):
    stuck = [
      asyncio.create_task(one.score(attempt(uid=f's{i}', domain='waits', fields=fields)))
      for i in range(2)
    ]
    behind = [
      asyncio.create_task(one.score(attempt(uid=f'u{i}', domain='length'))) for i in range(20)
    ]
    while not log.exists():
      await asyncio.sleep(0.01)
    await one.resize(2)
    answered = await asyncio.gather(*behind)
    assert not any(call.done() for call in stuck)
    go.touch()
    return answered, await asyncio.gather(*stuck)

  scorers = {
    name: (getattr(rewards_scorers, name), {'domains': (name,)}) for name in ('waits', 'length')
  }
  behind, stuck = using(pool(scorers, workers=1), use)
  assert [score.status for (score,) in (*behind, *stuck)] == [Status.OK] * 22
  assert log.read_text().split() == ['s0', 's1'], 'each was called once'


def log_and_spin(a):
  rewards_scorers.log_uid(a)
  return rewards_scorers.spin_in_c(a)


def test_closing_while_old_processes_still_work_leaves_none(tmp_path):
  log = tmp_path / 'log'

  async def main():
    async with started(pool({'spin': (log_and_spin, {})}, workers=1)) as one:
      call = asyncio.create_task(one.score(attempt(fields={'log': str(log)})))
      while not log.exists():
        await asyncio.sleep(0.01)
      await one.resize(2)
    with pytest.raises(UserError, match='after close'):
      await call

  asyncio.run(asyncio.wait_for(main(), 60))


def test_a_size_that_cannot_be_is_refused():
  with pytest.raises(UserError, match='0 workers, wanted at least 1'):
    asyncio.run(pool({'length': (rewards_scorers.length, {})}).resize(0))


def test_processes_that_do_not_start_leave_those_that_there_are(monkeypatch):
  def breaks(new):
    raise BrokenProcessPool('no memory')

  async def use(one):
    monkeypatch.setattr('jaxrl_llm.rewards.pool.processes._first_call', breaks)
    with pytest.raises(RunError, match=r'3 workers do not start \(no memory\); keeping 1'):
      await one.resize(3)
    return one.workers, await one.score(attempt('12'))

  workers, (score,) = using(pool({'length': (rewards_scorers.length, {})}, workers=1), use)
  assert (workers, score.value) == (1, 2.0)


class Judge:
  """Says which of its addresses a call went to, in turn."""

  def __init__(self):
    self.addresses, self.calls = ('http://first',), 0

  def set_addresses(self, addresses):
    if any('bad' in address for address in addresses):
      raise UserError(f"scorer 'judge': {addresses} has a bad one")
    self.addresses, self.calls = addresses, 0

  async def __call__(self, a):
    self.calls += 1
    return Verdict(value=1.0, evidence={'at': self.addresses[self.calls % len(self.addresses)]})


@contextlib.asynccontextmanager
async def a_judge():
  yield Judge()


async def plain(a):
  return Verdict(value=1.0)


def scorers():
  return {'judge': (Awaited(a_judge), {}), 'plain': (awaited(plain), {})}


def addresses_of(scores):
  return {score.evidence['at'] for of in scores for score in of if score.scorer == 'judge'}


def test_a_file_in_the_run_directory_changes_addresses_and_processes(tmp_path):
  file = tmp_path / FILE

  async def at(one):
    return addresses_of(await asyncio.gather(*(one.score(attempt()) for _ in range(4))))

  async def use(one):
    assert one.workers == 2 and await at(one) == {'http://first'}
    file.write_text(json.dumps({'addresses': {'judge': ['http://a', 'http://b']}}))
    while await at(one) != {'http://a', 'http://b'}:
      await asyncio.sleep(CHECK_S)
    assert one.workers == 2
    file.write_text(json.dumps({'workers': 5}))
    while one.workers != 5:
      await asyncio.sleep(CHECK_S)
    assert await at(one) == {'http://a', 'http://b'}, 'what the file does not name stays'
    file.unlink()
    await asyncio.sleep(3 * CHECK_S)
    assert one.workers == 5 and await at(one) == {'http://a', 'http://b'}

  using_simulated(pool(scorers(), live=file, workers=2), use)


def test_after_closing_nobody_looks_at_the_file(tmp_path):
  async def main():
    async with started(pool({'plain': (awaited(plain), {})}, live=tmp_path / FILE)):
      pass
    return asyncio.all_tasks() - {asyncio.current_task()}

  assert asyncio.run(main()) == set()


def test_the_file_counts_from_the_start(tmp_path):
  (tmp_path / FILE).write_text('{"workers": 3, "addresses": {"judge": ["http://a"]}}')

  async def use(one):
    return one.workers, addresses_of([await one.score(attempt())])

  assert using(pool(scorers(), live=tmp_path / FILE), use) == (3, {'http://a'})


@pytest.mark.parametrize(
  ('text', 'line'),
  [
    ('{"workers": 4', 'not JSON'),
    ('[4]', 'wanted an object'),
    ('[' * 100_000, 'not JSON'),
    ('{"wrokers": 4}', 'wanted an object with "workers", "addresses" or both'),
    ('{"workers": 0}', 'workers is 0, wanted'),
    ('{"workers": true}', 'workers is True, wanted'),
    ('{"workers": 4, "addresses": ["http://a"]}', 'addresses is'),
    ('{"workers": 4, "addresses": {"judge": []}}', 'addresses is'),
    ('{"workers": 4, "addresses": {"judge": "http://a"}}', 'addresses is'),
    (
      '{"workers": 4, "addresses": {"jugde": ["http://a"]}}',
      "addresses of 'jugde': wanted one of the scorers with addresses",
    ),
    (
      '{"workers": 4, "addresses": {"plain": ["http://a"]}}',
      "addresses of 'plain': wanted one of the scorers with addresses",
    ),
    ('{"workers": 4, "addresses": {"judge": ["bad"]}}', 'has a bad one'),
  ],
)
def test_a_file_that_is_none_changes_nothing_and_is_one_line(tmp_path, caplog, text, line):
  file = tmp_path / FILE
  file.write_text(text)

  async def use(one):
    found = one.workers, addresses_of([await one.score(attempt())])
    assert found == (1, {'http://first'})

  using(pool(scorers(), live=file), use)
  (told,) = [record.getMessage() for record in caplog.records if record.levelname == 'WARNING']
  assert (
    told.startswith(f'{file}: ')
    and told.endswith('; nothing was changed')
    and line in told
    and '\n' not in told
  )


def test_what_is_no_file_of_text_or_too_large_changes_nothing_and_is_one_line(tmp_path, caplog):
  file, applied = tmp_path / FILE, []

  async def use():
    live = LiveFile(file, lambda live: applied.append(live))
    for make in (
      lambda: os.mkfifo(file),
      file.mkdir,
      lambda: file.write_bytes(b'\xff'),
      lambda: file.write_text('1' * (1 << 21)),
    ):
      make()
      await live.check()
      file.rmdir() if file.is_dir() else file.unlink()

  asyncio.run(asyncio.wait_for(use(), 60))
  lines = [record.getMessage() for record in caplog.records if record.levelname == 'WARNING']
  assert len(lines) == 4 and not applied
  for line, told in zip(
    lines,
    ('is a FIFO, wanted a regular file', 'Is a directory', "codec can't decode", 'wanted at most'),
  ):
    assert told in line and line.endswith('; nothing was changed') and '\n' not in line


def test_a_file_of_which_a_part_is_refused_says_what_has_changed_all_the_same(tmp_path, caplog):
  file = tmp_path / FILE
  file.write_text(
    '{"workers": 4, "addresses": {"judge": ["http://a"], "other": ["bad"], "last": ["http://a"]}}'
  )

  async def use(one):
    return one.workers, [score.evidence['at'] for score in await one.score(attempt())]

  judges = {name: (Awaited(a_judge), {}) for name in ('judge', 'other', 'last')}
  assert using(pool(judges, live=file), use) == (1, ['http://a', 'http://first', 'http://first'])
  (told,) = [record.getMessage() for record in caplog.records if record.levelname == 'WARNING']
  assert (
    "has a bad one; only the addresses of ['judge'] were changed" in told and 'nothing' not in told
  )


def test_a_call_that_ends_with_its_old_process_while_the_loop_is_busy_is_not_made_again(
  tmp_path, monkeypatch
):
  monkeypatch.setattr('jaxrl_llm.rewards.pool.processes.CHECK_S', 0.01)
  log, go, told = tmp_path / 'log', tmp_path / 'go', threading.Event()
  active, close = pebble.ProcessPool.active.fget, pebble.ProcessPool.close
  monkeypatch.setattr(pebble.ProcessPool, 'close', lambda self: (close(self), told.set()))

  def held_up(self):
    """What the loop finds that was busy from its wake-up until the call was answered and its pool
    had ended.
    """
    if threading.current_thread() is threading.main_thread():
      monkeypatch.setattr(pebble.ProcessPool, 'active', property(active))
      go.touch()
      until = time.monotonic() + 30.0
      while active(self) and time.monotonic() < until:
        time.sleep(0.01)
    return active(self)

  async def use(one):
    call = asyncio.create_task(one.score(attempt(fields={'log': str(log), 'awaited': str(go)})))
    while not log.exists():
      await asyncio.sleep(0.01)
    await one.resize(2)
    assert await asyncio.to_thread(told.wait, 30.0), 'the old pool is told to end'
    monkeypatch.setattr(pebble.ProcessPool, 'active', property(held_up))
    return await call

  (score,) = using(pool({'waits': (rewards_scorers.waits, {})}, workers=1), use)
  assert (score.status, log.read_text().split()) == (Status.OK, ['u'])


def test_a_file_is_applied_once_for_each_time_it_changes(tmp_path):
  file, seen = tmp_path / FILE, []

  async def apply(live):
    seen.append(live)

  async def main():
    live = LiveFile(file, apply)
    for text in (
      None,
      '{"workers": 2}',
      None,
      '{"workers": 3}',
      None,
      '{"workers": ',
      '{"workers": 4}',
    ):
      if text is not None:
        written = file.with_suffix('.tmp')
        written.write_text(text)
        written.rename(file)
      await live.check()

  asyncio.run(main())
  assert seen == [Live(workers=2), Live(workers=3), Live(workers=4)]


def test_both_keys_are_read():
  wanted = Live(workers=4, addresses={'judge': ('http://a', 'http://b')})
  assert parse('{"workers": 4, "addresses": {"judge": ["http://a", "http://b"]}}') == wanted
