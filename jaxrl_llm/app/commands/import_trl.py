"""Converts TRL arguments to a configuration file.

  jaxrl import-trl FILE [--trainer=grpo] [--output=CONFIG.py] [--rows=N] [--define=NAME=VALUE ...]

FILE is a shell script with a command such as `trl grpo --key value …` or `python train.py --key
value …`, a YAML file of arguments, or a Python file that creates a GRPOConfig(…) or another of
TRL's configurations. The file is parsed but not run. The report lists each argument as mapped (with
its counterpart), not needed or not supported (with the reason).
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from absl import flags

from jaxrl_llm.app.importers import command, trl, trl_files, trl_table
from jaxrl_llm.app.importers.report import Imported, imported
from jaxrl_llm.app.importers.table import Import

FLAGS = flags.FlagValues()
command.define_flags(FLAGS)
flags.DEFINE_enum(
  'trainer', None, list(trl_table.TRAINERS),
  'Trainer of the arguments; by default, determined from the file.', flag_values=FLAGS,
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code."""
  return command.run(argv, FLAGS, __doc__, _read)


def _read(path: pathlib.Path, define: Mapping[str, str]) -> Imported:
  arguments = trl_files.read_file(path, define, FLAGS.trainer)
  trainer = arguments.trainer
  keys = Import(arguments.given, trl_table.TABLES[trainer], trl_table.DEFAULTS[trainer])
  functions = str(path) if path.suffix == '.py' else None
  trl.draft(keys, trainer, stem=path.stem, rows=FLAGS.rows, functions=functions)
  return imported('TRL', keys, arguments.notes)
