"""Connection to the SQLite index: transactions, lock, and queries that reads and writes share."""

from __future__ import annotations

import contextlib
import json
import pathlib
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.replay.segments import Ref
from jaxrl_llm.replay.tables import ENTRY, INDEX, Entry, entry_of

NAMED = 'SELECT value FROM json_each(?)'
"""Subquery for the values of a JSON array."""


class Connection:
  """One process's connection to a store's index; thread-safe.

  Attributes:
    directory: holds the index and the segments.
    attempt: number of this start of the run.
    max_uses: maximum number of batches that train on one sample of partition `usual`.
    db: SQLite connection, for use under `lock` or in a `transaction`.
  """

  def __init__(
    self, directory: pathlib.Path, db: sqlite3.Connection, *, attempt: int, max_uses: int
  ):
    self.directory, self.db, self.attempt, self.max_uses = directory, db, attempt, max_uses
    self.lock = threading.RLock()
    self._depth = 0

  @contextlib.contextmanager
  def transaction(self) -> Iterator[None]:
    """Makes the calls in the block one atomic transaction, with one fsync.

    The block holds the store's lock: it must not await, and exceptions must leave the block.
    """
    with self.lock:
      if self._depth:
        yield
        return
      self._depth = 1
      try:
        self.db.execute('BEGIN IMMEDIATE')
        yield
        self.db.execute('COMMIT')
      except sqlite3.IntegrityError:  # a bug in this program
        raise
      except sqlite3.DatabaseError as error:
        raise RunError(
          f'replay store {self.directory / INDEX}: {error}; nothing acknowledged is lost: free '
          'disk space, end other processes that write to this run directory, and start again with '
          'the same command'
        ) from error
      finally:
        self._depth = 0
        if self.db.in_transaction:
          self.db.execute('ROLLBACK')

  def entries(
    self, uids: Sequence[str] | Mapping[str, Any], missing: Literal['raise', 'skip'] = 'raise'
  ) -> dict[str, Entry]:
    """Returns the row of each uid's newest attempt, keyed by uid.

    Raises ValueError for a repeated uid and, if `missing` is 'raise', for an unknown one.
    """
    uids = list(uids)
    if len(set(uids)) != len(uids):
      raise ValueError(
        f'a uid is named twice in one call: {next(u for u in uids if uids.count(u) > 1)}'
      )
    rows = self.db.execute(f'{ENTRY} WHERE uid IN ({NAMED}) ORDER BY attempt', (json.dumps(uids),))
    entries = {row[0]: entry_of(row) for row in rows}  # the newest attempt's row comes last
    if missing == 'raise' and len(entries) < len(uids):
      raise ValueError(
        f'unknown uid {next(u for u in uids if u not in entries)}: it was never issued'
      )
    return entries

  def places(self, uids: Sequence[str]) -> dict[str, Ref]:
    """Returns file and row of those of the samples that are sealed, keyed by uid."""
    rows = self.db.execute(
      f'SELECT uid, name, row FROM segment_rows WHERE uid IN ({NAMED}) ORDER BY attempt',
      (json.dumps(list(uids)),),
    )
    return {uid: (name, row) for uid, name, row in rows}

  def open_rows(self, uids: Sequence[str]) -> dict[str, tuple[int, bytes]]:
    """Returns the attempt and bytes of these samples that are in the open segment, keyed by uid."""
    rows = self.db.execute(
      f'SELECT uid, attempt, payload FROM open_segment WHERE uid IN ({NAMED}) ORDER BY attempt',
      (json.dumps(list(uids)),),
    )
    return {uid: (attempt, payload) for uid, attempt, payload in rows}
