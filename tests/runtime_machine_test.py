"""Compilations and a blocked event loop are seen; the seconds of a step's phases add up."""

import asyncio
import time
import types

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.runtime import machine
from jaxrl_llm.runtime.machine import CompilationCounter, Heartbeat
from jaxrl_llm.runtime.phases import Phase, PhaseManager


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
      if (now := next(times, None)) is None:
        seen.set()
      return now or 0.39

    monkeypatch.setattr(machine, 'time', types.SimpleNamespace(monotonic=clock))
    heartbeat = Heartbeat(every_s=0.01)
    async with heartbeat.running():
      await asyncio.wait_for(seen.wait(), 60)
      assert heartbeat.take() == pytest.approx(0.3)
      assert heartbeat.take() == 0  # taken

  asyncio.run(main())


def test_seconds_of_a_phase_add_up_until_they_are_taken(monkeypatch):
  clock = iter([0.0, 1.0, 3.0, 10.0, 14.0, 15.0])
  monkeypatch.setattr(time, 'perf_counter', lambda: next(clock))

  async def main():
    phases = PhaseManager()
    with phases.timed('step'):  # 0 … 15
      async with phases.enter(Phase.ROLLOUT):  # 1 … 3
        pass
      with phases.timed('gen'):  # 10 … 14
        pass
    assert phases.take() == {'gen': 6.0, 'step': 15.0}
    assert phases.take() == {}

  asyncio.run(main())


def test_a_phase_that_fails_has_taken_its_time_too():
  phases = PhaseManager()
  with pytest.raises(ValueError), phases.timed('gen'):
    raise ValueError
  assert set(phases.take()) == {'gen'}
