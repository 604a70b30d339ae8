"""Signals of a run: at once before the loop, with a commit in it, and at once again when the grace
period is over.
"""

import signal

import job
import pytest
import warm
from paths import ROOT

from jaxrl_llm.app.run import _stopped
from jaxrl_llm.master.loop import LoopState, Outcome

pytestmark = pytest.mark.full

PROGRAM = """
import asyncio, sys
from jaxrl_llm.app.stopping import Stopping
from jaxrl_llm.parallel.coordinator import Coordinator
from jaxrl_llm.parallel.device import DeviceThread, PeerFailed

async def main():
  stop = asyncio.get_running_loop().create_future()
  coordinator = Coordinator(DeviceThread(), on_signal=print)
  newest = int(sys.argv[3])
  stopping = Stopping(
    coordinator,
    stop.set_result,
    grace_s=float(sys.argv[2]),
    newest=lambda: newest,
    echo_s=float(sys.argv[4]),
  )
  stopping.install()
  if sys.argv[1] != 'setting up':
    stopping.begin()
  print('ready', flush=True)
  print('asked', await stop, flush=True)
  if sys.argv[1] == 'deserted':
    raise stopping.explain(PeerFailed('process 1: another process of the job is gone'))
  await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def program(tmp_path):
  file = tmp_path / 'program.py'
  file.write_text(PROGRAM)
  return file


def stopped(program, doing, *, grace_s=600.0, newest=3, echo_s=0.0, then=()):
  """(Exit code, last line of stderr) of a process that gets SIGTERM, and `then` other signals."""
  process = warm.start([program, doing, grace_s, newest, echo_s], cwd=ROOT, env=job.environment())
  try:
    assert process.stdout.readline() == 'ready\n'
    process.terminate()
    if then:
      assert process.stdout.readline() == 'asked 15\n'
    for signum in then:
      process.send_signal(signum)
    _, said = process.communicate(timeout=60)
  finally:
    process.kill()
  return process.returncode, said.strip().splitlines()[-1]


def test_before_the_loop_there_is_nothing_to_commit(program):
  assert stopped(program, 'setting up') == (
    143,
    'stopped by SIGTERM during set-up; start the same command again',
  )


@pytest.mark.parametrize(
  ('newest', 'words'), [(3, 'the newest commit is step 3'), (0, 'there is no commit')]
)
def test_when_the_grace_period_is_over_the_process_says_what_is_committed(program, newest, words):
  code, line = stopped(program, 'updating', grace_s=0.5, newest=newest)
  assert code == 143
  assert line == (
    'SIGTERM: still stopping after 0.45 s of 0.5 s (coordination.grace_s), exiting without '
    f'another commit; {words}; start the same command again to resume'
  )


def test_a_second_signal_ends_at_once(program):
  line = 'second signal: exiting without a commit'
  assert stopped(program, 'updating', then=[signal.SIGTERM]) == (-signal.SIGTERM, line)


def test_a_scheduler_and_a_supervisor_may_pass_on_the_same_sigterm(program):
  signals = [signal.SIGTERM, signal.SIGTERM, signal.SIGINT]
  line = 'second signal: exiting without a commit'
  assert stopped(program, 'updating', echo_s=600.0, then=signals) == (-signal.SIGINT, line)


def test_a_stopped_process_whose_peer_has_left_says_so(program):
  # Of `asyncio.run` here; `jaxrl train` prints the line alone, and exits with 143.
  code, line = stopped(program, 'deserted')
  assert code == 1 and 'Interrupted: stopped by SIGTERM, without another commit, because' in line


@pytest.mark.parametrize(
  ('step', 'committed', 'says'),
  [
    (7, 7, 'after step 7, committed in PATH'),
    (7, 4, 'after step 7; step 4 is committed in PATH'),
    (0, 0, 'before the first step'),
  ],
)
def test_a_run_that_has_stopped_says_which_step_is_committed(
  tmp_path, capsys, step, committed, says
):
  """After an interrupted evaluation beside training, not all steps are."""
  outcome = Outcome(LoopState(None, step), signal.SIGTERM)
  assert _stopped(outcome, tmp_path, committed, leads=True) == 128 + signal.SIGTERM
  line = f'stopped by SIGTERM {says}; start the same command again to resume\n'
  assert capsys.readouterr().err == line.replace('PATH', str(tmp_path))
