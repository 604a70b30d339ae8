"""Traces steps of a run with `jax.profiler`, for Perfetto, XProf and TensorBoard."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Collection

import jax
from absl import logging

from jaxrl_llm.runtime.stopwatch import Stopwatch


class Profiler:
  """Traces the configured steps in this process.

  A trace contains the programs and transfers of the process's devices, and the calls of JAX's
  runtime on the host. Calls of Python functions are left out, because they would slow the step
  down.
  """

  def __init__(self, directory: pathlib.Path, steps: Collection[int]):
    """
    Args:
      directory: directory of the traces. The first trace creates it.
      steps: numbers of the steps to trace, counted from 1 over the whole run.
    """
    self._directory, self._steps = directory, frozenset(steps)

  @contextlib.asynccontextmanager
  async def traced(self, step: int, stopwatch: Stopwatch) -> AsyncIterator[None]:
    """Traces the block if `step` is one of the configured steps.

    If the trace cannot be written, logs a warning, and the run continues.

    Args:
      stopwatch: times the start and the writing of the trace as part `record`.
    """
    if step not in self._steps:
      yield
      return
    directory = self._directory / f'step_{step}' / f'process_{jax.process_index()}'
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    try:
      with stopwatch.timed('record'):
        jax.profiler.start_trace(directory, create_perfetto_trace=True, profiler_options=options)
    except (RuntimeError, OSError) as error:
      logging.warning('step %d is not profiled: %s', step, error)
      yield
      return
    try:
      yield
    finally:
      try:
        with stopwatch.timed('record'):
          # Wait 'profile': bounded by the disk, and by the size of the trace.
          await asyncio.to_thread(jax.profiler.stop_trace)
        logging.info('profile of step %d: %s', step, directory)
      except (RuntimeError, OSError) as error:
        logging.warning('the profile of step %d is not written: %s', step, error)


UNPROFILED = Profiler(pathlib.Path(), ())
"""Profiler that traces no step."""
