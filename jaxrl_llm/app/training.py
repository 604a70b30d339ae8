"""Python API for runs: takes a configuration, returns metrics and paths.

from jaxrl_llm.api import load_config, train

result = train(load_config('quickstart', {'stages.grpo.steps': 100}), 'runs/first')
result.metrics[-1]['val-core/eval/acc/mean@1'], result.model
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping

from jaxrl_llm.app.run import run
from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.load import apply_overrides, load_file
from jaxrl_llm.core.types import Json
from jaxrl_llm.runtime.writers import METRICS_FILE, read_jsonl


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
  """Result of a run that has ended."""

  workdir: pathlib.Path
  finished: bool
  """False after Ctrl-C or SIGTERM; the same call then resumes the run."""
  metrics: list[dict[str, Json]]
  """Rows of metrics.jsonl, including those of earlier starts."""

  @property
  def model(self) -> pathlib.Path:
    """Directory of the exported Hugging Face model of a finished run."""
    return self.workdir / 'hf'

  @property
  def report(self) -> pathlib.Path:
    """Report file of a finished run."""
    return self.workdir / 'report.html'


def load_config(spec: str, overrides: Mapping[str, Json] | None = None) -> Config:
  """Loads `FILE.py[:VARIANT]` or the name of a shipped configuration, as --config does.

  Args:
    overrides: values by dotted key, such as {'stages.grpo.steps': 10}. Strings are parsed as on the command line.

  Raises:
    UserError: the file or an override is invalid.
  """
  texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in (overrides or {}).items()}
  return apply_overrides(load_file(spec, Config), texts)


def train(config: Config, workdir: str | os.PathLike[str]) -> TrainResult:
  """Trains in this process and returns when the run ends. A run directory with commits is resumed.

  In a notebook, whose event loop is already running, the run gets its own thread and no signal handlers.

  Raises:
    UserError: the configuration or the run directory cannot be used, or the run cannot continue.
  """
  path = pathlib.Path(workdir)
  try:
    asyncio.get_running_loop()
  except RuntimeError:
    code = asyncio.run(run(config, path))
  else:
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='train') as thread:  # wait main: see below
      work = thread.submit(lambda: asyncio.run(run(config, path, handles_signals=False)))
      code = work.result()  # wait main: the run's own waits
  metrics, _ = read_jsonl(path / METRICS_FILE)
  return TrainResult(workdir=path, finished=code == 0, metrics=metrics)
