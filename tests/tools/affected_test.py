"""Which tests a change may affect: in a small tree that is known entirely, and in this one."""

import functools
import subprocess
import textwrap

import affected
import pytest

FILES = {
  'jaxrl_llm/__init__.py': '',
  'jaxrl_llm/core/__init__.py': '',
  'jaxrl_llm/core/errors.py': 'class UserError(Exception): pass\n',
  'jaxrl_llm/ops/__init__.py': '',
  'jaxrl_llm/ops/linear.py': '''
    """Says what jaxrl_llm.master.loop is to it, in words only."""
    from typing import TYPE_CHECKING

    from ..core.errors import UserError

    if TYPE_CHECKING:
      from jaxrl_llm.master import loop
  ''',
  'jaxrl_llm/master/__init__.py': '',
  'jaxrl_llm/master/loop.py': """
    def run():
      from jaxrl_llm.ops import linear
  """,
  'jaxrl_llm/report/page.py': "import pathlib\nPARTS = pathlib.Path(__file__).parent / 'parts'\n",
  'jaxrl_llm/report/parts/style.css': '',
  'launch/train.py': 'from jaxrl_llm.master.loop import run\n',
  'launch/environment.sh': '',
  'launch/test.sh': 'bash launch/other.sh\n',
  'launch/other.sh': '',
  'benchmarks/steps.py': 'import jaxrl_llm.master.loop\n',
  'configs/quick.py': '',
  'constraints/py311.txt': '',
  'pyproject.toml': '',
  'docs/page.md': '',
  'docs/keys.md': '',
  'README.md': '',
  'tests/conftest.py': """
    import pytest
    import job

    @pytest.fixture
    def store():
      from storing import new_store
      return new_store()
  """,
  'tests/support/job.py': "COMMAND = ['launch/train.py', '--config=configs/quick.py:small']\n",
  'tests/support/storing.py': 'import jaxrl_llm.core.errors\n',
  'tests/support/fixtures/words.json': '',
  'tests/linear_test.py': 'from jaxrl_llm.ops.linear import linear\n',
  'tests/loop_test.py': 'import jaxrl_llm.master.loop\n',
  'tests/job_test.py': 'import job\n',
  'tests/module_test.py': "COMMAND = ['python', '-m', 'jaxrl_llm.master.loop']\n",
  'tests/chain_test.py': """
    import pathlib

    SCRIPT = ROOT / 'benchmarks' / 'steps.py'
  """,
  'tests/store_test.py': 'def test_store(store):\n  pass\n',
  'tests/words_test.py': "WORDS = 'fixtures/words.json'\n",
  'tests/page_test.py': 'from jaxrl_llm.report import page\n',
  'tests/keys_test.py': "DOCUMENT = 'docs/keys.md'\n",
  'tests/script_test.py': "SCRIPT = 'launch/test.sh'\n",
  'tests/lonely_test.py': 'import math\n',
}
TESTS = sorted(path for path in FILES if path.endswith('_test.py'))


@pytest.fixture
def tree(tmp_path):
  for path, text in FILES.items():
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(textwrap.dedent(text))
  return tmp_path


@pytest.mark.parametrize(
  ('changed', 'wanted'),
  [
    ('tests/lonely_test.py', 'lonely'),
    ('jaxrl_llm/core/errors.py', 'chain job linear loop module store'),
    ('jaxrl_llm/ops/linear.py', 'chain job linear loop module'),
    # A docstring or TYPE_CHECKING does not select `linear`.
    ('jaxrl_llm/master/loop.py', 'chain job loop module'),
    ('jaxrl_llm/master/__init__.py', 'chain job loop module'),
    ('launch/train.py', 'job'),
    ('configs/quick.py', 'job'),
    ('tests/support/job.py', 'job'),
    ('benchmarks/steps.py', 'chain'),
    ('tests/support/storing.py', 'store'),
    ('tests/support/fixtures/words.json', 'words'),
    ('jaxrl_llm/report/parts/style.css', 'page'),
    ('launch/other.sh', 'script'),
    ('docs/keys.md', 'keys'),
    ('docs/page.md', ''),
    ('README.md', ''),
    ('LICENSE', ''),
  ],
)
def test_a_change_selects_the_tests_that_reach_it(tree, changed, wanted):
  assert affected.Graph(tree, FILES).affected([changed]) == [
    f'tests/{name}_test.py' for name in wanted.split()
  ]


@pytest.mark.parametrize(
  'changed',
  [
    'tests/conftest.py',
    'pyproject.toml',
    'constraints/py311.txt',
    'launch/environment.sh',
    'data/unknown.bin',
  ],
)
def test_a_file_that_every_test_needs_or_that_is_unknown_selects_everything(tree, changed):
  assert affected.Graph(tree, [*FILES, changed]).affected([changed]) == TESTS


def test_several_changes_select_what_either_does_and_a_deleted_file_its_importers(tree):
  (tree / 'jaxrl_llm/master/loop.py').unlink()
  (tree / 'tests/chain_test.py').unlink()
  changed = ['jaxrl_llm/master/loop.py', 'tests/chain_test.py', 'tests/lonely_test.py', 'README.md']
  wanted = [f'tests/{name}_test.py' for name in ('job', 'lonely', 'loop', 'module')]
  assert affected.Graph(tree, FILES).affected(changed) == wanted


def test_changes_are_those_since_the_branch_left_main_and_what_is_not_committed(tree, capsys):
  def git(*arguments):
    who = ('-c', 'user.name=test', '-c', 'user.email=test@localhost', '-c', 'commit.gpgsign=false')
    subprocess.run(['git', *who, *arguments], cwd=tree, check=True, capture_output=True)

  def printed(*arguments):
    affected.main([*arguments], root=tree)
    return capsys.readouterr().out.split()

  git('init', '--initial-branch=main')
  git('add', '.')
  git('commit', '--message=1')
  assert printed() == []
  (tree / 'tests/new_test.py').write_text('')
  assert printed() == ['tests/new_test.py']
  git('checkout', '-b', 'branch')
  git('add', '.')
  git('commit', '--message=2')
  (tree / 'tests/lonely_test.py').write_text('')
  assert printed() == ['tests/lonely_test.py', 'tests/new_test.py']
  assert printed('--since=HEAD') == ['tests/lonely_test.py']
  with pytest.raises(SystemExit, match=r'^affected: git does not know the commit nowhere$'):
    printed('--since=nowhere')


@functools.cache
def this_tree() -> affected.Graph:
  files = (
    path
    for folder in affected.FOLDERS
    for path in (affected.ROOT / folder).rglob('*')
    if path.is_file()
  )
  return affected.Graph(affected.ROOT, [str(path.relative_to(affected.ROOT)) for path in files])


@pytest.mark.full
def test_in_this_tree_jobs_depend_on_the_trainer_and_small_parts_on_little():
  graph = this_tree()
  assert {'launch/train.py', 'jaxrl_llm/master/trainer.py'} <= graph.reachable(
    'tests/jobs/main_test.py'
  )
  assert 'tests/jobs/main_test.py' in graph.affected(['jaxrl_llm/ops/attention.py'])
  rotary = graph.reachable('tests/models/rotary_test.py')
  assert 'jaxrl_llm/models/rotary.py' in rotary
  assert not any(path.startswith(('jaxrl_llm/master/', 'launch/')) for path in rotary)
  assert 'tests/models/rotary_test.py' not in graph.affected(['jaxrl_llm/master/trainer.py'])
  assert 'tests/launch/scripts_test.py' in graph.affected(['launch/test.sh'])
  assert 'tests/runtime/metrics_test.py' in graph.affected(['docs/reference/metrics.md'])
  assert graph.affected(['README.md']) == []


def test_in_this_tree_every_module_of_the_package_is_reached_by_some_test():
  graph = this_tree()
  tests = [path for path in graph.needs if affected.is_test(path)]
  reached = set().union(*map(graph.reachable, tests))
  modules = {path for path in graph.needs if path.startswith('jaxrl_llm/') and path.endswith('.py')}
  assert modules - reached == set()
