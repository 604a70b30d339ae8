"""quickstart.sh, test.sh and .ci/run, run for real in a small copy of the repository that needs no
network.
"""

import fcntl
import json
import os
import pathlib
import shutil
import signal
import site
import subprocess
import sys
import textwrap
import time
import tomllib
import venv

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from paths import ROOT

BACKEND = """
import os
import zipfile

def build_editable(directory, config_settings=None, metadata_directory=None):
  with open('builds', 'a') as log:
    log.write('built\\n')
  name = 'small-1.0-py3-none-any.whl'
  files = {
    'small.pth': os.getcwd() + '\\n',
    'small-1.0.dist-info/METADATA': 'Metadata-Version: 2.1\\nName: small\\nVersion: 1.0\\n' + \
''.join(f'Provides-Extra: {name}\\n' for name in ('math', 'reasoning-gym', 'datasets')),
    'small-1.0.dist-info/WHEEL': 'Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: \
true\\nTag: py3-none-any\\n',
  }
  files['small-1.0.dist-info/RECORD'] = ''.join(f'{path},,\\n' for path in [*files, \
'small-1.0.dist-info/RECORD'])
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

[project.optional-dependencies]
math = []
reasoning-gym = []
datasets = []

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
  (tree / 'tests' / 'tools').mkdir(parents=True)
  shutil.copy(ROOT / 'tests' / 'tools' / 'times.py', tree / 'tests' / 'tools' / 'times.py')
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
  (tree / 'constraints' / f'py{sys.version_info.major}{sys.version_info.minor}.txt').write_text(
    'other==1.0\n'
  )
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
  assert (
    f'quickstart: installing packages into .venv (versions of constraints/py{version}.txt)'
    in first.stdout
  )
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
  assert (
    failed.stderr.splitlines()[-1]
    == 'quickstart: pip could not install the packages (see its output above)'
  )
  (tree / 'backend.py').write_text(BACKEND)
  assert run(script, PYTHON=sys.executable).returncode == 7


@pytest.mark.full
def test_quickstart_creates_the_environment_itself_and_repairs_a_broken_one(tree):
  script = tree / 'launch' / 'quickstart.sh'
  first = run(script, PYTHON=sys.executable)
  assert (first.returncode, first.stderr) == (7, '')
  assert first.stdout.startswith('quickstart: creating .venv with Python 3.')
  assert 'there are no tested versions' in first.stdout
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
    (
      '--teir=fast',
      'test: --teir=fast: unknown argument; wanted [--tier=fast|full|acceptance] '
      '[--changed[=COMMIT]] [--workers=N] [-- PYTEST ARGUMENTS]',
    ),
    ('--workers=0', 'test: --workers=0: wanted --workers=N, a number from 1 to 99'),
    ('--workers=two', 'test: --workers=two: wanted --workers=N, a number from 1 to 99'),
    ('--changed=nowhere', 'affected: git does not know the commit nowhere'),
  ],
)
def test_bad_arguments_of_test_sh_are_one_line(argument, line):
  refused = run(ROOT / 'launch' / 'test.sh', argument)
  assert (refused.returncode, refused.stdout, refused.stderr) == (2, '', f'{line}\n')


@pytest.mark.full
def test_the_fast_tier_leaves_out_the_slow_and_reports_each_part(tree):
  add_environment(tree)
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
  # An unused import; the tests run all the same.
  assert ruff.startswith('  ruff: FAILED (exit code 1): ')
  assert 'FAILED (exit code 1): ' in tests_line
  assert '1 failed' in tests_line

  chosen = run(
    tree / 'launch' / 'test.sh',
    '--tier=fast',
    '--',
    '-k',
    'nothing',
    NPROC='1',
    PYTHON=sys.executable,
  )
  assert chosen.returncode == 1  # A run that found no test is no success.


@pytest.fixture
def full_tree(tree):
  """A tree whose full tier has nothing to install: its commands exist, its environments are fake,
  no Python is 3.12.
  """
  add_environment(tree)
  with (tree / 'launch' / 'environment.sh').open('a') as script:
    script.write('\nensure_environment() { say "$1 is up to date"; }\n')
  (tree / 'tests' / 'a_test.py').write_text('def test_good():\n    assert True\n')
  for name in ('vllm', 'peers', 'aot'):
    (tree / 'launch' / f'install_{name}.sh').write_text(f'echo {name} is made\n')
  (tree / 'commands').mkdir()
  for name in ('chromium', 'chromedriver', 'ip', 'openssl', 'bwrap', 'python3.12'):
    (tree / 'commands' / name).write_text('#!/bin/sh\n')
    (tree / 'commands' / name).chmod(0o755)
  return tree


def full_tier(tree: pathlib.Path) -> dict[str, str]:
  """Environment variables for a run of the full tier in `full_tree`."""
  path = f'{tree / "commands"}:{os.environ["PATH"]}'
  return {'NPROC': '1', 'PYTHON': sys.executable, 'PATH': path, 'PYENV_ROOT': '/nowhere'}


@pytest.mark.full
def test_environments_are_made_side_by_side_and_one_that_fails_stops_no_other_part(full_tree):
  waits = (
    'for i in $(seq 600); do [ ! -e peers-began ] || exit 3; echo "waits for peers"; sleep 0.1; '
    'done; exit 4\n'
  )
  (full_tree / 'launch' / 'install_vllm.sh').write_text(waits)
  (full_tree / 'launch' / 'install_peers.sh').write_text('touch peers-began; echo peers are made\n')
  ran = run(full_tree / 'launch' / 'test.sh', **full_tier(full_tree))
  assert ran.returncode == 1, ran
  lines = ran.stdout.splitlines()
  lines = lines[lines.index('test: summary') + 1 :]
  version = f'Python 3.{sys.version_info.minor}'
  assert lines[0] == '  ruff: passed: All checks passed!'
  assert lines[1].startswith('  vLLM environment: FAILED (exit code 3): ')
  assert lines[2:4] == [
    "  peers' environment: passed: peers are made",
    '  compilers for other devices: passed: aot is made',
  ]
  assert (
    lines[4].startswith(f'  pytest, tier full, {version}: passed: ') and ' 1 passed in ' in lines[4]
  )
  assert lines[5:] == ['  pytest, tier fast, Python 3.12: skipped: there is no python3.12 here']
  logs = full_tree / 'runs' / 'tests'
  assert (logs / 'peers.log').read_text() == 'peers are made\n'
  phases = [json.loads(line) for line in (logs / 'phases.jsonl').read_text().splitlines()]
  assert {phase['name']: phase['code'] for phase in phases} == {
    '.venv': 0,
    'Debian packages': 0,
    'vLLM environment': 3,
    "peers' environment": 0,
    'compilers for other devices': 0,
    'ruff': 0,
    f'pytest, tier full, {version}': 0,
  }


@pytest.mark.full
@pytest.mark.parametrize(('stop', 'code'), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_ends_what_runs_beside_with_its_children(full_tree, stop, code):
  child = full_tree / 'child'
  endless = (
    f"bash -c 'echo $$ >child.new; mv child.new {child.name}; exec sleep 600'; echo the child has "
    'ended\n'
  )
  (full_tree / 'launch' / 'install_vllm.sh').write_text(endless)
  environment = {key: value for key, value in os.environ.items() if not key.startswith('PYTEST_')}
  # bash cannot trap a signal that is ignored when it starts.
  start = (
    'import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp("bash", '
    'sys.argv[1:])'
  )
  script = subprocess.Popen(
    [sys.executable, '-c', start, 'bash', str(full_tree / 'launch' / 'test.sh')],
    env={**environment, **full_tier(full_tree)},
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  try:
    until(child.exists)
    script.send_signal(stop)
    assert script.wait(timeout=120) == code
    until(lambda: not is_running(int(child.read_text())))
  finally:
    script.kill()


def until(condition) -> None:
  deadline = time.monotonic() + 120
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.05)


def is_running(process: int) -> bool:
  try:
    state = pathlib.Path(f'/proc/{process}/stat').read_text().rpartition(')')[2].split()[0]
  except OSError:
    return False
  return state != 'Z'


@pytest.mark.full
def test_only_what_a_change_affects_is_run_and_nothing_is_no_failure(full_tree):
  shutil.copy(
    ROOT / 'tests' / 'tools' / 'affected.py', full_tree / 'tests' / 'tools' / 'affected.py'
  )
  (full_tree / 'tests' / 'b_test.py').write_text(
    'import pytest\n\n\n@pytest.mark.full\ndef test_b():\n    assert True\n'
  )
  (full_tree / '.gitignore').write_text('*\n!tests/\n!tests/**/\n!tests/**/*.py\n')
  git = [
    'git',
    '-c',
    'user.name=test',
    '-c',
    'user.email=test@localhost',
    '-c',
    'commit.gpgsign=false',
  ]
  for arguments in (['init', '--initial-branch=main'], ['add', 'tests'], ['commit', '--message=1']):
    subprocess.run([*git, *arguments], cwd=full_tree, check=True, capture_output=True)

  def last_line(*arguments: str) -> str:
    ran = run(full_tree / 'launch' / 'test.sh', *arguments, '--changed', **full_tier(full_tree))
    assert ran.returncode == 0, ran
    return ran.stdout.splitlines()[-1]

  name = f'pytest, tier fast, Python 3.{sys.version_info.minor}'
  assert last_line('--tier=fast') == f'  {name}: the change affects no test'
  (full_tree / 'tests' / 'b_test.py').open('a').write('# changed\n')
  assert (
    last_line('--tier=fast')
    == f'  {name}: no test of this tier in the files that the change affects'
  )
  (full_tree / 'tests' / 'a_test.py').open('a').write('# changed\n')
  line = last_line('--tier=fast')
  assert line.startswith(f'  {name}: passed: ') and ' 1 passed' in line


def test_the_files_of_the_second_pass_are_there_each_with_its_reason():
  lines = [
    line
    for line in (ROOT / 'tests' / 'tools' / 'newest.txt').read_text().splitlines()
    if not line.startswith('#')
  ]
  assert lines == list(dict.fromkeys(lines))
  for line in lines:
    path, separator, reason = line.partition('  # ')
    assert (ROOT / path).exists() and path.endswith('_test.py') and separator and reason, line


def test_pips_settings_are_uvs_too_where_uv_has_none(tmp_path):
  venv.create(tmp_path / 'venv', symlinks=True)
  packages = next(path for path in site.getsitepackages() if path.endswith('site-packages'))
  here = f'lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages/here.pth'
  (tmp_path / 'venv' / here).write_text(packages + '\n')
  (tmp_path / 'pip.conf').write_text(
    f'[global]\nindex-url = https://index.test/simple\nfind-links = {tmp_path} /nowhere\n'
    '[install]\nextra-index-url = https://a.test/simple\n  https://b.test/simple\n'
  )
  words = 'UV_FIND_LINKS UV_INDEX UV_DEFAULT_INDEX SSL_CERT_FILE UV_INDEX_STRATEGY'

  def settings(**variables: str) -> list[str]:
    check = f'source "{ROOT}/launch/environment.sh"; adopt_pip_settings "{tmp_path}/venv"; '
    check += f'for name in {words}; do echo "${{!name:-}}"; done'
    environment = {
      'PATH': os.environ['PATH'],
      'HOME': str(tmp_path),
      'PIP_CONFIG_FILE': str(tmp_path / 'pip.conf'),
    }
    ran = subprocess.run(
      ['bash', '-c', check], env={**environment, **variables}, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr) == (0, '')
    return ran.stdout.splitlines()

  both = 'https://a.test/simple https://b.test/simple'
  values = settings(PIP_CERT='/certificates.pem')
  assert values == [
    str(tmp_path),
    both,
    'https://index.test/simple',
    '/certificates.pem',
    'unsafe-best-match',
  ]
  values = settings(
    PIP_INDEX_URL='https://c.test/simple',
    UV_INDEX='https://d.test/simple',
    SSL_CERT_FILE='/own.pem',
  )
  assert values == [
    str(tmp_path),
    'https://d.test/simple',
    'https://c.test/simple',
    '/own.pem',
    'unsafe-best-match',
  ]


@pytest.mark.full
def test_without_uv_pip_installs_and_says_so(tree):
  ran = run(
    tree / 'launch' / 'quickstart.sh', PYTHON=sys.executable, PIP_NO_INDEX='1', PIP_FIND_LINKS=''
  )
  assert (ran.returncode, ran.stderr) == (7, '')
  said = (
    'quickstart: uv cannot be installed into .venv (ERROR: No matching distribution found for uv); '
    'installing with pip'
  )
  assert ran.stdout.splitlines()[2] == said
  assert (tree / 'builds').read_text() == 'built\n'


@pytest.mark.full
def test_the_preparation_of_smollm2_overwrites_nothing_and_names_bad_arguments(tree):
  script = shutil.copy(ROOT / 'launch' / 'prepare_smollm2.sh', tree / 'launch')
  bad = run(script, '--where=x')
  assert (bad.returncode, bad.stderr) == (
    2,
    'prepare_smollm2: --where=x: unknown argument; wanted [--out=DIR] [--target=DIR]\n',
  )
  (tree / 'mine').mkdir()
  left = run(script, '--out=mine/')
  assert left.returncode == 2 and 'mine exists and is not a model directory' in left.stderr
  (tree / 'mine' / 'config.json').write_text('{}')
  done = run(script, '--out=mine/')
  assert (done.returncode, done.stdout) == (0, 'prepare_smollm2: mine exists already\n')
  assert not (tree / '.venv-smollm2').exists() and os.listdir(tree / 'mine') == ['config.json']


def test_environments_have_locks_of_their_own(tree):
  """A script waits for one that sets up the same environment, and not for one that sets up
  another.
  """
  add_environment(tree)
  for name in ('.venv-other.lock', '.venv.lock'):
    with (tree / name).open('w') as held:
      fcntl.flock(held, fcntl.LOCK_EX)
      script = subprocess.Popen(
        ['bash', str(tree / 'launch' / 'quickstart.sh')],
        env={**os.environ, 'PYTHON': sys.executable, 'NPROC': '1'},
        stdout=subprocess.PIPE,
        text=True,
      )
      line = script.stdout.readline()
      waiting = 'quickstart: waiting for another script that is setting up .venv\n'
      assert (line == waiting) == (name == '.venv.lock')
    script.communicate(timeout=300)
    assert script.returncode == 7


def test_ci_runs_the_full_tier():
  assert (ROOT / '.ci' / 'run').read_text().splitlines()[
    -1
  ] == 'exec bash launch/test.sh --tier=full'
  assert os.access(ROOT / '.ci' / 'run', os.X_OK)


def test_constraints_are_plain_versions_that_agree_with_the_project():
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())
  groups = project['dependency-groups']['test-without-torch']
  wanted = [Requirement(text) for text in [*project['project']['dependencies'], *groups]]
  for name in ('py311.txt', 'py312.txt'):
    lines = [
      line
      for line in (ROOT / 'constraints' / name).read_text().splitlines()
      if not line.startswith('#')
    ]
    pinned = {}
    for line in lines:
      package, separator, version = line.partition('==')
      assert separator and ' ' not in version and '+' not in version and '/' not in line, line
      pinned[canonicalize_name(package)] = version
    for requirement in wanted:
      assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, (
        name,
        str(requirement),
      )
