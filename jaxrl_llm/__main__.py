"""`python -m jaxrl_llm NAME ...` runs the console command `jaxrl`, which need not be on the
PATH.
"""

import sys

from jaxrl_llm.app.commands.cli import main

if __name__ == '__main__':
  sys.exit(main())
