"""Builds the `EngineSpec` of the embedded engine."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from jaxrl_llm.models.api import Model, build_model
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.rollout.embedded.engine import EmbeddedConfig, EmbeddedEngine, build_programs
from jaxrl_llm.rollout.engine import EngineSetting, EngineSpec, Run


def embedded_engine(config: EmbeddedConfig) -> EngineSpec:
  """Returns the spec of the embedded engine, a JAX sampler in the trainer's process."""

  def build(setting: EngineSetting, run: Run) -> EmbeddedEngine:
    return EmbeddedEngine(
      _model(setting), config, max_length=setting.max_length, seed=setting.seed, run=run
    )

  def programs(
    setting: EngineSetting, device: jax.Device
  ) -> Iterator[tuple[str, jax.stages.Lowered]]:
    lowered = build_programs(_model(setting), config, setting.max_length, device).lower(
      filtered=config.filters
    )
    for (kind, detail), program in lowered.items():
      if kind != 'admit':
        yield (
          f'{kind} {detail}' if kind == 'prefill' else 'filtered decode' if detail else 'decode',
          program,
        )

  def device_bytes(setting: EngineSetting, device: jax.Device) -> int:
    return build_programs(_model(setting), config, setting.max_length, device).planned_bytes

  return EngineSpec(
    build=build,
    unsupported=config.unsupported,
    programs=programs,
    device_bytes=device_bytes,
  )


def _model(setting: EngineSetting) -> Model:
  return build_model(
    setting.spec, ModelOptions(dtype=setting.dtype, param_dtype=setting.param_dtype)
  )
