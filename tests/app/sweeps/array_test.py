"""A sweep as one job array: the script runs `jaxrl sweep --trial=N` in each task."""

import json
import os
import subprocess
import sys

import pytest
from paths import ROOT
from sweeping import RATE, executed, open_sweep, sweep_file

from jaxrl_llm.app.cluster.job import ProcessResources
from jaxrl_llm.app.commands import sweep
from jaxrl_llm.app.sweeps.array import JobArray, array_text, task_arguments
from jaxrl_llm.core.errors import UserError


@pytest.fixture
def array(tmp_path):
  pytest.importorskip('jaxrl_llm.app.cluster.slurm')

  def make(**settings):
    settings = {'time_limit_s': None, 'at_once': None, 'options': '{}', **settings}
    return JobArray(
      command=('python', '-m', 'jaxrl', 'sweep', "--sweep=it's.py"),
      sweepdir=tmp_path,
      resources=ProcessResources(cpus=2, gpus=1),
      grace_s=30,
      **settings,
    )

  return make


def test_tasks_get_the_flags_of_the_sweep_alone():
  given = ['--sweep=x', '--config.a=1', '--launcher=slurm', '--submit', '--cpus', '4']
  rest = ['--parallel=2', '--retry_failed', '--nosubmit']
  assert task_arguments([*given, *rest]) == ['--sweep=x', '--config.a=1', '--retry_failed']


def test_the_script_is_one_array_whose_tasks_know_their_trials(array):
  text = array_text(array(at_once=2, options='{"partition": "gpu"}'), 6)
  assert '#SBATCH --array=0-5%2\n' in text and '#SBATCH --partition=gpu\n' in text
  assert 'SLURM_ARRAY_TASK_ID' in text and '--exclusive' not in text
  checked = subprocess.run(['bash', '-n'], input=text, text=True, capture_output=True)
  assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
  ('options', 'message'),
  [('{"partitoin": "gpu"}', "did you mean 'partition'"), ('{', 'not JSON'), ('[1]', 'wanted')],
)
def test_bad_options_are_one_line(array, options, message):
  with pytest.raises(UserError, match=message):
    array_text(array(options=options), 2)


def test_an_array_without_slurm_leaves_nothing(tmp_path, monkeypatch, capsys):
  monkeypatch.setenv('PATH', str(tmp_path))
  sweepdir = tmp_path / 'sweep'
  flags = ['--sweep=quickstart_lr', f'--sweepdir={sweepdir}', '--launcher=slurm', '--submit']
  assert sweep.main(['jaxrl sweep', *flags]) == 2
  said = capsys.readouterr().err
  assert said.startswith('error: sbatch: no such command') and said.count('\n') == 1
  assert not sweepdir.exists()
  assert sweep.main(['jaxrl sweep', '--status', '--json', f'--sweepdir={sweepdir}']) == 2
  assert 'give the directory of a sweep' in json.loads(capsys.readouterr().out)['error']


TASK = """import sys
from jaxrl_llm.app.commands import sweep
sweep.TRAIN = tuple(sys.argv[1].split())
sys.exit(sweep.main(['sweep', *sys.argv[2:]]))
"""


@pytest.mark.full
def test_tasks_run_their_trials_beside_each_other_and_keep_one_ledger(tmp_path):
  file = sweep_file(
    tmp_path, f"axes={{'{RATE}': (0.01, 0.02)}}, overrides={{'stages.grpo.steps': 8}}"
  )
  stand_in = f'{sys.executable} {ROOT / "tests" / "support" / "fixtures" / "stand_in_run.py"}'
  command = [sys.executable, '-c', TASK, stand_in, f'--sweep={file}', f'--sweepdir={tmp_path}']
  env = {**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'}
  tasks = [
    subprocess.Popen([*command, f'--trial={number}'], env=env, cwd=ROOT) for number in (0, 1)
  ]
  assert [task.wait(timeout=120) for task in tasks] == [0, 0]
  ledger, runner, notes = open_sweep(file, tmp_path)
  assert [str(entry.state) for entry in ledger.entries()] == ['finished'] * 2
  assert all(executed(ledger, entry) == list(range(1, 9)) for entry in ledger.entries())
  assert runner.run() == 0 and notes == []
  status = [*command[:3], stand_in, f'--sweepdir={tmp_path}', '--status', '--json']
  shown = json.loads(subprocess.check_output(status, env=env, cwd=ROOT, timeout=120))
  assert [trial['objective'] for trial in shown['trials']] == [0.08, 0.16]
