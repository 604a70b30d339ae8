"""Loads the rows of a plan from their files onto this process's devices.

A Grain pipeline over the plan reads and decodes rows in threads. While the devices compute an
optimizer step, a further thread packs the rows of the next step and places them on the devices. The
order of the results depends only on the plan. The pipeline has no state to save, because a plan
that is interrupted by a crash is trained on again from its beginning.

Each process reads only the rows that are placed on its own devices. Arrays on the host are newly
allocated for every step and never modified once JAX has them, because JAX may use their memory
instead of a copy.
"""

from __future__ import annotations

import asyncio
import collections
import pathlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Float32, Float64, Shaped

from jaxrl_llm.batching.chunks import Chunks, shapes
from jaxrl_llm.batching.packing import Packing
from jaxrl_llm.batching.plan import Row, Shape, StepPlan, pack_step
from jaxrl_llm.batching.trees import check_prefixes, seen_until
from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.records.sample import Sample
from jaxrl_llm.core.waits import bounded
from jaxrl_llm.parallel.rules import sharding_of_batch
from jaxrl_llm.replay.segments import SegmentReader

# Without this setting, Grain appends advice on its traceback filtering to the run's error messages.
flags.FLAGS.set_default('grain_py_traceback_filtering', 'off')

_TOKENS_AT_ONCE = 8192
"""Minimum number of tokens that a thread reads at once. Short rows are read together, because
passing a single short row to a thread takes longer than reading the row.
"""
_READS_AHEAD = 32
"""Maximum number of completed reads whose rows wait to be packed."""
_STEPS_AHEAD = 1
"""Number of optimizer steps that are packed ahead of the step that is being computed."""
_DEADLINE_S = 3600.0
"""Maximum time in seconds to read the rows of one optimizer step."""


class PackedStep(NamedTuple):
  """Packed rows of one optimizer step, on the devices."""

  chunks: Chunks
  packing: Packing
  rows: tuple[int, ...]
  """Index in the plan of each packed row."""
  grid: Grid
  """Part of the step's arrays that is on this process's devices."""
  loss_mask: Bool[np.ndarray, 'micro columns time']
  """Host copy of the loss mask, for this process's part of the arrays."""

  @property
  def used(self) -> np.int32:
    """Number of micro-batches that contain rows. If the remainder is split, number of chunks per
    rank that contain rows.
    """
    return np.int32(self.packing.used)


Column = (
  Sequence[float | Float64[np.ndarray, '...'] | Float32[np.ndarray, '...']]
  | Float64[np.ndarray, 'rows']
)
"""Values for each row of a plan. A row has either one value for all its tokens, or an array with
one value per token.
"""


class _Reads:
  """Grain data source of samples. Each element is the list of the samples of one read."""

  def __init__(self, reader: SegmentReader, reads: Sequence[Sequence[Row]]):
    self._reader, self._reads = reader, reads

  def __len__(self) -> int:
    return len(self._reads)

  def __getitem__(self, i: int) -> list[Sample]:
    rows = self._reads[i]
    samples = self._reader.read([(row.source, row.index) for row in rows])
    for row, sample in zip(rows, samples, strict=True):
      if sample.uid != row.uid or len(sample.tokens) != row.length:
        raise RunError(
          f'{row.source} record {row.index}: holds {sample.uid} ({len(sample.tokens)} tokens), but '
          f'the plan has {row.uid} ({row.length} tokens); the run directory is damaged, audit it '
          'or resume from an earlier commit'
        )
    return samples


class _PackedPart(NamedTuple):
  """Part of a plan that belongs to one optimizer step, before its rows are read."""

  packing: Packing
  grid: Grid
  reads: Sequence[Sequence[Row]]
  """The rows that this process needs, in the order of the packing. Each inner sequence is read at
  once by one thread.
  """


class _PackedSteps(grain.IterDataset[PackedStep]):
  """Grain dataset of the optimizer steps of a plan."""

  def __init__(
    self,
    plan: StepPlan,
    shape: Shape,
    reader: SegmentReader,
    sharding: NamedSharding,
    options: grain.ReadOptions,
  ):
    super().__init__()
    self._plan, self._reader, self._options, self._parts = plan, reader, options, []
    for number, numbers in enumerate(plan.optimizer_steps):
      packing = pack_step(plan, number, shape)
      grid = Grid.of(packing, shape, sharding)
      reads = _reads([plan.rows[numbers[i]] for i in grid.local])
      self._parts.append(_PackedPart(packing, grid, reads))

  def __iter__(self) -> grain.DatasetIterator[PackedStep]:
    source = _Reads(self._reader, [read for part in self._parts for read in part.reads])
    samples = grain.MapDataset.source(source).to_iter_dataset(self._options)
    return _PackedStepIterator(iter(samples), self._plan, self._parts)


class _PackedStepIterator(grain.DatasetIterator[PackedStep]):
  """Packs the samples of each optimizer step in turn, and places them on the devices."""

  def __init__(
    self,
    reads: grain.DatasetIterator[list[Sample]],
    plan: StepPlan,
    parts: Sequence[_PackedPart],
  ):
    super().__init__(reads)
    self._reads, self._plan, self._parts, self._next = reads, plan, parts, 0

  def __next__(self) -> PackedStep:
    if self._next == len(self._parts):
      raise StopIteration
    numbers = self._plan.optimizer_steps[self._next]
    packing, grid, reads = self._parts[self._next]
    samples = [sample for _ in reads for sample in next(self._reads)]
    self._next += 1
    arrays = grid.zeros()
    arrays['temperature'][:] = 1.0
    pairs = _pair_numbers(self._plan, numbers, packing)
    if grid.shape.shares_prefixes:
      check_prefixes(dict(zip(grid.local, samples, strict=True)), packing)
      for i, last in enumerate(seen_until(packing)):
        if grid.holds(i):
          arrays['seen_until'][grid.tokens(i)] = last
    for i, sample in zip(grid.local, samples, strict=True):
      row, at, segment = self._plan.rows[numbers[i]], grid.tokens(i), grid.segment(i)
      held = slice(int(packing.first[i]), row.length)
      arrays['tokens'][at] = sample.tokens[held]
      arrays['positions'][at] = np.arange(held.start, held.stop)
      arrays['segment_ids'][at] = packing.segment[i]
      arrays['loss_mask'][at] = arrays['reported'][at] = sample.loss_mask[held]
      arrays['is_expert'][at] = row.is_expert
      arrays['behaviour_logprobs'][at] = sample.behaviour_logprobs[held]
      arrays['temperature'][segment] = sample.temperature
      arrays['pair'][segment], arrays['label'][segment] = pairs[i], row.label or 0
    for name in ('behaviour_logprobs', 'temperature'):
      _check_finite(name, arrays[name])
    return PackedStep(grid.chunks(arrays), packing, numbers, grid, arrays['loss_mask'])

  def get_state(self) -> dict[str, Any]:
    return {'next': self._next, 'reads': self._reads.get_state()}

  def set_state(self, state: dict[str, Any]) -> None:
    self._next = state['next']
    self._reads.set_state(state['reads'])


def _reads(rows: Sequence[Row]) -> list[list[Row]]:
  """Divides rows into groups of consecutive rows. A group ends once it has at least
  `_TOKENS_AT_ONCE` tokens.
  """
  reads: list[list[Row]] = []
  room = 0
  for row in rows:
    if room <= 0:
      reads.append([])
      room = _TOKENS_AT_ONCE
    reads[-1].append(row)
    room -= row.length
  return reads


class RowLoader:
  """Loads the rows of step plans."""

  def __init__(self, workdir: pathlib.Path, mesh: Mesh, *, threads: int = 8):
    """
    Args:
      workdir: run directory, which all processes can read.
      threads: number of threads that read rows ahead. If it is 0, rows are read when they are
        needed.
    """
    self._reader = SegmentReader(workdir)
    self._sharding = sharding_of_batch(mesh)
    self._options = grain.ReadOptions(
      num_threads=threads, prefetch_buffer_size=_READS_AHEAD if threads else 0
    )

  def steps(self, plan: StepPlan, shape: Shape) -> grain.DatasetIterator[PackedStep]:
    """Returns an iterator over the plan's optimizer steps, packed and on the devices.

    The iterator loads steps ahead in threads, which its method `close` ends. Fields of the chunks
    that are computed later, such as advantages, are 0.
    """
    packed = _PackedSteps(plan, shape, self._reader, self._sharding, self._options)
    ahead = _STEPS_AHEAD if self._options.num_threads else 0
    return iter(grain.experimental.ThreadPrefetchIterDataset(packed, prefetch_buffer_size=ahead))

  async def ahead(self, plan: StepPlan, shape: Shape) -> AsyncIterator[PackedStep]:
    """Yields the same optimizer steps as `steps`, without blocking the event loop."""
    steps = self.steps(plan, shape)
    try:
      for number in range(len(plan.optimizer_steps)):
        yield await bounded(
          asyncio.to_thread(next, steps),
          name='rows',
          owner='the trainer',
          waits_for=f'the rows of optimizer step {number} of batch {plan.step + 1} from its files',
          deadline_s=_DEADLINE_S,
        )
    finally:
      steps.close()

  def fill(
    self, step: PackedStep, columns: Mapping[str, Column], in_loss: Bool[np.ndarray, 'rows']
  ) -> PackedStep:
    """Returns the step with the given fields of its chunks filled in.

    Args:
      step: one of the plan's steps, as loaded.
      columns: values to fill in, keyed by field of `Chunks`, with one entry per row of the plan.
        Tokens outside the loss mask get 0.
      in_loss: whether each row of the plan is in the loss. If False, the row's loss mask is
        cleared.
    """
    mask = step.loss_mask.copy()
    for i in step.grid.local:
      mask[step.grid.tokens(i)] &= bool(in_loss[step.rows[i]])
    arrays = {'loss_mask': mask}
    for name, values in columns.items():
      arrays[name] = np.zeros(mask.shape, np.float32)
      for i in step.grid.local:
        at, first = step.grid.tokens(i), int(step.packing.first[i])
        # A single value applies to all tokens of the row.
        value = np.asarray(values[step.rows[i]])
        arrays[name][at] = np.where(mask[at], value[first:] if value.ndim else value, 0.0)
      _check_finite(name, arrays[name])
    placed = {name: step.grid.place(array) for name, array in arrays.items()}
    return step._replace(chunks=step.chunks.replace(**placed), loss_mask=mask)


def _pair_numbers(plan: StepPlan, numbers: Sequence[int], packing: Packing) -> list[int]:
  """Returns the pair number of each row of an optimizer step, or 0 if the row is in no pair. Pairs
  are counted from 1 in each micro-batch.
  """
  pair_numbers: dict[tuple[int, str | None], int] = {}
  counts: collections.Counter[int] = collections.Counter()
  pairs = []
  for i, number in enumerate(numbers):
    key = (int(packing.micro_batch[i]), plan.rows[number].pair)
    if key[1] and key not in pair_numbers:
      counts[key[0]] += 1
      pair_numbers[key] = counts[key[0]]
    pairs.append(pair_numbers.get(key, 0))
  return pairs


def _check_finite(name: str, array: Float[np.ndarray, 'micro columns _']) -> None:
  if not np.isfinite(array).all():
    raise RunError(f'batch: {name} is not finite; a scorer or an engine returned it')


class Grid(NamedTuple):
  """The part of a step's `[micro_batches, chunks, ...]` arrays that is on this process's devices.

  Local arrays have only this part. Their second axis consists of columns, one per local chunk.
  """

  packing: Packing
  shape: Shape
  micro_batches: int
  columns: Mapping[int, int]
  """Column of the local arrays that contains each chunk, keyed by chunk number."""
  local: tuple[int, ...]
  """Indices of the packed rows whose chunks are on this process's devices."""
  sharding: NamedSharding

  @classmethod
  def of(cls, packing: Packing, shape: Shape, sharding: NamedSharding) -> Grid:
    micro_batches = max(shape.micro_batches, packing.micro_batches)
    total = shape.total_chunks
    indices = sharding.addressable_devices_indices_map(
      (micro_batches, total, shape.chunk_len)
    ).values()
    chunks = sorted({chunk for index in indices for chunk in range(*index[1].indices(total))})
    columns = {chunk: column for column, chunk in enumerate(chunks)}
    local = tuple(i for i in range(len(packing.length)) if int(packing.chunk[i]) in columns)
    return cls(packing, shape, micro_batches, columns, local, sharding)

  def zeros(self) -> dict[str, Shaped[np.ndarray, 'micro columns _']]:
    """Returns new local arrays, filled with 0, for the fields of `Chunks`, keyed by field."""
    local = shapes(
      self.micro_batches,
      len(self.columns),
      time=self.shape.chunk_len,
      segments=self.shape.segments,
      shares_prefixes=self.shape.shares_prefixes,
    )
    return {name: np.zeros(array.shape, array.dtype) for name, array in local.items()}

  def chunks(self, arrays: Mapping[str, Shaped[np.ndarray, 'micro columns _']]) -> Chunks:
    """Builds the global `Chunks`, sharded over all processes, from the local arrays."""
    return Chunks(**{name: self.place(array) for name, array in arrays.items()})

  def holds(self, i: int) -> bool:
    """Returns whether row `i` is on this process's devices."""
    return int(self.packing.chunk[i]) in self.columns

  def tokens(self, i: int) -> tuple[int, int, slice]:
    """Returns the index of the tokens of row `i` in a local array with one value per token."""
    start = int(self.packing.offset[i])
    return (*self._chunk(i), slice(start, start + int(self.packing.length[i])))

  def segment(self, i: int) -> tuple[int, int, int]:
    """Returns the index of row `i` in a local array with one value per segment."""
    return (*self._chunk(i), int(self.packing.segment[i]) - 1)

  def _chunk(self, i: int) -> tuple[int, int]:
    return int(self.packing.micro_batch[i]), self.columns[int(self.packing.chunk[i])]

  def place(
    self, array: Shaped[np.ndarray, 'micro columns width']
  ) -> Shaped[Array, 'micro chunks width']:
    """Builds a global array, sharded over all processes, from the local array."""
    total = self.shape.total_chunks

    def part(index):
      columns = [self.columns[chunk] for chunk in range(*index[1].indices(total))]
      return array[index[0], columns[0] : columns[-1] + 1, index[2]]

    return jax.make_array_from_callback(
      (array.shape[0], total, array.shape[2]), self.sharding, part
    )


def unpack(
  values: Shaped[np.ndarray, 'micro chunks time'], step: PackedStep
) -> dict[int, Shaped[np.ndarray, '_']]:
  """Splits a packed array, with one value per token, into one array per row, keyed by the row's
  index in the plan. Shared prefix tokens that are stored with another row are 0.
  """
  packing, by_row = step.packing, {}
  for i, row in enumerate(step.rows):
    start, first, held = (int(x[i]) for x in (packing.offset, packing.first, packing.length))
    by_row[row] = np.zeros(first + held, values.dtype)
    by_row[row][first:] = values[packing.micro_batch[i], packing.chunk[i], start : start + held]
  return by_row
