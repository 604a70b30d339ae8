"""Exports a run's events as a trace for ui.perfetto.dev and chrome://tracing.

In the trace, each attempt (start of the run) appears as a process. Each lane of the timeline is a
thread, or several threads if its spans overlap. Each component that sends requests also has a
thread, with a mark where a request is sent and a mark where its reply arrives. An arrow leads from
the first mark through the span to the second mark.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.runtime import events
from jaxrl_llm.runtime.events import EDGES
from jaxrl_llm.runtime.timeline import Span, load, rows

FILE = 'perfetto.json'
MARK_US = 1.0
"""Duration in microseconds of a mark. Marks are short spans, because the viewers draw arrows only
between spans.
"""

Row = dict[str, Any]


def write(workdir: pathlib.Path, target: pathlib.Path | None = None) -> pathlib.Path:
  """Writes the trace of the run's events and returns the path of the file.

  Args:
    target: file to write. If None, it is `<workdir>/perfetto.json`.

  Raises:
    UserError: the run has no events, or the file cannot be written.
  """
  source, path = workdir / events.FILE, target or workdir / FILE
  if not source.is_file():
    raise UserError(
      f'--workdir={workdir}: has no {events.FILE}; give the directory of a run that has started'
    )
  document = {'displayTimeUnit': 'ms', 'traceEvents': trace(load(source).spans)}
  temporary = path.with_name(path.name + '.tmp')
  try:
    temporary.write_text(json.dumps(document, separators=(',', ':')), encoding='utf-8')
    temporary.replace(path)
  except OSError as error:
    raise UserError(
      f'--perfetto={path}: {error.strerror}; name a file that can be written'
    ) from error
  return path


def trace(spans: list[Span]) -> list[Row]:
  """Converts the spans of a timeline to trace events.

  Times are in microseconds from the start of the earliest span.
  """
  zero = min((span.start for span in spans), default=0.0)
  threads: dict[tuple[int, str], int] = {}
  output: list[Row] = []

  def thread(attempt: int, name: str) -> Row:
    known = (attempt, name) in threads
    place = {'pid': attempt + 1, 'tid': threads.setdefault((attempt, name), len(threads) + 1)}
    if not known:
      output.append(
        {'ph': 'M', 'name': 'process_name', **place, 'args': {'name': f'attempt {attempt}'}}
      )
      output.append({'ph': 'M', 'name': 'thread_name', **place, 'args': {'name': name}})
    return place

  for flow, (span, row) in enumerate(zip(spans, rows(spans)), start=1):
    ends, start = EDGES[span.edge], round((span.start - zero) * 1e6, 3)
    end = round((span.end - zero) * 1e6, 3)
    asker = thread(span.attempt, f'{ends.source}: messages')
    common = {'name': span.edge, 'cat': 'event'}
    args = {'step': span.step, 'id': span.id, **span.fields}
    output.append({**common, 'ph': 'X', **asker, 'ts': start, 'dur': MARK_US, 'args': args})
    if not ends.answered:
      continue
    lane = thread(span.attempt, ends.lane if row == 0 else f'{ends.lane} {row + 1}')
    if span.unanswered:
      args = {**args, 'unanswered': True}
    else:
      args = {**args, 'reply': span.reply}
      output.append({**common, 'ph': 'X', **asker, 'ts': end, 'dur': MARK_US, 'args': args})
      arrow = {**common, 'id': flow}
      output.append({**arrow, 'ph': 's', **asker, 'ts': start})
      output.append({**arrow, 'ph': 't', **lane, 'ts': start})
      output.append({**arrow, 'ph': 'f', 'bp': 'e', **asker, 'ts': end})
    output.append(
      {
        **common,
        'ph': 'X',
        **lane,
        'ts': start,
        'dur': max(MARK_US, round(end - start, 3)),
        'args': args,
      }
    )
  return output
