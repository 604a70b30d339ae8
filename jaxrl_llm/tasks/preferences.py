"""Preference pairs: prompts with a chosen and a rejected answer, read from rows of a source and
split by question.

Every row is counted in `read` and in exactly one of `kept`, `corrupt`, `identical`, `duplicate` and
`other_split`. A pair's split depends only on its group (for example its prompt), so all pairs of a
question are in the same split.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import xxhash
from absl import logging

from jaxrl_llm.config.annotations import nearest
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Role, Sample, Source
from jaxrl_llm.core.records.task import Message, Task, is_held_out
from jaxrl_llm.core.types import Json
from jaxrl_llm.tasks import sources, templates
from jaxrl_llm.tasks.messages import roles, text_messages
from jaxrl_llm.tasks.taskset import Taskset
from jaxrl_llm.tasks.tokenizer import Tokenizer

_COUNTS = ('read', 'kept', 'corrupt', 'identical', 'duplicate', 'other_split')
_NAME = re.compile(r'[A-Za-z0-9_.-]+')


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferencesConfig:
  """Source, templates and split of preference pairs. Templates are Python format strings over the
  fields of a row (see `tasks.templates`).

  Without templates, a row must have one of three forms: (1) texts in `prompt`, `chosen` and
  `rejected`; (2) messages in `prompt`, and a text or one assistant message in each of `chosen` and
  `rejected`; (3) whole conversations in `chosen` and `rejected` that differ only in the last
  message. In form (3), the earlier messages are the prompt, and a text `prompt` is ignored.
  """

  name: str
  source: str
  """Path of a .jsonl or .parquet file, 'datasets:<directory or hub id>[#split]', or
  'taskset:<name>'.
  """
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Arguments passed to `datasets.load_dataset`. Must be empty if `source` is a file."""
  domain: str = 'general'
  """Domain of the rows that have no field `ability`."""
  size: int | None = None
  """Maximum number of rows to read."""
  prompt: str | None = None
  """Template of the prompt. If None, the row's own prompt is used."""
  chosen: str | None = None
  """Template of the better answer. If None, the row's `chosen` is used."""
  rejected: str | None = None
  """Template of the worse answer. If None, the row's `rejected` is used."""
  group: str | None = None
  """Template of a row's group, such as '{question_id}'. All rows of a group are in the same split.
  If None, rows with equal prompts form a group.
  """
  split: Literal['all', 'train', 'eval'] = 'all'
  holdout: float = 0.0
  """Fraction of the groups that form the split 'eval', in [0, 1). Without `group`, a taskset with
  the same holdout holds out the same prompts.
  """
  fold: int | None = None
  """For cross-validation: index, from 0, of the fold that forms the split 'eval'. The other
  `folds` − 1 folds form 'train'. If None, `holdout` is used instead.
  """
  folds: int = 5
  origin: Literal['human', 'synthetic'] = 'human'
  """Origin of the judgements. It is recorded as the samples' source."""
  on_corrupt: Literal['fail', 'skip'] = 'fail'

  def __post_init__(self):
    if not _NAME.fullmatch(self.name):
      raise UserError(
        f'preferences name {self.name!r}: wanted letters, digits, dots, dashes and underscores only'
      )
    where = f'preferences {self.name}'
    if self.source.startswith('reasoning_gym:'):
      raise UserError(
        f'{where}: source {self.source!r} has tasks, not pairs; make a taskset of it and write '
        "'taskset:<its name>'"
      )
    if not 0 <= self.holdout < 1:
      raise UserError(f'{where}: holdout is {self.holdout}, wanted a fraction in [0, 1)')
    if self.fold is None:
      if self.split == 'eval' and not self.holdout:
        raise UserError(
          f"{where}: split 'eval' with neither holdout nor fold has no pairs; set the one that is "
          "set for 'train'"
        )
    elif self.folds < 2 or not 0 <= self.fold < self.folds:
      raise UserError(
        f'{where}: fold is {self.fold} of {self.folds}, wanted 0 to folds - 1 and at least 2 folds'
      )
    elif self.holdout:
      raise UserError(
        f'{where}: both holdout {self.holdout} and fold {self.fold} are set; remove one'
      )
    elif self.split == 'all':
      raise UserError(
        f"{where}: fold {self.fold} is set but split is 'all'; set split to 'train' or 'eval'"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
  """A prompt with a chosen and a rejected answer."""

  uid: str
  """Identifier, the same in all runs: the name of the preferences and half of the digest of the
  prompt and answers.
  """
  task: Task
  chosen: str
  rejected: str
  group: str
  """Group of the pair. Pairs of a group are in the same split and are not independent
  observations.
  """
  origin: Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preferences:
  """Distinct preference pairs in the order of their source, and counts of the rows."""

  name: str
  pairs: tuple[Pair, ...]
  counts: Mapping[str, int]
  """Numbers of rows, keyed by `read`, `kept`, `corrupt`, `identical` (both answers are equal),
  `duplicate` and `other_split`.
  """


def load_preferences(config: PreferencesConfig) -> Preferences:
  """Reads, deduplicates and splits preference pairs.

  Raises:
    UserError: the source cannot be read; a row is corrupt and `on_corrupt` is 'fail'; a prompt is
      in two groups and so might be in both splits; or no pair is left.
  """
  if config.source.startswith('taskset:'):
    raise ValueError(
      f'preferences {config.name}: {config.source!r} must be read by pairs_of_tasks instead'
    )
  counts = dict.fromkeys(_COUNTS, 0)
  pairs, seen, group_of = [], set(), {}
  results = sources.converted(
    sources.read_rows(config.source, options=config.options, size=config.size, seed=0),
    lambda row: _pair_of(row.fields, config),
    counts,
    reader=f'preferences {config.name}',
    on_corrupt=config.on_corrupt,
  )
  for where, pair in results:
    _check_group(where, pair, group_of, config)
    fate = _fate(pair, config, seen)
    counts[fate] += 1
    if fate == 'kept':
      pairs.append(pair)
  return _preferences(config.name, pairs, counts, config.source)


def pairs_of_tasks(
  taskset: Taskset,
  *,
  chosen: str,
  rejected: tuple[str, ...],
  seed: int = 0,
  count: int | None = None,
  name: str | None = None,
) -> Preferences:
  """Creates preference pairs from templates, with a right and a wrong answer for each of the first
  `count` tasks. If `count` is None, all tasks are used.

  The choice among the `rejected` templates depends only on the seed and the task's prompt. Tasks
  whose two answers are equal are left out and counted as `identical`. A pair's group is its prompt.

  Args:
    name: name of the preferences, with which the pairs' uids start. If None, the taskset's name is
      used.
  """
  name = taskset.name if name is None else name
  count = len(taskset.tasks) if count is None else count
  if not 0 < count <= len(taskset.tasks):
    raise UserError(
      f'preferences {name}: count is {count}, but taskset {taskset.name} has {len(taskset.tasks)} '
      'tasks; lower count or raise the size of the taskset'
    )
  if not rejected:
    raise UserError(f'preferences {name}: no template of a rejected answer; give at least one')
  pairs = []
  for task in taskset.tasks[:count]:
    wrong = rejected[xxhash.xxh3_64_intdigest(f'{seed}:{task.digest}'.encode()) % len(rejected)]
    try:
      answers = templates.render(chosen, task.fields), templates.render(wrong, task.fields)
    except ValueError as error:
      raise UserError(f'preferences {name}, task {task.uid}: {error}') from None
    if answers[0] != answers[1]:
      pairs.append(_pair(name, task, *answers, group=task.digest, origin=Source.SYNTHETIC))
  counts = {
    **dict.fromkeys(_COUNTS, 0),
    'read': count,
    'kept': len(pairs),
    'identical': count - len(pairs),
  }
  return _preferences(name, pairs, counts, f'taskset {taskset.name}')


def preference_samples(pair: Pair, tokenizer: Tokenizer) -> tuple[Sample, Sample]:
  """Converts a pair to two samples (chosen, rejected). Their answer tokens are in the loss and are
  marked as not sampled by the policy.
  """
  return _sample(pair, 'chosen', pair.chosen, 0, tokenizer), _sample(
    pair, 'rejected', pair.rejected, 1, tokenizer
  )


def _sample(pair: Pair, label: str, answer: str, index: int, tokenizer: Tokenizer) -> Sample:
  prompt, completion = tokenizer.render_answer(pair.task.prompt, answer)
  tokens = np.array([*prompt, *completion], np.int32)
  given = np.r_[np.zeros(len(prompt), bool), np.ones(len(completion), bool)]
  uid = f'{pair.uid}/{label}'
  return Sample(
    uid=uid,
    task_id=pair.task.uid,
    visit=0,
    sample_index=index,
    group_id=pair.uid,
    trajectory_id=uid,
    taskset=pair.task.taskset,
    domain=pair.task.domain,
    source=pair.origin,
    tokens=tokens,
    prompt_len=len(prompt),
    role=np.where(given, Role.POLICY, Role.PROMPT).astype(np.uint8),
    loss_mask=given,
    sampled=np.zeros(len(tokens), bool),
    behaviour_logprobs=np.zeros(len(tokens), np.float32),
    preference={'pair_id': pair.uid, 'label': label},
  )


def _preferences(
  name: str, pairs: Sequence[Pair], counts: Mapping[str, int], source: str
) -> Preferences:
  summary = sources.listed(counts)
  logging.info('preferences %s: %s', name, summary)
  if not pairs:
    raise UserError(f'preferences {name}: no pair of {source} is left: {summary}')
  return Preferences(name=name, pairs=tuple(pairs), counts=counts)


def _check_group(
  where: str, pair: Pair, group_of: dict[str, str], config: PreferencesConfig
) -> None:
  """Raises UserError if `config` splits the pairs and the pair's prompt also occurs in another
  group, because the prompt could then be in both splits. Records the prompt's group in `group_of`.
  """
  group = group_of.setdefault(pair.task.digest, pair.group)
  if config.split != 'all' and group != pair.group:
    raise UserError(
      f'{where}: its prompt is in group {pair.group!r} and, in an earlier row, in {group!r}, so a '
      f'split may put it on both sides (preferences {config.name}); wanted one group per prompt: '
      f'change the template {config.group!r}'
    )


def _fate(pair: Pair, config: PreferencesConfig, seen: set[str]) -> str:
  """Returns 'kept', 'identical', 'duplicate' or 'other_split' for a pair, and adds its uid to
  `seen`.
  """
  if pair.chosen == pair.rejected:
    return 'identical'
  if pair.uid in seen:
    return 'duplicate'
  seen.add(pair.uid)
  return (
    'kept'
    if config.split == 'all' or _is_eval(pair, config) == (config.split == 'eval')
    else 'other_split'
  )


def _is_eval(pair: Pair, config: PreferencesConfig) -> bool:
  # Without `config.group`, the group is the digest of the prompt, which tasksets also use for
  # splitting. Pairs and tasksets with the same holdout therefore hold out the same prompts.
  digest = pair.group if config.group is None else xxhash.xxh3_128_hexdigest(pair.group.encode())
  if config.fold is None:
    return is_held_out(digest, config.holdout)
  return int(digest, 16) % config.folds == config.fold


def _pair_of(fields: Mapping[str, Json], config: PreferencesConfig) -> Pair:
  """Converts a row of the source to a pair. Raises ValueError if that is not possible."""
  before, chosen = _conversation(fields, 'chosen', config.chosen)
  before_rejected, rejected = _conversation(fields, 'rejected', config.rejected)
  if before != before_rejected:
    raise ValueError(
      'chosen and rejected differ before their last message, so they have no prompt in common'
    )
  ability = fields.get('ability')
  task = Task(
    taskset=config.name,
    domain=ability if isinstance(ability, str) and ability else config.domain,
    prompt=_prompt(fields, before, config),
    truth=None,
    fields=fields,
  )
  group = task.digest if config.group is None else templates.render(config.group, fields)
  if not group.strip():
    raise ValueError(f'the template {config.group!r} gives it an empty group')
  return _pair(config.name, task, chosen, rejected, group=group, origin=Source(config.origin))


def _pair(name: str, task: Task, chosen: str, rejected: str, *, group: str, origin: Source) -> Pair:
  canonical = json.dumps([task.digest, chosen, rejected], ensure_ascii=False)
  uid = f'{name}:{xxhash.xxh3_128_hexdigest(canonical.encode())[:16]}'
  return Pair(uid=uid, task=task, chosen=chosen, rejected=rejected, group=group, origin=origin)


def _conversation(
  fields: Mapping[str, Json], name: str, template: str | None
) -> tuple[list[Message], str]:
  """Returns (messages before an answer, text of the answer). There may be no messages."""
  value = _own(fields, name) if template is None else templates.render(template, fields)
  messages = _as_messages(name, value, role='assistant')
  if not messages or messages[-1]['role'] != 'assistant':
    raise ValueError(
      f"{name} must end with a message of 'assistant', its roles are {roles(messages)}"
    )
  if not messages[-1]['content'].strip():
    raise ValueError(f'{name} is empty')
  return messages[:-1], messages[-1]['content']


def _prompt(
  fields: Mapping[str, Json], before: list[Message], config: PreferencesConfig
) -> tuple[Message, ...]:
  row_prompt = templates.names(fields).get('prompt')
  if config.prompt is not None:
    given = before or (text_messages('prompt', row_prompt) if isinstance(row_prompt, list) else [])
    system = [message for message in given if message['role'] == 'system']
    messages = [*system, {'role': 'user', 'content': templates.render(config.prompt, fields)}]
  elif before and isinstance(row_prompt, list):
    raise ValueError(
      "prompt has messages, so chosen and rejected must each hold a single message of 'assistant', "
      f'but before it they have {roles(before)}'
    )
  else:
    messages = before or _as_messages('prompt', _own(fields, 'prompt'), role='user')
  if not messages or messages[-1]['role'] not in ('user', 'tool'):
    raise ValueError(
      f"prompt must end with a message of 'user' or 'tool', its roles are {roles(messages)}"
    )
  if not any(message['content'].strip() for message in messages):
    raise ValueError('prompt is empty')
  return tuple(messages)


def _own(fields: Mapping[str, Json], name: str) -> Json:
  available = templates.names(fields)
  if name not in available:
    raise ValueError(
      f'the row lacks {name!r}; {nearest(name, available)} (a template can name another field)'
    )
  return available[name]


def _as_messages(name: str, value: Json, *, role: str) -> list[Message]:
  """Returns messages unchanged, and a text as one message with the given role."""
  if isinstance(value, str):
    return [{'role': role, 'content': value}]
  if isinstance(value, list):
    return text_messages(name, value)
  raise ValueError(f'{name} is {json.dumps(value)[:80]}, wanted text or a list of messages')
