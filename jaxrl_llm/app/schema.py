"""The root configuration of a run. Most of its parts are defined next to the code that reads them.

The unit of a batch size (tasks, sequences or tokens) follows from its name. Derived numbers are not
configured: they are computed, and `--dry_run` prints them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from jaxrl_llm.config.moved import moved
from jaxrl_llm.config.own import named_pair
from jaxrl_llm.config.values import from_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.registry import RegistryConfig
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.master.evaluation import SuiteConfig
from jaxrl_llm.master.exploring.batch_policy import BatchPolicyName, batches_ahead
from jaxrl_llm.master.exploring.limits import TaskLimits
from jaxrl_llm.master.exploring.partial import PartialConfig
from jaxrl_llm.master.exploring.processors import ProcessorConfig, check_processors
from jaxrl_llm.master.exploring.selection import SelectionConfig
from jaxrl_llm.master.mismatch import MismatchConfig
from jaxrl_llm.models.spec import LoraConfig
from jaxrl_llm.parallel.coordination import CoordinationConfig
from jaxrl_llm.parallel.mesh import MeshConfig
from jaxrl_llm.replay.draw import DrawConfig
from jaxrl_llm.rewards.api import DISCOVERING, RewardsConfig
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.auxiliary import AuxiliaryConfig
from jaxrl_llm.rollout.catalogue import ENGINES
from jaxrl_llm.rollout.embedded.engine import EmbeddedConfig
from jaxrl_llm.rollout.engine import EngineSpec
from jaxrl_llm.rollout.explorers.crew import ExplorersConfig
from jaxrl_llm.rollout.repetition import RepetitionDetection
from jaxrl_llm.rollout.vllm.server import VllmConfig
from jaxrl_llm.rollout.workflow import WorkflowConfig
from jaxrl_llm.runtime.checkpoint import CheckpointConfig
from jaxrl_llm.runtime.log.config import LoggingConfig
from jaxrl_llm.tasks.examples import ExamplesConfig
from jaxrl_llm.tasks.preferences import PreferencesConfig
from jaxrl_llm.tasks.sampler import SamplerConfig
from jaxrl_llm.tasks.taskset import DemonstrationsConfig, TasksetConfig
from jaxrl_llm.tasks.tokenizer import TokenizerConfig


def _at_least(where: str, config: Any, **bounds: int) -> None:
  """Raises UserError if a field is below its lower bound in `bounds`. None is always permitted."""
  for name, least in bounds.items():
    value = getattr(config, name)
    if value is not None and value < least:
      raise UserError(f'{where}{name}: {value}, wanted at least {least}')


def _check_tasksets(where: str, names: tuple[str, ...]) -> None:
  if not names:
    raise UserError(f'{where}tasksets: empty, wanted at least one; name a configured taskset')


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig:
  """The model to train: its initial weights, precision, memory options and adapters."""

  init_from: str | None = None
  """Initial weights: a Hugging Face directory, a hub id, or a run directory, whose export (`hf/`)
  is used. If None, the weights are random, and `family` and `model` determine the architecture.
  """
  family: str = 'qwen2'
  """Model family. Only for random weights."""
  model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """ModelSpec fields (hidden_size, num_hidden_layers, ...) that differ from the tiny default model.
  Only for random weights.
  """
  tokenizer: TokenizerConfig = TokenizerConfig()
  """Tokenizer to build. Only for random weights, since a checkpoint contains its own tokenizer."""
  dtype: Literal['float32', 'bfloat16'] = 'float32'
  """Data type of activations and matrix products."""
  param_dtype: Literal['float32', 'bfloat16'] = 'float32'
  """Data type of the parameters; adapters are always float32."""
  scan_layers: bool = False
  """Whether one compiled layer is scanned over all layers. This compiles faster, but runs 10 to 15
  % slower on a CPU.
  """
  remat: Literal['none', 'full', 'dots', 'offload'] = 'none'
  """Activations of each layer that are kept for the backward pass (see `ModelOptions.remat`). On a
  CPU, values other than 'none' save memory only with `scan_layers`.
  """
  attention: Literal['auto', 'masked', 'blockwise', 'splash', 'pallas_gpu'] = 'auto'
  """Attention implementation in training: 'masked' materializes all scores, 'blockwise' one block
  at a time; 'splash' is a TPU kernel, 'pallas_gpu' a GPU kernel; 'auto' chooses by platform and
  length.
  """
  lora: LoraConfig | None = None
  """LoRA adapters to train, in all stages, while the other weights are frozen. If None, the whole
  model is trained.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
  """Name and options of a stage's algorithm."""

  name: str
  """Key of `learner.catalogue.ALGORITHMS` (`jaxrl train --list`), or your own algorithm as
  'module:attribute'.
  """
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Options of the algorithm, keyed by the field of its options dataclass."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticConfig:
  """PPO's critic: a separate network with the policy's architecture and one output."""

  init_from: str | None = None
  """Initial weights of the critic: a reward model or critic, given as directory, hub id or run
  directory. If None, those of the previous stage's critic, or if there is none, those of the policy
  with a new head.
  """
  optimizer: OptimizerConfig | None = None
  """Optimizer of the critic. If None, the policy's optimizer settings are used."""


@moved({'demonstrations': 'templates, with weights, count and seed beside it'})
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig(DemonstrationsConfig):
  """Expert demonstrations that join each batch of rollouts."""

  tasksets: tuple[str, ...]
  """Names of the configured tasksets whose tasks are demonstrated."""
  ratio: float = 0.25
  """Minimum share of expert sequences in the batch, between 0 and 1; their number is rounded up."""

  def __post_init__(self):
    super().__post_init__()
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
  The first batches contain fewer, because there are few earlier groups.
  """
  max_uses: int
  """Maximum number of batches that train on the same group, including the first one."""
  draw: DrawConfig = DrawConfig()
  """Rule that selects the groups to replay."""

  def __post_init__(self):
    _at_least('past.', self, groups=1, max_uses=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceSource(PreferencesConfig):
  """Preferences of a run: read from a file or dataset, or made from a taskset with templates
  (`source='taskset:<name>'`).
  """

  wrong: tuple[str, ...] = ()
  """Templates of rejected answers, of which each task uses one. Only for a taskset as source, for
  which `chosen` is the template of the preferred answer.
  """


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
  """Sampling temperature. There is no top_p or top_k for training rollouts, since the trainer's
  logprobs are those of the unfiltered distribution.
  """
  limits: TaskLimits = TaskLimits()
  """Time limits for generating and scoring a group."""
  max_dropped_groups: int = 100
  """Maximum number of groups that may be dropped while one batch is collected. A group is dropped
  if none of its samples can be scored, or if none is selected. The run ends if more are dropped.
  """
  processors: tuple[ProcessorConfig, ...] = ()
  """Processors applied in order to a finished group before selection; see
  `master.exploring.processors`.
  """
  selection: SelectionConfig = SelectionConfig()
  """Rule that selects the samples of a finished group to train on."""
  experts: ExpertsConfig | None = None
  """Expert demonstrations that join the rollouts of each batch. Only for the algorithm `mix`. If
  None, there are none.
  """
  past: PastConfig | None = None
  """Replay of groups from earlier batches. If None, batches consist of new groups only."""
  bound: int = 0
  """Maximum lag: number of updates by which the weights that generated a rollout may be behind the
  weights that are trained on it. 0 means on-policy training.
  """
  batch_policy: BatchPolicyName = 'in_order'
  """Rule that decides which groups form a batch.

  'in_order': those that started first; the batch waits for them, so long answers are not at a
  disadvantage. 'complete_first': those that have finished, in the order in which they started;
  unfinished groups are passed over and join a later batch. Groups are then started for fewer
  batches ahead, half of `bound` (rounded up), so that no group becomes older than `bound` permits.
  Early batches contain more short answers, and long answers are older when they are trained on.
  Timing decides which groups form a batch, so 'complete_first' is refused if `bound` is 0. With
  bound 1 no group could be passed over, so it needs at least 2.
  """
  publish_every: int = 1
  """Number of updates between two publications of the weights to the engine."""
  rollout_only: bool = False
  """Whether rollouts are generated, scored, processed and stored, but not trained on. Later stages
  start with a new optimizer and critic.
  """

  @property
  def unit(self) -> int:
    """Number of sequences that are never divided between minibatches: 2 for pairs, else 1."""
    return self.selection.unit

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
    """Maximum number of sequences in a batch that are rollouts, without expert rows."""
    return self.groups * self.selection.most(self.group_size)

  def check(self, where: str) -> None:
    """Raises UserError for invalid or contradictory values. In messages, `where` precedes the name
    of the field.
    """
    _check_tasksets(where, self.tasksets)
    _at_least(
      where, self, groups_per_batch=1, group_size=1, max_dropped_groups=0, bound=0, publish_every=1
    )
    self.sampler.check_tasksets(self.tasksets, where)
    check_processors(self.processors, f'{where}processors')
    if self.temperature <= 0:
      raise UserError(
        f'{where}temperature: {self.temperature} is not above 0: training needs samples to differ'
      )
    if self.selection.kind == 'pairs' and self.group_size < 2:
      raise UserError(f'{where}group_size: 1 sample makes no pair; wanted at least 2')
    if self.experts is not None and self.selection.kind not in ('all', 'mixed'):
      raise UserError(
        f'{where}selection: {self.selection.kind!r} cannot be combined with experts; wanted all or '
        'mixed'
      )
    if self.rollout_only and (self.past is not None or self.experts is not None):
      raise UserError(
        f'{where}rollout_only: trains on nothing, so that earlier groups and experts are of no '
        'use; remove it, or those'
      )
    if self.past is not None:
      most = self.groups_per_batch * (self.past.max_uses - 1)
      if self.past.groups > most:
        raise UserError(
          f'{where}past.groups: {self.past.groups}, and {self.groups_per_batch} new groups a '
          f'batch, each used at most {self.past.max_uses - 1} times more, leave {most}; lower it, '
          'or raise max_uses'
        )
    if self.batch_policy != 'in_order' and self.bound < 2:
      why = 'no clock may decide what a batch contains'
      raise UserError(
        f'{where}batch_policy: {self.batch_policy!r} with bound {self.bound}, at which '
        f"{'no group may be passed over' if self.bound else why}; wanted 'in_order', or a bound of "
        'at least 2'
      )
    ahead = batches_ahead(self.batch_policy, self.bound)
    if ahead < self.bound and self.publish_every > ahead + 1:
      raise UserError(
        f'{where}publish_every: {self.publish_every}, and with batch_policy {self.batch_policy!r} '
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
    _at_least(where, self, sequences_per_batch=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examples:
  """Source of a stage's batches: examples to imitate, which are conversations, completions or
  texts.
  """

  train: str
  """Name of the configured examples to train on."""
  held_out: str | None = None
  """Name of the configured examples on which each evaluation measures the loss
  (`val-core/<name>/sft_loss`). If None, nothing is measured.
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
    _at_least(where, self, sequences_per_batch=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
  """Source of a stage's batches: preference pairs."""

  train: str
  """Name of the configured preferences to train on."""
  held_out: str | None = None
  """Name of the configured preferences on which each evaluation measures the accuracy
  (`val-core/<name>/rewards/accuracies`). If None, nothing is measured.
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
    _at_least(where, self, sequences_per_batch=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded:
  """Source of a stage's batches: another run's stored groups of rollouts, for offline training."""

  run: str
  """Directory of the other run. It is read only when this run starts for the first time."""
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
    _at_least(where, self, groups_per_batch=1, group_size=1)


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
  source: Rollouts | Demonstrations | Examples | Pairs | Recorded
  """Source of the batches: rollouts, demonstrations, examples, preference pairs, or another run's
  groups.
  """
  steps: int
  """Number of steps, each of which trains on one batch."""
  minibatches: int = 1
  """Number of parts into which each batch is split. Each part gets one optimizer step."""
  epochs: int = 1
  """Number of passes over each batch."""
  optimizer: OptimizerConfig | None = None
  """Optimizer of the policy. If None, `learner.optimizer` is used."""
  keep_optimizer: bool = False
  """Whether the stage continues with the previous stage's optimizer state instead of a new one."""
  critic: CriticConfig = CriticConfig()
  """Settings of the critic, for algorithms that have one."""
  evaluate_every: int | None = None
  """Number of steps between evaluations. If None, evaluations take place only after the stage."""

  @property
  def explores(self) -> bool:
    """Whether the stage's batches are the policy's own rollouts."""
    return isinstance(self.source, Rollouts)

  @property
  def trains(self) -> bool:
    """Whether the stage updates the policy."""
    return not (isinstance(self.source, Rollouts) and self.source.rollout_only)

  def __post_init__(self):
    where = f'stages.{self.name}.'
    _at_least(where, self, steps=1, minibatches=1, epochs=1, evaluate_every=1)
    if not isinstance(self.source, Rollouts | Demonstrations | Examples | Pairs | Recorded):
      raise UserError(
        f'{where}source: got {self.source!r:.100}, wanted Rollouts, Demonstrations, Examples, '
        'Pairs or Recorded'
      )
    self.source.check(f'{where}source.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
  """Generation of completions: engine, lengths, sampling, workflow."""

  engine: str = 'embedded'
  """Key of `rollout.catalogue.ENGINES` (`jaxrl train --list`), or your own engine as
  'module:attribute'. The options of an engine in `ENGINES` are in the field with the engine's name.
  """
  engine_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Options of your own engine, keyed by the field of its options dataclass."""
  max_prompt_length: int
  """Maximum length of a prompt in tokens; tasks with longer prompts are skipped and counted."""
  max_response_length: int
  """Maximum length of a response in tokens."""
  embedded: EmbeddedConfig = EmbeddedConfig()
  vllm: VllmConfig = VllmConfig()
  collect_deadline_s: float = 3600.0
  """Maximum time in seconds to wait for a batch of rollouts, or for the next finished task of an
  evaluation.
  """
  mismatch: MismatchConfig = MismatchConfig()
  """Limits on the differences between the trainer's and the sampler's logprobs. A warning is
  logged for each step that exceeds a limit.
  """
  workflow: WorkflowConfig = WorkflowConfig()
  """Workflow that turns a task into samples."""
  explorers: ExplorersConfig | None = None
  """Explorer processes that run the workflow. If None, the trainer's process runs it."""
  auxiliary: tuple[AuxiliaryConfig, ...] = ()
  """Models besides the policy that workflows may query."""
  partial: PartialConfig | None = None
  """Partial rollouts: a token budget by which the generation of long rollouts is spread over
  several batches. If None, each rollout is generated as a whole for one batch.
  """
  repetition_detection: RepetitionDetection | None = None
  """Rule that ends a training rollout early when it repeats itself. If None, repetition is ignored.
  Evaluations always ignore it.
  """

  @property
  def max_length(self) -> int:
    """Maximum length of a sequence in tokens, prompt plus response."""
    return self.max_prompt_length + self.max_response_length

  def sampling(self, temperature: float) -> Sampling:
    """Returns the sampling parameters of training rollouts for a temperature."""
    return Sampling(temperature=temperature, repetition_detection=self.repetition_detection)

  def __post_init__(self):
    _at_least('rollout.', self, max_prompt_length=1, max_response_length=1)
    longest = max(self.embedded.prefill_buckets, default=self.max_prompt_length)
    if longest < self.max_prompt_length - 1:
      raise UserError(
        f'rollout.embedded.prefill_buckets: the largest is {longest}, prompts of max_prompt_length='
        f'{self.max_prompt_length} tokens need one of at least {self.max_prompt_length - 1}'
      )
    if ':' not in self.engine:  # A user's own engine is imported only when a run needs it.
      named_pair(self.engine, 'engine', ENGINES)
      if self.engine_options:
        raise UserError(
          'rollout.engine_options: apply only to a custom engine, and rollout.engine is '
          f'{self.engine!r}; set rollout.{self.engine} instead, and leave engine_options empty'
        )

  @property
  def vllm_servers(self) -> VllmConfig | None:
    """Settings of the vLLM servers if they are the engine; otherwise None."""
    return self.vllm if self.engine == 'vllm' else None

  @property
  def engine_options_key(self) -> str:
    """Dotted key of the engine's options in the configuration."""
    return f'rollout.{self.engine}' if self.engine in ENGINES else 'rollout.engine_options'

  def engine_spec(self) -> EngineSpec:
    """Returns the spec of the configured engine, built from its options. Imports the module of a
    user-defined engine.
    """
    options, make = named_pair(self.engine, 'engine', ENGINES)
    if self.engine in ENGINES:
      return make(getattr(self, self.engine))
    spec = make(from_json(dict(self.engine_options), options, self.engine_options_key))
    if not isinstance(spec, EngineSpec):
      raise UserError(f'engine {self.engine!r}: made a {type(spec).__name__}, wanted an EngineSpec')
    return spec

  def engine_may_change(self) -> tuple[str, ...]:
    """Dotted keys of engine options that a resumed run may change."""
    specs = {f'rollout.{name}': make(getattr(self, name)) for name, (_, make) in ENGINES.items()}
    specs[self.engine_options_key] = self.engine_spec()
    return tuple(f'{key}.{name}' for key, spec in specs.items() for name in spec.may_change)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerConfig:
  """Mesh, batches and optimizer of the update."""

  mesh: MeshConfig = MeshConfig()
  optimizer: OptimizerConfig | None = None
  """Optimizer for stages that do not set one. If None, each stage must set its own."""
  chunk_len: int | None = None
  """Length of a packed chunk in tokens. If None, it is the length of the longest possible sequence,
  rounded up to a multiple of 8 and of `mesh.sequence`.
  """
  chunks_per_rank: int = 8
  """Number of chunks that each data-parallel rank has in a micro-batch."""
  logits_budget_bytes: int = 256 << 20
  """Maximum size of the logits in bytes per rank. To stay below it, logits are computed for part of
  the tokens at a time.
  """

  def __post_init__(self):
    _at_least('learner.', self, chunk_len=1, chunks_per_rank=1, logits_budget_bytes=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Configuration of a whole run."""

  name: str
  """Name of the run; the default run directory is `runs/<name>`."""
  seed: int = 0
  """Seed from which random weights, data order and sampling are derived."""
  policy: PolicyConfig
  tasksets: tuple[TasksetConfig, ...] = ()
  preferences: tuple[PreferenceSource, ...] = ()
  examples: tuple[ExamplesConfig, ...] = ()
  rewards: RewardsConfig = RewardsConfig(scorers=())
  rollout: RolloutConfig
  learner: LearnerConfig = LearnerConfig()
  stages: tuple[StageConfig, ...]
  evaluation: tuple[SuiteConfig, ...] = ()
  checkpoint: CheckpointConfig = CheckpointConfig()
  logging: LoggingConfig = LoggingConfig()
  coordination: CoordinationConfig = CoordinationConfig()
  registry: RegistryConfig | None = None
  """Registry through which the trainer, servers, scorer hosts and explorers of the job find each
  other. If this is `{}`, it is in the run directory. If None, addresses are configured instead.
  """
  compilation_cache: str | None = None
  """Directory of JAX's persistent compilation cache. If None, there is no cache."""

  @property
  def max_uses(self) -> int:
    """Maximum number of batches that may train on one rollout."""
    pasts = [stage.source.past for stage in self.stages if isinstance(stage.source, Rollouts)]
    return max((past.max_uses for past in pasts if past is not None), default=1)

  @property
  def generates(self) -> bool:
    """Whether any stage or evaluation generates completions, so that an engine is needed."""
    return bool(self.evaluation) or any(stage.explores for stage in self.stages)

  def __post_init__(self):
    if not self.stages:
      raise UserError('stages: empty, wanted at least one')
    if self.rollout.vllm.lora == 'adapter' and self.policy.lora is None:
      raise UserError(
        "rollout.vllm.lora: 'adapter', and the policy has no adapters; set policy.lora, or remove "
        'it'
      )
    if self.rollout.partial is not None:
      self._check_partial()
    if self.registry is None:
      self._check_no_registry()
    for before, stage in itertools.pairwise(self.stages):
      if not before.trains and stage.keep_optimizer:
        raise UserError(
          f'stages.{stage.name}.keep_optimizer: {before.name} before it only rolls out, without an '
          'optimizer; put that stage elsewhere, or remove keep_optimizer'
        )
    for stage in self.stages:
      if isinstance(stage.source, Rollouts):
        stage.source.limits.check(self.rollout.collect_deadline_s, f'stages.{stage.name}.source.')
    named = {
      part: getattr(self, part)
      for part in ('tasksets', 'preferences', 'examples', 'stages', 'evaluation')
    }
    for part, items in (*named.items(), ('rollout.auxiliary', self.rollout.auxiliary)):
      names = [item.name for item in items]
      for name in names:
        if names.count(name) > 1:
          raise UserError(
            f'{part}: {names.count(name)} are called {name!r}; give each its own name'
          )
    if self.rollout.engine in ENGINES:  # One of the user's own is imported when a run needs it.
      self.check_sampling()

  def _check_no_registry(self) -> None:
    """Raises UserError if a field requires a registry, but none is configured."""
    listen = self.rollout.explorers and self.rollout.explorers.listen
    needs = {
      'rollout.vllm.discover: set': self.rollout.vllm.discover is not None,
      'rollout.explorers.listen.token_file: missing': listen is not None
      and listen.token_file is None,
      **{
        f'rewards.scorers.{scorer.name}.options.discover: set': scorer.implementation in DISCOVERING
        and scorer.options.get('discover') is not None
        for scorer in self.rewards.scorers
      },
    }
    for what, is_so in needs.items():
      if is_so:
        raise UserError(
          f'{what}, and the run has no registry; set --config.registry={{}}, or give addresses '
          'and tokens'
        )

  def _check_partial(self) -> None:
    """Raises UserError if partial rollouts are combined with an option that does not support
    them.
    """
    rollout, reason = self.rollout, ''
    if rollout.engine not in ENGINES:
      reason = f'rollout.engine {rollout.engine!r}; wanted {" or ".join(ENGINES)}'
    elif rollout.explorers is not None:
      reason = 'rollout.explorers; remove it'
    elif rollout.workflow != WorkflowConfig():
      reason = f'rollout.workflow {rollout.workflow.kind!r}; wanted single_turn without options'
    elif (
      rollout.engine == 'embedded'
      and (longest := max(rollout.embedded.prefill_buckets, default=None)) is not None
      and longest < rollout.max_length - 2
    ):
      reason = (
        f'rollout.embedded.prefill_buckets up to {longest}; continuing an answer needs one of at '
        f'least {rollout.max_length - 2}, or none for the default'
      )
    for stage in self.stages:
      source, where = stage.source, f'stages.{stage.name}.source'
      if not reason and isinstance(source, Rollouts):
        in_hand = source.groups_per_batch * (source.bound + 1)
        if not source.bound and rollout.partial.loss != 'current_only':
          reason = (
            f'{where}.bound 0 and loss {rollout.partial.loss!r}, which trains on tokens of older '
            "weights; wanted loss 'current_only', or a bound above 0"
          )
        elif not source.bound and rollout.engine == 'vllm' and rollout.vllm.discover is not None:
          reason = (
            f'{where}.bound 0 and rollout.vllm.discover, with which servers join and leave; wanted '
            "rollout.vllm.addresses, the run's own servers, or a bound above 0"
          )
        elif source.past is not None:
          reason = f'{where}.past; remove it'
        elif rollout.partial.max_groups(source.groups_per_batch, source.bound) < in_hand:
          reason = (
            f'{where}.groups_per_batch times bound + 1 = {in_hand} above rollout.partial.groups; '
            'raise the latter'
          )
        elif source.selection.kind not in ('all', 'mixed'):
          reason = f"{where}.selection {source.selection.kind!r}; wanted 'all' or 'mixed'"
    if reason:
      raise UserError(f'rollout.partial: cannot be combined with {reason}')

  def check_sampling(self) -> None:
    """Raises UserError if a stage or evaluation uses sampling parameters that its engine does not
    support.
    """
    asked = [
      (f'stages.{stage.name}', self.rollout.sampling(stage.source.temperature))
      for stage in self.stages
      if isinstance(stage.source, Rollouts)
    ]
    asked += [
      (f'evaluation.{suite.name}', suite.sampling) for suite in self.evaluation if suite.samples
    ]
    engine = self.rollout.engine_spec()
    for where, sampling in asked:
      if reason := engine.unsupported(sampling):
        raise UserError(f'{where}: {reason}')


def scored_tasksets(config: Config) -> set[str]:
  """Returns the names of the tasksets from which rollouts or evaluations draw tasks."""
  names = {suite.taskset for suite in config.evaluation}
  return names | {
    name for stage in config.stages if stage.explores for name in stage.source.tasksets
  }


def trained_tasksets(stage: StageConfig) -> tuple[str, ...]:
  """Returns the names of the tasksets that a stage trains on, including those of its experts."""
  experts = stage.source.experts if isinstance(stage.source, Rollouts) else None
  return (*stage.source.tasksets, *(experts.tasksets if experts is not None else ()))
