"""Builds the scorers that a configuration names. Does not import JAX, so that `jaxrl score` starts
fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from jaxrl_llm.config.annotations import nearest
from jaxrl_llm.config.own import own_part
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.registry import Registry
from jaxrl_llm.rewards.api import (
  DISCOVERING,
  REWARD_MODEL,
  AnyScorer,
  RewardsConfig,
  ScorerConfig,
)
from jaxrl_llm.rewards.scorers.adapters import python_scorer, trl_scorer, verl_scorer
from jaxrl_llm.rewards.scorers.answer.scorer import answer_scorer, choose_options
from jaxrl_llm.rewards.scorers.code import code_scorer, options_within
from jaxrl_llm.rewards.scorers.delayed import delayed_scorer
from jaxrl_llm.rewards.scorers.environment import environment_scorer
from jaxrl_llm.rewards.scorers.format import format_scorer
from jaxrl_llm.rewards.scorers.http import http_scorer
from jaxrl_llm.rewards.scorers.instructions import instructions_scorer
from jaxrl_llm.rewards.scorers.judge.scorer import judge_scorer
from jaxrl_llm.rewards.scorers.k12 import k12_scorer
from jaxrl_llm.rewards.scorers.language import language_scorer
from jaxrl_llm.rewards.scorers.length import length_scorer, overlong_scorer
from jaxrl_llm.rewards.scorers.repetition import repetition_scorer
from jaxrl_llm.rewards.scorers.reward_model import reward_model_scorer
from jaxrl_llm.rewards.scorers.verifier.scorer import verifier_scorer
from jaxrl_llm.rewards.scorers.vision import box_iou_scorer, point_scorer

DELAYED = 'delayed'
"""Name of the scorer implementation whose verdicts arrive after the rollout, from people or other
programs.
"""
SCORERS: Mapping[str, Callable[..., AnyScorer]] = {
  'answer': answer_scorer,
  'box_iou': box_iou_scorer,
  'code': code_scorer,
  DELAYED: delayed_scorer,
  'environment': environment_scorer,
  'format': format_scorer,
  'http': http_scorer,
  'instructions': instructions_scorer,
  'judge': judge_scorer,
  'k12': k12_scorer,
  'language': language_scorer,
  'length': length_scorer,
  'overlong': overlong_scorer,
  'point': point_scorer,
  'python': python_scorer,
  'repetition': repetition_scorer,
  REWARD_MODEL: reward_model_scorer,
  'trl': trl_scorer,
  'verifier': verifier_scorer,
  'verl': verl_scorer,
}


def build_scorer(
  scorer: ScorerConfig, where: str = 'rewards.scorers', registry: Registry | None = None
) -> AnyScorer:
  """Builds a scorer: one from the catalogue, or a user-defined one, which is a function from
  options to a scorer.

  Args:
    where: field or flag that names the scorer, for error messages.
    registry: registry in which the scorer discovers services. The scorer sends them the registry's
      key, unless its option `key_file` names another key.
  """
  name = scorer.implementation
  if ':' not in name and name not in SCORERS:
    raise UserError(
      f"{where}: no scorer {name!r}; {nearest(name, SCORERS)}; a custom one is 'module:attribute'"
    )
  options = options_within(scorer) if name == 'code' else scorer.options
  if registry is not None and name in DISCOVERING and options.get('discover') is not None:
    key_file = options.get('key_file') or str(registry.key_file)
    options = {**options, 'key_file': key_file}
  return (own_part(name, 'scorer') if ':' in name else SCORERS[name])(**options)


def build_scorers(config: RewardsConfig, registry: Registry | None = None) -> dict[str, AnyScorer]:
  """Builds all configured scorers, keyed by name. For `registry`, see `build_scorer`."""
  return {scorer.name: build_scorer(scorer, registry=registry) for scorer in config.scorers}


CHOOSERS = {'answer': choose_options}
"""Functions that choose the options that a scorer leaves open, keyed by the scorer's
implementation. Each takes the given options and a function that returns all reference answers. It
returns the chosen options and the reason, or None if no option is open.
"""
CHOSEN = ('mode', 'extraction', 'units')
"""Names of the scorer options that may be left open and are then chosen from the tasks."""


class ChosenScorer(NamedTuple):
  scorer: ScorerConfig
  """The scorer with its open options filled in."""
  why: str
  """Reason for the choice; empty if no option was open."""

  def line(self) -> str:
    options = {name: self.scorer.options[name] for name in CHOSEN if name in self.scorer.options}
    settings = [
      f'{name} {", ".join(v) if isinstance(v, list | tuple) else v}' for name, v in options.items()
    ]
    return f'scorer {self.scorer.name}: {"; ".join(settings)} ({self.why or "as given"})'


def choose(scorer: ScorerConfig, truths: Callable[[], Iterable[str | None]]) -> ChosenScorer:
  """Returns the scorer with its open options chosen according to the reference answers.

  Args:
    truths: returns the reference answers of all tasks that the scorer judges; called only if an
      option is open.
  """
  chooser = CHOOSERS.get(scorer.implementation)
  chosen = chooser(scorer.options, truths) if chooser else None
  if chosen is None:
    return ChosenScorer(scorer, '')
  return ChosenScorer(
    dataclasses.replace(scorer, options={**scorer.options, **chosen.options}), chosen.why
  )
