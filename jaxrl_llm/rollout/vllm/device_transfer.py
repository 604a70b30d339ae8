"""Transfer from the trainer's device memory to one vLLM server. The trainer's process itself is
rank 0 of an NCCL group with the server's workers, and broadcasts each tensor (`rollout.vllm.nccl`).

The workers run vLLM's NCCL engine with `packed=False`: for each tensor that `update_weights` names,
they receive one broadcast, and load it. The broadcast begins at the tensor's own memory, so nothing
is copied on the trainer's side.

While a version is being published, its tensors are assembled on a GPU of the trainer one at a time
(`rollout.whole_arrays`). A server that comes back later gets the tensors of the published files, by
way of the same GPU.

Not tested on GPUs; see docs/guides/vllm.md for what the first run there must show.

Invariants: before any call that begins an update, all tensors are known to fit the workers in name,
shape and data type; after that, no failure counts as a refusal. The digests of files are verified
before they are sent. Tensors of the trainer's memory are not, but their server proves with its
checksums, as always, what it has loaded.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import (
  AsyncGenerator,
  AsyncIterator,
  Callable,
  Coroutine,
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any, NamedTuple

import jax

from jaxrl_llm.core.errors import first_cause, one_line
from jaxrl_llm.core.net.client import Lost, Refused
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.api import DeviceArrays
from jaxrl_llm.rollout.engine import Run
from jaxrl_llm.rollout.vllm.client import VllmClient
from jaxrl_llm.rollout.vllm.nccl import Group, GroupError, Libraries
from jaxrl_llm.rollout.vllm.publication import Publication, read_published
from jaxrl_llm.weights.tables import entries

_CONNECT_S = 300.0
"""Maximum seconds for the server's workers to join the group."""


class Tensors(NamedTuple):
  """Tensors of a version, in the order in which they are sent."""

  shapes: Mapping[str, tuple[int, ...]]
  """Shapes, keyed by Hugging Face name."""
  arrays: Callable[[], AsyncGenerator[jax.Array, None]]
  """Function that begins to yield the tensors' bits: flat arrays on the GPU, in C order."""


class DeviceFeed:
  """Tensors of the newest version on one GPU of the trainer: from its memory while the version is
  being published, otherwise from the published files. All transfers of a fleet share the feed.
  """

  def __init__(self, spec: ModelSpec, dtype: str, device: jax.Device, run: Run):
    """
    Args:
      dtype: Hugging Face name of the data type of the published weights.
      run: see `rollout.engine.Run`.
    """
    self.dtype, self.device = dtype, device
    self._spec, self._run = spec, run
    self._offered: tuple[str, DeviceArrays] | None = None
    """Label and arrays of the version that is being published; None if there is none."""

  def offer(self, label: str, arrays: DeviceArrays | None) -> None:
    """Makes the arrays of the version with the given label available, until `withdraw`."""
    self._offered = None if arrays is None else (label, arrays)

  def withdraw(self) -> None:
    """Ends the use of the offered arrays, because the trainer goes on and overwrites them."""
    self._offered = None

  async def tensors(self, publication: Publication) -> Tensors:
    """Returns the tensors of a version.

    Raises:
      ValueError: the published files are needed, but differ from the announced digests.
    """
    offered = self._offered
    if offered is None or offered[0] != publication.label:
      return await self._of_files(publication)
    ordered = _by_layer({entry.hf: entry for entry in entries(self._spec)})
    names = [entry.unrolled for entry in ordered.values()]
    shapes = {name: entry.shape for name, entry in ordered.items()}
    begun: list[Iterator[tuple[str, jax.Array]]] = []

    def following() -> jax.Array:
      # The device thread runs this before any program that overwrites the parameters.
      if self._offered is not offered:
        raise Lost(f'version {publication.version}: the trainer has gone on during the transfer')
      if not begun:
        begun.append(offered[1](names, self.device))
      return jax.block_until_ready(next(begun[0])[1])

    async def arrays() -> AsyncGenerator[jax.Array, None]:
      for _ in names:
        yield await self._run(following)

    return Tensors(shapes, arrays)

  async def _of_files(self, publication: Publication) -> Tensors:
    tensors = _by_layer(await asyncio.to_thread(read_published, publication))

    def placed(name: str) -> jax.Array:
      flat = tensors[name].reshape(-1)
      bits = flat.view(f'u{flat.dtype.itemsize}')
      return jax.block_until_ready(jax.device_put(bits, self.device))

    async def arrays() -> AsyncGenerator[jax.Array, None]:
      # The device thread may be busy with training, one step for each tensor.
      for name in tensors:
        yield await asyncio.to_thread(placed, name)

    return Tensors({name: tensor.shape for name, tensor in tensors.items()}, arrays)


def _by_layer(tensors: Mapping[str, Any]) -> dict[str, Any]:
  """Sorts tensors by layer. A worker keeps the tensors of incomplete layers twice, so this order
  saves memory.
  """

  def layer(name: str) -> int:
    return next((int(part) for part in name.split('.') if part.isdecimal()), -1)

  return {name: tensors[name] for name in sorted(tensors, key=layer)}


class DeviceTransfer:
  """Transfer from the trainer's device memory over an NCCL group with the workers of one server.

  If a transfer fails after it has begun, the group is aborted, and the server must be restarted.
  """

  backend = 'nccl'

  def __init__(
    self,
    feed: DeviceFeed,
    load: Callable[[], Libraries],
    *,
    connect_deadline_s: float = _CONNECT_S,
  ):
    """
    Args:
      load: loads NCCL and the CUDA driver. Raises GroupError if that fails.
    """
    self._feed, self._load = feed, load
    self._connect_deadline_s = connect_deadline_s
    self._group: Group | None = None
    self._workers: list[Mapping[str, Any]] = []
    """Each worker's description of its tensors."""

  async def connect(self, client: VllmClient) -> None:
    await self.close()
    self._workers = [worker['tensors'] for worker in await client.weights()]
    size, deadline_s = 1 + len(self._workers), self._connect_deadline_s
    async with self._ending_on_failure(client, deadline_s):
      unique_id, self._group = await asyncio.to_thread(self._begin)
      info = {
        'nccl_unique_id_b64': base64.b64encode(unique_id).decode(),
        'rank_offset': 1,
        'world_size': size,
        'packed': False,
      }
      # The server answers once its workers have joined, and they wait for this process.
      await _together(
        client.init_transfer(info, deadline_s=deadline_s),
        asyncio.to_thread(self._group.join, unique_id, size, deadline_s=deadline_s),
      )

  def _begin(self) -> tuple[bytes, Group]:
    """Returns the id of a new group, and this process's member of it, which has not joined yet."""
    libraries = self._load()
    return libraries.unique_id(), Group(libraries, self._feed.device.local_hardware_id)

  async def send(self, client: VllmClient, publication: Publication, *, deadline_s: float) -> None:
    if (group := self._group) is None:
      raise Lost(f'{client.name}: its NCCL group has ended')
    try:
      tensors = await self._feed.tensors(publication)
      check_fit(tensors.shapes, self._feed.dtype, self._workers)
    except ValueError as error:
      raise Refused(f'{client.name}: {error}') from None
    info = {
      'names': list(tensors.shapes),
      'dtype_names': [self._feed.dtype] * len(tensors.shapes),
      'shapes': [list(shape) for shape in tensors.shapes.values()],
    }
    async with self._ending_on_failure(client, deadline_s):
      try:
        await client.start_update(deadline_s=deadline_s)
        await _together(
          client.update_weights(info, deadline_s=deadline_s),
          self._broadcast(group, tensors, deadline_s),
        )
        await client.finish_update(deadline_s=deadline_s)
      except Refused as error:  # The update has begun, so the server's weights are unknown.
        raise Lost(str(error)) from None

  async def _broadcast(self, group: Group, tensors: Tensors, deadline_s: float) -> None:
    def send(array: jax.Array) -> None:
      # This thread keeps the array, and so its memory, until NCCL no longer reads it, even if the
      # awaiting task has been cancelled.
      address = array.unsafe_buffer_pointer()
      group.broadcast(address, array.size, self._feed.dtype, deadline_s=deadline_s)

    async with contextlib.aclosing(tensors.arrays()) as arrays:
      async for array in arrays:
        await asyncio.to_thread(send, array)
        del array  # Otherwise it would exist while the next one is assembled.

  @contextlib.asynccontextmanager
  async def _ending_on_failure(self, client: VllmClient, deadline_s: float) -> AsyncIterator[None]:
    """Ends the group if the `with` block fails, or takes longer than the deadline. Raises Lost for
    failures of the group and of the GPU.
    """
    try:
      async with asyncio.timeout(deadline_s):
        yield
    except BaseException as error:
      # The end of the group makes the server's call fail too, and perhaps sooner.
      cause = error if self._group is None else self._group.failure or error
      await self.close()
      if isinstance(error, TimeoutError):
        raise Lost(f'{client.name}: NCCL was not done within {deadline_s:g} s') from None
      if isinstance(error, Exception) and isinstance(
        cause, GroupError | jax.errors.JaxRuntimeError
      ):
        raise Lost(f'{client.name}: {one_line(cause)}') from None
      raise

  async def close(self) -> None:
    """Ends the group, which has no state to save."""
    group, self._group = self._group, None
    if group is not None:
      group.stop()
      await asyncio.to_thread(group.abort)


async def _together(*works: Coroutine[Any, Any, None]) -> None:
  """Awaits a call to the server, and the work on this side that takes place meanwhile. If one of
  them fails, the other is cancelled, because it would wait in vain.
  """
  try:
    async with asyncio.TaskGroup() as tasks:
      for work in works:
        tasks.create_task(work)
  except BaseExceptionGroup as failures:
    raise first_cause(failures) from None


def check_fit(
  shapes: Mapping[str, Sequence[int]], dtype: str, workers: Sequence[Mapping[str, Any]]
) -> None:
  """Raises ValueError unless tensors fit every worker in name, shape and data type.

  Without this check, vLLM would load the tensors that fit, and serve a mixture of old and new
  weights. `sender.check_fit` is the same check for tensors of torch. They share no code, because
  neither environment can import the other's modules: the trainer's has no torch, and the sender's
  has no jaxrl_llm.

  Args:
    shapes: shapes of the whole tensors, keyed by Hugging Face name.
    dtype: Hugging Face name of their data type.
    workers: each worker's description of its tensors, as `jaxrl_weights` returns it.
  """
  for held in workers:
    missing, more = sorted(set(held) - set(shapes)), sorted(set(shapes) - set(held))
    if missing or more:
      raise ValueError(
        f'publication and model differ: tensors missing {missing[:4]}, unknown {more[:4]}'
      )
    for name, part in held.items():
      axis, start = part['slice'] or (None, 0)
      whole, wanted = list(shapes[name]), list(part['shape'])
      if axis is not None and len(whole) == len(wanted) and start + wanted[axis] <= whole[axis]:
        wanted[axis] = whole[axis]
      if whole != wanted or dtype != part['dtype']:
        raise ValueError(
          f'{name}: published as {tuple(whole)} {dtype}, the model has {tuple(part["shape"])} '
          f'{part["dtype"]}'
        )
