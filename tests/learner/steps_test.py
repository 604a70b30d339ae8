"""A trajectory of three steps with tool tokens, by hand, and against itself as one sample.

x has three steps of two, one and two turns, y one. What x read, and the prompts of its later steps,
are holes of the one sequence: it earns 2 after its first turn, 1 after its third and 4 at the end.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.batching.chunks import Chunks, shapes
from jaxrl_llm.batching.plan import Row
from jaxrl_llm.learner.algorithm import Closed, Setting
from jaxrl_llm.learner.opmd import OpmdConfig, opmd
from jaxrl_llm.learner.policy_gradient import policy_gradient
from jaxrl_llm.learner.policy_options import (
  GrpoConfig,
  PpoConfig,
  ReinforcePlusPlusBaselineConfig,
  ReinforcePlusPlusConfig,
  RlooConfig,
)
from jaxrl_llm.ops.logprobs import TokenLogprobs, TokenValues

SETTING = Setting(max_response_length=16, max_steps=3)
MASKS = (
  (0, 1, 1, 0, 1),  # prompt, turn of two, tool, turn
  (0, 0, 1),  # a prompt of two, turn
  (0, 1, 0, 0, 1, 1),  # prompt, turn, a tool's two, turn of two
)
REWARDS = ((0.0, (2.0,)), (0.0, (1.0,)), (4.0, ()))
OTHER = (0, 1, 1)  # y, which earns 1.


def row(uid, mask, reward, turn_rewards=(), **fields):
  return Row(
    uid=uid,
    source='rows.arrayrecord',
    index=0,
    length=len(mask),
    prompt_len=1,
    group='g',
    reward=reward,
    is_expert=False,
    truncated=False,
    version_step=0,
    turn_rewards=turn_rewards,
    **fields,
  )


SPLIT = [
  *(
    row('g/0' + f'/{k}' * (k > 0), mask, *earned, trajectory='g/0', step_index=k)
    for k, (mask, earned) in enumerate(zip(MASKS, REWARDS, strict=True))
  ),
  row('g/1', OTHER, 1.0),
]
# Turns are runs of trained tokens. x has five of them; the first and the third earn something.
WHOLE = [row('g/0', sum(MASKS, ()), 4.0, (2.0, 0.0, 1.0)), row('g/1', OTHER, 1.0)]
ENDS = np.cumsum([*map(len, MASKS)])


def columns(rows, seed=0):
  """Numbers per token of x and y, which are the same however x is cut."""
  rng, masks = np.random.default_rng(seed), [sum(MASKS, ()), OTHER]
  whole = {
    'loss_mask': [np.array(mask, bool) for mask in masks],
    **{
      name: [rng.normal(size=len(mask)).astype(np.float32) for mask in masks]
      for name in ('values', 'next_values', 'proximal_logprobs', 'reference_logprobs', 'logprobs')
    },
  }
  if len(rows) == len(WHOLE):
    return whole
  return {name: [*np.split(x, ENDS[:-1]), y] for name, (x, y) in whole.items()}


def annotated(algorithm, rows, **changes):
  tokens = {name: values for name, values in columns(rows).items() if name in algorithm.on_host}
  return algorithm.annotate(Closed(rows, 0, {**tokens, **changes}, None))


def per_token(rows, values):
  """Advantages of x and y per trained token."""
  masks = columns(rows)['loss_mask']
  spread = [np.where(mask, value, 0.0) for mask, value in zip(masks, values, strict=True)]
  return [np.concatenate(spread[:-1]), spread[-1]]


ALGORITHMS = {
  'grpo': GrpoConfig(),
  'rloo': RlooConfig(loss_agg_mode='token-mean'),
  'reinforce_plus_plus': ReinforcePlusPlusConfig(gamma=0.9, kl_reward_coef=0.1),
  'reinforce_plus_plus_baseline': ReinforcePlusPlusBaselineConfig(),
  'ppo': PpoConfig(gamma=0.9, lam=0.7),
  'ppo, bootstrapped': PpoConfig(gamma=0.9, lam=0.7, bootstrap_truncated=True),
}


@pytest.mark.parametrize('config', ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_trajectory_in_steps_has_the_advantages_and_the_loss_of_the_one_sample(config):
  algorithm = policy_gradient(config, SETTING)
  truncated = [
    [dataclasses.replace(r, truncated=r.group == 'g' and r.uid != 'g/1') for r in rows]
    for rows in (SPLIT, WHOLE)
  ]
  split, whole = (annotated(algorithm, rows) for rows in truncated)
  for got, want in zip(
    per_token(SPLIT, split.advantages), per_token(WHOLE, whole.advantages), strict=True
  ):
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
  assert got.any() and split.in_loss.all() and whole.in_loss.all()
  assert (split.returns is None) == (whole.returns is None)
  if split.returns is not None:
    for got, want in zip(
      per_token(SPLIT, split.returns), per_token(WHOLE, whole.returns), strict=True
    ):
      np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
  terms = [
    losses(algorithm, rows, a) for rows, a in zip((SPLIT, WHOLE), (split, whole), strict=True)
  ]
  assert terms[0].keys() == terms[1].keys()
  for name, (numerator, denominator) in terms[0].items():
    np.testing.assert_allclose(numerator, terms[1][name][0], rtol=1e-5, atol=1e-6)
    assert denominator == terms[1][name][1] == sum(map(sum, MASKS)) + sum(OTHER)


def losses(algorithm, rows, annotation):
  """Numerator and denominator of each term, with one sequence per row in one chunk."""
  read, lengths = columns(rows), [row.length for row in rows]
  arrays = {
    name: np.zeros(array.shape, array.dtype)
    for name, array in shapes(1, time=sum(lengths), segments=len(rows)).items()
  }
  arrays['segment_ids'][0] = np.repeat(np.arange(len(rows)) + 1, lengths)
  arrays['loss_mask'][0] = np.concatenate(read['loss_mask'])
  for name, values in {
    'advantages': annotation.advantages,
    'returns': annotation.returns or np.zeros(len(rows)),
    'values': read['values'],
    'proximal_logprobs': read['proximal_logprobs'],
    'behaviour_logprobs': read['proximal_logprobs'],
    'reference_logprobs': read['reference_logprobs'],
  }.items():
    each = [np.broadcast_to(value, length) for value, length in zip(values, lengths, strict=True)]
    arrays[name][0] = np.where(arrays['loss_mask'][0], np.concatenate(each), 0.0)
  chunks = Chunks(**{name: jnp.asarray(array) for name, array in arrays.items()})
  logprobs = jnp.asarray(np.concatenate(read['logprobs']))[None]
  terms, _ = algorithm.loss(
    TokenLogprobs(logprobs=logprobs, entropy=jnp.zeros_like(logprobs)),
    chunks,
    annotation.constants,
  )
  if algorithm.critic_loss is not None:
    more, _ = algorithm.critic_loss(TokenValues(values=logprobs), chunks, annotation.constants)
    terms |= more
  return {name: (float(term.numerator), float(term.denominator)) for name, term in terms.items()}


def test_by_hand_the_group_counts_two_trajectories():
  """x is worth 2 + 1 + 4 = 7 and y 1: mean 4. By rows, the mean would be that of 2, 1, 4 and 1."""
  algorithm = policy_gradient(GrpoConfig(norm_adv_by_std=False), SETTING)
  np.testing.assert_array_equal(annotated(algorithm, SPLIT).advantages, [3, 3, 3, -3])
  algorithm = opmd(OpmdConfig(), SETTING)
  np.testing.assert_array_equal(annotated(algorithm, SPLIT).advantages, [3, 3, 3, -3])


def test_by_hand_step_credit_is_the_return_of_each_step():
  """Returns of x with γ = 1/2: 2 + (1 + 4/2)/2 = 3.5, 1 + 4/2 = 3, 4; of y: 1. Only y's step 0
  compares with one of x.
  """
  config = GrpoConfig(norm_adv_by_std=False, credit='step', step_gamma=0.5)
  found = annotated(policy_gradient(config, SETTING), SPLIT).advantages
  np.testing.assert_array_equal(found, [1.25, 0, 0, -1.25])


def test_by_hand_gigpo_adds_the_returns_of_steps_with_the_same_prompt():
  """y starts where x's third step starts: their returns 4 and 1 have the mean 2.5."""
  rows = [
    dataclasses.replace(row, prompt_digest=digest)
    for row, digest in zip(SPLIT, 'abcc', strict=True)
  ]
  config = GrpoConfig(norm_adv_by_std=False, credit='gigpo', step_weight=2.0)
  found = annotated(policy_gradient(config, SETTING), rows).advantages
  np.testing.assert_array_equal(found, [3, 3, 3 + 2 * 1.5, -3 - 2 * 1.5])


def test_by_hand_returns_run_over_the_steps():
  """γ = 1/2, rewards 2 at x's second trained token, 1 at its fourth and 4 at its seventh and last:
  from the end 4, 2, 1, 1 + 1/2, 3/4, 2 + 3/8, 19/16; and 1, 1/2 of y. Whitened over the batch.
  """
  algorithm = policy_gradient(ReinforcePlusPlusConfig(gamma=0.5), SETTING)
  found = per_token(SPLIT, annotated(algorithm, SPLIT).advantages)
  x = np.array([19 / 16, 2.375, 0.75, 1.5, 1.0, 2.0, 4.0])
  both = np.concatenate([x, [0.5, 1.0]])
  wanted = (both - both.mean()) / np.sqrt(both.var(ddof=1) + 1e-8)
  np.testing.assert_allclose(np.concatenate(found)[per_token_mask()], wanted, rtol=1e-12)


def per_token_mask():
  return np.concatenate(columns(SPLIT)['loss_mask'])


def test_by_hand_the_critic_is_bootstrapped_from_the_next_step():
  """λ = 0: returns are r + γ V of the next trained token, over the boundary of steps; γ = 1/2."""
  algorithm = policy_gradient(PpoConfig(gamma=0.5, lam=0.0), SETTING)
  values = [np.array(v, np.float32) for v in ([9, 1, 2, 9, 4], [9, 9, 8], [9, 1, 9, 9, 2, 4])]
  found = annotated(algorithm, SPLIT, values=[*values, np.zeros(3, np.float32)]).returns
  x = np.concatenate(found[:-1])[np.concatenate(columns(SPLIT)['loss_mask'][:-1])]
  # Values 1 2 4 | 8 | 1 2 4 of the trained tokens.
  np.testing.assert_array_equal(x, [1.0, 2 + 2.0, 4.0, 1 + 0.5, 1.0, 2.0, 4.0])
  np.testing.assert_array_equal(found[-1], [0, 0, 1])


def test_one_value_that_is_not_finite_takes_the_whole_trajectory_out():
  values = [v.copy() for v in columns(SPLIT)['values']]
  values[1][2] = np.nan
  algorithm = policy_gradient(PpoConfig(), SETTING)
  assert annotated(algorithm, SPLIT, values=values).in_loss.tolist() == [False] * 3 + [True]
