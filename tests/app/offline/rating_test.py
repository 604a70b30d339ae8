"""`jaxrl rate` with a real endpoint: what it writes, and that it asks nothing twice."""

import json
import os
import subprocess
import sys

import pytest
from paths import ROOT
from services import HANG, Service, chat, hangs_after, kill_at_line

from jaxrl_llm.app.commands import rate
from jaxrl_llm.tasks.sampler import SamplerConfig, TaskSampler
from jaxrl_llm.tasks.taskset import TasksetConfig, load_taskset

COUNT = 8


def question(number) -> str:
  return f'What is {number} + {number}?'


def rated(body):
  """Task n has quality n / 8 and difficulty 1 − n / 8."""
  prompt = body['messages'][0]['content']
  (number,) = (n for n in range(COUNT) if question(n) in prompt)
  quality = number / COUNT
  return chat(json.dumps({'scores': {'quality': quality, 'difficulty': 1 - quality}}))


@pytest.fixture
def rows(tmp_path):
  file = tmp_path / 'rows.jsonl'
  lines = [{'question': question(n), 'answer': str(2 * n), 'level': n} for n in range(COUNT)]
  file.write_text(''.join(json.dumps(line) + '\n' for line in lines))
  return file


def flags(service, rows, *more):
  return [
    'jaxrl rate',
    f'--rows={rows}',
    f'--out={rows.parent / "rated.jsonl"}',
    f'--options.addresses=["{service.address}"]',
    '--options.model=j',
    '--options.first_wait_s=0.01',
    *more,
  ]


def run(service, rows, *more):
  """The command's exit code, and the rows that it wrote."""
  rate.FLAGS.unparse_flags()
  code = rate.main(flags(service, rows, *more))
  out = rows.parent / 'rated.jsonl'
  return code, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def test_rows_are_written_with_their_ratings_and_a_weighted_sum(rows):
  with Service(rated).in_thread() as service:
    code, written = run(service, rows, '--options.weights={"difficulty": -0.5}')
  assert code == 0 and len(service.seen) == COUNT
  assert written == [
    {
      'question': question(n),
      'answer': str(2 * n),
      'level': n,
      'rated_quality': n / COUNT,
      'rated_difficulty': 1 - n / COUNT,
      'priority': n / COUNT - 0.5 * (1 - n / COUNT),
    }
    for n in range(COUNT)
  ]


def test_a_sampler_draws_by_priority(rows):
  with Service(rated).in_thread() as service:
    run(service, rows, '--options.weights={"difficulty": 0}', '--min_priority=0.25')
  taskset = load_taskset(TasksetConfig(name='t', source=str(rows.parent / 'rated.jsonl')))
  config = SamplerConfig(order='hard_to_easy', hardness='priority')
  sampler = TaskSampler([taskset], config, seed=0)
  levels = [sampler.next()[0].fields['level'] for _ in range(7)]
  assert levels == [7, 6, 5, 4, 3, 2, 7]


def test_a_second_command_asks_nothing_again_even_with_other_weights(rows):
  with Service(rated).in_thread() as service:
    run(service, rows)
    code, written = run(service, rows, '--options.weights={"quality": 0}')
  assert code == 0 and len(service.seen) == COUNT
  assert [row['priority'] for row in written] == [1 - n / COUNT for n in range(COUNT)]


def test_tasks_without_a_rating_end_the_command_or_are_left_out(rows, capsys):
  def broken(body):
    return 'no' if question(3) in body['messages'][0]['content'] else rated(body)

  with Service(broken).in_thread() as service:
    assert run(service, rows, '--options.malformed_retries=0') == (2, [])
    error = capsys.readouterr().err
    assert error.startswith('error: 1 of 8 tasks have no rating') and error.count('\n') == 1
    assert len(service.seen) == COUNT
    code, written = run(service, rows, '--on_failure=skip', '--options.malformed_retries=0')
    assert code == 0 and [row['level'] for row in written] == [0, 1, 2, 4, 5, 6, 7]
    assert len(service.seen) == COUNT + 1
    service.answer = lambda body: HANG if question(3) in str(body) else rated(body)
    assert run(service, rows, '--deadline_s=0.2', '--on_failure=skip')[0] == 0


@pytest.mark.parametrize(
  ('more', 'reason'),
  [
    (['--options.template={completion}'], 'template is not available'),
    (['--options.weights={"size": 1}'], "weights has 'size'"),
    (['--options.missing=skip'], "missing 'skip'"),
    (['--options.criteria=[]'], 'a rubric has 0 criteria'),
    (['--out=rated.txt'], 'wanted a file name that ends in .jsonl'),
    (['--min_priority=9'], 'no task remains'),
    (
      ['--options.criteria=[{"name": "quality", "text": "x"}]', '--form=apps'],
      'has no input_output',
    ),
  ],
)
def test_bad_flags_are_one_line(rows, more, reason, capsys):
  with Service(rated).in_thread() as service:
    assert run(service, rows, *more) == (2, [])
  error = capsys.readouterr().err
  assert reason in error and error.count('\n') == 1


def test_a_row_that_has_the_fields_already_is_refused(rows, capsys):
  rows.write_text(json.dumps({'question': question(0), 'priority': 3}))
  with Service(rated).in_thread() as service:
    assert run(service, rows) == (2, [])
    assert not service.seen
  assert "its row has ['priority'] already" in capsys.readouterr().err


@pytest.mark.full
def test_a_command_that_is_killed_goes_on_where_it_was(rows):
  reply, answered = hangs_after(3, rated)
  journal = rows.parent / 'rated.jsonl.journal'
  program = 'import sys\nfrom jaxrl_llm.app.commands import rate\nsys.exit(rate.main(sys.argv))'
  with Service(reply).in_thread() as service:
    arguments = flags(service, rows)[1:]
    child = subprocess.Popen(
      [sys.executable, '-c', program, *arguments], env={**os.environ, 'PYTHONPATH': str(ROOT)}
    )
    kill_at_line(child, journal, 3)
    before = len(service.seen)
    service.answer = rated
    code, written = run(service, rows)
  later = [body['messages'][0]['content'] for body in service.seen[before:]]
  assert code == 0 and [row['level'] for row in written] == list(range(COUNT))
  assert len(later) == COUNT - 3 and not set(later) & set(answered)
