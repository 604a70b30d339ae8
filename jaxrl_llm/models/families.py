"""Model families: fixed properties and defaults of each; adding one takes an entry here and no code elsewhere.

Invariant: the decoder never checks a family's name; all differences between families are in their `ModelSpec`s.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.models.spec import ModelSpec, RopeScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """Properties that `transformers` fixes for a model_type (biases, q/k norm), and its defaults for the rest."""

  name: str
  description: str
  architecture: str
  """Class named by `architectures` in config.json, for the 'lm' head."""
  qkv_bias: bool
  qk_norm: bool
  rope_theta: float
  rms_norm_eps: float


FAMILIES: Mapping[str, Family] = MappingProxyType(
  {
    family.name: family
    for family in (
      Family(
        name='qwen2',
        description='Qwen 2 and 2.5: biases on query, key and value',
        architecture='Qwen2ForCausalLM',
        qkv_bias=True,
        qk_norm=False,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
      ),
      Family(
        name='qwen3',
        description='Qwen 3 (dense): queries and keys normalised per head',
        architecture='Qwen3ForCausalLM',
        qkv_bias=False,
        qk_norm=True,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
      ),
      Family(
        name='llama',
        description='Llama 2 and 3, with linear or llama3 rope scaling',
        architecture='LlamaForCausalLM',
        qkv_bias=False,
        qk_norm=False,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
      ),
    )
  }
)


def find_family(name: str) -> Family:
  """Returns a family by name. Raises UserError that lists the known families."""
  if name not in FAMILIES:
    raise UserError(f'model family: got {name!r}, wanted one of {", ".join(FAMILIES)}')
  return FAMILIES[name]


def tiny(family: str, vocab_size: int, **overrides: Any) -> ModelSpec:
  """Returns a spec small enough for a CPU: 2 layers of width 64, 4 heads of 32, 2 key-value heads, tied embeddings.

  Args:
    family: name in FAMILIES.
    vocab_size: rows of the embedding.
    **overrides: other values for fields of ModelSpec; `rope_scaling` may be a mapping of RopeScaling's fields.
  """
  fixed = find_family(family)
  known = {field.name for field in dataclasses.fields(ModelSpec)} - {'family', 'vocab_size'}
  for name in overrides:
    if name not in known:
      near = difflib.get_close_matches(name, known, n=1)
      hint = f'did you mean {near[0]}?' if near else f'wanted one of {", ".join(sorted(known))}'
      raise UserError(f'model: ModelSpec has no field {name!r}; {hint}')
  scaling = overrides.get('rope_scaling')
  if isinstance(scaling, Mapping):
    overrides = {**overrides, 'rope_scaling': _rope_scaling(scaling)}
  _check_choice('model.head', overrides.get('head', 'lm'), ('lm', 'value', 'scalar'))
  defaults = {
    'hidden_size': 64,
    'intermediate_size': 128,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 32,
    'rope_theta': fixed.rope_theta,
    'rms_norm_eps': fixed.rms_norm_eps,
    'tie_word_embeddings': True,
    'max_position_embeddings': 512,
    'qkv_bias': fixed.qkv_bias,
    'qk_norm': fixed.qk_norm,
  }
  return ModelSpec(family=family, vocab_size=vocab_size, **{**defaults, **overrides})


def _rope_scaling(fields: Mapping[str, Any]) -> RopeScaling:
  known = [field.name for field in dataclasses.fields(RopeScaling)]
  unknown = sorted(set(fields) - set(known))
  if unknown or not {'kind', 'factor'} <= set(fields):
    raise UserError(
      f'model.rope_scaling: got fields {sorted(fields)}, wanted kind and factor, and of {", ".join(known)}'
    )
  _check_choice('model.rope_scaling.kind', fields['kind'], ('linear', 'llama3'))
  return RopeScaling(**fields)


def _check_choice(name: str, value: str, wanted: tuple[str, ...]) -> None:
  if value not in wanted:
    raise UserError(f'{name}: got {value!r}, wanted one of {", ".join(wanted)}')
