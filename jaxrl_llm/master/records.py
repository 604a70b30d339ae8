"""Records of a finished step: its metrics and its rollout rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxrl_llm.batching.plan import Row
from jaxrl_llm.core.records.sample import Finish, Role, Sample
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.master.mismatch import (
  OVER_BUDGET,
  MismatchConfig,
  Pair,
  mismatch_metrics,
  over_budget,
)
from jaxrl_llm.master.trainer import Batch, Updated
from jaxrl_llm.runtime.metrics import Mean, Metric, Sum, mean_of, resolve, spread


def step_metrics(
  batch: Batch, updated: Updated, taken: Mapping[str, Experience], budgets: MismatchConfig
) -> tuple[dict[str, float], dict[str, str]]:
  """Returns the step's plan, sample and policy metrics (no timings or host metrics), and its
  mismatch warnings.

  There is one warning for each budget that the mismatch of fresh rollouts exceeds, keyed by budget
  name.
  """
  row, exceeded = resolve(updated.metrics | batch_metrics(batch, taken)), {}
  if taken:
    row |= resolve(mismatch_metrics(logprob_pairs(batch, updated, taken)))
    if fresh := resolve(mismatch_metrics(logprob_pairs(batch, updated, taken, fresh=True))):
      exceeded = over_budget(budgets, fresh)
      row[OVER_BUDGET] = float(bool(exceeded))
  return row, exceeded


def batch_metrics(batch: Batch, taken: Mapping[str, Experience]) -> dict[str, Metric]:
  """Length, reward and packing metrics of a closed batch; a function of plan and samples."""
  plan = batch.plan
  rows = [row for row in plan.rows if row.uid in taken] if taken else list(plan.rows)
  lengths = [row.length - row.prompt_len for row in rows]
  metrics = {
    **spread('response_length', lengths),
    **spread('prompt_length', [row.prompt_len for row in rows]),
    'response_length/clip_ratio': mean_of(row.truncated for row in rows),
    'perf/total_num_tokens': Sum(sum(row.length for row in plan.rows)),
  }
  if batch.steps:
    metrics['perf/packing_utilisation'] = mean_of(step.packing.utilisation for step in batch.steps)
  if taken:
    scores = [row.reward for row in rows if row.reward is not None]
    shaped = batch.annotation.rewards
    rewards = scores if shaped is None else [reward for reward in shaped if reward is not None]
    samples = [taken[row.uid].sample for row in rows]
    metrics |= spread('num_turns', [_turns(sample) for sample in samples])
    metrics['response/aborted_ratio'] = mean_of(
      sample.finish_reason == Finish.ABORT for sample in samples
    )
    metrics |= spread('critic/score', scores) | spread('critic/rewards', rewards)
    versions = [row.version_step for row in rows if row.version_step is not None]
    metrics |= spread('staleness', [plan.step - version for version in versions])
    metrics |= _advantage_metrics(batch) | _scorer_metrics(taken)
    # Most unscorable samples were dropped before the batch was closed, so the algorithm never sees
    # them.
    unscorable = len(rows) - len(scores) + plan.counts.get('dropped/unscorable', 0)
    metrics |= {
      'num_unscorable': Sum(unscorable),
      **{f'run/{name}': Sum(n) for name, n in plan.counts.items()},
    }
  return metrics


def _turns(sample: Sample) -> int:
  policy = sample.role == Role.POLICY
  return int(np.count_nonzero(policy[1:] & ~policy[:-1]))


def _advantage_metrics(batch: Batch) -> dict[str, Metric]:
  """Advantage metrics: mean per trained token, as is customary; extremes over all tokens."""
  values, weights = [], []
  for row, advantage, in_loss in zip(
    batch.plan.rows, batch.annotation.advantages, batch.annotation.in_loss
  ):
    if in_loss and not row.is_expert:
      advantages = np.atleast_1d(np.asarray(advantage, np.float64))
      values.append(advantages if len(advantages) == 1 else advantages[row.prompt_len :])
      weights.append((row.length - row.prompt_len) / len(values[-1]))
  if not values:
    return {}
  metrics = spread('critic/advantages', np.concatenate(values).tolist())
  total = math.fsum(weight * float(advantages.sum()) for advantages, weight in zip(values, weights))
  return metrics | {
    'critic/advantages/mean': Mean(
      total, math.fsum(w * len(advantages) for advantages, w in zip(values, weights))
    )
  }


def _scorer_metrics(taken: Mapping[str, Experience]) -> dict[str, Metric]:
  by_part: dict[str, list[float]] = {}
  for member in taken.values():
    for name, value in member.reward.parts.items():
      by_part.setdefault(name, []).append(value)
  return {
    (f'rewards/{name}' if '/' in name else f'rewards/{name}/mean'): mean_of(values)
    for name, values in sorted(by_part.items())
  }


def logprob_pairs(
  batch: Batch, updated: Updated, taken: Mapping[str, Experience], *, fresh: bool = False
) -> list[Pair]:
  """Returns the logprobs of each rollout's trained, sampled tokens: (trainer's, sampler's).

  The trainer's logprobs are those before the batch. Omits rows whose logprobs were computed after
  an update of the batch.

  Args:
    fresh: whether to keep only rollouts of the policy that the batch updates, whose logprobs differ
      only numerically.
  """
  pairs = []
  for i in _rollouts(batch, taken) if updated.logprobs is not None else ():
    row = batch.plan.rows[i]
    if i in updated.late or (fresh and row.version_step != batch.plan.step):
      continue
    sample = taken[row.uid].sample
    tokens = sample.loss_mask & sample.sampled
    pairs.append((updated.logprobs[i][tokens], sample.behaviour_logprobs[tokens]))
  return pairs


def _rollouts(batch: Batch, taken: Mapping[str, Experience]) -> list[int]:
  """Row numbers of the rollouts; a sample that is in several pairs of the batch is listed once."""
  first: dict[str, int] = {}
  for i, row in enumerate(batch.plan.rows):
    if row.uid in taken:
      first.setdefault(row.uid, i)
  return [*first.values()]


def rollout_rows(
  batch: Batch, updated: Updated, taken: Mapping[str, Experience], token_text: Callable[[int], str]
) -> list[dict[str, Any]]:
  """Returns a row per trained sample for `rollouts/`; arrays have an entry per completion token."""
  return [
    _rollout_row(
      batch.plan.rows[i],
      batch.annotation.advantages[i],
      None if updated.logprobs is None else updated.logprobs[i],
      taken[batch.plan.rows[i].uid],
      token_text,
    )
    for i in _rollouts(batch, taken)
  ]


def _rollout_row(
  row: Row,
  advantage: Any,
  logprobs: Float[np.ndarray, 'tokens'] | None,
  scored: Experience,
  token_text: Callable[[int], str],
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
    # Null where no sampler drew the token: 0 would read as probability 1.
    'behaviour_logprobs': np.where(sample.sampled, sample.behaviour_logprobs, np.nan)[after],
    # Null where none was computed.
    'trainer_logprobs': np.where(
      sample.loss_mask, np.nan if logprobs is None else logprobs, np.nan
    )[after],
    'advantages': (advantage * sample.loss_mask)[after],
    'reward': scored.reward.value,
    'scores': {
      score.scorer: {'value': score.value, 'parts': dict(score.parts), 'status': str(score.status)}
      for score in scored.scores
    },
    'finish_reason': str(Finish(sample.finish_reason)),
    'version_step': row.to_json()['version_step'],
  }
