"""Weight publishing: copies sharded parameters to the host of process 0, at most one layer of an
array at a time, and loads them into the engine.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int, Shaped

from jaxrl_llm.core.trees import flatten, unflatten
from jaxrl_llm.core.types import Json, Params, Version
from jaxrl_llm.models.lora import adapter_of, is_adapter, merge_kernel
from jaxrl_llm.models.spec import LoraConfig
from jaxrl_llm.parallel.coordinator import Coordinator
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.parallel.rules import replicated
from jaxrl_llm.rollout.api import Engine, SharedWrite, ShareWriter, SharingEngine, Weights
from jaxrl_llm.rollout.probe import Prober
from jaxrl_llm.runtime.events import SILENT, Edge, Events

PART_BYTES = 16 << 20
"""An array, or one layer of an array of stacked layers, is not divided into parts if it has at most
this many bytes.
"""
_OF_LARGEST = 4
"""Divisor that determines the maximum size of a part: the size of the largest array of a layer
divided by this number, or `PART_BYTES` if that is larger. A part, its shards and the buffers of a
collective operation together then need no more memory than the largest array.
"""
_AHEAD = 2
"""Number of parts that the devices compute and copy ahead of the part in use."""


_Leaf = Shaped[jax.Array, '...'] | jax.ShapeDtypeStruct
"""An array, or its shape and sharding if the programs are only compiled (`Gatherer.programs`)."""


class _Part(NamedTuple):
  """Part of an array that a device program cuts out: the whole array, one of its stacked layers, or
  some rows of either.
  """

  name: str
  """Parameter name in the unrolled tree, in which every layer has its own arrays."""
  inputs: tuple[_Leaf, ...]
  """The array and, if it is a kernel with an adapter, the adapter's matrices A and B."""
  layer: int | None
  """Index of the layer; None if the array is not a stack of all layers."""
  group: int = 0
  """Index of the part's group of rows; see `_Cut.groups`."""
  start: int = 0
  """Index of the part's first row within its group of rows."""
  skipped: int = 0
  """Number of rows at the beginning of the part that the previous part also contains."""


class _Cut(NamedTuple):
  """Description of how arrays of one shape and sharding are cut into parts. It is the key under
  which the compiled program is cached.
  """

  shape: tuple[int, ...]
  """Shape of the array, without the axis along which layers are stacked."""
  dtype: np.dtype
  """Data type to which the parts are converted."""
  stacked: bool
  spec: PartitionSpec | None
  """Sharding of the axes of `shape` over the mesh; None if the array is on one device."""
  adapted: bool
  groups: int
  """Number of groups of consecutive rows; the groups lie on different devices."""
  rows: int
  """Number of rows that a part takes from each group. If the array is not cut, this is the number
  of all rows.
  """
  staged: bool
  """Whether each part contains rows of every group. The host must then assemble the array."""

  @property
  def length(self) -> int:
    """Number of rows in a group."""
    return (self.shape[0] if self.shape else 1) // self.groups

  @property
  def whole(self) -> bool:
    return not self.shape or self.rows == self.shape[0]


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
    """
    self.on_devices = on_devices
    self._mesh, self._lora, self._part_bytes = mesh, lora, part_bytes
    self._dtype = None if dtype is None else np.dtype(jnp.dtype(dtype))
    self._several = jax.process_count() > 1 if several is None else several
    self._leads = jax.process_index() == 0
    self._on_host = mesh.devices.flat[0].platform == 'cpu'
    self._program = functools.cache(self._build)

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
      host = _host(array)
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
      yield part.name, self._local(array, cut) if self._several else array

  def _local(self, bits: Shaped[jax.Array, '*shape'], cut: _Cut) -> Shaped[jax.Array, '*shape']:
    """Returns, on the devices of this process, the array whose bits all devices have gathered."""
    placed = replicated(Mesh(np.array(self._mesh.local_devices), ('local',)))
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

  def take_part(self, params: Params) -> None:
    """Participates in the collective operations of `leaves`. All processes but process 0 call this
    while process 0 iterates `leaves`.
    """
    for _ in self._computed(params, ()):
      pass

  def programs(self, params: Params) -> dict[str, jax.stages.Lowered]:
    """Returns the device programs that cut, convert and gather the parameters. Each program is
    keyed by the name of one of the parameters that it processes. `params` may consist of shapes
    with shardings.
    """
    lowered: dict[_Cut, tuple[str, jax.stages.Lowered]] = {}
    for part, cut in self._parts(params):
      if cut not in lowered:
        numbers = [jax.ShapeDtypeStruct((), np.int32)] * 3
        lowered[cut] = part.name, self._program(cut).lower(part.inputs, *numbers)
    return dict(lowered.values())

  def _computed(
    self, params: Params, names: Collection[str] | None
  ) -> Iterator[tuple[_Part, _Cut, jax.Array]]:
    """Yields each part with its device array, which contains integers with the part's bits if the
    job has several processes. Meanwhile the devices compute the next parts, and copy those with the
    given names to the host.
    """
    ahead: collections.deque[tuple[_Part, _Cut, jax.Array]] = collections.deque()
    for part, cut in self._parts(params):
      array = self._compute(part, cut)
      is_fetched = names is None or part.name in names
      if is_fetched and array is not part.inputs[0]:
        array.copy_to_host_async()
      ahead.append((part, cut, array))
      if len(ahead) > _AHEAD:
        # The devices must not run further ahead, because each part in flight needs memory.
        jax.block_until_ready(ahead[0][-1])
        yield ahead.popleft()
    yield from ahead

  def _compute(self, part: _Part, cut: _Cut) -> jax.Array:
    (array, *more) = part.inputs
    untouched = cut.whole and not cut.stacked and not more and array.dtype == cut.dtype
    if untouched and not self._several and not self.on_devices and self._on_host:
      return array
    numbers = (np.int32(part.layer or 0), np.int32(part.group), np.int32(part.start))
    computed = self._program(cut)(part.inputs, *numbers)
    return computed.addressable_data(0) if self._several and not self.on_devices else computed

  def _parts(self, params: Params) -> Iterator[tuple[_Part, _Cut]]:
    flat = flatten(params)
    largest = max([0, *(self._layer_bytes(name, leaf) for name, leaf in flat.items())])
    limit = math.inf if self.on_devices else max(self._part_bytes, largest // _OF_LARGEST)
    for name in sorted(flat):
      if self._lora is not None and is_adapter(name):
        continue
      inputs = (flat[name],)
      if self._lora is not None and (matrices := adapter_of(name, flat)) is not None:
        inputs += matrices
      cut = self._cut(name, inputs, limit)
      layers = range(flat[name].shape[0]) if cut.stacked else [None]
      for layer in layers:
        unrolled = name if layer is None else name.replace('layers/', f'layers/{layer}/', 1)
        for group, start, skipped in _starts(cut):
          yield _Part(unrolled, inputs, layer, group, start, skipped), cut

  def _layer_bytes(self, name: str, leaf: _Leaf) -> int:
    """Returns the size in bytes of one layer of the array after its conversion, or 0 if the array
    belongs to no layer.
    """
    shape = leaf.shape[1:] if _is_stacked(name) else leaf.shape
    return math.prod(shape) * self._part_dtype(name, leaf).itemsize if _in_layer(name) else 0

  def _part_dtype(self, name: str, leaf: _Leaf, *, adapted: bool = False) -> np.dtype:
    if self._dtype is not None and not is_adapter(name):
      return self._dtype
    return np.dtype(jnp.promote_types(leaf.dtype, jnp.float32) if adapted else leaf.dtype)

  def _cut(self, name: str, inputs: tuple[_Leaf, ...], limit: int | float) -> _Cut:
    leaf, stacked, adapted = inputs[0], _is_stacked(name), len(inputs) > 1
    dtype = self._part_dtype(name, leaf, adapted=adapted)
    shape, spec = tuple(leaf.shape), None
    if isinstance(leaf.sharding, NamedSharding):
      spec = PartitionSpec(*(*leaf.sharding.spec, *[None] * len(shape))[: len(shape)])
    if stacked:
      shape, spec = shape[1:], None if spec is None else PartitionSpec(*spec[1:])
    nbytes = math.prod(shape) * dtype.itemsize
    groups, rows = 1, shape[0] if shape else 1
    if nbytes > limit:
      over = () if spec is None or spec[0] is None else spec[0]
      axes = [over] if isinstance(over, str) else over
      groups = math.prod(self._mesh.shape[axis] for axis in axes)
      # The devices gather the same range of rows from all groups at once.
      row_bytes = nbytes // shape[0]
      rows = max(1, min(shape[0] // groups, limit // (row_bytes * groups)))
    staged = groups > 1 and _in_layer(name)
    return _Cut(shape, dtype, stacked, spec, adapted, groups, rows, staged)

  def _build(self, cut: _Cut) -> Callable[..., jax.Array]:
    """Returns the program that cuts a part out of an array as `cut` describes: (inputs, layer,
    group, first row) -> part.
    """

    def constrain(x: Shaped[jax.Array, '...'], *spec: Any) -> Shaped[jax.Array, '...']:
      if cut.spec is None:
        return x
      sharding = NamedSharding(self._mesh, PartitionSpec(*spec))
      return jax.lax.with_sharding_constraint(x, sharding)

    def rows_of(
      x: Shaped[jax.Array, 'all_rows *rest'], start: Int[jax.Array, ''], *spec: Any
    ) -> Shaped[jax.Array, 'groups rows *rest']:
      """Cuts the rows of one part, which begin at `start`, out of every group of rows."""
      x = constrain(x.reshape(cut.groups, -1, *x.shape[1:]), spec[0], None, *spec[1:])
      return jax.lax.dynamic_slice_in_dim(x, start, cut.rows, axis=1)

    def compute(inputs, layer, group, start):
      if cut.stacked:
        inputs = [jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in inputs]
      array, *adapter = inputs
      spec = cut.spec if cut.spec is not None else [None] * len(cut.shape)
      if not cut.whole:
        array = rows_of(array, start, *spec)
        if adapter:
          adapter[1] = rows_of(adapter[1], start, spec[0], None)
      if adapter:
        array = merge_kernel(array, *adapter, self._lora.scale)
      array = array.astype(cut.dtype)
      if self.on_devices:
        array = jnp.copy(
          array
        )  # Without it, an array that needs no change would be returned itself.
      if self._several:
        bits = jnp.dtype(f'uint{8 * cut.dtype.itemsize}')
        array = jax.lax.bitcast_convert_type(array, bits)
      if cut.whole:
        return constrain(array, *spec)
      array = constrain(array, spec[0], None, *spec[1:])
      if cut.staged:
        return array
      # The groups lie on different devices, so a group is selected only after all are gathered.
      array = constrain(array, None, None, *spec[1:])
      return jax.lax.dynamic_index_in_dim(array, group, keepdims=False)

    out = None
    if self._several:
      out = replicated(self._mesh)
    elif cut.spec is not None:
      spec = cut.spec if cut.whole else (None, *cut.spec[1:])
      spec = (cut.spec[0], *spec) if cut.staged else spec
      out = NamedSharding(self._mesh, PartitionSpec(*spec))
    return jax.jit(compute, out_shardings=out)


def stacked_name(name: str) -> str:
  """Returns a parameter's name in the scanned tree, in which layers are stacked, given its name in
  the unrolled tree.
  """
  first, *rest = name.split('/')
  return '/'.join([first, *rest[1:]]) if first == 'layers' else name


def _in_layer(name: str) -> bool:
  return name.startswith('layers/')


def _is_stacked(name: str) -> bool:
  return _in_layer(name) and not name.split('/')[1].isdigit()


def _starts(cut: _Cut) -> Iterator[tuple[int, int, int]]:
  """Yields (group, first row within the group, number of rows already in the previous part) for
  each part. All parts have the same number of rows, so the last part of a group may overlap the
  previous part.
  """
  for group in range(1 if cut.staged else cut.groups):
    for start in range(0, cut.length, cut.rows):
      first = max(0, min(start, cut.length - cut.rows))
      yield group, first, start - first


def _host(array: Shaped[jax.Array, '*shape']) -> Shaped[np.ndarray, '*shape']:
  """Returns the array on the host. The result may be a view of a device buffer if each of the
  array's devices holds the whole array.
  """
  if array.is_fully_replicated:
    return np.asarray(array.addressable_data(0))
  # `np.asarray` would keep the result in memory for as long as the array exists.
  whole = np.empty(array.shape, array.dtype)
  for shard in array.addressable_shards:
    if shard.replica_id == 0:
      whole[shard.index] = shard.data
  return whole


class Publisher:
  """Publishes policy versions to the engine. A version that the engine already serves is not sent
  again.
  """

  def __init__(
    self,
    engine: Engine | None,
    gatherer: Gatherer,
    device: DeviceThread,
    *,
    prober: Prober | None = None,
    changing: Callable[[Params], Params] = lambda params: params,
    events: Events = SILENT,
    coordinator: Coordinator | None = None,
    writer: ShareWriter | None = None,
  ):
    """
    Args:
      engine: the engine in process 0; None in the other processes, which only take part in
        gathering parameters.
      prober: computes the trainer's logprobs of fixed sequences; None if the engine's logprobs need
        no check.
      changing: selects the parameters to send after the first publication, which sends all
        parameters.
      coordinator: coordinator of the job's processes; None if process 0 writes all weights.
      writer: writes shares of the weights in all processes but process 0; None if process 0 writes
        all weights.
    """
    self._coordinator, self._writer = coordinator, writer
    self._engine, self._device, self._gatherer, self._prober = engine, device, gatherer, prober
    self._changing, self._events = changing, events
    self._served: Version | None = None
    self._moved: Version | None = None

  @property
  def served(self) -> Version | None:
    """Version that the engine last acknowledged; None before the first publication. It is the same
    in every process.
    """
    return self._served

  def sends(self, version: Version, *, moved: Version) -> bool:
    """Returns whether `publish` with these arguments would send weights, which requires reading the
    parameters.
    """
    return version != self._served and (self._served is None or moved != self._moved)

  async def publish(self, params: Params, version: Version, *, moved: Version) -> None:
    """Publishes `version` and returns once the engine has acknowledged it. Every process must call
    this.

    Args:
      moved: version with which the weights last changed. If it is the same as in the previous call,
        the engine keeps its weights and only labels them with the new version.
    """
    if version == self._served:
      return
    asked = self._events.request(Edge.WEIGHTS, version=str(version))
    if not self.sends(version, moved=moved):
      if self._engine is not None:
        await self._engine.relabel(version)
      self._events.reply(asked, how='relabelled')
      self._served = version
      return
    probe = await self._device.run(self._prober.probe, params) if self._prober is not None else None
    sent = params if self._served is None else self._changing(params)
    shares = await self._agree_on_shares()
    names = None
    if shares is not None:
      names = self._writer.names(jax.process_index(), shares.count)
    if self._engine is not None:
      on_devices = self._gatherer.on_devices
      leaves = self._gatherer.arrays(sent) if on_devices else self._gatherer.leaves(sent, names)
      await self._engine.load(Weights(version=version, leaves=leaves, probe=probe, shares=shares))
    elif shares is None:
      await self._device.run(self._gatherer.take_part, sent)
    else:
      await self._write_share(shares, self._gatherer.leaves(sent, names))
    writers = 1 if shares is None else shares.count
    self._events.reply(asked, how='loaded', writers=writers)
    self._served, self._moved = version, moved

  async def _agree_on_shares(self) -> SharedWrite | None:
    """Returns how the processes write the weights together, or None if process 0 writes them alone,
    because there is only one process, the engine does not share the work, or a process can write
    nowhere.
    """
    if self._writer is None or self._coordinator is None or jax.process_count() == 1:
      return None
    coordinator = self._coordinator

    async def begin() -> Json | None:
      return await self._engine.begin_load() if isinstance(self._engine, SharingEngine) else None

    order = await coordinator.broadcast(begin() if coordinator.leads else None)
    if order is None:
      return None
    can = True
    if not coordinator.leads:
      place = jax.process_index(), jax.process_count()
      can = await asyncio.to_thread(self._writer.can_write, order, *place)
    seen = await coordinator.gather(can)
    if not all(seen):
      # Every process gives up writing shares, for the rest of the run.
      self._writer = None
      return None

    async def reports() -> list[Json]:
      return await coordinator.gather(None)

    async def decide(decision: Json) -> None:
      async def decided() -> Json:
        return decision

      await coordinator.broadcast(decided())

    return SharedWrite(order=order, count=len(seen), reports=reports, decide=decide)

  async def _write_share(
    self, shares: SharedWrite, leaves: Iterable[tuple[str, np.ndarray]]
  ) -> None:
    number = jax.process_index()
    write = self._writer.write
    report = await self._device.run(write, shares.order, number, shares.count, leaves)
    await self._coordinator.gather(report)
    if self._writer.awaits_decision(shares.order):
      decision = await self._coordinator.broadcast(None)
      report = await asyncio.to_thread(self._writer.write_decided, decision)
      await self._coordinator.gather(report)
