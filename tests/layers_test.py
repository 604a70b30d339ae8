"""The import rule: a package imports packages of lower layers, or itself; nothing else of ours."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / 'jaxrl_llm'
LAYERS = [
  {'core'},
  {'config'},
  {'ops'},
  {'advantages', 'objectives', 'parallel', 'experience'},
  {'models'},
  {'weights', 'replay', 'batching', 'rewards', 'tasks'},
  {'rollout', 'data', 'learner', 'runtime'},
  {'sync'},
  {'master'},
  {'app'},
]
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}
MODULES = sorted(PACKAGE.glob('*/**/*.py'))


def own_imports(source: str, package: str) -> set[str]:
  """Packages of jaxrl_llm that a module imports, wherever in the file, in whatever form."""
  found = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
      names = [f'{node.module}.{alias.name}' for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      base = package.split('.')[: len(package.split('.')) - node.level + 1]
      names = ['.'.join([*base, node.module or '', alias.name]).replace('..', '.') for alias in node.names]
    else:
      continue
    found |= {name.split('.')[1] for name in names if name.startswith('jaxrl_llm.')}
  return found


def package_of(path: pathlib.Path) -> str:
  return '.'.join(path.relative_to(ROOT).parent.parts)


@pytest.mark.parametrize('path', MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
  own = path.relative_to(PACKAGE).parts[0]
  for target in own_imports(path.read_text(), package_of(path)):
    assert target == own or LEVEL[target] < LEVEL[own], f'{path} ({own}) imports {target}, which is not below it'


def test_every_package_has_a_layer():
  assert {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != '__pycache__'} == set(LEVEL)


def test_linen_stays_inside_models():
  for path in MODULES:
    if path.relative_to(PACKAGE).parts[0] != 'models':
      assert 'flax.linen' not in path.read_text() and 'import linen' not in path.read_text(), path


def test_own_imports_sees_every_form():
  source = 'def f():\n  from ..core import types\nimport jaxrl_llm.models.api\nfrom jaxrl_llm import ops\n'
  assert own_imports(source, 'jaxrl_llm.learner') == {'core', 'models', 'ops'}
