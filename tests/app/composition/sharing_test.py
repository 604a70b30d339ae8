"""Memory that the trainer frees is available to servers on its GPUs, or the run is refused."""

import dataclasses

import pytest

from jaxrl_llm.api import load_config
from jaxrl_llm.app.composition.sharing import check_allocator, shares, use_releasing_allocator
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.master.phases import PhasesConfig

RELEASING = {
  'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',
  'XLA_PYTHON_CLIENT_ALLOCATOR': 'platform',
}


PHASES = PhasesConfig()


def configured(phases=PHASES, **vllm):
  config = load_config('ppo', {'rollout.engine': 'vllm'})
  served = dataclasses.replace(config.rollout.vllm, **vllm)
  rollout = dataclasses.replace(config.rollout, vllm=served)
  return dataclasses.replace(config, rollout=rollout, phases=phases)


def test_the_trainer_takes_the_allocator_that_frees_memory_only_if_servers_need_it():
  environ = {}
  use_releasing_allocator(configured(), environ)
  assert environ == RELEASING
  own = {'XLA_PYTHON_CLIENT_ALLOCATOR': 'bfc'}
  use_releasing_allocator(configured(), own)
  assert own['XLA_PYTHON_CLIENT_ALLOCATOR'] == 'bfc', 'the user has decided'
  elsewhere = {'CUDA_VISIBLE_DEVICES': '0'}
  for config in (
    configured(None),
    configured(PhasesConfig(engine='resident')),
    configured(servers=1, devices=('1',)),
    load_config('ppo', {'phases': '{}'}),
  ):
    environ = dict(elsewhere)
    use_releasing_allocator(config, environ)
    assert environ == elsewhere


def test_memory_that_xla_keeps_is_refused_with_the_arithmetic():
  config = configured(servers=1, args={'gpu_memory_utilization': 0.5})
  with pytest.raises(UserError) as error:
    check_allocator(config, 'gpu', {})
  message = str(error.value)
  assert 'the trainer reserves 75% of a GPU, 1 servers on it 50% each: 125% in the' in message
  assert 'set XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_PYTHON_CLIENT_ALLOCATOR=platform' in message
  assert '\n' not in message
  check_allocator(config, 'gpu', RELEASING)
  check_allocator(config, 'cpu', {})
  check_allocator(dataclasses.replace(config, phases=None), 'gpu', {})


def test_servers_that_reserve_more_than_a_gpu_are_refused_with_the_arithmetic():
  with pytest.raises(UserError, match='2 servers on it 90% each: 180% in the rollout phase'):
    check_allocator(configured(), 'gpu', RELEASING)
  apart = {**RELEASING, 'CUDA_VISIBLE_DEVICES': '0'}
  check_allocator(configured(devices=('1', '2')), 'gpu', apart)


def test_servers_on_different_gpus_do_not_add_up():
  one_each = configured(args={'gpu-memory-utilization': 0.6}, devices=('0', '1'))
  check_allocator(one_each, 'gpu', {**RELEASING, 'CUDA_VISIBLE_DEVICES': '0,1'})
  overlapping = configured(args={'gpu-memory-utilization': 0.6}, devices=('0,1', '1'))
  with pytest.raises(UserError, match='2 servers on it 60% each: 120%'):
    check_allocator(overlapping, 'gpu', {**RELEASING, 'CUDA_VISIBLE_DEVICES': '0,1'})


def test_attached_servers_have_no_share():
  assert shares(configured(None, addresses=('http://127.0.0.1:1',))) is None
