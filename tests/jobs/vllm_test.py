"""Real vLLM servers: what they sample is what the trainer published, or it is not taken.

One attached pair serves all tests; one server besides is started from an exported checkpoint, with
speculation. Those that start and kill servers of their own are in tests/jobs/vllm_owned_test.py.
"""

import asyncio
import itertools
import json
import subprocess

import engine_contract
import jax
import job
import namespaces
import numpy as np
import pulling
import pytest
import serving
from safetensors.numpy import load_file
from serving import TIED, VOCAB, ask, fault, forward, request, weights
from stepwise import stepwise_logprobs

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.types import Version
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.vllm.answer import read_stream
from jaxrl_llm.rollout.vllm.client import VllmClient
from jaxrl_llm.rollout.vllm.publication import FILE, digest
from jaxrl_llm.rollout.vllm.shares import delta_file
from jaxrl_llm.rollout.vllm.stream import Arrivals

pytestmark = pytest.mark.full
cabled = pytest.fixture(namespaces.cabled)
A, B, C = Version(0, 0), Version(0, 1), Version(0, 2)
EVENT = (
  *('request_id', 'usage', 'output_mode', 'choices', 'index', 'finish_reason', 'stop_reason'),
  *('token_ids', 'routed_experts', 'sampling_mask', 'weight_versions', 'logprobs'),
)
"""Names in an event of a stream, and in its choice."""
SPECULATION = {
  'method': 'ngram',
  'num_speculative_tokens': 4,
  'prompt_lookup_max': 4,
  'prompt_lookup_min': 2,
}


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
  """Two servers of the tied model, as launch/serve.py keeps them up, whose worker can be made to
  fail.
  """
  folder = tmp_path_factory.mktemp('pair')
  process = serving.serve(
    TIED, folder, '--servers=2', f'--worker_file={serving.FAULTY["faulty_worker"]}'
  )
  try:
    yield [serving.Address(address) for address in serving.wait_for_addresses(folder, process)]
  finally:
    process.terminate()
    out, _ = process.communicate(timeout=60)
  assert process.returncode == 0, out[-3000:]
  assert "--config.rollout.vllm.addresses='[" in out


@pytest.fixture(scope='module')
def params():
  return {seed: TIED.init(jax.random.key(seed)) for seed in (1, 2, 3)}


def test_logprobs_are_those_of_our_own_forward_at_every_version_and_temperature(
  pair, params, tmp_path
):
  async def main():
    async with serving.attached(TIED, pair, tmp_path, dispatch='uniform') as fleet:
      for step, seed in enumerate((1, 2, 1)):
        version = Version(0, step)
        await fleet.load(weights(TIED, seed, version))
        for server in pair:
          tokens = serving.long_prompt(step)
          found = await serving.prompt_logprobs(server, tokens)
          # Sums in another order: on one of two machines, one of 300 differed by 3.7e-5.
          np.testing.assert_allclose(
            found, forward(TIED, params[seed], tokens), atol=5e-5, rtol=1e-5
          )
        for temperature in (0.0, 0.7, 1.0):
          samples = 1 if temperature == 0 else 6
          asked = request(
            step, samples=samples, sampling=Sampling(temperature=temperature), stop_ids=(1,)
          )
          engines = set()
          for completion in await ask(fleet, asked):
            assert {s.version for s in completion.segments} == {version}
            engines |= {s.engine for s in completion.segments}
            tokens = [*asked.prompt, *completion.tokens]
            wanted = forward(TIED, params[seed], tokens, temperature=temperature or 1.0)[
              len(asked.prompt) :
            ]
            np.testing.assert_allclose(completion.logprobs, wanted, atol=1e-5, rtol=1e-5)
          assert temperature == 0 or engines == {'vllm-0', 'vllm-1'}, (
            'a group is spread over the servers'
          )
      assert abs(fleet.replicas[0].workload.assigned - fleet.replicas[1].workload.assigned) <= 1

  asyncio.run(main())


def test_prompts_beyond_what_a_server_computes_at_once_are_sampled(pair, params, tmp_path):
  """12 prompts of 300 tokens, where vLLM computes at most 2,048 at a time."""

  async def main():
    async with serving.attached(TIED, pair[:1], tmp_path) as fleet:
      await fleet.load(weights(TIED, 1, Version(0, 0)))
      requests = [request(20 + i, length=300, max_tokens=4) for i in range(12)]
      for asked, (completion,) in zip(
        requests, await asyncio.gather(*(ask(fleet, asked) for asked in requests)), strict=True
      ):
        tokens = [*asked.prompt, *completion.tokens]
        wanted = forward(TIED, params[1], tokens)[len(asked.prompt) :]
        np.testing.assert_allclose(completion.logprobs, wanted, atol=5e-5, rtol=1e-5)

  asyncio.run(main())


def test_a_forgotten_cache_is_not_read_by_the_next_version(pair, params, tmp_path):
  """Greedy tokens after a publish are those of the new weights, for a prompt whose blocks the old
  ones had cached.
  """

  async def main():
    async with serving.attached(TIED, pair[:1], tmp_path) as fleet:
      asked = request(7, length=300, sampling=Sampling(temperature=0.0), max_tokens=16)
      for step, seed in enumerate((1, 2)):
        await fleet.load(weights(TIED, seed, Version(0, step)))
        for _ in range(2):  # The second reads what the first cached.
          (completion,) = await ask(fleet, asked)
          tokens = list(asked.prompt)
          for token, logprob in zip(completion.tokens, completion.logprobs, strict=True):
            tokens.append(int(token))
            assert abs(forward(TIED, params[seed], tokens)[-1] - logprob) < 1e-4

  asyncio.run(main())


def spoil(path, kind):
  data = path.read_bytes()
  if kind == 'a corrupted byte':
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
  elif kind == 'a truncated file':
    path.write_bytes(data[: 2 * len(data) // 3])
  elif kind == 'a tensor missing':
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path)
    del tensors['model.norm.weight']
    save_file(tensors, path, metadata={'format': 'pt'})
  elif kind == 'a missing file':
    path.unlink()


def test_a_bad_file_is_refused_before_anything_is_written(pair, params, tmp_path):
  async def main():
    async with serving.attached(TIED, pair, tmp_path) as fleet:
      await fleet.load(weights(TIED, 1, A))
      before = [await serving.loaded(server) for server in pair]
      write = fleet._updates.folder.write
      asked = request(1, sampling=Sampling(temperature=0.0))
      for kind in ('a corrupted byte', 'a truncated file', 'a tensor missing', 'a missing file'):

        def spoiled(version, leaves, kind=kind, **slices):
          publication = write(version, leaves, **slices)
          spoil(publication.directory / FILE, kind)
          return publication

        fleet._updates.folder.write = spoiled
        with pytest.raises(RunError, match=r'0\.1 was not published, and version 0\.0 stays'):
          await fleet.load(weights(TIED, 2, B))
        fleet._updates.folder.write = write
        assert [await serving.loaded(server) for server in pair] == before, (
          f'{kind}: nothing half-written'
        )
        assert fleet.version == A
        (completion,) = await ask(fleet, asked)
        assert [s.version for s in completion.segments] == [A]
      await fleet.load(weights(TIED, 2, C))
      (completion,) = await ask(fleet, asked)
      wanted = forward(TIED, params[2], [*asked.prompt, *completion.tokens])[len(asked.prompt) :]
      np.testing.assert_allclose(completion.logprobs, wanted, atol=1e-5, rtol=1e-5)

  asyncio.run(main())


def test_a_worker_that_keeps_one_old_tensor_is_caught_by_the_digest_of_what_is_loaded(
  pair, params, tmp_path
):
  """The weights move by 1e-6: no logprob can tell, and vLLM says nothing."""
  moved = jax.tree.map(lambda x: x + 1e-6, params[1])

  async def main():
    async with serving.attached(TIED, pair, tmp_path) as fleet:
      await fleet.load(serving.weights_of(TIED, params[1], A))
      name = 'model.layers.1.self_attn.k_proj.weight'
      old = (await serving.loaded(pair[0]))[name]
      await fault(pair[0].address, 'keep', name)
      seen = []
      repair = fleet._repairs.repair
      fleet._repairs.repair = lambda replica, reason: (seen.append(reason), repair(replica, reason))
      await fleet.load(serving.weights_of(TIED, moved, B))
      assert len(seen) == 1 and '1 of' in seen[0] and name in seen[0] and 'vllm-0' in seen[0]
      completions = await ask(fleet, request(1, samples=8))
      assert {s.version for c in completions for s in c.segments} == {B}
      while fleet.replicas[0].version != B:  # Brought there again, and now proven.
        await asyncio.sleep(0.02)
      assert (await serving.loaded(pair[0]))[name] != old
      assert await serving.loaded(pair[0]) == await serving.loaded(pair[1])

  asyncio.run(main())


def test_deltas_give_servers_the_bits_of_whole_weights(pair, params, tmp_path):
  """A delta that cannot be read is followed by whole weights."""

  async def main():
    async with serving.attached(TIED, pair, tmp_path, full_every=4) as fleet:
      tree, write = params[1], fleet._updates.folder.write
      for step in range(6):
        tree = serving.moved(tree, step) if step else tree
        if step == 2:
          fleet._updates.folder.write = lambda *args, **options: truncated(write(*args, **options))
        await fleet.load(serving.weights_of(TIED, tree, Version(0, step)))
        fleet._updates.folder.write = write
        wanted = serving.digests_of(TIED, tree)
        assert [await serving.loaded(server) for server in pair] == [wanted] * 2
        (completion,) = await ask(fleet, request(step))
        assert {s.version for s in completion.segments} == {Version(0, step)}
        # Whole: the first, the one that was spoiled.
        assert len(fleet._updates.current.publication.deltas) == (0, 1, 0, 1, 2, 3)[step]
      assert fleet.counts['restarts'] == fleet.counts['void'] == 0

  asyncio.run(main())


def test_servers_whose_hosts_fetch_have_the_bits_of_the_trainer(pair, params, tmp_path):
  """Whole weights and deltas, over HTTP, to two hosts without a directory in common."""

  async def main():
    roots = [tmp_path / 'one', tmp_path / 'two']
    async with pulling.replicas(tmp_path, pair, roots) as replicas:
      addresses = tuple(replica.client.address for replica in replicas)
      pulled = {'transfer': 'pull', 'addresses': addresses, 'full_every': 3}
      async with serving.fleet_of(TIED, replicas, tmp_path, **pulled) as fleet:
        tree = params[1]
        for step in range(4):
          tree = serving.moved(tree, step) if step else tree
          await fleet.load(serving.weights_of(TIED, tree, Version(0, step)))
          wanted = serving.digests_of(TIED, tree)
          assert [await serving.loaded(server) for server in pair] == [wanted] * 2
          assert len(fleet._updates.current.publication.deltas) == (0, 1, 2, 0)[step]
          assert all(len(list(root.glob('*/*/*'))) >= 1 for root in roots)
        assert fleet.counts['restarts'] == fleet.counts['void'] == 0

  asyncio.run(main())


def truncated(publication):
  path = publication.deltas[-1].directory / delta_file(0)
  path.write_bytes(path.read_bytes()[:-5])
  return publication


def test_weights_that_are_not_the_trainers_fail_the_probe(pair, tmp_path):
  """What no digest can show: files that are faithfully those of another model than the trainer
  computes with.
  """

  async def main():
    async with serving.attached(TIED, pair, tmp_path, max_restarts=0) as fleet:
      await fleet.load(weights(TIED, 1, A))
      other = weights(TIED, 2, B)
      with pytest.raises(RunError, match='probe'):
        await fleet.load(
          type(other)(version=B, leaves=weights(TIED, 3, B).leaves, probe=other.probe)
        )

  asyncio.run(main())


def test_a_completion_under_way_goes_on_under_the_next_version(pair, params, tmp_path):
  async def main():
    async with serving.attached(TIED, pair[:1], tmp_path) as fleet:
      await fleet.load(weights(TIED, 1, A))
      asked = request(5, max_tokens=380)
      # A minute and more, were it not lifted: it is under way when B comes.
      await fault(pair[0].address, 'slow', 0.2)
      task = asyncio.create_task(ask(fleet, asked))
      await generating(pair[0])
      await fleet.load(weights(TIED, 2, B))
      await fault(pair[0].address, 'slow', 0.0)
      (completion,) = await task
      versions = [s.version for s in completion.segments]
      assert versions == [A, B]
      cut = completion.segments[0].end
      tokens = [*asked.prompt, *completion.tokens]
      start = len(asked.prompt)
      np.testing.assert_allclose(
        completion.logprobs[:cut], forward(TIED, params[1], tokens)[start : start + cut], atol=1e-4
      )
      (
        np.testing.assert_allclose(
          completion.logprobs[cut:], forward(TIED, params[2], tokens)[start + cut :], atol=1e-4
        ),
        'as if the new weights had read all of it',
      )

  asyncio.run(main())


def test_a_completion_under_way_can_keep_its_cache(pair, params, tmp_path):
  """Its later tokens attend to keys and values of the weights before, a later request to none of
  them: its prompt was cached by those weights.
  """

  async def main():
    async with serving.attached(TIED, pair[:1], tmp_path, kv='keep') as fleet:
      await fleet.load(weights(TIED, 1, A))
      cached = request(7, length=300, max_tokens=2)
      await ask(fleet, cached)
      asked = request(5, max_tokens=380)
      await fault(pair[0].address, 'slow', 0.2)
      task = asyncio.create_task(ask(fleet, asked))
      await generating(pair[0])
      await fleet.load(weights(TIED, 2, B))
      await fault(pair[0].address, 'slow', 0.0)
      (completion,) = await task
      assert [s.version for s in completion.segments] == [A, B]
      cut = completion.segments[0].end
      each = [params[1]] * cut + [params[2]] * (len(completion.tokens) - cut)
      wanted = stepwise_logprobs(TIED, each, asked.prompt, completion.tokens)
      np.testing.assert_allclose(completion.logprobs, wanted, atol=1e-4)
      (later,) = await ask(fleet, cached)
      tokens = [*cached.prompt, *later.tokens]
      wanted = forward(TIED, params[2], tokens)[len(cached.prompt) :]
      np.testing.assert_allclose(later.logprobs, wanted, atol=1e-4)

  asyncio.run(main())


def trained_on(pair, run):
  """Trains the job on the servers, and checks its metrics."""
  job.train(run, *serving.attached_job(pair))
  assert sum(row.get('run/engine_void', 0) for row in job.rows(run)) == 0
  steps = [row for row in job.rows(run) if 'actor/pg_loss' in row]
  assert max(row['sampling/sampling_logp_difference/max'] for row in steps) < 1e-4
  assert max(row['rollout_corr/k3_kl'] for row in steps) < 1e-8
  assert {row['perf/compilations'] for row in steps[2:]} == {0}


def test_after_a_run_servers_hold_what_it_exported(pair, tmp_path):
  trained_on(pair, tmp_path / 'run')
  exported = load_file(tmp_path / 'run' / 'hf' / 'model.safetensors')
  wanted = {name: digest(array) for name, array in exported.items()}

  async def main():
    assert await serving.loaded(pair[0]) == await serving.loaded(pair[1]) == wanted

  asyncio.run(main())


@pytest.mark.acceptance
def test_after_a_run_a_fresh_server_with_speculation_agrees(pair, tmp_path):
  """The servers that a run published to, against a fresh one that loaded the run's export and
  speculates.
  """
  run = tmp_path / 'run'
  trained_on(pair, run)
  (fresh,) = serving.servers_of(
    TIED, run / 'hf', count=1, load='auto', speculative_config=SPECULATION
  )

  async def main():
    await serving.started([fresh])
    assert (
      await serving.loaded(pair[0]) == await serving.loaded(pair[1]) == await serving.loaded(fresh)
    )
    for number in range(3):
      tokens = serving.long_prompt(number)
      found, wanted = (
        await serving.prompt_logprobs(pair[0], tokens),
        await serving.prompt_logprobs(fresh, tokens),
      )
      np.testing.assert_allclose(found, wanted, atol=1e-5)
    plain, drafting = VllmClient(pair[0].address), VllmClient(fresh.address)
    before = await drafts(drafting)
    for number in range(4):
      asked = request(number, length=200, max_tokens=150, sampling=Sampling(temperature=0.0))
      one, other = [
        await client.call('POST', '/inference/v1/generate', greedy(asked))
        for client in (plain, drafting)
      ]
      assert one['choices'][0]['token_ids'] == other['choices'][0]['token_ids']
    assert await drafts(drafting) > before + 20, 'drafts were accepted'
    await plain.close()
    await drafting.close()

  try:
    asyncio.run(main())
  finally:
    asyncio.run(fresh.stop())


@pytest.mark.parametrize(
  'kills', [1, *(pytest.param(n, marks=pytest.mark.acceptance) for n in (3, 20))]
)
def test_after_each_kill_of_the_trainer_every_sample_is_accounted_for(pair, tmp_path, kills):
  """Attached servers, two updates of staleness, filters and replay; killed at random moments."""
  run, steps = tmp_path / 'run', 5 * kills
  flags = (
    *serving.attached_job(pair),
    *job.ASYNCHRONOUS,
    *job.PROCESSED,
    f'--config.stages.grpo.steps={steps}',
  )
  job.kill_at_random(run, *flags, kills=kills, seed=kills, after=15 if kills == 1 else 0)
  job.check_accounts(run, steps=steps, processed=True)


@pytest.mark.acceptance
def test_after_twenty_kills_without_filters_every_task_was_trained_once(pair, tmp_path):
  run = tmp_path / 'run'
  flags = (*serving.attached_job(pair), *job.ASYNCHRONOUS, '--config.stages.grpo.steps=100')
  job.kill_at_random(run, *flags, kills=20, seed=0)
  job.check_accounts(run, steps=100, processed=False)


@pytest.mark.acceptance
@pytest.mark.parametrize(
  ('flag', 'lag'), [('bound=1', 1), ('bound=4', 4), ('rollout_only=true', 0)]
)
def test_each_mode_runs_on_real_servers(pair, tmp_path, flag, lag):
  run = tmp_path / 'run'
  job.train(
    run,
    *serving.attached_job(pair),
    f'--config.stages.grpo.source.{flag}',
    '--config.stages.grpo.steps=6',
  )
  steps = [row for row in job.rows(run) if 'staleness/max' in row]
  assert len(steps) == 6 and max(row['staleness/max'] for row in steps) <= lag
  report = audit(run / 'replay')
  state = 'admitted' if flag.startswith('rollout_only') else 'trained'
  assert report.ok and report.states[state] == report.issued == 6 * 6 * 4, report.lines
  fresh = [row for row in steps if row['staleness/max'] == 0 and 'actor/pg_loss' in row]
  assert all(row['sampling/sampling_logp_difference/max'] < 1e-4 for row in fresh)


@pytest.mark.acceptance
def test_partial_rollouts_on_real_servers_lose_no_sample(pair, tmp_path):
  run, partial = tmp_path / 'run', {'budget': 3, 'max_spans': 4, 'loss': 'all'}
  flags = (
    *serving.attached_job(pair),
    f'--config.rollout.partial={json.dumps(partial)}',
    '--config.stages.grpo.source.bound=1',
  )
  job.kill_at_random(run, *flags, kills=2, seed=2, after=15)
  rows = [row for row in job.rows(run) if 'partial/cut' in row]
  assert len(rows) == 8 and max(row['partial/spans/max'] for row in rows) >= 2
  assert sum(row['partial/continued'] for row in rows) > 0
  report = audit(run / 'replay')
  assert report.ok and report.live == () and set(report.uses) == {1}, report.lines
  assert report.states['trained'] == 8 * 6 * 4


async def generating(server):
  """Returns once the server has given tokens of a request that is not over yet."""
  client = VllmClient(server.address)
  before = await counter(client, 'vllm:generation_tokens_total')
  while await counter(client, 'vllm:generation_tokens_total') < before + 5:
    await asyncio.sleep(0.02)
  await client.close()


def greedy(asked):
  params = {
    'max_tokens': asked.max_tokens,
    'temperature': 0.0,
    'logprobs': 0,
    'ignore_eos': True,
    'detokenize': False,
  }
  return {'token_ids': list(asked.prompt), 'sampling_params': params}


async def counter(client, name):
  """What the server's metrics say it has counted so far."""
  text = await client.call('GET', '/metrics', is_text=True)
  return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


async def drafts(client):
  """Tokens of drafts that were accepted so far."""
  return await counter(client, 'vllm:spec_decode_num_accepted_tokens_total')


@pytest.mark.acceptance
def test_speculation_samples_only_if_it_passes_the_self_test(tmp_path):
  """vLLM 0.32 does not pass. When this fails, it has mended its sampling with drafts."""
  (server,) = serving.servers_of(TIED, tmp_path / 'model', count=1, speculative_config=SPECULATION)

  async def main():
    await serving.started([server])
    config = {'args': {'speculative_config': SPECULATION}}
    async with serving.attached(TIED, [server], tmp_path, **config) as fleet:
      await fleet.load(weights(TIED, 1, A))
      await ask(fleet, request(1, sampling=Sampling(temperature=0.0)))
      fault = fleet.replicas[0].sampling_fault
      assert fault is not None and 'has no result' not in fault, fault
      print('self-test:', fault)
      with pytest.raises(UserError, match=r'failed the self-test: .*; remove rollout\.vllm\.args'):
        await ask(fleet, request(1))

  try:
    asyncio.run(main())
  finally:
    asyncio.run(server.close())


def test_sampled_requests_are_refused_where_servers_may_speculate(pair, tmp_path):
  """Other temperatures than that of the self-test; these servers do not speculate."""

  async def main():
    config = {'args': {'speculative_config': {'method': 'ngram'}}}
    async with serving.attached(TIED, pair, tmp_path, **config) as fleet:
      await fleet.load(weights(TIED, 1, A))
      for temperature in (0.0, 1.0):
        await ask(fleet, request(1, sampling=Sampling(temperature=temperature)))
      with pytest.raises(UserError, match='only greedy requests'):
        await ask(fleet, request(1, sampling=Sampling(temperature=0.7)))

  asyncio.run(main())


def test_servers_of_another_model_or_too_short_are_refused(pair, tmp_path):
  async def main(model, words, **fields):
    with pytest.raises(UserError, match=words):
      async with serving.attached(model, pair, tmp_path, **fields):
        pass

  asyncio.run(
    main(
      serving.model_of('qwen2', tied=True, vocab=VOCAB - 1),
      r'embed_tokens.weight is \(29, 64\).*another vocabulary',
    )
  )
  asyncio.run(
    main(
      serving.model_of('qwen2', tied=False), 'serves a model other than the policy.*lm_head.weight'
    )
  )
  asyncio.run(main(TIED, 'float32, published as bfloat16.*rollout.vllm.dtype', dtype='bfloat16'))


def test_a_fleet_of_real_servers_keeps_the_contract(pair, tmp_path):
  async def main():
    async with serving.attached(TIED, pair, tmp_path) as fleet:
      await engine_contract.hold(fleet, TIED, atol=1e-5)
      await engine_contract.hold_closed(fleet)

  asyncio.run(main())


def test_a_streamed_answer_equals_a_whole_one(pair, tmp_path):
  async def main():
    async with serving.attached(TIED, pair[:1], tmp_path) as fleet:
      await fleet.load(weights(TIED, 1, A))
      client = fleet.replicas[0].client
      for temperature in (0.0, 1.0):
        asked = request(6, max_tokens=80, sampling=Sampling(temperature=temperature))
        arrivals = Arrivals(16, lambda: True)
        whole = await client.generate(asked, 0, seed=3, deadline_s=120)
        streamed = await client.stream(asked, 0, seed=3, deadline_s=120, arrivals=arrivals)
        assert streamed.tokens.tolist() == whole.tokens.tolist() and len(whole.tokens) == 80
        np.testing.assert_allclose(streamed.logprobs, whole.logprobs, atol=1e-5)
        assert (streamed.finish, streamed.segments) == (whole.finish, whole.segments)
        *events, done, rest = arrivals.whole().split(b'\n\n')
        assert (done, rest) == (b'data: [DONE]', b'') and arrivals.known == arrivals.size
        events = [json.loads(event.removeprefix(b'data: ')) for event in events]
        choices = [event['choices'][0] for event in events]
        sizes = [len(choice['token_ids']) for choice in choices]
        # A server whose machine is busy may send several parts as one.
        assert sum(sizes) == 80 and len(sizes) > 1, sizes
        assert set(itertools.accumulate(sizes)) <= {1, 17, 33, 49, 65, 80}, sizes
        assert [choice['finish_reason'] for choice in choices][-1] == 'length'
        assert all(choice['finish_reason'] is None for choice in choices[:-1])
        assert all(choice['weight_versions'] is None for choice in choices[:-1])
        # As the fake server has it, upon which the tests of what a lost server costs rest.
        assert {(*event, *event['choices'][0]) for event in events} == {EVENT}
        begun = read_stream(
          arrivals.whole()[: arrivals.size // 2],
          asked,
          known=arrivals.size // 2,
          name='generate-tokens-r6/0',
          engine='vllm-0',
          labels=client._labels,
        )
        assert len(begun.tokens) < 80
        assert begun.tokens.tolist() == whole.tokens[: len(begun.tokens)].tolist()
      async with asyncio.timeout(30):
        while client._recognition.recognised <= 0:  # Looked up beside the streams.
          await asyncio.sleep(0.1)

  asyncio.run(main())


def test_from_another_address_nothing_answers_without_the_token(pair, cabled, tmp_path):
  """A real server behind a front, called from another network namespace: on every path, the
  unguarded ones too.
  """
  (tmp_path / 'token').write_text('a-token-of-this-test\n')
  (tmp_path / 'token').chmod(0o600)
  pipes = {
    'stdin': subprocess.PIPE,
    'stdout': subprocess.PIPE,
    'text': True,
    'env': cabled.environment(),
  }
  front = subprocess.Popen(
    cabled.run(0, 'fronts', 'serve_before', pair[0].address, str(tmp_path)), **pipes
  )
  try:
    address = front.stdout.readline().strip()

    def call(token):
      command = cabled.run(1, 'fronts', 'call_every_route', address, token)
      out = subprocess.run(
        command, env=pipes['env'], capture_output=True, text=True, check=True, timeout=120
      ).stdout
      return dict(line.split() for line in out.splitlines())

    for token in ('', 'another-token-than-its'):
      statuses = call(token)
      assert {'/collective_rpc', '/pause', '/resume', '/update_weights'} <= set(statuses)
      assert set(statuses.values()) == {'401'}
    statuses = call('a-token-of-this-test')
    assert statuses['/health'] == statuses['/is_paused'] == statuses['/v1/models'] == '200'
    assert statuses['/sleep'] == statuses['/docs'] == '403'
  finally:
    front.communicate(timeout=60)
