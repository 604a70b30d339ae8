"""Protocol between explorer processes and the master: HTTP paths, time intervals, and the encoding
of records as msgpack.

Invariant: `read_x(x_row(value))` equals `value`, and its arrays are equal bit for bit. Records are
never pickled, so a peer cannot make the reader execute code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any, NamedTuple

import msgpack
import numpy as np

from jaxrl_llm.core.records.sample import Finish, Segment
from jaxrl_llm.core.records.task import Media, Task
from jaxrl_llm.core.types import Json, Version
from jaxrl_llm.rewards.api import Attempt, Reward, Verdict
from jaxrl_llm.rollout.api import Completion, Errand, Request, Sampling
from jaxrl_llm.rollout.repetition import RepetitionDetection
from jaxrl_llm.rollout.signed_answer import Frame, SignedPart, joined_parts

HELLO, TAKE, ALIVE, LEAVE = '/hello', '/take', '/alive', '/leave'
GENERATE, DELIVER, SCORE, ASK, SAMPLE, DONE, FAILED = (
  '/generate',
  '/deliver',
  '/score',
  '/ask',
  '/sample',
  '/done',
  '/failed',
)
PATHS = (HELLO, TAKE, ALIVE, LEAVE, GENERATE, DELIVER, SCORE, ASK, SAMPLE, DONE, FAILED)
"""Paths of the master's HTTP server. All of them take POST requests."""
EVICTED = 409
"""HTTP status of every response to an evicted explorer."""
ALIVE_S = 1.0
"""Seconds between heartbeats of an explorer."""
BEAT_S = 10.0
"""Seconds without data after which a response stream sends a heartbeat."""
TAKE_S = 10.0
"""Maximum seconds for which a request for a group waits until a group is available."""

Row = dict[str, Any]
"""A record as a mapping of types that msgpack can encode: JSON values and bytes."""


def identity(name: str, secret: str) -> str:
  """Returns an explorer's full name, which contains a digest of its secret. Only an explorer that
  knows the secret can use the name, and the name does not reveal the secret.
  """
  return f'{name}/{hashlib.sha256(secret.encode()).hexdigest()[:16]}'


def pack(value: Any) -> bytes:
  return msgpack.packb(value)


def task_row(task: Task) -> Row:
  # The fields are encoded as JSON, because msgpack cannot represent integers of more than 64 bits.
  fields = json.dumps(dict(task.fields))
  prompt, media = (
    [dict(message) for message in task.prompt],
    [_fields(shown) for shown in task.media],
  )
  return {**_fields(task), 'prompt': prompt, 'fields': fields, 'media': media}


def read_task(row: Row) -> Task:
  media = tuple(Media(**shown) for shown in row['media'])
  return Task(
    **{**row, 'prompt': tuple(row['prompt']), 'fields': json.loads(row['fields']), 'media': media}
  )


def request_row(request: Request) -> Row:
  row = {**_fields(request), 'sampling': sampling_row(request.sampling)}
  del row['courier']  # The master chooses who fetches the completions.
  return row


def read_request(row: Row) -> Request:
  tuples = {name: tuple(row[name]) for name in ('prompt', 'stop_ids', 'key')}
  return Request(**{**row, **tuples, 'sampling': read_sampling(row['sampling'])})


def completion_row(completion: Completion) -> Row:
  return {
    'tokens': completion.tokens.astype('<i4').tobytes(),
    'logprobs': completion.logprobs.astype('<f4').tobytes(),
    'finish': str(completion.finish),
    'segments': [
      [s.start, s.end, s.version.attempt, s.version.step, s.engine, s.finish]
      for s in completion.segments
    ],
  }


def read_completion(row: Row) -> Completion:
  segments = (
    Segment(start=start, end=end, version=Version(attempt, step), engine=engine, finish=finish)
    for start, end, attempt, step, engine, finish in row['segments']
  )
  return Completion(
    tokens=np.frombuffer(row['tokens'], '<i4').astype(np.int32),
    logprobs=np.frombuffer(row['logprobs'], '<f4').astype(np.float32),
    finish=Finish(row['finish']),
    segments=tuple(segments),
  )


class Delivery(NamedTuple):
  """Delivery of an explorer for an errand (`rollout.api.Errand`): parts of the answer, the reason
  why there are no more, or both.
  """

  nonce: str
  first: int = 0
  """Number of the first of these parts in the answer."""
  parts: tuple[Frame, ...] = ()
  """Consecutive parts, each with the signature of the server's front."""
  problem: str = ''
  """Reason why the explorer will have no more parts; empty if the answer is complete or goes on."""


def errand_row(errand: Errand) -> Row:
  """Returns the fields of an errand that an explorer needs, keyed by name."""
  names = ('nonce', 'address', 'path', 'authorization', 'body', 'deadline_s')
  return {name: getattr(errand, name) for name in names}


def reference_row(nonce: str, completion: Completion) -> Row:
  """Returns a completion without its arrays, for an explorer that has them from its errand."""
  row = completion_row(completion)
  del row['tokens'], row['logprobs']
  return {**row, 'nonce': nonce}


def joined_completion(row: Row, answers: dict[str, list[Frame]]) -> Completion:
  """Returns the completion of a row. The arrays of a row of `reference_row` are taken from the
  frames of the answer with its nonce, which are removed from `answers`.
  """
  if (nonce := row.get('nonce')) is None:
    return read_completion(row)
  answer = joined_parts([SignedPart.decode(part) for _, part in answers.pop(nonce)])
  # The master may have cut the answer, for example at a repetition.
  count = row['segments'][-1][1] if row['segments'] else 0
  tokens, logprobs = answer.tokens[:count], answer.logprobs[:count]
  return read_completion({**row, 'tokens': tokens.tobytes(), 'logprobs': logprobs.tobytes()})


def attempt_row(attempt: Attempt) -> Row:
  return {
    **_fields(attempt),
    'task': task_row(attempt.task),
    'transcript': [dict(message) for message in attempt.transcript],
    'environment': verdict_row(attempt.environment),
  }


def read_attempt(row: Row) -> Attempt:
  read = {
    'task': read_task(row['task']),
    'transcript': tuple(row.get('transcript', ())),
    'environment': read_verdict(row.get('environment')),
  }
  return Attempt(**{**row, **read})


def verdict_row(verdict: Verdict | None) -> Row | None:
  # The evidence is encoded as JSON, because msgpack cannot represent integers of more than 64 bits.
  return (
    None
    if verdict is None
    else {
      **_fields(verdict),
      'parts': dict(verdict.parts),
      'turn_values': list(verdict.turn_values),
      'evidence': json.dumps(dict(verdict.evidence)),
    }
  )


def read_verdict(row: Row | None) -> Verdict | None:
  return (
    None
    if row is None
    else Verdict(
      **{
        **row,
        'turn_values': tuple(row['turn_values']),
        'evidence': json.loads(row['evidence']),
      }
    )
  )


def reward_row(reward: Reward) -> dict[str, Json]:
  return {**_fields(reward), 'turn_values': list(reward.turn_values)}


def read_reward(row: Row) -> Reward:
  return Reward(**{**row, 'turn_values': tuple(row['turn_values'])})


def sampling_row(sampling: Sampling) -> Row:
  detection = sampling.repetition_detection
  return {
    **_fields(sampling),
    'repetition_detection': None if detection is None else _fields(detection),
  }


def read_sampling(row: Row) -> Sampling:
  detection = row['repetition_detection']
  return Sampling(
    **{
      **row,
      'repetition_detection': None if detection is None else RepetitionDetection(**detection),
    }
  )


def _fields(record: Any) -> Row:
  return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
