"""Readable reports on compiled programs (memory, whether it fits the chip, traffic, FLOPs, time)
and memory by role.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import jax
from jax.sharding import Mesh
from rich.console import Group
from rich.table import Table

from jaxrl_llm.app.dry_run.programs import Held, Program
from jaxrl_llm.parallel.collectives import traffic
from jaxrl_llm.parallel.topology import CHIPS

UTILISATION = 0.4
"""Share of the chip's peak FLOP/s assumed for the expected time; a well-tuned step reaches it."""
_READABLE = {'tpu': {'xla_jf_spmd_threshold_for_windowed_einsum_mib': '1000000'}}
"""Compiler options, keyed by platform. Without this one, TPU programs would fuse gathers into
products as chains of permutes, which cannot be counted.
"""
_TOO_MUCH = re.compile(r'Used ([\d.]+\w) of ([\d.]+\w) hbm. Exceeded[^.]* by ([\d.]+\w)')


def held_table(mesh: Mesh, roles: Sequence[Held]) -> Group:
  """Returns the mesh axes, and a table of the megabytes that each role keeps in total, on each
  device and, if any are offloaded, in host memory for each device.
  """
  device = mesh.devices.flat[0]
  axes = ' '.join(f'{axis}={size}' for axis, size in mesh.shape.items())
  table = Table()
  table.add_column('role')
  table.add_column('MB', justify='right')
  table.add_column('MB a device', justify='right')
  if any(role.offloaded for role in roles):
    table.add_column('MB on the host', justify='right')
  for role in roles:
    sizes = [role.whole, role.per_device, role.offloaded][: len(table.columns) - 1]
    table.add_row(role.role, *(f'{size / 1e6:,.1f}' for size in sizes))
  return Group(f'{mesh.devices.size} × {device.device_kind}: {axes}', table)


def compiled_line(program: Program, mesh: Mesh, chip: str | None) -> tuple[str, bool]:
  """Compiles a program; returns its statistics, and whether it fits `chip` (True if None)."""
  lowered, began = program.lower(), time.perf_counter()
  options = _READABLE.get(CHIPS[chip].platform) if chip else None
  try:
    compiled = lowered.compile(options)
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    return f'does not fit: {_excess(str(error))}', False
  took = time.perf_counter() - began
  memory = compiled.memory_analysis()
  needed = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
  needed -= memory.alias_size_in_bytes
  line = (
    f'{needed / 1e6:,.1f} MB a device (arguments {memory.argument_size_in_bytes / 1e6:,.1f}, '
    f'temporaries {memory.temp_size_in_bytes / 1e6:,.1f}'
  )
  line += (
    f', in host memory {memory.host_argument_size_in_bytes / 1e6:,.1f})'
    if memory.host_argument_size_in_bytes
    else ')'
  )
  if not chip:
    return line, True
  limit = CHIPS[chip].memory_bytes
  line += f' of {limit / 1e6:,.0f}'
  sent = [
    f'{kind} {t.count} ({t.bytes / 1e6:,.1f} MB, largest {t.largest})'
    for kind, t in traffic(compiled.as_text()).items()
  ]
  line += f'; collectives of a micro-batch: {", ".join(sent) or "none"}'
  if program.flops:
    peak = CHIPS[chip].peak_flops * mesh.devices.size * UTILISATION
    line += f'; {program.flops / 1e12:,.2f} TFLOP a full micro-batch, '
    line += f'{program.flops / peak:,.3f} s at {UTILISATION:.0%} of peak'
  line += f'; compiled in {took:.0f} s'
  if needed > limit:
    return f'does not fit, by {(needed - limit) / 1e6:,.1f} MB: {line}', False
  return line, True


def _excess(message: str) -> str:
  """Returns the memory figures in a compiler's error, or its first line if there are none."""
  match = _TOO_MUCH.search(message)
  return (
    f'needs {match[1]} of {match[2]}, {match[3]} too much' if match else message.splitlines()[0]
  )
