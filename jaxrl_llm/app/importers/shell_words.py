"""Words of a shell script after substitution, and evaluation of conditions that compare them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxrl_llm.core.errors import one_line


class Word(NamedTuple):
  """A word of a command after substitution."""

  text: str
  missing: tuple[str, ...] = ()
  """Substitutions that only running the script could make. `text` has a placeholder for each."""


def unread(text: str) -> Word:
  """Returns a placeholder for a substitution that only running the script could make."""
  return Word('$(…)', (one_line(text, 60),))


_COMPARISONS = {
  '=': lambda a, b: a == b,
  '==': lambda a, b: a == b,
  '!=': lambda a, b: a != b,
  '-eq': lambda a, b: int(a) == int(b),
  '-ne': lambda a, b: int(a) != int(b),
  '-lt': lambda a, b: int(a) < int(b),
  '-le': lambda a, b: int(a) <= int(b),
  '-gt': lambda a, b: int(a) > int(b),
  '-ge': lambda a, b: int(a) >= int(b),
}


def condition(words: Sequence[Word]) -> bool | None:
  """Returns whether a test `[ … ]` or `[[ … ]]` is true; None if this cannot be decided."""
  if any(word.missing for word in words) or len(words) < 3:
    return None
  texts = [word.text for word in words]
  if (texts[0], texts[-1]) not in (('[', ']'), ('[[', ']]')):
    return None
  match texts[1:-1]:
    case ['-z', text]:
      return not text
    case ['-n', text]:
      return bool(text)
    case [left, comparison, right] if comparison in _COMPARISONS and not set('*?[') & set(right):
      try:
        return _COMPARISONS[comparison](left, right)
      except ValueError:
        return None
  return None


def matches(subject: Word, patterns: Sequence[Word]) -> bool | None:
  """Returns whether one of a branch's patterns matches the word of a `case`; None if this cannot be
  decided.

  Args:
    subject: word that the `case` compares.
    patterns: patterns of the branch.
  """
  texts = [pattern.text for pattern in patterns]
  if '*' in texts:
    return True
  if subject.missing or any(set('*?[') & set(text) for text in texts):
    return None
  return subject.text in texts
