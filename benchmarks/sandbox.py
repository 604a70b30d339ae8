"""Benchmark of the code sandbox: start latency, scores per second, and HumanEval mutants that the
tests catch.

  .venv/bin/python benchmarks/sandbox.py [--isolation=namespaces] [--seed=0] [--mutants=all]

First, programs that print the time run one after the other: milliseconds between the call and the
program's first line, and until the call returns, p50 and p99 of `--rounds`. With `--libraries`,
each of them is followed by a program that imports these libraries first. Then the 164 solutions of
HumanEval run against their tests in `--threads` sandboxes at once; all must pass. Then the mutants
of all solutions (operator, constant, boundary, return) run, or of each solution the first
`--mutants` in the order of the seed: the script prints the fraction that fails, by kind, and each
that passes. With `--compare` all of them run once more in a plain Python without a sandbox, and
differing results are listed.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import statistics
import time
from collections.abc import Sequence

from absl import flags
from mutants import HUMANEVAL, KINDS, Mutant, Problem, load_problems, plainly_pass, shuffled

from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.sandbox.libraries import preload_of
from jaxrl_llm.rewards.sandbox.rows import read_tests
from jaxrl_llm.rewards.sandbox.sandbox import Case, Limits, ProgramOutcome, Sandboxes

_ISOLATION = flags.DEFINE_enum(
  'isolation', 'auto', ['auto', 'namespaces', 'bubblewrap', 'none'], 'Of the programs.'
)
_ROUNDS = flags.DEFINE_integer('rounds', 200, 'Programs whose start is timed.', lower_bound=2)
_PAUSE_S = flags.DEFINE_float('pause_s', 0.1, 'Seconds between these.', lower_bound=0)
_THREADS = flags.DEFINE_integer('threads', 2, 'Programs at once.', lower_bound=1)
_SEED = flags.DEFINE_integer('seed', 0, 'Of the order of mutants.')
_MUTANTS = flags.DEFINE_string('mutants', 'all', 'How many of each solution, or all.')
_COMPARE = flags.DEFINE_bool('compare', False, 'Run the mutants in a plain Python as well.')
_LIBRARIES = flags.DEFINE_list('libraries', [], 'Libraries that programs may import.')
_DATA = flags.DEFINE_string('data', str(HUMANEVAL), 'HumanEval.jsonl.gz.')


def latencies_ms(sandboxes: Sandboxes, libraries: Sequence[str] = ()) -> tuple[float, float]:
  """Measures the time from the call to the program's first line after its imports, and to the end
  of the call.
  """
  time.sleep(_PAUSE_S.value)
  imports = ''.join(f'import {library}\n' for library in ('time', *libraries))
  began = time.monotonic()
  outcome = sandboxes.run_cases(f'{imports}print(time.monotonic())', [Case(stdin='', stdout='')])
  whole = time.monotonic() - began
  printed = outcome.detail.removeprefix("output '").split('\\n')[0]
  return 1e3 * (float(printed) - began), 1e3 * whole


def print_latencies(name: str, latencies: Sequence[tuple[float, float]]) -> None:
  for what, values in zip(('start', 'whole call'), zip(*latencies, strict=True), strict=True):
    values = sorted(values)
    p99 = values[min(len(values) - 1, round(0.99 * len(values)))]
    print(
      f'{name}: {what} p50 {statistics.median(values):.1f} ms, p99 {p99:.1f} ms '
      f'({len(values)} programs)'
    )


def time_starts(sandboxes: Sandboxes) -> None:
  """Times plain programs and, in turn with them, programs that import libraries."""
  if not _LIBRARIES.value:
    print_latencies(sandboxes.isolation, [latencies_ms(sandboxes) for _ in range(_ROUNDS.value)])
    return
  began = time.monotonic()
  loaded = Sandboxes(
    Limits(cpu_s=3),
    isolation=_ISOLATION.value,
    preload=preload_of(tuple(_LIBRARIES.value)),
  )
  with contextlib.closing(loaded):
    print(f'{loaded.isolation}: {time.monotonic() - began:.1f} s to load {_LIBRARIES.value}')
    plain, with_libraries = [], []
    for _ in range(_ROUNDS.value):
      plain.append(latencies_ms(sandboxes))
      with_libraries.append(latencies_ms(loaded, _LIBRARIES.value))
  print_latencies(f'{sandboxes.isolation}, plain', plain)
  print_latencies(f'{sandboxes.isolation}, libraries', with_libraries)


def score(sandboxes: Sandboxes, problem: Problem, program: str) -> ProgramOutcome:
  work = read_tests({'tests': problem.tests, 'entry_point': problem.entry_point})
  assert work is not None
  return sandboxes.run_tests(program, work.tests, work.entry_point)


def main(argv: list[str]) -> None:
  del argv
  try:
    problems = load_problems(_DATA.value)
  except OSError as error:
    raise UserError(f'--data={_DATA.value}: {error.strerror}; wanted HumanEval.jsonl.gz') from None
  if _MUTANTS.value != 'all' and not _MUTANTS.value.isdecimal():
    raise UserError(f'--mutants={_MUTANTS.value}: wanted a number or all')
  limits = Limits(cpu_s=3)
  with contextlib.closing(
    Sandboxes(limits, isolation=_ISOLATION.value, waiting=_THREADS.value)
  ) as sandboxes:
    time_starts(sandboxes)
    with concurrent.futures.ThreadPoolExecutor(_THREADS.value) as threads:
      began = time.monotonic()
      outcomes = list(threads.map(lambda p: score(sandboxes, p, p.program), problems))
      seconds = time.monotonic() - began
      passed = sum(outcome.fraction == 1.0 for outcome in outcomes)
      print(
        f'solutions: {passed} of {len(problems)} pass; {len(problems) / seconds:.1f} scores/s, '
        f'{_THREADS.value} at once'
      )
      count = None if _MUTANTS.value == 'all' else int(_MUTANTS.value)
      made: list[Mutant] = [mutant for p in problems for mutant in shuffled(p, _SEED.value)[:count]]
      began = time.monotonic()
      outcomes = list(threads.map(lambda m: score(sandboxes, m.problem, m.program), made))
      seconds = time.monotonic() - began
  survivors = [
    mutant for mutant, outcome in zip(made, outcomes, strict=True) if outcome.fraction == 1.0
  ]
  killed = len(made) - len(survivors)
  if not made:
    return
  print(f'mutants: {len(made)} in {seconds:.0f} s; killed {killed} ({killed / len(made):.2%})')
  for kind in KINDS:
    of, left = (sum(mutant.kind == kind for mutant in group) for group in (made, survivors))
    print(f'  {kind}: {of - left} of {of} killed')
  print(f'  ended: {dict(collections.Counter(outcome.ended.value for outcome in outcomes))}')
  print(f'survivors by task, number of the mutant (seed {_SEED.value}) and change:')
  for mutant in survivors:
    print(f'  {mutant.problem.name} #{mutant.number} {mutant.kind} {mutant.change}')
  if _COMPARE.value:
    plain = plainly_pass(made)
    for mutant, outcome, passes in zip(made, outcomes, plain, strict=True):
      if passes != (outcome.fraction == 1.0):
        print(f'  differs: {mutant.problem.name} #{mutant.number}: plain {passes}, here {outcome}')
    print(f'compared: {sum(plain)} of {len(made)} pass in a plain Python')


if __name__ == '__main__':
  script.run(main)
