"""The root configuration. Every part stands beside the code that reads it; here they are only put together.

Batch sizes say their unit: tasks, sequences or tokens. Numbers that follow from others are computed and printed
(`--dry_run`), never copied by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.master.evaluation import SuiteConfig
from jaxrl_llm.master.mismatch import MismatchConfig
from jaxrl_llm.parallel.mesh import MeshConfig
from jaxrl_llm.rewards.api import RewardsConfig
from jaxrl_llm.rollout.embedded import EmbeddedConfig
from jaxrl_llm.rollout.server import VllmConfig
from jaxrl_llm.runtime.checkpoint import CheckpointConfig
from jaxrl_llm.tasks.taskset import DemonstrationsConfig, TasksetConfig
from jaxrl_llm.tasks.tokenizer import TokenizerConfig


def _at_least(where: str, config: Any, **bounds: int) -> None:
  """Refuses numbers below their bounds, by field; None is no number."""
  for name, least in bounds.items():
    value = getattr(config, name)
    if value is not None and value < least:
      raise UserError(f'{where}{name}: {value}, wanted at least {least}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig:
  """The model that is trained."""

  init_from: str | None = None
  """Hugging Face directory, hub id, or a run directory (its `hf/`); None = random weights of `family` and `model`."""
  family: str = 'qwen2'
  """For random weights."""
  model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """For random weights: fields of ModelSpec (hidden_size, num_hidden_layers, ...) that differ from the tiny default."""
  tokenizer: TokenizerConfig = TokenizerConfig()
  """For random weights; a checkpoint brings its own."""
  dtype: Literal['float32', 'bfloat16'] = 'float32'
  """Of computation."""
  param_dtype: Literal['float32', 'bfloat16'] = 'float32'
  """Of the trained parameters."""
  scan_layers: bool = False
  """One compiled layer for all: compiles faster, runs 10 to 15 % slower on a CPU."""
  remat: Literal['none', 'full'] = 'none'
  """Recompute activations in the backward pass."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
  name: str
  """One of the dictionary in app/build.py (`launch/train.py --list`)."""
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Fields of the algorithm's own configuration."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageConfig:
  """One stage: an algorithm, its tasks, its steps."""

  name: str
  algorithm: AlgorithmConfig
  steps: int
  """Batches."""
  tasksets: tuple[str, ...]
  """Names of configured tasksets."""
  optimizer: OptimizerConfig | None = None
  """None = `learner.optimizer`."""
  keep_optimizer: bool = False
  """Go on with the state of the stage before; else it starts afresh."""
  demonstrations: DemonstrationsConfig | None = None
  """Offline stages (sft): how the tasks' demonstrations are written."""
  sequences_per_batch: int = 64
  """Offline stages: sequences of a batch."""
  groups_per_batch: int = 16
  """Rollout stages: tasks of a batch."""
  group_size: int = 8
  """Rollout stages: samples of a task."""
  temperature: float = 1.0
  """Rollout stages. Training rollouts are unfiltered (top_p 1, no top_k): the trainer compares whole distributions."""
  minibatches: int = 1
  """Optimizer steps that a batch is dealt into."""
  epochs: int = 1
  """Times that a batch is gone through."""
  order: Literal['shuffled', 'sequential'] = 'shuffled'
  """Of the tasks."""
  evaluate_every: int | None = None
  """Steps; None = only after the stage."""
  max_dropped_groups: int = 100
  """Groups without a scorable sample, while one batch is collected; one more ends the run."""

  def __post_init__(self):
    batch = dict(sequences_per_batch=1, groups_per_batch=1, group_size=1, minibatches=1, epochs=1)
    _at_least(f'stages.{self.name}.', self, steps=1, evaluate_every=1, max_dropped_groups=0, **batch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
  engine: Literal['embedded', 'vllm'] = 'embedded'
  """'embedded': a JAX sampler in the trainer's process; 'vllm': vLLM servers, see `vllm`."""
  max_prompt_length: int
  """Tokens; tasks with longer prompts are skipped and counted."""
  max_response_length: int
  """Tokens."""
  embedded: EmbeddedConfig = EmbeddedConfig()
  vllm: VllmConfig = VllmConfig()
  collect_deadline_s: float = 3600.0
  """Longest wait for a batch of rollouts, seconds."""
  mismatch: MismatchConfig = MismatchConfig()
  """From which difference between the trainer's logprobs and the sampler's on a step is warned about."""

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
  mesh: MeshConfig = MeshConfig()
  optimizer: OptimizerConfig | None = None
  """For stages that bring none of their own."""
  chunk_len: int | None = None
  """Tokens of a packed chunk; None = the longest sequence there can be, rounded up to a multiple of 8."""
  chunks_per_rank: int = 8
  """Chunks of a micro-batch on each data-parallel rank."""
  logits_budget_bytes: int = 256 << 20
  """Per rank: logits are computed in token chunks that stay below it."""

  def __post_init__(self):
    _at_least('learner.', self, chunk_len=1, chunks_per_rank=1, logits_budget_bytes=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """A run."""

  name: str
  seed: int = 0
  policy: PolicyConfig
  tasksets: tuple[TasksetConfig, ...]
  rewards: RewardsConfig
  rollout: RolloutConfig
  learner: LearnerConfig
  stages: tuple[StageConfig, ...]
  evaluation: tuple[SuiteConfig, ...] = ()
  checkpoint: CheckpointConfig = CheckpointConfig()
  compilation_cache: str | None = None
  """Directory of JAX's persistent compilation cache; None = none."""

  def __post_init__(self):
    if not self.stages:
      raise UserError('stages: empty, wanted at least one')
    for part in ('tasksets', 'stages', 'evaluation'):
      names = [item.name for item in getattr(self, part)]
      for name in names:
        if names.count(name) > 1:
          raise UserError(f'{part}: {names.count(name)} are called {name!r}; give each its own name')
    for suite in self.evaluation:
      embedded = self.rollout.engine == 'embedded'
      if embedded and suite.samples and suite.sampling.filtered and not self.rollout.embedded.filters:
        raise UserError(f'evaluation.{suite.name}: top_p or top_k wants rollout.embedded.filters, which is off')
