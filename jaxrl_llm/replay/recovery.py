"""Crash recovery: rolls the index back to the newest commit and accounts for the samples lost.

Invariant: afterwards the index holds what it held at the commit, with one exception: samples that
were not accepted by then are `void`, with reason `crash`, under the attempt that issued them. No
sample's row is ever deleted.
"""

from __future__ import annotations

import json
import sqlite3

from jaxrl_llm.replay.segments import SegmentReader, decode_row
from jaxrl_llm.replay.tables import State, log

_UNDONE = {
  'transitions': "AND state NOT IN ('issued', 'void')",
  'scores': '',
  'derived': '',
  'plans': '',
  'duplicates': '',
  'open_segment': '',
}
"""Tables whose rows since the commit are deleted, each with a further condition on these rows."""

_OF_SAMPLE = 'FROM transitions t WHERE t.uid = samples.uid AND t.attempt = samples.attempt'
_REPEAT = f"""
UPDATE samples SET
  (state, changed, last) = (SELECT t.state, t.step, t.seq {_OF_SAMPLE} ORDER BY t.seq DESC LIMIT 1),
  version = CASE WHEN EXISTS (SELECT 1 {_OF_SAMPLE} AND t.state = 'stored') THEN version END,
  admitted = (SELECT t.step {_OF_SAMPLE} AND t.state = 'admitted'),
  uses = (SELECT count(*) {_OF_SAMPLE} AND t.state = 'trained')
WHERE uid = ? AND attempt = ?"""
"""Recomputes the columns of `samples` that repeat transitions, after transitions were deleted."""


def undo(
  db: sqlite3.Connection, reader: SegmentReader, *, commit_step: int, attempt: int
) -> dict[str, int]:
  """Undoes the changes stamped at or after `commit_step`, inside the caller's transaction.

  Returns the number of rows deleted from each table, of samples moved back to the open segment
  (`restored`), and of samples that became void (`void`).

  Args:
    db: the index.
    reader: reader of the segments whose seals are undone.
    commit_step: step of the newest commit.
    attempt: the attempt that is starting; the processes of earlier ones have ended.
  """
  counts = {'restored': _unseal(db, reader, commit_step)}
  moved = db.execute(
    'SELECT DISTINCT uid, attempt FROM transitions INDEXED BY transitions_at WHERE step >= ? '
    f'{_UNDONE["transitions"]}',
    (commit_step,),
  ).fetchall()
  for table, which in _UNDONE.items():
    counts[table] = db.execute(
      f'DELETE FROM {table} WHERE step >= ? {which}', (commit_step,)
    ).rowcount
  db.executemany(_REPEAT, moved)
  # Samples issued after the commit, or before it but not accepted by then, are all at `issued`
  # again; no live process works on them.
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


def _unseal(db: sqlite3.Connection, reader: SegmentReader, commit_step: int) -> int:
  """Undoes seals: moves the bytes of samples accepted before the commit to the open segment."""
  rows = db.execute(
    'SELECT r.name, r.row, r.uid, r.attempt, t.step FROM segments g CROSS JOIN segment_rows r '
    'USING (name) '
    # CROSS JOIN fixes the join order, so that the indexes are used
    'CROSS JOIN transitions t ON t.uid = r.uid AND t.attempt = r.attempt '
    "WHERE t.state = 'stored' AND t.step < :commit AND g.step >= :commit ORDER BY t.seq",
    {'commit': commit_step},
  ).fetchall()
  payloads = reader.read_bytes([(name, row) for name, row, *_ in rows])
  for (name, row, *_), payload in zip(rows, payloads):  # verified, since the file is discarded
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
