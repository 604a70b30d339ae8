"""Descriptions of absent devices for ahead-of-time compilation: TPU slices and GPUs.

Compilation for such devices needs libtpu or JAX's CUDA plugin (`jaxrl install --environment=aot`),
but none of the devices themselves.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
from jax.experimental import topologies

from jaxrl_llm.core.errors import UserError


class Chip(NamedTuple):
  """Properties of a device type, from the vendor's data sheet."""

  platform: Literal['tpu', 'cuda']
  memory_bytes: int
  """Memory for programs and their arrays. On a v5e, the system keeps 256 MiB of the 16 GiB."""
  peak_flops: float
  """Dense bfloat16 operations per second."""
  memory_bytes_per_s: float
  """Bytes per second that a device reads from or writes to its own memory."""
  link_bytes_per_s: float
  """Bytes per second that a device receives from the devices of its TPU slice or its host."""
  host_bytes_per_s: float
  """Bytes per second between a device and the memory of its host, in one direction. For TPUs this
  is an assumption (PCIe 4.0 x16), because their data sheets do not state it.
  """


GB, GIB = 10**9, 1 << 30
CHIPS: Mapping[str, Chip] = {
  'v4': Chip('tpu', 32 * GIB, 275e12, 1228e9, 300e9, 32e9),
  'v5e': Chip('tpu', 16 * GIB - (256 << 20), 197e12, 819e9, 200e9, 32e9),
  'v5p': Chip('tpu', 95 * GIB, 459e12, 2765e9, 600e9, 32e9),
  'v6e': Chip('tpu', 32 * GIB, 918e12, 1640e9, 448e9, 32e9),
  'h100': Chip('cuda', 80 * GB, 989e12, 3350e9, 450e9, 64e9),
  'h200': Chip('cuda', 141 * GB, 989e12, 4800e9, 450e9, 64e9),
}
_KINDS: Mapping[str, str] = {
  'TPU v4': 'v4',
  'TPU v5 lite': 'v5e',
  'TPU v5e': 'v5e',
  'TPU v5': 'v5p',
  'TPU v5p': 'v5p',
  'TPU v6 lite': 'v6e',
  'TPU v6e': 'v6e',
  'NVIDIA H100 80GB HBM3': 'h100',
  'NVIDIA H200': 'h200',
}
"""Keys of `CHIPS`, keyed by the name that JAX reports as `Device.device_kind`."""
_MODULES = {'tpu': 'libtpu', 'cuda': 'jax_plugins.xla_cuda12'}
_TPU_SHAPES = {'v4': 3, 'v5e': 2, 'v5p': 3, 'v6e': 2}
"""Number of dimensions of the shape of a slice, for each TPU type."""
_HOPPER = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 \
shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: \
52428800
  clock_rate_ghz: 1.98 device_memory_size: {memory} shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 }} registers_per_core_limit: 65536 \
registers_per_block_limit: 65536
}} platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} device_description_str: "{name}"
"""
"""Description of a Hopper GPU for XLA's compiler (xla/stream_executor/device_description.proto)."""
_GPUS = {
  'h100': dict(bandwidth=3_352_320_000_000, memory=84_942_979_072, name='NVIDIA H100 80GB HBM3'),
  'h200': dict(bandwidth=4_800_000_000_000, memory=150_110_011_392, name='NVIDIA H200'),
}


def chip_of(device_kind: str) -> Chip | None:
  """Returns the properties of the devices with this `Device.device_kind`; None if unknown."""
  return CHIPS.get(_KINDS.get(device_kind, ''))


class Topology(NamedTuple):
  chip: str
  """Kind of the devices, a key of `CHIPS`."""
  shape: tuple[int, ...]
  """Shape of a TPU slice. For GPUs: hosts × GPUs per host, or only the number of GPUs."""
  slices: int
  """Number of TPU slices, which all have the same `shape`; 1 for GPUs."""


def parse_topology(name: str) -> Topology:
  """Parses the name of a topology. TPUs are named as in 'v5e:4x4', or '2*v5e:4x4' for two slices.
  GPUs are named as in 'h100:8' for one host, or 'h100:2x8' for two hosts. Raises UserError for a
  malformed name or an unknown chip.
  """
  match = re.fullmatch(r'(?:(\d{1,4})\*)?(\w+):(\d{1,6}(?:x\d{1,6})*)', name, re.ASCII)
  chip = match and match[2]
  shape = tuple(map(int, match[3].split('x'))) if match else ()
  slices = int(match[1] or 1) if match else 1
  if chip not in CHIPS:
    raise UserError(
      f'topology {name!r}: wanted CHIP:SHAPE, where CHIP is one of {", ".join(CHIPS)}, such as '
      'v5e:4x4, 2*v5e:4x4 (two slices) or h100:8'
    )
  wanted = _TPU_SHAPES.get(chip)
  if (
    min(shape) < 1
    or (wanted is not None and len(shape) != wanted)
    or (wanted is None and len(shape) > 2)
  ):
    example = {2: '4x4', 3: '2x2x4', None: '8, or 2x8 for two hosts'}[wanted]
    raise UserError(f'topology {name!r}: {chip} needs a shape such as {example}')
  if slices < 1 or (slices > 1 and wanted is None):
    raise UserError(
      f'topology {name!r}: {slices} slices; wanted at least 1, and for GPUs hosts × GPUs instead, '
      'such as h100:2x8'
    )
  return Topology(chip, shape, slices)


def has_compiler(chip: str) -> bool:
  """Returns whether this environment can compile for the chip."""
  try:
    return importlib.util.find_spec(_MODULES[CHIPS[chip].platform]) is not None
  except ModuleNotFoundError:
    return False


def topology_devices(name: str) -> list[jax.Device]:
  """Returns the devices of a topology, for building a mesh and compiling programs. These devices
  cannot store arrays.

  Raises:
    UserError: the compiler does not know the topology. The error quotes the compiler's message.
  """
  chip, shape, slices = parse_topology(name)
  try:
    if CHIPS[chip].platform == 'cuda':
      hosts, gpus = shape if len(shape) == 2 else (1, shape[0])
      target = _HOPPER.format(**_GPUS[chip])
      description = topologies.get_topology_desc(
        platform='cuda', target_config=target, topology=f'1x{hosts}x{gpus}'
      )
    else:
      # On every TPU type, a single chip is less than a full host, so the size of the host must be
      # given.
      single = {'chips_per_host_bounds': (1, 1, 1)} if math.prod(shape) == 1 else {}
      description = topologies.get_topology_desc(
        platform='tpu', topology_name=name.partition('*')[2] or name, num_slices=slices, **single
      )
  except (jax.errors.JaxRuntimeError, ValueError) as error:
    raise UserError(
      f'topology {name!r}: the compiler does not know it: {str(error).splitlines()[0]}'
    ) from None
  return list(description.devices)
