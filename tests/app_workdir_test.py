"""One live run in a directory at a time, and one configuration for good."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from jaxrl_llm.app.schema import Config
from jaxrl_llm.app.workdir import Workdir, WorkdirInUse
from jaxrl_llm.config.load import load_file
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rollout.crew import ExplorersConfig

ROOT = pathlib.Path(__file__).parents[1]
HOLDER = """
import pathlib, sys, time
from jaxrl_llm.app.workdir import Workdir
held = Workdir(pathlib.Path(sys.argv[1]))
sys.stdout.write('held' + chr(10))
sys.stdout.flush()
time.sleep(3600)
"""


@pytest.fixture(scope='module')
def config():
  return load_file(str(ROOT / 'configs' / 'quickstart.py'), Config)


def test_a_directory_held_by_a_live_process_is_refused_by_its_pid_and_free_once_it_is_killed(tmp_path):
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
  with pytest.raises(WorkdirInUse, match=f'process {os.getpid()}'):  # the pid of the one that died is gone
    Workdir(path)
  assert workdir.path == path


def test_the_lock_does_not_outlive_its_process_in_a_child_that_it_started(tmp_path):
  """A scorer or a server that is left behind must not block the restart."""
  starter = HOLDER.replace(
    'time.sleep(3600)', "import subprocess; subprocess.Popen(['sleep', '3600'], stdout=subprocess.DEVNULL)"
  ).replace("'held'", 'str(held.path)')
  env = {**os.environ, 'PYTHONPATH': str(ROOT)}
  # A session of its own, so that the child that stays behind can be ended with it.
  with subprocess.Popen(
    [sys.executable, '-c', starter, str(tmp_path)], env=env, start_new_session=True, stdout=subprocess.DEVNULL
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


def test_the_first_start_writes_the_configuration_and_the_same_one_is_welcome_again(tmp_path, config):
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
  assert not (tmp_path / 'tokenizer').exists() and not (tmp_path / 'data').exists(), 'they follow from the old one'


def test_a_changed_configuration_is_refused_with_the_keys_that_differ_and_nothing_is_written(tmp_path, config):
  workdir = Workdir(tmp_path)
  workdir.adopt(config)
  (tmp_path / 'checkpoints' / '3').mkdir(parents=True)
  (tmp_path / 'checkpoints' / '3' / 'COMMIT').touch()
  written = (tmp_path / 'config.json').read_text()
  stage = dataclasses.replace(config.stages[1], group_size=3)
  changed = dataclasses.replace(config, seed=7, stages=(config.stages[0], stage))
  with pytest.raises(UserError) as caught:
    workdir.adopt(changed)
  message = str(caught.value)
  assert '\n' not in message
  assert f'seed: {config.seed!r} in the run, 7 now' in message
  assert f'group_size: {config.stages[1].group_size} in the run, 3 now' in message
  assert 'learner' not in message  # only what differs
  assert f'--init_from={tmp_path}' in message
  assert (tmp_path / 'config.json').read_text() == written


@pytest.mark.parametrize('content', [b'', b'{"name": ', b'\xff\xfe\x00', b'[]', b'3'])
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


def test_a_run_may_be_resumed_with_other_explorers(tmp_path, config):
  workdir = Workdir(tmp_path / 'run')
  workdir.adopt(config)
  (tmp_path / 'run' / 'checkpoints' / '3').mkdir(parents=True)
  (tmp_path / 'run' / 'checkpoints' / '3' / 'COMMIT').touch()
  for explorers in (ExplorersConfig(), ExplorersConfig(processes=3, silent_s=7.0), None):
    workdir.adopt(dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, explorers=explorers)))
