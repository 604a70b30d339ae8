import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jaxrl_llm.config.values import from_json, to_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Source, decode, encode
from jaxrl_llm.rollout.workflow import demonstration_sample
from jaxrl_llm.tasks.preferences import (
  PreferencesConfig,
  load_preferences,
  pairs_of_tasks,
  preference_samples,
)
from jaxrl_llm.tasks.taskset import TasksetConfig, load_taskset
from jaxrl_llm.tasks.tokenizer import TokenizerConfig, build_tokenizer

FATES = ('kept', 'corrupt', 'identical', 'duplicate', 'other_split')


def user(text):
  return {'role': 'user', 'content': text}


def assistant(text):
  return {'role': 'assistant', 'content': text}


SYSTEM = {'role': 'system', 'content': 's'}
TEXT = {'prompt': 'q', 'chosen': 'good', 'rejected': 'bad'}
CHAT = {
  'prompt': [SYSTEM, user('q')],
  'chosen': [assistant('good')],
  'rejected': [assistant('bad')],
}
WHOLE = {
  'chosen': [SYSTEM, user('q'), assistant('good')],
  'rejected': [SYSTEM, user('q'), assistant('bad')],
}
TURNS = {
  'chosen': [user('a'), assistant('b'), user('q'), assistant('good')],
  'rejected': [user('a'), assistant('b'), user('q'), assistant('bad')],
}


def write(path, *rows):
  path.write_text('\n'.join(row if isinstance(row, str) else json.dumps(row) for row in rows))
  return str(path)


def load(path, **kwargs):
  return load_preferences(PreferencesConfig(name='p', source=str(path), **kwargs))


def told(pair):
  return [f'{m["role"]}:{m["content"]}' for m in pair.task.prompt], pair.chosen, pair.rejected


@pytest.mark.parametrize(
  'row, prompt',
  [
    (TEXT, ['user:q']),
    (CHAT, ['system:s', 'user:q']),
    (WHOLE, ['system:s', 'user:q']),
    # a prompt of text beside whole conversations is their title
    ({**WHOLE, 'prompt': 'q'}, ['system:s', 'user:q']),
    ({**CHAT, 'prompt': 'q'}, ['user:q']),
    ({**CHAT, 'chosen': 'good', 'rejected': 'bad'}, ['system:s', 'user:q']),
    (TURNS, ['user:a', 'assistant:b', 'user:q']),
  ],
)
def test_each_shape_of_row_becomes_the_pair_it_states(tmp_path, row, prompt):
  (pair,) = load(write(tmp_path / 'a.jsonl', row)).pairs
  assert told(pair) == (prompt, 'good', 'bad')
  assert pair.task.fields == row and pair.task.taskset == 'p' and pair.task.truth is None


def test_parquet_rows_are_the_same_pairs(tmp_path):
  rows = [CHAT, {**CHAT, 'prompt': [user('other'), user('two')]}]
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / 'a.parquet')
  from_parquet = load(tmp_path / 'a.parquet').pairs
  from_jsonl = load(write(tmp_path / 'a.jsonl', *rows)).pairs
  assert [(pair.uid, told(pair)) for pair in from_parquet] == [
    (pair.uid, told(pair)) for pair in from_jsonl
  ]


def test_templates_replace_the_rows_own_fields(tmp_path):
  row = {
    'question': 'q',
    'good': 'a',
    'bad': 'b',
    'extra_info': {'i': 4},
    'ability': 'math',
    'prompt': [SYSTEM],
  }
  path = write(tmp_path / 'a.jsonl', row)
  (pair,) = load(
    path, prompt='{question}?', chosen='{good}{i}', rejected='{bad}', group='number {i}'
  ).pairs
  assert told(pair) == (['system:s', 'user:q?'], 'a4', 'b')
  assert pair.group == 'number 4' and pair.task.domain == 'math'
  (whole,) = load(write(tmp_path / 'b.jsonl', WHOLE), prompt='other').pairs
  assert told(whole) == (['system:s', 'user:other'], 'good', 'bad')


CORRUPT = [
  ('{"prompt": ', 'Expecting value'),
  ('[1]', 'JSON list'),
  ({**TEXT, 'chosen': None}, 'chosen is null'),
  ({**TEXT, 'rejected': ' \n'}, 'rejected is empty'),
  ({**TEXT, 'prompt': 3}, 'prompt is 3'),
  ({**TEXT, 'prompt': ' '}, 'prompt is empty'),
  ({**TEXT, 'chosen': '\ud800'}, 'surrogate'),
  ({**TEXT, 'unused': '\ud800'}, 'surrogate'),
  (f'{{"prompt": {"[" * 9_999}{"]" * 9_999}}}', 'nested more than 100 levels'),
  ({'reasoning_gym': 'x'}, "'reasoning_gym' without an entry"),
  ({**CHAT, 'prompt': [user('q'), assistant('a')]}, "prompt must end with.*'user', 'assistant'"),
  ({**CHAT, 'chosen': []}, r'chosen must end with .*\[\]'),
  ({**CHAT, 'chosen': [user('good')]}, r"chosen must end with .*\['user'\]"),
  ({**CHAT, 'chosen': [{'role': 'assistant', 'content': ['image']}]}, 'chosen message .* is not'),
  ({**WHOLE, 'prompt': [user('q')]}, "prompt has messages.*'system', 'user'"),
  ({**WHOLE, 'rejected': [SYSTEM, user('another'), assistant('bad')]}, 'no prompt in common'),
  ({**WHOLE, 'rejected': [assistant('bad')]}, 'no prompt in common'),
  ({**WHOLE, 'chosen': [assistant('good')], 'rejected': [assistant('bad')]}, "lacks 'prompt'"),
]


@pytest.mark.parametrize('row, reason', CORRUPT)
def test_corrupt_row_is_fatal_with_its_place_or_skipped_and_counted(tmp_path, row, reason):
  path = write(tmp_path / 'a.jsonl', {**TEXT, 'prompt': 'a'}, row, {**TEXT, 'prompt': 'b'})
  with pytest.raises(UserError, match=rf'a\.jsonl:2: .*{reason}.*on_corrupt') as error:
    load(path)
  assert '\n' not in str(error.value)
  preferences = load(path, on_corrupt='skip')
  assert [pair.task.prompt[0]['content'] for pair in preferences.pairs] == ['a', 'b']
  assert preferences.counts == {
    'read': 3,
    'kept': 2,
    'corrupt': 1,
    'identical': 0,
    'duplicate': 0,
    'other_split': 0,
  }


def test_missing_field_names_the_nearest_one(tmp_path):
  path = write(tmp_path / 'a.jsonl', {'prompt': 'q', 'choosen': 'a', 'rejected': 'b'})
  with pytest.raises(
    UserError, match=r"a\.jsonl:1: the row lacks 'chosen'; did you mean 'choosen'\?"
  ):
    load(path)
  with pytest.raises(
    UserError, match=r"names 'chose', which the row lacks; did you mean 'choosen'\?"
  ):
    load(path, chosen='{chose}')
  with pytest.raises(UserError, match=r"names 'idd', which the row lacks"):
    load(path, chosen='{choosen}', group='{idd}')
  assert load(path, chosen='{choosen}').pairs[0].chosen == 'a'


def test_counts_name_every_rows_fate(tmp_path):
  # 10 rows: 2 corrupt, 1 identical, 2 repeats (one of them in another shape), 5 pairs of three
  # prompts
  rows = [
    TEXT,
    {**TEXT, 'chosen': 'better'},
    {**TEXT, 'rejected': 'worse'},
    TEXT,
    {**TEXT, 'prompt': [user('q')]},
    {**TEXT, 'rejected': 'good'},
    {**TEXT, 'prompt': 'r'},
    {**TEXT, 'prompt': 's'},
    'not json',
    {'text': 'x'},
  ]
  preferences = load(write(tmp_path / 'a.jsonl', *rows), on_corrupt='skip')
  assert preferences.counts == {
    'read': 10,
    'kept': 5,
    'corrupt': 2,
    'identical': 1,
    'duplicate': 2,
    'other_split': 0,
  }
  assert len({pair.uid for pair in preferences.pairs}) == 5
  assert len({pair.group for pair in preferences.pairs}) == 3


def test_size_is_how_many_rows_are_read(tmp_path):
  path = write(tmp_path / 'a.jsonl', *({**TEXT, 'prompt': str(i)} for i in range(5)))
  assert load(path, size=3).counts['read'] == len(load(path, size=3).pairs) == 3


def test_no_pair_left_says_what_became_of_the_rows(tmp_path):
  path = write(tmp_path / 'a.jsonl', {**TEXT, 'rejected': 'good'}, 'x')
  with pytest.raises(
    UserError, match=r'no pair of .* is left: read 2, kept 0, corrupt 1, identical 1'
  ):
    load(path, on_corrupt='skip')


@pytest.fixture(scope='module')
def many(tmp_path_factory):
  """Three pairs for each of 600 prompts; two prompts to a `topic`."""
  rows = [
    {'prompt': f'q{i}', 'topic': i // 2, 'chosen': f'good {j}', 'rejected': f'bad {j}'}
    for j in range(3)
    for i in range(600)
  ]
  return write(tmp_path_factory.mktemp('many') / 'a.jsonl', *rows)


def uids(preferences):
  return {pair.uid for pair in preferences.pairs}


def groups(preferences):
  return {pair.group for pair in preferences.pairs}


def counts_add_up(preferences):
  return sum(preferences.counts[fate] for fate in FATES) == preferences.counts['read']


@pytest.mark.parametrize('group, total', [(None, 600), ('{topic}', 300)])
def test_holdout_splits_pairs_by_group(many, group, total):
  everything, train, held_out = (
    load(many, split=s, holdout=0.2, group=group) for s in ('all', 'train', 'eval')
  )
  assert uids(train) | uids(held_out) == uids(everything) and not uids(train) & uids(held_out)
  assert groups(train) | groups(held_out) == groups(everything) and not groups(train) & groups(
    held_out
  )
  assert len(groups(everything)) == total
  assert 0.1 < len(groups(held_out)) / total < 0.3  # at 300 groups a standard deviation of 0.023
  assert all(map(counts_add_up, (everything, train, held_out)))
  assert groups(held_out) < groups(load(many, split='eval', holdout=0.3, group=group))


@pytest.mark.parametrize('group, total', [(None, 600), ('{topic}', 300)])
def test_folds_partition_the_groups_and_train_is_the_rest(many, group, total):
  seen = []
  for fold in range(4):
    train, held_out = (
      load(many, split=split, fold=fold, folds=4, group=group) for split in ('train', 'eval')
    )
    assert not groups(train) & groups(held_out) and not uids(train) & uids(held_out)
    assert len(uids(train) | uids(held_out)) == 1_800
    assert 0.15 < len(groups(held_out)) / total < 0.35  # a standard deviation of 0.025
    assert counts_add_up(train) and counts_add_up(held_out)
    seen.append(groups(held_out))
  assert sum(map(len, seen)) == len(set.union(*seen)) == total


def test_prompts_held_out_are_those_that_a_taskset_holds_out(many):
  config = dict(source=many, split='eval', holdout=0.2)
  taskset = load_taskset(TasksetConfig(name='t', **config))
  preferences = load_preferences(PreferencesConfig(name='p', **config))
  assert {pair.task.digest for pair in preferences.pairs} == {task.digest for task in taskset.tasks}


def test_a_prompt_in_two_groups_is_refused_where_there_is_a_split(tmp_path):
  rows = [{**TEXT, 'id': 'x'}, {**TEXT, 'chosen': 'better', 'id': 'y'}]
  path = write(tmp_path / 'a.jsonl', *rows)
  for split in (dict(split='train', holdout=0.5), dict(split='eval', fold=0)):
    with pytest.raises(
      UserError, match=r"a\.jsonl:2: .*group 'y' and, in an earlier row, in 'x'.*'\{id\}'"
    ):
      load(path, group='{id}', **split)
  assert [pair.group for pair in load(path, group='{id}').pairs] == ['x', 'y']
  with pytest.raises(UserError, match=r'the template .* gives it an empty group'):
    load(path, group=' ')


@pytest.mark.parametrize(
  'fields, message',
  [
    (dict(name='a b'), 'wanted letters'),
    (dict(source='reasoning_gym:spell_backward'), "write 'taskset:"),
    (dict(holdout=1.0), r'holdout is 1\.0'),
    (dict(split='eval'), 'neither holdout nor fold'),
    (dict(split='eval', fold=5), 'fold is 5 of 5'),
    (dict(split='eval', fold=-1), 'fold is -1 of 5'),
    (dict(split='eval', fold=0, folds=1), 'at least 2 folds'),
    (dict(split='train', fold=0, holdout=0.1), 'remove one'),
    (dict(fold=0), "split is 'all'"),
  ],
)
def test_settings_that_contradict_each_other_are_refused(fields, message):
  with pytest.raises(UserError, match=message) as error:
    PreferencesConfig(**{'name': 'p', 'source': 'a.jsonl', **fields})
  assert '\n' not in str(error.value)


def test_config_is_json_and_back():
  config = PreferencesConfig(
    name='p', source='a.jsonl', split='eval', fold=1, group='{id}', origin='synthetic'
  )
  assert from_json(to_json(config), PreferencesConfig) == config


def test_missing_file_is_named(tmp_path):
  write(tmp_path / 'pairs.jsonl', TEXT)
  with pytest.raises(UserError, match=r'did you mean .*pairs\.jsonl'):
    load(tmp_path / 'pair.jsonl')
  with pytest.raises(ValueError, match='pairs_of_tasks'):
    load('taskset:words')


@pytest.fixture(scope='module')
def words():
  return load_taskset(
    TasksetConfig(
      name='words',
      source='reasoning_gym:spell_backward',
      options={'min_word_len': 3, 'max_word_len': 4},
      prompt='{word}>',
      truth='{answer}',
      size=400,
    )
  )


def test_pairs_of_tasks_have_the_right_and_a_wrong_answer(words):
  preferences = pairs_of_tasks(
    words, chosen='{answer}', rejected=('{word}', '{answer}!'), seed=0, count=300
  )
  kept = {pair.task.uid: pair for pair in preferences.pairs}
  wrongs = set()
  for task in words.tasks[:300]:
    word = task.fields['entry']['metadata']['word']
    if task.uid not in kept:
      # answers alike are possible only for a palindrome that drew '{word}'
      assert word == word[::-1]
      continue
    pair = kept[task.uid]
    assert pair.task is task and pair.chosen == word[::-1] and pair.group == task.digest
    assert pair.rejected in (word, word[::-1] + '!')
    wrongs.add(pair.rejected.endswith('!'))
  assert wrongs == {True, False}
  assert preferences.counts['read'] == 300 and counts_add_up(preferences)
  assert preferences.counts['kept'] == len(preferences.pairs) == len(uids(preferences))


def test_tasks_whose_answers_are_alike_are_left_out_and_counted(words):
  palindromes = [t for t in words.tasks if t.truth == t.truth[::-1]]
  assert palindromes, 'the test needs one'
  preferences = pairs_of_tasks(words, chosen='{answer}', rejected=('{word}',), name='backward')
  assert preferences.counts['identical'] == len(palindromes) and counts_add_up(preferences)
  assert not {t.uid for t in palindromes} & {pair.task.uid for pair in preferences.pairs}
  assert preferences.name == 'backward' and all(
    uid.startswith('backward:') for uid in uids(preferences)
  )


def test_wrong_answer_depends_on_seed_and_prompt_alone(words):
  def rejected(seed, count=None):
    made = pairs_of_tasks(
      words, chosen='{answer}', rejected=('{answer}!', '{answer}?'), seed=seed, count=count
    )
    return {pair.task.uid: pair.rejected for pair in made.pairs}

  first, second = rejected(0), rejected(1)
  assert rejected(0, 50).items() < first.items()
  assert 0.3 < sum(first[uid] != second[uid] for uid in first) / len(first) < 0.7


def test_pairs_of_tasks_refuses_what_does_not_fit(words):
  with pytest.raises(UserError, match=r'count is 9999, but taskset words has'):
    pairs_of_tasks(words, chosen='{answer}', rejected=('{word}',), count=9999)
  with pytest.raises(UserError, match=r"task words:\w+: .*did you mean 'word'"):
    pairs_of_tasks(words, chosen='{answer}', rejected=('{wrod}',))
  with pytest.raises(UserError, match='at least one'):
    pairs_of_tasks(words, chosen='{answer}', rejected=())
  with pytest.raises(UserError, match=r'no pair of taskset words is left'):
    pairs_of_tasks(words, chosen='{answer}', rejected=('{answer}',))


@pytest.mark.parametrize('template', ['plain', 'chatml'])
def test_samples_have_the_tokens_of_demonstrations(tmp_path, template):
  tokenizer = build_tokenizer(
    TokenizerConfig(kind='bpe', template=template, vocab_size=300), ['good bad q'], tmp_path
  )
  rows = [CHAT, {**CHAT, 'chosen': [assistant('good 日本')]}]
  pairs = load(write(tmp_path / 'a.jsonl', *rows)).pairs
  for pair in pairs:
    samples = preference_samples(pair, tokenizer)
    for sample, label, answer in zip(
      samples, ('chosen', 'rejected'), (pair.chosen, pair.rejected), strict=True
    ):
      expected = demonstration_sample(pair.task, answer, tokenizer, number=0)
      for name in ('tokens', 'loss_mask', 'role', 'sampled', 'behaviour_logprobs'):
        np.testing.assert_array_equal(getattr(sample, name), getattr(expected, name))
      assert (
        sample.prompt_len == expected.prompt_len == len(tokenizer.render_prompt(pair.task.prompt))
      )
      assert (
        sample.loss_mask.sum() == len(sample.tokens) - sample.prompt_len
        and sample.tokens[-1] == tokenizer.eos_id
      )
      assert tokenizer.decode(sample.tokens[sample.loss_mask].tolist()) == answer
      assert sample.preference == {'pair_id': pair.uid, 'label': label}
      assert (sample.task_id, sample.group_id, sample.source) == (
        pair.task.uid,
        pair.uid,
        Source.HUMAN,
      )
      assert decode(encode(sample)).preference == sample.preference
  made = [sample.uid for pair in pairs for sample in preference_samples(pair, tokenizer)]
  assert len(set(made)) == 4, 'both pairs have the same rejected answer to the same prompt'
  again = [
    s.uid for pair in load(tmp_path / 'a.jsonl').pairs for s in preference_samples(pair, tokenizer)
  ]
  assert made == again


def test_origin_is_the_samples_source(tmp_path, words):
  tokenizer = build_tokenizer(TokenizerConfig(kind='bpe', vocab_size=300), ['x'], tmp_path)
  (stated,) = load(write(tmp_path / 'a.jsonl', TEXT), origin='synthetic').pairs
  procedural = pairs_of_tasks(words, chosen='{answer}', rejected=('{answer}!',), count=1).pairs[0]
  for pair in (stated, procedural):
    assert {sample.source for sample in preference_samples(pair, tokenizer)} == {Source.SYNTHETIC}
