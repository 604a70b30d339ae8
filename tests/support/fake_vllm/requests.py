"""Parses the bodies of requests and fills in defaults as vLLM does. Raises `Refusal` for bodies
that vLLM refuses and for those that the fake does not support.

Invariant: parsed parameters are complete and in range, so other modules do not check them again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import NoneType
from typing import Any

from aiohttp import web

from jaxrl_llm.core.errors import one_line
from jaxrl_llm.core.files import parse_json

MODEL = 'policy'
"""Name of the served model."""
GENERATE = '/inference/v1/generate'
MAX_SAMPLES = 128
"""Maximum number of completions of one request: vLLM's max_num_seqs on CPUs."""
_COLDEST = 0.01
"""Lowest temperature above 0. vLLM raises lower positive temperatures to this value."""
_HARMLESS = {'detokenize', 'skip_special_tokens', 'spaces_between_special_tokens'}
"""Sampling parameters that have no effect if there is no text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params:
  """Sampling parameters of a request, named as in vLLM, with defaults filled in."""

  max_tokens: int
  """Maximum number of tokens. It never exceeds the room in the longest sequence."""
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  """0 and -1 mean that top-k is off."""
  seed: int
  """Seed of the request. If the client gave none, it is unique to the request."""
  n: int = 1
  stop_ids: tuple[int, ...] = ()
  """Tokens that end a completion. Includes the model's own stop tokens, unless the request ignores
  them.
  """
  logprobs: int | None = None
  prompt_logprobs: int | None = None
  stream_interval: int = 1
  """Number of tokens per event of a stream, except for the first and the last event."""
  repetition: tuple[int, int, int] | None = None
  """Minimum and maximum size of a pattern, and the number of consecutive occurrences that ends a
  completion. If None, repetitions are ignored.
  """


class Refusal(Exception):
  """Raised for a request that the server answers with a 4xx status."""

  def __init__(
    self,
    message: str,
    *,
    status: int = 400,
    kind: str = 'BadRequestError',
    param: str | None = None,
  ):
    super().__init__(message)
    self.status, self.kind, self.param = status, kind, param


def invalid(where: str, message: str) -> Refusal:
  """Returns the refusal of a body that has the wrong form."""
  return Refusal(
    f"1 validation error:\n  {{'loc': '{where}', 'msg': '{message}'}}",
    kind='Bad Request',
    param=where,
  )


async def read_json(request: web.Request, **kinds: type) -> dict[str, Any]:
  """Returns the JSON object in the body. An empty body gives an empty object.

  Args:
    kinds: names of the required fields, with their types.
  """
  data = await request.read()
  try:
    body = parse_json(data.decode()) if data else {}
  except ValueError as error:  # Includes bytes that are not UTF-8.
    raise invalid('body', f'JSON decode error: {error}') from None
  if not isinstance(body, dict):
    raise invalid('body', 'Input should be a valid dictionary')
  for name, kind in kinds.items():
    if name not in body:
      raise invalid(f'body.{name}', 'Field required')
    if type(body[name]) is not kind:
      raise invalid(f'body.{name}', f'Input should be a valid {kind.__name__}')
  return body


def parse(
  body: Mapping[str, Any],
  *,
  number: int,
  max_model_len: int,
  vocab_size: int,
  eos_ids: tuple[int, ...],
) -> tuple[str, list[int], Params]:
  """Returns name, prompt and parameters of the requested call. Raises Refusal for a body that a
  server refuses.

  Args:
    body: body of a request to GENERATE.
    number: number that no other call has.
    max_model_len: maximum number of tokens of a sequence, including the prompt.
    vocab_size: size of the vocabulary. Stop tokens must be below it.
    eos_ids: the model's own stop tokens.
  """
  prompt, given = body['token_ids'], body['sampling_params']
  if not prompt or not all(type(token) is int and token >= 0 for token in prompt):
    raise invalid('body.token_ids', 'Input should be a non-empty list of non-negative integers')
  if body.get('model') not in (None, MODEL):
    message = f'The model `{one_line(body["model"])}` does not exist. Valid aliases: {MODEL}.'
    raise Refusal(message, status=404, kind='NotFoundError', param='model')
  params = _params(
    given, vocab_size, eos_ids, room=max_model_len - len(prompt), spare_seed=-1 - number
  )
  _check_length(len(prompt), max_model_len)
  return f'generate-tokens-{one_line(body.get("request_id") or number)}', prompt, params


def _check_length(length: int, longest: int) -> None:
  remedy = 'Make sure that `max_model_len` is no smaller than the number of text tokens'
  if length > longest:
    raise Refusal(
      f'The decoder prompt (length {length}) is longer than the maximum model length of {longest}. '
      f'{remedy}.'
    )
  if length == longest:
    raise Refusal(
      f'The decoder prompt (length {length}) plus the number of requested output tokens (at least '
      f'1) is longer than the maximum model length of {longest}. {remedy} (prompt + requested '
      'output tokens).'
    )


_DEFAULTS = {
  'max_tokens': None,
  'temperature': 1.0,
  'top_p': 1.0,
  'top_k': 0,
  'seed': None,
  'n': 1,
  'stop_token_ids': (),
  'ignore_eos': False,
  'logprobs': None,
  'prompt_logprobs': None,
  'repetition_detection': None,
  'stream_interval': None,
}
"""Supported sampling parameters, and their values if a request does not set them."""
_KINDS: Mapping[str, tuple[type, ...]] = {
  'max_tokens': (int, NoneType),
  'temperature': (float, int),
  'top_p': (float, int),
  'top_k': (int,),
  'seed': (int, NoneType),
  'n': (int,),
  'stop_token_ids': (list, tuple),
  'ignore_eos': (bool,),
  'logprobs': (int, NoneType),
  'prompt_logprobs': (int, NoneType),
  'repetition_detection': (dict, NoneType),
  'stream_interval': (int, NoneType),
}
"""Accepted types of each sampling parameter."""
_INT64 = 1 << 63


def _params(
  given: Mapping[str, Any], vocab_size: int, eos_ids: tuple[int, ...], *, room: int, spare_seed: int
) -> Params:
  """
  Args:
    given: the request's `sampling_params`.
    vocab_size: see `parse`.
    eos_ids: see `parse`.
    room: number of tokens that may follow the prompt.
    spare_seed: seed that is used if the request has none.
  """
  unknown = sorted(set(given) - set(_DEFAULTS) - _HARMLESS)
  if unknown:
    name = one_line(unknown[0])
    raise Refusal(f'the fake knows no sampling parameter {name!r}', param=name)
  got = {name: given.get(name, default) for name, default in _DEFAULTS.items()}
  for name, kinds in _KINDS.items():
    if type(got[name]) not in kinds:
      raise invalid(
        f'body.sampling_params.{name}', f'Expected {" | ".join(kind.__name__ for kind in kinds)}'
      )
  room = max(1, room)
  if got['max_tokens'] is None:
    got['max_tokens'] = room
  _check_params(got, vocab_size)
  stop_ids = (*got['stop_token_ids'], *(() if got['ignore_eos'] else eos_ids))
  return Params(
    max_tokens=min(got['max_tokens'], room),
    temperature=max(float(got['temperature']), _COLDEST) if got['temperature'] else 0.0,
    top_p=float(got['top_p']),
    top_k=got['top_k'],
    seed=spare_seed if got['seed'] in (None, -1) else got['seed'],
    n=got['n'],
    stop_ids=tuple(dict.fromkeys(stop_ids)),
    logprobs=got['logprobs'],
    prompt_logprobs=got['prompt_logprobs'],
    repetition=_repetition(got['repetition_detection']),
    stream_interval=1 if got['stream_interval'] is None else got['stream_interval'],
  )


def _repetition(given: Mapping[str, Any] | None) -> tuple[int, int, int] | None:
  if given is None:
    return None
  names = ('min_pattern_size', 'max_pattern_size', 'min_count')
  if set(given) - set(names) or not all(type(value) is int for value in given.values()):
    raise invalid('body.sampling_params.repetition_detection', f'Expected {names}, all int')
  least, most, count = (given.get(name, 0) for name in names)
  if not 0 <= least <= most:
    raise Refusal(
      'max_pattern_size, min_pattern_size must be >=0, with min_pattern_size <= max_pattern_size'
    )
  if most and count < 2:
    raise Refusal('min_count must be >= 2 to enable repetition detection')
  return (least or 1, most, count) if most else None


def _check_params(got: Mapping[str, Any], vocab_size: int) -> None:
  # The order is vLLM's. Of several faults, only the first is reported.
  for refused, name, wanted in (
    (got['max_tokens'] < 1, 'max_tokens', 'must be at least 1'),
    (not got['temperature'] >= 0, 'temperature', 'must be non-negative'),
    (got['temperature'] > 2, 'temperature', 'must be in [0, 2]'),
    (not 0 < got['top_p'] <= 1, 'top_p', 'must be in (0, 1]'),
    (got['top_k'] < -1, 'top_k', 'must be 0 (disable), or at least 1'),
    (got['n'] < 1, 'n', 'must be at least 1'),
    (
      got['n'] > MAX_SAMPLES,
      'sampling_params.n',
      f"must be at most the server's max_num_seqs ({MAX_SAMPLES})",
    ),
    (got['temperature'] == 0 and got['n'] > 1, 'n', 'must be 1 when using greedy sampling'),
    (
      got['stream_interval'] is not None and got['stream_interval'] < 1,
      'stream_interval',
      'must be at least 1',
    ),
    (not -_INT64 <= (got['seed'] or 0) < _INT64, 'seed', 'must have 64 bits'),
  ):
    if refused:
      raise Refusal(
        f'{name} {wanted}, got {one_line(got[name.removeprefix("sampling_params.")])}.', param=name
      )
  stops = got['stop_token_ids']
  if not all(type(token) is int for token in stops):
    raise invalid('body.sampling_params.stop_token_ids', 'Expected a list of int')
  if strange := [token for token in stops if not 0 <= token < vocab_size]:
    outside = f'token_id(s) {one_line(strange)} in stop_token_ids contain out-of-vocab token ids.'
    raise Refusal(f'{outside} Vocabulary size: {vocab_size}', param='stop_token_ids')
  for name in ('logprobs', 'prompt_logprobs'):
    if got[name]:
      raise Refusal(
        f'the fake gives logprobs of the tokens alone: {name} is {got[name]}, wanted 0', param=name
      )
