"""Scorer `code`: runs the completion's program against the task's tests, in a sandbox.

The value is 1.0 if all tests pass. Otherwise it is 0.0 or, with the option `credit='fraction'`, the
fraction of the tests that pass. The value is None only if the task has no valid tests. Every
program gets a value, no matter how it ends. If the sandbox itself fails, the scorer raises an
exception.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import dataclasses
import functools
import math
import re
import threading
from typing import Any, Literal

from jaxrl_llm.config.values import from_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.remote import DiscoveringOptions, ServiceClient
from jaxrl_llm.rewards.api import Attempt, Awaited, Discovers, Scorer, ScorerConfig, Verdict
from jaxrl_llm.rewards.sandbox.isolation import Isolation
from jaxrl_llm.rewards.sandbox.libraries import Library, preload_of
from jaxrl_llm.rewards.sandbox.rows import read_tests
from jaxrl_llm.rewards.sandbox.sandbox import Limits, ProgramOutcome, Sandboxes, Work
from jaxrl_llm.rewards.sandbox.server import RUN_PATH, order_body, read_outcome


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeOptions(DiscoveringOptions):
  credit: Literal['all', 'fraction'] = 'all'
  """Value of a program that passes only some tests. all: the value is 0; fraction: the value is the
  fraction of tests that the program passes. In both cases, the part `passed` of the score is this
  fraction.
  """
  addresses: tuple[str, ...] = ()
  """Addresses of the sandbox hosts (`jaxrl serve --role=sandbox`) that run the programs. If empty,
  the programs run on this machine, unless `discover` is set.
  """
  isolation: Isolation = 'auto'
  """Kind of isolation of programs that run on this machine."""
  libraries: tuple[Library, ...] = ()
  """Libraries that programs may import besides the standard library. They are loaded before a
  program starts, and must be installed where the programs run.
  """
  wall_s: float = Limits.wall_s
  """Wall-clock limit in seconds for a program with all of its tests.

  The limit must be below the scorer's deadline_s, so that the program, not the scorer, is blamed
  for a timeout.

  If it is not configured, it is the default or four fifths of deadline_s, whichever is lower. With
  sandbox hosts, it is also at most four fifths of request_deadline_s (see `options_within`).
  """
  cpu_s: int = Limits.cpu_s
  memory_mib: int = Limits.memory_mib
  processes: int = Limits.processes
  files: int = Limits.files
  file_mib: int = Limits.file_mib
  tmp_mib: int = Limits.tmp_mib
  output_kib: int = Limits.output_kib
  cpu_factor: float = 1.0
  """Factor by which the time limits stated by tests are multiplied. Data sets often state limits
  for compiled programs, which run faster than Python.
  """

  def __post_init__(self):
    if not 0 < self.cpu_factor < math.inf:
      raise UserError(f"scorer 'code': cpu_factor is {self.cpu_factor}, wanted a positive number")

  @property
  def limits(self) -> Limits:
    return Limits(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Limits)})


_FENCE = re.compile(
  # Possessive quantifiers prevent quadratic time on a long line.
  r'^(?P<indent>[ ]{0,3})(?P<fence>`{3,}+|~{3,}+)[ \t]*+(?P<language>[\w+-]*+)[^\n]*+\n'
  r'(?P<code>.*?)(?:^[ ]{0,3}(?P=fence)[`~]*+[ \t\r]*+$|\Z)',
  re.MULTILINE | re.DOTALL,
)
_PYTHON = ('python', 'py', 'python3', '')


def fenced(text: str) -> str | None:
  """Returns the last fenced block of Python, even if it is not closed. If there is none, returns
  the last block that states no language, or None.
  """
  blocks = [(match['language'].lower(), _block(match)) for match in _FENCE.finditer(text)]
  named = [code for language, code in blocks if language in _PYTHON[:3]]
  plain = [code for language, code in blocks if not language]
  return (named or plain or [None])[-1]


def _block(fence: re.Match[str]) -> str:
  """Returns the code of a fenced block. If the fence is indented, as in a list, the same
  indentation is removed from the code.
  """
  indent = len(fence['indent'])
  return (
    re.sub(f'^ {{1,{indent}}}', '', fence['code'], flags=re.MULTILINE) if indent else fence['code']
  )


# Python 3.11 counts the depth of the tree for all threads together: if a garbage collection lets
# another thread parse meanwhile, ast.parse raises SystemError.
_PARSING = threading.Lock()


def _parses(source: str) -> ast.Module | None:
  try:
    with _PARSING:
      return ast.parse(source)
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return None


def _is_code(source: str) -> bool:
  """Returns whether the source is code that defines or imports something and uses no undefined
  names, rather than prose or a usage example.
  """
  tree = _parses(source)
  kinds = (
    ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Assign
  )
  return (
    tree is not None and any(isinstance(node, kinds) for node in tree.body) and _stands_alone(tree)
  )


def _stands_alone(tree: ast.Module) -> bool:
  """Returns whether the module defines every name that it uses outside of function bodies."""
  used, defined, nodes = set(), set(dir(builtins)), [tree]
  while nodes:
    node = nodes.pop()
    parts = ast.iter_child_nodes(node)
    match node:
      case ast.Name(id=name, ctx=ast.Load()):
        used.add(name)
      case ast.Name(id=name):
        defined.add(name)
      case ast.alias():
        defined.add((node.asname or node.name).partition('.')[0])
      case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
        defined.add(name)
        parts = [*node.decorator_list, node.args, *([node.returns] if node.returns else [])]
      case ast.ClassDef(name=name) | ast.ExceptHandler(name=name):
        defined.add(name)
      case ast.Lambda():
        parts = [node.args]
    nodes += parts
  return '*' in defined or used <= defined


def program_of(completion: str, prompt: str) -> str | None:
  """Extracts the program from a completion. Returns None if the program is blank.

  The program is the block that `fenced` finds in the text after the thoughts, or this whole text if
  there is no such block. Code in the prompt is put before the program in two cases: if the program
  alone does not parse (for example, because it is an indented function body), or if the code in the
  prompt is complete and defines or imports something. In both cases, the code in the prompt and the
  program must parse together.
  """
  answer = completion.rpartition('</think>')[2]
  block = fenced(answer)
  code = answer if block is None else block
  if not code.strip():
    return None
  beginning = fenced(prompt) or prompt
  joined = beginning if beginning.endswith('\n') or not beginning else f'{beginning}\n'
  joined += code
  if _parses(code) is None:
    return joined if _parses(joined) is not None else code
  return joined if _is_code(beginning) and _parses(joined) is not None else code


def read_work(attempt: Attempt, cpu_factor: float = 1.0) -> Work | Verdict:
  """Returns the program with its tests as `Work`. If there is nothing to run, returns the verdict
  instead.

  Args:
    cpu_factor: factor by which the time limits stated by tests are multiplied.
  """
  try:
    work = read_tests(attempt.task.fields)
  except ValueError as error:
    return Verdict(value=None, evidence={'reason': str(error)})
  if work is None:
    return Verdict(value=None, evidence={'reason': 'the task has no tests'})
  asked = [message['content'] for message in attempt.task.prompt if message['role'] == 'user']
  program = program_of(attempt.completion, asked[-1] if asked else '')
  if program is None:
    return Verdict(value=0.0, evidence={'reason': 'no code'})
  cases = tuple(
    case if case.cpu_s is None else dataclasses.replace(case, cpu_s=cpu_factor * case.cpu_s)
    for case in work.cases
  )
  return dataclasses.replace(work, program=program, cases=cases)


def verdict_of(outcome: ProgramOutcome, credit: str) -> Verdict:
  fraction = outcome.fraction
  evidence = {
    'ended': outcome.ended.value,
    'passed': outcome.passed,
    'tests': outcome.total,
    'isolation': outcome.isolation,
  }
  if outcome.detail:
    evidence['detail'] = outcome.detail
  value = fraction if credit == 'fraction' else float(fraction == 1.0)
  return Verdict(value=value, parts={'passed': fraction}, evidence=evidence)


@functools.cache
def _sandboxes(limits: Limits, isolation: Isolation, libraries: tuple[Library, ...]) -> Sandboxes:
  """Returns this process's sandboxes with these settings. They end with the process."""
  return Sandboxes(limits, isolation=isolation, preload=preload_of(libraries))


def score_code(attempt: Attempt, *, options: CodeOptions) -> Verdict:
  """Scores the completion's program with the task's tests, in a sandbox on this machine."""
  work = read_work(attempt, options.cpu_factor)
  if isinstance(work, Verdict):
    return work
  sandboxes = _sandboxes(options.limits, options.isolation, options.libraries)
  return verdict_of(work.run(sandboxes), options.credit)


class SandboxHosts(ServiceClient):
  """Scorer that sends programs to sandbox hosts."""

  def __init__(self, options: CodeOptions):
    super().__init__(options, "scorer 'code'", RUN_PATH)
    self._options = options

  async def __call__(self, attempt: Attempt) -> Verdict:
    # This runs in a thread, because parsing a long completion would block the event loop.
    work = await asyncio.to_thread(read_work, attempt, self._options.cpu_factor)
    if isinstance(work, Verdict):
      return work
    options = self._options
    answer = await self.post(order_body(work, options.limits, options.libraries))
    return verdict_of(read_outcome(answer), options.credit)


_SHARE = 0.8
"""Default wall-clock limit of a program, as a fraction of the call's deadline. The sandbox needs
the rest of the time.
"""


def options_within(config: ScorerConfig) -> dict[str, Any]:
  """Returns the scorer's options. If they do not set `wall_s`, a value that fits the deadline is
  added.

  Raises UserError if `wall_s` is not below the deadline. A program that never ends would then count
  as a failure of the scorer, rather than score 0.
  """
  options = dict(config.options)
  remote_s = (
    options.get('request_deadline_s', CodeOptions.request_deadline_s)
    if options.get('addresses') or options.get('discover') is not None
    else math.inf
  )
  if not isinstance(remote_s, int | float):
    return options  # The value is refused later, when the options are parsed.
  wall_s = options.setdefault(
    'wall_s', min(Limits.wall_s, _SHARE * config.deadline_s, _SHARE * remote_s)
  )
  if isinstance(wall_s, int | float) and wall_s >= config.deadline_s:
    raise UserError(
      f'scorer {config.name!r}: deadline_s is {config.deadline_s:g}, but its programs may take '
      f'wall_s={wall_s:g}; raise deadline_s above wall_s, so that a program that never ends '
      'scores 0'
    )
  return options


def code_scorer(**options: Any) -> Scorer | Awaited:
  """Returns a scorer that checks whether the completion's program passes the task's tests, which
  run in a sandbox. The options are `CodeOptions`.
  """
  read = from_json(dict(options), CodeOptions, "options of scorer 'code'")
  limits = read.limits
  if read.addresses or read.discover is not None:
    read.check("scorer 'code'")
    if read.wall_s >= read.request_deadline_s:
      raise UserError(
        f"scorer 'code': request_deadline_s is {read.request_deadline_s:g}, but its programs may "
        f'take wall_s={read.wall_s:g}; raise request_deadline_s above wall_s, so that a program '
        'that never ends scores 0'
      )
    return Awaited(
      functools.partial(SandboxHosts, read),
      concurrency=read.concurrency,
      discovers=Discovers.of('sandbox', read.discover),
    )
  # A sandbox is opened here so that a machine that cannot isolate programs is reported when the
  # scorer is built.
  Sandboxes(limits, isolation=read.isolation, preload=preload_of(read.libraries)).close()
  return functools.partial(score_code, options=read)
