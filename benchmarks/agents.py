"""Latency that the recording proxy adds to a call of the policy.

  python benchmarks/agents.py [--sessions=64] [--turns=8] [--delay=1.0] [--rounds=2]

An engine that only waits answers after half to one and a half times `--delay`; a process with the
agents of all sessions calls it. A call's latency is its round trip minus the engine's wait. It
includes the agent's HTTP client and the lateness of the event loop. The same agents call two
servers in turn, `--rounds` times each: the proxy, and a bare server that reads the same requests,
waits as long, and answers with constant bytes. The difference is what the proxy adds to an answer
over HTTP: parsing, the rendering of the whole conversation in the process of the chat template,
encoding, decoding and recording.
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
from aiohttp import web

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
    answer: text of the tokens.
  """

  def __init__(self, tokenizer, delay, draw):
    self.waits, self._delay, self._draw = [], delay, draw
    self._tokens = np.array(tokenizer.encode(text(draw, 2 * TURN))[: TURN - 1], np.int32)
    self.answer = tokenizer.decode(self._tokens.tolist())
    self._tokens = np.append(self._tokens, np.int32(tokenizer.eos_id))

  async def wait(self):
    self.waits.append(self._delay * self._draw.uniform(0.5, 1.5))
    await asyncio.sleep(self.waits[-1])

  async def generate(self, request):
    await self.wait()
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


@contextlib.asynccontextmanager
async def proxied(hubs, tokenizer):
  """Yields the base URL of a proxy and the key of each session. The policy of each session is one
  of the hubs.
  """
  task = Task(taskset='bench', domain='agents', prompt=(), truth=None, fields={})
  async with Proxy() as proxy, contextlib.AsyncExitStack() as opened:
    keys, episodes = [], []
    for i, hub in enumerate(hubs):
      place = Place(task=task, visit=0, group='bench/0/0', index=i)
      sampling = Sampling()
      episodes.append(Episode(hub, tokenizer, place, sampling=sampling, max_tokens=100_000))
      session = Session(episodes[-1], SessionOptions(sampling=sampling, parser=None))
      keys.append(await opened.enter_async_context(proxy.open(session)))
    yield proxy.base_url, keys
  longest = max(len(episode.end().sample.tokens) for episode in episodes)
  print(f'proxy: samples of up to {longest} tokens')


@contextlib.asynccontextmanager
async def bare(hubs, tokenizer):
  """Yields the base URL of a server that only reads a request, waits and answers, and the key of
  each hub.
  """
  messages = [{'role': 'assistant', 'content': hub.answer} for hub in hubs]
  bodies = [json.dumps({'choices': [{'message': message}]}).encode() for message in messages]

  async def answer(request):
    await request.read()
    number = int(request.headers['Authorization'].removeprefix('Bearer '))
    await hubs[number].wait()
    return web.Response(body=bodies[number], content_type='application/json')

  runner = web.ServerRunner(web.Server(answer, access_log=None))
  await runner.setup()
  try:
    await web.TCPSite(runner, '127.0.0.1', 0).start()
    yield f'http://127.0.0.1:{runner.addresses[0][1]}', [str(i) for i in range(len(hubs))]
  finally:
    await runner.cleanup()


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


async def measure(server, tokenizer, *, sessions, turns, delay):
  """Returns the milliseconds of each call beyond the engine's wait, and the CPU milliseconds per
  call of this process.

  Args:
    server: `proxied` or `bare`.
  """
  hubs = [Waiting(tokenizer, delay, random.Random(i)) for i in range(sessions)]
  async with server(hubs, tokenizer) as (url, keys):
    order = {'url': url, 'turns': turns, 'keys': keys, 'delay': delay}
    process = await asyncio.create_subprocess_exec(
      sys.executable, __file__, '--agents', stdin=-1, stdout=-1
    )
    began = time.process_time()
    output, _ = await process.communicate(json.dumps(order).encode())
    processor_ms = 1e3 * (time.process_time() - began) / (sessions * turns)
  beyond = [
    1e3 * (took - waited)
    for hub, calls in zip(hubs, json.loads(output), strict=True)
    for took, waited in zip(calls, hub.waits, strict=True)
  ]
  return beyond, processor_ms


def summary(beyond, processor_ms):
  """Returns statistics of the latencies of all rounds, and the median of the rounds' CPU times. The
  arguments are results of `measure`.
  """
  quantiles = statistics.quantiles(beyond, n=100)
  return {
    'median': statistics.median(beyond),
    'mean': statistics.fmean(beyond),
    'p90': quantiles[89],
    'p99': quantiles[98],
    'cpu': statistics.median(processor_ms),
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--sessions', type=int, default=64)
  parser.add_argument('--turns', type=int, default=8)
  parser.add_argument('--delay', type=float, default=1.0)
  parser.add_argument('--rounds', type=int, default=2)
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
    results = {'bare server': (bare, [], []), 'proxy': (proxied, [], [])}
    for server, beyond, processor_ms in [*results.values()] * args.rounds:
      calls, cpu = asyncio.run(measure(server, tokenizer, **how))
      beyond += calls
      processor_ms.append(cpu)
  print(
    f'{args.sessions} sessions of {args.turns} turns, engine {args.delay:g} s, {args.rounds} '
    "rounds; ms per call beyond the engine's wait, with the agent's HTTP client, and CPU ms per "
    "call in the server's process:"
  )
  rows = {name: summary(beyond, cpu) for name, (_, beyond, cpu) in results.items()}
  server = rows['bare server']
  rows['difference'] = {key: rows['proxy'][key] - server[key] for key in ('median', 'mean', 'cpu')}
  for name, row in rows.items():
    print(f'  {name:11}', ', '.join(f'{key} {value:.2f}' for key, value in row.items()))


if __name__ == '__main__':
  main()
