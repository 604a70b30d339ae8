"""Every algorithm's loss: the same however its rows are cut, and the one that its formulas give,
row by row.

The oracle is NumPy in float64 on one unpacked sequence at a time, with plain loops from the
formulas; nothing in it calls the objectives, the reductions or the advantages that it is held
against. Data are off-policy: sampler, proximal policy, reference and the policy itself differ, so
that every correction, clip and divergence acts.
"""

import dataclasses
import functools
import math
import statistics
from types import SimpleNamespace

import jax
import numpy as np
import oracles
import oracles_advantages
import pytest
from learning import (
  SAMPLES,
  SETTING,
  USUAL,
  Case,
  Subject,
  assert_same,
  closed,
  columns_of,
  compute,
  experts,
  host_params,
  pairs,
  write_samples,
)

from jaxrl_llm.advantages.shaping import MuSchedule
from jaxrl_llm.core.trees import flatten, unflatten
from jaxrl_llm.learner.catalogue import ALGORITHMS

MIXED = (*USUAL[:6], *experts(), *USUAL[6:])
KL = {'kl_loss_coef': 0.1}
OPTIONS = {
  'sft': dict(loss_agg_mode='seq-mean-token-mean'),
  'grpo': dict(entropy_coeff=0.01, rollout_is_threshold=1.2, **KL),
  'dr_grpo': dict(
    kl_loss_type='k2', rollout_is='sequence', rollout_is_threshold=1.5, rollout_is_lower=0.7, **KL
  ),
  'dapo': dict(
    kl_unbiased_gradient=False,
    rollout_is='icepop',
    rollout_is_threshold=1.4,
    overlong_buffer_len=10,
    mask_truncated=True,
    **KL,
  ),
  'gspo': dict(
    clip_ratio_low=0.05, clip_ratio_high=0.1, rollout_rs_low=0.85, rollout_rs_high=1.15, **KL
  ),
  'cispo': dict(
    clip_ratio_low=0.1, clip_ratio_high=0.2, rollout_is='none', off_policy_seq_mask=0.0
  ),
  'sapo': dict(tau_pos=1.5, tau_neg=4.0, entropy_coeff=0.01, rollout_is_threshold=1.2, **KL),
  'rloo': dict(bypass_old_logprobs=True, kl_loss_type='k1', allow_zero_gradient_kl=True, **KL),
  'reinforce_plus_plus': dict(gamma=0.9, kl_reward_coef=0.1, rollout_is_lower=0.8),
  'reinforce_plus_plus_baseline': dict(loss_agg_mode='seq-mean-token-sum-norm', entropy_coeff=0.02),
  'ppo': dict(gamma=0.95, lam=0.9, kl_reward_coef=0.05, kl_reward_type='k3'),
  'opmd': dict(tau=0.3, baseline='log_partition', length_reward_weight=0.2),
  'mix': dict(
    mu=MuSchedule(kind='linear', peak=1.0, valley=0.0, decay_steps=10),
    expert_token_weight='chord',
    entropy_coeff=0.01,
    rollout_is_threshold=1.2,
    **KL,
  ),
  'dpo': dict(beta=0.5, label_smoothing=0.1, sft_loss_coef=0.2),
  'reward_model': dict(margin=0.1, center_rewards_coefficient=0.05),
}
ROWS = {'sft': experts(), 'mix': MIXED, 'dpo': pairs(), 'reward_model': pairs()}
MU_STEP = 7
"""Where the schedule of μ is at 0.3."""


VARIANTS = {name: (name, options) for name, options in OPTIONS.items()}
MORE = {
  'ppo critic': ('ppo', OPTIONS['ppo']),
  'dpo ipo': ('dpo', OPTIONS['dpo'] | {'loss_type': 'ipo', 'label_smoothing': 0.0}),
  'opmd mean': ('opmd', OPTIONS['opmd'] | {'baseline': 'mean'}),
  'grpo k2 sums': (
    'grpo',
    OPTIONS['grpo'] | {'kl_loss_type': 'k2', 'loss_agg_mode': 'seq-mean-token-sum'},
  ),
  'mix plain': (
    'mix',
    OPTIONS['mix'] | {'expert_token_weight': 'none', 'expert_loss_agg_mode': 'seq-mean-token-mean'},
  ),
}
CONFIGS = {
  label: ALGORITHMS[name][0](**options) for label, (name, options) in (VARIANTS | MORE).items()
}
SUBJECTS = {
  label: Subject(
    ALGORITHMS[name][1](CONFIGS[label], SETTING),
    ROWS.get(name, USUAL),
    of_critic=label == 'ppo critic',
  )
  for label, (name, _) in (VARIANTS | MORE).items()
}
INVARIANT = [*OPTIONS, 'ppo critic']
HEADS = {'grpo', 'reward_model', 'ppo critic'}
"""One loss of each head: what the fast tier cuts in two ways."""
CUTS = [{'chunks': 12}, {'chunks': 2, 'chunk_len': 48, 'token_chunk': 8}]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('rows')
  write_samples(path)
  return path


def found_of(folder, name, **cut):
  return compute(folder, SUBJECTS[name], **{'model': 'bigram', 'step': MU_STEP, **CUTS[0], **cut})


def test_every_algorithm_is_here():
  assert {*OPTIONS} == {*ALGORITHMS}


@pytest.mark.parametrize(
  'name',
  [name if name in HEADS else pytest.param(name, marks=pytest.mark.full) for name in INVARIANT],
)
def test_micro_batches_packing_padding_and_chunks_change_nothing(folder, name):
  first, second = (found_of(folder, name, **cut) for cut in CUTS)
  assert first.loss != 0.0
  assert_same(first, second)
  for key, stat in first.stats.items():
    np.testing.assert_allclose(second.stats[key], stat, rtol=1e-5, atol=1e-6, err_msg=key)


PACKED = {'chunks': 3, 'chunk_len': 48, 'token_chunk': 8, 'scan': True, 'remat': 'full'}
SHARDED = {'chunks': 2, 'axes': (('fsdp', 2), ('sequence', 2), ('tensor', 2))}


LAYOUTS = {'float32': [PACKED], 'float64': [PACKED, SHARDED]}
IN_FULL = {
  *((name, 'float64') for name in (*HEADS, 'mix', 'dpo')),
  ('grpo', 'float32'),
}
"""Losses of each head, of mixed rows and of pairs. Every loss is cut on the bigram model."""


@pytest.mark.full
@pytest.mark.parametrize(
  ('name', 'precision'),
  [
    pytest.param(
      name, precision, marks=() if (name, precision) in IN_FULL else pytest.mark.acceptance
    )
    for name in INVARIANT
    for precision in LAYOUTS
  ],
)
def test_nothing_about_the_layout_changes_the_decoders_gradient(folder, name, precision):
  """The cuts: micro-batches, packing, padding, chunk sizes and scanned layers; and a sharded batch
  and model.
  """
  whole = found_of(folder, name, model='decoder', dtype=precision)
  for cut in LAYOUTS[precision]:
    assert_same(found_of(folder, name, model='decoder', dtype=precision, **cut), whole, precision)


MESHES = [{'fsdp': 8}, {'sequence': 8}, {'tensor': 2}, {'data': 2, 'fsdp': 2, 'sequence': 2}]


@pytest.mark.acceptance
@pytest.mark.parametrize('precision', ['float32', 'float64'])
@pytest.mark.parametrize('axes', MESHES, ids=str)
@pytest.mark.parametrize('name', ['grpo', 'ppo', 'ppo critic', 'dpo', 'sft'])
def test_no_mesh_changes_the_decoders_gradient(folder, name, axes, precision):
  whole = found_of(folder, name, model='decoder', dtype=precision)
  found = found_of(
    folder, name, model='decoder', dtype=precision, chunks=2, axes=tuple(axes.items())
  )
  assert_same(found, whole, precision)


ACTING = {
  'grpo': ('actor/pg_clipfrac',),
  'dapo': ('actor/pg_clipfrac',),
  'gspo': ('actor/pg_clipfrac', 'rollout_corr/rollout_rs_masked_fraction'),
  'cispo': ('actor/pg_clipfrac', 'actor/off_policy_masked_fraction'),
  'ppo critic': ('critic/vf_clipfrac',),
  'reward_model': ('rewards/accuracies',),
}


@pytest.mark.parametrize('name', ACTING)
def test_the_data_are_on_both_sides_of_what_cuts(folder, name):
  stats = found_of(folder, name).stats
  for key in ACTING[name]:
    assert 0 < stats[key].total < stats[key].count, key


def says(params, head: str, i: int) -> SimpleNamespace:
  """What the bigram model makes of sample `i` alone: entry t speaks of token t, nothing of the
  first.
  """
  tokens = SAMPLES[i].tokens
  hidden = params['embed']['kernel'][tokens] * params['norm']['scale']
  outputs = hidden @ params['head']['kernel'].T
  if head != 'lm':
    return SimpleNamespace(values=np.r_[0.0, outputs[:-1, 0]], score=outputs[-1, 0])
  table = outputs[:-1] / SAMPLES[i].temperature
  table = table - np.log(np.exp(table).sum(-1, keepdims=True))
  logprobs = table[np.arange(len(tokens) - 1), tokens[1:]]
  return SimpleNamespace(
    logprobs=np.r_[0.0, logprobs], entropy=np.r_[0.0, -(np.exp(table) * table).sum(-1)]
  )


def mean_over(mode: str, parts, scale: float) -> float:
  """The aggregation of (values, mask) of rows, each of which counts where any of its tokens
  does.
  """
  own = [values[mask] for values, mask in parts if mask.any()]
  sums = math.fsum(x for values in own for x in values)
  if not own:
    return 0.0
  return {
    'token-mean': lambda: sums / sum(map(len, own)),
    'seq-mean-token-sum': lambda: sums / len(own),
    'seq-mean-token-mean': lambda: math.fsum(values.mean() for values in own) / len(own),
    'seq-mean-token-sum-norm': lambda: sums / len(own) / scale,
  }[mode]()


def shaped(config, rows) -> list[float | None]:
  lengths = [row.length - row.prompt_len for row in rows]
  extra = [0.0] * len(rows)
  if config.overlong_buffer_len:
    room = SETTING.max_response_length, config.overlong_buffer_len
    extra = [oracles_advantages.overlong(n, *room, config.overlong_penalty_factor) for n in lengths]
  if config.length_reward_weight:
    found = oracles_advantages.length_reward(
      lengths, [row.correct for row in rows], [row.group for row in rows]
    )
    extra = [config.length_reward_weight * x for x in found]
  return [None if row.reward is None else row.reward + x for row, x in zip(rows, extra)]


def of_trajectories(rows, rewards):
  """With the rewards of their turns."""
  return [
    None if reward is None else reward + sum(row.turn_rewards) for row, reward in zip(rows, rewards)
  ]


def estimated(config, rows):
  """(advantages, returns, whether in the loss), all per token of each row."""
  rewards, groups = shaped(config, rows), [row.group for row in rows]
  columns, masks = (
    [columns_of('bigram')[row.index] for row in rows],
    [SAMPLES[row.index].loss_mask for row in rows],
  )
  in_loss = [reward is not None for reward in rewards]
  if config.mask_unmixed_groups:
    scores = of_trajectories(rows, [row.reward for row in rows])

    def of(group):
      return {score for row, score in zip(rows, scores) if row.group == group and score is not None}

    in_loss = [scored and len(of(group)) > 1 for scored, group in zip(in_loss, groups)]
  if config.mask_truncated:
    in_loss = [scored and not row.truncated for scored, row in zip(in_loss, rows)]
  live = [mask & scored for mask, scored in zip(masks, in_loss)]
  returns, kind = None, config.adv_estimator

  def minus_mean(reward, values, _):
    return reward - statistics.fmean(values)

  whole = of_trajectories(rows, rewards)
  if kind == 'grpo':

    def divisor(values):
      return statistics.stdev(values) + 1e-6 if config.norm_adv_by_std else 1.0

    by_row = oracles_advantages.of_group(
      whole, groups, lambda r, v, i: minus_mean(r, v, i) / divisor(v)
    )
  elif kind == 'rloo':
    by_row = oracles_advantages.leave_one_out(whole, groups)
  else:
    by_row = oracles_advantages.of_group(whole, groups, minus_mean)
  advantages = [np.full(len(mask), advantage) for mask, advantage in zip(masks, by_row)]
  if kind in ('reinforce_plus_plus', 'gae'):
    dense = []
    for row, reward, mask, own in zip(rows, rewards, live, columns):
      penalty = oracles.kl_estimate(
        own['proximal_logprobs'][None].astype(float),
        own['reference_logprobs'][None].astype(float),
        mask[None],
        kind=config.kl_reward_type,
      )[0]
      placed = oracles_advantages.placed(mask, reward or 0.0, row.turn_rewards)
      dense.append([r - config.kl_reward_coef * k for r, k in zip(placed, penalty)])
    if kind == 'gae':
      values = [own['values'].astype(float) for own in columns]
      found = [
        oracles_advantages.gae(r, v, m, config.gamma, config.lam)
        for r, v, m in zip(dense, values, live)
      ]
      advantages, returns = [a for a, _ in found], [np.array(r) for _, r in found]
    else:
      advantages = [oracles_advantages.returns(r, m, config.gamma) for r, m in zip(dense, live)]
  if kind not in ('grpo', 'rloo'):
    advantages = oracles_advantages.whitened(advantages, live, 1e-8, True)
  return [np.array(a) for a in advantages], returns, in_loss


def policy_parts(config, says_now, held, own, advantages, mask):
  """Per token of one row: the policy's loss with its weights, and the divergence."""

  def place(x):
    return np.asarray(x, np.float64)[None]

  logprobs, before, mask = place(says_now.logprobs), place(held.logprobs), mask[None]
  behaviour, advantages, ids = (
    place(own['behaviour_logprobs']),
    place(advantages),
    np.ones(mask.shape, int),
  )
  proximal = behaviour if config.bypass_old_logprobs else place(own['proximal_logprobs'])
  clip = dict(low=config.clip_ratio_low, high=config.clip_ratio_high)
  if config.policy_loss == 'cispo':
    ratio = oracles.token_log_ratio(before, proximal, mask)
    loss, _ = oracles.cispo(ratio, logprobs, advantages, mask, **clip)
  elif config.policy_loss == 'sapo':
    ratio = oracles.token_log_ratio(logprobs, proximal, mask)
    loss = oracles.sapo(ratio, advantages, mask, tau_pos=config.tau_pos, tau_neg=config.tau_neg)
  else:
    ratio = oracles.token_log_ratio(logprobs, proximal, mask)
    if config.policy_loss == 'gspo':
      ratio = oracles.sequence_log_ratio(logprobs, proximal, mask, ids, held=before)
    loss, *_ = oracles.clipped_surrogate(ratio, advantages, mask, c=config.clip_ratio_c, **clip)
  if config.rollout_is != 'none' and not config.bypass_old_logprobs:
    loss = loss * oracles.importance_weights(
      proximal,
      behaviour,
      mask,
      ids,
      mode=config.rollout_is,
      threshold=config.rollout_is_threshold,
      lower=config.rollout_is_lower,
    )
  if config.rollout_rs_low is not None:
    bounds = dict(low=config.rollout_rs_low, high=config.rollout_rs_high)
    loss = loss * oracles.sequence_mask(proximal, behaviour, mask, ids, **bounds)
  if config.off_policy_seq_mask is not None:
    threshold = config.off_policy_seq_mask
    loss = loss * oracles.negative_sequence_mask(
      behaviour, before, advantages, mask, ids, threshold=threshold
    )
  kl = oracles.kl_estimate(
    logprobs, place(own['reference_logprobs']), mask, kind=config.kl_loss_type
  )
  if config.kl_loss_type != 'k1' and config.kl_unbiased_gradient:
    # The ratio of k2 is held constant.
    kl = kl * np.exp(
      oracles.token_log_ratio(before if config.kl_loss_type == 'k2' else logprobs, proximal, mask)
    )
  return loss[0], kl[0]


def policy_oracle(config, rows, now, held) -> float:
  advantages, _, in_loss = estimated(config, rows)
  columns, parts = columns_of('bigram'), {'policy': [], 'kl': [], 'entropy': []}
  for row, advantage, live in zip(rows, advantages, in_loss):
    mask = SAMPLES[row.index].loss_mask & live
    loss, kl = policy_parts(
      config, now[row.index], held[row.index], columns[row.index], advantage, mask
    )
    for name, values in (('policy', loss), ('kl', kl), ('entropy', now[row.index].entropy)):
      parts[name].append((values, mask))
  scale = config.loss_scale_factor or SETTING.max_response_length
  mean = {name: mean_over(config.loss_agg_mode, own, scale) for name, own in parts.items()}
  return mean['policy'] + config.kl_loss_coef * mean['kl'] - config.entropy_coeff * mean['entropy']


def critic_oracle(config, rows, now, held) -> float:
  _, returns, in_loss = estimated(config, rows)
  parts = []
  for row, target, live in zip(rows, returns, in_loss):
    mask, old = SAMPLES[row.index].loss_mask & live, columns_of('bigram')[row.index]['values']
    losses, _ = oracles.value_loss(
      now[row.index].values, old, target, mask, cliprange=config.cliprange_value
    )
    parts.append((losses, mask))
  return mean_over('token-mean', parts, 1.0)


def sft_oracle(config, rows, now, held) -> float:
  parts = [(-now[row.index].logprobs, SAMPLES[row.index].loss_mask) for row in rows]
  return mean_over(config.loss_agg_mode, parts, SETTING.max_response_length)


def mix_oracle(config, rows, now, held) -> float:
  mu = 1.0 - MU_STEP / config.mu.decay_steps
  parts = []
  for row in rows:
    if row.is_expert:
      p = np.exp(held[row.index].logprobs)
      weight = p * (1 - p) if config.expert_token_weight == 'chord' else 1.0
      parts.append((-weight * now[row.index].logprobs, SAMPLES[row.index].loss_mask))
  imitation = mean_over(config.expert_loss_agg_mode, parts, SETTING.max_response_length)
  usual = [row for row in rows if not row.is_expert]
  return (1 - mu) * policy_oracle(config, usual, now, held) + mu * imitation


def opmd_oracle(config, rows, now, held) -> float:
  rewards, groups = of_trajectories(rows, shaped(config, rows)), [row.group for row in rows]
  if config.baseline == 'mean':

    def rule(reward, values, _):
      return reward - statistics.fmean(values)

    advantages = oracles_advantages.of_group(rewards, groups, rule)
  else:
    advantages = oracles_advantages.log_partition(rewards, groups, config.tau)
  losses = []
  for row, reward, advantage in zip(rows, rewards, advantages):
    if reward is not None:
      mask = SAMPLES[row.index].loss_mask
      ratio = (now[row.index].logprobs - columns_of('bigram')[row.index]['reference_logprobs'])[
        mask
      ].sum()
      losses.append(-ratio * advantage + config.tau / 2 * ratio**2)
  return math.fsum(losses) / len(losses)


def of_pairs(rows, value):
  """(chosen, rejected) of `value(row)` for each pair."""
  sides: dict[str, dict[int, float]] = {}
  for row in rows:
    sides.setdefault(row.pair, {})[row.label] = value(row)
  return [(both[1], both[-1]) for both in sides.values()]


def dpo_oracle(config, rows, now, held) -> float:
  def ratio(row):
    mask = SAMPLES[row.index].loss_mask
    values = (now[row.index].logprobs - columns_of('bigram')[row.index]['reference_logprobs'])[mask]
    return values.mean() if config.loss_type == 'ipo' else values.sum()

  h = [a - b for a, b in of_pairs(rows, ratio)]
  losses = oracles.dpo_loss(
    h, beta=config.beta, label_smoothing=config.label_smoothing, kind=config.loss_type
  )
  answers = [
    (-now[row.index].logprobs, SAMPLES[row.index].loss_mask) for row in rows if row.label == 1
  ]
  return losses.mean() + config.sft_loss_coef * mean_over('token-mean', answers, 1.0)


def reward_model_oracle(config, rows, now, held) -> float:
  scores = of_pairs(rows, lambda row: now[row.index].score)
  losses = [
    -oracles.log_sigmoid(a - b - config.margin) + config.center_rewards_coefficient * (a + b) ** 2
    for a, b in scores
  ]
  return math.fsum(losses) / len(losses)


ORACLES = {
  'sft': sft_oracle,
  'ppo critic': critic_oracle,
  'opmd': opmd_oracle,
  'mix': mix_oracle,
  'dpo': dpo_oracle,
  'reward_model': reward_model_oracle,
}


def oracle(label: str):
  """The loss as a function of the parameters and of those that stand under its stop-gradients."""
  subject, name = SUBJECTS[label], (VARIANTS | MORE)[label][0]
  of = functools.partial(
    ORACLES.get(label) or ORACLES.get(name) or policy_oracle, CONFIGS[label], subject.rows
  )

  def outputs(params):
    return {row.index: says(params, subject.head, row.index) for row in subject.rows}

  return lambda params, held: of(outputs(params), outputs(held))


@pytest.mark.parametrize('label', SUBJECTS)
def test_loss_and_gradient_are_those_of_the_formulas_on_unpacked_rows(folder, label):
  """Data are float32 on the devices, and some sums of theirs too: so far, and no farther, may the
  two differ.
  """
  found, loss = found_of(folder, label), oracle(label)
  params = jax.tree.map(lambda x: x.astype(np.float64), host_params('bigram', SUBJECTS[label].head))
  assert found.loss == pytest.approx(loss(params, params), rel=2e-6, abs=2e-7)
  rng, step = np.random.default_rng(5), 1e-5
  flat = flatten(params)
  for name, grad in flatten(found.grads).items():
    # Along the gradient and across it: a wrong entry anywhere shows in the second part.
    norm, other = np.linalg.norm(grad), rng.normal(size=grad.shape)
    for direction in (grad / norm, other / np.linalg.norm(other)):
      up, down = (
        loss(unflatten(flat | {name: flat[name] + sign * step * direction}), params)
        for sign in (1, -1)
      )
      assert (up - down) / (2 * step) == pytest.approx((grad * direction).sum(), abs=2e-6 * norm), (
        name
      )


def times(factor: float, found):
  return found._replace(
    loss=factor * found.loss, grads=jax.tree.map(lambda g: factor * g, found.grads)
  )


@pytest.mark.parametrize(
  ('rows', 'step', 'factor', 'wanted'),
  [
    (MIXED, 10, 1.0, 'grpo'),
    (MIXED, 0, 1.0, 'sft'),
    # A step of one kind alone: the other term is 0, and divides nothing by nothing.
    (USUAL, MU_STEP, 0.7, 'grpo'),
    (experts(), MU_STEP, 0.3, 'sft'),
  ],
  ids=['mu 0', 'mu 1', 'usual rows alone', 'experts alone'],
)
def test_mix_is_grpo_on_its_usual_rows_and_sft_on_its_experts(folder, rows, step, factor, wanted):
  found = found_of(folder, 'mix plain', rows=rows, step=step, room=len(MIXED))
  assert_same(found, times(factor, found_of(folder, wanted)))


def test_what_experts_would_score_changes_nothing():
  algorithm = SUBJECTS['mix'].algorithm
  scored = tuple(dataclasses.replace(row, reward=5.0) if row.is_expert else row for row in MIXED)
  one, other = (
    algorithm.annotate(closed(algorithm, rows, step=MU_STEP)) for rows in (MIXED, scored)
  )
  np.testing.assert_array_equal(one.advantages, other.advantages)
  np.testing.assert_array_equal(
    one.in_loss, [row.is_expert or row.reward is not None for row in MIXED]
  )
  assert one.rewards == other.rewards and one.metrics == other.metrics
  assert one.constants == {'kl_coef': 0.1, 'mu': pytest.approx(0.3)}


TWO_RANKS = {'axes': (('fsdp', 2),), 'chunks': 2}


def test_pairs_share_rank_and_micro_batch_wherever_rows_lie(folder):
  case = Case(folder, rows=pairs(), model='bigram', **TWO_RANKS)
  packed, _ = case.packed(SUBJECTS['dpo'].algorithm)
  packing, places = packed.packing, {}
  for i, row in enumerate(case.plan.rows):
    rank = int(packing.chunk[i]) // packing.chunks
    places.setdefault(row.pair, []).append((int(packing.micro_batch[i]), rank))
  assert len(places) == 6 and len(set(map(tuple, places.values()))) > 2  # not all in one place
  for first, second in places.values():
    assert first == second


@pytest.mark.parametrize(
  'name',
  [
    'reward_model',
    pytest.param('dpo', marks=pytest.mark.full),
    pytest.param('ppo critic', marks=pytest.mark.full),
  ],
)
def test_two_ranks_change_nothing(folder, name):
  assert_same(found_of(folder, name, **TWO_RANKS), found_of(folder, name))


def test_the_order_of_a_pair_changes_nothing(folder):
  order = tuple(np.random.default_rng(4).permutation(len(pairs())).tolist())
  assert_same(found_of(folder, 'dpo', order=(order,)), found_of(folder, 'dpo'))
