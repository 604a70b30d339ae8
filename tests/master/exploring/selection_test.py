"""What is learned of a finished group, on groups made by hand."""

import dataclasses

import numpy as np
import pytest

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Sample, Segment, Source
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Version
from jaxrl_llm.master.batches import step_rows
from jaxrl_llm.master.exploring.selection import Experience, SelectionConfig, choose
from jaxrl_llm.rewards.api import Reward

TASK = Task(
  taskset='t',
  domain='general',
  prompt=({'role': 'user', 'content': 'say'},),
  truth='yes',
  fields={},
)


def member(i: int, length: int, correct: bool | None, value: float | None = None) -> Experience:
  """Number `i` of its group, with `length` tokens of its own; its reward is 1 for a correct one and
  0 for others.
  """
  sampled = np.arange(3 + length) >= 3
  sample = Sample(
    uid=f'g/{i}',
    task_id=TASK.uid,
    visit=0,
    sample_index=i,
    group_id='g',
    trajectory_id=f'g/{i}',
    taskset='t',
    domain='general',
    source=Source.ROLLOUT,
    tokens=np.zeros(3 + length, np.int32),
    prompt_len=3,
    role=sampled.astype(np.uint8),
    loss_mask=sampled,
    sampled=sampled,
    behaviour_logprobs=np.zeros(3 + length, np.float32),
    segments=(
      Segment(start=3, end=3 + length, version=Version(0, 0), engine='fake', finish='stop'),
    ),
  )
  reward = Reward(value=float(bool(correct)) if value is None else value, parts={}, correct=correct)
  return Experience(sample=sample, task=TASK, completion='', scores=(), reward=reward)


def group(*members) -> list[Experience]:
  return [member(i, *fields) for i, fields in enumerate(members)]


def chosen(config: SelectionConfig, members: list[Experience]):
  """(number, label) of each choice, in order."""
  return [(c.sample.sample_index, c.label) for c in choose(config, members)]


def pairs(members, **fields):
  """(chosen, rejected) numbers; the two of a pair, and no others, share its name."""
  found = choose(SelectionConfig(kind='pairs', **fields), members)
  assert [c.label for c in found] == [1, -1] * (len(found) // 2) and not any(
    c.imitated for c in found
  )
  names = [c.pair for c in found]
  assert names[::2] == names[1::2] and len(set(names)) == len(found) // 2 and all(names)
  numbers = [c.sample.sample_index for c in found]
  return list(zip(numbers[::2], numbers[1::2], strict=True))


MIXED = group((5, True), (2, False), (4, True), (9, True), (7, False))


def test_all_takes_every_member_as_it_is():
  found = choose(SelectionConfig(), MIXED)
  assert found == MIXED
  assert {(c.pair, c.label, c.imitated) for c in found} == {(None, None, False)}


@pytest.mark.parametrize(
  ('members', 'count'),
  [
    (MIXED, 5),
    (group((3, False), (3, False)), 0),
    (group((3, True), (8, True)), 0),
    (group((3, True)), 0),
    # Rewards count, not what is correct: shaped by another scorer, two correct ones differ.
    (group((3, True, 1.0), (3, True, 0.9)), 2),
    (group((3, True, 0.5), (3, False, 0.5)), 0),
    ([], 0),
  ],
)
def test_mixed_takes_whole_groups_that_have_two_rewards(members, count):
  found = choose(SelectionConfig(kind='mixed'), members)
  assert found == members[:count]
  assert {(c.pair, c.label, c.imitated) for c in found} <= {(None, None, False)}


def earning(member: Experience, *turns: float) -> Experience:
  return dataclasses.replace(member, reward=dataclasses.replace(member.reward, turn_values=turns))


def test_mixed_counts_the_rewards_of_turns():
  first, second = group((3, True, 1.0), (3, True, 1.0))
  mixed = SelectionConfig(kind='mixed')
  assert len(choose(mixed, [earning(first, 0.5), second])) == 2
  assert not choose(mixed, [earning(first, 0.5), earning(second, 0.25, 0.25)])
  assert not choose(mixed, [earning(first, 0.5), member(1, 3, True, 1.5)])


def test_the_shortest_correct_one_is_imitated_alone():
  (found,) = choose(SelectionConfig(kind='shortest_correct'), MIXED)
  assert found == dataclasses.replace(MIXED[2], imitated=True)


@pytest.mark.parametrize(
  ('members', 'number'),
  [
    (group((6, True), (4, False), (5, True), (5, True)), 2),  # the first of equals
    (group((6, True), (6, True)), 0),
    (group((6, True, 0.2), (7, True, 1.0)), 0),  # shortest, not best rewarded
    (group((6, False), (9, True)), 1),
  ],
)
def test_the_shortest_is_the_first_of_the_shortest_correct_ones(members, number):
  assert chosen(SelectionConfig(kind='shortest_correct'), members) == [(number, None)]


@pytest.mark.parametrize('kind', ['pairs', 'shortest_correct'])
@pytest.mark.parametrize(
  'members', [group((3, False), (4, False)), group((3, None), (4, None)), []]
)
def test_of_a_group_without_a_correct_member_there_is_nothing(kind, members):
  """None: no scorer of this domain says what is correct."""
  assert choose(SelectionConfig(kind=kind), members) == []


def test_a_pair_is_the_shortest_correct_one_against_the_first_wrong_one():
  assert pairs(MIXED) == [(2, 1)]
  assert pairs(group((3, False), (9, False), (4, True))) == [(2, 0)]


def test_wrong_ones_come_before_long_ones_each_in_the_order_of_issue():
  # The best has 4 tokens, so that from 6 on a correct one is too long: that of 9, not that of 5.
  assert pairs(MIXED, pairs_per_group=4) == [(2, 1), (2, 4), (2, 3)]
  assert pairs(MIXED, pairs_per_group=2) == [(2, 1), (2, 4)]


@pytest.mark.parametrize(
  ('longer_by', 'rejected'), [(1.5, [1, 3]), (1.6, [3]), (2.5, [3]), (2.51, []), (1.0, [1, 2, 3])]
)
def test_correct_ones_are_rejected_from_that_many_times_the_shortest(longer_by, rejected):
  members = group((4, True), (6, True), (4, True), (10, True))
  assert pairs(members, longer_by=longer_by, pairs_per_group=9) == [
    (0, number) for number in rejected
  ]


def test_equally_correct_members_form_no_pair():
  assert pairs(group((4, True), (4, True), (5, True)), pairs_per_group=9) == []
  assert pairs(group((4, True)), pairs_per_group=9) == []


REWARDED = group((6, False, 0.4), (5, True, 1.0), (3, True, 1.0), (2, False, -0.5), (9, None, 0.4))


@pytest.mark.parametrize(
  ('least', 'numbers'), [(1.0, [1, 2]), (0.4, [0, 1, 2, 4]), (-9.0, [0, 1, 2, 3, 4]), (1.1, [])]
)
def test_rejection_sampling_imitates_every_sample_above_the_threshold(least, numbers):
  selected = choose(SelectionConfig(kind='above', min_reward=least), REWARDED)
  assert [choice.sample.sample_index for choice in selected] == numbers
  assert all(choice.imitated and choice.pair is None for choice in selected)


def test_best_of_n_imitates_the_shortest_of_those_with_the_highest_reward():
  (best,) = choose(SelectionConfig(kind='best'), REWARDED)
  assert best == dataclasses.replace(REWARDED[2], imitated=True)
  # The rewards of turns count.
  (best,) = choose(SelectionConfig(kind='best'), [*REWARDED[:4], earning(REWARDED[4], 0.7)])
  assert best.sample.sample_index == 4


@pytest.mark.parametrize(('margin', 'rows'), [(1.5, [(2, 1), (3, -1)]), (1.51, [])])
def test_a_pair_by_margin_is_the_highest_reward_against_the_lowest(margin, rows):
  assert chosen(SelectionConfig(kind='margin', margin=margin), REWARDED) == rows
  equal = group((3, True), (4, True))
  assert chosen(SelectionConfig(kind='margin', margin=margin), equal) == []


@pytest.mark.parametrize('kind', ['best', 'above', 'margin'])
def test_masked_samples_are_neither_imitated_nor_paired(kind):
  masked = [dataclasses.replace(m, masked=m.sample.sample_index in (2, 3)) for m in REWARDED]
  selected = choose(SelectionConfig(kind=kind, min_reward=-9.0, margin=0.1), masked)
  assert selected and not {2, 3} & {choice.sample.sample_index for choice in selected}


@pytest.mark.parametrize(
  'fields', [{'margin': 0.0}, {'margin': float('inf')}, {'min_reward': float('nan')}]
)
def test_limits_of_rewards_that_mean_nothing_are_refused(fields):
  with pytest.raises(UserError, match=next(iter(fields))):
    SelectionConfig(**fields)


def test_pairs_are_named_apart_in_different_groups():
  one = choose(SelectionConfig(kind='pairs'), MIXED)
  assert one[0].pair.startswith(one[1].sample.uid), 'uids name their group'


def test_no_group_gives_more_than_is_planned_for():
  sizes = {'shortest_correct': 1, 'best': 1, 'margin': 2}
  for kind in ('all', 'mixed', 'above', 'pairs', *sizes):
    for most in (1, 2, 3, 9):
      config = SelectionConfig(kind=kind, pairs_per_group=most, longer_by=1.0, min_reward=-1.0)
      for members in (MIXED, group((3, False), (3, True)), group(*[(3, True)] * 3)):
        found = choose(config, members)
        assert len(found) <= config.most(len(members)) and len(found) % config.unit == 0
      assert config.most(5) == {'pairs': 2 * min(most, 4), **sizes}.get(kind, 5)
  # And all of it can be had: the best against every other.
  assert (
    len(
      choose(
        SelectionConfig(kind='pairs', pairs_per_group=9), group((3, False), (2, True), (9, True))
      )
    )
    == 4
  )


@pytest.mark.parametrize('fields', [{'pairs_per_group': 0}, {'longer_by': 0.99}])
def test_numbers_that_mean_nothing_are_refused(fields):
  with pytest.raises(UserError, match=r'^selection: .*at least 1'):
    SelectionConfig(kind='pairs', **fields)


def test_a_plan_row_records_how_it_was_chosen():
  best, other = choose(SelectionConfig(kind='pairs'), MIXED)
  places = {c.sample.uid: ('0.arrayrecord', i) for i, c in enumerate((best, other))}
  rows = [row for c in (best, other) for row in step_rows(c, places)]
  assert [(row.pair, row.label, row.is_expert, row.correct) for row in rows] == [
    (best.pair, 1, False, True),
    (best.pair, -1, False, False),
  ]
  (imitated,) = choose(SelectionConfig(kind='shortest_correct'), MIXED)
  (row,) = step_rows(imitated, {imitated.sample.uid: ('0.arrayrecord', 0)})
  assert (row.is_expert, row.pair, row.label, row.correct, row.uid) == (
    True,
    None,
    None,
    True,
    'g/2',
  )
