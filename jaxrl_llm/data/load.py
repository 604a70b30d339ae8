"""Rows named by a plan, from their files to this process's devices.

Each process reads only the rows that its own devices hold. Host arrays are made anew for every step: JAX may alias
them, so a buffer that was handed over is never written again.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float32, Float64, Int

from jaxrl_llm.batching.chunks import Chunks
from jaxrl_llm.batching.packing import Packing
from jaxrl_llm.batching.plan import Row, Shape, StepPlan, pack_step
from jaxrl_llm.core.errors import RunError
from jaxrl_llm.experience.sample import Sample
from jaxrl_llm.parallel.rules import sharding_of_batch
from jaxrl_llm.replay.segments import SegmentReader

# Grain would append advice about itself to the one line that an error is.
flags.FLAGS.set_default('grain_py_traceback_filtering', 'off')


class PackedStep(NamedTuple):
  """One optimizer step on the device."""

  chunks: Chunks
  used: Int[Array, '']
  """Micro-batches in use."""
  packing: Packing
  rows: tuple[int, ...]
  """Row numbers of the plan, in the packing's numbering."""


class _PlannedRows:
  """grain source: the rows of one plan that this process needs, by reference."""

  def __init__(self, reader: SegmentReader, rows: Sequence[Row]):
    self._reader, self._rows = reader, rows

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, i: int) -> Sample:
    row = self._rows[i]
    (sample,) = self._reader.read([(row.source, row.index)])
    if sample.uid != row.uid or len(sample.tokens) != row.length:
      raise RunError(
        f'{row.source} record {row.index}: holds {sample.uid} ({len(sample.tokens)} tokens), the plan wants {row.uid} '
        f'({row.length} tokens); the run directory is damaged, audit it or resume from an earlier commit'
      )
    return sample


class RowLoader:
  """Loads what a StepPlan names; `workdir` is the run directory that all processes share."""

  def __init__(self, workdir: pathlib.Path, mesh: Mesh):
    self._reader = SegmentReader(workdir)
    self._sharding = sharding_of_batch(mesh)

  def load(
    self,
    plan: StepPlan,
    number: int,
    shape: Shape,
    *,
    advantages: Float64[np.ndarray, 'rows'],
    in_loss: Bool[np.ndarray, 'rows'],
  ) -> PackedStep:
    """The plan's optimizer step `number`, packed, on the devices.

    Args:
      advantages: one per row of the plan, given to each of the row's trained tokens.
      in_loss: rows that are False lose their loss_mask.
    """
    packing = pack_step(plan, number, shape)
    numbers = plan.optimizer_steps[number]
    micro_batches = max(shape.micro_batches, packing.micro_batches)
    host = _HostChunks(micro_batches, shape, self._own_chunks(micro_batches, shape))
    local = [i for i in range(len(numbers)) if int(packing.chunk[i]) in host.columns]
    rows = [plan.rows[numbers[i]] for i in local]
    dataset = grain.MapDataset.source(_PlannedRows(self._reader, rows))
    samples = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    for i, row, sample in zip(local, rows, samples, strict=True):
      place = (int(packing.micro_batch[i]), host.columns[int(packing.chunk[i])], int(packing.offset[i]))
      k = numbers[i]
      host.write(
        sample,
        place,
        segment=int(packing.segment[i]),
        is_expert=row.is_expert,
        advantage=float(advantages[k]),
        in_loss=bool(in_loss[k]),
      )
    used = jnp.asarray(packing.micro_batches, jnp.int32)
    return PackedStep(host.to_device(self._sharding), used, packing, numbers)

  def _own_chunks(self, micro_batches: int, shape: Shape) -> list[int]:
    """Chunk numbers that this process's devices hold, in order."""
    total = shape.ranks * shape.chunks
    indices = self._sharding.addressable_devices_indices_map((micro_batches, total, shape.chunk_len)).values()
    return sorted({chunk for index in indices for chunk in range(*index[1].indices(total))})


_PER_TOKEN = {
  'tokens': np.int32,
  'positions': np.int32,
  'segment_ids': np.int32,
  'loss_mask': bool,
  'is_expert': bool,
  'behaviour_logprobs': np.float32,
  'proximal_logprobs': np.float32,
  'reference_logprobs': np.float32,
  'advantages': np.float32,
}


class _HostChunks:
  """The local part of `[micro_batches, chunks, ...]` arrays while it is being filled."""

  def __init__(self, micro_batches: int, shape: Shape, own_chunks: list[int]):
    self.columns = {chunk: column for column, chunk in enumerate(own_chunks)}
    self._total = shape.ranks * shape.chunks
    tokens = (micro_batches, len(own_chunks), shape.chunk_len)
    per_segment = (micro_batches, len(own_chunks), shape.segments)
    self._arrays = {name: np.zeros(tokens, dtype) for name, dtype in _PER_TOKEN.items()}
    self._arrays['temperature'] = np.ones(per_segment, np.float32)

  def write(
    self,
    sample: Sample,
    place: tuple[int, int, int],
    *,
    segment: int,
    is_expert: bool,
    advantage: float,
    in_loss: bool,
  ) -> None:
    """Puts a sample at `place`: (micro-batch, column, offset)."""
    micro, column, offset = place
    length = len(sample.tokens)
    at = (micro, column, slice(offset, offset + length))
    mask = sample.loss_mask & in_loss
    self._arrays['tokens'][at] = sample.tokens
    self._arrays['positions'][at] = np.arange(length)
    self._arrays['segment_ids'][at] = segment
    self._arrays['loss_mask'][at] = mask
    self._arrays['is_expert'][at] = is_expert
    self._arrays['behaviour_logprobs'][at] = sample.behaviour_logprobs
    self._arrays['advantages'][at] = np.where(mask, advantage, 0.0)
    self._arrays['temperature'][micro, column, segment - 1] = sample.temperature

  def to_device(self, sharding: jax.sharding.NamedSharding) -> Chunks:
    for name in ('behaviour_logprobs', 'advantages', 'temperature'):
      if not np.isfinite(self._arrays[name]).all():
        raise RunError(f'batch: {name} is not finite; a scorer or an engine let it through')
    return Chunks(**{name: self._place(array, sharding) for name, array in self._arrays.items()})

  def _place(self, array: np.ndarray, sharding: jax.sharding.NamedSharding) -> Array:
    def part(index):
      columns = [self.columns[chunk] for chunk in range(*index[1].indices(self._total))]
      return array[index[0], columns[0] : columns[-1] + 1, index[2]]

    shape = (array.shape[0], self._total, array.shape[2])
    return jax.make_array_from_callback(shape, sharding, part)


def unpack(
  logprobs: Float32[np.ndarray, 'micro chunks time'], step: PackedStep, lengths: Sequence[int]
) -> list[Float32[np.ndarray, '...']]:
  """Per-token values of packed arrays, cut back into one array per row of the step."""
  packing = step.packing
  return [
    logprobs[packing.micro_batch[i], packing.chunk[i], packing.offset[i] : packing.offset[i] + length]
    for i, length in enumerate(lengths)
  ]
