"""Users' reward functions run unchanged: with what their framework gives them, in a worker like any
other scorer.
"""

import asyncio
import json
import os
import pickle
import subprocess
import sys

import pytest
from fixtures.rewards_scorers import attempt
from paths import FIXTURES, ROOT

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.score import Status
from jaxrl_llm.rewards.api import PerGroup, RewardsConfig, ScorerConfig, Verdict
from jaxrl_llm.rewards.pool.pool import ScorerPool
from jaxrl_llm.rewards.scorers.adapters import UserFunction, python_scorer, trl_scorer, verl_scorer

VERL, TRL, PYTHON = (f'{FIXTURES}/{name}_reward.py' for name in ('verl', 'trl', 'python'))
TALK = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'What is it?'}]


def verl(name, completion, *, truth='1234', fields=None, **options):
  return verl_scorer(function=f'{VERL}:{name}', **options)(
    attempt(completion, truth=truth, fields=fields)
  )


def trl(name, completion, *, truth='42', fields=None, **options):
  return trl_scorer(function=f'{TRL}:{name}', **options)(
    attempt(completion, truth=truth, fields=fields)
  )


@pytest.mark.parametrize(
  ('completion', 'value'), [('so #### 1,234', 1.0), ('so #### 1,235', 0.1), ('1234', 0.0)]
)
@pytest.mark.parametrize('name', ['compute_score', 'compute_score_async'])
def test_verls_number_is_the_value(name, completion, value):
  assert verl(name, completion) == Verdict(value=value)


def test_verls_dict_has_its_score_as_value_numbers_as_parts_and_the_rest_as_evidence():
  fields = {
    'data_source': 'school/sums',
    'extra_info': {'level': 3},
    'reward_model': {'ground_truth': 5},
  }
  said = verl(
    'compute_score_with_details', ' 5', truth='5', fields=fields, arguments={'penalty': 0.25}
  )
  assert (said.value, said.parts) == (0.75, {'acc': 1.0, 'level': 3.0})
  # The truth as the row has it, a number, not the text that the taskset made of it.
  assert said.evidence == {'pred': '5', 'source': 'school/sums', 'truth_type': 'int'}


def test_what_is_no_single_number_is_evidence_too():
  said = verl('compute_score_with_arrays', 'x')
  assert (said.value, said.parts) == (0.5, {'acc': 1.0})
  assert said.evidence == {'steps': 'array([0.5, 1. ])', 'count': 10**400, 'pairs': '{(1, 2): 3}'}


def test_what_a_row_does_not_say_is_the_tasksets_name_and_an_empty_extra_info():
  said = verl('compute_score_with_details', '5', truth='5')
  assert said.evidence == {'pred': '5', 'source': 't', 'truth_type': 'str', 'level': None}


def test_a_truth_that_the_taskset_made_itself_comes_before_the_rows():
  fields = {'reward_model': {'ground_truth': 5}}
  assert verl('compute_score_with_details', 'five', truth='five', fields=fields).value == 1.0


@pytest.mark.parametrize(
  ('name', 'told'),
  [('returns_text', "'good', wanted a number"), ('returns_no_score', 'wanted score')],
)
def test_what_verl_could_not_read_is_an_error(name, told):
  with pytest.raises((TypeError, KeyError), match=told):
    verl(name, 'x')


def test_trl_completions_look_as_the_rows_prompt_does():
  whole = '<think>a</think><answer>b</answer>'
  assert trl('format_reward_func', whole, fields={'prompt': TALK}) == Verdict(value=1.0)
  assert trl('format_reward_func', 'b', fields={'prompt': TALK}) == Verdict(value=0.0)
  assert trl('format_reward_func', whole, form='conversational').value == 1.0
  assert trl('boxed_reward_func', r'\boxed{42}', fields={'prompt': 'What?'}).value == 1.0
  assert trl('boxed_reward_func', r'\boxed{43}', form='plain', fields={'prompt': TALK}).value == 0.0


def test_trl_functions_get_the_rows_fields_as_columns_and_what_the_trainer_adds():
  fields = {'prompt': 'What is it?', 'difficulty': 'hard', 'completion': 'not this'}
  got = (
    "['What is it?'] ['x'] ['hard'] ['completion_ids', 'ground_truth', 'log_extra', 'log_metric', "
    "'trainer_state']"
  )
  with pytest.raises(ValueError) as raised:
    trl('says_what_it_got', 'x', fields=fields)
  assert str(raised.value) == got


def test_the_truth_comes_under_the_column_that_is_asked_for_unless_the_row_has_it():
  named = {'form': 'conversational', 'truth_column': 'solution'}
  assert trl('accuracy_reward', '42', **named).value == 1.0
  assert trl('accuracy_reward', '42', fields={'solution': '43'}, **named).value == 0.0


def test_trls_none_and_nan_are_unscorable_and_its_columns_evidence():
  said = trl(
    'accuracy_reward', '42', truth='no number', form='conversational', truth_column='solution'
  )
  evidence = {'reason': 'the function returned None', 'solution': 'no number', 'answer': '42'}
  assert (said.value, said.evidence) == (None, evidence)
  assert trl('not_a_number', 'x').value is None


def test_of_token_ids_there_is_the_number_and_nothing_else():
  assert trl('length_reward', 'abc') == Verdict(value=3.0, parts={'mean_length': 3.0})
  with pytest.raises(TypeError, match='the number of tokens, not their ids'):
    trl('first_token_reward', 'abc')


def test_a_function_without_kwargs_gets_what_it_has_parameters_for():
  assert trl('two_parameters', 'longer than the prompt').value == 1.0
  assert trl('two_parameters', 'short').value == 0.0


def test_a_list_of_another_length_is_an_error():
  with pytest.raises(ValueError, match='wanted a list of 1'):
    trl('too_few', 'x')


def test_trl_functions_that_compare_get_the_group():
  scorer = trl_scorer(function=f'{TRL}:best_of_batch', per_group=True)
  assert isinstance(scorer, PerGroup)
  group = tuple(attempt(text) for text in ('a', 'abc', 'ab'))
  assert [said.value for said in scorer.scorer(group, ((),) * 3)] == [0.0, 1.0, 0.0]


def python(name, completion, *, truth='42', fields=None, **options):
  return python_scorer(function=f'{PYTHON}:{name}', **options)(
    attempt(completion, truth=truth, fields=fields)
  )


def test_a_plain_function_may_say_true_a_number_a_dict_or_none():
  assert python('matches', '42') == Verdict(value=1.0)
  assert python('matches', '43') == Verdict(value=0.0)
  said = python('share', 'abba', arguments={'scale': 2.0})
  assert said == Verdict(value=1.0, parts={'as': 2.0}, evidence={'prompt': 'What is it?'})
  assert python('only_even', '4', truth='4', fields={'answer': 4}).value == 1.0
  assert python('only_even', '3', truth='3', fields={'answer': 3}).value is None


@pytest.mark.parametrize(
  ('make', 'options', 'told'),
  [
    (verl_scorer, {'function': 'compute_score'}, "'compute_score', wanted 'module:attribute' or"),
    (verl_scorer, {'function': f'{VERL}:compute_scor'}, "the file defines no 'compute_scor'"),
    (verl_scorer, {'function': f'{FIXTURES}/verl.py:compute_score'}, 'verl.py: no such file'),
    (
      trl_scorer,
      {'function': 'nowhere.rewards:f'},
      "no module 'nowhere'; is its directory in PYTHONPATH",
    ),
    (trl_scorer, {'function': f'{TRL}:too_few', 'form': 'chat'}, "got 'chat'"),
    (trl_scorer, {'function': f'{TRL}:too_few', 'per_grup': True}, "did you mean 'per_group'"),
    (python_scorer, {}, 'needs a value for function'),
    (python_scorer, {'function': f'{PYTHON}:NUMBER'}, 'is a int, wanted a function'),
  ],
)
def test_what_names_no_function_is_one_line(make, options, told):
  with pytest.raises(UserError) as raised:
    make(**options)
  assert told in str(raised.value) and '\n' not in str(raised.value)


@pytest.mark.parametrize(
  ('text', 'told'),
  [
    ('def f(:\n  pass\n', 'broken.py:1: SyntaxError'),
    ('x = 1\ny = x / 0\n', 'broken.py:2: ZeroDivisionError'),
    ('import sys\nsys.exit(0)\n', 'broken.py:2: SystemExit: 0'),
  ],
)
def test_a_file_that_does_not_run_is_one_line_that_names_the_line(tmp_path, text, told):
  (tmp_path / 'broken.py').write_text(text)
  with pytest.raises(UserError, match=told):
    python_scorer(function=f'{tmp_path}/broken.py:f')


def test_a_file_that_did_not_run_is_run_again_once_it_is_mended(tmp_path):
  file = tmp_path / 'mended.py'
  file.write_text('def f(p, c, t): return 1\nx = 1 / 0\n')
  with pytest.raises(UserError, match='ZeroDivisionError'):
    python_scorer(function=f'{file}:f')
  file.write_text('def f(p, c, t): return 0.25\n')
  assert python_scorer(function=f'{file}:f')(attempt('x')).value == 0.25


def test_a_file_is_run_once_and_finds_what_lies_beside_it(tmp_path):
  (tmp_path / 'beside_a_reward.py').write_text('BONUS = 0.5\n')
  text = (
    'from beside_a_reward import BONUS\nprint("run")\ndef f(p, c, t): return BONUS\ndef g(p, c, '
    't): return 2 * BONUS\n'
  )
  (tmp_path / 'mine.py').write_text(text)
  script = (
    'from jaxrl_llm.rewards.scorers.adapters import UserFunction\n'
    'f, g = (UserFunction(f"mine.py:{n}", "python") for n in "fg")\n'
    'print(f(0, 0, 0), g(0, 0, 0), f.name)'
  )
  command = [sys.executable, '-c', script]
  done = subprocess.run(
    command, cwd=tmp_path, env={'PYTHONPATH': str(ROOT)}, capture_output=True, text=True, check=True
  )
  assert done.stdout == f'run\n0.5 1.0 {tmp_path}/mine.py:f\n'


def test_a_function_travels_by_its_name():
  function = UserFunction(f'{VERL}:compute_score', 'verl')
  assert len(pickle.dumps(function)) < 500
  assert pickle.loads(pickle.dumps(function))('d', '#### 7', '7') == 1.0


def test_they_run_in_the_pools_workers():
  scorers = {
    'verl': verl_scorer(function=f'{VERL}:compute_score_async'),
    'raises': verl_scorer(function=f'{VERL}:raises'),
    'trl': trl_scorer(function=f'{TRL}:best_of_batch', per_group=True),
    'python': python_scorer(function='fixtures.python_reward:matches'),
  }
  config = RewardsConfig(
    scorers=tuple(ScorerConfig(name=name, deadline_s=60.0) for name in scorers)
  )

  async def main():
    pool = ScorerPool(scorers, config)
    await pool.start()
    try:
      group = [attempt('#### 42', uid='a'), attempt('#### 41 or so', uid='b')]
      return await pool.score_group(group, [await pool.score(one) for one in group])
    finally:
      await pool.close()

  first, second = asyncio.run(main())
  assert [(s.scorer, s.value) for s in first] == [
    ('verl', 1.0),
    ('raises', None),
    ('trl', 0.0),
    ('python', 0.0),
  ]
  assert [s.value for s in second] == [0.1, None, 1.0, 0.0]
  assert first[1].status == Status.ERROR and 'ZeroDivisionError' in first[1].evidence['error']
  assert first[1].evidence['where'].startswith(f'{VERL}:')


@pytest.mark.full
def test_trls_own_functions_say_the_same_through_the_adapter(tmp_path):
  python = ROOT / '.venv-peers/bin/python'
  if not python.exists():
    pytest.skip('.venv-peers is missing: launch/install_peers.sh makes it')
  command = [python, ROOT / 'tests/peers/trl_rewards.py', tmp_path / 'said.json']
  env = {**os.environ, 'PYTHONPATH': str(ROOT)}
  process = subprocess.run(
    command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
  )
  assert process.returncode == 0, process.stderr[-3000:]
  thought, overlong = json.loads((tmp_path / 'said.json').read_text())
  assert thought['ours'] == thought['theirs'] == [1.0, 0.0, 0.0]
  assert overlong['ours'] == overlong['theirs'] == [-0.75] * 3
