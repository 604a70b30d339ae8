"""The configuration of rollouts: engine, lengths, workflow and explorers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.config.own import named_pair
from jaxrl_llm.config.values import check_at_least, from_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.master.exploring.partial import PartialConfig
from jaxrl_llm.master.mismatch import MismatchConfig
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.auxiliary import AuxiliaryConfig
from jaxrl_llm.rollout.catalogue import ENGINES
from jaxrl_llm.rollout.embedded.engine import EmbeddedConfig
from jaxrl_llm.rollout.engine import EngineSpec
from jaxrl_llm.rollout.explorers.crew import ExplorersConfig
from jaxrl_llm.rollout.repetition import RepetitionDetection
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.workflow import WorkflowConfig


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
  """Explorer processes that run the workflow. If None, the trainer's process runs the workflow."""
  auxiliary: tuple[AuxiliaryConfig, ...] = ()
  """Models besides the policy that workflows may query."""
  partial: PartialConfig | None = None
  """Partial rollouts: a token budget that spreads the generation of long rollouts over several
  batches. If None, each rollout is generated completely for one batch.
  """
  repetition_detection: RepetitionDetection | None = None
  """Rule that ends a training rollout early when the rollout repeats itself. If None, repetition is
  ignored. In evaluations, repetition is always ignored.
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
    if self.is_direct:
      self._check_direct(self.explorers)
    if ':' not in self.engine:  # A custom engine is imported only when a run needs it.
      named_pair(self.engine, 'engine', ENGINES)
      if self.engine_options:
        raise UserError(
          'rollout.engine_options: apply only to a custom engine, and rollout.engine is '
          f'{self.engine!r}; set rollout.{self.engine} instead, and leave engine_options empty'
        )

  def _check_direct(self, explorers: ExplorersConfig) -> None:
    """Raises UserError if explorers cannot fetch completions from the servers, or if they have the
    servers' token, with which they could sign completions.
    """
    where, vllm, listen = 'rollout.explorers.direct', self.vllm_servers, explorers.listen
    if vllm is None or not vllm.attached:
      raise UserError(
        f'{where}: True, but there are no servers whose fronts sign; set it to False, or set '
        'rollout.engine=vllm and rollout.vllm.addresses of servers of jaxrl serve --host'
      )
    local = next((a for a in vllm.addresses if a.startswith('unix:')), None)
    if local is not None or (vllm.addresses and vllm.key_file is None):
      raise UserError(
        f'{where}: True, but rollout.vllm.addresses has {local or "servers without a token"}; '
        'start the servers with jaxrl serve --host, and name the file with their token in '
        'rollout.vllm.key_file'
      )
    registered = listen is not None and listen.token_file is None
    if registered and (vllm.discover is not None or vllm.key_file is None):
      raise UserError(
        f'{where}: True, but explorers have the key of the registry, with which they could also '
        'sign; give them another token with rollout.explorers.listen.token_file'
      )

  @property
  def is_direct(self) -> bool:
    """Whether explorers fetch completions from servers themselves."""
    return self.explorers is not None and self.explorers.direct

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
