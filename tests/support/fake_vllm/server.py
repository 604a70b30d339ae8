"""The fake server itself: its routes, its start and end, and the choice of a request's fault.

Invariant: all code of a server runs in the event loop that started it, so a handler sees no
half-made change.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from absl import logging
from aiohttp import web

from fake_vllm.answers import (
  aborted_half_way,
  completions,
  event,
  failure,
  metrics,
  send_and_close,
  send_half,
  to_json,
)
from fake_vllm.backends import Backend
from fake_vllm.core import Call, Core, CoreDead, Sample
from fake_vllm.faults import Fault, Faults, Latency
from fake_vllm.requests import GENERATE, MODEL, Refusal, invalid, parse, read_json
from fake_vllm.weights import Worker, WorkerError
from jaxrl_llm.core.errors import UserError

_CORE_DEAD = 'EngineCore encountered an issue. See stack trace (above) for the root cause.'
_GRACE_S = 0.2
"""Seconds between the death of the engine core and that of the server. They leave time for the last
answers.
"""

_FAULT = web.RequestKey('fault', object)
"""Key of the fault that a request meets."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeServer:
  """One fake vLLM server."""

  def __init__(
    self,
    backend: Backend,
    *,
    max_model_len: int,
    vocab_size: int,
    eos_ids: Sequence[int] = (),
    faults: Faults | None = None,
    latency: Latency | None = None,
    api_key: str | None = None,
    root: str = MODEL,
    sleeps: bool = False,
    verifies: bool = True,
  ):
    """
    Args:
      max_model_len: maximum number of tokens of a sequence, including the prompt.
      vocab_size: size of the vocabulary. A prompt with a token outside it kills the engine core, as
        on a server without a tokenizer.
      eos_ids: tokens that end every completion, unless the request ignores them.
      faults: faults of the server. If None, there are none at first. They can be changed through
        the attribute `faults`.
      api_key: key that is required on paths that begin with /v1 or /inference.
      root: the model's directory, as /v1/models reports it.
      sleeps: whether the server simulates a GPU with --enable-sleep-mode. On CPUs, vLLM only
        reports that it sleeps, and keeps its memory.
      verifies: whether the workers can verify files before an update. Those of earlier releases
        cannot.
    """
    self.faults = Faults() if faults is None else faults
    self.requests: collections.Counter[str] = collections.Counter()
    """Number of requests, keyed by path. Failed requests count too."""
    self.generate_bodies: collections.deque[dict[str, Any]] = collections.deque(maxlen=4096)
    """Newest well-formed bodies of generate requests, oldest first."""
    self.ended = asyncio.Event()
    """Set when the server has died or was closed."""
    self._core = Core(backend, self.faults, latency or Latency())
    self._worker = Worker(self._core, device='cuda' if sleeps else 'cpu', verifies=verifies)
    self._max_model_len, self._vocab_size, self._eos_ids = max_model_len, vocab_size, tuple(eos_ids)
    self._api_key, self._root, self._created = api_key, root, int(time.time())
    self._sleeps = sleeps
    self._background: set[asyncio.Task] = set()
    self._runner: web.AppRunner | None = None
    self._uds: str | None = None

  @property
  def tokens(self) -> int:
    """Number of tokens drawn so far."""
    return self._core.tokens

  @property
  def finished(self) -> Mapping[str, int]:
    """Number of completions that have ended, keyed by finish_reason."""
    return self._core.finished

  @property
  def running(self) -> int:
    """Number of completions that have not ended."""
    return self._core.running

  @property
  def paused(self) -> bool:
    return self._core.paused

  @property
  def sleeping(self) -> bool:
    return self._core.sleeping

  @property
  def label(self) -> str:
    """Label of new tokens."""
    return self._core.label

  async def start(self, *, uds: str | None = None, host: str = '127.0.0.1', port: int = 0) -> str:
    """Serves at a Unix socket, or at a port if `uds` is None (0 means a free port). Returns the
    address: `unix:/path` or `http://host:port`.
    """
    await self._core.backend.start(max_length=self._max_model_len)
    try:
      return await self._listen(uds, host, port)
    except OSError as error:
      await self.close()
      place = uds or f'{host}:{port}'
      raise UserError(
        f'{place}: cannot listen there ({error.strerror}); give another --uds or --port'
      ) from None

  async def _listen(self, uds: str | None, host: str, port: int) -> str:
    application = web.Application(middlewares=[self._middleware], client_max_size=1 << 30)
    application.add_routes(
      [web.route(method, path, handler) for (method, path), handler in self._routes().items()]
    )
    self._runner = web.AppRunner(
      application, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
    )
    await self._runner.setup()
    if uds is not None:
      await web.UnixSite(self._runner, uds).start()
      self._uds = uds
      return f'unix:{uds}'
    await web.TCPSite(self._runner, host, port).start()
    return f'http://{host}:{self._runner.addresses[0][1]}'

  async def close(self) -> None:
    """Ends the server and its backend. Calls in progress are broken off."""
    alive = not self.ended.is_set()
    await self.die()
    if self._runner is not None:
      await self._runner.cleanup()
      self._runner = None
    for task in self._background:
      task.cancel()
    if self._background:
      # Wait 'cancelled': short, since the tasks have just been cancelled.
      await asyncio.wait(self._background)
    await self._core.backend.close()
    if alive and self._uds is not None:
      with contextlib.suppress(FileNotFoundError):
        os.unlink(self._uds)

  async def die(self) -> None:
    """Simulates the death of the process: connections break off, and new ones are refused. The file
    of a Unix socket stays.
    """
    self.ended.set()
    if self._runner is None:
      return
    for site in list(self._runner.sites):
      await site.stop()
    for connection in list(self._runner.server.connections):
      if connection.transport is not None:
        connection.transport.abort()

  async def kill_core(self) -> None:
    """Simulates the death of the engine core: errors at first, and soon afterwards the death of the
    server.
    """
    if self._core.dead:
      return
    self._core.kill()

    async def follow() -> None:
      await asyncio.sleep(_GRACE_S)
      await self.die()

    self._keep(follow())

  def _keep(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task:
    task = asyncio.create_task(work)
    self._background.add(task)
    task.add_done_callback(self._background.discard)
    return task

  def _routes(self) -> Mapping[tuple[str, str], Handler]:
    return {
      ('GET', '/health'): self._health,
      ('GET', '/version'): _always(lambda: {'version': '0.32.0'}),
      ('GET', '/load'): _always(lambda: {'server_load': len(self._core.calls)}),
      ('GET', '/metrics'): self._metrics,
      ('GET', '/v1/models'): _always(self._models),
      ('GET', '/weight_info'): _always(lambda: {'weight_version': self.label}),
      ('GET', '/is_paused'): _always(lambda: {'is_paused': self.paused}),
      ('POST', '/pause'): self._pause,
      ('POST', '/resume'): self._resume,
      ('POST', '/sleep'): self._sleep,
      ('POST', '/wake_up'): self._wake_up,
      ('GET', '/is_sleeping'): _always(lambda: {'is_sleeping': self.sleeping}),
      ('POST', '/abort_requests'): self._abort_requests,
      ('POST', '/reset_prefix_cache'): _always(lambda: {'success': True}),
      ('POST', '/init_weight_transfer_engine'): self._init_transfer,
      ('POST', '/start_weight_update'): self._start_update,
      ('POST', '/update_weights'): self._update,
      ('POST', '/finish_weight_update'): self._finish_update,
      ('POST', '/update_weight_version'): self._set_label,
      ('POST', '/collective_rpc'): self._rpc,
      ('POST', GENERATE): self._generate,
    }

  @web.middleware
  async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
    self.requests[request.path] += 1
    fault = self.faults.meets(request.path)
    if fault is Fault.DIE:
      await self.die()
    if fault in (Fault.HANG, Fault.DIE):
      # Wait 'client': bounded by the client, whose hang-up cancels it.
      await asyncio.Event().wait()
    if fault is Fault.DELAY:
      await asyncio.sleep(self.faults.delay_s)
    if fault is Fault.CORE:
      await self.kill_core()
    if fault is Fault.INTERNAL_ERROR:
      return failure('the fake was told to fail')
    if fault is Fault.UNAVAILABLE:
      return web.Response(status=503)
    request[_FAULT] = fault
    response = await self._answer(request, handler)
    if response.prepared:  # Only a stream is prepared here. Its fault has already happened.
      return response
    if fault is Fault.CUT:
      return await send_half(request, response)
    if fault is Fault.ABORT:
      return aborted_half_way(response)
    return response

  async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
    guarded = request.path.startswith(('/v1', '/inference'))
    if (
      self._api_key
      and guarded
      and request.headers.get('Authorization') != f'Bearer {self._api_key}'
    ):
      return to_json({'error': 'Unauthorized'}, status=401)
    try:
      if self._core.dead and request.path != '/health':
        raise CoreDead
      if request.path == GENERATE:
        return await handler(request)
      # If its client's connection ends, only generation is cancelled. A command that has started is
      # completed.
      return await asyncio.shield(self._keep(handler(request)))
    except web.HTTPException as error:
      return to_json({'detail': error.reason}, status=error.status)
    except Refusal as refusal:
      return failure(str(refusal), status=refusal.status, kind=refusal.kind, param=refusal.param)
    except CoreDead:
      return failure(_CORE_DEAD)
    except WorkerError as error:
      message = (
        f"Call to collective_rpc method failed: Worker failed with error '{error}', please check "
        'the stack '
      )
      return await send_and_close(request, failure(f'{message}trace above for the root cause'))
    except Exception as error:
      logging.exception('fake: %s failed', request.path)
      return failure(f'{type(error).__name__}: {error}')

  async def _health(self, request: web.Request) -> web.Response:
    return web.Response(status=503 if self._core.dead else 200)

  async def _metrics(self, request: web.Request) -> web.Response:
    headers = {'Content-Type': 'text/plain; version=1.0.0; charset=utf-8'}
    return web.Response(body=metrics(self._core).encode(), headers=headers)

  def _models(self) -> dict[str, Any]:
    model = {
      'id': MODEL,
      'object': 'model',
      'created': self._created,
      'owned_by': 'vllm',
      'root': self._root,
    }
    return {
      'object': 'list',
      'data': [model | {'parent': None, 'max_model_len': self._max_model_len}],
    }

  async def _pause(self, request: web.Request) -> web.Response:
    mode = request.query.get('mode', 'abort')
    if mode not in ('abort', 'wait', 'keep'):
      raise invalid('query.mode', "Input should be 'abort', 'wait' or 'keep'")
    await self._core.pause(mode)
    return to_json({'status': 'paused'})

  async def _resume(self, request: web.Request) -> web.Response:
    self._core.resume()
    return to_json({'status': 'resumed'})

  async def _sleep(self, request: web.Request) -> web.Response:
    level = request.query.get('level', '1')
    if level not in ('0', '1', '2'):
      raise invalid('query.level', 'Input should be less than or equal to 2')
    await self._core.sleep(drops=self._sleeps and level == '2')
    return to_json({'status': 'sleeping', 'level': int(level)})

  async def _wake_up(self, request: web.Request) -> web.Response:
    if self.sleeping:
      self._core.wake_up()
    return to_json({'status': 'awake', 'tags': None})

  async def _abort_requests(self, request: web.Request) -> web.Response:
    names = (await read_json(request)).get('request_ids') or []
    if type(names) is not list:
      raise invalid('body.request_ids', 'Input should be a valid list')
    return to_json({'status': 'aborted', 'aborted': self._core.abort(names)})

  async def _init_transfer(self, request: web.Request) -> web.Response:
    await read_json(request, init_info=dict)
    return to_json({'message': 'Weight transfer initialized'})

  async def _start_update(self, request: web.Request) -> web.Response:
    self._worker.start()
    return to_json({'message': 'Weight update started'})

  async def _update(self, request: web.Request) -> web.Response:
    await self._worker.update((await read_json(request, update_info=dict))['update_info'])
    if self.faults.die_in_update:
      await self.die()
    return to_json({'message': 'Weights updated'})

  async def _finish_update(self, request: web.Request) -> web.Response:
    label = (await read_json(request)).get('weight_version')
    if not isinstance(label, str | None):
      raise invalid('body.weight_version', 'Input should be a valid string')
    self._worker.finish()
    if label is not None:
      self._core.name_version(label)
    return to_json({'message': 'Weight update finished'})

  async def _set_label(self, request: web.Request) -> web.Response:
    label = (await read_json(request, new_version=str))['new_version']
    self._core.name_version(label)
    return to_json({'success': True, 'new_version': label})

  async def _rpc(self, request: web.Request) -> web.Response:
    body = await read_json(request)
    if (method := body.get('method')) is None:
      raise Refusal("Missing 'method' in request body", kind='Bad Request')
    return to_json({'results': [await self._worker.call(method, *body.get('args', ()))]})

  async def _generate(self, request: web.Request) -> web.Response:
    if request.content_type != 'application/json':
      raise Refusal(
        "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
        kind='Bad Request',
      )
    body = await read_json(request, token_ids=list, sampling_params=dict)
    name, prompt, params = parse(
      body,
      number=self.requests[GENERATE],
      max_model_len=self._max_model_len,
      vocab_size=self._vocab_size,
      eos_ids=self._eos_ids,
    )
    self.generate_bodies.append(body)
    if max(prompt) >= self._vocab_size:
      await self.kill_core()
      raise CoreDead
    call = Call(name, prompt, params)
    if body.get('stream'):
      return await self._stream(request, call, with_prompt=bool(body.get('return_token_ids')))
    await self._core.run(call)
    return to_json(completions(call, with_prompt=bool(body.get('return_token_ids'))))

  async def _stream(
    self, request: web.Request, call: Call, *, with_prompt: bool
  ) -> web.StreamResponse:
    response = web.StreamResponse(headers={'Content-Type': 'text/event-stream; charset=utf-8'})
    with contextlib.suppress(ConnectionError):
      await response.prepare(request)
    running = asyncio.create_task(self._core.run(call))
    half = call.params.max_tokens // 2
    sent = dict.fromkeys(call.samples, 0)
    open_samples = list(call.samples)
    try:
      while open_samples and not self._core.dead:
        # Wait 'client': bounded by the client, whose hang-up cancels it.
        await call.grown.wait()
        call.grown.clear()
        for sample in [s for s in open_samples if self._has_event(call, s, sent[s])]:
          data = json.dumps(event(call, sample, sent[sample], with_prompt=with_prompt)).encode()
          with_prompt, sent[sample] = False, len(sample.tokens)
          if sample.finish is not None:
            open_samples.remove(sample)
          await response.write((self.faults.spoil or bytes)(b'data: ' + data + b'\n\n'))
          if sent[sample] >= half and request[_FAULT] is Fault.CUT:
            request.transport.close()
            return response
          if sent[sample] >= half and request[_FAULT] is Fault.ABORT:
            call.abort()
      await running
    except CoreDead:
      await response.write(b'data: ' + failure(_CORE_DEAD).body + b'\n\n')
    except ConnectionError:
      return response
    finally:
      running.cancel()
      await asyncio.wait([running])
    await response.write(b'data: [DONE]\n\n')
    return response

  def _has_event(self, call: Call, sample: Sample, sent: int) -> bool:
    """Returns whether a stream has something to send of a sample. The last token is sent together
    with `finish`.
    """
    unsent = len(sample.tokens) - sent
    if sample.finish is not None:
      return not self._core.dead
    return not sample.has_last and unsent >= (call.params.stream_interval if sent else 1)


def _always(answer: Callable[[], Mapping[str, Any]]) -> Handler:
  """Returns a handler that ignores the request's body."""

  async def handler(request: web.Request) -> web.Response:
    return to_json(answer())

  return handler
