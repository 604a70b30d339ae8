"""What a run committed, measured again afterwards by the command that a user types."""

import json
import shutil

import job
import pytest

pytestmark = pytest.mark.full


@pytest.fixture(scope='module')
def run():
  return job.quick_run()


def evaluate(workdir, *flags, expect=0):
  done = job.call('launch/evaluate.py', f'--workdir={workdir}', *flags, expect=expect)
  return done.stderr if expect else done.stdout


def measured(text):
  """By step: the metrics as printed."""
  lines = [line.partition(': ') for line in text.splitlines() if line.startswith('step ')]
  return {
    int(head.split()[1].rstrip(',')): dict(pair.rsplit(' ', 1) for pair in told.split(', '))
    for head, _, told in lines
  }


def test_every_commit_is_measured_as_the_run_measured_it_and_nothing_is_written(run):
  before = job.files(run)
  found = measured(evaluate(run))
  recorded = {
    row['training/global_step']: row for row in job.rows(run) if 'val-core/eval/acc/greedy' in row
  }
  kept = {int(path.name) for path in (run / 'checkpoints').iterdir() if (path / 'COMMIT').exists()}
  assert set(found) == kept and kept & set(recorded)
  for step in kept & set(recorded):
    row = recorded[step]
    assert found[step] == {
      key: f'{value:.4g}'
      for key, value in row.items()
      if key.startswith(('val-', 'goodput/tokens/evaluated'))
    }
  assert len({told['val-aux/eval/score/mean'] for told in found.values()}) > 1, (
    'else any commit would do'
  )
  assert job.files(run) == before


def test_the_beginning_and_more_samples_into_a_file(run, tmp_path):
  out = tmp_path / 'rows.jsonl'
  flags = ('--config.evaluation.held_out.samples=4', '--config.evaluation.held_out.tasks=6')
  (found,) = json.loads(evaluate(run, '--steps=0', f'--out={out}', '--json', *flags))
  assert (found['step'], found['suite']) == (0, 'held_out')
  assert 0 <= found['metrics']['val-core/eval/acc/pass@4'] <= 1
  rows = [json.loads(line) for line in out.read_text().splitlines()]
  assert len(rows) == 6 * (1 + 4) and {row['step'] for row in rows} == {0}
  assert {row['mode'] for row in rows} == {'greedy', 'sample'}


def test_what_cannot_be_measured_is_one_line(run, tmp_path):
  for flags, told in (
    (('--steps=999',), 'no commit at step 999'),
    (('--steps=x',), "'x' is not a step"),
    (('--config=configs/quickstart.py',), "the run's own configuration is used"),
    (('--config.evaluation=[]',), 'no suite'),
    (
      ('--steps=0', f'--out={tmp_path}/nowhere/rows.jsonl', '--config.evaluation.held_out.tasks=2'),
      '--out=',
    ),
  ):
    (line,) = evaluate(run, *flags, expect=2).splitlines()
    assert line.startswith('error: ') and told in line
  (line,) = evaluate(tmp_path / 'nowhere', expect=2).splitlines()
  assert 'not the directory of a run' in line
  damaged = tmp_path / 'damaged'
  shutil.copytree(run, damaged)
  config = json.loads((damaged / 'config.json').read_text())
  config['rollout'] |= {
    'engine': 'vllm',
    'vllm': config['rollout']['vllm'] | {'addresses': ['http://127.0.0.1:9']},
  }
  (damaged / 'config.json').write_text(json.dumps(config))
  (line,) = evaluate(damaged, '--config.rollout.vllm.max_in_flight=8', expect=2).splitlines()
  assert "the run's own servers would receive old weights" in line
  shutil.copy(run / 'config.json', damaged)
  newest = max((damaged / 'checkpoints').iterdir(), key=lambda path: int(path.name))
  array = next(
    path
    for path in sorted((newest / 'arrays').rglob('*'))
    if path.is_file() and path.stat().st_size > 100
  )
  array.write_bytes(array.read_bytes()[:-1])
  (line,) = evaluate(damaged, f'--steps={newest.name}', expect=2).splitlines()
  assert 'differs from the committed file' in line
