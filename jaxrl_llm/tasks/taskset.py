"""Tasksets: tasks with distinct prompts, converted from the rows of a source and split by a digest
of the prompt.

Every row is counted in `read` and in exactly one of `kept`, `corrupt`, `unmatched`, `duplicate`,
`other_split` and `too_long`, or under the reason of the processor that dropped it
(`tasks.processors`). A task's split depends only on its prompt and on `holdout`, so with the same
holdout, training and evaluation tasks are disjoint for all seeds.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import xxhash
from absl import logging

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.task import Message, Task, is_held_out
from jaxrl_llm.core.types import Json
from jaxrl_llm.tasks import sources, templates
from jaxrl_llm.tasks.code_rows import Form, convert
from jaxrl_llm.tasks.media import read_media
from jaxrl_llm.tasks.messages import roles, text_messages

_NAME = re.compile(r'[A-Za-z0-9_.-]+')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskProcessorConfig:
  """Selects a processor for the tasks of a taskset."""

  name: str
  """Name of the processor, a key of `tasks.processors.PROCESSORS` (`jaxrl train --list` shows
  them).
  """
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Values for the fields of the processor's configuration class."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shot:
  """A question with its answer, shown to the policy before a task's prompt (few-shot prompting)."""

  question: str
  answer: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class TasksetConfig:
  """Source, templates and filters of a taskset. Templates are Python format strings over the fields
  of a row (see `tasks.templates`).
  """

  name: str
  source: str
  """'reasoning_gym:<dataset>', the path of a .jsonl or .parquet file, or 'datasets:<directory or
  hub id>[#split]'.
  """
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Parameters of the source: the configuration of a reasoning-gym dataset, or arguments of
  `datasets.load_dataset`. Must be empty if `source` is a file.
  """
  form: Form | None = None
  """Public data set whose row format the source uses: 'apps', 'code_contests' or 'livecodebench'.
  Rows are first converted to rows with `prompt` and `tests` (see `tasks.code_rows`). If None, rows
  are not converted.
  """
  domain: str = 'general'
  """Domain of the rows that have no field `ability`."""
  size: int | None = None
  """For a procedural source, the number of items to generate, duplicates included; required. For
  other sources, the maximum number of rows.
  """
  seed: int = 0
  """Seed of a procedural source. Item i is generated with Random(seed + i), so nearby seeds share
  items.
  """
  prompt: str | None = None
  """Template of the prompt. If None, the row's `prompt` or `question` is used."""
  truth: str | None = None
  """Template of the reference answer. If None, the row's `reward_model.ground_truth` or `answer` is
  used.
  """
  system: str | None = None
  """System message of all tasks. If None, rows keep their own system messages."""
  shots: tuple[Shot, ...] = ()
  """Solved examples that each prompt contains as earlier turns of the chat (few-shot prompting).
  They follow the system message.
  """
  match: str | None = None
  """Regular expression that must match the whole last message of a task's prompt; other tasks are
  dropped. If None, all tasks are kept.
  """
  split: Literal['all', 'train', 'eval'] = 'all'
  holdout: float = 0.0
  """Fraction of the prompts that form the split 'eval', in [0, 1). The other prompts form the split
  'train'.
  """
  on_corrupt: Literal['fail', 'skip'] = 'fail'
  processors: tuple[TaskProcessorConfig, ...] = ()
  """Processors that drop tasks from the loaded taskset. They run in this order."""

  def __post_init__(self):
    if not _NAME.fullmatch(self.name):
      raise UserError(
        f'taskset name {self.name!r}: wanted letters, digits, dots, dashes and underscores only'
      )
    if not 0 <= self.holdout < 1:
      raise UserError(
        f'taskset {self.name}: holdout is {self.holdout}, wanted a fraction in [0, 1)'
      )
    if self.split == 'eval' and not self.holdout:
      raise UserError(
        f"taskset {self.name}: split 'eval' with holdout 0 has no tasks; set the same holdout as "
        "for 'train'"
      )
    if self.match is not None:
      try:
        re.compile(self.match)
      except re.error as error:
        raise UserError(
          f'taskset {self.name}: match {self.match!r} is not a regular expression: {error}'
        ) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taskset:
  """Tasks with distinct prompts in the order of their source, and counts of the rows."""

  name: str
  tasks: tuple[Task, ...]
  counts: Mapping[str, int]
  """Numbers of rows, keyed by `read`, `kept`, `corrupt`, `unmatched`, `duplicate`, `other_split`
  and `too_long`, and by '<processor>/<reason>' for tasks that a processor dropped.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemonstrationsConfig:
  """Demonstrations made from templates. For each task, one template is chosen at random by weight
  and filled to give the answer.
  """

  templates: tuple[str, ...]
  weights: tuple[float, ...] = (1.0,)
  """Relative probability of each template, in the order of the templates."""
  count: int | None = None
  """Number of tasks to answer, from the start of the taskset. If None, all tasks are answered."""
  seed: int = 0

  def __post_init__(self):
    if not self.templates or len(self.weights) != len(self.templates):
      raise UserError(
        f'demonstrations: {len(self.templates)} templates and {len(self.weights)} weights; wanted '
        'one weight per template'
      )
    if min(self.weights) < 0 or not 0 < sum(self.weights) < float('inf'):
      raise UserError(
        f'demonstrations: weights are {self.weights}, wanted none negative and at least one '
        'positive'
      )


def taskset_loader(configs: Iterable[TasksetConfig]) -> Callable[[str], Taskset]:
  """Returns a function that returns the taskset with a given name. Each taskset is loaded only
  once.

  Rows that several tasksets share, such as the splits 'train' and 'eval' of one source, are also
  read only once.
  """
  named = {config.name: config for config in configs}
  readers = collections.Counter(_reading(config) for config in named.values())
  shared: dict[str, list[sources.SourceRow | sources.Corrupt]] = {}

  @functools.cache
  def load(name: str) -> Taskset:
    config = named[name]
    reading = _reading(config)
    if reading not in shared:
      if readers[reading] == 1:
        return load_taskset(config)
      shared[reading] = [*_rows(config)]
    readers[reading] -= 1
    # The last taskset that needs the shared rows frees them.
    return load_taskset(config, shared[reading] if readers[reading] else shared.pop(reading))

  return load


def _reading(config: TasksetConfig) -> str:
  """Returns a key that is equal for tasksets that read the same rows."""
  return json.dumps([config.source, dict(config.options), config.size, config.seed], default=repr)


def _rows(config: TasksetConfig) -> Iterator[sources.SourceRow | sources.Corrupt]:
  return sources.read_rows(
    config.source, options=config.options, size=config.size, seed=config.seed
  )


def load_taskset(
  config: TasksetConfig, rows: Iterable[sources.SourceRow | sources.Corrupt] | None = None
) -> Taskset:
  """Reads, filters, deduplicates and splits a taskset.

  Args:
    rows: rows of the source. If None, they are read here.

  Raises:
    UserError: the source cannot be read, a row is corrupt and `on_corrupt` is 'fail', or no task is
      left.
  """
  counts = dict.fromkeys(
    ('read', 'kept', 'corrupt', 'unmatched', 'duplicate', 'other_split', 'too_long'), 0
  )
  tasks, seen = [], set()
  results = sources.converted(
    _rows(config) if rows is None else rows,
    lambda row: _task(row.fields, config),
    counts,
    reader=f'taskset {config.name}',
    on_corrupt=config.on_corrupt,
  )
  for _, task in results:
    fate = _fate(task, config, seen)
    counts[fate] += 1
    if fate == 'kept':
      tasks.append(task)
  logging.info('taskset %s: %s', config.name, sources.listed(counts))
  if not tasks:
    raise UserError(
      f'taskset {config.name}: no task of {config.source} is left: {sources.listed(counts)}'
    )
  if shown := sum(bool(task.media) for task in tasks):
    logging.warning(
      'taskset %s: %d tasks have media, which a text-only policy does not see', config.name, shown
    )
  return Taskset(name=config.name, tasks=tuple(tasks), counts=counts)


def drop_long(taskset: Taskset, limit: int, length_of: Callable[[Task], int]) -> Taskset:
  """Drops the tasks whose prompts are longer than `limit` tokens, and counts them as `too_long`."""
  kept = tuple(task for task in taskset.tasks if length_of(task) <= limit)
  dropped = len(taskset.tasks) - len(kept)
  if not dropped:
    return taskset
  counts = {**taskset.counts, 'kept': len(kept), 'too_long': taskset.counts['too_long'] + dropped}
  logging.warning(
    'taskset %s: skipped %d prompts longer than %d tokens', taskset.name, dropped, limit
  )
  if not kept:
    raise UserError(
      f'taskset {taskset.name}: every prompt is longer than {limit} tokens; raise the prompt limit'
    )
  return Taskset(name=taskset.name, tasks=kept, counts=counts)


def demonstrations(taskset: Taskset, config: DemonstrationsConfig) -> list[tuple[Task, str]]:
  """Returns (task, answer) for each of the first `count` tasks. The choice of the answer's template
  depends only on the seed and the task's prompt.
  """
  count = len(taskset.tasks) if config.count is None else config.count
  if not 0 < count <= len(taskset.tasks):
    raise UserError(
      f'demonstrations of taskset {taskset.name}: count is {count}, but the taskset has '
      f'{len(taskset.tasks)} tasks; lower count or raise the size of the taskset'
    )
  pairs = []
  for task in taskset.tasks[:count]:
    try:
      pairs.append((task, templates.render(_choice(task, config), task.fields)))
    except ValueError as error:
      raise UserError(f'demonstrations of task {task.uid}: {error}') from None
  return pairs


def check_disjoint(train: Taskset, evaluation: Taskset) -> None:
  """Raises UserError if the tasksets have a prompt in common. The message contains an example."""
  digests = {task.digest for task in train.tasks}
  common = [task for task in evaluation.tasks if task.digest in digests]
  if common:
    raise UserError(
      f'tasksets {train.name} (training) and {evaluation.name} (evaluation) share {len(common)} '
      'prompts, for example '
      f"{common[0].prompt[-1]['content'][:80]!r}; give both the same holdout, and split 'train' "
      "and 'eval'"
    )


def _fate(task: Task, config: TasksetConfig, seen: set[str]) -> str:
  """Returns 'kept', 'unmatched', 'duplicate' or 'other_split' for a task, and adds its digest to
  `seen`.
  """
  if config.match is not None and not re.fullmatch(config.match, task.prompt[-1]['content']):
    return 'unmatched'
  digest = task.digest
  if digest in seen:
    return 'duplicate'
  seen.add(digest)
  if config.split != 'all' and is_held_out(digest, config.holdout) != (config.split == 'eval'):
    return 'other_split'
  return 'kept'


def _choice(task: Task, config: DemonstrationsConfig) -> str:
  point = (
    xxhash.xxh3_64_intdigest(f'{config.seed}:{task.digest}'.encode()) / 2**64 * sum(config.weights)
  )
  for template, weight in zip(config.templates, config.weights):
    point -= weight
    if point < 0:
      return template
  return config.templates[-1]


def _task(fields: Mapping[str, Json], config: TasksetConfig) -> Task:
  """Converts the fields of a row to a task. Raises ValueError if that is not possible."""
  if config.form is not None:
    fields = convert(fields, config.form)
    sources.check_text(fields)
  ability = fields.get('ability')
  task = Task(
    taskset=config.name,
    domain=ability if isinstance(ability, str) and ability else config.domain,
    prompt=_prompt(fields, config),
    truth=own_truth(fields) if config.truth is None else templates.render(config.truth, fields),
    fields=fields,
    media=read_media(fields, sources.directory(config.source)),
  )
  # Raises an error if a template has yielded text that UTF-8 cannot encode.
  f'{task.digest}{task.truth}'.encode()
  return task


def _prompt(fields: Mapping[str, Json], config: TasksetConfig) -> tuple[Message, ...]:
  if config.prompt is None:
    messages = own_messages(fields)
  else:
    raw = fields.get('prompt')
    system = (
      [message for message in text_messages('prompt', raw) if message['role'] == 'system']
      if isinstance(raw, list)
      else []
    )
    messages = [*system, {'role': 'user', 'content': templates.render(config.prompt, fields)}]
  if config.system is not None:
    messages = [
      {'role': 'system', 'content': config.system},
      *(m for m in messages if m['role'] != 'system'),
    ]
  if config.shots:
    turns = [
      {'role': role, 'content': content}
      for shot in config.shots
      for role, content in (('user', shot.question), ('assistant', shot.answer))
    ]
    at = sum(m['role'] == 'system' for m in messages[:1])
    messages = [*messages[:at], *turns, *messages[at:]]
  if not messages or messages[-1]['role'] not in ('user', 'tool'):
    raise ValueError(
      f"prompt must end with a message of 'user' or 'tool', its roles are {roles(messages)}"
    )
  if not any(message['content'].strip() for message in messages):
    raise ValueError('prompt is empty')
  return tuple(messages)


def own_messages(fields: Mapping[str, Json]) -> list[Message]:
  """Returns the prompt in a row's own fields as messages. Raises ValueError if the row has none."""
  source = fields['entry'] if 'reasoning_gym' in fields else fields
  for key in ('prompt', 'question'):
    value = source.get(key)
    if isinstance(value, str):
      return [{'role': 'user', 'content': value}]
    if isinstance(value, list):
      return text_messages('prompt', value)
  raise ValueError(
    f"no 'prompt' or 'question' of text or messages among its fields {', '.join(sorted(source))}"
  )


def own_truth(fields: Mapping[str, Json]) -> str | None:
  """Returns the reference answer in a row's own fields as text, or None if the row has none."""
  source = fields['entry'] if 'reasoning_gym' in fields else fields
  reward_model = source.get('reward_model')
  value = (
    reward_model.get('ground_truth') if isinstance(reward_model, Mapping) else source.get('answer')
  )
  return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
