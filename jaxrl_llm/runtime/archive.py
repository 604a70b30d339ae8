"""Archive of a run: a copy of all files that the run's commits need, in an object store or another
directory. A host without the run directory can resume the run from the archive.

Layout of the location:

- `objects/<digest>-<size>`: contents of files. Equal contents are stored once.
- `commits/<step>.json`: marker of an archived commit, with the digest and size of each archived
  file, keyed by the file's path in the run directory. The marker is written after all objects that
  it names, so every marked commit is complete. Objects that no marker names are removed after the
  next marker is written.
- `run.json`: id of the run. The file `archive.json` in the run directory contains the same id.
- `owner.json`: id of the start of the run that may write to the archive. A start that finds another
  id here stops writing, because the run has been started elsewhere.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import contextlib
import dataclasses
import json
import pathlib
import re
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import fsspec
import xxhash
from absl import logging
from etils import epath

from jaxrl_llm.core.disk import sync, write_durably
from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.extras import check_library

FILE = 'archive.json'
"""Name of the file in the run directory with the id under which the archive knows the run."""
_FETCHING = 'archive.fetching'
"""Name of the file that exists in the run directory while a commit is fetched into it."""
_OWN = frozenset({FILE, _FETCHING, 'lock'})
"""Names of the files that a run directory may contain before a commit is fetched into it."""
_COMMITS, _OBJECTS, _RUN, _OWNER = 'commits', 'objects', 'run.json', 'owner.json'
_LIBRARIES = {'gs': 'gcsfs', 's3': 's3fs'}
"""Name of the library that reads and writes URIs, keyed by URI scheme."""
_THREADS = 8
"""Number of files that are copied at the same time."""
_BLOCK_BYTES = 4 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
"""First and longest pause, in seconds, between two attempts to archive a commit. The pause doubles
after each failed attempt until it reaches `_LONGEST_PAUSE_S`.
"""
_MARKER_BYTES = 256 << 20
"""Maximum size of a marker in bytes. A larger marker is refused as damaged."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArchiveConfig:
  """Settings of the archive, which has copies of a run's commits in an object store, or in a
  directory on another disk.
  """

  location: str
  """Directory of the archive, as 'gs://bucket/runs/mine', 's3://bucket/runs/mine' or an absolute
  path. Each run needs a separate directory. For a cloud, the credentials that the cloud's own tools
  have stored are used.
  """
  deadline_s: float = 600.0
  """Maximum time in seconds during which a commit that could not be archived is tried again. After
  this time, the run ends with an error. The commits in the run directory are not affected.
  """

  def __post_init__(self):
    scheme, separator, rest = self.location.partition('://')
    if separator and (scheme not in _LIBRARIES or not rest.strip('/')):
      raise UserError(
        f'archive.location: {self.location!r}, wanted gs://BUCKET/NAME, s3://BUCKET/NAME or an '
        'absolute path'
      )
    if not separator and not pathlib.PurePath(self.location).is_absolute():
      raise UserError(f'archive.location: {self.location!r}, wanted an absolute path or a URI')
    # `not x > 0` also rejects NaN.
    if not self.deadline_s > 0:
      raise UserError(f'archive.deadline_s: {self.deadline_s}, wanted a number of seconds above 0')


class ArchiveFailed(RunError):
  """Raised when a commit cannot be archived. The run directory is not affected."""


class Shipped(NamedTuple):
  """Bytes written and time taken to archive a commit."""

  bytes_written: int
  seconds: float


class _Stored(NamedTuple):
  """Content of a file in the archive."""

  digest: str
  """xxh3_128 of the content, in hexadecimal digits."""
  size: int

  @property
  def object(self) -> str:
    """Name of the object with this content."""
    return f'{self.digest}-{self.size}'


class Archive:
  """Archive of one run. Only process 0 uses it."""

  def __init__(self, config: ArchiveConfig, *, threads: int = _THREADS):
    """Raises UserError if a library for the location is not installed."""
    scheme, separator, _ = config.location.partition('://')
    if separator:
      check_library(_LIBRARIES[scheme], f'archive.location={config.location}')
    self._root, self._config, self._threads = epath.Path(config.location), config, threads
    self._owner = secrets.token_hex(8)
    self._digests: dict[tuple[int, int, int], _Stored] = {}
    """Digests and sizes of local files, keyed by inode, size and time of the last change."""
    self._objects: set[str] | None = None
    """Names of the objects in the archive; None until they are listed."""

  def steps(self) -> list[int]:
    """Returns the steps of the archived commits, in ascending order."""
    with self._explained('cannot be listed'):
      names = _names(self._root / _COMMITS)
    return sorted(int(name[:-5]) for name in names if re.fullmatch(r'\d{1,18}\.json', name, re.A))

  def open(self, workdir: pathlib.Path, *, commits: Collection[int]) -> int | None:
    """Makes this start of the run in `workdir` the only one that may write to the archive. If the
    archive has commits and the run directory has none, also fetches the newest archived commit.

    Args:
      commits: steps of the commits in the run directory.

    Returns:
      Step of the commit that was fetched; None if nothing was fetched.

    Raises:
      UserError: the archive belongs to another run, has later commits than the run directory, or is
        damaged or unreachable.
    """
    archived, run = self.steps(), self._read(self._root / _RUN)
    local = workdir / FILE
    known = json.loads(local.read_text()) if local.exists() else None
    fetched = None
    if run is not None and known != run and (commits or not archived):
      raise UserError(
        f'archive.location: {self._root} is the archive of another run than {workdir}; choose '
        'another location'
      )
    if archived and archived[-1] > max(commits, default=0):
      if commits:
        raise UserError(
          f'archive.location: {self._root} has the commit of step {archived[-1]}, but {workdir} '
          f'ends at step {max(commits)}, because the run went on elsewhere; to continue from the '
          f'archive, move {workdir} away and start the same command'
        )
      fetched = archived[-1]
      self.copy_to(workdir, fetched)
    elif run is None:
      run = {'run': secrets.token_hex(16)}
      self._write(self._root / _RUN, run)
      write_durably(local, json.dumps(run))
    self._write(self._root / _OWNER, {'owner': self._owner, 'host': socket.gethostname()})
    return fetched

  def copy_to(self, workdir: pathlib.Path, step: int) -> None:
    """Copies an archived commit to an empty run directory. An interrupted call can be repeated.

    Raises:
      UserError: the directory has files that no interrupted call has written, the commit is damaged
        or cannot be read, or a file cannot be written.
    """
    fetching = workdir / _FETCHING
    if not fetching.exists() and (left := sorted({p.name for p in workdir.iterdir()} - _OWN)):
      raise UserError(
        f'archive {self._root}: cannot be copied to {workdir}, which has no commit but other files '
        f'({left[0]}); move {workdir} away, or choose another --workdir'
      )
    run = self._read(self._root / _RUN)
    if run is None:
      raise UserError(f'archive {self._root}: damaged: it has commits, but no {_RUN}; restore it')
    write_durably(fetching, '')
    self._fetch_all(workdir, step)
    write_durably(workdir / FILE, json.dumps(run))
    fetching.unlink()

  def _fetch_all(self, target: pathlib.Path, step: int) -> None:
    """Copies the files of an archived commit to `target`, and the checkpoints of all earlier
    archived commits, because later stages may start from the weights of an earlier commit.

    A local file that already has the right content is not copied again. COMMIT files are written
    last, because a checkpoint is complete only if it has a COMMIT file.
    """
    steps = self.steps()
    files = self._files(self._marker(step))
    if files is None:
      raise UserError(f'archive {self._root}: no commit of step {step}; it has {steps}')
    for earlier in steps[: bisect.bisect_left(steps, step)]:
      named = self._files(self._marker(earlier)) or {}
      part = f'checkpoints/{earlier}/'
      files |= {name: stored for name, stored in named.items() if name.startswith(part)}
    first = {name: stored for name, stored in files.items() if not name.endswith('/COMMIT')}
    for part in (first, {name: files[name] for name in files.keys() - first.keys()}):
      self._each(part.items(), lambda item: self._fetch(target / item[0], item[1]))

  def _marker(self, step: int) -> epath.Path:
    return self._root / _COMMITS / f'{step}.json'

  def ship(self, step: int, files: Mapping[str, pathlib.Path], *, keep: Collection[int]) -> Shipped:
    """Archives a commit. After an error, tries again until `deadline_s` seconds have passed.

    Args:
      step: number of completed batches at the commit.
      files: files to archive, keyed by their path in the run directory. They must not change during
        the call.
      keep: steps of the earlier commits to keep in the archive.

    Raises:
      ArchiveFailed: the commit could not be archived, or the run has been started elsewhere.
    """
    begun, pause, written = time.monotonic(), _FIRST_PAUSE_S, [0]
    while True:
      try:
        self._ship(step, files, {step, *keep}, written)
        return Shipped(written[0], time.monotonic() - begun)
      except ArchiveFailed:
        raise
      except Exception as error:  # Libraries of clouds raise their own types of errors.
        left = begun + self._config.deadline_s - time.monotonic()
        if left <= 0:
          raise ArchiveFailed(
            f'archive {self._root}: the commit of step {step} could not be written within '
            f'{self._config.deadline_s:g} s ({_reason(error)}); it is complete in the run '
            'directory; start the same command when the archive can be written again'
          ) from error
        logging.warning('archive %s: step %d: %s; trying again', self._root, step, _reason(error))
        self._objects = None
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE_S)

  def _ship(
    self, step: int, files: Mapping[str, pathlib.Path], keep: Collection[int], written: list[int]
  ) -> None:
    if self._objects is None:
      (self._root / _OBJECTS).mkdir(parents=True, exist_ok=True)
      self._objects = _names(self._root / _OBJECTS)
    stored = dict(self._each(files.items(), lambda item: (item[0], self._stored(item[1]))))
    missing = {
      stored[name]: path for name, path in files.items() if stored[name].object not in self._objects
    }
    self._each(missing.items(), lambda item: self._put(*item))
    self._objects.update(content.object for content in missing)
    written[0] += sum(content.size for content in missing)
    owner = self._read(self._root / _OWNER)
    if owner is None or owner.get('owner') != self._owner:
      raise ArchiveFailed(
        f'archive {self._root}: the run has been started on '
        f'{owner.get("host") if owner else "another host"} too, which writes to the archive now; '
        f'step {step} is committed in the run directory alone'
      )
    self._write(self._marker(step), {name: [*s] for name, s in stored.items()})
    self._retire(keep)

  def _retire(self, keep: Collection[int]) -> None:
    """Removes the markers of steps that are not in `keep`, and then the objects that no marker
    names.
    """
    for step in self.steps():
      if step not in keep:
        self._marker(step).unlink(missing_ok=True)
    markers = [self._files(self._marker(step)) or {} for step in self.steps()]
    named = {stored.object for files in markers for stored in files.values()}
    unnamed = self._objects - named
    self._each(unnamed, lambda name: (self._root / _OBJECTS / name).unlink(missing_ok=True))
    self._objects -= unnamed

  def _stored(self, path: pathlib.Path) -> _Stored:
    """Returns the digest and size of a local file."""
    status = path.stat()
    key = (status.st_ino, status.st_size, status.st_mtime_ns)
    if key in self._digests:
      return self._digests[key]
    digest = xxhash.xxh3_128()
    size = 0
    with path.open('rb') as file:
      for block in _blocks(file):
        digest.update(block)
        size += len(block)
    stored = _Stored(digest.hexdigest(), size)
    self._digests[key] = stored
    return stored

  def _put(self, content: _Stored, path: pathlib.Path) -> None:
    """Copies a local file to the archive as an object named after its content. Raises OSError if
    the file no longer has this content.
    """
    digest = xxhash.xxh3_128()
    target = self._root / _OBJECTS / content.object
    with path.open('rb') as file, _replacing(target) as new:
      for block in _blocks(file):
        digest.update(block)
        new.write(block)
    if digest.hexdigest() != content.digest:
      target.unlink(missing_ok=True)
      raise OSError(f'{path} changed while it was archived')

  def _fetch(self, target: pathlib.Path, stored: _Stored) -> None:
    if target.is_file() and target.stat().st_size == stored.size and self._stored(target) == stored:
      return
    source = self._root / _OBJECTS / stored.object
    temporary = target.with_name(f'{target.name}.tmp')
    digest = xxhash.xxh3_128()
    with self._explained(f'cannot be copied to {target}'):
      target.parent.mkdir(parents=True, exist_ok=True)
      with source.open('rb') as file, temporary.open('wb') as new:
        for block in _blocks(file):
          digest.update(block)
          new.write(block)
      sync(temporary)
    if digest.hexdigest() != stored.digest:
      temporary.unlink()
      raise UserError(
        f'archive {self._root}: object {stored.object} is damaged (its digest is '
        f'{digest.hexdigest()}); fetch an earlier commit with jaxrl fetch --step, of {self.steps()}'
      )
    temporary.replace(target)
    sync(target.parent)

  def _files(self, marker: epath.Path) -> dict[str, _Stored] | None:
    """Returns the contents that a marker names, keyed by path; None if there is no marker.

    Raises UserError if the marker is damaged or names a path outside of the run directory.
    """
    value = self._read(marker)
    if value is None:
      return None
    files: dict[str, _Stored] = {}
    for name, stored in value.items():
      path = pathlib.PurePosixPath(name)
      match stored:
        case [str(digest), int(size)] if re.fullmatch('[0-9a-f]{32}', digest) and size >= 0:
          files[name] = _Stored(digest, size)
        case _:
          raise UserError(f'archive {marker}: {name!r} has no digest and size; it is damaged')
      if path.is_absolute() or not path.parts or {'..', '.'} & set(path.parts) or '\0' in name:
        raise UserError(f'archive {marker}: {name!r} is no path in a run directory; it is damaged')
    return files

  def _read(self, path: epath.Path) -> Any:
    """Returns the JSON object in a file of the archive; None if the file does not exist."""
    with self._explained('cannot be read'):
      try:
        with path.open('rb') as file:
          content = file.read(_MARKER_BYTES + 1)
      except FileNotFoundError:
        return None
    try:
      value = json.loads(content) if len(content) <= _MARKER_BYTES else None
    except ValueError:
      value = None
    if not isinstance(value, dict):
      raise UserError(f'archive {path}: damaged: it is not a JSON object; restore it')
    return value

  def _write(self, path: epath.Path, value: Mapping[str, Any]) -> None:
    with self._explained('cannot be written'):
      path.parent.mkdir(parents=True, exist_ok=True)
      with _replacing(path) as file:
        file.write(json.dumps(value).encode())

  def _each(self, items: Collection[Any], work: Callable[[Any], Any]) -> list[Any]:
    """Returns the results of `work` for each item, in order. Several items are processed at the
    same time, in threads.
    """
    # Wait 'archive': bounded by the timeouts of the cloud's library, and by the disk.
    with concurrent.futures.ThreadPoolExecutor(self._threads) as threads:
      return list(threads.map(work, items))

  @contextlib.contextmanager
  def _explained(self, what: str) -> Iterator[None]:
    """Turns an error of the file system or the cloud's library into a UserError of one line."""
    try:
      yield
    except UserError:
      raise
    except Exception as error:  # Libraries of clouds raise their own types of errors.
      raise UserError(
        f'archive {self._root}: {what} ({_reason(error)}); check the location, the credentials and '
        'the free space'
      ) from error


def _names(directory: epath.Path) -> set[str]:
  """Returns the names in a directory. The set is empty if the directory does not exist, as in an
  object store without any object below that path.
  """
  scheme, separator, _ = str(directory).partition('://')
  if separator:
    # The library caches listings, but other processes may have written to the directory meanwhile.
    fsspec.filesystem(scheme).invalidate_cache()
  try:
    return {path.name for path in directory.iterdir()}
  except FileNotFoundError:
    return set()


def _blocks(file: BinaryIO) -> Iterator[bytes]:
  while block := file.read(_BLOCK_BYTES):
    yield block


@contextlib.contextmanager
def _replacing(path: epath.Path) -> Iterator[BinaryIO]:
  """Opens a file for writing. The file appears as `path` once the `with` block has ended without an
  error.

  In a file system, a temporary file is written and renamed at the end. In an object store, this is
  not necessary, because an object appears only when it is complete.
  """
  if '://' in str(path):
    with path.open('wb') as file:
      try:
        yield file
      except BaseException:
        file.discard()  # Without this call, `close` would store an incomplete object.
        raise
    return
  local = pathlib.Path(path)
  temporary = local.with_name(f'{local.name}.{secrets.token_hex(4)}.tmp')
  try:
    with temporary.open('xb') as file:
      yield file
    sync(temporary)
    temporary.replace(local)
    sync(local.parent)
  except BaseException:
    temporary.unlink(missing_ok=True)
    raise


def _reason(error: Exception) -> str:
  text = str(error).splitlines()
  return f'{type(error).__name__}: {text[0][:200]}' if text else type(error).__name__
