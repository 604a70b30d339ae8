"""Libraries that programs in a sandbox may import, besides the standard library.

Invariant: programs can read the files of the chosen libraries and of the packages that these
require, and nothing else of the environment in which they are installed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import pathlib
import re
from typing import Literal

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.sandbox.isolation import NOTHING, Preload

Library = Literal['numpy', 'pandas', 'sympy']

_WARM_UP = {
  'numpy': """
import numpy
numpy.linalg.solve(numpy.eye(2) + 1.0, numpy.random.default_rng(0).random(2))
""",
  'pandas': """
import pandas
frame = pandas.DataFrame({'key': ['a', 'b', 'a'], 'value': [1, 2, 3]})
frame.groupby('key').sum().sort_values('value').to_string()
""",
  'sympy': """
import sympy
x = sympy.Symbol('x')
sympy.solve(sympy.simplify(sympy.diff(x**2 / 2 + sympy.sin(x), x) - sympy.cos(x) - 1), x)
""",
}
"""Source text for each library, keyed by name. It imports the library and makes a few calls, so
that modules that the library imports only at its first calls are loaded, too.
"""
_REQUIREMENT = re.compile(r'[A-Za-z0-9._-]+')


@functools.cache
def preload_of(libraries: tuple[Library, ...]) -> Preload:
  """Returns the paths and statements that make the libraries available to programs in sandboxes.

  Raises UserError if a library is not installed here.
  """
  if not libraries:
    return NOTHING
  directories: dict[str, None] = {}
  entries: dict[str, None] = {}
  distributions = _with_requirements(libraries)
  for distribution in distributions:
    parent = pathlib.Path(str(distribution.locate_file(''))).absolute()
    directories[str(parent)] = None
    for file in distribution.files or ():
      top = parent / file.parts[0]
      # Package metadata may describe the host, and installed scripts lie outside the directory.
      if file.parts[0] != '..' and not top.name.endswith('.dist-info') and top.exists():
        entries[str(top)] = None
  source = ''.join(_WARM_UP[library] for library in dict.fromkeys(libraries))
  return Preload(path=tuple(directories), entries=tuple(entries), source=source)


def _with_requirements(libraries: tuple[str, ...]) -> list[importlib.metadata.Distribution]:
  """Returns the distributions of the libraries and of all packages that they require. A requirement
  that is not installed is left out, because it is optional or for another platform.
  """
  distributions: dict[str, importlib.metadata.Distribution] = {}
  waiting = list(libraries)
  while waiting:
    name = re.sub(r'[-_.]+', '-', waiting.pop()).lower()
    if name in distributions:
      continue
    try:
      distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
      if name in libraries:
        raise UserError(
          f'sandbox: library {name} is not installed where programs run; install it there, or '
          'leave it out of libraries'
        ) from None
      continue
    distributions[name] = distribution
    waiting += [
      _REQUIREMENT.match(requirement)[0]
      for requirement in distribution.requires or ()
      if 'extra ==' not in requirement
    ]
  return list(distributions.values())
