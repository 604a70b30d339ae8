"""Calls of cheap scorers share batches; each has the outcome that it would have alone."""

import asyncio
import collections
from pathlib import Path

import pytest
from fixtures import rewards_scorers
from fixtures.rewards_scorers import attempt
from pools import with_pool

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.records.score import Status
from jaxrl_llm.rewards.api import ScorerConfig, Verdict
from jaxrl_llm.rewards.pool.outcome import CallOutcome
from jaxrl_llm.rewards.pool.queue import BATCH_S, MAX_BATCH, CallQueue

CHEAP, SLOW = BATCH_S / 1e6, 2 * BATCH_S


class Worker:
  """Makes calls whose time is given by the completion: records their batches, and returns when
  `goes_on` is set. A batch of several calls fails if it contains 'dies'.
  """

  def __init__(self):
    self.batches, self.cancelled, self.most = [], 0, 0
    self.goes_on = asyncio.Event()
    self.goes_on.set()
    self._in_flight = 0

  async def make(self, calls):
    self._in_flight += 1
    self.most = max(self.most, self._in_flight)
    texts = [call.attempts[0].completion for call in calls]
    self.batches.append((calls[0].config.name, texts))
    try:
      await self.goes_on.wait()
    except asyncio.CancelledError:
      self.cancelled += 1
      raise
    finally:
      self._in_flight -= 1
    if 'raises' in texts:
      raise RunError('the pool is closed')
    if 'dies' in texts and len(texts) > 1:
      return None
    return [
      CallOutcome(
        verdicts=(Verdict(value=float(call.attempts[0].uid)),),
        seconds=SLOW if text == 'slow' else CHEAP,
      )
      for call, text in zip(calls, texts)
    ]


def run(use, *, limit=1):
  async def main():
    worker = Worker()
    queue = CallQueue(worker.make, limit=limit)
    await asyncio.wait_for(use(queue, worker), 60)
    return worker

  return asyncio.run(main())


def calls(queue, completions, *, name='a'):
  """Tasks of one call per completion, whose values are the positions of the completions."""
  config = ScorerConfig(name=name)
  return [
    asyncio.create_task(queue.call(config, (attempt(text, uid=str(i)),), ()))
    for i, text in enumerate(completions)
  ]


async def values(tasks):
  return [outcome.verdicts[0].value for outcome in await asyncio.gather(*tasks)]


def test_cheap_calls_share_batches_once_the_scorer_is_known_to_be_cheap():
  async def use(queue, worker):
    assert await values(calls(queue, ['x'] * 200)) == list(range(200))

  batches = run(use).batches
  assert [len(texts) for _, texts in batches] == [1, MAX_BATCH, MAX_BATCH, MAX_BATCH, 7]


def test_after_a_slow_call_calls_are_alone_for_a_while():
  async def use(queue, worker):
    await values(calls(queue, ['slow']))
    await values(calls(queue, ['x'] * 200))

  sizes = [len(texts) for _, texts in run(use).batches]
  assert sizes[:10] == [1] * 10 and sizes[-1] > 1 and sum(sizes) == 201


def test_calls_of_different_scorers_share_no_batch_and_keep_their_order():
  async def use(queue, worker):
    for name in 'ab':
      await values(calls(queue, ['x'], name=name))
    worker.batches.clear()
    first, second = calls(queue, ['1', '2'], name='b'), calls(queue, ['3'], name='a')
    await values([*first, *second])

  assert run(use).batches == [('b', ['1', '2']), ('a', ['3'])]


def test_at_most_the_limit_is_in_flight_and_the_limit_can_change():
  async def use(queue, worker):
    worker.goes_on.clear()
    tasks = calls(queue, ['slow'] * 12)
    await asyncio.sleep(0.01)
    assert worker.most == 2
    queue.set_limit(5)
    await asyncio.sleep(0.01)
    assert worker.most == 5
    worker.goes_on.set()
    assert await values(tasks) == list(range(12))

  run(use, limit=2)


def test_calls_of_a_batch_that_failed_are_repeated_alone():
  async def use(queue, worker):
    await values(calls(queue, ['x']))
    assert await values(calls(queue, ['x', 'dies', 'y'])) == [0, 1, 2]

  texts = [texts for _, texts in run(use).batches]
  assert texts == [['x'], ['x', 'dies', 'y'], ['x'], ['dies'], ['y']]


def test_a_batch_is_cancelled_once_nobody_waits_for_it():
  async def use(queue, worker):
    await values(calls(queue, ['x']))
    worker.goes_on.clear()
    one, other = calls(queue, ['x', 'y'])
    await asyncio.sleep(0.01)
    one.cancel()
    await asyncio.sleep(0.01)
    assert not worker.cancelled
    waiting = calls(queue, ['z'])[0]
    await asyncio.sleep(0.01)
    waiting.cancel()
    other.cancel()
    await asyncio.sleep(0.01)
    assert worker.cancelled == 1
    worker.goes_on.set()
    assert await values(calls(queue, ['w'])) == [0]

  assert [texts for _, texts in run(use).batches] == [['x'], ['x', 'y'], ['w']]


def test_an_exception_reaches_each_caller():
  async def use(queue, worker):
    await values(calls(queue, ['x']))
    results = await asyncio.gather(*calls(queue, ['x', 'raises', 'y']), return_exceptions=True)
    assert [str(result) for result in results] == ['the pool is closed'] * 3

  run(use)


@pytest.mark.parametrize('end', ['die', 'hang'])
def test_one_bad_call_of_a_batch_costs_only_its_own_score(tmp_path, monkeypatch, end):
  monkeypatch.setattr('jaxrl_llm.rewards.pool.queue.BATCH_S', 1e3)  # However slow the machine is.
  log = tmp_path / 'log'

  def of(texts):
    return [
      attempt(text, uid=f'u{i}', domain='obeys', fields={'log': str(log)})
      for i, text in enumerate(texts)
    ]

  async def use(pool):
    await asyncio.gather(*(pool.score(a) for a in of(['x'] * 40)))
    log.unlink()
    texts = ['x' * (i + 1) for i in range(40)]
    texts[17], texts[31] = end, 'raise'
    scores = await asyncio.gather(*(pool.score(a) for a in of(texts)))
    return [score for (score,) in scores], pool.counts

  scores, counts = with_pool({'obeys': rewards_scorers.obeys}, use, deadline_s=2.0)
  expected = [Status.OK] * 40
  expected[17] = Status.CRASHED if end == 'die' else Status.TIMEOUT
  expected[31] = Status.ERROR
  assert [score.status for score in scores] == expected
  assert [score.value for score in scores] == [
    None if i in (17, 31) else i + 1.0 for i in range(40)
  ]
  assert counts['ok'] == 78 and counts[expected[17].value] == counts['error'] == 1
  made = collections.Counter(Path(log).read_text().split())
  assert made['u17'] == 2, 'in a batch, and alone'
