"""Converts a verl configuration to a configuration file of this package.

  jaxrl import-verl FILE [--output=CONFIG.py] [--rows=N] [--define=NAME=VALUE ...]

FILE is a shell script that starts `python3 -m verl.trainer.main_ppo key=value …`, or a YAML file.
The file is parsed but not run: variables, defaults such as ${NAME:-8} and arithmetic are
substituted, but commands such as $(date) are not. The report lists each key as mapped (with its
counterpart), not needed or not supported (with the reason).
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from absl import flags

from jaxrl_llm.app.importers import command, verl, verl_files, verl_table
from jaxrl_llm.app.importers.report import Imported, imported
from jaxrl_llm.app.importers.table import Import

FLAGS = flags.FlagValues()
command.define_flags(FLAGS)


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code."""
  return command.run(argv, FLAGS, __doc__, _read)


def _read(path: pathlib.Path, define: Mapping[str, str]) -> Imported:
  given, notes = verl_files.read_file(path, define)
  keys = Import(given, verl_table.TABLE, verl_table.DEFAULTS)
  verl.draft(keys, stem=path.stem, rows=FLAGS.rows)
  return imported('verl', keys, notes)
