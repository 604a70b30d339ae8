"""Conversion between Hugging Face's config.json and ModelSpec.

A config.json may have the form of transformers v4 or v5.

Invariant: a setting that affects numerical results is either applied or rejected, never ignored.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.files import parse_json, read_bytes
from jaxrl_llm.models.families import FAMILIES, Family, find_family
from jaxrl_llm.models.heads import is_tied
from jaxrl_llm.models.spec import ModelSpec, RopeScaling

_ROPE_KEYS: Mapping[str, frozenset[str]] = {
  'default': frozenset(),
  'linear': frozenset({'factor'}),
  'llama3': frozenset(
    {'factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'}
  ),
}
"""Names of the numeric parameters of each supported rope type, keyed by type."""

_SAME_NAMES = (
  'vocab_size',
  'hidden_size',
  'intermediate_size',
  'num_hidden_layers',
  'num_attention_heads',
  'num_key_value_heads',
  'head_dim',
  'rms_norm_eps',
  'max_position_embeddings',
  'initializer_range',
)
"""Fields of ModelSpec that have the same name in config.json."""


class _HfConfig:
  """Settings from one config.json. The path is part of error messages."""

  def __init__(self, path: Path, values: Mapping[str, Any]):
    self.path, self.values = path, values

  def error(self, name: str, got: Any, wanted: str) -> UserError:
    return UserError(f'{self.path}: {name} is {one_line(json.dumps(got), 200)}, wanted {wanted}')

  def number(
    self,
    name: str,
    default: int | float | None,
    kind: type,
    values: Mapping[str, Any] | None = None,
  ) -> Any:
    """Returns the number with key `name`, or `default` if the value is null or absent.

    Raises UserError if the result is None, or is not a positive number of type `kind`.

    Args:
      name: key of the setting.
      default: value to return if the setting is null or absent.
      kind: int or float.
      values: object with the setting. If None, the settings of the whole file are used.
    """
    values = self.values if values is None else values
    value = values.get(name)
    value = default if value is None else value
    if value is None:
      raise UserError(f'{self.path}: {name} is missing; a decoder cannot be built without it')
    if (
      isinstance(value, bool) or not isinstance(value, int | float) or not _is_positive(value, kind)
    ):
      raise self.error(name, value, f'a positive {kind.__name__}')
    return kind(value)

  def flag(self, name: str, default: bool) -> bool:
    value = self.values.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
      raise self.error(name, value, 'true or false')
    return value


def _is_positive(value: int | float, kind: type) -> bool:
  try:
    return math.isfinite(value) and value > 0 and kind(value) == value
  except OverflowError:  # The value is an integer outside the range of floats.
    return False


JSON_BYTES = 64 << 20
"""Maximum size in bytes of a file for `read_json`. Even the weight indexes of large models have
only a few MB.
"""


def read_json(path: Path) -> dict[str, Any]:
  """Reads a JSON object from a file. Raises a UserError that names the file if that fails."""
  try:
    values = parse_json(read_bytes(path, JSON_BYTES).decode())
  except FileNotFoundError:
    raise UserError(
      f'{path}: no such file; {path.parent} is not a Hugging Face model directory'
    ) from None
  except (ValueError, OSError) as error:
    raise UserError(f'{path}: cannot be read as JSON ({one_line(error)})') from None
  if not isinstance(values, dict):
    raise UserError(f'{path}: holds a {type(values).__name__}, wanted a JSON object')
  return values


def read_spec(directory: str | Path) -> ModelSpec:
  """Reads the model spec from a directory's config.json.

  The file may have the form of transformers v4 (`rope_theta`, `rope_scaling`) or v5
  (`rope_parameters`). If it has both, they must agree. For absent keys, transformers' defaults are
  used. The class named in `architectures` determines the head; if no class is named, the head is
  'lm'. Raises UserError if the file cannot be read or describes a model that is not supported.
  """
  path = Path(directory) / 'config.json'
  config = _HfConfig(path, read_json(path))
  name = config.values.get('model_type')
  if not isinstance(name, str) or name not in FAMILIES:
    raise config.error('model_type', name, f'one of {", ".join(FAMILIES)}')
  family = FAMILIES[name]
  head = _head(config, family)
  _refuse_unsupported(config, family)
  heads = config.number('num_attention_heads', None, int)
  hidden = config.number('hidden_size', None, int)
  # A null num_key_value_heads means one key-value head per attention head, and a null head_dim
  # means hidden_size / num_attention_heads. The family's defaults apply only to absent keys.
  kv_default = None if 'num_key_value_heads' in config.values else family.num_key_value_heads
  head_default = None if 'head_dim' in config.values else family.head_dim
  positions = config.number('max_position_embeddings', family.max_position_embeddings, int)
  theta, scaling = _read_rope(config, family.rope_theta, positions)
  bias = _attention_bias(config, family)
  fields = {
    'vocab_size': config.number('vocab_size', None, int),
    'hidden_size': hidden,
    'intermediate_size': config.number('intermediate_size', None, int),
    'num_hidden_layers': config.number('num_hidden_layers', None, int),
    'num_attention_heads': heads,
    'num_key_value_heads': config.number('num_key_value_heads', kv_default or heads, int),
    'head_dim': config.number('head_dim', head_default or hidden // heads, int),
    'rope_theta': theta,
    'rope_scaling': scaling,
    'rms_norm_eps': config.number('rms_norm_eps', family.rms_norm_eps, float),
    'tie_word_embeddings': config.flag('tie_word_embeddings', False) and head == 'lm',
    'max_position_embeddings': positions,
    'qkv_bias': bias,
    'o_bias': bias and family.attention_bias == 'optional',
    'mlp_bias': config.flag('mlp_bias', False),
    'qk_norm': family.qk_norm,
    'initializer_range': config.number('initializer_range', 0.02, float),
    'head': head,
  }
  try:
    return ModelSpec(family=name, **fields)
  except UserError as error:
    raise UserError(f'{path}: {error}') from None


def _refuse_unsupported(config: _HfConfig, family: Family) -> None:
  """Raises UserError for settings that affect numerical results but are not implemented by this
  package's decoder.
  """
  values = config.values
  if values.get('hidden_act', 'silu') not in ('silu', 'swish'):
    raise config.error('hidden_act', values['hidden_act'], '"silu"')
  if values.get('quantization_config') is not None:
    raise config.error(
      'quantization_config',
      values['quantization_config'],
      'null: only unquantized weights are read',
    )
  if values.get('is_causal') is False or values.get('use_bidirectional_attention'):
    raise UserError(
      f'{config.path}: attention is bidirectional (is_causal, use_bidirectional_attention), wanted '
      'causal'
    )
  if config.flag('mlp_bias', False) and not family.mlp_bias:
    raise config.error('mlp_bias', True, f'false: {family.name} has no biases in its MLP')
  layers = config.number('num_hidden_layers', None, int)
  kinds = values.get('layer_types') or []
  if not isinstance(kinds, list):
    raise config.error('layer_types', kinds, 'a list with the kind of each layer')
  # In a family that has the key use_sliding_window, a sliding window applies only if this key is
  # true, and only to the layers from max_window_layers on. In other families, a window always
  # applies. If the file has layer_types, these decide instead, except as stated below.
  first = values.get('max_window_layers')
  if first is not None and not isinstance(first, int):
    raise config.error('max_window_layers', first, 'a number of layers')
  windowed = values.get('sliding_window', family.sliding_window) is not None and (
    'use_sliding_window' not in family.full_attention
    or (config.flag('use_sliding_window', False) and (28 if first is None else first) < layers)
  )
  # Models of a family with a default window use it in all layers, regardless of layer_types.
  if any(kind != 'full_attention' for kind in kinds) or (
    windowed and (not kinds or family.sliding_window is not None)
  ):
    got = {
      name: values.get(name)
      for name in ('sliding_window', 'use_sliding_window', 'max_window_layers')
    }
    details = one_line(f'{json.dumps(got)}, layer_types {sorted(set(map(str, kinds)))}')
    raise UserError(
      f'{config.path}: attention has a sliding window ({details}), wanted full attention in every '
      'layer'
    )


def _head(config: _HfConfig, family: Family) -> str:
  """Returns the head that the class named in `architectures` has, or 'lm' if none is named. Raises
  UserError for an unknown class, and for a reward model or critic with several outputs.
  """
  names, classes = config.values.get('architectures'), family.architectures
  if not names:
    return 'lm'
  head = next((head for head, name in classes.items() if names == [name]), None)
  if head is None:
    raise config.error('architectures', names, f'one of {", ".join(classes.values())}')
  if head != 'lm':
    _require_one_label(config)
  return head


def _require_one_label(config: _HfConfig) -> None:
  # The number of labels in transformers is the size of id2label or, if that is absent, num_labels.
  # If both are absent, it is 2.
  labels, count = config.values.get('id2label'), config.values.get('num_labels')
  if labels is not None and (not isinstance(labels, dict) or len(labels) != 1):
    raise config.error('id2label', labels, 'one label: a reward model or critic has one output')
  if count != 1 and (count is not None or labels is None):
    raise config.error('num_labels', count, '1: a reward model or critic has one output')


def _attention_bias(config: _HfConfig, family: Family) -> bool:
  """Returns whether q, k and v have biases. Raises UserError if the model family does not permit
  the configured value.
  """
  always = family.attention_bias == 'qkv'
  value = config.flag('attention_bias', always)
  if always and not value:
    raise config.error(
      'attention_bias', value, f'true: {family.name} always has biases on q, k and v'
    )
  if value and family.attention_bias == 'never':
    raise config.error(
      'attention_bias', value, f'false: {family.name} has no biases in its attention'
    )
  return value


def _read_rope(
  config: _HfConfig, default_theta: float, positions: int
) -> tuple[float, RopeScaling | None]:
  """Returns the base and scaling of the rotary position embedding (rope). Raises UserError if the
  file has both `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5), and the two
  disagree.
  """
  v4, v5 = config.values.get('rope_scaling'), config.values.get('rope_parameters')
  read = functools.partial(_rope, config, default_theta=default_theta, positions=positions)
  if v4 and v5:
    if read('rope_scaling', v4) != read('rope_parameters', v5):
      raise UserError(
        f'{config.path}: rope_scaling {v4} and rope_parameters {v5} disagree; remove one of them'
      )
    return read('rope_parameters', v5)
  return read('rope_scaling' if v4 else 'rope_parameters', v4 or v5 or {})


def _rope(
  config: _HfConfig, name: str, values: Any, *, default_theta: float, positions: int
) -> tuple[float, RopeScaling | None]:
  if not isinstance(values, dict):
    raise config.error(name, values, 'an object or null')
  kind = values.get('rope_type', values.get('type', 'default'))
  if not isinstance(kind, str) or kind not in _ROPE_KEYS:
    raise config.error(f'{name}.rope_type', kind, f'one of {", ".join(_ROPE_KEYS)}')
  common = {'rope_theta', 'rope_type', 'type', 'partial_rotary_factor'}
  unknown = sorted(set(values) - common - _ROPE_KEYS[kind])
  if unknown:
    raise config.error(
      f'{name}.{unknown[0]}', values[unknown[0]], f'no such key with rope_type {kind}'
    )
  for place in (values, config.values):
    if place.get('partial_rotary_factor') not in (None, 1):
      raise config.error(
        'partial_rotary_factor', place['partial_rotary_factor'], '1: all of a head is rotated'
      )
  outer = config.number('rope_theta', default_theta, float)
  theta = config.number('rope_theta', outer, float, values)
  if config.values.get('rope_theta') is not None and theta != outer:
    raise UserError(
      f'{config.path}: rope_theta is {outer:g}, {name}.rope_theta {theta:g}; remove one of them'
    )
  if kind == 'default':
    return theta, None
  factor = config.number('factor', None, float, values)
  if kind == 'linear':
    return theta, RopeScaling(kind='linear', factor=factor)
  original = config.number('original_max_position_embeddings', positions, int, values)
  # Only some releases of transformers read this key outside the scaling object, so a different
  # value there is rejected.
  if config.values.get('original_max_position_embeddings') not in (None, original):
    got = config.values['original_max_position_embeddings']
    raise config.error(
      'original_max_position_embeddings', got, f'{original}, as in {name}: remove one of them'
    )
  low, high = (
    config.number(f'{which}_freq_factor', None, float, values) for which in ('low', 'high')
  )
  if high <= low:
    raise UserError(
      f'{config.path}: {name}.high_freq_factor {high:g} is not above low_freq_factor {low:g}'
    )
  return theta, RopeScaling(
    kind='llama3',
    factor=factor,
    low_freq_factor=low,
    high_freq_factor=high,
    original_max_position_embeddings=original,
  )


def _write_rope(spec: ModelSpec) -> dict[str, Any]:
  scaling = spec.rope_scaling
  if scaling is None:
    return {'rope_type': 'default', 'rope_theta': spec.rope_theta}
  numbers = {name: getattr(scaling, name) for name in sorted(_ROPE_KEYS[scaling.kind])}
  return {'rope_type': scaling.kind, 'rope_theta': spec.rope_theta, **numbers}


def one_or_list(ids: Sequence[int]) -> int | list[int] | None:
  """Formats token ids as Hugging Face does: None if there are no ids, a number for a single id, and
  a list for several.
  """
  return None if not ids else ids[0] if len(ids) == 1 else list(ids)


def write_config(
  directory: str | Path,
  spec: ModelSpec,
  *,
  dtype: str,
  bos_id: int | None = None,
  eos_ids: Sequence[int] = (),
  pad_id: int | None = None,
) -> None:
  """Writes config.json in the form of transformers v5. Raises UserError if the file cannot express
  the model, or if a model with a 'scalar' head has no token for padding.

  Args:
    directory: output directory, which must exist.
    spec: spec of the model. Its head determines the class that is named in the file.
    dtype: Hugging Face name of the data type of the weights.
    bos_id: id of the beginning-of-text token, or None if there is none.
    eos_ids: ids of the tokens that end a completion.
    pad_id: id of the padding token, or None if there is none. A model with a 'scalar' head needs a
      padding token, because transformers takes the score at the last token that is not padding. If
      `pad_id` is None, `bos_id` is used instead, because this token never ends a sequence. If both
      are None, the first of `eos_ids` is used.
  """
  family = find_family(spec.family)
  _check_expressible(directory, spec, family)
  if spec.head == 'scalar':
    pad_id = _scoring_pad(directory, pad_id, bos_id, eos_ids)
  config = {
    'architectures': [family.architectures[spec.head]],
    'model_type': family.name,
    'dtype': dtype,
    'hidden_act': 'silu',
    **{name: getattr(spec, name) for name in _SAME_NAMES},
    'tie_word_embeddings': is_tied(spec),
    'rope_parameters': _write_rope(spec),
    'attention_dropout': 0.0,
    'use_cache': True,
    **family.full_attention,
    **({'attention_bias': spec.qkv_bias} if family.attention_bias == 'optional' else {}),
    **({'mlp_bias': spec.mlp_bias} if family.mlp_bias else {}),
    **_one_output(spec.head),
    'bos_token_id': bos_id,
    'eos_token_id': one_or_list(eos_ids),
    'pad_token_id': pad_id,
    'transformers_version': importlib.metadata.version('transformers'),
  }
  write_json(Path(directory) / 'config.json', config)


def _check_expressible(directory: str | Path, spec: ModelSpec, family: Family) -> None:
  """Raises UserError if transformers has no model of this family with the spec's head, biases,
  norms and sizes.
  """
  if spec.head not in family.architectures:
    others = [name for name, other in FAMILIES.items() if spec.head in other.architectures]
    raise UserError(
      f'{directory}: transformers has no class for a {family.name} model with a {spec.head} head; '
      f'the families {", ".join(others)} have one'
    )
  biases = {
    'never': [(False, False)],
    'qkv': [(True, False)],
    'optional': [(False, False), (True, True)],
  }
  has_biases = (spec.qkv_bias, spec.o_bias) in biases[family.attention_bias]
  has_biases = has_biases and family.mlp_bias >= spec.mlp_bias
  if not has_biases or spec.qk_norm != family.qk_norm:
    raise UserError(
      f'{family.name} in Hugging Face form cannot have qkv_bias={spec.qkv_bias}, '
      f'o_bias={spec.o_bias}, mlp_bias={spec.mlp_bias}, qk_norm={spec.qk_norm} together; train '
      'with the biases and norms of the family'
    )
  if family.heads_divide_hidden and spec.hidden_size % spec.num_attention_heads:
    raise UserError(
      f'{family.name} in Hugging Face form needs hidden_size {spec.hidden_size} to be a multiple '
      f'of {spec.num_attention_heads} heads'
    )


def _one_output(head: str) -> dict[str, Any]:
  """Returns the additional settings in config.json for a head with one output; empty for 'lm'."""
  if head == 'lm':
    return {}
  # Without 'regression', vLLM would return the sigmoid of the output.
  labels = {'id2label': {'0': 'LABEL_0'}, 'label2id': {'LABEL_0': 0}, 'problem_type': 'regression'}
  return labels | ({'classifier_dropout': 0.0} if head == 'value' else {})


def _scoring_pad(
  directory: str | Path, pad_id: int | None, bos_id: int | None, eos_ids: Sequence[int]
) -> int:
  pad = next((token for token in (pad_id, bos_id, *eos_ids) if token is not None), None)
  if pad is None:
    raise UserError(
      f'{directory}: pad_id, bos_id and eos_ids are all unset; transformers finds the token that a '
      'reward model scores by the padding after it; set a padding token'
    )
  if pad_id is None:
    logging.warning(
      '%s: no padding token is set; config.json names token %d: pad sequences with it',
      directory,
      pad,
    )
  if pad in eos_ids:
    logging.warning(
      '%s: token %d is both padding and an end of text; in a sequence that ends with it, '
      'transformers scores the token before, jaxrl_llm the last one',
      directory,
      pad,
    )
  return pad


def write_json(path: Path, values: Mapping[str, Any]) -> None:
  path.write_text(json.dumps(values, indent=2) + '\n')
