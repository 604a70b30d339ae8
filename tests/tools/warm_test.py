"""A script that starts as a fork behaves like a script that an interpreter was started for."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import job
import psutil
import pytest
import warm

SCRIPT = """
import os, sys, time
if __name__ == '__main__':
  if sys.argv[1] == 'facts':
    print(__name__, *sys.argv[1:], os.getcwd(), os.environ.get('LEFT'), \
os.getsid(0) == os.getpid(), __file__, sep='|')
    print(os.path.dirname(__file__) in sys.path, 'jax' in sys.modules)
    print('to stderr', file=sys.stderr)
    sys.exit(7)
  if sys.argv[1] == 'raise':
    raise ValueError('of the script')
  if sys.argv[1] == 'wait':
    open('begun', 'w').close()
    time.sleep(600)
  if sys.argv[1] == 'much':
    sys.stdout.write('x' * 3_000_000)
    sys.stderr.write('y' * 3_000_000)
"""


@pytest.fixture
def start(tmp_path):
  (tmp_path / 'script.py').write_text(SCRIPT)
  return lambda *arguments, **extra: warm.start(
    [str(tmp_path / 'script.py'), *arguments], cwd=tmp_path, env=job.environment(**extra)
  )


def wait_for(path: pathlib.Path, process) -> None:
  deadline = time.monotonic() + 120
  while not path.exists():
    assert process.poll() is None and time.monotonic() < deadline
    time.sleep(0.01)


def test_it_has_its_arguments_directory_environment_session_and_exit_code(start, tmp_path):
  out, err = (process := start('facts', 'a b', LEFT='set later')).communicate(timeout=120)
  script = tmp_path / 'script.py'
  assert (process.returncode, err) == (7, 'to stderr\n')
  assert out == f'__main__|facts|a b|{tmp_path}|set later|True|{script}\nTrue True\n'


def test_an_exception_ends_it_as_it_ends_an_interpreter(start):
  _, err = (process := start('raise')).communicate(timeout=120)
  assert process.returncode == 1 and err.endswith('ValueError: of the script\n')


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGTERM])
def test_signals_end_it_and_its_exit_code_says_so(start, tmp_path, number):
  process = start('wait')
  wait_for(tmp_path / 'begun', process)
  with pytest.raises(subprocess.TimeoutExpired):
    process.wait(0.01)
  with pytest.raises(subprocess.TimeoutExpired):
    process.communicate(timeout=0.01)
  os.killpg(process.pid, number)
  process.communicate(timeout=120)
  assert process.returncode == process.poll() == process.wait() == -number


def test_its_group_can_be_killed_at_once_and_also_after_its_end(start):
  process = start('wait')
  assert os.getpgid(process.pid) == process.pid
  for _ in range(2):
    job.kill(process)
    assert process.returncode == -signal.SIGKILL


def test_what_it_writes_is_read_whatever_its_size(start):
  out, err = start('much').communicate(timeout=120)
  assert (out, err) == ('x' * 3_000_000, 'y' * 3_000_000)


def test_an_environment_that_counts_at_import_is_refused(start):
  with pytest.raises(ValueError, match='JAX_PLATFORMS'):
    start('facts', JAX_PLATFORMS='cuda')


SUPERVISED = """
import atexit, os, pathlib, sys, threading, time
rank = os.environ['JAX_PROCESS_ID']
print(rank, *sys.argv[1:], os.getcwd(), os.getsid(0) == os.getpid())
print('to stderr', file=sys.stderr)
if sys.argv[1] == 'wait':
  pathlib.Path(sys.argv[2], rank).touch()
  time.sleep(600)
atexit.register(print, 'at exit', rank)
threading.Timer(0.2, print, ['thread', rank, 'jax' in sys.modules]).start()
if sys.argv[1] == 'raise':
  raise ValueError('of the script')
sys.exit('in words' if rank == '1' else 0)
"""


def supervised(tmp_path, *arguments):
  script = tmp_path / 'supervised.py'
  script.write_text(SUPERVISED)
  command = ['launch/cluster/local.py', '--processes=2', '--', sys.executable, str(script)]
  return warm.start([*command, *arguments], cwd=job.ROOT, env=job.environment())


@pytest.mark.full
def test_scripts_of_a_supervisor_are_forks_that_begin_and_end_like_interpreters(tmp_path):
  out, err = (process := supervised(tmp_path, 'end', 'a b')).communicate(timeout=120)
  facts = f'end a b {job.ROOT} True'
  assert {f'[{n}] {line}' for n in (0, 1) for line in (f'{n} {facts}', f'at exit {n}')} <= {
    *out.splitlines()
  }
  assert '[0] thread 0 True' in out and '[1] thread 1 True' in out
  assert {'[0] to stderr', '[1] to stderr', '[1] in words'} <= {*err.splitlines()}
  assert process.returncode == 1 and 'local: process 1 ended first, with exit code 1' in err
  _, err = (process := supervised(tmp_path, 'raise')).communicate(timeout=120)
  assert process.returncode == 1 and 'ValueError: of the script' in err


@pytest.mark.full
def test_scripts_of_a_supervisor_that_is_killed_die_with_it(tmp_path):
  process = supervised(tmp_path, 'wait', str(tmp_path))
  for number in '01':
    wait_for(tmp_path / number, process)
  scripts = psutil.Process(process.pid).children()
  os.kill(process.pid, signal.SIGKILL)
  assert process.wait(120) == -signal.SIGKILL
  assert len(scripts) == 2 and psutil.wait_procs(scripts, timeout=120)[1] == []
