"""A stage of the run: an algorithm, its steps, and where its batches come from."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol, runtime_checkable

from jaxrl_llm.batching.plan import Row, StepPlan, deal_rows
from jaxrl_llm.core.waits import unless
from jaxrl_llm.data.streams import RowStream
from jaxrl_llm.experience.sample import Finish
from jaxrl_llm.master.explorer import Explorer, Scored
from jaxrl_llm.master.gate import Gate
from jaxrl_llm.replay.index import ReplayStore
from jaxrl_llm.replay.segments import Ref
from jaxrl_llm.tasks.sampler import TaskSampler

SEALED = 'replay/segments'
"""Where the store's sealed segments lie in the run directory."""


@runtime_checkable
class Batches(Protocol):
  """Where a stage's batches come from; process 0 only."""

  explores: bool
  """Whether it needs the policy to be published before each batch."""

  def running(self) -> contextlib.AbstractAsyncContextManager[None]: ...

  def advance(self, step: int, served: int) -> None: ...

  async def next(self, step: int) -> tuple[list[Row], dict[str, int]]: ...

  def taken(self) -> dict[str, Scored]:
    """What the last batch's rows were made from, by uid."""
    ...

  def trained(self, plan: StepPlan) -> None: ...

  def state(self) -> Any:
    """JSON, as of the last completed batch, whatever has been drawn since."""
    ...

  def restore(self, state: Any) -> None: ...


class StreamBatches:
  """Batches of a static stream of demonstrations."""

  explores = False

  def __init__(self, stream: RowStream):
    self._stream = stream
    self._before: Any = None

  @contextlib.asynccontextmanager
  async def running(self) -> AsyncIterator[None]:
    yield

  def advance(self, step: int, served: int) -> None:
    self._before = self._stream.state()

  async def next(self, step: int) -> tuple[list[Row], dict[str, int]]:
    return self._stream.next(), {}

  def taken(self) -> dict[str, Scored]:
    return {}

  def trained(self, plan: StepPlan) -> None:
    self._before = None

  def state(self) -> Any:
    return {'stream': self._before or self._stream.state()}

  def restore(self, state: Any) -> None:
    self._stream.restore(state['stream'])


class RolloutBatches:
  """Batches of the policy's own rollouts, sealed into one segment a step."""

  explores = True

  def __init__(self, explorer: Explorer, store: ReplayStore, sampler: TaskSampler, gate: Gate):
    self._explorer, self._store, self._sampler, self._gate = explorer, store, sampler, gate
    self._taken: dict[str, Scored] = {}
    self._before: Any = None

  def running(self) -> contextlib.AbstractAsyncContextManager[None]:
    return self._explorer.running()

  def advance(self, step: int, served: int) -> None:
    self._before = self._now()
    self._explorer.advance(step, served)

  async def next(self, step: int) -> tuple[list[Row], dict[str, int]]:
    batch, counts = await self._explorer.collect()
    places = await asyncio.to_thread(self._store.seal, [m.sample.uid for m in batch], step)
    self._taken = {m.sample.uid: m for m in batch}
    return [rollout_row(m, places[m.sample.uid]) for m in batch], counts

  def taken(self) -> dict[str, Scored]:
    return self._taken

  def trained(self, plan: StepPlan) -> None:
    self._store.trained([row.uid for row in plan.rows], plan.step)
    self._before = None

  def state(self) -> Any:
    return self._before or self._now()

  def _now(self) -> Any:
    return {'sampler': self._sampler.state(), 'gate': self._gate.state()}

  def restore(self, state: Any) -> None:
    self._sampler.restore(state['sampler'])
    self._gate.restore(state['gate'])


def rollout_row(scored: Scored, place: Ref) -> Row:
  sample, (segment, index) = scored.sample, place
  return Row(
    uid=sample.uid,
    source=f'{SEALED}/{segment}',
    index=index,
    length=len(sample.tokens),
    prompt_len=sample.prompt_len,
    group=sample.group_id,
    reward=scored.reward.value,
    is_expert=False,
    truncated=sample.finish_reason == Finish.LENGTH,
    version_step=min(segment.version.step for segment in sample.segments),
  )


class Planner:
  """Closes batches into plans; process 0 only. All decisions of a step are taken here."""

  def __init__(self, *, seed: int, every_steps: int, every_minutes: float, stop: asyncio.Future):
    """
    Args:
      every_steps, every_minutes: between commits.
      stop: a future of a signal number; once set, the next plan is to leave.
    """
    self._seed, self._every_steps, self._every_s = seed, every_steps, every_minutes * 60
    self._stop = stop
    self._committed = time.monotonic()

  async def close(self, stage, step: int, batches: Batches) -> StepPlan:
    """The plan of `step`, as soon as its batch is complete; or a plan to leave, as soon as a signal has come."""
    batch = await unless(self._stop, batches.next(step))
    if batch is None:
      return StepPlan(step=step, stage=stage.name, stop=self._stop.result())
    return self._plan(stage, step, *batch)

  def _plan(self, stage, step: int, rows: list[Row], counts: dict[str, int]) -> StepPlan:
    done = step + 1
    evaluate = stage.evaluation_due(done)
    # What is evaluated is committed, or the best would often be a step that was not kept.
    by_steps = done % self._every_steps == 0 or evaluate
    by_clock = time.monotonic() - self._committed > self._every_s
    if by_steps or by_clock:
      self._committed = time.monotonic()
    optimizer_steps = deal_rows(
      rows, minibatches=stage.minibatches, epochs=stage.epochs, seed=self._seed * 1_000_003 + step
    )
    several = len(optimizer_steps) > 1
    return StepPlan(
      step=step,
      stage=stage.name,
      rows=tuple(rows),
      optimizer_steps=optimizer_steps,
      proximal=several and stage.explores,
      proximal_reason=f'{len(optimizer_steps)} optimizer steps on one batch' if several else 'one optimizer step',
      evaluate=evaluate,
      commit=by_steps or by_clock,
      commit_by_clock=by_clock and not by_steps,
      counts=counts,
    )
