"""Weights from the trainer's device memory: what the servers prove, what NCCL is called with, what
is refused before anything moves, and what is lost.

NCCL and the CUDA driver need GPUs. Their stand-ins have the same C functions, and move the memory
of CPU arrays over gloo. One test has vLLM's own NCCL engine at the other end.
"""

import asyncio
import contextlib
import dataclasses
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip('torch')

import serving
from fake_vllm import Fault, Scripted
from fleets import hasten, run, until
from gloo_nccl import GlooLibraries
from nccl_serving import NcclServer, Receiver, VllmReceiver
from parameters import random_params

from jaxrl_llm.app.schema import RolloutConfig
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.client import Lost, Refused
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.core.types import Version
from jaxrl_llm.learner.state import place_params
from jaxrl_llm.models.api import build_model, stack_layers
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.rollout.gatherer import Gatherer
from jaxrl_llm.rollout.publisher import Publisher
from jaxrl_llm.rollout.vllm.client import VllmClient
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.vllm.device_transfer import DeviceFeed, DeviceTransfer, check_fit
from jaxrl_llm.rollout.vllm.nccl import Libraries
from jaxrl_llm.rollout.vllm.publication import FILE, PublicationFolder
from jaxrl_llm.rollout.vllm.replica import Replica, ReplicaState, Unproven
from jaxrl_llm.rollout.whole_arrays import WholeArrays
from jaxrl_llm.weights.tables import entries

pytestmark = pytest.mark.full

SPEC = tiny('qwen2', serving.VOCAB, num_hidden_layers=2, tie_word_embeddings=False)
SHAPES = {entry.hf: entry.shape for entry in entries(SPEC)}
START, UPDATE, FINISH = '/start_weight_update', '/update_weights', '/finish_weight_update'
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def nothing():
  """Tensors of a server before its first version."""
  return {name: np.zeros(shape, BFLOAT16) for name, shape in SHAPES.items()}


class Trainer:
  """A trainer's parameters, sharded over eight devices and stacked, and their publications."""

  def __init__(self, folder):
    self.device = DeviceThread()
    self.mesh = build_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    self._model = build_model(SPEC, ModelOptions(scan_layers=True), self.mesh)
    self.gatherer = Gatherer(self.mesh, dtype='bfloat16', part_bytes=1)
    self.feed = DeviceFeed(SPEC, 'bfloat16', jax.devices()[0], self.device.run)
    self._folder = PublicationFolder(folder / 'published', SPEC, dtype='bfloat16')

  def params(self, step):
    return place_params(self._model, self.mesh, stack_layers(random_params(SPEC, step)))

  def publish(self, step, *, offer=True):
    params = self.params(step)
    leaves = self.gatherer.leaves(params)
    publication = self._folder.write(Version(0, step), leaves, checksums=True)
    if offer:
      self.feed.offer(publication.label, WholeArrays(self.gatherer).of(params))
    return publication


@dataclasses.dataclass
class Connected:
  """A server, with a transfer to it from the trainer's memory."""

  trainer: Trainer
  server: NcclServer
  client: VllmClient
  transfer: DeviceTransfer
  libraries: GlooLibraries
  replica: Replica

  async def take(self, publication):
    await self.replica.take(publication, None, tolerance=1.0, deadline_s=60)

  def requests(self):
    return {path: self.server.requests[path] for path in (START, UPDATE, FINISH)}


@contextlib.asynccontextmanager
async def connected(folder, receiver=None):
  backend, libraries = Scripted(lambda *_: ([], []), nothing()), GlooLibraries()
  server = NcclServer(backend, receiver or Receiver(), max_model_len=8, vocab_size=serving.VOCAB)
  client = VllmClient(await server.start(uds=str(folder / 's')), name='vllm-0')
  trainer = Trainer(folder)
  transfer = DeviceTransfer(trainer.feed, lambda: Libraries(libraries.nccl, libraries.driver))
  replica = Replica('vllm-0', client=client, server=None, transfer=transfer)
  try:
    replica.slices = [worker['tensors'] for worker in await client.weights()]
    await transfer.connect(client)
    yield Connected(trainer, server, client, transfer, libraries, replica)
  finally:
    await transfer.close()
    await client.close()
    await server.close()
    trainer.device.close()


def same_bits(held, step):
  wanted = {e.hf: flatten(random_params(SPEC, step))[e.unrolled] for e in entries(SPEC)}
  return held.keys() == wanted.keys() and all(
    held[name].tobytes() == array.astype(BFLOAT16).tobytes() for name, array in wanted.items()
  )


def test_a_server_proves_what_it_received_from_the_devices(tmp_path):
  async def main():
    async with connected(tmp_path) as c:
      assert c.libraries.calls == [('join', 2), ('all-reduce', 1)], 'as vLLM documents it'
      for step in (1, 2):
        c.libraries.calls.clear()
        publication = c.trainer.publish(step)
        # The files are not read.
        (publication.directory / FILE).unlink()
        await c.take(publication)
        assert c.replica.version == Version(0, step) and not c.server.paused
        assert same_bits(c.server._core.backend.tensors, step)
        names = c.server.receiver.received[-1]
        assert set(names) == set(SHAPES)
        layers = [next((int(p) for p in name.split('.') if p.isdigit()), -1) for name in names]
        assert layers == sorted(layers), 'a worker completes one layer after the other'
        assert c.libraries.calls == [
          ('broadcast', int(np.prod(SHAPES[name])), 'bfloat16') for name in names
        ]
      assert c.requests() == {START: 2, UPDATE: 2, FINISH: 2}

  asyncio.run(main())


@pytest.mark.acceptance
def test_vllms_own_engine_receives_the_tensors(tmp_path):
  """Over gloo instead of NCCL; the tensors are loaded in the order in which they were sent."""
  if not pathlib.Path(serving.ENVIRONMENT).exists():
    pytest.skip(f'{serving.ENVIRONMENT} is not there')

  async def main():
    with contextlib.closing(VllmReceiver()) as receiver:
      async with connected(tmp_path, receiver) as c:
        for step in (1, 2):
          await c.take(c.trainer.publish(step))
          assert same_bits(c.server._core.backend.tensors, step)

  asyncio.run(main())


def test_what_was_altered_on_the_way_is_not_proven(tmp_path):
  def alter(tensors):
    tensors['model.norm.weight'].view(np.uint16)[3] ^= 1

  async def main():
    async with connected(tmp_path) as c:
      await c.take(c.trainer.publish(1))
      c.server.receiver.alter = alter
      with pytest.raises(Unproven, match=r'1 of .* loaded tensors differ.*model\.norm\.weight'):
        await c.take(c.trainer.publish(2))
      assert c.server.paused and c.replica.version is None

  asyncio.run(main())


def test_a_server_that_comes_back_gets_the_files_which_are_verified_first(tmp_path):
  async def main():
    async with connected(tmp_path) as c:
      publication = c.trainer.publish(1)
      c.trainer.feed.withdraw()
      await c.take(publication)
      assert same_bits(c.server._core.backend.tensors, 1)
      # Another version is offered.
      other = c.trainer.publish(2)
      c.trainer.publish(3)
      await c.take(other)
      assert same_bits(c.server._core.backend.tensors, 2)
      before = c.requests()
      damaged = c.trainer.publish(4, offer=False)
      data = bytearray((damaged.directory / FILE).read_bytes())
      data[-1] ^= 1
      (damaged.directory / FILE).write_bytes(data)
      with pytest.raises(Refused, match='as read, announced was'):
        await c.take(damaged)
      assert c.requests() == before and c.replica.version == Version(0, 2) and not c.server.paused

  asyncio.run(main())


def test_a_model_that_the_tensors_do_not_fit_is_refused_before_any_call(tmp_path):
  async def main():
    async with connected(tmp_path) as c:
      tensors = nothing()
      tensors['model.norm.weight'] = tensors['model.norm.weight'][:3]
      c.server._core.backend.tensors = tensors
      await c.transfer.connect(c.client)
      with pytest.raises(Refused, match=r'model\.norm\.weight: published as \(64,\) bfloat16'):
        await c.transfer.send(c.client, c.trainer.publish(1), deadline_s=60)
      assert c.requests() == {START: 0, UPDATE: 0, FINISH: 0}

  asyncio.run(main())


PART = {'shape': [2, 3], 'dtype': 'bfloat16', 'slice': [0, 2]}


@pytest.mark.parametrize(
  ('shapes', 'dtype', 'reason'),
  [
    ({'w': (4, 3)}, 'bfloat16', None),
    ({'w': (6, 3)}, 'bfloat16', None),
    ({'w': (3, 3)}, 'bfloat16', 'published as'),
    ({'w': (4, 4)}, 'bfloat16', 'published as'),
    ({'w': (4, 3, 1)}, 'bfloat16', 'published as'),
    ({'w': (4, 3)}, 'float32', 'published as'),
    ({'w': (4, 3), 'more': (1,)}, 'bfloat16', 'unknown'),
    ({}, 'bfloat16', 'missing'),
  ],
)
def test_slices_of_workers_fit_whole_tensors_as_far_as_they_reach(shapes, dtype, reason):
  refused = contextlib.nullcontext() if reason is None else pytest.raises(ValueError, match=reason)
  with refused:
    check_fit(shapes, dtype, [{'w': PART}])


def cause(c, how):
  """Lets the next update fail, and returns the error's words."""
  if how == 'the server fails':
    c.server.faults.fault, c.server.faults.path = Fault.INTERNAL_ERROR, UPDATE
    return 'told to fail'
  if how == 'NCCL fails':
    c.libraries.faults['_broadcast'] = 5
    return 'ncclBroadcast: stand-in error'
  if how == 'CUDA fails':
    c.libraries.faults['_query'] = 719
    return 'CUDA error 719'
  if how == 'the server does not take part':
    c.server.receiver.stalls = True
    return 'within 2 s'
  if how == 'the trainer goes on':
    withdraw = c.trainer.feed.withdraw
    c.server.receiver.alter = lambda tensors: None
    started = c.client.start_update

    async def start(**options):
      await started(**options)
      withdraw()

    c.client.start_update = start
    return 'the trainer has gone on'
  raise ValueError(how)


@pytest.mark.parametrize(
  'how',
  [
    'the server fails',
    'NCCL fails',
    'CUDA fails',
    'the server does not take part',
    'the trainer goes on',
  ],
)
def test_an_update_that_fails_is_lost_and_the_group_is_aborted(how, tmp_path):
  async def main():
    async with connected(tmp_path) as c:
      publication = c.trainer.publish(1)
      words = cause(c, how)
      with pytest.raises(Lost, match=words) as lost:
        await c.transfer.send(c.client, publication, deadline_s=2)
      assert '\n' not in str(lost.value)
      assert c.libraries.calls[-1] == ('abort',) and not c.libraries._memory
      with pytest.raises(Lost, match='its NCCL group has ended'):
        await c.transfer.send(c.client, publication, deadline_s=2)

  asyncio.run(main())


def test_an_update_is_lost_even_if_its_group_cannot_be_freed(tmp_path):
  """After an error of a GPU, all calls of CUDA fail."""

  async def main():
    async with connected(tmp_path) as c:
      # The server fails before anything is sent, so its failure ends the group.
      c.server.faults.fault, c.server.faults.path = Fault.INTERNAL_ERROR, START
      c.libraries.faults |= dict.fromkeys(('_abort', '_free', '_nothing'), 5)
      with pytest.raises(Lost, match='told to fail'):
        await c.transfer.send(c.client, c.trainer.publish(1), deadline_s=60)
      assert c.transfer._group is None

  asyncio.run(main())


def test_a_cancelled_update_aborts_the_group(tmp_path):
  async def main():
    async with connected(tmp_path) as c:
      c.libraries.faults['_query'] = 600  # The GPU is never done.
      sending = asyncio.create_task(c.transfer.send(c.client, c.trainer.publish(1), deadline_s=60))
      await until(lambda: c.libraries.calls[-1][0] == 'broadcast')
      sending.cancel()
      with pytest.raises(asyncio.CancelledError):
        await sending
      assert c.libraries.calls[-1] == ('abort',)

  asyncio.run(main())


def test_a_group_that_cannot_be_formed_is_lost_or_refused(tmp_path):
  async def main():
    async with connected(tmp_path) as c:
      c.server.faults.fault, c.server.faults.path = Fault.HANG, '/init_weight_transfer_engine'
      c.libraries.faults['_init'] = 2
      with pytest.raises(Lost, match='ncclCommInitRankConfig: stand-in error'):
        await c.transfer.connect(c.client)
      c.libraries.faults.clear()
      c.server.faults.fault = Fault.INTERNAL_ERROR
      with pytest.raises(Lost, match='told to fail'):
        await c.transfer.connect(c.client)
      assert c.libraries.calls[-1] == ('abort',)
      missing = DeviceTransfer(c.trainer.feed, lambda: Libraries.load(str(tmp_path / 'nccl.so')))
      with pytest.raises(Lost, match=r'vllm-0: NCCL cannot be loaded from .*nccl\.so'):
        await missing.connect(c.client)

  asyncio.run(main())


def test_a_fleet_is_fed_from_the_devices_and_a_restarted_server_from_files(tmp_path, monkeypatch):
  """Built as a job builds it."""
  hasten(monkeypatch)
  made = []

  def load(path):
    assert path == 'libnccl.so.2'
    made.append(GlooLibraries())
    return Libraries(made[-1].nccl, made[-1].driver)

  monkeypatch.setattr(Libraries, 'load', load)

  async def start(number):
    backend = Scripted(lambda *_: ([1] * 8, [0.0] * 8), nothing())
    shape = dict(max_model_len=serving.LENGTH, vocab_size=serving.VOCAB)
    server = NcclServer(backend, Receiver(), **shape)
    await server.start(uds=str(tmp_path / f'{number}.sock'))
    return server

  async def main():
    trainer, servers = Trainer(tmp_path), [await start(0), await start(1)]
    vllm = VllmConfig(
      addresses=tuple(f'unix:{tmp_path / f"{i}.sock"}' for i in range(2)),
      publish_dir=str(tmp_path / 'published'),
      transfer='nccl',
      feed='devices',
      env={'VLLM_NCCL_SO_PATH': 'libnccl.so.2'},
    )
    config = RolloutConfig(
      max_prompt_length=300, max_response_length=serving.LENGTH - 300, engine='vllm', vllm=vllm
    )
    setting = serving.setting_of(SPEC, tmp_path, dtype='bfloat16')
    fleet = config.engine_spec().build(setting, trainer.device.run)
    publisher = Publisher(fleet, trainer.gatherer, trainer.device)
    read = []
    of_files = DeviceFeed._of_files

    async def recorded(feed, publication):
      read.append(publication.version)
      return await of_files(feed, publication)

    monkeypatch.setattr(DeviceFeed, '_of_files', recorded)
    try:
      await fleet.start()
      for step in (1, 2):
        version = Version(0, step)
        await publisher.publish(trainer.params(step), version, moved=version)
        for server in servers:
          assert same_bits(server._core.backend.tensors, step)
      assert len(made) == 2 and not read
      await servers[1].close()
      servers[1] = await start(1)
      fleet._repairs.repair(fleet.replicas[1], 'it was restarted')
      await until(lambda: fleet.replicas[1].state == ReplicaState.SERVING)
      assert same_bits(servers[1]._core.backend.tensors, 2) and read == [Version(0, 2)]
      assert len(made) == 3 and fleet.replicas[1].version == Version(0, 2)
    finally:
      await fleet.close()
      for server in servers:
        await server.close()
      trainer.device.close()

  run(main)


def test_settings_that_cannot_work_are_one_clear_error(tmp_path):
  fits = dict(transfer='nccl', feed='devices', devices=('1', '2'))
  VllmConfig(**fits)
  for changed, words in (
    ({'transfer': 'files'}, r"rollout\.vllm\.feed: 'devices' sends .* is 'files'; set transfer"),
    ({'transfer': 'ipc'}, "is 'ipc'; set transfer to nccl"),
    ({'sender_device': '0'}, r'sender_device: 0, wanted None'),
    ({'devices': ()}, r'rollout\.vllm\.devices is empty'),
  ):
    with pytest.raises(UserError, match=words):
      VllmConfig(**{**fits, **changed})
  lengths = dict(max_prompt_length=8, max_response_length=8)
  spec = RolloutConfig(**lengths, engine='vllm', vllm=VllmConfig(**fits)).engine_spec()
  with pytest.raises(UserError, match=r"sends from NVIDIA GPUs, .* on 'cpu'; set .*feed=files"):
    spec.check_devices(None, jax.devices())
