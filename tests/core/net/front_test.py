"""The front against a real server behind it: nothing goes through without the token, and with it
all of it.
"""

import asyncio
import contextlib
import gzip
import hashlib
import json
import os
import pathlib
import re
import resource
import socket
import ssl
import subprocess
import sys

import aiohttp
import namespaces
import pytest
import yarl
from aiohttp import web
from fronts import AUTHORISED, TOKEN, Upstream, config, request_bytes, token_file
from paths import ROOT

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net import front as front_module
from jaxrl_llm.core.net import server as server_module
from jaxrl_llm.core.net.front import MAX_CHECKED_BODY, ROUTES, RPC_METHODS, VERIFY, Front
from jaxrl_llm.core.net.token_server import FrontConfig

GOOD = {'Authorization': f'Bearer {TOKEN}'}
PATIENCE_S = 60
"""Of a test that would otherwise hang; no test waits for it to pass."""


class Raw:
  """A connection that sends what it is told to."""

  def __init__(self, reader, writer):
    self.reader, self.writer = reader, writer

  async def exchange(self, data):
    self.writer.write(data)
    return await self.response()

  async def response(self):
    """(status, lower-case headers, body of the announced length)."""
    head = (await self.reader.readuntil(b'\r\n\r\n')).decode()
    lines = head.split('\r\n')
    headers = {
      name.lower(): value for name, _, value in (line.partition(': ') for line in lines[1:] if line)
    }
    body = await self.reader.readexactly(int(headers.get('content-length', 0)))
    return int(lines[0].split()[1]), headers, body


@contextlib.asynccontextmanager
async def connected(address):
  url = yarl.URL(address)
  reader, writer = await asyncio.open_connection(url.host, url.port)
  try:
    yield Raw(reader, writer)
  finally:
    writer.close()


@contextlib.asynccontextmanager
async def standing(folder, answer=None, *, kind='unix', fields=None, **options):
  """(front, upstream, session whose base is the front), with further `fields` of the front's
  configuration.
  """
  async with (
    asyncio.timeout(PATIENCE_S),
    Upstream(answer).running(folder) as upstream,
    Front(config(folder, **(fields or {})), upstream=upstream.addresses[kind], **options) as front,
    aiohttp.ClientSession(front.address) as session,
  ):
    yield front, upstream, session


@pytest.mark.parametrize(
  ('text', 'mode', 'said'),
  [
    ('short\n', 0o600, '5 characters'),
    ('fifteen-letters' + '\n' + TOKEN, 0o600, '15 characters'),
    ('', 0o600, '0 characters'),
    ('two words are not a token\n', 0o600, 'without spaces'),
    ('tökentökentökentöken\n', 0o600, 'visible ASCII'),
    (TOKEN, 0o640, 'chmod 600'),
    (TOKEN, 0o604, 'chmod 600'),
    (TOKEN, 0o620, 'chmod 600'),
  ],
)
def test_an_unfit_token_file_is_refused_without_telling_it(tmp_path, text, mode, said):
  path = token_file(tmp_path, text, mode)
  with pytest.raises(UserError, match=said) as caught:
    Front(FrontConfig(token_file=path), upstream='unix:/x.sock')
  assert path in str(caught.value) and '\n' not in str(caught.value)
  assert not text or text.split()[0] not in str(caught.value)


def test_a_missing_token_file_is_refused(tmp_path):
  for path in (tmp_path / 'none', tmp_path):
    with pytest.raises(UserError, match=f'front.token_file: cannot read {path}'):
      Front(FrontConfig(token_file=str(path)), upstream='unix:/x.sock')


@pytest.mark.parametrize(
  'host', ['0.0.0.0', '::', '10.1.2.3', 'trainer.example', '', '127.1', '128.0.0.1']
)
def test_other_hosts_than_loopback_need_tls_or_consent(tmp_path, host):
  with pytest.raises(UserError, match=r'tls_cert and tls_key, or allow_plaintext'):
    config(tmp_path, host=host)
  config(tmp_path, host=host, allow_plaintext=True)
  config(tmp_path, host=host, tls_cert='c', tls_key='k')


def test_impossible_configs_are_refused(tmp_path):
  for fields, said in (
    ({'port': 65536}, '65535'),
    ({'port': -1}, '65535'),
    ({'tls_cert': 'c'}, 'only one'),
    ({'tls_key': 'k'}, 'only one'),
  ):
    with pytest.raises(UserError, match=said):
      config(tmp_path, **fields)
  with pytest.raises(UserError, match='upstream_token'):
    Front(config(tmp_path), upstream='unix:/x.sock', upstream_token='a\r\nX: y')


@pytest.mark.parametrize(
  'upstream',
  [
    'unix:relative.sock',
    'unix:',
    '/x.sock',
    'http://10.0.0.1:80',
    'http://0.0.0.0:80',
    'http://example.com:80',
    'http://127.0.0.1',
    'http://127.0.0.1:99999',
    'https://127.0.0.1:80',
    'http://127.0.0.1:80/path',
    'http://127.0.0.1:80?q',
    'http://127.0.0.1@10.0.0.1:80',
    'http://127.0.0.1.example.com:80',
    'http://[::1:80',
  ],
)
def test_upstreams_that_others_may_reach_are_refused(tmp_path, upstream):
  with pytest.raises(UserError, match=r'wanted unix:/path/to\.sock or http://127\.0\.0\.1:PORT'):
    Front(config(tmp_path), upstream=upstream)


@pytest.mark.parametrize('kind', ['unix', 'loopback'])
def test_passes_on_what_a_trainer_needs(tmp_path, kind):
  async def answer(request):
    body = await request.read()
    return web.Response(
      status=429,
      body=body[::-1],
      headers={'Content-Type': 'text/x-test; v=1', 'X-Inside': '1', 'Set-Cookie': 'a=b'},
    )

  async def main():
    async with standing(tmp_path, answer, kind=kind) as (front, upstream, session):
      headers = {
        **GOOD,
        'Content-Type': 'application/x-odd',
        'Cookie': 'c=d',
        'X-Mine': '1',
        'X-Forwarded-For': 'me',
      }
      query = 'mode=keep&a=%2F%20&b=+&c=%zz&d=[1]'
      url = yarl.URL(f'{front.address}/pause?{query}', encoded=True)
      async with session.post(url, data=b'\x00abc', headers=headers) as response:
        assert (response.status, await response.read()) == (429, b'cba\x00')
        assert response.headers['Content-Type'] == 'text/x-test; v=1'
        assert not {'X-Inside', 'Set-Cookie'} & set(response.headers)
      ((method, path, got),) = upstream.seen
      assert (method, path, got['Content-Type']) == ('POST', f'/pause?{query}', 'application/x-odd')
      assert set(got) == {
        'Host',
        'Accept',
        'Accept-Encoding',
        'Connection',
        'Content-Type',
        'Content-Length',
      }

  asyncio.run(main())


@pytest.mark.parametrize('kind', ['unix', 'loopback'])
def test_every_route_goes_through_with_the_token(tmp_path, kind):
  async def main():
    async with standing(tmp_path, kind=kind) as (front, upstream, session):
      for method, path in ROUTES:
        body = {'json': {'method': 'jaxrl_digests'}} if method == 'POST' else {}
        async with session.request(method, path, headers=GOOD, **body) as response:
          assert (response.status, (await response.json())['path']) == (200, path)
      assert [(m, p) for m, p, _ in upstream.seen] == list(ROUTES) and front.refused == 0
      async with connected(front.address) as raw:
        _, _, body = await raw.exchange(request_bytes('POST', '/resume', AUTHORISED))
        assert json.loads(body) == {'path': '/resume', 'body': '', 'type': None}

  asyncio.run(main())


def test_nothing_goes_through_without_the_token(tmp_path):
  tries = [
    *ROUTES,
    ('GET', '/'),
    ('GET', '/nowhere'),
    ('DELETE', '/pause'),
    ('PATCH', '/v1/x'),
    ('OPTIONS', '/health'),
  ]

  async def main():
    async with standing(tmp_path) as (front, upstream, session):
      for method, path in tries:
        async with session.request(method, path, data=b'{}') as response:
          assert response.status == 401 and response.content_type == 'application/json'
          error = (await response.json())['error']
          assert (error['type'], error['code']) == ('Unauthorized', 401) and error['message']
      async with session.head('/health') as response:
        assert response.status == 401
      async with connected(front.address) as raw:
        assert (await raw.exchange(request_bytes('OPTIONS', '*')))[0] == 401
      async with connected(front.address) as raw:
        assert (await raw.exchange(request_bytes('CONNECT', 'other:80')))[0] == 401
      assert front.refused == len(tries) + 3 and upstream.seen == []

  asyncio.run(main())


def test_refuses_before_the_body_comes(tmp_path):
  async def main():
    async with standing(tmp_path) as (front, upstream, _):
      for framing in ('Content-Length: 1000000', 'Transfer-Encoding: chunked'):
        async with connected(front.address) as raw:
          assert (await raw.exchange(request_bytes('POST', '/update_weights', framing)))[0] == 401
      assert front.refused == 2 and upstream.seen == []

  asyncio.run(main())


@pytest.mark.parametrize(
  'lines',
  [
    [],
    ['Authorization:'],
    ['Authorization: Bearer'],
    [f'Authorization: {TOKEN}'],
    [f'Authorization: bearer {TOKEN}'],
    [f'Authorization: Basic {TOKEN}'],
    [f'Authorization: Bearer  {TOKEN}'],
    [f'Authorization: Bearer\t{TOKEN}'],
    [f'Authorization: Bearer {TOKEN.upper()}'],
    [f'Authorization: Bearer {TOKEN[:-1]}'],
    [f'Authorization: Bearer {TOKEN}x'],
    [f'Authorization: Bearer {TOKEN}, Bearer {TOKEN}'],
    [f'Authorization: Bearer {TOKEN}\xff'],
    [AUTHORISED, AUTHORISED],
    [AUTHORISED, f'authorization: Bearer {TOKEN}'],
    ['Authorization: Bearer wrong', AUTHORISED],
    [AUTHORISED, 'Authorization: Bearer wrong'],
    [f'X-Authorization: Bearer {TOKEN}'],
    [f'Proxy-Authorization: Bearer {TOKEN}'],
    [f'Cookie: Authorization=Bearer {TOKEN}'],
  ],
)
def test_other_headers_are_no_token(tmp_path, lines):
  async def main():
    async with standing(tmp_path) as (front, upstream, _):
      async with connected(front.address) as raw:
        assert (await raw.exchange(request_bytes('GET', '/health', *lines)))[0] == 401
      assert front.refused == 1 and upstream.seen == []

  asyncio.run(main())


def test_the_token_is_not_taken_from_the_query(tmp_path):
  async def main():
    async with standing(tmp_path) as (front, upstream, session):
      for key in ('token', 'api_key', 'access_token', 'Authorization'):
        async with session.get('/health', params={key: f'Bearer {TOKEN}'}) as response:
          assert response.status == 401
      assert front.refused == 4 and upstream.seen == []

  asyncio.run(main())


@pytest.mark.parametrize(
  'line', [f'authorization: Bearer {TOKEN}', f'AUTHORIZATION:Bearer {TOKEN}', AUTHORISED + ' \t']
)
def test_header_names_have_no_case_and_values_no_outer_space(tmp_path, line):
  async def main():
    async with standing(tmp_path) as (front, _, _), connected(front.address) as raw:
      assert (await raw.exchange(request_bytes('GET', '/health', line)))[0] == 200

  asyncio.run(main())


@pytest.mark.parametrize(
  'data',
  [
    b'\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03',
    b'GET /health\r\n\r\n',
    f'GET /health HTTP/1.1\r\nHost: x\r\nAuthorization : Bearer {TOKEN}\r\n\r\n'.encode(),
    f'GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer\r\n {TOKEN}\r\n\r\n'.encode(),
    f'GET /health HTTP/1.1\r\nHost: x\r\nX: y\nAuthorization: Bearer {TOKEN}\r\n\r\n'.encode(),
    request_bytes('POST', '/pause', AUTHORISED, 'Content-Length: 3', 'Transfer-Encoding: chunked')
    + b'0\r\n\r\n',
    request_bytes('POST', '/pause', AUTHORISED, 'Content-Length: 3', 'Content-Length: 4') + b'abcd',
    request_bytes('POST', '/pause', AUTHORISED, 'Content-Length: -1'),
    request_bytes('POST', '/pause', AUTHORISED, 'Transfer-Encoding: chunked, identity')
    + b'0\r\n\r\n',
    request_bytes('GET', '/health', AUTHORISED, 'X: ' + 'y' * 20000),
    request_bytes('POST', '/pause\xe9', AUTHORISED),
    request_bytes('POST', '\\pause', AUTHORISED),
    request_bytes('POST', '/pause x', AUTHORISED),
  ],
)
def test_what_is_not_plain_http_is_refused_and_the_connection_closed(tmp_path, data):
  async def main():
    async with standing(tmp_path) as (front, upstream, _), connected(front.address) as raw:
      status, headers, body = await raw.exchange(data)
      assert status in (400, 401) and json.loads(body)['error']['code'] == status
      assert not re.search(r'aiohttp|python|\d\.\d', headers['server'] + body.decode().lower())
      # What follows is not taken for a request of its own.
      with contextlib.suppress(ConnectionError):
        raw.writer.write(request_bytes('GET', '/version', AUTHORISED))
        assert status == 401 or await raw.reader.read() == b''
      assert [path for _, path, _ in upstream.seen if path != '/version'] == []
      assert status == 401 or upstream.seen == []

  asyncio.run(main())


@pytest.mark.parametrize(
  'path',
  [
    '//pause',
    '/pause/',
    '/./pause',
    '/v1/../pause',
    '/v1/%2e%2e/pause',
    '/v1/..%2fpause',
    '/v1%2Fcompletions',
    '/%70ause',
    '/PAUSE',
    '/Pause',
    '/pause;x',
    '/pause%00',
    '/pause%20',
    '/pause#x',
    '/pause%3Fmode=keep',
    '/\\pause',
    'http://x/pause',
    'http://127.0.0.1/pause?x',
    '/collective_rpc/',
    '//collective_rpc',
    '/collective%5frpc',
    '/update_weights/../pause',
    '/v1/models/../../collective_rpc',
    '/reload_weights',
    '/weight_checker',
    '/v1/load_lora_adapter/',
    '/sleep',
    '/docs',
    '/',
  ],
)
def test_other_paths_are_forbidden_as_written(tmp_path, path):
  async def main():
    async with standing(tmp_path) as (front, upstream, _), connected(front.address) as raw:
      status, _, body = await raw.exchange(request_bytes('POST', path, AUTHORISED, body=b'{}'))
      error = json.loads(body)['error']
      assert (status, error['type'], error['code']) == (403, 'Forbidden', 403)
      assert upstream.seen == [] and front.refused == 0

  asyncio.run(main())


def test_other_methods_are_not_allowed(tmp_path):
  async def main():
    async with standing(tmp_path) as (_, upstream, session):
      for path, wrong, right in (
        ('/health', 'POST', 'GET'),
        ('/pause', 'GET', 'POST'),
        ('/pause', 'DELETE', 'POST'),
      ):
        async with session.request(wrong, path, headers=GOOD) as response:
          assert (response.status, response.headers['Allow']) == (405, right)
          assert (await response.json())['error']['type'] == 'MethodNotAllowed'
      async with session.head(
        '/health', headers={**GOOD, 'X-HTTP-Method-Override': 'GET'}
      ) as response:
        assert response.status == 405
      assert upstream.seen == []

  asyncio.run(main())


@pytest.mark.parametrize(
  ('data', 'status'),
  [
    (request_bytes('GET', '/health?a#b', AUTHORISED), 400),
    (request_bytes('GET', '/health?\xe9', AUTHORISED), 400),
    (f'GET /health HTTP/1.0\r\n{AUTHORISED}\r\n\r\n'.encode(), 505),
    (request_bytes('POST', '/pause', AUTHORISED, 'Content-Encoding: gzip', body=b'x'), 415),
  ],
)
def test_requests_that_cannot_be_passed_on_faithfully_are_refused(tmp_path, data, status):
  async def main():
    async with standing(tmp_path) as (front, upstream, _), connected(front.address) as raw:
      got, _, body = await raw.exchange(data)
      assert got == json.loads(body)['error']['code'] == status and upstream.seen == []

  asyncio.run(main())


def test_a_connection_lives_on_after_a_refusal(tmp_path):
  async def main():
    async with standing(tmp_path) as (front, upstream, _), connected(front.address) as raw:
      assert (await raw.exchange(request_bytes('GET', '/health')))[0] == 401
      assert (await raw.exchange(request_bytes('GET', '/health', AUTHORISED)))[0] == 200
      # The token of the request before is not remembered, and a body is not read as the next
      # request.
      inner = request_bytes('POST', '/resume', AUTHORISED)
      assert (await raw.exchange(request_bytes('POST', '/pause', body=inner)))[0] == 401
      assert (await raw.exchange(request_bytes('POST', '/nowhere', AUTHORISED, body=inner)))[
        0
      ] == 403
      status, _, body = await raw.exchange(
        request_bytes('POST', '/pause?mode=keep', AUTHORISED, body=b'{"a": 1}')
      )
      assert status == 200 and json.loads(body)['body'] == '{"a": 1}'
      # Two at once: the refused one first.
      raw.writer.write(request_bytes('GET', '/version') + request_bytes('GET', '/load', AUTHORISED))
      assert [(await raw.response())[0] for _ in range(2)] == [401, 200]
      assert [path for _, path, _ in upstream.seen] == [
        '/health',
        '/pause?mode=keep',
        '/load',
      ] and front.refused == 3

  asyncio.run(main())


@pytest.mark.parametrize('method', sorted(RPC_METHODS))
def test_rpc_is_written_anew(tmp_path, method):
  text = (
    '{"method": "evil", "kwargs": {"a": [1, "\\u00e9\\ud800"]},\n "method": "METHOD", "timeout": '
    '1.5}'
  )

  async def main():
    async with standing(tmp_path) as (_, _, session):
      headers = {**GOOD, 'Content-Type': 'text/odd'}
      async with session.post(
        '/collective_rpc', data=text.replace('METHOD', method), headers=headers
      ) as response:
        told = await response.json()
      assert response.status == 200 and told['type'] == 'application/json'
      assert told['body'].count('"method"') == 1 and 'evil' not in told['body']
      assert json.loads(told['body']) == {
        'method': method,
        'kwargs': {'a': [1, 'é\ud800']},
        'timeout': 1.5,
      }

  asyncio.run(main())


@pytest.mark.parametrize(
  ('body', 'status'),
  [
    (b'{"method": "reload_weights"}', 403),
    (b'{"method": "jaxrl_weights", "method": "reload_weights"}', 403),
    (b'{"method": "jaxrl_weights "}', 403),
    (b'{"method": ["jaxrl_weights"]}', 403),
    (b'{"method": {"jaxrl_weights": 1}}', 403),
    (b'{"Method": "jaxrl_weights"}', 403),
    (b'{}', 403),
    (b'["jaxrl_weights"]', 400),
    (b'"jaxrl_weights"', 400),
    (b'', 400),
    (b'{"method": "jaxrl_weights"', 400),
    (b'{"method": "jaxrl_weights"} {"method": "reload_weights"}', 400),
    ('{"method": "jaxrl_weights"}'.encode('utf-16'), 400),
    (b'{"method": "jaxrl_weights", "x": "\xff"}', 400),
    (b'[' * 60_000, 400),
    (b'{"method": "jaxrl_weights", "x": "%s"}' % (b'y' * MAX_CHECKED_BODY), 413),
  ],
)
@pytest.mark.parametrize('chunked', [False, True])
def test_other_rpcs_are_refused(tmp_path, body, status, chunked):
  async def pieces():
    yield body[: len(body) // 2]
    yield body[len(body) // 2 :]

  async def main():
    async with standing(tmp_path) as (_, upstream, session):
      async with session.post(
        '/collective_rpc', data=pieces() if chunked else body, headers=GOOD
      ) as response:
        assert response.status == (await response.json())['error']['code'] == status
      assert upstream.seen == []

  asyncio.run(main())


@pytest.mark.parametrize('rooted', [False, True], ids=['any directory', 'a publish root'])
def test_the_digests_of_a_large_model_pass(tmp_path, published, rooted):
  """There is one for each tensor, and one for each slice that a worker holds."""
  tensors = {f'model.layers.{i}.self_attn.q_proj.weight': f'{i:032x}' for i in range(2000)}
  slices = {name: [[0, 0, 1024, digest]] for name, digest in tensors.items()}
  info = {'directory': f'{published}/v1', 'files': {'model.safetensors': tensors}, 'slices': slices}
  body = json.dumps({'method': VERIFY, 'args': [info]})
  assert len(body) > 1 << 17

  async def main():
    roots = [str(published)] if rooted else []
    async with (
      standing(tmp_path, publish_roots=roots) as (_, _, session),
      session.post('/collective_rpc', data=body, headers=GOOD) as response,
    ):
      assert response.status == 200
      assert json.loads((await response.json())['body']) == json.loads(body)

  asyncio.run(main())


@pytest.fixture
def published(tmp_path):
  """A publish root with one publication, a link out of it, and a neighbour whose name begins like
  its own.
  """
  root = tmp_path / 'publish'
  (root / 'v1').mkdir(parents=True)
  (root / 'v1' / 'model.safetensors').write_text('x')
  (tmp_path / 'publish-other').mkdir()
  (root / 'out').symlink_to(tmp_path / 'publish-other')
  (root / 'v1' / 'link.safetensors').symlink_to(tmp_path / 'secret')
  (root / 'now').symlink_to('v1')
  return root


async def update(session, info):
  body = {'update_info': info} if isinstance(info, dict) else info
  async with session.post('/update_weights', json=body, headers=GOOD) as response:
    return response.status, await response.json()


def test_updates_name_directories_below_the_publish_root(tmp_path, published):
  files = {'model.safetensors': {'a.weight': '00'}}
  outside = ['..', 'v1/../..', '../publish-other', 'out', 'out/x', '.', '../../../../etc', 'v1\0']

  async def main():
    async with standing(tmp_path, publish_roots=[str(published)]) as (_, upstream, session):
      for name in ('v1', 'now', 'v1/../v1', 'v1/'):
        status, told = await update(session, {'directory': f'{published}/{name}', 'files': files})
        assert status == 200
        # As it was resolved: a link that is moved afterwards changes nothing.
        assert json.loads(told['body']) == {
          'update_info': {'directory': str(published / 'v1'), 'files': files}
        }
      passed = len(upstream.seen)
      for name in outside:
        assert (await update(session, {'directory': f'{published}/{name}', 'files': files}))[
          0
        ] == 403, name
      for directory in ('/etc', 'v1', '', os.path.relpath(published / 'v1')):
        assert (await update(session, {'directory': directory}))[0] == 403, directory
      for file in (
        '../v1/model.safetensors',
        '/etc/passwd',
        '..',
        '.',
        '',
        'a/b',
        'link.safetensors',
      ):
        assert (await update(session, {'directory': f'{published}/v1', 'files': {file: {}}}))[
          0
        ] == 403, file
      for info in (
        {'directory': 1},
        {},
        {'directory': f'{published}/v1', 'path': '/etc'},
        {'directory': f'{published}/v1', 'files': ['model.safetensors']},
        [],
        {'update_info': {'directory': f'{published}/v1'}, 'directory': '/etc'},
      ):
        body = info if info == [] or 'update_info' in info else {'update_info': info}
        async with session.post('/update_weights', json=body, headers=GOOD) as response:
          assert response.status == 400, info
      twice = (
        f'{{"update_info": {{"directory": "{published}/v1"}}, "update_info": {{"directory": '
        '"/etc"}}'
      )
      async with session.post('/update_weights', data=twice, headers=GOOD) as response:
        assert response.status == 403
      assert len(upstream.seen) == passed == 4

  asyncio.run(main())


def test_files_to_verify_lie_below_the_publish_root(tmp_path, published):
  info = {'directory': f'{published}/now', 'files': {'model.safetensors': {'a.weight': '00'}}}
  outside = {**info, 'directory': f'{published}/../publish-other'}
  linked = {**info, 'files': {'link.safetensors': {}}}

  async def verify(session, body):
    body = {'method': VERIFY, **body}
    async with session.post('/collective_rpc', json=body, headers=GOOD) as response:
      return response.status, await response.json()

  async def main():
    async with standing(tmp_path, publish_roots=[str(published)]) as (_, upstream, session):
      status, told = await verify(session, {'args': [info]})
      resolved = {**info, 'directory': str(published / 'v1')}
      assert status == 200
      assert json.loads(told['body']) == {'method': VERIFY, 'args': [resolved]}
      for refused in (outside, linked, {**outside, 'deltas': []}):
        assert (await verify(session, {'args': [refused]}))[0] == 403, refused
      for body in (
        {},
        {'args': []},
        {'args': {'0': info}},
        {'args': [info, info]},
        {'args': [[info]]},
        {'args': ['/etc']},
        {'args': [{**info, 'path': '/etc'}]},
        {'args': [info], 'kwargs': {'update_info': outside}},
        {'kwargs': {'update_info': info}},
      ):
        assert (await verify(session, body))[0] == 400, body
      assert len(upstream.seen) == 1

  asyncio.run(main())


def test_deltas_lie_below_the_publish_root(tmp_path, published):
  files = {'model.safetensors': {'a.weight': '00'}}
  whole = {'directory': f'{published}/v1', 'files': files, 'label': '0.1-ab'}
  slices = {'a.weight': [[0, 0, 4, '00']]}
  delta = {'before': '0.1-ab', 'label': '0.2-cd', 'directory': f'{published}/now', 'files': files}
  resolved = {**delta, 'directory': str(published / 'v1')}

  async def main():
    async with standing(tmp_path, publish_roots=[str(published)]) as (_, upstream, session):
      status, told = await update(session, {**whole, 'slices': slices, 'deltas': [delta, delta]})
      assert status == 200
      assert json.loads(told['body'])['update_info'] == {
        **whole,
        'slices': slices,
        'deltas': [resolved, resolved],
      }
      for change in (
        {'directory': '/etc'},
        {'directory': f'{published}/../publish-other'},
        {'directory': f'{published}/out'},
        {'files': {'../v1/model.safetensors': {}}},
        {'files': {'link.safetensors': {}}},
      ):
        spoiled = [delta, {**delta, **change}]
        assert (await update(session, {**whole, 'deltas': spoiled}))[0] == 403, change
      for spoiled in (
        delta,
        [[delta]],
        ['v1'],
        [{**delta, 'path': '/etc'}],
        [{name: value for name, value in delta.items() if name != 'directory'}],
        [{**delta, 'directory': 1}],
        [{**delta, 'files': ['model.safetensors']}],
      ):
        assert (await update(session, {**whole, 'deltas': spoiled}))[0] == 400, spoiled
      assert len(upstream.seen) == 1

  asyncio.run(main())


def test_adapters_lie_below_the_publish_root(tmp_path, published):
  (published / 'ad').mkdir()
  (published / 'ad' / 'adapter_config.json').write_text('{}')

  def own(path, **more):
    return {
      'lora_name': 'policy-0-1',
      'lora_path': path,
      'load_inplace': True,
      **more,
    }

  async def main():
    async with standing(tmp_path, publish_roots=[str(published)]) as (_, upstream, session):

      async def load(body):
        async with session.post('/v1/load_lora_adapter', json=body, headers=GOOD) as response:
          return response.status, await response.json()

      status, told = await load(own(f'{published}/now/../ad'))
      assert status == 200 and json.loads(told['body']) == own(str(published / 'ad'))
      passed = len(upstream.seen)
      # 'v1' holds a link that leads out.
      for path in (
        '/etc',
        'ad',
        str(published),
        f'{published}/..',
        f'{published}/out',
        f'{published}/v1',
        f'{published}/no',
      ):
        assert (await load(own(path)))[0] == 403, path
      for body in (own(1), own(f'{published}/ad', more=1), {'lora_path': f'{published}/ad'}):
        assert (await load(body))[0] == 400, body
      assert len(upstream.seen) == passed
      async with session.post(
        '/v1/unload_lora_adapter', json={'lora_name': 'x'}, headers=GOOD
      ) as response:
        assert response.status == 200

  asyncio.run(main())


def test_without_a_publish_root_updates_go_through_as_sent(tmp_path):
  async def main():
    async with standing(tmp_path) as (_, _, session):
      status, told = await update(session, {'directory': '/anywhere'})
      assert status == 200 and json.loads(told['body']) == {
        'update_info': {'directory': '/anywhere'}
      }

  asyncio.run(main())


def test_the_upstream_gets_its_own_token_and_never_the_fronts(tmp_path):
  async def main():
    async with standing(tmp_path, upstream_token='inner') as (_, upstream, session):
      async with session.get('/health', headers=GOOD) as response:
        assert response.status == 200
      assert upstream.seen[0][2].getall('Authorization') == ['Bearer inner']
      assert TOKEN not in str(upstream.seen)

  asyncio.run(main())


def test_large_bodies_stream_both_ways(tmp_path):
  block, blocks = os.urandom(1 << 20), 48

  async def digest(request):
    digest, size = hashlib.sha256(), 0
    async for chunk in request.content.iter_any():
      digest.update(chunk)
      size += len(chunk)
    response = web.StreamResponse(headers={'X': '1'})
    await response.prepare(request)
    await response.write(f'{size} {digest.hexdigest()}\n'.encode())
    for _ in range(blocks):
      await response.write(block)
    return response

  async def pieces():
    for _ in range(blocks):
      yield block

  async def main():
    async with standing(tmp_path, digest) as (_, _, session):
      whole = hashlib.sha256(block * blocks).hexdigest()
      for data in (pieces(), block * blocks):
        async with session.post('/v1/completions', data=data, headers=GOOD) as response:
          assert await response.content.readline() == f'{blocks << 20} {whole}\n'.encode()
          got = hashlib.sha256()
          async for chunk in response.content.iter_any():
            got.update(chunk)
          assert got.hexdigest() == whole

  asyncio.run(main())


def test_nothing_waits_for_the_end_of_a_body(tmp_path):
  """Each piece is sent only when the piece before has come back."""

  async def echo(request):
    response = web.StreamResponse()
    await response.prepare(request)
    async for chunk in request.content.iter_any():
      await response.write(chunk)
    return response

  async def main():
    returned: asyncio.Queue[bytes] = asyncio.Queue()

    async def pieces():
      yield b'0'
      for i in range(1, 6):
        yield await returned.get() + str(i).encode()

    async with standing(tmp_path, echo) as (_, _, session):
      async with session.post('/v1/completions', data=pieces(), headers=GOOD) as response:
        got = []
        async for chunk in response.content.iter_any():
          got.append(chunk)
          returned.put_nowait(chunk)
      assert got == [b'0', b'01', b'012', b'0123', b'01234', b'012345']

  asyncio.run(main())


def test_bodies_beyond_the_limit_are_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(front_module, 'MAX_BODY', 1000)
  whole = []

  async def read(request):
    whole.append(len(await request.read()))
    return web.Response()

  async def pieces(size):
    for _ in range(size // 100):
      yield b'x' * 100
    yield b'x' * (size % 100)

  async def main():
    async with standing(tmp_path, read) as (front, upstream, session):
      for size, status in ((1000, 200), (1001, 413)):
        for data in (b'x' * size, pieces(size)):
          async with session.post('/v1/completions', data=data, headers=GOOD) as response:
            assert response.status == status
      async with connected(front.address) as raw:
        assert (
          await raw.exchange(request_bytes('POST', '/pause', AUTHORISED, 'Content-Length: 9999'))
        )[0] == 413
      assert len(upstream.seen) <= 3 and whole == [1000, 1000]

  asyncio.run(main())


def test_expecting_clients_are_told_to_go_on_only_with_the_token(tmp_path):
  expecting = ('Expect: 100-continue', 'Content-Length: 3')

  async def main():
    async with standing(tmp_path) as (front, _, _):
      async with connected(front.address) as raw:
        assert (await raw.exchange(request_bytes('POST', '/pause', *expecting)))[0] == 401
      async with connected(front.address) as raw:
        assert (await raw.exchange(request_bytes('POST', '/pause', AUTHORISED, *expecting)))[
          0
        ] == 100
        status, _, body = await raw.exchange(b'abc')
        assert status == 200 and json.loads(body)['body'] == 'abc'

  asyncio.run(main())


async def forever(request):
  await asyncio.Event().wait()


async def tokens_forever(request):
  response = web.StreamResponse()
  await response.prepare(request)
  while True:
    await response.write(b'token')
    await asyncio.sleep(0.01)


@pytest.mark.parametrize('kind', ['unix', 'loopback'])
@pytest.mark.parametrize('answer', [forever, tokens_forever])
def test_a_client_that_leaves_cancels_the_upstream_request(tmp_path, kind, answer):
  async def main():
    async with standing(tmp_path, answer, kind=kind) as (front, upstream, _):
      async with connected(front.address) as raw:
        raw.writer.write(request_bytes('POST', '/inference/v1/generate', AUTHORISED, body=b'{}'))
        while not upstream.seen:
          await asyncio.sleep(0.01)
        if answer is tokens_forever:
          await raw.reader.readuntil(b'token')
        assert not upstream.cancelled.is_set()
      await upstream.cancelled.wait()

  asyncio.run(main())


def test_a_client_that_does_not_read_is_disconnected(tmp_path, monkeypatch):
  monkeypatch.setattr(front_module, '_READ_S', 0.2)

  async def endless(request):
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
      await response.write(bytes(1 << 20))

  async def main():
    async with standing(tmp_path, endless) as (front, upstream, _), connected(front.address) as raw:
      raw.writer.write(request_bytes('POST', '/inference/v1/generate', AUTHORISED, body=b'{}'))
      await upstream.cancelled.wait()

  asyncio.run(main())


def test_a_small_body_is_sent_with_the_headers(tmp_path):
  """vLLM answers some requests without reading their body, and closes the connection. If the body
  came later, the answer could be lost.
  """
  first = []

  async def serve(reader, writer):
    first.append(await reader.read(1 << 16))
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok')
    writer.close()

  async def main():
    server = await asyncio.start_unix_server(serve, str(tmp_path / 'upstream.sock'))
    front = Front(config(tmp_path), upstream=f'unix:{tmp_path}/upstream.sock')
    async with server, front, connected(front.address) as raw:
      head = request_bytes('POST', '/start_weight_update', AUTHORISED, 'Content-Length: 2')
      raw.writer.write(head)
      await asyncio.sleep(0.05)
      raw.writer.write(b'{}')
      assert b'200 OK' in await raw.reader.readline()

  asyncio.run(main())
  assert first[0].endswith(b'\r\n\r\n{}')


def test_a_client_that_leaves_in_its_request_is_not_passed_on_as_whole(tmp_path):
  ends = []

  async def read(request):
    try:
      ends.append(await request.read())
    except BaseException as error:
      ends.append(type(error))
      raise

  async def main():
    async with standing(tmp_path, read) as (front, upstream, _):
      chunked = 'Transfer-Encoding: chunked'
      for framing, part, last in (
        ('Content-Length: 100000', b'abc', b'def'),  # A stream; a small body is read first.
        (chunked, b'3\r\nabc\r\n', b'3\r\nde'),
        (chunked, b'3\r\nabc\r\n', b'zz\r\n0\r\n\r\n'),
      ):
        async with connected(front.address) as raw:
          raw.writer.write(request_bytes('POST', '/v1/completions', AUTHORISED, framing) + part)
          wanted = len(ends) + 1
          while len(upstream.seen) < wanted:
            await asyncio.sleep(0.01)
          raw.writer.write(last)
          await raw.writer.drain()
        while len(ends) < wanted:
          await asyncio.sleep(0.01)
      assert all(isinstance(end, type) for end in ends), ends
      async with connected(front.address) as raw:  # Of a small body, the server hears nothing.
        raw.writer.write(request_bytes('POST', '/pause', AUTHORISED, 'Content-Length: 9') + b'abc')
        await raw.writer.drain()
        await asyncio.sleep(0.05)
      await asyncio.sleep(0.05)
      assert len(upstream.seen) == wanted

  asyncio.run(main())


def test_close_breaks_off_what_is_under_way(tmp_path):
  async def main():
    async with standing(tmp_path, tokens_forever) as (front, upstream, session):
      async with session.post('/v1/completions', headers=GOOD) as response:
        await response.content.readexactly(5)
        await front.close()
        with pytest.raises(aiohttp.ClientPayloadError):
          await response.read()
      await upstream.cancelled.wait()
      await front.close()
      address = await front.start()
      async with (
        aiohttp.ClientSession() as other,
        other.get(f'{address}/nowhere', headers=GOOD) as response,
      ):
        assert response.status == 403

  asyncio.run(main())


def test_an_upstream_that_is_not_there_is_a_bad_gateway(tmp_path):
  async def main():
    with socket.socket() as free:
      free.bind(('127.0.0.1', 0))
      for upstream in (f'unix:{tmp_path}/none.sock', f'http://127.0.0.1:{free.getsockname()[1]}'):
        async with (
          Front(config(tmp_path), upstream=upstream) as front,
          aiohttp.ClientSession(front.address) as session,
        ):
          for _ in range(2):
            async with session.post('/pause', data=b'x', headers=GOOD) as response:
              assert response.status == 502
              error = (await response.json())['error']
              assert error['type'] == 'BadGateway' and str(tmp_path) not in error['message']

  asyncio.run(main())


def test_an_upstream_that_dies_before_it_answers_is_a_bad_gateway(tmp_path):
  async def die(request):
    request.transport.abort()

  async def main():
    async with (
      standing(tmp_path, die) as (_, _, session),
      session.post('/pause', headers=GOOD) as response,
    ):
      assert response.status == 502

  asyncio.run(main())


@pytest.mark.parametrize('length', [None, 1000])
def test_an_upstream_that_dies_in_its_response_breaks_the_clients_connection(tmp_path, length):
  async def die(request):
    response = web.StreamResponse()
    response.content_length = length
    await response.prepare(request)
    await response.write(b'begun')
    await release.wait()
    request.transport.abort()

  async def main():
    nonlocal release
    release = asyncio.Event()
    async with standing(tmp_path, die) as (front, _, session):
      async with session.post('/v1/completions', headers=GOOD) as response:
        assert response.status == 200 and await response.content.readexactly(5) == b'begun'
        release.set()
        with pytest.raises(aiohttp.ClientPayloadError):
          await response.read()
      async with connected(front.address) as raw:
        raw.writer.write(request_bytes('POST', '/v1/completions', AUTHORISED))
        with contextlib.suppress(ConnectionError):
          assert not (await raw.reader.read()).endswith(b'0\r\n\r\n')

  release = None
  asyncio.run(main())


def test_redirects_are_passed_back_and_not_followed(tmp_path):
  async def away(request):
    return web.Response(status=307, headers={'Location': '/collective_rpc'})

  async def main():
    async with standing(tmp_path, away) as (_, upstream, session):
      async with session.post('/pause', headers=GOOD, allow_redirects=False) as response:
        assert response.status == 307 and 'Location' not in response.headers
      assert len(upstream.seen) == 1

  asyncio.run(main())


def test_compressed_responses_stay_as_they_are(tmp_path):
  packed = gzip.compress(b'text' * 1000)

  async def answer(request):
    assert request.headers['Accept-Encoding'] == 'identity'
    return web.Response(body=packed, headers={'Content-Encoding': 'gzip'})

  async def main():
    async with standing(tmp_path, answer) as (front, _, _), connected(front.address) as raw:
      status, headers, body = await raw.exchange(request_bytes('GET', '/metrics', AUTHORISED))
      assert (status, headers['content-encoding'], body) == (200, 'gzip', packed)

  asyncio.run(main())


def test_responses_do_not_tell_what_runs_inside(tmp_path):
  async def main():
    async with standing(tmp_path) as (_, _, session):
      for path, headers in (('/health', GOOD), ('/health', {}), ('/nowhere', GOOD)):
        async with session.get(path, headers=headers) as response:
          assert not re.search(
            r'aiohttp|python|uvicorn|vllm|\d\.\d', response.headers['Server'].lower()
          )
          assert 'Via' not in response.headers and 'X-Powered-By' not in response.headers

  asyncio.run(main())


def test_many_requests_wait_at_once(tmp_path):
  count = 150

  async def main():
    everyone = asyncio.Barrier(count)

    async def meet(request):
      await everyone.wait()
      return web.Response(text='met')

    async def ask(session):
      async with session.post('/v1/completions', headers=GOOD) as response:
        return await response.text()

    async with standing(tmp_path, meet) as (front, _, _):
      connector = aiohttp.TCPConnector(limit=0)
      async with aiohttp.ClientSession(front.address, connector=connector) as session:
        assert await asyncio.gather(*(ask(session) for _ in range(count))) == ['met'] * count

  asyncio.run(main())


def test_several_fronts_keep_their_tokens_and_counts_apart(tmp_path):
  async def main():
    async with Upstream().running(tmp_path) as upstream:
      tokens = ['first-token-0123456789', 'second-token-0123456789']
      fronts = [
        Front(
          FrontConfig(token_file=token_file(tmp_path, token, name=token)),
          upstream=upstream.addresses[kind],
        )
        for token, kind in zip(tokens, ('unix', 'loopback'), strict=True)
      ]
      async with fronts[0], fronts[1], aiohttp.ClientSession() as session:
        statuses = {}
        for i, front in enumerate(fronts):
          for j, token in enumerate(tokens):
            async with session.get(
              f'{front.address}/health', headers={'Authorization': f'Bearer {token}'}
            ) as response:
              statuses[i, j] = response.status
        assert statuses == {(0, 0): 200, (0, 1): 401, (1, 0): 401, (1, 1): 200}
        assert [front.refused for front in fronts] == [1, 1]

  asyncio.run(main())


@pytest.mark.parametrize('tls', [False, True], ids=['plain', 'tls'])
@pytest.mark.parametrize('sent', [b'', b'GET /health HTTP/1.1\r\nHost: x\r\n', request_bytes()])
def test_a_connection_without_the_token_is_closed_at_its_deadline(
  tmp_path, monkeypatch, certificate, sent, tls
):
  monkeypatch.setattr(server_module, '_STRANGER_S', 0.2)
  fields = dict(zip(('tls_cert', 'tls_key'), certificate, strict=False)) if tls else {}

  async def main():
    async with (
      standing(tmp_path, fields=fields) as (front, upstream, _),
      connected(front.address) as raw,
    ):
      raw.writer.write(sent)
      with contextlib.suppress(ConnectionError):
        answered = await raw.reader.read()  # To the end.
        assert not answered or answered.startswith(b'HTTP/1.1 401 ')
      assert upstream.seen == []

  asyncio.run(main())


@pytest.mark.full
def test_a_connection_with_the_token_has_no_such_deadline(tmp_path, monkeypatch):
  monkeypatch.setattr(server_module, '_STRANGER_S', 2.0)

  async def main():
    async with standing(tmp_path) as (front, _, _), connected(front.address) as raw:
      assert (await raw.exchange(request_bytes('GET', '/health', AUTHORISED)))[0] == 200
      await asyncio.sleep(2.2)
      assert (await raw.exchange(request_bytes('GET', '/health', AUTHORISED)))[0] == 200

  asyncio.run(main())


@pytest.mark.full
def test_a_connection_does_not_inherit_the_deadline_of_its_descriptor(tmp_path, monkeypatch):
  monkeypatch.setattr(server_module, '_STRANGER_S', 1.0)

  async def main():
    async with standing(tmp_path) as (front, _, _):
      async with connected(front.address) as closed:
        closed.writer.write(b'no HTTP\r\n\r\n')
        await closed.reader.read()
      await asyncio.sleep(0.9)
      async with connected(front.address) as raw:
        await asyncio.sleep(0.3)
        assert (await raw.exchange(request_bytes('GET', '/health', AUTHORISED)))[0] == 200

  asyncio.run(main())


@pytest.mark.full
def test_a_flood_of_strangers_leaves_descriptors(tmp_path, monkeypatch):
  monkeypatch.setattr(server_module, '_permit_descriptors', lambda: 200)
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  code = """import socket, sys
idle = [socket.socket() for _ in range(400)]
for connection in idle:
  connection.setblocking(False)
  connection.connect_ex(('127.0.0.1', int(sys.argv[1])))
print('connected', flush=True)
sys.stdin.read()
"""
  faults = []

  async def main():
    asyncio.get_running_loop().set_exception_handler(
      lambda _, fault: faults.append(fault['message'])
    )
    async with standing(tmp_path) as (front, _, session):
      command = [sys.executable, '-c', code, str(yarl.URL(front.address).port)]
      flood = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
      resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 200, hard))
      try:
        # The event loop stands still: all of them come at once.
        assert flood.stdout.readline() == 'connected\n'
        async with session.get('/health', headers=GOOD) as response:
          assert response.status == 200
      finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        flood.communicate()

  asyncio.run(main())
  assert faults == []


@pytest.mark.parametrize('tls', [False, True], ids=['plain', 'tls'])
def test_strangers_make_room_for_each_other_and_keep_nobody_out(
  tmp_path, monkeypatch, certificate, tls
):
  monkeypatch.setattr(server_module, '_STRANGERS', 4)
  fields, trusting = {}, {}
  if tls:
    fields = {'tls_cert': certificate[0], 'tls_key': certificate[1]}
    trusting = {'ssl': ssl.create_default_context(cafile=certificate[0])}

  async def main():
    async with (
      standing(tmp_path, fields=fields) as (front, _, session),
      contextlib.AsyncExitStack() as stack,
    ):
      strangers = [await stack.enter_async_context(connected(front.address)) for _ in range(12)]
      for stranger in strangers[:8]:  # The oldest are closed.
        with contextlib.suppress(ConnectionError):
          assert await stranger.reader.read() == b''
      for _ in range(3):
        async with session.get('/health', headers=GOOD, **trusting) as response:
          assert response.status == 200
      if tls:  # The last of them may still begin its handshake.
        await strangers[-1].writer.start_tls(trusting['ssl'], server_hostname='127.0.0.1')
      assert (await strangers[-1].exchange(request_bytes('GET', '/health', AUTHORISED)))[0] == 200

  asyncio.run(main())


def test_a_body_that_stalls_is_given_up(tmp_path, monkeypatch):
  monkeypatch.setattr(server_module, '_BODY_S', 0.2)

  async def main():
    async with standing(tmp_path) as (front, _, _), connected(front.address) as raw:
      lines = (AUTHORISED, 'Content-Type: application/json', 'Content-Length: 1000')
      status, _, body = await raw.exchange(
        request_bytes('POST', '/inference/v1/generate', *lines) + b'{"tok'
      )
      assert status == 408 and 'for 0.2 s' in body.decode()

  asyncio.run(main())


def test_a_front_may_open_more_files_than_the_shell_grants(tmp_path):
  code = (
    'import asyncio, resource, sys\n'
    'from jaxrl_llm.core.net.front import Front, FrontConfig\n'
    'resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))\n'
    'async def main():\n'
    '  async with Front(FrontConfig(token_file=sys.argv[1]), upstream="http://127.0.0.1:9"):\n'
    '    print(resource.getrlimit(resource.RLIMIT_NOFILE))\n'
    'asyncio.run(main())'
  )
  command = [sys.executable, '-c', code, token_file(tmp_path)]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
  assert done.stdout.strip() == '(4096, 4096)'


def test_a_taken_port_is_one_clear_line(tmp_path):
  async def main():
    with socket.socket() as taken:
      taken.bind(('127.0.0.1', 0))
      taken.listen()
      port = taken.getsockname()[1]
      front = Front(config(tmp_path, port=port), upstream='unix:/x.sock')
      with pytest.raises(
        UserError, match=rf'front\.port: {port} of 127\.0\.0\.1 is in use; .*set another'
      ) as caught:
        await front.start()
      assert '\n' not in str(caught.value)
    # It holds nothing: once the port is free, the same front takes it.
    async with front:
      assert front.address == f'http://127.0.0.1:{port}'

  asyncio.run(main())


def test_an_address_of_another_host_is_one_clear_line(tmp_path):
  async def main():
    front = Front(
      config(tmp_path, host='203.0.113.7', allow_plaintext=True), upstream='unix:/x.sock'
    )
    with pytest.raises(UserError, match=r'cannot listen on 203\.0\.113\.7'):
      await front.start()

  asyncio.run(main())


def test_refusals_are_logged_ever_more_rarely_and_without_what_was_sent(tmp_path, caplog):
  async def main():
    async with standing(tmp_path) as (front, _, session):
      for _ in range(20):
        async with session.get('/health', headers={'Authorization': 'Bearer guessed-secret'}):
          pass
      assert front.refused == 20

  with caplog.at_level('DEBUG'):
    asyncio.run(main())
  lines = [
    record.getMessage() for record in caplog.records if 'without the token' in record.getMessage()
  ]
  assert [int(re.search(r'\d+', line).group()) for line in lines] == [1, 2, 4, 8, 16]
  assert 'guessed-secret' not in caplog.text and TOKEN not in caplog.text


def test_tls(tmp_path, certificate):
  cert, key, _ = certificate

  async def main():
    async with Upstream().running(tmp_path) as upstream:
      front = Front(
        config(tmp_path, tls_cert=cert, tls_key=key), upstream=upstream.addresses['unix']
      )
      async with front, aiohttp.ClientSession() as session:
        assert front.address.startswith('https://127.0.0.1:')
        trusting = {'ssl': ssl.create_default_context(cafile=cert)}
        async with session.get(f'{front.address}/health', headers=GOOD, **trusting) as response:
          assert response.status == 200
        async with session.get(f'{front.address}/health', **trusting) as response:
          assert response.status == 401
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
          await session.get(f'{front.address}/health', headers=GOOD)
        with pytest.raises(aiohttp.ClientError):
          await session.get(front.address.replace('https', 'http') + '/health', headers=GOOD)
        assert len(upstream.seen) == 1

  asyncio.run(main())


def test_a_broken_response_is_seen_through_tls(tmp_path, certificate):
  cert, key, _ = certificate

  async def die(request):
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b'begun')
    request.transport.abort()

  async def main():
    async with Upstream(die).running(tmp_path) as upstream:
      front = Front(
        config(tmp_path, tls_cert=cert, tls_key=key), upstream=upstream.addresses['unix']
      )
      async with front, aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
          async with session.get(
            f'{front.address}/health', headers=GOOD, ssl=ssl.create_default_context(cafile=cert)
          ) as response:
            await response.read()

  asyncio.run(main())


def test_unfit_certificates_are_one_clear_line(tmp_path, certificate):
  cert, key, locked = certificate
  for fields in (
    {'tls_cert': cert, 'tls_key': locked},
    {'tls_cert': cert, 'tls_key': str(tmp_path / 'none')},
    {'tls_cert': key, 'tls_key': key},
  ):
    with pytest.raises(UserError, match=r'tls_cert, front\.tls_key: cannot use') as caught:
      Front(config(tmp_path, **fields), upstream='unix:/x.sock')
    assert '\n' not in str(caught.value)


def test_the_module_is_light():
  code = (
    'import sys, jaxrl_llm.core.net.front; print(*sorted(m for m in sys.modules if m.split(".")[0] '
    'in ("jax", "numpy", "torch", "vllm", "jaxrl_llm")))'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True
  )
  own = {
    'jaxrl_llm',
    'jaxrl_llm.core',
    'jaxrl_llm.core.errors',
    'jaxrl_llm.core.net',
    'jaxrl_llm.core.net.connections',
    'jaxrl_llm.core.net.token_server',
    'jaxrl_llm.core.net.front',
    'jaxrl_llm.core.net.server',
    'jaxrl_llm.core.net.tickets',
  }
  assert set(done.stdout.split()) == own


cabled = pytest.fixture(namespaces.cabled)


def serve_in_namespace(folder):
  """Upstream on loopback and a front on the cable; a line of JSON with the addresses, then one per
  line of input.
  """

  async def main():
    folder_ = pathlib.Path(folder)
    async with Upstream().running(folder_) as upstream:
      fields = {
        'host': namespaces.SERVING,
        'allow_plaintext': True,
        'token_file': str(folder_ / 'token'),
      }
      async with Front(FrontConfig(**fields), upstream=upstream.addresses['loopback']) as front:
        print(
          json.dumps({'front': front.address, 'upstream': upstream.addresses['loopback']}),
          flush=True,
        )
        while await asyncio.to_thread(sys.stdin.readline):
          print(
            json.dumps({'seen': [[m, p] for m, p, _ in upstream.seen], 'refused': front.refused}),
            flush=True,
          )

  asyncio.run(main())


def call_from_namespace(front, upstream, token):
  """One call per route, and whether the upstream's port, and another, can be reached at the serving
  end.
  """

  async def connects(host, port):
    try:
      _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 10)
    except OSError:
      return False
    writer.close()
    return True

  async def main():
    statuses = []
    headers = {'Authorization': f'Bearer {token}'} if token else {}
    async with aiohttp.ClientSession(front) as session:
      for method, path in ROUTES:
        body = {'json': {'method': 'jaxrl_digests'}} if method == 'POST' else {}
        async with session.request(method, path, headers=headers, **body) as response:
          statuses.append(response.status)
    port = yarl.URL(upstream).port
    reached = {
      f'{host}:{port}': await connects(host, port) for host in (namespaces.SERVING, '127.0.0.1')
    }
    print(json.dumps({'statuses': statuses, 'reached': reached}))

  asyncio.run(main())


@pytest.mark.full
def test_another_host_reaches_the_server_through_the_front_alone(tmp_path, cabled):
  token_file(tmp_path)
  env = cabled.environment()
  pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'text': True, 'env': env}
  server = subprocess.Popen(cabled.run(0, __name__, 'serve_in_namespace', str(tmp_path)), **pipes)

  def told():
    print(file=server.stdin, flush=True)
    return json.loads(server.stdout.readline())

  def call(token):
    command = cabled.run(
      1, __name__, 'call_from_namespace', addresses['front'], addresses['upstream'], token
    )
    done = subprocess.run(
      command, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=PATIENCE_S
    )
    return json.loads(done.stdout)

  try:
    addresses = json.loads(server.stdout.readline())
    paths = {path for _, path in ROUTES}
    assert {'/collective_rpc', '/pause', '/resume', '/update_weights'} <= paths
    port = yarl.URL(addresses['upstream']).port
    nowhere = {f'{namespaces.SERVING}:{port}': False, f'127.0.0.1:{port}': False}

    assert call('') == {'statuses': [401] * len(ROUTES), 'reached': nowhere}
    assert told() == {'seen': [], 'refused': len(ROUTES)}
    assert call(TOKEN) == {'statuses': [200] * len(ROUTES), 'reached': nowhere}
    assert told() == {'seen': [list(route) for route in ROUTES], 'refused': len(ROUTES)}
  finally:
    server.kill()
    server.communicate()
