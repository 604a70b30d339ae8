"""Parses the responses of vLLM servers to sampling requests, and checks them.

Responses are large, about 160 bytes per token. pyarrow parses only the required fields, directly
into arrays. Meanwhile it releases Python's global interpreter lock, so long responses are parsed in
threads. The events of a streamed response are joined and parsed at once, for the same reason.

Invariant: a returned completion, or beginning of a completion, matches its request. Any other
response raises `Malformed` or `UserError`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.json
from jaxtyping import Float32, Int32

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.files import check_object
from jaxrl_llm.core.net.client import Malformed, parse_json
from jaxrl_llm.core.records.sample import Finish, Segment
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.api import CUT, Completion, Request
from jaxrl_llm.rollout.signed_answer import SignedPart

GENERATE_PATH = '/inference/v1/generate'
"""Path of a server for requests for samples."""
REQUEST_PREFIX = 'generate-tokens-'
"""Prefix that a server adds to the ids of requests, in the events of a streamed response."""
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
_EVENT = pa.struct([('request_id', pa.string()), ('choices', pa.list_(_CHOICE))])
_EVENTS = pa.schema([('events', pa.list_(_EVENT))])
_DATA, _END = b'data: ', b'\n\n'
"""Start and end of an event of a streamed response."""
_DONE = b'[DONE]'
"""Content of the last event."""
_ABORT = 'abort'
"""Value of `finish_reason` if the request was aborted, for example because the server shut down."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Choice:
  """The single completion in a response, before validation."""

  tokens: Int32[np.ndarray, 'time']
  logprobs: Float32[np.ndarray, 'time']
  finish_reason: str | None
  spans: list[dict[str, Any]]
  """`version`, `start` and `end` of each range of tokens that one version sampled."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Begun:
  """Beginning of a completion, from a streamed response that broke off."""

  tokens: Int32[np.ndarray, 'time']
  logprobs: Float32[np.ndarray, 'time']
  reason: str
  """Reason that the server gave for the end of the stream; empty if it gave none."""
  lost: int
  """Number of tokens that arrived after `tokens` but are not kept, because the weights that sampled
  them are unknown or because they follow a repetition.
  """


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
  with _reading(engine, request):
    return _checked(_of_adapter(_parse(data), adapter), request, engine, labels)


def signed_answer(data: bytes) -> SignedPart:
  """Returns a server's whole response to a request for one sample in the form that its front signs.
  Raises ValueError, KeyError or TypeError if the response does not have vLLM's format.
  """
  return _signed(_parse(data))


def signed_events(data: bytes, name: str) -> SignedPart:
  """Returns complete events of a streamed response in the form that its front signs. The part is
  empty if the events contain nothing to sign. Raises ValueError, KeyError or TypeError if they do
  not have vLLM's format.

  Args:
    name: id of the request in each event.
  """
  choice, reason, _ = _parse_events(data, name)
  return _signed(choice, broken=reason if choice.finish_reason is None else '')


def _signed(choice: _Choice, broken: str = '') -> SignedPart:
  spans = choice.spans if choice.finish_reason is not None else []
  return SignedPart(
    tokens=choice.tokens,
    logprobs=choice.logprobs,
    finish=choice.finish_reason,
    spans=[(span['version'], span['start'], span['end']) for span in spans],
    broken=broken,
  )


def read_parts(
  part: SignedPart,
  request: Request,
  *,
  known: int,
  engine: str,
  labels: Mapping[str, Version],
  adapter: str | None = None,
) -> Completion | Begun:
  """Returns the completion in an answer that a front has signed, or the beginning of the completion
  if the answer breaks off.

  Args:
    part: the parts of the answer that have arrived, joined.
    known: number of tokens that arrived while the weights that sampled them were known. `Begun`
      contains only these.

  For the other arguments and the exceptions, see `read_completion`.
  """
  with _reading(engine, request):
    names = ('version', 'start', 'end')
    choice = _Choice(
      tokens=part.tokens,
      logprobs=part.logprobs,
      finish_reason=part.finish,
      spans=[dict(zip(names, span, strict=True)) for span in part.spans],
    )
    if part.finish in (None, _ABORT):
      return _begun(choice, request, known, part.broken or part.finish or '')
    return _checked(_of_adapter(choice, adapter), request, engine, labels)


def _of_adapter(choice: _Choice, adapter: str | None) -> _Choice:
  """Returns the completion, labelled with the adapter that sampled it, if there is one."""
  if adapter is None:
    return choice
  span = {'version': adapter, 'start': 0, 'end': len(choice.tokens)}
  return dataclasses.replace(choice, spans=[span])


@contextlib.contextmanager
def _reading(engine: str, request: Request) -> Iterator[None]:
  """Converts exceptions about the content of an answer to Malformed."""
  try:
    yield
  except (KeyError, TypeError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError.
    reason = ' '.join(str(error).split())[:300]
    raise Malformed(
      f'{engine}: answer to {request.uid}: {type(error).__name__}: {reason}'
    ) from None


def read_stream(
  data: bytes,
  request: Request,
  *,
  known: int,
  name: str,
  engine: str,
  labels: Mapping[str, Version],
  adapter: str | None = None,
) -> Completion | Begun:
  """Returns the completion in a streamed response to a request for one sample, or the beginning of
  the completion if the response breaks off.

  Args:
    data: the part of the body that has arrived.
    known: number of bytes of `data` that arrived while the weights that sampled them were known.
      `Begun` contains only their tokens.
    name: id of the request in each event.

  For the other arguments and the exceptions, see `read_completion`.
  """
  with _reading(engine, request):
    choice, reason, counts = _parse_events(data, name)
    if choice.finish_reason in (None, _ABORT):
      kept = int(sum(counts[: data[:known].count(_END)]))
      return _begun(choice, request, kept, reason or choice.finish_reason or '')
    return _checked(_of_adapter(choice, adapter), request, engine, labels)


def _parse_events(data: bytes, name: str) -> tuple[_Choice, str, list[int]]:
  """Reads the complete events of a stream. Raises ValueError if they do not have vLLM's format.

  Returns:
    (the completion so far, error message of the server or '', number of tokens in each event). The
    completion's `finish_reason` is None if its end has not arrived.
  """
  # An event is a line of data and an empty line; one that is incomplete may follow. Single bytes
  # are searched much faster than `_END`.
  lines = data.split(b'\n')
  end = (len(lines) - 1) // 2 * 2
  events = lines[0:end:2]
  if any(lines[1:end:2]) or not all(event.startswith(_DATA) for event in events):
    raise ValueError('a line that is not the data of an event')
  events = [event[len(_DATA) :] for event in events]
  if events and events[-1] == _DONE:
    del events[-1]
  reason = ''
  if events and events[-1].startswith(b'{"error"'):
    reason = str(parse_json(events.pop(), name))[:300]
  if not events:
    empty = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return _Choice(tokens=empty[0], logprobs=empty[1], finish_reason=None, spans=[]), reason, []
  table = _read_json(b''.join((b'{"events":[', b','.join(events), b']}')), _EVENTS)
  (rows,) = table['events'].combine_chunks()
  if len(rows) != len(events):
    raise ValueError(f'{len(rows)} values in {len(events)} events')
  if not pyarrow.compute.all(pyarrow.compute.equal(rows.values.field('request_id'), name)).as_py():
    raise ValueError(f'events of another request than {name}')
  choices = rows.values.field('choices')
  if choices.null_count or not (np.diff(choices.offsets) == 1).all():
    raise ValueError('an event without exactly one choice')
  choices = choices.flatten()
  *earlier, finish_reason = choices.field('finish_reason').to_pylist()
  if any(finish is not None for finish in earlier):
    raise ValueError('more events after the end of the completion')
  spans = choices.field('weight_versions')[-1].as_py()
  if finish_reason not in (None, _ABORT) and spans is None:
    raise ValueError('it has no weight_versions')
  ids, drawn = choices.field('token_ids'), choices.field('logprobs').field('content')
  if ids.null_count or drawn.null_count:
    raise ValueError('an event has no token_ids or logprobs')
  counts = np.diff(ids.offsets)
  if not np.array_equal(counts, np.diff(drawn.offsets)):
    raise ValueError('the logprobs of an event do not match its tokens')
  tokens, logprobs = _drawn(ids.flatten(), drawn.flatten())
  choice = _Choice(tokens=tokens, logprobs=logprobs, finish_reason=finish_reason, spans=spans or [])
  return choice, reason, counts.tolist()


def _begun(choice: _Choice, request: Request, kept: int, reason: str) -> Begun:
  """Returns the first `kept` tokens of a completion that broke off. Raises ValueError if the tokens
  do not match the request, or if the completion should already have ended.
  """
  tokens = choice.tokens
  _check_probabilities(choice.logprobs)
  if len(tokens) > request.max_tokens:
    raise ValueError(f'went on after {request.max_tokens} tokens')
  if len(tokens) == request.max_tokens or np.isin(tokens, request.stop_ids).any():
    raise ValueError(f'broke off after the last of its {len(tokens)} tokens')
  if (end := request.repetition_end(tokens)) is not None:
    if not request.begun:
      raise ValueError(f'went on after a repetition, to {len(tokens)} tokens')
    # The server searches only the new tokens, so it cannot detect a repetition that began earlier.
    kept = min(kept, end)
  return Begun(
    tokens=tokens[:kept],
    logprobs=choice.logprobs[:kept],
    reason=reason,
    lost=len(tokens) - kept,
  )


def _parse(data: bytes) -> _Choice:
  """Reads the completion from a response. Raises ValueError if the response does not have vLLM's
  format, or does not contain exactly one completion.
  """
  table = _read_json(data, _ANSWER)
  (choices,) = table['choices'].combine_chunks()
  if len(choices.values) != 1:
    raise ValueError(f'{len(choices.values)} choices, wanted one')
  (choice,) = choices.values
  for name in ('token_ids', 'logprobs', 'weight_versions'):
    if not choice[name].is_valid:
      raise ValueError(f'it has no {name}')
  drawn = choice['logprobs']['content'].values
  if drawn is None:
    raise ValueError('its logprobs have no content')
  tokens, logprobs = _drawn(choice['token_ids'].values, drawn)
  return _Choice(
    tokens=tokens,
    logprobs=logprobs,
    finish_reason=choice['finish_reason'].as_py(),
    spans=choice['weight_versions'].as_py(),
  )


def _read_json(data: bytes, schema: pa.Schema) -> pa.Table:
  """Reads one JSON object as a table of one row. Raises ValueError for anything else."""
  if b'\n' in data:  # pyarrow would treat each line as a separate value.
    data = data.replace(b'\n', b' ')
  check_object(data)  # pyarrow crashes on deep nesting and on some invalid values.
  table = pyarrow.json.read_json(
    pa.BufferReader(data),
    read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(data) + 1),
    parse_options=pyarrow.json.ParseOptions(
      explicit_schema=schema, unexpected_field_behavior='ignore'
    ),
  )
  if len(table) != 1:
    raise ValueError(f'{len(table)} JSON values, wanted one')
  return table


def _drawn(
  ids: pa.Array, drawn: pa.StructArray
) -> tuple[Int32[np.ndarray, 'time'], Float32[np.ndarray, 'time']]:
  """Returns the tokens and their logprobs.

  Args:
    ids: token ids.
    drawn: token id and logprob of each token.
  """
  tokens = _array(ids, 'token_ids')
  if not np.array_equal(_array(drawn.field('token_id'), 'logprobs'), tokens):
    raise ValueError(f'{len(drawn)} logprobs do not match its {len(tokens)} tokens')
  if (tokens < 0).any():
    raise ValueError(f'token {tokens.min()}, wanted at least 0')
  return tokens, _array(drawn.field('logprob'), 'logprobs').astype(np.float32)


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
  _check_probabilities(logprobs)
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


def _check_probabilities(logprobs: Float32[np.ndarray, 'time']) -> None:
  if not np.isfinite(logprobs).all() or (logprobs < _UNDRAWABLE).any():
    raise ValueError('a token of probability 0 was drawn: the sampler and its logprobs disagree')


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
