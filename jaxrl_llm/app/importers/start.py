"""Finds the command that starts a trainer in a shell script."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxrl_llm.app.importers.shell import Command, read_script
from jaxrl_llm.core.errors import UserError


class Start(NamedTuple):
  """The first command of a script that starts a trainer."""

  command: Command
  at: int
  """Index of the trainer's name in the words of the command."""
  notes: list[str]
  """Remarks about the script, one line each."""


def find_start(
  content: str,
  path: pathlib.Path,
  define: Mapping[str, str],
  position: Callable[[Command], int | None],
  wanted: str,
) -> Start:
  """Returns the first command of a script that starts a trainer.

  Args:
    content: text of the script.
    path: file of the script, for messages.
    define: values for variables of the script, keyed by name.
    position: function that returns the index of the trainer's name in the words of a command, or
      None if the command starts no trainer.
    wanted: description of the expected command, for the error message if the script starts no
      trainer.

  Raises:
    UserError: the script cannot be read, or starts no trainer.
  """
  try:
    script = read_script(content, define)
  except UserError as error:
    raise UserError(f'{path}: {error}') from None
  starts = [(command, at) for command in script.commands if (at := position(command)) is not None]
  if not starts:
    raise UserError(f'{path}: no command starts {wanted}')
  command, at = starts[0]
  notes = [*script.notes] + [
    f'line {other.line}: another command starts a trainer; only the one on line {command.line} is '
    'imported'
    for other, _ in starts[1:]
  ]
  return Start(command, at, notes)
