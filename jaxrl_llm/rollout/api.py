"""Inference engine interface: tokens in, tokens out, each token attributed to the weight version
that sampled it.

Invariant: nothing here handles text or depends on how or where an engine runs, so workflows, the
gate and the publisher drive an in-process JAX sampler and remote servers alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterable
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int32

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Finish, Segment
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.core.types import Params, Version

WORD = 2**32
"""Exclusive upper bound of each word of `Request.key`."""

CUT = 'load'
"""`Segment.finish` of a segment cut by a weight load; the completion continues in the next one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """Sampling parameters: logits are divided by the temperature, filtered by top-k, then by top-p,
  and renormalised.

  Training rollouts leave top_p and top_k off: the trainer compares unfiltered distributions.
  """

  temperature: float = 1.0
  """0: greedy, which takes the most probable token; its logprob is computed at temperature 1."""
  top_p: float = 1.0
  """Keeps the fewest most probable tokens whose probabilities sum to at least this; 1: off."""
  top_k: int = -1
  """Keeps the k most probable tokens, and ties with the k-th; -1: off."""

  def __post_init__(self):
    if not 0.0 <= self.temperature < float('inf'):
      raise UserError(
        f'sampling.temperature: got {self.temperature}, wanted a finite number >= 0; 0 is greedy'
      )
    if not 0.0 < self.top_p <= 1.0:
      raise UserError(f'sampling.top_p: got {self.top_p}, wanted 0 < top_p <= 1; 1 is off')
    if self.top_k != -1 and self.top_k < 1:
      raise UserError(f'sampling.top_k: got {self.top_k}, wanted at least 1, or -1 for off')

  @property
  def filtered(self) -> bool:
    """Whether top-k or top-p restricts the vocabulary. Filters do not change a greedy choice."""
    return self.temperature > 0 and (self.top_p < 1 or self.top_k != -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """One prompt and the number of completions to sample."""

  uid: str
  """Identifier for messages and logs; not a source of randomness."""
  prompt: tuple[int, ...]
  max_tokens: int
  """Maximum length of each completion."""
  sampling: Sampling = dataclasses.field(default_factory=Sampling)
  stop_ids: tuple[int, ...] = ()
  """Stop tokens; the one that ends a completion is kept as its last token."""
  samples: int = 1
  """Number of completions; sample i does not depend on this number."""
  key: tuple[int, ...]
  """Words (uint32) of the request's random key. With the engine's seed, the sample index and the
  token position, they determine every draw.
  """

  def __post_init__(self):
    if not self.prompt:
      raise UserError(f'request {self.uid}: prompt is empty, wanted at least one token')
    if self.max_tokens < 1 or self.samples < 1:
      raise UserError(
        f'request {self.uid}: max_tokens {self.max_tokens} and samples {self.samples}, wanted at '
        'least 1 of each'
      )
    if any(not 0 <= word < WORD for word in self.key):
      raise ValueError(f'request {self.uid}: key {self.key} is not made of uint32 words')


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
  """One sampled completion of a request. All arrays have the length of `tokens`."""

  tokens: Int32[np.ndarray, 'time']
  """Completion tokens, including the stop token; without the prompt."""
  logprobs: Float32[np.ndarray, 'time']
  """Logprob of each token under the distribution it was drawn from (see `Sampling`)."""
  finish: Finish
  segments: tuple[Segment, ...]
  """One segment per version that sampled; together they cover the tokens from 0 on without gaps."""

  def __post_init__(self):
    if len(self.tokens) != len(self.logprobs):
      raise ValueError(f'Completion: {len(self.tokens)} tokens, {len(self.logprobs)} logprobs')
    bounds = [0, *(s.end for s in self.segments)]
    if bounds[:-1] != [s.start for s in self.segments] or bounds[-1] != len(self.tokens):
      raise ValueError(
        f'Completion: segments {self.segments} do not cover {len(self.tokens)} tokens'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
  """Fixed token sequences and the trainer's logprobs for them. An engine with the same weights
  reproduces the logprobs.
  """

  sequences: Int32[np.ndarray, 'sequences time']
  logprobs: Float32[np.ndarray, 'sequences time']
  """Logprobs at temperature 1; `logprobs[:, 0]` is 0."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
  """Weights of one policy version, for loading into an engine."""

  version: Version
  leaves: Iterable[tuple[str, np.ndarray]]
  """(name in the parameter tree, array), sorted by name; an array is valid only until the next is
  requested.
  """
  probe: Probe | None = None
  """Probe that checks an engine whose arithmetic differs from the trainer's; None: no check."""

  @classmethod
  def of(cls, params: Params, version: Version) -> Weights:
    """Builds weights from a parameter tree on the host."""
    return cls(
      version=version,
      leaves=[(name, np.asarray(leaf)) for name, leaf in sorted(flatten(params).items())],
    )


@runtime_checkable
class Generator(Protocol):
  """Anything that generates completions."""

  def generate(self, request: Request) -> AsyncIterator[tuple[int, Completion]]:
    """Yields (sample index, completion) as each sample finishes. Ending the iteration cancels the
    others.
    """
    ...


@runtime_checkable
class Engine(Generator, Protocol):
  """Generates tokens with one policy, whose weights can be replaced while it runs.

  `load` pauses dispatch: it waits for running device work, replaces the weights, and resumes. A
  completion in flight continues under the new weights in a new segment; one that has not started
  uses the new weights throughout.
  """

  name: str

  @property
  def version(self) -> Version | None:
    """Version of the weights that sample the next token; None before the first `load`."""
    ...

  async def load(self, weights: Weights) -> None:
    """Copies the weights: the caller may change, donate or delete its arrays once this returns.

    Iterates `weights.leaves` on the process's device thread, because producing the arrays may need
    collectives.
    """
    ...

  async def relabel(self, version: Version) -> None:
    """Renames the served weights to `version`, whose weights are identical."""
    ...

  def take_metrics(self) -> dict[str, float]:
    """Returns the metrics since the last call, keyed by metric name."""
    ...

  async def start(self) -> None:
    """Prepares to serve; all slow one-time work (compilation, server start) happens here."""
    ...

  async def close(self) -> None:
    """Shuts down the engine; calls in flight fail."""
    ...
