"""`jaxrl import-verl` from a checkout: `python launch/import_verl.py --help` describes it."""

import sys

from jaxrl_llm.app.commands.cli import launch

if __name__ == '__main__':
  sys.exit(launch('import-verl', sys.argv))
