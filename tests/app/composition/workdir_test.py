"""One live run in a directory at a time, and one configuration for good."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest
from paths import ROOT

from jaxrl_llm.app.composition.changes import is_below
from jaxrl_llm.app.composition.lock import WorkdirInUse
from jaxrl_llm.app.composition.workdir import (
  Workdir,
  check_configuration,
  is_live,
  made_files,
)
from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.load import load_file
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.replay.index import open_store
from jaxrl_llm.rollout.explorers.crew import ExplorersConfig

HOLDER = """
import pathlib, sys, time
from jaxrl_llm.app.composition.workdir import Workdir
held = Workdir(pathlib.Path(sys.argv[1]))
sys.stdout.write('held' + chr(10))
sys.stdout.flush()
time.sleep(3600)
"""


@pytest.fixture(scope='module')
def config():
  return load_file(str(ROOT / 'configs' / 'quickstart.py'), Config)


@pytest.mark.full
def test_a_directory_held_by_a_live_process_is_refused_by_its_pid_and_free_once_it_is_killed(
  tmp_path,
):
  path = tmp_path / 'run'
  env = {**os.environ, 'PYTHONPATH': str(ROOT)}
  with subprocess.Popen(
    [sys.executable, '-c', HOLDER, str(path)], env=env, stdout=subprocess.PIPE, text=True
  ) as holder:
    try:
      assert holder.stdout.readline() == 'held\n'
      with pytest.raises(WorkdirInUse) as caught:
        Workdir(path)
      assert caught.value.exit_code == 2
      assert str(path) in str(caught.value)
      assert f'process {holder.pid}' in str(caught.value)
      assert '\n' not in str(caught.value)
    finally:
      holder.send_signal(signal.SIGKILL)
  workdir = Workdir(path)
  # the pid of the one that died is gone
  with pytest.raises(WorkdirInUse, match=f'process {os.getpid()}'):
    Workdir(path)
  assert workdir.path == path


@pytest.mark.full
def test_the_lock_does_not_outlive_its_process_in_a_child_that_it_started(tmp_path):
  """A scorer or a server that is left behind must not block the restart."""
  starter = HOLDER.replace(
    'time.sleep(3600)',
    "import subprocess; subprocess.Popen(['sleep', '3600'], stdout=subprocess.DEVNULL)",
  ).replace("'held'", 'str(held.path)')
  env = {**os.environ, 'PYTHONPATH': str(ROOT)}
  # A session of its own, so that the child that stays behind can be ended with it.
  with subprocess.Popen(
    [sys.executable, '-c', starter, str(tmp_path)],
    env=env,
    start_new_session=True,
    stdout=subprocess.DEVNULL,
  ) as process:
    process.wait()
    try:
      Workdir(tmp_path)
    finally:
      os.killpg(process.pid, signal.SIGKILL)


def test_a_path_that_cannot_be_a_directory_is_one_line(tmp_path):
  file = tmp_path / 'file'
  file.write_text('')
  for path in (file, file / 'run'):
    with pytest.raises(UserError, match=r'^--workdir=[^\n]*$') as caught:
      Workdir(path)
    assert str(path) in str(caught.value)


def test_the_first_start_writes_the_configuration_and_the_same_one_is_welcome_again(
  tmp_path, config
):
  workdir = Workdir(tmp_path)
  workdir.adopt(config)
  written = (tmp_path / 'config.json').read_text()
  assert json.loads(written)['stages'][0]['name'] == config.stages[0].name
  workdir.adopt(config)
  workdir.adopt(load_file(str(ROOT / 'configs' / 'quickstart.py'), Config))
  assert (tmp_path / 'config.json').read_text() == written


def test_before_the_first_commit_a_changed_configuration_starts_afresh(tmp_path, config):
  """A mistake in the first command must not spoil the directory."""
  workdir = Workdir(tmp_path)
  workdir.adopt(config)
  for name in ('tokenizer', 'data', 'checkpoints/3'):  # a checkpoint without COMMIT is none
    (tmp_path / name).mkdir(parents=True)
  workdir.adopt(config)
  assert (tmp_path / 'tokenizer').exists() and (tmp_path / 'data').exists()
  workdir.adopt(dataclasses.replace(config, seed=7))
  assert json.loads((tmp_path / 'config.json').read_text())['seed'] == 7
  assert not (tmp_path / 'tokenizer').exists() and not (tmp_path / 'data').exists(), (
    'they follow from the old one'
  )


def test_a_changed_configuration_is_refused_with_the_keys_that_differ_and_nothing_is_written(
  tmp_path, config
):
  workdir = Workdir(tmp_path)
  workdir.adopt(config)
  (tmp_path / 'checkpoints' / '3').mkdir(parents=True)
  (tmp_path / 'checkpoints' / '3' / 'COMMIT').touch()
  written = (tmp_path / 'config.json').read_text()
  grpo = config.stages[1]
  stage = dataclasses.replace(grpo, source=dataclasses.replace(grpo.source, group_size=3))
  changed = dataclasses.replace(config, seed=7, stages=(config.stages[0], stage))
  with pytest.raises(UserError) as caught:
    workdir.adopt(changed)
  message = str(caught.value)
  assert '\n' not in message
  assert f'seed: {config.seed!r} in the run, 7 now' in message
  assert f'group_size: {grpo.source.group_size} in the run, 3 now' in message
  assert 'learner' not in message  # only what differs
  assert f'--branch_from={tmp_path}:3 --workdir={tmp_path}-branch' in message
  assert (tmp_path / 'config.json').read_text() == written


@pytest.mark.parametrize('content', [b'', b'{"name": ', b'\xff\xfe\x00', b'[]', b'3', b'[' * 9999])
def test_a_file_that_is_no_configuration_is_one_line(tmp_path, config, content):
  workdir = Workdir(tmp_path)
  (tmp_path / 'config.json').write_bytes(content)
  with pytest.raises(UserError, match=r'^[^\n]*config\.json[^\n]*$'):
    workdir.adopt(config)
  assert (tmp_path / 'config.json').read_bytes() == content


def test_a_run_may_be_resumed_with_other_servers_but_not_with_other_arithmetic(tmp_path, config):
  Workdir(tmp_path / 'run').adopt(config)
  (tmp_path / 'run' / 'checkpoints' / '3').mkdir(parents=True)
  (tmp_path / 'run' / 'checkpoints' / '3' / 'COMMIT').touch()

  def with_vllm(**fields):
    vllm = dataclasses.replace(config.rollout.vllm, **fields)
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, vllm=vllm))

  workdir = Workdir(tmp_path / 'run')
  workdir.adopt(with_vllm(addresses=('unix:/elsewhere',), servers=3, latency_s=5.0))
  with pytest.raises(UserError, match=r'rollout\.vllm\.dtype'):
    workdir.adopt(with_vllm(dtype='bfloat16'))


def test_a_field_whose_name_begins_like_one_that_may_change_may_not():
  assert is_below('rollout.vllm.servers', ('rollout.vllm.servers',)) and is_below('a.b.c', ('a.b',))
  assert not is_below('rollout.engine_options.server_model', ('rollout.engine_options.server',))


def test_a_run_may_be_resumed_with_other_explorers(tmp_path, config):
  workdir = Workdir(tmp_path / 'run')
  workdir.adopt(config)
  (tmp_path / 'run' / 'checkpoints' / '3').mkdir(parents=True)
  (tmp_path / 'run' / 'checkpoints' / '3' / 'COMMIT').touch()
  for explorers in (ExplorersConfig(), ExplorersConfig(processes=3, silent_s=7.0), None):
    workdir.adopt(
      dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, explorers=explorers))
    )


def test_commits_without_their_configuration_are_refused(tmp_path, config):
  workdir = Workdir(tmp_path)
  (tmp_path / 'checkpoints' / '3').mkdir(parents=True)
  (tmp_path / 'checkpoints' / '3' / 'COMMIT').touch()
  with pytest.raises(UserError, match=r'^[^\n]*config\.json: missing[^\n]*restore it[^\n]*$'):
    workdir.adopt(config)
  assert not (tmp_path / 'config.json').exists()


@pytest.fixture
def resumable(tmp_path):
  """A run directory, and what its commit at step 2 names."""
  store = open_store(tmp_path / 'replay')
  for step in range(2):
    store.at(step).record_plan({})
  name = store.name
  store.close()
  for file in ('metrics.jsonl', 'tokenizer/tokenizer.json', 'data/sft.arrayrecord'):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text('some')
  workdir = Workdir(tmp_path)
  attempt = workdir.next_attempt()
  commit = {'step': 2, 'attempt': attempt, 'store': name, 'files': made_files(tmp_path)}
  assert sorted(commit['files']) == ['data/sft.arrayrecord', 'tokenizer/tokenizer.json']
  return workdir, commit


def test_a_commit_is_resumed_where_all_that_it_names_is_there_also_one_that_names_little(resumable):
  workdir, commit = resumable
  workdir.check(commit)
  workdir.check({'step': 2})


@pytest.mark.parametrize(
  ('file', 'told'),
  [
    ('attempt', 'changed: attempt;'),
    ('metrics.jsonl', 'changed: metrics.jsonl;'),
    ('replay/index.sqlite', 'changed: {}/replay/index.sqlite (store {store}) (jaxrl buffer '),
    ('data/sft.arrayrecord', 'changed: data/sft.arrayrecord of 4 bytes;'),
    ('tokenizer/tokenizer.json', 'changed: tokenizer/tokenizer.json of 4 bytes;'),
  ],
)
def test_a_commit_is_refused_where_a_thing_that_it_names_is_gone_and_nothing_is_written(
  resumable, file, told
):
  workdir, commit = resumable
  (workdir.path / file).unlink()
  before = sorted(workdir.path.rglob('*'))
  with pytest.raises(UserError) as caught:
    workdir.check(commit)
  message = str(caught.value)
  assert '\n' not in message and 'its commit at step 2' in message
  assert told.format(workdir.path, store=commit['store']) in message
  assert sorted(workdir.path.rglob('*')) == before


def test_all_that_is_gone_is_said_at_once_and_so_is_a_file_of_another_size(resumable):
  workdir, commit = resumable
  (workdir.path / 'attempt').unlink()
  (workdir.path / 'replay' / 'index.sqlite').unlink()
  (workdir.path / 'data' / 'sft.arrayrecord').write_text('another')
  with pytest.raises(
    UserError, match=r'attempt; data/sft.arrayrecord of 4 bytes \(it has 7\); .*index\.sqlite'
  ):
    workdir.check(commit)
  with pytest.raises(UserError, match=r'attempt; [^;]*index\.sqlite \([^;]*rebuild[^;]*; restore'):
    workdir.check({'step': 2})


def test_starts_are_numbered_one_after_the_other(tmp_path):
  workdir = Workdir(tmp_path)
  assert [workdir.next_attempt() for _ in range(3)] == [0, 1, 2]
  assert (tmp_path / 'attempt').read_text() == '2' and workdir.next_attempt(least=2) == 3


@pytest.mark.parametrize(
  'content', [b'', b'\n', b'two', b'-1', b'1.5', b'\xff\x00', b'1 2', b'9' * 5000]
)
def test_a_file_that_holds_no_number_of_a_start_is_one_line_and_left_as_it_is(tmp_path, content):
  workdir = Workdir(tmp_path)
  (tmp_path / 'attempt').write_bytes(content)
  with pytest.raises(
    UserError,
    match=r'^[^\n]*attempt: holds [^\n]*restore it[^\n]*events\.jsonl and events\.1\.jsonl$',
  ):
    workdir.next_attempt()
  assert (tmp_path / 'attempt').read_bytes() == content


def test_a_number_below_that_of_the_commit_is_refused(tmp_path):
  """An older copy: two starts would name different weights alike."""
  workdir = Workdir(tmp_path)
  (tmp_path / 'attempt').write_text('3')
  with pytest.raises(UserError, match="holds '3', wanted the number of the last start, at least 5"):
    workdir.next_attempt(least=5)


def test_the_configuration_and_the_number_of_a_start_are_on_the_disk_before_they_have_their_names(
  tmp_path, config, monkeypatch
):
  synced, fsync, replace = set(), os.fsync, os.replace

  def sync(descriptor):
    synced.add(os.readlink(f'/proc/self/fd/{descriptor}'))
    fsync(descriptor)

  def replaced(source, target):
    assert str(source) in synced, f'{target} has its name before it is on the disk'
    replace(source, target)

  monkeypatch.setattr('os.fsync', sync)
  monkeypatch.setattr('os.replace', replaced)
  workdir = Workdir(tmp_path)
  workdir.adopt(config)
  workdir.next_attempt()
  assert (
    str(tmp_path) in synced and {f'{tmp_path}/config.json.tmp', f'{tmp_path}/attempt.tmp'} <= synced
  )


def test_whether_a_run_is_live_and_whose_it_is_can_be_asked_without_writing(config, tmp_path):
  path = tmp_path / 'run'
  assert not is_live(path) and check_configuration(path, config) is None
  assert not path.exists()
  held = Workdir(path)
  held.adopt(config)
  before = {file: file.read_bytes() for file in path.rglob('*') if file.is_file()}
  assert is_live(path) and check_configuration(path, config) == ()
  assert check_configuration(path, dataclasses.replace(config, seed=1)) is None, 'no commit yet'
  held.close()
  assert not is_live(path)
  assert {file: file.read_bytes() for file in path.rglob('*') if file.is_file()} == before
