"""Eight serving hosts and a trainer, each behind a link of 100 Mb/s, fetch 64 MB: what each link
carries, and what a cut link and wrong bytes cost.
"""

import asyncio
import contextlib
import json
import pathlib
import subprocess
import sys
import time

import fronts
import links
import numpy as np
import pytest

from jaxrl_llm.core.net.front import Front
from jaxrl_llm.core.net.token_server import FrontConfig
from jaxrl_llm.core.types import Version
from jaxrl_llm.models.families import tiny
from jaxrl_llm.rollout.vllm.client import VllmClient
from jaxrl_llm.rollout.vllm.publication import FILE, PublicationFolder
from jaxrl_llm.rollout.vllm.pull import store as store_module
from jaxrl_llm.rollout.vllm.pull.distributor import Distributor
from jaxrl_llm.rollout.vllm.pull.orders import PULL_PATH
from jaxrl_llm.rollout.vllm.pull.store import Store
from jaxrl_llm.weights.tables import entries

pytestmark = pytest.mark.acceptance

HOSTS, RATE, PORT = 8, 100e6 / 8, 8400
SPEC = tiny(
  'qwen3',
  8192,
  num_hidden_layers=2,
  hidden_size=768,
  intermediate_size=2048,
  num_attention_heads=8,
  head_dim=64,
  tie_word_embeddings=True,
)


def listening(folder: str, address: str) -> FrontConfig:
  return FrontConfig(
    host=address,
    port=PORT,
    token_file=f'{folder}/token',
    tls_cert=f'{folder}/cert.pem',
    tls_key=f'{folder}/key.pem',
  )


def host(folder: str, number: int, address: str, flips: int) -> None:
  """Runs a host until its input ends. The first `flips` parts that it passes on are wrong."""
  store_module._SILENCE_S, store_module._WAIT_S = 3.0, 1.0
  send, left = store_module.send_range, [flips]

  async def flipping(request, path, asked):
    if left[0] <= 0:
      return await send(request, path, asked)
    left[0] -= 1
    wrong = bytearray(path.read_bytes())
    wrong[(asked.start + asked.stop) // 2] ^= 1
    other = path.with_name(f'{asked.start}.wrong')
    other.write_bytes(wrong)
    try:
      return await send(request, other, asked)
    finally:
      other.unlink()

  store_module.send_range = flipping

  async def main():
    store = Store(
      pathlib.Path(folder) / f'host-{number}', key=fronts.TOKEN, ca_file=f'{folder}/cert.pem'
    )
    front = Front(
      listening(folder, address), upstream='unix:/nothing/there', handlers=store.handlers
    )
    async with front:
      print('ready', flush=True)
      await asyncio.to_thread(sys.stdin.read)
    await store.close()

  asyncio.run(main())


def trainer(folder: str, address: str, addresses: list[str]) -> None:
  """Publishes a version for each line of input, and prints how long the hosts took."""

  async def main():
    folder_of_versions = PublicationFolder(
      pathlib.Path(folder) / 'published', SPEC, dtype='float32', source=FrontConfig()
    )
    source = Distributor(listening(folder, address))
    clients = {}
    for each in addresses:
      client = VllmClient(
        f'https://{each}:{PORT}', key=fronts.TOKEN, ca_file=f'{folder}/cert.pem', name=each
      )
      answer = await client.call('GET', PULL_PATH)
      name = answer['host']
      await source.join(name, answer['store'], client)
      await source.check(client, deadline_s=60)
      clients[name] = client
    for step in range(1, 100):
      random = np.random.default_rng(step)
      leaves = [
        (entry.unrolled, random.standard_normal(entry.shape, np.float32)) for entry in entries(SPEC)
      ]
      publication = folder_of_versions.write(Version(0, step), leaves)
      print(json.dumps({'nbytes': publication.nbytes}), flush=True)
      if not await asyncio.to_thread(sys.stdin.readline):
        break
      began = time.monotonic()
      places = await asyncio.gather(
        *(source.pull(name, publication, deadline_s=300) for name in clients)
      )
      seconds = time.monotonic() - began
      files = [str(pathlib.Path(*place.values()) / FILE) for place in places]
      told = {'seconds': seconds, 'files': files, 'from': str(publication.directory / FILE)}
      print(json.dumps(told), flush=True)
    for client in clients.values():
      await source.leave(client)
      await client.close()

  asyncio.run(main())


def certificate(folder: pathlib.Path, addresses: list[str]) -> None:
  names = ','.join(f'IP:{address}' for address in addresses)
  made = f'req -x509 -newkey rsa:2048 -nodes -keyout {folder}/key.pem -out {folder}/cert.pem'
  command = f'openssl {made} -days 2 -subj /CN=test -addext subjectAltName={names}'
  subprocess.run(command.split(), check=True, capture_output=True)


class Network:
  """The hosts and the trainer of a test."""

  def __init__(self, around: links.Links, process: subprocess.Popen):
    self.links, self._trainer = around, process
    self.nbytes = self._read()['nbytes']

  def _read(self) -> dict:
    return json.loads(self._trainer.stdout.readline())

  @contextlib.contextmanager
  def publishing(self):
    """Publishes a version around the block. Yields what it took, which is filled in at the end."""
    before = [self.links.counters(i) for i in range(HOSTS + 1)]
    self._trainer.stdin.write('\n')
    self._trainer.stdin.flush()
    result = {}
    yield result
    result |= self._read()
    after = [self.links.counters(i) for i in range(HOSTS + 1)]
    copies = [
      tuple((b - a) / self.nbytes for a, b in zip(one, two, strict=True))
      for one, two in zip(before, after, strict=True)
    ]
    result['sent'], result['received'] = zip(*copies, strict=True)
    data = pathlib.Path(result['from']).read_bytes()
    assert len(set(result['files'])) == HOSTS
    assert all(pathlib.Path(file).read_bytes() == data for file in result['files'])
    self._read()  # The next version is written.


@pytest.fixture
def network(tmp_path):
  (tmp_path / 'token').write_text(f'{fronts.TOKEN}\n')
  (tmp_path / 'token').chmod(0o600)
  with links.star(HOSTS + 1, '100mbit') as around, contextlib.ExitStack() as stack:
    addresses = [around.address(i) for i in range(HOSTS + 1)]
    certificate(tmp_path, addresses)
    folder, processes = str(tmp_path), []
    for i in range(HOSTS):
      flips = 2 if i == 5 else 0
      processes.append(around.start(i, __name__, 'host', folder, i, addresses[i], flips))
    for process in processes:
      stack.callback(process.wait)
      stack.callback(process.kill)
      assert process.stdout.readline() == 'ready\n'
    last = around.start(HOSTS, __name__, 'trainer', folder, addresses[HOSTS], addresses[:HOSTS])
    stack.callback(last.wait)
    stack.callback(last.kill)
    yield Network(around, last)


def test_no_link_carries_more_than_the_weights(network):
  # The first version also shows what wrong bytes cost: a host passes two parts on wrongly.
  with network.publishing() as wrong:
    pass
  print('with wrong bytes:', json.dumps(wrong))
  with network.publishing() as result:
    pass
  print('undisturbed:', json.dumps(result), 'at least', network.nbytes / RATE, 's')
  assert max(result['sent']) <= 1.1 and max(result['received'][:HOSTS]) <= 1.1
  assert result['sent'][HOSTS] <= 1.1 and wrong['sent'][HOSTS] <= 1.15
  with network.publishing() as cut:
    time.sleep(2)
    network.links.cut(3, off=True)
    time.sleep(8)
    network.links.cut(3, off=False)
  print('with a link that is cut for 8 s:', json.dumps(cut))
  # What had arrived on either side of the cut is not fetched again.
  assert cut['received'][3] <= 1.25 and cut['sent'][HOSTS] <= 1.25
