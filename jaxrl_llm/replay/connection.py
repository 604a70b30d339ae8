"""Connection to a store's SQLite index: transactions, a lock, and the queries that readers and the
writer share.
"""

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
"""SQL subquery that yields the values of a JSON array, given as its parameter."""


class Connection:
  """Thread-safe connection of this process to a store's index.

  Attributes:
    directory: directory with the index and the segments.
    attempt: number of this attempt (start of the run).
    max_uses: maximum number of batches that may train on one sample of partition `usual`.
    db: SQLite connection, to be used under `lock` or in a `transaction`.
  """

  def __init__(
    self, directory: pathlib.Path, db: sqlite3.Connection, *, attempt: int, max_uses: int
  ):
    self.directory, self.db, self.attempt, self.max_uses = directory, db, attempt, max_uses
    self.lock = threading.RLock()
    self.sealing = threading.Lock()
    """Lock that is held while a segment file is written. It is acquired before `lock`."""
    self._depth = 0

  @contextlib.contextmanager
  def transaction(self) -> Iterator[None]:
    """Makes all calls in the block one atomic transaction, with at most one fsync.

    The block holds the store's lock, so it must not await. It must not catch exceptions of the
    calls, because only an exception that leaves the block rolls the transaction back.
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
      except sqlite3.IntegrityError:  # This error indicates a bug in this program.
        raise
      except sqlite3.DatabaseError as error:
        raise RunError(
          f'replay store {self.directory / INDEX}: {error}; no acknowledged change is lost: free '
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
    """Returns the index row of each sample, keyed by uid, in the order of `uids`. If several
    attempts (starts of the run) have issued a sample, the newest row is returned.

    Raises ValueError for a repeated uid and, if `missing` is 'raise', for an unknown uid.
    """
    uids = list(uids)
    if len(set(uids)) != len(uids):
      raise ValueError(
        f'a uid is given twice in one call: {next(u for u in uids if uids.count(u) > 1)}'
      )
    rows = self.db.execute(f'{ENTRY} WHERE uid IN ({NAMED}) ORDER BY attempt', (json.dumps(uids),))
    # Rows are sorted by attempt, so the newest row of a uid replaces the earlier rows.
    newest = {row[0]: entry_of(row) for row in rows}
    entries = {uid: newest[uid] for uid in uids if uid in newest}
    if missing == 'raise' and len(entries) < len(uids):
      raise ValueError(
        f'unknown uid {next(u for u in uids if u not in entries)}: it was never issued'
      )
    return entries

  def places(self, uids: Sequence[str]) -> dict[str, Ref]:
    """Returns (file name, row) of each sample in a sealed segment file, keyed by uid. Other samples
    are skipped.
    """
    rows = self.db.execute(
      f'SELECT uid, name, row FROM segment_rows WHERE uid IN ({NAMED}) ORDER BY attempt',
      (json.dumps(list(uids)),),
    )
    return {uid: (name, row) for uid, name, row in rows}

  def open_rows(self, uids: Sequence[str]) -> dict[str, tuple[int, bytes]]:
    """Returns (attempt, bytes) of each sample in the open segment, a table of the index, keyed by
    uid. Other samples are skipped.
    """
    rows = self.db.execute(
      f'SELECT uid, attempt, payload FROM open_segment WHERE uid IN ({NAMED}) ORDER BY attempt',
      (json.dumps(list(uids)),),
    )
    return {uid: (attempt, payload) for uid, attempt, payload in rows}
