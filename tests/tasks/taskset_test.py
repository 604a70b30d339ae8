import json

import pytest

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.tasks.taskset import (
  DemonstrationsConfig,
  Shot,
  TasksetConfig,
  check_disjoint,
  demonstrations,
  drop_long,
  load_taskset,
  taskset_loader,
)

FATES = ('kept', 'corrupt', 'unmatched', 'duplicate', 'other_split', 'too_long')
SPELL = {
  'source': 'reasoning_gym:spell_backward',
  'options': {'min_word_len': 3, 'max_word_len': 5},
  'prompt': '{word}>',
  'match': '[a-z]+>',
  'truth': '{answer}',
}
SORT = {
  'source': 'reasoning_gym:number_sorting',
  'options': {
    'min_numbers': 4,
    'max_numbers': 4,
    'min_decimals': 0,
    'max_decimals': 0,
    'min_value': 10,
    'max_value': 99,
  },
  'prompt': '{direction:.1}{original_numbers:csv}>',
  'match': 'a[0-9,]+>',
  'truth': '[{sorted_numbers:csv}]',
}


def write(path, *lines):
  path.write_text('\n'.join(line if isinstance(line, str) else json.dumps(line) for line in lines))
  return str(path)


def load(path, **kwargs):
  return load_taskset(TasksetConfig(name='t', source=str(path), **kwargs))


def contents(taskset):
  return [task.prompt[-1]['content'] for task in taskset.tasks]


def test_each_row_format_becomes_the_task_it_states(tmp_path):
  verl = {
    'data_source': 'openai/gsm8k',
    'prompt': [{'role': 'system', 'content': 's'}, {'role': 'user', 'content': 'u'}],
    'ability': 'math',
    'reward_model': {'style': 'rule', 'ground_truth': 72},
    'extra_info': {'index': 1},
  }
  plain, gsm = {'prompt': 'p', 'answer': 'yes'}, {'question': 'q', 'answer': 'so\n#### 5'}
  path = write(tmp_path / 'a.jsonl', verl, plain, gsm, {'prompt': 'no truth'})
  tasks = load(path, domain='k12').tasks
  assert [[m['role'] + ':' + m['content'] for m in task.prompt] for task in tasks] == [
    ['system:s', 'user:u'],
    ['user:p'],
    ['user:q'],
    ['user:no truth'],
  ]
  assert [task.truth for task in tasks] == ['72', 'yes', 'so\n#### 5', None]
  assert [task.domain for task in tasks] == ['math', 'k12', 'k12', 'k12']
  assert [task.fields for task in tasks[:3]] == [verl, plain, gsm]


def test_shots_are_turns_between_the_system_message_and_the_tasks_own(tmp_path):
  own = [{'role': 'system', 'content': 's'}, {'role': 'user', 'content': 'u'}]
  path = write(tmp_path / 'a.jsonl', {'prompt': own}, {'prompt': 'plain'})
  shots = (Shot(question='q', answer='a'), Shot(question='r', answer='b'))
  turns = ['user:q', 'assistant:a', 'user:r', 'assistant:b']
  for config, system in (({}, 's'), ({'system': 't'}, 't')):
    first, second = load(path, shots=shots, **config).tasks
    found = [[f'{m["role"]}:{m["content"]}' for m in task.prompt] for task in (first, second)]
    assert found[0] == [f'system:{system}', *turns, 'user:u']
    assert found[1] == [*(['system:t'] if config else []), *turns, 'user:plain']
  (matched,) = load(path, shots=shots, match='plain').tasks
  assert matched.digest == load(path, shots=shots).tasks[1].digest
  assert matched.digest != load(path, match='plain').tasks[0].digest


def test_templates_and_system_replace_the_rows_own(tmp_path):
  row = {
    'prompt': [{'role': 'system', 'content': 's'}, {'role': 'user', 'content': 'u'}],
    'extra_info': {'i': 4},
  }
  path = write(tmp_path / 'a.jsonl', row)
  (templated,) = load(path, prompt='number {i}', truth='{i}!').tasks
  assert [m['content'] for m in templated.prompt] == ['s', 'number 4'] and templated.truth == '4!'
  (with_system,) = load(path, system='be brief').tasks
  assert [(m['role'], m['content']) for m in with_system.prompt] == [
    ('system', 'be brief'),
    ('user', 'u'),
  ]
  gsm = write(tmp_path / 'b.jsonl', {'question': 'q', 'answer': 'long #### 70'})
  assert load(gsm, prompt='Q: {question}', truth='{answer:after ####}').tasks[0].truth == '70'


CORRUPT = [
  '{"prompt": ',
  {'text': 'x'},
  {'prompt': [{'role': 'user', 'content': ['image']}]},
  {'prompt': [{'role': 'wizard', 'content': 'x'}]},
  {'prompt': [{'role': 'user', 'content': 'x'}, {'role': 'assistant', 'content': 'y'}]},
  {'prompt': '  '},
  {'prompt': 3},
]


@pytest.mark.parametrize('row', CORRUPT)
def test_corrupt_row_is_fatal_with_its_place_or_skipped_and_counted(tmp_path, row):
  path = write(tmp_path / 'a.jsonl', {'prompt': 'a'}, row, {'prompt': 'b'})
  with pytest.raises(UserError, match=r'a\.jsonl:2: .*on_corrupt') as error:
    load(path)
  assert '\n' not in str(error.value)
  taskset = load(path, on_corrupt='skip')
  assert contents(taskset) == ['a', 'b']
  assert taskset.counts['corrupt'] == 1 and taskset.counts['read'] == 3


NESTED = '{{"prompt": "a", "deep": {}}}'
HOSTILE = {
  'nested far too deep': (
    NESTED.format('[' * 100_000 + ']' * 100_000),
    {},
    'nested more than 100 levels',
  ),
  'nested too deep': (
    NESTED.format('{"a":' * 100 + '1' + '}' * 100),
    {},
    'nested more than 100 levels',
  ),
  'beyond a float': ('{"prompt": "a", "x": 1e400}', {}, '1e400 is beyond the range of a float'),
  'lone surrogate': ('{"prompt": "a", "answer": "\\ud800"}', {}, r"UTF-8 cannot encode, '\ud800'"),
  'surrogate from a template': ({'prompt': 'a', 'x': 0xD800}, {'truth': '{x:c}'}, 'surrogate'),
  'float from a template': ({'prompt': 'a', 'x': 10**400}, {'prompt': '{x:.0f}'}, 'too large'),
  'no entry': ({'reasoning_gym': 'x'}, {}, "'reasoning_gym' without an entry"),
  'no metadata': (
    {'reasoning_gym': 'x', 'entry': []},
    {'prompt': '{x}'},
    "'reasoning_gym' without an entry",
  ),
  'lines in a name': ({'a\nb': 1}, {}, 'among its fields a b'),
  'a long name': ({'a' * 10_000: 1}, {}, 'among its fields aaa'),
}


@pytest.mark.parametrize('name', HOSTILE)
def test_a_hostile_row_is_one_line_or_skipped(tmp_path, name):
  row, options, message = HOSTILE[name]
  path = write(tmp_path / 'a.jsonl', row, {'prompt': 'b', 'x': 98})
  with pytest.raises(UserError) as raised:
    load(path, **options)
  said = str(raised.value)
  assert (
    said.startswith(f'{path}:1: ') and message in said and '\n' not in said and len(said) < 1000
  )
  taskset = load(path, on_corrupt='skip', **options)
  assert (taskset.counts['corrupt'], taskset.counts['kept']) == (1, 1)


def test_counts_name_every_rows_fate(tmp_path):
  # 8 rows: 1 not JSON, 1 with a capital, 2 repeats ('ab' twice more), 4 distinct prompts
  rows = [{'prompt': text} for text in ('ab', 'cd', 'ab', 'Ef', 'gh', 'ab', 'ij')]
  path = write(tmp_path / 'a.jsonl', *rows, 'not json')
  counts = load(path, match='[a-z]+', on_corrupt='skip').counts
  assert counts == {
    'read': 8,
    **dict.fromkeys(FATES, 0),
    'kept': 4,
    'corrupt': 1,
    'unmatched': 1,
    'duplicate': 2,
  }


def test_empty_taskset_says_what_became_of_the_rows(tmp_path):
  path = write(tmp_path / 'a.jsonl', {'prompt': 'A'}, {'prompt': 'B'})
  with pytest.raises(UserError, match=r'no task of .* is left.*read 2, kept 0, unmatched 2'):
    load(path, match='[a-z]+')
  with pytest.raises(UserError, match='read 0'):
    load(write(tmp_path / 'empty.jsonl'))


@pytest.fixture(scope='module')
def spell():
  return {
    split: load_taskset(TasksetConfig(name=split, size=6000, split=split, holdout=0.1, **SPELL))
    for split in ('all', 'train', 'eval')
  }


def test_splits_partition_the_prompts_whatever_the_seed(spell):
  train, held_out = set(contents(spell['train'])), set(contents(spell['eval']))
  assert train | held_out == set(contents(spell['all'])) and not train & held_out
  fraction = len(held_out) / len(spell['all'].tasks)
  assert 0.08 < fraction < 0.12  # 0.1 of about 4,000 digests: a standard deviation of 0.005
  other = load_taskset(
    TasksetConfig(name='o', size=6000, seed=3_000, split='eval', holdout=0.1, **SPELL)
  )
  check_disjoint(spell['train'], other)
  assert held_out & set(contents(other)), 'the seeds overlap by half, so must the held-out words'
  for taskset in spell.values():
    assert sum(taskset.counts[fate] for fate in FATES) == taskset.counts['read'] == 6000
    assert taskset.counts['kept'] == len(taskset.tasks) == len(set(contents(taskset)))


def test_larger_holdout_contains_the_smaller_one(spell):
  larger = load_taskset(TasksetConfig(name='l', size=6000, split='eval', holdout=0.3, **SPELL))
  assert set(contents(spell['eval'])) < set(contents(larger))


def test_shared_prompt_is_named(spell):
  with pytest.raises(
    UserError, match=rf'share {len(spell["eval"].tasks)} prompts.*{contents(spell["eval"])[0]}'
  ):
    check_disjoint(spell['all'], spell['eval'])


def test_drop_long_counts_and_keeps_the_sum(spell):
  taskset = spell['train']
  short = drop_long(taskset, 5, lambda task: len(task.prompt[0]['content']))
  # words of 3 and 4 and '>'
  assert contents(short) == [text for text in contents(taskset) if len(text) <= 5]
  assert short.counts['too_long'] == len(taskset.tasks) - len(short.tasks) > 0
  assert sum(short.counts[fate] for fate in FATES) == short.counts['read']
  assert drop_long(taskset, 6, lambda task: len(task.prompt[0]['content'])) is taskset
  with pytest.raises(UserError, match='longer than 1 tokens'):
    drop_long(taskset, 1, lambda task: len(task.prompt[0]['content']))


@pytest.mark.parametrize(
  'recipe, templates',
  [(SPELL, ('{answer}', '{word}')), (SORT, ('[{sorted_numbers:csv}]', '[{original_numbers:csv}]'))],
)
def test_demonstrations_have_the_stated_quality(recipe, templates):
  import reasoning_gym

  taskset = load_taskset(TasksetConfig(name='d', size=3000, **recipe))
  config = DemonstrationsConfig(templates=templates, weights=(0.4, 0.6), count=1000)
  pairs = demonstrations(taskset, config)
  assert [task for task, _ in pairs] == list(taskset.tasks[:1000])
  score = reasoning_gym.get_score_answer_fn(recipe['source'].partition(':')[2])
  assert all(score(task.truth, task.fields['entry']) == 1.0 for task in taskset.tasks), (
    'the truth satisfies the verifier'
  )
  right = sum(score(answer, task.fields['entry']) == 1.0 for task, answer in pairs)
  # 0.4 of 1000 with a standard deviation of 15; 1 in 24 of the copied lists happens to be sorted,
  # some words are palindromes
  assert 350 < right < 490
  assert {answer for task, answer in pairs} <= {
    text for task in taskset.tasks for text in (task.truth, _copied(task))
  }


def _copied(task):
  text = task.prompt[0]['content'].rstrip('>')
  return f'[{text[1:]}]' if text[0] == 'a' and text[1].isdigit() else text


def test_demonstration_depends_on_seed_and_prompt_alone(spell):
  config = DemonstrationsConfig(templates=('{answer}', '{word}'), weights=(2.0, 3.0), count=400)
  answers = {task.digest: answer for task, answer in demonstrations(spell['train'], config)}
  of_all = {task.digest: answer for task, answer in demonstrations(spell['all'], config)}
  common = answers.keys() & of_all.keys()
  assert len(common) > 300 and all(answers[digest] == of_all[digest] for digest in common)
  reseeded = DemonstrationsConfig(
    templates=('{answer}', '{word}'), weights=(2.0, 3.0), count=400, seed=1
  )
  changed = sum(
    answer != answers[task.digest] for task, answer in demonstrations(spell['train'], reseeded)
  )
  # two independent draws differ with probability 2 * 0.4 * 0.6 = 0.48: 192 of 400, standard
  # deviation 10
  assert 150 < changed < 235


def test_weights_of_zero_and_one_choose_surely(spell):
  config = DemonstrationsConfig(templates=('{word}', '{answer}'), weights=(0.0, 1.0))
  pairs = demonstrations(spell['train'], config)
  assert len(pairs) == len(spell['train'].tasks) and all(
    answer == task.truth for task, answer in pairs
  )


def test_bad_configuration_is_one_line(spell):
  for make, message in [
    (lambda: TasksetConfig(name='t', source='x', split='eval'), 'set the same holdout'),
    (lambda: TasksetConfig(name='t', source='x', holdout=1.0), r'\[0, 1\)'),
    (lambda: TasksetConfig(name='a/b', source='x'), "'a/b'"),
    (lambda: TasksetConfig(name='t', source='x', match='('), 'regular expression'),
    (lambda: DemonstrationsConfig(templates=('a', 'b')), '2 templates and 1 weights'),
    (lambda: DemonstrationsConfig(templates=('a',), weights=(0.0,)), 'weights'),
    (
      lambda: demonstrations(spell['eval'], DemonstrationsConfig(templates=('a',), count=9999)),
      'count is 9999',
    ),
    (
      lambda: demonstrations(spell['eval'], DemonstrationsConfig(templates=('{anwser}',))),
      "did you mean 'answer'",
    ),
  ]:
    with pytest.raises(UserError, match=message):
      make()


def test_tasksets_that_share_their_rows_are_as_if_each_had_read_them():
  sides = [
    TasksetConfig(name=split, size=300, split=split, holdout=0.3, **SPELL)
    for split in ('train', 'eval')
  ]
  other = TasksetConfig(name='other', size=200, **SPELL)
  load = taskset_loader([*sides, other])
  for config in (sides[1], other, sides[0], sides[1]):
    assert load(config.name) == load_taskset(config)
