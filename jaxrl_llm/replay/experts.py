"""Expert rows that are added to a run, possibly while it is active: answers to imitate, from files,
from other runs or from people who correct the run's own answers.

Rows arrive in an SQLite file in the directory of the store. Any number of processes add rows to
this file (`add`), and the run only reads it. At the beginning of a batch, the run takes the rows
that have arrived (`take`): it copies them to its store, as samples of the partition `expert`.

Invariants:
- A row is on disk before `add` returns, and is never changed or deleted. Adding the same tokens
  again does not add another row.
- The run takes rows in the order of their arrival. The step at which the run took each row is
  recorded in the store, and recovery does not undo this record. So a run that repeats a batch after
  a crash takes the same rows for this batch, even if more rows have arrived meanwhile.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import logging

from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.records.sample import Role, Sample, decode, encode
from jaxrl_llm.core.records.score import Score
from jaxrl_llm.core.types import Json
from jaxrl_llm.replay.inbox import check_who
from jaxrl_llm.replay.inbox_file import copy_inbox, open_inbox
from jaxrl_llm.replay.index import ReplayStore
from jaxrl_llm.replay.tables import ADDED, BETWEEN_ADDED, EXPERT, State

ARRIVALS = 'experts.sqlite'
MAX_SCORE = 1e6
"""Maximum magnitude of a score."""
MAX_ORIGIN = 4096
"""Maximum number of characters of a row's origin as JSON."""
_SCHEMA = 1
_TABLES = (
  'CREATE TABLE IF NOT EXISTS rows(seq INTEGER PRIMARY KEY, digest TEXT NOT NULL, who TEXT NOT '
  'NULL, at REAL NOT NULL, origin TEXT NOT NULL, scores TEXT NOT NULL, payload BLOB NOT NULL)',
  'CREATE UNIQUE INDEX IF NOT EXISTS rows_of ON rows(digest)',
)
_RECORD = 'experts'
"""Key of `ReplayStore.meta` under which the store records the rows that the run has taken."""
_AT_ONCE = 256
"""Number of rows that are taken in one transaction."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertRow:
  """An answer to imitate, with its origin, for adding it to a run. The constructor raises UserError
  if a field is invalid.
  """

  sample: Sample
  """Tokens of prompt and answer. The loss covers the tokens of role `POLICY`."""
  who: str
  """Name of the person or program that adds the row."""
  origin: Mapping[str, Json]
  """Origin of the row, such as file and line."""
  scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
  """Values that scorers gave to the answer, keyed by scorer."""

  def __post_init__(self):
    check_who('expert row', self.who)
    for scorer, value in self.scores.items():
      if not scorer or not scorer.isprintable() or len(scorer) > 200:
        raise UserError(f'scorer {one_line(repr(scorer), 60)}: wanted a short printable name')
      if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f'{scorer}: {one_line(repr(value), 60)}, wanted a number')
      if not abs(value) <= MAX_SCORE:  # This comparison also rejects NaN.
        raise UserError(f'{scorer}: {value}, wanted a number from -{MAX_SCORE:g} to {MAX_SCORE:g}')
    if len(text := json.dumps(dict(self.origin))) > MAX_ORIGIN:
      raise UserError(f'origin: {len(text)} characters as JSON, wanted at most {MAX_ORIGIN}')
    if not (self.sample.role == Role.POLICY).any():
      raise UserError('the answer has no tokens')


class Added(NamedTuple):
  """Result of adding a row."""

  uid: str
  before: str | None
  """Name of the person or program that added the same row earlier; None if the row is new."""


def digest(sample: Sample) -> str:
  """Returns the digest of a row: blake2b of its tokens and their roles, in 32 hex digits."""
  content = hashlib.blake2b(digest_size=16)
  content.update(sample.tokens.astype('<i4').tobytes())
  content.update(sample.role.tobytes())
  return content.hexdigest()


def as_expert(sample: Sample) -> Sample:
  """Returns a sample as an expert row: named by its digest, trained on where its role is `POLICY`,
  and marked as not sampled.
  """
  uid = f'{ADDED}{digest(sample)}'
  mask = sample.role == Role.POLICY
  return dataclasses.replace(
    sample,
    uid=uid,
    group_id=uid,
    trajectory_id=uid,
    visit=0,
    sample_index=0,
    step_index=0,
    loss_mask=mask,
    sampled=np.zeros_like(mask),
    behaviour_logprobs=np.zeros(len(mask), np.float32),
    segments=(),
    temperature=1.0,
    preference=None,
  )


def add(directory: str | os.PathLike, rows: Sequence[ExpertRow]) -> list[Added]:
  """Adds rows to a run. When the function returns, the rows are on disk. The run need not be
  active.

  Args:
    directory: directory of the store, `<workdir>/replay`.

  Raises:
    UserError: the file of added rows (experts.sqlite) is damaged or has another schema.
    RunError: this file cannot be read or written.
  """
  now, results = time.time(), []
  with _arrivals(directory) as db:
    db.execute('BEGIN IMMEDIATE')
    for row in rows:
      sample = as_expert(row.sample)
      name = sample.uid.removeprefix(ADDED)
      before = db.execute('SELECT who FROM rows WHERE digest = ?', (name,)).fetchone()
      results.append(Added(sample.uid, before and before[0]))
      if before is None:
        db.execute(
          'INSERT INTO rows(digest, who, at, origin, scores, payload) VALUES (?,?,?,?,?,?)',
          (
            name,
            row.who,
            now,
            json.dumps(dict(row.origin)),
            json.dumps(dict(row.scores), allow_nan=False),
            encode(sample),
          ),
        )
    db.execute('COMMIT')
  return results


class Arrival(NamedTuple):
  """An expert row in the file of added rows."""

  seq: int
  """Number of the row in the order of arrival, from 1."""
  digest: str
  who: str
  at: float
  """Unix time at which the row arrived."""
  origin: Mapping[str, Json]
  scores: Mapping[str, float]
  payload: bytes
  """Sample of the row, encoded by `core.records.sample.encode`."""

  @property
  def uid(self) -> str:
    return f'{ADDED}{self.digest}'

  def lineage(self, sample: Sample) -> Json:
    """Returns the record of the row's origin that the store keeps."""
    return {
      'arrival': self.seq,
      'digest': self.digest,
      'who': self.who,
      'at': self.at,
      'origin': dict(self.origin),
      'length': len(sample.tokens),
    }


def arrived(
  directory: str | os.PathLike, *, after: int, until: int | None = None, limit: int = -1
) -> list[Arrival]:
  """Returns the rows whose numbers are above `after`, in the order of arrival.

  Args:
    until: number of the last row to return; None for no limit.
    limit: maximum number of rows; -1 for all.
  """
  if not (pathlib.Path(directory) / ARRIVALS).exists():
    return []
  with _arrivals(directory) as db:
    rows = db.execute(
      'SELECT seq, digest, who, at, origin, scores, payload FROM rows WHERE seq > ? AND seq <= ? '
      'ORDER BY seq LIMIT ?',
      (after, (1 << 62) if until is None else until, limit),
    ).fetchall()
  return [Arrival(*row[:4], json.loads(row[4]), json.loads(row[5]), row[6]) for row in rows]


def _newest(directory: str | os.PathLike) -> int:
  """Returns the number of the row that arrived last; 0 if there is none."""
  if not (pathlib.Path(directory) / ARRIVALS).exists():
    return 0
  with _arrivals(directory) as db:
    return db.execute('SELECT coalesce(max(seq), 0) FROM rows').fetchone()[0]


class Record:
  """Record of the rows that a run has taken: for each step at which it took rows, the number of the
  last row.
  """

  def __init__(self, store: ReplayStore):
    self._store = store
    saved = store.meta(_RECORD) or {'step': -1, 'taken': [], 'refused': {}}
    self.step: int = saved['step']
    """Last step for which the arrivals are recorded."""
    self.taken: list[tuple[int, int]] = [(step, until) for step, until in saved['taken']]
    """(step, number of the last row taken at this step) pairs, in ascending order."""
    self.refused: dict[str, str] = saved['refused']
    """Reason for each row that the run does not train on, keyed by uid."""

  def until(self, step: int) -> int:
    """Returns the number of the last row taken at this step or before; 0 if there is none."""
    at = bisect.bisect_right(self.taken, (step, 1 << 62))
    return self.taken[at - 1][1] if at else 0

  def save(self) -> None:
    self._store.set_meta(_RECORD, {'step': self.step, 'taken': self.taken, 'refused': self.refused})


def take(store: ReplayStore, step: int, check: Callable[[Sample], None]) -> int:
  """Copies to the store the rows that arrived before the batch of this step and were not taken at
  an earlier step, in the order of their arrival. Returns the number of rows that were copied.

  If the run repeats the step after a crash, the function copies the same rows as before the crash.

  Args:
    check: raises ValueError for a row that the run cannot train on. The row is then left out, with
      a warning.
  """
  record = Record(store)
  cursor = record.until(step - 1)
  if step > record.step:
    newest = max(_newest(store.directory), record.until(step))
    if newest > record.until(step):
      record.taken.append((step, newest))
    record.step = step
    record.save()
  until, count = record.until(step), 0
  while cursor < until:
    if not (rows := arrived(store.directory, after=cursor, until=until, limit=_AT_ONCE)):
      break
    count += _accept(store, step, rows, check, record)
    cursor = rows[-1].seq
  return count


def _accept(
  store: ReplayStore,
  step: int,
  rows: Sequence[Arrival],
  check: Callable[[Sample], None],
  record: Record,
) -> int:
  samples: dict[str, Sample] = {}
  for row in rows:
    try:
      samples[row.uid] = _checked(row, check)
    except ValueError as error:
      logging.warning('expert row %s of %s: left out: %s', row.uid, row.who, one_line(error))
      record.refused[row.uid] = one_line(error)
  by_uid = {row.uid: row for row in rows if row.uid in samples}
  with store.transaction():
    writer = store.at(step)
    writer.accept_experts(samples, {uid: row.lineage(samples[uid]) for uid, row in by_uid.items()})
    writer.score(
      [
        Score(uid=uid, scorer=scorer, value=value, evidence={'who': row.who}, time=0.0)
        for uid, row in by_uid.items()
        for scorer, value in row.scores.items()
      ]
    )
    if len(samples) < len(rows):
      record.save()
  return len(samples)


def _checked(row: Arrival, check: Callable[[Sample], None]) -> Sample:
  """Decodes a row. Raises ValueError if the row is damaged, or if `check` raises ValueError."""
  try:
    sample = decode(row.payload)
    intact = sample.uid == row.uid and digest(sample) == row.digest
  except Exception as error:  # Decoding damaged bytes may raise any exception.
    raise ValueError(f'damaged: {type(error).__name__}') from error
  if not intact:
    raise ValueError('damaged: its digest does not match')
  if not all(math.isfinite(value) for value in row.scores.values()):
    raise ValueError('a score is not finite')
  check(sample)
  return sample


class Accounts(NamedTuple):
  """Numbers of added rows, by status."""

  added: int
  trained: int
  waiting: int
  """Number of rows in the store that no batch has trained on yet."""
  arriving: int
  """Number of rows that the run has not taken yet."""
  refused: int
  """Number of rows that the run cannot train on."""
  uses: dict[int, int]
  """Number of trained rows, keyed by the number of batches that trained on them."""
  problems: list[str]

  @property
  def line(self) -> str:
    if not self.added and not self.problems:
      return ''
    uses = ', '.join(f'{n} times {self.uses[n]}' for n in sorted(self.uses))
    return (
      f'expert rows {self.added} = trained {self.trained} + waiting {self.waiting} + arriving '
      f'{self.arriving} + refused {self.refused}' + (f'; trained: {uses}' if uses else '')
    )


def account(index: sqlite3.Connection, directory: str | os.PathLike) -> Accounts:
  """Counts the rows that were added to a run, and compares the rows in the store with the rows that
  arrived.

  Args:
    index: snapshot of the store's index.
    directory: directory of the store.
  """
  stored = {
    uid: (state, uses, json.loads(text)['digest'])
    for uid, state, uses, text in index.execute(
      'SELECT s.uid, s.state, s.uses, d.json FROM samples s JOIN derived d USING (uid, attempt) '
      f"WHERE s.uid {BETWEEN_ADDED} AND d.operator = '{EXPERT}'"
    )
  }
  saved = index.execute('SELECT json FROM meta WHERE key = ?', (_RECORD,)).fetchone()
  refused = json.loads(saved[0])['refused'] if saved is not None else {}
  counts: collections.Counter[str] = collections.Counter()
  uses: collections.Counter[int] = collections.Counter()
  problems, known = [], set()
  for uid, damaged in _inspected(directory):
    known.add(uid)
    if uid in refused:
      counts['refused'] += 1
      continue
    if damaged:
      problems.append(f'{uid}: the row that arrived is damaged')
    if uid not in stored:
      counts['arriving'] += 1
    elif stored[uid][0] == State.TRAINED:
      counts['trained'] += 1
      uses[stored[uid][1]] += 1
    else:
      counts['waiting'] += 1
  problems += [
    f'{uid}: is an expert row but is not in {ARRIVALS}' for uid in stored if uid not in known
  ]
  kinds = ('trained', 'waiting', 'arriving', 'refused')
  return Accounts(counts.total(), *(counts[kind] for kind in kinds), dict(uses), problems)


def _inspected(directory: str | os.PathLike) -> Iterator[tuple[str, bool]]:
  """Yields (uid, whether the row is damaged) for each row that has arrived, in the order of
  arrival.
  """
  after = 0
  while rows := arrived(directory, after=after, limit=_AT_ONCE):
    for row in rows:
      try:
        _checked(row, lambda sample: None)
        yield row.uid, False
      except ValueError:
        yield row.uid, True
    after = rows[-1].seq


def copy(source: str | os.PathLike, target: str | os.PathLike) -> None:
  """Copies the added rows of one store to another store that has no added rows yet."""
  if (pathlib.Path(source) / ARRIVALS).exists():
    with _arrivals(source) as db:
      copy_inbox(db, pathlib.Path(target) / ARRIVALS)


def _arrivals(
  directory: str | os.PathLike,
) -> contextlib.AbstractContextManager[sqlite3.Connection]:
  """Opens the file of added rows, creating it if necessary."""
  path = pathlib.Path(directory) / ARRIVALS
  return open_inbox(path, tables=_TABLES, schema=_SCHEMA, content='expert row')
