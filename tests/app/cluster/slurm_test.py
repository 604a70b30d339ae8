"""Slurm scripts: the text, and what it does with stand-ins for Slurm's commands. The real Slurm is
in tests/jobs/slurm_test.py.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest

from jaxrl_llm.app.cluster import slurm
from jaxrl_llm.app.cluster.job import Job, ProcessGroup, ProcessResources
from jaxrl_llm.core.errors import UserError

GOLDEN = pathlib.Path(__file__).parent / 'golden'
LARGE = Job(
  name='qwen',
  workdir='/shared/runs/qwen 7b',
  directory='/shared/code',
  env={'JAXRL_GRACE_S': '30'},
  time_limit_s=3600 * 24,
  groups=(
    ProcessGroup(
      name='trainer',
      command=('python', '-m', 'jaxrl_llm.app.commands.cli', 'train', '--config=grpo'),
      nodes=2,
      processes_per_node=2,
      resources=ProcessResources(cpus=16, memory_gib=200, gpus=4),
    ),
    ProcessGroup(
      name='rollout',
      command=('python', '-m', 'jaxrl_llm.app.commands.cli', 'serve', '--role=vllm'),
      nodes=2,
      resources=ProcessResources(cpus=8, gpus=8),
      env={'VLLM_CACHE_ROOT': '/local/vllm'},
    ),
    ProcessGroup(name='scorer', command=('python', '-m', 'jaxrl_llm.app.commands.cli', 'serve')),
  ),
)
SMALL = slurm.SlurmOptions(partition='gpu', account='lab', sbatch=('--mail-type=END',))


def test_the_script_of_a_large_job():
  """To accept a change: python -m pytest … and copy what it printed."""
  assert slurm.text(LARGE, SMALL) == (GOLDEN / 'slurm.sh').read_text()


def test_an_array_is_the_same_script_with_a_number():
  lines = slurm.array_text(LARGE, 6, SMALL, at_once=2).splitlines()
  assert '#SBATCH --array=0-5%2' in lines
  assert '#SBATCH --output="/shared/runs/qwen 7b/launch/slurm-%A_%a.out"' in lines
  with pytest.raises(UserError, match='array of 0 jobs'):
    slurm.array_text(LARGE, 0, SMALL)


@pytest.mark.parametrize(
  'value', ['a b', 'a\nb', '$(id)"', "'", '#x', 'a\\'], ids=lambda value: repr(value)
)
def test_options_that_sbatch_would_read_otherwise_are_refused(value):
  with pytest.raises(UserError, match='wanted a value without spaces'):
    slurm.SlurmOptions(partition=value)
  with pytest.raises(UserError, match='wanted --option or --option=value'):
    slurm.SlurmOptions(sbatch=(f'--comment={value}',))


def test_what_slurm_cannot_do_is_refused():
  tpu = dataclasses.replace(LARGE.trainer, resources=ProcessResources(tpu='v5e'))
  with pytest.raises(UserError, match='Slurm has no TPUs'):
    slurm.text(dataclasses.replace(LARGE, groups=(tpu,)), SMALL)
  with pytest.raises(UserError, match='sbatch does not accept'):
    slurm.text(dataclasses.replace(LARGE, workdir='/a"b'), SMALL)


@pytest.mark.parametrize('call', [slurm.status, slurm.cancel, slurm.logs])
def test_an_id_that_is_none_and_a_machine_without_slurm_are_one_line(call, monkeypatch, tmp_path):
  with pytest.raises(UserError, match='not the id of a Slurm job'):
    call('1; rm -rf /', SMALL)
  monkeypatch.setenv('PATH', str(tmp_path))
  with pytest.raises(UserError, match='no such command; wanted a host'):
    call('1', SMALL)


def test_submitting_without_slurm_writes_nothing(monkeypatch, tmp_path):
  monkeypatch.setenv('PATH', str(tmp_path))
  job = dataclasses.replace(LARGE, workdir=str(tmp_path / 'run'))
  with pytest.raises(UserError, match='sbatch: no such command'):
    slurm.submit(slurm.text(job, SMALL), job, SMALL)
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  'waiting', ['echo PartitionNodeLimit', 'echo Resources', 'echo slurmctld is busy >&2; exit 1']
)
def test_a_job_that_slurm_would_never_start_is_cancelled(waiting, monkeypatch, tmp_path):
  cancelled = tmp_path / 'cancelled'
  commands = {'sbatch': 'echo 7', 'squeue': waiting, 'scancel': f'echo "$1" >{cancelled}'}
  for name, command in commands.items():
    (tmp_path / name).write_text(f'#!/bin/sh\n{command}\n')
    (tmp_path / name).chmod(0o755)
  monkeypatch.setenv('PATH', str(tmp_path))
  job = dataclasses.replace(LARGE, workdir=str(tmp_path / 'run'))
  if 'PartitionNodeLimit' not in waiting:  # It waits for its turn, or has begun for all we know.
    assert slurm.submit('', job, SMALL) == '7' and not cancelled.exists()
    return
  with pytest.raises(UserError, match=r'never start the job \(PartitionNodeLimit\), .* 5 nodes'):
    slurm.submit('', job, SMALL)
  assert cancelled.read_text() == '7\n'


@pytest.mark.parametrize('states', ['7 COMPLETED None 1:00 n1', '7 CANCELLED by 0'])
def test_cancelling_a_job_that_has_ended_says_so(states, monkeypatch, tmp_path):
  (tmp_path / 'squeue').write_text(f'#!/bin/sh\necho {states}\n')
  (tmp_path / 'squeue').chmod(0o755)
  monkeypatch.setenv('PATH', str(tmp_path))
  with pytest.raises(UserError, match='7: the job has ended: 7 C'):
    slurm.cancel('7', SMALL)


STAND_INS = {
  # Runs the tasks, and ends the others when one fails, as --kill-on-bad-exit does.
  'srun': """
import os, signal, subprocess, sys, time
words = sys.argv[1:]
options = dict(word.lstrip('-').partition('=')[::2] for word in words[:words.index('bash')])
command = words[words.index('bash'):]
with open(f'step.{options["job-name"]}', 'w') as file:
  tasks = [subprocess.Popen(command, env={**os.environ, 'SLURM_PROCID': str(i),
    'SLURM_CPUS_ON_NODE': '4'}) for i in range(int(options['ntasks']))]
  file.write(' '.join(str(task.pid) for task in tasks))
code = 0
while tasks:
  for task in tasks[:]:
    if task.poll() is None: continue
    tasks.remove(task)
    code = max(code, task.returncode if task.returncode >= 0 else 128 - task.returncode)
    if task.returncode and options['kill-on-bad-exit'] == '1':
      for other in tasks: subprocess.run(['pkill', '-KILL', '-P', str(other.pid)]); other.kill()
  time.sleep(0.02)
sys.exit(code)
""",
  'squeue': """
import os, sys
if '--steps' in sys.argv:
  for name in os.listdir('.'):
    if name.startswith('step.'): print(name[5:], name[5:])
else:
  print(open('state').read())
""",
  'scancel': """
import subprocess, sys
for pid in open(f'step.{sys.argv[-1]}').read().split():
  subprocess.run(['pkill', '-TERM', '-P', pid])
""",
  'scontrol': """
import sys
open('requeued', 'a').write(' '.join(sys.argv[1:]) + '\\n')
sys.exit(1)  # Otherwise the script would wait for its end.
""",
}


@pytest.fixture
def run(tmp_path, monkeypatch):
  """Runs a job's script with stand-ins; returns (exit code, output, what was requeued)."""
  for name, body in STAND_INS.items():
    path = tmp_path / 'bin' / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!{sys.executable} -S\n{body}')
    path.chmod(0o755)

  def run_script(job: Job, *, restart: int = 0, state: str = 'RUNNING'):
    (tmp_path / 'state').write_text(state)
    job = dataclasses.replace(job, directory=str(tmp_path), workdir=str(tmp_path / "the run's"))
    variables = {
      'PATH': f'{tmp_path / "bin"}:{os.environ["PATH"]}',
      'SLURM_JOB_ID': '7',
      'SLURM_JOB_NODELIST': 'n[0-1]',
      'SLURM_RESTART_COUNT': str(restart),
      'JAX_COORDINATOR_ADDRESS': 'of-the-shell:1',
    }
    done = subprocess.run(
      ['bash', '-s'],
      input=slurm.text(job, slurm.SlurmOptions()),
      env={**{k: v for k, v in os.environ.items() if k != 'NPROC'}, **variables},
      capture_output=True,
      text=True,
      timeout=60,
      check=False,
    )
    requeued = tmp_path / 'requeued'
    return done.returncode, done.stdout + done.stderr, requeued.exists() and requeued.read_text()

  return run_script


def job_of(trainer: str, *arguments: str, service: str | None = None, **fields) -> Job:
  """A job of two trainer processes and perhaps a service, each a line of Python."""
  preamble = 'import os, signal, sys, time; me = os.environ["SLURM_PROCID"]; '
  groups = [
    ProcessGroup(
      name='trainer',
      command=(sys.executable, '-c', preamble + trainer, *arguments),
      nodes=2,
      env={'HOSTILE': HOSTILE[0]},
    )
  ]
  if service:
    groups.append(ProcessGroup(name='rollout', command=(sys.executable, '-c', preamble + service)))
  return Job(name='job', workdir='/', groups=tuple(groups), grace_s=5, restarts=2, **fields)


HOSTILE = [
  '$(touch pwned) `id` "',
  "it's",
  'a\nb',
  '',
  '--x=*',
  '\\',
  '$task',
  '${task}',
  '%j',
  '&',
]


@pytest.mark.full
def test_arguments_and_variables_arrive_as_they_are(run, tmp_path):
  say = (
    'import json; me == "0" and print("GOT", json.dumps([sys.argv[1:], os.environ["HOSTILE"], '
    'os.environ["OF_JOB"], os.environ["NPROC"], "JAX_COORDINATOR_ADDRESS" in os.environ]))'
  )
  code, said, requeued = run(job_of(say, *HOSTILE, env={'OF_JOB': HOSTILE[0]}))
  (line,) = [line for line in said.splitlines() if line.startswith('GOT')]
  assert (code, requeued) == (0, False), said
  assert json.loads(line[4:]) == [HOSTILE, HOSTILE[0], HOSTILE[0], '4', False]
  assert not (tmp_path / 'pwned').exists()


ALL = (
  'open(f"here{{me}}", "w"); '
  'exec("while not os.path.exists(f\'here{{1 - int(me)}}\'): time.sleep(0.01)"); os._exit({code})'
)
"""Both end by themselves: a task that has not begun would be killed for the other's end."""
LONG = 'signal.signal(signal.SIGTERM, lambda *_: sys.exit({code})); time.sleep(60)'


@pytest.mark.full
@pytest.mark.parametrize(
  ('trainer', 'service', 'state', 'restart', 'code', 'again'),
  [
    ('me == "1" and sys.exit(2); time.sleep(60)', None, 'RUNNING', 0, 2, False),
    ('me == "1" and sys.exit(1); time.sleep(60)', None, 'RUNNING', 0, 1, False),
    # One is killed, the other leaves because of it.
    (
      'me == "1" and os.kill(os.getpid(), 9); time.sleep(60)',
      None,
      *('RUNNING', 0, 137, True),
    ),
    (ALL.format(code=75), None, 'RUNNING', 2, 75, False),  # Started again too often.
    (ALL.format(code=143), None, 'RUNNING', 0, 143, True),  # Preempted, and committed in time.
    (ALL.format(code=143), None, 'COMPLETING', 0, 143, False),  # Cancelled.
    (LONG.format(code=143), 'sys.exit(1)', 'RUNNING', 0, 75, True),
    (LONG.format(code=143), 'sys.exit(2)', 'RUNNING', 0, 2, False),
    # Services end with the trainer.
    ('time.sleep(1.5)', LONG.format(code=0), 'RUNNING', 0, 0, False),
  ],
)
def test_exit_codes_and_restarts(run, trainer, service, state, restart, code, again):
  found, said, requeued = run(job_of(trainer, service=service), restart=restart, state=state)
  assert found == code, said
  assert requeued == ('requeue 7\n' if again else False), said


@pytest.mark.full
def test_a_job_that_slurm_started_too_often_does_nothing(run, tmp_path):
  code, said, _ = run(job_of('open("ran", "w")'), restart=3)
  assert code == 1 and 'started again too often' in said
  assert not (tmp_path / 'ran').exists()
