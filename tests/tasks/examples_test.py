"""Rows to imitate: each form, what is refused, and that every row is counted."""

import json

import pytest

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.task import prompt_digest
from jaxrl_llm.tasks.examples import (
  Completion,
  Conversation,
  ExamplesConfig,
  Text,
  example_texts,
  load_examples,
)
from jaxrl_llm.tasks.taskset import TasksetConfig, load_taskset

SYSTEM = {'role': 'system', 'content': 'Be brief.'}
USER = {'role': 'user', 'content': 'What is 2 + 3?'}
ANSWER = {'role': 'assistant', 'content': '5'}
CALL = {'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 2, 'b': 3}}}
TOOL = {'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object'}}}


def load(tmp_path, *rows, **fields):
  path = tmp_path / 'rows.jsonl'
  path.write_text('\n'.join(map(json.dumps, rows)))
  return load_examples(ExamplesConfig(name='chat', source=str(path), **fields))


def contents(tmp_path, *rows, **fields):
  return [example.content for example in load(tmp_path, *rows, **fields).examples]


def test_each_form_is_read(tmp_path):
  found = contents(
    tmp_path,
    {'messages': [SYSTEM, USER, ANSWER]},
    {'conversations': [{'from': 'human', 'value': 'Hi'}, {'from': 'gpt', 'value': 'Ho'}]},
    {'prompt': 'a', 'completion': 'b'},
    {'prompt': [USER], 'completion': [ANSWER]},
    {'prompt': 'What is 2 + 3?', 'completion': [ANSWER]},
    {'text': 'once upon a time'},
  )
  assert found == [
    Conversation(messages=(SYSTEM, USER, ANSWER)),
    Conversation(
      messages=({'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Ho'})
    ),
    Completion(prompt='a', completion='b'),
    Conversation(messages=(USER, ANSWER), prompt_messages=1),
    Conversation(messages=(USER, ANSWER), prompt_messages=1),
    Text(text='once upon a time'),
  ]


def test_a_conversation_comes_before_other_columns_and_nulls_are_absent(tmp_path):
  """As in ultrachat, whose `prompt` repeats the first message, and in Parquet, which pads columns
  with null.
  """
  conversation, text = contents(
    tmp_path,
    {'messages': [USER, ANSWER], 'prompt': 'What is 2 + 3?', 'completion': None, 'text': 'x'},
    {'messages': None, 'prompt': None, 'completion': None, 'text': 'x', 'tools': None},
  )
  assert conversation == Conversation(messages=(USER, ANSWER)) and text == Text(text='x')


def test_templates_read_rows_of_other_forms(tmp_path):
  row = {'question': 'Why?', 'answer': 'So.'}
  templates = {'prompt': '{question}', 'completion': '{answer}'}
  system, user, answer = (
    SYSTEM,
    {'role': 'user', 'content': 'Why?'},
    {'role': 'assistant', 'content': 'So.'},
  )
  assert contents(tmp_path, row, **templates, system='Be brief.') == [
    Conversation(messages=(system, user, answer), prompt_messages=2)
  ]
  assert contents(tmp_path, row, text='{question} {answer}') == [Text(text='Why? So.')]
  assert contents(tmp_path, {'chat': [USER, ANSWER]}, messages_key='chat') == [
    Conversation(messages=(USER, ANSWER))
  ]


def test_the_configured_system_message_replaces_the_rows_own(tmp_path):
  found = contents(
    tmp_path,
    {'messages': [{**SYSTEM, 'content': 'Be long.'}, USER, ANSWER]},
    {'prompt': [{**SYSTEM, 'content': 'Be long.'}, USER], 'completion': [ANSWER]},
    {'prompt': [USER], 'completion': [ANSWER]},
    system='Be brief.',
  )
  assert [content.messages for content in found] == 3 * [(SYSTEM, USER, ANSWER)]
  assert [content.prompt_messages for content in found] == [None, 2, 2]


def test_tools_calls_and_variables_are_kept_and_nulls_left_out(tmp_path):
  asked = {'role': 'assistant', 'content': None, 'tool_calls': [CALL], 'name': None}
  result = {'role': 'tool', 'content': '5', 'tool_call_id': 'x', 'tool_calls': []}
  row = {'messages': [USER, asked, result, ANSWER], 'chat_template_kwargs': {'thinking': False}}
  wanted = Conversation(
    messages=(
      USER,
      {'role': 'assistant', 'tool_calls': [CALL]},
      {'role': 'tool', 'content': '5', 'tool_call_id': 'x'},
      ANSWER,
    ),
    tools=(TOOL,),
    variables={'thinking': False},
  )
  assert contents(tmp_path, {**row, 'tools': [TOOL]}, {**row, 'tools': json.dumps([TOOL])}) == [
    wanted,
    wanted,
  ]


def test_parts_of_text_become_one_text(tmp_path):
  parts = [{'type': 'text', 'text': 'one'}, {'type': 'text', 'text': 'two'}]
  (found,) = contents(tmp_path, {'messages': [{'role': 'user', 'content': parts}, ANSWER]})
  assert found.messages[0] == {'role': 'user', 'content': 'one\ntwo'}


REFUSED = (
  ({'messages': []}, 'messages is [], wanted a list of messages'),
  ({'messages': 'Hi'}, 'messages is "Hi", wanted a list of messages'),
  ({'messages': [USER]}, "no message of 'assistant'"),
  ({'messages': ['Hi']}, 'messages[0] is "Hi", wanted a message {role, content}'),
  ({'messages': [{'role': 'robot', 'content': 'x'}]}, 'messages[0] has role "robot", wanted one'),
  ({'messages': [{'content': 'x'}]}, 'messages[0] has role null, wanted one of system'),
  ({'messages': [{'role': 'user'}, ANSWER]}, "messages[0] of 'user' has no content"),
  ({'messages': [{'role': 'user', 'content': 5}, ANSWER]}, 'messages[0] has content 5, wanted'),
  (
    {'messages': [{'role': 'user', 'content': [{'type': 'image'}]}, ANSWER]},
    'messages[0] has content with part {"type": "image"}',
  ),
  (
    {'messages': [USER, {'role': 'assistant', 'content': None}]},
    "messages[1] of 'assistant' has no content and no tool_calls",
  ),
  ({'messages': [USER, {'role': 'assistant', 'content': ' \n'}]}, "messages[1] of 'assistant' is"),
  (
    {'messages': [{**USER, 'tool_calls': [CALL]}, ANSWER]},
    "messages[0] of 'user' has tool_calls, which only",
  ),
  (
    {'messages': [USER, {**ANSWER, 'tool_calls': [{'function': 'add'}]}]},
    'messages[1] has tool call {"function": "add"}, wanted',
  ),
  ({'messages': [USER, {**ANSWER, 'tool_calls': CALL}]}, 'wanted a list of tool calls'),
  ({'messages': [USER, ANSWER], 'tools': '{'}, 'tools is not JSON'),
  ({'messages': [USER, ANSWER], 'tools': {'name': 'add'}}, 'wanted a list of {type: "function"'),
  (
    {'messages': [USER, ANSWER], 'chat_template_kwargs': {'messages': []}},
    "chat_template_kwargs sets 'messages'",
  ),
  ({'prompt': 'a', 'completion': ' '}, 'completion is empty'),
  ({'prompt': [USER], 'completion': []}, 'completion is [], wanted a list of messages'),
  (
    {'prompt': [USER], 'completion': [USER, ANSWER]},
    "completion must begin with a message of 'assistant'",
  ),
  ({'text': ''}, 'text is "", wanted text that is not empty'),
  ({'text': ['a']}, 'text is ["a"], wanted text'),
  ({'prompt': 'a'}, "none of 'messages', 'conversations', 'prompt' with 'completion', or 'text'"),
  ({'text': 'a\ud800'}, 'lone surrogate'),
)


@pytest.mark.parametrize(('row', 'reason'), REFUSED)
def test_a_broken_row_is_refused_in_one_line_or_counted(tmp_path, row, reason):
  with pytest.raises(UserError) as raised:
    load(tmp_path, row)
  line = str(raised.value)
  assert f'{tmp_path}/rows.jsonl:1: ' in line and reason in line and '\n' not in line
  found = load(tmp_path, row, {'text': 'x'}, on_corrupt='skip')
  assert found.counts == {'read': 2, 'kept': 1, 'corrupt': 1, 'duplicate': 0, 'other_split': 0}
  assert found.examples[0].uid == 'chat:1'


def test_rows_with_equal_prompts_are_kept_unless_asked(tmp_path):
  rows = [
    {'messages': [USER, ANSWER]},
    {'messages': [USER, {**ANSWER, 'content': 'five'}]},
    {'messages': [USER, ANSWER]},
  ]
  kept = {
    how: [example.uid for example in load(tmp_path, *rows, deduplicate=how).examples]
    for how in ('none', 'rows', 'prompts')
  }
  assert kept == {
    'none': ['chat:0', 'chat:1', 'chat:2'],
    'rows': ['chat:0', 'chat:1'],
    'prompts': ['chat:0'],
  }
  assert [example.uid for example in load(tmp_path, *rows).examples] == kept['none']
  assert load(tmp_path, *rows, deduplicate='rows').counts['duplicate'] == 1


def test_a_split_keeps_equal_prompts_together_and_agrees_with_tasksets(tmp_path):
  questions = [{'role': 'user', 'content': f'question {i}'} for i in range(50)]
  rows = [
    {'messages': [question, {**ANSWER, 'content': text}]}
    for question in questions
    for text in ('yes', 'no')
  ]
  sides = {
    split: {
      example.content.messages[0]['content']
      for example in load(tmp_path, *rows, split=split, holdout=0.3).examples
    }
    for split in ('train', 'eval')
  }
  assert not sides['train'] & sides['eval'] and len(sides['train'] | sides['eval']) == 50
  path = tmp_path / 'tasks.jsonl'
  path.write_text('\n'.join(json.dumps({'prompt': [question]}) for question in questions))
  tasks = load_taskset(TasksetConfig(name='t', source=str(path), split='eval', holdout=0.3))
  assert {task.prompt[0]['content'] for task in tasks.tasks} == sides['eval']


def test_the_digest_is_that_of_the_prompt(tmp_path):
  rows = [
    {'messages': [SYSTEM, USER, ANSWER, USER, ANSWER]},
    {'prompt': [SYSTEM, USER], 'completion': [ANSWER]},
    {'prompt': USER['content'], 'completion': '5'},
  ]
  digests = [example.digest for example in load(tmp_path, *rows).examples]
  assert digests == [
    prompt_digest((SYSTEM, USER)),
    prompt_digest((SYSTEM, USER)),
    prompt_digest((USER,)),
  ]


def test_texts_for_a_tokenizer_are_all_that_rows_say(tmp_path):
  found = load(
    tmp_path,
    {'messages': [USER, {'role': 'assistant', 'content': None, 'tool_calls': [CALL]}]},
    {'prompt': 'a', 'completion': 'b'},
    {'text': 'c'},
  )
  assert [*example_texts(found)] == ['What is 2 + 3?', '', 'a', 'b', 'c']


@pytest.mark.parametrize(
  ('fields', 'reason'),
  [
    ({'name': 'a b'}, 'wanted letters'),
    ({'source': 'reasoning_gym:x'}, 'set Demonstrations'),
    ({'prompt': '{a}'}, 'set both'),
    ({'text': '{a}', 'system': 'x'}, 'text cannot be combined with prompt or system'),
    ({'holdout': 1.0}, 'wanted a fraction'),
    ({'split': 'eval'}, "split 'eval' with holdout 0"),
  ],
)
def test_a_contradiction_is_refused(fields, reason):
  with pytest.raises(UserError, match=reason):
    ExamplesConfig(**{'name': 'chat', 'source': 'rows.jsonl', **fields})


def test_a_file_without_a_row_left_is_refused(tmp_path):
  with pytest.raises(UserError, match=r'no row of .* is left.*read 1, kept 0, corrupt 1'):
    load(tmp_path, {'a': 1}, on_corrupt='skip')
