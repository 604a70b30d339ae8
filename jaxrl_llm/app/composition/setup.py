"""Configured parts that every process of a run builds before it loads the run's state."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

from jaxrl_llm.app.composition.reward_role import TrainerRewardModel
from jaxrl_llm.app.schema import Config
from jaxrl_llm.core.net.registry import Registry
from jaxrl_llm.master.process import Process
from jaxrl_llm.master.trainer import Stage
from jaxrl_llm.models.api import Model
from jaxrl_llm.rollout.explorers.process import ExplorerCommand
from jaxrl_llm.runtime.archive import Archive
from jaxrl_llm.runtime.checkpoint import Checkpoints


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
  """A configured run. Every process has the same configuration, model and stages."""

  config: Config
  workdir: pathlib.Path
  """Run directory."""
  stages: tuple[Stage, ...]
  model: Model
  """The policy, or a reward model if all stages train one. For the model of a stage, see
  `state.model_of`.
  """
  checkpoints: Checkpoints
  process: Process
  reward_model: TrainerRewardModel | None = None
  """Reward model of the trainer; None if the run has none."""
  registry: Registry | None = None
  """Registry of the run. None in processes other than process 0, and in runs without a registry."""
  archive: Archive | None = None
  """Archive of the run. None in processes other than process 0, and in runs without an archive."""
  next_attempt: Callable[[], int] | None = None
  """Function that counts a new attempt of the run and returns its number. None in processes other
  than process 0, and in runs that are reopened offline.
  """
  explorer_command: ExplorerCommand
  """Function that returns the command line of an explorer process. It is passed in, because the
  explorer program belongs to a higher layer of the package.
  """
