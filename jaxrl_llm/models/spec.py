"""Model architecture (`ModelSpec`) and compute options (`ModelOptions`), validated on construction.

Invariant: the spec determines the parameters, and the options affect them in three ways only:
`scan_layers` stacks the layers along a leading axis, `param_dtype` is the dtype of new parameters,
and `lora` adds adapters.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxrl_llm.core.errors import UserError

DTYPES = ('float32', 'bfloat16', 'float16', 'float64')
_MOST = {
  'vocab_size': 10_000_000,
  'hidden_size': 1_000_000,
  'intermediate_size': 10_000_000,
  'num_hidden_layers': 1_000,
  'num_attention_heads': 10_000,
  'num_key_value_heads': 10_000,
  'head_dim': 100_000,
  'max_position_embeddings': 2**31 - 1,
}
"""Maximum sizes. They are far above the sizes of any real model, but small enough that the
parameters can be listed within a second.
"""
PROJECTIONS = ('query', 'key', 'value', 'output', 'gate', 'up', 'down')


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """Scaling of rotary frequencies for longer contexts."""

  kind: Literal['linear', 'llama3']
  factor: float
  """Divisor of the frequencies. For llama3, only low frequencies are divided."""
  low_freq_factor: float = 1.0
  """For llama3: frequencies with wavelengths above (original length / low_freq_factor) are divided
  by the full factor.
  """
  high_freq_factor: float = 4.0
  """For llama3: frequencies with wavelengths below (original length / high_freq_factor) are not
  scaled.
  """
  original_max_position_embeddings: int = 0
  """For llama3: context length in tokens before scaling."""

  def __post_init__(self):
    if self.factor <= 0:
      raise UserError(f'rope_scaling.factor: got {self.factor}, wanted a positive number')
    if self.kind == 'llama3':
      if self.original_max_position_embeddings <= 0:
        raise UserError(
          'rope_scaling.original_max_position_embeddings: llama3 scaling needs the context length '
          f'before stretching (such as 8192), got {self.original_max_position_embeddings}'
        )
      if not 0 < self.low_freq_factor < self.high_freq_factor:
        raise UserError(
          'rope_scaling: wanted 0 < low_freq_factor < high_freq_factor, got '
          f'{self.low_freq_factor} and {self.high_freq_factor}'
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
  """Architecture of a decoder, with Hugging Face's names. Families differ only in these values; all
  of them use the same decoder code.
  """

  family: str
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_hidden_layers: int
  num_attention_heads: int
  num_key_value_heads: int
  head_dim: int
  """Size of a head. It need not be hidden_size / num_attention_heads."""
  rope_theta: float
  rope_scaling: RopeScaling | None = None
  rms_norm_eps: float
  tie_word_embeddings: bool
  """Whether the embedding also serves as the output head. Only the 'lm' head can be tied in this
  way.
  """
  max_position_embeddings: int
  qkv_bias: bool
  qk_norm: bool
  """Whether queries and keys are normalised per head before rotation."""
  o_bias: bool = False
  mlp_bias: bool = False
  initializer_range: float = 0.02
  """Standard deviation of newly initialised kernels."""
  head: Literal['lm', 'value', 'scalar'] = 'lm'
  """Output head. 'lm': logits over the vocabulary. 'value': one value per token. 'scalar': one
  score per sequence.
  """

  def __post_init__(self):
    for name, most in _MOST.items():
      value = getattr(self, name)
      if value < 1:
        raise UserError(f'model.{name}: got {value}, wanted at least 1')
      if value > most:
        raise UserError(f'model.{name}: got {value:.4g}, wanted at most {most:,}')
    if self.num_attention_heads % self.num_key_value_heads:
      raise UserError(
        f'model.num_attention_heads: {self.num_attention_heads} heads cannot share '
        f'{self.num_key_value_heads} key-value heads evenly; wanted a multiple of '
        'num_key_value_heads'
      )
    if self.head_dim % 2:
      raise UserError(
        f'model.head_dim: got {self.head_dim}, wanted an even number (rotary embedding rotates '
        'pairs)'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
  """LoRA adapters (arXiv:2106.09685) added to frozen kernels: y = x·Wᵀ + alpha/rank · (x·Aᵀ)·Bᵀ."""

  rank: int = 16
  """Rank of the adapters: the number of rows of A and of columns of B."""
  alpha: int = 32
  """Scale of the adapter term before division by the rank: the term is multiplied by alpha/rank."""
  targets: tuple[str, ...] = PROJECTIONS
  """Names of the projections that have an adapter."""

  def __post_init__(self):
    for name in ('rank', 'alpha'):
      if getattr(self, name) < 1:
        raise UserError(f'lora.{name}: got {getattr(self, name)}, wanted at least 1')
    if (
      not self.targets
      or not set(self.targets) <= set(PROJECTIONS)
      or len(set(self.targets)) < len(self.targets)
    ):
      raise UserError(
        f'lora.targets: got {self.targets}, wanted some of {", ".join(PROJECTIONS)}, each once'
      )

  @property
  def scale(self) -> float:
    return self.alpha / self.rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
  """Compute options of a model. Except for `lora`, the options change results only by rounding."""

  scan_layers: bool = False
  """Whether all layers are computed by a scan of one compiled layer over their stacked parameters.
  This compiles faster, but runs 10-15 % slower on CPU.
  """
  remat: Literal['none', 'full', 'dots', 'offload'] = 'none'
  """Activations of each layer that are saved for the backward pass. The others are recomputed.

  'none' saves all activations. 'full' saves only the input of the layer. 'dots' saves the results
  of the layer's products with kernels. 'offload' saves only the input of the layer, in host memory.
  """
  attention: Literal['auto', 'masked', 'blockwise', 'splash', 'cudnn', 'tokamax', 'pallas_gpu'] = (
    'auto'
  )
  """Attention implementation. 'auto' chooses by platform and length, see `ops.attention.choose`."""
  sequence_shards: Literal['balanced', 'consecutive'] = 'balanced'
  """Tokens of a row that each device holds between embedding and head if the time axis is sharded.
  With 'consecutive', they follow one another. With 'balanced', they are an early and a late piece
  of the row, if that balances the work of attention (`Choice.is_balanced`).
  """
  dtype: str = 'float32'
  """Dtype of activations and KV cache. Statistics (softmax, norms, rotary embedding) are computed
  in at least float32.
  """
  param_dtype: str = 'float32'
  """Dtype of newly initialised parameters. Adapters are at least float32."""
  reduce_dtype: str | None = None
  """Dtype in which gradients of the kernels of projections and MLPs are summed over the devices. If
  None, they are summed in the dtype of the parameters. Before this sum, each device sums over its
  own tokens. Gradients of micro-batches are always added in the dtype of the parameters.
  """
  lora: LoraConfig | None = None
  """Configuration of adapters. If None, there are no adapters, and the whole model is trained."""

  def __post_init__(self):
    dtypes = {'dtype': self.dtype, 'param_dtype': self.param_dtype}
    if self.reduce_dtype is not None:
      dtypes['reduce_dtype'] = self.reduce_dtype
    for name, value in dtypes.items():
      if value not in DTYPES:
        raise UserError(f'model {name}: got {value!r}, wanted one of {", ".join(DTYPES)}')
