"""The run directory: at most one live run, and its configuration.

Once a step is committed, the configuration may change only as `changes` says, and history.jsonl
records each change with the first step made under it.
"""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import shlex
import shutil
import time
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.app.composition.changes import (
  Refused,
  changes,
  current,
  misfits,
  refused,
  reset_flags,
)
from jaxrl_llm.app.composition.saved import read_saved
from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.values import to_json
from jaxrl_llm.core.disk import sync, write_durably
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.replay.committed import missing
from jaxrl_llm.runtime import history
from jaxrl_llm.runtime.checkpoint import CheckpointConfig, Checkpoints
from jaxrl_llm.runtime.events import FILE as EVENTS_FILE
from jaxrl_llm.runtime.history import Change
from jaxrl_llm.runtime.log.api import DIRECTORY as LOGGING
from jaxrl_llm.runtime.writers import METRICS_FILE

CONFIG = 'config.json'
"""Name of the file with the configuration of the run's next step."""
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

  def __init__(self, path: pathlib.Path, *, branching: bool = False):
    """
    Args:
      branching: whether to fill `<path>.branching` first, which `place` renames.
    """
    self._target = path.absolute()
    self.path = path = (
      self._target.with_name(f'{self._target.name}.branching') if branching else self._target
    )
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

  @property
  def branching(self) -> bool:
    """Whether the directory is being filled for a branch."""
    return self.path != self._target

  def place(self) -> None:
    """Gives a directory that was filled for a branch its name.

    Raises:
      UserError: a directory with files has this name already.
    """
    try:
      self.path.rename(self._target)
      sync(self._target.parent)
    except OSError as error:
      raise UserError(
        f'--workdir={self._target}: cannot be made from {self.path} ({error.strerror}); choose '
        'another --workdir'
      ) from error
    self.path = self._target

  def discard(self) -> None:
    """Removes a directory that was being filled for a branch."""
    if self.branching:
      shutil.rmtree(self.path, ignore_errors=True)

  def close(self) -> None:
    """Releases the lock on the run directory."""
    self._lock.close()

  def adopt(self, config: Config) -> tuple[Change, ...]:
    """Writes config.json before the first commit; later, returns the changes to the run's
    configuration, which `record` writes. Raises UserError for changes that may not be made.

    Before the first commit, a changed configuration replaces the old one, so that a mistake in the
    first command does not make the directory useless.
    """
    adopted = check_configuration(self.path, config)
    if adopted is not None:
      return adopted
    file = self.path / CONFIG
    if file.exists():
      for made in (TOKENIZER, DATA, LOGGING):
        shutil.rmtree(self.path / made, ignore_errors=True)
    write_configuration(self.path, config)
    return ()

  def record(self, config: Config, *, commit: int, attempt: int) -> None:
    """Records that the next step, and those after it, are made under this configuration.

    It is called after everything else has accepted the configuration. If the process is killed
    before, the run still has its old configuration, and the same command changes it again.

    Args:
      commit: step of the commit from which the run goes on; 0: none.
      attempt: number of this start of the run.
    """
    known = history.read(self.path)
    entries = history.until(known, commit) if commit else ()
    if commit and not entries:  # A version without histories started the run.
      entries = (_entry(saved_configuration(self.path), step=1, attempt=0),)
    if not entries:
      entries = (_entry(to_json(config), step=1, attempt=attempt),)
    elif changed := changes(entries[-1].config, config):
      entries += (_entry(to_json(config), step=commit + 1, attempt=attempt, changes=changed),)
    if entries != known:
      history.write(self.path, entries)
    if saved_configuration(self.path) != to_json(config):
      write_configuration(self.path, config)

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


def check_configuration(path: pathlib.Path, config: Config) -> tuple[Change, ...] | None:
  """Returns the changes with which `config` resumes the run in the directory `path`; None if it
  does not resume one: there is none, or its configuration differs and it has no commit yet. Writes
  nothing.

  Raises:
    UserError: the run has commits and cannot be resumed with this configuration, or its
      configuration is missing or unreadable.
  """
  commits = committed_steps(path)
  if not (path / CONFIG).exists():
    if commits:
      raise UserError(
        f'{path / CONFIG}: missing, so that no start can check its configuration against that of '
        f'the commits in {path / "checkpoints"}; restore it, or choose another --workdir'
      )
    return None
  old = saved_configuration(path)
  if not commits:
    return None if changes(old, config) else ()
  old = configuration_at(path, commits[-1])
  if problems := refused(old, config, commits[-1]):
    raise _refusal(path, config, problems, commits)
  return changes(old, config)


def configuration_at(path: pathlib.Path, commit: int) -> Mapping[str, Any]:
  """Returns the configuration of the step after a commit of the run in the directory `path`, as
  JSON.
  """
  entries = history.until(history.read(path), commit)
  return entries[-1].config if entries else saved_configuration(path)


class Unchangeable(UserError):
  """The run in a directory cannot be resumed with a changed configuration."""


def _refusal(
  path: pathlib.Path, config: Config, problems: list[Refused], commits: list[int]
) -> Unchangeable:
  """Returns an error that names the changes, why they are refused, and how to make them: in a
  branch of the newest commit that fits them, or else in another run.
  """
  listed = '; '.join(map(str, problems[:5]))
  more = f'; and {len(problems) - 5} more' if len(problems) > 5 else ''
  newest = min((one.newest for one in problems if one.newest is not None), default=commits[-1])
  earlier = [step for step in commits if step <= newest]
  needed = {
    step: reset_flags(misfits(configuration_at(path, step), config, step)) for step in earlier
  }
  step = max((step for step, flags in needed.items() if flags is not None), default=None)
  if step is not None:
    flags = [
      f'--branch_from={shlex.quote(f"{path}:{step}")}',
      f'--workdir={shlex.quote(f"{path}-branch")}',
      *needed[step],
    ]
    remedy = (
      f'start a new run from its commit at step {step}: the same command with {" ".join(flags)}'
    )
  elif earlier:
    remedy = (
      'start another run in another --workdir, since no branch can make them (--init_from takes '
      'over the weights of a finished run of the same model)'
    )
  else:
    remedy = (
      f'start another run in another --workdir (it has no commit up to step {newest} to branch '
      f'from, it keeps {commits})'
    )
  return Unchangeable(
    f'{path}: the run cannot be resumed with these changes: {listed}{more}; resume it without '
    f'them, or {remedy}'
  )


def saved_configuration(path: pathlib.Path) -> dict[str, Any]:
  """Returns the run's config.json; raises UserError if it holds no configuration."""
  file = path / CONFIG
  try:
    old = read_saved(file)
    if not isinstance(old, dict):
      raise ValueError('not a JSON object')
  except ValueError as error:  # not JSON, or not even text
    raise UserError(
      f'{file}: not the configuration of a run ({error}); choose another --workdir'
    ) from error
  return old


def write_configuration(path: pathlib.Path, config: Config) -> None:
  write_durably(path / CONFIG, json.dumps(to_json(config), indent=1))


def _entry(config: Mapping[str, Any], **fields: Any) -> history.Entry:
  return history.Entry(config=current(config), time=round(time.time(), 3), **fields)


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
  return bool(committed_steps(path))


def committed_steps(path: pathlib.Path) -> list[int]:
  """Returns the steps that the run in the directory `path` has committed, in ascending order."""
  return Checkpoints(path / 'checkpoints', CheckpointConfig(), leads=True).steps()


def made_files(path: pathlib.Path) -> dict[str, int]:
  """Returns the sizes in bytes of the tokenizer and data files in the run directory, keyed by path
  relative to it.
  """
  files = sorted(
    file for made in (TOKENIZER, DATA) for file in (path / made).rglob('*') if file.is_file()
  )
  return {file.relative_to(path).as_posix(): file.stat().st_size for file in files}
