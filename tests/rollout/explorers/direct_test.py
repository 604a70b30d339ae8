"""Explorers that fetch completions from servers themselves are trusted no more than others."""

import asyncio
import collections
import dataclasses
import hashlib
import json
import secrets
import threading

import aiohttp
import direct
import numpy as np
import pytest
import serving
from direct import SERVERS, TASK, Rogue, direct_crew, direct_fleet, rogue_crew
from fleets import GENERATE, MODEL, places, until

from jaxrl_llm.core import background
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.client import Lost
from jaxrl_llm.core.net.tickets import TicketKeys
from jaxrl_llm.core.records.sample import Finish
from jaxrl_llm.rollout.api import Completion, Errand, Forged, Undelivered
from jaxrl_llm.rollout.explorers import generated, wire
from jaxrl_llm.rollout.explorers.errands import BadDelivery, Errands, RequestCourier
from jaxrl_llm.rollout.explorers.explorer import Evicted, Rejected
from jaxrl_llm.rollout.explorers.leases import Leases
from jaxrl_llm.rollout.explorers.wire import Delivery
from jaxrl_llm.rollout.signed_answer import SignedPart
from jaxrl_llm.rollout.vllm.direct import FRONT_PATH, SIGNED_PATH
from jaxrl_llm.rollout.vllm.replica import ReplicaState
from jaxrl_llm.rollout.vllm.ticket_office import SignedParts


async def group_of(setting):
  """The samples of the group, by uid."""
  return await setting.samples(setting.crew, TASK)


def test_the_samples_are_those_that_the_master_fetches(tmp_path):
  found = []

  async def main():
    for number, is_direct in enumerate((False, True)):
      folder = tmp_path / str(number)
      folder.mkdir()
      async with direct_crew(folder, direct=is_direct) as (setting, (place,), fleet):
        found.append(await group_of(setting))
        counts = setting.crew.counts
        assert counts == ({'direct_delivered': 3} if is_direct else {})
        assert len(place.asked) == 3 and fleet.counts['completions'] == 3
        metrics = setting.crew.take_metrics()
        assert ('perf/direct_delivered' in metrics) == is_direct

  direct.run(main)
  assert found[0] == found[1] and len(found[0]) == 3


@pytest.fixture
def threads_of(monkeypatch):
  """Function of (class or module, name of its function), … that returns a mapping from each name to
  the names of the threads in which the function is called from then on.
  """

  def recorded(call, names):
    def function(*args):
      names.add(threading.current_thread().name.partition('_')[0])
      return call(*args)

    return function

  def threads_of(*functions):
    threads = {name: set() for _, name in functions}
    for owner, name in functions:
      monkeypatch.setattr(owner, name, recorded(getattr(owner, name), threads[name]))
    return threads

  return threads_of


def test_what_explorers_send_is_checked_outside_the_crews_thread(tmp_path, threads_of):
  async def main():
    async with direct_crew(tmp_path) as (setting, _, _):
      assert len(await group_of(setting)) == 3

  threads = threads_of((SignedParts, 'add'), (generated, '_entries'))
  direct.run(main)
  assert threads == {'add': {'messages'}, '_entries': {'explorer-texts'}}


def test_leases_change_only_in_the_crews_thread(tmp_path, threads_of):
  """Deliveries are checked in another thread."""

  async def main():
    async with rogue_crew(tmp_path) as (setting, _, _):
      making = asyncio.create_task(group_of(setting))
      rogue = await Rogue(setting).begin()
      late = Delivery('n')._asdict()
      with pytest.raises(Rejected):
        await rogue.link.call(wire.DELIVER, lease='of-nobody', **late)
      with pytest.raises(Evicted):
        await rogue.deliver(Delivery('unknown'))
      assert setting.crew.counts == {'late': 1, 'direct_unknown': 1, 'evicted': 1, 'lost': 1}
      await rogue.close()
      setting.come('honest')
      assert len(await making) == 3

  threads = threads_of((Leases, 'note_late'), (Leases, 'give_up'))
  direct.run(main)
  here = threading.current_thread().name
  assert threads == {'note_late': {here}, 'give_up': {here}}


def altered(delivery, **fields):
  """The delivery with other contents of its part."""
  ((signature, part),) = delivery.parts
  part = dataclasses.replace(SignedPart.decode(part), **fields).encode()
  return delivery._replace(parts=((signature, part),))


def part_of(delivery):
  ((_, part),) = delivery.parts
  return SignedPart.decode(part)


def resigned(delivery, signature):
  ((_, part),) = delivery.parts
  return delivery._replace(parts=((signature, part),))


def other_tokens(delivery, *_):
  return altered(delivery, tokens=part_of(delivery).tokens[::-1].copy())


def other_logprobs(delivery, *_):
  logprobs = part_of(delivery).logprobs
  return altered(delivery, logprobs=np.nextafter(logprobs, np.float32(0)))  # The smallest change.


def other_version(delivery, *_):
  ((_, start, end),) = part_of(delivery).spans
  return altered(delivery, spans=[('0.7', start, end)])


def other_finish(delivery, *_):
  return altered(delivery, finish='stop')


def broken_off(delivery, *_):
  """A server would be repaired that is well."""
  return altered(delivery, finish=None, broken='the server has died')


def unsigned(delivery, *_):
  return resigned(delivery, b'')


def cut_signature(delivery, *_):
  return resigned(delivery, delivery.parts[0][0][:-1])


def of_another_errand(delivery, other):
  return delivery._replace(nonce=other['nonce'])


def of_another_job(delivery, errand):
  """Signed with the token of another job, for a ticket with the same nonce."""
  keys = TicketKeys('token-of-another-job-0123456789')
  ticket = keys.issue(secrets.token_hex(16), errand['body'])._replace(nonce=delivery.nonce)
  return resigned(delivery, keys.chain(ticket).sign(delivery.parts[0][1]))


def of_nobody(delivery, *_):
  return delivery._replace(nonce=secrets.token_hex(16))


def no_answer(delivery, *_):
  return delivery._replace(parts=((bytes(32), b''),))


def not_the_next(delivery, *_):
  return delivery._replace(first=1)


FORGERIES = {
  other_tokens: 'forged',
  other_logprobs: 'forged',
  other_version: 'forged',
  other_finish: 'forged',
  cut_signature: 'forged',
  of_another_errand: 'forged',
  of_another_job: 'forged',
  no_answer: 'forged',
  broken_off: 'forged',
  not_the_next: 'forged',
  unsigned: 'unsigned',
  of_nobody: 'unknown',
}


@pytest.mark.parametrize('forge', FORGERIES, ids=lambda forge: forge.__name__)
def test_a_forged_completion_evicts_its_explorer_and_the_group_is_made_by_another(tmp_path, forge):
  async def main():
    async with direct_crew(tmp_path) as (setting, _, fleet):
      wanted = await group_of(setting)
      await setting.dismiss('honest')
      setting.crew.counts.clear()
      making = asyncio.create_task(group_of(setting))
      rogue = await Rogue(setting).begin(samples=2)
      errand, other = await rogue.errands.get(), await rogue.errands.get()
      delivery = forge(await rogue.fetched(errand), other)
      with pytest.raises(Evicted) as caught:
        await rogue.deliver(delivery)
      line = str(caught.value)
      assert 'rogue' in line and delivery.nonce in line and '\n' not in line
      with pytest.raises(Evicted):
        await rogue.deliver(delivery)
      setting.come('honest')
      assert await making == wanted
      counts = setting.crew.counts
      assert counts[f'direct_{FORGERIES[forge]}'] == counts['evicted'] == counts['lost'] == 1
      assert setting.crew.take_metrics()['perf/direct_refused'] == 1
      assert fleet.counts['restarts'] == fleet.replicas[0].failures == 0
      await rogue.close()

  direct.run(main)


def test_a_completion_that_comes_again_or_too_late_is_ignored(tmp_path):
  async def main():
    async with rogue_crew(tmp_path) as (setting, _, fleet):
      making = asyncio.create_task(group_of(setting))
      rogue = await Rogue(setting).begin(samples=2)
      first, second = [await rogue.fetched(await rogue.errands.get()) for _ in range(2)]
      counts = setting.crew.counts
      await rogue.deliver(first)
      await rogue.deliver(first)
      assert counts == {'direct_delivered': 1, 'direct_repeated': 1}
      await rogue.stop_asking()
      await until(lambda: not fleet.replicas[0].in_flight)
      await rogue.deliver(second)
      assert counts['direct_late'] == 1 and counts['evicted'] == 0
      assert fleet.counts['completions'] == 1
      await rogue.close()
      setting.come('honest')
      assert len(await making) == 3

  direct.run(main)


class Parts:
  """Parts of an answer that are added with the given function."""

  count, age_s = 0, 0.0

  def __init__(self, add):
    self.add = add


def errand_of(add, deadline_s=1000.0, nonce='n'):
  fields = dict.fromkeys(('address', 'path', 'authorization'), '')
  return Errand(nonce=nonce, body=b'', deadline_s=deadline_s, parts=Parts(add), **fields)


def courier_of(errands):
  return RequestCourier(errands, lambda errand: None, asyncio.get_running_loop())


def test_the_engine_waits_for_no_delivery_beyond_its_deadline():
  async def add(*_):
    raise AssertionError('it is too late')

  async def main():
    counts = collections.Counter()
    errands = Errands(counts)
    errand = errand_of(add, deadline_s=0.01)
    with pytest.raises(Undelivered, match='has not delivered it within'):
      await courier_of(errands).fetch(errand)
    assert not await errands.deliver(Delivery('n', parts=((b's', b'a'),)))
    assert counts == {'direct_undelivered': 1, 'direct_late': 1}

  direct.run(main)


def test_an_errand_that_expires_during_a_check_ends_after_it():
  """The engine then collects the other parts in a third thread."""

  async def main():
    reading, goes_on = asyncio.Event(), asyncio.Event()

    async def add(*_):
      reading.set()
      await goes_on.wait()

    counts = collections.Counter()
    errands = Errands(counts)
    fetching = asyncio.create_task(courier_of(errands).fetch(errand_of(add, deadline_s=0.1)))
    await asyncio.sleep(0)
    handler = asyncio.create_task(errands.deliver(Delivery('n', parts=((b's', b'a'),))))
    await reading.wait()
    await until(lambda: counts['direct_undelivered'])
    await asyncio.wait([fetching], timeout=0.1)
    assert not fetching.done()
    goes_on.set()
    with pytest.raises(Undelivered, match='has not delivered it within'):
      await fetching
    assert not await handler

  direct.run(main)


@pytest.mark.parametrize('is_forged', [False, True])
def test_a_delivery_that_comes_again_while_it_is_checked_is_ignored(is_forged):
  """The explorer's connection has broken. If the delivery was forged, the engine fetches the
  completion itself at once.
  """

  async def main():
    counts, reading, goes_on = collections.Counter(), asyncio.Event(), asyncio.Event()
    empty = {'tokens': np.zeros(0, np.int32), 'logprobs': np.zeros(0, np.float32)}
    completion = Completion(**empty, finish=Finish.LENGTH, segments=())
    errands = Errands(counts)

    async def add(*_):
      reading.set()
      await goes_on.wait()
      if is_forged:
        raise Forged('not signed')
      return completion

    fetching = asyncio.create_task(courier_of(errands).fetch(errand_of(add)))
    await asyncio.sleep(0)
    delivery = Delivery('n', parts=((b's', b'a'),))
    handler = asyncio.create_task(errands.deliver(delivery))
    await reading.wait()
    again = asyncio.create_task(errands.deliver(delivery))
    await asyncio.sleep(0)
    goes_on.set()
    assert not await again
    await asyncio.wait([handler])
    if is_forged:
      assert isinstance(handler.exception(), BadDelivery)
      with pytest.raises(Undelivered, match='forged'):
        await fetching
      assert counts == {'direct_late': 1, 'direct_forged': 1, 'direct_undelivered': 1}
    else:
      assert await fetching is completion
      assert counts == {'direct_repeated': 1, 'direct_delivered': 1}

  direct.run(main)


@pytest.mark.parametrize('is_sent', [True, False])
def test_an_errand_ends_when_its_explorer_no_longer_asks(is_sent):
  """The engine may go on with the request, as for partial rollouts, and must not wait until the
  ticket expires. The errand has been sent to the explorer, or is about to begin in another thread.
  """

  async def endless():
    await asyncio.Event().wait()
    yield

  async def add(*_):
    raise AssertionError('nothing is delivered')

  async def main():
    goes_on, sent = threading.Event(), []
    messages = background.messages()
    courier = RequestCourier(Errands(collections.Counter()), sent.append, messages.loop)
    if not is_sent:
      messages.call_soon(goes_on.wait, 60)
    fetching = asyncio.create_task(courier.fetch(errand_of(add)))
    asking = asyncio.create_task(anext(courier.rows(endless())))
    await asyncio.sleep(0)
    await until(lambda: sent or not is_sent)
    asking.cancel()
    await asyncio.wait([asking])
    goes_on.set()
    async with asyncio.timeout(10):
      with pytest.raises(Undelivered, match='no longer asks for it'):
        await fetching
      with pytest.raises(Undelivered, match='no longer asks for it'):
        async with courier.place():
          pass
    assert len(sent) == is_sent

  direct.run(main)


def test_the_engine_fetches_what_an_explorer_cannot_and_blames_no_server(tmp_path):
  async def main():
    async with rogue_crew(tmp_path) as (setting, (place,), fleet):
      making = asyncio.create_task(group_of(setting))
      rogue = await Rogue(setting).begin()
      errand = await rogue.errands.get()
      await rogue.deliver(Delivery(errand['nonce'], problem='no route to host'))
      await rogue._asking
      assert setting.crew.counts['direct_undelivered'] == 1 and len(place.asked) == 1
      assert fleet.replicas[0].failures == 0 and fleet.counts['restarts'] == 0
      with pytest.raises(Lost, match='is no longer held'):
        await rogue.link.call('/deliver', lease='another', **Delivery('a')._asdict())
      await rogue.close()
      setting.come('honest')
      assert len(await making) == 3

  direct.run(main)


def test_the_engine_fetches_what_a_lost_explorer_had_not_delivered(tmp_path):
  async def main():
    async with rogue_crew(tmp_path) as (setting, _, _):
      making = asyncio.create_task(group_of(setting))
      rogue = await Rogue(setting).begin()
      errand = await rogue.errands.get()
      delivery = await rogue.fetched(errand)
      await rogue.close()
      setting.come('honest')
      assert len(await making) == 3
      late = setting.link('rogue')
      with pytest.raises(Lost, match='is no longer held'):
        await late.call('/deliver', lease=rogue.order['lease'], **delivery._asdict())
      await late.close()

  direct.run(main)


def test_tokens_of_weights_that_nobody_published_are_not_accepted(tmp_path):
  """The front signs what a server says that has been started again; its label is not the run's."""

  async def main():
    async with direct_crew(tmp_path) as (setting, (place,), fleet):
      await place.restart()
      samples = await group_of(setting)
      assert len(samples) == 3 and fleet.counts['completions'] == 3
      assert fleet.replicas[0].life > 0, 'it was given the weights again'
      assert setting.crew.counts['evicted'] == 0

  direct.run(main)


# The front.


async def post(errand, **fields):
  """(status, text)"""
  errand = {**errand, **fields}
  url = errand['address'] + errand.get('path', SIGNED_PATH)
  headers = {'Authorization': errand['authorization']}
  async with (
    aiohttp.ClientSession(headers=headers) as session,
    session.post(url, data=errand['body']) as response,
  ):
    return response.status, (await response.read()).decode(errors='replace')


def test_a_ticket_is_good_for_its_request_once_and_for_nothing_else(tmp_path):
  async def main():
    async with rogue_crew(tmp_path) as (setting, (place,), _):
      making = asyncio.create_task(group_of(setting))
      rogue = await Rogue(setting).begin()
      errand = await rogue.errands.get()
      body = json.loads(errand['body'])
      body['sampling_params']['temperature'] = 0.5
      assert 'another body' in await said(post(errand, body=json.dumps(body).encode()))
      for path in (GENERATE, '/pause', FRONT_PATH):
        method = {'path': path}
        assert (await post(errand, **method))[0] in (403, 405), path
      other = await direct_front(tmp_path, place)
      assert 'another front' in await said(post(errand, address=other.address))
      forged = errand['authorization'][:-1] + ('0' if errand['authorization'][-1] != '0' else '1')
      assert (await post(errand, authorization=forged))[0] == 401
      assert 'wanted a ticket' in await said(post(errand, authorization=f'Bearer {SERVERS}'))
      assert place.asked == [], 'none of them reached the server'
      assert (await post(errand))[0] == 200 and len(place.asked) == 1
      assert 'has been used' in await said(post(errand))
      assert len(place.asked) == 1
      await rogue.close()
      setting.come('honest')
      await making

  async def said(answer):
    status, text = await answer
    assert status == 403
    return text

  async def direct_front(folder, place):
    return await direct.Fronts(folder).open(place.address)

  direct.run(main)


def test_a_server_without_a_front_that_signs_is_refused(tmp_path):
  async def main():
    async with places(tmp_path, 1) as made:
      with pytest.raises(UserError, match=r'no front signs its answers.*jaxrl serve --host'):
        async with serving.attached(MODEL, [made[0].address], tmp_path, direct=True):
          pass
    async with direct_fleet(tmp_path) as (_, fleet):
      assert fleet.replicas[0].state == ReplicaState.SERVING

  direct.run(main)


def test_keys_differ_by_token_and_purpose():
  keys, others = TicketKeys('a' * 16), TicketKeys('b' * 16)
  ticket = keys.issue('0' * 32, b'body')
  header = keys.header(ticket).encode()
  assert keys.read(header) == ticket and others.read(header) is None
  assert ticket.digest == hashlib.sha256(b'body').hexdigest() and ticket.permits(b'body')
  assert keys.read(header.replace(b'Ticket ', b'Bearer ')) is None
  for at in range(len('Ticket '), len(header)):
    changed = bytearray(header)
    changed[at] = ord('0') if changed[at] != ord('0') else ord('1')
    assert keys.read(bytes(changed)) is None
  signature = keys.chain(ticket).sign(b'answer')
  assert keys.chain(ticket).accepts(b'answer', signature)
  assert not keys.chain(ticket).accepts(b'answes', signature)
  assert not others.chain(ticket).accepts(b'answer', signature)
  assert signature.hex() not in header.decode()


def test_parts_are_accepted_only_in_the_order_in_which_they_were_signed():
  keys = TicketKeys('a' * 16)
  ticket, other = (keys.issue('0' * 32, body) for body in (b'body', b'body'))
  signing, foreign = keys.chain(ticket), keys.chain(other)
  parts = [b'one', b'two', b'two', b'']
  signed = [(part, signing.sign(part)) for part in parts]
  strange = [(part, foreign.sign(part)) for part in parts]
  for count in range(len(parts) + 1):
    for number, wrong in enumerate((*signed, *strange, (b'twoone', signed[0][1]))):
      chain = keys.chain(ticket)
      assert all(chain.accepts(*each) for each in signed[:count])
      assert chain.accepts(*wrong) == (number == count < len(parts))
      if not number == count < len(parts):  # What is refused changes nothing.
        assert all(chain.accepts(*each) for each in signed[count:])
