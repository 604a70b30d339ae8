"""compare.html: a page that compares several runs.

The page shows the runs' curves, the differences between their configurations, and their answers to
the same tasks side by side. Like the report of one run (`runtime.report`), it is built only from
the runs' logs, needs no network, and treats the contents of the logs purely as data.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import statistics
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.files import parse_json
from jaxrl_llm.core.types import Json
from jaxrl_llm.runtime import metric_descriptions, report, transcripts, writers
from jaxrl_llm.runtime.transcripts import is_number, short

PAGE = 'compare.html'
SCRIPTS = ('dom.js', 'export.js', 'charts.js', 'side_by_side.js', 'compare.js')
MAX_POINTS = 1000
"""Maximum number of points per curve. A curve with more points shows only every k-th step, with the
same k for all runs.
"""
MAX_BESIDE = 8
"""Maximum number of runs whose answers and rollouts the page embeds. If there are more runs, the
best run of each of the best groups is chosen.
"""
ANSWER_BYTES = 4_000_000
"""Maximum size of the embedded answers of a suite, in characters."""
ROLLOUT_BYTES = 12_000_000
"""Approximate maximum number of bytes of rollouts files that are read in total. Each run gets an
equal share of this number.
"""
MAX_TASKS, MAX_ROLLOUTS = 60, 4
"""Maximum number of tasks whose rollouts are embedded, and maximum number of rollouts of a task
that are embedded for each run.
"""
MAX_TEXT = 4000
"""Maximum length of an embedded text in characters. The middle of a longer text is left out."""
_ALL_METRICS_RUNS = 8
"""Maximum number of runs for which the page contains all metrics. With more runs, it contains only
the metrics of its charts.
"""
_CHARTED = (
  'critic/score/mean',
  'actor/pg_loss',
  'actor/sft_loss',
  'actor/ppo_kl',
  'actor/kl_loss',
  'rollout_corr/kl',
  'response_length/mean',
  'actor/entropy',
  'actor/grad_norm',
  'critic/vf_loss',
  'rewards/accuracies',
)
_ABSENT = '(absent)'
_MAX_VALUE, _MAX_LABEL = 160, 80
"""Maximum lengths, in characters, of a configuration value in the table of differences, and of a
group's label.
"""
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedRun:
  """A run that the page compares with others."""

  name: str
  workdir: pathlib.Path
  group: str
  """Label of the run's group. The runs of a group differ only in their seeds."""
  state: str = ''
  """State of the run, such as 'finished'. It is empty if unknown."""
  value: float | None = None
  """Value of the objective. None if the run has not measured it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
  """The metric by which runs are compared."""

  key: str
  """Key of the metric in metrics.jsonl."""
  direction: str = 'maximize'
  """Which values are better: 'maximize' for larger ones, or 'minimize' for smaller ones."""
  at: str = 'last'
  """Whether the 'last' or the 'best' measurement counts as a run's value."""

  def value(self, rows: Sequence[Row]) -> float | None:
    """Returns the value of a run, given the rows of its metrics; None if it was not measured."""
    measured = [row[self.key] for row in rows if is_number(row.get(self.key))]
    if not measured:
      return None
    better = max if self.direction == 'maximize' else min
    return better(measured) if self.at == 'best' else measured[-1]


def mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
  """Returns the mean of n values and its standard error, the sample standard deviation / sqrt(n).

  The mean is None if there are no values. The error is None if there are fewer than two.
  """
  if not values:
    return None, None
  error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
  return statistics.fmean(values), error


def build(
  runs: Sequence[ComparedRun], target: pathlib.Path, *, title: str, objective: Objective
) -> pathlib.Path:
  """Writes the page that compares `runs` to the file `target` and returns `target`.

  Raises:
    UserError: if a run has no metrics file, or if `target` cannot be written.
  """
  text = report.render(payload(runs, target, title=title, objective=objective), SCRIPTS)
  try:
    report.write(target, text)
  except OSError as error:
    raise UserError(f'{target}: {error.strerror}; choose a file that can be written') from error
  return target


def payload(
  runs: Sequence[ComparedRun], target: pathlib.Path, *, title: str, objective: Objective
) -> Row:
  """Returns the data of the page as a JSON mapping."""
  logs = [_log(run) for run in runs]
  stages = [report.stages_of(rows) for rows, _ in logs]
  groups = _groups(runs, objective)
  keys = _keys([rows for rows, _ in logs], objective.key)
  beside = _beside(runs, groups, objective)
  longest = max(stage[-1]['start'] + stage[-1]['steps'] for stage in stages)
  stride = max(1, math.ceil(longest / MAX_POINTS))
  configs = [_config(run.workdir) for run in runs]
  place = {run: group for group, row in enumerate(groups) for run in row['runs']}
  return {
    'name': title,
    'kind': 'comparison',
    'subtitle': _subtitle(runs, groups, objective),
    'objective': dataclasses.asdict(objective),
    'stages': stages[0] if all(same == stages[0] for same in stages) else _whole(longest),
    'groups': groups,
    'runs': [
      {
        'name': run.name,
        'group': place[i],
        'state': run.state,
        'value': short(run.value),
        'steps': max((report.step_of(row) for row in rows), default=0),
        'seed': configs[i].get('seed'),
        'link': _link(run.workdir, target),
        'series': _series(rows, stages[i], keys, stride),
        'last': _last(rows),
      }
      for i, (run, (rows, _)) in enumerate(zip(runs, logs, strict=True))
    ],
    'keys': sorted(keys),
    'descriptions': {key: text for key in keys if (text := metric_descriptions.describe(key))},
    'labels': report.labels(keys),
    'differences': _differences(configs),
    'beside': beside,
    'answers': _answers([runs[i] for i in beside], [stages[i] for i in beside]),
    'rollouts': _rollouts([runs[i] for i in beside], [stages[i] for i in beside]),
    'warnings': _warnings(runs, logs, stages, configs, stride),
  }


def _log(run: ComparedRun) -> tuple[list[Row], int]:
  file = run.workdir / writers.METRICS_FILE
  if not file.is_file():
    raise UserError(
      f'{run.workdir}: has no {writers.METRICS_FILE}; give the directory of a run that has started'
    )
  return writers.read_jsonl(file)


def _config(workdir: pathlib.Path) -> Row:
  try:
    config = parse_json((workdir / 'config.json').read_text(encoding='utf-8'))
  except (OSError, ValueError):
    return {}
  return config if isinstance(config, dict) else {}


def _whole(steps: int) -> list[Row]:
  """Returns one stage that covers all steps, for a page whose runs have different stages."""
  return [{'name': 'run', 'start': 0, 'offset': 0, 'steps': steps}]


def _link(workdir: pathlib.Path, target: pathlib.Path) -> str | None:
  """Returns the address of a run's own report, relative to the page; None if there is no report."""
  file = workdir / 'report.html'
  if not file.is_file():
    return None
  path = os.path.relpath(file.absolute(), target.absolute().parent)
  # Without './', text before a ':' would be read as a URL scheme.
  return './' + urllib.parse.quote(path)


def _groups(runs: Sequence[ComparedRun], objective: Objective) -> list[Row]:
  """Returns the groups of runs, ordered by mean, the best first.

  Groups in which no run has a value come last.
  """
  members: dict[str, list[int]] = {}
  for i, run in enumerate(runs):
    members.setdefault(run.group, []).append(i)
  rows = []
  for label, indices in members.items():
    values = [runs[i].value for i in indices if runs[i].value is not None]
    mean, error = mean_and_error(values)
    rows.append(
      {
        'label': label,
        'runs': indices,
        'values': [short(value) for value in values],
        'mean': short(mean),
        'stderr': short(error),
      }
    )
  sign = -1 if objective.direction == 'maximize' else 1
  return sorted(rows, key=lambda row: (row['mean'] is None, sign * (row['mean'] or 0)))


def _beside(runs: Sequence[ComparedRun], groups: list[Row], objective: Objective) -> list[int]:
  """Returns the indices of the runs whose answers and rollouts the page embeds.

  These are all runs if there are at most `MAX_BESIDE`. Otherwise, they are the best runs of the
  best `MAX_BESIDE` groups, one run per group.
  """
  if len(runs) <= MAX_BESIDE:
    return list(range(len(runs)))
  sign = -1 if objective.direction == 'maximize' else 1

  def place(i: int) -> tuple[bool, float]:
    value = runs[i].value
    return value is None, sign * (value or 0)

  return sorted(min(group['runs'], key=place) for group in groups[:MAX_BESIDE])


def _subtitle(runs: Sequence[ComparedRun], groups: list[Row], objective: Objective) -> str:
  count = f'{len(runs)} runs' if len(runs) != 1 else '1 run'
  if len(groups) < len(runs):
    count += f' of {len(groups)} points' if len(groups) > 1 else ' of one point'
  return f'{count}, compared by the {objective.at} {objective.key} ({objective.direction}d)'


def _keys(logs: Sequence[list[Row]], objective: str) -> set[str]:
  """Returns the keys of the metrics that the page contains (see `_ALL_METRICS_RUNS`)."""
  keys = {
    key
    for rows in logs
    for row in rows
    for key, value in row.items()
    if key not in (writers.STAGE, writers.STEP) and is_number(value)
  }
  if len(logs) <= _ALL_METRICS_RUNS:
    return keys
  return {
    key
    for key in keys
    if key in (*_CHARTED, objective) or (key.startswith('val-core/') and 'stderr' not in key)
  }


def _series(rows: list[Row], stages: list[Row], keys: set[str], stride: int) -> Row:
  """Returns a run's curves, keyed by metric.

  A curve of more than `MAX_POINTS` points keeps only the steps that are multiples of `stride`, and
  the last step. The curves of the runs in a group then have points at the same steps.
  """
  points: dict[str, dict[int, tuple[Any, int]]] = {}
  for row in rows:
    stage = report.stage_index(row, stages)
    x = report.step_of(row) + stages[stage]['offset']
    for key in keys & row.keys():
      if row[key] is None or is_number(row[key]):
        points.setdefault(key, {})[x] = (short(row[key]), stage)
  series = {}
  for key, at in points.items():
    last = max(at)
    sparse = len(at) <= MAX_POINTS
    kept = [x for x in sorted(at) if sparse or x % stride == 0 or x == last]
    series[key] = {'x': kept, 'y': [at[x][0] for x in kept], 'stage': [at[x][1] for x in kept]}
  return series


def _last(rows: list[Row]) -> dict[str, Json]:
  """Returns the last value of each evaluation metric, keyed by metric."""
  last: dict[str, Json] = {}
  for row in rows:
    last |= {k: short(v) for k, v in row.items() if k.startswith('val-') and is_number(v)}
  return last


def _differences(configs: Sequence[Row]) -> list[Row]:
  """Returns the fields that differ between the configurations, with the value in each as text."""
  return [
    {'key': key, 'values': [_shown(value) for value in values]}
    for key, values in _differing('', list(configs))
  ]


def _differing(key: str, values: list[Json]) -> Iterator[tuple[str, list[Json]]]:
  """Compares nested values part by part.

  Yields (dotted key, list of the part in each value) for each part that differs. The list contains
  `_ABSENT` for a value that has no such part.

  Args:
    key: dotted key of the values themselves, with which the yielded keys begin.
  """
  texts = {json.dumps(value, sort_keys=True) for value in values}
  if len(texts) == 1:
    return
  parts = [_parts(value) for value in values]
  if any(part is None for part in parts):
    yield key or 'config.json', values
    return
  for name in dict.fromkeys(name for part in parts for name in part):
    inner = f'{key}.{name}' if key else str(name)
    yield from _differing(inner, [part.get(name, _ABSENT) for part in parts])


def _parts(value: Json) -> dict[str, Json] | None:
  """Returns the parts of a mapping, or of a list of named mappings, keyed by name.

  Returns None for any other value.
  """
  if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
    names = [item.get('name') for item in value]
    if all(isinstance(name, str) for name in names) and len(set(names)) == len(names):
      return dict(zip(names, value))
  return value if isinstance(value, dict) else None


def _shown(value: Json) -> str:
  if value == _ABSENT:
    return _ABSENT
  text = json.dumps(value, ensure_ascii=False)
  return text if len(text) <= _MAX_VALUE else f'{text[: _MAX_VALUE - 1]}…'


def _cut(text: str) -> str:
  half = MAX_TEXT // 2
  return text if len(text) <= MAX_TEXT else f'{text[:half]} … {text[-half:]}'


def _answers(runs: Sequence[ComparedRun], stages: Sequence[list[Row]]) -> list[Row]:
  """Returns the last greedy answers of each run, for each suite.

  Only tasks that at least two of the runs have answered are included, up to `ANSWER_BYTES`.
  """
  suites_of_runs = [
    {suite['suite']: suite for suite in transcripts.answers(run.workdir, of)[0]}
    for run, of in zip(runs, stages, strict=True)
  ]
  result = []
  for name in dict.fromkeys(name for suites in suites_of_runs for name in suites):
    rows: dict[str, Row] = {}
    for i, suites in enumerate(suites_of_runs):
      for row in suites[name]['rows'] if name in suites else ():
        entry = rows.setdefault(
          row['prompt'],
          {'prompt': _cut(row['prompt']), 'truth': row['truth'], 'answers': [None] * len(runs)},
        )
        if row['answers'][-1] is not None:
          text, correct = row['answers'][-1]
          entry['answers'][i] = [_cut(text), correct]
    common = [row for row in rows.values() if sum(a is not None for a in row['answers']) > 1]
    kept, size = [], 0
    for row in common:
      size += len(row['prompt']) + sum(len(answer[0]) for answer in row['answers'] if answer)
      if size <= ANSWER_BYTES or not kept:
        kept.append(row)
    if kept:
      total = max(suites[name]['total'] for suites in suites_of_runs if name in suites)
      result.append({'suite': name, 'rows': kept, 'total': total})
  return result


def _rollouts(runs: Sequence[ComparedRun], stages: Sequence[list[Row]]) -> list[Row]:
  """Returns the latest rollouts of each run for tasks on which several of the runs were trained."""
  tasks: dict[tuple[str, str], Row] = {}
  budget = ROLLOUT_BYTES // max(1, len(runs))
  for i, (run, of) in enumerate(zip(runs, stages, strict=True)):
    data, _ = transcripts.rollouts(run.workdir, of, budget)
    for row in data['rows']:
      task = data['tasks'][row['k']]
      entry = tasks.setdefault(
        (task['id'], task['prompt']),
        {
          'prompt': _cut(task['prompt']),
          'truth': task['truth'],
          'runs': [[] for _ in runs],
        },
      )
      text = row.get('q') or ''.join(data['tokens'][token][1] for token in row['t'])
      entry['runs'][i].append(
        {'x': row['x'], 'r': row['r'], 'n': len(row['t']), 'text': _cut(text)}
      )
  shared = [task for task in tasks.values() if sum(map(bool, task['runs'])) > 1]
  shared.sort(key=lambda task: -sum(map(bool, task['runs'])))
  for task in shared[:MAX_TASKS]:
    task['runs'] = [
      sorted(rollouts, key=lambda rollout: rollout['x'])[-MAX_ROLLOUTS:]
      for rollouts in task['runs']
    ]
  return shared[:MAX_TASKS]


def _warnings(
  runs: Sequence[ComparedRun],
  logs: Sequence[tuple[list[Row], int]],
  stages: Sequence[list[Row]],
  configs: Sequence[Row],
  stride: int,
) -> list[str]:
  notes = []
  for run, (rows, corrupt), config in zip(runs, logs, configs, strict=True):
    if corrupt:
      notes.append(f'{run.name}: {corrupt:,} unreadable lines in {writers.METRICS_FILE} left out.')
    if not rows:
      notes.append(f'{run.name}: has written no metrics yet.')
    if not config:
      notes.append(f'{run.name}: config.json cannot be read, so all fields are shown as absent.')
  if len({tuple(stage['name'] for stage in of) for of in stages}) > 1:
    notes.append('The runs have different stages; curves are over the steps of the whole run.')
  if stride > 1:
    notes.append(f'Curves show one of every {stride:,} steps.')
  return notes


def groups_of(workdirs: Mapping[str, pathlib.Path]) -> dict[str, str]:
  """Returns the label of each run's group, keyed by the run's name.

  Runs whose configurations differ only in the seed form a group. Its label lists the group's values
  of the fields in which the groups differ. If no field or more than three fields differ, or if this
  label would be too long or not unique, the label is the name of the group's first run.
  """
  configs = {name: _config(path) for name, path in workdirs.items()}
  for config in configs.values():
    config.pop('seed', None)
  differing = dict(_differing('', list(configs.values())))
  rows = dict(zip(configs, zip(*differing.values()))) if differing else {}
  groups: dict[str, list[str]] = {}
  for name, config in configs.items():
    groups.setdefault(json.dumps(config, sort_keys=True), []).append(name)
  labels: dict[str, str] = {}
  for names in groups.values():
    values = rows.get(names[0], ())
    label = ', '.join(
      f'{key.rpartition(".")[2]} {_shown(value)}' for key, value in zip(differing, values)
    )
    if len(values) not in (1, 2, 3) or len(label) > _MAX_LABEL or label in labels.values():
      label = names[0]
    labels |= dict.fromkeys(names, label)
  return labels
