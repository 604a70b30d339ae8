"""What the processes of a run agree on before any work on the devices."""

import asyncio
import dataclasses

import pytest

from jaxrl_llm.api import load_config
from jaxrl_llm.app.composition.automatic import open_fields, with_sized
from jaxrl_llm.app.dry_run.memory_plan import Target
from jaxrl_llm.app.planning import agreed, agreed_report, attention_here
from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.models.families import tiny
from jaxrl_llm.parallel.coordinator import Coordinator
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh

FIRST = {'host': 'a', 'flags': [], 'attention': 'cudnn', 'reason': 'correct on H100'}


def test_a_host_whose_first_correct_kernel_is_another_is_rejected_by_name_and_reason():
  other = FIRST | {'host': 'b', 'attention': 'tokamax', 'reason': 'cudnn: fails: not detected'}
  with pytest.raises(RunError) as caught:
    agreed_report([FIRST, FIRST, other])
  assert str(caught.value) == (
    "process 2 on b has other attention: 'tokamax' (cudnn: fails: not detected), wanted 'cudnn' as "
    'on process 0; use equal hosts with equal software, or leave this one out'
  )


def test_a_host_that_cannot_use_the_recorded_kernel_is_rejected_by_name():
  failed = {'host': 'b', 'flags': [], 'error': 'policy.attention: cudnn: is wrong; choose auto'}
  with pytest.raises(
    RunError, match=r'^process 1 on b cannot use the attention: .*cudnn: is wrong'
  ):
    agreed_report([FIRST, failed])


def test_equal_reports_are_agreed_and_other_devices_do_not_matter():
  assert agreed_report([FIRST, FIRST | {'host': 'b', 'reason': 'correct on H200'}]) == FIRST


def test_on_cpus_nothing_is_checked_and_a_kernel_of_a_gpu_is_refused():
  mesh, spec = build_mesh(MeshConfig()), tiny('qwen2', 64)
  config = with_sized(load_config('quickstart'), platform='cpu', spec=spec)
  assert attention_here(config, mesh, spec, 512) == ('auto', '')
  config = load_config('quickstart', {'policy.attention': 'cudnn'})
  with pytest.raises(UserError, match=r'cudnn does not run on this platform .cpu.'):
    attention_here(config, mesh, spec, 512)


def test_logits_get_less_memory_if_no_other_plan_fits():
  """Everything else is configured, and logits of 8,192 tokens of vocabulary take most memory."""
  fields = {
    'policy.remat': 'none', 'learner.chunks_per_rank': 4, 'learner.chunk_len': 16,
    'learner.optimizer.offload': False, 'learner.optimizer.peak_lr': 1e-3,
    'stages.grpo.optimizer': None, 'stages.grpo.source.groups_per_batch': 1,
    'stages.grpo.source.group_size': 4,
  }  # fmt: skip
  spec = dataclasses.replace(tiny('qwen2', 8192), num_hidden_layers=1)
  device, lines = DeviceThread(), []

  def planned(memory):
    config = load_config('quickstart', fields | {'learner.memory_bytes': memory})
    config = dataclasses.replace(config, stages=config.stages[1:], evaluation=())
    config = with_sized(config, platform='cpu', spec=spec)
    assert open_fields(config) == ('learner.logits_budget_bytes',)
    target = Target(build_mesh(MeshConfig()), None, spec, {})
    coordinator = Coordinator(device, on_signal=lambda number: None)
    return asyncio.run(agreed(config, target, coordinator, device, lines.append))

  config, search = planned(10**9)
  assert config.learner.logits_budget_bytes == 256 << 20 and len(search.tried) == 1
  ((_, fit),) = search.tried
  config, search = planned(fit.needed - 1)
  assert config.learner.logits_budget_bytes < fit.needed // 16 and not open_fields(config)
  assert len(search.tried) > 1
  budget = config.learner.logits_budget_bytes
  assert any(f'at most {budget / 1e6:,.1f} MB of logits: chosen, ' in line for line in lines)
