"""Coroutines in the background loop: their results, and their ends when the caller is cancelled."""

import asyncio
import threading

import pytest

from jaxrl_llm.core import background


async def fail():
  raise ValueError('no')


def test_results_and_errors_are_passed_on():
  async def main():
    loop = background.responses()
    assert await loop.run(asyncio.sleep(0, 'done')) == 'done'
    with pytest.raises(ValueError, match='no'):
      await loop.run(fail())

  asyncio.run(main())


def test_a_function_is_called_in_the_other_loop():
  def divide(count, by):
    return count / by, threading.current_thread().name

  async def main():
    loop = background.responses().loop
    assert await background.call_in(loop, divide, 6, by=2) == (3, 'responses')
    with pytest.raises(ZeroDivisionError):
      await background.call_in(loop, divide, 6, by=0)
    here = threading.current_thread().name
    assert await background.call_in(asyncio.get_running_loop(), divide, 6, by=2) == (3, here)

  asyncio.run(main())


def test_results_for_callers_that_are_gone_are_dropped(caplog):
  """The callers are cancelled, or their loops are closed."""
  goes_on, called = threading.Event(), threading.Event()

  def wait():
    goes_on.wait()
    called.set()
    raise ValueError('no')

  async def main():
    calling = asyncio.create_task(background.call_in(background.responses().loop, wait))
    await asyncio.sleep(0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
      await calling

  asyncio.run(main())
  goes_on.set()
  assert called.wait(30)
  asyncio.run(background.responses().run(asyncio.sleep(0)))  # The loop works on.
  assert not caplog.records


def test_a_daemon_thread_ends_quietly_if_its_caller_was_cancelled(monkeypatch):
  begun, goes_on, threads, errors = threading.Event(), threading.Event(), [], []

  def wait():
    threads.append(threading.current_thread())
    begun.set()
    goes_on.wait()

  async def main():
    calling = background.in_daemon_thread(wait)
    assert begun.wait(30)
    calling.cancel()
    await asyncio.wait([calling])

  monkeypatch.setattr(threading, 'excepthook', errors.append)
  asyncio.run(main())
  goes_on.set()
  threads[0].join(30)
  assert not errors and not threads[0].is_alive()


@pytest.mark.parametrize('fails', [False, True])
def test_a_cancelled_call_returns_after_the_end_of_its_coroutine(fails):
  seen = []

  async def work(begun):
    try:
      begun.get_loop().call_soon_threadsafe(begun.set_result, None)
      await asyncio.sleep(60)
    finally:
      await asyncio.sleep(0.1)
      seen.append('ended')
      if fails:
        raise ValueError('no')

  async def main():
    begun = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(background.responses().run(work(begun)))
    await begun
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    assert seen == ['ended']

  asyncio.run(main())


def test_a_call_may_be_cancelled_before_its_coroutine_begins():
  async def main():
    task = asyncio.create_task(background.responses().run(asyncio.sleep(60)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await asyncio.wait_for(task, 3)

  asyncio.run(main())


@pytest.mark.parametrize('error', [None, ValueError('no')])
def test_a_cancelled_call_to_the_end_lasts_until_its_function_has_ended(error):
  begun, goes_on, ended = threading.Event(), threading.Event(), []

  def work():
    begun.set()
    assert goes_on.wait(30)
    ended.append(True)
    if error is not None:
      raise error

  async def main():
    calling = asyncio.create_task(background.by_length_to_end(4000, work))
    await asyncio.to_thread(begun.wait)
    for _ in range(2):
      calling.cancel()
      assert not (await asyncio.wait([calling], timeout=0.02))[0] and not ended
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
      await calling
    assert ended

  asyncio.run(main())
