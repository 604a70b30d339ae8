"""Program of an explorer process, started by `jaxrl serve --role=explorer` or by a run.

Explorers hold no model and touch no device.
"""

from __future__ import annotations

import asyncio
import platform
import sys
from collections.abc import Sequence

from absl import flags, logging

from jaxrl_llm.app.composition.workflows import build_workflow
from jaxrl_llm.config.load import parse_flags
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.connections import read_key
from jaxrl_llm.rollout.explorers.explorer import Link, explore

FLAGS = flags.FlagValues()
flags.DEFINE_string(
  'master', None, 'Address of the run: unix:PATH, or its front.', flag_values=FLAGS
)
flags.DEFINE_string(
  'name', None, 'Name of the explorer; default: the host name.', flag_values=FLAGS
)
flags.DEFINE_string(
  'key_file', None, 'File whose first line is the bearer token.', flag_values=FLAGS
)
flags.DEFINE_string('ca_file', None, 'Certificate authority for https, PEM.', flag_values=FLAGS)


def command(master: str, name: str) -> list[str]:
  """Returns the command that starts an explorer process with this Python.

  Args:
    master: address of the run's master.
    name: name of the explorer.
  """
  return [sys.executable, '-P', '-m', __name__, f'--master={master}', f'--name={name}']


async def _explore() -> None:
  name = FLAGS.name or platform.node() or 'explorer'
  link = Link(
    FLAGS.master, key=read_key(FLAGS.key_file, '--key_file'), ca_file=FLAGS.ca_file, name=name
  )
  await explore(link, build_workflow)


def run(argv: Sequence[str], document: str | None = None) -> int:
  """Returns the exit code. `document` describes the command for --help."""
  return script.exit_code(lambda: _run(argv, document))


def _run(argv: Sequence[str], document: str | None) -> int:
  parse_flags(argv, FLAGS, document, takes_config=False)
  if FLAGS.master is None:
    raise UserError('--master is missing; wanted the address that the run prints')
  logging.set_verbosity(logging.INFO)
  try:
    asyncio.run(_explore())
  except KeyboardInterrupt:
    return 130
  return 0


if __name__ == '__main__':
  sys.exit(run(sys.argv))
