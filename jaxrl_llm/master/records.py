"""What a finished step is written down as: its metrics and its rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxrl_llm.batching.plan import StepPlan
from jaxrl_llm.experience.sample import Finish
from jaxrl_llm.master.explorer import Scored
from jaxrl_llm.master.mismatch import Pair
from jaxrl_llm.master.trainer import Batch, Updated
from jaxrl_llm.runtime.metrics import Mean, Metric, Sum, mean_of, spread


def batch_metrics(batch: Batch, taken: Mapping[str, Scored]) -> dict[str, Metric]:
  """Lengths, rewards and packing of a closed batch; all of it a function of the plan and its samples."""
  plan = batch.plan
  lengths = [row.length - row.prompt_len for row in plan.rows]
  metrics = {
    **spread('response_length', lengths),
    **spread('prompt_length', [row.prompt_len for row in plan.rows]),
    'response_length/clip_ratio': mean_of(row.truncated for row in plan.rows),
    'perf/total_num_tokens': Sum(sum(row.length for row in plan.rows)),
    'perf/packing_utilisation': mean_of(step.packing.utilisation for step in batch.steps),
  }
  if taken:
    rewards = [row.reward for row in plan.rows if row.reward is not None]
    metrics |= spread('critic/score', rewards) | spread('critic/rewards', rewards)
    metrics |= {'staleness/max': mean_of([max(plan.step - row.version_step for row in plan.rows)])}
    metrics |= _advantage_metrics(batch, lengths) | _scorer_metrics(taken)
    # Most left before the batch was closed, where the algorithm does not see them.
    unscorable = len(plan.rows) - len(rewards) + plan.counts.get('dropped/unscorable', 0)
    metrics |= {'num_unscorable': Sum(unscorable), **{f'run/{name}': Sum(n) for name, n in plan.counts.items()}}
  return metrics


def _advantage_metrics(batch: Batch, lengths: list[int]) -> dict[str, Metric]:
  """Per trained token, as the field counts them."""
  rows = [i for i in range(len(lengths)) if batch.annotation.in_loss[i]]
  if not rows:
    return {}
  values = batch.annotation.advantages[rows]
  weights = np.array([lengths[i] for i in rows], np.float64)
  metrics = spread('critic/advantages', values.tolist())
  return metrics | {'critic/advantages/mean': Mean(float((values * weights).sum()), float(weights.sum()))}


def _scorer_metrics(taken: Mapping[str, Scored]) -> dict[str, Metric]:
  by_part: dict[str, list[float]] = {}
  for member in taken.values():
    for name, value in member.reward.parts.items():
      by_part.setdefault(name, []).append(value)
  return {
    (f'rewards/{name}' if '/' in name else f'rewards/{name}/mean'): mean_of(values)
    for name, values in sorted(by_part.items())
  }


def logprob_pairs(batch: Batch, updated: Updated, taken: Mapping[str, Scored]) -> list[Pair]:
  """Of each sample's trained, sampled tokens: the logprobs before the batch, the trainer's and the sampler's."""
  pairs = []
  for i, row in enumerate(batch.plan.rows):
    sample = taken[row.uid].sample
    tokens = sample.loss_mask & sample.sampled
    pairs.append((updated.logprobs[i][tokens], sample.behaviour_logprobs[tokens]))
  return pairs


def rollout_rows(
  batch: Batch, updated: Updated, taken: Mapping[str, Scored], token_text: Callable[[int], str]
) -> list[dict[str, Any]]:
  """One row per trained sample for `rollouts/`; arrays are per completion token."""
  return [
    _rollout_row(batch.plan, i, float(batch.annotation.advantages[i]), updated.logprobs[i], taken[row.uid], token_text)
    for i, row in enumerate(batch.plan.rows)
  ]


def _rollout_row(
  plan: StepPlan, i: int, advantage: float, logprobs: np.ndarray, scored: Scored, token_text: Callable[[int], str]
) -> dict[str, Any]:
  sample, after = scored.sample, slice(scored.sample.prompt_len, None)
  token_ids = sample.tokens[after]
  return {
    'uid': sample.uid,
    'task_id': sample.task_id,
    'group_id': sample.group_id,
    'sample_index': sample.sample_index,
    'taskset': sample.taskset,
    'prompt': scored.task.prompt[-1]['content'],
    'completion': scored.completion,
    'truth': scored.task.truth,
    'tokens': [token_text(int(t)) for t in token_ids],
    'token_ids': token_ids,
    # Null where no sampler drew the token: 0 would read as a certain one.
    'behaviour_logprobs': np.where(sample.sampled, sample.behaviour_logprobs, np.nan)[after],
    'trainer_logprobs': logprobs[after],
    'advantages': advantage * sample.loss_mask[after],
    'reward': scored.reward.value,
    'scores': {
      score.scorer: {'value': score.value, 'parts': dict(score.parts), 'status': str(score.status)}
      for score in scored.scores
    },
    'finish_reason': str(Finish(sample.finish_reason)),
    'version_step': plan.rows[i].version_step,
  }
