"""The configuration of a stage. `app.sources` defines the sources of its batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.app.sources import Followed, Rollouts, Source, Stored
from jaxrl_llm.config.moved import moved
from jaxrl_llm.config.values import check_at_least
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.learner.optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
  """Name and options of a stage's algorithm."""

  name: str
  """Key of `learner.catalogue.ALGORITHMS` (listed by `jaxrl train --list`), or 'module:attribute'
  of a user-defined algorithm.
  """
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Options of the algorithm, keyed by field name of its options dataclass."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticConfig:
  """PPO's critic: a separate network with the policy's architecture and one output per token."""

  init_from: str | None = None
  """Initial weights of the critic: a reward model or critic, given as a directory, hub id or run
  directory. If None, the critic continues with the weights of the previous stage's critic. If that
  stage has no critic, the critic starts with the weights of the policy and a new head.
  """
  optimizer: OptimizerConfig | None = None
  """Optimizer of the critic. If None, the policy's optimizer settings are used."""


BASE = 'base'
"""Value of `StageConfig.init_from` for the weights at the beginning of the run. It may not be used
if an earlier stage has this name.
"""
_BEST = 'best:'
_OF_ROLLOUTS = (
  *(
    'experts',
    'processors',
    'selection',
    'temperature',
    'sampler',
    'past',
    'bound',
    'publish_every',
    'rollout_only',
  ),
  *('max_dropped_groups', 'limits'),
)


def stage_of_best(name: str) -> str | None:
  """Returns STAGE if `name`, a value of `init_from`, is 'best:STAGE'; otherwise None."""
  return name.removeprefix(_BEST) if name.startswith(_BEST) else None


@moved(
  {
    'tasksets': 'source.tasksets, of Rollouts, Demonstrations or Recorded',
    'demonstrations': 'source, as Demonstrations(tasksets=…, templates=…)',
    'preferences': 'source, as Pairs(train=…)',
    'recorded': 'source, as Recorded(run=…, tasksets=…)',
    'sequences_per_batch': 'source.sequences_per_batch, of Demonstrations, Examples or Pairs',
    'groups_per_batch': 'source.groups_per_batch, of Rollouts or Recorded',
    'group_size': 'source.group_size, of Rollouts or Recorded',
    **{name: f'source.{name}, of Rollouts' for name in _OF_ROLLOUTS},
  }
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class StageConfig:
  """A training stage: an algorithm, a source of batches, and a number of steps."""

  name: str
  algorithm: AlgorithmConfig
  source: Source
  """Source of the batches: rollouts, demonstrations, examples, preference pairs, another run's
  groups, stored rollouts selected by reward, or rollouts of a run that explores for this run.
  """
  steps: int
  """Number of steps, each of which trains on one batch."""
  minibatches: int = 1
  """Number of parts into which each batch is split. In each epoch, each part gets one optimizer
  step.
  """
  epochs: int = 1
  """Number of passes over each batch."""
  optimizer: OptimizerConfig | None = None
  """Optimizer of the policy. If None, `learner.optimizer` is used."""
  init_from: tuple[str, ...] = ()
  """Initial weights of the stage: the name of an earlier stage, for the weights at its end;
  'best:STAGE', for the weights at that stage's evaluation with the highest greedy accuracy on the
  first suite (the earliest evaluation, if several tie); or 'base', for the weights with which the
  run began. If there are several names, the mean of these weights is used. If empty, the stage
  continues with the weights of the previous stage; but if the stage trains the policy and the
  previous stage trains a reward model, it continues with the newest weights of the policy. If a
  stage that trains a reward model begins with weights of the policy, these weights get a new head.
  """
  keep_optimizer: bool = False
  """Whether the stage continues with the previous stage's optimizer state instead of a new one."""
  critic: CriticConfig = CriticConfig()
  """Settings of the critic, for algorithms that have one."""
  evaluate_every: int | None = None
  """Number of steps between evaluations within the stage. If None, there are no evaluations within
  the stage. The policy is always evaluated at the start of the run and at the end of each stage.
  """
  overlap_evaluation: bool = False
  """Whether training continues while the policy is evaluated within the stage. Until the evaluation
  ends, the engine serves the evaluated version. Training therefore waits as soon as this version is
  older than `source.bound` permits, and also at the next commit and at the end of the stage.
  """

  @property
  def explores(self) -> bool:
    """Whether the stage's batches are the policy's own rollouts."""
    return isinstance(self.source, Rollouts)

  @property
  def waits_for_rows(self) -> bool:
    """Whether the stage's rows are selected only when it begins, from this run's own rollouts."""
    return isinstance(self.source, Stored) and self.source.run is None

  @property
  def has_static_rows(self) -> bool:
    """Whether the stage's rows are known before the run begins."""
    return not (self.explores or self.waits_for_rows or isinstance(self.source, Followed))

  @property
  def trains(self) -> bool:
    """Whether the stage trains a model, rather than only generating rollouts."""
    return not (isinstance(self.source, Rollouts) and self.source.rollout_only)

  def __post_init__(self):
    where = f'stages.{self.name}.'
    check_at_least(where, self, steps=1, minibatches=1, epochs=1, evaluate_every=1)
    if not isinstance(self.source, Source):
      raise UserError(
        f'{where}source: got {self.source!r:.100}, wanted Rollouts, Demonstrations, Examples, '
        'Pairs, Recorded, Stored or Followed'
      )
    self.source.check(f'{where}source.')
    if self.overlap_evaluation and self.evaluate_every is None:
      raise UserError(
        f'{where}overlap_evaluation: without evaluate_every, the only evaluation is that of the '
        "stage's end, which waits for it; set evaluate_every, or remove overlap_evaluation"
      )
    if self.init_from and self.keep_optimizer:
      raise UserError(
        f'{where}keep_optimizer: the optimizer state belongs to weights other than those of '
        'init_from; remove one of them'
      )
