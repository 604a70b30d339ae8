"""The rows on the page of supervised fine-tuning are read, and the loss covers what it says."""

import ast
import json
import pathlib

import pytest
from pages import block

from jaxrl_llm import api
from jaxrl_llm.tasks.example_tokens import example_tokens
from jaxrl_llm.tasks.examples import Conversation, ExamplesConfig, load_examples
from jaxrl_llm.tasks.tokenizer import build_character_tokenizer

PAGE = 'docs/guides/sft.md'


def loaded(name: str, folder: pathlib.Path, **fields):
  row = json.loads(block(PAGE, name, 'json'))
  (folder / 'rows.jsonl').write_text(json.dumps(row))
  config = ExamplesConfig(name='rows', source=str(folder / 'rows.jsonl'), **fields)
  (example,) = load_examples(config).examples
  return row, example


@pytest.mark.parametrize(
  'name', ['messages', 'conversational completion', 'text completion', 'text', 'templates']
)
def test_a_row_is_learned_as_shown(name, tmp_path):
  fields = {}
  if name == 'templates':
    call = ast.parse(block(PAGE, name, 'python'), mode='eval').body
    fields = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    fields = {key: value for key, value in fields.items() if key not in ('name', 'source')}
  _, example = loaded(name, tmp_path, **fields)
  shown = block(PAGE, name, 'text')
  tokenizer = build_character_tokenizer([shown], tmp_path / 'tokenizer', template='chatml')
  found = example_tokens(example, tokenizer)
  text, inside = '', False
  for token, learned in [*zip(found.tokens, found.loss_mask), (None, False)]:
    text += '' if learned == inside else '[' if learned else ']'
    text, inside = text + ('' if token is None else tokenizer.token_text(int(token))), learned
  assert text == shown


def test_the_row_with_tools_is_read(tmp_path):
  row, example = loaded('tools', tmp_path)
  assert isinstance(example.content, Conversation)
  assert list(example.content.tools) == row['tools']
  assert example.content.messages[1]['tool_calls'] == row['messages'][1]['tool_calls']


def test_the_configuration_on_the_page_is_one():
  names = {name: getattr(api, name) for name in api.__all__ if name[0].isupper()}
  config = eval(block(PAGE, 'stage', 'python'), names)
  assert config.stages[0].source.train == config.examples[0].name
