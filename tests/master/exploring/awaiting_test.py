"""Delayed rewards: groups wait in the store for verdicts from the inbox, and then join a batch."""

import asyncio
import contextlib

import exploring
import pytest
from clocks import simulated

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.master.exploring import awaiting
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.inbox import LateVerdict, attach
from jaxrl_llm.replay.index import open_store
from jaxrl_llm.rewards.api import RewardsConfig, ScorerConfig
from jaxrl_llm.rewards.pool.pool import ScorerPool
from jaxrl_llm.rewards.scorers.delayed import delayed_scorer

BOUND = 1


class DelayedScorers(ScorerPool):
  """A pool with the delayed scorer `human`, and no other. Its groups wait for verdicts."""

  def __init__(self, **options):
    config = RewardsConfig(scorers=(ScorerConfig(name='human', kind='delayed', options=options),))
    super().__init__({'human': delayed_scorer(**options)}, config)


def exploration(tokenizer, store, **options):
  config = {name: options.pop(name) for name in ('batches', 'groups_per_batch') if name in options}
  return exploring.Exploration(
    tokenizer, store, lambda attempt: 0.0, bound=BOUND, scorers=DelayedScorers(**options), **config
  )


def waiting(store, count=None):
  return [entry.uid for entry in store.live() if entry.state == 'awaiting'][:count]


async def until(condition):
  """Returns once the condition holds. The caller's deadline bounds the wait."""
  while not condition():
    await asyncio.sleep(0.1)


def judge(store, uids, value=1.0, who='ann'):
  return attach(store.directory, [LateVerdict(uid=uid, value=value, who=who) for uid in uids])


def run(main):
  return simulated(main, deadline_s=30)


def test_groups_wait_without_place_or_capacity_and_join_when_their_rewards_are_complete(
  tokenizer, store
):
  """At bound 1, at most 4 groups would run ahead. With 6 groups that may wait, 6 are generated. The
  third and the fifth get their verdicts, and form the first batch.
  """
  reported = []

  async def main():
    of = exploration(tokenizer, store, max_groups=6)
    of.sampler.feedback = lambda *outcome: reported.append(outcome)
    async with of.explorer.running():
      of.explorer.advance(0, 0)
      collecting = asyncio.create_task(of.explorer.collect())
      await until(lambda: len(waiting(store)) == 12)
      await asyncio.sleep(5)
      assert len(waiting(store)) == 12 and not collecting.done()
      judged = [request.uid for request in of.engine.requests]
      chosen = [f'{judged[n]}/{i}' for n in (4, 2) for i in (1, 0)]
      for number, uid in enumerate(chosen):
        assert not collecting.done()
        judge(store, [uid], value=float(number))
        await asyncio.sleep(3)
      batch, counts = await collecting
      return judged, batch, counts, of

  judged, batch, counts, of = run(main())
  assert [member.sample.uid for member in batch] == [
    f'{judged[n]}/{i}' for n in (4, 2) for i in (0, 1)
  ]
  assert [member.reward.value for member in batch] == [1, 0, 3, 2]
  assert counts['awaiting/joined'] == 2 and of.explorer.clock_decisions == 2
  assert len(reported) == 2
  report = audit(store.directory)
  assert report.ok, report.problems
  assert report.feedback == 'verdicts 4 = used 4 + waiting 0 + unused 0 + lost 0'


def test_several_people_judge_a_sample_and_the_first_verdicts_count(tokenizer, store):
  """Two verdicts are needed. The mean of the first two is the reward; the third is unused."""

  async def main():
    of = exploration(tokenizer, store, max_groups=1, verdicts=2, groups_per_batch=1)
    async with of.explorer.running():
      of.explorer.advance(0, 0)
      collecting = asyncio.create_task(of.explorer.collect())
      await until(lambda: len(waiting(store)) == 2)
      uids = waiting(store)
      judge(store, uids, 1.0, 'ann')
      await asyncio.sleep(3)
      assert not collecting.done()
      judge(store, uids, 0.5, 'bob')
      judge(store, uids[:1], 0.0, 'cid')
      batch, _ = await collecting
    return batch

  batch = run(main())
  assert [member.reward.value for member in batch] == [0.75, 0.75]
  assert batch[0].scores[0].evidence == {'verdicts': [['ann', 1.0], ['bob', 0.5]]}
  assert audit(store.directory).feedback == ('verdicts 5 = used 4 + waiting 0 + unused 1 + lost 0')


def test_a_group_without_verdicts_in_time_is_dropped_and_counted_and_replaced(
  tokenizer, store, monkeypatch
):
  """The clock is set 25 hours ahead: the two groups that wait are dropped, and two others begin."""
  now = [1000.0]
  monkeypatch.setattr(awaiting.time, 'time', lambda: now[0])

  async def main():
    of = exploration(tokenizer, store, max_groups=2)
    of.explorer._delayed.awaiting._clock = lambda: now[0]
    async with of.explorer.running():
      of.explorer.advance(0, 0)
      collecting = asyncio.create_task(of.explorer.collect())
      await until(lambda: len(waiting(store)) == 4)
      first = waiting(store)
      judge(store, first[:1])
      now[0] += 25 * 3600
      (late,) = judge(store, first[1:2])
      assert late.refused == 'late' and 'which has passed' in late.line
      await until(lambda: len(waiting(store)) == 4 and not set(first) & set(waiting(store)))
      judge(store, waiting(store))
      batch, counts = await collecting
      return of, first, batch, counts

  of, first, batch, counts = run(main())
  assert not {member.sample.uid for member in batch} & set(first)
  assert counts['dropped/reward_too_late'] == 4 and counts['dropped/groups'] == 2
  assert of.explorer.clock_decisions == 2 + 2
  report = audit(store.directory)
  assert report.ok and report.reasons['dropped(reward too late)'] == 4
  assert report.feedback == 'verdicts 5 = used 4 + waiting 0 + unused 1 + lost 0'


def test_a_group_is_dropped_when_it_would_be_too_old_for_the_batch_that_takes_it(tokenizer, store):
  """Groups of version 0 may join batches up to max_age_versions = 2. At bound 1 the group that
  starts at step 2 may join batch 3, so those of version 0 are dropped then.
  """

  async def main():
    of = exploration(tokenizer, store, max_groups=6, max_age_versions=2)
    async with of.explorer.running():
      for step in range(2):
        of.explorer.advance(step, step)
        collecting = asyncio.create_task(of.explorer.collect())
        await until(lambda: len(waiting(store)) == 12)
        judge(store, waiting(store)[-4:])
        batch, counts = await collecting
        assert not counts.get('dropped/reward_too_late')
        uids = [member.sample.uid for member in batch]
        store.at(step).seal(uids)
        of.explorer.record(uids)
        of.explorer.complete()
      of.explorer.advance(2, 2)
      of.engine._version = exploring.Version(0, 2)
      await asyncio.sleep(5)
      versions = {store.entries([uid])[uid].version for uid in waiting(store)}
    return versions

  assert run(main()) == {2}
  report = audit(store.directory)
  assert report.ok and report.reasons['dropped(reward too late)'] > 0


def test_a_complete_group_does_not_join_a_batch_for_which_it_is_too_old(tokenizer, store):
  """At bound 1, four of six complete groups of version 0 join. Then the batches go on to 4, while
  groups of version 0 may join batches up to 2.
  """

  async def main():
    of = exploration(tokenizer, store, max_groups=6, max_age_versions=2)
    async with of.explorer.running():
      of.explorer.advance(0, 0)
      await until(lambda: len(waiting(store)) == 12)
      judge(store, waiting(store))
      await until(lambda: of.explorer._tally.counts['awaiting/joined'] == 4)
      of.engine._version = exploring.Version(0, 3)
      of.explorer.advance(3, 3)
      await asyncio.sleep(5)
      assert of.explorer._tally.counts['awaiting/joined'] == 4

  run(main())
  assert audit(store.directory).reasons['dropped(reward too late)'] == 4


def test_only_a_persistently_unreadable_inbox_ends_the_run(tokenizer, store, monkeypatch):
  given, failures = awaiting.inbox.given, []

  def fails(most):
    def failing(*args):
      if len(failures) < most:
        failures.append(1)
        raise RunError('inbox: database is locked')
      return given(*args)

    monkeypatch.setattr(awaiting.inbox, 'given', failing)

  async def main():
    of = exploration(tokenizer, store, max_groups=2)
    async with of.explorer.running():
      of.explorer.advance(0, 0)
      await until(lambda: len(waiting(store)) == 4)
      fails(3)
      judge(store, waiting(store))
      batch, _ = await of.explorer.collect()
      assert len(batch) == 4 and len(failures) == 3
      await until(lambda: len(waiting(store)) == 4)
      fails(1000)
      await of.explorer.collect()

  with pytest.raises(RunError, match='database is locked'):
    simulated(main(), deadline_s=300)
  assert len(failures) == 3 + 60


@contextlib.contextmanager
def reopened(directory, commit):
  """The store as a restarted run finds it, recovered to a commit."""
  again = open_store(directory, synchronous='normal')
  again.recover(commit)
  yield again
  again.close()


def test_groups_that_wait_survive_a_crash_before_the_first_commit_and_keep_their_verdicts(
  tokenizer, tmp_path
):
  """The run is lost at step 0, before any commit. The restarted run generates none of the waiting
  groups again, and trains on them with the verdict of before and that of after the crash.
  """
  store = exploring.new_store(tmp_path)

  async def lost():
    of = exploration(tokenizer, store, max_groups=3)
    context = of.explorer.running()
    await context.__aenter__()
    of.explorer.advance(0, 0)
    await until(lambda: len(waiting(store)) == 6)
    judge(store, waiting(store)[:1], 0.25)
    of.explorer._running.cancel()  # Nothing is written at the end of the run, as by SIGKILL.

  run(lost())
  before = waiting(store)
  store.close()
  judge_offline = attach(
    tmp_path, [LateVerdict(uid=uid, value=0.5, who='ann') for uid in before[1:4]]
  )
  assert [reply.refused for reply in judge_offline] == [None] * 3

  async def resumed(again):
    of = exploration(tokenizer, again, max_groups=3)
    async with of.explorer.running():
      of.explorer.advance(0, 0)
      batch, _ = await of.explorer.collect()
      uids = [member.sample.uid for member in batch]
      again.at(0).seal(uids)
      again.at(0).trained(uids)
    return batch, of

  with reopened(tmp_path, 0) as again:
    assert waiting(again) == before
    batch, of = run(resumed(again))
    assert {m.sample.uid: m.reward.value for m in batch} == dict(
      zip(before[:4], (0.25, 0.5, 0.5, 0.5))
    )
    assert not {request.uid for request in of.engine.requests} & {u[:-2] for u in before}
  report = audit(tmp_path)
  assert report.ok, report.problems
  assert report.feedback == 'verdicts 4 = used 4 + waiting 0 + unused 0 + lost 0'


def test_what_weights_after_the_commit_generated_is_lost_and_so_are_verdicts_on_it(
  tokenizer, tmp_path
):
  """The run commits at step 0, and is lost at step 1. Groups of version 1 are generated again under
  their old uids; the verdicts on the lost ones do not apply to the new ones.
  """
  store = exploring.new_store(tmp_path)

  async def lost():
    of = exploration(tokenizer, store, max_groups=3)
    context = of.explorer.running()
    await context.__aenter__()
    of.explorer.advance(0, 0)
    collecting = asyncio.create_task(of.explorer.collect())
    await until(lambda: len(waiting(store)) == 6)
    of.engine._version = exploring.Version(0, 1)
    judge(store, waiting(store)[:4])
    batch, _ = await collecting
    uids = [member.sample.uid for member in batch]
    store.at(0).seal(uids)
    of.explorer.record(uids)
    of.explorer.complete()
    of.explorer.advance(1, 1)
    await until(lambda: len(waiting(store)) == 6)
    newer = [e.uid for e in store.live() if e.version == 1]
    assert len(newer) == 4
    judge(store, newer, 0.125)
    of.explorer._running.cancel()
    return uids, newer

  trained, newer = run(lost())
  store.close()
  with reopened(tmp_path, 0) as again:
    # The samples of the undone batch were judged at version 0: they wait again.
    assert set(trained) <= set(waiting(again)) and not set(newer) & set(waiting(again))

    async def resumed():
      of = exploration(tokenizer, again, max_groups=5)
      async with of.explorer.running():
        of.explorer.advance(0, 0)
        batch, _ = await of.explorer.collect()
        await until(lambda: set(newer) <= set(waiting(again)))
        (late,) = attach(tmp_path, [LateVerdict(uid=newer[0], value=1.0, who='ann', attempt=1)])
        assert late.refused == 'unknown' and 'export again' in late.line
        await asyncio.sleep(3)
        assert set(newer) <= set(waiting(again))
      return batch

    batch = run(resumed())
    assert {member.sample.uid for member in batch} == set(trained)
  report = audit(tmp_path)
  assert report.ok, report.problems
  assert report.feedback == 'verdicts 8 = used 4 + waiting 0 + unused 0 + lost 4'


def test_a_commit_lists_the_waiting_groups_and_a_resumed_run_joins_them(tokenizer, tmp_path):
  store = exploring.new_store(tmp_path)

  async def first():
    of = exploration(tokenizer, store, max_groups=4)
    context = of.explorer.running()
    await context.__aenter__()
    of.explorer.advance(0, 0)
    collecting = asyncio.create_task(of.explorer.collect())
    await until(lambda: len(waiting(store)) == 8)
    judge(store, waiting(store)[:4])
    batch, _ = await collecting
    uids = [member.sample.uid for member in batch]
    store.at(0).seal(uids)
    of.explorer.record(uids)
    of.explorer.complete()
    of.explorer._running.cancel()
    return of.explorer.state(), waiting(store)

  state, left = run(first())
  store.close()

  async def second(again):
    of = exploration(tokenizer, again, max_groups=2)
    of.explorer.restore(state)
    async with of.explorer.running():
      of.explorer.advance(1, 1)
      judge(again, left, 0.75)
      batch, _ = await of.explorer.collect()
    return batch, of

  with reopened(tmp_path, 1) as again:
    batch, of = run(second(again))
    assert sorted(member.sample.uid for member in batch) == left
    assert not {request.uid for request in of.engine.requests} & {uid[:-2] for uid in left}


def test_tasks_that_the_delayed_scorer_does_not_judge_are_trained_on_at_once(tokenizer, store):
  scorers = exploring.FakeScorers(lambda attempt: 1.0)
  human = ScorerConfig(name='human', kind='delayed', tasksets=('other',))
  scorers.config = RewardsConfig(scorers=(human, ScorerConfig(name='judge')))
  scorers.delayed = {'human': delayed_scorer()}
  of = exploring.Exploration(tokenizer, store, lambda attempt: 0.0, bound=BOUND, scorers=scorers)
  ((batch, counts),) = run(of.batches(1))
  assert len(batch) == 4 and counts['awaiting/open'] == 0
