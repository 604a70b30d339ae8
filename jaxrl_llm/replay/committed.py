"""Checks, before a resumed run writes anything, that the store has everything that the commit
needs.
"""

from __future__ import annotations

import json
import pathlib

from jaxrl_llm.replay.browse import snapshot
from jaxrl_llm.replay.journal import JOURNAL
from jaxrl_llm.replay.quarantine import files, listed
from jaxrl_llm.replay.segments import is_whole
from jaxrl_llm.replay.tables import INDEX, QUARANTINE, SEGMENTS


def missing(directory: pathlib.Path, *, step: int, store: str | None) -> list[str]:
  """Returns a phrase for each missing part of the store that a commit needs. Truncated segments
  count as missing; the content of their rows is not checked.

  Writes nothing.

  Args:
    directory: directory of the store.
    step: step of the commit, that is, the number of batches completed by then; above 0.
    store: name of the store that the commit was made with. None if an older program version, which
      did not record the name, made the commit.

  Raises:
    UserError: the index is damaged, or was not written by this program.
  """
  if not (directory / INDEX).is_file():
    remedy = ' (jaxrl buffer --rebuild recreates it)' if (directory / JOURNAL).is_file() else ''
    return [f'{directory / INDEX}{f" (store {store})" if store else ""}{remedy}']
  with snapshot(directory) as (db, _):
    row = db.execute("SELECT json FROM meta WHERE key = 'store'").fetchone()
    began = db.execute("SELECT json FROM meta WHERE key = 'began'").fetchone()
    (plans,) = db.execute('SELECT count(*) FROM plans WHERE step < ?', (step,)).fetchone()
    named = dict(
      db.execute('SELECT name, rows FROM segments WHERE step < ? ORDER BY name', (step,))
    )
  current = json.loads(row[0]) if row else None
  if store is not None and current != store:
    return [
      f'store {store} ({directory / INDEX} is '
      f'{f"store {current}" if current else "an older store without a name"})'
    ]
  batches = step - (json.loads(began[0]) if began else 0)
  if plans < batches:
    return [
      f'{batches - plans} of the plans of {batches} batches (is {directory / INDEX} an older copy?)'
    ]
  there = files(directory, SEGMENTS)
  gone = [name for name in named if name not in there]
  cut = [
    name
    for name, rows in named.items()
    if name in there and not is_whole(directory / SEGMENTS / name, rows)
  ]
  aside = len(files(directory, QUARANTINE).keys() & set(gone))
  of = f'of {len(named)} sealed segments in {directory / SEGMENTS}'
  phrases = []
  if gone:
    move = f' ({aside} of them in {QUARANTINE}/: move them back)' if aside else ''
    phrases.append(f'{of} {listed(gone)}{move}')
  if cut:
    phrases.append(f'{of} {listed(cut)}: damaged, or without the rows that the index lists')
  return phrases
