"""Throughput of partial rollouts: finished samples per second and the share of decode slots in use,
by staleness bound and token budget.

  .venv/bin/python benchmarks/partial_rollouts.py [--bounds=0,1,4] [--budgets=0,8000,4000] \\
    [--slots=512] [--rate=40] [--median=2500] [--sigma=1] [--longest=32000] \\
    [--engine=fleet|embedded] [--unit=100] [--decode_steps=4]

The explorer, its gate and its store are the same as in a run. The lengths of answers are lognormal,
cut at `longest`; a continuation is the rest of the same answer. A budget of 0 means no partial
rollouts. The first batches of each run are left out. A record has one token for every `--unit`
tokens.

`--engine=fleet`: a model of an engine with `slots` places, each of which generates `rate` tokens
per second of simulated time. Updates and prefills take no time, so the figures show only the effect
of waiting.

`--engine=embedded`: the real embedded engine with `slots` decode slots and a random model of one
layer samples the tokens of the records, and each answer ends at its drawn length. Time is measured
in decode steps: a step stands for `unit` / `rate` seconds, however many slots sample. So other work
on the machine does not slow it down, except that steps pass while the host starts samples. The last
two columns are of the processor time of the whole process, which includes prefills, updates and the
store.
"""

import asyncio
import dataclasses
import math
import pathlib
import random
import sys
import tempfile
import time

import jax
import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / 'tests' / 'support'))

import exploring
from clocks import simulated

from jaxrl_llm.core.records.sample import Finish, Segment
from jaxrl_llm.core.types import Version
from jaxrl_llm.master.exploring.partial import PartialConfig
from jaxrl_llm.models.api import ModelOptions, build_model
from jaxrl_llm.models.families import tiny
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.rollout.api import Completion, Request, Weights
from jaxrl_llm.rollout.embedded.engine import EmbeddedConfig, EmbeddedEngine

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
_WARM_UP = flags.DEFINE_integer('warm_up', 4, 'Batches of each run that are left out.')
_ENGINE = flags.DEFINE_enum('engine', 'fleet', ['fleet', 'embedded'], 'Engine that answers.')
_DECODE_STEPS = flags.DEFINE_integer(
  'decode_steps', 4, 'Steps of a decode call of the embedded engine; free slots wait for its end.'
)
_PROMPT = 8
"""Maximum number of prompt tokens."""


def drawn_length(request: Request, index: int) -> int:
  """Returns the length of a sample's whole answer, in tokens of a record."""
  draw = random.Random(f'{request.key} {index}')
  length = draw.lognormvariate(math.log(_MEDIAN.value), _SIGMA.value)
  return math.ceil(min(length, _LONGEST.value) / _UNIT.value)


class Slots(exploring.FakeEngine):
  """A fleet with a fixed number of slots that decode at a fixed rate.

  Attributes:
    busy_s: simulated seconds of decoding, summed over the slots.
  """

  def __init__(self, tokenizer):
    super().__init__(tokenizer)
    self._free = asyncio.Semaphore(_SLOTS.value)
    self.busy_s = 0.0

  @property
  def seconds(self) -> float:
    """Simulated time."""
    return asyncio.get_running_loop().time()

  async def update(self, step: int) -> None:
    """Publishes the version of a step, which takes no time."""
    self._version = Version(0, step)

  async def generate(self, request: Request):
    indices = range(request.first, request.first + request.samples)
    answers = [asyncio.ensure_future(self._answer(request, index)) for index in indices]
    for answer in asyncio.as_completed(answers):
      yield await answer

  async def _answer(self, request: Request, index: int):
    whole = drawn_length(request, index)
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


class Embedded(EmbeddedEngine):
  """The embedded engine with a random model of one layer. Its answers end at their drawn lengths
  and nowhere else: no token of the model ends them, and the last one is replaced by a stop token.
  """

  def __init__(self, tokenizer):
    spec = tiny(
      'qwen3',
      tokenizer.vocab_size,
      hidden_size=16,
      intermediate_size=32,
      num_hidden_layers=1,
      num_attention_heads=2,
      num_key_value_heads=1,
      head_dim=8,
    )
    model = build_model(spec, ModelOptions())
    self._params = model.init(jax.random.key(0))
    longest = math.ceil(_LONGEST.value / _UNIT.value)
    config = EmbeddedConfig(
      slots=_SLOTS.value, prefill_rows=32, decode_steps=_DECODE_STEPS.value, filters=False
    )
    super().__init__(model, config, max_length=_PROMPT + longest, seed=0, run=DeviceThread().run)

  @property
  def seconds(self) -> float:
    """Time in decode steps, each of which stands for a token of a record in every slot."""
    return self.counts['decode_steps'] * _UNIT.value / _RATE.value

  @property
  def busy_s(self) -> float:
    """Seconds of decoding, summed over the slots."""
    return self.counts['slot_steps'] * _UNIT.value / _RATE.value

  async def update(self, step: int) -> None:
    """Loads the weights, which are always the same, as the version of a step."""
    await self.load(Weights.of(self._params, Version(0, step)))

  async def generate(self, request: Request):
    indices = range(request.first, request.first + request.samples)
    answers = [asyncio.ensure_future(self._answer(request, index)) for index in indices]
    try:
      for answer in asyncio.as_completed(answers):
        yield await answer
    finally:
      for answer in answers:
        answer.cancel()

  async def _answer(self, request: Request, index: int):
    rest = drawn_length(request, index) - request.begun
    part = dataclasses.replace(
      request, first=index, samples=1, max_tokens=min(rest, request.max_tokens), stop_ids=()
    )
    ((_, completion),) = [pair async for pair in super().generate(part)]
    if len(completion.tokens) == rest:
      tokens = np.r_[completion.tokens[:-1], np.int32(request.stop_ids[0])]
      completion = dataclasses.replace(completion, tokens=tokens, finish=Finish.STOP)
    return index, completion


async def measure(folder: pathlib.Path, bound: int, budget: int) -> dict[str, float]:
  """Returns the figures of one run, which `main` prints."""
  tokenizer = exploring.make_tokenizer(folder / 'tokenizer')
  store = exploring.new_store(folder / 'store')
  engine = {'fleet': Slots, 'embedded': Embedded}[_ENGINE.value](tokenizer)
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
  await engine.start()
  await engine.update(0)
  async with run.explorer.running():
    for step in range(_WARM_UP.value + _BATCHES.value):
      if step == _WARM_UP.value:
        began, busy, processor = engine.seconds, engine.busy_s, time.process_time()
      await engine.update(step)
      run.explorer.advance(step, step)
      batch, _ = await run.explorer.collect()
      uids = [member.sample.uid for member in batch]
      store.at(step).seal(uids)
      run.explorer.record(uids)
      run.explorer.complete()
      if step >= _WARM_UP.value:
        trained += sum(int(member.sample.loss_mask.sum()) for member in batch)
        sampled += sum(int(member.sample.sampled.sum()) for member in batch)
    seconds, busy = engine.seconds - began, engine.busy_s - busy
    processor = time.process_time() - processor
  await engine.close()
  store.close()
  samples = _BATCHES.value * _GROUPS.value * _SIZE.value
  return {
    'samples per second': samples / seconds,
    'seconds per batch': seconds / _BATCHES.value,
    'slots in use': busy / seconds / _SLOTS.value,
    'mean length': sampled * _UNIT.value / samples,
    'trained': trained / sampled,
    'samples per processor second': samples / processor,
  }


def figures_of(bound: int, budget: int) -> dict[str, float]:
  """Returns the figures of `measure`, in simulated time for a fleet."""
  with tempfile.TemporaryDirectory() as folder:
    measured = measure(pathlib.Path(folder), bound, budget)
    if _ENGINE.value == 'fleet':
      return simulated(measured, deadline_s=1e9)
    return asyncio.run(measured)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'{argv[1]}: unexpected argument')
  is_real = _ENGINE.value == 'embedded'
  print(
    '| bound | budget | samples/s | times | s/batch | slots in use | mean length | trained |'
    + (' samples per processor second | times |' if is_real else '')
  )
  print('|---' * (10 if is_real else 8) + '|')
  for bound in map(int, _BOUNDS.value):
    base: dict[str, float] = {}
    for budget in map(int, _BUDGETS.value):
      figures = figures_of(bound, budget)
      base = base or figures
      rates = ('samples per second', 'samples per processor second')
      times, processor_times = (figures[name] / base[name] for name in rates)
      print(
        f'| {bound} | {budget or "none"} | {figures["samples per second"]:.2f} | {times:.1f} | '
        f'{figures["seconds per batch"]:.0f} | {figures["slots in use"]:.0%} | '
        f'{figures["mean length"]:.0f} | {figures["trained"]:.0%} |'
        + (f' {figures[rates[1]]:.1f} | {processor_times:.1f} |' if is_real else ''),
        flush=True,
      )


if __name__ == '__main__':
  app.run(main)
