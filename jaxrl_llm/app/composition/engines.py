"""Builds the rollout engine that a configuration names."""

from __future__ import annotations

import pathlib

from jaxrl_llm.app.composition.prepare import Prepared
from jaxrl_llm.app.schema import Config
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.rollout.api import Engine
from jaxrl_llm.rollout.engine import EngineSetting


def engine_setting(config: Config, workdir: pathlib.Path, prepared: Prepared) -> EngineSetting:
  """Returns the facts about the run that its engine needs."""
  texts = (
    task.prompt[-1]['content'] for taskset in prepared.tasksets.values() for task in taskset.tasks
  )
  return EngineSetting(
    spec=prepared.spec,
    dtype=config.policy.dtype,
    param_dtype=config.policy.param_dtype,
    lora=config.policy.lora,
    max_length=config.rollout.max_length,
    seed=config.seed,
    tokenizer=prepared.tokenizer,
    text=next(texts, ''),
    workdir=workdir,
  )


def build_engine(
  config: Config, workdir: pathlib.Path, prepared: Prepared, device: DeviceThread
) -> Engine:
  """Builds process 0's engine without starting it."""
  return config.rollout.engine_spec().build(engine_setting(config, workdir, prepared), device.run)
