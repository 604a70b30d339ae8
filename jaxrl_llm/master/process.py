"""Resources of one process of a run."""

from __future__ import annotations

import dataclasses

from jax.sharding import Mesh

from jaxrl_llm.parallel.coordinator import Coordinator
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.runtime.events import SILENT, Events
from jaxrl_llm.runtime.stopwatch import Stopwatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Process:
  """Resources of this process, shared by the loop, the keeper and the trainers of all stages."""

  coordinator: Coordinator
  device: DeviceThread
  mesh: Mesh
  stopwatch: Stopwatch = dataclasses.field(default_factory=Stopwatch)
  events: Events = SILENT
  """Event log of process 0. In the other processes, events are discarded."""
