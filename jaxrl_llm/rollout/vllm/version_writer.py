"""Writes versions of the weights for the servers of a fleet. The slices that the servers hold
determine which digests are computed. Several processes of the trainer may write a version together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.types import Json, Version
from jaxrl_llm.rollout.api import Weights
from jaxrl_llm.rollout.vllm.delta_folder import DeltaFolder
from jaxrl_llm.rollout.vllm.publication import Publication, PublicationFolder
from jaxrl_llm.rollout.vllm.replica import Replica
from jaxrl_llm.rollout.vllm.shares import ShareOrder, ShareReport
from jaxrl_llm.rollout.vllm.transfer import slice_of
from jaxrl_llm.weights.checksums import Slice


class VersionWriter:
  """Writes versions into a folder, by itself or as one of several processes."""

  def __init__(self, folder: PublicationFolder, run: Callable[..., Awaitable[Any]]):
    """
    Args:
      run: calls its first argument with the remaining arguments on the process's device thread, and
        returns the result.
    """
    self._folder, self._run = folder, run

  async def begin(self, replicas: Iterable[Replica]) -> Json | None:
    """Returns the order by which the other processes of the trainer write their shares of the next
    version, or None if this process must write alone.
    """
    order = await asyncio.to_thread(lambda: self._folder.begin_shares(**_proofs(replicas)))
    return None if order is None else order.to_json()

  async def write(self, weights: Weights, replicas: Iterable[Replica]) -> Publication:
    """Publishes a version in the folder.

    Raises:
      UserError: the arrays do not match the model.
      RunError: this or another process cannot write its share.
    """
    if (shares := weights.shares) is None:
      write = self._folder.write
      return await self._run(write, weights.version, weights.leaves, **_proofs(replicas))
    order = ShareOrder.from_json(shares.order)
    first = await self._run(self._folder.write_share, order, shares.count, weights.leaves)
    others = _accepted(weights.version, await shares.reports())
    reports = [first, *map(ShareReport.from_json, others)]
    if not isinstance(self._folder, DeltaFolder):
      return await asyncio.to_thread(self._folder.complete, weights.version, reports)
    decision = await asyncio.to_thread(self._folder.decide, reports)
    await shares.decide(decision.to_json())
    digests = [await asyncio.to_thread(self._folder.write_decided, decision)]
    digests += [each['digests'] for each in _accepted(weights.version, await shares.reports())]
    complete = self._folder.complete_decided
    return await asyncio.to_thread(complete, weights.version, reports, decision, digests)


def _accepted(version: Version, reports: Sequence[Json]) -> Sequence[Any]:
  """Returns the reports of all processes but process 0.

  Raises RunError if one of them reports an error.
  """
  for number, report in enumerate(reports):
    if report is not None and 'error' in report:
      raise RunError(
        f'version {version} was not published: process {number} could not write its share: '
        f'{report["error"]}'
      )
  return reports[1:]


def _proofs(replicas: Iterable[Replica]) -> dict[str, Any]:
  """Returns the arguments of `PublicationFolder.write` that determine which digests and checksums
  are computed.
  """
  replicas = tuple(replicas)
  checksums = any(replica.slices and not replica.on_cpu for replica in replicas)
  return {'slices': _slices(replicas), 'checksums': checksums}


def _slices(replicas: Iterable[Replica]) -> dict[str, set[Slice]]:
  """Returns the slices of tensors that the servers' workers hold, keyed by tensor name."""
  slices: dict[str, set[Slice]] = {}
  for replica in replicas:
    for worker in replica.slices:
      for name, tensor in worker.items():
        if (part := slice_of(tensor)) is not None:
          slices.setdefault(name, set()).add(part)
  return slices
