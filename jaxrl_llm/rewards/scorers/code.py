"""Scorer `code`: runs the completion's program against the task's tests, in a sandbox.

The value is 1.0 if all tests pass. Otherwise it is 0.0 or, with the option `credit='fraction'`, the
fraction of the tests that pass. The value is None only if the task has no valid tests. A program
gets a value whatever it does. If the sandbox itself fails, the scorer raises an exception.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxrl_llm.config.values import from_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.remote import DiscoveringOptions, ServiceClient
from jaxrl_llm.core.types import Json
from jaxrl_llm.rewards.api import Attempt, Awaited, Discovers, Scorer, ScorerConfig, Verdict
from jaxrl_llm.rewards.sandbox.isolation import Isolation
from jaxrl_llm.rewards.sandbox.sandbox import Case, Limits, ProgramOutcome, Sandboxes, Work
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
  """Isolation of programs that run on this machine."""
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


def _parses(source: str) -> ast.Module | None:
  try:
    return ast.parse(source)
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return None


def _is_code(source: str) -> bool:
  """Whether the source is code that defines or imports something and uses no undefined names,
  rather than prose or a usage example.
  """
  tree = _parses(source)
  kinds = (
    ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Assign
  )
  return (
    tree is not None and any(isinstance(node, kinds) for node in tree.body) and _stands_alone(tree)
  )


def _stands_alone(tree: ast.Module) -> bool:
  """Whether the module defines every name that it uses outside of function bodies."""
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

  The program is the last fenced block of the answer after the thoughts, or the whole answer if
  there is no such block. Code in the prompt is put before the program in two cases: if the program
  does not parse without it, as an indented function body does not, or if the code in the prompt is
  itself complete and defines or imports something. In both cases, the two together must parse.
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


_ENTRY_POINT = re.compile(r'[^\W\d]\w*(?:\(\))?(?:\.[^\W\d]\w*)*')


def read_tests(fields: Mapping[str, Json]) -> Work | None:
  """Reads the tests of a task into a `Work` with an empty program. Returns None if the task has no
  tests.

  Raises ValueError if the tests are malformed.
  """
  tests, entry_point = fields.get('tests'), fields.get('entry_point')
  if not tests:
    return None
  if entry_point is not None and not (
    isinstance(entry_point, str) and _ENTRY_POINT.fullmatch(entry_point)
  ):
    raise ValueError(
      f'entry_point is {entry_point!r}, wanted the name of a function, or Class().method'
    )
  name = None if entry_point is None else re.split(r'[.(]', entry_point)[0]
  if isinstance(tests, str):
    if entry_point is None:
      raise ValueError(
        'tests are a string, and entry_point is missing; wanted the name that check(candidate) '
        'receives'
      )
    return Work(program='', tests=(f'{tests}\n\ncheck({entry_point})\n',), entry_point=name)
  if isinstance(tests, Sequence):
    if all(isinstance(test, str) for test in tests):
      return Work(program='', tests=tuple(tests), entry_point=name)
    if all(isinstance(test, Mapping) and {'stdin', 'stdout'} <= test.keys() for test in tests):
      cases = tuple(Case(stdin=str(test['stdin']), stdout=str(test['stdout'])) for test in tests)
      return Work(program='', cases=cases)
  raise ValueError(
    'tests are neither statements, nor a string that defines check, nor objects with stdin and '
    'stdout'
  )


def read_work(attempt: Attempt) -> Work | Verdict:
  """Returns the program with its tests. If there is nothing to run, returns the verdict instead."""
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
  return dataclasses.replace(work, program=program)


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
def _sandboxes(limits: Limits, isolation: Isolation) -> Sandboxes:
  """Returns the sandboxes of this process with these limits and this isolation. They end with the
  process.
  """
  return Sandboxes(limits, isolation=isolation)


def score_code(attempt: Attempt, *, options: CodeOptions) -> Verdict:
  """Scores the completion's program with the task's tests, in a sandbox on this machine."""
  work = read_work(attempt)
  if isinstance(work, Verdict):
    return work
  return verdict_of(work.run(_sandboxes(options.limits, options.isolation)), options.credit)


class SandboxHosts(ServiceClient):
  """Scorer that sends programs to sandbox hosts."""

  def __init__(self, options: CodeOptions):
    super().__init__(options, "scorer 'code'", RUN_PATH)
    self._limits, self._credit = options.limits, options.credit

  async def __call__(self, attempt: Attempt) -> Verdict:
    # This runs in a thread, because parsing a long completion would block the event loop.
    work = await asyncio.to_thread(read_work, attempt)
    if isinstance(work, Verdict):
      return work
    answer = await self.post(order_body(work, self._limits))
    return verdict_of(read_outcome(answer), self._credit)


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
    return options  # Parsing the options refuses the value.
  wall_s = options.setdefault(
    'wall_s', min(Limits.wall_s, _SHARE * config.deadline_s, _SHARE * remote_s)
  )
  if isinstance(wall_s, int | float) and wall_s >= config.deadline_s:
    raise UserError(
      f'scorer {config.name!r}: deadline_s is {config.deadline_s:g}, and its programs may take '
      f'wall_s={wall_s:g}; raise deadline_s above it, so that a program that never ends scores 0'
    )
  return options


def code_scorer(**options: Any) -> Scorer | Awaited:
  """Scores whether the completion's program passes the task's tests, which run in a sandbox. The
  options are `CodeOptions`.
  """
  read = from_json(dict(options), CodeOptions, "options of scorer 'code'")
  limits = read.limits
  if read.addresses or read.discover is not None:
    read.check("scorer 'code'")
    if read.wall_s >= read.request_deadline_s:
      raise UserError(
        f"scorer 'code': request_deadline_s is {read.request_deadline_s:g}, and its programs may "
        'take '
        f'wall_s={read.wall_s:g}; raise request_deadline_s above it, so that a program that never '
        'ends scores 0'
      )
    return Awaited(
      functools.partial(SandboxHosts, read),
      concurrency=read.concurrency,
      discovers=Discovers.of('sandbox', read.discover),
    )
  # A sandbox is opened here so that a machine that cannot isolate programs is reported when the
  # scorer is built.
  Sandboxes(limits, isolation=read.isolation).close()
  return functools.partial(score_code, options=read)
