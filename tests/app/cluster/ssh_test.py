"""Jobs as a shell script: its text, and what it does over a real sshd on loopback."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import cluster_jobs
import pytest
import sshd

from jaxrl_llm.app.cluster import ssh
from jaxrl_llm.app.cluster.job import ProcessGroup, ProcessResources
from jaxrl_llm.core.errors import UserError

OPTIONS = ssh.SshOptions(hosts=sshd.HOSTS)


def two(*command: str, **fields) -> ProcessGroup:
  return ProcessGroup(name='trainer', command=command, nodes=2, **fields)


def test_the_script_is_the_same_each_time_and_a_shell_can_read_it(tmp_path):
  trainer = two('run', *cluster_jobs.HOSTILE, env={'A': "it's $x"})
  job = cluster_jobs.job(trainer=trainer, directory="/a dir/it's", workdir='/data/a b')
  text = ssh.text(job, OPTIONS)
  assert text == ssh.text(job, OPTIONS)
  (tmp_path / 'job.sh').write_text(text)
  subprocess.run(['sh', '-n', str(tmp_path / 'job.sh')], check=True, timeout=30)


def test_no_command_line_shows_a_file_an_argument_or_a_variable():
  job = cluster_jobs.job(
    trainer=two('run', 'arg5Vj2k', env={'TOKEN': 'env5Vj2k'}),
    files={'/data/key': 'file5Vj2k'},
  )
  for line in ssh.text(job, OPTIONS).splitlines():
    assert not (line.startswith('remote') and '5Vj2k' in line)


def environment(job, options=OPTIONS) -> list[dict[str, str]]:
  """What the script of each process exports."""
  found = []
  for process in ssh._processes(job, options):
    found.append(dict(process.env))
  return found


def test_trainers_get_their_job_and_services_do_not():
  service = ProcessGroup(name='rollout', command=('serve',))
  job = cluster_jobs.job(trainer=two('run'), services=[service])
  options = ssh.SshOptions(hosts=('me@a,b', 'b'), port=9000)
  first, second, rollout = environment(job, options)
  assert first['JAX_COORDINATOR_ADDRESS'] == second['JAX_COORDINATOR_ADDRESS'] == 'a:9000'
  assert first['JAX_NUM_PROCESSES'] == '2'
  assert (first['JAX_PROCESS_ID'], second['JAX_PROCESS_ID']) == ('0', '1')
  assert not [name for name in rollout if name.startswith('JAX_')]


def test_processes_of_a_host_share_its_gpus():
  trainer = two('run', processes_per_node=2, resources=ProcessResources(cpus=8, gpus=2))
  service = ProcessGroup(name='rollout', command=('serve',), resources=ProcessResources(gpus=4))
  job = cluster_jobs.job(trainer=trainer, services=[service])
  found = environment(job, ssh.SshOptions(hosts=('a', 'b', 'a')))
  assert [env['CUDA_VISIBLE_DEVICES'] for env in found] == ['0,1', '2,3', '0,1', '2,3', '4,5,6,7']
  assert {env.get('NPROC') for env in found[:4]} == {'8'}


@pytest.mark.parametrize('hosts', [(), ('a',), ('a', 'b', 'c')])
def test_each_node_wants_a_host(hosts):
  with pytest.raises(UserError, match=rf'--hosts: {len(hosts)} hosts for a job of 2 nodes'):
    ssh.text(cluster_jobs.job(trainer=two('run')), ssh.SshOptions(hosts=hosts))


@pytest.mark.parametrize(
  'options',
  [
    {'hosts': ('-oProxyCommand=x',)},
    {'hosts': ('a b',)},
    {'hosts': ('a;reboot',)},
    {'hosts': ('$(reboot)',)},
    {'hosts': ('a\n',)},
    {'hosts': ('',)},
    {'hosts': ('a,,b',)},
    {'hosts': ('@a',)},
    {'hosts': ('-a@b',)},
    {'coordinator': 'a:1'},
    {'port': 22},
    {'port': 70000},
    {'ssh_config': 'a\nb'},
  ],
)
def test_an_option_that_is_no_host_name_or_port_is_named(options):
  with pytest.raises(UserError, match=f'--{next(iter(options))}'):
    ssh.SshOptions(**options)


def test_tpus_are_for_another_launcher():
  job = cluster_jobs.tpu_job(nodes=1)
  with pytest.raises(UserError, match='launcher jobset'):
    ssh.text(job, ssh.SshOptions(hosts=('a', 'b', 'c')))


def test_without_ssh_nothing_is_written(monkeypatch, tmp_path):
  monkeypatch.setenv('PATH', str(tmp_path))
  job = cluster_jobs.job(trainer=two('run'), workdir=str(tmp_path / 'run'))
  with pytest.raises(UserError, match='ssh: no such program in PATH'):
    ssh.submit(ssh.text(job, OPTIONS), job, OPTIONS)
  assert not (tmp_path / 'run').exists()


STATE = {'job': 'a', 'state': 'running', 'code': None, 'restarts': 1, 'at': 1_000_000}
STATE |= {'host': ssh._this_host(), 'fifo': '/tmp/jaxrl.gone/news'}


def with_state(folder: pathlib.Path, content: str) -> str:
  (folder / 'launch').mkdir()
  (folder / 'launch' / 'state.json').write_text(content)
  return str(folder)


@pytest.mark.parametrize(
  'changes, wanted',
  [
    ({}, 'a: LOST: its launcher was killed; it was running on'),
    ({'state': 'ended', 'code': 143}, 'a: ENDED with exit code 143 on'),
    ({'host': 'elsewhere'}, 'a: RUNNING on elsewhere since'),
  ],
)
def test_status_is_one_printable_line(tmp_path, changes, wanted):
  found = ssh.status(with_state(tmp_path, json.dumps(STATE | changes)), OPTIONS)
  assert found.startswith(wanted) and found.isprintable() and found.count('; ') >= 1


@pytest.mark.parametrize(
  'content',
  [
    '',
    '[]',
    '{}',
    'null',
    json.dumps(STATE | {'at': 'x'}),
    json.dumps(STATE | {'code': 'x'}),
    json.dumps(STATE | {'at': -1}),
    json.dumps(STATE | {'at': 1 << 50}),
    json.dumps(STATE | {'job': 'x\x1b[2J'}),
    json.dumps(STATE | {'job': None}),
    json.dumps(STATE | {'host': ''}),
    json.dumps(STATE | {'fifo': '/etc/passwd'}),
    '[' * 100_000,
    '{"job": "' + 'x' * 100_000,
  ],
)
@pytest.mark.parametrize('call', [ssh.status, ssh.cancel, ssh.logs])
def test_a_damaged_state_is_one_line(tmp_path, call, content):
  with pytest.raises(UserError, match=r'state\.json: .*wanted what the ssh launcher writes'):
    call(with_state(tmp_path, content), OPTIONS)


@pytest.mark.parametrize('call', [ssh.status, ssh.cancel, ssh.logs])
@pytest.mark.parametrize('name', ['', 'nowhere', '/dev/null'])
def test_a_directory_without_a_job_is_one_line(tmp_path, monkeypatch, call, name):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(UserError, match='wanted the run directory of a job that ssh has started'):
    call(name, OPTIONS)


@pytest.mark.parametrize(
  'changes, words',
  [
    ({}, 'the launcher was killed'),
    ({'state': 'ended', 'code': 0}, 'has ended with exit code 0'),
    ({'host': 'elsewhere'}, 'runs on elsewhere; cancel it there'),
  ],
)
def test_a_job_that_cannot_be_cancelled_says_why(tmp_path, changes, words):
  with pytest.raises(UserError, match=words):
    ssh.cancel(with_state(tmp_path, json.dumps(STATE | changes)), OPTIONS)


# What follows runs real processes.


@pytest.fixture(scope='module')
def client(tmp_path_factory):
  """A configuration with which ssh reaches `sshd.HOSTS`."""
  with sshd.serving(tmp_path_factory.mktemp('sshd') / 'keys') as config:
    yield config


PYTHON = (sys.executable, '-S', '-E', '-c')
"""Starts in a few milliseconds."""
WAIT = "import os, time\nopen(f'pid.{os.getpid()}', 'w').close()\ntime.sleep(300)\n"
"""A child that says which process it is, and stays."""


@pytest.fixture
def make(tmp_path, client):
  """Makes a job of two trainers that run Python code in `tmp_path`, and its options."""

  def made(code: str, *arguments: str, **fields):
    trainer = two(*PYTHON, code, *arguments)
    fields = {'restarts': 0, 'grace_s': 5, **fields}
    job = cluster_jobs.job(
      trainer=trainer, workdir=str(tmp_path / "a 'run'"), directory=str(tmp_path), **fields
    )
    hosts = (*sshd.HOSTS, *(sshd.HOSTS[0] for _ in job.services))
    return job, ssh.SshOptions(hosts=hosts, ssh_config=str(client))

  return made


def start(job, options, folder: pathlib.Path) -> subprocess.Popen:
  """The launcher in the foreground, which does not wait before a restart."""
  script = folder / 'job.sh'
  script.write_text(ssh.text(job, options).replace('pause=5', 'pause=0'))
  # A shell cannot handle a signal that was ignored when it started, as SIGINT is in the background.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    return subprocess.Popen(
      ['sh', str(script)], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
  finally:
    signal.signal(signal.SIGINT, before)


def pids(folder: pathlib.Path, count: int) -> list[int]:
  """Waits until so many children have said who they are."""
  deadline = time.monotonic() + 60
  while len(found := list(folder.glob('pid.*'))) < count:
    assert time.monotonic() < deadline, f'{len(found)} children of {count}'
    time.sleep(0.02)
  return [int(path.suffix[1:]) for path in found]


def ended(job, options) -> str:
  """The status of a submitted job once it has ended."""
  deadline = time.monotonic() + 60
  while 'ENDED' not in (line := ssh.status(job.workdir, options)):
    assert time.monotonic() < deadline, line
    time.sleep(0.02)
  return line


def assert_gone(processes: list[int]) -> None:
  deadline = time.monotonic() + 60
  for process in processes:
    while pathlib.Path(f'/proc/{process}').exists():
      assert time.monotonic() < deadline, f'process {process} is still there'
      time.sleep(0.02)


@pytest.mark.full
def test_a_submitted_job_runs_on_all_hosts_and_ends_with_its_trainers(make, tmp_path, capfd):
  code = (
    'import json, os, sys\n'
    'print(json.dumps([sys.argv[1:], os.environ["JAX_PROCESS_ID"], os.environ["A"], '
    'os.getsid(0) == os.getpid(), os.getcwd()]))\n'
  )
  service = ProcessGroup(name='rollout', command=(*PYTHON, WAIT))
  job, options = make(code, *cluster_jobs.HOSTILE, services=[service], env={'A': "it's $x"})
  assert ssh.submit(ssh.text(job, options), job, options) == job.workdir
  assert 'ENDED with exit code 0' in ended(job, options)
  run = pathlib.Path(job.workdir)
  for i in range(2):
    wanted = [list(cluster_jobs.HOSTILE), str(i), "it's $x", True, str(tmp_path)]
    assert json.loads((run / 'logs' / f'trainer-{i}.log').read_text()) == wanted
  for path in (
    run / 'registry' / 'key',
    run / 'launch' / 'trainer-0.sh',
    run / 'launch' / 'job.sh',
  ):
    assert path.stat().st_mode & 0o777 == 0o600, path
  assert (run / 'registry' / 'key').read_text() == 'secret'
  assert_gone(pids(tmp_path, 0))
  ssh.logs(job.workdir, options)
  assert '==> trainer-1.log <==\n[["it\'s"' in capfd.readouterr().out


@pytest.mark.full
def test_a_killed_process_ends_the_others_and_the_job_starts_again(make, tmp_path):
  code = f'import os, signal, time\nif os.path.exists("again"): raise SystemExit(0)\n{WAIT}'
  job, options = make(code, restarts=1)
  launcher = start(job, options, tmp_path)
  children = pids(tmp_path, 2)
  (tmp_path / 'again').touch()
  os.kill(children[0], signal.SIGKILL)
  _, err = launcher.communicate(timeout=60)
  assert launcher.returncode == 0, err
  assert 'ended with 137; stopping the other 1' in err and 'restart 1 of 1' in err
  assert_gone(children)


@pytest.mark.full
def test_unusable_input_is_not_tried_again(make, tmp_path):
  code = f'import os\nif os.environ["JAX_PROCESS_ID"] == "1": raise SystemExit(2)\n{WAIT}'
  job, options = make(code, restarts=3)
  launcher = start(job, options, tmp_path)
  _, err = launcher.communicate(timeout=60)
  assert launcher.returncode == 2 and 'culprit: trainer-1 on localhost, ended with 2' in err
  assert_gone(pids(tmp_path, 0))


@pytest.mark.full
def test_nothing_is_left_after_the_launcher_was_killed(make, tmp_path):
  job, options = make(WAIT)
  launcher = start(job, options, tmp_path)
  children = pids(tmp_path, 2)
  launcher.kill()
  launcher.communicate(timeout=60)
  assert_gone(children)
  assert 'LOST: its launcher was killed' in ssh.status(job.workdir, options)


COMMIT = f"""
import os, signal, sys
def commit(number, frame):
  open(f'commit.{{os.getpid()}}', 'w').close()
  sys.exit(128 + number)
signal.signal(signal.SIGTERM, commit)
signal.signal(signal.SIGINT, commit)
{WAIT}
"""
"""A child that ends on request, when it has committed."""


@pytest.mark.full
def test_ctrl_c_reaches_every_process_and_the_code_is_theirs(make, tmp_path):
  job, options = make(COMMIT, restarts=3)
  launcher = start(job, options, tmp_path)
  children = pids(tmp_path, 2)
  launcher.send_signal(signal.SIGINT)
  _, err = launcher.communicate(timeout=60)
  assert launcher.returncode == 130, err
  assert len(list(tmp_path.glob('commit.*'))) == 2
  assert_gone(children)


@pytest.mark.full
def test_a_submitted_job_has_its_run_directory_alone_until_it_is_cancelled(make, tmp_path):
  job, options = make(COMMIT, restarts=3)
  ssh.submit(ssh.text(job, options), job, options)
  children = pids(tmp_path, 2)
  with pytest.raises(UserError, match='a job is running there; --cancel it'):
    ssh.submit(ssh.text(job, options), job, options)
  ssh.cancel(job.workdir, options)
  assert 'ENDED with exit code 143' in ended(job, options)
  assert len(list(tmp_path.glob('commit.*'))) == 2
  assert_gone(children)


@pytest.mark.full
def test_a_host_that_refuses_is_one_line_and_nothing_starts(make, tmp_path, client):
  job, options = make(WAIT)
  (tmp_path / 'ssh_config').write_text(client.read_text().replace('user_key', 'host_key'))
  options = dataclasses.replace(options, ssh_config=str(tmp_path / 'ssh_config'))
  with pytest.raises(UserError, match=r'^host (127\.0\.0\.1|localhost): .*Permission denied') as e:
    ssh.submit(ssh.text(job, options), job, options)
  assert '\n' not in str(e.value)
  assert not list(tmp_path.glob('pid.*'))
