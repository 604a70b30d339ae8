"""Benchmark of the code sandbox: start latency, scores per second, and HumanEval mutants that the
tests catch.

  .venv/bin/python benchmarks/sandbox.py [--isolation=namespaces] [--seed=0] [--mutants=all]

First, programs that print the time run one after the other: milliseconds between the call and the
program's first line, p50 and p99 of `--rounds`. Then the 164 solutions of HumanEval run against
their tests in `--threads` sandboxes at once; all must pass. Then the mutants of all solutions
(operator, constant, boundary, return) run, or of each solution the first `--mutants` in the order
of the seed: the script prints the fraction that fails, by kind, and each that passes. With
`--compare` all of them run once more in a plain Python without a sandbox, and differing results are
listed.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import statistics
import time

from absl import flags
from mutants import HUMANEVAL, KINDS, Mutant, Problem, load_problems, plainly_pass, shuffled

from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.sandbox.sandbox import Case, Limits, ProgramOutcome, Sandboxes
from jaxrl_llm.rewards.scorers.code import read_tests

_ISOLATION = flags.DEFINE_enum(
  'isolation', 'auto', ['auto', 'namespaces', 'bubblewrap', 'none'], 'Of the programs.'
)
_ROUNDS = flags.DEFINE_integer('rounds', 200, 'Programs whose start is timed.', lower_bound=2)
_PAUSE_S = flags.DEFINE_float('pause_s', 0.1, 'Seconds between these.', lower_bound=0)
_THREADS = flags.DEFINE_integer('threads', 2, 'Programs at once.', lower_bound=1)
_SEED = flags.DEFINE_integer('seed', 0, 'Of the order of mutants.')
_MUTANTS = flags.DEFINE_string('mutants', 'all', 'How many of each solution, or all.')
_COMPARE = flags.DEFINE_bool('compare', False, 'Run the mutants in a plain Python as well.')
_DATA = flags.DEFINE_string('data', str(HUMANEVAL), 'HumanEval.jsonl.gz.')


def start_latencies_ms(sandboxes: Sandboxes) -> list[float]:
  """Measures the time from the call to the program's first instruction."""
  found = []
  for _ in range(_ROUNDS.value):
    time.sleep(_PAUSE_S.value)
    began = time.monotonic()
    outcome = sandboxes.run_cases(
      'import time\nprint(time.monotonic())', [Case(stdin='', stdout='')]
    )
    printed = outcome.detail.removeprefix("output '").split('\\n')[0]
    found.append(1e3 * (float(printed) - began))
  return found


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
    starts = sorted(start_latencies_ms(sandboxes))
    p99 = starts[min(len(starts) - 1, round(0.99 * len(starts)))]
    print(
      f'{sandboxes.isolation}: start p50 {statistics.median(starts):.1f} ms, p99 {p99:.1f} ms '
      f'({len(starts)} programs)'
    )
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
