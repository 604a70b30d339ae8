"""Parses the responses of vLLM servers to sampling requests, and checks them.

Responses are large, about 160 bytes per token. pyarrow parses only the required fields, directly
into arrays. Meanwhile it releases Python's global interpreter lock, so long responses are parsed in
threads.

Invariant: a returned completion matches its request. Any other response raises `Malformed` or
`UserError`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json
from jaxtyping import Float32, Int32

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.files import check_object
from jaxrl_llm.core.net.client import Malformed
from jaxrl_llm.core.records.sample import Finish, Segment
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.api import CUT, Completion, Request

_UNDRAWABLE = -9000.0
"""Lower limit for the logprob of a sampled token. vLLM writes -9999 for minus infinity."""
_FINISHES = {str(finish): finish for finish in (Finish.STOP, Finish.LENGTH, Finish.REPETITION)}

_SPAN = pa.struct([('version', pa.string()), ('start', pa.int32()), ('end', pa.int32())])
_DRAW = pa.struct([('token_id', pa.int32()), ('logprob', pa.float64())])
_CHOICE = pa.struct(
  [
    ('finish_reason', pa.string()),
    ('token_ids', pa.list_(pa.int32())),
    ('logprobs', pa.struct([('content', pa.list_(_DRAW))])),
    ('weight_versions', pa.list_(_SPAN)),
  ]
)
_ANSWER = pa.schema([('choices', pa.list_(_CHOICE))])


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Choice:
  """The single completion in a response, before validation."""

  tokens: Int32[np.ndarray, 'time']
  logprobs: Float32[np.ndarray, 'time']
  finish_reason: str | None
  spans: list[dict[str, Any]]
  """`version`, `start` and `end` of each range of tokens that one version sampled."""


def read_completion(
  data: bytes,
  request: Request,
  *,
  engine: str,
  labels: Mapping[str, Version],
  adapter: str | None = None,
) -> Completion:
  """Returns the completion in a server's response to a request for one sample.

  Args:
    data: body of the response.
    engine: name of the server, for segments and messages.
    labels: versions that were published to the server, keyed by label.
    adapter: label of the adapter that the request named; None for the base model. It replaces the
      server's labels, because the server labels all tokens with its newest version regardless of
      the adapter that sampled them.

  Raises:
    Malformed: the response does not match the request.
    UserError: the server does not apply the request's repetition rule.
  """
  try:
    choice = _parse(data)
    if adapter is not None:
      span = {'version': adapter, 'start': 0, 'end': len(choice.tokens)}
      choice = dataclasses.replace(choice, spans=[span])
    return _checked(choice, request, engine, labels)
  except (KeyError, TypeError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError.
    reason = ' '.join(str(error).split())[:300]
    raise Malformed(
      f'{engine}: answer to {request.uid}: {type(error).__name__}: {reason}'
    ) from None


def _parse(data: bytes) -> _Choice:
  """Reads the completion from a response. Raises ValueError if the response does not have vLLM's
  format, or does not contain exactly one completion.
  """
  if b'\n' in data:  # pyarrow would treat each line as a separate value.
    data = data.replace(b'\n', b' ')
  check_object(data)  # pyarrow crashes on deep nesting and on some invalid values.
  table = pyarrow.json.read_json(
    pa.BufferReader(data),
    read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1),
    parse_options=pyarrow.json.ParseOptions(
      explicit_schema=_ANSWER, unexpected_field_behavior='ignore'
    ),
  )
  if len(table) != 1:
    raise ValueError(f'{len(table)} JSON values, wanted one')
  (choices,) = table['choices'].combine_chunks()
  if len(choices.values) != 1:
    raise ValueError(f'{len(choices.values)} choices, wanted one')
  (choice,) = choices.values
  for name in ('token_ids', 'logprobs', 'weight_versions'):
    if not choice[name].is_valid:
      raise ValueError(f'it has no {name}')
  tokens = _array(choice['token_ids'].values, 'token_ids')
  drawn = choice['logprobs']['content'].values
  if drawn is None:
    raise ValueError('its logprobs have no content')
  if not np.array_equal(_array(drawn.field('token_id'), 'logprobs'), tokens):
    raise ValueError(f'{len(drawn)} logprobs do not match its {len(tokens)} tokens')
  if (tokens < 0).any():
    raise ValueError(f'token {tokens.min()}, wanted at least 0')
  return _Choice(
    tokens=tokens,
    logprobs=_array(drawn.field('logprob'), 'logprobs').astype(np.float32),
    finish_reason=choice['finish_reason'].as_py(),
    spans=choice['weight_versions'].as_py(),
  )


def _array(values: pa.Array, name: str) -> np.ndarray:
  if values.null_count:
    raise ValueError(f'{name} has null')
  # A copy, so that the array does not keep the whole response in memory.
  return np.array(values.to_numpy(zero_copy_only=False))


def _checked(
  choice: _Choice, request: Request, engine: str, labels: Mapping[str, Version]
) -> Completion:
  """Builds a completion from a choice. Raises ValueError if it does not match the request."""
  tokens, logprobs = choice.tokens, choice.logprobs
  if not np.isfinite(logprobs).all() or (logprobs < _UNDRAWABLE).any():
    raise ValueError('a token of probability 0 was drawn: the sampler and its logprobs disagree')
  reason = choice.finish_reason
  if reason not in _FINISHES:
    raise ValueError(f'ended with {reason!r} after {len(tokens)} tokens')
  finish = _FINISHES[reason]
  if finish == Finish.STOP and (not len(tokens) or int(tokens[-1]) not in request.stop_ids):
    raise ValueError(
      f'stopped after {len(tokens)} tokens, but the last is not one of the stop ids '
      f'{request.stop_ids}'
    )
  if finish == Finish.LENGTH and len(tokens) != request.max_tokens:
    raise ValueError(
      f'ended after {len(tokens)} of {request.max_tokens} tokens; is its max_model_len too small?'
    )
  _check_repetition(tokens, finish, request, engine)
  end = request.repetition_end(tokens) if request.begun else None
  if end is not None and (end < len(tokens) or finish == Finish.REPETITION):
    # The server searches only the new tokens for repetition, because it does not know which tokens
    # of the prompt belong to the completion.
    finish, tokens, logprobs = Finish.REPETITION, tokens[:end], logprobs[:end]
  spans = [
    {**span, 'end': min(span['end'], len(tokens))}
    for span in choice.spans
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
  """Checks that the server has applied the request's repetition rule. Raises UserError if it has
  not, because every further response could be wrong in the same way.
  """
  detection, where = request.sampling.repetition_detection, f'engine {engine}: {request.uid}'
  if detection is None:
    if finish == Finish.REPETITION:
      raise UserError(
        f'{where}: the server ended a completion for repetition, which was not requested; set '
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
      f'after {end} tokens; use vLLM 0.32, which supports the sampling parameter'
    )
