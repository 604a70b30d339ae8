"""`jaxrl buffer` from a checkout: `python launch/buffer.py --help` describes it."""

import sys

from jaxrl_llm.app.commands.cli import launch

if __name__ == '__main__':
  sys.exit(launch('buffer', sys.argv))
