"""Real vLLM servers, by hand: every family, several runs, many kills, the quickstart's whole
job.
"""

import asyncio
import json
import random
import time

import jax
import job
import numpy as np
import pytest
import serving
from serving import ask, fault, forward, request, weights

from jaxrl_llm.core.types import Version
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.vllm.client import VllmClient
from jaxrl_llm.rollout.vllm.publication import digest, part
from jaxrl_llm.rollout.vllm.replica import Replica, ReplicaState
from jaxrl_llm.rollout.vllm.transfer import slice_of
from jaxrl_llm.runtime import events
from jaxrl_llm.runtime.events import Edge
from jaxrl_llm.weights.checksums import checksums
from jaxrl_llm.weights.hf import to_hf

pytestmark = pytest.mark.acceptance
A, B = Version(0, 0), Version(0, 1)
OWNED = ('--config.rollout.engine=vllm', f'--config.rollout.vllm.environment={serving.ENVIRONMENT}')


def owned(servers):
  return [Replica(s.name, client=VllmClient(s.address, name=s.name), server=s) for s in servers]


@pytest.mark.parametrize('family', ['qwen2', 'qwen3', 'llama'])
@pytest.mark.parametrize('tied', [True, False], ids=['tied', 'untied'])
def test_logprobs_of_every_family_are_those_of_our_own_forward(tmp_path, family, tied):
  model = serving.model_of(family, tied=tied)

  async def main():
    replicas = owned(serving.servers_of(model, tmp_path / 'model', count=1))
    async with serving.fleet_of(model, replicas, tmp_path) as fleet:
      for step, seed in enumerate((1, 2)):
        await fleet.load(weights(model, seed, Version(0, step)))
        params = serving.params_of(model, seed)
        for number in range(3):
          tokens = serving.long_prompt(number)
          found = await fleet.replicas[0].client.prompt_logprobs(tokens, deadline_s=120)
          np.testing.assert_allclose(found, forward(model, params, tokens), atol=1e-5, rtol=1e-5)
          asked = request(number, length=150, sampling=Sampling(temperature=0.0))
          (completion,) = await ask(fleet, asked)
          every = [*asked.prompt, *completion.tokens]
          wanted = forward(model, params, every)[len(asked.prompt) :]
          np.testing.assert_allclose(completion.logprobs, wanted, atol=1e-5, rtol=1e-5)

  asyncio.run(main())


def test_a_server_killed_in_mid_publish_comes_back_with_the_version(tmp_path):
  model = serving.model_of('llama', tied=False)

  async def main():
    replicas = owned(serving.servers_of(model, tmp_path / 'model', count=2, worker=serving.FAULTY))
    async with serving.fleet_of(model, replicas, tmp_path) as fleet:
      await fleet.load(weights(model, 1, A))
      await fault(replicas[0].client.address, 'die', 1)
      await fleet.load(weights(model, 2, B))
      completions = await ask(fleet, request(1, samples=16))
      assert len(completions) == 16
      assert {s.version for c in completions for s in c.segments} == {B}
      assert {s.engine for c in completions for s in c.segments} == {'vllm-1'}
      while replicas[0].version != B:
        await asyncio.sleep(0.5)
      assert fleet.counts['restarts'] == 1
      one, other = [await r.client.digests(deadline_s=60) for r in replicas]
      assert one == other
      engines = {s.engine for c in await ask(fleet, request(2, samples=16)) for s in c.segments}
      assert engines == {'vllm-0', 'vllm-1'}

  asyncio.run(main())


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_fifty_deltas_and_a_kill_among_them_leave_the_bits_of_whole_weights(tmp_path, dtype):
  model = serving.model_of('llama', tied=False)

  async def main():
    replicas = owned(serving.servers_of(model, tmp_path / 'model', count=2, dtype=dtype))
    async with serving.fleet_of(model, replicas, tmp_path, dtype=dtype, full_every=20) as fleet:
      tree = serving.params_of(model, 1)
      for step in range(51):
        tree = serving.moved(tree, step) if step else tree
        if step == 25:  # In the middle of the second chain.
          serving.kill(serving.api_servers(replicas[0].server.pid)[0])
        version = Version(0, step)
        await fleet.load(serving.weights_of(model, tree, version))
        assert len(fleet._updates.current.publication.deltas) == step % 20
        while step == 30 and replicas[0].version != version:  # It has caught up.
          await asyncio.sleep(0.2)
        wanted = serving.digests_of(model, tree, dtype)
        serves = [replica for replica in replicas if replica.version == version]
        assert len(serves) == 2 or 25 <= step < 30
        for replica in serves:
          assert await replica.client.digests(deadline_s=60) == [wanted]
      assert fleet.counts['restarts'] == 1 and fleet.counts['publications'] == 51

  asyncio.run(main())


def test_tensor_parallel_workers_read_and_digest_only_their_slices(tmp_path):
  """A server of two ranks: whole weights first, then whole weights and deltas."""
  # The vocabulary is padded to 128 rows, so both ranks have some of it.
  model = serving.model_of('qwen2', tied=True, vocab=100)

  async def main():
    (server,) = serving.servers_of(
      model, tmp_path / 'model', count=1, worker=serving.COUNTING, tensor_parallel_size=2
    )
    client = VllmClient(server.address)
    try:
      await serving.started([server])
      held = [
        {name: slice_of(tensor) for name, tensor in worker['tensors'].items()}
        for worker in await client.weights()
      ]
      assert len(held) == 2 and held[0] != held[1]
      for full_every in (1, 3):
        async with serving.attached(
          model, [server], tmp_path / f'{full_every}', full_every=full_every
        ) as fleet:
          tree = model.init(jax.random.key(full_every))
          for step in range(3):
            tree = serving.moved(tree, step) if step else tree
            await fleet.load(serving.weights_of(model, tree, Version(0, step)))
            publication = fleet._updates.current.publication
            assert len(publication.deltas) == (step if full_every == 3 else 0)
            await check_ranks(client, held, dict(to_hf(tree, model.spec)), publication)
            asked = request(step)
            (completion,) = await ask(fleet, asked)
            tokens = [*asked.prompt, *completion.tokens]
            wanted = forward(model, tree, tokens)[len(asked.prompt) :]
            np.testing.assert_allclose(completion.logprobs, wanted, atol=1e-5, rtol=1e-5)
    finally:
      await client.close()
      await server.close()

  asyncio.run(main())


async def check_ranks(client, held, tensors, publication):
  """Checks what the ranks of a server have read and digested for a version, and what they hold."""
  counts = await client._rpc('jaxrl_counts')
  digests = await client.digests(deadline_s=60)
  sums = await client.checksums(deadline_s=60)
  await client._rpc('jaxrl_counts')
  for rank, cuts in enumerate(held):
    parts = {name: part(tensors[name], cut) for name, cut in cuts.items()}
    assert digests[rank] == {name: digest(array) for name, array in parts.items()}
    assert sums[rank] == {
      name: checksums(tensors[name], [cut] if cut else [])[cut] for name, cut in cuts.items()
    }
    size = sum(array.nbytes for array in parts.values())
    read = publication.sent_bytes if publication.deltas else size
    # The loaded parameters are digested once more, as their proof.
    assert counts[rank] == {'read': read, 'digested': read + size}
    assert size < 0.6 * publication.nbytes


def test_after_each_of_several_runs_a_fresh_server_agrees(tmp_path):
  model = serving.model_of('qwen2', tied=True)
  pair = serving.servers_of(model, tmp_path / 'model', count=2)
  try:
    asyncio.run(serving.started(pair))
    for steps in (2, 5, 9):
      run = tmp_path / f'run{steps}'
      job.train(run, *serving.attached_job(pair), f'--config.stages.grpo.steps={steps}')
      (fresh,) = serving.servers_of(model, run / 'hf', count=1, load='auto')
      try:
        asyncio.run(agree(pair, fresh))
      finally:
        asyncio.run(fresh.stop())
  finally:
    for server in pair:
      asyncio.run(server.stop())


async def agree(pair, fresh):
  await serving.started([fresh])
  digests = [await serving.loaded(server) for server in (*pair, fresh)]
  assert digests[0] == digests[1] == digests[2]
  for server in pair:
    for number in range(4):
      tokens = serving.long_prompt(number)
      found, wanted = (
        await serving.prompt_logprobs(server, tokens),
        await serving.prompt_logprobs(fresh, tokens),
      )
      np.testing.assert_allclose(found, wanted, atol=1e-5)
      params = {'max_tokens': 64, 'temperature': 0.0, 'ignore_eos': True, 'detokenize': False}
      answers = []
      for one in (server, fresh):
        client = VllmClient(one.address)
        answer = await client.call(
          'POST', '/inference/v1/generate', {'token_ids': tokens, 'sampling_params': params}
        )
        answers.append(answer['choices'][0]['token_ids'])
        await client.close()
      assert answers[0] == answers[1]


def test_servers_killed_while_they_stream_cost_only_what_had_not_arrived(tmp_path):
  """Whatever is cut, an answer is greedy, and its logprobs are those of our own forward pass."""
  model, rng = serving.model_of('llama', tied=False), random.Random(0)
  params, kills = serving.params_of(model, 1), []

  async def main():
    replicas = owned(serving.servers_of(model, tmp_path / 'model', count=2))
    async with serving.fleet_of(model, replicas, tmp_path, stream=8, max_restarts=20) as fleet:
      await fleet.load(weights(model, 1, A))
      for number in range(2):
        before = fleet.counts.copy()
        asked = [
          request(100 * number + i, max_tokens=360, sampling=Sampling(temperature=0.0))
          for i in range(8)
        ]
        asking = [asyncio.create_task(ask(fleet, each)) for each in asked]
        victim = rng.choice(replicas)
        drawn = await drawn_by(victim, at_least=400)
        tree = serving.descendants(victim.server.pid)
        if number % 2:
          serving.kill(next(pid for pid, line in tree.items() if 'EngineCore' in line))
        else:
          serving.kill(serving.api_servers(victim.server.pid)[0])
        for each, (completion,) in zip(asked, await asyncio.gather(*asking), strict=True):
          check_greedy(model, params, each, completion)
        counts = fleet.counts - before
        names = ('retries', 'restarts', 'continued', 'kept_tokens', 'lost_tokens')
        kills.append({name: counts[name] for name in names} | {'drawn': drawn})
        assert counts['continued'] > 0 and counts['void'] == 0
        while any(replica.state != ReplicaState.SERVING for replica in replicas):
          await asyncio.sleep(0.5)

  asyncio.run(main())
  print(json.dumps(kills))


async def drawn_by(replica, *, at_least):
  """Waits until a server has sampled so many tokens from now on; returns how many it has."""
  client, before = VllmClient(replica.client.address), None
  while True:
    text = await client.call('GET', '/metrics', is_text=True)
    lines = [line for line in text.splitlines() if line.startswith('vllm:generation_tokens_total')]
    count = sum(float(line.split()[-1]) for line in lines)
    before = count if before is None else before
    if count - before >= at_least:
      await client.close()
      return int(count - before)
    await asyncio.sleep(0.05)


def check_greedy(model, params, asked, completion):
  every = [*asked.prompt, *completion.tokens.tolist()]
  logprobs = serving.distributions(model, params, every[:-1])[len(asked.prompt) - 1 :]
  taken = logprobs[np.arange(len(completion.tokens)), completion.tokens]
  assert len(completion.tokens) == asked.max_tokens
  # In batches of other sizes, single logprobs of float32 are off by 2e-5 after 300 tokens.
  np.testing.assert_allclose(completion.logprobs, taken, atol=1e-4)
  np.testing.assert_allclose(taken, logprobs.max(-1), atol=1e-4)


def test_many_kills_of_any_process_of_any_server_lose_nothing(tmp_path):
  run, rng, kills = tmp_path / 'run', random.Random(0), 0
  process = job.start(
    run, *OWNED, '--config.stages.grpo.steps=3000', '--config.rollout.vllm.max_restarts=20'
  )
  try:
    job.wait_for_rows(run, 14, process, timeout_s=600)
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline and kills < 8:
      # Only what serves: one that is starting is killed soon enough.
      tree = [
        p
        for p, line in serving.descendants(process.pid).items()
        if 'guard.py' not in line and 'vllm' in line.lower()
      ]
      serving.kill(rng.choice(tree))
      kills += 1
      rows = len(job.rows(run))
      job.wait_for_rows(run, rows + rng.randint(5, 60), process, timeout_s=600)
  finally:
    process.terminate()
    _, err = process.communicate(timeout=120)
  assert process.returncode == 143, err[-3000:]
  report = audit(run / 'replay')
  assert report.ok, report.lines
  rows = [row for row in job.rows(run) if 'actor/pg_loss' in row]
  assert kills >= 4 and max(row['sampling/sampling_logp_difference/max'] for row in rows) < 1e-4
  print(
    json.dumps(
      {
        'kills': kills,
        'steps': len(rows),
        'restarts': sum(row['run/engine_restarts'] for row in rows),
      }
    )
  )


def test_bfloat16_servers_stay_within_the_budget(tmp_path):
  run = tmp_path / 'run'
  job.train(run, *OWNED, '--config.rollout.vllm.dtype=bfloat16', '--config.stages.grpo.steps=30')
  rows = [row for row in job.rows(run) if 'rollout_corr/k3_kl' in row]
  keys = (
    'rollout_corr/k3_kl',
    'rollout_corr/rollout_is_eff_sample_size',
    'sampling/sampling_logp_difference/mean',
  )
  print(json.dumps({key: float(np.mean([row[key] for row in rows])) for key in keys}))
  assert 1e-9 < np.mean([row['rollout_corr/k3_kl'] for row in rows]) < 1e-2
  assert max(row['run/mismatch_over_budget'] for row in rows) == 0


@pytest.mark.parametrize('seed', [0, 1, 2])
def test_the_quickstarts_job_learns_on_two_servers(tmp_path, seed):
  run = tmp_path / 'run'
  job.train(run, *OWNED, f'--config.seed={seed}', config=('--config=configs/quickstart.py',))
  accuracies = {(stage, step): accuracy for stage, step, accuracy in job.accuracies(run)}
  assert accuracies['sft', 500] <= 0.5
  assert accuracies['grpo', 780] >= 0.9
  rows = [row for row in job.rows(run) if 'perf/publish_pause_s' in row and 'actor/pg_loss' in row]
  keys = (
    'perf/rollout_throughput',
    'timing_s/update_weights',
    'perf/publish_pause_s',
    'timing_s/step',
    'timing_s/gen',
  )
  print(
    json.dumps(
      {'seed': seed, 'accuracy': accuracies['grpo', 780]}
      | {k: float(np.median([r[k] for r in rows])) for k in keys}
    )
  )


def test_servers_that_memory_phases_destroy_in_each_step_lose_nothing(tmp_path):
  """Every server start is one of the plan, none a failure; the servers get the newest weights."""
  run, steps = tmp_path / 'run', 3
  job.train(run, *phased(steps), timeout_s=1800)
  report = audit(run / 'replay')
  assert report.ok and report.states['trained'] == 24 * steps, report.lines
  trained = [row for row in job.rows(run) if 'actor/pg_loss' in row]
  assert len(trained) == steps and not any(row['run/engine_restarts'] for row in trained)
  assert max(row['rollout_corr/k3_kl'] for row in trained) < 1e-6
  moved = [
    event.edge
    for event in events.read(run / events.FILE)
    if event and event.kind == 'request' and event.edge in (Edge.RELEASE, Edge.RESTORE)
  ]
  assert min(moved.count(Edge.RELEASE), moved.count(Edge.RESTORE)) >= steps


def test_a_batch_of_memory_phases_gives_the_update_of_a_resident_run(tmp_path):
  """The resident run trains on the recorded groups of the other, which fill one batch."""
  run, resident = tmp_path / 'phased', tmp_path / 'resident'
  job.train(run, *phased(1), timeout_s=1800)
  source = {'@type': 'Recorded', 'tasksets': ['train'], 'groups_per_batch': 6, 'group_size': 4}
  source |= {'run': str(run), 'stage': 'grpo'}
  job.train(resident, *short(1), f'--config.stages.grpo.source={json.dumps(source)}')
  wanted, result = job.newest_arrays(run), job.newest_arrays(resident)
  assert wanted.keys() == result.keys()
  for name, (dtype, shape, content) in wanted.items():
    assert result[name][:2] == (dtype, shape)
    if dtype == 'float32':
      values = [np.frombuffer(x, dtype) for x in (content, result[name][2])]
      np.testing.assert_allclose(*values, atol=1e-6, err_msg=name)


def short(steps):
  """Flags of a stage of GRPO with few steps, without evaluations, for which servers would start."""
  stage = (f'--config.stages.grpo.steps={steps}', '--config.stages.grpo.evaluate_every=null')
  return (*stage, '--config.evaluation=[]')


def phased(steps):
  return (*OWNED, '--config.rollout.vllm.servers=1', '--config.phases={}', *short(steps))
