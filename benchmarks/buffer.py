"""Benchmark of the replay store: samples per second in and out, memory, and queries on a large
index.

  .venv/bin/python benchmarks/buffer.py [--rows=100000] [--index_rows=1000000]

First, batches of `--batch` samples of `--tokens` tokens go through a store as in a run: each group
is issued, appended, scored and admitted; the batch is drawn, sealed, read back by place and
recorded as trained; every tenth batch commits. After each tenth of the rows, the script prints the
rates since the last one and the process's memory, and at the end the times of recovery and audit.
Then a second store gets `--index_rows` samples of 8 tokens in the same way, the last of which stay
undrawn, and its queries are timed: medians of `--rounds`. All files lie in `--directory` and are
removed at the end.
"""

from __future__ import annotations

import pathlib
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
from absl import flags

from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Sample, Segment, Source
from jaxrl_llm.core.records.score import Score
from jaxrl_llm.core.types import Version
from jaxrl_llm.replay import browse
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.draw import DrawConfig, draw
from jaxrl_llm.replay.index import ReplayStore, open_store
from jaxrl_llm.replay.tables import Issue

_ROWS = flags.DEFINE_integer(
  'rows', 100_000, 'Samples written, drawn and read; 0: none.', lower_bound=0
)
_TOKENS = flags.DEFINE_integer('tokens', 1024, 'Of each of these.', lower_bound=8)
_INDEX_ROWS = flags.DEFINE_integer(
  'index_rows', 1_000_000, 'Samples in the index that is asked; 0: none.', lower_bound=0
)
_DRAWABLE = flags.DEFINE_integer(
  'drawable', 10_000, 'Groups of it that can be drawn; also timed with a tenth.'
)
_BATCH = flags.DEFINE_integer('batch', 512, 'Samples of a batch.', lower_bound=8)
_GROUP = flags.DEFINE_integer('group', 8, 'Samples of a group.', lower_bound=1)
_TASKS = flags.DEFINE_integer('tasks', 7500, 'Tasks that take turns.', lower_bound=1)
_ROUNDS = flags.DEFINE_integer('rounds', 21, 'Of each query.', lower_bound=1)
_DIRECTORY = flags.DEFINE_string(
  'directory', 'runs/buffer_benchmark', 'For the stores; must not exist.'
)


def rss_mb() -> float:
  """Resident memory of this process in MB."""
  pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
  return pages * 4096 / 1e6


class Work:
  """Passes samples through a store, batch after batch, and sums the seconds spent on each part of
  the work.
  """

  def __init__(self, store: ReplayStore, tokens: int):
    self.store, self.step, self.groups = store, 0, 0
    self.seconds: dict[str, float] = dict.fromkeys(('written', 'drawn', 'sealed', 'read'), 0.0)
    draws = np.random.default_rng(0)
    self._tokens = draws.integers(0, 100_000, tokens).astype(np.int32)
    self._sampled = np.arange(tokens) >= tokens // 4
    self._logprobs = np.where(self._sampled, -draws.random(tokens), 0).astype(np.float32)

  def _sample(self, row: Issue, index: int) -> Sample:
    prompt_len = len(self._tokens) // 4
    segment = Segment(
      start=prompt_len,
      end=len(self._tokens),
      version=Version(1, self.step),
      engine='vllm',
      finish='stop',
    )
    return Sample(
      uid=row.uid,
      task_id=row.task_id,
      visit=row.visit,
      sample_index=index,
      group_id=row.group_id,
      trajectory_id=row.uid,
      taskset='words',
      domain='general',
      source=Source.ROLLOUT,
      tokens=self._tokens,
      prompt_len=prompt_len,
      role=self._sampled.astype(np.uint8),
      loss_mask=self._sampled,
      sampled=self._sampled,
      behaviour_logprobs=self._logprobs,
      segments=(segment,),
    )

  def _timed(self, part: str, work: Callable):
    before = time.perf_counter()
    result = work()
    self.seconds[part] += time.perf_counter() - before
    return result

  def write(self) -> None:
    """Writes one group."""
    visit, number = divmod(self.groups, _TASKS.value)
    task = f'words:{number}'
    group = f'main/{task}/{visit}'
    rows = [
      Issue(uid=f'{group}/{i}', group_id=group, task_id=task, visit=visit)
      for i in range(_GROUP.value)
    ]
    samples = [self._sample(row, i) for i, row in enumerate(rows)]
    scores = [
      Score(uid=row.uid, scorer='answer', value=1.0, parts={'match': 1.0}, time=0.1) for row in rows
    ]
    self._timed('written', lambda: self._put(rows, samples, scores))
    self.groups += 1

  def _put(self, rows: list[Issue], samples: list[Sample], scores: list[Score]) -> None:
    self.store.at(self.step).issue(rows)
    with self.store.transaction():
      self.store.at(self.step).append(samples)
      self.store.at(self.step).score(scores)
      self.store.at(self.step).admit([row.uid for row in rows])

  def draw(self, count: int) -> list[str]:
    """Draws a batch of `count` groups and returns its uids."""
    candidates = self.store.candidates(self.step)
    groups = {group.group_id: group.uids for group in candidates}
    drawn = draw(candidates, DrawConfig(), count=count, step=self.step, seed=0)
    return [uid for group in drawn for uid in groups[group]]

  def train(self, count: int, *, read: bool) -> None:
    """Trains one batch of `count` groups, with the work of a commit at every tenth batch."""
    uids = self._timed('drawn', lambda: self.draw(count))
    places = self._timed('sealed', lambda: self.store.at(self.step).seal(uids))
    if read:
      found = self._timed('read', lambda: self.store.reader.read([places[uid] for uid in uids]))
      assert [sample.uid for sample in found] == uids
    self._timed('drawn', lambda: self.store.at(self.step).trained(uids))
    self.step += 1
    if self.step % 10 == 0:
      self.store.flush()
      self.store.prune(self.step)


def through(directory: pathlib.Path) -> Iterator[str]:
  """Measures samples of full length, from issue to training."""
  work = Work(open_store(directory, synchronous='normal'), _TOKENS.value)
  batches, of_batch = _ROWS.value // _BATCH.value, _BATCH.value // _GROUP.value
  yield (
    f'{batches * of_batch * _GROUP.value:,} samples of {_TOKENS.value} tokens; before: '
    f'{rss_mb():.0f} MB'
  )
  tenths = [batches * tenth // 10 for tenth in range(1, 11)]
  seconds, done = dict(work.seconds), 0
  for batch in range(1, batches + 1):
    for _ in range(of_batch):
      work.write()
    work.train(of_batch, read=True)
    if batch in tenths:
      samples = (batch - done) * of_batch * _GROUP.value
      rates = ', '.join(
        f'{name} {samples / (work.seconds[name] - seconds[name]):,.0f}' for name in seconds
      )
      yield f'  {batch * 100 // batches} %: samples per second: {rates}; {rss_mb():.0f} MB'
      seconds, done = dict(work.seconds), batch
  commit = work.step - work.step % 10
  work.store.close()
  yield reopened(directory, commit, work.step)
  yield audited(directory)


def reopened(directory: pathlib.Path, commit: int, step: int) -> str:
  """Measures a start of the store that goes back to a commit."""
  before = time.perf_counter()
  store = open_store(directory, synchronous='normal')
  opened = time.perf_counter()
  counts = store.recover(commit)
  recovered = time.perf_counter()
  store.close()
  return (
    f'  recovery to {commit} of {step} batches: {(recovered - opened) * 1e3:.0f} ms, '
    f'{counts["transitions"]:,} changes undone, {counts["void"]:,} samples void, '
    f'{counts["restored"]:,} unsealed (opened in {(opened - before) * 1e3:.0f} ms)'
  )


def audited(directory: pathlib.Path) -> str:
  before = time.perf_counter()
  report = audit(directory)
  if not report.ok:
    raise UserError(
      f'the audit found {len(report.problems)} problems; the first: {report.problems[0]}'
    )
  return f'  audit of {report.issued:,}: {time.perf_counter() - before:.1f} s; {rss_mb():.0f} MB'


def asked(directory: pathlib.Path) -> Iterator[str]:
  """Measures the queries of a large index."""
  work = Work(open_store(directory, synchronous='normal'), 8)
  groups = _INDEX_ROWS.value // _GROUP.value
  of_batch = max(groups // 200, 1)
  before = time.perf_counter()
  while work.groups < groups:
    for _ in range(min(of_batch, groups - work.groups)):
      work.write()
    if work.groups < groups - _DRAWABLE.value:
      work.train(of_batch, read=False)
    elif (waiting := len(work.store.candidates(work.step))) > _DRAWABLE.value:
      work.train(waiting - _DRAWABLE.value, read=False)
  samples, seconds = groups * _GROUP.value, time.perf_counter() - before
  yield f'index of {samples:,} samples, written in {seconds:.0f} s; {rss_mb():.0f} MB'
  yield from timed_queries(work, directory)
  waiting = len(work.store.candidates(work.step))
  work.train(waiting - _DRAWABLE.value // 10, read=False)
  yield from timed_queries(work, directory)
  commit, step = work.step - 1, work.step
  work.store.close()
  yield reopened(directory, step, step)
  yield reopened(directory, commit, step)
  yield audited(directory)


def timed_queries(work: Work, directory: pathlib.Path) -> Iterator[str]:
  store, of_batch = work.store, _BATCH.value // _GROUP.value
  waiting = len(store.candidates(work.step))
  chosen = random.Random(0)

  def uids() -> list[str]:
    numbers = [divmod(chosen.randrange(work.groups), _TASKS.value) for _ in range(of_batch)]
    return list(
      dict.fromkeys(
        f'main/words:{task}/{visit}/{i}' for visit, task in numbers for i in range(_GROUP.value)
      )
    )

  def evicted() -> dict[str, int]:
    return store.at(work.step).evict(before_version=0, capacity=waiting)

  queries: dict[str, Callable] = {
    f'entries of {_BATCH.value}': lambda: store.entries(uids()),
    f'scores of {_BATCH.value}': lambda: store.scores(uids()),
    'counts': store.counts,
    'candidates and draw': lambda: work.draw(of_batch),
    'eviction of none': evicted,
    'find by task': lambda: browse.find(
      directory, task=f'words:{chosen.randrange(min(_TASKS.value, work.groups))}'
    ),
    'find by state': lambda: browse.find(directory, state='trained'),
  }
  yield f'  {waiting:,} groups can be drawn; milliseconds, median and worst:'
  for name, query in queries.items():
    found = []
    for _ in range(_ROUNDS.value):
      before = time.perf_counter()
      query()
      found.append((time.perf_counter() - before) * 1e3)
    yield f'    {name}: {statistics.median(found):.1f} {max(found):.1f}'


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise UserError(f'argument {argv[1]!r} is not a flag')
  directory = pathlib.Path(_DIRECTORY.value)
  if directory.exists():
    raise UserError(
      f'--directory={directory}: it exists; give one that does not, it is removed at the end'
    )
  try:
    for part, rows in ((through, _ROWS.value), (asked, _INDEX_ROWS.value)):
      if rows:
        for line in part(directory / part.__name__):
          print(line, flush=True)
  finally:
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == '__main__':
  script.run(main)
