"""Trials of a sweep: their overrides, their ids, and the arguments of their runs."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping

from jaxrl_llm.app.sweeps.sweep import SEED, Sweep, points
from jaxrl_llm.config.load import override_text
from jaxrl_llm.core.types import Json

_SLUG_CHARACTERS = 48
"""Maximum length of the part of a trial's id that lists the trial's overrides."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
  """One run of a sweep, without its progress."""

  overrides: Mapping[str, Json]
  """Overrides of this trial, keyed by dotted key. They apply in addition to `Sweep.overrides`, and
  include the seed if the sweep sets seeds.
  """
  is_start: bool = False
  """Whether this is the start run of its seed: the run whose final weights initialise the trials
  with the same seed.
  """

  @property
  def key(self) -> str:
    """Text that identifies the trial within its sweep."""
    return json.dumps([self.is_start, dict(self.overrides)], sort_keys=True)

  @property
  def point(self) -> dict[str, Json]:
    """Overrides without the seed. Trials with equal points differ only in their random numbers."""
    return {key: value for key, value in self.overrides.items() if key != SEED}

  @property
  def seed(self) -> int | None:
    """Seed that the sweep sets. If None, the run has the seed of the configuration."""
    return self.overrides.get(SEED)


def planned(sweep: Sweep) -> list[Trial]:
  """Returns the trials that are known before any trial has run.

  The runs from which the other trials start come first.
  """
  starts = [] if sweep.start is None else with_seeds(sweep, {}, is_start=True)
  return starts + [trial for point in points(sweep) for trial in with_seeds(sweep, point)]


def with_seeds(sweep: Sweep, point: Mapping[str, Json], *, is_start: bool = False) -> list[Trial]:
  """Returns the trials of a point: one for each seed of the sweep, or one if it sets no seeds."""
  if not sweep.seeds:
    return [Trial(overrides=dict(point), is_start=is_start)]
  return [Trial(overrides={**point, SEED: seed}, is_start=is_start) for seed in sweep.seeds]


def trial_id(number: int, trial: Trial) -> str:
  """Returns a trial's id, which is also the name of its run directory.

  It consists of the trial's number and a shortened list of its overrides.
  """
  parts = ['start'] if trial.is_start else []
  parts += [f'{key.rpartition(".")[2]}-{_shown(value)}' for key, value in trial.overrides.items()]
  slug = re.sub(r'[^\w.+-]+', '_', '-'.join(parts), flags=re.ASCII)[:_SLUG_CHARACTERS]
  return f'{number:03d}-{slug}'.rstrip('-._')


def _shown(value: Json) -> str:
  return f'{value:.6g}' if isinstance(value, float) else str(value)


def describe(overrides: Mapping[str, Json]) -> str:
  """Returns a short text of overrides, such as 'peak_lr 0.0005, seed 1'."""
  short = [key.rpartition('.')[2] for key in overrides]
  names = [
    key if short.count(name) > 1 else name for key, name in zip(overrides, short, strict=True)
  ]
  return ', '.join(f'{name} {_shown(value)}' for name, value in zip(names, overrides.values()))


def arguments(
  base: str, overrides: Mapping[str, Json], workdir: pathlib.Path, init_from: pathlib.Path | None
) -> list[str]:
  """Returns the arguments of `jaxrl train` for a run.

  Args:
    base: file or shipped name of the configuration, with an optional :VARIANT.
    init_from: run directory from whose final weights the run starts. If None, the configuration
      determines the initial weights.
  """
  flags = [f'--config={base}', f'--workdir={workdir}']
  flags += [f'--init_from={init_from}'] if init_from else []
  return flags + [f'--config.{key}={override_text(key, value)}' for key, value in overrides.items()]
