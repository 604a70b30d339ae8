"""Damage on disk and results that should not come: named in one line, counted, and nothing else is
lost.
"""

import os
import pathlib
import sqlite3
import subprocess
import sys

import pytest
from paths import ROOT
from stored import issues, make_sample, score_of, store_group

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.records.sample import encode
from jaxrl_llm.replay import browse
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.index import open_store
from jaxrl_llm.replay.segments import SegmentError, open_segment_reader

SEALED = [f'{step}/{i}' for step in range(3) for i in range(4)]
WAITING = ['w/0', 'w/1']


@pytest.fixture
def directory(tmp_path):
  """Three segments of four samples each, and two samples in the open segment."""
  store = open_store(tmp_path)
  for step in range(3):
    uids = SEALED[4 * step : 4 * step + 4]
    store_group(store, uids, step)
    store.at(step).seal(uids)
    store.at(step).trained(uids)
  store_group(store, WAITING, 3)
  store.close()
  return tmp_path


def segment(directory, step: int) -> pathlib.Path:
  (path,) = (directory / 'segments').glob(f'{step:08d}-*')
  return path


def unreadable(path) -> list[int]:
  """Rows of the segment that cannot be read, each asked for alone."""
  found, reader = [], open_segment_reader(path.parent)
  for row in range(4):
    try:
      reader.read([(path.name, row)])
    except SegmentError:
      found.append(row)
  reader.close()
  return found


def flipped_row(path) -> None:
  """Flips one byte such that the second record is lost: records are compressed, so it is found by
  trying.
  """
  content = path.read_bytes()
  for place in [place for place, byte in enumerate(content) if byte][::5]:
    path.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
    if unreadable(path) == [1]:
      return
  raise AssertionError('no byte is of the second record alone')


def truncated(path) -> None:
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
  ('damage', 'lost'),
  [(flipped_row, ['1/1']), (truncated, SEALED[4:8]), (pathlib.Path.unlink, SEALED[4:8])],
  ids=['flipped', 'truncated', 'missing'],
)
def test_a_damaged_segment_loses_its_own_samples_and_no_other(directory, damage, lost):
  damage(segment(directory, 1))
  report = audit(directory)
  assert not report.ok and report.lost == tuple(lost)
  assert len(report.problems) == len(lost)
  for uid, line in zip(lost, report.problems):
    assert line.startswith(f'{uid}: lost: segment ') and '\n' not in line and 'restore' in line
  assert f'bytes lost of {len(lost)}: {", ".join(lost)}' in report.lines
  assert report.issued == 14 and report.states['trained'] == 12, (
    'what became of them is still known'
  )
  store = open_store(directory)
  store.recover(4)
  kept = [uid for uid in SEALED + WAITING if uid not in lost]
  for uid, sample in zip(kept, store.read(kept)):
    assert encode(sample) == encode(make_sample(uid))
  for uid in lost:
    with pytest.raises(SegmentError, match=r'segment .*: .*restore') as caught:
      store.read([uid])
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('damage', [truncated, pathlib.Path.unlink], ids=['truncated', 'missing'])
def test_recovery_does_not_take_back_what_cannot_be_read(directory, damage):
  """The seal of step 1 is to be undone: its bytes would go back to the open segment, and the file
  away.
  """
  path = segment(directory, 1)
  whole = path.read_bytes()
  with sqlite3.connect(directory / 'index.sqlite') as db:  # sealed a step after it was accepted
    db.execute("UPDATE segments SET step = 2 WHERE name LIKE '00000001-%'")
  damage(path)
  store = open_store(directory)
  with pytest.raises(SegmentError, match=r'00000001-001-000.*restore') as caught:
    store.recover(2)
  assert '\n' not in str(caught.value)
  store.close()
  path.write_bytes(whole)
  store = open_store(directory)
  assert store.recover(2)['restored'] == 4
  assert [encode(sample) for sample in store.read(SEALED[4:8])] == [
    encode(make_sample(uid)) for uid in SEALED[4:8]
  ]


def test_the_command_names_the_lost_samples_and_fails(directory):
  flipped_row(segment(directory, 1))
  buffer = [sys.executable, 'launch/buffer.py', f'--workdir={directory.parent}', '--audit']
  (directory.parent / 'replay').symlink_to(directory)
  done = subprocess.run(
    buffer,
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
    env=os.environ | {'PYTHONPATH': str(ROOT)},
  )
  assert done.returncode == 1, done.stderr
  assert (
    'bytes lost of 1: 1/1' in done.stdout
    and done.stdout.splitlines()[-1] == 'audit FAILED: 1 problems'
  )


@pytest.mark.parametrize('size', [100, 4096, 20_000, -4096])
def test_a_truncated_index_is_one_line_and_the_segments_stay_readable(directory, size):
  path = directory / 'index.sqlite'
  path.write_bytes(path.read_bytes()[:size])
  for open_it in (open_store, audit, browse.summary):
    with pytest.raises(UserError, match=r'index\.sqlite: .*not a store of this program') as caught:
      open_it(directory)
    assert '\n' not in str(caught.value)
  reader = open_segment_reader(directory / 'segments')
  found = [
    sample.uid
    for step in range(3)
    for sample in reader.read([(segment(directory, step).name, i) for i in range(4)])
  ]
  assert found == SEALED


def test_an_index_damaged_while_it_is_open_is_one_line(directory):
  store = open_store(directory)
  store.recover(4)
  path = directory / 'index.sqlite'
  pages = store._db.execute('PRAGMA wal_checkpoint(TRUNCATE)').fetchone()
  assert pages[0] == 0
  store._db.execute('PRAGMA cache_size=0')
  store._db.execute('PRAGMA shrink_memory')
  content = path.read_bytes()
  with open(path, 'r+b') as file:  # in place: the store's own handle sees it
    file.seek(4096)
    file.write(b'\xff' * (len(content) - 4096))
  with pytest.raises(RunError, match=r'index\.sqlite: .*malformed') as caught:
    store.at(4).issue(issues(['n/0']))
  assert '\n' not in str(caught.value)


def test_an_index_of_a_newer_program_is_refused_and_left_as_it_is(directory):
  path = directory / 'index.sqlite'
  with sqlite3.connect(path) as db:
    db.execute("UPDATE meta SET json = '6' WHERE key = 'schema'")
  before = path.read_bytes()
  with pytest.raises(UserError, match='it has schema 6, wanted 5; use another --workdir'):
    open_store(directory)
  for look in (audit, browse.summary):
    with pytest.raises(
      UserError, match='schema 6, this program reads 5; use the program version that wrote it'
    ):
      look(directory)
  with sqlite3.connect(path) as db:
    assert db.execute('SELECT count(*) FROM attempts').fetchone() == (1,)
  assert path.read_bytes() == before


def test_what_should_not_come_is_refused_or_counted_and_changes_nothing_else(directory):
  store = open_store(directory)
  store.recover(4)
  with pytest.raises(ValueError, match='issue 0/1: already trained under attempt 1'):
    store.at(4).issue(issues(['n/0', '0/1']))
  with pytest.raises(ValueError, match='unknown uid n/9: it was never issued'):
    store.at(4).append([make_sample('n/9')])
  with pytest.raises(ValueError, match='unknown uid n/9: it was never issued'):
    store.at(4).score([score_of('n/9')])
  assert store.at(4).append([make_sample('0/1', length=7)]) == []
  assert encode(store.read(['0/1'])[0]) == encode(make_sample('0/1'))
  store.close()
  report = audit(directory)
  assert report.ok and report.issued == 14 and report.duplicates == 1


def test_a_score_twice_is_counted_and_the_newest_by_each_scorer_holds(directory):
  store = open_store(directory)
  store.recover(4)
  store.at(4).score([score_of('w/0', 0.25), score_of('w/1', 0.25), score_of('w/0', 1.0)])
  store.at(5).score([score_of('w/0', 0.75)])
  assert [score.value for score in store.scores(['w/0'])['w/0']] == [0.75]
  store.close()
  assert audit(directory).ok and audit(directory).rescored == 2
  # (0.75 + 0.25) / 2
  assert 'scores of answer, ok: 2, mean 0.5; 2 given again' in browse.summary(directory).lines


def test_a_sample_that_is_never_scored_stays_in_sight(directory):
  store = open_store(directory)
  store.recover(4)
  store.at(4).issue(issues(['n/0', 'n/1', 'n/2']))
  store.at(4).append([make_sample('n/0'), make_sample('n/1')])
  store.at(4).score([score_of('n/1')])
  store.close()
  report = audit(directory)
  assert (
    report.ok and report.live == ('n/0', 'n/1', 'n/2', 'w/0', 'w/1') and report.unscored == ('n/0',)
  )
  assert 'stored and never scored 1: n/0' in report.lines
  assert [entry.uid for entry in browse.find(directory, state='stored')] == ['n/1', 'n/0']
