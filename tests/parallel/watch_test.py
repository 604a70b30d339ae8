"""Three real processes of one job: a stopped one is named by the others, which end in time; then
three that leave in order.
"""

import contextlib
import os
import signal
import socket
import time

import job
import pytest
import warm
from paths import ROOT

pytestmark = pytest.mark.full

HEARTBEAT_S = 3
PROGRAM = f"""
import pathlib, sys, time
from jaxrl_llm.parallel.coordination import CoordinationConfig
from jaxrl_llm.parallel.job import join, this_job
membership = join(this_job(), CoordinationConfig(heartbeat_s={HEARTBEAT_S}))
print('joined', flush=True)
if sys.argv[1] == 'wait':
  time.sleep(600)  # As in a collective that never ends: nothing of ours looks at the others.
membership.leave(pathlib.Path(sys.argv[2]))
print('left', flush=True)
"""


@contextlib.contextmanager
def processes(folder, *arguments):
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{probe.getsockname()[1]}'
  place = {'JAX_COORDINATOR_ADDRESS': address, 'JAX_NUM_PROCESSES': '3'}
  script = folder / 'program.py'
  script.write_text(PROGRAM)
  started = [
    warm.start(
      [script, *arguments],
      cwd=ROOT,
      env=job.environment(JAX_PROCESS_ID=str(i), **place),
    )
    for i in range(3)
  ]
  try:
    yield started
  finally:
    for process in started:
      process.kill()
      process.communicate()


def test_a_stopped_process_is_named_by_the_others_which_end_in_time(tmp_path):
  with processes(tmp_path, 'wait') as (first, second, third):
    for process in (first, second, third):
      assert process.stdout.readline() == 'joined\n'
    second.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    _, said = first.communicate(timeout=60)
    assert first.returncode == os.EX_TEMPFAIL, said
    assert f'run stopped: process 0: no sign of life from process 1 for {HEARTBEAT_S} s ' in said
    third.communicate(timeout=60)
    # Aborted by JAX if it comes to look only after process 0 has left.
    assert third.returncode in (os.EX_TEMPFAIL, -signal.SIGABRT)
    # Far from the deadlines of collectives, on any machine.
    assert time.monotonic() - started < 60


def test_processes_leave_and_nothing_is_left(tmp_path):
  shared = tmp_path / 'shared'
  shared.mkdir()
  with processes(tmp_path, 'leave', shared) as all_three:
    for process in all_three:
      out, said = process.communicate(timeout=120)
      assert process.returncode == 0 and out.endswith('left\n'), said
      assert 'run stopped' not in said and 'Traceback' not in said
  assert list(shared.iterdir()) == []
