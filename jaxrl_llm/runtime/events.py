"""events.jsonl: a chronological log of the messages between the components of a run.

Each line is a JSON object. A one-way message is one line. An exchange is two lines: a request, and
a reply that refers to the request. A request may have no reply because it was abandoned (by a stop,
an error, or the end of its stage), or because the process died. `EDGES` describes all types of
messages and the published diagrams in which they appear.

A run never reads this log, and commits do not contain it. A resumed run appends to it, under a new
attempt number.
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
"""Seconds after which buffered lines are written to the file together with the next event.

They are also written whenever the step advances.
"""


class Edge(enum.StrEnum):
  """Type of a message. `EDGES` gives the source and target of each type."""

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
  CHANGE = 'change'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ends:
  """Description of a type of messages (an edge). Replies go from the target to the source."""

  source: str
  target: str
  lane: str
  """Lane of the timeline in which these messages are shown."""
  answered: bool = True
  """Whether the messages are exchanges, that is, requests with replies."""
  diagram: str
  """Published diagram that contains the edge, and the edge's name in that diagram."""
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
    lane='scoring',
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
    lane='scoring',
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
  Edge.CHANGE: Ends(
    source='command',
    target='master',
    lane='trainer',
    answered=False,
    diagram='none (a changed configuration)',
    text='The run goes on under a changed configuration, or as a branch of another run.',
  ),
}


class Asked(NamedTuple):
  """A pending request."""

  edge: Edge
  id: int
  t: float


class Events:
  """Interface of event logs. An instance of this class itself records nothing.

  The fields of an event, such as `group`, `count`, `version` or `suite`, are small JSON values.
  They never contain lists with an entry per token.
  """

  def advance(self, step: int) -> None:
    """Sets the step (number of completed batches) that is recorded with later events."""

  def message(self, edge: Edge, **fields: Json) -> None:
    """Records a one-way message."""

  def request(self, edge: Edge, **fields: Json) -> Asked:
    """Records a request. Pass the result to `reply`, at most once."""
    return Asked(edge, 0, 0.0)

  def reply(self, asked: Asked, **fields: Json) -> None:
    """Records the reply to a request, and the seconds since the request."""

  def close(self) -> None:
    """Writes the remaining lines and closes the log."""


SILENT = Events()


class EventLog(Events):
  """Log that appends to `<workdir>/events.jsonl`. Only one thread of one process may use it."""

  def __init__(
    self,
    workdir: pathlib.Path,
    *,
    attempt: int,
    step: int = 0,
    clock: Callable[[], float] = time.perf_counter,
  ):
    """Opens the log.

    If a killed process has left an incomplete last line, that line is terminated. It remains in the
    log as an unreadable line.

    Args:
      workdir: run directory.
      attempt: number of this start of the run.
      step: number of completed batches.
      clock: monotonic clock in seconds. A constant is added to its readings, so that recorded times
        are seconds since 1970.

    Raises:
      RunError: if the file cannot be opened.
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
    """Writes the buffered lines to the file.

    Raises:
      RunError: if that fails. Lines that were not written are then lost. No run needs them.
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
  """Time in seconds since 1970. It never decreases within an attempt."""
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


def read(path: pathlib.Path, limit: int | None = None) -> Iterator[Event | None]:
  """Yields the event of each line of a log, or None if the line is invalid. Skips blank lines.

  Args:
    limit: maximum number of bytes to read, from the end of the file. If None, the whole file is
      read.
  """
  with path.open('rb') as file:
    if limit is not None and (size := path.stat().st_size) > limit:
      file.seek(size - limit - 1)
      next(file)  # The rest of a line.
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
