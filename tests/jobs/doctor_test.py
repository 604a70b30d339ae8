"""Checks of a run before it begins, through the command line: what they print, and how they end."""

import collections
import json
import os
import pathlib
import signal
import statistics

import faults
import job
import psutil
import pytest
import warm
from paths import ROOT

pytestmark = pytest.mark.full
SHIPPED = (
  'quickstart.py',
  'quickstart.py:number_sorting',
  'ppo.py',
  'opmd.py',
  'mix.py',
  'dpo.py',
  'dpo.py:online',
  'dpo.py:rejection',
  'reward_model.py',
  'replay.py',
  'asynchronous.py',
  'grpo.py:gspo',
  'lora.py:base',
)
"""Configurations that need nothing but this machine."""

CONFIG = """
import pathlib, sys
sys.path.append({support!r})
import faults

def get_config(fault=''):
  folder = pathlib.Path(__file__).parent / 'data'
  folder.mkdir(exist_ok=True)
  return faults.plant(folder, *([fault] if fault else []))
"""


@pytest.fixture
def config(tmp_path):
  """A file with the healthy run of tests/support/faults.py; the variant plants a fault."""
  file = tmp_path / 'sums.py'
  file.write_text(CONFIG.format(support=str(ROOT / 'tests' / 'support')))
  return file


def checked(flag: str, config, *more: str, workdir: pathlib.Path, expect: int = 0):
  programs = f'--config.compilation_cache={job.session() / "programs"}'
  arguments = (flag, f'--config={config}', f'--workdir={workdir}', programs, *more)
  return job.call('launch/train.py', *arguments, expect=expect)


def test_the_doctor_prints_one_document_and_leaves_no_trace(config, tmp_path):
  ended = checked('--doctor', config, '--json', workdir=tmp_path / 'run')
  findings = json.loads(ended.stdout)
  assert all({'check', 'status', 'remedy'} <= finding.keys() for finding in findings)
  assert not [finding for finding in findings if finding['status'] == 'failure']
  by_check = {finding['check']: finding for finding in findings}
  examined = {name.partition(' ')[0] for name in by_check}
  assert set(faults.FAULTS.values()) - examined == {'shared_memory'}
  assert by_check['step_time grpo']['seconds'] > 0 and by_check['duration']['hours'] > 0
  assert by_check['memory']['process_bytes'] > 1e8
  assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) in (
    ['data'],
    ['__pycache__', 'data'],
  )


def test_a_fault_is_exit_code_1_and_a_line_with_its_remedy(config, tmp_path):
  ended = checked('--doctor', f'{config}:missing eos', workdir=tmp_path / 'run', expect=1)
  (line,) = [line for line in ended.stdout.splitlines() if line.startswith('failure')]
  assert 'tokenizer' in line and 'name one in tokenizer_config.json' in line


def test_check_and_dry_run_print_one_document(config, tmp_path):
  run = tmp_path / 'run'
  plan = json.loads(checked('--check', config, '--json', workdir=run).stdout)
  assert [stage['name'] for stage in plan['stages']] == ['sft', 'grpo']
  assert plan['config']['name'] == 'sums' and plan['policy']['parameters'] > 0
  assert plan.pop('changes') == []
  compiled = json.loads(checked('--dry_run', config, '--json', workdir=run).stdout)
  assert {key: compiled[key] for key in plan} == plan
  assert {program['name'] for program in compiled['programs']} >= {
    'update of sft',
    'update of grpo',
  }
  assert all(program['fits'] and program['needed'] > 0 for program in compiled['programs'])
  assert not run.exists()


@pytest.mark.parametrize(
  ('flags', 'words'),
  [
    (('--check', '--doctor'), '--doctor: cannot be combined with --check'),
    (('--check', '--config.learner.mesh.data=7'), 'does not match the number of devices'),
    (('--doctor', '--config.policy.nonsense=1'), "PolicyConfig has no field 'nonsense'"),
  ],
)
def test_bad_input_is_one_line_and_one_document(flags, words, config, tmp_path):
  first, *more = flags
  ended = checked(first, config, '--json', *more, workdir=tmp_path / 'run', expect=2)
  (line,) = [line for line in ended.stderr.splitlines() if line.startswith('error: ')]
  assert words in line
  assert json.loads(ended.stdout) == {'error': line.removeprefix('error: ')}
  assert not (tmp_path / 'run').exists()


def test_json_without_a_check_is_refused(config, tmp_path):
  ended = checked('--json', config, workdir=tmp_path / 'run', expect=2)
  assert 'needs --check, --dry_run or --doctor' in ended.stderr


def test_check_refuses_a_directory_with_another_run(tmp_path):
  run = job.quick_run()
  before = job.files(run)
  other = (*job.QUICK, '--config.seed=1')
  ended = job.call('launch/train.py', '--check', *other, f'--workdir={run}', expect=2)
  assert 'cannot be resumed with these changes' in ended.stderr and 'seed' in ended.stderr
  assert job.files(run) == before


def test_the_store_and_a_conversion_are_documents_too(tmp_path):
  run = job.quick_run()
  audit = json.loads(job.call('launch/buffer.py', f'--workdir={run}', '--audit', '--json').stdout)
  assert audit['ok'] and audit['issued'] == sum(audit['states'].values())
  held = json.loads(job.call('launch/buffer.py', f'--workdir={run}', '--json').stdout)
  states = audit['states']
  assert held['samples']['usual'] == {state: states[state] for state in held['samples']['usual']}
  flags = ('--state=trained', '--limit=2', '--json')
  listed = json.loads(job.call('launch/buffer.py', f'--workdir={run}', *flags).stdout)
  assert [sample['state'] for sample in listed['samples']] == ['trained'] * 2
  target = tmp_path / 'model'
  converted = json.loads(
    job.call('launch/convert.py', f'--source={run / "hf"}', f'--target={target}', '--json').stdout
  )
  assert converted['bytes'] == sum((target / name).stat().st_size for name in converted['files'])
  missing = job.call('launch/buffer.py', f'--workdir={tmp_path}', '--json', expect=2)
  assert 'no such file' in json.loads(missing.stdout)['error']


def test_an_interrupt_ends_the_doctor_and_all_that_it_started(config, tmp_path):
  command = ['launch/train.py', '--doctor', f'--config={config}']
  command += [
    f'--workdir={tmp_path / "run"}',
    f'--config.compilation_cache={tmp_path / "programs"}',
  ]
  temporary = tmp_path / 'temporary'
  temporary.mkdir()
  doctor = warm.start(command, cwd=ROOT, env=job.environment(TMPDIR=str(temporary)))
  for line in doctor.stdout:
    if 'scorers' in line:  # The workers run, and the engine compiles.
      break
  started = psutil.Process(doctor.pid).children(recursive=True)
  assert started
  os.kill(doctor.pid, signal.SIGINT)
  _, err = doctor.communicate(timeout=120)
  assert doctor.returncode == 130 and 'the findings are incomplete' in err
  assert 'Traceback' not in err
  psutil.wait_procs(started, timeout=30)
  left = [p for p in started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
  assert not left and not list(temporary.glob('jaxrl_llm-*'))


@pytest.mark.acceptance
@pytest.mark.parametrize('config', SHIPPED)
def test_the_shipped_configurations_have_no_fault(config, tmp_path):
  ended = checked('--doctor', f'configs/{config}', '--json', workdir=tmp_path / 'run')
  assert not [f for f in json.loads(ended.stdout) if f['status'] == 'failure']


@pytest.mark.acceptance
def test_step_time_and_memory_are_those_of_the_run(tmp_path, record_property):
  """On a quiet machine: seconds per step within 20 %, memory within 10 % of what the run shows."""
  config = (
    '--config=configs/quickstart.py',
    '--config.stages.sft.steps=120',
    '--config.stages.grpo.steps=60',
  )
  environ = {**job.environment(), 'XLA_FLAGS': ''}

  def flags(name: str) -> tuple[str, ...]:
    # Each compiles its own programs, which takes memory too.
    programs = f'--config.compilation_cache={tmp_path / name}-programs'
    return (*config, f'--workdir={tmp_path / name}', programs)

  ratios = collections.defaultdict(list)
  for i in range(3):
    ended = job.call(
      'launch/train.py', '--doctor', '--json', *flags(f'doctor-{i}'), environ=environ
    )
    doctor = {result['check']: result for result in json.loads(ended.stdout)}
    job.call('launch/train.py', *flags(f'run-{i}'), environ=environ)
    rows = [row for row in job.rows(tmp_path / f'run-{i}') if 'perf/time_per_step' in row]
    for stage in ('sft', 'grpo'):
      # The first steps compile.
      seconds = [row['perf/time_per_step'] for row in rows if row['stage'] == stage][3:]
      ratios[stage].append(doctor[f'step_time {stage}']['seconds'] / statistics.median(seconds))
    memory = max(row['perf/cpu_memory_used_gb'] for row in rows) * 1e9
    ratios['memory'].append(doctor['memory']['process_bytes'] / memory)
  for name, measured in ratios.items():
    record_property(name, measured)
    print(name, *(f'{ratio:.3f}' for ratio in measured))
  assert abs(statistics.median(ratios['sft']) - 1) < 0.2
  assert abs(statistics.median(ratios['grpo']) - 1) < 0.2
  assert abs(statistics.median(ratios['memory']) - 1) < 0.1
