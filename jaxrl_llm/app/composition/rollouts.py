"""Builds the part of a run that generates rollouts: workflow, auxiliary models and explorers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

from jaxrl_llm.app.composition.prepare import Prepared
from jaxrl_llm.app.composition.setup import Setup
from jaxrl_llm.app.composition.workflows import build_workflow
from jaxrl_llm.app.rollout_config import RolloutConfig
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.connections import read_key
from jaxrl_llm.core.net.registry import (
  Kind,
  Lease,
  Registry,
  public_address,
  registered,
  service_name,
)
from jaxrl_llm.master.exploring.hub import MasterHub
from jaxrl_llm.rewards.pool.pool import ScorerPool
from jaxrl_llm.rollout.api import Engine
from jaxrl_llm.rollout.auxiliary import AuxiliaryModel
from jaxrl_llm.rollout.explorers.crew import Crew, ExplorersConfig
from jaxrl_llm.rollout.explorers.explorer import Welcome
from jaxrl_llm.rollout.explorers.process import ExplorerCommand
from jaxrl_llm.rollout.untrusted import Bounds
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.workflow import Workflow, turns_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutServices:
  """The workflow of a run, with its auxiliary models and explorer processes."""

  hub: MasterHub
  """Hub through which the workflow reaches the engine, the scorers and the auxiliary models."""
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
    """Stops all parts that were started, even if `start` failed half-way."""
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
    engine, scorers, setup.config.rewards_of, auxiliary=auxiliary, events=setup.process.events
  )
  # Build the workflow in this process even if explorers run it, so that an invalid workflow is
  # reported before any explorer starts.
  limits = (rollout.max_response_length, rollout.max_steps, rollout.max_prompt_length)
  workflow = build_workflow(rollout.workflow, hub, tokenizer, *limits)
  crew = None
  if rollout.explorers is not None and engine is not None:
    welcome = Welcome(
      workflow=rollout.workflow,
      max_tokens=rollout.max_response_length,
      max_steps=rollout.max_steps,
      max_prompt=rollout.max_prompt_length,
      tokenizer=tokenizer.files,
    )
    explorers = _with_key(rollout.explorers, registry)
    if explorers.direct:
      _check_tokens(explorers, rollout.vllm, registry)
    crew = Crew(
      hub,
      explorers,
      welcome=welcome.row(),
      text=workflow.text,
      turns=functools.partial(turns_of, tokenizer),
      bounds=Bounds(vocab_size=prepared.spec.vocab_size, max_length=rollout.max_length),
      max_steps=rollout.max_steps,
      logs=setup.workdir.absolute() / 'logs',
      command=_with_ca_file(setup.explorer_command, rollout),
      announce=None
      if registry is None
      else functools.partial(_announced, registry, setup.config.name),
    )
  return RolloutServices(
    hub=hub, workflow=crew or workflow, auxiliary=tuple(auxiliary.values()), crew=crew
  )


def _with_key(config: ExplorersConfig, registry: Registry | None) -> ExplorersConfig:
  """Returns the configuration in which the server for explorers uses the registry's key as its
  token, unless a token file is configured.
  """
  listen = config.listen
  if registry is None or listen is None or listen.token_file is not None:
    return config
  listen = dataclasses.replace(listen, token_file=str(registry.key_file))
  return dataclasses.replace(config, listen=listen)


def _check_tokens(explorers: ExplorersConfig, vllm: VllmConfig, registry: Registry | None) -> None:
  """Raises UserError if explorers of other hosts have the servers' token, with which they could
  sign completions.
  """
  if explorers.listen is None:
    return
  theirs = read_key(explorers.listen.token_file, 'rollout.explorers.listen.token_file')
  servers = read_key(vllm.key_file, 'rollout.vllm.key_file') or (registry and registry.key)
  if theirs == servers:
    raise UserError(
      'rollout.explorers.direct: True, but the token of rollout.explorers.listen is that of the '
      'servers, with which explorers could sign; give explorers another token'
    )


def _with_ca_file(command: ExplorerCommand, rollout: RolloutConfig) -> ExplorerCommand:
  """Returns the command of local explorers. If they fetch completions from servers, the command
  gets the CA certificates with which they verify the servers.
  """
  if not rollout.is_direct or rollout.vllm.ca_file is None:
    return command
  return lambda master, name: [*command(master, name), f'--ca_file={rollout.vllm.ca_file}']


def _announced(
  registry: Registry, name: str, address: str
) -> contextlib.AbstractAsyncContextManager[None]:
  """Returns a context manager that announces the run to explorers at `address` during its block."""
  lease = Lease(kind=Kind.MASTER, name=service_name(name), address=public_address(address))
  return registered(registry, lease)
