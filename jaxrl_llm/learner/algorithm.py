"""Interface of algorithms: the inputs they need, their annotation of a batch, and their loss.

Batch statistics (baselines, whitening, scheduled coefficients) are computed in `annotate`, on the
host, and enter the loss as constants; the loss itself sees one micro-batch at a time.
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
"""Extra passes over a batch before its first update. 'proximal' and 'reference' compute logprobs
under the policy and under the reference; 'values' computes the critic's values.
"""
TokenColumn = Literal[
  'loss_mask',
  'behaviour_logprobs',
  'proximal_logprobs',
  'reference_logprobs',
  'values',
  'next_values',
]
"""Per-token columns available to `annotate`; `next_values` are the values of the states after each
token and require 'values' in `Algorithm.reads`.
"""
Outputs = TokenLogprobs | TokenValues | SequenceScores
"""A model's outputs for a micro-batch; its head 'lm', 'value' or 'scalar' determines the type."""
Constants = Mapping[str, Any]
"""Batch scalars that the loss reads, keyed by name."""
Terms = dict[str, Term]
Stats = dict[str, Stat]
Loss = Callable[[Any, Chunks, Constants], tuple[Terms, Stats]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """Settings of the run available to an algorithm besides its options."""

  max_response_length: int
  """Maximum response length in tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceRule:
  """Rule by which the reference changes. It starts as the policy at the stage's beginning."""

  every: int | None = None
  """Number of batches after which the reference is set to the current policy again; None: never.

  With 1 the reference is the policy before each batch, so no separate copy of the reference is
  kept.
  """
  ema: float | None = None
  """Decay of the moving average: the reference is then an exponential moving average of the policy,
  updated after each batch. None: no averaging.
  """

  def __post_init__(self):
    if self.every is not None and self.every < 1:
      raise UserError(
        f'reference.every: {self.every}, wanted at least 1, or null for a fixed reference'
      )
    if self.ema is not None and not 0 <= self.ema < 1:
      raise UserError(f'reference.ema: {self.ema}, wanted a weight in [0, 1)')
    if self.ema is not None and self.every is not None:
      raise UserError('reference: every and ema exclude each other; set one of them')


class Closed(NamedTuple):
  """Input of `annotate`: a closed batch, one whose rows are final but not yet trained on."""

  rows: Sequence[Row]
  step: int
  """Number of earlier batches in the stage."""
  tokens: Mapping[str, Sequence[np.ndarray]]
  """Columns named in `Algorithm.on_host`, each with one array `[row.length]` per row."""
  state: Json
  """State returned by the previous batch's annotation; None for the first batch."""


class Annotation(NamedTuple):
  """Quantities that an algorithm derives from a closed batch before the update; never stored."""

  advantages: Sequence[float | Float64[np.ndarray, '...']] | Float64[np.ndarray, 'rows']
  """For each row, one advantage for all its trained tokens or one per token."""
  in_loss: Bool[np.ndarray, 'rows']
  """Whether each row takes part in the loss; False for unscorable rows."""
  metrics: Mapping[str, tuple[float, float]]
  """Batch statistics as (sum, count), keyed by metric."""
  returns: Sequence[Float64[np.ndarray, '...']] | None = None
  """Targets of the critic for each row, one per token."""
  rewards: Sequence[float | None] | None = None
  """Reward of each row after shaping, for the metric `critic/rewards`; None: as scored."""
  constants: Constants = types.MappingProxyType({})
  state: Json = None


class Algorithm(NamedTuple):
  """A learning algorithm.

  `loss(outputs, chunks, constants)` returns named terms and statistics of one micro-batch. The
  denominators of terms depend on `chunks` alone, so that the update can compute them first, over
  the whole optimizer step.
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
  """Head of the trained model: 'lm' for a policy, 'scalar' for a reward model."""
  reference: ReferenceRule = ReferenceRule()
  renew_optimizer: bool = False
  """Whether the optimizer's moments are reset before each batch."""
  critic_loss: Loss | None = None
  """Loss on the critic's values; None: the algorithm has no critic."""
  critic_warmup: int = 0
  """Number of initial batches that train only the critic."""
  no_effect: tuple[str, ...] = ()
  """Messages about options that are set but have no effect; logged when a stage is built."""


def plain(rows: Sequence[Row], **more: Any) -> Annotation:
  """Returns an annotation that trains on all rows, with zero advantages."""
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
  """Aggregates per-token values to a loss term.

  Args:
    weight: weight of the term in the loss.
    scale: divisor in mode 'seq-mean-token-sum-norm'; other modes ignore it.
  """
  numerator, denominator = aggregate(
    values, mask, chunks.segment_ids, segments=chunks.segments, mode=mode, loss_scale_factor=scale
  )
  return Term(numerator, denominator, weight)
