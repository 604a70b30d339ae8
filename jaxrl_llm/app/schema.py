"""The root configuration. Each part is defined beside the code that reads it and only assembled here.

Batch sizes state their unit: tasks, sequences or tokens. Derived numbers are computed and printed (`--dry_run`), never
copied by hand.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any, Literal

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
from jaxrl_llm.rollout.auxiliary import AuxiliaryConfig
from jaxrl_llm.rollout.embedded.engine import EmbeddedConfig
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
  """Expert demonstrations that join each batch of rollouts."""

  tasksets: tuple[str, ...]
  """Names of configured tasksets that the demonstrations come from."""
  demonstrations: DemonstrationsConfig
  """Format of the demonstrations."""
  ratio: float = 0.25
  """Least share of expert sequences in the batch, between 0 and 1; their number is rounded up."""

  def __post_init__(self):
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
class RecordedConfig:
  """Rollouts stored by another run, for offline training; those of tasks outside the stage's tasksets are skipped."""

  run: str
  """Directory of the other run; read once, when this run begins."""
  stage: str | None = None
  """Stage of the other run whose rollouts are used; None: all stages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairsConfig:
  """Preference pairs to train on, and held-out pairs."""

  train: str
  """Name of the configured preferences to train on."""
  held_out: str | None = None
  """Name of the preferences measured after each step that ends with an evaluation
  (`val-core/<name>/rewards/accuracies`); None: no measurement."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceSource(PreferencesConfig):
  """Preferences of a run: from a file, or made from a taskset's tasks by templates (`source='taskset:<name>'`)."""

  wrong: tuple[str, ...] = ()
  """With a taskset: templates of the rejected answer, one of which is used per task; `chosen` is the template of the
  preferred answer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageConfig:
  """One stage: an algorithm, its data, its steps.

  A stage trains on demonstrations, on preference pairs, on rollouts of another run, or, if none of these is set, on the
  policy's own rollouts.
  """

  name: str
  algorithm: AlgorithmConfig
  steps: int
  """Number of batches."""
  tasksets: tuple[str, ...] = ()
  """Names of configured tasksets to attempt or demonstrate."""
  optimizer: OptimizerConfig | None = None
  """Optimizer of the policy; None = `learner.optimizer`."""
  keep_optimizer: bool = False
  """Keep the optimizer state of the previous stage instead of starting fresh."""
  demonstrations: DemonstrationsConfig | None = None
  """Offline stages (sft): format of the tasks' demonstrations; None: no demonstrations."""
  preferences: PairsConfig | None = None
  """Offline stages (dpo, reward_model): preference pairs; None: no pairs."""
  recorded: RecordedConfig | None = None
  """Offline stages (grpo, opmd, …): stored rollouts of another run; None: no stored rollouts."""
  experts: ExpertsConfig | None = None
  """Rollout stages (mix): expert rows that join the rollouts; None: none."""
  processors: tuple[ProcessorConfig, ...] = ()
  """Rollout stages: processors applied in order to a finished group before selection; see `master.processors`."""
  selection: SelectionConfig = SelectionConfig()
  """Rollout stages: rule for the samples of a finished group that are trained on."""
  critic: CriticConfig = CriticConfig()
  """Critic, for algorithms that have one."""
  sequences_per_batch: int = 64
  """Offline stages: sequences per batch; a pair counts as two."""
  groups_per_batch: int = 16
  """Rollout stages: tasks per batch."""
  group_size: int = 8
  """Rollout stages: samples per task."""
  temperature: float = 1.0
  """Rollout stages: sampling temperature. Training rollouts are unfiltered (top_p 1, no top_k): the trainer compares
  whole distributions."""
  minibatches: int = 1
  """Parts that a batch is split into, with one optimizer step each."""
  epochs: int = 1
  """Passes over each batch."""
  sampler: SamplerConfig = SamplerConfig()
  """Rollout stages: order in which tasks are drawn."""
  past: PastConfig | None = None
  """Rollout stages: groups of earlier batches to train on again, whose age `past.draw.max_age` bounds; None: none."""
  bound: int = 0
  """Rollout stages: most updates by which a rollout's weights may lag those that train on it; 0 = on-policy."""
  publish_every: int = 1
  """Rollout stages: updates between two publications of the weights to the engine."""
  evaluate_every: int | None = None
  """Steps between evaluations; None = evaluate only after the stage."""
  rollout_only: bool = False
  """Rollout stages: generate, score, process and store without training; optimizer and critic state ends there."""
  max_dropped_groups: int = 100
  """Groups without a scorable or selected sample allowed while one batch is collected; one more ends the run."""
  limits: TaskLimits = TaskLimits()
  """Rollout stages: time limits of a group."""

  @property
  def explores(self) -> bool:
    """Whether its batches are the policy's own rollouts."""
    return self.demonstrations is None and self.preferences is None and self.recorded is None

  @property
  def rollouts(self) -> bool:
    """Whether its batches are groups of scored rollouts, the policy's own or recorded ones."""
    return self.explores or self.recorded is not None

  @property
  def groups(self) -> int:
    """Most tasks in a batch of rollouts."""
    return self.groups_per_batch + (self.past.groups if self.past is not None else 0)

  @property
  def unit(self) -> int:
    """Number of sequences that must stay together: 2 for pairs, else 1."""
    return 2 if self.preferences is not None else self.selection.unit

  @property
  def sequences(self) -> int:
    """Most sequences in a batch."""
    if not self.rollouts:
      return self.sequences_per_batch
    usual = self.groups * self.selection.most(self.group_size)
    return usual + (self.experts.rows(usual) if self.experts is not None else 0)

  def __post_init__(self):
    if sum(source is not None for source in (self.demonstrations, self.preferences, self.recorded)) > 1:
      raise UserError(
        f'stages.{self.name}: demonstrations, preferences and recorded exclude each other; give one of them'
      )
    if self.recorded is not None and self.experts is not None:
      raise UserError(f'stages.{self.name}.experts: join rollouts of the policy, not recorded ones; remove one of them')
    if self.preferences is not None and self.tasksets:
      raise UserError(f'stages.{self.name}.tasksets: has no meaning beside preferences; remove it')
    if self.rollouts and not self.tasksets:
      raise UserError(f'stages.{self.name}.tasksets: empty, and rollouts want tasks; name a configured taskset')
    if not self.explores and self.sampler != SamplerConfig():
      raise UserError(f'stages.{self.name}.sampler: draws tasks to attempt, and this stage learns from static data')
    if not self.explores and self.processors:
      raise UserError(
        f'stages.{self.name}.processors: of rollouts, and this stage learns from static data; remove them'
      )
    if self.rollout_only and (not self.explores or self.past is not None or self.experts is not None):
      raise UserError(
        f'stages.{self.name}.rollout_only: of stages that roll out, and no earlier groups or experts join them there; '
        'remove it, or those'
      )
    if not self.explores and (self.bound, self.publish_every) != (0, 1):
      raise UserError(f'stages.{self.name}: bound and publish_every are of rollouts, and this stage makes none')
    if self.past is not None:
      self._check_past(self.past)
    check_processors(self.processors, f'stages.{self.name}.processors')
    self.sampler.check_tasksets(self.tasksets, f'stages.{self.name}.')
    batch = dict(sequences_per_batch=1, groups_per_batch=1, group_size=1, minibatches=1, epochs=1)
    least = dict(steps=1, evaluate_every=1, max_dropped_groups=0, bound=0, publish_every=1)
    _at_least(f'stages.{self.name}.', self, **least, **batch)
    if self.publish_every > self.bound + 1:
      age = self.publish_every - 1
      raise UserError(
        f'stages.{self.name}.publish_every: {self.publish_every} > bound + 1 = {self.bound + 1}: the last batch before '
        f'a publication would train on rollouts of weights {age} updates old; raise bound to {age}, or publish more '
        'often'
      )

  def _check_past(self, past: PastConfig) -> None:
    """Raises UserError if there are no rollouts to draw from, or fewer than `past.groups` per batch."""
    where = f'stages.{self.name}.past'
    if not self.explores:
      raise UserError(f'{where}: of rollouts, and this stage learns from static data; remove it')
    most = self.groups_per_batch * (past.max_uses - 1)
    if past.groups > most:
      raise UserError(
        f'{where}.groups: {past.groups}, and {self.groups_per_batch} new groups a batch, each used at most '
        f'{past.max_uses - 1} times more, leave {most}; lower it, or raise max_uses'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
  """Generation of completions: engine, lengths, sampling, workflow."""

  engine: Literal['embedded', 'vllm'] = 'embedded'
  """'embedded': a JAX sampler in the trainer's process; 'vllm': vLLM servers, see `vllm`."""
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

  def __post_init__(self):
    _at_least('rollout.', self, max_prompt_length=1, max_response_length=1)
    longest = max(self.embedded.prefill_buckets, default=self.max_prompt_length)
    if longest < self.max_prompt_length - 1:
      raise UserError(
        f'rollout.embedded.prefill_buckets: the largest is {longest}, prompts of max_prompt_length='
        f'{self.max_prompt_length} tokens want one of at least {self.max_prompt_length - 1}'
      )


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
    return max((stage.past.max_uses for stage in self.stages if stage.past is not None), default=1)

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
      if before.rollout_only and stage.keep_optimizer:
        raise UserError(
          f'stages.{stage.name}.keep_optimizer: {before.name} before it only rolls out and has none; put that stage '
          'elsewhere, or remove keep_optimizer'
        )
    for stage in self.stages:
      stage.limits.check(self.rollout.collect_deadline_s, f'stages.{stage.name}.')
    named = {part: getattr(self, part) for part in ('tasksets', 'preferences', 'stages', 'evaluation')}
    for part, items in (*named.items(), ('rollout.auxiliary', self.rollout.auxiliary)):
      names = [item.name for item in items]
      for name in names:
        if names.count(name) > 1:
          raise UserError(f'{part}: {names.count(name)} are called {name!r}; give each its own name')
    for suite in self.evaluation:
      embedded = self.rollout.engine == 'embedded'
      if embedded and suite.samples and suite.sampling.filtered and not self.rollout.embedded.filters:
        raise UserError(f'evaluation.{suite.name}: top_p or top_k wants rollout.embedded.filters, which is off')


def scored_tasksets(config: Config) -> set[str]:
  """Names of the tasksets that rollouts or evaluations draw from."""
  names = {suite.taskset for suite in config.evaluation}
  return names | {name for stage in config.stages if stage.explores for name in stage.tasksets}
