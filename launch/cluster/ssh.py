"""`jaxrl launch ssh` from a checkout: `python launch/cluster/ssh.py --help` describes it."""

import sys

from jaxrl_llm.app.commands.cli import launch

if __name__ == '__main__':
  sys.exit(launch('launch', [sys.argv[0], 'ssh', *sys.argv[1:]]))
