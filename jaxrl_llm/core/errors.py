"""The one exception that a user is meant to read: a single line that says what, where, got, wanted, remedy."""

from __future__ import annotations

from collections.abc import Iterator


class UserError(Exception):
  """Bad input or a bad environment. Launch scripts print it as one line and exit with `exit_code`.

  Raise it (or a subclass, where somebody catches it) with one line: what is wrong, where, what was got, what was
  wanted, and what to do about it.
  """

  exit_code = 2


class RunError(UserError):
  """A run that was well configured and cannot go on (disk full, no engine left, too many skipped updates)."""

  exit_code = 1


def one_line(text: object, limit: int = 400) -> str:
  """`str(text)` on one line, at most `limit` characters of it."""
  line = ' '.join(str(text).split())
  return line if len(line) <= limit else f'{line[: limit - 1]}…'


def first_cause(error: BaseException) -> BaseException:
  """Of an exception group, however deep, what to tell the user: its first UserError, else its first exception."""
  causes = list(_leaves(error))
  return next((cause for cause in causes if isinstance(cause, UserError)), causes[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
  if isinstance(error, BaseExceptionGroup):
    for inner in error.exceptions:
      yield from _leaves(inner)
  else:
    yield error
