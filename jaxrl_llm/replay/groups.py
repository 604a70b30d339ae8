"""Queries of the index that return whole groups: those that can be drawn, evicted, or read again.

Invariant: the queries for drawing and evicting list a group with all its admitted and trained
samples, or not at all.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable

from jaxrl_llm.replay.draw import Group
from jaxrl_llm.replay.tables import BETWEEN_ADDED, EXPERT

_READY = 'SELECT seq, group_id, uid, partition, version, uses, admitted'
_GROUPS = """
SELECT group_id, json_group_array(uid), json_group_array(seq), min(version), max(uses), max(used),
max(admitted)
FROM ({ready}) AS r WHERE partition = 'usual' GROUP BY group_id HAVING NOT EXISTS
(SELECT 1 FROM samples m {barred})"""
_WAITING = f"{_READY}, NULL AS used FROM samples WHERE state = 'admitted' AND changed <= :step"
# SQLite has no statistics from which it could choose good query plans. INDEXED BY makes it use an
# index instead of scanning the whole table.
_DRAWABLE_GROUPS = _GROUPS.format(
  ready=f'{_WAITING} AND version >= :oldest UNION ALL '
  f'{_READY}, changed FROM samples INDEXED BY samples_used '
  "WHERE state = 'trained' AND uses < :max_uses AND changed < :step AND version >= :oldest",
  barred=(
    "WHERE m.group_id = r.group_id AND (m.state IN ('issued', 'partial', 'stored', 'awaiting') "
    'OR m.changed > :step OR '
    "(m.state IN ('admitted', 'trained') AND m.version < :oldest) OR (m.state = 'trained' AND "
    '(m.uses >= :max_uses OR m.changed = :step)))'
  ),
)
_WAITING_GROUPS = _GROUPS.format(
  ready=_WAITING,
  barred='LEFT JOIN segment_rows b ON b.uid = m.uid AND b.attempt = m.attempt '
  "WHERE m.group_id = r.group_id AND (m.state IN ('issued', 'partial', 'stored', 'awaiting') "
  'OR m.changed > :step OR '
  'b.uid IS NOT NULL)',
)
_SEALED = """
SELECT group_id, uid FROM samples s JOIN segment_rows r USING (uid, attempt)
WHERE partition = 'usual' AND state IN ('admitted', 'trained') ORDER BY s.seq"""

_ADDED = f"""
SELECT s.uid FROM samples s JOIN derived d USING (uid, attempt)
WHERE s.uid {BETWEEN_ADDED} AND s.partition = 'expert'
AND s.state IN ('admitted', 'trained') AND s.uses < :max_uses
AND (s.state = 'admitted' OR s.changed < :step)
AND d.operator = '{EXPERT}' AND json_extract(d.json, '$.length') <= :longest
ORDER BY s.uses, s.seq"""


def added(db: sqlite3.Connection, *, step: int, max_uses: int, longest: int) -> list[str]:
  """Returns the uids of the added expert rows that can be drawn for the batch of `step`, least used
  rows first (see `ReplayStore.added`).
  """
  limits = {'step': step, 'max_uses': max_uses, 'longest': longest}
  return [uid for (uid,) in db.execute(_ADDED, limits)]


def drawable(
  db: sqlite3.Connection, *, step: int, max_uses: int, oldest_version: int | None
) -> list[Group]:
  """Returns the groups that can be drawn for the batch of `step`. `ReplayStore.candidates` states
  the conditions.
  """
  oldest = 0 if oldest_version is None else oldest_version
  return _groups(
    db.execute(_DRAWABLE_GROUPS, {'step': step, 'max_uses': max_uses, 'oldest': oldest})
  )


def to_evict(
  db: sqlite3.Connection, *, before_version: int | None, capacity: int | None, step: int
) -> dict[str, list[str]]:
  """Returns the uids of the samples that should expire, keyed by reason ('version' or 'capacity').
  `StepWriter.evict` states the conditions.
  """
  waiting = _groups(db.execute(_WAITING_GROUPS, {'step': step}))
  waiting.sort(key=lambda group: (group.version, group.admitted, group.issued))
  old = [
    group for group in waiting if before_version is not None and group.version < before_version
  ]
  kept = waiting[len(old) :]
  over = [] if capacity is None else kept[: max(len(kept) - capacity, 0)]

  def uids(groups):
    return [uid for group in groups for uid in group.uids]

  return {'version': uids(old), 'capacity': uids(over)}


def sealed(db: sqlite3.Connection) -> list[list[str]]:
  """Returns the uids of the policy's samples in sealed segment files that are admitted or trained,
  one list per group, in the order in which they were issued.
  """
  groups: dict[str, list[str]] = {}
  for group, uid in db.execute(_SEALED):
    groups.setdefault(group, []).append(uid)
  return [*groups.values()]


def _groups(rows: Iterable[tuple]) -> list[Group]:
  """Builds groups from query rows, sorted by the order in which they were issued."""
  groups = []
  for group_id, uids, seqs, *rest in rows:
    members = sorted(zip(json.loads(seqs), json.loads(uids)))
    groups.append(Group(group_id, tuple(uid for _, uid in members), *rest, members[0][0]))
  return sorted(groups, key=lambda group: group.issued)
