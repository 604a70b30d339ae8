"""The import rule: a package imports packages of lower layers, or itself; nothing else of ours.

Names of modules in strings count as imports, for a string starts a process as an import runs a
module.
"""

import ast
import pathlib
import re

import pytest
from paths import ROOT

PACKAGE = ROOT / 'jaxrl_llm'
LAYERS = [
  {'core'},
  {'config'},
  {'ops'},
  {'advantages', 'objectives', 'parallel'},
  {'models'},
  {'weights', 'replay', 'batching', 'rewards', 'tasks'},
  {'data', 'learner', 'runtime'},
  {'rollout'},
  {'master'},
  {'app'},
]
BELOW_APP = set().union(*LAYERS[:-1])
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}
NESTED = {
  'core.records': {'core'},
  'core.net': {'core'},
  'core.process': {'core'},
  'rewards.sandbox': {'core', 'config'},
  'rewards.scorers': {'core', 'config', 'advantages', 'rewards', 'rewards.sandbox'},
  'rewards.pool': {'core', 'rewards'},
  'rollout.embedded': {'core', 'models', 'parallel', 'rollout'},
  'rollout.vllm': {'core', 'models', 'weights', 'rollout'},
  'rollout.episodes': {'core', 'config', 'rewards', 'rewards.sandbox', 'tasks', 'rollout'},
  'rollout.agents': {'core', 'rewards', 'tasks', 'rollout', 'rollout.episodes'},
  'rollout.explorers': {'core', 'rewards', 'tasks', 'rollout'},
  'runtime.log': {'core', 'config', 'runtime'},
  'master.exploring': {'core', 'config', 'replay', 'rewards', 'rollout', 'runtime', 'tasks'},
  'app.composition': {*BELOW_APP, 'app'},
  'app.serve': {*BELOW_APP, 'app', 'app.composition'},
  'app.dry_run': {*BELOW_APP, 'app', 'app.composition'},
  'app.offline': {*BELOW_APP, 'app', 'app.composition', 'app.serve'},
  'app.importers': {*BELOW_APP, 'app', 'app.composition'},
  'app.cluster': {*BELOW_APP, 'app'},
  'app.sweeps': {*BELOW_APP, 'app', 'app.cluster'},
  'app.doctor': {*BELOW_APP, 'app', 'app.composition', 'app.dry_run', 'app.offline'},
  'app.commands': {
    *BELOW_APP,
    *('app', 'app.composition', 'app.cluster', 'app.sweeps', 'app.doctor'),
    *('app.dry_run', 'app.importers', 'app.offline', 'app.serve'),
  },
}
"""What packages within packages import besides themselves: top-level packages, and packages beside
them. The enclosing package stands for its modules alone: `rollout` does not include
`rollout.vllm`.
"""
CONFIGS = PACKAGE / 'configs'
"""A link to the shipped configurations, which import the public names alone."""
MODULES = sorted(path for path in PACKAGE.glob('*/**/*.py') if CONFIGS not in path.parents)
_NAMED = re.compile(r'\bjaxrl_llm(?:\.\w+)+')


def name_of(path: pathlib.Path) -> str:
  return '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__')


NAMES = {name_of(path) for path in MODULES}


def imported_modules(source: str, package: str) -> set[str]:
  """Modules of jaxrl_llm that a module of `package` imports or names in a string, wherever in the
  file.
  """
  tree, names = ast.parse(source), set()
  documentation = {
    id(node.body[0].value)
    for node in ast.walk(tree)
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    and node.body
    and isinstance(node.body[0], ast.Expr)
  }
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
      names |= {f'{node.module}.{alias.name}' for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = package.split('.')[: len(package.split('.')) - node.level + 1]
      names |= {
        '.'.join([*base, node.module or '', alias.name]).replace('..', '.') for alias in node.names
      }
    elif (
      isinstance(node, ast.Constant)
      and isinstance(node.value, str)
      and id(node) not in documentation
    ):
      names |= set(_NAMED.findall(node.value))
  return {name for name in names if name.startswith('jaxrl_llm.')}


def innermost_package(name: str) -> str:
  """The longest entry of NESTED that holds the module, or its top-level package; without
  `jaxrl_llm.`.
  """
  parts = name.split('.')[1:]
  return '.'.join(parts[:2]) if '.'.join(parts[:2]) in NESTED else parts[0]


@pytest.mark.parametrize('path', MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
  name = name_of(path)
  package, nested = name.split('.')[1], innermost_package(name)
  for target in imported_modules(path.read_text(), '.'.join(path.relative_to(ROOT).parent.parts)):
    other = target.split('.')[1]
    assert other in LEVEL, f'{path} imports {target}, which is for users alone'
    assert other == package or LEVEL[other] < LEVEL[package], (
      f'{path} ({package}) imports {target}, not below it'
    )
    if nested in NESTED:
      inner = innermost_package(target) if other == package else other
      assert inner == nested or inner in NESTED[nested], f'{path} ({nested}) imports {target}'


def test_every_package_has_a_layer():
  assert {
    p.name for p in PACKAGE.iterdir() if p.is_dir() and p != CONFIGS and p.name != '__pycache__'
  } == set(LEVEL)


def test_every_nested_package_has_its_imports_listed():
  nested = {name_of(path).removeprefix('jaxrl_llm.') for path in PACKAGE.glob('*/*/__init__.py')}
  assert nested == set(NESTED)


@pytest.mark.parametrize('path', sorted((ROOT / 'configs').rglob('*.py')), ids=lambda p: p.name)
def test_configurations_import_public_names_alone(path):
  assert (CONFIGS / path.relative_to(ROOT / 'configs')).samefile(path)
  assert {name.split('.')[1] for name in imported_modules(path.read_text(), 'configs')} <= {'api'}


def test_helpers_of_tests_have_distinct_names():
  """Both folders are on the import path, where the first of two equal names hides the second."""
  names = [
    path.name for folder in ('support', 'tools') for path in ROOT.glob(f'tests/{folder}/*.py')
  ]
  assert sorted(names) == sorted(set(names))


def test_linen_stays_inside_models():
  for path in MODULES:
    if path.relative_to(PACKAGE).parts[0] != 'models':
      assert 'flax.linen' not in path.read_text() and 'import linen' not in path.read_text(), path


def test_http_requests_are_sent_in_core_net_alone():
  sending = re.compile(r'import aiohttp|from aiohttp import (?!web\b)|http\.client|urllib\.request')
  for path in MODULES:
    if path.relative_to(PACKAGE).parts[:2] != ('core', 'net'):
      assert not sending.search(path.read_text()), path


def test_every_form_of_import_is_seen():
  source = (
    '"""As jaxrl_llm.master.loop does."""\n'
    'def f():\n  from ..core import types\nimport jaxrl_llm.models.api\nfrom jaxrl_llm import ops\n'
    "COMMAND = ['-m', 'jaxrl_llm.app.serve']\n"
  )
  assert {name.split('.')[1] for name in imported_modules(source, 'jaxrl_llm.learner')} == {
    *('core', 'models', 'ops', 'app')
  }
