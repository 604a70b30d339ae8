"""What processors drop, counted by hand."""

import dataclasses

import pytest
from paths import ROOT

from jaxrl_llm.app.composition.prepare import prepare
from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.load import apply_overrides, load_file
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.tasks.processors import (
  Outcomes,
  ProcessorContext,
  guessable,
  normalised,
  pass_rate,
  process,
  run,
)
from jaxrl_llm.tasks.taskset import TaskProcessorConfig, Taskset


def task(text, truth='1', system=None, taskset='train'):
  messages = ({'role': 'system', 'content': system},) if system else ()
  prompt = (*messages, {'role': 'user', 'content': text})
  return Task(taskset=taskset, domain='math', prompt=prompt, truth=truth, fields={})


def taskset(*tasks):
  return Taskset(
    name='train', tasks=tasks, counts={'read': len(tasks) + 1, 'kept': len(tasks), 'corrupt': 1}
  )


def processed(tasks, *processors, others=()):
  """The kept texts, and the counts."""
  configs = [TaskProcessorConfig(name=name, options=options) for name, options in processors]
  context = ProcessorContext(others, lambda one: len(one.prompt[-1]['content'].split()))
  found = process(taskset(*tasks), configs, context)
  assert found.counts['read'] == sum(
    count for name, count in found.counts.items() if name != 'read'
  )
  return [one.prompt[-1]['content'] for one in found.tasks], found.counts


def test_dedup_keeps_the_first_of_what_says_the_same():
  tasks = [
    task('What is 2 + 3?'),
    task('what is  2 + 3'),
    task('What is 2 - 3?'),
    task('What is 2 + 3?', system='Be brief.'),
    task('Name a river.'),
    task('Is 1.5 large?'),
    task('Is 15 large?'),
  ]
  others = [task('Name a river.', taskset='eval'), task('IS 15, LARGE', taskset='eval')]
  kept, counts = processed(tasks, ('dedup', {}), others=others)
  assert kept == ['What is 2 + 3?', 'What is 2 - 3?', 'Is 1.5 large?']
  assert (counts['dedup/same_prompt'], counts['dedup/near_duplicate'], counts['kept']) == (1, 3, 3)
  kept, counts = processed(tasks, ('dedup', {'near': False}), others=others)
  assert len(kept) == 6 and counts['dedup/same_prompt'] == 1


@pytest.mark.parametrize(
  ('one', 'other', 'same'),
  [
    ('Compute: a, b; and c.', 'compute a b and c', True),
    ('Straße "x"', 'STRASSE x', True),
    ('at 12:30?', 'at 12 30', False),
    ('5! =', '5 =', False),
    ("y'' = y", "y' = y", False),
    ('(1-2)-3', '1-(2-3)', False),
    ('1,000', '1.000', False),
    ('end 5.', 'end 5', True),
  ],
)
def test_only_what_sentences_need_is_left_out(one, other, same):
  assert (normalised(task(one)) == normalised(task(other))) is same


def test_lengths_and_kinds_of_answer_in_their_order():
  options = 'Which is blue? (A) sky (B) grass'
  tasks = [
    task('one'),
    task('one two three'),
    task('a b c d e f g h i j'),
    task(options, truth='A'),
    task('Which letter comes first?', truth='A'),
    task('Is water wet?', truth='Yes'),
  ]
  length, kind = ('length', {'min_tokens': 2, 'max_tokens': 9}), ('answer_kind', {})
  kept, counts = processed(tasks, length, kind)
  assert kept == ['one two three', 'Which letter comes first?']
  wanted = {
    'length/too_short': 1,
    'length/too_long': 1,
    'answer_kind/choice': 1,
    'answer_kind/boolean': 1,
  }
  assert wanted.items() <= counts.items()
  kept, _ = processed(tasks, ('answer_kind', {'drop': ['choice']}))
  assert options not in kept and 'Is water wet?' in kept


def test_rates_and_guesses():
  tasks = [task(text) for text in 'abcde']
  rates = [Outcomes(0, 10), Outcomes(1, 10), Outcomes(9, 10), Outcomes(8, 8), Outcomes(0, 0)]
  outcomes = {one.uid: of for one, of in zip(tasks, rates, strict=True)}
  kept, passed = run('rate', pass_rate(outcomes, low=0.1, high=0.9), tasks)
  assert kept == (tasks[1], tasks[2])
  assert (passed.given, passed.kept, passed.dropped) == (
    5,
    2,
    {'too_hard': 1, 'too_easy': 1, 'unscorable': 1},
  )
  assert str(passed) == 'rate: 5 in, 2 out, too_hard 1, too_easy 1, unscorable 1'
  kept, passed = run('guess', guessable(outcomes), tasks)
  assert kept == (tasks[0], tasks[4]) and passed.dropped == {'guessed': 3}


@pytest.mark.parametrize(
  ('name', 'options', 'message'),
  [
    ('dedupe', {}, "no processor 'dedupe'; did you mean 'dedup'"),
    ('dedup', {'nera': True}, 'nera'),
    ('length', {'min_tokens': 5, 'max_tokens': 4}, 'min_tokens 5 is above max_tokens 4'),
    (
      'length',
      {'min_tokens': 99},
      'its processors leave no task: length: 1 in, 0 out, too_short 1',
    ),
  ],
)
def test_what_cannot_be_processed_is_one_line(name, options, message):
  with pytest.raises(UserError, match=message):
    processed([task('one')], (name, options))


def test_what_is_measured_is_not_trained_on_and_stays(tmp_path):
  overrides = {'stages.sft.source.count': '100', 'evaluation.held_out.tasks': 'null'}
  config = apply_overrides(load_file(f'{ROOT}/configs/quickstart.py', Config), overrides)
  train, held_out = (dataclasses.replace(one, size=400) for one in config.tasksets)
  both = dataclasses.replace(train, split='all')
  with pytest.raises(UserError, match='share'):
    prepare(dataclasses.replace(config, tasksets=(both, held_out)), tmp_path)
  dedup = (TaskProcessorConfig(name='dedup'),)
  both, own = (dataclasses.replace(one, processors=dedup) for one in (both, held_out))
  found = prepare(dataclasses.replace(config, tasksets=(both, own)), tmp_path)
  plain = prepare(dataclasses.replace(config, tasksets=(train, held_out)), tmp_path)
  digests = {name: [one.digest for one in kept.tasks] for name, kept in found.tasksets.items()}
  assert digests == {
    name: [one.digest for one in kept.tasks] for name, kept in plain.tasksets.items()
  }
  counts = found.tasksets['train'].counts
  assert counts['dedup/same_prompt'] == len(digests['eval']) > 0
  assert counts['read'] == sum(count for name, count in counts.items() if name != 'read')
