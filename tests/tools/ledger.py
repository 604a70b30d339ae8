"""Pytest plugin of the acceptance tier: skips tests that have passed at this commit, and tabulates
all results.

The environment variable JAXRL_TEST_LEDGER switches it on; it names the directory of
`acceptance.jsonl`, which gets a line for each result. At the end of each session,
`docs/develop/acceptance_runs.md` gets the newest result of each test.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TABLE = pathlib.Path('docs/develop/acceptance_runs.md')


def commit(root: pathlib.Path) -> tuple[str, bool]:
  """(Short hash of the commit, whether nothing but the table differs from it)."""

  def git(*words):
    return subprocess.run(
      ['git', *words], cwd=root, capture_output=True, text=True, check=True
    ).stdout

  lines = git('status', '--porcelain', '--untracked-files=all').splitlines()
  return git('rev-parse', '--short', 'HEAD').strip(), all(line[3:] == str(TABLE) for line in lines)


def read(file: pathlib.Path) -> list[dict]:
  """The results so far, without lines that a kill cut short."""
  rows = []
  for line in file.read_text().splitlines() if file.exists() else ():
    with contextlib.suppress(ValueError):
      rows.append(json.loads(line))
  return rows


def table(rows: list[dict]) -> str:
  """Markdown: the newest result of each test, by file."""
  newest = {row['test']: row for row in rows}
  lines = [
    '# Acceptance runs',
    '',
    'Written by `bash launch/test.sh --tier=acceptance` (`tests/tools/ledger.py`): the newest '
    'result of each of its',
    'tests.',
    'A commit with a plus had uncommitted changes.',
    '',
    '| test | commit | day | result | seconds |',
    '|---|---|---|---|---|',
  ]
  for row in sorted(newest.values(), key=lambda row: row['test']):
    lines.append(
      f'| `{row["test"]}` | {row["commit"]} | {row["day"]} | {row["result"]} | '
      f'{row["seconds"]:.0f} |'
    )
  return '\n'.join(lines) + '\n'


class Ledger:
  """The plugin, for the repository at `root` and the results in `directory`."""

  def __init__(self, root: pathlib.Path, directory: pathlib.Path):
    self._root, self._file = root, directory / 'acceptance.jsonl'
    self._commit, self._clean = commit(root)
    self._seconds: dict[str, float] = {}
    self._results: dict[str, str] = {}

  def pytest_collection_modifyitems(self, config, items):
    rows = read(self._file) if self._clean else []
    passed = {
      row['test'] for row in rows if (row['commit'], row['result']) == (self._commit, 'passed')
    }
    done = [item for item in items if item.nodeid in passed]
    items[:] = [item for item in items if item.nodeid not in passed]
    if done:
      config.hook.pytest_deselected(items=done)

  def pytest_runtest_logreport(self, report):
    """Runs in the process that the workers report to."""
    test = report.nodeid
    self._seconds[test] = self._seconds.get(test, 0.0) + report.duration
    if report.outcome != 'passed' or report.when == 'call':
      self._results.setdefault(test, report.outcome)
      if report.outcome == 'failed':
        self._results[test] = 'failed'
    if report.when == 'teardown' and test in self._results:
      row = {
        'test': test,
        'commit': self._commit + ('' if self._clean else '+'),
        'day': datetime.date.today().isoformat(),
        'result': self._results[test],
        'seconds': round(self._seconds[test], 1),
      }
      with self._file.open('a') as file:
        # The newline comes first, to end a line that a kill cut short.
        file.write('\n' + json.dumps(row))

  def pytest_sessionfinish(self, session, exitstatus):
    if rows := read(self._file):
      (self._root / TABLE).write_text(table(rows))
    # Nothing was left to run: all tests have passed.
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and rows:
      session.exitstatus = pytest.ExitCode.OK


class _Deselects:
  """The part of the plugin for xdist's workers, which write nothing themselves."""

  def __init__(self, ledger: Ledger):
    self.pytest_collection_modifyitems = ledger.pytest_collection_modifyitems


def pytest_configure(config):
  if directory := os.environ.get('JAXRL_TEST_LEDGER'):
    path = pathlib.Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(ROOT, path)
    config.pluginmanager.register(
      _Deselects(ledger) if hasattr(config, 'workerinput') else ledger, 'ledger-of-tests'
    )
