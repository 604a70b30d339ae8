"""Streams of rows of static data: shuffled, repeated, and exactly resumable at a saved position."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import grain
from array_record.python.array_record_data_source import ArrayRecordDataSource

from jaxrl_llm.batching.plan import Row, with_prefixes
from jaxrl_llm.core.records.sample import Sample, decode


class RowStream:
  """Endless stream over the rows of one ArrayRecord file of Samples, reshuffled in each epoch."""

  def __init__(self, workdir: pathlib.Path, source: str, *, rows: int, seed: int, unit: int = 1):
    """
    Args:
      workdir: the run directory.
      source: the file, relative to `workdir`.
      rows: number of rows per `next()`.
      seed: shuffle seed. The order of rows depends only on the epoch and the seed.
      unit: number of consecutive records that must stay together (2 for pairs, otherwise 1).
    """
    self._units = rows // unit
    dataset = grain.MapDataset.source(_Units(workdir, source, unit)).shuffle(seed=seed).repeat(None)
    self._iterator = iter(
      dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    )

  def next(self, units: int | None = None) -> list[Row]:
    """Returns the next rows. If a preference pair is drawn twice in one call, its two occurrences
    get different pair ids.

    Args:
      units: number of units to draw. If None, enough units for the configured number of rows are
        drawn.
    """
    count = self._units if units is None else units
    drawn = [(i, row) for i in range(count) for row in next(self._iterator)]
    return [
      dataclasses.replace(row, pair=f'{row.pair}#{i}') if row.pair else row for i, row in drawn
    ]

  def state(self) -> Any:
    """Returns the position in the stream as JSON; `restore` continues exactly from there."""
    return self._iterator.get_state()

  def restore(self, state: Any) -> None:
    self._iterator.set_state(state)


def all_rows(workdir: pathlib.Path, source: str) -> tuple[Row, ...]:
  """Returns all rows of an ArrayRecord file of Samples, in file order."""
  units = _Units(workdir, source, 1)
  return tuple(row for i in range(len(units)) for row in units[i])


def count_rows(workdir: pathlib.Path, source: str) -> int:
  """Returns the number of rows of an ArrayRecord file of Samples."""
  return len(_Units(workdir, source, 1))


def sample_lengths(
  workdir: pathlib.Path, source: str, *, unit: int, most: int = 4096
) -> tuple[int, ...]:
  """Returns the lengths in tokens of evenly spaced rows of an ArrayRecord file of Samples.

  Args:
    unit: number of consecutive rows that stay together (2 for pairs, otherwise 1). A unit is
      measured as a whole.
    most: maximum number of rows to measure, a multiple of `unit`.
  """
  units = _Units(workdir, source, unit)
  every = -(-len(units) * unit // most)
  return tuple(row.length for i in range(0, len(units), every) for row in units[i])


class _Units:
  """Grain data source over the units of an ArrayRecord file. Item i is the list of Rows of unit i.

  A unit consists of `unit` consecutive records.
  """

  def __init__(self, workdir: pathlib.Path, source: str, unit: int):
    self._records, self._source, self._unit = (
      ArrayRecordDataSource([str(workdir / source)]),
      source,
      unit,
    )

  def __len__(self) -> int:
    return len(self._records) // self._unit

  def __getitem__(self, i: int) -> list[Row]:
    records = range(i * self._unit, (i + 1) * self._unit)
    samples = [decode(self._records[record]) for record in records]
    return with_prefixes([*map(self._row, records, samples)], samples)

  def _row(self, i: int, sample: Sample) -> Row:
    preference = sample.preference or {}
    return Row(
      uid=sample.uid,
      source=self._source,
      index=i,
      length=len(sample.tokens),
      prompt_len=sample.prompt_len,
      group=sample.group_id,
      reward=None,
      is_expert=not preference,
      truncated=False,
      version_step=None,
      pair=preference.get('pair_id'),
      label={'chosen': 1, 'rejected': -1}.get(preference.get('label')),
    )
