"""Scoring hides behind generation: in simulated seconds, only what the last sample takes is left of
it.
"""

import asyncio
import random

import exploring
import pytest
from clocks import SimulatedLoop
from fixtures import rewards_scorers
from scoring import awaited, pool, started

from jaxrl_llm.core.records.score import Status
from jaxrl_llm.rewards.api import Verdict
from jaxrl_llm.runtime import timeline
from jaxrl_llm.runtime.events import EDGES, FILE, Edge, EventLog

GROUPS, SIZE, SCORING_S = 4, 4, 0.3


class TimedEngine(exploring.FakeEngine):
  """Each sample ends after a lognormal number of seconds, whatever becomes of the others."""

  def __init__(self, tokenizer):
    super().__init__(tokenizer)
    self.ended = {}

  async def generate(self, request):
    clock = asyncio.get_running_loop().time
    draw = random.Random(request.uid)
    start, takes = (
      clock(),
      {index: draw.lognormvariate(0.7, 0.5) for index in range(request.samples)},
    )
    for index in sorted(takes, key=takes.get):
      await asyncio.sleep(start + takes[index] - clock())
      self.ended[f'{request.uid}/{index}'] = clock()
      yield index, self.complete(request, index)


class Scoring:
  """Takes so long for each attempt; serially, only after all of the batch have ended, one after the
  other.
  """

  def __init__(self, *, serial):
    self.serial, self.waiting, self.intervals = serial, 0, {}
    self.all_ended, self.turn = asyncio.Event(), asyncio.Lock()

  async def __call__(self, attempt):
    self.waiting += 1
    if self.waiting == GROUPS * SIZE:
      self.all_ended.set()
    if not self.serial:
      return await self.score(attempt)
    await self.all_ended.wait()
    async with self.turn:
      return await self.score(attempt)

  async def score(self, attempt):
    clock = asyncio.get_running_loop().time
    start = clock()
    await asyncio.sleep(SCORING_S)
    self.intervals[attempt.uid] = start, clock()
    return Verdict(value=float(attempt.completion.count('a') + len(attempt.completion)))


def simulate(folder, *, serial):
  """One batch; the scoring, when each sample ended, the rewards, and the log's spans."""
  folder.mkdir()
  store = exploring.new_store(folder / 'replay')
  scoring = Scoring(serial=serial)
  scorers = pool({'slow': (awaited(scoring, concurrency=64), {'deadline_s': 1000.0})})
  tokenizer = exploring.make_tokenizer(folder / 'tokenizer')
  engine = TimedEngine(tokenizer)
  with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
    log = EventLog(folder, attempt=0, clock=runner.get_loop().time)
    exploration = exploring.Exploration(
      tokenizer,
      store,
      None,
      engine=engine,
      scorers=scorers,
      groups_per_batch=GROUPS,
      group_size=SIZE,
      events=log,
    )

    async def main():
      async with started(scorers):
        return await exploration.batches(1)

    ((batch, _),) = runner.run(main())
  log.close()
  store.close()
  rewards = [(c.sample.uid, c.reward.value) for c in batch]
  return scoring, engine.ended, rewards, timeline.load(folder / FILE).spans


def test_what_is_left_of_slow_scoring_is_one_call_where_serial_scoring_leaves_all(tmp_path):
  exposed, rewards = {}, {}
  for serial in (False, True):
    scoring, ended, rewards[serial], spans = simulate(tmp_path / str(serial), serial=serial)
    last = max(ended.values())
    assert max(s.end for s in spans if s.edge == Edge.ROLLOUT) - min(
      s.start for s in spans
    ) == pytest.approx(last, abs=1e-5)
    ready = max(s.end for s in spans if s.edge == Edge.STORE) - min(s.start for s in spans)
    exposed[serial] = ready - last
    if not serial:
      assert scoring.intervals == {
        uid: pytest.approx((end, end + SCORING_S)) for uid, end in ended.items()
      }
      beside = sum(end <= last for _, end in scoring.intervals.values())
      assert beside >= 0.9 * GROUPS * SIZE, (
        'all but those that ended last are scored before the last one ends'
      )
  assert rewards[False] == rewards[True] and len({value for _, value in rewards[True]}) > 2
  # The last sample's own call, against those of all sixteen in turn.
  # To a microsecond, as events are written down.
  wanted = {False: SCORING_S, True: GROUPS * SIZE * SCORING_S}
  assert exposed == {serial: pytest.approx(seconds, abs=1e-5) for serial, seconds in wanted.items()}
  assert exposed[False] <= 0.1 * exposed[True]


def test_the_timeline_has_the_scoring_of_each_group_beside_its_rollout(tmp_path):
  scoring, ended, _, spans = simulate(tmp_path / 'run', serial=False)
  zero = min(span.start for span in spans)
  by_edge = {
    edge: {s.fields['group']: s for s in spans if s.edge == edge}
    for edge in (Edge.ROLLOUT, Edge.EVAL)
  }
  assert len(by_edge[Edge.ROLLOUT]) == len(by_edge[Edge.EVAL]) == GROUPS
  assert EDGES[Edge.ROLLOUT].lane != EDGES[Edge.EVAL].lane
  for group, rollout in by_edge[Edge.ROLLOUT].items():
    of = [f'{group}/{i}' for i in range(SIZE)]
    scored = by_edge[Edge.EVAL][group]
    assert rollout.start < scored.start < rollout.end
    assert scored.start - zero == pytest.approx(min(ended[uid] for uid in of), abs=1e-5)
    assert scored.end - zero == pytest.approx(
      max(scoring.intervals[uid][1] for uid in of), abs=1e-5
    )
    assert scored.end - rollout.end == pytest.approx(SCORING_S, abs=1e-5)


class GatedEngine(exploring.FakeEngine):
  """The last sample of a request ends only when all the others of it have been scored."""

  def __init__(self, tokenizer, counts):
    super().__init__(tokenizer)
    self.counts = counts

  async def generate(self, request):
    for index in range(request.samples):
      while index == request.samples - 1 and self.counts['ok'] < index:
        await asyncio.sleep(0.001)
      yield index, self.complete(request, index)


def test_worker_processes_score_samples_while_others_of_their_group_are_generated(tmp_path):
  """Otherwise this waits for ever."""
  store = exploring.new_store(tmp_path / 'replay')
  scorers = pool({'length': (rewards_scorers.length, {})})
  tokenizer = exploring.make_tokenizer(tmp_path / 'tokenizer')
  engine = GatedEngine(tokenizer, scorers.counts)
  exploration = exploring.Exploration(
    tokenizer, store, None, engine=engine, scorers=scorers, groups_per_batch=1, group_size=5
  )

  async def main():
    async with started(scorers):
      return await exploration.batches(1)

  ((batch, _),) = asyncio.run(asyncio.wait_for(main(), 60))
  store.close()
  assert [c.scores[0].status for c in batch] == [Status.OK] * 5
