"""SQLite files in a store's directory, to which processes other than the run append rows."""

from __future__ import annotations

import contextlib
import pathlib
import sqlite3
from collections.abc import Iterator, Sequence

from jaxrl_llm.core.errors import RunError, UserError


@contextlib.contextmanager
def open_inbox(
  path: pathlib.Path, *, tables: Sequence[str], schema: int, content: str
) -> Iterator[sqlite3.Connection]:
  """Opens an inbox, creating it if necessary. A transaction is on disk once it is committed.

  Args:
    tables: SQL statements that create the tables.
    schema: number of the schema, which the file must have.
    content: kind of the rows, such as 'verdict', for error messages.

  Raises:
    UserError: the file is damaged or has another schema.
    RunError: the file cannot be read or written.
  """
  try:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=10.0)) as db:
      # With EXTRA, SQLite also makes the deletion of its rollback journal durable.
      db.execute('PRAGMA synchronous=EXTRA')
      (version,) = db.execute('PRAGMA user_version').fetchone()
      if version == 0:
        db.execute('BEGIN IMMEDIATE')
        for statement in (*tables, f'PRAGMA user_version = {schema}'):
          db.execute(statement)
        db.execute('COMMIT')
      elif version != schema:
        raise UserError(
          f'inbox {path}: schema {version}, this program reads {schema}; use the program version '
          'that wrote it'
        )
      yield db
  except sqlite3.OperationalError as error:
    raise RunError(
      f'inbox {path}: {error}; no {content} that was acknowledged is lost: free disk space, check '
      'the permissions of the directory, and submit the others again'
    ) from error
  except sqlite3.DatabaseError as error:
    raise UserError(f'inbox {path}: {error}; it is damaged: restore it from a backup') from error


def copy_inbox(source: sqlite3.Connection, target: pathlib.Path) -> None:
  """Copies an open inbox to a new file."""
  with contextlib.closing(sqlite3.connect(target)) as copied:
    source.backup(copied)
