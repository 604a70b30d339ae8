"""Main loop, the same in every process.

Each step publishes the policy if a publication is due, closes a batch (collects it and fixes its
plan), annotates it (computes values such as advantages), updates the models, and calls the keeper,
which writes metrics, evaluates and commits.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from jaxrl_llm.batching.plan import StepPlan
from jaxrl_llm.core import garbage
from jaxrl_llm.core.types import Version
from jaxrl_llm.learner.algorithm import Annotation
from jaxrl_llm.learner.state import Learned
from jaxrl_llm.master.batches import Batches, Planner, RolloutBatches
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.master.phases import RESIDENT, REWARD_MODEL, Phase, Phases
from jaxrl_llm.master.process import Process
from jaxrl_llm.master.reward_model import Rendered, RewardRole
from jaxrl_llm.master.trainer import Batch, Stage, StageTrainer, Updated
from jaxrl_llm.rollout.publisher import Publisher
from jaxrl_llm.runtime.events import Edge
from jaxrl_llm.runtime.profiler import UNPROFILED, Profiler


@dataclasses.dataclass(frozen=True)
class LoopState:
  """Progress of the run: its step, and the version of its policy."""

  learned: Learned
  step: int
  """Number of batches that the run has completed."""
  moved: int = 0
  """Value of `step` after the last batch of this attempt that changed the policy; 0 if there was
  none.
  """
  attempt: int = 0
  """Attempt number in the versions of the policy (`Version.attempt`). It grows when the run starts,
  when a stage does not continue with the previous stage's policy, and when the run takes the
  weights of another run.
  """
  evaluated: bool = False
  """Whether the evaluation at `step` is complete. In a run without evaluation suites, an evaluation
  that is due counts as complete.
  """
  stop: int = 0
  """Number of the signal that ends the run; 0 if there was none."""
  bests: Mapping[str, tuple[float, int]] = dataclasses.field(default_factory=dict)
  """Best evaluation of each stage so far, as (accuracy, step), keyed by the stage's name.
  Evaluations at the start of a stage do not count. Of evaluations with equal accuracies, the
  earliest is the best.
  """


@runtime_checkable
class Keeper(Protocol):
  """Writes metrics, evaluates and commits. Every process has a keeper.

  If a signal interrupts an evaluation, the method that runs the evaluation returns a state in which
  `evaluated` is False and `stop` is the number of the signal.
  """

  async def start(self, state: LoopState, stage: Stage) -> LoopState: ...

  async def after_step(
    self, state: LoopState, stage: Stage, batch: Batch, updated: Updated
  ) -> LoopState: ...

  async def leave(self, state: LoopState, stage: Stage) -> None: ...

  @property
  def evaluating(self) -> bool:
    """Whether an evaluation is in progress while training continues. The engine must serve the
    evaluated version until the evaluation ends.
    """
    ...

  async def evaluated(self, state: LoopState, *, wait: bool = True) -> LoopState:
    """Returns the state with the result of the evaluation in progress. Every process must call
    this.

    Args:
      wait: whether to wait until the evaluation ends. If False and it has not ended, or if no
        evaluation is in progress, returns `state` unchanged.
    """
    ...

  async def settle(self) -> None:
    """Waits until the commit in progress, if any, is complete. Every process must call this."""
    ...

  async def abandon(self, error: BaseException) -> None:
    """Waits a short time for the commit in progress, if any, because the run is failing."""
    ...


PUBLISHED, EXPORTED = ('policy', 'base'), ('policy', 'base', 'critic')
"""Roles whose arrays are read when the policy is published, and when the trained models are
exported.
"""


@runtime_checkable
class Versions(Protocol):
  """Exchanges versions of the weights with another run. Every process must make each call."""

  async def export(self, stage: Stage, state: LoopState) -> None:
    """If an export is due after this step of the stage, exports the policy of `state` for the run
    whose rollouts this run trains on. The first call always exports.
    """
    ...

  async def follow(self, stage: Stage, state: LoopState) -> LoopState:
    """Returns the state with the newest weights of the run that trains on this run's rollouts.

    Returns `state` unchanged if there are no newer weights. If this run has taken no weights yet,
    or has explored too many batches with the newest weights, waits for newer weights instead. If a
    signal ends the wait, the returned state has the signal's number in `stop`.
    """
    ...


EnterStage = Callable[[Stage, LoopState], Awaitable[tuple[StageTrainer, LoopState]]]
"""Function that enters a stage. Returns the trainer of the stage, and the loop state. If the stage
has not begun, the returned state is prepared for it.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
  """Components of the loop. Process 0 alone uses `planner`; in the other processes, `batches` is
  empty.
  """

  stages: tuple[Stage, ...]
  process: Process
  publisher: Publisher
  keeper: Keeper
  enter_stage: EnterStage
  planner: Planner | None
  batches: dict[str, Batches]
  phases: Phases = RESIDENT
  profiler: Profiler = UNPROFILED
  reward_model: RewardRole | None = None
  """Reward model that scores the rollouts of batches; None if the trainer has none."""
  versions: Versions | None = None
  """Exchange of weights with another run; None if the run works alone."""


@dataclasses.dataclass(frozen=True)
class Outcome:
  state: LoopState
  stop: int
  """Number of the signal that ended the run, or 0 if the run is finished."""


async def run(parts: Parts, state: LoopState) -> Outcome:
  """Runs the remaining stages. Repeats a stage's final evaluation if it was interrupted.

  When the call returns, all commits are complete.
  """
  try:
    for stage in parts.stages:
      is_unfinished = state.step < stage.end or (state.step == stage.end and not state.evaluated)
      if is_unfinished and not state.stop:
        state = await _run_stage(parts, stage, state)
    if not state.stop:
      state = await enter(parts.phases, Phase.END, state, EXPORTED)
  except BaseException as error:
    await parts.keeper.abandon(error)
    raise
  return Outcome(state, state.stop)


async def enter(
  phases: Phases, phase: Phase, state: LoopState, roles: Collection[str] = ()
) -> LoopState:
  """Enters a phase with `Phases.enter` and returns the new state. The arrays of the given state
  must not be used afterwards.
  """
  return dataclasses.replace(state, learned=await phases.enter(phase, state.learned, roles))


async def _run_stage(parts: Parts, stage: Stage, state: LoopState) -> LoopState:
  batches, process = parts.batches.get(stage.name), parts.process
  with process.stopwatch.timed('enter'):
    state = await enter(parts.phases, Phase.STAGE, state)
    trainer, state = await parts.enter_stage(stage, state)
    if stage.follows:
      state = await parts.versions.follow(stage, state)
    if not state.stop:
      state = await parts.keeper.start(state, stage)
  async with contextlib.AsyncExitStack() as stack:
    if batches is not None:
      with process.stopwatch.timed('enter'):
        await stack.enter_async_context(batches.running())
    while state.step < stage.end and not state.stop:
      async with parts.profiler.traced(state.step + 1, process.stopwatch):
        state, completed = await _step(parts, stage, state, trainer, batches)
      if completed is None:
        break
      batch, updated = completed
      state = await parts.keeper.after_step(state, stage, batch, updated)
      with process.stopwatch.timed('record'):
        # Frees the arrays, so that the next rollouts can use their device memory.
        del batch, updated, completed
        garbage.collect_if_due()
    if state.stop:
      await parts.keeper.leave(state, stage)
    # A later stage may start from the weights of this stage's last commit.
    await parts.keeper.settle()
  with process.stopwatch.timed('enter'):
    del trainer  # Freeing the trainer's programs takes time, which is counted here as `enter`.
  return state


async def _step(
  parts: Parts, stage: Stage, state: LoopState, trainer: StageTrainer, batches: Batches | None
) -> tuple[LoopState, tuple[Batch, Updated] | None]:
  """Collects the next batch and trains on it. Returns the new state, and the batch with the result
  of its update, or None if a signal ends the run before the update.
  """
  process = parts.process
  with process.stopwatch.timed('step'):
    with process.stopwatch.timed('gen'):
      if stage.explores:
        if _publication_due(parts, stage, state.step):
          state = await _renew_engine(parts, stage, state)
        if state.stop:
          return state, None
      elif stage.export_every is not None:
        with process.stopwatch.timed('update_weights'):
          await parts.versions.export(stage, state)
      state, plan = await _close(parts, stage, state, batches)
    if plan.stop:
      return dataclasses.replace(state, stop=plan.stop), None
    if stage.trains:
      state, batch, updated = await take_step(process, trainer, state, plan, phases=parts.phases)
    else:
      state, batch, updated = pass_over(state, plan)
    process.events.advance(state.step)
  return state, (batch, updated)


async def take_step(
  process: Process,
  trainer: StageTrainer,
  state: LoopState,
  plan: StepPlan,
  *,
  phases: Phases = RESIDENT,
) -> tuple[LoopState, Batch, Updated]:
  """Annotates the plan's batch and trains on it. Donates the arrays of `state`.

  The result depends only on `state` and `plan`, so recorded plans can be replayed.
  """
  stopwatch, events = process.stopwatch, process.events
  data = events.request(Edge.TRAINING_DATA, batch=state.step + 1, count=len(plan.rows))
  state = await enter(phases, Phase.INFERENCE, state, trainer.scoring_roles(plan))
  with stopwatch.timed('annotate'):
    batch = await trainer.annotate(state.learned, plan)
  state = await enter(phases, Phase.TRAIN, state, trainer.training_roles(plan))
  with stopwatch.timed('train'):
    update = events.request(
      Edge.GRADIENT_UPDATE, batch=state.step + 1, updates=len(plan.optimizer_steps)
    )
    learned, updated = await trainer.update(state.learned, batch)
    events.reply(update, moved=updated.moved)
  events.reply(data)
  step = state.step + 1
  moved = step if updated.moved else state.moved
  return (
    dataclasses.replace(state, learned=learned, step=step, moved=moved, evaluated=False),
    batch,
    updated,
  )


def pass_over(state: LoopState, plan: StepPlan) -> tuple[LoopState, Batch, Updated]:
  """Completes a batch that the run stores without training on it. The batch's advantages are 0 and
  it has no trainer logprobs.
  """
  count = len(plan.rows)
  batch = Batch(plan, Annotation(np.zeros(count), np.zeros(count, bool), {}), [])
  updated = Updated({}, None, moved=False)
  return dataclasses.replace(state, step=state.step + 1, evaluated=False), batch, updated


async def _renew_engine(parts: Parts, stage: Stage, state: LoopState) -> LoopState:
  """Publishes the policy to the engine, or the newest weights of another run that the stage
  follows. If a signal ends the run, publishes nothing and returns the state with `stop` set.

  If an evaluation is in progress, publishes nothing, provided that groups for the next batch may
  start with the version that the engine serves. Otherwise, waits until the evaluation ends before
  it publishes.
  """
  keeper, publisher, stopwatch = parts.keeper, parts.publisher, parts.process.stopwatch
  if keeper.evaluating:
    lag = state.step - publisher.served.step
    may_defer = not stage.follows and lag <= stage.batches_ahead
    state = await keeper.evaluated(state, wait=not may_defer)
    if keeper.evaluating or state.stop:
      return state
  # After a signal, the policy is not published, because publishing may take a large part of the
  # time that is left before the process is killed.
  if stop := await _stop_of(parts):
    return dataclasses.replace(state, stop=stop)
  if stage.follows:
    state = await parts.versions.follow(stage, state)
    if state.stop:
      return state
  with stopwatch.timed('update_weights'):
    return await serve(publisher, parts.phases, state)


async def serve(publisher: Publisher, phases: Phases, state: LoopState) -> LoopState:
  """Publishes the policy of `state` to the engine and enters the rollout phase."""
  if publisher.sends(Version(state.attempt, state.step), moved=Version(state.attempt, state.moved)):
    state = await enter(phases, Phase.PUBLISH, state, PUBLISHED)
  await publish(publisher, state)
  return await enter(phases, Phase.ROLLOUT, state)


async def publish(publisher: Publisher, state: LoopState) -> None:
  """Publishes the policy of `state` to the engine, as the version of `state.step`."""
  learned = state.learned
  await publisher.publish(
    learned.whole(learned.policy.params),
    Version(state.attempt, state.step),
    moved=Version(state.attempt, state.moved),
  )


async def _stop_of(parts: Parts) -> int:
  """Returns the number of the signal that ends the run, or 0 if there was none. Every process gets
  the same result.
  """
  coordinator = parts.process.coordinator
  return await coordinator.broadcast(parts.planner.stop_signal() if coordinator.leads else None)


def _publication_due(parts: Parts, stage: Stage, step: int) -> bool:
  """Returns whether the policy must be published before the next batch.

  A publication is due after every `publish_every` batches of the stage. It stays due if an
  evaluation defers it. A publication is also due if the engine serves no version yet, as in a run
  that was just resumed.
  """
  served, scheduled = parts.publisher.served, step - (step - stage.start) % stage.publish_every
  return served is None or scheduled == step or served.step < scheduled


async def _close(
  parts: Parts, stage: Stage, state: LoopState, batches: Batches | None
) -> tuple[LoopState, StepPlan]:
  """Closes the next batch in process 0 and returns its plan in every process. If the trainer has a
  reward model, it scores the batch's rollouts first.
  """
  step = state.step
  if batches is not None:
    batches.advance(step, (parts.publisher.served.step if stage.explores else step) - stage.start)
  if stage.explores and parts.reward_model is not None:
    state = await score_rollouts(
      parts.process, parts.reward_model, state, parts.planner, batches, phases=parts.phases
    )

  async def decide():
    return (await parts.planner.close(stage, step, batches)).to_json()

  plan = await parts.process.coordinator.broadcast(None if batches is None else decide())
  return state, StepPlan.from_json(plan)


async def score_rollouts(
  process: Process,
  reward_model: RewardRole,
  state: LoopState,
  planner: Planner | None,
  batches: RolloutBatches | None,
  *,
  phases: Phases = RESIDENT,
) -> LoopState:
  """Scores the rollouts of the next batch with the trainer's reward model, in rounds, and returns
  the new state. If groups are dropped because of their scores, the engine generates new groups in
  their place, and another round scores the new groups.

  Args:
    batches: source of the batch in process 0; None in the other processes.
  """
  members: list[Experience] = []
  rendered: list[Rendered] = []

  async def unscored():
    nonlocal members, rendered
    members = await planner.unscored(batches)
    rendered = await asyncio.to_thread(reward_model.render, members)
    return {
      'uids': [member.sample.uid for member in members],
      'sequences': [tokens for tokens, _ in rendered],
    }

  async def judge(scores):
    return await batches.score(reward_model.verdicts(members, rendered, scores))

  while True:
    asked = await process.coordinator.broadcast(None if batches is None else unscored())
    if not asked['uids']:
      return state
    state = await enter(phases, Phase.REWARD, state, (REWARD_MODEL,))
    scoring = process.events.request(Edge.REWARD_PASS, count=len(asked['uids']))
    with process.stopwatch.timed('reward_model'):
      scores = await process.device.run(
        reward_model.score, state.learned.reward_model, asked['sequences']
      )
    process.events.reply(scoring)
    if not await process.coordinator.broadcast(None if batches is None else judge(scores)):
      continue
    state = await enter(phases, Phase.ROLLOUT, state)
    if batches is not None:
      batches.proceed()
