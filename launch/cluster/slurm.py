"""`jaxrl launch slurm` from a checkout: `python launch/cluster/slurm.py --help` describes it."""

import sys

from jaxrl_llm.app.commands.cli import launch

if __name__ == '__main__':
  sys.exit(launch('launch', [sys.argv[0], 'slurm', *sys.argv[1:]]))
