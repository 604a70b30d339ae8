"""Recomputes the accounted guarantee from the files alone: every sample issued is accounted for exactly once.

Invariant: nothing is believed because the writer said so. States are replayed from the transitions, counts are summed
again, and every byte that is referenced is read and decoded.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import os
import sqlite3
from collections.abc import Iterator

from jaxrl_llm.replay.browse import snapshot
from jaxrl_llm.replay.index import ReplayStore
from jaxrl_llm.replay.segments import SegmentError, SegmentReader, decode_row
from jaxrl_llm.replay.tables import BEFORE, LIVE, State

_ROWS_AT_ONCE = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditReport:
  """What was found."""

  ok: bool
  issued: int
  """Samples issued, over all attempts."""
  states: dict[str, int]
  """Samples per state; they add up to `issued`."""
  reasons: dict[str, int]
  """Samples per 'state(reason)' of the terminal states that have one."""
  duplicates: int
  """Results that arrived after another had been accepted, or after the sample had ended."""
  live: tuple[str, ...]
  """uids that have not ended."""
  problems: tuple[str, ...]
  """One line each; empty when ok."""

  @property
  def lines(self) -> list[str]:
    """The report as text."""
    terminal = {state: count for state, count in self.states.items() if state not in LIVE}
    return [
      f'issued {self.issued} = '
      + ' + '.join(f'{state} {count}' for state, count in self.states.items())
      + f'; results that came twice or late: {self.duplicates}',
      f'ended {sum(terminal.values())}, live {len(self.live)}',
      *(f'{reason}: {count}' for reason, count in sorted(self.reasons.items())),
      *(f'PROBLEM {problem}' for problem in self.problems),
      'audit ok' if self.ok else f'audit FAILED: {len(self.problems)} problems',
    ]


def audit(store: ReplayStore | str | os.PathLike) -> AuditReport:
  """Audits a store, or the directory of one (also while a run writes to it: it reads one snapshot)."""
  directory = store.directory if isinstance(store, ReplayStore) else store
  with snapshot(directory) as (db, reader):
    return _audit(db, reader)


def _audit(db: sqlite3.Connection, reader: SegmentReader) -> AuditReport:
  ends: dict[tuple[str, int], tuple[State, str]] = {}
  problems = [
    *_check_transitions(db, ends),
    *_check_uses(db),
    *_check_locations(db),
    *_check_sealed(db, reader),
    *_check_open(db),
  ]
  (issued,) = db.execute('SELECT count(*) FROM samples').fetchone()
  states = collections.Counter(state for state, _ in ends.values())
  if sum(states.values()) != issued:
    problems.append(f'{issued} samples were issued, but the states add up to {sum(states.values())}')
  (duplicates,) = db.execute('SELECT count(*) FROM duplicates').fetchone()
  return AuditReport(
    ok=not problems,
    issued=issued,
    states={str(state): states[state] for state in State},
    reasons=dict(collections.Counter(f'{state}({reason})' for state, reason in ends.values() if reason)),
    duplicates=duplicates,
    live=tuple(sorted(uid for (uid, _), (state, _) in ends.items() if state in LIVE)),
    problems=tuple(problems),
  )


def _check_transitions(db: sqlite3.Connection, ends: dict[tuple[str, int], tuple[State, str]]) -> Iterator[str]:
  """Replays each sample's transitions; fills `ends` with each issued sample's last state and reason."""
  index = {(uid, attempt): (step, state) for uid, attempt, step, state in db.execute(
    'SELECT uid, attempt, step, state FROM samples'
  )}  # fmt: skip
  log = db.execute('SELECT uid, attempt, step, state, reason FROM transitions ORDER BY uid, attempt, seq')
  seen = set()
  for key, group in itertools.groupby(log, key=lambda row: (row[0], row[1])):
    seen.add(key)
    changes = [(step, State(state), reason) for _, _, step, state, reason in group]
    name = f'{key[0]} (attempt {key[1]})'
    if key not in index:
      yield f'{name}: has transitions and was never issued'
      continue
    if changes[0][:2] != (index[key][0], State.ISSUED):
      yield f'{name}: its first transition is {changes[0][1]} at step {changes[0][0]}, issued at {index[key][0]}'
    for (before_step, before, _), (step, state, _) in itertools.pairwise(changes):
      if before not in BEFORE.get(state, ()):
        yield f'{name}: went from {before} to {state}'
      if step < before_step and state != State.VOID:  # void is stamped with the commit gone back to
        yield f'{name}: {state} at step {step}, after {before} at step {before_step}'
    ends[key] = (changes[-1][1], changes[-1][2])
    if index[key][1] != changes[-1][1]:
      yield f'{name}: the index says {index[key][1]}, its last transition {changes[-1][1]}'
  for uid, attempt in sorted(index.keys() - seen):
    yield f'{uid} (attempt {attempt}): was issued and has no transition'


def _check_uses(db: sqlite3.Connection) -> Iterator[str]:
  """A uid's uses and its attempts, over the whole history: the uid is the same in every attempt."""
  max_uses = json.loads(db.execute("SELECT json FROM meta WHERE key = 'max_uses'").fetchone()[0])
  for uid, uses in db.execute(
    "SELECT uid, count(*) FROM transitions WHERE state = 'trained' GROUP BY uid HAVING count(*) > ?", (max_uses,)
  ):
    yield f'{uid}: trained {uses} times, max_uses is {max_uses}'
  for uid, step in db.execute(
    "SELECT uid, step FROM transitions WHERE state = 'trained' GROUP BY uid, step HAVING count(*) > 1"
  ):
    yield f'{uid}: trained twice in the batch of step {step}'
  for uid, attempt in db.execute(
    "SELECT uid, attempt FROM transitions WHERE state = 'stored' GROUP BY uid, attempt HAVING count(*) > 1"
  ):
    yield f'{uid} (attempt {attempt}): accepted more than once'
  for uid, count in db.execute(
    "SELECT uid, count(*) FROM samples WHERE state != 'void' GROUP BY uid HAVING count(*) > 1"
  ):
    yield f'{uid}: counts in {count} attempts'


def _check_locations(db: sqlite3.Connection) -> Iterator[str]:
  """Accepted samples have their bytes in one place, trained ones in a segment, issued and void ones nowhere."""
  for uid, attempt, state, opened, sealed in db.execute(
    'SELECT s.uid, s.attempt, s.state, o.uid IS NOT NULL, r.uid IS NOT NULL FROM samples s '
    'LEFT JOIN open_segment o USING (uid, attempt) '
    'LEFT JOIN segment_rows r ON r.uid = s.uid AND r.attempt = s.attempt'
  ):
    fine = {
      State.ISSUED: opened + sealed == 0,
      State.VOID: opened + sealed == 0,
      State.STORED: opened + sealed == 1,
      State.ADMITTED: opened + sealed == 1,
      State.TRAINED: (opened, sealed) == (0, 1),
    }.get(state, opened + sealed <= 1)
    if not fine:
      yield f'{uid} (attempt {attempt}): is {state}, bytes in the open segment {opened}, in a sealed one {sealed}'
  for table in ('open_segment', 'segment_rows', 'scores', 'derived', 'duplicates'):
    for uid, attempt in db.execute(
      f'SELECT uid, attempt FROM {table} EXCEPT SELECT uid, attempt FROM samples'  # each is a fixed name
    ):
      yield f'{uid} (attempt {attempt}): in {table} and was never issued'


def _check_sealed(db: sqlite3.Connection, reader: SegmentReader) -> Iterator[str]:
  """Every row that the index names is in its file and is the sample it should be."""
  for name, rows in db.execute(
    'SELECT g.name, g.rows FROM segments g WHERE rows != (SELECT count(*) FROM segment_rows r WHERE r.name = g.name)'
  ):
    yield f'segment {name}: the index names other rows than the {rows} sealed'
  for (name,) in db.execute('SELECT name FROM segment_rows EXCEPT SELECT name FROM segments'):
    yield f'segment {name}: has rows in the index and is not in it'
  cursor = db.execute('SELECT name, row, uid FROM segment_rows ORDER BY name, row')
  while rows := cursor.fetchmany(_ROWS_AT_ONCE):
    yield from _check_rows(reader, rows)


def _check_rows(reader: SegmentReader, rows: list[tuple[str, int, str]]) -> Iterator[str]:
  try:
    samples = reader.read([(name, row) for name, row, _ in rows])
  except SegmentError as error:
    if len(rows) == 1:
      yield str(error)
    else:  # one bad row spoils the read of all: halve until it stands alone
      yield from _check_rows(reader, rows[: len(rows) // 2])
      yield from _check_rows(reader, rows[len(rows) // 2 :])
    return
  for (name, row, uid), sample in zip(rows, samples):
    if sample.uid != uid:
      yield f'segment {name}: row {row} is {sample.uid}, the index says {uid}'


def _check_open(db: sqlite3.Connection) -> Iterator[str]:
  for uid, payload in db.execute('SELECT uid, payload FROM open_segment'):
    try:
      found = decode_row(payload, f'open segment, {uid}').uid
    except SegmentError as error:
      yield str(error)
    else:
      if found != uid:
        yield f'open segment: the row of {uid} is {found}'
