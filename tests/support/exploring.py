"""Rollouts without a model: a deterministic engine and scorers, and an explorer around them with a
real store.

What a request is answered with depends on its key and sample index alone; when it is answered
depends on `delays`.
"""

from __future__ import annotations

import asyncio
import collections
import json
import random
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_llm.core.records.sample import Finish, Segment
from jaxrl_llm.core.records.score import Score
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Version
from jaxrl_llm.master.exploring.config import ExplorerConfig
from jaxrl_llm.master.exploring.explorer import Explorer
from jaxrl_llm.master.exploring.hub import MasterHub
from jaxrl_llm.master.exploring.runner import GroupRunner
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.replay.index import ReplayStore, open_store
from jaxrl_llm.rewards.api import Attempt, RewardsConfig, ScorerConfig
from jaxrl_llm.rewards.pool.pool import ScorerPool
from jaxrl_llm.rollout.api import Completion, Request, Weights
from jaxrl_llm.rollout.workflow import SingleTurn, Workflow
from jaxrl_llm.runtime.events import SILENT, Events
from jaxrl_llm.tasks.sampler import SamplerConfig, TaskSampler
from jaxrl_llm.tasks.taskset import Taskset
from jaxrl_llm.tasks.tokenizer import Tokenizer, build_character_tokenizer

REWARDS = RewardsConfig(scorers=(ScorerConfig(name='judge'),))
LETTERS = 'abcdefgh'


class FakeEngine:
  """Implements `rollout.api.Engine`: `length` letters and a stop token, sample by sample, in an
  order that varies.

  Attributes:
    delays: its numbers say how many turns of the event loop each sample takes.
    fail_at: the request (counted from 0) that raises `error`.
    hold: requests of which it says so do not end.
    prompt: whether it answers at once, whatever `delays`.
    generated: number of tokens that it has returned.
    published: 'load' or 'relabel' with its version, oldest first.
  """

  name = 'fake'

  def __init__(self, tokenizer: Tokenizer, *, delays: int = 0):
    self._tokenizer, self._random = tokenizer, random.Random(delays)
    self._version: Version | None = Version(0, 0)
    self.requests: list[Request] = []
    self.fail_at: int | None = None
    self.error: Exception = RuntimeError('unset')
    self.hold: Callable[[Request], bool] = lambda request: False
    self.cancelled, self.prompt, self.generated = 0, False, 0
    self.published: list[tuple[str, Version]] = []

  @property
  def version(self) -> Version | None:
    return self._version

  async def generate(self, request: Request):
    assert self._version is not None, 'nothing is served yet'
    number = len(self.requests)
    self.requests.append(request)
    if number == self.fail_at:
      raise self.error
    order = list(range(request.first, request.first + request.samples))
    self._random.shuffle(order)
    try:
      for index in order:
        for _ in range(0 if self.prompt else self._random.randrange(8)):
          await asyncio.sleep(0)
        while self.hold(request):
          await asyncio.sleep(0.01)
        completion = self.complete(request, index)
        self.generated += completion.tokens.size
        yield index, completion
    except asyncio.CancelledError:
      self.cancelled += 1
      raise

  def complete(self, request: Request, index: int) -> Completion:
    draw = random.Random(f'{request.key} {index} {request.sampling.temperature}')
    text = ''.join(draw.choice(LETTERS) for _ in range(draw.randrange(1, 4)))
    stopped = draw.random() < 0.7 and bool(request.stop_ids)
    tokens = np.array(
      [*self._tokenizer.encode(text), *([request.stop_ids[0]] if stopped else [])], np.int32
    )
    segment = Segment(
      start=0, end=len(tokens), version=self._version, engine=self.name, finish='stop'
    )
    return Completion(
      tokens=tokens,
      logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32),
      finish=Finish.STOP if stopped else Finish.LENGTH,
      segments=(segment,),
    )

  async def load(self, weights: Weights) -> None:
    await asyncio.sleep(0.01)  # Others run meanwhile.
    self._publish('load', weights.version)

  async def relabel(self, version: Version) -> None:
    self._publish('relabel', version)

  def _publish(self, how: str, version: Version) -> None:
    self._version = version
    self.published.append((how, version))

  def take_metrics(self):
    return {}

  async def start(self) -> None:
    pass

  async def close(self) -> None:
    pass


class ContinuingEngine(FakeEngine):
  """An engine whose answers have `length(request, index)` tokens, the stop token among them, and
  which continues what it has begun. A token depends on its request's key, its sample's index and
  its position alone, and so does its logprob.
  """

  def __init__(
    self, tokenizer: Tokenizer, length: Callable[[Request, int], int], *, delays: int = 0
  ):
    super().__init__(tokenizer, delays=delays)
    self._length = length

  def complete(self, request: Request, index: int) -> Completion:
    draw, begun = random.Random(f'{request.key} {index}'), request.begun
    letters = [draw.choice(LETTERS) for _ in range(self._length(request, index) - 1)]
    tokens = [*(self._tokenizer.encode(a)[0] for a in letters), request.stop_ids[0]]
    assert not begun or tokens[:begun] == list(request.prompt[-begun:]), 'it is continued'
    tokens = tokens[begun:][: request.max_tokens]
    segment = Segment(
      start=0, end=len(tokens), version=self._version, engine=self.name, finish='any'
    )
    return Completion(
      tokens=np.array(tokens, np.int32),
      logprobs=-np.arange(begun + 1, begun + len(tokens) + 1, dtype=np.float32),
      finish=Finish.STOP if tokens[-1] == request.stop_ids[0] else Finish.LENGTH,
      segments=(segment,),
    )


class FakeScorers(ScorerPool):
  """The pool's API without its processes: `judge` says what an attempt is worth."""

  def __init__(self, judge: Callable[[Attempt], float | None], *, delays: int = 0):
    super().__init__({'judge': lambda attempt: None}, REWARDS)
    self._judge, self._random = judge, random.Random(delays)

  async def score(self, attempt: Attempt) -> tuple[Score, ...]:
    for _ in range(self._random.randrange(8)):
      await asyncio.sleep(0)
    value = self._judge(attempt)
    evidence = {} if value is not None else {'error': 'no truth'}
    return (
      Score(uid=attempt.uid, scorer='judge', value=value, parts={'half': 0.5}, evidence=evidence),
    )


def make_tasks(count: int, taskset: str = 'train') -> list[Task]:
  def prompt(i):
    return ({'role': 'user', 'content': f'{LETTERS[i // 8]}{LETTERS[i % 8]}'},)

  return [
    Task(taskset=taskset, domain='general', prompt=prompt(i), truth='a', fields={})
    for i in range(count)
  ]


def make_tokenizer(directory) -> Tokenizer:
  return build_character_tokenizer([LETTERS], directory, template='plain')


SEQUENTIAL = SamplerConfig(order='sequential')


class Exploration:
  """An explorer, and what it is made of; groups of two from sequential tasks, two groups in a
  batch.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    store: ReplayStore,
    judge: Callable[[Attempt], float | None],
    *,
    delays: int = 0,
    tasks: Sequence[Task] = (),
    sampler: SamplerConfig = SEQUENTIAL,
    events: Events = SILENT,
    engine: FakeEngine | None = None,
    scorers: ScorerPool | None = None,
    max_tokens: int = 4,
    make: Callable[..., Workflow] = SingleTurn,
    **config,
  ):
    self.config = ExplorerConfig(
      **{
        'stage': 'grpo',
        'groups_per_batch': 2,
        'group_size': 2,
        'collect_deadline_s': 20.0,
        **config,
      }
    )
    self.engine = engine or FakeEngine(tokenizer, delays=delays)
    self.scorers = scorers or FakeScorers(judge, delays=delays + 1)
    self.tasks = list(tasks) or make_tasks(24)
    taskset = Taskset(name='train', tasks=tuple(self.tasks), counts={})
    self.sampler = TaskSampler([taskset], sampler, seed=0)
    self.store = store
    self.hub = MasterHub(self.engine, self.scorers, REWARDS, auxiliary={}, events=events)
    self.runner = GroupRunner(
      self.config,
      workflow=make(self.hub, tokenizer, max_tokens=max_tokens),
      scorers=self.scorers,
      events=events,
      take_tokens=self.hub.take_tokens,
      partials=self.hub.partials,
    )
    self.explorer = Explorer(
      self.config, self.runner, sampler=self.sampler, store=store, events=events
    )

  async def batches(self, count: int) -> list[tuple[list[Experience], dict[str, int]]]:
    """The first `count` batches; each is trained, and its version served, before the next."""
    found = []
    async with self.explorer.running():
      for step in range(count):
        self.explorer.advance(step, step)
        batch, counts = await self.explorer.collect()
        uids = [*dict.fromkeys(step.uid for chosen in batch for step in chosen.steps)]
        self.store.at(step).seal(uids)
        self.store.at(step).trained(uids)
        found.append((batch, counts))
    return found

  def number(self, attempt: Attempt) -> int:
    """Which of the tasks an attempt is at."""
    return self.tasks.index(attempt.task)


class Batches:
  """Batches of two groups of two, one after the other, with what a commit would hold after each.

  Attributes:
    scored: how often each attempt was scored.
    states: the explorer's state as JSON after each number of batches.
    training: turns of the event loop that an update takes.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    store: ReplayStore,
    engine: FakeEngine,
    *,
    attempt: int = 0,
    **config,
  ):
    self.scored: collections.Counter[str] = collections.Counter()
    self.engine, self.store, self.attempt, self.training = engine, store, attempt, 0
    self.states: dict[int, str] = {}
    self.exploration = Exploration(tokenizer, store, self.judge, engine=engine, **config)
    self.explorer = self.exploration.explorer

  def judge(self, attempt: Attempt) -> float | None:
    self.scored[attempt.uid] += 1
    return float(attempt.response_len)

  async def collect(self, first: int, end: int) -> list[tuple[list[Experience], dict[str, int]]]:
    """Members and counts of each batch from `first` to before `end`."""
    found = []
    async with self.explorer.running():
      for step in range(first, end):
        self.engine._version = Version(self.attempt, step)
        self.explorer.advance(step, step)
        batch, counts = await self.explorer.collect()
        uids = [member.sample.uid for member in batch]
        self.store.at(step).seal(uids)
        for _ in range(self.training):  # The next batches are generated meanwhile.
          await asyncio.sleep(0)
        self.explorer.complete(uids)
        self.states[step + 1] = json.dumps(self.explorer.state())
        found.append((batch, counts))
    return found


def new_store(directory) -> ReplayStore:
  store = open_store(directory, synchronous='normal')
  store.recover(0)
  return store
