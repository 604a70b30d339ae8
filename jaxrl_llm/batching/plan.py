"""Step plans: rows and decisions of a training step, made by process 0, sent to all, replayable.

Everything else about a step (packing, advantages, shapes) is a pure function of its plan, so it is
derived where needed instead of being sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxrl_llm.batching.packing import Packing, deal, pack
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Json

_DRAWS = 16
"""Number of optimizer steps drawn at random to choose the chunks per micro-batch."""
_KEPT = 0.97
"""Minimum utilisation, relative to that with the fewest possible chunks per micro-batch."""


_ABSENT: Mapping[str, Json] = {'version_step': -1, 'trajectory': '', 'pair': '', 'label': 0}
"""Value that files hold in place of None, keyed by field of Row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One sequence of a batch, by reference: the tokens stay in the file."""

  uid: str
  source: str
  """ArrayRecord file, relative to the run directory."""
  index: int
  """Record index in that file."""
  length: int
  prompt_len: int
  group: str
  reward: float | None
  """None: unscorable, or not a rollout."""
  is_expert: bool
  truncated: bool
  """Whether the length limit ended the sequence."""
  version_step: int | None
  """Step of the oldest policy version that sampled any of its tokens; None: not of this run."""
  correct: bool | None = None
  """Correctness by the taskset's own measure; None: unknown, or not a rollout."""
  turn_rewards: tuple[float, ...] = ()
  """Per-turn rewards, in addition to `reward`; each is credited at its turn's last token."""
  trajectory: str | None = None
  """Id shared by the rows of one trajectory recorded step by step; None: it has only one row."""
  step_index: int = 0
  """Index of the row's step in its trajectory."""
  masked: bool = False
  """Whether the row is not trained on, although it counts in its group's baseline."""
  pair: str | None = None
  """Id of the row's preference pair."""
  label: Literal[1, -1] | None = None
  """Role in the pair: 1 chosen, -1 rejected."""

  def to_json(self) -> dict[str, Json]:
    row = dataclasses.asdict(self)
    return row | {name: placeholder for name, placeholder in _ABSENT.items() if row[name] is None}

  @classmethod
  def from_json(cls, value: Mapping[str, Any]) -> Row:
    absent = {name: None for name, placeholder in _ABSENT.items() if value.get(name) == placeholder}
    return cls(**{**value, **absent, 'turn_rewards': tuple(value['turn_rewards'])})


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
  """One step: its rows, their split into optimizer steps, and the actions besides the update."""

  step: int
  """Completed batches before this one."""
  stage: str
  rows: tuple[Row, ...] = ()
  optimizer_steps: tuple[tuple[int, ...], ...] = ()
  """Row numbers of each optimizer step, in order; each further epoch splits the same rows again."""
  proximal: bool = False
  """Whether a forward pass computes the proximal logprobs before the update."""
  proximal_reason: str = ''
  """Reason for that pass; empty without one."""
  held_out: tuple[Row, ...] = ()
  """Rows on which to measure the policy after the update, if the step ends with an evaluation."""
  evaluate: bool = False
  commit: bool = False
  commit_by_clock: bool = False
  stop: int = 0
  """Signal that ends the run after a commit of the completed batches (plan without rows), or 0."""
  counts: dict[str, int] = dataclasses.field(default_factory=dict)
  """Counters from collecting the batch: dropped samples and groups, keyed by reason."""

  def to_json(self) -> Json:
    rows, held_out = ([row.to_json() for row in part] for part in (self.rows, self.held_out))
    return {
      **dataclasses.asdict(dataclasses.replace(self, rows=(), held_out=())),
      'rows': rows,
      'held_out': held_out,
    }

  @classmethod
  def from_json(cls, value: Any) -> StepPlan:
    rows, held_out = (tuple(map(Row.from_json, value[name])) for name in ('rows', 'held_out'))
    steps = tuple(tuple(step) for step in value['optimizer_steps'])
    return cls(**{**value, 'rows': rows, 'optimizer_steps': steps, 'held_out': held_out})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """Planned shape of a step's arrays, `[micro_batches, ranks * chunks, chunk_len]`. Each program
  compiles once for it.
  """

  ranks: int
  """Data-parallel ranks."""
  chunks: int
  """Chunks per rank and micro-batch."""
  chunk_len: int
  """Tokens per chunk."""
  micro_batches: int
  """Upper bound on micro-batches; the number in use may change without recompilation."""
  segments: int
  """Upper bound on sequences per chunk."""

  @property
  def total_chunks(self) -> int:
    """Chunks per micro-batch, over all ranks."""
    return self.ranks * self.chunks

  def pack(self, lengths: Sequence[int], units: Sequence[Sequence[int]] | None = None) -> Packing:
    """Packs the rows of one optimizer step, see `packing.pack`."""
    return pack(
      lengths, units=units, ranks=self.ranks, chunks=self.chunks, chunk_len=self.chunk_len
    )


def plan_shape(
  *, rows: int, ranks: int, chunks: int, chunk_len: int, unit: int = 1, lengths: Sequence[int] = ()
) -> Shape:
  """Returns a shape that fits any `rows` sequences of at most `chunk_len` tokens, even if each
  chunk holds only one.

  Args:
    chunks: maximum per rank and micro-batch; lowered if `lengths` show that the last micro-batch
      would be too empty.
    unit: sequences that stay together (2 for pairs).
    lengths: lengths of the stage's sequences, or of a sample of them; those of a unit are adjacent.
      Empty: unknown.
  """
  if chunks < unit:
    raise UserError(
      f'learner.chunks_per_rank: {chunks} chunks per micro-batch cannot hold {unit} sequences that '
      f'belong together; wanted at least {unit}'
    )
  units = -(-rows // unit // ranks)
  if lengths:
    chunks = _plan_chunks(
      lengths, rows=rows, ranks=ranks, most=chunks, chunk_len=chunk_len, unit=unit
    )
  return Shape(
    ranks=ranks,
    chunks=chunks,
    chunk_len=chunk_len,
    micro_batches=-(-units // (chunks // unit)),
    segments=max(1, min(chunk_len, units * unit)),
  )


def _plan_chunks(
  lengths: Sequence[int], *, rows: int, ranks: int, most: int, chunk_len: int, unit: int
) -> int:
  """Returns the largest number of chunks per micro-batch that keeps every drawn step well utilised.

  Well utilised: at least `_KEPT` of the best utilisation. A rank's chunks are rounded up to whole
  micro-batches, so half a micro-batch is empty on average: a large share if a step has few of them.
  Fewer chunks per micro-batch waste less, but give a device less work at a time.
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

  best = [
    pack(step, units=units, ranks=ranks, chunks=unit, chunk_len=chunk_len).utilisation
    for step in steps
  ]
  return next(
    chunks for chunks in range(most, unit - 1, -1) if chunks == unit or least(chunks) >= _KEPT
  )


def units_of(rows: Sequence[Row]) -> list[list[int]]:
  """Row numbers of each unit: the rows of a preference pair, or a single row."""
  units: dict[str, list[int]] = {}
  for i, row in enumerate(rows):
    # A pair's id is made of sample names and never ends in '/', so it differs from the key of a
    # single row.
    units.setdefault(row.pair or f'{i}/', []).append(i)
  return list(units.values())


def deal_rows(
  rows: Sequence[Row], *, minibatches: int, epochs: int, seed: int
) -> tuple[tuple[int, ...], ...]:
  """Splits rows into `minibatches` optimizer steps per epoch, each by its own seeded permutation.

  Expert rows and the others are split separately, so that each step has its share of both; pairs
  stay together.
  """
  units = units_of(rows)
  kinds = [[u for u in units if rows[u[0]].is_expert is expert] for expert in (False, True)]
  steps: list[tuple[int, ...]] = []
  for epoch in range(epochs):
    # Not seed + epoch: the second epoch of one batch would be split like the first of the next.
    dealt = [deal(kind, minibatches, seed=seed * epochs + epoch) for kind in kinds if kind]
    for number in range(minibatches):
      parts = [
        kind[unit] for kind, parts in zip(filter(None, kinds), dealt) for unit in parts[number]
      ]
      steps.append(tuple(i for unit in parts for i in unit))
  return tuple(steps)


def pack_step(plan: StepPlan, number: int, shape: Shape) -> Packing:
  """Packs the plan's optimizer step `number`; the packing numbers rows as in
  `plan.optimizer_steps[number]`.
  """
  rows = [plan.rows[i] for i in plan.optimizer_steps[number]]
  return shape.pack([row.length for row in rows], units_of(rows))
