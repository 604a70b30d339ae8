"""A replica on a CPU takes adapters: the probe waits for the requests in flight."""

import asyncio
import json
import pathlib

import numpy as np
import pytest

from jaxrl_llm.core.records.sample import Finish
from jaxrl_llm.core.types import Version
from jaxrl_llm.models.families import tiny
from jaxrl_llm.rollout.api import Completion, Probe, Request
from jaxrl_llm.rollout.vllm import replica
from jaxrl_llm.rollout.vllm.publication import (
  Publication,
  PublicationFolder,
  digest,
  read_published,
)
from jaxrl_llm.rollout.vllm.replica import Replica, Requirements, Unproven
from jaxrl_llm.rollout.vllm.transfer import FileTransfer, slice_of
from jaxrl_llm.rollout.vllm.workload import prefixes
from jaxrl_llm.weights.checksums import Slice
from jaxrl_llm.weights.tables import entries

BASE = Publication(version=Version(0, 0), directory=pathlib.Path('base'), files={}, nbytes=0)
ADAPTER = Publication(
  version=Version(0, 1), directory=pathlib.Path('adapter'), files={}, nbytes=0, base=BASE
)
PROBE = Probe(sequences=np.ones((1, 3), np.int32), logprobs=np.zeros((1, 3), np.float32))
REQUEST = Request(uid='a', prompt=(1,), max_tokens=4, key=(0,))
COMPLETION = Completion(
  tokens=np.ones(0, np.int32), logprobs=np.ones(0, np.float32), finish=Finish.STOP, segments=()
)


class Server:
  """Stands in for the client of a server, and for the way that weights come into it; writes down
  what is asked.
  """

  address, adapter, backend = 'http://127.0.0.1:9', None, 'files'

  def __init__(self, device):
    self.calls: list[str] = []
    self.generating = self.probing = self.most_probing = 0
    self.logprobs = [0.0]
    """Logprobs of the tokens of each sequence of the probe, keyed by its first token - 1."""
    self.may_end = asyncio.Event()
    self._device = device

  async def weights(self):
    return [{'tensors': {}, 'device': self._device}]

  async def max_model_len(self):
    return 8

  async def is_healthy(self):
    return True

  async def connect(self, client): ...

  async def warm_up(self, *, sampled, deadline_s): ...

  async def generate(self, request, index, *, seed, deadline_s):
    self.generating += 1
    if request is not REQUEST:
      self.calls.append(f'generate {request.max_tokens}')
    try:
      await self.may_end.wait()
      return COMPLETION
    finally:
      self.generating -= 1

  async def prompt_logprobs(self, tokens, *, deadline_s):
    self.calls.append(f'probe beside {self.generating}')
    self.probing += 1
    self.most_probing = max(self.most_probing, self.probing)
    await asyncio.sleep(0)
    self.probing -= 1
    return np.full(len(tokens), self.logprobs[max(tokens[0] - 1, 0)], np.float32)

  async def digests(self, *, deadline_s):
    self.calls.append('digests')
    return [{}]

  async def checksums(self, *, deadline_s):
    self.calls.append('checksums')
    return [{}]

  async def send(self, client, publication, *, deadline_s):
    self.calls.append(f'send {publication.version}')

  async def set_version(self, publication): ...

  async def reset_cache(self): ...

  async def pause(self): ...

  async def resume(self):
    self.calls.append('resume')


async def admitted(device: str):
  server = Server(device)
  replica = Replica('vllm-0', client=server, server=None, transfer=server)
  await replica.admit(Requirements(shapes={}, dtype='float32', max_length=8))
  server.calls.clear()
  return server, replica


async def begun(publication: Publication, *, device: str = 'cpu'):
  """(server, replica, its two requests in flight, the task that takes the publication), after the
  server resumed.
  """
  server, replica = await admitted(device)
  requests = [
    asyncio.create_task(replica.generate(REQUEST, i, seed=0, deadline_s=60)) for i in range(2)
  ]
  while server.generating < 2:
    await asyncio.sleep(0)
  take = asyncio.create_task(replica.take(publication, PROBE, tolerance=1e-3, deadline_s=60))
  while 'resume' not in server.calls:
    await asyncio.sleep(0)
  for _ in range(20):  # Whatever does not wait for anything happens.
    await asyncio.sleep(0)
  return server, replica, requests, take


def test_adapters_are_probed_when_no_request_is_in_flight():
  async def main():
    server, replica, requests, take = await begun(ADAPTER)
    assert server.calls == ['send 0.0', 'send 0.1', 'digests', 'resume'] and not take.done()
    requests[0].cancel()  # A request that is given up counts no longer.
    server.may_end.set()
    await take
    assert server.calls[4:] == ['probe beside 0'] and replica.proven == {ADAPTER.version}
    assert await requests[1] is COMPLETION

  asyncio.run(main())


@pytest.mark.parametrize(('publication', 'device'), [(BASE, 'cpu'), (ADAPTER, 'cuda')])
def test_whole_weights_and_those_on_other_devices_are_probed_beside_them(publication, device):
  async def main():
    server, replica, requests, take = await begun(publication, device=device)
    await take
    proof = 'checksums' if device == 'cuda' else 'digests'
    assert server.calls[-3:] == [proof, 'resume', 'probe beside 2'] and replica.proven == {
      publication.version
    }
    server.may_end.set()
    await asyncio.gather(*requests)

  asyncio.run(main())


TWO = Probe(
  sequences=np.array([[1, 1, 1], [2, 2, 2]], np.int32), logprobs=np.zeros((2, 3), np.float32)
)


@pytest.mark.parametrize(
  ('publication', 'device', 'most'), [(BASE, 'cpu', 2), (ADAPTER, 'cuda', 2), (ADAPTER, 'cpu', 1)]
)
def test_sequences_of_a_probe_are_computed_together_but_for_adapters_on_cpus(
  publication, device, most
):
  async def main():
    server, replica = await admitted(device)
    server.logprobs = [0.0, 0.0]
    await replica.take(publication, TWO, tolerance=1e-3, deadline_s=60)
    assert server.most_probing == most and replica.proven == {publication.version}

  asyncio.run(main())


@pytest.mark.parametrize('logprobs', [[0.0, 0.1], [-0.1, 0.0], [0.0, np.nan], [np.nan, 0.0]])
def test_each_sequence_of_a_probe_must_agree(logprobs):
  async def main():
    server, replica = await admitted('cpu')
    server.logprobs = logprobs
    with pytest.raises(Unproven, match='logprobs of the probe differ'):
      await replica.take(BASE, TWO, tolerance=1e-3, deadline_s=60)
    assert replica.version is None and not replica.proven

  asyncio.run(main())


@pytest.mark.parametrize(
  ('adapter', 'calls'), [(None, ['probe beside 0']), (ADAPTER, ['generate 1'])]
)
def test_a_server_with_adapters_is_asked_for_a_token_and_no_prompt_logprobs(adapter, calls):
  async def main():
    server, replica = await admitted('cpu')
    server.adapter = adapter
    server.may_end.set()
    assert await replica.is_alive(deadline_s=60) and server.calls == calls

  asyncio.run(main())


@pytest.mark.parametrize('is_lost', [False, True])
def test_prompts_that_the_server_no_longer_has_in_its_cache_are_forgotten(is_lost):
  async def main():
    _, replica = await admitted('cpu')
    recent, received = replica.workload.recent, prefixes(tuple(range(32)))
    recent.add(received)
    assert recent.shared(received) == 32
    if is_lost:
      replica.forget()
    else:
      await replica.take(BASE, PROBE, tolerance=1e-3, deadline_s=60)
    assert recent.shared(received) == 0

  asyncio.run(main())


def test_a_workers_digests_are_known_from_the_writing_and_read_only_for_a_new_worker(
  tmp_path, monkeypatch
):
  spec = tiny('qwen3', 11)
  leaves = [(entry.unrolled, np.ones(entry.shape, np.float32)) for entry in entries(spec)]
  halves = {
    entry.hf: {'shape': [entry.shape[0] // 2, *entry.shape[1:]], 'slice': [0, 0]}
    if len(entry.shape) == 2
    else {'shape': list(entry.shape), 'slice': None}
    for entry in entries(spec)
  }
  cuts = {name: {cut} for name, tensor in halves.items() if (cut := slice_of(tensor)) is not None}
  folder = PublicationFolder(tmp_path / 'w', spec, dtype='float32')
  known = folder.write(Version(0, 1), leaves, slices=cuts, checksums=True)
  unknown = folder.write(Version(0, 2), leaves)
  read = []
  monkeypatch.setattr(
    replica, 'read_published', lambda *args: read.append(args) or read_published(*args)
  )
  for checksums in (False, True):
    wanted = replica._expected(known, halves, checksums=checksums)
    assert len(wanted) == len(halves) and not read
    assert replica._expected(unknown, halves, checksums=checksums) == wanted
    assert {len(value) for value in wanted.values()} == {16 if checksums else 32}
    assert len(read) == 1
    read.clear()


def test_workers_are_told_the_digests_of_slices_if_there_are_any(tmp_path):
  spec = tiny('qwen3', 11)
  leaves = [(entry.unrolled, np.ones(entry.shape, np.float32)) for entry in entries(spec)]
  folder = PublicationFolder(tmp_path / 'w', spec, dtype='float32')
  whole = folder.write(Version(0, 1), leaves)
  cut = folder.write(
    Version(0, 2), leaves, slices={'model.norm.weight': {Slice(0, 8, 4), Slice(0, 0, 8)}}
  )
  infos = []

  class Client:
    async def init_transfer(self, info): ...

    async def weights(self):
      held = {'shape': [4], 'dtype': 'float32', 'slice': [0, 8]}
      return [{'tensors': {'model.norm.weight': held}}]

    async def start_update(self): ...

    async def update_weights(self, info, *, deadline_s):
      infos.append(info)

    async def finish_update(self): ...

  async def send(publication):
    transfer = FileTransfer()
    await transfer.connect(Client())
    await transfer.send(Client(), publication, deadline_s=60)

  for publication in (whole, cut):
    asyncio.run(send(publication))
  wanted = digest(np.ones(4, np.float32))
  assert 'slices' not in infos[0]
  assert infos[1]['slices'] == {'model.norm.weight': [[0, 8, 4, wanted]]}
  json.dumps(infos)
