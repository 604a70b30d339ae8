"""Automatic choices of a run, on which its processes agree before any work on the devices.

Process 0 makes the choices that need no compiler. Every process compiles each memory plan, because
some compilers work only if all processes take part, and reports the memory that the plan needs. If
a process cannot use a choice, all processes raise an error that names this process.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm.app.composition.automatic import (
  ATTENTION,
  open_fields,
  with_logits_budget,
  with_named,
  with_sized,
  with_values,
)
from jaxrl_llm.app.composition.stages import policy_options
from jaxrl_llm.app.dry_run.memory_plan import Fit, Plan, Search, Target, measure, memory_limit
from jaxrl_llm.app.schema import AUTO, Config
from jaxrl_llm.core.errors import RunError, UserError, one_line
from jaxrl_llm.core.process.xla_flags import automatic_flags
from jaxrl_llm.core.types import Json
from jaxrl_llm.models.attention import chosen
from jaxrl_llm.ops.attention import KERNELS
from jaxrl_llm.parallel.coordinator import Coordinator
from jaxrl_llm.parallel.device import DeviceThread


async def agreed(
  config: Config,
  target: Target,
  coordinator: Coordinator,
  device: DeviceThread,
  tell: Callable[[str], None],
) -> tuple[Config, Search | None]:
  """Gives values to all fields that process 0 has left open. Every process must call this function,
  with process 0's configuration.

  Args:
    tell: called with lines of text that describe the memory plans.

  Returns:
    The configuration, and the search for a memory plan, or None if none was needed.

  Raises:
    UserError: no memory plan fits a device.
    RunError: a process cannot use a choice; the message names the process.
  """
  config = await _with_kernel(config, target.mesh, coordinator)
  if not open_fields(config):
    return config, None
  limits = await coordinator.gather(memory_limit(config, target.mesh, None))
  limit = min((size for size in limits if size is not None), default=None)
  if limit is None:
    platform = target.mesh.devices.flat[0].platform
    return with_sized(config, platform=platform, spec=target.spec, plans=False), None
  config = with_logits_budget(config, limit)
  if not open_fields(config):
    return config, None
  search = Search(config, target, limit)
  while (plan := search.next()) is not None:
    mine = await device.run(_measured, config, plan, target, limit)
    search.report(plan, _worst(plan, await coordinator.gather(mine)))
  for line in search.lines():
    tell(line)
  return with_named(config, search.chosen.values), search


def _measured(config: Config, plan: Plan, target: Target, limit: int) -> Json:
  """Returns, as JSON, the memory of a plan, or the error with which its compilation failed."""
  try:
    fit, _ = measure(with_named(config, plan.values), target, limit)
  except (UserError, jax.errors.JaxRuntimeError) as error:
    return {'host': socket.gethostname(), 'error': one_line(error)}
  return fit._asdict()


def _worst(plan: Plan, reports: Sequence[Any]) -> Fit:
  """Returns the largest memory of a plan among the reports of the processes. Raises RunError if a
  process could not compile the plan.
  """
  for process, report in enumerate(reports):
    if 'error' in report:
      raise _rejected(process, report['host'], f'cannot compile the memory plan ({plan})', report)
  fits = [Fit(**report) for report in reports]
  return max(fits, key=lambda fit: (bool(fit.excess), fit.needed))


async def _with_kernel(config: Config, mesh: Mesh, coordinator: Coordinator) -> Config:
  """Returns the configuration with the fused attention kernel that process 0 has chosen. If process
  0 has chosen no fused kernel, the field keeps its value.

  Raises RunError if a process chooses another kernel, cannot use one, or has other compiler flags.
  """
  mine: dict[str, Json] = {'host': socket.gethostname(), 'flags': list(automatic_flags(os.environ))}
  try:
    options = policy_options(config)
    choice = chosen(options, mesh, time=1, keys=1, same_tokens=True)
    mine['attention'] = choice.implementation if choice.implementation in KERNELS.values() else AUTO
  except UserError as error:
    mine['error'] = one_line(error)
  reports = await coordinator.gather(mine)
  first = reports[0]
  for process, report in enumerate(reports):
    if 'error' in report:
      raise _rejected(process, report['host'], 'cannot use the attention', report)
    for name, what in (('attention', 'attention'), ('flags', 'flags of the compiler')):
      if report[name] != first[name]:
        difference = {'error': f'{report[name]!r}, wanted {first[name]!r} as on process 0'}
        raise _rejected(process, report['host'], f'has other {what}', difference)
  return with_values(config, {ATTENTION: first['attention']})


def _rejected(process: int, host: str, what: str, report: Any) -> RunError:
  return RunError(
    f'process {process} on {host} {what}: {report["error"]}; use equal hosts with equal software, '
    'or leave this one out'
  )
