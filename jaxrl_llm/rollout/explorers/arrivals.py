"""Validates messages from explorer processes. A message about a group names the lease, which is the
loan of the group to one explorer. The checks cover the types of values, the limits of the run, and
whether the names and versions in the message agree with the group.

Invariant: every accepted message could have come from a correct explorer of this run, so no
accepted message can make the run fail later.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jaxrl_llm.core.files import parse_json
from jaxrl_llm.core.records.sample import Sample, Source
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
from jaxrl_llm.rollout.explorers import wire
from jaxrl_llm.rollout.explorers.leases import LentGroup, Misbehaved
from jaxrl_llm.rollout.untrusted import (
  INT32,
  Bounds,
  all_of,
  check_integer,
  check_number,
  check_text,
  check_type,
  checked_sample,
  field,
)

T = TypeVar('T')

_MAX_NAME, _MAX_LINE, _MAX_ERROR = 128, 400, 2000
"""Maximum lengths in characters of an explorer's name, a line in the master's messages, and a
workflow's error.
"""
_MIN_SECRET, _MAX_SECRET = 16, 128
"""Minimum and maximum length of an explorer's secret, in characters."""
_MAX_NONCE = 64
"""Maximum length of the identifier of an errand, in characters."""
_MAX_SAMPLES, _MAX_KEY = 4096, 64
"""Maximum number of completions per request, and maximum number of words in a request's random
key.
"""


def read_sender(body: Any) -> str:
  """Returns the full name of the explorer that sent a message. The name is derived from the
  explorer's secret, so an explorer without the secret cannot use it. Raises ValueError if the name
  or the secret in the message is malformed.
  """
  if type(body) is not dict:
    raise ValueError(f'message is {type(body).__name__}, wanted a map')
  name, secret = field(body, 'name', str), field(body, 'secret', str)
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
    return field(body, 'lease', str)


def read_leases(body: Mapping[str, Any]) -> list[str]:
  """Returns the names of the leases that an explorer lists in a message. Raises Misbehaved if the
  list is missing.
  """
  with _reading('message'):
    return all_of(field(body, 'leases', list), 'leases', str)


def read_error(body: Mapping[str, Any]) -> str:
  """Returns the error message of a workflow that failed, as one line. Raises Misbehaved if it is
  missing.
  """
  with _reading('message'):
    return one_line(field(body, 'error', str), _MAX_ERROR)


def read_steps(body: Mapping[str, Any], group: LentGroup, bounds: Bounds) -> list[Sample]:
  """Returns the steps of the trajectory in a message. Raises Misbehaved if a step is invalid, does
  not belong to the group, or marks tokens as sampled that the engine did not generate for the
  group's lease, or if there are too many steps.
  """
  with _reading('sample'):
    steps = all_of(field(body, 'steps', list), 'steps', bytes)
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
    row = field(body, 'request', dict)
    sampling = field(row, 'sampling', dict)
    check_text(row, 'uid')
    for name in ('prompt', 'stop_ids', 'key'):
      all_of(field(row, name, list), name, int)
    bounds.check_tokens(row['prompt'], 'prompt')
    bounds.check_tokens(row['stop_ids'], 'stop_ids')
    check_integer(row, 'max_tokens', 1, INT32 - 1)
    check_integer(row, 'samples', 1, _MAX_SAMPLES)
    for name in ('first', 'begun'):
      check_integer(row, name, 0, INT32 - 1)
    check_integer(sampling, 'top_k', -1, INT32 - 1)
    for name in ('temperature', 'top_p'):
      check_number(sampling, name)
    if sampling.get('max_response_length') is not None:
      check_integer(sampling, 'max_response_length', 1, INT32 - 1)
    if sampling.get('repetition_detection') is not None:
      detection = field(sampling, 'repetition_detection', dict)
      for name in detection:
        check_integer(detection, name, 0, INT32 - 1)
    if len(row['key']) > _MAX_KEY:
      raise ValueError(f'key has {len(row["key"])} words, wanted at most {_MAX_KEY}')
    return wire.read_request(row)


def read_delivery(body: Mapping[str, Any]) -> wire.Delivery:
  """Returns the delivery for an errand in a message. Raises Misbehaved if the message is malformed.
  Does not check the signatures; `Errands.deliver` checks them.
  """
  with _reading('delivery'):
    check_text(body, 'nonce', _MAX_NONCE)
    check_integer(body, 'first', 0, INT32 - 1)
    parts = all_of(field(body, 'parts', list), 'parts', list)
    if any(len(part) != 2 or {*map(type, part)} != {bytes} for part in parts):
      raise ValueError('a part that is not [signature, part], both bytes')
    problem = one_line(field(body, 'problem', str))
    pairs = tuple((signature, part) for signature, part in parts)
    return wire.Delivery(body['nonce'], body['first'], pairs, problem)


def read_attempt(body: Mapping[str, Any], group: LentGroup) -> Attempt:
  """Returns the attempt (a completion to be scored) in a message. Raises Misbehaved if the attempt
  is invalid, or if its task differs from the group's task. A changed task is dangerous, because
  scorers run tests that are in its fields.
  """
  with _reading('attempt'):
    row = field(body, 'attempt', dict)
    if wire.pack(row.get('task')) != wire.pack(group.order['task']):
      raise ValueError("task differs from the lease's task")
    for name in ('uid', 'finish_reason'):
      check_text(row, name)
    field(row, 'completion', str)
    check_integer(row, 'response_len', 0, INT32 - 1)
    if not row['uid'].startswith(f'{group.name}/'):
      raise ValueError(f'uid is {row["uid"]!r}, wanted {group.name}/…')
    for message in all_of(check_type(row.get('transcript', []), 'transcript', list), 'it', dict):
      if message.keys() != {'role', 'content'} or not {*map(type, message.values())} <= {str}:
        raise ValueError('transcript has a message that is not {role, content}, both texts')
    _verdict(row.get('environment'), turns=row['response_len'])
    return wire.read_attempt(row)


def read_question(body: Mapping[str, Any]) -> tuple[str, Sequence[Message], dict[str, Any]]:
  """Returns (model, messages, options) of a query to an auxiliary model. Raises Misbehaved if the
  query is invalid.
  """
  with _reading('question'):
    check_text(body, 'model')
    messages = all_of(field(body, 'messages', list), 'messages', dict)
    # The messages will be forwarded as JSON. Values that JSON cannot represent raise an error here.
    json.dumps(messages, allow_nan=False)
    check_integer(body, 'max_tokens', 1, INT32 - 1)
    check_number(body, 'temperature')
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
  """Checks and decodes an encoded sample of a group."""
  sample = checked_sample(data, bounds)
  _check_origin(sample, group)
  group.generated.check(sample)
  return sample


def _verdict(row: Any, *, turns: int) -> Verdict | None:
  """Checks and reads an encoded verdict (`wire.verdict_row`), which may be None.

  Args:
    turns: maximum number of turn values.
  """
  if row is None:
    return None
  check_type(row, 'verdict', dict)
  values, parts = field(row, 'turn_values', list), field(row, 'parts', dict)
  if len(values) > turns or len(parts) > MAX_PARTS:
    raise ValueError(
      f'verdict has {len(values)} turn values and {len(parts)} parts, wanted at most {turns} and '
      f'{MAX_PARTS}'
    )
  for name in parts:
    check_text({'name of a part': name}, 'name of a part', MAX_PART_NAME)
  numbers = [row.get('value'), *values, *parts.values()]
  for value in numbers[1:] if numbers[0] is None else numbers:
    if type(value) not in (int, float) or not abs(value) <= MAX_REWARD:
      raise ValueError(f'verdict has {value!r}, wanted a number within ±{MAX_REWARD:g}')
  evidence = field(row, 'evidence', str)
  if len(evidence) > MAX_EVIDENCE or type(_strict_json(evidence)) is not dict:
    raise ValueError(f'evidence is not a JSON object of at most {MAX_EVIDENCE} characters')
  return wire.read_verdict(row)


def _strict_json(text: str) -> Any:
  def refuse(constant):
    raise ValueError(f'JSON has {constant}')

  return parse_json(text, parse_constant=refuse)


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
