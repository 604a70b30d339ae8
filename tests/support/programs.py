"""Options of XLA's compiler for tests, whose programs take longer to compile than to run."""

from __future__ import annotations

import importlib.metadata

CHEAP = '--xla_backend_optimization_level=0'
"""Value of XLA_FLAGS."""
# Later compilers lack this option.
if tuple(map(int, importlib.metadata.version('jaxlib').split('.')[:2])) < (0, 12):
  CHEAP += ' --xla_cpu_use_fusion_emitters=false'
