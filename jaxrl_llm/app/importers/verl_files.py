"""Reads verl configurations: shell scripts that start verl's trainer, and YAML files."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping

from jaxrl_llm.app.importers.given import Given, leaves, read_mapping, read_text, value_of
from jaxrl_llm.app.importers.shell import Command
from jaxrl_llm.app.importers.start import find_start
from jaxrl_llm.core.types import Json

_MAIN = re.compile(r'(?:.*[./])?main_(?:ppo|dapo)(?:\.py)?')
_PAIR = re.compile(r'(\+{0,2}|~)([A-Za-z_][\w.\-]*)=(.*)', re.DOTALL)
_REFERENCE = re.compile(r'\$\{(?:oc\.select:)?([\w.]+)(?:,([^{}]*))?\}')


def read_file(path: pathlib.Path, define: Mapping[str, str]) -> tuple[list[Given], list[str]]:
  """Returns the keys that a file gives, and notes about how it was read.

  Args:
    path: YAML file (its name ends in .yaml or .yml) or shell script.
    define: values for variables of the script, keyed by name.

  Raises:
    UserError: the file cannot be read, or starts no trainer.
  """
  content = read_text(path)
  if path.suffix in ('.yaml', '.yml'):
    return _resolved(dict(leaves(read_mapping(content, path)))), []
  wanted = 'verl.trainer.main_ppo; wanted python3 -m verl.trainer.main_ppo key=value …'
  command, at, notes = find_start(content, path, define, _trainer_at, wanted)
  return [_given(command, index) for index in range(at + 1, len(command.words))], notes


def _trainer_at(command: Command) -> int | None:
  return next((i for i, word in enumerate(command.words) if _MAIN.fullmatch(word.text)), None)


def _given(command: Command, index: int) -> Given:
  word, where = command.words[index], f'line {command.line}'
  flag = re.fullmatch(r'(--config-(?:name|path))=(.*)', word.text)
  if flag is not None:
    return Given(flag[1], flag[2].strip('\'"'), where, word.missing)
  match = _PAIR.fullmatch(word.text)
  if match is None or match[1] == '~':
    return Given(word.text, '', where, word.missing)
  return Given(match[2], value_of(match[3]), where, word.missing)


def _resolved(values: Mapping[str, Json]) -> list[Given]:
  """Returns the keys of a YAML file. A value that consists of a reference to another key, such as
  `${data.max_prompt_length}`, is replaced with that key's value or, if the file lacks the key, with
  the default in the reference. Other references are not replaced.
  """
  given = []
  for key, value in values.items():
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if match is not None:
      value = values.get(match[1], value if match[2] is None else value_of(match[2].strip()))
    is_open = isinstance(value, str) and ('${' in value or value == '???')
    given.append(Given(key, value, 'YAML', (value,) if is_open else ()))
  return given
