"""A scorer process: its scorers, its limits, and its end with the process that owns the pool."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import multiprocessing
import multiprocessing.connection
import os
import re
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl_llm.core.records.score import Score
from jaxrl_llm.rewards.api import Attempt, OverrunIsZero, PerGroup, Scorer
from jaxrl_llm.rewards.pool.outcome import Outcome, checked, failed
from jaxrl_llm.rewards.watch import BadSign

HEAVY = ('jax', 'torch')

DISCARDED = 70
"""Exit code of a process in which a verifier did more than compare text."""

_PACKAGE = 'jaxrl_llm.rewards.'
_ADAPTERS = 'adapters'
"""The module of scorers that call a user's function."""

_SECRET = re.compile(
  r'(?:^|_)(?:API_?KEYS?|KEYS?|TOKENS?|AUTH)(?:_|$)|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL', re.IGNORECASE
)

_scorers: dict[str, Scorer | PerGroup] = {}
"""Scorers of this process, by name."""


def _die_with_owner() -> None:
  """The kernel kills this worker when the pool's owner is gone, even if the owner was SIGKILLed.

  The worker's parent is the fork server, so PR_SET_PDEATHSIG would watch the wrong process. The sentinel is a pipe
  whose other end only the owner holds: its hang-up raises a signal, also under C code that never gives back the GIL.
  """
  parent = multiprocessing.parent_process()
  if sys.platform == 'linux':
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    if multiprocessing.connection.wait([parent.sentinel], timeout=0):  # Gone before the signal was set.
      os._exit(1)
  else:

    def watch() -> None:
      parent.join()  # wait owner: none, a worker ends with its owner
      os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _libraries_of(module: str) -> tuple[str, ...]:
  """A module's `LIBRARIES`: those that its functions import at their first call."""
  return getattr(sys.modules.get(module), 'LIBRARIES', ())


def _known_libraries() -> set[str]:
  """Libraries of all modules of this package that this process has imported."""
  return {library for name in [*sys.modules] if name.startswith(_PACKAGE) for library in _libraries_of(name)}


def _built_in(scorer: Scorer | PerGroup) -> tuple[str, ...] | None:
  """Modules that a built-in scorer needs: that of its function, and libraries. None for a user's scorer: any.

  Options with an attribute `libraries` override the module's `LIBRARIES`.
  """
  options: Any = None
  while isinstance(scorer, OverrunIsZero | PerGroup | functools.partial):
    if isinstance(scorer, functools.partial):
      options, scorer = scorer.keywords.get('options', options), scorer.func
    else:
      scorer = scorer.scorer
  module = getattr(scorer, '__module__', None) or ''
  if not module.startswith(_PACKAGE) or module.endswith(f'.{_ADAPTERS}'):
    return None
  return (module, *getattr(options, 'libraries', _libraries_of(module)))


def preload(scorers: Iterable[Scorer | PerGroup]) -> tuple[str, ...]:
  """Modules that the fork server of workers with these scorers imports.

  For a user's scorer these are the libraries that this process has: its module may have imported them.
  """
  modules = [__name__]
  for scorer in scorers:
    needed = _built_in(scorer)
    if needed is None:
      needed = tuple(name for name in ('sympy', *sorted(_known_libraries())) if name in sys.modules)
    modules += needed
  return tuple(dict.fromkeys(modules))


def _import_libraries(scorers: Iterable[Scorer | PerGroup]) -> None:
  """Imports what the scorers' first calls would otherwise import within their deadlines.

  The fork server usually has it, but not if it was started for other scorers. Which built-in functions a user's scorer
  calls is unknown: it gets the libraries of all modules that were imported with it.
  """
  libraries: set[str] = set()
  for scorer in scorers:
    needed = _built_in(scorer)
    libraries |= _known_libraries() if needed is None else set(needed)
  for name in sorted(libraries):
    with contextlib.suppress(ImportError):  # The call reports what is missing.
      importlib.import_module(name)


def secrets(environment: Iterable[str]) -> list[str]:
  """Variables whose names suggest a secret, sorted."""
  return sorted(name for name in environment if _SECRET.search(name))


def initialise(scorers: Mapping[str, Scorer | PerGroup], memory_limit_bytes: int, withheld: Iterable[str] = ()) -> None:
  """Makes this process a scorer process, without the environment variables in `withheld`."""
  _die_with_owner()
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the owner decides.
  # A Python handler would wait for C code to return, with all workers held up meanwhile.
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  for name in withheld:
    os.environ.pop(name, None)
  _import_libraries(scorers.values())
  if memory_limit_bytes:
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
  _scorers.update(scorers)


def heavy_modules() -> list[str]:
  return [name for name in HEAVY if name in sys.modules]


def call(name: str, attempts: tuple[Attempt, ...], scores: tuple[tuple[Score, ...], ...]) -> Outcome:
  """One call. What the scorer raises comes back as data: SystemExit too, which would end the owner.

  After a `BadSign` this process ends: nothing that it says is trusted any more.

  Args:
    attempts: a group where the scorer is `PerGroup`, else one.
    scores: what else was said of each; of a group only.
  """
  start, scorer = time.perf_counter(), _scorers[name]
  try:
    verdicts = scorer.scorer(attempts, scores) if isinstance(scorer, PerGroup) else [scorer(a) for a in attempts]
    verdicts = checked(verdicts, len(attempts))
    return Outcome(verdicts=verdicts, seconds=time.perf_counter() - start)
  except BadSign as sign:
    sys.stderr.write(f'Scorer {name}: {sign}; its process {os.getpid()} is discarded\n')
    sys.stderr.flush()
    os._exit(DISCARDED)
  except BaseException as raised:
    # The frames hold what the memory is full of, and the answer needs some.
    raised.__cause__ = raised.__context__ = None
    traceback.clear_frames(raised.__traceback__)
    return failed(raised, time.perf_counter() - start)
