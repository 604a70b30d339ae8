"""events.jsonl: a chronological log of the messages between the components of a run.

Each line is a JSON object. A one-way message is one line. An exchange is two lines: a request, and
a reply that refers to the request. A request may have no reply because it was abandoned (by a stop,
an error, or the end of its stage), or because the process died. `EDGES` describes all types of
messages and the published diagrams in which they appear.

A run never reads this log, and commits do not contain it. A resumed run appends to it, under a new
attempt number. When the log has reached half of its byte budget, it is renamed to
`events.1.jsonl`, which replaces any file of that name, and a new log begins.
"""

from __future__ import annotations

import contextlib
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
from jaxrl_llm.runtime.log.config import LoggingConfig

FILE = 'events.jsonl'
EARLIER_FILE = 'events.1.jsonl'
"""Name of the file with the messages that precede the messages in `FILE`."""
FLUSH_S = 1.0
"""Seconds after which buffered lines are written to the file together with the next event.

They are also written whenever the step advances.
"""


class Edge(enum.StrEnum):
  """Type of a message. `EDGES` gives the source and target of each type."""

  TASK = 'task'
  ROLLOUT = 'rollout'
  EVAL = 'eval'
  REWARD_PASS = 'reward_pass'
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
  OFFLOAD = 'offload'
  RELOAD = 'reload'
  RELEASE = 'release'
  RESTORE = 'restore'
  LEDGER = 'ledger'
  CHANGE = 'change'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ends:
  """Description of a type of message (an edge). Replies go from the target to the source."""

  source: str
  target: str
  lane: str
  """Lane of the timeline in which messages of this type are shown."""
  answered: bool = True
  """Whether the messages are exchanges, that is, requests with replies."""
  diagram: str
  """Published diagram that contains the edge, and the edge's name in it; or 'none' and the edge's
  purpose.
  """
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
  Edge.REWARD_PASS: Ends(
    source='master',
    target='trainer',
    lane='scoring',
    diagram='DeepSeek-R1: forward passes of the reward model, in the inference phase',
    text="The trainer's reward model scores all samples of a batch, or of one of its later rounds.",
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
    text='A group will not be trained on; the message gives the reason.',
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
    text='A checkpoint is written during the next steps; the reply says that it is complete.',
  ),
  Edge.SERVER: Ends(
    source='rollout',
    target='master',
    lane='rollout',
    answered=False,
    diagram='none (discovery)',
    text='A server of the registry joins the engine, leaves it, or is refused.',
  ),
  Edge.OFFLOAD: Ends(
    source='trainer',
    target='memory',
    lane='memory',
    diagram='DeepSeek-R1: save and offload the actor; offload reference and reward model',
    text='A role leaves the devices, for host memory or files, or its memory is freed.',
  ),
  Edge.RELOAD: Ends(
    source='memory',
    target='trainer',
    lane='memory',
    diagram='DeepSeek-R1: load reference and reward model; load actor and critic',
    text=(
      'A role comes back to the devices, or is read again. For a commit, it moves from files to '
      'host memory.'
    ),
  ),
  Edge.RELEASE: Ends(
    source='trainer',
    target='rollout',
    lane='memory',
    diagram='DeepSeek-R1: destroy the vLLM workers',
    text='The engine gives up the memory of the devices.',
  ),
  Edge.RESTORE: Ends(
    source='trainer',
    target='rollout',
    lane='memory',
    diagram='DeepSeek-R1: instantiate vLLM workers from the actor',
    text='The engine serves again, with the weights published last.',
  ),
  Edge.LEDGER: Ends(
    source='trainer',
    target='memory',
    lane='memory',
    answered=False,
    diagram='DeepSeek-R1: VRAM of the rollout, inference and training phases',
    text='A phase begins; the message lists what the memory of a device holds.',
  ),
  Edge.CHANGE: Ends(
    source='command',
    target='master',
    lane='trainer',
    answered=False,
    diagram='none (a changed configuration)',
    text='The run continues with a changed configuration, or as a branch of another run.',
  ),
}


class Asked(NamedTuple):
  """A pending request, which `Events.reply` completes."""

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
    max_bytes: int = LoggingConfig.event_bytes,
    clock: Callable[[], float] = time.perf_counter,
  ):
    """Opens the log.

    If a killed process has left an incomplete last line, that line is terminated. It remains in the
    log as an unreadable line.

    Args:
      workdir: run directory.
      attempt: number of this start of the run.
      step: number of completed batches.
      max_bytes: approximate maximum size of `FILE` and `EARLIER_FILE` together.
      clock: monotonic clock in seconds. A constant is added to its readings, so that recorded times
        are seconds since 1970.

    Raises:
      RunError: if the file cannot be opened.
    """
    self._path, self._max_bytes = workdir / FILE, max_bytes
    self._attempt, self._step, self._clock = attempt, step, clock
    self._lines: list[bytes] = []
    self._ids = 0
    self._written = clock()
    self._zero = time.time() - self._written
    try:
      self._open()
      if self._size:
        self._file.seek(-1, os.SEEK_END)
        if self._file.read() != b'\n':
          self._file.write(b'\n')
    except OSError as error:
      raise self._stopped(error) from error

  def _open(self) -> None:
    self._file = self._path.open('a+b', buffering=0)
    self._size = self._file.tell()

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
      RunError: if writing fails. The buffered lines are then lost.
    """
    data, self._lines = b''.join(self._lines), []
    self._written = self._clock()
    try:
      while data:
        written = self._file.write(data)
        self._size, data = self._size + written, data[written:]
      if self._size > self._max_bytes / 2:
        self._file.close()
        with contextlib.suppress(FileNotFoundError):  # Someone may have deleted the log.
          self._path.replace(self._path.with_name(EARLIER_FILE))
        self._open()
    except OSError as error:
      raise self._stopped(error) from error

  def _stopped(self, error: OSError) -> RunError:
    return RunError(
      f'{self._path}: cannot be written ({error.strerror}); free disk space or make the file '
      'writable, then '
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
  """Kind of the line: 'request', 'reply' or 'message'."""
  id: int
  """Event number, unique within its attempt."""
  of: int | None
  """Id of the request that a reply answers; None for other kinds."""
  fields: dict[str, Json]


def read(path: pathlib.Path, limit: int | None = None) -> Iterator[Event | None]:
  """Yields the event of each line of a log, or None if the line is invalid. Skips blank lines.

  Args:
    path: the file `FILE` of a run directory. The messages of the file `EARLIER_FILE` in the same
      directory come first.
    limit: maximum number of bytes to read, from the end of the log. If None, the whole log is read.
  """
  size, earlier = path.stat().st_size, path.with_name(EARLIER_FILE)
  if earlier.is_file() and (limit is None or size < limit):
    yield from _read(earlier, None if limit is None else limit - size)
  yield from _read(path, limit)


def _read(path: pathlib.Path, limit: int | None) -> Iterator[Event | None]:
  with path.open('rb') as file:
    if limit is not None and (size := path.stat().st_size) > limit:
      file.seek(size - limit - 1)
      next(file)  # Skips the end of a line whose beginning is not read.
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
