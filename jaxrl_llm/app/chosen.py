"""Options of scorers that are chosen from the tasks where a configuration leaves them open.

Invariant: a run keeps what was chosen at its start: resumed, it reads that from its config.json, whatever its data are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxrl_llm.app.schema import Config
from jaxrl_llm.app.scorers import CHOOSERS, CHOSEN, choose
from jaxrl_llm.rewards.api import ScorerConfig
from jaxrl_llm.tasks.taskset import load_taskset


def settle(config: Config, run: pathlib.Path | None, tell: Callable[[str], None]) -> Config:
  """The configuration with all that is chosen at a run's start.

  Loads the tasks where an option is open, which the run does once more.

  Args:
    run: directory of the run that goes on; None for a new one.
    tell: gets a line for each scorer with a choice.
  """
  kept = {} if run is None else _kept(run)
  scorers = []
  for scorer in config.rewards.scorers:
    if scorer.name in kept:
      options = {**kept[scorer.name], **scorer.options} if scorer.implementation in CHOOSERS else scorer.options
      scorers.append(dataclasses.replace(scorer, options=options))
      continue
    chosen = choose(scorer, lambda scorer=scorer: _truths(config, scorer))
    if chosen.why:
      tell(chosen.line())
    scorers.append(chosen.scorer)
  return dataclasses.replace(config, rewards=dataclasses.replace(config.rewards, scorers=tuple(scorers)))


def _kept(run: pathlib.Path) -> dict[str, Mapping[str, Any]]:
  """The options that a run has chosen, by scorer; nothing of a file that is no configuration (`Workdir.adopt`)."""
  with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
    written = json.loads((run / 'config.json').read_text())
    return {
      scorer['name']: {name: value for name, value in scorer['options'].items() if name in CHOSEN}
      for scorer in written['rewards']['scorers']
    }
  return {}


def _truths(config: Config, scorer: ScorerConfig) -> Iterable[str | None]:
  """Of the tasks that the scorer judges."""
  for taskset in config.tasksets:
    if not scorer.tasksets or taskset.name in scorer.tasksets:
      for task in load_taskset(taskset).tasks:
        if not scorer.domains or task.domain in scorer.domains:
          yield task.truth
