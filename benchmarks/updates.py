"""Shared code of benchmarks of the learner: models, random rows, and optimizer steps on them as in
a run.

Rows are packed with the project's own packing into arrays of the shape from `plan_shape`; reading
rows from files is left out, and so is grain, which a machine with an accelerator may lack.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jaxrl_llm.batching.chunks import Chunks, shapes
from jaxrl_llm.batching.packing import Packing, pack
from jaxrl_llm.batching.plan import plan_shape
from jaxrl_llm.batching.trees import Branch, pack_trees, seen_until, sorted_prefixes
from jaxrl_llm.learner.algorithm import Loss, Setting
from jaxrl_llm.learner.optimizer import OptimizerConfig, build_optimizer
from jaxrl_llm.learner.policy_gradient import policy_gradient
from jaxrl_llm.learner.policy_options import GrpoConfig
from jaxrl_llm.learner.state import init_params, init_state, place_params
from jaxrl_llm.learner.update import Report, build_update
from jaxrl_llm.models.api import Model, build_model
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import ModelOptions, ModelSpec
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh

SHAPES = {
  'S': tiny(
    'qwen2', 2048, hidden_size=256, intermediate_size=1024, num_hidden_layers=6, head_dim=64
  ),
  'T': tiny(
    'qwen2',
    4096,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
  ),
}
"""Models of 6.4 and 8.9 million parameters: 4 query heads on 2 KV heads, and 8 on 4; tied
embeddings.
"""

GRPO = GrpoConfig(loss_agg_mode='seq-mean-token-mean', rollout_is='none')
"""Loss of the GRPO paper, which TRL and Tunix compute too."""


class Row(NamedTuple):
  tokens: Int[np.ndarray, 'time']
  prompt_len: int
  label: int = 0
  """1 for a chosen row; -1 for a rejected row, which follows its chosen row; 0 for a row without a
  pair.
  """
  advantage: float = 0.0
  group: int | None = None
  """Number of the row's group. Rows of a group may share a prefix. If None, the row shares a prefix
  at most with the other row of its pair.
  """


class Batch(NamedTuple):
  chunks: Chunks
  used: Int[Array, '']
  packing: Packing


def lognormal_lengths(count: int, *, longest: int = 512, seed: int = 0) -> list[int]:
  """Returns response-like lengths: mean about 139 and 95th percentile about 350 if the longest is
  512 tokens.
  """
  draws = np.random.default_rng(seed).lognormal(4.70, 0.7, count) * longest / 512
  return np.clip(draws, 2, longest).astype(int).tolist()


def random_rows(
  lengths: Sequence[int], *, prompt_len: int, vocab: int, pairs: bool = False, seed: int = 0
) -> list[Row]:
  """Returns rows of random tokens; a prompt is at most half of its row. With `pairs`, chosen and
  rejected alternate.
  """
  rng = np.random.default_rng(seed)
  return [
    Row(
      rng.integers(3, vocab, length).astype(np.int32),
      min(prompt_len, length // 2),
      label=(1, -1)[i % 2] if pairs else 0,
      advantage=float(rng.standard_normal()),
    )
    for i, length in enumerate(lengths)
  ]


def grouped_rows(
  lengths: Sequence[int], *, group_size: int, prompt_len: int, vocab: int, seed: int = 0
) -> list[Row]:
  """Returns rows of random tokens in which `group_size` consecutive rows have the same prompt.

  Args:
    lengths: number of completion tokens of each row.
  """
  rng = np.random.default_rng(seed)
  rows = []
  for i, length in enumerate(lengths):
    if i % group_size == 0:
      prompt = rng.integers(3, vocab, prompt_len)
    tokens = np.concatenate([prompt, rng.integers(3, vocab, length)]).astype(np.int32)
    advantage = float(rng.standard_normal())
    rows.append(Row(tokens, prompt_len, advantage=advantage, group=i // group_size))
  return rows


def pack_rows(
  rows: Sequence[Row], *, chunks: int, chunk_len: int, apart: bool = False, shared: bool = False
) -> Batch:
  """Packs rows into the batch of one optimizer step, on the default device.

  Args:
    chunks: chunks per micro-batch.
    chunk_len: tokens per chunk.
    apart: whether each row gets a separate padded chunk.
    shared: whether rows share prefixes.
  """
  unit, lengths = 2 if rows[0].label else 1, [len(row.tokens) for row in rows]
  units = [list(range(i, i + unit)) for i in range(0, len(rows), unit)]
  sizes = [chunk_len] * len(rows) if apart else lengths
  size = dict(ranks=1, chunks=chunks, chunk_len=chunk_len)
  packing = (
    pack_trees(sizes, _families(rows, units), units=units, **size)
    if shared
    else pack(sizes, units=units, **size)
  )
  shape = plan_shape(rows=len(rows), **size, unit=unit, longest=max(sizes), shares_prefixes=shared)
  per_step = shapes(
    shape.micro_batches,
    chunks,
    time=chunk_len,
    segments=shape.segments,
    shares_prefixes=shared,
  )
  arrays = {name: np.zeros(array.shape, array.dtype) for name, array in per_step.items()}
  arrays['temperature'][:] = 1.0
  pairs: collections.Counter[int] = collections.Counter()
  last = seen_until(packing)
  for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
    chunk, start = (int(packing.micro_batch[i]), int(packing.chunk[i])), int(packing.offset[i])
    positions = np.arange(packing.first[i], length)
    at, trained = (*chunk, slice(start, start + len(positions))), positions >= row.prompt_len
    arrays['tokens'][at] = row.tokens[positions]
    arrays['positions'][at] = positions
    if shared:
      arrays['seen_until'][at] = last[i]
    arrays['segment_ids'][at] = packing.segment[i]
    arrays['loss_mask'][at] = arrays['reported'][at] = trained
    arrays['advantages'][at] = np.where(trained, row.advantage, 0.0)
    segment = (*chunk, int(packing.segment[i]) - 1)
    # Numbered from 1 in each micro-batch.
    pairs[chunk[0]] += row.label == 1
    arrays['pair'][segment], arrays['label'][segment] = (
      pairs[chunk[0]] if row.label else 0,
      row.label,
    )
  used = jnp.asarray(packing.micro_batches, jnp.int32)
  return Batch(Chunks(**jax.tree.map(jnp.asarray, arrays)), used, packing)


def _families(rows: Sequence[Row], units: Sequence[Sequence[int]]) -> list[list[Branch]]:
  """Returns the groups, or the pairs, in the form that `pack_trees` takes."""
  families: dict[int, list[int]] = collections.defaultdict(list)
  for unit, members in enumerate(units):
    for i in members:
      families[unit if rows[i].group is None else rows[i].group].append(i)
  return [
    [
      Branch(members[i], min(common, rows[members[i]].prompt_len - 1))
      for i, common in sorted_prefixes([rows[i].tokens for i in members])
    ]
    for members in families.values()
  ]


def one_device() -> Mesh:
  return build_mesh(MeshConfig(), jax.devices()[:1])


class Learner:
  """A model and its optimizer on one device; `step` is the learner's own update."""

  def __init__(
    self,
    spec: ModelSpec,
    options: ModelOptions | None = None,
    *,
    loss: Loss | None = None,
    token_chunk: int,
    params: object = None,
  ):
    """
    Args:
      loss: loss of the updates. If None, GRPO's loss.
      token_chunk: number of positions whose logits are computed at a time.
      params: initial parameters as host arrays. If None, they are random.
    """
    grpo = policy_gradient(GRPO, Setting(max_response_length=spec.max_position_embeddings))
    config = OptimizerConfig(peak_lr=1e-6, max_grad_norm=1.0, skip_grad_norm=float('inf'))
    optimizer, self.mesh = build_optimizer(config, 1000), one_device()
    self.model: Model = build_model(spec, options, self.mesh)
    params = (
      init_params(self.model, self.mesh, seed=0)
      if params is None
      else place_params(self.model, self.mesh, params)
    )
    self.state = init_state(params, optimizer, self.mesh)
    on_policy = ('proximal_logprobs',) if loss is None else ()
    self._update = build_update(
      self.model,
      grpo.loss if loss is None else loss,
      optimizer,
      config,
      self.mesh,
      self.state,
      updates=1000,
      token_chunk=token_chunk,
      on_policy=on_policy,
    )

  def step(self, batch: Batch) -> Report:
    """Runs one optimizer step and waits for its end."""
    self.state, report = self._update(self.state, batch.chunks, batch.used, {})
    return jax.block_until_ready(report)

  def lower(self, batch: Batch) -> jax.stages.Lowered:
    return self._update.lower(self.state, batch.chunks, batch.used, {})
