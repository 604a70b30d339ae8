"""Inputs for fuzzing: valid inputs that are changed in their structure or in their bytes.

A change leaves most of an input valid, so that the later checks are reached too.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import pathlib
import resource
import signal
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgpack
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SEEDED, MANY = 40, 10_000
COUNTS = pytest.mark.parametrize(
  'count',
  [pytest.param(SEEDED, marks=pytest.mark.full), pytest.param(MANY, marks=pytest.mark.acceptance)],
)
"""Number of inputs of each kind: SEEDED in the full tier, MANY in the acceptance tier."""
_HANGS_S = 120
"""Seconds after which an input counts as hanging. No input should come near this limit."""
_MEMORY_KIB = 1 << 20
"""Maximum growth of a fuzzed process's peak memory, in KiB."""
_LINE = 4096
"""Maximum number of characters of a line in a log or an answer."""


def fuzz(check: Callable[..., None], count: int, **strategies: st.SearchStrategy) -> None:
  """Calls `check` with `count` inputs, the same ones in every session."""
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  how = settings(
    max_examples=count,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[*HealthCheck],
    report_multiple_bugs=False,
  )
  how(given(**strategies)(check))()
  grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
  assert grown < _MEMORY_KIB, f'the peak of memory has grown by {grown} KiB'


@contextlib.contextmanager
def bounded(seconds: float = _HANGS_S) -> Iterator[None]:
  """Fails a block that takes longer than `seconds`."""

  def give_up(number: int, frame: types.FrameType | None) -> None:
    raise AssertionError(f'no end after {seconds} s')

  before = signal.signal(signal.SIGALRM, give_up)
  signal.setitimer(signal.ITIMER_REAL, seconds)
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def check_line(text: str) -> None:
  """Checks that a message is one readable line without a traceback."""
  assert text and len(text) <= _LINE, (len(text), text[:200])
  assert len(text.splitlines()) == 1, text[:_LINE]
  assert 'Traceback' not in text, text


class Quiet(logging.Handler):
  """Collects log messages, and those that are faulty."""

  def __init__(self):
    super().__init__(logging.INFO)
    self.lines: list[str] = []
    self.faults: list[str] = []

  def emit(self, record: logging.LogRecord) -> None:
    text = record.getMessage()
    self.lines.append(text)
    if record.exc_info or 'Traceback' in text or len(text.splitlines()) > 1 or len(text) > _LINE:
      self.faults.append(f'{record.name}: {text[:_LINE]} {record.exc_info}')

  def check(self) -> None:
    """Raises AssertionError if a traceback, several lines or an overlong line was logged. Forgets
    all messages.
    """
    faults, self.faults, self.lines = self.faults, [], []
    assert not faults, faults[0]


@contextlib.contextmanager
def quiet() -> Iterator[Quiet]:
  """Yields a collector of all log messages of the block."""
  handler, root = Quiet(), logging.getLogger()
  root.addHandler(handler)
  try:
    yield handler
  finally:
    root.removeHandler(handler)


def state_of(directory: pathlib.Path) -> dict[str, str]:
  """Returns a digest of every file below a directory, keyed by path. The values of directories and
  links are their kinds.
  """
  found = {}
  for path in sorted(directory.rglob('*')):
    kind = 'link' if path.is_symlink() else 'directory' if path.is_dir() else None
    found[str(path.relative_to(directory))] = kind or xxhash.xxh3_128_hexdigest(path.read_bytes())
  return found


LONG = 'x' * 100_000
TEXTS = (
  '', ' ', '\n', '\0', '\t\v\f', '\x1b[2J', 'a\r\nb: c', '\u2028', '\ud800', 'a\udfffb',
  '\U0001f600' * 3, LONG, '../../../etc/passwd', '/dev/zero', '/', '.', '..', '~', '%s%n%d',
  '{0.__class__}', '{', '{{', '}', '{x!z}', '{x:999999999999}', '{{ 1 / 0 }}',
  '{% for i in range(10**12) %}{% endfor %}', 'NaN', '1e999', '-1', 'true', 'null', '[]',
  '\N{RIGHT-TO-LEFT OVERRIDE}', '\ufeff', '\\', '"', "'", '<script>', '$(touch x)',
  '__import__("os")', '(' * 500, '9' * 5000, '\\frac' * 50, 'a' * 30 + '!', 'unix:/', 'http://[',
  'http://127.0.0.1:1/', 'data:;base64,!', 'é' * 9,
)  # fmt: skip
NUMBERS = (
  0, 1, -1, 2, 3, 0.0, -0.0, 0.5, -0.5, 1.5, 7, 63, 64, 65, 255, 256, 65536, 2**31 - 1, 2**31,
  -(2**31) - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400, 1e-320,
  1e16, 1e38, 1e39, 1e308, -1e308, float('nan'), float('inf'), float('-inf'),
)  # fmt: skip
ODD = (
  None,
  True,
  False,
  [],
  {},
  [[]],
  [None],
  {'': None},
  [{}],
  {'a': {'b': {'c': []}}},
  [1, 'a', None],
  ['a'] * 300,
)
_JSON = {
  'deep': b'[' * 5000 + b']' * 5000,
  'deep objects': b'{"a":' * 5000 + b'1' + b'}' * 5000,
  'levels': b'[' * 200 + b']' * 200,
  'digits': b'1' * 5000,
  'exponent': b'1e400',
  'control': b'"\x01"',
  'escape': b'"\\u12"',
  'surrogates': b'"\\udc00\\ud800"',
  'comma': b'[1,]',
  'latin': b'"\xff\xfe"',
  'twice': b'{"a": 1, "a": [2]}',
  'nothing': b'',
}
_MSGPACK = {
  'deep': b'\x91' * 5000 + b'\xc0',
  'deep objects': b'\x81\xa1a' * 5000 + b'\xc0',
  'levels': b'\x91' * 200 + b'\xc0',
  'digits': b'\xcf' + b'\xff' * 8,
  'exponent': b'\xcb\x7f\xef' + b'\xff' * 6,
  'control': b'\xc1',
  'escape': b'\xd6\xff\xff\xff\xff\xff',
  'surrogates': b'\xa3\xed\xa0\x80',
  'comma': b'\xdd\xff\xff\xff\xff',
  'latin': b'\xa2\xff\xfe',
  'twice': b'\x82\xa1a\x01\xa1a\x02',
  'nothing': b'',
}
_RAW = tuple(f'@raw {name}@' for name in _JSON)
"""Placeholders for bytes that no encoder writes. `json_bytes` and `msgpack_bytes` replace them."""


def leaves() -> st.SearchStrategy[Any]:
  """Returns a strategy of hostile values."""
  return st.one_of(
    st.sampled_from(TEXTS),
    st.sampled_from(NUMBERS),
    st.sampled_from(ODD).map(copy.deepcopy),
    st.sampled_from(_RAW),
    st.text(max_size=12),
    st.integers(),
    st.floats(),
    st.binary(max_size=12),
  )


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
  """Yields (container, key) of every item in a value, at any depth."""
  if isinstance(value, dict | list):
    for key in [*value] if isinstance(value, dict) else range(len(value)):
      yield value, key
      yield from _places(value[key])


def _replace(draw, container: Any, key: Any) -> None:
  container[key] = draw(leaves())


def _drop(draw, container: Any, key: Any) -> None:
  del container[key]


def _double(draw, container: Any, key: Any) -> None:
  if isinstance(container, list):
    container.insert(key, copy.deepcopy(container[key]))
  else:
    container[f'{key}{draw(st.sampled_from(["", "_", "2", " "]))}'] = copy.deepcopy(container[key])


def _add(draw, container: Any, key: Any) -> None:
  if isinstance(container, list):
    container.insert(key, draw(leaves()))
  else:
    container[draw(st.one_of(st.sampled_from(TEXTS), st.text(max_size=5)))] = draw(leaves())


def _wrap(draw, container: Any, key: Any) -> None:
  value = container[key]
  for _ in range(draw(st.sampled_from([1, 2, 99, 120]))):
    value = [value] if draw(st.booleans()) else {'a': value}
  container[key] = value


def _edit(draw, container: Any, key: Any) -> None:
  """Changes a leaf slightly."""
  value = container[key]
  if isinstance(value, str):
    place, extra = (
      draw(st.integers(0, len(value))),
      draw(st.one_of(st.sampled_from(TEXTS), st.text(max_size=3))),
    )
    container[key] = value[:place] + extra + value[draw(st.integers(place, len(value))) :]
  elif isinstance(value, bytes):
    container[key] = draw(damaged(value))
  elif isinstance(value, int | float) and not isinstance(value, bool):
    container[key] = draw(
      st.sampled_from([lambda: value + 1, lambda: -value, lambda: value * 1000, lambda: str(value)])
    )()
  else:
    container[key] = draw(leaves())


def _retype(draw, container: Any, key: Any) -> None:
  value = container[key]
  kinds = [
    str,
    repr,
    lambda v: [v],
    lambda v: {'value': v},
    lambda v: str(v).encode('utf-8', 'replace'),
    bool,
  ]
  container[key] = draw(st.sampled_from(kinds))(value)


_CHANGES = (_replace, _replace, _drop, _double, _add, _wrap, _edit, _edit, _retype)


@st.composite
def changed(draw, value: Any, *, most: int = 3) -> Any:
  """Draws a value with one to `most` changes."""
  root = [copy.deepcopy(value)]
  for _ in range(draw(st.integers(1, most))):
    places = [*_places(root)]
    if not places:
      break
    container, key = draw(st.sampled_from(places))
    if container is root and draw(st.integers(0, 9)):  # The whole value is rarely replaced.
      places = places[1:] or places
      container, key = draw(st.sampled_from(places))
    draw(st.sampled_from(_CHANGES))(draw, container, key)
  return root[0] if root else None


@st.composite
def damaged(draw, data: bytes) -> bytes:
  """Draws the bytes with one change: cut, flipped, repeated, or in another encoding."""
  begin = draw(st.integers(0, len(data)))
  end = draw(st.integers(begin, min(len(data), begin + 64)))
  how = draw(
    st.sampled_from(['cut', 'drop', 'flip', 'insert', 'repeat', 'utf-16', 'mark', 'append'])
  )
  extra = draw(
    st.one_of(
      st.binary(max_size=8), st.sampled_from([b'\0', b'\xff\xfe', b'\n', b'{', b'[', b'"', b'\xc1'])
    )
  )
  match how:
    case 'cut':
      return data[:begin]
    case 'drop':
      return data[:begin] + data[end:]
    case 'flip':
      return (
        data[:begin]
        + bytes(byte ^ 1 << draw(st.integers(0, 7)) for byte in data[begin:end])
        + data[end:]
      )
    case 'insert':
      return data[:begin] + extra + data[begin:]
    case 'repeat':
      return data[:end] + data[begin:end] * draw(st.sampled_from([1, 2, 50])) + data[end:]
    case 'utf-16':
      return data.decode('utf-8', 'replace').encode('utf-16')
    case 'mark':
      return b'\xef\xbb\xbf' + data
    case _:
      return data + extra


def json_bytes(value: Any) -> bytes:
  """Encodes a value as JSON, with NaN, escaped surrogates, and bytes as text. The placeholders in
  `_RAW` become bytes that no encoder writes.
  """
  data = json.dumps(value, default=lambda other: other.decode('latin1'), skipkeys=True).encode()
  for name, raw in _JSON.items():
    data = data.replace(f'"@raw {name}@"'.encode(), raw)
  return data


def msgpack_bytes(value: Any) -> bytes:
  """Encodes a value as msgpack, with lone surrogates. The placeholders in `_RAW` become bytes that
  no encoder writes.
  """
  data = msgpack.packb(_packable(value), unicode_errors='surrogatepass')
  for name, raw in _MSGPACK.items():
    data = data.replace(msgpack.packb(f'@raw {name}@'), raw)
  return data


def _packable(value: Any) -> Any:
  """Replaces integers that msgpack cannot represent by text."""
  if isinstance(value, dict):
    return {_packable(key): _packable(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_packable(item) for item in value]
  if isinstance(value, int) and not -(2**63) <= value < 2**64:
    return str(value)
  return value


@st.composite
def encoded(
  draw, value: Any, encode: Callable[[Any], bytes] = json_bytes, *, most: int = 3
) -> bytes:
  """Draws the bytes of a changed value. One in five is damaged too."""
  data = encode(draw(changed(value, most=most)))
  return draw(damaged(data)) if draw(st.integers(0, 4)) == 0 else data


def one_of_each(
  values: Sequence[Any], encode: Callable[[Any], bytes] = json_bytes, **how: int
) -> st.SearchStrategy:
  """Returns a strategy that draws one of the values, changed and encoded as by `encoded`."""
  return st.sampled_from(range(len(values))).flatmap(
    lambda place: encoded(values[place], encode, **how)
  )
