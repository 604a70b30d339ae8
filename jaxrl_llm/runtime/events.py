"""events.jsonl: every message through the master, a JSON line each, in chronological order.

A one-way message is one line; an exchange is two: a request and the reply that refers to it. A
request without a reply was abandoned (by a stop, an error, or the end of its stage, which drops its
groups) or was lost with its process. `EDGES` lists all edges and the diagram in which each appears.

The log is output only: a run never reads it back, commits do not include it, and a resumed run
appends to it under its own attempt.
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
"""Minimum seconds between writes of the buffered lines to the file. Each step also writes them."""


class Edge(enum.StrEnum):
  """Type of a message; `EDGES` gives its source and target."""

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
  SERVER = 'server'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ends:
  """Description of an edge. Replies travel from target to source."""

  source: str
  target: str
  lane: str
  """Lane of the timeline that shows the edge."""
  answered: bool = True
  """Whether the edge is an exchange (request and reply)."""
  diagram: str
  """Diagram that contains the edge, and the edge's name in it."""
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
    text=(
      'The samples of a group are requested from the engine; answered when the last of them has '
      'ended.'
    ),
  ),
  Edge.EVAL: Ends(
    source='master',
    target='reward models',
    lane='reward models',
    diagram='Kimi: eval request and its reply, Master ↔ Reward Models',
    text=(
      'The samples of a group are scored, each as soon as it ends: from the first sample to the '
      'last score.'
    ),
  ),
  Edge.STORE: Ends(
    source='master',
    target='replay buffer',
    lane='replay buffer',
    diagram='Kimi: store, Master → Replay Buffer; Trinity: experience, Explorer → Buffer',
    text='The samples and scores of a group are stored; the reply says how many can be trained on.',
  ),
  Edge.DROP: Ends(
    source='master',
    target='replay buffer',
    lane='replay buffer',
    answered=False,
    diagram='none (it accounts for groups that reach no batch)',
    text='A group will not be trained on, and why.',
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
    text=(
      'A version for the engine; the reply is its acknowledgement: it was loaded, or (unchanged) '
      'relabelled.'
    ),
  ),
  Edge.AUXILIARY_SCORE: Ends(
    source='rollout',
    target='reward models',
    lane='reward models',
    diagram='Trinity: Reward Model, asked by Workflow Runners (here through the master)',
    text='A workflow requests the score of an attempt in mid-episode; the answer is not stored.',
  ),
  Edge.AUXILIARY_MODEL: Ends(
    source='rollout',
    target='auxiliary models',
    lane='auxiliary models',
    diagram='Trinity: auxiliary models of Workflow Runners (here through the master)',
    text='A workflow calls a model other than the policy in mid-episode.',
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
  Edge.SERVER: Ends(
    source='rollout',
    target='master',
    lane='rollout',
    answered=False,
    diagram='none (discovery)',
    text='A server of the registry joins the engine, leaves it, or is refused.',
  ),
}


class Asked(NamedTuple):
  """A pending request."""

  edge: Edge
  id: int
  t: float


class Events:
  """Interface of event logs, and the null object that records nothing.

  Fields are small JSON values, never lists with an entry per token: `group`, `count`, `version`,
  `suite`, ….
  """

  def advance(self, step: int) -> None:
    """Sets the step (number of completed batches) with which later events are stamped."""

  def message(self, edge: Edge, **fields: Json) -> None:
    """Records a one-way message."""

  def request(self, edge: Edge, **fields: Json) -> Asked:
    """Records a request. Pass the result to `reply`, at most once."""
    return Asked(edge, 0, 0.0)

  def reply(self, asked: Asked, **fields: Json) -> None:
    """Records the reply to a request and the seconds it took."""

  def close(self) -> None:
    """Flushes the remaining lines."""


SILENT = Events()


class EventLog(Events):
  """Appends to `<workdir>/events.jsonl`. Used by one process of a run, from one thread."""

  def __init__(
    self,
    workdir: pathlib.Path,
    *,
    attempt: int,
    step: int = 0,
    clock: Callable[[], float] = time.perf_counter,
  ):
    """Opens the log; a half-written last line of a killed process is terminated and stays as one
    unreadable line.

    Args:
      workdir: run directory.
      attempt: number of this start of the run.
      step: number of completed batches.
      clock: monotonic clock in seconds; its readings are shifted to the current time of day.

    Raises:
      RunError: the file cannot be opened.
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

  def _add(
    self, edge: Edge, kind: str, fields: Mapping[str, Json], asked: Asked | None = None
  ) -> Asked:
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
    """Writes the buffered lines. Raises RunError if that fails; unwritten lines are lost, but no
    run needs them.
    """
    data, self._lines = b''.join(self._lines), []
    self._written = self._clock()
    try:
      while data:
        data = data[self._file.write(data) :]
    except OSError as error:
      raise self._stopped(error) from error

  def _stopped(self, error: OSError) -> RunError:
    return RunError(
      f'{self._path}: cannot be written ({error.strerror}); make room or make it writable, then '
      'start again with the same command'
    )


class Event(NamedTuple):
  """A line of the log."""

  t: float
  """Seconds since 1970, non-decreasing within an attempt."""
  attempt: int
  step: int
  edge: Edge
  kind: str
  """'request', 'reply' or 'message'."""
  id: int
  """Event number, unique within its attempt."""
  of: int | None
  """Id of the request that a reply answers; None for other kinds."""
  fields: dict[str, Json]


def read(path: pathlib.Path) -> Iterator[Event | None]:
  """Yields, for each line of a log that is not blank, its event, or None if the line is invalid."""
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
    isinstance(named['t'], float | int)
    and math.isfinite(named['t'])
    and all(isinstance(n, int) for n in numbers)
  ):
    return None
  if named['kind'] not in ('request', 'reply', 'message') or (named['kind'] == 'reply') != (
    of is not None
  ):
    return None
  return Event(**named, edge=edge, of=of, fields=row)
