"""A process is killed between any two steps of the store, and at random times; then recovered and
audited.

The child runs one step off: each step it issues a group, drops one sample, leaves one unanswered
until the next step, and trains on what the step before admitted. It writes each call down once the
call has returned; the model of what must be there (`expected`) knows nothing else.
"""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from stored import issues, make_sample, score_of

from jaxrl_llm.core.records.sample import encode
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.index import open_store

SIZE = 5
NEXT = {'append': 'stored', 'admit': 'admitted', 'drop': 'dropped', 'trained': 'trained'}


def read_log(directory: pathlib.Path) -> list:
  path = directory / 'acknowledged'
  return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def newest_commit(log: list) -> int:
  return max((step for name, _, step in log if name == 'commit'), default=0)


def expected(log: list) -> dict[str, str]:
  """The state of every sample whose issue was acknowledged, after a recovery to the newest
  commit.
  """
  changes: dict[str, list[tuple[int, str]]] = {}
  for name, uids, step in [*log, ['start', [], newest_commit(log)]]:
    if name == 'start':
      for uid, past in changes.items():
        kept = [change for change in past if change[0] < step]
        if past[-1][1] != 'void':
          changes[uid] = kept if len(kept) > 1 else [(step, 'void')]  # only issued by then: lost
    for uid in uids:
      if name == 'issue':
        changes[uid] = [(step, 'issued')]
      elif changes[uid][-1][1] != 'void':
        changes[uid].append((step, NEXT[name]))
  return {uid: past[-1][1] for uid, past in changes.items()}


def train(directory: pathlib.Path, steps: int, *, synchronous: str) -> None:
  """The child's work, from the newest commit on; SIGKILL may come anywhere."""
  log = os.open(directory / 'acknowledged', os.O_CREAT | os.O_WRONLY | os.O_APPEND)

  def acknowledge(name, uids, step):
    os.write(log, (json.dumps([name, uids, step]) + '\n').encode())

  store = open_store(directory / 'replay', synchronous=synchronous)
  store._db.set_trace_callback(POINT)
  first = newest_commit(read_log(directory))
  store.recover(first)
  acknowledge('start', [], first)
  for step in range(first, steps):
    uids = [f'{step}/{i}' for i in range(SIZE)]
    answered, admitted = uids[:-1], uids[1:-1]
    store.at(step).issue(issues(uids))
    acknowledge('issue', uids, step)
    store.at(step).append([make_sample(uid) for uid in answered])
    acknowledge('append', answered, step)
    with store.transaction():
      store.at(step).score([score_of(uid) for uid in answered])
      store.at(step).drop(uids[:1], 'filtered')
    acknowledge('drop', uids[:1], step)
    store.at(step).admit(admitted)
    acknowledge('admit', admitted, step)
    if step:
      trained = [f'{step - 1}/{i}' for i in range(1, SIZE - 1)]
      late = f'{step - 1}/{SIZE - 1}'
      store.at(step).append([make_sample(late)])
      acknowledge('append', [late], step)
      store.at(step).record_plan(trained)
      store.at(step).seal(trained)
      store.at(step).trained(trained)
      acknowledge('trained', trained, step)
    if step % 2:
      store.flush()
      acknowledge('commit', [], step + 1)
      store.prune(step)


def check(directory: pathlib.Path) -> None:
  """Recovers as the next start would, and compares with what had been acknowledged."""
  log = read_log(directory)
  store = open_store(directory / 'replay')
  store.recover(newest_commit(log))
  report = audit(store)
  assert report.ok, report.lines
  assert report.states['issued'] == 0
  assert report.issued == sum(report.states.values())
  wanted = expected(log)
  (unacknowledged,) = [
    {
      entry
      for entry in store._db.execute('SELECT uid, state FROM samples')
      if entry[0] not in wanted
    }
  ]
  assert {state for _, state in unacknowledged} <= {'void'}
  assert {uid: str(entry.state) for uid, entry in store.entries(list(wanted)).items()} == wanted
  kept = [uid for uid, state in wanted.items() if state in ('stored', 'admitted', 'trained')]
  for uid, sample in zip(kept, store.read(kept)):
    assert encode(sample) == encode(make_sample(uid))
  named = {name for (name,) in store._db.execute('SELECT name FROM segments')}
  assert {path.name for path in (directory / 'replay' / 'segments').iterdir()} == named
  store.close()


def _no_point(*_) -> None:
  pass


POINT = _no_point
"""Called before every SQL statement and around every fsync and rename of the child."""


def kill_at(number: int):
  """Dies at the point of this number; returns a function that says how many points there were."""
  global POINT
  count = 0

  def point(*_):
    nonlocal count
    count += 1
    if count == number:
      os.kill(os.getpid(), signal.SIGKILL)

  def around(real):
    def call(*args):
      point()
      result = real(*args)
      point()
      return result

    return call

  POINT = point
  os.fsync, os.replace = around(os.fsync), around(os.replace)
  return lambda: count


def die_everywhere(base: pathlib.Path, stride: int) -> None:
  """Forks children that die at points 1, 1 + stride, …: first of a fresh run, each once more in the
  run resumed.
  """
  number, count = 1, None
  while count is None:
    directory = base / f'{number:05d}'
    directory.mkdir()
    for point, steps in ((number, 4), (1 + (number * 7) % 150, 6)):
      pid = os.fork()
      if pid == 0:
        points = kill_at(point)
        train(directory, steps, synchronous='full' if number % 2 else 'normal')
        os._exit(0 if points() < point else 9)
      status = os.waitpid(pid, 0)[1]
      if status == 0 and steps == 4:
        count = number
      elif status not in (0, signal.SIGKILL):
        raise SystemExit(f'point {point}: status {status}')
    number += stride


def start_child(*args) -> subprocess.Popen:
  return subprocess.Popen(
    [sys.executable, __file__, *map(str, args)],
    env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
  )


@pytest.fixture
def base(tmp_path):
  """A directory in memory, where there is room; like a disk, it outlives the processes that are
  killed here.
  """
  memory = pathlib.Path('/dev/shm')
  has_room = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1 << 30
  with tempfile.TemporaryDirectory(dir=memory if has_room else tmp_path) as directory:
    yield pathlib.Path(directory)


@pytest.mark.parametrize(
  'stride',
  [9, pytest.param(5, marks=pytest.mark.full), pytest.param(1, marks=pytest.mark.acceptance)],
)
def test_killed_between_any_two_steps(base, stride):
  assert start_child('everywhere', base, stride).wait(300) == 0
  directories = sorted(base.iterdir())
  assert len(directories) > 150 / stride
  for directory in directories:
    check(directory)


@pytest.mark.full
def test_killed_at_random_times_and_resumed(tmp_path):
  for seed in range(4):
    child = start_child('run', tmp_path)
    draw, deadline = random.Random(seed), time.monotonic() + 60
    # a step is 5 to 8 lines, every second one commits
    wanted = len(read_log(tmp_path)) + draw.randint(20, 60)
    while len(read_log(tmp_path)) < wanted and child.poll() is None and time.monotonic() < deadline:
      time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.02))
    child.kill()
    assert child.wait() == -signal.SIGKILL
    check(tmp_path)
  assert newest_commit(read_log(tmp_path)) > 2


if __name__ == '__main__':
  if sys.argv[1] == 'everywhere':
    die_everywhere(pathlib.Path(sys.argv[2]), int(sys.argv[3]))
  else:
    train(pathlib.Path(sys.argv[2]), 1_000_000, synchronous='full')
