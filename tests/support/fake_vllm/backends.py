"""Sources of a fake server's tokens: a test's script, or a model with the weights that were
published to the server.

Invariant: a token is drawn with the weights that are loaded when its piece is requested, and its
record tells the number of loads before it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from fake_vllm.requests import Params
from jaxrl_llm.core.types import Params as Tree
from jaxrl_llm.core.types import Version
from jaxrl_llm.models.api import Model, build_model
from jaxrl_llm.models.spec import ModelOptions, ModelSpec
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.rollout.api import WORD, Request, Sampling, Weights
from jaxrl_llm.rollout.embedded.engine import EmbeddedConfig, EmbeddedEngine
from jaxrl_llm.weights.layout import dtype_of, from_hf
from jaxrl_llm.weights.tables import entries


class Drawn(NamedTuple):
  """Consecutive tokens of a completion. Each list has one entry per token."""

  tokens: Sequence[int]
  logprobs: Sequence[float]
  generations: Sequence[int]
  """For each token, the number of loads before it was drawn."""


@runtime_checkable
class Backend(Protocol):
  """A source of tokens."""

  generation: int
  """Number of loads so far."""
  tensors: Mapping[str, np.ndarray]
  """The loaded tensors, keyed by Hugging Face name."""

  async def start(self, *, max_length: int) -> None:
    """Prepares the backend. Its first weights are its own, not published ones."""
    ...

  async def close(self) -> None: ...

  async def load(self, tensors: Mapping[str, np.ndarray]) -> None:
    """Replaces the tensors. The names, shapes and dtypes must stay the same."""
    ...

  async def score(self, tokens: Sequence[int]) -> tuple[Sequence[float], Sequence[int]]:
    """Returns logprobs at temperature 1, and ranks counted from 1, of all tokens except the
    first.
    """
    ...

  def draw(self, prompt: Sequence[int], params: Params, index: int) -> AsyncGenerator[Drawn, None]:
    """Yields one completion in pieces. Each piece is made when it is requested, with the weights
    that are loaded then.
    """
    ...


Answer = Callable[[Sequence[int], Params, int], tuple[Sequence[int], Sequence[float]]]
"""Function of (prompt, parameters, index of the sample) that returns (tokens, logprobs of the
tokens).
"""
Score = Callable[[Sequence[int], Mapping[str, np.ndarray]], Sequence[float]]
"""Function of (tokens, loaded tensors) that returns the logprobs of all tokens except the first."""


class Scripted:
  """A backend whose tokens come from a test's function."""

  def __init__(
    self,
    answer: Answer,
    tensors: Mapping[str, np.ndarray],
    *,
    score: Score | None = None,
    piece: int = 1,
  ):
    """
    Args:
      answer: may return more tokens than requested: those after a stop token or after `max_tokens`
        are dropped. Too few tokens are an error, because a model never ends without a reason.
      tensors: the server's first tensors. Published tensors must have these names, shapes and
        dtypes.
      score: returns the logprobs of a prompt. If None, each logprob is -1.
      piece: number of tokens between two checks for a pause.
    """
    self.generation, self.tensors = 0, dict(tensors)
    self._answer, self._score, self._piece = answer, score, piece

  async def start(self, *, max_length: int) -> None: ...

  async def close(self) -> None: ...

  async def load(self, tensors: Mapping[str, np.ndarray]) -> None:
    self.tensors = dict(tensors)
    self.generation += 1

  async def score(self, tokens: Sequence[int]) -> tuple[Sequence[float], Sequence[int]]:
    count = len(tokens) - 1
    return [-1.0] * count if self._score is None else self._score(tokens, self.tensors), [1] * count

  async def draw(
    self, prompt: Sequence[int], params: Params, index: int
  ) -> AsyncGenerator[Drawn, None]:
    tokens, logprobs = self._answer(prompt, params, index)
    if len(tokens) != len(logprobs):
      raise ValueError(f'the script gave {len(tokens)} tokens and {len(logprobs)} logprobs')
    for start in range(0, len(tokens), self._piece):
      part = slice(start, start + self._piece)
      yield Drawn(tokens[part], logprobs[part], [self.generation] * len(tokens[part]))


class Sampled:
  """A backend whose tokens come from the embedded engine, with the weights that were published to
  this server.

  A completion is drawn in pieces, and each piece computes its keys and values anew. After an update
  they are therefore all computed with the new weights, as on a server that was told to
  `reset_running_requests`. The pieces do not change the tokens, except for rounding, because draws
  are counted by position. As in vLLM, sample i of a request with seed s equals the first sample of
  a request with seed s + i.
  """

  def __init__(
    self,
    spec: ModelSpec,
    *,
    seed: int = 0,
    dtype: str = 'float32',
    config: EmbeddedConfig | None = None,
    piece: int = 16,
  ):
    """
    Args:
      seed: seed of the first weights and, combined with the requests' seeds, of all randomness.
      dtype: data type of weights and activations.
      config: options of the engine. If None, the engine is small and accepts any request.
      piece: number of tokens between two checks for a pause.
    """
    self.generation, self.tensors = 0, {}
    self._spec, self._seed, self._dtype, self._piece = spec, seed, dtype, piece
    self._config = config or EmbeddedConfig(slots=16, prefill_rows=4, max_stop_ids=32)
    self._model = build_model(spec, ModelOptions(dtype=dtype))
    self._score = jax.jit(lambda params, tokens: _score(self._model, params, tokens))
    self._thread = DeviceThread()
    self._engine: EmbeddedEngine | None = None
    self._params: Tree = {}

  async def start(self, *, max_length: int) -> None:
    self._max_length = max_length
    self._engine = EmbeddedEngine(
      self._model,
      self._config,
      max_length=max_length,
      seed=self._seed,
      run=self._thread.run,
      name='fake',
    )
    await self._engine.start()
    # The first weights are small and random, like vLLM's dummy weights. A published tensor
    # therefore never equals the tensor that it replaces.
    random, dtype = np.random.default_rng(self._seed), dtype_of(self._dtype)
    first = {
      entry.hf: random.uniform(-1e-3, 1e-3, entry.shape).astype(dtype)
      for entry in entries(self._spec)
    }
    await self._take(first)

  async def close(self) -> None:
    if self._engine is not None:
      await self._engine.close()
    await asyncio.to_thread(self._thread.close)

  async def load(self, tensors: Mapping[str, np.ndarray]) -> None:
    self.generation += 1
    await self._take(tensors)

  async def score(self, tokens: Sequence[int]) -> tuple[Sequence[float], Sequence[int]]:
    # One program is compiled per power of two. Causal attention ignores the padding after the
    # tokens.
    padded = np.zeros(min(max(16, 1 << (len(tokens) - 1).bit_length()), self._max_length), np.int32)
    padded[: len(tokens)] = tokens
    logprobs, ranks = await self._thread.run(
      lambda: jax.device_get(self._score(self._params, padded))
    )
    return logprobs[: len(tokens) - 1].tolist(), ranks[: len(tokens) - 1].tolist()

  async def draw(
    self, prompt: Sequence[int], params: Params, index: int
  ) -> AsyncGenerator[Drawn, None]:
    assert self._engine is not None, 'not started'
    if params.top_k > 0 or params.top_p < 1:
      sampling = Sampling(
        temperature=params.temperature, top_p=params.top_p, top_k=params.top_k or -1
      )
    else:
      sampling = Sampling(temperature=params.temperature)
    seed, drawn = params.seed + index, []
    while len(drawn) < params.max_tokens and not (drawn and drawn[-1] in params.stop_ids):
      request = Request(
        uid=f'{params.seed}/{index}',
        prompt=(*prompt, *drawn),
        max_tokens=min(self._piece, params.max_tokens - len(drawn)),
        sampling=sampling,
        stop_ids=params.stop_ids,
        key=(seed % WORD, seed // WORD % WORD),
      )
      async with contextlib.aclosing(self._engine.generate(request)) as completions:
        _, piece = await anext(completions)
      drawn += piece.tokens.tolist()
      generations = [s.version.step for s in piece.segments for _ in range(s.start, s.end)]
      yield Drawn(piece.tokens.tolist(), piece.logprobs.tolist(), generations)

  async def _take(self, tensors: Mapping[str, np.ndarray]) -> None:
    params = from_hf(tensors.items(), self._spec, scan_layers=False, dtype=self._dtype)
    await self._engine.load(Weights.of(params, Version(0, self.generation)))
    self._params = await self._thread.run(jax.device_put, params)
    self.tensors = dict(tensors)


def _score(model: Model, params: Tree, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns logprobs and ranks of the tokens at positions 1, 2, …. The last entry is
  meaningless.
  """
  sequence = tokens[None]
  hidden = model.apply(params, sequence, jnp.arange(len(tokens))[None], jnp.ones_like(sequence))[0]
  kernel = model.head_kernel(params).astype(hidden.dtype)

  def one(row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    state, token = row
    logits = jnp.dot(kernel, state, preferred_element_type=jnp.float32)
    return logits[token] - jax.nn.logsumexp(logits), (logits >= logits[token]).sum()

  return jax.lax.map(one, (hidden, jnp.roll(tokens, -1)), batch_size=16)
