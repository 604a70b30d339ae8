"""A complete run: set-up, resume, loop, export and report. Every process of a job runs this
code.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from absl import logging
from rich.console import Console

from jaxrl_llm.app.composition.archiving import archiver
from jaxrl_llm.app.composition.automatic import open_fields, values_of, with_sized, with_values
from jaxrl_llm.app.composition.branch import Branch, Fork
from jaxrl_llm.app.composition.branch import make as make_branch
from jaxrl_llm.app.composition.choices import write_choices
from jaxrl_llm.app.composition.chosen import kept_choices, settle
from jaxrl_llm.app.composition.engines import engine_setting
from jaxrl_llm.app.composition.exporting import export_models
from jaxrl_llm.app.composition.loop_parts import build_parts, image_dtype
from jaxrl_llm.app.composition.prepare import Prepared, prepare
from jaxrl_llm.app.composition.resources import Resources, open_resources
from jaxrl_llm.app.composition.reward_role import build_reward_model
from jaxrl_llm.app.composition.setup import Setup
from jaxrl_llm.app.composition.stages import build_stages, model_spec, policy_options
from jaxrl_llm.app.composition.state import (
  committed_bests,
  committed_state,
  critic_model,
  first_suite,
)
from jaxrl_llm.app.composition.workdir import Workdir
from jaxrl_llm.app.dry_run.compiled import held_table
from jaxrl_llm.app.dry_run.memory_plan import Search, Target
from jaxrl_llm.app.dry_run.programs import held
from jaxrl_llm.app.planning import agreed, check_kernel
from jaxrl_llm.app.schema import Config
from jaxrl_llm.app.serve import explorer
from jaxrl_llm.app.stopping import Stopping
from jaxrl_llm.app.summary import print_summary
from jaxrl_llm.config.values import to_json
from jaxrl_llm.core import garbage
from jaxrl_llm.core.errors import first_cause
from jaxrl_llm.core.net.registry import Registry
from jaxrl_llm.core.process.xla_flags import added_flags
from jaxrl_llm.core.types import Json
from jaxrl_llm.learner.state import Learned
from jaxrl_llm.master import loop
from jaxrl_llm.master.keeper import Start
from jaxrl_llm.master.loop import LoopState, Outcome
from jaxrl_llm.master.phases import Phase
from jaxrl_llm.master.process import Process
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.spec import ModelSpec, RopeScaling
from jaxrl_llm.parallel.coordination import grace_of
from jaxrl_llm.parallel.coordinator import Coordinator
from jaxrl_llm.parallel.device import DeviceThread, PeerFailed
from jaxrl_llm.parallel.mesh import build_mesh
from jaxrl_llm.runtime import history
from jaxrl_llm.runtime.archive import Archive
from jaxrl_llm.runtime.checkpoint import Checkpoints
from jaxrl_llm.runtime.events import SILENT, Edge, EventLog, Events
from jaxrl_llm.runtime.history import Change
from jaxrl_llm.runtime.machine import changes, size
from jaxrl_llm.runtime.model_card import Origin, typed_command, write_run_card
from jaxrl_llm.runtime.progress import ProgressDisplay
from jaxrl_llm.runtime.report import build as build_report
from jaxrl_llm.tasks.taskset import taskset_loader

Stop = Callable[[int], object]
"""Function that stops a run after a commit. Its argument is the number of a signal."""


@dataclasses.dataclass(frozen=True)
class _Facts:
  """Facts that process 0 determines during set-up and broadcasts before any work on the devices."""

  attempt: int
  step: int
  """Step of the commit to resume from; 0 if there is none."""
  spec: ModelSpec
  lengths: Mapping[str, Sequence[int]]
  """Sequence lengths in tokens, keyed by stage name, for stages whose rows are known before the run
  begins.
  """
  automatic: Mapping[str, Json]
  """Values that process 0 has chosen for 'auto' fields, keyed by dotted key."""
  engine_bytes: int
  """Memory of the engine on one of process 0's devices; 0 if no memory plan is made."""


class _Launch(NamedTuple):
  """Objects of this process that are created before the run is set up."""

  device: DeviceThread
  coordinator: Coordinator
  workdir: Workdir | None
  """The run directory in process 0; None in other processes."""
  checkpoints: Checkpoints
  stop: asyncio.Future[int]
  """Future whose result is the number of the signal that stops the run."""
  begin: Callable[[], None]
  """Function to call when the loop begins. From then on, a signal stops the run with a commit."""
  branch: Branch | None
  """Commit of another run from which the user asked this run to start; None if there is none."""


async def run(
  config: Config,
  path: pathlib.Path,
  *,
  branch: Branch | None = None,
  on_start: Callable[[Stop], None] | None = None,
) -> int:
  """Runs `config` in the run directory `path`. If the directory contains commits, the run continues
  from the newest one. Returns the exit code, which is 0 only for a finished run.

  Args:
    branch: commit of another run from which a new run in `path` starts. If `path` already contains
      this branch, it is resumed. If None, a new run starts from its initial weights.
    on_start: called with a function that stops the run after a commit. This function takes a
      signal's number, and must be called in the run's event loop. If None, the run handles SIGINT
      and SIGTERM itself, which is possible only in the main thread.
  """
  device = DeviceThread(deadline_s=config.coordination.device_s)
  stop: asyncio.Future[int] = asyncio.get_running_loop().create_future()

  def request_stop(signum):
    return stop.done() or stop.set_result(signum)

  times = config.coordination
  coordinator = Coordinator(
    device, on_signal=request_stop, beat_s=times.beat_s, silence_s=times.silence_s
  )
  checkpoints = Checkpoints(path / 'checkpoints', config.checkpoint, leads=coordinator.leads)
  stopping = Stopping(
    coordinator,
    request_stop,
    grace_s=grace_of(times, os.environ),
    newest=lambda: max(checkpoints.steps(), default=0),
  )
  if on_start is None:
    stopping.install()
  else:
    on_start(request_stop)
  workdir = None
  if coordinator.leads:
    workdir = Workdir(path, branching=branch is not None and not branch.made(path))
  try:
    launch = _Launch(device, coordinator, workdir, checkpoints, stop, stopping.begin, branch)
    return await _run(config, path, launch)
  except Exception as error:
    if isinstance(cause := first_cause(error), PeerFailed):
      raise stopping.explain(cause) from error
    raise
  finally:
    if workdir is not None:
      workdir.close()


class _SetUp(NamedTuple):
  """Results of process 0's set-up, before any work on the devices."""

  config: Config
  """The configuration with values for its open scorer options, and for the 'auto' fields that need
  no memory plan.
  """
  prepared: Prepared
  registry: Registry | None
  changed: tuple[Change, ...]
  """Changes to the configuration of a resumed run."""
  origin: Fork | None
  """Commit from which a new branch starts; None for other runs."""
  archive: Archive | None
  facts: Json
  """Values of the fields of `_Facts`, keyed by name, to be broadcast to all processes."""


async def _set_up(config: Config, path: pathlib.Path, launch: _Launch) -> _SetUp:
  """Checks the run directory and prepares it for the run. Only process 0 calls this."""
  workdir, checkpoints, branch = launch.workdir, launch.checkpoints, launch.branch
  tell = Console(markup=False, highlight=False, soft_wrap=True).print
  load = taskset_loader(config.tasksets)
  config.logging.check()
  origin: Fork | None = None
  if workdir.branching:
    config = await asyncio.to_thread(settle, config, branch.scored_as, tell, load)
    check_kernel(config)
    origin = await asyncio.to_thread(make_branch, branch, config, workdir, load)
  archive: Archive | None = None
  if config.archive is not None:
    archive = Archive(config.archive)
    fetched = await asyncio.to_thread(archive.open, workdir.path, commits=checkpoints.steps())
    if fetched is not None:
      tell(f'fetched the commit at step {fetched} from {config.archive.location}')
  step = max(checkpoints.steps(), default=0)
  config = await asyncio.to_thread(settle, config, workdir.path if step else None, tell, load)
  config = config if step else kept_choices(config, workdir.path)
  if step:
    check_kernel(config)
  platform = jax.devices()[0].platform
  config = with_sized(config, platform=platform, spec=None)
  changed = workdir.adopt(config)
  registry: Registry | None = None
  if config.registry is not None:
    registry = await asyncio.to_thread(config.registry.open, path)
  commit = checkpoints.host(step) if step else {}
  if step:
    # Check before `prepare`, which would recreate missing files of the run.
    await asyncio.to_thread(workdir.check, commit)
  prepared = await asyncio.to_thread(prepare, config, workdir.path, load)
  config = with_sized(config, platform=platform, spec=prepared.spec)
  if config.generates:
    setting = engine_setting(config, path, prepared)
    config.rollout.engine_spec().check_devices(setting, jax.local_devices())
  checkpoints.clean()
  facts = {
    'attempt': workdir.next_attempt(least=commit.get('attempt', 0)),
    'step': step,
    'spec': dataclasses.asdict(prepared.spec),
    'lengths': prepared.lengths,
    'automatic': values_of(to_json(config)),
    'engine_bytes': _engine_bytes(config, path, prepared) if open_fields(config) else 0,
  }
  return _SetUp(config, prepared, registry, changed, origin, archive, facts)


async def _run(config: Config, path: pathlib.Path, launch: _Launch) -> int:
  ready, facts = await _agree(config, path, launch)
  setup, search = await _build(config, path, launch, ready, facts)
  committed = launch.checkpoints.host(facts.step) if facts.step else None
  state, start = await _restore(setup, launch.stop, facts, committed)
  prepared = ready.prepared if ready else None
  resources = open_resources(setup, prepared, committed) if ready else None
  parts = build_parts(setup, start, resources, prepared)
  state = await loop.enter(parts.phases, Phase.START, state)
  has_work = state.step < setup.stages[-1].end or not state.evaluated
  async with _opened(resources, setup.process, start=has_work):
    with setup.process.stopwatch.timed('enter'):
      launch.begin()
      if resources:
        await asyncio.to_thread(_record, setup, launch.workdir, facts, committed, search)
        _announce(history.read(path)[-1], facts.step, setup.process.events)
        if facts.step and has_work:
          _note_resume(resources.logs.progress, facts.step, committed, ready)
      garbage.freeze()
    outcome = await loop.run(parts, state)
  if outcome.stop:
    newest = max(launch.checkpoints.steps(), default=0)
    return _stopped(outcome, path, newest, leads=launch.coordinator.leads)
  await _complete(setup, prepared, outcome.state.learned)
  launch.device.close()
  return 0


async def _agree(
  config: Config, path: pathlib.Path, launch: _Launch
) -> tuple[_SetUp | None, _Facts]:
  """Sets up process 0 and broadcasts the facts that it determines.

  Returns:
    (results of the set-up, which are None in all processes except process 0; facts).
  """
  ready: _SetUp | None = None

  async def set_up() -> Json:
    nonlocal ready
    ready = await _set_up(config, path, launch)
    return ready.facts

  leads = launch.coordinator.leads
  facts = _facts(await launch.coordinator.broadcast(set_up() if leads else None))
  return ready, facts


async def _build(
  config: Config, path: pathlib.Path, launch: _Launch, ready: _SetUp | None, facts: _Facts
) -> tuple[Setup, Search | None]:
  """Builds the parts that every process needs before it reads weights. Process 0 prints the memory
  of each role, and opens the event log.

  Returns:
    (built parts; search for a memory plan, or None if no search was needed).
  """
  device, coordinator = launch.device, launch.coordinator
  config = ready.config if ready else with_values(config, facts.automatic)
  mesh = build_mesh(config.learner.mesh)
  target = Target(mesh, None, facts.spec, facts.lengths, facts.engine_bytes)
  tell = Console(markup=False, highlight=False, soft_wrap=True).print if ready else logging.debug
  config, search = await agreed(config, target, coordinator, device, tell)
  stages = build_stages(config, mesh, facts.spec.vocab_size, facts.lengths)
  model = build_model(model_spec(config, facts.spec), policy_options(config), mesh)
  reward_model = build_reward_model(config, mesh, model)
  events = SILENT
  if ready:
    roles = held(stages, model, critic_model(model), mesh, reward_model, image_dtype(config))
    Console(highlight=False).print(held_table(mesh, roles))
    limit = config.logging.event_bytes
    events = EventLog(path, attempt=facts.attempt, step=facts.step, max_bytes=limit)
  setup = Setup(
    config=config,
    workdir=path,
    stages=stages,
    model=model,
    checkpoints=launch.checkpoints,
    process=Process(coordinator=coordinator, device=device, mesh=mesh, events=events),
    reward_model=reward_model,
    registry=ready.registry if ready else None,
    archive=ready.archive if ready else None,
    next_attempt=launch.workdir.next_attempt if ready else None,
    explorer_command=explorer.command,
  )
  return setup, search


async def _restore(
  setup: Setup, stop: asyncio.Future[int], facts: _Facts, committed: Any
) -> tuple[LoopState, Start]:
  """Returns the state with which the loop begins, and the facts about this start of the run.

  Args:
    stop: see `_Launch`.
    committed: host state of the commit; None if there is none.
  """
  config, reward_model, device = setup.config, setup.reward_model, setup.process.device
  state, base = await device.run(committed_state, setup, facts.step)
  if reward_model is not None:
    reward_model.check(committed or {})
    if reward_model.files is not None:
      scorer = await device.run(reward_model.read, setup.process.mesh)
      state = dataclasses.replace(state, learned=state.learned._replace(reward_model=scorer))
  bests = committed_bests(committed, config, setup.stages) if committed else {}
  best, best_of = None, first_suite(config)
  if committed and committed['best'] and committed.get('best_of', best_of) == best_of:
    best = tuple(committed['best'])
  start = Start(
    stop=stop,
    best=best,
    best_of=best_of,
    base=base,
    reward_model=reward_model and reward_model.fingerprint,
  )
  return dataclasses.replace(state, attempt=facts.attempt, bests=bests), start


def _record(
  setup: Setup, workdir: Workdir, facts: _Facts, committed: Any, search: Search | None
) -> None:
  """Records the configuration and the choices with which the run begins or continues.

  Args:
    committed: host state of the commit; None if there is none.
    search: search for a memory plan; None if no plan was needed.
  """
  workdir.record(
    setup.config,
    commit=facts.step,
    attempt=facts.attempt,
    machine=size(),
    committed_by=committed['machine'] if committed else {},
  )
  if not facts.step:
    write_choices(setup.workdir, added_flags(), search and search.to_json())


async def _complete(setup: Setup, prepared: Prepared | None, learned: Learned) -> None:
  """Exports the models of a finished run. Process 0 also writes the report, and copies the models
  and the report to the archive if there is one.

  Args:
    prepared: prepared data in process 0; None in the other processes.
  """
  config, path = setup.config, setup.workdir
  cards = await export_models(setup, prepared, learned)
  if prepared is not None:
    await asyncio.to_thread(_finish, config, path, cards)
  if setup.archive is not None:
    # Archive the newest commit again, now with the exported models and the report.
    await asyncio.to_thread(archiver(setup.archive, path, setup.checkpoints))


def _note_resume(
  progress: ProgressDisplay, step: int, committed: Mapping[str, Any], ready: _SetUp
) -> None:
  """Prints the commit from which the run continues, the parent if the run is a new branch, and the
  changes to the configuration.
  """
  progress.note(f'resuming from the commit at step {step}{_not_exact(committed["machine"])}')
  if ready.origin:
    progress.note(str(ready.origin.parent))
  for change in ready.origin.changes if ready.origin else ready.changed:
    progress.note(f'from step {step + 1} on, {change}')


def _announce(entry: history.Entry, step: int, events: Events) -> None:
  """Logs the newest entry of the run's history as an event, if the entry applies from the next step
  on and records changes of the configuration or a branch.

  The event contains the keys that changed and, at the start of a branch, the parent run and its
  commit. If the run is killed before its next commit, the event is logged again when it resumes.

  Args:
    step: step of the commit from which the run continues; 0 if there is none.
  """
  if entry.step != step + 1 or not (entry.changes or entry.parent):
    return
  parent = {} if entry.parent is None else {'parent': entry.parent.run, 'commit': step}
  keys = [change.key for change in entry.changes]
  events.message(Edge.CHANGE, first=step + 1, keys=keys, **parent)


def _not_exact(machine: dict[str, Any]) -> str:
  """Returns a note on why the results of a resumed run may differ from the results of an
  uninterrupted run. The note is empty if this machine matches the machine that made the commit.

  Args:
    machine: fingerprint of the machine that made the commit.
  """
  differences = changes(machine)
  return (
    f'; results may not be bitwise equal, because the machine that made the commit differs: '
    f'{differences}'
    if differences
    else ''
  )


def _facts(value: Any) -> _Facts:
  scaling = value['spec'].pop('rope_scaling')
  spec = ModelSpec(**value['spec'], rope_scaling=RopeScaling(**scaling) if scaling else None)
  return _Facts(**{**value, 'spec': spec})


def _engine_bytes(config: Config, path: pathlib.Path, prepared: Prepared) -> int:
  """Returns the number of bytes that the engine needs on each device on which it runs; 0 if the run
  generates no completions.
  """
  if not config.generates:
    return 0
  setting = engine_setting(config, path, prepared)
  return config.rollout.engine_spec().device_bytes(setting, jax.local_devices())


@contextlib.asynccontextmanager
async def _opened(resources: Resources | None, process: Process, *, start: bool):
  """Runs process 0's engine, scorers and logs during the block.

  All processes enter the block together. A signal therefore reaches either all of them before the
  block or all of them within it.

  Args:
    start: whether to start the engine and the scorers. They are not needed if all steps and
      evaluations are complete.
  """
  if resources is None:
    with process.stopwatch.timed('enter'):
      await process.coordinator.broadcast(None)
    yield
    return

  async def started() -> None:
    if start:
      await resources.start()

  try:
    with process.stopwatch.timed('enter'):
      await process.coordinator.broadcast(started())
    if not start:
      yield
      return
    with resources.logs.progress:
      async with resources.heartbeat.running():
        yield
  finally:
    await resources.close()


def _stopped(outcome: Outcome, path: pathlib.Path, committed: int, *, leads: bool) -> int:
  """Tells the user where the run has stopped, and returns the exit code.

  Args:
    committed: step of the newest commit. Steps after an interrupted evaluation are not committed.
  """
  name, step = signal.Signals(outcome.stop).name, outcome.state.step
  if leads:
    where = f'after step {step}, committed in {path}' if step else 'before the first step'
    if committed < step:
      where = f'after step {step}; step {committed} is committed in {path}'
    sys.stderr.write(f'stopped by {name} {where}; start the same command again to resume\n')
  return 128 + outcome.stop


def _finish(config: Config, path: pathlib.Path, cards: Mapping[str, pathlib.Path]) -> None:
  """Writes the model cards and the report of a finished run, and prints the summary.

  Args:
    cards: directories of the exported models, keyed as in the result of `export_models`.
  """
  command = typed_command(sys.argv)
  for part, directory in cards.items():
    origin = Origin(part=part, base=config.policy.init_from, command=command)
    write_run_card(directory, path, origin)
  report = build_report(path)
  logging.info('exported %s, wrote %s', path / 'hf', report)
  print_summary(path, [stage.name for stage in config.stages], report)
