"""Measurements of this process and its machine: environment, compiled programs, memory, open files,
disk space, and delays of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import shutil
import time
from collections.abc import AsyncIterator, Mapping

import jax
import jaxlib
import psutil

_COMPILED = '/jax/core/compile/backend_compile_duration'


def fingerprint() -> dict[str, str | int]:
  """Returns the properties of software and machine on which bitwise reproducibility depends."""
  return {
    'jax': jax.__version__,
    'jaxlib': jaxlib.__version__,
    'platform': jax.devices()[0].device_kind,
    **size(),
    'NPROC': os.environ.get('NPROC', 'unset'),
    'XLA_FLAGS': os.environ.get('XLA_FLAGS', ''),
  }


def size() -> dict[str, int]:
  """Returns the numbers of devices and processes of the job."""
  return {'devices': jax.device_count(), 'processes': jax.process_count()}


def changes(before: Mapping[str, str | int]) -> str:
  """Describes how the current environment differs from a saved `fingerprint`.

  Returns an empty string if nothing differs.

  Args:
    before: the saved fingerprint.
  """
  now = fingerprint()
  return ', '.join(
    f'{key} {before.get(key)!r} → {now[key]!r}' for key in now if before.get(key) != now[key]
  )


def use_compilation_cache(directory: str) -> None:
  """Enables JAX's persistent compilation cache in `directory`.

  All programs are cached, including those that compile quickly.
  """
  jax.config.update('jax_compilation_cache_dir', directory)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)


def resources(directory: pathlib.Path) -> dict[str, float]:
  """Returns metrics of this process's memory and open files, and of the free space at `directory`.

  Memory and disk space are in GB of 10⁹ bytes. The peak device memory is the maximum over this
  process's devices. It is absent if a device reports no peak, which is the case for CPUs.
  """
  process = psutil.Process()
  metrics = {
    'perf/cpu_memory_used_gb': process.memory_info().rss / 1e9,
    'perf/open_descriptors': float(process.num_fds()),
    'perf/disk_free_gb': shutil.disk_usage(directory).free / 1e9,
  }
  peaks = [(device.memory_stats() or {}).get('peak_bytes_in_use') for device in jax.local_devices()]
  if None not in peaks:
    metrics['perf/max_memory_allocated_gb'] = max(peaks) / 1e9
  return metrics


class CompilationCounter:
  """Counts the programs that this process has compiled, or read from the cache, since the last
  `take`.
  """

  def __init__(self):
    self._count = 0
    jax.monitoring.register_event_duration_secs_listener(self._on_event)

  def _on_event(self, event: str, duration: float, **_: object) -> None:
    self._count += event == _COMPILED

  def take(self) -> int:
    count, self._count = self._count, 0
    return count


class Heartbeat:
  """Measures the longest delay of the event loop since the last `take`."""

  def __init__(self, *, every_s: float = 0.05):
    self._every_s = every_s
    self._late = 0.0

  @contextlib.asynccontextmanager
  async def running(self) -> AsyncIterator[None]:
    task = asyncio.create_task(self._beat())
    try:
      yield
    finally:
      task.cancel()
      # Wait 'cancelled': short, since the task has just been cancelled.
      await asyncio.wait({task})

  async def _beat(self) -> None:
    while True:
      due = time.monotonic() + self._every_s
      await asyncio.sleep(self._every_s)
      self._late = max(self._late, time.monotonic() - due)

  def take(self) -> float:
    """Returns the longest delay in seconds and resets it."""
    late, self._late = self._late, 0.0
    return late
