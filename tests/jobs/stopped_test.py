"""Whole runs of which one process is stopped: they recover, or end in time with a line; the same
command goes on.
"""

import contextlib
import signal
import threading
import time

import attached
import job
import psutil
import pytest

from jaxrl_llm.replay.audit import audit

pytestmark = pytest.mark.acceptance
EXPLORERS = '--config.rollout.explorers={"processes":2,"groups":3,"silent_s":10}'
LIMITS = {
  'latency_s': 10,
  'min_tokens_per_s': 20,
  'start_deadline_s': 15,
  'transfer_deadline_s': 15,
}
SERVERS = tuple(f'--config.rollout.vllm.{name}={value}' for name, value in LIMITS.items())


def words(process: psutil.Process) -> str:
  try:
    return ' '.join(process.cmdline())
  except psutil.NoSuchProcess:
    return ''


VICTIMS = {
  'explorer': lambda p: 'jaxrl_llm.app.serve.explorer' in words(p) and 'guard.py' not in words(p),
  'guard': lambda p: 'guard.py' in words(p),
  'fork server': lambda p: (
    'multiprocessing.forkserver' in words(p) and 'forkserver' not in words(p.parent())
  ),
  'scorer worker': lambda p: 'forkserver' in words(p) and 'forkserver' in words(p.parent()),
}


def stop_one(process, is_victim, among=()) -> psutil.Process:
  tree = [*psutil.Process(process.pid).children(recursive=True), *among]
  victim = next(p for p in tree if is_victim(p))
  victim.suspend()
  return victim


def end(process, victim) -> tuple[int, str]:
  """Exit code and last line. The victim goes on after the end, for it holds the run's output
  open.
  """
  main = psutil.Process(process.pid)

  def release() -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
      while main.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.1)
    with contextlib.suppress(psutil.NoSuchProcess):
      victim.resume()

  threading.Thread(target=release, daemon=True).start()
  _, said = process.communicate(timeout=400)
  return process.returncode, (said.splitlines() or [''])[-1]


def check(run, *flags, **options):
  """The same command ends well, with the result of a run that met nothing."""
  if not (run / 'report.html').exists():
    job.train(run, *flags, **options)
  assert audit(run / 'replay').ok


@pytest.mark.parametrize('kind', VICTIMS)
def test_a_process_that_is_stopped_is_replaced_or_ends_the_run_with_a_line(kind, tmp_path):
  run = tmp_path / 'run'
  process = job.start(run, EXPLORERS)
  job.wait_for_rows(run, 12 + 2, process)
  tree = psutil.Process(process.pid).children(recursive=True)
  victim = stop_one(process, VICTIMS[kind])
  code, last = end(process, victim)
  assert code == 0 or (code == 1 and last.startswith('run stopped: wait ')), (code, last)
  assert psutil.wait_procs(tree, timeout=60)[1] == [], 'no process is left'
  check(run, EXPLORERS)
  job.assert_equal_runs(run, job.quick_run())


def test_a_run_continues_when_one_of_two_servers_stops(tmp_path):
  run = tmp_path / 'run'
  with attached.fake_servers(tmp_path, 2) as servers:
    process = job.start(run, *attached.flags_of(servers), *SERVERS)
    job.wait_for_rows(run, 12 + 2, process)
    server = psutil.Process(servers[0][0].pid)
    victim = stop_one(process, lambda p: p == server, [server])
    assert end(process, victim)[0] == 0
  check(run)


def test_a_job_whose_first_process_is_stopped_is_ended_by_its_supervisor(tmp_path):
  run = tmp_path / 'run'
  flags = ('--config.learner.mesh.fsdp=2',)
  process = job.start(run, *flags, processes=2)
  job.wait_for_rows(run, 12 + 2, process)
  tree = psutil.Process(process.pid).children(recursive=True)
  # The supervisor starts its processes in the order of their numbers.
  first = min(psutil.Process(process.pid).children(), key=lambda child: child.pid)
  victim = stop_one(process, lambda p: p == first)
  code, last = end(process, victim)
  assert (
    code == 128 + signal.SIGABRT and last == 'local: culprit: process 1, ended by signal SIGABRT'
  ), last
  assert psutil.wait_procs(tree, timeout=60)[1] == [], 'no process is left'
  check(run, *flags, processes=2)
