"""Metrics: values that can be merged, and the documentation of every key.

A mean, for example, is kept as a sum and a count until it is written. The parts from all processes,
micro-batches and optimizer steps are first merged, and only then is the sum divided by the count.
The written number therefore does not depend on how a step was split. `METRICS` documents each key,
and `runtime.metric_names` gives it a readable name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Scalar = Any
"""A number or a single-element array (NumPy, JAX)."""


class Mean(NamedTuple):
  """Mean that can be merged: the sum and the number of the values.

  For a weighted mean, `total` is the weighted sum and `count` the sum of the weights.
  """

  total: Scalar
  count: Scalar

  def merge(self, other: Mean) -> Mean:
    return Mean(self.total + other.total, self.count + other.count)

  def value(self) -> float | None:
    """Returns total / count, or None if count is 0."""
    return float(self.total) / float(self.count) if self.count else None


class Sum(NamedTuple):
  """Sum that can be merged, such as a number of tokens or of skipped samples."""

  total: Scalar

  def merge(self, other: Sum) -> Sum:
    return Sum(self.total + other.total)

  def value(self) -> float | None:
    return float(self.total)


class Max(NamedTuple):
  """Maximum that can be merged. It is NaN if any value was NaN, so that bad values stay visible."""

  largest: Scalar

  def merge(self, other: Max) -> Max:
    return Max(
      math.nan if math.isnan(self.largest + other.largest) else max(self.largest, other.largest)
    )

  def value(self) -> float | None:
    return float(self.largest)


class Min(NamedTuple):
  """Minimum that can be merged. It is NaN if any value was NaN, so that bad values stay visible."""

  smallest: Scalar

  def merge(self, other: Min) -> Min:
    return Min(
      math.nan if math.isnan(self.smallest + other.smallest) else min(self.smallest, other.smallest)
    )

  def value(self) -> float | None:
    return float(self.smallest)


Metric = Mean | Sum | Max | Min


def mean_of(values: Iterable[Scalar]) -> Mean:
  values = [float(v) for v in values]
  return Mean(math.fsum(values), len(values))


def spread(prefix: str, values: Iterable[Scalar]) -> dict[str, Metric]:
  """Returns the mean, maximum and minimum of the values, with keys such as `<prefix>/mean`.

  Returns no metrics if there are no values.
  """
  values = [float(v) for v in values]
  if not values:
    return {}
  bad = any(math.isnan(v) for v in values)
  return {
    f'{prefix}/mean': mean_of(values),
    f'{prefix}/max': Max(math.nan if bad else max(values)),
    f'{prefix}/min': Min(math.nan if bad else min(values)),
  }


def merge(left: Mapping[str, Metric], right: Mapping[str, Metric]) -> dict[str, Metric]:
  """Merges two sets of metrics.

  Raises:
    TypeError: if a key has metrics of different types in the two sets.
  """
  merged = dict(left)
  for key, metric in right.items():
    if key in merged and type(merged[key]) is not type(metric):
      raise TypeError(
        f'metric {key!r}: cannot merge {type(merged[key]).__name__} with {type(metric).__name__}'
      )
    merged[key] = merged[key].merge(metric) if key in merged else metric
  return merged


def resolve(metrics: Mapping[str, Metric | Scalar]) -> dict[str, float]:
  """Converts metrics to the numbers that are written.

  A mean of no values is omitted, because it is undefined.
  """
  row = {}
  for key, metric in metrics.items():
    value = metric.value() if isinstance(metric, Mean | Sum | Max | Min) else float(metric)
    if value is not None:
      row[key] = value
  return row


_SPREAD = {'mean': 'Mean', 'max': 'Largest', 'min': 'Smallest'}


def _of(prefix: str, quantity: str, reading: str) -> dict[str, str]:
  return {
    f'{prefix}/{kind}': f'{word} {quantity}. {reading}'.strip() for kind, word in _SPREAD.items()
  }


METRICS: dict[str, str] = {
  'training/global_step': (
    'Completed optimizer batches when the row was written; the x-axis of every curve.'
  ),
  # The policy update.
  'actor/pg_loss': (
    'Clipped policy loss. Hovers around 0; its size means little, but a drift away from 0 '
    'indicates stale data.'
  ),
  'actor/sft_loss': (
    'Negative log-likelihood per demonstrated token (nats). Should fall; far below the '
    "demonstrations' own entropy, the policy memorises."
  ),
  'actor/loss': 'All loss terms together, each with its weight.',
  'actor/entropy': (
    'Entropy of the policy per token (nats). A slow fall is normal; near 0 while the reward is low '
    'means collapse, an endless rise means divergence.'
  ),
  'actor/grad_norm': (
    'Global gradient norm before clipping. Spikes of ten times the usual norm indicate outliers; '
    'if it is always above the clip value, clipping sets the step size.'
  ),
  'actor/lr': 'Learning rate of the step.',
  'actor/pg_clipfrac': (
    'Share of tokens whose ratio was clipped. 0 with one update per batch; above 0.3, steps are '
    'too large or data too stale.'
  ),
  'actor/pg_clipfrac_lower': (
    'Share of tokens with negative advantage whose loss dual clipping cut. Normally 0; above 0.01, '
    'the policy moves far within one batch.'
  ),
  'actor/ppo_kl': (
    'KL (k1 estimate, nats per token) from the updated policy to the one before the batch. About 0 '
    'with one update per batch; above 0.1, steps are too large.'
  ),
  'actor/kl_loss': (
    'KL to the reference (nats per token), in the configured estimator. Grows slowly from 0; a '
    'jump means that the policy left the reference.'
  ),
  'actor/kl': (
    'KL to the reference (nats per token), whatever enters the loss. Read it like actor/kl_loss.'
  ),
  'actor/kl_coef': 'Coefficient of the KL term.',
  'actor/kl_measured': (
    'KL to the reference (k1 estimate, nats per token) before the batch; an adaptive coefficient '
    'follows it.'
  ),
  'actor/entropy_loss': 'Negative entropy per token, before its coefficient.',
  'actor/reference_step': (
    'Completed batches when the reference was last set (by ema: last averaged).'
  ),
  'actor/log_ratio_sum': (
    'opmd: mean over sequences of log π(y) - log π_ref(y) (nats). 0 at the first update of a '
    'batch; an absolute value above 1/τ means that the squared penalty dominates.'
  ),
  'actor/off_policy_masked_fraction': (
    'Share of tokens of bad samples that were masked for being too far off-policy.'
  ),
  'actor/mu': 'mix: current weight of imitation.',
  'actor/expert_logprob': 'mix: mean log-likelihood of an expert token (nats). Should rise.',
  # Preference pairs, under TRL's names.
  'actor/dpo_loss': 'DPO loss per pair. log 2 = 0.693 at the start; falls as margins grow.',
  'actor/rm_loss': 'Bradley-Terry loss per pair. log 2 = 0.693 is chance level.',
  'actor/center_loss': 'Squared sum of the scores of a pair, before its coefficient.',
  'rewards/accuracies': (
    'Share of pairs whose chosen answer wins (a tie is half a win). 0.5 is chance level.'
  ),
  'rewards/margins': (
    "Mean margin of the chosen answer: β·(log-ratio difference), or of a reward model's scores."
  ),
  'rewards/chosen': 'Mean implicit reward (DPO) or score (reward model) of the chosen answers.',
  'rewards/rejected': (
    'The same for the rejected answers; if both fall together, the policy loses likelihood.'
  ),
  'logps/chosen': (
    'Mean log-likelihood of the chosen answers (nats, of whole answers; for ipo per token).'
  ),
  'logps/rejected': 'Mean log-likelihood of the rejected answers.',
  # The critic.
  'critic/loss': "All terms of the critic's loss.",
  'critic/vf_loss': 'Half the squared error of the values, clipped as configured. Should fall.',
  'critic/vf_clipfrac': 'Share of tokens whose value was clipped by cliprange_value.',
  'critic/vpred_mean': "Mean of the critic's values at its update.",
  'critic/grad_norm': "Global norm of the critic's gradient before clipping.",
  'critic/lr': "The critic's learning rate.",
  # Rewards.
  **_of(
    'critic/score',
    'score of a trained sample, before any shaping',
    "The curve that should rise; a stage's selection decides which samples it covers.",
  ),
  **_of(
    'critic/rewards',
    'reward of a sample after the length terms, without KL',
    'Equals the score without shaping.',
  ),
  **_of(
    'critic/advantages',
    'advantage of a trained token',
    'The mean is near 0 for groups; extremes above 5 are rare.',
  ),
  'critic/returns/mean': 'Mean return of a trained token.',
  'critic/values/mean': (
    "Mean of the critic's value of a trained token. Should approach the returns."
  ),
  'critic/vf_explained_var': (
    'Share of the variance of returns that the critic explains. 1 is perfect; at or below 0, it is '
    'no better than a constant.'
  ),
  'rewards/<scorer>/mean': (
    "Mean of one scorer's value before its weight, with the values of turns. Shows which part of "
    'the reward moves.'
  ),
  'rewards/<scorer>/<part>': "Mean of one named part of a scorer's value.",
  'frac_reward_zero_std': (
    'Share of groups whose rewards are all equal: no gradient. Near 1, the tasks are too easy or '
    'too hard.'
  ),
  'num_unscorable': (
    'Samples without a reward (truth missing, scorer failed), left out of loss and baseline. '
    'Should be 0.'
  ),
  'num_not_finite': (
    'Samples for which critic, policy or reference computed NaN or infinity, left out of the loss '
    'and named in the log. Should be 0.'
  ),
  # Lengths.
  **_of(
    'response_length',
    'response length in tokens',
    'A sudden rise with falling reward indicates rambling.',
  ),
  'response_length/clip_ratio': (
    'Share of responses cut at the token limit. Above 0.1, the limit distorts training.'
  ),
  **_of('prompt_length', 'prompt length in tokens', ''),
  **_of('num_turns', 'turns (runs of tokens that the policy wrote) per sample', ''),
  'response/aborted_ratio': (
    'Share of responses that the engine or the workflow aborted. Should be 0.'
  ),
  'response/repetition_ratio': (
    'Share of responses that rollout.repetition_detection ended. A rise precedes collapse; the '
    'processor `repetition` penalises them.'
  ),
  # Partial rollouts.
  'partial/cut': (
    'Groups whose budget was spent while the batch was collected, so that a later batch continues '
    'them. Absent without rollout.partial.'
  ),
  'partial/continued': (
    'Number of times that a waiting group was continued for this batch. Above the number of such '
    'groups if some were continued more than once.'
  ),
  'partial/returned': (
    'Number of groups that finished within their budget although the batch was full, at bound 0. '
    'Their new tokens are discarded, and are generated again for a later batch.'
  ),
  'partial/open': (
    'Groups that wait for a later batch. If it keeps growing, raise rollout.partial.budget.'
  ),
  **_of('partial/spans', 'batches over which a sample was generated', ''),
  'partial/trained_ratio': (
    'Share of the sampled tokens that enter the loss; the others belong to earlier spans or to '
    'masked samples. If far below 1, raise rollout.partial.budget.'
  ),
  # Mismatch between trainer and sampler. It is measured before the first optimizer step of a batch,
  # on the sampled tokens that are trained on. Values after "Embedded" are typical of the engine in
  # the trainer's process, in float32.
  'rollout_corr/kl': (
    'KL from the sampler to the trainer (k1 estimate, nats per token), positive where the sampler '
    'is more confident. Embedded: below 1e-6; vLLM in bfloat16: about 1e-3. Above 1e-2, the two '
    'compute different models; large differences of both signs can cancel out, so read k3_kl too.'
  ),
  'rollout_corr/k3_kl': (
    'KL from the sampler to the trainer in the k3 estimate (nats per token), which is never '
    'negative; rollout.mismatch.warn_k3_kl is its budget. Embedded: below 1e-9; vLLM in bfloat16: '
    'about 1e-3. A rise over many steps precedes collapse; above 1e-2 from the first step on '
    'indicates a bug (temperature, dtype, stale weights).'
  ),
  'rollout_corr/training_ppl': (
    "Mean over sequences of the trainer's perplexity of its sampled tokens. Equals rollout_ppl up "
    'to rounding; if far above it, the trainer does not see what was sampled.'
  ),
  'rollout_corr/rollout_ppl': (
    "Mean over sequences of the sampler's own perplexity. Near 1, the policy has collapsed."
  ),
  'rollout_corr/log_ppl_diff': (
    'Log-perplexity of the trainer minus that of the sampler, mean over sequences. Should be 0 on '
    'average; steadily above 0.01, the trainer is less confident than the sampler.'
  ),
  'rollout_corr/log_ppl_abs_diff': (
    'Mean over sequences of the absolute value of that difference, so that signs cannot cancel. If '
    'it is large and log_ppl_diff is near 0, some sequences are scored too high and others too low.'
  ),
  'rollout_corr/chi2_token': (
    'χ² divergence per token: mean squared importance weight − 1. Near 0; above 0.1, a few tokens '
    'dominate the gradient of an importance-weighted loss.'
  ),
  'rollout_corr/chi2_seq': (
    'The same for whole sequences, from the product of their weights (bounded to e^±20). It grows '
    'with length; above 1, weights per sequence are unusable; 1e17 is its bound.'
  ),
  'rollout_corr/rollout_is_mean': (
    'Mean importance weight trainer/sampler, bounded to e^±20. Should be 1; if off by 0.01, the '
    'sampler did not draw from the distribution that it reports.'
  ),
  'rollout_corr/rollout_is_max': (
    'Largest importance weight before any cap. Embedded: 1.000. Values in the thousands indicate a '
    'token that the two see differently.'
  ),
  'rollout_corr/rollout_is_min': (
    'Smallest importance weight. Far below 0.1: a token that the trainer considers unlikely, from '
    'a truncated distribution (top_p, top_k) or another model.'
  ),
  'rollout_corr/rollout_is_eff_sample_size': (
    'Effective share of the tokens under their weights, (Σw)² / (N Σw²). 1 is no mismatch; below '
    '0.9, look at the largest weights; below 0.5, a correction loses half of the batch.'
  ),
  'rollout_corr/rollout_is_weight': (
    'Mean of the weights that multiply the loss, after truncation. Its distance from 1 is what '
    'truncation cut; below 0.9, that is much of the batch.'
  ),
  'rollout_corr/rollout_rs_masked_fraction': (
    'Share of tokens of sequences that were masked for their mean ratio.'
  ),
  'rollout_corr/<name>': 'Another statistic of the correction, named by its estimator.',
  'sampling/sampling_logp_difference/mean': (
    'Mean |trainer − sampler| of the token logprobs. Embedded: 1e-6; vLLM in bfloat16: 1e-2. '
    'Steadily above 0.02 indicates a bug.'
  ),
  'sampling/sampling_logp_difference/max': (
    'Largest |trainer − sampler| of one token; its budget is rollout.mismatch.warn_max_difference. '
    'Embedded: below 1e-4. A single large one indicates a misaligned or masked token.'
  ),
  'sampling/importance_sampling_ratio/<kind>': (
    'exp(trainer − sampler) over sampled tokens: min, mean, max. The same numbers as '
    'rollout_corr/rollout_is_*, under the name that TRL gives them.'
  ),
  # Time.
  'timing_s/gen': 'Seconds of generating the rollouts of the step.',
  'timing_s/reward': (
    'Seconds waited for scores after the last rollout ended. Near 0 if scoring keeps up with '
    'generation.'
  ),
  'timing_s/load': (
    'Seconds that the devices waited for the rows of the batch to be read and packed. Near 0 if '
    'reading keeps up with computing.'
  ),
  'timing_s/old_log_prob': 'Seconds of the proximal pass; absent when the step needs none.',
  'timing_s/ref': 'Seconds of the reference pass; absent with KL off.',
  'timing_s/values': "Seconds of the critic's pass.",
  'timing_s/adv': 'Seconds of annotation on the host, advantages included.',
  'timing_s/update_actor': 'Seconds of the policy update.',
  'timing_s/update_critic': "Seconds of the critic's update.",
  'timing_s/update_weights': 'Seconds of publishing the weights to the engines.',
  'timing_s/save_checkpoint': 'Seconds that the loop waited for a checkpoint.',
  'timing_s/testing': 'Seconds of evaluation.',
  'timing_s/step': 'Seconds of the whole step.',
  'timing_s/<phase>': 'Seconds of another phase of the step.',
  'timing_per_token_ms/<phase>': 'Milliseconds per token of a phase.',
  'perf/total_num_tokens': 'Tokens of the batch, prompts included.',
  'perf/time_per_step': 'Seconds per step, as timing_s/step.',
  'perf/throughput': 'Tokens of the batch per second and device.',
  'perf/rollout_throughput': (
    'Response tokens of the batch per second that the trainer waited for them; absent if some are '
    'from older weights.'
  ),
  'perf/trainer_idle_s': 'Seconds of the step in which the trainer waited for its batch.',
  'perf/explorers': 'Explorer processes connected at the end of the step (rollout.explorers).',
  'perf/explorers_lost_groups': (
    'Groups taken from explorers that went silent, ended, left or were evicted.'
  ),
  'perf/rollout_idle_s': (
    'Seconds since the previous step in which no group was generated or scored.'
  ),
  'perf/publish_write_s': (
    'Seconds of gathering, converting and writing the weights (vLLM servers).'
  ),
  'perf/publish_pause_s': 'Longest time that a publication kept a server from sampling.',
  'perf/publish_bytes': 'Bytes of the published tensors.',
  'perf/packing_utilisation': (
    'Share of the packed positions that hold a token. Below 0.7, the chunk sizes fit poorly.'
  ),
  'perf/compilations': (
    'Programs compiled in the step. 0 after warm-up; otherwise some shapes were not planned.'
  ),
  'perf/heartbeat_max_s': (
    'Longest time the event loop was blocked in the step. Above 0.05, something blocks it.'
  ),
  'perf/max_memory_allocated_gb': (
    'Peak of the device memory in use since the start, GB; absent on CPUs.'
  ),
  'perf/cpu_memory_used_gb': (
    "Resident memory of the trainer's process, GB. A steady rise indicates a leak."
  ),
  'perf/open_descriptors': (
    "Open files and sockets of the trainer's process. A steady rise indicates a leak."
  ),
  'perf/disk_free_gb': "Free space on the run directory's disk, GB.",
  'perf/<name>': 'Another measure of speed or memory.',
  # Goodput. The classes of a ledger add up to the whole.
  'goodput/seconds/trainer/<class>': (
    "Seconds of the trainer's loop since the previous row: `generate` (sampling in the trainer), "
    '`wait` (for rollouts, scores or rows), `load` (of the rows), `train` (passes, advantages and '
    'updates), `publish`, `evaluate`, `commit`, `recompute` (a step that a crash undid) or '
    '`other`. They add up to the time between the rows.'
  ),
  'goodput/seconds/servers/<class>': (
    'Seconds of all serving servers together: `generate`, `publish` (pauses), `evaluate` or '
    '`idle` (no group in progress). They add up to the time between the rows times the servers. '
    'Absent if no server serves.'
  ),
  'goodput/tokens/sampled': (
    'Tokens of the samples that finished and were stored since the previous row. Over all rows up '
    'to one, it is trained + dropped + the waiting of that row, but not across a branch with '
    '--reset_store. Discarded tokens and spans of groups that wait to be continued are in no class.'
  ),
  'goodput/tokens/trained': 'Sampled tokens of the new groups of the batch.',
  'goodput/tokens/dropped': 'Sampled tokens of samples that no batch will contain.',
  'goodput/tokens/waiting': 'Sampled tokens of finished groups that wait for a batch.',
  'goodput/tokens/evaluated': 'Tokens of the responses of an evaluation.',
  # The run.
  'run/clock_decisions': (
    'Decisions that depended on a clock since this start. If not 0, the run is not exactly '
    'repeatable.'
  ),
  'run/skipped_updates': (
    "Updates of the step, the critic's included, that were skipped for NaN, infinity or an "
    'exploding gradient. If more than a few, lower the learning rate.'
  ),
  'run/mismatch_over_budget': (
    '1 if trainer and sampler, with the same weights, differed by more than rollout.mismatch '
    'allows, else 0; absent if no rollout of the batch is from the weights that it updates. Should '
    'be 0; if often 1, let the servers compute in float32, or raise the budget deliberately.'
  ),
  'run/empty_updates': (
    'Updates of the step that were not taken because no group was mixed: the gradient was zero.'
  ),
  'run/engine_retries': (
    'Completions requested again since the previous step because a server was lost. Usually 0.'
  ),
  'run/engine_restarts': 'Servers restarted since the previous step.',
  'run/engine_void': (
    'Completions discarded since the previous step because their version was not proven. 0 in a '
    'healthy run.'
  ),
  'run/engines_serving': 'Servers that serve the version of the step.',
  'run/engines': (
    'Servers of the registry that the engine has, serving or not; absent without '
    'rollout.vllm.discover.'
  ),
  'run/engine_joined': 'Servers that joined since the previous step.',
  'run/engine_left': 'Servers that left, or whose leases expired, since the previous step.',
  'run/scorers/breaks': (
    'Restarts of all scorer processes since the previous step; absent before the first.'
  ),
  'run/scorers/<scorer>/<count>': (
    'Failures of a scorer since the previous step: calls by `timeout`, `error`, `crashed` and '
    '`retried`; samples `unscorable` or `zeroed` and `dropped_groups` by its on_failure. Absent '
    'before the first; if more than a few, see the log.'
  ),
  'run/dropped/<reason>': (
    'Samples dropped for this reason while the batch was collected; `groups` counts groups.'
  ),
  'run/passed_over': (
    'Groups that started before one of the batch and are left for later batches: unfinished ones, '
    'and finished ones that may wait longer than a group of the batch. Absent with the batch '
    'policy in_order; counted in run/clock_decisions.'
  ),
  'run/logging/<writer>/lost_rows': (
    'Rows that a log writer refused since the previous step; absent before its first. They remain '
    'in metrics.jsonl.'
  ),
  'run/<name>': 'Another count of the run itself.',
  'staleness/<name>': (
    'Versions between a token and the update that trains on it. At most the bound for new '
    'rollouts; earlier groups are as old as past.draw.max_age permits.'
  ),
  # Evaluation.
  'val-core/<taskset>/acc/greedy': (
    'Share of held-out tasks solved by greedy decoding. The number to report.'
  ),
  'val-core/<taskset>/acc/greedy/stderr': 'Standard error of the greedy accuracy.',
  'val-core/<taskset>/acc/mean@<k>': 'Mean share solved over k samples per task.',
  'val-core/<taskset>/acc/mean@<k>/stderr': 'Standard error of that mean, over tasks.',
  'val-core/<taskset>/acc/pass@<k>': (
    'Unbiased estimate that at least one of k samples solves a task.'
  ),
  'val-core/<preferences>/rewards/accuracies': (
    'Share of held-out pairs whose chosen answer wins. 0.5 is chance level.'
  ),
  'val-core/<preferences>/rewards/<name>': 'The same statistic on held-out pairs as in training.',
  'val-core/<preferences>/logps/<name>': 'The same statistic on held-out pairs as in training.',
  'val-core/<preferences>/<name>_loss': (
    'The loss on held-out pairs or examples. Rising while the training loss falls: memorising.'
  ),
  'val-core/<preferences>/entropy': (
    'Entropy of the policy per token of the held-out answers (nats).'
  ),
  'val-aux/<taskset>/num_tasks': 'Tasks evaluated.',
  'val-aux/<taskset>/truncated': 'Share of evaluation responses cut at the token limit.',
  'val-aux/<taskset>/unscorable': (
    'Evaluation responses without a score; accuracies leave them out.'
  ),
  'val-aux/<taskset>/<name>': 'Another measure of the evaluation.',
  '<key>/nonfinite': 'Accompanies a key that is null and gives its value: nan, inf or -inf.',
}
"""Description of each metric, keyed by the metric's key or by a pattern of keys.

In a pattern, a <placeholder> matches one part between slashes, or several parts if it is in
`_DEEP`. If several patterns match a key, the first one applies.
"""


_DEEP = {'<taskset>', '<preferences>', '<part>', '<name>'}
"""Placeholders that may match several parts of a key, including the slashes between them."""


def _pattern(key: str) -> re.Pattern[str]:
  parts = re.split(r'<(\w+)>', key)
  return re.compile(
    ''.join(
      (f'(?P<{part}>{".+?" if f"<{part}>" in _DEEP else "[^/]+"})' if i % 2 else re.escape(part))
      for i, part in enumerate(parts)
    )
  )


_PATTERNS = [(_pattern(key), key) for key in METRICS if '<' in key]


def documented(key: str) -> tuple[str | None, dict[str, str]]:
  """Returns the entry of `METRICS` that documents a key, and the values of its placeholders.

  The entry is a key or pattern, or None if no entry matches. The values are those parts of the key
  that the pattern's placeholders match, keyed by placeholder.
  """
  if key in METRICS:
    return key, {}
  if key.endswith('/nonfinite'):
    return '<key>/nonfinite', {}
  for pattern, name in _PATTERNS:
    if match := pattern.fullmatch(key):
      return name, match.groupdict()
  return None, {}


def describe(key: str) -> str | None:
  """Returns the description of a key; None if it is not in `METRICS`."""
  return METRICS.get(documented(key)[0] or '')
