"""Scores answers with a trained reward model on a mesh, as requests arrive.

Sequences are packed into arrays of one fixed shape, so that the model's program compiles once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.batching.plan import plan_shape
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Params
from jaxrl_llm.data.load import Grid
from jaxrl_llm.learner.forward import build_score
from jaxrl_llm.models.api import Model
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.parallel.mesh import data_parallel_ranks
from jaxrl_llm.parallel.rules import sharding_of_batch

_CHUNKS_PER_RANK = 8
"""Maximum number of chunks per rank and micro-batch. A chunk is a line of tokens of fixed length
into which one or several sequences are packed.
"""


class RewardModel:
  """Maps token sequences to scores. A score is the output of the head at the last token, as in
  transformers' `…ForSequenceClassification`.
  """

  def __init__(
    self, model: Model, params: Params, mesh: Mesh, *, max_length: int, sequences: int = 32
  ):
    """
    Args:
      model: model with a 'scalar' head.
      params: parameters of `model`, on the mesh.
      max_length: maximum number of tokens per sequence.
      sequences: maximum number of sequences per pass.
    """
    if model.spec.head != 'scalar':
      raise UserError(
        f'a reward model has a scalar head, and this {model.spec.family} model has head '
        f'{model.spec.head!r}'
      )
    self.max_length, self.sequences = max_length, sequences
    self._params, self._sharding = params, sharding_of_batch(mesh)
    chunk_len = -(-max_length // 8) * 8
    self._shape = plan_shape(
      rows=sequences,
      ranks=data_parallel_ranks(mesh),
      chunks=min(_CHUNKS_PER_RANK, sequences),
      chunk_len=chunk_len,
    )
    self._score = build_score(model, mesh, token_chunk=chunk_len)

  def __call__(self, sequences: Sequence[Sequence[int]]) -> list[float]:
    """Returns the score of each sequence, in order. Both the number of sequences and their lengths
    must be within the limits given to the constructor.
    """
    if not 0 < len(sequences) <= self.sequences:
      raise ValueError(f'{len(sequences)} sequences, wanted 1 … {self.sequences}')
    packing = self._shape.pack([len(sequence) for sequence in sequences])
    grid = Grid.of(packing, self._shape, self._sharding)
    arrays = grid.zeros()
    for i, sequence in enumerate(sequences):
      at = grid.tokens(i)
      arrays['tokens'][at], arrays['positions'][at] = sequence, np.arange(len(sequence))
      arrays['segment_ids'][at] = packing.segment[i]
    scores = np.asarray(
      self._score(self._params, grid.chunks(arrays), np.int32(packing.micro_batches))
    )
    return [
      float(scores[m, c, s - 1])
      for m, c, s in zip(packing.micro_batch, packing.chunk, packing.segment)
    ]


class Batcher:
  """Scores the sequences of concurrent callers together.

  Whenever the model is free, it scores the waiting sequences in one pass, up to its maximum number
  of sequences.

  Attributes:
    passes: number of passes so far.
  """

  def __init__(self, model: RewardModel, device: DeviceThread):
    self._model, self._device = model, device
    self._waiting: list[tuple[Sequence[int], asyncio.Future[float]]] = []
    self._work = asyncio.Event()
    self.passes = 0

  async def score(self, sequence: Sequence[int]) -> float:
    """Scores one sequence. Raises UserError if it is empty or too long."""
    if not 0 < len(sequence) <= self._model.max_length:
      raise UserError(
        f'{len(sequence)} tokens with the prompt, the reward model takes up to '
        f'{self._model.max_length}'
      )
    future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    self._waiting.append((sequence, future))
    self._work.set()
    # The wait 'pass' is bounded by the client, which cancels the request at its deadline.
    return await future

  async def run(self) -> None:
    """Scores requests until it is cancelled."""
    while True:
      # The wait 'request' is unbounded: a service waits for its next request.
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
