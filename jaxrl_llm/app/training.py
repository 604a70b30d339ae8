"""Trains from Python: takes a configuration, and returns metrics and paths.

if __name__ == '__main__':  # Scorer processes import the script too, and need no JAX.
  from jaxrl_llm.api import load_config, train

  result = train(load_config('quickstart', {'stages.grpo.steps': 100}), 'runs/first')
  print(result.metrics[-1], result.model)
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Mapping, Sequence

import jax

from jaxrl_llm.app.composition.branch import Branch
from jaxrl_llm.app.composition.choices import recorded_flags
from jaxrl_llm.app.run import Stop, run
from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.load import apply_overrides, load_file, override_text
from jaxrl_llm.core.errors import UserError, first_cause
from jaxrl_llm.core.process.xla_flags import platform_here, set_flags
from jaxrl_llm.core.types import Json
from jaxrl_llm.parallel.job import this_job
from jaxrl_llm.parallel.mesh import build_mesh
from jaxrl_llm.runtime.machine import use_compilation_cache
from jaxrl_llm.runtime.writers import METRICS_FILE, read_jsonl


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
  """Result of a run: its directory, its metrics and whether it finished."""

  workdir: pathlib.Path
  finished: bool
  """Whether the run finished. If an interrupt stopped it, the same call of `train` resumes it."""
  metrics: list[dict[str, Json]]
  """Rows of metrics.jsonl, including rows of earlier starts of the run."""

  @property
  def model(self) -> pathlib.Path:
    """Directory of the Hugging Face model that a finished run has exported."""
    return self.workdir / 'hf'

  @property
  def report(self) -> pathlib.Path:
    """Path of a finished run's HTML report."""
    return self.workdir / 'report.html'


def load_config(spec: str | Config, overrides: Mapping[str, Json] | None = None) -> Config:
  """Loads a configuration as `jaxrl train --config` does, and applies overrides to it.

  Args:
    spec: `FILE.py[:VARIANT]`, the name of a shipped configuration, or a `Config` value.
    overrides: values keyed by dotted key, such as {'stages.grpo.steps': 10}. Strings are parsed as
      on the command line.

  Raises:
    UserError: the file or an override is invalid.
  """
  return apply_overrides(
    load_file(spec, Config) if isinstance(spec, str) else spec,
    {key: override_text(key, value) for key, value in (overrides or {}).items()},
  )


def train(
  config: Config,
  workdir: str | os.PathLike[str],
  *,
  branch_from: str | None = None,
  reset: Sequence[str] = (),
) -> TrainResult:
  """Trains in this process and returns when the run ends.

  If `workdir` contains commits, the run is resumed, and uses `config` from then on. The run has its
  own thread and event loop, so that it also works in a notebook. An interrupt (Ctrl-C) stops the
  run after a commit. Before the training begins, an interrupt raises KeyboardInterrupt instead. In
  a script, write the import and the call under `if __name__ == '__main__':`, because scorer
  processes import the script. Start jobs of several processes with `jaxrl train` instead.

  Args:
    branch_from: 'RUN' or 'RUN:STEP': the commit of another run from which a new run starts, by
      default the newest. If None, a new run starts from its initial weights.
    reset: parts of the other run that are not taken over: any of 'optimizer' (its moments), 'data'
      (the position in the data) and 'store'.

  Raises:
    UserError: the configuration or the run directory cannot be used, or the run cannot continue.
  """
  if multiprocessing.parent_process() is not None:
    raise UserError(
      "train: called while a scorer's process imports this file; put the call under if __name__ == "
      "'__main__':"
    )
  if not jax.distributed.is_initialized() and (job := this_job()) is not None:
    raise UserError(
      f'train: this process is one of {job}; start a job of several processes with jaxrl train'
    )
  path = pathlib.Path(workdir)
  branch = None if branch_from is None else Branch.parse(branch_from, reset)
  if reset and branch is None:
    raise UserError('train: reset needs branch_from')
  # The flags have no effect if this process has already used JAX.
  set_flags(platform_here(os.environ), recorded=recorded_flags(path))
  build_mesh(config.learner.mesh)  # Rejects an invalid mesh before anything is written.
  if config.compilation_cache:
    use_compilation_cache(config.compilation_cache)
  try:
    code = _run_in_a_thread(config, path, branch)
  except Exception as error:
    if isinstance(cause := first_cause(error), UserError):
      raise cause from error
    raise
  metrics, _ = read_jsonl(path / METRICS_FILE) if (path / METRICS_FILE).exists() else ([], 0)
  return TrainResult(workdir=path, finished=code == 0, metrics=metrics)


def _run_in_a_thread(config: Config, path: pathlib.Path, branch: Branch | None) -> int:
  """Runs the training in a new thread and returns the run's exit code."""
  ended: concurrent.futures.Future[int] = concurrent.futures.Future()
  interrupts: list[Callable[[], object]] = []
  interrupted = threading.Event()

  async def work() -> None:
    if not ended.set_running_or_notify_cancel():
      return  # The interrupt came before the training began.
    loop = asyncio.get_running_loop()

    def on_start(stop: Stop) -> None:
      def interrupt() -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed, because the run has ended.
          loop.call_soon_threadsafe(stop, signal.SIGINT)

      interrupts.append(interrupt)
      if interrupted.is_set():  # The interrupt came before the run could be stopped.
        stop(signal.SIGINT)

    try:
      ended.set_result(await run(config, path, branch=branch, on_start=on_start))
    except BaseException as error:
      ended.set_exception(error)

  # Use a daemon thread, so that Python does not wait for the thread at exit. If one of the run's
  # waits exceeds its time limit, the thread may be stuck forever.
  thread = threading.Thread(target=lambda: asyncio.run(work()), name='train', daemon=True)
  try:
    thread.start()
    return ended.result()  # Wait 'main': bounded: every wait of the run has a deadline.
  except KeyboardInterrupt:
    if ended.cancel():  # The thread had not begun, so nothing was written.
      raise
    interrupted.set()
    for interrupt in interrupts:
      interrupt()
    return ended.result()  # Wait 'main': bounded: every wait of the run has a deadline.
