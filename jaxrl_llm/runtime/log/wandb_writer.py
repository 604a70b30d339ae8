"""Writes rows to Weights & Biases. Only the process of this log writer imports wandb.

Invariant: a run directory has one W&B run, whose id is in `logging/wandb/run_id`. The step of a row
in W&B is the row's index in metrics.jsonl. This index keeps growing when the run is resumed, so W&B
rejects a row that it already has. The x-axis of all charts is the step of the training run.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

import wandb

from jaxrl_llm.core.disk import write_durably
from jaxrl_llm.runtime.log.api import LogRow, LogRun
from jaxrl_llm.runtime.writers import STAGE, STEP

_INIT_S = 60.0
"""Maximum time in seconds for W&B to start a run."""


class WandbWriter:
  """Log writer for Weights & Biases. The arguments are the fields of `WandbConfig`."""

  def __init__(
    self,
    run: LogRun,
    *,
    project: str | None,
    entity: str | None,
    group: str | None,
    tags: Sequence[str],
    notes: str | None,
    mode: str | None,
  ):
    file = run.directory / 'run_id'
    if not file.exists():
      write_durably(file, secrets.token_hex(4))
    self._run = wandb.init(
      project=project or os.environ.get('WANDB_PROJECT') or 'jaxrl_llm',
      entity=entity,
      group=group,
      tags=list(tags),
      notes=notes,
      mode=mode,
      name=run.name,
      id=file.read_text().strip(),
      resume='allow',
      dir=str(run.directory),
      config=dict(run.config),
      settings=wandb.Settings(console='off', silent=True, init_timeout=_INIT_S),
    )
    self._run.define_metric('*', step_metric=STEP)

  def write(self, row: LogRow) -> None:
    self._run.log({STAGE: row.stage, STEP: row.step, **row.metrics}, step=row.index)

  def close(self) -> None:
    self._run.finish()
