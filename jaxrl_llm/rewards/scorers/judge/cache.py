"""Cache of judges' answers, so that each question is paid for only once.

Invariant: `get` returns only answers that were written completely, by this run or by another run
that uses the same file.
"""

from __future__ import annotations

import contextlib
import json
import pathlib

from absl import logging

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Json

_CACHE_ENTRIES = 100_000
"""Maximum number of answers in memory, each of about a kilobyte. The oldest answers are evicted
first.
"""


class Cache:
  """Judges' answers, keyed by the digest of the request.

  If there is a file, it has one JSON line per answer, and other runs can use it.
  """

  def __init__(self, file: str | None):
    self._path = None if file is None else pathlib.Path(file)
    self._entries: dict[str, dict[str, Json]] = {}
    self._file = None

  def open(self) -> None:
    """Loads the file, skipping malformed lines. Raises UserError if the file cannot be used."""
    if self._path is None:
      return
    try:
      self._file = self._path.open('a+', encoding='utf-8', errors='backslashreplace')
      self._file.seek(0)
      last = ''
      for last in self._file:
        with contextlib.suppress(ValueError, KeyError, TypeError):
          line = json.loads(last)
          self._keep(line['key'], dict(line['answer']))
      if last and not last.endswith('\n'):
        self._file.write('\n')
    except OSError as error:
      raise UserError(
        f"scorer 'judge': cache_file {self._path}: cannot be used ({error})"
      ) from None

  def close(self) -> None:
    if self._file is not None:
      self._file.close()

  def get(self, key: str) -> dict[str, Json] | None:
    return self._entries.get(key)

  def put(self, key: str, answer: dict[str, Json]) -> None:
    self._keep(key, answer)
    if self._file is None:
      return
    try:
      self._file.write(json.dumps({'key': key, 'answer': answer}, ensure_ascii=False) + '\n')
      self._file.flush()
    except OSError as error:
      logging.warning(
        'Judge: cache_file %s cannot be written (%s): continuing without it', self._path, error
      )
      self._file = None

  def _keep(self, key: str, answer: dict[str, Json]) -> None:
    self._entries[key] = answer
    if len(self._entries) > _CACHE_ENTRIES:
      del self._entries[next(iter(self._entries))]
