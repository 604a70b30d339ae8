"""Imports of other libraries' configurations, made in the same way as by the commands."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from paths import FIXTURES

from jaxrl_llm.app.importers import (
  trl,
  trl_files,
  trl_table,
  verl,
  verl_files,
  verl_table,
)
from jaxrl_llm.app.importers.report import Imported, imported
from jaxrl_llm.app.importers.table import Import
from jaxrl_llm.app.schema import Config

FILES = FIXTURES / 'imports'


def from_verl(path: pathlib.Path, rows: int | None = None, **define: str) -> Imported:
  given, notes = verl_files.read_file(path, define)
  keys = Import(given, verl_table.TABLE, verl_table.DEFAULTS)
  verl.draft(keys, stem=path.stem, rows=rows)
  return imported('verl', keys, notes)


def from_trl(
  path: pathlib.Path, rows: int | None = None, trainer: str | None = None, **define: str
) -> Imported:
  arguments = trl_files.read_file(path, define, trainer)
  trainer = arguments.trainer
  keys = Import(arguments.given, trl_table.TABLES[trainer], trl_table.DEFAULTS[trainer])
  trl.draft(keys, trainer, stem=path.stem, rows=rows, functions=str(path))
  return imported('TRL', keys, arguments.notes)


def fates(result: Imported) -> Mapping[str, str]:
  """Returns what became of each key. If a key was given twice, the last one counts."""
  return {item.key: item.fate for item in result.outcomes}


def texts(result: Imported) -> Mapping[str, str]:
  return {item.key: item.text for item in result.outcomes}


def written(result: Imported) -> Config:
  """Returns the configuration that the written file defines."""
  names: dict = {}
  exec(result.source(pathlib.Path('imported.sh'), pathlib.Path('x.py')), names)
  return names['get_config']()
