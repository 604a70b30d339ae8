"""An algorithm is a value: which passes it reads, how it annotates a closed batch, its loss terms.

Whatever is a statistic of the batch (a baseline, whitening, a schedule's coefficient) is computed in `annotate`, on the
host, and enters the loss as a constant; the loss itself sees one micro-batch at a time.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Float64

from jaxrl_llm.batching.chunks import Chunks
from jaxrl_llm.batching.plan import Row
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Json
from jaxrl_llm.ops.logprobs import SequenceScores, TokenLogprobs, TokenValues
from jaxrl_llm.ops.reduce import Aggregation, Stat, Term, aggregate

Read = Literal['proximal', 'reference', 'values']
"""A pass over the closed batch before its first update: logprobs of policy and reference, values of the critic."""
TokenColumn = Literal[
  'loss_mask', 'behaviour_logprobs', 'proximal_logprobs', 'reference_logprobs', 'values', 'next_values'
]
"""What `annotate` may ask for, per token of each row; `next_values`, of the states after each token, with the read
'values'."""
Outputs = TokenLogprobs | TokenValues | SequenceScores
"""What a model makes of a micro-batch: by its head, 'lm', 'value' or 'scalar'."""
Constants = Mapping[str, Any]
"""Scalars of a batch that its loss reads, by name."""
Terms = dict[str, Term]
Stats = dict[str, Stat]
Loss = Callable[[Any, Chunks, Constants], tuple[Terms, Stats]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """What an algorithm may know of the run besides its own options."""

  max_response_length: int
  """Tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceRule:
  """Which policy is the reference. It is the policy at the beginning of the stage until something refreshes it."""

  every: int | None = None
  """Batches between refreshes: the reference becomes the policy after each n-th; None: never.

  With 1 it is the policy before each batch, and no copy of it is kept.
  """
  ema: float | None = None
  """Weight of the old reference in an exponential moving average, taken after each batch; None: no averaging."""

  def __post_init__(self):
    if self.every is not None and self.every < 1:
      raise UserError(f'reference.every: {self.every}, wanted at least 1, or null for a fixed reference')
    if self.ema is not None and not 0 <= self.ema < 1:
      raise UserError(f'reference.ema: {self.ema}, wanted a weight in [0, 1)')
    if self.ema is not None and self.every is not None:
      raise UserError('reference: every and ema exclude each other; set one of them')


class Closed(NamedTuple):
  """A closed batch, as `annotate` sees it."""

  rows: Sequence[Row]
  step: int
  """Batches of the stage before this one."""
  tokens: Mapping[str, Sequence[np.ndarray]]
  """The columns named in `Algorithm.on_host`, each with one array `[row.length]` per row."""
  state: Json
  """What the last batch's annotation left; None before the first."""


class Annotation(NamedTuple):
  """What an algorithm derives from a closed batch before the update; never stored."""

  advantages: Sequence[float | Float64[np.ndarray, '...']] | Float64[np.ndarray, 'rows']
  """For each row one number for all its trained tokens, or one for each token."""
  in_loss: Bool[np.ndarray, 'rows']
  """Rows that take part in the loss at all (unscorable ones do not)."""
  metrics: Mapping[str, tuple[float, float]]
  """(sum, count) of batch statistics."""
  returns: Sequence[Float64[np.ndarray, '...']] | None = None
  """What a critic learns, per token of each row."""
  rewards: Sequence[float | None] | None = None
  """Of each row after shaping (`critic/rewards`); None: as they were scored."""
  constants: Constants = types.MappingProxyType({})
  state: Json = None


class Algorithm(NamedTuple):
  """`loss(outputs, chunks, constants)` gives named terms and statistics of one micro-batch.

  Denominators of terms depend on `chunks` alone: the update computes them first, over the whole optimizer step.
  """

  annotate: Callable[[Closed], Annotation]
  loss: Loss
  reads: frozenset[Read] = frozenset()
  """Passes whose results the loss or `annotate` reads."""
  on_host: frozenset[TokenColumn] = frozenset()
  """Columns that `annotate` reads."""
  constants: frozenset[str] = frozenset()
  """Names of the constants that the loss reads."""
  head: Literal['lm', 'scalar'] = 'lm'
  """Of the model that is trained: a policy's, or a reward model's."""
  reference: ReferenceRule = ReferenceRule()
  renew_optimizer: bool = False
  """The optimizer's moments start afresh with each batch."""
  critic_loss: Loss | None = None
  """Of the critic's values, where there is a critic."""
  critic_warmup: int = 0
  """Batches that train the critic alone."""
  no_effect: tuple[str, ...] = ()
  """A line for each option that is set and has no effect; logged when a stage is built."""


def plain(rows: Sequence[Row], **more: Any) -> Annotation:
  """The annotation of rows that are all learned from as they are."""
  return Annotation(np.zeros(len(rows)), np.ones(len(rows), bool), {}, **more)


def term(
  values: Float[Array, 'chunks time'],
  mask: Bool[Array, 'chunks time'],
  chunks: Chunks,
  mode: Aggregation,
  *,
  weight: Any = 1.0,
  scale: float = 1.0,
) -> Term:
  """Per-token values as a term; `scale` is the divisor of seq-mean-token-sum-norm."""
  numerator, denominator = aggregate(
    values, mask, chunks.segment_ids, segments=chunks.temperature.shape[-1], mode=mode, loss_scale_factor=scale
  )
  return Term(numerator, denominator, weight)
