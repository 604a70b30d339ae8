"""Optional libraries: one line names the extra that installs a missing one."""

import importlib.util
import re
import sys
import tomllib

import pytest
from paths import ROOT

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.extras import EXTRAS, defer
from jaxrl_llm.rewards.scorers.answer.scorer import answer_scorer
from jaxrl_llm.rewards.scorers.verifier.scorer import verifier_scorer
from jaxrl_llm.tasks.sources import read_rows

PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']


@pytest.fixture
def light(monkeypatch):
  """An installation without extras."""
  find = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util, 'find_spec', lambda name, *rest: None if name in EXTRAS else find(name, *rest)
  )


@pytest.mark.parametrize(
  ('needs', 'line'),
  [
    (
      lambda: list(read_rows('reasoning_gym:leg_counting', options={}, size=1, seed=0)),
      'reasoning_gym:leg_counting: needs reasoning_gym, which is not installed; pip install '
      "'jaxrl_llm[reasoning-gym]'",
    ),
    (
      lambda: list(read_rows('datasets:org/rows', options={}, size=1, seed=0)),
      'datasets:org/rows: needs datasets, which is not installed; pip install '
      "'jaxrl_llm[datasets]'",
    ),
    (
      verifier_scorer,
      "scorer 'verifier': needs reasoning_gym, which is not installed; pip install "
      "'jaxrl_llm[reasoning-gym]'",
    ),
    (
      lambda: answer_scorer(mode='latex'),
      "scorer 'answer' in mode 'latex': needs math_verify, which is not installed; pip install "
      "'jaxrl_llm[math]'",
    ),
  ],
)
def test_a_missing_library_is_one_line(needs, line, light):
  with pytest.raises(UserError) as caught:
    needs()
  assert str(caught.value) == line


def test_what_needs_no_library_works_without(light):
  answer_scorer(mode='numeric')
  answer_scorer()  # The mode is open; a run chooses one.


def test_every_library_is_in_its_extra_and_in_no_requirement():
  extras = PROJECT['optional-dependencies']
  required = {re.match(r'[\w-]+', line)[0].replace('-', '_') for line in PROJECT['dependencies']}
  for module, extra in EXTRAS.items():
    names = [re.match(r'[\w-]+', line)[0].replace('-', '_') for line in extras[extra]]
    assert module in names and module not in required


def test_a_deferred_module_is_imported_at_its_first_use(tmp_path, monkeypatch):
  (tmp_path / 'deferred_by_test.py').write_text('import sys\nsys.imported = True\nvalue = 7\n')
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(sys, 'imported', False, raising=False)
  defer('deferred_by_test')
  first = importlib.import_module('deferred_by_test')
  assert importlib.import_module('deferred_by_test') is first
  assert not hasattr(first, '__all__') and not sys.imported
  assert first.value == 7 and sys.imported
  later = importlib.import_module('deferred_by_test')
  assert later is not first and first.value == 7
  assert not hasattr(first, 'other')
  defer('deferred_by_test')
  assert sys.modules.pop('deferred_by_test') is later
  defer('no_such_module')
  assert 'no_such_module' not in sys.modules


def test_a_part_of_a_deferred_package_can_be_imported(tmp_path, monkeypatch):
  package = tmp_path / 'deferred_package'
  package.mkdir()
  (package / '__init__.py').write_text('value = 7\n')
  (package / 'part.py').write_text('from deferred_package import value\n')
  monkeypatch.syspath_prepend(tmp_path)
  defer('deferred_package')
  part = importlib.import_module('deferred_package.part')
  assert part.value == 7 and sys.modules.pop('deferred_package').part is part
  del sys.modules['deferred_package.part']
