"""Task processors: filters that drop tasks from a taskset before any rollout.

The processors of a taskset run one after the other. A processor is called with each task in order,
and returns a reason to drop the task, or an empty string to keep it. It does not modify tasks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from absl import logging

from jaxrl_llm.config.annotations import nearest
from jaxrl_llm.config.values import from_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.tasks.taskset import TaskProcessorConfig, Taskset

Processor = Callable[[Task], str]
"""Function that is called with each task in order. It returns the reason to drop the task, or an
empty string to keep it.
"""


class Passed(NamedTuple):
  """Counts of the tasks that a processor was given and of the tasks that it dropped."""

  name: str
  given: int
  dropped: Mapping[str, int]
  """Number of dropped tasks, keyed by reason."""

  @property
  def kept(self) -> int:
    return self.given - sum(self.dropped.values())

  def __str__(self) -> str:
    reasons = ''.join(f', {reason} {count}' for reason, count in self.dropped.items())
    return f'{self.name}: {self.given} in, {self.kept} out{reasons}'


class ProcessorContext(NamedTuple):
  """Data on which a processor's decisions may depend, besides the tasks that it is given."""

  others: Sequence[Task]
  """Tasks of the tasksets processed before this one."""
  length_of: Callable[[Task], int]
  """Function that returns the length of a task's prompt in tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DedupConfig:
  """Options of a processor that drops tasks that occur earlier in this taskset or in a taskset that
  is processed before it. Evaluation tasksets are processed first, and then the others in their
  configured order.
  """

  near: bool = True
  """Whether to also drop tasks that differ from an earlier task only in case, spacing, sentence
  punctuation or the system message.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthConfig:
  """Options of a processor that drops tasks whose prompts are shorter or longer than the limits, in
  tokens.
  """

  min_tokens: int = 0
  max_tokens: int | None = None

  def __post_init__(self):
    if self.max_tokens is not None and not self.min_tokens <= self.max_tokens:
      raise UserError(
        f'processor length: min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerKindConfig:
  """Options of a processor that drops tasks whose answers are easily guessed (Kimi k1.5,
  arXiv:2501.12599, 2.1).
  """

  drop: tuple[Literal['choice', 'boolean'], ...] = ('choice', 'boolean')
  """Kinds of answers to drop. choice: the answer is one of the prompt's lettered options. boolean:
  the answer is true, false, yes or no.
  """


def dedup(config: DedupConfig, context: ProcessorContext) -> Processor:
  prompts, texts = set(), set()

  def why(task: Task) -> str:
    digest, text = task.digest, normalised(task)
    reason = (
      'same_prompt'
      if digest in prompts
      else 'near_duplicate'
      if config.near and text in texts
      else ''
    )
    prompts.add(digest)
    texts.add(text)
    return reason

  for task in context.others:
    why(task)
  return why


_MARK = re.compile(r'(?<!\d)[.,;:?]|[.,;:?](?!\d)|["`“”„«»…¿¡]')
"""Matches sentence punctuation, but neither marks between two digits (1.5, 12:30) nor characters
that occur in formulas (5!, y', 2-1, brackets).
"""


def in_order(names: Iterable[str], measured: Collection[str]) -> list[str]:
  """Returns the names of tasksets in the order in which they are processed. The tasksets of
  evaluations (`measured`) come first, so that `dedup` drops training tasks that also occur in an
  evaluation.
  """
  return sorted(names, key=lambda name: name not in measured)


def normalised(task: Task) -> str:
  """Returns a prompt's text and the digests of its media, without case, spacing, sentence
  punctuation and the system message. Near duplicates have equal results.
  """
  texts = (
    f'{m["role"]} {_MARK.sub(" ", m["content"].casefold())}'
    for m in task.prompt
    if m['role'] != 'system'
  )
  return '\n'.join(
    [*(' '.join(text.split()) for text in texts), *(shown.digest for shown in task.media)]
  )


def length(config: LengthConfig, context: ProcessorContext) -> Processor:
  def why(task: Task) -> str:
    tokens = context.length_of(task)
    if tokens < config.min_tokens:
      return 'too_short'
    return 'too_long' if config.max_tokens is not None and tokens > config.max_tokens else ''

  return why


_LETTER = re.compile(r'\(?([A-Ja-j])\)?\.?')
_BOOLEAN = ('true', 'false', 'yes', 'no')


def answer_kind(config: AnswerKindConfig, context: ProcessorContext) -> Processor:
  def why(task: Task) -> str:
    truth = (task.truth or '').strip()
    if 'boolean' in config.drop and truth.casefold().rstrip('.') in _BOOLEAN:
      return 'boolean'

    def listed(letter):
      return re.search(rf'(?<!\w)\(?{letter}[).:]', task.prompt[-1]['content'])

    return (
      'choice'
      if 'choice' in config.drop and _LETTER.fullmatch(truth) and listed('A') and listed('B')
      else ''
    )

  return why


PROCESSORS: Mapping[str, tuple[type, Callable[[Any, ProcessorContext], Processor]]] = {
  'dedup': (DedupConfig, dedup),
  'length': (LengthConfig, length),
  'answer_kind': (AnswerKindConfig, answer_kind),
}
"""Configuration class and factory of each processor, keyed by its name in
`TasksetConfig.processors`.
"""
COMPARING = ('dedup',)
"""Names of the processors whose decisions depend on previously processed tasksets."""


class Outcomes(NamedTuple):
  """Numbers of a task's scorable attempts and of its correct attempts."""

  correct: int
  attempts: int

  @property
  def rate(self) -> float:
    return self.correct / self.attempts


def pass_rate(outcomes: Mapping[str, Outcomes], *, low: float, high: float) -> Processor:
  """Returns a processor that keeps tasks whose pass rate is in [low, high] (Kimi k1.5, 2.1), and
  drops those without scorable attempts.

  Args:
    outcomes: counts of past attempts, keyed by task uid.
  """

  def why(task: Task) -> str:
    of = outcomes[task.uid]
    if not of.attempts:
      return 'unscorable'
    return 'too_hard' if of.rate < low else 'too_easy' if of.rate > high else ''

  return why


def guessable(outcomes: Mapping[str, Outcomes]) -> Processor:
  """Returns a processor that drops tasks that were answered correctly at least once without
  reasoning (Kimi k1.5, 2.1).

  Args:
    outcomes: counts of the answers without reasoning, keyed by task uid.
  """
  return lambda task: 'guessed' if outcomes[task.uid].correct else ''


def run(name: str, processor: Processor, tasks: Iterable[Task]) -> tuple[tuple[Task, ...], Passed]:
  """Applies a processor to tasks. Returns the kept tasks and the counts."""
  kept, dropped, given = [], {}, 0
  for task in tasks:
    given += 1
    if reason := processor(task):
      dropped[reason] = dropped.get(reason, 0) + 1
    else:
      kept.append(task)
  return tuple(kept), Passed(name, given, dropped)


def process(
  taskset: Taskset, configs: Sequence[TaskProcessorConfig], context: ProcessorContext
) -> Taskset:
  """Applies the configured processors to a taskset. Dropped tasks are counted under
  '<processor>/<reason>'.

  Raises:
    UserError: a processor or one of its options is unknown; no task is left.
  """
  tasks, counts = taskset.tasks, dict(taskset.counts)
  for config in configs:
    where = f'tasksets.{taskset.name}.processors'
    if config.name not in PROCESSORS:
      raise UserError(f'{where}: no processor {config.name!r}; {nearest(config.name, PROCESSORS)}')
    options, make = PROCESSORS[config.name]
    chosen = from_json(dict(config.options), options, f'{where}: options of {config.name}')
    tasks, passed = run(config.name, make(chosen, context), tasks)
    for reason, count in passed.dropped.items():
      key = f'{config.name}/{reason}'
      counts[key] = counts.get(key, 0) + count
    logging.info('taskset %s, %s', taskset.name, passed)
    if not tasks:
      raise UserError(f'taskset {taskset.name}: its processors leave no task: {passed}')
  return dataclasses.replace(taskset, tasks=tasks, counts={**counts, 'kept': len(tasks)})
