"""Sample records, which contain the exact tokens. A record is written once and never changed.

`encode` and `decode` convert a record to and from msgpack. Arrays are stored as little-endian
bytes, and pickle is not used.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import msgpack
import numpy as np
from jaxtyping import Bool, Float32, Int32, UInt8

from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Json, Version

SCHEMA = 1


class Source(enum.StrEnum):
  ROLLOUT = 'rollout'
  EXPERT = 'expert'
  HUMAN = 'human'
  SYNTHETIC = 'synthetic'


class Role(enum.IntEnum):
  """Author of a token. `Sample.role` has one value per token."""

  PROMPT = 0
  POLICY = 1
  TOOL = 2


class Finish(enum.StrEnum):
  """Reason why a generation ended: a stop token, its length limit, detected repetition (see
  `rollout.repetition`), or an abort. A trajectory may also end at its maximum number of steps.
  """

  STOP = 'stop'
  LENGTH = 'length'
  REPETITION = 'repetition'
  STEPS = 'steps'
  ABORT = 'abort'

  @property
  def is_truncated(self) -> bool:
    """Whether a limit of the run, on tokens or on steps, ended the generation."""
    return self in (Finish.LENGTH, Finish.STEPS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
  """Tokens [start, end) of a sample that one engine generated with one version of the weights."""

  start: int
  end: int
  version: Version
  engine: str
  finish: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
  """One token sequence. All per-token arrays have the length of `tokens`."""

  uid: str
  """`<stage>/<task uid>/<visit>/<sample index>`, with `/<step index>` appended for every step of a
  trajectory after the first. The uid is the same in every attempt of a run.
  """
  task_id: str
  visit: int
  """Number of times that this run drew the task before."""
  sample_index: int
  """Index of the sample's trajectory within its group, from 0."""
  group_id: str
  """Identifier of the group; samples with equal group_id share a baseline."""
  trajectory_id: str
  """Identifier of the trajectory, whose steps are one sample each. It is the uid of the first step.
  """
  step_index: int = 0
  """Index of the sample in its trajectory, from 0."""
  taskset: str
  domain: str
  source: Source
  tokens: Int32[np.ndarray, 'time']
  prompt_len: int
  role: UInt8[np.ndarray, 'time']
  loss_mask: Bool[np.ndarray, 'time']
  """True for tokens that enter the loss; False at position 0, which has no logprob."""
  sampled: Bool[np.ndarray, 'time']
  """True for tokens that the policy sampled."""
  behaviour_logprobs: Float32[np.ndarray, 'time']
  """Logprobs under the sampling policy; 0 for tokens that the policy did not sample."""
  segments: tuple[Segment, ...] = ()
  temperature: float = 1.0
  finish_reason: Finish = Finish.STOP
  preference: dict[str, str] | None = None
  """For preference data: keys 'pair_id' and 'label'. The label is chosen, rejected, desirable or
  undesirable. None for other data.
  """
  media: tuple[dict[str, Json], ...] = ()
  """One dict with keys 'kind', 'digest' and 'span' per attachment. The span [start, end) covers the
  attachment's placeholder tokens. If the attachment has no placeholder tokens, the span is empty.
  """

  def __post_init__(self):
    length = len(self.tokens)
    for name in ('role', 'loss_mask', 'sampled', 'behaviour_logprobs'):
      if len(getattr(self, name)) != length:
        raise ValueError(
          f'Sample {self.uid}: {name} has {len(getattr(self, name))} entries, but tokens has '
          f'{length}'
        )
    if not 0 < self.prompt_len <= length:
      raise ValueError(
        f'Sample {self.uid}: prompt_len is {self.prompt_len}, wanted 1 to {length}, the number of '
        'tokens'
      )
    if self.loss_mask[0]:
      raise ValueError(f'Sample {self.uid}: loss_mask[0] is set, but token 0 has no logprob')
    if not np.isfinite(self.behaviour_logprobs).all():
      raise ValueError(f'Sample {self.uid}: behaviour_logprobs are not finite')
    if self.behaviour_logprobs[~self.sampled].any():
      raise ValueError(f'Sample {self.uid}: behaviour_logprobs are set for tokens not sampled')
    for shown in self.media:
      if shown.keys() != {'kind', 'digest', 'span'}:
        raise ValueError(
          f'Sample {self.uid}: media has {sorted(shown)}, wanted kind, digest and span'
        )
      start, end = shown['span']
      if not 0 <= start <= end <= length:
        raise ValueError(
          f'Sample {self.uid}: media span {shown["span"]} does not lie within the {length} tokens'
        )

  @property
  def response_len(self) -> int:
    return len(self.tokens) - self.prompt_len


def step_uid(trajectory: str, step: int) -> str:
  """Returns the uid of a step of a trajectory. The first step has the uid of the trajectory."""
  return f'{trajectory}/{step}' if step else trajectory


def media_of(task: Task) -> tuple[dict[str, Json], ...]:
  """Returns the task's media in the form of `Sample.media`.

  All spans are empty, since text prompts have no media tokens.
  """
  return tuple({'kind': shown.kind, 'digest': shown.digest, 'span': [0, 0]} for shown in task.media)


_ARRAYS = {
  'tokens': '<i4',
  'role': '|u1',
  'loss_mask': '|b1',
  'sampled': '|b1',
  'behaviour_logprobs': '<f4',
}


def encode(sample: Sample) -> bytes:
  """Encodes the sample; `decode` restores it bit for bit."""
  row: dict[str, Any] = {f.name: getattr(sample, f.name) for f in dataclasses.fields(sample)}
  for name, dtype in _ARRAYS.items():
    row[name] = np.ascontiguousarray(row[name], dtype).tobytes()
  row['segments'] = [
    [s.start, s.end, s.version.attempt, s.version.step, s.engine, s.finish] for s in sample.segments
  ]
  row['source'], row['finish_reason'] = str(sample.source), str(sample.finish_reason)
  row['media'] = list(sample.media)
  return msgpack.packb({'schema': SCHEMA, **row})


def decode(data: bytes) -> Sample:
  """Decodes a sample that `encode` encoded. Raises ValueError for an unknown schema."""
  row = msgpack.unpackb(data)
  schema = row.pop('schema', None)
  if schema != SCHEMA:
    raise ValueError(f'Sample record has schema {schema!r}, but this program reads {SCHEMA}')
  for name, dtype in _ARRAYS.items():
    row[name] = np.frombuffer(row[name], dtype)
  row['segments'] = tuple(
    Segment(start=a, end=b, version=Version(attempt, step), engine=engine, finish=finish)
    for a, b, attempt, step, engine, finish in row['segments']
  )
  row['source'], row['finish_reason'] = Source(row['source']), Finish(row['finish_reason'])
  row['media'] = tuple(row['media'])
  return Sample(**row)
