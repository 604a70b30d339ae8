"""Groups that are stored in a thread: their order, their errors, and calls that are cancelled."""

import asyncio
import threading

import pytest

from jaxrl_llm.master.exploring.settling import Settling

LONG = 1 << 20


def test_groups_are_stored_and_concluded_in_order_and_short_ones_wait_for_the_others():
  seen, threads, may_store = [], set(), threading.Event()

  def store(name):
    threads.add(threading.get_ident())
    assert may_store.wait(30)
    seen.append(f'store {name}')

  async def check():
    settling = Settling()

    async def settle(name, tokens=LONG):
      await settling.settle(tokens, lambda: store(name), lambda: seen.append(f'conclude {name}'))

    long = [asyncio.create_task(settle(name)) for name in 'ab']
    await asyncio.sleep(0)
    assert not seen
    may_store.set()
    await settle('c', tokens=1)
    assert seen[-2:] == ['store c', 'conclude c']
    assert [each for each in seen if 'conclude' in each] == [f'conclude {name}' for name in 'abc']
    await asyncio.gather(*long)
    settling.close()

  asyncio.run(check())
  assert len(threads) == 2 and threading.get_ident() in threads


@pytest.mark.parametrize('where', ['store', 'conclude'])
def test_an_error_is_that_of_its_group_alone(where):
  async def check():
    settling, done = Settling(), []

    def fail():
      raise ValueError(where)

    failing = {'store': (fail, done.clear), 'conclude': (done.clear, fail)}[where]
    results = await asyncio.gather(
      settling.settle(LONG, *failing),
      settling.settle(LONG, lambda: done.append(1), lambda: done.append(2)),
      return_exceptions=True,
    )
    assert repr(results[0]) == f"ValueError('{where}')" and results[1] is None and done == [1, 2]
    settling.close()

  asyncio.run(check())


@pytest.mark.parametrize('end', ['finish', 'close'])
def test_a_group_whose_call_is_cancelled_is_stored_and_concluded(end):
  async def check():
    settling, done, may_store = Settling(), [], threading.Event()

    def store():
      assert may_store.wait(30)
      done.append('stored')

    call = asyncio.create_task(settling.settle(LONG, store, lambda: done.append('concluded')))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert call.cancelled() and not done
    may_store.set()
    getattr(settling, end)()
    assert done == ['stored', 'concluded']

  asyncio.run(check())


@pytest.mark.parametrize('when', ['before it is stored', 'after it is stored'])
def test_an_error_in_storing_a_group_whose_call_is_cancelled_is_raised_at_the_end(when):
  async def check():
    settling, is_cancelled, done = Settling(), threading.Event(), []

    def store():
      assert when == 'after it is stored' or is_cancelled.wait(30)
      raise ValueError('the disk is full')

    call = asyncio.create_task(settling.settle(LONG, store, lambda: done.append('concluded')))
    await asyncio.sleep(0)
    if when == 'after it is stored':
      settling.finish()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert call.cancelled()
    is_cancelled.set()
    with pytest.raises(ValueError, match='the disk is full'):
      settling.close()
    assert not done
    settling.close()  # The error has been raised.

  asyncio.run(check())
