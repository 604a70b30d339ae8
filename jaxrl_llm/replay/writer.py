"""Changes to the store. Each change is recorded with its step, the number of batches completed at
that time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.records.sample import Sample, encode
from jaxrl_llm.core.records.score import Score
from jaxrl_llm.core.records.span import Span, encode_span
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Json
from jaxrl_llm.replay import groups, segments
from jaxrl_llm.replay.awaited import Awaited
from jaxrl_llm.replay.connection import NAMED, Connection
from jaxrl_llm.replay.tables import (
  AWAITED,
  EXPERT,
  SEGMENTS,
  UNFINISHED,
  Entry,
  Issue,
  Partition,
  State,
  log,
  may_become,
)

_ISSUE = (
  'INSERT INTO samples(uid, attempt, group_id, task_id, visit, partition, step, state, changed, '
  'last, admitted, uses) VALUES (?,?,?,?,?,?,?,?,?,?,?,0)'
)


class StepWriter:
  """Makes changes to the store at one step (number of completed batches).

  Writers are created by `ReplayStore.at`. If several attempts (starts of the run) have issued
  samples with the same uid, the uid denotes the newest sample. If a uid is unknown, or the sample's
  state does not permit the change, a method raises ValueError and changes nothing.
  """

  def __init__(self, connection: Connection, step: int):
    self._connection, self.step = connection, step
    self._db, self._attempt, self._max_uses = connection.db, connection.attempt, connection.max_uses

  def issue(self, rows: Sequence[Issue]) -> None:
    """Records samples that are about to be requested. A uid that was issued before can be issued
    again only if the earlier sample is void.
    """
    with self._connection.transaction():
      entries = self._connection.entries([row.uid for row in rows], missing='skip')
      for entry in entries.values():
        if entry.state != State.VOID:
          raise ValueError(
            f'issue {entry.uid}: already {entry.state} under attempt {entry.attempt}'
          )
      self._insert(rows, 'usual', State.ISSUED)

  def offer(self, tasks: Sequence[Task]) -> None:
    """Adds tasks with prompt, truth and media to the taskset partition. Tasks that are already
    listed are not changed. Recovery after a crash does not remove tasks.
    """

    def content(task):
      return {
        'prompt': [dict(message) for message in task.prompt],
        'truth': task.truth,
        'media': [{'kind': shown.kind, 'digest': shown.digest} for shown in task.media],
      }

    rows = [
      (task.uid, task.taskset, task.domain, self.step, self._attempt, json.dumps(content(task)))
      for task in tasks
    ]
    with self._connection.transaction():
      self._db.executemany('INSERT OR IGNORE INTO tasks VALUES (?,?,?,?,?,?)', rows)

  def join(self, rows: Sequence[Issue]) -> None:
    """Records rows of static data that join a batch. They become issued and admitted at once. The
    store does not contain their bytes.

    Static data may join several batches, so a row that is already recorded is not changed.
    `max_uses` does not apply to these rows.
    """
    with self._connection.transaction():
      entries = self._connection.entries([row.uid for row in rows], missing='skip')
      for row in rows:
        entry = entries.get(row.uid)
        if entry and (entry.partition, entry.group_id, entry.task_id) != (
          'expert',
          row.group_id,
          row.task_id,
        ):
          raise ValueError(
            f'join {row.uid}: already {entry.state}, {entry.partition}, of group '
            f'{entry.group_id!r}, task {entry.task_id!r}; wanted expert, {row.group_id!r}, '
            f'{row.task_id!r}'
          )
      new = [row for row in rows if row.uid not in entries or entries[row.uid].state == State.VOID]
      self._insert(new, 'expert', State.ADMITTED)

  def accept_experts(self, samples: Mapping[str, Sample], lineages: Mapping[str, Json]) -> None:
    """Stores and admits expert rows that were added to the run (`replay.experts`).

    Args:
      samples: the rows, keyed by uid, in the order of their arrival.
      lineages: origin of each row, keyed by uid.
    """
    with self._connection.transaction():
      rows = [
        Issue(
          uid=uid, group_id=row.group_id, task_id=row.task_id, visit=row.visit, partition='expert'
        )
        for uid, row in samples.items()
      ]
      for entry in self._connection.entries([*samples], missing='skip').values():
        if entry.state != State.VOID:
          raise ValueError(
            f'accept {entry.uid}: already {entry.state} under attempt {entry.attempt}'
          )
      self._insert(rows, 'expert', State.ISSUED)
      self._db.executemany(
        'INSERT INTO open_segment(step, attempt, uid, payload) VALUES (?,?,?,?)',
        [(self.step, self._attempt, uid, encode(sample)) for uid, sample in samples.items()],
      )
      self._move([*samples], State.STORED, '')
      self.derive([(uid, EXPERT, lineages[uid]) for uid in samples])
      self._move([*samples], State.ADMITTED, '')

  def extend(self, spans: Mapping[str, Span]) -> None:
    """Stores one more span (run of generated tokens) of each given sample, which becomes partial.

    Args:
      spans: new span of each sample, keyed by uid.
    """
    with self._connection.transaction():
      entries = self._connection.entries(spans)
      self._db.executemany(
        'INSERT INTO partials(step, attempt, uid, payload) VALUES (?,?,?,?)',
        [(self.step, entries[uid].attempt, uid, encode_span(span)) for uid, span in spans.items()],
      )
      self._move(entries, State.PARTIAL, '')

  def append(self, samples: Sequence[Sample]) -> list[str]:
    """Stores finished samples. Returns the uids of those that were accepted. A sample that is no
    longer `issued` or `partial` is not accepted, but counted as a duplicate.
    """
    with self._connection.transaction():
      entries = self._connection.entries(dict.fromkeys(s.uid for s in samples))
      accepted: dict[str, Sample] = {}
      for sample in samples:
        entry = entries[sample.uid]
        if not sample.segments:
          raise ValueError(
            f'append {sample.uid}: it has no segments, so the weights that made it are unknown'
          )
        if (sample.group_id, sample.task_id, sample.visit) != (
          entry.group_id,
          entry.task_id,
          entry.visit,
        ):
          raise ValueError(f'append {sample.uid}: group, task or visit differ from what was issued')
        if entry.state not in UNFINISHED or sample.uid in accepted:
          state = State.STORED if sample.uid in accepted else entry.state
          self._db.execute(
            'INSERT INTO duplicates(step, attempt, uid, state) VALUES (?,?,?,?)',
            (self.step, entry.attempt, sample.uid, state),
          )
        else:
          accepted[sample.uid] = sample
      self._db.executemany(
        'INSERT INTO open_segment(step, attempt, uid, payload) VALUES (?,?,?,?)',
        [
          (self.step, entries[uid].attempt, uid, encode(sample)) for uid, sample in accepted.items()
        ],
      )
      self._move({uid: entries[uid] for uid in accepted}, State.STORED, '')
      self._db.executemany(
        'UPDATE samples SET version = ? WHERE uid = ? AND attempt = ?',
        [(oldest_version(sample), uid, entries[uid].attempt) for uid, sample in accepted.items()],
      )
    return list(accepted)

  def score(self, scores: Sequence[Score]) -> None:
    """Records scores of accepted samples."""
    with self._connection.transaction():
      entries = self._connection.entries(dict.fromkeys(s.uid for s in scores))
      rows = []
      for score in scores:
        if score.value is not None and not math.isfinite(score.value):
          raise ValueError(
            f'score {score.uid}: {score.scorer} gave {score.value}, wanted a finite number, or '
            'None if the sample is unscorable'
          )
        if entries[score.uid].state in UNFINISHED:
          raise ValueError(f'score {score.uid}: it is not finished yet')
        details = json.dumps(
          {
            'parts': dict(score.parts),
            'turn_values': list(score.turn_values),
            'evidence': dict(score.evidence),
            'time': score.time,
          }
        )
        rows.append(
          (
            self.step,
            entries[score.uid].attempt,
            score.uid,
            score.scorer,
            score.value,
            score.status,
            details,
          )
        )
      self._db.executemany(
        'INSERT INTO scores(step, attempt, uid, scorer, value, status, json) VALUES '
        '(?,?,?,?,?,?,?)',
        rows,
      )

  def derive(self, rows: Sequence[tuple[str, str, Json]]) -> None:
    """Records values that operators, such as processors, derived from accepted samples.

    Args:
      rows: (uid, operator name, JSON value) of each value.
    """
    with self._connection.transaction():
      entries = self._connection.entries(dict.fromkeys(uid for uid, *_ in rows))
      for entry in entries.values():
        if entry.state in UNFINISHED:
          raise ValueError(f'derive {entry.uid}: it is not finished yet')
      self._db.executemany(
        'INSERT INTO derived(step, attempt, uid, operator, json) VALUES (?,?,?,?,?)',
        [
          (self.step, entries[uid].attempt, uid, operator, json.dumps(value))
          for uid, operator, value in rows
        ],
      )

  def wait_for_rewards(self, texts: Mapping[str, str], awaited: Awaited) -> None:
    """Records that stored samples, the members of one group, wait for delayed rewards.

    Args:
      texts: text to show to the people and programs that judge a sample, keyed by the sample's uid.
    """
    with self._connection.transaction():
      self.derive([(uid, AWAITED, awaited.to_json(text)) for uid, text in texts.items()])
      self._move([*texts], State.AWAITING, '')

  def admit(self, uids: Sequence[str]) -> None:
    with self._connection.transaction():
      self._move(uids, State.ADMITTED, '')

  def drop(self, uids: Sequence[str], reason: str) -> None:
    if not reason:
      raise ValueError('drop: no reason given')
    with self._connection.transaction():
      self._move(uids, State.DROPPED, reason)

  def expire(self, uids: Sequence[str]) -> None:
    with self._connection.transaction():
      self._move(uids, State.EXPIRED, '')

  def evict(self, *, before_version: int | None, capacity: int | None) -> dict[str, int]:
    """Expires groups that wait to be drawn: first the groups of old versions, then the oldest
    remaining groups if more than `capacity` remain.

    A group expires as a whole or not at all. It cannot expire, and does not count towards the
    capacity, if any of its samples was trained on, was sealed (because a batch drew it) or is not
    admitted yet.

    Args:
      before_version: groups of a version older than this expire. If None, age does not matter.
      capacity: maximum number of groups to keep. The groups of the newest versions are kept and,
        among equal versions, the groups that were admitted last. If None, the number is unlimited.

    Returns:
      Number of expired samples, keyed by reason: 'version' or 'capacity'.
    """
    with self._connection.transaction():
      expired = groups.to_evict(
        self._db, before_version=before_version, capacity=capacity, step=self.step
      )
      for reason, uids in expired.items():
        self._move(uids, State.EXPIRED, reason)
    return {reason: len(uids) for reason, uids in expired.items()}

  def seal(self, uids: Sequence[str]) -> dict[str, segments.Ref]:
    """Seals samples that are admitted or trained: moves those in the open segment (a table of the
    index) to a new sealed segment file. Returns (file name, row) of all given samples, keyed by
    uid. Other threads can change the store while the file is written.
    """
    with self._connection.sealing:
      with self._connection.lock:
        refs, payloads = self._to_seal(uids)
        (count,) = self._db.execute(
          'SELECT count(*) FROM segments WHERE step = ?', (self.step,)
        ).fetchone()
      if payloads:
        # The file is written without the store's lock, which the event loop takes to admit groups.
        name = f'{self.step:08d}-{self._attempt:03d}-{count:03d}{segments.SUFFIX}'
        segments.write_segment(
          self._connection.directory / SEGMENTS, name, [data for _, data in payloads.values()]
        )
        self._record_segment(name, {uid: attempt for uid, (attempt, _) in payloads.items()})
        refs |= {uid: (name, row) for row, uid in enumerate(payloads)}
    return {uid: refs[uid] for uid in uids}

  def _to_seal(
    self, uids: Sequence[str]
  ) -> tuple[dict[str, segments.Ref], dict[str, tuple[int, bytes]]]:
    """Returns the locations of the samples that are already sealed, and (attempt, bytes) of the
    other samples, both keyed by uid. Raises ValueError if a sample cannot be sealed.
    """
    self._check_sealable(uids)
    refs, rows = self._connection.places(uids), self._connection.open_rows(uids)
    new = [uid for uid in uids if uid not in refs]
    if missing := [uid for uid in new if uid not in rows]:
      if self._connection.entries(missing)[missing[0]].partition == 'expert':
        raise ValueError(f'seal {missing[0]}: the bytes of static rows are not in the store')
      raise RunError(
        f'seal {missing[0]}: its bytes are in no segment; run the audit on '
        f'{self._connection.directory}'
      )
    return refs, {uid: rows[uid] for uid in new}

  def _check_sealable(self, uids: Sequence[str]) -> None:
    for entry in self._connection.entries(uids).values():
      if entry.state not in (State.ADMITTED, State.TRAINED):
        raise ValueError(f'seal {entry.uid}: it is {entry.state}, wanted admitted or trained')

  def _record_segment(self, name: str, attempts: Mapping[str, int]) -> None:
    """Records a new segment file in the index, and deletes its samples from the open segment.
    Raises ValueError if a sample can no longer be sealed; recovery then sets the file aside.

    Args:
      attempts: attempt of each sample, keyed by uid in the order of the file's rows.
    """
    with self._connection.transaction():
      self._check_sealable([*attempts])
      self._db.execute(
        'INSERT INTO segments VALUES (?,?,?,?)', (name, self.step, self._attempt, len(attempts))
      )
      self._db.executemany(
        'INSERT INTO segment_rows VALUES (?,?,?,?)',
        [(name, row, uid, attempt) for row, (uid, attempt) in enumerate(attempts.items())],
      )
      self._db.execute(
        f'DELETE FROM open_segment WHERE uid IN ({NAMED})', (json.dumps([*attempts]),)
      )

  def trained(self, uids: Sequence[str]) -> None:
    """Records that the batch of this step trained on these samples.

    A sample of the policy must be in a sealed segment file, and fewer than `max_uses` earlier
    batches may have trained on it.
    """
    with self._connection.transaction():
      refs = self._connection.places(uids)
      entries = self._connection.entries(uids)
      for uid, entry in entries.items():
        if entry.partition == 'usual' and uid not in refs:
          raise ValueError(f'trained {uid}: it was not sealed')
        if entry.partition == 'usual' and entry.uses >= self._max_uses:
          raise ValueError(
            f'trained {uid}: it was already used {entry.uses} times, max_uses is {self._max_uses}'
          )
        if entry.state == State.TRAINED and entry.changed == self.step:
          raise ValueError(
            f'trained {uid}: the batch of step {self.step} has already trained on it'
          )
      self._move(entries, State.TRAINED, '')

  def record_plan(self, plan: Any) -> None:
    """Stores the plan of this step's batch as JSON."""
    with self._connection.transaction():
      self._db.execute(
        'INSERT INTO plans VALUES (?,?,?)', (self.step, self._attempt, json.dumps(plan))
      )

  def _insert(self, rows: Sequence[Issue], partition: Partition, state: State) -> None:
    """Inserts new samples in the state `issued`, and then moves them to `state` if that differs.

    Both changes are made inside the caller's transaction.
    """
    for row in rows:
      if row.partition != partition:
        raise ValueError(f'{row.uid}: partition {row.partition!r}, wanted {partition!r}')
    changes = dict.fromkeys((State.ISSUED, state))
    last = [
      log(self._db, [(self.step, self._attempt, row.uid, change, '') for row in rows])
      for change in changes
    ][-1]
    admitted = self.step if state == State.ADMITTED else None
    self._db.executemany(
      _ISSUE,
      [
        (
          r.uid,
          self._attempt,
          r.group_id,
          r.task_id,
          r.visit,
          partition,
          self.step,
          state,
          self.step,
          seq,
          admitted,
        )
        for r, seq in zip(rows, last)
      ],
    )

  def _move(self, samples: Sequence[str] | Mapping[str, Entry], state: State, reason: str) -> None:
    """Moves samples to another state.

    Args:
      samples: uids of the samples. A caller that has read the samples' current index rows passes
        these instead, keyed by uid.
    """
    entries = samples if isinstance(samples, Mapping) else self._connection.entries(samples)
    for entry in entries.values():
      if not may_become(entry.partition, entry.state, state):
        raise ValueError(f'{entry.uid}: is {entry.state}, cannot become {state}')
      if self.step < entry.changed:
        raise ValueError(
          f'{entry.uid}: became {entry.state} at step {entry.changed}, cannot become {state} at '
          f'{self.step}'
        )
    last = log(
      self._db, [(self.step, entry.attempt, uid, state, reason) for uid, entry in entries.items()]
    )
    admitted, use = (self.step if state == State.ADMITTED else None), int(state == State.TRAINED)
    self._db.executemany(
      'UPDATE samples SET state = ?, changed = ?, last = ?, admitted = coalesce(?, admitted), uses '
      '= uses + ? WHERE uid = ? AND attempt = ?',
      [
        (state, self.step, seq, admitted, use, uid, entry.attempt)
        for (uid, entry), seq in zip(entries.items(), last)
      ],
    )


def oldest_version(sample: Sample) -> int | None:
  """Returns the step of the oldest weights that generated any part of the sample. None for expert
  rows.
  """
  return min((segment.version.step for segment in sample.segments), default=None)
