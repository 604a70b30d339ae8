"""What one step trains on and does: made by process 0, the same in every process, recorded, replayable.

Everything else about a step (packing, advantages, shapes) is a pure function of its plan, so it is derived where it is
needed instead of being sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.batching.packing import Packing, deal, pack
from jaxrl_llm.core.types import Json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One sequence of a batch, by reference: the tokens stay in the file."""

  uid: str
  source: str
  """ArrayRecord file, relative to the run directory."""
  index: int
  """Record in that file."""
  length: int
  prompt_len: int
  group: str
  reward: float | None
  """None = unscorable (or not a rollout)."""
  is_expert: bool
  truncated: bool
  """Ended by the length limit."""
  version_step: int
  """Step of the oldest version that wrote a token of it; -1 for rows that no version wrote."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
  """One step: its rows, how they are dealt into optimizer steps, and what is done beside the update."""

  step: int
  """Completed batches before this one."""
  stage: str
  rows: tuple[Row, ...] = ()
  optimizer_steps: tuple[tuple[int, ...], ...] = ()
  """Row numbers of each optimizer step, in order; an epoch more is the same rows dealt again."""
  proximal: bool = False
  """Whether a forward pass computes the proximal logprobs before the update."""
  proximal_reason: str = ''
  evaluate: bool = False
  commit: bool = False
  commit_by_clock: bool = False
  stop: int = 0
  """0, or the signal to leave for after committing what is done; such a plan has no rows."""
  counts: dict[str, int] = dataclasses.field(default_factory=dict)
  """What was counted while the batch was collected (dropped samples and groups by reason)."""

  def to_json(self) -> Json:
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, value: Any) -> StepPlan:
    rows = tuple(Row(**row) for row in value['rows'])
    steps = tuple(tuple(step) for step in value['optimizer_steps'])
    return cls(**{**value, 'rows': rows, 'optimizer_steps': steps})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """The planned shape of one optimizer step's arrays, `[micro_batches, ranks * chunks, chunk_len]`: compiled once."""

  ranks: int
  """Data-parallel ranks."""
  chunks: int
  """Chunks per rank and micro-batch."""
  chunk_len: int
  """Tokens of a chunk."""
  micro_batches: int
  """Upper bound; how many are in use is a run-time number, so that it compiles nothing."""
  segments: int
  """Upper bound of sequences in a chunk."""


def plan_shape(*, rows: int, ranks: int, chunks: int, chunk_len: int) -> Shape:
  """The shape that holds any `rows` sequences of at most `chunk_len` tokens, in the worst case one in a chunk."""
  per_rank = -(-rows // ranks)
  return Shape(
    ranks=ranks,
    chunks=chunks,
    chunk_len=chunk_len,
    micro_batches=-(-per_rank // chunks),
    segments=max(1, min(chunk_len, per_rank)),
  )


def deal_rows(rows: Sequence[Row], *, minibatches: int, epochs: int, seed: int) -> tuple[tuple[int, ...], ...]:
  """Row numbers for each optimizer step: `epochs` times a seeded deal of the rows into `minibatches` parts."""
  units = [[i] for i in range(len(rows))]
  steps: list[tuple[int, ...]] = []
  for epoch in range(epochs):
    # Not seed + epoch: the second epoch of one batch would be dealt as the first of the next.
    parts = deal(units, minibatches, seed=seed * epochs + epoch)
    steps += [tuple(i for unit in part for i in units[unit]) for part in parts]
  return tuple(steps)


def pack_step(plan: StepPlan, number: int, shape: Shape) -> Packing:
  """The packing of the plan's optimizer step `number`; its rows are numbered as in `plan.optimizer_steps[number]`."""
  lengths = [plan.rows[i].length for i in plan.optimizer_steps[number]]
  return pack(lengths, units=None, ranks=shape.ranks, chunks=shape.chunks, chunk_len=shape.chunk_len)
