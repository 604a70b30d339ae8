"""Which flags of the compiler the program sets, and that the installed compiler knows them."""

import subprocess
import sys

import pytest

from jaxrl_llm.core.process.xla_flags import in_force, platform_here, set_flags, without_added

GATHERS = '--xla_gpu_enable_pipelined_all_gather=true'


def test_on_cpus_nothing_is_set():
  environment = {'XLA_FLAGS': '--xla_dump_to=/tmp/x', 'HOME': '/'}
  flags = set_flags('cpu', environment)
  assert environment == {'XLA_FLAGS': '--xla_dump_to=/tmp/x', 'HOME': '/'} and not flags.added
  assert str(flags) == 'none (the defaults of cpu are kept)'


def test_a_flag_of_the_user_wins_and_the_others_are_added():
  environment = {'XLA_FLAGS': '--xla_gpu_enable_pipelined_all_gather=false --xla_dump_to=/tmp/x'}
  flags = set_flags('cuda', environment)
  assert '--xla_gpu_enable_pipelined_reduce_scatter=true' in in_force(environment)
  assert GATHERS not in in_force(environment)
  assert '--xla_gpu_enable_pipelined_all_gather=false' in in_force(environment)
  assert str(flags).endswith('; set by you: xla_gpu_enable_pipelined_all_gather')


@pytest.mark.parametrize('theirs', [{}, {'XLA_FLAGS': '--xla_dump_to=/tmp/x'}])
def test_added_flags_are_told_from_the_users(theirs):
  environment = dict(theirs)
  set_flags('cuda', environment)
  assert GATHERS in environment['XLA_FLAGS']
  once = dict(environment)
  set_flags('cuda', environment)  # As in a process that the first one has started.
  assert environment == once and without_added(environment) == theirs
  set_flags('cpu', environment)
  assert environment == theirs


def test_a_resumed_run_has_the_flags_of_its_start_and_no_unknown_ones():
  environment = {}
  recorded = (GATHERS, '--xla_bogus=true', '--xla_gpu_enable_pipelined_all_reduce=x --xla_y=1')
  assert set_flags('cuda', environment, recorded=recorded).added == (GATHERS,)
  assert environment['XLA_FLAGS'] == GATHERS
  assert not set_flags('cuda', environment, recorded=()).added and not environment
  environment = {'XLA_FLAGS': GATHERS.replace('true', 'false')}
  set_flags('cuda', environment, recorded=recorded)
  assert environment == {'XLA_FLAGS': GATHERS.replace('true', 'false')}


def test_a_compiler_that_may_not_know_the_flags_gets_none():
  environment = {}
  flags = set_flags('cuda', environment, version='0.13.1')
  assert environment == {}
  assert str(flags) == (
    'none (JAX 0.13.1 may not know them, those of 0.10 to 0.12 do; set XLA_FLAGS yourself)'
  )


def test_the_installed_compiler_knows_every_flag():
  """An unknown flag ends the process as JAX starts."""
  environment = {'JAX_PLATFORMS': 'cpu'}
  assert set_flags('cuda', environment).added
  start = [sys.executable, '-c', 'import jax; print(jax.devices())']
  done = subprocess.run(start, env=environment, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stderr[-500:]


@pytest.mark.parametrize(
  ('asked', 'platform'), [('cpu', 'cpu'), ('cuda,cpu', 'cuda'), ('gpu', 'cuda'), ('tpu', 'tpu')]
)
def test_the_platform_is_that_of_jax(asked, platform):
  assert platform_here({'JAX_PLATFORMS': asked}) == platform
