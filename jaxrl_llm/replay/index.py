"""The durable store of samples: an SQLite index, and sealed ArrayRecord segments.

Invariants:
- every issued sample keeps one row forever, keyed (uid, attempt); its state changes are appended to
  `transitions`, each stamped with the number of completed batches at that moment; `samples.state`
  repeats its last transition;
- an accepted sample has its bytes in the open segment or in one sealed, verified segment; rows of
  static data (`join`) have no bytes here, since those are in a file outside the store;
- each public call is one transaction (or part of an enclosing `transaction()`): a killed process
  loses nothing of a call that returned, and keeps nothing of one that did not.

A commit named c holds the changes stamped < c. `recover(c)` undoes later changes and so restores
the store as of the commit, with one exception: samples of earlier attempts that were not accepted
by then become `void`, with reason `crash`.

Durability: WAL. With `synchronous='full'` each transaction is on disk when the call returns. With
'normal' a killed process loses nothing either, but a power loss may lose transactions since the
last `flush()`. Flush before a checkpoint's COMMIT: a power loss can then take only transactions
after the COMMIT, which would be undone anyway (only the record of which samples were void is lost).
In both modes, segments are on disk before SQLite deletes their bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sqlite3
from collections.abc import Sequence
from typing import Any, Literal

from absl import logging

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Sample, decode
from jaxrl_llm.core.records.score import Score, Status
from jaxrl_llm.core.types import Json
from jaxrl_llm.replay import groups, quarantine, recovery, segments
from jaxrl_llm.replay.connection import NAMED, Connection
from jaxrl_llm.replay.draw import Group
from jaxrl_llm.replay.tables import (
  ENTRY,
  INDEX,
  SEGMENTS,
  Entry,
  Partition,
  State,
  entry_of,
  prepare,
)
from jaxrl_llm.replay.writer import StepWriter


class ReplayStore:
  """Durable store of samples, opened by `open_store`.

  Thread-safe. One process writes; any number may read (`open_segment_reader`, the audit).

  Attributes:
    directory: holds index.sqlite and segments/.
    attempt: number of this start of the run.
  """

  def __init__(self, connection: Connection, *, full: bool):
    self._connection, self._db, self._lock = connection, connection.db, connection.lock
    self.directory, self.attempt = connection.directory, connection.attempt
    self.reader = segments.open_segment_reader(self.directory / SEGMENTS)
    self._full = full
    (earlier,) = self._db.execute(
      'SELECT count(*) FROM attempts WHERE attempt < ?', (self.attempt,)
    ).fetchone()
    self._recovered = earlier == 0

  @property
  def name(self) -> str:
    """Permanent name of the store, assigned at its creation; commits refer to the store by it."""
    return self.meta('store')

  def transaction(self) -> contextlib.AbstractContextManager[None]:
    """Makes the calls in the block one transaction; see `Connection.transaction`."""
    return self._connection.transaction()

  def at(self, step: int) -> StepWriter:
    """Returns the writer of changes stamped with `step` completed batches."""
    if not self._recovered:
      raise ValueError('store: call recover first, an earlier attempt wrote to this store')
    return StepWriter(self._connection, step)

  def recover(self, commit_step: int) -> dict[str, int]:
    """Undoes, at start-up and in one transaction, all changes after the commit. See the module.

    Args:
      commit_step: step that names the newest commit; 0 if there is none.

    Returns:
      Counts: rows deleted, by table; samples made `void`; samples `restored` to the open segment;
      `files` moved to quarantine.
    """
    with self._lock:
      newest = self._db.execute('SELECT attempt FROM samples ORDER BY seq DESC LIMIT 1').fetchone()
      if newest == (self.attempt,):
        raise ValueError('recover: this attempt has already issued samples')
      with self.transaction():
        counts = recovery.undo(self._db, self.reader, commit_step=commit_step, attempt=self.attempt)
      self.reader.close()
      named = {name for (name,) in self._db.execute('SELECT name FROM segments')}
      counts['files'] = quarantine.set_aside(self.directory, named)
      self._recovered = True
    if any(counts.values()):
      logging.info(
        'replay: attempt %d starts from commit %d; undone: %s', self.attempt, commit_step, counts
      )
    return counts

  def prune(self, commit_step: int) -> int:
    """Deletes the bytes of samples dropped or expired before the commit; returns the number of
    samples.

    Dropping a sample keeps its bytes, because a crash may undo the drop. Pass the oldest commit
    from which a later start may resume.
    """
    with self.transaction():
      return self._db.execute(
        'DELETE FROM open_segment WHERE seq IN (SELECT o.seq FROM open_segment o CROSS JOIN '
        'samples s '
        "USING (uid, attempt) WHERE s.state IN ('dropped', 'expired') AND s.changed < ?)",
        (commit_step,),
      ).rowcount

  def flush(self) -> None:
    """Syncs all acknowledged changes to disk; call it before a checkpoint's COMMIT."""
    if self._full:
      return
    with self._lock:
      self._db.execute('PRAGMA synchronous=FULL')
      # the fsync of this write covers the whole log before it
      self.set_meta('flushed', {'attempt': self.attempt})
      self._db.execute('PRAGMA synchronous=NORMAL')

  def close(self) -> None:
    with self._lock:
      self.reader.close()
      self._db.close()

  def entries(self, uids: Sequence[str]) -> dict[str, Entry]:
    with self._lock:
      return self._connection.entries(uids)

  def live(self, partition: Partition = 'usual') -> list[Entry]:
    """Returns the samples of a partition that are issued, stored or admitted, from all attempts, in
    uid order.
    """
    with self._lock:
      rows = self._db.execute(
        f"{ENTRY} WHERE state IN ('issued', 'stored', 'admitted') AND partition = ? ORDER BY uid",
        (partition,),
      ).fetchall()
    return [entry_of(row) for row in rows]

  def candidates(self, step: int, *, oldest_version: int | None = None) -> list[Group]:
    """Returns the groups that batch `step` can draw, in order of issue, as input for `draw`.

    Each sample of such a group is dropped, expired, void or admitted, or was trained on fewer than
    `max_uses` times and not in batch `step`. The group's `uids` are those of the admitted and
    trained samples, which have bytes. Expert rows are not drawn.

    Args:
      step: number of batches completed before this one.
      oldest_version: groups of older versions are left out; None: no limit.
    """
    with self._lock:
      return groups.drawable(
        self._db, step=step, max_uses=self._connection.max_uses, oldest_version=oldest_version
      )

  def sealed(self) -> list[list[str]]:
    """Returns the uids of sealed samples of partition `usual`, by group, in order of issue."""
    with self._lock:
      return groups.sealed(self._db)

  def visits(self, stages: Sequence[str]) -> dict[str, int]:
    """Returns each task's next visit number, keyed by task uid: how often these stages drew it.

    Void samples do not count.
    """
    with self._lock:
      rows = self._db.execute(
        f'SELECT task_id, max(visit) + 1 FROM samples JOIN ({NAMED}) stage '
        # '0' follows '/' in ASCII.
        "ON group_id >= stage.value || '/' AND group_id < stage.value || '0' "
        "WHERE partition = 'usual' AND state != 'void' GROUP BY task_id",
        (json.dumps(list(stages)),),
      ).fetchall()
    return dict(rows)

  def scores(self, uids: Sequence[str]) -> dict[str, list[Score]]:
    """Returns each sample's newest score from each scorer, keyed by uid, in order of scoring."""
    with self._lock:
      rows = self._db.execute(
        f'SELECT uid, scorer, value, status, json FROM scores c WHERE uid IN ({NAMED}) AND attempt '
        '= (SELECT max(attempt) FROM samples s WHERE s.uid = c.uid) ORDER BY seq',
        (json.dumps(list(uids)),),
      ).fetchall()
    newest: dict[str, dict[str, Score]] = {uid: {} for uid in uids}
    for uid, scorer, value, status, rest in rows:
      fields = json.loads(rest)
      fields['turn_values'] = tuple(fields['turn_values'])
      newest[uid].pop(scorer, None)
      newest[uid][scorer] = Score(
        uid=uid, scorer=scorer, value=value, status=Status(status), **fields
      )
    return {uid: list(by_scorer.values()) for uid, by_scorer in newest.items()}

  def derived(self, uids: Sequence[str], operator: str) -> dict[str, Json]:
    """`operator`'s latest value of each sample, in order of `uids`; omits samples without one."""
    with self._lock:
      rows = self._db.execute(
        f'SELECT uid, json FROM derived WHERE uid IN ({NAMED}) AND operator = ? ORDER BY seq',
        (json.dumps(list(uids)), operator),
      ).fetchall()
    latest = dict(rows)
    return {uid: json.loads(latest[uid]) for uid in uids if uid in latest}

  def read(self, uids: Sequence[str]) -> list[Sample]:
    """Reads accepted samples from the open and sealed segments, in the order of `uids`."""
    with self._lock:
      refs, rows = self._connection.places(uids), self._connection.open_rows(uids)
    sealed = [uid for uid in uids if uid not in rows]
    if missing := [uid for uid in sealed if uid not in refs]:
      raise ValueError(f'read {missing[0]}: it has no bytes')
    samples = dict(zip(sealed, self.reader.read([refs[uid] for uid in sealed])))
    return [samples[uid] if uid in samples else decode(rows[uid][1]) for uid in uids]

  def plans(self, first_step: int = 0) -> dict[int, Any]:
    with self._lock:
      rows = self._db.execute(
        'SELECT step, json FROM plans WHERE step >= ? ORDER BY step', (first_step,)
      ).fetchall()
    return {step: json.loads(text) for step, text in rows}

  def meta(self, key: str) -> Any:
    """Returns the value stored under `key`, else None. `recover` does not undo such values."""
    with self._lock:
      row = self._db.execute('SELECT json FROM meta WHERE key = ?', (key,)).fetchone()
    return None if row is None else json.loads(row[0])

  def set_meta(self, key: str, value: Any) -> None:
    with self.transaction():
      self._db.execute('INSERT OR REPLACE INTO meta VALUES (?,?)', (key, json.dumps(value)))

  def counts(self) -> dict[str, int]:
    """Number of samples per state, and of `duplicates`: results that came after an accepted one."""
    with self._lock:
      by_state = dict(
        self._db.execute('SELECT state, sum(samples) FROM tallies GROUP BY state').fetchall()
      )
      (duplicates,) = self._db.execute('SELECT count(*) FROM duplicates').fetchone()
    return {**{str(state): by_state.get(state, 0) for state in State}, 'duplicates': duplicates}


def open_store(
  directory: str | os.PathLike,
  *,
  attempt: int | None = None,
  max_uses: int = 1,
  synchronous: Literal['full', 'normal'] = 'full',
) -> ReplayStore:
  """Opens or creates the store in `<workdir>/replay` for writing; call `recover` next.

  Args:
    directory: holds index.sqlite and segments/.
    attempt: number of this start of the run, larger than all before; None: the last one plus 1.
    max_uses: maximum number of batches that train on one sample of partition `usual`; fixed for a
      store.
    synchronous: durability under power loss, see the module docstring.
  """
  directory = pathlib.Path(directory)
  path = directory / INDEX
  (directory / SEGMENTS).mkdir(parents=True, exist_ok=True)
  db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
  try:
    db.execute('PRAGMA journal_mode=WAL')
    db.execute('PRAGMA synchronous=FULL')
    # in pages, together 32 MB: large, because index pages are rewritten many times
    db.execute('PRAGMA wal_autocheckpoint=8192')
    db.execute('PRAGMA cache_size=-16384')  # KiB
    attempt = prepare(db, path, attempt, max_uses)
    db.execute(f'PRAGMA synchronous={synchronous.upper()}')
  except sqlite3.DatabaseError as error:
    db.close()
    raise UserError(
      f'replay store {path}: {error}; damaged, locked or not a store of this program'
    ) from error
  except UserError:
    db.close()
    raise
  connection = Connection(directory, db, attempt=attempt, max_uses=max_uses)
  return ReplayStore(connection, full=synchronous == 'full')
