"""Copies sharded parameters to the hosts of the trainer's processes, at most one layer of an array
at a time.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int, Shaped

from jaxrl_llm.core.trees import flatten, unflatten
from jaxrl_llm.core.types import Params
from jaxrl_llm.models.lora import adapter_of, is_adapter, merge_kernel
from jaxrl_llm.models.spec import LoraConfig
from jaxrl_llm.parallel.rules import replicated
from jaxrl_llm.rollout.exchange import Exchange
from jaxrl_llm.rollout.parts import (
  Batch,
  Cut,
  Leaf,
  Part,
  ahead,
  in_layer,
  is_stacked,
  stacked_name,
  starts,
  to_host,
)

PART_BYTES = 16 << 20
"""An array, or one layer of an array of stacked layers, is not divided into parts if it has at most
this many bytes.
"""
_OF_LARGEST = 4
"""Divisor that determines the maximum size of a part: the size of the largest array of a layer
divided by this number, or `PART_BYTES` if that is larger. A part, its shards and the buffers of a
collective operation together then need no more memory than the largest array.
"""


class Gatherer:
  """Copies sharded parameters to the host, part by part. Every process must participate.

  A part is an array, one layer of an array of stacked layers or, if these are large, a range of
  rows. The devices cut and convert each part before any data is transferred, so `leaves` never
  needs memory for a gathered stack of layers, on a device or on the host. If the job has several
  processes, every device gathers the converted part as integers with the same bits, because a
  compiler might convert floats to a wider type for the transfer.
  """

  def __init__(
    self,
    mesh: Mesh,
    lora: LoraConfig | None = None,
    *,
    dtype: str | None = None,
    part_bytes: int = PART_BYTES,
    several: bool | None = None,
    on_devices: bool = False,
    processes: Sequence[int] | None = None,
  ):
    """
    Args:
      lora: configuration of the LoRA adapters, which are merged into the base weights. If None,
        nothing is merged.
      dtype: data type of the yielded arrays, except for adapters. If None, arrays keep their data
        type.
      part_bytes: size in bytes above which arrays are cut. A quarter of the size of a layer's
        largest array is used instead if it is larger.
      several: whether the mesh spans several processes. If None, this is read from the current job.
      on_devices: whether `arrays` is used instead of `leaves`. Arrays are then not cut, because
        that only saves memory for arrays that are gathered on one device or the host.
      processes: number of the process of each device, see `Exchange`; None for the processes to
        which the devices belong.
    """
    self.on_devices = on_devices
    self.mesh, self._lora, self._part_bytes = mesh, lora, part_bytes
    self._processes = processes
    self._dtype = None if dtype is None else np.dtype(jnp.dtype(dtype))
    self.is_several = jax.process_count() > 1 if several is None else several
    self._leads = jax.process_index() == 0
    self._on_host = mesh.devices.flat[0].platform == 'cpu'
    self._program = functools.cache(self._build)
    self.exchange = Exchange.of(mesh, processes)
    """Exchange among the processes; None if they have different numbers of devices in the mesh."""
    self._exchanging = functools.cache(self._build_exchange)

  def leaves(
    self, params: Params, names: Collection[str] | None = None
  ) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name in the unrolled tree, array) for each parameter. In the unrolled tree, every
    layer has its own arrays, so stacked layers are yielded one by one. The pairs are sorted by name
    and then by layer, so the order is the same in all processes. Every process must iterate or call
    `take_part`.

    A large array may come in several consecutive parts along its first axis. An array may be a view
    of a device buffer that the next update donates, so a caller that keeps the array must copy it.

    Args:
      names: names in the unrolled tree of the parameters to yield. This process does not copy the
        others to its host. If None, all are yielded.
    """
    whole = np.empty(0)
    for part, cut, array in self._computed(params, names):
      if names is not None and part.name not in names:
        continue
      host = to_host(array)
      if host.dtype != cut.dtype:
        host = host.view(cut.dtype)
      if not cut.staged:
        yield part.name, host[part.skipped :]
        continue
      if part.start == 0:
        whole = np.empty((cut.groups, cut.length, *cut.shape[1:]), cut.dtype)
      whole[:, part.start : part.start + cut.rows] = host
      if part.start + cut.rows == cut.length:
        yield part.name, whole.reshape(cut.shape)

  def share(
    self, params: Params, shares: Sequence[Collection[str]], number: int
  ) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name in the unrolled tree, array) for each parameter of the share of process
    `number`. Every process must iterate, with its own number and the same shares.

    The parts of all processes are exchanged at the same time, so that a process's devices receive
    only parts of its own share. If the processes have different numbers of devices in the mesh,
    every device receives all parts, as with `leaves`.

    Args:
      shares: names in the unrolled tree of the parameters of each process's share.
    """
    exchange, whole = self.exchange, np.empty(0)
    if exchange is None or exchange.count != len(shares):
      yield from self.leaves(params, shares[number])
      return
    for batch, cut, array in self._exchanged(params, shares, number):
      if (name := batch.names[number]) is None:
        continue
      groups = cut.groups if cut.staged else 1
      if not cut.staged or batch.start == 0:
        whole = np.empty(
          (groups, cut.length if cut.staged else cut.rows, *cut.shape[1:]), cut.dtype
        )
      first = batch.start if cut.staged else 0
      rows = whole[:, first : first + cut.rows]
      for piece, data in exchange.received(array, number):
        target = rows[:, piece * data.shape[1] :][:, : data.shape[1]]
        target[...] = data[:, : target.shape[1]].view(cut.dtype)
      if not cut.staged:
        yield name, whole[0, batch.skipped :]
      elif batch.start + cut.rows == cut.length:
        yield name, whole.reshape(cut.shape)

  def unshared(
    self, params: Params, shares: Sequence[Collection[str]], number: int
  ) -> Iterator[tuple[str, np.ndarray]]:
    """Yields, in process 0, (name in the unrolled tree, array) for each parameter that is in no
    share, such as adapters beside the base weights. Every process must iterate, with its own number
    and the same shares.

    Args:
      shares: see `share`.
    """
    shared = frozenset().union(*shares)
    names = {tensor.name for tensor, _ in self.tensors(params) if tensor.name not in shared}
    stacked = {stacked_name(name) for name in names}
    flat = flatten(params).items()
    others = {name: leaf for name, leaf in flat if name in names or name in stacked}
    yield from self.leaves(unflatten(others), names if number == 0 else ())

  def arrays(self, params: Params) -> Iterator[tuple[str, jax.Array]]:
    """Yields (name in the unrolled tree, array) for each parameter, as `leaves` does, but with the
    arrays on the devices of this process. Needs `on_devices`; every process must call it or
    `take_part`.

    The arrays are copies: sharded as the parameters are or, if the job has several processes,
    complete on every device.
    """
    if not self.on_devices:
      raise RuntimeError('Gatherer.arrays: built without on_devices')
    for part, cut, array in self._computed(params, ()):
      yield part.name, self._local(array, cut) if self.is_several else array

  def _local(self, bits: Shaped[jax.Array, '*shape'], cut: Cut) -> Shaped[jax.Array, '*shape']:
    """Returns, on the devices of this process, the array whose bits all devices have gathered."""
    placed = replicated(Mesh(np.array(self.mesh.local_devices), ('local',)))
    shards = [shard.data for shard in bits.addressable_shards]
    local = jax.make_array_from_single_device_arrays(bits.shape, placed, shards)
    return jax.lax.bitcast_convert_type(local, cut.dtype)

  def gather(self, params: Params) -> Any:
    """Returns the parameter tree as NumPy copies in process 0, and None in the other processes.
    Stacked layers stay stacked.
    """
    shapes = {name: leaf.shape for name, leaf in flatten(params).items()}
    host: dict[str, np.ndarray] = {}
    filled: collections.Counter[str] = collections.Counter()
    for unrolled, array in self.leaves(params):
      if self._leads:
        name = unrolled if unrolled in shapes else stacked_name(unrolled)
        target = host.setdefault(name, np.empty(shapes[name], array.dtype)).reshape(-1)
        target[filled[name] : filled[name] + array.size] = array.reshape(-1)
        filled[name] += array.size
    return unflatten(host) if self._leads else None

  def parts(self, params: Params, names: Sequence[str]) -> Iterator[tuple[Part, Cut, jax.Array]]:
    """Yields each part of the given parameters with its array on the devices, in the order of the
    names. The programs are those of `leaves`. Only for jobs of one process.

    Args:
      names: names in the unrolled tree.
    """
    firsts = {tensor.name: (tensor, cut) for tensor, cut in self.tensors(params)}
    for name in names:
      tensor, cut = firsts[name]
      for group, start, skipped in starts(cut):
        part = tensor._replace(group=group, start=start, skipped=skipped)
        yield part, cut, self._compute(part, cut)

  def of_bits(self) -> Gatherer:
    """Returns a gatherer for the same processes that leaves the arrays as they are."""
    return Gatherer(
      self.mesh, part_bytes=self._part_bytes, several=self.is_several, processes=self._processes
    )

  def take_part(self, params: Params) -> None:
    """Participates in the collective operations of `leaves`. All processes but process 0 call this
    while process 0 iterates `leaves`.
    """
    for _ in self._computed(params, ()):
      pass

  def programs(self, params: Params) -> dict[str, jax.stages.Lowered]:
    """Returns the device programs of `leaves` and `take_part`, which cut, convert and gather the
    parameters. Each program is keyed by the name of one of the parameters that it processes.
    `params` may consist of shapes with shardings.
    """
    return {name: lowered for name, (lowered, _) in self.counted_programs(params).items()}

  def counted_programs(
    self, params: Params, shares: Sequence[Collection[str]] | None = None
  ) -> dict[str, tuple[jax.stages.Lowered, int]]:
    """Returns the device programs, with the number of calls of each.

    Args:
      params: see `programs`.
      shares: shares for the programs of `share`; None for those of `leaves`.
    """
    first: dict[Cut, tuple[str, jax.stages.Lowered]] = {}
    calls: collections.Counter[Cut] = collections.Counter()
    number = jax.ShapeDtypeStruct((), np.int32)
    for part, cut in self._parts(params) if shares is None else ():
      calls[cut] += 1
      if cut not in first:
        first[cut] = part.name, self._program(cut).lower(part.inputs, *[number] * 3)
    for batch, cut in self._batches(params, shares) if shares is not None else ():
      calls[cut] += 1
      if cut not in first:
        layers = jax.ShapeDtypeStruct((len(shares),), np.int32)
        program = self._exchanging(cut).lower(batch.inputs, layers, number, number)
        first[cut] = next(name for name in batch.names if name is not None), program
    return {name: (lowered, calls[cut]) for cut, (name, lowered) in first.items()}

  def _computed(
    self, params: Params, names: Collection[str] | None
  ) -> Iterator[tuple[Part, Cut, jax.Array]]:
    """Yields each part with its device array, which contains integers with the part's bits if the
    job has several processes. Meanwhile the devices compute the next parts, and copy those with the
    given names to the host.
    """

    def computed() -> Iterator[tuple[Part, Cut, jax.Array]]:
      for part, cut in self._parts(params):
        array = self._compute(part, cut)
        is_fetched = names is None or part.name in names
        if is_fetched and array is not part.inputs[0]:
          array.copy_to_host_async()
        yield part, cut, array

    yield from ahead(computed())

  def _exchanged(
    self, params: Params, shares: Sequence[Collection[str]], number: int
  ) -> Iterator[tuple[Batch, Cut, jax.Array]]:
    """Yields each batch with its device array, of which each process has the bits of its part.
    Meanwhile the devices compute the next batches, and copy the parts of process `number` to the
    host.
    """

    def computed() -> Iterator[tuple[Batch, Cut, jax.Array]]:
      for batch, cut in self._batches(params, shares):
        layers = np.array(batch.layers, np.int32)
        program = self._exchanging(cut)
        array = program(batch.inputs, layers, np.int32(batch.group), np.int32(batch.start))
        if batch.names[number] is not None:
          array.copy_to_host_async()
        yield batch, cut, array

    yield from ahead(computed())

  def _compute(self, part: Part, cut: Cut) -> jax.Array:
    (array, *more) = part.inputs
    untouched = cut.whole and not cut.stacked and not more and array.dtype == cut.dtype
    if untouched and not self.is_several and not self.on_devices and self._on_host:
      return array
    numbers = (np.int32(part.layer or 0), np.int32(part.group), np.int32(part.start))
    computed = self._program(cut)(part.inputs, *numbers)
    return computed.addressable_data(0) if self.is_several and not self.on_devices else computed

  def _parts(self, params: Params) -> Iterator[tuple[Part, Cut]]:
    for tensor, cut in self.tensors(params):
      for group, start, skipped in starts(cut):
        yield tensor._replace(group=group, start=start, skipped=skipped), cut

  def tensors(self, params: Params, *, exchanged: bool = False) -> Iterator[tuple[Part, Cut]]:
    """Yields the first part of each array of the unrolled tree. For `exchanged`, see `_cut`."""
    flat = flatten(params)
    largest = max([0, *(self._layer_bytes(name, leaf) for name, leaf in flat.items())])
    limit = math.inf if self.on_devices else max(self._part_bytes, largest // _OF_LARGEST)
    for name in sorted(flat):
      if self._lora is not None and is_adapter(name):
        continue
      inputs = (flat[name],)
      if self._lora is not None and (matrices := adapter_of(name, flat)) is not None:
        inputs += matrices
      cut = self._cut(name, inputs, limit, exchanged=exchanged)
      layers = range(flat[name].shape[0]) if cut.stacked else [None]
      for layer in layers:
        unrolled = name if layer is None else name.replace('layers/', f'layers/{layer}/', 1)
        yield Part(unrolled, inputs, layer), cut

  def _batches(
    self, params: Params, shares: Sequence[Collection[str]]
  ) -> Iterator[tuple[Batch, Cut]]:
    """Yields (batch of parts, their cut). A batch has the parts of one round (see `rounds`)."""
    for tensors, cut in self.rounds(params, shares, exchanged=True):
      filling = next(tensor for tensor in tensors if tensor is not None)
      filled = [tensor or filling for tensor in tensors]
      inputs = (filling.inputs,) if cut.stacked else tuple(each.inputs for each in filled)
      names = tuple(None if tensor is None else tensor.name for tensor in tensors)
      layers = tuple(tensor.layer or 0 for tensor in filled)
      for group, start, skipped in starts(cut):
        yield Batch(names, inputs, layers, group, start, skipped), cut

  def rounds(
    self, params: Params, shares: Sequence[Collection[str]], *, exchanged: bool = False
  ) -> Iterator[tuple[tuple[Part | None, ...], Cut]]:
    """Yields (array for each process, their cut) for each round. Arrays are given by their first
    parts. In each round, a process gets the next array of its share, or None if none is left. The
    arrays of a round have the same shape and sharding: they are layers of one stacked array, or are
    not stacked.

    Args:
      exchanged: see `_cut`.
    """
    writers = {name: number for number, names in enumerate(shares) for name in names}
    kinds: dict[tuple[str | None, Cut], list[list[Part]]] = {}
    for tensor, cut in self.tensors(params, exchanged=exchanged):
      if tensor.name in writers:
        stack = stacked_name(tensor.name) if cut.stacked else None
        queues = kinds.setdefault((stack, cut), [[] for _ in shares])
        queues[writers[tensor.name]].append(tensor)
    for (_, cut), queues in kinds.items():
      for tensors in itertools.zip_longest(*queues):
        yield tensors, cut

  def _layer_bytes(self, name: str, leaf: Leaf) -> int:
    """Returns the size in bytes of one layer of the array after its conversion, or 0 if the array
    belongs to no layer.
    """
    shape = leaf.shape[1:] if is_stacked(name) else leaf.shape
    return math.prod(shape) * self._part_dtype(name, leaf).itemsize if in_layer(name) else 0

  def _part_dtype(self, name: str, leaf: Leaf, *, adapted: bool = False) -> np.dtype:
    if self._dtype is not None and not is_adapter(name):
      return self._dtype
    return np.dtype(jnp.promote_types(leaf.dtype, jnp.float32) if adapted else leaf.dtype)

  def _cut(
    self, name: str, inputs: tuple[Leaf, ...], limit: int | float, *, exchanged: bool
  ) -> Cut:
    """Returns how an array is cut.

    Args:
      limit: size in bytes above which an array is cut.
      exchanged: whether the parts are exchanged among the processes. The rows then always have one
        group for each of their shards.
    """
    leaf, stacked, adapted = inputs[0], is_stacked(name), len(inputs) > 1
    dtype = self._part_dtype(name, leaf, adapted=adapted)
    shape, spec = tuple(leaf.shape), None
    if isinstance(leaf.sharding, NamedSharding):
      spec = PartitionSpec(*(*leaf.sharding.spec, *[None] * len(shape))[: len(shape)])
    if stacked:
      shape, spec = shape[1:], None if spec is None else PartitionSpec(*spec[1:])
    nbytes = math.prod(shape) * dtype.itemsize
    groups, rows = 1, shape[0] if shape else 1
    if nbytes > limit or exchanged:
      over = () if spec is None or spec[0] is None else spec[0]
      axes = [over] if isinstance(over, str) else over
      groups = math.prod(self.mesh.shape[axis] for axis in axes)
      # The devices gather the same range of rows from all groups at once.
      row_bytes = nbytes // shape[0]
      rows = max(1, min(shape[0] // groups, limit // (row_bytes * groups)))
      if exchanged and self.exchange.pieces < rows < shape[0] // groups:
        rows -= rows % self.exchange.pieces
    staged = groups > 1 and (in_layer(name) or nbytes <= limit)
    return Cut(shape, dtype, stacked, spec, adapted, groups, rows, staged)

  def _build(self, cut: Cut) -> Callable[..., jax.Array]:
    """Returns the program that cuts a part out of an array as `cut` describes: (inputs, layer,
    group, first row) -> part.
    """

    def compute(inputs, layer, group, start):
      spec = cut.spec if cut.spec is not None else [None] * len(cut.shape)
      array = self.cut_out(cut, inputs, layer, None if cut.whole else start)
      if cut.whole or cut.staged:
        return array
      # The groups lie on different devices, so a group is selected only after all are gathered.
      array = self._constrain(cut, array, None, None, *spec[1:])
      return jax.lax.dynamic_index_in_dim(array, group, keepdims=False)

    out = None
    if self.is_several:
      out = replicated(self.mesh)
    elif cut.spec is not None:
      spec = cut.spec if cut.whole else (None, *cut.spec[1:])
      spec = (cut.spec[0], *spec) if cut.staged else spec
      out = NamedSharding(self.mesh, PartitionSpec(*spec))
    return jax.jit(compute, out_shardings=out)

  def _build_exchange(self, cut: Cut) -> Callable[..., jax.Array]:
    """Returns the program that cuts a part for each process, and exchanges the parts: (inputs of
    each part, layers, group, first row) -> pieces (`Exchange.exchange`).
    """
    spec = tuple(cut.spec if cut.spec is not None else [None] * len(cut.shape))

    def compute(inputs, layers, group, start):
      parts = [
        self.cut_out(cut, inputs[0 if cut.stacked else i], layers[i], start)
        for i in range(self.exchange.count)
      ]
      selected = group if cut.groups > 1 and not cut.staged else None
      return self.exchange.exchange(jnp.stack(parts), spec, selected)

    return jax.jit(compute, out_shardings=self.exchange.sharding(spec))

  def _constrain(
    self, cut: Cut, x: Shaped[jax.Array, '...'], *spec: Any
  ) -> Shaped[jax.Array, '...']:
    if cut.spec is None:
      return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*spec)))

  def cut_out(
    self,
    cut: Cut,
    inputs: Sequence[Shaped[jax.Array, '...']],
    layer: Int[jax.Array, ''],
    start: Int[jax.Array, ''] | None,
  ) -> Shaped[jax.Array, '...']:
    """Cuts a part out of an array and converts it, to integers with the same bits if the job has
    several processes.

    Args:
      inputs: see `Part.inputs`.
      start: index of the first row that is cut out of every group of rows. If None, the whole array
        is returned, in its shape.
    """

    def rows_of(
      x: Shaped[jax.Array, 'all_rows *rest'], *spec: Any
    ) -> Shaped[jax.Array, 'groups rows *rest']:
      """Cuts the rows of one part out of every group of rows."""
      x = self._constrain(cut, x.reshape(cut.groups, -1, *x.shape[1:]), spec[0], None, *spec[1:])
      return jax.lax.dynamic_slice_in_dim(x, start, cut.rows, axis=1)

    if cut.stacked:
      inputs = [jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in inputs]
    array, *adapter = inputs
    spec = cut.spec if cut.spec is not None else [None] * len(cut.shape)
    if start is not None:
      array = rows_of(array, *spec)
      if adapter:
        adapter[0] = jnp.broadcast_to(adapter[0], (cut.groups, *adapter[0].shape))
        adapter[1] = rows_of(adapter[1], spec[0], None)
    if adapter:
      array = merge_kernel(array, *adapter, self._lora.scale)
    array = array.astype(cut.dtype)
    if self.is_several:
      bits = jnp.dtype(f'uint{8 * cut.dtype.itemsize}')
      array = jax.lax.bitcast_convert_type(array, bits)
    grouped = spec if start is None else (spec[0], None, *spec[1:])
    return self._constrain(cut, array, *grouped)
