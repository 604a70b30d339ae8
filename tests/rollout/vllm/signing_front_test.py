"""What a front that signs does with tickets that are used again, or whose requests are hostile."""

import asyncio
import contextlib

import aiohttp
import pytest
import yarl
from aiohttp import web
from direct import PATIENCE_S, SERVERS, Fronts, run
from fronts import Upstream

from jaxrl_llm.core.net.client import Lost, Malformed
from jaxrl_llm.core.net.tickets import SIGNATURE_BYTES, TicketKeys
from jaxrl_llm.rollout.api import Request
from jaxrl_llm.rollout.vllm import direct
from jaxrl_llm.rollout.vllm.client import VllmClient
from jaxrl_llm.rollout.vllm.direct import FRONT_PATH, SIGNED_PATH, TicketOffice

BODY = b'{"a": "request"}'
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
    async with (
      aiohttp.ClientSession(headers={'Authorization': KEYS.header(ticket)}) as session,
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
async def signing(folder):
  async def answer(request):
    await request.content.read()
    token = len(upstream.seen)
    return web.json_response(
      {
        'choices': [
          {
            'finish_reason': 'length',
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
      assert KEYS.is_signed(first, signed[SIGNATURE_BYTES:], signed[:SIGNATURE_BYTES])
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
      async with front.sending(ticket, length=len(BODY)) as (_, writer):
        writer.write(BODY[:3])
        await writer.drain()
        while b'has been used' not in (await front.post(ticket, b'x'))[1]:
          await asyncio.sleep(0.01)
        async with front.sending(ticket, length=direct.MAX_BODY) as (reader, _):
          assert (await reader.readline()).startswith(b'HTTP/1.1 403'), 'before its body arrives'
      while (answered := await front.post(ticket))[0] != 200:
        assert b'has been used' in answered[1]  # Until the front notices that the body broke off.
        await asyncio.sleep(0.01)
      assert len(front.upstream.seen) == 1

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
      fetching = asyncio.create_task(client.fetch(request, 0, seed=0, deadline_s=1000.0))
      await begun.wait()
      await client.close()
      with pytest.raises(Lost, match='has been closed'):
        await fetching
      assert len(ended) == 1

  run(main)


@pytest.mark.parametrize('number', ['\n' * 32, '.' * 32, 'A' * 32, 'é' * 32, 'a' * 31, 5, None])
def test_a_number_that_no_front_chooses_is_malformed(number):
  async def call(*_):
    return {'front': number}

  async def main():
    with pytest.raises(Malformed):
      await TicketOffice('http://127.0.0.1:1', SERVERS).front(call)

  run(main)
