"""Public names, for users' programs, configurations, scorers, workflows, engines and algorithms.

Names are imported on first use, because a scorer's worker process needs `Attempt` but not JAX.
`api.pyi` shows them to type checkers.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = (
  # Running from Python.
  ('jaxrl_llm.app.training', 'TrainResult train load_config'),
  # Configurations
  (
    'jaxrl_llm.app.schema',
    'AlgorithmConfig Config CriticConfig LearnerConfig PolicyConfig PreferenceSource '
    'RewardModelConfig RolloutConfig StageConfig',
  ),
  (
    'jaxrl_llm.app.sources',
    'Demonstrations Examples ExpertsConfig FollowConfig Followed Pairs PastConfig Recorded '
    'Rollouts Stored',
  ),
  ('jaxrl_llm.core.net.token_server', 'FrontConfig'),
  ('jaxrl_llm.core.net.registry', 'RegistryConfig'),
  ('jaxrl_llm.learner.optimizer', 'OptimizerConfig'),
  ('jaxrl_llm.master.evaluation', 'SuiteConfig'),
  ('jaxrl_llm.master.exploring.limits', 'TaskLimits'),
  ('jaxrl_llm.master.exploring.partial', 'PartialConfig'),
  ('jaxrl_llm.master.exploring.processors', 'ProcessorConfig'),
  ('jaxrl_llm.master.exploring.selection', 'SelectionConfig'),
  ('jaxrl_llm.models.spec', 'LoraConfig'),
  ('jaxrl_llm.parallel.coordination', 'CoordinationConfig'),
  ('jaxrl_llm.parallel.mesh', 'MeshConfig'),
  ('jaxrl_llm.replay.draw', 'DrawConfig'),
  ('jaxrl_llm.rewards.api', 'RewardsConfig ScorerConfig'),
  ('jaxrl_llm.rollout.auxiliary', 'AuxiliaryConfig'),
  ('jaxrl_llm.rollout.embedded.engine', 'EmbeddedConfig'),
  ('jaxrl_llm.rollout.embedded.placement', 'EmbeddedMesh'),
  ('jaxrl_llm.rollout.embedded.speculation', 'SpeculationConfig'),
  ('jaxrl_llm.rollout.explorers.crew', 'ExplorersConfig'),
  ('jaxrl_llm.rollout.repetition', 'RepetitionDetection'),
  ('jaxrl_llm.rollout.vllm.config', 'VllmConfig'),
  ('jaxrl_llm.rollout.workflow', 'WorkflowConfig'),
  ('jaxrl_llm.runtime.checkpoint', 'CheckpointConfig'),
  ('jaxrl_llm.runtime.log.config', 'LoggingConfig LogWriterConfig WandbConfig'),
  ('jaxrl_llm.tasks.examples', 'ExamplesConfig'),
  ('jaxrl_llm.tasks.preferences', 'PreferencesConfig'),
  ('jaxrl_llm.tasks.sampler', 'LaterWeights SamplerConfig'),
  ('jaxrl_llm.tasks.taskset', 'Shot TaskProcessorConfig TasksetConfig'),
  ('jaxrl_llm.tasks.tokenizer', 'TokenizerConfig'),
  # Sweeps
  ('jaxrl_llm.app.sweeps.sweep', 'BaseRun MedianRule SuccessiveHalving Sweep Uniform'),
  # Scorers
  ('jaxrl_llm.rewards.api', 'Attempt Awaited PerGroup Reward Scorer Verdict'),
  ('jaxrl_llm.core.records.score', 'Score'),
  # Workflows
  ('jaxrl_llm.rollout.workflow', 'Rollout SingleTurn Workflow completion_text'),
  ('jaxrl_llm.rollout.episodes.episode', 'Episode EpisodeOver OutOfSteps OutOfTokens Turn'),
  ('jaxrl_llm.rollout.episodes.environment', 'Environment Step'),
  ('jaxrl_llm.rollout.episodes.tool_calls', 'ToolCall'),
  ('jaxrl_llm.rollout.episodes.tools', 'Tool'),
  ('jaxrl_llm.rollout.episodes.workflow', 'Episodes'),
  ('jaxrl_llm.rollout.api', 'Completion Request Sampling'),
  ('jaxrl_llm.rollout.hub', 'Hub'),
  ('jaxrl_llm.core.records.sample', 'Finish Role Sample Segment'),
  ('jaxrl_llm.core.records.task', 'Message Task'),
  ('jaxrl_llm.tasks.tokenizer', 'Tokenizer'),
  # Engines
  ('jaxrl_llm.rollout.api', 'Engine Probe Releasable Weights'),
  ('jaxrl_llm.rollout.engine', 'EngineSetting EngineSpec'),
  ('jaxrl_llm.rollout.embedded.spec', 'embedded_engine'),
  ('jaxrl_llm.rollout.vllm.spec', 'vllm_engine'),
  ('jaxrl_llm.core.types', 'Version'),
  # Log writers
  ('jaxrl_llm.runtime.log.api', 'LogRow LogRun LogWriter'),
  # Algorithms
  ('jaxrl_llm.learner.algorithm', 'Algorithm Annotation Closed Setting term'),
  ('jaxrl_llm.learner.policy_gradient', 'policy_gradient'),
  ('jaxrl_llm.learner.policy_options', 'PolicyGradientConfig'),
  ('jaxrl_llm.objectives.policy', 'clipped_surrogate sequence_log_ratio token_log_ratio'),
  ('jaxrl_llm.objectives.surrogates', 'SurrogateTokens TokenLoss'),
  ('jaxrl_llm.ops.reduce', 'Aggregation'),
  ('jaxrl_llm.batching.plan', 'Row'),
  # Exceptions
  ('jaxrl_llm.core.errors', 'RunError UserError'),
)
"""(module, names imported from it, separated by spaces) pairs, grouped by use."""

_REPLACED = {
  'DemonstrationsConfig': (
    'Demonstrations, as the source of a stage, or ExpertsConfig, which has its fields'
  ),
  'PairsConfig': 'Pairs, as the source of a stage',
  'RecordedConfig': 'Recorded, as the source of a stage',
}
"""Former names and their replacements."""

_MODULES = {name: module for module, names in _NAMES for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
  # A former name raises an ImportError, because the text of an AttributeError would be lost in
  # `from jaxrl_llm.api import …`.
  if name in _REPLACED:
    raise ImportError(f'{name}: replaced by {_REPLACED[name]}')
  if name not in _MODULES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  value = getattr(importlib.import_module(_MODULES[name]), name)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return __all__
