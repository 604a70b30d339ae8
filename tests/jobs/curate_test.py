"""Tasks chosen by what a trained policy makes of them, by the command that a user types."""

import collections
import dataclasses
import json

import job
import pytest

from jaxrl_llm.app.offline.reopen import config_of_run
from jaxrl_llm.tasks.taskset import load_taskset

pytestmark = pytest.mark.full
FEW = ('--config.tasksets.eval.size=300',)
SAMPLES, TRIES = 10, 4


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('curate') / 'run'
  job.train(workdir, config=(*job.QUICK, *job.RIGHT, '--config.stages.grpo.steps=1'))
  return workdir


def call(script, workdir, *flags, expect=0):
  done = job.call(f'launch/{script}.py', f'--workdir={workdir}', *FEW, *flags, expect=expect)
  return (done.stdout + done.stderr).splitlines()


def counted_by_hand(run, out):
  """By task, how many of the completions that the same policy gives to the same counters are
  right.
  """
  held_out = {'samples': SAMPLES, 'tasks': 'null', 'temperature': 1.0}
  flags = [f'--config.evaluation.held_out.{name}={value}' for name, value in held_out.items()]
  call('evaluate', run, '--steps=13', f'--out={out}', *flags)
  right = collections.defaultdict(dict)
  for row in map(json.loads, out.read_text().splitlines()):
    if row['mode'] == 'sample':
      before, a, after = row['completion'].strip().partition('a')
      right[row['uid']][row['sample_index']] = bool(before and a and after and 'a' not in after)
  return right


def test_kept_tasks_are_those_that_hand_counted_completions_say(run, tmp_path):
  before = job.files(run)
  right = counted_by_hand(run, tmp_path / 'rows.jsonl')
  rates = {uid: sum(by_index.values()) / SAMPLES for uid, by_index in right.items()}
  assert len(set(rates.values())) > 3, 'else any filter would do'
  low, high = 0.1, sorted(rates.values())[-3]
  hard, easy = (
    sum(rate < low for rate in rates.values()),
    sum(rate > high for rate in rates.values()),
  )
  in_range = [uid for uid, rate in rates.items() if low <= rate <= high]
  # A guess as long as an answer, to the same prompt: the first completions again.
  guesses = {uid: sum(right[uid][i] for i in range(TRIES)) for uid in in_range}
  wanted = [uid for uid in in_range if not guesses[uid]]
  assert hard and easy and 0 < len(wanted) < len(in_range)

  out = tmp_path / 'kept.jsonl'
  flags = (f'--low={low}', f'--high={high}', f'--guess_tries={TRIES}', '--guess_instruction=')
  told = call('curate', run, '--taskset=eval', f'--out={out}', *flags)
  reasons = (f', too_hard {hard}', f', too_easy {easy}')
  assert f'{len(rates)} in, {len(in_range)} out' in told[0] and all(
    reason in told[0] for reason in reasons
  )
  assert f'{len(in_range)} in, {len(wanted)} out, guessed {len(in_range) - len(wanted)}' in told[1]
  (config,) = (one for one in config_of_run(run).tasksets if one.name == 'eval')
  kept = load_taskset(dataclasses.replace(config, source=str(out), options={}))
  assert [one.uid for one in kept.tasks] == wanted
  for one in kept.tasks:
    fields = one.fields
    assert (fields['pass_rate'], fields['hardness'], fields['guessed']) == (
      rates[one.uid],
      1 - rates[one.uid],
      0,
    )
  assert job.files(run) == before


def test_a_configuration_gives_what_the_initial_policy_of_its_run_gives(run, tmp_path):
  few = (*FEW, '--taskset=eval', '--guess_tries=0', '--samples=2', '--high=0.9')
  outs = [tmp_path / f'{name}.jsonl' for name in ('run', 'config')]
  told = [
    job.call('launch/curate.py', *source, *few, f'--out={out}').stdout.splitlines()[0]
    for out, source in zip(
      outs, ((f'--workdir={run}', '--step=0'), (*job.QUICK, *job.RIGHT)), strict=True
    )
  ]
  assert told[0] == told[1] and outs[0].read_bytes() == outs[1].read_bytes()
  error = '--workdir and --config are both given; wanted --workdir=RUN for the policy of a run'
  for flags, wanted in (
    ((f'--workdir={run}', job.QUICK[0]), error),
    ((), '--workdir is missing; wanted --workdir=RUN for the policy of a run'),
    ((job.QUICK[0], '--step=12'), '--step=12: --config gives only the initial policy'),
  ):
    failed = job.call('launch/curate.py', *flags, *few, f'--out={tmp_path}/no.jsonl', expect=2)
    assert wanted in failed.stderr.splitlines()[-1]
  assert not (tmp_path / 'no.jsonl').exists()


def test_curation_errors_are_one_line_and_write_nothing(run, tmp_path):
  out = f'--out={tmp_path}/kept.jsonl'
  for flags, told in (
    (('--taskset=evla', out), "no such taskset; configured are ['eval', 'train']"),
    (('--taskset=eval', f'--out={tmp_path}/no/kept.jsonl'), 'not a writable directory'),
    (('--taskset=eval', out, '--low=0.9', '--high=0.1'), 'wanted 0 <= low <= high <= 1'),
    (
      ('--taskset=eval', out, '--guess_instruction=a', '--config.rollout.max_prompt_length=6'),
      'character table lacks',
    ),
  ):
    *_, line = call('curate', run, *flags, expect=2)
    assert line.startswith('error: ') and told in line
  assert not list(tmp_path.iterdir())
