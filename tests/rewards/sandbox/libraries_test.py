"""Programs import numpy, pandas and sympy from a read-only copy that was loaded before them."""

import contextlib

import hostile
import pytest

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rewards.sandbox.isolation import NoIsolation
from jaxrl_llm.rewards.sandbox.libraries import preload_of
from jaxrl_llm.rewards.sandbox.sandbox import Case, Ending, Limits, Sandboxes

pytestmark = pytest.mark.full

pytest.importorskip('pandas')
pytest.importorskip('sympy')

LIMITS = Limits(wall_s=60.0, cpu_s=2, memory_mib=512)
EVERY = ('numpy', 'pandas', 'sympy')


def opened(libraries):
  try:
    return Sandboxes(LIMITS, isolation='namespaces', preload=preload_of(libraries))
  except NoIsolation as error:
    hostile.skip_where_this_machine_forbids(error, 'namespaces')


@pytest.fixture(scope='module')
def sandboxes():
  with contextlib.closing(opened(EVERY)) as made:
    yield made


def printed(sandboxes, program, stdin=''):
  outcome, text = sandboxes.output(program, stdin)
  assert outcome.ended == Ending.PASSED, outcome
  return text.strip()


def test_programs_that_import_libraries_read_and_print(sandboxes):
  program = """
import sys
import numpy as np, pandas as pd, sympy as sp
numbers = np.array(sys.stdin.read().split(), dtype=int)
frame = pd.DataFrame({'key': numbers % 2, 'number': numbers})
print(np.linalg.det(np.diag(numbers[:2])).round(), frame.groupby('key').number.sum().tolist())
x = sp.Symbol('x')
print(sp.integrate(2 * x, (x, 0, int(numbers[0]))))
"""
  case = Case(stdin='3 4 5\n', stdout='12.0 [4, 8]\n9')
  assert sandboxes.run_cases(program, [case]).ended == Ending.PASSED
  wrong = sandboxes.run_cases(program, [Case(stdin='3 4 5\n', stdout='12.0 [4, 8]\n8')])
  assert wrong.ended == Ending.FAILED


def test_libraries_are_loaded_before_the_program_starts(sandboxes):
  assert printed(sandboxes, 'import sys\nprint({"numpy", "pandas", "sympy"} <= set(sys.modules))')


def test_arrays_and_scalars_go_to_the_program_and_back_as_values(sandboxes):
  program = """
import numpy as np
def double(values): return np.asarray(values) * 2
def total(values): return np.sum(values)
def same(value): return value
def sort(values): values.sort()
def root(values): return np.sqrt(np.array(values, dtype=complex))
"""
  tests = [
    'import numpy as np\nassert np.array_equal(double(np.array([1, 2])), [2, 4])',
    'assert double([[1.5], [2.5]]).tolist() == [[3.0], [5.0]]',
    'assert total([1, 2, 3]) == 6 and isinstance(total([1, 2, 3]), np.integer)',
    'import pandas\nassert isinstance(same(np.float32(0.5)), np.float32) and same(True) is True',
    'assert same(np.array(["a", "bc"])).tolist() == ["a", "bc"]',
    'assert same(np.zeros((0, 3), dtype=np.uint8)).shape == (0, 3)',
    'assert same(np.array(3)).shape == () and isinstance(same(np.array(3)), np.ndarray)',
    'assert np.isnan(same(np.array([1.0, float("nan")]))[1])',
    'values = np.array([3, 1, 2])\nassert sort(values) is None and list(values) == [1, 2, 3]',
    'assert np.allclose(root([-1, 4]), [1j, 2])',
    'assert np.bool_(True) == same(np.bool_(True)) and same((np.int8(1), [np.ones(1)]))[0] == 1',
  ]
  outcome = sandboxes.run_tests(program, tests)
  assert (outcome.ended, outcome.passed) == (Ending.PASSED, len(tests)), outcome
  for test in ('np.array_equal(double([1]), [3])', 'total([1, 2]) == 4', 'double([1])[0] == 1'):
    assert sandboxes.run_tests(program, [f'assert {test}']).ended == Ending.FAILED, test


@pytest.mark.parametrize(
  'cheat',
  [
    'class Own(np.ndarray):\n  def __eq__(self, other): return np.bool_(True)\n'
    'def f(x): return np.ones(1).view(Own)',
    'def f(x): return np.array([type("Own", (), {"__eq__": lambda s, o: True})()], dtype=object)',
    'class Own:\n  def __array__(self, *a, **k): return np.array([41])\n  __len__ = lambda s: 1\n'
    '  __eq__ = lambda s, o: np.bool_(True)\ndef f(x): return Own()',
    'np.array_equal = np.allclose = lambda *a, **k: True\ndef f(x): return np.array([0])',
    'def array_equal(*a): return True\narray_equal.__module__ = "numpy"\n'
    'def f(x): return np.array([0])',
    'class Forged:\n  __module__ = "numpy"\nForged.__name__ = "ndarray"\n'
    'Forged.dtype = np.dtype(int)\nForged.ndim = 1\nForged.shape = (-1,)\n'
    'Forged.reshape = lambda s, n: s\nForged.tolist = lambda s: [42]\nnp.ndarray = Forged\n'
    'def f(x): return Forged()',
    'import os, sys\ndef f(x): os._exit(0)',
  ],
)
def test_a_pass_cannot_be_faked_with_arrays(sandboxes, cheat):
  tests = [
    'import numpy as np\nassert np.array_equal(f(41), np.array([42]))',
    'assert (f(41) == np.array([42])).all()',
    'assert array_equal(f(41), [42])',
  ]
  for test in tests:
    outcome = sandboxes.run_tests(f'import numpy as np\n{cheat}', [test])
    assert outcome.passed == 0, (test, outcome)


def test_programs_read_the_libraries_and_no_other_package(sandboxes):
  program = """
import importlib, os, sys, numpy
packages = os.path.dirname(os.path.dirname(numpy.__file__))
print(sorted(name for name in os.listdir(packages) if name in ('numpy', 'pandas', 'sympy')))
for name in ('jax', 'absl', 'pytest', 'jaxrl_llm', 'pyarrow'):
  try: importlib.import_module(name); print(name)
  except ImportError: pass
print([name for name in os.listdir(packages) if name.endswith('-info')])
for path in (packages, numpy.__path__[0]):
  try: open(f'{path}/note', 'w'); print('written')
  except OSError: pass
"""
  assert printed(sandboxes, program) == "['numpy', 'pandas', 'sympy']\n[]"


def test_what_a_program_changes_in_a_library_ends_with_it(sandboxes):
  change = 'import numpy as np\nnp.sum = lambda *a, **k: 7\nnp.random.seed(3)\nprint(np.sum([1]))'
  assert printed(sandboxes, change) == '7'
  look = 'import numpy as np\nprint(np.sum([1]))'
  assert printed(sandboxes, look) == '1'


def test_limits_hold_for_programs_with_libraries(sandboxes):
  endings = {
    'import numpy as np\nx = np.ones(1 << 30)': Ending.MEMORY,
    'import numpy as np\nwhile True: np.sort(np.arange(1000))': Ending.CPU,
    'import pandas as pd\npd.read_csv("/etc/shadow")': Ending.EXCEPTION,
    'import sympy\nsympy.Symbol("x").undefined': Ending.EXCEPTION,
  }
  for program, ending in endings.items():
    assert sandboxes.output(program, '')[0].ended == ending, program


def test_without_the_option_there_are_none():
  with contextlib.closing(opened(())) as plain:
    assert plain.output('import numpy', '')[0].ended == Ending.EXCEPTION


def test_a_library_that_is_not_installed_is_one_line():
  with pytest.raises(UserError, match='library no-such-library is not installed'):
    preload_of(('no-such-library',))
