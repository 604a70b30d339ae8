"""quickstart.sh, test.sh and .ci/run, run for real in a small copy of the repository that needs no network."""

import os
import pathlib
import shutil
import site
import subprocess
import sys
import textwrap
import tomllib
import venv

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parents[1]

BACKEND = """
import os
import zipfile

def build_editable(directory, config_settings=None, metadata_directory=None):
  with open('builds', 'a') as log:
    log.write('built\\n')
  name = 'small-1.0-py3-none-any.whl'
  files = {
    'small.pth': os.getcwd() + '\\n',
    'small-1.0.dist-info/METADATA': 'Metadata-Version: 2.1\\nName: small\\nVersion: 1.0\\n',
    'small-1.0.dist-info/WHEEL': 'Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n',
  }
  files['small-1.0.dist-info/RECORD'] = ''.join(f'{path},,\\n' for path in [*files, 'small-1.0.dist-info/RECORD'])
  with zipfile.ZipFile(os.path.join(directory, name), 'w') as wheel:
    for path, text in files.items():
      wheel.writestr(path, text)
  return name
"""

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "small"
version = "1.0"

[dependency-groups]
test = []

[tool.ruff.lint]
select = ["F"]

[tool.pytest.ini_options]
testpaths = ["tests"]
markers = ["full: x", "acceptance: x"]
"""


@pytest.fixture
def tree(tmp_path):
  """A repository with the real scripts and a package that builds itself offline."""
  tree = tmp_path / 'tree with a space'
  (tree / 'launch').mkdir(parents=True)
  for name in ('environment.sh', 'quickstart.sh', 'test.sh'):
    shutil.copy(ROOT / 'launch' / name, tree / 'launch' / name)
  (tree / 'constraints').mkdir()
  (tree / 'backend.py').write_text(BACKEND)
  (tree / 'pyproject.toml').write_text(PYPROJECT)
  (tree / 'launch' / 'train.py').write_text(
    'import os\nimport sys\nprint(os.environ["NPROC"], sys.argv)\nsys.exit(7)\n'
  )
  return tree


def add_environment(tree: pathlib.Path) -> None:
  """An environment that sees this one's packages (pip, pytest, ruff), made in no time."""
  venv.create(tree / '.venv', symlinks=True)
  version = f'python{sys.version_info.major}.{sys.version_info.minor}'
  packages = next(path for path in site.getsitepackages() if path.endswith('site-packages'))
  (tree / '.venv' / 'lib' / version / 'site-packages' / 'here.pth').write_text(packages + '\n')
  (tree / '.venv' / 'bin' / 'ruff').symlink_to(pathlib.Path(sys.executable).parent / 'ruff')


def run(script: pathlib.Path, *arguments: str, cwd: pathlib.Path | str = '/', **variables: str):
  environment = {key: value for key, value in os.environ.items() if not key.startswith('PYTEST_')}
  environment.pop('PYTHONPATH', None)
  environment.pop('NPROC', None)
  return subprocess.run(
    ['bash', str(script), *arguments],
    cwd=cwd,
    env={**environment, **variables},
    capture_output=True,
    text=True,
    timeout=300,
  )


def fake_python(tmp_path: pathlib.Path, version: str) -> pathlib.Path:
  """Something that answers the question for its version, and nothing else."""
  path = tmp_path / 'python3'
  path.write_text(f'#!/bin/sh\necho {version}\n')
  path.chmod(0o755)
  return path


def test_quickstart_installs_once_and_hands_its_arguments_to_the_trainer(tree):
  add_environment(tree)
  (tree / 'constraints' / f'py{sys.version_info.major}{sys.version_info.minor}.txt').write_text('other==1.0\n')
  script = tree / 'launch' / 'quickstart.sh'
  first = run(script, '--workdir=w', '--config.a=b c', NPROC='3', PYTHON=sys.executable)
  wanted = [
    'launch/train.py',
    '--config=configs/quickstart.py',
    '--workdir=runs/quickstart',
    '--workdir=w',
    '--config.a=b c',
  ]
  assert first.returncode == 7, first  # The trainer's own.
  assert first.stdout.splitlines()[-1] == f'3 {wanted}'
  version = f'{sys.version_info.major}{sys.version_info.minor}'
  assert f'quickstart: installing packages into .venv (versions of constraints/py{version}.txt)' in first.stdout
  second = run(script, PYTHON=sys.executable)
  assert second.returncode == 7
  assert second.stdout.splitlines()[0] == 'quickstart: .venv is up to date'
  threads = subprocess.run(['nproc'], capture_output=True, text=True, check=True).stdout.strip()
  assert second.stdout.splitlines()[-1] == f'{threads} {wanted[:3]}'
  assert (tree / 'builds').read_text() == 'built\n'


@pytest.mark.full
@pytest.mark.parametrize('changed', ['pyproject.toml', 'constraints'])
def test_a_change_of_what_is_wanted_installs_again(tree, changed):
  add_environment(tree)
  constraints = f'constraints/py{sys.version_info.major}{sys.version_info.minor}.txt'
  (tree / constraints).write_text('other==1.0\n')
  script = tree / 'launch' / 'quickstart.sh'
  run(script, PYTHON=sys.executable)
  with (tree / (constraints if changed == 'constraints' else changed)).open('a') as file:
    file.write('\n# changed\n')
  run(script, PYTHON=sys.executable)
  assert (tree / 'builds').read_text() == 'built\n' * 2


@pytest.mark.full
def test_an_install_that_failed_is_one_line_and_tried_again(tree):
  add_environment(tree)
  (tree / 'backend.py').write_text('def build_editable(*a, **k):\n  raise SystemExit("broken")\n')
  script = tree / 'launch' / 'quickstart.sh'
  failed = run(script, PYTHON=sys.executable)
  assert failed.returncode == 2
  assert failed.stderr.splitlines()[-1] == 'quickstart: pip could not install the packages (its own words are above)'
  (tree / 'backend.py').write_text(BACKEND)
  assert run(script, PYTHON=sys.executable).returncode == 7


@pytest.mark.full
def test_quickstart_creates_the_environment_itself_and_repairs_a_broken_one(tree):
  script = tree / 'launch' / 'quickstart.sh'
  first = run(script, PYTHON=sys.executable)
  assert (first.returncode, first.stderr) == (7, '')
  assert first.stdout.startswith('quickstart: creating .venv with Python 3.')
  assert 'no tested versions are on record' in first.stdout
  shutil.rmtree(tree / '.venv' / 'lib')  # As an interrupted set-up leaves it.
  again = run(script, PYTHON=sys.executable)
  assert again.returncode == 7
  assert again.stdout.startswith('quickstart: creating .venv with Python 3.')


def test_an_old_python_is_one_line(tree, tmp_path):
  old = fake_python(tmp_path, '3.9')
  refused = run(tree / 'launch' / 'quickstart.sh', PYTHON=str(old))
  assert (refused.returncode, refused.stdout) == (2, '')
  assert refused.stderr == f'quickstart: PYTHON={old} is Python 3.9; wanted 3.11 or newer\n'
  assert not (tree / '.venv').exists()


@pytest.mark.parametrize(
  ('version', 'accepted'),
  [('2.7', False), ('3.1', False), ('3.10', False), ('3.11', True), ('3.19', True), ('3.20', True)],
)
def test_which_versions_are_new_enough(tmp_path, version, accepted):
  check = f'source "{ROOT}/launch/environment.sh"; is_new_enough "{fake_python(tmp_path, version)}"'
  assert (subprocess.run(['bash', '-c', check]).returncode == 0) == accepted


@pytest.mark.parametrize(
  ('argument', 'line'),
  [
    ('--tier=slow', 'test: --tier=slow: wanted --tier=fast, --tier=full or --tier=acceptance'),
    ('--teir=fast', 'test: --teir=fast: unknown argument; wanted [--tier=fast|full|acceptance] [-- PYTEST ARGUMENTS]'),
  ],
)
def test_bad_arguments_of_test_sh_are_one_line(argument, line):
  refused = run(ROOT / 'launch' / 'test.sh', argument)
  assert (refused.returncode, refused.stdout, refused.stderr) == (2, '', f'{line}\n')


@pytest.mark.full
def test_the_fast_tier_leaves_out_the_slow_and_reports_each_part(tree):
  add_environment(tree)
  (tree / 'tests').mkdir()
  tests = """
    import pytest

    def test_good():
      assert True

    @pytest.mark.full
    def test_full():
      assert False

    @pytest.mark.acceptance
    def test_acceptance():
      assert False
  """
  (tree / 'tests' / 'a_test.py').write_text(textwrap.dedent(tests).lstrip())
  passed = run(tree / 'launch' / 'test.sh', '--tier=fast', NPROC='1', PYTHON=sys.executable)
  assert passed.returncode == 0, passed
  *_, summary, ruff, tests_line = passed.stdout.splitlines()
  assert (summary, ruff) == ('test: summary', '  ruff: passed: All checks passed!')
  assert tests_line.startswith(f'  pytest, tier fast, Python 3.{sys.version_info.minor}: passed: ')
  assert '1 passed' in tests_line

  (tree / 'tests' / 'a_test.py').write_text('import os\n\n\ndef test_bad():\n    assert 1 == 2\n')
  failed = run(tree / 'launch' / 'test.sh', '--tier=fast', NPROC='1', PYTHON=sys.executable)
  assert failed.returncode == 1
  ruff, tests_line = failed.stdout.splitlines()[-2:]
  assert ruff.startswith('  ruff: FAILED (exit code 1): ')  # An unused import; the tests run all the same.
  assert 'FAILED (exit code 1): ' in tests_line
  assert '1 failed' in tests_line

  chosen = run(tree / 'launch' / 'test.sh', '--tier=fast', '--', '-k', 'nothing', NPROC='1', PYTHON=sys.executable)
  assert chosen.returncode == 1  # A run that found no test is no success.


def test_ci_runs_the_full_tier():
  assert (ROOT / '.ci' / 'run').read_text().splitlines()[-1] == 'exec bash launch/test.sh --tier=full'
  assert os.access(ROOT / '.ci' / 'run', os.X_OK)


def test_constraints_are_plain_versions_that_agree_with_the_project():
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())
  groups = project['dependency-groups']['test-without-torch']
  wanted = [Requirement(text) for text in [*project['project']['dependencies'], *groups]]
  for name in ('py311.txt', 'py312.txt'):
    lines = [line for line in (ROOT / 'constraints' / name).read_text().splitlines() if not line.startswith('#')]
    pinned = {}
    for line in lines:
      package, separator, version = line.partition('==')
      assert separator and ' ' not in version and '+' not in version and '/' not in line, line
      pinned[canonicalize_name(package)] = version
    for requirement in wanted:
      assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, (name, str(requirement))
