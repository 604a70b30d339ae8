"""`jaxrl import-trl` from a checkout: `python launch/import_trl.py --help` describes it."""

import sys

from jaxrl_llm.app.commands.cli import launch

if __name__ == '__main__':
  sys.exit(launch('import-trl', sys.argv))
