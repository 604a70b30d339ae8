"""Image of the newest published version on the devices. The devices compare the next version with
it, so that only the changed elements leave them.

The image has the bits of each array in the published data type, sharded as the parameters are. An
array (or one layer of it) takes three steps. The steps of consecutive arrays overlap.

1. A program converts the next version, writes its bits into the image and compares them with the
   former bits. In each shard, it counts the changed elements, and collects the positions and new
   bits of as many as fit into a buffer (`changed_elements`).
2. The counts are copied to all hosts. From the largest count follows the size of the transfer, with
   which a second program sends each process the collected changes of its array.
3. The host assembles the changes of the shards to those of the array.

If a shard has more changes than its buffer holds, the array is copied whole, from the image.

Invariant: all that `share` yields are bits of the image, which are computed once for each version.
A copy that follows the image therefore equals it, even if the compiler rounds differently in
different programs.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Int, Shaped, UInt32

from jaxrl_llm.core.trees import flatten, unflatten
from jaxrl_llm.core.types import Params
from jaxrl_llm.parallel import memory
from jaxrl_llm.parallel.rules import replicated
from jaxrl_llm.rollout.gatherer import Gatherer
from jaxrl_llm.rollout.parts import Cut, Leaf, Part, ahead, stacked_name, to_host
from jaxrl_llm.weights.deltas import Changes

_OF_SHARD = 16
"""Divisor of the number of elements of a shard; the quotient is the maximum number of changes that
the devices collect from a shard (see also `_SMALL`). If a shard has more, its array is copied
whole. At this limit, the changes have three sixteenths of the bytes of an array of 16-bit elements,
and an eighth of one of 32-bit elements.
"""
_SMALL = 4096
"""Number of elements up to which all elements of a shard may change."""
_BEGUN = 8
"""Maximum number of comparisons in flight; see `DeviceThread`."""
_FEWEST = 64
"""Smallest number of changes of a shard for which a transfer has room. Larger numbers are rounded
up to `_FEWEST` times a power of two, so that few programs are compiled.
"""
_ROW = 128
"""Number of elements in a row of a TPU's vector register, which are computed at the same time."""
_WORD = 32
"""Number of elements whose flags (changed or not) are packed into one word."""


class _Compared(NamedTuple):
  """Changes of an array, as the devices have collected them."""

  counts: Int[jax.Array, 'shards']
  """Number of changed elements in each shard. Every device holds all counts."""
  positions: UInt32[jax.Array, 'shards capacity']
  """Positions of changed elements within the flat shard, in no particular order. Elements after the
  number of changes have no meaning.
  """
  bits: Shaped[jax.Array, 'shards capacity']
  """New bits of the changed elements, as unsigned integers."""


class DeviceImage:
  """Bits of the newest version on the devices, sharded as the parameters are."""

  def __init__(self, gatherer: Gatherer, *, offload: bool = False):
    """
    Args:
      gatherer: gatherer that converts the parameters for publication.
      offload: whether the bits are in host memory between publications.
    """
    self._offload = offload
    self._gatherer, self._whole = gatherer, gatherer.of_bits()
    self._bits: dict[str, jax.Array] = {}
    """Bits of each array as unsigned integers, keyed by name in the tree of the parameters."""
    self._begun: collections.deque[jax.Array] = collections.deque()
    """Counts of the newest comparisons, which may not have ended."""
    self._homes: list[Sharding] = []
    """Shardings on the devices of the arrays in `_bits`."""
    self.copied_bytes = 0
    """Bytes that the newest call of `share` has copied from the devices to this host."""
    self.holds: str | None = None
    """Token of the version in the image; None if the image contains no complete version."""
    self._comparing = functools.cache(self._build_comparing)
    self._sending = functools.cache(self._build_sending)

  def share(
    self,
    params: Params,
    shares: Sequence[Collection[str]],
    number: int,
    *,
    before: str | None,
    token: str,
  ) -> Iterator[tuple[str, np.ndarray | Changes]]:
    """Takes the next version into the image. Yields (name in the unrolled tree, array or changes)
    for each parameter of the share of process `number`. Every process must iterate to the end, with
    its own number, and otherwise the same arguments.

    An array may come in several consecutive parts; see `Gatherer.leaves`. Changes are yielded if
    the image contains the version `before`, and few elements of the array have changed.

    Args:
      shares: names in the unrolled tree of the parameters of each process's share.
      before: token of the version to compare with; None to yield whole arrays.
      token: token of the next version.
    """
    shapes = {name: leaf.shape for name, leaf in flatten(params).items()}
    compares = before is not None and before == self.holds
    compares = compares and all(shapes.get(name) == x.shape for name, x in self._bits.items())
    # If an error or the caller ends this method, the image contains no complete version.
    self.holds, self.copied_bytes = None, 0
    dtypes: dict[str, np.dtype] = {}
    """Data type of each parameter to yield whole, keyed by its name in the unrolled tree."""
    if compares:
      self._bits = memory.restored(self._bits, self._homes)
      for name, cut, changes in self._changes(params, shares, number):
        if changes is None:
          dtypes[name] = cut.dtype
        elif name in shares[number]:
          yield name, changes
    else:
      self._bits = {}
      for tensors, cut in self._gatherer.rounds(params, shares):
        for tensor in tensors:
          if tensor is not None:
            self._compare(tensor, cut)
            dtypes[tensor.name] = cut.dtype
    for name, bits in self._arrays(dtypes, shares, number):
      self.copied_bytes += bits.nbytes
      yield name, bits.view(dtypes[name])
    self._homes = memory.shardings_of(self._bits)
    if self._offload:
      self._bits = memory.to_host(self._bits)
    self.holds = token

  def counted_programs(
    self, params: Params, shares: Sequence[Collection[str]], changed: float
  ) -> dict[str, tuple[jax.stages.Lowered, int]]:
    """Returns the device programs of a version that is compared with the one before, with the
    number of calls of each. Each program is keyed by what it does and one of the parameters that it
    processes.

    Args:
      params: parameters, or their shapes with shardings.
      shares: names in the unrolled tree of the parameters of each process's share.
      changed: share of the elements that change in each shard.
    """
    mesh, programs = self._gatherer.mesh, {}
    calls: collections.Counter[tuple[str, Cut]] = collections.Counter()
    for tensors, cut in self._gatherer.rounds(params, shares):
      first = next(tensor for tensor in tensors if tensor is not None)
      calls['compare', cut] += sum(tensor is not None for tensor in tensors)
      calls['send', cut] += 1
      if ('send', cut) in programs:
        continue
      shards, room = math.prod(self._shards(cut)), self._capacity(cut)
      placed = None if cut.spec is None else NamedSharding(mesh, _over(self._axes(cut)))
      collected = [
        jax.ShapeDtypeStruct((shards, room), dtype, sharding=placed)
        for dtype in (np.uint32, _unsigned(cut))
      ]
      (leaf, *_), layer = first.inputs, jax.ShapeDtypeStruct((), np.int32)
      home = self._sharding(cut) or leaf.sharding
      before = jax.ShapeDtypeStruct(leaf.shape, _unsigned(cut), sharding=home)
      size = _rounded(math.ceil(changed * math.prod(cut.shape) / shards), room)
      programs['compare', cut] = first, self._comparing(cut).lower(first.inputs, before, layer)
      sending = self._sending(self._axes(cut), size)
      programs['send', cut] = first, sending.lower([collected] * len(tensors))
    return {
      f'{does} {first.name}': (lowered, calls[does, cut])
      for (does, cut), (first, lowered) in programs.items()
    }

  def _arrays(
    self, names: Collection[str], shares: Sequence[Collection[str]], number: int
  ) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name in the unrolled tree, bits) for each of the given parameters that is in the
    share of process `number`.
    """
    kept = {name if name in self._bits else stacked_name(name) for name in names}
    if not kept:
      return
    bits = unflatten({name: self._bits[name] for name in kept})
    wanted = [[name for name in share if name in names] for share in shares]
    if len(shares) == 1:
      yield from self._whole.leaves(bits, wanted[0])
    else:
      yield from self._whole.share(bits, wanted, number)

  def _changes(
    self, params: Params, shares: Sequence[Collection[str]], number: int
  ) -> Iterator[tuple[str, Cut, Changes | None]]:
    """Takes the next version into the image. Yields (name in the unrolled tree, cut, changes) for
    each parameter of the share of process `number`, and (name, cut, None) for each parameter of any
    share of which too many elements have changed.
    """

    def compared() -> Iterator[tuple[tuple[Part | None, ...], Cut, list[_Compared | None]]]:
      for tensors, cut in self._gatherer.rounds(params, shares):
        yield tensors, cut, [None if each is None else self._compare(each, cut) for each in tensors]

    def sent():
      for tensors, cut, collected in ahead(compared()):
        counts = [None if each is None else to_host(each.counts) for each in collected]
        room = self._capacity(cut)
        fits = [count is not None and count.max() <= room for count in counts]
        most = max([0, *(int(c.max()) for c, fit in zip(counts, fits, strict=True) if fit)])
        size = _rounded(most, room)
        array = None
        if size:
          # A process whose array has no changes to send receives those of another process.
          filling = collected[fits.index(True)]
          moved = [each if fit else filling for each, fit in zip(collected, fits, strict=True)]
          array = self._sending(self._axes(cut), size)([each[1:] for each in moved])
          if tensors[number] is not None and fits[number]:
            array.copy_to_host_async()
        yield tensors, cut, counts, fits, size, array

    for tensors, cut, counts, fits, size, array in ahead(sent()):
      self.copied_bytes += sum(count.nbytes for count in counts if count is not None)
      for tensor, count, fit in zip(tensors, counts, fits, strict=True):
        if count is not None and not fit:
          yield tensor.name, cut, None
      if tensors[number] is not None and fits[number]:
        rows = None if array is None else self._received(array, number)
        yield tensors[number].name, cut, self._joined(cut, counts[number], size, rows)

  def _compare(self, tensor: Part, cut: Cut) -> _Compared:
    """Takes the next version of an array, or of one of its layers, into the image, and compares it
    with the version before.
    """
    name = stacked_name(tensor.name) if cut.stacked else tensor.name
    if name not in self._bits:
      self._bits[name] = self._zeros(tensor.inputs[0], cut)
    if len(self._begun) == _BEGUN:
      jax.block_until_ready(self._begun.popleft())
    program = self._comparing(cut)
    layer = np.int32(tensor.layer or 0)
    self._bits[name], *collected = program(tensor.inputs, self._bits[name], layer)
    compared = _Compared(*collected)
    compared.counts.copy_to_host_async()
    self._begun.append(compared.counts)
    return compared

  def _zeros(self, leaf: Leaf, cut: Cut) -> jax.Array:
    """Returns an array of the image before its first version."""
    return jnp.zeros(leaf.shape, _unsigned(cut), device=self._sharding(cut) or leaf.sharding)

  def _sharding(self, cut: Cut) -> NamedSharding | None:
    """Returns the sharding of an array's bits in the image; None if the array is on one device."""
    if cut.spec is None:
      return None
    return NamedSharding(self._gatherer.mesh, PartitionSpec(*([None] * cut.stacked), *cut.spec))

  def _axes(self, cut: Cut) -> tuple[str, ...]:
    """Returns the mesh axes over which an array is sharded, in the order of its shards' numbers."""
    return tuple(axis for axes in self._axes_of(cut) for axis in axes)

  def _axes_of(self, cut: Cut) -> list[tuple[str, ...]]:
    """Returns the mesh axes over which each axis of an array is sharded."""
    spec = [None] * len(cut.shape) if cut.spec is None else cut.spec
    return [() if x is None else (x,) if isinstance(x, str) else tuple(x) for x in spec]

  def _shards(self, cut: Cut) -> list[int]:
    """Returns the number of shards along each axis of an array."""
    mesh = self._gatherer.mesh
    return [math.prod(mesh.shape[axis] for axis in axes) for axes in self._axes_of(cut)]

  def _capacity(self, cut: Cut) -> int:
    """Returns the maximum number of changes that the devices collect from a shard of an array."""
    elements = math.prod(cut.shape) // math.prod(self._shards(cut))
    return min(elements, max(_SMALL, elements // _OF_SHARD))

  def _build_comparing(self, cut: Cut) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the program that takes the next version of an array into the image: (inputs, bits of
    the version before, layer) -> (bits, and the fields of `_Compared`).
    """
    mesh, axes = self._gatherer.mesh, self._axes(cut)
    room, unsigned = self._capacity(cut), _unsigned(cut)

    def compare(new, old):
      counts, positions, bits = changed_elements(new.reshape(-1), old.reshape(-1), room)
      return counts[None], positions[None], bits[None]

    if cut.spec is not None:
      of_shards = _over(axes)
      compare = jax.shard_map(
        compare, mesh=mesh, in_specs=(cut.spec, cut.spec), out_specs=of_shards, check_vma=False
      )

    def compute(inputs, before, layer):
      bits = self._gatherer.cut_out(cut, inputs, layer, None)
      if bits.dtype != unsigned:
        bits = jax.lax.bitcast_convert_type(bits, unsigned)
      if not cut.stacked:
        return bits, *compare(bits, before)
      old = jax.lax.dynamic_index_in_dim(before, layer, keepdims=False)
      return jax.lax.dynamic_update_index_in_dim(before, bits, layer, 0), *compare(bits, old)

    if cut.spec is None:
      return jax.jit(compute, donate_argnums=1)
    shards = NamedSharding(mesh, of_shards)
    out = self._sharding(cut), replicated(mesh), shards, shards
    return jax.jit(compute, donate_argnums=1, out_shardings=out)

  def _build_sending(self, axes: tuple[str, ...], size: int) -> Callable[..., jax.Array]:
    """Returns the program that sends the changes of an array to each process: (positions, bits) of
    each process's array -> packed changes (see `_received`).

    Args:
      axes: mesh axes over which the arrays are sharded.
      size: number of changes that are sent from each shard.
    """
    gatherer = self._gatherer

    def pack(positions, bits):
      positions, bits = positions[:, :size], bits[:, :size]
      if bits.dtype.itemsize == 2:
        halves = positions & 0xFFFF, positions >> 16
        return jnp.concatenate([*(half.astype(bits.dtype) for half in halves), bits], axis=1)
      return jnp.concatenate([positions, bits], axis=1)

    def alone(arrays):
      return jnp.stack([pack(*each) for each in arrays])

    def exchanged(arrays):
      return gatherer.exchange.exchange(alone(arrays), [axes or None])

    if not gatherer.is_several:
      return jax.jit(alone)
    if gatherer.exchange is None:
      return jax.jit(alone, out_shardings=replicated(gatherer.mesh))
    return jax.jit(exchanged, out_shardings=gatherer.exchange.sharding([axes]))

  def _received(self, array: jax.Array, number: int) -> np.ndarray:
    """Copies the packed changes of the array of process `number` to this host: one row for each
    shard. A row has the positions and then the bits; positions in front of 16-bit elements are
    divided into their lower and their upper halves.
    """
    exchange = self._gatherer.exchange
    if not self._gatherer.is_several or exchange is None:
      rows_of_all = to_host(array)
      self.copied_bytes += rows_of_all.nbytes
      return rows_of_all[number]
    pieces = [data for _, data in sorted(exchange.received(array, number), key=lambda x: x[0])]
    rows = np.concatenate(pieces, axis=1)
    self.copied_bytes += rows.nbytes
    return rows

  def _joined(self, cut: Cut, counts: np.ndarray, size: int, rows: np.ndarray | None) -> Changes:
    """Returns the changes of an array, given those of its shards.

    Args:
      counts: number of changes of each shard.
      size: number of changes for which each row has room.
      rows: see `_received`; None if nothing has changed.
    """
    unsigned = _unsigned(cut)
    if rows is None:
      return Changes(np.empty(0, np.int64), np.empty(0, unsigned))
    shards = self._shards(cut)
    shape = [length // parts for length, parts in zip(cut.shape, shards, strict=True)]
    halves = 4 // unsigned.itemsize
    positions, bits = [], []
    for shard, count in enumerate(counts):
      local = np.zeros(count, np.int64)
      for half in range(halves):
        local |= rows[shard, half * size :][:count].astype(np.int64) << 16 * half
      if shape:
        at = np.unravel_index(shard, shards)
        inside = np.unravel_index(local, shape)
        whole = [i + s * n for i, s, n in zip(inside, at, shape, strict=True)]
        local = np.ravel_multi_index(whole, cut.shape)
      positions.append(local)
      bits.append(rows[shard, halves * size :][:count])
    joined = Changes(np.concatenate(positions), np.concatenate(bits))
    order = np.argsort(joined.positions)
    return Changes(joined.positions[order], joined.bits[order])


def changed_elements(
  new: Shaped[jax.Array, 'elements'], old: Shaped[jax.Array, 'elements'], capacity: int
) -> tuple[Int[jax.Array, ''], UInt32[jax.Array, '{capacity}'], Shaped[jax.Array, '{capacity}']]:
  """Compares two arrays of integers. Returns the number of different elements and, of at most
  `capacity` of them, the positions and the elements of `new`, in no particular order. If there are
  fewer, the remaining positions and elements have no meaning.

  Instead of sorting, the flags of 32 elements are packed into a word. The words are counted, and
  each output looks up its word and its bit. The elements of a word are `_ROW` apart, so that the
  devices need no array with rows of 32 elements, which a TPU would pad.
  """
  flags = jnp.pad(new != old, (0, -new.size % (_WORD * _ROW))).reshape(-1, _WORD, _ROW)
  bits = jnp.arange(_WORD, dtype=jnp.uint32)[:, None]
  packed = jnp.sum(flags.astype(jnp.uint32) << bits, axis=1, dtype=jnp.uint32).reshape(-1)
  ones = jax.lax.population_count(packed).astype(jnp.int32)
  ends = _running(jnp.add, ones)
  starts = ends - ones
  # Each word with flags enters its index where its first output is; the later ones inherit it.
  slots = jnp.where(ones > 0, starts, capacity)
  word = jnp.zeros(capacity, jnp.int32).at[slots].set(jnp.arange(packed.size), mode='drop')
  word = _running(jnp.maximum, word)
  rank = jnp.arange(capacity) - starts[word]
  bit = _bit_of_rank(packed[word], rank)
  positions = (word // _ROW * _WORD + bit) * _ROW + word % _ROW
  return ends[-1], positions.astype(jnp.uint32), new[jnp.minimum(positions, new.size - 1)]


def _running(
  combine: Callable[[jax.Array, jax.Array], jax.Array], x: Int[jax.Array, 'n']
) -> Int[jax.Array, 'n']:
  """Returns the running sum or maximum of integers of at least 0.

  Rows of the array are scanned by doubling the distance of the elements to combine, and then the
  rows' totals. A TPU's compiler takes minutes for `jax.lax.cumsum` of a long array.

  Args:
    combine: `jnp.add` or `jnp.maximum`.
  """
  rows = jnp.pad(x, (0, -x.size % _ROW)).reshape(-1, _ROW)
  distance = 1
  while distance < _ROW:
    rows = combine(rows, jnp.pad(rows[:, :-distance], ((0, 0), (distance, 0))))
    distance *= 2
  if len(rows) > 1:
    totals = _running(combine, rows[:, -1])
    rows = combine(rows, jnp.pad(totals[:-1], (1, 0))[:, None])
  return rows.reshape(-1)[: x.size]


def _bit_of_rank(words: UInt32[jax.Array, 'n'], rank: Int[jax.Array, 'n']) -> Int[jax.Array, 'n']:
  """Returns the index of the (rank + 1)-th set bit of each word."""
  index = jnp.zeros_like(rank)
  for width in (16, 8, 4, 2, 1):
    low = words & jnp.uint32((1 << width) - 1)
    ones = jax.lax.population_count(low).astype(rank.dtype)
    is_above = rank >= ones
    rank = jnp.where(is_above, rank - ones, rank)
    words = jnp.where(is_above, words >> width, low)
    index += jnp.where(is_above, width, 0)
  return index


def _rounded(count: int, room: int) -> int:
  """Returns the number of changes of a shard for which a transfer has room.

  Args:
    count: number of changes to send.
    room: maximum number of changes.
  """
  return min(room, _FEWEST * 2 ** max(0, math.ceil(math.log2(count / _FEWEST)))) if count else 0


def _over(axes: tuple[str, ...]) -> PartitionSpec:
  """Returns the sharding of the first axis of an array over mesh axes."""
  return PartitionSpec(axes or None)


def _unsigned(cut: Cut) -> np.dtype:
  """Returns the data type of unsigned integers with as many bits as the elements of an array."""
  return np.dtype(f'u{cut.dtype.itemsize}')
