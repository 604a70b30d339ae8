"""The acceptance tier resumes where it was stopped, and its table holds the newest results."""

import os
import pathlib
import shutil
import subprocess
import sys

import ledger
import pytest

TESTS = """
import os, pathlib

def count(name):
  with open(pathlib.Path(os.environ['COUNTS']) / name, 'a') as file:
    file.write('x')

def test_passes():
  count('passes')

def test_fails_at_first():
  count('fails')
  assert (pathlib.Path(os.environ['COUNTS']) / 'mended').exists()
"""


@pytest.fixture
def tree(tmp_path):
  """A repository with two tests, one of which fails until it is mended."""
  root = tmp_path / 'tree'
  (root / ledger.TABLE).parent.mkdir(parents=True)
  (root / 'tests' / 'tools').mkdir(parents=True)
  shutil.copy(pathlib.Path(ledger.__file__), root / 'tests' / 'tools')
  (root / 'tests' / 'some_test.py').write_text(TESTS)
  (root / '.gitignore').write_text('runs\n__pycache__\n.pytest_cache\n')
  git(root, 'init', '--quiet')
  save(root, 'first')
  return root


def git(root, *words):
  who = ('-c', 'user.name=test', '-c', 'user.email=test@localhost')
  subprocess.run(['git', *who, *words], cwd=root, check=True, capture_output=True)


def save(root, message):
  git(root, 'add', '.')
  git(root, 'commit', '--quiet', '--message', message)


@pytest.mark.full
@pytest.mark.parametrize(
  'workers', [(), ('-p', 'xdist', '--numprocesses=2')], ids=['alone', 'workers']
)
def test_what_passed_at_this_commit_is_not_run_again_and_the_rest_is(tree, tmp_path, workers):
  env = {key: value for key, value in os.environ.items() if not key.startswith('PYTEST_')}
  env |= {
    'COUNTS': str(tmp_path),
    'JAXRL_TEST_LEDGER': str(tree / 'runs'),
    'PYTHONPATH': str(tree / 'tests' / 'tools'),
  }
  env['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'  # Most of the time would go into imports of plugins.
  command = [sys.executable, '-m', 'pytest', '-q', '-p', 'ledger', *workers, 'tests/some_test.py']

  def run(expect):
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == expect, done.stdout + done.stderr
    table = (tree / ledger.TABLE).read_text().splitlines()
    results = {
      row[1].split('::')[1].strip(' `'): row[4].strip()
      for line in table
      if len(row := line.split('|')) == 7 and '::' in line
    }
    return results, *(len((tmp_path / name).read_text()) for name in ('passes', 'fails'))

  assert run(1) == ({'test_passes': 'passed', 'test_fails_at_first': 'failed'}, 1, 1)
  (tmp_path / 'mended').touch()
  with (tree / 'runs' / 'acceptance.jsonl').open('a') as file:
    file.write('{"test": "torn')
  assert run(0) == ({'test_passes': 'passed', 'test_fails_at_first': 'passed'}, 1, 2)
  assert run(0)[1:] == (1, 2), 'all has passed'
  save(tree, 'the table')
  assert run(0)[1:] == (2, 3), 'another commit'
  (tree / 'tests' / 'some_test.py').write_text(TESTS + '\n')
  assert run(0)[1:] == (3, 4) and run(0)[1:] == (4, 5), 'what is not committed is run each time'
  assert '+ |' in (tree / ledger.TABLE).read_text()
