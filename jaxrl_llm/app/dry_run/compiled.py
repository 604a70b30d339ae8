"""Reports on compiled programs (memory, whether they fit the chip, collectives, FLOPs, time) and on
the memory of each role.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Group
from rich.table import Table

from jaxrl_llm.app.dry_run.expected import expected_seconds
from jaxrl_llm.app.dry_run.programs import Held, Program
from jaxrl_llm.core.types import Json
from jaxrl_llm.parallel.collectives import overlapped_share, traffic
from jaxrl_llm.parallel.topology import CHIPS

_UNITS = {'K': 1 << 10, 'M': 1 << 20, 'G': 1 << 30, 'T': 1 << 40}
"""Units of the figures in the TPU compiler's error messages, in bytes."""
_TOO_MUCH = re.compile(r'Used ([\d.]+\w) of ([\d.]+\w) hbm. Exceeded[^.]* by ([\d.]+\w)')


def held_table(mesh: Mesh, roles: Sequence[Held]) -> Group:
  """Returns the mesh axes and a table of the memory that each role (policy, reference, …) keeps.

  The columns are megabytes in total, on each device and, if a role is offloaded, in host memory per
  device.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compilation:
  """Statistics of a compiled program. Sizes are in bytes per device."""

  refusal: str = ''
  """Reason why the program does not fit the chip; empty if it fits."""
  needed: int = 0
  """Memory for arguments, results and temporaries; 0 if the compiler rejected the program. On TPUs,
  gaps between arrays are not included.
  """
  refused_bytes: int = 0
  """Memory in bytes that a rejected program needs, according to the compiler; 0 if the program was
  not rejected, or if the compiler gave no figure.
  """
  arguments: int = 0
  temporaries: int = 0
  in_host_memory: int = 0
  limit: int | None = None
  """Memory of the target chip. None if the program was compiled for this process's devices."""
  collectives: str = ''
  """Collectives of a micro-batch as text; empty without a target chip."""
  overlapped: float | None = None
  """Share of the bytes of all collectives that can be transferred during a matrix product
  (`collectives.Traffic.overlapped`); None if there are no collectives, or without a target chip.
  """
  flops: int = 0
  """Model FLOPs of a full micro-batch over all devices; 0 if unknown."""
  expected_s: float | None = None
  """Expected seconds for a full micro-batch (`expected.expected_seconds`); None if unknown."""
  utilisation: float | None = None
  """Expected share of the chip's peak FLOP/s (MFU): `flops` in `expected_s`; None if unknown."""
  compile_s: float = 0.0

  @property
  def fits(self) -> bool:
    return not self.refusal

  @property
  def line(self) -> str:
    """Statistics as one line of text."""
    if not self.needed:
      return f'does not fit: {self.refusal}'
    line = f'{self.needed / 1e6:,.1f} MB a device (arguments {self.arguments / 1e6:,.1f}, '
    line += f'temporaries {self.temporaries / 1e6:,.1f}'
    line += f', in host memory {self.in_host_memory / 1e6:,.1f})' if self.in_host_memory else ')'
    if self.limit is None:
      return line
    line += f' of {self.limit / 1e6:,.0f}'
    line += f'; collectives of a micro-batch: {self.collectives}'
    if self.overlapped is not None:
      line += f', {self.overlapped:.0%} of the bytes beside matrix products'
    if self.expected_s is not None:
      line += f'; {self.flops / 1e12:,.2f} TFLOP per full micro-batch, '
      line += f'expected in {self.expected_s:,.3f} s, {self.utilisation:.0%} of peak'
    line += f'; compiled in {self.compile_s:.0f} s'
    return f'does not fit, {self.refusal}: {line}' if self.refusal else line

  def to_json(self) -> dict[str, Json]:
    return {'fits': self.fits, **dataclasses.asdict(self)}


def compile_program(program: Program, mesh: Mesh, chip: str | None) -> Compilation:
  """Compiles a program for devices of kind `chip`. If `chip` is None, compiles for this process's
  devices. The compiler has the flags that it has in a run, because the command has set them
  (`core.process.xla_flags`), so the compiled program is the one that a run would compile.
  """
  lowered, began = program.lower(), time.perf_counter()
  limit = CHIPS[chip].memory_bytes if chip else None
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    return Compilation(refusal=_excess(str(error)), refused_bytes=_used(str(error)), limit=limit)
  took = time.perf_counter() - began
  memory = compiled.memory_analysis()
  needed, temporaries = used_memory(memory, mesh.devices.flat[0].platform)
  sent, expected, overlapped, utilisation = '', None, None, None
  if chip:
    found = traffic(compiled.as_text())
    kinds = [
      f'{kind} {t.count} ({t.bytes / 1e6:,.1f} MB, largest {t.largest})'
      for kind, t in found.items()
    ]
    sent = ', '.join(kinds) or 'none'
    overlapped = overlapped_share(found) if found else None
    if program.flops:
      operations = program.flops + program.recomputed
      expected = expected_seconds(operations, found, mesh, CHIPS[chip])
      utilisation = program.flops / (CHIPS[chip].peak_flops * mesh.devices.size * expected)
  excess = needed - limit if limit is not None else 0
  return Compilation(
    refusal=f'by {excess / 1e6:,.1f} MB' if excess > 0 else '',
    needed=needed,
    arguments=memory.argument_size_in_bytes,
    temporaries=temporaries,
    in_host_memory=memory.host_argument_size_in_bytes,
    limit=limit,
    collectives=sent,
    overlapped=overlapped,
    flops=program.flops,
    expected_s=expected,
    utilisation=utilisation,
    compile_s=took,
  )


def used_memory(memory: Any, platform: str) -> tuple[int, int]:
  """Returns the bytes that a program needs on a device, and the bytes of its temporaries.

  Args:
    memory: result of `jax.stages.Compiled.memory_analysis`.
    platform: platform of the devices.
  """
  kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
  needed = kept + memory.temp_size_in_bytes
  if platform == 'tpu':
    # libtpu's `temp_size_in_bytes` may count memory several times that several arrays use one after
    # the other, or that is also a result. Its peak counts such memory once, but includes arguments
    # and results in host memory, and leaves out gaps between arrays. The compiler itself refuses
    # programs that do not fit with these gaps.
    in_host_memory = memory.host_argument_size_in_bytes + memory.host_output_size_in_bytes
    in_host_memory -= memory.host_alias_size_in_bytes
    needed = min(needed, memory.peak_memory_in_bytes - in_host_memory)
  return needed, max(0, needed - kept)


def _used(message: str) -> int:
  """Returns the bytes that a program needs according to a compiler's error message; 0 if the
  message has no figure.
  """
  match = _TOO_MUCH.search(message)
  unit = match and _UNITS.get(match[1][-1])
  return int(float(match[1][:-1]) * unit) if unit else 0


def _excess(message: str) -> str:
  """Returns the memory figures in a compiler's error message, or the message's first line if it has
  none.
  """
  match = _TOO_MUCH.search(message)
  return (
    f'needs {match[1]} of {match[2]}, {match[3]} too much' if match else message.splitlines()[0]
  )
