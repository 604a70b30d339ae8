"""The root configuration. Each part is defined beside the code that reads it and only assembled here.

Batch sizes state their unit: tasks, sequences or tokens. Derived numbers are computed and printed (`--dry_run`), never
copied by hand.
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
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.master.evaluation import SuiteConfig
from jaxrl_llm.master.exploring.limits import TaskLimits
from jaxrl_llm.master.exploring.processors import ProcessorConfig, check_processors
from jaxrl_llm.master.exploring.selection import SelectionConfig
from jaxrl_llm.master.mismatch import MismatchConfig
from jaxrl_llm.models.spec import LoraConfig
from jaxrl_llm.parallel.mesh import MeshConfig
from jaxrl_llm.replay.draw import DrawConfig
from jaxrl_llm.rewards.api import RewardsConfig
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.auxiliary import AuxiliaryConfig
from jaxrl_llm.rollout.catalogue import ENGINES
from jaxrl_llm.rollout.embedded.engine import EmbeddedConfig
from jaxrl_llm.rollout.engine import EngineSpec
from jaxrl_llm.rollout.explorers.crew import ExplorersConfig
from jaxrl_llm.rollout.vllm.server import VllmConfig
from jaxrl_llm.rollout.workflow import WorkflowConfig
from jaxrl_llm.runtime.checkpoint import CheckpointConfig
from jaxrl_llm.tasks.preferences import PreferencesConfig
from jaxrl_llm.tasks.sampler import SamplerConfig
from jaxrl_llm.tasks.taskset import DemonstrationsConfig, TasksetConfig
from jaxrl_llm.tasks.tokenizer import TokenizerConfig


def _at_least(where: str, config: Any, **bounds: int) -> None:
  """Raises UserError for a field below its lower bound in `bounds`; None always passes."""
  for name, least in bounds.items():
    value = getattr(config, name)
    if value is not None and value < least:
      raise UserError(f'{where}{name}: {value}, wanted at least {least}')


def _check_tasksets(where: str, names: tuple[str, ...]) -> None:
  if not names:
    raise UserError(f'{where}tasksets: empty, wanted at least one; name a configured taskset')


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig:
  """The model to train."""

  init_from: str | None = None
  """Hugging Face directory, hub id, or a run directory (its `hf/`); None = random weights of `family` and `model`."""
  family: str = 'qwen2'
  """With random weights: model family."""
  model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """With random weights: ModelSpec fields (hidden_size, num_hidden_layers, ...) that differ from the tiny default."""
  tokenizer: TokenizerConfig = TokenizerConfig()
  """With random weights: tokenizer to build; a checkpoint brings its own."""
  dtype: Literal['float32', 'bfloat16'] = 'float32'
  """Data type of computation."""
  param_dtype: Literal['float32', 'bfloat16'] = 'float32'
  """Data type of the parameters; adapters are float32."""
  scan_layers: bool = False
  """Compile one layer and scan it over all: compiles faster, runs 10 to 15 % slower on a CPU."""
  remat: Literal['none', 'full', 'dots', 'offload'] = 'none'
  """Activations of each layer kept for the backward pass, see ModelOptions.remat; saves CPU memory only with
  scan_layers."""
  attention: Literal['auto', 'masked', 'blockwise', 'splash', 'pallas_gpu'] = 'auto'
  """Implementation in training: 'masked' materializes all scores, 'blockwise' one block; 'splash' is a TPU kernel,
  'pallas_gpu' a GPU kernel; 'auto' chooses by platform and length."""
  lora: LoraConfig | None = None
  """Adapters to train on frozen weights, in all stages; None: train the whole model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
  """A stage's algorithm by name, and its options."""

  name: str
  """Key of `learner.catalogue.ALGORITHMS` (`jaxrl train --list`), or your own algorithm as 'module:attribute'."""
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Fields of the algorithm's options dataclass."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticConfig:
  """PPO's critic: a separate network with the policy's architecture and one output."""

  init_from: str | None = None
  """Reward model or critic to start from (directory, hub id, or a run directory); None: the critic of the stage before,
  or else the policy with a fresh output."""
  optimizer: OptimizerConfig | None = None
  """Optimizer of the critic; None = the policy's."""


@moved({'demonstrations': 'templates, with weights, count and seed beside it'})
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig(DemonstrationsConfig):
  """Expert demonstrations that join each batch of rollouts."""

  tasksets: tuple[str, ...]
  """Names of configured tasksets that the demonstrations come from."""
  ratio: float = 0.25
  """Least share of expert sequences in the batch, between 0 and 1; their number is rounded up."""

  def __post_init__(self):
    super().__post_init__()
    if not 0 < self.ratio < 1:
      raise UserError(f'experts.ratio: {self.ratio}, wanted a share between 0 and 1')

  def rows(self, usual: int) -> int:
    """Number of expert sequences that join `usual` rollouts."""
    return math.ceil(usual * self.ratio / (1 - self.ratio) - 1e-9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PastConfig:
  """Replayed groups that join each batch of new ones."""

  groups: int
  """Replayed groups per batch, on top of `groups_per_batch`; fewer if fewer can be drawn, as in the first batches."""
  max_uses: int
  """Most batches that may train on a group, its first included."""
  draw: DrawConfig = DrawConfig()
  """Rule that selects the groups."""

  def __post_init__(self):
    _at_least('past.', self, groups=1, max_uses=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceSource(PreferencesConfig):
  """Preferences of a run: from a file, or made from a taskset's tasks by templates (`source='taskset:<name>'`)."""

  wrong: tuple[str, ...] = ()
  """With a taskset: templates of the rejected answer, one of which is used per task; `chosen` is the template of the
  preferred answer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollouts:
  """Source of a stage's batches: groups of the policy's own rollouts."""

  tasksets: tuple[str, ...]
  """Names of configured tasksets to attempt."""
  sampler: SamplerConfig = SamplerConfig()
  """Order in which tasks are drawn."""
  groups_per_batch: int = 16
  """Tasks per batch."""
  group_size: int = 8
  """Samples per task."""
  temperature: float = 1.0
  """Sampling temperature. Training rollouts are unfiltered (top_p 1, no top_k): the trainer compares whole
  distributions."""
  limits: TaskLimits = TaskLimits()
  """Time limits of a group."""
  max_dropped_groups: int = 100
  """Groups without a scorable or selected sample allowed while one batch is collected; one more ends the run."""
  processors: tuple[ProcessorConfig, ...] = ()
  """Processors applied in order to a finished group before selection; see `master.exploring.processors`."""
  selection: SelectionConfig = SelectionConfig()
  """Rule for the samples of a finished group that are trained on."""
  experts: ExpertsConfig | None = None
  """For mix: expert rows that join the rollouts; None: none."""
  past: PastConfig | None = None
  """Groups of earlier batches to train on again, whose age `past.draw.max_age` bounds; None: none."""
  bound: int = 0
  """Most updates by which a rollout's weights may lag those that train on it; 0 = on-policy."""
  publish_every: int = 1
  """Updates between two publications of the weights to the engine."""
  rollout_only: bool = False
  """Generate, score, process and store without training; optimizer and critic state ends there."""

  @property
  def unit(self) -> int:
    """Number of sequences that must stay together: 2 for pairs, else 1."""
    return self.selection.unit

  @property
  def groups(self) -> int:
    """Most tasks in a batch."""
    return self.groups_per_batch + (self.past.groups if self.past is not None else 0)

  @property
  def expert_rows(self) -> int:
    """Number of expert sequences in a batch."""
    return self.experts.rows(self._usual) if self.experts is not None else 0

  @property
  def sequences(self) -> int:
    """Most sequences in a batch."""
    return self._usual + self.expert_rows

  @property
  def _usual(self) -> int:
    """Most sequences of the policy in a batch."""
    return self.groups * self.selection.most(self.group_size)

  def check(self, where: str) -> None:
    """Raises UserError for values that have no meaning, alone or together; `where` prefixes the field's name."""
    _check_tasksets(where, self.tasksets)
    _at_least(where, self, groups_per_batch=1, group_size=1, max_dropped_groups=0, bound=0, publish_every=1)
    self.sampler.check_tasksets(self.tasksets, where)
    check_processors(self.processors, f'{where}processors')
    if self.temperature <= 0:
      raise UserError(f'{where}temperature: {self.temperature} is not above 0: training needs samples to differ')
    if self.selection.kind == 'pairs' and self.group_size < 2:
      raise UserError(f'{where}group_size: 1 sample makes no pair; wanted at least 2')
    if self.experts is not None and self.selection.kind not in ('all', 'mixed'):
      raise UserError(f'{where}selection: {self.selection.kind!r} has no place beside experts; wanted all or mixed')
    if self.rollout_only and (self.past is not None or self.experts is not None):
      raise UserError(
        f'{where}rollout_only: trains on nothing, so that no earlier groups or experts join the rollouts; remove it, '
        'or those'
      )
    if self.past is not None:
      most = self.groups_per_batch * (self.past.max_uses - 1)
      if self.past.groups > most:
        raise UserError(
          f'{where}past.groups: {self.past.groups}, and {self.groups_per_batch} new groups a batch, each used at most '
          f'{self.past.max_uses - 1} times more, leave {most}; lower it, or raise max_uses'
        )
    if self.publish_every > self.bound + 1:
      age = self.publish_every - 1
      raise UserError(
        f'{where}publish_every: {self.publish_every} > bound + 1 = {self.bound + 1}: the last batch before a '
        f'publication would train on rollouts of weights {age} updates old; raise bound to {age}, or publish more often'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demonstrations(DemonstrationsConfig):
  """Source of a stage's batches: answers to tasks, to be imitated."""

  tasksets: tuple[str, ...]
  """Names of configured tasksets to demonstrate."""
  sequences_per_batch: int = 64
  """Sequences per batch."""
  unit: ClassVar[int] = 1
  """Number of sequences that must stay together."""

  @property
  def sequences(self) -> int:
    """Most sequences in a batch."""
    return self.sequences_per_batch

  def check(self, where: str) -> None:
    """Raises UserError for values that have no meaning; `where` prefixes the field's name."""
    _check_tasksets(where, self.tasksets)
    _at_least(where, self, sequences_per_batch=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
  """Source of a stage's batches: preference pairs."""

  train: str
  """Name of the configured preferences to train on."""
  held_out: str | None = None
  """Name of the preferences measured after each step that ends with an evaluation
  (`val-core/<name>/rewards/accuracies`); None: no measurement."""
  sequences_per_batch: int = 64
  """Sequences per batch; a pair counts as two."""
  tasksets: ClassVar[tuple[str, ...]] = ()
  """Pairs bring their own prompts."""
  unit: ClassVar[int] = 2
  """Number of sequences that must stay together."""

  @property
  def sequences(self) -> int:
    """Most sequences in a batch."""
    return self.sequences_per_batch

  def check(self, where: str) -> None:
    """Raises UserError for values that have no meaning; `where` prefixes the field's name."""
    _at_least(where, self, sequences_per_batch=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded:
  """Source of a stage's batches: groups of rollouts that another run stored, for offline training."""

  run: str
  """Directory of the other run; read once, when this run begins."""
  stage: str | None = None
  """Stage of the other run whose rollouts are used; None: all stages."""
  tasksets: tuple[str, ...]
  """Names of configured tasksets; rollouts of other tasks are skipped."""
  groups_per_batch: int = 16
  """Tasks per batch."""
  group_size: int = 8
  """Most samples per task."""
  unit: ClassVar[int] = 1
  """Number of sequences that must stay together."""

  @property
  def sequences(self) -> int:
    """Most sequences in a batch."""
    return self.groups_per_batch * self.group_size

  def check(self, where: str) -> None:
    """Raises UserError for values that have no meaning; `where` prefixes the field's name."""
    _check_tasksets(where, self.tasksets)
    _at_least(where, self, groups_per_batch=1, group_size=1)


_OF_ROLLOUTS = (
  *('experts', 'processors', 'selection', 'temperature', 'sampler', 'past', 'bound', 'publish_every', 'rollout_only'),
  *('max_dropped_groups', 'limits'),
)


@moved(
  {
    'tasksets': 'source.tasksets, of Rollouts, Demonstrations or Recorded',
    'demonstrations': 'source, as Demonstrations(tasksets=…, templates=…)',
    'preferences': 'source, as Pairs(train=…)',
    'recorded': 'source, as Recorded(run=…, tasksets=…)',
    'sequences_per_batch': 'source.sequences_per_batch, of Demonstrations or Pairs',
    'groups_per_batch': 'source.groups_per_batch, of Rollouts or Recorded',
    'group_size': 'source.group_size, of Rollouts or Recorded',
    **{name: f'source.{name}, of Rollouts' for name in _OF_ROLLOUTS},
  }
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class StageConfig:
  """One stage: an algorithm, the source of its batches, its steps."""

  name: str
  algorithm: AlgorithmConfig
  source: Rollouts | Demonstrations | Pairs | Recorded
  """What the batches consist of."""
  steps: int
  """Number of batches."""
  minibatches: int = 1
  """Parts that a batch is split into, with one optimizer step each."""
  epochs: int = 1
  """Passes over each batch."""
  optimizer: OptimizerConfig | None = None
  """Optimizer of the policy; None = `learner.optimizer`."""
  keep_optimizer: bool = False
  """Keep the optimizer state of the previous stage instead of starting fresh."""
  critic: CriticConfig = CriticConfig()
  """Critic, for algorithms that have one."""
  evaluate_every: int | None = None
  """Steps between evaluations; None = evaluate only after the stage."""

  @property
  def explores(self) -> bool:
    """Whether its batches are the policy's own rollouts."""
    return isinstance(self.source, Rollouts)

  @property
  def trains(self) -> bool:
    """Whether it updates the policy."""
    return not (isinstance(self.source, Rollouts) and self.source.rollout_only)

  def __post_init__(self):
    where = f'stages.{self.name}.'
    _at_least(where, self, steps=1, minibatches=1, epochs=1, evaluate_every=1)
    if not isinstance(self.source, Rollouts | Demonstrations | Pairs | Recorded):
      raise UserError(f'{where}source: got {self.source!r:.100}, wanted Rollouts, Demonstrations, Pairs or Recorded')
    self.source.check(f'{where}source.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
  """Generation of completions: engine, lengths, sampling, workflow."""

  engine: str = 'embedded'
  """Key of `rollout.catalogue.ENGINES` (`jaxrl train --list`), whose options are the field of that name here, or
  your own engine as 'module:attribute'."""
  engine_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """With your own engine: fields of its options dataclass."""
  max_prompt_length: int
  """Longest prompt in tokens; tasks with longer prompts are skipped and counted."""
  max_response_length: int
  """Longest response in tokens."""
  embedded: EmbeddedConfig = EmbeddedConfig()
  vllm: VllmConfig = VllmConfig()
  collect_deadline_s: float = 3600.0
  """Longest wait in seconds for a batch of rollouts, or for the next task of an evaluation to end."""
  mismatch: MismatchConfig = MismatchConfig()
  """Differences between trainer and sampler logprobs above which a step logs a warning."""
  workflow: WorkflowConfig = WorkflowConfig()
  """Workflow that turns a task into samples."""
  explorers: ExplorersConfig | None = None
  """Processes that run the workflow; None: the trainer's process runs it."""
  auxiliary: tuple[AuxiliaryConfig, ...] = ()
  """Models besides the policy that workflows may query."""

  @property
  def max_length(self) -> int:
    """Longest sequence in tokens, prompt and response."""
    return self.max_prompt_length + self.max_response_length

  def __post_init__(self):
    _at_least('rollout.', self, max_prompt_length=1, max_response_length=1)
    longest = max(self.embedded.prefill_buckets, default=self.max_prompt_length)
    if longest < self.max_prompt_length - 1:
      raise UserError(
        f'rollout.embedded.prefill_buckets: the largest is {longest}, prompts of max_prompt_length='
        f'{self.max_prompt_length} tokens want one of at least {self.max_prompt_length - 1}'
      )
    if ':' not in self.engine:  # One of the user's own is imported when a run needs it.
      named_pair(self.engine, 'engine', ENGINES)
      if self.engine_options:
        raise UserError(
          f'rollout.engine_options: apply only to an engine of your own, and rollout.engine is {self.engine!r}; set '
          f'rollout.{self.engine} instead, and leave engine_options empty'
        )

  @property
  def engine_options_key(self) -> str:
    """Key of the engine's options in the configuration."""
    return f'rollout.{self.engine}' if self.engine in ENGINES else 'rollout.engine_options'

  def engine_spec(self) -> EngineSpec:
    """Returns the engine with its options; imports a user's own."""
    options, make = named_pair(self.engine, 'engine', ENGINES)
    if self.engine in ENGINES:
      return make(getattr(self, self.engine))
    spec = make(from_json(dict(self.engine_options), options, self.engine_options_key))
    if not isinstance(spec, EngineSpec):
      raise UserError(f'engine {self.engine!r}: made a {type(spec).__name__}, wanted an EngineSpec')
    return spec

  def engine_may_change(self) -> tuple[str, ...]:
    """Keys of engines' options that a resumed run may change."""
    specs = {f'rollout.{name}': make(getattr(self, name)) for name, (_, make) in ENGINES.items()}
    specs[self.engine_options_key] = self.engine_spec()
    return tuple(f'{key}.{name}' for key, spec in specs.items() for name in spec.may_change)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerConfig:
  """Mesh, batches and optimizer of the update."""

  mesh: MeshConfig = MeshConfig()
  optimizer: OptimizerConfig | None = None
  """Optimizer of stages that set none; None: each stage must set its own."""
  chunk_len: int | None = None
  """Length of a packed chunk in tokens; None = the longest possible sequence, rounded up to a multiple of 8 and of
  `mesh.sequence`."""
  chunks_per_rank: int = 8
  """Chunks per micro-batch on each data-parallel rank."""
  logits_budget_bytes: int = 256 << 20
  """Bytes of logits per rank; they are computed in token chunks that stay below it."""

  def __post_init__(self):
    _at_least('learner.', self, chunk_len=1, chunks_per_rank=1, logits_budget_bytes=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """A run."""

  name: str
  """Name of the run; the default run directory is `runs/<name>`."""
  seed: int = 0
  """Seed of random weights, data order and sampling."""
  policy: PolicyConfig
  tasksets: tuple[TasksetConfig, ...] = ()
  preferences: tuple[PreferenceSource, ...] = ()
  rewards: RewardsConfig = RewardsConfig(scorers=())
  rollout: RolloutConfig
  learner: LearnerConfig
  stages: tuple[StageConfig, ...]
  evaluation: tuple[SuiteConfig, ...] = ()
  checkpoint: CheckpointConfig = CheckpointConfig()
  compilation_cache: str | None = None
  """Directory of JAX's persistent compilation cache; None = no cache."""

  @property
  def max_uses(self) -> int:
    """Most batches that may train on one rollout."""
    pasts = [stage.source.past for stage in self.stages if isinstance(stage.source, Rollouts)]
    return max((past.max_uses for past in pasts if past is not None), default=1)

  @property
  def generates(self) -> bool:
    """Whether any stage or evaluation samples, so that an engine is needed."""
    return bool(self.evaluation) or any(stage.explores for stage in self.stages)

  def __post_init__(self):
    if not self.stages:
      raise UserError('stages: empty, wanted at least one')
    if self.rollout.vllm.lora == 'adapter' and self.policy.lora is None:
      raise UserError("rollout.vllm.lora: 'adapter', and the policy has none; set policy.lora, or remove it")
    for before, stage in itertools.pairwise(self.stages):
      if not before.trains and stage.keep_optimizer:
        raise UserError(
          f'stages.{stage.name}.keep_optimizer: {before.name} before it only rolls out and has none; put that stage '
          'elsewhere, or remove keep_optimizer'
        )
    for stage in self.stages:
      if isinstance(stage.source, Rollouts):
        stage.source.limits.check(self.rollout.collect_deadline_s, f'stages.{stage.name}.source.')
    named = {part: getattr(self, part) for part in ('tasksets', 'preferences', 'stages', 'evaluation')}
    for part, items in (*named.items(), ('rollout.auxiliary', self.rollout.auxiliary)):
      names = [item.name for item in items]
      for name in names:
        if names.count(name) > 1:
          raise UserError(f'{part}: {names.count(name)} are called {name!r}; give each its own name')
    if self.rollout.engine in ENGINES:  # One of the user's own is imported when a run needs it.
      self.check_sampling()

  def check_sampling(self) -> None:
    """Raises UserError for a stage or an evaluation that samples as its engine cannot."""
    asked = [
      (f'stages.{stage.name}', Sampling(temperature=stage.source.temperature))
      for stage in self.stages
      if isinstance(stage.source, Rollouts)
    ]
    asked += [(f'evaluation.{suite.name}', suite.sampling) for suite in self.evaluation if suite.samples]
    engine = self.rollout.engine_spec()
    for where, sampling in asked:
      if reason := engine.unsupported(sampling):
        raise UserError(f'{where}: {reason}')


def scored_tasksets(config: Config) -> set[str]:
  """Names of the tasksets that rollouts or evaluations draw from."""
  names = {suite.taskset for suite in config.evaluation}
  return names | {name for stage in config.stages if stage.explores for name in stage.source.tasksets}
