"""Expected time of a compiled program, from its operations and collectives.

A micro-batch takes as long as its products and those of its collectives that the compiler did not
schedule beside a product. Collectives beside products take time only if they need longer than all
products together. Work other than matrix products, accesses to memory and latencies are left out.
No time of a device has been compared with this model.
"""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import Mesh

from jaxrl_llm.parallel.collectives import Traffic
from jaxrl_llm.parallel.topology import Chip

PRODUCTS = 0.65
"""Share of a chip's peak FLOP/s at which matrix products run, assumed for large ones in
bfloat16.
"""
NETWORK_BYTES_PER_S = 50e9
"""Bytes per second that a GPU's network card receives: 400 Gb/s, with one card per GPU."""


def expected_seconds(operations: int, sent: Mapping[str, Traffic], mesh: Mesh, chip: Chip) -> float:
  """Returns the expected seconds of a micro-batch.

  Args:
    operations: floating-point operations over all devices, including recomputation.
    sent: collectives of the micro-batch.
  """
  products = operations / (mesh.devices.size * chip.peak_flops * PRODUCTS)
  rate = link_rate(mesh, chip)
  every = sum(_received(kind, t.bytes, mesh) for kind, t in sent.items()) / rate
  beside = sum(_received(kind, t.overlapped, mesh) for kind, t in sent.items()) / rate
  return max(products, beside) + every - beside


def link_rate(mesh: Mesh, chip: Chip) -> float:
  """Returns the bytes per second that a device receives in a collective over all devices.

  On several GPU hosts, every byte that a host sends or receives passes one of its network cards. In
  a ring, each card passes on an equal part of what every GPU of the host receives.
  """
  hosts = len({device.process_index for device in mesh.devices.flat})
  if chip.platform != 'cuda' or hosts == 1:
    return chip.link_bytes_per_s
  return min(chip.link_bytes_per_s, mesh.devices.size / hosts * NETWORK_BYTES_PER_S)


def _received(kind: str, size: int, mesh: Mesh) -> float:
  """Returns the bytes that a device receives for collectives of `size` bytes (`Traffic.bytes`), if
  they span all devices. An all-reduce is a reduce-scatter and an all-gather.
  """
  if kind == 'collective-permute':
    return size
  passes = 2 if kind == 'all-reduce' else 1
  return passes * size * (mesh.devices.size - 1) / mesh.devices.size
