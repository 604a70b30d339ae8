"""HTTP server that runs programs in sandboxes.

`POST /run` takes a program with its tests and returns how the program ended.

Invariant: the server checks no token, so it listens on a unix socket that only its own user can
reach. Other users go through an HTTP proxy that checks a token (`core.net.front`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from absl import logging
from aiohttp import web

from jaxrl_llm.config.values import from_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Json
from jaxrl_llm.rewards.sandbox.isolation import Isolation, NoIsolation
from jaxrl_llm.rewards.sandbox.libraries import Library, preload_of
from jaxrl_llm.rewards.sandbox.sandbox import (
  Limits,
  ProgramOutcome,
  SandboxError,
  Sandboxes,
  Stop,
  Work,
)

RUN_PATH = '/run'
ROUTES = (('GET', '/health'), ('POST', RUN_PATH))
"""(method, path) of every route."""
MAX_BODY = 64 << 20
"""Maximum size of a request body in bytes."""
MOST = Limits(
  wall_s=120.0,
  cpu_s=120,
  memory_mib=8192,
  processes=256,
  files=4096,
  file_mib=1024,
  tmp_mib=1024,
  output_kib=65536,
)
"""Maximum limits that a request may ask for."""
_KINDS = 8
"""Maximum number of combinations of limits and libraries for which sandboxes are kept ready."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
  """Body of a `POST /run` request."""

  work: Work
  limits: Limits
  libraries: tuple[Library, ...] = ()
  """Libraries that the program may import."""


class SandboxServer:
  """Serves requests to run programs. At most `at_once` programs run at a time, and other requests
  wait.

  Raises:
    NoIsolation: this machine cannot isolate programs as requested.
  """

  def __init__(self, *, isolation: Isolation = 'auto', at_once: int):
    self._isolation, self._at_once = isolation, at_once
    self._threads = ThreadPoolExecutor(at_once, thread_name_prefix='sandbox')
    self._kinds: dict[tuple[Limits, frozenset[Library]], Sandboxes] = {}
    self._making = threading.Lock()
    self._sandboxes(Limits())

  @property
  def isolation(self) -> str:
    return self._kinds[Limits(), frozenset()].isolation

  def application(self) -> web.Application:
    """Returns the application that answers requests."""
    application = web.Application(client_max_size=MAX_BODY)
    application.router.add_get('/health', self._health)
    application.router.add_post(RUN_PATH, self._run)
    return application

  def close(self) -> None:
    self._threads.shutdown(wait=False, cancel_futures=True)
    for sandboxes in self._kinds.values():
      sandboxes.close()

  async def _health(self, request: web.Request) -> web.Response:
    return web.json_response({'isolation': self.isolation, 'at_once': self._at_once})

  async def _run(self, request: web.Request) -> web.Response:
    try:
      order = from_json(await request.json(), Order, 'body')
      # This runs in a thread, because the first request of its kind starts sandboxes.
      sandboxes = await asyncio.get_running_loop().run_in_executor(
        self._threads, self._sandboxes, order.limits, frozenset(order.libraries)
      )
    except NoIsolation as error:
      # NoIsolation must be caught before UserError, its base class. Another host may succeed.
      return web.Response(status=503, text=str(error))
    except (UserError, ValueError) as error:
      return web.Response(status=400, text=str(error))
    except RecursionError:
      return web.Response(
        status=400, text='the body is nested too deeply, wanted an order as `order_body` writes it'
      )
    stop = Stop()
    try:
      outcome = await asyncio.get_running_loop().run_in_executor(
        self._threads, order.work.run, sandboxes, stop
      )
    except asyncio.CancelledError:  # The client has hung up.
      stop.set()
      raise
    except (SandboxError, NoIsolation, OSError) as error:  # Another host may succeed.
      logging.exception('A sandbox failed')
      return web.Response(status=503, text=f'{type(error).__name__}: {error}')
    return web.json_response(dataclasses.asdict(outcome))

  def _sandboxes(self, limits: Limits, libraries: frozenset[Library] = frozenset()) -> Sandboxes:
    for name, most in dataclasses.asdict(MOST).items():
      asked = getattr(limits, name)
      if asked > most:
        raise UserError(f'limit {name} is {asked}, wanted {most} at most')
    with self._making:
      kind = limits, libraries
      if kind not in self._kinds:
        if len(self._kinds) == _KINDS:
          raise UserError(
            f'this host already has sandboxes with {_KINDS} different limits or libraries; use one '
            'of them'
          )
        self._kinds[kind] = Sandboxes(
          limits,
          isolation=self._isolation,
          waiting=self._at_once,
          preload=preload_of(tuple(sorted(libraries))),
        )
      return self._kinds[kind]


def order_body(work: Work, limits: Limits, libraries: tuple[Library, ...] = ()) -> dict[str, Any]:
  return dataclasses.asdict(Order(work=work, limits=limits, libraries=libraries))


def read_outcome(answer: Json) -> ProgramOutcome:
  """Converts a server's response to an outcome. Raises UserError if the response is malformed."""
  return from_json(answer, ProgramOutcome, 'answer of the sandbox host')
