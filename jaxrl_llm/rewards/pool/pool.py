"""The scorer pool: scores attempts as soon as they finish, concurrently with the rest of the run.

Invariants: every call results in exactly one Score per attempt. If a scorer hangs, raises an
exception or crashes its process, only its own scores are affected, and the scorer's option
`on_failure` decides their values. Every failure is counted.
"""

from __future__ import annotations

import asyncio
import collections
import copy
import pathlib
from collections.abc import Mapping, Sequence

from absl import logging

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.registry import Registry
from jaxrl_llm.core.process_clock import ProcessClock
from jaxrl_llm.core.records.score import Score, Status
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.rewards.api import (
  AnyScorer,
  Attempt,
  Awaited,
  AwaitedGroup,
  ByTrainer,
  Delayed,
  OverrunIsZero,
  PerGroup,
  RewardsConfig,
  ScorerConfig,
  Verdict,
  drops_group,
  in_force,
)
from jaxrl_llm.rewards.pool.awaited import AwaitedScorer
from jaxrl_llm.rewards.pool.discovered import Discovered
from jaxrl_llm.rewards.pool.live import Live, LiveFile, Partly
from jaxrl_llm.rewards.pool.outcome import CallOutcome, checked
from jaxrl_llm.rewards.pool.processes import Workers


class ScorerPool:
  """Runs all scorers of a run.

  Scorers that compute run in worker processes. Scorers that wait for another process (`Awaited`,
  `AwaitedGroup`) run on the event loop.

  Attributes:
    counts: counters, keyed by name. Calls are counted by status, in total (`ok`, `timeout`,
      `error`, `crashed`) and for each scorer (`<scorer>/<status>`). `<scorer>/retried` counts the
      calls that were repeated after a failure. `<scorer>/unscorable`, `<scorer>/zeroed` and
      `<scorer>/dropped_groups` count the attempts and groups to which the scorer's `on_failure` was
      applied: attempts without a value, attempts with the value 0, and dropped groups. `unscorable`
      counts all values of None, and `breaks` counts how often all workers were restarted.
    delayed: scorers whose verdicts arrive later, keyed by name. The pool does not call them.
    by_trainer: names of the scorers that run in the trainer. The pool does not call them.
  """

  def __init__(
    self,
    scorers: Mapping[str, AnyScorer],
    config: RewardsConfig,
    *,
    live: pathlib.Path | None = None,
    registry: Registry | None = None,
  ):
    """
    Args:
      scorers: scorers, keyed by their names in `config`.
      live: path of the file that reconfigures the pool during the run (`pool.live`). If None, no
        file is watched.
      registry: registry of the run, for scorers that discover their services; None if the run has
        no registry.
    """
    missing = [s.name for s in config.scorers if s.name not in scorers]
    if missing:
      raise UserError(
        f'rewards.scorers: no scorer was built for {missing}; built: {sorted(scorers)}'
      )
    self.config = config
    self.counts: collections.Counter[str] = collections.Counter()
    self._taken: collections.Counter[str] = collections.Counter()
    self._chosen: dict[tuple[str, str, bool], list[ScorerConfig]] = {}
    """Results of `_in_force`, keyed by domain, taskset and `per_group`."""
    self._scorers = {s.name: scorers[s.name] for s in config.scorers}
    self.delayed = {name: s for name, s in self._scorers.items() if isinstance(s, Delayed)}
    self.by_trainer = {name for name, s in self._scorers.items() if isinstance(s, ByTrainer)}
    waits = {name: s for name, s in self._scorers.items() if isinstance(s, Awaited | AwaitedGroup)}
    elsewhere = {*waits, *self.delayed, *self.by_trainer}
    self._awaited = {name: AwaitedScorer(name, s) for name, s in waits.items()}
    self._workers = Workers(
      {name: s for name, s in self._scorers.items() if name not in elsewhere},
      count=config.workers,
      counts=self.counts,
      memory_limit_bytes=config.memory_limit_mib << 20,
      environment=config.environment,
      longest_s=max((s.deadline_s for s in config.scorers), default=0.0),
    )
    self._live = None if live is None else LiveFile(live, self._apply)
    discovering = {name: s.discovers for name, s in waits.items() if s.discovers is not None}
    if discovering and registry is None:
      raise UserError(
        f'scorer {min(discovering)!r}: discover is set, but there is no registry; set '
        '--config.registry={}, or give addresses'
      )
    self._discovered = Discovered(registry, discovering, self._apply) if discovering else None

  def with_config(self, config: RewardsConfig) -> ScorerPool:
    """Returns a view of the pool with other weights, or with some of its scorers only.

    The view shares processes, services and counts with this pool. Only this pool is started and
    closed.
    """
    view = copy.copy(self)
    view.config, view._chosen = config, {}
    return view

  async def start(self) -> None:
    """Opens the awaited scorers and starts the workers. Returns when all of them respond."""
    for awaited in self._awaited.values():
      await awaited.start()
    if self._live is not None:
      await self._live.check()
    if self._discovered is not None:
      await self._discovered.start()
    await self._workers.start()
    if self._live is not None:
      self._live.start()

  async def close(self) -> None:
    """Kills the workers and closes the awaited scorers. Calls in flight raise RunError."""
    if self._live is not None:
      await self._live.close()
    if self._discovered is not None:
      await self._discovered.close()
    await asyncio.gather(
      self._workers.close(), *(awaited.close() for awaited in self._awaited.values())
    )

  @property
  def workers(self) -> int:
    """Number of worker processes."""
    return self._workers.count

  @property
  def clock(self) -> ProcessClock:
    """Clock that measures the activities of the workers."""
    return self._workers.clock

  async def resize(self, workers: int) -> None:
    """Changes the number of workers for later calls. Calls in flight finish in the old workers."""
    if workers < 1:
      raise UserError(f'scorer pool: {workers} workers, wanted at least 1')
    await self._workers.resize(workers)

  async def _apply(self, live: Live) -> None:
    """Applies new addresses and a new number of workers.

    Raises UserError if nothing was changed, and Partly if only a part of the changes was made.
    """
    addressed = sorted(name for name, awaited in self._awaited.items() if awaited.addressed)
    for name in live.addresses:
      if name not in addressed:
        raise UserError(
          f'addresses of {name!r}: wanted one of the scorers with addresses, {addressed}'
        )
    moved: list[str] = []
    try:
      for name, addresses in live.addresses.items():
        self._awaited[name].set_addresses(addresses)
        logging.info('Scorer %s: now at %s', name, ', '.join(addresses))
        moved.append(name)
      if live.workers is not None and live.workers != self.workers:
        logging.info('Scorer processes: %d, now %d', self.workers, live.workers)
        await self.resize(live.workers)
    except UserError as error:
      if not moved:
        raise
      raise Partly(f'{error}; only the addresses of {moved} were changed') from error

  async def score(self, attempt: Attempt) -> tuple[Score, ...]:
    """Scores an attempt. Returns one Score for each per-sample scorer that applies to the task, in
    configuration order. Delayed scorers and scorers that run in the trainer are left out.
    """
    chosen = self._in_force(attempt, per_group=False)
    if len(chosen) == 1:  # The usual case needs no further asyncio task.
      return await self._scores(chosen[0], (attempt,))
    return tuple(
      [
        score
        for (score,) in await asyncio.gather(
          *(self._scores(config, (attempt,)) for config in chosen)
        )
      ]
    )

  async def score_group(
    self, attempts: Sequence[Attempt], scores: Sequence[tuple[Score, ...]]
  ) -> list[tuple[Score, ...]]:
    """Runs the group scorers on a group.

    Returns all scores of each attempt, including those in `scores`, in configuration order. Group
    scorers see all attempts, including attempts to which other scorers gave no value. Group
    scorers are skipped if the failure of a per-sample scorer drops the group.

    Args:
      attempts: the attempts of the group, all at the same task.
      scores: the scores that `score` returned for each attempt.
    """
    attempts, scores = tuple(attempts), tuple(scores)
    if len({attempt.task.uid for attempt in attempts}) != 1:
      raise ValueError(
        f'attempts at {sorted({a.task.uid for a in attempts})}, wanted attempts at one task'
      )

    def all_of():
      return [score for of in scores for score in of]

    if not drops_group(all_of(), self.config) and (
      chosen := self._in_force(attempts[0], per_group=True)
    ):
      by_scorer = await asyncio.gather(
        *(self._scores(config, attempts, scores) for config in chosen)
      )
      order = {scorer.name: place for place, scorer in enumerate(self.config.scorers)}
      merged = zip(scores, *by_scorer, strict=True)
      scores = tuple(
        tuple(sorted((*single, *more), key=lambda s: order[s.scorer])) for single, *more in merged
      )
    for name in {s.scorer for s in all_of() if drops_group([s], self.config)}:
      self.counts[f'{name}/dropped_groups'] += 1
    return list(scores)

  def is_scored_by_trainer(self, task: Task) -> bool:
    """Returns whether a scorer that runs in the trainer applies to the task."""
    chosen = in_force(self.config.scorers, task.domain, task.taskset)
    return any(config.name in self.by_trainer for config in chosen)

  def trainer_scores(self, attempt: Attempt, verdict: Verdict) -> tuple[Score, ...]:
    """Converts the verdict of the trainer's reward model on an attempt to Scores. Returns one Score
    for each scorer that runs in the trainer and applies to the task. A verdict without a value, or
    with a value that is not finite or too large, counts as a failure of the scorer.
    """
    if verdict.value is None:
      outcome = CallOutcome(status=Status.ERROR, evidence=verdict.evidence)
    else:
      try:
        outcome = CallOutcome(verdicts=checked((verdict,), 1))
      except ValueError as error:
        outcome = CallOutcome(status=Status.ERROR, evidence={'error': str(error)})
    scores: list[Score] = []
    for config in in_force(self.config.scorers, attempt.task.domain, attempt.task.taskset):
      if config.name not in self.by_trainer:
        continue
      self._count(config, outcome)
      if outcome.status == Status.OK:
        scores += self._scored(config, (attempt,), outcome)
      else:
        self._log_failure(config, (attempt,), outcome, 1, last=True)
        scores += self._failed(config, (attempt,), outcome, 1, blamed=False)
    return tuple(scores)

  def take_metrics(self) -> dict[str, float]:
    """Returns metrics: the numbers of failures since the last call of this method.

    Kinds of failure that have not occurred in the run are left out.
    """
    taken, self._taken = self._taken, self.counts.copy()
    reported = [
      key
      for key in self.counts
      if key == 'breaks' or ('/' in key and not key.endswith(f'/{Status.OK}'))
    ]
    return {f'run/scorers/{key}': float(self.counts[key] - taken[key]) for key in sorted(reported)}

  def _in_force(self, attempt: Attempt, *, per_group: bool) -> list[ScorerConfig]:
    key = (attempt.task.domain, attempt.task.taskset, per_group)
    if key not in self._chosen:
      self._chosen[key] = [
        config
        for config in in_force(self.config.scorers, attempt.task.domain, attempt.task.taskset)
        if config.name not in self.delayed
        and config.name not in self.by_trainer
        and isinstance(self._scorers[config.name], PerGroup | AwaitedGroup) == per_group
      ]
    return self._chosen[key]

  async def _scores(
    self,
    config: ScorerConfig,
    attempts: tuple[Attempt, ...],
    scores: tuple[tuple[Score, ...], ...] = (),
  ) -> tuple[Score, ...]:
    """Calls a scorer and returns one Score per attempt.

    A failed call is repeated up to `retries` times, unless the completion has caused the failure.
    """
    calls = 1
    while (outcome := await self._call(config, attempts, scores)).status != Status.OK:
      blamed = outcome.overran and isinstance(self._scorers[config.name], OverrunIsZero)
      last = blamed or calls > config.retries
      self._log_failure(config, attempts, outcome, calls, last=last)
      if last:
        return self._failed(config, attempts, outcome, calls, blamed=blamed)
      self.counts[f'{config.name}/retried'] += 1
      calls += 1
    return self._scored(config, attempts, outcome)

  def _scored(
    self, config: ScorerConfig, attempts: tuple[Attempt, ...], outcome: CallOutcome
  ) -> tuple[Score, ...]:
    """Returns the scores of attempts whose call succeeded."""
    self.counts['unscorable'] += sum(verdict.value is None for verdict in outcome.verdicts)
    return tuple(
      Score(uid=attempt.uid, scorer=config.name, time=outcome.seconds, **vars(verdict))
      for attempt, verdict in zip(attempts, outcome.verdicts, strict=True)
    )

  async def _call(
    self, config: ScorerConfig, attempts: tuple[Attempt, ...], scores: tuple[tuple[Score, ...], ...]
  ) -> CallOutcome:
    if config.name in self._awaited:
      outcome = await self._awaited[config.name].call(attempts, scores, config.deadline_s)
    else:
      outcome = await self._workers.call(config, attempts, scores)
    self._count(config, outcome)
    return outcome

  def _count(self, config: ScorerConfig, outcome: CallOutcome) -> None:
    self.counts[outcome.status.value] += 1
    self.counts[f'{config.name}/{outcome.status.value}'] += 1

  def _failed(
    self,
    config: ScorerConfig,
    attempts: tuple[Attempt, ...],
    outcome: CallOutcome,
    calls: int,
    *,
    blamed: bool,
  ) -> tuple[Score, ...]:
    """Returns the scores of attempts whose last call failed. The value is 0 if the completion is
    `blamed` for the failure. Otherwise the scorer's `on_failure` decides.
    """
    value = 0.0 if blamed or config.on_failure == 'zero' else None
    evidence = {
      **outcome.evidence,
      'caused_by': 'completion' if blamed else 'scorer',
      'calls': calls,
    }
    if value is None:
      self.counts['unscorable'] += len(attempts)
    if not blamed and config.on_failure != 'drop_group':
      self.counts[f'{config.name}/{"zeroed" if config.on_failure == "zero" else "unscorable"}'] += (
        len(attempts)
      )
    return tuple(
      Score(
        uid=attempt.uid,
        scorer=config.name,
        value=value,
        status=outcome.status,
        evidence=evidence,
        time=outcome.seconds,
      )
      for attempt in attempts
    )

  def _log_failure(
    self,
    config: ScorerConfig,
    attempts: tuple[Attempt, ...],
    outcome: CallOutcome,
    calls: int,
    *,
    last: bool,
  ) -> None:
    """Logs a failure, but only the 1st, 2nd, 4th, 8th, … of each scorer and status, so that a
    persistent failure does not flood the log.
    """
    so_far = self.counts[f'{config.name}/{outcome.status.value}']
    if so_far & (so_far - 1) == 0:
      then = (
        config.on_failure if last else f'trying again ({calls} of {config.retries + 1} calls made)'
      )
      where = attempts[0].uid if len(attempts) == 1 else f'the group of {attempts[0].uid}'
      logging.warning(
        'Scorer %s on %s: %s (%d so far; %s): %s',
        *(config.name, where, outcome.status.value, so_far, then, dict(outcome.evidence)),
      )
