"""Publishing full weights: sharded parameters to host arrays on process 0, one at a time, and on to the engine."""

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
  """Whole host arrays of sharded parameters, in process 0; every process takes part."""

  def __init__(self, mesh: Mesh, lora: LoraConfig | None = None):
    """
    Args:
      lora: of the parameters' adapters, which are merged into what they stand on; None: arrays as they are.
    """
    self._lora, whole = lora, replicated(mesh)
    self._replicate = jax.jit(lambda x: x, out_shardings=whole)
    self._several = jax.process_count() > 1
    self._leads = jax.process_index() == 0

  def leaves(self, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) for each parameter, in the same order in every process, which must all go through them.

    One array is whole on the devices at a time, so that a model larger than one device passes through. An array may
    be a view of a buffer that an update donates: copy what must stay.
    """
    for name, array in merged(params, self._lora):
      if self._several:
        array = self._replicate(array).addressable_data(0)
      yield name, np.asarray(array)

  def gather(self, params: Params) -> Any:
    """The tree as own NumPy arrays in process 0; None elsewhere."""
    host = {}
    for name, array in self.leaves(params):
      if self._leads:
        host[name] = np.array(array)
    return unflatten(host) if self._leads else None

  def take_part(self, params: Params) -> None:
    """What the other processes do while process 0 goes through `leaves`."""
    for _ in self.leaves(params):
      pass


class Publisher:
  """Brings the engine to a version; a version that it already serves is not sent again."""

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
      engine: in process 0; None in the others, which take part in gathering.
      prober: says what the trainer makes of fixed sequences; None for an engine that needs no such proof.
      changing: what of the parameters the engine is sent after it has had all of them once.
    """
    self._engine, self._device, self._gatherer, self._prober = engine, device, gatherer, prober
    self._changing, self._events = changing, events
    self._served: Version | None = None
    self._moved: int | None = None

  @property
  def served(self) -> Version | None:
    """The version that the engine has acknowledged; the same in every process."""
    return self._served

  async def publish(self, params: Params, version: Version, *, moved: int) -> None:
    """Returns when the engine has acknowledged `version`. Called by every process.

    Args:
      moved: step at which the weights last changed: while it is the same, they are acknowledged without being sent.
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
      await self._engine.load(Weights(version=version, leaves=self._gatherer.leaves(sent), probe=probe))
    self._events.reply(asked, how='loaded')
    self._served, self._moved = version, moved
