"""`jaxrl launch` from a checkout: `python launch/launch.py --help` describes it."""

import sys

from jaxrl_llm.app.commands.cli import launch

if __name__ == '__main__':
  sys.exit(launch('launch', sys.argv))
