"""Counts the verdicts in a store's inbox: used, waiting, unused or lost."""

from __future__ import annotations

import collections
import json
import os
import sqlite3
from typing import NamedTuple

from jaxrl_llm.replay import inbox
from jaxrl_llm.replay.tables import AWAITED, State


class Feedback(NamedTuple):
  """Numbers of verdicts in the inbox, in total and by status."""

  verdicts: int
  waiting: int
  """Number of verdicts that are not used yet, because the groups of their samples still wait for
  rewards or for a batch.
  """
  used: int
  """Number of verdicts that became part of a score."""
  unused: int
  """Number of verdicts that were not used, because their sample was dropped or was scored without
  them.
  """
  lost: int
  """Number of verdicts on samples that were lost in a crash."""
  problems: list[str]

  @property
  def line(self) -> str:
    if not self.verdicts and not self.problems:
      return ''
    return (
      f'verdicts {self.verdicts} = used {self.used} + waiting {self.waiting} + unused {self.unused}'
      f' + lost {self.lost}'
    )


def account(index: sqlite3.Connection, directory: str | os.PathLike) -> Feedback:
  """Counts the verdicts in the inbox by status, and compares them with the scores in the index.

  Args:
    index: snapshot of the store's index.
    directory: directory of the store.
  """
  states = {
    (uid, attempt): state
    for uid, attempt, state in index.execute(
      'SELECT s.uid, s.attempt, s.state FROM samples s WHERE EXISTS (SELECT 1 FROM derived d WHERE '
      'd.uid = s.uid AND d.attempt = s.attempt AND d.operator = ?)',
      (AWAITED,),
    )
  }
  scored = _scored(index)
  counts: collections.Counter[str] = collections.Counter()
  problems, known = [], set()
  for given in inbox.given(directory):
    known.add((given.uid, given.attempt, given.scorer, given.who, given.value))
    state = states.get((given.uid, given.attempt))
    if [given.who, given.value] in scored.get((given.uid, given.attempt, given.scorer), ()):
      counts['used'] += 1
    elif state == State.AWAITING:
      counts['waiting'] += 1
    elif state is None:
      counts['lost'] += 1
      if not _was_issued(index, given.uid, given.attempt):
        problems.append(
          f'{given.uid} (attempt {given.attempt}): has a verdict but was never issued'
        )
    else:
      counts['unused'] += 1
  problems += [
    f'{uid} (attempt {attempt}): its score of {scorer} is based on a verdict of {who}, {value}, '
    'which is not in the inbox'
    for (uid, attempt, scorer), verdicts in scored.items()
    for who, value in verdicts
    if (uid, attempt, scorer, who, value) not in known
  ]
  kinds = ('waiting', 'used', 'unused', 'lost')
  return Feedback(counts.total(), *(counts[kind] for kind in kinds), problems)


def _scored(index: sqlite3.Connection) -> dict[tuple[str, int, str], list[list]]:
  """Returns the verdicts that became part of scores as lists [name of the judge, value], keyed by
  (uid, attempt, scorer).
  """
  rows = index.execute(
    'SELECT c.uid, c.attempt, c.scorer, c.json FROM derived d JOIN scores c USING (uid, attempt) '
    "WHERE d.operator = ? AND c.scorer IN (SELECT key FROM json_each(d.json, '$.scorers'))",
    (AWAITED,),
  )
  return {
    (uid, attempt, scorer): json.loads(text)['evidence'].get('verdicts', [])
    for uid, attempt, scorer, text in rows
  }


def _was_issued(index: sqlite3.Connection, uid: str, attempt: int) -> bool:
  row = index.execute('SELECT 1 FROM samples WHERE uid = ? AND attempt = ?', (uid, attempt))
  return row.fetchone() is not None
