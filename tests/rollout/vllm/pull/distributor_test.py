"""Fleets whose servers are on hosts without the trainer's files: the hosts fetch each version while
their servers still sample, and the servers load it from there.
"""

import asyncio
import collections
import contextlib
import pathlib
import shutil

import fronts
import pulling
import pytest
import serving
from fleets import (
  MODEL,
  NORM,
  UPDATE,
  A,
  B,
  Between,
  C,
  places,
  run,
  tensors,
  until,
  versions,
  wave,
  weights,
)
from serving import ask, request

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.client import Lost
from jaxrl_llm.rollout.api import SharedWrite, Weights
from jaxrl_llm.rollout.vllm.client import VllmClient
from jaxrl_llm.rollout.vllm.publication import FILE
from jaxrl_llm.rollout.vllm.pull import server as server_module
from jaxrl_llm.rollout.vllm.pull.distributor import Distributor, PullTransfer
from jaxrl_llm.rollout.vllm.replica import Replica, ReplicaState
from jaxrl_llm.rollout.vllm.share_writer import VllmShareWriter
from jaxrl_llm.weights.tables import entries


class Hosts:
  """Servers on hosts of their own, and a fleet over them."""

  def __init__(self, folder: pathlib.Path, roots: list[str]):
    self._folder, self.roots = folder, [folder / root for root in roots]
    self.loaded = collections.defaultdict(list)
    """Directories that each server was told to load."""

  @contextlib.asynccontextmanager
  async def attached(self, **config):
    async with contextlib.AsyncExitStack() as stack:
      self.places = await stack.enter_async_context(places(self._folder, len(self.roots)))
      servers = [await stack.enter_async_context(Between(place)) for place in self.places]
      for i, server in enumerate(servers):
        server.alter_body = self._noting(i)
      replicas = await stack.enter_async_context(
        pulling.replicas(self._folder, servers, self.roots)
      )
      addresses = tuple(replica.client.address for replica in replicas)
      config = {'transfer': 'pull', 'addresses': addresses, **config}
      fleet = serving.fleet_of(MODEL, replicas, self._folder, **config)
      self.fleet = await stack.enter_async_context(fleet)
      yield self

  def _noting(self, number):
    def note(path, body):
      if path == UPDATE:
        info = body['update_info']
        self.loaded[number] += [info['directory']] if info.get('files') else []
        self.loaded[number] += [delta['directory'] for delta in info.get('deltas', [])]

    return note


def attached(folder: pathlib.Path, roots: list[str], **config):
  return Hosts(folder, roots).attached(**config)


def bundles(root: pathlib.Path) -> list[pathlib.Path]:
  return sorted(path for path in root.glob('*/*') if path.is_dir())


def test_servers_load_what_their_hosts_have_fetched(tmp_path):
  async def main():
    async with attached(tmp_path, ['one', 'two']) as hosts:
      for version in (A, B, C):
        await hosts.fleet.load(weights(version))
        assert versions(await wave(hosts.fleet)) == {version}
      for number, root in enumerate(hosts.roots):
        assert len(set(hosts.loaded[number])) == 3
        assert all(pathlib.Path(path).is_relative_to(root) for path in hosts.loaded[number])
        # Of the versions before, the trainer has removed its files, and so has the host.
        assert len(bundles(root)) <= 2
      assert 'perf/publish_transfer_s' in hosts.fleet.take_metrics()
      await hosts.fleet.close()  # The hosts remain, without the files.
      assert not any(bundles(root) for root in hosts.roots)

  run(main)


def test_servers_that_share_memory_fetch_once(tmp_path, monkeypatch):
  sent = []
  send = server_module.send_range

  async def counting(request, path, asked):
    sent.append(asked)
    return await send(request, path, asked)

  monkeypatch.setattr(server_module, 'send_range', counting)

  async def main():
    async with attached(tmp_path, ['shared', 'shared', 'alone']) as hosts:
      await hosts.fleet.load(weights(A))
      first, second, other = (hosts.loaded[i] for i in range(3))
      assert first == second != other
      size = (tmp_path / 'published' / str(A) / 'weights.safetensors').stat().st_size
      assert sum(part.stop - part.start for part in sent) == size

  run(main)


def test_a_server_samples_while_its_host_fetches(tmp_path, monkeypatch):
  may_send = asyncio.Event()
  send = server_module.send_range

  async def main():
    async with attached(tmp_path, ['one']) as hosts:
      await hosts.fleet.load(weights(A))
      may_send.clear()
      asked = []

      async def holding(request, path, part):
        asked.append(part)
        while not may_send.is_set():  # Set in another thread's loop.
          await asyncio.sleep(0.01)
        return await send(request, path, part)

      monkeypatch.setattr(server_module, 'send_range', holding)
      load = asyncio.create_task(hosts.fleet.load(weights(B)))
      await until(lambda: asked)
      assert hosts.fleet.replicas[0].state == ReplicaState.SERVING
      (completion,) = await ask(hosts.fleet, request(1))
      assert {segment.version for segment in completion.segments} == {A}
      may_send.set()
      await load
      assert versions(await wave(hosts.fleet)) == {B}

  run(main)


def test_servers_that_all_leave_during_a_fetch_are_lost(tmp_path, monkeypatch):
  asked = []

  async def silent(request, path, part):
    asked.append(part)
    await asyncio.sleep(30)

  async def main():
    async with attached(tmp_path, ['shared', 'shared']) as hosts:
      await hosts.fleet.load(weights(A))
      publication, replicas = hosts.fleet._updates.current.publication, hosts.fleet.replicas
      for root in set(hosts.roots):
        for path in bundles(root):
          shutil.rmtree(path)
      source = replicas[0].transfer._distributor
      source.forget(replicas[0].transfer._host)
      monkeypatch.setattr(server_module, 'send_range', silent)
      fetches = [
        asyncio.create_task(r.transfer.prepare(r.client, publication, deadline_s=30))
        for r in replicas
      ]
      await until(lambda: asked)
      for replica in replicas:
        await source.leave(replica.client)
      ends = await asyncio.gather(*fetches, return_exceptions=True)
      assert [type(end) for end in ends] == [Lost, Lost], ends

  run(main)


def test_a_host_that_was_rebooted_is_not_among_the_others(tmp_path):
  async def main():
    async with attached(tmp_path, ['one', 'two']) as hosts:
      transfer = hosts.fleet.replicas[0].transfer
      await transfer._distributor.join('another name', 'another store', transfer._client)
      assert len(transfer._distributor._hosts) == 2
      assert [len(host.clients) for host in transfer._distributor._hosts.values()] == [1, 1]

  run(main)


def test_deltas_are_fetched_alone(tmp_path):
  async def main():
    async with attached(tmp_path, ['one'], full_every=8) as hosts:
      for version in (A, B, C):
        leaves = [
          (entry.unrolled, tensors(version.step if entry.hf == NORM else 1)[entry.hf])
          for entry in entries(MODEL.spec)
        ]
        await hosts.fleet.load(Weights(version=version, leaves=leaves, probe=None))
        digests = await hosts.places[0].digests()
        assert digests == hosts.fleet._updates.current.publication.digests
      assert versions(await wave(hosts.fleet)) == {C}
      # The whole weights, and two files of which each has only the norm.
      sizes = [
        [file.stat().st_size for file in pathlib.Path(path).iterdir()] for path in hosts.loaded[0]
      ]
      assert len(sizes) == 3 and max(map(sum, sizes[1:])) < sum(sizes[0]) / 20

  run(main)


@pytest.mark.parametrize('when', ['before it is verified', 'before it is loaded'])
def test_what_was_removed_from_a_hosts_memory_is_fetched_again(tmp_path, when):
  async def main():
    async with attached(tmp_path, ['one', 'two']) as hosts:
      await hosts.fleet.load(weights(A))
      removed = []

      async def remove(info, **options):
        if not removed:
          removed.extend(bundles(hosts.roots[0]))
          for path in removed:
            shutil.rmtree(path)
        await command(info, **options)

      replica = hosts.fleet.replicas[0]
      if when == 'before it is verified':
        command = replica.client.verify
        replica.client.verify = remove
      else:
        replica.transfer._can_verify = False  # As of a server of an earlier release.
        command = replica.client.update_weights
        replica.client.update_weights = remove
      await hosts.fleet.load(weights(B))
      await until(lambda: all(r.version == B for r in hosts.fleet.replicas))
      assert removed and len(bundles(hosts.roots[0])) >= 1

  run(main)


def test_a_trainer_that_its_servers_cannot_reach_is_named_at_the_start(tmp_path, monkeypatch):
  monkeypatch.setattr(server_module, 'public_address', lambda address: 'http://127.0.0.1:1')

  async def main():
    async with attached(tmp_path, ['one']):
      pass

  with pytest.raises(UserError) as raised:
    run(main)
  line = str(raised.value)
  assert "cannot receive weights over 'pull'" in line and '\n' not in line
  assert 'the trainer cannot be reached from this host: http://127.0.0.1:1' in line


def test_servers_without_a_store_are_named_at_the_start(tmp_path):
  async def main():
    async with places(tmp_path, 1) as (place,):
      transfer = PullTransfer(Distributor(fronts.config(tmp_path)))
      client = VllmClient(place.address, name='vllm-0')
      replica = Replica('vllm-0', client=client, server=None, transfer=transfer)
      config = {'transfer': 'pull', 'addresses': (place.address,)}
      async with serving.fleet_of(MODEL, [replica], tmp_path, **config):
        pass

  with pytest.raises(UserError, match=r"cannot receive weights over 'pull'.*/pull"):
    run(main)


def shared(fleet, version, asked, writer):
  """Weights of which a process on another host writes a share."""
  elsewhere = {**asked, 'directory': '/not/on/this/host'}
  assert writer.can_write(elsewhere, 1, 2)
  values = tensors(version.step)

  def leaves(number):
    names = writer.names(number, 2)
    return [(e.unrolled, values[e.hf]) for e in entries(MODEL.spec) if e.unrolled in names]

  async def reports():
    return [None, writer.write(elsewhere, 1, 2, leaves(1))]

  async def decide(decision):
    raise AssertionError('whole weights need no decision')

  shares = SharedWrite(order=asked, count=2, reports=reports, decide=decide)
  return Weights(version=version, leaves=leaves(0), probe=weights(version).probe, shares=shares)


def test_shares_of_processes_on_other_hosts_are_fetched_from_them(tmp_path, monkeypatch):
  sent = collections.Counter()
  send = server_module.send_range

  async def counting(request, path, asked):
    sent[path.name, path.is_relative_to(tmp_path)] += asked.stop - asked.start
    return await send(request, path, asked)

  monkeypatch.setattr(server_module, 'send_range', counting)
  source = fronts.config(tmp_path)

  async def main():
    writer = VllmShareWriter(MODEL.spec)
    async with attached(tmp_path, ['one', 'two'], source=source) as hosts:
      for version in (A, B, C):
        await hosts.fleet.load(shared(hosts.fleet, version, await hosts.fleet.begin_load(), writer))
        assert versions(await wave(hosts.fleet)) == {version}
      publication = hosts.fleet._updates.current.publication
      for place in hosts.places:
        assert await place.digests() == publication.digests
      assert [path.name for path in publication.directory.glob('*.safetensors')] == [FILE]
      # Each share is sent by the process that has it, once for both hosts.
      sizes = {(FILE, True), ('weights-1.safetensors', False)}
      assert set(sent) == sizes
      total = sum(file.stat().st_size for file in pathlib.Path(hosts.loaded[0][-1]).iterdir())
      assert sum(sent.values()) == 3 * total
      # The version before is kept until the next one is written.
      assert len([path for path in writer._folder.iterdir() if path.is_dir()]) <= 3
    writer._server.close()

  run(main)
