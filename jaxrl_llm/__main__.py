"""`python -m jaxrl_llm NAME ...`: the console command `jaxrl` where it is not on the PATH."""

import sys

from jaxrl_llm.app.commands.cli import main

if __name__ == '__main__':
  sys.exit(main())
