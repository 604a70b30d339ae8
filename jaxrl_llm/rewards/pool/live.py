"""`scorers.json`: how many scorer processes a run has and where its judges and sandbox hosts are, while it goes on.

Invariant: a file that cannot be read, or asks for what is not there, changes nothing and is one line of the log; so is
one of which a part was refused when another was in force already, and the line says which.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from absl import logging

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.files import parse_json, read_bytes

FILE = 'scorers.json'
"""In the run directory."""
CHECK_S = 1.0
"""Seconds between two looks at it."""
_MAX_BYTES = 1 << 20
"""Size of the largest such file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Live:
  """Content of the file."""

  workers: int | None = None
  """Scorer processes; None: as many as there are."""
  addresses: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
  """Addresses by scorer; those of other scorers stay."""


def parse(text: str) -> Live:
  """Raises UserError for anything that is not such a file."""
  try:
    said = parse_json(text)
  except ValueError as error:
    raise UserError(f'no JSON ({error})') from None
  example = '{"workers": 4, "addresses": {"judge": ["http://127.0.0.1:8000"]}}'
  if not isinstance(said, dict) or not set(said) <= {'workers', 'addresses'}:
    raise UserError(f'wanted an object with "workers", "addresses" or both, such as {example}')
  workers, addresses = said.get('workers'), said.get('addresses', {})
  if workers is not None and (type(workers) is not int or workers < 1):
    raise UserError(f'workers is {workers!r}, wanted a number of processes of at least 1')
  if not isinstance(addresses, dict) or not all(map(_is_list_of_addresses, addresses.values())):
    raise UserError(f'addresses is {addresses!r}, wanted a list of at least one address for each scorer')
  return Live(workers=workers, addresses={name: tuple(of) for name, of in addresses.items()})


def _is_list_of_addresses(value: Any) -> bool:
  return isinstance(value, list) and bool(value) and all(isinstance(one, str) and one for one in value)


class Partly(UserError):
  """A part of the file is in force, and the rest was refused; says which."""


class LiveFile:
  """Looks at the file, and says what is new in it."""

  def __init__(self, path: pathlib.Path, apply: Callable[[Live], Awaitable[None]]):
    """
    Args:
      apply: raises UserError for what it does not do; Partly where it did something before.
    """
    self._path, self._apply = path, apply
    self._seen: tuple[int, ...] | None = None
    self._closing = asyncio.Event()
    self._following: asyncio.Task | None = None

  def start(self) -> None:
    """From now on what changes is applied."""
    self._following = asyncio.create_task(self._follow())

  async def close(self) -> None:
    """Returns when a change that is under way has been made."""
    self._closing.set()
    if self._following is not None:
      await self._following  # wait live_file: `scorers_start` of a change that is under way

  async def _follow(self) -> None:
    while True:
      try:
        await asyncio.wait_for(self._closing.wait(), CHECK_S)
        return
      except TimeoutError:
        await self.check()

  async def check(self) -> None:
    """Applies the file if it is another one than at the last look."""
    try:
      text = await asyncio.to_thread(self._changed)
      if text is not None:
        await self._apply(parse(text))
        logging.info('%s: applied', self._path)
    except Partly as error:
      logging.warning('%s: %s', self._path, error)
    except (UserError, OSError, ValueError) as error:  # ValueError: no text, no regular file, or too large.
      logging.warning('%s: %s; nothing is changed', self._path, error)

  def _changed(self) -> str | None:
    try:
      stat = self._path.stat()
    except FileNotFoundError:
      return None
    seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    if seen == self._seen:
      return None
    self._seen = seen
    return read_bytes(self._path, _MAX_BYTES).decode()
