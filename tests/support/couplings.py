"""Coupling table: jobs that cover every pair of levels of these factors at least once."""

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
"""Shape of the policy of one layer."""
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
"""Pairs that a configuration may not have, with what the refusal says."""
REFUSED_TOGETHER = {('partial', True), ('algorithm', 'ppo'), ('workflow', 'two_turns')}
"""Levels that a configuration may have by twos."""

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
  """Jobs without a refused pair that cover all other pairs: each time the one that covers the most
  new pairs, the first of equals.
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
