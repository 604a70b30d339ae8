"""Equality with the six libraries that no test runs: our functions against numbers that theirs gave
once.

tests/support/fixtures/peers_recorded.json holds, for each case, the function that was called, its
options, its inputs (names of columns, all made for this purpose) and what came back: values, and
gradients where the function has one. Here stand our arguments for each case. What
docs/reference/equality.md calls a deviation is asserted as one, where possible by the step that
turns our numbers into theirs.
"""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import FIXTURES

from jaxrl_llm.advantages.group import group_advantages, leave_one_out, unequal
from jaxrl_llm.advantages.shaping import AdaptiveKl, adapted, overlong_penalty
from jaxrl_llm.advantages.tokens import kl_penalty, masked_gae, place_rewards, token_returns, whiten
from jaxrl_llm.batching.chunks import Chunks, shapes
from jaxrl_llm.learner.algorithm import Setting
from jaxrl_llm.learner.policy_gradient import policy_gradient
from jaxrl_llm.learner.policy_options import CispoConfig, GrpoConfig, GspoConfig, PpoConfig
from jaxrl_llm.learner.preference import DpoConfig, dpo
from jaxrl_llm.objectives.correction import importance_weights
from jaxrl_llm.objectives.divergence import kl_estimate, unbiased_kl
from jaxrl_llm.objectives.policy import clipped_surrogate, sequence_log_ratio, token_log_ratio
from jaxrl_llm.objectives.preference import bradley_terry_loss, dpo_loss
from jaxrl_llm.objectives.supervised import negative_log_likelihood
from jaxrl_llm.objectives.value import value_loss
from jaxrl_llm.ops.logprobs import TokenLogprobs, TokenValues
from jaxrl_llm.ops.reduce import aggregate

RECORD = json.loads((FIXTURES / 'peers_recorded.json').read_text())
COLUMNS = {name: np.asarray(column) for name, column in RECORD['inputs'].items()}
CASES = {case['case']: case for case in RECORD['cases']}
TOLERANCE = {'float64': 1e-8, 'float32': 1e-6, 'epsilon': 1e-7}
"""Tolerances by a peer's precision; 'epsilon' is float64 with 1e-8 in a denominator, which a ratio
of e¹² magnifies.
"""
ROWS, TIME = COLUMNS['mask'].shape
SETTING = Setting(max_response_length=TIME)


@pytest.fixture(autouse=True)
def _float64():
  with jax.enable_x64(True):
    yield


def inputs_of(case):
  return {role: COLUMNS[name] for role, name in case['inputs'].items()}


def assert_same(case, name, ours, *, where=None):
  """`ours` is what the peer gave, as near as its precision allows; only at `where`, if given."""
  theirs, ours = (
    np.asarray(case['expected'][name]),
    np.asarray(ours).reshape(np.shape(case['expected'][name])),
  )
  if where is not None:
    assert np.any(where)
    theirs, ours = theirs[where], ours[where]
  tolerance = TOLERANCE[case['precision']]
  np.testing.assert_allclose(
    ours, theirs, rtol=tolerance, atol=tolerance * max(np.abs(theirs).max(), 1e-3)
  )


def assert_not_same(case, name, ours, *, where):
  """At each of `where`, ours is something else by far more than rounding."""
  theirs, ours = (
    np.asarray(case['expected'][name]),
    np.asarray(ours).reshape(np.shape(case['expected'][name])),
  )
  assert np.any(where) and (np.abs(ours - theirs)[where] > 1e-4 * np.abs(theirs)[where]).all()


def assert_loss(case, loss, at, *, times=1.0, gradient=lambda x: x):
  """The peer's loss and gradient are ours `times` a number, the gradient after a further step."""
  value, ours = jax.value_and_grad(loss)(jnp.asarray(at))
  assert np.abs(case['expected']['gradient']).max() > 0
  assert_same(case, 'loss', times * value)
  assert_same(case, 'gradient', gradient(times * np.asarray(ours).reshape(np.shape(at))))


# Losses of the policy.


def joined(x):
  """[rows, time] as chunks of two sequences each: equality is not to depend on packing."""
  return jnp.asarray(x).reshape(ROWS // 2, -1)


def chunks_of(roles):
  order = np.arange(ROWS)
  columns = {
    'segment_ids': joined(np.broadcast_to(1 + order[:, None] % 2, (ROWS, TIME))),
    'loss_mask': joined(roles['mask'] > 0),
    'temperature': jnp.ones((ROWS // 2, 2)),
    # The even rows are chosen, each next one is rejected.
    'pair': joined(1 + order // 2),
    'label': joined(np.where(order % 2 == 0, 1.0, -1.0)),
  }
  for role in ('behaviour', 'proximal', 'reference'):
    columns[f'{role}_logprobs'] = joined(roles.get(role, np.zeros((ROWS, TIME))))
  if 'advantages' in roles:
    columns['advantages'] = joined(by_token(roles['advantages']))
  if 'old_values' in roles:
    columns |= {'values': joined(roles['old_values']), 'returns': joined(roles['returns'])}
  unread = {
    name: jnp.zeros(x.shape, x.dtype)
    for name, x in shapes(ROWS // 2, time=2 * TIME, segments=2).items()
  }
  return Chunks(**(unread | columns))


def by_token(advantages):
  return advantages if advantages.ndim == 2 else np.broadcast_to(advantages[:, None], (ROWS, TIME))


def total(terms):
  return sum(term.weight * term.numerator / term.denominator for term in terms.values())


def outputs_of(logprobs):
  """Outputs of a model; no case has an entropy term."""
  return TokenLogprobs(joined(logprobs), jnp.zeros((ROWS // 2, 2 * TIME)))


def policy(
  cls=GrpoConfig, *, given=lambda roles: {}, times=lambda roles: 1.0, shared=False, **options
):
  """Our configuration for a policy loss, without the dual clip and the correction that peers leave
  out by default.

  Args:
    given: inputs that are not the peer's.
    times: by what our loss is to be multiplied.
    shared: the peer's gradient is the mean of ours over the row: its ratio is one variable.
  """
  config = cls(**{'clip_ratio_c': None, 'rollout_is': 'none'} | options)
  loss = policy_gradient(config, SETTING).loss

  def check(case):
    roles = inputs_of(case)
    ours = roles | given(roles)
    chunks = chunks_of(ours)
    gradient = functools.partial(row_means, mask=ours['mask'] > 0) if shared else lambda x: x
    assert_loss(
      case,
      lambda x: total(loss(outputs_of(x), chunks, {'kl_coef': config.kl_loss_coef})[0]),
      roles['logprobs'],
      times=times(roles),
      gradient=gradient,
    )

  return check


def row_means(x, mask):
  means = np.where(mask, x, 0.0).sum(-1) / np.maximum(mask.sum(-1), 1)
  return np.where(mask, means[:, None], 0.0)


def weights_of(roles, mode='token'):
  """Importance weights without a limit, [rows, time]."""
  chunks = chunks_of(roles)
  columns = (
    chunks.proximal_logprobs,
    chunks.behaviour_logprobs,
    chunks.loss_mask,
    chunks.segment_ids,
  )
  return np.asarray(importance_weights(*columns, segments=2, mode=mode, threshold=np.inf)).reshape(
    ROWS, TIME
  )


def geometric_means(roles):
  """Geometric mean of each row's importance weights, [rows, 1]."""
  mask = roles['mask'] > 0
  sums = np.where(mask, roles['proximal'] - roles['behaviour'], 0.0).sum(-1, keepdims=True)
  return np.exp(sums / np.maximum(mask.sum(-1, keepdims=True), 1))


def within(x, low, high):
  return (low <= x) & (x <= high)


def without(keep):
  """Advantages of 0 where `keep` of the inputs is False."""
  return lambda roles: {'advantages': by_token(roles['advantages']) * keep(roles)}


def live_rows(roles):
  """The part of the rows that has a trained token: some peers divide by all rows."""
  return (roles['mask'].sum(-1) > 0).mean()


def mean_of_halves(**options):
  """The peer's loss is the mean of those of the first and of the second half of the rows."""
  config = GrpoConfig(**{'clip_ratio_c': None, 'rollout_is': 'none'} | options)
  loss = policy_gradient(config, SETTING).loss

  def check(case):
    roles = inputs_of(case)
    upper = np.arange(ROWS)[:, None] < ROWS // 2
    halves = [chunks_of(roles | {'mask': roles['mask'] * half}) for half in (upper, ~upper)]
    assert_loss(
      case,
      lambda x: sum(total(loss(outputs_of(x), half, {})[0]) for half in halves) / 2,
      roles['logprobs'],
    )

  return check


def unlimited(*, ratio, ours, loss_agg_mode, clip_ratio_low=0.2, clip_ratio_high=0.28):
  """A clipped loss without a limit on log ratios; with ours it is far smaller."""
  clip = {
    'clip_ratio_low': clip_ratio_low,
    'clip_ratio_high': clip_ratio_high,
    'clip_ratio_c': None,
  }

  def check(case):
    roles = inputs_of(case)
    chunks = chunks_of(roles)

    def loss(x, limit=np.inf):
      log_ratio = ratio(joined(x), chunks, limit)
      return aggregated(
        clipped_surrogate(log_ratio, chunks.advantages, **clip).loss, chunks, loss_agg_mode
      )

    assert_loss(case, loss, roles['logprobs'])
    assert loss(roles['logprobs'], limit=ours) < 0.2 * case['expected']['loss']

  return check


def of_token(logprobs, chunks, limit):
  return token_log_ratio(logprobs, chunks.proximal_logprobs, chunks.loss_mask, limit=limit)


def of_sequence(logprobs, chunks, limit):
  columns = (chunks.proximal_logprobs, chunks.loss_mask, chunks.segment_ids)
  return sequence_log_ratio(logprobs, *columns, segments=2, limit=limit)


def aggregated(losses, chunks, mode):
  numerator, denominator = aggregate(
    losses, chunks.loss_mask, chunks.segment_ids, segments=2, mode=mode
  )
  return numerator / denominator


# KL.


def estimate(as_theirs=None, **options):
  """Our estimate has their value and gradient at each token.

  Args:
    as_theirs: (values, gradient, d) of ours → theirs, where they differ.
  """

  def check(case):
    roles = inputs_of(case)
    chunks = chunks_of(roles)

    def found(x):
      return kl_estimate(x, chunks.reference_logprobs, mask=chunks.loss_mask, **options)

    values, gradient = by_row(found, roles['logprobs'])
    if as_theirs:
      values, gradient = as_theirs(
        values, gradient, np.where(roles['mask'] > 0, distance(roles), 0.0)
      )
    assert_same(case, 'values', values)
    assert_same(case, 'gradient', gradient)

  return check


def by_row(found, at):
  """(values, gradient of their sum) of a function of chunks, [rows, time]."""
  total, gradient = jax.vjp(found, joined(at))
  return np.asarray(total).reshape(ROWS, TIME), np.asarray(
    gradient(jnp.ones_like(total))[0]
  ).reshape(ROWS, TIME)


def distance(roles):
  return roles['logprobs'] - roles['reference']


def to_ten(values, gradient, d):
  """Limited to ±10, which k1 and k2 are not in ours."""
  beyond = np.abs(values) > 10
  assert beyond.any() and (gradient[beyond] != 0).any()
  return np.clip(values, -10, 10), np.where(beyond, 0.0, gradient)


def unbiased(kind):
  """OpenRLHF's: our gradient where |d| ≤ 20, the estimate's value without the weight."""

  def check(case):
    roles = inputs_of(case)
    chunks = chunks_of(roles)
    columns = (chunks.reference_logprobs, chunks.proximal_logprobs, chunks.loss_mask)
    values, _ = by_row(
      lambda x: kl_estimate(x, columns[0], kind=kind, mask=columns[2]), roles['logprobs']
    )
    assert_same(case, 'values', np.clip(values, -10, 10))

    def slope(**limits):
      return by_row(lambda x: unbiased_kl(x, *columns, kind='k2', **limits), roles['logprobs'])[1]

    beyond = (roles['mask'] > 0) & (np.abs(distance(roles)) > 20)
    assert_same(case, 'gradient', slope(log_ratio_limit=np.inf))
    assert_same(case, 'gradient', slope(), where=~beyond)
    assert_not_same(case, 'gradient', slope(), where=beyond)

  return check


def weighted_kl(kind, *, coefficient, proximal='logprobs'):
  """NeMo-RL's: an estimate times a ratio that keeps its gradient, limited to ±10, averaged over
  tokens.

  Of k3 that is our `unbiased_kl` at tokens where it is not limited; of k1 and k2 the gradient is
  d + 1, d²/2 + d.
  """

  def check(case):
    roles = inputs_of(case)
    mask, d, chunks = roles['mask'] > 0, distance(roles), chunks_of(roles)
    if kind == 'k3':
      columns = (chunks.reference_logprobs, joined(roles[proximal]), chunks.loss_mask)

      def found(x):
        return unbiased_kl(x, *columns, kind='k3', ratio_limit=np.inf)

      values, gradient = by_row(found, roles['logprobs'])
    else:

      def found(x):
        return kl_estimate(x, chunks.reference_logprobs, kind=kind, mask=chunks.loss_mask)

      values, _ = by_row(found, roles['logprobs'])
      gradient = np.where(mask, values + (1.0 if kind == 'k1' else d), 0.0)
    limited = (np.abs(values) >= 10) | (mask & (np.abs(d) > 20))
    assert limited.any() == (case['inputs']['reference'] == 'far_reference')
    scale = coefficient / mask.sum()
    assert_same(case, 'loss', scale * np.clip(values, -10, 10).sum())
    assert_same(case, 'gradient', scale * np.where(limited, 0.0, gradient))
    if kind == 'k3' and limited.any():
      np.testing.assert_allclose(gradient[limited], np.clip(d, -20, 20)[limited])

  return check


def slime_kl(*, coefficient, kind):
  """The policy's loss and slime's `use_unbiased_kl`, an estimate times a ratio that keeps its
  gradient, by row.

  The gradient of k2 is that of E[d²/2]; of k3 it is ours, and 0 where `low_var_kl` is limited.
  """
  base = policy_gradient(
    GrpoConfig(clip_ratio_high=0.28, clip_ratio_c=None, rollout_is='none', **BY_ROW), SETTING
  ).loss

  def check(case):
    roles = inputs_of(case)
    mask, d, chunks = roles['mask'] > 0, distance(roles), chunks_of(roles)
    loss, gradient = jax.value_and_grad(lambda x: total(base(outputs_of(x), chunks, {})[0]))(
      jnp.asarray(roles['logprobs'])
    )
    ratio = np.where(mask, np.exp(roles['logprobs'] - roles['proximal']), 0.0)

    def found(x):
      return kl_estimate(
        x, chunks.reference_logprobs, kind=kind, mask=chunks.loss_mask, limit=np.inf
      )

    values = ratio * by_row(found, roles['logprobs'])[0]
    slopes = ratio * d if kind == 'k3' else values + ratio * d
    if case['options']['kl_loss_type'] == 'low_var_kl':
      values, slopes = np.clip(values, -10, 10), np.where(np.abs(values) > 10, 0.0, slopes)
    scale = coefficient / mask.sum(-1, keepdims=True) / ROWS
    assert_same(case, 'loss', loss + (scale * values).sum())
    assert_same(case, 'gradient', np.asarray(gradient) + scale * slopes)

  return check


def penalised(kind, coef):
  """Token rewards less a KL penalty."""

  def check(case):
    roles = inputs_of(case)
    mask = roles['mask'] > 0
    rewards = dense_rewards(roles, mask) + penalties(roles, mask, kind=kind, coef=coef)
    assert_same(case, 'rewards', np.where(mask, rewards, 0.0))

  return check


def penalties(roles, mask, *, kind, coef, limit=np.inf):
  rows = zip(roles['logprobs'], roles['reference'], mask, strict=True)
  return np.clip(
    np.stack([kl_penalty(*row, kind=kind, coef=coef) for row in rows]), -coef * limit, coef * limit
  )


# Losses of the critic, of pairs and on given tokens.


def critic(*, times=lambda roles: 1.0, cliprange_value=0.5):
  config = PpoConfig(cliprange_value=cliprange_value)

  def check(case):
    roles = inputs_of(case)
    chunks, loss = chunks_of(roles), policy_gradient(config, SETTING).critic_loss

    def value(x):
      return total(loss(TokenValues(joined(x)), chunks, {})[0])

    assert_loss(case, value, roles['values'], times=times(roles))

  return check


def critic_by_row(*, times=lambda roles: 1.0, cliprange_value=0.5):
  """The mean over rows of what is ours per token."""

  def check(case):
    roles = inputs_of(case)
    chunks = chunks_of(roles)
    options = {'cliprange_value': cliprange_value, 'mask': chunks.loss_mask}

    def losses(x):
      return value_loss(joined(x), chunks.values, chunks.returns, **options).loss

    def loss(x):
      return aggregated(losses(x), chunks, 'seq-mean-token-mean')

    assert_loss(case, loss, roles['values'], times=times(roles))

  return check


def critic_at_the_edge(case):
  """A value exactly at the end of its range has 3/4 of their gradient: the halves of two ties."""
  roles = inputs_of(case)
  chunks, loss = (
    chunks_of(roles),
    policy_gradient(PpoConfig(cliprange_value=0.5), SETTING).critic_loss,
  )

  def function(x):
    return total(loss(TokenValues(joined(x)), chunks, {})[0])

  value, gradient = jax.value_and_grad(function)(jnp.asarray(roles['values']))
  edge = (np.abs(roles['values'] - roles['old_values']) == 0.5) & (roles['mask'] > 0)
  assert edge.sum() == 2
  assert_same(case, 'loss', value)
  assert_same(case, 'gradient', np.where(edge, 4 / 3, 1.0) * np.asarray(gradient))


def pairs_of_rows(**options):
  """DPO on rows of logprobs: even rows chosen, the next ones rejected."""
  loss = dpo(DpoConfig(**options), SETTING).loss

  def check(case):
    roles = inputs_of(case)
    chunks = chunks_of(roles)
    assert_loss(case, lambda x: total(loss(outputs_of(x), chunks, {})[0]), roles['logprobs'])

  return check


def averaged_pairs(*, beta):
  """`dpo_loss` on logprobs averaged over the answer."""

  def check(case):
    roles = inputs_of(case)
    mask = roles['mask'] > 0

    def means(x):
      return jnp.where(mask, x, 0.0).sum(-1) / mask.sum(-1)

    def loss(x):
      rewards = means(x - roles['reference'])
      margin = rewards[::2] - rewards[1::2]
      return dpo_loss(margin, jnp.zeros_like(margin), beta=beta).mean()

    assert_loss(case, loss, roles['logprobs'])

  return check


def pairs_of_sums(**options):
  def check(case):
    roles = inputs_of(case)
    reference = jnp.asarray(roles['reference_chosen'] - roles['reference_rejected'])
    assert_loss(
      case, lambda x: dpo_loss(x - roles['rejected'], reference, **options).mean(), roles['chosen']
    )

  return check


def pairs_of_scores(case):
  roles = inputs_of(case)
  margins = jnp.asarray(roles.get('margin', np.zeros(len(roles['chosen']))))

  def loss(x):
    return bradley_terry_loss(x - jnp.asarray(roles['rejected']), target_margin=margins).mean()

  assert_loss(case, loss, roles['chosen'])


def likelihood(*, mean):
  def check(case):
    roles = inputs_of(case)
    mask = roles['mask'] > 0
    count = mask.sum() if mean else 1.0
    assert_loss(
      case,
      lambda x: jnp.where(mask, negative_log_likelihood(x), 0.0).sum() / count,
      roles['logprobs'],
    )

  return check


# Advantages.


def group_ids(roles):
  return [str(group) for group in roles.get('groups', np.zeros(len(roles['rewards'])))]


def grouped(rule, *, singles=None, spread=False):
  """Advantages within groups; `singles` is what the peer gives to a group of one, a function of its
  reward.
  """

  def check(case):
    roles = inputs_of(case)
    ids = group_ids(roles)
    advantages = rule(roles['rewards'].tolist(), ids).advantages
    alone = np.array([ids.count(group) == 1 for group in ids])
    assert (advantages[alone] == 0.0).all()
    if singles is not None:
      assert alone.any()
      advantages = np.where(alone, singles(roles['rewards']), advantages)
    if spread:
      advantages = np.where(roles['mask'] > 0, advantages[:, None], 0.0)
    assert_same(case, 'advantages', advantages)

  return check


grpo = functools.partial(group_advantages, eps=1e-6)
centred = functools.partial(group_advantages, normalize_by_std=False)


def off_by(least, most):
  """The peer's GRPO loses digits: its largest error, relative to the largest advantage, lies
  between these.
  """

  def check(case):
    roles = inputs_of(case)
    ours = grpo(roles['rewards'].tolist(), group_ids(roles)).advantages
    error = np.abs(np.asarray(case['expected']['advantages']) - ours).max() / np.abs(ours).max()
    assert least < error < most, error

  return check


def signal_of_equal_rewards(least):
  """Rewards that are equal teach something there, and nothing here."""

  def check(case):
    roles = inputs_of(case)
    assert np.abs(case['expected']['advantages']).max() > least
    assert (grpo(roles['rewards'].tolist(), group_ids(roles)).advantages == 0.0).all()

  return check


def deviation_of_the_others(case):
  """NeMo-RL's default: mean and deviation are both of a group's other rewards, where those are not
  all equal.
  """
  roles = inputs_of(case)
  rewards, ids = roles['rewards'], np.array(group_ids(roles))
  centred_by_others = leave_one_out(rewards.tolist(), ids.tolist()).advantages
  expected = np.zeros(len(rewards))
  for i, (reward, group) in enumerate(zip(rewards, ids, strict=True)):
    others = np.delete(rewards, i)[np.delete(ids, i) == group]
    assert np.isclose(centred_by_others[i], reward - others.mean())
    expected[i] = (reward - others.mean()) / (
      others.std(ddof=1) + 1e-6 if others.std() > 0 else 1.0
    )
  assert_same(case, 'advantages', expected)


def over_the_mean(case):
  """SkyRL's maxrl: the group's mean divides."""
  roles = inputs_of(case)
  rewards, ids = roles['rewards'].tolist(), group_ids(roles)
  means = np.asarray(rewards) - centred(rewards, ids).advantages
  assert_same(case, 'advantages', centred(rewards, ids).advantages / (means + 1e-6))


def last_group_is_whole(case):
  """AReaL's groups go by position: the rows left over have neither mean nor deviation."""
  roles = inputs_of(case)
  ids = [str(row // 3) for row in range(ROWS)]
  advantages = group_advantages(roles['rewards'].tolist(), ids, eps=1e-5).advantages
  advantages[6:] = roles['rewards'][6:] / 1e-5
  assert_same(case, 'advantages', advantages)


def kept_groups(case):
  """SkyRL's filter keeps groups of one, ours masks them."""
  roles = inputs_of(case)
  ids = group_ids(roles)
  alone = np.array([ids.count(group) == 1 for group in ids])
  assert_same(case, 'kept', np.maximum(unequal(roles['rewards'].tolist(), ids).advantages, alone))


def dense_rewards(roles, mask):
  if 'token_rewards' in roles:
    return roles['token_rewards']
  return np.stack(
    [place_rewards(row, reward) for row, reward in zip(mask, roles['rewards'], strict=True)]
  )


def whitened(rows, mask, *, population=False, **options):
  """Over all valid tokens; by the population's deviation, ours is multiplied by √(n / (n - 1))."""
  n = mask.sum()
  scale = np.sqrt(n / (n - 1)) if population else 1.0
  return scale * np.stack(whiten(list(rows), list(mask), **options))


def returns_of(*, gamma, whiten_with=None, span=None, kl=None):
  """REINFORCE++: returns, and advantages whitened with these options.

  Args:
    span: name of a mask whose tokens are those that the peer's sum walks over; None: the trained
      ones.
    kl: (kind, coefficient) of the penalty in the reward.
  """

  def check(case):
    roles = inputs_of(case)
    mask = roles['mask'] > 0
    rewards = np.where(mask, dense_rewards(roles, mask), 0.0)
    if kl:
      rewards = rewards + penalties(roles, mask, kind=kl[0], coef=kl[1])
    walked = mask if span is None else COLUMNS[span] > 0
    returns = [
      token_returns(reward, row, gamma=gamma) for reward, row in zip(rewards, walked, strict=True)
    ]
    returns = np.where(mask, np.stack(returns), 0.0)
    if span is not None:
      ours = [
        token_returns(reward, row, gamma=gamma) for reward, row in zip(rewards, mask, strict=True)
      ]
      assert not np.allclose(np.stack(ours), returns)
    assert_same(case, 'returns', returns)
    advantages = returns if whiten_with is None else whitened(returns, mask, **whiten_with)
    assert_same(case, 'advantages', advantages)

  return check


def returns_by_turn(case):
  """SkyRL's REINFORCE++ begins anew at each hole."""
  roles = inputs_of(case)
  mask = roles['mask'] > 0
  returns = np.zeros((ROWS, TIME))
  for row, (rewards, valid) in enumerate(zip(roles['token_rewards'], mask, strict=True)):
    for run in re.finditer('1+', ''.join('01'[int(on)] for on in valid)):
      turn = np.arange(TIME)[run.start() : run.end()]
      returns[row, turn] = token_returns(
        rewards[turn], np.ones(len(turn), bool), gamma=case['options']['gamma']
      )
  assert_same(case, 'returns', returns)
  assert_same(case, 'advantages', whitened(returns, mask))


def gae(*, whiten_with=None, span=None, values_at=None, kl=None, limit=np.inf):
  """GAE with the case's discounts.

  Args:
    span: name of a mask whose tokens are those that the peer walks over; None: the trained ones.
    values_at: name of a mask outside of which the peer takes values for 0.
  """

  def check(case):
    roles, options = inputs_of(case), case['options']
    gamma = next(options[name] for name in ('gamma', 'discount', 'gae_gamma') if name in options)
    lam = next(options[name] for name in ('lam', 'lambd', 'gae_lambda') if name in options)
    mask = roles['mask'] > 0
    rewards = np.where(mask, dense_rewards(roles, mask), 0.0)
    if kl:
      rewards = rewards + penalties(roles, mask, kind=kl[0], coef=kl[1], limit=limit)
    values = roles['values'] if values_at is None else roles['values'] * COLUMNS[values_at]
    last = roles.get('last_values', np.zeros(ROWS))

    def estimated(values, walked):
      rows = zip(rewards, values, walked, last, strict=True)
      pairs = [
        masked_gae(r, v, m, gamma=gamma, lam=lam, last_value=float(end)) for r, v, m, end in rows
      ]
      return (np.where(mask, np.stack(part), 0.0) for part in zip(*pairs, strict=True))

    advantages, returns = estimated(values, mask if span is None else COLUMNS[span] > 0)
    if span is not None:
      assert not np.allclose(next(estimated(roles['values'], mask)), advantages)
    assert_same(case, 'returns', returns)
    assert_same(
      case,
      'advantages',
      advantages if whiten_with is None else whitened(advantages, mask, **whiten_with),
    )

  return check


def whitened_baseline(*, population=False):
  """REINFORCE++-baseline: less the group's mean, then whitened over the tokens."""

  def check(case):
    roles = inputs_of(case)
    mask = roles['mask'] > 0
    advantages = centred(roles['rewards'].tolist(), group_ids(roles)).advantages
    rows = np.broadcast_to(advantages[:, None], mask.shape)
    assert_same(case, 'advantages', whitened(rows, mask, population=population))

  return check


def whitened_rewards(*, kl=None):
  """NeMo-RL's REINFORCE++ without a baseline: each token has the reward less its own penalty, not
  those after it.
  """

  def check(case):
    roles = inputs_of(case)
    mask = roles['mask'] > 0
    dense = np.where(mask, roles['rewards'][:, None], 0.0)
    rewards = dense_rewards(roles, mask)
    if kl:
      penalty = penalties(roles, mask, kind=kl[0], coef=kl[1])
      rewards, dense = rewards + penalty, dense + penalty
    ours = np.stack(
      [token_returns(reward, row, gamma=1.0) for reward, row in zip(rewards, mask, strict=True)]
    )
    assert np.allclose(ours, dense) == (kl is None)
    assert_same(case, 'advantages', whitened(dense, mask, population=True))

  return check


def whitened_values(*, factor=lambda variance: 1.0, role='values', **options):
  def check(case):
    roles = inputs_of(case)
    mask = roles['mask'] > 0
    scale = factor(roles[role][mask].var(ddof=1))
    assert_same(case, 'advantages', scale * whitened(roles[role], mask, **options))

  return check


def normalized_with_padding(case):
  """SkyRL takes the mean over padding and holes too, the deviation around it over the trained
  tokens.
  """
  roles = inputs_of(case)
  mask, x = roles['mask'] > 0, roles['advantages']
  expected = (x - x.mean()) / np.sqrt(((x - x.mean())[mask] ** 2).mean())
  assert_same(case, 'advantages', np.where(mask, expected, 0.0))
  assert_not_same(case, 'advantages', whitened(x, mask, population=True), where=mask)


# Lengths, and the coefficient of the KL.


def overlong(*, stops):
  """Ours up to the limit; beyond it `stops` there in both, or theirs goes on falling."""

  def check(case):
    lengths = inputs_of(case)['lengths']
    penalty = overlong_penalty(lengths, max_length=10, buffer=4, factor=2.0)
    below = lengths <= 10
    assert_same(case, 'penalty', penalty, where=below)
    assert (penalty[~below] == -2.0).all()
    assert (np.asarray(case['expected']['penalty'])[~below] == -2.0).all() == stops

  return check


def controlled(case):
  options = case['options']
  config = AdaptiveKl(
    init_coef=options['init_kl_coef'],
    target=options['target_kl'],
    horizon=float(options['horizon']),
  )
  coefficients, coefficient = [], config.init_coef
  for measured in options['measured']:
    coefficient = adapted(coefficient, measured, options['n_steps'], config)
    coefficients.append(coefficient)
  assert_same(case, 'coefficients', coefficients)


# Our arguments for each case.

HIGH = {'clip_ratio_high': 0.28}
BY_ROW = {'loss_agg_mode': 'seq-mean-token-mean'}
NARROW = {'clip_ratio_low': 0.1, 'clip_ratio_high': 0.15}
CISPO = {'clip_ratio_low': 0.4, 'clip_ratio_high': 0.5}
TOKEN_MEAN = {'loss_agg_mode': 'token-mean'}
BAND = {'rollout_is_lower': 0.7, 'rollout_is_threshold': 1.3}
GEOMETRIC = {'rollout_rs_low': 0.9, 'rollout_rs_high': 1.15}
UNWEIGHTED = {'rollout_is': 'token', 'rollout_is_threshold': np.inf}
PLAIN_KL = {'kl_loss_coef': 0.3, 'kl_unbiased_gradient': False}
ALONE = {'singles': lambda rewards: rewards}
WHITE = {'whiten_with': {}}
POPULATION = {'whiten_with': {'population': True}}
K1 = ('k1', 0.1)

VERL = {
  'vanilla, token-mean': policy(clip_ratio_c=3.0, **HIGH),
  'vanilla, seq-mean-token-sum': policy(
    clip_ratio_c=3.0, loss_agg_mode='seq-mean-token-sum', **HIGH
  ),
  'vanilla, seq-mean-token-mean': policy(clip_ratio_c=3.0, **BY_ROW, **HIGH),
  # Its default is the padded length.
  'vanilla, seq-mean-token-sum-norm': policy(
    clip_ratio_c=3.0, loss_agg_mode='seq-mean-token-sum-norm', loss_scale_factor=float(TIME), **HIGH
  ),
  'vanilla, loss_scale_factor': policy(
    clip_ratio_c=3.0, loss_agg_mode='seq-mean-token-sum-norm', loss_scale_factor=20.0, **HIGH
  ),
  'vanilla, clip_ratio_c 1.5': policy(clip_ratio_c=1.5, **HIGH),
  'vanilla, far': policy(clip_ratio_c=3.0, **HIGH),
  'vanilla, log ratios of 25': policy(**HIGH),
  'gspo, seq-mean-token-mean, row_advantages': policy(GspoConfig, **NARROW),
  'gspo, seq-mean-token-mean, token_advantages': policy(GspoConfig, **NARROW),
  'gspo, token-mean, row_advantages': policy(GspoConfig, **NARROW, **TOKEN_MEAN),
  'gspo, token-mean, token_advantages': policy(GspoConfig, **NARROW, **TOKEN_MEAN),
  'gspo, far': policy(GspoConfig, **NARROW, **TOKEN_MEAN),
  'gspo, mean log ratio of 12': policy(GspoConfig, **NARROW, **TOKEN_MEAN),
  'cispo': policy(CispoConfig, **CISPO),
  'cispo, far': policy(CispoConfig, **CISPO),
  'gpg': policy(CispoConfig, clip_ratio_low=0.0, clip_ratio_high=0.0),
  'rollout_is=token': policy(
    clip_ratio_c=3.0, rollout_is='token', rollout_is_threshold=1.3, **HIGH
  ),
  'rollout_is=sequence': policy(
    clip_ratio_c=3.0, rollout_is='sequence', rollout_is_threshold=1.3, **HIGH
  ),
  'rollout_is=token, lo_hi': policy(clip_ratio_c=3.0, rollout_is='icepop', **BAND, **HIGH),
  'rollout_is=token, tie at 1': policy(
    clip_ratio_c=3.0, rollout_is='icepop', rollout_is_lower=1.0, **HIGH
  ),
  'rollout_is=token, far': policy(
    clip_ratio_c=3.0, rollout_is='token', rollout_is_threshold=5e9, **HIGH
  ),
  # Rows outside of the two are dropped, which no option of ours does.
  'rollout_is=sequence, lo_hi': policy(
    clip_ratio_c=3.0,
    rollout_is='sequence',
    rollout_is_threshold=np.inf,
    given=without(lambda roles: within(weights_of(roles, 'sequence'), 0.7, 1.3)),
    **HIGH,
  ),
  'rollout_is_batch_normalize': policy(
    clip_ratio_c=3.0,
    rollout_is='token',
    rollout_is_threshold=1.3,
    times=lambda roles: 1.0 / np.minimum(weights_of(roles), 1.3)[roles['mask'] > 0].mean(),
    **HIGH,
  ),
  # Rejected tokens leave its denominator.
  'rollout_rs=seq_mean_k1': policy(
    clip_ratio_c=3.0,
    rollout_rs_low=1 / 1.15,
    rollout_rs_high=1 / 0.9,
    times=lambda roles: (
      roles['mask'].sum()
      / (roles['mask'] * within(geometric_means(roles), 1 / 1.15, 1 / 0.9)).sum()
    ),
    **HIGH,
  ),
  'bypass, ppo_clip': policy(clip_ratio_c=3.0, bypass_old_logprobs=True, **HIGH),
  'bypass, reinforce': policy(
    CispoConfig, bypass_old_logprobs=True, clip_ratio_low=1.0, clip_ratio_high=0.6
  ),
  'kl k1': estimate(kind='k1'),
  'kl k2': estimate(kind='k2'),
  'kl low_var_kl': estimate(kind='k3'),
  # The value of k3, the gradient of k2.
  'kl k3+': estimate(lambda values, gradient, d: (values, d), kind='k3'),
  'kl in the reward': penalised('k1', 0.1),
  'value loss': critic(),
  'value loss, at the edge': critic(),
  'grpo, rewards': grouped(grpo),
  'grpo, tied_rewards': grouped(grpo),
  'grpo, ragged groups': grouped(grpo, **ALONE),
  'grpo without std': grouped(centred),
  'grpo, equal rewards in float32': signal_of_equal_rewards(0.1),
  'grpo, close_rewards': grouped(grpo),
  'grpo, offset_rewards': grouped(grpo),
  'grpo vectorized, rewards': grouped(grpo),
  'grpo vectorized, tied_rewards': grouped(grpo),
  'grpo vectorized, ragged groups': grouped(grpo, **ALONE),
  'grpo vectorized, close_rewards': off_by(0.05, 0.5),
  'grpo vectorized, offset_rewards': off_by(1e-6, 1e-2),
  'rloo': grouped(leave_one_out),
  'rloo, ragged groups': grouped(leave_one_out, **ALONE),
  'rloo vectorized': grouped(leave_one_out),
  'rloo vectorized, ragged groups': grouped(leave_one_out),
  'reinforce_plus_plus, gamma 1.0': returns_of(gamma=1.0, **WHITE),
  'reinforce_plus_plus, gamma 0.9': returns_of(gamma=0.9, **WHITE),
  'reinforce_plus_plus_baseline': whitened_baseline(),
  'gae, gamma 0.9': gae(**WHITE),
  'gae, gamma 1.0': gae(**WHITE),
  'masked_whiten, shift_mean True': whitened_values(),
  'masked_whiten, shift_mean False': whitened_values(shift_mean=False),
  'adaptive kl': controlled,
  'overlong penalty': overlong(stops=False),
}
OPENRLHF = {
  'ppo, token level': policy(**HIGH),
  'ppo, sample level': policy(**BY_ROW, **HIGH),
  'ppo, dual_clip': policy(clip_ratio_c=1.5, **HIGH),
  'ppo, far': policy(clip_ratio_c=3.0, **HIGH),
  'ppo, log ratios of 25': policy(**HIGH),
  'gspo': policy(GspoConfig, **NARROW),
  'gspo, token_advantages': policy(GspoConfig, shared=True, **NARROW),
  'gspo, mean log ratio of 12': unlimited(ratio=of_sequence, ours=10.0, **NARROW, **BY_ROW),
  'gspo with a correction': policy(GspoConfig, bypass_old_logprobs=True, **NARROW),
  'correction token, clip': policy(rollout_is='token', **BAND, **HIGH),
  'correction token, mask': policy(rollout_is='icepop', **BAND, **HIGH),
  'correction token, tie at 1': policy(rollout_is='icepop', rollout_is_lower=1.0, **HIGH),
  'correction seq, mask': policy(**UNWEIGHTED, **GEOMETRIC, **HIGH),
  # The log of a weight is limited to ±20 in ours.
  'correction token, clip, far': policy(
    given=without(lambda roles: np.minimum(np.exp(roles['proximal'] - roles['behaviour']), 5e9)),
    **HIGH,
  ),
  'kl k1': estimate(to_ten, kind='k1'),
  'kl k2': estimate(to_ten, kind='k2'),
  'kl k3': estimate(kind='k3'),
  'kl k1, unbiased_gradient': unbiased('k1'),
  'kl k2, unbiased_gradient': unbiased('k2'),
  'kl k3, unbiased_gradient': unbiased('k3'),
  'value loss': critic(),
  'value loss, no clip': critic(cliprange_value=None),
  'value loss, sample level': critic_by_row(),
  'dpo': pairs_of_sums(beta=0.3),
  'dpo, label_smoothing': pairs_of_sums(beta=0.3, label_smoothing=0.2),
  'ipo': pairs_of_sums(beta=0.3, kind='ipo'),
  'reward model': pairs_of_scores,
  'reward model, margin': pairs_of_scores,
  'sft': likelihood(mean=True),
  'group_norm, rewards': grouped(functools.partial(group_advantages, eps=1e-9), spread=True),
  'group_norm, tied_rewards': grouped(functools.partial(group_advantages, eps=1e-9), spread=True),
  'group_norm, equal rewards in float32': signal_of_equal_rewards(0.1),
  'rloo, rewards': grouped(leave_one_out, spread=True),
  'rloo, tied_rewards': grouped(leave_one_out, spread=True),
  'dr_grpo, rewards': grouped(centred, spread=True),
  'dr_grpo, tied_rewards': grouped(centred, spread=True),
  'reinforce_baseline, rewards': whitened_baseline(population=True),
  'reinforce_baseline, tied_rewards': whitened_baseline(population=True),
  # Its discount counts the tokens of holes.
  'reinforce, gamma 0.9, mask': returns_of(gamma=0.9, span='mask_no_holes', **POPULATION),
  'reinforce, gamma 0.9, mask_no_holes': returns_of(gamma=0.9, **POPULATION),
  'reinforce, gamma 1': returns_of(gamma=1.0, **POPULATION),
  'reinforce, kl in the reward': returns_of(gamma=1.0, kl=K1, **POPULATION),
  'compute_reward': penalised('k1', 0.1),
  # It walks over holes too, where values are 0.
  'gae, mask': gae(span='mask_no_holes', values_at='mask', **POPULATION),
  'gae, mask_no_holes': gae(**POPULATION),
  'overlong penalty': overlong(stops=True),
  'adaptive kl': controlled,
}


def kept_by_token(roles):
  return within(weights_of(roles), 0.7, 1.3) & (roles['mask'] > 0)


AREAL = {
  'ppo': policy(**HIGH),
  'ppo, eps_clip alone': policy(),
  'ppo, c_clip': policy(clip_ratio_c=1.5, **HIGH),
  'ppo, far': policy(clip_ratio_c=3.0, **HIGH),
  'ppo, log ratios of 25': unlimited(ratio=of_token, ours=20.0, **TOKEN_MEAN),
  'sequence': policy(GspoConfig, **NARROW, **TOKEN_MEAN),
  'sequence, mean log ratio of 12': unlimited(ratio=of_sequence, ours=10.0, **NARROW, **TOKEN_MEAN),
  # Its advantages are averaged over the row.
  'sequence, token_advantages': policy(
    GspoConfig,
    given=lambda roles: {'advantages': row_means(roles['advantages'], roles['mask'] > 0)},
    **NARROW,
    **TOKEN_MEAN,
  ),
  'ratio, token, clamp': policy(rollout_is='token', rollout_is_threshold=1.3, **HIGH),
  'ratio, token, clamp, lower': policy(rollout_is='token', **BAND, **HIGH),
  'ratio, token, mask': policy(
    rollout_is='icepop', rollout_is_lower=0.0, rollout_is_threshold=1.3, **HIGH
  ),
  'ratio, token, mask, lower': policy(rollout_is='icepop', **BAND, **HIGH),
  # The weight of a row that is kept is its geometric mean, at each of its tokens.
  'ratio, sequence, mask': policy(
    given=without(lambda roles: geometric_means(roles) * within(geometric_means(roles), 0.9, 1.15)),
    **HIGH,
  ),
  'kl_k1, token, mask': policy(
    rollout_is='icepop', rollout_is_lower=np.exp(-0.375), rollout_is_threshold=np.exp(0.25), **HIGH
  ),
  'kl_k2, token, mask': policy(
    rollout_is='icepop',
    rollout_is_lower=np.exp(-np.sqrt(0.125)),
    rollout_is_threshold=np.exp(np.sqrt(0.125)),
    **HIGH,
  ),
  'kl_k3, token, mask': policy(
    **UNWEIGHTED,
    given=without(lambda roles: 1 / weights_of(roles) - 1 + np.log(weights_of(roles)) <= 0.0625),
    **HIGH,
  ),
  'kl_k1, sequence, mask': policy(
    **UNWEIGHTED, rollout_rs_low=np.exp(-0.125), rollout_rs_high=np.exp(0.125), **HIGH
  ),
  # The row's means are over the tokens that were not rejected; ours are over all.
  'sequence with ratio, token, mask': policy(
    GspoConfig,
    **UNWEIGHTED,
    given=lambda roles: {'mask': kept_by_token(roles)},
    times=lambda roles: kept_by_token(roles).sum() / roles['mask'].sum(),
    shared=True,
    **NARROW,
    **TOKEN_MEAN,
  ),
  'value loss': critic(),
  # Equal while the error is below 10.
  'value loss, huber': critic(),
  'kl k1': estimate(to_ten, kind='k1'),
  'kl k2': estimate(to_ten, kind='k2'),
  'kl k3': estimate(kind='k3'),
  'dpo sigmoid': pairs_of_rows(beta=0.3),
  'dpo ipo': pairs_of_rows(beta=0.3, loss_type='ipo'),
  'reward norm group, group, rewards': grouped(functools.partial(group_advantages, eps=1e-5)),
  'reward norm group, group, tied_rewards': grouped(functools.partial(group_advantages, eps=1e-5)),
  'reward norm group, mean_leave1out, rewards': grouped(leave_one_out),
  'reward norm group, mean_leave1out, tied_rewards': grouped(leave_one_out),
  'reward norm group of three, two rows left': last_group_is_whole,
  'reward norm group, equal rewards': grouped(group_advantages),
  # It adds eps to the deviation, ours to the variance.
  'adv norm batch': whitened_values(
    factor=lambda variance: np.sqrt(variance + 1e-8) / (np.sqrt(variance) + 1e-5)
  ),
  'gae': gae(),
  'gae, rows that fill the width': gae(),
  'gae, kl in the reward': gae(kl=K1),
  'gae, kl in the reward, far': gae(kl=K1, limit=10.0),
  'overlong penalty': overlong(stops=False),
}
NEMO = {
  'token level': policy(**HIGH),
  'sequence level': policy(**BY_ROW, **HIGH),
  'sequence level, a row without tokens': policy(times=live_rows, **BY_ROW, **HIGH),
  'token level, a row without tokens': policy(**HIGH),
  'ratio_clip_c': policy(clip_ratio_c=1.5, **HIGH),
  'far': policy(clip_ratio_c=3.0, **HIGH),
  'log ratios of 25': unlimited(ratio=of_token, ours=20.0, **TOKEN_MEAN),
  'sequence_level_importance_ratios': policy(GspoConfig, **NARROW),
  'sequence_level_importance_ratios, token_advantages': policy(GspoConfig, shared=True, **NARROW),
  'sequence_level_importance_ratios, mean log ratio of 12': unlimited(
    ratio=of_sequence, ours=10.0, **NARROW, **BY_ROW
  ),
  'cispo': policy(CispoConfig, **CISPO),
  'tis': policy(rollout_is='token', rollout_is_threshold=1.3, **HIGH),
  'tis, min': policy(rollout_is='token', **BAND, **HIGH),
  'icepop': policy(rollout_is='icepop', **BAND, **HIGH),
  'icepop, tie at 1': policy(rollout_is='icepop', rollout_is_lower=1.0, **HIGH),
  'seq-mask-tis': policy(**UNWEIGHTED, **GEOMETRIC, **HIGH),
  'correction by sequence': policy(
    GspoConfig, rollout_is='sequence', rollout_is_threshold=np.inf, **NARROW
  ),
  'correction by token, no limit': policy(**UNWEIGHTED, **HIGH),
  'calculate_kl k1': estimate(to_ten, kind='k1'),
  'calculate_kl k2': estimate(to_ten, kind='k2'),
  'calculate_kl k3': estimate(kind='k3'),
  'kl loss k1, reference': weighted_kl('k1', coefficient=0.5),
  'kl loss k1, far_reference': weighted_kl('k1', coefficient=0.5),
  'kl loss k2, reference': weighted_kl('k2', coefficient=0.5),
  'kl loss k2, far_reference': weighted_kl('k2', coefficient=0.5),
  'kl loss k3, reference': weighted_kl('k3', coefficient=0.5),
  'kl loss k3, far_reference': weighted_kl('k3', coefficient=0.5),
  'kl loss k3, use_on_policy_kl_approximation': weighted_kl(
    'k3', coefficient=0.5, proximal='behaviour'
  ),
  'value loss': critic(),
  'value loss, no clip': critic(cliprange_value=None),
  'value loss, scale': critic(times=lambda roles: 2.0),
  'value loss, at the edge': critic_at_the_edge,
  'dpo': pairs_of_rows(beta=0.3),
  'dpo, preference_average_log_probs': averaged_pairs(beta=0.3),
  'reward model': pairs_of_scores,
  'grpo, equal rewards in float32': signal_of_equal_rewards(1e-4),
  'reinforce++ minus_baseline': whitened_baseline(population=True),
  'reinforce++ without baseline': whitened_rewards(),
  'reinforce++ with kl in the reward': whitened_rewards(kl=K1),
  'gae': gae(),
  'gae, normalized': gae(**WHITE),
  'gae, kl in the reward': gae(kl=K1),
  'gae, kl in the reward, far': gae(kl=K1, limit=10.0),
  'overlong penalty': overlong(stops=False),
}
_NEMO_GROUPS = ('rewards, groups_of_four', 'tied_rewards, groups_of_four', 'rewards, ragged_groups')
NEMO |= {
  f'grpo, leave one out True, normalized True, {name}': deviation_of_the_others
  for name in _NEMO_GROUPS[:2]
}
NEMO |= {
  f'grpo, leave one out True, normalized False, {name}': grouped(leave_one_out)
  for name in _NEMO_GROUPS
}
NEMO |= {
  f'grpo, leave one out False, normalized True, {name}': grouped(grpo) for name in _NEMO_GROUPS
}
NEMO |= {
  f'grpo, leave one out False, normalized False, {name}': grouped(centred) for name in _NEMO_GROUPS
}
SKYRL = {
  'regular, token_mean': policy(**HIGH),
  'regular, sequence_mean': policy(**BY_ROW, **HIGH),
  'regular, sequence_mean, a row without tokens': policy(times=live_rows, **BY_ROW, **HIGH),
  'regular, seq_mean_token_sum_norm': policy(
    loss_agg_mode='seq-mean-token-sum-norm', loss_scale_factor=20.0, **HIGH
  ),
  'regular, token_mean_legacy': mean_of_halves(**HIGH),
  'regular, prompt_mean': mean_of_halves(**HIGH),
  'dual_clip': policy(clip_ratio_c=1.5, **HIGH),
  'dual_clip, far': policy(clip_ratio_c=3.0, **HIGH),
  'regular, log ratios of 25': policy(**HIGH),
  'gspo': policy(GspoConfig, **NARROW),
  'gspo, token_advantages': policy(GspoConfig, **NARROW),
  'gspo, far': policy(GspoConfig, **NARROW, **TOKEN_MEAN),
  'gspo, mean log ratio of 12': policy(GspoConfig, **NARROW, **TOKEN_MEAN),
  'cispo': policy(CispoConfig, **CISPO),
  'importance_sampling': policy(clip_ratio_low=1.0, clip_ratio_high=np.inf),
  # Where the policy is the proximal one: theirs weighs with the current policy's ratio.
  'rollout_is at the first update': policy(
    CispoConfig,
    clip_ratio_low=0.0,
    clip_ratio_high=0.0,
    rollout_is='icepop',
    rollout_is_lower=0.7,
    rollout_is_threshold=1.3,
  ),
  'tis token': policy(rollout_is='token', rollout_is_threshold=1.3, **HIGH),
  'tis sequence': policy(rollout_is='sequence', rollout_is_threshold=1.3, **HIGH),
  'tis token, far': policy(rollout_is='token', rollout_is_threshold=5e9, **HIGH),
  'token mask with tis': policy(rollout_is='icepop', **BAND, **HIGH),
  'token mask without tis': policy(given=without(kept_by_token), **HIGH),
  'sequence mask geometric': policy(**GEOMETRIC, **HIGH),
  'sequence mask geometric with tis': policy(
    rollout_is='token', rollout_is_threshold=1.3, **GEOMETRIC, **HIGH
  ),
  'sequence mask product': policy(
    given=without(lambda roles: within(weights_of(roles, 'sequence'), 0.5, 2.0)), **HIGH
  ),
  'outlier mask': policy(
    given=without(lambda roles: within(weights_of(roles), 0.3, 3.0).all(-1, keepdims=True)), **HIGH
  ),
  'kl k1': estimate(kind='k1'),
  'kl k2': estimate(kind='k2'),
  'kl k3': estimate(kind='k3'),
  'value loss': critic_by_row(),
  'value loss, no clip': critic_by_row(cliprange_value=None),
  'value loss, a row without tokens': critic_by_row(times=live_rows),
  'cross_entropy': likelihood(mean=False),
  'grpo, rewards, groups_of_four': grouped(grpo),
  'grpo, tied_rewards, groups_of_four': grouped(grpo),
  'grpo, rewards, ragged_groups': grouped(grpo, **ALONE),
  'grpo without std': grouped(centred),
  'rloo, rewards, groups_of_four': grouped(leave_one_out),
  'rloo, tied_rewards, groups_of_four': grouped(leave_one_out),
  'rloo, rewards, ragged_groups': grouped(leave_one_out),
  'grpo, equal rewards in float32': signal_of_equal_rewards(0.1),
  'maxrl': over_the_mean,
  'reinforce++, mask': returns_by_turn,
  'reinforce++, mask_no_holes': returns_of(gamma=0.9, **WHITE),
  # It walks over holes, and reads the values there.
  'gae, mask': gae(span='mask_no_holes', **WHITE),
  'gae, mask_no_holes': gae(**WHITE),
  'advantage_batch_normalize, mask_full': whitened_values(role='advantages', population=True),
  'advantage_batch_normalize, mask': normalized_with_padding,
  'kl in the reward, k3': penalised('k3', 0.1),
  'kl in the reward, k2': penalised('k2', 0.1),
  'zero_variance_filter, groups_of_four': kept_groups,
  'zero_variance_filter, ragged_groups': kept_groups,
}
SLIME = {
  'grpo': policy(**BY_ROW, **HIGH),
  'grpo, a row without tokens': policy(times=live_rows, **BY_ROW, **HIGH),
  'grpo, calculate_per_token_loss': policy(**HIGH),
  # A row without a trained token counts as one token.
  'grpo, calculate_per_token_loss, a row without tokens': policy(
    times=lambda roles: roles['mask'].sum() / np.maximum(roles['mask'].sum(-1), 1).sum(), **HIGH
  ),
  'grpo, eps_clip_c': policy(clip_ratio_c=1.5, **BY_ROW, **HIGH),
  'grpo, far': policy(clip_ratio_c=3.0, **BY_ROW, **HIGH),
  'grpo, log ratios of 25': unlimited(ratio=of_token, ours=20.0, **BY_ROW),
  'gspo': policy(GspoConfig, **NARROW),
  'gspo, token_advantages': policy(GspoConfig, shared=True, **NARROW),
  'gspo, mean log ratio of 12': unlimited(ratio=of_sequence, ours=10.0, **NARROW, **BY_ROW),
  'cispo': policy(CispoConfig, **CISPO, **BY_ROW),
  'use_opsm': policy(bypass_old_logprobs=True, off_policy_seq_mask=0.05, **BY_ROW, **HIGH),
  'tis': policy(rollout_is='token', rollout_is_threshold=1.3, **BY_ROW, **HIGH),
  'tis, tis_clip_low': policy(rollout_is='token', **BAND, **BY_ROW, **HIGH),
  'icepop': policy(rollout_is='icepop', **BAND, **BY_ROW, **HIGH),
  'use_rollout_logprobs': policy(bypass_old_logprobs=True, **BY_ROW, **HIGH),
  'kl k1': estimate(kind='k1'),
  'kl k2': estimate(kind='k2'),
  'kl k3': estimate(kind='k3', log_ratio_limit=np.inf, limit=np.inf),
  'kl low_var_kl': estimate(kind='k3'),
  'kl loss k2': policy(kl_loss_type='k2', **PLAIN_KL, **BY_ROW, **HIGH),
  'kl loss low_var_kl': policy(kl_loss_type='k3', **PLAIN_KL, **BY_ROW, **HIGH),
  'use_unbiased_kl low_var_kl, reference': policy(kl_loss_coef=0.3, **BY_ROW, **HIGH),
  'use_unbiased_kl k3, reference': policy(kl_loss_coef=0.3, **BY_ROW, **HIGH),
  'use_unbiased_kl k2, reference': slime_kl(coefficient=0.3, kind='k2'),
  'use_unbiased_kl low_var_kl, far_reference': slime_kl(coefficient=0.3, kind='k3'),
  # It has no half.
  'value loss, mask': critic_by_row(times=lambda roles: 2.0),
  'value loss, mask_empty_row': critic_by_row(times=lambda roles: 2.0 * live_rows(roles)),
  'grpo rewards, rewards': grouped(grpo),
  'grpo rewards, tied_rewards': grouped(grpo),
  'grpo rewards, equal rewards in float32': signal_of_equal_rewards(0.1),
  'grpo rewards without std': grouped(centred),
  'reinforce_plus_plus, gamma 1.0, mask': returns_of(gamma=1.0),
  'reinforce_plus_plus, gamma 1.0, mask_no_holes': returns_of(gamma=1.0),
  'reinforce_plus_plus, gamma 0.9, mask': returns_of(gamma=0.9, span='mask_no_holes'),
  'reinforce_plus_plus, gamma 0.9, mask_no_holes': returns_of(gamma=0.9),
  'reinforce_plus_plus, normalize_advantages': returns_of(gamma=1.0, **WHITE),
  'reinforce_plus_plus, kl_coef': returns_of(gamma=1.0, kl=K1),
  'reinforce_plus_plus_baseline': whitened_baseline(),
  'ppo, mask': gae(span='mask_no_holes'),
  'ppo, mask_no_holes': gae(),
  'ppo, kl_coef': gae(kl=('k3', 0.1)),
}
PEERS = {
  'verl': VERL,
  'OpenRLHF': OPENRLHF,
  'AReaL': AREAL,
  'NeMo-RL': NEMO,
  'SkyRL': SKYRL,
  'slime': SLIME,
}
CHECKS = {
  f'{peer}: {name}': check for peer, checks in PEERS.items() for name, check in checks.items()
}


def test_every_recorded_case_is_checked():
  assert CHECKS.keys() == CASES.keys() and PEERS.keys() == RECORD['peers'].keys()


@pytest.mark.parametrize('name', CHECKS)
def test_recorded(name):
  CHECKS[name](CASES[name])
