"""Server of published files to the hosts that fetch them, in a thread of a trainer's process.

Invariant: only files of described bundles are served, and only with the token.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import pathlib
import threading
from collections.abc import Callable, Mapping

from aiohttp import web

from jaxrl_llm.core.net.registry import public_address
from jaxrl_llm.core.net.server import Refusal
from jaxrl_llm.core.net.token_server import FrontConfig, TokenServer
from jaxrl_llm.rollout.vllm.pull.bundle import Bundle
from jaxrl_llm.rollout.vllm.pull.ranges import (
  WEIGHTS_PATH,
  read_range,
  send_nothing,
  send_range,
)

_START_S = 30.0
"""Deadline for the thread to listen, and to end."""


class WeightServer:
  """HTTP server of the files of bundles. It runs in a thread, so that the event loop of the process
  stays free.
  """

  def __init__(self, config: FrontConfig):
    """
    Args:
      config: address at which to listen, and the token of the servers' fronts.
    """
    self._config = config
    self.served: Mapping[str, tuple[pathlib.Path, Bundle]] = {}
    """Directory and description of each bundle, keyed by its id. It is only replaced as a whole,
    because the thread reads it.
    """
    self.address: str | None = None
    """Address at which other hosts reach the server; None while it does not listen."""
    self._stop: Callable[[], object] = lambda: None
    self._thread: threading.Thread | None = None

  def open(self) -> None:
    """Starts listening, if the server does not listen yet.

    Raises:
      UserError: the address, the token or the certificate cannot be used.
    """
    if self.address is not None:
      return
    started: concurrent.futures.Future[str] = concurrent.futures.Future()
    self._thread = threading.Thread(
      target=lambda: asyncio.run(self._serve(started)), name='weights', daemon=True
    )
    self._thread.start()
    self.address = started.result(_START_S)

  def close(self) -> None:
    """Stops listening."""
    if self.address is not None:
      self.address = None
      self._stop()
      self._thread.join(_START_S)

  async def _serve(self, started: concurrent.futures.Future[str]) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    self._stop = lambda: loop.call_soon_threadsafe(stop.set)
    try:
      server = TokenServer(self._config, routes=[('GET', WEIGHTS_PATH)], handle=self._send)
      await server.start()
    except BaseException as error:
      started.set_exception(error)
      return
    started.set_result(public_address(server.address))
    # Wait 'source': unbounded: it serves until it is closed.
    await stop.wait()
    await server.close()

  async def _send(self, request: web.BaseRequest) -> web.StreamResponse:
    asked = read_range(request)
    if asked is None:
      return send_nothing()
    served = self.served.get(asked.bundle)
    if served is None or served[1].file(asked.file) is None:
      raise Refusal(404, f'bundle {asked.bundle} is no longer published')
    return await send_range(request, served[0] / asked.file, asked)
