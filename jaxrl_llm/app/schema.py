"""The root configuration of a run. Most of its parts are defined next to the code that reads them.

The name of a batch size states its unit (groups, sequences or chunks). Derived numbers are not
configured: they are computed, and `--dry_run` prints them. Stages, the sources of their batches and
rollouts are defined in `app.stage_config`, `app.sources` and `app.rollout_config`; this module
exports them too, because they are part of the configuration.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxrl_llm.app.rollout_config import RolloutConfig as RolloutConfig
from jaxrl_llm.app.sources import Demonstrations as Demonstrations
from jaxrl_llm.app.sources import Examples as Examples
from jaxrl_llm.app.sources import ExpertsConfig as ExpertsConfig
from jaxrl_llm.app.sources import Followed, Recorded, Rollouts
from jaxrl_llm.app.sources import Pairs as Pairs
from jaxrl_llm.app.sources import PastConfig as PastConfig
from jaxrl_llm.app.stage_config import BASE as BASE
from jaxrl_llm.app.stage_config import AlgorithmConfig as AlgorithmConfig
from jaxrl_llm.app.stage_config import CriticConfig as CriticConfig
from jaxrl_llm.app.stage_config import StageConfig as StageConfig
from jaxrl_llm.app.stage_config import stage_of_best as stage_of_best
from jaxrl_llm.config.values import check_at_least
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.registry import RegistryConfig
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.master.evaluation import SuiteConfig
from jaxrl_llm.master.phases import PhasesConfig
from jaxrl_llm.models.spec import LoraConfig
from jaxrl_llm.parallel.coordination import CoordinationConfig
from jaxrl_llm.parallel.mesh import MeshConfig
from jaxrl_llm.rewards.api import DISCOVERING, REWARD_MODEL, RewardsConfig
from jaxrl_llm.rollout.catalogue import ENGINES
from jaxrl_llm.runtime.archive import ArchiveConfig
from jaxrl_llm.runtime.checkpoint import CheckpointConfig
from jaxrl_llm.runtime.log.config import LoggingConfig
from jaxrl_llm.tasks.examples import ExamplesConfig
from jaxrl_llm.tasks.preferences import PreferencesConfig
from jaxrl_llm.tasks.taskset import TasksetConfig
from jaxrl_llm.tasks.tokenizer import TokenizerConfig

AUTO = 'auto'
"""Value of fields that the program fills in when a run starts (`app.composition.automatic`)."""


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
  dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'
  """Data type of activations and matrix products. 'auto' is float32 on CPUs and for models of fewer
  than 50 million parameters, and bfloat16 otherwise.
  """
  param_dtype: Literal['float32', 'bfloat16'] = 'float32'
  """Data type of the parameters; adapters are always float32."""
  reduce_dtype: Literal['param_dtype', 'bfloat16'] = 'param_dtype'
  """Data type in which gradients of projections and MLPs are summed over the devices. If parameters
  are float32, 'bfloat16' halves the bytes that devices exchange for these gradients, and rounds
  each device's part of the sum once. Micro-batches are always added in `param_dtype`.
  """
  scan_layers: bool | Literal['auto'] = 'auto'
  """Whether all layers are computed by a scan of one compiled layer. This compiles faster, but runs
  10 to 15 % slower on a CPU. 'auto' is False on CPUs and for models of fewer than 50 million
  parameters, and True otherwise.
  """
  remat: Literal['auto', 'none', 'full', 'dots', 'offload'] = 'auto'
  """Rematerialization: 'none' keeps all activations for the backward pass; the other values keep
  some activations of each layer and recompute the rest (see `ModelOptions.remat`). On a CPU,
  recomputation saves memory only with `scan_layers`. With 'auto', the memory plan chooses the value
  (`learner.memory_bytes`).
  """
  attention: Literal['auto', 'masked', 'blockwise', 'splash', 'cudnn', 'tokamax', 'pallas_gpu'] = (
    'auto'
  )
  """Attention implementation in training: 'masked' materializes all scores, 'blockwise' one block
  at a time; 'splash' is a TPU kernel; 'cudnn', 'tokamax' (if that package is installed) and
  'pallas_gpu' (JAX's Triton kernel) are GPU kernels. 'auto' chooses by platform and length. On
  GPUs, it is the first of these kernels that passes a check when the run starts, else 'blockwise'.
  """
  sequence_shards: Literal['auto', 'balanced', 'consecutive'] = 'auto'
  """Tokens of a chunk that each device holds if `learner.mesh.sequence` is above 1. With
  'consecutive', they follow one another, and the last device computes most of the attention. With
  'balanced', they are an early and a late piece of the chunk, if attention skips unseen blocks
  ('blockwise' and 'splash') and the pieces are equally long. 'auto' is 'balanced'.
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
class PreferenceSource(PreferencesConfig):
  """Preferences of a run, which are read from a file or dataset, or made from a taskset with
  templates (`source='taskset:<name>'`).
  """

  wrong: tuple[str, ...] = ()
  """Templates of rejected answers; each task uses one of them. Valid only if the source is a
  taskset. `chosen` is then the template of the preferred answer.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerConfig:
  """Configuration of the updates: device mesh, layout of batches, memory and optimizer."""

  mesh: MeshConfig = MeshConfig()
  optimizer: OptimizerConfig | None = None
  """Optimizer for stages that do not set one. If None, each stage must set its own."""
  chunk_len: int | None = None
  """Length of a packed chunk in tokens. If None, it is the length of the longest possible sequence,
  rounded up to a multiple of 8 and of `mesh.sequence`. If prefixes are shared and
  `policy.attention` is not 'masked', chunks may be longer, so that more sequences of a group fit
  into a chunk. A micro-batch then has fewer chunks, but not more tokens.
  """
  chunks_per_rank: int | Literal['auto'] = 'auto'
  """Number of chunks that each data-parallel rank has in a micro-batch. With fewer chunks,
  gradients are accumulated over more micro-batches. With 'auto', the memory plan chooses the number
  (`memory_bytes`).
  """
  split_remainder: bool = False
  """Whether the last chunks of an optimizer step, if they do not fill a micro-batch, are computed
  one chunk per rank at a time, instead of as a micro-batch with empty chunks. Less padding is then
  computed, but each program is larger and takes longer to compile. The results are the same up to
  rounding. The option has no effect on preference pairs.
  """
  memory_bytes: int | None = None
  """Memory of a device in bytes that the memory plan may use. The plan chooses the values of
  `policy.remat`, `chunks_per_rank`, `optimizer.offload` and `logits_budget_bytes` where these are
  'auto': the fastest combination that fits. If None, the plan may use the whole memory of the
  device, but no plan is made on CPUs and for models of fewer than 50 million parameters. There,
  'auto' means no rematerialization, 8 chunks, moments on the devices, and 256 MiB of logits.
  """
  share_prefixes: bool = True
  """Whether a prefix that several sequences of a group or pair have in common, such as their
  prompt, is computed once instead of once per sequence. The results are the same up to rounding.
  The option has an effect only if attention is 'masked', 'blockwise', 'cudnn' or 'tokamax' (see
  `policy.attention`).
  """
  logits_budget_bytes: int | Literal['auto'] = 'auto'
  """Maximum size of the float32 logits in bytes per rank. To stay below this size, logits are
  computed for part of the tokens at a time, and each part reads and writes the gradient of the
  whole head. With 'auto', the memory plan chooses the size (`memory_bytes`). The largest one is a
  sixteenth of the device's memory (or of `memory_bytes`), but at least 256 MiB and at most 2 GiB.
  """

  def __post_init__(self):
    check_at_least('learner.', self, chunk_len=1, memory_bytes=1)
    for name in ('chunks_per_rank', 'logits_budget_bytes'):
      if getattr(self, name) != AUTO:
        check_at_least('learner.', self, **{name: 1})


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
  archive: ArchiveConfig | None = None
  """Copies of the commits in an object store, from which a fresh host can resume the run. If None,
  commits exist in the run directory only.
  """
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
    if phases.engine == 'sleep' and not vllm.attached and not vllm.option('enable_sleep_mode'):
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
        elif (
          not source.bound
          and rollout.engine == 'vllm'
          and (least := rollout.vllm.least_length) is not None
        ):
          reason = (
            f'{where}.bound 0 and servers for sequences of {least} tokens (rollout.vllm.lengths or '
            'min_length); wanted none, or a bound above 0'
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
  """Returns the names of the tasksets that a stage trains on, including the tasksets of its
  experts.
  """
  experts = stage.source.experts if isinstance(stage.source, Rollouts) else None
  return (*stage.source.tasksets, *(experts.tasksets if experts is not None else ()))
