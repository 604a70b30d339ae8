"""Writes a page that compares runs: curves, configuration differences, evaluations, and answers to
the same tasks side by side.

jaxrl compare --workdirs=runs/a,runs/b [--objective=val-core/eval/acc/greedy] [--target=FILE]
jaxrl compare --sweepdir=runs/sweeps/quickstart_lr [--target=FILE]

Runs whose configurations differ only in the seed form a group with a mean and a standard error.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Sequence

from absl import flags

from jaxrl_llm.config.annotations import nearest
from jaxrl_llm.config.load import parse_flags
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.runtime import comparison
from jaxrl_llm.runtime.comparison import ComparedRun, Objective
from jaxrl_llm.runtime.transcripts import is_number
from jaxrl_llm.runtime.writers import METRICS_FILE, STEP, read_jsonl

FLAGS = flags.FlagValues()
flags.DEFINE_list('workdirs', None, 'Directories of runs.', flag_values=FLAGS)
flags.DEFINE_string(
  'sweepdir', None, 'Directory of a sweep, instead of --workdirs.', flag_values=FLAGS
)
flags.DEFINE_string(
  'objective',
  None,
  'Metric to compare by; by default, the first accuracy of an evaluation, otherwise the reward.',
  flag_values=FLAGS,
)
flags.DEFINE_enum(
  'direction',
  'maximize',
  ['maximize', 'minimize'],
  'Whether a larger or a smaller objective is better.',
  flag_values=FLAGS,
)
flags.DEFINE_string(
  'target',
  None,
  'File to write; by default, compare.html in the current directory, or in that of the sweep.',
  flag_values=FLAGS,
)
_DEFAULTS = (r'val-core/.+/acc/greedy', r'val-core/.+/acc/[^/]+', r'val-core/.+/rewards/accuracies')
"""Patterns of metric keys in order of preference. Without --objective, the first metric that
matches is the objective.
"""
_REWARD = 'critic/score/mean'


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code."""
  return script.exit_code(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
  parse_flags(argv, FLAGS, __doc__, takes_config=False)
  target = pathlib.Path(FLAGS.target) if FLAGS.target else None
  if (FLAGS.workdirs is None) == (FLAGS.sweepdir is None):
    raise UserError('wanted --workdirs=DIR,DIR or --sweepdir=DIR, see --help')
  if FLAGS.sweepdir is not None:
    path = _compare_trials(pathlib.Path(FLAGS.sweepdir), target)
  else:
    path = _compare([pathlib.Path(text) for text in FLAGS.workdirs], target)
  print(f'{path}  ({path.stat().st_size / 1e6:.1f} MB)')
  return 0


def _compare_trials(sweepdir: pathlib.Path, target: pathlib.Path | None) -> pathlib.Path:
  # Imported here, because these modules import JAX, which a comparison of run directories does not
  # need.
  from jaxrl_llm.app.sweeps.ledger import Ledger
  from jaxrl_llm.app.sweeps.page import build_page

  if FLAGS.objective is not None or FLAGS['direction'].present:
    raise UserError('--objective, --direction: the sweep file sets them; remove the flags')
  path = build_page(Ledger(sweepdir), target)
  if path is None:
    raise UserError(f'--sweepdir={sweepdir}: no trial has written metrics yet')
  return path


def _compare(workdirs: Sequence[pathlib.Path], target: pathlib.Path | None) -> pathlib.Path:
  resolved = [path.resolve() for path in workdirs]
  if len(set(resolved)) < 2 or len(set(resolved)) < len(resolved):
    raise UserError(
      f'--workdirs={",".join(FLAGS.workdirs)}: wanted at least two runs, each listed once'
    )
  names = [path.name for path in resolved]
  if len(set(names)) < len(names):
    shared = os.path.commonpath(resolved)
    names = [os.path.relpath(path, shared) for path in resolved]
  runs = dict(zip(names, workdirs, strict=True))
  logs = {}
  for name, path in runs.items():
    if not (path / METRICS_FILE).is_file():
      raise UserError(
        f'--workdirs={path}: has no {METRICS_FILE}; give the directory of a run that has started'
      )
    logs[name], _ = read_jsonl(path / METRICS_FILE)
  objective = _objective([row for rows in logs.values() for row in rows])
  groups = comparison.groups_of(runs)
  compared = [
    ComparedRun(name=name, workdir=path, group=groups[name], value=objective.value(logs[name]))
    for name, path in runs.items()
  ]
  title = ' and '.join(names) if len(names) == 2 else f'{len(names)} runs'
  return comparison.build(
    compared, target or pathlib.Path(comparison.PAGE), title=title, objective=objective
  )


def _objective(rows: Sequence[dict]) -> Objective:
  keys = {key for row in rows for key, value in row.items() if is_number(value)} - {STEP}
  key = FLAGS.objective
  if key is not None and key not in keys:
    raise UserError(
      f'--objective={key}: no run has this metric; {one_line(nearest(key, sorted(keys)))}'
    )
  for pattern in _DEFAULTS:
    key = key or next((name for name in sorted(keys) if re.fullmatch(pattern, name)), None)
  return Objective(key=key or _REWARD, direction=FLAGS.direction)
