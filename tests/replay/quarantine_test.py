"""What a store's index does not name is kept until a person says otherwise; what a commit names has
to be there.
"""

import os
import pathlib
import shutil
import sqlite3
import subprocess
import sys

import pytest
from paths import ROOT
from stored import store_group

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.replay import browse, quarantine
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.committed import missing
from jaxrl_llm.replay.index import open_store
from jaxrl_llm.replay.segments import write_segment

STEPS = 3


@pytest.fixture
def replay(tmp_path):
  """Of three completed batches, each with its plan and a segment of two samples."""
  store = open_store(tmp_path / 'replay')
  for step in range(STEPS):
    uids = [f'{step}/0', f'{step}/1']
    store_group(store, uids, step)
    store.at(step).seal(uids)
    store.at(step).trained(uids)
    store.at(step).record_plan({})
  store.close()
  return tmp_path / 'replay'


def contents(folder: pathlib.Path) -> dict[str, bytes]:
  return {path.name: path.read_bytes() for path in folder.iterdir()}


def name_of(replay: pathlib.Path) -> str:
  store = open_store(replay)
  try:
    return store.name
  finally:
    store.close()


def restart(replay: pathlib.Path, commit: int) -> dict[str, int]:
  store = open_store(replay)
  try:
    return store.recover(commit)
  finally:
    store.close()


def test_segments_without_an_index_are_set_aside_and_not_removed(replay):
  sealed = contents(replay / 'segments')
  (replay / 'index.sqlite').unlink()
  assert restart(replay, 0)['files'] == len(sealed) == STEPS
  assert contents(replay / 'quarantine') == sealed and not contents(replay / 'segments')


def test_seals_that_are_undone_and_strangers_are_set_aside_and_the_rest_stays(replay):
  sealed = contents(replay / 'segments')
  (replay / 'segments' / 'stranger').write_bytes(b'x')
  (replay / 'segments' / 'folder').mkdir()
  (replay / 'segments' / 'folder' / 'inside').write_bytes(b'yy')
  assert restart(replay, 2)['files'] == 3
  aside = quarantine.files(replay, 'quarantine')
  assert aside.keys() == {'stranger', 'folder', '00000002-001-000.arrayrecord'}
  assert (aside['stranger'], aside['folder']) == (1, 2)
  assert contents(replay / 'segments').keys() == sealed.keys() - aside.keys()
  assert restart(replay, 2)['files'] == 0, 'nothing is left to set aside'


def test_files_of_one_name_are_all_kept(replay):
  for text in (b'first', b'second', b'third'):
    (replay / 'segments' / 'stranger').write_bytes(text)
    restart(replay, STEPS)
  wanted = {'stranger': b'first', 'stranger.1': b'second', 'stranger.2': b'third'}
  assert contents(replay / 'quarantine') == wanted


def test_what_nothing_claims_is_shown_until_it_is_cleared(replay):
  assert audit(replay).unclaimed == () and browse.unclaimed(replay) == []
  (replay / 'segments' / 'stranger').write_bytes(b'x' * 250_000)
  (line,) = browse.unclaimed(replay)
  assert (
    line
    == 'segments/, not in the index (a start moves it to quarantine/): 0.2 MB in 1 file: stranger'
  )
  restart(replay, STEPS)
  (line,) = browse.unclaimed(replay)
  assert (
    line
    == 'quarantine/, claimed by nothing (--clear_quarantine removes it): 0.2 MB in 1 file: stranger'
  )
  report = audit(replay)
  assert report.ok and line in report.lines and line in browse.summary(replay).lines
  assert quarantine.clear(replay) == {'stranger': 250_000}
  assert audit(replay).unclaimed == () and quarantine.clear(replay) == {}
  assert len(contents(replay / 'segments')) == STEPS


def test_the_command_clears_it(replay):
  (replay / 'segments' / 'stranger').write_bytes(b'x' * 250_000)
  restart(replay, STEPS)
  buffer = [sys.executable, 'launch/buffer.py', f'--workdir={replay.parent}', '--clear_quarantine']
  done = subprocess.run(
    buffer,
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
    env=os.environ | {'PYTHONPATH': str(ROOT)},
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout == f'removed 0.2 MB in 1 files from {replay / "quarantine"}\n'
  assert not (replay / 'quarantine').exists() and audit(replay).ok


def test_a_store_keeps_its_name_and_no_other_has_it(replay, tmp_path):
  name = name_of(replay)
  assert name and name_of(replay) == name
  assert name_of(tmp_path / 'other') != name


def test_a_store_of_an_earlier_version_gets_a_name(replay):
  with sqlite3.connect(replay / 'index.sqlite') as db:
    assert db.execute("DELETE FROM meta WHERE key = 'store'").rowcount == 1
  assert missing(replay, step=STEPS, store=None) == []
  name = name_of(replay)
  assert name and name_of(replay) == name


def test_nothing_is_missing_for_a_commit_of_this_store_or_one_that_names_none(replay):
  for store in (name_of(replay), None):
    for step in range(1, STEPS + 1):
      assert missing(replay, step=step, store=store) == []


@pytest.mark.parametrize('is_named', [True, False])
def test_a_missing_index_is_said_and_nothing_is_made(replay, is_named):
  name = name_of(replay)
  (replay / 'index.sqlite').unlink()
  before = contents(replay / 'segments')
  (gone,) = missing(replay, step=2, store=name if is_named else None)
  of = f' (store {name})' if is_named else ''
  assert gone == f'{replay / "index.sqlite"}{of} (jaxrl buffer --rebuild recreates it)'
  assert contents(replay / 'segments') == before and not (replay / 'index.sqlite').exists()


def test_another_store_in_its_place_is_said(replay, tmp_path):
  name, other = name_of(replay), name_of(tmp_path / 'other')
  shutil.copy(tmp_path / 'other' / 'index.sqlite', replay / 'index.sqlite')
  (gone,) = missing(replay, step=2, store=name)
  assert gone == f'store {name} ({replay / "index.sqlite"} is store {other})'
  (gone,) = missing(replay, step=2, store=None)
  assert gone.startswith('2 of the plans of 2 batches'), (
    'one that names none finds nothing of its own'
  )


def test_an_older_copy_of_the_index_is_said(replay):
  name = name_of(replay)
  (gone,) = missing(replay, step=STEPS + 2, store=name)
  assert gone.startswith(f'2 of the plans of {STEPS + 2} batches (is ')


def test_segments_of_committed_batches_are_wanted_and_found_in_quarantine(replay):
  name = name_of(replay)
  first, second, third = sorted(path.name for path in (replay / 'segments').iterdir())
  (replay / 'segments' / third).unlink()
  assert missing(replay, step=2, store=name) == [], 'sealed after the commit'
  (replay / 'segments' / second).unlink()
  (replay / 'quarantine').mkdir()
  (replay / 'segments' / first).rename(replay / 'quarantine' / first)
  (gone,) = missing(replay, step=2, store=name)
  assert gone == (
    f'of 2 sealed segments in {replay / "segments"} 2 files: {first}, {second} (1 of them in '
    'quarantine/: move them back)'
  )


@pytest.mark.parametrize('damage', ['cut', 'empty', 'another', 'link to nothing', 'directory'])
def test_a_segment_that_is_not_whole_is_said(replay, tmp_path, damage):
  name = name_of(replay)
  first, *_ = sorted((replay / 'segments').iterdir())
  content = first.read_bytes()
  first.unlink()
  match damage:
    case 'cut':
      first.write_bytes(content[:50])
    case 'empty':
      first.touch()
    case 'another':
      write_segment(first.parent, first.name, [b'x'])
    case 'link to nothing':
      first.symlink_to(tmp_path / 'nowhere')
    case 'directory':
      first.mkdir()
  (gone,) = missing(replay, step=2, store=name)
  assert gone.startswith(f'of 2 sealed segments in {replay / "segments"} 1 file: {first.name}')


def test_a_damaged_index_is_one_line(replay):
  index = replay / 'index.sqlite'
  index.write_bytes(index.read_bytes()[:5000])
  with pytest.raises(UserError, match='damaged or not a store') as caught:
    missing(replay, step=2, store=None)
  assert '\n' not in str(caught.value)
