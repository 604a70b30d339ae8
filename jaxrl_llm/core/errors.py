"""Exceptions whose messages are meant for users and tell them what to change."""

from __future__ import annotations

from collections.abc import Iterator

_MAX_CHARACTERS = 4000
"""Maximum length of a message in characters."""


class UserError(Exception):
  """Raised when the input or the environment is unusable.

  Launch scripts print the error as one line and exit with `exit_code`. The message is one line and
  should state what is wrong, where, the value got, the value wanted, and the remedy. If callers
  need to catch the error, raise a subclass of UserError. A message may quote arbitrary text:
  nonprintable characters are escaped, and the middle of a long message is omitted.
  """

  exit_code = 2

  def __init__(self, *args: object):
    super().__init__(*(_shown(arg) if isinstance(arg, str) else arg for arg in args))


class RunError(UserError):
  """Raised when a correctly configured run cannot continue, for example because the disk is full,
  no engine is left, or too many updates were skipped.
  """

  exit_code = 1


def _shown(text: str) -> str:
  text = _cut(text)
  return (
    text
    if text.isprintable()
    else _cut(''.join(c if c.isprintable() else ascii(c)[1:-1] for c in text))
  )


def _cut(text: str) -> str:
  half = _MAX_CHARACTERS // 2 - 2
  return text if len(text) <= _MAX_CHARACTERS else f'{text[:half]} … {text[-half:]}'


def one_line(text: object, limit: int = 400) -> str:
  """Returns `str(text)` on one line, truncated to `limit` characters."""
  line = ' '.join(str(text).split())
  return line if len(line) <= limit else f'{line[: limit - 1]}…'


def first_cause(error: BaseException) -> BaseException:
  """Returns the first UserError in an exception group, at any depth.

  If the group contains no UserError, returns its first exception. If `error` is not a group,
  returns `error`.
  """
  causes = list(_leaves(error))
  return next((cause for cause in causes if isinstance(cause, UserError)), causes[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
  if isinstance(error, BaseExceptionGroup):
    for inner in error.exceptions:
      yield from _leaves(inner)
  else:
    yield error
