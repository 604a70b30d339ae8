"""Seconds for which training waits for the rows of a batch, with and without read-ahead.

  .venv/bin/python benchmarks/loading.py [--rows=64] [--tokens=16384] [--disk_ms=50] [--step_ms=500]

A batch has four optimizer steps. Each read from the run's files takes `--disk_ms` longer than it
does here, which simulates a slow disk, and computing an optimizer step is simulated by a wait of
`--step_ms`. Both loaders give the same arrays, which is checked.

In stages of static data, a batch begins with drawing its rows, which reads their records too. Two
more figures are the seconds of a batch for which training waits for this: drawn when they are
needed, and drawn while the batch before is trained on (`StreamBatches`). Both draw the same rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import statistics
import tempfile
import time

import jax
import numpy as np
from absl import flags

from jaxrl_llm.batching.plan import Row, Shape, StepPlan, plan_shape
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Finish, Sample, Segment, encode
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Version
from jaxrl_llm.data.load import PackedStep, RowLoader
from jaxrl_llm.data.streams import RowStream
from jaxrl_llm.master.batches import StreamBatches
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.replay.segments import write_segment
from jaxrl_llm.rollout.api import Completion
from jaxrl_llm.rollout.workflow import rollout_sample

_ROWS = flags.DEFINE_integer('rows', 64, 'Rows of a batch.', lower_bound=4)
_TOKENS = flags.DEFINE_integer('tokens', 16384, 'Tokens of a row.', lower_bound=2)
_DISK_MS = flags.DEFINE_float('disk_ms', 50.0, 'Added to each read.', lower_bound=0)
_STEP_MS = flags.DEFINE_float('step_ms', 500.0, 'Of an optimizer step.', lower_bound=0)
_STEPS = 4


def sample(number: int, tokens: int) -> Sample:
  """Returns a rollout with one prompt token. Tokens and logprobs are random."""
  draw = np.random.default_rng(number)
  sampled = tokens - 1
  segment = Segment(start=0, end=sampled, version=Version(0, 0), engine='embedded', finish='stop')
  completion = Completion(
    tokens=draw.integers(0, 50000, sampled, dtype=np.int32),
    logprobs=-draw.random(sampled, dtype=np.float32),
    finish=Finish.STOP,
    segments=(segment,),
  )
  task = Task(taskset='t', domain='general', prompt=(), truth=None, fields={})
  return rollout_sample(task, 0, 0, [1], completion, group=f'x/{number}', temperature=1.0)


def batch(directory: pathlib.Path, rows: int, tokens: int) -> StepPlan:
  """Writes the rows, and returns the plan that trains on them."""
  name = 'rows.arrayrecord'
  samples = [sample(number, tokens) for number in range(rows)]
  write_segment(directory, name, [encode(row) for row in samples])
  planned = tuple(
    Row(
      uid=row.uid,
      source=name,
      index=number,
      length=tokens,
      prompt_len=1,
      group=row.group_id,
      reward=1.0,
      is_expert=False,
      truncated=False,
      version_step=0,
    )
    for number, row in enumerate(samples)
  )
  steps = tuple(tuple(range(rows))[number::_STEPS] for number in range(_STEPS))
  return StepPlan(step=0, stage='x', rows=planned, optimizer_steps=steps)


def slowed(loader: RowLoader, seconds: float) -> RowLoader:
  read = loader._reader.read

  def slow(refs):
    time.sleep(seconds)
    return read(refs)

  loader._reader.read = slow
  return loader


async def exposed(
  loader: RowLoader, plan: StepPlan, shape: Shape
) -> tuple[float, list[PackedStep]]:
  """Returns the seconds for which the optimizer steps wait for their rows, and the steps."""
  steps, waited = [], 0.0
  async with contextlib.aclosing(loader.ahead(plan, shape)) as loaded:
    for _ in plan.optimizer_steps:
      before = time.perf_counter()
      steps.append(await anext(loaded))
      waited += time.perf_counter() - before
      await asyncio.sleep(_STEP_MS.value / 1e3)
  return waited, steps


def slowed_stream(directory: pathlib.Path, rows: int, seconds: float) -> RowStream:
  """Returns a stream of all rows, whose reads take longer."""
  stream = RowStream(directory, 'rows.arrayrecord', rows=rows, seed=0)
  draw = stream.next

  def slow():
    time.sleep(seconds * rows)
    return draw()

  stream.next = slow
  return stream


async def drawn(stream: RowStream, *, ahead: bool) -> tuple[float, list[list[Row]]]:
  """Returns the seconds for which a batch, other than the first, waits for its rows to be drawn,
  and the rows of each batch.
  """
  batches, waits, rows = StreamBatches(stream), [], []
  async with batches.running():
    for step in range(_STEPS):
      batches.advance(step, step)
      before = time.perf_counter()
      rows.append((await batches.next())[0] if ahead else stream.next())
      waits.append(time.perf_counter() - before)
      await asyncio.sleep(_STEPS * _STEP_MS.value / 1e3)
      batches.trained(StepPlan(step=step, stage='x', rows=tuple(rows[-1])))
  return statistics.mean(waits[1:]), rows


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise UserError(f'argument {argv[1]!r} is not a flag')
  with tempfile.TemporaryDirectory() as name:
    plan = batch(pathlib.Path(name), _ROWS.value, _TOKENS.value)
    rows = -(-_ROWS.value // _STEPS)
    shape = plan_shape(rows=rows, ranks=1, chunks=1, chunk_len=_TOKENS.value)
    mesh = build_mesh(MeshConfig(), jax.devices()[:1])
    results = {}
    for threads in (0, 8):
      loader = slowed(RowLoader(pathlib.Path(name), mesh, threads=threads), _DISK_MS.value / 1e3)
      results[threads] = asyncio.run(exposed(loader, plan, shape))
      print(f'{threads} threads: {results[threads][0]:.2f} s of waiting for rows')
    for before, after in zip(results[0][1], results[8][1], strict=True):
      for a, b in zip(jax.tree.leaves(before.chunks), jax.tree.leaves(after.chunks), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    print('all arrays are equal')
    rows_of = {}
    for ahead in (False, True):
      stream = slowed_stream(pathlib.Path(name), _ROWS.value, _DISK_MS.value / 1e3)
      waited, rows_of[ahead] = asyncio.run(drawn(stream, ahead=ahead))
      print(f'rows drawn {"ahead" if ahead else "when needed"}: {waited:.2f} s of waiting')
    assert rows_of[False] == rows_of[True]
    print('all rows are equal')


if __name__ == '__main__':
  script.run(main)
