"""Fleets over fake servers. Each token's logprob tells the server that drew it, the number of the
draw, and the step of the loaded weights.
"""

import asyncio
import contextlib
import functools
import itertools
import json

import aiohttp
import numpy as np
import serving
from aiohttp import web
from fake_vllm import Drawn, FakeServer, Scripted
from serving import ask, request

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.api import Probe, Weights
from jaxrl_llm.rollout.vllm import admission, membership, repairs
from jaxrl_llm.rollout.vllm.client import VllmClient, sampler_seed
from jaxrl_llm.rollout.vllm.replica import ReplicaState
from jaxrl_llm.weights.tables import entries

MODEL = serving.model_of('qwen2', tied=True)
A, B, C = (Version(0, step) for step in (1, 2, 3))
NORM = 'model.norm.weight'
"""Name of a tensor. All of its values are the step of the weights."""
GARBAGE = 99
"""Step of the first weights of a server, before any publication."""
GENERATE, UPDATE = '/inference/v1/generate', '/update_weights'
VOCAB = serving.VOCAB
SCALE = 2.0**-14
"""Scale of logprobs. Numbers up to 2**24 are exact in float32, and no logprob is as low as vLLM's
logprobs of impossible tokens.
"""
PATIENCE_S = 60
"""Seconds after which a test that hangs fails. No test waits for them to pass."""
SOON = {'latency_s': 1.0, 'min_tokens_per_s': 1000.0}
"""Options with short deadlines, for servers that hang."""
PERSISTENT = {'max_restarts': 10**6}
"""Options for servers that are restarted again and again, until the test repairs them."""


def run(main, runner=asyncio.run):
  async def bounded():
    async with asyncio.timeout(PATIENCE_S):
      await main()

  runner(bounded())


def hasten(monkeypatch):
  """Lets fleets look at their servers and the registry every 20 ms."""
  for module, name in (
    (admission, '_ATTACHED_LOOK_S'),
    (membership, '_AWAY_LOOK_S'),
    (membership, '_DRAIN_LOOK_S'),
    (membership, '_LOOK_S'),
    (repairs, '_WATCH_S'),
  ):
    monkeypatch.setattr(module, name, 0.02)


async def until(reached):
  while not reached():
    await asyncio.sleep(0.002)


@functools.cache
def tensors(step, spec=MODEL.spec):
  random = np.random.default_rng(step)
  made = {entry.hf: random.standard_normal(entry.shape, np.float32) for entry in entries(spec)}
  return made | {NORM: np.full_like(made[NORM], step)}


def score(tokens, loaded):
  """Returns the logprobs of a sequence. They depend only on the embedding and the final norm, so
  they do not reveal the other tensors.
  """
  return [
    -float(loaded[NORM].mean()) - float(np.abs(loaded['model.embed_tokens.weight'][token]).sum())
    for token in tokens[1:]
  ]


def weights(version, *, probed=None):
  """Returns the weights of the version's step.

  Args:
    probed: step of the weights that the trainer's logprobs are computed with. If None, it is the
      version's step.
  """
  sequences = np.random.default_rng(0).integers(0, VOCAB, (2, 6), np.int32)
  loaded = tensors(probed or version.step)
  logprobs = np.array([[0.0, *score(row, loaded)] for row in sequences], np.float32)
  leaves = [(entry.unrolled, tensors(version.step)[entry.hf]) for entry in entries(MODEL.spec)]
  return Weights(
    version=version, leaves=leaves, probe=Probe(sequences=sequences, logprobs=logprobs)
  )


def script(seed, count):
  return [2 + (seed + i) % (VOCAB - 2) for i in range(count)]


class Marked(Scripted):
  """Draws the tokens of `script`. Each logprob tells the server, the number of the draw, and the
  step of the loaded weights.
  """

  def __init__(self, number, spec=MODEL.spec):
    super().__init__(lambda *_: ([], []), tensors(GARBAGE, spec), score=score)
    self.number, self.draws = number, itertools.count(1)
    self.working = self.most = 0
    self.used = set()
    """Steps of the weights that requests' tokens were drawn with."""
    self.may_score = asyncio.Event()
    self.may_score.set()
    self.scoring = 0

  async def score(self, tokens):
    self.scoring += 1
    await self.may_score.wait()
    self.scoring -= 1
    return await super().score(tokens)

  async def draw(self, prompt, params, index):
    draw = next(self.draws)
    asked = len(prompt) > 2  # A shorter prompt comes from the fleet's own checks.
    self.working += asked
    self.most = max(self.most, self.working)
    try:
      for token in script(params.seed, params.max_tokens):
        step = int(self.tensors[NORM][0])
        self.used |= {step} if asked else set()
        yield Drawn([token], [-SCALE * ((draw * 4 + self.number) * 128 + step)], [self.generation])
    finally:
      self.working -= asked


class Place:
  """The address of a fake server. After the server's death, a new one can listen there."""

  def __init__(self, folder, number):
    self.number, self.uds = number, str(folder / f'{number}.sock')
    self.address = f'unix:{self.uds}'

  async def start(self, spec=MODEL.spec, **fields):
    self.policy = Marked(self.number, spec)
    fields = {'max_model_len': serving.LENGTH, 'vocab_size': VOCAB, **fields}
    self.server = FakeServer(self.policy, **fields)
    self.faults = self.server.faults
    await self.server.start(uds=self.uds)

  async def restart(self, **fields):
    """Replaces the server by a new one, whose weights are unpublished."""
    await self.server.close()
    await self.start(**fields)

  @property
  def asked(self):
    """Names of the received requests, oldest first."""
    return [body['request_id'] for body in self.server.generate_bodies if 'request_id' in body]

  async def digests(self):
    async with calling(self) as client:
      (found,) = await client.digests(deadline_s=30)
      return found


@contextlib.asynccontextmanager
async def calling(place):
  client = VllmClient(place.address)
  try:
    yield client
  finally:
    await client.close()


@contextlib.asynccontextmanager
async def places(folder, count, **fields):
  made = [Place(folder, i) for i in range(count)]
  for place in made:
    await place.start(**fields)
  try:
    yield made
  finally:
    for place in made:
      await place.server.close()


@contextlib.asynccontextmanager
async def fleet_over(made, folder, *, first=A, **config):
  """Yields a fleet of attached servers that serves its first version."""
  async with serving.attached(MODEL, [place.address for place in made], folder, **config) as fleet:
    if first is not None:
      await fleet.load(weights(first))
    yield fleet


class Between:
  """A proxy before a server. It passes everything on, except for the changes that a test makes."""

  def __init__(self, place):
    self.place, self.uds = place, f'{place.uds}-between'
    self.address = f'unix:{self.uds}'
    self.alter_body = self.alter_answer = lambda path, body: None
    """Functions of (path, JSON) that may change the JSON in place."""
    self.status = lambda path: None
    """Function of the path. If it returns a status, that is the answer, and nothing is passed on.
    """
    self.let_through = asyncio.Event()
    """Whether requests for samples are passed on."""
    self.let_through.set()
    self.held = 0

  async def __aenter__(self):
    self._session = aiohttp.ClientSession(
      connector=aiohttp.UnixConnector(self.place.uds, force_close=True, limit=0)
    )
    application = web.Application()
    application.router.add_route('*', '/{path:.*}', self._pass_on)
    self._runner = web.AppRunner(
      application, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
    )
    await self._runner.setup()
    await web.UnixSite(self._runner, self.uds).start()
    return self

  async def __aexit__(self, *_):
    await self._runner.cleanup()
    await self._session.close()

  async def _pass_on(self, incoming):
    body, path = await incoming.json() if incoming.can_read_body else None, incoming.path
    sampling = path == GENERATE and 'request_id' in body
    if sampling:
      self.held += 1
      await self.let_through.wait()
    if (path != GENERATE or sampling) and (status := self.status(path)) is not None:
      return web.json_response({'error': {'message': 'not for you'}}, status=status)
    self.alter_body(path, body)
    async with self._session.request(
      incoming.method, f'http://server{incoming.path_qs}', json=body
    ) as response:
      text, status = await response.text(), response.status
    answer = json.loads(text) if text else None
    if status == 200 and (path != GENERATE or sampling):
      self.alter_answer(path, answer)
    return web.Response(text='' if answer is None else json.dumps(answer), status=status)


def check(asked, completions):
  """Checks that completions are whole and are the requested samples, and that every token was drawn
  with the weights that its segment names.
  """
  for index, completion in enumerate(completions):
    assert completion.tokens.tolist() == script(sampler_seed(3, asked, index), asked.max_tokens)
    drawn_by, steps = np.divmod((-completion.logprobs / SCALE).astype(np.int64), 128)
    assert len(set(drawn_by)) == 1, 'of one draw'
    assert {segment.engine for segment in completion.segments} == {f'vllm-{drawn_by[0] % 4}'}
    named = [
      segment.version.step
      for segment in completion.segments
      for _ in range(segment.start, segment.end)
    ]
    assert named == steps.tolist()


def draws(completions):
  return [draw_of(completion.logprobs[0]) for completion in completions]


def draw_of(logprob):
  """Returns the number of a draw and of its server. It is unique among all draws of all servers."""
  return int(-logprob / SCALE) // 128


def engines(completions):
  return [completion.segments[0].engine for completion in completions]


async def wave(fleet, *, groups=6, samples=3, begin=0, **fields):
  """Requests several groups at once, checks their completions and returns them."""
  asked = [request(begin + i, samples=samples, max_tokens=8, **fields) for i in range(groups)]
  found = await asyncio.gather(*(ask(fleet, one) for one in asked))
  for one, completions in zip(asked, found, strict=True):
    check(one, completions)
  together = draws(itertools.chain(*found))
  assert len(set(together)) == len(together) == groups * samples, 'each once'
  return found


def versions(found):
  return {segment.version for completions in found for c in completions for segment in c.segments}


async def back(fleet, place, version):
  """Waits until a server serves a version, and checks that it holds the published tensors of that
  version.
  """
  replica = fleet.replicas[place.number]
  await until(lambda: replica.state == ReplicaState.SERVING and replica.version == version)
  assert place.server.label.startswith(f'{version}-') and not place.server.paused
  assert await place.digests() == fleet._updates.current.publication.digests
  assert int(place.policy.tensors[NORM][0]) == version.step


async def outcome(awaitable):
  try:
    return await awaitable
  except UserError as error:
    return error


def is_the_end(error, words):
  return isinstance(error, RunError) and words in str(error) and '\n' not in str(error)
