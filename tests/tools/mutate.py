"""Breaks the package in thirty places, one at a time, and requires that the tests named for each
notice.

  python tests/tools/mutate.py [--only=NAME,…] [--tree=DIRECTORY] [--out=FILE]

Each mutation in tests/tools/mutations.json has a name, a file, a text that occurs once in it
(`old`), its replacement (`new`) and the tests that must then fail (`caught_by`). The mutations are
made in a clone of the commit that is checked out; this tree stays as it is. First all named tests
run without a mutation and must pass, for a test that fails anyway catches nothing. Then each
mutation is made in turn, and each of its tests must fail (pytest's exit code 1; a test that is
missing, not collected or skipped has not failed).

Prints a table in Markdown. The exit code is 0 if every mutation was caught, 1 if one survived, and
2 if something cannot be checked. All mutations together take twice the time of the named tests.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILE = pathlib.Path(__file__).with_name('mutations.json')
LIMIT_S = 1200
"""Most seconds for one test, which a mutation may make wait for ever."""
_PASSED, _FAILED = 0, 1
_MEANING = {
  2: 'not run: not collected',
  3: 'not run: pytest failed',
  4: 'not run: missing',
  5: 'not run: missing',
}
"""pytest's other exit codes; a file that cannot be imported counts as not collected, or missing."""


class Unusable(Exception):
  """A reason why the check cannot be made, in one line."""


@dataclasses.dataclass(frozen=True)
class Mutation:
  name: str
  file: str
  old: str
  new: str
  caught_by: tuple[str, ...]
  """Test ids."""


@dataclasses.dataclass(frozen=True)
class Result:
  """The outcome of one test under one mutation."""

  mutation: Mutation
  test: str
  caught: bool
  outcome: str
  seconds: float


def read_mutations(only: Sequence[str]) -> list[Mutation]:
  """Reads tests/tools/mutations.json.

  Args:
    only: names of the mutations to read; all where it is empty.
  """
  try:
    rows = json.loads(FILE.read_text())
    mutations = [
      Mutation(
        **{name: row[name] for name in ('name', 'file', 'old', 'new')},
        caught_by=tuple(row['caught_by']),
      )
      for row in rows
    ]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise Unusable(f'{FILE}: not a list of mutations ({type(error).__name__}: {error})') from None
  names = [mutation.name for mutation in mutations]
  if twice := sorted({name for name in names if names.count(name) > 1}):
    raise Unusable(f'{FILE}: two mutations are called {twice[0]}')
  if unknown := sorted(set(only) - set(names)):
    raise Unusable(f'--only={unknown[0]}: no mutation of that name; there are {", ".join(names)}')
  return [mutation for mutation in mutations if not only or mutation.name in only]


@contextlib.contextmanager
def tree_to_break(given: pathlib.Path | None) -> Iterator[pathlib.Path]:
  """The folder in which mutations are made: `given`, or else a clone that is removed after the
  block.
  """
  with tempfile.TemporaryDirectory(prefix='mutations-') as folder:
    if given is None:
      tree = pathlib.Path(folder) / 'tree'
      done = subprocess.run(
        ['git', 'clone', '--quiet', '--shared', str(ROOT), str(tree)],
        capture_output=True,
        text=True,
      )
      if done.returncode:
        raise Unusable(f'{ROOT}: cannot be cloned ({" ".join(done.stderr.split())})')
    else:
      tree = given.resolve()
      if tree == ROOT:
        raise Unusable(
          f'--tree={given}: this is the tree of mutate.py; wanted another, whose files may be '
          'changed'
        )
      if not (tree / 'jaxrl_llm').is_dir():
        raise Unusable(
          f'--tree={given}: has no jaxrl_llm folder; wanted a clone of this repository'
        )
    for environment in ROOT.glob('.venv*'):
      if not (tree / environment.name).exists():
        (tree / environment.name).symlink_to(environment)
    if not (tree / '.venv/bin/python').exists():
      raise Unusable(f'{tree}: has no .venv, and neither has {ROOT}')
    yield tree


def run(
  tree: pathlib.Path, command: Sequence[str], limit_s: float = LIMIT_S
) -> tuple[int | None, str]:
  """Runs the tree's Python on the tree's package: (exit code, or None where it took too long;
  output).
  """
  process = subprocess.Popen(
    [str(tree / '.venv/bin/python'), *command],
    cwd=tree,
    # .venv has the package of the tree that it was made for.
    env={**os.environ, 'PYTHONPATH': str(tree)},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    errors='replace',
    start_new_session=True,
  )
  try:
    out, _ = process.communicate(timeout=limit_s)
    return process.returncode, out
  except subprocess.TimeoutExpired:
    return None, ''
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_tests(tree: pathlib.Path, ids: Sequence[str]) -> tuple[int | None, str]:
  """Runs tests up to the first failure, which decides."""
  return run(
    tree,
    ['-m', 'pytest', '-x', '-q', '-p', 'no:cacheprovider', '--tb=short', *ids],
    LIMIT_S * len(ids),
  )


def check(tree: pathlib.Path, mutations: Sequence[Mutation]) -> None:
  """Raises Unusable for a mutation that cannot be made, and where Python would import the package
  of another tree.
  """
  for mutation in mutations:
    file = tree / mutation.file
    count = file.read_text().count(mutation.old) if file.is_file() else 0
    if count != 1:
      raise Unusable(
        f'{mutation.name}: its text occurs {count} times in {mutation.file}, wanted once'
      )
  modules = [
    m.file.removesuffix('.py').replace('/', '.')
    for m in mutations
    if m.file.startswith('jaxrl_llm/')
  ]
  script = (
    'import importlib.util, sys; print(*(importlib.util.find_spec(name).origin for name in '
    'sys.argv[1:]), sep="\\n")'
  )
  _, out = run(tree, ['-c', script, *modules])
  wanted = [
    str(tree / mutation.file) for mutation in mutations if mutation.file.startswith('jaxrl_llm/')
  ]
  if out.split() != wanted:
    raise Unusable(
      f'{tree}: its Python imports the package from elsewhere ({" ".join(out.split())[-200:]})'
    )


@contextlib.contextmanager
def made(tree: pathlib.Path, mutation: Mutation) -> Iterator[None]:
  """Makes the mutation, and takes it back after the block."""
  file = tree / mutation.file
  original = file.read_text()

  def write(text: str) -> None:
    file.write_text(text)
    # Python recompiles a file when its size or the second of its last change differ; here both may
    # be equal.
    for compiled in file.parent.glob(f'__pycache__/{file.stem}.*'):
      compiled.unlink()

  try:
    write(original.replace(mutation.old, mutation.new))
    yield
  finally:
    write(original)


def last_error(output: str) -> str:
  """The first line of pytest's first error, shortened; without an error, the last line of its
  output.
  """
  lines = [line[4:].strip() for line in output.splitlines() if line.startswith('E   ')]
  text = lines[0] if lines else (output.strip().splitlines() or ['nothing'])[-1]
  return re.sub(r'\s+', ' ', text)[:90]


def test_under(tree: pathlib.Path, mutation: Mutation, test: str) -> Result:
  """Runs the test while the mutation is in the tree."""
  begin = time.monotonic()
  with made(tree, mutation):
    code, out = run_tests(tree, [test])
  if code is None:
    outcome = f'not ended after {LIMIT_S} s'
  elif code == _FAILED:
    outcome = f'caught: {last_error(out)}'
  elif code == _PASSED:
    outcome = 'skipped' if re.search(r'^\d+ skipped', out.strip().splitlines()[-1]) else 'SURVIVED'
  else:
    outcome = _MEANING.get(code, f'pytest ended with {code}')
  return Result(mutation, test, code == _FAILED, outcome, time.monotonic() - begin)


HEADER = '| mutation | file | test | result |\n|---|---|---|---|'


def row(result: Result) -> str:
  cells = (
    result.mutation.name,
    result.mutation.file,
    result.test,
    f'{result.outcome} ({result.seconds:.0f} s)',
  )
  return '| ' + ' | '.join(cell.replace('|', '\\|') for cell in cells) + ' |'


def main(argv: Sequence[str]) -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    '--only', default='', help='names of mutations, with commas between them; all by default'
  )
  parser.add_argument(
    '--tree', type=pathlib.Path, help='a tree to work in instead of a clone; nobody else may use it'
  )
  parser.add_argument('--out', type=pathlib.Path, help='a file to write the table to as well')
  options = parser.parse_args(argv)
  # So that the mutation is taken back.
  signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
  lines: list[str] = []

  def say(line: str) -> None:
    print(line, flush=True)
    lines.append(line)
    if options.out:
      options.out.write_text('\n'.join(lines) + '\n')

  try:
    mutations = read_mutations([name for name in options.only.split(',') if name])
    with tree_to_break(options.tree) as tree:
      check(tree, mutations)
      begin, ids = (
        time.monotonic(),
        list(dict.fromkeys(test for m in mutations for test in m.caught_by)),
      )
      code, out = run_tests(tree, ids)
      if code != _PASSED:
        failed = re.findall(r'^(?:FAILED|ERROR) (\S+)', out, re.MULTILINE)
        raise Unusable(
          f'without a mutation pytest ends with {code}, wanted 0: {" ".join(failed)} '
          f'{last_error(out)}'
        )
      say(
        f'{len(ids)} tests without a mutation: passed ({time.monotonic() - begin:.0f} '
        f's)\n\n{HEADER}'
      )
      survived = 0
      for mutation in mutations:
        results = [test_under(tree, mutation, test) for test in mutation.caught_by]
        survived += not all(result.caught for result in results)
        for result in results:
          say(row(result))
    say(f'\n{len(mutations) - survived} of {len(mutations)} mutations caught')
    return 1 if survived else 0
  except (Unusable, OSError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 2


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
