"""A job whose servers and explorers find each other in its registry: fake servers and a real
explorer.
"""

import attached
import job
import pytest
import warm

from jaxrl_llm.core.net.registry import Kind, Lease, Registry, Watch
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.rollout.vllm.discovery import fingerprint
from jaxrl_llm.runtime.events import Edge, read
from jaxrl_llm.weights.hf import read_spec


@pytest.mark.full
def test_a_job_goes_on_when_another_server_takes_the_place_of_a_killed_one(tmp_path):
  """Also, its explorer registers and finds it, and a server of another model is ignored."""
  run, registry = tmp_path / 'run', Registry(tmp_path / 'registry', 'registry')
  flags = (
    '--config.rollout.engine=vllm',
    '--config.rollout.vllm.discover=1',
    f'--config.registry.directory={registry.directory}',
    '--config.registry.lease_s=600',
    '--config.rollout.explorers={"processes":0,"listen":{}}',
    '--config.stages.sft.steps=2',
    '--config.stages.grpo.steps=4',
    '--config.evaluation=[]',
    '--config.stages.grpo.evaluate_every=null',
    *attached.POLICY,
  )
  with attached.fake_servers(tmp_path, 2) as servers:
    ours = fingerprint(read_spec(tmp_path), None)
    # Nobody renews these leases; they last longer than this test.
    leases = [
      Lease(kind=Kind.VLLM, name=f'server-{i}', address=address, fingerprint=ours)
      for i, (_, address) in enumerate(servers)
    ]
    registry.put(leases[0])
    explore = ['launch/serve.py', '--role=explorer', f'--registry={registry.directory}']
    helper = warm.start([*explore, '--name=helper'], cwd=job.ROOT, env=job.environment())
    try:
      process = job.start(run, *flags)
      job.wait_for_rows(run, 2 + 1, process)
      stranger = Lease(
        kind=Kind.VLLM, name='stranger', address='unix:/none', fingerprint={'model': 'other'}
      )
      for lease in (leases[1], stranger):
        registry.put(lease)
      servers[0][0].kill()
      registry.remove(leases[0])
      _, said = process.communicate(timeout=300)
      assert process.returncode == 0, said
      assert [lease.name for lease in Watch(registry, Kind.EXPLORER).look(0.0)] == ['helper']
    finally:
      helper.terminate()
      helper.communicate()
  assert Watch(registry, Kind.MASTER).look(0.0) == () == Watch(registry, Kind.EXPLORER).look(0.0)
  steps = [row for row in job.rows(run) if row['stage'] == 'grpo' and 'actor/pg_loss' in row]
  assert len(steps) == 4 and sum(row['run/engine_void'] for row in steps) == 0
  assert sum(row['run/engine_joined'] for row in steps) == 1
  assert max(row['sampling/sampling_logp_difference/max'] for row in steps) < 1e-4
  assert steps[-1]['run/engines'] == steps[-1]['run/engines_serving'] == 1
  events = [event.fields for event in read(run / 'events.jsonl') if event.edge == Edge.SERVER]
  first, *later = [(event['server'], event['how']) for event in events]
  assert first == ('server-0', 'joined')
  assert sorted(later) == [('server-0', 'left'), ('server-1', 'joined')]
  assert said.count('serves another model than the policy') == 1
  report = audit(run / 'replay')
  assert report.ok and report.states['trained'] == 4 * 6 * 4, report.lines


@pytest.mark.acceptance
def test_at_the_start_a_server_of_another_model_is_one_line_and_exit_code_2(tmp_path):
  registry = Registry(tmp_path / 'registry', 'registry')
  registry.put(
    Lease(kind=Kind.VLLM, name='stranger', address='unix:/none', fingerprint={'model': 'other'})
  )
  flags = ('--config.rollout.engine=vllm', '--config.rollout.vllm.discover=1', *attached.POLICY)
  directory = f'--config.registry.directory={registry.directory}'
  said = job.train(tmp_path / 'run', *flags, directory, expect=2).stderr
  assert said.splitlines()[-1].startswith(
    'error: engine vllm: stranger (unix:/none) serves another model than the policy'
  ), said
  assert 'Traceback' not in said
