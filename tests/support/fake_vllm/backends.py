"""Who makes the tokens of a fake server: a test's script, or a model with the weights that were
published to it.

Invariant: a token is drawn by what is loaded when its piece is asked for, and says after how many
loads that was.
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
  """Some tokens of a completion, one entry for each."""

  tokens: Sequence[int]
  logprobs: Sequence[float]
  generations: Sequence[int]
  """How many loads had come before the token was drawn."""


@runtime_checkable
class Backend(Protocol):
  """Makes the tokens."""

  generation: int
  """Loads so far."""
  tensors: Mapping[str, np.ndarray]
  """What is loaded, by Hugging Face name."""

  async def start(self, *, max_length: int) -> None:
    """Makes ready; with weights that nobody published."""
    ...

  async def close(self) -> None: ...

  async def load(self, tensors: Mapping[str, np.ndarray]) -> None:
    """Takes tensors with the names, shapes and dtypes of those it has."""
    ...

  async def score(self, tokens: Sequence[int]) -> tuple[Sequence[float], Sequence[int]]:
    """Logprobs at temperature 1, and ranks from 1 on, of all tokens but the first."""
    ...

  def draw(self, prompt: Sequence[int], params: Params, index: int) -> AsyncGenerator[Drawn, None]:
    """One completion piece by piece; the next piece is made when it is asked for, by what is loaded
    then.
    """
    ...


Answer = Callable[[Sequence[int], Params, int], tuple[Sequence[int], Sequence[float]]]
"""(prompt, parameters, index of the sample) -> (tokens, their logprobs)."""
Score = Callable[[Sequence[int], Mapping[str, np.ndarray]], Sequence[float]]
"""(tokens, what is loaded) -> logprobs of all tokens but the first."""


class Scripted:
  """Tokens that a test makes up."""

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
      answer: may give more tokens than are asked for; what follows a stop token or `max_tokens` is
        left away. Too few are an error, as no model ends without a reason.
      tensors: what the server holds at first; what is published must have these names, shapes and
        dtypes.
      score: None = -1 for every token.
      piece: tokens between two looks at whether the server is paused.
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
  """Tokens of a model: the embedded engine's, under the weights that were published to this server.

  A completion is drawn in pieces, and each computes its keys and values anew, so that after an
  update all of them are the new weights', as on a server that was told to `reset_running_requests`.
  Up to rounding, pieces change no token: draws are counted by position. Sample i of a request with
  seed s is that of a request with seed s + i, as in vLLM.
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
      seed: of the weights at the start, and of all randomness with the requests' seeds.
      dtype: of weights and activations.
      config: None = small, and good for any request.
      piece: tokens between two looks at whether the server is paused.
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
    # As small and as random as vLLM's dummy weights: nothing that is published is already there.
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
    # A program for each power of two; causal attention does not look at the padding behind.
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
  """Logprobs and ranks of tokens 1, 2, … (the last entry means nothing)."""
  sequence = tokens[None]
  hidden = model.apply(params, sequence, jnp.arange(len(tokens))[None], jnp.ones_like(sequence))[0]
  kernel = model.head_kernel(params).astype(hidden.dtype)

  def one(row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    state, token = row
    logits = jnp.dot(kernel, state, preferred_element_type=jnp.float32)
    return logits[token] - jax.nn.logsumexp(logits), (logits >= logits[token]).sum()

  return jax.lax.map(one, (hidden, jnp.roll(tokens, -1)), batch_size=16)
