"""Keeps verifiers, which should only compare text, from other operations, such as evaluating code,
writing files or using the network.

A verifier is the function with which a task generator checks an answer. It is watched by an audit
hook, which the interpreter calls before operations such as starting a process. The hook cannot be
removed. A process in which an operation was refused must be discarded.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

_REFUSED = frozenset({
  '_thread.start_joinable_thread', '_thread.start_new_thread',
  'ctypes.call_function', 'ctypes.dlopen', 'ctypes.dlsym', 'os.chmod', 'os.chown', 'os.exec',
  'os.fork', 'os.forkpty', 'os.kill', 'os.link', 'os.mkdir', 'os.posix_spawn', 'os.putenv',
  'os.remove', 'os.rename', 'os.rmdir', 'os.spawn', 'os.startfile', 'os.symlink', 'os.system',
  'os.truncate', 'os.unsetenv', 'pty.spawn', 'socket.bind', 'socket.connect', 'socket.getaddrinfo',
  'socket.sendto', 'subprocess.Popen',
})  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class BadSign(RuntimeError):
  """Raised if a verifier attempts a forbidden operation. The process in which the verifier ran must
  not be used again.
  """


class _Watch:
  """State of the audit hook. At any time, it watches at most one thread of the process."""

  installed = False
  thread: int | None = None
  sign = ''
  """First operation that was refused; empty if none was refused."""
  literal: str | None = None
  """The only text that may be compiled. If None, no text may be compiled."""


def _is_suspicious(event: str, args: tuple[Any, ...]) -> bool:
  match event:
    # eval, exec and ast.literal_eval compile text, which is suspicious. Compiling an imported file
    # is allowed.
    case 'compile':
      source = args[0].decode(errors='replace') if isinstance(args[0], bytes) else args[0]
      return source != _Watch.literal and (not isinstance(args[1], str) or args[1].startswith('<'))
    case 'import':
      library = args[0].partition('.')[0]
      return library not in sys.stdlib_module_names and library not in sys.modules
    case 'open':
      path, mode, flags = args
      writes = set(mode) & set('wax+') if isinstance(mode, str) else (flags or 0) & _WRITES
      return bool(writes) or _exposes_processes(path)
  return event in _REFUSED


def _exposes_processes(path: Any) -> bool:
  """Returns whether opening a path may expose the environment or memory of a process, or give
  access to a file that exposes them.
  """
  if isinstance(path, int):
    return False
  if not isinstance(path, str | bytes):
    return True
  # Directories are refused, because files can be opened relative to the descriptor of a directory,
  # and the audit event does not resolve such relative names.
  return os.path.isdir(path) or os.fsdecode(os.path.realpath(path)).startswith('/proc/')


def _hook(event: str, args: tuple[Any, ...]) -> None:
  if (
    _Watch.thread is not None
    and _Watch.thread == threading.get_ident()
    and _is_suspicious(event, args)
  ):
    _Watch.sign = _Watch.sign or f'{event} {args!r}'[:200]
    raise BadSign(_Watch.sign)


@contextlib.contextmanager
def watched(name: str, literal: str | None = None) -> Iterator[None]:
  """Forbids some operations in the current thread while the block runs.

  The forbidden operations are compiling text, importing further third-party libraries, writing or
  deleting files, reading /proc, using the network, and starting threads or processes.

  Args:
    name: the verifier's name, for the error message.
    literal: harmless text that may be compiled. If None, no text may be compiled.

  Raises:
    BadSign: the block attempted a forbidden operation, even if it caught the exception that the
      operation raised.
  """
  if not _Watch.installed:
    sys.addaudithook(_hook)
    _Watch.installed = True
  bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
  _Watch.sign, _Watch.literal, _Watch.thread = '', literal, threading.get_ident()
  try:
    yield
  finally:
    _Watch.thread = None
    sys.dont_write_bytecode = bytecode
    if _Watch.sign:
      raise BadSign(
        f'verifier {name!r} was stopped: it evaluates or does more than compare text '
        f'({_Watch.sign})'
      )
