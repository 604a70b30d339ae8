"""What a scorer is: a pure function of one attempt; and how scores become one reward.

Invariant: a scorer sees its own `Attempt` and nothing else, and a reward is None whenever a scorer in force could not
say: an unscorable sample is never 0 by accident. Nothing here imports jax, so scorer processes start fast.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Json
from jaxrl_llm.experience.score import Score
from jaxrl_llm.experience.task import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
  """All that a scorer may see."""

  uid: str
  """The sample's uid."""
  task: Task
  completion: str
  """The policy's text, without special tokens."""
  finish_reason: str
  response_len: int
  """Tokens the policy wrote."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
  """A scorer's answer. `value` None: this attempt cannot be judged, through no fault of the completion."""

  value: float | None
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  turn_values: tuple[float, ...] = ()
  """Of single turns, on top of `value`."""
  evidence: Mapping[str, Json] = dataclasses.field(default_factory=dict)


Scorer = Callable[[Attempt], Verdict]
"""Pure and picklable by reference: a top-level function, a partial of one, or `OverrunIsZero` around either."""


@dataclasses.dataclass(frozen=True)
class OverrunIsZero:
  """A scorer for which a missed deadline is the completion's doing, so worth 0 and not None.

  True of scorers that take milliseconds on any ordinary answer: only a hostile one (`9^{9^{9^{9}}}`) makes them hang.
  A policy that were let off with None could hide its wrong answers behind such a one.
  """

  scorer: Scorer

  def __call__(self, attempt: Attempt) -> Verdict:
    return self.scorer(attempt)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScorerConfig:
  name: str
  """Key of the scorer's values in scores, parts and metrics; unique in a run."""
  kind: str | None = None
  """Which implementation; None: the one called `name`."""
  weight: float = 1.0
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """The implementation's own."""
  deadline_s: float = 10.0
  """Seconds one call may take, not counting its wait for a free worker."""
  domains: tuple[str, ...] = ()
  """Task domains it judges; empty: all."""
  tasksets: tuple[str, ...] = ()
  """Tasksets it judges, so that each may have a composition of its own; empty: all."""

  @property
  def implementation(self) -> str:
    return self.name if self.kind is None else self.kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardsConfig:
  scorers: tuple[ScorerConfig, ...]
  workers: int = 1
  """Worker processes."""
  correct_by: str | None = None
  """Scorer whose value of at least 1 says that an attempt is correct; None: the first that judges its domain."""
  memory_limit_mib: int = 4096
  """Address space of one worker: a completion that makes a scorer allocate without end meets it. 0: no limit."""

  def __post_init__(self):
    names = [s.name for s in self.scorers]
    for name in names:
      if names.count(name) > 1:
        raise UserError(f'rewards.scorers: two scorers are called {name!r}: give each its own name (and its kind)')
    if self.correct_by is not None and self.correct_by not in names:
      raise UserError(f'rewards.correct_by: no scorer {self.correct_by!r}; configured are {sorted(names)}')
    for s in self.scorers:
      if not s.deadline_s > 0:
        raise UserError(
          f'rewards.scorers {s.name!r}: deadline_s is {s.deadline_s}, wanted a positive number of seconds'
        )
      if not math.isfinite(s.weight):
        raise UserError(f'rewards.scorers {s.name!r}: weight is {s.weight}, wanted a finite number')
    if self.workers < 1:
      raise UserError(f'rewards.workers is {self.workers}, wanted at least 1')
    if self.memory_limit_mib < 0:
      raise UserError(f'rewards.memory_limit_mib is {self.memory_limit_mib}, wanted 0 (no limit) or more')


def in_force(configs: Sequence[ScorerConfig], domain: str, taskset: str) -> tuple[ScorerConfig, ...]:
  """The scorers that judge tasks of `domain` in `taskset`. Raises UserError for none: such tasks teach nothing."""
  judges = lambda config: not config.tasksets or taskset in config.tasksets
  chosen = tuple(c for c in configs if judges(c) and (not c.domains or domain in c.domains))
  if not chosen:
    known = sorted({d for c in configs for d in c.domains})
    raise UserError(
      f'rewards.scorers: no scorer judges domain {domain!r} in taskset {taskset!r} (domains named: {known}): '
      'add the domain to a scorer, or leave one scorer’s domains and tasksets empty'
    )
  return chosen


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward:
  value: float | None
  """Weighted sum; None if any scorer in force could not say."""
  parts: dict[str, float]
  """Unweighted: `<scorer>` and `<scorer>/<part>`, for those that have a value."""
  correct: bool | None = None
  """What the scorer that is asked for it says; None where it could not say, or does not judge this domain."""
  turn_values: tuple[float, ...] = ()
  """Weighted sums per turn, on top of `value`; empty where no scorer gives any."""


def combine(scores: Sequence[Score], config: RewardsConfig) -> Reward:
  """value = Σ weightₛ · valueₛ over `scores`, None if one of them is None or there are none."""
  weights = {c.name: c.weight for c in config.scorers}
  parts: dict[str, float] = {}
  for score in scores:
    if score.value is not None:
      parts[score.scorer] = score.value
    parts.update({f'{score.scorer}/{name}': value for name, value in score.parts.items()})
  values = [(weights[s.scorer], s.value) for s in scores]
  if not values or any(value is None for _, value in values):
    return Reward(value=None, parts=parts)
  judge = config.correct_by or scores[0].scorer
  said = [s.value for s in scores if s.scorer == judge]
  turns = [[weights[s.scorer] * value for value in s.turn_values] for s in scores]
  return Reward(
    value=math.fsum(weight * value for weight, value in values),
    parts=parts,
    correct=said[0] >= 1.0 if said else None,
    turn_values=tuple(math.fsum(of) for of in itertools.zip_longest(*turns, fillvalue=0.0)),
  )


OptionsT = TypeVar('OptionsT')


def read_options(kind: type[OptionsT], options: Mapping[str, Any], scorer: str) -> OptionsT:
  """A scorer's options as its dataclass `kind`. Raises UserError for an unknown name or a wrong type."""
  types = typing.get_type_hints(kind)
  for name, value in options.items():
    if name not in types:
      close = difflib.get_close_matches(name, types, n=1)
      hint = f'did you mean {close[0]!r}?' if close else f'known: {sorted(types)}'
      raise UserError(f'scorer {scorer!r}: unknown option {name!r}; {hint}')
    choices = typing.get_args(types[name])
    if choices and value not in choices:
      raise UserError(f'scorer {scorer!r}: option {name} is {value!r}, wanted one of {list(choices)}')
    wanted = (int, float) if types[name] is float else types[name]
    if not choices and (not isinstance(value, wanted) or (isinstance(value, bool) and types[name] is not bool)):
      raise UserError(f'scorer {scorer!r}: option {name} is {value!r}, wanted {types[name].__name__}')
  return kind(**options)
