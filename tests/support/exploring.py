"""Rollouts without a model: a deterministic engine and deterministic scorers, and an explorer that
uses them with a real store.

The answer to a request depends only on the request's key, its sample indices and its temperature.
The time of the answer depends on `delays`.
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
  """Implements `rollout.api.Engine`. An answer has 1 to 3 letters and usually a stop token. Samples
  end one after another, in a random order.

  Attributes:
    delays: seed of the number of event-loop turns that each sample takes.
    fail_at: number of the request that raises `error`, counted from 0.
    hold: called with a request. While it returns True, the request does not end.
    prompt: whether samples take no turns, whatever `delays` is.
    generated: number of tokens returned so far.
    published: ('load' or 'relabel', version) of each publication, oldest first.
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
    await asyncio.sleep(0.01)  # Lets other tasks run.
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
  """An engine whose answers have `length(request, index)` tokens, including the stop token, and
  which continues started completions. A token and its logprob depend only on the request's key, the
  sample's index and the token's position.
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
  """Has the pool's API without its processes. `judge` returns the value of an attempt."""

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


def make_tokenizer(directory, letters: str = LETTERS) -> Tokenizer:
  return build_character_tokenizer([letters], directory, template='plain')


SEQUENTIAL = SamplerConfig(order='sequential')


class Exploration:
  """An explorer and its parts. Tasks are sequential, groups have two samples, and batches have two
  groups.
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
    share: tuple[int, int] = (0, 1),
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
    self.sampler = TaskSampler([taskset], sampler, seed=0, share=share)
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
    """Returns the first `count` batches. Each is trained on before the next is collected."""
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
    """Returns the index of an attempt's task."""
    return self.tasks.index(attempt.task)


class Batches:
  """Consecutive batches of two groups of two samples, and the state that a commit would hold after
  each.

  Attributes:
    scored: number of times that each attempt was scored, keyed by uid.
    states: the explorer's state as JSON, keyed by number of batches.
    training: number of event-loop turns that an update takes.
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
    """Returns members and counts of the batches `first` to `end - 1`."""
    found = []
    async with self.explorer.running():
      for step in range(first, end):
        self.engine._version = Version(self.attempt, step)
        self.explorer.advance(step, step)
        batch, counts = await self.explorer.collect()
        uids = [member.sample.uid for member in batch]
        self.store.at(step).seal(uids)
        for _ in range(self.training):  # Meanwhile, the next batches are generated.
          await asyncio.sleep(0)
        self.explorer.record(uids)
        self.explorer.complete()
        self.states[step + 1] = json.dumps(self.explorer.state())
        found.append((batch, counts))
    return found


def new_store(directory) -> ReplayStore:
  store = open_store(directory, synchronous='normal')
  store.recover(0)
  return store
