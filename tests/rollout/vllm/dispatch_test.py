"""Dispatch of requests to servers: by outstanding tokens, by prefix and by maximum length."""

import asyncio
import collections

import numpy as np
import pytest

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rollout.api import Request
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.vllm.dispatch import Dispatcher
from jaxrl_llm.rollout.vllm.replica import Replica
from jaxrl_llm.rollout.vllm.workload import RecentPrompts, prefixes


def servers(*lengths):
  replicas = []
  for number, length in enumerate(lengths):
    replica = Replica(f'vllm-{number}', client=object(), server=None)
    replica.max_length = length
    replicas.append(replica)
  return replicas


def dispatcher(replicas, **config):
  return Dispatcher(lambda: replicas, VllmConfig(**config))


def asking(prompt, max_tokens):
  prompt = tuple(prompt)
  return Request(uid='a request', prompt=prompt, max_tokens=max_tokens, key=(0,))


def drawn(length, seed=0):
  return [int(token) for token in np.random.default_rng(seed).integers(0, 50_000, length)]


def test_the_server_with_the_fewest_outstanding_tokens_is_chosen():
  async def main():
    first, second = replicas = servers(1000, 1000)
    queue = dispatcher(replicas)
    long = await queue.acquire(asking(range(10), 90))
    short = [await queue.acquire(asking(range(10), 20)) for _ in range(5)]
    assert long.replica is first
    assert [each.replica for each in short] == [second] * 4 + [first]
    assert (first.workload.outstanding, second.workload.outstanding) == (130, 120)
    queue.release(long)
    assert (await queue.acquire(asking(range(10), 20))).replica is first
    for each in short:
      queue.release(each)
    assert (first.workload.outstanding, second.workload.outstanding) == (30, 0)

  asyncio.run(main())


def test_a_request_that_is_cancelled_while_it_waits_leaves_nothing_outstanding():
  async def main():
    (only,) = replicas = servers(1000)
    queue = dispatcher(replicas, max_in_flight=1)
    taken = await queue.acquire(asking(range(10), 20))
    waiting = [asyncio.create_task(queue.acquire(asking(range(10), 20))) for _ in range(2)]
    await asyncio.sleep(0)
    queue.release(taken)
    waiting[0].cancel()  # It has a place by now, but has not yet been told.
    await asyncio.gather(*waiting, return_exceptions=True)
    assert waiting[0].cancelled() and only.in_flight == 1 and only.workload.outstanding == 30
    queue.release(waiting[1].result())
    assert only.in_flight == only.workload.outstanding == 0

  asyncio.run(main())


@pytest.mark.parametrize('rule', ['least_tokens', 'least_loaded'])
def test_samples_of_a_group_go_where_their_prompt_is_cached_and_loads_stay_even(rule):
  async def main():
    replicas = servers(*[4096] * 4)
    queue = dispatcher(replicas, dispatch=rule)
    places = collections.defaultdict(set)
    for group in range(32):
      for _ in range(8):
        assignment = await queue.acquire(asking(drawn(512, seed=group), 256))
        places[group].add(assignment.replica)
    prefills = sum(len(where) for where in places.values())
    loads = [each.workload.outstanding for each in replicas]
    assert max(loads) <= min(loads) * 1.1 + 768 + 512
    if rule == 'least_tokens':
      assert prefills < 64
    else:
      assert prefills == 32 * 4

  asyncio.run(main())


def test_samples_of_a_single_prompt_occupy_all_servers():
  async def main():
    replicas = servers(*[4096] * 4)
    queue = dispatcher(replicas)
    asked = asking(drawn(512), 256)
    for _ in range(40):
      await queue.acquire(asked)
    loads = [each.workload.outstanding for each in replicas]
    assert min(loads) > 0 and max(loads) <= min(loads) * 1.1 + 2 * 768

  asyncio.run(main())


def test_a_turn_goes_where_the_turns_before_it_were_sampled():
  async def main():
    replicas = servers(*[4096] * 3)
    queue = dispatcher(replicas)
    background = [await queue.acquire(asking(drawn(100, seed=i), 900)) for i in range(3)]
    assert {each.replica for each in background} == set(replicas)
    prompts = [drawn(300, seed=10 + i) for i in range(3)]
    turns = [await queue.acquire(asking(prompt, 50)) for prompt in prompts]
    for each in turns:
      queue.release(each)
    for prompt, before in zip(prompts, turns, strict=True):
      longer = asking(prompt + drawn(50, seed=99), 50)
      assert (await queue.acquire(longer)).replica is before.replica

  asyncio.run(main())


def test_prefixes_are_remembered_until_the_cache_is_cleared_or_others_have_come(monkeypatch):
  prompt = drawn(100)
  recent = RecentPrompts()
  assert recent.shared(prefixes(tuple(prompt))) == 0
  recent.add(prefixes(tuple(prompt)))
  assert recent.shared(prefixes(tuple(prompt))) == 100
  assert recent.shared(prefixes((*prompt[:70], *drawn(30, seed=1)))) == 64
  assert recent.shared(prefixes((*prompt[:15], *drawn(85, seed=1)))) == 0
  assert prefixes(tuple(prompt[:15])) == []
  recent.clear()
  assert recent.shared(prefixes(tuple(prompt))) == 0
  monkeypatch.setattr('jaxrl_llm.rollout.vllm.workload._REMEMBERED', 10)
  recent.add(prefixes(tuple(prompt)))
  for seed in range(2, 5):
    recent.add(prefixes(tuple(drawn(100, seed))))
  assert recent.shared(prefixes(tuple(prompt))) == 0
  assert recent.shared(prefixes(tuple(drawn(100, 4)))) == 100


@pytest.mark.parametrize('rule', ['least_tokens', 'least_loaded', 'uniform'])
def test_a_sequence_goes_to_the_shortest_servers_that_hold_it(rule):
  async def main():
    replicas = servers(4096, 512, 512, 1024)
    queue = dispatcher(replicas, dispatch=rule, max_in_flight=2)
    long, *short, middle = replicas

    async def ask(*lengths):
      return [(await queue.acquire(asking([0] * 12, each - 12))).replica for each in lengths]

    assert await ask(513, 1025, 1024) == [middle, long, middle]
    assert collections.Counter(await ask(512, 100, 200, 300)) == dict.fromkeys(short, 2)
    # All places of the short servers are taken: their requests wait, and others overtake them.
    waiting = asyncio.create_task(ask(100))
    assert await ask(2000) == [long]
    await asyncio.sleep(0.01)
    assert not waiting.done()
    # None of the short servers serves: their requests go to the next longer ones.
    for each in short:
      replicas.remove(each)
    middle.in_flight = 0
    queue.dispatch()
    assert await waiting == [middle]
    replicas.remove(long)
    waiting = asyncio.create_task(ask(2000))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    replicas.append(long)
    long.in_flight = 0
    queue.dispatch()
    assert await waiting == [long]

  asyncio.run(main())


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'lengths': (64,)}, r'lengths: 1 entries, wanted one for each of the servers=2'),
    ({'lengths': (64, 128)}, r'lengths: \[64, 128\], wanted None for at least one server'),
    ({'lengths': (1, None)}, 'lengths: 1, wanted at least 2'),
    ({'lengths': (64, None), 'addresses': ('unix:/a',)}, 'set min_length'),
    ({'min_length': 64}, 'min_length: 64, but the run starts its servers; set lengths'),
    ({'min_length': 0, 'addresses': ('unix:/a',)}, 'min_length: 0, wanted at least 2'),
  ],
)
def test_lengths_that_cannot_be_are_refused(fields, message):
  with pytest.raises(UserError, match=message):
    VllmConfig(**fields)
