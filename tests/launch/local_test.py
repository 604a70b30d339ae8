"""The local supervisor, with real child processes: who is named, which code comes out, and that
nobody is left.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from paths import ROOT

SUPERVISOR = ROOT / 'launch' / 'cluster' / 'local.py'
PREAMBLE = """
import os, signal, sys, time
me, count = int(os.environ['JAX_PROCESS_ID']), int(os.environ['JAX_NUM_PROCESSES'])
open(f'pid.{me}', 'w').write(str(os.getpid()))
while any(not os.path.exists(f'pid.{i}') for i in range(count)): time.sleep(0.01)

def wait_for_end_of(other):
  # Until the supervisor has collected it.
  while os.path.exists('/proc/' + open(f'pid.{other}').read()): time.sleep(0.01)
"""
"""Every child writes its pid, and waits until all have."""


def start(directory, child: str, *flags: str, processes: int = 2) -> subprocess.Popen:
  command = [
    sys.executable,
    str(SUPERVISOR),
    f'--processes={processes}',
    *flags,
    '--',
    sys.executable,
    '-c',
  ]
  return subprocess.Popen(
    [*command, PREAMBLE + child],
    cwd=directory,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(job: subprocess.Popen) -> tuple[int, list[str], list[str]]:
  """Exit code, lines of output, lines of errors."""
  out, err = job.communicate(timeout=60)
  return job.returncode, out.splitlines(), err.splitlines()


def pids(directory, count: int = 2) -> list[int]:
  """Waits until the children have said who they are."""
  deadline = time.monotonic() + 30
  files = [directory / f'pid.{i}' for i in range(count)]
  while not all(file.exists() and file.read_text() for file in files):
    assert time.monotonic() < deadline, 'the children did not start'
    time.sleep(0.01)
  return [int(file.read_text()) for file in files]


def is_alive(pid: int) -> bool:
  """A zombie counts as dead: nobody may have collected it yet."""
  try:
    status = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except FileNotFoundError:
    return False
  return status.rsplit(')', 1)[1].split()[0] != 'Z'


def wait_until_dead(pid: int) -> None:
  deadline = time.monotonic() + 30
  while is_alive(pid):
    assert time.monotonic() < deadline, f'{pid} is still alive'
    time.sleep(0.01)


def test_all_well_is_zero_and_every_line_says_whose_it_is(tmp_path):
  child = 'print("out", me); print("half", end=""); print("err", me, file=sys.stderr)'
  code, out, err = finish(start(tmp_path, child, processes=3))
  assert code == 0
  assert sorted(out) == ['[0] half', '[0] out 0', '[1] half', '[1] out 1', '[2] half', '[2] out 2']
  assert sorted(err) == ['[0] err 0', '[1] err 1', '[2] err 2']


def test_children_share_one_free_address_and_know_their_number(tmp_path):
  child = 'print(os.environ["JAX_COORDINATOR_ADDRESS"], count, os.environ["NPROC"].isdecimal())'
  code, out, _ = finish(start(tmp_path, child))
  first, second = sorted(out)
  assert code == 0
  assert first.removeprefix('[0] ') == second.removeprefix('[1] ')
  address, count, pinned = first.removeprefix('[0] ').split()
  assert (address.rsplit(':')[0], count, pinned) == ('127.0.0.1', '2', 'True')
  assert 1024 <= int(address.rsplit(':')[1]) < 65536


def test_the_first_bad_exit_code_is_the_jobs_and_is_named(tmp_path):
  code, _, err = finish(start(tmp_path, 'time.sleep(60) if me == 0 else sys.exit(3)'))
  assert code == 3
  assert err == [
    'local: process 1 ended first, with exit code 3; stopping the other 1 within 10 s',
    'local: process 0 ended by signal SIGTERM',
    'local: culprit: process 1, ended with exit code 3',
  ]


@pytest.mark.parametrize('victim', [0, 1])
def test_a_killed_process_is_named_with_its_signal(tmp_path, victim):
  job = start(tmp_path, 'time.sleep(60)')
  os.kill(pids(tmp_path)[victim], signal.SIGKILL)
  code, _, err = finish(job)
  assert code == 137  # 128 + 9
  assert (
    err[0]
    == f'local: process {victim} ended first, by signal SIGKILL; stopping the other 1 within 10 s'
  )
  assert err[-1] == f'local: culprit: process {victim}, ended by signal SIGKILL'


@pytest.mark.parametrize('consequence', ['os.abort()', 'os._exit(75)'])
def test_a_consequence_is_not_the_culprit(tmp_path, consequence):
  # Process 1 ends first, as one that lost its peer; process 0, the cause, is seen to end just after
  # it.
  child = (
    f'{consequence} if me == 1 else (wait_for_end_of(1), os.kill(os.getpid(), signal.SIGKILL))'
  )
  code, _, err = finish(start(tmp_path, child))
  assert (code, err[-1]) == (137, 'local: culprit: process 0, ended by signal SIGKILL')


def test_a_consequence_without_a_cause_is_named_itself(tmp_path):
  code, _, err = finish(start(tmp_path, 'os._exit(75) if me == 1 else time.sleep(60)'))
  assert (code, err[-1]) == (75, 'local: culprit: process 1, ended with exit code 75')


def test_one_that_ignores_sigterm_is_killed_after_the_grace_time(tmp_path):
  child = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f'ready.{me}', 'w').close()
while not os.path.exists('ready.0'): time.sleep(0.01)
if me == 0: time.sleep(600)
sys.exit(5)
"""
  code, _, err = finish(start(tmp_path, child, '--grace_s=0.1'))
  assert code == 5
  assert err[1:] == [
    'local: killing processes 0, which SIGTERM did not end',
    'local: process 0 ended by signal SIGKILL',
    'local: culprit: process 1, ended with exit code 5',
  ]


def test_after_a_good_end_the_others_have_time_but_not_forever(tmp_path):
  code, out, _ = finish(
    start(tmp_path, 'me or (wait_for_end_of(1), time.sleep(0.1), print("late"))')
  )
  assert (code, out) == (0, ['[0] late'])
  other = tmp_path / 'other'
  other.mkdir()
  code, _, err = finish(start(other, 'me or time.sleep(600)', '--linger_s=0.1'))
  assert code == 137
  assert err[0] == 'local: processes 0 have not ended within 0.1 s; killing them'


@pytest.mark.parametrize(('number', 'wanted'), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_reach_every_process_which_end_by_themselves(tmp_path, number, wanted):
  child = f"""
def leave(number, frame):
  print('committed', me)
  sys.exit(128 + number)
signal.signal({int(number)}, leave)
open(f'ready.{{me}}', 'w').close()
time.sleep(60)
"""
  job = start(tmp_path, child)
  deadline = time.monotonic() + 30
  while not all((tmp_path / f'ready.{i}').exists() for i in range(2)):
    assert time.monotonic() < deadline
    time.sleep(0.01)
  job.send_signal(number)
  code, out, err = finish(job)
  assert code == wanted
  assert sorted(out) == ['[0] committed 0', '[1] committed 1']
  assert 'culprit' not in ' '.join(err)


def test_children_die_with_a_killed_supervisor(tmp_path):
  job = start(tmp_path, 'time.sleep(600)')
  children = pids(tmp_path)
  job.kill()
  for child in children:
    wait_until_dead(child)
  finish(job)


def test_what_a_process_left_running_is_killed_too(tmp_path):
  child = """
import subprocess
if me == 0:
  left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
  open('left.part', 'w').write(str(left.pid))
  os.rename('left.part', 'left')
"""
  code, _, _ = finish(start(tmp_path, child))
  assert code == 0
  wait_until_dead(int((tmp_path / 'left').read_text()))


@pytest.mark.parametrize(
  ('arguments', 'line'),
  [
    (
      ['--processes=2', '--'],
      'local: no command given; wanted local.py --processes=N -- COMMAND [ARGUMENT ...]',
    ),
    (
      ['--proceses=2', '--', 'true'],
      "local: Unknown command line flag 'proceses'. Did you mean: processes ?",
    ),
    (
      ['--processes=1', '--', './nowhere'],
      'local: ./nowhere: cannot be started: No such file or directory',
    ),
  ],
)
def test_a_bad_command_line_is_one_line(arguments, line):
  done = subprocess.run(
    [sys.executable, str(SUPERVISOR), *arguments], capture_output=True, text=True, timeout=60
  )
  assert (done.returncode, done.stdout, done.stderr) == (2, '', f'{line}\n')


PSUM = """
import jax, numpy as np
jax.config.update('jax_enable_recoverability', True)
jax.distributed.initialize(os.environ['JAX_COORDINATOR_ADDRESS'], count, me, \
heartbeat_timeout_seconds=20)
mesh = jax.sharding.Mesh(np.array(jax.devices()), ('data',))
rows = jax.make_array_from_process_local_data(
  jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data')), \
np.array([me + 1.0], np.float32))
total = jax.jit(lambda x: x.sum(), out_shardings=jax.sharding.NamedSharding(mesh, \
jax.sharding.PartitionSpec()))
"""


def one_device(monkeypatch) -> None:
  monkeypatch.setenv('XLA_FLAGS', '--xla_force_host_platform_device_count=1')
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')


@pytest.mark.full
def test_two_jax_processes_find_each_other(tmp_path, monkeypatch):
  one_device(monkeypatch)
  # With recoverability on, shutdown waits for nobody, and the coordinator's leaving aborts who is
  # still there.
  child = f"""{PSUM}
print(float(total(rows)), jax.process_count())
while me == 0 and not os.path.exists('left.1'): time.sleep(0.01)
jax.distributed.shutdown()
open(f'left.{{me}}', 'w').close()
"""
  code, out, err = finish(start(tmp_path, child))
  assert code == 0, err
  # 1 + 2 = 3, in both; Gloo itself prints too.
  assert sorted(line for line in out if 'Gloo' not in line) == ['[0] 3.0 2', '[1] 3.0 2']


@pytest.mark.full
@pytest.mark.parametrize('victim', [0, 1])
def test_either_of_two_jax_processes_may_be_killed(tmp_path, monkeypatch, victim):
  one_device(monkeypatch)
  child = f"""{PSUM}
for step in range(1_000_000):
  if me == {victim} and step == 20: os.kill(os.getpid(), signal.SIGKILL)
  total(rows).block_until_ready()
"""
  code, _, err = finish(start(tmp_path, child))
  assert (code, err[-1]) == (137, f'local: culprit: process {victim}, ended by signal SIGKILL'), err


def test_services_see_no_job_and_end_with_it(tmp_path):
  service = (
    f'{sys.executable} -c \'import os, time; print(os.environ.get("JAX_PROCESS_ID"), flush=True); '
    'open("served", "w").close(); time.sleep(600)\''
  )
  child = 'while not os.path.exists("served"): time.sleep(0.01)'
  code, out, err = finish(start(tmp_path, child, f'--service={service}'))
  assert (code, out, err) == (0, ['[s0] None'], [])


def test_a_service_that_ends_ends_the_job(tmp_path):
  service = f"{sys.executable} -c 'import sys; sys.exit(2)'"
  code, _, err = finish(start(tmp_path, 'time.sleep(60)', f'--service={service}', '--restarts=3'))
  assert code == 2
  assert err[0] == (
    'local: service 0 ended first, with exit code 2; stopping the other 2 within 10 s'
  )
  assert err[-1] == 'local: culprit: service 0, ended with exit code 2'


@pytest.mark.parametrize(
  ('end', 'starts', 'code'),
  [('os._exit(75)', 3, 75), ('os.kill(os.getpid(), 9)', 3, 137), ('sys.exit(2)', 1, 2)],
)
def test_what_may_pass_is_tried_again_as_often_as_asked(tmp_path, end, starts, code):
  child = f"""
with open(f'starts.{{me}}', 'a') as file: file.write(os.environ['JAX_COORDINATOR_ADDRESS'] + ' ')
if me == 1: {end}
time.sleep(60)
"""
  found, _, err = finish(start(tmp_path, child, '--restarts=2', '--grace_s=1'))
  assert found == code, err
  assert len((tmp_path / 'starts.1').read_text().split()) == starts


def test_a_job_that_does_better_the_second_time_is_well(tmp_path):
  child = """
first = not os.path.exists('once')
if me == 0 and first:
  open('once', 'w').close()
  os.abort()
if me == 1 and first: time.sleep(60)
"""
  code, _, err = finish(start(tmp_path, child, '--restarts=1', '--grace_s=1'))
  assert code == 0, err
  assert err[-1] == 'local: starting the job again (1 of 1)'
