"""Catalogue of engines: the options class and factory of each, keyed by engine name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.rollout.embedded.engine import EmbeddedConfig
from jaxrl_llm.rollout.embedded.spec import embedded_engine
from jaxrl_llm.rollout.engine import EngineSpec
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.vllm.spec import vllm_engine

ENGINES: Mapping[str, tuple[type, Callable[[Any], EngineSpec]]] = {
  'embedded': (EmbeddedConfig, embedded_engine),
  'vllm': (VllmConfig, vllm_engine),
}
"""Options class and factory of each engine, keyed by engine name. The options are set in the field
of the same name in the configuration section `rollout`.
"""
