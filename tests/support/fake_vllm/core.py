"""The engine core of a fake server: completions in progress, the effect of a pause on them, and the
labels of tokens.

Invariant: during a pause, a completion that the pause holds neither draws a token nor ends. A
token's label is that of the version that drew it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import numpy as np

from fake_vllm.backends import Backend, Drawn
from fake_vllm.faults import Faults, Latency
from fake_vllm.requests import Params

_POLL_S = 0.005
"""Seconds between two checks whether a stall is over."""


class CoreDead(Exception):
  """Raised when the engine core is dead."""


@dataclasses.dataclass(eq=False)
class Sample:
  """One completion, and its tokens so far."""

  index: int
  tokens: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  labels: list[str] = dataclasses.field(default_factory=list)
  """For each token, the label of the version that drew it."""
  finish: str | None = None
  has_last: bool = False
  """Whether `tokens` contains the last token. A stream sends the last token together with `finish`.
  """


@dataclasses.dataclass(eq=False)
class Call:
  """A request for completions that has not been answered yet."""

  name: str
  prompt: list[int]
  params: Params
  samples: list[Sample] = dataclasses.field(init=False)
  scores: tuple[Sequence[float], Sequence[int]] | None = None
  """Logprobs and ranks of all tokens of the prompt except the first."""
  tasks: list[asyncio.Task] = dataclasses.field(default_factory=list)
  grown: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
  """Set when a sample has new tokens or has ended."""

  def __post_init__(self):
    self.samples = [Sample(index) for index in range(self.params.n)]

  def abort(self) -> int:
    """Ends the unfinished samples. Returns their number as vLLM counts it: plus one if there are
    several, because vLLM also counts their parent.
    """
    unfinished = [sample for sample in self.samples if sample.finish is None]
    for task in self.tasks:
      task.cancel()
    for sample in unfinished:
      sample.finish = 'abort'
    self.grown.set()
    return len(unfinished) + (len(unfinished) > 1)


class Core:
  """Runs calls. `backend`, `calls`, the flags and the counts are public for reading."""

  def __init__(self, backend: Backend, faults: Faults, latency: Latency):
    self.backend, self.faults = backend, faults
    self.calls: set[Call] = set()
    self.paused = self.dead = self.sleeping = False
    self.label = 'default'
    self.prompt_tokens = self.tokens = 0
    self.finished: collections.Counter[str] = collections.Counter()
    self._latency = latency
    self._labels: dict[int, str] = {}
    self._let_through: set[Call] = set()
    self._drawing = 0
    self._changed = asyncio.Event()

  @property
  def running(self) -> int:
    """Number of completions that have not ended."""
    return sum(sample.finish is None for call in self.calls for sample in call.samples)

  async def run(self, call: Call) -> None:
    """Runs a call until all of its samples have ended, some perhaps aborted. If the client has
    gone, the samples are ended.
    """
    self.prompt_tokens += len(call.prompt)
    self.calls.add(call)
    try:
      if call.params.prompt_logprobs is not None:
        call.tasks.append(asyncio.create_task(self._score(call)))
      call.tasks += [asyncio.create_task(self._complete(call, sample)) for sample in call.samples]
      # Wait 'client': bounded by the client, whose hang-up cancels it.
      await asyncio.wait(call.tasks)
    finally:
      call.abort()
      # Wait 'cancelled': short, since the tasks have just been cancelled.
      await asyncio.wait(call.tasks)
      self.calls.discard(call)
      self.finished.update(sample.finish for sample in call.samples)
      self._notify()
    if self.dead:
      raise CoreDead
    for task in call.tasks:
      if not task.cancelled() and task.exception() is not None:
        raise task.exception()

  async def pause(self, mode: str) -> None:
    """Holds all calls until `resume`. The mode 'abort' ends all calls first; the mode 'wait' lets
    the calls in progress finish first.
    """
    self.paused = True
    self._let_through = set(self.calls) if mode == 'wait' else set()
    if mode == 'abort':
      self.abort()
    self._notify()
    await self._until(lambda: self._drawing == 0 and not self._let_through & self.calls)

  def resume(self) -> None:
    self.paused, self._let_through = False, set()
    self._notify()

  def abort(self, names: Sequence[str] = ()) -> int:
    """Ends the calls with these names, or all calls if there are no names. Returns the number that
    vLLM would report.
    """
    ended = sum([call.abort() for call in self.calls if not names or call.name in names])
    return len(names) or ended

  def kill(self) -> None:
    self.dead = True
    self.abort()

  async def sleep(self, *, drops: bool) -> None:
    """Ends all calls. Later calls wait for `wake_up`. If `drops` (sleep level 2), the weights are
    lost.
    """
    await self.pause('abort')
    self.sleeping = True
    if drops:
      await self.load({name: np.zeros_like(held) for name, held in self.backend.tensors.items()})

  def wake_up(self) -> None:
    """Resumes. If `sleep` dropped the weights, they are 0 until the next update."""
    self.sleeping = False
    self.resume()

  async def load(self, tensors: Mapping[str, np.ndarray]) -> None:
    before = self.backend.generation
    # Tokens that were drawn before the load, but are taken after it, keep the old label.
    self._labels = {before: self.label, before + 1: self.label}
    await self.backend.load(tensors)

  def name_version(self, label: str) -> None:
    self.label = self._labels[self.backend.generation] = label

  async def _score(self, call: Call) -> None:
    async with self._turn(call):
      logprobs, ranks = await self.backend.score(call.prompt)
    shift = self.faults.prompt_logprob_shift
    call.scores = [float(logprob) + shift for logprob in logprobs], ranks

  async def _complete(self, call: Call, sample: Sample) -> None:
    params, finish = call.params, None
    slowness = self._latency.seconds(params.seed, sample.index)
    async with contextlib.aclosing(self.backend.draw(call.prompt, params, sample.index)) as pieces:
      while finish is None:  # Wait 'client': bounded by the client, whose hang-up cancels it.
        async with self._turn(call):
          drawn = await anext(pieces, None)
        if drawn is None:
          raise ValueError(
            f'the script ended after {len(sample.tokens)} of {params.max_tokens} tokens, without a '
            'stop'
          )
        before = len(sample.tokens)
        finish = self._take(sample, drawn, params)
        sample.has_last = finish is not None
        call.grown.set()
        # Wait 'client': bounded by the client, whose hang-up cancels it.
        while (
          finish is None
          and self.faults.stall_at is not None
          and len(sample.tokens) >= self.faults.stall_at
        ):
          await asyncio.sleep(_POLL_S)
        per_token = slowness / params.max_tokens + self._latency.token_s
        await asyncio.sleep(per_token * (len(sample.tokens) - before))
    await asyncio.sleep(slowness * (1 - len(sample.tokens) / params.max_tokens))
    async with self._turn(call):  # A paused server does not answer.
      sample.finish = finish
      call.grown.set()

  def _take(self, sample: Sample, drawn: Drawn, params: Params) -> str | None:
    """Appends tokens up to the end of the completion. Returns the finish reason, or None if the
    completion has not ended.
    """
    for token, logprob, generation in zip(*drawn, strict=True):
      sample.tokens.append(int(token))
      sample.logprobs.append(float(logprob))
      sample.labels.append(self._labels.get(generation, self.label))
      self.tokens += 1
      if token in params.stop_ids:
        return 'stop'
      if len(sample.tokens) == params.max_tokens:
        return 'length'
      if params.repetition is not None and _repeats(sample.tokens, *params.repetition):
        return 'repetition'
    return None

  @contextlib.asynccontextmanager
  async def _turn(self, call: Call) -> AsyncGenerator[None, None]:
    """Waits until the call may continue. A pause waits for the end of the block."""
    await self._until(lambda: not self.paused or call in self._let_through)
    self._drawing += 1
    try:
      yield
    finally:
      self._drawing -= 1
      self._notify()

  def _notify(self) -> None:
    self._changed.set()
    self._changed = asyncio.Event()

  async def _until(self, reached: Callable[[], bool]) -> None:
    while not reached():
      # Wait 'client': bounded by the client, whose hang-up cancels it.
      await self._changed.wait()


def _repeats(tokens: Sequence[int], least: int, most: int, count: int) -> bool:
  """Returns whether the last tokens are `count` copies of a pattern of `least` to `most` tokens."""
  return any(
    tokens[-size * count :] == tokens[-size:] * count
    for size in range(least, most + 1)
    if size * count <= len(tokens)
  )
