"""The fleet over fake servers: each sample once, each token of a proven version, whatever becomes
of the servers.

A token's logprob tells who drew it: the server, which of its draws, and the step of the weights
that were loaded.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import socket

import numpy as np
import pytest
import serving
from aiohttp import web
from clocks import simulated
from fake_vllm import Fault
from fleets import (
  GARBAGE,
  GENERATE,
  MODEL,
  PATIENCE_S,
  PERSISTENT,
  SCALE,
  SOON,
  UPDATE,
  VOCAB,
  A,
  B,
  Between,
  C,
  Place,
  back,
  calling,
  check,
  draw_of,
  draws,
  engines,
  fleet_over,
  hasten,
  is_the_end,
  outcome,
  places,
  run,
  script,
  until,
  versions,
  wave,
  weights,
)
from serving import ask, request

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.net.connections import read_key
from jaxrl_llm.core.net.front import Front
from jaxrl_llm.core.net.token_server import FrontConfig
from jaxrl_llm.core.records.sample import Finish
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.repetition import RepetitionDetection
from jaxrl_llm.rollout.vllm import repairs
from jaxrl_llm.rollout.vllm.client import VllmClient, sampler_seed
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.vllm.publication import FILE
from jaxrl_llm.rollout.vllm.replica import Replica, ReplicaState
from jaxrl_llm.rollout.vllm.workload import prefixes


@pytest.fixture(autouse=True)
def often(monkeypatch):
  hasten(monkeypatch)


# Dispatch.


@pytest.mark.parametrize(('groups', 'samples', 'servers'), [(7, 3, 2), (5, 5, 3), (1, 7, 2)])
def test_uniform_dispatch_deals_a_wave_evenly_and_spreads_groups(
  tmp_path, groups, samples, servers
):
  async def main():
    async with (
      places(tmp_path, servers) as made,
      fleet_over(made, tmp_path, dispatch='uniform') as fleet,
    ):
      found = await wave(fleet, groups=groups, samples=samples)
      counts = [len(place.asked) for place in made]
      assert sum(counts) == groups * samples and max(counts) - min(counts) <= 1
      for completions in found:
        of_group = [engines(completions).count(f'vllm-{i}') for i in range(servers)]
        assert max(of_group) - min(of_group) <= 1
      for number in range(7):  # One at a time, too.
        await wave(fleet, groups=1, samples=1, begin=10 + number)
      counts = [len(place.asked) for place in made]
      assert max(counts) - min(counts) <= 1

  run(main)


def test_servers_that_failed_the_self_test_get_greedy_requests_alone(tmp_path):
  async def main():
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path, max_in_flight=2) as fleet:
      bad, good = fleet.replicas
      bad.sampling_fault = 'draws too often'
      await wave(fleet)
      assert len(made[0].asked) == 0 and len(made[1].asked) == 18
      made[1].faults.stall_at = 1
      waiting = asyncio.create_task(wave(fleet, begin=10))
      await until(lambda: good.in_flight == 2)
      greedy = request(20, samples=3, sampling=Sampling(temperature=0.0))
      await ask(fleet, greedy)  # It does not wait for the sampled ones.
      assert len(made[0].asked) == 3
      made[1].faults.stall_at = None
      await waiting
      assert len(made[0].asked) == 3
      made[1].faults.stall_at = 1
      waiting = asyncio.create_task(ask(fleet, request(30, samples=5)))
      await until(lambda: good.in_flight == 2)
      good.sampling_fault = 'repeats itself'
      for sampled in (waiting, ask(fleet, request(31))):
        with pytest.raises(UserError, match='failed the self-test: draws too often; remove'):
          await sampled

  run(main)


def test_a_server_that_came_back_is_not_flooded(tmp_path):
  async def main():
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path, dispatch='uniform') as fleet:
      await made[0].server.die()
      await wave(fleet, groups=10)
      assert len(made[1].asked) >= 15
      await made[0].restart()
      await back(fleet, made[0], A)
      before = len(made[1].asked)
      await wave(fleet, groups=11, samples=1, begin=10)
      assert len(made[0].asked) in (5, 6) and len(made[1].asked) - before in (5, 6)

  run(main)


def test_a_slow_server_gets_no_more_while_others_work(tmp_path):
  async def main():
    async with (
      places(tmp_path, 2) as made,
      fleet_over(made, tmp_path, dispatch='least_loaded') as fleet,
    ):
      made[0].faults.stall_at = 1
      slow = asyncio.create_task(wave(fleet, groups=3, samples=2))
      await until(lambda: made[0].server.running == 3 and made[1].server.finished['length'] >= 3)
      await until(lambda: fleet.replicas[1].in_flight == 0)
      for number in range(5):
        await wave(fleet, groups=1, samples=2, begin=10 + number)
      assert len(made[0].asked) == 3 and len(made[1].asked) == 3 + 10
      made[0].faults.stall_at = None
      await slow

  run(main)


@contextlib.asynccontextmanager
async def short_and_long(folder, **config):
  """Yields a server for sequences of 32 tokens, one for all, and their fleet."""
  async with places(folder, 1, max_model_len=32) as (short,):
    long = Place(folder, 1)
    await long.start()
    try:
      attached = (short.address, long.address)
      config |= {'addresses': attached, 'min_length': 32}
      async with fleet_over([short, long], folder, **config) as fleet:
        yield short, long, fleet
    finally:
      await long.server.close()


def test_short_and_long_sequences_go_to_different_servers(tmp_path):
  async def main():
    async with short_and_long(tmp_path, max_restarts=10**6) as (short, long, fleet):
      few = request(0, samples=6, max_tokens=8)
      many = request(1, samples=6, max_tokens=40)
      for asked in (few, many):
        check(asked, await ask(fleet, asked))
      assert (len(short.asked), len(long.asked)) == (6, 6)
      # Without its servers, the other group serves short sequences.
      await short.server.die()
      few = request(2, samples=4, max_tokens=8)
      check(few, await ask(fleet, few))
      assert len(long.asked) == 10
      await short.restart(max_model_len=32)
      # The longest sequences wait for the servers that hold them.
      await long.server.die()
      many = request(3, samples=4, max_tokens=40)
      asking = asyncio.create_task(ask(fleet, many))
      await until(lambda: fleet.replicas[1].state != ReplicaState.SERVING)
      await back(fleet, short, A)
      few = request(4, samples=4, max_tokens=8)
      check(few, await ask(fleet, few))
      assert not asking.done()
      await long.restart()
      check(many, await asking)
      assert all(each.workload.outstanding == 0 for each in fleet.replicas)

  run(main)


def test_a_version_forgets_the_prompts_of_the_one_before(tmp_path):
  async def main():
    async with places(tmp_path, 1) as made, fleet_over(made, tmp_path) as fleet:
      (replica,) = fleet.replicas
      prompt = tuple(range(20))
      await ask(fleet, dataclasses.replace(request(0, max_tokens=8), prompt=prompt))
      assert replica.workload.recent.shared(prefixes(prompt)) == 20
      await fleet.load(weights(B))
      assert replica.workload.recent.shared(prefixes(prompt)) == 0

  run(main)


def test_a_fleet_without_a_server_for_the_longest_sequences_is_refused_or_ends(tmp_path):
  async def main():
    async with places(tmp_path, 2, max_model_len=32) as made:
      config = {'addresses': tuple(place.address for place in made), 'min_length': 32}
      with pytest.raises(UserError, match=r'no server holds the longest sequences .*max_model_len'):
        async with fleet_over(made, tmp_path, **config):
          pass
    async with short_and_long(tmp_path, max_restarts=10**6, start_deadline_s=1) as (_, long, fleet):
      await long.server.die()
      with pytest.raises(RunError, match='no engine left for the longest sequences: none served'):
        await ask(fleet, request(3, max_tokens=40))

  run(main)


@pytest.mark.parametrize('dispatch', ['uniform', 'least_loaded'])
def test_no_server_works_on_more_than_it_may(tmp_path, dispatch):
  async def main():
    async with (
      places(tmp_path, 2) as made,
      fleet_over(made, tmp_path, dispatch=dispatch, max_in_flight=3) as fleet,
    ):
      for place in made:
        place.faults.stall_at = 1
      waves = asyncio.create_task(wave(fleet, groups=10))
      await until(lambda: all(place.server.running == 3 for place in made))
      for place in made:
        place.faults.stall_at = None
      await waves
      assert [place.policy.most for place in made] == [3, 3]
      assert sum(len(place.asked) for place in made) == 30

  run(main)


# Servers that fail while they work.


@pytest.mark.parametrize(
  'fault', [Fault.INTERNAL_ERROR, Fault.UNAVAILABLE, Fault.HANG, Fault.CUT, Fault.ABORT]
)
def test_a_hiccup_loses_no_sample_and_the_server_serves_again(tmp_path, fault):
  async def main():
    config = SOON if fault == Fault.HANG else {}
    async with (
      places(tmp_path, 2) as made,
      fleet_over(made, tmp_path, dispatch='uniform', **config) as fleet,
    ):
      made[0].faults.fault, made[0].faults.after, made[0].faults.times = fault, 2, 1
      assert versions(await wave(fleet)) == {A}
      assert made[0].faults.times == 0 and fleet.counts['retries'] >= 1
      assert fleet.counts['completions'] == 18 and fleet.counts['tokens'] == 18 * 8
      await back(fleet, made[0], A)
      assert {*itertools.chain(*map(engines, await wave(fleet, begin=9)))} == {'vllm-0', 'vllm-1'}
      assert made[0].policy.used == {A.step} and fleet.counts['restarts'] == 0
      assert fleet.take_metrics()['run/engine_retries'] == fleet.counts['retries']

  run(main)


@pytest.mark.parametrize('fault', [Fault.DIE, Fault.CORE])
def test_a_server_that_died_gets_no_request_before_it_has_the_current_version(tmp_path, fault):
  async def main():
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path, dispatch='uniform') as fleet:
      made[0].faults.fault, made[0].faults.after = fault, 2
      assert versions(await wave(fleet)) == {A}
      assert fleet.counts['retries'] >= 1
      await asyncio.wait_for(made[0].server.ended.wait(), 30)
      assert fleet.take_metrics()['run/engines_serving'] == 1
      await made[0].restart()
      await back(fleet, made[0], A)
      assert {*itertools.chain(*map(engines, await wave(fleet, begin=9)))} == {'vllm-0', 'vllm-1'}
      assert made[0].policy.used == {A.step}

  run(main)


def too_few(choice):
  choice['token_ids'], choice['logprobs']['content'] = (
    choice['token_ids'][:3],
    choice['logprobs']['content'][:3],
  )
  choice['weight_versions'][-1]['end'] = 3


def too_many(choice):
  choice['token_ids'].append(5)
  choice['logprobs']['content'].append({'token_id': 5, 'logprob': -1.0})
  choice['weight_versions'][-1]['end'] += 1


WRONG = {
  'too few': too_few,
  'too many': too_many,
  'foreign logprobs': lambda choice: choice['logprobs']['content'][2].update(token_id=1),
  'a logprob too few': lambda choice: choice['logprobs']['content'].pop(),
  'no logprobs': lambda choice: choice.update(logprobs=None),
  'minus infinity': lambda choice: choice['logprobs']['content'][2].update(logprob=-9999.0),
  'no number': lambda choice: choice['logprobs']['content'][2].update(logprob=float('nan')),
  'no reason': lambda choice: choice.update(finish_reason=None),
  'no stop token': lambda choice: choice.update(finish_reason='stop'),
  'no version': lambda choice: choice['weight_versions'][-1].update(version=None),
  'no token of ours': lambda choice: choice['token_ids'].__setitem__(0, 1 << 40),
  'a gap': lambda choice: choice['weight_versions'][0].update(start=1),
  'no spans': lambda choice: choice.update(weight_versions=[]),
  'another version': lambda choice: choice['weight_versions'][0].update(version='0.2'),
}


@pytest.mark.parametrize('wrong', WRONG)
def test_an_answer_that_is_not_what_was_asked_for_is_drawn_again(tmp_path, wrong):
  lost = []

  def alter(path, answer):
    if path == GENERATE and not lost:
      (choice,) = answer['choices']
      lost.append(draw_of(choice['logprobs']['content'][0]['logprob']))
      WRONG[wrong](choice)

  async def main():
    async with (
      places(tmp_path, 2) as made,
      Between(made[0]) as between,
      fleet_over([between, made[1]], tmp_path, dispatch='uniform') as fleet,
    ):
      between.alter_answer = alter
      found = await wave(fleet)
      assert versions(found) == {A}
      assert len(lost) == 1 and lost[0] not in draws(itertools.chain(*found))
      assert fleet.counts['retries'] == 1 and fleet.counts['void'] == 0
      await until(lambda: fleet.replicas[0].state == ReplicaState.SERVING)

  run(main)


def test_what_came_back_by_itself_is_never_sampled_from(tmp_path):
  async def main():
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path, dispatch='uniform') as fleet:
      await wave(fleet)
      await made[0].restart()
      assert fleet.replicas[0].state == ReplicaState.SERVING, 'nobody noticed'
      assert versions(await wave(fleet, begin=10)) == {A}
      assert GARBAGE in made[0].policy.used, 'it was asked, and what it said was not taken'
      await back(fleet, made[0], A)
      assert 'vllm-0' in itertools.chain(*map(engines, await wave(fleet, begin=20)))
      assert made[0].policy.used == {GARBAGE, A.step}

  run(main)


def test_what_came_back_by_itself_is_looked_at_before_it_is_published_to(tmp_path):
  async def main():
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path, dispatch='uniform') as fleet:
      await made[0].restart()
      assert made[0].server.requests['/v1/models'] == 0
      await fleet.load(weights(B))
      await back(fleet, made[0], B)
      assert made[0].server.requests['/v1/models'] == 1, 'it might have been another model'
      assert versions(await wave(fleet)) == {B}
      assert made[0].policy.used == {B.step}

  run(main)


# No server left.


def test_the_end_of_all_servers_ends_all_who_wait(tmp_path):
  async def main():
    config = {'start_deadline_s': 2.0, 'max_in_flight': 2}
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path, **config) as fleet:
      for place in made:
        place.faults.stall_at = 1
      waiting = [asyncio.create_task(outcome(ask(fleet, request(i, samples=3)))) for i in range(4)]
      await until(lambda: all(place.server.running == 2 for place in made))
      for place in made:
        await place.server.die()
      loading = asyncio.create_task(outcome(fleet.load(weights(B))))
      for error in await asyncio.gather(*waiting, loading):
        assert is_the_end(error, 'no engine left') and 'rollout.vllm.start_deadline_s=2 s' in str(
          error
        )
      for late in (ask(fleet, request(5)), fleet.load(weights(C))):
        assert is_the_end(await outcome(late), 'no engine left')

  run(main, simulated)


def test_a_load_under_way_ends_with_the_servers(tmp_path):
  async def main():
    async with (
      places(tmp_path, 2) as made,
      fleet_over(made, tmp_path, start_deadline_s=2.0) as fleet,
    ):
      for place in made:
        place.faults.die_in_update = True
      error = await outcome(fleet.load(weights(B)))
      assert is_the_end(error, 'no engine left') and fleet.version == A

  run(main, simulated)


def test_servers_that_all_hang_end_the_run_in_time(tmp_path):
  async def main():
    config = {**SOON, 'latency_s': 0.2, 'start_deadline_s': 2.0, **PERSISTENT}
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path, **config) as fleet:
      for place in made:
        place.faults.fault = Fault.HANG
      errors = await asyncio.gather(*(outcome(ask(fleet, request(i, samples=2))) for i in range(3)))
      assert all(is_the_end(error, 'no engine left') for error in errors)

  run(main, simulated)


@pytest.mark.parametrize('alive', [True, False], ids=['one is left', 'none is left'])
def test_a_resumed_run_goes_on_without_a_server_that_is_away(tmp_path, monkeypatch, alive):
  monkeypatch.setattr(serving, 'Replica', functools.partial(Replica, has_served=True))

  async def main():
    async with places(tmp_path, 2) as made:
      for place in made[alive:]:
        await place.server.die()

      async def come_back():
        await asyncio.sleep(0.1)
        await made[1].restart()

      coming = asyncio.create_task(asyncio.sleep(0) if alive else come_back())
      async with fleet_over(made, tmp_path) as fleet:
        left, lost = made if alive else made[::-1]
        assert set(engines(itertools.chain(*await wave(fleet)))) == {f'vllm-{left.number}'}
        await lost.restart()
        await back(fleet, lost, A)
      await coming

  run(main)


def test_a_resumed_run_whose_servers_are_all_away_ends_in_time(tmp_path, monkeypatch):
  monkeypatch.setattr(serving, 'Replica', functools.partial(Replica, has_served=True))

  async def main():
    async with places(tmp_path, 1) as made:
      await made[0].server.die()
      with pytest.raises(RunError, match=r'none of its 1 servers has answered for \S+=0\.1 s'):
        async with fleet_over(made, tmp_path, start_deadline_s=0.1):
          pass

  run(main)


# Publishing.


def spoil_next(fleet):
  """The next publication has another byte on the disk than was announced."""
  write = fleet._updates.folder.write

  def spoiled(version, leaves, **options):
    publication = write(version, leaves, **options)
    path = publication.directory / FILE
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    fleet._updates.folder.write = write
    return publication

  fleet._updates.folder.write = spoiled


def test_a_bad_file_is_refused_before_any_server_pauses(tmp_path):
  async def main():
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path) as fleet:
      before = [await place.digests() for place in made]
      counted = [dict(place.server.requests) for place in made]
      spoil_next(fleet)
      error = await outcome(fleet.load(weights(B)))
      assert is_the_end(
        error, 'version 0.2 was not published, and version 0.1 stays'
      ) and 'as read, announced was' in str(error)
      for place, requests in zip(made, counted, strict=True):
        for path in ('/pause', UPDATE):
          assert place.server.requests[path] == requests[path], path
      assert versions(await wave(fleet)) == {A} and fleet.version == A
      assert [await place.digests() for place in made] == before
      await fleet.load(weights(C))
      assert versions(await wave(fleet, begin=10)) == {C} == {fleet.version}

  run(main)


def test_what_a_server_has_verified_is_not_read_again(tmp_path):
  async def main():
    async with places(tmp_path, 1) as made, fleet_over(made, tmp_path) as fleet:
      prepare = fleet.replicas[0].transfer.prepare

      async def prepare_then_lose(client, publication, *, deadline_s):
        await prepare(client, publication, deadline_s=deadline_s)
        for file in publication.files:
          (publication.directory / file).write_bytes(b'')

      fleet.replicas[0].transfer.prepare = prepare_then_lose
      await fleet.load(weights(B))
      assert versions(await wave(fleet)) == {B}

  run(main)


def test_a_bad_file_is_refused_by_all_and_the_version_before_goes_on(tmp_path):
  """Servers of earlier releases verify a file only when they load it."""

  async def main():
    async with places(tmp_path, 2, verifies=False) as made, fleet_over(made, tmp_path) as fleet:
      before = [await place.digests() for place in made]
      spoil_next(fleet)
      for place in made:  # Time to ask for something meanwhile.
        place.faults.fault, place.faults.path, place.faults.delay_s = Fault.DELAY, UPDATE, 0.3
      loading = asyncio.create_task(outcome(fleet.load(weights(B))))
      await until(lambda: all(place.server.paused for place in made))
      waiting = asyncio.create_task(wave(fleet))
      error = await loading
      assert is_the_end(
        error, 'version 0.2 was not published, and version 0.1 stays'
      ) and 'as read, announced was' in str(error)
      assert versions([*await waiting, *await wave(fleet, begin=10)]) == {A} and fleet.version == A
      assert [await place.digests() for place in made] == before
      await fleet.load(weights(C))
      assert versions(await wave(fleet)) == {C} == {fleet.version}
      assert fleet.counts['publications'] == 2 and fleet.counts['void'] == 0

  run(main)


def test_a_bad_file_and_a_death_at_once_leave_the_version_before(tmp_path):
  async def main():
    async with places(tmp_path, 2, verifies=False) as made, fleet_over(made, tmp_path) as fleet:
      spoil_next(fleet)
      made[0].faults.fault, made[0].faults.path = Fault.DIE, UPDATE
      assert is_the_end(
        await outcome(fleet.load(weights(B))), '0.2 was not published, and version 0.1 stays'
      )
      assert versions(await wave(fleet)) == {A}
      await made[0].restart()
      await back(fleet, made[0], A)

  run(main)


@pytest.mark.parametrize(
  ('servers', 'again_s', 'refusals'), [(2, 0.01, 4), (1, PATIENCE_S, 0)], ids=['two', 'only one']
)
def test_a_server_that_comes_back_to_a_damaged_file_waits_for_the_next_version(
  tmp_path, monkeypatch, servers, again_s, refusals
):
  monkeypatch.setattr(repairs, '_REFUSED_S', again_s)
  monkeypatch.setattr(repairs, '_MAX_REFUSED_S', again_s)

  async def main():
    config = {'max_restarts': 1}
    async with places(tmp_path, servers) as made, fleet_over(made, tmp_path, **config) as fleet:
      path = fleet._updates.current.publication.directory / FILE
      data = bytearray(path.read_bytes())
      data[-9] ^= 1
      path.write_bytes(data)
      await made[0].restart()
      waiting = asyncio.create_task(wave(fleet, groups=8))
      await until(lambda: 'has digest' in fleet._roster.last_trouble)
      requests = made[0].server.requests
      calls = requests['/collective_rpc']  # Each try asks the workers to verify the file.
      await until(lambda: requests['/collective_rpc'] >= calls + refusals)
      if servers > 1:
        assert versions(await waiting) == {A}
      assert fleet.replicas[0].state == ReplicaState.DOWN
      await fleet.load(weights(B))
      await back(fleet, made[0], B)
      assert versions(await waiting) == {A if servers > 1 else B}

  run(main)


class Trouble:
  """What keeps one server from a version until it is mended."""

  def __init__(self, kind, between):
    self.kind, self.between, self.place, self.died = kind, between, between.place, False

  def begin(self):
    if self.kind == 'refusal':
      self.between.alter_body = self._misdirect
    elif self.kind == 'a stale tensor':
      self.place.faults.stale = 'model.layers.1.self_attn.k_proj.weight'
    elif self.kind == 'a failed probe':
      self.place.faults.prompt_logprob_shift = 0.01
    elif self.kind == 'a command refused after the write':
      self.between.status = lambda path: 403 if path == '/reset_prefix_cache' else None
    elif self.kind == 'an update broken off':
      self.place.faults.fault, self.place.faults.path = Fault.CUT, UPDATE
    else:
      self.place.faults.die_in_update = True

  def _misdirect(self, path, body):
    if path == UPDATE:
      body['update_info']['directory'] += '-nowhere'

  async def end(self):
    if self.kind == 'death':
      await self.place.restart()
    self.between.alter_body = lambda path, body: None
    self.between.status = lambda path: None
    self.place.faults.stale = self.place.faults.fault = None
    self.place.faults.prompt_logprob_shift = 0.0


TROUBLES = [
  *(
    'refusal',
    'a stale tensor',
    'a failed probe',
    'a command refused after the write',
    'an update broken off',
    'death',
  )
]


@pytest.mark.parametrize('newer', [False, True], ids=['same', 'newer'])
@pytest.mark.parametrize('kind', TROUBLES)
def test_one_server_that_fails_to_take_a_version_comes_to_the_current_one_later(
  tmp_path, kind, newer
):
  """Meanwhile the others serve, and what was under way at the one that failed is not taken from
  it.
  """

  async def main():
    async with places(tmp_path, 2) as made, Between(made[0]) as between:
      config = {'dispatch': 'uniform', **PERSISTENT}
      async with fleet_over([between, made[1]], tmp_path, **config) as fleet:
        made[0].faults.stall_at = 2
        under_way = asyncio.create_task(wave(fleet, groups=2, samples=1))
        await until(lambda: made[0].server.running == 1 and made[1].server.finished['length'] >= 1)
        trouble = Trouble(kind, between)
        trouble.begin()
        await fleet.load(weights(B))
        assert fleet.version == B and versions(await wave(fleet, begin=10)) == {B}
        assert fleet.replicas[0].version is None and (tmp_path / 'published' / '0.1').exists()
        made[0].faults.stall_at = None
        (first,), (second,) = await under_way
        assert engines([first, second]) == ['vllm-1', 'vllm-1'] and fleet.counts['retries'] == 1
        if newer:
          await fleet.load(weights(C))
          assert versions(await wave(fleet, begin=20)) == {C}
        assert fleet.take_metrics()['run/engines_serving'] == 1
        await trouble.end()
        current = C if newer else B
        await back(fleet, made[0], current)
        found = await wave(fleet, begin=30)
        assert versions(found) == {current} and 'vllm-0' in itertools.chain(*map(engines, found))
        await until(
          lambda: sorted(p.name for p in (tmp_path / 'published').glob('0.*')) == [str(current)]
        )

  run(main)


@pytest.mark.parametrize(
  'kind', ['a command refused after the write', 'an update broken off', 'a failed probe']
)
def test_the_only_server_is_brought_to_the_version_in_the_end(tmp_path, kind):
  async def main():
    async with (
      places(tmp_path, 1) as made,
      Between(made[0]) as between,
      fleet_over([between], tmp_path, **PERSISTENT) as fleet,
    ):
      trouble = Trouble(kind, between)
      trouble.begin()
      loading = asyncio.create_task(fleet.load(weights(B)))
      await until(lambda: made[0].server.requests['/v1/models'] >= 2)
      waiting = asyncio.create_task(wave(fleet))
      await trouble.end()
      await loading
      assert versions(await waiting) == {B}
      await back(fleet, made[0], B)

  run(main)


def test_weights_that_are_not_the_trainers_end_the_run(tmp_path):
  async def main():
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path, max_restarts=1) as fleet:
      error = await outcome(fleet.load(weights(B, probed=4)))
      assert is_the_end(error, 'no engine left') and 'rollout.vllm.probe_tolerance' in str(error)
      assert is_the_end(await outcome(ask(fleet, request(1))), 'no engine left')

  run(main)


def test_a_version_published_while_a_server_is_looked_at_reaches_it(tmp_path):
  """The server had failed once and turns out to be well, with a version that is no longer the
  current one.
  """

  async def main():
    async with places(tmp_path, 1) as made, fleet_over(made, tmp_path) as fleet:
      made[0].policy.may_score.clear()
      made[0].faults.fault, made[0].faults.times = Fault.INTERNAL_ERROR, 1
      waiting = asyncio.create_task(wave(fleet, groups=1, samples=1))
      await until(
        lambda: fleet.replicas[0].state == ReplicaState.DOWN and made[0].policy.scoring == 1
      )
      loading = asyncio.create_task(fleet.load(weights(B)))
      await until(lambda: fleet._updates.current.publication.version == B)
      made[0].policy.may_score.set()
      await loading
      assert versions(await waiting) == {B}

  run(main)


def test_a_server_in_the_middle_of_a_dead_trainers_update_is_taken_over(tmp_path):
  async def main():
    async with places(tmp_path, 1) as made:
      async with calling(made[0]) as trainer:
        await trainer.pause()
        await trainer.start_update()
      assert made[0].server.paused
      async with fleet_over(made, tmp_path, first=None) as fleet:
        assert not made[0].server.paused, 'resumed when it was looked at'
        await fleet.load(weights(A))
        assert versions(await wave(fleet)) == {A}

  run(main)


# Tokens that are provisional.


def test_a_completion_under_way_goes_on_under_the_next_version(tmp_path):
  async def main():
    async with places(tmp_path, 1) as made, fleet_over(made, tmp_path) as fleet:
      made[0].faults.stall_at = 5
      asked = request(1, samples=2)
      waiting = asyncio.create_task(ask(fleet, asked))
      await until(lambda: made[0].server.running == 2 and made[0].server.tokens % 2 == 0)
      await until(lambda: made[0].server.tokens >= 10)
      await fleet.load(weights(B))
      made[0].faults.stall_at = None
      completions = await waiting
      check(asked, completions)
      for completion in completions:
        assert [(s.version, s.start, s.end) for s in completion.segments] == [(A, 0, 5), (B, 5, 24)]
        assert [s.finish for s in completion.segments] == ['load', 'length']
      assert made[0].server.requests['/reset_prefix_cache'] == fleet.counts['publications'] == 2
      assert fleet.counts['void'] == fleet.counts['retries'] == 0

  run(main)


# Weights by another name.


def test_servers_are_not_told_of_a_name_and_all_that_is_handed_out_carries_it(tmp_path):
  async def main():
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path) as fleet:
      assert versions(await wave(fleet)) == {A}
      requests = [place.server.requests.copy() for place in made]
      await fleet.relabel(B)
      assert fleet.version == B and fleet.counts['publications'] == 1
      assert [place.server.requests for place in made] == requests, 'no server was asked anything'
      asked = [request(i, samples=2, max_tokens=8) for i in range(3)]
      found = await asyncio.gather(*(ask(fleet, one) for one in asked))
      assert versions(found) == {B} and {place.policy.used == {A.step} for place in made} == {True}
      await fleet.relabel(C)
      assert versions([await ask(fleet, asked[0])]) == {C}
      for place in made:
        assert place.server.label.startswith(f'{A}-')
      assert fleet.counts['void'] == fleet.counts['retries'] == 0

  run(main)


def test_a_completion_under_way_gets_the_new_names_of_both_its_versions(tmp_path):
  """Begun under A, which becomes B; cut by C, which becomes D before it ends."""
  D = Version(0, 4)

  async def main():
    async with places(tmp_path, 1) as made, fleet_over(made, tmp_path) as fleet:
      made[0].faults.stall_at = 5
      waiting = asyncio.create_task(ask(fleet, request(1, samples=2)))
      await until(lambda: made[0].server.running == 2 and made[0].server.tokens >= 10)
      await fleet.relabel(B)
      await fleet.load(weights(C))
      assert fleet.version == C
      await fleet.relabel(D)
      made[0].faults.stall_at = None
      for completion in await waiting:
        assert [(s.version, s.start, s.end) for s in completion.segments] == [(B, 0, 5), (D, 5, 24)]
        steps = (-completion.logprobs / SCALE).astype(np.int64) % 128
        assert steps.tolist() == [A.step] * 5 + [C.step] * 19, 'drawn from what was published'
      assert fleet.counts['void'] == fleet.counts['retries'] == 0

  run(main)


def test_a_load_after_a_new_name_is_served_under_its_own(tmp_path):
  async def main():
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path) as fleet:
      await fleet.relabel(B)
      await fleet.load(weights(C))
      assert versions(await wave(fleet)) == {C} and fleet.version == C
      for place in made:
        await back(fleet, place, C)

  run(main)


def test_a_server_that_was_away_comes_back_to_weights_that_have_a_new_name(tmp_path):
  """What it is brought to is what was published; what it draws goes by the name of now."""

  async def main():
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path, **PERSISTENT) as fleet:
      await fleet.relabel(B)
      await made[1].restart()
      asked = [request(i, samples=3, max_tokens=8) for i in range(6)]
      assert versions(await asyncio.gather(*(ask(fleet, one) for one in asked))) == {B}
      await back(fleet, made[1], A)
      found = await asyncio.gather(*(ask(fleet, one) for one in asked))
      assert versions(found) == {B}
      assert {engine for completions in found for engine in engines(completions)} == {
        'vllm-0',
        'vllm-1',
      }

  run(main)


def test_tokens_are_not_handed_out_before_the_probe_has_passed(tmp_path):
  async def main():
    async with places(tmp_path, 1) as made, fleet_over(made, tmp_path) as fleet:
      made[0].faults.stall_at = 5
      waiting = asyncio.create_task(wave(fleet, groups=1, samples=1))
      await until(lambda: made[0].server.running == 1)
      made[0].policy.may_score.clear()
      loading = asyncio.create_task(fleet.load(weights(B)))
      await until(lambda: made[0].policy.scoring == 2)
      made[0].faults.stall_at = None
      await until(lambda: made[0].server.running == 0)
      # By the time that a later question is answered, so is the sample.
      async with calling(made[0]) as client:
        assert (await client.served_label()).startswith(f'{B}-')
      assert not waiting.done() and fleet.counts['completions'] == 0
      made[0].policy.may_score.set()
      assert versions(await waiting) == {A, B}
      await loading

  run(main)


def test_tokens_under_a_version_whose_probe_fails_are_drawn_again_elsewhere(tmp_path):
  async def main():
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path, **PERSISTENT) as fleet:
      made[0].faults.stall_at, made[0].faults.prompt_logprob_shift = 5, 1.0
      waiting = asyncio.create_task(wave(fleet, groups=2, samples=1))
      await until(lambda: made[0].server.running == 1 and made[1].server.finished['length'] >= 1)
      await fleet.load(weights(B))
      made[0].faults.stall_at = None
      (first,), (second,) = await waiting
      assert engines([first, second]) == ['vllm-1'] * 2
      assert [s.version for s in first.segments] == [B] and [
        s.version for s in second.segments
      ] == [A]
      assert fleet.counts['void'] == fleet.counts['retries'] == 1
      assert made[0].policy.used == {A.step, B.step}

  run(main)


def test_a_failed_probe_voids_even_what_ends_after_a_later_one_has_passed(tmp_path):
  """The request came to the server after the update, so all its tokens bear the version that is
  proven in the end.
  """

  async def main():
    async with (
      places(tmp_path, 1) as made,
      Between(made[0]) as between,
      fleet_over([between], tmp_path, **PERSISTENT) as fleet,
    ):
      between.let_through.clear()
      waiting = asyncio.create_task(wave(fleet, groups=1, samples=1))
      await until(lambda: between.held == 1)
      made[0].faults.prompt_logprob_shift, made[0].faults.stall_at = 1.0, 3
      loading = asyncio.create_task(fleet.load(weights(B)))
      await until(lambda: made[0].server.requests['/v1/models'] >= 2)
      between.let_through.set()
      await until(lambda: made[0].policy.working == 1)
      await until(lambda: made[0].policy.used)
      made[0].faults.prompt_logprob_shift = 0.0
      await loading
      made[0].faults.stall_at = None
      await waiting
      assert fleet.counts['void'] == fleet.counts['retries'] == 1 and made[0].asked == ['r0/0'] * 2

  run(main)


# What is published, and for how long.


def test_a_version_stays_published_until_all_servers_have_the_next(tmp_path):
  async def main():
    folder = tmp_path / 'published'

    def published():
      return sorted(path.name for path in folder.iterdir() if path.name != 'unfinished')

    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path) as fleet:
      assert published() == ['0.1']
      await fleet.load(weights(B))
      assert published() == ['0.2']
      made[0].faults.die_in_update = True
      await fleet.load(weights(C))
      for _ in range(3):  # Looks at the fleet's own watch.
        await asyncio.sleep(repairs._WATCH_S)
      assert published() == ['0.2', '0.3']
      await made[0].restart()
      await back(fleet, made[0], C)
      await until(lambda: published() == ['0.3'])
      assert versions(await wave(fleet)) == {C}
    assert not folder.exists()

  run(main)


# Callers and the end.


def test_a_caller_that_leaves_early_frees_the_servers(tmp_path):
  async def main():
    async with (
      places(tmp_path, 2) as made,
      fleet_over(made, tmp_path, dispatch='uniform', max_in_flight=3) as fleet,
    ):
      made[0].faults.stall_at = 1
      async with contextlib.aclosing(fleet.generate(request(1, samples=8))) as completions:
        async for _ in completions:
          await until(lambda: made[0].server.running == 3)
          break
      await until(lambda: made[0].server.running == made[1].server.running == 0)
      assert [replica.in_flight for replica in fleet.replicas] == [0, 0]
      made[0].faults.stall_at = None
      await wave(fleet, begin=5)

  run(main)


def test_closing_fails_those_who_wait(tmp_path):
  async def main():
    async with places(tmp_path, 1) as made, fleet_over(made, tmp_path, max_in_flight=2) as fleet:
      made[0].faults.stall_at = 1
      waiting = [asyncio.create_task(outcome(ask(fleet, request(i, samples=2)))) for i in range(3)]
      await until(lambda: made[0].server.running == 2)
      await fleet.close()
      assert all([is_the_end(await one, 'closed') for one in waiting])
      await until(lambda: made[0].server.running == 0)
      assert not await fleet.replicas[0].client.is_healthy(), 'nothing is called any more'
      async with calling(made[0]) as client:
        assert await client.is_healthy()

  run(main)


@pytest.mark.parametrize('path', [UPDATE, '/collective_rpc', '/resume', GENERATE])
def test_closing_ends_a_load_under_way(tmp_path, path):
  async def main():
    async with places(tmp_path, 1) as made, fleet_over(made, tmp_path) as fleet:
      made[0].faults.fault, made[0].faults.path, made[0].faults.times = Fault.HANG, path, 1
      loading = asyncio.create_task(outcome(fleet.load(weights(B))))
      await until(lambda: made[0].faults.times == 0)
      await fleet.close()
      assert is_the_end(await loading, 'closed') and fleet.version == A
      assert not (tmp_path / 'published').exists()
      assert fleet.replicas[0].state == ReplicaState.GONE

  run(main)


# What users get wrong.


def refusal(main):
  """The one line of the UserError that a test ends with."""
  with pytest.raises(UserError) as caught:
    run(main)
  assert caught.value.exit_code == 2 and '\n' not in str(caught.value)
  return str(caught.value)


@pytest.mark.parametrize('kv', [None, 'recompute', 'keep'])
def test_kept_caches_are_not_shared_with_later_requests(tmp_path, kv):
  """vLLM cannot clear its cache while requests run, so each version has a cache of its own."""

  async def main():
    async with places(tmp_path, 1) as made, fleet_over(made, tmp_path, kv=kv) as fleet:
      await ask(fleet, request(1))
      await fleet.load(weights(B))
      await ask(fleet, request(2))
      server = made[0].server
      salts = {
        body['request_id'][:2]: body.get('cache_salt')
        for body in server.generate_bodies
        if body.get('request_id', '')[:2] in ('r1', 'r2')
      }
      resets = server.requests['/reset_prefix_cache']
      if kv == 'keep':
        assert resets == 1, 'before the first version only'
        assert len({*salts.values(), None}) == 3
      else:
        assert resets == 2 and set(salts.values()) == {None}

  run(main)


def attach(tmp_path, *addresses, **fields):
  async def main():
    async with serving.attached(MODEL, addresses, tmp_path, **fields):
      pass

  return main


@pytest.mark.parametrize(
  ('address', 'words'),
  [
    (
      'localhost:8000',
      "address 'localhost:8000', wanted http://HOST:PORT, https://HOST:PORT or unix:/path/to.sock",
    ),
    ('unix:/nowhere/s', 'engine vllm-0: no vLLM server answers at unix:/nowhere/s'),
    ('http://127.0.0.1:1', 'engine vllm-0: no vLLM server answers at http://127.0.0.1:1'),
    ('http://127.0.0.1:port', 'engine vllm-0: no vLLM server answers at http://127.0.0.1:port'),
    ('https://127.0.0.1:1', 'jaxrl serve, or correct rollout.vllm.addresses'),
  ],
)
def test_an_address_that_is_wrong(tmp_path, address, words):
  assert words in refusal(attach(tmp_path, address))


@pytest.mark.parametrize(
  ('path', 'words'),
  [
    ('/v1/models', 'no vLLM server answers at unix:'),
    ('/collective_rpc', 'has no worker extension of jaxrl_llm (vllm-0: /collective_rpc: '),
    (GENERATE, 'cannot generate (vllm-0: '),
  ],
)
def test_a_server_that_is_lost_while_it_is_checked_at_the_start(tmp_path, path, words):
  async def main():
    async with places(tmp_path, 1) as made:
      made[0].faults.fault, made[0].faults.path = Fault.CUT, path
      await attach(tmp_path, made[0].address)()

  assert words in refusal(main)


@pytest.mark.parametrize(
  ('status', 'text', 'words'),
  [
    (200, '<html>It works!</html>', "answered '<html>It works!</html>', wanted JSON"),
    (404, 'Not Found', 'is not a vLLM server (vllm-0: /v1/models: HTTP 404: Not Found)'),
    (301, '', 'is not a vLLM server (vllm-0: /v1/models: HTTP 301'),
    (200, '["hello"]', 'is not a vLLM server'),
    (200, '', 'is not a vLLM server'),
    (200, '{"data": [{"id": "llama", "max_model_len": 4096}]}', "serves no model called 'policy'"),
    (503, 'busy', 'HTTP 503: busy'),
  ],
)
def test_another_web_server(tmp_path, status, text, words):
  async def answer(_):
    return web.Response(
      status=status, text=text, headers={'Location': '/elsewhere'} if status == 301 else None
    )

  async def main():
    application = web.Application()
    application.router.add_route('*', '/{path:.*}', answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / 's')).start()
    try:
      await attach(tmp_path, f'unix:{tmp_path / "s"}')()
    finally:
      await runner.cleanup()

  line = refusal(main)
  assert words in line and f'unix:{tmp_path / "s"}' in line


@pytest.mark.parametrize(
  ('served', 'fields', 'words'),
  [
    (
      serving.model_of('qwen2', tied=True, vocab=28),
      {},
      f"embed_tokens.weight is (28, 64), the policy's is ({VOCAB}, 64) (another vocabulary)",
    ),
    (
      serving.model_of('qwen3', tied=True),
      {},
      'serves a model other than the policy: only one of the two has',
    ),
    (serving.model_of('qwen2', tied=False), {}, 'only one of the two has lm_head.weight'),
    (MODEL, {'max_model_len': 399}, 'max_model_len is 399, the run needs 400'),
  ],
)
def test_a_server_of_another_model(tmp_path, served, fields, words):
  async def main():
    async with places(tmp_path, 1, spec=served.spec, **fields) as made:
      await attach(tmp_path, made[0].address)()

  line = refusal(main)
  assert words in line and f'engine vllm-0 (unix:{tmp_path}' in line


def test_a_server_of_another_dtype(tmp_path):
  async def main():
    async with places(tmp_path, 1) as made:
      await attach(tmp_path, made[0].address, dtype='bfloat16')()

  assert 'is float32, published as bfloat16; start it with --dtype=bfloat16' in refusal(main)


@pytest.mark.parametrize(
  ('told', 'words'),
  [
    ({'logprobs_mode': 'raw_logprobs'}, 'returns raw_logprobs, wanted processed_logprobs'),
    (
      {'speculative': True},
      'decodes speculatively; declare that in rollout.vllm.args.speculative_config',
    ),
    ({'device': 'jax', 'tensors': {}}, 'computes with JAX, as vLLM does on TPUs'),
    ({'logprobs_mode': 'processed_logprobs', 'speculative': False}, None),
  ],
)
def test_a_server_that_samples_in_another_way(tmp_path, told, words):
  def alter(path, answer):
    if path == '/collective_rpc':
      answer['results'][0].update(told)

  async def main():
    async with places(tmp_path, 1) as made, Between(made[0]) as between:
      between.alter_answer = alter
      await attach(tmp_path, between.address)()

  assert words in refusal(main) if words else run(main) is None


@pytest.mark.parametrize(
  ('config', 'words'),
  [
    ({'args': {'pipeline_parallel_size': 2}}, 'pipeline_parallel_size is 2, wanted 1'),
    ({'args': {'pipeline-parallel-size': '4'}}, 'pipeline-parallel-size is 4, wanted 1'),
    ({'addresses': ('http://127.0.0.1:1', 'https://host-7:8400')}, 'https://host-7:8400 reads'),
    ({'transfer': 'pull'}, "'pull' is for servers on other hosts"),
  ],
)
def test_setups_that_cannot_work_are_refused(config, words):
  with pytest.raises(UserError, match=words) as raised:
    VllmConfig(**config)
  assert '\n' not in str(raised.value)


@pytest.mark.parametrize(
  'config',
  [
    {'args': {'pipeline_parallel_size': 1, 'tensor_parallel_size': 2}},
    {'addresses': ('https://localhost:8400', 'unix:/tmp/x', f'https://{socket.gethostname()}:1')},
    {'addresses': ('https://host-7:8400',), 'publish_dir': '/shared'},
    {'addresses': ('https://host-7:8400',), 'transfer': 'nccl'},
    {'addresses': ('https://host-7:8400',), 'transfer': 'pull', 'full_every': 8},
    {'discover': 2, 'transfer': 'pull', 'lora': 'adapter'},
  ],
)
def test_setups_that_can_work_are_not_refused(config):
  VllmConfig(**config)


def test_a_server_that_does_not_sample(tmp_path):
  async def main():
    async with places(tmp_path, 1) as made:
      made[0].faults.fault = Fault.INTERNAL_ERROR
      await attach(tmp_path, made[0].address)()

  assert 'cannot generate (vllm-0: /inference/v1/generate: HTTP 500' in refusal(main)


def test_requests_that_no_server_would_take(tmp_path):
  async def main():
    async with places(tmp_path, 1) as made, fleet_over(made, tmp_path) as fleet:
      for bad, words in [
        (
          {'sampling': Sampling(temperature=0.005)},
          'temperature 0.005; vLLM samples at 0 .* or from 0.01 to 2',
        ),
        ({'sampling': Sampling(temperature=3.0)}, 'temperature 3; vLLM samples at'),
        ({'max_tokens': 396}, 'exceed the maximum length of 400'),
        ({'prompt': (3, VOCAB)}, f'vocabulary of {VOCAB}'),
        ({'stop_ids': (VOCAB,)}, f'vocabulary of {VOCAB}'),
      ]:
        with pytest.raises(UserError, match=f'^request r1: .*{words}'):
          await ask(fleet, request(1, **bad))
      assert made[0].asked == []
      await ask(fleet, request(1, sampling=Sampling(temperature=0.0)))
      await ask(fleet, request(2, sampling=Sampling(temperature=2.0), max_tokens=395))

  run(main)


def test_a_request_that_a_server_refuses_is_asked_once(tmp_path):
  async def main():
    async with (
      places(tmp_path, 1) as made,
      Between(made[0]) as between,
      fleet_over([between], tmp_path) as fleet,
    ):
      between.status = lambda path: 400 if path == GENERATE else None
      try:
        await ask(fleet, request(1, samples=2))
      finally:
        # The refusal of one sample may cancel the other before it is asked for.
        assert between.held in (1, 2) and fleet.counts['retries'] == 0
        assert fleet.replicas[0].state == ReplicaState.SERVING

  assert 'request r1: vllm-0: /inference/v1/generate: HTTP 400: not for you' in refusal(main)


def endless(choice):
  count = len(choice['token_ids'])
  choice['token_ids'] = [5] * count
  for row in choice['logprobs']['content']:
    row['token_id'] = 5


RULE = RepetitionDetection(max_pattern_size=1, min_count=3)


@pytest.mark.parametrize(
  ('rule', 'change', 'line'),
  [
    (None, lambda choice: choice.update(finish_reason='repetition'), 'which was not requested'),
    (RULE, lambda choice: choice.update(finish_reason='repetition'), 'after .* wanted after more'),
    (RULE, endless, 'went on after a repetition that .* ends after 3 tokens'),
  ],
)
def test_a_server_that_detects_repetition_by_another_rule_is_named_and_not_repaired(
  tmp_path, rule, change, line
):
  async def main():
    async with (
      places(tmp_path, 1) as made,
      Between(made[0]) as between,
      fleet_over([between], tmp_path) as fleet,
    ):
      between.alter_answer = lambda path, answer: path == GENERATE and change(*answer['choices'])
      with pytest.raises(UserError, match=f'^engine vllm-0: r1: .*{line}'):
        await ask(fleet, request(1, sampling=Sampling(repetition_detection=rule)))
      assert fleet.counts['retries'] == fleet.counts['restarts'] == 0
      assert fleet.replicas[0].state == ReplicaState.SERVING

  run(main)


@pytest.mark.parametrize('right', [True, False])
def test_a_server_behind_a_front_wants_its_key(tmp_path, right):
  (tmp_path / 'token').write_text('the-right-token-0123456789\n')
  (tmp_path / 'wrong').write_text('another-token-0123456789\n')
  (tmp_path / 'token').chmod(0o600)

  async def main():
    async with places(tmp_path, 1) as made:
      front = Front(
        FrontConfig(token_file=str(tmp_path / 'token')),
        upstream=made[0].address,
        publish_roots=[str(tmp_path / 'published')],
      )
      async with front:
        key = read_key(str(tmp_path / ('token' if right else 'wrong')), 'key_file')
        client = VllmClient(front.address, key=key, name='vllm-0')
        replica = Replica('vllm-0', client=client, server=None)
        async with serving.fleet_of(MODEL, [replica], tmp_path) as fleet:
          await fleet.load(weights(A))
          await fleet.load(weights(B))
          assert versions(await wave(fleet)) == {B}

  if right:
    run(main)
  else:
    line = refusal(main)
    assert 'refuses the key' in line and 'rollout.vllm.key_file' in line


# Randomness.


def test_seeds_are_as_many_as_samples_and_fit(tmp_path):
  def seed_of(seed, key, index, begun):
    return sampler_seed(seed, request(1, length=9, key=key, begun=begun), index)

  named = itertools.product(
    (0, 1, 2**32, 2**64 - 1),
    ((), (0,), (1,), (0, 0), (1, 2), (2, 1), (2**32 - 1, 1)),
    range(8),
    (0, 1, 2, 8),
  )
  seeds = [seed_of(*each) for each in named]
  assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
  assert seed_of(3, (1, 2), 0, 4) == seed_of(3, (1, 2), 0, 4)


def test_a_repetition_across_a_cut_ends_a_completion_that_the_server_goes_on_with(tmp_path):
  """The tokens of a script count up, so that only those before the cut make the first one a
  repetition.
  """
  rule = Sampling(repetition_detection=RepetitionDetection(max_pattern_size=1, min_count=2))

  async def main():
    async with places(tmp_path, 1) as made, fleet_over(made, tmp_path) as fleet:
      asked = request(1, max_tokens=6, begun=2, sampling=rule)
      (first, *_) = script(sampler_seed(3, asked, 0), 6)
      for before, kept, finish in ((0, 6, Finish.LENGTH), (first, 1, Finish.REPETITION)):
        continued = dataclasses.replace(asked, prompt=(*asked.prompt[:-1], before))
        (completion,) = await ask(fleet, continued)
        assert len(completion.tokens) == len(completion.logprobs) == kept
        assert completion.finish == finish
        assert [(s.start, s.end) for s in completion.segments] == [(0, kept)]

  run(main)


def test_a_sample_that_is_asked_for_again_is_the_same_sample(tmp_path):
  async def main():
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path, dispatch='uniform') as fleet:
      made[0].faults.fault, made[0].faults.times = Fault.CUT, 1
      await wave(fleet, groups=3)
      found = {}
      for body in [
        body for place in made for body in place.server.generate_bodies if 'request_id' in body
      ]:
        found.setdefault(body['request_id'], []).append(body['sampling_params']['seed'])
      assert len(found) == 9 and sum(map(len, found.values())) == 10 == 9 + fleet.counts['retries']
      assert all(len(set(seeds)) == 1 for seeds in found.values()), 'the second time too'
      assert len({seeds[0] for seeds in found.values()}) == 9

  run(main)
