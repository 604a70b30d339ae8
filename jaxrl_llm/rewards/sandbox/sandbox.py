"""Runs untrusted programs, each in its own sandbox, which is discarded afterwards.

Invariant: a program cannot forge its own outcome. Its output is compared with the expected output
here, outside the sandbox. Tests of functions run in a separate process (`inside.examiner`), which
the program cannot reach.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.sandbox.comparison import Tolerance, read_credit, same_output, share
from jaxrl_llm.rewards.sandbox.inside.channel import Channel, ChannelClosed
from jaxrl_llm.rewards.sandbox.isolation import (
  NOTHING,
  Isolation,
  Preload,
  Starter,
  first_words,
  open_starter,
)

_GRACE_S = 15.0
"""Seconds after a program's wall-clock limit within which the sandbox must report the outcome."""


MAX_WEIGHT = 1e6
"""Maximum weight of a test."""
_CHECKING = 0.2
"""Fraction of a program's wall-clock limit that is reserved for its checker. The same fraction is
reserved for running the checker on expected outputs if it has failed.
"""


class SandboxError(RuntimeError):
  """Raised if the sandbox itself failed, rather than the program in it."""


class Ending(enum.StrEnum):
  """Ways in which a program can end."""

  PASSED = 'passed'
  FAILED = 'failed'
  """The program ran to its end, and a test failed."""
  EXCEPTION = 'exception'
  EXIT = 'exit'
  """The program exited with a nonzero code, or before its tests were over."""
  SIGNAL = 'signal'
  WALL = 'wall'
  """The program reached the wall-clock limit. If it did so only because the machine was busy,
  SandboxError is raised instead.
  """
  CPU = 'cpu'
  """The program used up its processor time."""
  MEMORY = 'memory'
  OUTPUT = 'output'
  PROCESSES = 'processes'
  LOST = 'lost'
  """The program killed its own supervisor, which only a program without isolation can do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """Resource limits for one program, including all of its tests and processes."""

  wall_s: float = 30.0
  """Maximum wall-clock time in seconds. If a program reaches it only because the machine is busy,
  SandboxError is raised.
  """
  cpu_s: int = 6
  """Maximum processor time in seconds, summed over all processes, including those of the tests."""
  memory_mib: int = 1024
  """Maximum address space of each process, and maximum resident memory of all processes together,
  in MiB.
  """
  processes: int = 32
  files: int = 256
  """Maximum number of files that each process may have open."""
  file_mib: int = 64
  tmp_mib: int = 64
  """Maximum total size in MiB of all files, which are stored in memory."""
  output_kib: int = 1024
  """Maximum size of the standard output in KiB. The same maximum applies to the standard error."""

  def __post_init__(self):
    for name, value in dataclasses.asdict(self).items():
      if not 0 < value < 1 << 40:
        raise UserError(f'sandbox: limit {name} is {value}, wanted a positive number')

  def shortened(self, fraction: float) -> Limits:
    """Returns these limits with the wall-clock time multiplied by `fraction`."""
    return dataclasses.replace(self, wall_s=fraction * self.wall_s)

  def message(self) -> dict[str, Any]:
    """Returns the limits in the form that the supervisor reads."""
    return {
      'wall_s': self.wall_s,
      'cpu_s': self.cpu_s,
      'memory_bytes': self.memory_mib << 20,
      'processes': self.processes,
      'files': self.files,
      'file_bytes': self.file_mib << 20,
      'output_bytes': self.output_kib << 10,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramOutcome:
  ended: Ending
  """Ending of the first test that did not pass; PASSED if all passed."""
  passed: int
  total: int
  isolation: str
  """Kind of isolation that the program had: 'namespaces', 'bubblewrap' or 'none'."""
  detail: str = ''
  """Details of the ending: the exception, exit code or signal, or the first test that failed."""
  seconds: float = 0.0
  weighted: float | None = None
  """Weighted share of the tests that the program passed, in [0, 1]. None if all tests have the same
  weight and no checker gave partial credit.
  """

  @property
  def fraction(self) -> float:
    """Share of the tests that the program passed, weighted if the tests have weights."""
    if self.weighted is not None:
      return self.weighted
    return self.passed / self.total if self.total else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One test of a program that reads standard input and writes standard output."""

  stdin: str
  stdout: str
  """Expected output."""
  weight: float = 1.0
  cpu_s: float | None = None
  """Maximum processor time of this test in seconds. It has no effect if it exceeds the limit for
  all tests together.
  """
  memory_mib: int | None = None
  """Maximum memory of this test in MiB. It has no effect if it exceeds the program's limit."""
  tolerance: Tolerance | None = None
  """Permitted difference between numbers in the output and the expected ones. If None, lines must
  be equal.
  """

  def __post_init__(self):
    if not 0 <= self.weight <= MAX_WEIGHT:
      raise UserError(f'a test has weight {self.weight}, wanted a number from 0 to {MAX_WEIGHT:g}')
    for name in ('cpu_s', 'memory_mib'):
      value = getattr(self, name)
      if value is not None and not 0 < value < 1 << 40:
        raise UserError(f'a test has {name} {value}, wanted a positive number')

  def limits(self) -> dict[str, float]:
    """Returns the test's own limits in the form that the supervisor reads."""
    own: dict[str, float] = {}
    if self.cpu_s is not None:
      own['cpu_s'] = self.cpu_s
    if self.memory_mib is not None:
      own['memory_bytes'] = self.memory_mib << 20
    return own


T = TypeVar('T')


class Stop:
  """Lets another thread end a running program.

  The call that runs the program then raises SandboxError. If the program is not isolated, the call
  returns an outcome with the ending LOST instead.
  """

  def __init__(self):
    self._lock = threading.Lock()
    self._is_set = False
    self._connection: socket.socket | None = None

  def set(self) -> None:
    with self._lock:
      self._is_set = True
      if self._connection is not None:
        _hang_up(self._connection)

  @contextlib.contextmanager
  def ends(self, connection: socket.socket) -> Iterator[None]:
    """While the block runs, makes `set` end the sandbox with the control socket `connection`.

    Raises SandboxError if `set` was called before the block began.
    """
    with self._lock:
      if self._is_set:
        raise SandboxError('the program was stopped before it began')
      self._connection = connection
    try:
      yield
    finally:
      with self._lock:
        self._connection = None


class Sandboxes:
  """Keeps sandboxes ready, so that a program starts at once. Thread-safe.

  Args:
    limits: limits of each program.
    isolation: kind of isolation of programs; see `Isolation`.
    waiting: number of sandboxes kept ready.
    preload: libraries available to programs.

  Raises:
    NoIsolation: this machine cannot isolate programs as requested.
  """

  def __init__(
    self,
    limits: Limits,
    *,
    isolation: Isolation = 'auto',
    waiting: int = 1,
    preload: Preload = NOTHING,
  ):
    self._limits, self._isolation, self._waiting, self._preload = (
      limits,
      isolation,
      waiting,
      preload,
    )
    self._lock = threading.Lock()
    self._starter = self._open()
    self._idle: list[socket.socket] = []
    self._running: set[socket.socket] = set()
    self._closed = False
    self._fill()

  @property
  def isolation(self) -> str:
    return self._starter.kind

  def run_cases(
    self,
    program: str,
    cases: Sequence[Case],
    stop: Stop | None = None,
    checker: str | None = None,
  ) -> ProgramOutcome:
    """Runs the program once for each case.

    A case passes if the program prints the expected output (`comparison.same_output`). If there is
    a checker, it decides instead. A checker is a program that reads a JSON object with `input`,
    `expected` and `actual` from standard input and prints its credit for the output, a number from
    0 to 1, as the last line. It runs in a separate sandbox.

    Raises SandboxError if the sandbox fails, or the checker fails even on an expected output.
    """
    # One part of the time is kept for the checker, and another for finding out why it failed.
    limits = self._limits if checker is None else self._limits.shortened(1 - 2 * _CHECKING)
    results: list[dict[str, Any]] = []

    def run(control: Channel) -> ProgramOutcome:
      control.send({'form': 'stdio', 'program': program, 'limits': limits.message()})
      for case in cases:
        control.send({'stdin': case.stdin, 'limits': case.limits()})
        results.append(_judged(control.receive()))
        if results[-1]['spent']:  # No time is left for the remaining cases.
          break
      return self._outcome(Ending.PASSED, len(results), len(cases), '')

    outcome = self._in_sandbox(run, len(cases), stop)
    if outcome.ended == Ending.LOST:
      return outcome
    ran = [number for number, result in enumerate(results) if result['ended'] == 'ok']
    outputs = [(cases[number], results[number]['stdout']) for number in ran]
    if checker is None:
      judged = [same_output(output, case.stdout, case.tolerance) for case, output in outputs]
    else:
      judged = self._checked(checker, outputs, stop)
    credits = [0.0] * len(cases)
    for number, credit in zip(ran, judged, strict=True):
      credits[number] = float(credit)
    weights = [case.weight for case in cases]
    equal = len(set(weights)) == 1 and {0.0, 1.0}.issuperset(credits)
    outcome = dataclasses.replace(
      outcome,
      passed=credits.count(1.0),
      weighted=None if equal else share(credits, weights),
    )
    failed = [result for result, credit in zip(results, credits, strict=False) if credit < 1]
    if not failed:
      return outcome
    ended = Ending.FAILED if failed[0]['ended'] == 'ok' else Ending(failed[0]['ended'])
    return dataclasses.replace(outcome, ended=ended, detail=_detail(failed[0])[-500:])

  def _checked(
    self, checker: str, outputs: Sequence[tuple[Case, str]], stop: Stop | None
  ) -> list[float]:
    """Returns the checker's credit for each output of a case. If the checker fails on an output,
    the credit is 0, unless it also fails on the expected output. In that case, SandboxError is
    raised.
    """
    questions = [
      {'input': case.stdin, 'expected': case.stdout, 'actual': output} for case, output in outputs
    ]
    replies = self._ask_checker(checker, questions, stop)
    failed = [number for number, (credit, _) in enumerate(replies) if credit is None]
    if failed:
      # Check the earlier cases again too, so that each failed case is left with about as much of
      # the checker's time as in the first run.
      expected = [
        {**question, 'actual': question['expected']} for question in questions[: failed[-1] + 1]
      ]
      again = self._ask_checker(checker, expected, stop)
      for number in failed:
        credit, detail = again[number] if number < len(again) else again[-1]
        if credit is None:
          raise SandboxError(f'the checker fails even on the expected output: {detail}')
    credits = [0.0 if credit is None else credit for credit, _ in replies]
    return credits + [0.0] * (len(questions) - len(credits))

  def _ask_checker(
    self, checker: str, questions: Sequence[dict[str, str]], stop: Stop | None
  ) -> list[tuple[float | None, str]]:
    """Returns (credit, description of the checker's ending) for each question, a dict with an
    output to judge. The credit is None if the checker failed. If the checker runs out of time at a
    question, the questions after it are left out.
    """
    limits = self._limits.shortened(_CHECKING)
    replies: list[tuple[float | None, str]] = []

    def run(control: Channel) -> ProgramOutcome:
      control.send({'form': 'stdio', 'program': checker, 'limits': limits.message()})
      for question in questions:
        control.send({'stdin': json.dumps(question)})
        result = _judged(control.receive())
        credit = read_credit(result['stdout']) if result['ended'] == 'ok' else None
        replies.append((credit, f'{result["ended"]} {_detail(result)}'.rstrip()))
        if result['spent']:
          break
      return self._outcome(Ending.PASSED, 1, 1, '')

    if questions and self._in_sandbox(run, 1, stop).ended == Ending.LOST:
      replies.append((None, 'lost'))
    return replies

  def output(self, program: str, stdin: str) -> tuple[ProgramOutcome, str]:
    """Runs the program once. Returns its outcome and its standard output.

    The ending is PASSED if the exit code is 0. The output is cut off at its limit.
    """
    printed = ''

    def run(control: Channel) -> ProgramOutcome:
      nonlocal printed
      control.send({'form': 'stdio', 'program': program, 'limits': self._limits.message()})
      control.send({'stdin': stdin})
      result = _judged(control.receive())
      printed = result['stdout']
      if result['ended'] == 'ok':
        return self._outcome(Ending.PASSED, 1, 1, '')
      return self._outcome(Ending(result['ended']), 0, 1, _detail(result))

    outcome = self._in_sandbox(run, 1)
    return outcome, printed

  def run_tests(
    self,
    program: str,
    tests: Sequence[str],
    entry_point: str | None = None,
    stop: Stop | None = None,
    weights: Sequence[float] = (),
  ) -> ProgramOutcome:
    """Runs the program, then its tests in order. The tests share one namespace.

    A test passes if it raises no exception. Without `weights`, all tests weigh the same.
    """

    passed: list[bool] = []

    def run(control: Channel) -> ProgramOutcome:
      nonlocal passed
      control.send({'form': 'tests', 'program': program, 'limits': self._limits.message()})
      control.send({'tests': list(tests), 'entry_point': entry_point})
      result = _judged(control.receive())
      passed, error = result['passed'], result['error']
      passed += [False] * (len(tests) - len(passed))
      if all(passed):
        return self._outcome(Ending.PASSED, len(passed), len(tests), '')
      if error and not error['gone']:
        ended = Ending.MEMORY if error['type'] == 'MemoryError' else Ending.FAILED
        detail = f'test {passed.index(False)}: {error["type"]}: {error["text"]}'
        return self._outcome(ended, sum(passed), len(tests), detail)
      # The program ended before its tests were over, so even exit code 0 is a failure.
      ended = Ending.EXIT if result['ended'] == 'ok' else Ending(result['ended'])
      return self._outcome(ended, sum(passed), len(tests), _detail(result))

    outcome = self._in_sandbox(run, len(tests), stop)
    weighted = share(passed, weights) if weights and passed else None
    return dataclasses.replace(outcome, weighted=weighted)

  def close(self) -> None:
    """Ends idle sandboxes and running programs. Calls that run programs then raise SandboxError."""
    with self._lock:
      self._closed = True
      for control in self._idle:
        control.close()
      self._idle.clear()
      for control in self._running:
        _hang_up(control)
      self._starter.close()

  def _open(self) -> Starter:
    return open_starter(
      self._isolation, tmp_bytes=self._limits.tmp_mib << 20, preload=self._preload
    )

  def _outcome(self, ended: Ending, passed: int, total: int, detail: str) -> ProgramOutcome:
    return ProgramOutcome(
      ended=ended, passed=passed, total=total, isolation=self.isolation, detail=detail[-500:]
    )

  def _in_sandbox(
    self, run: Callable[[Channel], ProgramOutcome], total: int, stop: Stop | None = None
  ) -> ProgramOutcome:
    with self._take() as connection, self._runs(connection), (stop or Stop()).ends(connection):
      control = Channel(connection)
      connection.settimeout(self._limits.wall_s + _GRACE_S)
      began = time.monotonic()
      try:
        outcome = run(control)
      except (ChannelClosed, TimeoutError) as error:
        if self.isolation != 'none' or self._closed:
          raise SandboxError(f'the sandbox failed: {error}') from None
        outcome = self._outcome(Ending.LOST, 0, total, '')
    return dataclasses.replace(outcome, seconds=time.monotonic() - began)

  @contextlib.contextmanager
  def _runs(self, connection: socket.socket) -> Iterator[None]:
    with self._lock:
      self._running.add(connection)
    try:
      yield
    finally:
      with self._lock:
        self._running.discard(connection)

  def _take(self) -> socket.socket:
    """Returns a sandbox that is ready, and starts another one for the next program."""
    reason: object = None
    for _ in range(3):
      with self._lock:
        if self._closed:
          raise SandboxError('the sandboxes are closed')
        starter, control = self._starter, self._idle.pop(0) if self._idle else None
      try:
        control = control or starter.start()
        self._fill()
        reason = first_words(control)
        if not reason and not _has_hung_up(control):
          return control
      except OSError as error:
        reason = error
      if control is not None:
        control.close()
      self._restart(starter)
    raise SandboxError(f'no sandbox starts: {reason}')

  def _fill(self) -> None:
    with self._lock:
      while not self._closed and len(self._idle) < self._waiting:
        self._idle.append(self._starter.start())

  def _restart(self, failed: Starter) -> None:
    with self._lock:
      # Another thread has already replaced the starter, or the sandboxes were closed.
      if self._starter is not failed or self._closed:
        return
      for control in self._idle:
        control.close()
      self._idle.clear()
      with contextlib.suppress(OSError):
        self._starter.close()
      self._starter = self._open()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
  """A program and its tests, which are either `cases` or `tests`."""

  program: str
  cases: tuple[Case, ...] = ()
  tests: tuple[str, ...] = ()
  weights: tuple[float, ...] = ()
  """Weights of `tests`; empty if all weights are equal. Cases contain their weights."""
  entry_point: str | None = None
  checker: str | None = None
  """Program that judges the outputs of `cases` (see `Sandboxes.run_cases`); None to compare
  outputs.
  """

  def run(self, sandboxes: Sandboxes, stop: Stop | None = None) -> ProgramOutcome:
    if self.cases:
      return sandboxes.run_cases(self.program, self.cases, stop, self.checker)
    return sandboxes.run_tests(self.program, self.tests, self.entry_point, stop, self.weights)


def _hang_up(control: socket.socket) -> None:
  with contextlib.suppress(OSError):
    control.shutdown(socket.SHUT_RDWR)


def _has_hung_up(control: socket.socket) -> bool:
  poll = select.poll()
  poll.register(control, select.POLLIN)
  return bool(poll.poll(0))


def _judged(result: dict[str, Any]) -> dict[str, Any]:
  """Checks the supervisor's message, and returns it unchanged.

  Raises SandboxError if the program reached its wall-clock limit only because the machine was busy.
  """
  if result['ended'] == 'starved':
    raise SandboxError(
      'the program hit its wall-clock limit while other processes held the CPUs; run fewer '
      'programs at once, or raise wall_s and the deadline above it'
    )
  return result


def _detail(result: dict[str, Any]) -> str:
  last = result['stderr'].strip().rsplit('\n', 1)[-1]
  match result['ended']:
    case 'exception' | 'memory':
      return last
    case 'exit' | 'signal':
      return f'{result["ended"]} {result["code"]}'
    case 'ok' if 'stdout' in result:
      return f'output {result["stdout"][:200]!r}'
  return ''
