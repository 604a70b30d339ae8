"""Audit of a store: checks, from its files alone, that every issued sample is in exactly one state,
such as trained or dropped, and that its bytes are stored where this state requires.

Invariant: the audit does not trust the states and counts in the index. It derives each sample's
state from the recorded transitions, recomputes all counts, and reads and decodes the bytes of every
sample.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import os
import pathlib
import sqlite3
from collections.abc import Iterable, Iterator

from jaxrl_llm.core.records.sample import Sample, step_uid
from jaxrl_llm.core.records.span import decode_span
from jaxrl_llm.replay import experts
from jaxrl_llm.replay.browse import snapshot, unclaimed
from jaxrl_llm.replay.feedback import Feedback, account
from jaxrl_llm.replay.index import ReplayStore
from jaxrl_llm.replay.journal import readable
from jaxrl_llm.replay.segments import SegmentError, SegmentReader, decode_row
from jaxrl_llm.replay.tables import IS_ADDED, LIVE, State, may_become
from jaxrl_llm.replay.writer import oldest_version

_ROWS_AT_ONCE = 256
_NAMED_AT_MOST = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditReport:
  """Results of an audit."""

  ok: bool
  issued: int
  """Number of samples issued in all attempts (starts of the run)."""
  states: dict[str, int]
  """Number of samples in each state; the numbers add up to `issued`."""
  partitions: dict[str, int]
  """Number of samples in each partition: 'usual' for samples of the policy, 'expert' for answers to
  imitate. The numbers add up to `issued`.
  """
  reasons: dict[str, int]
  """Number of samples per final state and reason, keyed like 'dropped(timeout)'."""
  uses: dict[int, int]
  """Number of the policy's samples, keyed by the number of batches (at least 1) that trained on
  them.
  """
  duplicates: int
  """Number of completed samples that were not accepted, because they arrived twice or too late."""
  rescored: int
  """Number of scores that replaced an earlier score from the same scorer."""
  live: tuple[str, ...]
  """uids of samples that are still issued, partial, stored, awaiting or admitted."""
  unscored: tuple[str, ...]
  """uids of samples in state 'stored' that have no score."""
  lost: tuple[str, ...]
  """uids of samples whose content should exist but cannot be read."""
  unclaimed: tuple[str, ...]
  """One line each for `segments/` and `quarantine/` if they contain files that belong to no sample.
  These files are not problems.
  """
  feedback: str
  """One line with the numbers of used, waiting, unused and lost verdicts in the inbox; empty if
  there are no verdicts.
  """
  experts: str
  """One line with the numbers of expert rows that were added to the run, by status; empty if there
  are none.
  """
  problems: tuple[str, ...]
  """One line for each problem; empty if `ok`."""

  @property
  def lines(self) -> list[str]:
    """Lines of text with the report."""
    terminal = {state: count for state, count in self.states.items() if state not in LIVE}
    return [
      f'issued {self.issued} = '
      + ' + '.join(f'{state} {count}' for state, count in self.states.items())
      + f'; results that came twice or late: {self.duplicates}, '
      f'scores that came again: {self.rescored}',
      'partitions: '
      + ', '.join(f'{partition} {count}' for partition, count in sorted(self.partitions.items())),
      f'ended {sum(terminal.values())}, live {_listed(self.live)}',
      *([f'stored and never scored {_listed(self.unscored)}'] if self.unscored else []),
      *(f'{reason}: {count}' for reason, count in sorted(self.reasons.items())),
      *(
        [f'trained: {", ".join(f"{n} times {self.uses[n]}" for n in sorted(self.uses))}']
        if self.uses
        else []
      ),
      *([f'bytes lost of {_listed(self.lost)}'] if self.lost else []),
      *self.unclaimed,
      *([self.feedback] if self.feedback else []),
      *([self.experts] if self.experts else []),
      *(f'PROBLEM {problem}' for problem in self.problems),
      'audit ok' if self.ok else f'audit FAILED: {len(self.problems)} problems',
    ]


def _listed(uids: tuple[str, ...]) -> str:
  more = ['… (--state lists those of one state)'] if len(uids) > _NAMED_AT_MOST else []
  return f'{len(uids)}: {", ".join([*uids[:_NAMED_AT_MOST], *more])}' if uids else '0'


def audit(store: ReplayStore | str | os.PathLike) -> AuditReport:
  """Audits a store, given as an object or by its directory. A run may write to the store at the
  same time, because the audit reads a snapshot of the index.
  """
  directory = store.directory if isinstance(store, ReplayStore) else store
  with snapshot(directory) as (db, reader):
    feedback, added = account(db, directory), experts.account(db, directory)
    return _Audit(db, reader, pathlib.Path(directory)).report(unclaimed(directory), feedback, added)


class _Audit:
  """Audit of one snapshot. Memory use grows with the number of live, lost and faulty samples, but
  not with the number of all samples.
  """

  def __init__(self, db: sqlite3.Connection, reader: SegmentReader, directory: pathlib.Path):
    self._db, self._reader, self._directory = db, reader, directory
    self._max_uses = json.loads(
      db.execute("SELECT json FROM meta WHERE key = 'max_uses'").fetchone()[0]
    )
    self._states: collections.Counter[tuple[str, str]] = collections.Counter()
    self._reasons: collections.Counter[str] = collections.Counter()
    self._uses: collections.Counter[int] = collections.Counter()
    self._live: list[str] = []
    self._lost: list[str] = []

  def report(
    self, unclaimed: list[str], feedback: Feedback, added: experts.Accounts
  ) -> AuditReport:
    """Runs all checks.

    Args:
      unclaimed: lines for `AuditReport.unclaimed`.
      feedback: numbers of used, waiting, unused and lost verdicts in the inbox.
      added: numbers of expert rows that were added to the run.
    """
    db = self._db
    problems = [
      *self._transitions(),
      *self._tallies(),
      *self._locations(),
      *self._sealed(),
      *self._open(),
      *self._partial(),
      *self._tasks(),
      *self._left_behind(),
      *self._journal(),
      *feedback.problems,
      *added.problems,
    ]
    (issued,) = db.execute('SELECT count(*) FROM samples').fetchone()
    states, partitions = collections.Counter(), collections.Counter()
    for (partition, state), count in self._states.items():
      states[state] += count
      partitions[partition] += count
    if states.total() != issued:
      problems.append(f'{issued} samples were issued, but the states add up to {states.total()}')
    (duplicates,) = db.execute('SELECT count(*) FROM duplicates').fetchone()
    (rescored,) = db.execute(
      'SELECT coalesce(sum(n - 1), 0) FROM (SELECT count(*) AS n FROM scores GROUP BY uid, '
      'attempt, scorer)'
    ).fetchone()
    unscored = db.execute(
      "SELECT uid FROM samples s WHERE state = 'stored' AND NOT EXISTS "
      '(SELECT 1 FROM scores c WHERE c.uid = s.uid AND c.attempt = s.attempt) ORDER BY uid'
    )
    return AuditReport(
      ok=not problems,
      issued=issued,
      states={str(state): states[state] for state in State},
      partitions=dict(partitions),
      reasons=dict(self._reasons),
      uses=dict(self._uses),
      duplicates=duplicates,
      rescored=rescored,
      live=tuple(self._live),
      unscored=tuple(uid for (uid,) in unscored),
      lost=tuple(sorted(self._lost)),
      unclaimed=tuple(unclaimed),
      feedback=feedback.line,
      experts=added.line,
      problems=tuple(problems),
    )

  def _transitions(self) -> Iterator[str]:
    """Derives each sample's state from its transitions, and compares it with the state in the
    index.
    """
    log = self._db.execute(
      'SELECT s.uid, s.attempt, s.partition, s.step, s.state, s.changed, s.last, s.admitted, '
      's.uses, s.version, t.seq, t.step, t.state, t.reason FROM samples s LEFT JOIN transitions t '
      'USING (uid, attempt) ORDER BY s.uid, s.attempt, t.seq'
    )
    for uid, of_uid in itertools.groupby(log, key=lambda row: row[0]):
      counting, trained, partition = 0, collections.Counter(), ''
      for row, changes in itertools.groupby(of_uid, key=lambda row: row[:10]):
        changes = [
          (seq, step, State(state), reason)
          for *_, seq, step, state, reason in changes
          if seq is not None
        ]
        name, partition, state = f'{uid} (attempt {row[1]})', row[2], row[4]
        counting += state != State.VOID
        trained.update(step for _, step, after, _ in changes if after == State.TRAINED)
        if not changes:
          yield f'{name}: was issued but has no transition'
          continue
        yield from self._replayed(name, row, changes)
      if counting > 1:
        yield f'{uid}: counts in {counting} attempts'
      yield from self._used(uid, partition, trained)
    for uid, attempt in self._db.execute(
      'SELECT DISTINCT uid, attempt FROM transitions t WHERE NOT EXISTS (SELECT 1 FROM samples s '
      'WHERE s.uid = t.uid AND s.attempt = t.attempt)'
    ):
      yield f'{uid} (attempt {attempt}): has transitions but was never issued'

  def _replayed(
    self, name: str, row: tuple, changes: list[tuple[int, int, State, str]]
  ) -> Iterator[str]:
    uid, _, partition, issued, state, *repeated = row
    if changes[0][1:3] != (issued, State.ISSUED):
      yield (
        f'{name}: its first transition is {changes[0][2]} at step {changes[0][1]}, wanted issued '
        f'at step {issued}'
      )
    for (_, before_step, before, _), (_, step, after, _) in itertools.pairwise(changes):
      if not may_become(partition, before, after):
        yield f'{name}: went from {before} to {after}, which partition {partition} does not permit'
      # A transition to void has the step of the recovered commit, which may be earlier than the
      # step of the sample's previous transition.
      if step < before_step and after != State.VOID:
        yield f'{name}: {after} at step {step}, after {before} at step {before_step}'
    steps = collections.defaultdict(list)
    for _, step, after, _ in changes:
      steps[after].append(step)
    if len(steps[State.STORED]) > 1:
      yield f'{name}: accepted more than once'
    seq, step, last, reason = changes[-1]
    if state != last:
      yield f'{name}: the index says {state}, but its last transition is to {last}'
    admitted = steps[State.ADMITTED][0] if steps[State.ADMITTED] else None
    wanted = [step, seq, admitted, len(steps[State.TRAINED])]
    if repeated[:4] != wanted:
      yield (
        f'{name}: the index says changed, last, admitted, uses {repeated[:4]}, but its transitions '
        f'say {wanted}'
      )
    if (repeated[4] is None) != (partition == 'expert' or not steps[State.STORED]):
      yield (
        f'{name}: the index says version {repeated[4]}, but it was accepted '
        f'{len(steps[State.STORED])} times'
      )
    self._states[partition, last] += 1
    if last in LIVE:
      self._live.append(uid)
    if reason:
      self._reasons[f'{last}({reason})'] += 1

  def _used(self, uid: str, partition: str, trained: collections.Counter[int]) -> Iterator[str]:
    """Checks the number of batches that trained on a sample, counted over all attempts."""
    uses = trained.total()
    if partition == 'usual':
      if uses > self._max_uses:
        yield f'{uid}: trained {uses} times, max_uses is {self._max_uses}'
      if uses:
        self._uses[uses] += 1
    for step, count in trained.items():
      if count > 1:
        yield f'{uid}: trained twice in the batch of step {step}'

  def _tallies(self) -> Iterator[str]:
    kept = self._db.execute('SELECT partition, state, samples FROM tallies WHERE samples != 0')
    kept = {(partition, state): count for partition, state, count in kept}
    for key in sorted(kept.keys() | self._states.keys()):
      if kept.get(key, 0) != self._states[key]:
        yield (
          f'{key[0]} {key[1]}: the index counts {kept.get(key, 0)} samples, but by their '
          f'transitions they are {self._states[key]}'
        )

  def _locations(self) -> Iterator[str]:
    """Checks where each sample's bytes are stored: in the open segment, in a sealed segment, or
    nowhere.

    Issued, partial and void samples have no bytes in segments, and neither do rows of static data.
    Stored, awaiting and admitted samples have bytes in exactly one segment. Trained samples have
    bytes in exactly one segment, which is sealed. Dropped and expired samples have bytes in at most
    one segment.
    """
    for uid, attempt, static, state, opened, sealed in self._db.execute(
      f"SELECT s.uid, s.attempt, s.partition = 'expert' AND NOT ({IS_ADDED}), s.state, "
      'o.uid IS NOT NULL, r.uid IS NOT NULL FROM samples s LEFT JOIN open_segment o ON o.uid = '
      's.uid AND o.attempt = s.attempt LEFT JOIN segment_rows r ON r.uid = s.uid AND r.attempt = '
      's.attempt'
    ):
      fine = {
        State.ISSUED: opened + sealed == 0,
        State.PARTIAL: opened + sealed == 0,
        State.VOID: opened + sealed == 0,
        State.STORED: opened + sealed == 1,
        State.AWAITING: opened + sealed == 1,
        State.ADMITTED: opened + sealed == 1,
        State.TRAINED: (opened, sealed) == (0, 1),
      }.get(state, opened + sealed <= 1)
      if not (opened + sealed == 0 if static else fine):
        if (
          not static
          and state in (State.STORED, State.AWAITING, State.ADMITTED, State.TRAINED)
          and not opened + sealed
        ):
          self._lost.append(uid)
        status = f'{state} (expert)' if static else state
        yield (
          f'{uid} (attempt {attempt}): is {status}, but its bytes are in {opened} open and '
          f'{sealed} sealed segments'
        )
    for table in ('open_segment', 'segment_rows', 'scores', 'derived', 'duplicates', 'partials'):
      for uid, attempt in self._db.execute(
        # Table names cannot be SQL parameters. The names in this string are constants.
        f'SELECT DISTINCT uid, attempt FROM {table} t WHERE NOT EXISTS (SELECT 1 FROM samples s '
        'WHERE s.uid = t.uid AND s.attempt = t.attempt)'
      ):
        yield f'{uid} (attempt {attempt}): is in table {table} but was never issued'

  def _sealed(self) -> Iterator[str]:
    """Checks that each row that the index lists for a sealed segment exists in the segment's file
    and contains the sample that the index names.
    """
    for name, rows in self._db.execute(
      'SELECT g.name, g.rows FROM segments g WHERE rows != (SELECT count(*) FROM segment_rows r '
      'WHERE r.name = g.name)'
    ):
      yield f'segment {name}: has {rows} rows, but the index lists a different number'
    for (name,) in self._db.execute(
      'SELECT name FROM segment_rows EXCEPT SELECT name FROM segments'
    ):
      yield f'segment {name}: the index lists its rows but not the segment'
    cursor = self._db.execute(
      'SELECT r.name, r.row, r.uid, s.version FROM segment_rows r LEFT JOIN samples s USING (uid, '
      'attempt) ORDER BY r.name, r.row'
    )
    while rows := cursor.fetchmany(_ROWS_AT_ONCE):
      yield from self._rows(rows)

  def _rows(self, rows: list[tuple[str, int, str, int | None]]) -> Iterator[str]:
    found = self._reader.read_each([(name, row) for name, row, *_ in rows])
    for (name, row, uid, version), sample in zip(rows, found):
      if isinstance(sample, SegmentError):
        self._lost.append(uid)
        yield f'{uid}: lost: {sample}'
      else:
        yield from _identity(f'segment {name}: row {row}', uid, version, sample)
        yield from self._step(sample)

  def _tasks(self) -> Iterator[str]:
    """Checks that the store lists the task of every policy sample, unless it lists no tasks."""
    (strangers,) = self._db.execute(
      "SELECT count(*) FROM samples s WHERE partition = 'usual' AND EXISTS (SELECT 1 FROM tasks) "
      'AND NOT EXISTS (SELECT 1 FROM tasks t WHERE t.uid = s.task_id)'
    ).fetchone()
    if strangers:
      yield f'{strangers} samples belong to tasks that the taskset partition does not list'

  def _left_behind(self) -> Iterator[str]:
    """Checks for two kinds of samples that a fault may leave behind.

    The first is a sample that is still issued or partial although other samples of its group have
    been admitted or have ended. The second is a sample that arrived twice in one step and was
    scored twice by the same scorer: its newest score may belong to the second arrival, which was
    not accepted.
    """
    for uid, attempt, group, state in self._db.execute(
      'SELECT uid, attempt, group_id, state FROM samples s WHERE '
      "state IN ('issued', 'partial') AND EXISTS (SELECT 1 "
      'FROM samples m WHERE '
      'm.group_id = s.group_id AND m.attempt = s.attempt AND m.last > s.last AND '
      "m.state NOT IN ('issued', 'partial', 'stored', 'awaiting', 'void')) ORDER BY seq"
    ):
      yield f'{uid} (attempt {attempt}): is {state}, but its group {group} has ended without it'
    for uid, attempt, scorer, step in self._db.execute(
      'SELECT uid, attempt, scorer, step FROM (SELECT DISTINCT uid, attempt, step FROM duplicates) '
      'CROSS JOIN scores USING (uid, attempt, step) GROUP BY uid, attempt, scorer, step HAVING '
      'count(*) > 1'
    ):
      yield (
        f'{uid} (attempt {attempt}): arrived twice and was scored twice by {scorer} at step '
        f'{step}; the score in force may belong to the result that was not accepted'
      )

  def _journal(self) -> Iterator[str]:
    """Checks that the journal is readable up to the last write that the index records. Stores of
    older program versions have no journal.
    """
    if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'journal'").fetchone():
      return
    for (written,) in self._db.execute('SELECT bytes FROM journal'):
      if (end := readable(self._directory)) < written:
        yield (
          f'journal: damaged, only {end} of {written} bytes are readable; remove it, and the next '
          'start recreates it from the index'
        )

  def _partial(self) -> Iterator[str]:
    """Checks that every partial sample has one readable span for each of its transitions to
    `partial`.
    """
    for uid, attempt, state, became, kept in self._db.execute(
      'SELECT s.uid, s.attempt, s.state, (SELECT count(*) FROM transitions t WHERE t.uid = s.uid '
      "AND t.attempt = s.attempt AND t.state = 'partial'), (SELECT count(*) FROM partials p WHERE "
      'p.uid = s.uid AND p.attempt = s.attempt) FROM samples s'
    ):
      # A sample in a final state may have fewer spans than transitions, because `prune` deletes its
      # spans.
      if kept > became or (state == State.PARTIAL and kept < became):
        self._lost += [uid] if kept < became else []
        yield f'{uid} (attempt {attempt}): has {kept} spans, but its transitions say {became}'
    for uid, payload in self._db.execute('SELECT uid, payload FROM partials'):
      try:
        decode_span(payload)
      except ValueError as error:
        self._lost.append(uid)
        yield f'{uid}: lost: {error}'

  def _open(self) -> Iterator[str]:
    for uid, version, payload in self._db.execute(
      'SELECT o.uid, s.version, o.payload FROM open_segment o LEFT JOIN samples s USING (uid, '
      'attempt)'
    ):
      try:
        sample = decode_row(payload, f'open segment, {uid}')
      except SegmentError as error:
        self._lost.append(uid)
        yield f'{uid}: lost: {error}'
      else:
        yield from _identity(f'open segment: the row of {uid}', uid, version, sample)
        yield from self._step(sample)

  def _step(self, sample: Sample) -> Iterator[str]:
    """If the sample is a later step of a trajectory, checks that the step before it was issued and
    is in the same state, because a trajectory is trained on or dropped as a whole.
    """
    if not sample.step_index:
      return
    before = step_uid(sample.trajectory_id, sample.step_index - 1)
    states = dict(
      self._db.execute(
        'SELECT uid, state FROM samples WHERE uid IN (?, ?) ORDER BY attempt', (before, sample.uid)
      )
    )
    if before not in states:
      yield f'{sample.uid}: is step {sample.step_index}, but step {before} was never issued'
    elif sample.uid in states and states[before] != states[sample.uid]:
      yield (
        f'{sample.uid}: is {states[sample.uid]}, but the step before it, {before}, is '
        f'{states[before]}'
      )


def _identity(where: str, uid: str, version: int | None, sample: Sample) -> Iterable[str]:
  if sample.uid != uid:
    yield f'{where} contains {sample.uid}, but the index says {uid}'
  elif oldest_version(sample) != version:
    yield f'{where} has version {oldest_version(sample)}, but the index says {version}'
  if sample.step_index and sample.uid != step_uid(sample.trajectory_id, sample.step_index):
    yield (
      f'{where} is step {sample.step_index} of trajectory {sample.trajectory_id}, but its uid is '
      f'{sample.uid}'
    )
