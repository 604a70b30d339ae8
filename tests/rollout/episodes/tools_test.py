"""Tools: schemas, calls in the policy's text, errors that the policy reads, episodes of calls."""

import asyncio
import json
import subprocess
import sys
import threading
import time

import psutil
import pytest
from paths import ROOT
from scripted import GROUP, TASK, Scripted

from jaxrl_llm.app.composition.workflows import build_workflow
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Role
from jaxrl_llm.rewards.api import Verdict
from jaxrl_llm.rewards.sandbox.sandbox import Limits
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.contract import checked_run
from jaxrl_llm.rollout.episodes.calls import MAX_OVERDUE, MAX_THREADS
from jaxrl_llm.rollout.episodes.tool_calls import (
  ToolCall,
  choose_parser,
  hermes_calls,
  llama3_calls,
  qwen3_calls,
)
from jaxrl_llm.rollout.episodes.tools import Tool, ToolFailed, python_tool
from jaxrl_llm.rollout.workflow import WorkflowConfig
from jaxrl_llm.tasks.tokenizer import build_character_tokenizer


def repeat(letter: str, times: int = 2) -> str:
  """Repeats a letter.

  Args:
    letter: what to repeat.
    times: how often.
  """
  if letter == 'e':
    raise ValueError('not\nthis one')
  return letter * times


async def wait() -> str:
  """Waits for long."""
  await asyncio.sleep(3600)


def block() -> str:
  """Blocks for a while."""
  time.sleep(0.3)
  return 'late'


def undocumented(a):
  return a


def letters(text):
  """Parser of this test's own calls: 'b' and a letter call `repeat`; 'bb' names no tool."""
  return [
    ToolCall('none' if text[1:] == 'b' else 'repeat', {'letter': text[1:]})
  ] * text.startswith('b')


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
  monkeypatch.setitem(sys.modules, 'tools_test', sys.modules[__name__])


HERMES = '<tool_call>\n{"name": "repeat", "arguments": {"letter": "a"}}\n</tool_call>'
CALL = ToolCall('repeat', {'letter': 'a'})


@pytest.mark.parametrize(
  ('parse', 'text', 'calls'),
  [
    (hermes_calls, 'no call', []),
    (hermes_calls, f'I call {HERMES}{HERMES}', [CALL, CALL]),
    (hermes_calls, HERMES.removesuffix('</tool_call>'), [CALL]),
    (
      hermes_calls,
      '<tool_call>{"name": 3}</tool_call>',
      [ToolCall('', {}, 'the call has no "name"')],
    ),
    (
      hermes_calls,
      '<tool_call>{"name": "repeat", "arguments": [1]}</tool_call>',
      [ToolCall('repeat', {}, '"arguments" is not an object')],
    ),
    (qwen3_calls, f'<think>{HERMES}</think>{HERMES}', [CALL]),
    (qwen3_calls, f'<think>{HERMES}', []),
    (qwen3_calls, HERMES, [CALL]),
    (llama3_calls, '{"name": "repeat", "parameters": {"letter": "a"}}', [CALL]),
    (
      llama3_calls,
      '<|python_tag|>{"name": "repeat", "parameters": {"letter": "a"}}; '
      '{"name": "repeat", "parameters": {"letter": "a"}}',
      [CALL, CALL],
    ),
    (llama3_calls, '{1, 2} is a set', []),
    (llama3_calls, 'text {"name": "repeat"}', []),
  ],
)
def test_calls_in_the_text_of_a_turn(parse, text, calls):
  assert parse(text) == calls


@pytest.mark.parametrize('body', ['{', '[' * 100_000, '{"name"', 'null', '\x00', '"\\ud800"'])
def test_what_cannot_be_read_is_a_call_with_an_error_of_one_line(body):
  (call,) = hermes_calls(f'<tool_call>{body}</tool_call>')
  assert call.error and '\n' not in call.error and len(call.error) < 300


@pytest.mark.parametrize(
  ('template', 'parser'),
  [
    ("… '<tool_call>' …", hermes_calls),
    ("… '<tool_call>' … '</think>' …", qwen3_calls),
    ("… 'ipython' …", llama3_calls),
  ],
)
def test_the_chat_template_selects_the_parser(template, parser):
  assert choose_parser('auto', template) is parser


@pytest.mark.parametrize(
  ('kind', 'line'),
  [('auto', 'no built-in parser fits the chat template'), ('x', "no 'x'; wanted auto, hermes")],
)
def test_no_parser_is_one_line(kind, line):
  with pytest.raises(UserError, match=line) as caught:
    choose_parser(kind, 'plain')
  assert '\n' not in str(caught.value)


def test_the_schema_is_that_of_the_function():
  schema = Tool(repeat).schema['function']
  assert (schema['name'], schema['description']) == ('repeat', 'Repeats a letter.')
  assert schema['parameters']['required'] == ['letter']
  assert schema['parameters']['properties']['times']['type'] == 'integer'
  with pytest.raises(UserError, match='tool undocumented: no JSON schema') as caught:
    Tool(undocumented)
  assert '\n' not in str(caught.value)


def test_a_call_returns_text_or_says_in_one_line_what_is_wrong():
  async def check():
    tool = Tool(repeat, max_characters=5)
    assert await tool({'letter': 'a'}) == 'aa'
    assert await tool({'letter': 'a', 'times': 9}) == 'aaaaa'
    for arguments, line in (
      ({}, "repeat: argument 'letter' is missing"),
      ({'letter': 'a', 'other': 1}, "repeat: no argument 'other'; there are letter, times"),
      ({'letter': 3}, "repeat: argument 'letter' is 3, wanted string"),
      ({'letter': 'a', 'times': True}, "repeat: argument 'times' is True, wanted integer"),
      ({'letter': 'e'}, 'repeat: ValueError: not this one'),
    ):
      with pytest.raises(ToolFailed) as caught:
        await tool(arguments)
      assert str(caught.value) == line
    for function in (wait, block):
      with pytest.raises(ToolFailed, match=f'{function.__name__}: no result within 0.05 s'):
        await Tool(function, deadline_s=0.05)({})

  asyncio.run(check())


@pytest.fixture
def held():
  """A function that waits for `held.gate` and returns the name of its thread."""

  def hold() -> str:
    """Waits for the test."""
    hold.gate.wait(60)
    return threading.current_thread().name

  hold.gate = threading.Event()
  yield hold
  hold.gate.set()


def test_the_deadline_of_a_call_begins_when_a_thread_is_free(held):
  async def check():
    busy = [asyncio.ensure_future(Tool(held, deadline_s=60)({})) for _ in range(MAX_THREADS)]
    late = asyncio.ensure_future(Tool(held, deadline_s=0.02)({}))
    await asyncio.sleep(0.1)
    assert not late.done()
    assert await asyncio.to_thread(threading.current_thread), 'other threads are free meanwhile'
    held.gate.set()
    assert all(name.startswith('call') for name in await asyncio.gather(*busy))
    await asyncio.gather(late, return_exceptions=True)

  asyncio.run(check())


def test_calls_that_hang_fail_at_their_deadline_and_further_ones_at_once(held):
  async def check():
    overdue = MAX_OVERDUE + MAX_THREADS  # Calls that start together are all counted after it.
    calls = [Tool(held, deadline_s=0.02)({}) for _ in range(overdue + 1)]
    lines = [str(error) for error in await asyncio.gather(*calls, return_exceptions=True)]
    assert lines[: MAX_OVERDUE + 1] == ['hold: no result within 0.02 s'] * (MAX_OVERDUE + 1)
    assert lines[-1] == 'hold: too many calls hang'
    held.gate.set()
    while any(thread.name == 'call' for thread in threading.enumerate()):
      await asyncio.sleep(0.01)
    assert await Tool(held)({}) == 'call'

  asyncio.run(check())


HANGING = '''
import asyncio, contextlib, threading
from jaxrl_llm.rollout.episodes.tools import Tool, ToolFailed

def hang() -> str:
  """Hangs."""
  threading.Event().wait()

with contextlib.suppress(ToolFailed):
  asyncio.run(Tool(hang, deadline_s=0.05)({}))
print('ended')
'''


@pytest.mark.full
def test_a_call_that_hangs_does_not_keep_its_process_from_ending():
  command = [sys.executable, '-c', HANGING]
  ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
  assert (ended.returncode, ended.stdout) == (0, 'ended\n'), ended.stderr


@pytest.fixture(scope='module')
def ascii_tokenizer(tmp_path_factory):
  """Tokenizer of ASCII characters; its chat template shows names and contents of messages."""
  folder = tmp_path_factory.mktemp('ascii')
  (folder / 'chat.jinja').write_text(
    '{% for message in messages %}{{ message.name ~ message.content }}{% endfor %}'
  )
  table = [*map(chr, range(32, 127)), '…']
  built = build_character_tokenizer(table, folder / 'tokenizer', template='chatml')
  return built.with_template(folder / 'chat.jinja')


def played(tokenizer, *texts, max_tokens=40, **options):
  given = {'tools': ['tools_test:repeat'], 'parser': 'tools_test:letters', **options}
  hub = Scripted(tokenizer, *texts)
  workflow = build_workflow(WorkflowConfig(kind='tools', options=given), hub, tokenizer, max_tokens)

  async def one():
    runs = checked_run(workflow, TASK, 0, stage='grpo', samples=1, sampling=Sampling())
    (rollout,) = [each async for each in runs]
    return rollout

  return asyncio.run(one())


def test_a_program_runs_in_the_sandbox_and_the_policy_reads_what_it_prints_or_why_it_ended():
  tool = python_tool(Limits(output_kib=1))
  for program, result in (
    ('print(6 * 7)', '42\n'),
    ('print(1)\n1 / 0', '1\n\nZeroDivisionError: division by zero'),
    (f'import os\nprint(os.path.exists({__file__!r}))', 'False\n'),
    ('import sys\nsys.stdout.write("a" * 100_000)', f'{"a" * 1024}\nstopped at a limit: output'),
  ):
    assert asyncio.run(tool({'code': program})) == result


def test_in_an_episode_the_policy_reads_what_its_programs_print_or_why_they_ended(ascii_tokenizer):
  def turn(**arguments):
    return f'<tool_call>{json.dumps({"name": "python", "arguments": arguments})}</tool_call>'

  sample, text, verdict, *_ = played(
    ascii_tokenizer,
    f'{turn(code="print(6 * 7)")}$',
    f'{turn(code="print(1); 1 / 0")}{turn(program="print(2)")}$',
    'd$',
    tools=['python'],
    parser='hermes',
    max_tokens=2000,
  )
  read = ascii_tokenizer.decode(sample.tokens[sample.role == Role.TOOL].tolist())
  assert read == (
    'python42\n'
    'python1\n\nZeroDivisionError: division by zero'
    "pythonerror: python: no argument 'program'; there are code"
  )
  assert text == 'd' and verdict.parts == {'tool_calls': 3.0, 'tool_failures': 1.0}


def test_tools_of_a_process_share_their_sandboxes():
  python_tool()
  children = psutil.Process().children()
  python_tool()
  assert psutil.Process().children() == children


def silent() -> str:
  """Returns nothing."""
  return ''


def silences(text):
  """Parser to which 'a' is a call of `silent`."""
  return [ToolCall('silent', {})] * (text == 'a')


def test_a_result_without_a_token_is_a_note_or_ends_the_episode(tokenizer, tmp_path):
  call = {'tools': ['tools_test:silent'], 'parser': 'tools_test:silences'}
  letters = ['abcdefghijklmnopqrstuvwxyz ()']
  larger = build_character_tokenizer(letters, tmp_path / 'tokenizer', template='plain')
  sample, text, *_ = played(larger, 'a$', 'd$', **call)
  assert larger.decode(sample.tokens[sample.role == Role.TOOL].tolist()) == '(no output)'
  assert text == 'd'
  assert len(played(tokenizer, 'a$', 'd$', **call).sample.segments) == 1


def test_the_policy_reads_the_result_of_its_call_and_ends_with_a_turn_without_one(tokenizer):
  sample, text, verdict, *_ = played(tokenizer, 'bc$', 'd$')
  assert (sample.uid, text) == (f'{GROUP}/0', 'd')
  assert tokenizer.decode(sample.tokens[sample.role == Role.TOOL].tolist()) == 'cc'
  assert verdict == Verdict(value=0.0, parts={'tool_calls': 1.0, 'tool_failures': 0.0})


def test_calls_beyond_the_limit_of_a_turn_are_not_carried_out(ascii_tokenizer):
  sample, _, verdict, *_ = played(
    ascii_tokenizer, 'aa$', 'd$', parser='tools_test:many', max_calls=2, max_tokens=2000
  )
  read = ascii_tokenizer.decode(sample.tokens[sample.role == Role.TOOL].tolist())
  assert read == 'repeatcc' * 2 + (
    'repeaterror: too many calls; at most 2 in a turn are carried out' * 2
  )
  assert verdict.parts == {'tool_calls': 4.0, 'tool_failures': 2.0}


def many(text):
  """Parser to which each 'a' is two calls."""
  return (ToolCall('repeat', {'letter': 'c'}),) * (2 * text.count('a'))


def given(text):
  """Parser of calls that are hostile: lone surrogates, a name of any length."""
  return {
    'a': [ToolCall('repeat', {'letter': '\ud800'})],
    'b': [ToolCall('\ud800' * 9999, {})],
    'c': [ToolCall('repeat', {'letter': 'é'})],
  }.get(text, [])


HOSTILE = {
  'a': 'repeat??',
  'b': 'unknownerror: no tool',
  'c': 'repeaterror: the result has characters that the tokenizer lacks',
}


@pytest.mark.parametrize('call', HOSTILE)
def test_whatever_a_call_echoes_the_policy_reads_a_text_that_can_be_encoded(ascii_tokenizer, call):
  sample, text, _, *_ = played(
    ascii_tokenizer, f'{call}$', 'd$', parser='tools_test:given', max_tokens=2000
  )
  read = ascii_tokenizer.decode(sample.tokens[sample.role == Role.TOOL].tolist())
  assert read.startswith(HOSTILE[call]) and len(read) < 300
  assert text == 'd'


def test_an_episode_ends_if_the_tokenizer_has_not_even_the_characters_of_an_error(tokenizer):
  sample, text, verdict, *_ = played(tokenizer, 'bb$', 'd$')
  assert text == 'bb' and len(sample.segments) == 1
  assert verdict == Verdict(value=0.0, parts={'tool_calls': 1.0, 'tool_failures': 1.0})


def test_an_episode_of_calls_alone_ends_at_its_limit(tokenizer):
  sample, _, verdict, *_ = played(tokenizer, 'bc$', 'bd$', max_turns=2)
  assert len(sample.segments) == 2 and verdict.parts['tool_calls'] == 2.0


@pytest.mark.parametrize(
  ('options', 'line'),
  [
    ({'tools': []}, 'options: no tools and no mcp; name at least one tool'),
    ({'tools': ['tools_test:repeat'] * 2}, "two tools are named 'repeat', wanted different names"),
    ({'max_turns': 0}, 'options.max_turns: got 0, wanted at least 1'),
    ({'max_calls': 0}, 'options.max_calls: got 0, wanted at least 1'),
  ],
)
def test_an_impossible_option_is_one_line(tokenizer, options, line):
  with pytest.raises(UserError) as caught:
    played(tokenizer, 'a$', **options)
  assert line in str(caught.value) and '\n' not in str(caught.value)
