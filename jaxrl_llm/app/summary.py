"""Prints the summary at the end of a run: accuracies, answers before and after the last stage, and
the paths of the results.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxrl_llm.runtime.writers import EVALS_DIR, METRICS_FILE, STAGE, STEP, read_jsonl

_SAMPLES = 6


def print_summary(workdir: pathlib.Path, stages: Sequence[str], report: pathlib.Path) -> None:
  """Prints the accuracy of each evaluation, answers before and after the last stage, and the paths
  of the results.

  If no earlier stage was evaluated, the answers at the first evaluation of the last stage are shown
  as the answers before it.
  """
  console = Console()
  rows, _ = read_jsonl(workdir / METRICS_FILE)
  # The pattern selects the accuracies of tasks and pairs, but not their standard errors or the keys
  # that accompany a missing accuracy.
  accuracy = re.compile(r'val-core/.+/(acc/[^/]+|rewards/accuracies)')
  columns = sorted({key for row in rows for key in row if accuracy.fullmatch(key)})
  table = Table('stage', 'step', *columns)
  for row in rows:
    if any(key in row for key in columns):
      values = ['' if row.get(key) is None else f'{row[key]:.3f}' for key in columns]
      table.add_row(row[STAGE], str(row[STEP]), *values)
  if columns:
    console.print(table)
  files = _evaluation_files(workdir, stages)
  same = [file for file in files if file.name.partition('-')[2] == files[-1].name.partition('-')[2]]
  if len(same) > 1:
    # `before` is the latest evaluation of the same suite before the last stage. If there is none,
    # it is the first evaluation of the suite.
    before = next((f for f in reversed(same) if f.parent.name != stages[-1]), same[0])
    console.print(_answers(before, same[-1]))
  exports = [
    ('report', report),
    ('checkpoint (Hugging Face)', workdir / 'hf'),
    ('adapter (PEFT)', workdir / 'adapter'),
  ]
  for label, path in exports:
    if not path.exists():
      continue
    console.print(Text(f'{label}: {path}'), soft_wrap=True)


def _evaluation_files(workdir: pathlib.Path, stages: Sequence[str]) -> list[pathlib.Path]:
  """Returns the evaluation files, in order of stage, step and suite."""
  return [
    file for stage in stages for file in sorted((workdir / EVALS_DIR / stage).glob('*.jsonl'))
  ]


def _answers(before: pathlib.Path, after: pathlib.Path) -> Table:
  first, last = (
    {
      row['uid']: row
      for row in map(json.loads, file.read_text().splitlines())
      if row['mode'] == 'greedy'
    }
    for file in (before, after)
  )
  table = Table('prompt', 'truth', f'before ({before.parent.name})', f'after ({after.parent.name})')
  for uid in list(last)[:_SAMPLES]:
    if uid in first:
      table.add_row(
        Text(last[uid]['prompt'][-60:]),
        Text((last[uid]['truth'] or '')[-40:]),
        _judged(first[uid]),
        _judged(last[uid]),
      )
  return table


def _judged(row: dict) -> Text:
  return Text(
    f'{row["completion"][-40:]} {"✓" if row["correct"] else "✗"}',
    style='green' if row['correct'] else 'red',
  )
