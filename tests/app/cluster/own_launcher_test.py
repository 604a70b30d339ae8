"""A launcher of the user's own, named by 'module:attribute'."""

import json
import os
import subprocess
import sys

import cluster_jobs
import pytest
from paths import FIXTURES

from jaxrl_llm.app.cluster.job import ProcessGroup
from jaxrl_llm.app.commands.launch import main

NAME = 'own_launcher:LAUNCHER'
STAND_IN = """\
#!/bin/sh
cat >{folder}/stdin
echo "$@" >>{folder}/calls
echo '1 quickstart RUNNING'
"""


@pytest.fixture(autouse=True)
def importable(monkeypatch):
  monkeypatch.syspath_prepend(str(FIXTURES))
  yield
  sys.modules.pop('own_launcher', None)


@pytest.fixture
def launch(tmp_path, capsys):
  """Runs `jaxrl launch` with this launcher: (exit code, stdout, stderr)."""

  def launched(*flags: str) -> tuple[int, str, str]:
    code = main(['jaxrl launch', NAME, *flags])
    return code, *capsys.readouterr()

  return launched


def test_its_text_is_that_of_the_composed_job(launch, tmp_path):
  code, out, _ = launch(
    *('--config=quickstart', f'--workdir={tmp_path}/runs/a', '--nodes=2', '--bucket=b'),
    *('--accelerators=H100:8', '--config.seed=3'),
  )
  task = json.loads(out)
  assert code == 0 and task['num_nodes'] == 2 and task['resources']['accelerators'] == 'H100:8'
  assert '--config.seed=3' in task['run'] and task['volumes'] == {f'{tmp_path}/runs': 'b'}
  assert not (tmp_path / 'runs').exists()


def test_its_processes_find_their_job():
  import own_launcher

  show = 'echo "$JAX_COORDINATOR_ADDRESS $JAX_NUM_PROCESSES $JAX_PROCESS_ID"'
  job = cluster_jobs.job(trainer=ProcessGroup(name='trainer', command=('sh', '-c', show), nodes=2))
  task = json.loads(own_launcher.text(job, own_launcher.SkyOptions(bucket='b')))
  nodes = {'SKYPILOT_NODE_IPS': '10.0.0.1\n10.0.0.2', 'SKYPILOT_NUM_NODES': '2'}
  done = subprocess.run(
    ['sh', '-c', task['run']],
    env={**os.environ, **nodes, 'SKYPILOT_NODE_RANK': '1'},
    capture_output=True,
    text=True,
    timeout=30,
  )
  assert done.stdout == '10.0.0.1:8476 2 1\n'


def test_it_submits_and_answers_by_the_jobs_name(launch, tmp_path, monkeypatch):
  program = tmp_path / 'sky'
  program.write_text(STAND_IN.format(folder=tmp_path))
  program.chmod(0o755)
  monkeypatch.setenv('PATH', str(tmp_path), prepend=os.pathsep)
  workdir = f'--workdir={tmp_path}/a'
  code, out, _ = launch('--config=quickstart', workdir, '--bucket=b', '--submit')
  assert (code, out) == (0, 'quickstart\n')
  assert json.loads((tmp_path / 'stdin').read_text())['name'] == 'quickstart'
  assert launch('--status=quickstart')[1] == '1 quickstart RUNNING\n'
  assert launch('--cancel=quickstart')[0] == 0
  assert (tmp_path / 'calls').read_text().splitlines() == [
    'jobs launch --yes --detach-run --name=quickstart /dev/stdin',
    'jobs queue',
    'jobs cancel --yes --name=quickstart',
  ]


@pytest.mark.parametrize(
  'flags, words',
  [
    (['--config=quickstart'], '--bucket: missing'),
    (['--config=quickstart', '--processes_per_node=2', '--bucket=b'], 'one trainer process'),
    (['--config=quickstart', '--bukcet=b'], 'bukcet'),
    (['--status=other'], 'no such job'),
  ],
)
def test_bad_input_is_one_line_with_exit_code_2(launch, tmp_path, monkeypatch, flags, words):
  program = tmp_path / 'sky'
  program.write_text('#!/bin/sh\n')
  program.chmod(0o755)
  monkeypatch.setenv('PATH', str(tmp_path), prepend=os.pathsep)
  code, _, err = launch(*flags)
  assert code == 2 and words in err and err.count('\n') == 1


def test_without_its_program_there_is_one_line(launch, tmp_path, monkeypatch):
  monkeypatch.setenv('PATH', str(tmp_path))
  code, _, err = launch('--status=quickstart')
  assert code == 2 and 'sky: no such program in PATH' in err and err.count('\n') == 1


def test_a_name_that_is_no_launcher_says_what_is_wanted(capsys):
  for name, words in (
    ('own_launcher:SkyOptions', 'wanted a Launcher'),
    ('own_launcher:NOTHING', "has no 'NOTHING'"),
    ('own_launchr:LAUNCHER', 'PYTHONPATH'),
    ('jobsett', "'jobset'"),
  ):
    assert main(['jaxrl launch', name, '--config=quickstart']) == 2
    err = capsys.readouterr().err
    assert words in err and err.count('\n') == 1
