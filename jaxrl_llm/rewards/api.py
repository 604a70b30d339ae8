"""What a scorer is: a function of one attempt, or of a task's group of them; and how scores become one reward.

Invariant: a scorer sees the attempts of one task and nothing else, and a reward is None whenever a scorer in force
could not say: an unscorable sample is never 0 by accident. Nothing here imports jax, so scorer processes start fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from jaxrl_llm.config.values import from_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.score import Score, Status, worth
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Json


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
  """A scorer for which running out of time, memory or stack is the completion's doing, so worth 0 and not None.

  True of scorers that take milliseconds on any ordinary answer: only a hostile one (`9^{9^{9^{9}}}`) makes them do so.
  A policy that were let off with None could hide its wrong answers behind such a one.
  """

  scorer: Scorer

  def __call__(self, attempt: Attempt) -> Verdict:
    return self.scorer(attempt)


@dataclasses.dataclass(frozen=True)
class Awaited:
  """A scorer that waits for another process (a judge, an endpoint, a sandbox host): the pool's owner awaits it on its
  event loop, and holds no worker for it."""

  open: Callable[[], contextlib.AbstractAsyncContextManager[Callable[[Attempt], Awaitable[Verdict]]]]
  """Entered once when the pool starts (opens its aiohttp session) and left when it closes."""
  concurrency: int = 16
  """Calls under way at once at most."""


@runtime_checkable
class Addressed(Protocol):
  """What `Awaited.open` may give: a scorer whose servers can change while it is in use."""

  def __call__(self, attempt: Attempt) -> Awaitable[Verdict]: ...

  def set_addresses(self, addresses: Sequence[str]) -> None:
    """Calls from now on go to these; those under way end where they are. Raises UserError for an address it refuses."""


@dataclasses.dataclass(frozen=True)
class PerGroup:
  """A scorer of a whole group, after all its members have their own scores. Runs in a worker like any other."""

  scorer: Callable[[tuple[Attempt, ...], tuple[tuple[Score, ...], ...]], tuple[Verdict, ...]]
  """The group's attempts and the per-sample scores of each -> one Verdict per attempt, in their order."""


@dataclasses.dataclass(frozen=True)
class AwaitedGroup:
  """A scorer of a whole group, as `PerGroup`, that waits for another process, as `Awaited`."""

  open: Callable[
    [],
    contextlib.AbstractAsyncContextManager[
      Callable[[tuple[Attempt, ...], tuple[tuple[Score, ...], ...]], Awaitable[tuple[Verdict, ...]]]
    ],
  ]
  """Entered once when the pool starts and left when it closes; what it gives may be `Addressed` too."""
  concurrency: int = 16
  """Groups under way at once at most."""


AnyScorer = Scorer | Awaited | PerGroup | AwaitedGroup


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScorerConfig:
  """A scorer by name, with its options, domains and limits."""

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
  retries: int = 0
  """Further calls where one failed: it raised, ran past its deadline, or its process died."""
  on_failure: Literal['unscorable', 'drop_group', 'zero'] = 'unscorable'
  """What an attempt is worth whose last call failed: nothing that anyone could say, nothing for its whole group, or 0.
  Not of what the completion causes: that is a value."""

  @property
  def implementation(self) -> str:
    return self.name if self.kind is None else self.kind


_MAX_WEIGHT = 1e6
"""Rewards, which are sums of weighted scores, and their squares stay finite in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardsConfig:
  """Scorers, and the worker processes that they run in."""

  scorers: tuple[ScorerConfig, ...]
  workers: int = 1
  """Worker processes."""
  correct_by: str | None = None
  """Scorer whose value of at least 1 says that an attempt is correct; None: the first that judges its domain."""
  memory_limit_mib: int = 4096
  """Address space of one worker: a completion that makes a scorer allocate without end meets it. 0: no limit."""
  environment: tuple[str, ...] = ()
  """Environment variables that workers keep although their names suggest a secret, such as OPENAI_API_KEY."""

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
      if s.retries < 0:
        raise UserError(f'rewards.scorers {s.name!r}: retries is {s.retries}, wanted 0 or more')
      if not abs(s.weight) <= _MAX_WEIGHT:
        raise UserError(
          f'rewards.scorers {s.name!r}: weight is {s.weight}, wanted a number from -{_MAX_WEIGHT:g} to {_MAX_WEIGHT:g}'
        )
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


def drops_group(scores: Iterable[Score], config: RewardsConfig) -> bool:
  """Whether one of a group's scores is the failure of a scorer for which the whole group is given up."""
  strict = {c.name for c in config.scorers if c.on_failure == 'drop_group'}
  return any(s.scorer in strict and s.status != Status.OK and s.value is None for s in scores)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward:
  """The combined scores of a completion."""

  value: float | None
  """Weighted sum; None if any scorer in force could not say."""
  parts: dict[str, float]
  """Unweighted: `<scorer>` and `<scorer>/<part>`, for those that have a value."""
  correct: bool | None = None
  """What the scorer that is asked for it says; None where it could not say, or does not judge this domain."""
  turn_values: tuple[float, ...] = ()
  """Weighted sums per turn, on top of `value`; empty where no scorer gives any."""

  @property
  def worth(self) -> float | None:
    """The value with those of the turns: what advantages per sample compare."""
    return worth(self.value, self.turn_values)


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
  # A list is what JSON has for a tuple, as in a configuration that was written down.
  plain = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
  return from_json(plain, kind, f'scorer {scorer!r}')
