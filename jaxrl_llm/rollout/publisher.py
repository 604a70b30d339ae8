"""Weight publishing: gathers sharded parameters on the host of process 0, one array at a time, and
loads them into the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.core.trees import unflatten
from jaxrl_llm.core.types import Params, Version
from jaxrl_llm.models.lora import merged
from jaxrl_llm.models.spec import LoraConfig
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.parallel.rules import replicated
from jaxrl_llm.rollout.api import Engine, Weights
from jaxrl_llm.rollout.probe import Prober
from jaxrl_llm.runtime.events import SILENT, Edge, Events


class Gatherer:
  """Gathers sharded parameters into full host arrays in process 0. All processes must take part."""

  def __init__(self, mesh: Mesh, lora: LoraConfig | None = None):
    """
    Args:
      lora: configuration of the LoRA adapters, which are merged into the base weights. If None,
        nothing is merged.
    """
    self._lora, whole = lora, replicated(mesh)
    self._replicate = jax.jit(lambda x: x, out_shardings=whole)
    self._several = jax.process_count() > 1
    self._leads = jax.process_index() == 0

  def leaves(self, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) for each parameter. The order is the same in all processes, and every
    process must iterate.

    Only one array at a time is replicated on the devices, so the model may be larger than the
    memory of one device. An array may be a view of a device buffer that the next update donates, so
    a caller that keeps the array must copy it.
    """
    for name, array in merged(params, self._lora):
      if self._several:
        array = self._replicate(array).addressable_data(0)
      yield name, np.asarray(array)

  def gather(self, params: Params) -> Any:
    """Returns the parameter tree as NumPy copies in process 0, and None in the other processes."""
    host = {}
    for name, array in self.leaves(params):
      if self._leads:
        host[name] = np.array(array)
    return unflatten(host) if self._leads else None

  def take_part(self, params: Params) -> None:
    """Takes part in the collective operations of `leaves`. All processes but process 0 call this
    while process 0 iterates `leaves`.
    """
    for _ in self.leaves(params):
      pass


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
  ):
    """
    Args:
      engine: the engine in process 0; None in the other processes, which only take part in
        gathering parameters.
      prober: computes the trainer's logprobs of fixed sequences; None if the engine's logprobs need
        no check.
      changing: selects the parameters to send after the first publication, which sends all
        parameters.
    """
    self._engine, self._device, self._gatherer, self._prober = engine, device, gatherer, prober
    self._changing, self._events = changing, events
    self._served: Version | None = None
    self._moved: int | None = None

  @property
  def served(self) -> Version | None:
    """Version that the engine last acknowledged; None before the first publication. It is the same
    in every process.
    """
    return self._served

  async def publish(self, params: Params, version: Version, *, moved: int) -> None:
    """Publishes `version` and returns once the engine has acknowledged it. Every process must call
    this.

    Args:
      moved: number of the last step that changed the weights. If it is the same as in the previous
        call, the engine keeps its weights and only gives them the new version.
    """
    if version == self._served:
      return
    asked = self._events.request(Edge.WEIGHTS, version=str(version))
    if self._served is not None and moved == self._moved:
      if self._engine is not None:
        await self._engine.relabel(version)
      self._events.reply(asked, how='relabelled')
      self._served = version
      return
    probe = await self._device.run(self._prober.probe, params) if self._prober is not None else None
    sent = params if self._served is None else self._changing(params)
    if self._engine is None:
      await self._device.run(self._gatherer.take_part, sent)
    else:
      await self._engine.load(
        Weights(version=version, leaves=self._gatherer.leaves(sent), probe=probe)
      )
    self._events.reply(asked, how='loaded')
    self._served, self._moved = version, moved
