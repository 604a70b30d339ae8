"""Adds expert rows (answers to imitate) to a run: from files, from rollouts of another run, and
from people who correct answers of this run. The run may be active meanwhile.

Each row is checked separately: a refused row is reported in one line, and the other rows are added.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.app.composition.initial_weights import model_directory
from jaxrl_llm.app.composition.recorded_rows import check_same_tokenizer, recorded_config
from jaxrl_llm.app.composition.stored_groups import StoredGroups
from jaxrl_llm.app.composition.stored_rows import selected_rows
from jaxrl_llm.app.composition.workdir import TOKENIZER
from jaxrl_llm.app.offline.json_lines import numbered_lines, parse_line
from jaxrl_llm.app.offline.reopen import config_of_run
from jaxrl_llm.app.schema import Config, StageConfig
from jaxrl_llm.app.sources import Rollouts
from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.records.sample import Role, Sample, Source
from jaxrl_llm.core.types import Json
from jaxrl_llm.master.exploring.selection import SelectionConfig
from jaxrl_llm.replay import copying, experts
from jaxrl_llm.replay.browse import snapshot
from jaxrl_llm.replay.experts import ExpertRow
from jaxrl_llm.replay.segments import SegmentReader, decode_row
from jaxrl_llm.rollout.untrusted import Bounds
from jaxrl_llm.rollout.workflow import trained_turns
from jaxrl_llm.tasks.taskset import taskset_loader
from jaxrl_llm.tasks.tokenizer import Tokenizer

MAX_LINE = 1 << 24
"""Maximum length of a line of a file, in bytes."""
_AT_ONCE = 256
"""Number of rows that are added in one transaction."""
_MAX_NAME = 200
_FIELDS = (
  *('prompt', 'answer', 'tokens', 'prompt_len'),
  *('rewards', 'task', 'taskset', 'domain', 'origin', 'who'),
)
_ROLES = ('system', 'user', 'assistant', 'tool')


@dataclasses.dataclass(frozen=True)
class Correction:
  """A person's or program's correction of the answer in a sample. Raises UserError if a field is
  empty or not a string.
  """

  uid: str
  """uid of the sample whose answer is corrected."""
  text: str
  """The corrected answer."""
  who: str

  def __post_init__(self):
    for name in ('uid', 'text', 'who'):
      if not (isinstance(value := getattr(self, name), str) and value):
        field = 'correction' if name == 'text' else name
        raise UserError(f'{field} is {one_line(repr(value), 60)}, wanted a non-empty text')


class Report(NamedTuple):
  """Result of adding rows."""

  added: int
  known: list[str]
  """One line for each row that had been added before."""
  refused: list[str]
  """One line for each row that was refused, with the reason."""

  @property
  def lines(self) -> list[str]:
    known = f', {len(self.known)} added before' if self.known else ''
    return [
      *self.known,
      *self.refused,
      f'{self.added} expert rows added{known}, {len(self.refused)} refused',
    ]


class Run:
  """A run to which expert rows are added."""

  def __init__(self, workdir: pathlib.Path):
    """Raises UserError if `workdir` is not the directory of a run that has started."""
    self.config: Config = config_of_run(workdir)
    self.workdir, self.store = workdir, workdir / 'replay'
    copying.name(self.store)
    checkpoint = self.config.policy.init_from
    made = workdir / TOKENIZER
    self.tokenizer = Tokenizer.from_directory(
      made if made.exists() or checkpoint is None else model_directory(checkpoint)
    )
    self.bounds = Bounds(
      vocab_size=self.tokenizer.vocab_size, max_length=self.config.rollout.max_length
    )

  @property
  def tasksets(self) -> tuple[str, ...]:
    """Names of the tasksets of the stages to which expert rows can be added."""
    names = [name for stage in self._stages for name in stage.source.tasksets]
    return tuple(dict.fromkeys(names))

  @property
  def _stages(self) -> list[StageConfig]:
    return [
      stage
      for stage in self.config.stages
      if isinstance(stage.source, Rollouts) and stage.source.experts is not None
    ]

  def check_takes_experts(self) -> None:
    """Raises UserError if no stage of the run would train on added rows."""
    if not self._stages:
      raise UserError(
        f'--workdir={self.workdir}: no stage has source.experts, so no batch would train on expert '
        'rows; wanted a run with the algorithm mix'
      )

  def sample(self, row: ExpertSource) -> Sample:
    """Converts a row to a sample. Raises UserError or ValueError if the run cannot train on it."""
    if row.tokens is None:
      prompt, completion = self.tokenizer.render_answer(row.messages, row.answer)
      tokens = np.array([*prompt, *completion], np.int64)
      prompt_len = len(prompt)
    else:
      tokens, prompt_len = np.array(row.tokens, np.int64), row.prompt_len
    self.check_tokens(tokens)
    return _sample(tokens, prompt_len, row)

  def check_tokens(self, tokens: np.ndarray) -> None:
    """Raises ValueError if a sequence is too long, or has a token outside the vocabulary."""
    if len(tokens) > self.bounds.max_length:
      raise ValueError(
        f'{len(tokens)} tokens, wanted at most {self.bounds.max_length}: '
        'rollout.max_prompt_length and max_response_length together'
      )
    self.bounds.check_tokens(tokens, 'tokens')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertSource:
  """Content of an expert row before its conversion to a sample. Either `messages` and `answer` are
  given, or `tokens` and `prompt_len`.
  """

  messages: tuple[Json, ...] = ()
  answer: str = ''
  tokens: tuple[int, ...] | None = None
  prompt_len: int = 0
  task: str | None = None
  taskset: str = 'experts'
  domain: str = 'general'
  source: Source = Source.EXPERT


def _sample(tokens: np.ndarray, prompt_len: int, row: ExpertSource) -> Sample:
  answer = np.arange(len(tokens)) >= prompt_len
  sample = Sample(
    uid='',
    task_id='',
    visit=0,
    sample_index=0,
    group_id='',
    trajectory_id='',
    taskset=row.taskset,
    domain=row.domain,
    source=row.source,
    tokens=tokens.astype(np.int32),
    prompt_len=prompt_len,
    role=np.where(answer, Role.POLICY, Role.PROMPT).astype(np.uint8),
    loss_mask=answer,
    sampled=np.zeros(len(tokens), bool),
    behaviour_logprobs=np.zeros(len(tokens), np.float32),
  )
  return dataclasses.replace(
    sample, task_id=row.task or f'{row.taskset}:{experts.digest(sample)[:16]}'
  )


def add_file(run: Run, file: pathlib.Path, who: str | None) -> Report:
  """Adds the rows of a JSON Lines file. Lines are read one at a time.

  Args:
    who: name of the person or program that adds the rows, unless a row itself names one.

  Raises:
    UserError: the file cannot be read, or no stage of the run takes expert rows.
  """
  run.check_takes_experts()

  def rows() -> Iterator[tuple[str, ExpertRow | str]]:
    for number, line in numbered_lines(file, MAX_LINE):
      where = f'{file}:{number}'
      try:
        yield where, _of_file(run, parse_line(line, MAX_LINE), who, file.name, number)
      except (UserError, ValueError) as error:
        yield where, one_line(error)

  return _add(run, rows())


def _of_file(run: Run, row: Any, who: str | None, name: str, number: int) -> ExpertRow:
  if not isinstance(row, dict):
    raise UserError(f'{one_line(repr(row), 60)}: wanted an object with prompt and answer')
  if unknown := [key for key in row if key not in _FIELDS]:
    raise UserError(f'unknown field {one_line(repr(unknown[0]), 60)}; wanted {", ".join(_FIELDS)}')
  origin = row.get('origin', {})
  if not isinstance(origin, dict):
    raise UserError(f'origin is {one_line(repr(origin), 60)}, wanted an object')
  given = _content(row)
  return ExpertRow(
    sample=run.sample(given),
    who=row.get('who', who),
    origin={'kind': 'file', 'file': name, 'line': number, **({'of': origin} if origin else {})},
    scores=_rewards(row.get('rewards', {})),
  )


def _content(row: dict[str, Any]) -> ExpertSource:
  names = {}
  for key in ('task', 'taskset', 'domain'):
    if key in row:
      names[key] = _name(key, row[key])
  if 'tokens' in row:
    if 'prompt' in row or 'answer' in row:
      raise UserError(
        'the row has tokens, and also a prompt or an answer; wanted only one of these forms'
      )
    tokens, prompt_len = row['tokens'], row.get('prompt_len')
    if not (isinstance(tokens, list) and all(type(token) is int for token in tokens)):
      raise UserError('tokens is not a list of whole numbers')
    if tokens and not all(abs(token) < 1 << 31 for token in tokens):
      raise UserError('tokens has a number of more than 32 bits')
    if not (type(prompt_len) is int and 0 < prompt_len < len(tokens)):
      raise UserError(
        f'prompt_len is {one_line(repr(prompt_len), 60)}, wanted 1 to the number of tokens minus 1'
      )
    return ExpertSource(tokens=tuple(tokens), prompt_len=prompt_len, **names)
  for key in ('prompt', 'answer'):
    if key not in row:
      raise UserError(f'{key} is missing; wanted prompt and answer, or tokens and prompt_len')
  prompt = row['prompt']
  messages = [{'role': 'user', 'content': prompt}] if isinstance(prompt, str) else prompt
  if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
    raise UserError(
      f'prompt is {one_line(repr(prompt), 60)}, wanted a text, or messages with role and content'
    )
  return ExpertSource(messages=tuple(messages), answer=_text('answer', row['answer']), **names)


def _is_message(message: Any) -> bool:
  return (
    isinstance(message, dict)
    and message.keys() == {'role', 'content'}
    and message['role'] in _ROLES
    and isinstance(message['content'], str)
    and _is_text(message['content'])
  )


def _is_text(text: str) -> bool:
  """Returns whether a text can be written as UTF-8, which a lone surrogate prevents."""
  try:
    text.encode()
  except UnicodeEncodeError:
    return False
  return True


def _text(key: str, value: Any) -> str:
  if not (isinstance(value, str) and value and _is_text(value)):
    raise UserError(f'{key} is {one_line(repr(value), 60)}, wanted a non-empty text')
  return value


def _name(key: str, value: Any) -> str:
  if not (isinstance(value, str) and 0 < len(value) <= _MAX_NAME and value.isprintable()):
    raise UserError(f'{key} is {one_line(repr(value), 60)}, wanted a short printable name')
  return value


def _rewards(value: Any) -> dict[str, float]:
  if isinstance(value, dict):
    return value
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise UserError(
      f'rewards is {one_line(repr(value), 60)}, wanted a number, or numbers keyed by scorer'
    )
  return {'reward': value}


def add_run(
  run: Run, other: pathlib.Path, stages: Sequence[str], selection: SelectionConfig, who: str
) -> Report:
  """Adds selected rollouts of another run.

  Args:
    other: directory of the other run, which is only read.
    stages: names of the other run's stages whose rollouts are added. If empty, all stages.
    selection: rule that selects answers to imitate from each stored group.

  Raises:
    UserError: `selection` does not select answers to imitate, the other run cannot be read or has
      another vocabulary, no stage of this run takes expert rows, or no rollout is selected.
  """
  run.check_takes_experts()
  if not selection.imitates:
    raise UserError(f'--select={selection.kind}: wanted best, above or shortest_correct')
  recorded = recorded_config('--from_run', other)
  checkpoint = recorded.checkpoint
  vocabulary = other / TOKENIZER if checkpoint is None else model_directory(checkpoint)
  check_same_tokenizer('--from_run', other, vocabulary, run.tokenizer)
  load = taskset_loader(run.config.tasksets)
  groups = StoredGroups(
    run=other,
    tasks={task.uid: task for name in run.tasksets for task in load(name).tasks},
    rewards_of=recorded.rewards_of,
    tokenizer=run.tokenizer,
    longest=run.config.rollout.max_length,
    where='--from_run',
  )
  store = copying.name(other / 'replay')
  count = collections.Counter()

  def rows() -> Iterator[tuple[str, ExpertRow | str]]:
    for group in groups.read(stages):
      count['groups'] += 1
      rewards = {member.sample.uid: member.reward.value for member in group}
      for sample in selected_rows(selection, group):
        count['rows'] += 1
        where = f'{other}: {sample.uid}'
        try:
          run.check_tokens(sample.tokens)
          yield (
            where,
            ExpertRow(
              sample=dataclasses.replace(sample, source=Source.EXPERT),
              who=who,
              origin={
                'kind': 'run',
                'run': other.name,
                'store': store,
                'uid': sample.uid,
                'select': selection.kind,
              },
              scores={'reward': rewards[sample.uid]},
            ),
          )
        except (UserError, ValueError) as error:
          yield where, one_line(error)

  report = _add(run, rows())
  if not count['rows']:
    raise UserError(
      f'--from_run={other}: --select={selection.kind} accepts no sample of its {count["groups"]} '
      f'groups (left out: {dict(groups.left_out)}); change --select, or name other --stages'
    )
  return report


def add_corrections(run: Run, corrections: Iterable[tuple[str, Correction]]) -> Report:
  """Adds people's corrections of this run's answers to the run, as expert rows.

  Args:
    corrections: pairs (place, correction). The place, such as a file and line, is named in the
      report.

  Raises:
    UserError: no stage of the run takes expert rows, or the run's store cannot be read.
  """
  run.check_takes_experts()

  def rows() -> Iterator[tuple[str, ExpertRow | str]]:
    with snapshot(run.store) as (db, reader):
      for where, correction in corrections:
        try:
          yield where, _corrected(run, db, reader, correction)
        except (UserError, ValueError) as error:
          yield where, one_line(error)

  return _add(run, rows())


def _corrected(
  run: Run, db: sqlite3.Connection, reader: SegmentReader, correction: Correction
) -> ExpertRow:
  uid = correction.uid
  row = db.execute(
    'SELECT s.attempt, s.partition, g.name, g.row, o.payload, t.json FROM samples s '
    'LEFT JOIN segment_rows g ON g.uid = s.uid AND g.attempt = s.attempt '
    'LEFT JOIN open_segment o ON o.uid = s.uid AND o.attempt = s.attempt '
    'LEFT JOIN tasks t ON t.uid = s.task_id WHERE s.uid = ? ORDER BY s.attempt DESC',
    (uid,),
  ).fetchone()
  if row is None or row[1] != 'usual':
    raise UserError(f'correction of {one_line(uid, 200)}: the run has no such sample')
  attempt, _, name, at, payload, asked = row
  if name is None and payload is None:
    raise UserError(f'correction of {uid}: the store does not contain its tokens')
  sample = reader.read([(name, at)])[0] if payload is None else decode_row(payload, uid)
  if sample.step_index or trained_turns(sample) > 1:
    raise UserError(f'correction of {uid}: the sample has several turns, wanted one answer')
  messages = json.loads(asked)['prompt'] if asked is not None else []
  prompt = sample.tokens[: sample.prompt_len].tolist()
  given = ExpertSource(
    messages=tuple(messages),
    answer=_text('correction', correction.text),
    task=sample.task_id,
    taskset=sample.taskset,
    domain=sample.domain,
    source=Source.HUMAN,
  )
  if not messages or run.tokenizer.render_prompt(messages) != prompt:
    raise UserError(
      f"correction of {uid}: the workflow gave the policy another prompt than the task's"
    )
  return ExpertRow(
    sample=run.sample(given),
    who=correction.who,
    origin={'kind': 'correction', 'uid': uid, 'attempt': attempt},
  )


def _add(run: Run, rows: Iterable[tuple[str, ExpertRow | str]]) -> Report:
  """Adds rows, a few hundred at a time.

  Args:
    rows: pairs (place, row), or (place, reason) for a refused row. The place, such as a file and
      line, is named in the report.
  """
  added, known, refused = 0, [], []
  batch: list[tuple[str, ExpertRow]] = []

  def write() -> None:
    nonlocal added
    results = experts.add(run.store, [row for _, row in batch]) if batch else []
    for (where, _), result in zip(batch, results, strict=True):
      if result.before is None:
        added += 1
      else:
        known.append(f'{where}: {result.uid} was added before, by {result.before}')
    batch.clear()

  for where, row in rows:
    if isinstance(row, str):
      refused.append(f'{where}: {row}')
    else:
      batch.append((where, row))
      if len(batch) == _AT_ONCE:
        write()
  write()
  return Report(added, known, refused)
