"""The run directory: at most one live run, and a configuration fixed once a step is committed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl_llm.app.composition.saved import read_saved
from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.load import difference
from jaxrl_llm.config.values import from_json, to_json
from jaxrl_llm.core.disk import write_durably
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.replay.committed import missing
from jaxrl_llm.runtime.events import FILE as EVENTS_FILE
from jaxrl_llm.runtime.log.api import DIRECTORY as LOGGING
from jaxrl_llm.runtime.writers import METRICS_FILE

MAY_CHANGE = ('rewards.workers', 'rollout.explorers', 'coordination', 'registry', 'logging')
"""Keys whose values a resumed run may change, beside those of its engine: number, place and
deadlines of its services and processes, not what they compute.
"""
ATTEMPT = 'attempt'
"""Name of the file that holds the number of the last start."""
_MAX_DIGITS = 20
"""Number of bytes from which on the attempt file's content is not accepted as a number."""
TOKENIZER, DATA = 'tokenizer', 'data'
"""Folders of the files that a start makes from the configuration: the tokenizer, and static rows of
offline stages.
"""


class WorkdirInUse(UserError):
  """Another live process is using this run directory."""


class Workdir:
  """Creates and locks the run directory; the lock lasts until `close` or until the process ends,
  however it ends.
  """

  def __init__(self, path: pathlib.Path):
    self.path = path.absolute()
    try:
      self.path.mkdir(parents=True, exist_ok=True)
      self._lock = (self.path / 'lock').open('a+')
    except OSError as error:
      raise UserError(
        f'--workdir={path}: {error.strerror}; choose a directory that can be written'
      ) from error
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      self._lock.seek(0)
      owner = self._lock.read().strip() or 'unknown'
      raise WorkdirInUse(
        f'--workdir={path}: in use by a live run (process {owner}); wait for it, stop it, or '
        'choose another --workdir'
      ) from None
    except OSError as error:
      raise UserError(
        f'--workdir={path}: cannot be locked ({error.strerror}); choose a directory on a file '
        'system with locks'
      ) from error
    self._lock.truncate(0)
    self._lock.write(str(os.getpid()))
    self._lock.flush()

  def close(self) -> None:
    """Releases the lock on the run directory."""
    self._lock.close()

  def adopt(self, config: Config) -> None:
    """Writes config.json, or raises UserError for a changed configuration once a step is committed.

    Before the first commit, a changed configuration replaces the old one, so that a mistake in the
    first command does not make the directory useless.
    """
    file = self.path / 'config.json'
    if check_configuration(self.path, config):
      return
    if file.exists():
      for made in (TOKENIZER, DATA, LOGGING):
        shutil.rmtree(self.path / made, ignore_errors=True)
    write_durably(file, json.dumps(to_json(config), indent=1))

  def check(self, commit: Mapping[str, Any]) -> None:
    """Checks that everything a commit names still exists; writes nothing.

    Args:
      commit: the host state that the keeper committed with the arrays. Commits that earlier
        versions of jaxrl_llm wrote name no store, attempt or files; for these, the index, plans and
        segments are checked, but not which store they belong to.

    Raises:
      UserError: something is missing; the message names everything that is.
    """
    gone = [name for name in (ATTEMPT, METRICS_FILE) if not (self.path / name).is_file()]
    there = made_files(self.path)
    for name, size in commit.get('files', {}).items():
      if there.get(name) != size:
        gone.append(
          f'{name} of {size:,} bytes' + (f' (it has {there[name]:,})' if name in there else '')
        )
    gone += missing(self.path / 'replay', step=commit['step'], store=commit.get('store'))
    if gone:
      raise UserError(
        f'{self.path}: the run cannot resume from its commit at step {commit["step"]}, whose files '
        f'are missing or changed: {"; ".join(gone)}; restore them from a copy, or start another '
        'run in another --workdir'
      )

  def next_attempt(self, *, least: int = 0) -> int:
    """Returns the number of this start, once it is durably on disk.

    Args:
      least: minimum number that the last start can have had, as known from the commit.

    Raises:
      UserError: the file holds no number, or one below `least`.
    """
    file = self.path / ATTEMPT
    attempt = 0
    if file.exists():
      content = file.read_bytes()[:_MAX_DIGITS]
      last = int(content) if content.strip().isdigit() and len(content) < _MAX_DIGITS else -1
      if last < least:
        raise UserError(
          f'{file}: holds {content.decode(errors="replace")!r}, wanted the number of the last '
          f'start, at least {least}; restore it, or write a number there that is larger than any '
          f'"attempt" in {self.path / EVENTS_FILE}'
        )
      attempt = last + 1
    write_durably(file, str(attempt))
    return attempt


def check_configuration(path: pathlib.Path, config: Config) -> bool:
  """Returns whether the run directory `path` already holds this configuration. Writes nothing.

  Raises:
    UserError: the directory has commits of another configuration, or its configuration is missing
      or unreadable.
  """
  file = path / 'config.json'
  if not file.exists():
    if has_commits(path):
      raise UserError(
        f'{file}: missing, so that no start can check its configuration against that of the '
        f'commits in {path / "checkpoints"}; restore it, or choose another --workdir'
      )
    return False
  try:
    old = read_saved(file)
    if not isinstance(old, dict):
      raise ValueError('not a JSON object')
  except ValueError as error:  # not JSON, or not even text
    raise UserError(
      f'{file}: not the configuration of a run ({error}); choose another --workdir'
    ) from error
  # Of an earlier version: fields that it lacked have their defaults.
  with contextlib.suppress(UserError):
    old = to_json(from_json(old, Config))
  may_change = (*MAY_CHANGE, *config.rollout.engine_may_change())
  changes = [change for change in difference(old, config) if not is_below(change[0], may_change)]
  if not changes:
    return True
  if has_commits(path):
    listed = '; '.join(
      f'{key}: {before!r} in the run, {after!r} now' for key, before, after in changes[:5]
    )
    more = f' and {len(changes) - 5} more' if len(changes) > 5 else ''
    raise UserError(
      f'{path}: holds a run with another configuration ({listed}{more}); resume with the same '
      f'command, or branch from it with --init_from={path} and another --workdir'
    )
  return False


def is_live(path: pathlib.Path) -> bool:
  """Whether a live process runs in the run directory `path`. Writes nothing."""
  try:
    with (path / 'lock').open() as lock:
      fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except BlockingIOError:
    return True
  except OSError:  # No lock file, or no right to read it.
    return False
  return False


def has_commits(path: pathlib.Path) -> bool:
  """Whether the run in the directory `path` has committed a step."""
  return any(path.glob('checkpoints/*/COMMIT'))


def made_files(path: pathlib.Path) -> dict[str, int]:
  """Returns the sizes in bytes of the tokenizer and data files in the run directory, keyed by path
  relative to it.
  """
  files = sorted(
    file for made in (TOKENIZER, DATA) for file in (path / made).rglob('*') if file.is_file()
  )
  return {file.relative_to(path).as_posix(): file.stat().st_size for file in files}


def is_below(key: str, others: Iterable[str]) -> bool:
  """Whether the dotted key is one of the others, or lies below it."""
  return any(key == other or key.startswith(f'{other}.') for other in others)
