"""`jaxrl launch jobset` from a checkout: `python launch/cluster/jobset.py --help` describes it."""

import sys

from jaxrl_llm.app.commands.cli import launch

if __name__ == '__main__':
  sys.exit(launch('launch', [sys.argv[0], 'jobset', *sys.argv[1:]]))
