"""Bias of the batch policies: lengths and rewards of the trained samples, against all sampled ones.

  PYTHONPATH=tests/support .venv/bin/python benchmarks/batch_policies.py [--bounds=2,4,8] \\
    [--batches=64] [--slots=128] [--train_s=2]

The explorer, its gate and its store run in simulated time around an engine that has `slots` slots
and generates 40 tokens per second in each. Answer lengths are lognormal: median 40 tokens, sigma
0.8 between tasks and 0.6 within a task, at most 600 tokens. The reward depends on the length: 1 for
answers longer than the median, else 0. A batch has 16 groups of 8; training on it takes `train_s`
simulated seconds. All samples of the groups that had started when the batch was formed count as
sampled.
"""

from __future__ import annotations

import asyncio
import pathlib
import statistics
import tempfile

import exploring
import numpy as np
from absl import app, flags
from clocks import simulated

from jaxrl_llm.core.records.sample import Finish, Segment
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.api import Completion

_BOUNDS = flags.DEFINE_list('bounds', ['2', '4', '8'], 'Staleness bounds, each a run per policy.')
_BATCHES = flags.DEFINE_integer('batches', 64, 'Batches of each run.', lower_bound=8)
_SLOTS = flags.DEFINE_integer('slots', 128, 'Slots of the engine.', lower_bound=1)
_TRAIN_S = flags.DEFINE_float('train_s', 2.0, 'Simulated seconds of training on a batch.')
_GROUPS, _GROUP_SIZE, _EARLY = 16, 8, 4
_MEDIAN, _MOST, _TOKENS_PER_S = 40, 600, 40.0


class SlotEngine(exploring.FakeEngine):
  """Engine that generates samples of lognormal lengths, at a constant speed in a limited number of
  slots.

  Attributes:
    lengths: number of tokens of each requested sample, keyed by uid.
  """

  def __init__(self, tokenizer, slots: int):
    super().__init__(tokenizer)
    self._slots = asyncio.Semaphore(slots)
    self.lengths: dict[str, int] = {}

  async def generate(self, request):
    lengths = self._draw(request)
    self.lengths |= {f'{request.uid}/{index}': length for index, length in lengths.items()}
    runs = [asyncio.create_task(self._run(index, lengths[index])) for index in lengths]
    for run in asyncio.as_completed(runs):
      yield await run

  def _draw(self, request) -> dict[int, int]:
    draw = np.random.default_rng(list(request.uid.encode()))
    task = 0.8 * draw.standard_normal()
    lengths = _MEDIAN * np.exp(task + 0.6 * draw.standard_normal(request.samples))
    lengths = np.clip(lengths, 1, _MOST).astype(int).tolist()
    return dict(zip(range(request.first, request.first + request.samples), lengths))

  async def _run(self, index: int, length: int):
    async with self._slots:
      version = self._version
      await asyncio.sleep(length / _TOKENS_PER_S)
    tokens = np.array(self._tokenizer.encode('a' * length), np.int32)
    segment = Segment(start=0, end=length, version=version, engine=self.name, finish='stop')
    return index, Completion(
      tokens=tokens,
      logprobs=-np.ones(length, np.float32),
      finish=Finish.STOP,
      segments=(segment,),
    )


def measure(policy: str, bound: int, folder: pathlib.Path) -> dict[str, object]:
  """Returns the samples that each batch trained on, the samples of all groups that had started by
  then, and the duration.
  """
  folder.mkdir()
  tokenizer = exploring.make_tokenizer(folder / 'tokenizer')
  store = exploring.new_store(folder / 'replay')

  async def main():
    engine = SlotEngine(tokenizer, _SLOTS.value)
    exploration = exploring.Exploration(
      tokenizer,
      store,
      lambda attempt: float(len(attempt.completion) > _MEDIAN),
      engine=engine,
      tasks=exploring.make_tasks(64),
      groups_per_batch=_GROUPS,
      group_size=_GROUP_SIZE,
      bound=bound,
      batch_policy=policy,
      max_tokens=_MOST,
      collect_deadline_s=1e6,
    )
    batches, sampled, lags, passed = [], [], [], []
    async with exploration.explorer.running():
      for step in range(_BATCHES.value):
        engine._version = Version(0, step)
        exploration.explorer.advance(step, step)
        batch, counts = await exploration.explorer.collect()
        batches.append([engine.lengths[member.sample.uid] for member in batch])
        lags += [step - member.sample.segments[0].version.step for member in batch]
        sampled.append([*engine.lengths.values()])
        passed.append(counts.get('passed_over', 0))
        uids = [member.sample.uid for member in batch]
        store.at(step).seal(uids)
        exploration.explorer.record(uids)
        exploration.explorer.complete()
        await asyncio.sleep(_TRAIN_S.value)
      seconds = asyncio.get_running_loop().time()
    return batches, sampled, lags, passed, seconds

  batches, sampled, lags, passed, seconds = simulated(main(), deadline_s=1e9)
  store.close()
  lengths = np.array([length for batch in batches for length in batch])
  lags = np.array(lags)
  shortest, longest = np.quantile(lengths, [0.25, 0.75])
  return {
    'early': [length for batch in batches[:_EARLY] for length in batch],
    'early sampled': sampled[_EARLY - 1],
    'all': lengths,
    'all sampled': sampled[-1],
    'spread': statistics.stdev(statistics.mean(batch) for batch in batches),
    'lags': (lags[lengths <= shortest].mean(), lags[lengths >= longest].mean(), lags.max()),
    'passed': statistics.mean(passed),
    'seconds': seconds / len(batches),
  }


def _pair(lengths, sampled) -> str:
  def shown(values):
    values = np.asarray(values)
    return f'{values.mean():5.1f} {(values > _MEDIAN).mean():.3f}'

  return f'{shown(lengths)} / {shown(sampled)}'


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'{argv[1]}: unexpected argument')
  print(f'mean length and reward, trained / sampled; early: the first {_EARLY} batches')
  print(
    'bound policy          early                      all                        std of means  '
    'lag short, long, max  passed over  s/batch'
  )
  with tempfile.TemporaryDirectory() as name:
    for bound in map(int, _BOUNDS.value):
      for policy in ('in_order', 'complete_first'):
        found = measure(policy, bound, pathlib.Path(name) / f'{bound}-{policy}')
        short, long, most = found['lags']
        print(
          f'{bound:5} {policy:15} {_pair(found["early"], found["early sampled"])}  '
          f'{_pair(found["all"], found["all sampled"])}  {found["spread"]:12.1f}  '
          f'{short:.2f}, {long:.2f}, {most}  {found["passed"]:11.1f}  {found["seconds"]:7.2f}',
          flush=True,
        )


if __name__ == '__main__':
  app.run(main)
