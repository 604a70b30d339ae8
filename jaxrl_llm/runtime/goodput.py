"""Goodput: a breakdown of how the processes of a run spend their time (docs/guides/report.md).

Each second of a process belongs to a class, such as training or waiting. This module measures the
classes for trainers; `core.process_clock` measures them for servers, explorers and scorer workers.
No class is computed as the remainder of the others. The sum of all classes can therefore be checked
against the lifetime of the processes, which is measured separately (`goodput/wall_s/…`).
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
from collections.abc import Iterable, Mapping

from jaxrl_llm.core.disk import write_durably
from jaxrl_llm.core.process_clock import SECONDS, WALL
from jaxrl_llm.runtime.stopwatch import OwnSeconds

KINDS = {'trainer': ('train', 'generate'), 'servers': ('generate',), 'explorers': ('work',),
         'scorers': ('score',)}  # fmt: skip
"""Classes of useful work, keyed by kind of process."""
_CLASSES = {
  'enter': 'start',
  'update_weights': 'publish',
  'gen': 'wait',
  'load': 'load',
  'phases': 'move',
  **dict.fromkeys(
    (
      *('reward_model', 'annotate', 'old_log_prob', 'ref', 'values', 'adv'),
      *('train', 'update_actor', 'update_critic'),
    ),
    'train',
  ),
  'testing': 'evaluate',
  'save_checkpoint': 'commit',
  'record': 'record',
  'step': 'loop',
}
"""Class of the seconds of each part of a step, keyed by part. The part `step` contains other parts,
and its class `loop` is the time between them. Time outside of all parts belongs to no class.
"""
_STEP = 'training/global_step'
_REPEATABLE = ('generate', 'wait', 'load', 'train', 'loop')


def trainer_seconds(
  parts: Mapping[str, OwnSeconds], wall_s: float, *, is_repeated: bool
) -> dict[str, float]:
  """Returns metrics that say how one trainer process spent its time, in seconds per class.

  Args:
    parts: seconds of each part of the step, excluding the parts nested inside it. The time in which
      the engine of this process samples counts as `evaluate` in an evaluation and as `generate`
      in all other parts of the step.
    wall_s: seconds since the previous row of metrics.
    is_repeated: whether an earlier attempt had completed this step before a crash, so that the step
      had to be repeated. If so, the seconds of the classes in `_REPEATABLE` count as `recompute`.
  """
  seconds: collections.Counter[str] = collections.Counter()
  for name, own in parts.items():
    if (of := _CLASSES.get(name)) is not None:
      seconds[of] += own.alone
      seconds['evaluate' if of == 'evaluate' else 'generate'] += own.beside
  if is_repeated:
    seconds['recompute'] = sum(seconds.pop(name, 0.0) for name in _REPEATABLE)
  return {
    **{f'{SECONDS}trainer/{name}': value for name, value in sorted(seconds.items())},
    f'{WALL}trainer': wall_s,
  }


def shares(rows: Iterable[Mapping[str, object]], kind: str) -> dict[str, float]:
  """Returns the share of each class in the lifetime of all processes of a kind, over rows of
  metrics, largest first. The shares add up to 1 if every second is in exactly one class. The result
  is empty if the rows have no such metrics for this kind.
  """
  prefix, seconds, wall = f'{SECONDS}{kind}/', collections.Counter(), 0.0
  for row in rows:
    for key, value in row.items():
      if isinstance(value, int | float):
        if key.startswith(prefix):
          seconds[key.removeprefix(prefix)] += value
        elif key == f'{WALL}{kind}':
          wall += value
  # Rows of earlier program versions have no wall time. In these versions, the seconds of all
  # classes always added up to the wall time.
  wall = wall or sum(seconds.values())
  return {name: value / wall for name, value in seconds.most_common() if value} if wall else {}


def file_of(workdir: pathlib.Path, process: int) -> pathlib.Path:
  """Returns the file with the seconds of a trainer process other than process 0. The seconds of
  process 0 are in metrics.jsonl.
  """
  return workdir / f'goodput-{process}.jsonl'


def append(file: pathlib.Path, step: int, row: Mapping[str, float]) -> None:
  """Appends a row with the seconds of a step to the file of a trainer process. An incomplete last
  line is terminated.
  """
  with file.open('a+b') as lines:
    if lines.tell():
      lines.seek(-1, os.SEEK_END)
      if lines.read() != b'\n':
        lines.write(b'\n')
    lines.write(json.dumps({_STEP: step, **row}).encode() + b'\n')


def discard_later(workdir: pathlib.Path, step: int) -> None:
  """Removes damaged lines and the rows of steps after `step`, at which the run resumes."""
  for file in _files(workdir):
    lines = file.read_bytes().splitlines(keepends=True)
    kept = [
      line
      for line in lines
      if line.endswith(b'\n') and (row := _row(line)) is not None and row[_STEP] <= step
    ]
    if kept != lines:
      write_durably(file, b''.join(kept).decode(errors='replace'))


def rows_of_others(workdir: pathlib.Path) -> list[dict[str, float]]:
  """Returns the rows of the trainer processes other than process 0: the newest row of each step and
  process. Damaged lines are skipped.
  """
  rows: dict[tuple[str, object], dict[str, float]] = {}
  for file in _files(workdir):
    for line in file.read_bytes().splitlines():
      if (row := _row(line)) is not None:
        rows[file.name, row[_STEP]] = row
  return [*rows.values()]


def _files(workdir: pathlib.Path) -> list[pathlib.Path]:
  return sorted(workdir.glob('goodput-*.jsonl'))


def _row(line: bytes) -> dict[str, float] | None:
  """Returns the row of a line, or None if the line is damaged."""
  try:
    row = json.loads(line)
    return row if isinstance(row[_STEP], int) else None
  except (ValueError, TypeError, KeyError):
    return None
