"""Cost model that orders memory plans by speed: the seconds of an update, from operations, bytes
between devices, bytes to and from the host, and accesses to the gradient of the head.

The four parts are added, as if they did not overlap in time. The result is meant for comparing
plans of the same stages on the same devices, not for predicting times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.app.composition.automatic import parameters
from jaxrl_llm.app.dry_run.expected import link_rate
from jaxrl_llm.master.trainer import Stage
from jaxrl_llm.models.api import Model
from jaxrl_llm.models.flops import causal_pairs, model_flops, recomputed_flops
from jaxrl_llm.models.heads import head_size
from jaxrl_llm.parallel.mesh import DATA, TENSOR
from jaxrl_llm.parallel.topology import CHIPS, Chip, chip_of

UTILISATION = 0.4
"""Share of the chip's peak FLOP/s that is assumed. A well-tuned step reaches this share."""
_UNKNOWN = Chip('cuda', 0, 1e12, 100e9, 10e9, 10e9)
"""Rates of a device that `CHIPS` does not list, such as a CPU. Only their ratios matter."""


class Cost(NamedTuple):
  """Seconds that one update spends on each kind of work."""

  compute: float
  """Seconds of the model's arithmetic, including recomputation."""
  exchange: float
  """Seconds of gathering weights and summing gradients across devices."""
  host: float
  """Seconds of transferring moments and activations to and from host memory."""
  head: float
  """Seconds for accesses to the gradient of the head's kernel, which each chunk of logits reads and
  writes.
  """

  @property
  def seconds(self) -> float:
    return sum(self)


def update_cost(stages: Sequence[Stage], model: Model, mesh: Mesh, chip: str | None) -> Cost:
  """Returns the mean cost of a policy update over all updates of `stages`, if every micro-batch of
  an update is in use.

  Args:
    chip: kind of the target devices; None for the devices of the mesh.
  """
  device = mesh.devices.flat[0]
  rates = CHIPS[chip] if chip else chip_of(device.device_kind) or _UNKNOWN
  rates = rates._replace(link_bytes_per_s=link_rate(mesh, rates))
  counts = [max(1, stage.updates) for stage in stages]
  costs = np.array([_cost(stage, model, mesh, rates) for stage in stages])
  return Cost(*np.average(costs, axis=0, weights=counts).tolist())


def _cost(stage: Stage, model: Model, mesh: Mesh, rates: Chip) -> Cost:
  spec, options, shape = model.spec, model.options, stage.shape
  devices, tokens = mesh.devices.size, shape.total_chunks * shape.chunk_len
  pairs = causal_pairs([shape.chunk_len] * shape.total_chunks)
  once = stage.token_chunk == shape.chunk_len
  recomputed = recomputed_flops(spec, options, tokens, pairs=pairs, once=once)
  operations = model_flops(spec, tokens, pairs=pairs) + recomputed
  itemsize = np.dtype('float32').itemsize if options.dtype == 'float32' else 2
  # A device gathers each weight twice, forward and backward, in the compute dtype, and passes on
  # its gradient in float32.
  whole = parameters(spec) * (2 * itemsize + 4) / mesh.shape[TENSOR]
  shards = devices // mesh.shape[TENSOR] // mesh.shape[DATA]
  exchanged = whole * (shards - 1) / shards
  kept = 0
  if options.remat == 'offload':
    inputs = spec.num_hidden_layers * tokens * spec.hidden_size * itemsize
    kept = 2 * inputs / devices
  moments = 2 * 4 * parameters(spec) / devices  # Each parameter has two moments in float32.
  moved = 2 * moments if stage.policy.config.offloads else 0
  # Each chunk of logits reads and writes the gradient of the whole head in float32.
  passes = shape.chunk_len // stage.token_chunk
  accessed = 2 * 4 * passes * head_size(spec) * spec.hidden_size / mesh.shape[TENSOR]
  micro_batches = shape.micro_batches
  return Cost(
    micro_batches * operations / (devices * rates.peak_flops * UTILISATION),
    micro_batches * exchanged / rates.link_bytes_per_s,
    (micro_batches * kept + moved) / rates.host_bytes_per_s,
    micro_batches * accessed / rates.memory_bytes_per_s,
  )
