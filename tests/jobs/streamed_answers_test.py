"""A job whose servers are killed while they stream answers: the tokens that have arrived are kept,
and no answer is lost or trained on twice.
"""

import contextlib
import http.client
import json
import random
import re
import socket
import time

import attached
import job
import pytest
from direct import fronted

from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.browse import open_copy
from jaxrl_llm.rollout.api import LOST

KILLS, STEPS = 15, 16
LENGTH, PIECE = 48, 4
"""Tokens of the longest answer, and of an event of its stream."""
SLOW = (f'--piece={PIECE}', '--token_s=0.15')
"""An answer of `LENGTH` tokens takes about seven seconds."""
DIRECT = ('delivered', 'undelivered', 'expired', 'late', 'refused')
LEAST = 4
"""Answers in flight on a server that is killed. The fleet itself asks for one at a time."""
FLAGS = (
  f'--config.rollout.vllm.stream={PIECE}',
  '--config.rollout.vllm.max_retries=20',
  '--config.rollout.vllm.max_restarts=100',
  f'--config.rollout.max_response_length={LENGTH}',
  f'--config.stages.grpo.steps={STEPS}',
  '--config.stages.grpo.evaluate_every=null',
  '--config.stages.grpo.optimizer.peak_lr=1e-5',
  # After so few demonstrations, a policy hardly ever stops before its limit.
  '--config.stages.sft.steps=1',
)


class _Connection(http.client.HTTPConnection):
  """Connection to a server at a unix socket."""

  def __init__(self, path):
    super().__init__('server', timeout=5)
    self._path = path

  def connect(self):
    self.sock = socket.socket(socket.AF_UNIX)
    self.sock.settimeout(self.timeout)
    self.sock.connect(self._path)


def answers_in_flight(address):
  """Number of answers that a fake server is sampling; 0 if it does not answer."""
  with contextlib.suppress(OSError, http.client.HTTPException):
    with contextlib.closing(_Connection(address.removeprefix('unix:'))) as connection:
      connection.request('GET', '/metrics')
      text = connection.getresponse().read().decode()
    return int(float(re.search(r'num_requests_running\{.*\} (\S+)', text)[1]))
  return 0


def kill_while_it_streams(servers, rng, process):
  """Kills a random server at a random moment of its answers; returns how many were in flight."""
  deadline = time.monotonic() + 300
  while True:
    assert process.poll() is None, process.communicate()[1][-4000:]
    assert time.monotonic() < deadline, 'no server had answers in flight'
    time.sleep(0.5 + 2 * rng.random())
    server, address = rng.choice([*servers.processes.values()])
    if (in_flight := answers_in_flight(address)) >= LEAST:
      server.kill()
      return in_flight


@contextlib.contextmanager
def flags_of_fronts(folder, servers):
  """Flags of a job whose explorers fetch from the servers, through fronts that outlive them."""
  addresses = [address for _, address in servers.processes.values()]
  explore = {'processes': 2, 'groups': 12, 'direct': True}
  with fronted(folder, addresses) as fronts:
    yield (
      *servers.flags,
      f'--config.rollout.vllm.addresses={json.dumps(fronts)}',
      f'--config.rollout.vllm.key_file={folder / "servers"}',
      f'--config.rollout.explorers={json.dumps(explore)}',
    )


@pytest.mark.acceptance
@pytest.mark.parametrize(('bound', 'is_direct'), [(0, False), (1, False), (0, True)])
def test_fifteen_kills_of_servers_cost_only_the_tokens_that_had_not_arrived(
  tmp_path, record_property, bound, is_direct
):
  rng, run, kills = random.Random(KILLS), tmp_path / 'run', []
  with contextlib.ExitStack() as stack:
    servers = stack.enter_context(attached.Restarted(tmp_path, *SLOW))
    flags = servers.flags
    if is_direct:
      flags = stack.enter_context(flags_of_fronts(tmp_path, servers))
    process = job.start(run, *flags, *FLAGS, f'--config.stages.grpo.source.bound={bound}')
    for number in range(KILLS):
      # Evaluations, a row before and a row after the first stage, are over.
      job.wait_for_rows(run, 3 + number, process)
      in_flight = kill_while_it_streams(servers, rng, process)
      kills.append((job.count_rows(run), in_flight))
    _, err = process.communicate(timeout=540)
  assert process.returncode == 0, err[-4000:]
  rows = [row for row in job.rows(run) if 'run/engine_kept_tokens' in row]
  names = ('retries', 'restarts', 'continued', 'kept_tokens', 'lost_tokens', 'void')
  counts = {name: sum(int(row[f'run/engine_{name}']) for row in rows) for name in names}
  record_property('counts', str(counts))
  record_property('kills', str(kills))
  by_step = [tuple(int(row[f'run/engine_{name}']) for name in names) for row in rows]
  record_property('by_step', str(by_step))
  report = audit(run / 'replay')
  assert report.ok and report.live == () and set(report.uses) == {1}, report.lines
  assert report.states['trained'] == STEPS * 6 * 4
  with contextlib.closing(open_copy(run / 'replay', tmp_path / 'copy')) as store:
    samples = store.read([uid for group in store.sealed() for uid in group])
  steps = [row for row in rows if 'staleness/max' in row]
  assert len(steps) == STEPS and max(row['staleness/max'] for row in steps) <= bound
  assert counts['lost_tokens'] < counts['kept_tokens']
  if bound == 0:
    # Kept tokens have the logprobs that the trainer computes under the same weights.
    assert max(row['sampling/sampling_logp_difference/max'] for row in steps) < 1e-4
  spans = [s for sample in samples for s in sample.segments if s.finish == LOST]
  assert sum(span.end - span.start for span in spans) == counts['kept_tokens']
  assert len(spans) == counts['continued'] >= KILLS
  if is_direct:
    direct = {name: sum(row[f'perf/direct_{name}'] for row in steps) for name in DIRECT}
    record_property('direct', str(direct))
    assert direct['delivered'] > 10 * direct['undelivered'] and not direct['refused']
