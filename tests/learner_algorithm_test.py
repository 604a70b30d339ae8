"""Algorithms on hand-worked numbers: given logprobs in, named terms and statistics out."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.batching.chunks import Chunks
from jaxrl_llm.batching.plan import Row
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.learner.algorithm import GrpoConfig, SftConfig, grpo, sft
from jaxrl_llm.ops.logprobs import TokenLogprobs

LN2 = math.log(2.0)


def row(i: int, group: str, reward: float | None) -> Row:
  return Row(
    uid=f's/{i}',
    source='rows.arrayrecord',
    index=i,
    length=4,
    prompt_len=1,
    group=group,
    reward=reward,
    is_expert=False,
    truncated=False,
    version_step=0,
  )


# Two groups: (2, 0) and (3, 1, unscorable). Means 1 and 2, deviations ±1, population std 1: advantages ±1 and ±1.
ROWS = [row(0, 'a', 2.0), row(1, 'a', 0.0), row(2, 'b', 3.0), row(3, 'b', 1.0), row(4, 'b', None)]
CONFIG = GrpoConfig(adv_ddof=0, adv_eps=0.0)
# Importance ratios of the completions' tokens; each sequence has a prompt of one token before them.
RATIOS = [[1.5, 0.5], [0.5, 4.0, 1.0], [1.0], [1.1], [7.0, 7.0]]


def batch(rows=ROWS, ratios=RATIOS, *, config=CONFIG, proximal=-2.0, **fields) -> tuple[TokenLogprobs, Chunks]:
  """One chunk that holds the sequences one after the other and four places of padding, junk where nothing counts."""
  annotation = grpo(config).annotate(rows)
  segments, mask, advantages, logprobs = [], [], [], []
  for i, own in enumerate(ratios):
    segments += [i + 1] * (1 + len(own))
    mask += [False] + [bool(annotation.in_loss[i])] * len(own)
    advantages += [0.0] + [float(annotation.advantages[i])] * len(own)
    logprobs += [77.0] + [proximal + math.log(r) for r in own]
  pad = lambda values, filler: jnp.array([values + [filler] * 4])
  segments, mask = pad(segments, 0), pad(mask, False)
  everywhere = jnp.ones(segments.shape, jnp.float32)
  chunks = Chunks(
    tokens=jnp.zeros_like(segments),
    positions=jnp.zeros_like(segments),
    segment_ids=segments,
    loss_mask=mask,
    is_expert=jnp.zeros_like(mask),
    behaviour_logprobs=proximal * everywhere,
    proximal_logprobs=proximal * everywhere,
    reference_logprobs=fields.get('reference', math.nan) * everywhere,
    advantages=pad(advantages, 0.0),
    temperature=jnp.ones((1, len(ratios)), jnp.float32),
  )
  return TokenLogprobs(pad(logprobs, -99.0), fields.get('entropy', 0.5) * everywhere), chunks


def total(terms) -> float:
  return float(sum(t.weight * t.numerator / t.denominator for t in terms.values()))


def mean(stat) -> float:
  return float(stat.total / stat.count)


# Token losses, clip 0.2/0.2, dual clip 3: -min(r, 1.2) for A = 1; min(max(r, 0.8), 3) for A = -1.
#   s1 (+1): r = 1.5, 0.5    -> -1.2, -0.5      sum -1.7, mean -0.85
#   s2 (-1): r = 0.5, 4, 1   ->  0.8, 3.0, 1.0  sum  4.8, mean  1.6
#   s3 (+1): r = 1           -> -1.0
#   s4 (-1): r = 1.1         ->  1.1
#   s5: unscorable, in no sum and no count. Sum 3.2 over 7 tokens of 4 sequences.
@pytest.mark.parametrize(
  ('mode', 'loss'),
  [
    ('token-mean', 3.2 / 7),
    ('seq-mean-token-sum', 3.2 / 4),
    ('seq-mean-token-mean', (-0.85 + 1.6 - 1.0 + 1.1) / 4),
    ('seq-mean-token-sum-norm', 3.2 / (4 * 10)),
  ],
)
def test_hand_worked_grpo_loss(mode, loss):
  config = dataclasses.replace(CONFIG, loss_agg_mode=mode, loss_scale_factor=10.0)
  terms, _ = grpo(config).loss(*batch(config=config))
  assert set(terms) == {'actor/pg_loss'}
  assert total(terms) == pytest.approx(loss, rel=1e-5)


def test_hand_worked_statistics():
  _, stats = grpo(CONFIG).loss(*batch())
  assert mean(stats['actor/pg_clipfrac']) == pytest.approx(2 / 7)  # s1's 1.5 and s2's 0.5
  assert mean(stats['actor/pg_clipfrac_lower']) == pytest.approx(1 / 7)  # s2's 4
  # Mean of -ln r over 1.5, 0.5, 0.5, 4, 1, 1, 1.1, whose product is 1.65.
  assert mean(stats['actor/ppo_kl']) == pytest.approx(-math.log(1.65) / 7, rel=1e-4)
  assert mean(stats['actor/entropy']) == pytest.approx(0.5)


def test_without_dual_clip_the_bad_token_counts_in_full():
  # s2's token with r = 4 gives 4 instead of 3: 4.2 / 7.
  config = dataclasses.replace(CONFIG, clip_ratio_c=None)
  terms, stats = grpo(config).loss(*batch())
  assert total(terms) == pytest.approx(4.2 / 7, rel=1e-5)
  assert mean(stats['actor/pg_clipfrac_lower']) == 0.0


def test_clip_range_is_asymmetric():
  # high 0.6 lets s1's 1.5 through (-1.5, not -1.2); low 0.6 lets s2's 0.5 through (0.5, not 0.8): 3.2 - 0.3 - 0.3.
  config = dataclasses.replace(CONFIG, clip_ratio_low=0.6, clip_ratio_high=0.6)
  assert total(grpo(config).loss(*batch())[0]) == pytest.approx(2.6 / 7, rel=1e-5)
  # Only one of them: 2.9.
  config = dataclasses.replace(CONFIG, clip_ratio_high=0.6)
  assert total(grpo(config).loss(*batch())[0]) == pytest.approx(2.9 / 7, rel=1e-5)


def test_gradient_flows_only_through_unclipped_tokens_of_scored_rows():
  """d loss / d logprob = -r A where no clip is in force, else 0: over 7 tokens, in the order of RATIOS."""
  outputs, chunks = batch()
  loss = lambda logprobs: total_of(grpo(CONFIG), outputs._replace(logprobs=logprobs), chunks)
  found = jax.grad(loss)(outputs.logprobs)[0] * 7
  # s1: 1.5 clipped, 0.5 not; s2: 0.5 clipped, 4 held by the dual clip, 1 not; s3; s4; s5 unscorable.
  expected = [0, 0, -0.5, 0, 0, 0, 1.0, 0, -1.0, 0, 1.1, 0, 0, 0, 0, 0, 0, 0]
  np.testing.assert_allclose(found, expected, atol=1e-5)


def total_of(algorithm, outputs, chunks):
  terms, _ = algorithm.loss(outputs, chunks)
  return sum(t.weight * t.numerator / t.denominator for t in terms.values())


def test_annotation_of_two_groups():
  found = grpo(CONFIG).annotate(ROWS)
  np.testing.assert_array_equal(found.advantages, [1, -1, 1, -1, 0])
  np.testing.assert_array_equal(found.in_loss, [True, True, True, True, False])
  assert found.metrics == {'frac_reward_zero_std': (0.0, 2.0), 'num_unscorable': (1.0, 1.0)}
  # Sample std of (2, 0) is sqrt 2; without std only the mean goes: ±1 again, and 2.0 scales it for rewards (4, 0).
  two = [row(0, 'a', 4.0), row(1, 'a', 0.0)]
  np.testing.assert_allclose(grpo(GrpoConfig(adv_eps=0.0)).annotate(two).advantages, [0.5**0.5, -(0.5**0.5)])
  np.testing.assert_array_equal(grpo(GrpoConfig(norm_adv_by_std=False)).annotate(two).advantages, [2.0, -2.0])


def test_nothing_scorable_divides_by_nothing():
  found = grpo(CONFIG).annotate([row(0, 'a', None), row(1, 'a', None)])
  assert found.metrics == {'frac_reward_zero_std': (0.0, 1.0), 'num_unscorable': (2.0, 1.0)}
  assert not found.in_loss.any() and not found.advantages.any()


def test_reference_is_read_only_with_a_coefficient():
  assert grpo(CONFIG).reads == frozenset()
  assert sft(SftConfig()).reads == frozenset()
  with_kl = dataclasses.replace(CONFIG, kl_loss_coef=1e-3)
  assert grpo(with_kl).reads == {'reference'}
  # The reference is NaN in this batch: it reaches the loss only where it is read.
  assert np.isfinite(total(grpo(CONFIG).loss(*batch())[0]))
  assert np.isnan(total(grpo(with_kl).loss(*batch())[0]))


def test_k1_in_the_loss_is_refused_unless_asked_for():
  with pytest.raises(UserError, match='allow_zero_gradient_kl'):
    grpo(GrpoConfig(kl_loss_coef=0.1, kl_loss_type='k1'))
  assert grpo(GrpoConfig(kl_loss_type='k1')).reads == frozenset()  # no coefficient, no harm
  allowed = GrpoConfig(kl_loss_coef=0.1, kl_loss_type='k1', allow_zero_gradient_kl=True)
  assert grpo(allowed).reads == {'reference'}


@pytest.mark.parametrize(
  ('kind', 'unbiased', 'value', 'slope'),
  [
    # One token, d = logprob - reference = ln 2, importance ratio 3/2, coefficient 0.1, advantage 0.
    ('k2', True, LN2**2 / 2, LN2),
    ('k3', False, LN2 - 0.5, 0.5),  # k3 = e^-d + d - 1; its slope is 1 - e^-d
    # r k3 has slope r k3 + r (1 - e^-d) = r d: the gradient of the reverse KL.
    ('k3', True, 1.5 * (LN2 - 0.5), 1.5 * LN2),
  ],
)
def test_hand_worked_kl_term_and_its_gradient(kind, unbiased, value, slope):
  config = GrpoConfig(kl_loss_coef=0.1, kl_loss_type=kind, kl_unbiased_gradient=unbiased)
  reference = -2.0 + math.log(1.5) - LN2
  outputs, chunks = batch([row(0, 'a', 1.0)], [[1.5]], config=config, reference=reference)
  terms, stats = grpo(config).loss(outputs, chunks)
  assert terms['actor/kl_loss'].weight == 0.1
  assert total(terms) == pytest.approx(0.1 * value, rel=1e-4)
  # The metric is the estimate itself, whatever the gradient needs.
  assert mean(stats['actor/kl']) == pytest.approx(LN2 - 0.5 if kind == 'k3' else value, rel=1e-4)
  loss = lambda logprobs: total_of(grpo(config), outputs._replace(logprobs=logprobs), chunks)
  assert float(jax.grad(loss)(outputs.logprobs)[0, 1]) == pytest.approx(0.1 * slope, rel=1e-4)


def test_entropy_bonus_lowers_the_loss_of_uncertain_policies():
  config = dataclasses.replace(CONFIG, entropy_coeff=0.01)
  terms, _ = grpo(config).loss(*batch(entropy=2.0))
  assert total(terms) == pytest.approx(3.2 / 7 - 0.01 * 2.0, rel=1e-5)


def test_hand_worked_sft_loss():
  # Two demonstrations, -log p: 1, 3 | 2. Token mean 2; sequence means 2 and 2, sums 4 and 2.
  rows = [row(0, 'a', None), row(1, 'b', None)]
  annotation = sft(SftConfig()).annotate(rows)
  assert annotation.in_loss.all()  # a demonstration needs no reward
  outputs, chunks = batch([row(0, 'a', 1.0), row(1, 'b', 1.0)], [[1.0, 1.0], [1.0]])
  outputs = outputs._replace(logprobs=outputs.logprobs.at[0, jnp.array([1, 2, 4])].set(jnp.array([-1.0, -3.0, -2.0])))
  for mode, loss in {
    'token-mean': 6 / 3,
    'seq-mean-token-mean': (2 + 2) / 2,
    'seq-mean-token-sum': (4 + 2) / 2,
  }.items():
    terms, _ = sft(SftConfig(loss_agg_mode=mode)).loss(outputs, chunks)
    assert total(terms) == pytest.approx(loss)


@pytest.mark.parametrize('algorithm', [grpo(GrpoConfig(kl_loss_coef=0.1, entropy_coeff=0.1)), sft(SftConfig())])
def test_denominators_depend_on_the_data_alone(algorithm):
  outputs, chunks = batch(reference=-1.0)
  zeros = jnp.zeros_like(outputs.logprobs)
  given, blank = (algorithm.loss(o, chunks)[0] for o in (outputs, TokenLogprobs(zeros, zeros)))
  assert {n: float(t.denominator) for n, t in given.items()} == {n: float(t.denominator) for n, t in blank.items()}
