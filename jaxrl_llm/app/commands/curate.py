"""Measures the tasks of a taskset with a policy and selects the tasks that are worth training on.

jaxrl curate --workdir=RUN --taskset=NAME --out=FILE.jsonl [--low=0.1 --high=0.9] [--guess_tries=8]
jaxrl curate --config=FILE.py --taskset=NAME --out=FILE.jsonl …

The policy of a run's newest commit (or of the commit at --step), or the initial policy of a
configuration, attempts each task --samples times at --temperature. A task is kept if its share of
correct attempts is in [--low, --high], and if none of its --guess_tries guesses (attempts without
reasoning) is correct. FILE.jsonl gets the kept rows, with `pass_rate`, `hardness` (1 − pass_rate)
and, if guesses were made, `guessed` (number of correct guesses). To train on these rows, set the
taskset's `source` to FILE.jsonl and remove its `options`. Nothing in the run directory changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Sequence

from absl import flags, logging

from jaxrl_llm.app.offline.curation import CurateConfig, curate
from jaxrl_llm.app.offline.evaluation import chosen_steps
from jaxrl_llm.app.offline.reopen import config_to_serve, untrained_config
from jaxrl_llm.config.load import parse_flags, split_argv
from jaxrl_llm.core import disk, script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.runtime.writers import write_rows

FLAGS = flags.FlagValues()
flags.DEFINE_string(
  'workdir', None, 'Directory of the run; alternatively, --config.', flag_values=FLAGS
)
flags.DEFINE_string('taskset', None, 'Name of one of the configured tasksets.', flag_values=FLAGS)
flags.DEFINE_string('out', None, 'File to write the kept rows to.', flag_values=FLAGS)
flags.DEFINE_integer(
  'step',
  None,
  'Step of the commit to sample, 0 for the initial policy; the newest by default.',
  flag_values=FLAGS,
)
_HELP = {
  'samples': 'Attempts at each task.',
  'temperature': 'Sampling temperature of attempts and guesses.',
  'low': 'Minimum share of correct attempts of a kept task.',
  'high': 'Maximum share of correct attempts of a kept task.',
  'guess_tries': 'Guesses (attempts without reasoning) per task; a correct guess drops the task.',
  'guess_tokens': 'Maximum length of a guess in tokens.',
  'guess_instruction': (
    'Text appended to the prompt of a guess; if empty, only the length limits a guess.'
  ),
}
_DEFINE = {int: flags.DEFINE_integer, float: flags.DEFINE_float, str: flags.DEFINE_string}
for _field in dataclasses.fields(CurateConfig):
  _DEFINE[type(_field.default)](_field.name, _field.default, _HELP[_field.name], flag_values=FLAGS)
USAGE = 'usage: jaxrl curate --workdir=RUN|--config=FILE.py --taskset=NAME --out=FILE.jsonl'


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code."""
  return script.exit_code(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
  flag_args, spec, overrides = split_argv(argv)
  parse_flags(flag_args, FLAGS, __doc__)
  for name in ('taskset', 'out'):
    if FLAGS[name].value is None:
      raise UserError(f'--{name} is missing; {USAGE}')
  if (FLAGS.workdir is None) == (spec is None):
    problem = '--workdir is missing' if spec is None else '--workdir and --config are both given'
    raise UserError(
      f'{problem}; wanted --workdir=RUN for the policy of a run, or --config=FILE.py for the '
      f'initial policy of a configuration; {USAGE}'
    )
  logging.set_verbosity(-1)
  criteria = CurateConfig(**{name: FLAGS[name].value for name in _HELP})
  with contextlib.ExitStack() as opened:
    if spec is None:
      run = pathlib.Path(FLAGS.workdir)
      config = config_to_serve(run, None, overrides)
      (step,) = chosen_steps(run, config, None if FLAGS.step is None else [FLAGS.step])[-1:]
    else:
      run, step = pathlib.Path(opened.enter_context(disk.scratch('jaxrl_llm-'))), 0
      config = untrained_config(spec, overrides)
      if FLAGS.step:
        raise UserError(
          f'--step={FLAGS.step}: --config gives only the initial policy; name a run with --workdir'
        )
    out = pathlib.Path(FLAGS.out)
    _check_out(out, [taskset.source for taskset in config.tasksets])
    rows, counts = script.run_async(curate(config, run, step, FLAGS.taskset, criteria))
  for passed in counts:
    print(f'taskset {FLAGS.taskset}, step {step}, {passed}')
  if not rows:
    raise UserError(
      f'--taskset={FLAGS.taskset}: no task remains, so nothing was written; widen --low and --high'
    )
  write_rows(out, rows)
  print(
    f'{len(rows)} tasks written; to train on them, set source={out} and options={{}} in taskset '
    f'{FLAGS.taskset}'
  )
  return 0


def _check_out(out: pathlib.Path, sources: Sequence[str]) -> None:
  """Raises UserError, before sampling, if `out` cannot be written or is the source of a taskset."""
  if out.suffix != '.jsonl':
    raise UserError(f'--out={out}: wanted a file name that ends in .jsonl')
  if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
    raise UserError(
      f'--out={out}: {out.parent} is not a writable directory; create it, or choose another'
    )
  if out.resolve() in [pathlib.Path(source).resolve() for source in sources]:
    raise UserError(
      f'--out={out}: is the source of a taskset of the run, which is never overwritten; choose '
      'another name'
    )
