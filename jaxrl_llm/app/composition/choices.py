"""Automatic choices of a run that its configuration does not contain: flags of the compiler, and
the memory plans from which the run chose one. They are written to choices.json in the run
directory.

Invariant: the file is written once, when the run starts. A resumed run uses the same flags.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

from jaxrl_llm.app.composition.saved import read_saved
from jaxrl_llm.app.composition.workdir import has_commits
from jaxrl_llm.core.disk import write_durably
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Json

FILE = 'choices.json'


def recorded_flags(run: pathlib.Path) -> tuple[str, ...] | None:
  """Returns the compiler flags that the program added when the run in directory `run` started.
  Returns None if the run has no commit, or no choices.json because an earlier version started it.

  Raises:
    UserError: the file is damaged.
  """
  file = run / FILE
  if not file.exists() or not has_commits(run):
    return None
  try:
    flags = read_saved(file)['compiler_flags']
    if not (isinstance(flags, list) and all(isinstance(flag, str) for flag in flags)):
      raise ValueError('compiler_flags is not a list of texts')
  except (ValueError, TypeError, KeyError) as error:
    raise UserError(
      f'{file}: not the choices of a run ({error!r:.200}); restore it, or remove it if the flags '
      'of the compiler may change'
    ) from error
  return tuple(flags)


def write_choices(run: pathlib.Path, flags: Sequence[str], plans: Json) -> None:
  """Writes the choices of a run that starts.

  Args:
    flags: flags of the compiler that the program has added.
    plans: memory plans, as returned by `Search.to_json`; None if no memory plan was made.
  """
  content = {'compiler_flags': list(flags), 'memory_plans': plans}
  write_durably(run / FILE, json.dumps(content, indent=1))
