"""Builds the parts of a run from its configuration. Only the modules of this package name the
classes that implement the parts.
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

from jaxrl_llm.app.composition.engines import build_engine
from jaxrl_llm.app.composition.prepare import Prepared
from jaxrl_llm.app.composition.scorers import build_scorers
from jaxrl_llm.app.composition.setup import Setup
from jaxrl_llm.app.composition.stages import build_processors
from jaxrl_llm.app.composition.state import begin_stage, critic_model
from jaxrl_llm.app.composition.static_rows import (
  demonstrations_file,
  held_out_file,
  static_file,
)
from jaxrl_llm.app.composition.workdir import made_files
from jaxrl_llm.app.composition.workflows import build_workflow
from jaxrl_llm.app.schema import PastConfig, Recorded, Rollouts, StageConfig
from jaxrl_llm.core.net.registry import (
  Kind,
  Lease,
  Registry,
  public_address,
  registered,
  service_name,
)
from jaxrl_llm.data.load import RowLoader
from jaxrl_llm.data.streams import RowStream, all_rows
from jaxrl_llm.master.batches import Batches, MixedBatches, Planner, RolloutBatches, StreamBatches
from jaxrl_llm.master.evaluation import Evaluator
from jaxrl_llm.master.exploring.config import ExplorerConfig
from jaxrl_llm.master.exploring.explorer import Explorer
from jaxrl_llm.master.exploring.hub import MasterHub
from jaxrl_llm.master.exploring.past import Past
from jaxrl_llm.master.exploring.runner import GroupRunner
from jaxrl_llm.master.keeper import Logs, RunKeeper, Start
from jaxrl_llm.master.loop import EnterStage, LoopState, Parts
from jaxrl_llm.master.recorded import RecordedBatches, RecordedGroups
from jaxrl_llm.master.trainer import Roles, Stage, StageTrainer
from jaxrl_llm.models import lora
from jaxrl_llm.replay.index import ReplayStore, open_store
from jaxrl_llm.rewards.pool import live
from jaxrl_llm.rewards.pool.pool import ScorerPool
from jaxrl_llm.rollout.api import Engine
from jaxrl_llm.rollout.auxiliary import AuxiliaryModel
from jaxrl_llm.rollout.explorers.arrivals import Bounds
from jaxrl_llm.rollout.explorers.crew import Crew, ExplorersConfig
from jaxrl_llm.rollout.explorers.explorer import Welcome
from jaxrl_llm.rollout.probe import Prober
from jaxrl_llm.rollout.publisher import Gatherer, Publisher
from jaxrl_llm.rollout.workflow import Workflow, completion_text, turns_of
from jaxrl_llm.runtime import history
from jaxrl_llm.runtime.events import Events
from jaxrl_llm.runtime.log.writers import open_writers
from jaxrl_llm.runtime.machine import CompilationCounter, Heartbeat, resources
from jaxrl_llm.runtime.progress import ProgressDisplay
from jaxrl_llm.runtime.writers import EvalsWriter, MetricsWriter, RolloutsWriter
from jaxrl_llm.tasks.sampler import TaskSampler


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutServices:
  """The workflow of a run, with its auxiliary models and explorer processes."""

  workflow: Workflow
  auxiliary: tuple[AuxiliaryModel, ...]
  crew: Crew | None
  """Proxy that passes the workflow's calls to explorer processes; None if the run has no
  explorers.
  """
  _started: contextlib.AsyncExitStack = dataclasses.field(default_factory=contextlib.AsyncExitStack)

  async def start(self) -> None:
    for model in self.auxiliary:
      await self._started.enter_async_context(model)
    if self.crew is not None:
      self._started.push_async_callback(self.crew.close)
      await self.crew.start()

  async def close(self) -> None:
    """Stops whatever was started, even if `start` failed half-way."""
    await self._started.aclose()

  def take_metrics(self) -> dict[str, float]:
    return self.crew.take_metrics() if self.crew is not None else {}


def build_rollouts(
  setup: Setup,
  prepared: Prepared,
  engine: Engine | None,
  scorers: ScorerPool,
  *,
  registry: Registry | None = None,
) -> RolloutServices:
  """Builds the workflow and its auxiliary models and explorers, without starting them.

  Args:
    registry: registry in which the run is announced to explorers; None if it is not announced.
  """
  rollout, tokenizer = setup.config.rollout, prepared.tokenizer
  auxiliary = {model.name: AuxiliaryModel(model) for model in rollout.auxiliary}
  hub = MasterHub(
    engine, scorers, setup.config.rewards, auxiliary=auxiliary, events=setup.process.events
  )
  # Build the workflow in this process even if explorers run it, so that an invalid workflow is
  # reported before any explorer starts.
  workflow = build_workflow(rollout.workflow, hub, tokenizer, rollout.max_response_length)
  crew = None
  if rollout.explorers is not None and engine is not None:
    welcome = Welcome(
      workflow=rollout.workflow, max_tokens=rollout.max_response_length, tokenizer=tokenizer.files
    )
    crew = Crew(
      hub,
      _with_key(rollout.explorers, registry),
      welcome=welcome.row(),
      text=workflow.text,
      turns=functools.partial(turns_of, tokenizer),
      bounds=Bounds(vocab_size=prepared.spec.vocab_size, max_length=rollout.max_length),
      logs=setup.workdir.absolute() / 'logs',
      command=setup.explorer_command,
      announce=None
      if registry is None
      else functools.partial(_announced, registry, setup.config.name),
    )
  return RolloutServices(workflow=crew or workflow, auxiliary=tuple(auxiliary.values()), crew=crew)


def _with_key(config: ExplorersConfig, registry: Registry | None) -> ExplorersConfig:
  """Sets the token of the server for explorers to the registry's key, unless the configuration
  names a token file. Returns the resulting configuration.
  """
  listen = config.listen
  if registry is None or listen is None or listen.token_file is not None:
    return config
  listen = dataclasses.replace(listen, token_file=str(registry.key_file))
  return dataclasses.replace(config, listen=listen)


def _announced(
  registry: Registry, name: str, address: str
) -> contextlib.AbstractAsyncContextManager[None]:
  """Returns a context manager during whose block the run is announced to explorers at `address`."""
  lease = Lease(kind=Kind.MASTER, name=service_name(name), address=public_address(address))
  return registered(registry, lease)


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
  """Opens process 0's logs, store, engine and scorers, and restores the state of a commit.

  Args:
    committed: host state of the commit, which is everything in it except arrays, such as the
      position in the data; None if there is no commit yet.
  """
  config, workdir, process = setup.config, setup.workdir, setup.process
  store = open_store(workdir / 'replay', max_uses=config.max_uses, synchronous='normal')
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


class _Services(NamedTuple):
  """Services of process 0 that collect, measure and log batches."""

  store: ReplayStore
  engine: Engine | None
  scorers: ScorerPool
  rollouts: RolloutServices
  heartbeat: Heartbeat


def _open_logs(setup: Setup, prepared: Prepared, committed: Any, services: _Services) -> Logs:
  """Opens the logs as of the commit, builds the sources of batches, and restores the position in
  the data.
  """
  config, workdir, stages, events = setup.config, setup.workdir, setup.stages, setup.process.events
  workflow, scorers = services.rollouts.workflow, services.scorers
  step = committed['step'] if committed else 0
  metrics = MetricsWriter(workdir, committed=committed['metrics_offset'] if committed else 0)
  rollouts, evals = RolloutsWriter(workdir), EvalsWriter(workdir)
  begun = {stage.name: min(step, stage.end) for stage in stages if committed and stage.start < step}
  rollouts.discard_later(begun)
  evals.discard_later(begun)

  def runner(explorer_config: ExplorerConfig) -> GroupRunner:
    return GroupRunner(explorer_config, workflow=workflow, scorers=scorers, events=events)

  batches = {
    stage.name: _batches(setup, prepared, stage, services.store, runner)
    for stage in stages
    if stage.end > step
  }
  if committed and committed['batches'] is not None and committed['stage'] in batches:
    batches[committed['stage']].restore(committed['batches'])
  explorers = [source.explorer for source in batches.values() if isinstance(source, RolloutBatches)]
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
      deadline_s=config.rollout.collect_deadline_s,
      events=events,
    ),
    suites=prepared.suites,
    token_text=prepared.tokenizer.token_text,
    machine_metrics=_machine_metrics(workdir, explorers, services),
    writers=open_writers(config.logging, workdir, name=config.name),
    mismatch=config.rollout.mismatch,
    repeats_until=services.store.undone_until(),
    files=made_files(workdir),
  )


def _machine_metrics(
  workdir: pathlib.Path, explorers: Sequence[Explorer], services: _Services
) -> Callable[[], dict[str, float]]:
  """Returns a function that returns metrics of process 0 and its services since the previous
  call.
  """
  compilations, engine, scorers = CompilationCounter(), services.engine, services.scorers

  def take() -> dict[str, float]:
    return {
      'perf/compilations': compilations.take(),
      'perf/heartbeat_max_s': services.heartbeat.take(),
      'perf/rollout_idle_s': sum(explorer.take_idle() for explorer in explorers),
      'timing_s/reward': sum(explorer.take_scoring() for explorer in explorers),
      **_tokens(explorers),
      **resources(workdir),
      'run/clock_decisions': scorers.counts['timeout']
      + sum(explorer.clock_decisions for explorer in explorers),
      **scorers.take_metrics(),
      **(engine.take_metrics() if engine is not None else {}),
      **services.rollouts.take_metrics(),
    }

  return take


def _tokens(explorers: Sequence[Explorer]) -> dict[str, float]:
  """Returns the ledger of the sampled tokens since the previous call, over all stages."""
  ledgers = [explorer.take_tokens() for explorer in explorers]
  total = sum(map(collections.Counter, ledgers), collections.Counter())
  return {f'goodput/tokens/{name}': float(total[name]) for ledger in ledgers[:1] for name in ledger}


def recover(store: ReplayStore, committed: Any, *, ends: Mapping[str, int]) -> None:
  """Restores the store to its state at a commit, and drops samples that no batch will train on.

  Samples in flight are dropped if the commit is now the last one of its stage, because the stage's
  number of steps was lowered, or if the run is a branch that does not continue at its parent's
  position in the data.

  Args:
    committed: host state of the commit, which is everything in it except arrays; None if there is
      no commit.
    ends: last step of each stage, keyed by name.
  """
  step = committed['step'] if committed else 0
  store.recover(step)
  if committed and (committed['batches'] is None or ends[committed['stage']] <= step):
    store.at(step).drop([entry.uid for entry in store.live()], 'left behind')


def _batches(
  setup: Setup,
  prepared: Prepared,
  stage: Stage,
  store: ReplayStore,
  runner: Callable[[ExplorerConfig], GroupRunner],
) -> Batches:
  config, workdir, events, seed = (
    setup.config,
    setup.workdir,
    setup.process.events,
    setup.config.seed,
  )
  stage_config = next(configured for configured in config.stages if configured.name == stage.name)
  source = stage_config.source
  if isinstance(source, Recorded):
    groups = recorded_groups(workdir, stage_config, prepared)
    return RecordedBatches(groups, count=source.groups_per_batch, seed=seed, events=events)
  if not isinstance(source, Rollouts):
    stream = RowStream(
      workdir, static_file(stage_config), rows=source.sequences, seed=seed, unit=source.unit
    )
    measured = held_out_file(stage_config)
    held_out = all_rows(workdir, measured) if measured is not None else ()
    return StreamBatches(stream, held_out, events=events)
  tasksets = [prepared.tasksets[name] for name in source.tasksets]
  explorer_config = ExplorerConfig(
    stage=stage.name,
    restarted=_restarted(workdir),
    earlier=tuple(before.name for before in config.stages[: config.stages.index(stage_config)]),
    first_step=stage.start,
    groups_per_batch=source.groups_per_batch,
    group_size=source.group_size,
    bound=source.bound,
    batch_policy=source.batch_policy,
    batches=stage_config.steps,
    sampling=config.rollout.sampling(source.temperature),
    selection=source.selection,
    processors=build_processors(source.processors),
    past=_past(stage.name, source.past, seed),
    partial=config.rollout.partial,
    max_dropped_groups=source.max_dropped_groups,
    limits=source.limits,
    collect_deadline_s=config.rollout.collect_deadline_s,
  )
  explorer = Explorer(
    explorer_config,
    runner(explorer_config),
    sampler=TaskSampler(tasksets, source.sampler, seed=seed),
    store=store,
    events=events,
  )
  if source.experts is None:
    return RolloutBatches(explorer, trains=stage.trains)
  stream = RowStream(workdir, demonstrations_file(stage.name), rows=source.expert_rows, seed=seed)
  return MixedBatches(explorer, StreamBatches(stream, events=events))


def _restarted(workdir: pathlib.Path) -> int:
  """Returns the step at which the run last branched with --reset_data; 0 if it never did."""
  return max(
    (
      entry.parent.step
      for entry in history.read(workdir)
      if entry.parent is not None and 'data' in entry.parent.reset
    ),
    default=0,
  )


def _past(stage: str, past: PastConfig | None, seed: int) -> Past | None:
  if past is None:
    return None
  return Past(stage=stage, groups=past.groups, max_uses=past.max_uses, config=past.draw, seed=seed)


def recorded_groups(
  workdir: pathlib.Path, stage: StageConfig, prepared: Prepared
) -> RecordedGroups:
  """Opens the file with the groups that were copied from another run for this stage."""
  tasks = {
    task.uid: task for name in stage.source.tasksets for task in prepared.tasksets[name].tasks
  }

  def text(sample):
    return completion_text(
      prepared.tokenizer, sample.tokens[sample.prompt_len :], sample.finish_reason
    )

  return RecordedGroups(workdir, static_file(stage), tasks=tasks, text=text)


def build_publisher(setup: Setup, engine: Engine | None) -> Publisher:
  """Builds the publisher that sends the parameters of all processes to process 0's `engine`."""
  config, model, process = setup.config, setup.model, setup.process
  spec = config.rollout.engine_spec()
  apart = config.policy.lora is not None and spec.adapters
  return Publisher(
    engine,
    Gatherer(process.mesh, None if apart else config.policy.lora),
    process.device,
    prober=Prober(model, process.mesh, max_length=config.rollout.max_length)
    if spec.served
    else None,
    changing=(lambda params: lora.split(params, model.spec, model.options)[0])
    if apart
    else lambda params: params,
    events=process.events,
  )


def stage_entrance(setup: Setup) -> EnterStage:
  """Returns a function that enters a stage. It builds the stage's trainer and, if the stage has no
  completed step, initialises the stage's state.
  """
  process, critic = setup.process, critic_model(setup.model)
  loader = RowLoader(setup.workdir, process.mesh)

  async def enter_stage(stage: Stage, state: LoopState) -> tuple[StageTrainer, LoopState]:
    if state.step == stage.start:
      state = await process.device.run(
        begin_stage, stage, setup.config, state, process.mesh, critic
      )
    has_critic = stage.algorithm.critic_loss is not None
    roles = Roles(setup.model, critic if has_critic else None)
    return StageTrainer(stage, process, roles=roles, loader=loader, learned=state.learned), state

  return enter_stage


def build_parts(setup: Setup, start: Start, resources: Resources | None) -> Parts:
  """Builds the parts of the main loop. `resources` is None in all processes except process 0."""
  config = setup.config
  publisher = build_publisher(setup, resources.engine if resources else None)
  return Parts(
    stages=setup.stages,
    process=setup.process,
    publisher=publisher,
    keeper=RunKeeper(
      setup.process,
      start,
      publisher=publisher,
      checkpoints=setup.checkpoints,
      logs=resources.logs if resources else None,
      generates=bool(config.evaluation),
    ),
    enter_stage=stage_entrance(setup),
    planner=Planner(
      seed=config.seed,
      every_steps=config.checkpoint.every_steps,
      every_minutes=config.checkpoint.every_minutes,
      stop=start.stop,
    ),
    batches=dict(resources.logs.batches) if resources else {},
    attempt=start.attempt,
  )
