"""Sources of the batches of a stage, such as rollouts, demonstrations or preference pairs.

Each source is a frozen dataclass with its own fields and checks, so that a field without meaning
for a source cannot be set.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, Literal

from jaxrl_llm.config.moved import moved
from jaxrl_llm.config.values import check_at_least
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.master.exploring.batch_policy import BatchPolicyName, batches_ahead
from jaxrl_llm.master.exploring.limits import TaskLimits
from jaxrl_llm.master.exploring.processors import ProcessorConfig, check_processors
from jaxrl_llm.master.exploring.selection import SelectionConfig
from jaxrl_llm.replay.draw import DrawConfig
from jaxrl_llm.tasks.sampler import SamplerConfig
from jaxrl_llm.tasks.taskset import DemonstrationsConfig


def _check_tasksets(where: str, names: tuple[str, ...]) -> None:
  if not names:
    raise UserError(f'{where}tasksets: empty, wanted at least one; name a configured taskset')


@moved({'demonstrations': 'templates, with weights, count and seed beside it'})
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig(DemonstrationsConfig):
  """Expert rows that join each batch of rollouts. Rows that `jaxrl experts` and `jaxrl feedback`
  add to the run come first, in the order of their arrival. Demonstrations, made from tasks, fill
  the remaining expert rows of the batch.
  """

  tasksets: tuple[str, ...]
  """Names of the configured tasksets whose tasks are demonstrated."""
  ratio: float = 0.25
  """Minimum share of expert sequences in the batch, between 0 and 1; their number is rounded up."""
  max_uses: int = 1
  """Maximum number of batches that train on one added row. Demonstrations are repeated without
  limit.
  """

  def __post_init__(self):
    super().__post_init__()
    check_at_least('experts.', self, max_uses=1)
    if not 0 < self.ratio < 1:
      raise UserError(f'experts.ratio: {self.ratio}, wanted a share between 0 and 1')

  def rows(self, usual: int) -> int:
    """Returns the number of expert sequences that are added to `usual` rollouts."""
    return math.ceil(usual * self.ratio / (1 - self.ratio) - 1e-9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PastConfig:
  """Replay: groups of earlier batches that are trained on again, together with new groups."""

  groups: int
  """Maximum number of replayed groups per batch, in addition to the `groups_per_batch` new ones.
  The first batches contain fewer replayed groups, because few earlier groups exist at first.
  """
  max_uses: int
  """Maximum number of batches that train on the same group, including the first one."""
  draw: DrawConfig = DrawConfig()
  """Rule that selects the groups to replay."""

  def __post_init__(self):
    check_at_least('past.', self, groups=1, max_uses=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FollowConfig:
  """Exploration with the weights of another run, which trains on the rollouts in a stage with the
  source `Followed`.
  """

  run: str
  """Directory of the other run, which is only read. It need not exist yet."""
  batches_per_version: int | None = None
  """Maximum number of batches that are explored with one version of the weights. The run then
  waits for the next version. If None, the run waits only for the first version.
  """
  deadline_s: float = 3600.0
  """Maximum time in seconds to wait for a version."""
  share: tuple[int, int] = (0, 1)
  """Index and count, for several runs that explore for the same trainer. Of every `count` tasks
  that the sampler draws, the run explores the one at this index, counted from 0. Runs with the same
  seed, the same count and different indices thus divide the tasks among themselves.
  """

  def check(self, where: str) -> None:
    """Raises UserError for invalid values. In messages, `where` precedes the name of the field."""
    check_at_least(where, self, batches_per_version=1)
    index, count = self.share
    if not 0 <= index < count:
      raise UserError(
        f'{where}share: {self.share}, wanted (index, count) with 0 <= index < count, such as '
        '(0, 2) in the first of two runs'
      )
    if not self.deadline_s > 0:
      raise UserError(f'{where}deadline_s: {self.deadline_s}, wanted more than 0 seconds')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollouts:
  """Source of a stage's batches: groups of the policy's own rollouts."""

  tasksets: tuple[str, ...]
  """Names of the configured tasksets whose tasks the policy attempts."""
  sampler: SamplerConfig = SamplerConfig()
  """Order in which tasks are drawn."""
  groups_per_batch: int = 16
  """Number of new groups (one task each) per batch."""
  group_size: int = 8
  """Number of samples in a group."""
  temperature: float = 1.0
  """Sampling temperature. There is no top_p or top_k for training rollouts, since the trainer
  computes logprobs of the unfiltered distribution.
  """
  response_lengths: tuple[tuple[int, int], ...] = ()
  """Limits of the response length, as pairs (step of the stage, tokens), such as `((0, 8192), (500,
  16384))`. A pair applies to the groups that begin at its step or later, until the next pair
  applies. The first step is 0. No limit may exceed `rollout.max_response_length`. If the tuple is
  empty, `rollout.max_response_length` is the limit of all groups. In evaluations,
  `rollout.max_response_length` is always the limit.
  """
  rewards: Mapping[str, float] | None = None
  """Weights of the scorers that judge the stage's rollouts, keyed by scorer name. Other scorers do
  not judge these rollouts. If None, all scorers judge the rollouts, with their configured weights.
  """
  limits: TaskLimits = TaskLimits()
  """Time limits for generating and scoring a group."""
  max_dropped_groups: int = 100
  """Maximum number of groups that may be dropped while one batch is collected, for example because
  no sample could be scored or none was selected. If more groups are dropped, the run fails.
  """
  processors: tuple[ProcessorConfig, ...] = ()
  """Processors applied in order to a finished group before selection; see
  `master.exploring.processors`.
  """
  selection: SelectionConfig = SelectionConfig()
  """Rule that selects the samples of a finished group to train on."""
  experts: ExpertsConfig | None = None
  """Expert rows that join the rollouts of each batch. Only for the algorithm `mix`. If None, no
  expert rows join.
  """
  past: PastConfig | None = None
  """Replay of groups from earlier batches. If None, batches consist of new groups only."""
  bound: int = 0
  """Maximum staleness: number of updates between the weights that generated a rollout and the
  weights that are trained on it. 0 means on-policy training.
  """
  batch_policy: BatchPolicyName = 'in_order'
  """Rule that decides which groups form a batch.

  'in_order': the groups that started first. The batch waits for them, so long answers are not at a
  disadvantage.

  'complete_first': the groups that have finished, in the order in which they started. Unfinished
  groups are passed over and join a later batch. Groups are started for fewer batches ahead, half of
  `bound` (rounded up), so that no group becomes older than `bound` permits. Early batches contain
  more short answers, and long answers are older when they are trained on. `bound` must be at least
  2: with 0, training is on-policy, and timing must not decide which groups form a batch; with 1, no
  group could be passed over.
  """
  publish_every: int = 1
  """Number of updates between two publications of the weights to the engine."""
  rollout_only: bool = False
  """Whether rollouts are generated, scored, processed and stored, but not trained on. The next
  stage starts with a new optimizer, and with a new critic if this stage's algorithm has none.
  """
  follow: FollowConfig | None = None
  """Other run that trains on the rollouts, and whose weights generate them. Only with
  `rollout_only`. If None, the weights of this run generate the rollouts.
  """

  @property
  def unit(self) -> int:
    """Number of sequences that are never divided between minibatches: 2 for pairs, else 1."""
    return self.selection.unit

  @property
  def share(self) -> tuple[int, int]:
    """Share of the drawn tasks that the run explores: index and count; see `FollowConfig.share`."""
    return self.follow.share if self.follow is not None else (0, 1)

  @property
  def longest_response(self) -> int:
    """Highest of the stage's `response_lengths`; 0 if there are none."""
    return max((tokens for _, tokens in self.response_lengths), default=0)

  @property
  def groups(self) -> int:
    """Maximum number of groups in a batch, including replayed ones."""
    return self.groups_per_batch + (self.past.groups if self.past is not None else 0)

  @property
  def expert_rows(self) -> int:
    """Number of expert sequences in a batch."""
    return self.experts.rows(self._usual) if self.experts is not None else 0

  @property
  def sequences(self) -> int:
    """Maximum number of sequences in a batch, including expert rows."""
    return self._usual + self.expert_rows

  @property
  def _usual(self) -> int:
    """Maximum number of rollouts in a batch, not counting expert rows."""
    return self.groups * self.selection.most(self.group_size)

  def check(self, where: str) -> None:
    """Raises UserError for invalid or contradictory values. In messages, `where` precedes the name
    of the field.
    """
    _check_tasksets(where, self.tasksets)
    check_at_least(
      where, self, groups_per_batch=1, group_size=1, max_dropped_groups=0, bound=0, publish_every=1
    )
    self.sampler.check_tasksets(self.tasksets, where)
    check_processors(self.processors, f'{where}processors')
    if self.temperature <= 0:
      raise UserError(
        f'{where}temperature: {self.temperature} is not above 0: training needs samples to differ'
      )
    self._check_lengths(where)
    if self.selection.pairs and self.group_size < 2:
      raise UserError(f'{where}group_size: 1 sample makes no pair; wanted at least 2')
    if self.experts is not None and self.selection.kind not in ('all', 'mixed'):
      raise UserError(
        f'{where}selection: {self.selection.kind!r} cannot be combined with experts; wanted all or '
        'mixed'
      )
    if self.follow is not None:
      self._check_follow(where, self.follow)
    if self.rollout_only and (self.past is not None or self.experts is not None):
      raise UserError(
        f'{where}rollout_only: the stage trains on nothing, so past and experts have no effect; '
        'remove rollout_only, or past and experts'
      )
    if self.past is not None:
      most = self.groups_per_batch * (self.past.max_uses - 1)
      if self.past.groups > most:
        raise UserError(
          f'{where}past.groups: {self.past.groups}, but {self.groups_per_batch} new groups per '
          f'batch, each used at most {self.past.max_uses - 1} more times, provide only {most}; '
          'lower it, or raise max_uses'
        )
    if self.batch_policy != 'in_order' and self.bound < 2:
      why = 'timing must not decide what a batch contains'
      raise UserError(
        f'{where}batch_policy: {self.batch_policy!r} with bound {self.bound}, for which '
        f"{'no group may be passed over' if self.bound else why}; wanted 'in_order', or a bound of "
        'at least 2'
      )
    ahead = batches_ahead(self.batch_policy, self.bound)
    if ahead < self.bound and self.publish_every > ahead + 1:
      raise UserError(
        f'{where}publish_every: {self.publish_every}, but with batch_policy {self.batch_policy!r} '
        f'and bound {self.bound}, groups start for {ahead} batches ahead; wanted at most '
        f'{ahead + 1}, or a larger bound'
      )
    if self.publish_every > self.bound + 1:
      age = self.publish_every - 1
      raise UserError(
        f'{where}publish_every: {self.publish_every} > bound + 1 = {self.bound + 1}: the last '
        f'batch before a publication would train on rollouts of weights {age} updates old; raise '
        f'bound to {age}, or publish more often'
      )

  def _check_lengths(self, where: str) -> None:
    steps = [step for step, _ in self.response_lengths]
    if steps and (steps[0] != 0 or steps != sorted(set(steps))):
      raise UserError(
        f'{where}response_lengths: its steps are {steps}, wanted ascending steps from 0 on'
      )
    for step, tokens in self.response_lengths:
      if tokens < 1:
        raise UserError(
          f'{where}response_lengths: {tokens} tokens from step {step} on, wanted at least 1'
        )

  def _check_follow(self, where: str, follow: FollowConfig) -> None:
    follow.check(f'{where}follow.')
    if not self.rollout_only:
      raise UserError(
        f'{where}follow: another run trains the weights; set rollout_only, or remove follow'
      )
    if self.selection.kind not in ('all', 'mixed'):
      raise UserError(
        f'{where}selection: {self.selection.kind!r} cannot be combined with follow, which shares '
        "whole groups; wanted 'all' or 'mixed'"
      )
    if follow.share[1] > 1 and self.sampler.order in ('prioritised', 'difficulty'):
      raise UserError(
        f'{where}follow.share: {follow.share}, but the order {self.sampler.order!r} depends on '
        'results, which differ between the runs; remove share, and give each run another seed'
      )
    if follow.share[1] > 1 and self.sampler.schedule:
      raise UserError(
        f'{where}follow.share: {follow.share}, but with sampler.schedule the drawn tasks depend on '
        'the batches of each run; remove share, and give each run another seed'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demonstrations(DemonstrationsConfig):
  """Source of a stage's batches: demonstrations, which are answers to imitate, made from tasks."""

  tasksets: tuple[str, ...]
  """Names of the configured tasksets whose tasks are demonstrated."""
  sequences_per_batch: int = 64
  """Number of demonstrations per batch. Each is one sequence."""
  unit: ClassVar[int] = 1
  """Number of sequences that belong together and are never divided between minibatches."""

  @property
  def sequences(self) -> int:
    """Maximum number of sequences in a batch."""
    return self.sequences_per_batch

  def check(self, where: str) -> None:
    """Raises UserError for invalid values. In messages, `where` precedes the name of the field."""
    _check_tasksets(where, self.tasksets)
    check_at_least(where, self, sequences_per_batch=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examples:
  """Source of a stage's batches: examples to imitate, which are conversations, completions or
  texts.
  """

  train: str
  """Name of the configured examples to train on."""
  held_out: str | None = None
  """Name of the configured examples on which each evaluation measures the loss
  (`val-core/<name>/sft_loss`). If None, the loss is not measured.
  """
  sequences_per_batch: int = 64
  """Number of sequences per batch."""
  tasksets: ClassVar[tuple[str, ...]] = ()
  """Always empty, since examples have their own prompts."""
  unit: ClassVar[int] = 1
  """Number of sequences that belong together and are never divided between minibatches."""

  @property
  def sequences(self) -> int:
    """Maximum number of sequences in a batch."""
    return self.sequences_per_batch

  def check(self, where: str) -> None:
    """Raises UserError for invalid values. In messages, `where` precedes the name of the field."""
    check_at_least(where, self, sequences_per_batch=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
  """Source of a stage's batches: preference pairs."""

  train: str
  """Name of the configured preferences to train on."""
  held_out: str | None = None
  """Name of the configured preferences on which each evaluation measures the accuracy
  (`val-core/<name>/rewards/accuracies`). If None, the accuracy is not measured.
  """
  sequences_per_batch: int = 64
  """Number of sequences per batch; a pair has two."""
  tasksets: ClassVar[tuple[str, ...]] = ()
  """Always empty, since pairs have their own prompts."""
  unit: ClassVar[int] = 2
  """Number of sequences that belong together and are never divided between minibatches."""

  @property
  def sequences(self) -> int:
    """Maximum number of sequences in a batch."""
    return self.sequences_per_batch

  def check(self, where: str) -> None:
    """Raises UserError for invalid values. In messages, `where` precedes the name of the field."""
    check_at_least(where, self, sequences_per_batch=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded:
  """Source of a stage's batches: another run's stored groups of rollouts, for offline training."""

  run: str
  """Directory of the other run. It is read once, at the first start of this run."""
  stage: str | None = None
  """Stage of the other run whose rollouts are used. If None, the rollouts of all stages are
  used.
  """
  tasksets: tuple[str, ...]
  """Names of configured tasksets; rollouts of other tasks are skipped."""
  groups_per_batch: int = 16
  """Number of groups (one task each) per batch."""
  group_size: int = 8
  """Maximum number of samples in a group."""
  unit: ClassVar[int] = 1
  """Number of sequences that belong together and are never divided between minibatches."""

  @property
  def sequences(self) -> int:
    """Maximum number of sequences in a batch."""
    return self.groups_per_batch * self.group_size

  def check(self, where: str) -> None:
    """Raises UserError for invalid values. In messages, `where` precedes the name of the field."""
    _check_tasksets(where, self.tasksets)
    check_at_least(where, self, groups_per_batch=1, group_size=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
  """Source of a stage's batches: rollouts that earlier stages, or another run, have stored. They
  are selected by reward, as demonstrations (rejection sampling, best of n) or as preference pairs.
  """

  run: str | None = None
  """Directory of another run. It is read once, at the first start of this run. If None, the
  rollouts are this run's own, and are selected when the stage begins.
  """
  stages: tuple[str, ...]
  """Names of the stages whose rollouts are used: earlier stages of this run, or stages of `run`."""
  tasksets: tuple[str, ...]
  """Names of configured tasksets; rollouts of other tasks are skipped."""
  selection: SelectionConfig = SelectionConfig(kind='above')
  """Rule that selects samples of each stored group."""
  sequences_per_batch: int = 64
  """Number of sequences per batch; a pair consists of two."""

  @property
  def unit(self) -> int:
    """Number of sequences that are never divided between minibatches: 2 for pairs, else 1."""
    return self.selection.unit

  @property
  def sequences(self) -> int:
    """Maximum number of sequences in a batch."""
    return self.sequences_per_batch

  def check(self, where: str) -> None:
    """Raises UserError for invalid values. In messages, `where` precedes the name of the field."""
    _check_tasksets(where, self.tasksets)
    check_at_least(where, self, sequences_per_batch=1)
    if not self.stages:
      raise UserError(f'{where}stages: empty, wanted at least one stage that stores rollouts')
    if not (self.selection.pairs or self.selection.imitates):
      raise UserError(
        f'{where}selection: {self.selection.kind!r} selects whole groups, for which Recorded is '
        'the source; wanted shortest_correct, best or above (for sft), or pairs or margin (for dpo)'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Followed:
  """Source of a stage's batches: rollouts that other runs generate with exported weights of this
  run, while this run trains on them. In each of the other runs, a stage with the source `Rollouts`
  sets `rollout_only`, and its `follow` names this run.
  """

  run: str | tuple[str, ...]
  """Directory of the other run, or directories of several. They are only read, and need not exist
  yet. To a run that is resumed, directories may be added at the end.
  """
  tasksets: tuple[str, ...]
  """Names of configured tasksets; rollouts of other tasks are left out."""
  groups_per_batch: int = 16
  """Number of groups (one task each) per batch."""
  group_size: int = 8
  """Maximum number of samples in a group."""
  bound: int = 1
  """Maximum staleness: number of updates between the weights that generated a rollout and the
  weights that are trained on it. Groups that are older expire, so they are not trained on.
  """
  export_every: int = 1
  """Number of updates between two exports of the weights to `versions/` in the run directory."""
  keep_versions: int = 3
  """Number of the newest exported versions that are kept. Older versions are deleted."""
  order: Literal['turns', 'arrival'] = 'turns'
  """Order in which the batches of several runs are read. turns: one batch of each run after the
  other, so that a killed trainer repeats its batches; it waits for the run whose turn it is.
  arrival: as turns, but runs that have shared no further batch are passed over, so that a slow or
  stopped run does not delay the others (`run/clock_decisions` counts the batches read early).
  """
  unit: ClassVar[int] = 1
  """Number of sequences that belong together and are never divided between minibatches."""

  @property
  def runs(self) -> tuple[str, ...]:
    """Directories of the other runs."""
    return (self.run,) if isinstance(self.run, str) else self.run

  @property
  def sequences(self) -> int:
    """Maximum number of sequences in a batch."""
    return self.groups_per_batch * self.group_size

  def check(self, where: str) -> None:
    """Raises UserError for invalid values. In messages, `where` precedes the name of the field."""
    _check_tasksets(where, self.tasksets)
    if not self.runs or len(set(self.runs)) < len(self.runs):
      raise UserError(f'{where}run: {self.run}, wanted at least one directory, and each once')
    check_at_least(
      where, self, groups_per_batch=1, group_size=1, bound=0, export_every=1, keep_versions=2
    )
    if self.export_every > self.bound + 1:
      raise UserError(
        f'{where}export_every: {self.export_every} > bound + 1 = {self.bound + 1}: the last batch '
        f'before an export would train on rollouts of weights {self.export_every - 1} updates old; '
        f'raise bound to {self.export_every - 1}, or export more often'
      )


Source = Rollouts | Demonstrations | Examples | Pairs | Recorded | Stored | Followed
