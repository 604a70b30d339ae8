"""Imports of other libraries' configurations, as the commands make them."""

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
  """What became of each key; of a key that was given twice, of the last."""
  return {item.key: item.fate for item in result.outcomes}


def texts(result: Imported) -> Mapping[str, str]:
  return {item.key: item.text for item in result.outcomes}


def written(result: Imported) -> Config:
  """The configuration that the written file returns."""
  names: dict = {}
  exec(result.source(pathlib.Path('imported.sh'), pathlib.Path('x.py')), names)
  return names['get_config']()
