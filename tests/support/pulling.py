"""Hosts that fetch published weights, for tests: their stores behind real fronts, and a trainer
that sends weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import aiohttp
import fronts
from parameters import random_params

from jaxrl_llm.core.net.front import Front
from jaxrl_llm.core.net.token_server import FrontConfig, TokenServer
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.core.types import Version
from jaxrl_llm.models.families import tiny
from jaxrl_llm.rollout.vllm.client import VllmClient
from jaxrl_llm.rollout.vllm.publication import PublicationFolder
from jaxrl_llm.rollout.vllm.pull import bundle
from jaxrl_llm.rollout.vllm.pull.distributor import Distributor, PullTransfer
from jaxrl_llm.rollout.vllm.pull.orders import PULL_PATH, FetchOrder
from jaxrl_llm.rollout.vllm.pull.ranges import WEIGHTS_PATH, read_range, send_nothing, send_range
from jaxrl_llm.rollout.vllm.pull.store import Store
from jaxrl_llm.rollout.vllm.replica import Replica

HEADERS = {'Authorization': f'Bearer {fronts.TOKEN}'}


def spec_of(layers: int = 2):
  return tiny(
    'qwen3', 11, num_hidden_layers=layers, hidden_size=32, intermediate_size=48, head_dim=16
  )


def published(root: pathlib.Path, step: int = 1, *, spec=None, folder=None, **options):
  """Returns a publication of random weights, and its folder."""
  spec = spec or spec_of()
  folder = folder or PublicationFolder(root, spec, dtype='float32', source=FrontConfig(), **options)
  leaves = flatten(random_params(spec, seed=step)).items()
  return folder.write(Version(0, step), leaves), folder


@dataclasses.dataclass
class Host:
  """A host with a store."""

  store: Store
  address: str

  def client(self) -> VllmClient:
    return VllmClient(self.address, key=fronts.TOKEN, name=self.address)

  async def order(
    self, *bundles, sources=(), stores=(), place=0, keep=(), number=1, origins=None, trainer='a'
  ):
    order = FetchOrder(
      trainer=trainer,
      number=number,
      bundles=bundles,
      sources=tuple(sources),
      origins=origins or {},
      stores=tuple(stores),
      place=place,
      keep=frozenset(keep),
    )
    return await self.send(order.to_json())

  async def send(self, body) -> dict:
    """Sends an order unchanged. Returns the response, together with its status."""
    async with (
      aiohttp.ClientSession(headers=HEADERS) as session,
      session.post(self.address + PULL_PATH, json=body) as response,
    ):
      return {'status': response.status, **await response.json()}

  def content(self, answer: dict, name: str) -> bytes:
    (directory,) = answer['directories'].values()
    return (pathlib.Path(directory) / name).read_bytes()


@contextlib.asynccontextmanager
async def hosts(folder: pathlib.Path, count: int, **options):
  """Yields hosts without shared memory: each has its own directory."""
  async with contextlib.AsyncExitStack() as stack:
    made = []
    for i in range(count):
      store = Store(folder / f'host-{i}', key=fronts.TOKEN, **options)
      stack.push_async_callback(store.close)
      front = Front(fronts.config(folder), upstream='unix:/nothing/there', handlers=store.handlers)
      await stack.enter_async_context(front)
      made.append(Host(store, front.address))
    yield made


@contextlib.asynccontextmanager
async def replicas(folder: pathlib.Path, servers: Sequence, roots: Sequence[pathlib.Path]):
  """Yields replicas whose servers fetch their weights. Each server is behind a front with a store.

  Args:
    roots: directory in the memory of each server's host. Servers with the same directory are on the
      same host.
  """
  source = Distributor(fronts.config(folder))
  async with contextlib.AsyncExitStack() as stack:
    made = []
    for i, (server, root) in enumerate(zip(servers, roots, strict=True)):
      store = Store(root, key=fronts.TOKEN)
      stack.push_async_callback(store.close)
      front = Front(
        fronts.config(folder),
        upstream=server.address,
        publish_roots=[str(root)],
        handlers=store.handlers,
      )
      await stack.enter_async_context(front)
      client = VllmClient(front.address, key=fronts.TOKEN, name=f'vllm-{i}')
      transfer = PullTransfer(source)
      made.append(Replica(f'vllm-{i}', client=client, server=None, transfer=transfer))
    yield made


@contextlib.asynccontextmanager
async def sending(folder: pathlib.Path, directory: pathlib.Path, answer: Callable | None = None):
  """Starts a server that sends ranges of the files of a directory. Yields its address, and a list
  of the ranges that were requested. `answer` may answer a request itself; if it returns None, the
  range is sent.
  """
  asked = []

  async def handle(request):
    part = read_range(request)
    if part is None:
      return send_nothing()
    asked.append(part)
    if answer is not None and (given := await answer(request, part)) is not None:
      return given
    return await send_range(request, directory / part.file, part)

  endpoint = TokenServer(fronts.config(folder), routes=[('GET', WEIGHTS_PATH)], handle=handle)
  async with endpoint:
    yield endpoint.address, asked


@contextlib.asynccontextmanager
async def alone(folder: pathlib.Path, directory: pathlib.Path, answer: Callable | None = None):
  """Yields one host, the addresses for its orders, and a list of the ranges that it requests from
  `sending`.
  """
  async with sending(folder, directory, answer) as (source, asked), hosts(folder, 1) as (host,):
    yield host, {'sources': [source], 'stores': [host.address]}, asked


def small_atoms(monkeypatch, atom: int = 512, piece: int = 1024) -> None:
  monkeypatch.setattr(bundle, 'ATOM_BYTES', (atom, atom))
  monkeypatch.setattr(bundle, 'PIECE_BYTES', (piece, piece))


def run(main) -> None:
  async def bounded():
    async with asyncio.timeout(60):
      await main()

  asyncio.run(bounded())
