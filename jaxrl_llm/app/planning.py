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
  with_named,
  with_sized,
  with_values,
)
from jaxrl_llm.app.composition.shapes import chunk_length, saved_by_sharing
from jaxrl_llm.app.composition.stages import policy_options
from jaxrl_llm.app.dry_run.memory_plan import Fit, Plan, Search, Target, measure, memory_limit
from jaxrl_llm.app.schema import AUTO, Config
from jaxrl_llm.core.errors import RunError, UserError, one_line
from jaxrl_llm.core.process.xla_flags import automatic_flags
from jaxrl_llm.core.types import Json
from jaxrl_llm.models.attention import chosen, platform_of, proven
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.ops.attention import KERNELS, is_absent
from jaxrl_llm.ops.self_check import Trial
from jaxrl_llm.parallel.coordinator import Coordinator
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.parallel.mesh import SEQUENCE


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
  config = await _with_kernel(config, target, coordinator, device, tell)
  if not open_fields(config):
    return config, None
  limits = await coordinator.gather(memory_limit(config, target.mesh, None))
  limit = min((size for size in limits if size is not None), default=None)
  if limit is None:
    platform = target.mesh.devices.flat[0].platform
    return with_sized(config, platform=platform, spec=target.spec, plans=False), None
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


async def _with_kernel(
  config: Config,
  target: Target,
  coordinator: Coordinator,
  device: DeviceThread,
  tell: Callable[[str], None],
) -> Config:
  """Returns the configuration with the attention implementation that process 0 has chosen. If the
  choice depends on the length of the rows, the field keeps its value.

  Raises RunError if a process chooses another one, cannot use it, or has other compiler flags.
  """
  mine: dict[str, Json] = {'host': socket.gethostname(), 'flags': list(automatic_flags(os.environ))}
  length = chunk_length(config, target.mesh)
  try:
    attention, reason = await device.run(attention_here, config, target.mesh, target.spec, length)
    mine |= {'attention': attention, 'reason': reason}
    if reason:
      tell(f'attention: {attention}, {reason}')
  except UserError as error:
    mine['error'] = one_line(error)
  first = agreed_report(await coordinator.gather(mine))
  return with_values(config, {ATTENTION: first['attention']})


def agreed_report(reports: Sequence[Any]) -> Any:
  """Returns the report of process 0 on its attention and compiler flags. Raises RunError if another
  process cannot use its attention, or differs from process 0; the message names that process.
  """
  first = reports[0]
  for process, report in enumerate(reports):
    if 'error' in report:
      raise _rejected(process, report['host'], 'cannot use the attention', report)
    for name, what in (('attention', 'attention'), ('flags', 'flags of the compiler')):
      if report[name] != first[name]:
        why = f' ({report["reason"]})' if name == 'attention' and report['reason'] else ''
        difference = {'error': f'{report[name]!r}{why}, wanted {first[name]!r} as on process 0'}
        raise _rejected(process, report['host'], f'has other {what}', difference)
  return first


def attention_here(config: Config, mesh: Mesh, spec: ModelSpec, length: int) -> tuple[str, str]:
  """Chooses the attention implementation of training, on platforms with a fused kernel. On GPUs,
  this checks kernels on a device of this process.

  Args:
    length: number of tokens of a packed chunk.

  Returns:
    (implementation, or 'auto' if the choice depends on the length of the rows; the device and the
    reasons against other kernels, or an empty text if none was checked).

  Raises:
    UserError: the configured implementation cannot be used.
  """
  options = policy_options(config)
  sizes = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
  found = proven(
    options.attention,
    Trial(*sizes, options.dtype),
    platform=platform_of(mesh),
    time=length,
    shards=mesh.shape[SEQUENCE],
    saved=saved_by_sharing(config),
  )
  if found is not None:
    return found
  choice = chosen(options, mesh, time=1, keys=1, same_tokens=True)
  is_kernel = choice.implementation in KERNELS.get(platform_of(mesh), ())
  return (choice.implementation if is_kernel else AUTO), ''


def check_kernel(config: Config) -> None:
  """Raises UserError if a resumed run, or the parent of a branch, has recorded an attention kernel
  that this process's platform does not have.
  """
  attention, platform = config.policy.attention, platform_of(None)
  if is_absent(attention, platform):
    raise UserError(
      f'{ATTENTION}: the run recorded {attention}, which does not run on this platform '
      f'({platform}); resume it where it started, or with --config.{ATTENTION}=blockwise'
    )


def _rejected(process: int, host: str, what: str, report: Any) -> RunError:
  return RunError(
    f'process {process} on {host} {what}: {report["error"]}; use equal hosts with equal software, '
    'or leave this one out'
  )
