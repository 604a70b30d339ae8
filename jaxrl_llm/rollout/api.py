"""What an engine is: tokens in, tokens out, and for every token the version of the weights that drew it.

Invariant: nothing here is text, and nothing says how or where an engine runs, so that workflows, the gate and the
publisher drive a JAX sampler in this process and servers elsewhere alike.
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
"""Words of a key are below it."""

CUT = 'load'
"""`Segment.finish` of tokens that others of the same completion follow, under the next version."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """How a token is drawn: logits over temperature, then top-k, then top-p of the rest, renormalised.

  Training rollouts leave top_p and top_k off: the trainer compares unfiltered distributions.
  """

  temperature: float = 1.0
  """0 is greedy: the most probable token, its logprob at temperature 1."""
  top_p: float = 1.0
  """Keep the fewest most probable tokens whose probabilities sum to at least this; 1 is off."""
  top_k: int = -1
  """Keep the k most probable tokens (and those tied with the k-th); -1 is off."""

  def __post_init__(self):
    if not 0.0 <= self.temperature < float('inf'):
      raise UserError(f'sampling.temperature: got {self.temperature}, wanted a finite number >= 0; 0 is greedy')
    if not 0.0 < self.top_p <= 1.0:
      raise UserError(f'sampling.top_p: got {self.top_p}, wanted 0 < top_p <= 1; 1 is off')
    if self.top_k != -1 and self.top_k < 1:
      raise UserError(f'sampling.top_k: got {self.top_k}, wanted at least 1, or -1 for off')

  @property
  def filtered(self) -> bool:
    """Whether tokens are drawn from less than the whole vocabulary. Filters do not change a greedy choice."""
    return self.temperature > 0 and (self.top_p < 1 or self.top_k != -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """One prompt and how many continuations of it are wanted."""

  uid: str
  """For messages and logs; not a source of randomness."""
  prompt: tuple[int, ...]
  max_tokens: int
  """Of each completion."""
  sampling: Sampling = dataclasses.field(default_factory=Sampling)
  stop_ids: tuple[int, ...] = ()
  """Each of these ends a completion and is its last token."""
  samples: int = 1
  """Completions wanted; sample i of n is the same whatever n is."""
  key: tuple[int, ...]
  """Counter words (uint32) that name the request's randomness: with the engine's seed, the sample's index and the
  token's position they fix every draw."""

  def __post_init__(self):
    if not self.prompt:
      raise UserError(f'request {self.uid}: prompt is empty, wanted at least one token')
    if self.max_tokens < 1 or self.samples < 1:
      raise UserError(
        f'request {self.uid}: max_tokens {self.max_tokens} and samples {self.samples}, wanted at least 1 of each'
      )
    if any(not 0 <= word < WORD for word in self.key):
      raise ValueError(f'request {self.uid}: key {self.key} is not made of uint32 words')


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
  """What one sample of a request came to. All arrays have the length of `tokens`."""

  tokens: Int32[np.ndarray, 'time']
  """The stop token included, the prompt not."""
  logprobs: Float32[np.ndarray, 'time']
  """Of each token, under the distribution it was drawn from (see `Sampling`)."""
  finish: Finish
  segments: tuple[Segment, ...]
  """Cover the tokens from 0 on without a gap, one for each version that drew some."""

  def __post_init__(self):
    if len(self.tokens) != len(self.logprobs):
      raise ValueError(f'Completion: {len(self.tokens)} tokens, {len(self.logprobs)} logprobs')
    bounds = [0, *(s.end for s in self.segments)]
    if bounds[:-1] != [s.start for s in self.segments] or bounds[-1] != len(self.tokens):
      raise ValueError(f'Completion: segments {self.segments} do not cover {len(self.tokens)} tokens')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
  """Fixed token sequences, and what the trainer makes of them: the same model gives the same numbers."""

  sequences: Int32[np.ndarray, 'sequences time']
  logprobs: Float32[np.ndarray, 'sequences time']
  """At temperature 1; `logprobs[:, 0]` is 0."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
  """A version of the policy on its way to an engine."""

  version: Version
  leaves: Iterable[tuple[str, np.ndarray]]
  """(name in the parameter tree, array), each once, by name; an array may go when the next is asked for."""
  probe: Probe | None = None
  """For engines whose arithmetic is not the trainer's; None = unchecked."""

  @classmethod
  def of(cls, params: Params, version: Version) -> Weights:
    """Of a tree on the host."""
    return cls(version=version, leaves=[(name, np.asarray(leaf)) for name, leaf in sorted(flatten(params).items())])


@runtime_checkable
class Generator(Protocol):
  """Whoever answers requests."""

  def generate(self, request: Request) -> AsyncIterator[tuple[int, Completion]]:
    """(sample index, completion) for each of `request.samples`, as they end. Leaving the iteration drops the rest."""
    ...


@runtime_checkable
class Engine(Generator, Protocol):
  """Generates tokens under one policy, whose weights can be replaced while it runs.

  `load` holds dispatch: it waits for what the device is doing, replaces the weights, and lets go on. A completion
  under way at that moment carries on under the new weights in a new segment; one that has not begun is wholly new.
  """

  name: str

  @property
  def version(self) -> Version | None:
    """Of the weights that draw the next token; None before the first `load`."""
    ...

  async def load(self, weights: Weights) -> None:
    """Takes a copy of the weights: the caller may change, donate or delete its own as soon as this returns.

    `weights.leaves` is gone through on the process's device thread: the arrays may come from collectives.
    """
    ...

  async def relabel(self, version: Version) -> None:
    """The weights that it serves are also those of `version`, and go by that name from now on."""
    ...

  def take_metrics(self) -> dict[str, float]:
    """What was measured since the last call, by metric key."""
    ...

  async def start(self) -> None:
    """Makes ready to serve; everything that is slow once (compilation, a server's start) happens here."""
    ...

  async def close(self) -> None:
    """Ends the engine; calls under way fail."""
    ...
