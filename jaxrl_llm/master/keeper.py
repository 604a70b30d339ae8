"""Keeper of a run: writes metrics and rollouts after each step, then evaluates and commits if due.

The keeper runs in every process. Each process writes its part of a checkpoint's arrays, and process
0 writes everything else. The content of a commit is fixed before the next update, and its files are
written while training continues. At most one commit is in progress; the next one waits for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from absl import logging

from jaxrl_llm.batching.plan import StepPlan
from jaxrl_llm.core.background import by_length, by_length_to_end, in_daemon_thread
from jaxrl_llm.core.errors import first_cause
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Json
from jaxrl_llm.core.waits import unless
from jaxrl_llm.master.batches import Batches
from jaxrl_llm.master.evaluation import Evaluator, SuiteConfig
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.master.loop import LoopState, enter, serve
from jaxrl_llm.master.mismatch import MismatchConfig
from jaxrl_llm.master.phases import RESIDENT, Phase, Phases
from jaxrl_llm.master.process import Process
from jaxrl_llm.master.records import rollout_rows, step_metrics
from jaxrl_llm.master.trainer import Batch, Stage, Updated
from jaxrl_llm.master.utilisation import utilisation
from jaxrl_llm.parallel.device import PeerFailed
from jaxrl_llm.replay.index import ReplayStore
from jaxrl_llm.rollout.publisher import Publisher
from jaxrl_llm.runtime import goodput
from jaxrl_llm.runtime.checkpoint import Checkpoints, Writing
from jaxrl_llm.runtime.events import Asked, Edge
from jaxrl_llm.runtime.log.writers import LogWriters
from jaxrl_llm.runtime.machine import fingerprint
from jaxrl_llm.runtime.progress import ProgressDisplay
from jaxrl_llm.runtime.writers import EvalsWriter, MetricsWriter, RolloutsWriter

_ABANDON_S = 60.0
"""Maximum seconds for which a failing run waits for the commit in progress."""
_WITHOUT_PEER_S = 5.0
"""Maximum seconds for which a failing run waits for a cancelled evaluation to end, and for the
commit if another process has failed. The failed process may never write its part.
"""
_WARN_EVERY = 20
"""Minimum number of steps between two warnings about the same mismatch budget (see
`MismatchConfig`).
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logs:
  """Outputs of process 0 other than checkpoints (metrics, rollouts, evaluations, progress), and the
  objects from which their data come, such as the store and the evaluator.
  """

  metrics: MetricsWriter
  rollouts: RolloutsWriter
  evals: EvalsWriter
  progress: ProgressDisplay
  store: ReplayStore
  batches: Mapping[str, Batches]
  evaluator: Evaluator
  suites: Sequence[tuple[SuiteConfig, Sequence[Task]]]
  decode: Callable[[list[int]], str]
  """Returns the text of token ids, special tokens included."""
  transcript_tokens: int | None = None
  """Maximum number of response tokens in a step's transcripts. If None, the number is unlimited. If
  0, no transcripts are written.
  """
  machine_metrics: Callable[[], dict[str, float]]
  """Returns metrics of the process itself, such as heartbeat and number of compilations."""
  peak_flops: float | None = None
  """Peak floating-point operations per second of one device; None if unknown."""
  writers: LogWriters = dataclasses.field(default_factory=LogWriters)
  """Additional writers, such as Weights & Biases, that receive each row of metrics."""
  mismatch: MismatchConfig = MismatchConfig()
  repeats_until: int = 0
  """Number of the last step that earlier attempts (starts of the run) had completed, before a crash
  undid part of their work. Steps up to this one are repetitions.
  """
  archive: Callable[[], Mapping[str, float]] | None = None
  """Archives the newest commit, and returns metrics of the archiving, keyed by name. None if the
  run has no archive.
  """
  files: Callable[[], Mapping[str, int]] = dict
  """Returns the sizes in bytes of the files that the run created and still reads, keyed by path
  relative to the run directory.
  """

  def write(self, stage: str, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Writes a row of metrics to all writers, and returns it as it was written."""
    row = self.metrics.write(stage, step, values)
    for line in self.writers.write(row):
      self.progress.note(line)
    return row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
  """Facts about this attempt (start of the run)."""

  stop: asyncio.Future
  """Future that resolves to the number of the signal that stops the run. The signal also ends a
  running evaluation.
  """
  best: tuple[float, int] | None = None
  """(accuracy, step) of the best evaluation in earlier attempts; None if there was none."""
  best_of: Json = None
  """Configuration of the suite to which `best` refers. Each commit contains it, because accuracies
  of different suites cannot be compared.
  """
  base: str | None = None
  """Digest of the frozen base weights of a policy that consists of LoRA adapters; None if the
  policy has no adapters. Commits contain the adapters, but not the base weights.
  """
  reward_model: str | None = None
  """Fingerprint of the trainer's reward model; None if the trainer has no reward model. Commits do
  not contain the model itself.
  """


async def write_step(
  logs: Logs,
  stage: Stage,
  step: int,
  batch: Batch,
  updated: Updated,
  seconds: Mapping[str, float],
  spent: Mapping[str, float],
) -> tuple[dict[str, float], dict[str, str]]:
  """Writes the metrics, rollouts and plan of a completed batch, and marks the batch as complete.

  Returns the metrics as they were written, and one warning for each exceeded mismatch budget, keyed
  by budget.

  Args:
    step: number of batches that the run has completed.
    seconds: durations of the step's parts, keyed by the name of the part. `step` and `gen` are
      required.
    spent: metrics of the time and memory that the trainer used, keyed by name.
  """
  batches = logs.batches[stage.name]
  taken = batches.taken()
  tokens = sum(row.length for row in batch.plan.rows)
  row, exceeded = await by_length(tokens, step_metrics, batch, updated, taken, logs.mismatch)
  row |= logs.machine_metrics()
  row |= {f'timing_s/{name}': value for name, value in seconds.items()}
  row['perf/time_per_step'] = seconds['step']
  row['perf/throughput'] = row['perf/total_num_tokens'] / seconds['step'] / jax.device_count()
  if taken:
    generated = sum(member.step(uid).response_len for uid, member in taken.items())
    waited = seconds['gen'] - seconds.get('update_weights', 0.0)
    row['perf/trainer_idle_s'] = waited
    # The throughput is known only if all rollouts were generated while the trainer waited. Stale
    # rollouts were generated before, at least in part.
    if row.get('staleness/max') == 0:
      row['perf/rollout_throughput'] = generated / waited
  if logs.peak_flops is not None:
    row |= utilisation(updated.work, seconds, peak_flops=logs.peak_flops * jax.device_count())
  row |= spent
  row = logs.write(stage.name, step, row | logs.writers.take_metrics())
  if taken and logs.transcript_tokens != 0:
    await by_length(tokens, _transcribe, logs, stage.name, step, batch, updated, taken)
  await by_length_to_end(tokens, _record, logs.store, batches, batch.plan)
  batches.trained(batch.plan)
  return row, exceeded


def _transcribe(
  logs: Logs,
  stage: str,
  step: int,
  batch: Batch,
  updated: Updated,
  taken: Mapping[str, Experience],
) -> None:
  rows = rollout_rows(batch, updated, taken, logs.decode, most_tokens=logs.transcript_tokens)
  logs.rollouts.write(stage, step, rows)


def _record(store: ReplayStore, batches: Batches, plan: StepPlan) -> None:
  """Records the plan of a batch, and that the batch was trained on, in one transaction."""
  row = plan.to_json()
  with store.transaction():
    store.at(plan.step).record_plan(row)
    batches.record(plan)


_Bests = Mapping[str, tuple[float, int]]


def _ranked(bests: _Bests, stage: Stage, step: int, accuracy: float | None) -> _Bests:
  """Returns `bests`, updated with the accuracy that an evaluation at `step` has measured.

  The accuracy is None if the evaluation has no result. An evaluation at the start of a stage does
  not count.
  """
  best = bests.get(stage.name)
  if accuracy is None or step == stage.start or (best is not None and accuracy <= best[0]):
    return bests
  return {**bests, stage.name: (accuracy, step)}


class _Evaluation(NamedTuple):
  """Evaluation in progress."""

  step: int
  stage: Stage
  suites: asyncio.Task[tuple[int, float | None]] | None
  """Task that runs the suites; None in the processes other than 0."""


class RunKeeper:
  """Keeper of a run: writes metrics and rollouts, runs the evaluation suites, and commits."""

  def __init__(
    self,
    process: Process,
    start: Start,
    *,
    publisher: Publisher,
    checkpoints: Checkpoints,
    logs: Logs | None,
    generates: bool,
    phases: Phases = RESIDENT,
    needed: Callable[[LoopState], Collection[int]] = lambda state: (),
    goodput_file: pathlib.Path | None = None,
  ):
    """
    Args:
      goodput_file: file to which this process appends the seconds that it spent on each activity;
        None in process 0, which writes them as metrics.
      logs: outputs of process 0; None in the other processes.
      needed: takes the state of the run, and returns the steps of the commits that later stages
        may start from.
      generates: whether the run has evaluation suites. If so, the policy is published to the engine
        before each evaluation.
    """
    self._process, self._stopwatch, self._start = process, process.stopwatch, start
    self._publisher, self._checkpoints, self._logs = publisher, checkpoints, logs
    self._generates, self._best, self._needed = generates, start.best, needed
    self._phases = phases
    self._written, self._goodput_file = time.perf_counter(), goodput_file
    self._in_flight: asyncio.Task[None] | None = None
    """Task that writes this process's part of the newest commit; None once its end has been
    awaited.
    """
    self._evaluation: _Evaluation | None = None
    """Evaluation in progress; None if there is none. Every process records the evaluation, but only
    process 0 runs it.
    """
    self._interrupted: int | None = None
    """Step of the evaluation that a signal interrupted while training continued; None if there was
    none. Later steps are not committed, so that the next start of the run repeats the evaluation.
    """
    self._write_s: dict[str, float] = {}
    """Metrics of the newest complete commit, until they are written in a row of metrics."""
    self._repeats_until = 0
    """Number of the last step that earlier attempts (starts of the run) had completed. `start` sets
    it in every process to the value of `Logs.repeats_until` in process 0.
    """
    self._warned: dict[str, int] = {}
    """Step of the last warning about each budget, keyed by budget."""

  async def start(self, state: LoopState, stage: Stage) -> LoopState:
    """Evaluates before the first step of the run, or repeats an evaluation that a signal
    interrupted.
    """
    self._repeats_until = await self._process.coordinator.broadcast(
      self._last_undone(self._logs) if self._logs is not None else None
    )
    due = state.step == 0 or (state.step > stage.start and stage.evaluation_due(state.step))
    return await self._evaluate(state, stage) if due and not state.evaluated else state

  async def after_step(
    self, state: LoopState, stage: Stage, batch: Batch, updated: Updated
  ) -> LoopState:
    """Writes the step's metrics and rollouts, then evaluates and commits if the plan says so.

    If the commit in progress has failed, raises CheckpointFailed. If an evaluation in progress has
    failed, raises the error of the evaluation.
    """
    self._raise_failed()
    seconds = self._stopwatch.take()
    before, self._written = self._written, time.perf_counter()
    spent = goodput.trainer_seconds(
      self._stopwatch.take_own(),
      self._written - before,
      is_repeated=state.step <= self._repeats_until,
    )
    with self._stopwatch.timed('record'):
      if self._logs is not None:
        taken = self._phases.take_metrics() | self._publisher.take_metrics()
        spent = {**spent, **taken, **self._write_s}
        self._write_s = {}
        await self._write(state, stage, batch, updated, seconds, spent)
      elif self._goodput_file is not None:
        goodput.append(self._goodput_file, state.step, spent)
    overlaps = batch.plan.evaluate and stage.overlap_evaluation and state.step < stage.end
    if batch.plan.evaluate or batch.plan.commit:
      state = await self.evaluated(state)
      if state.stop:
        return state
    if batch.plan.evaluate and not overlaps:
      state = await self._evaluate(state, stage)
    if batch.plan.commit:
      state = await self._commit(state, stage)
    if overlaps:
      # The evaluation begins after the commit, so that the commit contains none of its results. A
      # run that resumes from the commit then repeats the evaluation.
      state = await self._begin_evaluation(state, stage)
    return state

  def _raise_failed(self) -> None:
    """Raises the error of the evaluation or the commit in progress if it has failed."""
    suites = self._evaluation.suites if self._evaluation is not None else None
    if suites is not None and suites.done() and (error := suites.exception()) is not None:
      self._evaluation = None
      raise error
    # The task of a completed commit is kept until `_settled`, which all processes call at the same
    # point of the program.
    task = self._in_flight
    if task is not None and task.done() and (error := task.exception()) is not None:
      self._in_flight = None
      raise error

  async def leave(self, state: LoopState, stage: Stage) -> None:
    """Waits for the commit in progress, then begins a commit of the completed batches. Begins no
    commit if an existing commit contains these batches, or if the signal interrupted an earlier
    evaluation (see `_interrupted`).

    Called when a signal is about to end the process. The caller waits for the new commit with
    `settle`.
    """
    state = await self.evaluated(state)
    with self._stopwatch.timed('save_checkpoint'):
      committed = await self._settled()
    if self._interrupted is None and state.step > committed:
      await self._commit(state, stage)

  async def settle(self) -> None:
    """Waits until the commit in progress, if any, is complete. Every process must call this."""
    if self._in_flight is not None:
      with self._stopwatch.timed('save_checkpoint'):
        await self._settled()

  async def abandon(self, error: BaseException) -> None:
    """Cancels the evaluation in progress, then waits a short time for the commit in progress,
    because the run is failing with `error`. If the commit fails too, the failure is only logged.
    """
    if self._evaluation is not None and (suites := self._evaluation.suites) is not None:
      suites.cancel()
      await asyncio.wait({suites}, timeout=_WITHOUT_PEER_S)
      if suites.done() and not suites.cancelled() and (failed := suites.exception()) is not None:
        logging.warning('The evaluation in progress failed too: %s', failed)
    task, self._in_flight = self._in_flight, None
    if task is None:
      return
    limit_s = _WITHOUT_PEER_S if isinstance(first_cause(error), PeerFailed) else _ABANDON_S
    await asyncio.wait({task}, timeout=limit_s)
    if not task.done():
      logging.warning('The commit in flight did not end within %g s', limit_s)
    elif (failed := task.exception()) is not None:
      logging.warning('The commit in flight failed too: %s', failed)

  async def _write(
    self,
    state: LoopState,
    stage: Stage,
    batch: Batch,
    updated: Updated,
    seconds: Mapping[str, float],
    spent: Mapping[str, float],
  ) -> None:
    row, exceeded = await write_step(self._logs, stage, state.step, batch, updated, seconds, spent)
    self._warn(state.step, stage.name, exceeded)
    self._logs.progress.step(stage.name, state.step - stage.start, row)

  def _warn(self, step: int, stage: str, exceeded: Mapping[str, str]) -> None:
    """Warns about each exceeded mismatch budget, at most once per `_WARN_EVERY` steps."""
    for budget, line in exceeded.items():
      if step - self._warned.get(budget, -_WARN_EVERY) >= _WARN_EVERY:
        self._warned[budget] = step
        self._logs.progress.note(f'step {step} ({stage}): {line}')

  async def _evaluate(self, state: LoopState, stage: Stage) -> LoopState:
    """Publishes the policy and runs the suites on it. If a signal interrupts the evaluation, the
    returned state has the signal in `stop` and `evaluated` False.
    """
    return await self.evaluated(await self._begin_evaluation(state, stage))

  async def _begin_evaluation(self, state: LoopState, stage: Stage) -> LoopState:
    """Publishes the policy and starts the suites on it; `evaluated` waits for their results."""
    logs = self._logs
    if not self._generates or stage.algorithm.head != 'lm':  # A reward model generates nothing.
      return dataclasses.replace(state, evaluated=True)
    with self._stopwatch.timed('testing'):
      # After a signal, the policy is not published, because publishing may take a large part of the
      # time that is left before the process is killed.
      stop = await self._process.coordinator.broadcast(
        self._stop_signal() if logs is not None else None
      )
      if stop:
        return dataclasses.replace(state, stop=stop)
      state = await serve(self._publisher, self._phases, state)
      suites = None
      if logs is not None:
        suites = asyncio.create_task(self._run_suites(logs, state.step, stage), name='evaluation')
      self._evaluation = _Evaluation(state.step, stage, suites)
    return state

  @property
  def evaluating(self) -> bool:
    """Whether an evaluation is in progress while training continues."""
    return self._evaluation is not None

  async def evaluated(self, state: LoopState, *, wait: bool = True) -> LoopState:
    """Returns the state with the result of the evaluation in progress; see `Keeper.evaluated`.

    If an evaluation has ended, `evaluated` of the returned state is True only if that evaluation
    was complete and belongs to the step of `state`.
    """
    if self._evaluation is None:
      return state
    step, stage, suites = self._evaluation

    async def result() -> tuple[int, float | None] | None:
      # Wait 'evaluation': bounded: every wait in `_run_suites` has a deadline.
      return await suites if wait or suites.done() else None

    with self._stopwatch.timed('testing'):
      ended = await self._process.coordinator.broadcast(result() if suites is not None else None)
    if ended is None:
      return state
    self._evaluation, (stop, accuracy) = None, ended
    if stop and step < state.step:
      self._interrupted = step
    state = dataclasses.replace(
      state,
      bests=_ranked(state.bests, stage, step, accuracy),
      evaluated=not stop and step == state.step,
    )
    return dataclasses.replace(state, stop=stop or state.stop)

  async def _last_undone(self, logs: Logs) -> int:
    return logs.repeats_until

  async def _stop_signal(self) -> int:
    """Returns the number of the signal that ends the run, or 0 if there was none."""
    stop = self._start.stop
    return stop.result() if stop.done() else 0

  async def _run_suites(self, logs: Logs, step: int, stage: Stage) -> tuple[int, float | None]:
    """Runs all suites, and writes their results under the number `step`. Returns 0 and the greedy
    accuracy on the first suite, or 0 and None if none of its greedy completions is scorable.

    If a signal interrupts a suite, returns the signal's number and None, and writes nothing. The
    next start of the run then repeats all suites.
    """

    async def measure():
      return [(suite, *await logs.evaluator.run(suite, tasks)) for suite, tasks in logs.suites]

    measured = await unless(self._start.stop, measure())
    if measured is None:
      return self._start.stop.result(), None
    first = None
    for suite, metrics, rows in measured:
      logs.write(stage.name, step, metrics)
      logs.evals.write(stage.name, step, suite.name, rows)
      accuracy = metrics[f'val-core/{suite.taskset}/acc/greedy']
      logs.progress.note(
        f'evaluation {suite.name} at step {step} ({stage.name}): greedy accuracy {accuracy:.3f}'
      )
      if suite is logs.suites[0][0] and not math.isnan(accuracy):
        first = accuracy
        if self._best is None or accuracy > self._best[0]:
          self._best = (accuracy, step)
    return 0, first

  async def _commit(self, state: LoopState, stage: Stage) -> LoopState:
    with self._stopwatch.timed('save_checkpoint'):
      await self._settled()
      state = await enter(self._phases, Phase.COMMIT, state)
      asked = self._process.events.request(Edge.COMMIT, commit=state.step)
      writing = await self._begin(state, stage)
      self._in_flight = asyncio.create_task(self._finish(writing, asked), name='commit')
      if self._phases is not RESIDENT:
        await self._settled()  # The next phase frees arrays that the commit may still be reading.
    return state

  async def _settled(self) -> int:
    """Waits for the commit in progress, and returns the step of the newest commit, which is the
    same in every process.

    Raises CheckpointFailed if this process could not write its part.
    """
    task, self._in_flight = self._in_flight, None

    async def ended() -> int:
      if task is not None:
        await task  # Wait 'commit': bounded: every wait in `Writing.finish` has a deadline.
      return max(self._checkpoints.steps(), default=0)

    if self._logs is not None:
      # Process 0 may still be waiting. The broadcast detects processes that have died meanwhile.
      return await self._process.coordinator.broadcast(ended())
    await ended()
    return await self._process.coordinator.broadcast(None)

  async def _begin(self, state: LoopState, stage: Stage) -> Writing:
    """Copies everything that belongs to the commit, and starts writing it."""
    host: Any = None
    if self._logs is not None:
      await asyncio.to_thread(self._logs.store.flush)
      host = {
        'step': state.step,
        'stage': stage.name,
        'evaluated': state.evaluated,
        'metrics_offset': self._logs.metrics.sync(),
        'best': self._best,
        'best_of': self._start.best_of,
        'bests': dict(state.bests),
        'machine': fingerprint(),
        'batches': self._logs.batches[stage.name].state(),
        'reference_step': state.learned.reference_step,
        'algorithm_state': state.learned.algorithm_state,
        'base': self._start.base,
        'reward_model': self._start.reward_model,
        'attempt': state.attempt,
        'store': self._logs.store.name,
        'files': dict(self._logs.files()),
      }
    keep = {*self._needed(state), *([self._best[1]] if self._best else [])}
    return await self._process.device.run(
      self._checkpoints.begin, state.step, state.learned.committed(), host, keep=keep
    )

  async def _finish(self, writing: Writing, asked: Asked) -> None:
    """Waits until this process has written its part of a commit. In process 0, the commit is
    complete afterwards.
    """
    begun = time.perf_counter()
    # Wait 'commit': bounded: every wait in `Writing.finish` has a deadline.
    await in_daemon_thread(writing.finish)
    self._process.events.reply(asked)
    if self._logs is not None:
      self._write_s = {'perf/checkpoint_write_s': time.perf_counter() - begun}
      if self._logs.archive is not None:
        # Wait 'archive': bounded by `archive.deadline_s`.
        self._write_s |= await in_daemon_thread(self._logs.archive)
      self._logs.store.prune(min(self._checkpoints.steps()))
