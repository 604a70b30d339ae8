"""HTTP services for tests of clients that score over HTTP: real servers on loopback, with given
answers.
"""

import asyncio
import contextlib
import json
import socket
import struct
import threading
import time

from aiohttp import web

HANG = object()
"""Answer that means: never answer."""
CUT = object()
"""Answer that means: close the connection in the middle of the answer."""
RESET = object()
"""Answer that means: reset the connection."""


class Service:
  """Answers each request with the result of `answer(body)`: JSON, text, a status, (status, JSON,
  headers), HANG, CUT or RESET.

  Attributes:
    seen: bodies of the requests, in order of arrival.
    headers: headers of the requests, in the same order.
    now: number of requests in progress.
    most: maximum number of requests in progress at once.
  """

  def __init__(self, answer):
    self.answer, self.seen, self.headers = answer, [], []
    self.most, self.now = 0, 0
    self.address = ''

  async def _handle(self, request):
    self.seen.append(body := json.loads(await request.read()))
    self.headers.append(dict(request.headers))
    self.now += 1
    self.most = max(self.most, self.now)
    try:
      said = self.answer(body)
      if asyncio.iscoroutine(said):
        said = await said
      return await self._respond(request, said)
    finally:
      self.now -= 1

  async def _respond(self, request, said):
    if said is HANG:
      await asyncio.Event().wait()
    if said is CUT:
      response = web.StreamResponse(headers={'Content-Length': '100'})
      await response.prepare(request)
      await response.write(b'{"value": 1')
      request.transport.close()
      return response
    if said is RESET:
      connection = request.transport.get_extra_info('socket')
      # Without lingering, the kernel sends a reset in place of the end of the stream.
      connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
      request.transport.abort()
      raise web.HTTPServiceUnavailable
    if isinstance(said, int):
      return web.Response(status=said, text=f'status {said}')
    if isinstance(said, str):
      return web.Response(text=said)
    status, value, headers = said if isinstance(said, tuple) else (200, said, {})
    return web.Response(
      status=status, text=json.dumps(value), headers=headers, content_type='application/json'
    )

  @contextlib.asynccontextmanager
  async def running(self, socket=None, tls=None):
    """Serves on a free port of loopback, or on a Unix socket. A port has TLS if a context is
    given.
    """
    server = web.Server(self._handle, handler_cancellation=True)
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    site = (
      web.TCPSite(runner, '127.0.0.1', 0, ssl_context=tls)
      if socket is None
      else web.UnixSite(runner, str(socket))
    )
    await site.start()
    scheme = 'https' if tls else 'http'
    self.address = (
      f'unix:{socket}' if socket else '{}://{}:{}'.format(scheme, *runner.addresses[0][:2])
    )
    try:
      yield self
    finally:
      await runner.cleanup()

  @contextlib.contextmanager
  def in_thread(self):
    """Serves from a separate thread, while the calling thread waits for a run."""
    loop, ended, ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def serve():
      async with self.running():
        ready.set()
        await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
      assert ready.wait(30)
      yield self
    finally:
      loop.call_soon_threadsafe(ended.set)
      thread.join()
      loop.close()


def chat(text, finish='stop'):
  """Returns the body of a chat completion with this text."""
  return {
    'choices': [
      {'index': 0, 'message': {'role': 'assistant', 'content': text}, 'finish_reason': finish}
    ]
  }


def one_after_another(*answers):
  """Returns an answer function that gives each answer once, in this order."""
  left = iter(answers)
  return lambda body: next(left)


def hangs_after(count, answer):
  """Returns an answer function that hangs after `count` requests, and the questions answered."""
  answered = []

  def reply(body):
    if len(answered) == count:
      return HANG
    answered.append(body['messages'][0]['content'])
    return answer(body)

  return reply, answered


def kill_at_line(child, journal, count):
  """Kills a child process with SIGKILL once its journal has `count` lines."""
  until = time.monotonic() + 120
  while not journal.exists() or journal.read_text().count('\n') < count:
    assert child.poll() is None and time.monotonic() < until
    time.sleep(0.02)
  child.kill()
  child.communicate()
