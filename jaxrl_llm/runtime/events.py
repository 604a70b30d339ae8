"""events.jsonl: every message that passes through the master, one JSON line each, in the order of time.

A message of its own is one line, an exchange two: a request, and the reply that names it. A request without a reply was
given up (a stop, an error, the end of its stage: its groups are dropped) or died with its process. `EDGES` is the list
of all edges, with the diagram that each is drawn in.

Derived: a run never reads it back, nothing of it is in a commit, and a resumed run appends under its own attempt.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.types import Json

FILE = 'events.jsonl'
FLUSH_S = 1.0
"""Longest that a line stays in memory while others follow it; each step writes out what there is."""


class Edge(enum.StrEnum):
  """What a message is about; `EDGES` says from whom to whom."""

  TASK = 'task'
  ROLLOUT = 'rollout'
  EVAL = 'eval'
  STORE = 'store'
  DROP = 'drop'
  FETCH = 'fetch'
  TRAINING_DATA = 'training_data'
  GRADIENT_UPDATE = 'gradient_update'
  WEIGHTS = 'weights'
  AUXILIARY_SCORE = 'auxiliary_score'
  AUXILIARY_MODEL = 'auxiliary_model'
  SUITE = 'suite'
  COMMIT = 'commit'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ends:
  """An edge of the diagrams. A reply goes the other way."""

  source: str
  target: str
  lane: str
  """Where a timeline draws it."""
  answered: bool = True
  """Whether it is an exchange."""
  diagram: str
  """Which diagram has it, under that diagram's name for it."""
  text: str


EDGES: Mapping[Edge, Ends] = {
  Edge.TASK: Ends(
    source='taskset',
    target='master',
    lane='taskset',
    answered=False,
    diagram='Trinity: tasks, Taskset → Explorer',
    text='A task has been drawn for a group.',
  ),
  Edge.ROLLOUT: Ends(
    source='master',
    target='rollout',
    lane='rollout',
    diagram='Kimi: rollout trajectories, Rollout → Master (the reply)',
    text='The samples of a group are asked of the engine; answered when the last of them has ended.',
  ),
  Edge.EVAL: Ends(
    source='master',
    target='reward models',
    lane='reward models',
    diagram='Kimi: eval request and its reply, Master ↔ Reward Models',
    text='The samples of a group are scored, each as it ends: from the first handed over to the last score.',
  ),
  Edge.STORE: Ends(
    source='master',
    target='replay buffer',
    lane='replay buffer',
    diagram='Kimi: store, Master → Replay Buffer; Trinity: experience, Explorer → Buffer',
    text='The samples and scores of a group are written down; the reply says how many may be learned from.',
  ),
  Edge.DROP: Ends(
    source='master',
    target='replay buffer',
    lane='replay buffer',
    answered=False,
    diagram='none (it accounts for groups that reach no batch)',
    text='Nothing of a group will be learned from, and why.',
  ),
  Edge.FETCH: Ends(
    source='master',
    target='replay buffer',
    lane='replay buffer',
    diagram='Kimi: fetch, Replay Buffer → Master',
    text='The rows of a closed batch: sealed samples of the store, or rows of a static stream.',
  ),
  Edge.TRAINING_DATA: Ends(
    source='master',
    target='trainer',
    lane='trainer',
    diagram='Kimi: training data, Master → Trainer; Trinity: Buffer → Trainer',
    text='A batch for the trainer; answered when it has been trained on.',
  ),
  Edge.GRADIENT_UPDATE: Ends(
    source='trainer',
    target='trainer',
    lane='trainer',
    diagram='Kimi: gradient update, Trainer → Trainer',
    text='All optimizer steps of a batch; the reply says whether the policy moved.',
  ),
  Edge.WEIGHTS: Ends(
    source='trainer',
    target='rollout',
    lane='weights',
    diagram='Kimi: weight flow, Trainer → Rollout; Trinity: synchronize weights',
    text='A version for the engine; the reply is its acknowledgement: it was loaded, or (unchanged) relabelled.',
  ),
  Edge.AUXILIARY_SCORE: Ends(
    source='rollout',
    target='reward models',
    lane='reward models',
    diagram='Trinity: Reward Model, asked by Workflow Runners (here through the master)',
    text='A workflow asks in mid-episode what an attempt is worth; the answer is not stored.',
  ),
  Edge.AUXILIARY_MODEL: Ends(
    source='rollout',
    target='auxiliary models',
    lane='auxiliary models',
    diagram='Trinity: auxiliary models of Workflow Runners (here through the master)',
    text='A workflow asks another model than the policy in mid-episode.',
  ),
  Edge.SUITE: Ends(
    source='master',
    target='rollout',
    lane='rollout',
    diagram='none (held-out evaluation)',
    text='A suite is rolled out and scored on the version served.',
  ),
  Edge.COMMIT: Ends(
    source='trainer',
    target='checkpoints',
    lane='checkpoints',
    diagram='none (recovery)',
    text='A checkpoint is written.',
  ),
}


class Asked(NamedTuple):
  """A request that waits for its reply."""

  edge: Edge
  id: int
  t: float


class Events:
  """The interface, and its null object: messages that nobody records.

  Fields are small JSON, never one per token: `group`, `count`, `version`, `suite`, ….
  """

  def advance(self, step: int) -> None:
    """What follows is stamped with `step`, the number of completed batches."""

  def message(self, edge: Edge, **fields: Json) -> None:
    """Records a message that has no answer."""

  def request(self, edge: Edge, **fields: Json) -> Asked:
    """Records a request. The result is for `reply`, once."""
    return Asked(edge, 0, 0.0)

  def reply(self, asked: Asked, **fields: Json) -> None:
    """Records the answer to a request, and the seconds it took."""

  def close(self) -> None:
    """Writes out what is left."""


SILENT = Events()


class EventLog(Events):
  """Appends to `<workdir>/events.jsonl`. One process of a run has one, and calls it from one thread."""

  def __init__(
    self, workdir: pathlib.Path, *, attempt: int, step: int = 0, clock: Callable[[], float] = time.perf_counter
  ):
    """Opens the log; a last line that a killed process left half-written is closed, and stays as one unreadable line.

    Args:
      workdir: the run directory.
      attempt: number of this start of the run.
      step: completed batches.
      clock: seconds, monotonic; its readings are shifted by what the time of day is now.

    Raises:
      RunError: where the file cannot be opened.
    """
    self._path = workdir / FILE
    self._attempt, self._step, self._clock = attempt, step, clock
    self._lines: list[bytes] = []
    self._ids = 0
    self._written = clock()
    self._zero = time.time() - self._written
    try:
      self._file = self._path.open('a+b', buffering=0)
      if self._file.tell():
        self._file.seek(-1, os.SEEK_END)
        if self._file.read() != b'\n':
          self._file.write(b'\n')
    except OSError as error:
      raise self._stopped(error) from error

  def advance(self, step: int) -> None:
    self._step = step
    self._write()

  def message(self, edge: Edge, **fields: Json) -> None:
    self._add(edge, 'message', fields)

  def request(self, edge: Edge, **fields: Json) -> Asked:
    return self._add(edge, 'request', fields)

  def reply(self, asked: Asked, **fields: Json) -> None:
    self._add(asked.edge, 'reply', fields, asked)

  def close(self) -> None:
    try:
      self._write()
    finally:
      self._file.close()

  def _add(self, edge: Edge, kind: str, fields: Mapping[str, Json], asked: Asked | None = None) -> Asked:
    now, ends = self._clock(), EDGES[edge]
    line: dict[str, Any] = {
      't': round(self._zero + now, 6),
      'attempt': self._attempt,
      'step': self._step,
      'edge': edge,
      'kind': kind,
      'from': ends.source if asked is None else ends.target,
      'to': ends.target if asked is None else ends.source,
      'id': self._ids,
    }
    if asked is not None:
      line |= {'of': asked.id, 's': round(now - asked.t, 6)}
    self._lines.append(json.dumps(line | dict(fields), separators=(',', ':')).encode() + b'\n')
    self._ids += 1
    if now - self._written > FLUSH_S:
      self._write()
    return Asked(edge, line['id'], now)

  def _write(self) -> None:
    """Raises RunError for a full disk; what could not be written is lost, for nothing depends on it."""
    data, self._lines = b''.join(self._lines), []
    self._written = self._clock()
    try:
      while data:
        data = data[self._file.write(data) :]
    except OSError as error:
      raise self._stopped(error) from error

  def _stopped(self, error: OSError) -> RunError:
    return RunError(
      f'{self._path}: cannot be written ({error.strerror}); make room or make it writable, then start again with the '
      'same command'
    )


class Event(NamedTuple):
  """One line of the log."""

  t: float
  """Seconds since 1970, in one attempt never going back."""
  attempt: int
  step: int
  edge: Edge
  kind: str
  """'request', 'reply' or 'message'."""
  id: int
  """Unique in its attempt."""
  of: int | None
  """Of a reply: the id of its request."""
  fields: dict[str, Json]


def read(path: pathlib.Path) -> Iterator[Event | None]:
  """The events of a log, in their order; None for a line that is none."""
  with path.open('rb') as file:
    for line in file:
      if line.strip():
        yield _event(line)


def _event(line: bytes) -> Event | None:
  try:
    row = json.loads(line)
    named = {key: row.pop(key) for key in ('t', 'attempt', 'step', 'kind', 'id')}
    edge, of = Edge(row.pop('edge')), row.pop('of', None)
    for derived in ('from', 'to', 's'):
      row.pop(derived, None)
  except (ValueError, KeyError, TypeError, AttributeError):
    return None
  numbers = [named['attempt'], named['step'], named['id'], *([] if of is None else [of])]
  if not (
    isinstance(named['t'], float | int) and math.isfinite(named['t']) and all(isinstance(n, int) for n in numbers)
  ):
    return None
  if named['kind'] not in ('request', 'reply', 'message') or (named['kind'] == 'reply') != (of is not None):
    return None
  return Event(**named, edge=edge, of=of, fields=row)
