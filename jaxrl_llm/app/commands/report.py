"""Rebuilds a run's report.html from its logs, and optionally writes the run's events as a trace for
ui.perfetto.dev.

jaxrl report --workdir=runs/quickstart [--target=FILE] [--perfetto[=FILE]]
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from absl import flags

from jaxrl_llm.config.load import parse_flags
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.runtime import perfetto, report

FLAGS = flags.FlagValues()
flags.DEFINE_string('workdir', None, 'Directory of the run.', flag_values=FLAGS)
flags.DEFINE_string(
  'target', None, 'File to write; by default <workdir>/report.html.', flag_values=FLAGS
)


class _FileOrDefault(flags.Flag):
  """A flag whose value may be omitted, as with a boolean flag. Without a value, the flag has the
  value 'true'.
  """

  def __init__(self, name: str, text: str):
    super().__init__(flags.ArgumentParser(), flags.ArgumentSerializer(), name, None, text)
    self.boolean = True


flags.DEFINE_flag(
  _FileOrDefault(
    'perfetto', 'Also write the messages as a trace; without a value, to <workdir>/perfetto.json.'
  ),
  flag_values=FLAGS,
)


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code."""
  return script.exit_code(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
  parse_flags(argv, FLAGS, __doc__, takes_config=False)
  if FLAGS.workdir is None:
    raise UserError('--workdir is missing; usage: jaxrl report --workdir=DIR')
  path = report.build(FLAGS.workdir, FLAGS.target)
  print(f'{path}  ({path.stat().st_size / 1e6:.1f} MB)')
  if FLAGS.perfetto not in (None, 'false'):
    target = None if FLAGS.perfetto == 'true' else pathlib.Path(FLAGS.perfetto)
    trace = perfetto.write(pathlib.Path(FLAGS.workdir), target)
    print(f'{trace}  ({trace.stat().st_size / 1e6:.1f} MB; open it in ui.perfetto.dev)')
  return 0
