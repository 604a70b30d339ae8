"""Memory phases: decide which roles (policy, optimizer, critic, reference, engine …) occupy device
memory while rollouts are generated, rows are scored, and models are updated.

Invariant: when a phase begins, the devices hold exactly the roles that compute in it and those
configured to stay resident. The only exception is the commit phase, which leaves the devices
unchanged. The ledger of device memory records the bytes of each role. Moving a role preserves every
bit, so phases do not change a run's results.

The phases of rollout, inference and training, and the moves of roles between them, follow the
figure in DeepSeek-R1 (arXiv:2501.12948, appendix B.1).
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import shutil
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import jax
from jax.sharding import Sharding

from jaxrl_llm.core.types import Params
from jaxrl_llm.learner.state import Learned
from jaxrl_llm.master.process import Process
from jaxrl_llm.parallel import memory
from jaxrl_llm.rollout.api import Releasable
from jaxrl_llm.runtime.events import Edge

DIRECTORY = 'offloaded'
"""Directory of offloaded arrays in the run directory."""
ENGINE, REWARD_MODEL = 'engine', 'reward model'
PUBLISHED_BITS = 'published bits'
"""Role of the bits of the newest published version, with which the devices compare the next one.
They belong to the publisher, which moves them with the policy.
"""

Residency = Literal['resident', 'offload', 'disk']
"""Location of a role's arrays while no phase computes with them: on the devices, in host memory, or
in files of the run directory.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhasesConfig:
  """Memory phases: the location of each role while the current phase does not compute with it.

  The engine generates rollouts, which the trainer's reward model scores if there is one. Forward
  passes over a closed batch then need the reference and the critic, and also the policy if the
  batch has several optimizer steps. Updates need the policy, the critic and their optimizers.
  Phases are refused at a staleness bound above 0, because rollouts and updates then overlap in
  time.
  """

  policy: Residency = 'offload'
  """Location of the policy's parameters, including the frozen base weights if adapters are trained.
  With `rollout.vllm.compare='devices'`, the bits of the published version are kept in host memory
  unless the value is 'resident'.
  """
  optimizer: Residency = 'offload'
  """Location of the policy's optimizer state."""
  critic: Residency = 'offload'
  """Location of the critic's parameters and optimizer state."""
  reference: Residency = 'offload'
  """Location of the reference's parameters."""
  reward_model: Residency | Literal['destroy'] = 'offload'
  """Location of the reward model's parameters. With 'destroy', they are freed, and read again for
  each batch: from the model's directory, or from the commit of the stage that trained the model.
  """
  engine: Literal['resident', 'sleep', 'destroy'] = 'destroy'
  """Treatment of the engine outside the rollout phase. vLLM servers owned by the run are stopped
  and restarted with 'destroy'; with 'sleep', they free weights and cache but their processes keep
  running (requires `rollout.vllm.args.enable_sleep_mode`). With either value, the embedded engine
  frees its cache and moves its weights to host memory.
  """


class Phase(enum.StrEnum):
  """Purpose for which the devices are used."""

  START = 'start'
  """Start of the run, before the engine starts. No role computes."""
  STAGE = 'stage'
  """Start of a stage. All roles except the reward model are on the devices, so that programs and
  states can be created.
  """
  PUBLISH = 'publish'
  """The policy is read in order to publish it to the engine."""
  ROLLOUT = 'rollout'
  REWARD = 'reward'
  """The reward model scores the rollouts of a batch, before the batch is closed."""
  INFERENCE = 'inference'
  """Forward passes over the rows of a closed batch."""
  TRAIN = 'train'
  COMMIT = 'commit'
  """Arrays are written to a checkpoint. They need not be on the devices."""
  END = 'end'
  """The trained models are exported."""


def roles_of(learned: Learned) -> dict[str, Any]:
  """Returns the arrays of each role, keyed by the role's name, which is the name that the dry run
  prints. Update counters belong to no role and never move.
  """
  critic = learned.critic
  roles = {
    'policy': learned.policy.params,
    'optimizer': learned.policy.opt_state,
    'critic': critic and critic.params,
    'critic optimizer': critic and critic.opt_state,
    'reference': learned.reference,
    'base': learned.base,
    REWARD_MODEL: learned.reward_model,
  }
  return {name: tree for name, tree in roles.items() if tree is not None}


def with_roles(learned: Learned, roles: Mapping[str, Any]) -> Learned:
  """Returns the state with the arrays of the given roles replaced."""
  policy, critic = learned.policy, learned.critic
  policy = policy.replace(
    params=roles.get('policy', policy.params), opt_state=roles.get('optimizer', policy.opt_state)
  )
  if critic is not None:
    critic = critic.replace(
      params=roles.get('critic', critic.params),
      opt_state=roles.get('critic optimizer', critic.opt_state),
    )
  return learned._replace(
    policy=policy,
    critic=critic,
    reference=roles.get('reference', learned.reference),
    base=roles.get('base', learned.base),
    reward_model=roles.get(REWARD_MODEL, learned.reward_model),
  )


def residency_of(config: PhasesConfig, role: str) -> Residency | Literal['destroy']:
  """Returns the configured location of a role while no phase computes with it. Role names are those
  of `roles_of`.
  """
  setting = {
    'base': 'policy',
    PUBLISHED_BITS: 'policy',
    'critic optimizer': 'critic',
    REWARD_MODEL: 'reward_model',
  }.get(role, role)
  return getattr(config, setting)


class Phases:
  """Phases of a run in which everything stays on the devices. The subclass `MemoryPhases` moves
  roles.
  """

  def take_metrics(self) -> dict[str, float]:
    """Returns the metrics since the last call, keyed by metric name."""
    return {}

  async def enter(self, phase: Phase, learned: Learned, roles: Collection[str] = ()) -> Learned:
    """Enters a phase: frees the roles that it does not need, and fetches those that it needs. Every
    process must call this. Returns the state with the moved arrays; the given state must not be
    used afterwards.

    Args:
      roles: names of the roles that compute in this phase, as in `roles_of`.
    """
    return learned


RESIDENT = Phases()


class MemoryPhases(Phases):
  """Moves roles between device, host and disk, and releases and restores the engine."""

  def __init__(
    self,
    config: PhasesConfig,
    process: Process,
    engine: Releasable | None,
    workdir: pathlib.Path,
    read_reward_model: Callable[[], Params] | None = None,
  ):
    """
    Args:
      engine: engine of this process if it takes part in the phases; None in processes without an
        engine.
      read_reward_model: reads the reward model's parameters onto the mesh; None if the run has no
        reward model.
    """
    self._read_reward_model = read_reward_model
    self._config, self._process, self._engine = config, process, engine
    self._directory = workdir / DIRECTORY / str(jax.process_index())
    self._away: dict[str, list[Sharding]] = {}
    """Shardings that programs expect for the arrays of each role that has been moved off the
    devices, keyed by role.
    """
    self._ledger_device = process.mesh.local_devices[0]
    self._metrics: dict[str, float] = {}
    self._moved = 0
    shutil.rmtree(self._directory, ignore_errors=True)

  def take_metrics(self) -> dict[str, float]:
    metrics, self._metrics = self._metrics, {}
    moved, self._moved = self._moved, 0
    return {**metrics, 'perf/memory_moved_bytes': float(moved)} if metrics or moved else {}

  async def enter(self, phase: Phase, learned: Learned, roles: Collection[str] = ()) -> Learned:
    with self._process.stopwatch.timed('phases'):
      if phase == Phase.COMMIT:
        return await self._in_memory(learned)
      if phase == Phase.STAGE:
        roles = (*(role for role in roles_of(learned) if role != REWARD_MODEL),)
      for role in roles_of(learned):
        if role not in roles:
          learned = await self._leave(role, learned)
      if phase != Phase.ROLLOUT:
        await self._release()
      for role in roles_of(learned):
        if role in roles:
          learned = await self._fetch(role, learned)
      if phase == Phase.ROLLOUT:
        await self._restore()
      await self._enter_in_ledger(phase, learned)
      if phase == Phase.END:
        shutil.rmtree(self._directory, ignore_errors=True)
      return learned

  async def _leave(self, role: str, learned: Learned) -> Learned:
    """Moves a role from the devices to its configured location."""
    residency, tree = residency_of(self._config, role), roles_of(learned)[role]
    size = memory.device_bytes(tree, self._ledger_device)
    if residency == 'resident' or not size:
      return learned
    self._away[role] = memory.shardings_of(tree)
    function, args, place = {
      'offload': (memory.to_host, (), 'host'),
      'disk': (memory.to_disk, (self._at(role),), 'disk'),
      'destroy': (memory.destroyed, (), 'nowhere'),
    }[residency]
    return await self._move(Edge.OFFLOAD, role, learned, size, function, args, place=place)

  async def _fetch(self, role: str, learned: Learned) -> Learned:
    """Moves a role back to the devices, with the shardings that programs expect."""
    if (homes := self._away.pop(role, None)) is None:
      return learned
    if residency_of(self._config, role) == 'destroy':
      return await self._move(Edge.RELOAD, role, learned, None, self._read_again, ())
    return await self._move(Edge.RELOAD, role, learned, None, memory.restored, (homes,))

  def _read_again(self, destroyed: Params) -> Params:
    return self._read_reward_model()

  async def _in_memory(self, learned: Learned) -> Learned:
    """Reads into host memory the roles that a commit contains and whose arrays are in files."""
    for role, tree in roles_of(learned).items():
      stored = any(isinstance(leaf, memory.StoredArray) for leaf in jax.tree.leaves(tree))
      if stored and role != REWARD_MODEL:
        homes = [home.with_memory_kind(memory.HOST) for home in self._away[role]]
        learned = await self._move(Edge.RELOAD, role, learned, None, memory.restored, (homes,))
    return learned

  async def _move(
    self, edge: Edge, role: str, learned: Learned, size: int | None, function, args, **fields
  ) -> Learned:
    asked = self._process.events.request(edge, role=role, **fields)
    moved = await self._process.device.run(function, roles_of(learned)[role], *args)
    if size is None:
      # For a commit, arrays return only to host memory. They then have no bytes on the device, and
      # the size of the device's shards is counted instead.
      size = memory.device_bytes(moved, self._ledger_device)
      size = size or memory.shard_bytes(moved, self._ledger_device)
    self._moved += size
    self._process.events.reply(asked, bytes=size)
    return with_roles(learned, {role: moved})

  def _at(self, role: str) -> pathlib.Path:
    return self._directory / role.replace(' ', '_')

  async def _release(self) -> None:
    """Releases the engine's memory in process 0. The other processes wait until it is released."""
    coordinator = self._process.coordinator
    await coordinator.broadcast(self._release_own() if coordinator.leads else None)

  async def _release_own(self) -> None:
    engine, how = self._engine, self._config.engine
    if engine is None or engine.is_released:
      return
    size = engine.device_bytes
    asked = self._process.events.request(Edge.RELEASE, how=how)
    await engine.release(how)
    self._process.events.reply(asked, bytes=size)

  async def _restore(self) -> None:
    """Restores the engine in process 0 after every process has freed its device memory."""
    coordinator = self._process.coordinator
    await coordinator.broadcast(_nothing() if coordinator.leads else None)
    if self._engine is None or not self._engine.is_released:
      return
    asked = self._process.events.request(Edge.RESTORE, how=self._config.engine)
    await self._engine.restore()
    self._process.events.reply(asked, bytes=self._engine.device_bytes)

  async def _enter_in_ledger(self, phase: Phase, learned: Learned) -> None:
    """Records in the ledger the bytes of one device's memory that each role uses, and the bytes
    that everything else uses together.
    """
    device = self._ledger_device
    total = await self._process.device.run(memory.live_bytes, device)
    held = {role: memory.device_bytes(tree, device) for role, tree in roles_of(learned).items()}
    if self._engine is not None:
      held[ENGINE] = self._engine.device_bytes
      total += held[ENGINE] if self._engine.is_outside else 0
    other = total - sum(held.values())
    self._process.events.message(
      Edge.LEDGER, phase=str(phase), total=total, roles=held, other=other
    )
    self._metrics[f'perf/memory_{phase}_bytes'] = float(total)


async def _nothing() -> None:
  """Does nothing. Broadcasting its result makes the processes wait for each other."""
