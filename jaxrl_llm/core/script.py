"""How a launch script starts and ends: absl flags in, one line for every error of the user's."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn, TypeVar

from absl import app, flags

from jaxrl_llm.core.errors import UserError, first_cause
from jaxrl_llm.core.waits import WaitExpired

T = TypeVar('T')


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


def run_async(main: Coroutine[Any, Any, T]) -> T:
  """Like `asyncio.run`, but an expired wait prints one line and ends the process, because a thread may be stuck.

  `main` has finished its clean-up by then.
  """

  async def guarded() -> T:
    try:
      return await main  # wait main: its own waits
    except Exception as error:
      if isinstance(first_cause(error), WaitExpired):
        cause = _earliest(error)
        sys.stderr.write(f'run stopped: {cause}\n')
        leave_at_once(cause.exit_code)
      raise

  return asyncio.run(guarded())


def _earliest(error: BaseException) -> UserError:
  """The first UserError of the chain, so that an error in the clean-up does not hide its cause.

  Prints programming errors on the way.
  """
  cause, seen = error, set()
  while error is not None and error not in seen:  # What a group was raised for has the group as its context.
    seen |= {error, leaf := first_cause(error)}
    if isinstance(leaf, UserError):
      cause = leaf
    elif not isinstance(leaf, TimeoutError | asyncio.CancelledError):
      traceback.print_exception(leaf)
    error = leaf.__context__
  return cause


def leave_at_once(code: int) -> NoReturn:
  """Ends this process. A normal exit would wait for its threads, and in a job for the other processes."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


def run(main: Callable[[list[str]], None], parser: Callable[[Sequence[str]], list[str]] = parse) -> None:
  """Calls `main` with what `parser` leaves of the command line; a UserError is one line on stderr and its exit code."""
  try:
    app.run(main, flags_parser=parser)
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    sys.exit(error.exit_code)
