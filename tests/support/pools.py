"""Scorer pools for tests, and calls to them."""

import asyncio

from fixtures import rewards_scorers
from fixtures.rewards_scorers import attempt

from jaxrl_llm.core.records.score import Status
from jaxrl_llm.rewards.api import RewardsConfig, ScorerConfig
from jaxrl_llm.rewards.pool.pool import ScorerPool


def with_pool(scorers, use, *, workers=1, deadline_s=60.0, **config):
  """Runs `use(pool)` and returns its result. Each scorer applies to the domain with the scorer's
  name. The scorer `length` is always included.
  """
  scorers = {'length': rewards_scorers.length, **scorers}
  deadlines = {**dict.fromkeys(scorers, deadline_s), 'length': 60.0}
  configs = tuple(
    ScorerConfig(name=name, domains=(name,), deadline_s=deadlines[name]) for name in scorers
  )

  async def main():
    pool = ScorerPool(scorers, RewardsConfig(scorers=configs, workers=workers, **config))
    await pool.start()
    try:
      return await use(pool)
    finally:
      await pool.close()

  return asyncio.run(main())


def score_then_length(scorers, domain, completion='x', **options):
  """Returns the Score of one call. Asserts that the pool still serves the next call."""

  async def use(pool):
    (score,) = await pool.score(attempt(completion, domain=domain))
    (following,) = await pool.score(attempt('12345', domain='length'))
    assert (following.status, following.value) == (Status.OK, 5.0)
    assert pool.counts[score.status.value] == 1 + (score.status == Status.OK)
    assert pool.counts[f'{domain}/{score.status.value}'] == 1
    assert pool.counts['unscorable'] == (score.value is None)
    return score

  return with_pool(scorers, use, **options)
