"""HTTP client of one vLLM server. Only this module contains the paths and bodies of the server's
API (vLLM 0.32), apart from the responses to requests for samples (`answer`).

Invariant: every returned value is complete and matches its request. Otherwise the client raises
`Lost` if the request may be retried on another server, `Refused` if the server works but rejects
the call, or `UserError` if no server can serve the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from jaxrl_llm.core import background
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.client import Client, Lost, Malformed, Refused, RemoteError, parse_json
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.api import Completion, Request, Undelivered
from jaxrl_llm.rollout.signed_answer import SignedPart
from jaxrl_llm.rollout.vllm.answer import (
  GENERATE_PATH,
  REQUEST_PREFIX,
  Begun,
  read_completion,
  read_parts,
  read_stream,
)
from jaxrl_llm.rollout.vllm.publication import Publication
from jaxrl_llm.rollout.vllm.stream import Arrivals, Broken, Recognition
from jaxrl_llm.rollout.vllm.ticket_office import SignedParts, TicketOffice

MODEL = 'policy'
"""Name under which servers serve the policy (`--served-model-name`)."""
_WEIGHT_INFO = '/weight_info'
_LABEL_S = 10.0
"""Time limit in seconds of a request for the server's label."""
_CLOSE = {'Connection': 'close'}
"""Header of all requests except requests for samples. vLLM closes a connection without notice after
an exception, and a later call on that connection would fail.
"""
_SEED_BITS = 62
_MAX_ANSWER_BYTES = 1 << 28
"""Maximum size of a response in bytes. The longest responses are lists of all tensors."""
_DRAFTED_TOKENS = 'vllm:spec_decode_num_draft_tokens_total'
"""Name of the server's counter of drafted tokens."""
_VERIFY_S, _LONGEST_VERIFY_S = 0.01, 0.2
"""First and longest interval, in seconds, between two requests that ask the workers whether they
have verified the files. The interval doubles each time.
"""
_KEPT_ADAPTERS = 2
"""Number of adapters kept on the server: the newest, and the previous one for completions in
flight.
"""


class VllmClient:
  """HTTP client of one vLLM server."""

  def __init__(
    self,
    address: str,
    *,
    key: str | None = None,
    ca_file: str | None = None,
    name: str | None = None,
  ):
    """
    Args:
      address: `unix:/path`, `http://host:port` or `https://host:port`.
      key: bearer token; None if the server requires none.
      ca_file: file of CA certificates for https servers. If None, the system's certificates are
        used.
      name: name in segments and messages. If None, the address is used.
    """
    self.address, self.name = address, name or address
    connect = functools.partial(
      Client,
      address,
      key=key,
      ca_file=ca_file,
      where=f'engine {self.name}',
      max_bytes=_MAX_ANSWER_BYTES,
    )
    self._calls, self._samples = connect(), connect()
    """HTTP clients. `_samples` sends the requests for samples, in the event loop for responses;
    `_calls` sends all other requests.
    """
    self._tickets = TicketOffice(
      address, key, name=self.name, call=self.call, answers=self._samples
    )
    self._is_closed = False
    self._fetches: set[asyncio.Timeout] = set()
    """Time limits of the calls of `fetch` in progress. They expire when the client is closed."""
    self._labels: dict[str, Version] = {}
    """Versions published through this client, keyed by label. Completions with other labels are
    rejected.
    """
    self._recognition = Recognition(self._shown_label, self._labels)
    self._cache_salt: str | None = None
    """Cache salt that new requests send; requests share cached keys and values only if their salts
    are equal. See `separate_cache`.
    """
    self.adapter: Publication | None = None
    """Adapter that new completions use; None for the base model."""
    self._adapters: list[str] = []
    """Names of the adapters loaded through this client, newest last."""

  async def close(self) -> None:
    self._is_closed = True
    while self._fetches:
      self._fetches.pop().reschedule(0)
    await self._tickets.close()
    await self._calls.close()
    await background.responses().run(self._samples.close())

  async def call(
    self,
    method: str,
    path: str,
    body: Any = None,
    *,
    deadline_s: float = 60.0,
    params: Mapping[str, str] | None = None,
    is_text: bool = False,
  ) -> Any:
    """Sends a request and returns the response as JSON, or as text if `is_text`. An empty response
    is returned as None instead of JSON.

    Raises:
      Lost: there is no response within `deadline_s`, the response is malformed, or its status is
        5xx.
      Refused: the status is neither 200 nor 5xx.
    """
    label = f'{self.name}: {path}'
    async with self._calls.request(
      method, path, body, label=label, deadline_s=deadline_s, params=params, headers=_CLOSE
    ) as response:
      data = await response.read()
    if is_text:
      return data.decode(errors='replace')
    return parse_json(data, label) if data else None

  async def is_healthy(self, *, deadline_s: float = 5.0) -> bool:
    try:
      await self.call('GET', '/health', deadline_s=deadline_s)
    except RemoteError:
      return False
    return True

  async def max_model_len(self) -> int:
    """Returns the length of the longest sequence that the server accepts, in tokens.

    Raises:
      UserError: the address is not that of a usable vLLM server.
      Lost: no server can be reached at the address.
    """
    try:
      answer = await self.call('GET', '/v1/models', deadline_s=30.0)
      return next(int(m['max_model_len']) for m in answer['data'] if m['id'] == MODEL)
    except Lost as error:
      # A server that cannot be reached now may suit the run later.
      kind = UserError if isinstance(error, Malformed) else Lost
      raise kind(
        f'engine {self.name}: no vLLM server answers at {self.address} ({error}); start one with '
        'jaxrl serve, or correct rollout.vllm.addresses'
      ) from None
    except Refused as error:
      if error.refuses_key:
        raise UserError(
          f'engine {self.name}: {self.address} refuses the key ({error}); rollout.vllm.key_file '
          'must hold the token that its jaxrl serve was started with'
        ) from None
      raise UserError(
        f'engine {self.name}: {self.address} is not a vLLM server ({error})'
      ) from None
    except (KeyError, TypeError, ValueError):
      raise UserError(
        f'engine {self.name}: {self.address} is not a vLLM server: its response to /v1/models does '
        'not have the expected form'
      ) from None
    except StopIteration:
      raise UserError(
        f'engine {self.name}: {self.address} serves no model called {MODEL!r}; start it with jaxrl '
        'serve'
      ) from None

  async def generate(
    self, request: Request, index: int, *, seed: int, deadline_s: float
  ) -> Completion:
    """Generates one completion of a request.

    Args:
      index: sample index of the completion; see `Request.first`.
      seed: seed of the engine, from which `sampler_seed` derives the seed that vLLM gets.

    Raises:
      Lost: the server does not answer, or its answer does not match the request.
      UserError: the server rejects the request, or does not apply the request's repetition rule.
    """
    body = self._body(request, index, seed)
    return await self._sampled(self._complete(body, request, self.adapter, deadline_s), request)

  async def stream(
    self, request: Request, index: int, *, seed: int, deadline_s: float, arrivals: Arrivals
  ) -> Completion:
    """Generates one completion of a request, like `generate`, and receives it in parts, which are
    added to `arrivals`.

    Raises:
      Broken: the completion broke off. The exception contains the tokens that arrived while the
        weights were known (`Arrivals.known`). It contains no tokens if the server may be a new
        process with other weights.
      Malformed: the response does not match the request. None of its tokens are kept.
    """
    body = self._body(request, index, seed, stream=arrivals.interval)
    receiving = self._receive(body, request, self.adapter, arrivals, deadline_s)
    return await self._sampled(receiving, request)

  async def check_front(self) -> None:
    """Raises Refused if no front signs the server's answers, and Lost if it does not respond."""
    await self._tickets.front()

  async def fetch(
    self,
    request: Request,
    index: int,
    *,
    seed: int,
    deadline_s: float,
    stream: int | None,
    is_known: Callable[[], bool],
  ) -> Completion:
    """Generates one completion of a request, like `generate`, and has the request's courier fetch
    it.

    Args:
      stream: number of tokens in each part of the answer; None if the answer has a single part.
      is_known: see `Arrivals`.

    Raises:
      Undelivered: the courier has not delivered the completion, and has not requested it.
      Broken, Malformed: as in `stream`.
      Lost, UserError: as in `generate`.
    """
    assert request.courier is not None, 'nobody fetches completions'
    try:
      front = await self._tickets.front()
    except Refused as error:
      raise Undelivered(str(error)) from None
    errand, parts = self._tickets.errand(
      front,
      json.dumps(self._body(request, index, seed, stream=stream)).encode(),
      deadline_s,
      read=functools.partial(
        self._read_parts, request, None if self.adapter is None else self.adapter.label
      ),
      is_known=is_known,
      arrived=self._recognition.look_soon,
    )
    fetching = self._tickets.completion(request.courier, errand, parts)
    return await self._unless_closed(fetching, parts)

  def _read_parts(
    self, request: Request, adapter: str | None, part: SignedPart, known: int, begun: float
  ) -> Completion | Begun:
    """Reads the signed parts of an answer; see `ticket_office.Read`."""
    return read_parts(
      part,
      request,
      known=known if self._recognition.is_since(begun) else 0,
      engine=self.name,
      labels=self._labels,
      adapter=adapter,
    )

  async def _unless_closed(
    self, fetch: Coroutine[Any, Any, Completion], parts: SignedParts
  ) -> Completion:
    """Returns the result of a coroutine. Cancels it once this client is closed, for example because
    the server has left: its host may answer nobody any more. Raises Broken then, unless all parts
    have been delivered.

    Args:
      parts: parts of the completion that have been delivered.
    """
    limit = asyncio.timeout(0 if self._is_closed else None)
    try:
      async with limit:
        self._fetches.add(limit)
        # Wait 'completion': bounded by the errand's deadline.
        return await fetch
    except TimeoutError:
      if not limit.expired():
        raise
      return await parts.given_up('the client has been closed')
    finally:
      self._fetches.discard(limit)

  def _body(
    self, request: Request, index: int, seed: int, *, stream: int | None = None
  ) -> dict[str, Any]:
    """Returns the body of the request for one sample. For the other arguments, see `generate`.

    Args:
      stream: number of tokens in each event of a streamed response; None for a whole response.
    """
    sampling = _sampling_params(request, sampler_seed(seed, request, index))
    body = {
      'request_id': f'{request.uid}/{index}',
      'token_ids': list(request.prompt),
      **_model(self.adapter),
      **self._salt(),
      'sampling_params': sampling,
    }
    if stream is not None:
      body['stream'] = True
      sampling['stream_interval'] = stream
    return body

  async def _sampled(self, work: Coroutine[Any, Any, Completion], request: Request) -> Completion:
    """Runs a coroutine in the event loop for responses.

    Args:
      work: sends the request for a sample and parses the response.
    """
    adapter = self.adapter
    try:
      return await background.responses().run(work)
    except Refused as error:
      # The server does not know the adapter, because it was restarted.
      if adapter is not None and error.status == 404:
        raise Lost(str(error)) from None
      raise UserError(f'request {request.uid}: {error}') from None

  async def _complete(
    self, body: Any, request: Request, adapter: Publication | None, deadline_s: float
  ) -> Completion:
    """Sends a request for a sample and parses the response. Called in the event loop for
    responses.
    """
    label = f'{self.name}: {GENERATE_PATH}'
    async with self._samples.request(
      'POST', GENERATE_PATH, body, label=label, deadline_s=deadline_s
    ) as response:
      data = await response.read()
    return await background.by_length(
      request.max_tokens,
      read_completion,
      data,
      request,
      engine=self.name,
      labels=self._labels,
      adapter=None if adapter is None else adapter.label,
    )

  async def _receive(
    self,
    body: Any,
    request: Request,
    adapter: Publication | None,
    arrivals: Arrivals,
    deadline_s: float,
  ) -> Completion:
    """Sends a request for a sample, receives the response in parts, and parses it. Called in the
    event loop for responses.
    """
    label, begun, lost = f'{self.name}: {GENERATE_PATH}', math.inf, None
    try:
      async with self._samples.request(
        'POST', GENERATE_PATH, body, label=label, deadline_s=deadline_s
      ) as response:
        begun = asyncio.get_running_loop().time()
        async for part in response.chunks():
          arrivals.add(part)
          if arrivals.size > _MAX_ANSWER_BYTES:
            raise Malformed(f'{label}: answered more than {_MAX_ANSWER_BYTES} bytes')
          self._recognition.look(begun)
    except Malformed:
      raise
    except Lost as error:
      lost = error
    answer = await background.by_length(
      request.max_tokens,
      read_stream,
      arrivals.whole(),
      request,
      known=arrivals.known if self._recognition.is_since(begun) else 0,
      name=f'{REQUEST_PREFIX}{body["request_id"]}',
      engine=self.name,
      labels=self._labels,
      adapter=None if adapter is None else adapter.label,
    )
    if isinstance(answer, Begun):
      count = len(answer.tokens) + answer.lost
      why = lost or f'{label}: broke off: {answer.reason or "the server gave no reason"}'
      raise Broken(f'{why} (after {count} tokens)', answer)
    return answer

  async def _shown_label(self) -> str:
    """Returns the server's label, like `served_label`. Called in the event loop for responses."""
    label = f'{self.name}: {_WEIGHT_INFO}'
    async with self._samples.request(
      'GET', _WEIGHT_INFO, label=label, deadline_s=_LABEL_S, headers=_CLOSE
    ) as response:
      answer = parse_json(await response.read(), label)
    if not isinstance(answer, dict):
      raise Malformed(f'{label}: answered {str(answer)[:80]}')
    return str(answer.get('weight_version'))

  async def warm_up(self, *, sampled: bool, deadline_s: float) -> None:
    """Makes the server compile its programs: sends a greedy request and, if `sampled`, a seeded
    request at temperature 1.
    """
    for temperature in (0.0, 1.0) if sampled else (0.0,):
      params = {
        'max_tokens': 2,
        'temperature': temperature,
        'logprobs': 0,
        'ignore_eos': True,
        'detokenize': False,
      }
      body = {'token_ids': [0], 'sampling_params': {**params, 'prompt_logprobs': 0, 'seed': 1}}
      await self.call('POST', GENERATE_PATH, body, deadline_s=deadline_s)

  async def prompt_logprobs(
    self, tokens: Sequence[int], *, deadline_s: float
  ) -> Float32[np.ndarray, 'time']:
    """Returns the logprob of each token given its prefix, at temperature 1; the first is 0."""
    rows = await self._prompt_rows(tokens, 0, deadline_s)
    try:
      values = [
        row[str(int(token))]['logprob'] for row, token in zip(rows[1:], tokens[1:], strict=True)
      ]
    except (KeyError, TypeError, ValueError) as error:
      raise Malformed(f'{self.name}: prompt_logprobs: {type(error).__name__}: {error}') from None
    return np.array([0.0, *values], np.float32)

  async def _prompt_rows(
    self, tokens: Sequence[int], count: int, deadline_s: float
  ) -> list[Mapping[str, Mapping[str, Any]]]:
    """For each token of a prompt, returns the logprob and rank of that token and of the `count`
    most probable tokens, keyed by token id. The first entry is None.
    """
    body = {'token_ids': [int(t) for t in tokens], **_model(self.adapter), **self._salt()}
    body['sampling_params'] = {
      'max_tokens': 1,
      'temperature': 0.0,
      'prompt_logprobs': count,
      'detokenize': False,
    }
    answer = await self.call('POST', GENERATE_PATH, body, deadline_s=deadline_s)
    try:
      return list(answer['prompt_logprobs'])
    except (KeyError, TypeError) as error:
      raise Malformed(f'{self.name}: prompt_logprobs: {type(error).__name__}: {error}') from None

  async def ranked_logprobs(
    self, tokens: Sequence[int], *, count: int, deadline_s: float
  ) -> tuple[
    Float32[np.ndarray, 'time'], Int32[np.ndarray, 'time'], Float32[np.ndarray, 'time count']
  ]:
    """Returns, for each token given its prefix at temperature 1: its logprob, its rank among all
    tokens (from 1), and the `count` largest logprobs in falling order. The values of the first
    token are arbitrary.
    """
    rows = (await self._prompt_rows(tokens, count, deadline_s))[1:]
    logprobs, ranks = np.zeros(len(tokens), np.float32), np.ones(len(tokens), np.int32)
    top = np.zeros((len(tokens), count), np.float32)
    try:
      for i, (row, token) in enumerate(zip(rows, tokens[1:], strict=True), start=1):
        entry = row[str(int(token))]
        logprobs[i], ranks[i] = entry['logprob'], entry['rank']
        top[i] = sorted((float(e['logprob']) for e in row.values()), reverse=True)[:count]
    except (KeyError, TypeError, ValueError) as error:
      raise Malformed(f'{self.name}: prompt_logprobs: {type(error).__name__}: {error}') from None
    return logprobs, ranks, top

  async def drafted_tokens(self) -> float:
    """Returns the number of tokens that the server's speculative decoding has drafted so far."""
    text = await self.call('GET', '/metrics', deadline_s=30.0, is_text=True)
    return sum(
      float(line.split()[-1]) for line in text.splitlines() if line.startswith(_DRAFTED_TOKENS)
    )

  async def weights(self) -> list[dict[str, Any]]:
    """Returns one mapping per worker, with the worker's `tensors` (name to shape, dtype and slice),
    `threads`, `device` and sampling settings.
    """
    return await self._rpc('jaxrl_weights')

  async def checksums(self, *, deadline_s: float) -> list[dict[str, str]]:
    """Returns one mapping per worker, from tensor name to the checksum of the loaded part."""
    return await self._rpc('jaxrl_checksums', deadline_s=deadline_s)

  async def digests(self, *, deadline_s: float) -> list[dict[str, str]]:
    """Returns one mapping per worker, from tensor name to the xxh3-128 digest of the loaded part,
    which the server computes on its host.
    """
    return await self._rpc('jaxrl_digests', deadline_s=deadline_s)

  async def verify(self, info: Mapping[str, Any], *, deadline_s: float) -> None:
    """Makes the workers verify the files of a later update, while the server samples. The workers
    must support this (key 'verifies' of `weights`).

    Args:
      info: description of the update, as for `update_weights`.

    Raises:
      Refused: a worker cannot use the files.
      Lost: a worker did not complete the verification within the deadline, or the server failed.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_s
    workers = await self._rpc('jaxrl_verify', info, deadline_s=deadline_s)
    wait_s = _VERIFY_S
    # Wait 'verified': bounded by `deadline_s`.
    while not all(isinstance(worker, dict) and worker.get('done') for worker in workers):
      if loop.time() + wait_s > deadline:
        raise Lost(f'{self.name}: its workers did not verify the files within {deadline_s:g} s')
      await asyncio.sleep(wait_s)
      wait_s = min(2 * wait_s, _LONGEST_VERIFY_S)
      workers = await self._rpc('jaxrl_verified', deadline_s=deadline_s)
    for worker in workers:
      if error := worker.get('error'):
        raise Refused(f'{self.name}: {error}')

  async def _rpc(self, method: str, *args: Any, deadline_s: float = 60.0) -> list[Any]:
    body = {'method': method, **({'args': args} if args else {})}
    answer = await self.call('POST', '/collective_rpc', body, deadline_s=deadline_s)
    try:
      return list(answer['results'])
    except (KeyError, TypeError):
      raise Malformed(
        f'{self.name}: /collective_rpc {method}: answered {str(answer)[:80]}'
      ) from None

  async def init_transfer(self, info: Mapping[str, Any], *, deadline_s: float = 60.0) -> None:
    """Initialises the weight transfer. Call this once, before the server's first update. The
    content of `info` depends on the transfer backend.
    """
    await self.call(
      'POST', '/init_weight_transfer_engine', {'init_info': info}, deadline_s=deadline_s
    )

  async def start_update(self, *, deadline_s: float = 60.0) -> None:
    try:
      await self.call('POST', '/start_weight_update', {}, deadline_s=deadline_s)
    except Lost as error:
      if 'already active' not in str(error):
        raise
      # An earlier update was interrupted, for example because its trainer died. vLLM requires that
      # the update is finished before another one starts.
      await self.finish_update(deadline_s=deadline_s)
      await self.call('POST', '/start_weight_update', {}, deadline_s=deadline_s)

  async def update_weights(self, info: Mapping[str, Any], *, deadline_s: float) -> None:
    await self.call('POST', '/update_weights', {'update_info': info}, deadline_s=deadline_s)

  async def finish_update(self, *, deadline_s: float = 60.0) -> None:
    await self.call('POST', '/finish_weight_update', {}, deadline_s=deadline_s)

  async def load_adapter(self, publication: Publication, *, deadline_s: float) -> None:
    """Loads an adapter for all later completions. Completions in flight keep their adapter.

    Raises:
      Refused: the server cannot load the adapter, and completions keep using the previous one.
      Lost: the server does not answer.
    """
    # `load_inplace` replaces an adapter of the same name. An attached server may already have one,
    # for example from an earlier run.
    body = {
      'lora_name': publication.adapter,
      'lora_path': str(publication.directory.absolute()),
      'load_inplace': True,
    }
    await self.call('POST', '/v1/load_lora_adapter', body, deadline_s=deadline_s, is_text=True)
    self.adapter = publication
    self._adapters = [
      *(name for name in self._adapters if name != publication.adapter),
      publication.adapter,
    ]
    while len(self._adapters) > _KEPT_ADAPTERS:
      with contextlib.suppress(Refused):  # A restarted server no longer has the adapter.
        await self.call(
          'POST', '/v1/unload_lora_adapter', {'lora_name': self._adapters[0]}, is_text=True
        )
      del self._adapters[0]

  async def pause(self) -> None:
    """Suspends generation. Running requests are kept and continue after `resume`."""
    await self._pause({'mode': 'keep'})

  async def pause_with_cache(self) -> None:
    """Suspends generation like `pause`, and keeps the keys and values of running requests."""
    # By default, vLLM 0.32 discards the keys and values, although its documentation says that
    # `clear_cache` is ignored in this mode.
    await self._pause({'mode': 'keep', 'clear_cache': 'false'})

  async def _pause(self, params: Mapping[str, str]) -> None:
    await self._switch('/pause', 'paused', params)

  async def resume(self) -> None:
    await self._switch('/resume', 'resumed')

  async def _switch(self, path: str, status: str, params: Mapping[str, str] | None = None) -> None:
    """Suspends or resumes generation. vLLM answers with `status` once its scheduler has done so.
    Raises Malformed if it answers otherwise.
    """
    answer = await self.call('POST', path, params=params)
    if not isinstance(answer, dict) or answer.get('status') != status:
      raise Malformed(f'{self.name}: {path}: answered {str(answer)[:80]}, wanted {status!r}')

  async def sleep(self, *, deadline_s: float) -> None:
    # Level 2 also drops the weights. They are published to the server again after it wakes up.
    await self.call('POST', '/sleep', params={'level': '2'}, deadline_s=deadline_s)
    if not (await self.call('GET', '/is_sleeping')).get('is_sleeping'):
      raise Refused(f'{self.name}: /sleep: accepted, but not asleep')

  async def wake_up(self, *, deadline_s: float) -> None:
    await self.call('POST', '/wake_up', deadline_s=deadline_s)
    if (await self.call('GET', '/is_sleeping')).get('is_sleeping'):
      raise Lost(f'{self.name}: /wake_up: accepted, but still asleep')

  async def set_version(self, publication: Publication) -> None:
    self._labels[publication.label] = publication.version
    await self.call('POST', '/update_weight_version', {'new_version': publication.label})

  async def served_label(self) -> str:
    """Returns the label that the server gives to newly sampled tokens, or 'default' if no label was
    set.
    """
    answer = await self.call('GET', _WEIGHT_INFO, deadline_s=_LABEL_S)
    return str(answer.get('weight_version'))

  async def reset_cache(self) -> None:
    """Clears the KV cache. Running requests recompute their keys and values with the loaded
    weights.
    """
    answer = await self.call(
      'POST', '/reset_prefix_cache', params={'reset_running_requests': 'true'}
    )
    if not answer.get('success'):
      raise Lost(f'{self.name}: /reset_prefix_cache: {answer}')

  def separate_cache(self, publication: Publication) -> None:
    """Separates cached keys and values: requests that start later do not reuse entries from before
    this call. This is needed because vLLM cannot clear its cache without also discarding the keys
    and values of running requests.
    """
    self._cache_salt = publication.label

  def _salt(self) -> dict[str, str]:
    return {} if self._cache_salt is None else {'cache_salt': self._cache_salt}

  async def tokenize(self, text: str) -> list[int] | None:
    """Returns the tokens of the text without special tokens, or None if the server has no
    tokenizer.
    """
    try:
      answer = await self.call(
        'POST', '/tokenize', {'model': MODEL, 'prompt': text, 'add_special_tokens': False}
      )
    except RemoteError:
      return None
    return [int(t) for t in answer['tokens']]


def _model(adapter: Publication | None) -> dict[str, str]:
  return {} if adapter is None else {'model': adapter.adapter}


def sampler_seed(seed: int, request: Request, index: int) -> int:
  """Returns the sampler seed of one completion: a hash of the engine's seed, the request's key, the
  sample index, and the number of tokens that earlier requests sampled for the completion.

  vLLM draws the same random numbers for each request with the same seed. Without the number of
  earlier tokens, the tokens after an interruption would be sampled with the random numbers of the
  tokens before the interruption.
  """
  words = np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, *request.key, index], '<u4')
  # While `begun` is 0, the salt has no effect, because a salt of zeros equals no salt.
  position = request.begun.to_bytes(8, 'little')
  digest = hashlib.blake2b(words.tobytes(), digest_size=8, salt=position).digest()
  return int.from_bytes(digest, 'little') >> (64 - _SEED_BITS)


def _sampling_params(request: Request, seed: int) -> dict[str, Any]:
  sampling = request.sampling
  params = {
    'max_tokens': request.max_tokens,
    'temperature': sampling.temperature,
    'logprobs': 0,
    'stop_token_ids': list(request.stop_ids),
    'ignore_eos': True,
    'detokenize': False,
  }
  if sampling.repetition_detection is not None:
    params['repetition_detection'] = dataclasses.asdict(sampling.repetition_detection)
  if sampling.temperature > 0:
    params |= {'seed': seed, 'top_p': sampling.top_p, 'top_k': sampling.top_k}
  return params
