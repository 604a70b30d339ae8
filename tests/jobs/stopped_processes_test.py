"""Stopped processes and black-holed sockets: each ends in its line, or in its recovery, within its
bound.

Explorers are in `rollout_crew_test`, a trainer's second process in `parallel_coordinator_test`,
processes that send weights in `rollout_transfer_test`, whole runs in `stopped_job_test`.
"""

import asyncio
import contextlib
import os
import signal
from multiprocessing import forkserver

import psutil
import pytest
from fixtures import rewards_scorers
from fixtures.rewards_scorers import attempt
from scoring import pool, using
from serving import children_of

from jaxrl_llm.core.net.client import Lost, RemoteError
from jaxrl_llm.core.net.remote import RemoteOptions, ServiceClient
from jaxrl_llm.core.process import child
from jaxrl_llm.core.records.score import Status
from jaxrl_llm.core.waits import WaitExpired
from jaxrl_llm.rewards.pool import processes
from jaxrl_llm.rewards.sandbox import isolation
from jaxrl_llm.rewards.sandbox.sandbox import Ending, Limits, Sandboxes
from jaxrl_llm.rollout.explorers import explorer as exploring
from jaxrl_llm.rollout.vllm.client import VllmClient
from jaxrl_llm.tasks.rendering import RenderError, RenderingLimits, TemplateProcess

PATIENCE_S = 60
"""Guards against a hang; the bounds under test are shorter."""
SILENT = {
  'accepts and never answers': b'',
  'stalls in the headers': b'HTTP/1.1 200 OK\r\nContent-Type: app',
  'stalls in the body': b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"value": ',
}


@contextlib.asynccontextmanager
async def black_hole(said: bytes):
  """Address of a server that says so much, and no more."""
  held = []

  async def serve(reader, writer):
    held.append(writer)
    writer.write(said)
    await writer.drain()

  listener = await asyncio.start_server(serve, '127.0.0.1', 0)
  try:
    yield f'http://127.0.0.1:{listener.sockets[0].getsockname()[1]}'
  finally:
    listener.close()
    for writer in held:
      writer.close()


@pytest.mark.parametrize('said', SILENT.values(), ids=SILENT.keys())
def test_a_peer_that_falls_silent_is_one_line_to_every_client(said, monkeypatch):
  monkeypatch.setattr(exploring, '_SILENCE_S', 0.2)

  async def to_a_scorer(address):
    options = RemoteOptions(
      addresses=(address,), request_deadline_s=0.2, retries=1, first_wait_s=0.01
    )
    async with ServiceClient(options, 'scorer') as remote:
      with pytest.raises(RemoteError, match=r'^2 tries: http://\S+: no answer within 0\.2 s$'):
        await remote.post({})

  async def to_the_fleet(address):
    client = VllmClient(address, name='vllm-0')
    with pytest.raises(Lost, match=r'^vllm-0: /health: no answer within 0\.2 s$'):
      await client.call('GET', '/health', deadline_s=0.2)
    await client.close()

  async def to_an_explorer(address):
    link = exploring.Link(address, key=None, ca_file=None, name='a')
    with pytest.raises(Lost, match=r'^/take: no answer within 0\.2 s$'):
      await link.call('/take', deadline_s=0.2)
    with pytest.raises(Lost, match=r'^/generate: no answer within 0\.2 s$'):
      async for _ in link.stream('/generate'):
        pass
    await link.close()

  async def main():
    async with asyncio.timeout(PATIENCE_S), black_hole(said) as address:
      await asyncio.gather(to_a_scorer(address), to_the_fleet(address), to_an_explorer(address))

  asyncio.run(main())


def test_a_guard_that_is_stopped_is_killed_with_what_it_guards(tmp_path, monkeypatch):
  monkeypatch.setattr(child, '_STOP_S', 0.2)
  engine = child.Child('engine a', log=tmp_path / 'log')
  engine.start(['sleep', '600'], {**os.environ})
  guard = psutil.Process(engine.pid)
  try:
    (guarded,) = children_of(guard.pid)
    guard.suspend()
    with pytest.raises(
      WaitExpired, match=r'^wait guarded_stop: the fleet waited 0\.2 s for the guard of engine a'
    ):
      asyncio.run(engine.stop(owner='the fleet'))
    guard.wait(PATIENCE_S)
    guarded.wait(PATIENCE_S)
  finally:
    with contextlib.suppress(psutil.NoSuchProcess):
      guard.kill()


@pytest.mark.full
def test_a_scorer_worker_that_is_stopped_in_a_call_is_replaced():
  scorers = {
    'stops': (rewards_scorers.stops_its_process, {'deadline_s': 0.2, 'domains': ('stops',)}),
    'length': (rewards_scorers.length, {'domains': ('length',)}),
  }

  async def use(scoring):
    ((stopped,), (following,)) = [
      await scoring.score(attempt('12345', domain=name)) for name in scorers
    ]
    assert (stopped.status, following.status, following.value) == (Status.TIMEOUT, Status.OK, 5.0)

  using(pool(scorers, workers=1), use)


@pytest.mark.full
def test_a_scorer_worker_that_is_stopped_while_it_is_free_ends_the_run_with_a_line(monkeypatch):
  monkeypatch.setattr(processes, 'START_DEADLINE_S', 30.0)

  async def use(scoring):
    (score,) = await scoring.score(attempt('1', domain='length'))
    os.kill(score.evidence['pid'], signal.SIGSTOP)
    monkeypatch.setattr(processes, 'START_DEADLINE_S', 0.2)
    with pytest.raises(
      WaitExpired, match=r'^wait score: sample u waited 10\.2 s for scorer length;'
    ):
      await scoring.score(attempt('1', domain='length'))
    monkeypatch.setattr(processes, 'START_DEADLINE_S', 30.0)
    return score.evidence['pid']

  pid = using(pool({'length': (rewards_scorers.length, {'deadline_s': 5.0})}, workers=1), use)
  assert not psutil.pid_exists(pid)


@pytest.mark.full
def test_a_stopped_fork_server_fails_the_change_of_the_number_of_workers_and_the_others_go_on(
  monkeypatch,
):
  async def use(scoring):
    await scoring.score(attempt('1', domain='length'))
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGSTOP)
    try:
      monkeypatch.setattr(processes, 'START_DEADLINE_S', 0.5)
      with pytest.raises(
        WaitExpired, match=r'^wait scorers_start: scorer pool waited 0\.5 s for scorer workers'
      ):
        async with asyncio.timeout(PATIENCE_S):
          await scoring.resize(2)
      assert scoring.workers == 1
    finally:
      os.kill(forkserver._forkserver._forkserver_pid, signal.SIGCONT)
      monkeypatch.setattr(processes, 'START_DEADLINE_S', 30.0)
    (following,) = await scoring.score(attempt('12', domain='length'))
    assert following.value == 2.0

  using(pool({'length': (rewards_scorers.length, {})}, workers=1), use)


@pytest.mark.full
def test_a_process_that_forks_sandboxes_and_is_stopped_is_replaced(monkeypatch):
  with contextlib.closing(Sandboxes(Limits(), isolation='none')) as sandboxes:
    monkeypatch.setattr(isolation, 'START_S', 1.0)
    sandboxes._starter._process.send_signal(signal.SIGSTOP)
    for _ in range(3):  # The first have been forked already.
      assert (
        sandboxes.run_tests('def f(x): return x + 1', ['assert f(1) == 2']).ended == Ending.PASSED
      )


@pytest.mark.full
def test_a_process_that_renders_templates_and_is_stopped_is_a_line_and_the_next_one_renders():
  earlier = set(psutil.Process().children())  # Other tests' templates may still have processes.
  template = TemplateProcess('{{ messages[0].content }}', RenderingLimits(wall_s=5.0))

  def render():
    return template.render(
      [{'role': 'user', 'content': 'hi'}], add_generation_prompt=False, variables={}
    ).text

  assert render() == 'hi'
  (process,) = set(psutil.Process().children()) - earlier
  process.suspend()
  template._limits = RenderingLimits(wall_s=0.2)
  with pytest.raises(RenderError, match=r'^gave no answer in 0\.2 s$'):
    render()
  assert not process.is_running()
  template._limits = RenderingLimits()
  assert render() == 'hi'
