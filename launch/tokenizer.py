"""`jaxrl tokenizer` from a checkout: `python launch/tokenizer.py --help` describes it."""

import sys

from jaxrl_llm.app.commands.cli import launch

if __name__ == '__main__':
  sys.exit(launch('tokenizer', sys.argv))
