"""A service of this host: a Unix socket that only this user can reach, and a front for others where one is wanted."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from aiohttp import web

from jaxrl_llm.core.disk import scratch
from jaxrl_llm.core.net.front import Front, FrontConfig


@contextlib.asynccontextmanager
async def listening(
  application: web.Application, *, name: str, front: FrontConfig | None, routes: Sequence[tuple[str, str]]
) -> AsyncIterator[tuple[str, str | None]]:
  """Serves while the block runs; gives the socket's address (`unix:…`), and the front's where there is one.

  Args:
    application: what answers; a handler is cancelled when its client goes away.
    name: part of the folder's.
    front: where others may come, with its token; None: only this user may, through the socket.
    routes: (method, path) of what the front lets through.

  Raises:
    UserError: where the front cannot listen.
  """
  with scratch(f'jaxrl-{name}-') as folder:
    socket = folder / 'socket'  # Short: a socket's path has 107 characters at most.
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.2, access_log=None)
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
