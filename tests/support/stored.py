"""Samples, scores and groups for tests of replay stores."""

import contextlib
import pathlib
import shutil
import sqlite3

import numpy as np

from jaxrl_llm.core.records.sample import Sample, Segment, Source
from jaxrl_llm.core.records.score import Score
from jaxrl_llm.core.types import Version
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.journal import rebuild
from jaxrl_llm.replay.tables import Issue


def make_sample(uid: str, length: int = 12, version: int = 0) -> Sample:
  """Returns a sample whose tokens and logprobs depend only on the uid, so that a mix-up of rows is
  detected.
  """
  draw = np.random.default_rng(list(uid.encode()))
  sampled = np.arange(length) >= 4
  return Sample(
    uid=uid,
    task_id='t',
    visit=0,
    sample_index=0,
    group_id=uid.split('/')[0],
    trajectory_id=uid,
    taskset='words',
    domain='general',
    source=Source.ROLLOUT,
    tokens=draw.integers(0, 30, length).astype(np.int32),
    prompt_len=4,
    role=sampled.astype(np.uint8),
    loss_mask=sampled,
    sampled=sampled,
    behaviour_logprobs=np.where(sampled, -draw.random(length), 0).astype(np.float32),
    segments=(
      Segment(start=4, end=length, version=Version(1, version), engine='embedded', finish='stop'),
    ),
  )


def issues(uids):
  return [Issue(uid=uid, group_id=uid.split('/')[0], task_id='t', visit=0) for uid in uids]


def score_of(uid: str, value: float | None = 0.5) -> Score:
  return Score(
    uid=uid, scorer='answer', value=value, parts={'match': 1.0}, evidence={'answer': 'x'}, time=0.25
  )


def store_group(store, uids, step, version=0):
  store.at(step).issue(issues(uids))
  store.at(step).append([make_sample(uid, version=version) for uid in uids])
  store.at(step).admit(uids)


def states(store, uids) -> list[str]:
  found = store.entries(uids)
  return [str(found[uid].state) for uid in uids]


def experts(uids):
  return [Issue(uid=uid, group_id=uid, task_id='e', visit=0, partition='expert') for uid in uids]


def tables(directory) -> dict[str, list[tuple]]:
  """Returns the schema of a store's index, and the rows of all tables except the two of the
  journal.
  """
  with contextlib.closing(sqlite3.connect(pathlib.Path(directory) / 'index.sqlite')) as db:
    schema = db.execute('SELECT type, name, tbl_name, sql FROM sqlite_master').fetchall()
    names = {name for kind, name, *_ in schema if kind == 'table'} - {'journal', 'unjournaled'}
    rows = {name: sorted(db.execute(f'SELECT * FROM {name}'), key=repr) for name in names}
  # A count that has returned to 0 is equal to a count that never existed.
  rows['tallies'] = [row for row in rows['tallies'] if row[-1]]
  return rows | {'schema': sorted(schema, key=repr)}


def assert_rebuilt(directory, target) -> None:
  """Rebuilds the index of a copy of this closed store from the journal. Asserts that every table
  has the same rows, and that the audit is the same.
  """
  wanted = tables(directory)
  shutil.copytree(directory, target)
  (target / 'index.sqlite').write_bytes(b'no database' * 1000)
  rebuild(target)
  made = tables(target)
  assert made.keys() == wanted.keys()
  for name, rows in wanted.items():
    assert made[name] == rows, name
  assert audit(target).lines == audit(directory).lines
