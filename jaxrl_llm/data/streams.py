"""Static streams: shuffled, repeated, with a position that is checkpointed and exact on resume."""

from __future__ import annotations

import pathlib
from typing import Any

import grain
from array_record.python.array_record_data_source import ArrayRecordDataSource

from jaxrl_llm.batching.plan import Row
from jaxrl_llm.experience.sample import decode


class RowStream:
  """Rows of one ArrayRecord file of Samples, shuffled anew in each epoch, without end."""

  def __init__(self, workdir: pathlib.Path, source: str, *, rows: int, seed: int):
    """
    Args:
      workdir: the run directory.
      source: the file, relative to it.
      rows: rows of one `next()`.
      seed: of the shuffle; epoch and seed fix the order.
    """
    self._rows = rows
    records = ArrayRecordDataSource([str(workdir / source)])
    dataset = grain.MapDataset.source(_Numbered(records, source)).shuffle(seed=seed).repeat(None)
    self._iterator = iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))

  def next(self) -> list[Row]:
    return [next(self._iterator) for _ in range(self._rows)]

  def state(self) -> Any:
    """JSON; `restore` of it continues exactly here."""
    return self._iterator.get_state()

  def restore(self, state: Any) -> None:
    self._iterator.set_state(state)


class _Numbered:
  """grain source of Rows: a record's number, and the lengths that planning needs."""

  def __init__(self, records: ArrayRecordDataSource, source: str):
    self._records, self._source = records, source

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, i: int) -> Row:
    sample = decode(self._records[i])
    return Row(
      uid=sample.uid,
      source=self._source,
      index=i,
      length=len(sample.tokens),
      prompt_len=sample.prompt_len,
      group=sample.group_id,
      reward=None,
      is_expert=True,
      truncated=False,
      version_step=-1,
    )
