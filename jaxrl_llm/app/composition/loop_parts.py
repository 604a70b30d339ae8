"""Builds the parts of the main loop, such as the publisher and the stages' trainers."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.app.composition.prepare import Prepared
from jaxrl_llm.app.composition.resources import Resources
from jaxrl_llm.app.composition.setup import Setup
from jaxrl_llm.app.composition.sharing import check_allocator
from jaxrl_llm.app.composition.stages import origins, policy_options
from jaxrl_llm.app.composition.state import (
  begin_stage,
  commits_needed,
  critic_model,
  model_of,
  reward_params,
  starting_state,
)
from jaxrl_llm.app.composition.version_exchange import VersionExchange
from jaxrl_llm.app.schema import Config
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.data.load import RowLoader
from jaxrl_llm.master.batches import (
  Planner,
)
from jaxrl_llm.master.keeper import RunKeeper, Start
from jaxrl_llm.master.loop import EnterStage, LoopState, Parts
from jaxrl_llm.master.phases import (
  PUBLISHED_BITS,
  RESIDENT,
  MemoryPhases,
  Phases,
  residency_of,
)
from jaxrl_llm.master.trainer import Roles, Stage, StageTrainer
from jaxrl_llm.models import lora
from jaxrl_llm.rollout.api import Engine, Releasable
from jaxrl_llm.rollout.device_image import DeviceImage
from jaxrl_llm.rollout.embedded.engine import EmbeddedEngine
from jaxrl_llm.rollout.gatherer import Gatherer
from jaxrl_llm.rollout.probe import Prober
from jaxrl_llm.rollout.publisher import Publisher
from jaxrl_llm.runtime import goodput
from jaxrl_llm.runtime.profiler import Profiler


def image_dtype(config: Config) -> np.dtype | None:
  """Returns the data type of the bits of the newest version that the devices keep to compare the
  next version with; None if they keep none.
  """
  if not config.rollout.engine_spec().compares_on_devices:
    return None
  return np.dtype(jnp.dtype(_published_dtype(config) or config.policy.param_dtype))


def _published_dtype(config: Config) -> str | None:
  """Returns the data type to which weights are converted; None if they keep theirs."""
  spec = config.rollout.engine_spec()
  return policy_options(config).dtype if spec.dtype == 'policy' else spec.dtype


def build_gatherer(config: Config, mesh: Mesh, *, several: bool | None = None) -> Gatherer:
  """Builds the gatherer that copies the policy's weights for the engine. For `several`, see
  `Gatherer`.
  """
  spec = config.rollout.engine_spec()
  merges = config.policy.lora is not None and not spec.adapters
  return Gatherer(
    mesh,
    config.policy.lora if merges else None,
    dtype=_published_dtype(config),
    several=several,
    on_devices=spec.loads_device_arrays,
  )


def build_publisher(setup: Setup, engine: Engine | None) -> Publisher:
  """Builds the publisher that sends the parameters of all processes to process 0's `engine`."""
  config, model, process = setup.config, setup.model, setup.process
  spec = config.rollout.engine_spec()
  apart = config.policy.lora is not None and spec.adapters
  gatherer, image = build_gatherer(config, process.mesh), None
  if spec.compares_on_devices:
    phases = config.phases
    moves = phases is not None and residency_of(phases, PUBLISHED_BITS) != 'resident'
    image = DeviceImage(gatherer, offload=moves)
  return Publisher(
    engine,
    gatherer,
    process.device,
    prober=Prober(model, process.mesh, max_length=config.rollout.max_length)
    if spec.served
    else None,
    changing=(lambda params: lora.split(params, model.spec, model.options)[0])
    if apart
    else lambda params: params,
    events=process.events,
    coordinator=process.coordinator,
    writer=None if spec.share_writer is None else spec.share_writer(model.spec),
    image=image,
  )


def stage_entrance(setup: Setup, *, from_commits: bool = True) -> EnterStage:
  """Returns a function that enters a stage. It builds the stage's trainer and, if the stage has no
  completed step, initialises the stage's state.

  Args:
    from_commits: whether to read weights from the commits of earlier stages, if a stage or the
      trainer's reward model begins with them. If False, every stage continues with the weights of
      the state, which must contain the parameters of the trainer's reward model, if there is one.
  """
  process, critic = setup.process, critic_model(setup.model)
  loader = RowLoader(setup.workdir, process.mesh)

  async def new_attempt() -> int:
    """Returns the number of a new attempt of the run, which is the same in every process. Returns 0
    if the attempts of the run are not counted.
    """

    async def take():
      return setup.next_attempt() if setup.next_attempt is not None else 0

    return await process.coordinator.broadcast(take() if process.coordinator.leads else None)

  def awaits_reward_model(stage: Stage, state: LoopState) -> bool:
    """Returns whether the stage needs a reward model that an earlier stage has trained, and the
    state does not contain it yet.
    """
    role = setup.reward_model
    if role is None or role.files is not None or state.learned.reward_model is not None:
      return False
    configured = next(s for s in setup.config.stages if s.name == stage.name)
    return state.step < stage.end and setup.config.scored_by_trainer(configured)

  async def enter_stage(stage: Stage, state: LoopState) -> tuple[StageTrainer, LoopState]:
    model = model_of(stage, setup.model)
    if state.step == stage.start:
      if from_commits and origins(stage.name, setup.config):
        state = await process.device.run(starting_state, stage, setup, state)
        state = dataclasses.replace(state, attempt=await new_attempt(), moved=0)
      state = await process.device.run(
        begin_stage, stage, setup.config, state, process.mesh, model, critic
      )
    if from_commits and awaits_reward_model(stage, state):
      params = await process.device.run(reward_params, setup)
      state = dataclasses.replace(state, learned=state.learned._replace(reward_model=params))
    has_critic = stage.algorithm.critic_loss is not None
    roles = Roles(model, critic if has_critic else None)
    return StageTrainer(stage, process, roles=roles, loader=loader, learned=state.learned), state

  return enter_stage


def build_phases(setup: Setup, engine: Engine | None) -> Phases:
  """Builds the memory phases of this process.

  Raises:
    UserError: a user-defined engine cannot be released, or servers could not use the memory that
      the trainer frees.
  """
  config = setup.config.phases
  if config is None:
    return RESIDENT
  check_allocator(setup.config, setup.process.mesh.devices.flat[0].platform)
  process, reward_model = setup.process, setup.reward_model
  read = functools.partial(reward_params, setup) if reward_model is not None else None
  if config.engine == 'resident' or engine is None:
    return MemoryPhases(config, process, None, setup.workdir, read)
  if not isinstance(engine, Releasable):
    raise UserError(
      f'phases.engine: {config.engine!r}, and engine {engine.name!r} has no release and restore '
      "(Releasable in docs/reference/api.md); wanted 'resident'"
    )
  return MemoryPhases(config, process, engine, setup.workdir, read)


def build_exchange(
  setup: Setup, start: Start, resources: Resources | None, prepared: Prepared | None
) -> VersionExchange | None:
  """Builds the exchange of weights with another run; None if no stage exchanges weights."""
  if not any(stage.follows or stage.export_every is not None for stage in setup.stages):
    return None
  run = resources.logs.store.name if resources else None
  return VersionExchange(setup, prepared=prepared, run=run, stop=start.stop)


def build_parts(
  setup: Setup, start: Start, resources: Resources | None, prepared: Prepared | None = None
) -> Parts:
  """Builds the parts of the main loop. `resources` and `prepared` are None in all processes except
  process 0.
  """
  config = setup.config
  engine, index = resources.engine if resources else None, jax.process_index()
  publisher = build_publisher(setup, engine)
  phases = build_phases(setup, engine)
  if isinstance(engine, EmbeddedEngine):
    setup.process.stopwatch.sampled_s = lambda: engine.sampled_s
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
      phases=phases,
      needed=lambda state: commits_needed(config, setup.stages, state.step, state.bests),
      goodput_file=None if resources else goodput.file_of(setup.workdir, index),
    ),
    enter_stage=stage_entrance(setup),
    planner=Planner(
      seed=config.seed,
      every_steps=config.checkpoint.every_steps,
      every_minutes=config.checkpoint.every_minutes,
      stop=start.stop,
    ),
    batches=dict(resources.logs.batches) if resources else {},
    phases=phases,
    profiler=Profiler(setup.workdir / 'profile', config.logging.profile_steps),
    reward_model=setup.reward_model.role(
      leads=resources is not None, policy=prepared.tokenizer if prepared else None
    )
    if setup.reward_model is not None
    else None,
    versions=build_exchange(setup, start, resources, prepared),
  )
