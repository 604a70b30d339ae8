"""Records of a finished step: its metrics and its rollout rows."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxrl_llm.batching.plan import Row
from jaxrl_llm.core.records.sample import Finish, Role, Sample
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.master.exploring.tally import SPLIT
from jaxrl_llm.master.mismatch import (
  OVER_BUDGET,
  MismatchConfig,
  Pair,
  mismatch_metrics,
  over_budget,
  span_mismatch,
)
from jaxrl_llm.master.trainer import Batch, Updated
from jaxrl_llm.runtime.metrics import Mean, Metric, Sum, mean_of, resolve, spread

_OWN_PREFIXES = ('partial/', 'explore/', 'perf/', 'response_length/')
"""Counters of a plan whose names begin with one of these prefixes become metrics of the same names.
The names of other counters get the prefix `run/`.
"""
_CONTEXT_CHARACTERS = 20_000
"""Maximum number of characters of a prompt or observation in a rollout row. The middle of a longer
text is left out.
"""


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
    row |= resolve(_span_metrics(batch, updated, taken))
    if fresh := resolve(mismatch_metrics(logprob_pairs(batch, updated, taken, fresh=True))):
      exceeded = over_budget(budgets, fresh)
      row[OVER_BUDGET] = float(bool(exceeded))
  return row, exceeded


def batch_metrics(batch: Batch, taken: Mapping[str, Experience]) -> dict[str, Metric]:
  """Returns the metrics of a batch that need no logprobs, such as those of lengths, rewards,
  advantages and packing.
  """
  plan = batch.plan
  rows = [row for row in plan.rows if row.uid in taken] if taken else list(plan.rows)
  ends = [row for row, is_end in zip(rows, _ends(rows), strict=True) if is_end]
  lengths = [row.length - row.prompt_len for row in rows]
  metrics = {
    **spread('response_length', lengths),
    **spread('prompt_length', [row.prompt_len for row in rows]),
    'response_length/clip_ratio': mean_of(row.truncated for row in ends),
    'perf/total_num_tokens': Sum(sum(row.length for row in plan.rows)),
  }
  if batch.steps:
    metrics['perf/packing_utilisation'] = mean_of(step.packing.utilisation for step in batch.steps)
    shared = sum(step.packing.shared_tokens for step in batch.steps)
    held = sum(step.packing.tokens for step in batch.steps)
    metrics['perf/shared_tokens_ratio'] = Mean(shared, shared + held)
  if taken:
    scores = [row.reward for row in ends if row.reward is not None]
    shaped = batch.annotation.rewards
    rewards = scores if shaped is None else _shaped(plan.rows, shaped)
    samples = [taken[row.uid].step(row.uid) for row in rows]
    members = [taken[row.uid] for row in ends]
    metrics |= spread('num_turns', [sum(map(_turns, member.steps)) for member in members])
    finishes = {'aborted': Finish.ABORT, 'repetition': Finish.REPETITION}
    if SPLIT in plan.counts or any(row.trajectory for row in rows):
      metrics |= spread('num_steps', [len(member.steps) for member in members])
      finishes |= {'max_steps': Finish.STEPS}
    for name, finish in finishes.items():
      metrics[f'response/{name}_ratio'] = mean_of(
        member.finish_reason == finish for member in members
      )
    metrics |= spread('critic/score', scores) | spread('critic/rewards', rewards)
    versions = [row.version_step for row in rows if row.version_step is not None]
    metrics |= spread('staleness', [plan.step - version for version in versions])
    metrics |= _advantage_metrics(batch) | _scorer_metrics(taken)
    # Most unscorable samples are not in the batch, because they were dropped while it was
    # collected.
    unscorable = len(ends) - len(scores) + plan.counts.get('dropped/unscorable', 0)
    metrics['num_unscorable'] = Sum(unscorable)
    for name, count in plan.counts.items():
      metrics[name if name.startswith(_OWN_PREFIXES) else f'run/{name}'] = Sum(count)
    if 'partial/cut' in plan.counts:
      metrics |= _partial_metrics(rows, samples)
  return metrics


def _ends(rows: Sequence[Row]) -> list[bool]:
  """Returns, for each row, whether it contains the end of its trajectory."""
  last: dict[str, int] = {}
  for row in rows:
    if row.trajectory is not None:
      last[row.trajectory] = max(row.step_index, last.get(row.trajectory, 0))
  return [row.trajectory is None or row.step_index == last[row.trajectory] for row in rows]


def _shaped(rows: Sequence[Row], rewards: Sequence[float | None]) -> list[float]:
  """Returns the shaped rewards of scorable trajectories."""
  ends = zip(_ends(rows), rewards, strict=True)
  return [reward for is_end, reward in ends if is_end and reward is not None]


def _partial_metrics(rows: Sequence[Row], samples: Sequence[Sample]) -> dict[str, Metric]:
  """Returns statistics of the number of policy versions that generated each sample, and the
  fraction of sampled tokens that is trained on.
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
  """Returns the mean (weighted by completion tokens), minimum and maximum of the advantages. Expert
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
  for member in {member.sample.uid: member for member in taken.values()}.values():
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
    fresh: whether to return only rollouts sampled by the policy that this update starts from. The
      trainer's and the sampler's logprobs of such rollouts differ only numerically.
  """
  pairs = []
  for i in _rollouts(batch, taken) if updated.logprobs is not None else ():
    row = batch.plan.rows[i]
    if i in updated.late or (fresh and row.version_step != batch.plan.step):
      continue
    sample = taken[row.uid].step(row.uid)
    tokens = sample.loss_mask & sample.sampled
    if not tokens.any():  # All spans of the sample are too old to enter the loss.
      continue
    pairs.append((updated.logprobs[i][tokens], sample.behaviour_logprobs[tokens]))
  return pairs


def _span_metrics(
  batch: Batch, updated: Updated, taken: Mapping[str, Experience]
) -> dict[str, Metric]:
  """Returns the mismatch metrics of the tokens, separately for each lag, if any rollout has tokens
  of several versions. The lag is the number of batches between the weights that sampled a token and
  the weights before this batch's update.
  """
  by_lag: dict[int, list[Pair]] = {}
  several = False
  for i in _rollouts(batch, taken) if updated.logprobs is not None else ():
    uid = batch.plan.rows[i].uid
    sample = taken[uid].step(uid)
    tokens = sample.loss_mask & sample.sampled
    if i in updated.late or not tokens.any():
      continue
    several |= len({segment.version for segment in sample.segments}) > 1
    for segment in sample.segments:
      part = slice(segment.start, segment.end)
      chosen = tokens[part]
      if chosen.any():
        by_lag.setdefault(batch.plan.step - segment.version.step, []).append(
          (updated.logprobs[i][part][chosen], sample.behaviour_logprobs[part][chosen])
        )
  if not several:
    return {}
  return {
    f'rollout_corr/lag/{lag}/{name}': metric
    for lag, pairs in sorted(by_lag.items())
    for name, metric in span_mismatch(pairs).items()
  }


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
  batch: Batch,
  updated: Updated,
  taken: Mapping[str, Experience],
  decode: Callable[[list[int]], str],
  *,
  most_tokens: int | None = None,
) -> list[dict[str, Any]]:
  """Returns one row per sample of the batch, for the files in the run's directory `rollouts/`. The
  arrays in a row have one entry per completion token.

  Args:
    decode: returns the text of token ids, special tokens included.
    most_tokens: if the batch has more response tokens than this, only the rows of some of its
      groups are returned (see `LoggingConfig.transcript_tokens`). Each row then also has the number
      of samples in the batch, under `step_samples`.
  """
  numbers = _rollouts(batch, taken)
  chosen = _transcribed(batch, numbers, most_tokens)
  token_text = functools.cache(lambda token: decode([token]))
  rows = [
    _rollout_row(
      batch.plan.rows[i],
      batch.annotation.advantages[i],
      None if updated.logprobs is None else updated.logprobs[i],
      taken[batch.plan.rows[i].uid],
      token_text,
    )
    for i in chosen
  ]
  contexts: dict[tuple[str, bytes], str] = {}
  for i, row in zip(chosen, rows, strict=True):
    scored = taken[batch.plan.rows[i].uid]
    sample = scored.step(batch.plan.rows[i].uid)
    row |= _conversation(scored, sample, row['tokens'], decode)
    prompt = sample.tokens[: sample.prompt_len]
    first = contexts.setdefault((sample.group_id, prompt.tobytes()), sample.uid)
    if first == sample.uid:
      row['context'] = _shortened(decode(prompt.tolist()))
    else:
      row['context_of'] = first
  if len(chosen) < len(numbers):
    for row in rows:
      row['step_samples'] = len(numbers)
  return rows


def _transcribed(batch: Batch, numbers: Sequence[int], most_tokens: int | None) -> list[int]:
  """Returns the numbers of the rows that are written to `rollouts/`, in the given order.

  If the rows have more than `most_tokens` response tokens, chooses whole groups, at least one, in
  the order of a hash of their ids.
  """
  rows = batch.plan.rows
  groups: dict[str, list[int]] = {}
  for i in numbers:
    groups.setdefault(rows[i].group, []).append(i)
  lengths = {
    group: sum(rows[i].length - rows[i].prompt_len for i in members)
    for group, members in groups.items()
  }
  if most_tokens is None or sum(lengths.values()) <= most_tokens:
    return list(numbers)
  chosen: list[int] = []
  tokens = 0
  for group in sorted(groups, key=lambda group: hashlib.blake2b(group.encode()).digest()):
    if chosen and tokens + lengths[group] > most_tokens:
      break
    chosen += groups[group]
    tokens += lengths[group]
  return sorted(chosen)


def _shortened(text: str) -> str:
  left_out = len(text) - _CONTEXT_CHARACTERS
  if left_out <= 0:
    return text
  half = _CONTEXT_CHARACTERS // 2
  return f'{text[:half]}… [{left_out:,} characters left out] …{text[-half:]}'


def _conversation(
  scored: Experience, sample: Sample, tokens: Sequence[str], decode: Callable[[list[int]], str]
) -> dict[str, Any]:
  """Returns the entries of a row that describe the turns of its sample: which tokens the policy
  sampled, the reward of each of the policy's turns, and the versions that sampled the tokens.
  Leaves out `turns` if there is only one turn, `turn_rewards` if the reward has no turn values, and
  `versions` if a single version sampled all tokens.

  Args:
    tokens: texts of the tokens after the prompt.
  """
  start = sample.prompt_len
  is_policy = sample.role[start:] == Role.POLICY
  changes = (np.flatnonzero(np.diff(is_policy)) + 1).tolist()
  bounds = [0, *changes, len(is_policy)] if len(is_policy) else []
  turns: list[list[str | int]] = []
  for a, b in itertools.pairwise(bounds):
    turns.append(['policy' if is_policy[a] else 'observation', a, b])
    # If a character spans several tokens, the texts of the single tokens lack it, so the text of
    # the turn is stored too.
    text = '' if is_policy[a] else decode(sample.tokens[start + a : start + b].tolist())
    if text and text != ''.join(tokens[a:b]):
      turns[-1].append(_shortened(text))
  row: dict[str, Any] = {'turns': turns} if len(turns) > 1 else {}
  places = [step.uid for step in scored.steps]
  value, earlier = scored.step_rewards()[places.index(sample.uid)]
  if value is not None and scored.reward.turn_values:
    missing = sum(kind == 'policy' for kind, *_ in turns) - len(earlier)
    rewards = [float(reward) for reward in earlier] + [0.0] * max(missing, not earlier)
    rewards[-1] += value
    row['turn_rewards'] = rewards
  if len({segment.version for segment in sample.segments}) > 1:
    row['versions'] = [[s.start - start, s.end - start, s.version.step] for s in sample.segments]
  return row


def _rollout_row(
  row: Row,
  advantage: Any,
  logprobs: Float[np.ndarray, 'tokens'] | None,
  scored: Experience,
  token_text: Callable[[int], str],
) -> dict[str, Any]:
  sample = scored.step(row.uid)
  after = slice(sample.prompt_len, None)
  token_ids = sample.tokens[after]
  tokens = [token_text(t) for t in token_ids.tolist()]
  is_end = sample is scored.steps[-1]
  return {
    'uid': sample.uid,
    'task_id': sample.task_id,
    'group_id': sample.group_id,
    'sample_index': sample.sample_index,
    'trajectory_id': sample.trajectory_id,
    'step_index': sample.step_index,
    'steps': len(scored.steps),
    'taskset': sample.taskset,
    'domain': scored.task.domain,
    'prompt': scored.task.prompt[-1]['content'],
    'completion': scored.completion if is_end else ''.join(tokens),
    'truth': scored.task.truth,
    'tokens': tokens,
    'token_ids': token_ids,
    # NaN marks tokens that were not sampled, because 0 would mean a probability of 1.
    'behaviour_logprobs': np.where(sample.sampled, sample.behaviour_logprobs, np.nan)[after],
    # NaN marks tokens whose logprob the trainer did not compute.
    'trainer_logprobs': np.where(
      sample.loss_mask, np.nan if logprobs is None else logprobs, np.nan
    )[after],
    'advantages': (advantage * sample.loss_mask)[after],
    # A trajectory's reward and scores are in the row of its last step.
    'reward': scored.reward.value if is_end else None,
    'scores': {
      score.scorer: {'value': score.value, 'parts': dict(score.parts), 'status': str(score.status)}
      for score in (scored.scores if is_end else ())
    },
    'finish_reason': str(Finish(sample.finish_reason)),
    'version_step': -1 if row.version_step is None else row.version_step,
  }
