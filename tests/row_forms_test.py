"""Rows on the pages of tasks and of preferences are read as shown, and their configurations are
ones.
"""

import ast
import json

import pytest
from pages import block, parts

from jaxrl_llm import api
from jaxrl_llm.tasks.preferences import PreferencesConfig, load_preferences
from jaxrl_llm.tasks.taskset import TasksetConfig, load_taskset

TASKS, PREFERENCES = 'docs/guides/tasks.md', 'docs/guides/preferences.md'


def fields_of(page: str, name: str) -> dict:
  """Fields of the configuration that stands beside a row, but for its source."""
  code = block(page, name, 'python')
  call = None if code is None else ast.parse(code, mode='eval').body
  keywords = [] if call is None else call.keywords
  return {word.arg: ast.literal_eval(word.value) for word in keywords if word.arg != 'source'}


def lines(messages) -> list[str]:
  return [f'{message["role"]}: {message["content"]}' for message in messages]


def source(folder, page: str, name: str) -> str:
  file = folder / 'rows.jsonl'
  file.write_text(json.dumps(json.loads(block(page, name, 'json'))))
  return str(file)


@pytest.mark.parametrize('name', parts(TASKS))
def test_a_row_is_the_task_that_is_shown(name, tmp_path):
  fields = {'name': 'rows', **fields_of(TASKS, name)}
  (task,) = load_taskset(TasksetConfig(source=source(tmp_path, TASKS, name), **fields)).tasks
  found = [*lines(task.prompt), f'truth: {task.truth}', f'domain: {task.domain}']
  assert '\n'.join(found) == block(TASKS, name, 'text')


@pytest.mark.parametrize('name', sorted(parts(PREFERENCES).keys() - {'stage'}))
def test_a_row_is_the_pair_that_is_shown(name, tmp_path):
  fields = {'name': 'rows', **fields_of(PREFERENCES, name)}
  config = PreferencesConfig(source=source(tmp_path, PREFERENCES, name), **fields)
  (pair,) = load_preferences(config).pairs
  found = [*lines(pair.task.prompt), f'chosen: {pair.chosen}', f'rejected: {pair.rejected}']
  assert '\n'.join(found) == block(PREFERENCES, name, 'text')


def test_the_configuration_on_the_page_of_preferences_is_one():
  names = {name: getattr(api, name) for name in api.__all__ if name[0].isupper()}
  config = eval(block(PREFERENCES, 'stage', 'python'), names)
  assert config.stages[0].source.train == config.preferences[0].name


def test_the_pages_are_read():
  assert len(parts(TASKS)) == 5 and len(parts(PREFERENCES)) == 5
