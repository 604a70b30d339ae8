"""Crash recovery: restores the index as of the newest commit, and records which samples were lost.

Invariant: after recovery, the index is as it was at the commit, apart from the tables `meta`,
`attempts` and `tasks`, which are not restored, and with two exceptions.
Samples that were neither accepted nor had a stored span at the commit are `void`, with the reason
`crash`. They keep the number of the attempt (start of the run) that issued them. Samples that began
to wait for delayed rewards after the commit continue to wait if the weights of the commit or
earlier weights generated them: people may be judging these samples already, and new samples would
be no better.
Rows of `samples` are never deleted.
"""

from __future__ import annotations

import json
import sqlite3

from jaxrl_llm.replay.segments import SegmentReader, decode_row
from jaxrl_llm.replay.tables import AWAITED, State, log

_UNDONE = {
  'transitions': "AND state NOT IN ('issued', 'void')",
  'scores': '',
  'derived': '',
  'plans': '',
  'duplicates': '',
  'open_segment': '',
  'partials': '',
}
"""Tables from which rows with the commit's step or a later step are deleted. Each value is an
additional SQL condition on these rows.
"""

_KEPT = f"""
CREATE TEMP TABLE kept AS SELECT uid, attempt, t.seq, d.json FROM transitions t JOIN derived d
USING (uid, attempt) WHERE t.state = 'awaiting' AND t.step >= :commit AND d.operator = '{AWAITED}'
AND json_extract(d.json, '$.newest_version') <= :commit"""
"""SQL statement that creates the table `kept`, which lists the samples that continue to wait for
rewards after recovery.
"""
_NOT_KEPT = {
  'transitions': 'k.seq >= t.seq',
  'scores': "t.scorer NOT IN (SELECT key FROM json_each(k.json, '$.scorers'))",
  'derived': f"t.operator = '{AWAITED}'",
  'open_segment': 'TRUE',
}
"""SQL conditions, keyed by table (t), that are true for rows that must not be deleted although
their step is that of the commit or later. These rows belong to samples in `kept` (k), and were
written no later than the moment at which the sample began to wait.
"""

_OF_SAMPLE = 'FROM transitions t WHERE t.uid = samples.uid AND t.attempt = samples.attempt'
_REPEAT = f"""
UPDATE samples SET
  (state, changed, last) = (SELECT t.state, t.step, t.seq {_OF_SAMPLE} ORDER BY t.seq DESC LIMIT 1),
  version = CASE WHEN EXISTS (SELECT 1 {_OF_SAMPLE} AND t.state = 'stored') THEN version END,
  admitted = (SELECT t.step {_OF_SAMPLE} AND t.state = 'admitted'),
  uses = (SELECT count(*) {_OF_SAMPLE} AND t.state = 'trained')
WHERE uid = ? AND attempt = ?"""
"""SQL statement that recomputes the columns of `samples` that follow from the transitions. It runs
after transitions were deleted.
"""


def undo(
  db: sqlite3.Connection,
  reader: SegmentReader,
  *,
  commit_step: int,
  attempt: int,
  keep_waiting: bool,
) -> dict[str, int]:
  """Undoes the changes whose step is at least `commit_step`, inside the caller's transaction.

  Returns the number of rows deleted from each table, and the numbers of samples that were moved
  back to the open segment (`restored`), of samples that became void (`void`) and of samples that
  continue to wait for rewards although they began to wait after the commit (`kept`).

  Args:
    db: the index.
    reader: reader of the sealed segments.
    commit_step: step of the newest commit.
    attempt: number of this attempt (start of the run). The processes of earlier attempts have
      ended.
    keep_waiting: whether samples that began to wait for rewards after the commit continue to wait.
  """
  kept = _keep(db, commit_step, keep_waiting=keep_waiting)
  counts = {'restored': _unseal(db, reader, commit_step)}
  moved = db.execute(
    'SELECT DISTINCT uid, attempt FROM transitions INDEXED BY transitions_at WHERE step >= ? '
    f'{_UNDONE["transitions"]}',
    (commit_step,),
  ).fetchall()
  for table, which in _UNDONE.items():
    counts[table] = db.execute(
      f'DELETE FROM {table} AS t WHERE step >= ? {which} AND NOT EXISTS (SELECT 1 FROM kept k '
      f'WHERE k.uid = t.uid AND k.attempt = t.attempt AND {_NOT_KEPT[table]})'
      if kept and table in _NOT_KEPT
      else f'DELETE FROM {table} WHERE step >= ? {which}',
      (commit_step,),
    ).rowcount
  if kept:
    for table in (*_NOT_KEPT, 'samples'):
      db.execute(
        f'UPDATE {table} SET step = ? WHERE step > ? AND (uid, attempt) IN (SELECT uid, attempt '
        'FROM kept)',
        (commit_step, commit_step),
      )
  counts['kept'] = kept
  db.execute('DROP TABLE kept')
  db.executemany(_REPEAT, moved)
  # All samples without a result or a stored span at the commit are now in state `issued`, whether
  # they were issued before or after the commit. The processes that worked on them have ended.
  lost = db.execute(
    "SELECT attempt, uid FROM samples WHERE state = 'issued' AND attempt < ?", (attempt,)
  ).fetchall()
  voided = log(db, [(commit_step, dead, uid, State.VOID, 'crash') for dead, uid in lost])
  db.executemany(
    "UPDATE samples SET state = 'void', changed = ?, last = ? WHERE attempt = ? AND uid = ?",
    [(commit_step, seq, dead, uid) for seq, (dead, uid) in zip(voided, lost)],
  )
  counts['void'] = len(lost)
  db.execute(
    'UPDATE attempts SET commit_step = ?, counts = ? WHERE attempt = ?',
    (commit_step, json.dumps(counts), attempt),
  )
  return counts


def _keep(db: sqlite3.Connection, commit_step: int, *, keep_waiting: bool) -> int:
  """Lists the samples that continue to wait for rewards in the table `kept`. Returns their
  number.
  """
  db.execute(_KEPT, {'commit': commit_step})
  if not keep_waiting:
    db.execute('DELETE FROM kept')
  (count,) = db.execute('SELECT count(*) FROM kept').fetchone()
  return count


def _unseal(db: sqlite3.Connection, reader: SegmentReader, commit_step: int) -> int:
  """Undoes the sealing of segments since the commit. Samples that were accepted before the commit,
  or that continue to wait for rewards, move back to the open segment, a table of the index. Returns
  the number of moved samples.
  """
  rows = db.execute(
    'SELECT r.name, r.row, r.uid, r.attempt, t.step FROM segments g CROSS JOIN segment_rows r '
    'USING (name) '
    # CROSS JOIN fixes the order of the joins, which makes SQLite use the indexes.
    'CROSS JOIN transitions t ON t.uid = r.uid AND t.attempt = r.attempt '
    "WHERE t.state = 'stored' AND g.step >= :commit AND (t.step < :commit OR EXISTS (SELECT 1 FROM "
    'kept k WHERE k.uid = r.uid AND k.attempt = r.attempt)) ORDER BY t.seq',
    {'commit': commit_step},
  ).fetchall()
  payloads = reader.read_bytes([(name, row) for name, row, *_ in rows])
  # The bytes are verified, because the segment file will no longer be used.
  for (name, row, *_), payload in zip(rows, payloads):
    decode_row(payload, f'segment {name}, row {row}')
  db.executemany(
    'INSERT INTO open_segment(step, attempt, uid, payload) VALUES (?,?,?,?)',
    [(stored, dead, uid, payload) for (_, _, uid, dead, stored), payload in zip(rows, payloads)],
  )
  db.execute(
    'DELETE FROM segment_rows WHERE name IN (SELECT name FROM segments WHERE step >= ?)',
    (commit_step,),
  )
  db.execute('DELETE FROM segments WHERE step >= ?', (commit_step,))
  return len(rows)
