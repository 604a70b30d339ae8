"""A front that signs answers: tickets that are used again or withdrawn, hostile requests, and the
answers that it keeps.
"""

import asyncio
import contextlib
import gc

import aiohttp
import msgpack
import pytest
import yarl
from aiohttp import web
from direct import PATIENCE_S, SERVERS, Fronts, run
from fleets import until
from fronts import Upstream

from jaxrl_llm.core.net.client import Lost, Malformed
from jaxrl_llm.core.net.tickets import TicketKeys
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.api import Request, Undelivered
from jaxrl_llm.rollout.vllm import direct
from jaxrl_llm.rollout.vllm.client import VllmClient
from jaxrl_llm.rollout.vllm.direct import COLLECT_PATH, FRONT_PATH, SIGNED_PATH, WITHDRAW_PATH
from jaxrl_llm.rollout.vllm.stream import Broken
from jaxrl_llm.rollout.vllm.ticket_office import TicketOffice

BODY = b'{"request_id": "r/0"}'
KEYS = TicketKeys(SERVERS)


class Front:
  """A front that signs, and the server behind it, whose answers have different tokens."""

  def __init__(self, address, upstream):
    self.address, self.upstream = address, upstream

  async def ticket(self, body=BODY):
    """A new ticket for the current number of the front."""
    async with (
      aiohttp.ClientSession(headers={'Authorization': f'Bearer {SERVERS}'}) as session,
      session.get(self.address + FRONT_PATH) as response,
    ):
      return KEYS.issue((await response.json())['front'], body)

  async def post(self, ticket, body=BODY):
    """(status, body of the response)"""
    return await self.send(KEYS.header(ticket), body)

  async def send(self, authorization, body):
    """(status, body of the response) of a request with a ticket in the header `authorization`."""
    async with (
      aiohttp.ClientSession(headers={'Authorization': authorization}) as session,
      session.post(self.address + SIGNED_PATH, data=body) as response,
    ):
      return response.status, await response.read()

  @contextlib.asynccontextmanager
  async def sending(self, ticket, *, length, path=SIGNED_PATH, method='POST'):
    """Streams of a connection that has sent the head of a request."""
    url = yarl.URL(self.address)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
      f'{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {KEYS.header(ticket)}\r\n'
      f'Content-Length: {length}\r\n\r\n'.encode()
    )
    try:
      yield reader, writer
    finally:
      writer.close()


@contextlib.asynccontextmanager
async def uploading(front, ticket):
  """Streams of a connection that has sent the beginning of a ticket's request to the front."""
  async with front.sending(ticket, length=len(BODY)) as (reader, writer):
    writer.write(BODY[:3])
    await writer.drain()
    while b'has been used' not in (await front.post(ticket, b'x'))[1]:
      await asyncio.sleep(0.01)
    yield reader, writer


@contextlib.asynccontextmanager
async def signing(folder, goes_on=None, finish='length'):
  """
  Args:
    goes_on: event after which the server answers; None if it answers at once.
    finish: reason for the end of each completion.
  """

  async def answer(request):
    await request.content.read()
    if goes_on is not None:
      await goes_on.wait()
    token = len(upstream.seen)
    return web.json_response(
      {
        'choices': [
          {
            'finish_reason': finish,
            'token_ids': [token],
            'logprobs': {'content': [{'token_id': token, 'logprob': -1.0}]},
            'weight_versions': [{'version': '0.1', 'start': 0, 'end': 1}],
          }
        ]
      }
    )

  upstream, opened = Upstream(answer), Fronts(folder)
  async with upstream.running(folder) as running:
    front = await opened.open(running.addresses['unix'])
    try:
      yield Front(front.address, upstream)
    finally:
      await opened.close()


def test_a_forgotten_ticket_is_not_good_again(tmp_path, monkeypatch):
  """Otherwise, an explorer could have a request sampled twice and deliver the better answer."""
  monkeypatch.setattr(direct, '_REMEMBERED', 2)

  async def main():
    async with signing(tmp_path) as front:
      first = await front.ticket()
      status, signed = await front.post(first)
      assert status == 200
      signature, part = msgpack.unpackb(signed)
      assert KEYS.chain(first).accepts(part, signature)
      assert b'has been used' in (await front.post(first))[1]
      for _ in range(5):
        assert (await front.post(await front.ticket()))[0] == 200
        status, text = await front.post(first)
        assert status == 403, text
      assert len(front.upstream.seen) == 6

  run(main)


def test_a_ticket_admits_one_body_at_a_time_and_survives_a_broken_one(tmp_path):
  async def main():
    async with signing(tmp_path) as front:
      ticket = await front.ticket()
      async with (
        uploading(front, ticket),
        front.sending(ticket, length=len(BODY)) as (reader, _),
      ):
        assert (await reader.readline()).startswith(b'HTTP/1.1 403'), 'before its body arrives'
      while (answered := await front.post(ticket))[0] != 200:
        assert b'has been used' in answered[1]  # Until the front notices that the body broke off.
        await asyncio.sleep(0.01)
      assert len(front.upstream.seen) == 1

  run(main)


def test_a_ticket_admits_no_larger_body_than_its_own(tmp_path):
  """Otherwise, an explorer could fill the memory of the front with all its tickets."""

  async def main():
    async with signing(tmp_path) as front:
      ticket = await front.ticket()
      async with front.sending(ticket, length=len(BODY) + 1) as (reader, _):
        assert (await reader.readline()).startswith(b'HTTP/1.1 413'), 'before its body arrives'
      assert (await front.post(ticket))[0] == 200

  run(main)


async def ask(front, path, **body):
  """(status, body of the response) of a request with the front's token."""
  async with (
    aiohttp.ClientSession(headers={'Authorization': f'Bearer {SERVERS}'}) as session,
    session.post(front.address + path, json=body) as response,
  ):
    return response.status, await response.read()


def test_the_fleet_collects_the_answer_that_the_ticket_has_got(tmp_path):
  async def main():
    async with signing(tmp_path) as front:
      ticket = await front.ticket()
      status, signed = await front.post(ticket)
      assert status == 200
      for first, wanted in ((0, signed), (1, b'')):
        assert await ask(front, COLLECT_PATH, nonce=ticket.nonce, first=first) == (200, wanted)
      assert len(front.upstream.seen) == 1, 'it is not sampled again'

  run(main)


def test_an_answer_goes_on_when_its_reader_is_gone(tmp_path):
  async def main():
    goes_on = asyncio.Event()
    async with signing(tmp_path, goes_on) as front:
      ticket = await front.ticket()
      async with front.sending(ticket, length=len(BODY)) as (_, writer):
        writer.write(BODY)
        await until(lambda: front.upstream.seen)
      collecting = asyncio.create_task(ask(front, COLLECT_PATH, nonce=ticket.nonce, first=0))
      goes_on.set()
      status, signed = await collecting
      signature, part = msgpack.unpackb(signed)
      assert status == 200 and KEYS.chain(ticket).accepts(part, signature)
      assert len(front.upstream.seen) == 1

  run(main)


@pytest.mark.parametrize('path', [COLLECT_PATH, WITHDRAW_PATH])
def test_a_ticket_that_the_fleet_has_given_up_is_good_no_more(tmp_path, path):
  async def main():
    async with signing(tmp_path) as front:
      ticket = await front.ticket()
      if path == COLLECT_PATH:
        status, text = await ask(front, path, nonce=ticket.nonce, first=0)
        assert status == 404 and b'no answer' in text
      else:
        assert (await ask(front, path, nonces=[ticket.nonce]))[0] == 200
      assert b'has been used' in (await front.post(ticket))[1]
      assert not front.upstream.seen

  run(main)


def test_a_withdrawn_ticket_ends_its_request_at_the_server(tmp_path):
  async def main():
    async with signing(tmp_path, asyncio.Event()) as front:
      ticket = await front.ticket()
      posting = asyncio.create_task(front.post(ticket))
      await until(lambda: front.upstream.seen)
      assert (await ask(front, WITHDRAW_PATH, nonces=[ticket.nonce]))[0] == 200
      await front.upstream.cancelled.wait()
      assert (await posting)[0] == 410

  run(main)


def test_a_ticket_that_is_withdrawn_during_its_upload_reaches_no_server(tmp_path):
  async def main():
    async with signing(tmp_path) as front:
      ticket = await front.ticket()
      async with uploading(front, ticket) as (reader, writer):
        await ask(front, WITHDRAW_PATH, nonces=[ticket.nonce])
        writer.write(BODY[3:])
        assert (await reader.readline()).startswith(b'HTTP/1.1 403')
      assert not front.upstream.seen

  run(main)


@pytest.mark.parametrize('path', [COLLECT_PATH, WITHDRAW_PATH])
def test_a_ticket_neither_collects_nor_withdraws(tmp_path, path):
  async def main():
    async with signing(tmp_path) as front:
      ticket = await front.ticket()
      headers = {'Authorization': KEYS.header(ticket)}
      body = {'nonce': ticket.nonce, 'first': 0, 'nonces': [ticket.nonce]}
      async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(front.address + path, json=body) as response,
      ):
        assert response.status == 403
      for strange in ({}, {'nonce': 3, 'first': 0}, {'nonce': 'a', 'first': -1}, {'nonces': [1]}):
        assert (await ask(front, path, **strange))[0] == 400
      assert (await front.post(ticket))[0] == 200

  run(main)


def test_answers_that_nobody_reads_take_limited_memory_and_time(tmp_path, monkeypatch):
  async def main():
    async with signing(tmp_path) as front:
      tickets = [await front.ticket() for _ in range(3)]
      size = 0
      for ticket in tickets:
        _, signed = await front.post(ticket)
        size = size or len(signed)
        monkeypatch.setattr(direct, '_MAX_IDLE_BYTES', 2 * size + size // 2)
      found = [(await ask(front, COLLECT_PATH, nonce=t.nonce, first=0))[0] for t in tickets]
      assert found == [404, 200, 200], 'the oldest has given way'
      monkeypatch.setattr(direct, 'KEEP_S', 0.0)
      ticket = await front.ticket()
      await front.post(ticket)
      while (await ask(front, COLLECT_PATH, nonce=ticket.nonce, first=9))[0] == 200:
        await asyncio.sleep(0.01)

  run(main)


def answers_in_memory():
  """The answers that are in memory."""
  gc.collect()
  return [each for each in gc.get_objects() if isinstance(each, direct._Answer)]


def test_an_answer_that_gives_way_is_no_longer_in_memory(tmp_path, monkeypatch):
  monkeypatch.setattr(direct, '_MAX_IDLE_BYTES', 0)

  async def main():
    async with signing(tmp_path) as front:
      for _ in range(3):
        assert (await front.post(await front.ticket()))[0] == 200
      async with asyncio.timeout(PATIENCE_S):
        while answers_in_memory():
          await asyncio.sleep(0.1)

  run(main)


def test_answers_whose_readers_left_before_their_end_count_as_well(tmp_path, monkeypatch):
  monkeypatch.setattr(direct, '_MAX_IDLE_BYTES', 0)

  async def main():
    goes_on = asyncio.Event()
    async with signing(tmp_path, goes_on) as front:
      async with front.sending(await front.ticket(), length=len(BODY)) as (_, writer):
        writer.write(BODY)
        await until(lambda: front.upstream.seen)
      goes_on.set()
      async with asyncio.timeout(PATIENCE_S):
        while answers_in_memory():
          await asyncio.sleep(0.1)

  run(main)


def test_an_answer_is_kept_for_some_time_after_its_last_reader(tmp_path, monkeypatch):
  async def main():
    async with signing(tmp_path) as front:
      ticket = await front.ticket()
      monkeypatch.setattr(direct, 'KEEP_S', 0.5)
      assert (await front.post(ticket))[0] == 200
      monkeypatch.setattr(direct, 'KEEP_S', 1000.0)
      assert (await ask(front, COLLECT_PATH, nonce=ticket.nonce, first=0))[0] == 200
      await asyncio.sleep(1.0)
      assert (await ask(front, COLLECT_PATH, nonce=ticket.nonce, first=0))[0] == 200

  run(main)


def test_a_reader_that_takes_nothing_is_disconnected(tmp_path, monkeypatch):
  """Otherwise, each ticket of an explorer could occupy memory for good."""
  monkeypatch.setattr(direct, '_READ_S', 0.2)
  monkeypatch.setattr(direct, 'KEEP_S', 0.0)

  async def main():
    async with signing(tmp_path, finish='x' * (1 << 24)) as front:
      ticket = await front.ticket()
      async with front.sending(ticket, length=len(BODY)) as (reader, writer):
        writer.write(BODY)
        reader._transport.pause_reading()
        await until(lambda: front.upstream.seen)
        async with asyncio.timeout(PATIENCE_S):
          while await asyncio.to_thread(answers_in_memory):
            await asyncio.sleep(0.1)

  run(main)


def test_the_fleet_ends_the_request_whose_answer_it_cannot_wait_for(tmp_path, monkeypatch):
  """An explorer that stays connected would otherwise keep its place at the server."""
  monkeypatch.setattr('jaxrl_llm.rollout.vllm.ticket_office._LEAST_S', 0.2)

  async def main():
    async with signing(tmp_path, asyncio.Event()) as front:

      class Courier:
        async def fetch(self, errand):
          self.posting = asyncio.create_task(front.send(errand.authorization, errand.body))
          await until(lambda: front.upstream.seen)
          raise Undelivered('late')

      courier = Courier()
      client = VllmClient(front.address, key=SERVERS)
      request = Request(uid='a', prompt=(1,), max_tokens=1, key=(0,), courier=courier)
      how = {'seed': 0, 'deadline_s': 0.2, 'stream': None, 'is_known': lambda: True}
      with pytest.raises(Broken):
        await client.fetch(request, 0, **how)
      await front.upstream.cancelled.wait()
      assert (await courier.posting)[0] == 410
      await client.close()

  run(main)


@pytest.mark.parametrize(('method', 'path'), [('POST', SIGNED_PATH), ('GET', '/nowhere')])
def test_a_used_ticket_keeps_no_connection(tmp_path, method, path):
  """Connections of clients that have authenticated have no deadline and are not counted."""

  async def main():
    async with signing(tmp_path) as front:
      ticket = await front.ticket()
      assert (await front.post(ticket))[0] == 200
      async with front.sending(ticket, length=0, path=path, method=method) as (reader, _):
        assert (await reader.readline()).startswith(b'HTTP/1.1 403')
        async with asyncio.timeout(PATIENCE_S / 2):
          await reader.read()  # The front closes the connection.

  run(main)


def test_a_server_that_has_left_keeps_no_request_waiting_for_an_explorer(tmp_path):
  """The fleet closes the client of a server whose host has vanished."""
  begun, ended = asyncio.Event(), []

  class Courier:
    async def fetch(self, errand):
      begun.set()
      try:
        await asyncio.Event().wait()
      finally:
        ended.append(errand.nonce)

  async def main():
    async with signing(tmp_path) as front:
      client = VllmClient(front.address, key=SERVERS)
      request = Request(uid='a', prompt=(1,), max_tokens=1, key=(0,), courier=Courier())
      how = {'seed': 0, 'deadline_s': 1000.0, 'stream': None, 'is_known': lambda: True}
      fetching = asyncio.create_task(client.fetch(request, 0, **how))
      await begun.wait()
      await client.close()
      with pytest.raises(Lost, match='has been closed'):
        await fetching
      assert len(ended) == 1

  run(main)


def test_an_answer_whose_last_part_has_arrived_survives_the_end_of_the_client(tmp_path):
  """The parts of a long answer are still being read then."""
  delivered = asyncio.Event()

  async def main():
    async with signing(tmp_path) as front:

      class Courier:
        async def fetch(self, errand):
          _, signed = await front.send(errand.authorization, errand.body)
          await errand.parts.add(*msgpack.unpackb(signed))
          delivered.set()
          await asyncio.Event().wait()

      client = VllmClient(front.address, key=SERVERS)
      client._labels['0.1'] = Version(0, 1)
      request = Request(uid='a', prompt=(1,), max_tokens=1, key=(0,), courier=Courier())
      how = {'seed': 0, 'deadline_s': 1000.0, 'stream': None, 'is_known': lambda: True}
      fetching = asyncio.create_task(client.fetch(request, 0, **how))
      await delivered.wait()
      await client.close()
      assert (await fetching).tokens.tolist() == [1]

  run(main)


@pytest.mark.parametrize('number', ['\n' * 32, '.' * 32, 'A' * 32, 'é' * 32, 'a' * 31, 5, None])
def test_a_number_that_no_front_chooses_is_malformed(number):
  async def call(*_):
    return {'front': number}

  async def main():
    with pytest.raises(Malformed):
      await TicketOffice('http://127.0.0.1:1', SERVERS, name='a', call=call, answers=None).front()

  run(main)
