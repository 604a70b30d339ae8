"""Bundles: the files of one published directory, described such that a host without access to the
directory can fetch them in pieces, from several other hosts, and verify each piece on arrival.

Invariant: the atoms of a file cover it without gaps and overlaps, and each atom has a digest. The
id of a bundle is a digest of its description, so bundles with equal ids have equal bytes.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import xxhash

from jaxrl_llm.core.types import Json
from jaxrl_llm.weights.checksums import Slice

ATOM_BYTES = (256 << 10, 8 << 20)
"""Minimum and maximum size in bytes above which a tensor is divided into several atoms."""
PIECE_BYTES = (256 << 10, 16 << 20)
"""Minimum and maximum size in bytes up to which successive atoms are fetched with one request."""
_ATOMS = 1024
"""Number of atoms that weights of medium size are divided into."""
_SHARE = 16
"""Number of pieces that each host gets from the trainer, unless this makes them too small or too
large. The more pieces, the more equal the shares of the hosts.
"""
_NAME = re.compile(r'[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}')
_DIGEST = re.compile(r'[0-9a-f]{32}')
_MAX_SIZE = 1 << 50
_HEADER_BYTES = 100 << 20
"""Maximum size in bytes of the header of a safetensors file, as in the format's own library."""
_BLOCK = 1 << 20


class Atom(NamedTuple):
  """Smallest part of a file that can be verified."""

  start: int
  """Position of the first byte in the file."""
  digest: str
  """xxh3-128 digest of the bytes, as 32 hexadecimal digits."""


class FilePiece(NamedTuple):
  """Successive atoms of a file, which are fetched with one request."""

  file: str
  first: int
  """Index of the first atom."""
  last: int
  """Index after the last atom."""
  start: int
  """Position of the first byte in the file."""
  stop: int
  """Position after the last byte in the file."""


@dataclasses.dataclass(frozen=True)
class BundleFile:
  """One file of a bundle."""

  name: str
  size: int
  """Size in bytes."""
  atoms: tuple[Atom, ...]
  """Atoms of the file, in order; empty if the file is empty."""

  @functools.cached_property
  def _starts(self) -> list[int]:
    return [atom.start for atom in self.atoms]

  def covering(self, start: int, stop: int) -> range:
    """Returns the indices of the atoms that have bytes of a range. The range must not be empty."""
    return range(
      bisect.bisect_right(self._starts, start) - 1, bisect.bisect_left(self._starts, stop)
    )

  def stop(self, index: int) -> int:
    """Returns the position after the last byte of an atom."""
    return self.atoms[index + 1].start if index + 1 < len(self.atoms) else self.size


@dataclasses.dataclass(frozen=True)
class Bundle:
  """Files of one published directory."""

  files: tuple[BundleFile, ...]

  @functools.cached_property
  def id(self) -> str:
    """Identifies the bundle by its content: 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(json.dumps(self.to_json()).encode())

  @property
  def size(self) -> int:
    """Total size of the files in bytes."""
    return sum(file.size for file in self.files)

  def file(self, name: str) -> BundleFile | None:
    """Returns the file with the given name, or None if the bundle has no such file."""
    return next((file for file in self.files if file.name == name), None)

  def pieces(self, hosts: int) -> list[FilePiece]:
    """Divides the files into pieces for a number of hosts that fetch them together."""
    limit = _within(self.size // (_SHARE * max(1, hosts)), PIECE_BYTES)
    return [piece for file in self.files for piece in _pieces(file, limit)]

  def to_json(self) -> Json:
    return [[file.name, file.size, [list(atom) for atom in file.atoms]] for file in self.files]

  @classmethod
  def from_json(cls, value: Any) -> Bundle:
    """Reads a description that another host has sent. Raises ValueError if it is invalid."""
    if not isinstance(value, list):
      raise ValueError('wanted a list of [name, size, atoms] for each file')
    files = tuple(_file(item) for item in value)
    if len({file.name for file in files}) != len(files):
      raise ValueError('two files have the same name')
    return cls(files)


def _within(size: int, limits: tuple[int, int]) -> int:
  return min(max(size, limits[0]), limits[1])


def _pieces(file: BundleFile, limit: int) -> Iterator[FilePiece]:
  first = 0
  for last in range(1, len(file.atoms) + 1):
    is_end = last == len(file.atoms)
    if is_end or file.stop(last) - file.atoms[first].start > limit:
      yield FilePiece(file.name, first, last, file.atoms[first].start, file.stop(last - 1))
      first = last


def _file(value: Any) -> BundleFile:
  if not (isinstance(value, list) and len(value) == 3 and isinstance(value[2], list)):
    raise ValueError('wanted [name, size, atoms] for each file')
  name, size, atoms = value
  if not (isinstance(name, str) and _NAME.fullmatch(name)):
    raise ValueError(f'file name {name!r:.80}, wanted letters, digits, dots and hyphens')
  if not (type(size) is int and 0 <= size <= _MAX_SIZE):
    raise ValueError(f'size of {name}: {size!r:.40}, wanted a number of bytes')
  starts = []
  for atom in atoms:
    well_formed = isinstance(atom, list) and len(atom) == 2 and type(atom[0]) is int
    if not (well_formed and isinstance(atom[1], str) and _DIGEST.fullmatch(atom[1])):
      raise ValueError(f'atoms of {name}: wanted [start, digest of 32 hexadecimal digits]')
    starts.append(atom[0])
  if [*starts, size] != sorted({*starts, size}) or starts[:1] != ([0] if size else []):
    raise ValueError(f'atoms of {name}: do not cover its {size} bytes')
  return BundleFile(name, size, tuple(Atom(start, digest) for start, digest in atoms))


def atom_slices(shape: Sequence[int], itemsize: int, total: int) -> tuple[Slice, ...]:
  """Returns the slices along the first axis that are the atoms of a tensor; empty if the whole
  tensor is one atom.

  Args:
    shape: shape of the tensor.
    itemsize: size of an element in bytes.
    total: size in bytes of all tensors of the file.
  """
  nbytes, limit = math.prod(shape) * itemsize, _within(total // _ATOMS, ATOM_BYTES)
  if not shape or nbytes <= limit:
    return ()
  rows = max(1, limit * shape[0] // nbytes)
  return tuple(Slice(0, start, min(rows, shape[0] - start)) for start in range(0, shape[0], rows))


def describe(
  directory: pathlib.Path,
  files: Mapping[str, Mapping[str, str]],
  slices: Mapping[str, Mapping[Slice, str]],
  *,
  without: str,
) -> Bundle:
  """Describes the files of a published directory. Only headers, and files whose tensors have no
  digests, are read for this.

  Args:
    files: xxh3-128 digest of each tensor, keyed by file name and then by tensor name.
    slices: digests of slices of the tensors, keyed by tensor name; see `atom_slices`.
    without: name of a file that is left out.

  Raises:
    OSError: a file is missing or unreadable.
    ValueError: a file is not a safetensors file, or its tensors are not those of `files`.
  """
  return Bundle(
    tuple(
      describe_file(path, files[path.name], slices) if path.name in files else _read(path)
      for path in sorted(directory.iterdir())
      if path.name != without and path.is_file()
    )
  )


def describe_file(
  path: pathlib.Path, digests: Mapping[str, str], slices: Mapping[str, Mapping[Slice, str]]
) -> BundleFile:
  """Describes a safetensors file, of which only the header is read; see `describe`.

  Args:
    digests: xxh3-128 digest of each tensor, keyed by its name.
  """
  with path.open('rb') as file:
    length = file.read(8)
    count = int.from_bytes(length, 'little')
    if len(length) != 8 or count > _HEADER_BYTES:
      raise ValueError(f'{path}: is not a safetensors file')
    text = file.read(count)
  header = json.loads(text)
  header.pop('__metadata__', None)
  if set(header) != set(digests):
    raise ValueError(f'{path}: its tensors are not the announced ones')
  base, total = 8 + count, sum(stop - start for start, stop in _offsets(header))
  atoms = [Atom(0, xxhash.xxh3_128_hexdigest(length + text))]
  for name, tensor in sorted(header.items(), key=lambda item: item[1]['data_offsets']):
    start, stop = (base + offset for offset in tensor['data_offsets'])
    if start == stop:
      continue
    itemsize = (stop - start) // math.prod(tensor['shape'])
    cuts = atom_slices(tensor['shape'], itemsize, total)
    known = slices.get(name, {})
    if not cuts or not all(cut in known for cut in cuts):
      atoms.append(Atom(start, digests[name]))
      continue
    row = (stop - start) // tensor['shape'][0]
    atoms.extend(Atom(start + cut.start * row, known[cut]) for cut in cuts)
  return BundleFile(path.name, path.stat().st_size, tuple(atoms))


def _offsets(header: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
  for tensor in header.values():
    yield tuple(tensor['data_offsets'])


def _read(path: pathlib.Path) -> BundleFile:
  """Describes a file that has no digests yet by reading it."""
  atoms, position = [], 0
  with path.open('rb') as file:
    while data := file.read(_BLOCK):
      atoms.append(Atom(position, xxhash.xxh3_128_hexdigest(data)))
      position += len(data)
  return BundleFile(path.name, position, tuple(atoms))
