"""Delayed rewards of a run's samples: exports the groups that wait for them, and imports verdicts.

A line of an imported file is a verdict on one sample, a comparison of two samples of a group, or a
corrected answer. A person's comparisons are converted to one verdict per sample: the share of the
sample's comparisons that it won, where a tie counts as half a win.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.app.composition.workdir import TOKENIZER
from jaxrl_llm.app.offline.agreement import Agreement, agreements
from jaxrl_llm.app.offline.experts import Correction, Run, add_corrections
from jaxrl_llm.app.offline.json_lines import numbered_lines, parse_line
from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.records.sample import Sample
from jaxrl_llm.core.records.task import Message
from jaxrl_llm.core.types import Json
from jaxrl_llm.replay import inbox
from jaxrl_llm.replay.awaited import Awaited
from jaxrl_llm.replay.browse import snapshot
from jaxrl_llm.replay.connection import NAMED
from jaxrl_llm.replay.inbox import LateVerdict, attach, given, read_verdict
from jaxrl_llm.replay.segments import SegmentReader, decode_row
from jaxrl_llm.replay.tables import AWAITED
from jaxrl_llm.rollout.workflow import trained_turns, turns_of
from jaxrl_llm.runtime import report
from jaxrl_llm.tasks.tokenizer import Tokenizer

MAX_LINE = 1 << 20
"""Maximum length of a line of an imported file, in bytes."""
_SCRIPTS = ('dom.js', 'export.js', 'feedback.js')
_AT_ONCE = 256
"""Number of verdicts that are attached in one transaction."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WaitingGroup:
  """A group of samples that wait for delayed rewards."""

  name: str
  task: str
  """uid of the task."""
  attempt: int
  uids: tuple[str, ...]
  """uids of the samples, ordered by sample index."""
  scorers: dict[str, int]
  """Number of verdicts that each sample needs, keyed by scorer."""
  until: float
  """Unix time from which verdicts are too late."""
  verdicts: int
  """Number of verdicts on the group's samples so far."""
  prompt: tuple[Json, ...]
  """Messages of the task's prompt."""
  texts: tuple[str, ...]
  """Answers, in the order of `uids`. For a sample with several turns, the last answer."""
  turns: Mapping[str, tuple[Message, ...]]
  """For each sample with several turns, the conversation after the task's prompt, keyed by uid."""

  @property
  def line(self) -> str:
    needed = sum(self.scorers.values()) * len(self.uids)
    return (
      f'{self.name}: {len(self.uids)} samples, {self.verdicts} of {needed} verdicts of '
      f'{", ".join(self.scorers)}, until {inbox.utc(self.until)}'
    )

  def to_json(self) -> Json:
    """Returns the group as a JSON object, which is one line of an export."""
    row = dataclasses.asdict(self)
    uids, texts, turns = row.pop('uids'), row.pop('texts'), row.pop('turns')
    samples = [
      {'uid': uid, 'text': text, **({'turns': [*turns[uid]]} if uid in turns else {})}
      for uid, text in zip(uids, texts, strict=True)
    ]
    return {**row, 'samples': samples}


def waiting_groups(directory: str | os.PathLike) -> list[WaitingGroup]:
  """Returns the groups in a store that wait for delayed rewards, in the order in which they were
  issued.
  """
  with snapshot(directory) as (db, reader):
    rows = db.execute(
      'SELECT s.group_id, s.task_id, s.attempt, s.uid, d.json, t.json FROM samples s '
      'JOIN derived d ON d.uid = s.uid AND d.attempt = s.attempt '
      'LEFT JOIN tasks t ON t.uid = s.task_id '
      "WHERE s.state = 'awaiting' AND d.operator = ? ORDER BY s.seq, d.seq",
      (AWAITED,),
    ).fetchall()
    several = [
      sample
      for sample in _samples(db, reader, {name for name, *_ in rows})
      if trained_turns(sample) > 1
    ]
  groups: dict[str, dict[str, Any]] = {}
  for name, task, attempt, uid, awaited, asked in rows:
    prompt = json.loads(asked)['prompt'] if asked is not None else []
    group = groups.setdefault(
      name, {'task': task, 'attempt': attempt, 'uids': {}, 'prompt': tuple(prompt)}
    )
    record = json.loads(awaited)
    group['uids'][uid], group['awaited'] = record['text'], Awaited.from_json(record)
  uids = [uid for group in groups.values() for uid in group['uids']]
  asked = {group['task']: group['prompt'] for group in groups.values()}
  turns = _conversations(pathlib.Path(directory).parent / TOKENIZER, several, asked)
  has = [(given.uid, given.attempt) for given in given(directory, uids)]
  return [
    WaitingGroup(
      name=name,
      task=group['task'],
      attempt=group['attempt'],
      uids=tuple(group['uids']),
      scorers=dict(group['awaited'].scorers),
      until=group['awaited'].until,
      verdicts=sum(uid in group['uids'] and attempt == group['attempt'] for uid, attempt in has),
      prompt=group['prompt'],
      texts=tuple(group['uids'].values()),
      turns={uid: turns[uid] for uid in group['uids'] if uid in turns},
    )
    for name, group in groups.items()
  ]


def export_groups(
  directory: str | os.PathLike, file: pathlib.Path | None, page: pathlib.Path | None
) -> int:
  """Writes the waiting groups to files for the people or programs that judge them. Returns the
  number of groups.

  Args:
    directory: directory of the store.
    file: JSON Lines file to write, one group per line; None to write none.
    page: HTML page to write, which works without a network; None to write none.

  Raises:
    UserError: a file cannot be written, or a page is wanted and a group waits for several scorers.
  """
  waiting = waiting_groups(directory)
  if page is not None and (several := [g.name for g in waiting if len(g.scorers) > 1]):
    raise UserError(
      f'{page}: {len(several)} groups wait for several scorers, but the page asks for one verdict: '
      f'{one_line(", ".join(several), 200)}; use --export, and name a scorer in each verdict'
    )
  groups = [group.to_json() for group in waiting]
  name = pathlib.Path(directory).absolute().parent.name
  if file is not None:
    _write(file, ''.join(f'{json.dumps(group)}\n' for group in groups))
  if page is not None:
    _write(page, report.render({'name': name, 'kind': 'feedback', 'groups': groups}, _SCRIPTS))
  return len(groups)


def _write(file: pathlib.Path, text: str) -> None:
  try:
    report.write(file, text)
  except OSError as error:
    raise UserError(f'{file}: cannot be written ({error.strerror})') from error


class Pairs(NamedTuple):
  """Counts of an export of preference pairs."""

  pairs: int
  left_out: int
  """Number of groups that were left out because a sample of the group has several turns."""

  @property
  def lines(self) -> list[str]:
    why = 'groups left out: their episodes have several turns, and a pair contains only the last'
    return [f'{self.left_out} {why}'] if self.left_out else []


def export_pairs(directory: str | os.PathLike, file: pathlib.Path) -> Pairs:
  """Writes preference pairs as JSON Lines, in the form that `PreferencesConfig` reads.

  A pair consists of two samples of a group with different mean verdicts. Verdicts of different
  scorers are compared separately. Samples that still wait for rewards are included, as are samples
  that no longer wait. Groups that have samples of several turns are left out.
  """
  values: dict[tuple[str, int, str], list[float]] = {}
  for verdict in given(directory):
    values.setdefault((verdict.uid, verdict.attempt, verdict.scorer), []).append(verdict.value)
  groups: dict[tuple[str, int, str], list[tuple[float, str]]] = {}
  with snapshot(directory) as (db, reader):
    asked = dict(db.execute('SELECT uid, json FROM tasks'))
    judged = db.execute(
      'SELECT s.uid, s.attempt, s.group_id, s.task_id, d.json FROM samples s JOIN derived d USING '
      '(uid, attempt) WHERE d.operator = ? ORDER BY s.seq',
      (AWAITED,),
    )
    tasks = {}
    for uid, attempt, group, task, text in judged:
      record = json.loads(text)
      tasks[group] = task
      for scorer in record['scorers']:
        if of := values.get((uid, attempt, scorer)):
          groups.setdefault((group, attempt, scorer), []).append(
            (sum(of) / len(of), record['text'])
          )
    left_out = _with_several_turns(db, reader, {group for group, *_ in groups})
  pairs = [
    {
      'prompt': json.loads(asked[tasks[group]])['prompt'] if tasks[group] in asked else [],
      'chosen': better,
      'rejected': worse,
      'group': group,
      'margin': high - low,
    }
    for (group, *_), members in groups.items()
    if group not in left_out
    for high, better in members
    for low, worse in members
    if high > low
  ]
  _write(file, ''.join(f'{json.dumps(pair)}\n' for pair in pairs))
  return Pairs(len(pairs), len(left_out))


def _with_several_turns(
  db: sqlite3.Connection, reader: SegmentReader, groups: Collection[str]
) -> set[str]:
  """Returns the groups that have a sample of several turns, or a trajectory of several steps."""
  return {
    sample.group_id
    for sample in _samples(db, reader, groups)
    if sample.step_index or trained_turns(sample) > 1
  }


def _samples(
  db: sqlite3.Connection, reader: SegmentReader, groups: Collection[str]
) -> Iterator[Sample]:
  """Yields the samples of the groups, without samples that the store no longer contains."""
  rows = db.execute(
    'SELECT s.uid, g.name, g.row, o.payload FROM samples s '
    'LEFT JOIN segment_rows g ON g.uid = s.uid AND g.attempt = s.attempt '
    'LEFT JOIN open_segment o ON o.uid = s.uid AND o.attempt = s.attempt '
    f'WHERE s.group_id IN ({NAMED}) AND (g.name IS NOT NULL OR o.payload IS NOT NULL)',
    (json.dumps([*groups]),),
  )
  for uid, name, row, payload in rows:
    yield reader.read([(name, row)])[0] if payload is None else decode_row(payload, uid)


def _conversations(
  directory: pathlib.Path, samples: Sequence[Sample], asked: Mapping[str, Sequence[Message]]
) -> dict[str, tuple[Message, ...]]:
  """Returns, for each sample, the conversation after the task's prompt, keyed by uid. If the policy
  read a prompt other than the task's, such as the first observation of an environment, the
  conversation begins with that prompt.

  Args:
    directory: directory of the run's tokenizer.
    asked: messages of the tasks' prompts, keyed by task uid.
  """
  if not samples:
    return {}
  tokenizer = Tokenizer.from_directory(directory)
  conversations = {}
  for sample in samples:
    prompt = sample.tokens[: sample.prompt_len].tolist()
    messages = asked[sample.task_id]
    try:
      is_asked = bool(messages) and tokenizer.render_prompt(messages) == prompt
    except UserError:
      is_asked = False
    first = () if is_asked else ({'role': 'prompt', 'content': tokenizer.decode(prompt)},)
    conversations[sample.uid] = (*first, *turns_of(tokenizer, sample))
  return conversations


class Imported(NamedTuple):
  """Results of importing a file."""

  file: str
  attached: int
  """Number of verdicts from the file that are now in the inbox, including verdicts that were
  already there.
  """
  pairs: int
  """Number of valid comparisons in the file."""
  refused: list[str]
  """One line, with the reason, for each line of the file and each verdict that was refused."""
  corrections: int
  """Number of corrected answers in the file that are now expert rows of the run."""
  agreement: dict[str, Agreement]
  """Agreement among the judges, over all verdicts in the inbox, keyed by scorer."""

  def to_json(self) -> Json:
    return {**self._asdict(), 'agreement': {k: v._asdict() for k, v in self.agreement.items()}}

  @property
  def lines(self) -> list[str]:
    return [
      *self.refused,
      f'{self.file}: {self.attached} verdicts attached, '
      + (f'{self.corrections} corrections added, ' if self.corrections else '')
      + f'{len(self.refused)} refused',
      *(f'{scorer}: {agreement.line}' for scorer, agreement in self.agreement.items()),
    ]


def import_file(directory: str | os.PathLike, file: pathlib.Path) -> Imported:
  """Attaches the verdicts in a JSON Lines file, and adds its corrections as expert rows. Refused
  lines do not affect the other lines.

  Raises UserError if the file or the store cannot be read.
  """
  attached, refused = 0, []
  verdicts: list[tuple[int, LateVerdict]] = []
  comparisons: list[tuple[int, Comparison]] = []
  corrections: list[tuple[str, Correction]] = []
  for number, line in numbered_lines(file, MAX_LINE):
    try:
      row = parse_line(line, MAX_LINE)
      if isinstance(row, dict) and 'chosen' in row:
        comparisons.append((number, read_comparison(row)))
      elif isinstance(row, dict) and 'correction' in row:
        corrections.append((f'{file}:{number}', _read_correction(row)))
      else:
        verdicts.append((number, read_verdict(row)))
    except UserError as error:
      refused.append(f'{file}:{number}: {error}')
  verdicts += _won(comparisons)
  for begin in range(0, len(verdicts), _AT_ONCE):
    batch = verdicts[begin : begin + _AT_ONCE]
    replies = attach(directory, [verdict for _, verdict in batch])
    attached += sum(reply.refused is None for reply in replies)
    refused += [
      f'{file}:{number}: {reply.line}'
      for (number, _), reply in zip(batch, replies, strict=True)
      if reply.refused is not None
    ]
  corrected = 0
  if corrections:
    try:
      report = add_corrections(Run(pathlib.Path(directory).parent), corrections)
    except UserError as error:  # For example, no stage of the run takes expert rows.
      refused += [f'{where}: {error}' for where, _ in corrections]
    else:
      corrected = report.added + len(report.known)
      refused += report.refused
  return Imported(
    str(file), attached, len(comparisons), refused, corrected, agreements(given(directory))
  )


def _read_correction(row: Mapping[str, Any]) -> Correction:
  if row.keys() != {'uid', 'correction', 'who'}:
    raise UserError(
      f'the line has {", ".join(map(repr, row))[:200]}, wanted uid, correction and who, and '
      'verdicts in separate lines'
    )
  return Correction(row['uid'], row['correction'], row['who'])


class Comparison(NamedTuple):
  """A comparison of two samples of a group by one person."""

  chosen: str
  """uid of the better sample. If the comparison is a tie, it is the uid of either sample."""
  rejected: str
  who: str
  tie: bool
  attempt: int | None
  scorer: str | None


def read_comparison(row: Mapping[str, Any]) -> Comparison:
  """Parses a comparison from a JSON object. Raises UserError if it is malformed."""
  if unknown := [name for name in row if name not in Comparison._fields]:
    raise UserError(
      f'unknown field {unknown[0]!r:.60}; wanted {", ".join(Comparison._fields)}, or a verdict '
      'with uid, value and who'
    )
  if missing := [name for name in ('chosen', 'rejected', 'who') if name not in row]:
    raise UserError(f'{missing[0]} is missing; wanted chosen, rejected and who')
  tie, shared = row.get('tie', False), {name: row.get(name) for name in ('attempt', 'scorer')}
  if not isinstance(tie, bool):
    raise UserError(f'tie is {tie!r:.60}, wanted true or false')
  for name in ('chosen', 'rejected'):  # Checks the types and lengths of all fields.
    LateVerdict(uid=row[name], value=0.0, who=row['who'], **shared)
  if row['chosen'] == row['rejected']:
    raise UserError(f'chosen and rejected are both {row["chosen"]}, wanted two samples of a group')
  if row['chosen'].rpartition('/')[0] != row['rejected'].rpartition('/')[0]:
    raise UserError(
      f'chosen {row["chosen"]} and rejected {row["rejected"]} are samples of different groups'
    )
  return Comparison(row['chosen'], row['rejected'], row['who'], tie, **shared)


def _won(comparisons: Sequence[tuple[int, Comparison]]) -> list[tuple[int, LateVerdict]]:
  """Converts comparisons to verdicts. Returns pairs (line, verdict), where `line` is the number of
  the last line on which the verdict is based.
  """
  wins: dict[tuple, list[float]] = {}
  lines: dict[tuple, int] = {}
  for number, comparison in comparisons:
    outcomes = (0.5, 0.5) if comparison.tie else (1.0, 0.0)
    for uid, won in zip((comparison.chosen, comparison.rejected), outcomes, strict=True):
      key = (uid, comparison.who, comparison.scorer, comparison.attempt)
      wins.setdefault(key, []).append(won)
      lines[key] = number
  return [
    (
      lines[uid, who, scorer, attempt],
      LateVerdict(uid=uid, value=sum(won) / len(won), who=who, scorer=scorer, attempt=attempt),
    )
    for (uid, who, scorer, attempt), won in wins.items()
  ]
