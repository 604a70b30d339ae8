"""Sweeps of fake runs (fixtures/stand_in_run.py)."""

import pathlib
import sys

from paths import ROOT

from jaxrl_llm.app.sweeps.ledger import Ledger, LedgerEntry
from jaxrl_llm.app.sweeps.plan import load_plan, open_ledger
from jaxrl_llm.app.sweeps.runner import Machine, Runner

STAND_IN = (sys.executable, str(ROOT / 'tests' / 'support' / 'fixtures' / 'stand_in_run.py'))
RATE = 'stages.grpo.optimizer.peak_lr'
FILE = """from jaxrl_llm.api import MedianRule, Uniform, BaseRun, SuccessiveHalving, Sweep

def get_sweep():
  return Sweep(base='quickstart', objective='val-core/eval/acc/greedy', {fields})
"""


def sweep_file(folder: pathlib.Path, fields: str, name: str = 'sweep.py') -> pathlib.Path:
  """Writes a sweep file of the quickstart. `fields`: arguments of Sweep, as source code."""
  file = folder / name
  file.write_text(FILE.format(fields=fields))
  return file


def open_sweep(file: pathlib.Path, sweepdir: pathlib.Path) -> tuple[Ledger, Runner, list[str]]:
  """Returns the ledger of a sweep, a runner of its fake runs, and a list to which the runner adds
  its notes.
  """
  plan = load_plan(str(file), {})
  sweepdir.mkdir(exist_ok=True)
  ledger, notes = open_ledger(plan, sweepdir), []
  numbers = [entry.number for entry in ledger.entries()]
  runner = Runner(
    ledger,
    plan.sweep,
    STAND_IN,
    Machine(parallel=2, grace_s=10),
    numbers=numbers,
    note=notes.append,
    show=_nothing,
  )
  return ledger, runner, notes


def _nothing() -> None:
  """Shows nothing."""


def executed(ledger: Ledger, entry: LedgerEntry) -> list[int]:
  """Returns the steps that a trial has executed, over all of its starts."""
  file = ledger.workdir(entry) / 'executed'
  return [int(line) for line in file.read_text().split()] if file.exists() else []
