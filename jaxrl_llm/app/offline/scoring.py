"""Scores the rows of a file with one scorer, using the scorer pool that training runs use, too.

Invariant: the score file gets one score per row, in row order, or is not written at all.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
from collections.abc import (
  AsyncIterator,
  Callable,
  Coroutine,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any, TypeVar

from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.records.score import Score, Status
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Json
from jaxrl_llm.rewards.api import (
  AnyScorer,
  Attempt,
  AwaitedGroup,
  PerGroup,
  RewardsConfig,
  ScorerConfig,
)
from jaxrl_llm.rewards.pool.pool import ScorerPool
from jaxrl_llm.rewards.scorers.answer.diagnosis import diagnose
from jaxrl_llm.tasks import sources
from jaxrl_llm.tasks.taskset import own_messages, own_truth

_SUMMED = ('reason', 'truth', 'answer')
"""Keys of a score's evidence (what the scorer reports besides the value) from which `Summary`
derives reasons for the scores.
"""
_AHEAD = 256
"""Maximum number of rows (or groups) in flight; a scorer's own limit is usually lower."""


def read_attempts(path: pathlib.Path) -> list[Attempt]:
  """Reads the rows of a file as attempts. Raises UserError if the file cannot be read, has no rows,
  or has an invalid row.
  """
  attempts = []
  try:
    for row in sources.read_rows(str(path), options={}, size=None, seed=0):
      if isinstance(row, sources.Corrupt):
        raise UserError(f'{row.where}: {row.reason}')
      try:
        attempts.append(_attempt(row.fields, path.stem, row.where.replace(str(path), path.name)))
      except ValueError as error:
        raise UserError(f'{row.where}: {error}') from None
  except OSError as error:
    raise UserError(f'--rows={path}: cannot be read ({error.strerror})') from None
  if not attempts:
    raise UserError(f'--rows={path}: has no rows')
  return attempts


def _attempt(fields: Mapping[str, Json], taskset: str, uid: str) -> Attempt:
  """Converts a row to an attempt. Raises ValueError for an invalid row."""
  for name, kinds, wanted in (
    ('completion', (str,), 'text'),
    ('reward_model', (dict, type(None)), 'an object with ground_truth'),
    ('tests', (str, list, type(None)), 'a string or a list'),
    ('entry_point', (str, type(None)), 'text'),
    ('ability', (str, type(None)), 'text'),
    ('uid', (str, type(None)), 'text'),
    ('response_len', (int, type(None)), 'a number of tokens'),
  ):
    value = fields.get(name)
    if not isinstance(value, kinds):
      got = (
        f'{name} is {json.dumps(value)[:80]}'
        if name in fields
        else f'{name} is missing among {sorted(fields)}'
      )
      raise ValueError(f'{got}, wanted {wanted}')
  reward_model, is_code = fields.get('reward_model'), fields.get('tests') is not None
  if reward_model is not None and 'ground_truth' not in reward_model:
    raise ValueError(f'reward_model has {sorted(reward_model)}, wanted ground_truth')
  prompt = (
    [{'role': 'user', 'content': ''}]
    if is_code and fields.get('prompt') is None
    else own_messages(fields)
  )
  completion = fields['completion']
  response_len = fields.get('response_len')
  task = Task(
    taskset=taskset,
    domain=fields.get('ability') or ('code' if is_code else 'general'),
    prompt=tuple(prompt),
    truth=own_truth(fields),
    fields=fields,
  )
  task.digest.encode()  # Raises an error for a prompt with a lone surrogate.
  return Attempt(
    uid=fields.get('uid') or uid,
    task=task,
    completion=completion,
    finish_reason='stop',
    response_len=len(completion.split()) if response_len is None else response_len,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
  """Statistics of the scores in a score file."""

  statuses: Mapping[str, int]
  mean: float | None
  """Mean of the scores that have a value; None if no score has one."""
  unscorable: int
  """Number of scores without a value."""
  passed: int
  """Number of scores above 0."""
  evidence: Sequence[Mapping[str, Any]]
  """For each row in order, the entries of its score's evidence whose keys are in `_SUMMED`."""

  def line(self, scorer: str) -> str:
    count = sum(self.statuses.values())
    statuses = ', '.join(f'{name} {number}' for name, number in self.statuses.items())
    mean = (
      'no value'
      if self.mean is None
      else f'mean value {self.mean:.6g} of {count - self.unscorable}'
    )
    reasons = collections.Counter(
      one_line(each['reason'], 100) for each in self.evidence if 'reason' in each
    )
    why = ''.join(f'; {reason}: {number}' for reason, number in reasons.most_common(_REASONS))
    return f'scorer {scorer}: {count} rows: {statuses}; {mean}, {self.unscorable} unscorable{why}'

  def warning(self, scorer: ScorerConfig, attempts: Sequence[Attempt]) -> str:
    """Returns a warning that explains why no row passes and what to do about it; empty if some row
    passes, or if the scorer's best value is 0.
    """
    if self.passed or scorer.implementation in _PENALTIES:
      return ''
    if scorer.implementation == 'answer' and set(self.statuses) == {Status.OK.value}:
      why = diagnose(attempts, self.evidence, scorer.options)
    else:
      why = 'see the status and evidence of each score in the file of scores'
    return f'warning: no row passes: {why}'


_REASONS = 3
"""Number of most frequent reasons that a summary names."""
_PENALTIES = ('overlong', 'repetition')
"""Names of the scorers whose best value is 0."""


async def score_file(
  scorer: AnyScorer,
  rewards: RewardsConfig,
  attempts: Sequence[Attempt],
  out: pathlib.Path,
  done: Callable[[int], None],
) -> Summary:
  """Scores the attempts and writes the scores.

  Args:
    rewards: configuration that contains only this scorer.
    out: file that is replaced when all scores exist, and left unchanged otherwise.
    done: called after each row with the number of rows scored so far.
  """
  (config,) = rewards.scorers
  statuses: collections.Counter[str] = collections.Counter()
  values: list[float] = []
  evidence: list[Mapping[str, Any]] = []
  unfinished = out.with_name(f'{out.name}.{os.getpid()}.tmp')
  pool, stack = ScorerPool({config.name: scorer}, rewards), contextlib.ExitStack()
  try:
    await pool.start()
    with _writing(out):
      # A lone surrogate is valid in JSON but not in UTF-8, so it is written as an escape.
      file = stack.enter_context(unfinished.open('w', encoding='utf-8', errors='backslashreplace'))
    async with contextlib.aclosing(_scores(pool, scorer, attempts)) as scores:
      async for score in scores:
        with _writing(out):
          file.write(json.dumps(_row(score), ensure_ascii=False) + '\n')
        statuses[score.status.value] += 1
        values += [] if score.value is None else [score.value]
        evidence.append({name: score.evidence[name] for name in _SUMMED if name in score.evidence})
        done(sum(statuses.values()))
    with _writing(out):
      file.flush()
      os.fsync(file.fileno())
      unfinished.replace(out)
  finally:
    with contextlib.suppress(OSError):  # The error of the failed write has already been reported.
      stack.close()
    unfinished.unlink(missing_ok=True)
    await pool.close()
  mean = sum(values) / len(values) if values else None
  return Summary(
    statuses=statuses,
    mean=mean,
    unscorable=len(attempts) - len(values),
    passed=sum(value > 0 for value in values),
    evidence=evidence,
  )


@contextlib.contextmanager
def _writing(out: pathlib.Path) -> Iterator[None]:
  try:
    yield
  except OSError as error:
    raise UserError(f'--out={out}: cannot be written ({error.strerror})') from error


def _row(score: Score) -> dict[str, Any]:
  """Converts a score to JSON; non-finite numbers in evidence become null."""
  return json.loads(json.dumps(dataclasses.asdict(score)), parse_constant=lambda _: None)


async def _scores(
  pool: ScorerPool, scorer: AnyScorer, attempts: Sequence[Attempt]
) -> AsyncIterator[Score]:
  """Yields one score per attempt, in order. Group scorers get all attempts at a prompt together."""
  if not isinstance(scorer, PerGroup | AwaitedGroup):
    async for _, (score,) in _in_order(
      (place, pool.score(attempt)) for place, attempt in enumerate(attempts)
    ):
      yield score
    return
  groups: dict[str, list[int]] = {}
  for place, attempt in enumerate(attempts):
    groups.setdefault(attempt.task.uid, []).append(place)
  by_place: dict[int, Score] = {}

  def judged(places):
    return pool.score_group([attempts[place] for place in places], [()] * len(places))

  async for places, scores in _in_order((places, judged(places)) for places in groups.values()):
    by_place.update((place, score) for place, (score,) in zip(places, scores, strict=True))
  for place in range(len(attempts)):
    yield by_place[place]


KeyT = TypeVar('KeyT')
ResultT = TypeVar('ResultT')


async def _in_order(
  calls: Iterable[tuple[KeyT, Coroutine[Any, Any, ResultT]]],
) -> AsyncIterator[tuple[KeyT, ResultT]]:
  """Yields the results of the calls in order, with at most `_AHEAD` calls in flight."""
  calls, ahead = iter(calls), collections.deque()
  try:
    while True:
      for key, call in itertools.islice(calls, _AHEAD - len(ahead)):
        ahead.append((key, asyncio.create_task(call)))
      if not ahead:
        return
      yield ahead[0][0], await ahead[0][1]
      ahead.popleft()
  finally:
    for _, task in ahead:
      task.cancel()
    await asyncio.gather(*(task for _, task in ahead), return_exceptions=True)
