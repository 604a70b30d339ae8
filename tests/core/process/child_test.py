"""A child's log is bounded, and its lines are read from what the log still holds."""

import asyncio
import os
import sys
import time

from jaxrl_llm.core.process import child

PRINTS = """
import os, sys, time
for i in range(40_000):
  print(f"{i:099}", flush=True)
# What is written during a cut may be lost, so the last line follows the last cut.
deadline = time.monotonic() + 60
while os.path.getsize(sys.argv[1]) > 100_000 and time.monotonic() < deadline:
  time.sleep(0.01)
print("the last line")
"""


def test_of_a_log_above_its_maximum_the_end_is_kept(tmp_path):
  log = tmp_path / 'logs' / 'child.log'
  started = child.Child('child', log=log, log_bytes=100_000)
  started.start([sys.executable, '-c', PRINTS, str(log)], os.environ, first_line='the first line')
  assert asyncio.run(started.wait()) == 0
  asyncio.run(started.stop(owner='the test'))
  assert log.stat().st_size <= 100_000
  lines = started.lines()
  assert lines[-1] == 'the last line' and 'the first line' not in lines


def test_every_child_has_a_maximum(tmp_path):
  started = child.Child('child', log=tmp_path / 'child.log')
  started.start([sys.executable, '-c', 'import time; time.sleep(600)'], os.environ)
  deadline = time.monotonic() + 60
  # Until the guard's own program has started, the command line is empty or another one.
  while child.GUARD.name not in (command := open(f'/proc/{started.pid}/cmdline').read()):
    assert time.monotonic() < deadline, command
    time.sleep(0.01)
  asyncio.run(started.stop(owner='the test'))
  assert f'--log_bytes={child.LOG_BYTES}' in command.split('\0')
