"""Recording proxy: a loopback server that offers agents the OpenAI chat-completions protocol.

Invariant: a request reaches only the session whose key it carries.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Self

from aiohttp import web

from jaxrl_llm.core.errors import RunError, one_line
from jaxrl_llm.core.files import MAX_DEPTH, check_depth
from jaxrl_llm.core.net.server import (
  SERVER,
  Refusal,
  Server,
  begin_upload,
  parse_object,
  split_path,
)
from jaxrl_llm.core.types import Json
from jaxrl_llm.rollout.agents.chat import chunks, completion
from jaxrl_llm.rollout.agents.session import Session

CHAT_PATH, MODELS_PATH, REWARD_PATH = '/v1/chat/completions', '/v1/models', '/v1/reward'
MODEL = 'policy'
"""Name of the only model that the proxy lists. Requests may use any name."""
MAX_BODY = 4 << 20
"""Maximum size of a request in bytes."""
_HOST = '127.0.0.1'
_WANTED = (
  'wanted "Authorization: Bearer KEY" with the key of an open session (OPENAI_API_KEY of an agent '
  'that is running); a key is valid only while its agent runs'
)

Handler = Callable[[web.BaseRequest, Session], Awaitable[web.StreamResponse]]


class Proxy:
  """Server for the requests of agents. Use it as an async context manager."""

  def __init__(self):
    self._sessions: dict[bytes, Session] = {}
    """Open sessions, keyed by the digest of their Authorization header. Looking up a digest takes
    the same time for every wrong key, so timing reveals nothing about valid keys.
    """
    self._handlers: Mapping[tuple[str, str], Handler] = {
      ('POST', CHAT_PATH): _chat,
      ('GET', MODELS_PATH): _models,
      ('POST', REWARD_PATH): _reward,
    }
    self._server = Server(
      tuple(self._handlers),
      authenticate=lambda given: self._sessions.get(_digest(given)),
      handle=self._handle,
      wanted=_WANTED,
    )

  async def __aenter__(self) -> Self:
    try:
      await self._server.start(_HOST, 0)
    except OSError as error:
      raise RunError(f'proxy of agents: cannot listen on {_HOST} ({error})') from None
    return self

  async def __aexit__(self, *_: object) -> None:
    await self._server.close()

  @property
  def base_url(self) -> str:
    """Base URL for OpenAI clients."""
    return f'http://{_HOST}:{self._server.port}/v1'

  @contextlib.asynccontextmanager
  async def open(self, session: Session) -> AsyncIterator[str]:
    """Serves requests of `session` during the block, and yields the session's key. When the block
    ends, the session is closed (see `Session.close`), which ends its calls in flight. If a call of
    the session has failed with an error that the agent did not cause, raises that error.
    """
    key = secrets.token_urlsafe(32)
    digest = _digest(f'Bearer {key}'.encode())
    self._sessions[digest] = session
    try:
      yield key
    except asyncio.CancelledError:
      session.cancel()
      raise
    finally:
      del self._sessions[digest]
      await session.close()

  async def _handle(self, request: web.BaseRequest, session: Session) -> web.StreamResponse:
    path, _ = split_path(request)
    return await self._handlers[request.method, path](request, session)


async def _chat(request: web.BaseRequest, session: Session) -> web.StreamResponse:
  asked, answer = await session.chat(await _body(request))
  if not asked.stream:
    return web.json_response(completion(answer, asked), headers=SERVER)
  response = web.StreamResponse(
    headers={**SERVER, 'Content-Type': 'text/event-stream', 'Cache-Control': 'no-cache'}
  )
  await response.prepare(request)
  await response.write(b''.join(chunks(answer, asked)))
  return response


async def _models(request: web.BaseRequest, session: Session) -> web.StreamResponse:
  model = {'id': MODEL, 'object': 'model', 'created': 0, 'owned_by': 'jaxrl_llm'}
  return web.json_response({'object': 'list', 'data': [model]}, headers=SERVER)


async def _reward(request: web.BaseRequest, session: Session) -> web.StreamResponse:
  session.reward(await _body(request))
  return web.json_response({}, headers=SERVER)


async def _body(request: web.BaseRequest) -> dict[str, Json]:
  upload = await begin_upload(request, MAX_BODY)
  data = await upload.read()
  body = parse_object(data)
  if data.count(b'[') + data.count(b'{') > MAX_DEPTH:  # Otherwise, it cannot be nested deeper.
    try:
      check_depth(body)
    except ValueError as error:
      raise Refusal(400, one_line(error)) from None
  return body


def _digest(header: bytes) -> bytes:
  return hashlib.sha256(header).digest()
