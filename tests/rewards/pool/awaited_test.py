"""Scorers on the event loop: a hung, raising or stubborn one costs its own scores, and no worker is
held for it.
"""

import asyncio
import contextlib
import json
import multiprocessing
import sys

import pytest
from clocks import simulated
from fixtures import rewards_scorers
from fixtures.rewards_scorers import attempt
from scoring import awaited, pool, started, using, using_simulated

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.records.score import Status
from jaxrl_llm.rewards.api import Awaited, Verdict


async def length(a):
  await asyncio.sleep(0)
  return Verdict(value=float(len(a.completion)), parts={'half': len(a.completion) / 2})


def scores_of(call, *, deadline_s=60.0, **fields):
  """The score of one call, after showing that the next scorer still answers; and the counts."""

  async def use(one):
    bad, good = await one.score(attempt('12345'))
    assert (good.status, good.value, good.parts) == (Status.OK, 5.0, {'half': 2.5})
    return bad, one.counts

  scorers = {
    'bad': (awaited(call, **fields), {'deadline_s': deadline_s}),
    'good': (awaited(length), {}),
  }
  return using_simulated(pool(scorers), use)


def test_awaited_scorers_need_no_process():
  async def use(one):
    assert multiprocessing.active_children() == []
    return await one.score(attempt('123'))

  (score,) = using_simulated(pool({'length': (awaited(length), {})}), use)
  assert (score.value, score.scorer, score.uid) == (3.0, 'length', 'u')


def test_it_is_opened_once_and_closed_by_the_task_that_opened_it():
  told = []

  @contextlib.asynccontextmanager
  async def opened():
    told.append(('opened', asyncio.current_task()))
    yield length
    told.append(('closed', asyncio.current_task()))

  async def use(one):
    assert [what for what, _ in told] == ['opened']
    await asyncio.gather(*(one.score(attempt()) for _ in range(3)))

  using_simulated(pool({'length': (Awaited(opened), {})}), use)
  (first, opener), (last, closer) = told
  assert (first, last) == ('opened', 'closed') and opener is closer


def test_no_more_calls_are_under_way_than_it_permits():
  under_way, most = 0, 0

  async def call(a):
    nonlocal under_way, most
    under_way += 1
    most = max(most, under_way)
    await asyncio.sleep(0.001)
    under_way -= 1
    return Verdict(value=1.0)

  async def use(one):
    await asyncio.gather(*(one.score(attempt()) for _ in range(20)))

  using_simulated(pool({'few': (awaited(call, concurrency=3), {})}), use)
  assert (most, under_way) == (3, 0)


async def hangs(a):
  await asyncio.sleep(3600)


async def swallows_its_cancellation(a):
  for _ in range(5):
    with contextlib.suppress(asyncio.CancelledError):
      await asyncio.sleep(0.2)
  return Verdict(value=1.0)


@pytest.mark.parametrize('call', [hangs, swallows_its_cancellation])
def test_one_that_is_still_at_it_at_its_deadline_is_given_up(call):
  score, counts = scores_of(call, deadline_s=0.05)
  assert (score.status, score.value, score.time) == (Status.TIMEOUT, None, 0.05)
  assert score.evidence == {
    'error': 'ran past its deadline of 0.05 s',
    'caused_by': 'scorer',
    'calls': 1,
  }
  assert (
    counts['timeout']
    == counts['bad/timeout']
    == counts['bad/unscorable']
    == counts['unscorable']
    == 1
  )


async def raises(a):
  raise KeyError(a.completion)


async def times_out_itself(a):
  raise TimeoutError('of its own')


async def exits(a):
  raise SystemExit(0)


async def cancels_itself(a):
  asyncio.current_task().cancel()
  await asyncio.sleep(1)


class Panic(BaseException):
  """As libraries in Rust have it."""


async def panics(a):
  raise Panic('in Rust')


async def raises_mutely(a):
  raise rewards_scorers.Mute


async def infinite(a):
  return Verdict(value=float('inf'))


async def infinite_part(a):
  return Verdict(value=1.0, parts={'share': float('inf')})


async def huge(a):
  return Verdict(value=1e308)


async def huge_part(a):
  return Verdict(value=None, parts={'share': -1e10})


async def huge_turn(a):
  return Verdict(value=1.0, turn_values=(0.0, 1e308))


async def deep(a):
  return Verdict(value=1.0, evidence={'a': json.loads('[' * 500 + ']' * 500)})


def is_no_coroutine(a):
  return 1.0


@pytest.mark.parametrize(
  ('call', 'text'),
  [
    (raises, "KeyError: '12345'"),
    (times_out_itself, 'TimeoutError: of its own'),
    (exits, 'SystemExit: 0'),
    (cancels_itself, 'CancelledError: '),
    (panics, 'Panic: in Rust'),
    (raises_mutely, 'Mute, which cannot be printed (AttributeError)'),
    (infinite, 'ValueError: scorer returned value inf'),
    (infinite_part, "ValueError: scorer returned value 1.0, parts {'share': inf}"),
    (
      huge,
      'ValueError: scorer returned value 1e+308, parts {} and turns (), wanted finite numbers of '
      'at most',
    ),
    (huge_part, "ValueError: scorer returned value None, parts {'share': -10000000000.0}"),
    (huge_turn, 'ValueError: scorer returned value 1.0, parts {} and turns (0.0, 1e+308)'),
    (deep, 'ValueError: nested more than 100 levels'),
    (is_no_coroutine, "TypeError: object float can't be used in 'await' expression"),
  ],
)
def test_what_it_raises_or_returns_wrongly_is_an_error_with_its_text(call, text):
  score, counts = scores_of(call)
  assert (score.status, score.value) == (Status.ERROR, None)
  assert score.evidence['error'].startswith(text)
  assert counts['bad/error'] == counts['error'] == 1


def test_the_wait_for_a_free_place_does_not_count():
  async def slow(a):
    await asyncio.sleep(0.2)
    return Verdict(value=1.0)

  async def use(one):
    return await asyncio.gather(*(one.score(attempt()) for _ in range(8)))

  scores = using_simulated(pool({'slow': (awaited(slow, concurrency=1), {'deadline_s': 1.2})}), use)
  assert [score.status for (score,) in scores] == [Status.OK] * 8


def test_closing_ends_calls_that_are_out():
  async def main():
    one = pool({'hangs': (awaited(hangs), {})})
    async with started(one):
      call = asyncio.create_task(one.score(attempt()))
      await asyncio.wait({call}, timeout=0.02)
    with pytest.raises(RunError, match='was closed while a call was in progress'):
      await call
    with pytest.raises(RunError, match='after close'):
      await one.score(attempt())
    assert len(asyncio.all_tasks()) <= 2

  simulated(main())


def test_one_that_does_not_close_is_left_and_said_so(caplog, monkeypatch):
  monkeypatch.setattr('jaxrl_llm.rewards.pool.awaited.CLOSE_DEADLINE_S', 0.05)

  @contextlib.asynccontextmanager
  async def stays():
    yield length
    await asyncio.sleep(3600)

  async def main():
    async with started(pool({'stays': (Awaited(stays), {})})):
      pass
    await asyncio.sleep(0)
    return len(asyncio.all_tasks())

  assert simulated(main()) <= 2
  (told,) = [record.getMessage() for record in caplog.records]
  assert told == 'Scorer stays did not close within 0.05 s: left open'


def test_cancelling_a_call_cancels_the_scorers():
  async def use(one):
    call = asyncio.create_task(one.score(attempt()))
    await asyncio.wait({call}, timeout=0.02)
    call.cancel()
    await asyncio.wait({call})
    await asyncio.sleep(0)
    return [task for task in asyncio.all_tasks() if 'hangs' in repr(task) or '_judge' in repr(task)]

  assert using_simulated(pool({'hangs': (awaited(hangs), {})}), use) == []


def test_one_that_cannot_be_opened_is_one_line():
  @contextlib.asynccontextmanager
  async def refused():
    raise ConnectionRefusedError('nobody there')
    yield

  @contextlib.asynccontextmanager
  async def misused():
    raise UserError("scorer 'judge': no address")
    yield

  @contextlib.asynccontextmanager
  async def leaves():
    sys.exit('for good')
    yield

  @contextlib.asynccontextmanager
  async def gives_up():
    raise asyncio.CancelledError('its own')
    yield

  @contextlib.asynccontextmanager
  async def panics():
    raise Panic('in Rust')
    yield

  for opened, line in [
    (refused, r'scorer judge: could not be opened \(ConnectionRefusedError: nobody there\)'),
    (gives_up, r'scorer judge: could not be opened \(RuntimeError: CancelledError: its own\)'),
    (panics, r'scorer judge: could not be opened \(RuntimeError: Panic: in Rust\)'),
    (leaves, r'scorer judge: could not be opened \(RuntimeError: SystemExit: for good\)'),
    (misused, "scorer 'judge': no address"),
  ]:
    with pytest.raises(UserError, match=line):
      using_simulated(pool({'judge': (Awaited(opened), {})}), lambda one: one.score(attempt()))


def test_one_that_opens_when_nobody_waits_for_it_any_more_is_closed_in_silence(caplog):
  told = []

  @contextlib.asynccontextmanager
  async def slow():
    await asyncio.sleep(0.1)
    yield length
    told.append('closed')

  async def main():
    one = pool({'slow': (Awaited(slow), {})})
    starting = asyncio.create_task(one.start())
    await asyncio.wait({starting}, timeout=0.02)
    starting.cancel()
    await asyncio.wait({starting})
    await one.close()

  simulated(main())
  assert told == ['closed'] and [record.getMessage() for record in caplog.records] == []


def test_it_sits_among_those_in_workers_in_the_configurations_order():
  async def use(one):
    return await one.score(attempt('1234'))

  scores = using(
    pool(
      {'b': (awaited(length), {}), 'a': (rewards_scorers.length, {}), 'c': (awaited(raises), {})}
    ),
    use,
  )
  assert [(s.scorer, s.status, s.value) for s in scores] == [
    ('b', Status.OK, 4.0), ('a', Status.OK, 4.0), ('c', Status.ERROR, None)
  ]  # fmt: skip
