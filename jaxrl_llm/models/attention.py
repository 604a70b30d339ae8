"""Attention over a mesh. The batch, the heads and the time axis of queries are sharded, and every
device computes its shard locally.

Invariant: the implementation is chosen and validated only in `chosen`, from static information. The
choice affects rounding only. `proven` adds what a run finds out about kernels when it starts.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.ops.attention import (
  CHECKED,
  KERNELS,
  SHARES_PREFIXES,
  Choice,
  Implementation,
  attention,
  choose,
  unsupported,
)
from jaxrl_llm.ops.fused import fill
from jaxrl_llm.ops.places import Places
from jaxrl_llm.ops.self_check import Trial, first_correct
from jaxrl_llm.ops.splash import run_splash, splash_kernel, splash_length
from jaxrl_llm.parallel.balance import in_natural_order, pieces
from jaxrl_llm.parallel.mesh import SEQUENCE
from jaxrl_llm.parallel.rules import RULES, sharding
from jaxrl_llm.parallel.topology import chip_of

QUERIES, KEYS = ('batch', 'time', 'heads', None), ('batch', None, 'kv_heads', None)
"""Logical axes of queries, and of keys and values. The time axis of keys and values is not sharded,
so every device has all keys and values of its sequences.
"""


def chosen(
  options: ModelOptions, mesh: Mesh | None, *, time: int, keys: int, same_tokens: bool
) -> Choice:
  """Chooses the attention implementation for rows of `time` queries and `keys` keys. The result
  includes the reason for the choice.
  """
  return choose(
    options.attention,
    platform=platform_of(mesh),
    time=time,
    keys=keys,
    same_tokens=same_tokens,
    dtype=options.dtype,
    shards=1 if mesh is None else mesh.shape[SEQUENCE],
    may_balance=options.sequence_shards != 'consecutive',
    peak_flops=_peak_flops(mesh),
  )


def platform_of(mesh: Mesh | None) -> str:
  """Returns the platform of a mesh, or of the default devices if there is no mesh: 'cpu', 'gpu' or
  'tpu'.
  """
  platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
  return 'gpu' if platform in ('cuda', 'rocm') else platform


def _peak_flops(mesh: Mesh | None) -> float | None:
  """Returns the bfloat16 operations per second of a device of the mesh, or of the default device if
  there is no mesh; None if its kind is unknown.
  """
  device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
  chip = chip_of(device.device_kind)
  return None if chip is None else chip.peak_flops


class Proven(NamedTuple):
  """Attention implementation that was found correct on the default device."""

  implementation: Implementation
  reason: str
  """The device, and why the implementations before this one cannot be used."""


MUCH_SAVED = 0.5
"""Share of tokens saved by shared prefixes from which an implementation that shares them is better
than any kernel that does not: it computes everything else for at most half of the tokens.
"""


def proven(
  asked: str, trial: Trial, *, platform: str, time: int, shards: int, saved: float = 0.0
) -> Proven | None:
  """Finds the first of the platform's kernels that gives the results of masked attention on the
  default device. The last candidate is blockwise attention, unless shared prefixes save much
  (`MUCH_SAVED`): then the kernels that do not share prefixes come after it.

  Args:
    asked: implementation from the configuration. A kernel named here is the only candidate.
    platform: platform whose kernels are candidates.
    time: maximum number of tokens of a row.
    shards: number of shards of the time axis.
    saved: share of the tokens that the run saves by sharing prefixes; 0 if it shares none.
      Otherwise, kernels that can share prefixes are checked with shared ones, too.

  Returns:
    The implementation. None if nothing needs a check: on platforms that are not in `CHECKED`, or if
    the configuration names an implementation in plain JAX.

  Raises:
    UserError: the kernel that the configuration names cannot be used, or no candidate is correct.
  """
  if platform not in CHECKED or asked not in ('auto', *KERNELS[platform]):
    return None
  rule = dict(window=trial.window, softcap=trial.softcap)
  inputs = dict(time=time, keys=time, dtype=trial.dtype, shards=shards, **rule)
  names: list[Implementation] = [*KERNELS[platform], 'blockwise'] if asked == 'auto' else [asked]
  if saved >= MUCH_SAVED:
    names.sort(key=lambda name: name not in SHARES_PREFIXES)
  rejected = {
    name: why for name in names if name != 'blockwise' and (why := unsupported(name, **inputs))
  }
  candidates = [name for name in names if name not in rejected]

  def compute_by(name: Implementation):
    compute = functools.partial(attention, implementation=name, **rule)

    def whole(query, key, value, places):
      return compute(query, key, value, places, places)

    def in_halves(query, key, value, places):
      # The queries of a shard are not all tokens of the keys, so a kernel may take another path.
      half = query.shape[1] // 2
      parts = [
        compute(query[:, cut], key, value, _cut(places, cut), places)
        for cut in (slice(None, half), slice(half, None))
      ]
      return jnp.concatenate(parts, axis=1)

    return whole if shards == 1 else in_halves

  shared = SHARES_PREFIXES if saved else ()
  found = first_correct({name: compute_by(name) for name in candidates}, trial, shared=shared)
  rejected |= found.rejected
  if found.name is None:
    reasons = '; '.join(f'{name}: {reason}' for name, reason in rejected.items())
    raise UserError(f'policy.attention: {reasons}; choose auto')
  device = jax.local_devices()[0].device_kind
  others = ''.join(f'; {name}: {reason}' for name, reason in rejected.items())
  return Proven(found.name, f'correct on {device}{others}')


def _cut(places: Places, part: slice) -> Places:
  """Returns the places of a part of each row's tokens."""
  return jax.tree.map(lambda x: x[:, part], places)


def sharded_attention(
  query: Float[Array, 'batch time heads head_dim'],
  key: Float[Array, 'batch keys kv_heads head_dim'],
  value: Float[Array, 'batch keys kv_heads head_dim'],
  of_queries: Places,
  of_keys: Places,
  *,
  choice: Choice,
  mesh: Mesh | None,
  window: int | None = None,
  softcap: float | None = None,
  interpret: bool = False,
) -> Float[Array, 'batch time heads head_dim']:
  """Computes `attention` on each device's shard. Masked attention is instead partitioned by the
  compiler.

  With balanced shards (`Choice.is_balanced`), all arguments and the result are in the balanced
  order of `parallel.balance`, and `of_queries` must be the same object as `of_keys`.
  """
  rule = dict(window=window, softcap=softcap, interpret=interpret)
  compute = functools.partial(
    attention, implementation=choice.implementation, block=choice.block, **rule
  )
  if mesh is None or choice.implementation == 'masked':
    return compute(query, key, value, of_queries, of_keys)
  if choice.implementation == 'splash':
    return _sharded_splash(query, key, value, of_queries, choice, mesh, **rule)
  same_tokens = of_queries is of_keys and mesh.shape[SEQUENCE] == 1

  def local(query, key, value, of_queries, of_keys):
    # If queries and keys belong to the same tokens, `attention` expects one and the same object as
    # `of_queries` and `of_keys`. With a sharded time axis, a device has the keys of all tokens but
    # the queries of only some.
    of_keys = of_queries if same_tokens else of_keys
    if choice.is_balanced:
      key, value, of_keys = _natural((key, value, of_keys), mesh)
    return compute(query, key, value, of_queries, of_keys)

  return _over(mesh, local, query, key, value, of_queries, of_keys)


def _natural(tree: Any, mesh: Mesh) -> Any:
  """Permutes arrays with whole rows from balanced to natural order."""
  return jax.tree.map(lambda x: in_natural_order(x, mesh.shape[SEQUENCE]), tree)


def _sharded_splash(query, key, value, places: Places, choice: Choice, mesh: Mesh, **rule) -> Array:
  """Runs splash attention over the mesh. The kernel contains a list of blocks to visit. The kernel
  is passed as a sharded argument, so that each device gets the blocks of its own queries.
  """
  time, shards = query.shape[1], mesh.shape[SEQUENCE]
  block = choice.block
  length = time if choice.is_balanced else splash_length(time, block=block, shards=shards)
  query, key, value = (fill(x, length) for x in (query, key, value))
  places = jax.tree.map(lambda x: fill(x, length), places)
  order = pieces(shards) if choice.is_balanced else None
  kernel = splash_kernel(length, block=block, shards=shards, order=order, **rule)
  spec = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, RULES['time'])))

  def local(query, key, value, of_queries, of_keys, kernel):
    if choice.is_balanced:
      key, value, of_keys = _natural((key, value, of_keys), mesh)
    ids = of_queries.segment_ids, of_keys.segment_ids
    return run_splash(kernel, query, key, value, *ids, block=block)

  return _over(mesh, local, query, key, value, places, places, (kernel, spec))[:, :time]


def _over(
  mesh: Mesh, local, query, key, value, of_queries: Places, of_keys: Places, *more
) -> Array:
  """Maps `local` over the mesh by the sharding rules. `more` consists of (argument, partition spec)
  pairs; their arguments are passed to `local` after the named arguments.
  """

  def spec(x, axes):
    return sharding(mesh, axes, x.shape).spec

  of_query = spec(query, QUERIES)
  # If query heads are sharded but key-value heads are not, each device selects the key-value heads
  # that its query heads use.
  picks = of_query[2] is not None and spec(key, KEYS)[2] is None

  def each(query, key, value, *rest):
    if picks:
      key, value = _of_own_heads(query, key, value, total=heads)
    return local(query, key, value, *rest)

  heads = query.shape[2]
  places = (
    jax.tree.map(lambda x: spec(x, QUERIES[:2]), of_queries),
    jax.tree.map(lambda x: spec(x, KEYS[:2]), of_keys),
  )
  mapped = jax.shard_map(
    each,
    mesh=mesh,
    in_specs=(of_query, spec(key, KEYS), spec(value, KEYS), *places, *(part for _, part in more)),
    out_specs=of_query,
    check_vma=False,
  )
  return mapped(query, key, value, of_queries, of_keys, *(x for x, _ in more))


def _of_own_heads(query, key, value, *, total: int) -> tuple[Array, Array]:
  """Selects the key-value heads that this device's query heads use. Heads are repeated so that each
  selected head serves equally many query heads.
  """
  heads, group = query.shape[2], total // key.shape[2]
  run = math.gcd(heads, group)
  first = jax.lax.axis_index(RULES['heads']) * heads
  picked = (first + jnp.arange(0, heads, run)) // group
  return key[:, :, picked], value[:, :, picked]
