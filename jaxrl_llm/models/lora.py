"""LoRA adapters as data: they can be kept separate from the base parameters, joined with them, or
merged into them.

Invariant: the parameters of a model with adapters are a nested dict, as for any other model.
`split` and `join` only take this dict apart and reassemble it, without copying arrays. The
trainable parameters are the first result of `split`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

from jaxrl_llm.core.trees import flatten, unflatten
from jaxrl_llm.core.types import Params
from jaxrl_llm.models.spec import LoraConfig, ModelOptions, ModelSpec

_A, _B, _KERNEL = '/lora_a', '/lora_b', '/kernel'


def fresh(params: Params, lora: LoraConfig, key: PRNGKeyArray | UInt32[Array, '2']) -> Params:
  """Creates adapters for the kernels of a parameter tree. As in PEFT, A is uniform in ±1/√in and B
  is 0, so the adapters have no effect at first.

  A and B are at least float32, as trainable parameters should be.
  """
  targets = {name: leaf for name, leaf in sorted(flatten(params).items()) if _is_target(name, lora)}
  adapters = {}
  for (name, kernel), adapter_key in zip(
    targets.items(), jax.random.split(key, len(targets)), strict=True
  ):
    module, dtype = name.removesuffix(_KERNEL), jnp.promote_types(kernel.dtype, jnp.float32)
    *layers, features, inputs = kernel.shape
    bound = inputs**-0.5
    adapters[module + _A] = jax.random.uniform(
      adapter_key, (*layers, lora.rank, inputs), dtype, -bound, bound
    )
    adapters[module + _B] = jnp.zeros((*layers, features, lora.rank), dtype)
  return unflatten(adapters)


def _is_target(name: str, lora: LoraConfig) -> bool:
  *_, module, leaf = name.split('/')
  return leaf == 'kernel' and module in lora.targets


def split(params: Params, spec: ModelSpec, options: ModelOptions) -> tuple[Params, Params | None]:
  """Splits parameters into trainable and frozen base parameters.

  With adapters, the trainable parameters are the adapters and, if the model's head is not 'lm', the
  newly initialised head. Without adapters, all parameters are trainable and the base is None.

  Args:
    params: tree of arrays or of their shapes, shardings or axes.
  """
  if options.lora is None:
    return params, None
  trained: dict[str, Any] = {}
  frozen: dict[str, Any] = {}
  for name, leaf in flatten(params).items():
    is_trained = is_adapter(name) or (spec.head != 'lm' and name.startswith('head/'))
    (trained if is_trained else frozen)[name] = leaf
  return unflatten(trained), unflatten(frozen)


def join(params: Params, others: Params | None) -> Params:
  """Joins two trees into one; the inverse of `split`. An array that is in both trees is taken from
  `params`.
  """
  return params if others is None else unflatten(flatten(others) | flatten(params))


def is_adapter(name: str) -> bool:
  """Returns whether a flat name belongs to an array of an adapter."""
  return name.endswith((_A, _B))


def adapter_of(name: str, flat: Mapping[str, Any]) -> tuple[Any, Any] | None:
  """Returns the matrices A and B of a kernel's adapter; None if the parameter has none.

  Args:
    flat: parameters of the model, keyed by flat name.
  """
  module = name.removesuffix(_KERNEL)
  if not name.endswith(_KERNEL) or module + _A not in flat:
    return None
  return flat[module + _A], flat[module + _B]


def merged(params: Params, lora: LoraConfig | None) -> Iterator[tuple[str, Any]]:
  """Yields the (name, array) pairs of the equivalent model without adapters, sorted by name. Each
  array is computed only when it is requested.

  A kernel with an adapter becomes W + alpha/rank · B·A, computed and returned in at least float32.
  All other arrays are passed through unchanged, as are all arrays if `lora` is None.
  """
  flat = flatten(params)
  for name in sorted(flat):
    if lora is not None and (adapter := adapter_of(name, flat)) is not None:
      yield name, _merged(flat[name], *adapter, lora.scale)
    elif lora is None or not is_adapter(name):
      yield name, flat[name]


def merge(params: Params, lora: LoraConfig | None) -> Params:
  """Returns the parameter tree of the equivalent model without adapters; see `merged`."""
  return params if lora is None else unflatten(dict(merged(params, lora)))


def merge_kernel(
  kernel: Float[Array, '*layers out in'],
  a: Float[Array, '*layers rank in'],
  b: Float[Array, '*layers out rank'],
  scale: float | Float[Array, ''],
) -> Float[Array, '*layers out in']:
  """Returns W + scale · B·A in at least float32."""
  wide = jnp.promote_types(kernel.dtype, jnp.float32)
  product = jnp.matmul(b.astype(wide), a.astype(wide), precision=jax.lax.Precision.HIGHEST)
  return kernel.astype(wide) + scale * product


_merged = jax.jit(merge_kernel)
