"""Step plans: the rows and decisions of a training step.

Process 0 makes the plan of a step, broadcasts it to all processes and records it, so that the step
can be replayed. Everything else about the step (packing, advantages, shapes) follows from the plan,
so each process derives it.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxrl_llm.batching.packing import Packing, deal, pack
from jaxrl_llm.batching.trees import Branch, pack_trees, sorted_prefixes
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Sample
from jaxrl_llm.core.types import Json

_DRAWS = 16
"""Number of randomly drawn optimizer steps that are packed to choose the chunks per micro-batch."""
_KEPT = 0.97
"""Minimum fraction of used token slots, relative to the fraction with the fewest possible chunks
per micro-batch.
"""


_ABSENT: Mapping[str, Json] = {'version_step': -1, 'trajectory': '', 'pair': '', 'label': 0}
"""Value that represents None in files, keyed by field of Row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One sequence of a batch. The row names a record in a file, but does not contain its tokens."""

  uid: str
  source: str
  """Path of the ArrayRecord file, relative to the run directory."""
  index: int
  """Index of the record in that file."""
  length: int
  prompt_len: int
  group: str
  reward: float | None
  """Reward; None if the sequence is unscorable or is not a rollout."""
  is_expert: bool
  truncated: bool
  """Whether a limit on tokens or steps ended the row's trajectory; False if the row is not a
  rollout.
  """
  version_step: int | None
  """Step of the oldest policy version that sampled any of the row's tokens in the loss. None if
  this run sampled none of them.
  """
  correct: bool | None = None
  """Whether the completion is correct according to the taskset's scorer. None if this is unknown or
  the sequence is not a rollout.
  """
  turn_rewards: tuple[float, ...] = ()
  """Rewards of the turns, in addition to `reward`. Each turn's reward is credited at the last token
  of the turn.
  """
  trajectory: str | None = None
  """Id of the row's trajectory if each of its steps is a separate row. None if this row is the
  whole trajectory.
  """
  step_index: int = 0
  """Index of the row's step in its trajectory."""
  prompt_digest: str = ''
  """Digest of the row's prompt, by which steps that start from the same state are recognized. Empty
  if no trajectory of the batch has several steps.
  """
  masked: bool = False
  """Whether the row counts only in its group's baseline and is not trained on."""
  pair: str | None = None
  """Id of the row's preference pair; None if it is in no pair."""
  label: Literal[1, -1] | None = None
  """Role in the pair: 1 for chosen, -1 for rejected. None if the row is in no pair."""
  place: int = 0
  """Index of the row in its family (a preference pair or a group). The rows of a family are sorted
  by token ids.
  """
  common: int = 0
  """Number of leading tokens that the row has in common with the row before it in its family.
  Tokens after the family's longest prompt do not count. 0 if a token of the row's prompt is trained
  on.
  """

  @property
  def family(self) -> tuple[str, str]:
    """Key of the row's family: the rows with which it may share a prefix."""
    return ('pair', self.pair) if self.pair else ('group', self.group)

  def to_json(self) -> dict[str, Json]:
    # `dataclasses.asdict` is not used, because with a tiny model its recursive copies of all rows
    # would take as long as the training step.
    row = {**vars(self), 'turn_rewards': [*self.turn_rewards]}
    return row | {name: placeholder for name, placeholder in _ABSENT.items() if row[name] is None}

  @classmethod
  def from_json(cls, value: Mapping[str, Any]) -> Row:
    absent = {name: None for name, placeholder in _ABSENT.items() if value.get(name) == placeholder}
    return cls(**{**value, **absent, 'turn_rewards': tuple(value['turn_rewards'])})


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
  """Plan of one step: its rows, how they are split into optimizer steps, and whether the step
  evaluates, commits or ends the run.
  """

  step: int
  """Number of batches completed before this one."""
  stage: str
  rows: tuple[Row, ...] = ()
  optimizer_steps: tuple[tuple[int, ...], ...] = ()
  """Row numbers of each optimizer step, in the order of the steps. Each epoch contains every row
  once.
  """
  proximal: bool = False
  """Whether a forward pass computes the proximal logprobs before the update."""
  proximal_reason: str = ''
  """Reason for the proximal forward pass; empty if `proximal` is False."""
  held_out: tuple[Row, ...] = ()
  """Rows on which the policy is measured after the update. Empty unless the step evaluates."""
  evaluate: bool = False
  commit: bool = False
  commit_by_clock: bool = False
  stop: int = 0
  """Number of the signal that ends the run, or 0. If it is not 0, the plan has no rows, and the
  completed batches are committed before the run ends.
  """
  counts: dict[str, int] = dataclasses.field(default_factory=dict)
  """Counts of events while the batch was collected, such as the samples dropped for each reason."""

  def to_json(self) -> Json:
    rows, held_out = ([row.to_json() for row in part] for part in (self.rows, self.held_out))
    return {**vars(self), 'rows': rows, 'held_out': held_out, 'counts': dict(self.counts)}

  @classmethod
  def from_json(cls, value: Any) -> StepPlan:
    rows, held_out = (tuple(map(Row.from_json, value[name])) for name in ('rows', 'held_out'))
    steps = tuple(tuple(step) for step in value['optimizer_steps'])
    return cls(**{**value, 'rows': rows, 'optimizer_steps': steps, 'held_out': held_out})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """Shape of the arrays of all steps of a stage: `[micro_batches, ranks * chunks, chunk_len]`.

  Since the shape does not change between steps, each program is compiled only once.
  """

  ranks: int
  """Number of data-parallel ranks."""
  chunks: int
  """Number of chunks per rank and micro-batch."""
  chunk_len: int
  """Number of tokens per chunk."""
  micro_batches: int
  """Upper bound on the number of micro-batches. A step may use fewer without recompilation."""
  segments: int
  """Upper bound on the number of sequences per chunk."""
  shares_prefixes: bool = False
  """Whether leading tokens that several sequences of a chunk have in common are stored only once in
  the chunk.
  """
  rows_per_chunk: int = 1
  """Number of sequences of the maximum length that fit into a chunk."""
  splits_remainder: bool = False
  """Whether the last chunks of a step, if they do not fill a micro-batch, are computed one chunk
  per rank at a time; see `Packing`.
  """

  @property
  def total_chunks(self) -> int:
    """Number of chunks per micro-batch, over all ranks."""
    return self.ranks * self.chunks

  def pack(self, lengths: Sequence[int], units: Sequence[Sequence[int]] | None = None) -> Packing:
    """Packs the rows of one optimizer step, without sharing prefixes; see `packing.pack`."""
    return pack(
      lengths,
      units=units,
      ranks=self.ranks,
      chunks=self.chunks,
      chunk_len=self.chunk_len,
      splits_remainder=self.splits_remainder,
    )


def plan_shape(
  *,
  rows: int,
  ranks: int,
  chunks: int,
  chunk_len: int,
  unit: int = 1,
  lengths: Sequence[int] = (),
  longest: int | None = None,
  shares_prefixes: bool = False,
  splits_remainder: bool = False,
) -> Shape:
  """Returns a shape into which any `rows` sequences of at most `longest` tokens fit, even if no two
  of them share a prefix. Raises UserError if the sequences of a unit do not fit into `chunks`
  chunks.

  Args:
    rows: maximum number of sequences per optimizer step.
    ranks: number of data-parallel ranks.
    chunks: maximum number of chunks per rank and micro-batch. The shape has fewer if `lengths` show
      that too much of the last micro-batch would be empty.
    chunk_len: number of tokens per chunk.
    unit: number of sequences that must stay together (2 for preference pairs, otherwise 1).
    lengths: lengths of the stage's sequences, or of a sample of them. The lengths of a unit's
      sequences are adjacent. Empty if the lengths are unknown.
    longest: maximum length of a sequence. If None, it is `chunk_len`.
    shares_prefixes: whether common leading tokens of the rows in a chunk are stored only once.
    splits_remainder: whether the shape may split the remainder (`Packing`). It does if `unit` is 1
      and a micro-batch has several chunks per rank.
  """
  rows_per_chunk = chunk_len // (longest or chunk_len)
  if chunks * rows_per_chunk < unit:
    raise UserError(
      f'learner.chunks_per_rank: {chunks} chunks per micro-batch cannot hold {unit} sequences that '
      f'belong together; wanted at least {unit}'
    )
  units = -(-rows // unit // ranks)
  if lengths:
    chunks = _plan_chunks(
      lengths,
      rows=rows,
      ranks=ranks,
      least=-(-unit // rows_per_chunk),
      most=chunks,
      chunk_len=chunk_len,
      unit=unit,
      splits_remainder=splits_remainder and unit == 1,
    )
  return Shape(
    ranks=ranks,
    chunks=chunks,
    chunk_len=chunk_len,
    micro_batches=-(-units // (chunks * rows_per_chunk // unit)),
    # With shared prefixes, a single rank may get all rows, because trees are assigned to ranks
    # regardless of their numbers of rows.
    segments=max(1, min(chunk_len, rows if shares_prefixes else units * unit)),
    shares_prefixes=shares_prefixes,
    rows_per_chunk=rows_per_chunk,
    splits_remainder=splits_remainder and unit == 1 and chunks > 1,
  )


def _plan_chunks(
  lengths: Sequence[int],
  *,
  rows: int,
  ranks: int,
  least: int,
  most: int,
  chunk_len: int,
  unit: int,
  splits_remainder: bool,
) -> int:
  """Returns the largest number of chunks per micro-batch, from `least` to `most`, with good
  utilisation.

  Utilisation is the fraction of token slots in use. It is highest with the fewest possible chunks
  per micro-batch, because the chunks of a rank are rounded up to whole micro-batches. Larger
  micro-batches, however, give a device more work at a time. The utilisation of a number of chunks
  is good if it is at least `_KEPT` times the highest one in each of `_DRAWS` optimizer steps drawn
  at random.
  """
  groups = [lengths[i : i + unit] for i in range(0, len(lengths), unit)]
  count, rng = max(1, rows // unit), np.random.Generator(np.random.Philox(key=0))
  drawn = [rng.choice(len(groups), count, replace=count > len(groups)) for _ in range(_DRAWS)]
  steps = [[length for group in draw for length in groups[group]] for draw in drawn]
  units = [list(range(i, i + unit)) for i in range(0, count * unit, unit)]

  def utilisations(chunks: int) -> list[float]:
    fields = {'ranks': ranks, 'chunks': chunks, 'chunk_len': chunk_len}
    return [
      pack(step, units=units, splits_remainder=splits_remainder, **fields).utilisation
      for step in steps
    ]

  def worst(chunks: int) -> float:
    return min(some / full for some, full in zip(utilisations(chunks), best, strict=True))

  best = utilisations(least)
  return next(
    chunks for chunks in range(most, least - 1, -1) if chunks == least or worst(chunks) >= _KEPT
  )


def units_of(rows: Sequence[Row]) -> list[list[int]]:
  """Returns the row numbers of each unit, which is a preference pair or a single row."""
  units: dict[str, list[int]] = {}
  for i, row in enumerate(rows):
    # The key of a single row ends in '/'. The id of a pair never does, so the keys cannot collide.
    units.setdefault(row.pair or f'{i}/', []).append(i)
  return list(units.values())


def deal_rows(
  rows: Sequence[Row], *, minibatches: int, epochs: int, seed: int
) -> tuple[tuple[int, ...], ...]:
  """Splits rows at random into `minibatches` optimizer steps per epoch, differently in each epoch.

  Expert rows and other rows are split separately, so that each optimizer step has its share of
  both. The rows of a preference pair stay together.
  """
  units = units_of(rows)
  kinds = [[u for u in units if rows[u[0]].is_expert is expert] for expert in (False, True)]
  steps: list[tuple[int, ...]] = []
  for epoch in range(epochs):
    # If the seed were seed + epoch, the second epoch of a batch would be split like the first epoch
    # of the next batch.
    dealt = [deal(kind, minibatches, seed=seed * epochs + epoch) for kind in kinds if kind]
    for number in range(minibatches):
      parts = [
        kind[unit] for kind, parts in zip(filter(None, kinds), dealt) for unit in parts[number]
      ]
      steps.append(tuple(i for unit in parts for i in unit))
  return tuple(steps)


def with_prefixes(rows: Sequence[Row], samples: Sequence[Sample]) -> list[Row]:
  """Returns the rows with the fields `place` and `common` set, which describe the tokens that rows
  share.

  Args:
    samples: sample of each row.
  """
  families: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
  for i, row in enumerate(rows):
    families[row.family].append(i)
  result = list(rows)
  for members in families.values():
    # A row can share at most its prompt, so later tokens need not be compared.
    most = max(rows[i].prompt_len for i in members)
    prefixes = sorted_prefixes([samples[i].tokens[:most] for i in members])
    for place, (member, common) in enumerate(prefixes):
      i = members[member]
      # If a row's prompt is trained on, all of the row's tokens are stored with it.
      trained = samples[i].loss_mask[: rows[i].prompt_len].any()
      result[i] = dataclasses.replace(rows[i], place=place, common=0 if trained else common)
  return result


def pack_step(plan: StepPlan, number: int, shape: Shape) -> Packing:
  """Packs the rows of the plan's optimizer step `number`. Row i of the packing is the row
  `plan.optimizer_steps[number][i]` of the plan.
  """
  numbers = plan.optimizer_steps[number]
  rows = [plan.rows[i] for i in numbers]
  lengths, units = [row.length for row in rows], units_of(rows)
  if not shape.shares_prefixes:
    return shape.pack(lengths, units)
  return pack_trees(
    lengths,
    _families(plan.rows, numbers),
    units=units,
    ranks=shape.ranks,
    chunks=shape.chunks,
    chunk_len=shape.chunk_len,
    splits_remainder=shape.splits_remainder,
  )


def _families(rows: Sequence[Row], numbers: Sequence[int]) -> list[list[Branch]]:
  """Returns the families of an optimizer step, in the form that `pack_trees` takes. A branch's
  `row` is an index in `numbers`, the numbers of the step's rows.
  """
  index = {number: i for i, number in enumerate(numbers)}
  families: dict[tuple[str, str], list[Branch]] = {}
  # In the sorted family, rows of other optimizer steps may lie between two neighbours of this step.
  # The neighbours' common prefix is then the shortest `common` of all rows after the first
  # neighbour, up to and including the second neighbour.
  shortest: dict[tuple[str, str], float] = {}
  for number in sorted(range(len(rows)), key=lambda number: rows[number].place):
    row = rows[number]
    common = min(row.common, shortest.get(row.family, math.inf))
    if number not in index:
      shortest[row.family] = common
      continue
    shortest[row.family] = math.inf
    family = families.setdefault(row.family, [])
    family.append(Branch(index[number], min(common, row.prompt_len - 1) if family else 0))
  return list(families.values())
