"""Predicts which roles each memory phase keeps on a device, and their sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from jaxrl_llm.app.dry_run.programs import Held
from jaxrl_llm.master.phases import ENGINE, REWARD_MODEL, Phase, PhasesConfig, residency_of

COMPUTING = {
  Phase.ROLLOUT: (ENGINE,),
  Phase.REWARD: (REWARD_MODEL,),
  Phase.INFERENCE: ('policy', 'base', 'reference', 'critic'),
  Phase.TRAIN: ('policy', 'base', 'gradients', 'optimizer', 'critic', 'critic optimizer'),
}
"""Roles that may compute in each phase. In the inference phase, the policy computes only if a batch
needs its logprobs before the update.
"""


def planned(
  config: PhasesConfig, roles: Sequence[Held], engine_bytes: int
) -> dict[Phase, dict[str, int]]:
  """Returns, for each phase, the maximum number of bytes of each role on a device.

  Args:
    roles: memory of each role while it is on the device.
    engine_bytes: memory of the engine on one of the trainer's devices.
  """
  sizes = {role.role: role.per_device for role in roles} | {ENGINE: engine_bytes}

  def stays(role: str) -> bool:
    if role == 'gradients':
      return False
    return (config.engine if role == ENGINE else residency_of(config, role)) == 'resident'

  return {
    phase: {
      role: size for role, size in sizes.items() if size and (role in computing or stays(role))
    }
    for phase, computing in COMPUTING.items()
    if phase != Phase.REWARD or REWARD_MODEL in sizes
  }


def phases_table(plan: Mapping[Phase, Mapping[str, int]]) -> Table:
  """Returns a table of the phases: the roles on a device in each phase, and their sizes in
  megabytes.
  """
  table = Table()
  table.add_column('memory phase')
  table.add_column('MB a device', justify='right')
  table.add_column('roles (MB)')
  for phase, sizes in plan.items():
    parts = ', '.join(f'{role} {size / 1e6:,.1f}' for role, size in sizes.items())
    table.add_row(str(phase), f'{sum(sizes.values()) / 1e6:,.1f}', parts)
  return table
