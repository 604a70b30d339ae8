"""Check of attention implementations on the device that will run them, against masked attention.

A kernel may be absent, fail to compile, or compute something else than expected, depending on the
device, its driver and the versions of libraries. The check therefore computes outputs and gradients
of a small problem on the device itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl_llm.core.errors import one_line
from jaxrl_llm.ops.attention import masked
from jaxrl_llm.ops.places import Places

Compute = Callable[[Array, Array, Array, Places], Float[Array, 'batch time heads head_dim']]
"""Attention of queries, keys and values of the same tokens."""
TOLERANCES: Mapping[str, float] = {'float32': 5e-3, 'float16': 5e-3, 'bfloat16': 2e-2}
"""Largest permitted error of an output or gradient, as a share of its norm, keyed by dtype. A GPU
may round float32 factors to 11 bits (TF32). A query that sees a wrong key causes a larger error.
"""
_TIME = 300
"""Tokens of a row. The blocks of no kernel divide this number."""
_ROWS = ((300,), (130, 170), (1, 2, 61, 128, 64), ())
"""Lengths of the segments of each row: shorter and longer than a kernel's blocks, with boundaries
within blocks and between blocks, with and without padding at the end.
"""
_PARENTS = (
  ((0, 0),),
  ((0, 0), (1, 129)),
  ((0, 0), (0, 0), (2, 1), (3, 40), (3, 17)),
  (),
)
"""For each segment of `_ROWS`, the number of the segment from which it continues in a tree, and the
position at which it does; (0, 0) for a root. The trees have up to three levels.
"""


class Trial(NamedTuple):
  """Properties of the problem with which implementations are checked."""

  heads: int
  kv_heads: int
  head_dim: int
  dtype: str
  window: int | None = None
  softcap: float | None = None


class Selection(NamedTuple):
  """Result of `first_correct`."""

  name: str | None
  """Name of the first correct implementation; None if none is correct."""
  rejected: Mapping[str, str]
  """Reasons for rejecting the implementations before it, keyed by name."""


def first_correct(
  candidates: Mapping[str, Compute], trial: Trial, *, shared: Container[str] = ()
) -> Selection:
  """Checks implementations in the given order, until one is correct.

  Args:
    candidates: implementations, keyed by name. They must support `trial.window` and
      `trial.softcap` without being given them.
    shared: names of the implementations that must be correct with shared prefixes, too.
  """
  rejected = {}
  for name, compute in candidates.items():
    reason = why_wrong(compute, trial, shared=name in shared)
    if reason is None:
      return Selection(name, rejected)
    rejected[name] = reason
  return Selection(None, rejected)


def why_wrong(compute: Compute, trial: Trial, *, shared: bool = False) -> str | None:
  """Returns why an implementation cannot be used on the default device: the error that it raises,
  or the result that differs from that of masked attention. Returns None if it is correct.

  Args:
    shared: whether the implementation must be correct with shared prefixes, too.
  """
  *arrays, places = _problem(trial)
  reason = _difference(compute, trial, arrays, places)
  if reason is None and shared:
    reason = _difference(compute, trial, arrays, _trees(places))
    return None if reason is None else f'with shared prefixes, {reason}'
  return reason


def _difference(compute: Compute, trial: Trial, arrays, places: Places) -> str | None:
  """Returns the reason of `why_wrong` for tokens at the given places; None if there is none."""
  try:
    got = jax.device_get(_results(compute, arrays, places))
  # Depending on what is wrong, libraries and compilers raise errors of any type.
  except Exception as error:
    return f'fails: {one_line(error)}'
  wide = [x.astype(jnp.float32) for x in arrays]

  def reference(query, key, value, places):
    rule = dict(window=trial.window, softcap=trial.softcap)
    return masked(query, key, value, places, places, **rule)

  with jax.default_matmul_precision('highest'):
    wanted = jax.device_get(_results(reference, wide, places))
  for what, found, right in zip(('output', *_GRADIENTS), got, wanted, strict=True):
    if found.shape != right.shape:
      return f'has a wrong shape of the {what}: {found.shape}, wanted {right.shape}'
    error = float(np.linalg.norm(found.astype(np.float64) - right) / np.linalg.norm(right))
    if not error <= TOLERANCES[trial.dtype]:
      kind = 'is not finite' if math.isnan(error) else f'differs by {error:.2g} of its norm'
      return f'is wrong: the {what} {kind}'
  return None


_GRADIENTS = ('gradient of the queries', 'gradient of the keys', 'gradient of the values')


def _results(compute: Compute, arrays, places: Places) -> tuple[Array, ...]:
  """Returns the output, and the gradients of queries, keys and values."""
  *inputs, weight = arrays

  def loss(query, key, value):
    out = compute(query, key, value, places)
    return (out.astype(jnp.float32) * weight).sum(), out

  gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*inputs)
  return (out, *gradients)


def _problem(trial: Trial) -> tuple[Array, Array, Array, Array, Places]:
  """Returns random queries, keys, values and weights of the outputs, and the tokens' places."""
  rng = np.random.default_rng(0)
  dtype = jnp.dtype(trial.dtype)

  def draw(heads: int) -> Array:
    shape = (len(_ROWS), _TIME, heads, trial.head_dim)
    return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

  def padded(rows) -> Array:
    return jnp.array([row + [0] * (_TIME - len(row)) for row in rows], jnp.int32)

  ids = [[i for i, n in enumerate(row, 1) for _ in range(n)] for row in _ROWS]
  positions = [[p for n in row for p in range(n)] for row in _ROWS]
  query, key, value, weight = map(draw, (trial.heads, trial.kv_heads, trial.kv_heads, trial.heads))
  return query, key, value, weight, Places(padded(ids), padded(positions))


def _trees(places: Places) -> Places:
  """Returns the places of `_problem`'s tokens, with segments that share prefixes (`_PARENTS`)."""
  ids, positions = np.array(places.segment_ids), np.array(places.positions)
  seen_until = ids.copy()
  for row, parents in enumerate(_PARENTS):
    for segment, (parent, first) in enumerate(parents, 1):
      positions[row, ids[row] == segment] += first
      # Every token of the path before the position `first` is seen by this segment, too.
      while parent:
        on_path = (ids[row] == parent) & (positions[row] < first)
        seen_until[row, on_path] = np.maximum(seen_until[row, on_path], segment)
        parent, first = parents[parent - 1][0], min(first, parents[parent - 1][1])
  return Places(*map(jnp.asarray, (ids, positions, seen_until)))
