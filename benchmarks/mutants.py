"""HumanEval's programs and their mutants: programs with one small mistake each, which a program's
tests should find.

The data are not part of the repository; they lie in `shared/data/humaneval/HumanEval.jsonl.gz`
beside the checkout.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import gzip
import json
import pathlib
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence

HUMANEVAL = (
  pathlib.Path(__file__).parents[2] / 'shared' / 'data' / 'humaneval' / 'HumanEval.jsonl.gz'
)
KINDS = ('operator', 'constant', 'boundary', 'return')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
  name: str
  prompt: str
  solution: str
  """Indented body that continues the prompt."""
  tests: str
  entry_point: str

  @property
  def program(self) -> str:
    return self.prompt + self.solution


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
  problem: Problem
  number: int
  """Index among the problem's mutants."""
  kind: str
  """Kind of mistake, one of KINDS."""
  change: str
  program: str


def load_problems(path: pathlib.Path = HUMANEVAL) -> list[Problem]:
  with gzip.open(path, 'rt', encoding='utf-8') as file:
    rows = [json.loads(line) for line in file]
  return [
    Problem(
      name=row['task_id'],
      prompt=row['prompt'],
      solution=row['canonical_solution'],
      tests=row['test'],
      entry_point=row['entry_point'],
    )
    for row in rows
  ]


_OPERATORS: dict[type, type] = {
  ast.Add: ast.Sub,
  ast.Sub: ast.Add,
  ast.Mult: ast.Add,
  ast.Div: ast.Mult,
  ast.FloorDiv: ast.Mult,
  ast.Mod: ast.FloorDiv,
  ast.Pow: ast.Mult,
  ast.And: ast.Or,
  ast.Or: ast.And,
  ast.Eq: ast.NotEq,
  ast.NotEq: ast.Eq,
  ast.In: ast.NotIn,
  ast.NotIn: ast.In,
  ast.Is: ast.IsNot,
  ast.IsNot: ast.Is,
}
_BOUNDARIES: dict[type, type] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}


def _edits(node: ast.AST) -> Iterator[tuple[str, str, object]]:
  """Yields (kind, field or place, replacement) for each edit of a node."""
  match node:
    case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op) if type(op) in _OPERATORS:
      yield 'operator', 'op', _OPERATORS[type(op)]()
    case ast.Compare(ops=ops):
      for i, op in enumerate(ops):
        for kind, table in (('operator', _OPERATORS), ('boundary', _BOUNDARIES)):
          if type(op) in table:
            yield kind, 'ops', [*ops[:i], table[type(op)](), *ops[i + 1 :]]
    case ast.Constant(value=bool(value)):
      yield 'constant', 'value', not value
    case ast.Constant(value=int(value) | float(value)):
      yield 'constant', 'value', value + 1
      yield 'constant', 'value', value - 1
    case ast.Constant(value=str(value)):
      yield 'constant', 'value', f'{value}?'
    case ast.Return(value=value) if value is not None and not (
      isinstance(value, ast.Constant) and value.value is None
    ):
      yield 'return', 'value', ast.Constant(None)


def mutants(problem: Problem) -> list[Mutant]:
  """Returns all mutants of a problem, in the order of its solution; prompt and docstrings stay
  unchanged.
  """
  tree = ast.parse(problem.program)
  first = problem.prompt.rstrip().count('\n') + 2
  documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
  found = []
  for place, node in enumerate(ast.walk(tree)):
    if getattr(node, 'lineno', 0) < first or id(node) in documentation:
      continue
    for kind, field, value in _edits(node):
      changed = copy.deepcopy(tree)
      target = next(other for i, other in enumerate(ast.walk(changed)) if i == place)
      setattr(target, field, value)
      change = f'line {node.lineno - first + 1}: {ast.unparse(node)} -> {ast.unparse(target)}'
      source = ast.unparse(ast.fix_missing_locations(changed))
      found.append(
        Mutant(
          problem=problem,
          number=len(found),
          kind=kind,
          change=' '.join(change.split()),
          program=source,
        )
      )
  return found


def shuffled(problem: Problem, seed: int) -> list[Mutant]:
  """Returns the problem's mutants in an order drawn from the seed."""
  found = mutants(problem)
  random.Random(f'{problem.name}/{seed}').shuffle(found)
  return found


_PLAIN = """
import json, os, resource, sys
for line in sys.stdin:
  pid = os.fork()
  if pid == 0:
    try:
      sys.stdout = open(os.devnull, 'w')
      resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
      resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
      exec(json.loads(line), {})
      os._exit(0)
    except BaseException:
      os._exit(1)
  print(os.waitpid(pid, 0)[1], flush=True)
"""


def plainly_pass(programs: Sequence[Mutant]) -> list[bool]:
  """Returns whether each mutant passes its tests in one namespace of a plain Python process, which
  is the baseline for a sandbox.
  """
  lines = [f'{p.program}\n{p.problem.tests}\ncheck({p.problem.entry_point})\n' for p in programs]
  given = ''.join(json.dumps(line) + '\n' for line in lines)
  done = subprocess.run(
    [sys.executable, '-c', _PLAIN], input=given, capture_output=True, text=True, check=True
  )
  return [line == '0' for line in done.stdout.split()]


def killed_mutants(problems: Sequence[Problem], seed: int) -> list[Mutant]:
  """Returns, for each problem, the first mutant in the seed's order that fails its tests in a plain
  Python.
  """
  waiting = {problem.name: shuffled(problem, seed) for problem in problems}
  killed: dict[str, Mutant] = {}
  while waiting:
    tried = [left.pop(0) for left in waiting.values()]
    for mutant, passes in zip(tried, plainly_pass(tried), strict=True):
      if not passes:
        killed[mutant.problem.name] = mutant
    waiting = {name: left for name, left in waiting.items() if name not in killed and left}
  return list(killed.values())
