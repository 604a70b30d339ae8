"""The families: what their members have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.models.spec import ModelSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """Fields of ModelSpec that every member shares, and the constants its configurations default to."""

  qkv_bias: bool
  qk_norm: bool
  rms_norm_eps: float
  rope_theta: float
  description: str


FAMILIES: Mapping[str, Family] = {
  'qwen2': Family(
    qkv_bias=True, qk_norm=False, rms_norm_eps=1e-6, rope_theta=1e6, description='Qwen2 and Qwen2.5: biases on q, k, v'
  ),
  'qwen3': Family(
    qkv_bias=False, qk_norm=True, rms_norm_eps=1e-6, rope_theta=1e6, description='Qwen3 (dense): norms on q and k heads'
  ),
  'llama': Family(
    qkv_bias=False, qk_norm=False, rms_norm_eps=1e-5, rope_theta=5e5, description='Llama 2 and 3, with llama3 scaling'
  ),
}


def tiny(family: str, vocab_size: int, **overrides: Any) -> ModelSpec:
  """A small member of `family` (head_dim 32, the least that vLLM serves on a CPU), with any field overridden."""
  if family not in FAMILIES:
    raise UserError(f'policy.family {family!r}: unknown; there are {", ".join(FAMILIES)}')
  constants = FAMILIES[family]
  fields = {
    'hidden_size': 128,
    'intermediate_size': 384,
    'num_hidden_layers': 3,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 32,
    'rope_theta': constants.rope_theta,
    'rms_norm_eps': constants.rms_norm_eps,
    'tie_word_embeddings': True,
    'max_position_embeddings': 1024,
    'qkv_bias': constants.qkv_bias,
    'qk_norm': constants.qk_norm,
  }
  known = {field.name for field in dataclasses.fields(ModelSpec)}
  for name in overrides:
    if name not in known:
      raise UserError(f'policy.model.{name}: no field of ModelSpec; there are {", ".join(sorted(known))}')
  try:
    return ModelSpec(family=family, vocab_size=vocab_size, **{**fields, **overrides})
  except ValueError as error:
    raise UserError(f'policy.model: {error}') from None
