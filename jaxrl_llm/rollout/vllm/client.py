"""HTTP client of one vLLM server. Only this module contains the paths and bodies of the server's
API (vLLM 0.32).

Invariant: every returned value is complete and matches its request. Otherwise the client raises
`Lost` if the request may be retried on another server, `Refused` if the server works but rejects
the call, or `UserError` if no server can serve the request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.client import Client, Lost, Malformed, Refused, RemoteError, parse_json
from jaxrl_llm.core.records.sample import Finish, Segment
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.api import CUT, Completion, Request
from jaxrl_llm.rollout.vllm.publication import Publication

MODEL = 'policy'
"""Name under which servers serve the policy (`--served-model-name`)."""
_GENERATE = '/inference/v1/generate'
_SEED_BITS = 62
_MAX_ANSWER_BYTES = 1 << 28
"""Maximum size of a response in bytes. The longest responses are lists of all tensors."""
_UNDRAWABLE = -9000.0
"""Lower limit for the logprob of a sampled token. vLLM writes -9999 for minus infinity."""
_KEPT_ADAPTERS = 2
"""Number of adapters kept on the server: the newest, and the previous one for completions in
flight.
"""


class VllmClient:
  """Client of one server."""

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
      key: bearer token, if a reverse proxy requires one.
      ca_file: file of CA certificates for https servers. If None, the system's certificates are
        used.
      name: name in segments and messages. If None, the address is used.
    """
    self.address, self.name = address, name or address
    where = f'engine {self.name}'
    self._client = Client(
      address, key=key, ca_file=ca_file, where=where, max_bytes=_MAX_ANSWER_BYTES
    )
    self._labels: dict[str, Version] = {}
    """Versions published through this client, keyed by label. Completions with other labels are
    rejected.
    """
    self.adapter: Publication | None = None
    """Adapter that new completions use; None for the base model."""
    self._adapters: list[str] = []
    """Names of the adapters loaded through this client, newest last."""

  async def close(self) -> None:
    await self._client.close()

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
    # vLLM closes a connection without notice after an exception, and a later call would fail on it.
    # Hence only calls to generate keep their connection open for reuse.
    headers = {} if path == _GENERATE else {'Connection': 'close'}
    label = f'{self.name}: {path}'
    async with self._client.request(
      method, path, body, label=label, deadline_s=deadline_s, params=params, headers=headers
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
    """Returns the length of the longest sequence that the server accepts, in tokens. Raises
    UserError if there is no usable vLLM server at the address.
    """
    try:
      answer = await self.call('GET', '/v1/models', deadline_s=30.0)
      return next(int(m['max_model_len']) for m in answer['data'] if m['id'] == MODEL)
    except Lost as error:
      raise UserError(
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
        f'engine {self.name}: {self.address} is not a vLLM server: its /v1/models has another form'
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
      index: index of the sample within the request.
      seed: seed of the engine. vLLM gets a hash of it (`sampler_seed`).

    Raises:
      Lost: the server does not answer, or its answer does not match the request.
      UserError: the server rejects the request itself.
    """
    adapter = self.adapter
    body = {
      'request_id': f'{request.uid}/{index}',
      'token_ids': list(request.prompt),
      **_model(adapter),
    }
    body['sampling_params'] = _sampling_params(request, sampler_seed(seed, request, index))
    try:
      answer = await self.call('POST', _GENERATE, body, deadline_s=deadline_s)
    except Refused as error:
      # The server does not know the adapter, because it was restarted.
      if adapter is not None and error.status == 404:
        raise Lost(str(error)) from None
      raise UserError(f'request {request.uid}: {error}') from None
    try:
      (choice,) = answer['choices']
      if adapter is not None:
        # The server labels all tokens with its newest version. These tokens, however, were sampled
        # with the adapter that the request named.
        span = {'version': adapter.label, 'start': 0, 'end': len(choice['token_ids'])}
        choice = {**choice, 'weight_versions': [span]}
      return _completion(choice, request, self.name, self._labels)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
      raise Malformed(
        f'{self.name}: answer to {request.uid}: {type(error).__name__}: {error}'
      ) from None

  async def warm_up(self, *, sampled: bool, deadline_s: float) -> None:
    """Makes the server compile its programs by a greedy request and, if `sampled`, a seeded request
    at temperature 1.
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
      await self.call('POST', '/inference/v1/generate', body, deadline_s=deadline_s)

  async def prompt_logprobs(
    self, tokens: Sequence[int], *, deadline_s: float
  ) -> Float32[np.ndarray, 'time']:
    """Returns the logprob of each token given its prefix, at temperature 1; the first is 0."""
    body = {'token_ids': [int(t) for t in tokens], **_model(self.adapter)}
    body['sampling_params'] = {
      'max_tokens': 1,
      'temperature': 0.0,
      'prompt_logprobs': 0,
      'detokenize': False,
    }
    answer = await self.call('POST', _GENERATE, body, deadline_s=deadline_s)
    try:
      rows = answer['prompt_logprobs']
      values = [
        0.0,
        *(
          row[str(token)]['logprob']
          for row, token in zip(rows[1:], body['token_ids'][1:], strict=True)
        ),
      ]
    except (KeyError, TypeError, ValueError) as error:
      raise Malformed(f'{self.name}: prompt_logprobs: {type(error).__name__}: {error}') from None
    return np.array(values, np.float32)

  async def weights(self) -> list[dict[str, Any]]:
    """Returns one mapping per worker. It contains the worker's `tensors` (name to shape, dtype and
    slice), `threads`, `device` and sampling settings.
    """
    return await self._rpc('jaxrl_weights')

  async def digests(self, *, deadline_s: float) -> list[dict[str, str]]:
    """Returns one mapping per worker, from tensor name to the digest of the loaded tensor."""
    return await self._rpc('jaxrl_digests', deadline_s=deadline_s)

  async def _rpc(self, method: str, *, deadline_s: float = 60.0) -> list[Any]:
    answer = await self.call('POST', '/collective_rpc', {'method': method}, deadline_s=deadline_s)
    try:
      return list(answer['results'])
    except (KeyError, TypeError):
      raise Malformed(
        f'{self.name}: /collective_rpc {method}: answered {str(answer)[:80]}'
      ) from None

  async def init_transfer(self, info: Mapping[str, Any], *, deadline_s: float = 60.0) -> None:
    """Initializes the weight transfer. This is called once, before the server's first update. The
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
    # `load_inplace` replaces an adapter of the same name, which the server may already have. An
    # attached server may still have an adapter of an earlier run.
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
    await self.call('POST', '/pause', params={'mode': 'keep'})
    if not (await self.call('GET', '/is_paused')).get('is_paused'):
      raise Lost(f'{self.name}: /pause: accepted, but not paused')

  async def resume(self) -> None:
    await self.call('POST', '/resume')
    if (await self.call('GET', '/is_paused')).get('is_paused'):
      raise Lost(f'{self.name}: /resume: accepted, but still paused')

  async def set_version(self, publication: Publication) -> None:
    self._labels[publication.label] = publication.version
    await self.call('POST', '/update_weight_version', {'new_version': publication.label})

  async def served_label(self) -> str:
    """Returns the label that the server gives to newly sampled tokens, or 'default' if no label was
    set.
    """
    return str((await self.call('GET', '/weight_info', deadline_s=10.0)).get('weight_version'))

  async def reset_cache(self) -> None:
    """Clears the KV cache. Running requests recompute their keys and values with the loaded
    weights.
    """
    answer = await self.call(
      'POST', '/reset_prefix_cache', params={'reset_running_requests': 'true'}
    )
    if not answer.get('success'):
      raise Lost(f'{self.name}: /reset_prefix_cache: {answer}')

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

  vLLM draws the same random numbers for each request with the same seed. Without that number, the
  tokens after a cut would repeat the draws of the tokens before it.
  """
  words = np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, *request.key, index], '<u4')
  position = request.begun.to_bytes(8, 'little')  # Salt 0 is no salt.
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


_FINISHES = {str(finish): finish for finish in (Finish.STOP, Finish.LENGTH, Finish.REPETITION)}


def _completion(
  choice: Mapping[str, Any], request: Request, engine: str, labels: Mapping[str, Version]
) -> Completion:
  """Builds a completion from a response. Raises ValueError if the response does not match the
  request.
  """
  tokens: Int32[np.ndarray, 'time'] = np.array(choice['token_ids'], np.int32)
  content = choice['logprobs']['content']
  if [row['token_id'] for row in content] != tokens.tolist():
    raise ValueError(f'{len(content)} logprobs do not match its {len(tokens)} tokens')
  logprobs = np.array([row['logprob'] for row in content], np.float32)
  if not np.isfinite(logprobs).all() or (logprobs < _UNDRAWABLE).any():
    raise ValueError('a token of probability 0 was drawn: the sampler and its logprobs disagree')
  reason = choice['finish_reason']
  if reason not in _FINISHES:
    raise ValueError(f'ended with {reason!r} after {len(tokens)} tokens')
  finish = _FINISHES[reason]
  if finish == Finish.STOP and (not len(tokens) or int(tokens[-1]) not in request.stop_ids):
    raise ValueError(
      f'stopped after {len(tokens)} tokens, and the last is not one of its stop ids '
      f'{request.stop_ids}'
    )
  if finish == Finish.LENGTH and len(tokens) != request.max_tokens:
    raise ValueError(
      f'ended after {len(tokens)} of {request.max_tokens} tokens; is its max_model_len too small?'
    )
  _check_repetition(tokens, finish, request, engine)
  end = request.repetition_end(tokens) if request.begun else None
  if end is not None and (end < len(tokens) or finish == Finish.REPETITION):
    # The server does not know which tokens of the prompt belong to the completion.
    finish, tokens, logprobs = Finish.REPETITION, tokens[:end], logprobs[:end]
  spans = [
    {**span, 'end': min(span['end'], len(tokens))}
    for span in choice['weight_versions']
    if span['start'] < len(tokens)
  ]
  segments = tuple(
    Segment(
      start=span['start'],
      end=span['end'],
      version=labels[span['version']],
      engine=engine,
      finish=str(finish) if last else CUT,
    )
    for last, span in ((span is spans[-1], span) for span in spans)
    if span['end'] > span['start']
  )
  return Completion(tokens=tokens, logprobs=logprobs, finish=finish, segments=segments)


def _check_repetition(
  tokens: Int32[np.ndarray, 'time'], finish: Finish, request: Request, engine: str
) -> None:
  """Checks that the server ends completions by the request's repetition rule. Raises UserError if
  it does not, because every further answer could be wrong in the same way.
  """
  detection, where = request.sampling.repetition_detection, f'engine {engine}: {request.uid}'
  if detection is None:
    if finish == Finish.REPETITION:
      raise UserError(
        f'{where}: the server ended a completion for repetition, which was not asked for; set '
        "rollout.repetition_detection to the server's rule, or remove the rule from the server"
      )
    return
  end = detection.end(tokens)
  if finish == Finish.REPETITION and end != len(tokens):
    raise UserError(
      f'{where}: the server ended a completion for repetition after {len(tokens)} tokens, wanted '
      f'after {end or "more"} by rollout.repetition_detection {detection}; use vLLM 0.32'
    )
  if finish != Finish.REPETITION and end is not None and end < len(tokens):
    raise UserError(
      f'{where}: the server went on after a repetition that rollout.repetition_detection ends '
      f'after {end} tokens; use vLLM 0.32, which knows the sampling parameter'
    )
