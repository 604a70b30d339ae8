"""Tables of another library's keys, and what an import reports about each key that was given.

A table maps a key, or a pattern in which `*` stands for any text, to what becomes of the key here.
Tables are data: the importers, their documentation and the tests all read the same ones.
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
  """A value that a key cannot have here. The message completes "wanted …" or says why."""


@dataclasses.dataclass(frozen=True)
class Mapped:
  """A key that has a counterpart."""

  to: str
  """Name of the setting here: a path in the configuration, where `stages.NAME` is the imported
  stage, or an option of the algorithm. A `*` is replaced by the text that the `*` of the key's
  pattern has matched. Several names are separated by commas.
  """
  read: Callable[[Json], Json] | None = None
  """Converts the value; None: the importer computes our values from several keys."""


@dataclasses.dataclass(frozen=True)
class NotNeeded:
  """A key without a counterpart that changes no result, or is always so here."""

  why: str


@dataclasses.dataclass(frozen=True)
class NotSupported:
  """A key that asks for what is not here."""

  why: str


@dataclasses.dataclass(frozen=True)
class Choice:
  """A key whose fate depends on its own value, or on that of another key."""

  rows: Mapping[Json, Row]
  otherwise: Row
  of: str | None = None
  """The other key; None: the key's own value decides."""


End = Mapped | NotNeeded | NotSupported
Row = End | Choice
Table = Mapping[str, Row]
Fate = Literal['mapped', 'not needed', 'not supported']
FATES: tuple[Fate, ...] = ('mapped', 'not needed', 'not supported')


@dataclasses.dataclass(frozen=True)
class Outcome:
  """Outcome for a given key."""

  key: str
  value: Json
  where: str
  fate: Fate
  text: str
  """Our name and value, or the reason."""


# Converters of values.


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
  """Returns a converter by a table of values."""

  def read(value: Json) -> Json:
    matching = [ours for theirs, ours in choices.items() if same(theirs, value)]
    if not matching:
      raise Unreadable(f'wanted one of {", ".join(map(str, choices))}')
    return matching[0]

  return read


def unless(absent: Json, read: Callable[[Json], Json]) -> Callable[[Json], Json]:
  """Returns a converter that gives None, our default, for the value `absent`."""
  return lambda value: None if value is None or same(absent, value) else read(value)


def same(one: Json, other: Json) -> bool:
  """Whether two values are equal; unlike in Python, true is not 1."""
  return one == other and isinstance(one, bool) == isinstance(other, bool)


@functools.cache
def _pattern(key: str) -> re.Pattern:
  return re.compile('(.*)'.join(map(re.escape, key.split('*'))))


def row_of(table: Table, key: str) -> tuple[Row | None, str]:
  """Returns the row of a key, and what the star of its pattern stands for."""
  if key in table:
    return table[key], ''
  for pattern, row in table.items():
    if '*' in pattern and (match := _pattern(pattern).fullmatch(key)):
      return row, match.groups()[-1]
  return None, ''


class Import:
  """The given keys of one import: their values with the library's defaults, and their outcomes.

  Invariant: every given key has exactly one outcome.
  """

  def __init__(self, given: Iterable[Given], table: Table, defaults: Mapping[str, Json]):
    self._table, self._defaults = table, defaults
    self._outcomes: dict[int, Outcome] = {}
    self._given: list[Given] = list(given)
    self._last = {item.key: index for index, item in enumerate(self._given)}
    self.draft: dict[str, Json] = {}
    """Our values, by the names of the table. None is a value."""
    self.comments: dict[tuple[str, str], str] = {}
    """Comments of the configuration file, by class and field."""
    self.notes: list[str] = []
    """Remarks that concern more than one key."""
    self._read()

  def __contains__(self, key: str) -> bool:
    return key in self._last and not self._given[self._last[key]].missing

  def get(self, key: str, default: Json = None) -> Json:
    """Returns the value of a key: as given, or else the library's default."""
    if key in self:
      return self._given[self._last[key]].value
    return self._defaults.get(key, default)

  def read(self, key: str, convert: Callable[[Json], Any], default: Any = None) -> Any:
    """Returns a converted value; one that cannot be converted is reported, and the library's
    default takes its place.
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
    """Reports a given key as not needed, unless its value has been refused."""
    index = self._last.get(key)
    if index not in self._outcomes or self._outcomes[index].fate != 'not supported':
      self._decide(key, 'not needed', why)

  def named(self, prefix: str) -> dict[str, Json]:
    """Returns the given values below a dotted key, by the rest of their names."""
    return {
      key.removeprefix(prefix): self.get(key)
      for key in self._last
      if key.startswith(prefix) and key in self
    }

  def outcomes(self) -> list[Outcome]:
    """Returns what became of each given key, in their order."""
    return [self._valued(self._outcomes[index]) for index in range(len(self._given))]

  def _valued(self, outcome: Outcome) -> Outcome:
    """Adds our values to the names that an outcome has."""
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
          item.key, item.value, item.where, 'not needed', f'given again: {later}'
        )
      elif item.missing:
        parts = ', '.join(item.missing)
        self.refuse(item.key, f'its value needs {parts}, which is not run; set it yourself')
      else:
        self._apply(item)

  def _apply(self, item: Given) -> None:
    row, star = self._resolved(item.key, item.value)
    if item.value is None or (isinstance(row, NotSupported) and item.value in (False, [], {})):
      self.spare(item.key, 'not set, or off')
      return
    match row:
      case None:
        self.refuse(item.key, 'no entry for this key in the table of the importer')
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
  """Returns all that may become of a key."""
  if not isinstance(row, Choice):
    return [row]
  return [end for inner in (*row.rows.values(), row.otherwise) for end in final_rows(inner)]
