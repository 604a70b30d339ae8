"""What the losses estimate, exactly: expected gradients by enumeration against gradients of the
definitions.
"""

import functools
import pickle

import enumeration as e
import jax
import numpy as np
import pytest
from fixtures import own_scorer
from fixtures.rewards_scorers import attempt
from paths import FIXTURES

from jaxrl_llm.advantages.group import GroupAdvantages
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.learner import policy_gradient


@functools.cache
def reward_gradient() -> np.ndarray:
  return e.gradient_of(e.expected_reward)


def assert_equal(found, exact):
  """To rounding: 1e-12 of the norm."""
  assert np.linalg.norm(found - exact) <= 1e-12 * np.linalg.norm(exact)


def differ(found, exact) -> bool:
  return np.linalg.norm(found - exact) > 0.01 * np.linalg.norm(exact)


def test_the_definitions_agree_with_each_other():
  """By finite differences; and the KL of the whole is the sum over prefixes of the conditional
  ones.
  """

  def log_softmax(table):
    return np.log(np.exp(table) / np.exp(table).sum(1, keepdims=True))

  step = np.zeros_like(e.POLICY)
  step[1, 2] = 1e-6
  with jax.enable_x64(True):
    up, down = (
      float(e.expected_reward(log_softmax(table))) for table in (e.POLICY + step, e.POLICY - step)
    )
    whole = float(e.sequence_kl(log_softmax(e.POLICY)))
    parts = float(e.conditional(e.reverse_kl, e.POLICY)(log_softmax(e.POLICY)))
  assert (up - down) / 2e-6 == pytest.approx(reward_gradient()[1, 2], rel=1e-6)
  assert whole == pytest.approx(parts, rel=1e-12)


@pytest.mark.full
@pytest.mark.parametrize('size', [2, 3])
@pytest.mark.parametrize(
  ('make', 'factor'),
  [
    (lambda: e.reinforce(), lambda size: 1.0),
    (lambda: e.reinforce(baseline=0.7), lambda size: 1.0),
    (lambda: e.catalogue('rloo'), lambda size: 1.0),
    (lambda: e.catalogue('rloo', bypass_old_logprobs=True), lambda size: 1.0),
    (lambda: e.catalogue('grpo', norm_adv_by_std=False, **e.SUM), lambda size: (size - 1) / size),
    # max_response_length is 2
    (lambda: e.catalogue('dr_grpo'), lambda size: (size - 1) / size / 2),
    (lambda: e.catalogue('opmd'), lambda size: (size - 1) / size),
  ],
  ids=['reinforce', 'reinforce-baseline', 'rloo', 'rloo-bypass', 'grpo-sum', 'dr_grpo', 'opmd'],
)
def test_on_policy_the_expected_gradient_is_that_of_the_expected_reward(make, factor, size):
  assert_equal(
    e.expected_gradient(make(), e.ON_POLICY, size=size), -factor(size) * reward_gradient()
  )


@pytest.mark.full
def test_away_from_its_reference_opmd_has_the_gradient_of_its_own_objective():
  found = e.expected_gradient(e.catalogue('opmd', tau=0.7), e.MOVED, size=3)
  assert_equal(
    found,
    e.gradient_of(lambda logprobs: e.mirror_descent(logprobs, start=e.OTHER, size=3, tau=0.7)),
  )


@pytest.mark.parametrize('size', [2, 3])
def test_sequence_weights_without_a_cap_make_stale_samples_as_good(size):
  weights = {'rollout_is': 'sequence', 'rollout_is_threshold': 1e6}
  assert_equal(
    e.expected_gradient(e.catalogue('rloo', **weights), e.STALE, size=size), -reward_gradient()
  )
  grpo = e.catalogue('grpo', norm_adv_by_std=False, **e.SUM, **weights)
  assert_equal(
    e.expected_gradient(grpo, e.STALE, size=size), -(size - 1) / size * reward_gradient()
  )


@pytest.mark.parametrize(
  'options',
  [
    {'rollout_is': 'none'},
    {'rollout_is': 'sequence', 'rollout_is_threshold': 1.2},  # the cap
    {'rollout_is': 'token', 'rollout_is_threshold': 1e6},  # the chance of the prefix
  ],
)
def test_other_corrections_leave_a_bias(options):
  assert differ(e.expected_gradient(e.catalogue('rloo', **options), e.STALE), -reward_gradient())


def test_a_wrong_baseline_is_seen(monkeypatch):
  """Were the sample itself in RLOO's baseline, as in GRPO's, the gradient would be half as long."""
  original = policy_gradient.leave_one_out

  def with_itself(rewards, groups) -> GroupAdvantages:
    found = original(rewards, groups)
    return found._replace(advantages=found.advantages / 2)

  monkeypatch.setattr(policy_gradient, 'leave_one_out', with_itself)
  assert_equal(e.expected_gradient(e.catalogue('rloo'), e.ON_POLICY), -reward_gradient() / 2)


def kl_gradient(policies, **options):
  algorithm = e.catalogue('rloo', kl_loss_coef=0.3, allow_zero_gradient_kl=True, **options)
  return e.expected_gradient(algorithm, policies, terms={'actor/kl_loss'}) / 0.3


def test_k1_in_the_loss_has_no_expected_gradient():
  found = kl_gradient(e.ON_POLICY, kl_loss_type='k1')
  assert np.abs(found).max() < 1e-15
  # Divided by a number that was sampled, the batch's tokens, it has one: here away from what is
  # wanted.
  by_tokens = kl_gradient(e.ON_POLICY, kl_loss_type='k1', loss_agg_mode='token-mean')
  cosine, ratio = e.likeness(by_tokens, e.gradient_of(e.sequence_kl))
  assert cosine < -0.5 and ratio > 0.1


def test_k2_and_unbiased_k3_in_the_loss_have_the_gradient_of_the_kl_at_the_sampled_prefixes():
  exact = e.gradient_of(e.conditional(e.reverse_kl, e.POLICY))
  assert_equal(kl_gradient(e.ON_POLICY, kl_loss_type='k2'), exact)
  assert_equal(kl_gradient(e.ON_POLICY, kl_loss_type='k3'), exact)
  # Which is not the whole: how often the policy comes by a prefix depends on the policy, too.
  assert differ(exact, e.gradient_of(e.sequence_kl))


@pytest.mark.parametrize('kind', ['k2', 'k3'])
def test_of_samples_of_the_proximal_policy_the_importance_ratio_keeps_the_gradient(kind):
  exact = e.gradient_of(e.conditional(e.reverse_kl, e.OTHER))
  assert_equal(kl_gradient(e.MOVED, kl_loss_type=kind), exact)
  assert differ(kl_gradient(e.MOVED, kl_loss_type=kind, kl_unbiased_gradient=False), exact)


def test_stale_samples_give_the_kl_term_the_sampler_s_weights():
  """No correction acts on the KL: the ratio is 1 there, and tokens come as often as the sampler
  drew them.
  """
  exact = e.gradient_of(e.conditional(e.reverse_kl, e.OTHER))
  assert differ(kl_gradient(e.STALE, kl_loss_type='k3'), exact)
  assert_equal(kl_gradient(e.STALE, kl_loss_type='k3'), kl_gradient(e.STALE, kl_loss_type='k2'))


def test_plain_k3_in_the_loss_has_the_forward_kl_s_gradient():
  found = kl_gradient(e.ON_POLICY, kl_loss_type='k3', kl_unbiased_gradient=False)
  assert_equal(found, e.gradient_of(e.conditional(e.forward_kl, e.POLICY)))
  assert differ(found, e.gradient_of(e.conditional(e.reverse_kl, e.POLICY)))


def test_k1_in_the_reward_has_the_gradient_of_the_kl_of_whole_sequences():
  found = e.expected_gradient(e.penalised('k1', 0.3), e.ON_POLICY)
  assert_equal(found, -reward_gradient() + 0.3 * e.gradient_of(e.sequence_kl))
  assert_equal(e.penalty_gradient('k1'), e.gradient_of(e.sequence_kl))


def test_k3_in_the_reward_lacks_the_gradient_of_its_own_value():
  """Its mean is the KL, but a reward is a constant: the part that is k3's gradient in a loss is
  missing.
  """
  lacking = e.gradient_of(e.conditional(e.forward_kl, e.POLICY))
  assert_equal(e.penalty_gradient('k3'), e.gradient_of(e.sequence_kl) - lacking)
  assert differ(e.penalty_gradient('k2'), e.gradient_of(e.sequence_kl))


def test_the_entropy_term_has_the_gradient_of_the_entropy_at_the_prefixes_that_were_sampled():
  algorithm = e.catalogue('rloo', entropy_coeff=0.3)
  found = e.expected_gradient(algorithm, e.ON_POLICY, terms={'actor/entropy_loss'})
  assert_equal(found, -0.3 * e.gradient_of(e.conditional(e.entropy, e.POLICY)))


@pytest.mark.full
def test_the_document_says_what_the_computation_gives():
  document = e.DOCUMENT.read_text()
  assert document == e.filled(document)
  with pytest.raises(ValueError, match='exactly one part'):
    e.filled(document.replace('<!-- begin: algorithms -->', ''))


@pytest.mark.parametrize('name', ['own_algorithm.py', 'own_scorer.py'])
def test_the_examples_are_short(name):
  assert len((FIXTURES / name).read_text().splitlines()) <= 30


def test_the_example_s_scorer():
  # As it goes to a worker.
  scorer = pickle.loads(pickle.dumps(own_scorer.make_scorer(excess=0.25)))
  assert [
    scorer(attempt(text, truth='abcd')).value for text in ('abcd', ' abxd', 'abcdef', 'x')
  ] == [
    1.0,
    0.75,
    0.5,
    0.0,
  ]
  assert scorer(attempt('abcd', truth=None)).value is None
  with pytest.raises(UserError, match='excess is -1'):
    own_scorer.make_scorer(excess=-1)
