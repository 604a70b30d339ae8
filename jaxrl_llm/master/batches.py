"""Sources of batches, and the planner that turns each complete batch into a step plan.

A step plan contains the batch's rows. It says how they are split into optimizer steps, and whether
the run evaluates, commits or ends after the step.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxrl_llm.batching.plan import Row, StepPlan, deal_rows, with_prefixes
from jaxrl_llm.core.records.sample import Sample
from jaxrl_llm.core.waits import bounded, unless
from jaxrl_llm.data.streams import RowStream
from jaxrl_llm.master.experts import AddedExperts
from jaxrl_llm.master.exploring.explorer import Explorer
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.master.trainer import Stage
from jaxrl_llm.replay.segments import SEALED, Ref
from jaxrl_llm.replay.tables import Issue
from jaxrl_llm.rewards.api import Verdict
from jaxrl_llm.runtime.events import SILENT, Edge, Events

_DEADLINE_S = 3600.0
"""Maximum seconds for selecting a stage's rows from the store."""


@runtime_checkable
class Batches(Protocol):
  """Source from which a stage takes its batches. It exists in process 0 only."""

  explores: bool
  """Whether the policy generates rollouts for the batches. If so, engines must serve the policy."""
  held_out: tuple[Row, ...]
  """Held-out rows, such as preference pairs, on which each evaluation measures the policy's loss.
  Empty if there are none.
  """

  def running(self) -> contextlib.AbstractAsyncContextManager[None]: ...

  def advance(self, step: int, served: int) -> None:
    """Prepares for the next batch.

    Args:
      step: number of batches that the run has completed.
      served: number of this stage's batches that the engines' current weights have been trained on.
    """
    ...

  async def next(self) -> tuple[list[Row], dict[str, int]]:
    """Waits for the next batch. Returns its rows, and counts of events during its collection, keyed
    by name (such as `dropped/groups`).
    """
    ...

  def taken(self) -> dict[str, Experience]:
    """Returns the rollouts in the last batch with their scores. Keys are the uids of samples; a
    trajectory of several steps is listed under the uid of each step. The result is empty if the
    batch has no rollouts.
    """
    ...

  def record(self, plan: StepPlan) -> None:
    """Records in the store that the run trained on the batch with this plan. May be called in any
    thread.
    """
    ...

  def trained(self, plan: StepPlan) -> None:
    """Completes the batch with this plan, after `record`."""
    ...

  def state(self) -> Any:
    """Returns the state after the last completed batch, as JSON. It does not reflect rows already
    drawn for the next batch.
    """
    ...

  def restore(self, state: Any) -> None: ...


class StreamBatches:
  """Batches of a fixed data set: demonstrations, examples or preference pairs.

  The rows of the next batch are known in advance, so a thread draws them while the run trains on
  the current batch. Drawing reads the rows' records, so the operating system has them in its page
  cache when the batch is loaded.
  """

  explores = False

  def __init__(self, stream: RowStream, held_out: tuple[Row, ...] = (), *, events: Events = SILENT):
    self._stream, self.held_out, self._events = stream, held_out, events
    self._before: Any = None
    self._after = stream.state()
    """Position in the stream after the last rows that `next` returned. The stream itself may
    already be at a later position.
    """
    self._ahead: asyncio.Task[tuple[list[Row], Any]] | None = None

  @contextlib.asynccontextmanager
  async def running(self) -> AsyncIterator[None]:
    try:
      yield
    finally:
      if self._ahead is not None:
        self._ahead.cancel()

  def advance(self, step: int, served: int) -> None:
    self._before = self._after

  async def next(self) -> tuple[list[Row], dict[str, int]]:
    asked = self._events.request(Edge.FETCH, source='static')
    self._draw_ahead()
    # A signal may cancel this wait. It must not cancel the drawing task, because the stream has
    # already advanced past the rows.
    rows, self._after = await asyncio.shield(self._ahead)
    self._ahead = None
    self._draw_ahead()
    self._events.reply(asked, count=len(rows))
    return rows, {}

  async def take(self, count: int) -> list[Row]:
    """Returns the next `count` rows, where `count` is smaller than a batch. The next call continues
    after these rows.
    """
    asked = self._events.request(Edge.FETCH, source='static')
    if self._ahead is not None:
      await asyncio.shield(self._ahead)
    rows, self._after = await asyncio.to_thread(self._draw_from, self._after, count)
    self._ahead = None
    self._events.reply(asked, count=len(rows))
    return rows

  def _draw_from(self, position: Any, count: int) -> tuple[list[Row], Any]:
    self._stream.restore(position)
    return self._stream.next(count), self._stream.state()

  def _draw_ahead(self) -> None:
    """Starts drawing the next rows, unless they are already being drawn."""
    if self._ahead is None:
      self._ahead = asyncio.create_task(
        asyncio.to_thread(self._draw), name='rows of the next batch'
      )

  def _draw(self) -> tuple[list[Row], Any]:
    return self._stream.next(), self._stream.state()

  def taken(self) -> dict[str, Experience]:
    return {}

  def record(self, plan: StepPlan) -> None:
    pass

  def trained(self, plan: StepPlan) -> None:
    self._before = None

  def state(self) -> Any:
    return {'stream': self._before or self._after}

  def restore(self, state: Any) -> None:
    self._stream.restore(state['stream'])
    self._after = state['stream']


class LateBatches(StreamBatches):
  """Batches of a data set that is made from the rollouts of earlier stages. The data set is opened
  when the stage begins.
  """

  def __init__(self, open_stream: Callable[[], RowStream], *, events: Events = SILENT):
    """
    Args:
      open_stream: opens the stream of rows, after creating the rows if they do not exist yet.
    """
    self._open, self._opened = open_stream, False
    self.held_out, self._events = (), events
    self._before = self._after = self._ahead = None

  @contextlib.asynccontextmanager
  async def running(self) -> AsyncIterator[None]:
    if not self._opened:
      # Reading the store takes long, so it runs in a thread and does not block the event loop.
      await bounded(
        asyncio.to_thread(self._open_now),
        name='rows',
        owner='the stage',
        waits_for='its rows to be selected from the store',
        deadline_s=_DEADLINE_S,
      )
    async with super().running():
      yield

  def restore(self, state: Any) -> None:
    self._open_now()
    super().restore(state)

  def _open_now(self) -> None:
    self._stream, self._opened = self._open(), True
    self._after = self._stream.state()


class RolloutBatches:
  """Batches of the policy's own rollouts, which the explorer collects. A batch may also contain
  rollouts of earlier batches.
  """

  explores = True
  held_out: tuple[Row, ...] = ()

  def __init__(self, explorer: Explorer, *, trains: bool = True):
    """
    Args:
      trains: whether the stage trains on its batches. If False, they are only stored.
    """
    self.explorer, self._trains = explorer, trains
    self._taken: dict[str, Experience] = {}

  def running(self) -> contextlib.AbstractAsyncContextManager[None]:
    return self.explorer.running()

  def advance(self, step: int, served: int) -> None:
    self.explorer.advance(step, served)

  async def unscored(self) -> list[Experience]:
    """Waits until the trainer's reward model must score samples of the next batch, and returns
    them. Returns an empty list if the batch has no more such samples, so that `next` can be called.
    """
    return await self.explorer.unscored()

  async def score(self, verdicts: Mapping[str, Verdict]) -> bool:
    """Takes the reward model's verdicts on the samples that `unscored` returned, keyed by uid.
    Returns whether the batch needs more rollouts; `proceed` starts them.
    """
    return await self.explorer.score(verdicts)

  def proceed(self) -> None:
    """Lets the explorer start groups again. Call this once the engine serves again."""
    self.explorer.proceed()

  async def next(self) -> tuple[list[Row], dict[str, int]]:
    chosen, places, counts = await self.explorer.next()
    self._taken = {step.uid: choice for choice in chosen for step in choice.steps}
    # A thousand long samples would block the event loop for more than 50 ms.
    return await asyncio.to_thread(_rows, chosen, places), counts

  def taken(self) -> dict[str, Experience]:
    return self._taken

  def record(self, plan: StepPlan) -> None:
    self.explorer.record([*self._taken] if self._trains else [])

  def trained(self, plan: StepPlan) -> None:
    self.explorer.complete()

  def state(self) -> Any:
    return self.explorer.state()

  def restore(self, state: Any) -> None:
    self.explorer.restore(state)


class MixedBatches(RolloutBatches):
  """Batches of rollouts and a fixed number of expert rows. Expert rows that were added to the run
  are used first; demonstrations, which are static data, take the remaining places.

  If groups of earlier batches join each new batch (`Past`), the first batches may have fewer
  rollouts, because few earlier groups exist then.
  """

  def __init__(self, explorer: Explorer, experts: StreamBatches, added: AddedExperts, *, rows: int):
    """
    Args:
      experts: source of demonstrations, in batches of `rows`.
      added: source of the expert rows that were added to the run.
      rows: number of expert rows in a batch.
    """
    super().__init__(explorer)
    self._experts, self._added, self._rows = experts, added, rows
    self._step = 0
    self._drawn: tuple[str, ...] = ()
    """uids of the added rows in the last batch."""

  @contextlib.asynccontextmanager
  async def running(self) -> AsyncIterator[None]:
    async with super().running(), self._experts.running():
      yield

  def advance(self, step: int, served: int) -> None:
    super().advance(step, served)
    self._experts.advance(step, served)
    self._step = step

  async def next(self) -> tuple[list[Row], dict[str, int]]:
    rows, counts = await super().next()
    # A signal may cancel this wait. The run then ends, and its next start undoes the changes that
    # the thread has made to the store.
    added, more = await asyncio.to_thread(self._added.draw, self._step, self._rows)
    self._drawn = tuple(row.uid for row in added)
    if not added:
      static, _ = await self._experts.next()
    else:
      static = await self._experts.take(self._rows - len(added))
    return rows + added + static, counts | more

  def record(self, plan: StepPlan) -> None:
    stored = {*self._taken, *self._drawn}
    # Each static row is recorded once, even if a short stream repeats the row within the batch.
    static = {row.uid: _joined(plan.stage, row) for row in plan.rows if row.uid not in stored}
    self.explorer.record([*self._taken, *self._drawn], [*static.values()])

  def trained(self, plan: StepPlan) -> None:
    super().trained(plan)
    self._experts.trained(plan)

  def state(self) -> Any:
    return {'rollouts': super().state(), 'experts': self._experts.state()}

  def restore(self, state: Any) -> None:
    super().restore(state['rollouts'])
    self._experts.restore(state['experts'])


def _joined(stage: str, row: Row) -> Issue:
  """Returns the store's record of a demonstration (a row of static data) that has joined a batch.
  The record's uid starts with the name of the stage, because several stages may train on the same
  row.
  """
  uid = f'{stage}/{row.uid}'
  return Issue(
    uid=uid, group_id=uid, task_id=row.uid.partition('/')[0], visit=0, partition='expert'
  )


def _rows(chosen: Sequence[Experience], places: Mapping[str, Ref]) -> list[Row]:
  """Returns the rows of a batch of trajectories. For the arguments, see `step_rows`."""
  rows = [row for choice in chosen for row in step_rows(choice, places)]
  samples = [step for choice in chosen for step in choice.steps]
  return with_digests(with_prefixes(rows, samples), samples)


def step_rows(chosen: Experience, places: Mapping[str, Ref]) -> list[Row]:
  """Returns one row for each step of a trajectory.

  Args:
    places: location of each step in the store's sealed segment files, keyed by uid.
  """
  rewards = zip(chosen.steps, chosen.step_rewards(), strict=True)
  return [_row(chosen, step, places[step.uid], reward) for step, reward in rewards]


def _row(
  chosen: Experience,
  sample: Sample,
  place: Ref,
  rewards: tuple[float | None, tuple[float, ...]],
) -> Row:
  segment, index = place
  reward, turn_rewards = rewards
  return Row(
    uid=sample.uid,
    source=f'{SEALED}/{segment}',
    index=index,
    length=len(sample.tokens),
    prompt_len=sample.prompt_len,
    group=sample.group_id,
    reward=reward,
    is_expert=chosen.imitated,
    truncated=chosen.finish_reason.is_truncated,
    version_step=min(
      (s.version.step for s in sample.segments if sample.loss_mask[s.start : s.end].any()),
      default=None,
    ),
    correct=chosen.reward.correct,
    turn_rewards=turn_rewards,
    trajectory=sample.trajectory_id if chosen.later else None,
    step_index=sample.step_index,
    masked=chosen.masked,
    pair=chosen.pair,
    label=chosen.label,
  )


def with_digests(rows: list[Row], samples: Sequence[Sample]) -> list[Row]:
  """If any trajectory has several steps, adds to each row the digest of its prompt. Otherwise,
  returns the rows unchanged.

  Args:
    samples: the sample of each row, in the same order.
  """
  if not any(row.trajectory for row in rows):
    return rows

  def digest(sample: Sample) -> str:
    prompt = sample.tokens[: sample.prompt_len]
    return hashlib.blake2b(prompt.astype('<i4').tobytes(), digest_size=8).hexdigest()

  return [
    dataclasses.replace(row, prompt_digest=digest(sample))
    for row, sample in zip(rows, samples, strict=True)
  ]


class Planner:
  """Turns each complete batch into a step plan. It also decides whether the run evaluates the
  policy and commits (writes a checkpoint) after the step.

  Only process 0 uses it.
  """

  def __init__(
    self, *, seed: int, every_steps: int, every_minutes: float | None, stop: asyncio.Future
  ):
    """
    Args:
      every_steps: a step is committed if the number of completed steps is a multiple of this.
        Evaluated steps are always committed.
      every_minutes: a step is also committed if more than this many minutes have passed since the
        last commit, or since the planner was created. If None, commits do not depend on time.
      stop: future that resolves to the number of the signal that stops the run. Once it has
        resolved, the next plan ends the run.
    """
    self._seed, self._every_steps = seed, every_steps
    self._every_s = math.inf if every_minutes is None else every_minutes * 60
    self._stop = stop
    self._committed = time.monotonic()

  async def close(self, stage: Stage, step: int, batches: Batches) -> StepPlan:
    """Waits for the next batch and returns its plan. If a signal arrives, returns a plan that has
    no rows and ends the run.
    """
    batch = await unless(self._stop, batches.next())
    if batch is None:
      return StepPlan(step=step, stage=stage.name, stop=self._stop.result())
    return self._plan(stage, step, *batch, batches.held_out)

  async def unscored(self, batches: RolloutBatches) -> list[Experience]:
    """Waits until the trainer's reward model must score samples of the next batch, and returns
    them. Returns an empty list if `close` is due: the batch is complete, or a signal has arrived.
    """
    return await unless(self._stop, batches.unscored()) or []

  async def stop_signal(self) -> int:
    """Returns the number of the signal that ends the run, or 0 if there was none."""
    return self._stop.result() if self._stop.done() else 0

  def _plan(
    self,
    stage: Stage,
    step: int,
    rows: list[Row],
    counts: dict[str, int],
    held_out: tuple[Row, ...],
  ) -> StepPlan:
    done = step + 1
    evaluate = stage.evaluation_due(done)
    # Every evaluated step is committed, so that the step with the best evaluation has a checkpoint.
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
  """Returns the reason why a forward pass must compute the policy's logprobs before the update, or
  an empty string if no such pass is needed.
  """
  algorithm = stage.algorithm
  is_reference = algorithm.reference.every == 1
  if 'proximal_logprobs' in algorithm.on_host or (
    is_reference and 'reference_logprobs' in algorithm.on_host
  ):
    return 'annotation reads the logprobs'
  if step - stage.start < algorithm.critic_warmup:
    return 'the policy is not updated, so no update computes its logprobs'
  if optimizer_steps == 1:
    return ''
  if 'proximal' in algorithm.reads or (is_reference and 'reference' in algorithm.reads):
    return f'{optimizer_steps} optimizer steps on one batch'
  return ''
