"""What every process of a run builds from the configuration before it loads the run's state."""

from __future__ import annotations

import dataclasses
import pathlib

from jaxrl_llm.app.schema import Config
from jaxrl_llm.core.net.registry import Registry
from jaxrl_llm.master.process import Process
from jaxrl_llm.master.trainer import Stage
from jaxrl_llm.models.api import Model
from jaxrl_llm.rollout.explorers.process import ExplorerCommand
from jaxrl_llm.runtime.checkpoint import Checkpoints


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
  """A configured run: its configuration, model, stages and process; the same in every process."""

  config: Config
  workdir: pathlib.Path
  """Directory that the run's files are read from and written to."""
  stages: tuple[Stage, ...]
  model: Model
  """The policy, or the reward model trained in its place."""
  checkpoints: Checkpoints
  process: Process
  registry: Registry | None = None
  """Process 0's registry, if the run has one."""
  explorer_command: ExplorerCommand
  """Function that returns the command of an explorer process; passed in, since that program belongs
  to a higher layer.
  """
