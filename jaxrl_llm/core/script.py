"""How a launch script starts and ends: absl flags in, one line for every error of the user's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from absl import app, flags

from jaxrl_llm.core.errors import UserError, first_cause


def parse(argv: Sequence[str]) -> list[str]:
  """What is left of a command line without absl's flags; UserError for one that cannot be used."""
  try:
    return flags.FLAGS(list(argv))
  except flags.Error as error:
    raise UserError(' '.join(str(error).split())) from error


def exit_code(main: Callable[[], int]) -> int:
  """What `main` returns; for a UserError, also one inside a group, a line on stderr and its exit code."""
  try:
    return main()
  except Exception as error:
    cause = first_cause(error)
    if not isinstance(cause, UserError):
      raise
    sys.stderr.write(f'error: {cause}\n')
    return cause.exit_code


def run(main: Callable[[list[str]], None], parser: Callable[[Sequence[str]], list[str]] = parse) -> None:
  """Calls `main` with what `parser` leaves of the command line; a UserError is one line on stderr and its exit code."""
  try:
    app.run(main, flags_parser=parser)
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    sys.exit(error.exit_code)
