"""The main job on attached servers (fake ones, in processes of their own): two trainer processes,
and a killed one.
"""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import threading

import job
import psutil
import pulling
import pytest
import serving
from attached import fake_servers, fakes, flags_of

from jaxrl_llm.replay.audit import audit

pytestmark = pytest.mark.full


def check(run):
  steps = [row for row in job.rows(run) if 'actor/pg_loss' in row]
  assert [row['training/global_step'] for row in steps] == list(range(13, 21))
  assert max(row['sampling/sampling_logp_difference/max'] for row in steps) < 1e-4
  assert {row['staleness/max'] for row in steps} == {0}
  assert sum(row['run/engine_void'] for row in steps) == 0
  report = audit(run / 'replay')
  assert report.ok, report.lines
  assert report.states['trained'] == 8 * 6 * 4
  assert not serving.published(run).exists()


@pytest.mark.parametrize(
  ('full_every', 'compare'),
  [
    (1, 'hosts'),
    pytest.param(3, 'hosts', marks=pytest.mark.acceptance),
    pytest.param(3, 'devices', marks=pytest.mark.acceptance),
  ],
)
def test_two_processes_publish_together(tmp_path, full_every, compare):
  """The parameters are sharded over both; only process 0 has the servers."""
  with fakes(tmp_path) as flags:
    flags += ('--config.learner.mesh.fsdp=2', f'--config.rollout.vllm.full_every={full_every}')
    flags += (f'--config.rollout.vllm.compare={compare}',)
    job.train(tmp_path / 'run', *flags, processes=2)
  check(tmp_path / 'run')
  copied = [row for row in job.rows(tmp_path / 'run') if 'perf/publish_copied_bytes' in row]
  assert bool(copied) == (compare == 'devices')
  events = [json.loads(line) for line in (tmp_path / 'run' / 'events.jsonl').open()]
  assert {event['writers'] for event in events if event.get('how') == 'loaded'} == {2}


@pytest.mark.acceptance
def test_a_killed_trainer_goes_on_with_the_servers_it_left(tmp_path):
  with fakes(tmp_path) as flags:
    job.killed_and_resumed(tmp_path / 'run', 12 + 5, flags=flags)
  check(tmp_path / 'run')


@pytest.mark.parametrize('kills', [1, pytest.param(3, marks=pytest.mark.acceptance)])
def test_after_kills_at_a_bound_of_two_every_task_was_trained_once(tmp_path, kills):
  run, steps = tmp_path / 'run', 7 * kills
  flags = (*job.ASYNCHRONOUS, f'--config.stages.grpo.steps={steps}')
  with fakes(tmp_path) as servers:
    # Of one kill, the run has rollouts in flight.
    after = 15 if kills == 1 else 0
    job.kill_at_random(run, *servers, *flags, kills=kills, seed=1, after=after)
  job.check_accounts(run, steps=steps, processed=False)


def test_a_run_whose_only_server_is_stopped_ends_with_a_line_in_time_and_goes_on_once_it_is_back(
  tmp_path,
):
  run = tmp_path / 'run'
  with fake_servers(tmp_path, 1) as servers:
    flags, server = flags_of(servers), psutil.Process(servers[0][0].pid)
    # The stop may come in the middle of a publication too.
    limits = {
      'latency_s': 5,
      'min_tokens_per_s': 20,
      'start_deadline_s': 10,
      'transfer_deadline_s': 10,
    }
    process = job.start(
      run, *flags, *(f'--config.rollout.vllm.{name}={value}' for name, value in limits.items())
    )
    job.wait_for_rows(run, 12 + 3, process)
    children = psutil.Process(process.pid).children(recursive=True)
    server.suspend()
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1
    last = said.splitlines()[-1]
    # The fleet's limit and the server's own, which are equal, pass at the same time.
    assert re.match(
      r'run stopped: .*no engine left(: none served for \S+=10 s)?; '
      'the last failure: engine vllm-0: ',
      last,
    ), last
    assert 'Traceback' not in said
    assert children and psutil.wait_procs(children, timeout=30)[1] == []
    server.resume()
    job.train(run, *flags)
  check(run)


@contextlib.contextmanager
def fronted(folder, servers, roots):
  """Addresses of fronts with stores before servers, in a thread."""
  loop, opened = asyncio.new_event_loop(), contextlib.AsyncExitStack()
  thread = threading.Thread(target=loop.run_forever, daemon=True)
  thread.start()

  def run(work):
    return asyncio.run_coroutine_threadsafe(work, loop).result(60)

  async def open_all():
    on_hosts = pulling.replicas(folder, [serving.Address(address) for address in servers], roots)
    return [r.client.address for r in await opened.enter_async_context(on_hosts)]

  try:
    yield run(open_all())
  finally:
    run(opened.aclose())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)


APART = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
"""Runs a command with shared memory of its own, as on another host."""


@pytest.mark.acceptance
@pytest.mark.parametrize(('transfer', 'writers'), [('pull', 2), ('files', 1)])
def test_a_process_with_shared_memory_of_its_own_serves_its_share(tmp_path, transfer, writers):
  """If servers read files, process 0 writes alone."""
  if os.geteuid() != 0:
    pytest.skip('a mount namespace needs root')
  run = tmp_path / 'run'
  with contextlib.ExitStack() as stack:
    addresses = [address for _, address in stack.enter_context(fake_servers(tmp_path, 2))]
    flags = (f'--config.rollout.vllm.transfer={transfer}', '--config.learner.mesh.fsdp=2')
    if transfer == 'pull':
      roots = [tmp_path / 'one', tmp_path / 'two']
      addresses = stack.enter_context(fronted(tmp_path, addresses, roots))
      flags += (f'--config.rollout.vllm.key_file={tmp_path / "token"}',)
    flags += flags_of([(None, address) for address in addresses])
    command, environment = job.command(run, *flags, processes=2), job.environment()
    wrapped = (
      f"""[ "$JAX_PROCESS_ID" = 1 ] && exec unshare -m sh -c '{APART}' sh "$@"; exec "$@\""""
    )
    at = command.index('--') + 1
    command[at:at] = ['sh', '-c', wrapped, 'sh']
    done = subprocess.run(
      command, cwd=job.ROOT, env=environment, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
  check(run)
  events = [json.loads(line) for line in (run / 'events.jsonl').open()]
  assert {event['writers'] for event in events if event.get('how') == 'loaded'} == {writers}
