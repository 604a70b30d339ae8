"""Memory that each role keeps, by where it is kept."""

import dataclasses

import pytest

from jaxrl_llm.api import load_config
from jaxrl_llm.app.composition.loop_parts import image_dtype
from jaxrl_llm.app.composition.stages import build_stages, model_spec, policy_options
from jaxrl_llm.app.composition.state import critic_model
from jaxrl_llm.app.dry_run import programs
from jaxrl_llm.app.dry_run.phases import planned
from jaxrl_llm.app.dry_run.programs import held, stage_programs
from jaxrl_llm.learner.update import build_update
from jaxrl_llm.master.phases import PhasesConfig
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.families import tiny
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh


@pytest.mark.full
def test_an_offloaded_optimizer_is_in_host_memory_for_policy_and_critic():
  def roles(offload: bool):
    optimizers = ('sft.optimizer', 'ppo.optimizer', 'ppo.critic.optimizer')
    config = load_config('ppo', {f'stages.{name}.offload': offload for name in optimizers})
    mesh = build_mesh(MeshConfig(fsdp=2, data=None))
    stages = build_stages(config, mesh, 64, {'sft': [8] * 200})
    model = build_model(tiny('qwen2', 64), policy_options(config), mesh)
    return {role.role: role for role in held(stages, model, critic_model(model), mesh)}

  kept, moved = roles(False), roles(True)
  for role in ('optimizer', 'critic optimizer'):
    assert kept[role].offloaded == 0
    # Its scalars stay on the device.
    assert moved[role].per_device < 100 < moved[role].offloaded
    assert moved[role].per_device + moved[role].offloaded == kept[role].per_device
    assert moved[role].whole == kept[role].whole
  assert moved['critic'] == kept['critic']
  for role in (kept['commit in flight'], moved['commit in flight']):
    # A commit is copied to the host, wherever the arrays are: policy, reference and critic.
    committed = ('policy', 'optimizer', 'reference', 'critic', 'critic optimizer')
    parts = [kept[name] for name in committed if name in kept]
    assert role.per_device == 0
    assert 0 <= role.whole - sum(part.whole for part in parts) < 100
    assert 0 <= role.offloaded - sum(part.per_device for part in parts) < 100


def test_the_bits_of_the_published_version_are_a_role_of_the_size_of_their_data_type():
  """With adapters, of the base weights into which they are merged."""
  for overrides, whole in (({}, 'policy'), ({'policy.lora': {'rank': 2}}, 'base')):
    vllm = {'engine': 'vllm', 'vllm': {'full_every': 9, 'compare': 'devices', 'dtype': 'bfloat16'}}
    config = load_config('grpo', overrides | {f'rollout.{key}': v for key, v in vllm.items()})
    mesh = build_mesh(MeshConfig(fsdp=2, data=None))
    stages = build_stages(config, mesh, 64, {'sft': [8] * 200})
    model = build_model(model_spec(config, tiny('qwen2', 64)), policy_options(config), mesh)
    args = stages, model, critic_model(model), mesh, None
    roles = {role.role: role for role in held(*args, image_dtype(config))}
    bits, params = roles['published bits'], roles[whole]
    assert (2 * bits.whole, 2 * bits.per_device) == (params.whole, params.per_device)
    assert 'published bits' not in {role.role for role in held(*args)}
    phases = planned(PhasesConfig(), [*roles.values()], 0)
    assert not any('published bits' in sizes for sizes in phases.values())
    phases = planned(PhasesConfig(policy='resident'), [*roles.values()], 0)
    assert all('published bits' in sizes for sizes in phases.values())


def test_the_update_is_compiled_as_the_run_compiles_it(monkeypatch):
  """If a batch is one optimizer step, the update computes the logprobs before it."""
  config = load_config('ppo')
  mesh = build_mesh(MeshConfig())
  *_, ppo = build_stages(config, mesh, 64, {'sft': [8] * 200})
  model, built = build_model(tiny('qwen2', 64), policy_options(config), mesh), []

  def build(*args, **options):
    built.append(options['on_policy'])
    return build_update(*args, **options)

  monkeypatch.setattr(programs, 'build_update', build)
  for stage, wanted in (
    (dataclasses.replace(ppo, minibatches=1, epochs=1), ('proximal_logprobs',)),
    (dataclasses.replace(ppo, minibatches=2), ()),
  ):
    assert stage.on_policy == wanted
    built.clear()
    assert list(stage_programs(stage, model, critic_model(model), mesh))
    assert built == [wanted, ()], 'the policy and the critic'
