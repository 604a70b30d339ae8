"""Compilations and a blocked event loop are seen; the seconds of a step's phases add up."""

import asyncio
import contextlib
import os
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.runtime import machine
from jaxrl_llm.runtime.machine import CompilationCounter, Heartbeat, resources
from jaxrl_llm.runtime.stopwatch import Stopwatch


def test_a_program_is_counted_when_it_is_compiled_and_not_when_it_runs_again():
  x, y = jnp.zeros(3), jnp.zeros(5)
  step = jax.jit(lambda x: x * 2 + 1)
  counter = CompilationCounter()
  step(x)
  assert counter.take() == 1
  for _ in range(3):
    step(x)
  assert counter.take() == 0
  step(y)  # another shape
  step(y)
  assert counter.take() == 1


def test_the_heartbeat_tells_the_longest_block_of_the_event_loop(monkeypatch):
  # Four beats: in time, 0.3 s late, 0.05 s late, in time. Then the clock stands still.
  times = iter([0.0, 0.01, 0.01, 0.32, 0.32, 0.38, 0.38, 0.39])

  async def main():
    seen = asyncio.Event()

    def clock():
      now = next(times, None)
      if now is None:
        seen.set()
        return 0.39
      return now

    monkeypatch.setattr(machine, 'time', types.SimpleNamespace(monotonic=clock))
    heartbeat = Heartbeat(every_s=0.01)
    async with heartbeat.running():
      await asyncio.wait_for(seen.wait(), 60)
      assert heartbeat.take() == pytest.approx(0.3)
      assert heartbeat.take() == 0  # taken

  asyncio.run(main())


def test_memory_descriptors_and_disk_of_this_process_are_measured(tmp_path):
  before = resources(tmp_path)
  assert set(before) >= {'perf/cpu_memory_used_gb', 'perf/open_descriptors', 'perf/disk_free_gb'}
  with contextlib.ExitStack() as files:
    for _ in range(50):
      files.enter_context(open(os.devnull))
    held = np.ones(25_000_000)  # 0.2 GB
    during = resources(tmp_path)
  assert during['perf/open_descriptors'] - before['perf/open_descriptors'] >= 40
  assert during['perf/cpu_memory_used_gb'] - before['perf/cpu_memory_used_gb'] > 0.1
  free = shutil.disk_usage(tmp_path).free / 1e9
  assert during['perf/disk_free_gb'] == pytest.approx(free, rel=0.2)
  del held


def test_peak_device_memory_is_that_of_the_fullest_device(monkeypatch, tmp_path):
  devices = [
    types.SimpleNamespace(memory_stats=lambda peak=peak: {'peak_bytes_in_use': peak})
    for peak in (1e9, 3e9)
  ]
  monkeypatch.setattr(jax, 'local_devices', lambda: devices)
  assert resources(tmp_path)['perf/max_memory_allocated_gb'] == 3.0


def test_seconds_of_a_part_add_up_until_they_are_taken():
  clock = iter([0.0, 1.0, 3.0, 10.0, 14.0, 15.0])
  stopwatch = Stopwatch(lambda: next(clock))
  with stopwatch.timed('step'):  # 0 … 15
    with stopwatch.timed('gen'):  # 1 … 3
      pass
    with stopwatch.timed('gen'):  # 10 … 14
      pass
  assert stopwatch.take() == {'gen': 6.0, 'step': 15.0}
  assert stopwatch.take() == {}


def test_a_part_that_fails_has_taken_its_time_too():
  stopwatch = Stopwatch()
  with pytest.raises(ValueError), stopwatch.timed('gen'):
    raise ValueError
  assert set(stopwatch.take()) == {'gen'}
