"""Handmade rows of APPS, CodeContests and LiveCodeBench become tasks of the scorer `code`."""

import base64
import json
import os
import pickle
import zlib

import hostile
import pytest
from fixtures.rewards_scorers import attempt
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.sandbox.comparison import Tolerance
from jaxrl_llm.rewards.sandbox.isolation import NoIsolation
from jaxrl_llm.rewards.sandbox.rows import read_tests
from jaxrl_llm.rewards.sandbox.sandbox import Case
from jaxrl_llm.rewards.scorers.code import code_scorer
from jaxrl_llm.tasks import code_rows
from jaxrl_llm.tasks.code_rows import convert, unpickled_text
from jaxrl_llm.tasks.taskset import TasksetConfig, load_taskset

APPS = {
  'problem_id': 7,
  'question': 'Double the number.',
  'solutions': '["print(2 * int(input()))"]',
  'input_output': json.dumps({'inputs': ['1\n', ['2', '3']], 'outputs': ['2\n', ['4', '6']]}),
  'difficulty': 'interview',
  'url': 'https://example.org/7',
  'starter_code': '',
}
APPS_CALL = APPS | {
  'input_output': json.dumps(
    {'fn_name': 'pairs', 'inputs': [[2], [0]], 'outputs': [[[[0, 1], [1, 2]]], [[]]]}
  ),
  'starter_code': '\ndef pairs(n):\n\t',
}
CONTESTS = {
  'name': '1_A. Doubling',
  'description': 'Double the number.',
  'public_tests': {'input': ['1\n'], 'output': ['2\n']},
  'private_tests': {'input': ['5\n'], 'output': ['10\n']},
  'generated_tests': {'input': [], 'output': []},
  'source': 2,
  'difficulty': 7,
  'solutions': {'language': [3], 'solution': ['print(2 * int(input()))']},
  'time_limit': {'seconds': 1, 'nanos': 500_000_000},
  'memory_limit_bytes': 256_000_000,
  'input_file': '',
  'output_file': '',
}
STDIN = [{'input': '1\n', 'output': '2\n', 'testtype': 'stdin'}]
MORE = [{'input': '4\n', 'output': '8\n', 'testtype': 'stdin'}]
FUNCTIONAL = [{'input': '[1, 2]\n3', 'output': '[4, 5]', 'testtype': 'functional'}]


def packed(tests, pickled=None) -> str:
  """Private tests as LiveCodeBench has them."""
  pickled = pickle.dumps(json.dumps(tests)) if pickled is None else pickled
  return base64.b64encode(zlib.compress(pickled)).decode()


LIVE = {
  'question_title': 'Doubling',
  'question_content': 'Double the number.',
  'platform': 'atcoder',
  'question_id': 'abc1_a',
  'contest_date': '2024-01-01T00:00:00',
  'starter_code': '',
  'difficulty': 'easy',
  'public_test_cases': json.dumps(STDIN),
  'private_test_cases': packed(MORE),
  'metadata': '{}',
}
LIVE_CALL = LIVE | {
  'starter_code': 'class Solution:\n    def addAll(self, xs: List[int], n: int) -> List[int]:\n',
  'public_test_cases': json.dumps(FUNCTIONAL),
  'private_test_cases': json.dumps(FUNCTIONAL),
  'metadata': json.dumps({'func_name': 'addAll'}),
}


def test_rows_of_apps_by_hand():
  row = convert(APPS, 'apps')
  tolerance = Tolerance(absolute=1e-8, relative=1e-5)
  assert read_tests(row).cases == (
    Case(stdin='1\n', stdout='2\n', tolerance=tolerance),
    Case(stdin='2\n3', stdout='4\n6', tolerance=tolerance),
  )
  assert row['prompt'].startswith('Double the number.\n\nWrite a Python program that reads')
  assert row['ability'] == 'code' and row['difficulty'] == 'interview' and 'solutions' not in row
  call = convert(APPS_CALL, 'apps')
  assert call['entry_point'] == 'pairs' and '```python\n\ndef pairs(n):\n```' in call['prompt']
  assert call['tests'] == [
    'assert pairs(2) in [[[[0, 1], [1, 2]]], ([[0, 1], [1, 2]],), [([0, 1], [1, 2])], '
    '[[0, 1], [1, 2]], ([0, 1], [1, 2]), [(0, 1), (1, 2)]]',
    'assert pairs(0) in [[[]], ([],), [()], [], ()]',
  ]


def test_rows_of_code_contests_by_hand():
  row = convert(CONTESTS, 'code_contests')
  limits = {'cpu_s': 1.5, 'memory_mib': 244}
  assert read_tests(row).cases == (
    Case(stdin='1\n', stdout='2\n', **limits),
    Case(stdin='5\n', stdout='10\n', **limits),
  )
  assert row['name'] == '1_A. Doubling' and 'solutions' not in row
  free = convert(CONTESTS | {'time_limit': None, 'memory_limit_bytes': 0}, 'code_contests')
  assert 'limits' not in free


@pytest.mark.parametrize('protocol', [2, 3, 4, 5])
def test_rows_of_livecodebench_by_hand(protocol):
  private = packed(None, pickle.dumps(json.dumps(MORE), protocol=protocol))
  row = convert(LIVE | {'private_test_cases': private}, 'livecodebench')
  assert read_tests(row).cases == (Case(stdin='1\n', stdout='2\n'), Case(stdin='4\n', stdout='8\n'))
  call = convert(LIVE_CALL, 'livecodebench')
  assert call['tests'] == ['assert Solution().addAll([1, 2], 3) in [[4, 5], (4, 5)]'] * 2
  assert call['entry_point'] == 'Solution().addAll'


RIGHT = [
  (APPS, 'apps', 'import sys\nfor line in sys.stdin: print(2 * int(line))'),
  (APPS_CALL, 'apps', 'def pairs(n): return [(i, i + 1) for i in range(n)]'),
  (CONTESTS, 'code_contests', 'print(2 * int(input()))'),
  (LIVE, 'livecodebench', 'print(2 * int(input()))'),
  (
    LIVE_CALL,
    'livecodebench',
    'class Solution:\n  def addAll(self, xs: List[int], n: int): return tuple(x + n for x in xs)',
  ),
]


@pytest.mark.parametrize(('fields', 'form', 'program'), RIGHT)
def test_right_programs_pass_and_wrong_ones_fail(fields, form, program, tmp_path):
  file = tmp_path / 'rows.jsonl'
  file.write_text(json.dumps(fields))
  (task,) = load_taskset(TasksetConfig(name='t', source=str(file), form=form)).tasks
  try:
    scorer = code_scorer(cpu_factor=3.0)
  except NoIsolation as error:
    hostile.skip_where_this_machine_forbids(error)
  text = task.prompt[-1]['content']
  imports = 'from typing import List\n'
  right = attempt(f'{imports}{program}', domain='code', fields=task.fields, prompt=text)
  wrong = attempt(
    imports + program.replace('2 *', '3 *').replace('i + 1', 'i + 2').replace('x + n', 'n'),
    domain='code',
    fields=task.fields,
    prompt=text,
  )
  assert task.domain == 'code' and scorer(right).value == 1.0
  assert scorer(wrong).value == 0.0


class Touches:
  """A pickle of this creates a file where it is loaded."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return os.system, (f'touch {self.path}',)


def test_a_pickle_is_never_loaded(tmp_path):
  canary = tmp_path / 'canary'
  hostile_rows = [pickle.dumps(Touches(canary), protocol=protocol) for protocol in range(6)]
  hostile_rows += [pickle.dumps([json.dumps(MORE)]), pickle.dumps(3), b'', b'.', b'\x80\x04']
  hostile_rows.append(b'\x80\x04\x8c\x02[]0' + pickle.dumps(Touches(canary))[2:])
  for pickled in hostile_rows:
    with pytest.raises(ValueError, match='private_test_cases'):
      convert(LIVE | {'private_test_cases': packed(None, pickled)}, 'livecodebench')
  assert not canary.exists()
  assert unpickled_text(pickle.dumps('ü' * 300)) == 'ü' * 300


def test_compressed_tests_are_expanded_up_to_a_limit(monkeypatch):
  monkeypatch.setattr(code_rows, 'MAX_TESTS_BYTES', 1 << 16)
  bomb = packed(None, b'\0' * (1 << 24))
  with pytest.raises(ValueError, match='expands to more than 65,536 bytes'):
    convert(LIVE | {'private_test_cases': bomb}, 'livecodebench')


DEEP = '[' * 200 + ']' * 200


@pytest.mark.parametrize(
  ('form', 'change', 'reason'),
  [
    ('apps', {'question': None}, 'has no question'),
    ('apps', {'input_output': ''}, 'input_output is not JSON'),
    ('apps', {'input_output': '[]'}, 'input_output is \\[\\], wanted an object'),
    ('apps', {'input_output': '{"inputs": [], "outputs": []}'}, 'has no tests'),
    ('apps', {'input_output': '{"inputs": ["1"], "outputs": []}'}, '1 inputs and 0 outputs'),
    ('apps', {'input_output': '{"inputs": [1], "outputs": ["2"]}'}, 'an input or output is 1'),
    (
      'apps',
      {'input_output': '{"fn_name": "f(); x", "inputs": [[1]], "outputs": [2]}'},
      'fn_name is',
    ),
    ('apps', {'input_output': '{"fn_name": "f", "inputs": [1], "outputs": [2]}'}, 'an input of fn'),
    (
      'apps',
      {'input_output': '{"fn_name": "f", "inputs": [[NaN]], "outputs": [2]}'},
      'NaN is not JSON',
    ),
    ('apps', {'input_output': '{"inputs": ["1"], "outputs": [1e999]}'}, 'beyond the range'),
    ('apps', {'input_output': DEEP}, 'input_output'),
    ('code_contests', {'description': 3}, 'description is 3, wanted text'),
    ('code_contests', {'public_tests': {'input': ['1']}}, 'has no output'),
    ('code_contests', {'input_file': 'in.txt'}, "input_file is 'in.txt'"),
    ('code_contests', {'time_limit': {'seconds': -1}}, 'seconds is -1'),
    ('code_contests', {'public_tests': None, 'private_tests': None}, 'has no tests'),
    ('livecodebench', {'private_test_cases': 'no base64!'}, 'neither JSON nor base64 of zlib'),
    ('livecodebench', {'private_test_cases': packed(MORE)[:-8]}, 'private_test_cases'),
    ('livecodebench', {'private_test_cases': packed({'a': 1})}, 'wanted a list of objects'),
    ('livecodebench', {'public_test_cases': '[{}]'}, 'has no input'),
    ('livecodebench', {'public_test_cases': json.dumps(FUNCTIONAL)}, 'its tests have the types'),
  ],
)
def test_malformed_rows_are_one_line(form, change, reason, tmp_path):
  row = {'apps': APPS, 'code_contests': CONTESTS, 'livecodebench': LIVE}[form] | change
  file = tmp_path / 'rows.jsonl'
  file.write_text(json.dumps(row) + '\n')
  with pytest.raises(UserError, match=reason) as refused:
    load_taskset(TasksetConfig(name='t', source=str(file), form=form))
  message = str(refused.value)
  assert message.startswith(f'{file}:1: ') and '\n' not in message and len(message) < 500


def test_functional_rows_name_their_method():
  with pytest.raises(ValueError, match=r'metadata.func_name is None'):
    convert(LIVE_CALL | {'metadata': '{}'}, 'livecodebench')


def test_a_malformed_row_may_be_skipped(tmp_path):
  file = tmp_path / 'rows.jsonl'
  file.write_text(f'{json.dumps(APPS)}\n{json.dumps(APPS | {"input_output": "{"})}\n')
  config = TasksetConfig(name='t', source=str(file), form='apps', on_corrupt='skip')
  assert load_taskset(config).counts['corrupt'] == 1


VALUES = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
  lambda inner: (
    st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
  ),
  max_leaves=8,
)


@given(st.data())
def test_any_other_value_of_a_field_is_converted_or_refused(data):
  fields, form, _ = data.draw(st.sampled_from(RIGHT))
  name = data.draw(st.sampled_from(sorted(fields)))
  value = data.draw(VALUES)
  changed = fields | {name: data.draw(st.sampled_from([value, json.dumps(value)]))}
  try:
    row = convert(changed, form)
  except ValueError:
    return
  assert isinstance(row['prompt'], str) and read_tests(row) is not None
