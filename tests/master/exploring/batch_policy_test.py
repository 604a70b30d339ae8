"""Which groups form a batch: by hand, against the bound, and over a restart."""

import asyncio
import random

import exploring
import pytest
from clocks import simulated
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.app.schema import AlgorithmConfig, StageConfig
from jaxrl_llm.app.sources import Rollouts
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.master.exploring.batch_policy import (
  POLICIES,
  Candidate,
  batches_ahead,
  complete_first,
  in_order,
  passed_over,
)
from jaxrl_llm.master.exploring.gate import Gate
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.index import open_store


def candidates(text: str, last_batch: int = 9) -> list[Candidate]:
  """'x' is a finished group, '.' an unfinished one; a digit after it is its last batch."""
  found = []
  for char in text:
    if char.isdigit():
      found[-1] = found[-1]._replace(last_batch=int(char))
    else:
      found.append(Candidate(len(found), char == 'x', last_batch))
  return found


@pytest.mark.parametrize(
  'groups, wanted_in_order, wanted_complete_first',
  [
    ('xx.x', [0, 1], [0, 1]),
    ('.x.x', None, [1, 3]),
    ('x..x', None, [0, 3]),
    ('x...', None, None),
    ('x', None, None),
    ('.xxx', None, [1, 2]),  # Finished ones in their order of start: those carried over are ahead.
    ('.0xx', None, None),  # Batch 0 is the last that may train on group 0.
    ('x0xx0x', [0, 1], [0, 2]),
    ('.1.1xx', None, [2, 3]),  # Batch 1 has room for both.
    ('.1.1.1x', None, None),  # Batch 1 has no room for three: one of them must join batch 0.
    ('.1x1.1x', None, [1, 3]),
    ('.1.1x1x1x', None, [2, 3]),
  ],
)
def test_the_groups_of_a_batch_by_hand(groups, wanted_in_order, wanted_complete_first):
  assert in_order(candidates(groups), 0, 2) == wanted_in_order
  assert complete_first(candidates(groups), 0, 2) == wanted_complete_first


def test_groups_that_started_before_one_of_the_batch_are_passed_over():
  assert passed_over(candidates('.x.x'), [1, 3]) == 2
  assert passed_over(candidates('xx..'), [0, 1]) == 0


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(0, 10**6))
def test_every_group_is_trained_once_and_in_time_whatever_finishes_when(
  bound, count, publish_every, seed
):
  """The gate, the policy and a trainer that publishes every so often. Groups finish in any order,
  and one in ten is dropped.
  """
  batches, rng = 8, random.Random(seed)
  ahead = batches_ahead('complete_first', bound)
  gate = Gate(bound=bound, ahead=ahead, groups_per_batch=count, batches=batches)
  groups, trained = {}, []

  async def collect(batch):
    while True:
      if gate.capacity > 0:
        start = gate.state()['started']
        for number in range(start, start + await gate.admit()):
          groups[number] = Candidate(number, False, gate.last_batch)
      chosen = complete_first([*groups.values()], batch, count)
      running = [number for number, group in groups.items() if not group.is_finished]
      if chosen is not None and (not running or rng.random() < 0.7):
        return chosen
      number = rng.choice(running)
      if rng.random() < 0.1:
        del groups[number]
        gate.drop()
      else:
        groups[number] = groups[number]._replace(is_finished=True)

  async def train():
    for batch in range(batches):
      if batch % min(publish_every, ahead + 1) == 0:
        gate.advance(batch)
      for number in await collect(batch):
        group = groups.pop(number)
        assert group.is_finished and group.last_batch >= batch
        trained.append(number)

  asyncio.run(train())
  assert len(set(trained)) == len(trained) == batches * count
  assert not groups, 'the stage ends with no group left over'


@pytest.mark.parametrize('bound', [2, 4])
def test_a_batch_takes_finished_groups_and_passes_over_the_slow_one(tokenizer, store, bound):
  """Group 0 is slow: it joins the last batch that the bound permits, and no earlier one."""
  exploration = exploring.Exploration(
    tokenizer, store, lambda attempt: 1.0, bound=bound, batch_policy='complete_first'
  )
  slow, first = True, exploration.tasks[0]
  exploration.engine.hold = lambda request: slow and request.uid == f'grpo/{first.uid}/0'

  async def main():
    nonlocal slow
    found = []
    async with exploration.explorer.running():
      for step in range(bound + 2):
        exploration.explorer.advance(step, step)
        slow = step < bound
        batch, counts = await exploration.explorer.collect()
        uids = [member.sample.uid for member in batch]
        store.at(step).seal(uids)
        exploration.explorer.record(uids)
        exploration.explorer.complete()
        found.append(({member.task.uid for member in batch}, counts['passed_over']))
    return found

  found = simulated(main(), deadline_s=30)
  assert [first.uid in tasks for tasks, _ in found] == [step == bound for step in range(bound + 2)]
  assert [over > 0 for _, over in found[:bound]] == [True] * bound
  assert exploration.explorer.clock_decisions == sum(over for _, over in found)
  assert audit(store).ok


@pytest.mark.parametrize('seed', range(3))
def test_groups_that_were_passed_over_at_a_commit_are_trained_once_after_it(
  tokenizer, tmp_path, seed
):
  """Killed two batches after the commit, with groups finished, passed over and running."""
  tasks, bound, batches, rng = exploring.make_tasks(24), 2, 8, random.Random(seed)
  slow = {task.uid for task in tasks if rng.random() < 0.3}

  def explore(commit, delays):
    store = open_store(tmp_path / 'replay', synchronous='normal')
    store.recover(commit)
    exploration = exploring.Exploration(
      tokenizer, store, lambda attempt: 1.0, bound=bound, batches=batches, tasks=tasks,
      delays=delays, batch_policy='complete_first',
    )  # fmt: skip
    exploration.engine.hold = lambda request: (
      request.uid.split('/')[1] in slow and rng.random() < 0.9
    )
    return exploration, store

  async def train(exploration, store, first, last):
    states, trained = {}, []
    async with exploration.explorer.running():
      for step in range(first, last):
        exploration.explorer.advance(step, step)
        batch, _ = await exploration.explorer.collect()
        assert all(step - m.sample.segments[0].version.step <= bound for m in batch)
        uids = [member.sample.uid for member in batch]
        store.at(step).seal(uids)
        exploration.explorer.record(uids)
        exploration.explorer.complete()
        trained.append(uids)
        states[step + 1] = exploration.explorer.state()
        exploration.engine._version = exploring.Version(0, step + 1)
    return states, trained

  first, store = explore(0, seed)
  states, before = simulated(train(first, store, 0, 5), deadline_s=60)
  store.close()
  again, store = explore(3, seed + 9)
  again.engine._version = exploring.Version(0, 3)
  again.explorer.restore(states[3])
  assert again.explorer._now() == states[3]
  _, after = simulated(train(again, store, 3, batches), deadline_s=60)
  trained = [uid for uids in before[:3] + after for uid in uids]
  assert len(set(trained)) == len(trained) == batches * 4
  report = audit(store)
  assert report.ok and report.live == () and report.states['trained'] == batches * 4, report.lines
  store.close()


def test_a_bound_that_leaves_no_choice_is_refused():
  def stage(**source):
    source = Rollouts(tasksets=('train',), **source)
    return StageConfig(name='rl', algorithm=AlgorithmConfig(name='grpo'), steps=4, source=source)

  assert stage(bound=2, batch_policy='complete_first').source.batch_policy in POLICIES
  for wrong, words in (
    (dict(), 'with bound 0, for which timing must not decide'),
    (dict(bound=1), 'with bound 1, for which no group may be passed over'),
    (dict(bound=4, publish_every=4), 'publish_every: 4, .* start for 2 batches ahead'),
  ):
    with pytest.raises(UserError, match=words) as caught:
      stage(batch_policy='complete_first', **wrong)
    assert '\n' not in str(caught.value)
