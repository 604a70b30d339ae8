"""Schema of the store's index: the states of samples, the permitted transitions, and the tables."""

from __future__ import annotations

import dataclasses
import enum
import json
import pathlib
import secrets
import sqlite3
from collections.abc import Sequence
from typing import Literal, NamedTuple

from jaxrl_llm.core.errors import UserError

SCHEMA = 5
_BEFORE_PARTIALS, _BEFORE_AWAITING = 3, 4
"""Numbers of two earlier schemas that this program can still open. The first lacks the table
`partials`. The second has all tables, but no sample in the state `awaiting`.
"""
INDEX = 'index.sqlite'
SEGMENTS = 'segments'
QUARANTINE = 'quarantine'


class State(enum.StrEnum):
  ISSUED = 'issued'
  """The sample is about to be requested from an engine or has been requested. It has no content
  yet.
  """
  PARTIAL = 'partial'
  """The sample's group is unfinished: the spans generated so far are stored durably, and a later
  batch continues the group. The sample itself may be finished.
  """
  STORED = 'stored'
  """The sample was generated, and its content is stored durably."""
  AWAITING = 'awaiting'
  """The sample was generated and stored, and its group waits for delayed rewards (`replay.inbox`)
  or, once they have arrived, for a batch.
  """
  ADMITTED = 'admitted'
  """The sample was scored and processed, and can be drawn for training."""
  TRAINED = 'trained'
  DROPPED = 'dropped'
  EXPIRED = 'expired'
  VOID = 'void'
  """The sample was lost in a crash, because the commit from which the run resumed does not contain
  its result.
  """


def as_state(text: str) -> State:
  """Returns the state with this name. Raises UserError if no state has the name."""
  if text not in list(State):
    raise UserError(f'state {text!r}: unknown; wanted one of {", ".join(State)}')
  return State(text)


LIVE = (State.ISSUED, State.PARTIAL, State.STORED, State.AWAITING, State.ADMITTED)
UNFINISHED = (State.ISSUED, State.PARTIAL)
BEFORE = {
  State.PARTIAL: UNFINISHED,
  State.STORED: UNFINISHED,
  State.AWAITING: (State.STORED,),
  State.ADMITTED: (State.STORED, State.AWAITING),
  State.TRAINED: (State.ADMITTED, State.TRAINED),
  State.DROPPED: LIVE,
  State.EXPIRED: LIVE,
  State.VOID: (State.ISSUED,),
}
"""States from which a sample of the policy can enter each state. A sample enters `trained` from
`trained` when another batch trains on it (at most `max_uses` times), and `partial` from `partial`
when another span of it is stored.
"""

Partition = Literal['usual', 'expert']
"""Kind of a sample. usual: sampled by the policy. expert: an answer to imitate. An expert sample is
either a row of static data that joined a batch or a row that was added to the run
(`replay.experts`). The store contains the bytes of added rows, but not of static data.

A third partition, taskset, has no samples: it is the table `tasks`, which lists the attempted
tasks.
"""
_EXPERT_BEFORE = {
  State.STORED: (State.ISSUED,),
  State.ADMITTED: (State.ISSUED, State.STORED),
  State.TRAINED: (State.ADMITTED, State.TRAINED),
  State.VOID: (State.ISSUED,),
}


def may_become(partition: Partition, before: State, after: State) -> bool:
  """Returns whether a sample of this partition may change from state `before` to `after`."""
  return before in (BEFORE if partition == 'usual' else _EXPERT_BEFORE).get(after, ())


# A blank line ends a statement. Rows of `samples` are in the order in which they were issued. The
# columns after `state` follow from the transitions; they are stored so that a draw need not read
# the transitions: `changed` and `last` are the step and seq of the last transition, `admitted` is
# the step of the transition to `admitted`, and `uses` is the number of transitions to `trained`.
# `tallies` has the number of samples per partition and state. Triggers update this table, because
# counting the samples would scan all of `samples`.
TABLES = """
CREATE TABLE meta(key TEXT PRIMARY KEY, json TEXT NOT NULL);

CREATE TABLE attempts(attempt INTEGER PRIMARY KEY, commit_step INTEGER, counts TEXT);

CREATE TABLE samples(seq INTEGER PRIMARY KEY, uid TEXT NOT NULL, attempt INTEGER NOT NULL,
  group_id TEXT NOT NULL, task_id TEXT NOT NULL, visit INTEGER NOT NULL, partition TEXT NOT NULL,
  version INTEGER, step INTEGER NOT NULL, state TEXT NOT NULL, changed INTEGER NOT NULL,
  last INTEGER NOT NULL, admitted INTEGER, uses INTEGER NOT NULL);

CREATE UNIQUE INDEX samples_of ON samples(uid, attempt);

CREATE INDEX samples_of_group ON samples(group_id);

CREATE INDEX samples_of_task ON samples(task_id);

CREATE INDEX samples_in ON samples(state, last);

CREATE INDEX samples_used ON samples(uses) WHERE state = 'trained';

CREATE TABLE tallies(partition TEXT, state TEXT, samples INTEGER NOT NULL,
  PRIMARY KEY(partition, state)) WITHOUT ROWID;

CREATE TRIGGER sample_came AFTER INSERT ON samples BEGIN
  INSERT INTO tallies VALUES (new.partition, new.state, 1)
    ON CONFLICT(partition, state) DO UPDATE SET samples = samples + 1;
END;

CREATE TRIGGER sample_moved AFTER UPDATE OF state ON samples WHEN old.state != new.state BEGIN
  UPDATE tallies SET samples = samples - 1 WHERE partition = old.partition AND state = old.state;
  INSERT INTO tallies VALUES (new.partition, new.state, 1)
    ON CONFLICT(partition, state) DO UPDATE SET samples = samples + 1;
END;

CREATE TABLE tasks(uid TEXT PRIMARY KEY, taskset TEXT NOT NULL, domain TEXT NOT NULL,
  step INTEGER NOT NULL, attempt INTEGER NOT NULL, json TEXT NOT NULL);

CREATE TABLE transitions(seq INTEGER PRIMARY KEY, step INTEGER NOT NULL, attempt INTEGER NOT NULL,
  uid TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL);

CREATE INDEX transitions_of ON transitions(uid, attempt);

CREATE INDEX transitions_at ON transitions(step);

CREATE TABLE scores(seq INTEGER PRIMARY KEY, step INTEGER NOT NULL, attempt INTEGER NOT NULL,
  uid TEXT NOT NULL, scorer TEXT NOT NULL, value REAL, status TEXT NOT NULL, json TEXT NOT NULL);

CREATE INDEX scores_of ON scores(uid, attempt, scorer);

CREATE INDEX scores_at ON scores(step);

CREATE TABLE derived(seq INTEGER PRIMARY KEY, step INTEGER NOT NULL, attempt INTEGER NOT NULL,
  uid TEXT NOT NULL, operator TEXT NOT NULL, json TEXT NOT NULL);

CREATE INDEX derived_of ON derived(uid, operator);

CREATE INDEX derived_at ON derived(step);

CREATE TABLE open_segment(seq INTEGER PRIMARY KEY, step INTEGER NOT NULL,
  attempt INTEGER NOT NULL, uid TEXT NOT NULL, payload BLOB NOT NULL);

CREATE UNIQUE INDEX open_segment_of ON open_segment(uid, attempt);

CREATE INDEX open_segment_at ON open_segment(step);

CREATE TABLE segments(name TEXT PRIMARY KEY, step INTEGER NOT NULL, attempt INTEGER NOT NULL,
  rows INTEGER NOT NULL);

CREATE INDEX segments_at ON segments(step);

CREATE TABLE segment_rows(name TEXT, row INTEGER, uid TEXT NOT NULL, attempt INTEGER NOT NULL,
  PRIMARY KEY(name, row));

CREATE UNIQUE INDEX segment_rows_of ON segment_rows(uid, attempt);

CREATE TABLE plans(step INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, json TEXT NOT NULL);

CREATE TABLE duplicates(seq INTEGER PRIMARY KEY, step INTEGER NOT NULL, attempt INTEGER NOT NULL,
  uid TEXT NOT NULL, state TEXT NOT NULL);
"""
AWAITED = 'awaited'
"""Operator name of the rows in `derived` that contain the delayed rewards for which a sample waits,
in the format of `Awaited.to_json`.
"""
EXPERT = 'expert'
"""Operator name of the rows in `derived` that contain the origin of an added expert row, in the
format of `Arrival.lineage` (`replay.experts`).
"""
ADDED = 'experts/'
"""Beginning of the uid of each added expert row; the row's digest follows."""
BETWEEN_ADDED = f"BETWEEN '{ADDED}' AND '{ADDED}~'"
"""SQL condition that a uid belongs to an added expert row."""
IS_ADDED = (
  'EXISTS (SELECT 1 FROM derived a WHERE a.uid = s.uid AND a.attempt = s.attempt AND a.operator = '
  f"'{EXPERT}')"
)
"""SQL condition that row s of `samples` is an added expert row."""
_PARTIALS = """TABLE partials(seq INTEGER PRIMARY KEY, step INTEGER NOT NULL,
  attempt INTEGER NOT NULL, uid TEXT NOT NULL, payload BLOB NOT NULL)"""
"""SQL definition of the table with the spans of unfinished samples (`core.records.span`), in the
order of their generation.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Issue:
  """Record of a sample that is about to be requested from an engine. The finished `Sample` must
  have the same group, task and visit.
  """

  uid: str
  group_id: str
  task_id: str
  visit: int
  partition: Partition = 'usual'


class Entry(NamedTuple):
  """Index row of a sample. If several attempts (starts of the run) have issued the sample, this is
  the newest row. Entries are tuples for speed, because every change creates one.
  """

  uid: str
  attempt: int
  group_id: str
  task_id: str
  visit: int
  partition: Partition
  version: int | None
  """Step of the oldest weights that generated any part of the sample. None for expert rows, and
  until the sample is accepted.
  """
  step: int
  """Number of batches that were completed when the sample was issued."""
  uses: int
  """Number of batches that trained on the sample."""
  state: State
  changed: int
  """Number of batches that were completed at the sample's last transition."""
  last: int
  """Sequence number of the sample's last transition. Later transitions have larger numbers."""


_STATES = {str(state): state for state in State}
ENTRY = (
  'SELECT uid, attempt, group_id, task_id, visit, partition, version, step, uses, state, changed, '
  'last FROM samples'
)


def entry_of(row: tuple) -> Entry:
  *issued, state, changed, last = row
  return Entry(*issued, _STATES[state], changed, last)


def log(db: sqlite3.Connection, rows: Sequence[tuple[int, int, str, State, str]]) -> range:
  """Appends rows (step, attempt, uid, state, reason) to `transitions`. Returns their sequence
  numbers.
  """
  (last,) = db.execute('SELECT coalesce(max(seq), 0) FROM transitions').fetchone()
  seqs = range(last + 1, last + 1 + len(rows))
  db.executemany(
    'INSERT INTO transitions VALUES (?,?,?,?,?,?)', [(seq, *row) for seq, row in zip(seqs, rows)]
  )
  return seqs


def add_partials(db: sqlite3.Connection) -> None:
  db.execute(f'CREATE {_PARTIALS}')
  db.execute('CREATE INDEX partials_of ON partials(uid, attempt)')
  db.execute('CREATE INDEX partials_at ON partials(step)')


def read_schema(db: sqlite3.Connection) -> int:
  (text,) = db.execute("SELECT json FROM meta WHERE key = 'schema'").fetchone()
  return json.loads(text)


def check_readable(db: sqlite3.Connection, path: pathlib.Path) -> None:
  """Raises UserError if this program cannot read the store's schema. If the schema has no
  table `partials`, an empty temporary table is created for this connection.
  """
  schema = read_schema(db)
  if schema == _BEFORE_PARTIALS:
    db.execute(f'CREATE TEMP {_PARTIALS}')
  elif schema not in (_BEFORE_AWAITING, SCHEMA):
    raise UserError(
      f'replay store {path}: schema {schema}, this program reads {SCHEMA}; use the program version '
      'that wrote it'
    )


def prepare(db: sqlite3.Connection, path: pathlib.Path, attempt: int | None, max_uses: int) -> int:
  """Prepares a store for an attempt (start of the run), in one transaction. Returns the attempt's
  number.

  Creates the tables of a new store, upgrades the two earlier schemas, and gives the store a name if
  it has none. Raises UserError if the store has an unknown schema or another `max_uses`, or if an
  attempt with this or a larger number has already run.
  """
  db.execute('BEGIN IMMEDIATE')
  if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
    for statement in TABLES.strip().split('\n\n'):
      db.execute(statement)
    add_partials(db)
    db.executemany(
      'INSERT INTO meta VALUES (?,?)', [('schema', str(SCHEMA)), ('max_uses', str(max_uses))]
    )
  if (schema := read_schema(db)) in (_BEFORE_PARTIALS, _BEFORE_AWAITING):
    if schema == _BEFORE_PARTIALS:
      add_partials(db)
    db.execute("UPDATE meta SET json = ? WHERE key = 'schema'", (str(SCHEMA),))
  for key, wanted in (('schema', SCHEMA), ('max_uses', max_uses)):
    (text,) = db.execute('SELECT json FROM meta WHERE key = ?', (key,)).fetchone()
    if json.loads(text) != wanted:
      raise UserError(
        f'replay store {path}: it has {key} {text}, wanted {wanted}; use another --workdir'
      )
  (last,) = db.execute('SELECT coalesce(max(attempt), 0) FROM attempts').fetchone()
  attempt = last + 1 if attempt is None else attempt
  if attempt <= last:
    raise UserError(
      f'replay store {path}: attempt {attempt} was given, but {last} has already run; wanted '
      f'{last + 1}'
    )
  db.execute("INSERT OR IGNORE INTO meta VALUES ('store', ?)", (json.dumps(secrets.token_hex(8)),))
  db.execute('INSERT INTO attempts(attempt) VALUES (?)', (attempt,))
  db.execute('COMMIT')
  return attempt
