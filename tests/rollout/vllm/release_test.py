"""A fleet whose servers give up their memory between rollouts: asleep, or stopped and started."""

import asyncio

import pytest
import serving
from fleets import (
  MODEL,
  A,
  B,
  C,
  Place,
  check,
  fleet_over,
  hasten,
  places,
  run,
  versions,
  wave,
  weights,
)
from serving import ask, request

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.api import Releasable
from jaxrl_llm.rollout.vllm.client import VllmClient
from jaxrl_llm.rollout.vllm.replica import Replica, ReplicaState


@pytest.fixture(autouse=True)
def often(monkeypatch):
  hasten(monkeypatch)


class FakeProcess:
  """Implements `ServerProcess` with a fake server in this process."""

  def __init__(self, place, *, starts=None):
    self.place, self.starts, self.running = place, 0, False
    self._limit = starts

  def start(self):
    self.starts += 1

  async def ready(self, *, deadline_s):
    if self._limit is not None and self.starts > self._limit:
      raise RunError('no room on the card')
    await self.place.start()
    self.running = True

  def is_running(self):
    return self.running

  async def stop(self):
    if self.running:
      await self.place.server.close()
    self.running = False

  async def close(self):
    await self.stop()


def owned(folder, count, **fields):
  processes = [FakeProcess(Place(folder, i), **fields) for i in range(count)]
  replicas = [
    Replica(f'vllm-{i}', client=VllmClient(p.place.address, name=f'vllm-{i}'), server=p)
    for i, p in enumerate(processes)
  ]
  return processes, replicas


def states(fleet):
  return [replica.state for replica in fleet.replicas]


def test_sleeping_servers_wake_with_the_version_published_meanwhile(tmp_path):
  async def main():
    async with places(tmp_path, 2, sleeps=True) as made, fleet_over(made, tmp_path) as fleet:
      assert isinstance(fleet, Releasable)
      await wave(fleet)
      for step, version in enumerate((B, C)):
        await fleet.release('sleep')
        assert fleet.is_released and fleet.device_bytes == 0
        assert all(place.server.sleeping for place in made)
        assert all(not place.policy.tensors['model.norm.weight'].any() for place in made)
        updates = [place.server.requests['/update_weights'] for place in made]
        await fleet.load(weights(version))
        assert fleet.version == version
        assert [place.server.requests['/update_weights'] for place in made] == updates
        asked = request(100 + step, samples=2)
        waiting = asyncio.create_task(ask(fleet, asked))
        await asyncio.sleep(0)
        await fleet.restore()
        assert fleet.device_bytes > 0
        completions = await waiting
        check(asked, completions)
        assert versions([completions]) == {version}
        assert versions(await wave(fleet, begin=10 * step)) == {version}
      taken = fleet.take_metrics()
      assert taken['run/engine_restarts'] == taken['run/engine_retries'] == 0
      assert taken['run/engines_serving'] == 2
      await fleet.release('sleep')
    assert not any(place.server.sleeping for place in made), 'others may use them now'

  run(main)


def test_stopped_servers_start_again_and_count_as_no_failure(tmp_path):
  async def main():
    processes, replicas = owned(tmp_path, 2)
    async with serving.fleet_of(MODEL, replicas, tmp_path, max_restarts=1) as fleet:
      await fleet.load(weights(A))
      await wave(fleet)
      for version in (B, C):
        await fleet.release('destroy')
        assert not any(process.is_running() for process in processes)
        await fleet.load(weights(version))
        await fleet.restore()
        assert versions(await wave(fleet)) == {version}
      await fleet.release('destroy')
      await asyncio.sleep(0.05)  # The watcher sees them stopped, and leaves them alone.
      assert states(fleet) == [ReplicaState.RELEASED] * 2
      relabelled = Version(0, 7)
      await fleet.relabel(relabelled)
      await fleet.restore()
      assert versions([await ask(fleet, request(50))]) == {relabelled}
      assert [process.starts for process in processes] == [4, 4]
      assert fleet.take_metrics()['run/engine_restarts'] == 0

  run(main)


def test_a_fleet_released_before_it_starts_starts_no_server_of_its_own(tmp_path):
  async def main():
    processes, replicas = owned(tmp_path, 2)
    async with serving.fleet_of(MODEL, replicas, tmp_path, released='destroy') as fleet:
      assert [process.starts for process in processes] == [0, 0]
      await fleet.load(weights(A))
      await fleet.restore()
      assert [process.starts for process in processes] == [1, 1]
      assert versions(await wave(fleet)) == {A}

  run(main)


def test_a_server_that_does_not_come_back_is_given_up_and_the_others_serve(tmp_path):
  async def main():
    processes, replicas = owned(tmp_path, 2)
    processes[1]._limit = 1
    async with serving.fleet_of(MODEL, replicas, tmp_path, max_restarts=1) as fleet:
      await fleet.load(weights(A))
      await fleet.release('destroy')
      await fleet.load(weights(B))
      await fleet.restore()
      assert states(fleet) == [ReplicaState.SERVING, ReplicaState.GONE]
      assert versions(await wave(fleet)) == {B}
      processes[0]._limit = 2
      await fleet.release('destroy')
      with pytest.raises(
        RunError, match=r'no engine left; the last failure: .*no room on the card'
      ):
        await fleet.restore()

  run(main)


def test_a_server_that_died_asleep_is_started_again(tmp_path):
  async def main():
    async with places(tmp_path, 2, sleeps=True) as made, fleet_over(made, tmp_path) as fleet:
      await fleet.release('sleep')
      await made[0].restart()
      await fleet.restore()
      assert versions(await wave(fleet)) == {A}
      assert all(replica.version == A for replica in fleet.replicas)

  run(main)


def test_a_server_on_a_cpu_cannot_sleep(tmp_path):
  async def main():
    async with places(tmp_path, 1) as made, fleet_over(made, tmp_path) as fleet:
      with pytest.raises(UserError, match='vllm-0 cannot sleep: it is on a CPU, where vLLM keeps'):
        await fleet.release('sleep')

  run(main)
