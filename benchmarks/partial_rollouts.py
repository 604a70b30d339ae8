"""Throughput of partial rollouts: finished samples per second and the share of decode slots in use,
by staleness bound and token budget.

  .venv/bin/python benchmarks/partial_rollouts.py [--bounds=0,1,4] [--budgets=0,8000,4000] \\
    [--slots=512] [--rate=40] [--median=2500] [--sigma=1] [--longest=32000]

Time is simulated. The explorer, its gate and its store are the same as in a run. The engine is a
fleet with `slots` places, each of which generates `rate` tokens per second. The lengths of answers
are lognormal, cut at `longest`; a continuation is the rest of the same answer. Updates and prefills
take no time, so the figures show only the effect of waiting. A budget of 0 means no partial
rollouts. The first batches of each run are left out. A record has one token for every `--unit`
tokens, to keep the store small.
"""

import asyncio
import math
import pathlib
import random
import sys
import tempfile

import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / 'tests' / 'support'))

import exploring
from clocks import simulated

from jaxrl_llm.core.records.sample import Finish, Segment
from jaxrl_llm.core.types import Version
from jaxrl_llm.master.exploring.partial import PartialConfig
from jaxrl_llm.rollout.api import Completion, Request

_BOUNDS = flags.DEFINE_list('bounds', ['0', '1', '4'], 'Staleness bounds.')
_BUDGETS = flags.DEFINE_list('budgets', ['0', '8000', '4000'], 'Token budgets; 0: none.')
_SLOTS = flags.DEFINE_integer('slots', 512, 'Answers that the fleet decodes at a time.')
_RATE = flags.DEFINE_float('rate', 40.0, 'Tokens per second of each slot.')
_MEDIAN = flags.DEFINE_float('median', 2500.0, 'Median length of answers, in tokens.')
_SIGMA = flags.DEFINE_float('sigma', 1.0, 'Standard deviation of the logarithm of lengths.')
_LONGEST = flags.DEFINE_integer('longest', 32_000, 'Length limit, in tokens.')
_GROUPS = flags.DEFINE_integer('groups', 64, 'Groups per batch.')
_SIZE = flags.DEFINE_integer('group_size', 8, 'Answers per group.')
_OPEN = flags.DEFINE_integer('open', None, 'Groups in hand (rollout.partial.groups).')
_BATCHES = flags.DEFINE_integer('batches', 8, 'Measured batches of each run.')
_UNIT = flags.DEFINE_integer('unit', 100, 'Tokens behind each token of a record.')
_WARM_UP = 4


class Slots(exploring.FakeEngine):
  """An engine with a fixed number of slots that decode at a fixed rate.

  Attributes:
    busy_s: simulated seconds of decoding, summed over the slots.
  """

  def __init__(self, tokenizer):
    super().__init__(tokenizer)
    self._free = asyncio.Semaphore(_SLOTS.value)
    self.busy_s = 0.0

  async def generate(self, request: Request):
    indices = range(request.first, request.first + request.samples)
    answers = [asyncio.ensure_future(self._answer(request, index)) for index in indices]
    for answer in asyncio.as_completed(answers):
      yield await answer

  async def _answer(self, request: Request, index: int):
    draw = random.Random(f'{request.key} {index}').lognormvariate(
      math.log(_MEDIAN.value), _SIGMA.value
    )
    whole = math.ceil(min(draw, _LONGEST.value) / _UNIT.value)
    count = min(whole - request.begun, request.max_tokens)
    async with self._free:
      seconds = count * _UNIT.value / _RATE.value
      await asyncio.sleep(seconds)
      self.busy_s += seconds
    is_whole = request.begun + count == whole
    tokens = np.full(count, 5, np.int32)
    tokens[-1] = request.stop_ids[0] if is_whole else 5
    segment = Segment(start=0, end=count, version=self._version, engine=self.name, finish='any')
    return index, Completion(
      tokens=tokens,
      logprobs=np.zeros(count, np.float32),
      finish=Finish.STOP if is_whole else Finish.LENGTH,
      segments=(segment,),
    )


async def measure(folder: pathlib.Path, bound: int, budget: int) -> dict[str, float]:
  """Returns the figures of one run, which `main` prints."""
  tokenizer = exploring.make_tokenizer(folder / 'tokenizer')
  store = exploring.new_store(folder / 'store')
  engine, loop = Slots(tokenizer), asyncio.get_running_loop()
  partial = None
  if budget:
    partial = PartialConfig(budget=budget // _UNIT.value, max_spans=16, groups=_OPEN.value)
  run = exploring.Exploration(
    tokenizer,
    store,
    lambda attempt: float(attempt.response_len % 2),
    engine=engine,
    tasks=exploring.make_tasks(64),
    max_tokens=_LONGEST.value // _UNIT.value,
    groups_per_batch=_GROUPS.value,
    group_size=_SIZE.value,
    bound=bound,
    partial=partial,
    collect_deadline_s=1e9,
    max_dropped_groups=10**9,
  )
  trained = sampled = 0
  async with run.explorer.running():
    for step in range(_WARM_UP + _BATCHES.value):
      if step == _WARM_UP:
        began, busy = loop.time(), engine.busy_s
      engine._version = Version(0, step)
      run.explorer.advance(step, step)
      batch, _ = await run.explorer.collect()
      uids = [member.sample.uid for member in batch]
      store.at(step).seal(uids)
      run.explorer.complete(uids)
      if step >= _WARM_UP:
        trained += sum(int(member.sample.loss_mask.sum()) for member in batch)
        sampled += sum(int(member.sample.sampled.sum()) for member in batch)
    seconds = loop.time() - began
    busy = engine.busy_s - busy
  store.close()
  return {
    'samples per second': _BATCHES.value * _GROUPS.value * _SIZE.value / seconds,
    'seconds per batch': seconds / _BATCHES.value,
    'slots in use': busy / seconds / _SLOTS.value,
    'mean length': sampled * _UNIT.value / (_BATCHES.value * _GROUPS.value * _SIZE.value),
    'trained': trained / sampled,
  }


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'{argv[1]}: unexpected argument')
  print('| bound | budget | samples/s | times | s/batch | slots in use | mean length | trained |')
  print('|---|---|---|---|---|---|---|---|')
  for bound in map(int, _BOUNDS.value):
    without = None
    for budget in map(int, _BUDGETS.value):
      with tempfile.TemporaryDirectory() as folder:
        found = simulated(measure(pathlib.Path(folder), bound, budget), deadline_s=1e9)
      without = without or found['samples per second']
      print(
        f'| {bound} | {budget or "none"} | {found["samples per second"]:.2f} | '
        f'{found["samples per second"] / without:.1f} | {found["seconds per batch"]:.0f} | '
        f'{found["slots in use"]:.0%} | {found["mean length"]:.0f} | {found["trained"]:.0%} |',
        flush=True,
      )


if __name__ == '__main__':
  app.run(main)
