"""Builds the rollout engine that a configuration names."""

from __future__ import annotations

import pathlib

from jaxrl_llm.app.composition.prepare import Prepared
from jaxrl_llm.app.composition.stages import policy_options
from jaxrl_llm.app.schema import Config
from jaxrl_llm.core.net.registry import Registry
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.rollout.api import Engine
from jaxrl_llm.rollout.engine import EngineSetting
from jaxrl_llm.runtime.events import SILENT, Edge, Events


def engine_setting(
  config: Config,
  workdir: pathlib.Path,
  prepared: Prepared,
  *,
  registry: Registry | None = None,
  events: Events = SILENT,
) -> EngineSetting:
  """Returns the settings of the run with which an engine is built.

  Args:
    registry: registry of the run. None if the run has none, or if no engine will be started.
    events: event log, in which servers that join or leave are recorded.
  """

  def on_server(name: str, how: str) -> None:
    events.message(Edge.SERVER, server=name, how=how)

  texts = (
    task.prompt[-1]['content'] for taskset in prepared.tasksets.values() for task in taskset.tasks
  )
  return EngineSetting(
    spec=prepared.spec,
    dtype=policy_options(config).dtype,
    param_dtype=config.policy.param_dtype,
    lora=config.policy.lora,
    max_length=config.rollout.max_length,
    seed=config.seed,
    tokenizer=prepared.tokenizer,
    text=next(texts, ''),
    workdir=workdir,
    registry=registry,
    direct=config.rollout.is_direct,
    on_server=on_server,
  )


def build_engine(
  config: Config,
  workdir: pathlib.Path,
  prepared: Prepared,
  device: DeviceThread,
  *,
  registry: Registry | None = None,
  events: Events = SILENT,
) -> Engine:
  """Builds process 0's engine without starting it. For `registry` and `events`, see
  `engine_setting`.
  """
  setting = engine_setting(config, workdir, prepared, registry=registry, events=events)
  return config.rollout.engine_spec().build(setting, device.run)
