"""Draws the next tasks of a stage from its tasksets. The state is JSON, and a restored sampler
continues exactly where it was saved.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Literal

import xxhash

from jaxrl_llm.config.values import to_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Json
from jaxrl_llm.tasks.selectors import FailureRate, Passes, Selector, TargetRate, Weighted
from jaxrl_llm.tasks.taskset import Taskset


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaterWeights:
  """Weights of tasksets that replace `SamplerConfig.weights` from a given batch on."""

  from_batch: int
  """Number, counted from 0, of the stage's first batch for which these weights are used."""
  weights: Mapping[str, float]
  """Relative share of each taskset in the draws, keyed by the name of the taskset."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerConfig:
  """Order in which a stage draws its tasks."""

  order: Literal[
    'shuffled', 'sequential', 'easy_to_hard', 'hard_to_easy', 'prioritised', 'difficulty'
  ] = 'shuffled'
  """Order of the tasks. shuffled: each task once per pass, in a new random order for each pass.
  sequential: each task once per pass, in the order of the taskset. easy_to_hard and hard_to_easy:
  each task once per pass, in ascending or descending order of the row field that `hardness` names.
  prioritised: at random, where a task's weight is 1 − its success rate, but at least `floor`.
  difficulty: at random, where a task's weight is larger the closer its success rate is to `target`.
  """
  weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
  """Relative share of each taskset in the draws. Tasksets take turns in proportion to their shares,
  not at random, and each taskset has its own order. If empty, the tasks of all tasksets form one
  pool.
  """
  schedule: tuple[LaterWeights, ...] = ()
  """Weights that replace `weights` in later batches, ordered by their first batch."""
  hardness: str | None = None
  """For the orders `easy_to_hard` and `hard_to_easy`: name of the row field whose number determines
  the order, such as a difficulty or a priority.
  """
  prior: float = 0.5
  """For the order `prioritised`: success rate assumed for a task that was never attempted."""
  newest: float = 0.5
  """For the order `prioritised`: weight of the newest group in the moving average of a task's
  success rate.
  """
  floor: float = 0.05
  """For the order `prioritised`: minimum weight of a task, however often it is solved."""
  target: float = 0.5
  """For the order `difficulty`: success rate at which a task's weight is largest."""
  temperature: float = 0.1
  """For the order `difficulty`: distance from `target` at which a task's weight is 1/e of the
  largest possible weight.
  """
  discount: float = 0.2
  """For the order `difficulty`: share of the past results that the estimate of a task's success
  rate forgets with each new group.
  """

  def __post_init__(self):
    if (self.order in ('easy_to_hard', 'hard_to_easy')) != (self.hardness is not None):
      raise UserError(
        f'sampler: order is {self.order!r} and hardness is {self.hardness!r}; wanted hardness for '
        "'easy_to_hard' and 'hard_to_easy', and None for every other order"
      )
    for name in ('prior', 'newest', 'floor', 'target', 'discount'):
      if not 0 <= getattr(self, name) <= 1:
        raise UserError(f'sampler.{name}: {getattr(self, name)}, wanted a share between 0 and 1')
    if not self.floor > 0:
      raise UserError(
        'sampler.floor: 0 would never again draw a task that was solved once; wanted above 0'
      )
    if not self.temperature >= 0.01:  # Below this temperature, all weights may underflow to 0.
      raise UserError(f'sampler.temperature: {self.temperature}, wanted at least 0.01')
    if self.schedule and not self.weights:
      raise UserError('sampler.schedule: scheduled weights need initial ones in sampler.weights')
    starts = [later.from_batch for later in self.schedule]
    if starts != sorted(set(starts)) or (starts and starts[0] < 1):
      raise UserError(
        f'sampler.schedule: the values of from_batch are {starts}, wanted increasing integers of '
        'at least 1'
      )
    for weights in (self.weights, *(later.weights for later in self.schedule)):
      if weights and (min(weights.values()) < 0 or not 0 < sum(weights.values()) < float('inf')):
        raise UserError(
          f'sampler.weights: {dict(weights)}, wanted none negative and at least one positive'
        )

  def check_tasksets(self, names: Sequence[str], where: str = '') -> None:
    """Raises UserError unless the weights name exactly these tasksets. The message starts with
    `where`.
    """
    for weights in (self.weights, *(later.weights for later in self.schedule)):
      if weights and set(weights) != set(names):
        raise UserError(
          f'{where}sampler.weights: names {sorted(weights)}, but the tasksets are {sorted(names)}; '
          'name each of them'
        )


class TaskSampler:
  """Draws an endless sequence of tasks from several tasksets."""

  def __init__(
    self,
    tasksets: Sequence[Taskset],
    config: SamplerConfig,
    *,
    seed: int,
    share: tuple[int, int] = (0, 1),
  ):
    """
    Args:
      share: index and count. Of every `count` drawn tasks, `next` returns the one at `index`.
        Samplers that differ only in the index therefore divide one sequence of tasks among
        themselves, unless the order depends on the results of the tasks.
    """
    names = [taskset.name for taskset in tasksets]
    if len(set(names)) != len(names):
      raise UserError(f'task sampler: tasksets are named {names}; give each its own name')
    self._tasks = tuple(task for taskset in tasksets for task in taskset.tasks)
    if not self._tasks:
      raise UserError(f'task sampler: tasksets {names} have no tasks')
    config.check_tasksets(names)
    self._config, self._batch, self._share = config, 0, share
    pools = [taskset.tasks for taskset in tasksets] if config.weights else [self._tasks]
    if empty := [name for name, pool in zip(names, pools) if not pool]:
      raise UserError(f'sampler.weights: taskset {empty[0]} has no tasks; remove it')
    self._names = names if config.weights else ['']
    self._starts = [sum(map(len, pools[:i])) for i in range(len(pools))]
    # Each pool has its own seed. Otherwise, tasksets of equal size would be drawn in the same
    # order.
    self._pools = [_selector(pool, config, seed=seed + i) for i, pool in enumerate(pools)]
    self._credits = [0.0] * len(pools)
    uids = [task.uid for task in self._tasks]
    self._numbers = {uid: number for number, uid in enumerate(uids)}
    self._copies = _copies([uid.rpartition(':')[2] for uid in uids])
    self._identity: dict[str, Json] = {
      'config': to_json(config),
      'seed': seed,
      'tasks': _fingerprint(self._tasks),
      'share': list(share),
    }

  def __len__(self) -> int:
    """Returns the number of tasks in one pass."""
    return len(self._tasks)

  def next(self) -> tuple[Task, int]:
    """Returns the next task and its visit number.

    Two tasks with the same prompt and the same visit number would get the same random numbers.
    Hence, if n tasks of different tasksets have the same prompt, the first of these tasks gets the
    visit numbers 0, n, 2n, …, the second task gets 1, n + 1, 2n + 1, …, and so on.
    """
    index, count = self._share
    return [self._draw() for _ in range(count)][index]

  def _draw(self) -> tuple[Task, int]:
    pool = self._pool()
    drawn, visit = self._pools[pool].next()
    number = self._starts[pool] + drawn
    rank, count = self._copies[number]
    return self._tasks[number], visit * count + rank

  def task(self, uid: str) -> Task | None:
    """Returns the task with this uid, or None if there is none."""
    return self._tasks[self._numbers[uid]] if uid in self._numbers else None

  def _pool(self) -> int:
    """Selects the pool of tasks that is furthest behind its share of the draws."""
    if len(self._pools) == 1:
      return 0
    weights = [self._weights()[name] for name in self._names]
    self._credits = [
      credit + weight / sum(weights) for credit, weight in zip(self._credits, weights)
    ]
    pool = max(
      (i for i, weight in enumerate(weights) if weight > 0), key=lambda i: self._credits[i]
    )
    self._credits[pool] -= 1
    return pool

  def _weights(self) -> Mapping[str, float]:
    begun = [later.weights for later in self._config.schedule if later.from_batch <= self._batch]
    return begun[-1] if begun else self._config.weights

  def advance(self, batch: int) -> None:
    """Sets the number of the stage's batch for which tasks are drawn next. This number determines
    the weights.
    """
    self._batch = batch

  def feedback(self, uid: str, successes: int, attempts: int) -> None:
    """Records the results of a group of attempts at a task. Call this in the order in which groups
    were drawn.
    """
    number = self._numbers[uid]
    pool = max(i for i, start in enumerate(self._starts) if start <= number)
    self._pools[pool].feedback(number - self._starts[pool], successes, attempts)

  def state(self) -> dict[str, Json]:
    """Returns the state as JSON. A sampler that restores this state continues with the same draws
    as this sampler.
    """
    pools = [pool.state() for pool in self._pools]
    return {**self._identity, 'batch': self._batch, 'credits': self._credits, 'pools': pools}

  def restore(self, state: dict[str, Json]) -> None:
    """Restores a state. Raises UserError if it belongs to other tasks, another configuration or
    another seed.
    """
    state = {'share': [0, 1]} | state  # Earlier program versions had no shares.
    differing = [key for key, value in self._identity.items() if state.get(key) != value]
    if differing:
      mismatches = ', '.join(
        f'{key} {state.get(key)!r} in the checkpoint, {self._identity[key]!r} now'
        for key in differing
      )
      raise UserError(
        f'task sampler: the state belongs to other tasksets: {mismatches}; resume with the same '
        'configuration'
      )
    self._batch, self._credits = int(state['batch']), [float(credit) for credit in state['credits']]
    for pool, of in zip(self._pools, state['pools'], strict=True):
      pool.restore(of)


def _selector(tasks: Sequence[Task], config: SamplerConfig, *, seed: int) -> Selector:
  everything = range(len(tasks))
  match config.order:
    case 'shuffled':
      return Passes(everything, seed=seed)
    case 'sequential':
      return Passes(everything, seed=None)
    case 'easy_to_hard':
      return Passes(
        sorted(everything, key=lambda i: _hardness(tasks[i], config.hardness)), seed=None
      )
    case 'hard_to_easy':
      return Passes(
        sorted(everything, key=lambda i: -_hardness(tasks[i], config.hardness)), seed=None
      )
    case 'prioritised':
      estimate = FailureRate(prior=config.prior, newest=config.newest, floor=config.floor)
    case 'difficulty':
      estimate = TargetRate(
        target=config.target, temperature=config.temperature, discount=config.discount
      )
  return Weighted(len(tasks), estimate, seed=seed)


def _hardness(task: Task, field: str) -> float:
  value = task.fields.get(field)
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise UserError(
      f'sampler.hardness: {field!r} of task {task.uid} is {value!r}, wanted a number; its fields '
      f'are {sorted(task.fields)}'
    )
  return float(value)


def _copies(prompts: Sequence[str]) -> list[tuple[int, int]]:
  """Returns for each prompt the number of equal prompts before it and the number of equal prompts
  in total.
  """
  counts, seen, ranks = collections.Counter(prompts), collections.Counter(), []
  for prompt in prompts:
    ranks.append((seen[prompt], counts[prompt]))
    seen[prompt] += 1
  return ranks


def order_digest(tasksets: Sequence[Taskset], config: SamplerConfig) -> str:
  """Returns a digest of what determines, together with a seed, which tasks are drawn."""
  tasks = [task for taskset in tasksets for task in taskset.tasks]
  order = json.dumps(to_json(config), sort_keys=True)
  return xxhash.xxh3_128_hexdigest(f'{order}\n{_fingerprint(tasks)}'.encode())


def _fingerprint(tasks: Sequence[Task]) -> str:
  digest = xxhash.xxh3_128()
  for task in tasks:
    digest.update(f'{task.taskset}:{task.digest}\n'.encode())
  return digest.hexdigest()
