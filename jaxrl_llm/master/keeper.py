"""Keeper of a run: writes metrics and rollouts after each step, then evaluates and commits if due.

The keeper runs in every process. Each process writes its part of a checkpoint's arrays, and process
0 writes everything else.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Json
from jaxrl_llm.core.waits import unless
from jaxrl_llm.master.batches import Batches
from jaxrl_llm.master.evaluation import Evaluator, SuiteConfig
from jaxrl_llm.master.loop import LoopState, publish
from jaxrl_llm.master.mismatch import MismatchConfig
from jaxrl_llm.master.process import Process
from jaxrl_llm.master.records import rollout_rows, step_metrics
from jaxrl_llm.master.trainer import Batch, Stage, Updated
from jaxrl_llm.replay.index import ReplayStore
from jaxrl_llm.rollout.publisher import Publisher
from jaxrl_llm.runtime import goodput
from jaxrl_llm.runtime.checkpoint import Checkpoints
from jaxrl_llm.runtime.events import Edge
from jaxrl_llm.runtime.log.writers import LogWriters
from jaxrl_llm.runtime.machine import fingerprint
from jaxrl_llm.runtime.progress import ProgressDisplay
from jaxrl_llm.runtime.writers import EvalsWriter, MetricsWriter, RolloutsWriter

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
  token_text: Callable[[int], str]
  machine_metrics: Callable[[], dict[str, float]]
  """Returns metrics of the process itself, such as its heartbeat and its number of compilations."""
  writers: LogWriters = dataclasses.field(default_factory=LogWriters)
  """Other writers, such as Weights & Biases, that get a copy of each row of metrics."""
  mismatch: MismatchConfig = MismatchConfig()
  repeats_until: int = 0
  """Number of the last step that earlier attempts (starts of the run) had completed, before a crash
  undid part of their work. Steps up to this one are repetitions.
  """
  files: Mapping[str, int] = dataclasses.field(default_factory=dict)
  """Sizes in bytes of the files that the run created and still reads, keyed by path relative to the
  run directory.
  """

  def write(self, stage: str, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Writes a row of metrics and its copies, and returns it as it was written."""
    row = self.metrics.write(stage, step, values)
    for line in self.writers.write(row):
      self.progress.note(line)
    return row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
  """Facts about this attempt (start of the run)."""

  attempt: int
  """Number of this attempt, larger than the numbers of earlier ones."""
  stop: asyncio.Future
  """Future that resolves to the number of the signal that stops the run. A running evaluation is
  then abandoned.
  """
  best: tuple[float, int] | None = None
  """(accuracy, step) of the best evaluation in earlier attempts; None if there was none."""
  best_of: Json = None
  """Configuration of the suite that `best` measures. Each commit contains it, because accuracies of
  different suites cannot be compared.
  """
  base: str | None = None
  """Digest of the frozen base weights of a policy that consists of LoRA adapters; None if the
  policy has no adapters. Commits contain the adapters, but not the base weights.
  """


def write_step(
  logs: Logs,
  stage: Stage,
  step: int,
  batch: Batch,
  updated: Updated,
  seconds: Mapping[str, float],
  elapsed_s: float,
) -> tuple[dict[str, float], dict[str, str]]:
  """Writes the metrics, rollouts and plan of a completed batch, and marks the batch as complete.

  Returns the metrics as they were written, and one warning for each exceeded mismatch budget, keyed
  by budget.

  Args:
    step: number of batches that the run has completed.
    seconds: durations of the step's parts, keyed by the name of the part. `step` and `gen` are
      required.
    elapsed_s: seconds since the previous row of metrics.
  """
  batches = logs.batches[stage.name]
  taken = batches.taken()
  row, exceeded = step_metrics(batch, updated, taken, logs.mismatch)
  row |= logs.machine_metrics()
  row |= {f'timing_s/{name}': value for name, value in seconds.items()}
  row['perf/time_per_step'] = seconds['step']
  row['perf/throughput'] = row['perf/total_num_tokens'] / seconds['step'] / jax.device_count()
  if taken:
    generated = sum(member.sample.response_len for member in taken.values())
    waited = seconds['gen'] - seconds.get('update_weights', 0.0)
    row['perf/trainer_idle_s'] = waited
    # The throughput is known only if all rollouts were generated while the trainer waited. Stale
    # rollouts were generated before, at least in part.
    if row.get('staleness/max') == 0:
      row['perf/rollout_throughput'] = generated / waited
  is_repeated = step <= logs.repeats_until
  row |= _goodput(row, elapsed_s, explores=batches.explores, is_repeated=is_repeated)
  row = logs.write(stage.name, step, row | logs.writers.take_metrics())
  if taken:
    logs.rollouts.write(stage.name, step, rollout_rows(batch, updated, taken, logs.token_text))
  with logs.store.transaction():
    logs.store.at(batch.plan.step).record_plan(batch.plan.to_json())
    batches.trained(batch.plan)
  return row, exceeded


def _goodput(
  row: Mapping[str, float], elapsed_s: float, *, explores: bool, is_repeated: bool
) -> dict[str, float]:
  """Returns metrics that say for what the trainer and the servers used the time since the previous
  row of metrics.

  Args:
    row: the other metrics of this row.
    elapsed_s: seconds since the previous row.
    explores: whether the batches of the stage consist of the policy's own rollouts. If not, servers
      are idle except for publications and evaluations.
    is_repeated: whether an earlier attempt had completed the step, and a crash undid it.
  """
  parts = {
    name.removeprefix('timing_s/'): value for name, value in row.items() if 'timing_s/' in name
  }
  # Only an engine with servers reports their number, which is 0 while none serves.
  samples_itself = explores and 'run/engines_serving' not in row
  ledgers = {
    'trainer': goodput.trainer_seconds(
      parts, elapsed_s, samples_itself=samples_itself, is_repeated=is_repeated
    )
  }
  if servers := int(row.get('run/engines_serving', 0)):
    ledgers['servers'] = goodput.server_seconds(
      servers,
      elapsed_s,
      idle_s=row['perf/rollout_idle_s'] if explores else elapsed_s,
      pause_s=row.get('perf/publish_pause_s', 0.0),
      evaluate_s=parts.get('testing', 0.0),
    )
  return {
    f'{goodput.PREFIX}{process}/{name}': value
    for process, ledger in ledgers.items()
    for name, value in ledger.items()
  }


class RunKeeper:
  """Implements `Keeper` for a run."""

  def __init__(
    self,
    process: Process,
    start: Start,
    *,
    publisher: Publisher,
    checkpoints: Checkpoints,
    logs: Logs | None,
    generates: bool,
  ):
    """
    Args:
      logs: outputs of process 0; None in the other processes.
      generates: whether the run has evaluation suites. If so, the policy is published to the engine
        before each evaluation.
    """
    self._process, self._stopwatch, self._start = process, process.stopwatch, start
    self._publisher, self._checkpoints, self._logs = publisher, checkpoints, logs
    self._generates, self._best = generates, start.best
    self._written = time.perf_counter()
    self._warned: dict[str, int] = {}
    """Step of the last warning, keyed by budget."""

  async def start(self, state: LoopState, stage: Stage) -> LoopState:
    """Evaluates before the first step of the run, or repeats an evaluation that a signal
    interrupted.
    """
    due = state.step == 0 or (state.step > stage.start and stage.evaluation_due(state.step))
    return await self._evaluate(state, stage) if due and not state.evaluated else state

  async def after_step(
    self, state: LoopState, stage: Stage, batch: Batch, updated: Updated
  ) -> LoopState:
    """Writes the step's metrics and rollouts, then evaluates and commits if the plan says so."""
    seconds = self._stopwatch.take()
    if self._logs is not None:
      self._write(state, stage, batch, updated, seconds)
    if batch.plan.evaluate:
      state = await self._evaluate(state, stage)
    if batch.plan.commit:
      await self._commit(state, stage)
    return state

  async def leave(self, state: LoopState, stage: Stage) -> None:
    """Commits the completed batches if no commit contains them yet. It is called when a signal is
    about to end the process.
    """
    if state.step not in self._checkpoints.steps() and state.step > 0:
      await self._commit(state, stage)

  def _write(
    self, state: LoopState, stage: Stage, batch: Batch, updated: Updated, seconds: dict[str, float]
  ) -> None:
    before, self._written = self._written, time.perf_counter()
    elapsed_s = self._written - before
    row, exceeded = write_step(self._logs, stage, state.step, batch, updated, seconds, elapsed_s)
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
    logs = self._logs
    if not self._generates:
      return dataclasses.replace(state, evaluated=True)
    with self._stopwatch.timed('testing'):
      # After a signal, the policy is not published, because publishing may take a large part of the
      # time that is left before the process is killed.
      coordinator = self._process.coordinator
      if stop := await coordinator.broadcast(self._stop_signal() if logs is not None else None):
        return dataclasses.replace(state, stop=stop)
      await publish(self._publisher, state, self._start.attempt)
      stop = await coordinator.broadcast(
        self._run_suites(logs, state, stage) if logs is not None else None
      )
    return dataclasses.replace(state, evaluated=not stop, stop=stop)

  async def _stop_signal(self) -> int:
    """Returns the number of the signal that ends the run, or 0 if there was none."""
    stop = self._start.stop
    return stop.result() if stop.done() else 0

  async def _run_suites(self, logs: Logs, state: LoopState, stage: Stage) -> int:
    """Runs all suites, writes their results and returns 0.

    If a signal interrupts a suite, returns the signal's number and writes nothing. The next start
    of the run then repeats all suites.
    """

    async def measure():
      return [(suite, *await logs.evaluator.run(suite, tasks)) for suite, tasks in logs.suites]

    measured = await unless(self._start.stop, measure())
    if measured is None:
      return self._start.stop.result()
    for suite, metrics, rows in measured:
      logs.write(stage.name, state.step, metrics)
      logs.evals.write(stage.name, state.step, suite.name, rows)
      accuracy = metrics[f'val-core/{suite.taskset}/acc/greedy']
      logs.progress.note(
        f'evaluation {suite.name} at step {state.step} ({stage.name}): greedy accuracy '
        f'{accuracy:.3f}'
      )
      # The comparison is False if no completion is scorable, since the accuracy is then NaN.
      if suite is logs.suites[0][0] and accuracy > (self._best[0] if self._best else -math.inf):
        self._best = (accuracy, state.step)
    return 0

  async def _commit(self, state: LoopState, stage: Stage) -> None:
    host: Any = None
    asked = self._process.events.request(Edge.COMMIT, commit=state.step)
    if self._logs is not None:
      self._logs.store.flush()
      host = {
        'step': state.step,
        'stage': stage.name,
        'evaluated': state.evaluated,
        'metrics_offset': self._logs.metrics.sync(),
        'best': self._best,
        'best_of': self._start.best_of,
        'machine': fingerprint(),
        'batches': self._logs.batches[stage.name].state(),
        'reference_step': state.learned.reference_step,
        'algorithm_state': state.learned.algorithm_state,
        'base': self._start.base,
        'attempt': self._start.attempt,
        'store': self._logs.store.name,
        'files': dict(self._logs.files),
      }
    best = self._best[1] if self._best else None
    with self._stopwatch.timed('save_checkpoint'):
      await self._process.device.run(
        self._checkpoints.save, state.step, state.learned.committed(), host, best=best
      )
    self._process.events.reply(asked)
    if self._logs is not None:
      self._logs.store.prune(min(self._checkpoints.steps()))
