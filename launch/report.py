"""Rebuilds a run's report.html from its logs.

python launch/report.py --workdir=runs/quickstart [--target=FILE]
"""

from absl import flags

from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.runtime import report

WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run.')
TARGET = flags.DEFINE_string('target', None, 'File to write; <workdir>/report.html if not given.')


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise UserError(f'argument {argv[1]!r} is not a flag; usage: launch/report.py --workdir=DIR')
  if WORKDIR.value is None:
    raise UserError('--workdir is missing; usage: launch/report.py --workdir=DIR')
  path = report.build(WORKDIR.value, TARGET.value)
  print(f'{path}  ({path.stat().st_size / 1e6:.1f} MB)')


if __name__ == '__main__':
  script.run(main)
