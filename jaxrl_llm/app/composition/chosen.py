"""Chooses values for the scorer options that a configuration leaves open, according to the tasks,
and takes over the values that the run has chosen for 'auto' fields.

Invariant: a run keeps the options that were chosen at its start. A resumed run reads them from
config.json, even if its data have changed since.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxrl_llm.app.composition.automatic import with_recorded
from jaxrl_llm.app.composition.scorers import CHOOSERS, CHOSEN, choose
from jaxrl_llm.app.composition.workdir import check_configuration
from jaxrl_llm.app.schema import Config, scored_tasksets
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.files import parse_json
from jaxrl_llm.rewards.api import ScorerConfig
from jaxrl_llm.tasks.taskset import Taskset


def settle(
  config: Config,
  run: pathlib.Path | None,
  tell: Callable[[str], None],
  load: Callable[[str], Taskset],
) -> Config:
  """Returns the configuration with values for the scorer options that it leaves open, and with the
  run's values of 'auto' fields (`automatic.with_recorded`).

  Args:
    run: directory of the run whose choices are kept: the run to resume, or the parent of a
      branch. None for a new run.
    tell: called with a line of text for each scorer whose options were chosen.
    load: returns the taskset with a given name (`taskset_loader`); called only if an option is
      open.
  """
  kept = {} if run is None else _kept(run)
  scorers = []
  for scorer in config.rewards.scorers:
    if scorer.name in kept:
      scorers.append(_resumed(scorer, kept[scorer.name]))
      continue
    chosen = choose(scorer, lambda scorer=scorer: _truths(config, scorer, load))
    if chosen.why:
      tell(chosen.line())
    scorers.append(chosen.scorer)
  return dataclasses.replace(
    with_recorded(config, run),
    rewards=dataclasses.replace(config.rewards, scorers=tuple(scorers)),
  )


def kept_choices(config: Config, run: pathlib.Path) -> Config:
  """Returns the configuration with the values that a run without commits has chosen for 'auto'
  fields. If the run's configuration differs in other fields, returns `config` unchanged.

  If the process was killed before the first commit, the next start therefore makes the same
  choices.
  """
  filled = with_recorded(config, run)
  return filled if check_configuration(run, filled) == () else config


def _resumed(scorer: ScorerConfig, kept: Mapping[str, Any]) -> ScorerConfig:
  """Returns the scorer with its open options set to the values that were chosen when the run
  started.

  Args:
    kept: values that were chosen when the run started, keyed by option name.

  Raises:
    UserError: a value is unknown, because an earlier version started the run.
  """
  if scorer.implementation not in CHOOSERS:
    return scorer
  given = {name: value for name, value in scorer.options.items() if value is not None}
  if missing := sorted({'mode', 'extraction'} - {*kept, *given}):
    raise UserError(
      f'rewards.scorers.{scorer.name}.options: {" and ".join(missing)} of the run are unknown, '
      "because an earlier version started it, with the defaults mode 'exact' and extraction "
      "'whole'; resume it with that version, or start another run"
    )
  return dataclasses.replace(scorer, options={**scorer.options, **kept, **given})


def _kept(run: pathlib.Path) -> dict[str, Mapping[str, Any]]:
  """Returns a run's values of the scorer options in `CHOSEN`, keyed by scorer name and then by
  option name. The result is empty if config.json cannot be read; `Workdir.adopt` reports this
  error.
  """
  with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
    written = parse_json((run / 'config.json').read_text())
    return {
      scorer['name']: {name: value for name, value in scorer['options'].items() if name in CHOSEN}
      for scorer in written['rewards']['scorers']
    }
  return {}


def _truths(
  config: Config, scorer: ScorerConfig, load: Callable[[str], Taskset]
) -> Iterable[str | None]:
  """Yields the reference answers (`Task.truth`) of the tasks that the scorer judges."""
  for name in sorted(scored_tasksets(config)):
    if not scorer.tasksets or name in scorer.tasksets:
      for task in load(name).tasks:
        if not scorer.domains or task.domain in scorer.domains:
          yield task.truth
