"""Rates the tasks in a file with a language model.

A rating consists of a number from 0 to 1 for each criterion, and the weighted sum of these numbers,
the priority.

jaxrl rate --rows=FILE.jsonl --out=RATED.jsonl \\
  --options.addresses='["http://127.0.0.1:8000"]' --options.model=Qwen/Qwen3-8B
jaxrl rate … --options.weights='{"quality": 1, "difficulty": -0.5}' --min_priority=0.2

--rows is a source of tasks, as in a taskset's configuration: a .jsonl or .parquet file, or
datasets:NAME#split, with --form for other row formats. RATED.jsonl gets the rows of the rated
tasks, with an added field for each criterion (by default, `rated_quality` and `rated_difficulty`)
and the field `priority`. A stage's sampler with `hardness='priority'` draws tasks by priority. The
scorer `judge` has the same options, apart from `weights`; `criteria` replaces the default criteria.
Every answer of the model is kept in --journal (by default, RATED.jsonl.journal), so that a repeated
command does not ask the model the same question again.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

from absl import flags, logging

from jaxrl_llm.app.commands.option_flags import read_options, split_options
from jaxrl_llm.app.offline.rating import rate
from jaxrl_llm.config.load import parse_flags
from jaxrl_llm.config.values import from_json
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.scorers.judge.rating import RatingOptions
from jaxrl_llm.runtime.writers import write_rows
from jaxrl_llm.tasks.taskset import TasksetConfig, load_taskset

FLAGS = flags.FlagValues()
flags.DEFINE_string('rows', None, 'Source of tasks, as in tasksets.', flag_values=FLAGS)
flags.DEFINE_enum(
  'form',
  None,
  ['apps', 'code_contests', 'livecodebench'],
  'Format of the rows, named after a data set.',
  flag_values=FLAGS,
)
flags.DEFINE_string('out', None, 'File to write the rated rows to.', flag_values=FLAGS)
flags.DEFINE_string(
  'journal', None, "File of the model's answers; default: OUT.journal.", flag_values=FLAGS
)
flags.DEFINE_string(
  'options', '{}', 'Options, a JSON object; or --options.KEY=VALUE.', flag_values=FLAGS
)
flags.DEFINE_float(
  'min_priority', None, 'Leave out tasks with a lower priority.', flag_values=FLAGS
)
flags.DEFINE_float(
  'deadline_s', 300.0, 'Time limit for the rating of a task in seconds.', flag_values=FLAGS
)
flags.DEFINE_enum(
  'on_failure',
  'fail',
  ['fail', 'skip'],
  'Whether a task without a rating ends the command, or is left out.',
  flag_values=FLAGS,
)
USAGE = 'usage: jaxrl rate --rows=FILE.jsonl --out=FILE.jsonl --options.KEY=VALUE …'


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code."""
  return script.exit_code(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
  flag_args, overrides = split_options(argv)
  parse_flags(flag_args, FLAGS, __doc__, takes_config=False)
  for name in ('rows', 'out'):
    if FLAGS[name].value is None:
      raise UserError(f'--{name} is missing; {USAGE}')
  if not FLAGS.deadline_s > 0:
    raise UserError(f'--deadline_s={FLAGS.deadline_s}: wanted more than 0')
  logging.set_verbosity(-1)
  out = pathlib.Path(FLAGS.out)
  _check_out(out, FLAGS.rows)
  given = {'cache_file': FLAGS.journal or f'{out}.journal'}
  given |= read_options(FLAGS.options, overrides)
  options = from_json(given, RatingOptions, '--options')
  options.check('--options')
  taskset = load_taskset(TasksetConfig(name='rate', source=FLAGS.rows, form=FLAGS.form))
  rated = script.run_async(rate(taskset.tasks, options, deadline_s=FLAGS.deadline_s))
  if rated.failures and FLAGS.on_failure == 'fail':
    uid, reason = next(iter(rated.failures.items()))
    raise UserError(
      f'{len(rated.failures)} of {len(taskset.tasks)} tasks have no rating, so nothing was '
      f'written; the first: {uid}: {reason}; repeat the command to rate only these tasks, or leave '
      'them out with --on_failure=skip'
    )
  least = FLAGS.min_priority
  rows = [row for row in rated.rows if least is None or row['priority'] >= least]
  if not rows:
    raise UserError('no task remains, so nothing was written; lower --min_priority')
  write_rows(out, rows)
  print(
    f'{len(taskset.tasks)} tasks: {len(rated.failures)} without a rating, '
    f'{len(rated.rows) - len(rows)} below --min_priority, {len(rows)} written to {out}'
  )
  return 0


def _check_out(out: pathlib.Path, rows: str) -> None:
  """Raises UserError, before any request is sent, if `out` cannot be written or is the file of
  --rows.
  """
  if out.suffix != '.jsonl':
    raise UserError(f'--out={out}: wanted a file name that ends in .jsonl')
  if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
    raise UserError(
      f'--out={out}: {out.parent} is not a writable directory; create it, or choose another'
    )
  if out.resolve() == pathlib.Path(rows).resolve():
    raise UserError(f'--out={out}: is the file of --rows; choose another name')
