"""Read-only views of a store: a summary, a search for samples, and the histories of a task or a
sample.

The views also work while a run writes to the store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Sample, Segment
from jaxrl_llm.replay import quarantine
from jaxrl_llm.replay.index import ReplayStore, open_store
from jaxrl_llm.replay.segments import (
  SegmentReader,
  decode_row,
  decode_span_row,
  open_segment_reader,
)
from jaxrl_llm.replay.tables import (
  ENTRY,
  INDEX,
  QUARANTINE,
  SEGMENTS,
  Entry,
  State,
  as_state,
  check_readable,
  entry_of,
)

_AT_MOST = 8
"""Maximum number of versions that the summary lists individually."""


@contextlib.contextmanager
def snapshot(directory: str | os.PathLike) -> Iterator[tuple[sqlite3.Connection, SegmentReader]]:
  """Opens a store for reading. Yields a connection to its index, in one read transaction, and a
  reader of its sealed segments. Raises UserError if the index is missing, damaged or of an unknown
  schema.
  """
  path = pathlib.Path(directory) / INDEX
  if not path.is_file():
    raise UserError(
      f'replay store {path}: no such file; give the replay directory of a run (<workdir>/replay); '
      'if the index was lost, jaxrl buffer --rebuild rebuilds it from the journal'
    )
  # Without a write-ahead log (WAL), no process has the index open. The index can then be opened as
  # immutable, which creates no files.
  log = path.with_name(f'{INDEX}-wal')

  def opened(options):
    return sqlite3.connect(
      f'{path.resolve().as_uri()}?{options}', uri=True, isolation_level=None, timeout=5.0
    )

  alone = not log.exists()
  db = opened('immutable=1' if alone else 'mode=ro')
  reader = open_segment_reader(path.parent / SEGMENTS)
  try:
    db.execute('BEGIN')
    # If the log exists now, a run has just begun to write, and the index is no longer immutable.
    if alone and log.exists():
      db.close()
      db = opened('mode=ro')
      db.execute('BEGIN')
    check_readable(db, path)
    yield db, reader
  except sqlite3.DatabaseError as error:
    raise UserError(
      f'replay store {path}: {error}; it is damaged or not a store of this program; jaxrl buffer '
      '--rebuild rebuilds a damaged index from the journal'
    ) from error
  finally:
    reader.close()
    db.close()


def open_copy(directory: str | os.PathLike, into: str | os.PathLike) -> ReplayStore:
  """Opens a copy of a store, so that all read methods of ReplayStore can be used.

  The copy has its own index and a link to the segments of the original. Nothing is written to
  `directory`, and `into` must not exist yet. Raises UserError if the index is damaged, or if the
  index or `segments/` is missing.
  """
  source, copy = pathlib.Path(directory), pathlib.Path(into)
  if not (source / SEGMENTS).is_dir() and (source / INDEX).exists():
    raise UserError(f'replay store {source}: its {SEGMENTS}/ is missing; restore it')
  with snapshot(source) as (index, _):
    copy.mkdir(parents=True)
    with contextlib.closing(sqlite3.connect(copy / INDEX)) as target:
      index.backup(target)
    (max_uses,) = index.execute("SELECT json FROM meta WHERE key = 'max_uses'").fetchone()
  (copy / SEGMENTS).symlink_to((source / SEGMENTS).absolute())
  return open_store(copy, max_uses=json.loads(max_uses))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holdings:
  """Summary of a store's content. Sizes are in bytes."""

  samples: Mapping[str, Mapping[str, int]]
  """Number of samples, keyed by partition ('usual' for samples of the policy, 'expert' for answers
  to imitate), then by state.
  """
  tasks: Mapping[str, int]
  """Number of tasks attempted, keyed by taskset."""
  waiting: tuple[tuple[int, int], ...]
  """(version, number of samples) pairs, newest version first, for samples of the policy that are
  admitted but were never trained on.
  """
  uses: tuple[tuple[str, int, int], ...]
  """(partition, number of uses, number of samples) triples for samples that were trained on. Each
  batch that trains on a sample is one use.
  """
  max_uses: int
  attempts: int
  """Number of attempts (starts of the run)."""
  segments: int
  sealed_samples: int
  sealed_bytes: int
  open_samples: int
  open_bytes: int
  partial_spans: int
  """Number of spans of unfinished samples. A span is a run of tokens that one batch generated."""
  partial_bytes: int
  scores: tuple[tuple[str, str, int, float | None, int], ...]
  """(scorer, status, number of samples, mean score, number of replaced scores) for each scorer and
  status. The mean is None if no score has a value. A score is replaced when the same scorer scores
  the sample again.
  """
  plans: int
  first_plan: int | None
  last_plan: int | None
  unclaimed: tuple[str, ...]
  """Lines of text about `segments/` and `quarantine/`: one line for each of these directories that
  has files that no sample needs.
  """

  @property
  def lines(self) -> list[str]:
    """Lines of text with the summary."""

    def mean(value):
      return 'no value' if value is None else f'mean {value:.4g}'

    tasks = ', '.join(f'{name} {count:,}' for name, count in self.tasks.items())
    return [
      *(_by_state(partition, counts) for partition, counts in self.samples.items()),
      *([f'tasks, taskset: {tasks}'] if tasks else []),
      *_versions(self.waiting),
      *_uses(self.uses, self.max_uses),
      f'attempts of the run: {self.attempts}',
      f'sealed segments {self.segments:,}: {self.sealed_samples:,} samples, '
      f'{self.sealed_bytes / 1e6:,.1f} MB',
      f'open segment: {self.open_samples:,} samples, {self.open_bytes / 1e6:,.1f} MB',
      *(
        [f'partials: {self.partial_spans:,} spans, {self.partial_bytes / 1e6:,.1f} MB']
        if self.partial_spans
        else []
      ),
      *(
        f'scores of {scorer}, {status}: {count:,}, '
        f'{mean(value)}' + (f'; {again:,} given again' if again else '')
        for scorer, status, count, value, again in self.scores
      ),
      f'plans {self.plans:,}'
      + (f': steps {self.first_plan} to {self.last_plan}' if self.plans else ''),
      *self.unclaimed,
    ]


def summary(directory: str | os.PathLike) -> Holdings:
  """Returns a summary of a store's content."""
  with snapshot(directory) as (db, _):
    counted: dict[str, dict[str, int]] = {}
    for partition, state, count in db.execute('SELECT partition, state, samples FROM tallies'):
      counted.setdefault(partition, {})[state] = count
    waiting = db.execute(
      "SELECT version, count(*) FROM samples WHERE state = 'admitted' AND partition = 'usual' "
      'GROUP BY 1 ORDER BY 1 DESC'
    ).fetchall()
    uses = db.execute(
      "SELECT partition, uses, count(*) FROM samples WHERE state = 'trained' GROUP BY 1, 2 ORDER "
      'BY 1 DESC, 2'
    ).fetchall()
    tasks = db.execute('SELECT taskset, count(*) FROM tasks GROUP BY 1 ORDER BY 1').fetchall()
    (max_uses,) = db.execute("SELECT json FROM meta WHERE key = 'max_uses'").fetchone()
    (attempts,) = db.execute('SELECT count(*) FROM attempts').fetchone()
    (segments, rows) = db.execute(
      'SELECT count(*), coalesce(sum(rows), 0) FROM segments'
    ).fetchone()
    (open_rows, open_bytes) = db.execute(
      'SELECT count(*), coalesce(sum(length(payload)), 0) FROM open_segment'
    ).fetchone()
    (spans, span_bytes) = db.execute(
      'SELECT count(*), coalesce(sum(length(payload)), 0) FROM partials'
    ).fetchone()
    scores = db.execute(
      # In a query with max(seq), SQLite takes the other columns from the row with the maximum, so
      # these are the columns of the newest score.
      'SELECT scorer, status, count(*), avg(value), sum(n - 1) FROM (SELECT scorer, status, value, '
      'count(*) AS n, max(seq) FROM scores GROUP BY uid, attempt, scorer) GROUP BY 1, 2'
    ).fetchall()
    (plans, first, last) = db.execute('SELECT count(*), min(step), max(step) FROM plans').fetchone()
  sealed = sum(
    file.stat().st_size for file in (pathlib.Path(directory) / SEGMENTS).glob('*.arrayrecord')
  )

  return Holdings(
    samples={partition: counted[partition] for partition in sorted(counted, reverse=True)},
    tasks=dict(tasks),
    waiting=tuple(waiting),
    uses=tuple(uses),
    max_uses=json.loads(max_uses),
    attempts=attempts,
    segments=segments,
    sealed_samples=rows,
    sealed_bytes=sealed,
    open_samples=open_rows,
    open_bytes=open_bytes,
    partial_spans=spans,
    partial_bytes=span_bytes,
    scores=tuple(scores),
    plans=plans,
    first_plan=first,
    last_plan=last,
    unclaimed=tuple(unclaimed(directory)),
  )


def unclaimed(directory: str | os.PathLike) -> list[str]:
  """Returns one line each for `segments/` and `quarantine/`, if they have files that no sample
  needs.
  """
  # Files are listed before the index is read. A segment that a run seals in between is in the index
  # but not in the list, so it is not reported.
  in_segments = quarantine.files(directory, SEGMENTS)
  with snapshot(directory) as (db, _):
    named = {name for (name,) in db.execute('SELECT name FROM segments')}
  # A .tmp file may be a segment that a run is writing.
  in_segments = {
    name: size
    for name, size in in_segments.items()
    if name not in named and not name.endswith('.tmp')
  }
  in_quarantine = quarantine.files(directory, QUARANTINE)

  def size(sizes):
    return f'{sum(sizes.values()) / 1e6:,.1f} MB in {quarantine.listed([*sizes])}'

  return [
    *(
      [f'{SEGMENTS}/, not in the index (a start moves it to {QUARANTINE}/): {size(in_segments)}']
      if in_segments
      else []
    ),
    *(
      [f'{QUARANTINE}/, claimed by nothing (--clear_quarantine removes it): {size(in_quarantine)}']
      if in_quarantine
      else []
    ),
  ]


def _by_state(partition: str, counts: dict[str, int]) -> str:
  states = ', '.join(f'{state} {counts.get(state, 0):,}' for state in State)
  return f'samples, {partition}, {sum(counts.values()):,}: {states}'


def _versions(waiting: Sequence[tuple[int, int]]) -> list[str]:
  """Returns a line about the versions of the samples that are admitted but were never trained on,
  or no line if there are none.
  """
  parts = [f'{version}: {count:,}' for version, count in waiting[:_AT_MOST]]
  if older := waiting[_AT_MOST:]:
    parts.append(f'{older[-1][0]} to {older[0][0]}: {sum(count for _, count in older):,}')
  return [f'versions of those admitted: {", ".join(parts)}'] if parts else []


def _uses(uses: Sequence[tuple[str, int, int]], max_uses: int) -> list[str]:
  lines = []
  for partition, of in itertools.groupby(uses, key=lambda row: row[0]):
    limit = f', max_uses {max_uses}' if partition == 'usual' else ''
    lines.append(
      f'uses of those trained, {partition}{limit}: '
      + ', '.join(f'{n} times {count:,}' for _, n, count in of)
    )
  return lines


def find(
  directory: str | os.PathLike,
  *,
  state: str | None = None,
  task: str | None = None,
  limit: int = 20,
) -> list[Entry]:
  """Returns the most recently changed samples, newest first.

  Args:
    directory: directory of the store.
    state: state of the samples; None for samples in any state.
    task: id of the samples' task; None for samples of any task.
    limit: maximum number of samples.
  """
  states = [*State] if state is None else [as_state(state)]
  values = [] if task is None else [task]
  # The unary + keeps SQLite from using the index on states, so that it uses the index on tasks.
  where = 'state = ?' if task is None else '+state = ? AND task_id = ?'
  entries = []
  with snapshot(directory) as (db, _):
    # The table's index is on (state, last), so each state needs a separate query.
    for queried in states:
      rows = db.execute(
        f'{ENTRY} WHERE {where} ORDER BY last DESC LIMIT ?', (queried, *values, limit)
      )
      entries += [entry_of(row) for row in rows]
  return sorted(entries, key=lambda entry: -entry.last)[:limit]


def asked(directory: str | os.PathLike, task: str) -> list[str]:
  """Describes a task in lines of text: the number of its visits, the states of its samples, its
  prompt, its reference answer and its media.

  The result is empty if the run never attempted the task.
  """
  with snapshot(directory) as (db, _):
    row = db.execute('SELECT taskset, domain, json FROM tasks WHERE uid = ?', (task,)).fetchone()
    of = 'FROM samples WHERE task_id = ?'
    states = db.execute(f'SELECT state, count(*) {of} GROUP BY 1 ORDER BY 1', (task,)).fetchall()
    (visits,) = db.execute(f'SELECT count(DISTINCT visit) {of}', (task,)).fetchone()
  if row is None:
    return []
  taskset, domain, text = row
  fields = json.loads(text)
  counted = ', '.join(f'{state} {count:,}' for state, count in states)
  return [
    f'{task} of taskset {taskset}, domain {domain}: {visits} visits, samples {counted}',
    f'prompt: {json.dumps(fields["prompt"], ensure_ascii=False)}',
    f'truth: {json.dumps(fields["truth"], ensure_ascii=False)}',
    *(f'{shown["kind"]}: {shown["digest"]}' for shown in fields['media']),
  ]


def history(directory: str | os.PathLike, uid: str) -> list[str]:
  """Describes a sample in lines of text: its transitions, scores and derived values in every
  attempt, and its stored content. Raises UserError if no sample with this uid was issued.
  """
  with snapshot(directory) as (db, reader):
    changes = db.execute(
      'SELECT attempt, step, state, reason FROM transitions WHERE uid = ? ORDER BY seq', (uid,)
    )
    lines = [
      f'attempt {attempt}, step {step}: {state}' + (f' ({reason})' if reason else '')
      for attempt, step, state, reason in changes
    ]
    if not lines:
      raise UserError(
        f'sample {uid!r}: never issued in {directory}; --state or --task lists samples'
      )
    scores = db.execute(
      'SELECT attempt, scorer, status, value, json FROM scores WHERE uid = ? ORDER BY seq', (uid,)
    )
    for attempt, scorer, status, value, text in scores:
      lines.append(f'attempt {attempt}, score of {scorer}: {status}, {value}, {json.loads(text)}')
    made = db.execute(
      'SELECT attempt, operator, json FROM derived WHERE uid = ? ORDER BY seq', (uid,)
    )
    lines += [f'attempt {attempt}, {operator}: {text}' for attempt, operator, text in made]
    for attempt, name, row in db.execute(
      'SELECT attempt, name, row FROM segment_rows WHERE uid = ?', (uid,)
    ):
      (sample,) = reader.read([(name, row)])
      lines.append(f'attempt {attempt}, {SEGMENTS}/{name} record {row}: {_summary(sample)}')
    for attempt, payload in db.execute(
      'SELECT attempt, payload FROM open_segment WHERE uid = ?', (uid,)
    ):
      lines.append(
        f'attempt {attempt}, open segment: {_summary(decode_row(payload, f"open segment, {uid}"))}'
      )
    for attempt, step, payload in db.execute(
      'SELECT attempt, step, payload FROM partials WHERE uid = ? ORDER BY seq', (uid,)
    ):
      span = decode_span_row(payload, f'replay store {directory}, spans of {uid}')
      lines.append(
        f'attempt {attempt}, span of step {step}: {len(span.tokens)} tokens; '
        f'{span.finish or "unfinished"}; weights {_versions_of(span.segments)}'
      )
  return lines


def _versions_of(segments: Sequence[Segment]) -> str:
  return ', '.join(dict.fromkeys(str(segment.version) for segment in segments)) or 'none'


def _summary(sample: Sample) -> str:
  step = f'step {sample.step_index} of {sample.trajectory_id}; ' if sample.step_index else ''
  return (
    f'{step}{len(sample.tokens)} tokens, of which {sample.prompt_len} prompt, '
    f'{int(sample.loss_mask.sum())} trained; weights {_versions_of(sample.segments)}'
  )
