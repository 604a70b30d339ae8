"""Who explores which group: one explorer at a time, lost groups first, and a lost lease is worth
nothing.
"""

import asyncio
import dataclasses
import time

import numpy as np
import pytest
from clocks import simulated
from learning import sample

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.records.sample import Segment
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.explorers import leases
from jaxrl_llm.rollout.explorers.leases import Gone, Leases, LentGroup, Misbehaved, SenderEvicted
from jaxrl_llm.rollout.workflow import Rollout


def group(taskset='sums', samples=2):
  return LentGroup(order={'task': {'taskset': taskset}}, name='s', samples=samples)


async def lent(leases, *names):
  """A group for each name, offered and taken in this order."""
  groups = [group() for _ in names]
  for each in groups:
    await leases.offer(each)
  return [await leases.take(name) for name in names]


def long_ago(*groups):
  """They were lent long enough ago for their explorer to have heard of it."""
  for each in groups:
    each.lent -= 3600


async def waiting(leases, *names):
  """Explorers that find nothing yet, in this order."""
  tasks = [asyncio.create_task(leases.take(name)) for name in names]
  await settle()
  return tasks


async def settle():
  for _ in range(10):
    await asyncio.sleep(0)


def test_each_group_is_lent_once_in_the_order_of_the_offers():
  async def check():
    leases, groups = Leases(silent_s=60.0), [group() for _ in range(3)]
    for each in groups:
      await leases.offer(each)
    taken = [await leases.take(name) for name in ('a', 'b', 'a')]
    assert [id(each) for each in taken] == [id(each) for each in groups]
    assert [each.holder for each in taken] == ['a', 'b', 'a']
    assert len({each.lease for each in taken}) == 3
    assert all(
      leases.held(each.lease, each.holder) is each and leases.is_held(each.lease) for each in taken
    )
    assert leases.explorers == ('a', 'b') and leases.groups == tuple(taken)
    assert not leases.counts

  asyncio.run(check())


class Ending(LentGroup):
  """A group whose lease ends in another thread when the given field is read next."""

  field, end = None, None

  def __getattribute__(self, name):
    if name == object.__getattribute__(self, 'field'):
      self.field = None
      self.end()
    return super().__getattribute__(name)


@pytest.mark.parametrize('field', ['holder', 'errands'])
def test_a_lease_that_ends_while_another_thread_reads_its_group_is_gone(field):
  """Its explorer has done nothing wrong, and may not use the errands of the group's next lease."""

  async def check():
    leases = Leases(silent_s=60.0)
    await leases.offer(Ending(order={'task': {}}, name='s', samples=1))
    one = await leases.take('a')
    lease = one.lease
    assert leases.errands(lease, 'a') is one.errands
    one.field, one.end = field, lambda: leases.end(one)
    with pytest.raises(Gone):
      leases.errands(lease, 'a')
    assert one.field is None

  asyncio.run(check())


def test_an_explorer_holds_a_limited_number_of_groups(monkeypatch):
  async def check():
    limited = Leases(silent_s=60.0, groups=2)
    monkeypatch.setattr(leases, 'TAKE_S', 0.02)
    first, second, third = [group() for _ in range(3)]
    for each in (first, second, third):
      await limited.offer(each)
    assert [await limited.take('a'), await limited.take('a')] == [first, second]
    assert await limited.take('a') is None
    assert await limited.take('b') is third
    await limited.offer(fourth := group())
    limited.end(first)
    assert await limited.take('a') is fourth

  asyncio.run(check())


def test_who_finds_nothing_waits_and_then_leaves_empty_handed(monkeypatch):
  async def check():
    held = Leases(silent_s=60.0)
    monkeypatch.setattr(leases, 'TAKE_S', 0.02)
    assert await held.take('a') is None
    monkeypatch.setattr(leases, 'TAKE_S', 60)
    (one,), late = await waiting(held, 'a'), group()
    await held.offer(late)
    assert await one is late

  asyncio.run(check())


def test_a_group_does_not_go_to_one_that_left_while_it_waited():
  async def check():
    leases, wanted = Leases(silent_s=60.0), group()
    first, second = await waiting(leases, 'a', 'b')
    await leases.give_up('a', 'left')
    await leases.offer(wanted)
    assert await first is None
    assert await asyncio.wait_for(second, 5) is wanted and wanted.holder == 'b'

  asyncio.run(check())


def test_a_group_does_not_go_to_one_whose_message_was_broken_off():
  async def check():
    leases, wanted = Leases(silent_s=60.0), group()
    first, second = await waiting(leases, 'a', 'b')
    await leases.offer(wanted)
    first.cancel()
    assert await asyncio.wait_for(second, 5) is wanted
    assert first.cancelled()

  asyncio.run(check())


def test_groups_of_one_that_is_gone_go_out_again_in_order_before_those_that_nobody_has_begun():
  async def check():
    leases = Leases(silent_s=60.0)
    one, two, three = await lent(leases, 'a', 'b', 'a')
    fresh, old = group(), [one.lease, three.lease]
    await leases.offer(fresh)
    await leases.give_up('a', 'ended')
    assert leases.explorers == ('b',) and leases.counts == {'lost': 2}
    assert [each.holder for each in (one, two, three)] == [None, 'b', None]
    assert not any(leases.is_held(lease) for lease in old)
    again = [await leases.take('b') for _ in range(3)]
    assert [id(each) for each in again] == [id(one), id(three), id(fresh)]
    assert not {one.lease, three.lease} & {*old}
    assert (one.losses, two.losses, three.losses, fresh.losses) == (1, 0, 1, 0)

  asyncio.run(check())


def test_groups_that_are_lost_wake_as_many_as_wait():
  async def check():
    leases = Leases(silent_s=60.0)
    one, two = await lent(leases, 'a', 'a')
    others = await waiting(leases, 'b', 'c')
    await leases.give_up('a', 'ended')
    assert await asyncio.wait_for(asyncio.gather(*others), 5) == [one, two]

  asyncio.run(check())


def test_a_lost_lease_is_worth_nothing_and_what_it_asked_is_cancelled():
  async def check():
    leases = Leases(silent_s=60.0)
    one, two = await lent(leases, 'a', 'b')
    old = one.lease

    async def ask(group):
      with leases.called(group.lease, group.holder):
        await asyncio.sleep(3600)

    lost, kept = asyncio.create_task(ask(one)), asyncio.create_task(ask(two))
    await settle()
    await leases.give_up('a', 'ended')
    await settle()
    assert lost.cancelled() and not kept.done()
    assert not one.calls and two.calls == {kept}
    assert await leases.take('b') is one
    for use in (leases.held, lambda lease, name: leases.called(lease, name).__enter__()):
      with pytest.raises(Gone, match=f'lease {old[:8]} is no longer held'):
        use(old, 'a')
    assert leases.counts == {'lost': 1}
    kept.cancel()

  asyncio.run(check())


def test_ending_a_group_cancels_what_was_asked_for_it_but_not_the_task_that_ends_it():
  async def check():
    leases = Leases(silent_s=60.0)
    (one,) = await lent(leases, 'a')
    lease = one.lease

    async def ask():
      with leases.called(lease, 'a'):
        await asyncio.sleep(3600)

    async def end():
      with leases.called(lease, 'a') as group:
        leases.end(group)
        await asyncio.sleep(0)
        return 'went on'

    asked = asyncio.create_task(ask())
    await settle()
    assert await end() == 'went on' and asked.cancelled()
    assert (one.lease, one.holder) == (None, None)
    assert leases.groups == () and not leases.is_held(lease) and not leases.counts

  asyncio.run(check())


def test_a_group_that_ends_before_anybody_has_it_is_not_lent():
  async def check():
    leases, first, second = Leases(silent_s=60.0), group(), group()
    await leases.offer(first)
    await leases.offer(second)
    leases.end(first)
    assert await leases.take('a') is second

  asyncio.run(check())


def test_what_an_explorer_has_forgotten_goes_to_others_and_what_it_has_lost_it_is_told():
  async def check():
    leases = Leases(silent_s=60.0)
    kept, forgotten, other = await lent(leases, 'a', 'a', 'b')
    long_ago(kept, forgotten, other)
    (fresh,) = await lent(leases, 'a')
    held = kept.lease
    assert await leases.reconcile('a', [held, 'unknown', other.lease]) == ['unknown', other.lease]
    assert (kept.holder, forgotten.holder, other.holder, fresh.holder) == ('a', None, 'b', 'a')
    assert leases.counts == {'lost': 1}
    assert await leases.take('b') is forgotten

  asyncio.run(check())


def test_whoever_says_something_is_there_and_whoever_does_not_is_given_up(monkeypatch):
  async def check():
    leases, now = Leases(silent_s=10.0), 1000.0
    monkeypatch.setattr(time, 'monotonic', lambda: now)
    one, two, three = await lent(leases, 'a', 'b', 'c')
    now += 6
    leases.hear('b')
    assert await leases.reconcile('c', [three.lease]) == []
    now += 4
    await leases.give_up_silent()
    assert leases.explorers == ('a', 'b', 'c')
    now += 1
    await leases.give_up_silent()
    assert leases.explorers == ('b', 'c')
    assert (one.holder, two.holder, three.holder) == (None, 'b', 'c')

  asyncio.run(check())


def test_a_group_that_is_lost_too_often_fails_with_the_reason():
  async def check():
    leases = Leases(silent_s=60.0)
    (one,) = await lent(leases, 'a')
    for _ in range(4):
      await leases.give_up('a', 'ended')
      assert one.handed_in.empty()
      assert await leases.take('a') is one
    await leases.give_up('a', 'ended')
    error = one.handed_in.get_nowait()
    assert isinstance(error, RunError)
    assert 'taskset sums was lost 5 times, most recently because a ended;' in str(
      error
    ) and '\n' not in str(error)

  asyncio.run(check())


def test_leases_cannot_be_guessed_and_only_their_holder_can_use_them():
  async def check():
    leases = Leases(silent_s=60.0)
    one, two = await lent(leases, 'a', 'b')
    secrets = [one.lease, two.lease]
    for use in (leases.held, lambda lease, name: leases.called(lease, name).__enter__()):
      with pytest.raises(Misbehaved, match='used a lease of a'):
        use(one.lease, 'b')
    assert leases.held(one.lease, 'a') is one and not leases.counts
    await leases.give_up('a', 'ended')
    secrets.append((await leases.take('b')).lease)
    assert len({*secrets}) == 3 and all(len(bytes.fromhex(lease)) == 16 for lease in secrets)

  asyncio.run(check())


def test_one_that_is_evicted_is_remembered_and_others_get_its_groups():
  async def check():
    leases = Leases(silent_s=60.0)
    one, two = await lent(leases, 'a', 'b')
    (waits,) = await waiting(leases, 'a')
    leases.admit('a')
    await leases.evict('a', 'its samples have no tokens')
    with pytest.raises(SenderEvicted, match='a was evicted: its samples have no tokens'):
      leases.admit('a')
    leases.admit('b')
    assert leases.explorers == ('b',) and (one.holder, two.holder) == (None, 'b')
    assert await leases.take('b') is one and await waits is None
    assert leases.counts == {'evicted': 1, 'lost': 1}

  simulated(check())


def test_a_host_that_was_evicted_over_a_group_gets_it_again_only_when_nobody_else_can_have_it():
  async def check():
    leases = Leases(silent_s=60.0)
    (spoiled,) = await lent(leases, 'bad/1')
    leases.hear('good/1')
    await leases.evict('bad/1', 'it lies')
    (again,) = await waiting(leases, 'bad/2')
    assert not again.done() and leases.groups == (spoiled,)
    fresh = group()
    await leases.offer(fresh)
    assert await asyncio.wait_for(again, 5) is fresh
    assert await leases.take('good/1') is spoiled
    await leases.give_up('good/1', 'ended')
    assert await asyncio.wait_for(leases.take('bad/2'), 5) is spoiled

  asyncio.run(check())


def test_a_group_that_all_who_are_there_have_spoiled_goes_out_until_it_is_lost_too_often():
  async def check():
    leases, one = Leases(silent_s=60.0), group()
    await leases.offer(one)
    for number in range(5):
      leases.hear(f'host-{1 - number % 2}/idle')
      assert await asyncio.wait_for(leases.take(f'host-{number % 2}/{number}'), 5) is one
      await leases.evict(f'host-{number % 2}/{number}', 'it lies')
    assert 'was lost 5 times, most recently because host-0/4 was evicted: it lies;' in str(
      one.handed_in.get_nowait()
    )

  asyncio.run(check())


def test_a_group_that_is_lent_again_forgets_what_was_generated_for_the_lease_before():
  async def check():
    leases = Leases(silent_s=60.0)
    (one,) = await lent(leases, 'a')
    before = one.generated
    await leases.give_up('a', 'ended')
    assert (await leases.take('b')).generated is not before

  asyncio.run(check())


def test_each_sample_is_handed_in_once_and_only_what_was_asked_for():
  made = [sample(i, np.random.default_rng(0)) for i in (-1, 0, 1, 2)]
  wanted = LentGroup(order={}, name='s/t/0', samples=2)
  samples = [
    dataclasses.replace(
      each,
      task_id='t',
      group_id='s/t/0',
      uid=f's/t/0/{each.sample_index}',
      trajectory_id=f's/t/0/{each.sample_index}',
      segments=(
        Segment(start=0, end=len(each.tokens), version=Version(0, 0), engine='e', finish='stop'),
      ),
    )
    for each in made
  ]
  below, zero, one, above = samples
  assert wanted.hand_in(Rollout(one, 'one'))
  assert not wanted.hand_in(Rollout(one, 'again'))
  assert wanted.hand_in(Rollout(zero, 'zero'))
  for other in (below, above):
    with pytest.raises(ValueError, match=f'index {other.sample_index}, wanted 0 to 1'):
      wanted.hand_in(Rollout(other, ''))
  for change in ({'uid': 's/t/0/0'}, {'group_id': 'another'}):
    with pytest.raises(ValueError, match='wanted sample s/t/0/1 of group s/t/0'):
      wanted.hand_in(Rollout(dataclasses.replace(one, **change), ''))
  assert [wanted.handed_in.get_nowait() for _ in range(wanted.handed_in.qsize())] == [
    Rollout(one, 'one'),
    Rollout(zero, 'zero'),
  ]


@pytest.mark.parametrize('lease', ['99', '\r\nforged: line', '\x1b[2J', '\u2028' * 9, ''])
def test_a_lease_that_nobody_holds_is_told_on_one_line(lease):
  line = str(Gone(lease))
  assert line.isprintable() and line.startswith('lease ') and line.endswith(' is no longer held')
