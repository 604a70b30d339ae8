"""Scores answers with a trained reward model on a mesh: answers in requests as they arrive
(`Batcher`), and a run's rollouts (`RewardRole`).

Sequences are packed into arrays of one fixed shape, so that the model's program compiles once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.batching.plan import plan_shape
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Params
from jaxrl_llm.data.load import Grid
from jaxrl_llm.learner.forward import build_score
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.models.api import Model
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.parallel.mesh import SEQUENCE, data_parallel_ranks
from jaxrl_llm.parallel.rules import replicated, sharding_of_batch
from jaxrl_llm.rewards.api import Verdict
from jaxrl_llm.tasks.tokenizer import Tokenizer

_CHUNKS_PER_RANK = 8
"""Maximum number of chunks per rank and micro-batch. A chunk is a line of tokens of fixed length
into which one or several sequences are packed.
"""


class ScoringPass:
  """Forward pass of a reward model over packed sequences. Every process of the mesh must take part.

  A score is the output of the head at the last token, as in
  transformers' `…ForSequenceClassification`.
  """

  def __init__(self, model: Model, mesh: Mesh, *, max_length: int, sequences: int = 32):
    """
    Args:
      model: model with a 'scalar' head.
      max_length: maximum number of tokens per sequence.
      sequences: maximum number of sequences per pass.
    """
    if model.spec.head != 'scalar':
      raise UserError(
        f'a reward model needs a scalar head, but this {model.spec.family} model has head '
        f'{model.spec.head!r}'
      )
    self.max_length, self.sequences = max_length, sequences
    self._sharding = sharding_of_batch(mesh)
    multiple = math.lcm(8, mesh.shape[SEQUENCE])
    chunk_len = -(-max_length // multiple) * multiple
    self.shape = plan_shape(
      rows=sequences,
      ranks=data_parallel_ranks(mesh),
      chunks=min(_CHUNKS_PER_RANK, sequences),
      chunk_len=chunk_len,
    )
    self.program = build_score(model, mesh, token_chunk=chunk_len)
    # Replicates the scores, because a process can read only arrays on its own devices.
    self._whole = jax.jit(lambda x: x, out_shardings=replicated(mesh))

  def score(self, params: Params, sequences: Sequence[Sequence[int]]) -> list[float]:
    """Returns the score of each sequence, in order. Both the number of sequences and their lengths
    must be within the limits given to the constructor.

    Args:
      params: parameters of the model, on the mesh.
    """
    if not 0 < len(sequences) <= self.sequences:
      raise ValueError(f'{len(sequences)} sequences, wanted 1 … {self.sequences}')
    packing = self.shape.pack([len(sequence) for sequence in sequences])
    grid = Grid.of(packing, self.shape, self._sharding)
    arrays = grid.zeros()
    for i in grid.local:
      sequence, at = sequences[i], grid.tokens(i)
      arrays['tokens'][at], arrays['positions'][at] = sequence, np.arange(len(sequence))
      arrays['segment_ids'][at] = packing.segment[i]
    scores = jax.device_get(
      self._whole(self.program(params, grid.chunks(arrays), np.int32(packing.micro_batches)))
    )
    return [
      float(scores[m, c, s - 1])
      for m, c, s in zip(packing.micro_batch, packing.chunk, packing.segment)
    ]


class RewardModel(ScoringPass):
  """A reward model with its parameters, for a mesh in one process."""

  def __init__(
    self, model: Model, params: Params, mesh: Mesh, *, max_length: int, sequences: int = 32
  ):
    """
    Args:
      params: parameters of `model`, on the mesh. For the other arguments, see `ScoringPass`.
    """
    super().__init__(model, mesh, max_length=max_length, sequences=sequences)
    self._params = params

  def __call__(self, sequences: Sequence[Sequence[int]]) -> list[float]:
    """Returns the score of each sequence, in order. The limits are those of `score`."""
    return self.score(self._params, sequences)


class Rendered(NamedTuple):
  """Tokens of a sample, in the reward model's vocabulary."""

  tokens: list[int]
  """Tokens of prompt and completion; empty if the sample cannot be scored."""
  error: str = ''
  """Reason why the sample cannot be scored; empty if it can be scored."""


class RewardRole:
  """The trainer's reward model, which scores the rollouts of a batch. Every process of the trainer
  has an instance.
  """

  def __init__(self, scoring: ScoringPass, tokenizer: Tokenizer | None):
    """
    Args:
      tokenizer: tokenizer of the reward model in process 0; None in the other processes.
    """
    self.scoring, self._tokenizer = scoring, tokenizer

  def render(self, members: Sequence[Experience]) -> list[Rendered]:
    """Returns the tokens of each sample's prompt and completion. Only process 0 may call this.

    Samples are rendered from their texts, because the reward model's tokenizer may differ from the
    policy's. A served reward model (`jaxrl serve`) renders them in the same way.
    """
    return [self._rendered(member) for member in members]

  def _rendered(self, member: Experience) -> Rendered:
    try:
      before, after = self._tokenizer.render_answer(member.task.prompt, member.completion)
    except UserError as error:  # The policy may write characters that this tokenizer lacks.
      return Rendered([], str(error))
    tokens, most = [*before, *after], self.scoring.max_length
    if len(tokens) > most:
      return Rendered([], f'longer than the {most} tokens of reward_model.max_length')
    return Rendered(tokens)

  def score(self, params: Params, sequences: Sequence[Sequence[int]]) -> list[float | None]:
    """Returns the score of each sequence, in order; None for an empty sequence.

    Each pass takes the next sequences in the given order, so the scores depend on the arguments
    alone. Every process must call this with the same sequences.
    """
    present = [i for i, sequence in enumerate(sequences) if sequence]
    scores: list[float | None] = [None] * len(sequences)
    for start in range(0, len(present), self.scoring.sequences):
      numbers = present[start : start + self.scoring.sequences]
      values = self.scoring.score(params, [sequences[i] for i in numbers])
      for i, value in zip(numbers, values, strict=True):
        scores[i] = value
    return scores

  def verdicts(
    self,
    members: Sequence[Experience],
    rendered: Sequence[Rendered],
    scores: Sequence[float | None],
  ) -> dict[str, Verdict]:
    """Returns the verdict on each sample, keyed by uid.

    Args:
      rendered: tokens of each sample, as `render` returned them.
      scores: score of each sample, as `score` returned them.
    """
    return {
      member.sample.uid: Verdict(
        value=value, evidence={'tokens': len(tokens)} if tokens else {'error': error}
      )
      for member, (tokens, error), value in zip(members, rendered, scores, strict=True)
    }


class Batcher:
  """Scores the sequences of concurrent callers together.

  Whenever the model is free, it scores waiting sequences in one pass: all of them, or the first
  ones up to the maximum number of sequences per pass.

  Attributes:
    passes: number of passes so far.
  """

  def __init__(self, model: RewardModel, device: DeviceThread):
    self._model, self._device = model, device
    self._waiting: list[tuple[Sequence[int], asyncio.Future[float]]] = []
    self._work = asyncio.Event()
    self.passes = 0

  async def score(self, sequence: Sequence[int]) -> float:
    """Returns the score of one sequence. Raises UserError if the sequence is empty or too long."""
    if not 0 < len(sequence) <= self._model.max_length:
      raise UserError(
        f'{len(sequence)} tokens with the prompt, the reward model accepts at most '
        f'{self._model.max_length}'
      )
    future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    self._waiting.append((sequence, future))
    self._work.set()
    # Wait 'pass': bounded by the client, which cancels the request at its deadline.
    return await future

  async def run(self) -> None:
    """Scores requests until it is cancelled."""
    while True:
      # Wait 'request': unbounded: a service waits for its next request.
      await self._work.wait()
      batch, self._waiting = (
        self._waiting[: self._model.sequences],
        self._waiting[self._model.sequences :],
      )
      if not self._waiting:
        self._work.clear()
      # Skip requests whose callers have been cancelled.
      batch = [(sequence, future) for sequence, future in batch if not future.done()]
      if not batch:
        continue
      scores = await self._device.run(self._model, [sequence for sequence, _ in batch])
      self.passes += 1
      for (_, future), score in zip(batch, scores, strict=True):
        if not future.done():
          future.set_result(score)
