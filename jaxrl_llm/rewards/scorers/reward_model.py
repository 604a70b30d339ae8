"""Scorer `reward_model`: the trainer's own reward model scores the rollouts of a batch."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_llm.rewards.api import ByTrainer, read_options


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModelOptions:
  """Options class of the scorer, which has no options. The model itself is configured in
  `reward_model`.
  """


def reward_model_scorer(**options: Any) -> ByTrainer:
  """Returns a scorer that scores with the trainer's reward model (`reward_model`), once the
  rollouts of a batch are complete. The options are `RewardModelOptions`.
  """
  read_options(RewardModelOptions, options, 'reward_model')
  return ByTrainer()
