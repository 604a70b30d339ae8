"""The durable store of samples: an SQLite index, and sealed ArrayRecord segments.

Invariants:
- Every issued sample has one row, with the key (uid, attempt), which is never deleted. An attempt
  is a start of the run. Each change of the sample's state is appended to `transitions`, with the
  number of batches completed at that moment (its step). `samples.state` is the state after the last
  transition.
- The bytes of an accepted sample are in the open segment (a table of the index) or in one sealed,
  verified segment file, unless the sample was dropped or expired and its bytes were pruned. The
  bytes of expert rows that were added to the run are also in one of these two places. Rows of
  static data (`StepWriter.join`) have no bytes in the store, because they are in a file outside of
  it.
- Each public call is one transaction, or part of an enclosing `transaction()`. If the process is
  killed, the store has the changes of completed transactions only.

A commit at step c contains the changes whose step is less than c. `recover(c)` undoes all other
changes, and so restores the store as of the commit. It does not undo changes to the tables `meta`,
`attempts` and `tasks`. In addition, samples of earlier attempts that were neither accepted nor had
a stored span at the commit become `void`, with the reason `crash`. Some samples that began to wait
for delayed rewards after the commit continue to wait (`replay.recovery`).

Durability: the index uses a write-ahead log (WAL). With `synchronous='full'`, each transaction is
on disk when the call returns. With 'normal', a power loss may lose the transactions since the last
`flush()`, but a killed process still loses none. If `flush()` is called before the COMMIT file of a
checkpoint is written, a power loss can only affect transactions after the commit, which recovery
would undo anyway. In both modes, a segment file is on disk before its bytes are deleted from the
index.
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

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.records.sample import Sample
from jaxrl_llm.core.records.score import Score, Status
from jaxrl_llm.core.records.span import Span
from jaxrl_llm.core.types import Json
from jaxrl_llm.replay import groups, quarantine, recovery, segments
from jaxrl_llm.replay.connection import NAMED, Connection
from jaxrl_llm.replay.draw import Group
from jaxrl_llm.replay.journal import Journal, attach
from jaxrl_llm.replay.tables import (
  ENTRY,
  INDEX,
  LIVE,
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

  The store is thread-safe. Only one process may write to it, but any number of processes may read
  it (`open_segment_reader`, `audit`).

  Attributes:
    directory: directory with index.sqlite and segments/.
    attempt: number of this attempt (start of the run).
  """

  def __init__(self, connection: Connection, *, full: bool):
    self._connection, self._db, self._lock = connection, connection.db, connection.lock
    self.directory, self.attempt = connection.directory, connection.attempt
    self.reader = segments.open_segment_reader(self.directory / SEGMENTS)
    self._full, self._journal = full, Journal(connection)
    (earlier,) = self._db.execute(
      'SELECT count(*) FROM attempts WHERE attempt < ?', (self.attempt,)
    ).fetchone()
    self._recovered = earlier == 0

  @property
  def name(self) -> str:
    """Unique name of the store, by which commits refer to it. It never changes."""
    return self.meta('store')

  def transaction(self) -> contextlib.AbstractContextManager[None]:
    """Makes all calls in the block one transaction; see `Connection.transaction`."""
    return self._connection.transaction()

  def at(self, step: int) -> StepWriter:
    """Returns a writer that records changes at `step`, the number of batches completed so far."""
    if not self._recovered:
      raise ValueError('store: call recover first, because an earlier attempt wrote to this store')
    return StepWriter(self._connection, step)

  def recover(self, commit_step: int, *, keep_waiting: bool = True) -> dict[str, int]:
    """Undoes all changes after a commit, in one transaction; see the module docstring. Call it
    once, when the run starts.

    Args:
      commit_step: step of the newest commit; 0 if there is none.
      keep_waiting: whether samples that began to wait for delayed rewards after the commit continue
        to wait, unless later weights generated them (`replay.recovery`).

    Returns:
      The number of rows deleted from each table, keyed by table, and four more counts: `void` for
      samples that became void, `restored` for samples that were moved back to the open segment,
      `kept` for samples that continue to wait although they began to wait after the commit, and
      `files` for files that were moved to quarantine.
    """
    with self._lock:
      newest = self._db.execute('SELECT attempt FROM samples ORDER BY seq DESC LIMIT 1').fetchone()
      if newest == (self.attempt,):
        raise ValueError('recover: this attempt has already issued samples')
      with self.transaction():
        counts = recovery.undo(
          self._db,
          self.reader,
          commit_step=commit_step,
          attempt=self.attempt,
          keep_waiting=keep_waiting,
        )
      self.reader.close()
      named = {name for (name,) in self._db.execute('SELECT name FROM segments')}
      counts['files'] = quarantine.set_aside(self.directory, named)
      self._recovered = True
    self._journal.write()
    if any(counts.values()):
      logging.info(
        'replay: attempt %d starts from commit %d; undone: %s', self.attempt, commit_step, counts
      )
    return counts

  def prune(self, commit_step: int) -> int:
    """Deletes bytes that the index no longer needs: the content of dropped and expired samples in
    the open segment, and the spans of samples that are no longer partial. Returns the number of
    samples whose content was deleted.

    Bytes are deleted only if the sample's last transition took place before the commit, because
    recovery may undo later transitions.

    Args:
      commit_step: step of the oldest commit from which the run may still be resumed.
    """
    with self.transaction():
      self._db.execute(
        'DELETE FROM partials WHERE seq IN (SELECT p.seq FROM partials p CROSS JOIN samples s '
        "USING (uid, attempt) WHERE s.state != 'partial' AND s.changed < ?)",
        (commit_step,),
      )
      return self._db.execute(
        'DELETE FROM open_segment WHERE seq IN (SELECT o.seq FROM open_segment o CROSS JOIN '
        'samples s '
        "USING (uid, attempt) WHERE s.state IN ('dropped', 'expired') AND s.changed < ?)",
        (commit_step,),
      ).rowcount

  def flush(self) -> None:
    """Writes the changes of all earlier calls to disk, and to the journal. Call this before the
    COMMIT file of a checkpoint is written.
    """
    self._journal.write()
    if self._full:
      return
    with self._lock:
      self._db.execute('PRAGMA synchronous=FULL')
      # The fsync of this write also makes all earlier writes in the log durable.
      self.set_meta('flushed', {'attempt': self.attempt})
      self._db.execute('PRAGMA synchronous=NORMAL')

  def close(self) -> None:
    try:
      self._journal.write()
    except (RunError, sqlite3.Error) as error:
      logging.warning('%s; the journal lacks the changes since the last commit', error)
    with self._lock:
      self.reader.close()
      self._db.close()

  def entries(self, uids: Sequence[str]) -> dict[str, Entry]:
    with self._lock:
      return self._connection.entries(uids)

  def live(self, partition: Partition = 'usual') -> list[Entry]:
    """Returns the samples of a partition whose state is in `LIVE`, from all attempts, sorted by
    uid.
    """
    with self._lock:
      rows = self._db.execute(
        f'{ENTRY} WHERE state IN ({NAMED}) AND partition = ? ORDER BY uid',
        (json.dumps(LIVE), partition),
      ).fetchall()
    return [entry_of(row) for row in rows]

  def members(self, group_id: str) -> list[str]:
    """Returns the uids of a group's samples that are not void, in the order in which they were
    issued.
    """
    with self._lock:
      rows = self._db.execute(
        "SELECT uid FROM samples WHERE group_id = ? AND state != 'void' ORDER BY seq", (group_id,)
      ).fetchall()
    return [uid for (uid,) in rows]

  def candidates(self, step: int, *, oldest_version: int | None = None) -> list[Group]:
    """Returns the groups that `draw` can draw for the batch of this step, in the order in which
    they were issued.

    A candidate has at least one admitted or trained sample, and no sample that
    - is issued, partial, stored or awaiting,
    - changed its state after this step,
    - is admitted or trained, and has a version older than `oldest_version`, or
    - was trained on in `max_uses` batches, or already in the batch of this step.

    `Group.uids` lists only the admitted and trained samples. Expert rows are not candidates.

    Args:
      step: number of batches completed before this one.
      oldest_version: step of the oldest permitted version. If None, there is no limit.
    """
    with self._lock:
      return groups.drawable(
        self._db, step=step, max_uses=self._connection.max_uses, oldest_version=oldest_version
      )

  def added(self, step: int, *, max_uses: int, longest: int) -> list[str]:
    """Returns the uids of expert rows that were added to the run (`replay.experts`) and can be
    drawn for the batch of this step, sorted by the number of batches that trained on them, and then
    by arrival.

    Args:
      max_uses: maximum number of batches that train on a row.
      longest: maximum number of tokens of a row.
    """
    with self._lock:
      return groups.added(self._db, step=step, max_uses=max_uses, longest=longest)

  def sealed(self) -> list[list[str]]:
    """Returns the uids of the policy's samples in sealed segment files that are admitted or
    trained, one list per group, in the order in which they were issued.
    """
    with self._lock:
      return groups.sealed(self._db)

  def visits(self, stages: Sequence[str], *, before: int | None = None) -> dict[str, int]:
    """Returns the number of times that these stages have drawn each task, keyed by task uid. This
    number is also the task's next visit number. Void samples do not count.

    Args:
      before: count only samples that were issued before this step. If None, all samples count.
    """
    with self._lock:
      rows = self._db.execute(
        f'SELECT task_id, max(visit) + 1 FROM samples JOIN ({NAMED}) stage '
        # The condition selects group ids that start with 'STAGE/', because '0' follows '/' in
        # ASCII.
        "ON group_id >= stage.value || '/' AND group_id < stage.value || '0' "
        "WHERE partition = 'usual' AND state != 'void' AND (? IS NULL OR step < ?) "
        'GROUP BY task_id',
        (json.dumps(list(stages)), before, before),
      ).fetchall()
    return dict(rows)

  def scores(self, uids: Sequence[str]) -> dict[str, list[Score]]:
    """Returns the scores of each sample, keyed by uid: the newest score of each scorer, in the
    order in which they were recorded.
    """
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
    """Returns the latest value that `operator` (the name of a processor, for example) recorded for
    each sample, keyed by uid in the order of `uids`. Samples without a value are left out.
    """
    with self._lock:
      rows = self._db.execute(
        f'SELECT uid, json FROM derived WHERE uid IN ({NAMED}) AND operator = ? ORDER BY seq',
        (json.dumps(list(uids)), operator),
      ).fetchall()
    latest = dict(rows)
    return {uid: json.loads(latest[uid]) for uid in uids if uid in latest}

  def read(self, uids: Sequence[str]) -> list[Sample]:
    """Reads accepted samples, in the order of `uids`. They may be in the open segment (a table of
    the index) or in sealed segment files. Raises ValueError if the store has no bytes of a sample,
    and SegmentError if its bytes are damaged.
    """
    with self._lock:
      refs, rows = self._connection.places(uids), self._connection.open_rows(uids)
    sealed = [uid for uid in uids if uid not in rows]
    if missing := [uid for uid in sealed if uid not in refs]:
      raise ValueError(f'read {missing[0]}: the store has no bytes of this sample')
    samples = dict(zip(sealed, self.reader.read([refs[uid] for uid in sealed])))
    return [
      samples[uid]
      if uid in samples
      else segments.decode_row(rows[uid][1], f'replay store {self.directory}, open segment, {uid}')
      for uid in uids
    ]

  def spans(self, uids: Sequence[str]) -> dict[str, list[Span]]:
    """Returns the spans of partial samples, in the order of their generation, keyed by uid in the
    order of `uids`. Samples in other states have no spans. Raises SegmentError if a span is damaged
    or missing.
    """
    named = (json.dumps(list(uids)),)
    with self._lock:
      rows = self._db.execute(
        f'SELECT uid, payload FROM partials JOIN samples s USING (uid, attempt) WHERE uid IN '
        f"({NAMED}) AND s.state = 'partial' ORDER BY partials.seq",
        named,
      ).fetchall()
      became = self._db.execute(
        'SELECT uid, count(*) FROM samples s JOIN transitions t USING (uid, attempt) WHERE uid IN '
        f"({NAMED}) AND s.state = 'partial' AND t.state = 'partial' GROUP BY uid",
        named,
      ).fetchall()
    where = f'replay store {self.directory}, spans of {{}}'
    spans: dict[str, list[Span]] = {uid: [] for uid in uids}
    for uid, payload in rows:
      spans[uid].append(segments.decode_span_row(payload, where.format(uid)))
    for uid, count in became:
      if len(spans[uid]) != count:
        raise segments.SegmentError(
          f'{where.format(uid)}: got {len(spans[uid])} spans, but its transitions say {count}; '
          f'{segments.RESTORE_INDEX}'
        )
    return spans

  def plans(self, first_step: int = 0) -> dict[int, Any]:
    with self._lock:
      rows = self._db.execute(
        'SELECT step, json FROM plans WHERE step >= ? ORDER BY step', (first_step,)
      ).fetchall()
    return {step: json.loads(text) for step, text in rows}

  def undone_until(self) -> int:
    """Returns the largest number of completed batches that the run had reached before a recovery
    undid some of them; 0 if no recovery has undone a batch.
    """
    with self._lock:
      rows = self._db.execute(
        'SELECT commit_step, counts FROM attempts WHERE counts IS NOT NULL'
      ).fetchall()
    undone = [(step, json.loads(counts).get('plans', 0)) for step, counts in rows]
    return max((step + plans for step, plans in undone if plans), default=0)

  def meta(self, key: str) -> Any:
    """Returns the value that is stored under `key`, or None. `recover` does not undo changes to
    these values.
    """
    with self._lock:
      row = self._db.execute('SELECT json FROM meta WHERE key = ?', (key,)).fetchone()
    return None if row is None else json.loads(row[0])

  def set_meta(self, key: str, value: Any) -> None:
    with self.transaction():
      self._db.execute('INSERT OR REPLACE INTO meta VALUES (?,?)', (key, json.dumps(value)))

  def counts(self) -> dict[str, int]:
    """Returns the number of samples in each state, and under `duplicates` the number of results
    that were not accepted because their sample was no longer `issued` or `partial`.
    """
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
  """Opens a store for writing, and creates it if it does not exist. Call `recover` next.

  Args:
    directory: directory of the store, `<workdir>/replay`, with index.sqlite and segments/.
    attempt: number of this attempt (start of the run), which must be larger than all earlier ones.
      If None, the last number plus 1 is used.
    max_uses: maximum number of batches that may train on one sample of partition `usual`. It is
      fixed when the store is created.
    synchronous: durability under power loss. 'full': each transaction is on disk when the call
      returns. 'normal': a power loss may lose the transactions since the last `flush`.
  """
  directory = pathlib.Path(directory)
  path = directory / INDEX
  (directory / SEGMENTS).mkdir(parents=True, exist_ok=True)
  db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
  try:
    db.execute('PRAGMA journal_mode=WAL')
    db.execute('PRAGMA synchronous=FULL')
    # SQLite copies the log into the database after this number of pages, 32 MB in all. The number
    # is large, because a page that has changed many times is then copied only once.
    db.execute('PRAGMA wal_autocheckpoint=8192')
    db.execute('PRAGMA cache_size=-16384')  # A negative value is a size in KiB.
    attempt = prepare(db, path, attempt, max_uses)
    attach(db, directory)
    db.execute(f'PRAGMA synchronous={synchronous.upper()}')
  except sqlite3.DatabaseError as error:
    db.close()
    raise UserError(
      f'replay store {path}: {error}; damaged, locked or not a store of this program; if it is '
      'damaged, jaxrl buffer --rebuild rebuilds it from the journal'
    ) from error
  except UserError:
    db.close()
    raise
  connection = Connection(directory, db, attempt=attempt, max_uses=max_uses)
  return ReplayStore(connection, full=synchronous == 'full')
