"""Copies of stores, for branches and archives.

A branch is a run that begins with a commit of another run, its parent. Its store is a copy of the
parent's store, or an empty store that begins with the step of the commit. An archive has a copy of
the run's own store.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import secrets
import sqlite3

from jaxrl_llm.core.disk import link_or_copy, sync
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.replay import experts, inbox
from jaxrl_llm.replay.browse import snapshot
from jaxrl_llm.replay.index import open_store
from jaxrl_llm.replay.journal import forget
from jaxrl_llm.replay.tables import INDEX, SEGMENTS

_NEEDED = """
SELECT name FROM segments g WHERE step < :commit OR EXISTS (
  SELECT 1 FROM segment_rows r JOIN transitions t ON t.uid = r.uid AND t.attempt = r.attempt
  WHERE r.name = g.name AND t.state = 'stored' AND t.step < :commit) ORDER BY name"""
"""SQL query for the segments that contain samples accepted before a commit."""


def copy(source: pathlib.Path, target: pathlib.Path, *, commit: int, max_uses: int) -> None:
  """Copies a store, its inbox and its added expert rows, possibly while they are being written to.

  The copy gets a new name. Sealed segments become hard links where possible. When a run starts with
  the copy, it undoes the changes after the commit. Plans of batches after the commit, and the
  parent's records of undone work, are not copied.

  Args:
    source: directory of the store.
    target: directory of the copy, which must not exist.
    commit: step of the commit with which the copy will be used.
    max_uses: maximum number of batches that may train on one sample in the copy.

  Raises:
    UserError: the store is damaged, lacks a segment, or allows more than `max_uses` uses of a
      sample; or the copy of the index cannot be written.
  """
  (target / SEGMENTS).mkdir(parents=True)
  # The inbox is copied before the index, so that the copied index contains the sample of each
  # copied verdict.
  inbox.copy(source, target)
  with snapshot(source) as (index, _):
    with contextlib.closing(sqlite3.connect(target / INDEX)) as copied:
      _back_up(index, copied, target)
      (before,) = copied.execute("SELECT json FROM meta WHERE key = 'max_uses'").fetchone()
      if max_uses < json.loads(before):
        raise UserError(
          f'replay store {source}: its samples may be used {before} times, but the branch allows '
          f'only {max_uses}; add --reset_store, or keep the value of past.max_uses'
        )
      copied.executemany(
        'INSERT OR REPLACE INTO meta VALUES (?,?)',
        [('store', json.dumps(secrets.token_hex(8))), ('max_uses', json.dumps(max_uses))],
      )
      # `ReplayStore.undone_until` must not count batches of the parent: in the branch, no crash has
      # undone them.
      copied.execute('DELETE FROM plans WHERE step >= ?', (commit,))
      copied.execute('UPDATE attempts SET counts = NULL')
      forget(copied)
      copied.commit()
    # Expert rows are copied after the index, so that the copy has each row that the copied index
    # records as taken.
    experts.copy(source, target)
    for (name,) in index.execute(_NEEDED, {'commit': commit}).fetchall():
      if pathlib.PurePath(name).name != name:
        raise UserError(
          f'replay store {source}: damaged: its segment {name!r} is outside of the store; branch '
          'with --reset_store'
        )
      try:
        link_or_copy(source / SEGMENTS / name, target / SEGMENTS / name)
      except FileNotFoundError:
        raise UserError(
          f'replay store {source}: its segment {name} is missing; restore it, or branch with '
          '--reset_store'
        ) from None
  for part in (target / INDEX, target / SEGMENTS, target):
    sync(part)


def mirror(source: pathlib.Path, target: pathlib.Path, *, commit: int) -> None:
  """Copies the parts of a store that a commit needs, possibly while the store is being written to.

  In contrast to `copy`, the copy keeps the store's name, so that the run itself can resume with it.

  Args:
    source: directory of the store.
    target: directory of the copy, which must not exist.
    commit: step of the commit with which the copy will be used.

  Raises:
    UserError: the store is damaged, or the copy of the index cannot be written.
  """
  (target / SEGMENTS).mkdir(parents=True)
  inbox.copy(source, target)
  with snapshot(source) as (index, _):
    with contextlib.closing(sqlite3.connect(target / INDEX)) as copied:
      _back_up(index, copied, target)
      forget(copied)
      copied.commit()
    experts.copy(source, target)
    for (name,) in index.execute(_NEEDED, {'commit': commit}).fetchall():
      link_or_copy(source / SEGMENTS / name, target / SEGMENTS / name)


def _back_up(index: sqlite3.Connection, copied: sqlite3.Connection, target: pathlib.Path) -> None:
  try:
    index.backup(copied)
  except sqlite3.OperationalError as error:
    raise UserError(
      f'{target / INDEX}: cannot be written ({error}); free disk space, then run the same command '
      'again'
    ) from error


def begin(directory: pathlib.Path, *, step: int, max_uses: int) -> None:
  """Creates an empty store for a run that has completed `step` batches."""
  store = open_store(directory, max_uses=max_uses)
  store.set_meta('began', step)
  store.close()


def name(directory: pathlib.Path) -> str:
  """Returns the unique name of a store, by which commits refer to it."""
  with snapshot(directory) as (index, _):
    (text,) = index.execute("SELECT json FROM meta WHERE key = 'store'").fetchone()
  return json.loads(text)
