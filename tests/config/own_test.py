"""Parts of a user's own, by the names that configurations give them."""

import pytest

from jaxrl_llm.config.own import own_part
from jaxrl_llm.core.errors import UserError


@pytest.fixture
def write(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  return lambda name, text: (tmp_path / f'{name}.py').write_text(text)


def test_it_is_what_the_module_calls_so(write):
  write('own_part_whole', 'def score(attempt): return 1')
  assert own_part('own_part_whole:score', 'scorer')(None) == 1


def test_what_is_not_there_is_one_line(write):
  write('own_part_empty', '')
  with pytest.raises(
    UserError, match=r"^scorer 'own_part_empty:score': module own_part_empty has no 'score'$"
  ):
    own_part('own_part_empty:score', 'scorer')
  with pytest.raises(
    UserError, match=r"^scorer 'own_part_nowhere:score': no module 'own_part_nowhere'; is its"
  ):
    own_part('own_part_nowhere:score', 'scorer')


def test_a_fault_of_the_modules_own_is_not_said_to_be_a_missing_name(write):
  write('own_part_faulty', 'import os\nos.no_such_thing\ndef score(attempt): return 1')
  with pytest.raises(
    UserError, match=r'cannot be imported: .*own_part_faulty\.py:2: AttributeError: .*no_such_thing'
  ):
    own_part('own_part_faulty:score', 'scorer')


@pytest.mark.parametrize(
  ('text', 'line'),
  [
    ('x = 1\nthis is no Python', r'own_part_\d\.py:2: SyntaxError: invalid syntax$'),
    ('raise ImportError("a\\nb")', r'own_part_\d\.py:1: ImportError: a b$'),
    ('import own_part_nowhere', "no module 'own_part_nowhere'; is its directory in PYTHONPATH"),
  ],
)
def test_a_module_that_cannot_be_imported_is_one_line(write, request, text, line):
  name = f'own_part_{request.node.callspec.indices["text"]}'
  write(name, text)
  with pytest.raises(UserError, match=line):
    own_part(f'{name}:score', 'scorer')


def test_a_module_may_have_any_name_that_python_imports(write):
  write('own-part_2024', 'score = 1')
  assert own_part('own-part_2024:score', 'scorer') == 1


@pytest.mark.parametrize(
  'name', ['', ':score', '.x:score', 'a..b:score', 'a b:score', '\0:score', '../x:score']
)
def test_what_is_no_name_of_a_module_is_one_line(name):
  with pytest.raises(UserError, match="is not a module name; wanted 'module:attribute'"):
    own_part(name, 'scorer')
