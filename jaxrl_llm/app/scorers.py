"""The scorers that a configuration names. Without JAX, so that scoring by hand starts fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxrl_llm.config.annotations import nearest
from jaxrl_llm.config.own import own_part
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.adapters import python_scorer, trl_scorer, verl_scorer
from jaxrl_llm.rewards.answers.answer import answer_scorer
from jaxrl_llm.rewards.answers.k12 import k12_scorer
from jaxrl_llm.rewards.api import AnyScorer, RewardsConfig, ScorerConfig
from jaxrl_llm.rewards.code.scorer import code_scorer, options_within
from jaxrl_llm.rewards.endpoint import http_scorer
from jaxrl_llm.rewards.format import format_scorer
from jaxrl_llm.rewards.judge.judge import judge_scorer
from jaxrl_llm.rewards.language import language_scorer
from jaxrl_llm.rewards.length import length_scorer, overlong_scorer
from jaxrl_llm.rewards.repetition import repetition_scorer
from jaxrl_llm.rewards.verifier import verifier_scorer
from jaxrl_llm.rewards.vision import box_iou_scorer, point_scorer

SCORERS: Mapping[str, Callable[..., AnyScorer]] = {
  'answer': answer_scorer,
  'box_iou': box_iou_scorer,
  'code': code_scorer,
  'format': format_scorer,
  'http': http_scorer,
  'judge': judge_scorer,
  'k12': k12_scorer,
  'language': language_scorer,
  'length': length_scorer,
  'overlong': overlong_scorer,
  'point': point_scorer,
  'python': python_scorer,
  'repetition': repetition_scorer,
  'trl': trl_scorer,
  'verifier': verifier_scorer,
  'verl': verl_scorer,
}


def build_scorer(scorer: ScorerConfig, where: str = 'rewards.scorers') -> AnyScorer:
  """Of the catalogue or a user's own: a function of the options that gives a scorer."""
  name = scorer.implementation
  if ':' not in name and name not in SCORERS:
    raise UserError(f"{where}: no scorer {name!r}; {nearest(name, SCORERS)}; one of your own is 'module:attribute'")
  options = options_within(scorer) if name == 'code' else scorer.options
  return (own_part(name, 'scorer') if ':' in name else SCORERS[name])(**options)


def build_scorers(config: RewardsConfig) -> dict[str, AnyScorer]:
  """All that the configuration has, by name."""
  return {scorer.name: build_scorer(scorer) for scorer in config.scorers}
