import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.replay.draw import DrawConfig, Group, draw

ORDERS = ('newest', 'shuffled', 'priority')


def group(name, *, version=0, uses=0, last_used=None, admitted=0, issued=0) -> Group:
  return Group(name, (f'{name}/0', f'{name}/1'), version, uses, last_used, admitted, issued)


@st.composite
def pools(draw_from):
  """Groups as a store at `step` may hold them, and the step."""
  step = draw_from(st.integers(0, 30))
  groups = []
  for number in range(draw_from(st.integers(0, 12))):
    uses = draw_from(st.integers(0, 3 if step else 0))
    groups.append(
      group(
        f'g{number}',
        version=draw_from(st.integers(0, step)),
        uses=uses,
        last_used=draw_from(st.integers(0, step - 1)) if uses else None,
        admitted=draw_from(st.integers(0, step)),
        issued=number,
      )
    )
  return step, groups


CONFIGS = st.builds(
  DrawConfig,
  order=st.sampled_from(ORDERS),
  decay=st.floats(0, 5),
  cooldown=st.integers(0, 4),
  max_age=st.none() | st.integers(0, 20),
)


def test_newest_first_by_version_then_admission_then_issue():
  groups = [
    group('old', version=1, admitted=9, issued=9),
    group('early', version=3, admitted=3, issued=5),
    group('late', version=3, admitted=4, issued=1),
    group('later', version=3, admitted=4, issued=2),
  ]
  assert draw(groups, DrawConfig(), count=3, step=10, seed=0) == ['later', 'late', 'early']


def test_priority_is_version_minus_decay_times_uses():
  groups = [
    group('a', version=9, uses=2, last_used=1),  # 9 - 2 · 2 = 5
    group('b', version=7, uses=0),  # 7
    group('c', version=6, uses=1, last_used=3),  # 4
    group('d', version=5, uses=0),  # 5, and less used than a
    group('e', version=8, uses=0, admitted=8),  # 8
    group('f', version=8, uses=0, admitted=9),  # 8, and admitted later
  ]
  config = DrawConfig(order='priority')
  assert draw(groups, config, count=6, step=10, seed=0) == ['f', 'e', 'b', 'd', 'a', 'c']
  flat = DrawConfig(order='priority', decay=0.0)
  assert draw(groups, flat, count=3, step=10, seed=0) == ['a', 'f', 'e']


def test_a_used_group_rests_for_the_cooldown_and_an_old_one_is_left_out():
  groups = [
    group('used', version=4, uses=1, last_used=5),
    group('old', version=3),
    group('new', version=4),
  ]

  def drawn(step, **config):
    return set(draw(groups, DrawConfig(**config), count=3, step=step, seed=0))

  assert 'used' not in drawn(6) and 'used' in drawn(7)  # used in batch 5, at rest in batch 6
  assert 'used' in drawn(6, cooldown=0) and 'used' not in drawn(5, cooldown=0)
  assert 'used' not in drawn(8, cooldown=3) and 'used' in drawn(9, cooldown=3)
  assert drawn(7, max_age=3) == {'used', 'new'} and drawn(7, max_age=4) == {'used', 'old', 'new'}


@given(pools(), CONFIGS, st.integers(0, 12), st.integers(0, 2**40), st.randoms())
def test_a_draw_takes_distinct_ready_groups_whatever_their_listing(
  pool, config, count, seed, shuffle
):
  step, groups = pool
  drawn = draw(groups, config, count=count, step=step, seed=seed)
  ready = {
    g.group_id
    for g in groups
    if (g.last_used is None or g.last_used + config.cooldown < step)
    and (config.max_age is None or g.version >= step - config.max_age)
  }
  assert set(drawn) <= ready and len(drawn) == len(set(drawn)) == min(count, len(ready))
  listed = list(groups)
  shuffle.shuffle(listed)
  assert draw(listed, config, count=count, step=step, seed=seed) == drawn
  whole = draw(groups, config, count=len(groups), step=step, seed=seed)
  assert whole[: len(drawn)] == drawn  # a larger batch begins with the smaller one


@given(pools(), st.floats(0, 5))
def test_nothing_left_out_comes_before_what_was_drawn(pool, decay):
  step, groups = pool
  by_id = {g.group_id: g for g in groups}
  for order, worth in (
    ('newest', lambda g: (g.version, g.admitted, g.issued)),
    ('priority', lambda g: (g.version - decay * g.uses, -g.uses, g.admitted, g.issued)),
  ):
    config = DrawConfig(order=order, decay=decay, cooldown=0)
    drawn = [
      worth(by_id[name]) for name in draw(groups, config, count=len(groups), step=step, seed=0)
    ]
    assert drawn == sorted(drawn, reverse=True)


def test_the_shuffle_is_uniform_and_its_own_in_every_step_and_seed():
  groups = [group(f'g{i}', version=i, issued=i) for i in range(6)]
  config = DrawConfig(order='shuffled')
  firsts = collections.Counter()
  pairs = collections.Counter()
  for step in range(3000):
    first, second = draw(groups, config, count=2, step=step, seed=7)
    firsts[first] += 1
    pairs[first, second] += 1
  # 3000 draws: 500 ± 20 each, 100 ± 10 for each of 30 ordered pairs; five standard deviations.
  assert len(firsts) == 6 and all(abs(count - 500) < 102 for count in firsts.values()), firsts
  assert len(pairs) == 30 and all(abs(count - 100) < 50 for count in pairs.values()), pairs
  seeds = {tuple(draw(groups, config, count=6, step=0, seed=seed)) for seed in range(20)}
  assert len(seeds) > 15


def test_the_shuffle_is_the_same_everywhere():
  groups = [group(f'g{i}') for i in range(5)]
  found = draw(groups, DrawConfig(order='shuffled'), count=5, step=3, seed=1)
  assert found == ['g3', 'g2', 'g4', 'g1', 'g0']  # of NumPy's Philox, whose stream is fixed


@pytest.mark.parametrize(
  'bad', [{'decay': -1.0}, {'decay': float('inf')}, {'cooldown': -1}, {'max_age': -1}]
)
def test_a_configuration_that_cannot_be_meant_is_refused(bad):
  (name,) = bad
  with pytest.raises(UserError, match=rf'draw\.{name}: .*wanted'):
    DrawConfig(**bad)
