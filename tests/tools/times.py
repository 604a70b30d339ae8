"""Where a test run's time goes: a pytest plugin that records it, and a command that reports it.

  JAXRL_TEST_TIMES=runs/tests/pytest.jsonl python -m pytest …
  python tests/tools/times.py runs/tests

Each worker writes its own file (pytest-gw0.jsonl) line by line: a worker that is killed loses only
the test that it was running. The command reads these files and phases.jsonl (launch/test.sh),
writes times.md beside them, and prints the main figures.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pathlib
import resource
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import psutil

VARIABLE = 'JAXRL_TEST_TIMES'
"""Environment variable with the file to write; without it, nothing is written."""
COMPILATION = '/jax/core/compile/backend_compile_duration'
STAGES = ('setup', 'call', 'teardown')
WAITS = ('compilation', 'job', 'servers')
_SHORT_S = 0.2
"""Up to this length, tests are taken to start no process."""

_seconds: collections.Counter[str] = collections.Counter()
"""Seconds of the running test, by the kind of wait."""
_inside = threading.local()


@contextlib.contextmanager
def phase(kind: str) -> Iterator[None]:
  """Counts the block as the test's wait for a 'job' or for 'servers'; a nested phase counts as the
  outer one.
  """
  if getattr(_inside, 'phase', False):
    yield
    return
  begin = time.perf_counter()
  _inside.phase = True
  try:
    yield
  finally:
    _inside.phase = False
    _seconds[kind] += time.perf_counter() - begin


def _count_compilation(event: str, seconds: float, **_: Any) -> None:
  if event == COMPILATION:
    _seconds['compilation'] += seconds


class Recorder:
  """Writes one process's times to a file."""

  def __init__(self, path: pathlib.Path):
    path.parent.mkdir(parents=True, exist_ok=True)
    self._file = path.open('w')
    self._stages: dict[str, float] = {}
    self._children = 0.0
    self._listens = False

  def pytest_collection_finish(self) -> None:
    self._listen()
    self._write(kind='collection', wall=_age_of_process(), cpu=time.process_time())

  def pytest_runtest_logstart(self) -> None:
    self._listen()
    self._stages = {}
    self._cpu = time.process_time()
    _seconds.clear()

  def pytest_runtest_logreport(self, report: Any) -> None:
    self._stages[report.when] = report.duration

  def pytest_runtest_logfinish(self, nodeid: str) -> None:
    cpu = time.process_time() - self._cpu
    if sum(self._stages.values()) > _SHORT_S:  # Looking takes several ms.
      before, self._children = self._children, _cpu_of_children()
      cpu += max(0.0, self._children - before)
    self._write(kind='test', test=nodeid, cpu=cpu, **self._stages, **_seconds)

  def pytest_sessionfinish(self) -> None:
    self._write(kind='end', wall=_age_of_process(), cpu=time.process_time())

  def pytest_unconfigure(self) -> None:
    self._file.close()

  def _listen(self) -> None:
    """Subscribes to JAX's events once JAX has been imported."""
    if not self._listens and 'jax' in sys.modules:
      sys.modules['jax'].monitoring.register_event_duration_secs_listener(_count_compilation)
      self._listens = True

  def _write(self, **record: Any) -> None:
    rounded = {
      key: round(value, 4) if isinstance(value, float) else value for key, value in record.items()
    }
    self._file.write(json.dumps(rounded) + '\n')
    self._file.flush()


def pytest_configure(config: Any) -> None:
  file = os.environ.get(VARIABLE)
  worker = getattr(config, 'workerinput', None)
  if not file or (worker is None and config.getoption('numprocesses', None)):
    return  # The process that hands tests to workers runs none itself.
  del os.environ[VARIABLE]  # Or a pytest that a test starts would write there.
  path = pathlib.Path(file)
  if worker is not None:
    path = path.with_stem(f'{path.stem}-{worker["workerid"]}')
  config.pluginmanager.register(Recorder(path), 'times-recorder')


def _age_of_process() -> float:
  """Seconds since this process began, with its imports."""
  try:
    begin = int(pathlib.Path('/proc/self/stat').read_text().rpartition(')')[2].split()[19])
    now = float(pathlib.Path('/proc/uptime').read_text().split()[0])
  except (OSError, ValueError, IndexError):
    return time.process_time()
  return now - begin / os.sysconf('SC_CLK_TCK')


def _cpu_of_children() -> float:
  """Seconds of CPU of all processes that descend from this one, those that have ended included."""
  ended = resource.getrusage(resource.RUSAGE_CHILDREN)
  total = ended.ru_utime + ended.ru_stime
  for child in psutil.Process().children(recursive=True):
    with contextlib.suppress(psutil.NoSuchProcess):
      total += sum(child.cpu_times()[:4])  # Its own, and that of its children that have ended.
  return total


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
  """The records of a file, without lines that are incomplete."""
  records = []
  for line in path.read_text(errors='replace').splitlines() if path.exists() else ():
    with contextlib.suppress(ValueError):
      record = json.loads(line)
      if isinstance(record, dict):
        records.append(record)
  return records


class Times:
  """The records of a folder's files.

  Attributes:
    phases: parts of launch/test.sh, each with its name, and its begin and end in seconds since
      1970.
    workers: for each worker, seconds of collection and of tests.
    tests: for each test, seconds of its stages and waits.
  """

  def __init__(self, folder: pathlib.Path):
    self.phases = [
      phase
      for phase in read_lines(folder / 'phases.jsonl')
      if {'name', 'begin', 'end'} <= phase.keys()
    ]
    self.workers: dict[str, dict[str, float]] = {}
    self.tests: list[dict[str, Any]] = []
    for path in sorted(folder.glob('*.jsonl')):
      if path.name != 'phases.jsonl':
        self._add(path.stem, read_lines(path))

  def _add(self, worker: str, records: Iterable[dict[str, Any]]) -> None:
    total = self.workers[worker] = collections.defaultdict(float)
    for record in records:
      if record.get('kind') == 'collection':
        total['collection'] += record['wall']
        total['collection CPU'] += record['cpu']
      elif record.get('kind') == 'test':
        test = {
          'pass': worker.partition('-')[0],
          **record,
          'wall': sum(record.get(stage, 0) for stage in STAGES),
        }
        self.tests.append(test)
        total['tests'] += test['wall']
        total['tests CPU'] += test.get('cpu', 0)

  def totals(self) -> dict[str, float]:
    """Seconds of each kind, of all workers together."""
    waits = {kind: sum(test.get(kind, 0) for test in self.tests) for kind in WAITS}
    other = sum(test['wall'] for test in self.tests) - sum(waits.values())
    collection = sum(total['collection'] for total in self.workers.values())
    return {'collection': collection, **waits, 'other': max(other, 0.0)}

  def files(self) -> list[tuple[str, dict[str, float]]]:
    """Test files with their sums, the longest first."""
    sums: dict[str, dict[str, float]] = collections.defaultdict(
      lambda: collections.defaultdict(float)
    )
    for test in self.tests:
      file = sums[f'{test["test"].partition("::")[0]} ({test["pass"]})']
      file['tests'] += 1
      for key in ('wall', 'cpu', *WAITS):
        file[key] += test.get(key, 0)
    return sorted(sums.items(), key=lambda item: -item[1]['wall'])

  def slowest(self, count: int) -> list[dict[str, Any]]:
    return sorted(self.tests, key=lambda test: -test['wall'])[:count]


def page(times: Times) -> str:
  """The text of times.md."""
  parts = [
    '# Where the time went\n\nSeconds. Totals are of all workers together; a compilation is one in '
    'a test process. CPU time includes the processes that tests start.\n'
  ]
  origin = min((phase['begin'] for phase in times.phases), default=0.0)
  rows = [
    (
      phase['name'],
      phase['begin'] - origin,
      phase['end'] - origin,
      _duration(phase),
      phase.get('code', ''),
    )
    for phase in sorted(times.phases, key=lambda phase: phase['begin'])
  ]
  parts.append(_table('Phases', ('phase', 'begin', 'end', 'seconds', 'exit code'), rows))
  parts.append(_table('Kinds', ('kind', 'seconds'), times.totals().items()))
  keys = ('collection', 'collection CPU', 'tests', 'tests CPU')
  rows = [(name, *(total[key] for key in keys)) for name, total in times.workers.items()]
  parts.append(_table('Workers', ('worker', *keys), rows))
  keys = ('wall', 'cpu', *WAITS)
  rows = [(name, int(file['tests']), *(file[key] for key in keys)) for name, file in times.files()]
  parts.append(_table('Files', ('file', 'tests', *keys), rows))
  keys = ('wall', *STAGES, 'cpu', *WAITS)
  rows = [
    (f'`{test["test"]}` ({test["pass"]})', *(float(test.get(key, 0)) for key in keys))
    for test in times.slowest(40)
  ]
  parts.append(_table('The 40 slowest tests', ('test', *keys), rows))
  return '\n'.join(parts)


def summary(times: Times) -> list[str]:
  """The main figures, in at most 30 lines."""
  lines = ['seconds of each phase (some run side by side):']
  phases = sorted(times.phases, key=_duration, reverse=True)
  lines += [f'  {_duration(phase):8.1f}  {phase["name"]}' for phase in phases[:10]]
  if times.tests:
    lines.append(f'seconds of {len(times.tests)} tests, all workers together:')
    lines += [f'  {seconds:8.1f}  {kind}' for kind, seconds in times.totals().items()]
    lines.append('longest files:')
    lines += [f'  {file["wall"]:8.1f}  {name}' for name, file in times.files()[:5]]
    lines.append('slowest tests:')
    lines += [f'  {test["wall"]:8.1f}  {test["test"]}' for test in times.slowest(5)]
  return lines


def _duration(phase: dict[str, Any]) -> float:
  return phase['end'] - phase['begin']


def _table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> str:
  lines = [f'## {title}\n', _row(columns), '|---' * len(columns) + '|']
  return '\n'.join([*lines, *map(_row, rows)]) + '\n'


def _row(cells: Iterable[Any]) -> str:
  texts = (
    f'{cell:.2f}' if isinstance(cell, float) else str(cell).replace('|', '\\|') for cell in cells
  )
  return '| ' + ' | '.join(texts) + ' |'


def main(arguments: list[str]) -> int:
  if len(arguments) != 1 or not pathlib.Path(arguments[0]).is_dir():
    print('times: wanted one folder: python tests/tools/times.py runs/tests', file=sys.stderr)
    return 2
  folder = pathlib.Path(arguments[0])
  times = Times(folder)
  (folder / 'times.md').write_text(page(times))
  print('\n'.join(summary(times)))
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
