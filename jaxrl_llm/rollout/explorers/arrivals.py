"""Validates messages from explorer processes. Each message names a lease, which is the loan of a
group to one explorer. The checks cover the types of values, the limits of the run, and whether the
names and versions in the message agree with the group.

Invariant: every accepted message could have come from a correct explorer of this run, so no
accepted message can make the run fail later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxrl_llm.core.files import parse_json
from jaxrl_llm.core.records.sample import Role, Sample, Source, decode
from jaxrl_llm.core.records.task import Message
from jaxrl_llm.rewards.api import (
  MAX_EVIDENCE,
  MAX_PART_NAME,
  MAX_PARTS,
  MAX_REWARD,
  Attempt,
  Verdict,
)
from jaxrl_llm.rollout.api import Request
from jaxrl_llm.rollout.contract import check_segments
from jaxrl_llm.rollout.explorers import wire
from jaxrl_llm.rollout.explorers.leases import LentGroup, Misbehaved

T = TypeVar('T')

_MAX_NAME, _MAX_UID, _MAX_LINE, _MAX_ERROR = 128, 1024, 400, 2000
"""Maximum lengths in characters of an explorer's name, other text fields, a line in the master's
messages, and a workflow's error.
"""
_MIN_SECRET, _MAX_SECRET = 16, 128
"""Minimum and maximum length of an explorer's secret, in characters."""
_MAX_SAMPLES, _MAX_KEY = 4096, 64
"""Maximum number of completions per request, and maximum number of words in a request's random
key.
"""
_SAMPLE_BYTES, _TOKEN_BYTES = 1 << 20, 64
"""Parts of the maximum size of an encoded sample: a constant number of bytes for names, and a
number of bytes per token of the longest sequence.
"""
_ROUNDING = 1e-3
"""Amount by which a logprob may exceed 0 because of rounding."""
_INT32 = 2**31
_SEGMENT = ('start', 'end', 'attempt', 'step', 'engine', 'finish')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
  """Limits on the samples and requests of a run."""

  vocab_size: int
  """Exclusive upper bound of token ids."""
  max_length: int
  """Maximum number of tokens of a sequence, including its prompt."""

  def check_tokens(self, tokens: Any, name: str) -> None:
    """Raises ValueError if a token id is outside the vocabulary."""
    tokens = np.asarray(tokens, np.int64)
    outside = tokens[(tokens < 0) | (tokens >= self.vocab_size)]
    if len(outside):
      raise ValueError(f'{name} has token {outside[0]}, wanted 0 … {self.vocab_size - 1}')


def read_sender(body: Any) -> str:
  """Returns the full name of the explorer that sent a message. The name is derived from the
  explorer's secret, so an explorer without the secret cannot use it. Raises ValueError if the name
  or the secret in the message is malformed.
  """
  if type(body) is not dict:
    raise ValueError(f'message is {type(body).__name__}, wanted a map')
  name, secret = _field(body, 'name', str), _field(body, 'secret', str)
  if not (0 < len(name) <= _MAX_NAME and name.isprintable()):
    raise ValueError(f'name has {len(name)} characters, wanted 1 … {_MAX_NAME}, all printable')
  if not _MIN_SECRET <= len(secret) <= _MAX_SECRET:
    raise ValueError(f'secret has {len(secret)} characters, wanted {_MIN_SECRET} … {_MAX_SECRET}')
  return wire.identity(name, secret)


def read_lease(body: Mapping[str, Any]) -> str:
  """Returns the name of the lease under which a message was sent. Raises Misbehaved if it is
  missing.
  """
  with _reading('message'):
    return _field(body, 'lease', str)


def read_leases(body: Mapping[str, Any]) -> list[str]:
  """Returns the names of the leases that an explorer lists in a message. Raises Misbehaved if the
  list is missing.
  """
  with _reading('message'):
    return _all(_field(body, 'leases', list), 'leases', str)


def read_error(body: Mapping[str, Any]) -> str:
  """Returns the error message of a workflow that failed, as one line. Raises Misbehaved if it is
  missing.
  """
  with _reading('message'):
    return one_line(_field(body, 'error', str), _MAX_ERROR)


def read_steps(body: Mapping[str, Any], group: LentGroup, bounds: Bounds) -> list[Sample]:
  """Returns the steps of the trajectory in a message. Raises Misbehaved if a step is invalid, does
  not belong to the group, or marks tokens as sampled that the engine did not generate for the
  group's lease, or if there are too many steps.
  """
  with _reading('sample'):
    steps = _all(_field(body, 'steps', list), 'steps', bytes)
    if not 0 < len(steps) <= group.max_steps:
      raise ValueError(f'{len(steps)} steps, wanted 1 … {group.max_steps} (rollout.max_steps)')
    return [_sample(step, group, bounds) for step in steps]


def read_verdict(body: Mapping[str, Any], steps: Sequence[Sample]) -> Verdict | None:
  """Returns the environment's reward in a message with a finished trajectory, or None if there is
  no reward. Raises Misbehaved if the reward is invalid.
  """
  with _reading('verdict'):
    return _verdict(body.get('verdict'), turns=sum(len(step.tokens) for step in steps))


def read_request(body: Mapping[str, Any], bounds: Bounds) -> Request:
  """Returns the generation request in a message. Raises Misbehaved if the request is invalid. The
  lengths of the prompt and the completion are left for the engine to check.
  """
  with _reading('request'):
    row = _field(body, 'request', dict)
    sampling = _field(row, 'sampling', dict)
    _check_text(row, 'uid')
    for name in ('prompt', 'stop_ids', 'key'):
      _all(_field(row, name, list), name, int)
    bounds.check_tokens(row['prompt'], 'prompt')
    bounds.check_tokens(row['stop_ids'], 'stop_ids')
    _check_integer(row, 'max_tokens', 1, _INT32 - 1)
    _check_integer(row, 'samples', 1, _MAX_SAMPLES)
    for name in ('first', 'begun'):
      _check_integer(row, name, 0, _INT32 - 1)
    _check_integer(sampling, 'top_k', -1, _INT32 - 1)
    for name in ('temperature', 'top_p'):
      _check_number(sampling, name)
    if sampling.get('repetition_detection') is not None:
      detection = _field(sampling, 'repetition_detection', dict)
      for name in detection:
        _check_integer(detection, name, 0, _INT32 - 1)
    if len(row['key']) > _MAX_KEY:
      raise ValueError(f'key has {len(row["key"])} words, wanted at most {_MAX_KEY}')
    return wire.read_request(row)


def read_attempt(body: Mapping[str, Any], group: LentGroup) -> Attempt:
  """Returns the attempt (a completion to be scored) in a message. Raises Misbehaved if the attempt
  is invalid, or if its task differs from the group's task. A changed task is dangerous, because
  scorers run tests that are in its fields.
  """
  with _reading('attempt'):
    row = _field(body, 'attempt', dict)
    if wire.pack(row.get('task')) != wire.pack(group.order['task']):
      raise ValueError('task differs from the one of the lease')
    for name in ('uid', 'finish_reason'):
      _check_text(row, name)
    _field(row, 'completion', str)
    _check_integer(row, 'response_len', 0, _INT32 - 1)
    if not row['uid'].startswith(f'{group.name}/'):
      raise ValueError(f'uid is {row["uid"]!r}, wanted {group.name}/…')
    for message in _all(_check_type(row.get('transcript', []), 'transcript', list), 'it', dict):
      if message.keys() != {'role', 'content'} or not {*map(type, message.values())} <= {str}:
        raise ValueError('transcript has a message that is not {role, content}, both texts')
    _verdict(row.get('environment'), turns=row['response_len'])
    return wire.read_attempt(row)


def read_question(body: Mapping[str, Any]) -> tuple[str, Sequence[Message], dict[str, Any]]:
  """Returns (model, messages, options) of a query to an auxiliary model. Raises Misbehaved if the
  query is invalid.
  """
  with _reading('question'):
    _check_text(body, 'model')
    messages = _all(_field(body, 'messages', list), 'messages', dict)
    # The messages will be forwarded as JSON. Values that JSON cannot represent raise an error here.
    json.dumps(messages, allow_nan=False)
    _check_integer(body, 'max_tokens', 1, _INT32 - 1)
    _check_number(body, 'temperature')
    return body['model'], messages, {name: body[name] for name in ('max_tokens', 'temperature')}


def one_line(text: object, most: int = _MAX_LINE) -> str:
  """Returns the text as a single printable line of at most `most` characters."""
  words = ' '.join(str(text)[: 4 * most].split())
  return ''.join(c if c.isprintable() else '\N{REPLACEMENT CHARACTER}' for c in words)[:most]


@contextlib.contextmanager
def _reading(kind: str) -> Iterator[None]:
  """Converts any exception in the block to Misbehaved, because an unreadable message is the fault
  of its sender.
  """
  try:
    yield
  except (ValueError, RecursionError) as error:
    raise Misbehaved(one_line(f'{kind}: {error}')) from None
  except Exception as error:
    raise Misbehaved(one_line(f'{kind}: {type(error).__name__}: {error}')) from None


def _sample(data: bytes, group: LentGroup, bounds: Bounds) -> Sample:
  """Checks and decodes an encoded sample."""
  most = _SAMPLE_BYTES + _TOKEN_BYTES * bounds.max_length
  if len(data) > most:
    raise ValueError(f'{len(data)} bytes, wanted at most {most}')
  _check_types(wire.unpack(data))
  sample = decode(data)
  _check_arrays(sample, bounds)
  _check_origin(sample, group)
  if not sample.segments:
    raise ValueError('segments are missing, wanted the versions of the weights that generated it')
  check_segments(sample)
  group.generated.check(sample)
  return sample


def _verdict(row: Any, *, turns: int) -> Verdict | None:
  """Checks and reads an encoded verdict (`wire.verdict_row`), which may be None.

  Args:
    turns: maximum number of turns.
  """
  if row is None:
    return None
  _check_type(row, 'verdict', dict)
  values, parts = _field(row, 'turn_values', list), _field(row, 'parts', dict)
  if len(values) > turns or len(parts) > MAX_PARTS:
    raise ValueError(
      f'verdict has {len(values)} turn values and {len(parts)} parts, wanted at most {turns} and '
      f'{MAX_PARTS}'
    )
  for name in parts:
    _check_text({'name of a part': name}, 'name of a part', MAX_PART_NAME)
  numbers = [row.get('value'), *values, *parts.values()]
  for value in numbers[1:] if numbers[0] is None else numbers:
    if type(value) not in (int, float) or not abs(value) <= MAX_REWARD:
      raise ValueError(f'verdict has {value!r}, wanted a number within ±{MAX_REWARD:g}')
  evidence = _field(row, 'evidence', str)
  if len(evidence) > MAX_EVIDENCE or type(_strict_json(evidence)) is not dict:
    raise ValueError(f'evidence is no JSON object of at most {MAX_EVIDENCE} characters')
  return wire.read_verdict(row)


def _strict_json(text: str) -> Any:
  def refuse(constant):
    raise ValueError(f'JSON has {constant}')

  return parse_json(text, parse_constant=refuse)


def _check_types(row: Any) -> None:
  """Raises unless the fields of an encoded sample (`core.records.sample.encode`) have valid types
  and ranges.
  """
  _check_type(row, 'record', dict)
  for name in (
    'uid',
    'task_id',
    'group_id',
    'trajectory_id',
    'taskset',
    'domain',
    'source',
    'finish_reason',
  ):
    _check_text(row, name)
  for name in ('visit', 'sample_index', 'step_index', 'prompt_len'):
    _check_integer(row, name, 0, _INT32 - 1)
  _check_number(row, 'temperature')
  for name in ('tokens', 'role', 'loss_mask', 'sampled', 'behaviour_logprobs'):
    if not _field(row, name, bytes):
      raise ValueError(f'{name} is empty')
  _field(row, 'preference', type(None))
  for shown in _all(_field(row, 'media', list), 'media', dict):
    _all(_field(shown, 'span', list), 'span', int)
  for segment in _all(_field(row, 'segments', list), 'segments', list):
    fields = dict(zip(_SEGMENT, segment, strict=True))
    for name in ('start', 'end', 'attempt', 'step'):
      _check_integer(fields, name, 0, _INT32 - 1)
    for name in ('engine', 'finish'):
      _check_text(fields, name)


def _check_arrays(sample: Sample, bounds: Bounds) -> None:
  if len(sample.tokens) > bounds.max_length:
    raise ValueError(
      f'{len(sample.tokens)} tokens, wanted at most {bounds.max_length}: rollout.max_prompt_length '
      'and max_response_length together'
    )
  bounds.check_tokens(sample.tokens, 'tokens')
  if sample.role.max() > max(Role):
    raise ValueError(f'role has {sample.role.max()}, wanted at most {int(max(Role))}')
  for name in ('loss_mask', 'sampled'):
    if getattr(sample, name).view(np.uint8).max() > 1:
      raise ValueError(f'{name} has other bytes than 0 and 1')
  if sample.behaviour_logprobs.max() > _ROUNDING:
    raise ValueError(f'behaviour_logprobs has {sample.behaviour_logprobs.max()}, wanted at most 0')


def _check_origin(sample: Sample, group: LentGroup) -> None:
  """Checks that a sample's task, taskset, source, trajectory and media agree with the group. Its
  index, step and uid are checked later, by `LentGroup.hand_in`.
  """
  task, visit = group.order['task'], group.order['visit']
  wanted = {
    'task_id': group.name.removeprefix(f'{group.order["stage"]}/').removesuffix(f'/{visit}'),
    'visit': visit,
    'taskset': task['taskset'],
    'domain': task['domain'],
    'source': Source.ROLLOUT,
  }
  for name, value in wanted.items():
    if (got := getattr(sample, name)) != value:
      raise ValueError(f'{name} is {got!r}, wanted {value!r}')
  if not sample.trajectory_id.startswith(f'{group.name}/'):
    raise ValueError(f'trajectory_id is {sample.trajectory_id!r}, wanted {group.name}/…')
  allowed = [(shown['kind'], shown['digest']) for shown in task['media']]
  if any((shown['kind'], shown['digest']) not in allowed for shown in sample.media):
    raise ValueError("media differ from the task's")


def _field(row: Mapping[str, Any], name: str, kind: type[T]) -> T:
  if name not in row:
    raise ValueError(f'{name} is missing')
  return _check_type(row[name], name, kind)


def _check_type(value: Any, name: str, kind: type[T]) -> T:
  if type(value) is not kind:  # Unlike isinstance, this rejects a bool where an int is expected.
    raise ValueError(f'{name} is {type(value).__name__}, wanted {kind.__name__}')
  return value


def _all(values: Any, name: str, kind: type[T]) -> list[T]:
  if set(map(type, values)) <= {kind}:
    return values
  return [_check_type(value, f'{name}[{i}]', kind) for i, value in enumerate(values)]


def _check_text(row: Mapping[str, Any], name: str, most: int = _MAX_UID) -> None:
  text = _field(row, name, str)
  if len(text) > most or not text.isprintable():
    raise ValueError(f'{name} has {len(text)} characters, wanted at most {most}, all printable')


def _check_integer(row: Mapping[str, Any], name: str, least: int, most: int) -> None:
  if not least <= (value := _field(row, name, int)) <= most:
    raise ValueError(f'{name} is {value}, wanted {least} … {most}')


def _check_number(row: Mapping[str, Any], name: str) -> None:
  value = row.get(name)
  if type(value) not in (int, float) or not (math.isfinite(value) and value >= 0):
    raise ValueError(f'{name} is {value!r}, wanted a finite number of at least 0')
