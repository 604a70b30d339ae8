"""The public names: what `jaxrl_llm.api` and `jaxrl_llm` export, and that it costs nothing until it
is used.
"""

import ast
import re
import signal
import subprocess
import sys

import pytest
from paths import ROOT

import jaxrl_llm
from jaxrl_llm import api
from jaxrl_llm.app.commands import cli


def test_every_public_name_is_there_with_a_docstring():
  assert len(api.__all__) == len(set(api.__all__))
  for name in api.__all__:
    value = getattr(api, name)
    assert value is getattr(jaxrl_llm, name)
    if (
      callable(value) and hasattr(value, '__module__') and value.__module__.startswith('jaxrl_llm.')
    ):
      # as dataclasses write it
      documented = (value.__doc__ or '').strip() and not value.__doc__.startswith(f'{name}(')
      assert documented, f'{name} has no docstring'


def test_the_stub_for_type_checkers_lists_the_same_names():
  stub = ast.parse((ROOT / 'jaxrl_llm' / 'api.pyi').read_text())
  names = {alias.name: node.module for node in stub.body for alias in node.names}
  assert names == api._MODULES


def test_an_unknown_name_is_an_attribute_error():
  for module in (api, jaxrl_llm):
    with pytest.raises(AttributeError, match=r"no attribute 'nothing_of_that_name'"):
      _ = module.nothing_of_that_name


def test_a_former_name_is_answered_with_what_replaces_it():
  with pytest.raises(
    ImportError, match=r'^PairsConfig: replaced by Pairs, as the source of a stage$'
  ):
    from jaxrl_llm.api import PairsConfig  # noqa: F401


def test_scorers_get_their_names_without_jax():
  program = (
    'import sys; from jaxrl_llm.api import Attempt, Verdict, Score; sys.exit("jax" in sys.modules)'
  )
  subprocess.run([sys.executable, '-c', program], check=True, cwd=ROOT)


def test_the_version_is_that_of_the_package():
  assert re.fullmatch(r'\d+\.\d+\.\d+', jaxrl_llm.__version__)


@pytest.mark.parametrize(
  ('arguments', 'code', 'out', 'err'),
  [
    ([], 0, 'Commands by name: ', ''),
    (['--help'], 0, 'Commands by name: ', ''),
    (['--version'], 0, f'{jaxrl_llm.__version__}\n', ''),
    (['repotr'], 2, '', "error: repotr: no such command; did you mean 'report'?\n"),
    (['xyz'], 2, '', 'error: xyz: no such command; wanted one of train, serve, '),
  ],
)
def test_the_console_command(arguments, code, out, err, monkeypatch, capsys):
  monkeypatch.setattr(sys, 'argv', ['jaxrl', *arguments])
  assert cli.main() == code
  captured = capsys.readouterr()
  assert captured.out.startswith(out) and captured.err.startswith(err)
  assert bool(captured.out) == bool(out) and bool(captured.err) == bool(err)


def test_the_console_command_lists_every_command():
  listed = re.findall(r'^  jaxrl ([\w-]+)', cli.__doc__, re.MULTILINE)
  assert tuple(listed) == cli.COMMANDS
  assert {f'{name.replace("-", "_")}.py' for name in cli.COMMANDS} == {
    path.name for path in (ROOT / 'launch').glob('*.py')
  }


@pytest.mark.parametrize('name', cli.COMMANDS)
def test_every_command_describes_itself(name, capsys):
  before = signal.getsignal(signal.SIGINT)
  try:
    with pytest.raises(SystemExit) as ended:
      sys.exit(cli.launch(name, [f'jaxrl {name}', '--help']))
  finally:
    signal.signal(signal.SIGINT, before)
  assert not ended.value.code
  text = capsys.readouterr().out
  assert f'jaxrl {name}' in text
  assert ('--config: ' in text) == (name in ('train', 'evaluate', 'curate'))


def test_all_public_names_can_be_imported_at_once():
  names = {}
  exec('from jaxrl_llm import *', names)
  assert set(api.__all__) <= set(names)
