"""Code that runs in the worker processes of a scorer pool.

A worker process contains all scorers of the pool that run in workers. It has resource limits, and
ends when the process that owns the pool ends.
"""

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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrl_llm.core.records.score import Score
from jaxrl_llm.rewards.api import Attempt, OverrunIsZero, PerGroup, Scorer
from jaxrl_llm.rewards.pool.outcome import CallOutcome, checked, failed
from jaxrl_llm.rewards.watch import BadSign

HEAVY = ('jax', 'torch')

DISCARDED = 70
"""Exit code of a worker that ended itself after a verifier had attempted an operation that
`rewards.watch` forbids. A verifier is the function with which a task generator checks an answer.
"""

_PACKAGE = 'jaxrl_llm.rewards.'
_ADAPTERS = 'adapters'
"""Name of the module of built-in scorers that call a user's function."""

_SECRET = re.compile(
  r'(?:^|_)(?:API_?KEYS?|KEYS?|TOKENS?|AUTH)(?:_|$)|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL',
  re.IGNORECASE,
)

_scorers: dict[str, Scorer | PerGroup] = {}
"""Scorers of this process, keyed by name."""


def _die_with_owner() -> None:
  """Makes this worker end when the process that owns the pool ends, even if that process is killed.

  The worker's parent is the fork server, so PR_SET_PDEATHSIG would watch the wrong process.
  Instead, the worker uses the sentinel of `multiprocessing`, a pipe whose other end only the owner
  has open. When that end closes, the Linux kernel sends this process SIGKILL, which ends it even in
  C code that never releases the GIL. On other systems, a thread waits for the owner to end.
  """
  parent = multiprocessing.parent_process()
  if sys.platform == 'linux':
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(
      parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC
    )
    # The owner may have ended before the signal was set.
    if multiprocessing.connection.wait([parent.sentinel], timeout=0):
      os._exit(1)
  else:

    def watch() -> None:
      parent.join()  # Wait 'owner': unbounded: a worker lives as long as its owner.
      os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _libraries_of(module: str) -> tuple[str, ...]:
  """Returns a module's `LIBRARIES`: the libraries that its functions import at their first call."""
  return getattr(sys.modules.get(module), 'LIBRARIES', ())


def _known_libraries() -> set[str]:
  """Returns the libraries in `LIBRARIES` of all modules of `jaxrl_llm.rewards` in this process."""
  return {
    library
    for name in [*sys.modules]
    if name.startswith(_PACKAGE)
    for library in _libraries_of(name)
  }


def _built_in(scorer: Scorer | PerGroup) -> tuple[str, ...] | None:
  """Returns the names of the modules that a built-in scorer needs, or None for a user's scorer.

  They are the scorer's own module and the libraries in the attribute `libraries` of the scorer's
  options. If the options lack this attribute, the libraries are those in `LIBRARIES` of the module.
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
  """Returns the modules that the fork server imports for workers with these scorers.

  If there is a user's scorer, these include the libraries of built-in scorers that this process has
  imported, because the user's scorer may use them.
  """
  modules = [__name__]
  for scorer in scorers:
    needed = _built_in(scorer)
    if needed is None:
      needed = tuple(name for name in ('sympy', *sorted(_known_libraries())) if name in sys.modules)
    modules += needed
  return tuple(dict.fromkeys(modules))


def _import_libraries(scorers: Iterable[Scorer | PerGroup]) -> None:
  """Imports the libraries that the scorers need, before the deadline of a first call begins.

  The fork server has usually imported these libraries, unless it was started for other scorers. A
  user's scorer may call any built-in scoring function that it has imported, so for such a scorer
  the libraries of all imported modules are loaded.
  """
  libraries: set[str] = set()
  for scorer in scorers:
    needed = _built_in(scorer)
    libraries |= _known_libraries() if needed is None else set(needed)
  for name in sorted(libraries):
    with contextlib.suppress(ImportError):  # The first call reports the error.
      importlib.import_module(name)


def secrets(environment: Iterable[str]) -> list[str]:
  """Returns, sorted, the names of the environment variables whose names suggest a secret."""
  return sorted(name for name in environment if _SECRET.search(name))


def initialise(
  scorers: Mapping[str, Scorer | PerGroup], memory_limit_bytes: int, withheld: Iterable[str] = ()
) -> None:
  """Initialises a worker process: sets its limits, removes the variables `withheld` from its
  environment, imports libraries, and stores the scorers.
  """
  _die_with_owner()
  # Ctrl-C reaches the whole process group, but only the owner reacts to it.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  # SIGTERM must end a worker at once. A Python handler would run only after C code has returned,
  # and the pool, which waits for a worker that it stops, would be blocked until then.
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


def call(
  name: str, attempts: tuple[Attempt, ...], scores: tuple[tuple[Score, ...], ...]
) -> CallOutcome:
  """Calls scorer `name`. An exception of the scorer is returned as the outcome of the call.

  Even SystemExit is returned, because it would otherwise end the pool's owner. Only `BadSign` is
  not returned. It means that a verifier has attempted a forbidden operation (`rewards.watch`). This
  process then exits, because its results can no longer be trusted.

  Args:
    attempts: a group for a `PerGroup` scorer, else one attempt.
    scores: per-sample scores of each attempt; empty unless the scorer is a `PerGroup`.
  """
  start, scorer = time.perf_counter(), _scorers[name]
  try:
    verdicts = (
      scorer.scorer(attempts, scores)
      if isinstance(scorer, PerGroup)
      else [scorer(a) for a in attempts]
    )
    verdicts = checked(verdicts, len(attempts))
    return CallOutcome(verdicts=verdicts, seconds=time.perf_counter() - start)
  except BadSign as sign:
    sys.stderr.write(f'Scorer {name}: {sign}; its process {os.getpid()} is discarded\n')
    sys.stderr.flush()
    os._exit(DISCARDED)
  except BaseException as raised:
    # Frees the objects that the traceback refers to. If they filled the memory, the outcome could
    # not be created.
    raised.__cause__ = raised.__context__ = None
    traceback.clear_frames(raised.__traceback__)
    return failed(raised, time.perf_counter() - start)


def call_each(
  name: str, arguments: Sequence[tuple[tuple[Attempt, ...], tuple[tuple[Score, ...], ...]]]
) -> list[CallOutcome]:
  """Makes several calls of scorer `name`, one after another.

  Args:
    arguments: (attempts, scores) of each call; see `call`.
  """
  return [call(name, attempts, scores) for attempts, scores in arguments]
