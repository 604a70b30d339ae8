"""Batches that a run shares with another run, which follows them and trains on them.

A run that only explores writes a file for each completed batch into `replay/shared/`. For each
group of the batch, the file contains the rewards, and the place and digest of each row in the
sealed segments. It also contains the versions of the weights that generated the groups. Each start
of the run also writes a file, its opening, with the step from which it continues. A reader needs
these files and the segments, but not the index, so it may run on another machine.

Invariants:
- Each file is written once, under a temporary name, and then renamed, so a file under its final
  name is complete.
- The batches of one start have consecutive steps, beginning with the step of the start's opening.
- A batch is void if a later start continued from the step of this batch or from an earlier step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import xxhash

from jaxrl_llm.config.values import from_json, to_json
from jaxrl_llm.core.disk import sync, write_durably
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.files import parse_json, read_bytes
from jaxrl_llm.core.records.sample import Sample
from jaxrl_llm.core.records.score import Score, Status
from jaxrl_llm.core.types import Json
from jaxrl_llm.replay.segments import SegmentError, open_segment_reader
from jaxrl_llm.replay.tables import SEGMENTS

SHARED = 'shared'
"""Name of the directory of shared batches, inside the directory of the store."""
SCHEMA = 1
_MAX_BYTES = 1 << 30
"""Maximum size of a file in `replay/shared/`, in bytes."""
_MAX_VALUE = 1e18
"""Maximum magnitude of a reward or score. Its square is finite in float32."""
_BATCH = re.compile(r'(\d{8,})-(\d{3,})\.json')
_OPENING = re.compile(r'attempt-(\d{3,})\.json')


def digest(payload: bytes) -> str:
  """Returns the digest of the bytes of a row."""
  return xxhash.xxh3_128_hexdigest(payload)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opening:
  """Record of one start of a run that shares its batches."""

  schema: int = SCHEMA
  store: str
  """Name of the run's store, which never changes."""
  attempt: int
  """Number of this start of the run."""
  step: int
  """Step of the first batch that the run shares after this start."""
  vocabulary: str
  """Digest of the tokenizer's vocabulary (`vocabulary_digest`)."""
  seed: int | None = None
  """Seed of the run's draws and random numbers. None in files of earlier program versions."""
  share: tuple[int, int] = (0, 1)
  """Index and count of the run's share of the drawn tasks (`TaskSampler`)."""
  tasks: str = ''
  """Digest of the tasks and of the configuration of their order (`tasks.sampler.order_digest`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedVersion:
  """An exported version of a run's weights."""

  run: str
  """Name of the store of the run that exported the weights."""
  attempt: int
  step: int
  digest: str
  """Digest of the weights (`weights.versions.ExportedVersion.digest`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedRow:
  """Place of a sample in the sealed segments."""

  segment: str
  row: int
  digest: str
  """xxh3-128 of the sample's encoded bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedScore:
  """Score of a shared trajectory. It has the fields of `Score` except the uid."""

  scorer: str
  value: float | None
  parts: Mapping[str, float]
  turn_values: tuple[float, ...]
  status: Status
  evidence: Mapping[str, Json]
  time: float

  @classmethod
  def of(cls, score: Score) -> SharedScore:
    return cls(
      scorer=score.scorer,
      value=score.value,
      parts=dict(score.parts),
      turn_values=tuple(score.turn_values),
      status=score.status,
      evidence=dict(score.evidence),
      time=score.time,
    )

  def score(self, uid: str) -> Score:
    """Returns the `Score` of the sample `uid`."""
    fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    return Score(**fields | {'uid': uid})


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedTrajectory:
  """A trajectory that was selected for training, with its reward."""

  rows: tuple[SharedRow, ...]
  """Steps of the trajectory, in order."""
  value: float | None
  parts: Mapping[str, float]
  correct: bool | None
  turn_values: tuple[float, ...]
  masked: bool
  scores: tuple[SharedScore, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedGroup:
  group: str
  """Id of the group in the run that shares it."""
  task: str
  """uid of the task."""
  trajectories: tuple[SharedTrajectory, ...]

  @property
  def key(self) -> str:
    """Digest of the group's id and content. A group that a restarted run shares again has the same
    key if it was not generated again.
    """
    hasher = xxhash.xxh3_128(self.group.encode())
    for trajectory in self.trajectories:
      hasher.update(' '.join(row.digest for row in trajectory.rows).encode())
    return hasher.hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedBatch:
  """A completed batch that a run shares with another run."""

  schema: int = SCHEMA
  store: str
  attempt: int
  step: int
  """Number of batches that the run had completed before this batch."""
  committed: int
  """Step of the run's newest commit when the batch was completed. Batches before this step can no
  longer become void.
  """
  versions: Mapping[str, SharedVersion]
  """Exported versions with which the samples were generated, keyed by the attempt number in the
  samples' segments.
  """
  groups: tuple[SharedGroup, ...]


def vocabulary_digest(vocabulary: tuple[Mapping[str, int], tuple[int, ...]]) -> str:
  """Returns a digest of `Tokenizer.vocabulary`."""
  ids, stops = vocabulary
  return digest(repr((sorted(ids.items()), stops)).encode())


def _batch_name(step: int, attempt: int) -> str:
  return f'{step:08d}-{attempt:03d}.json'


def write_opening(directory: pathlib.Path, opening: Opening) -> None:
  """Writes the opening of a start. Call this before the store is recovered, because recovery moves
  segments of void batches away.

  Args:
    directory: directory of the store.
  """
  (directory / SHARED).mkdir(exist_ok=True)
  for unfinished in (directory / SHARED).glob('*.tmp'):
    unfinished.unlink()
  path = directory / SHARED / f'attempt-{opening.attempt:03d}.json'
  write_durably(path, json.dumps(to_json(opening)))


class UnsharedBatch:
  """A batch that is written, but that readers cannot see before `share` is called."""

  def __init__(self, directory: pathlib.Path, batch: SharedBatch):
    self._path = directory / SHARED / _batch_name(batch.step, batch.attempt)
    self._unfinished = self._path.with_suffix('.tmp')
    with self._unfinished.open('w') as file:
      json.dump(to_json(batch), file)
      file.flush()
      os.fsync(file.fileno())

  def share(self) -> None:
    """Makes the batch visible to readers."""
    self._unfinished.replace(self._path)
    sync(self._path.parent)


class SharedBatches:
  """Reader of the batches that another run shares. It writes nothing.

  Attributes:
    directory: directory of the other run's store.
  """

  def __init__(self, directory: pathlib.Path, decode: Callable[[bytes], Sample]):
    """
    Args:
      directory: directory of the other run's store, which need not exist yet.
      decode: decodes a row. Raises an exception if the row is not a sample that this run can use.
    """
    self.directory, self._decode = directory, decode
    self._reader = open_segment_reader(directory / SEGMENTS)

  def openings(self) -> list[Opening]:
    """Returns the starts of the run, oldest first. Raises UserError if a file is damaged."""
    found = sorted(
      (int(match[1]), name) for name in self._names() if (match := _OPENING.fullmatch(name))
    )
    openings = [self._parse(name, Opening) for _, name in found]
    for opening, (_, name) in zip(openings, found):
      index, count = opening.share
      if not 0 <= index < count:
        raise UserError(
          f'{self.directory / SHARED / name}: has share {opening.share}, wanted an index below the '
          'count; restore the file'
        )
    return openings

  def steps(self) -> dict[int, list[int]]:
    """Returns the steps of the batches that each start of the run has shared, in ascending order,
    keyed by the number of the start.
    """
    steps: dict[int, list[int]] = {}
    for name in self._names():
      if match := _BATCH.fullmatch(name):
        steps.setdefault(int(match[2]), []).append(int(match[1]))
    return {attempt: sorted(of) for attempt, of in steps.items()}

  def read(self, attempt: int, step: int) -> SharedBatch:
    """Reads a batch. Raises UserError if the batch's file is missing or damaged, or if it contains
    another batch than its name indicates.
    """
    name = _batch_name(step, attempt)
    batch = self._parse(name, SharedBatch)
    if (batch.attempt, batch.step) != (attempt, step):
      raise UserError(
        f'{self.directory / SHARED / name}: contains batch {batch.step} of start {batch.attempt}; '
        'restore the file'
      )
    try:
      for group in batch.groups:
        _check(group)
    except ValueError as error:
      raise UserError(f'{self.directory / SHARED / name}: {error}; restore the file') from None
    return batch

  def samples(self, group: SharedGroup) -> list[list[Sample]]:
    """Returns the samples of a group, one list of steps per trajectory.

    Raises SegmentError if a row cannot be read or does not have the expected digest.
    """
    rows = [row for trajectory in group.trajectories for row in trajectory.rows]
    for row in rows:
      if pathlib.PurePath(row.segment).name != row.segment:
        raise SegmentError(
          f'shared group {group.group}: segment {row.segment!r} is outside of {self.directory}'
        )
    try:
      payloads = iter(self._reader.read_bytes([(row.segment, row.row) for row in rows]))
      return [
        [self._decoded(row, next(payloads)) for row in trajectory.rows]
        for trajectory in group.trajectories
      ]
    except SegmentError:
      self._reader.close()  # The file may be replaced before the next call.
      raise

  def close(self) -> None:
    self._reader.close()

  def _decoded(self, row: SharedRow, payload: bytes) -> Sample:
    where = f'segment {self.directory / SEGMENTS / row.segment}, row {row.row}'
    if (found := digest(payload)) != row.digest:
      raise SegmentError(f'{where}: digest {found}, wanted {row.digest}; restore the file')
    try:
      return self._decode(payload)
    except Exception as error:  # The decoder of a damaged row may raise any exception.
      raise SegmentError(f'{where}: not a sample: {error}; restore the file') from error

  def _names(self) -> Iterable[str]:
    try:
      return os.listdir(self.directory / SHARED)
    except FileNotFoundError:
      return ()

  def _parse(self, name, kind):
    path = self.directory / SHARED / name
    try:
      value = parse_json(read_bytes(path, _MAX_BYTES).decode())
    except (OSError, ValueError) as error:
      raise UserError(f'{path}: cannot be read ({error}); restore the file') from None
    if not isinstance(value, dict) or value.get('schema') != SCHEMA:
      raise UserError(
        f'{path}: does not have schema {SCHEMA}; use the program version that wrote it'
      )
    return from_json(value, kind, str(path))


def _check(group: SharedGroup) -> None:
  """Raises ValueError if a group is empty, names a row twice, or has a number out of range."""
  rows = [(row.segment, row.row) for t in group.trajectories for row in t.rows]
  if not group.trajectories or not all(t.rows for t in group.trajectories):
    raise ValueError(f'group {group.group!r} has no trajectories, or one without rows')
  if len(set(rows)) < len(rows):
    raise ValueError(f'group {group.group!r} names a row twice')
  for scored in (s for t in group.trajectories for s in (t, *t.scores)):
    numbers = (scored.value or 0.0, *scored.parts.values(), *scored.turn_values)
    # The comparison is also false for NaN.
    if not all(abs(number) <= _MAX_VALUE for number in numbers):
      raise ValueError(
        f'group {group.group!r} has rewards or scores of {numbers}, wanted finite numbers of at '
        f'most {_MAX_VALUE:g}'
      )


def next_batch(
  openings: Sequence[Opening], attempt: int | None, step: int
) -> tuple[int, int, bool] | None:
  """Returns (attempt, step, voids): the attempt (start of the run) and step of the next batch to
  read, and whether later starts have made void any batch that was already read. Returns None if the
  run has not started.

  Args:
    openings: starts of the run, oldest first.
    attempt: attempt whose batches are being read; None before the first batch.
    step: step of the next batch of this attempt.
  """
  voids = False
  for opening in openings:
    if attempt is None:
      attempt, step = opening.attempt, opening.step
    elif opening.attempt > attempt and opening.step <= step:
      # All batches before the opening's step have been read, and those from this step on are void.
      voids |= opening.step < step
      attempt, step = opening.attempt, opening.step
    elif opening.attempt > attempt:
      break  # Batches of the earlier start are missing, or not visible yet.
  return None if attempt is None else (attempt, step, voids)
