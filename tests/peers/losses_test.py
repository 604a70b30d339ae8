"""Equality with TRL and Tunix, live: their own code on the same numbers gives our losses, gradients
and advantages.

The scripts in tests/peers run them in an environment of their own; here stand our arguments for
each of their cases. What docs/reference/equality.md calls a deviation is asserted as one: an
assertion that fails means that the page is outdated.
"""

import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paths import PEERS_PYTHON, ROOT

from jaxrl_llm.advantages.group import group_advantages, leave_one_out
from jaxrl_llm.advantages.shaping import overlong_penalty
from jaxrl_llm.advantages.tokens import masked_gae, whiten
from jaxrl_llm.batching.chunks import Chunks, shapes
from jaxrl_llm.learner.algorithm import Setting
from jaxrl_llm.learner.policy_gradient import policy_gradient
from jaxrl_llm.learner.policy_options import (
  CispoConfig,
  DapoConfig,
  DrGrpoConfig,
  GrpoConfig,
  GspoConfig,
  PpoConfig,
  RlooConfig,
  SapoConfig,
)
from jaxrl_llm.learner.preference import DpoConfig, RewardModelConfig, dpo, reward_model
from jaxrl_llm.objectives.divergence import kl_estimate
from jaxrl_llm.ops.logprobs import SequenceScores, TokenLogprobs, TokenValues, token_logprobs

pytestmark = pytest.mark.full

ROWS, TIME, VOCAB, GROUP = 8, 10, 13, 4
EOS, START = 1, 2
SETTING = Setting(max_response_length=TIME + 3)
EXACT, SINGLE = 1e-9, 1e-5
"""Tolerances, of what a peer computes in float64 and in float32."""


def narrow(x):
  """Numbers that float32 holds exactly, so that no side rounds its inputs."""
  return np.asarray(x, np.float32).astype(np.float64)


def make_batch(*, empty_row: bool):
  """Rows with holes (tool tokens) and padding; rows 0, 3 and 6 end in EOS, the others were cut."""
  rng = np.random.default_rng(20)
  lengths = np.array([TIME, *rng.integers(4, TIME + 1, ROWS - 1)])
  index = np.arange(TIME)
  mask = (index < lengths[:, None]) & (rng.random((ROWS, TIME)) < 0.8) | (index == 0)
  mask[ROWS - 1] &= not empty_row
  tokens = rng.integers(START + 1, VOCAB, (ROWS, TIME))
  tokens[::3][index == lengths[::3, None] - 1] = EOS
  logits = rng.normal(size=(ROWS, 1 + TIME, VOCAB)).astype(np.float32)
  normalizer = np.log(np.exp(logits.astype(np.float64)).sum(-1))
  logprobs = np.take_along_axis(logits[:, :-1], tokens[..., None], -1)[..., 0] - normalizer[:, :-1]

  def normal(*shape):
    return narrow(rng.normal(size=shape))

  def near(scale):
    return narrow(logprobs + scale * normal(ROWS, TIME))

  far = near(0.5)
  far[0, 0] -= 15.0
  far[1, 0] += 30.0
  return {
    'prompt': np.full((ROWS, 1), START),
    'tokens': tokens,
    'lengths': lengths,
    'mask': mask,
    'logits': logits,
    'temperature': np.float32(0.9),
    'logprobs': narrow(logprobs),
    'proximal': near(0.3),
    'behaviour': near(0.3),
    'reference': near(0.5),
    'far_reference': far,
    'rewards': normal(ROWS),
    'odd_rewards': np.array([1.0, np.nan, 0.0, 0.5, 2.5, 2.5, 2.5, 2.5]),
    'group_size': np.array(GROUP),
    'overlong_lengths': np.array([0, 6, 7, 10, 11, 15]),
    'scores': normal(ROWS),
    'margin': np.array(0.5),
    'token_advantages': normal(ROWS, TIME),
    'token_rewards': normal(ROWS, TIME),
    'old_values': normal(ROWS, TIME),
    'new_values': normal(ROWS, 1 + TIME),
    'returns': normal(ROWS, TIME),
  }


def run(script, batch, folder):
  if not PEERS_PYTHON.exists():
    pytest.skip('.venv-peers is missing: launch/install_peers.sh makes it')
  np.savez(folder / 'batch.npz', **batch)
  command = [
    PEERS_PYTHON,
    ROOT / 'tests/peers' / script,
    folder / 'batch.npz',
    folder / 'results.npz',
  ]
  process = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
  assert process.returncode == 0, process.stderr[-3000:]
  return dict(np.load(folder / 'results.npz'))


@pytest.fixture(scope='module')
def whole():
  return make_batch(empty_row=False)


@pytest.fixture(scope='module')
def holed():
  """With a row in which nothing is trained on, and in float32, as Tunix computes."""
  batch = make_batch(empty_row=True)
  return {name: x.astype(np.float32) if x.dtype == np.float64 else x for name, x in batch.items()}


@pytest.fixture(scope='module')
def trl(whole, tmp_path_factory):
  return run('trl_losses.py', whole, tmp_path_factory.mktemp('trl'))


@pytest.fixture(scope='module')
def tunix(holed, tmp_path_factory):
  return run('tunix_losses.py', holed, tmp_path_factory.mktemp('tunix'))


def joined(x):
  """[rows, time] as chunks of two sequences each: equality is not to depend on packing."""
  return x.reshape(ROWS // 2, 2 * TIME)


def chunks_of(batch, **columns):
  segment_ids = np.where(
    np.arange(TIME) < batch['lengths'][:, None], 1 + np.arange(ROWS)[:, None] % 2, 0
  )
  order = np.arange(ROWS).reshape(ROWS // 2, 2)
  columns = {name: joined(x) for name, x in columns.items()} | {
    'segment_ids': joined(segment_ids),
    'loss_mask': joined(batch['mask']),
    'behaviour_logprobs': joined(batch['behaviour']),
    'proximal_logprobs': joined(batch['proximal']),
    'reference_logprobs': joined(batch['reference']),
    'temperature': np.ones((ROWS // 2, 2)),
    # The first half of the rows are chosen, the second half rejected.
    'pair': 1 + order % (ROWS // 2),
    'label': np.where(order < ROWS // 2, 1.0, -1.0),
  }
  unread = {
    name: np.zeros(x.shape, x.dtype)
    for name, x in shapes(ROWS // 2, time=2 * TIME, segments=2).items()
  }
  return Chunks(**{name: jnp.asarray(x) for name, x in (unread | columns).items()})


def total(terms):
  return sum(term.weight * term.numerator / term.denominator for term in terms.values())


def policy_loss(config, batch, **columns):
  """logprobs [rows, time], entropies → the loss of an algorithm of the policy-gradient family."""
  chunks = chunks_of(batch, **columns)
  loss = policy_gradient(config, SETTING).loss
  constants = {'kl_coef': config.kl_loss_coef}
  return lambda logprobs, entropy: total(
    loss(TokenLogprobs(joined(logprobs), joined(entropy)), chunks, constants)[0]
  )


def assert_equal(theirs, name, loss, at, *, tolerance):
  """`loss` and its gradient at `at` are the peer's."""
  value, gradient = jax.value_and_grad(loss)(jnp.asarray(at))
  np.testing.assert_allclose(value, theirs[f'{name}/loss'], rtol=tolerance)
  assert_gradient(theirs[f'{name}/gradient'], gradient, tolerance=tolerance)


def assert_gradient(theirs, ours, *, tolerance):
  assert np.abs(theirs).max() > 0
  np.testing.assert_allclose(
    ours, theirs.reshape(ours.shape), rtol=tolerance, atol=tolerance * np.abs(theirs).max()
  )


def ours(cls=GrpoConfig, **options):
  """Without what peers leave out by default."""
  return cls(**{'clip_ratio_c': None, 'rollout_is': 'none'} | options)


KL = {'kl_loss_coef': 0.3, 'kl_unbiased_gradient': False}
TRL = {
  'grpo': ours(loss_agg_mode='seq-mean-token-mean'),
  'grpo delta': ours(loss_agg_mode='seq-mean-token-mean', clip_ratio_c=1.5),
  'bnpo': ours(),
  'dapo in two micro-batches': ours(DapoConfig),
  'dr_grpo': ours(DrGrpoConfig),
  'cispo': ours(CispoConfig, clip_ratio_low=1.0, clip_ratio_high=0.3),
  # Its bound is absolute, and epsilon's 0.2 where none is set: every weight is at most 0.2.
  'cispo default': ours(CispoConfig, clip_ratio_low=1.0, clip_ratio_high=-0.8),
  'sapo': ours(SapoConfig, tau_neg=float(np.float32(1.05))),  # Its temperatures are float32.
  'sapo temperatures': ours(SapoConfig, tau_pos=2.0, tau_neg=5.0),
  'sequence': ours(GspoConfig, clip_ratio_low=0.03, clip_ratio_high=0.04),
  'sequence dapo': ours(
    GspoConfig, clip_ratio_low=0.03, clip_ratio_high=0.03, loss_agg_mode='token-mean'
  ),
  'kl': ours(**KL),
  'kl corrected': ours(kl_loss_coef=0.3),
  'off-policy mask': ours(off_policy_seq_mask=0.02),
  'truncated dapo': ours(mask_truncated=True),
  'truncated grpo': ours(mask_truncated=True, loss_agg_mode='seq-mean-token-mean'),
  'token_truncate': ours(rollout_is='token', rollout_is_threshold=1.2),
  'token_mask': ours(rollout_is='icepop', rollout_is_lower=0.8, rollout_is_threshold=1.2),
  'sequence_truncate': ours(rollout_is='sequence', rollout_is_threshold=1.2),
}


def finished(batch):
  """Rows that were not cut: their last token is EOS."""
  return np.take_along_axis(batch['tokens'], batch['lengths'][:, None] - 1, 1) == EOS


@pytest.mark.parametrize('name', TRL)
def test_trl_policy_losses(name, trl, whole):
  config, scale = TRL[name], 1.0
  batch = dict(whole)
  if config.mask_truncated:
    batch['mask'] = whole['mask'] & finished(whole)
  if name == 'truncated grpo':
    # A deviation: rows that left the loss still count in its mean over rows.
    scale = finished(whole).sum() / ROWS
  with jax.enable_x64(True):
    advantages = np.broadcast_to(
      trl[f'{name}/advantages'][:, None].astype(np.float64), (ROWS, TIME)
    )
    loss = policy_loss(config, batch, advantages=advantages)
    entropy = jnp.zeros((ROWS, TIME))
    assert_equal(trl, name, lambda x: scale * loss(x, entropy), whole['logprobs'], tolerance=EXACT)


def test_every_trl_case_says_something_of_its_own(trl):
  losses = [float(x) for name, x in trl.items() if name.endswith('/loss')]
  same = {'sigmoid/loss', 'sigmoid smoothed/loss'}
  assert same <= set(trl) and len(np.unique(losses)) == len(losses) - 1


GROUPS = [str(row // GROUP) for row in range(ROWS)]


def scored(rewards):
  return [None if np.isnan(reward) else float(reward) for reward in rewards]


@pytest.mark.parametrize(
  ('name', 'rewards', 'found'),
  [
    ('grpo', 'rewards', lambda rewards: group_advantages(rewards, GROUPS, eps=1e-4)),
    (
      'dr_grpo',
      'rewards',
      lambda rewards: group_advantages(rewards, GROUPS, normalize_by_std=False),
    ),
    ('scaled by group', 'odd_rewards', lambda rewards: group_advantages(rewards, GROUPS, eps=1e-4)),
    (
      'not scaled',
      'odd_rewards',
      lambda rewards: group_advantages(rewards, GROUPS, normalize_by_std=False),
    ),
    ('rloo', 'odd_rewards', lambda rewards: leave_one_out(rewards, GROUPS)),
  ],
)
def test_trl_advantages(name, rewards, found, trl, whole):
  """Unscorable rows and groups of equal rewards among them."""
  advantages = found(scored(whole[rewards])).advantages
  np.testing.assert_allclose(advantages, trl[f'{name}/advantages'], rtol=SINGLE, atol=1e-6)


def test_trl_rloo_has_our_gradient_where_the_policy_is_the_one_that_sampled(trl, whole):
  """Its ratio is the whole sequence's product; ours are by token."""
  batch = whole | {'mask': np.arange(TIME) < whole['lengths'][:, None]}
  with jax.enable_x64(True):
    advantages = np.broadcast_to(trl['rloo/advantages'][:, None].astype(np.float64), (ROWS, TIME))
    loss = policy_loss(ours(RlooConfig), batch, advantages=advantages)
    gradient = jax.grad(loss)(jnp.asarray(whole['proximal']), jnp.zeros((ROWS, TIME)))
  assert_gradient(trl['rloo/gradient'], gradient, tolerance=EXACT)


def dpo_of(config, batch):
  chunks = chunks_of(batch)
  return lambda x: total(
    dpo(config, SETTING).loss(TokenLogprobs(joined(x), joined(0.0 * x)), chunks, {})[0]
  )


@pytest.mark.parametrize(
  ('name', 'config'),
  [
    ('sigmoid', DpoConfig(beta=0.3)),
    # A deviation: label smoothing is not read.
    ('sigmoid smoothed', DpoConfig(beta=0.3)),
    ('ipo', DpoConfig(beta=0.3, loss_type='ipo')),
  ],
)
def test_trl_dpo(name, config, trl, whole):
  with jax.enable_x64(True):
    assert_equal(trl, name, dpo_of(config, whole), whole['logprobs'], tolerance=EXACT)


@pytest.mark.parametrize(
  ('name', 'center'), [('reward model', 0.0), ('reward model centered', 0.1)]
)
def test_trl_reward_model(name, center, trl, whole):
  config = RewardModelConfig(margin=float(whole['margin']), center_rewards_coefficient=center)
  with jax.enable_x64(True):
    chunks = chunks_of(whole)

    def loss(x):
      return total(
        reward_model(config, SETTING).loss(SequenceScores(x.reshape(ROWS // 2, 2)), chunks, {})[0]
      )

    assert_equal(trl, name, loss, whole['scores'], tolerance=EXACT)


BY_ROW = {'loss_agg_mode': 'seq-mean-token-mean'}
TUNIX = {
  'sequence-mean-token-mean': ours(**BY_ROW),
  'token-mean': ours(),
  'sequence-mean-token-scale': ours(
    loss_agg_mode='seq-mean-token-sum-norm', loss_scale_factor=float(TIME)
  ),
  'seq-mean-token-sum': ours(loss_agg_mode='seq-mean-token-sum'),
  'sequence-mean-token-sum-norm': ours(loss_agg_mode='seq-mean-token-sum', clip_ratio_high=0.28),
  'dual clip': ours(**BY_ROW, clip_ratio_c=1.5),
  'gspo-token': ours(GspoConfig, clip_ratio_low=0.03, clip_ratio_high=0.04),
  'sampler_is': ours(**BY_ROW, rollout_is='token', rollout_is_threshold=1.2),
  'kl': ours(**BY_ROW, **KL, kl_loss_type='k1', allow_zero_gradient_kl=True),
  'mse_kl': ours(**BY_ROW, **KL, kl_loss_type='k2'),
  'low_var_kl': ours(**BY_ROW, **KL, kl_loss_type='k3'),
  'ppo': ours(PpoConfig, clip_ratio_high=0.28),
  'ppo dual clip': ours(PpoConfig, clip_ratio_c=1.5),
  'ppo entropy': ours(PpoConfig, entropy_coeff=0.1),
}


def outputs_of(logits, batch, temperature):
  """Our logprobs and entropies [rows, time] of logits [rows, 1 + time, vocab]: they are the hidden
  states.
  """
  tokens = jnp.asarray(np.concatenate([batch['prompt'], batch['tokens']], axis=1))
  scale = jnp.full(tokens.shape, temperature, logits.dtype)
  kernel = jnp.eye(VOCAB, dtype=logits.dtype)
  found = token_logprobs(logits, kernel, tokens, jnp.ones_like(tokens), scale, token_chunk=1 + TIME)
  return found.logprobs[:, 1:], found.entropy[:, 1:]


@pytest.mark.parametrize('name', TUNIX)
def test_tunix_policy_losses_down_to_the_logits(name, tunix, holed):
  loss = policy_loss(TUNIX[name], holed, advantages=holed['token_advantages'])
  # Its PPO knows no temperature.
  temperature = 1.0 if name.startswith('ppo') else holed['temperature']

  def composed(logits):
    return loss(*outputs_of(logits, holed, temperature))

  assert_equal(tunix, name, composed, holed['logits'], tolerance=SINGLE)


def test_every_tunix_case_says_something_of_its_own(tunix):
  losses = [float(x) for name, x in tunix.items() if name.endswith('/loss')]
  assert len(np.unique(losses)) == len(losses)


def test_tunix_value_loss(tunix, holed):
  chunks = chunks_of(holed, values=holed['old_values'], returns=holed['returns'])
  critic = policy_gradient(PpoConfig(cliprange_value=0.2), SETTING).critic_loss

  # The value of the state before a token is read at the token before it.
  def loss(values):
    return total(critic(TokenValues(joined(values[:, :-1])), chunks, {})[0])

  assert_equal(tunix, 'value loss', loss, holed['new_values'], tolerance=SINGLE)


@pytest.mark.parametrize(
  ('name', 'options'),
  [
    ('divergence kl', {'kind': 'k1'}),
    ('divergence mse_kl', {'kind': 'k2'}),
    ('divergence low_var_kl', {'kind': 'k3', 'log_ratio_limit': np.inf, 'limit': np.inf}),
    ('divergence low_var_kl clamped', {'kind': 'k3', 'log_ratio_limit': np.inf, 'limit': 10.0}),
  ],
)
def test_tunix_divergences(name, options, tunix, holed):
  """Of log ratios up to 30: without its limits ours grows as theirs does."""

  def found(x):
    return kl_estimate(x, jnp.asarray(holed['far_reference']), **options)

  logprobs = jnp.asarray(holed['logprobs'])
  np.testing.assert_allclose(found(logprobs), tunix[f'{name}/values'], rtol=SINGLE, atol=1e-6)
  gradient = jax.grad(lambda x: found(x).sum())(logprobs)
  np.testing.assert_allclose(gradient, tunix[f'{name}/gradient'], rtol=SINGLE, atol=1e-6)


@pytest.mark.parametrize(
  ('name', 'found'),
  [
    ('grpo', group_advantages),
    ('drgrpo', lambda rewards, groups: group_advantages(rewards, groups, normalize_by_std=False)),
    ('rloo', leave_one_out),
  ],
)
def test_tunix_group_advantages(name, found, tunix, holed):
  advantages = found(scored(holed['rewards']), GROUPS).advantages
  np.testing.assert_allclose(advantages, tunix[f'{name}/advantages'], rtol=SINGLE, atol=1e-6)


def test_equal_rewards_give_a_signal_in_tunix_and_none_here(tunix):
  assert (np.abs(tunix['grpo of equal rewards/advantages']) > 0.1).all()
  assert (group_advantages([float(np.float32(2.3))] * 10, ['0'] * 10).advantages == 0.0).all()


@pytest.mark.parametrize(
  ('name', 'gamma', 'lam'), [('gae', 0.9, 0.8), ('gae undiscounted', 1.0, 1.0)]
)
def test_tunix_gae_carries_through_holes_as_ours_does(name, gamma, lam, tunix, holed):
  mask = holed['mask']
  rows = zip(holed['token_rewards'], holed['old_values'], mask, strict=True)
  found = [masked_gae(*row, gamma=gamma, lam=lam) for row in rows]
  advantages = whiten([row for row, _ in found], list(mask))
  np.testing.assert_allclose(
    np.stack(advantages)[mask], tunix[f'{name}/advantages'][mask], rtol=SINGLE, atol=1e-5
  )
  returns = np.stack([row for _, row in found])
  np.testing.assert_allclose(returns[mask], tunix[f'{name}/returns'][mask], rtol=SINGLE, atol=1e-5)


def test_tunix_overlong_penalty_is_ours_up_to_the_limit_and_does_not_stop_there(tunix, holed):
  lengths = holed['overlong_lengths']
  penalty = overlong_penalty(lengths, max_length=10, buffer=4, factor=2.0)
  within = lengths <= 10
  np.testing.assert_allclose(penalty[within], tunix['overlong/rewards'][within], rtol=1e-12)
  assert (penalty[~within] == -2.0).all() and (tunix['overlong/rewards'][~within] < -2.0).all()


@pytest.mark.parametrize(('name', 'smoothing'), [('dpo', 0.0), ('dpo smoothed', 0.2)])
def test_tunix_dpo(name, smoothing, tunix, holed):
  loss = dpo_of(DpoConfig(beta=0.3, label_smoothing=smoothing), holed)
  assert_equal(
    tunix, name, lambda x: loss(outputs_of(x, holed, 1.0)[0]), holed['logits'], tolerance=SINGLE
  )
