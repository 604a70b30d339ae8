"""`jaxrl convert` from a checkout: `python launch/convert.py --help` describes it."""

import sys

from jaxrl_llm.app.commands.cli import launch

if __name__ == '__main__':
  sys.exit(launch('convert', sys.argv))
