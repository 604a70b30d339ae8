"""Latency that the recording proxy adds to a call of the policy, as an agent sees it.

  python benchmarks/agents.py [--sessions=64] [--turns=8] [--delay=1.0]

An engine that only waits answers after half to one and a half times `--delay`; a process with the
agents of all sessions calls it through the proxy. The added latency of a call is its round trip
minus the engine's wait, so it includes the agent's HTTP client, the rendering of the whole
conversation in the process of the chat template, the recording, and the lateness of the event loop.
"""

import argparse
import asyncio
import contextlib
import json
import pathlib
import random
import statistics
import sys
import tempfile
import time

import aiohttp
import numpy as np

from jaxrl_llm.core.records.sample import Finish, Segment
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.agents.proxy import Proxy
from jaxrl_llm.rollout.agents.session import Session, SessionOptions
from jaxrl_llm.rollout.api import Completion, Sampling
from jaxrl_llm.rollout.episodes.episode import Episode
from jaxrl_llm.rollout.recording import Place
from jaxrl_llm.tasks.tokenizer import build_bpe_tokenizer

TEMPLATE = """
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
WORDS = ('the', 'agent', 'reads', 'what', 'a', 'tool', 'returns', 'and', 'asks', 'again')
SYSTEM, OBSERVATION, TURN = 400, 100, 100
"""Numbers of words of the first message and of each observation, and number of tokens of a turn."""


class Waiting:
  """A hub whose engine waits and then returns `TURN` tokens.

  Attributes:
    waits: seconds of each call, in order.
  """

  def __init__(self, tokenizer, delay, draw):
    self.waits, self._delay, self._draw = [], delay, draw
    self._tokens = np.array(tokenizer.encode(text(draw, 2 * TURN))[: TURN - 1], np.int32)
    self._tokens = np.append(self._tokens, np.int32(tokenizer.eos_id))

  async def generate(self, request):
    self.waits.append(self._delay * self._draw.uniform(0.5, 1.5))
    await asyncio.sleep(self.waits[-1])
    end = len(self._tokens)
    segment = Segment(start=0, end=end, version=Version(0, 0), engine='waiting', finish='stop')
    yield (
      request.first,
      Completion(
        tokens=self._tokens,
        logprobs=np.zeros(end, np.float32),
        finish=Finish.STOP,
        segments=(segment,),
      ),
    )


def text(draw, words):
  return ' '.join(draw.choices(WORDS, k=words))


async def play(http, url, key, turns, seed, delay):
  """Plays one agent, and returns the duration of each call in seconds."""
  draw, seconds = random.Random(seed), []
  messages = [{'role': 'user', 'content': text(draw, SYSTEM)}]
  await asyncio.sleep(draw.uniform(0, delay))
  for _ in range(turns):
    start = time.perf_counter()
    async with http.post(
      f'{url}/chat/completions',
      json={'messages': messages},
      headers={'Authorization': f'Bearer {key}'},
    ) as response:
      body = await response.json()
    seconds.append(time.perf_counter() - start)
    assert response.status == 200, body
    observation = {'role': 'user', 'content': text(draw, OBSERVATION)}
    messages += [body['choices'][0]['message'], observation]
  return seconds


async def agents():
  """Runs the process of the agents: reads orders from stdin, and prints the durations of all calls
  in seconds.
  """
  order = json.loads(sys.stdin.read())
  connector = aiohttp.TCPConnector(limit=0)
  async with aiohttp.ClientSession(connector=connector) as http:
    plays = [
      play(http, order['url'], key, order['turns'], seed, order['delay'])
      for seed, key in enumerate(order['keys'])
    ]
    print(json.dumps(await asyncio.gather(*plays)))


async def measure(tokenizer, *, sessions, turns, delay):
  """Returns the milliseconds that the proxy adds to each call, the CPU milliseconds of this process
  per call, and the number of tokens of the longest sample.
  """
  hubs = [Waiting(tokenizer, delay, random.Random(i)) for i in range(sessions)]
  task = Task(taskset='bench', domain='agents', prompt=(), truth=None, fields={})
  async with Proxy() as proxy, contextlib.AsyncExitStack() as opened:
    keys, episodes = [], []
    for i, hub in enumerate(hubs):
      place = Place(task=task, visit=0, group='bench/0/0', index=i)
      sampling = Sampling()
      episodes.append(Episode(hub, tokenizer, place, sampling=sampling, max_tokens=100_000))
      session = Session(episodes[-1], SessionOptions(sampling=sampling, parser=None))
      keys.append(await opened.enter_async_context(proxy.open(session)))
    order = {'url': proxy.base_url, 'turns': turns, 'keys': keys, 'delay': delay}
    process = await asyncio.create_subprocess_exec(
      sys.executable, __file__, '--agents', stdin=-1, stdout=-1
    )
    began = time.process_time()
    output, _ = await process.communicate(json.dumps(order).encode())
    processor_ms = 1e3 * (time.process_time() - began) / (sessions * turns)
  seconds = json.loads(output)
  added = [
    1e3 * (took - waited)
    for hub, calls in zip(hubs, seconds)
    for took, waited in zip(calls, hub.waits, strict=True)
  ]
  longest = max(len(episode.end().sample.tokens) for episode in episodes)
  return added, processor_ms, longest


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--sessions', type=int, default=64)
  parser.add_argument('--turns', type=int, default=8)
  parser.add_argument('--delay', type=float, default=1.0)
  parser.add_argument('--agents', action='store_true', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.agents:
    asyncio.run(agents())
    return
  with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    (folder / 'template.jinja').write_text(TEMPLATE)
    built = build_bpe_tokenizer(WORDS, folder / 'tokenizer', vocab_size=300, template='chatml')
    tokenizer = built.with_template(folder / 'template.jinja')
    tokenizer.render_prompt([{'role': 'user', 'content': 'a'}])  # Starts the process.
    how = {'sessions': args.sessions, 'turns': args.turns, 'delay': args.delay}
    added, processor_ms, longest = asyncio.run(measure(tokenizer, **how))
  quantiles = statistics.quantiles(added, n=100)
  print(
    f'{args.sessions} sessions of {args.turns} turns, engine {args.delay:g} s, up to {longest} '
    f'tokens: added ms per call: median {statistics.median(added):.1f}, mean '
    f'{statistics.fmean(added):.1f}, p90 {quantiles[89]:.1f}, p99 {quantiles[98]:.1f}; '
    f"processor ms per call in the proxy's process: {processor_ms:.1f}"
  )


if __name__ == '__main__':
  main()
