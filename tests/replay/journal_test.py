"""The index made from the journal is the index that was, table by table, wherever a run ended."""

import random
import shutil
import sqlite3
import subprocess
import sys

import numpy as np
import pytest
from exploring import make_tasks
from job import environment
from paths import ROOT
from stored import assert_rebuilt, experts, issues, make_sample, score_of, tables

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Segment, encode
from jaxrl_llm.core.records.span import Span
from jaxrl_llm.core.types import Version
from jaxrl_llm.replay import journal
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.index import open_store
from jaxrl_llm.replay.journal import rebuild


def span(length, step):
  segment = Segment(start=0, end=length, version=Version(1, step), engine='x', finish='budget')
  return Span(
    tokens=np.arange(length, dtype=np.int32),
    logprobs=-np.arange(length, dtype=np.float32),
    segments=(segment,),
    finish=None,
  )


def live(store, rng, tasks=()):
  """One batch in which everything happens that can happen to a sample."""
  step, at = live.step, store.at(live.step)
  groups = {'': 8, 'p': 2, 'i': 1, 'x': 1}
  uids = [f'{store.attempt}.{step}{name}/{i}' for name, n in groups.items() for i in range(n)]
  at.offer(tasks)
  at.issue(issues(uids))
  done, partial, open_ = uids[:8], uids[8:10], uids[10:]
  at.extend({uid: span(rng.randrange(1, 9), step) for uid in partial})
  with store.transaction():
    at.append([make_sample(uid, version=step) for uid in done])
    at.score([score_of(uid, rng.choice([None, 0.5, 1.0])) for uid in done])
    at.derive([(uid, 'experience', {'reward': rng.random()}) for uid in done])
    at.admit(done[:6])
    at.drop(done[6:7], 'filtered')
  at.append([make_sample(done[0], version=step)])  # Twice: a duplicate.
  at.expire(open_[1:])
  at.seal(done[:3])
  at.trained(done[:3])
  at.join(experts([f'e{step % 2}']))
  at.record_plan({'step': step, 'rows': done[:3]})
  if rng.random() < 0.3:
    at.evict(before_version=step - 1, capacity=None)
  live.step += 1


def test_after_kills_partial_and_dropped_samples_every_table_is_the_same(tmp_path):
  """Starts, commits and kills in random order; a kill leaves the files as they are."""
  rng, path = random.Random(5), tmp_path / 'replay'
  live.step = commit = 0
  for start in range(8):
    store = open_store(path, synchronous='normal', max_uses=2)
    store.recover(commit)
    live.step = commit
    for _ in range(rng.randrange(1, 4)):
      live(store, rng, make_tasks(live.step + 1))
      if rng.random() < 0.5:
        store.flush()
        commit = live.step
        store.prune(commit)
    if start % 2:
      store.close()
      assert_rebuilt(path, tmp_path / f'damaged{start}')
    else:
      killed = tmp_path / f'killed{start}'
      shutil.copytree(path, killed)
      store.close()
      path = killed
  assert {state for state, count in audit(path).states.items() if count} >= {
    'issued', 'partial', 'stored', 'admitted', 'trained', 'dropped', 'expired', 'void',
  }  # fmt: skip


def test_the_index_of_a_killed_run_is_that_of_its_commit(tmp_path):
  """Changes after the commit would be undone anyway; the run goes on as from the live index."""
  store, rng = open_store(tmp_path / 'run'), random.Random(1)
  store.recover(0)
  live.step = 0
  live(store, rng)
  live(store, rng)
  store.flush()
  at_commit = tables(tmp_path / 'run')
  live(store, rng)
  shutil.copytree(tmp_path / 'run', tmp_path / 'killed')
  store.close()
  assert tables(tmp_path / 'killed') != at_commit
  rebuild(tmp_path / 'killed')
  assert tables(tmp_path / 'killed') == at_commit
  resumed = open_store(tmp_path / 'killed')
  assert resumed.recover(2)['files'] == 1, 'the segment that was sealed after the commit'
  kept = [f'1.{step}/{i}' for step in range(2) for i in range(6)]
  assert [*map(encode, resumed.read(kept))] == [
    encode(make_sample(uid, version=int(uid[2]))) for uid in kept
  ]
  live.step = 2
  live(resumed, rng)
  resumed.close()
  assert_rebuilt(tmp_path / 'killed', tmp_path / 'again')


@pytest.fixture
def written(tmp_path):
  """A store with three writes of the journal, and the size of the file after each."""
  path, sizes = tmp_path / 'replay', []
  store, rng = open_store(path), random.Random(2)
  store.recover(0)
  live.step = 0
  for _ in range(2):
    live(store, rng)
    sizes.append((path / 'journal').stat().st_size)
    store.flush()
  store.close()
  return path, [*sizes, (path / 'journal').stat().st_size]


def test_a_write_that_was_interrupted_does_not_count(written):
  path, sizes = written
  whole = (path / 'journal').read_bytes()
  for cut in range(sizes[1], sizes[2], 211):
    (path / 'journal').write_bytes(whole[:cut])
    rebuilt = rebuild(path)
    assert rebuilt.writes == 2 and rebuilt.ignored == cut - sizes[1]
    assert {step for step, *_ in tables(path)['plans']} == {0}
  (path / 'journal').write_bytes(whole)
  assert rebuild(path).writes == 3 and len(tables(path)['plans']) == 2


def test_damage_ends_the_journal_and_the_audit_says_so(written):
  path, sizes = written
  content = bytearray((path / 'journal').read_bytes())
  content[(sizes[1] + sizes[2]) // 2] ^= 1
  (path / 'journal').write_bytes(content)
  line = audit(path).problems[-1]
  assert line.startswith('journal: damaged') and 'remove it' in line
  (path / 'journal').unlink()
  before = tables(path)
  store = open_store(path)
  store.recover(2)
  store.close()
  assert audit(path).ok
  assert_rebuilt(path, path.parent / 'again')
  assert before['plans'] == tables(path)['plans']


def test_a_start_makes_a_damaged_journal_again(written):
  path, sizes = written
  content = bytearray((path / 'journal').read_bytes())
  content[(sizes[0] + sizes[1]) // 2] ^= 1
  (path / 'journal').write_bytes(content)
  store = open_store(path)
  store.recover(2)
  live.step = 2
  live(store, random.Random(3))
  store.close()
  assert audit(path).ok
  assert_rebuilt(path, path.parent / 'again')
  assert len(tables(path)['plans']) == 3


@pytest.mark.parametrize('content', [None, b'', b'\0' * 999, bytes(range(256)) * 9])
def test_without_a_whole_write_nothing_changes(written, content):
  path, _ = written
  (path / 'journal').unlink()
  if content is not None:
    (path / 'journal').write_bytes(content)
  before = (path / 'index.sqlite').read_bytes()
  with pytest.raises(UserError, match=r'replay store .*journal: .*--init_from') as caught:
    rebuild(path)
  assert '\n' not in str(caught.value)
  assert (path / 'index.sqlite').read_bytes() == before
  assert not (path / 'index.sqlite.tmp').exists()


def test_a_store_of_before_gets_a_journal_at_its_next_start(written):
  path, _ = written
  (path / 'journal').unlink()
  with sqlite3.connect(path / 'index.sqlite') as db:
    for name, kind in db.execute(
      "SELECT name, type FROM sqlite_master WHERE name LIKE 'journal%'"
      " OR name = 'unjournaled' ORDER BY type DESC"
    ).fetchall():
      db.execute(f'DROP {kind} {name}')
  db.close()
  store = open_store(path)
  store.recover(2)
  store.close()
  assert_rebuilt(path, path.parent / 'again')


def test_a_journal_much_larger_than_the_index_is_renewed_at_a_start(written, monkeypatch):
  path, _ = written
  monkeypatch.setattr(journal, '_SMALL_BYTES', 0)
  monkeypatch.setattr(journal, '_LARGEST_RATIO', 0)
  store = open_store(path)
  store.recover(2)
  store.close()
  assert rebuild(path).writes <= 2
  assert len(tables(path)['plans']) == 2


def test_the_command_rebuilds_keeps_the_old_index_and_audits(written):
  path, _ = written
  wanted = tables(path)
  damaged = b'\0' * 5000
  (path / 'index.sqlite').write_bytes(damaged)
  with pytest.raises(UserError, match='buffer --rebuild'):
    open_store(path)
  buffer = [sys.executable, 'launch/buffer.py', f'--workdir={path.parent}', '--rebuild']
  done = subprocess.run(
    buffer, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment()
  )
  assert done.returncode == 0, done.stderr
  assert 'from 3 writes of the journal' in done.stdout.splitlines()[0]
  assert done.stdout.splitlines()[-1] == 'audit ok'
  assert tables(path) == wanted
  assert (path / 'index.sqlite.damaged').read_bytes() == damaged
