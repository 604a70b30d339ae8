"""Checks of a run's accounts of its seconds and tokens."""

from __future__ import annotations

import collections
import pathlib

import job
import pytest

from jaxrl_llm.runtime import goodput

STOCKS = ('waiting', 'partial', 'open')


def check_seconds(run: pathlib.Path, *kinds: str) -> None:
  """Checks that, for each kind of processes, the classes of seconds add up to the lifetime of the
  processes, within 1 %.
  """
  rows = [*job.rows(run), *goodput.rows_of_others(run)]
  for kind in kinds:
    shares = goodput.shares(rows, kind)
    assert sum(shares.values()) == pytest.approx(1, abs=0.01), (kind, shares)
    assert shares.get('loop', 0.0) < 0.1, shares


def check_tokens(run: pathlib.Path) -> dict[str, float]:
  """Checks that every generated token is in exactly one class, within 1 %. Returns the number of
  tokens of each class.
  """
  rows, prefix = job.rows(run), 'goodput/tokens/'
  total = collections.Counter()
  for row in rows:
    total.update({k.removeprefix(prefix): v for k, v in row.items() if k.startswith(prefix)})
  last = [row for row in rows if f'{prefix}generated' in row][-1]
  classes = {name: total[name] for name in ('trained', 'dropped', 'discarded', 'evaluated')}
  # An evaluation has its own row, and its tokens are generated in the next row of training.
  classes['evaluated'] -= sum(
    row[f'{prefix}evaluated'] for row in rows[rows.index(last) :] if f'{prefix}evaluated' in row
  )
  classes |= {name: last[f'{prefix}{name}'] for name in STOCKS}
  assert sum(classes.values()) == pytest.approx(total['generated'], rel=0.01), (total, classes)
  return classes
