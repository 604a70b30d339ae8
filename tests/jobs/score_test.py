"""launch/score.py as a user types it, from a directory of the user's own."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import job
import pytest
import warm
from paths import FIXTURES
from services import Service, chat
from serving import descendants

pytestmark = pytest.mark.full

SCRIPT = job.ROOT / 'launch' / 'score.py'
ROWS = [
  {
    'prompt': '6 x 7?',
    'completion': 'It is #### 42',
    'reward_model': {'style': 'rule', 'ground_truth': '42'},
  },
  {
    'prompt': '6 x 8?',
    'completion': 'It is #### 42',
    'reward_model': {'style': 'rule', 'ground_truth': '48'},
  },
  {'prompt': '6 x 9?', 'completion': 'It is #### 42'},
]
OWN = """
import functools, os, pathlib, time
from jaxrl_llm.rewards.api import Verdict

def make(share=1.0):
  return functools.partial(score, share=share)

def score(attempt, share):
  return Verdict(value=share * len(attempt.completion))

def slow(attempt):
  pathlib.Path(f'started-{os.getpid()}').touch()
  time.sleep(1000)

def make_slow():
  return slow

def make_dying():
  return dies

def dies(attempt):
  os._exit(3) if '42' in attempt.completion else None
  return Verdict(value=1.0)
"""


def arguments(*flags, rows='rows.jsonl', out='out.jsonl'):
  return [str(SCRIPT), f'--rows={rows}', f'--out={out}', *flags]


@pytest.fixture
def folder(tmp_path):
  (tmp_path / 'rows.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in ROWS))
  (tmp_path / 'own_rewards.py').write_text(OWN)
  return tmp_path


def call(folder, *flags, expect=0, **files):
  """(Standard output, standard error)."""
  process = warm.start(arguments(*flags, **files), cwd=folder, env=job.environment())
  out, err = process.communicate(timeout=300)
  assert process.returncode == expect, err[-3000:]
  return out, err


def scores(folder):
  return [json.loads(line) for line in (folder / 'out.jsonl').read_text().splitlines()]


def test_rows_of_a_file_to_scores_of_a_file(folder):
  flags = ('--options={"mode": "numeric"}', '--options.extraction=hashes', '--workers=2')
  out, _ = call(folder, '--scorer=answer', *flags)
  assert out.splitlines() == [
    'scorer answer: 3 rows: ok 3; mean value 0.5 of 2, 1 unscorable; the task has no truth: 1',
    'scorer answer: mode numeric; extraction hashes (as given)',
    'scores written: out.jsonl',
  ]
  assert [score['value'] for score in scores(folder)] == [1.0, 0.0, None]
  assert [(score['uid'], score['scorer'], score['status']) for score in scores(folder)] == [
    (f'rows.jsonl:{line}', 'answer', 'ok') for line in (1, 2, 3)
  ]


def test_without_options_the_mode_is_chosen_and_a_file_without_a_pass_is_warned_of(folder):
  out, err = call(folder, '--scorer=answer')
  assert (
    'mode latex; extraction boxed, tags, hashes, phrase, bold, whole (all of 2 different truths are'
    in out
  )
  assert [score['value'] for score in scores(folder)] == [1.0, 0.0, None] and 'warning' not in err
  out, err = call(folder, '--scorer=answer', '--options.extraction=boxed')
  assert 'no answer: 2' in out and '--options.extraction=hashes' in err.splitlines()[-1]


@pytest.mark.parametrize(
  ('flags', 'values'),
  [
    (('--scorer=own_rewards:make', '--options.share=0.5'), [6.5, 6.5, 6.5]),
    (
      ('--scorer=verl', f'--options.function={FIXTURES}/verl_reward.py:compute_score'),
      [1.0, 0.1, 0.1],
    ),
    (
      ('--scorer=trl', f'--options.function={FIXTURES}/trl_reward.py:best_of_batch'),
      [1.0, 1.0, 1.0],
    ),
  ],
)
def test_a_users_own_scorers_and_functions(folder, flags, values):
  call(folder, *flags)
  assert [score['value'] for score in scores(folder)] == values


def test_a_scorer_that_dies_is_in_the_counts(folder):
  out, _ = call(folder, '--scorer=own_rewards:make_dying')
  assert '3 rows: crashed 3; no value, 3 unscorable' in out
  assert [(score['status'], score['value']) for score in scores(folder)] == [('crashed', None)] * 3


@pytest.mark.parametrize(
  ('flags', 'files', 'told'),
  [
    (('--scorer=answr',), {}, "--scorer: no scorer 'answr'; did you mean 'answer'?"),
    (('--scorer=own_reward:make',), {}, "no module 'own_reward'"),
    (('--scorer=answer', '--options.mod=latex'), {}, "has no field 'mod'; did you mean 'mode'?"),
    (('--scorer=answer', '--options={'), {}, '--options={: not JSON'),
    (('--scorer=answer', '--options.mode'), {}, '--options.mode: no value given'),
    (
      ('--scorer=answer', '--deadline=3'),
      {},
      '--deadline: unknown flag; did you mean --deadline_s?',
    ),
    (('--scorer=answer', '--deadline_s=0'), {}, 'deadline_s is 0.0'),
    ((), {}, '--scorer is missing; usage: '),
    (
      ('--scorer=answer',),
      {'rows': 'row.jsonl'},
      'row.jsonl: no such file; did you mean rows.jsonl?',
    ),
    (('--scorer=answer',), {'rows': 'own_rewards.py'}, 'has an unknown form'),
    (('--scorer=answer',), {'out': 'no/out.jsonl'}, 'no is not a writable directory'),
    (('--scorer=answer',), {'out': 'rows.jsonl'}, 'is the file of --rows'),
    (('--scorer=answer',), {'rows': 'bad.jsonl'}, 'bad.jsonl:2: completion is 7, wanted text'),
  ],
)
def test_bad_input_is_one_line_and_writes_nothing(folder, flags, files, told):
  (folder / 'bad.jsonl').write_text(json.dumps(ROWS[0]) + '\n{"prompt": "x", "completion": 7}\n')
  before = {path: path.read_bytes() for path in folder.iterdir()}
  out, err = call(folder, *flags, expect=2, **files)
  assert out == '' and err.startswith('error: ') and err.count('\n') == 1
  assert told in err
  assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_services_score_rows_too(folder):
  def answer(body):
    if 'messages' not in body:
      return {'value': float(body['ground_truth'] or 0)}
    return chat(
      '{"winner": "tie"}' if '"winner"' in body['messages'][0]['content'] else '{"score": 0.5}'
    )

  (folder / 'rows.jsonl').write_text(
    ''.join(json.dumps({**row, 'prompt': 'same'}) + '\n' for row in ROWS)
  )
  with (service := Service(answer)).in_thread():
    said = []
    at = f'--options.addresses=["{service.address}"]'
    for flags in (('--scorer=http',), ('--scorer=judge', '--options.model=m'),
                  ('--scorer=judge', '--options.model=m', '--options.mode=pairwise')):  # fmt: skip
      call(folder, *flags, at, '--deadline_s=60')
      said.append([score['value'] for score in scores(folder)])
  assert said == [[42.0, 48.0, 0.0], [0.5] * 3, [0.5] * 3]


def test_a_run_is_scored_by_a_users_function_and_a_judge(tmp_path):
  scorers = [
    {
      'name': 'mine',
      'kind': 'verl',
      'options': {'function': 'tests/support/fixtures/verl_reward.py:compute_score'},
    },
    {'name': 'judge', 'weight': 0.5, 'deadline_s': 60.0, 'options': {'model': 'm'}},
  ]
  service = Service(
    lambda body: chat(json.dumps({'score': len(body['messages'][0]['content']) % 5 / 4}))
  )
  with service.in_thread():
    scorers[1]['options']['addresses'] = [service.address]
    config = [flag for flag in job.QUICK if 'rewards.scorers.0' not in flag]
    flags = (f'--config.rewards.scorers={json.dumps(scorers)}', '--config.stages.grpo.steps=2')
    job.train(tmp_path / 'run', *flags, config=tuple(config))
  judged = [
    row['rewards/judge/mean'] for row in job.rows(tmp_path / 'run') if 'rewards/judge/mean' in row
  ]
  assert service.seen and len(judged) == 2 and all(0 < mean < 1 for mean in judged)


@pytest.mark.parametrize(
  ('number', 'to_all', 'code'),
  [(signal.SIGINT, True, 130), (signal.SIGINT, False, 130), (signal.SIGTERM, False, 143)],
)
def test_ctrl_c_leaves_no_file_and_no_process(folder, number, to_all, code):
  """To the process alone, and, as a terminal does it, to its whole group."""
  process = subprocess.Popen(
    [
      sys.executable,
      *arguments('--scorer=own_rewards:make_slow', '--workers=2', '--deadline_s=1000'),
    ],
    cwd=folder,
    env=job.environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )
  while len(list(folder.glob('started-*'))) < 2 and process.poll() is None:
    time.sleep(0.05)
  children = descendants(process.pid)
  # A fork server and two workers at least.
  assert len(children) >= 3 and list(folder.glob('out.jsonl*'))
  (os.killpg if to_all else os.kill)(process.pid, number)
  out, err = process.communicate(timeout=60)
  assert (process.returncode, out, err) == (code, '', 'stopped: nothing was written\n')
  assert not list(folder.glob('out.jsonl*'))
  for _ in range(300):
    left = [pid for pid in children if pathlib.Path(f'/proc/{pid}').exists()]
    if not left:
      break
    time.sleep(0.1)
  assert not left
