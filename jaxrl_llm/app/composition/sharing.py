"""GPUs that the trainer shares with the run's own servers: the share of memory that each reserves,
and the allocator that lets the trainer return memory.
"""

from __future__ import annotations

import collections
import itertools
import os
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from jaxrl_llm.app.schema import Config
from jaxrl_llm.core.errors import UserError

_PREALLOCATE, _ALLOCATOR = 'XLA_PYTHON_CLIENT_PREALLOCATE', 'XLA_PYTHON_CLIENT_ALLOCATOR'
_FRACTION = 'XLA_PYTHON_CLIENT_MEM_FRACTION'
_RELEASING = {_PREALLOCATE: 'false', _ALLOCATOR: 'platform'}
"""Environment variables that make XLA return freed memory to the GPU. Without them, XLA keeps freed
memory in a pool.
"""
_VLLM_SHARE = 0.9
"""Share of a GPU's memory that vLLM reserves by default."""


class Shares(NamedTuple):
  """Shares of a GPU's memory, between 0 and 1, that the trainer and the servers on the trainer's
  GPUs reserve.
  """

  trainer: float
  """Share that XLA reserves when it starts; 0 if it allocates memory on demand."""
  servers: int
  """Number of the run's own servers on one GPU of the trainer. If the numbers on the GPUs differ,
  this is the largest one.
  """
  each: float
  """Share that each server reserves."""

  @property
  def total(self) -> float:
    return self.trainer + self.servers * self.each

  def __str__(self) -> str:
    return (
      f'the trainer reserves {self.trainer:.0%} of a GPU, {self.servers} servers on it '
      f'{self.each:.0%} each'
    )


def shares(config: Config, environ: Mapping[str, str] = os.environ) -> Shares | None:
  """Returns the shares of a GPU's memory that the trainer and the run's own servers reserve on a
  machine with GPUs; None if the run starts no servers.
  """
  vllm = config.rollout.vllm_servers
  if vllm is None or vllm.attached:
    return None
  visible = environ.get('CUDA_VISIBLE_DEVICES')
  ours = None if visible is None else visible.split(',')
  beside = vllm.servers  # Without `devices`, all servers use the first GPUs that the trainer sees.
  if vllm.devices:
    named = itertools.chain.from_iterable(set(names.split(',')) for names in vllm.devices)
    counts = collections.Counter(name for name in named if ours is None or name in ours)
    beside = max(counts.values(), default=0)
  preallocates = environ.get(_PREALLOCATE, 'true').lower() != 'false'
  trainer = float(environ.get(_FRACTION, '0.75')) if preallocates else 0.0
  return Shares(trainer, beside, float(vllm.option('gpu_memory_utilization', _VLLM_SHARE)))


def _takes_turns(config: Config) -> bool:
  """Returns whether servers on the trainer's GPUs use the memory that the trainer frees."""
  return config.phases is not None and config.phases.engine != 'resident'


def use_releasing_allocator(config: Config, environ: MutableMapping[str, str] = os.environ) -> None:
  """Makes XLA return freed memory to the GPUs if the run's servers need it. Variables that are
  already set in `environ` are not changed. Call this before JAX uses a device.
  """
  found = shares(config, environ)
  if _takes_turns(config) and found is not None and found.servers:
    for name, value in _RELEASING.items():
      environ.setdefault(name, value)


def check_allocator(config: Config, platform: str, environ: Mapping[str, str] = os.environ) -> None:
  """Raises UserError if servers cannot use the memory that the trainer frees on shared GPUs, or if
  the trainer and the servers reserve more than the memory of a GPU.

  Args:
    platform: platform of the trainer's devices.
  """
  found = shares(config, environ)
  if platform != 'gpu' or not _takes_turns(config) or found is None or not found.servers:
    return
  kept = {name: environ.get(name) for name in _RELEASING if environ.get(name) != _RELEASING[name]}
  if kept:
    settings = ' '.join(f'{name}={value}' for name, value in _RELEASING.items())
    raise UserError(
      f'phases: XLA keeps the memory that the trainer frees ({kept}), so that {found}: '
      f'{found.total:.0%} in the rollout phase; set {settings}, or give the servers GPUs of their '
      'own (rollout.vllm.devices)'
    )
  if found.total > 1:
    raise UserError(
      f'phases: {found}: {found.total:.0%} in the rollout phase; lower '
      'rollout.vllm.args.gpu_memory_utilization or rollout.vllm.servers'
    )
