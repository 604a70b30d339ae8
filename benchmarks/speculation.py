"""Tokens per second of the embedded engine with and without speculative decoding.

  .venv/bin/python benchmarks/speculation.py [--model=DIR --texts=FILE.jsonl] [--slots=4]
    [--tokens=4] [--prompts=8] [--length=96] [--temperature=1] [--rounds=3]

The model answers a request to repeat a text (the field `question` of a row of --texts) and, as the
opposite case, the text alone. Without --model, a random model of one layer continues random tokens,
which measures nothing. Both engines answer the same requests in turn, in one process; the ratio is
the median over the rounds. Also reported: the number of tokens that the speculative engine samples
like the plain engine.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import pathlib
import statistics
import time

import jax
import numpy as np

from jaxrl_llm.core.types import Params, Version
from jaxrl_llm.models.api import Model, build_model
from jaxrl_llm.models.families import tiny
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.rollout.api import Completion, Request, Sampling, Weights
from jaxrl_llm.rollout.embedded.engine import EmbeddedConfig, EmbeddedEngine
from jaxrl_llm.rollout.embedded.speculation import SpeculationConfig
from jaxrl_llm.tasks.tokenizer import Tokenizer
from jaxrl_llm.weights.hf import load_params, read_spec

Prompts = dict[str, list[tuple[int, ...]]]
"""Prompts of each task."""


def random_model(count: int) -> tuple[Model, Params, Prompts, tuple[int, ...]]:
  model = build_model(tiny('qwen3', 64))
  prompts = np.random.default_rng(0).integers(0, 64, (count, 12)).tolist()
  return model, model.init(jax.random.key(0)), {'random': [tuple(p) for p in prompts]}, ()


def real_model(
  directory: str, texts: str, count: int
) -> tuple[Model, Params, Prompts, tuple[int, ...]]:
  spec, tokenizer = read_spec(directory), Tokenizer.from_directory(directory)
  lines = pathlib.Path(texts).read_text().splitlines()[:count]
  questions = [json.loads(line)['question'] for line in lines]

  def render(text: str) -> tuple[int, ...]:
    return tuple(tokenizer.render_prompt([{'role': 'user', 'content': text}]))

  prompts = {
    'repeat': [render(f'Repeat this text word for word:\n{text}') for text in questions],
    'solve': [render(text) for text in questions],
  }
  return build_model(spec), load_params(directory, spec), prompts, tokenizer.stop_ids


async def answer(
  engine: EmbeddedEngine, prompts: list[tuple[int, ...]], request: Request
) -> tuple[float, list[Completion]]:
  """Returns (seconds, one completion per prompt)."""

  async def one(number: int, prompt: tuple[int, ...]) -> Completion:
    asked = dataclasses.replace(request, uid=f'p{number}', prompt=prompt, key=(number,))
    ((_, completion),) = [pair async for pair in engine.generate(asked)]
    return completion

  begin = time.perf_counter()
  completions = await asyncio.gather(*(one(*pair) for pair in enumerate(prompts)))
  return time.perf_counter() - begin, completions


def equal_tokens(plain: list[Completion], speculative: list[Completion]) -> int:
  """Returns the number of tokens of the plain answers before the first difference."""
  count = 0
  for a, b in zip(plain, speculative, strict=True):
    shorter = min(len(a.tokens), len(b.tokens))
    differ = np.flatnonzero(a.tokens[:shorter] != b.tokens[:shorter])
    count += int(differ[0]) if len(differ) else shorter
  return count


async def measure(arguments: argparse.Namespace) -> None:
  model, params, tasks, stop_ids = (
    real_model(arguments.model, arguments.texts, arguments.prompts)
    if arguments.model
    else random_model(arguments.prompts)
  )
  request = Request(
    uid='',
    prompt=(0,),
    max_tokens=arguments.length,
    sampling=Sampling(temperature=arguments.temperature),
    stop_ids=stop_ids,
    key=(0,),
  )
  longest = max(len(prompt) for prompts in tasks.values() for prompt in prompts)
  config = EmbeddedConfig(slots=arguments.slots, prefill_buckets=(longest,), filters=False)
  speculation = SpeculationConfig(tokens=arguments.tokens)
  thread = DeviceThread()
  engines = [
    EmbeddedEngine(model, each, max_length=longest + arguments.length, seed=0, run=thread.run)
    for each in (config, dataclasses.replace(config, speculation=speculation))
  ]
  for engine in engines:
    await engine.start()
    await engine.load(Weights.of(params, Version(0, 0)))
  for task, prompts in tasks.items():
    rates: list[list[float]] = [[], []]
    for _ in range(arguments.rounds):
      answers = []
      engines[1].take_metrics()
      for engine, measured in zip(engines, rates, strict=True):
        seconds, completions = await answer(engine, prompts, request)
        answers.append(completions)
        measured.append(sum(len(completion.tokens) for completion in completions) / seconds)
    metrics = engines[1].take_metrics()
    print(
      f'{task}: {statistics.median(rates[0]):.1f} tokens/s plain, '
      f'{statistics.median(rates[1]):.1f} speculative, ratio '
      f'{statistics.median(b / a for a, b in zip(*rates, strict=True)):.2f}; accepted '
      f'{metrics.get("speculation/accepted_ratio", 0.0):.2f} of the drafted tokens, '
      f'{metrics["speculation/tokens_per_step"]:.2f} tokens per step; {equal_tokens(*answers)} of '
      f'{sum(len(completion.tokens) for completion in answers[0])} tokens equal'
    )
  for engine in engines:
    await engine.close()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--model')
  parser.add_argument('--texts')
  for name, default in (('slots', 4), ('tokens', 4), ('prompts', 8), ('length', 96), ('rounds', 3)):
    parser.add_argument(f'--{name}', type=int, default=default)
  parser.add_argument('--temperature', type=float, default=1.0)
  arguments = parser.parse_args()
  if (arguments.model is None) != (arguments.texts is None):
    parser.error('--model and --texts go together')
  asyncio.run(measure(arguments))


if __name__ == '__main__':
  main()
