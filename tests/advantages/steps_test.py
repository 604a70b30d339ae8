"""Trajectories of several steps: they count once in their group, and estimates run along them."""

import functools
import math

import numpy as np
import oracles_advantages as oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.advantages.group import group_advantages, leave_one_out
from jaxrl_llm.advantages.steps import along_chains, chains, step_credit
from jaxrl_llm.advantages.tokens import masked_gae, token_returns
from jaxrl_llm.core.errors import UserError

centred = functools.partial(group_advantages, normalize_by_std=False)


@pytest.mark.parametrize(('estimate', 'wanted'), [(centred, 0.5), (leave_one_out, 1.0)])
def test_a_trajectory_counts_once_and_pays_all_its_steps(estimate, wanted):
  # x earns 1 in three steps, y 0 in one: mean 1/2 of two trajectories (by rows it would be 1/4).
  result = step_credit(
    [0.25, 0.0, 0.75, 0.0],
    ['a'] * 4,
    ['x', 'x', 'x', 'y'],
    [0, 1, 2, 0],
    credit='trajectory',
    advantages=estimate,
  )
  np.testing.assert_array_equal(result.advantages, np.array([1, 1, 1, -1]) * wanted)
  assert (result.groups, result.zero_std_groups) == (1, 0)


def test_step_credit_compares_returns_of_equal_steps():
  # Returns with γ = 1/2. x: 2 + 2/2 = 3, 1 + 2/2 = 2, 2. y: 1 + 4/2 = 3, 4. Only x has a step 2.
  result = step_credit(
    [2.0, 1.0, 2.0, 1.0, 4.0],
    ['a'] * 5,
    ['x', 'x', 'x', 'y', 'y'],
    [0, 1, 2, 0, 1],
    credit='step',
    advantages=centred,
    gamma=0.5,
  )
  np.testing.assert_array_equal(result.advantages, [0.0, -1.0, 0.0, 0.0, 1.0])
  assert (result.groups, result.zero_std_groups) == (3, 2)


def test_gigpo_adds_what_a_step_earns_among_steps_from_the_same_state():
  # Totals 3, 1 and 0, mean 4/3. From s all three start: returns as the totals. From t, x goes on
  # with 2 and y, twice, with 1 and 0: mean 1. From u, only z goes on.
  rewards = [1.0, 2.0, 0.0, 1.0, 0.0, 0.0, 0.0]
  trajectories, steps = [*'xxyyyzz'], [0, 1, 0, 1, 2, 0, 1]
  states = [*'ststtsu']
  result = step_credit(
    rewards,
    ['a'] * 7,
    trajectories,
    steps,
    credit='gigpo',
    advantages=centred,
    states=states,
    weight=0.5,
  )
  total = dict(x=3 - 4 / 3, y=1 - 4 / 3, z=0 - 4 / 3)
  step = [total['x'], 1.0, total['y'], 0.0, -1.0, total['z'], 0.0]
  wanted = [total[name] + 0.5 * more for name, more in zip(trajectories, step, strict=True)]
  np.testing.assert_allclose(result.advantages, wanted, atol=1e-15)
  assert (result.groups, result.zero_std_groups) == (1, 0)


@pytest.mark.parametrize('credit', ['trajectory', 'step', 'gigpo'])
def test_an_unscorable_step_takes_the_whole_trajectory_out(credit):
  rewards = [1.0, 3.0, None, 1.0, 5.0, None, 0.0, 1.0]
  trajectories, steps, states = [*'xxyyzzww'], [0, 1] * 4, [*'stststst']
  result = step_credit(
    rewards, ['a'] * 8, trajectories, steps, credit=credit, advantages=centred, states=states
  )
  assert result.scored.tolist() == [True, True, *[False] * 4, True, True]
  assert not result.advantages[2:6].any() and result.advantages[[0, 6]].all()


@pytest.mark.parametrize('credit', ['trajectory', 'step'])
@pytest.mark.parametrize('names', [['', '', ''], ['x', 'y', 'z']])
def test_trajectories_of_one_step_are_samples(credit, names):
  rewards, groups = [1.0, 0.0, 5.0], ['a', 'a', 'b']
  result = step_credit(rewards, groups, names, [0, 0, 0], credit=credit)
  wanted = group_advantages(rewards, groups)
  for got, want in zip(result, wanted, strict=True):
    np.testing.assert_array_equal(got, want)


@settings(max_examples=50, deadline=None)
@given(
  st.lists(st.tuples(st.sampled_from('ab'), st.integers(1, 4)), min_size=1, max_size=6),
  st.randoms(),
)
def test_step_credit_equals_the_loops_in_any_order(shapes, random):
  rows = [
    (random.choice([None, 0.0, 1.0, random.random()]), group, f'{group}/{i}', step)
    for i, (group, length) in enumerate(shapes)
    for step in range(length)
  ]
  random.shuffle(rows)
  rewards, groups, trajectories, steps = (list(column) for column in zip(*rows, strict=True))

  def after(name, first):
    own = [reward for reward, _, other, step in rows if other == name and step >= first]
    return None if None in [r for r, _, other, _ in rows if other == name] else math.fsum(own)

  def less_mean(reward, values, _):
    return reward - math.fsum(values) / len(values)

  of_trajectory = {name: group for _, group, name, _ in rows}
  totals = [after(name, 0) for name in of_trajectory]
  means = oracles.of_group(totals, list(of_trajectory.values()), less_mean)
  by_name = dict(zip(of_trajectory, means, strict=True))
  result = step_credit(
    rewards, groups, trajectories, steps, credit='trajectory', advantages=centred
  )
  wanted = [by_name[name] for name in trajectories]
  np.testing.assert_allclose(result.advantages, wanted, atol=1e-14)

  returns = [after(name, step) for _, _, name, step in rows]
  wanted = oracles.of_group(returns, list(zip(groups, steps, strict=True)), less_mean)
  result = step_credit(rewards, groups, trajectories, steps, credit='step', advantages=centred)
  np.testing.assert_allclose(result.advantages, wanted, atol=1e-14)


def test_tangled_trajectories_are_refused():
  with pytest.raises(ValueError, match='two rows of step 1'):
    step_credit([1.0, 0.0], ['a', 'a'], ['x', 'x'], [1, 1], credit='step')
  with pytest.raises(ValueError, match='in another'):
    step_credit([1.0, 0.0], ['a', 'b'], ['x', 'x'], [0, 1], credit='trajectory')


def test_gigpo_needs_the_states_of_trajectories():
  rows = ([1.0, 0.0, 1.0], ['a'] * 3, ['x', 'x', ''], [0, 1, 0])
  step_credit(*rows, credit='gigpo', states=['s', 't', ''])
  with pytest.raises(UserError, match='import them again'):
    step_credit(*rows, credit='gigpo', states=['s', '', ''])


def test_estimates_run_over_the_boundary_of_steps_by_hand():
  """A trajectory of two steps, the second of which comes first among the rows, and another row.

  γ = 1/2, λ = 1/2. The trained tokens of the trajectory have values 1, 2 | 4 and rewards 0, 1 | 2:
  δ = 0 + 2/2 - 1 = 0, 1 + 4/2 - 2 = 1, 2 + 8/2 - 4 = 2 (8 is the value of the last state), and
  A = 0 + 1.5/4, 1 + 2/4, 2. The returns of tokens are 0 + 2/2, 1 + 2/2, 2.
  """
  hole = 9.0  # A value that nobody may read.
  masks = [np.array([False, True, False]), np.array([False, True, False, True]), np.ones(1, bool)]
  values = [np.array([hole, 4.0, hole]), np.array([hole, 1.0, hole, 2.0]), np.array([1.0])]
  rewards = [np.array([hole, 2.0, hole]), np.array([hole, 0.0, hole, 1.0]), np.array([3.0])]
  members = chains(['a'] * 3, ['x', 'x', ''], [1, 0, 0])
  assert members == [[1, 0], [2]]
  last_values = [8.0, math.nan, 0.0]  # That of a step that is not the last is not read.

  def gae(last, reward, value, mask):
    how = {'gamma': 0.5, 'lam': 0.5, 'last_value': last_values[last]}
    return np.stack(masked_gae(reward, value, mask, **how))

  found = along_chains(members, gae, rewards, values, masks)
  wanted = [[0.0, 2.0, 0.0], [0.0, 0.375, 0.0, 1.5], [2.0]]
  for (advantages, returns), value, mask, want in zip(found, values, masks, wanted, strict=True):
    np.testing.assert_array_equal(advantages, want)
    np.testing.assert_array_equal(returns, np.where(mask, np.array(want) + value, 0.0))
  found = along_chains(
    members, lambda _, reward, mask: token_returns(reward, mask, gamma=0.5), rewards, masks
  )
  for got, want in zip(found, [[0, 2, 0], [0, 1, 0, 2], [3]], strict=True):
    np.testing.assert_array_equal(got, want)
