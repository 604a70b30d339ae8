"""The durable store of samples: SQLite holds all control state, sealed ArrayRecord segments hold bytes that left it.

Invariants:
- every issued sample keeps one row forever, keyed (uid, attempt); its state changes are appended to `transitions`, each
  stamped with the number of completed batches at that moment; `samples.state` repeats its last transition;
- an accepted sample has its bytes in the open segment or in one sealed, verified segment; rows of static data (`join`)
  have theirs in a file of their own and none here;
- each public call is one transaction (or part of an enclosing `transaction()`): a killed process loses nothing of a
  call that returned, and keeps nothing of one that did not.

A commit named c holds the changes stamped < c. `recover(c)` undoes the rest and so restores the store as of the commit,
except that samples which dead attempts had not accepted by then are `void`, reason `crash`.

Durability: WAL. With `synchronous='full'` each transaction is on disk when the call returns. With 'normal' a killed
process loses nothing either, but a power loss may lose transactions since the last `flush()`. Flush before a
checkpoint's COMMIT: any loss is then later than the COMMIT and would be undone anyway (only the record of which samples
were void is lost). In both modes, segments are on disk before SQLite deletes their bytes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from absl import logging

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.records.sample import Sample, decode, encode
from jaxrl_llm.core.records.score import Score, Status
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Json
from jaxrl_llm.replay import groups, quarantine, recovery, segments
from jaxrl_llm.replay.draw import Group
from jaxrl_llm.replay.tables import (
  ENTRY,
  INDEX,
  SEGMENTS,
  Entry,
  Issue,
  Partition,
  State,
  entry_of,
  log,
  may_become,
  prepare,
)

_NAMED = 'SELECT value FROM json_each(?)'
_ISSUE = (
  'INSERT INTO samples(uid, attempt, group_id, task_id, visit, partition, step, state, changed, last, admitted, uses) '
  'VALUES (?,?,?,?,?,?,?,?,?,?,?,0)'
)


class ReplayStore:
  """Created by `open_store`. Thread-safe; one process writes, any number may read (`open_segment_reader`, the audit).

  Mutating methods take `step`, the number of completed batches, and identify samples by uid, meaning the row of the
  uid's newest attempt. An unknown uid, or one in a state that does not permit the change, raises ValueError, and the
  call has no effect.
  """

  def __init__(self, directory: pathlib.Path, db: sqlite3.Connection, *, attempt: int, max_uses: int, full: bool):
    self.directory = directory
    self.attempt = attempt
    self.max_uses = max_uses
    self.reader = segments.open_segment_reader(directory / SEGMENTS)
    self._db = db
    self._full = full
    self._lock = threading.RLock()
    self._depth = 0
    (earlier,) = db.execute('SELECT count(*) FROM attempts WHERE attempt < ?', (attempt,)).fetchone()
    self._recovered = earlier == 0

  @property
  def name(self) -> str:
    """Permanent name, assigned when the store was created; commits refer to their store by it."""
    return self.meta('store')

  @contextlib.contextmanager
  def transaction(self) -> Iterator[None]:
    """Joins the calls inside into one transaction: one fsync, all or nothing.

    Holds the store's lock: do not await inside, and let the exception of a call inside end the block.
    """
    with self._lock:
      if self._depth:
        yield
        return
      self._depth = 1
      try:
        self._db.execute('BEGIN IMMEDIATE')
        yield
        self._db.execute('COMMIT')
      except sqlite3.IntegrityError:  # a bug of this program
        raise
      except sqlite3.DatabaseError as error:
        raise RunError(
          f'replay store {self.directory / INDEX}: {error}; nothing acknowledged is lost: free disk space, end other '
          'processes that write to this run directory, and start again with the same command'
        ) from error
      finally:
        self._depth = 0
        if self._db.in_transaction:
          self._db.execute('ROLLBACK')

  def issue(self, rows: Sequence[Issue], step: int) -> None:
    """Records samples about to be requested. A uid can be issued again only after it became void with its attempt."""
    if not self._recovered:
      raise ValueError('issue: call recover first, an earlier attempt wrote to this store')
    with self.transaction():
      known = self._entries([row.uid for row in rows], missing='skip')
      for entry in known.values():
        if entry.state != State.VOID:
          raise ValueError(f'issue {entry.uid}: already {entry.state} under attempt {entry.attempt}')
      self._insert(rows, 'usual', State.ISSUED, step)

  def offer(self, tasks: Sequence[Task], step: int) -> None:
    """Stores tasks (prompt, truth, media) in the taskset partition; existing ones never change, also after a crash."""
    content = lambda task: {
      'prompt': [dict(message) for message in task.prompt],
      'truth': task.truth,
      'media': [{'kind': shown.kind, 'digest': shown.digest} for shown in task.media],
    }
    rows = [(task.uid, task.taskset, task.domain, step, self.attempt, json.dumps(content(task))) for task in tasks]
    with self.transaction():
      self._db.executemany('INSERT OR IGNORE INTO tasks VALUES (?,?,?,?,?,?)', rows)

  def join(self, rows: Sequence[Issue], step: int) -> None:
    """Records rows of static data that join a batch: issued and immediately admitted, without bytes.

    Existing rows stay as they are, since static data repeat; `max_uses` does not apply to them.
    """
    if not self._recovered:
      raise ValueError('join: call recover first, an earlier attempt wrote to this store')
    with self.transaction():
      known = self._entries([row.uid for row in rows], missing='skip')
      for row in rows:
        entry = known.get(row.uid)
        if entry and (entry.partition, entry.group_id, entry.task_id) != ('expert', row.group_id, row.task_id):
          raise ValueError(
            f'join {row.uid}: already {entry.state}, {entry.partition}, of group {entry.group_id!r}, task '
            f'{entry.task_id!r}; wanted expert, {row.group_id!r}, {row.task_id!r}'
          )
      new = [row for row in rows if row.uid not in known or known[row.uid].state == State.VOID]
      self._insert(new, 'expert', State.ADMITTED, step)

  def append(self, samples: Sequence[Sample], step: int) -> list[str]:
    """Accepts results; returns the accepted uids. Results for samples past `issued` are counted, not accepted."""
    with self.transaction():
      known = self._entries(dict.fromkeys(s.uid for s in samples))
      accepted: dict[str, Sample] = {}
      for sample in samples:
        entry = known[sample.uid]
        if not sample.segments:
          raise ValueError(f'append {sample.uid}: it has no segments, so it is of no version of the weights')
        if (sample.group_id, sample.task_id, sample.visit) != (entry.group_id, entry.task_id, entry.visit):
          raise ValueError(f'append {sample.uid}: group, task or visit differ from what was issued')
        if entry.state != State.ISSUED or sample.uid in accepted:
          state = State.STORED if sample.uid in accepted else entry.state
          self._db.execute(
            'INSERT INTO duplicates(step, attempt, uid, state) VALUES (?,?,?,?)',
            (step, entry.attempt, sample.uid, state),
          )
        else:
          accepted[sample.uid] = sample
      self._db.executemany(
        'INSERT INTO open_segment(step, attempt, uid, payload) VALUES (?,?,?,?)',
        [(step, known[uid].attempt, uid, encode(sample)) for uid, sample in accepted.items()],
      )
      self._move(list(accepted), State.STORED, '', step)
      self._db.executemany(
        'UPDATE samples SET version = ? WHERE uid = ? AND attempt = ?',
        [(oldest_version(sample), uid, known[uid].attempt) for uid, sample in accepted.items()],
      )
    return list(accepted)

  def score(self, scores: Sequence[Score], step: int) -> None:
    """Appends scores of accepted samples."""
    with self.transaction():
      known = self._entries(dict.fromkeys(s.uid for s in scores))
      rows = []
      for score in scores:
        if score.value is not None and not math.isfinite(score.value):
          raise ValueError(f'score {score.uid}: {score.scorer} gave {score.value}; unscorable is None')
        if known[score.uid].state == State.ISSUED:
          raise ValueError(f'score {score.uid}: it has no bytes yet')
        rest = json.dumps(
          {
            'parts': dict(score.parts),
            'turn_values': list(score.turn_values),
            'evidence': dict(score.evidence),
            'time': score.time,
          }
        )
        rows.append((step, known[score.uid].attempt, score.uid, score.scorer, score.value, score.status, rest))
      self._db.executemany(
        'INSERT INTO scores(step, attempt, uid, scorer, value, status, json) VALUES (?,?,?,?,?,?,?)', rows
      )

  def derive(self, rows: Sequence[tuple[str, str, Json]], step: int) -> None:
    """Appends (uid, operator, JSON) rows: values that operators derived from accepted samples."""
    with self.transaction():
      known = self._entries(dict.fromkeys(uid for uid, *_ in rows))
      for entry in known.values():
        if entry.state == State.ISSUED:
          raise ValueError(f'derive {entry.uid}: it has no bytes yet')
      self._db.executemany(
        'INSERT INTO derived(step, attempt, uid, operator, json) VALUES (?,?,?,?,?)',
        [(step, known[uid].attempt, uid, operator, json.dumps(value)) for uid, operator, value in rows],
      )

  def admit(self, uids: Sequence[str], step: int) -> None:
    with self.transaction():
      self._move(uids, State.ADMITTED, '', step)

  def drop(self, uids: Sequence[str], reason: str, step: int) -> None:
    if not reason:
      raise ValueError('drop: no reason given')
    with self.transaction():
      self._move(uids, State.DROPPED, reason, step)

  def expire(self, uids: Sequence[str], step: int) -> None:
    with self.transaction():
      self._move(uids, State.EXPIRED, '', step)

  def evict(self, *, before_version: int | None, capacity: int | None, step: int) -> dict[str, int]:
    """Expires groups that wait to be drawn: those of old weights, then the oldest beyond the capacity.

    A group expires whole or not at all. It stays if any of its samples was trained on, was sealed (drawn by a batch) or
    is not admitted yet; such groups do not count towards the capacity.

    Args:
      before_version: groups of an older version expire; None: no age limit.
      capacity: maximum number of groups to keep, the newest by version and admission; None: unlimited.
      step: stamp of the change.

    Returns:
      Samples expired by reason: 'version', 'capacity'.
    """
    with self.transaction():
      expired = groups.to_evict(self._db, before_version=before_version, capacity=capacity, step=step)
      for reason, uids in expired.items():
        self._move(uids, State.EXPIRED, reason, step)
    return {reason: len(uids) for reason, uids in expired.items()}

  def seal(self, uids: Sequence[str], step: int) -> dict[str, segments.Ref]:
    """Returns the places of admitted samples in sealed segments; those in the open segment move to a new sealed one."""
    with self._lock:
      for entry in self._entries(uids).values():
        if entry.state not in (State.ADMITTED, State.TRAINED):
          raise ValueError(f'seal {entry.uid}: it is {entry.state}, only what was admitted can be sealed')
        if entry.partition == 'expert':
          raise ValueError(f'seal {entry.uid}: the bytes of expert rows are not in the store')
      refs = self._refs(uids)
      payloads = {uid: row for uid, row in self._open_rows(uids).items() if uid not in refs}
      new = [uid for uid in uids if uid not in refs]
      if missing := [uid for uid in new if uid not in payloads]:
        raise RunError(f'seal {missing[0]}: its bytes are in no segment; run the audit on {self.directory}')
      if new:
        (count,) = self._db.execute('SELECT count(*) FROM segments WHERE step = ?', (step,)).fetchone()
        name = f'{step:08d}-{self.attempt:03d}-{count:03d}{segments.SUFFIX}'
        segments.write_segment(self.directory / SEGMENTS, name, [payloads[uid][1] for uid in new])
        with self.transaction():
          self._db.execute('INSERT INTO segments VALUES (?,?,?,?)', (name, step, self.attempt, len(new)))
          self._db.executemany(
            'INSERT INTO segment_rows VALUES (?,?,?,?)',
            [(name, row, uid, payloads[uid][0]) for row, uid in enumerate(new)],
          )
          self._db.execute(f'DELETE FROM open_segment WHERE uid IN ({_NAMED})', (json.dumps(new),))
        refs.update({uid: (name, row) for row, uid in enumerate(new)})
      return {uid: refs[uid] for uid in uids}

  def trained(self, uids: Sequence[str], step: int) -> None:
    """Records that one batch trained on these samples: sealed ones, up to `max_uses` times, and expert rows."""
    with self.transaction():
      refs = self._refs(uids)
      for uid, entry in self._entries(uids).items():
        if entry.partition == 'usual' and uid not in refs:
          raise ValueError(f'trained {uid}: it was not sealed')
        if entry.partition == 'usual' and entry.uses >= self.max_uses:
          raise ValueError(f'trained {uid}: it was already used {entry.uses} times, max_uses is {self.max_uses}')
        if entry.state == State.TRAINED and entry.changed == step:
          raise ValueError(f'trained {uid}: the batch of step {step} has already trained on it')
      self._move(uids, State.TRAINED, '', step)

  def record_plan(self, step: int, plan: Any) -> None:
    """Stores the plan of batch `step` (batches completed before it) as JSON."""
    with self.transaction():
      self._db.execute('INSERT INTO plans VALUES (?,?,?)', (step, self.attempt, json.dumps(plan)))

  def recover(self, commit_step: int) -> dict[str, int]:
    """Undoes, at start-up and in one transaction, all changes after the commit. See the module docstring.

    Args:
      commit_step: name of the newest commit; 0 if there is none.

    Returns:
      Counts: changes, scores, plans … undone, samples made void, samples restored to the open segment, files
      set aside (`quarantine`).
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
      logging.info('replay: attempt %d starts from commit %d; undone: %s', self.attempt, commit_step, counts)
    return counts

  def prune(self, commit_step: int) -> int:
    """Deletes the bytes of samples dropped or expired before the commit; returns how many.

    Not done at the drop itself, which a crash would undo: pass the oldest commit that a start may return to.
    """
    with self.transaction():
      return self._db.execute(
        'DELETE FROM open_segment WHERE seq IN (SELECT o.seq FROM open_segment o CROSS JOIN samples s '
        "USING (uid, attempt) WHERE s.state IN ('dropped', 'expired') AND s.changed < ?)",
        (commit_step,),
      ).rowcount

  def flush(self) -> None:
    """Syncs all acknowledged changes to disk; call it before a checkpoint's COMMIT."""
    if self._full:
      return
    with self._lock:
      self._db.execute('PRAGMA synchronous=FULL')
      self.set_meta('flushed', {'attempt': self.attempt})  # its fsync covers the whole log before it
      self._db.execute('PRAGMA synchronous=NORMAL')

  def close(self) -> None:
    with self._lock:
      self.reader.close()
      self._db.close()

  def entries(self, uids: Sequence[str]) -> dict[str, Entry]:
    with self._lock:
      return self._entries(uids)

  def live(self, partition: Partition = 'usual') -> list[Entry]:
    """Samples of the partition that have not ended, from this and earlier attempts, in uid order."""
    with self._lock:
      rows = self._db.execute(
        f"{ENTRY} WHERE state IN ('issued', 'stored', 'admitted') AND partition = ? ORDER BY uid", (partition,)
      ).fetchall()
    return [entry_of(row) for row in rows]

  def candidates(self, step: int, *, oldest_version: int | None = None) -> list[Group]:
    """Groups that batch `step` can draw, in order of issue; the input of `draw`.

    All samples of such a group have ended or are admitted or trained, fewer than `max_uses` times and not in batch
    `step`; the admitted or trained ones are its `uids`, and have bytes. Expert rows are not drawn.

    Args:
      step: batches completed before this one.
      oldest_version: excludes groups of older versions, at little cost; None: no limit.
    """
    with self._lock:
      return groups.drawable(self._db, step=step, max_uses=self.max_uses, oldest_version=oldest_version)

  def sealed(self) -> list[list[str]]:
    """Sealed samples of the usual partition, by group; groups and samples in order of issue."""
    with self._lock:
      return groups.sealed(self._db)

  def visits(self, stages: Sequence[str]) -> dict[str, int]:
    """By task uid, the next visit number after the groups of these stages: how often they have drawn the task.

    Void samples do not count.
    """
    with self._lock:
      rows = self._db.execute(
        f'SELECT task_id, max(visit) + 1 FROM samples JOIN ({_NAMED}) stage '
        "ON group_id >= stage.value || '/' AND group_id < stage.value || '0' "  # '0' follows '/' in ASCII.
        "WHERE partition = 'usual' AND state != 'void' GROUP BY task_id",
        (json.dumps(list(stages)),),
      ).fetchall()
    return dict(rows)

  def scores(self, uids: Sequence[str]) -> dict[str, list[Score]]:
    """Newest score of each sample by each scorer, in the order in which they were given."""
    with self._lock:
      rows = self._db.execute(
        'SELECT uid, scorer, value, status, json FROM scores c WHERE uid IN '
        f'({_NAMED}) AND attempt = (SELECT max(attempt) FROM samples s WHERE s.uid = c.uid) ORDER BY seq',
        (json.dumps(list(uids)),),
      ).fetchall()
    newest: dict[str, dict[str, Score]] = {uid: {} for uid in uids}
    for uid, scorer, value, status, rest in rows:
      fields = json.loads(rest)
      fields['turn_values'] = tuple(fields['turn_values'])
      newest[uid].pop(scorer, None)
      newest[uid][scorer] = Score(uid=uid, scorer=scorer, value=value, status=Status(status), **fields)
    return {uid: list(by_scorer.values()) for uid, by_scorer in newest.items()}

  def derived(self, uids: Sequence[str], operator: str) -> dict[str, Json]:
    """Latest value that `operator` derived from each sample, in the order of `uids`; omits samples without one."""
    with self._lock:
      rows = self._db.execute(
        f'SELECT uid, json FROM derived WHERE uid IN ({_NAMED}) AND operator = ? ORDER BY seq',
        (json.dumps(list(uids)), operator),
      ).fetchall()
    latest = dict(rows)
    return {uid: json.loads(latest[uid]) for uid in uids if uid in latest}

  def read(self, uids: Sequence[str]) -> list[Sample]:
    """Reads accepted samples from the open and sealed segments, in the order of `uids`."""
    with self._lock:
      refs, rows = self._refs(uids), self._open_rows(uids)
    sealed = [uid for uid in uids if uid not in rows]
    if missing := [uid for uid in sealed if uid not in refs]:
      raise ValueError(f'read {missing[0]}: it has no bytes')
    samples = dict(zip(sealed, self.reader.read([refs[uid] for uid in sealed])))
    return [samples[uid] if uid in samples else decode(rows[uid][1]) for uid in uids]

  def plans(self, first_step: int = 0) -> dict[int, Any]:
    with self._lock:
      rows = self._db.execute('SELECT step, json FROM plans WHERE step >= ? ORDER BY step', (first_step,)).fetchall()
    return {step: json.loads(text) for step, text in rows}

  def meta(self, key: str) -> Any:
    """Value stored under `key`, or None. Not undone by `recover`."""
    with self._lock:
      row = self._db.execute('SELECT json FROM meta WHERE key = ?', (key,)).fetchone()
    return None if row is None else json.loads(row[0])

  def set_meta(self, key: str, value: Any) -> None:
    with self.transaction():
      self._db.execute('INSERT OR REPLACE INTO meta VALUES (?,?)', (key, json.dumps(value)))

  def counts(self) -> dict[str, int]:
    """Samples per state, over all partitions, and `duplicates`: results that came after another had been accepted."""
    with self._lock:
      by_state = dict(self._db.execute('SELECT state, sum(samples) FROM tallies GROUP BY state').fetchall())
      (duplicates,) = self._db.execute('SELECT count(*) FROM duplicates').fetchone()
    return {**{str(state): by_state.get(state, 0) for state in State}, 'duplicates': duplicates}

  def _entries(self, uids: Sequence[str] | Mapping[str, Any], missing: Literal['raise', 'skip'] = 'raise'):
    uids = list(uids)
    if len(set(uids)) != len(uids):
      raise ValueError(f'a uid is named twice in one call: {next(u for u in uids if uids.count(u) > 1)}')
    rows = self._db.execute(f'{ENTRY} WHERE uid IN ({_NAMED}) ORDER BY attempt', (json.dumps(uids),))
    entries = {row[0]: entry_of(row) for row in rows}  # the newest attempt's row comes last
    if missing == 'raise' and len(entries) < len(uids):
      raise ValueError(f'unknown uid {next(u for u in uids if u not in entries)}: it was never issued')
    return entries

  def _insert(self, rows: Sequence[Issue], partition: Partition, state: State, step: int) -> None:
    """Inserts new samples as issued and, if `state` differs, moves them to it at once."""
    for row in rows:
      if row.partition != partition:
        raise ValueError(f'{row.uid}: partition {row.partition!r}, wanted {partition!r}')
    changes = dict.fromkeys((State.ISSUED, state))
    last = [log(self._db, [(step, self.attempt, row.uid, change, '') for row in rows]) for change in changes][-1]
    admitted = step if state == State.ADMITTED else None
    self._db.executemany(
      _ISSUE,
      [
        (r.uid, self.attempt, r.group_id, r.task_id, r.visit, partition, step, state, step, seq, admitted)
        for r, seq in zip(rows, last)
      ],
    )

  def _move(self, uids: Sequence[str], state: State, reason: str, step: int) -> None:
    entries = self._entries(uids)
    for entry in entries.values():
      if not may_become(entry.partition, entry.state, state):
        raise ValueError(f'{entry.uid}: is {entry.state}, cannot become {state}')
      if step < entry.changed:
        raise ValueError(f'{entry.uid}: became {entry.state} at step {entry.changed}, cannot become {state} at {step}')
    last = log(self._db, [(step, entries[uid].attempt, uid, state, reason) for uid in uids])
    admitted, use = (step if state == State.ADMITTED else None), int(state == State.TRAINED)
    self._db.executemany(
      'UPDATE samples SET state = ?, changed = ?, last = ?, admitted = coalesce(?, admitted), uses = uses + ? '
      'WHERE uid = ? AND attempt = ?',
      [(state, step, seq, admitted, use, uid, entries[uid].attempt) for uid, seq in zip(uids, last)],
    )

  def _refs(self, uids: Sequence[str]) -> dict[str, segments.Ref]:
    rows = self._db.execute(
      f'SELECT uid, name, row FROM segment_rows WHERE uid IN ({_NAMED}) ORDER BY attempt', (json.dumps(list(uids)),)
    )
    return {uid: (name, row) for uid, name, row in rows}

  def _open_rows(self, uids: Sequence[str]) -> dict[str, tuple[int, bytes]]:
    rows = self._db.execute(
      f'SELECT uid, attempt, payload FROM open_segment WHERE uid IN ({_NAMED}) ORDER BY attempt',
      (json.dumps(list(uids)),),
    )
    return {uid: (attempt, payload) for uid, attempt, payload in rows}


def oldest_version(sample: Sample) -> int:
  """Step of the oldest weights that generated any part of the sample."""
  return min(segment.version.step for segment in sample.segments)


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
    max_uses: maximum batches that train on one sample of the usual partition; fixed for a store.
    synchronous: durability under power loss, see the module docstring.
  """
  directory = pathlib.Path(directory)
  path = directory / INDEX
  (directory / SEGMENTS).mkdir(parents=True, exist_ok=True)
  db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
  try:
    db.execute('PRAGMA journal_mode=WAL')
    db.execute('PRAGMA synchronous=FULL')
    db.execute('PRAGMA wal_autocheckpoint=8192')  # pages, 32 MB: index pages are rewritten many times
    db.execute('PRAGMA cache_size=-16384')  # KiB
    attempt = prepare(db, path, attempt, max_uses)
    db.execute(f'PRAGMA synchronous={synchronous.upper()}')
  except sqlite3.DatabaseError as error:
    db.close()
    raise UserError(f'replay store {path}: {error}; damaged, locked or not a store of this program') from error
  except UserError:
    db.close()
    raise
  return ReplayStore(directory, db, attempt=attempt, max_uses=max_uses, full=synchronous == 'full')
