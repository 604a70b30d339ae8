"""Fake servers whose workers receive weights as vLLM's NCCL engine does, over gloo."""

import asyncio
import base64
import json
import os
import pathlib
import subprocess

import gloo_nccl
import ml_dtypes
import numpy as np
import serving
import torch
from aiohttp import web
from fake_vllm import FakeServer
from fake_vllm.requests import read_json
from fake_vllm.weights import Worker, WorkerError
from paths import SUPPORT


class Receiver:
  """Workers of one server that all receive whole tensors.

  Attributes:
    received: names of the tensors of each update.
    stalls: whether the workers do not take part in broadcasts.
    alter: function of the received tensors that may change them.
  """

  def __init__(self, workers=1):
    self.received, self.stalls, self.alter = [], False, lambda tensors: None
    self._count = workers
    self._members = []

  def join(self, info):
    assert set(info) == {'nccl_unique_id_b64', 'rank_offset', 'world_size', 'packed'}
    assert info['world_size'] == info['rank_offset'] + self._count and info['packed'] is False
    unique_id = base64.b64decode(info['nccl_unique_id_b64'], validate=True)
    assert len(unique_id) == 128
    # The fake server has one worker; a gloo group of more is not needed here.
    self._members = [gloo_nccl.join(unique_id, info['rank_offset'], info['world_size'])]

  def receive(self, info):
    self.received.append(info['names'])
    tensors = {}
    for name, dtype, shape in zip(info['names'], info['dtype_names'], info['shapes'], strict=True):
      tensor = torch.empty(shape, dtype=getattr(torch, dtype))
      self._members[0].broadcast(tensor, 0)
      tensors[name] = array_of(tensor)
    self.alter(tensors)
    return tensors


def array_of(tensor):
  if tensor.dtype == torch.bfloat16:
    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
  return tensor.numpy()


class _Worker(Worker):
  def __init__(self, core, receiver):
    super().__init__(core, device='cuda')
    self.receiver, self._receives = receiver, asyncio.Event()

  async def update(self, info):
    if not self._updating:
      raise WorkerError('start_weight_update must be called before update_weights.')
    if self.receiver.stalls:
      await asyncio.Event().wait()
    await self._core.load(await asyncio.to_thread(self.receiver.receive, info))


class NcclServer(FakeServer):
  """Server whose worker receives weights with a `Receiver`."""

  def __init__(self, backend, receiver, **fields):
    super().__init__(backend, **fields)
    self.receiver = receiver
    self._worker = _Worker(self._core, receiver)

  async def _init_transfer(self, request: web.Request) -> web.Response:
    info = (await read_json(request, init_info=dict))['init_info']
    await asyncio.to_thread(self.receiver.join, info)
    return web.json_response({'message': 'Weight transfer initialized'})


class VllmReceiver(Receiver):
  """A worker with vLLM's own NCCL engine, in a process of vLLM's environment."""

  def __init__(self):
    super().__init__()
    self._process = subprocess.Popen(
      [pathlib.Path(serving.ENVIRONMENT) / 'bin' / 'python', SUPPORT / 'vllm_receiver.py'],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env={**os.environ, 'HF_HUB_OFFLINE': '1', 'PYTHONPATH': ''},
    )
    assert self._process.stdout.readline() == 'null\n', 'its error is on stderr'

  def join(self, info):
    self._call('init_transfer_engine', info)

  def receive(self, info):
    self.received.append(info['names'])
    loaded = self._call('update_weights', info)
    assert [name for name, _ in loaded] == info['names']
    return {
      name: np.frombuffer(bytes.fromhex(data), ml_dtypes.bfloat16).reshape(shape)
      for (name, data), shape in zip(loaded, info['shapes'], strict=True)
    }

  def _call(self, method, given):
    self._process.stdin.write(json.dumps([method, given]) + '\n')
    self._process.stdin.flush()
    answer = json.loads(self._process.stdout.readline())
    if isinstance(answer, dict):
      raise WorkerError(answer['error'])
    return answer

  def close(self):
    self._process.kill()
    self._process.communicate()
