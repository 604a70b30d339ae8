"""Servers that register join and leave a fleet in the middle of sampling: each sample once, each
token of a proven version.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import random

import pytest
import serving
from fake_vllm import Fault
from fleets import (
  GARBAGE,
  GENERATE,
  MODEL,
  PATIENCE_S,
  UPDATE,
  A,
  B,
  C,
  engines,
  hasten,
  is_the_end,
  outcome,
  places,
  run,
  until,
  versions,
  wave,
  weights,
)
from serving import ask, request

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.registry import Kind, Lease, Registry, Watch
from jaxrl_llm.models.families import tiny
from jaxrl_llm.rollout.vllm import discovery
from jaxrl_llm.rollout.vllm.client import VllmClient
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.vllm.discovery import Discovery, fingerprint
from jaxrl_llm.rollout.vllm.replica import Replica, ReplicaState
from jaxrl_llm.weights.hf import read_spec, write_config

LEASE_S = 0.4
LARGER = tiny('qwen2', serving.VOCAB, **{**serving.SHAPE, 'hidden_size': 128})


@pytest.fixture(autouse=True)
def often(monkeypatch):
  hasten(monkeypatch)


@pytest.fixture
def said(caplog):
  caplog.set_level(logging.WARNING, logger='absl')
  return caplog


class Job:
  """A registry, and the leases of places in it."""

  def __init__(self, folder, lease_s):
    self.registry = Registry(folder / 'registry', 'registry', lease_s=lease_s)
    self.leases, self.kept, self.told = {}, {}, []

  def register(self, place, spec=None, **fields):
    """Args: spec: of the model that the server says it serves; None: it says nothing."""
    of = {} if spec is None else fingerprint(spec, None)
    lease = Lease(
      kind=Kind.VLLM, name=f'vllm-{place.number}', address=place.address, fingerprint=of, **fields
    )
    self.leases[place.number] = lease
    self.registry.put(lease)
    self.kept[place.number] = asyncio.create_task(self._keep(lease))

  async def _keep(self, lease):
    while True:
      await asyncio.sleep(0.05)
      self.registry.put(lease)

  async def stop_renewing(self, place):
    renewing = self.kept.pop(place.number)
    renewing.cancel()
    await asyncio.gather(renewing, return_exceptions=True)

  async def withdraw(self, place):
    await self.stop_renewing(place)
    self.registry.remove(self.leases.pop(place.number))

  def discovery(self, wanted):
    return Discovery(
      Watch(self.registry, Kind.VLLM),
      required=wanted,
      fingerprint=fingerprint(MODEL.spec, None),
      build=lambda name, address, _: Replica(
        name, client=VllmClient(address, name=name), server=None
      ),
      tell=lambda name, how: self.told.append((name, how)),
    )

  @contextlib.asynccontextmanager
  async def fleet(self, folder, *, wanted=1, first=A, **config):
    # A publication takes longer than a lease where the machine is busy.
    async with serving.fleet_of(
      MODEL, [], folder, discovery=self.discovery(wanted), discover=wanted, **config
    ) as fleet:
      if first is not None:
        await fleet.load(weights(first))
      yield fleet


@contextlib.asynccontextmanager
async def job(folder, lease_s=PATIENCE_S):
  made = Job(folder, lease_s)
  try:
    yield made
  finally:
    for renewing in made.kept.values():
      renewing.cancel()
    await asyncio.gather(*made.kept.values(), return_exceptions=True)


def serves(fleet, *names):
  return sorted(r.name for r in fleet.replicas if r.state == ReplicaState.SERVING) == sorted(names)


def is_of(completions, number):
  return all(engine == f'vllm-{number}' for engine in engines(completions))


# Joining.


def test_a_run_starts_once_enough_servers_have_registered(tmp_path):
  async def main():
    async with places(tmp_path, 2) as made, job(tmp_path) as of:
      of.register(made[0])

      async def later():
        await asyncio.sleep(0.2)
        of.register(made[1])

      registering = asyncio.create_task(later())
      async with of.fleet(tmp_path, wanted=2, dispatch='uniform') as fleet:
        await registering
        found = await wave(fleet)
        assert set(itertools.chain(*map(engines, found))) == {'vllm-0', 'vllm-1'}
        metrics = fleet.take_metrics()
        assert metrics['run/engines'] == metrics['run/engines_serving'] == 2
        assert metrics['run/engine_joined'] == 0 and of.told == [
          ('vllm-0', 'joined'),
          ('vllm-1', 'joined'),
        ]

  run(main)


def test_too_few_servers_are_one_line_after_the_deadline(tmp_path):
  async def main():
    async with places(tmp_path, 1) as made, job(tmp_path) as of:
      of.register(made[0])
      with pytest.raises(UserError) as raised:
        async with of.fleet(tmp_path, wanted=2, start_deadline_s=0.3):
          pass
      assert is_the_end(raised.value, '1 of 2 servers have registered in')
      assert f'jaxrl serve --registry={of.registry.directory}' in str(raised.value)

  run(main)


def test_a_server_that_joins_has_the_version_before_it_gets_a_request(tmp_path):
  async def main():
    async with places(tmp_path, 2) as made, job(tmp_path) as of:
      of.register(made[0])
      async with of.fleet(tmp_path, dispatch='uniform') as fleet:
        made[0].faults.stall_at = 3
        under_way = asyncio.create_task(wave(fleet, groups=4, samples=2))
        await until(lambda: made[0].server.running == 8)
        of.register(made[1])
        await until(lambda: serves(fleet, 'vllm-0', 'vllm-1'))
        made[0].faults.stall_at = None
        found = [*await under_way, *await wave(fleet, begin=10)]
        assert versions(found) == {A} and made[1].asked and made[1].policy.used == {A.step}
        await fleet.load(weights(B))
        assert versions(await wave(fleet, begin=20)) == {B}
        assert fleet.counts['retries'] == fleet.counts['void'] == 0 and fleet.counts['joined'] == 1

  run(main)


@pytest.mark.parametrize('slow', [UPDATE, '/v1/models'])
def test_a_server_that_joins_during_a_publication_ends_with_the_new_version(tmp_path, slow):
  async def main():
    async with places(tmp_path, 2) as made, job(tmp_path) as of:
      of.register(made[0])
      async with of.fleet(tmp_path) as fleet:
        made[1].faults.fault, made[1].faults.path = Fault.DELAY, slow
        made[1].faults.delay_s = 0.3
        of.register(made[1])
        await until(lambda: made[1].server.requests[slow])
        await fleet.load(weights(B))
        assert versions(await wave(fleet)) == {B}
        await until(lambda: serves(fleet, 'vllm-0', 'vllm-1'))
        assert versions(await wave(fleet, begin=10)) == {B} and GARBAGE not in made[1].policy.used
        await until(lambda: not (tmp_path / 'published' / str(A)).exists())

  run(main)


def test_a_server_that_joins_before_the_first_version_gets_it_too(tmp_path):
  async def main():
    async with places(tmp_path, 2) as made, job(tmp_path) as of:
      of.register(made[0])
      async with of.fleet(tmp_path, first=None, dispatch='uniform') as fleet:
        of.register(made[1])
        await until(lambda: serves(fleet, 'vllm-0', 'vllm-1'))
        await fleet.load(weights(A))
        assert versions(await wave(fleet)) == {A} and made[1].asked

  run(main)


# Leaving.


def test_a_server_that_leaves_finishes_its_requests_and_gets_no_more(tmp_path):
  async def main():
    async with places(tmp_path, 2) as made, job(tmp_path) as of:
      for place in made:
        of.register(place)
      async with of.fleet(tmp_path, wanted=2, dispatch='uniform') as fleet:
        made[0].faults.stall_at = 3
        under_way = asyncio.create_task(wave(fleet, groups=4, samples=2))
        await until(lambda: made[0].server.running == 4)
        await of.withdraw(made[0])
        await until(lambda: len(fleet.replicas) == 1)
        await wave(fleet, begin=10)
        made[0].faults.stall_at = None
        await under_way
        assert len(made[0].asked) == 4 and fleet.counts['retries'] == 0
        assert fleet.counts['left'] == 1 and of.told[-1] == ('vllm-0', 'left')
        await until(lambda: not fleet._leaving)
        assert fleet.take_metrics()['run/engines'] == 1

  run(main)


def test_a_server_that_leaves_and_ends_at_once_loses_no_sample(tmp_path):
  """Such losses count as failures of no request: here none is permitted."""

  async def main():
    async with places(tmp_path, 2) as made, job(tmp_path) as of:
      for place in made:
        of.register(place)
      async with of.fleet(tmp_path, wanted=2, dispatch='uniform', max_retries=0) as fleet:
        made[0].faults.stall_at = 3
        under_way = asyncio.create_task(wave(fleet, groups=4, samples=2))
        await until(lambda: made[0].server.running == 4)
        await of.withdraw(made[0])
        await until(lambda: len(fleet.replicas) == 1)
        await made[0].server.die()
        found = await under_way
        assert versions(found) == {A} and all(is_of(completions, 1) for completions in found)
        assert fleet.counts['retries'] == 4

  run(main)


def test_requests_of_a_server_whose_lease_expires_are_retried_at_once(tmp_path):
  async def main():
    async with places(tmp_path, 2) as made, job(tmp_path, LEASE_S) as of:
      for place in made:
        of.register(place)
      async with of.fleet(tmp_path, wanted=2, latency_s=10 * PATIENCE_S) as fleet:
        made[0].faults.fault = Fault.HANG
        under_way = asyncio.create_task(wave(fleet))
        await until(lambda: made[0].server.requests[GENERATE])
        await of.stop_renewing(made[0])
        found = await under_way
        assert versions(found) == {A} and fleet.counts['retries'] >= 1
        assert ('vllm-0', 'expired') in of.told
        made[0].faults.fault = None
        of.register(made[0])
        await until(lambda: serves(fleet, 'vllm-0', 'vllm-1'))

  run(main)


def test_a_server_that_leaves_in_the_middle_of_a_publication_holds_nothing_up(tmp_path):
  async def main():
    async with places(tmp_path, 2) as made, job(tmp_path) as of:
      for place in made:
        of.register(place)
      async with of.fleet(tmp_path, wanted=2) as fleet:
        made[0].faults.fault, made[0].faults.path = Fault.HANG, UPDATE
        loading = asyncio.create_task(fleet.load(weights(B)))
        await until(lambda: made[0].server.requests[UPDATE] >= 2)
        await of.withdraw(made[0])
        await loading
        assert versions(await wave(fleet)) == {B} and len(fleet.replicas) == 1

  run(main)


def test_when_all_have_left_requests_wait_for_one_that_joins(tmp_path):
  async def main():
    async with places(tmp_path, 2) as made, job(tmp_path) as of:
      of.register(made[0])
      async with of.fleet(tmp_path) as fleet:
        await of.withdraw(made[0])
        await until(lambda: not fleet.replicas)
        waiting = asyncio.create_task(wave(fleet))
        loading = asyncio.create_task(fleet.load(weights(B)))
        await asyncio.sleep(0.1)
        assert not waiting.done() and not loading.done()
        of.register(made[1])
        await loading
        assert versions(await waiting) == {B} and fleet.version == B

  run(main)


def test_without_any_server_for_too_long_the_run_ends(tmp_path):
  async def main():
    async with places(tmp_path, 1) as made, job(tmp_path) as of:
      of.register(made[0])
      async with of.fleet(tmp_path, start_deadline_s=1.0) as fleet:
        await of.withdraw(made[0])
        await until(lambda: not fleet.replicas)
        error = await outcome(ask(fleet, request(1)))
        assert is_the_end(error, 'no engine left: none served for') and (
          'vllm-0: it has left the registry' in str(error)
        )

  run(main)


def test_a_server_that_is_restarted_at_its_address_is_brought_to_the_version(tmp_path):
  """Killed, so that its lease stays, and registered again under another id."""

  async def main():
    async with places(tmp_path, 2) as made, job(tmp_path) as of:
      for place in made:
        of.register(place)
      async with of.fleet(tmp_path, wanted=2, dispatch='uniform') as fleet:
        await of.stop_renewing(made[0])
        await made[0].server.die()
        assert versions(await wave(fleet)) == {A}
        await made[0].restart()
        of.register(made[0])
        await until(lambda: serves(fleet, 'vllm-0', 'vllm-1'))
        await wave(fleet, begin=10)
        assert made[0].policy.used == {A.step} and len(fleet.replicas) == 2

  run(main)


def test_a_dead_servers_lease_does_not_keep_a_run_from_starting(tmp_path):
  async def main():
    async with places(tmp_path, 2) as made, job(tmp_path, LEASE_S) as of:
      for place in made:
        of.register(place)
      await made[0].server.die()
      async with of.fleet(tmp_path) as fleet:
        assert all(is_of(found, 1) for found in await wave(fleet))
        await of.stop_renewing(made[0])
        await until(lambda: [replica.name for replica in fleet.replicas] == ['vllm-1'])

  run(main)


# Other models.


def test_at_the_start_a_server_of_another_model_is_refused_by_name(tmp_path):
  async def main():
    async with places(tmp_path, 2) as made, job(tmp_path) as of:
      of.register(made[0], MODEL.spec)
      of.register(made[1], LARGER)
      with pytest.raises(UserError) as raised:
        async with of.fleet(tmp_path, wanted=2):
          pass
      line = f'vllm-1 ({made[1].address}) serves another model than the policy'
      assert line in str(raised.value) and raised.value.exit_code == 2
      assert not made[0].server.requests[UPDATE], 'nothing was begun'

  run(main)


@pytest.mark.parametrize('says', [True, False])
def test_later_a_server_of_another_model_is_ignored_with_one_line(tmp_path, said, says):
  """Also if it does not say so, and its tensors do."""

  async def main():
    async with places(tmp_path, 2) as made, job(tmp_path) as of:
      of.register(made[0], MODEL.spec)
      await made[1].server.close()
      await made[1].start(LARGER)
      async with of.fleet(tmp_path) as fleet:
        of.register(made[1], LARGER if says else None)
        await until(lambda: any('ignored' in line for line in said.messages))
        for number in range(5):
          await wave(fleet, begin=10 * number)
          await asyncio.sleep(0.05)
        assert [replica.name for replica in fleet.replicas] == ['vllm-0']
      lines = [line for line in said.messages if 'vllm-1' in line]
      assert len(lines) == 1 and '\n' not in lines[0], lines
      assert not made[1].server.requests[UPDATE] and not made[1].asked

  run(main)


@pytest.mark.parametrize('path', ['/v1/models', '/collective_rpc', GENERATE])
def test_a_server_that_is_lost_while_it_is_checked_joins_later(tmp_path, monkeypatch, path):
  monkeypatch.setattr(discovery, '_REST_S', 0.05)

  async def main():
    async with places(tmp_path, 2) as made, job(tmp_path) as of:
      of.register(made[0])
      async with of.fleet(tmp_path) as fleet:
        made[1].faults.fault, made[1].faults.path, made[1].faults.times = Fault.CUT, path, 1
        of.register(made[1])
        await until(lambda: len(of.told) > 2)
        assert of.told[1:] == [('vllm-1', 'given up'), ('vllm-1', 'joined')]
        await until(lambda: serves(fleet, 'vllm-0', 'vllm-1'))

  run(main)


def test_a_fingerprint_tells_models_and_tokenizers_apart_and_nothing_else(tmp_path):
  write_config(tmp_path, MODEL.spec, dtype='bfloat16', eos_ids=[1], pad_id=0)
  tokenizer = {'model': {'vocab': {'a': 1}}, 'added_tokens': [], 'truncation': None}
  ours = fingerprint(MODEL.spec, json.dumps(tokenizer).encode())
  longer = dataclasses.replace(MODEL.spec, max_position_embeddings=9)
  saved_again = json.dumps({**tokenizer, 'truncation': {'max_length': 3}}, indent=2).encode()
  assert fingerprint(read_spec(tmp_path), saved_again) == fingerprint(longer, saved_again) == ours
  assert fingerprint(MODEL.spec, None) == {'model': ours['model']}
  assert fingerprint(dataclasses.replace(MODEL.spec, rope_theta=1.0), None) != {
    'model': ours['model']
  }
  tokenizer['model']['vocab'] = {'b': 1}
  other = fingerprint(MODEL.spec, json.dumps(tokenizer).encode())
  assert other['model'] == ours['model'] and other['tokenizer'] != ours['tokenizer']


@pytest.mark.parametrize(
  'config', [{'discover': 0}, {'discover': 2, 'addresses': ('unix:/a',)}, {'discover': -1}]
)
def test_a_number_of_servers_without_meaning_is_refused(config):
  with pytest.raises(UserError, match=r'rollout\.vllm\.discover: '):
    VllmConfig(**config)


# Everything at once.


@pytest.mark.parametrize(
  'seed', [*range(2), *(pytest.param(i, marks=pytest.mark.acceptance) for i in range(2, 20))]
)
def test_whatever_servers_do_each_sample_comes_once_of_the_weights_that_it_names(
  tmp_path, seed, monkeypatch
):
  """Servers register, leave, die, hang and come back at random, through three publications."""
  monkeypatch.setattr(discovery, '_REST_S', 0.05)

  async def main():
    chance = random.Random(seed)
    async with places(tmp_path, 4) as made, job(tmp_path, LEASE_S) as of:
      of.register(made[0])
      config = {'dispatch': 'uniform', 'max_restarts': 10**6, 'max_retries': 100}
      # A server that hangs while it is checked or updated is given up then, and joins again.
      config |= {'start_deadline_s': 4, 'transfer_deadline_s': 4}
      async with of.fleet(tmp_path, **config) as fleet:
        over = asyncio.Event()

        async def trouble():
          """Of all but the first server, which keeps the run going."""
          while not over.is_set():
            place = chance.choice(made[1:])
            registered = place.number in of.kept
            match chance.choice(['join', 'join', 'leave', 'vanish', 'die', 'hang']):
              case 'join' if not registered:
                of.register(place)
              case 'leave' if registered:
                await of.withdraw(place)
              case 'vanish' if registered:
                await of.stop_renewing(place)
                await place.restart()
              case 'die':
                await place.restart()
              case 'hang':
                place.faults.fault, place.faults.path = Fault.HANG, GENERATE
                await asyncio.sleep(0.05)
                place.faults.fault = None
            await asyncio.sleep(chance.uniform(0.0, 0.1))

        troubling = asyncio.create_task(trouble())
        begin = itertools.count(0, 10)
        for version in (A, B, C):
          if version != A:
            await fleet.load(weights(version))
          for _ in range(5):
            found = await wave(fleet, begin=next(begin))
            assert versions(found) == {version}
            await asyncio.sleep(0.05)
        over.set()
        await troubling
        for place in made[1:]:  # With a new lease, a server that was given up may join at once.
          if place.number in of.kept:
            await of.withdraw(place)
          of.register(place)
        names = [f'vllm-{place.number}' for place in made]
        await until(lambda: serves(fleet, *names))
        assert versions(await wave(fleet, begin=next(begin))) == {C}

  run(main)
