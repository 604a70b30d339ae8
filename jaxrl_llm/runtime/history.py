"""history.jsonl: the configurations under which a run made its steps, and the run it branched from.

Each line is an entry: a configuration with the numbers of devices and processes, the first step
that it was used for, and its differences from the previous entry. Steps are counted from 1. A
configuration stays in force until the next entry's first step.

Invariant: the entries describe the steps that the run has now. If a run is resumed from a commit,
entries of steps that the commit does not contain are replaced by the configuration with which the
run continues.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.core.disk import write_durably
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.files import parse_json
from jaxrl_llm.core.types import Json

FILE = 'history.jsonl'
_LATEST = 1e11
"""Upper limit of valid times, in seconds since 1970. A file with a later time is considered
damaged.
"""


class Change(NamedTuple):
  """A changed configuration value, or a changed number of devices or processes."""

  key: str
  """Dotted key of the changed value, as in --config.KEY; or 'devices' or 'processes' (see
  `Entry.machine`).
  """
  before: Json
  after: Json

  def __str__(self) -> str:
    return f'{self.key}: {self.before!r:.200} → {self.after!r:.200}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parent:
  """The commit that a run branched from."""

  run: str
  """Absolute path of the parent's run directory, which may no longer exist."""
  step: int
  """Step of the commit."""
  reset: tuple[str, ...] = ()
  """Parts that the branch did not take over: any of 'optimizer', 'data' and 'store'."""

  def __str__(self) -> str:
    without = f', without its {", ".join(self.reset)}' if self.reset else ''
    return f'branched from {self.run} at step {self.step}{without}'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """A configuration, from the first step that was made under it."""

  step: int
  """First step made under this configuration."""
  attempt: int
  """Number of the attempt (start of the run) that introduced the configuration."""
  time: float
  """Time at which the attempt that introduced the configuration began its first step, in seconds
  since 1970.
  """
  config: dict[str, Any]
  """The complete configuration as JSON."""
  changes: tuple[Change, ...] = ()
  """Differences from the previous entry's configuration and machine; empty for a new run."""
  parent: Parent | None = None
  """Commit from which the run branched at this step; None if the run did not branch here."""
  machine: Mapping[str, int] = dataclasses.field(default_factory=dict)
  """Numbers of devices and processes that the run used from `step` on, keyed by 'devices' and
  'processes'. Empty if an earlier version of this program wrote the entry, or if the run is a
  branch that has not begun.
  """

  def to_json(self) -> dict[str, Json]:
    return {
      'step': self.step,
      'attempt': self.attempt,
      'time': self.time,
      'changes': [list(change) for change in self.changes],
      'parent': None if self.parent is None else dataclasses.asdict(self.parent),
      'machine': dict(self.machine),
      'config': self.config,
    }


def read(workdir: pathlib.Path) -> tuple[Entry, ...]:
  """Returns the entries of a run's history in order; an empty tuple if there is no history yet.

  Raises:
    UserError: the file is damaged.
  """
  file = workdir / FILE
  try:
    text = file.read_text(encoding='utf-8')
  except (FileNotFoundError, NotADirectoryError):
    return ()
  except (OSError, ValueError) as error:
    raise UserError(f'{file}: cannot be read ({error}); restore it') from None
  entries: list[Entry] = []
  for number, line in enumerate(text.splitlines(), 1):
    try:
      entry = _entry(parse_json(line))
      if entry.step < (entries[-1].step if entries else 1):
        raise ValueError(f'step {entry.step} follows step {entries[-1].step if entries else 0}')
    except (ValueError, KeyError, TypeError) as error:
      raise UserError(
        f'{file}: line {number} is not an entry of a history ({type(error).__name__}: {error}); '
        'restore the file'
      ) from None
    entries.append(entry)
  return tuple(entries)


def write(workdir: pathlib.Path, entries: Sequence[Entry]) -> None:
  """Replaces a run's history. The file is on disk when the function returns."""
  lines = [json.dumps(entry.to_json(), ensure_ascii=False) + '\n' for entry in entries]
  write_durably(workdir / FILE, ''.join(lines))


def machine_changes(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[Change, ...]:
  """Returns the differences between two machines (`Entry.machine`). Keys that `before` lacks are
  left out.
  """
  return tuple(
    Change(key, before[key], number)
    for key, number in after.items()
    if key in before and before[key] != number
  )


def until(entries: Sequence[Entry], commit: int) -> tuple[Entry, ...]:
  """Returns the entries that begin no later than the first step after the given commit.

  Args:
    commit: number of completed steps; 0 before the first commit.
  """
  return tuple(entry for entry in entries if entry.step <= commit + 1)


def in_force(entries: Sequence[Entry], step: int) -> Entry | None:
  """Returns the entry whose configuration applied to a step; None if there is no such entry."""
  earlier = until(entries, step - 1)
  return earlier[-1] if earlier else None


def _entry(value: Any) -> Entry:
  parent = value['parent']
  entry = Entry(
    step=value['step'],
    attempt=value['attempt'],
    time=float(value['time']),
    config=value['config'],
    changes=tuple(Change(*change) for change in value['changes']),
    parent=None
    if parent is None
    else Parent(run=parent['run'], step=parent['step'], reset=tuple(parent['reset'])),
    machine=dict(value.get('machine', {})),
  )
  whole = [entry.step, entry.attempt, *([] if parent is None else [parent['step']])]
  whole += entry.machine.values()
  if not all(type(number) is int for number in whole) or not isinstance(entry.config, dict):
    raise ValueError('wanted whole numbers and a configuration')
  if not 0 <= entry.time < _LATEST:
    raise ValueError(f'time {entry.time}')
  return entry
