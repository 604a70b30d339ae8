"""The explorer against its contract, with a deterministic engine and a real store: order, drops,
failures, endings.
"""

import asyncio
import collections
import functools
import itertools
import json
import threading

import exploring
import pytest
from clocks import LOOP_CLOCK, simulated

from jaxrl_llm.core import background
from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.waits import IdleClock, WaitExpired
from jaxrl_llm.master.exploring import explorer as explorers
from jaxrl_llm.master.exploring.finished import finish
from jaxrl_llm.master.exploring.limits import TaskLimits
from jaxrl_llm.master.exploring.selection import SelectionConfig
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.index import open_store
from jaxrl_llm.replay.writer import StepWriter
from jaxrl_llm.tasks.sampler import SamplerConfig


def run(main):
  """At most 30 s of simulated time: a hang is a failure. Nothing may be left running."""
  return simulated(main, deadline_s=30)


def uid(task, i, *, visit=0):
  return f'grpo/{task.uid}/{visit}/{i}'


def uids(batch):
  return [chosen.sample.uid for chosen in batch]


@pytest.mark.parametrize('bound', [0, 1, 3])
def test_a_batch_depends_on_which_groups_started_and_never_on_which_ended_first(
  tokenizer, tmp_path, bound
):
  """Task 1 has one scorable sample of two, tasks 2 and 5 none. Whatever ends first, the batches
  take the other groups in the order of start: tasks 0 1, then 3 4, then 6 7.
  """
  tasks = exploring.make_tasks(24)

  def judge(attempt):
    number = tasks.index(attempt.task)
    unscorable = number in (2, 5) or (number == 1 and attempt.uid.endswith('/0'))
    return None if unscorable else float(number)

  found = set()
  for delays in range(6):
    store = exploring.new_store(tmp_path / f'{delays}')
    exploration = exploring.Exploration(tokenizer, store, judge, delays=delays, bound=bound)
    batches = run(exploration.batches(3))
    members = [member for batch, _ in batches for member in batch]
    found.add(tuple((m.sample.uid, m.completion, m.reward.value) for m in members))
    store.close()
  (only,) = found

  def whole(*numbers):
    return [uid(tasks[n], i) for n in numbers for i in range(2)]

  assert [name for name, _, _ in only] == [*whole(0), uid(tasks[1], 1), *whole(3, 4, 6, 7)]
  assert [value for _, _, value in only] == [0, 0, 1, 3, 3, 4, 4, 6, 6, 7, 7]


def test_a_slow_first_group_is_waited_for_however_many_later_ones_have_ended(tokenizer, store):
  async def main():
    exploration = exploring.Exploration(tokenizer, store, lambda attempt: 1.0, bound=2)
    slow = True
    first = exploration.tasks[0]
    exploration.engine.hold = lambda request: slow and request.uid == f'grpo/{first.uid}/0'
    async with exploration.explorer.running():
      exploration.explorer.advance(0, 0)
      collecting = asyncio.create_task(exploration.explorer.collect())
      # (0 + 2 + 1) * 2 groups may start, all but the first end.
      while store.counts()['admitted'] < 5 * 2:
        await asyncio.sleep(0.001)
      assert not (await asyncio.wait({collecting}, timeout=0.02))[0]
      slow = False
      batch, _ = await collecting
    assert uids(batch) == [uid(t, i) for t in exploration.tasks[:2] for i in range(2)]

  run(main())


def test_unscorable_samples_are_dropped_and_counted_and_an_unscorable_group_is_replaced(
  tokenizer, store
):
  """Batch 0: task 0 loses one of three samples, task 1 all three, so task 2 starts instead. Batch
  1: tasks 3 and 4.
  """

  def judge(attempt):
    number = exploration.number(attempt)
    return None if number == 1 or (number == 0 and attempt.uid.endswith('/2')) else 0.25

  exploration = exploring.Exploration(tokenizer, store, judge, group_size=3)
  (first, counts), (second, more) = run(exploration.batches(2))
  tasks = exploration.tasks
  assert uids(first) == [uid(tasks[0], 0), uid(tasks[0], 1), *(uid(tasks[2], i) for i in range(3))]
  assert {chosen.task.uid for chosen in second} == {tasks[3].uid, tasks[4].uid}
  assert counts == {'dropped/unscorable': 1 + 3, 'dropped/not_selected': 0, 'dropped/groups': 1}
  assert not any(more.values())
  assert len(exploration.engine.requests) == 5
  report = audit(store)
  assert report.reasons == {'dropped(unscorable)': 4}
  assert (report.issued, report.states['trained'], report.live) == (5 * 3, 2 + 3 + 6, ())


def test_a_member_carries_what_was_said_and_its_scores_and_the_store_has_the_same(tokenizer, store):
  exploration = exploring.Exploration(
    tokenizer, store, lambda attempt: float(len(attempt.completion))
  )
  ((batch, _),) = run(exploration.batches(1))
  for member, stored in zip(batch, store.read(uids(batch)), strict=True):
    sample = member.sample
    prompt = tokenizer.render_prompt(member.task.prompt)
    assert sample.tokens[: sample.prompt_len].tolist() == prompt
    assert tokenizer.decode(sample.tokens[sample.prompt_len :].tolist()) == member.completion
    assert member.reward.value == len(member.completion)
    assert member.reward.parts == {'judge': float(len(member.completion)), 'judge/half': 0.5}
    assert store.scores([sample.uid])[sample.uid] == list(member.scores)
    assert stored.tokens.tolist() == sample.tokens.tolist()


@pytest.mark.parametrize('bound', [0, 2])
def test_a_group_keeps_the_limit_of_the_step_at_which_it_began(tokenizer, store, bound):
  """With bound 2, the groups of the first three batches begin before the first update."""
  exploration = exploring.Exploration(
    tokenizer, store, lambda attempt: 1.0, bound=bound, response_lengths=((0, 1), (1, 3), (3, 9))
  )
  batches = run(exploration.batches(5))
  limits = [counts['response_length/limit'] for _, counts in batches]
  asked = {request.group: request.max_tokens for request in exploration.engine.requests}
  # The workflow's own limit is 4.
  assert limits == ([1, 3, 3, 9, 9] if bound == 0 else [1, 1, 1, 3, 3])
  for (batch, _), limit in zip(batches, limits, strict=True):
    assert {asked[member.sample.group_id] for member in batch} == {min(limit, 4)}


def test_too_many_unscorable_groups_end_the_run_with_one_line(tokenizer, store):
  exploration = exploring.Exploration(tokenizer, store, lambda attempt: None, max_dropped_groups=3)
  with pytest.raises(RunError) as caught:
    run(exploration.batches(1))
  message = str(caught.value)
  assert '\n' not in message
  for word in ('stage grpo', '4 groups', 'max_dropped_groups permits 3', 'judge', 'no truth'):
    assert word in message
  assert audit(store).live == ()


def test_a_run_that_ended_because_of_dropped_groups_replaces_them_all_when_it_continues(
  tokenizer, tmp_path
):
  """The last batch of the stage needs each place that a dropped group leaves."""
  store = exploring.new_store(tmp_path)
  config = {'bound': 1, 'batches': 3}
  ended = exploring.Exploration(
    tokenizer,
    store,
    lambda attempt: 1.0 if ended.number(attempt) < 2 else None,
    max_dropped_groups=0,
    **config,
  )

  async def until_commit():
    async with ended.explorer.running():
      ended.explorer.advance(0, 0)
      batch, _ = await ended.explorer.collect()
      while not store.counts()['dropped']:
        await asyncio.sleep(0.001)
      store.at(0).seal(uids(batch))
      ended.explorer.record(uids(batch))
      ended.explorer.complete()
      state = json.dumps(ended.explorer.state())
      ended.explorer.advance(1, 1)
      with pytest.raises(RunError, match='max_dropped_groups permits 0'):
        await ended.explorer.collect()
      return state

  state = json.loads(run(until_commit()))
  store.close()
  store = open_store(tmp_path)
  store.recover(1)
  again = exploring.Exploration(tokenizer, store, lambda attempt: 1.0, **config)
  again.explorer.restore(state)

  async def until_end():
    async with again.explorer.running():
      for step in (1, 2):
        again.explorer.advance(step, step)
        batch, _ = await again.explorer.collect()
        store.at(step).seal(uids(batch))
        again.explorer.record(uids(batch))
        again.explorer.complete()

  run(until_end())
  assert audit(store).states['trained'] == 3 * 4
  store.close()


def test_the_event_loop_has_turns_while_many_groups_start(tokenizer, store, monkeypatch):
  monkeypatch.setattr(explorers, '_AT_ONCE', 4)
  turn, issued, requested = 0, collections.Counter(), collections.Counter()
  issue = StepWriter.issue

  def note_issue(writer, rows):
    issued[turn] += len(rows)
    issue(writer, rows)

  def note_request(request):
    requested[turn] += 1
    return False

  monkeypatch.setattr(StepWriter, 'issue', note_issue)

  async def main():
    nonlocal turn
    exploration = exploring.Exploration(tokenizer, store, lambda attempt: 1.0, groups_per_batch=12)
    exploration.engine.prompt, exploration.engine.hold = True, note_request
    collecting = asyncio.create_task(exploration.batches(1))
    while not collecting.done():
      turn += 1
      await asyncio.sleep(0)
    return await collecting

  ((batch, _),) = run(main())
  assert len(batch) == sum(issued.values()) == 24
  assert max(issued.values()) == 4
  # A request is noted for each of a group's two samples.
  assert sum(requested.values()) == 24 and max(requested.values()) <= 4


def test_groups_that_a_kill_leaves_without_records_start_when_the_run_resumes(
  tokenizer, tmp_path, monkeypatch
):
  """The commit lists groups whose samples the store does not have yet."""
  config = {'bound': 1, 'groups_per_batch': 4}

  async def explore(store, count, state=None):
    """Returns the batches, the last commit's state, and the groups it lists without records."""
    exploration, batches = exploring.Exploration(tokenizer, store, len_of, **config), []
    explorer, first = exploration.explorer, 0
    if state is not None:
      explorer.restore(json.loads(state))
      first = 2
    async with explorer.running():
      for step in range(first, first + count):
        explorer.advance(step, step)
        batch, _ = await explorer.collect()
        batches.append([(m.sample.uid, m.completion) for m in batch])
        store.at(step).seal(uids(batch))
        explorer.record(uids(batch))
        explorer.complete()
        known = {entry.group_id for entry in store.live()}
        groups = explorer.state()['explorer']['groups']
        lacking = [g for g in groups if f'grpo/{g["task"]}/{g["visit"]}' not in known]
        if step == 0:
          while len(store.live()) < 8 or store.counts()['admitted'] < 8:
            await asyncio.sleep(0.001)  # The next batch is generated.
    return batches, json.dumps(explorer.state()), lacking

  def len_of(attempt):
    return float(attempt.response_len)

  monkeypatch.setattr(explorers, '_AT_ONCE', 2)
  undisturbed = exploring.new_store(tmp_path / 'undisturbed')
  wanted, _, _ = run(explore(undisturbed, 3))
  store = exploring.new_store(tmp_path / 'killed')
  before, state, lacking = run(explore(store, 2))
  assert 1 <= len(lacking) < 4
  store.close()
  store = open_store(tmp_path / 'killed')
  store.recover(2)
  after, _, _ = run(explore(store, 1, state))
  assert before + after == wanted
  undisturbed.close()
  store.close()


def test_as_many_unscorable_groups_as_permitted_do_not_and_each_batch_counts_anew(tokenizer, store):
  exploration = exploring.Exploration(
    tokenizer,
    store,
    lambda attempt: None if exploration.number(attempt) % 5 < 3 else 1.0,
    max_dropped_groups=3,
  )
  batches = run(exploration.batches(3))
  assert [counts.get('dropped/groups', 0) for _, counts in batches] == [3, 3, 3]


@pytest.mark.parametrize(('bound', 'batch_policy'), [(0, 'in_order'), (2, 'complete_first')])
def test_every_sampled_token_is_trained_dropped_or_waits(tokenizer, store, bound, batch_policy):
  """Of each group, one sample in three is dropped, and every fourth group as a whole."""

  def judge(attempt):
    unscorable = attempt.uid.endswith('/2') or exploration.number(attempt) % 4 == 1
    return None if unscorable else 1.0

  exploration = exploring.Exploration(
    tokenizer, store, judge, group_size=3, bound=bound, batch_policy=batch_policy
  )
  explorer, ledgers, trained = exploration.explorer, [], 0

  async def main():
    nonlocal trained
    async with explorer.running():
      for step in range(4):
        explorer.advance(step, step)
        batch, _ = await explorer.collect()
        await asyncio.sleep(1.0)  # All groups that may start finish.
        ledgers.append(explorer.take_tokens())
        trained += sum(int(member.sample.sampled.sum()) for member in batch)
        store.at(step).seal(uids(batch))
        explorer.record(uids(batch))
        explorer.complete()

  run(main())
  served = sum(
    exploration.engine.complete(request, i).tokens.size
    for request in exploration.engine.requests
    for i in range(3)
  )
  total = sum(map(collections.Counter, ledgers), collections.Counter())
  assert total['trained'] == trained > 0 and total['dropped'] > 0
  assert total['sampled'] == total['trained'] + total['dropped'] + ledgers[-1]['waiting']
  assert (ledgers[-1]['waiting'] > 0) == (bound > 0)
  assert total['sampled'] == served and total['discarded'] == 0
  assert exploration.hub.take_metrics() == {'goodput/tokens/open': 0.0}


def by_task(tasks, values):
  """A judge: `values[number of the task][sample index]`, of tasks that are not named 0 and 1."""
  return lambda attempt: values.get(tasks.index(attempt.task), (0.0, 1.0))[
    int(attempt.uid.rpartition('/')[2])
  ]


def states(report):
  return {state: count for state, count in report.states.items() if count}


def test_a_batch_is_complete_only_once_all_groups_that_are_being_stored_have_been(
  tokenizer, store, monkeypatch
):
  """Otherwise the store would have a group as admitted that the state of the commit lacks."""
  monkeypatch.setattr(background, 'is_short', lambda tokens: False)
  threads, may_store, transaction, third = [], threading.Event(), store.transaction, None

  def slow():
    if threading.current_thread() is not threading.main_thread():
      threads.append(threading.get_ident())
      if len(threads) > 2:
        third.get_loop().call_soon_threadsafe(lambda: third.done() or third.set_result(None))
        assert may_store.wait(20)
    return transaction()

  monkeypatch.setattr(store, 'transaction', slow)

  async def main():
    exploration = exploring.Exploration(tokenizer, store, lambda attempt: 1.0, bound=1)
    nonlocal third
    third = asyncio.get_running_loop().create_future()
    explorer, later = exploration.explorer, [task.uid for task in exploration.tasks[2:]]
    is_held = True
    exploration.engine.hold = lambda request: is_held and request.uid.split('/')[1] in later
    async with explorer.running():
      explorer.advance(0, 0)
      batch, _ = await explorer.collect()
      store.at(0).seal(uids(batch))
      is_held = False
      await third
      assert store.counts()['admitted'] == 4
      threading.Timer(0.2, may_store.set).start()
      explorer.record(uids(batch))
      explorer.complete()
      ended = [group['ended'] for group in explorer.state()['explorer']['groups']]
      assert sum(ended) * 2 == store.counts()['admitted'] >= 2

  run(main())
  assert len({*threads}) == 1


def hold_thread(store, monkeypatch, transaction):
  """Has all groups stored in a thread, whose transactions begin once `may_store` is set, by
  `transaction`. Returns an event that is set when the thread waits, and `may_store`. Must be called
  in the event loop.
  """
  loop, of_store = asyncio.get_running_loop(), store.transaction
  waits, may_store = asyncio.Event(), threading.Event()

  def held():
    if threading.current_thread() is threading.main_thread():
      return of_store()
    loop.call_soon_threadsafe(waits.set)
    assert may_store.wait(20)
    return transaction()

  monkeypatch.setattr(background, 'is_short', lambda tokens: False)
  monkeypatch.setattr(store, 'transaction', held)
  return waits, may_store


def test_a_group_with_late_rewards_is_stored_after_those_that_are_being_stored(
  tokenizer, store, monkeypatch
):
  async def main():
    waits, may_store = hold_thread(store, monkeypatch, store.transaction)
    exploration = exploring.Exploration(tokenizer, store, lambda attempt: 1.0)
    late, admitted = finish(exploration.config, [], exploring.REWARDS, step=0), []
    async with exploration.explorer.running():
      exploration.explorer.advance(0, 0)
      await waits.wait()
      threading.Timer(0.2, may_store.set).start()
      exploration.explorer._samples.settle(
        'late', late, lambda: admitted.append(store.counts()['admitted'])
      )
    assert admitted[0] >= 2

  run(main())


def test_a_group_that_cannot_be_stored_when_the_stage_ends_is_given_up_and_its_error_raised(
  tokenizer, store, monkeypatch
):
  def fail():
    raise RunError('replay store: disk full')

  async def main():
    waits, may_fail = hold_thread(store, monkeypatch, fail)
    explorer = exploring.Exploration(tokenizer, store, lambda attempt: 1.0).explorer
    async with explorer.running():
      explorer.advance(0, 0)
      await waits.wait()
      threading.Timer(0.2, may_fail.set).start()

  with pytest.raises(RunError, match='disk full'):
    run(main())
  report = audit(store)
  assert states(report) == {'dropped': 4} and report.reasons == {'dropped(given up)': 4}


def test_a_group_of_which_nothing_is_chosen_is_dropped_and_replaced(tokenizer, store):
  """Mixed groups alone: tasks 0 and 2 are unmixed (0 has but one scorable sample), so that batch 0
  is tasks 1 and 3.
  """
  tasks = exploring.make_tasks(24)
  judge = by_task(tasks, {0: (None, 1.0), 2: (0.5, 0.5)})
  selection = SelectionConfig(kind='mixed')
  exploration = exploring.Exploration(tokenizer, store, judge, tasks=tasks, selection=selection)
  (first, counts), (second, more) = run(exploration.batches(2))
  assert uids(first) == [uid(tasks[n], i) for n in (1, 3) for i in range(2)]
  assert uids(second) == [uid(tasks[n], i) for n in (4, 5) for i in range(2)]
  assert counts == {'dropped/unscorable': 1, 'dropped/not_selected': 1 + 2, 'dropped/groups': 2}
  assert not any(more.values())
  report = audit(store)
  assert report.ok and report.live == ()
  assert report.reasons == {'dropped(unscorable)': 1, 'dropped(not selected)': 3}
  assert (report.issued, states(report)) == (6 * 2, {'trained': 8, 'dropped': 4})


def test_of_a_group_only_the_shortest_correct_sample_is_admitted(tokenizer, store):
  """Whatever is longer, wrong or unscorable leaves the store with its reason."""
  tasks = exploring.make_tasks(24)
  judge = by_task(
    tasks, {0: (1.0, 1.0, 0.0, None), 1: (0.0, 0.0, 0.0, 0.0), 2: (0.0, 1.0, 1.0, 1.0)}
  )
  selection = SelectionConfig(kind='shortest_correct')
  exploration = exploring.Exploration(
    tokenizer, store, judge, tasks=tasks, group_size=4, selection=selection
  )
  ((batch, counts),) = run(exploration.batches(1))
  engine, best = exploration.engine, []
  for task, request, correct in (
    (tasks[0], engine.requests[0], (0, 1)),
    (tasks[2], engine.requests[2], (1, 2, 3)),
  ):
    lengths = {uid(task, i): engine.complete(request, i).tokens.size for i in correct}
    best.append(min(lengths, key=lengths.get))
  assert uids(batch) == best and all(chosen.imitated for chosen in batch)
  assert counts == {'dropped/unscorable': 1, 'dropped/not_selected': 2 + 4 + 3, 'dropped/groups': 1}
  report = audit(store)
  assert report.ok and report.live == ()
  assert (report.issued, states(report)) == (3 * 4, {'trained': 2, 'dropped': 10})


def test_a_sample_in_several_pairs_is_admitted_and_trained_once(tokenizer, store):
  """Three wrong ones against the one correct one, in each of two groups: twelve rows of eight
  samples.
  """
  tasks = exploring.make_tasks(24)
  judge = by_task(tasks, dict.fromkeys(range(24), (0.0, 0.0, 1.0, 0.0)))
  selection = SelectionConfig(kind='pairs', pairs_per_group=3)
  exploration = exploring.Exploration(
    tokenizer, store, judge, tasks=tasks, group_size=4, selection=selection
  )
  ((batch, counts),) = run(exploration.batches(1))
  assert uids(batch) == [
    uid(task, i) for task in tasks[:2] for wrong in (0, 1, 3) for i in (2, wrong)
  ]
  assert len({chosen.pair for chosen in batch}) == 6
  assert not any(counts.values())
  report = audit(store)
  assert report.ok and states(report) == {'trained': 8}


def test_too_many_groups_of_which_nothing_is_chosen_end_the_run_with_one_line(tokenizer, store):
  selection = SelectionConfig(kind='mixed')
  exploration = exploring.Exploration(
    tokenizer, store, lambda attempt: 0.25, selection=selection, max_dropped_groups=3
  )
  with pytest.raises(RunError) as caught:
    run(exploration.batches(1))
  message = str(caught.value)
  assert '\n' not in message
  for word in (
    'stage grpo',
    '4 groups were dropped',
    'max_dropped_groups permits 3',
    '[0.25, 0.25]',
    "'mixed'",
    'easy',
  ):
    assert word in message
  report = audit(store)
  assert report.ok and report.live == ()


def test_the_last_of_too_many_dropped_groups_is_reported_accurately(tokenizer, store):
  """One sample unscorable, the other alone: what is to be looked at is the selection, not the
  scorer.
  """

  def judge(attempt):
    return None if attempt.uid.endswith('/0') else 1.0

  selection = SelectionConfig(kind='mixed')
  exploration = exploring.Exploration(
    tokenizer, store, judge, selection=selection, max_dropped_groups=0
  )
  with pytest.raises(
    RunError, match=r"selection 'mixed' accepts no sample with rewards \[None, 1\.0\]"
  ):
    run(exploration.batches(1))


@pytest.mark.parametrize('bound', [0, 2])
def test_with_a_selection_a_batch_depends_on_which_groups_started_alone(tokenizer, tmp_path, bound):
  """Tasks 1, 2 and 5 are unmixed."""
  tasks = exploring.make_tasks(24)
  judge = by_task(tasks, {1: (1.0, 1.0), 2: (0.0, 0.0), 5: (None, None)})
  found = set()
  for delays in range(4):
    store = exploring.new_store(tmp_path / f'{delays}')
    selection = SelectionConfig(kind='mixed')
    exploration = exploring.Exploration(
      tokenizer, store, judge, tasks=tasks, delays=delays, bound=bound, selection=selection
    )
    found.add(tuple(name for batch, _ in run(exploration.batches(3)) for name in uids(batch)))
    store.close()
  assert found == {tuple(uid(tasks[n], i) for n in (0, 3, 4, 6, 7, 8) for i in range(2))}


def test_the_sampler_gets_each_outcome_once_in_order_of_start(tokenizer, tmp_path):
  """Every third task is always solved, so that its group is dropped; it is told of all the same,
  and drawn rarely.
  """
  tasks = exploring.make_tasks(24)
  judge = by_task(tasks, dict.fromkeys(range(0, 24, 3), (1.0, 1.0)))
  found = set()
  for delays in range(4):
    store = exploring.new_store(tmp_path / f'{delays}')
    exploration = exploring.Exploration(
      tokenizer, store, judge, tasks=tasks, delays=delays,
      sampler=SamplerConfig(order='prioritised'), selection=SelectionConfig(kind='mixed'),
    )  # fmt: skip
    batches = run(exploration.batches(8))
    state = exploration.sampler.state()
    found.add((*(name for batch, _ in batches for name in uids(batch)), json.dumps(state)))
    dropped = sum(counts.get('dropped/groups', 0) for _, counts in batches)
    store.close()
  assert len(found) == 1 and dropped > 0
  (pool,) = state['pools']
  assert sum(pool['visits'].values()) == pool['draws'] == 8 * 2 + dropped
  assert pool['known'] == {
    number: [1.0 if int(number) % 3 == 0 else 0.5] for number in pool['visits']
  }


def test_above_a_bound_of_0_the_sampler_is_told_in_the_order_of_start_and_no_further_than_the_batch(
  tokenizer, tmp_path
):
  for delays in range(4):
    store = exploring.new_store(tmp_path / f'{delays}')
    exploration = exploring.Exploration(
      tokenizer, store, lambda attempt: 1.0, delays=delays, bound=2
    )
    told, tell = [], exploration.sampler.feedback
    exploration.sampler.feedback = lambda uid, *outcome, told=told, tell=tell: (
      told.append(uid),
      tell(uid, *outcome),
    )

    async def main(exploration=exploration, store=store, told=told):
      async with exploration.explorer.running():
        exploration.explorer.advance(0, 0)
        while store.counts()['admitted'] < 6 * 2:
          await asyncio.sleep(0.001)
        for step in range(3):
          batch, _ = await exploration.explorer.collect()
          assert told == [task.uid for task in exploration.tasks[: 2 * (step + 1)]]
          store.at(step).seal(uids(batch))
          store.at(step).trained(uids(batch))

    run(main())
    store.close()


@pytest.mark.parametrize('ended', [True, False])
@pytest.mark.parametrize('batches', [2, 3, 6])
def test_a_stage_that_is_shortened_gives_up_the_groups_that_its_batches_do_not_need(
  tokenizer, tmp_path, ended, batches
):
  """At the commit after batch 0, groups 2 to 5 are in flight; a batch needs two of them."""
  store = exploring.new_store(tmp_path)
  first = exploring.Exploration(tokenizer, store, lambda attempt: 1.0, bound=2, batches=6)
  if not ended:
    later = {task.uid for task in first.tasks[2:]}
    first.engine.hold = lambda request: request.uid.split('/', 1)[1].rpartition('/')[0] in later

  async def until_commit():
    async with first.explorer.running():
      first.explorer.advance(0, 0)
      while store.counts()['admitted'] < (6 if ended else 2) * 2 or len(first.engine.requests) < 6:
        await asyncio.sleep(0.001)
      batch, _ = await first.explorer.collect()
      store.at(0).seal(uids(batch))
      first.explorer.record(uids(batch))
      first.explorer.complete()
      return json.dumps(first.explorer.state())

  state = json.loads(run(until_commit()))
  assert [group['ended'] for group in state['explorer']['groups']] == [ended] * 4
  found = set()
  for delays in range(3):
    store.close()
    store = open_store(tmp_path)  # As after a kill before the next commit: it is done again.
    store.recover(1)
    again = exploring.Exploration(
      tokenizer, store, lambda attempt: 1.0, bound=2, batches=batches, delays=delays
    )
    again.explorer.restore(state)

    async def to_the_end(again=again, store=store):
      async with again.explorer.running():
        for step in range(1, batches):
          again.explorer.advance(step, step)
          batch, _ = await again.explorer.collect()
          assert {m.task.uid for m in batch} == {
            task.uid for task in again.tasks[2 * step : 2 * step + 2]
          }
          store.at(step).seal(uids(batch))
          again.explorer.record(uids(batch))
          again.explorer.complete()

    run(to_the_end())
    surplus = max(0, 6 - 2 * batches)
    report = audit(store)
    assert report.ok and report.live == (), report.lines
    assert report.states['trained'] == 2 * 2 * batches
    assert report.reasons.get('dropped(given up)', 0) == (2 * surplus if ended else 0)
    assert len(again.engine.requests) == 2 * batches - 2 - (4 - surplus if ended else 0)
    found.add(json.dumps(again.explorer.state()))
  assert len(found) == 1, 'timing changes nothing'
  store.close()


class EngineBroke(RunError):
  pass


@pytest.mark.parametrize(
  'error', [EngineBroke('engine fake: lost'), ValueError('a bug'), UserError('a bad prompt')]
)
@pytest.mark.parametrize('fail_at', [0, 1, 3])
def test_a_failing_engine_surfaces_as_its_own_error(tokenizer, store, error, fail_at):
  exploration = exploring.Exploration(tokenizer, store, lambda attempt: 1.0)
  exploration.engine.fail_at, exploration.engine.error = fail_at, error
  with pytest.raises(type(error)) as caught:
    run(exploration.batches(3))
  assert caught.value is error
  assert audit(store).live == ()


def test_a_failing_scorer_surfaces_as_its_own_error_beside_a_failing_engine(tokenizer, store):
  """Both fail; the one that a user can act on is told."""

  def judge(attempt):
    raise UserError('rewards.scorers: no scorer judges it')

  exploration = exploring.Exploration(tokenizer, store, judge)
  with pytest.raises(UserError, match='no scorer judges it'):
    run(exploration.batches(1))


def test_an_error_between_two_batches_is_raised_by_the_next_collect(tokenizer, store):
  async def main():
    exploration = exploring.Exploration(tokenizer, store, lambda attempt: 1.0)
    exploration.engine.fail_at, exploration.engine.error = 2, EngineBroke('lost')
    async with exploration.explorer.running():
      exploration.explorer.advance(0, 0)
      await exploration.explorer.collect()
      exploration.explorer.advance(1, 1)
      await asyncio.sleep(0.02)
      await exploration.explorer.collect()

  with pytest.raises(EngineBroke):
    run(main())


def test_an_error_that_nobody_collects_is_not_reported_as_an_unhandled_one(tokenizer, store):
  async def main():
    unhandled = []
    asyncio.get_running_loop().set_exception_handler(
      lambda loop, context: unhandled.append(context)
    )
    exploration = exploring.Exploration(tokenizer, store, lambda attempt: 1.0)
    exploration.engine.fail_at, exploration.engine.error = 0, EngineBroke('lost')
    async with exploration.explorer.running():
      exploration.explorer.advance(0, 0)
      await asyncio.sleep(0.02)
    del exploration
    await asyncio.sleep(0.02)
    return unhandled

  assert run(main()) == []


def test_a_missing_batch_is_reported_at_the_deadline(tokenizer, store):
  exploration = exploring.Exploration(
    tokenizer, store, lambda attempt: 1.0, collect_deadline_s=0.05
  )
  exploration.engine.hold = lambda request: True
  with pytest.raises(WaitExpired, match='2 groups of stage grpo'):
    run(exploration.batches(1))
  assert exploration.engine.cancelled == 2


def test_leaving_cancels_what_is_in_flight_and_every_sample_ends_in_one_state(tokenizer, store):
  """Bound 2: batch 0 trains tasks 0 and 1; of the eight groups started by then, three never end."""

  async def main():
    exploration = exploring.Exploration(tokenizer, store, lambda attempt: 1.0, bound=2)
    held = [f'grpo/{task.uid}/0' for task in exploration.tasks[5:]]
    exploration.engine.hold = lambda request: request.uid in held
    async with exploration.explorer.running():
      exploration.explorer.advance(0, 0)
      batch, _ = await exploration.explorer.collect()
      store.at(0).seal(uids(batch))
      store.at(0).trained(uids(batch))
      exploration.explorer.advance(1, 1)
      while len(exploration.engine.requests) < 8 or store.counts()['admitted'] < 3 * 2:
        await asyncio.sleep(0.001)
      assert audit(store).live != ()
    assert exploration.engine.cancelled == 3
    await asyncio.sleep(0.01)
    assert len(asyncio.all_tasks()) <= 2, 'this one, and the one that waits for it'

  run(main())
  report = audit(store)
  assert report.ok and report.live == ()
  assert {state: count for state, count in report.states.items() if count} == {
    'trained': 4,
    'dropped': 12,
  }
  assert report.reasons == {'dropped(given up)': 12}


def test_a_batch_that_was_handed_out_and_not_trained_is_given_up_on_leaving(tokenizer, store):
  async def main():
    exploration = exploring.Exploration(tokenizer, store, lambda attempt: 1.0)
    async with exploration.explorer.running():
      exploration.explorer.advance(0, 0)
      batch, _ = await exploration.explorer.collect()
      assert len(batch) == 4 and store.counts()['admitted'] == 4

  run(main())
  report = audit(store)
  assert report.ok and report.live == () and report.reasons == {'dropped(given up)': 4}


def test_groups_in_flight_never_pass_the_gate(tokenizer, store):
  """At bound 1 at most (served + 2) * 2 groups have started when a batch is closed, and all that
  capacity is used.
  """

  async def main():
    exploration = exploring.Exploration(tokenizer, store, lambda attempt: 1.0, bound=1)
    async with exploration.explorer.running():
      for step in range(4):
        exploration.explorer.advance(step, step)
        await exploration.explorer.collect()
        assert len(exploration.engine.requests) == (step + 2) * 2

  run(main())


def test_a_later_stage_draws_no_noise_again(tokenizer, store):
  """Two tasks in three batches of two: visits 0, 1, 2. The second stage goes on with 3, wherever it
  is entered.
  """
  stages = {
    name: exploring.Exploration(
      tokenizer,
      store,
      lambda attempt: 1.0,
      tasks=exploring.make_tasks(2),
      stage=name,
      earlier=earlier,
    )
    for name, earlier in (('grpo', ()), ('again', ('grpo',)), ('third', ('grpo', 'again')))
  }
  keys = {}
  for name, exploration in stages.items():
    run(exploration.batches(3))
    keys[name] = {request.key for request in exploration.engine.requests}
  assert {key[-1] for key in keys['grpo']} == {0, 1, 2}
  assert not keys['grpo'] & keys['again'] and not (keys['grpo'] | keys['again']) & keys['third']
  # What a stage has drawn itself, and what a later one has, moves nothing: a resumed stage goes on
  # with its visits.
  assert set(store.visits(['grpo']).values()) == {3} and set(
    store.visits(['grpo', 'again']).values()
  ) == {6}


def test_a_prompt_of_an_earlier_stage_under_another_taskset_draws_no_noise_again(tokenizer, store):
  make = functools.partial(exploring.Exploration, tokenizer, store, lambda attempt: 1.0)
  first = make(tasks=exploring.make_tasks(2))
  run(first.batches(1))
  second = make(tasks=exploring.make_tasks(2, 'other'), stage='again', earlier=('grpo',))
  run(second.batches(1))
  assert not {request.key for request in first.engine.requests} & {
    request.key for request in second.engine.requests
  }


def test_samples_are_issued_in_order_before_they_are_asked_for(tokenizer, store):
  async def main():
    exploration = exploring.Exploration(
      tokenizer, store, lambda attempt: 1.0, tasks=exploring.make_tasks(3)
    )
    exploration.engine.hold = lambda request: True
    async with exploration.explorer.running():
      exploration.explorer.advance(0, 0)
      while len(exploration.engine.requests) < 2:
        await asyncio.sleep(0.001)
      return exploration.tasks, store.entries(
        [uid(t, i) for t in exploration.tasks[:2] for i in range(2)]
      )

  tasks, entries = run(main())
  assert collections.Counter(entry.state for entry in entries.values()) == {'issued': 4}
  assert list(entries) == [uid(task, i) for task, i in itertools.product(tasks[:2], range(2))]


def test_a_group_that_runs_out_of_time_is_tried_again_and_then_given_up(tokenizer, store):
  """Task 0 hangs in its first try, task 1 in both: 0 comes with its second, 1 is dropped and task 2
  takes its place.
  """
  limits = TaskLimits(timeout_s=1.0, retries=1)
  exploration = exploring.Exploration(tokenizer, store, lambda attempt: 1.0, limits=limits)
  tasks, engine = exploration.tasks, exploration.engine

  def hold(request):
    tries = [r for r in engine.requests if r.uid == request.uid]
    return request.uid.startswith(f'grpo/{tasks[1].uid}') or (
      request.uid.startswith(f'grpo/{tasks[0].uid}') and len(tries) == 1
    )

  engine.hold = hold
  ((batch, counts),) = run(exploration.batches(1))
  assert uids(batch) == [uid(tasks[n], i) for n in (0, 2) for i in range(2)]
  assert counts['dropped/timeout'] == 2 and counts['dropped/groups'] == 1
  assert exploration.explorer.clock_decisions == 3
  asked = collections.Counter(request.uid.split('/')[1] for request in engine.requests)
  assert asked == {tasks[0].uid: 2, tasks[1].uid: 2, tasks[2].uid: 1}
  report = audit(store)
  assert report.ok and report.reasons == {'dropped(timeout)': 2} and report.live == ()


def test_tokens_of_a_group_that_runs_out_of_time_are_discarded(tokenizer, store):
  """Task 1 hangs in both tries after its first sample."""
  limits = TaskLimits(timeout_s=0.5, retries=1)
  exploration = exploring.Exploration(tokenizer, store, lambda attempt: 1.0, limits=limits)
  engine, tasks, returned = exploration.engine, exploration.tasks, collections.Counter()

  def hold(request):
    returned[id(request)] += 1
    return request.uid.startswith(f'grpo/{tasks[1].uid}') and returned[id(request)] > 1

  engine.hold = hold
  run(exploration.batches(1))
  tokens = exploration.explorer.take_tokens()
  assert tokens['trained'] == tokens['sampled'] and tokens['discarded'] > 0
  assert tokens['trained'] + tokens['discarded'] == engine.generated


def test_a_straggler_is_dropped_after_a_multiple_of_the_mean_time_without_another_try(
  tokenizer, store, monkeypatch
):
  """Batches 0 and 1 give the mean; then task 4 would take for ever."""
  monkeypatch.setattr('jaxrl_llm.master.exploring.runner.time', LOOP_CLOCK)
  limits = TaskLimits(timeout_s=None, straggler_factor=20.0)
  exploration = exploring.Exploration(tokenizer, store, lambda attempt: 1.0, limits=limits)
  tasks = exploration.tasks
  begun = {}

  def hold(request):
    """For ever, or for a while."""
    now = LOOP_CLOCK.monotonic()
    since = begun.setdefault(request.uid, now)
    return request.uid.startswith(f'grpo/{tasks[4].uid}') or now - since < 0.05

  exploration.engine.hold = hold
  *_, (batch, counts) = run(exploration.batches(3))
  assert uids(batch) == [uid(tasks[n], i) for n in (5, 6) for i in range(2)]
  assert counts['dropped/straggler'] == 2 and exploration.explorer.clock_decisions == 1
  assert audit(store).reasons == {'dropped(straggler)': 2}


def test_too_many_groups_out_of_time_end_the_run_and_say_so(tokenizer, store):
  limits = TaskLimits(timeout_s=0.05, retries=0)
  exploration = exploring.Exploration(
    tokenizer, store, lambda attempt: 1.0, limits=limits, max_dropped_groups=2
  )
  exploration.engine.hold = lambda request: True
  with pytest.raises(RunError, match=r'3 groups .* took too long \(timeout'):
    run(exploration.batches(1))


@pytest.mark.parametrize('fields', [{'timeout_s': 0.0}, {'retries': -1}, {'straggler_factor': 1.0}])
def test_limits_that_no_group_could_keep_are_refused(fields):
  with pytest.raises(UserError, match=r'^limits'):
    TaskLimits(**fields)


def test_idle_seconds_are_those_without_a_group_under_way(tokenizer, store, monkeypatch):
  now = 0.0
  monkeypatch.setattr('jaxrl_llm.core.waits.time.monotonic', lambda: now)
  clock = IdleClock()
  now = 2.0
  with clock.busy():
    now = 3.0
    with clock.busy():
      now = 5.0
    now = 6.0
    assert clock.take() == 2.0
  now = 10.0
  assert clock.take() == 4.0 and clock.take() == 0.0
