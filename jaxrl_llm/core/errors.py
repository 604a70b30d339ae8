"""The one exception that a user is meant to read: a single line that says what, where, got, wanted, remedy."""


class UserError(Exception):
  """Bad input or a bad environment. Launch scripts print it as one line and exit with `exit_code`.

  Raise it (or a subclass, where somebody catches it) with one line: what is wrong, where, what was got, what was
  wanted, and what to do about it.
  """

  exit_code = 2


class RunError(UserError):
  """A run that was well configured and cannot go on (disk full, no engine left, too many skipped updates)."""

  exit_code = 1
