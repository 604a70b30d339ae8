"""Timeline of a run, made from events.jsonl, and the idle time of trainer and rollout.

Each exchange (a request and its reply) becomes a span on a lane. A step lasts from the end of one
batch's training to the end of the next batch's training. It therefore consists of the evaluation
and commit of the previous batch, followed by publication, rollout and training. The first step of
an attempt begins with the attempt's first event.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.core.types import Json
from jaxrl_llm.runtime.events import EDGES, Edge, read

BUSY = {'trainer': {Edge.TRAINING_DATA}, 'rollout': {Edge.ROLLOUT, Edge.SUITE}}
"""Types of exchanges during which a role is busy, keyed by role. At other times, the role is
idle.
"""
LANES = (
  'trainer',
  'rollout',
  'scoring',
  'auxiliary models',
  'replay buffer',
  'weights',
  'memory',
  'taskset',
  'checkpoints',
)
"""Lanes of the timeline, in the order in which they are drawn."""
MAX_STEPS = 12
"""Maximum number of steps that the timeline of a report shows."""
MAX_SPANS = 4000
"""Maximum number of spans that a report draws. If there are more, it shows fewer steps. If a single
step has more, the last spans are left out.
"""


class Span(NamedTuple):
  """An exchange, which lasts from its request to its reply, or a one-way message."""

  edge: Edge
  attempt: int
  step: int
  """Number of completed batches at the time of the request."""
  id: int
  reply: int | None
  """Id of the reply. None for one-way messages and unanswered requests."""
  start: float
  end: float
  """Time of the reply, in seconds since 1970. For an unanswered request, it is the time of the last
  event of the attempt; for a one-way message, it equals `start`.
  """
  fields: Mapping[str, Json]

  @property
  def unanswered(self) -> bool:
    return self.reply is None and EDGES[self.edge].answered


class Step(NamedTuple):
  """One step of the run. If several attempts completed the step, its times are taken from the last
  attempt.
  """

  number: int
  """Number of completed batches at the end of the step."""
  attempt: int
  start: float
  end: float
  idle: Mapping[str, float]
  """Share of the step in which a role was idle, keyed by role (see `BUSY`). The role `rollout` is
  included only if the batch consists of rollouts.
  """


@dataclasses.dataclass(frozen=True)
class Timeline:
  spans: list[Span]
  """Spans, sorted by attempt and then by start."""
  steps: list[Step]
  unreadable: int
  """Number of lines that are not valid events or are replies to unknown requests."""
  missing: int = 0
  """Number of missing messages after the first one that was read, computed from the event
  numbers.
  """
  gap: str = ''
  """Position of the first gap: its attempt, and the number of the last message before it. Empty if
  no message is missing.
  """
  cut: bool = False
  """Whether the log begins in the middle of an attempt, because earlier messages were not read or
  have been deleted.
  """


def load(path: pathlib.Path, limit: int | None = None) -> Timeline:
  """Loads a timeline from the file events.jsonl of a run. The timeline is empty if the file does
  not exist.

  Args:
    limit: maximum number of bytes to read, from the end of the log. If None, the whole log is read.
  """
  cut = False
  spans: list[Span] = []
  asked: dict[tuple[int, int], int] = {}
  begun: dict[int, float] = {}
  ended: dict[int, float] = {}
  latest: dict[int, int] = {}
  """Id of the latest event of each attempt, keyed by attempt."""
  unreadable, missing, skipped, gap = 0, 0, 0, ''
  for event in read(path, limit) if path.is_file() else ():
    if event is None:
      unreadable, skipped = unreadable + 1, skipped + 1
      continue
    if not begun:
      cut = event.id != 0  # The events of each attempt are numbered from 0.
      latest[event.attempt] = event.id - 1
    before = latest.get(event.attempt, -1)
    if (gone := event.id - before - 1 - skipped) > 0:
      gap = gap or f'attempt {event.attempt}, after message {before}'
      missing += gone
    latest[event.attempt], skipped = max(before, event.id), 0
    begun.setdefault(event.attempt, event.t)
    ended[event.attempt] = event.t
    if event.of is None:
      if event.kind == 'request':
        asked[event.attempt, event.id] = len(spans)
      spans.append(
        Span(event.edge, event.attempt, event.step, event.id, None, event.t, event.t, event.fields)
      )
    elif (place := asked.pop((event.attempt, event.of), None)) is None:
      unreadable += not (cut or missing)  # The request may be in the missing part.
    else:
      span = spans[place]
      spans[place] = span._replace(
        reply=event.id, end=max(event.t, span.start), fields={**span.fields, **event.fields}
      )
  for place in asked.values():
    spans[place] = spans[place]._replace(end=ended[spans[place].attempt])
  spans.sort(key=lambda span: (span.attempt, span.start))
  steps = _steps(spans, begun)
  # If the beginning of the attempt is missing, drop its first step, which is incomplete.
  return Timeline(spans, steps[1:] if cut else steps, unreadable, missing, gap, cut)


def _steps(spans: Sequence[Span], begun: Mapping[int, float]) -> list[Step]:
  steps: list[Step] = []
  explored = {
    (s.attempt, s.step)
    for s in spans
    if s.edge == Edge.FETCH and s.fields.get('source') == 'rollouts'
  }
  busy = {
    (attempt, role): _union(
      (s.start, s.end) for s in spans if s.attempt == attempt and s.edge in edges
    )
    for attempt in begun
    for role, edges in BUSY.items()
  }
  for span in spans:
    if span.edge != Edge.TRAINING_DATA or span.unanswered:
      continue
    number = span.step + 1
    same = bool(steps) and steps[-1].attempt == span.attempt
    start = steps[-1].end if same else begun[span.attempt]
    # After a crash, an attempt repeats the steps that were not committed. Only the last repetition
    # of a step is kept.
    while steps and steps[-1].number >= number:
      steps.pop()
    roles = BUSY if (span.attempt, span.step) in explored else ['trainer']
    idle = {role: 1 - _share(busy[span.attempt, role], start, span.end) for role in roles}
    steps.append(Step(number, span.attempt, start, span.end, idle))
  return steps


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
  """Returns the union of intervals as disjoint intervals. Both the given and the returned intervals
  are sorted by start.
  """
  merged: list[tuple[float, float]] = []
  for start, end in intervals:
    if merged and start <= merged[-1][1]:
      merged[-1] = (merged[-1][0], max(merged[-1][1], end))
    else:
      merged.append((start, end))
  return merged


def _share(busy: Sequence[tuple[float, float]], start: float, end: float) -> float:
  """Returns the share of [start, end] that is covered by the disjoint, sorted intervals `busy`."""
  covered = 0.0
  for i in range(bisect.bisect_right(busy, start, key=lambda interval: interval[1]), len(busy)):
    if busy[i][0] >= end:
      break
    covered += min(busy[i][1], end) - max(busy[i][0], start)
  return covered / (end - start) if end > start else 0.0


def rows(spans: Sequence[Span]) -> list[int]:
  """Returns the index of the row in which each span is drawn within its lane.

  Each attempt has separate rows. A span gets the first row of its lane that is free at its start,
  so the spans of a row never overlap.

  Args:
    spans: spans, sorted like `Timeline.spans`.
  """
  free: dict[tuple[int, str], list[int]] = {}
  taken: dict[tuple[int, str], list[tuple[float, int]]] = {}
  assigned = []
  for span in spans:
    lane = span.attempt, EDGES[span.edge].lane
    ends, unused = taken.setdefault(lane, []), free.setdefault(lane, [])
    while ends and ends[0][0] <= span.start:
      heapq.heappush(unused, heapq.heappop(ends)[1])
    row = heapq.heappop(unused) if unused else len(ends)
    heapq.heappush(ends, (span.end, row))
    assigned.append(row)
  return assigned


def payload(timeline: Timeline) -> dict[str, Any] | None:
  """Returns the timeline's data in a report: the last steps of the last attempt that completed any.

  Spans after the last of these steps are included, too. Times are in seconds since the start of the
  first step shown. Returns None if the run has no steps.
  """
  if not timeline.steps:
    return None
  attempt = timeline.steps[-1].attempt
  steps = [step for step in timeline.steps[-MAX_STEPS:] if step.attempt == attempt]
  spans = [
    span for span in timeline.spans if span.attempt == attempt and span.end >= steps[0].start
  ]
  while len(spans) > MAX_SPANS and len(steps) > 1:
    steps = steps[1:]
    spans = [span for span in spans if span.end >= steps[0].start]
  zero, hidden = steps[0].start, max(0, len(spans) - MAX_SPANS)
  spans = spans[:MAX_SPANS]

  def place(start, end):
    return {'t': round(start - zero, 6), 'd': round(end - start, 6)}

  return {
    'lanes': [lane for lane in LANES if any(EDGES[span.edge].lane == lane for span in spans)],
    'edges': {
      edge: {'from': e.source, 'to': e.target, 'lane': e.lane, 'text': e.text}
      for edge, e in EDGES.items()
    },
    'hidden': hidden,
    'steps': [
      {
        'n': s.number,
        **place(s.start, s.end),
        'idle': {role: round(share, 4) for role, share in s.idle.items()},
      }
      for s in steps
    ],
    'end': round(max(steps[-1].end, *(span.end for span in spans)) - zero, 6),
    'spans': [
      {
        'e': s.edge,
        'row': row,
        **place(s.start, s.end),
        'id': s.id,
        'reply': s.reply,
        'unanswered': s.unanswered,
        'fields': {
          name: v if isinstance(v, str) else json.dumps(v) for name, v in s.fields.items()
        },
      }
      for s, row in zip(spans, rows(spans))
    ],
  }
