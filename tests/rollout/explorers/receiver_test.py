"""Messages that are received in another event loop than the one that answers them."""

import asyncio
import contextlib
import threading

import pytest

from jaxrl_llm.core import background
from jaxrl_llm.core.net.client import Lost
from jaxrl_llm.core.net.listener import listening
from jaxrl_llm.rollout.explorers import receiver, wire
from jaxrl_llm.rollout.explorers.explorer import Evicted, Link, Rejected
from jaxrl_llm.rollout.explorers.receiver import Receiver, Reply

ANSWERED, STREAMED, DELIVERED = wire.HELLO, wire.GENERATE, wire.DELIVER


@contextlib.asynccontextmanager
async def linked(answer=None, stream=None, local=None):
  """Link to a receiver in the background loop. `answer` and `stream` answer its messages in this
  loop.
  """
  application = Receiver({ANSWERED: answer}, {STREAMED: stream}, local).application
  listener = listening(application, name='test', front=None, routes=())
  async with asyncio.timeout(30), background.messages().entered(listener) as (address, _):
    link = Link(address, key=None, ca_file=None, name='a')
    try:
      yield link
    finally:
      await link.close()


async def streamed(link, **body):
  return [value async for value in link.stream(STREAMED, **body)]


def test_a_message_is_read_in_another_thread_and_answered_in_this_one(monkeypatch):
  reading, answering = [], []
  read = receiver.parse_msgpack

  def parse(data):
    reading.append(threading.current_thread().name)
    return read(data)

  async def answer(sender, body):
    answering.append((threading.get_ident(), sender.partition('/')[0]))
    return Reply([body['count'] + 1])

  async def stream(sender, body, send):
    answering.append((threading.get_ident(), sender.partition('/')[0]))
    for i in range(body['count']):
      send([i])
    send(None)
    return Reply()

  async def check():
    async with linked(answer, stream) as link:
      assert await link.call(ANSWERED, count=2) == [3]
      assert await streamed(link, count=3) == [[0], [1], [2]]

  monkeypatch.setattr(receiver, 'parse_msgpack', parse)
  asyncio.run(check())
  assert reading == ['messages'] * 2 and answering == [(threading.get_ident(), 'a')] * 2


def test_a_local_answer_is_given_in_the_receivers_thread():
  answering = []

  async def answer(sender, body):
    answering.append(threading.current_thread().name)
    return Reply([body['count'] + 1]) if body['count'] else Reply(status=410, error='no')

  async def check():
    async with linked(local={DELIVERED: answer}) as link:
      assert await link.call(DELIVERED, count=2) == [3]
      with pytest.raises(Rejected, match='no'):
        await link.call(DELIVERED, count=0)

  asyncio.run(check())
  assert answering == ['messages'] * 2


def test_a_local_answer_goes_on_if_its_explorer_disconnects():
  begun, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

  async def answer(sender, body):
    begun.set()
    while not goes_on.is_set():
      await asyncio.sleep(0.01)
    ended.set()
    return Reply()

  async def check():
    async with linked(local={DELIVERED: answer}) as link:
      calling = asyncio.create_task(link.call(DELIVERED))
      assert await asyncio.to_thread(begun.wait, 30)
      calling.cancel()
      await asyncio.wait([calling])
      await asyncio.sleep(0.2)
      goes_on.set()
      assert await asyncio.to_thread(ended.wait, 30)

  asyncio.run(check())


def test_both_kinds_of_messages_can_be_refused():
  async def refuse(sender, body, *_):
    return Reply(status=body['status'], error='no')

  async def check():
    async with linked(refuse, refuse) as link:
      for status, kind in ((410, Rejected), (wire.EVICTED, Evicted)):
        for call in (link.call(ANSWERED, status=status), streamed(link, status=status)):
          with pytest.raises(kind, match='no'):
            await call

  asyncio.run(check())


def test_a_stream_whose_explorer_disconnects_is_cancelled():
  async def check():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def stream(sender, body, send):
      begun.set()
      try:
        await asyncio.sleep(60)
      finally:
        ended.set()

    async with linked(stream=stream) as link:
      asking = asyncio.create_task(streamed(link))
      await begun.wait()
      asking.cancel()
      await ended.wait()

  asyncio.run(check())


def test_a_stream_that_is_cancelled_or_ends_early_is_no_complete_answer():
  async def check():
    async def stream(sender, body, send):
      send([1])
      if body['is_cancelled']:
        asyncio.current_task().cancel()
        await asyncio.sleep(60)
      return Reply()

    async with linked(stream=stream) as link:
      for is_cancelled in (True, False):
        with pytest.raises(Lost):
          await streamed(link, is_cancelled=is_cancelled)

  asyncio.run(check())


def test_a_stream_beats_while_it_waits(monkeypatch):
  monkeypatch.setattr(wire, 'BEAT_S', 0.05)
  monkeypatch.setattr('jaxrl_llm.rollout.explorers.explorer._SILENCE_S', 1.0)

  async def stream(sender, body, send):
    await asyncio.sleep(2.0)
    send([1])
    send(None)
    return Reply()

  async def check():
    async with linked(stream=stream) as link:
      assert await streamed(link) == [[1]]

  asyncio.run(check())


@pytest.mark.parametrize('ends', [True, False])
def test_an_explorer_that_does_not_read_its_stream_is_disconnected(monkeypatch, ends):
  """
  Args:
    ends: whether its lease ends.
  """
  if not ends:
    monkeypatch.setattr(receiver, '_READ_S', 0.2)

  async def stream(sender, body, send):
    send(bytes(1 << 24))
    if ends:
      await asyncio.sleep(1.0)
      asyncio.current_task().cancel()
      await asyncio.sleep(60)
    send(None)
    return Reply()

  async def check():
    application = Receiver({}, {STREAMED: stream}).application
    listener = listening(application, name='test', front=None, routes=())
    async with asyncio.timeout(30), background.messages().entered(listener) as (address, _):
      reader, writer = await asyncio.open_unix_connection(address.removeprefix('unix:'))
      message = wire.pack({'name': 'a', 'secret': 's' * 32})
      head = f'POST {STREAMED} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(message)}\r\n\r\n'
      writer.write(head.encode() + message)
      await asyncio.sleep(2.0)  # The reader's buffer is full after 128 KiB.
      received = 0
      with contextlib.suppress(ConnectionError):
        while part := await reader.read(1 << 20):
          received += len(part)
      assert received < 1 << 24
      writer.close()

  asyncio.run(check())
