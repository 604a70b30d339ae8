"""Copies an archived commit of a run to a run directory, for evaluation, export or branches. The
run itself fetches its newest commit when `jaxrl train` starts in an empty directory.

jaxrl fetch --archive=gs://bucket/runs/mine --workdir=runs/mine [--step=N]
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Sequence

from absl import flags

from jaxrl_llm.app.composition.lock import lock
from jaxrl_llm.config.load import parse_flags
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.runtime.archive import Archive, ArchiveConfig

FLAGS = flags.FlagValues()
flags.DEFINE_string(
  'archive', None, 'Location of the archive (`archive.location` of the run).', flag_values=FLAGS
)
flags.DEFINE_string(
  'workdir', None, 'Directory to write; it must be new or empty.', flag_values=FLAGS
)
flags.DEFINE_integer(
  'step', None, 'Step of the commit; by default the newest one.', flag_values=FLAGS
)


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code."""
  return script.exit_code(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
  parse_flags(argv, FLAGS, __doc__, takes_config=False)
  for name in ('archive', 'workdir'):
    if FLAGS[name].value is None:
      raise UserError(f'--{name} is missing; usage: jaxrl fetch --archive=LOCATION --workdir=DIR')
  archive, workdir = Archive(ArchiveConfig(location=FLAGS.archive)), pathlib.Path(FLAGS.workdir)
  steps = archive.steps()
  step = FLAGS.step if FLAGS.step is not None else max(steps, default=None)
  if step is None or step not in steps:
    raise UserError(
      f'--archive={FLAGS.archive}: '
      + (f'no commit of step {step}; it has {steps}' if steps else 'it has no commit')
    )
  with contextlib.closing(lock(workdir, named=workdir)):
    archive.copy_to(workdir, step)
  print(f'{workdir}: the commit at step {step} of {FLAGS.archive}')
  return 0
