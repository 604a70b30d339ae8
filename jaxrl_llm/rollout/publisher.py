"""Weight publishing: loads the trainer's parameters into the engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax

from jaxrl_llm.core.types import Json, Params, Version
from jaxrl_llm.parallel.coordinator import Coordinator
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.rollout.api import Engine, SharedWrite, ShareWriter, SharingEngine, Weights
from jaxrl_llm.rollout.device_image import DeviceImage
from jaxrl_llm.rollout.gatherer import Gatherer
from jaxrl_llm.rollout.probe import Prober
from jaxrl_llm.rollout.whole_arrays import WholeArrays
from jaxrl_llm.runtime.events import SILENT, Edge, Events


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
    image: DeviceImage | None = None,
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
      image: image of the newest version on the devices. With it, versions that are published as
        deltas are compared there. If None, they are compared on the hosts.
    """
    self._image, self._whole = image, WholeArrays(gatherer)
    self._coordinator, self._writer = coordinator, writer
    self._engine, self._device, self._gatherer, self._prober = engine, device, gatherer, prober
    self._changing, self._events = changing, events
    self._served: Version | None = None
    self._moved: Version | None = None
    self._metrics: dict[str, float] = {}

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
    if shares is not None:
      names = [self._writer.names(number, shares.count) for number in range(shares.count)]
      leaves = self._share(sent, names, shares)
    if self._engine is not None:
      if self._gatherer.on_devices:
        leaves = self._gatherer.arrays(sent)
      elif shares is None:
        leaves = self._gatherer.leaves(sent)
      on_device = self._whole.of(sent) if jax.process_count() == 1 else None
      await self._engine.load(
        Weights(version=version, leaves=leaves, probe=probe, shares=shares, on_device=on_device)
      )
    elif shares is None:
      await self._device.run(self._gatherer.take_part, sent)
    else:
      await self._write_share(shares, leaves)
    writers = 1 if shares is None else shares.count
    self._events.reply(asked, how='loaded', writers=writers)
    if shares is not None and shares.comparison is not None:
      self._metrics = {'perf/publish_copied_bytes': float(self._image.copied_bytes)}
    self._served, self._moved = version, moved

  def take_metrics(self) -> dict[str, float]:
    """Returns metrics of the newest publication, keyed by metric name; empty if there was none
    since the last call.
    """
    metrics, self._metrics = self._metrics, {}
    return metrics

  def _share(
    self, params: Params, names: Sequence[Collection[str]], shares: SharedWrite
  ) -> Iterable[tuple[str, Any]]:
    """Returns (name, array or changes) for each parameter of the share of this process and, in
    process 0, for each parameter that is in no share.

    Args:
      names: names of the parameters of each process's share.
    """
    number, comparison = jax.process_index(), shares.comparison
    if self._image is None or comparison is None:
      gatherer = self._gatherer
      arguments = params, names, number
      return itertools.chain(gatherer.share(*arguments), gatherer.unshared(*arguments))
    return self._image.share(
      params, names, number, before=comparison.before, token=comparison.token
    )

  async def _agree_on_shares(self) -> SharedWrite | None:
    """Returns how the processes write the weights together, or None if process 0 writes them alone,
    because there is only one process and no image on its devices, the engine does not share the
    work, or a process can write nowhere.
    """
    if self._writer is None or self._coordinator is None:
      return None
    if jax.process_count() == 1 and self._image is None:
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
    comparison = None if self._image is None else self._writer.comparison(order)
    before = None if comparison is None else comparison.before
    holds = before is not None and before == self._image.holds
    answers = await coordinator.gather([can, holds])
    if comparison is not None and not all(holds for _, holds in answers):
      comparison = comparison._replace(before=None)
    if not all(can for can, _ in answers):
      # Every process gives up writing shares, for the rest of the run.
      self._writer = None
      return None

    async def reports() -> list[Json]:
      return await coordinator.gather(None)

    async def decide(decision: Json) -> None:
      async def decided() -> Json:
        return decision

      await coordinator.broadcast(decided())

    return SharedWrite(
      order=order, count=len(answers), reports=reports, decide=decide, comparison=comparison
    )

  async def _write_share(self, shares: SharedWrite, leaves: Iterable[tuple[str, Any]]) -> None:
    number = jax.process_index()
    write = self._writer.write
    report = await self._device.run(write, shares.order, number, shares.count, leaves)
    await self._coordinator.gather(report)
    if self._writer.awaits_decision(shares.order):
      decision = await self._coordinator.broadcast(None)
      report = await asyncio.to_thread(self._writer.write_decided, decision)
      await self._coordinator.gather(report)
