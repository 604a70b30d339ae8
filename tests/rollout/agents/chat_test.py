"""Reading of agents' requests, apart from the sockets."""

import random

import pytest

from jaxrl_llm.core.net.server import Refusal
from jaxrl_llm.rollout.agents.chat import MessageReader, same_message


def call(uid, name):
  return {'id': uid, 'type': 'function', 'function': {'name': name, 'arguments': '{"a": 1}'}}


def result(uid):
  return {'role': 'tool', 'tool_call_id': uid, 'content': 'd'}


MESSAGES = (
  {'role': 'user', 'content': 'a'},
  {'role': 'developer', 'content': [{'type': 'text', 'text': 'b'}]},
  {'role': 'assistant', 'content': 'c'},
  {'role': 'assistant', 'content': None, 'tool_calls': [call('x', 'add')]},
  {'role': 'assistant', 'content': None, 'tool_calls': [call('x', 'subtract')]},
  {'role': 'assistant', 'content': 'e', 'tool_calls': [call('y', 'add')]},
  result('x'),
  result('y'),
  {'role': 'tool', 'content': 'f', 'name': 'add', 'tool_call_id': 'x'},
)
MALFORMED = ({'role': 'user'}, {'role': 'x', 'content': 'a'}, 1)


def read(reader, items):
  try:
    return reader(items)
  except Refusal as refusal:
    return str(refusal)


def test_a_request_is_read_the_same_after_any_other_requests():
  draw = random.Random(0)
  reader, items, repeated, refused = MessageReader(), [], 0, 0
  for _ in range(2000):
    kept = draw.choice([len(items), len(items), draw.randint(0, len(items))])
    pool = MALFORMED if draw.random() < 0.1 else MESSAGES
    items = [dict(item) if isinstance(item, dict) else item for item in items[:kept]]
    items = [item for item in items if item not in MALFORMED]
    items += draw.choices(pool, k=draw.randint(0, 3))
    whole = read(MessageReader(), items)
    assert read(reader, items) == whole
    refused += isinstance(whole, str)
    repeated += kept
    items = items if len(items) < 12 else []
  assert repeated > 2000 and 50 < refused < 500


@pytest.mark.parametrize('changed', [0, 1])
def test_tool_results_are_named_after_the_calls_of_their_own_history(changed):
  reader = MessageReader()
  first = [{'role': 'assistant', 'content': '', 'tool_calls': [call('x', 'add')]}]
  assert reader([*first, result('x')])[1]['name'] == 'add'
  history = [{'role': 'user', 'content': 'a'}] if changed else first
  named = reader([*history, result('x'), result('x')])
  assert [message.get('name') for message in named[1:]] == [None if changed else 'add'] * 2


@pytest.mark.parametrize(
  ('content', 'arguments', 'same'),
  [
    ('a', '{"x": 1, "y": [{"z": null}, "b"]}', True),
    (' a\n', '{"y": [{"z": null}, "b"], "x": 1.0}', True),
    ('b', '{"x": 1, "y": [{"z": null}, "b"]}', False),
    ('a', '{"x": 1, "y": ["b", {"z": null}]}', False),
    ('a', '{"x": 1, "y": [[["z", null]], "b"]}', False),
    ('a', '{"x": 2, "y": [{"z": null}, "b"]}', False),
    ('a', '{"x": 1}', False),
    ('a', 'x', False),
  ],
)
def test_answers_are_the_same_if_text_and_calls_are(content, arguments, same):
  def answer(content, uid, arguments):
    function = {'name': 'f', 'arguments': arguments}
    return {
      'role': 'assistant',
      'content': content,
      'tool_calls': [dict(id=uid, function=function)],
    }

  messages = [
    answer('a', 'u', '{"x": 1, "y": [{"z": null}, "b"]}'),
    answer(content, 'v', arguments) | {'name': 'n'},
  ]
  assert same_message(*MessageReader()(messages)) == same
