"""Real vLLM servers that a test or a run starts for itself: adapters, deaths, ends."""

import asyncio
import contextlib
import dataclasses

import jax
import job
import numpy as np
import pytest
import serving
from serving import TIED, ask, forward, request

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.types import Version
from jaxrl_llm.models import lora
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.spec import LoraConfig, ModelOptions
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.rollout.api import Sampling, Weights
from jaxrl_llm.rollout.vllm.publication import digest
from jaxrl_llm.weights.hf import to_hf

pytestmark = pytest.mark.full
LORA = LoraConfig(rank=3, alpha=9)
ADAPTED = build_model(TIED.spec, ModelOptions(lora=LORA))


def adapted(step):
  """The model's parameters with adapters of that step; the base is the same at every step."""
  tree = ADAPTED.init(jax.random.key(1))
  trained, base = lora.split(tree, ADAPTED.spec, ADAPTED.options)
  rng = np.random.default_rng(step)
  return lora.join(
    jax.tree.map(lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), trained), base
  )


def adapter_weights(step, *, probed=None):
  """The weights to publish at a step: its adapters, and at step 0 the base too.

  Args:
    probed: step of the adapters that the trainer computes with, where they are others.
  """
  version, tree = Version(0, step), adapted(step)
  sent = tree if step == 0 else lora.split(tree, ADAPTED.spec, ADAPTED.options)[0]
  merged = lora.merge(adapted(step if probed is None else probed), LORA)
  return dataclasses.replace(
    serving.weights_of(TIED, merged, version), leaves=Weights.of(sent, version).leaves
  )


def test_adapters_are_published_under_versioned_names_and_are_the_merged_model(tmp_path):
  async def main():
    (server,) = serving.servers_of(TIED, tmp_path / 'model', count=1, adapter_rank=LORA.rank)
    try:
      await serving.started([server])
      async with serving.attached(TIED, [server], tmp_path, lora=LORA) as fleet:
        for step in range(4):
          await fleet.load(adapter_weights(step))
          (replica,) = fleet.replicas
          assert replica.client.adapter.adapter == f'policy-0-{step}'
          merged = lora.merge(adapted(step), LORA)
          for temperature in (0.0, 1.0):
            asked = request(step, sampling=Sampling(temperature=temperature), stop_ids=(1,))
            (completion,) = await ask(fleet, asked)
            assert {s.version for s in completion.segments} == {Version(0, step)}
            tokens = [*asked.prompt, *completion.tokens]
            wanted = forward(TIED, merged, tokens)[len(asked.prompt) :]
            np.testing.assert_allclose(completion.logprobs, wanted, atol=1e-5, rtol=1e-5)
        models = [m['id'] for m in (await replica.client.call('GET', '/v1/models'))['data']]
        assert models == ['policy', 'policy-0-2', 'policy-0-3']
        # Below them the base is as it was sent, once.
        plain = lora.split(adapted(0), ADAPTED.spec, ADAPTED.options)[1]
        wanted = {name: digest(array) for name, array in to_hf(plain, TIED.spec)}
        assert await serving.loaded(server) == wanted
        assert server.log.read_text().count('POST /update_weights HTTP') == 1 + 4
        # An adapter that is not what the trainer computes with fails its probe.
        with pytest.raises(RunError, match='probe'):
          await asyncio.wait_for(fleet.load(adapter_weights(4, probed=2)), 120)
    finally:
      await server.close()

  asyncio.run(main())


JOB = (
  '--config.rollout.engine=vllm',
  f'--config.rollout.vllm.environment={serving.ENVIRONMENT}',
  '--config.rollout.vllm.dispatch=uniform',
)


@contextlib.contextmanager
def training(run, rows, *flags):
  """A job that has so many rows: (its process, the servers' processes, the files they share). A
  failure kills it.
  """
  process = job.start(run, *JOB, *flags)
  try:
    job.wait_for_rows(run, rows, process, timeout_s=500)
    tree = serving.processes(serving.descendants(process.pid))
    yield process, tree, {*serving.shared_memory(tree), str(serving.published(run))}
  except BaseException:
    job.kill(process)
    raise


@pytest.mark.acceptance
def test_a_run_outlives_the_death_of_both_its_servers(tmp_path):
  """One API server, then the other's engine process alone, killed in mid-run; both are started
  again.
  """
  run = tmp_path / 'run'
  flags = ('--config.stages.grpo.steps=24', '--config.stages.grpo.source.group_size=16')
  with training(run, 12 + 4, *flags) as (process, tree, files):
    first, second = serving.api_servers(process.pid)
    serving.kill(first)
    job.wait_for_rows(run, 12 + 8, process, timeout_s=500)
    serving.kill(next(p for p, line in serving.descendants(second).items() if 'EngineCore' in line))
    _, err = process.communicate(timeout=600)
  assert process.returncode == 0, err[-3000:]
  steps = [row for row in job.rows(run) if row['stage'] == 'grpo' and 'actor/pg_loss' in row]
  assert len(steps) == 24
  assert max(row['sampling/sampling_logp_difference/max'] for row in steps) < 1e-4, (
    'float32 on both sides'
  )
  assert {row['staleness/max'] for row in steps} == {0}
  assert min(row['run/engines_serving'] for row in steps) < 2
  assert sum(row['run/engine_restarts'] for row in steps) >= 1
  report = audit(run / 'replay')
  assert report.ok, report.lines
  assert report.states['trained'] == 24 * 6 * 16
  serving.wait_until_gone(tree, files)


def test_a_run_outlives_its_server_and_nothing_of_a_server_outlives_its_killed_trainer(tmp_path):
  run = tmp_path / 'run'
  flags = ('--config.rollout.vllm.servers=1', '--config.stages.grpo.steps=4000')
  with training(run, 12 + 2, *flags) as (process, tree, files):
    assert (
      any('EngineCore' in line for line in tree.values())
      and len(files) > 1
      and serving.published(run).exists()
    )
    (server,) = serving.api_servers(process.pid)
    serving.kill(next(p for p, line in serving.descendants(server).items() if 'EngineCore' in line))
    # The batch of that moment may have had all its completions, but not the one after it.
    job.wait_for_rows(run, job.count_rows(run) + 3, process, timeout_s=500)
    steps = [row for row in job.rows(run) if row['stage'] == 'grpo' and 'actor/pg_loss' in row]
    assert sum(row['run/engine_restarts'] for row in steps) == 1
    assert max(row['sampling/sampling_logp_difference/max'] for row in steps) < 1e-4
    assert {row['staleness/max'] for row in steps} == {0}
    again = serving.processes(serving.descendants(process.pid))
    files |= serving.shared_memory(again)
    process.kill()
    process.communicate()
  serving.wait_until_gone(tree | again, files)


def test_a_server_that_dies_at_start_shows_its_last_lines(tmp_path):
  result = job.train(
    tmp_path / 'run', *JOB, '--config.rollout.vllm.args={"no_such_option": 7}', expect=1
  )
  (line,) = [line for line in result.stderr.splitlines() if line.startswith('run stopped:')]
  assert (
    'vLLM exited at startup with code 2' in line
    and 'unrecognized arguments: --no-such-option' in line
  )
  assert 'Traceback' not in result.stderr
