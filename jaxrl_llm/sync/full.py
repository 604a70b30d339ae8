"""Publishing full weights: sharded parameters to host arrays on process 0, and from there to the engine."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.core.types import Params, Version
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.parallel.rules import replicated
from jaxrl_llm.rollout.api import Engine


class Gatherer:
  """Whole host copies of sharded parameters, in process 0; every process takes part."""

  def __init__(self, mesh: Mesh):
    whole = replicated(mesh)
    self._replicate = jax.jit(lambda x: x, out_shardings=whole)
    self._several = jax.process_count() > 1
    self._leads = jax.process_index() == 0

  def gather(self, params: Params) -> Any:
    """The tree as own NumPy arrays in process 0 (never views of buffers that an update may donate); None elsewhere.

    One array is whole on the devices at a time, so that a model larger than one device passes through.
    """

    def one(array: jax.Array) -> np.ndarray | None:
      if self._several:
        array = self._replicate(array).addressable_data(0)
      return np.array(array) if self._leads else None

    host = jax.tree.map(one, params)
    return host if self._leads else None


class Publisher:
  """Brings the engine to a version; a version that it already serves is not sent again."""

  def __init__(self, engine: Engine | None, gatherer: Gatherer, device: DeviceThread):
    """
    Args:
      engine: in process 0; None in the others, which take part in gathering.
    """
    self._engine, self._device, self._gatherer = engine, device, gatherer
    self._served: Version | None = None

  async def publish(self, params: Params, version: Version) -> None:
    """Returns when the engine has acknowledged `version`. Called by every process."""
    if version == self._served:
      return
    host = await self._device.run(self._gatherer.gather, params)
    if self._engine is not None:
      await self._engine.load(host, version)
    self._served = version
