"""Tables that translate the keys of another library's configuration, and the outcome of each given
key.

A table maps a key, or a pattern in which `*` stands for any text, to its counterpart in this
package or to the reason why it has none. Tables are data: the importers, their documentation and
the tests read the same tables.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from jaxrl_llm.app.importers.given import Given
from jaxrl_llm.core.errors import one_line
from jaxrl_llm.core.types import Json


class Unreadable(ValueError):
  """Raised when a value cannot be translated. The message is "wanted …" or another reason."""


@dataclasses.dataclass(frozen=True)
class Mapped:
  """A key that has a counterpart in this package."""

  to: str
  """Name of the counterpart: a dotted key of the configuration, where `stages.NAME` is the imported
  stage, or an option of the algorithm. A `*` is replaced by the text that the `*` of the key's
  pattern matches. Several names are separated by commas.
  """
  read: Callable[[Json], Json] | None = None
  """Function that converts the value. If None, the importer computes the value from several
  keys.
  """


@dataclasses.dataclass(frozen=True)
class NotNeeded:
  """A key that needs no counterpart, because it does not affect results or because this package
  always behaves in the requested way.
  """

  why: str


@dataclasses.dataclass(frozen=True)
class NotSupported:
  """A key for a feature that this package does not have."""

  why: str


@dataclasses.dataclass(frozen=True)
class Choice:
  """A key whose treatment depends on its own value or on the value of another key."""

  rows: Mapping[Json, Row]
  otherwise: Row
  of: str | None = None
  """Key whose value decides. If None, the value of the key itself decides."""


End = Mapped | NotNeeded | NotSupported
Row = End | Choice
Table = Mapping[str, Row]
Fate = Literal['mapped', 'not needed', 'not supported']
FATES: tuple[Fate, ...] = ('mapped', 'not needed', 'not supported')


@dataclasses.dataclass(frozen=True)
class Outcome:
  """Result of importing one given key."""

  key: str
  value: Json
  where: str
  fate: Fate
  text: str
  """Name and value of the counterpart, or the reason for its absence."""


# Each of the following functions converts a value. It raises Unreadable if that is impossible.


def integer(value: Json) -> int:
  whole = number(value)
  if not whole.is_integer():
    raise Unreadable('wanted a whole number')
  return int(value)


def number(value: Json) -> float:
  if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
    raise Unreadable('wanted a number')
  return float(value)


def boolean(value: Json) -> bool:
  if not isinstance(value, bool):
    raise Unreadable('wanted true or false')
  return value


def text(value: Json) -> str:
  if not isinstance(value, str) or not value:
    raise Unreadable('wanted text')
  return value


def any_value(value: Json) -> Json:
  return value


def one_of(choices: Mapping[Json, Json]) -> Callable[[Json], Json]:
  """Returns a function that converts the keys of `choices` to their values."""

  def read(value: Json) -> Json:
    matching = [ours for theirs, ours in choices.items() if same(theirs, value)]
    if not matching:
      raise Unreadable(f'wanted one of {", ".join(map(str, choices))}')
    return matching[0]

  return read


def unless(absent: Json, read: Callable[[Json], Json]) -> Callable[[Json], Json]:
  """Returns a function that converts None and the value `absent` to None (meaning this package's
  default), and other values with `read`.
  """
  return lambda value: None if value is None or same(absent, value) else read(value)


def same(one: Json, other: Json) -> bool:
  """Returns whether two values are equal. Unlike in Python, true does not equal 1."""
  return one == other and isinstance(one, bool) == isinstance(other, bool)


@functools.cache
def _pattern(key: str) -> re.Pattern:
  return re.compile('(.*)'.join(map(re.escape, key.split('*'))))


def row_of(table: Table, key: str) -> tuple[Row | None, str]:
  """Returns the row for a key, and the text that the `*` of its pattern matches."""
  if key in table:
    return table[key], ''
  for pattern, row in table.items():
    if '*' in pattern and (match := _pattern(pattern).fullmatch(key)):
      return row, match.groups()[-1]
  return None, ''


class Import:
  """The keys given in one import: their values, with the other library's defaults, and their
  outcomes.

  Invariant: every given key has exactly one outcome.
  """

  def __init__(self, given: Iterable[Given], table: Table, defaults: Mapping[str, Json]):
    self._table, self._defaults = table, defaults
    self._outcomes: dict[int, Outcome] = {}
    self._given: list[Given] = list(given)
    self._last = {item.key: index for index, item in enumerate(self._given)}
    self.draft: dict[str, Json] = {}
    """Values of the new configuration, keyed by the names in `Mapped.to`. A value may be None."""
    self.comments: dict[tuple[str, str], str] = {}
    """Comments for the configuration file, keyed by (class name, field name)."""
    self.notes: list[str] = []
    """Remarks that concern more than one key."""
    self._read()

  def __contains__(self, key: str) -> bool:
    return key in self._last and not self._given[self._last[key]].missing

  def get(self, key: str, default: Json = None) -> Json:
    """Returns the given value of a key, or else the other library's default."""
    if key in self:
      return self._given[self._last[key]].value
    return self._defaults.get(key, default)

  def read(self, key: str, convert: Callable[[Json], Any], default: Any = None) -> Any:
    """Returns the converted value of a key. If the key is not given, or if its value cannot be
    converted, returns the other library's default. In the latter case, also reports the key as not
    supported.
    """
    if key not in self:
      return self._defaults.get(key, default)
    try:
      return convert(self.get(key))
    except Unreadable as error:
      self.refuse(key, str(error))
      return self._defaults.get(key, default)

  def refuse(self, key: str, why: str) -> None:
    """Reports a given key as not supported."""
    self._decide(key, 'not supported', why)

  def spare(self, key: str, why: str) -> None:
    """Reports a given key as not needed, unless it was reported as not supported before."""
    index = self._last.get(key)
    if index not in self._outcomes or self._outcomes[index].fate != 'not supported':
      self._decide(key, 'not needed', why)

  def named(self, prefix: str) -> dict[str, Json]:
    """Returns the given values whose keys begin with `prefix`, keyed by the rest of the key."""
    return {
      key.removeprefix(prefix): self.get(key)
      for key in self._last
      if key.startswith(prefix) and key in self
    }

  def outcomes(self) -> list[Outcome]:
    """Returns the outcome of each given key, in the given order."""
    return [self._valued(self._outcomes[index]) for index in range(len(self._given))]

  def _valued(self, outcome: Outcome) -> Outcome:
    """Adds the values of the counterparts to the outcome's text."""
    if outcome.fate != 'mapped':
      return outcome
    names = [self._shown(name) for name in outcome.text.split(', ')]
    return dataclasses.replace(outcome, text=', '.join(names))

  def _shown(self, name: str) -> str:
    value = self.draft.get(name)
    is_long = isinstance(value, list) and any(isinstance(item, dict) for item in value)
    return name if value is None or is_long else f'{name} = {one_line(repr(value), 80)}'

  def _decide(self, key: str, fate: Fate, why: str) -> None:
    index = self._last.get(key)
    if index is not None:
      item = self._given[index]
      self._outcomes[index] = Outcome(key, item.value, item.where, fate, why)

  def _read(self) -> None:
    for key, value in self._defaults.items():
      row, star = self._resolved(key, value)
      if isinstance(row, Mapped) and row.read is not None:
        self.draft[row.to.replace('*', star)] = row.read(value)
    for index, item in enumerate(self._given):
      if self._last[item.key] != index:
        later = self._given[self._last[item.key]].where
        self._outcomes[index] = Outcome(
          item.key, item.value, item.where, 'not needed', f'overridden by a later value: {later}'
        )
      elif item.missing:
        parts = ', '.join(item.missing)
        self.refuse(
          item.key, f'its value depends on {parts}, which is not evaluated; set it yourself'
        )
      else:
        self._apply(item)

  def _apply(self, item: Given) -> None:
    row, star = self._resolved(item.key, item.value)
    if item.value is None or (isinstance(row, NotSupported) and item.value in (False, [], {})):
      self.spare(item.key, 'not set, or turned off')
      return
    match row:
      case None:
        self.refuse(item.key, 'the importer does not know this key')
      case NotNeeded(why):
        self.spare(item.key, why)
      case NotSupported(why):
        self.refuse(item.key, why)
      case Mapped(to, read):
        name = to.replace('*', star)
        if read is not None:
          try:
            value = read(item.value)
          except (OverflowError, ValueError) as error:
            self.refuse(item.key, f'{name}: {one_line(error)}')
            return
          if value is None:
            self.spare(item.key, 'not set')
            return
          self.draft[name] = value
        self._decide(item.key, 'mapped', name)

  def _resolved(self, key: str, value: Json) -> tuple[End | None, str]:
    row, star = row_of(self._table, key)
    while isinstance(row, Choice):
      held = value if row.of is None else self.get(row.of)
      row = next((choice for own, choice in row.rows.items() if same(own, held)), row.otherwise)
    return row, star


def final_rows(row: Row) -> Sequence[End]:
  """Returns all possible treatments of an imported key: the row itself or, if the row is a
  `Choice`, the rows for all values of the key on which the choice depends.
  """
  if not isinstance(row, Choice):
    return [row]
  return [end for inner in (*row.rows.values(), row.otherwise) for end in final_rows(inner)]
