"""Descriptions of all metrics: what each key measures, and how to interpret its values."""

from __future__ import annotations

import re

_SPREAD = {'mean': 'Mean', 'max': 'Largest', 'min': 'Smallest'}


def _of(prefix: str, quantity: str, reading: str) -> dict[str, str]:
  return {
    f'{prefix}/{kind}': f'{word} {quantity}. {reading}'.strip() for kind, word in _SPREAD.items()
  }


METRICS: dict[str, str] = {
  'training/global_step': (
    'Completed optimizer batches when the row was written; the x-axis of every curve.'
  ),
  # Metrics of the policy update.
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
  # Metrics of preference pairs, with the names that TRL uses.
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
  # Metrics of the critic.
  'critic/loss': "All terms of the critic's loss.",
  'critic/vf_loss': 'Half the squared error of the values, clipped as configured. Should fall.',
  'critic/vf_clipfrac': 'Share of tokens whose value was clipped by cliprange_value.',
  'critic/vpred_mean': "Mean of the critic's values at its update.",
  'critic/grad_norm': "Global norm of the critic's gradient before clipping.",
  'critic/lr': "The critic's learning rate.",
  # Metrics of rewards.
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
  # Metrics of lengths.
  **_of(
    'response_length',
    'response length in tokens',
    'A sudden rise with falling reward indicates rambling.',
  ),
  'response_length/clip_ratio': (
    'Share of responses cut at the token limit. Above 0.1, the limit distorts training.'
  ),
  'response_length/limit': (
    "Token limit of the batch's responses: the highest at which any of its groups began. Only with "
    'source.response_lengths.'
  ),
  **_of('prompt_length', 'prompt length in tokens', ''),
  **_of('num_turns', 'turns (runs of tokens that the policy wrote) per trajectory', ''),
  **_of('num_steps', 'steps (samples) per trajectory', 'Absent with rollout.max_steps=1.'),
  'response/max_steps_ratio': (
    'Share of trajectories that rollout.max_steps ended. Absent with rollout.max_steps=1.'
  ),
  'response/aborted_ratio': (
    'Share of responses that the engine or the workflow aborted. Should be 0.'
  ),
  'response/repetition_ratio': (
    'Share of responses that rollout.repetition_detection ended. A rise precedes collapse; the '
    'processor `repetition` penalises them.'
  ),
  # Metrics of speculative decoding.
  'speculation/accepted_ratio': (
    'Share of the drafted tokens that were accepted, with rollout.embedded.speculation. If it is '
    'low, drafts cost more than they save: draft fewer tokens or none.'
  ),
  'speculation/tokens_per_step': (
    'Tokens that a slot samples per decode step, with rollout.embedded.speculation. At least 1, '
    'without accepted drafts, and at most 1 + speculation.tokens.'
  ),
  # Metrics of a run that trains on the rollouts of a separate run, the run that explores.
  'explore/version': (
    "Step of the trainer's version with which the rollouts were generated (`follow`), the newest "
    'of the batch.'
  ),
  'explore/open': 'Groups copied from the run that explores, which wait for a batch (`Followed`).',
  'explore/expired': (
    'Groups of that run that became older than the bound. Many: it explores faster than this run '
    'trains; set batches_per_version there.'
  ),
  'explore/voided': (
    'Copied groups that were dropped, because that run was killed and had not committed them.'
  ),
  'explore/voided_trained': 'Groups that were already trained on when that happened.',
  'explore/left_out': (
    'Groups of that run that were not copied: of other tasks, too long, shared again after a '
    'restart, or of weights that this run did not train again after a kill.'
  ),
  'perf/unread_batches': (
    'Batches that the run that explores has shared and this run has not read. Above 0, the trainer '
    'is the slower one.'
  ),
  # Metrics of partial rollouts.
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
  'rollout_corr/lag/<n>/kl': (
    'kl of the tokens whose weights were n updates old, if any rollout was continued across a '
    'weight update. Rises with n, because the policy has learned since.'
  ),
  'rollout_corr/lag/<n>/k3_kl': (
    'k3_kl of the tokens whose weights were n updates old. At n = 0, it is what kept keys and '
    'values of older weights (kv: keep) change, besides numerical differences.'
  ),
  'rollout_corr/lag/<n>/tokens': 'Number of those tokens.',
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
  # Metrics of time.
  'timing_s/gen': 'Seconds of generating the rollouts of the step.',
  'timing_s/reward': (
    'Seconds waited for scores after the last rollout ended. Near 0 if scoring keeps up with '
    'generation.'
  ),
  'timing_s/reward_model': (
    "Seconds of the passes of the trainer's reward model; absent if the trainer has none."
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
  'timing_s/save_checkpoint': (
    'Seconds for which the commit after the previous step blocked training: the wait for the '
    'commit before it, and the copy of the state to host memory. Its files are written beside '
    'training (`perf/checkpoint_write_s`).'
  ),
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
  'perf/direct_delivered': (
    'Completions that explorers fetched from servers and delivered (rollout.explorers.direct).'
  ),
  'perf/direct_undelivered': (
    'Completions that an explorer was to fetch but did not deliver. The master collects these from '
    "the server's front or, if nobody has requested them, requests them itself."
  ),
  'perf/direct_expired': (
    'Completions in perf/direct_undelivered whose tickets expired, because the explorer delivered '
    'no recent part for rollout.explorers.ticket_s.'
  ),
  'perf/direct_late': (
    'Deliveries for tickets that had expired or were no longer needed; they are refused.'
  ),
  'perf/direct_refused': (
    "Deliveries without the right signature of the server's front, or that nobody had asked for; "
    'each of them evicts its explorer.'
  ),
  'perf/rollout_idle_s': (
    'Seconds since the previous step in which no group was generated or scored.'
  ),
  'perf/publish_write_s': (
    'Seconds of gathering, converting and writing the weights (vLLM servers).'
  ),
  'perf/publish_transfer_s': (
    "Longest time for a host to fetch a version (transfer='pull'); its servers sample meanwhile."
  ),
  'perf/publish_pause_s': 'Longest time that a publication kept a server from sampling.',
  'perf/publish_bytes': (
    'Bytes that were written to publish the version: those of its whole tensors, of a delta, or of '
    'both if a server could not use the delta.'
  ),
  'perf/publish_changed_fraction': (
    'Share of elements whose bits differ from the version before, in the data type of the servers '
    '(`rollout.vllm.full_every` above 1).'
  ),
  'perf/publish_copied_bytes': (
    'Bytes that process 0 copied from its devices to publish the version '
    "(`rollout.vllm.compare='devices'`)."
  ),
  'perf/packing_utilisation': (
    'Share of the packed positions that hold a token. Below 0.7, the chunk sizes fit poorly.'
  ),
  'perf/shared_tokens_ratio': (
    "Share of the batch's tokens that the update and its passes do not compute, since they belong "
    'to a prefix that is computed for another sequence (`learner.share_prefixes`).'
  ),
  'perf/compilations': (
    'Programs compiled in the step. 0 after warm-up; otherwise some shapes were not planned.'
  ),
  'perf/heartbeat_max_s': (
    'Longest time the event loop was blocked in the step. Above 0.05, something blocks it.'
  ),
  'perf/mfu/<role>': (
    "Model FLOPs utilisation: operations that the model's arithmetic needs, without recomputation "
    "and padding, as a share of the devices' peak in the phase. Roles: actor and critic (updates), "
    'actor_infer, ref and critic_infer (forward passes). Absent where the peak is unknown; '
    '`logging.peak_tflops` states it.'
  ),
  'perf/max_memory_allocated_gb': (
    'Peak of the device memory in use since the start, GB; absent on CPUs.'
  ),
  'perf/cpu_memory_used_gb': (
    "Resident memory of the trainer's process, GB. It includes the published files in shared "
    'memory that the process has mapped, up to three versions. A steady rise indicates a leak.'
  ),
  'perf/memory_<phase>_bytes': (
    'Bytes of all arrays in the memory of a device at the beginning of the memory phase: the total '
    "of the ledger's entry in events.jsonl."
  ),
  'perf/memory_moved_bytes': (
    'Bytes of a device that the memory phases of the step moved to the host or disk, or back.'
  ),
  'perf/open_descriptors': (
    "Open files and sockets of the trainer's process. A steady rise indicates a leak."
  ),
  'perf/archive_s': (
    'Seconds in which the newest commit was copied to the archive, beside training.'
  ),
  'perf/archive_bytes': (
    'Bytes that the newest commit added to the archive. Unchanged files count 0.'
  ),
  'perf/checkpoint_write_s': (
    'Seconds from the copy of the state to the end of the newest commit, beside training; in the '
    'row of the step after that. Above the seconds between two commits, each waits for the one '
    'before it: raise checkpoint.every_steps, or use a faster disk.'
  ),
  'perf/disk_free_gb': "Free space on the run directory's disk, GB.",
  'perf/<name>': 'Another measure of speed or memory.',
  # Goodput. Each class is measured independently, so the sum shows whether any time is missing.
  'goodput/seconds/trainer/<class>': (
    "Seconds of the trainer's process since the previous row: `generate` (an engine in the process "
    'samples), `wait` (for rollouts, scores or the other processes), `load` (of the rows), `train` '
    '(passes, advantages and updates), `publish`, `evaluate`, `commit`, `record` (writing metrics '
    'and rollouts), `move` (memory phases), `start` (of a stage), `loop` (between the parts of a '
    'step) or `recompute` (a step that a crash undid).'
  ),
  'goodput/seconds/servers/<class>': (
    'Seconds of all servers since the previous row: `generate` (at least one request), `idle` '
    '(serving, without a request), `publish` (held for an update), `released` (asleep or stopped '
    'for a memory phase) or `down` (starting or being repaired). Evaluations are in `generate`.'
  ),
  'goodput/seconds/explorers/<class>': (
    'Seconds of all connected explorers since the previous row: `work` (they hold a group) or '
    '`idle`.'
  ),
  'goodput/seconds/scorers/<class>': (
    'Seconds of all scorer workers since the previous row: `score`, `idle` or `start`.'
  ),
  'goodput/wall_s/<processes>': (
    'Seconds for which these processes existed since the previous row, summed over them. The '
    'classes of their seconds add up to it, to about 1 %; where they do not, something was not '
    'measured. In the first row, servers and scorers have also the seconds of their start.'
  ),
  'goodput/tokens/generated': (
    'Tokens that the engine sampled or its servers returned since the previous row. Over all rows '
    'up to one, it is trained + dropped + discarded + evaluated, plus the waiting, partial and '
    'open of that row. Tokens in flight when the run was killed are missing, and so are those of a '
    'parent in a branch.'
  ),
  'goodput/tokens/sampled': (
    'Tokens of the samples that finished and were stored since the previous row. Over all rows up '
    'to one, it is trained + dropped + the waiting of that row, but not across a branch with '
    '--reset_store.'
  ),
  'goodput/tokens/trained': 'Sampled tokens of the new groups of the batch.',
  'goodput/tokens/dropped': 'Sampled tokens of stored samples that no batch will contain.',
  'goodput/tokens/discarded': (
    'Sampled tokens that no stored sample contains: of groups that took too long or were given up, '
    'of tries that were repeated, of weights that were not proven, and after a repetition.'
  ),
  'goodput/tokens/waiting': 'Sampled tokens of finished groups that wait for a batch.',
  'goodput/tokens/partial': 'Sampled tokens of groups that wait to be continued.',
  'goodput/tokens/open': 'Sampled tokens of groups that are being generated.',
  'goodput/tokens/evaluated': 'Tokens that an evaluation sampled.',
  # Metrics of the run as a whole.
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
  'run/engine_continued': (
    'Answers that were continued since the previous step after the tokens that a lost server had '
    'sent of them.'
  ),
  'run/engine_kept_tokens': (
    'Tokens of answers of lost servers that were kept since the previous step, so that they need '
    'not be sampled again.'
  ),
  'run/engine_lost_tokens': (
    'Tokens that had arrived from servers that were then lost, since the previous step, but were '
    'not kept, because it was not known for certain which weights sampled them. Tokens that had '
    'not arrived are unknown, at most rollout.vllm.stream for each answer.'
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
  'run/experts/arrived': (
    'Expert rows (jaxrl experts, corrections) that the run took into its store before the batch. '
    'Absent without source.experts, like run/experts/added and run/experts/waiting.'
  ),
  'run/experts/added': (
    'Added expert rows in the batch; demonstrations take the remaining places of experts.ratio.'
  ),
  'run/experts/waiting': (
    'Added expert rows in the store that later batches train on. If it grows, raise experts.ratio.'
  ),
  'run/awaiting/joined': (
    'Groups that joined a batch because their delayed rewards had arrived, while the batch was '
    'collected; counted in run/clock_decisions. Absent without a scorer of kind delayed.'
  ),
  'run/awaiting/open': (
    'Groups that wait for delayed rewards when the batch is complete. If it stays at max_groups, '
    'generation waits for the people who judge.'
  ),
  'run/passed_over': (
    'Groups that started before one of the batch and are left for later batches: unfinished ones, '
    'and finished ones that may wait longer than a group of the batch. Absent with the batch '
    'policy in_order; counted in run/clock_decisions.'
  ),
  'run/split_trajectories': (
    'Trajectories of the batch that have more than one step. Absent with rollout.max_steps=1.'
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
  # Metrics of evaluations.
  'val-core/<taskset>/acc/greedy': (
    'Share of held-out tasks solved by greedy decoding. The number to report.'
  ),
  'val-core/<taskset>/acc/greedy/stderr': 'Standard error of the greedy accuracy.',
  'val-core/<taskset>/acc/mean@<k>': 'Mean share solved over k samples per task.',
  'val-core/<taskset>/acc/mean@<k>/stderr': 'Standard error of that mean, over tasks.',
  'val-core/<taskset>/acc/maj@<k>': (
    'Share of tasks whose most frequent answer among k samples is correct. Equally frequent '
    'answers count in equal parts.'
  ),
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
