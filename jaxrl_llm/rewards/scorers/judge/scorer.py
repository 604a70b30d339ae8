"""Scorer `judge`: asks a language model, the judge, on an OpenAI-compatible server
(`/v1/chat/completions`).

Invariants: a score comes from a single JSON object of the required form. If the judge does not
answer with such an object, even after retries, the call fails. The exception is an object that
only lacks scores for some criteria (`JudgeOptions.missing`). The same question is paid for only
once: answers are cached by the digest of the whole request, and identical requests in flight share
one answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Self

from jaxrl_llm.config.values import from_json
from jaxrl_llm.core.errors import UserError, first_cause
from jaxrl_llm.core.net.client import Malformed
from jaxrl_llm.core.net.remote import CHAT_PATH, DiscoveringOptions, ServiceClient, read_object
from jaxrl_llm.core.records.score import Score
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Json
from jaxrl_llm.rewards.api import Attempt, Awaited, AwaitedGroup, Discovers, Verdict
from jaxrl_llm.rewards.scorers.judge.cache import Cache
from jaxrl_llm.rewards.scorers.judge.rubric import (
  Criterion,
  Incomplete,
  check_rubric,
  read_scores,
  rubric_form,
  rubric_of,
  rubric_value,
)
from jaxrl_llm.rewards.scorers.judge.texts import (
  COMPARE,
  COMPARE_BY_TRUTH,
  GRADE,
  GRADE_BY_TRUTH,
  check_template,
  fields_of,
  fill,
  read_score,
  read_winner,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgeOptions(DiscoveringOptions):
  """Options of the judge. Addresses have the form `http://host:port`, optionally with `/v1`, or
  `unix:/path/to.sock`.
  """

  model: str
  """Model name on the server."""
  mode: Literal['score', 'rubric', 'pairwise'] = 'score'
  """Way in which the judge assesses answers. score: the judge gives each answer a number; rubric:
  the judge gives each answer a number for each of several criteria; pairwise: the judge decides
  which of two answers of a group is better.
  """
  criteria: tuple[Criterion, ...] = ()
  """Criteria for mode `rubric`. An answer's value is the weighted mean of its scores, but not less
  than 0: max(0, Σ wᵢ sᵢ / Σ max(0, wᵢ)).
  """
  rubric_field: str | None = None
  """Field of a task's row with a rubric for that task, a list of {text, weight, name}. Tasks
  without the field use `criteria`.
  """
  missing: Literal['unscorable', 'zero', 'skip'] = 'unscorable'
  """Treatment of criteria that the judge does not score, even after retries. unscorable: the
  attempt has no value; zero: the score is 0, or 1 for a penalty; skip: the criterion is left out of
  the mean. If the judge scores no criterion at all, the attempt has no value.
  """
  against: Literal['all', 'next', 'first'] = 'all'
  """Attempts of a group that are compared in mode `pairwise`. all: each attempt with all others;
  next: each attempt with its two neighbours, where the last attempt is a neighbour of the first;
  first: the first attempt with all others.
  """
  template: str | None = None
  """Template of the prompt, with the field {completion} (in mode `pairwise`, {first} and {second})
  and, optionally, {question} and {truth}. Literal braces are doubled. If None, a built-in template
  is used, which shows the truth if the task has one.
  """
  max_tokens: int = 1024
  """Maximum number of tokens in an answer, including its reasoning."""
  request: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Fields that are added to each request or replace its fields, such as `response_format`."""
  malformed_retries: int = 2
  """Maximum number of times that the judge is asked again after a malformed answer. The new request
  states what was wrong.
  """
  cache_file: str | None = None
  """JSONL file that keeps the judge's answers beyond the run. If None, answers are kept in memory
  only.
  """

  def check(self, where: str) -> None:
    super().check(where)
    if self.max_tokens < 1 or self.malformed_retries < 0:
      raise UserError(
        f'{where}: max_tokens is {self.max_tokens} and malformed_retries {self.malformed_retries}, '
        'wanted at least 1 and at least 0'
      )
    if self.mode == 'rubric' and (self.criteria or self.rubric_field is None):
      try:
        check_rubric(self.criteria)
      except UserError as error:
        raise UserError(f'{where}: criteria: {error}') from None
    if self.mode != 'rubric' and (self.criteria or self.rubric_field is not None):
      raise UserError(f"{where}: criteria need mode 'rubric', but mode is {self.mode!r}")
    if self.template is not None:
      check_template(self.template, self.mode, where)
    if self.cache_file is not None and not pathlib.Path(self.cache_file).absolute().parent.is_dir():
      raise UserError(
        f'{where}: the directory of cache_file {self.cache_file} does not exist; create it'
      )


def _question(task: Task) -> str:
  if len(task.prompt) == 1:
    return task.prompt[0]['content']
  return '\n\n'.join(f'{message["role"]}: {message["content"]}' for message in task.prompt)


class Said(NamedTuple):
  """A judge's parsed answer to a prompt."""

  answer: dict[str, Json]
  """The answer as parsed by the function `read` that was passed to `Judge.ask`."""
  cached: bool


class Judge(ServiceClient):
  """Client that asks a model for verdicts."""

  def __init__(self, options: JudgeOptions):
    super().__init__(options, "scorer 'judge'", CHAT_PATH)
    self.options = options
    self._cache = Cache(options.cache_file)
    self._pending: dict[str, asyncio.Task[dict[str, Json]]] = {}

  async def __aenter__(self) -> Self:
    await asyncio.to_thread(self._cache.open)
    return await super().__aenter__()

  async def __aexit__(self, *raised: object) -> None:
    pending = list(self._pending.values())
    for task in pending:
      task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    await super().__aexit__()
    self._cache.close()

  async def ask(self, prompt: str, read: Callable[[str], dict[str, Json]]) -> Said:
    """Returns the judge's answer to a prompt. Raises RemoteError if `read` accepts none of the
    judge's answers.

    Args:
      read: parses the verdict in the text of an answer; raises Malformed if the verdict is
        malformed.
    """
    options = self.options
    body = {
      'model': options.model,
      'max_tokens': options.max_tokens,
      'temperature': 0,
      **options.request,
    }
    body['messages'] = [{'role': 'user', 'content': prompt}]
    key = hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()
    cached = self._cache.get(key)
    if cached is not None:
      return Said(cached, cached=True)
    task, new = self._pending.get(key), key not in self._pending
    if task is None:
      task = self._pending[key] = asyncio.create_task(self._answer(key, body, read))
      task.add_done_callback(functools.partial(self._answered, key))
    # If one caller is cancelled, the request continues for other callers and for the cache.
    return Said(await asyncio.shield(task), cached=not new)

  def _answered(self, key: str, task: asyncio.Task) -> None:
    del self._pending[key]
    if not task.cancelled():
      # Marks the exception as retrieved; otherwise, asyncio logs it if every caller was cancelled.
      task.exception()

  async def _answer(
    self, key: str, body: dict[str, Json], read: Callable[[str], dict[str, Json]]
  ) -> dict[str, Json]:
    messages = list(body['messages'])
    for tries in itertools.count(1):
      text, cut = _content(await self.post({**body, 'messages': messages}))
      try:
        if cut:
          raise Malformed(f'it was cut off after {self.options.max_tokens} tokens')
        answer = read(text)
      except Malformed as wrong:
        if tries > self.options.malformed_retries:
          if isinstance(wrong, Incomplete):
            self._cache.put(key, wrong.answer)
            return wrong.answer
          raise Malformed(
            f'no verdict in {tries} answers; last error: {wrong}: {text[-200:]!r}'
          ) from None
        hint = (
          f'That is no verdict: {wrong}. Answer the question again, with one JSON object of the '
          'form asked for.'
        )
        messages = [
          *body['messages'],
          {'role': 'assistant', 'content': text or '(nothing)'},
          {'role': 'user', 'content': hint},
        ]
      else:
        self._cache.put(key, answer)
        return answer
    raise AssertionError('unreachable')


def _content(answer: Json) -> tuple[str, bool]:
  """Returns the text of a chat completion, and whether it was cut off at the length limit."""
  try:
    choice = read_object(answer, 'the answer')['choices'][0]
    return choice['message'].get('content') or '', choice.get('finish_reason') == 'length'
  except (KeyError, IndexError, TypeError, AttributeError):
    raise Malformed(f'the answer is not a chat completion: {json.dumps(answer):.200}') from None


def task_texts(task: Task, template: str) -> dict[str, str] | None:
  """Returns the task's texts for the template: the question and, if the template shows it, the
  truth. Returns None if the template shows the truth but the task has none.
  """
  if 'truth' not in fields_of(template):
    return {'question': _question(task)}
  return None if task.truth is None else {'question': _question(task), 'truth': task.truth}


_NO_TRUTH = Verdict(value=None, evidence={'reason': 'the task has no reference answer'})


class ScoringJudge(Judge):
  """Judge that gives each attempt a number from 0 to 1."""

  async def __call__(self, attempt: Attempt) -> Verdict:
    template = self.options.template or (GRADE if attempt.task.truth is None else GRADE_BY_TRUTH)
    texts = task_texts(attempt.task, template)
    if texts is None:
      return _NO_TRUTH
    reply = await self.ask(
      fill(template, 'score', {**texts, 'completion': attempt.completion}), read_score
    )
    evidence = {
      'reasoning': reply.answer['reasoning'],
      'model': self.options.model,
      'cached': reply.cached,
    }
    return Verdict(value=reply.answer['score'], evidence=evidence)


class RubricJudge(Judge):
  """Judge that gives each attempt a number from 0 to 1 for each criterion of a rubric."""

  async def __call__(self, attempt: Attempt) -> Verdict:
    field, rubric = self.options.rubric_field, self.options.criteria
    if field is not None and attempt.task.fields.get(field) is not None:
      try:
        rubric = rubric_of(attempt.task.fields[field])
      except UserError as error:
        return Verdict(value=None, evidence={'reason': f'field {field}: {error}'})
    if not rubric:
      return Verdict(value=None, evidence={'reason': f'the task has no rubric in field {field}'})
    template = self.options.template or (GRADE if attempt.task.truth is None else GRADE_BY_TRUTH)
    texts = task_texts(attempt.task, template)
    if texts is None:
      return _NO_TRUTH
    prompt = fill(
      template, 'rubric', {**texts, 'completion': attempt.completion}, rubric_form(rubric)
    )
    reply = await self.ask(prompt, functools.partial(read_scores, rubric=rubric))
    scores = dict(reply.answer['scores'])
    missing = [criterion.name for criterion in rubric if criterion.name not in scores]
    evidence = {
      'reasoning': reply.answer['reasoning'],
      'model': self.options.model,
      'cached': reply.cached,
    }
    if missing:
      evidence['missing'] = missing
    if missing and (self.options.missing == 'unscorable' or len(missing) == len(rubric)):
      evidence['reason'] = 'the judge gave no number for some criteria'
      return Verdict(value=None, parts=scores, evidence=evidence)
    value = rubric_value(rubric, scores)
    if missing and self.options.missing == 'zero':
      worst = {criterion.name: float(criterion.weight < 0) for criterion in rubric}
      value = rubric_value(rubric, worst | scores)
    return Verdict(value=value, parts=scores, evidence=evidence)


def pairs(count: int, against: str) -> list[tuple[int, int]]:
  """Returns the pairs of attempts to compare, as indices below `count`. Each pair occurs once."""
  if against == 'first':
    return [(0, other) for other in range(1, count)]
  if against == 'next' and count > 2:
    return [(index, (index + 1) % count) for index in range(count)]
  return list(itertools.combinations(range(count), 2))


class ComparingJudge(Judge):
  """Judge that compares attempts of a group, each pair in both orders.

  An attempt's value is the mean result of its comparisons: 1 for a win, 0.5 for a tie, 0 for a
  loss.
  """

  async def __call__(
    self, attempts: tuple[Attempt, ...], scores: tuple[tuple[Score, ...], ...]
  ) -> tuple[Verdict, ...]:
    task, count = attempts[0].task, len(attempts)
    template = self.options.template or (COMPARE if task.truth is None else COMPARE_BY_TRUTH)
    texts = task_texts(task, template)
    if texts is None:
      return (_NO_TRUTH,) * count
    if count == 1:
      return (
        Verdict(value=None, evidence={'reason': 'a group of one has nothing to be compared with'}),
      )
    games = pairs(count, self.options.against)
    completions = [attempt.completion for attempt in attempts]

    def compare(first, second):
      return self._compare(template, texts, completions[first], completions[second])

    try:
      async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(compare(first, second)) for first, second in games]
    except BaseExceptionGroup as failed:
      raise first_cause(failed) from None
    results = [task.result() for task in tasks]
    return tuple(_standing(index, games, results, self.options.model) for index in range(count))

  async def _compare(
    self, template: str, texts: Mapping[str, str], first: str, second: str
  ) -> tuple[float, bool]:
    """Returns the result of `first` against `second`, and whether the judge's answers for the two
    orders agree.

    The result is 1 for a win of `first` and 0 for a loss. It is 0.5 for a tie, or if the answers
    disagree.
    """
    if first == second:
      return 0.5, True
    orders = [
      {**texts, 'first': first, 'second': second},
      {**texts, 'first': second, 'second': first},
    ]
    replies = await asyncio.gather(
      *(self.ask(fill(template, 'pairwise', order), read_winner) for order in orders)
    )
    values = {'A': 1.0, 'B': 0.0, 'tie': 0.5}
    straight, turned = (
      values[replies[0].answer['winner']],
      1.0 - values[replies[1].answer['winner']],
    )
    return (straight, True) if straight == turned else (0.5, False)


def _standing(
  index: int, games: list[tuple[int, int]], results: list[tuple[float, bool]], model: str
) -> Verdict:
  """Returns the verdict on an attempt, whose value is the mean result of its comparisons.

  Args:
    index: index of the attempt in its group.
    games: pairs of attempts that were compared, as indices.
    results: result of `_compare` for each pair.
    model: name of the judge's model, for the evidence.
  """
  values, disagree = [], 0
  for (first, second), (value, agreed) in zip(games, results, strict=True):
    if index in (first, second):
      values.append(value if index == first else 1.0 - value)
      disagree += not agreed
  evidence = {
    'compared': len(values),
    'won': values.count(1.0),
    'lost': values.count(0.0),
    'orders_disagree': disagree,
    'model': model,
  }
  return Verdict(value=sum(values) / len(values), evidence=evidence)


def judge_scorer(**options: Any) -> Awaited | AwaitedGroup:
  """Returns a scorer that asks an LLM judge on an OpenAI-compatible server to score answers or to
  compare them in pairs. The options are `JudgeOptions`.
  """
  read = from_json(dict(options), JudgeOptions, "options of scorer 'judge'")
  read.check("scorer 'judge'")
  how = {
    'concurrency': read.concurrency,
    'discovers': Discovers.of('judge', read.discover),
  }
  if read.mode == 'pairwise':
    return AwaitedGroup(functools.partial(ComparingJudge, read), **how)
  judge = RubricJudge if read.mode == 'rubric' else ScoringJudge
  return Awaited(functools.partial(judge, read), **how)
