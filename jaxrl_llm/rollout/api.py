"""Interface of inference engines. An engine takes the tokens of a prompt and returns sampled
tokens, each attributed to the version of the policy weights that sampled it.

Invariant: nothing in this module handles text or depends on how or where an engine runs. Hence
workflows and weight publishing work in the same way with a JAX sampler in this process and with
remote servers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import (
  AsyncIterator,
  Awaitable,
  Callable,
  Collection,
  Iterable,
  Iterator,
  Sequence,
)
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int32

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Finish, Segment
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.core.types import Json, Params, Version
from jaxrl_llm.rollout.repetition import RepetitionDetection

WORD = 2**32
"""Exclusive upper bound of the words of `Request.key`, each of which is a uint32."""

CUT = 'load'
"""Value of `Segment.finish` if the segment ended because new weights were loaded. The completion
continues in the next segment.
"""
BUDGET = 'budget'
"""Value of `Segment.finish` if the segment ended because a partial rollout had used up its token
budget. A later batch continues the completion in the next segment.
"""
LOST = 'lost'
"""Value of `Segment.finish` if the segment ended because its server was lost. A server of the same
fleet continues the completion in the next segment.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """Sampling parameters. Logits are first divided by the temperature. Then top-k and afterwards
  top-p remove tokens, and the probabilities of the remaining tokens are renormalised.

  Training rollouts leave top_p and top_k off, because the trainer computes its own logprobs under
  the unfiltered distribution.
  """

  temperature: float = 1.0
  """Divisor of the logits. 0 selects greedy sampling, which takes the most probable token; the
  logprob of that token is computed at temperature 1.
  """
  top_p: float = 1.0
  """Nucleus sampling: only the smallest set of most probable tokens whose probabilities sum to at
  least this value is kept. 1 turns the filter off.
  """
  top_k: int = -1
  """Only the k most probable tokens are kept, along with any tokens that are tied with the k-th. -1
  turns the filter off.
  """
  repetition_detection: RepetitionDetection | None = None
  """Rule that ends a completion that repeats itself. If None, repetition does not end completions.
  If a stop token or the length limit ends the completion at the same token, the finish reason is
  'stop' or 'length' instead of 'repetition'.
  """
  max_response_length: int | None = None
  """Maximum number of tokens of a sample after its prompt, if a stage sets a limit below the run's.
  Workflows apply it to the requests that they make; engines do not read it. If None, only the run's
  limit applies.
  """

  def __post_init__(self):
    if not 0.0 <= self.temperature < float('inf'):
      raise UserError(
        f'sampling.temperature: got {self.temperature}, wanted a finite number >= 0; 0 is greedy'
      )
    if not 0.0 < self.top_p <= 1.0:
      raise UserError(f'sampling.top_p: got {self.top_p}, wanted 0 < top_p <= 1; 1 is off')
    if self.top_k != -1 and self.top_k < 1:
      raise UserError(f'sampling.top_k: got {self.top_k}, wanted at least 1, or -1 for off')

  def limit(self, max_tokens: int) -> int:
    """Returns the lower of `max_tokens` and `max_response_length`."""
    if self.max_response_length is None:
      return max_tokens
    return min(max_tokens, self.max_response_length)

  @property
  def filtered(self) -> bool:
    """Whether top-k or top-p may exclude tokens. False for greedy sampling, because the filters
    always keep the most probable token.
    """
    return self.temperature > 0 and (self.top_p < 1 or self.top_k != -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """Request to sample one or several completions of a prompt."""

  uid: str
  """Identifier in messages and logs: the id of the group or, for a turn of an episode,
  `<group>/<sample index>/turn <number>`. It does not affect the random numbers.
  """
  prompt: tuple[int, ...]
  max_tokens: int
  """Maximum length of each completion."""
  sampling: Sampling = dataclasses.field(default_factory=Sampling)
  stop_ids: tuple[int, ...] = ()
  """Ids of tokens that end a completion. The stop token is kept as the last token of the
  completion.
  """
  samples: int = 1
  """Number of completions to sample. It does not affect the content of each completion."""
  first: int = 0
  """Sample index of the request's first completion. The other completions take the indices that
  follow.
  """
  begun: int = 0
  """Number of tokens at the end of `prompt` that earlier requests sampled for the same completions.
  This request continues those completions and returns only the new tokens.
  """
  key: tuple[int, ...]
  """Random key of the request, as uint32 words. The random numbers that sample a token depend on
  this key, the engine's seed, the sample index and the token position.
  """
  courier: Courier | None = dataclasses.field(default=None, compare=False, repr=False)
  """Courier that fetches the completions from the servers, if the engine supports couriers. If
  None, the engine fetches them itself. The courier does not affect the content of the completions.
  """

  @property
  def group(self) -> str:
    """Id of the group that the request belongs to."""
    parts = self.uid.rsplit('/', 2)
    return parts[0] if len(parts) == 3 and parts[2].startswith('turn ') else self.uid

  def __post_init__(self):
    if not self.prompt:
      raise UserError(f'request {self.uid}: prompt is empty, wanted at least one token')
    if self.max_tokens < 1 or self.samples < 1:
      raise UserError(
        f'request {self.uid}: max_tokens {self.max_tokens} and samples {self.samples}, wanted at '
        'least 1 of each'
      )
    if self.first < 0 or not 0 <= self.begun < len(self.prompt):
      raise ValueError(
        f'request {self.uid}: first {self.first} and begun {self.begun}, wanted at least 0 and '
        f'fewer than the {len(self.prompt)} prompt tokens'
      )
    if any(not 0 <= word < WORD for word in self.key):
      raise ValueError(f'request {self.uid}: key {self.key} is not made of uint32 words')

  def repetition_end(self, tokens: Int32[np.ndarray, 'time'], *, start: int = 0) -> int | None:
    """Returns the number of tokens of this request after which repetition ends a completion, or
    None if the completion continues. Tokens from earlier requests for the same completion are
    searched for repetition but not counted.

    Args:
      tokens: the tokens that this request has sampled for the completion so far.
      start: number of these tokens that an earlier call has examined without finding an end.
    """
    detection = self.sampling.repetition_detection
    if detection is None:
      return None
    # Engines call this method every few tokens, so its cost must not grow with the length of the
    # completion.
    earlier = max(0, min(self.begun, detection.reach - start))
    if earlier:
      tokens = np.r_[np.array(self.prompt[-earlier:], np.int32), tokens]
    end = detection.end(tokens, start=start + earlier)
    return None if end is None else end - earlier


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
  """One sampled completion of a request. All arrays have the length of `tokens`."""

  tokens: Int32[np.ndarray, 'time']
  """Tokens of the completion without the prompt. A stop token that ended the completion is
  included.
  """
  logprobs: Float32[np.ndarray, 'time']
  """Logprob of each token under the distribution it was sampled from (see `Sampling`)."""
  finish: Finish
  segments: tuple[Segment, ...]
  """Consecutive ranges of tokens, each sampled under one version. Together they cover all
  tokens.
  """

  def __post_init__(self):
    if len(self.tokens) != len(self.logprobs):
      raise ValueError(f'Completion: {len(self.tokens)} tokens, {len(self.logprobs)} logprobs')
    bounds = [0, *(s.end for s in self.segments)]
    if bounds[:-1] != [s.start for s in self.segments] or bounds[-1] != len(self.tokens):
      raise ValueError(
        f'Completion: segments {self.segments} do not cover {len(self.tokens)} tokens'
      )


class Undelivered(Exception):
  """Raised when the completion of an errand was not delivered. The engine must fetch it itself."""


class Forged(Exception):
  """Raised when a delivered part does not have the signature of the next part of the answer to the
  errand's request.
  """


@runtime_checkable
class AnswerParts(Protocol):
  """The parts of an errand's answer that have been delivered so far."""

  @property
  def count(self) -> int:
    """Number of parts."""
    ...

  @property
  def age_s(self) -> float:
    """Seconds from the server's receipt of the request until it sent the newest part; 0 without
    any.
    """
    ...

  async def add(self, signature: bytes, part: bytes) -> Completion | None:
    """Adds the next part. Returns the completion if this is the last part, and None otherwise.

    Raises:
      Forged: the signature is wrong. The part is ignored.
      Exception: the answer has broken off, or does not match the request: the same errors as for an
        answer that the engine has fetched itself.
    """
    ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Errand:
  """Order to fetch one completion from a server. The receiver of the order need not be trusted,
  because the server's front signs the answer.
  """

  nonce: str
  """Random number that identifies the errand."""
  address: str
  """Address of the server's front."""
  path: str
  """Path of the POST request."""
  authorization: str
  """Authorization header of the request. It permits only this request."""
  body: bytes
  """Body of the request."""
  deadline_s: float
  """Seconds within which the completion must be delivered."""
  parts: AnswerParts
  """Parts of the answer. They are delivered in order."""


@runtime_checkable
class Courier(Protocol):
  """Fetches completions from servers for an engine. In a run with explorers, the explorer that
  requested the completions fetches them. Their tokens then reach the master as arrays instead of a
  server's JSON.
  """

  def place(self) -> contextlib.AbstractAsyncContextManager[None]:
    """Returns a context in which the courier runs one errand. It is entered when the courier may
    have another errand. Entering it raises Undelivered if the courier runs no more errands.
    """
    ...

  async def fetch(self, errand: Errand) -> Completion:
    """Returns the completion of an errand. Must be called in a context of `place`.

    Raises:
      Undelivered: the completion was not delivered in time. Parts of it may have been.
      Exception: `AnswerParts.add` has raised this exception, which is not Forged.
    """
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
  """Fixed token sequences and the trainer's logprobs for them. An engine with the same weights must
  reproduce the logprobs within a tolerance.
  """

  sequences: Int32[np.ndarray, 'sequences time']
  logprobs: Float32[np.ndarray, 'sequences time']
  """Logprob of each token given its prefix, at temperature 1. `logprobs[:, 0]` is 0, because the
  first token has no prefix.
  """


class Comparison(NamedTuple):
  """Two versions that are compared while weights are published."""

  before: str | None
  """Token of the version to compare with; None if the next version must be read whole."""
  token: str
  """Token of the next version."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SharedWrite:
  """Describes how the processes of the trainer write weights together. Each writes a share."""

  order: Json
  """Order that the engine has given with `SharingEngine.begin_load`."""
  count: int
  """Number of processes."""
  reports: Callable[[], Awaitable[list[Json]]]
  """Function that returns the result of `ShareWriter.write` in each process, ordered by process
  number. The value of process 0 is None. After `decide`, the function returns the results of
  `ShareWriter.write_decided` instead.
  """
  decide: Callable[[Json], Awaitable[None]]
  """Function that sends the engine's decision to the other processes. It is needed only if
  `ShareWriter.awaits_decision` returns True. Call `reports` before and after this function.
  """
  comparison: Comparison | None = None
  """Comparison for which the devices keep the bits of the newest version; None if they keep none.
  If it names a version to compare with, all processes have that version.
  """


DeviceArrays = Callable[[Sequence[str], Any], Iterator[tuple[str, Any]]]
"""Function of (names in the unrolled parameter tree, `jax.Device`) that yields (name, bits) for
each of these parameters, in their order. The bits are those of the whole array as it is published:
a flat `jax.Array` of unsigned integers on the device. The function and its iterators are used on
the device thread.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
  """Weights of one policy version, for loading into an engine."""

  version: Version
  leaves: Iterable[tuple[str, Any]]
  """(name in the parameter tree, array) pairs. Layers may be stacked or separate. The arrays are of
  NumPy, and valid until `Engine.load` returns; a large array may be split into several consecutive
  pairs along its first axis (see `joined`). For an engine with `EngineSpec.loads_device_arrays`,
  they are whole arrays of JAX, which the engine may keep. If `shares` names a version to compare
  with, a value may be an array's `weights.deltas.Changes` instead.
  """
  probe: Probe | None = None
  """Probe for an engine whose arithmetic differs from the trainer's. If None, the engine's logprobs
  are not checked.
  """
  shares: SharedWrite | None = None
  """Description of how the trainer's processes write the weights together. `leaves` then contains
  only the share of process 0. If None, `leaves` contains all weights.
  """
  on_device: DeviceArrays | None = None
  """The same weights in the memory of a device of the trainer, until `Engine.load` returns. None if
  they are only on the host, or if the trainer has several processes.
  """

  @classmethod
  def of(cls, params: Params, version: Version) -> Weights:
    """Builds weights from a parameter tree on the host."""
    return cls(
      version=version,
      leaves=[(name, np.asarray(leaf)) for name, leaf in sorted(flatten(params).items())],
    )


def joined(leaves: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
  """Yields a stream's (name, array) pairs after joining the parts of each array."""
  for name, parts in itertools.groupby(leaves, key=lambda leaf: leaf[0]):
    arrays = [array for _, array in parts]
    yield name, arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


@runtime_checkable
class Generator(Protocol):
  """Anything that generates completions, such as an engine."""

  def generate(self, request: Request) -> AsyncIterator[tuple[int, Completion]]:
    """Yields (sample index, completion) as each completion finishes. Closing the iterator early
    cancels the unfinished completions.
    """
    ...


@runtime_checkable
class Engine(Generator, Protocol):
  """Generates tokens with one policy, whose weights can be replaced while it runs.

  `load` suspends sampling, replaces the weights, and resumes sampling. A completion in flight then
  continues with the new weights in a new segment. Servers that load LoRA adapters are an exception:
  with them, a completion in flight keeps its earlier adapter. A completion that starts later uses
  only the new weights.
  """

  name: str

  @property
  def version(self) -> Version | None:
    """Version of the weights that sample the next token; None before the first `load`."""
    ...

  async def load(self, weights: Weights) -> None:
    """Loads a copy of the weights. After the call, the caller may change, donate or delete its
    arrays.

    `weights.leaves` is iterated on the device thread of the process, because producing an array may
    need a collective operation of all processes.
    """
    ...

  async def relabel(self, version: Version) -> None:
    """Attributes the engine's current weights to `version` from now on, without loading anything.
    The weights of `version` must be identical to the current ones.
    """
    ...

  def take_metrics(self) -> dict[str, float]:
    """Returns the metrics since the last call, keyed by metric name."""
    ...

  async def start(self) -> None:
    """Prepares the engine to serve. All slow one-time work, such as compilation or starting
    servers, happens here.
    """
    ...

  async def close(self) -> None:
    """Shuts down the engine. Calls in flight raise an exception."""
    ...


@runtime_checkable
class SharingEngine(Engine, Protocol):
  """Engine whose weights all processes of the trainer can write, into a directory that all of them
  see. `EngineSpec.share_writer` writes them in the other processes.
  """

  async def begin_load(self) -> Json | None:
    """Begins to load a version. Returns the order by which the other processes write their shares,
    or None if process 0 must write everything.
    """
    ...


@runtime_checkable
class ShareWriter(Protocol):
  """Writes shares of weights in the processes of the trainer other than process 0."""

  def can_write(self, order: Json, number: int, count: int) -> bool:
    """Returns whether this process, `number` of `count`, can write its share where the engine
    expects it.
    """
    ...

  def names(self, number: int, count: int) -> Collection[str]:
    """Returns the names in the unrolled tree of the parameters that process `number` of `count`
    writes.
    """
    ...

  def comparison(self, order: Json) -> Comparison | None:
    """Returns the versions that are compared while the order is carried out, or None if none are.
    The result names a version to compare with only if this process has the version.
    """
    ...

  def write(self, order: Json, number: int, count: int, leaves: Iterable[tuple[str, Any]]) -> Json:
    """Writes the share of process `number`, and returns a report for the engine. Takes all of
    `leaves` even if the share cannot be written, because producing them may need a collective
    operation of all processes.
    """
    ...

  def awaits_decision(self, order: Json) -> bool:
    """Returns whether the engine decides how the shares are written, after all processes have
    reported on their shares.
    """
    ...

  def write_decided(self, decision: Json) -> Json:
    """Writes the share as the engine has decided, and returns a report for the engine."""
    ...


@runtime_checkable
class Releasable(Engine, Protocol):
  """Engine that can free its device memory while it generates nothing, as the memory phases of a
  run require (`PhasesConfig`).
  """

  @property
  def is_released(self) -> bool: ...

  @property
  def device_bytes(self) -> int:
    """Bytes of device memory that the engine uses on each device, or in total if `is_outside`. 0
    while the engine is released.
    """
    ...

  @property
  def is_outside(self) -> bool:
    """Whether the engine's device memory belongs to other processes. `device_bytes` is then an
    estimate of the total over these processes.
    """
    ...

  async def release(self, how: str) -> None:
    """Frees the engine's device memory. No completion may be in progress. Until `restore` is
    called, new requests wait, and `load` only remembers the weights. If `release` is called before
    `start`, the engine starts in the released state.

    Args:
      how: 'sleep' or 'destroy', see `PhasesConfig.engine`.
    """
    ...

  async def restore(self) -> None:
    """Resumes service with the most recently loaded weights, and returns once the engine serves
    them.
    """
    ...
