"""report.html: a page with a run's curves, evaluations, rollouts and configuration.

The page is a single file that needs no network. It is built only from the run's logs, so that it
can be rebuilt from them at any time. The contents of the logs are treated purely as data. They are
embedded as JSON in which `<` is escaped, and the page's script inserts them into the document only
as text nodes. The page's content security policy admits only the report's own script, which it
identifies by its digest.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import pathlib
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.runtime import (
  events,
  goodput,
  history,
  metric_descriptions,
  metric_names,
  timeline,
  transcripts,
  writers,
)
from jaxrl_llm.runtime.transcripts import is_number, short

ASSETS = pathlib.Path(__file__).parent / 'report'
SCRIPTS = (
  *('dom.js', 'export.js', 'charts.js', 'distributions.js', 'mismatch.js', 'timeline.js'),
  *('tokens.js', 'episodes.js', 'rollouts.js', 'page.js'),
)

MAX_POINTS = 2000
"""Maximum number of points of a curve.

A longer curve is divided into MAX_POINTS / 2 - 1 equal sections. The points with the smallest and
the largest value of each section are kept, as are the first and last points of the curve.
"""
EVENT_BYTES = 16_000_000
"""Maximum number of bytes that are read from the end of events.jsonl."""
Row = dict[str, Any]
Point = tuple[int, float | int | None, int]
"""(position on the x-axis, value, index of the stage)."""


def build(workdir: pathlib.Path | str, target: pathlib.Path | str | None = None) -> pathlib.Path:
  """Writes the report of the run in `workdir` and returns the path of the file.

  Args:
    target: file to write. If None, it is `<workdir>/report.html`.

  Raises:
    UserError: there is no such directory, or it has no metrics.
  """
  workdir = pathlib.Path(workdir)
  path = pathlib.Path(target) if target else workdir / 'report.html'
  write(path, render(payload(workdir)))
  return path


def write(path: pathlib.Path, text: str) -> None:
  """Writes a page to `path`. An existing file is replaced atomically.

  Lone surrogates, which UTF-8 cannot encode, become `?`.
  """
  temporary = path.with_name(path.name + '.tmp')
  temporary.write_text(text, encoding='utf-8', errors='replace')
  temporary.replace(path)


def render(data: Mapping[str, Any], scripts: Sequence[str] = SCRIPTS) -> str:
  """Returns an HTML page with the given data, which `scripts` draw in the browser.

  Args:
    data: the page's data, a JSON mapping.
    scripts: names of JavaScript files in `ASSETS`.
  """
  style = (ASSETS / 'style.css').read_text(encoding='utf-8')
  script = (
    "(() => {\n'use strict';\n"
    + '\n'.join((ASSETS / s).read_text(encoding='utf-8') for s in scripts)
    + '})();'
  )
  parts = {
    'title': html.escape(f'{data["name"]} · {data.get("kind", "report")}'),
    'style': style,
    'script': script,
    'style_hash': _digest(style),
    'script_hash': _digest(script),
    'data': json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(',', ':')).replace(
      '<', '\\u003c'
    ),
  }
  template = (ASSETS / 'template.html').read_text(encoding='utf-8')
  return re.sub(r'{{(\w+)}}', lambda match: parts[match[1]], template)


def _digest(text: str) -> str:
  return 'sha256-' + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def payload(workdir: pathlib.Path) -> Row:
  """Returns the data of a run's report as a JSON mapping."""
  log = workdir / writers.METRICS_FILE
  if not workdir.is_dir():
    raise UserError(f'--workdir={workdir}: no such directory; give the directory of a run')
  if not log.is_file():
    raise UserError(
      f'--workdir={workdir}: has no {writers.METRICS_FILE}; give the directory of a run that has '
      'started'
    )
  rows, corrupt = writers.read_jsonl(log)
  stages = stages_of(rows)
  series = _series(rows, stages)
  rollouts, corrupt_rollouts = transcripts.rollouts(workdir, stages)
  answers, corrupt_answers = transcripts.answers(workdir, stages)
  messages = timeline.load(workdir / events.FILE, EVENT_BYTES)
  changes, unknown = _history(workdir)
  unreadable = {
    log.name: corrupt,
    'rollouts': corrupt_rollouts,
    'evals': corrupt_answers,
    events.FILE: messages.unreadable,
  }
  return {
    'name': workdir.resolve().name,
    'subtitle': ' → '.join(f'{s["name"]} {s["steps"]:,} steps' for s in stages),
    'stages': stages,
    'summary': _summary(rows, stages, goodput.rows_of_others(workdir)),
    'warnings': [*_warnings(rows, unreadable), *_gap(messages), *unknown],
    'series': series,
    'descriptions': {key: text for key in series if (text := metric_descriptions.describe(key))},
    'labels': labels(series),
    'evaluations': _evaluations(rows, stages),
    'answers': answers,
    'timeline': timeline.payload(messages),
    'idle': _idle(messages.steps, stages),
    'idle_from': messages.steps[0].number if messages.cut and messages.steps else None,
    'rollouts': rollouts,
    'history': changes,
    'config': _config(workdir / 'config.json'),
  }


def _gap(messages: timeline.Timeline) -> list[str]:
  """Returns a warning if messages are missing in the middle of events.jsonl, otherwise an empty
  list.
  """
  if not messages.missing:
    return []
  count = f'{messages.missing:,} {"message is" if messages.missing == 1 else "messages are"}'
  return [
    f'{count} missing in {events.FILE}, first in {messages.gap}: the timeline and idle shares of '
    'the steps there are incomplete.'
  ]


def labels(keys: Iterable[str]) -> dict[str, Row]:
  """Returns the name, unit and rounding error of each metric, keyed by the metric's key."""
  labels = {key: metric_names.label(key) for key in keys}
  return {key: {**label._asdict(), 'noise': label.noise} for key, label in labels.items()}


def _history(workdir: pathlib.Path) -> tuple[list[Row], list[str]]:
  """Returns the history of the run's configuration and, if it cannot be read, a warning.

  The rows of the history contain the parent from which the run branched, if any, and each change.
  """
  try:
    entries = history.read(workdir)
  except UserError as error:
    return [], [f'Changes of the configuration are left out: {error}.']
  rows = [
    {
      'step': entry.step,
      'time': entry.time,
      'parent': None if entry.parent is None else str(entry.parent),
      'changes': [
        [change.key, _value(change.before), _value(change.after)] for change in entry.changes
      ],
    }
    for entry in entries
    if entry.changes or entry.parent is not None
  ]
  return rows, []


def _value(value: Any) -> str:
  return json.dumps(value, ensure_ascii=False)[:400]


def _config(path: pathlib.Path) -> Any:
  try:
    return json.loads(path.read_bytes()) if path.is_file() else None
  except ValueError as error:
    return {'config.json cannot be read': str(error)}


def step_of(row: Row) -> int:
  """Returns the step of a row of metrics; 0 if the row contains no step."""
  step = row.get(writers.STEP)
  return step if isinstance(step, int) else 0


def stages_of(rows: list[Row]) -> list[Row]:
  """Returns the stages of a run, given the rows of its metrics, in the order of their appearance.

  Each stage has its name, its number of `steps`, its `start` on the x-axis, and the `offset` that
  is added to the step of a row to get its place on the x-axis. The offset is 0 if steps are counted
  through the whole run. If a stage's steps begin below the end of the previous stage, its offset is
  that end.
  """
  stages: list[Row] = []
  names = list(dict.fromkeys(str(row.get(writers.STAGE, 'run')) for row in rows)) or ['run']
  end = 0
  for name in names:
    steps = [step_of(row) for row in rows if str(row.get(writers.STAGE, 'run')) == name] or [0]
    offset = end if min(steps) < end else 0
    start = end if stages else min(steps)
    # The row of a training step is written after the step, so the first stage begins one step
    # before its first row. A row of step 0 exists only if the initial policy was evaluated.
    before = end if stages else max(0, start - 1)
    end = max(steps) + offset
    stages.append({'name': name, 'start': start, 'offset': offset, 'steps': end - before})
  return stages


def stage_index(row: Row, stages: list[Row]) -> int:
  """Returns the index in `stages` of the stage of a row."""
  return [s['name'] for s in stages].index(str(row.get(writers.STAGE, 'run')))


def _series(rows: list[Row], stages: list[Row]) -> dict[str, Row]:
  """Returns the curve of each metric, keyed by the metric's key."""
  places = {stage['name']: (i, stage['offset']) for i, stage in enumerate(stages)}
  points: dict[str, list[Point]] = {}
  for row in rows:
    stage, offset = places[str(row.get(writers.STAGE, 'run'))]
    x = step_of(row) + offset
    for key, value in row.items():
      if value is None or is_number(value):
        points.setdefault(key, []).append((x, value, stage))
  series = {}
  for key, values in points.items():
    if key not in (writers.STAGE, writers.STEP) and any(y is not None for _, y, _ in values):
      series[key] = _curve(sorted(values, key=lambda p: p[0]))
  return series


def _curve(points: list[Point]) -> Row:
  """Returns the columns of a curve of at most MAX_POINTS points."""
  xs, ys, of = zip(*_thinned(points))
  return {'x': xs, 'y': [short(y) for y in ys], 'stage': of}


def _idle(steps: list[timeline.Step], stages: list[Row]) -> dict[str, Row]:
  """Returns curves of the idle share of each step, keyed by role (trainer or rollout)."""
  points: dict[str, list[Point]] = {}
  for step in steps:
    stage = max((i for i, s in enumerate(stages) if s['start'] < step.number), default=0)
    for role, share in step.idle.items():
      points.setdefault(role, []).append((step.number, share, stage))
  return {role: _curve(values) for role, values in points.items()}


def _thinned(points: list[Point]) -> list[Point]:
  if len(points) <= MAX_POINTS:
    return points
  kept = {0, len(points) - 1}
  stretches = MAX_POINTS // 2 - 1
  values = [y for _, y, _ in points]
  gaps = None in values
  for i in range(stretches):
    indices = range(i * len(points) // stretches, (i + 1) * len(points) // stretches)
    finite = [j for j in indices if values[j] is not None] if gaps else indices
    kept |= (
      {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
      if finite
      else {indices[0]}
    )
  return [points[j] for j in sorted(kept)]


def _evaluations(rows: list[Row], stages: list[Row]) -> Row:
  """Returns the table of evaluations, which has a column for each metric.

  It has a row for each stage and step with an evaluation. If the metrics contain several
  evaluations of the same step, the values of the last one are shown.
  """
  columns: dict[str, None] = {}
  table: dict[tuple[int, int], Row] = {}
  for row in rows:
    measured = {
      key: value for key, value in row.items() if key.startswith('val-') and is_number(value)
    }
    if measured:
      columns.update(dict.fromkeys(measured))
      table.setdefault((stage_index(row, stages), step_of(row)), {}).update(measured)
  order = sorted(columns, key=lambda c: (not c.startswith('val-core/'), c))
  return {
    'columns': order,
    'rows': [
      {'stage': stage, 'step': step, 'values': [short(values.get(column)) for column in order]}
      for (stage, step), values in table.items()
    ],
  }


def _summary(rows: list[Row], stages: list[Row], others: list[Row]) -> list[Row]:
  """Returns the tiles at the top of the page: accuracies, rewards, losses, time, tokens and steps.

  The tile of an accuracy shows the first value of the run and the last value of each stage. The
  tile of a reward or loss shows the means over the first and the last 10 steps.

  Args:
    others: rows with the seconds of the trainer processes other than process 0, as returned by
      `goodput.rows_of_others`.
  """
  tiles = []
  accuracies = [
    key
    for key in _evaluations(rows, stages)['columns']
    if re.fullmatch(r'val-core/.+/acc/[^/]+', key)
  ]
  greedy = [key for key in accuracies if key.endswith('/greedy')]
  for key in (greedy or accuracies)[:3]:
    taskset, mode = key.removeprefix('val-core/').split('/acc/')
    measured = [row for row in rows if is_number(row.get(key))]
    milestones = [measured[0], *_stage_ends(measured)[:-1]] if len(measured) > 1 else []
    way = [
      f'{row[key]:.3f} at {row.get(writers.STAGE)} {step_of(row):,}'
      for row in _distinct(milestones, measured[-1])
    ]
    detail = 'from ' + ', '.join(way) if way else 'the only evaluation'
    tiles.append(
      {
        'label': f'Accuracy, {mode}: {taskset}',
        'value': f'{measured[-1][key]:.3f}',
        'detail': detail,
      }
    )
  curves = {
    'Reward': 'critic/score/mean',
    'Pairs won': 'rewards/accuracies',
    'Supervised loss': 'actor/sft_loss',
  }
  for label, key in curves.items():
    values = [row[key] for row in rows if is_number(row.get(key))]
    if values:
      first, last = statistics.fmean(values[:10]), statistics.fmean(values[-10:])
      detail = f'from {first:.3g} (means over {min(10, len(values))} steps)'
      tiles.append({'label': label, 'value': f'{last:.3g}', 'detail': detail})
  seconds = [row['timing_s/step'] for row in rows if is_number(row.get('timing_s/step'))]
  tokens = [
    row['perf/total_num_tokens'] for row in rows if is_number(row.get('perf/total_num_tokens'))
  ]
  detail = f'{statistics.median(seconds):.3g} s per step (median)' if seconds else ''
  tiles.append(
    {
      'label': 'Total step time',
      'value': _duration(sum(seconds)) if seconds else '–',
      'detail': detail,
    }
  )
  for kind, useful in goodput.KINDS.items():
    if shares := goodput.shares([*rows, *others], kind):
      value = sum(shares.get(name, 0.0) for name in useful)
      parts = [f'{name} {share:.0%}' for name, share in shares.items() if share >= 0.005]
      if abs(missing := 1 - sum(shares.values())) >= 0.005:
        parts.append(f'not measured {missing:.0%}')
      label = f'Goodput of the {kind}'
      tiles.append({'label': label, 'value': f'{value:.0%}', 'detail': ', '.join(parts)})
  detail = f'{sum(tokens):,.0f} tokens in the batches' if tokens else ''
  tiles.append(
    {'label': 'Steps', 'value': f'{sum(s["steps"] for s in stages):,}', 'detail': detail}
  )
  return tiles


def _stage_ends(rows: list[Row]) -> list[Row]:
  return list({row.get(writers.STAGE): row for row in rows}.values())


def _distinct(rows: list[Row], last: Row) -> list[Row]:
  return list({id(row): row for row in rows if row is not last}.values())


def _duration(seconds: float | int) -> str:
  if seconds < 100:
    return f'{seconds:.3g} s'
  minutes = seconds / 60
  return f'{minutes:.1f} min' if minutes < 100 else f'{minutes / 60:.1f} h'


def _warnings(rows: list[Row], corrupt: Mapping[str, int]) -> list[str]:
  notes = [
    f'{n:,} unreadable {"line" if n == 1 else "lines"} in {name} left out.'
    for name, n in corrupt.items()
    if n
  ]
  nonfinite: dict[str, list[Row]] = {}
  for row in rows:
    for key in row:
      if key.endswith('/nonfinite'):
        nonfinite.setdefault(key.removesuffix('/nonfinite'), []).append(row)
  for key, bad in nonfinite.items():
    first = f'{bad[0].get(writers.STAGE)} {step_of(bad[0]):,}'
    notes.append(
      f'{key} was not finite in {len(bad):,} {"row" if len(bad) == 1 else "rows"}, first at '
      f'{first}.'
    )
  skipped = [
    row['run/skipped_updates'] for row in rows if is_number(row.get('run/skipped_updates'))
  ]
  if skipped and max(skipped):
    notes.append(f'{max(skipped):,.0f} updates were skipped.')
  over = [row for row in rows if row.get('run/mismatch_over_budget')]
  if over:
    steps = f'{len(over):,} {"step" if len(over) == 1 else "steps"}'
    first = f'{over[0].get(writers.STAGE)} {step_of(over[0]):,}'
    notes.append(
      f'Trainer and sampler differed by more than the budget in {steps}, first at {first}.'
    )
  return notes if rows else [*notes, 'The run has written no metrics yet.']
