"""Two real processes of one jax.distributed job agree; none waits for a dead or stuck one without a
word.
"""

import asyncio
import hashlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from paths import ROOT

from jaxrl_llm.parallel.coordinator import Coordinator
from jaxrl_llm.parallel.device import DeviceThread

PROCESS = """
import asyncio, hashlib, json, os, signal, sys
import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.parallel.coordinator import Coordinator
from jaxrl_llm.parallel.device import DeviceThread

scenario, rank, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update('jax_enable_recoverability', True)
jax.distributed.initialize(f'127.0.0.1:{port}', 2, rank)
signals = []
device = DeviceThread()
coordinator = Coordinator(
  device, on_signal=signals.append, beat_s=0.02, silence_s=3.0 if scenario == 'silent' else 600.0
)

def say(**what):
  sys.stdout.write(json.dumps(what) + chr(10))
  sys.stdout.flush()

def large(size):
  return {'rows': [{'uid': f'grpo/{i}', 'reward': i / 3, 'none': None} for i in range(size)], \
'text': 'é\\u20ac' * 50}

async def decided(value):
  return value

async def beats(count):
  # Process 0 is told process 1's signal with each.
  count += len(signals)
  while len(signals) < count:
    await asyncio.sleep(0.001)

async def late(value):
  await beats(3)
  return value

async def failing(error):
  await beats(3)
  raise error

async def cancelled():
  asyncio.current_task().cancel()
  await asyncio.sleep(1)

async def agree(decision):
  return await coordinator.broadcast(decision if rank == 0 else None)

async def refused(decision):
  try:
    await agree(decision)
  except (Exception, asyncio.CancelledError) as error:
    return [type(error).__name__, str(error)]


async def agreeing():
  value = await agree(decided(large(4000)))
  say(large=hashlib.sha256(json.dumps(value).encode()).hexdigest())
  say(small=[await agree(decided(v)) for v in (None, 0, '', [1, {'a': 0.1}])])
  if rank == 1:
    coordinator.report_signal(signal.SIGTERM)
  say(busy=await agree(late('late')))
  say(signals=sorted(set(signals)))
  say(error=await refused(failing(UserError('disk full'))))
  say(no_json=await refused(decided(object())))
  say(cancelled=await refused(cancelled()))
  values = await coordinator.gather(large(4000) if rank else {'rank': rank})
  say(gathered=[hashlib.sha256(json.dumps(value).encode()).hexdigest() for value in values])
  say(choices=await agreed_choices())
  if rank == 1:
    os.environ['XLA_FLAGS'] = '--xla_gpu_enable_pipelined_all_gather=false'
  try:
    await agreed_choices()
  except Exception as error:
    say(other_flags=[type(error).__name__, str(error)])
  say(still=await agree(decided('together')))

async def agreed_choices():
  from jaxrl_llm.api import load_config
  from jaxrl_llm.app.composition.automatic import with_sized
  from jaxrl_llm.app.dry_run.memory_plan import Target
  from jaxrl_llm.app.planning import agreed
  from jaxrl_llm.models.families import tiny
  from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh

  spec = tiny('qwen2', 64)
  config = with_sized(load_config('quickstart'), platform='cpu', spec=spec)
  target = Target(build_mesh(MeshConfig()), None, spec, {})
  return await agreed(config, target, coordinator, device, str) == (config, None)

async def busy_for_ever():
  await agree(decided('hello'))
  say(ready=True)
  await agree(asyncio.Event().wait())

async def silent():
  await agree(decided('hello'))
  say(ready=True)
  if rank == 0:
    await asyncio.sleep(3600)  # nothing is decided, and no beat is sent
  await agree(None)

async def computing():
  await agree(decided('hello'))
  await device.run(multihost_utils.process_allgather, np.zeros(1))  # Compiled before the deadline \
counts.
  impatient = DeviceThread(deadline_s=3.0)
  say(ready=True)
  while True:
    await impatient.run(multihost_utils.process_allgather, np.zeros(1))

async def main():
  try:
    await {'agreeing': agreeing, 'busy': busy_for_ever, 'silent': silent, \
'computing': computing}[scenario]()
  except Exception as error:
    say(left=[type(error).__name__, str(error)])

asyncio.run(main())
sys.stdout.flush()
os._exit(0)
"""


class Pair:
  """Two processes of one job, and what each has said."""

  def __init__(self, scenario: str, directory: pathlib.Path):
    with socket.socket() as probe:
      probe.bind(('127.0.0.1', 0))
      port = probe.getsockname()[1]
    env = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}
    self._said = [directory / f'said.{rank}' for rank in (0, 1)]
    self._errors = [directory / f'errors.{rank}' for rank in (0, 1)]
    self.processes = []
    for rank in (0, 1):
      with self._said[rank].open('w') as said, self._errors[rank].open('w') as errors:
        self.processes.append(
          subprocess.Popen(
            [sys.executable, '-c', PROCESS, scenario, str(rank), str(port)],
            env={**env, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)},
            stdout=said,
            stderr=errors,
          )
        )

  def __enter__(self):
    return self

  def __exit__(self, *_):
    for process in self.processes:
      process.kill()
      process.wait()

  def said(self, rank: int) -> dict:
    lines = self._said[rank].read_text().splitlines()
    return {
      key: value
      for line in lines
      if line.startswith('{')
      for key, value in json.loads(line).items()
    }

  def errors(self, rank: int) -> str:
    return self._errors[rank].read_text()

  def wait_ready(self) -> None:
    for rank, process in enumerate(self.processes):
      while 'ready' not in self.said(rank):
        assert process.poll() is None, self.errors(rank)
        time.sleep(0.01)

  def end(self, rank: int, *, timeout_s: float = 60) -> dict:
    """Waits for process `rank` to end by itself; what it said. A process that hangs fails the
    test.
    """
    self.processes[rank].wait(timeout=timeout_s)
    return self.said(rank)


@pytest.fixture(scope='module')
def said(tmp_path_factory):
  with Pair('agreeing', tmp_path_factory.mktemp('pair')) as pair:
    # With their start, unlike after wait_ready.
    said = [pair.end(rank, timeout_s=240) for rank in (0, 1)]
    assert all('still' in s for s in said), pair.errors(0) + pair.errors(1)
    return said


@pytest.mark.full
def test_every_process_gets_what_all_of_them_have(said):
  first, second = said[0]['gathered']
  assert said[1]['gathered'] == [first, second]
  assert first == hashlib.sha256(b'{"rank": 0}').hexdigest() and second == said[0]['large']


@pytest.mark.full
def test_a_host_with_other_flags_of_the_compiler_is_named_in_one_line_in_both(said):
  assert [s['choices'] for s in said] == [True, True]
  (kind, text), other = (s['other_flags'] for s in said)
  assert other == [kind, text] and kind == 'RunError'
  assert text.startswith(f'process 1 on {socket.gethostname()} has other flags of the compiler: ')
  assert "['--xla_gpu_enable_pipelined_all_gather=false'], wanted [] as on process 0; " in text


@pytest.mark.full
def test_a_large_value_is_the_same_in_both(said):
  value = {
    'rows': [{'uid': f'grpo/{i}', 'reward': i / 3, 'none': None} for i in range(4000)],
    'text': 'é\u20ac' * 50,
  }
  encoded = json.dumps(value).encode()
  assert len(encoded) > 3 << 16  # several blocks
  assert [s['large'] for s in said] == [hashlib.sha256(encoded).hexdigest()] * 2


def test_small_values_are_the_same_in_both(said):
  assert [s['small'] for s in said] == [[None, 0, '', [1, {'a': 0.1}]]] * 2


def test_the_other_waits_through_beats_while_process_0_is_busy(said):
  assert [s['busy'] for s in said] == ['late'] * 2


def test_a_signal_that_only_process_1_received_reaches_process_0_while_it_is_busy(said):
  assert said[0]['signals'] == [signal.SIGTERM]
  assert said[1]['signals'] == []  # process 0 decides what follows from it


def test_an_error_in_the_decision_is_raised_in_process_0_and_known_to_the_other(said):
  assert said[0]['error'] == ['UserError', 'disk full']
  assert said[1]['error'][0] == 'PeerFailed'


def test_a_decision_that_is_no_json_does_not_leave_the_other_waiting(said):
  assert said[0]['no_json'][0] == 'TypeError'
  assert said[1]['no_json'][0] == 'PeerFailed'


def test_a_cancelled_decision_does_not_leave_the_other_waiting(said):
  assert said[0]['cancelled'][0] == 'CancelledError'
  assert said[1]['cancelled'][0] == 'PeerFailed'


def test_after_all_that_they_still_meet_at_the_same_exchange(said):
  assert [s['still'] for s in said] == ['together'] * 2


@pytest.mark.full
@pytest.mark.parametrize('victim', [0, 1])
def test_a_killed_process_is_noticed_by_the_other(victim, tmp_path):
  with Pair('busy', tmp_path) as pair:
    pair.wait_ready()
    pair.processes[victim].send_signal(signal.SIGKILL)
    kind, message = pair.end(1 - victim)['left']
    assert kind == 'PeerFailed'
    assert message.startswith(f'process {1 - victim}: another process of the job is gone')
    assert '\n' not in message


@pytest.mark.full
def test_a_stuck_process_is_named_at_the_deadline_by_the_one_that_waits(tmp_path):
  with Pair('silent', tmp_path) as pair:
    pair.wait_ready()
    kind, message = pair.end(1)['left']
    assert kind == 'WaitExpired'
    assert 'process 1 waited 3 s for process 0' in message
    assert 'process_allgather' in pair.errors(1)  # stacks


@pytest.mark.full
@pytest.mark.parametrize('victim', [0, 1])
def test_a_process_stopped_in_a_collective_is_named_by_the_other_at_the_deadline_of_its_work(
  victim, tmp_path
):
  with Pair('computing', tmp_path) as pair:
    pair.wait_ready()
    pair.processes[victim].send_signal(signal.SIGSTOP)
    kind, message = pair.end(1 - victim)['left']
    assert kind == 'WaitExpired'
    assert message.startswith(f'wait device: process {1 - victim} waited 3 s for its device work')


def test_alone_a_decision_is_its_own_value():
  async def decision(value):
    return value

  async def failing():
    raise RuntimeError('no')

  async def main():
    device = DeviceThread()
    coordinator = Coordinator(device, on_signal=lambda _: None)
    assert coordinator.leads
    assert await coordinator.broadcast(decision({'a': [1]})) == {'a': [1]}
    with pytest.raises(RuntimeError, match='no'):
      await coordinator.broadcast(failing())
    device.close()

  asyncio.run(main())


def test_device_work_runs_in_the_order_of_submission_on_one_thread_beside_the_event_loop():
  order, threads = [], set()

  def work(i):
    threads.add(threading.get_ident())
    order.append(i)
    return i * i

  async def main():
    device = DeviceThread()
    assert await asyncio.gather(*(device.run(work, i) for i in range(20))) == [
      i * i for i in range(20)
    ]
    with pytest.raises(ZeroDivisionError):
      await device.run(lambda: 1 // 0)
    assert await device.run(work, i=20) == 400  # the thread survives an error
    device.close()

  asyncio.run(main())
  assert order == list(range(21))
  assert len(threads) == 1
  assert threading.get_ident() not in threads
