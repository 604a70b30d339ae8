"""Runs a job on this machine, from a checkout.

  python launch/cluster/local.py --processes=2 -- COMMAND [ARGUMENT ...]
  python launch/cluster/local.py --config=FILE --workdir=DIR [--submit]

The first form runs any command under the supervisor (`jaxrl_llm/app/cluster/supervisor.py`). The
second form is the same as `jaxrl launch local`.
"""

import sys

from jaxrl_llm.app.cluster import supervisor


def _supervises(arguments: list[str]) -> bool:
  flags = [argument.lstrip('-').partition('=')[0] for argument in arguments]
  asked = {'config', 'status', 'logs', 'cancel', 'help'} & set(flags)
  return '--' in arguments or not asked


if __name__ == '__main__':
  if _supervises(sys.argv[1:]):
    sys.exit(supervisor.main(sys.argv))
  # Imported here, because this module imports JAX, which the supervisor does not need.
  from jaxrl_llm.app.commands.cli import launch

  sys.exit(launch('launch', [sys.argv[0], 'local', *sys.argv[1:]]))
