"""Evaluates the commits of a run: `jaxrl evaluate --workdir=DIR [--steps=500,780] [--out=FILE]`.

Measures every kept commit of the policy, or the commits at the given steps (0: the initial policy),
on the suites of the run's configuration. `--config.field=value` changes the configuration, for
example to more tasks, to several samples for pass@k, or to another engine. Nothing in the run
directory changes. FILE gets a JSON line for each completion. With --json, standard output gets one
list of {step, suite, metrics} at the end, and the text goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Sequence

from absl import flags, logging
from rich.console import Console

from jaxrl_llm.app.offline.evaluation import chosen_steps, evaluate
from jaxrl_llm.app.offline.reopen import config_to_serve
from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.load import parse_flags, split_argv
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.process.xla_flags import platform_here, set_flags

FLAGS = flags.FlagValues()
flags.DEFINE_string('workdir', None, 'Directory of the run.', flag_values=FLAGS)
flags.DEFINE_list(
  'steps', None, 'Steps of commits, 0 for the initial policy; all by default.', flag_values=FLAGS
)
flags.DEFINE_bool('json', False, 'Print one JSON document.', flag_values=FLAGS)
flags.DEFINE_string('out', None, 'File for one JSON line per completion.', flag_values=FLAGS)


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code."""
  return script.exit_code(lambda: _main(argv), as_json=script.asks_json(argv))


def _main(argv: Sequence[str]) -> int:
  flag_args, spec, overrides = split_argv(argv)
  parse_flags(flag_args, FLAGS, __doc__)
  if FLAGS.workdir is None:
    raise UserError(
      '--workdir is missing; usage: jaxrl evaluate --workdir=DIR [--steps=N,N] [--out=FILE]'
    )
  logging.set_verbosity(-1)
  set_flags(platform_here(os.environ))
  run = pathlib.Path(FLAGS.workdir)
  config = config_to_serve(run, spec, overrides)
  steps = chosen_steps(run, config, _numbers(FLAGS.steps))
  script.run_async(_print(config, run, steps))
  return 0


def _numbers(texts: Sequence[str] | None) -> list[int] | None:
  bad = [text for text in texts or () if not text.isdecimal()]
  if bad:
    raise UserError(f'--steps: {bad[0]!r} is not a step; wanted numbers, such as --steps=500,780')
  return None if texts is None else [int(text) for text in texts]


async def _print(config: Config, run: pathlib.Path, steps: Sequence[int]) -> None:
  file = sys.stderr if FLAGS.json else None
  console = Console(file=file, markup=False, highlight=False, soft_wrap=True)
  mode, all_metrics = 'w', []
  async with contextlib.aclosing(evaluate(config, run, steps)) as measured:
    async for measurement in measured:
      metrics = ', '.join(f'{name} {value:.4g}' for name, value in measurement['metrics'].items())
      console.print(f'step {measurement["step"]}, {measurement["suite"]}: {metrics}')
      all_metrics.append({key: measurement[key] for key in ('step', 'suite', 'metrics')})
      if FLAGS.out:
        lines = [
          json.dumps({'step': measurement['step'], **row}) + '\n' for row in measurement['rows']
        ]
        try:
          with open(FLAGS.out, mode) as out:
            out.writelines(lines)
        except OSError as error:
          raise UserError(f'--out={FLAGS.out}: {error.strerror}') from error
        mode = 'a'
  if FLAGS.json:
    script.print_json(all_metrics)
