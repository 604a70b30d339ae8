"""Goodput: the ledger of what a run's seconds were spent on (docs/guides/report.md).

Every second of the trainer's loop, and of each server, belongs to one class. The ledger measures
nothing itself: it divides the seconds between two rows of metrics by the parts that were timed
anyway. Invariant: the classes of a ledger add up to the seconds that it divides.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping

PREFIX = 'goodput/seconds/'


def trainer_seconds(
  parts: Mapping[str, float], elapsed_s: float, *, samples_itself: bool, is_repeated: bool
) -> dict[str, float]:
  """Divides the seconds of the trainer's loop. Returns the seconds of each class.

  Args:
    parts: seconds of the timed parts, as in the metrics `timing_s/…`.
    elapsed_s: seconds since the previous row of metrics.
    samples_itself: whether the sampler runs in the trainer, so that the loop generates while it
      waits for a batch.
    is_repeated: whether an earlier attempt had completed the step, and a crash undid it. All
      seconds of the step itself then belong to `recompute`.
  """
  gen, publish = parts.get('gen', 0.0), parts.get('update_weights', 0.0)
  collect = max(0.0, gen - publish)
  generate = max(0.0, collect - parts.get('reward', 0.0)) if samples_itself else 0.0
  load = parts.get('load', 0.0)
  step = {
    'generate': generate,
    'wait': collect - generate,
    'load': load,
    'train': max(0.0, parts.get('annotate', 0.0) + parts.get('train', 0.0) - load),
  }
  if is_repeated:
    step = {'recompute': sum(step.values())}
  spent = {
    **step,
    'publish': publish,
    'evaluate': parts.get('testing', 0.0),
    'commit': parts.get('save_checkpoint', 0.0),
  }
  return _with_rest(spent, elapsed_s, 'other')


def server_seconds(
  servers: int, elapsed_s: float, *, idle_s: float, pause_s: float, evaluate_s: float
) -> dict[str, float]:
  """Divides the seconds of all servers, as if each did what the fleet does. Returns the seconds of
  each class.

  Args:
    servers: number of servers.
    elapsed_s: seconds since the previous row of metrics.
    idle_s: seconds in which no group was generated or scored.
    pause_s: seconds in which a publication kept servers from sampling.
    evaluate_s: seconds of evaluation.
  """
  publish = min(pause_s, elapsed_s)
  evaluate = min(evaluate_s, elapsed_s - publish)
  # Publications and evaluations usually happen while no group is in progress.
  idle = min(max(0.0, idle_s - publish - evaluate), elapsed_s - publish - evaluate)
  spent = {'publish': publish, 'evaluate': evaluate, 'idle': idle}
  return {
    name: servers * seconds for name, seconds in _with_rest(spent, elapsed_s, 'generate').items()
  }


def shares(rows: Iterable[Mapping[str, object]], process: str) -> dict[str, float]:
  """Returns the share of each class in the seconds of a process, over rows of metrics, largest
  first. Empty if the rows have no ledger of it.

  Args:
    process: 'trainer' or 'servers'.
  """
  prefix, seconds = f'{PREFIX}{process}/', collections.Counter()
  for row in rows:
    for key, value in row.items():
      if key.startswith(prefix) and isinstance(value, int | float):
        seconds[key.removeprefix(prefix)] += value
  total = sum(seconds.values())
  return {name: value / total for name, value in seconds.most_common() if total and value}


def _with_rest(spent: dict[str, float], elapsed_s: float, rest: str) -> dict[str, float]:
  return {**spent, rest: max(0.0, elapsed_s - sum(spent.values()))}
