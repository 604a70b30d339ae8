"""A stage of the run: an algorithm, its steps, and where its batches come from."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol, runtime_checkable

from jaxrl_llm.batching.plan import Row, StepPlan, deal_rows
from jaxrl_llm.core.records.sample import Finish
from jaxrl_llm.core.waits import unless
from jaxrl_llm.data.streams import RowStream
from jaxrl_llm.master.exploring.explorer import Explorer
from jaxrl_llm.master.exploring.gate import Gate
from jaxrl_llm.master.exploring.selection import Chosen, Scored
from jaxrl_llm.master.trainer import Stage
from jaxrl_llm.replay.draw import DrawConfig, Group, draw
from jaxrl_llm.replay.index import ReplayStore
from jaxrl_llm.replay.segments import Ref
from jaxrl_llm.replay.tables import Issue
from jaxrl_llm.runtime.events import SILENT, Edge, Events
from jaxrl_llm.tasks.sampler import TaskSampler

SEALED = 'replay/segments'
"""Where the store's sealed segments lie in the run directory."""


@runtime_checkable
class Batches(Protocol):
  """Where a stage's batches come from; process 0 only."""

  explores: bool
  """Whether it needs the policy to be published before each batch."""
  held_out: tuple[Row, ...]
  """What the policy is measured on at evaluations, besides the suites: rows of static data."""

  def running(self) -> contextlib.AbstractAsyncContextManager[None]: ...

  def advance(self, step: int, served: int) -> None: ...

  async def next(self, step: int) -> tuple[list[Row], dict[str, int]]: ...

  def taken(self) -> dict[str, Scored]:
    """What the last batch's rows were made from, by uid."""
    ...

  def trained(self, plan: StepPlan) -> None:
    """The batch of that plan is complete."""
    ...

  def state(self) -> Any:
    """JSON, as of the last completed batch, whatever has been drawn since."""
    ...

  def restore(self, state: Any) -> None: ...


class StreamBatches:
  """Batches of a static stream: demonstrations, or preference pairs."""

  explores = False

  def __init__(self, stream: RowStream, held_out: tuple[Row, ...] = (), *, events: Events = SILENT):
    self._stream, self.held_out, self._events = stream, held_out, events
    self._before: Any = None

  @contextlib.asynccontextmanager
  async def running(self) -> AsyncIterator[None]:
    yield

  def advance(self, step: int, served: int) -> None:
    self._before = self._stream.state()

  async def next(self, step: int) -> tuple[list[Row], dict[str, int]]:
    asked = self._events.request(Edge.FETCH, source='static')
    rows = self._stream.next()
    self._events.reply(asked, count=len(rows))
    return rows, {}

  def taken(self) -> dict[str, Scored]:
    return {}

  def trained(self, plan: StepPlan) -> None:
    self._before = None

  def state(self) -> Any:
    return {'stream': self._before or self._stream.state()}

  def restore(self, state: Any) -> None:
    self._stream.restore(state['stream'])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Past:
  """Which earlier groups of a stage join a batch of new ones."""

  stage: str
  groups: int
  """At most."""
  max_uses: int
  config: DrawConfig
  seed: int

  def draw(self, store: ReplayStore, step: int) -> list[Group]:
    """Groups that a batch has trained on, fewer than `max_uses` did, and `config` does not leave out."""
    own = lambda group: group.group_id.startswith(f'{self.stage}/') and 0 < group.uses < self.max_uses
    oldest = None if self.config.max_age is None else step - self.config.max_age
    groups = {group.group_id: group for group in store.candidates(step, oldest_version=oldest) if own(group)}
    drawn = draw([*groups.values()], self.config, count=self.groups, step=step, seed=self.seed)
    return [groups[group_id] for group_id in drawn]


class RolloutBatches:
  """Batches of the policy's own rollouts: new ones, sealed into one segment a step, and earlier ones."""

  explores = True
  held_out: tuple[Row, ...] = ()

  def __init__(
    self,
    explorer: Explorer,
    store: ReplayStore,
    sampler: TaskSampler,
    gate: Gate,
    *,
    past: Past | None = None,
    trains: bool = True,
    events: Events = SILENT,
  ):
    self.explorer, self._store, self._sampler, self._gate = explorer, store, sampler, gate
    self._past, self._trains, self._events = past, trains, events
    self._taken: dict[str, Scored] = {}
    self._completed = self._now()
    """The state when the last batch was completed."""

  def running(self) -> contextlib.AbstractAsyncContextManager[None]:
    return self.explorer.running()

  def advance(self, step: int, served: int) -> None:
    self._sampler.advance(served)
    self.explorer.advance(step, served)

  async def next(self, step: int) -> tuple[list[Row], dict[str, int]]:
    batch, counts = await self.explorer.collect()
    if self._past is not None:
      groups = await asyncio.to_thread(self._past.draw, self._store, step)
      batch += await asyncio.to_thread(self.explorer.recall, [uid for group in groups for uid in group.uids])
      counts['past_groups'] = len(groups)
    self._taken = {chosen.scored.sample.uid: chosen.scored for chosen in batch}
    asked = self._events.request(Edge.FETCH, source='rollouts')
    places = await asyncio.to_thread(self._store.seal, [*self._taken], step)
    self._events.reply(asked, count=len(places))
    return [rollout_row(chosen, places[chosen.scored.sample.uid]) for chosen in batch], counts

  def taken(self) -> dict[str, Scored]:
    return self._taken

  def trained(self, plan: StepPlan) -> None:
    if self._trains:
      self._store.trained([*self._taken], plan.step)
    # From here on the store's changes are later than a commit of this batch, and so is what this state does not have.
    self.explorer.completed(plan.step + 1)
    self._completed = self._now()

  def state(self) -> Any:
    return self._completed

  def _now(self) -> Any:
    return {'sampler': self._sampler.state(), 'gate': self._gate.state(), 'explorer': self.explorer.state()}

  def restore(self, state: Any) -> None:
    self._sampler.restore(state['sampler'])
    self._gate.restore(state['gate'])
    self.explorer.restore(state['explorer'])
    self._completed = state


class MixedBatches:
  """Batches of rollouts and of expert rows, in fixed numbers; but of earlier groups there are few at first."""

  explores = True
  held_out: tuple[Row, ...] = ()

  def __init__(self, rollouts: RolloutBatches, experts: StreamBatches, store: ReplayStore):
    self._rollouts, self._experts, self._store, self.explorer = rollouts, experts, store, rollouts.explorer
    self._parts: tuple[Batches, ...] = (rollouts, experts)

  def running(self) -> contextlib.AbstractAsyncContextManager[None]:
    return self._rollouts.running()

  def advance(self, step: int, served: int) -> None:
    for part in self._parts:
      part.advance(step, served)

  async def next(self, step: int) -> tuple[list[Row], dict[str, int]]:
    rows, counts = await self._rollouts.next(step)
    experts, _ = await self._experts.next(step)
    return rows + experts, counts

  def taken(self) -> dict[str, Scored]:
    return self._rollouts.taken()

  def trained(self, plan: StepPlan) -> None:
    for part in self._parts:
      part.trained(plan)
    # A short stream comes round within a batch: each row is written down once.
    joined = {row.uid: _joined(plan.stage, row) for row in plan.rows if row.uid not in self.taken()}
    self._store.join([*joined.values()], plan.step)
    self._store.trained([issue.uid for issue in joined.values()], plan.step)

  def state(self) -> Any:
    return {'rollouts': self._rollouts.state(), 'experts': self._experts.state()}

  def restore(self, state: Any) -> None:
    self._rollouts.restore(state['rollouts'])
    self._experts.restore(state['experts'])


def _joined(stage: str, row: Row) -> Issue:
  """An expert row as the store knows it: by its stage, for another one may have the same rows."""
  uid = f'{stage}/{row.uid}'
  return Issue(uid=uid, group_id=uid, task_id=row.uid.partition('/')[0], visit=0, partition='expert')


def rollout_row(chosen: Chosen, place: Ref) -> Row:
  scored, (segment, index) = chosen.scored, place
  sample = scored.sample
  return Row(
    uid=sample.uid,
    source=f'{SEALED}/{segment}',
    index=index,
    length=len(sample.tokens),
    prompt_len=sample.prompt_len,
    group=sample.group_id,
    reward=scored.reward.value,
    is_expert=chosen.imitated,
    truncated=sample.finish_reason == Finish.LENGTH,
    version_step=min(segment.version.step for segment in sample.segments),
    correct=scored.reward.correct,
    turn_rewards=scored.reward.turn_values,
    trajectory=sample.trajectory_id if sample.trajectory_id != sample.uid else '',
    step_index=sample.step_index,
    masked=scored.masked,
    pair=chosen.pair,
    label=chosen.label,
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

  async def close(self, stage: Stage, step: int, batches: Batches) -> StepPlan:
    """The plan of `step`, as soon as its batch is complete; or a plan to leave, as soon as a signal has come."""
    batch = await unless(self._stop, batches.next(step))
    if batch is None:
      return StepPlan(step=step, stage=stage.name, stop=self._stop.result())
    return self._plan(stage, step, *batch, batches.held_out)

  def _plan(
    self, stage: Stage, step: int, rows: list[Row], counts: dict[str, int], held_out: tuple[Row, ...]
  ) -> StepPlan:
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
    reason = _proximal_reason(stage, step, len(optimizer_steps))
    return StepPlan(
      step=step,
      stage=stage.name,
      rows=tuple(rows),
      optimizer_steps=optimizer_steps,
      proximal=bool(reason),
      proximal_reason=reason,
      held_out=held_out if evaluate else (),
      evaluate=evaluate,
      commit=by_steps or by_clock,
      commit_by_clock=by_clock and not by_steps,
      counts=counts,
    )


def _proximal_reason(stage: Stage, step: int, optimizer_steps: int) -> str:
  """Why a pass is made for the policy's logprobs before the batch; empty: the update's own serve, or none is read."""
  algorithm = stage.algorithm
  is_reference = algorithm.reference.every == 1
  if 'proximal_logprobs' in algorithm.on_host or (is_reference and 'reference_logprobs' in algorithm.on_host):
    return 'annotation reads the logprobs'
  if step - stage.start < algorithm.critic_warmup:
    return 'the policy is not updated, so no update computes its logprobs'
  if optimizer_steps == 1:
    return ''
  if 'proximal' in algorithm.reads or (is_reference and 'reference' in algorithm.reads):
    return f'{optimizer_steps} optimizer steps on one batch'
  return ''
