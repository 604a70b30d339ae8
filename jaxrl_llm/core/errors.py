"""The one exception that a user is meant to read: a single line that says what, where, got, wanted, remedy."""

from __future__ import annotations

from collections.abc import Iterator

_MAX_CHARACTERS = 4000
"""Length of the longest message."""


class UserError(Exception):
  """Bad input or a bad environment. Launch scripts print it as one line and exit with `exit_code`.

  Raise it (or a subclass, where somebody catches it) with one line: what is wrong, where, what was got, what was
  wanted, and what to do about it. Quotations may be anything: characters that cannot be printed are escaped, and the
  middle of a long text is left out.
  """

  exit_code = 2

  def __init__(self, *args: object):
    super().__init__(*(_shown(arg) if isinstance(arg, str) else arg for arg in args))


class RunError(UserError):
  """A run that was well configured and cannot go on (disk full, no engine left, too many skipped updates)."""

  exit_code = 1


def _shown(text: str) -> str:
  text = _cut(text)
  return text if text.isprintable() else _cut(''.join(c if c.isprintable() else ascii(c)[1:-1] for c in text))


def _cut(text: str) -> str:
  half = _MAX_CHARACTERS // 2 - 2
  return text if len(text) <= _MAX_CHARACTERS else f'{text[:half]} … {text[-half:]}'


def one_line(text: object, limit: int = 400) -> str:
  """`str(text)` on one line, at most `limit` characters of it."""
  line = ' '.join(str(text).split())
  return line if len(line) <= limit else f'{line[: limit - 1]}…'


def first_cause(error: BaseException) -> BaseException:
  """The first UserError of an exception group, however deep; else its first exception."""
  causes = list(_leaves(error))
  return next((cause for cause in causes if isinstance(cause, UserError)), causes[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
  if isinstance(error, BaseExceptionGroup):
    for inner in error.exceptions:
      yield from _leaves(inner)
  else:
    yield error
