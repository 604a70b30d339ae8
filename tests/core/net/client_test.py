"""What a response, or its absence, is to every HTTP client: one of three errors, with one line."""

import asyncio
import contextlib

import pytest
from clocks import simulated
from services import CUT, HANG, Service

from jaxrl_llm.core.net.client import Client, Lost, Malformed, Refused, RemoteError, parse_json


@contextlib.asynccontextmanager
async def client_of(address, max_bytes=1 << 20):
  client = Client(address, key=None, ca_file=None, where='test', max_bytes=max_bytes)
  try:
    yield client
  finally:
    await client.close()


async def posted(client, path='', body=None, **options):
  async with client.request(
    'POST', path, {} if body is None else body, label='svc', **{'deadline_s': 5.0, **options}
  ) as response:
    return await response.read()


def error_of(answer, **options):
  """The error that a service's answer is."""

  async def main():
    service = Service(lambda body: answer)
    async with service.running(), client_of(service.address, **options) as client:
      with pytest.raises(RemoteError) as raised:
        await posted(client)
    return raised.value

  return simulated(main())


@pytest.mark.parametrize(
  ('answer', 'kind', 'line', 'status'),
  [
    (500, Lost, 'svc: HTTP 500: status 500', 500),
    (404, Refused, 'svc: HTTP 404: status 404', 404),
    ((302, {}, {'Location': 'http://127.0.0.1:9'}), Refused, 'svc: HTTP 302: {}', 302),
    ((429, {'error': {'message': 'too\n many'}}, {}), Refused, 'svc: HTTP 429: too many', 429),
    ((400, {'error': 'no\tthanks'}, {}), Refused, 'svc: HTTP 400: no thanks', 400),
    ((400, {'error': {'message': None}}, {}), Refused, 'svc: HTTP 400: None', 400),
    ((400, ['no'], {}), Refused, 'svc: HTTP 400: ["no"]', 400),
    ((400, 'x' * 600, {}), Refused, 'svc: HTTP 400: "' + 'x' * 499, 400),
    ('x' * 1001, Malformed, 'svc: answered more than 1000 bytes', None),
    ((503, 'x' * 1001, {}), Malformed, 'svc: answered more than 1000 bytes', None),
    (HANG, Lost, 'svc: no answer within 5 s', None),
  ],
)
def test_an_answer_is_its_error(answer, kind, line, status):
  error = error_of(answer, max_bytes=1000)
  assert (type(error), str(error), error.status) == (kind, line, status)


def test_a_connection_that_breaks_is_lost():
  error = error_of(CUT)
  assert (
    type(error) is Lost
    and str(error).startswith('svc: ClientPayloadError: ')
    and error.status is None
  )


@pytest.mark.parametrize('status', [401, 403, 404])
def test_it_is_known_whether_the_key_is_refused_and_how_long_to_wait(status):
  error = error_of((status, {}, {'Retry-After': '7'}))
  assert error.refuses_key == (status != 404) and error.wait_s == 7.0
  assert error_of((status, {}, {'Retry-After': 'Tue, 24 Nov 2026'})).wait_s == 0.0


def test_what_is_not_http_is_malformed():
  async def greet(reader, writer):
    writer.write(b'220 mail.example.org ESMTP\r\n')
    writer.close()

  async def main():
    listener = await asyncio.start_server(greet, '127.0.0.1', 0)
    try:
      async with client_of('http://{}:{}'.format(*listener.sockets[0].getsockname())) as client:
        with pytest.raises(Malformed, match=r'^svc: ClientResponseError: .*$'):
          await posted(client)
    finally:
      listener.close()

  asyncio.run(main())


def test_silence_is_bounded_where_the_whole_is_not():
  async def main():
    service = Service(lambda body: HANG)
    async with service.running(), client_of(service.address) as client:
      with pytest.raises(Lost, match=r'^svc: no answer within 2 s$'):
        await posted(client, deadline_s=None, silence_s=2.0)

  simulated(main())


def test_the_path_joins_the_address_unless_that_is_the_url(tmp_path):
  seen = []

  async def serve(reader, writer):
    seen.append((await reader.readline()).decode().split()[1])
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n')
    writer.close()

  async def main():
    tcp = await asyncio.start_server(serve, '127.0.0.1', 0)
    unix = await asyncio.start_unix_server(serve, tmp_path / 's')
    base = 'http://{}:{}'.format(*tcp.sockets[0].getsockname())
    try:
      for address, path in (
        (f'{base}/v1/', ''),
        (f'{base}/v1/', '/a'),
        (base, '/a'),
        (f'unix:{tmp_path}/s', '/a'),
      ):
        async with client_of(address) as client:
          assert await posted(client, path, b'bytes') == b''
    finally:
      tcp.close()
      unix.close()

  asyncio.run(main())
  assert seen == ['/v1/', '/v1/a', '/a', '/a']


def test_a_closed_client_sends_nothing():
  async def main():
    service = Service(lambda body: {})
    async with service.running(), client_of(service.address) as client:
      assert parse_json(await posted(client), 'svc') == {}
      await client.close()
      with pytest.raises(Lost, match=r'^svc: the client has been closed$'):
        await posted(client)
    return len(service.seen)

  assert simulated(main()) == 1


@pytest.mark.parametrize('data', [b'', b'{', b'\xff', b'[' * 100_000])
def test_what_is_not_json_is_malformed(data):
  with pytest.raises(Malformed, match=r"^svc: answered '.*', wanted JSON$"):
    parse_json(data, 'svc')
