"""Read-only access to an existing run: its configuration, tasks, model and commits."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import AsyncIterator, Callable, Mapping

from absl import logging

from jaxrl_llm.app.composition.automatic import ATTENTION, with_sized
from jaxrl_llm.app.composition.engines import build_engine
from jaxrl_llm.app.composition.loop_parts import build_publisher
from jaxrl_llm.app.composition.prepare import Prepared, prepare
from jaxrl_llm.app.composition.rollouts import build_rollouts
from jaxrl_llm.app.composition.saved import read_saved, with_sources
from jaxrl_llm.app.composition.scorers import build_scorers
from jaxrl_llm.app.composition.setup import Setup
from jaxrl_llm.app.composition.stages import build_stages, model_spec, policy_options
from jaxrl_llm.app.composition.state import committed_state
from jaxrl_llm.app.composition.workdir import DATA, TOKENIZER
from jaxrl_llm.app.schema import AUTO, Config
from jaxrl_llm.app.serve import explorer
from jaxrl_llm.config.load import apply_overrides, load_file
from jaxrl_llm.config.values import from_json
from jaxrl_llm.core import disk
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.registry import Registry
from jaxrl_llm.core.types import Params, Version
from jaxrl_llm.master.loop import LoopState
from jaxrl_llm.master.process import Process
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.attention import platform_of
from jaxrl_llm.ops.attention import is_absent
from jaxrl_llm.parallel.coordinator import Coordinator
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.parallel.job import this_job
from jaxrl_llm.parallel.mesh import build_mesh
from jaxrl_llm.rewards.pool.pool import ScorerPool
from jaxrl_llm.rollout.api import Engine
from jaxrl_llm.rollout.publisher import Publisher
from jaxrl_llm.rollout.workflow import Workflow
from jaxrl_llm.runtime import history
from jaxrl_llm.runtime.checkpoint import Checkpoints
from jaxrl_llm.tasks.taskset import Taskset


def config_of_run(run: pathlib.Path) -> Config:
  """Loads the configuration from the run's config.json."""
  file = run / 'config.json'
  try:
    return from_json(read_saved(file), Config)
  except FileNotFoundError:
    raise UserError(
      f'--workdir={run}: not the directory of a run ({file.name} is missing)'
    ) from None
  except ValueError as error:
    raise UserError(f'{file}: not the configuration of a run ({error})') from error
  except UserError as error:
    raise UserError(f'{file}: written by another version of this program: {error}') from None


def configs_of_run(run: pathlib.Path) -> tuple[tuple[int, Config], ...]:
  """Returns (first step, configuration) for each configuration under which the run made steps."""
  entries = history.read(run)
  if not entries:
    # The run was started by an earlier program version, which wrote no history, or has not made a
    # step yet.
    return ((1, config_of_run(run)),)
  try:
    return tuple((entry.step, from_json(with_sources(entry.config), Config)) for entry in entries)
  except UserError as error:
    raise UserError(
      f'{run / history.FILE}: written by another version of this program: {error}'
    ) from None


def check_alone() -> None:
  """Raises UserError if this process belongs to a multi-process job."""
  if (job := this_job()) is not None:
    raise UserError(
      f'this process is one of {job}; reopening a run needs a single process; start the '
      'command alone'
    )


def config_to_serve(run: pathlib.Path, spec: str | None, overrides: Mapping[str, str]) -> Config:
  """Returns the run's configuration with overrides, for sampling outside of the run. Settings that
  would disturb the run's own services are changed or refused.

  Args:
    spec: value of --config on the command line, which must be None.
  """
  if spec is not None:
    raise UserError(
      f"--config={spec}: the run's own configuration is used; --config.field=value changes it"
    )
  saved = _without_direct(config_of_run(run))
  if ATTENTION not in overrides:
    saved = without_absent_kernel(saved)
  config = apply_overrides(saved, overrides)
  check_alone()
  attached, addresses = (
    config.rollout.engine_spec().addresses,
    f'{config.rollout.engine_options_key}.addresses',
  )
  kept = not any(key.startswith(addresses) for key in overrides)
  if attached and kept and attached == saved.rollout.engine_spec().addresses:
    embedded = '--config.rollout.engine=embedded' + (
      ' --config.rollout.engine_options={}' if config.rollout.engine_options else ''
    )
    raise UserError(
      f"{addresses}: the run's own servers would receive old weights; use {embedded}, or name "
      'others with '
      f'--config.{addresses}=[…]'
    )
  if any(key.startswith('rollout.explorers') for key in overrides):
    return config
  return with_local_explorers(config)


def without_absent_kernel(config: Config) -> Config:
  """Returns the configuration of a run for use on this machine, without continuing the run. If the
  run has recorded an attention kernel of another platform, `policy.attention` becomes 'auto', and a
  warning says so. Starts JAX.
  """
  recorded, platform = config.policy.attention, platform_of(None)
  if not is_absent(recorded, platform):
    return config
  logging.warning(
    'policy.attention: the run recorded %s, which does not run on this platform (%s); auto is used',
    *(recorded, platform),
  )
  return dataclasses.replace(config, policy=dataclasses.replace(config.policy, attention=AUTO))


def untrained_config(spec: str, overrides: Mapping[str, str]) -> Config:
  """Returns the configuration that --config names, for sampling its initial policy without a run
  directory.
  """
  config = apply_overrides(load_file(spec, Config), overrides)
  check_alone()
  return with_local_explorers(config)


def _without_direct(config: Config) -> Config:
  """Returns the configuration without `rollout.explorers.direct`, which the run's own servers
  permit, but another engine may not.
  """
  explorers = config.rollout.explorers
  if explorers is None or not explorers.direct:
    return config
  explorers = dataclasses.replace(explorers, direct=False)
  rollout = dataclasses.replace(config.rollout, explorers=explorers)
  return dataclasses.replace(config, rollout=rollout)


def with_local_explorers(config: Config) -> Config:
  """Returns the configuration without `rollout.explorers.listen`: the port, and the explorers that
  connect to it, belong to the run itself.
  """
  explorers = config.rollout.explorers
  if explorers is None or explorers.listen is None:
    return config
  local = dataclasses.replace(explorers, listen=None) if explorers.processes else None
  return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, explorers=local))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reopened(Setup):
  """An existing run, opened without its training loop. `workdir` is a temporary directory outside
  of the run.
  """

  prepared: Prepared

  def under(self, config: Config) -> Reopened:
    """Returns the same run opened with another of its configurations."""
    if config == self.config:
      return self
    sizes = self.prepared.spec.vocab_size, self.prepared.lengths
    stages = build_stages(config, self.process.mesh, *sizes)
    return dataclasses.replace(self, config=config, stages=stages)

  async def state(self, step: int) -> LoopState:
    """Loads the state committed at `step`. Step 0 is the initial state."""
    return await self.process.device.run(self._state, step)

  async def policy(self, step: int) -> Params:
    """Returns the policy's parameters at `step`, joined with the frozen base if there are adapters.

    Raises:
      UserError: the commit has a reward model in place of the policy.
    """
    stage = next((stage for stage in self.stages if stage.start < step <= stage.end), None)
    if stage is not None and stage.algorithm.head != self.model.spec.head:
      raise UserError(
        f'step {step}: stage {stage.name} trains a reward model, so its commits have no policy; '
        f'wanted a commit up to step {stage.start} or after step {stage.end}'
      )
    return await self.process.device.run(self._policy, step)

  def _state(self, step: int) -> LoopState:
    return committed_state(self, step)[0]

  def _policy(self, step: int) -> Params:
    learned = self._state(step).learned
    return learned.whole(learned.policy.params)


@contextlib.asynccontextmanager
async def reopen(
  config: Config, run: pathlib.Path, load: Callable[[str], Taskset] | None = None
) -> AsyncIterator[Reopened]:
  """Opens the run in directory `run` with the given configuration.

  Args:
    config: configuration. It may differ from the run's own configuration, but must describe the
      same model and data.
    run: directory of the run. If it has no tokenizer or static rows, they are created in a
      temporary directory.
    load: function that returns the taskset with a given name. If None, a loader that loads each
      taskset once is used.
  """
  with disk.scratch('jaxrl_llm-') as scratch, contextlib.ExitStack() as opened:
    prepared = await asyncio.to_thread(_prepared, config, run, scratch, load)
    mesh, device = build_mesh(config.learner.mesh), DeviceThread()
    platform = mesh.devices.flat[0].platform
    config = with_sized(config, platform=platform, spec=prepared.spec, plans=False)
    opened.callback(device.close)
    yield Reopened(
      config=config,
      workdir=scratch,
      stages=build_stages(config, mesh, prepared.spec.vocab_size, prepared.lengths),
      model=build_model(model_spec(config, prepared.spec), policy_options(config), mesh),
      checkpoints=Checkpoints(run / 'checkpoints', config.checkpoint, leads=True),
      process=Process(
        coordinator=Coordinator(device, on_signal=lambda signum: None), device=device, mesh=mesh
      ),
      registry=_registry(config, run),
      explorer_command=explorer.command,
      prepared=prepared,
    )


def _prepared(
  config: Config,
  run: pathlib.Path,
  scratch: pathlib.Path,
  load: Callable[[str], Taskset] | None,
) -> Prepared:
  """Calls `prepare` with the directory `scratch`, into which the run's tokenizer is copied and the
  run's static rows (examples, pairs and other rows in files) are linked.
  """
  if (run / TOKENIZER).is_dir():
    shutil.copytree(run / TOKENIZER, scratch / TOKENIZER)
  (scratch / DATA).mkdir()
  for rows in (run / DATA).glob('*.arrayrecord'):
    (scratch / DATA / rows.name).symlink_to(rows.absolute())
  return prepare(config, scratch, load)


def _registry(config: Config, run: pathlib.Path) -> Registry | None:
  """Opens the registry of the run in directory `run` if a scorer discovers its services there;
  otherwise returns None.
  """
  scorers = config.rewards.scorers
  if config.registry is None or all(scorer.options.get('discover') is None for scorer in scorers):
    return None
  return config.registry.open(run)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
  """A started engine, with the run's workflow and scorers."""

  past: Reopened
  engine: Engine
  workflow: Workflow
  scorers: ScorerPool
  publisher: Publisher

  async def serve(self, step: int) -> None:
    """Publishes the policy committed at `step` to the engine."""
    params = await self.past.policy(step)
    await self.publisher.publish(params, Version(0, step), moved=Version(0, step))


@contextlib.asynccontextmanager
async def serving(past: Reopened) -> AsyncIterator[Serving]:
  """Runs the engine, the scorers and the workflow during the block. Call `Serving.serve` before
  sampling.
  """
  config = past.config
  async with contextlib.AsyncExitStack() as opened:
    built = build_scorers(config.rewards, past.registry)
    scorers = ScorerPool(built, config.rewards, registry=past.registry)
    opened.push_async_callback(scorers.close)
    await scorers.start()
    engine = build_engine(
      config, past.workdir, past.prepared, past.process.device, registry=past.registry
    )
    opened.push_async_callback(engine.close)
    await engine.start()
    rollouts = build_rollouts(past, past.prepared, engine, scorers)
    opened.push_async_callback(rollouts.close)
    await rollouts.start()
    yield Serving(
      past=past,
      engine=engine,
      workflow=rollouts.workflow,
      scorers=scorers,
      publisher=build_publisher(past, engine),
    )
