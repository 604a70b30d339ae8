"""What a decoder is: a family is a value of ModelSpec, never a fork of the code. Field names are Hugging Face's."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """How rotary frequencies are stretched beyond the pre-training context."""

  kind: Literal['linear', 'llama3']
  factor: float
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_position_embeddings: int = 0
  """The context before stretching; llama3 only."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
  """Shapes and constants of one decoder."""

  family: str
  """Name in models/families.py."""
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_hidden_layers: int
  num_attention_heads: int
  num_key_value_heads: int
  head_dim: int
  """Of its own: heads * head_dim need not be hidden_size."""
  rope_theta: float
  rope_scaling: RopeScaling | None = None
  rms_norm_eps: float
  tie_word_embeddings: bool
  max_position_embeddings: int
  qkv_bias: bool
  qk_norm: bool
  """RMS norm of each query and key head, before the rotation."""
  o_bias: bool = False
  mlp_bias: bool = False
  initializer_range: float = 0.02
  head: Literal['lm', 'value', 'scalar'] = 'lm'
  """'value' and 'scalar' have one output: per token, and per sequence (read at its last token)."""

  def __post_init__(self):
    if self.num_attention_heads % self.num_key_value_heads:
      raise ValueError(
        f'ModelSpec: {self.num_attention_heads} attention heads are not a multiple of '
        f'{self.num_key_value_heads} key/value heads'
      )
    if self.head_dim % 2:
      raise ValueError(f'ModelSpec: head_dim {self.head_dim} is odd, rotary embeddings need pairs')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
  """How a decoder is computed; changes no result beyond rounding."""

  scan_layers: bool = False
  """One compiled layer for all; parameters then have a leading layer axis."""
  remat: Literal['none', 'full'] = 'none'
  """'full': only each layer's input is kept for the backward pass."""
  dtype: str = 'float32'
  """Of computation; norms, softmax and logits are float32 always."""
  param_dtype: str = 'float32'
