"""Export of a store's samples as JSON Lines, one sample per line (docs/guides/replay.md).

Invariant: a file under its final name has a line for every selected sample that could be read. An
export that is interrupted leaves no such file.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TextIO

import numpy as np
from jaxtyping import Float32

from jaxrl_llm.core.disk import link_or_copy, sync
from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.records.sample import Sample
from jaxrl_llm.core.types import Json
from jaxrl_llm.replay.browse import snapshot
from jaxrl_llm.replay.connection import NAMED
from jaxrl_llm.replay.segments import Ref, SegmentError, SegmentReader, decode_row
from jaxrl_llm.replay.tables import IS_ADDED, State, as_state

_AT_ONCE = 64
"""Number of samples held in memory at a time."""
_NAMED_AT_MOST = 8
"""Maximum number of lost samples that a message lists by name."""
_WITH_BYTES = (State.STORED, State.AWAITING, State.ADMITTED, State.TRAINED)
"""States in which the store always has the content of a policy sample. A dropped or expired sample
may have no content, because it was never generated or has been pruned.
"""
_OPEN = 'open segment'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
  """Conditions that samples must meet to be exported. A condition that is None is always met."""

  stage: str | None = None
  state: str | None = None
  task: str | None = None
  steps: tuple[int, int] | None = None
  """First and last step, inclusive. A sample meets the condition if it entered its state in one of
  these steps. A sample that several batches trained on meets it if any of their steps is in range.
  """

  def __post_init__(self):
    if self.state is not None:
      as_state(self.state)
    if self.steps is not None and not 0 <= self.steps[0] <= self.steps[1]:
      raise UserError(
        f'steps {self.steps[0]} to {self.steps[1]}: wanted 0 or more, in ascending order'
      )

  @property
  def text(self) -> str:
    given = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
    return f' with {", ".join(f"{k} {v}" for k, v in given.items())}' if given else ''


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exported:
  """Summary of an export."""

  samples: int
  tokens: int
  """Number of tokens, prompts included."""
  size: int
  """Size of the file in bytes."""
  without_bytes: dict[str, int]
  """Number of selected samples that have no complete tokens in the store, keyed by state. They are
  not in the file.
  """
  lost: tuple[str, ...]
  """One line for each segment with samples that could not be read. The file lacks these samples."""


def export(
  directory: str | os.PathLike, file: str | os.PathLike, selection: Selection = Selection()
) -> Exported:
  """Writes samples to a new file, in the order in which they were issued.

  A run may write to the store at the same time; the export shows the store as it was at one moment.
  Memory use does not depend on the number of samples.

  Args:
    directory: directory of the store.
    file: file to create.
    selection: samples to export.

  Raises:
    UserError: the file exists or cannot be created, the index is damaged, or no sample of the store
      meets the conditions.
    RunError: the file could not be written.
  """
  path = pathlib.Path(file)
  with _new_file(path) as output, snapshot(directory) as (db, reader):
    exporter = _Exporter(db, reader)
    for line in exporter.lines(selection):
      output.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + '\n')
    if not (exporter.samples or exporter.without_bytes or exporter.lost):
      raise UserError(
        f'replay store {directory}: has no sample{selection.text}; jaxrl buffer without '
        '--export shows what it has'
      )
  return Exported(
    samples=exporter.samples,
    tokens=exporter.tokens,
    size=path.stat().st_size,
    without_bytes=dict(exporter.without_bytes),
    lost=tuple(lost.line(name) for name, lost in exporter.lost.items()),
  )


@contextlib.contextmanager
def _new_file(path: pathlib.Path) -> Iterator[TextIO]:
  """Opens a temporary file, which gets its final name if the block succeeds."""
  exists = UserError(f'{path}: exists, and an export overwrites no file; choose another name')
  if path.exists():
    raise exists
  temporary = path.with_name(f'{path.name}.tmp')
  try:
    output = temporary.open('x', encoding='utf-8')
  except FileExistsError as error:
    raise UserError(
      f'{temporary}: exists: another export is writing it, or was killed; remove the file if no '
      'export is running'
    ) from error
  except OSError as error:
    raise UserError(f'{path}: cannot be created: {error.strerror}') from error
  try:
    with output:
      yield output
      output.flush()
      os.fsync(output.fileno())
    link_or_copy(temporary, path)
    sync(path.parent)
  except FileExistsError:
    raise exists from None
  except OSError as error:
    raise RunError(f'{path}: cannot be written: {error.strerror}; nothing was exported') from error
  finally:
    temporary.unlink(missing_ok=True)


class _Row(NamedTuple):
  """A selected sample: its row in the index, and the location of its bytes."""

  seq: int
  uid: str
  attempt: int
  has_content: bool
  """Whether the store must contain the sample's content while its state is one of `_WITH_BYTES`.
  False for rows of static data.
  """
  state: str
  version: int | None
  step: int
  changed: int
  reason: str
  name: str | None
  """Name of the sealed segment with the sample; None if the sample is in no sealed segment."""
  row: int | None
  payload: bytes | None
  """Bytes of the sample if it is in the open segment (a table of the index), else None."""


_ROWS = (
  f"SELECT s.seq, s.uid, s.attempt, s.partition = 'usual' OR {IS_ADDED}, s.state, s.version, "
  's.step, s.changed, t.reason, '
  'g.name, g.row, o.payload FROM samples s JOIN transitions t ON t.seq = s.last '
  'LEFT JOIN segment_rows g ON g.uid = s.uid AND g.attempt = s.attempt '
  'LEFT JOIN open_segment o ON o.uid = s.uid AND o.attempt = s.attempt'
)


class _Lost:
  """Samples of one segment that could not be read."""

  def __init__(self):
    self._uids: list[str] = []
    self._count, self._first = 0, ''

  def add(self, uid: str, reason: str) -> None:
    self._count += 1
    self._first = self._first or reason
    self._uids = [*self._uids, uid][:_NAMED_AT_MOST]

  def line(self, name: str) -> str:
    more = ', …' if self._count > len(self._uids) else ''
    return f'{name}: {self._count} samples lost: {", ".join(self._uids)}{more}: {self._first}'


class _Exporter:
  """Reads the selected samples, and counts them."""

  def __init__(self, db: sqlite3.Connection, reader: SegmentReader):
    self._db, self._reader = db, reader
    self.samples = self.tokens = 0
    self.without_bytes: collections.Counter[str] = collections.Counter()
    self.lost: collections.defaultdict[str, _Lost] = collections.defaultdict(_Lost)

  def lines(self, selection: Selection) -> Iterator[Json]:
    cursor = self._db.execute(*_query(selection))
    while rows := [_Row(*row) for row in cursor.fetchmany(_AT_ONCE)]:
      read = self._read(rows)
      seqs = [*read]
      used, scores, derived = self._used(seqs), self._scores(seqs), self._derived(seqs)
      for row in rows:
        if (sample := read.get(row.seq)) is None:
          continue
        self.samples += 1
        self.tokens += len(sample.tokens)
        yield _line(row, sample, used[row.seq], scores[row.seq], derived[row.seq])

  def _read(self, rows: Sequence[_Row]) -> dict[int, Sample]:
    """Reads the samples whose bytes are in the store, keyed by the sample's number `seq`. Counts
    the samples that have no bytes, and those that cannot be read.
    """
    sealed: dict[int, Ref] = {row.seq: (row.name, row.row) for row in rows if row.name is not None}
    found: dict[int, Sample | SegmentError] = dict(
      zip(sealed, self._reader.read_each([*sealed.values()]))
    )
    samples = {}
    for row in rows:
      if row.payload is not None:
        found[row.seq] = _decoded(row)
      name, sample = row.name or _OPEN, found.get(row.seq)
      if sample is None:
        if row.has_content and row.state in _WITH_BYTES:
          self.lost['no segment'].add(row.uid, f'{row.state}, but in no segment; run --audit')
        else:
          self.without_bytes[row.state] += 1
      elif isinstance(sample, SegmentError):
        self.lost[name].add(row.uid, str(sample))
      elif sample.uid != row.uid:
        self.lost[name].add(row.uid, f'its row contains {sample.uid}; run --audit')
      else:
        samples[row.seq] = sample
    return samples

  def _of(self, table: str, columns: str, seqs: Sequence[int]) -> Iterator[tuple[int, list[Any]]]:
    """Yields (seq of the sample, values of the columns) for the rows of a table that belong to the
    samples, oldest row first.
    """
    # Table and columns are constants of this module; SQL has no parameters for them.
    for seq, *values in self._db.execute(
      f'SELECT s.seq, {columns} FROM samples s JOIN {table} t USING (uid, attempt) '
      f'WHERE s.seq IN ({NAMED}) ORDER BY t.seq',
      (json.dumps(list(seqs)),),
    ):
      yield seq, values

  def _used(self, seqs: Sequence[int]) -> dict[int, list[int]]:
    used = {seq: [] for seq in seqs}
    for seq, (step, state) in self._of('transitions', 't.step, t.state', seqs):
      if state == State.TRAINED:
        used[seq].append(step)
    return used

  def _scores(self, seqs: Sequence[int]) -> dict[int, dict[str, Json]]:
    """Returns the newest score of each scorer, keyed by `seq` and scorer."""
    scores: dict[int, dict[str, Json]] = {seq: {} for seq in seqs}
    for seq, (scorer, value, status, text) in self._of(
      'scores', 't.scorer, t.value, t.status, t.json', seqs
    ):
      scores[seq].pop(scorer, None)
      scores[seq][scorer] = {'value': value, 'status': status, **_parsed(text)}
    return scores

  def _derived(self, seqs: Sequence[int]) -> dict[int, dict[str, Json]]:
    """Returns the newest value that each operator, such as a processor, has derived from a sample,
    keyed by the sample's `seq` and the operator's name.
    """
    derived: dict[int, dict[str, Json]] = {seq: {} for seq in seqs}
    for seq, (operator, text) in self._of('derived', 't.operator, t.json', seqs):
      derived[seq][operator] = _parsed(text)
    return derived


def _query(selection: Selection) -> tuple[str, list[Any]]:
  """Returns the SQL query of the selected samples, and its parameters."""
  conditions, values = ['1'], []
  if selection.stage is not None:
    # The condition selects uids that start with 'STAGE/', because '0' follows '/' in ASCII.
    conditions.append('s.uid >= ? AND s.uid < ?')
    values += [f'{selection.stage}/', f'{selection.stage}0']
  if selection.state is not None:
    conditions.append('s.state = ?')
    values.append(selection.state)
  if selection.task is not None:
    conditions.append('s.task_id = ?')
    values.append(selection.task)
  if selection.steps is not None:
    conditions.append(
      'EXISTS (SELECT 1 FROM transitions e WHERE e.uid = s.uid AND e.attempt = s.attempt AND '
      'e.state = s.state AND e.step BETWEEN ? AND ?)'
    )
    values += selection.steps
  return f'{_ROWS} WHERE {" AND ".join(conditions)} ORDER BY s.seq', values


def _decoded(row: _Row) -> Sample | SegmentError:
  try:
    return decode_row(row.payload, f'{_OPEN}, {row.uid}')
  except SegmentError as error:
    return error


def _parsed(text: str) -> Any:
  """Parses JSON of the index. NaN and infinity, which are not JSON, become null."""
  return json.loads(text, parse_constant=lambda _: None)


def _shortest(values: Float32[np.ndarray, 'time']) -> list[float]:
  """Converts float32 values to floats that JSON writes with the fewest digits from which the values
  can be restored bit for bit: 0.1 instead of 0.10000000149011612.
  """
  return values.astype(str).astype(float).tolist()


def _line(
  row: _Row,
  sample: Sample,
  used: list[int],
  scores: dict[str, Json],
  derived: dict[str, Json],
) -> Json:
  return {
    'uid': row.uid,
    'attempt': row.attempt,
    'stage': row.uid.partition('/')[0],
    'group_id': sample.group_id,
    'task_id': sample.task_id,
    'taskset': sample.taskset,
    'domain': sample.domain,
    'visit': sample.visit,
    'sample_index': sample.sample_index,
    'trajectory_id': sample.trajectory_id,
    'step_index': sample.step_index,
    'state': row.state,
    'reason': row.reason,
    'issued': row.step,
    'changed': row.changed,
    'trained': used,
    'version': row.version,
    'temperature': sample.temperature,
    'finish_reason': str(sample.finish_reason),
    'prompt_len': sample.prompt_len,
    'tokens': sample.tokens.tolist(),
    'role': sample.role.tolist(),
    'loss_mask': sample.loss_mask.astype(int).tolist(),
    'logprobs': _shortest(sample.behaviour_logprobs),
    'spans': [
      {
        'start': span.start,
        'end': span.end,
        'attempt': span.version.attempt,
        'version': span.version.step,
        'engine': span.engine,
        'finish': span.finish,
      }
      for span in sample.segments
    ],
    'scores': scores,
    'derived': derived,
    'media': list(sample.media),
  }
