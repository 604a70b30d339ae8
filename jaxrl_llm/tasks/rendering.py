"""Renders untrusted chat templates in a separate process.

Invariant: a template cannot block this process or exhaust its memory. Jinja's sandbox restricts
what a template may call, but not how long it loops (`range` within `range`) or how much it
allocates (`'x' * 10**10`). Neither can be interrupted from within the same process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from jaxrl_llm.core.errors import one_line
from jaxrl_llm.core.records.task import ChatMessage
from jaxrl_llm.core.types import Json

_PROGRAM = pathlib.Path(__file__).with_name('render_process.py')

_BUFFER = 1 << 17
"""Size in bytes of the buffers of the socket to a process. A thread that sends or receives a
conversation gives up Python's global lock only once if the conversation fits.
"""


class RenderError(Exception):
  """Raised, with a one-line message, when a template fails."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RenderingLimits:
  """Resource limits of a rendering."""

  cpu_s: float = 5.0
  memory_bytes: int = 1 << 30
  """Maximum number of bytes by which the process's address space may grow after its start."""
  characters: int = 16 << 20
  """Maximum length of the rendered text in characters."""
  start_s: float = 120.0
  """Wall-clock limit in seconds for the process to start and import its libraries."""
  wall_s: float = 60.0
  """Maximum wall-clock time in seconds until a reply. If there is no reply, the process is stopped,
  regardless of the CPU time that it has used.
  """


LIMITS = RenderingLimits()


class Rendered(NamedTuple):
  """A rendered conversation."""

  text: str
  marks: tuple[tuple[int, int], ...]
  """Ranges [start, end) of the characters of `text` that the template marks as the assistant's,
  with `{% generation %}`. Empty if the template marks no text.
  """


class TemplateProcess:
  """Renders a template in a separate process. The process starts with the first rendering, is
  replaced if a limit has ended it, and ends with this object.
  """

  def __init__(self, template: str, limits: RenderingLimits | None = None):
    self._template, self._limits = template, LIMITS if limits is None else limits
    self._lock = threading.Lock()
    self._file: BinaryIO | None = None
    self._socket: socket.socket | None = None
    self._end: weakref.finalize | None = None

  def render(
    self,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
    tools: Sequence[Json] | None = None,
  ) -> Rendered:
    """Renders a conversation.

    Args:
      messages: conversation to render.
      add_generation_prompt: whether to end the text with the opening of an assistant message.
      tools: descriptions of the tools, as JSON schemas; None if there are no tools.
      variables: further variables for the template, such as special tokens. They must be JSON
        values.

    Raises:
      RenderError: the template fails or exceeds a limit.
    """
    order = {
      'messages': messages,
      'tools': tools,
      'add_generation_prompt': add_generation_prompt,
      'variables': variables,
    }
    with self._lock:
      if self._file is None:
        self._start()
      try:
        answer = self._ask(order, self._limits.wall_s)
      except TimeoutError:
        self._stop()
        raise RenderError(f'gave no answer in {self._limits.wall_s:g} s') from None
      except (OSError, EOFError):
        self._stop()
        limits = self._limits
        raise RenderError(
          f'took more than {limits.cpu_s:g} s of CPU time, or its process died; wanted a template '
          'that terminates'
        ) from None
    if 'error' in answer:
      raise RenderError(one_line(answer['error']))
    return Rendered(answer['text'], tuple((start, end) for start, end in answer['marks']))

  def _start(self) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
      # Numerical libraries would start threads, which are not used but need address space.
      environment = os.environ | {
        'OPENBLAS_NUM_THREADS': '1',
        'TRANSFORMERS_NO_ADVISORY_WARNINGS': '1',
      }
      # The option -P keeps the program's directory out of the module search path, because some
      # modules in this directory have the same names as standard modules.
      process = subprocess.Popen(
        [sys.executable, '-P', str(_PROGRAM)],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env=environment,
      )
    self._socket, self._file = ours, ours.makefile('rwb', _BUFFER)
    self._end = weakref.finalize(self, _end, process, ours, self._file)
    try:
      self._ask(
        {'template': self._template, **dataclasses.asdict(self._limits)}, self._limits.start_s
      )
    except (OSError, EOFError) as error:  # A TimeoutError is an OSError.
      self._stop()
      raise RenderError(
        f'the process that renders it did not start within {self._limits.start_s:g} s '
        f'({type(error).__name__}); try again when this machine has enough free memory and CPU time'
      ) from None

  def _ask(self, order: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
    self._socket.settimeout(deadline_s)
    self._file.write(json.dumps(order).encode() + b'\n')
    self._file.flush()
    line = self._file.readline()
    if not line.endswith(b'\n'):
      raise EOFError
    return json.loads(line)

  def _stop(self) -> None:
    if self._end is not None:
      self._end()
    self._file = self._socket = self._end = None


def _end(process: subprocess.Popen, ours: socket.socket, file: BinaryIO) -> None:
  process.kill()
  process.wait()
  with contextlib.suppress(OSError):  # Closing tries to send buffered data, which fails.
    file.close()
  ours.close()
