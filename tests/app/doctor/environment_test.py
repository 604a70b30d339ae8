"""The doctor's checks of the machine, with limits on either side of what a run needs."""

import dataclasses
import types

import faults
import jax
import pytest

from jaxrl_llm.app.doctor import environment
from jaxrl_llm.app.doctor.findings import FindingStatus
from jaxrl_llm.app.dry_run.programs import Held
from jaxrl_llm.models.families import tiny
from jaxrl_llm.rollout.vllm.config import VllmConfig


@pytest.fixture
def config(tmp_path):
  return faults.healthy(tmp_path)


def served(config, **fields):
  vllm = VllmConfig(**{'addresses': ('http://127.0.0.1:9',), **fields})
  return dataclasses.replace(
    config, rollout=dataclasses.replace(config.rollout, engine='vllm', vllm=vllm)
  )


def test_a_publication_has_the_bytes_of_the_exported_model(config):
  spec = tiny('qwen2', vocab_size=64, tie_word_embeddings=False)
  embedding = 64 * spec.hidden_size
  whole = environment.publication_bytes(served(config), spec)
  halved = environment.publication_bytes(served(config, dtype='bfloat16'), spec)
  fewer = environment.publication_bytes(served(config), dataclasses.replace(spec, vocab_size=32))
  # The vocabulary has two matrices: embedding and head.
  assert (halved, whole - fewer) == (whole // 2, 4 * embedding)


@pytest.mark.parametrize(
  ('free', 'status'),
  [(2.0, FindingStatus.OK), (1.05, FindingStatus.WARNING), (0.9, FindingStatus.FAILURE)],
)
def test_shared_memory_must_hold_two_publications(config, free, status):
  spec = tiny('qwen2', vocab_size=64)
  needed = 2 * environment.publication_bytes(served(config), spec)
  (finding,) = environment.shared_memory(served(config), spec, int(needed * free))
  assert finding.status == status
  assert list(environment.shared_memory(config, spec)) == [], 'no servers'


def test_a_missing_publication_folder_is_a_failure(config, tmp_path):
  gone = served(config, publish_dir=str(tmp_path / 'gone'))
  (finding,) = environment.shared_memory(gone, tiny('qwen2', vocab_size=64))
  assert finding.status == FindingStatus.FAILURE and 'gone' in finding.result


@pytest.mark.parametrize(
  ('limit', 'status'), [(64, FindingStatus.FAILURE), (4096, FindingStatus.OK)]
)
def test_the_limit_of_open_files_is_compared_with_the_run(config, limit, status):
  (finding,) = environment.descriptors(served(config), limit)
  assert finding.status == status and finding.detail['needed'] > 256


@pytest.mark.parametrize(
  ('free', 'status'),
  [(9, FindingStatus.FAILURE), (10, FindingStatus.WARNING), (20, FindingStatus.OK)],
)
def test_the_disk_must_hold_the_kept_commits_and_the_export(config, free, status, tmp_path):
  # Three kept ones, the best and the one being written: 5 · 1.5; and an export of 2.5.
  megabytes = {
    'policy': 1000,
    'optimizer': 500,
    'gradients': 1000,
    'base': 1500,
    'commit in flight': 1500,
  }
  roles = [Held(role, size * 10**6, 1, 0) for role, size in megabytes.items()]
  (finding,) = environment.disk(config, tmp_path / 'run', roles, free=free * 10**9)
  assert finding.detail['needed_bytes'] == 10 * 10**9
  assert finding.status == status


@pytest.mark.parametrize(
  ('devices', 'visible', 'share', 'status'),
  [
    ((), '0', 0.2, FindingStatus.OK),
    ((), '0', 0.5, FindingStatus.FAILURE),
    (('1',), '0', 0.9, FindingStatus.OK),
    (('0',), '0', 0.9, FindingStatus.FAILURE),
    (('1',), None, 0.9, FindingStatus.FAILURE),
  ],
)
def test_trainer_and_servers_must_fit_on_a_gpu(
  config, devices, visible, share, status, monkeypatch
):
  for name in ('XLA_PYTHON_CLIENT_PREALLOCATE', 'XLA_PYTHON_CLIENT_MEM_FRACTION'):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
  if visible is not None:
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
  owned = served(
    config,
    addresses=(),
    servers=1,
    devices=devices,
    args={'gpu_memory_utilization': share},
  )
  gpu = types.SimpleNamespace(platform='gpu')
  (finding,) = environment.sharing(owned, [gpu])
  assert finding.status == status
  assert list(environment.sharing(owned, jax.devices())) == [], 'no GPU here'


def test_an_environment_without_vllm_is_a_failure_with_the_command_that_makes_it(config, tmp_path):
  (finding,) = environment.servers(served(config, addresses=(), environment=str(tmp_path / 'none')))
  assert finding.status == FindingStatus.FAILURE and 'jaxrl install' in finding.remedy
