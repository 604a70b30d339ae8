"""Every test process has eight CPU devices, and signatures are checked against their array annotations."""

import gc
import os

os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=8'
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import pytest
from jaxtyping import install_import_hook

install_import_hook('jaxrl_llm', 'beartype.beartype')


@pytest.fixture(scope='module', autouse=True)
def _forget_programs():
  """Frees a file's compiled programs after it: each holds memory maps, of which the kernel grants a process 65,530."""
  yield
  jax.clear_caches()
  gc.collect()
