"""Sealed segments: immutable ArrayRecord files with one record per encoded sample.

A sample is addressed by the name of its file and its row.

Invariant: a file under its final name is complete and verified, and both the file and its directory
entry are on disk. A writer that dies leaves at most a `.tmp` file, which the index never lists.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import threading
from collections.abc import Iterator, Sequence

from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from jaxrl_llm.core.disk import sync
from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.records.sample import Sample, decode
from jaxrl_llm.core.records.span import Span, decode_span

SEALED = 'replay/segments'
"""Directory of a store's sealed segments (immutable files of samples), relative to the run
directory.
"""
SUFFIX = '.arrayrecord'
RESTORE_INDEX = 'rebuild the index (jaxrl buffer --rebuild), or branch with --init_from'
"""Remedy that error messages about damaged or missing spans give."""
Ref = tuple[str, int]
"""Location of a sealed sample: (file name in the segments directory, row number)."""

# ArrayRecord compresses rows in groups, and must decode a whole group to read one row. Each group
# therefore has one row.
_WRITER = 'group_size:1'
_READER = 'readahead_buffer_size:0,max_parallelism:0'
# Exceptions that ArrayRecordReader raises for a missing or damaged file.
_UNREADABLE = (RuntimeError, ValueError, IndexError, OSError)


class SegmentError(RunError):
  """Raised if a segment cannot be written, or if a row of a segment cannot be read or decoded."""


def write_segment(
  directory: str | os.PathLike, name: str, payloads: Sequence[bytes]
) -> pathlib.Path:
  """Writes the segment `directory/name`, replacing any file of that name. When the function
  returns, the file is complete, verified and on disk. Raises SegmentError if it cannot be written.
  """
  path = pathlib.Path(directory) / name
  temporary = path.with_name(path.name + '.tmp')
  try:
    writer = ArrayRecordWriter(str(temporary), _WRITER)
    for payload in payloads:
      writer.write(payload)
    writer.close()
    _verify(temporary, payloads)
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)
  except _UNREADABLE as error:
    temporary.unlink(missing_ok=True)
    raise SegmentError(
      f'segment {path}: {len(payloads)} rows could not be written: {_first_line(error)}; is the '
      'disk full? Nothing is lost: free space and start again with the same command'
    ) from error
  return path


def _verify(path: pathlib.Path, payloads: Sequence[bytes]) -> None:
  reader = ArrayRecordReader(str(path), _READER)
  try:
    rows = (
      reader.read(list(range(len(payloads)))) if reader.num_records() == len(payloads) else None
    )
  finally:
    reader.close()
  if rows != list(payloads):
    raise ValueError('rows read back differ from rows written')


def is_whole(path: pathlib.Path, rows: int) -> bool:
  """Returns whether a file is a complete segment with this number of rows. The content of the rows
  is not checked.
  """
  try:
    reader = ArrayRecordReader(str(path), _READER)
    try:
      return reader.num_records() == rows
    finally:
      _close(reader)
  except _UNREADABLE:
    return False


def _first_line(error: Exception) -> str:
  return (str(error).splitlines() or [type(error).__name__])[0]


class _OpenFile:
  """An open file, and the number of threads that are reading it."""

  def __init__(self, reader: ArrayRecordReader):
    self.reader, self.users = reader, 0


class SegmentReader:
  """Random access to the rows of sealed segments.

  The reader keeps the most recently used files open. Several threads may read at the same time,
  even from the same file. A pickled reader contains only the directory.
  """

  def __init__(self, directory: str | os.PathLike, *, max_open: int = 64):
    self._directory = pathlib.Path(directory)
    self._max_open = max_open
    self._open: collections.OrderedDict[str, _OpenFile] = collections.OrderedDict()
    self._lock = threading.Lock()

  def read(self, refs: Sequence[Ref]) -> list[Sample]:
    """Reads the samples at `refs`, in that order. Raises SegmentError if a row cannot be read or is
    not a sample.
    """
    payloads = self.read_bytes(refs)
    return [
      decode_row(payload, f'segment {self._directory / name}, row {row}')
      for (name, row), payload in zip(refs, payloads)
    ]

  def read_each(self, refs: Sequence[Ref]) -> list[Sample | SegmentError]:
    """Reads the samples at `refs`, in that order. The result has an error in the place of each
    sample that cannot be read.
    """
    try:
      return [*self.read(refs)]
    except SegmentError as error:
      if len(refs) == 1:
        return [error]
    # If any row is unreadable, the whole read fails, so bisection is used to find that row.
    half = len(refs) // 2
    return self.read_each(refs[:half]) + self.read_each(refs[half:])

  def read_bytes(self, refs: Sequence[Ref]) -> list[bytes]:
    by_file: dict[str, list[int]] = {}
    for place, (name, _) in enumerate(refs):
      by_file.setdefault(name, []).append(place)
    payloads: list[bytes] = [b''] * len(refs)
    for name, places in by_file.items():
      rows = [refs[place][1] for place in places]
      for place, payload in zip(places, self._read_file(name, rows)):
        payloads[place] = payload
    return payloads

  def close(self) -> None:
    """Closes all files. No thread may be reading at that time."""
    with self._lock:
      while self._open:
        _close(self._open.popitem()[1].reader)

  def _read_file(self, name: str, rows: list[int]) -> list[bytes]:
    try:
      with self._opened(name) as reader:
        count = reader.num_records()
        if count and not 0 <= min(rows) <= max(rows) < count:
          raise IndexError(f'it has {count} rows')
        return reader.read(rows)
    except _UNREADABLE as error:
      raise SegmentError(
        f'segment {self._directory / name}: rows {rows[:3]}{"…" if len(rows) > 3 else ""} cannot '
        f'be read: {_first_line(error)}; the file is damaged or missing: restore it, or branch '
        'with --init_from'
      ) from error

  @contextlib.contextmanager
  def _opened(self, name: str) -> Iterator[ArrayRecordReader]:
    """Opens a file for the duration of the block. Afterwards closes files that no thread is
    reading, the least recently used first, until at most `max_open` are open.
    """
    with self._lock:
      if name not in self._open:
        path = self._directory / name
        if not path.is_file():
          raise FileNotFoundError('no such file')
        self._open[name] = _OpenFile(ArrayRecordReader(str(path), _READER))
      self._open.move_to_end(name)
      file = self._open[name]
      file.users += 1
    try:
      yield file.reader
    finally:
      with self._lock:
        file.users -= 1
        excess = len(self._open) - self._max_open
        idle = [name for name, file in self._open.items() if not file.users]
        for name in idle[: max(0, excess)]:
          _close(self._open.pop(name).reader)

  def __reduce__(self):
    return (open_segment_reader, (self._directory,))


def _close(reader: ArrayRecordReader) -> None:
  # For a damaged file, close() raises the same error as reading.
  with contextlib.suppress(RuntimeError):
    reader.close()


def decode_row(payload: bytes, where: str) -> Sample:
  """Decodes a sample. If the bytes are not a sample, raises a SegmentError that names `where`."""
  try:
    return decode(payload)
  except (ValueError, TypeError, KeyError, AttributeError) as error:
    raise SegmentError(f'{where}: not a sample: {_first_line(error)}; restore the file') from error


def decode_span_row(payload: bytes, where: str) -> Span:
  """Decodes a span. If the bytes are not a span, raises a SegmentError that names `where`."""
  try:
    return decode_span(payload)
  except ValueError as error:
    raise SegmentError(f'{where}: {_first_line(error)}; {RESTORE_INDEX}') from error


def open_segment_reader(directory: str | os.PathLike) -> SegmentReader:
  """Returns a reader of `directory`, usually `<workdir>/replay/segments`. Files are opened when
  they are first read.
  """
  return SegmentReader(directory)
