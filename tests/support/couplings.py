"""Jobs that cover every pair of levels of several factors at least once."""

from __future__ import annotations

import itertools
from typing import Any

MODEL = dict(
  hidden_size=64,
  intermediate_size=96,
  num_hidden_layers=1,
  num_attention_heads=2,
  num_key_value_heads=1,
  head_dim=32,
  max_position_embeddings=512,
  tie_word_embeddings=False,
  rope_theta=1e4,
)
"""Shape of a policy with one layer."""
FACTORS: dict[str, tuple[Any, ...]] = {
  'engine': ('embedded', 'vllm'),
  'bound': (0, 2),
  'explorers': (False, True),
  'partial': (False, True),
  'replay': (False, True),
  'lora': (False, True),
  'algorithm': ('grpo', 'ppo', 'mix'),
  'workflow': ('single_turn', 'two_turns'),
  'processes': (1, 2),
  'service': (False, True),
}
REFUSED = {
  (('partial', True), ('replay', True)): 'stages.grpo.source.past; remove it',
}
"""Pairs that configurations refuse, each with a part of the error message."""
REFUSED_TOGETHER = {('partial', True), ('algorithm', 'ppo'), ('workflow', 'two_turns')}
"""Levels that configurations refuse if all three are set. Any two of them are accepted."""

Job = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]
DEFAULT: Job = {name: levels[0] for name, levels in FACTORS.items()}


def pairs_of(job: Job) -> set[Pair]:
  return set(itertools.combinations(job.items(), 2))


def all_pairs() -> set[Pair]:
  levels = [[(name, level) for level in of] for name, of in FACTORS.items()]
  return {
    pair for left, right in itertools.combinations(levels, 2)
    for pair in itertools.product(left, right)
  }  # fmt: skip


def jobs() -> list[Job]:
  """Returns jobs without a refused pair that cover all other pairs. Each time, the job that covers
  the most new pairs is chosen; of equals, the first.
  """
  candidates = [dict(zip(FACTORS, levels)) for levels in itertools.product(*FACTORS.values())]
  covers = [
    (job, pairs)
    for job in candidates
    if not (pairs := pairs_of(job)) & REFUSED.keys() and not job.items() >= REFUSED_TOGETHER
  ]
  left, chosen = all_pairs() - REFUSED.keys(), []
  while left:
    job, pairs = max(covers, key=lambda each: len(each[1] & left))
    chosen.append(job)
    left -= pairs
  return chosen
