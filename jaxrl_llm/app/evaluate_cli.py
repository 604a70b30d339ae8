"""The command line of `launch/evaluate.py`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import sys
from collections.abc import Sequence

from absl import flags, logging
from rich.console import Console

from jaxrl_llm.app.evaluate import chosen_steps, config_of_run, evaluate
from jaxrl_llm.config.load import apply_overrides, parse_flags, split_argv
from jaxrl_llm.core.errors import UserError, first_cause

FLAGS = flags.FlagValues()
flags.DEFINE_string('workdir', None, 'Directory of the run.', flag_values=FLAGS)
flags.DEFINE_list('steps', None, 'Steps of commits, 0 for what the run began with; all by default.', flag_values=FLAGS)
flags.DEFINE_string('out', None, 'File that gets a JSON line for each completion.', flag_values=FLAGS)


def main(argv: Sequence[str]) -> int:
  """Returns the exit code."""
  try:
    return _main(argv)
  except Exception as error:
    cause = first_cause(error)
    if not isinstance(cause, UserError):
      raise
    sys.stderr.write(f'error: {cause}\n')
    return cause.exit_code


def _main(argv: Sequence[str]) -> int:
  own, spec, overrides = split_argv(argv)
  parse_flags(own, FLAGS)
  if spec is not None:
    raise UserError(f"--config={spec}: the run's own configuration is used; --config.field=value changes it")
  if FLAGS.workdir is None:
    raise UserError('--workdir is missing; usage: launch/evaluate.py --workdir=DIR [--steps=N,N] [--out=FILE]')
  logging.set_verbosity(-1)
  run = pathlib.Path(FLAGS.workdir)
  config = apply_overrides(config_of_run(run), overrides)
  steps = chosen_steps(run, config, _numbers(FLAGS.steps))
  asyncio.run(_print(config, run, steps))
  return 0


def _numbers(texts: Sequence[str] | None) -> list[int] | None:
  bad = [text for text in texts or () if not text.isdecimal()]
  if bad:
    raise UserError(f'--steps: {bad[0]!r} is not a step; wanted numbers, such as --steps=500,780')
  return None if texts is None else [int(text) for text in texts]


async def _print(config, run: pathlib.Path, steps: Sequence[int]) -> None:
  console = Console(markup=False, highlight=False, soft_wrap=True)
  with contextlib.ExitStack() as files:
    out = files.enter_context(open(FLAGS.out, 'w')) if FLAGS.out else None
    async for found in evaluate(config, run, steps):
      told = ', '.join(f'{name} {value:.4g}' for name, value in found['metrics'].items())
      console.print(f'step {found["step"]}, {found["suite"]}: {told}')
      for row in found['rows'] if out else ():
        out.write(json.dumps({'step': found['step'], **row}) + '\n')
