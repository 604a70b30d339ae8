"""Torch modules with the attributes of vLLM's layers, by which the worker extension recognises what
a tensor-parallel rank holds.
"""

import importlib.util
import types
from typing import NamedTuple

import torch
from paths import ROOT

WORKER = ROOT / 'jaxrl_llm' / 'rollout' / 'vllm' / 'worker.py'
PADDING = 64
"""vLLM pads vocabularies to multiples of this number of rows."""
UNTOUCHED = 7.0
"""Value of every element before a load."""


def load_worker():
  """Returns a new module from the file of the worker extension, as if a worker had imported it."""
  spec = importlib.util.spec_from_file_location('jaxrl_llm_worker', WORKER)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


class Rank(NamedTuple):
  """Number of a tensor-parallel worker, and number of these workers."""

  rank: int = 0
  size: int = 1

  @property
  def attributes(self):
    return {'tp_rank': self.rank, 'tp_size': self.size}


def layer_of(weight, bias=None, **attributes):
  """Returns a layer with parameters of the given shapes and with vLLM's attributes."""
  made = torch.nn.Module()
  for name, shape in (('weight', weight), ('bias', bias)):
    if shape is not None:
      made.register_parameter(
        name, torch.nn.Parameter(torch.full(shape, UNTOUCHED), requires_grad=False)
      )
  for name, value in attributes.items():
    setattr(made, name, value)
  return made


def column(rank, inputs, outputs, *, bias=True, **more):
  """Returns a layer whose outputs are divided among the ranks."""
  held = outputs // rank.size
  return layer_of(
    (held, inputs),
    (held,) if bias else None,
    **rank.attributes,
    input_size=inputs,
    input_size_per_partition=inputs,
    output_size=outputs,
    output_size_per_partition=held,
    **more,
  )


def row(rank, inputs, outputs, *, bias=True):
  """Returns a layer whose inputs are divided among the ranks."""
  return layer_of(
    (outputs, inputs // rank.size),
    (outputs,) if bias else None,
    **rank.attributes,
    input_size=inputs,
    input_size_per_partition=inputs // rank.size,
    output_size=outputs,
    output_size_per_partition=outputs,
  )


def qkv(rank, inputs, *, heads, kv_heads, head, bias=True):
  """Returns the fused projection to queries, keys and values of `head` elements each. Its sizes
  count a head of keys as often as it is held.
  """
  copies = max(1, rank.size // kv_heads)
  sizes = [heads * head, kv_heads * copies * head, kv_heads * copies * head]
  return column(
    rank, inputs, sum(sizes), bias=bias, output_sizes=sizes, num_kv_head_replicas=copies
  )


def vocabulary(rank, words, width):
  """Returns an embedding or head whose rows are padded and divided among the ranks."""
  padded = -(-words // PADDING) * PADDING
  held = padded // rank.size
  start, end = (min(n, words) for n in (rank.rank * held, (rank.rank + 1) * held))
  return layer_of(
    (held, width),
    **rank.attributes,
    input_size=width,
    input_size_per_partition=width,
    output_size=padded,
    output_size_per_partition=held,
    org_vocab_size=words,
    shard_indices=types.SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end),
  )


def module_of(**children):
  module = torch.nn.Module()
  for name, child in children.items():
    module.add_module(name, child)
  return module


FUSED = {'qkv_proj': ['q_proj', 'k_proj', 'v_proj'], 'gate_up_proj': ['gate_proj', 'up_proj']}
"""Value of `packed_modules_mapping` of vLLM's decoders."""


def decoder(spec, rank):
  """Returns what a rank holds of a qwen2 with tied embeddings, given its `ModelSpec`."""
  width, inner, head = spec.hidden_size, spec.intermediate_size, spec.head_dim
  heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads

  def layer():
    attention = module_of(
      qkv_proj=qkv(rank, width, heads=heads, kv_heads=kv_heads, head=head),
      o_proj=row(rank, heads * head, width, bias=False),
    )
    merged = column(rank, width, 2 * inner, bias=False, output_sizes=[inner, inner])
    return module_of(
      self_attn=attention,
      mlp=module_of(gate_up_proj=merged, down_proj=row(rank, inner, width, bias=False)),
      input_layernorm=layer_of((width,)),
      post_attention_layernorm=layer_of((width,)),
    )

  body = module_of(
    embed_tokens=vocabulary(rank, spec.vocab_size, width),
    layers=torch.nn.ModuleList(layer() for _ in range(spec.num_hidden_layers)),
    norm=layer_of((width,)),
  )
  model = module_of(model=body)
  model.packed_modules_mapping = FUSED
  return model
