"""Scorers whose services register: calls go to those that are there, with the job's key, and never
to one that serves something else.
"""

import asyncio
import contextlib
import logging

import pytest
from fixtures.rewards_scorers import attempt
from services import Service

from jaxrl_llm.app.composition.scorers import build_scorers
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.registry import Kind, Lease, Registry
from jaxrl_llm.rewards.api import RewardsConfig, ScorerConfig
from jaxrl_llm.rewards.pool import discovered
from jaxrl_llm.rewards.pool.pool import ScorerPool


@pytest.fixture(autouse=True)
def often(monkeypatch):
  monkeypatch.setattr(discovered, '_LOOK_S', 0.01)


@pytest.fixture
def registry(tmp_path):
  return Registry(tmp_path / 'registry', 'registry')


def config(**options):
  options = {'discover': '*', 'retries': 0, **options}
  return RewardsConfig(scorers=(ScorerConfig(name='quality', kind='http', options=options),))


@contextlib.asynccontextmanager
async def serving(registry, value, name='one', **fields):
  """A service that gives every attempt the same value, registered during the block."""
  service = Service(lambda body: {'value': value})
  async with service.running():
    lease = Lease(kind=Kind.REWARD, name=name, address=service.address, **fields)
    registry.put(lease)
    yield service
    registry.remove(lease)


@contextlib.asynccontextmanager
async def pool_of(registry, **options):
  of = config(**options)
  pool = ScorerPool(build_scorers(of, registry), of, registry=registry)
  try:
    await pool.start()
    yield pool
  finally:
    await pool.close()


async def value(pool):
  ((score,),) = [await pool.score(attempt())]
  return score.value


async def comes(pool, wanted):
  while await value(pool) != wanted:
    await asyncio.sleep(0.01)


def run(main):
  async def bounded():
    async with asyncio.timeout(60):
      await main()

  asyncio.run(bounded())


def test_calls_go_with_the_key_to_the_services_that_are_there(registry):
  async def main():
    starting = None
    async with contextlib.AsyncExitStack() as stack:
      pool = pool_of(registry)
      starting = asyncio.create_task(stack.enter_async_context(pool))
      await asyncio.sleep(0.05)
      assert not starting.done(), 'it waits for the first service'
      async with serving(registry, 1.0) as one:
        pool = await starting
        assert await value(pool) == 1.0
        assert one.headers[0]['Authorization'] == f'Bearer {registry.key}'
        async with serving(registry, 2.0, 'two'):
          await comes(pool, 2.0)
          await comes(pool, 1.0)
        for _ in range(5):
          await asyncio.sleep(0.02)
        assert {await value(pool) for _ in range(6)} == {1.0}
      async with serving(registry, 3.0, 'three'):
        await comes(pool, 3.0)

  run(main)


def test_only_services_whose_names_match_and_that_serve_the_same_are_called(registry, caplog):
  caplog.set_level(logging.WARNING, logger='absl')

  async def main():
    same, other = {'model': 'a'}, {'model': 'b'}
    async with (
      serving(registry, 1.0, 'quality-1', fingerprint=same),
      pool_of(registry, discover='quality-*') as pool,
      serving(registry, 2.0, 'safety-1', fingerprint=same),
      serving(registry, 3.0, 'quality-2', fingerprint=other),
      serving(registry, 4.0, 'quality-3', fingerprint=same),
    ):
      await comes(pool, 4.0)
      assert {await value(pool) for _ in range(12)} == {1.0, 4.0}

  run(main)
  lines = [line for line in caplog.messages if 'ignored' in line]
  assert len(lines) == 1 and 'quality-2' in lines[0]


def test_without_any_service_calls_fail_as_configured_until_one_comes(registry, caplog):
  caplog.set_level(logging.WARNING, logger='absl')

  async def main():
    async with contextlib.AsyncExitStack() as stack:
      async with serving(registry, 1.0):
        pool = await stack.enter_async_context(pool_of(registry))
      while not any('no service is left' in line for line in caplog.messages):
        await asyncio.sleep(0.01)
      assert await value(pool) is None
      async with serving(registry, 2.0, 'two'):
        await comes(pool, 2.0)

  run(main)


@pytest.mark.parametrize(
  'options',
  [{'discover': ''}, {'discover': '*', 'addresses': ['http://a:1']}, {'discover': None}],
)
def test_options_that_name_no_service_or_two_ways_are_refused(options):
  with pytest.raises(UserError, match=r"scorer 'http': (discover|addresses) is"):
    build_scorers(config(**options))


def test_a_pool_without_a_registry_refuses_to_discover():
  of = config()
  with pytest.raises(UserError, match="scorer 'quality': discover is set, but there is no reg"):
    ScorerPool(build_scorers(of), of)
