"""Explorers that fetch completions from fake servers themselves: fronts that sign, a fleet, a
crew.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import string
import threading

import fronts
import serving
from crews import PATIENCE_S, Setting
from exploring import make_tasks
from fleets import MODEL, A, places, weights

from jaxrl_llm.core.net.front import Front
from jaxrl_llm.rollout.explorers import wire
from jaxrl_llm.rollout.explorers.explorer import Evicted, _LeasedHub
from jaxrl_llm.rollout.explorers.wire import Delivery
from jaxrl_llm.rollout.vllm.client import VllmClient
from jaxrl_llm.rollout.vllm.direct import SigningFront
from jaxrl_llm.rollout.vllm.replica import Replica
from jaxrl_llm.rollout.workflow import SingleTurn

(TASK,) = make_tasks(1)
LETTERS = string.ascii_lowercase + 'A'
"""With the special tokens, as many as `serving.VOCAB`."""
SERVERS = 'token-of-the-servers-0123456789'


class Fronts:
  """Fronts that sign, of fake servers."""

  def __init__(self, folder, token=SERVERS):
    self._config = fronts.config(
      folder, token_file=fronts.token_file(folder, token, name='servers')
    )
    self._opened = contextlib.AsyncExitStack()

  async def open(self, upstream):
    """The front of a server."""
    signing = SigningFront(upstream, SERVERS)
    self._opened.push_async_callback(signing.close)
    front = Front(
      self._config, upstream=upstream, handlers=signing.handlers, ticketed=signing.ticketed
    )
    return await self._opened.enter_async_context(front)

  async def close(self):
    await self._opened.aclose()


@contextlib.contextmanager
def fronted(folder, addresses):
  """Addresses of fronts that sign, in a thread, of running servers; their token is in the file
  `servers`.
  """
  loop = asyncio.new_event_loop()
  thread = threading.Thread(target=loop.run_forever, daemon=True)
  thread.start()

  def in_thread(work):
    return asyncio.run_coroutine_threadsafe(work, loop).result(PATIENCE_S)

  opened = Fronts(folder)
  try:
    yield [in_thread(opened.open(address)).address for address in addresses]
  finally:
    in_thread(opened.close())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(PATIENCE_S)


@contextlib.asynccontextmanager
async def direct_fleet(folder, count=1, **config):
  """(fake servers, fleet over their fronts) that serves its first version."""
  opened = Fronts(folder)
  async with contextlib.AsyncExitStack() as stack:
    made = await stack.enter_async_context(places(folder, count))
    stack.push_async_callback(opened.close)
    replicas = []
    for place in made:
      place.policy.draws = itertools.repeat(1)  # Logprobs do not depend on the order of requests.
      front = place.front = await opened.open(place.address)
      client = VllmClient(front.address, key=SERVERS, name=f'vllm-{place.number}')
      replicas.append(Replica(client.name, client=client, server=None))
    fleet = serving.fleet_of(MODEL, replicas, folder, direct=True, **config)
    fleet = await stack.enter_async_context(fleet)
    await fleet.load(weights(A))
    yield made, fleet


@contextlib.asynccontextmanager
async def direct_crew(folder, *, count=1, direct=True, **config):
  """(crew with the explorer `honest`, fake servers, fleet)"""
  async with direct_fleet(folder, count, **config) as (made, fleet):
    setting = Setting(folder, engine=fleet, letters=LETTERS, groups=1, direct=direct)
    async with setting.running('honest'):
      yield setting, made, fleet


@contextlib.asynccontextmanager
async def rogue_crew(folder, **config):
  """(crew whose explorer has left, fake servers, fleet)"""
  async with direct_crew(folder, **config) as (setting, made, fleet):
    await setting.dismiss('honest')
    yield setting, made, fleet


class Rogue:
  """An explorer that fetches like a correct one, and delivers what a test makes of it."""

  def __init__(self, setting, name='rogue'):
    self.link, self._setting = setting.link(name), setting
    self.order, self.errands, self.answers = None, asyncio.Queue(), {}
    self._asking = None

  async def begin(self, samples=1):
    """Takes a group and asks for completions."""
    self.order = await self.link.call(wire.TAKE)
    self._asking = asyncio.create_task(self._ask(samples))
    return self

  async def _ask(self, samples):
    rogue = self

    class Hub(_LeasedHub):
      async def _run_errand(self, errand, answers):
        rogue.answers[errand['nonce']] = answers
        await rogue.errands.put(errand)

    workflow = SingleTurn(
      Hub(self.link, self.order['lease']), self._setting.tokenizer, max_tokens=4
    )
    how = {'stage': self.order['stage'], 'samples': samples}
    how['sampling'] = wire.read_sampling(self.order['sampling'])
    task = wire.read_task(self.order['task'])
    return [sample async for sample, _ in workflow.run(task, self.order['visit'], **how)]

  async def fetched(self, errand):
    """Fetches all parts of an answer."""
    parts = [part async for part in self.link.fetcher.received(errand)]
    self.answers[errand['nonce']][errand['nonce']] = parts
    return Delivery(errand['nonce'], parts=tuple(parts))

  async def deliver(self, delivery):
    return await self.link.call(wire.DELIVER, lease=self.order['lease'], **delivery._asdict())

  async def stop_asking(self):
    self._asking.cancel()
    await asyncio.gather(self._asking, return_exceptions=True)

  async def close(self):
    if self._asking is not None:
      await self.stop_asking()
    with contextlib.suppress(Evicted):
      await self.link.call(wire.LEAVE)
    await self.link.close()


def run(main):
  async def bounded():
    async with asyncio.timeout(PATIENCE_S):
      await main()

  asyncio.run(bounded())
