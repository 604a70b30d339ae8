"""`jaxrl fetch` from a checkout: `python launch/fetch.py --help` describes it."""

import sys

from jaxrl_llm.app.commands.cli import launch

if __name__ == '__main__':
  sys.exit(launch('fetch', sys.argv))
