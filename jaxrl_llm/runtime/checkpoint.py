"""Commits: checkpoints that are complete. A checkpoint counts if and only if it has a COMMIT file.

All processes write the arrays to `checkpoints/<step>/arrays` with orbax. Process 0 also writes
`host.json`. When all these files are on disk, it writes `COMMIT`, which lists the name, size and
digest of every file. The next start of the run removes directories without this file.
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
import time
import traceback
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
import xxhash
from absl import logging
from jax.experimental import multihost_utils

from jaxrl_llm.core.disk import link_or_copy, sync
from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.core.types import Json

_COMMIT, _HOST, _ARRAYS = 'COMMIT', 'host.json', 'arrays'
_DEADLINE_S = 1200
"""Maximum time in seconds to wait until all processes have written their arrays."""
_QUIET_S = 0.5
"""Seconds without new files after which a failed save is assumed to have stopped writing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
  """Frequency and retention of commits."""

  every_steps: int = 10
  every_minutes: float = 5.0
  """Minutes after which a commit is made even if `every_steps` is not reached. Such commits only
  add steps at which the run can resume; they do not affect its results.
  """
  keep: int = 3
  """Number of newest commits to keep. The commit with the best evaluation is kept in addition."""

  def __post_init__(self):
    for name in ('every_steps', 'keep'):
      if getattr(self, name) < 1:
        raise UserError(f'checkpoint.{name}: {getattr(self, name)}, wanted at least 1')


class CheckpointFailed(RunError):
  """Raised when a commit cannot be written. Earlier commits are not affected."""


class Taken(NamedTuple):
  """Files of another run's commit, linked or copied into this run but not committed here yet."""

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

  def clean(self) -> None:
    """Removes directories without COMMIT, which killed processes have left.

    Only process 0 calls this, before any process calls `save`.
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

  def save(self, step: int, state: Any, host: Json, *, best: int | None) -> None:
    """Commits `state` and `host` as `step`. Every process must call it with the same step.

    When the call returns in any process, the commit is complete. Old commits are then removed,
    except for the newest `CheckpointConfig.keep` and `best`.

    Args:
      step: number of completed batches. No commit of this step may exist yet.
      state: pytree of arrays.
      host: JSON state from which process 0 resumes. Other processes ignore it.
      best: step of a commit to keep in addition to the newest ones. If None, only those are kept.

    Raises:
      CheckpointFailed: if the files cannot be written, for example because the disk is full.
        Earlier commits are then intact.
    """
    target = self._directory / str(step)
    encoded = json.dumps(host).encode()
    if self._leads and step in self.steps():
      raise RuntimeError(f'checkpoint {target}: committed already')
    with _quiet_orbax():
      try:
        if self._leads:
          target.mkdir(parents=True, exist_ok=True)
        deadline = ocp.options.AsyncOptions(timeout_secs=_DEADLINE_S)
        with ocp.StandardCheckpointer(async_options=deadline) as checkpointer:
          checkpointer.save(target / _ARRAYS, state, force=True)
        if self._leads:
          (target / _HOST).write_bytes(encoded)
          _commit(target)
      except (OSError, ValueError) as error:
        # A ValueError comes either from the storage library or from a collective operation that
        # lost a peer. Only the storage library names the file in its message.
        if isinstance(error, ValueError) and str(target) not in str(error):
          raise
        if self._leads:
          _remove_failed(target, error)
        kept = self.steps()
        reason = _reason(error)
        raise CheckpointFailed(
          f'checkpoint {target}: could not be written ({reason}); '
          f'{f"the newest commit is step {kept[-1]}" if kept else "there is no earlier commit"}; '
          'free space and start again with the same command'
        ) from error
    if self._leads:
      self._retire(best)
    if jax.process_count() > 1:
      # The wait 'device' is bounded by the deadline of the device thread, which makes this call.
      multihost_utils.sync_global_devices(f'commit {step}')

  def restore(self, step: int, like: Any) -> Any:
    """Restores the arrays of a committed step.

    Args:
      like: pytree of arrays or ShapeDtypeStructs, with the shapes, dtypes and shardings of the
        result.
    """
    self._verify(step, self._committed(step))
    abstract = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
    )
    with _quiet_orbax(), ocp.StandardCheckpointer() as checkpointer:
      return checkpointer.restore(self._directory / str(step) / _ARRAYS, abstract)

  def host(self, step: int) -> Any:
    """Returns the `host` value that was saved with `step`."""
    self._verify(step, [_HOST])
    return json.loads((self._directory / str(step) / _HOST).read_text())

  def take(self, source: Checkpoints, step: int) -> Taken:
    """Links or copies the files of a commit of another run, which may be running.

    Raises:
      UserError: the commit is damaged, or was removed meanwhile.
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
    (target / _HOST).unlink()  # A hard link of the other run's file, which must stay as it is.
    (target / _HOST).write_text(json.dumps(host))
    _commit(
      target,
      {name: size_and_digest for name, size_and_digest in taken.files.items() if name != _HOST},
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

  def _retire(self, best: int | None) -> None:
    for step in self.steps()[: -self._config.keep]:
      if step != best:
        # COMMIT is removed first. If the removal is then interrupted, `clean` removes the rest.
        (self._directory / str(step) / _COMMIT).unlink()
        shutil.rmtree(self._directory / str(step), ignore_errors=True)


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
  """Suppresses orbax's progress logs, and the traceback that orbax prints for each failed write.

  The error itself is still raised.
  """
  loggers, hook = (
    (logging.get_absl_logger(), stdlib_logging.getLogger('asyncio')),
    sys.unraisablehook,
  )
  for logger in loggers:
    logger.addFilter(_not_of_orbax)
  # After a first error, orbax closes its event loop. Each write that finishes later then raises
  # 'Event loop is closed' where nothing can catch the exception.
  sys.unraisablehook = lambda ignored: (
    None if 'Event loop is closed' in str(ignored.exc_value) else hook(ignored)
  )
  try:
    yield
  finally:
    sys.unraisablehook = hook
    for logger in loggers:
      logger.removeFilter(_not_of_orbax)


def _not_of_orbax(record: stdlib_logging.LogRecord) -> bool:
  never_retrieved = record.name == 'asyncio' and 'orbax' in record.getMessage()
  return 'orbax' not in record.pathname and not never_retrieved


def _remove_failed(path: pathlib.Path, error: Exception) -> None:
  """Removes the files of a failed save.

  The removal is repeated until no files appear for `_QUIET_S` seconds, because pending writes
  continue for a while and create directories again.
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


def _commit(
  path: pathlib.Path, expected: Mapping[str, tuple[int, str]] = types.MappingProxyType({})
) -> None:
  """Syncs every file to disk, then writes COMMIT and syncs it too.

  Raises UserError, and writes nothing, if a file lacks the expected size and digest.
  """
  files = {}
  for file in sorted(path.rglob('*')):
    sync(file)
    if file.is_file():
      files[str(file.relative_to(path))] = (file.stat().st_size, _digest(file))
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
      f'not every process had written its part after {_DEADLINE_S} s; see the logs of the others'
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
