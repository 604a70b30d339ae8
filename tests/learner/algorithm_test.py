"""Algorithms on hand-worked numbers: given logprobs in, named terms and statistics out."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages.shaping import MuSchedule
from jaxrl_llm.batching.chunks import Chunks
from jaxrl_llm.batching.plan import Row
from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.learner.algorithm import Closed, ReferenceRule, Setting
from jaxrl_llm.learner.catalogue import ALGORITHMS, OFFLINE, PAIRWISE
from jaxrl_llm.learner.mix import MixConfig, mix
from jaxrl_llm.learner.opmd import OpmdConfig, opmd
from jaxrl_llm.learner.policy_gradient import policy_gradient
from jaxrl_llm.learner.policy_options import (
  CispoConfig,
  DapoConfig,
  GrpoConfig,
  PolicyGradientConfig,
  PpoConfig,
  ReinforcePlusPlusConfig,
)
from jaxrl_llm.learner.preference import DpoConfig, RewardModelConfig, dpo, reward_model
from jaxrl_llm.learner.supervised import SftConfig, sft
from jaxrl_llm.ops.logprobs import SequenceScores, TokenLogprobs, TokenValues

LN2 = math.log(2.0)
SETTING = Setting(max_response_length=10)


def row(i: int, group: str, reward: float | None, **changes) -> Row:
  plain = Row(
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
  return dataclasses.replace(plain, **changes)


def grpo(config: PolicyGradientConfig):
  return policy_gradient(config, SETTING)


def annotated(algorithm, rows, *, step=0, state=None, **tokens):
  return algorithm.annotate(Closed(rows, step, tokens, state))


def lost(config: PolicyGradientConfig, outputs, chunks):
  """Terms and statistics, with the constants of an annotation."""
  algorithm = grpo(config)
  return algorithm.loss(
    outputs, chunks, annotated(algorithm, [row(0, 'a', 1.0)], **tokens_of(algorithm)).constants
  )


def tokens_of(algorithm, count: int = 1, length: int = 4):
  """Columns that such an annotation reads; every token but the first is trained."""
  mask = np.arange(length) > 0

  def values(name):
    return mask if name == 'loss_mask' else np.zeros(length, np.float32)

  return {name: [values(name)] * count for name in algorithm.on_host}


# Two groups: (2, 0) and (3, 1, unscorable). Means 1 and 2, deviations ±1, population std 1:
# advantages ±1 and ±1.
ROWS = [row(0, 'a', 2.0), row(1, 'a', 0.0), row(2, 'b', 3.0), row(3, 'b', 1.0), row(4, 'b', None)]
CONFIG = GrpoConfig(adv_ddof=0, adv_eps=0.0)
# Importance ratios of the completions' tokens; each sequence has a prompt of one token before them.
RATIOS = [[1.5, 0.5], [0.5, 4.0, 1.0], [1.0], [1.1], [7.0, 7.0]]


def batch(
  rows=ROWS, ratios=RATIOS, *, config=CONFIG, proximal=-2.0, **fields
) -> tuple[TokenLogprobs, Chunks]:
  """One chunk that holds the sequences one after the other and four places of padding, junk where
  nothing counts.
  """
  annotation = annotated(grpo(config), rows)
  segments, mask, advantages, logprobs = [], [], [], []
  for i, own in enumerate(ratios):
    segments += [i + 1] * (1 + len(own))
    mask += [False] + [bool(annotation.in_loss[i])] * len(own)
    advantages += [0.0] + [float(annotation.advantages[i])] * len(own)
    logprobs += [77.0] + [proximal + math.log(r) for r in own]

  def pad(values, filler):
    return jnp.array([values + [filler] * 4])

  segments, mask = pad(segments, 0), pad(mask, False)
  everywhere = jnp.ones(segments.shape, jnp.float32)
  chunks = Chunks(
    tokens=jnp.zeros_like(segments),
    positions=jnp.zeros_like(segments),
    segment_ids=segments,
    loss_mask=mask,
    reported=mask,
    is_expert=jnp.zeros_like(mask),
    behaviour_logprobs=proximal * everywhere,
    proximal_logprobs=proximal * everywhere,
    reference_logprobs=fields.get('reference', math.nan) * everywhere,
    advantages=pad(advantages, 0.0),
    values=fields.get('values', 0.0) * everywhere,
    returns=fields.get('returns', 0.0) * everywhere,
    temperature=jnp.ones((1, len(ratios)), jnp.float32),
    pair=jnp.asarray(fields.get('pair', jnp.zeros((1, len(ratios)))), jnp.int32),
    label=jnp.asarray(fields.get('label', jnp.zeros((1, len(ratios)))), jnp.float32),
  )
  return TokenLogprobs(pad(logprobs, -99.0), fields.get('entropy', 0.5) * everywhere), chunks


def sum_of(terms):
  return sum(t.weight * t.numerator / t.denominator for t in terms.values())


def total(terms) -> float:
  return float(sum_of(terms))


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
  terms, _ = lost(config, *batch(config=config))
  assert set(terms) == {'actor/pg_loss'}
  assert total(terms) == pytest.approx(loss, rel=1e-5)


def test_hand_worked_statistics():
  _, stats = lost(CONFIG, *batch())
  assert mean(stats['actor/pg_clipfrac']) == pytest.approx(2 / 7)  # s1's 1.5 and s2's 0.5
  assert mean(stats['actor/pg_clipfrac_lower']) == pytest.approx(1 / 7)  # s2's 4
  # Mean of -ln r over 1.5, 0.5, 0.5, 4, 1, 1, 1.1, whose product is 1.65.
  assert mean(stats['actor/ppo_kl']) == pytest.approx(-math.log(1.65) / 7, rel=1e-4)
  assert mean(stats['actor/entropy']) == pytest.approx(0.5)


def test_without_dual_clip_the_bad_token_counts_in_full():
  # s2's token with r = 4 gives 4 instead of 3: 4.2 / 7.
  config = dataclasses.replace(CONFIG, clip_ratio_c=None)
  terms, stats = lost(config, *batch())
  assert total(terms) == pytest.approx(4.2 / 7, rel=1e-5)
  assert mean(stats['actor/pg_clipfrac_lower']) == 0.0


def test_clip_range_is_asymmetric():
  # high 0.6 lets s1's 1.5 through (-1.5, not -1.2); low 0.6 lets s2's 0.5 through (0.5, not 0.8):
  # 3.2 - 0.3 - 0.3.
  config = dataclasses.replace(CONFIG, clip_ratio_low=0.6, clip_ratio_high=0.6)
  assert total(lost(config, *batch())[0]) == pytest.approx(2.6 / 7, rel=1e-5)
  # Only one of them: 2.9.
  config = dataclasses.replace(CONFIG, clip_ratio_high=0.6)
  assert total(lost(config, *batch())[0]) == pytest.approx(2.9 / 7, rel=1e-5)


def test_gradient_flows_only_through_unclipped_tokens_of_scored_rows():
  """d loss / d logprob = -r A where no clip is in force, else 0: over 7 tokens, in the order of
  RATIOS.
  """
  outputs, chunks = batch()

  def loss(logprobs):
    return sum_of(lost(CONFIG, outputs._replace(logprobs=logprobs), chunks)[0])

  found = jax.grad(loss)(outputs.logprobs)[0] * 7
  # s1: 1.5 clipped, 0.5 not; s2: 0.5 clipped, 4 held by the dual clip, 1 not; s3; s4; s5
  # unscorable.
  expected = [0, 0, -0.5, 0, 0, 0, 1.0, 0, -1.0, 0, 1.1, 0, 0, 0, 0, 0, 0, 0]
  np.testing.assert_allclose(found, expected, atol=1e-5)


def test_annotation_of_two_groups():
  found = annotated(grpo(CONFIG), ROWS)
  np.testing.assert_array_equal(found.advantages, [1, -1, 1, -1, 0])
  np.testing.assert_array_equal(found.in_loss, [True, True, True, True, False])
  assert found.metrics == {'frac_reward_zero_std': (0.0, 2.0), 'num_unscorable': (1.0, 1.0)}
  # Sample std of (2, 0) is sqrt 2; without std only the mean goes: ±1 again, and 2.0 scales it for
  # rewards (4, 0).
  two = [row(0, 'a', 4.0), row(1, 'a', 0.0)]
  np.testing.assert_allclose(
    annotated(grpo(GrpoConfig(adv_eps=0.0)), two).advantages, [0.5**0.5, -(0.5**0.5)]
  )
  np.testing.assert_array_equal(
    annotated(grpo(GrpoConfig(norm_adv_by_std=False)), two).advantages, [2.0, -2.0]
  )


def test_nothing_scorable_divides_by_nothing():
  found = annotated(grpo(CONFIG), [row(0, 'a', None), row(1, 'a', None)])
  assert found.metrics == {'frac_reward_zero_std': (0.0, 1.0), 'num_unscorable': (2.0, 1.0)}
  assert not found.in_loss.any() and not found.advantages.any()


def test_reference_is_read_only_with_a_coefficient():
  assert grpo(CONFIG).reads == {'proximal'}
  assert grpo(GrpoConfig(bypass_old_logprobs=True)).reads == frozenset()
  assert sft(SftConfig(), SETTING).reads == frozenset()
  with_kl = dataclasses.replace(CONFIG, kl_loss_coef=1e-3)
  assert grpo(with_kl).reads == {'proximal', 'reference'}
  # The reference is NaN in this batch: it reaches the loss only where it is read.
  assert np.isfinite(total(lost(CONFIG, *batch())[0]))
  assert np.isnan(total(lost(with_kl, *batch())[0]))


def test_k1_in_the_loss_is_refused_unless_asked_for():
  with pytest.raises(UserError, match='allow_zero_gradient_kl'):
    grpo(GrpoConfig(kl_loss_coef=0.1, kl_loss_type='k1'))
  assert grpo(GrpoConfig(kl_loss_type='k1')).reads == {'proximal'}  # no coefficient, no harm
  allowed = GrpoConfig(kl_loss_coef=0.1, kl_loss_type='k1', allow_zero_gradient_kl=True)
  assert grpo(allowed).reads == {'proximal', 'reference'}


@pytest.mark.parametrize(
  ('kind', 'unbiased', 'value', 'slope'),
  [
    # One token, d = logprob - reference = ln 2, importance ratio 3/2, coefficient 0.1, advantage 0.
    ('k2', False, LN2**2 / 2, LN2),
    ('k2', True, 1.5 * LN2**2 / 2, 1.5 * LN2),  # the ratio is held constant: r d again
    ('k3', False, LN2 - 0.5, 0.5),  # k3 = e^-d + d - 1; its slope is 1 - e^-d
    # r k3 has slope r k3 + r (1 - e^-d) = r d: the gradient of the reverse KL.
    ('k3', True, 1.5 * (LN2 - 0.5), 1.5 * LN2),
  ],
)
def test_hand_worked_kl_term_and_its_gradient(kind, unbiased, value, slope):
  config = GrpoConfig(kl_loss_coef=0.1, kl_loss_type=kind, kl_unbiased_gradient=unbiased)
  reference = -2.0 + math.log(1.5) - LN2
  outputs, chunks = batch([row(0, 'a', 1.0)], [[1.5]], config=config, reference=reference)
  terms, stats = lost(config, outputs, chunks)
  assert terms['actor/kl_loss'].weight == 0.1
  assert total(terms) == pytest.approx(0.1 * value, rel=1e-4)
  # The metric is the estimate itself, whatever the gradient needs.
  assert mean(stats['actor/kl']) == pytest.approx(
    LN2 - 0.5 if kind == 'k3' else LN2**2 / 2, rel=1e-4
  )

  def loss(logprobs):
    return sum_of(lost(config, outputs._replace(logprobs=logprobs), chunks)[0])

  assert float(jax.grad(loss)(outputs.logprobs)[0, 1]) == pytest.approx(0.1 * slope, rel=1e-4)


def test_entropy_bonus_lowers_the_loss_of_uncertain_policies():
  config = dataclasses.replace(CONFIG, entropy_coeff=0.01)
  terms, _ = lost(config, *batch(entropy=2.0))
  assert total(terms) == pytest.approx(3.2 / 7 - 0.01 * 2.0, rel=1e-5)


def test_hand_worked_sft_loss():
  # Two demonstrations, -log p: 1, 3 | 2. Token mean 2; sequence means 2 and 2, sums 4 and 2.
  rows = [row(0, 'a', None), row(1, 'b', None)]
  annotation = annotated(sft(SftConfig(), SETTING), rows)
  assert annotation.in_loss.all()  # a demonstration needs no reward
  outputs, chunks = batch([row(0, 'a', 1.0), row(1, 'b', 1.0)], [[1.0, 1.0], [1.0]])
  outputs = outputs._replace(
    logprobs=outputs.logprobs.at[0, jnp.array([1, 2, 4])].set(jnp.array([-1.0, -3.0, -2.0]))
  )
  for mode, loss in {
    'token-mean': 6 / 3,
    'seq-mean-token-mean': (2 + 2) / 2,
    'seq-mean-token-sum': (4 + 2) / 2,
  }.items():
    terms, _ = sft(SftConfig(loss_agg_mode=mode), SETTING).loss(outputs, chunks, {})
    assert total(terms) == pytest.approx(loss)


@pytest.mark.parametrize('name', ALGORITHMS)
def test_denominators_depend_on_the_data_alone(name):
  """Of every algorithm with all its terms: the update computes them from outputs that are 0."""
  config, make = ALGORITHMS[name]
  everything = {
    'kl_loss_coef': 0.1,
    'entropy_coeff': 0.1,
    'sft_loss_coef': 0.1,
    'center_rewards_coefficient': 0.1,
  }
  known = {field.name for field in dataclasses.fields(config)}
  algorithm = make(
    config(**{key: value for key, value in everything.items() if key in known}), SETTING
  )
  outputs, chunks = batch(
    reference=-1.0, pair=[[1, 1, 2, 2, 0]], label=[[1, -1, -1, 1, 0]], values=0.5
  )
  chunks = chunks.replace(is_expert=chunks.segment_ids == 2)
  constants = {'kl_coef': 0.1, 'mu': 0.3}
  of = {'lm': outputs, 'scalar': SequenceScores(jnp.arange(5.0)[None])}[algorithm.head]
  checked = [(algorithm.loss, of)]
  if algorithm.critic_loss is not None:
    checked.append((algorithm.critic_loss, TokenValues(outputs.logprobs)))
  for loss, given in checked:
    blank = jax.tree.map(jnp.zeros_like, given)
    one, other = (loss(o, chunks, constants)[0] for o in (given, blank))
    assert {n: float(t.denominator) for n, t in one.items()} == {
      n: float(t.denominator) for n, t in other.items()
    }
    assert all(float(t.denominator) > 0 for t in one.values())


def test_the_catalogue_names_what_learns_without_rollouts():
  assert set(ALGORITHMS) >= OFFLINE >= PAIRWISE
  for name, (config, make) in ALGORITHMS.items():
    algorithm = make(config(), SETTING)
    assert (algorithm.head == 'scalar') == (name == 'reward_model')
    assert (algorithm.critic_loss is not None) == (name == 'ppo')
    # Nothing is computed before the update for an algorithm that has no use for it.
    assert 'reference' not in algorithm.reads or name in ('opmd', 'dpo')
    assert algorithm.on_host <= {'loss_mask', 'values'}


@pytest.mark.parametrize(
  ('config', 'said'),
  [
    (GrpoConfig(adv_estimator='gae'), 'needs a critic; use algorithm ppo'),
    (PpoConfig(adv_estimator='rloo'), 'does not use its critic'),
    (GrpoConfig(kl_reward_coef=0.1), 'use kl_loss_coef'),
    (GrpoConfig(kl_target=0.1), 'set one of kl_loss_coef and kl_reward_coef'),
    (PpoConfig(kl_target=0.1, kl_loss_coef=0.1, kl_reward_coef=0.1), 'set one of kl_loss_coef'),
    (GrpoConfig(rollout_rs_low=0.9), 'go together; set both'),
  ],
)
def test_settings_that_contradict_each_other_are_one_line(config, said):
  with pytest.raises(UserError, match=f'^[^\n]*{said}[^\n]*$'):
    grpo(config)


@pytest.mark.parametrize(
  ('build', 'said'),
  [
    (lambda: grpo(GrpoConfig(adv_ddof=4)), 'grpo.adv_ddof: 4, wanted at least 0 and at most 1'),
    (lambda: grpo(GrpoConfig(adv_eps=-1e-6)), 'grpo.adv_eps: -1e-06, wanted at least 0'),
    (lambda: grpo(PpoConfig(gamma=1.5)), 'ppo.gamma: 1.5, wanted at least 0 and at most 1'),
    (lambda: grpo(PpoConfig(lam=-0.1)), 'ppo.lam: -0.1'),
    (lambda: grpo(PpoConfig(cliprange_value=0.0)), 'ppo.cliprange_value: 0.0, wanted above 0'),
    (lambda: grpo(GrpoConfig(kl_loss_coef=-0.1)), 'grpo.kl_loss_coef: -0.1'),
    (lambda: grpo(GrpoConfig(kl_loss_coef=math.inf)), 'grpo.kl_loss_coef: inf'),
    (
      lambda: grpo(ReinforcePlusPlusConfig(kl_reward_coef=-0.1)),
      'reinforce_plus_plus.kl_reward_coef: -0.1',
    ),
    (lambda: grpo(GrpoConfig(clip_ratio_low=-0.2)), 'grpo.clip_ratio_low: -0.2'),
    (
      lambda: grpo(GrpoConfig(clip_ratio_low=1.2)),
      'grpo.clip_ratio_low: 1.2, wanted at least 0 and at most 1',
    ),
    (lambda: grpo(DapoConfig(clip_ratio_high=-0.28)), 'dapo.clip_ratio_high: -0.28'),
    (
      lambda: grpo(CispoConfig(clip_ratio_high=-1.0)),
      'cispo.clip_ratio_high: -1.0, wanted above -1',
    ),
    (lambda: grpo(GrpoConfig(clip_ratio_high=math.nan)), 'grpo.clip_ratio_high: nan'),
    (lambda: grpo(GrpoConfig(clip_ratio_c=1.0)), 'grpo.clip_ratio_c: 1.0, wanted above 1'),
    (
      lambda: grpo(GrpoConfig(loss_scale_factor=-5.0)),
      'grpo.loss_scale_factor: -5.0, wanted above 0',
    ),
    (
      lambda: mix(MixConfig(loss_scale_factor=0.0), SETTING),
      'mix.loss_scale_factor: 0.0, wanted above 0',
    ),
    (
      lambda: grpo(GrpoConfig(entropy_coeff=math.nan)),
      'grpo.entropy_coeff: nan, wanted a finite number',
    ),
    (
      lambda: grpo(GrpoConfig(rollout_is_threshold=0.0)),
      'grpo.rollout_is_threshold: 0.0, wanted above 0',
    ),
    (
      lambda: grpo(GrpoConfig(rollout_is_lower=3.0)),
      'no weight is between rollout_is_lower 3.0 and',
    ),
    (
      lambda: grpo(GrpoConfig(rollout_is='icepop', rollout_is_threshold=0.5)),
      'no weight is between rollout_is_lower 0',
    ),
    (
      lambda: grpo(GrpoConfig(rollout_rs_low=2.0, rollout_rs_high=0.5)),
      'no ratio is between rollout_rs_low 2.0 and',
    ),
    (lambda: grpo(GrpoConfig(off_policy_seq_mask=-1.0)), 'grpo.off_policy_seq_mask: -1.0'),
    (lambda: grpo(GrpoConfig(overlong_penalty_factor=-1.0)), 'grpo.overlong_penalty_factor: -1.0'),
    (
      lambda: opmd(OpmdConfig(length_reward_weight=-1.0), SETTING),
      'opmd.length_reward_weight: -1.0',
    ),
    (lambda: opmd(OpmdConfig(tau=-0.1), SETTING), 'opmd.tau: -0.1, wanted at least 0'),
    (
      lambda: dpo(DpoConfig(label_smoothing=1.5), SETTING),
      'dpo.label_smoothing: 1.5, wanted at least 0 and at most 0.5',
    ),
    (lambda: dpo(DpoConfig(beta=math.nan), SETTING), 'dpo.beta: nan, wanted above 0'),
    (
      lambda: reward_model(RewardModelConfig(margin=math.inf), SETTING),
      'reward_model.margin: inf, wanted a finite',
    ),
  ],
  ids=lambda value: value if isinstance(value, str) else '',
)
def test_numbers_that_mean_nothing_are_one_line(build, said):
  with pytest.raises(UserError, match=re.escape(said)) as caught:
    build()
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  ('algorithm', 'said'),
  [
    (
      grpo(GrpoConfig(gamma=0.9)),
      ['grpo.gamma: 0.9 has no effect without adv_estimator reinforce_plus_plus or gae'],
    ),
    (
      grpo(ReinforcePlusPlusConfig(lam=0.9, gamma=0.9)),
      ['reinforce_plus_plus.lam: 0.9 has no effect without adv_estimator gae'],
    ),
    (grpo(PpoConfig(gamma=0.9, lam=0.9)), []),
    (
      grpo(PpoConfig(adv_eps=0.1, norm_adv_by_std=False)),
      ['ppo.norm_adv_by_std: False', 'ppo.adv_eps: 0.1'],
    ),
    (grpo(GrpoConfig(norm_adv_by_std=False, adv_ddof=0)), ['grpo.adv_ddof: 0']),
    (
      grpo(GrpoConfig(kl_loss_type='k2', kl_horizon=5.0)),
      ['grpo.kl_loss_type: ', 'grpo.kl_horizon: 5.0'],
    ),
    (
      grpo(GrpoConfig(reference=ReferenceRule(every=3))),
      ['grpo.reference: every=3 has no effect without kl_loss'],
    ),
    (grpo(GrpoConfig(reference=ReferenceRule(every=3), kl_loss_coef=0.1)), []),
    (
      grpo(GrpoConfig(rollout_is_threshold=5.0, bypass_old_logprobs=True)),
      ['grpo.rollout_is_threshold: 5.0'],
    ),
    (grpo(CispoConfig(clip_ratio_c=3.0)), ['cispo.clip_ratio_c: 3.0']),
    (grpo(GrpoConfig(loss_scale_factor=5.0)), ['grpo.loss_scale_factor: 5.0']),
    (
      mix(
        MixConfig(loss_scale_factor=5.0, expert_loss_agg_mode='seq-mean-token-sum-norm'), SETTING
      ),
      [],
    ),
    (
      mix(MixConfig(lam=0.5, mu=MuSchedule(kind='linear', warmup_steps=3)), SETTING),
      ['mix.lam: 0.5', 'mix.mu.warmup_steps: 3 has no effect without kind chord'],
    ),
    (opmd(OpmdConfig(overlong_penalty_factor=0.5), SETTING), ['opmd.overlong_penalty_factor: 0.5']),
  ],
  ids=lambda value: '',
)
def test_options_without_effect_are_named(algorithm, said):
  assert len(algorithm.no_effect) == len(said)
  for line, start in zip(algorithm.no_effect, said, strict=True):
    assert line.startswith(start) and '\n' not in line, line


def test_no_default_is_without_effect():
  for name, (config, make) in ALGORITHMS.items():
    assert make(config(), SETTING).no_effect == (), name


def test_infinity_switches_a_limit_off():
  for config in (
    GrpoConfig(rollout_is_threshold=math.inf, clip_ratio_high=math.inf, clip_ratio_c=None),
    GrpoConfig(rollout_rs_low=0.5, rollout_rs_high=math.inf, off_policy_seq_mask=math.inf),
  ):
    grpo(config)


def test_mix_refuses_what_its_policy_gradient_refuses():
  with pytest.raises(UserError, match='needs a critic'):
    mix(MixConfig(adv_estimator='gae'), SETTING)


@pytest.mark.parametrize(
  'fields', [{'every': 0}, {'ema': 1.0}, {'ema': -0.1}, {'every': 2, 'ema': 0.5}]
)
def test_a_reference_rule_says_one_thing(fields):
  with pytest.raises(UserError, match='reference'):
    ReferenceRule(**fields)


def test_hand_worked_token_returns_of_reinforce_plus_plus():
  # Tokens 1 and 3 are trained; reward 2 at the last, half of it a token earlier: returns 1 and 2.
  # The other row: 0, 0. Mean 3/4 and variance (1/16 + 25/16 + 9/16 + 9/16) / 3 = 11/12 of the four.
  mask = np.array([False, True, False, True])
  found = annotated(
    grpo(ReinforcePlusPlusConfig(gamma=0.5)),
    [row(0, 'a', 2.0), row(1, 'b', 0.0)],
    loss_mask=[mask, mask],
  )
  scale = math.sqrt(11 / 12)
  np.testing.assert_allclose(found.advantages[0], [0, 0.25 / scale, 0, 1.25 / scale], rtol=1e-7)
  np.testing.assert_allclose(found.advantages[1], [0, -0.75 / scale, 0, -0.75 / scale], rtol=1e-7)


def test_an_unscorable_row_is_in_no_whitening_and_in_no_loss():
  mask = np.array([False, True, True, True])
  rows = [row(0, 'a', 2.0), row(1, 'a', 1.0), row(2, 'b', None)]
  algorithm = grpo(ReinforcePlusPlusConfig())
  found = annotated(algorithm, rows, loss_mask=[mask] * 3)
  without = annotated(algorithm, rows[:2], loss_mask=[mask] * 2)
  assert not found.advantages[2].any() and found.in_loss.tolist() == [True, True, False]
  np.testing.assert_array_equal(found.advantages[:2], without.advantages)


def test_hand_worked_returns_and_value_loss_of_ppo():
  # Trained tokens 1 and 2 with values 1 and 3, reward 4 at the last; gamma 1/2, lambda 1: returns 2
  # and 4.
  config = PpoConfig(gamma=0.5, cliprange_value=0.5)
  mask, values = np.array([False, True, True, False]), np.array([7.0, 1.0, 3.0, 7.0], np.float32)
  found = annotated(grpo(config), [row(0, 'a', 4.0)], loss_mask=[mask], values=[values])
  np.testing.assert_allclose(found.returns[0], [0, 2, 4, 0])
  # Advantages 1 and 1 are all equal: they teach the policy nothing.
  np.testing.assert_array_equal(found.advantages[0], np.zeros(4))
  total_values, count = found.metrics['critic/values/mean']
  assert total_values / count == 2.0
  # The critic says 3 where it said 1 and the return is 2: held at 1.5, both miss by more than the
  # clip lets it see.
  outputs, chunks = batch([row(0, 'a', 1.0)], [[1.0]], values=1.0, returns=2.0)
  terms, stats = grpo(config).critic_loss(
    TokenValues(jnp.full_like(outputs.logprobs, 2.75)), chunks, {}
  )
  # |2.75 - 2| is more than |1.5 - 2|: not clipped
  assert total(terms) == pytest.approx(0.5 * 0.75**2)
  assert mean(stats['critic/vf_clipfrac']) == 0.0
  terms, stats = grpo(config).critic_loss(
    TokenValues(jnp.full_like(outputs.logprobs, 2.25)), chunks, {}
  )
  assert total(terms) == pytest.approx(0.5 * 0.5**2)
  assert mean(stats['critic/vf_clipfrac']) == 1.0


NAMED = (
  'values of row s/1 is nan at token 2, and not finite at 1 of the 2 tokens read; the row is left '
  'out of the loss'
)


def test_a_row_with_a_value_that_is_not_finite_leaves_the_loss_by_name_and_moves_no_other(caplog):
  mask = np.array([False, True, True, False])
  values = [
    np.array([7.0, 1.0, 3.0, 7.0], np.float32),
    np.array([7.0, 1.0, math.nan, 7.0], np.float32),
  ]
  # Junk where nothing is trained counts for nothing.
  values += [np.array([math.inf, 2.0, 1.0, math.nan], np.float32)]
  rows, algorithm = [row(0, 'a', 4.0), row(1, 'a', 1.0), row(2, 'b', 2.0)], grpo(PpoConfig())
  with caplog.at_level('WARNING', logger='absl'):
    found = annotated(algorithm, rows, loss_mask=[mask] * 3, values=values, step=5)
  assert [record.getMessage() for record in caplog.records] == [f'batch 5 of the stage: {NAMED}']
  without = annotated(algorithm, rows[::2], loss_mask=[mask] * 2, values=values[::2])
  assert (
    found.in_loss.tolist() == [True, False, True]
    and not found.advantages[1].any()
    and not found.returns[1].any()
  )
  for name in ('advantages', 'returns'):
    np.testing.assert_array_equal(getattr(found, name)[::2], getattr(without, name))
  assert (found.metrics['num_not_finite'], without.metrics['num_not_finite']) == (
    (1.0, 1.0),
    (0.0, 1.0),
  )
  assert found.metrics['critic/values/mean'] == without.metrics['critic/values/mean']


def test_a_divergence_that_is_not_finite_moves_no_coefficient():
  def tokens(*references):
    return dict(
      loss_mask=[np.array([False, True, True])] * len(references),
      proximal_logprobs=[np.array([0.0, -1.0, -1.0], np.float32)] * len(references),
      reference_logprobs=[np.array([0.0, -2.0, value], np.float32) for value in references],
    )

  algorithm = grpo(ReinforcePlusPlusConfig(kl_reward_coef=0.5, kl_target=0.1, kl_horizon=10.0))
  rows = [row(0, 'a', 1.0, length=3), row(1, 'b', 1.0, length=3)]
  found = annotated(algorithm, rows, **tokens(-1.0, -math.inf))
  assert found.metrics['actor/kl_measured'] == (1.0, 2.0) and found.in_loss.tolist() == [
    True,
    False,
  ]
  assert np.isfinite(found.advantages).all() and math.isfinite(found.state['kl_coef'])


def test_a_batch_without_a_finite_row_ends_the_run():
  mask, values = np.array([False, True]), np.array([0.0, math.inf], np.float32)
  with pytest.raises(
    RunError, match='batch 3 of the stage: values of row s/0 is inf at token 1'
  ) as caught:
    annotated(
      grpo(PpoConfig()), [row(0, 'a', 1.0, length=2)], loss_mask=[mask], values=[values], step=3
    )
  assert '\n' not in str(caught.value)


def test_a_cut_answer_is_worth_what_the_critic_expects_of_its_continuation():
  """γ = 1/2, λ = 1. Values 1 and 3 at the trained tokens, reward 4 at the last, 6 after it: returns
  4 + 3, and half.
  """
  algorithm = grpo(PpoConfig(gamma=0.5, bootstrap_truncated=True))
  assert {'values', 'next_values'} <= algorithm.on_host and 'next_values' not in grpo(
    PpoConfig()
  ).on_host
  rows = [row(0, 'a', 4.0, truncated=True), row(1, 'a', 4.0)]
  mask, values = np.array([False, True, True, False]), np.array([7.0, 1.0, 3.0, 7.0], np.float32)
  tokens = dict(loss_mask=[mask] * 2, values=[values] * 2)
  found = annotated(
    algorithm, rows, next_values=[np.array([1.0, 3.0, 7.0, 6.0], np.float32)] * 2, **tokens
  )
  np.testing.assert_array_equal(found.returns[0], [0, 3.5, 7, 0])
  np.testing.assert_array_equal(found.returns[1], [0, 2, 4, 0])
  without = annotated(grpo(PpoConfig(gamma=0.5)), rows, **tokens)
  np.testing.assert_array_equal(without.returns[0], without.returns[1])
  # A value after a cut that is not finite takes its row out; after an end it is not read.
  broken = [np.array([1.0, 3.0, 7.0, math.nan], np.float32)] * 2
  assert annotated(algorithm, rows, next_values=broken, **tokens).in_loss.tolist() == [False, True]
  assert (
    grpo(PpoConfig(bootstrap_truncated=True, mask_truncated=True))
    .no_effect[0]
    .startswith('ppo.bootstrap_truncated: True has no effect')
  )


def test_an_adaptive_coefficient_follows_the_measured_divergence_and_survives_in_the_state():
  config = ReinforcePlusPlusConfig(kl_reward_coef=0.5, kl_target=0.1, kl_horizon=10.0)
  mask = np.array([False, True, True, False])
  tokens = dict(
    loss_mask=[mask],
    proximal_logprobs=[np.array([9.0, -1.0, -2.0, 9.0], np.float32)],
    reference_logprobs=[np.array([-9.0, -2.0, -2.0, -9.0], np.float32)],
  )
  algorithm = grpo(config)
  first = annotated(algorithm, [row(0, 'a', 1.0)], **tokens)
  assert first.metrics['actor/kl_coef'] == (0.5, 1.0)
  assert first.metrics['actor/kl_measured'] == (1.0, 2.0)  # of the trained tokens: 1 and 0
  # Five times the target: the error is held at 0.2, one sample of a horizon of ten.
  assert first.state == {'kl_coef': pytest.approx(0.5 * (1 + 0.2 / 10))}
  second = annotated(algorithm, [row(0, 'a', 1.0)], state=first.state, **tokens)
  assert second.metrics['actor/kl_coef'][0] == first.state['kl_coef']
  assert second.state['kl_coef'] == pytest.approx(0.5 * (1 + 0.2 / 10) ** 2)


def test_the_coefficient_of_the_loss_is_a_constant_of_the_batch():
  algorithm = grpo(GrpoConfig(kl_loss_coef=0.5, kl_target=0.1))
  found = annotated(algorithm, [row(0, 'a', 1.0)], state={'kl_coef': 0.25}, **tokens_of(algorithm))
  assert found.constants == {'kl_coef': 0.25}
  assert algorithm.constants == {'kl_coef'}


def test_overlong_answers_are_punished_before_groups_are_compared():
  # Responses of 4 and 10 of at most 10 tokens, a buffer of 4: 0 and -1. Equal rewards are not equal
  # any more.
  rows = [row(0, 'a', 1.0, length=5), row(1, 'a', 1.0, length=11)]
  found = annotated(grpo(GrpoConfig(overlong_buffer_len=4, adv_ddof=0, adv_eps=0.0)), rows)
  assert found.rewards == [1.0, 0.0]
  np.testing.assert_allclose(found.advantages, [1, -1])
  assert found.in_loss.all()
  # DAPO asks whether both answers are right, not how long they are: such a group stays out.
  assert not annotated(grpo(DapoConfig(overlong_buffer_len=4)), rows).in_loss.any()


def test_masks_of_unmixed_groups_and_of_truncated_answers():
  rows = [
    row(0, 'a', 1.0),
    row(1, 'a', 1.0),
    row(2, 'b', 1.0),
    row(3, 'b', 0.0, truncated=True),
    row(4, 'c', 1.0),
  ]
  assert annotated(grpo(DapoConfig()), rows).in_loss.tolist() == [False, False, True, True, False]
  found = annotated(grpo(GrpoConfig(mask_truncated=True)), rows)
  assert found.in_loss.tolist() == [True, True, True, False, True]
  assert found.advantages[2] > 0  # the truncated answer's reward stays in its group's baseline


def test_a_group_is_mixed_by_what_its_rows_are_worth():
  """Group a has equal rewards and different turn rewards; in group b the turns make up for the
  difference.
  """
  rows = [
    row(0, 'a', 1.0, turn_rewards=(0.5,)),
    row(1, 'a', 1.0, turn_rewards=(0.25,)),
    row(2, 'b', 1.0, turn_rewards=(0.5,)),
    row(3, 'b', 0.5, turn_rewards=(1.0,)),
  ]
  found = annotated(grpo(DapoConfig()), rows)
  assert found.in_loss.tolist() == [True, True, False, False]
  assert [a != 0 for a in found.advantages] == [True, True, False, False]


def test_trajectories_are_mixed_by_what_they_share_a_baseline_with():
  """Both trajectories earn 1 in all, and from step 1 on different amounts."""

  def steps(i, name, step, reward):
    return row(i, 'a', reward, trajectory=name, step_index=step)

  rows = [
    steps(0, 'x', 0, 0.0),
    steps(1, 'x', 1, 1.0),
    steps(2, 'y', 0, 0.0),
    steps(3, 'y', 1, 1.0),
  ]
  for credit in ('trajectory', 'step'):
    assert not annotated(grpo(DapoConfig(credit=credit)), rows).in_loss.any()
  rows[2:] = [steps(2, 'y', 0, 0.5), steps(3, 'y', 1, 0.5)]
  assert not annotated(grpo(DapoConfig()), rows).in_loss.any()
  assert annotated(grpo(DapoConfig(credit='step')), rows).in_loss.tolist() == [
    False,
    True,
    False,
    True,
  ]


def test_a_length_reward_waits_for_its_warm_up():
  rows = [row(0, 'a', 1.0, length=3, correct=True), row(1, 'a', 1.0, length=5, correct=True)]
  algorithm = grpo(GrpoConfig(length_reward_weight=0.5, length_reward_warmup_steps=2))
  assert annotated(algorithm, rows, step=1).rewards == [1.0, 1.0]
  assert annotated(algorithm, rows, step=2).rewards == [1.25, 0.75]


def test_steps_of_a_trajectory_share_its_advantage():
  def steps(i, name, step, reward):
    return row(i, 'a', reward, trajectory=name, step_index=step)

  rows = [steps(0, 'x', 0, 0.0), steps(1, 'x', 1, 4.0), steps(2, 'y', 0, 0.0)]
  found = annotated(grpo(GrpoConfig(norm_adv_by_std=False)), rows)
  np.testing.assert_array_equal(found.advantages, [2, 2, -2])
  # Returns of step 0: 0.5 · 4 and 0. Step 1 is compared with none.
  config = GrpoConfig(norm_adv_by_std=False, credit='step', step_gamma=0.5)
  np.testing.assert_array_equal(annotated(grpo(config), rows).advantages, [1, 0, -1])


@pytest.mark.parametrize(
  'options', [{'overlong_buffer_len': 4}, {'length_reward_weight': 0.5}], ids=['overlong', 'length']
)
@pytest.mark.parametrize(
  'build',
  [lambda o, s: policy_gradient(GrpoConfig(**o), s), lambda o, s: opmd(OpmdConfig(**o), s)],
  ids=['grpo', 'opmd'],
)
def test_terms_of_the_length_are_refused_where_trajectories_may_have_several_steps(build, options):
  build(options, SETTING)
  with pytest.raises(
    UserError, match=r'rollout\.max_steps=2 permits trajectories of several'
  ) as got:
    build(options, dataclasses.replace(SETTING, max_steps=2))
  assert '\n' not in str(got.value)


def test_hand_worked_opmd_loss():
  # s = ln 4 and -ln 2, A = 1/2 and -1/2, tau 1/2: -A s + s² / 4 each.
  config = OpmdConfig(tau=0.5)
  rows = [row(0, 'a', 1.0), row(1, 'a', 0.0)]
  np.testing.assert_array_equal(annotated(opmd(config, SETTING), rows).advantages, [0.5, -0.5])
  outputs, chunks = batch(
    rows,
    [[2.0, 2.0], [0.5]],
    config=GrpoConfig(norm_adv_by_std=False),
    reference=-2.0,
    proximal=-2.0,
  )
  terms, stats = opmd(config, SETTING).loss(outputs, chunks, {})
  first, second = -LN2 + LN2**2, -LN2 / 2 + LN2**2 / 4
  assert total(terms) == pytest.approx((first + second) / 2, rel=1e-5)
  assert mean(stats['actor/log_ratio_sum']) == pytest.approx(LN2 / 2, rel=1e-5)


PAIR = {'pair': [[1, 1]], 'label': [[1, -1]], 'reference': -2.0}


def test_hand_worked_dpo_loss():
  # log π / ref: ln 4 over two tokens, -ln 2 over one. h = ln 8: -log σ(h) = ln 9/8. Averaged over
  # tokens it is ln 4.
  outputs, chunks = batch([row(0, 'a', 1.0), row(1, 'a', 0.0)], [[2.0, 2.0], [0.5]], **PAIR)
  terms, stats = dpo(DpoConfig(beta=1.0), SETTING).loss(outputs, chunks, {})
  assert total(terms) == pytest.approx(math.log(9 / 8), rel=1e-5)
  assert mean(stats['rewards/chosen']) == pytest.approx(2 * LN2, rel=1e-5)
  assert mean(stats['rewards/rejected']) == pytest.approx(-LN2, rel=1e-5)
  assert mean(stats['rewards/margins']) == pytest.approx(3 * LN2, rel=1e-5)
  assert mean(stats['rewards/accuracies']) == 1.0
  assert mean(stats['logps/chosen']) == pytest.approx(-4 + 2 * LN2, rel=1e-5)
  terms, _ = dpo(DpoConfig(beta=1.0, loss_type='ipo'), SETTING).loss(outputs, chunks, {})
  assert total(terms) == pytest.approx((2 * LN2 - 0.5) ** 2, rel=1e-5)
  # With the chosen answer's own likelihood: its two tokens are at -2 + ln 2.
  terms, _ = dpo(DpoConfig(beta=1.0, sft_loss_coef=0.5), SETTING).loss(outputs, chunks, {})
  assert total(terms) == pytest.approx(math.log(9 / 8) + 0.5 * (2 - LN2), rel=1e-5)


def test_a_policy_that_is_its_reference_prefers_neither():
  outputs, chunks = batch([row(0, 'a', 1.0), row(1, 'a', 0.0)], [[1.0, 1.0], [1.0]], **PAIR)
  terms, stats = dpo(DpoConfig(), SETTING).loss(outputs, chunks, {})
  assert total(terms) == pytest.approx(LN2)
  assert mean(stats['rewards/accuracies']) == 0.5


def test_hand_worked_reward_model_loss():
  # Scores 2 and 2 - ln 3: -log σ(ln 3) = ln 4/3; to win by ln 3 is a coin's toss: ln 2. The third
  # segment is no pair's.
  _, chunks = batch(
    [row(i, 'a', float(i)) for i in range(3)],
    [[1.0, 1.0], [1.0], [1.0]],
    pair=[[1, 1, 0]],
    label=[[1, -1, 0]],
  )
  scores = SequenceScores(jnp.array([[2.0, 2.0 - math.log(3.0), 50.0]]))
  terms, stats = reward_model(RewardModelConfig(), SETTING).loss(scores, chunks, {})
  assert total(terms) == pytest.approx(math.log(4 / 3), rel=1e-5)
  assert mean(stats['rewards/chosen']) == 2.0 and mean(stats['rewards/accuracies']) == 1.0
  terms, _ = reward_model(RewardModelConfig(margin=math.log(3.0)), SETTING).loss(scores, chunks, {})
  assert total(terms) == pytest.approx(LN2, rel=1e-5)
  terms, _ = reward_model(RewardModelConfig(center_rewards_coefficient=0.1), SETTING).loss(
    scores, chunks, {}
  )
  assert total(terms) == pytest.approx(math.log(4 / 3) + 0.1 * (4 - math.log(3.0)) ** 2, rel=1e-5)


def test_each_kl_coefficient_is_its_own():
  """In the loss and in the reward at once: the penalty goes by its coefficient, not by the
  other's.
  """
  config = ReinforcePlusPlusConfig(kl_loss_coef=1e-3, kl_reward_coef=0.5)
  tokens = dict(
    loss_mask=[np.array([False, True, True])],
    proximal_logprobs=[np.array([0.0, -1.0, -1.0], np.float32)],
    reference_logprobs=[np.array([0.0, -2.0, -1.0], np.float32)],
  )
  found = annotated(grpo(config), [row(0, 'a', 1.0, length=3)], **tokens)
  assert found.constants == {'kl_coef': 1e-3}
  # Rewards -0.5 and 1: returns 0.5 and 1, which whitening spreads around their mean.
  spread = 0.25 / math.sqrt(2 * 0.25**2 / 1 + 1e-8)
  np.testing.assert_allclose(found.advantages[0], [0.0, -spread, spread], rtol=1e-6)


def test_rewards_of_turns_count_where_advantages_are_one_per_sample():
  rows = [row(0, 'a', 0.0, turn_rewards=(1.0, 1.0)), row(1, 'a', 0.0)]
  for algorithm in (grpo(GrpoConfig(norm_adv_by_std=False)), opmd(OpmdConfig(), SETTING)):
    np.testing.assert_array_equal(annotated(algorithm, rows).advantages, [1.0, -1.0])


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (
      lambda: grpo(GrpoConfig(overlong_buffer_len=SETTING.max_response_length + 1)),
      'overlong_buffer_len',
    ),
    (lambda: opmd(OpmdConfig(overlong_buffer_len=-1), SETTING), 'overlong_buffer_len'),
    (lambda: grpo(GrpoConfig(kl_loss_coef=0.1, kl_target=0.0)), 'kl_target'),
    (
      lambda: grpo(GrpoConfig(bypass_old_logprobs=True, rollout_rs_low=0.9, rollout_rs_high=1.1)),
      'mask nothing',
    ),
    (lambda: opmd(OpmdConfig(tau=0.0, baseline='log_partition'), SETTING), 'opmd.tau'),
    (lambda: dpo(DpoConfig(beta=0.0), SETTING), 'dpo.beta'),
  ],
)
def test_what_could_only_fail_later_is_refused_at_once(make, message):
  with pytest.raises(UserError, match=message):
    make()
