"""Readable names and units of metrics, for charts and tables.

`runtime.metric_descriptions.METRICS` describes how to interpret each metric; this module names it.
The unit of a metric also determines which values are mere rounding errors, so that charts do not
draw rounding errors as if they were a curve.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxrl_llm.runtime.metric_descriptions import METRICS, documented

_NATS, _SHARE, _S, _TOKENS, _LOSS = 'nats per token', 'share', 'seconds', 'tokens', 'loss'

NOISE = {_NATS: 1e-6, 'nats': 1e-6, _LOSS: 1e-6, 'advantage': 1e-6, 'χ²': 1e-6}
"""Absolute value, keyed by unit, up to which a measured float32 value is rounding error."""


class Label(NamedTuple):
  """Name and unit of a metric in a chart."""

  name: str
  unit: str = ''
  """Unit, or the quantity that a number without a unit measures; empty if the name states it."""

  @property
  def noise(self) -> float:
    """Absolute value up to which the metric is rounding error; 0 if even the smallest value is
    meaningful.
    """
    return NOISE.get(self.unit, 0.0)


LABELS: dict[str, Label] = {
  'actor/pg_loss': Label('Policy loss', _LOSS),
  'actor/sft_loss': Label('Supervised loss', _NATS),
  'actor/loss': Label('Total loss', _LOSS),
  'actor/entropy': Label('Entropy', _NATS),
  'actor/grad_norm': Label('Gradient norm', 'norm'),
  'actor/lr': Label('Learning rate', 'rate'),
  'actor/pg_clipfrac': Label('Clipped tokens', _SHARE),
  'actor/pg_clipfrac_lower': Label('Tokens cut by dual clipping', _SHARE),
  'actor/ppo_kl': Label('KL of the update', _NATS),
  'actor/kl_loss': Label('KL to the reference', _NATS),
  'actor/kl': Label('KL to the reference, measured', _NATS),
  'actor/kl_coef': Label('KL coefficient', 'coefficient'),
  'actor/kl_measured': Label('KL before the batch', _NATS),
  'actor/entropy_loss': Label('Entropy loss', _NATS),
  'actor/reference_step': Label('Step of the reference', 'step'),
  'actor/log_ratio_sum': Label('Log-ratio to the reference', 'nats'),
  'actor/off_policy_masked_fraction': Label('Off-policy tokens masked', _SHARE),
  'actor/mu': Label('Weight of imitation', 'weight'),
  'actor/expert_logprob': Label('Logprob of expert tokens', _NATS),
  'actor/dpo_loss': Label('DPO loss', _LOSS),
  'actor/rm_loss': Label('Reward model loss', _LOSS),
  'actor/center_loss': Label('Centering loss', _LOSS),
  'rewards/accuracies': Label('Pairs won', _SHARE),
  'rewards/margins': Label('Margin of pairs', 'reward'),
  'rewards/chosen': Label('Reward of chosen answers', 'reward'),
  'rewards/rejected': Label('Reward of rejected answers', 'reward'),
  'logps/chosen': Label('Logprob of chosen answers', 'nats'),
  'logps/rejected': Label('Logprob of rejected answers', 'nats'),
  'critic/loss': Label("Critic's loss", _LOSS),
  'critic/vf_loss': Label('Value loss', _LOSS),
  'critic/vf_clipfrac': Label('Clipped values', _SHARE),
  'critic/vpred_mean': Label('Mean value at the update', 'value'),
  'critic/grad_norm': Label("Critic's gradient norm", 'norm'),
  'critic/lr': Label("Critic's learning rate", 'rate'),
  'critic/score/mean': Label('Reward', 'reward'),
  'critic/score/max': Label('Largest reward', 'reward'),
  'critic/score/min': Label('Smallest reward', 'reward'),
  'critic/rewards/mean': Label('Shaped reward', 'reward'),
  'critic/rewards/max': Label('Largest shaped reward', 'reward'),
  'critic/rewards/min': Label('Smallest shaped reward', 'reward'),
  'critic/advantages/mean': Label('Advantage', 'advantage'),
  'critic/advantages/max': Label('Largest advantage', 'advantage'),
  'critic/advantages/min': Label('Smallest advantage', 'advantage'),
  'critic/returns/mean': Label('Return', 'return'),
  'critic/values/mean': Label('Value', 'value'),
  'critic/vf_explained_var': Label('Explained variance of the critic', _SHARE),
  'rewards/<scorer>/mean': Label('Scorer <scorer>', 'reward'),
  'rewards/<scorer>/<part>': Label('Scorer <scorer>: <part>', 'reward'),
  'frac_reward_zero_std': Label('Groups without signal', _SHARE),
  'num_unscorable': Label('Unscorable samples', 'samples'),
  'num_not_finite': Label('Samples that are not finite', 'samples'),
  'response_length/mean': Label('Response length', _TOKENS),
  'response_length/max': Label('Longest response', _TOKENS),
  'response_length/min': Label('Shortest response', _TOKENS),
  'response_length/clip_ratio': Label('Responses cut at the limit', _SHARE),
  'response_length/limit': Label('Limit of the response length', _TOKENS),
  'response/aborted_ratio': Label('Aborted responses', _SHARE),
  'prompt_length/mean': Label('Prompt length', _TOKENS),
  'prompt_length/max': Label('Longest prompt', _TOKENS),
  'prompt_length/min': Label('Shortest prompt', _TOKENS),
  'num_turns/mean': Label('Turns of a sample', 'turns'),
  'num_steps/mean': Label('Steps of a trajectory', 'steps'),
  'rollout_corr/kl': Label('KL from sampler to trainer', _NATS),
  'rollout_corr/k3_kl': Label('KL from sampler to trainer (k3)', _NATS),
  'rollout_corr/training_ppl': Label("Trainer's perplexity", 'perplexity'),
  'rollout_corr/rollout_ppl': Label("Sampler's perplexity", 'perplexity'),
  'rollout_corr/log_ppl_diff': Label('Difference of log-perplexities', 'nats'),
  'rollout_corr/log_ppl_abs_diff': Label('|Difference of log-perplexities|', 'nats'),
  'rollout_corr/chi2_token': Label('χ² per token', 'χ²'),
  'rollout_corr/chi2_seq': Label('χ² per sequence', 'χ²'),
  'rollout_corr/rollout_is_mean': Label('Mean importance weight', 'weight'),
  'rollout_corr/rollout_is_max': Label('Largest importance weight', 'weight'),
  'rollout_corr/rollout_is_min': Label('Smallest importance weight', 'weight'),
  'rollout_corr/rollout_is_eff_sample_size': Label('Effective sample size', _SHARE),
  'sampling/sampling_logp_difference/mean': Label('Mean |trainer − sampler|', 'nats'),
  'sampling/sampling_logp_difference/max': Label('Largest |trainer − sampler|', 'nats'),
  'timing_s/gen': Label('generation', _S),
  'timing_s/reward': Label('scoring', _S),
  'timing_s/reward_model': Label("reward model's pass", _S),
  'timing_s/old_log_prob': Label('proximal pass', _S),
  'timing_s/ref': Label('reference pass', _S),
  'timing_s/values': Label("critic's pass", _S),
  'timing_s/adv': Label('annotation', _S),
  'timing_s/update_actor': Label('policy update', _S),
  'timing_s/update_critic': Label("critic's update", _S),
  'timing_s/update_weights': Label('publishing', _S),
  'timing_s/save_checkpoint': Label('commit, blocking', _S),
  'timing_s/testing': Label('evaluation', _S),
  'timing_s/step': Label('Time of a step', _S),
  'timing_s/<phase>': Label('Time of <phase>', _S),
  'timing_per_token_ms/<phase>': Label('Time per token of <phase>', 'ms per token'),
  'goodput/seconds/trainer/<class>': Label('trainer, <class>', _S),
  'goodput/seconds/servers/<class>': Label('servers, <class>', _S),
  'goodput/seconds/explorers/<class>': Label('explorers, <class>', _S),
  'goodput/seconds/scorers/<class>': Label('scorer workers, <class>', _S),
  'goodput/wall_s/<processes>': Label('Existence of <processes>', _S),
  'goodput/tokens/generated': Label('Generated tokens', _TOKENS),
  'goodput/tokens/sampled': Label('Sampled tokens', _TOKENS),
  'goodput/tokens/trained': Label('Sampled tokens, trained', _TOKENS),
  'goodput/tokens/dropped': Label('Sampled tokens, dropped', _TOKENS),
  'goodput/tokens/discarded': Label('Sampled tokens, discarded', _TOKENS),
  'goodput/tokens/partial': Label('Sampled tokens, of partial groups', _TOKENS),
  'goodput/tokens/open': Label('Sampled tokens, in progress', _TOKENS),
  'goodput/tokens/waiting': Label('Sampled tokens, waiting', _TOKENS),
  'goodput/tokens/evaluated': Label('Tokens of evaluations', _TOKENS),
  'perf/total_num_tokens': Label('Tokens of the batch', _TOKENS),
  'perf/time_per_step': Label('Time per step', _S),
  'perf/throughput': Label('Throughput', 'tokens per s and device'),
  'perf/mfu/<role>': Label('Model FLOPs utilisation of <role>', _SHARE),
  'perf/rollout_throughput': Label('Throughput of rollouts', 'tokens per s'),
  'perf/trainer_idle_s': Label('Wait for the batch', _S),
  'perf/rollout_idle_s': Label('Idle time of rollouts', _S),
  'perf/publish_write_s': Label('Writing the weights', _S),
  'perf/publish_transfer_s': Label('Fetching of weights', _S),
  'perf/publish_pause_s': Label('Pause of sampling', _S),
  'perf/publish_bytes': Label('Published weights', 'bytes'),
  'perf/publish_changed_fraction': Label('Changed elements', _SHARE),
  'perf/publish_copied_bytes': Label('Bytes copied from the devices', 'bytes'),
  'perf/packing_utilisation': Label('Packed positions in use', _SHARE),
  'perf/shared_tokens_ratio': Label('Tokens of shared prefixes', _SHARE),
  'perf/compilations': Label('Compiled programs', 'programs'),
  'perf/heartbeat_max_s': Label('Longest block of the event loop', _S),
  'perf/max_memory_allocated_gb': Label('Peak device memory', 'GB'),
  'perf/cpu_memory_used_gb': Label('Memory of the trainer', 'GB'),
  'perf/memory_<phase>_bytes': Label('Device memory in phase <phase>', 'bytes'),
  'perf/memory_moved_bytes': Label('Memory moved between phases', 'bytes'),
  'perf/open_descriptors': Label('Open files and sockets', 'files'),
  'perf/archive_s': Label('Archiving a commit', 's'),
  'perf/archive_bytes': Label('Archived bytes', 'bytes'),
  'perf/checkpoint_write_s': Label('Writing of a commit', 's'),
  'perf/disk_free_gb': Label('Free disk space', 'GB'),
  'run/mismatch_over_budget': Label('Mismatch over budget', '0 or 1'),
  'run/skipped_updates': Label('Skipped updates', 'updates'),
  'run/clock_decisions': Label('Decisions by a clock', 'decisions'),
  'run/passed_over': Label('Groups passed over for later batches', 'groups'),
  'run/dropped/<reason>': Label('Samples dropped: <reason>', 'samples'),
  'val-core/<taskset>/acc/greedy': Label('<taskset>: greedy accuracy', _SHARE),
  'val-core/<taskset>/acc/greedy/stderr': Label('<taskset>: its standard error', _SHARE),
  'val-core/<taskset>/acc/mean@<k>': Label('<taskset>: mean@<k>', _SHARE),
  'val-core/<taskset>/acc/mean@<k>/stderr': Label('<taskset>: its standard error', _SHARE),
  'val-core/<taskset>/acc/maj@<k>': Label('<taskset>: maj@<k>', _SHARE),
  'val-core/<taskset>/acc/pass@<k>': Label('<taskset>: pass@<k>', _SHARE),
  'val-core/<preferences>/rewards/accuracies': Label('<preferences>: pairs won', _SHARE),
  'val-core/<preferences>/entropy': Label('<preferences>: entropy', _NATS),
  'val-aux/<taskset>/num_tasks': Label('<taskset>: tasks', 'tasks'),
  'val-aux/<taskset>/truncated': Label('<taskset>: cut responses', _SHARE),
  'val-aux/<taskset>/unscorable': Label('<taskset>: unscorable', 'responses'),
}
"""Labels, keyed like `METRICS`. In a label, a <placeholder> is replaced by the part of the metric's
key that it matches.
"""


def label(key: str) -> Label:
  """Returns the label of a metric. If `LABELS` has no entry for it, the label is derived from the
  key.
  """
  name, parts = documented(key)
  if name not in LABELS:
    words = key.replace('_', ' ').split('/')
    return Label(': '.join(words[-2:]) if len(words) > 1 else words[0])
  entry = LABELS[name]
  text = entry.name
  for placeholder, part in parts.items():
    text = text.replace(f'<{placeholder}>', part)
  return Label(text, entry.unit)


def document() -> str:
  """Returns the text of docs/reference/metrics.md."""
  lines = [
    '# Metrics and how to read them',
    '',
    'Rows of `metrics.jsonl` carry `stage`, `training/global_step` and some of these keys; the '
    'names are verl’s where',
    'verl has one. A value that is NaN or infinite is written as `null`, with `<key>/nonfinite` '
    'beside it. The report calls',
    'a metric by its name here, and shows the key beside it.',
    'Written by `python docs/generate.py` from `jaxrl_llm/runtime/metric_descriptions.py` and '
    '`metric_names.py`.',
    '',
    '| key | name | how to read it |',
    '|---|---|---|',
  ]
  rows = []
  for key, text in METRICS.items():
    name, unit = LABELS.get(key, ('', ''))
    named = f'{name} ({unit})' if unit else name
    cells = (f'`{key}`', *(cell.replace('|', '\\|') for cell in (named, text)))
    rows.append(f'| {" | ".join(cells)} |')
  return '\n'.join([*lines, *rows, ''])
