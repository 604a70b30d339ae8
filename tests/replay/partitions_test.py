"""What a draw needs of the store: partitions, versions, uses, groups, eviction; and all of it after
a crash.
"""

import dataclasses

import pytest
from stored import experts, issues, make_sample, states, store_group

from jaxrl_llm.core.records.sample import Segment
from jaxrl_llm.core.types import Version
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.draw import DrawConfig, Group, draw
from jaxrl_llm.replay.index import open_store


def train(store, uids, step):
  store.at(step).seal(uids)
  store.at(step).trained(uids)


def uses(store, uids) -> list[int]:
  found = store.entries(uids)
  return [found[uid].uses for uid in uids]


def checked(store):
  report = audit(store)
  assert report.ok, report.lines
  return report


def test_a_sample_is_of_the_oldest_weights_that_generated_any_of_it(tmp_path):
  store = open_store(tmp_path)
  store.at(3).issue(issues(['g/0', 'g/1']))
  assert [entry.version for entry in store.entries(['g/0', 'g/1']).values()] == [None, None]
  parts = tuple(
    Segment(start=start, end=start + 4, version=Version(attempt, step), engine='e', finish='stop')
    for start, attempt, step in ((4, 2, 1), (8, 1, 2))
  )
  store.at(3).append(
    [dataclasses.replace(make_sample('g/0'), segments=parts), make_sample('g/1', version=3)]
  )
  assert [entry.version for entry in store.entries(['g/0', 'g/1']).values()] == [1, 3]
  store.at(3).admit(['g/0', 'g/1'])
  assert store.candidates(3) == [Group('g', ('g/0', 'g/1'), 1, 0, None, 3, 1)]
  store.at(3).issue(issues(['h/0']))
  with pytest.raises(ValueError, match='append h/0: it has no segments, so the weights'):
    store.at(3).append([dataclasses.replace(make_sample('h/0'), segments=())])
  checked(store)


def test_expert_rows_join_without_bytes_and_are_trained_again_and_again(tmp_path):
  store = open_store(tmp_path, max_uses=1)
  store_group(store, ['g/0'], 0)
  for step in range(3):
    with store.transaction():
      store.at(step).join(experts(['x/0', f'x/{step}'][: 1 + bool(step)]))
      store.at(step).trained(['x/0'])
  assert states(store, ['x/0', 'x/1', 'x/2']) == ['trained', 'admitted', 'admitted']
  assert uses(store, ['x/0', 'x/1']) == [3, 0]
  assert [group.group_id for group in store.candidates(3)] == ['g'], 'expert rows are not drawn'
  assert [entry.uid for entry in store.live()] == ['g/0']
  assert [entry.uid for entry in store.live('expert')] == ['x/1', 'x/2']
  report = checked(store)
  assert report.partitions == {'usual': 1, 'expert': 3} and report.issued == 4 and report.uses == {}
  assert store.counts()['admitted'] == 3 and store.counts()['trained'] == 1


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda s: s.at(1).issue(experts(['y'])), "y: partition 'expert', wanted 'usual'"),
    (lambda s: s.at(1).join(issues(['y'])), "y: partition 'usual', wanted 'expert'"),
    (lambda s: s.at(1).join(experts(['g/0'])), 'join g/0: already admitted, usual, of group'),
    (
      lambda s: s.at(1).join([dataclasses.replace(experts(['x'])[0], task_id='f')]),
      "wanted expert, 'x', 'f'",
    ),
    (lambda s: s.at(1).issue(issues(['x'])), 'issue x: already admitted'),
    (lambda s: s.at(1).append([dataclasses.replace(make_sample('x'), task_id='e')]), None),
    (lambda s: s.at(1).drop(['x'], 'any'), 'x: is admitted, cannot become dropped'),
    (lambda s: s.at(1).expire(['x']), 'x: is admitted, cannot become expired'),
    (lambda s: s.at(1).seal(['x']), 'seal x: the bytes of static rows are not in the store'),
    (
      lambda s: (s.at(1).trained(['x']), s.at(1).trained(['x'])),
      'the batch of step 1 has already trained on it',
    ),
  ],
)
def test_what_is_not_done_with_expert_rows(tmp_path, change, message):
  store = open_store(tmp_path)
  store.at(0).join(experts(['x']))
  store_group(store, ['g/0'], 0)
  # a result for a static row: counted as one that nobody waits for, and nothing changes
  if message is None:
    assert change(store) == [] and store.counts()['duplicates'] == 1
  else:
    with pytest.raises(ValueError, match=message):
      change(store)
  assert states(store, ['x', 'g/0'])[1] == 'admitted'
  checked(store)


def test_uses_are_counted_up_to_the_most_allowed(tmp_path):
  store = open_store(tmp_path, max_uses=3)
  store_group(store, ['g/0', 'g/1'], 0, version=0)
  store_group(store, ['h/0', 'h/1'], 1, version=1)
  for step in (1, 2):
    train(store, ['g/0', 'g/1'], step)
    assert [g.group_id for g in store.candidates(step)] == ['h'], (
      'a batch does not draw a group twice'
    )
  assert store.candidates(3) == [
    Group('g', ('g/0', 'g/1'), 0, 2, 2, 0, 1),
    Group('h', ('h/0', 'h/1'), 1, 0, None, 1, 3),
  ]
  train(store, ['g/0', 'g/1'], 3)
  assert uses(store, ['g/0', 'g/1', 'h/0']) == [3, 3, 0]
  assert [g.group_id for g in store.candidates(4)] == ['h']
  with pytest.raises(ValueError, match='trained g/0: it was already used 3 times, max_uses is 3'):
    store.at(4).trained(['g/0'])
  assert checked(store).uses == {3: 2}


def test_a_group_is_drawn_whole_by_its_most_used_sample_or_not_at_all(tmp_path):
  store = open_store(tmp_path, max_uses=2)
  store_group(store, ['part/0', 'part/1'], 0)
  train(store, ['part/0'], 0)
  store.at(0).issue(issues(['half/0', 'half/1', 'half/2']))
  store.at(0).append([make_sample('half/0'), make_sample('half/2')])
  store.at(0).admit(['half/0'])
  assert store.candidates(1) == [Group('part', ('part/0', 'part/1'), 0, 1, 0, 0, 1)]
  store.at(1).admit(['half/2'])
  store.at(1).drop(['half/1'], 'timeout')  # ended: what is left of the group is all of it
  assert store.candidates(0) == [], 'part was used in batch 0, half is admitted at step 1'
  assert [g.uids for g in store.candidates(1)] == [('part/0', 'part/1'), ('half/0', 'half/2')]
  train(store, ['part/0'], 1)
  assert [g.group_id for g in store.candidates(2)] == ['half'], 'a sample of part is used up'
  checked(store)


def test_groups_of_which_anything_is_too_old_are_left_out_whole(tmp_path):
  store = open_store(tmp_path, max_uses=3)
  for version in range(4):
    store_group(store, [f'g{version}/0', f'g{version}/1'], version, version=version)
  train(store, ['g1/0', 'g1/1', 'g2/0', 'g2/1'], 3)
  store.at(3).issue(issues(['both/0', 'both/1', 'rest/0', 'rest/1']))
  store.at(3).append([make_sample(f'both/{i}', version=1 + i) for i in range(2)])
  store.at(3).append([make_sample(f'rest/{i}', version=1 + i) for i in range(2)])
  store.at(3).admit(['both/0', 'both/1', 'rest/1'])
  store.at(3).drop(['rest/0'], 'timeout')  # It is none of the group any more, however old.
  for oldest in (None, 0, 1, 2, 3, 4):
    found = store.candidates(4, oldest_version=oldest)
    assert found == [
      group for group in store.candidates(4) if oldest is None or group.version >= oldest
    ]
  assert [g.group_id for g in store.candidates(4, oldest_version=2)] == ['g2', 'g3', 'rest']


def test_samples_of_a_group_are_in_the_order_of_issue(tmp_path):
  store = open_store(tmp_path)
  uids = [f'g/{i}' for i in range(12)]
  store.at(0).issue(issues(uids))
  for uid in reversed(uids):
    store.at(0).append([make_sample(uid)])
    store.at(0).admit([uid])
  (group,) = store.candidates(0)
  assert group.uids == tuple(uids)


def test_eviction_takes_whole_groups_that_wait_the_oldest_first(tmp_path):
  store = open_store(tmp_path, max_uses=2)
  for number in range(6):
    store_group(store, [f'g{number}/0', f'g{number}/1'], number, version=number)
  train(store, ['g0/0', 'g0/1'], 5)  # trained: has ended
  store.at(5).seal(['g1/0', 'g1/1'])  # drawn: its batch is on the way
  store.at(5).issue(issues(['g2/2']))  # not complete
  store_group(store, ['late/0'], 6, version=0)
  before = states(store, ['g0/0', 'g1/0', 'g2/0'])
  assert store.at(6).evict(before_version=0, capacity=None) == {'version': 0, 'capacity': 0}
  # Waiting: late (version 0), g3, g4, g5. Before version 4: late, g3. Of g4 and g5 there is room
  # for one.
  assert store.at(6).evict(before_version=4, capacity=1) == {'version': 3, 'capacity': 2}
  assert states(store, ['late/0', 'g3/0', 'g3/1', 'g4/0', 'g4/1', 'g5/0']) == ['expired'] * 5 + [
    'admitted'
  ]
  assert states(store, ['g0/0', 'g1/0', 'g2/0']) == before == ['trained', 'admitted', 'admitted']
  store.at(6).trained(['g1/0', 'g1/1'])
  assert checked(store).reasons == {'expired(version)': 3, 'expired(capacity)': 2}
  assert store.prune(6) == 0 and store.prune(7) == 5
  with pytest.raises(ValueError, match='g3/0: the store has no bytes of this sample'):
    store.read(['g3/0'])
  assert [sample.uid for sample in store.read(['g5/0', 'g2/1', 'g0/1'])] == ['g5/0', 'g2/1', 'g0/1']
  assert store.at(6).evict(before_version=None, capacity=0) == {'version': 0, 'capacity': 2}
  checked(store)


def test_a_crash_takes_uses_versions_evictions_and_joined_rows_back_to_the_commit(tmp_path):
  store = open_store(tmp_path, max_uses=3)
  store_group(store, ['g/0', 'g/1'], 0, version=0)
  store_group(store, ['h/0'], 0, version=0)
  store.at(0).issue(issues(['late/0']))
  store.at(0).join(experts(['x', 'y']))
  train(store, ['g/0', 'g/1'], 0)
  store.at(0).trained(['x'])
  committed, tallies = store.candidates(1), store.counts()
  # the commit named 1 is written here
  train(store, ['g/0', 'g/1'], 1)
  store.at(1).trained(['x', 'y'])
  store.at(1).join(experts(['x', 'z']))
  store.at(1).append([make_sample('late/0', version=1)])
  store.at(1).evict(before_version=1, capacity=None)
  store.at(2).trained(['z', 'x'])
  assert states(store, ['h/0', 'x', 'z']) == ['expired', 'trained', 'trained'] and uses(
    store, ['g/0', 'x']
  ) == [2, 3]
  store.close()

  store = open_store(tmp_path, max_uses=3)
  with pytest.raises(ValueError, match='call recover first'):
    store.at(1).join(experts(['x']))
  store.recover(1)
  assert store.candidates(1) == committed
  assert states(store, ['g/0', 'h/0', 'x', 'y', 'z', 'late/0']) == (
    ['trained', 'admitted', 'trained', 'admitted', 'void', 'void']
  )
  assert uses(store, ['g/0', 'g/1', 'x', 'y', 'z']) == [1, 1, 1, 0, 0]
  assert store.entries(['late/0'])['late/0'].version is None
  assert store.counts() == tallies | {'issued': 0, 'void': 2}
  assert checked(store).reasons == {'void(crash)': 2}
  # What was undone is done again.
  store.at(1).join(experts(['x', 'z']))
  store.at(1).trained(['z', 'x'])
  assert store.entries(['z'])['z'].attempt == 2 and uses(store, ['z', 'x']) == [1, 2]
  checked(store)


@pytest.mark.parametrize('order', ['newest', 'shuffled', 'priority'])
def test_a_resumed_run_draws_what_it_would_have_drawn(tmp_path, order):
  """Six batches in one go, and with a crash after the fourth and a start from the commit of the
  third.
  """

  def run(store, first, last):
    drawn = []
    for step in range(first, last):
      for number in range(3):
        store_group(store, [f'{step}.{number}/{i}' for i in range(2)], step, version=step)
      groups = {group.group_id: group.uids for group in store.candidates(step)}
      batch = draw([*store.candidates(step)], DrawConfig(order=order), count=4, step=step, seed=5)
      train(store, [uid for group in batch for uid in groups[group]], step)
      store.at(step).evict(before_version=step - 2, capacity=4)
      drawn.append(batch)
    return drawn

  whole = run(open_store(tmp_path / 'whole', max_uses=2), 0, 6)
  crashed = open_store(tmp_path / 'crashed', max_uses=2)
  assert run(crashed, 0, 4) == whole[:4]
  crashed.close()
  crashed = open_store(tmp_path / 'crashed', max_uses=2)
  crashed.recover(3)
  assert run(crashed, 3, 6) == whole[3:]
  checked(crashed)
