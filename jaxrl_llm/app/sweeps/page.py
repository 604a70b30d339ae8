"""Builds compare.html, the page that compares the trials of a sweep."""

from __future__ import annotations

import pathlib

from jaxrl_llm.app.sweeps.ledger import Ledger, values
from jaxrl_llm.app.sweeps.trials import describe
from jaxrl_llm.runtime import comparison
from jaxrl_llm.runtime.comparison import ComparedRun, Objective
from jaxrl_llm.runtime.writers import METRICS_FILE


def build_page(ledger: Ledger, target: pathlib.Path | None = None) -> pathlib.Path | None:
  """Writes the page that compares the trials that have written metrics.

  Returns the path of the page, or None if no trial has written metrics.

  Args:
    target: file to write. If None, it is compare.html in the sweep directory.
  """
  entries, meta = ledger.entries(), ledger.meta()
  value_of = values(entries, ledger.reports(), meta)
  runs = [
    ComparedRun(
      name=entry.id,
      workdir=ledger.workdir(entry),
      group=describe(entry.trial.point) or 'base',
      state=str(entry.state),
      value=value_of.get(entry.number),
    )
    for entry in entries
    if not entry.trial.is_start and (ledger.workdir(entry) / METRICS_FILE).is_file()
  ]
  if not runs:
    return None
  objective = Objective(key=meta['objective'], direction=meta['direction'], at=meta['at'])
  target = target or ledger.sweepdir / comparison.PAGE
  title = ledger.sweepdir.absolute().name
  return comparison.build(runs, target, title=title, objective=objective)
