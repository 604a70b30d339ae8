"""A run with everything on that meets faults at random moments: two trainer processes, two fake
vLLM servers, explorers, partial rollouts, scorers in workers and behind HTTP. It
loses no sample, trains on none twice, and no wait of it expires.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time

import attached
import job
import psutil
import pytest
from services import CUT, HANG, Service

from jaxrl_llm.replay.audit import audit

pytestmark = pytest.mark.full
SCORERS = [
  {'name': 'verifier', 'options': {'partial_credit': True}},
  {'name': 'http', 'weight': 0.1, 'options': {'request_deadline_s': 3.0}},
]
FLAGS = (
  '--config.learner.mesh.fsdp=2',
  '--config.stages.grpo.source.bound=2',
  '--config.stages.grpo.evaluate_every=null',
  '--config.rollout.explorers={"processes":2,"groups":6,"silent_s":10}',
  '--config.rollout.partial={"budget":3,"max_spans":4}',
  *(
    f'--config.rollout.vllm.{name}={value}'
    for name, value in {
      'latency_s': 10,
      'min_tokens_per_s': 20,
      'start_deadline_s': 60,
      'transfer_deadline_s': 30,
      'max_retries': 20,
    }.items()
  ),
)


class Servers:
  """Two fake servers, each of which is started again when it has ended."""

  def __init__(self, folder):
    self._folder, self._stack, self._ending = folder, contextlib.ExitStack(), threading.Event()
    self.processes = {}

  def __enter__(self):
    for name in ('a', 'b'):
      (self._folder / name).mkdir()
      self._start(name)
    self._watch = threading.Thread(target=self._restart)
    self._watch.start()
    return self

  def _start(self, name):
    folder = self._folder / name
    (folder / '0.sock').unlink(missing_ok=True)
    ((process, address),) = self._stack.enter_context(attached.fake_servers(folder, 1))
    self.processes[name] = process, address

  def _restart(self):
    while not self._ending.wait(0.05):
      for name, (process, _) in self.processes.items():
        if process.poll() is not None:
          self._start(name)

  def __exit__(self, *error):
    self._ending.set()
    self._watch.join()
    self._stack.close()


class Soak:
  """The run, started again whenever a fault has ended it."""

  def __init__(self, folder, seed):
    self.random, self.process, self.disk_was_full = random.Random(seed), None, False
    self.run = folder / 'disk' / 'run'
    self.service, self.troubles, self.servers = Service(self.answer), [], None
    self.folder, self.met = folder, []

  def answer(self, body):
    trouble = self.troubles.pop() if self.troubles else None
    if trouble == 'slow':
      time.sleep(0.2)
    elif trouble is not None:
      return trouble
    return {'value': len(body['completion']) / 8}

  def flags(self, steps):
    scorers = [SCORERS[0], SCORERS[1] | {'options': SCORERS[1]['options'] | self.address}]
    return (
      *FLAGS,
      *attached.flags_of([*self.servers.processes.values()]),
      f'--config.rewards.scorers={json.dumps(scorers)}',
      f'--config.stages.grpo.steps={steps}',
    )

  @property
  def address(self):
    return {'addresses': [self.service.address]}

  def ensure_running(self, steps):
    """Starts the run if a fault has ended it, and waits until it has come further than before."""
    if self.process is not None and self.process.poll() is not None:
      code, (out, err) = self.process.returncode, self.process.communicate()
      if self.disk_was_full:
        assert code == 1 and any(text in out + err for text in FULL), (code, self.met, out + err)
      else:
        assert code in (128 + signal.SIGKILL, 128 + signal.SIGTERM), (code, self.met, out + err)
      assert 'run stopped: wait ' not in out + err, (self.met, out + err)
      self.process = None
    self.disk_was_full = False
    if self.process is None:
      done = len(job.rows(self.run))
      self.process = job.start(self.run, *self.flags(steps), processes=2)
      job.wait_for_rows(self.run, max(done, 13) + 1, self.process, timeout_s=300)

  def meet(self, kind):
    """One fault; a kind whose process is not there just now is passed over."""
    self.met.append(kind)
    if kind in TROUBLES:
      self.troubles.extend(TROUBLES[kind])
    elif kind == 'preempt':
      self.process.send_signal(signal.SIGTERM)
      self.process.wait(timeout=120)
    elif kind == 'full disk':
      self.fill_disk()
    else:
      what, of = kind.split(' ', 1)
      victims = [*self.victims(of)]
      if not victims:
        return
      victim = self.random.choice(victims)
      with contextlib.suppress(psutil.NoSuchProcess):
        if what == 'kill':
          victim.kill()
        else:
          victim.suspend()
          time.sleep(self.random.random() * 2)
          victim.resume()
      if kind == 'kill trainer':
        self.process.wait(timeout=120)

  def fill_disk(self):
    """Leaves no space on the run's disk until the run has ended."""
    filler = self.run.parent / 'filler'
    try:
      with filler.open('wb', buffering=0) as file, contextlib.suppress(OSError):
        while True:
          file.write(bytes(1 << 16))
      with contextlib.suppress(subprocess.TimeoutExpired):
        self.process.wait(timeout=120)
      self.disk_was_full = True
    finally:
      filler.unlink()

  def victims(self, of):
    if of == 'server':
      running = [p.pid for p, _ in self.servers.processes.values() if p.poll() is None]
      return [psutil.Process(pid) for pid in running if psutil.pid_exists(pid)]
    tree = psutil.Process(self.process.pid).children(recursive=True)
    return [process for process in tree if VICTIMS[of](process)]


def words(process):
  with contextlib.suppress(psutil.NoSuchProcess):
    return '' if process is None else ' '.join(process.cmdline())
  return ''


def is_worker(process):
  with contextlib.suppress(psutil.NoSuchProcess):
    return 'forkserver' in words(process) and 'forkserver' in words(process.parent())
  return False


VICTIMS = {
  'explorer': lambda p: 'jaxrl_llm.app.serve.explorer' in words(p) and 'guard.py' not in words(p),
  'worker': is_worker,
  'trainer': lambda p: 'launch/train.py' in words(p) and 'local.py' not in words(p),
}
TROUBLES = {
  'service refuses': [503] * 3,
  'service cuts': [CUT] * 2,
  'service hangs': [HANG],
  'service is slow': ['slow'] * 20,
}
FULL = ('No space left on device', 'disk is full')
KINDS = (
  *(f'{what} {of}' for what in ('kill', 'stop') for of in ('explorer', 'worker', 'server')),
  *TROUBLES,
  *('kill trainer', 'preempt', 'full disk'),
)


@pytest.fixture
def has_own_disk(tmp_path):
  """Whether `disk` is a file system of its own, which may be filled up. Only root can mount one."""
  disk = tmp_path / 'disk'
  disk.mkdir()
  mounted = shutil.which('mount') and not subprocess.call(
    ['mount', '-t', 'tmpfs', '-o', 'size=1g', 'tmpfs', str(disk)], stderr=subprocess.DEVNULL
  )
  yield bool(mounted)
  if mounted:
    subprocess.check_call(['umount', '-l', str(disk)])


@pytest.mark.parametrize(
  'faults',
  [pytest.param(13, id='13'), pytest.param(200, id='200', marks=pytest.mark.acceptance)],
)
def test_a_run_with_everything_on_loses_nothing_to_faults(
  tmp_path, faults, has_own_disk, record_property
):
  soak = Soak(tmp_path, seed=faults)
  known = [kind for kind in KINDS if has_own_disk or kind != 'full disk']
  kinds = [known[i % len(known)] for i in range(faults)]
  soak.random.shuffle(kinds)
  with soak.service.in_thread(), Servers(tmp_path) as soak.servers:
    for kind in kinds:
      soak.ensure_running(steps=10_000)
      time.sleep(soak.random.random() * 0.5)
      soak.meet(kind)
    soak.ensure_running(steps=10_000)
    soak.process.send_signal(signal.SIGTERM)
    soak.process.communicate(timeout=120)
    done = job.rows(soak.run)[-1]['training/global_step']
    job.train(soak.run, *soak.flags(done - 12 + 2), processes=2)
  record_property('steps', str(done))
  report = audit(soak.run / 'replay')
  assert report.ok and report.live == (), report.lines
  assert set(report.uses) == {1} and report.states['trained'] == (done + 2 - 12) * 6 * 4
  rows = [row for row in job.rows(soak.run) if 'partial/cut' in row]
  assert len(rows) == done + 2 - 12 and max(row['staleness/max'] for row in rows) <= 2
  assert os.path.getsize(soak.run / 'report.html')
