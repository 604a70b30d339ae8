"""Archives: complete at every moment, and nothing in them is believed unchecked."""

import os
import pathlib

import object_store
import pytest

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.runtime import archive as module
from jaxrl_llm.runtime.archive import Archive, ArchiveConfig, ArchiveFailed


@pytest.fixture(params=['path', pytest.param('s3', marks=pytest.mark.full)])
def location(request, tmp_path, monkeypatch):
  """An archive in a directory, and one in an object store."""
  if request.param == 'path':
    return str(tmp_path / 'archive')
  for name, value in object_store.serve().items():
    monkeypatch.setenv(name, value)
  return f's3://bucket/{tmp_path.name}'


def new_archive(location, **options) -> Archive:
  return Archive(ArchiveConfig(location=location, **options), threads=2)


def run_directory(path: pathlib.Path) -> pathlib.Path:
  path.mkdir()
  (path / 'lock').touch()
  return path


def written(folder: pathlib.Path, **contents: str) -> dict[str, pathlib.Path]:
  """Files of a run directory by their path there; `_` in a name stands for `/`."""
  folder.mkdir(exist_ok=True)
  files = {}
  for name, content in contents.items():
    (folder / name).write_text(content)
    files[name.replace('_', '/')] = folder / name
  return files


def contents(path: pathlib.Path) -> dict[str, str]:
  return {
    file.relative_to(path).as_posix(): file.read_text()
    for file in path.rglob('*')
    if file.is_file() and file.name not in ('lock', module.FILE)
  }


def objects(archive) -> dict[str, int]:
  directory = archive._root / 'objects'
  return {name: (directory / name).stat().length for name in module._names(directory)}


def test_a_fresh_directory_gets_the_newest_commit_and_equal_contents_are_stored_once(
  location, tmp_path
):
  archive = new_archive(location)
  assert archive.open(run_directory(tmp_path / 'run'), commits=[]) is None
  first = written(tmp_path / 'files', checkpoints_3_COMMIT='3', a='same', b='same', c='before')
  assert archive.ship(3, first, keep=[]).bytes_written == len('3' + 'same' + 'before')
  second = written(tmp_path / 'files', checkpoints_6_COMMIT='6', a='same', c='after!')
  assert archive.ship(6, second, keep=[3]).bytes_written == len('6' + 'after!')
  assert archive.steps() == [3, 6] and len(objects(archive)) == 5
  fresh = run_directory(tmp_path / 'fresh')
  assert new_archive(location).open(fresh, commits=[]) == 6
  # Later stages may start from the weights of earlier commits.
  checkpoints = {'checkpoints/3/COMMIT': '3', 'checkpoints/6/COMMIT': '6'}
  assert contents(fresh) == {**checkpoints, 'a': 'same', 'c': 'after!'}
  old = run_directory(tmp_path / 'old')
  new_archive(location).copy_to(old, 3)
  assert contents(old) == {
    'checkpoints/3/COMMIT': '3',
    'a': 'same',
    'b': 'same',
    'c': 'before',
  }


def test_commits_that_are_not_kept_go_with_their_contents(location, tmp_path):
  archive = new_archive(location)
  archive.open(run_directory(tmp_path / 'run'), commits=[])
  for step in range(1, 5):
    files = written(tmp_path / 'files', shared='shared', own=f'of {step}')
    archive.ship(step, files, keep=[step - 1])
  assert archive.steps() == [3, 4]
  assert sorted(objects(archive).values()) == [4, 4, 6]


def test_a_start_elsewhere_ends_this_one_and_neither_loses_a_commit(location, tmp_path):
  archive = new_archive(location)
  archive.open(run_directory(tmp_path / 'run'), commits=[])
  archive.ship(3, written(tmp_path / 'files', a='3'), keep=[])
  elsewhere = new_archive(location)
  assert elsewhere.open(run_directory(tmp_path / 'other'), commits=[]) == 3
  with pytest.raises(ArchiveFailed, match=r'started on .* too') as refused:
    archive.ship(6, written(tmp_path / 'files', a='6'), keep=[3])
  assert len(str(refused.value).splitlines()) == 1
  elsewhere.ship(4, written(tmp_path / 'files', a='4'), keep=[3])
  assert elsewhere.steps() == [3, 4]
  # The first host, started again, would repeat what went on elsewhere.
  with pytest.raises(UserError, match=r'commit of step 4.*ends at step 3.*move .* away'):
    new_archive(location).open(tmp_path / 'run', commits=[3])


def test_an_archive_belongs_to_one_run(location, tmp_path):
  archive = new_archive(location)
  archive.open(run_directory(tmp_path / 'run'), commits=[])
  archive.ship(3, written(tmp_path / 'files', a='3'), keep=[])
  with pytest.raises(UserError, match='another run'):
    new_archive(location).open(run_directory(tmp_path / 'other'), commits=[7])
  # The run itself goes on, also if its directory has later commits than the archive.
  assert new_archive(location).open(tmp_path / 'run', commits=[3, 6]) is None


def test_files_of_a_run_without_commits_are_not_mixed_with_those_of_the_archive(tmp_path):
  location = str(tmp_path / 'archive')
  archive = new_archive(location)
  archive.open(run_directory(tmp_path / 'run'), commits=[])
  archive.ship(3, written(tmp_path / 'files', a='3'), keep=[])
  begun = run_directory(tmp_path / 'begun')
  (begun / 'metrics.jsonl').write_text('{}')
  with pytest.raises(UserError, match=r'metrics.jsonl.*move .* away'):
    new_archive(location).open(begun, commits=[])
  assert contents(begun) == {'metrics.jsonl': '{}'}


def test_an_interrupted_fetch_is_continued(tmp_path, monkeypatch):
  location = str(tmp_path / 'archive')
  archive = new_archive(location)
  archive.open(run_directory(tmp_path / 'run'), commits=[])
  files = written(tmp_path / 'files', a='first', b='second', checkpoints_3_COMMIT='3')
  archive.ship(3, files, keep=[])
  fresh, fetched = run_directory(tmp_path / 'fresh'), []
  whole = Archive._fetch

  def cut(self, target, stored):
    if fetched:
      raise KeyboardInterrupt
    fetched.append(target.name)
    whole(self, target, stored)

  monkeypatch.setattr(Archive, '_fetch', cut)
  with pytest.raises(KeyboardInterrupt):
    Archive(ArchiveConfig(location=location), threads=1).open(fresh, commits=[])
  assert 'checkpoints/3/COMMIT' not in contents(fresh)
  monkeypatch.setattr(Archive, '_fetch', whole)
  assert new_archive(location).open(fresh, commits=[]) == 3
  assert contents(fresh) == {'a': 'first', 'b': 'second', 'checkpoints/3/COMMIT': '3'}


def test_a_store_that_fails_for_a_while_is_tried_again(tmp_path, monkeypatch):
  location = str(tmp_path / 'archive')
  archive = new_archive(location)
  archive.open(run_directory(tmp_path / 'run'), commits=[])
  monkeypatch.setattr(module, '_FIRST_PAUSE_S', 0.01)
  (tmp_path / 'archive' / 'objects').mkdir()
  (tmp_path / 'archive' / 'objects').chmod(0o500)
  pauses = []

  def pause(seconds):
    pauses.append(seconds)
    if len(pauses) == 3:
      heal()

  def fail(self, content, path):
    raise OSError('the network is unreachable')

  whole = Archive._put
  monkeypatch.setattr(Archive, '_put', fail)

  def heal():
    monkeypatch.setattr(Archive, '_put', whole)
    (tmp_path / 'archive' / 'objects').chmod(0o700)

  monkeypatch.setattr(module.time, 'sleep', pause)
  archive.ship(3, written(tmp_path / 'files', a='3'), keep=[])
  assert pauses == [0.01, 0.02, 0.04] and archive.steps() == [3]


def test_a_store_that_keeps_failing_ends_the_run_with_one_line(tmp_path, monkeypatch):
  location = str(tmp_path / 'archive')
  archive = new_archive(location, deadline_s=0.05)
  archive.open(run_directory(tmp_path / 'run'), commits=[])
  archive.ship(3, written(tmp_path / 'files', a='3'), keep=[])

  def fail(self, content, path):
    raise OSError('the network is unreachable\nand more')

  monkeypatch.setattr(Archive, '_put', fail)
  monkeypatch.setattr(module, '_FIRST_PAUSE_S', 0.01)
  with pytest.raises(ArchiveFailed, match=r'network is unreachable.*complete in the run') as failed:
    archive.ship(6, written(tmp_path / 'files', a='6'), keep=[3])
  assert len(str(failed.value).splitlines()) == 1
  assert archive.steps() == [3]


def test_a_file_that_changes_meanwhile_is_not_stored_under_its_old_digest(location, tmp_path):
  archive = new_archive(location, deadline_s=0.01)
  archive.open(run_directory(tmp_path / 'run'), commits=[])
  files = written(tmp_path / 'files', a='before')
  status = files['a'].stat()
  archive._stored(files['a'])
  files['a'].write_text('after!')
  os.utime(files['a'], ns=(status.st_atime_ns, status.st_mtime_ns))
  with pytest.raises(ArchiveFailed, match='changed while it was archived'):
    archive.ship(3, files, keep=[])
  assert archive.steps() == [] and objects(archive) == {}


@pytest.mark.parametrize(
  'marker, says',
  [
    ('{', 'not a JSON object'),
    ('[]', 'not a JSON object'),
    ('{"a": 5}', 'no digest and size'),
    ('{"a": ["../../etc", 5]}', 'no digest and size'),
    ('{"a": ["%s", -1]}' % ('0' * 32), 'no digest and size'),
    ('{"../a": ["%s", 1]}' % ('0' * 32), 'no path in a run directory'),
    ('{"/etc/a": ["%s", 1]}' % ('0' * 32), 'no path in a run directory'),
    ('{"a/../../b": ["%s", 1]}' % ('0' * 32), 'no path in a run directory'),
    ('{"": ["%s", 1]}' % ('0' * 32), 'no path in a run directory'),
    ('{"a": ["%s", 1]}' % ('0' * 32), 'cannot be copied'),
  ],
)
def test_a_damaged_or_hostile_marker_is_one_line_and_writes_nothing(tmp_path, marker, says):
  location = tmp_path / 'archive'
  archive = new_archive(str(location))
  archive.open(run_directory(tmp_path / 'run'), commits=[])
  (location / 'commits').mkdir()
  (location / 'commits' / '3.json').write_text(marker)
  fresh = run_directory(tmp_path / 'fresh')
  with pytest.raises(UserError, match=says) as refused:
    new_archive(str(location)).open(fresh, commits=[])
  assert len(str(refused.value).splitlines()) == 1
  assert [name for name in contents(fresh) if name != 'archive.fetching'] == []


def test_an_archive_without_the_id_of_its_run_is_refused(tmp_path):
  location = tmp_path / 'archive'
  archive = new_archive(str(location))
  archive.open(run_directory(tmp_path / 'run'), commits=[])
  archive.ship(3, written(tmp_path / 'files', a='content'), keep=[])
  (location / 'run.json').unlink()
  fresh = run_directory(tmp_path / 'fresh')
  with pytest.raises(UserError, match=r'no run\.json'):
    new_archive(str(location)).open(fresh, commits=[])
  assert contents(fresh) == {}


def test_a_damaged_object_is_refused(tmp_path):
  location = tmp_path / 'archive'
  archive = new_archive(str(location))
  archive.open(run_directory(tmp_path / 'run'), commits=[])
  archive.ship(3, written(tmp_path / 'files', a='content'), keep=[])
  (file,) = (location / 'objects').iterdir()
  file.write_text('c0ntent')
  with pytest.raises(UserError, match='is damaged'):
    new_archive(str(location)).copy_to(run_directory(tmp_path / 'fresh'), 3)
  assert contents(tmp_path / 'fresh').keys() == {'archive.fetching'}


@pytest.mark.parametrize(
  'location', ['runs/mine', 'ftp://host/x', 's3://', 'gs:///', 'file:///tmp/x', '']
)
def test_locations_that_are_none_are_refused(location):
  with pytest.raises(UserError, match=r'archive\.location'):
    ArchiveConfig(location=location)


def test_a_missing_library_is_named_with_its_command(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(UserError, match=r"gcsfs.*pip install 'jaxrl_llm\[cloud\]'"):
    Archive(ArchiveConfig(location='gs://bucket/run'))
