"""Serves HTTP on a Unix socket that only this user can open and, optionally, on a front that gives
other users access.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from aiohttp import web

from jaxrl_llm.core.disk import scratch
from jaxrl_llm.core.net.front import Front
from jaxrl_llm.core.net.token_server import FrontConfig


@contextlib.asynccontextmanager
async def listening(
  application: web.Application,
  *,
  name: str,
  front: FrontConfig | None,
  routes: Sequence[tuple[str, str]],
) -> AsyncIterator[tuple[str, str | None]]:
  """Serves `application` during the block.

  Yields the address of the socket (`unix:…`) and the address of the front, which is None if there
  is no front.

  Args:
    application: handles the requests; a handler is cancelled when its client disconnects.
    name: part of the name of the socket's directory.
    front: configuration of a front that gives other users authenticated access; if None, only this
      user has access.
    routes: (method, path) pairs of the requests that the front passes on.

  Raises:
    UserError: the front cannot listen.
  """
  with scratch(f'jaxrl-{name}-') as folder:
    # The name is short, because the path of a socket is limited to 107 characters.
    socket = folder / 'socket'
    runner = web.AppRunner(
      application, handler_cancellation=True, shutdown_timeout=0.2, access_log=None
    )
    await runner.setup()
    try:
      await web.UnixSite(runner, str(socket), backlog=1024).start()
      address = f'unix:{socket}'
      if front is None:
        yield address, None
        return
      async with Front(front, upstream=address, routes=routes) as opened:
        yield address, opened.address
    finally:
      await runner.cleanup()
