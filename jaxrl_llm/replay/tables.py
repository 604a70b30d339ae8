"""What the index records: the states of a sample, which may follow which, and the tables."""

from __future__ import annotations

import dataclasses
import enum
import json
import pathlib
import sqlite3
from typing import NamedTuple

from jaxrl_llm.core.errors import UserError

SCHEMA = 1
INDEX = 'index.sqlite'
SEGMENTS = 'segments'


class State(enum.StrEnum):
  ISSUED = 'issued'
  """Asked for; no bytes yet."""
  STORED = 'stored'
  """Generated: its bytes are durable."""
  ADMITTED = 'admitted'
  """Scored and processed: can be drawn for training."""
  TRAINED = 'trained'
  DROPPED = 'dropped'
  EXPIRED = 'expired'
  VOID = 'void'
  """Lost with the process that worked on it."""


LIVE = (State.ISSUED, State.STORED, State.ADMITTED)
BEFORE = {
  State.STORED: (State.ISSUED,),
  State.ADMITTED: (State.STORED,),
  State.TRAINED: (State.ADMITTED, State.TRAINED),
  State.DROPPED: LIVE,
  State.EXPIRED: LIVE,
  State.VOID: (State.ISSUED,),
}
"""The states from which each state can be entered. Trained more than once only up to `max_uses`."""

TABLES = """
CREATE TABLE meta(key TEXT PRIMARY KEY, json TEXT NOT NULL);
CREATE TABLE attempts(attempt INTEGER PRIMARY KEY, commit_step INTEGER, counts TEXT);
CREATE TABLE samples(uid TEXT, attempt INTEGER, group_id TEXT NOT NULL, task_id TEXT NOT NULL, visit INTEGER NOT NULL,
  step INTEGER NOT NULL, state TEXT NOT NULL, changed INTEGER NOT NULL, PRIMARY KEY(uid, attempt)) WITHOUT ROWID;
CREATE INDEX live ON samples(state) WHERE state IN ('issued', 'stored', 'admitted');
CREATE TABLE transitions(seq INTEGER PRIMARY KEY, step INTEGER NOT NULL, attempt INTEGER NOT NULL, uid TEXT NOT NULL,
  state TEXT NOT NULL, reason TEXT NOT NULL);
CREATE INDEX transitions_of ON transitions(uid, attempt);
CREATE TABLE scores(seq INTEGER PRIMARY KEY, step INTEGER NOT NULL, attempt INTEGER NOT NULL, uid TEXT NOT NULL,
  scorer TEXT NOT NULL, value REAL, status TEXT NOT NULL, json TEXT NOT NULL);
CREATE INDEX scores_of ON scores(uid);
CREATE TABLE derived(seq INTEGER PRIMARY KEY, step INTEGER NOT NULL, attempt INTEGER NOT NULL, uid TEXT NOT NULL,
  operator TEXT NOT NULL, json TEXT NOT NULL);
CREATE INDEX derived_of ON derived(uid);
CREATE TABLE open_segment(seq INTEGER PRIMARY KEY, step INTEGER NOT NULL, attempt INTEGER NOT NULL, uid TEXT NOT NULL,
  payload BLOB NOT NULL);
CREATE UNIQUE INDEX open_segment_of ON open_segment(uid, attempt);
CREATE TABLE segments(name TEXT PRIMARY KEY, step INTEGER NOT NULL, attempt INTEGER NOT NULL, rows INTEGER NOT NULL);
CREATE TABLE segment_rows(name TEXT, row INTEGER, uid TEXT NOT NULL, attempt INTEGER NOT NULL, PRIMARY KEY(name, row));
CREATE UNIQUE INDEX segment_rows_of ON segment_rows(uid, attempt);
CREATE TABLE plans(step INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, json TEXT NOT NULL);
CREATE TABLE duplicates(seq INTEGER PRIMARY KEY, step INTEGER NOT NULL, attempt INTEGER NOT NULL, uid TEXT NOT NULL,
  state TEXT NOT NULL);
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Issue:
  """A sample that is about to be asked for. Its task's identity is repeated by the Sample that answers it."""

  uid: str
  group_id: str
  task_id: str
  visit: int


class Entry(NamedTuple):
  """What the index says of one sample: its newest attempt's row. A tuple, as one is made per sample and change."""

  uid: str
  attempt: int
  group_id: str
  task_id: str
  visit: int
  step: int
  """Completed batches when it was issued."""
  state: State
  changed: int
  """Stamp of its last transition."""


_STATES = {str(state): state for state in State}
ENTRY = 'SELECT uid, attempt, group_id, task_id, visit, step, state, changed FROM samples'


def entry_of(row: tuple) -> Entry:
  *issued, state, changed = row
  return Entry(*issued, _STATES[state], changed)


def prepare(db: sqlite3.Connection, path: pathlib.Path, attempt: int | None, max_uses: int) -> int:
  """Makes the tables if need be and takes the attempt's number, in one transaction."""
  db.execute('BEGIN IMMEDIATE')
  if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
    for statement in filter(str.strip, TABLES.split(';')):
      db.execute(statement)
    db.executemany('INSERT INTO meta VALUES (?,?)', [('schema', str(SCHEMA)), ('max_uses', str(max_uses))])
  for key, wanted in (('schema', SCHEMA), ('max_uses', max_uses)):
    (text,) = db.execute('SELECT json FROM meta WHERE key = ?', (key,)).fetchone()
    if json.loads(text) != wanted:
      raise UserError(f'replay store {path}: it has {key} {text}, wanted {wanted}; use another --workdir')
  (last,) = db.execute('SELECT coalesce(max(attempt), 0) FROM attempts').fetchone()
  attempt = last + 1 if attempt is None else attempt
  if attempt <= last:
    raise UserError(f'replay store {path}: attempt {attempt} was given, but {last} has already run; wanted {last + 1}')
  db.execute('INSERT INTO attempts(attempt) VALUES (?)', (attempt,))
  db.execute('COMMIT')
  return attempt
