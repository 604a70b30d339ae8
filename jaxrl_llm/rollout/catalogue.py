"""Catalogue of engines: the options class and factory of each, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.config.annotations import nearest
from jaxrl_llm.config.own import own_pair
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rollout.embedded.engine import EmbeddedConfig
from jaxrl_llm.rollout.embedded.spec import embedded_engine
from jaxrl_llm.rollout.engine import EngineSpec
from jaxrl_llm.rollout.vllm.server import VllmConfig
from jaxrl_llm.rollout.vllm.spec import vllm_engine

ENGINES: Mapping[str, tuple[type, Callable[[Any], EngineSpec]]] = {
  'embedded': (EmbeddedConfig, embedded_engine),
  'vllm': (VllmConfig, vllm_engine),
}
"""The options of an engine are the field of `rollout` that has its name."""


def engine_pair(name: str) -> tuple[type, Callable[[Any], EngineSpec]]:
  """Returns an engine of the catalogue, or a user's: a pair of an options dataclass and a function of it."""
  if ':' in name:
    return own_pair(name, 'engine')
  if name not in ENGINES:
    raise UserError(
      f"rollout.engine: no engine {name!r}; {nearest(name, ENGINES)}; one of your own is 'module:attribute'"
    )
  return ENGINES[name]
