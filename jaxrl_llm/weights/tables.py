"""Table of the parameter names in this package and their Hugging Face counterparts.

The spec of a model determines which rows of the table apply to it.

Invariant: both directions of the conversion use the same rows. A conversion only renames tensors
and never transposes them, because both sides store kernels as `[out, in]`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.models.heads import is_tied
from jaxrl_llm.models.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class ParameterRow:
  """One parameter of a model, or one parameter per layer if the names contain `{i}`."""

  hf: str
  """Name in the safetensors file."""
  ours: str
  """Name in the unrolled tree, which has one array per layer. The scanned tree stacks the arrays of
  all layers along a leading layer axis, under a name without `{i}/`.
  """
  axes: tuple[str, ...]
  """Name of each axis, which is a key of the mapping that `_sizes` returns."""
  when: str = 'always'
  """Condition on the spec under which the parameter exists. It is a key of `_CONDITIONS`."""

  @property
  def stacked(self) -> bool:
    return '{i}' in self.ours


_CONDITIONS: Mapping[str, Callable[[ModelSpec], bool]] = {
  'always': lambda spec: True,
  'qkv_bias': lambda spec: spec.qkv_bias,
  'o_bias': lambda spec: spec.o_bias,
  'mlp_bias': lambda spec: spec.mlp_bias,
  'tied': is_tied,
  'untied': lambda spec: spec.head == 'lm' and not spec.tie_word_embeddings,
  'qk_norm': lambda spec: spec.qk_norm,
  'one_output': lambda spec: spec.head != 'lm',
}

_LAYER = 'model.layers.{i}.'

ROWS = (
  ParameterRow('model.embed_tokens.weight', 'embed/kernel', ('vocab', 'hidden')),
  ParameterRow(_LAYER + 'input_layernorm.weight', 'layers/{i}/attention_norm/scale', ('hidden',)),
  ParameterRow(
    _LAYER + 'self_attn.q_proj.weight', 'layers/{i}/attention/query/kernel', ('queries', 'hidden')
  ),
  ParameterRow(
    _LAYER + 'self_attn.k_proj.weight', 'layers/{i}/attention/key/kernel', ('keys', 'hidden')
  ),
  ParameterRow(
    _LAYER + 'self_attn.v_proj.weight', 'layers/{i}/attention/value/kernel', ('keys', 'hidden')
  ),
  ParameterRow(
    _LAYER + 'self_attn.o_proj.weight', 'layers/{i}/attention/output/kernel', ('hidden', 'queries')
  ),
  ParameterRow(
    _LAYER + 'post_attention_layernorm.weight', 'layers/{i}/mlp_norm/scale', ('hidden',)
  ),
  ParameterRow(_LAYER + 'mlp.gate_proj.weight', 'layers/{i}/mlp/gate/kernel', ('mlp', 'hidden')),
  ParameterRow(_LAYER + 'mlp.up_proj.weight', 'layers/{i}/mlp/up/kernel', ('mlp', 'hidden')),
  ParameterRow(_LAYER + 'mlp.down_proj.weight', 'layers/{i}/mlp/down/kernel', ('hidden', 'mlp')),
  ParameterRow('model.norm.weight', 'norm/scale', ('hidden',)),
  ParameterRow('lm_head.weight', 'head/kernel', ('vocab', 'hidden'), 'untied'),
  ParameterRow('score.weight', 'head/kernel', ('one', 'hidden'), 'one_output'),
  ParameterRow(
    _LAYER + 'self_attn.q_proj.bias', 'layers/{i}/attention/query/bias', ('queries',), 'qkv_bias'
  ),
  ParameterRow(
    _LAYER + 'self_attn.k_proj.bias', 'layers/{i}/attention/key/bias', ('keys',), 'qkv_bias'
  ),
  ParameterRow(
    _LAYER + 'self_attn.v_proj.bias', 'layers/{i}/attention/value/bias', ('keys',), 'qkv_bias'
  ),
  ParameterRow(
    _LAYER + 'self_attn.o_proj.bias', 'layers/{i}/attention/output/bias', ('hidden',), 'o_bias'
  ),
  ParameterRow(
    _LAYER + 'self_attn.q_norm.weight',
    'layers/{i}/attention/query_norm/scale',
    ('head_dim',),
    'qk_norm',
  ),
  ParameterRow(
    _LAYER + 'self_attn.k_norm.weight',
    'layers/{i}/attention/key_norm/scale',
    ('head_dim',),
    'qk_norm',
  ),
  ParameterRow(_LAYER + 'mlp.gate_proj.bias', 'layers/{i}/mlp/gate/bias', ('mlp',), 'mlp_bias'),
  ParameterRow(_LAYER + 'mlp.up_proj.bias', 'layers/{i}/mlp/up/bias', ('mlp',), 'mlp_bias'),
  ParameterRow(_LAYER + 'mlp.down_proj.bias', 'layers/{i}/mlp/down/bias', ('hidden',), 'mlp_bias'),
)

_DERIVED = (
  ParameterRow(
    _LAYER + 'self_attn.rotary_emb.inv_freq', 'layers/{i}/frequencies', ('half_head_dim',)
  ),
  ParameterRow('lm_head.weight', 'head/kernel', ('vocab', 'hidden'), 'tied'),
)
"""Tensors that a file may contain although they are redundant. The first is a buffer in old Llama
files, which follows from the configuration. The second is the output matrix of a model with tied
embeddings, which equals the embedding.
"""

_ZERO = (ParameterRow('score.bias', 'head/bias', ('one',), 'one_output'),)
"""Tensors that this package's models do not have. A file may contain them only if their values are
0.
"""


def _sizes(spec: ModelSpec) -> Mapping[str, int]:
  return {
    'vocab': spec.vocab_size,
    'hidden': spec.hidden_size,
    'queries': spec.num_attention_heads * spec.head_dim,
    'keys': spec.num_key_value_heads * spec.head_dim,
    'head_dim': spec.head_dim,
    'half_head_dim': spec.head_dim // 2,
    'mlp': spec.intermediate_size,
    'one': 1,
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorEntry:
  """One tensor of a model file, and the parameter that it becomes. A parameter that is stacked over
  the layers has one entry for each layer.
  """

  hf: str
  """Name in the safetensors file."""
  path: str
  """Name in the scanned tree, without the layer index."""
  layer: int | None
  """Index of the tensor's layer; None for a tensor outside the layers."""
  shape: tuple[int, ...]
  """Shape in the file; the scanned tree adds a leading layer axis."""

  @property
  def unrolled(self) -> str:
    """Name in the unrolled tree."""
    return (
      self.path if self.layer is None else self.path.replace('layers/', f'layers/{self.layer}/', 1)
    )


def _expand(rows: Iterable[ParameterRow], spec: ModelSpec) -> tuple[TensorEntry, ...]:
  sizes = _sizes(spec)
  return tuple(
    TensorEntry(
      hf=row.hf.format(i=i),
      path=row.ours.replace('{i}/', ''),
      layer=i,
      shape=tuple(sizes[a] for a in row.axes),
    )
    for row in rows
    if _CONDITIONS[row.when](spec)
    for i in (range(spec.num_hidden_layers) if row.stacked else (None,))
  )


def entries(spec: ModelSpec) -> tuple[TensorEntry, ...]:
  """Returns an entry for each tensor of a model. The entries of one table row, which correspond to
  one array of the scanned tree, are consecutive and in the order of the layers.
  """
  return _expand(ROWS, spec)


def zeros(spec: ModelSpec) -> tuple[TensorEntry, ...]:
  """Returns entries for tensors that exports contain with the value 0, although the model does not
  have them. For a 'value' head, this is the bias that transformers' token-classification class
  expects. Other heads have no such tensors.
  """
  return _expand(_ZERO, spec) if spec.head == 'value' else ()


class Inventory:
  """Compares the names and shapes of the tensors of one source (files or a stream) with the table.

  `see` is called for each tensor. `finish` then raises one error that lists all discrepancies.
  """

  def __init__(self, spec: ModelSpec, source: str):
    self._spec, self._source = spec, source
    self._wanted = {entry.hf: entry for entry in entries(spec)}
    self._zero = {entry.hf for entry in _expand(_ZERO, spec)}
    self._beside = {entry.hf: entry.shape for entry in _expand((*_DERIVED, *_ZERO), spec)}
    self._seen: set[str] = set()
    self._unmapped: list[str] = []
    self._doubled: list[str] = []
    self._misshaped: list[str] = []

  def see(
    self, name: str, shape: Iterable[int], read: Callable[[], np.ndarray]
  ) -> TensorEntry | None:
    """Checks one tensor. Returns its entry, or None if the tensor is not to be loaded.

    A tensor is not loaded if it is redundant or must be 0, or if it is unknown, a duplicate or of
    the wrong shape, which `finish` reports.

    Args:
      name: name in the file.
      shape: shape of the tensor.
      read: returns the tensor. It is called only for tensors that must be 0. If such a tensor is
        not 0, a UserError is raised.
    """
    shape = tuple(shape)
    if name in self._seen:
      self._doubled.append(name)
      return None
    self._seen.add(name)
    entry = self._wanted.get(name)
    wanted = entry.shape if entry else self._beside.get(name)
    if wanted is None:
      self._unmapped.append(name)
    elif wanted != shape:
      self._misshaped.append(f'{name} has {shape}, wanted {wanted}')
    elif name in self._zero:
      self._require_zero(name, read().item())
    else:
      return entry
    return None

  def _require_zero(self, name: str, value: float) -> None:
    if value != 0:
      raise UserError(
        f'{self._source}: {name} is {value:g}, wanted 0: heads have no bias here, so it would '
        'shift all values; where only their differences count, set it to 0 in the file'
      )

  def finish(self) -> None:
    """Raises one UserError that lists all tensors that are unknown, duplicate, missing or of the
    wrong shape, if there are any.
    """
    missing = [name for name in self._wanted if name not in self._seen]
    unmapped = [
      f'{name}{_nearest(name, missing) or _nearest(name, self._wanted)}'
      for name in self._unmapped[:_EXAMPLES]
    ]
    findings = [
      _finding('no such parameter', unmapped, len(self._unmapped)),
      _finding('twice', self._doubled, len(self._doubled)),
      _finding('missing', missing, len(missing)),
      _finding('wrong shape', self._misshaped, len(self._misshaped)),
    ]
    if any(findings):
      raise UserError(
        f'{self._source}: {"; ".join(filter(None, findings))}; expected the {len(self._wanted)} '
        f'tensors of {_describe(self._spec)}: config.json and weights must be of the same model'
      )


_EXAMPLES = 4
"""Maximum number of names that an error message lists for each kind of discrepancy."""


def _finding(kind: str, names: list[str], count: int) -> str:
  if not count:
    return ''
  rest = f' and {count - _EXAMPLES} more' if count > _EXAMPLES else ''
  return f'{kind}: {", ".join(names[:_EXAMPLES])}{rest}'


def _nearest(name: str, candidates: Iterable[str]) -> str:
  close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
  return f' (nearest: {close[0]})' if close else ''


def _describe(spec: ModelSpec) -> str:
  switches = [
    s
    for s in ('qkv_bias', 'o_bias', 'mlp_bias', 'qk_norm', 'tie_word_embeddings')
    if getattr(spec, s)
  ]
  return (
    f'{spec.family} ({", ".join([f"{spec.head} head", *switches])}; '
    f'layers={spec.num_hidden_layers}, '
    f'heads={spec.num_attention_heads}/{spec.num_key_value_heads}, head_dim={spec.head_dim}, '
    f'hidden={spec.hidden_size}, mlp={spec.intermediate_size}, vocab={spec.vocab_size})'
  )
