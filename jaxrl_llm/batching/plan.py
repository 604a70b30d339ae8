"""What one step trains on and does: made by process 0, the same in every process, recorded, replayable.

Everything else about a step (packing, advantages, shapes) is a pure function of its plan, so it is derived where it is
needed instead of being sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.batching.packing import Packing, deal, pack
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Json

_DRAWS = 16
"""Optimizer steps that a shape is planned on."""
_KEPT = 0.97
"""Of the utilisation that the narrowest micro-batches reach."""


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
  correct: bool | None = None
  """What the taskset's own measure of correctness says; None = unknown, or not a rollout."""
  turn_rewards: tuple[float, ...] = ()
  """Rewards of single turns, on top of `reward`; each counts at its turn's last token."""
  trajectory: str = ''
  """Rows of one trajectory that was recorded step by step share it; empty: the row is a trajectory of its own."""
  step_index: int = 0
  """Which step of its trajectory the row is."""
  masked: bool = False
  """In its group's baseline, and not trained on."""
  pair: str = ''
  """Preference pair that the row belongs to; empty: none."""
  label: int = 0
  """In its pair: 1 chosen, -1 rejected."""


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
  """Why; empty where none is made."""
  held_out: tuple[Row, ...] = ()
  """Rows that the policy is measured on after the update, where the step ends with an evaluation."""
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
    rows, held_out = (
      tuple(Row(**{**row, 'turn_rewards': tuple(row['turn_rewards'])}) for row in value[name])
      for name in ('rows', 'held_out')
    )
    steps = tuple(tuple(step) for step in value['optimizer_steps'])
    return cls(**{**value, 'rows': rows, 'optimizer_steps': steps, 'held_out': held_out})


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


def plan_shape(
  *, rows: int, ranks: int, chunks: int, chunk_len: int, unit: int = 1, lengths: Sequence[int] = ()
) -> Shape:
  """The shape that holds any `rows` sequences of at most `chunk_len` tokens, in the worst case one in a chunk.

  Args:
    chunks: of a rank and micro-batch, at most; fewer where `lengths` say that the last micro-batch would be too empty.
    unit: sequences that may not be separated (2 for pairs).
    lengths: of the stage's sequences, or of a sample of them, those of a unit one after the other; empty: unknown.
  """
  if chunks < unit:
    raise UserError(
      f'learner.chunks_per_rank: {chunks} chunks of a micro-batch cannot hold {unit} sequences that belong together; '
      f'wanted at least {unit}'
    )
  units = -(-rows // unit // ranks)
  if lengths:
    chunks = _plan_chunks(lengths, rows=rows, ranks=ranks, most=chunks, chunk_len=chunk_len, unit=unit)
  return Shape(
    ranks=ranks,
    chunks=chunks,
    chunk_len=chunk_len,
    micro_batches=-(-units // (chunks // unit)),
    segments=max(1, min(chunk_len, units * unit)),
  )


def _plan_chunks(lengths: Sequence[int], *, rows: int, ranks: int, most: int, chunk_len: int, unit: int) -> int:
  """The most chunks of a micro-batch whose rounding up costs no drawn step more than a share of its places.

  A rank's chunks are rounded up to whole micro-batches, so that half a micro-batch is empty on average: much where a
  step has few of them. The fewer chunks a micro-batch has, the less is lost so, and the less there is for a device to
  do at a time.
  """
  groups = [lengths[i : i + unit] for i in range(0, len(lengths), unit)]
  count, rng = max(1, rows // unit), np.random.Generator(np.random.Philox(key=0))
  drawn = [rng.choice(len(groups), count, replace=count > len(groups)) for _ in range(_DRAWS)]
  steps = [[length for group in draw for length in groups[group]] for draw in drawn]
  units = [list(range(i, i + unit)) for i in range(0, count * unit, unit)]

  def least(chunks: int) -> float:
    return min(
      pack(step, units=units, ranks=ranks, chunks=chunks, chunk_len=chunk_len).utilisation / full
      for step, full in zip(steps, best)
    )

  best = [pack(step, units=units, ranks=ranks, chunks=unit, chunk_len=chunk_len).utilisation for step in steps]
  return next(chunks for chunks in range(most, unit - 1, -1) if chunks == unit or least(chunks) >= _KEPT)


def units_of(rows: Sequence[Row]) -> list[list[int]]:
  """Row numbers of what may not be separated: the rows of a pair, and every other row for itself."""
  units: dict[str, list[int]] = {}
  for i, row in enumerate(rows):
    units.setdefault(row.pair or f'{i}/', []).append(i)  # No pair's name ends so: a pair is named by its sample.
  return list(units.values())


def deal_rows(rows: Sequence[Row], *, minibatches: int, epochs: int, seed: int) -> tuple[tuple[int, ...], ...]:
  """Row numbers for each optimizer step: `epochs` times a seeded deal of the rows into `minibatches` parts.

  Expert rows and the others are dealt apart, so that each part has its share of both; pairs stay together.
  """
  units = units_of(rows)
  kinds = [[u for u in units if rows[u[0]].is_expert is expert] for expert in (False, True)]
  steps: list[tuple[int, ...]] = []
  for epoch in range(epochs):
    # Not seed + epoch: the second epoch of one batch would be dealt as the first of the next.
    dealt = [deal(kind, minibatches, seed=seed * epochs + epoch) for kind in kinds if kind]
    for number in range(minibatches):
      parts = [kind[unit] for kind, parts in zip(filter(None, kinds), dealt) for unit in parts[number]]
      steps.append(tuple(i for unit in parts for i in unit))
  return tuple(steps)


def pack_step(plan: StepPlan, number: int, shape: Shape) -> Packing:
  """The packing of the plan's optimizer step `number`; its rows are numbered as in `plan.optimizer_steps[number]`."""
  rows = [plan.rows[i] for i in plan.optimizer_steps[number]]
  return pack(
    [row.length for row in rows],
    units=units_of(rows),
    ranks=shape.ranks,
    chunks=shape.chunks,
    chunk_len=shape.chunk_len,
  )
