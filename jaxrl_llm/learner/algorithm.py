"""Interface of learning algorithms.

An algorithm states which inputs it needs, annotates each batch, and defines a loss. `annotate` runs
on the host and computes everything that depends on the whole batch, such as baselines, whitening
and scheduled coefficients. These results enter the loss as constants, because the loss is called
with one micro-batch at a time.
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
"""Extra forward passes over a batch before its first update. 'proximal' computes the logprobs under
the policy before the update, 'reference' the logprobs under the reference policy, and 'values' the
critic's values.
"""
TokenColumn = Literal[
  'loss_mask',
  'behaviour_logprobs',
  'proximal_logprobs',
  'reference_logprobs',
  'values',
  'next_values',
]
"""Per-token columns available to `annotate`. 'values' and 'next_values' are the critic's values of
the states before and after each token; both columns require 'values' in `Algorithm.reads`.
"""
Outputs = TokenLogprobs | TokenValues | SequenceScores
"""A model's outputs for a micro-batch. The type follows from the model's head: 'lm' yields
`TokenLogprobs`, 'value' `TokenValues`, and 'scalar' `SequenceScores`.
"""
Constants = Mapping[str, Any]
"""Scalars that the loss reads, keyed by name. They are constant within a batch."""
AT_REFERENCE = 'at_reference'
"""Name of the scalar that an update of the policy receives if the learner keeps a reference: 1 if
the policy before the update equals the reference, otherwise 0.
"""
Terms = dict[str, Term]
Stats = dict[str, Stat]
Loss = Callable[[Any, Chunks, Constants], tuple[Terms, Stats]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """Settings of the run that an algorithm may read in addition to its own options."""

  max_response_length: int
  """Maximum response length in tokens."""
  max_steps: int = 1
  """Maximum number of steps (sequences) of a trajectory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceRule:
  """Rule by which the reference policy changes. A stage begins with the current policy as
  reference. If neither field is set, this reference stays fixed.
  """

  every: int | None = None
  """Number of batches after which the reference is set to the current policy again. If None, the
  reference is never reset in this way.

  If 1, the reference of each batch is the policy before that batch, so no separate copy of the
  reference is kept.
  """
  ema: float | None = None
  """Decay of an exponential moving average of the policy, which is updated after each batch. If
  set, the reference is this average. If None, no average is computed.
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
  """Input of `annotate`: a closed batch, whose rows are final but have not been trained on yet."""

  rows: Sequence[Row]
  step: int
  """Number of earlier batches in the stage."""
  tokens: Mapping[str, Sequence[np.ndarray]]
  """Columns named in `Algorithm.on_host`. Each column consists of one array `[row.length]` per row.
  """
  state: Json
  """State returned by the previous batch's annotation; None for the first batch."""


class Annotation(NamedTuple):
  """Quantities that an algorithm derives from a closed batch before the update."""

  advantages: Sequence[float | Float64[np.ndarray, '...']] | Float64[np.ndarray, 'rows']
  """For each row, either one advantage for all its trained tokens or an array with one per token.
  """
  in_loss: Bool[np.ndarray, 'rows']
  """Whether each row takes part in the loss. It is False for unscorable rows, for example."""
  metrics: Mapping[str, tuple[float, float]]
  """Batch statistics as (sum, count), keyed by metric."""
  returns: Sequence[Float64[np.ndarray, '...']] | None = None
  """Targets of the critic for each row, one per token. None if the algorithm has no critic."""
  rewards: Sequence[float | None] | None = None
  """Reward of each row after shaping, for the metric `critic/rewards`. If None, the metric uses the
  rewards as scored.
  """
  constants: Constants = types.MappingProxyType({})
  state: Json = None


class Algorithm(NamedTuple):
  """A learning algorithm.

  `loss(outputs, chunks, constants)` returns the named terms and the statistics of one micro-batch.
  The denominator of a term may depend on `chunks` only, because the update computes all
  denominators over the whole optimizer step before any forward pass.
  """

  annotate: Callable[[Closed], Annotation]
  loss: Loss
  reads: frozenset[Read] = frozenset()
  """Passes whose results the loss or `annotate` reads."""
  on_host: frozenset[TokenColumn] = frozenset()
  """Names of the per-token columns that `annotate` reads."""
  constants: frozenset[str] = frozenset()
  """Names of the constants that the loss reads."""
  head: Literal['lm', 'scalar'] = 'lm'
  """Head of the trained model: 'lm' for a policy, 'scalar' for a reward model."""
  reference: ReferenceRule = ReferenceRule()
  renew_optimizer: bool = False
  """Whether the optimizer's moments are reset before each batch."""
  critic_loss: Loss | None = None
  """Loss on the critic's values. If None, the algorithm has no critic."""
  critic_warmup: int = 0
  """Number of batches at the beginning of the stage that train only the critic."""
  corrects: bool = False
  """Whether the loss corrects for the difference between the weights that sampled a token and the
  trained weights, using the token's behaviour logprob.
  """
  credits_tokens: bool = False
  """Whether advantages are estimated for each token, from rewards at the ends of turns."""
  no_effect: tuple[str, ...] = ()
  """Messages about options that are set but have no effect. They are logged when a stage is built.
  """

  @property
  def keeps_reference(self) -> bool:
    """Whether the learner keeps a copy of the reference's parameters."""
    return 'reference' in self.reads and self.reference.every != 1

  @property
  def update_constants(self) -> frozenset[str]:
    """Names of the constants that an update of the policy receives."""
    return self.constants | ({AT_REFERENCE} if self.keeps_reference else frozenset())


def plain(rows: Sequence[Row], **more: Any) -> Annotation:
  """Returns an annotation for a loss without advantages, such as SFT: all rows are trained on, and
  all advantages are 0.
  """
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
  """Aggregates per-token values into a loss term.

  Args:
    weight: weight of the term in the loss.
    scale: divisor in mode 'seq-mean-token-sum-norm'. Other modes ignore it.
  """
  numerator, denominator = aggregate(
    values, mask, chunks.segment_ids, segments=chunks.segments, mode=mode, loss_scale_factor=scale
  )
  return Term(numerator, denominator, weight)
