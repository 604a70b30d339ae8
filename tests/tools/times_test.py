"""Times of a test run: the plugin's records, a killed worker's too, and the report of them."""

import json
import os
import subprocess
import sys
import textwrap
import time

import pytest
import times


def write(path, *records, torn=''):
  path.write_text(''.join(json.dumps(record) + '\n' for record in records) + torn)


def a_test(name, **seconds):
  return {
    'kind': 'test',
    'test': name,
    'cpu': 0.5,
    'setup': 0.0,
    'call': 0.0,
    'teardown': 0.0,
    **seconds,
  }


@pytest.fixture
def folder(tmp_path):
  collection = {'kind': 'collection', 'wall': 10.0, 'cpu': 8.0}
  write(
    tmp_path / 'phases.jsonl',
    {'name': 'ruff', 'begin': 100.0, 'end': 101.5, 'code': 0},
    {'name': 'pytest', 'begin': 101.5, 'end': 161.5, 'code': 1},
    torn='{"name": "pytest 3',
  )
  write(
    tmp_path / 'pytest-gw0.jsonl',
    collection,
    a_test(
      'tests/a_test.py::test_one', setup=1.0, call=20.0, teardown=2.0, compilation=3.0, job=15.0
    ),
    a_test('tests/b_test.py::test_two[x|y]', call=4.0),
    torn='{"kind": "test", "test": "tests/c_test.py::test_cut_of',
  )
  write(
    tmp_path / 'pytest-gw1.jsonl',
    collection,
    a_test('tests/a_test.py::test_three', call=7.0, servers=5.0),
    3,
  )
  (tmp_path / 'pytest-gw2.jsonl').write_text('')  # Killed before it had collected.
  return tmp_path


def test_totals_are_of_all_workers_and_each_second_is_of_one_kind(folder):
  read = times.Times(folder)
  wanted = {
    'collection': 20.0,
    'compilation': 3.0,
    'job': 15.0,
    'servers': 5.0,
    'other': 34.0 - 23.0,
  }
  assert read.totals() == pytest.approx(wanted)
  assert list(read.totals()) == list(wanted)
  assert [
    (name, file['wall'], file['compilation'], file['tests']) for name, file in read.files()
  ] == [
    ('tests/a_test.py (pytest)', 30.0, 3.0, 2),
    ('tests/b_test.py (pytest)', 4.0, 0.0, 1),
  ]
  assert [test['wall'] for test in read.slowest(2)] == [23.0, 7.0]


def test_the_report_is_a_page_and_one_screen(folder, capsys):
  assert times.main([str(folder)]) == 0
  printed = capsys.readouterr().out.splitlines()
  assert len(printed) <= 30
  assert printed[1] == '      60.0  pytest'
  page = (folder / 'times.md').read_text().splitlines()
  assert '| pytest | 1.50 | 61.50 | 60.00 | 1 |' in page
  assert '| job | 15.00 |' in page
  assert '| pytest-gw0 | 10.00 | 8.00 | 27.00 | 1.00 |' in page
  assert '| tests/a_test.py (pytest) | 2 | 30.00 | 1.00 | 3.00 | 15.00 | 5.00 |' in page
  row = (
    r'| `tests/b_test.py::test_two[x\|y]` (pytest) | 4.00 | 0.00 | 4.00 | 0.00 | 0.50 | 0.00 | '
    r'0.00 | 0.00 |'
  )
  assert row in page


def test_many_tests_and_phases_stay_one_screen_and_40_rows(tmp_path, capsys):
  write(
    tmp_path / 'phases.jsonl',
    *({'name': f'p{n}', 'begin': 0.0, 'end': float(n), 'code': 0} for n in range(30)),
  )
  write(
    tmp_path / 'pytest.jsonl',
    *(a_test(f'tests/a{n}_test.py::test', call=float(n)) for n in range(60)),
  )
  assert times.main([str(tmp_path)]) == 0
  assert len(capsys.readouterr().out.splitlines()) <= 30
  assert (
    sum(line.startswith('| `tests/') for line in (tmp_path / 'times.md').read_text().splitlines())
    == 40
  )


def test_an_empty_folder_is_reported_and_a_missing_one_is_one_line(tmp_path, capsys):
  assert times.main([str(tmp_path)]) == 0
  assert (tmp_path / 'times.md').exists()
  capsys.readouterr()
  assert times.main([str(tmp_path / 'missing')]) == 2
  assert (
    capsys.readouterr().err == 'times: wanted one folder: python tests/tools/times.py runs/tests\n'
  )


def test_a_phase_inside_another_is_counted_once_also_where_it_raises(monkeypatch):
  now = iter([1.0, 6.0])
  monkeypatch.setattr(times, '_seconds', times.collections.Counter())
  monkeypatch.setattr(time, 'perf_counter', lambda: next(now))
  with pytest.raises(KeyError), times.phase('job'), times.phase('servers'):
    raise KeyError
  assert times._seconds == {'job': 5.0}


TESTS = """
  import os
  import subprocess
  import sys
  import time

  import times


  def test_waits():
    with times.phase('job'):
      time.sleep(0.05)


  def test_compiles():
    import jax
    import times
    jax.monitoring.record_event_duration_secs(times.COMPILATION, 0.25)
    jax.monitoring.record_event_duration_secs('/another', 100.0)


  def test_starts_a_process():
    burning = 'import time\\nwhile time.process_time() < 0.3: pass'
    subprocess.run([sys.executable, '-c', burning], check=True)


  def test_sees_no_variable():
    assert times.VARIABLE not in os.environ


  def test_is_killed():
    if os.environ.get('KILLED'):
      os._exit(1)
"""
JAX = """
  import types
  import sys

  listeners = []
  monitoring = types.SimpleNamespace(
    register_event_duration_secs_listener=listeners.append,
    record_event_duration_secs=lambda event, \
seconds: [listener(event, seconds, a='b') for listener in listeners],
  )
"""


@pytest.mark.full
@pytest.mark.parametrize('workers', [0, 1])
@pytest.mark.parametrize('killed', ['', 'yes'])
def test_the_plugin_writes_a_file_for_each_process(tmp_path, workers, killed):
  for name, text in (
    ('some_test.py', TESTS),
    ('jax.py', JAX),
    ('conftest.py', "import jax\npytest_plugins = ['times']"),
  ):
    (tmp_path / name).write_text(textwrap.dedent(text))
  environment = {key: value for key, value in os.environ.items() if not key.startswith('PYTEST_')}
  environment |= {'PYTHONPATH': os.path.dirname(times.__file__), 'KILLED': killed}
  environment |= {times.VARIABLE: str(tmp_path / 'out' / 'run.jsonl')}
  command = [
    sys.executable,
    '-m',
    'pytest',
    '-q',
    '-p',
    'no:cacheprovider',
    '-p',
    'no:hypothesispytest',
  ]
  command += [
    f'--numprocesses={workers}',
    '--max-worker-restart=0',
    f'--rootdir={tmp_path}',
    'some_test.py',
  ]
  ran = subprocess.run(
    command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
  )
  assert (ran.returncode != 0) == bool(killed), ran.stdout
  files = sorted(path.name for path in (tmp_path / 'out').iterdir())
  assert files == [['run.jsonl'], ['run-gw0.jsonl']][workers]
  first, *tests = times.read_lines(tmp_path / 'out' / files[0])
  assert first['kind'] == 'collection' and first['wall'] > 0 and first['cpu'] > 0
  if not killed:
    *tests, last = tests
    assert last['kind'] == 'end' and last['wall'] >= first['wall']
  names = [
    'test_waits',
    'test_compiles',
    'test_starts_a_process',
    'test_sees_no_variable',
    *([] if killed else ['test_is_killed']),
  ]
  assert [test['test'] for test in tests] == [f'some_test.py::{name}' for name in names]
  assert all(test.keys() >= {'setup', 'call', 'teardown', 'cpu'} for test in tests)
  assert 0.05 <= tests[0]['job'] <= tests[0]['call'] + 0.001
  assert tests[1]['compilation'] == 0.25
  assert tests[2]['cpu'] >= 0.3
  assert not {'job', 'compilation'} & tests[3].keys()
