"""Starts and ends launch scripts: parses absl flags and reports a UserError as one line."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from absl import app, flags

from jaxrl_llm.core.errors import UserError, first_cause
from jaxrl_llm.core.types import Json
from jaxrl_llm.core.waits import WaitExpired

T = TypeVar('T')


def parse(argv: Sequence[str]) -> list[str]:
  """Parses absl flags; returns the remaining arguments. Raises UserError for an invalid flag."""
  try:
    return flags.FLAGS(list(argv))
  except flags.Error as error:
    raise UserError(' '.join(str(error).split())) from error


def asks_json(argv: Sequence[str]) -> bool:
  """Returns whether a command line contains --json.

  The command line may be unparsed and may contain invalid flags.
  """
  return bool({'--json', '-json', '--json=true', '-json=true'} & {arg.lower() for arg in argv})


def print_json(value: Json) -> None:
  """Prints a value as one JSON document on standard output. Numbers that are not finite become
  null.
  """
  print(json.dumps(_finite(value), indent=1, ensure_ascii=False, allow_nan=False), flush=True)


def show(document: Json, lines: Iterable[str], *, as_json: bool) -> None:
  """Prints the result of a command: the document with `as_json`, otherwise the lines."""
  if as_json:
    print_json(document)
  else:
    print(*lines, sep='\n')


def _finite(value: Any) -> Json:
  if isinstance(value, Mapping):
    return {str(key): _finite(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_finite(item) for item in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value


def exit_code(main: Callable[[], int], *, as_json: bool = False) -> int:
  """Calls `main` and returns its result, an exit code.

  If `main` raises a UserError, alone or in an exception group, prints the error and returns the
  error's exit code. Other exceptions propagate.

  Args:
    as_json: whether the error is also printed on standard output, as `{"error": MESSAGE}`.
  """
  try:
    return main()
  except Exception as error:
    cause = first_cause(error)
    if not isinstance(cause, UserError):
      raise
    sys.stderr.write(f'error: {cause}\n')
    if as_json:
      print_json({'error': str(cause)})
    return cause.exit_code


def run_async(main: Coroutine[Any, Any, T]) -> T:
  """Runs `main` like `asyncio.run`, but ends the process at once if a wait has expired in `main`.

  A normal exit might hang on a stuck thread in this case. The error is printed as one line, after
  `main` has finished its clean-up.
  """

  async def guarded() -> T:
    try:
      return await main  # Wait 'main': bounded: every wait inside `main` has a deadline.
    except Exception as error:
      if isinstance(first_cause(error), WaitExpired):
        cause = _earliest(error)
        sys.stderr.write(f'run stopped: {cause}\n')
        leave_at_once(cause.exit_code)
      raise

  return asyncio.run(guarded())


def _earliest(error: BaseException) -> UserError:
  """Returns the earliest UserError in an exception chain. Later errors may come from the clean-up
  that the earliest error caused.

  Other exceptions in the chain are programming errors and are printed, except timeouts and
  cancellations.
  """
  cause, seen = error, set()
  # The chain may be circular: the context of an error that was re-raised from its exception group
  # is the group.
  while error is not None and error not in seen:
    seen |= {error, leaf := first_cause(error)}
    if isinstance(leaf, UserError):
      cause = leaf
    elif not isinstance(leaf, TimeoutError | asyncio.CancelledError):
      traceback.print_exception(leaf)
    error = leaf.__context__
  return cause


def leave_at_once(code: int) -> NoReturn:
  """Ends this process immediately.

  A normal exit would wait for the threads of this process and, in a job, for the other processes.
  """
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


def run(
  main: Callable[[list[str]], None], parser: Callable[[Sequence[str]], list[str]] = parse
) -> None:
  """Calls `main` with the arguments that remain after `parser` has parsed the flags.

  A UserError is printed on stderr as one line, and the process exits with the error's exit code.
  """
  try:
    app.run(main, flags_parser=parser)
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    sys.exit(error.exit_code)
