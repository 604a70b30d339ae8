"""Opens the resources of process 0, such as engine, scorers, store and logs. Only this package
chooses the classes that implement them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxrl_llm.app.composition.archiving import archiver
from jaxrl_llm.app.composition.batch_sources import build_batches, forget_later_rows
from jaxrl_llm.app.composition.engines import build_engine
from jaxrl_llm.app.composition.prepare import Prepared
from jaxrl_llm.app.composition.rollouts import RolloutServices, build_rollouts
from jaxrl_llm.app.composition.scorers import build_scorers
from jaxrl_llm.app.composition.setup import Setup
from jaxrl_llm.app.composition.workdir import made_files
from jaxrl_llm.core.process_clock import TOKENS, seconds_metrics
from jaxrl_llm.master.batches import (
  RolloutBatches,
)
from jaxrl_llm.master.evaluation import Evaluator
from jaxrl_llm.master.exploring.config import ExplorerConfig
from jaxrl_llm.master.exploring.explorer import Explorer
from jaxrl_llm.master.exploring.runner import GroupRunner
from jaxrl_llm.master.following import FollowedBatches
from jaxrl_llm.master.keeper import Logs
from jaxrl_llm.master.sharing import SharingBatches
from jaxrl_llm.parallel.topology import chip_of
from jaxrl_llm.replay.index import ReplayStore, open_store
from jaxrl_llm.replay.shared import Opening, vocabulary_digest, write_opening
from jaxrl_llm.rewards.pool import live
from jaxrl_llm.rewards.pool.pool import ScorerPool
from jaxrl_llm.rollout.api import Engine
from jaxrl_llm.runtime import goodput
from jaxrl_llm.runtime.events import Events
from jaxrl_llm.runtime.log.config import LoggingConfig
from jaxrl_llm.runtime.log.writers import open_writers
from jaxrl_llm.runtime.machine import CompilationCounter, Heartbeat, resources
from jaxrl_llm.runtime.progress import ProgressDisplay
from jaxrl_llm.runtime.writers import EvalsWriter, MetricsWriter, RolloutsWriter
from jaxrl_llm.tasks.sampler import order_digest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
  """Resources that only process 0 has, such as the engine, the scorers and the logs.
  `open_resources` opens them.
  """

  events: Events
  engine: Engine | None
  """Rollout engine; None if no stage or evaluation generates completions."""
  scorers: ScorerPool
  rollouts: RolloutServices
  logs: Logs
  heartbeat: Heartbeat

  async def start(self) -> None:
    async with asyncio.TaskGroup() as starts:
      starts.create_task(self.scorers.start())
      starts.create_task(self.rollouts.start())
      if self.engine is not None:
        starts.create_task(self.engine.start())

  async def close(self) -> None:
    """Closes everything, even if `start` failed half-way."""
    async with contextlib.AsyncExitStack() as rest:
      for part in (self.events, self.logs.store, self.logs.metrics):
        rest.callback(part.close)
      rest.push_async_callback(self.logs.writers.close)
      rest.push_async_callback(self.scorers.close)
      if self.engine is not None:
        rest.push_async_callback(self.engine.close)
      rest.push_async_callback(self.rollouts.close)


def open_resources(setup: Setup, prepared: Prepared, committed: Any) -> Resources:
  """Opens the logs, store, engine and scorers of process 0, and restores the state of a commit.

  Args:
    committed: host state of the commit, which is everything in it except arrays, such as the
      position in the data; None if there is no commit yet.
  """
  config, workdir, process = setup.config, setup.workdir, setup.process
  store = open_store(workdir / 'replay', max_uses=config.max_uses, synchronous='normal')
  _open_shared(setup, prepared, store, committed['step'] if committed else 0)
  recover(store, committed, ends={stage.name: stage.end for stage in setup.stages})
  registry, engine = setup.registry, None
  if config.generates:
    engine = build_engine(
      config, workdir, prepared, process.device, registry=registry, events=process.events
    )
  built = build_scorers(config.rewards, registry)
  scorers = ScorerPool(built, config.rewards, live=workdir / live.FILE, registry=registry)
  rollouts = build_rollouts(setup, prepared, engine, scorers, registry=registry)
  services = _Services(store, engine, scorers, rollouts, Heartbeat())
  return Resources(
    events=process.events,
    engine=engine,
    scorers=scorers,
    rollouts=rollouts,
    logs=_open_logs(setup, prepared, committed, services),
    heartbeat=services.heartbeat,
  )


def _open_shared(setup: Setup, prepared: Prepared, store: ReplayStore, step: int) -> None:
  """Writes the opening of this start of the run (`Opening`), which contains the step at which the
  run continues. Another run, which trains on the rollouts of this run, reads the opening.

  Does nothing if no stage generates rollouts for another run.
  """
  for stage, stage_config in zip(setup.stages, setup.config.stages, strict=True):
    if stage.follows:
      source = stage_config.source
      tasksets = [prepared.tasksets[name] for name in source.tasksets]
      opening = Opening(
        store=store.name,
        attempt=store.attempt,
        step=max(step, stage.start),
        vocabulary=vocabulary_digest(prepared.tokenizer.vocabulary),
        seed=setup.config.seed,
        share=source.share,
        tasks=order_digest(tasksets, source.sampler),
      )
      write_opening(store.directory, opening)


class _Services(NamedTuple):
  """Services of process 0 that collect, measure and log batches."""

  store: ReplayStore
  engine: Engine | None
  scorers: ScorerPool
  rollouts: RolloutServices
  heartbeat: Heartbeat


def _open_logs(setup: Setup, prepared: Prepared, committed: Any, services: _Services) -> Logs:
  """Opens the logs, without entries that are later than the commit. Also builds the sources of
  batches, and restores the position in the data.
  """
  config, workdir, stages, events = setup.config, setup.workdir, setup.stages, setup.process.events
  workflow, scorers = services.rollouts.workflow, services.scorers
  step = committed['step'] if committed else 0
  metrics = MetricsWriter(workdir, committed=committed['metrics_offset'] if committed else 0)
  rollouts, evals = RolloutsWriter(workdir), EvalsWriter(workdir)
  begun = {stage.name: min(step, stage.end) for stage in stages if committed and stage.start < step}
  rollouts.discard_later(begun)
  evals.discard_later(begun)
  goodput.discard_later(workdir, step)

  def runner(explorer_config: ExplorerConfig) -> GroupRunner:
    chosen = scorers.with_config(config.rewards_of(explorer_config.stage))
    return GroupRunner(
      explorer_config,
      workflow=workflow,
      scorers=chosen,
      events=events,
      take_tokens=services.rollouts.hub.take_tokens,
      partials=services.rollouts.hub.partials,
      may_repeat=services.rollouts.crew is not None,
    )

  forget_later_rows(setup, step)
  batches = {
    stage.name: build_batches(setup, prepared, stage, services.store, runner)
    for stage in stages
    if stage.end > step
  }
  if committed and committed['batches'] is not None and committed['stage'] in batches:
    batches[committed['stage']].restore(committed['batches'])
  explorers = [source.explorer for source in batches.values() if isinstance(source, RolloutBatches)]
  exchanging = [
    source for source in batches.values() if isinstance(source, SharingBatches | FollowedBatches)
  ]
  return Logs(
    metrics=metrics,
    rollouts=rollouts,
    evals=evals,
    progress=ProgressDisplay({stage.name: stage.end - stage.start for stage in stages}),
    store=services.store,
    batches=batches,
    evaluator=Evaluator(
      workflow=workflow,
      scorers=scorers,
      rewards=config.rewards,
      max_steps=config.rollout.max_steps,
      deadline_s=config.rollout.collect_deadline_s,
      events=events,
      take_tokens=services.rollouts.hub.take_tokens,
    ),
    suites=prepared.suites,
    decode=functools.partial(prepared.tokenizer.decode, skip_special=False),
    machine_metrics=_machine_metrics(workdir, explorers, exchanging, services),
    peak_flops=_peak_flops(config.logging),
    writers=open_writers(config.logging, workdir, name=config.name),
    transcript_tokens=config.logging.transcript_tokens,
    mismatch=config.rollout.mismatch,
    repeats_until=services.store.undone_until(),
    files=functools.partial(made_files, workdir),
    archive=archiver(setup.archive, workdir, setup.checkpoints) if setup.archive else None,
  )


def _peak_flops(config: LoggingConfig) -> float | None:
  """Returns the peak speed of one device in floating-point operations per second; None if it is
  unknown.
  """
  if config.peak_tflops is not None:
    return config.peak_tflops * 1e12
  chip = chip_of(jax.devices()[0].device_kind)
  return chip.peak_flops if chip else None


def _machine_metrics(
  workdir: pathlib.Path,
  explorers: Sequence[Explorer],
  exchanging: Sequence[SharingBatches | FollowedBatches],
  services: _Services,
) -> Callable[[], dict[str, float]]:
  """Returns a function that returns metrics of process 0 and its services since the previous
  call.
  """
  compilations, engine, scorers = CompilationCounter(), services.engine, services.scorers

  def take() -> dict[str, float]:
    of_engine = engine.take_metrics() if engine is not None else {}
    tokens = collections.Counter(_tokens(explorers))
    if engine is not None:
      tokens.update(services.rollouts.hub.take_metrics())
    tokens.update({key: of_engine.pop(key) for key in [*of_engine] if key.startswith(TOKENS)})
    return {
      'perf/compilations': compilations.take(),
      'perf/heartbeat_max_s': services.heartbeat.take(),
      'perf/rollout_idle_s': sum(explorer.take_idle() for explorer in explorers),
      'timing_s/reward': sum(explorer.take_scoring() for explorer in explorers),
      **tokens,
      **resources(workdir),
      'run/clock_decisions': scorers.counts['timeout']
      + sum(explorer.clock_decisions for explorer in explorers)
      + sum(source.clock_decisions for source in exchanging),
      **scorers.take_metrics(),
      **seconds_metrics('scorers', [scorers.clock]),
      **of_engine,
      **services.rollouts.take_metrics(),
    }

  return take


def _tokens(explorers: Sequence[Explorer]) -> dict[str, float]:
  """Returns the numbers of tokens sampled since the previous call, keyed by outcome (such as
  trained or dropped) and summed over all stages.
  """
  ledgers = [explorer.take_tokens() for explorer in explorers]
  total = sum(map(collections.Counter, ledgers), collections.Counter())
  return {f'{TOKENS}{name}': float(total[name]) for ledger in ledgers[:1] for name in ledger}


def recover(store: ReplayStore, committed: Any, *, ends: Mapping[str, int]) -> None:
  """Restores the store to its state at a commit, and drops samples that no batch will train on.

  Samples in flight are dropped if the commit is the last one of its stage, for example because the
  stage's number of steps was lowered. They are also dropped if the run is a branch that does not
  continue at its parent's position in the data.

  Args:
    committed: host state of the commit, which is everything in it except arrays; None if there is
      no commit.
    ends: last step of each stage, keyed by name.
  """
  step = committed['step'] if committed else 0
  continues = committed is None or committed['batches'] is not None
  store.recover(step, keep_waiting=continues)
  if committed and (not continues or ends[committed['stage']] <= step):
    # In a stage with `rollout_only`, samples of completed batches remain 'admitted'. They must not
    # be dropped.
    of_batches = {uid for group in store.sealed() for uid in group}
    # Do not drop samples of a later stage, which began after the commit and may wait for delayed
    # rewards.
    stage = f'{committed["stage"]}/' if continues else ''
    behind = [
      entry.uid
      for entry in store.live()
      if entry.uid not in of_batches and entry.uid.startswith(stage)
    ]
    store.at(step).drop(behind, 'left behind')
