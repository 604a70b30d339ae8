"""Runs whose workflow is run by explorer processes, and workflows that ask the master in
mid-episode.
"""

import collections
import contextlib
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import threading
import time

import job
import numpy as np
import pytest
import warm
from paths import FIXTURES
from services import Service, chat

from jaxrl_llm.core.records.sample import Role
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.browse import open_copy

pytestmark = pytest.mark.full
TWO = '--config.rollout.explorers={"processes":2,"groups":3}'


def test_explorers_make_what_the_master_would_through_kills_of_theirs_and_of_the_run(tmp_path):
  run = tmp_path / 'run'
  process = job.start(run, TWO)
  job.wait_for_rows(run, 12 + 1, process)
  first = job.explorers(run)
  assert set(first) == {'explorer-0', 'explorer-1'}
  os.kill(first['explorer-0'], signal.SIGKILL)
  job.wait_for_rows(run, 12 + 4, process)
  job.kill(process)
  deadline = time.monotonic() + 30
  while job.explorers(run) and time.monotonic() < deadline:
    time.sleep(0.02)
  assert not job.explorers(run), 'they end with the run'
  job.train(run, TWO)
  assert not job.explorers(run)
  job.assert_equal_runs(run, job.quick_run())
  assert audit(run / 'replay').ok


def test_an_explorer_of_another_machine_comes_over_tcp_with_the_token(tmp_path):
  run, token, wrong = tmp_path / 'run', tmp_path / 'token', tmp_path / 'wrong'
  for file in (token, wrong):
    file.write_text(f'{file.name}-of-this-test-0123456789')
    file.chmod(0o600)
  with socket.create_server(('127.0.0.1', 0)) as free:
    port = free.getsockname()[1]
  listen = {'processes': 0, 'listen': {'port': port, 'token_file': str(token)}}
  explore = ['launch/serve.py', '--role=explorer', f'--master=http://127.0.0.1:{port}']

  def start(key):
    return warm.start([*explore, f'--key_file={key}'], cwd=job.ROOT, env=job.environment())

  helper, stranger = start(token), None
  try:
    process = job.start(
      run, f'--config.rollout.explorers={json.dumps(listen)}', '--config.stages.grpo.steps=2'
    )
    job.wait_for_rows(run, 1, process)
    stranger = start(wrong)
    _, said = stranger.communicate(timeout=120)
    assert stranger.returncode == 2 and said.count('\n') == 1 and 'refuses the token' in said
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
  finally:
    helper.terminate()
    helper.communicate()
  assert (
    len([row for row in job.rows(run) if 'actor/pg_loss' in row and row['stage'] == 'grpo']) == 2
  )


@contextlib.contextmanager
def flood(port, connections):
  """So many idle connections to a port of this machine, each opened again when the other side
  closes it.
  """
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  if hard < connections + 1000:
    pytest.skip(f'wants {connections + 1000} descriptors, and {hard} are permitted')
  resource.setrlimit(resource.RLIMIT_NOFILE, (connections + 1000, hard))
  over, opened = threading.Event(), 0

  def keep():
    nonlocal opened
    with selectors.DefaultSelector() as selector:
      while not over.is_set():
        for _ in range(min(100, connections - len(selector.get_map()))):
          idle = socket.socket()
          idle.setblocking(False)
          idle.connect_ex(('127.0.0.1', port))
          selector.register(idle, selectors.EVENT_READ)
          opened += 1
        for key, _ in selector.select(timeout=0.05):
          selector.unregister(key.fileobj)
          key.fileobj.close()
      for key in [*selector.get_map().values()]:
        key.fileobj.close()

  thread = threading.Thread(target=keep)
  thread.start()
  try:
    yield lambda: opened
  finally:
    over.set()
    thread.join()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.acceptance
def test_three_thousand_idle_connections_do_not_stop_a_run_of_1024_descriptors(tmp_path):
  run, token = tmp_path / 'run', tmp_path / 'token'
  token.write_text('token-of-this-test-0123456789')
  token.chmod(0o600)
  with socket.create_server(('127.0.0.1', 0)) as free:
    port = free.getsockname()[1]
  listen = {'processes': 2, 'groups': 3, 'listen': {'port': port, 'token_file': str(token)}}
  train = job.command(run, f'--config.rollout.explorers={json.dumps(listen)}')
  limited = ['bash', '-c', 'ulimit -n 1024 && exec "$@"', '-', *train]
  pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
  process = subprocess.Popen(
    limited, cwd=job.ROOT, env=job.environment(), start_new_session=True, **pipes
  )
  job.wait_for_rows(run, 12, process)
  with flood(port, 3000) as opened:
    while opened() < 3000:
      assert process.poll() is None, 'it ended before the flood'
      time.sleep(0.05)
    out, err = process.communicate(timeout=1200)
  assert process.returncode == 0, err
  assert len(out) + len(err) < 100_000
  job.assert_equal_runs(run, job.quick_run())


def events(run, edge):
  return [
    row for line in (run / 'events.jsonl').open() if (row := json.loads(line))['edge'] == edge
  ]


def finish(run, helper, *flags):
  """A run of a workflow that asks for scores, and for another model at this address."""
  auxiliary = [{'name': 'helper', 'addresses': [helper], 'model': 'some'}]
  flags = [
    '--config.rollout.workflow={"kind":"second_try:SecondTry","options":{"helper":"helper"}}',
    f'--config.rollout.auxiliary={json.dumps(auxiliary)}',
    '--config.rollout.max_prompt_length=32',
    '--config.rollout.max_response_length=24',
    '--config.rollout.embedded.prefill_buckets=[8,32]',
    '--config.stages.grpo.steps=2',
    '--config.evaluation=()',
    *flags,
  ]
  environment = job.environment(PYTHONPATH=os.environ['PYTHONPATH'])
  job.train(run, *flags, environ=environment)


@pytest.mark.parametrize('processes', [0, 1])
def test_a_workflow_of_ones_own_asks_for_scores_and_another_model_through_the_master(
  tmp_path, processes, monkeypatch
):
  """Two turns: the environment's tokens are in the sample and not trained on; what was asked for is
  in the events.
  """
  monkeypatch.setenv('PYTHONPATH', f'{job.ROOT}{os.pathsep}{FIXTURES}')
  run, helper = (
    tmp_path / 'run',
    Service(lambda body: chat('count again') if len(helper.seen) > 1 else 503),
  )
  with helper.in_thread():
    finish(run, helper.address, *([TWO] if processes else []))
  scores, models = events(run, 'auxiliary_score'), events(run, 'auxiliary_model')
  for rows in (scores, models):
    asked = {row['id'] for row in rows if row['kind'] == 'request'}
    assert asked and asked == {row['of'] for row in rows if row['kind'] == 'reply'}
    assert {(row['from'], row['kind']) for row in rows} >= {('rollout', 'request')}
  assert len(scores) == 2 * 2 * 24, 'each of two batches of 24 samples'
  # One request met a server that had trouble, and was made again.
  assert len(helper.seen) == len(models) / 2 + 1 and {body['model'] for body in helper.seen} == {
    'some'
  }
  store = open_copy(run / 'replay', tmp_path / 'copy')
  samples = store.read([uid for group in store.sealed() for uid in group])
  store.close()
  tools = [sample for sample in samples if (sample.role == Role.TOOL).any()]
  kinds = collections.Counter(bool((sample.role == Role.TOOL).any()) for sample in samples)
  assert len(samples) == 48 and kinds[True] == len(models) / 2
  for sample in tools:
    told = sample.role == Role.TOOL
    assert not sample.loss_mask[told].any() and not sample.behaviour_logprobs[told].any()
    assert sample.loss_mask[np.flatnonzero(told).max() + 1 :].all() and len(sample.segments) == 2
