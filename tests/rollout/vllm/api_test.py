"""The protocol of a fleet's servers, by servers that are no vLLM: each an embedded engine behind
published files.
"""

import asyncio
import dataclasses

import engine_contract
import numpy as np
import pytest
import serving

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.rollout.api import Weights
from jaxrl_llm.rollout.embedded.engine import EmbeddedConfig, EmbeddedEngine
from jaxrl_llm.rollout.vllm.api import EngineServer, ServerProcess
from jaxrl_llm.rollout.vllm.client import Lost, Refused, VllmClient
from jaxrl_llm.rollout.vllm.publication import digest, read_checked
from jaxrl_llm.rollout.vllm.replica import Replica, ReplicaState
from jaxrl_llm.rollout.vllm.server import OwnedServer
from jaxrl_llm.rollout.vllm.transfer import Transfer
from jaxrl_llm.weights.checksums import checksums
from jaxrl_llm.weights.layout import from_hf
from jaxrl_llm.weights.tables import entries

MODEL = serving.model_of('qwen2', tied=True)
CONFIG = EmbeddedConfig(
  slots=8, prefill_rows=2, prefill_buckets=(16, 400), decode_steps=8, filters=False
)


class EmbeddedServer:
  """A server in this process: access to it, its process, and the way that weights come into it."""

  backend, address, adapter = 'files', 'here', None

  def __init__(self, name, thread):
    self.name, self._thread = name, thread
    self.engine = None
    self._label = 'none'
    self.starts = 0
    self.lost = False
    """Whether it answers no more requests, as after a crash."""
    self.tensors = {entry.hf: np.zeros(entry.shape, np.float32) for entry in entries(MODEL.spec)}

  def start(self):
    self.starts += 1
    self.lost, self._label = False, 'none'
    self.engine = EmbeddedEngine(
      MODEL, CONFIG, max_length=serving.LENGTH, seed=3, run=self._thread.run, name=self.name
    )

  async def ready(self, *, deadline_s):
    await self.engine.start()

  def is_running(self):
    return self.engine is not None

  async def stop(self):
    if self.engine is not None:
      await self.engine.close()
      self.engine = None

  close = stop

  async def connect(self, client): ...

  async def send(self, client, publication, *, deadline_s):
    try:
      tensors = read_checked(publication.files, publication.directory)
    except ValueError as error:
      raise Refused(str(error)) from None
    params = from_hf(tensors.items(), MODEL.spec, scan_layers=False, dtype='float32')
    await self.engine.load(Weights.of(params, publication.version))
    self.tensors, self.params = {name: array.copy() for name, array in tensors.items()}, params

  async def is_healthy(self):
    return self.engine is not None and not self.lost

  async def max_model_len(self):
    return serving.LENGTH

  async def weights(self):
    held = {
      n: {'shape': list(t.shape), 'dtype': t.dtype.name, 'slice': None}
      for n, t in self.tensors.items()
    }
    return [{'tensors': held, 'device': 'here'}]

  async def warm_up(self, *, sampled, deadline_s): ...

  async def generate(self, request, index, *, seed, deadline_s):
    if self.lost:
      raise Lost(f'{self.name}: crashed')
    asked = dataclasses.replace(request, samples=1, key=(*request.key, index))
    ((_, completion),) = [found async for found in self.engine.generate(asked)]
    return completion

  async def prompt_logprobs(self, tokens, *, deadline_s):
    return (await asyncio.to_thread(serving.forward, MODEL, self.params, tokens)).astype(np.float32)

  async def pause(self): ...  # `EmbeddedEngine.load` does both.

  async def resume(self): ...

  async def reset_cache(self): ...

  async def digests(self, *, deadline_s):
    return [{name: digest(tensor) for name, tensor in self.tensors.items()}]

  async def checksums(self, *, deadline_s):
    return [{name: checksums(tensor)[None] for name, tensor in self.tensors.items()}]

  async def set_version(self, publication):
    self._label = publication.label

  async def served_label(self):
    return self._label

  async def tokenize(self, text):
    return None


def fleet_over(servers, folder, **config):
  replicas = [Replica(s.name, client=s, server=s, transfer=s) for s in servers]
  return serving.fleet_of(MODEL, replicas, folder, **config)


def test_whoever_provides_the_protocol_is_an_engine_of_the_contract(tmp_path):
  async def main():
    thread = DeviceThread()
    servers = [EmbeddedServer(f'embedded-{i}', thread) for i in range(2)]
    async with fleet_over(servers, tmp_path) as fleet:
      await engine_contract.hold(fleet, MODEL, atol=1e-4)
      assert fleet.counts['completions'] and not fleet.counts['retries']
      await engine_contract.hold_closed(fleet)
    assert not any(server.is_running() for server in servers)

  asyncio.run(main())


def test_a_lost_server_is_started_again_and_is_sent_the_version(tmp_path):
  async def main():
    server = EmbeddedServer('embedded-0', DeviceThread())
    async with fleet_over([server], tmp_path, max_restarts=2) as fleet:
      await fleet.load(serving.weights(MODEL, 1, engine_contract.A))
      before = await serving.ask(fleet, serving.request(1))
      server.lost = True
      again = await serving.ask(fleet, serving.request(1))
      assert again[0].tokens.tolist() == before[0].tokens.tolist()
      assert (server.starts, fleet.counts['restarts'], fleet.replicas[0].state) == (
        2,
        1,
        ReplicaState.SERVING,
      )

  asyncio.run(main())


def test_a_server_that_suits_no_run_is_refused_before_it_joins(tmp_path):
  class Short(EmbeddedServer):
    async def max_model_len(self):
      return serving.LENGTH - 1

  async def main():
    async with fleet_over([Short('short', DeviceThread())], tmp_path):
      raise AssertionError('it joined')

  with pytest.raises(UserError, match=r'engine short .*max_model_len is 399, the run needs 400'):
    asyncio.run(main())


def test_vllms_servers_provide_the_protocols():
  client = VllmClient('http://127.0.0.1:9')
  assert isinstance(client, EngineServer) and issubclass(OwnedServer, ServerProcess)
  here = EmbeddedServer('a', None)
  assert all(isinstance(here, protocol) for protocol in (EngineServer, ServerProcess, Transfer))
