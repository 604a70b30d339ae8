"""A run with everything on that meets faults at random moments: two trainer processes, two fake
vLLM servers that stream, explorers, partial rollouts, scorers in workers, behind HTTP and with a
sandbox. It loses no sample, trains on none twice, no wait of it expires, and no score of the
sandbox is wrong.
"""

import builtins
import collections
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import string
import subprocess
import time

import attached
import job
import psutil
import pytest
from paths import FIXTURES
from services import CUT, HANG, RESET, Service

from jaxrl_llm.replay.audit import audit
from jaxrl_llm.rollout.vllm.publication import FILE

pytestmark = pytest.mark.full
STREAMS = ('--piece=1', '--token_s=0.05')
"""Options of the servers, whose answers are in flight for long enough to be cut."""
SCORERS = [
  {'name': 'verifier', 'domains': ['general'], 'options': {'partial_credit': True}},
  {'name': 'code', 'domains': ['code'], 'retries': 3, 'options': {'wall_s': 8.0}},
  {'name': 'http', 'weight': 0.1, 'options': {'request_deadline_s': 3.0}},
]
SFT = 36
"""Steps of demonstrations, after which some answers to code tasks pass."""
FLAGS = (
  f'--config.stages.sft.steps={SFT}',
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
      'stream': 1,
    }.items()
  ),
)


PROGRAM = 'len'
"""A program of the quickstart's characters that ends without an exception."""
TESTS = {'>': [{'stdin': '', 'stdout': ''}], '>>': ['assert True']}
"""Both forms of tests, of a program's output and of its namespace, by a prompt's first letters."""


def write_programs(folder):
  """Writes the file of `fixtures/soaked.py`, with more tasks than there are demonstrations."""
  rows = [
    {'question': mark + first + second, 'answer': PROGRAM, 'word': PROGRAM, 'tests': tests}
    for first, second in itertools.product(string.ascii_lowercase, repeat=2)
    for mark, tests in TESTS.items()
  ]
  (folder / 'code.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))


class Soak:
  """The run, started again whenever a fault has ended it."""

  def __init__(self, folder, seed):
    self.random, self.process, self.excuses = random.Random(seed), None, ()
    self.disk = folder / 'disk'
    self.run = self.disk / 'run'
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
    *others, http = SCORERS
    scorers = [*others, http | {'options': http['options'] | self.address}]
    return (
      *FLAGS,
      *self.servers.flags,
      # The full disk is that of the published weights too.
      f'--config.rollout.vllm.publish_dir={self.disk / "published"}',
      f'--config.rewards.scorers={json.dumps(scorers)}',
      f'--config.stages.grpo.steps={steps}',
    )

  @property
  def address(self):
    return {'addresses': [self.service.address]}

  @property
  def config(self):
    return f'--config={FIXTURES / "soaked.py"}:{self.folder}'

  def start(self, steps):
    path = os.pathsep.join(map(str, (job.ROOT, FIXTURES, job.ROOT / 'configs')))
    config, environ = (self.config, *job.QUICK[1:]), job.environment(PYTHONPATH=path)
    flags = self.flags(steps)
    return job.start(self.run, *flags, config=config, processes=2, environ=environ)

  def stop(self):
    """Ends the run with SIGTERM, and lets it complete two more steps. Returns its steps."""
    self.process.send_signal(signal.SIGTERM)
    self.process.communicate(timeout=120)
    done = job.rows(self.run)[-1]['training/global_step'] + 2
    last = self.start(done - SFT)
    _, err = last.communicate(timeout=300)
    assert last.returncode == 0, err[-4000:]
    return done

  def ensure_running(self, steps):
    """Starts the run if a fault has ended it, and waits until it has come further than before."""
    if self.process is not None and self.process.poll() is not None:
      code, (out, err) = self.process.returncode, self.process.communicate()
      excused = code == 1 and any(text in out + err for text in self.excuses)
      killed = code in (128 + signal.SIGKILL, 128 + signal.SIGTERM)
      assert excused or killed, (code, self.met, out + err)
      assert 'run stopped: wait ' not in out + err, (self.met, out + err)
      self.process, self.excuses = None, ()
    if self.process is None:
      done = len(job.rows(self.run))
      self.process = self.start(steps)
      job.wait_for_rows(self.run, max(done, SFT + 1) + 1, self.process, timeout_s=300)

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
    elif kind == 'flipped byte':
      self.flip_byte()
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
    filler = self.disk / 'filler'
    try:
      with filler.open('wb', buffering=0) as file, contextlib.suppress(OSError):
        while True:
          file.write(bytes(1 << 16))
      with contextlib.suppress(subprocess.TimeoutExpired):
        self.process.wait(timeout=120)
      self.excuses = FULL
    finally:
      filler.unlink()

  def flip_byte(self):
    """Flips a byte of the newest published weights, and kills a server, which comes back to
    them.
    """
    files = sorted((self.disk / 'published').glob(f'**/*.*/{FILE}'), key=os.path.getmtime)
    with contextlib.suppress(IndexError, FileNotFoundError), files[-1].open('r+b') as file:
      file.seek(-9, os.SEEK_END)
      (byte,) = file.read(1)
      file.seek(-9, os.SEEK_END)
      file.write(bytes([byte ^ 1]))
      self.excuses = FLIPPED
    self.meet('kill server')

  def victims(self, of):
    if of == 'server':
      running = [p.pid for p, _ in self.servers.processes.values() if p.poll() is None]
      return [psutil.Process(pid) for pid in running if psutil.pid_exists(pid)]
    supervisor = psutil.Process(self.process.pid)
    if of == 'trainer':
      return supervisor.children()
    return [process for process in supervisor.children(recursive=True) if VICTIMS[of](process)]


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
  'sandbox': lambda p: 'inside.zygote' in words(p),
}
TROUBLES = {
  'service refuses': [503] * 3,
  'service cuts': [CUT] * 2,
  'service resets': [RESET] * 2,
  'service hangs': [HANG],
  'service is slow': ['slow'] * 20,
}
NAMES = {*dir(builtins), 'pass'}
TOKENS = ('run/engine_continued', 'run/engine_kept_tokens', 'run/engine_lost_tokens')
FULL = ('No space left on device', 'disk is full')
FLIPPED = ('was not published', 'no engine left')
"""Reasons for which a run may end if no server has loaded the weights before they are damaged."""
KINDS = (
  *('kill explorer', 'kill worker', 'kill sandbox', 'kill server'),
  *('stop worker', 'stop sandbox', 'stop server', 'service cuts', 'service resets'),
  *('service hangs', 'kill trainer', 'full disk', 'flipped byte'),
  *('stop explorer', 'service refuses', 'service is slow', 'preempt'),
)
"""All kinds of faults. The full tier meets the first 13; each test ends with a SIGTERM anyway."""


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
  write_programs(tmp_path)
  with soak.service.in_thread(), attached.Restarted(tmp_path, *STREAMS) as soak.servers:
    for kind in kinds:
      soak.ensure_running(steps=10_000)
      time.sleep(soak.random.random() * 0.5)
      soak.meet(kind)
    soak.ensure_running(steps=10_000)
    done = soak.stop()
  record_property('steps', str(done))
  report = audit(soak.run / 'replay')
  assert report.ok and report.live == (), report.lines
  assert set(report.uses) == {1} and report.states['trained'] == (done - SFT) * 6 * 4
  rows = [row for row in job.rows(soak.run) if 'partial/cut' in row]
  assert len(rows) == done - SFT and max(row['staleness/max'] for row in rows) <= 2
  record_property('tokens', str({name: sum(row[name] for row in rows) for name in TOKENS}))
  record_property('scores', str(check_scores(soak.run)))
  assert os.path.getsize(soak.run / 'report.html')


class Episodes(Soak):
  """A run whose samples are episodes of two turns. One step in 40 of their environment hangs."""

  config = job.QUICK[0]

  def flags(self, steps):
    options = {'environment': 'stuck_game:StuckGame', 'options': {'one_in': 40}, 'deadline_s': 1}
    workflow = {'kind': 'environment', 'options': options | {'max_turns': 2, 'turn_tokens': 2}}
    return (
      *(flag for flag in FLAGS if 'partial' not in flag),
      *self.servers.flags,
      f'--config.rollout.vllm.publish_dir={self.disk / "published"}',
      f'--config.rollout.workflow={json.dumps(workflow)}',
      '--config.rewards.scorers=[{"name":"environment"}]',
      f'--config.stages.grpo.steps={steps}',
    )


@pytest.mark.acceptance
def test_episodes_that_are_interrupted_end_in_one_state(tmp_path):
  """Kills and stops of servers, explorers and trainers, and environments that hang."""
  (tmp_path / 'disk').mkdir()
  soak = Episodes(tmp_path, seed=0)
  victims = ('server', 'explorer')
  kinds = [*(f'{what} {of}' for of in victims for what in ('kill', 'stop')), 'kill trainer'] * 4
  soak.random.shuffle(kinds)
  with attached.Restarted(tmp_path, *STREAMS) as soak.servers:
    for kind in kinds:
      soak.ensure_running(steps=10_000)
      time.sleep(soak.random.random())
      soak.meet(kind)
    soak.ensure_running(steps=10_000)
    done = soak.stop()
  report = audit(soak.run / 'replay')
  assert report.ok and report.live == (), report.lines
  assert set(report.uses) == {1}
  rows = [row for row in job.rows(soak.run) if 'rewards/environment/mean' in row]
  assert len(rows) == done - SFT
  assert sum(row['num_unscorable'] for row in rows) > 0
  running = [p for p in psutil.process_iter() if str(soak.run) in words(p)]
  assert not running


def check_scores(run):
  """Checks the sandbox's scores: a program of letters alone ends without an exception only if it is
  a name of Python's. Returns how many scores are of each kind.
  """
  counts = collections.Counter()
  files = sorted((run / 'rollouts' / 'grpo').iterdir())
  for row in (json.loads(line) for file in files for line in file.open()):
    score = row['scores'].get('code')
    assert (score is not None) == (row['domain'] == 'code')
    if score is None:
      continue
    counts[score['status'], score['value']] += 1
    if score['status'] == 'ok':
      assert score['value'] == (row['completion'] in NAMES), row
  assert counts['ok', 0.0] > 0 and counts['ok', 1.0] > 0
  return dict(counts)
