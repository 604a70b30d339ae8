"""Runs from Python: `train` of a configuration value, in a script and where an event loop is running."""

import json
import subprocess
import sys

import job
import pytest

pytestmark = pytest.mark.full

PROGRAM = """
import asyncio, json, sys

from jaxrl_llm.api import UserError, load_config, train


async def in_a_notebook(config, workdir):
  return train(config, workdir)


if __name__ == '__main__':
  config = load_config(sys.argv[1], json.loads(sys.argv[3]))
  in_loop = asyncio.run(in_a_notebook(config, sys.argv[2]))
  again = train(config, sys.argv[2])
  assert again == in_loop and again.finished
  assert again.model.is_dir() and again.report.is_file()
  print(json.dumps(again.metrics[-1]))
  try:
    train(load_config(sys.argv[1], {**json.loads(sys.argv[3]), 'seed': 1}), sys.argv[2])
  except UserError as error:
    print(error)
"""


def test_a_run_from_python_is_that_of_the_command_line(tmp_path):
  """Bit for bit, in a running event loop too; started again, it returns the same; another seed is refused."""
  flags = dict(flag.removeprefix('--config.').split('=', 1) for flag in job.QUICK[1:])
  overrides = {**flags, 'compilation_cache': str(job.session() / 'programs')}
  (tmp_path / 'program.py').write_text(PROGRAM)
  done = subprocess.run(
    [sys.executable, tmp_path / 'program.py', 'quickstart', tmp_path / 'run', json.dumps(overrides)],
    env=job.environment(),
    cwd=tmp_path,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr
  *_, last_row, refusal = done.stdout.splitlines()
  assert json.loads(last_row) == job.rows(tmp_path / 'run')[-1]
  assert 'seed' in refusal
  job.assert_equal_runs(tmp_path / 'run', job.quick_run())
