"""A replica on a CPU takes adapters: the probe waits for the requests in flight."""

import asyncio
import pathlib

import numpy as np
import pytest

from jaxrl_llm.core.types import Version
from jaxrl_llm.experience.sample import Finish
from jaxrl_llm.rollout.api import Completion, Probe, Request
from jaxrl_llm.rollout.replica import Replica
from jaxrl_llm.weights.publication import Publication

BASE = Publication(version=Version(0, 0), directory=pathlib.Path('base'), files={}, nbytes=0)
ADAPTER = Publication(version=Version(0, 1), directory=pathlib.Path('adapter'), files={}, nbytes=0, base=BASE)
PROBE = Probe(sequences=np.ones((1, 3), np.int32), logprobs=np.zeros((1, 3), np.float32))
REQUEST = Request(uid='a', prompt=(1,), max_tokens=4, key=(0,))
COMPLETION = Completion(tokens=np.ones(0, np.int32), logprobs=np.ones(0, np.float32), finish=Finish.STOP, segments=())


class Server:
  """Stands in for the client of a server, and for the way that weights come into it; writes down what is asked."""

  def __init__(self):
    self.calls: list[str] = []
    self.generating = 0
    self.may_end = asyncio.Event()

  async def generate(self, request, index, *, seed, deadline_s):
    self.generating += 1
    try:
      await self.may_end.wait()
      return COMPLETION
    finally:
      self.generating -= 1

  async def prompt_logprobs(self, tokens, *, deadline_s):
    self.calls.append(f'probe beside {self.generating}')
    return np.zeros(len(tokens), np.float32)

  async def digests(self, *, deadline_s):
    return [{}]

  async def send(self, client, publication, *, deadline_s):
    self.calls.append(f'send {publication.version}')

  async def set_version(self, publication): ...

  async def reset_cache(self): ...

  async def pause(self): ...

  async def resume(self):
    self.calls.append('resume')


async def begun(publication: Publication, *, on_cpu: bool = True):
  """(server, replica, its two requests in flight, the task that takes the publication), after the server resumed."""
  server = Server()
  replica = Replica('vllm-0', client=server, server=None, transfer=server)
  replica.slices, replica._on_cpu = [{}], on_cpu
  requests = [asyncio.create_task(replica.generate(REQUEST, i, seed=0, deadline_s=60)) for i in range(2)]
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
    assert server.calls == ['send 0.0', 'send 0.1', 'resume'] and not take.done()
    requests[0].cancel()  # A request that is given up counts no longer.
    server.may_end.set()
    await take
    assert server.calls[3:] == ['probe beside 0'] and replica.proven == {ADAPTER.version}
    assert await requests[1] is COMPLETION

  asyncio.run(main())


@pytest.mark.parametrize(('publication', 'on_cpu'), [(BASE, True), (ADAPTER, False)])
def test_whole_weights_and_those_on_other_devices_are_probed_beside_them(publication, on_cpu):
  async def main():
    server, replica, requests, take = await begun(publication, on_cpu=on_cpu)
    await take
    assert server.calls[-2:] == ['resume', 'probe beside 2'] and replica.proven == {publication.version}
    server.may_end.set()
    await asyncio.gather(*requests)

  asyncio.run(main())
