"""Applies `scorers.json`, a file that changes the number of scorer processes and the addresses of
scorers' servers during a run.

Invariants: an unreadable or invalid file changes nothing, and one line is logged. If one part of
the file is applied and a later part is refused, the line says which part was applied.
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
"""Name of the file in the run directory that changes the scorer pool while the run is active."""
CHECK_S = 1.0
"""Seconds between checks of `scorers.json` for changes."""
_MAX_BYTES = 1 << 20
"""Maximum size of `scorers.json` in bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Live:
  """Validated content of `scorers.json`."""

  workers: int | None = None
  """New number of scorer processes; None to leave it unchanged."""
  addresses: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
  """New addresses, keyed by scorer name. Scorers that are not listed keep their addresses."""


def parse(text: str) -> Live:
  """Parses the text of `scorers.json`. Raises UserError if it is malformed."""
  try:
    content = parse_json(text)
  except ValueError as error:
    raise UserError(f'not JSON ({error})') from None
  example = '{"workers": 4, "addresses": {"judge": ["http://127.0.0.1:8000"]}}'
  if not isinstance(content, dict) or not set(content) <= {'workers', 'addresses'}:
    raise UserError(f'wanted an object with "workers", "addresses" or both, such as {example}')
  workers, addresses = content.get('workers'), content.get('addresses', {})
  if workers is not None and (type(workers) is not int or workers < 1):
    raise UserError(f'workers is {workers!r}, wanted at least 1 process')
  if not isinstance(addresses, dict) or not all(map(_is_list_of_addresses, addresses.values())):
    raise UserError(
      f'addresses is {addresses!r}, wanted a list of at least one address for each scorer'
    )
  return Live(workers=workers, addresses={name: tuple(of) for name, of in addresses.items()})


def _is_list_of_addresses(value: Any) -> bool:
  return (
    isinstance(value, list)
    and bool(value)
    and all(isinstance(address, str) and address for address in value)
  )


class Partly(UserError):
  """Raised if only a part of `scorers.json` was applied and the rest was refused. The message names
  the applied part.
  """


class LiveFile:
  """Polls a file and applies its content whenever it changes."""

  def __init__(self, path: pathlib.Path, apply: Callable[[Live], Awaitable[None]]):
    """
    Args:
      path: path of the file, which need not exist.
      apply: applies the content. It raises UserError if nothing was applied, and Partly if only a
        part was applied.
    """
    self._path, self._apply = path, apply
    self._seen: tuple[int, ...] | None = None
    self._closing = asyncio.Event()
    self._following: asyncio.Task | None = None

  def start(self) -> None:
    """Starts polling the file."""
    self._following = asyncio.create_task(self._follow())

  async def close(self) -> None:
    """Stops polling, after any change in progress has been applied."""
    self._closing.set()
    if self._following is not None:
      # Wait 'live_file': bounded by 'scorers_start', which bounds a change in progress.
      await self._following

  async def _follow(self) -> None:
    while True:
      try:
        await asyncio.wait_for(self._closing.wait(), CHECK_S)
        return
      except TimeoutError:
        await self.check()

  async def check(self) -> None:
    """Applies the file if it changed since the last check."""
    try:
      text = await asyncio.to_thread(self._changed)
      if text is not None:
        await self._apply(parse(text))
        logging.info('%s: applied', self._path)
    except Partly as error:
      logging.warning('%s: %s', self._path, error)
    # A ValueError means that the file is not text, not a regular file, or too large.
    except (UserError, OSError, ValueError) as error:
      logging.warning('%s: %s; nothing was changed', self._path, error)

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
