"""Commits: complete checkpoints. A checkpoint is complete if and only if it has a COMMIT file.

A commit is made in two steps. `Checkpoints.begin` copies the state to host memory, after which
training may continue and donate the arrays. `Writing.finish` completes the commit in a thread while
training continues: every process writes its part of the arrays to `checkpoints/<step>/arrays` with
orbax and digests its own files, and process 0 also writes `host.json`. When the files of all
processes are on disk, process 0 writes `COMMIT`, which lists the name, size and digest of every
file. The next start of the run removes directories without this file. Old commits are removed only
after a new one is complete, so earlier commits survive no matter when the run is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging as stdlib_logging
import pathlib
import shutil
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import xxhash
from absl import logging
from jaxtyping import Shaped

from jaxrl_llm.core.disk import link_or_copy, sync, write_durably
from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.core.types import Json

_COMMIT, _HOST, _ARRAYS = 'COMMIT', 'host.json', 'arrays'
_DIGESTS = 'digests-{}'
"""Name of the file in which a process other than process 0 lists its own files with their sizes and
digests. The list exists until process 0 has read it.
"""
_DEADLINE_S = 1200
"""Maximum time in seconds to wait until all processes have written their arrays."""
_LOOK_S = 0.02
"""Seconds between checks for the digests of the other processes."""
_QUIET_S = 1.0
"""Seconds without new files after which a failed save is assumed to have stopped writing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
  """Frequency and retention of commits."""

  every_steps: int = 10
  every_minutes: float | None = None
  """Maximum minutes between commits, in addition to `every_steps`; None for no limit in time. The
  additional commits do not affect the results of the run.
  """
  keep: int = 3
  """Number of newest commits to keep. The commit with the best evaluation is also kept, as are
  commits whose weights later stages start from, and the commit of a reward model that scores
  rollouts.
  """
  moments_dtype: Literal['float32', 'bfloat16'] = 'float32'
  """Data type in which commits store the optimizer's moments. 'bfloat16' makes commits of a float32
  policy a third smaller. A resumed run then begins with rounded moments, so its results differ
  slightly from the results of an uninterrupted run.
  """
  keep_hours: float = 0.0
  """Age in hours up to which all commits are kept, in addition to the commits that `keep` selects.
  """

  def __post_init__(self):
    for name in ('every_steps', 'keep'):
      if getattr(self, name) < 1:
        raise UserError(f'checkpoint.{name}: {getattr(self, name)}, wanted at least 1')
    # `not x >= 0` also rejects NaN.
    if not self.keep_hours >= 0:
      raise UserError(f'checkpoint.keep_hours: {self.keep_hours}, wanted at least 0')
    if self.every_minutes is not None and not self.every_minutes > 0:
      raise UserError(
        f'checkpoint.every_minutes: {self.every_minutes}, wanted minutes above 0, or None'
      )


class CheckpointFailed(RunError):
  """Raised when a commit cannot be written. Earlier commits are not affected."""


class Taken(NamedTuple):
  """Files of another run's commit that have been linked or copied into this run, but are not
  committed here yet.
  """

  step: int
  files: Mapping[str, tuple[int, str]]
  """Size and digest of each file, keyed by file name."""
  host: Any


class Checkpoints:
  """Writes, reads and deletes the commits of one run directory."""

  def __init__(self, directory: pathlib.Path, config: CheckpointConfig, *, leads: bool):
    """
    Args:
      directory: `<workdir>/checkpoints`.
      leads: whether this is process 0. All processes write arrays; everything else is written and
        removed only by process 0.
    """
    self._directory, self._config, self._leads = directory.absolute(), config, leads
    self._failed: list[pathlib.Path] = []
    """Directories of failed saves, in which a slow write may still create files."""

  def clean(self) -> None:
    """Removes directories without COMMIT, which killed processes have left.

    Only process 0 calls this, before any process begins a commit.
    """
    if self._directory.exists():
      for path in self._directory.iterdir():
        if not (path / _COMMIT).exists():
          shutil.rmtree(path, ignore_errors=True)

  def steps(self) -> list[int]:
    """Returns the steps of all commits, in ascending order."""
    if not self._directory.exists():
      return []
    names = (path.parent.name for path in self._directory.glob(f'*/{_COMMIT}'))
    return sorted(int(name) for name in names if name.isdecimal())

  def begin(self, step: int, state: Any, host: Json, *, keep: Collection[int] = ()) -> Writing:
    """Starts a commit of `state` and `host` as `step`, and returns when both are copied.

    Every process must call this method with the same step, in the same order relative to other
    collective operations, and must call `finish` on the result before the next `begin`. Later
    changes to `state` and `host`, such as the donation of the arrays, do not affect the commit. On
    accelerators, the copy is in host memory. On CPUs, the commit holds the arrays themselves, and
    an update that would donate them writes to new memory instead.

    Args:
      step: number of completed batches. No commit of this step may exist yet.
      state: pytree of arrays.
      host: JSON state from which process 0 resumes. Other processes ignore it.
      keep: steps of commits to keep in addition to those that the configuration keeps.

    Raises:
      CheckpointFailed: if the files cannot be written, for example because the disk is full.
        Earlier commits are then intact.
    """
    target = self._directory / str(step)
    if self._leads and step in self.steps():
      raise RuntimeError(f'checkpoint {target}: already committed')
    encoded = json.dumps(host).encode()
    while self._failed:
      shutil.rmtree(self._failed.pop(), ignore_errors=True)
    with contextlib.ExitStack() as stack:
      stack.enter_context(_quiet_orbax())
      with self._explained(target):
        if self._leads:
          target.mkdir(parents=True, exist_ok=True)
        deadline = ocp.options.AsyncOptions(timeout_secs=_DEADLINE_S)
        checkpointer = ocp.StandardCheckpointer(async_options=deadline)
        checkpointer.save(
          target / _ARRAYS, state, save_args=_save_args(state, self._config), force=True
        )
      return Writing(self, target, checkpointer, encoded, keep, stack.pop_all())

  def save(self, step: int, state: Any, host: Json, *, keep: Collection[int] = ()) -> None:
    """Commits and waits for the end of the commit; see `begin` and `Writing.finish`."""
    self.begin(step, state, host, keep=keep).finish()

  @contextlib.contextmanager
  def _explained(self, target: pathlib.Path) -> Iterator[None]:
    """If the block fails to write the files of a commit, removes these files and raises
    CheckpointFailed, which explains the failure in one line.
    """
    try:
      yield
    except (OSError, ValueError) as error:
      # A ValueError comes either from the storage library or from a collective operation that lost
      # a peer. Only the storage library names the file in its message.
      if isinstance(error, ValueError) and str(target) not in str(error):
        raise
      if self._leads:
        _remove_failed(target, error)
        self._failed.append(target)
      kept = self.steps()
      raise CheckpointFailed(
        f'checkpoint {target}: could not be written ({_reason(error)}); '
        f'{f"the newest commit is step {kept[-1]}" if kept else "there is no earlier commit"}; '
        'free space and start again with the same command'
      ) from error

  def restore(self, step: int, like: Any) -> Any:
    """Restores the arrays of a committed step.

    Args:
      like: pytree of arrays or ShapeDtypeStructs, with the shapes, dtypes and shardings of the
        result.
    """
    self._verify(step, self._committed(step))
    with _quiet_orbax(), ocp.StandardCheckpointer() as checkpointer:
      return checkpointer.restore(self._directory / str(step) / _ARRAYS, _abstract(like))

  def restore_part(self, step: int, like: Any) -> Any:
    """Restores some of the arrays of a committed step. The other arrays use no device memory.

    Args:
      like: as in `restore`, but may lack entries of the committed pytree.
    """
    self._verify(step, self._committed(step))
    like = _abstract(like)
    arguments = ocp.args.PyTreeRestore(
      item=like,
      restore_args=ocp.checkpoint_utils.construct_restore_args(like),
      partial_restore=True,
    )
    with _quiet_orbax(), ocp.PyTreeCheckpointer() as checkpointer:
      return checkpointer.restore(self._directory / str(step) / _ARRAYS, args=arguments)

  def host(self, step: int) -> Any:
    """Returns the `host` value that was saved with `step`."""
    self._verify(step, [_HOST])
    return json.loads((self._directory / str(step) / _HOST).read_text())

  def take(self, source: Checkpoints, step: int) -> Taken:
    """Links or copies the files of another run's commit into this run. The other run may be active.

    Raises:
      UserError: the commit is damaged, or was removed during the call.
    """
    files, host = source._committed(step), source.host(step)
    try:
      for name in files:
        link_or_copy(source._directory / str(step) / name, self._directory / str(step) / name)
      # Check again that the commit exists: its run may have removed it meanwhile, together with
      # other files that the commit refers to.
      source._committed(step)
    except FileNotFoundError as error:
      raise UserError(
        f'checkpoint {source._directory / str(step)}: {error.filename} is missing; choose another '
        f'commit of {source.steps()}'
      ) from error
    return Taken(step, files, host)

  def commit_taken(self, taken: Taken, host: Json) -> None:
    """Commits the files that `take` returned, with this run's own `host` value.

    Raises:
      UserError: a file differs from the one that the other run committed.
    """
    target = self._directory / str(taken.step)
    (target / _HOST).unlink()  # A hard link to the other run's file, which must not be modified.
    (target / _HOST).write_text(json.dumps(host))
    _commit(
      target,
      expected={
        name: size_and_digest for name, size_and_digest in taken.files.items() if name != _HOST
      },
    )

  def shapes(self, step: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns the shapes of all parameters of a commit, keyed by role and then by parameter
    name.
    """
    with _quiet_orbax(), ocp.PyTreeCheckpointer() as checkpointer:
      path = self._directory / str(step) / _ARRAYS
      tree = checkpointer.metadata(path).item_metadata.tree
    params = {role: arrays.get('params', arrays) for role, arrays in tree.items()}
    return {
      role: {n: tuple(x.shape) for n, x in flatten(arrays_of_role).items()}
      for role, arrays_of_role in params.items()
    }

  def _committed(self, step: int) -> dict[str, tuple[int, str]]:
    """Returns the size and digest of every file in the commit, keyed by file name."""
    path = self._directory / str(step)
    try:
      committed = json.loads((path / _COMMIT).read_bytes())
      for name in map(pathlib.PurePath, committed):
        if name.is_absolute() or '..' in name.parts:
          raise ValueError(f'file {str(name)!r} is outside of the commit')
      return {name: (size, digest) for name, (size, digest) in committed.items()}
    except (ValueError, TypeError, AttributeError) as error:
      raise UserError(
        f'checkpoint {path / _COMMIT}: damaged ({error}); remove {path} to resume from an earlier '
        'commit'
      ) from error

  def _verify(self, step: int, names: Iterable[str]) -> None:
    path, committed = self._directory / str(step), self._committed(step)
    for name in names:
      file, wanted = path / name, committed.get(name)
      if wanted is None or not file.is_file() or (file.stat().st_size, _digest(file)) != wanted:
        raise UserError(
          f'checkpoint {file}: differs from the committed file (wanted size and digest {wanted}); '
          f'remove {path} to resume from an earlier commit'
        )

  def _retire(self, keep: Collection[int]) -> None:
    newest_removed = time.time() - self._config.keep_hours * 3600
    for step in self.steps()[: -self._config.keep]:
      commit = self._directory / str(step) / _COMMIT
      if step not in keep and commit.stat().st_mtime <= newest_removed:
        # COMMIT is removed first. If the removal is then interrupted, `clean` removes the rest.
        commit.unlink()
        shutil.rmtree(commit.parent, ignore_errors=True)


def _save_args(state: Any, config: CheckpointConfig) -> Any:
  """Returns the data types in which the arrays of `state` are stored, as orbax's options."""
  rounded = ocp.SaveArgs(dtype=np.dtype(config.moments_dtype))

  def options(path: Sequence[Any], array: Shaped[jax.Array, '...']) -> ocp.SaveArgs:
    is_moment = 'opt_state' in jax.tree_util.keystr(path, simple=True, separator='/').split('/')
    is_float = array.dtype == np.float32 and array.ndim > 0
    return rounded if is_moment and is_float else ocp.SaveArgs()

  return jax.tree_util.tree_map_with_path(options, state)


def _abstract(tree: Any) -> Any:
  """Returns the shapes, dtypes and shardings of a pytree."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


class Writing:
  """A commit whose files are being written; the result of `Checkpoints.begin`."""

  def __init__(
    self,
    checkpoints: Checkpoints,
    target: pathlib.Path,
    checkpointer: ocp.StandardCheckpointer,
    host: bytes,
    keep: Collection[int],
    quiet: contextlib.ExitStack,
  ):
    self._checkpoints, self._target, self._checkpointer = checkpoints, target, checkpointer
    self._host, self._keep, self._quiet = host, keep, quiet

  def finish(self) -> None:
    """Waits until the files are written and digested. May run in any thread.

    In process 0, the commit is complete when the call returns, and old commits are removed as the
    configuration says. In the other processes, it may not be complete yet.

    Raises:
      CheckpointFailed: if the files cannot be written, for example because the disk is full, or if
        another process does not write its part. Earlier commits are then intact.
    """
    checkpoints, process, count = self._checkpoints, jax.process_index(), jax.process_count()
    with self._quiet, checkpoints._explained(self._target):
      # Wait 'commit': bounded by orbax's deadline, which is set to `_DEADLINE_S`.
      self._checkpointer.close()
      if not checkpoints._leads:
        _write_digests(self._target, process)
        return
      (self._target / _HOST).write_bytes(self._host)
      of_others = [_DIGESTS.format(other) for other in range(count) if other != process]
      _commit(self._target, _collect_digests(self._target, of_others))
    checkpoints._retire(self._keep)


class _Silence:
  """Suppresses orbax's progress logs, and the traceback that orbax prints for each failed write,
  while at least one block is open. Blocks may overlap, even in different threads.

  The error itself is still raised.
  """

  def __init__(self) -> None:
    self._lock, self._open = threading.Lock(), 0
    self._loggers = logging.get_absl_logger(), stdlib_logging.getLogger('asyncio')

  @contextlib.contextmanager
  def __call__(self) -> Iterator[None]:
    with self._lock:
      self._open += 1
      if self._open == 1:
        self._begin()
    try:
      yield
    finally:
      with self._lock:
        self._open -= 1
        if self._open == 0:
          self._end()

  def _begin(self) -> None:
    for logger in self._loggers:
      logger.addFilter(_not_of_orbax)
    self._hook = hook = sys.unraisablehook
    # After a first error, orbax closes its event loop. Each write that finishes later then raises
    # 'Event loop is closed' where nothing can catch the exception.
    sys.unraisablehook = lambda ignored: (
      None if 'Event loop is closed' in str(ignored.exc_value) else hook(ignored)
    )

  def _end(self) -> None:
    sys.unraisablehook = self._hook
    for logger in self._loggers:
      logger.removeFilter(_not_of_orbax)


_quiet_orbax = _Silence()


def _not_of_orbax(record: stdlib_logging.LogRecord) -> bool:
  never_retrieved = record.name == 'asyncio' and 'orbax' in record.getMessage()
  return 'orbax' not in record.pathname and not never_retrieved


def _remove_failed(path: pathlib.Path, error: Exception) -> None:
  """Removes the files of a failed save.

  Pending writes continue for a while and create directories again. The removal is therefore
  repeated until no files have appeared for `_QUIET_S` seconds, but for at most 20 · `_QUIET_S`
  seconds in total.
  """
  seen = started = time.monotonic()
  while (now := time.monotonic()) < min(seen + _QUIET_S, started + 20 * _QUIET_S):
    if path.exists():
      seen = now
      shutil.rmtree(path, ignore_errors=True)
    time.sleep(0.02)
  # Garbage-collect the futures and coroutines of the failed save here, where their warnings ('never
  # retrieved', 'never awaited') are suppressed.
  with warnings.catch_warnings(action='ignore', category=RuntimeWarning):
    traceback.clear_frames(error.__traceback__)
    gc.collect()


def _write_digests(path: pathlib.Path, process: int) -> None:
  """Syncs the files of a process other than process 0 to disk, and writes their sizes and digests.

  By orbax's layout, the names of the files or of their directories end with `process_<number>`.
  Files that this function misses are digested by process 0.
  """
  files = {}
  for entry in (path / _ARRAYS).rglob(f'*process_{process}'):
    for file in (entry, *entry.rglob('*')):
      sync(file)
      if file.is_file():
        files[str(file.relative_to(path))] = (file.stat().st_size, _digest(file))
  write_durably(path / _DIGESTS.format(process), json.dumps(files))


def _collect_digests(path: pathlib.Path, names: Collection[str]) -> dict[str, tuple[int, str]]:
  """Waits until the files `names`, which contain the digests of the other processes, exist. Removes
  these files, and returns the sizes and digests they contain, keyed by file name.

  Raises TimeoutError if one of them does not exist within `_DEADLINE_S` seconds.
  """
  deadline = time.monotonic() + _DEADLINE_S
  digests: dict[str, tuple[int, str]] = {}
  for name in names:
    while not (path / name).exists():
      if time.monotonic() > deadline:
        raise TimeoutError(f'{path / name} does not exist')
      time.sleep(_LOOK_S)
    digests |= {
      file: (size, digest)
      for file, (size, digest) in json.loads((path / name).read_bytes()).items()
    }
    (path / name).unlink()
  return digests


def _commit(
  path: pathlib.Path,
  digests: Mapping[str, tuple[int, str]] = types.MappingProxyType({}),
  *,
  expected: Mapping[str, tuple[int, str]] = types.MappingProxyType({}),
) -> None:
  """Syncs every file to disk, then writes COMMIT and syncs it too.

  Raises UserError if a file lacks the expected size and digest, and FileNotFoundError if a file in
  `digests` is missing. COMMIT is then not written.

  Args:
    digests: sizes and digests of files that another process has digested and synced.
  """
  files = {}
  for file in sorted(path.rglob('*')):
    name = str(file.relative_to(path))
    if name in digests and file.stat().st_size == digests[name][0]:
      files[name] = digests[name]
      continue
    sync(file)
    if file.is_file():
      files[name] = (file.stat().st_size, _digest(file))
  if missing := digests.keys() - files.keys():
    raise FileNotFoundError(f'{path / min(missing)} is missing')
  if damaged := [name for name, wanted in expected.items() if files.get(name) != wanted]:
    raise UserError(
      f'checkpoint {path}: {damaged[0]} differs from the file that was committed (wanted size and '
      f'digest {expected[damaged[0]]}, found {files.get(damaged[0])}); choose another commit'
    )
  sync(path)
  temporary = path / f'{_COMMIT}.tmp'
  temporary.write_text(json.dumps(files, indent=1))
  sync(temporary)
  temporary.rename(path / _COMMIT)
  sync(path)
  sync(path.parent)


def _digest(path: pathlib.Path) -> str:
  digest = xxhash.xxh3_128()
  with path.open('rb') as file:
    while block := file.read(1 << 22):
      digest.update(block)
  return digest.hexdigest()


def _reason(error: Exception) -> str:
  """Returns the cause of a failed write: the operating system's error text, if it can be found."""
  if isinstance(error, TimeoutError):
    return (
      f'not every process has written its part within {_DEADLINE_S} s, or a process has ended; see '
      'the logs of the other processes'
    )
  if isinstance(error, OSError) and error.strerror:
    return error.strerror
  text = str(error)
  for phrase in (
    'No space left on device',
    'File too large',
    'Disk quota exceeded',
    'Read-only file system',
  ):
    if phrase in text:
      return phrase
  return text.splitlines()[0][:200] if text else type(error).__name__
