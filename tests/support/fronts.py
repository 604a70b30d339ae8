"""Fronts for tests: their token, their configuration, and a server behind them.

Processes in other network namespaces import this module, so it has few imports.
"""

import asyncio
import contextlib
import os
import sys

import aiohttp
import namespaces
from aiohttp import web

from jaxrl_llm.core.net.front import ROUTES, Front
from jaxrl_llm.core.net.token_server import FrontConfig

TOKEN = 'token-of-this-test-0123456789'


class Upstream:
  """The server behind a front. It listens at a Unix socket and at a loopback port, and records its
  requests.
  """

  def __init__(self, answer=None):
    self.seen = []
    self._answer = answer or self._report
    self.cancelled = asyncio.Event()

  async def _handle(self, request):
    self.seen.append((request.method, request.raw_path, request.headers))
    try:
      return await self._answer(request)
    except asyncio.CancelledError:
      self.cancelled.set()
      raise

  async def _report(self, request):
    body = await request.content.read()
    told = {
      'path': request.raw_path,
      'body': body.decode('latin1'),
      'type': request.headers.get('Content-Type'),
    }
    return web.json_response(told)

  @contextlib.asynccontextmanager
  async def running(self, folder):
    runner = web.ServerRunner(
      web.Server(self._handle, handler_cancellation=True), shutdown_timeout=0.1
    )
    await runner.setup()
    unix, site = str(folder / 'upstream.sock'), web.TCPSite(runner, '127.0.0.1', 0)
    # The same backlog as that of vLLM's server.
    await web.UnixSite(runner, unix, backlog=2048).start()
    await site.start()
    self.addresses = {'unix': f'unix:{unix}', 'loopback': f'http://127.0.0.1:{site.port}'}
    try:
      yield self
    finally:
      await runner.cleanup()


def token_file(folder, text=TOKEN + '\n', mode=0o600, name='token'):
  path = folder / name
  path.write_text(text)
  path.chmod(mode)
  return str(path)


def config(folder, **fields):
  return FrontConfig(**{'token_file': token_file(folder), **fields})


def request_bytes(method='GET', path='/health', *lines, body=b''):
  length = [f'Content-Length: {len(body)}'] if body else []
  return (
    '\r\n'.join([f'{method} {path} HTTP/1.1', 'Host: x', *lines, *length, '', '']).encode('latin1')
    + body
  )


def serve_before(address, folder):
  """Runs a front between two network namespaces, before a server. Ends when stdin ends."""

  async def main():
    token = os.path.join(folder, 'token')
    config = FrontConfig(host=namespaces.SERVING, allow_plaintext=True, token_file=token)
    async with Front(config, upstream=address) as front:
      print(front.address, flush=True)
      await asyncio.to_thread(sys.stdin.read)

  asyncio.run(main())


def call_every_route(address, token):
  """Prints the status of a call to each route, and of calls to a few paths that no front
  accepts.
  """

  async def main():
    headers = {'Authorization': f'Bearer {token}'} if token else {}
    async with aiohttp.ClientSession(address, headers=headers) as session:
      for method, path in (*ROUTES, ('POST', '/sleep'), ('GET', '/docs')):
        async with session.request(method, path, json={} if method == 'POST' else None) as response:
          print(path, response.status)

  asyncio.run(main())


AUTHORISED = f'Authorization: Bearer {TOKEN}'
