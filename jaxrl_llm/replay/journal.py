"""Journal: an append-only copy of the index, from which `rebuild` reconstructs a damaged index.

When a row of the index changes, a trigger adds the row to the table `unjournaled`, in the same
transaction. A write to the journal appends the current content of these rows to the file, and
clears the table. Writes take place before each commit, after a recovery and when the store is
closed. Of the samples' bytes, the journal contains only those that were in the open segment or in
spans of partial samples at the time of a write. Sealed samples are in their segments.

Invariants:
- The file is a sequence of writes. Applying the first n writes, in order, gives the index as of the
nth write. The journal lacks the table `tallies`, whose counts follow from the samples.
- A write is valid only if its last frame is complete. Each frame contains its length and digest.
An incomplete write is overwritten by the next one.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sqlite3
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import msgpack
import xxhash

from jaxrl_llm.core.disk import sync
from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.replay.connection import Connection
from jaxrl_llm.replay.tables import INDEX

JOURNAL = 'journal'
"""Name of the journal file in the store's directory."""
DAMAGED = f'{INDEX}.damaged'
"""Name under which `rebuild` keeps the previous index; a number follows if the name is taken."""
_UNTRACKED = ('unjournaled', 'journal', 'tallies')
_HEADER = struct.Struct('<Q?Q')
"""Header of a frame: length of its content, whether it is compressed, and its 64-bit xxh3
digest.
"""
_ROWS_AT_ONCE = 64
_COMPRESSED_BYTES = 1024
"""Frames of fewer than `_ROWS_AT_ONCE` times this number of bytes are compressed."""
_SMALL_BYTES = 64 << 20
"""Size in bytes up to which a journal is never considered too large."""
_LARGEST_RATIO = 2
"""Ratio of the journal's size to the index's size above which the journal is replaced when a run
starts.
"""
_STATEMENTS = ('CREATE TABLE ', 'CREATE INDEX ', 'CREATE UNIQUE INDEX ', 'CREATE TRIGGER ')


class Rebuilt(NamedTuple):
  """Results of `rebuild`."""

  writes: int
  """Number of journal writes that were applied to the new index."""
  ignored: int
  """Number of bytes after the last complete write, from an interrupted write or damage."""
  aside: tuple[str, ...]
  """Names under which the files of the previous index are kept."""


def attach(db: sqlite3.Connection, directory: pathlib.Path) -> None:
  """Installs the triggers that record changed rows. If the index needs a new journal, all rows
  count as changed, so that the next write creates a complete journal.
  """
  db.execute('BEGIN IMMEDIATE')
  db.execute(
    'CREATE TABLE IF NOT EXISTS unjournaled(id INTEGER PRIMARY KEY, name TEXT NOT NULL, row '
    'INTEGER NOT NULL)'
  )
  db.execute('CREATE TABLE IF NOT EXISTS journal(bytes INTEGER NOT NULL, schema INTEGER NOT NULL)')
  names = _tracked(db)
  triggers = db.execute(
    "SELECT tbl_name FROM sqlite_master WHERE type = 'trigger' AND name LIKE 'journal_of_%'"
  )
  watched = {name for (name,) in triggers}
  for name in names:
    for event, row in (('INSERT', 'new'), ('UPDATE', 'new'), ('DELETE', 'old')):
      db.execute(
        f'CREATE TRIGGER IF NOT EXISTS journal_of_{name}_{event.lower()} AFTER {event} ON {name} '
        f"BEGIN INSERT INTO unjournaled(name, row) VALUES ('{name}', {row}.rowid); END"
      )
  if _is_renewed(db, directory / JOURNAL):
    forget(db)
    db.execute('INSERT INTO journal VALUES (0, 0)')
    watched = set()
  for name in names:
    if name not in watched:
      db.execute(f"INSERT INTO unjournaled(name, row) SELECT '{name}', rowid FROM {name}")
  db.execute('COMMIT')


def _is_renewed(db: sqlite3.Connection, path: pathlib.Path) -> bool:
  """Returns whether the next write must create a new journal: there is none yet, the file is
  damaged or shorter than the index records, or it has become much larger than the index. May read
  the whole file.
  """
  written = db.execute('SELECT bytes FROM journal').fetchone()
  if written is None or (path.stat().st_size if path.exists() else 0) < written[0]:
    return True
  (size,) = db.execute(
    'SELECT page_count * page_size FROM pragma_page_count, pragma_page_size'
  ).fetchone()
  if written[0] > max(_SMALL_BYTES, _LARGEST_RATIO * size):
    return True
  # A write that follows damaged bytes would be lost, because `rebuild` stops reading at the damage.
  return written[0] > 0 and all(end != written[0] for end, *_ in _bodies(path, written[0]))


def forget(db: sqlite3.Connection) -> None:
  """Disconnects the index from its journal: in a copied store, which has no journal yet, or before
  a new journal is begun.
  """
  for name in ('unjournaled', 'journal'):
    if db.execute('SELECT 1 FROM sqlite_master WHERE name = ?', (name,)).fetchone():
      db.execute(f'DELETE FROM {name}')


class Journal:
  """Writer of a store's journal. It is thread-safe, and holds the store's lock only to note that a
  write is complete.
  """

  def __init__(self, connection: Connection):
    self._connection, self._path = connection, connection.directory / JOURNAL
    self._writing = threading.Lock()

  def write(self) -> None:
    """Appends all rows that have changed since the last write. When the method returns, they are on
    disk. Raises RunError if the file cannot be written.
    """
    index = (self._connection.directory / INDEX).resolve().as_uri()
    with (
      self._writing,
      contextlib.closing(
        sqlite3.connect(f'{index}?mode=ro', uri=True, isolation_level=None, timeout=5.0)
      ) as db,
    ):
      db.execute('BEGIN')  # Takes a snapshot of the index. Other connections can still write to it.
      (start, schema) = db.execute('SELECT bytes, schema FROM journal').fetchone()
      (last,) = db.execute('SELECT coalesce(max(id), 0) FROM unjournaled').fetchone()
      (current,) = db.execute('PRAGMA schema_version').fetchone()
      if not last and current == schema:
        return
      try:
        end = self._append(db, start, with_schema=current != schema)
      except OSError as error:
        raise RunError(
          f'replay store {self._path}: {error.strerror}; no acknowledged change is lost: free disk '
          'space and start again with the same command'
        ) from error
      with self._connection.transaction():
        self._connection.db.execute('DELETE FROM unjournaled WHERE id <= ?', (last,))
        self._connection.db.execute('UPDATE journal SET bytes = ?, schema = ?', (end, current))

  def _append(self, db: sqlite3.Connection, start: int, *, with_schema: bool) -> int:
    """Writes the changed rows at an offset of the file. Returns the offset after them."""
    # A new journal replaces the previous one only once it is complete.
    path = self._path if start else self._path.with_name(f'{JOURNAL}.tmp')
    with path.open('r+b' if start else 'wb') as file:
      file.truncate(start)
      file.seek(start)
      for name in _tracked(db):
        for content in _changed(db, name):
          _write_frame(file, content)
      _write_frame(file, {'end': True, 'schema': _schema(db) if with_schema else None})
      file.flush()
      os.fsync(file.fileno())
      end = file.tell()
    if not start:
      os.replace(path, self._path)
      sync(path.parent)
    return end


def readable(directory: pathlib.Path) -> int:
  """Returns the number of bytes of the journal up to the end of its last complete write."""
  path = directory / JOURNAL
  return _survey(path)[0] if path.is_file() else 0


def rebuild(directory: str | os.PathLike) -> Rebuilt:
  """Reconstructs the index from the journal, and keeps the previous index under another name.

  No run may use the store meanwhile. Afterwards, the next start of the run, or an audit, compares
  the index with the segments.

  Raises:
    UserError: there is no journal, it has no complete write or unexpected content, or the new index
      cannot be written.
  """
  directory = pathlib.Path(directory)
  path, new = directory / JOURNAL, directory / f'{INDEX}.tmp'
  if not path.is_file():
    raise UserError(
      f'replay store {path}: no such file, so the index cannot be rebuilt; restore {INDEX}, or '
      'branch with --init_from'
    )
  new.unlink(missing_ok=True)
  try:
    end, writes, schema = _survey(path)
    if not writes:
      raise UserError(
        f'replay store {path}: damaged from its beginning; restore it or {INDEX}, or branch with '
        '--init_from'
      )
    with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as db:
      _fill(db, path, end, schema)
    sync(new)
  except (OSError, sqlite3.Error, ValueError, KeyError, TypeError) as error:
    new.unlink(missing_ok=True)
    raise UserError(
      f'replay store {path}: the index cannot be rebuilt ({error}); free disk space, or restore '
      f'{INDEX}'
    ) from error
  aside = _set_aside(directory)
  os.replace(new, directory / INDEX)
  sync(directory)
  return Rebuilt(writes, path.stat().st_size - end, tuple(aside))


def _tracked(db: sqlite3.Connection) -> list[str]:
  names = db.execute(
    "SELECT name FROM main.sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER "
    'BY name'
  )
  return [name for (name,) in names if name not in _UNTRACKED]


def _schema(db: sqlite3.Connection) -> list[str]:
  statements = db.execute(
    'SELECT sql FROM main.sqlite_master WHERE sql IS NOT NULL AND '
    "name NOT LIKE 'journal_of_%' AND name NOT IN ('unjournaled', 'journal')"
  )
  return [sql for (sql,) in statements]


def _changed(db: sqlite3.Connection, name: str) -> Iterator[dict[str, Any]]:
  """Yields the content of a table's changed rows, in batches. Deleted rows are listed under
  `gone`.
  """
  cursor = db.execute(
    f'SELECT c.row, t.rowid IS NULL, t.* FROM (SELECT DISTINCT row FROM unjournaled WHERE name = '
    f'?) c LEFT JOIN {name} t ON t.rowid = c.row ORDER BY c.row',
    (name,),
  )
  columns = [column for column, *_ in cursor.description[2:]]
  while rows := cursor.fetchmany(_ROWS_AT_ONCE):
    yield {
      'table': name,
      'columns': columns,
      'rows': [[row, *values] for row, is_gone, *values in rows if not is_gone],
      'gone': [row for row, is_gone, *_ in rows if is_gone],
    }


def _write_frame(file: BinaryIO, content: dict[str, Any]) -> None:
  body = msgpack.packb(content)
  # The only large rows are tokens and logprobs, which hardly compress.
  if is_small := len(body) < _ROWS_AT_ONCE * _COMPRESSED_BYTES:
    body = zlib.compress(body, 1)
  file.write(_HEADER.pack(len(body), is_small, xxhash.xxh3_64_intdigest(body)))
  file.write(body)


def _frames(path: pathlib.Path, end: int) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields (offset after the frame, content) of each frame before `end`, up to the first that is
  damaged.
  """
  for offset, body, is_compressed in _bodies(path, end):
    yield offset, msgpack.unpackb(zlib.decompress(body) if is_compressed else body)


def _bodies(path: pathlib.Path, end: int) -> Iterator[tuple[int, bytes, bool]]:
  """Yields (offset after the frame, raw content, whether the content is compressed) of each frame
  before `end`, up to the first that is damaged.
  """
  with path.open('rb') as file:
    while len(header := file.read(_HEADER.size)) == _HEADER.size:
      length, is_compressed, digest = _HEADER.unpack(header)
      if file.tell() + length > end:
        return
      body = file.read(length)
      if xxhash.xxh3_64_intdigest(body) != digest:
        return
      yield file.tell(), body, is_compressed


def _survey(path: pathlib.Path) -> tuple[int, int, list[str]]:
  """Returns the offset after the last complete write, the number of complete writes, and the SQL
  statements that create the tables as of that write.
  """
  end, writes, schema = 0, 0, []
  for offset, content in _frames(path, path.stat().st_size):
    if 'end' in content:
      end, writes, schema = offset, writes + 1, content['schema'] or schema
  return end, writes, schema


def _fill(db: sqlite3.Connection, path: pathlib.Path, end: int, schema: Sequence[str]) -> None:
  if foreign := [sql for sql in schema if not sql.startswith(_STATEMENTS)]:
    raise ValueError(f'its schema has the statement {foreign[0][:40]!r}')
  db.execute('PRAGMA synchronous=OFF')
  db.execute('BEGIN')
  triggers = [sql for sql in schema if sql.startswith('CREATE TRIGGER ')]
  for sql in schema:
    if sql not in triggers:
      db.execute(sql)
  names = set(_tracked(db))
  for _, content in _frames(path, end):
    if 'end' not in content and content['table'] in names:
      _apply(db, **content)
  db.execute(
    'INSERT INTO tallies SELECT partition, state, count(*) FROM samples GROUP BY partition, state'
  )
  # The triggers are created only now, because otherwise they would count the restored rows.
  for sql in triggers:
    db.execute(sql)
  db.execute('COMMIT')
  attach(db, path.parent)
  db.execute('DELETE FROM unjournaled')
  (version,) = db.execute('PRAGMA schema_version').fetchone()
  db.execute('UPDATE journal SET bytes = ?, schema = ?', (end, version))


def _apply(
  db: sqlite3.Connection,
  *,
  table: str,
  columns: Sequence[str],
  rows: Sequence[Sequence[Any]],
  gone: Sequence[int],
) -> None:
  db.executemany(f'DELETE FROM {table} WHERE rowid = ?', [(row,) for row in gone])
  known = {name for _, name, *_ in db.execute(f'PRAGMA table_info({table})')}
  if not known.issuperset(columns):
    raise ValueError(f'its table {table} has the columns {columns}, wanted {sorted(known)}')
  db.executemany(
    f'INSERT OR REPLACE INTO {table}(rowid, {", ".join(columns)}) VALUES '
    f'({", ".join("?" * (1 + len(columns)))})',
    rows,
  )


def _set_aside(directory: pathlib.Path) -> list[str]:
  """Renames the files of the previous index. The write-ahead log comes first: if it were left
  behind, SQLite would apply it to the new index.
  """
  suffixes = [
    suffix for suffix in ('-wal', '-shm', '') if (directory / f'{INDEX}{suffix}').exists()
  ]
  number, name = 1, DAMAGED
  while any((directory / f'{name}{suffix}').exists() for suffix in ('-wal', '-shm', '')):
    number, name = number + 1, f'{DAMAGED}.{number}'
  for suffix in suffixes:
    os.replace(directory / f'{INDEX}{suffix}', directory / f'{name}{suffix}')
  return [f'{name}{suffix}' for suffix in suffixes]
