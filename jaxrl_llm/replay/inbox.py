"""Inbox of delayed rewards: verdicts on stored samples, given by people or other programs. A
verdict may arrive hours after its sample was generated, and even while the run is stopped.

The inbox is an SQLite file in the directory of the store. Any number of processes append verdicts
to it (`attach`), one transaction at a time. The run only reads the inbox, and writes the resulting
scores to the store's index.

Invariants: a verdict is on disk before `attach` returns, and is never changed or deleted. A verdict
names the attempt (start of the run) that issued its sample. If the sample is lost in a crash and a
new sample gets its uid, the verdict does not apply to the new sample.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import sqlite3
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.replay.awaited import Awaited
from jaxrl_llm.replay.browse import snapshot
from jaxrl_llm.replay.connection import NAMED
from jaxrl_llm.replay.inbox_file import copy_inbox, open_inbox
from jaxrl_llm.replay.tables import AWAITED, State

INBOX = 'inbox.sqlite'
MAX_VALUE = 1e6
"""Maximum magnitude of a verdict's value."""
MAX_UID, MAX_WHO = 4096, 200
"""Maximum numbers of characters in a uid, and in the name of the person or program that gives a
verdict.
"""
_SCHEMA = 1
_TABLES = (
  'CREATE TABLE IF NOT EXISTS verdicts(seq INTEGER PRIMARY KEY, uid TEXT NOT NULL, '
  'attempt INTEGER NOT NULL, scorer TEXT NOT NULL, who TEXT NOT NULL, value REAL NOT NULL, '
  'at REAL NOT NULL)',
  'CREATE UNIQUE INDEX IF NOT EXISTS verdicts_of ON verdicts(uid, attempt, scorer, who)',
)

Refusal = Literal['invalid', 'unknown', 'late', 'conflict']
"""Reason for refusing a verdict. invalid: a field is missing, malformed or out of range. unknown:
there is no sample with this uid and attempt, or it has no delayed reward with this scorer. late:
the sample never waited for delayed rewards, or no longer does. conflict: for this sample and
scorer, the same person or program has already given another value.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LateVerdict:
  """A verdict on a sample. The constructor raises UserError if a field is malformed."""

  uid: str
  value: float
  who: str
  """Name of the person or program that gives the verdict."""
  scorer: str | None = None
  """Name of the delayed scorer. If None, the sample must wait for exactly one scorer, which is then
  used.
  """
  attempt: int | None = None
  """Attempt (start of the run) that issued the sample. If None, the newest attempt that issued the
  sample is used.
  """

  def __post_init__(self):
    if not (isinstance(self.uid, str) and 0 < len(self.uid) <= MAX_UID and self.uid.isprintable()):
      raise UserError(
        f'uid: got {_shown(self.uid)}, wanted the uid of a sample, at most {MAX_UID} printable '
        'characters'
      )
    where = f'feedback on {self.uid}'
    if isinstance(self.value, bool) or not isinstance(self.value, int | float):
      raise UserError(f'{where}: value is {_shown(self.value)}, wanted a number')
    if not abs(self.value) <= MAX_VALUE:  # This comparison also rejects NaN.
      raise UserError(
        f'{where}: value is {_shown(self.value)}, wanted a number from -{MAX_VALUE:g} to '
        f'{MAX_VALUE:g}'
      )
    check_who(where, self.who)
    if self.scorer is not None and not isinstance(self.scorer, str):
      raise UserError(f'{where}: scorer is {_shown(self.scorer)}, wanted the name of a scorer')
    if self.attempt is not None and (
      isinstance(self.attempt, bool) or not isinstance(self.attempt, int)
    ):
      raise UserError(f'{where}: attempt is {_shown(self.attempt)}, wanted a whole number')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
  """Reply to a submitted verdict."""

  uid: str
  refused: Refusal | None
  """Reason for refusing the verdict; None if the verdict is in the inbox."""
  line: str
  """Outcome in one line, for people."""


def check_who(where: str, who: object) -> None:
  """Raises UserError, with a message that begins with `where`, unless `who` can be the name of a
  person or program.
  """
  named = isinstance(who, str) and who.strip() == who and who.isprintable()
  if not (named and 0 < len(who) <= MAX_WHO):
    raise UserError(
      f'{where}: who is {_shown(who)}, wanted a name of at most {MAX_WHO} printable characters, '
      'without leading or trailing spaces'
    )


def _shown(value: object) -> str:
  text = repr(value)
  return text if len(text) <= 60 else f'{text[:57]}...'


def read_verdict(row: object) -> LateVerdict:
  """Parses a verdict from a JSON object. Raises UserError if it is malformed."""
  fields = [field.name for field in dataclasses.fields(LateVerdict)]
  if not isinstance(row, dict):
    raise UserError(f'got {_shown(row)}, wanted an object with uid, value and who')
  if unknown := [name for name in row if name not in fields]:
    raise UserError(f'unknown field {_shown(unknown[0])}; wanted {", ".join(fields)}')
  if missing := [name for name in ('uid', 'value', 'who') if name not in row]:
    raise UserError(f'{missing[0]} is missing; wanted uid, value and who')
  return LateVerdict(**row)


def attach(directory: str | os.PathLike, verdicts: Sequence[LateVerdict]) -> list[Reply]:
  """Submits verdicts on samples of a store. Returns a reply to each, in order.

  When the function returns, all verdicts that were not refused are on disk. A verdict that is
  submitted twice counts once.

  Args:
    directory: directory of the store, `<workdir>/replay`.

  Raises:
    UserError: the store cannot be read, or the inbox is damaged.
    RunError: the inbox cannot be written.
  """
  with snapshot(directory) as (index, _):
    samples = _samples(index, [verdict.uid for verdict in verdicts])
  now = time.time()
  with _inbox(directory) as db:
    db.execute('BEGIN IMMEDIATE')
    replies = [_attach(db, samples.get(verdict.uid), verdict, now) for verdict in verdicts]
    db.execute('COMMIT')
  return replies


class _Sample(NamedTuple):
  """Newest sample with a given uid, according to the store's index."""

  attempt: int
  state: State
  awaited: Awaited | None
  """Delayed rewards for which the sample waits or has waited; None if it never waited."""


def _samples(index: sqlite3.Connection, uids: Sequence[str]) -> dict[str, _Sample]:
  rows = index.execute(
    'SELECT s.uid, s.attempt, s.state, (SELECT d.json FROM derived d WHERE d.uid = s.uid AND '
    f'd.attempt = s.attempt AND d.operator = ? ORDER BY d.seq DESC) FROM samples s WHERE s.uid IN '
    f'({NAMED}) ORDER BY s.attempt',
    (AWAITED, json.dumps(list(uids))),
  )
  # Rows are sorted by attempt, so the newest sample with a uid replaces the earlier ones.
  return {
    uid: _Sample(attempt, State(state), text and Awaited.from_json(json.loads(text)))
    for uid, attempt, state, text in rows
  }


def _attach(
  db: sqlite3.Connection, sample: _Sample | None, verdict: LateVerdict, now: float
) -> Reply:
  """Adds a verdict to the inbox within the caller's transaction, unless it is refused."""
  uid, where = verdict.uid, f'feedback on {verdict.uid}'

  def refused(why: Refusal, line: str) -> Reply:
    return Reply(uid=uid, refused=why, line=f'{where}: {line}')

  if sample is None:
    return refused('unknown', 'no such sample in the store; `jaxrl feedback` lists those that wait')
  if verdict.attempt not in (None, sample.attempt):
    return refused(
      'unknown',
      f'the verdict is for the sample of attempt {verdict.attempt}, which was lost in a crash; '
      f'attempt {sample.attempt} generated another sample with this uid: export again',
    )
  scorers = list(sample.awaited.scorers) if sample.awaited else []
  if not scorers:
    return refused('late', f'the sample is {sample.state} and waits for no reward')
  if (scorer := verdict.scorer) is None and len(scorers) == 1:
    (scorer,) = scorers
  if scorer not in scorers:
    return refused(
      'unknown',
      f'scorer is {scorer!r}, wanted a delayed scorer of the sample: {", ".join(scorers)}',
    )
  key = (uid, sample.attempt, scorer, verdict.who)
  before = db.execute(
    'SELECT value FROM verdicts WHERE uid = ? AND attempt = ? AND scorer = ? AND who = ?', key
  ).fetchone()
  value = float(verdict.value)
  if before == (value,):
    return Reply(uid=uid, refused=None, line=f'{where}: {verdict.who} has already given {value:g}')
  if before is not None:
    return refused(
      'conflict',
      f'{verdict.who} has already given {before[0]:g}, and now gives {value:g}; the first stands',
    )
  if sample.state != State.AWAITING:
    return refused('late', f'the sample is already {sample.state}')
  if sample.awaited.is_late(now):
    return refused('late', f'the sample waited until {utc(sample.awaited.until)}, which has passed')
  db.execute(
    'INSERT INTO verdicts(uid, attempt, scorer, who, value, at) VALUES (?,?,?,?,?,?)',
    (*key, value, now),
  )
  return Reply(uid=uid, refused=None, line=f'{where}: {scorer} {value:g} of {verdict.who} attached')


def utc(unix: float) -> str:
  """Formats a Unix time as text, in UTC."""
  return time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(unix))


class Given(NamedTuple):
  """A verdict in the inbox."""

  seq: int
  """Number of the verdict in the order of arrival."""
  uid: str
  attempt: int
  scorer: str
  who: str
  value: float
  at: float
  """Unix time at which the verdict arrived."""


def given(directory: str | os.PathLike, uids: Sequence[str] | None = None) -> list[Given]:
  """Returns the verdicts in the inbox of a store, in the order of their arrival.

  Args:
    uids: uids of the samples whose verdicts are returned; None for all samples.
  """
  if not (pathlib.Path(directory) / INBOX).exists():
    return []
  where = '' if uids is None else f' WHERE uid IN ({NAMED})'
  with _inbox(directory) as db:
    rows = db.execute(
      f'SELECT seq, uid, attempt, scorer, who, value, at FROM verdicts{where} ORDER BY seq',
      () if uids is None else (json.dumps(list(uids)),),
    ).fetchall()
  return [Given(*row) for row in rows]


def copy(source: str | os.PathLike, target: str | os.PathLike) -> None:
  """Copies the inbox of one store to another store that has no inbox yet."""
  if (pathlib.Path(source) / INBOX).exists():
    with _inbox(source) as db:
      copy_inbox(db, pathlib.Path(target) / INBOX)


def _inbox(
  directory: str | os.PathLike,
) -> contextlib.AbstractContextManager[sqlite3.Connection]:
  """Opens the inbox, creating it if necessary."""
  path = pathlib.Path(directory) / INBOX
  return open_inbox(path, tables=_TABLES, schema=_SCHEMA, content='verdict')
