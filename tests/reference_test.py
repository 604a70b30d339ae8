"""The pages of the reference that docs/generate.py writes are those of this code."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_generated_pages_are_current():
  command = [sys.executable, 'docs/generate.py', '--check']
  env = {**os.environ, 'PYTHONPATH': str(ROOT)}
  ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
  if ran.returncode:
    pytest.fail(ran.stderr.strip().splitlines()[-1], pytrace=False)
