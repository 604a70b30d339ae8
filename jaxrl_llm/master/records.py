"""Records of a finished step: its metrics and its rollout rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
  """Returns a step's metrics (without timings and metrics of the process) and its mismatch
  warnings.

  The warnings are keyed by budget name. There is one for each budget that is exceeded by the
  rollouts of the newest policy; rollouts of older versions are not compared with the budgets.
  """
  row, exceeded = resolve(updated.metrics | batch_metrics(batch, taken)), {}
  if taken:
    row |= resolve(mismatch_metrics(logprob_pairs(batch, updated, taken)))
    if fresh := resolve(mismatch_metrics(logprob_pairs(batch, updated, taken, fresh=True))):
      exceeded = over_budget(budgets, fresh)
      row[OVER_BUDGET] = float(bool(exceeded))
  return row, exceeded


def batch_metrics(batch: Batch, taken: Mapping[str, Experience]) -> dict[str, Metric]:
  """Returns the length, reward, advantage and packing metrics of a batch."""
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
    for name, finish in (('aborted', Finish.ABORT), ('repetition', Finish.REPETITION)):
      metrics[f'response/{name}_ratio'] = mean_of(
        sample.finish_reason == finish for sample in samples
      )
    metrics |= spread('critic/score', scores) | spread('critic/rewards', rewards)
    versions = [row.version_step for row in rows if row.version_step is not None]
    metrics |= spread('staleness', [plan.step - version for version in versions])
    metrics |= _advantage_metrics(batch) | _scorer_metrics(taken)
    # Most unscorable samples are not in the batch, because they were dropped while it was
    # collected.
    unscorable = len(rows) - len(scores) + plan.counts.get('dropped/unscorable', 0)
    metrics['num_unscorable'] = Sum(unscorable)
    for name, count in plan.counts.items():
      metrics[name if name.startswith('partial/') else f'run/{name}'] = Sum(count)
    if 'partial/cut' in plan.counts:
      metrics |= _partial_metrics(rows, samples)
  return metrics


def _partial_metrics(rows: Sequence[Row], samples: Sequence[Sample]) -> dict[str, Metric]:
  """Returns the number of batches over which the samples were generated, and the fraction of
  sampled tokens that is trained on.
  """
  return {
    **spread(
      'partial/spans', [len({s.version.step for s in sample.segments}) for sample in samples]
    ),
    'partial/trained_ratio': Mean(
      sum(
        int((sample.loss_mask & sample.sampled).sum())
        for row, sample in zip(rows, samples, strict=True)
        if not row.masked
      ),
      sum(int(sample.sampled.sum()) for sample in samples),
    ),
  }


def _turns(sample: Sample) -> int:
  policy = sample.role == Role.POLICY
  return int(np.count_nonzero(policy[1:] & ~policy[:-1]))


def _advantage_metrics(batch: Batch) -> dict[str, Metric]:
  """Returns the mean of the advantages, weighted by completion tokens, and their extremes. Expert
  rows and rows left out of the loss do not count.
  """
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
  """Returns the trainer's and the sampler's logprobs of each rollout.

  Only tokens that were sampled and are trained on are included. The trainer's logprobs are those
  before the update; rows whose logprobs were computed after an optimizer step of the batch are left
  out.

  Args:
    fresh: whether to return only rollouts sampled by the policy as it is before this update. Their
      two logprobs differ only numerically.
  """
  pairs = []
  for i in _rollouts(batch, taken) if updated.logprobs is not None else ():
    row = batch.plan.rows[i]
    if i in updated.late or (fresh and row.version_step != batch.plan.step):
      continue
    sample = taken[row.uid].sample
    tokens = sample.loss_mask & sample.sampled
    if not tokens.any():  # All of its spans are older than those that the loss takes.
      continue
    pairs.append((updated.logprobs[i][tokens], sample.behaviour_logprobs[tokens]))
  return pairs


def _rollouts(batch: Batch, taken: Mapping[str, Experience]) -> list[int]:
  """Returns the row numbers of the rollouts. A sample that is in several pairs of the batch is
  listed once.
  """
  first: dict[str, int] = {}
  for i, row in enumerate(batch.plan.rows):
    if row.uid in taken:
      first.setdefault(row.uid, i)
  return [*first.values()]


def rollout_rows(
  batch: Batch, updated: Updated, taken: Mapping[str, Experience], token_text: Callable[[int], str]
) -> list[dict[str, Any]]:
  """Returns one row per sample of the batch, for the files in the run's directory `rollouts/`. The
  arrays in a row have one entry per completion token.
  """
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
    'domain': scored.task.domain,
    'prompt': scored.task.prompt[-1]['content'],
    'completion': scored.completion,
    'truth': scored.task.truth,
    'tokens': [token_text(int(t)) for t in token_ids],
    'token_ids': token_ids,
    # NaN marks tokens that no sampler drew; 0 would mean a probability of 1.
    'behaviour_logprobs': np.where(sample.sampled, sample.behaviour_logprobs, np.nan)[after],
    # NaN marks tokens whose logprob the trainer did not compute.
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
