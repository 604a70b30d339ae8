"""Bounded reading of untrusted files, JSON texts and msgpack data.

Invariant: a file is read into memory as a whole only up to a stated size. Only regular files are
opened, so a FIFO cannot block and a device cannot exhaust memory.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import pathlib
import re
import stat
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

MAX_DEPTH = 100
"""Maximum nesting depth of a JSON text, far below the depth at which Python's encoder fails."""
_CURLY = 0x20
"""Bit in which '{' differs from '[', and '}' from ']', in ASCII."""
_UNMARKED = bytes(byte for byte in range(256) if byte not in b'"[]{}')
"""All bytes except quotes and brackets."""
_PART = 1 << 17
"""Number of bytes examined at a time, few enough to fit into a processor's cache. Other threads can
run in between.
"""
_KINDS = {
  stat.S_IFIFO: 'a FIFO',
  stat.S_IFCHR: 'a character device',
  stat.S_IFBLK: 'a block device',
  stat.S_IFSOCK: 'a socket',
}


def check_regular(path: str | os.PathLike) -> int:
  """Returns the size of a regular file in bytes. Links are followed.

  Raises:
    ValueError: `path` is a FIFO, device or socket.
    OSError: `path` is a directory or does not exist.
  """
  status = os.stat(path)
  kind = stat.S_IFMT(status.st_mode)
  if kind == stat.S_IFDIR:
    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
  if kind != stat.S_IFREG:
    raise ValueError(f'{path} is {_KINDS.get(kind, "a special file")}, wanted a regular file')
  return status.st_size


def read_bytes(path: str | os.PathLike, limit_bytes: int) -> bytes:
  """Returns the content of a regular file of at most `limit_bytes`.

  Raises ValueError if the file is larger or not regular, and OSError if it cannot be read.
  """
  size = check_regular(path)
  if size > limit_bytes:
    raise ValueError(f'{path} has {size:,} bytes, wanted at most {limit_bytes:,}')
  # Non-blocking, in case a FIFO has replaced the file since the check.
  with open(path, 'rb', opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
    return file.read(size)


def parse_msgpack(data: bytes) -> Any:
  """Decodes msgpack data. Raises ValueError unless the data are exactly one value."""
  try:
    return msgpack.unpackb(data)
  except (msgpack.exceptions.UnpackException, ValueError, TypeError, OverflowError) as error:
    raise ValueError(f'{len(data)} bytes are not msgpack ({error})') from None


def path_inside(root: pathlib.Path, name: str) -> pathlib.Path:
  """Returns `root / name`. Raises ValueError if `name` is absolute or the path leads out of `root`.

  Links are followed. In huggingface_hub's cache, the files of a snapshot are links to the `blobs/`
  directory of their repository, so paths in this directory are accepted, too.
  """
  if pathlib.PurePath(name).is_absolute():
    raise ValueError(f'path {name!r} is absolute, wanted one relative to {root}')
  real_root = pathlib.Path(os.path.realpath(root))
  blobs = [
    parent.parent / 'blobs'
    for parent in (real_root, *real_root.parents)
    if parent.name == 'snapshots'
  ]
  if not any(
    pathlib.Path(os.path.realpath(root / name)).is_relative_to(place)
    for place in (real_root, *blobs)
  ):
    raise ValueError(f'path {name!r} leads out of {root}, wanted a file in it; copy the file there')
  return root / name


def parse_json(text: str, **hooks: Callable[[str], Any]) -> Any:
  """Parses a JSON text.

  Args:
    text: JSON nested at most `MAX_DEPTH` levels deep.
    hooks: hooks of `json.loads`, such as `parse_constant`.

  Raises:
    ValueError: `text` is not JSON, or is nested too deeply.
  """
  try:
    value = json.loads(text, **hooks)
  except RecursionError:
    raise ValueError(_TOO_DEEP) from None
  check_depth(value)
  return value


_TOKENS = re.compile(rb'"(?:[^"\\\n]|\\.)*+"|[\[\]{}]')
"""Matches a JSON string, or a bracket outside of strings."""
_STRINGS = re.compile(rb'"[^"]*"')
"""Matches a JSON string without backslashes."""


def check_file_depth(path: str | os.PathLike) -> None:
  """Checks the nesting depth of a JSON file without reading the whole file into memory.

  Deeply nested JSON crashes some parsers, so call this function before them. The file may contain
  one JSON value, or one value per line.

  Raises:
    ValueError: a value is nested deeper than `MAX_DEPTH` levels, or `path` is not a regular file.
    OSError: the file cannot be read.
  """
  if not check_regular(path):
    return  # An empty file cannot be mapped.
  with (
    open(path, 'rb') as file,
    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
  ):
    depth = 0
    for token in _TOKENS.finditer(content):
      match token[0]:
        case b'[' | b'{':
          depth += 1
        case b']' | b'}':
          depth -= 1
      if depth > MAX_DEPTH:
        raise ValueError(f'{path}, byte {token.start()}: {_TOO_DEEP}')


def check_object(text: bytes) -> None:
  """Checks the brackets of a large JSON text, so that parsers that crash on invalid nesting can
  read it safely. The text must be one object, nested at most `MAX_DEPTH` levels deep.

  Raises ValueError if the brackets are invalid. Everything else is left to the parser.
  """
  text = text.strip()
  if not (text.startswith(b'{') and text.endswith(b'}')):
    raise ValueError('not a JSON object')
  if b'\\' in text:
    text = b''.join(token for token in _TOKENS.findall(text) if len(token) == 1)
  parts = (text[start : start + _PART] for start in range(0, len(text), _PART))
  marks = b''.join(part.translate(None, _UNMARKED) for part in parts)
  marks = marks.replace(b'""', b'')  # Most strings have no brackets.
  if b'"' in marks:
    marks = _STRINGS.sub(b'', marks)
  if b'"' in marks:
    raise ValueError('an incomplete JSON object')
  brackets = np.frombuffer(marks, np.uint8)
  steps = np.where((brackets | _CURLY) == ord('{'), np.int32(1), np.int32(-1))
  depths = np.add.accumulate(steps)
  if depths.max() > MAX_DEPTH:
    raise ValueError(_TOO_DEEP)
  if depths[:-1].min() < 1:
    raise ValueError('more than one JSON value')
  if depths[-1]:
    raise ValueError('an incomplete JSON object')


def check_depth(value: Any) -> None:
  """Raises ValueError if lists and dicts in `value` are nested deeper than `MAX_DEPTH` levels."""
  level = [value]
  for _ in range(MAX_DEPTH + 1):
    containers = [item for item in level if isinstance(item, list | dict)]
    if not containers:
      return
    level = [
      child for item in containers for child in (item.values() if isinstance(item, dict) else item)
    ]
  raise ValueError(_TOO_DEEP)


_TOO_DEEP = f'nested more than {MAX_DEPTH} levels deep; wanted a flatter value'
