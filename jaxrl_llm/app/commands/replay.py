"""Repeats the updates of a run up to step N, and compares the results bit for bit with the run's
records.

  jaxrl replay --workdir=DIR [--step=N]

N is the step of a row of metrics.jsonl, by default the last one. The replay starts from the newest
commit before N, or from the initial state if there is none. It repeats every step up to N, with the
samples that the run's recorded plans list. For each of these steps, it compares the metrics, and
prints the loss, the gradient norm, and 'equal' or the differences. If a commit of step N exists, it
also compares parameters and optimizer state after step N. Exit code 0 means that everything is
equal. The run directory is not changed.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Sequence

from absl import flags, logging

from jaxrl_llm.app.composition.choices import recorded_flags
from jaxrl_llm.app.offline.reopen import check_alone, configs_of_run, without_absent_kernel
from jaxrl_llm.app.offline.replay import Compared, course, replay
from jaxrl_llm.config.load import parse_flags
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.process.xla_flags import platform_here, set_flags
from jaxrl_llm.core.types import Json
from jaxrl_llm.runtime.machine import use_compilation_cache

FLAGS = flags.FlagValues()
flags.DEFINE_string('workdir', None, 'Directory of the run.', flag_values=FLAGS)
flags.DEFINE_integer(
  'step',
  None,
  'Last step to repeat; by default, the last recorded step.',
  flag_values=FLAGS,
)
_MEASURES = {
  'loss': 'actor/loss',
  'grad norm': 'actor/grad_norm',
  'critic loss': 'critic/loss',
  'critic grad norm': 'critic/grad_norm',
}
_LISTED = 3
"""Maximum number of differences to print for a step."""


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code."""
  return script.exit_code(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
  parse_flags(argv, FLAGS, __doc__, takes_config=False)
  if FLAGS.workdir is None:
    raise UserError('--workdir is missing; usage: jaxrl replay --workdir=DIR [--step=N]')
  check_alone()
  logging.set_verbosity(-1)
  run = pathlib.Path(FLAGS.workdir)
  # Use the compiler flags of the run, so that the same programs are compiled.
  set_flags(platform_here(os.environ), recorded=recorded_flags(run))
  return script.run_async(_replay(run, FLAGS.step))


async def _replay(run: pathlib.Path, step: int | None) -> int:
  configs = configs_of_run(run)
  config = configs[-1][1]
  # Reuse compiled programs, because on some devices the results of a newly compiled program may
  # differ in the last bit.
  if config.compilation_cache:
    use_compilation_cache(config.compilation_cache)
  way = course(config, run, step)
  configs = tuple((first, without_absent_kernel(config)) for first, config in configs)
  equal = True
  async with contextlib.aclosing(replay(configs, run, way)) as steps:
    async for compared in steps:
      print(line(compared), flush=True)
      equal = equal and not compared.differences
  return 0 if equal else 1


def line(compared: Compared) -> str:
  """Formats the results of a replayed step and its differences from the run's records."""
  measures = [
    f'{name} {compared.metrics[key]}' for name, key in _MEASURES.items() if key in compared.metrics
  ]
  head = ', '.join([f'step {compared.step} ({compared.stage})', *measures])
  differences = compared.differences
  if not differences:
    arrays = f', and so are the {compared.arrays} arrays of its commit' if compared.arrays else ''
    return f'{head}: equal{arrays}'
  listed = '; '.join(
    f'{d.key} {_value(d.got)}, recorded {_value(d.recorded)}' for d in differences[:_LISTED]
  )
  more = f'; and {len(differences) - _LISTED} more' if len(differences) > _LISTED else ''
  return f'{head}: {len(differences)} differ: {listed}{more}'


def _value(value: Json) -> str:
  return 'nothing' if value is None else str(value)
