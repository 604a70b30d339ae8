"""Catalogue of algorithms: maps each algorithm's name to its options class and its factory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.learner.algorithm import Algorithm, Setting
from jaxrl_llm.learner.mix import MixConfig, mix
from jaxrl_llm.learner.opmd import OpmdConfig, opmd
from jaxrl_llm.learner.policy_gradient import policy_gradient
from jaxrl_llm.learner.policy_options import (
  CispoConfig,
  DapoConfig,
  DrGrpoConfig,
  GrpoConfig,
  GspoConfig,
  PpoConfig,
  ReinforcePlusPlusBaselineConfig,
  ReinforcePlusPlusConfig,
  RlooConfig,
  SapoConfig,
)
from jaxrl_llm.learner.preference import DpoConfig, RewardModelConfig, dpo, reward_model
from jaxrl_llm.learner.supervised import SftConfig, sft

ALGORITHMS: Mapping[str, tuple[type, Callable[[Any, Setting], Algorithm]]] = {
  'sft': (SftConfig, sft),
  'grpo': (GrpoConfig, policy_gradient),
  'dr_grpo': (DrGrpoConfig, policy_gradient),
  'dapo': (DapoConfig, policy_gradient),
  'gspo': (GspoConfig, policy_gradient),
  'cispo': (CispoConfig, policy_gradient),
  'sapo': (SapoConfig, policy_gradient),
  'rloo': (RlooConfig, policy_gradient),
  'reinforce_plus_plus': (ReinforcePlusPlusConfig, policy_gradient),
  'reinforce_plus_plus_baseline': (ReinforcePlusPlusBaselineConfig, policy_gradient),
  'ppo': (PpoConfig, policy_gradient),
  'opmd': (OpmdConfig, opmd),
  'mix': (MixConfig, mix),
  'dpo': (DpoConfig, dpo),
  'reward_model': (RewardModelConfig, reward_model),
}
PAIRWISE = frozenset({'dpo', 'reward_model'})
"""Names of the algorithms that learn from preference pairs."""
OFFLINE = PAIRWISE | {'sft'}
"""Names of the algorithms that can learn from static data alone."""
