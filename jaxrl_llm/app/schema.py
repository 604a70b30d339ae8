"""The root configuration of a run. Most of its parts are defined next to the code that reads them.

The name of a batch size states its unit (groups, sequences or chunks). Derived numbers are not
configured: they are computed, and `--dry_run` prints them. The sources of batches are defined in
`app.sources`; this module exports them too, because they are part of the configuration.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxrl_llm.app.sources import Demonstrations as Demonstrations
from jaxrl_llm.app.sources import Examples as Examples
from jaxrl_llm.app.sources import ExpertsConfig as ExpertsConfig
from jaxrl_llm.app.sources import Followed, Recorded, Rollouts, Source, Stored
from jaxrl_llm.app.sources import Pairs as Pairs
from jaxrl_llm.app.sources import PastConfig as PastConfig
from jaxrl_llm.config.moved import moved
from jaxrl_llm.config.own import named_pair
from jaxrl_llm.config.values import check_at_least, from_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.registry import RegistryConfig
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.master.evaluation import SuiteConfig
from jaxrl_llm.master.exploring.partial import PartialConfig
from jaxrl_llm.master.mismatch import MismatchConfig
from jaxrl_llm.master.phases import PhasesConfig
from jaxrl_llm.models.spec import LoraConfig
from jaxrl_llm.parallel.coordination import CoordinationConfig
from jaxrl_llm.parallel.mesh import MeshConfig
from jaxrl_llm.rewards.api import DISCOVERING, REWARD_MODEL, RewardsConfig
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
from jaxrl_llm.tasks.taskset import TasksetConfig
from jaxrl_llm.tasks.tokenizer import TokenizerConfig


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
  """Whether all layers are computed by a scan of one compiled layer. This compiles faster, but runs
  10 to 15 % slower on a CPU.
  """
  remat: Literal['none', 'full', 'dots', 'offload'] = 'none'
  """Rematerialization: 'none' keeps all activations for the backward pass; the other values keep
  some activations of each layer and recompute the rest (see `ModelOptions.remat`). On a CPU, they
  save memory only with `scan_layers`.
  """
  attention: Literal['auto', 'masked', 'blockwise', 'splash', 'pallas_gpu'] = 'auto'
  """Attention implementation in training: 'masked' materializes all scores, 'blockwise' one block
  at a time; 'splash' is a TPU kernel, 'pallas_gpu' a GPU kernel; 'auto' chooses by platform and
  length.
  """
  lora: LoraConfig | None = None
  """LoRA adapters to train in all stages. The other weights are frozen. If None, the whole model is
  trained.
  """


_OF_STAGE = 'stage:'


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
  """Reward model that the trainer runs, and that computes the scores of the scorer `reward_model`.
  It is sharded over the trainer's mesh, and scores the rollouts of a batch once all of them are
  complete.
  """

  init_from: str
  """Weights: a Hugging Face directory of a model with one output; a hub id; the directory of a run
  that trained a reward model; or 'stage:NAME', for the weights at the end of an earlier stage of
  this run that trains a reward model.
  """
  dtype: Literal['float32', 'bfloat16'] = 'bfloat16'
  """Data type of weights and activations."""
  max_length: int | None = None
  """Maximum number of tokens of prompt and answer, counted with the reward model's tokenizer. The
  scorer fails on longer samples. If None, it is 1.25 times `RolloutConfig.max_length`, plus 8. The
  reward model's own maximum length also applies.
  """
  sequences_per_pass: int | None = None
  """Maximum number of sequences per forward pass. If None, it is 64 per data-parallel rank."""
  max_rounds: int = 8
  """Maximum number of further rounds of rollouts for a batch, which replace groups that were
  dropped after the reward model had scored them. If a batch needs more rounds, the run fails.
  """

  @property
  def stage(self) -> str | None:
    """Name of the stage that trains the reward model; None if its weights are read from files."""
    named = self.init_from.startswith(_OF_STAGE)
    return self.init_from.removeprefix(_OF_STAGE) if named else None

  def __post_init__(self):
    check_at_least('reward_model.', self, max_rounds=0)
    for name in ('max_length', 'sequences_per_pass'):
      if getattr(self, name) is not None:
        check_at_least('reward_model.', self, **{name: 1})


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
  """PPO's critic: a separate network with the policy's architecture and one output."""

  init_from: str | None = None
  """Initial weights of the critic: a reward model or critic, given as a directory, hub id or run
  directory. If None, the critic continues with the weights of the previous stage's critic. If that
  stage has none, it starts with the weights of the policy and a new head.
  """
  optimizer: OptimizerConfig | None = None
  """Optimizer of the critic. If None, the policy's optimizer settings are used."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceSource(PreferencesConfig):
  """Preferences of a run, which are read from a file or dataset, or made from a taskset with
  templates (`source='taskset:<name>'`).
  """

  wrong: tuple[str, ...] = ()
  """Templates of rejected answers; each task uses one of them. Valid only if the source is a
  taskset. `chosen` is then the template of the preferred answer.
  """


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
  groups, stored rollouts selected by reward, or rollouts of a run that explores for this one.
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
  stage that trains a reward model begins with weights of the policy, they get a new head.
  """
  keep_optimizer: bool = False
  """Whether the stage continues with the previous stage's optimizer state instead of a new one."""
  critic: CriticConfig = CriticConfig()
  """Settings of the critic, for algorithms that have one."""
  evaluate_every: int | None = None
  """Number of steps between evaluations. If None, evaluations take place only after the stage."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
  """Generation of completions: engine, lengths, sampling, workflow."""

  engine: str = 'embedded'
  """Key of `rollout.catalogue.ENGINES` (listed by `jaxrl train --list`), or 'module:attribute' of a
  user-defined engine. The options of an engine in `ENGINES` are in the field with the engine's
  name.
  """
  engine_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Options of a user-defined engine, keyed by field name of its options dataclass."""
  max_prompt_length: int
  """Maximum length of a prompt in tokens; tasks with longer prompts are skipped and counted."""
  max_response_length: int
  """Maximum length of a response in tokens. In a trajectory of several steps, the limit applies to
  the response of each step.
  """
  max_steps: int = 1
  """Maximum number of steps of a trajectory. A step begins with a prompt that does not extend the
  tokens before it. Each step is a sequence that is trained on, so a batch has at most this many
  sequences per trajectory. A trajectory that would need more ends with the finish reason 'steps'.
  """
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
  """Partial rollouts: a token budget that spreads the generation of long rollouts over several
  batches. If None, each rollout is generated completely for one batch.
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
    check_at_least('rollout.', self, max_prompt_length=1, max_response_length=1, max_steps=1)
    longest = max(self.embedded.prefill_buckets, default=self.max_prompt_length)
    if longest < self.max_prompt_length - 1:
      raise UserError(
        f'rollout.embedded.prefill_buckets: the largest is {longest}, prompts of max_prompt_length='
        f'{self.max_prompt_length} tokens need one of at least {self.max_prompt_length - 1}'
      )
    if ':' not in self.engine:  # A custom engine is imported only when a run needs it.
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
    """Returns the dotted keys of the engine options that a resumed run may change."""
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
  rounded up to a multiple of 8 and of `mesh.sequence`. If prefixes are shared and
  `policy.attention` is not 'masked', chunks may be longer, so that more sequences of a group fit
  into a chunk. A micro-batch then has fewer chunks, but not more tokens.
  """
  chunks_per_rank: int = 8
  """Number of chunks that each data-parallel rank has in a micro-batch."""
  share_prefixes: bool = True
  """Whether a prefix that several sequences of a group or pair have in common, such as their
  prompt, is computed once instead of once per sequence. The results are the same up to rounding.
  The option has an effect only if attention is 'masked' or 'blockwise' (see `policy.attention`).
  """
  logits_budget_bytes: int = 256 << 20
  """Maximum size of the logits in bytes per rank. To stay below it, logits are computed for part of
  the tokens at a time.
  """

  def __post_init__(self):
    check_at_least('learner.', self, chunk_len=1, chunks_per_rank=1, logits_budget_bytes=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Configuration of a run."""

  name: str
  """Name of the run; the default run directory is `runs/<name>`."""
  seed: int = 0
  """Seed from which random weights, data order and sampling are derived."""
  policy: PolicyConfig
  tasksets: tuple[TasksetConfig, ...] = ()
  preferences: tuple[PreferenceSource, ...] = ()
  examples: tuple[ExamplesConfig, ...] = ()
  rewards: RewardsConfig = RewardsConfig(scorers=())
  reward_model: RewardModelConfig | None = None
  """Reward model that the trainer runs, for the scorer `reward_model`. If None, the trainer runs no
  reward model. A reward model on a server is configured as a scorer of kind `http` instead.
  """
  rollout: RolloutConfig
  learner: LearnerConfig = LearnerConfig()
  stages: tuple[StageConfig, ...]
  evaluation: tuple[SuiteConfig, ...] = ()
  checkpoint: CheckpointConfig = CheckpointConfig()
  logging: LoggingConfig = LoggingConfig()
  coordination: CoordinationConfig = CoordinationConfig()
  phases: PhasesConfig | None = None
  """Memory phases, in which rollouts, forward passes and updates take turns on the devices, and
  idle roles are moved off the devices. If None, everything stays on the devices.
  """
  registry: RegistryConfig | None = None
  """Registry through which the trainer, servers, scorer hosts and explorers of the job find each
  other. The value `{}` places it in the run directory. If None, addresses are configured instead.
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

  def rewards_of(self, stage: str) -> RewardsConfig:
    """Returns the scorers that judge a stage's rollouts, with their weights in that stage.

    Args:
      stage: name of a stage. If no stage has this name, the result is `rewards`.
    """
    source = next((s.source for s in self.stages if s.name == stage), None)
    return self.rewards.weighted(source.rewards if isinstance(source, Rollouts) else None)

  def __post_init__(self):
    if not self.stages:
      raise UserError('stages: empty, wanted at least one')
    if self.rollout.vllm.lora == 'adapter' and self.policy.lora is None:
      raise UserError(
        "rollout.vllm.lora: 'adapter', but the policy has no adapters; set policy.lora, or remove "
        'it'
      )
    if self.rollout.partial is not None:
      self._check_partial()
    self._check_kv()
    if self.phases is not None:
      self._check_phases(self.phases)
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
        if stage.source.longest_response > self.rollout.max_response_length:
          raise UserError(
            f'stages.{stage.name}.source.response_lengths: {stage.source.longest_response} tokens '
            f'above rollout.max_response_length={self.rollout.max_response_length}, for which the '
            'programs are compiled; lower them, or raise the latter'
          )
    self._check_origins()
    self._check_other_runs()
    self._check_rewards()
    self._check_reward_model()
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
    if self.rollout.engine in ENGINES:  # A custom engine is imported only when a run needs it.
      self.check_sampling()

  def _check_kv(self) -> None:
    """Raises UserError if the engine's option `kv` is 'keep' although a stage has no completions in
    flight when its weights change, or is 'recompute' although sequences may be too long for the
    prefill buckets of the embedded engine.
    """
    rollout = self.rollout
    kv = {'embedded': rollout.embedded.kv, 'vllm': rollout.vllm.kv}.get(rollout.engine)
    where = f'rollout.{rollout.engine}.kv'
    for stage in self.stages:
      if kv == 'keep' and isinstance(stage.source, Rollouts) and not stage.source.bound:
        raise UserError(
          f"{where}: 'keep', but stages.{stage.name}.source.bound is 0, so each token is sampled "
          "from the newest weights; wanted a bound above 0, or 'recompute'"
        )
    longest = max(rollout.embedded.prefill_buckets, default=rollout.max_length)
    if (rollout.engine, kv) == ('embedded', 'recompute') and longest < rollout.max_length - 2:
      raise UserError(
        f"{where}: 'recompute', but the largest of rollout.embedded.prefill_buckets is {longest}; "
        f'wanted one of at least {rollout.max_length - 2}, or none for the default'
      )

  def _check_phases(self, phases: PhasesConfig) -> None:
    """Raises UserError if memory phases are combined with incompatible settings."""
    for stage in self.stages:
      if isinstance(stage.source, Rollouts) and stage.source.bound:
        raise UserError(
          f'phases: stages.{stage.name}.source.bound is {stage.source.bound}, so rollouts are '
          'generated while the policy is updated, and the two cannot take turns on the devices; '
          'set bound to 0, or remove phases'
        )
      if stage.overlap_evaluation:
        raise UserError(
          f'phases: with stages.{stage.name}.overlap_evaluation, the policy is evaluated while it '
          'is updated, and the two cannot take turns on the devices; remove one of them'
        )
    vllm = self.rollout.vllm_servers
    if vllm is None or phases.engine == 'resident':
      return
    if phases.engine == 'destroy' and vllm.attached:
      raise UserError(
        "phases.engine: 'destroy', but the run cannot stop and start the servers of "
        f"rollout.vllm.{'discover' if vllm.addresses == () else 'addresses'}; wanted 'sleep', "
        "'resident', or servers of its own"
      )
    if vllm.discover is not None:
      raise UserError(
        "phases.engine: 'sleep', but with rollout.vllm.discover servers join and leave while "
        "others sleep; wanted 'resident', or rollout.vllm.addresses"
      )
    if phases.engine == 'sleep' and not vllm.attached and not vllm.args.get('enable_sleep_mode'):
      raise UserError(
        "phases.engine: 'sleep', but the servers start without sleep mode; set "
        "rollout.vllm.args.enable_sleep_mode=True (GPUs only), or phases.engine='destroy'"
      )

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
          f'{what}, but the run has no registry; set --config.registry={{}}, or give addresses '
          'and tokens'
        )

  def _check_origins(self) -> None:
    """Raises UserError if a stage's `init_from` is ambiguous, names weights that do not exist when
    the stage begins, or asks for the mean of adapters; or if the stage needs rollouts that do not
    exist by then.
    """
    for i, stage in enumerate(self.stages):
      earlier, where = [before.name for before in self.stages[:i]], f'stages.{stage.name}.init_from'
      for name in stage.init_from:
        of_best = stage_of_best(name)
        if name in earlier and (name == BASE or of_best is not None):
          raise UserError(f'{where}: {name!r} is the name of a stage, too; rename the stage')
        if of_best is not None:
          self._check_best(name, self.stages[:i], where)
        elif name not in (*earlier, BASE):
          raise UserError(
            f"{where}: {name!r}, wanted one of {[*earlier, BASE]}, or 'best:' before a stage's name"
          )
      if stage.waits_for_rows:
        self._check_own_rollouts(stage, self.stages[:i])
      if len(stage.init_from) > 1 and self.policy.lora is not None:
        raise UserError(
          f'{where}: {list(stage.init_from)}, but the mean of adapters is not an adapter; '
          'name one, or remove policy.lora'
        )

  def _check_best(self, name: str, earlier: Sequence[StageConfig], where: str) -> None:
    """Raises UserError if `name`, a value 'best:STAGE' of `init_from`, does not refer to an earlier
    stage that is evaluated before its end.
    """
    stages = {stage.name: stage for stage in earlier}
    if (stage := stages.get(stage_of_best(name))) is None:
      raise UserError(f"{where}: {name!r}, wanted 'best:' before one of {[*stages]}")
    if not self.evaluation:
      raise UserError(
        f'{where}: {name!r}, but the run evaluates nothing; add a suite to evaluation, or name '
        f'{stage.name!r} for the weights at its end'
      )
    if stage.evaluate_every is None:
      raise UserError(
        f'{where}: {name!r}, but {stage.name} is evaluated only at its end; set '
        f'stages.{stage.name}.evaluate_every, or name {stage.name!r}'
      )

  def _check_other_runs(self) -> None:
    """Raises UserError if this run cannot follow another run, or be followed, as configured."""
    follows = [
      stage.name
      for stage in self.stages
      if isinstance(stage.source, Rollouts) and stage.source.follow is not None
    ]
    followed = [stage.name for stage in self.stages if isinstance(stage.source, Followed)]
    for names, what in ((follows, 'source.follow'), (followed, 'the source Followed')):
      if len(names) > 1:
        raise UserError(f'stages: {names} have {what}; wanted at most one, or separate runs')
    if follows and followed:
      raise UserError(
        f'stages: {follows[0]} has source.follow and {followed[0]} the source Followed; put them '
        'in separate runs'
      )
    if follows and self.policy.lora is not None:
      raise UserError(
        f'stages.{follows[0]}.source.follow: the versions have adapters merged; remove policy.lora'
      )
    if (follows or followed) and self.phases is not None:
      raise UserError(
        f'phases: cannot be combined with {"source.follow" if follows else "Followed"} of '
        f'stages.{(follows or followed)[0]}; remove phases'
      )

  def _check_own_rollouts(self, stage: StageConfig, earlier: Sequence[StageConfig]) -> None:
    """Raises UserError if a stage cannot learn from the rollouts of the stages that it names."""
    where = f'stages.{stage.name}.source'
    whole = [
      before.name
      for before in earlier
      if isinstance(before.source, Rollouts) and before.source.selection.kind in ('all', 'mixed')
    ]
    for name in stage.source.stages:
      if name not in whole:
        raise UserError(
          f'{where}.stages: {name!r}, wanted one of {whole}, the earlier stages with Rollouts '
          "whose selection is 'all' or 'mixed'"
        )
    if self.rollout.max_steps > 1:
      raise UserError(
        f'{where}: Stored learns from trajectories of one step, but rollout.max_steps is '
        f'{self.rollout.max_steps}; use Recorded, or max_steps 1'
      )

  def _check_rewards(self) -> None:
    """Raises UserError if a stage's weights of scorers are empty or invalid, or name a scorer that
    is not configured.
    """
    names = [scorer.name for scorer in self.rewards.scorers]
    for stage in self.stages:
      if not isinstance(stage.source, Rollouts) or stage.source.rewards is None:
        continue
      where = f'stages.{stage.name}.source.rewards'
      if not stage.source.rewards:
        raise UserError(f'{where}: empty; wanted weights of {names}, or None for all of them')
      for name in stage.source.rewards:
        if name not in names:
          raise UserError(f'{where}: no scorer {name!r}; configured are {names}')
      self.rewards_of(stage.name)  # Raises UserError for invalid weights.

  def scored_by_trainer(self, stage: StageConfig) -> bool:
    """Returns whether the trainer's reward model scores rollouts of the stage."""
    source = stage.source
    return isinstance(source, Rollouts) and any(
      scorer.implementation == REWARD_MODEL
      and (not scorer.tasksets or set(scorer.tasksets) & set(source.tasksets))
      for scorer in self.rewards_of(stage.name).scorers
    )

  def _check_reward_model(self) -> None:
    """Raises UserError if the trainer's reward model is configured without its scorer, or the
    scorer without the model, or if the model is combined with incompatible settings.
    """
    scorers = [s for s in self.rewards.scorers if s.implementation == REWARD_MODEL]
    if scorers and self.reward_model is None:
      raise UserError(
        f'rewards.scorers {scorers[0].name!r}: the trainer has no reward model; set '
        'reward_model.init_from, or use kind http for a reward model that is served'
      )
    if self.reward_model is None:
      return
    stages = [stage for stage in self.stages if self.scored_by_trainer(stage)]
    if not stages:
      raise UserError(
        'reward_model: no stage with Rollouts has a scorer of kind reward_model; add '
        "ScorerConfig(name='reward_model') to rewards.scorers, or remove it"
      )
    for stage in stages:
      if stage.source.bound:
        raise UserError(
          f'reward_model: stages.{stage.name}.source.bound is {stage.source.bound}, but the '
          'trainer scores a batch when all of its rollouts are complete; set bound to 0, or serve '
          'the reward model (jaxrl serve --role=reward, scorer kind http)'
        )
      if self.rollout.partial is not None:
        raise UserError(
          'reward_model: rollout.partial is set, which generates a batch in waves; remove it, or '
          'serve the reward model (jaxrl serve --role=reward, scorer kind http)'
        )
    self._check_trained_reward_model(stages)
    for suite in self.evaluation:
      judges = [s for s in self.rewards.scorers if not s.tasksets or suite.taskset in s.tasksets]
      if judges and all(s.implementation == REWARD_MODEL for s in judges):
        raise UserError(
          f'evaluation.{suite.name}: only the reward model of the trainer scores taskset '
          f'{suite.taskset}, and it scores no evaluations; add another scorer, which '
          'stages.*.source.rewards can leave out of training, or remove the suite'
        )

  def _check_trained_reward_model(self, scored: Sequence[StageConfig]) -> None:
    """Raises UserError if `reward_model.init_from` is 'best:STAGE', or names a stage that does not
    exist, ends too late, or would train LoRA adapters.

    Args:
      scored: stages whose rollouts the reward model scores.
    """
    source, where = self.reward_model.init_from, 'reward_model.init_from'
    names = [stage.name for stage in self.stages]
    if (of_best := stage_of_best(source)) is not None:
      raise UserError(
        f'{where}: {source!r}, and no evaluation measures a reward model; name the end of the '
        f"stage: '{_OF_STAGE}{of_best}'"
      )
    if (name := self.reward_model.stage) is None:
      return
    if name not in names:
      raise UserError(f"{where}: {source!r}, wanted '{_OF_STAGE}' before one of {names}")
    for stage in scored:
      if names.index(stage.name) <= names.index(name):
        raise UserError(
          f'{where}: {source!r} ends after stages.{stage.name} begins, whose rollouts it is to '
          f'score; name a stage before {stage.name}, or leave the reward model out of '
          f'stages.{stage.name}.source.rewards'
        )
    if self.policy.lora is not None:
      raise UserError(
        f'{where}: {source!r}, and policy.lora trains adapters in all stages; remove policy.lora, '
        'or train the reward model in a run of its own'
      )

  def _check_partial(self) -> None:
    """Raises UserError if partial rollouts are combined with an option that does not support
    them.
    """
    rollout, reason = self.rollout, ''
    if rollout.engine not in ENGINES:
      reason = f'rollout.engine {rollout.engine!r}; wanted {" or ".join(ENGINES)}'
    elif rollout.max_steps > 1:
      reason = f'rollout.max_steps {rollout.max_steps}; wanted 1'
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
        elif (limits := [tokens for _, tokens in source.response_lengths]) != sorted(limits):
          reason = (
            f'{where}.response_lengths {limits}, which would cut answers that have begun; wanted '
            'ascending lengths'
          )
        elif rollout.partial.max_groups(source.groups_per_batch, source.bound) < in_hand:
          reason = (
            f'{where}.groups_per_batch times bound + 1 = {in_hand} above rollout.partial.groups; '
            'raise the latter'
          )
        elif source.selection.kind not in ('all', 'mixed'):
          reason = f"{where}.selection {source.selection.kind!r}; wanted 'all' or 'mixed'"
    if reason:
      raise UserError(f'rollout.partial: cannot be combined with {reason}')

  def sequences(self, stage: StageConfig) -> tuple[int, int]:
    """Returns (maximum number of rollouts or static rows, maximum number of expert rows) in a batch
    of a stage. Every step of a trajectory counts as a rollout.
    """
    source = stage.source
    experts = source.expert_rows if isinstance(source, Rollouts) else 0
    steps = self.rollout.max_steps if isinstance(source, Rollouts | Recorded | Followed) else 1
    return (source.sequences - experts) * steps, experts

  def check_sampling(self) -> None:
    """Raises UserError if a stage or evaluation uses sampling parameters that the engine does not
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
