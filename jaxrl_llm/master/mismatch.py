"""Mismatch between trainer and sampler logprobs: metrics (in float64, on the host) and budgets.

The trainer and the sampler compute logprobs of the same tokens at the same temperature. Under equal
weights, the two differ only numerically, and a step in which this numerical difference exceeds a
budget causes a warning. Rollouts from older weights are exempt from the budgets, because the
policy's updates since then also change the logprobs. Metric names are those of verl
(`rollout_corr/`) and TRL (`sampling/`). Below, r is the trainer's logprob minus the sampler's, and
w is exp(r) with r clipped to ±20.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.runtime.metrics import Max, Mean, Metric, Min, Sum

OVER_BUDGET = 'run/mismatch_over_budget'
_BOUND = 20.0
"""Maximum absolute value to which log ratios are clipped before exponentiation, as in verl."""

_BUDGETS = {
  'warn_k3_kl': ('rollout_corr/k3_kl', 'nats per token'),
  'warn_max_difference': ('sampling/sampling_logp_difference/max', 'nats at one token'),
}
"""(metric, unit of the metric) that each field of MismatchConfig limits, keyed by field name."""

Pair = tuple[Float[np.ndarray, '...'], Float[np.ndarray, '...']]
"""(trainer's logprobs before the update, sampler's logprobs) of one sample. They contain only
tokens that were sampled and are trained on.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MismatchConfig:
  """Mismatch budgets. A step that exceeds a budget is counted in a metric and causes a warning."""

  warn_k3_kl: float = 1e-2
  """Maximum `rollout_corr/k3_kl`, in nats per token."""
  warn_max_difference: float | None = None
  """Maximum absolute difference between the trainer's and the sampler's logprob of a token, in
  nats. If None, there is no such budget.
  """

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value is not None and not value >= 0:
        raise UserError(f'rollout.mismatch.{field.name}: {value}, wanted at least 0')


def mismatch_metrics(pairs: Sequence[Pair]) -> dict[str, Metric]:
  """Returns mismatch metrics over the tokens and over the sequences of a batch. The result is empty
  if no token was sampled.

  `rollout_is_eff_sample_size` is (Σw)² / (N Σw²) over the N tokens of the batch, a number in
  (0, 1], where w is a token's probability ratio between trainer and sampler. It is the only metric
  that cannot be combined exactly from the values of several batches.
  """
  pairs = [(np.asarray(t, np.float64), np.asarray(b, np.float64)) for t, b in pairs if len(t)]
  if not pairs:
    return {}
  # NaN and infinite logprobs are visible in the metrics, so NumPy's warnings about them are
  # suppressed.
  with np.errstate(invalid='ignore', over='ignore'):
    return _of_tokens(np.concatenate([t - b for t, b in pairs])) | _of_sequences(pairs)


def span_mismatch(pairs: Sequence[Pair]) -> dict[str, Metric]:
  """Returns the number of tokens, and the mismatch metrics `kl` and `k3_kl` over them."""
  r = np.concatenate([np.asarray(t, np.float64) - np.asarray(b, np.float64) for t, b in pairs])
  with np.errstate(invalid='ignore', over='ignore'):
    of_tokens = _of_tokens(r)
  names = ('kl', 'k3_kl')
  return {'tokens': Sum(len(r)), **{name: of_tokens[f'rollout_corr/{name}'] for name in names}}


def _of_tokens(r: Float[np.ndarray, 'tokens']) -> dict[str, Metric]:
  bounded, size = np.clip(r, -_BOUND, _BOUND), np.abs(r)
  w = np.exp(bounded)
  weights = {'mean': _mean(w), 'max': Max(float(w.max())), 'min': Min(float(w.min()))}
  return {
    **{f'rollout_corr/rollout_is_{kind}': metric for kind, metric in weights.items()},
    **{f'sampling/importance_sampling_ratio/{kind}': metric for kind, metric in weights.items()},
    'rollout_corr/rollout_is_eff_sample_size': Mean(
      float(w.sum() ** 2 / (len(w) * (w**2).sum())), 1
    ),
    'rollout_corr/kl': _mean(-r),
    # For small |r|, exp(r) - 1 - r loses digits by cancellation; expm1 keeps them.
    'rollout_corr/k3_kl': _mean(np.expm1(bounded) - r),
    'rollout_corr/chi2_token': _mean(np.expm1(2.0 * bounded)),
    'sampling/sampling_logp_difference/mean': _mean(size),
    'sampling/sampling_logp_difference/max': Max(float(size.max())),
  }


def _of_sequences(pairs: Sequence[Pair]) -> dict[str, Metric]:
  trainer, sampler = (np.array([pair[side].mean() for pair in pairs]) for side in (0, 1))
  ratios = np.clip([(t - b).sum() for t, b in pairs], -_BOUND, _BOUND)
  return {
    'rollout_corr/training_ppl': _mean(np.exp(-trainer)),
    'rollout_corr/rollout_ppl': _mean(np.exp(-sampler)),
    'rollout_corr/log_ppl_diff': _mean(sampler - trainer),
    'rollout_corr/log_ppl_abs_diff': _mean(np.abs(sampler - trainer)),
    'rollout_corr/chi2_seq': _mean(np.expm1(2.0 * ratios)),
  }


def _mean(values: Float[np.ndarray, '...']) -> Mean:
  return Mean(float(values.sum()), len(values))


def over_budget(config: MismatchConfig, values: Mapping[str, float]) -> dict[str, str]:
  """Returns one line of text for each budget that a step exceeds, keyed by budget name.

  Args:
    values: metrics of the step. A metric that is NaN exceeds its budget; a missing metric does not.
  """
  lines = {}
  for name, (key, unit) in _BUDGETS.items():
    budget, value = getattr(config, name), values.get(key)
    if budget is not None and value is not None and not value <= budget:
      lines[name] = (
        f'trainer and sampler differ: {key} is {value:.3g} {unit}, budget {budget:g} '
        f'(rollout.mismatch.{name}); let the servers compute in float32, or see in the report '
        '(jaxrl report) which tokens differ most'
      )
  return lines
