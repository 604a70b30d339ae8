"""This project's side of benchmarks/steps.py: the learner's update and score pass, and the embedded
engine.

  .venv/bin/python benchmarks/own_steps.py FOLDER CHUNKS

As with a run's defaults, layers are unrolled, nothing is recomputed, and logits that fit 256 MiB
are computed at once. A micro-batch is CHUNKS sequences of equal length.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import pathlib
import sys

import jax
import numpy as np
from peers.serving import serve
from updates import Batch, Learner, Row, pack_rows

from jaxrl_llm.core.types import Version
from jaxrl_llm.learner.algorithm import Setting
from jaxrl_llm.learner.forward import build_score
from jaxrl_llm.learner.preference import DpoConfig, dpo
from jaxrl_llm.learner.state import copy_params, place_params
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.ops.logprobs import plan_token_chunk
from jaxrl_llm.rollout.api import Request, Weights
from jaxrl_llm.rollout.embedded.engine import EmbeddedConfig, EmbeddedEngine
from jaxrl_llm.weights.hf import load_params, read_spec

GROUPS = {
  'grpo, groups': 'groups',
  'grpo, groups with short prompts': 'short_groups',
  'grpo, groups of lognormal lengths': 'lognormal_groups',
}
"""Files of the works in which every eight rows have the same prompt, keyed by work."""
APART = ', prompts not shared'
"""End of the name of a work of groups if the prompt is computed for each row."""
TREE_TOKENS = 1600
"""Approximate number of tokens of a micro-batch of groups."""
RAGGED_CHUNKS = 2
"""Chunks of a micro-batch with sequences of unequal lengths: each chunk fits the longest."""


def read_rows(path: pathlib.Path, *, pairs: bool = False) -> list[Row]:
  rows = np.load(path)
  tokens = np.split(rows['tokens'], np.cumsum(rows['lengths'])[:-1])
  parts = zip(tokens, rows['prompt_lens'].tolist(), rows['advantages'].tolist(), strict=True)
  return [
    Row(
      row,
      prompt_len,
      label=(1, -1)[i % 2] if pairs else 0,
      advantage=advantage,
      group=int(group) if group >= 0 else None,
    )
    for i, ((row, prompt_len, advantage), group) in enumerate(
      zip(parts, rows['groups'].tolist(), strict=True)
    )
  ]


def token_chunk(spec: ModelSpec, batch: Batch) -> int:
  _, chunks, time = batch.chunks.tokens.shape
  return plan_token_chunk(chunks=chunks, time=time, vocab=spec.vocab_size, budget_bytes=256 << 20)


class Side:
  def __init__(self, folder: pathlib.Path, chunks: int, stack: contextlib.ExitStack):
    self.folder, self.chunks, self.stack = folder, chunks, stack
    self.spec = read_spec(folder / 'model')
    self.params = load_params(folder / 'model', self.spec)

  def works(self):
    """Available works, keyed by name. Each is built at its first call."""
    makers = {
      'grpo': lambda: self._grpo('equal', self.chunks),
      'grpo, lognormal lengths': lambda: self._grpo('ragged', RAGGED_CHUNKS),
      'logprobs': self._logprobs,
      'dpo': self._dpo,
      'generate': lambda: self._generate('equal'),
      'generate, groups': lambda: self._generate('groups'),
      **{work: lambda file=file: self._groups(file) for work, file in GROUPS.items()},
      **{
        work + APART: lambda file=file: self._groups(file, False) for work, file in GROUPS.items()
      },
    }
    made = {}

    def call(name):
      if name not in made:
        made[name] = makers[name]()
      return made[name]()

    return {name: lambda name=name: call(name) for name in makers}

  def _batch(self, name: str, chunks: int, *, pairs: bool = False) -> Batch:
    rows = read_rows(self.folder / f'{name}.npz', pairs=pairs)
    return pack_rows(
      rows, chunks=chunks, chunk_len=-(-max(len(row.tokens) for row in rows) // 8) * 8
    )

  def _learner(self, batch: Batch, **more) -> Learner:
    return Learner(self.spec, token_chunk=token_chunk(self.spec, batch), params=self.params, **more)

  def _grpo(self, name: str, chunks: int):
    batch = self._batch(name, chunks)
    learner = self._learner(batch)
    return lambda: learner.step(batch).stats['actor/grad_norm'].total

  def _groups(self, name: str, shared: bool = True):
    rows = read_rows(self.folder / f'{name}.npz')
    longest = max(len(row.tokens) for row in rows)
    prompts = {row.group: row.prompt_len for row in rows}
    sizes = dict.fromkeys(prompts, 1)
    for row in rows:
      sizes[row.group] += len(row.tokens) - row.prompt_len + 1
    tree = max(size + prompts[group] for group, size in sizes.items())
    chunk_len = -(-(tree if shared else longest) // 8) * 8
    batch = pack_rows(
      rows, chunks=max(1, TREE_TOKENS // chunk_len), chunk_len=chunk_len, shared=shared
    )
    learner = self._learner(batch)
    return lambda: learner.step(batch).stats['actor/grad_norm'].total

  def _logprobs(self):
    batch = self._batch('equal', self.chunks)
    learner = self._learner(batch)
    score = build_score(learner.model, learner.mesh, token_chunk=token_chunk(self.spec, batch))
    mask = np.asarray(batch.chunks.loss_mask)
    return lambda: np.asarray(score(learner.state.params, batch.chunks, batch.used))[mask].mean()

  def _dpo(self):
    batch = self._batch('equal', self.chunks, pairs=True)
    setting = Setting(max_response_length=self.spec.max_position_embeddings)
    learner = self._learner(batch, loss=dpo(DpoConfig(beta=0.1), setting).loss)
    reference = copy_params(place_params(learner.model, learner.mesh, self.params))
    score = build_score(learner.model, learner.mesh, token_chunk=token_chunk(self.spec, batch))

    def step():
      logprobs = score(reference, batch.chunks, batch.used)
      report = learner.step(
        batch._replace(chunks=batch.chunks.replace(reference_logprobs=logprobs))
      )
      return report.stats['actor/grad_norm'].total

    return step

  def _generate(self, name: str):
    """Samples as many completions of each prompt as there are rows with it."""
    rows = read_rows(self.folder / f'{name}.npz')
    prompt_len = rows[0].prompt_len
    new = len(rows[0].tokens) - prompt_len
    prompts = collections.Counter(tuple(row.tokens[:prompt_len].tolist()) for row in rows)
    requests = [
      Request(uid=str(i), prompt=prompt, samples=samples, max_tokens=new, key=(i,))
      for i, (prompt, samples) in enumerate(prompts.items())
    ]
    learner = Learner(self.spec, token_chunk=prompt_len + new, params=self.params)
    engine = EmbeddedEngine(
      learner.model,
      EmbeddedConfig(slots=len(rows), prefill_buckets=(prompt_len,), filters=False),
      max_length=prompt_len + new,
      seed=0,
      run=asyncio.to_thread,
    )
    runner = self.stack.enter_context(asyncio.Runner())
    self.stack.callback(lambda: runner.run(engine.close()))

    async def start():
      await engine.start()
      await engine.load(Weights.of(jax.device_get(learner.state.params), Version(0, 0)))

    async def one(request):
      return [len(completion.tokens) async for _, completion in engine.generate(request)]

    async def generate():
      return await asyncio.gather(*map(one, requests))

    runner.run(start())
    return lambda: sum(lengths.count(new) for lengths in runner.run(generate()))


if __name__ == '__main__':
  with contextlib.ExitStack() as closing:
    serve(Side(pathlib.Path(sys.argv[1]), int(sys.argv[2]), closing).works())
