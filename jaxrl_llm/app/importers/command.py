"""Code shared by `jaxrl import-verl` and `jaxrl import-trl`: flags, report, and writing the
configuration file.
"""

from __future__ import annotations

import pathlib
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence

from absl import flags

from jaxrl_llm.app.importers.report import Imported
from jaxrl_llm.config.load import parse_flags
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError, one_line


def define_flags(values: flags.FlagValues) -> None:
  """Registers the flags that `jaxrl import-verl` and `jaxrl import-trl` have in common."""
  flags.DEFINE_string(
    'output', None,
    'Configuration file to write; by default, the name of FILE with the ending .py, in the current '
    'directory.', flag_values=values,
  )  # fmt: skip
  flags.DEFINE_bool(
    'overwrite', False, 'Replace the configuration file if it exists.', flag_values=values
  )
  flags.DEFINE_multi_string(
    'define', [],
    'NAME=VALUE: value of a variable of the script, or of its argument number NAME (1, 2, …); '
    'repeatable.', flag_values=values,
  )  # fmt: skip
  flags.DEFINE_integer(
    'rows', None,
    'Number of training rows, from which steps are computed if the file gives epochs.',
    lower_bound=1, flag_values=values,
  )  # fmt: skip
  flags.DEFINE_bool('json', False, 'Print the report as one JSON document.', flag_values=values)


def run(
  argv: Sequence[str],
  values: flags.FlagValues,
  document: str,
  read: Callable[[pathlib.Path, Mapping[str, str]], Imported],
) -> int:
  """Runs an import command: reads the file, writes the configuration file, prints the report, and
  returns the exit code.

  Args:
    argv: command line.
    values: the command's flags.
    document: help text of the command.
    read: function that imports a file. Its arguments are the file's path and the values of
      --define, keyed by name.
  """
  return script.exit_code(
    lambda: _run(argv, values, document, read), as_json=script.asks_json(argv)
  )


def _run(
  argv: Sequence[str],
  values: flags.FlagValues,
  document: str,
  read: Callable[[pathlib.Path, Mapping[str, str]], Imported],
) -> int:
  operands = parse_flags(argv, values, document, takes_config=False, operands=('FILE',))
  path = pathlib.Path(operands[0])
  define = dict(_pair(text) for text in values.define)
  imported = read(path, define)
  target = pathlib.Path(values.output or f'{re.sub(r"[^A-Za-z0-9_]+", "_", path.stem)}.py')
  if target.suffix != '.py':
    raise UserError(f'--output={target}: wanted a file name that ends in .py')
  if target.exists() and target.samefile(path):
    raise UserError(f'{target}: is the file to import; choose another file with --output')
  if target.exists() and not values.overwrite:
    raise UserError(f'{target}: exists; choose another file with --output, or pass --overwrite')
  try:
    target.write_text(imported.source(path, target), encoding='utf-8')
  except OSError as error:
    raise UserError(f'{target}: cannot be written: {one_line(error)}') from None
  shown = shlex.quote(str(target))
  if values.json:
    script.print_json({**imported.json(), 'file': str(target)})
  else:
    sys.stdout.write(
      '\n'.join([*imported.lines(), f'wrote {target}: jaxrl train --config={shown} --check', ''])
    )
  return 0


def _pair(text: str) -> tuple[str, str]:
  name, equals, value = text.partition('=')
  if not equals or not re.fullmatch(r'\w+', name):
    raise UserError(f'--define={text}: wanted NAME=VALUE')
  return name, value
