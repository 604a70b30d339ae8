"""Builds the `EngineSpec` of the embedded engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax

from jaxrl_llm.models.api import Model, build_model
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.rollout.embedded.engine import EmbeddedConfig, EmbeddedEngine, build_programs
from jaxrl_llm.rollout.embedded.placement import place
from jaxrl_llm.rollout.engine import EngineSetting, EngineSpec, Run


def embedded_engine(config: EmbeddedConfig) -> EngineSpec:
  """Returns the spec of the embedded engine, a JAX sampler in the trainer's process."""

  def build(setting: EngineSetting, run: Run) -> EmbeddedEngine:
    return EmbeddedEngine(
      _model(setting), config, max_length=setting.max_length, seed=setting.seed, run=run
    )

  def programs(
    setting: EngineSetting, devices: Sequence[jax.Device]
  ) -> Iterator[tuple[str, jax.stages.Lowered]]:
    lowered = build_programs(_model(setting), config, setting.max_length, devices).lower(
      filtered=config.filters
    )
    on = 'one device' if config.mesh is None else f'{len(devices)} devices'
    for (kind, detail), program in lowered.items():
      if kind != 'admit':
        decode = 'filtered decode' if detail else 'decode'
        yield f'{f"{kind} {detail}" if kind == "prefill" else decode}, on {on}', program

  def device_bytes(setting: EngineSetting, devices: Sequence[jax.Device]) -> int:
    return build_programs(_model(setting), config, setting.max_length, devices).planned_bytes

  def check_devices(setting: EngineSetting, devices: Sequence[jax.Device]) -> None:
    place(config.mesh, devices, spec=setting.spec, slots=config.slots)

  sharded = config.mesh is not None

  return EngineSpec(
    build=build,
    unsupported=config.unsupported,
    dtype='policy' if sharded else None,
    loads_device_arrays=sharded,
    check_devices=check_devices,
    programs=programs,
    device_bytes=device_bytes,
  )


def _model(setting: EngineSetting) -> Model:
  return build_model(
    setting.spec, ModelOptions(dtype=setting.dtype, param_dtype=setting.param_dtype)
  )
