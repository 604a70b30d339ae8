"""Every test process has eight CPU devices, and signatures are checked against their array annotations."""

import os

os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=8'
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

from jaxtyping import install_import_hook

install_import_hook('jaxrl_llm', 'beartype.beartype')
