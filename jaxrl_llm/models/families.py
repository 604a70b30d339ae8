"""Model families. The table entry of a family defines everything that distinguishes it, so a new
family needs no other code.

Invariant: no module checks a family's name. The decoder and the names of the weights follow from
the `ModelSpec`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.models.spec import ModelSpec, RopeScaling


def _classes(prefix: str) -> Mapping[str, str]:
  tasks = {'lm': 'CausalLM', 'scalar': 'SequenceClassification', 'value': 'TokenClassification'}
  return MappingProxyType({head: f'{prefix}For{task}' for head, task in tasks.items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """Properties that `transformers` fixes for a model_type, and the defaults of `transformers` for
  keys that are absent from config.json.
  """

  name: str
  """Value of `model_type` in config.json."""
  description: str
  architectures: Mapping[str, str]
  """Name of the `transformers` class for each head, as it appears in `architectures` in
  config.json.
  """
  attention_bias: Literal['never', 'qkv', 'optional'] = 'never'
  """Biases of the attention projections. 'never': no biases. 'qkv': biases on query, key and value.
  'optional': biases on all four projections if `attention_bias` in config.json is true.
  """
  mlp_bias: bool = False
  """Whether the key `mlp_bias` of config.json adds biases to the MLP."""
  qk_norm: bool = False
  """Whether queries and keys are normalised per head."""
  full_attention: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Settings in config.json that switch sliding windows off. If empty, the family has no sliding
  windows.
  """
  sliding_window: int | None = None
  """Default of the key `sliding_window`, in tokens. None means no window."""
  num_key_value_heads: int | None = None
  """Default number of key-value heads. If None, the default is one per query head."""
  head_dim: int | None = None
  """Default size of a head. If None, the default is hidden_size / num_attention_heads."""
  heads_divide_hidden: bool = False
  """Whether `transformers` refuses a hidden_size that is not a multiple of num_attention_heads."""
  max_position_embeddings: int
  rope_theta: float = 10_000.0
  rms_norm_eps: float = 1e-6
  tokenizers: tuple[str, ...] = ()
  """Names of the tokenizer class that AutoTokenizer creates for this family, even if the model
  directory names another class. If empty, AutoTokenizer creates the class that the directory names.
  """


FAMILIES: Mapping[str, Family] = MappingProxyType(
  {
    family.name: family
    for family in (
      Family(
        name='qwen2',
        description='Qwen 2 and 2.5: biases on query, key and value',
        architectures=_classes('Qwen2'),
        attention_bias='qkv',
        full_attention={'use_sliding_window': False, 'sliding_window': None},
        num_key_value_heads=32,
        max_position_embeddings=32768,
        tokenizers=('Qwen2Tokenizer', 'Qwen2TokenizerFast'),
      ),
      Family(
        name='qwen3',
        description='Qwen 3 (dense): queries and keys normalised per head',
        architectures=_classes('Qwen3'),
        attention_bias='optional',
        qk_norm=True,
        full_attention={'use_sliding_window': False, 'sliding_window': None},
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=32768,
      ),
      Family(
        name='llama',
        description='Llama 2 and 3, with linear or llama3 rope scaling',
        architectures=_classes('Llama'),
        attention_bias='optional',
        mlp_bias=True,
        heads_divide_hidden=True,
        max_position_embeddings=2048,
      ),
      Family(
        name='mistral',
        description='Mistral 7B since v0.2, without a sliding window',
        architectures=_classes('Mistral'),
        full_attention={'sliding_window': None},
        sliding_window=4096,
        num_key_value_heads=8,
        max_position_embeddings=131072,
      ),
    )
  }
)


def find_family(name: str) -> Family:
  """Returns the family with this name. For an unknown name, raises UserError with the known
  families.
  """
  if name not in FAMILIES:
    raise UserError(f'model family: got {name!r}, wanted one of {", ".join(FAMILIES)}')
  return FAMILIES[name]


def tiny(family: str, vocab_size: int, **overrides: Any) -> ModelSpec:
  """Returns a spec small enough for a CPU: 2 layers of width 64, 4 heads of size 32, 2 key-value
  heads, and tied embeddings.

  Args:
    family: name in FAMILIES.
    vocab_size: number of rows of the embedding.
    **overrides: values of other fields of ModelSpec, which replace the defaults. `rope_scaling` may
      be a mapping of RopeScaling's fields.
  """
  fixed = find_family(family)
  fields = {field.name for field in dataclasses.fields(ModelSpec)} - {'family', 'vocab_size'}
  for name in overrides:
    if name not in fields:
      near = difflib.get_close_matches(name, fields, n=1)
      hint = f'did you mean {near[0]}?' if near else f'wanted one of {", ".join(sorted(fields))}'
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
    'qkv_bias': fixed.attention_bias == 'qkv',
    'qk_norm': fixed.qk_norm,
  }
  return ModelSpec(family=family, vocab_size=vocab_size, **{**defaults, **overrides})


def _rope_scaling(fields: Mapping[str, Any]) -> RopeScaling:
  known = [field.name for field in dataclasses.fields(RopeScaling)]
  unknown = sorted(set(fields) - set(known))
  if unknown or not {'kind', 'factor'} <= set(fields):
    raise UserError(
      f'model.rope_scaling: got fields {sorted(fields)}, wanted kind and factor, and only fields '
      f'among {", ".join(known)}'
    )
  _check_choice('model.rope_scaling.kind', fields['kind'], ('linear', 'llama3'))
  return RopeScaling(**fields)


def _check_choice(name: str, value: str, wanted: tuple[str, ...]) -> None:
  if value not in wanted:
    raise UserError(f'{name}: got {value!r}, wanted one of {", ".join(wanted)}')
