"""Commits: a checkpoint exists exactly when its COMMIT file does, and then it is whole.

`checkpoints/<step>/arrays` is written by all processes (orbax), `host.json` and then `COMMIT` (names, sizes, digests of
every file) by process 0, fsynced last. What has no COMMIT is removed at the next start.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp
import xxhash

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.types import Json

_COMMIT, _HOST, _ARRAYS = 'COMMIT', 'host.json', 'arrays'


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
  every_steps: int = 10
  every_minutes: float = 5.0
  """A commit made by the clock is no decision: it changes nothing about the run but where it can resume."""
  keep: int = 3
  """Newest commits that are kept; the best by evaluation is kept beside them."""


class CheckpointFailed(RunError):
  """A commit could not be written; the commits before it are untouched."""


class Checkpoints:
  """The commits of one run directory."""

  def __init__(self, directory: pathlib.Path, config: CheckpointConfig, *, leads: bool):
    """
    Args:
      directory: `<workdir>/checkpoints`.
      leads: whether this is process 0, which alone writes and removes what is not an array.
    """
    self._directory, self._config, self._leads = directory.absolute(), config, leads

  def clean(self) -> None:
    """Removes what a killed process left without a COMMIT. Process 0 only, before anybody saves."""
    if self._directory.exists():
      for path in self._directory.iterdir():
        if not (path / _COMMIT).exists():
          shutil.rmtree(path, ignore_errors=True)

  def steps(self) -> list[int]:
    """Committed steps, oldest first."""
    if not self._directory.exists():
      return []
    return sorted(int(p.parent.name) for p in self._directory.glob(f'*/{_COMMIT}'))

  def save(self, step: int, state: Any, host: Json, *, best: int | None) -> None:
    """Commits `state` and `host` as `step`; called by every process with the same step.

    Args:
      step: completed batches.
      state: a tree of arrays.
      host: what process 0 needs to go on (ignored in the others).
      best: a committed step to keep beside the newest.

    Raises:
      CheckpointFailed: when the files could not be written (disk full); nothing committed before is lost.
    """
    target = self._directory / str(step)
    try:
      if self._leads:
        target.mkdir(parents=True, exist_ok=True)
      with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(target / _ARRAYS, state, force=True)
      if self._leads:
        _write_durably(target / _HOST, json.dumps(host).encode())
        _write_durably(target / _COMMIT, json.dumps(_manifest(target), indent=1).encode())
        _fsync_directory(self._directory)
        self._retire(best)
    except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
      if self._leads:
        shutil.rmtree(target, ignore_errors=True)
      kept = self.steps()
      reason = _reason(error)
      raise CheckpointFailed(
        f'checkpoint {target}: could not be written ({reason}); '
        f'{f"the newest commit is step {kept[-1]}" if kept else "there is no earlier commit"}; '
        'free space and start again with the same command'
      ) from error

  def restore(self, step: int, like: Any) -> Any:
    """The arrays of a committed step, on the shardings of `like` (arrays or ShapeDtypeStructs with shardings)."""
    self._verify(step)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    with ocp.StandardCheckpointer() as checkpointer:
      return checkpointer.restore(self._directory / str(step) / _ARRAYS, abstract)

  def host(self, step: int) -> Any:
    """What `save` got as `host`."""
    return json.loads((self._directory / str(step) / _HOST).read_text())

  def _verify(self, step: int) -> None:
    path = self._directory / str(step)
    committed = json.loads((path / _COMMIT).read_text())
    for name, (size, digest) in committed.items():
      file = path / name
      if not file.exists() or file.stat().st_size != size or _digest(file) != digest:
        raise UserError(
          f'checkpoint {file}: differs from what was committed (wanted {size} bytes, digest {digest}); '
          f'remove {path} to resume from an earlier commit'
        )

  def _retire(self, best: int | None) -> None:
    for step in self.steps()[: -self._config.keep]:
      if step != best:
        # Without its COMMIT it is no checkpoint any more, whenever the removal is interrupted.
        (self._directory / str(step) / _COMMIT).unlink()
        shutil.rmtree(self._directory / str(step))


def _manifest(path: pathlib.Path) -> dict[str, tuple[int, str]]:
  files = sorted(p for p in path.rglob('*') if p.is_file() and p.name != _COMMIT)
  return {str(p.relative_to(path)): (p.stat().st_size, _digest(p)) for p in files}


def _digest(path: pathlib.Path) -> str:
  digest = xxhash.xxh3_128()
  with path.open('rb') as file:
    while block := file.read(1 << 22):
      digest.update(block)
  return digest.hexdigest()


def _write_durably(path: pathlib.Path, data: bytes) -> None:
  temporary = path.with_name(path.name + '.tmp')
  with temporary.open('wb') as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
  temporary.rename(path)
  _fsync_directory(path.parent)


def _fsync_directory(path: pathlib.Path) -> None:
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def _reason(error: Exception) -> str:
  """The system's own words where they are buried in a storage library's message."""
  if isinstance(error, OSError) and error.strerror:
    return error.strerror
  text = str(error)
  for known in ('No space left on device', 'File too large', 'Disk quota exceeded', 'Read-only file system'):
    if known in text:
      return known
  return text.splitlines()[0][:200] if text else type(error).__name__
