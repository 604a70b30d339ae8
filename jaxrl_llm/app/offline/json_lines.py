"""Reads JSON Lines files line by line, so that an invalid line does not affect the other lines."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.files import parse_json


def numbered_lines(file: pathlib.Path, limit_bytes: int) -> Iterator[tuple[int, bytes | None]]:
  """Yields (line number from 1, content) for each line that is not blank. For a line of more than
  `limit_bytes`, the content is None. Raises UserError if the file cannot be read.
  """
  try:
    with open(file, 'rb') as opened:
      number = 0
      while line := opened.readline(limit_bytes + 1):
        number += 1
        if len(line) > limit_bytes:
          while not line.endswith(b'\n') and (line := opened.readline(limit_bytes)):
            pass
          yield number, None
        elif line.strip():
          yield number, line
  except OSError as error:
    raise UserError(f'{file}: cannot be read ({error.strerror})') from error


def parse_line(line: bytes | None, limit_bytes: int) -> Any:
  """Parses the content of a line from `numbered_lines`. Raises UserError if it is not JSON, or if
  the line was too long.
  """
  if line is None:
    raise UserError(f'the line is longer than {limit_bytes} bytes')
  try:
    return parse_json(line.decode())
  except ValueError as error:  # A UnicodeDecodeError is a ValueError.
    raise UserError(f'not JSON ({one_line(error, 100)})') from None
