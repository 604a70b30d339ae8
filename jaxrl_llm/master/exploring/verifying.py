"""Processors that ask a model about the members of a group before they act.

Invariant: each answer is written to a journal before it is used, so a resumed run that generates
the same completions does not ask about any of them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from absl import logging

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.client import RemoteError
from jaxrl_llm.core.types import Json
from jaxrl_llm.master.exploring.judging import attempt_of
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.rewards.scorers.judge.scorer import JudgeOptions, RubricJudge, ScoringJudge


class Verified(NamedTuple):
  """Result of a processor that asks a model about the members of a group."""

  members: Sequence[Experience]
  """Remaining members, in their original order."""
  notes: Mapping[str, dict[str, Json]]
  """Records for the lineage of samples, keyed by uid."""


Asking = Callable[[Sequence[Experience], int], Awaitable[Verified]]
"""Asynchronous function of (members of a group, number of batches that the run has completed). It
asks the model, and returns the remaining members with notes.
"""


@dataclasses.dataclass(frozen=True)
class ModelProcessor:
  """Processor that asks a model about the members of a group. It can be called only inside the
  context that `open` returns.
  """

  open: Callable[[pathlib.Path], contextlib.AbstractAsyncContextManager[Asking]]
  """Returns a context manager for the processor with its journal at the given path. The explorer
  holds the context open while it runs.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgeProcessorOptions(JudgeOptions):
  """Options of a judge that verifies samples. Its answers are kept in the run's store, unless
  `cache_file` names another file.
  """

  ask: Literal['all', 'correct'] = 'all'
  """Members about which the judge is asked. all: every member; correct: those whose answer is
  correct. Other members are left unchanged.
  """
  action: Literal['drop', 'mask', 'shape'] = 'drop'
  """Treatment of samples by score. drop: samples with a score below `min_score` are removed; mask:
  samples with a score below `min_score` count in the group's baseline but are not trained on;
  shape: reward ← reward + weight · score.
  """
  min_score: float = 0.5
  weight: float = 1.0
  on_failure: Literal['drop', 'keep'] = 'drop'
  """Treatment of a sample that the judge does not score. drop: it is removed; keep: it is kept
  unchanged.
  """
  deadline_s: float = 300.0
  """Time limit in seconds for a verdict, including all retries."""

  def check(self, where: str) -> None:
    super().check(where)
    if self.mode == 'pairwise':
      raise UserError(f"{where}: mode 'pairwise' compares samples; wanted score or rubric")
    if self.discover is not None:
      raise UserError(f'{where}: discover is not available to processors; give addresses')
    for name in ('min_score', 'weight', 'deadline_s'):
      if not math.isfinite(getattr(self, name)):
        raise UserError(f'{where}: {name} is {getattr(self, name)}, wanted a finite number')
    if self.deadline_s <= 0:
      raise UserError(f'{where}: deadline_s is {self.deadline_s}, wanted more than 0')


def judge(options: JudgeProcessorOptions) -> ModelProcessor:
  """Returns a processor that asks an LLM judge about each sample. Depending on the judge's score,
  it drops the sample, masks it or changes its reward.
  """
  options.check('processor judge')

  @contextlib.asynccontextmanager
  async def opened(journal: pathlib.Path) -> AsyncIterator[Asking]:
    kept = options
    if options.cache_file is None:
      await asyncio.to_thread(journal.parent.mkdir, parents=True, exist_ok=True)
      kept = dataclasses.replace(options, cache_file=str(journal))
    async with (RubricJudge if kept.mode == 'rubric' else ScoringJudge)(kept) as asked:
      yield _Verifier(asked, kept)

  return ModelProcessor(opened)


class _Verifier:
  def __init__(self, asked: RubricJudge | ScoringJudge, options: JudgeProcessorOptions):
    self._judge, self._options = asked, options
    self._free = asyncio.Semaphore(options.concurrency)

  async def __call__(self, members: Sequence[Experience], step: int) -> Verified:
    asked = [m for m in members if self._options.ask == 'all' or m.reward.correct]
    # Wait 'judge': bounded by `deadline_s`.
    scores = await asyncio.gather(*map(self._score, asked))
    notes = {
      member.sample.uid: {'score': score, **({} if reason is None else {'reason': reason})}
      for member, (score, reason) in zip(asked, scores, strict=True)
    }
    remaining = []
    for member in members:
      note = notes.get(member.sample.uid)
      now = member if note is None else self._verified(member, note['score'])
      if now is not None:
        remaining.append(now)
    return Verified(remaining, notes)

  async def _score(self, member: Experience) -> tuple[float | None, str | None]:
    """Returns (score, None), or (None, reason) if the judge gives no score."""
    try:
      async with self._free, asyncio.timeout(self._options.deadline_s):
        verdict = await self._judge(attempt_of(member))
    except (RemoteError, TimeoutError) as error:
      reason = str(error) or f'no verdict within {self._options.deadline_s:g} s'
      logging.log_first_n(logging.WARNING, 'processor judge: %s: %s', 5, member.sample.uid, reason)
      return None, reason[:500]
    return verdict.value, None if verdict.value is not None else str(verdict.evidence)[:500]

  def _verified(self, member: Experience, score: float | None) -> Experience | None:
    """Returns the member after the processor's action, or None if it is removed."""
    options = self._options
    if score is None:
      return member if options.on_failure == 'keep' else None
    if options.action == 'shape':
      value = member.reward.value + options.weight * score
      return dataclasses.replace(member, reward=dataclasses.replace(member.reward, value=value))
    if score >= options.min_score:
      return member
    return dataclasses.replace(member, masked=True) if options.action == 'mask' else None
