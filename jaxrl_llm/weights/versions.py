"""Versions of a run's weights, which the run exports so that other runs can follow them.

Each version is a model directory `<step>-<attempt>` with a manifest that lists its files with sizes
and digests.

Invariants:
- A directory gets its final name after all of its files are on disk, so a directory with a final
  name is complete.
- The newest version is the one with the largest (attempt, step): a run that resumes from a
  commit exports the commit's version again, under the new attempt.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping

import xxhash

from jaxrl_llm.config.values import from_json, to_json
from jaxrl_llm.core.disk import sync, write_durably
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.files import check_regular, parse_json, read_bytes
from jaxrl_llm.core.types import Version

VERSIONS = 'versions'
"""Name of the directory of exported versions in a run directory."""
MANIFEST = 'version.json'
SCHEMA = 1
_NAME = re.compile(r'(\d{8,})-(\d{3,})')
_DIGESTS = 'digests'
_MAX_BYTES = 64 << 20
_BLOCK_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileDigest:
  size: int
  """Size in bytes."""
  digest: str
  """xxh3-128 of the content."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportedVersion:
  """Manifest of an exported version."""

  schema: int = SCHEMA
  run: str
  """Name of the store of the run that exported the version."""
  attempt: int
  step: int
  files: Mapping[str, FileDigest]
  """Files of the directory other than the manifest, keyed by name."""
  tensors: str | None = None
  """Digest of the tensors (`digest_of_tensors`). None in manifests of earlier program versions."""

  @property
  def version(self) -> Version:
    return Version(self.attempt, self.step)

  @property
  def digest(self) -> str:
    """Digest of the weights. Versions with the same weights have the same digest, unless one of
    their manifests has no `tensors`.
    """
    if self.tensors is not None:
      return self.tensors
    weights = {name: file for name, file in self.files.items() if name.endswith('.safetensors')}
    text = ' '.join(f'{name} {weights[name].digest}' for name in sorted(weights))
    return xxhash.xxh3_128_hexdigest(text.encode())


def unfinished_directory(folder: pathlib.Path, version: Version) -> pathlib.Path:
  """Returns the directory into which a version is written."""
  return folder / f'{_name(version)}.tmp'


def begin(folder: pathlib.Path, version: Version) -> pathlib.Path:
  """Creates and returns the directory into which a version is written. `complete` later gives the
  directory its final name.
  """
  unfinished = unfinished_directory(folder, version)
  shutil.rmtree(unfinished, ignore_errors=True)
  unfinished.mkdir(parents=True)
  return unfinished


def digest_of_tensors(digests: Mapping[str, str]) -> str:
  """Returns a digest of a model's weights that does not depend on how its tensors are distributed
  over files.

  Args:
    digests: digest of each tensor's bytes, keyed by its Hugging Face name.
  """
  text = ' '.join(f'{name} {digests[name]}' for name in sorted(digests))
  return xxhash.xxh3_128_hexdigest(text.encode())


def digest_of_file(path: pathlib.Path) -> FileDigest:
  """Reads a file and returns its size and digest."""
  return FileDigest(size=path.stat().st_size, digest=_digest(path))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportedWeights:
  """Digests of the weights of an export."""

  tensors: Mapping[str, str]
  """xxh3-128 digest of each tensor, keyed by its name in the files."""
  files: Mapping[str, FileDigest]
  """Size and digest of each weights file, keyed by name."""


def complete(
  unfinished: pathlib.Path, version: Version, weights: ExportedWeights, *, run: str, keep: int
) -> pathlib.Path:
  """Writes the manifest, gives the directory its final name and removes all but the `keep` newest
  versions. Returns the directory.

  Args:
    weights: digests of the weights. Their files are on disk already.
  """
  files = dict(weights.files)
  for path in sorted(unfinished.iterdir()):
    if path.name not in files:
      sync(path)
      files[path.name] = digest_of_file(path)
  manifest = ExportedVersion(
    run=run,
    attempt=version.attempt,
    step=version.step,
    files=files,
    tensors=digest_of_tensors(weights.tensors),
  )
  write_durably(unfinished / MANIFEST, json.dumps(to_json(manifest)))
  folder, final = unfinished.parent, unfinished.with_suffix('')
  (folder / _DIGESTS).mkdir(exist_ok=True)
  write_durably(folder / _DIGESTS / str(version.step), manifest.digest)
  shutil.rmtree(final, ignore_errors=True)
  unfinished.rename(final)
  sync(folder)
  for path, _ in [*_found(folder)][keep:]:
    shutil.rmtree(path, ignore_errors=True)
  return final


def withdraw_later(folder: pathlib.Path, step: int) -> None:
  """Removes the versions later than `step` with their digests, and unfinished versions. A run that
  resumes from a commit at `step` trains the later versions again, possibly on other batches.
  """
  for path, version in [*_found(folder)]:
    if version.step > step:
      shutil.rmtree(path, ignore_errors=True)
  for unfinished in folder.glob('*.tmp'):
    shutil.rmtree(unfinished, ignore_errors=True)
  for file in (folder / _DIGESTS).glob('*'):
    if not file.name.isdigit() or int(file.name) > step:
      file.unlink()


def exported_digest(folder: pathlib.Path, step: int) -> str | None:
  """Returns the digest of the version that was exported at a step, even if the version has been
  removed since. Returns None if no version was exported at this step, or if it was withdrawn.
  """
  try:
    return (folder / _DIGESTS / str(step)).read_text()
  except FileNotFoundError:
    return None


def newer(folder: pathlib.Path, than: Version | None) -> list[pathlib.Path]:
  """Returns the directories of the versions that are newer than `than`, newest first. If `than` is
  None, returns the directories of all versions. The folder need not exist.
  """
  return [path for path, version in _found(folder) if than is None or version > than]


def verified(directory: pathlib.Path) -> ExportedVersion:
  """Reads the manifest of a version and checks all of its files against it.

  Raises UserError if the manifest is damaged or describes another version, if the directory lacks a
  listed file or has an unlisted one, or if a file is not regular or has another size or digest.
  """
  path = directory / MANIFEST
  try:
    value = parse_json(read_bytes(path, _MAX_BYTES).decode())
  except (OSError, ValueError) as error:
    raise UserError(f'{path}: cannot be read ({error})') from None
  manifest = from_json(value, ExportedVersion, str(path))
  if manifest.schema != SCHEMA or directory.name != _name(manifest.version):
    raise UserError(
      f'{path}: describes version {manifest.version} in schema {manifest.schema}, wanted '
      f'{directory.name} in schema {SCHEMA}'
    )
  if (there := {file.name for file in directory.iterdir()} - {MANIFEST}) != manifest.files.keys():
    raise UserError(
      f'{path}: lists {sorted(manifest.files)}, but the directory has {sorted(there)}'
    )
  for name, wanted in manifest.files.items():
    try:
      check_regular(directory / name)
      found = digest_of_file(directory / name)
    except (OSError, ValueError) as error:
      raise UserError(f'{directory / name}: cannot be read ({error})') from None
    if found != wanted:
      raise UserError(
        f'{directory / name}: {found.size} bytes with digest {found.digest}, but {MANIFEST} lists '
        f'{wanted.size} bytes with digest {wanted.digest}'
      )
  return manifest


def _name(version: Version) -> str:
  return f'{version.step:08d}-{version.attempt:03d}'


def _found(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, Version]]:
  """Yields the complete versions with their directories, newest first."""
  found = []
  for path in folder.iterdir() if folder.is_dir() else ():
    if (match := _NAME.fullmatch(path.name)) and path.is_dir() and not path.is_symlink():
      found.append((Version(int(match[2]), int(match[1])), path))
  for version, path in sorted(found, reverse=True):
    yield path, version


def _digest(path: pathlib.Path) -> str:
  hasher = xxhash.xxh3_128()
  with path.open('rb') as file:
    while block := file.read(_BLOCK_BYTES):
      hasher.update(block)
  return hasher.hexdigest()
