"""The run directory, which has at most one live run, and the run's configuration.

Once a step is committed, the configuration may change only as `changes` permits. history.jsonl
records each change with the first step for which it was in force.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import pathlib
import shlex
import shutil
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxrl_llm.app.composition.changes import (
  Refused,
  changes,
  current,
  misfits,
  refused,
  reset_flags,
)
from jaxrl_llm.app.composition.lock import lock
from jaxrl_llm.app.composition.saved import read_saved
from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.values import to_json
from jaxrl_llm.core.disk import sync, write_durably
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.replay.committed import missing
from jaxrl_llm.runtime import history
from jaxrl_llm.runtime.checkpoint import CheckpointConfig, Checkpoints
from jaxrl_llm.runtime.events import EARLIER_FILE as EARLIER_EVENTS_FILE
from jaxrl_llm.runtime.events import FILE as EVENTS_FILE
from jaxrl_llm.runtime.history import Change
from jaxrl_llm.runtime.log.api import DIRECTORY as LOGGING
from jaxrl_llm.runtime.writers import METRICS_FILE

CONFIG = 'config.json'
"""Name of the file with the configuration of the run's next step."""
ATTEMPT = 'attempt'
"""Name of the file with the number of the last attempt (start of the run)."""
_MAX_DIGITS = 20
"""Size limit of an attempt file in bytes. No number of attempts has so many digits."""
TOKENIZER, DATA = 'tokenizer', 'data'
"""Folders in the run directory for files derived from the configuration at the start: the
tokenizer, and the static rows of stages.
"""


class Workdir:
  """A locked run directory, which is created if necessary. The lock lasts until `close` is called
  or the process ends.
  """

  def __init__(self, path: pathlib.Path, *, branching: bool = False):
    """
    Args:
      branching: whether to use `<path>.branching` until `place` renames it to `path`.
    """
    self._target = path.absolute()
    self.path = path = (
      self._target.with_name(f'{self._target.name}.branching') if branching else self._target
    )
    self._lock = lock(self.path, named=path)

  @property
  def branching(self) -> bool:
    """Whether a branch is being built in the directory `<path>.branching`."""
    return self.path != self._target

  def place(self) -> None:
    """Renames the directory `<path>.branching` of a complete branch to `path`.

    Raises:
      UserError: the directory cannot be renamed, for example because `path` contains files.
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
    """Removes the directory of an incomplete branch."""
    if self.branching:
      shutil.rmtree(self.path, ignore_errors=True)

  def close(self) -> None:
    """Releases the lock on the run directory."""
    self._lock.close()

  def adopt(self, config: Config) -> tuple[Change, ...]:
    """Writes config.json if the run has no commit yet; otherwise only compares the configurations.

    Before the first commit, a changed configuration replaces the old one, and the files derived
    from the old one are removed. A mistake in the first command therefore does not make the
    directory useless.

    Returns:
      The changes to the configuration of a run with commits, which `record` writes. Empty if the
      run has no commit.

    Raises:
      UserError: the configuration has changes that are not permitted.
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

  def record(
    self,
    config: Config,
    *,
    commit: int,
    attempt: int,
    machine: Mapping[str, int] = MappingProxyType({}),
    committed_by: Mapping[str, Any] = MappingProxyType({}),
  ) -> None:
    """Records that the next and later steps use this configuration on this machine.

    Call this only after everything else has accepted the configuration. If the process is killed
    before this call, the run still has its old configuration, and repeating the command makes the
    same changes.

    Args:
      commit: step of the commit from which the run continues; 0 if there is none.
      attempt: number of this start of the run.
      machine: numbers of devices and processes of this start, as in `history.Entry`.
      committed_by: numbers of devices and processes of the start that made the commit. They are
        used if the history lacks these numbers.
    """
    recorded = history.read(self.path)
    entries = history.until(recorded, commit) if commit else ()
    if commit and not entries:
      # The run was started by an earlier program version, which wrote no history.
      entries = (_entry(saved_configuration(self.path), step=1, attempt=0),)
    if not entries:
      entries = (_entry(to_json(config), step=1, attempt=attempt, machine=machine),)
    else:
      last = entries[-1]
      if last.parent is not None and last.step == commit + 1 and not last.machine:
        # The branch already has an entry for its first step, written when the branch took over the
        # commit. That entry lacks the numbers of devices and processes.
        moved = history.machine_changes(committed_by, machine)
        last = dataclasses.replace(last, machine=machine, changes=last.changes + moved)
        entries = (*entries[:-1], last)
      before = last.machine or committed_by
      changed = changes(entries[-1].config, config) + history.machine_changes(before, machine)
      if changed:
        fields = dict(step=commit + 1, attempt=attempt, changes=changed, machine=machine)
        entries += (_entry(to_json(config), **fields),)
    if entries != recorded:
      history.write(self.path, entries)
    if saved_configuration(self.path) != to_json(config):
      write_configuration(self.path, config)

  def check(self, commit: Mapping[str, Any]) -> None:
    """Checks that everything that a commit refers to still exists, and that files still have the
    recorded sizes. Writes nothing.

    Args:
      commit: host state of the commit, which is everything in it except arrays. Commits of earlier
        versions of jaxrl_llm do not name a store, an attempt or files. For these, the index, plans
        and segments are checked, but not whether the store is the one that the commit belongs to.

    Raises:
      UserError: something is missing or has another size. The message lists each case.
    """
    problems = [name for name in (ATTEMPT, METRICS_FILE) if not (self.path / name).is_file()]
    sizes = made_files(self.path)
    for name, size in commit.get('files', {}).items():
      if sizes.get(name) != size:
        problems.append(
          f'{name} of {size:,} bytes' + (f' (it has {sizes[name]:,})' if name in sizes else '')
        )
    problems += missing(self.path / 'replay', step=commit['step'], store=commit.get('store'))
    if problems:
      raise UserError(
        f'{self.path}: the run cannot resume from its commit at step {commit["step"]}, whose files '
        f'are missing or changed: {"; ".join(problems)}; restore them from a copy, or start '
        'another run in another --workdir'
      )

  def next_attempt(self, *, least: int = 0) -> int:
    """Counts a new start of the run and returns its number, which is on disk before the function
    returns.

    Args:
      least: number of the start that made the commit. The last start cannot have a smaller number.

    Raises:
      UserError: the file does not contain a number, or contains one below `least`.
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
          f'"attempt" in {self.path / EVENTS_FILE} and {EARLIER_EVENTS_FILE}'
        )
      attempt = last + 1
    write_durably(file, str(attempt))
    return attempt


def check_configuration(path: pathlib.Path, config: Config) -> tuple[Change, ...] | None:
  """Returns the changes to the configuration of the run in the directory `path`, if the run is
  resumed with `config`. Writes nothing.

  Returns None if nothing is resumed: the directory has no run, or a run without commits that has
  another configuration.

  Raises:
    UserError: the run has commits and cannot be resumed with this configuration, or its
      configuration is missing or unreadable.
  """
  commits = committed_steps(path)
  if not (path / CONFIG).exists():
    if commits:
      raise UserError(
        f'{path / CONFIG}: missing, so the configuration cannot be compared with that of the '
        f'commits in {path / "checkpoints"}; restore it, or choose another --workdir'
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
  """Returns, as JSON, the configuration with which the run in the directory `path` made, or will
  make, the first step after the commit at step `commit`.
  """
  entries = history.until(history.read(path), commit)
  return entries[-1].config if entries else saved_configuration(path)


class Unchangeable(UserError):
  """Raised when the configuration has changed in a way that prevents the run from being resumed."""


def _refusal(
  path: pathlib.Path, config: Config, problems: list[Refused], commits: list[int]
) -> Unchangeable:
  """Returns an error that lists the refused changes, the reasons, and a remedy. The remedy is to
  branch from the newest commit at which the changes are permitted, or else to start another run.
  """
  listed = '; '.join(map(str, problems[:5]))
  more = f'; and {len(problems) - 5} more' if len(problems) > 5 else ''
  newest = min(
    (problem.newest for problem in problems if problem.newest is not None), default=commits[-1]
  )
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
      f'start another run in another --workdir (the run keeps no commit up to step {newest} to '
      f'branch from, only those at {commits})'
    )
  return Unchangeable(
    f'{path}: the run cannot be resumed with these changes: {listed}{more}; resume it without '
    f'them, or {remedy}'
  )


def saved_configuration(path: pathlib.Path) -> dict[str, Any]:
  """Returns the content of the run's config.json. Raises UserError if it is not a configuration."""
  file = path / CONFIG
  try:
    old = read_saved(file)
    if not isinstance(old, dict):
      raise ValueError('not a JSON object')
  except ValueError as error:  # The file is not JSON, or not text.
    raise UserError(
      f'{file}: not the configuration of a run ({error}); choose another --workdir'
    ) from error
  return old


def write_configuration(path: pathlib.Path, config: Config) -> None:
  write_durably(path / CONFIG, json.dumps(to_json(config), indent=1))


def _entry(config: Mapping[str, Any], **fields: Any) -> history.Entry:
  return history.Entry(config=current(config), time=round(time.time(), 3), **fields)


def is_live(path: pathlib.Path) -> bool:
  """Returns whether a live process uses the run directory `path`. Writes nothing."""
  try:
    with (path / 'lock').open() as file:
      fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except BlockingIOError:
    return True
  except OSError:  # There is no lock file, or this process may not read it.
    return False
  return False


def has_commits(path: pathlib.Path) -> bool:
  """Returns whether the run in the directory `path` has committed a step."""
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
