"""Files that a power loss leaves whole, and temporary directories that a kill does not leave for
good.
"""

import asyncio
import errno
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest
from aiohttp import web
from paths import ROOT

from jaxrl_llm.core import disk
from jaxrl_llm.core.net.listener import listening
from jaxrl_llm.rollout.vllm.server import OwnedServer

HOLDER = """
import sys, time
from jaxrl_llm.core.disk import scratch
with scratch(sys.argv[1]) as folder:
  (folder / 'something').write_text('x')
  print(folder, flush=True)
  time.sleep(3600)
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
  monkeypatch.setattr('tempfile.tempdir', str(tmp_path))
  return tmp_path


def start(temporary, prefix='jaxrl-test-'):
  env = {**os.environ, 'PYTHONPATH': str(ROOT), 'TMPDIR': str(temporary)}
  process = subprocess.Popen(
    [sys.executable, '-c', HOLDER, prefix], env=env, stdout=subprocess.PIPE, text=True
  )
  return process, pathlib.Path(process.stdout.readline().strip())


def end(process, signum):
  process.send_signal(signum)
  process.communicate()


def test_what_is_written_is_on_the_disk_before_it_has_its_name_and_the_name_before_it_returns(
  tmp_path, monkeypatch
):
  path, done = tmp_path / 'attempt', []
  fsync, replace = os.fsync, os.replace

  def synced(descriptor):
    done.append(('sync', pathlib.Path(os.readlink(f'/proc/self/fd/{descriptor}')).name))
    fsync(descriptor)

  def replaced(source, target):
    done.append(('replace', pathlib.Path(target).name))
    replace(source, target)

  monkeypatch.setattr('os.fsync', synced)
  monkeypatch.setattr('os.replace', replaced)
  disk.write_durably(path, '7')
  assert path.read_text() == '7' and [child.name for child in tmp_path.iterdir()] == ['attempt']
  assert done == [('sync', 'attempt.tmp'), ('replace', 'attempt'), ('sync', tmp_path.name)]


def test_a_copy_that_fails_leaves_nothing_and_no_copy_replaces_a_file(tmp_path, monkeypatch):
  source, target = tmp_path / 'source', tmp_path / 'folder' / 'target'
  source.write_text('whole')
  copy = shutil.copyfileobj

  def refuse(*_):
    raise OSError(errno.EPERM, 'no hard links')

  def fill(old, new):
    new.write(old.read(3))
    raise OSError(errno.ENOSPC, 'No space left on device')

  monkeypatch.setattr('os.link', refuse)
  monkeypatch.setattr('shutil.copyfileobj', fill)
  with pytest.raises(OSError, match='No space left'):
    disk.link_or_copy(source, target)
  assert not target.exists() and source.read_text() == 'whole'
  monkeypatch.setattr('shutil.copyfileobj', copy)
  disk.link_or_copy(source, target)
  assert target.read_text() == 'whole' and target.stat().st_nlink == 1
  target.write_text('another')
  with pytest.raises(FileExistsError):
    disk.link_or_copy(source, target)
  assert target.read_text() == 'another'


def test_a_directory_goes_with_its_block(temporary):
  with pytest.raises(RuntimeError, match='inside'), disk.scratch('jaxrl-test-') as folder:
    assert folder.parent == temporary and folder.stat().st_mode & 0o777 == 0o700
    raise RuntimeError('inside')
  assert not [*temporary.iterdir()]


def test_what_a_killed_process_left_goes_and_what_a_live_one_uses_stays(temporary):
  (live, used), (dead, left) = start(temporary), start(temporary)
  try:
    end(dead, signal.SIGKILL)
    assert (left / 'something').exists()
    with disk.scratch('jaxrl-test-') as folder:
      assert {*temporary.iterdir()} == {folder, used} and (used / 'something').exists()
  finally:
    end(live, signal.SIGKILL)


def test_without_locks_nobody_removes_a_directory_that_may_be_in_use(temporary, monkeypatch):
  def refuse(*_):
    raise OSError(errno.ENOLCK, 'No locks available')

  with monkeypatch.context() as patch:
    patch.setattr('fcntl.flock', refuse)
    used = disk.scratch('jaxrl-test-')
    folder = used.__enter__()
  with disk.scratch('jaxrl-test-') as other:
    assert {*temporary.iterdir()} == {folder, other}
  used.__exit__(None, None, None)
  assert not [*temporary.iterdir()]


def test_nothing_else_is_touched(temporary):
  unowned, link, other = (
    temporary / 'jaxrl-test-a',
    temporary / 'jaxrl-test-b',
    temporary / 'jaxrl-other-c',
  )
  for folder in (unowned, other):
    folder.mkdir()
  (other / '.owner').touch()
  link.symlink_to(other)
  with disk.scratch('jaxrl-test-') as folder:
    assert {*temporary.iterdir()} == {unowned, link, other, folder}


def test_a_listener_removes_the_folder_of_a_killed_one(temporary):
  process, left = start(temporary, 'jaxrl-crew-')
  end(process, signal.SIGKILL)

  async def check():
    async with listening(web.Application(), name='crew', front=None, routes=()) as (address, _):
      assert not left.exists() and pathlib.Path(address.removeprefix('unix:')).is_socket()

  asyncio.run(check())
  assert not [*temporary.iterdir()]


def test_a_server_removes_the_folder_of_one_whose_owner_and_guard_were_killed(temporary):
  process, left = start(temporary, 'jaxrl-vllm-')
  end(process, signal.SIGKILL)
  server = OwnedServer(None, name='vllm-0', log=temporary / 'log')
  assert not left.exists()
  assert server.address.removeprefix('unix:').startswith(f'{temporary}/jaxrl-vllm-')
  asyncio.run(server.close())
  assert not [*temporary.iterdir()]
