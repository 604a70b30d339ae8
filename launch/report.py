"""Rebuilds a run's report.html from its logs, and on demand a trace of its messages for ui.perfetto.dev.

python launch/report.py --workdir=runs/quickstart [--target=FILE] [--perfetto[=FILE]]
"""

import pathlib

from absl import flags

from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.runtime import perfetto, report

WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run.')
TARGET = flags.DEFINE_string('target', None, 'File to write; <workdir>/report.html if not given.')


class _FileOrDefault(flags.Flag):
  """A flag that may stand without a value, as a boolean one may; it then reads 'true'."""

  def __init__(self, name: str, text: str):
    super().__init__(flags.ArgumentParser(), flags.ArgumentSerializer(), name, None, text)
    self.boolean = True


PERFETTO = flags.DEFINE_flag(
  _FileOrDefault('perfetto', 'Also write the messages as a trace; to <workdir>/perfetto.json without a value.')
)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise UserError(f'argument {argv[1]!r} is not a flag; usage: launch/report.py --workdir=DIR')
  if WORKDIR.value is None:
    raise UserError('--workdir is missing; usage: launch/report.py --workdir=DIR')
  path = report.build(WORKDIR.value, TARGET.value)
  print(f'{path}  ({path.stat().st_size / 1e6:.1f} MB)')
  if PERFETTO.value not in (None, 'false'):
    target = None if PERFETTO.value == 'true' else pathlib.Path(PERFETTO.value)
    trace = perfetto.write(pathlib.Path(WORKDIR.value), target)
    print(f'{trace}  ({trace.stat().st_size / 1e6:.1f} MB; open it in ui.perfetto.dev)')


if __name__ == '__main__':
  script.run(main)
