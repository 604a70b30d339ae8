"""Answers that explorers fetch in parts: what is kept when a server, a front or an explorer is
lost, and how many places at servers an explorer can keep.
"""

import asyncio
import collections
import contextlib
import math

import fleets
import pytest
from direct import direct_fleet, run
from fake_vllm import Fault
from fleets import A, B, until
from following import GREEDY, LONG, Greedy, check, recognised, until_sent
from serving import ask, request

from jaxrl_llm.core.net.client import Refused
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.explorers import fetching
from jaxrl_llm.rollout.explorers.errands import BadDelivery, Errands, RequestCourier
from jaxrl_llm.rollout.explorers.fetching import Fetcher
from jaxrl_llm.rollout.explorers.wire import Delivery
from jaxrl_llm.rollout.signed_answer import SignedPart
from jaxrl_llm.rollout.vllm import direct, stream, ticket_office

FAST = {'stream': 4, 'dispatch': 'uniform', 'max_restarts': 10**6}


@pytest.fixture(autouse=True)
def backend(monkeypatch):
  monkeypatch.setattr(fleets, 'Marked', Greedy)
  monkeypatch.setattr(stream, '_LOOK_S', 0.0)
  monkeypatch.setattr(fetching, '_EVERY_S', 0.0)


class Hand:
  """An explorer with one request, and its errands as the master has them."""

  def __init__(self, **limits):
    self.counts = collections.Counter()
    self.errands = Errands(self.counts, **limits)
    self.sent = asyncio.Queue()
    loop = asyncio.get_running_loop()
    self.courier = RequestCourier(self.errands, self.sent.put_nowait, loop)
    self.fetcher = Fetcher(None)
    self.begun = []
    self._works = []

  async def __aenter__(self):
    return self

  async def __aexit__(self, *_):
    await self.stop()
    await self.fetcher.close()

  async def stop(self):
    for work in self._works:
      work.cancel()
    await asyncio.gather(*self._works, return_exceptions=True)

  def work(self, coroutine):
    self._works.append(asyncio.create_task(coroutine))
    return self._works[-1]

  async def errand(self):
    return await self.sent.get()

  async def be_honest(self):
    """Runs all errands like an explorer."""
    while True:
      errand = await self.errand()
      self.begun.append(errand)
      self.work(self.fetcher.fetch(errand, [], self.errands.deliver))

  def asking(self, fleet, number=1, **fields):
    asked = request(
      number, **{'max_tokens': LONG, 'sampling': GREEDY, 'courier': self.courier, **fields}
    )
    return asked, asyncio.create_task(ask(fleet, asked))


def bodies(place, uid='r1/0'):
  return [body for body in place.server.generate_bodies if body.get('request_id') == uid]


@contextlib.asynccontextmanager
async def under_way(folder, count=2, stall_at=31, config=(), **limits):
  """(fake servers, fleet, hand, request, task of the answer): the first server has sampled
  `stall_at` tokens of an answer, and the explorer has delivered them.
  """
  config = {**FAST, **dict(config)}
  async with direct_fleet(folder, count, **config) as (made, fleet), Hand(**limits) as hand:
    made[0].faults.stall_at = stall_at
    hand.work(hand.be_honest())
    asked, asking = hand.asking(fleet)
    await until_sent(made[0], stall_at)
    await recognised(fleet, made[0])
    yield made, fleet, hand, asked, asking


def test_an_answer_in_parts_is_that_of_one_part(tmp_path):
  async def main():
    async with direct_fleet(tmp_path, **FAST) as ((place,), fleet), Hand() as hand:
      hand.work(hand.be_honest())
      asked, asking = hand.asking(fleet)
      (completion,) = await asking
      check(asked, completion)
      (body,) = bodies(place)
      assert body['stream'] and body['sampling_params']['stream_interval'] == 4
      assert hand.counts == {'direct_delivered': 1}
      parts = [part async for part in fetched(hand, hand.begun[0])]
      assert parts == []

  async def fetched(hand, errand):
    with pytest.raises(Refused, match='has been used'):
      async for part in hand.fetcher.received(errand):
        yield part

  run(main)


def test_parts_that_arrive_together_are_delivered_together(tmp_path, monkeypatch):
  monkeypatch.setattr(fetching, '_EVERY_S', 1000.0)

  async def main():
    async with direct_fleet(tmp_path, **FAST) as (_, fleet), Hand() as hand:
      asked, asking = hand.asking(fleet)
      errand, deliveries, parts = await hand.errand(), [], []

      async def deliver(delivery):
        deliveries.append(delivery)
        return await hand.errands.deliver(delivery)

      await hand.fetcher.fetch(errand, parts, deliver)
      check(asked, (await asking)[0])
      assert 1 <= len(deliveries) <= 2 < len(parts), 'the first one, and the rest at the end'
      assert [part for delivery in deliveries for part in delivery.parts] == parts
      begun = SignedPart.decode(parts[0][1])
      assert not begun.is_waiting and not len(begun.tokens), 'the server has begun to answer'

  run(main)


@pytest.mark.parametrize('fault', ['die', 'core'])
def test_an_answer_goes_on_with_a_new_ticket_after_what_has_arrived(tmp_path, fault):
  async def main():
    async with under_way(tmp_path) as (made, fleet, hand, asked, asking):
      first, second = made
      await (first.server.die() if fault == 'die' else first.server.kill_core())
      (completion,) = await asking
      first.faults.stall_at = None
      check(asked, completion)
      begun, end = completion.segments
      assert (begun.end, begun.engine, begun.finish, begun.version) == (29, 'vllm-0', 'lost', A)
      assert (end.end, end.engine, end.finish) == (LONG, 'vllm-1', 'length')
      assert fleet.counts['kept_tokens'] == 29 and fleet.counts['lost_tokens'] == 0
      (body,) = bodies(second)
      assert body['token_ids'] == [*asked.prompt, *completion.tokens[:29].tolist()]
      assert len(hand.begun) == 2 and len({errand['nonce'] for errand in hand.begun}) == 2
      assert hand.counts == {'direct_delivered': 1}

  run(main)


def test_an_answer_of_a_server_that_hangs_goes_on_elsewhere(tmp_path, monkeypatch):
  """The front is well, and signs that it still waits."""
  monkeypatch.setattr(direct, 'BEAT_S', 0.05)
  monkeypatch.setattr(ticket_office, '_LEAST_S', 0.5)

  async def main():
    config = {'latency_s': 3.0, 'min_tokens_per_s': 10_000.0}
    async with under_way(tmp_path, config=config) as (made, fleet, hand, asked, asking):
      (completion,) = await asking
      check(asked, completion)
      assert [segment.end for segment in completion.segments] == [29, LONG]
      assert fleet.counts['kept_tokens'] == 29 and hand.counts['direct_expired'] == 0
      await until(lambda: made[0].server._core.running == 0)  # The ticket was withdrawn.

  run(main)


def test_a_front_that_waits_for_its_server_does_not_show_which_process_will_answer(
  tmp_path, monkeypatch
):
  """A server process that is replaced before it answers had other weights than the one before."""
  monkeypatch.setattr(direct, 'BEAT_S', 0.02)

  async def main():
    async with direct_fleet(tmp_path, **FAST) as ((place,), fleet), Hand() as hand:
      place.faults.fault, place.faults.times = Fault.HANG, 1
      hand.work(hand.be_honest())
      looks = place.server.requests['/weight_info']
      _, asking = hand.asking(fleet)
      await until(lambda: hand.begun)
      parts = hand.errands._open[hand.begun[0]['nonce']].errand.parts
      await until(lambda: parts.count >= 5)
      assert place.server.requests['/weight_info'] == looks
      assert all(part.is_waiting for part in parts._parts) and parts._begun == math.inf
      asking.cancel()
      await asyncio.gather(asking, return_exceptions=True)

  run(main)


def test_nothing_is_kept_of_a_server_that_breaks_the_protocol(tmp_path):
  async def main():
    async with under_way(tmp_path) as (made, fleet, hand, asked, asking):
      made[0].faults.spoil = lambda event: event[:-10] + b'\n\n'
      made[0].faults.stall_at = None
      (completion,) = await asking
      check(asked, completion)
      assert [segment.engine for segment in completion.segments] == ['vllm-1']
      assert fleet.counts['continued'] == 0 and fleet.counts['retries'] == 1
      assert len(hand.begun) == 2 and hand.counts == {'direct_delivered': 1}
      made[0].faults.spoil = None

  run(main)


def test_an_answer_that_is_too_long_is_malformed(tmp_path, monkeypatch):
  monkeypatch.setattr(direct, '_MAX_ANSWER_BYTES', 1000)

  async def main():
    async with direct_fleet(tmp_path, **FAST) as (_, fleet), Hand() as hand:
      _, asking = hand.asking(fleet)
      parts = [part async for _, part in hand.fetcher.received(await hand.errand())]
      last = SignedPart.decode(parts[-1])
      assert last.finish == direct.MALFORMED and last.broken == 'more than 1000 bytes'
      asking.cancel()
      await asyncio.gather(asking, return_exceptions=True)

  run(main)


def test_the_rest_of_an_answer_has_the_seed_that_it_has_without_couriers(tmp_path):
  """Also with tokens of earlier requests, as those of partial rollouts have."""
  found = []

  async def main():
    for is_direct in (True, False):
      (folder := tmp_path / str(is_direct)).mkdir()
      async with direct_fleet(folder, 2, **FAST) as (made, fleet), Hand() as hand:
        made[0].faults.stall_at = 31
        hand.work(hand.be_honest())
        courier = hand.courier if is_direct else None
        _, asking = hand.asking(fleet, sampling=Sampling(), begun=3, courier=courier)
        await until_sent(made[0], 31)
        await recognised(fleet, made[0])
        await made[0].server.die()
        (completion,) = await asking
        found.append((bodies(made[1]), completion.tokens.tolist(), completion.segments))

  run(main)
  assert found[0] == found[1]


def test_only_what_was_delivered_before_an_update_is_kept(tmp_path):
  async def main():
    async with under_way(tmp_path, stall_at=20) as (made, fleet, _, asked, asking):
      await fleet.load(fleets.weights(B))
      made[0].faults.stall_at = 40
      await until_sent(made[0], 40)
      await asyncio.sleep(0.05)
      await made[0].server.die()
      (completion,) = await asking
      check(asked, completion)
      begun, end = completion.segments
      assert (begun.end, begun.version, begun.finish) == (17, A, 'lost') and end.version == B
      assert fleet.counts['kept_tokens'] == 17 and fleet.counts['lost_tokens'] == 20

  run(main)


def test_nothing_is_kept_of_a_process_that_nobody_published_to(tmp_path):
  async def main():
    async with direct_fleet(tmp_path, 2, **FAST) as (made, fleet), Hand() as hand:
      await made[0].restart()
      made[0].faults.stall_at = 20
      hand.work(hand.be_honest())
      asked, asking = hand.asking(fleet)
      await until_sent(made[0], 20)
      recognition = fleet.replicas[0].client._recognition
      await until(lambda: made[0].server.requests['/weight_info'] and recognition.looking is None)
      await asyncio.sleep(0.05)
      await made[0].server.die()
      (completion,) = await asking
      check(asked, completion)
      assert [segment.engine for segment in completion.segments] == ['vllm-1']
      assert fleet.counts['kept_tokens'] == 0 and fleet.counts['lost_tokens'] == 17

  run(main)


@pytest.mark.parametrize('how', ['lost', 'silent', 'forging'])
def test_an_explorer_cannot_have_an_answer_sampled_again(tmp_path, how):
  """Else it could choose among the ends of an answer, of which it has seen one."""

  async def main():
    limits = {'ticket_s': 0.3} if how == 'silent' else {}
    async with under_way(tmp_path, **limits) as (made, fleet, hand, asked, asking):
      await hand.stop()
      nonce = hand.begun[0]['nonce']
      if how == 'lost':
        hand.errands.close(hand.courier)
      elif how == 'forging':
        count = hand.errands._open[nonce].errand.parts.count
        assert count > 1
        with pytest.raises(BadDelivery, match='forged'):
          await hand.errands.deliver(Delivery(nonce, count, ((bytes(32), b'part'),)))
      await until(lambda: hand.counts['direct_undelivered'])
      made[0].faults.stall_at = None
      (completion,) = await asking
      check(asked, completion)
      assert [segment.engine for segment in completion.segments] == ['vllm-0']
      assert len(bodies(made[0])) == 1 and not bodies(made[1]), 'it is the same answer'
      assert fleet.counts['lost_tokens'] == fleet.counts['kept_tokens'] == 0
      assert fleet.counts['restarts'] == fleet.replicas[0].failures == 0
      assert hand.counts['direct_expired'] == (how == 'silent')
      assert not await hand.errands.deliver(Delivery(nonce, parts=((bytes(32), b''),)))
      assert hand.counts['direct_late'] == 1

  run(main)


def test_a_front_that_is_lost_with_its_server_costs_what_was_not_delivered(tmp_path):
  async def main():
    async with under_way(tmp_path) as (made, fleet, _, asked, asking):
      await made[0].front.close()
      await made[0].server.die()
      (completion,) = await asking
      check(asked, completion)
      assert [segment.end for segment in completion.segments] == [29, LONG]
      assert fleet.counts['kept_tokens'] == 29

  run(main)


def test_a_server_that_has_left_costs_what_was_not_delivered(tmp_path):
  """Its host may have vanished, so that nobody hears of its end."""

  async def main():
    async with under_way(tmp_path) as (_, fleet, _, asked, asking):
      await fleet.replicas[0].client.close()
      (completion,) = await asking
      check(asked, completion)
      assert [segment.end for segment in completion.segments] == [29, LONG]

  run(main)


def test_a_ticket_that_is_not_used_in_time_is_good_no_more(tmp_path):
  """An explorer cannot hoard tickets, to use them all at once."""

  async def main():
    limits = {'max_in_flight': 1, **FAST}
    async with direct_fleet(tmp_path, **limits) as ((place,), fleet), Hand(ticket_s=0.2) as hand:
      asked, asking = hand.asking(fleet)
      errand = await hand.errand()
      (completion,) = await asking  # The fleet has requested it itself.
      check(asked, completion)
      assert hand.counts == {'direct_expired': 1, 'direct_undelivered': 1}
      with pytest.raises(Refused, match='has been used'):
        _ = [part async for part in hand.fetcher.received(errand)]
      assert len(bodies(place)) == 1
      assert fleet.replicas[0].in_flight == 0

  run(main)


def test_an_explorer_keeps_only_as_many_places_as_it_may_have_tickets(tmp_path):
  async def main():
    limits = {'max_in_flight': 3, **FAST}
    async with direct_fleet(tmp_path, **limits) as ((place,), fleet), Hand(tickets=2) as hand:
      _, stuck = hand.asking(fleet, samples=8)
      for _ in range(2):
        await hand.errand()
      others = [request(number, max_tokens=LONG, sampling=GREEDY) for number in (2, 3)]
      for asked in others:
        check(asked, (await ask(fleet, asked))[0])
      assert fleet.replicas[0].in_flight == 2 and hand.sent.empty()
      stuck.cancel()
      await asyncio.gather(stuck, return_exceptions=True)
      assert fleet.replicas[0].in_flight == 0
      assert not bodies(place)

  run(main)


def test_all_samples_of_a_request_get_their_tickets_in_turn(tmp_path):
  async def main():
    async with direct_fleet(tmp_path, **FAST) as (_, fleet), Hand(tickets=2) as hand:
      hand.work(hand.be_honest())
      asked, asking = hand.asking(fleet, samples=7)
      for completion in await asking:
        check(asked, completion)
      assert hand.counts == {'direct_delivered': 7}

  run(main)


def test_an_answer_that_nobody_wants_any_more_ends_at_the_server(tmp_path):
  async def main():
    async with under_way(tmp_path, count=1) as ((place,), _, hand, _, asking):
      assert place.server._core.running == 1
      asking.cancel()
      await asyncio.gather(asking, return_exceptions=True)
      await until(lambda: place.server._core.running == 0)
      with pytest.raises(Refused, match='has been used'):
        _ = [part async for part in hand.fetcher.received(hand.begun[0])]

  run(main)


def test_a_server_that_is_slow_is_not_an_explorer_that_is_stuck(tmp_path, monkeypatch):
  """The front signs that the server is at work."""
  monkeypatch.setattr(direct, 'BEAT_S', 0.02)

  async def main():
    async with under_way(tmp_path) as (made, _, hand, asked, asking):
      parts = hand.errands._open[hand.begun[0]['nonce']].errand.parts
      count, age_s = parts.count, parts.age_s
      await until(lambda: parts.count >= count + 3)
      assert parts.age_s >= age_s + 2 * 0.02 and not hand.counts
      made[0].faults.stall_at = None
      check(asked, (await asking)[0])
      assert hand.counts == {'direct_delivered': 1}

  run(main)


def test_old_parts_do_not_keep_a_place(tmp_path):
  """An explorer delivers one part after the other, each in time after the one before."""

  async def main():
    async with direct_fleet(tmp_path, **FAST) as ((place,), fleet), Hand(ticket_s=0.5) as hand:
      place.faults.stall_at = 90
      asked, asking = hand.asking(fleet)
      receiving = hand.fetcher.received(errand := await hand.errand())
      number = 0
      async for part in receiving:
        if not await hand.errands.deliver(Delivery(errand['nonce'], number, (part,))):
          break
        number += 1
        await asyncio.sleep(0.1)
      await receiving.aclose()
      assert number < 1 + 22 and hand.counts['direct_expired'] == 1
      place.faults.stall_at = None
      check(asked, (await asking)[0])
      assert len(bodies(place)) == 1

  run(main)
