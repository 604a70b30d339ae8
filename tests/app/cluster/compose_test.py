"""From a configuration to a job, and what cannot become one."""

import functools
import pathlib
import stat

import pytest

from jaxrl_llm.app.cluster.compose import Layout, compose
from jaxrl_llm.app.cluster.files import write_files
from jaxrl_llm.app.cluster.job import Job, ProcessGroup
from jaxrl_llm.core.errors import UserError

compose = functools.partial(compose, program=('jaxrl',))
VLLM = {'rollout.engine': 'vllm'}


def test_a_job_without_services_is_the_command_of_the_trainer(tmp_path):
  job = compose(
    'quickstart',
    {'stages.grpo.steps': '3', 'name': "it's"},
    Layout(nodes=2, processes_per_node=2, cpus=4, restarts=1),
    workdir=tmp_path,
  )
  assert job.trainer.command == (
    'jaxrl',
    'train',
    '--config=quickstart',
    f'--workdir={tmp_path}',
    '--config.stages.grpo.steps=3',
    "--config.name=it's",
  )
  assert (job.name, job.trainer.processes, job.services, job.files) == ('it-s', 4, (), {})


def test_a_file_of_the_configuration_is_found_from_everywhere(tmp_path, monkeypatch):
  (tmp_path / 'mine.py').write_text('from jaxrl_llm.configs.quickstart import get_config\n')
  monkeypatch.chdir(tmp_path)
  assert f'--config={tmp_path}/mine.py' in compose('mine.py', {}, Layout()).trainer.command


@pytest.mark.parametrize(
  ('overrides', 'layout', 'message'),
  [
    ({'learner.mesh.fsdp': '16'}, {'nodes': 2, 'gpus': 4}, 'does not match the number of devices'),
    ({'learner.mesh.fsdp': '7'}, {'nodes': 4, 'tpu': 't', 'topology': '4x4'}, 'number of devices'),
    ({}, {'tpu': 't', 'topology': '4by4'}, '--topology=4by4: wanted the shape'),
    ({}, {'rollout_nodes': 1, 'plaintext': True}, "rollout.engine is 'embedded'"),
    ({}, {'sandboxes': 1, 'plaintext': True}, 'no scorer of kind code'),
    (VLLM, {'rollout_nodes': 1}, 'neither --tls_cert and --tls_key nor --plaintext'),
    ({**VLLM, 'rollout.vllm.addresses': '["unix:/x"]'}, {'rollout_nodes': 1}, 'addresses'),
    ({'no.such': '1'}, {}, 'no'),
  ],
)
def test_what_does_not_fit_is_one_line(overrides, layout, message, tmp_path):
  with pytest.raises(UserError, match=message) as error:
    compose('quickstart', overrides, Layout(**layout), workdir=tmp_path / 'run')
  assert '\n' not in str(error.value)
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  ('values', 'message'),
  [
    ({'nodes': 0}, '--nodes=0: wanted at least 1'),
    ({'slices': 0}, '--slices=0: wanted at least 1'),
    ({'sandboxes': -1}, '--sandboxes=-1: wanted at least 0'),
    ({'tls_cert': 'c.pem'}, 'wanted both, or neither'),
  ],
)
def test_a_layout_without_meaning_is_one_line(values, message):
  with pytest.raises(UserError, match=message):
    Layout(**values)


def test_several_slices_fit_a_mesh_of_their_chips(tmp_path):
  layout = Layout(nodes=8, tpu='tpu-v5-lite-podslice', topology='4x4', slices=2)
  job = compose('quickstart', {'learner.mesh.fsdp': '32'}, layout, workdir=tmp_path)
  assert job.trainer.slices == 2
  with pytest.raises(UserError, match='does not match the number of devices, 32'):
    compose('quickstart', {'learner.mesh.fsdp': '16'}, layout, workdir=tmp_path)


def job_with(files: dict[str, str], workdir) -> Job:
  return Job(
    name='job',
    workdir=str(workdir),
    groups=(ProcessGroup(name='trainer', command=('true',)),),
    files=files,
  )


def test_the_key_is_for_this_user_alone_and_outlives_a_second_submission(tmp_path):
  key = tmp_path / 'run' / 'registry' / 'key'
  write_files(job_with({str(key): 'first'}, tmp_path / 'run'))
  write_files(job_with({str(key): 'second'}, tmp_path / 'run'))
  assert key.read_text() == 'first'
  assert [stat.S_IMODE(path.stat().st_mode) for path in (key, key.parent)] == [0o600, 0o700]


def test_a_key_that_others_can_read_is_refused(tmp_path):
  key = tmp_path / 'key'
  key.write_text('known')
  key.chmod(0o640)
  with pytest.raises(UserError, match=r'other users can read or write it \(mode 640\)'):
    write_files(job_with({str(key): 'new'}, tmp_path))
  assert [*tmp_path.iterdir()] == [key]


@pytest.mark.parametrize('target', ['elsewhere', 'nowhere'])
def test_a_link_in_the_place_of_the_key_is_refused(target, tmp_path):
  (tmp_path / 'elsewhere').write_text('of others')
  (tmp_path / 'key').symlink_to(tmp_path / target)
  with pytest.raises(UserError, match='wanted a regular file of this user'):
    write_files(job_with({str(tmp_path / 'key'): 'new'}, tmp_path))
  assert not (tmp_path / 'nowhere').exists()


def test_a_run_directory_that_cannot_be_made_is_one_line(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match='cannot be written'):
    write_files(job_with({}, tmp_path / 'file' / 'run'))


def services_of(job: Job) -> dict[str, str]:
  return {group.name: ' '.join(group.command) for group in job.services}


def test_services_and_trainer_meet_in_the_registry_of_the_run(tmp_path):
  layout = Layout(rollout_nodes=2, rollout_servers=2, rollout_gpus=4, explorers=3, plaintext=True)
  job = compose('quickstart', VLLM, layout, workdir=tmp_path)
  registry = f'--registry={tmp_path}/registry'
  assert {group.name: group.processes for group in job.services} == {'rollout': 4, 'explorer': 3}
  assert all(registry in command for command in services_of(job).values())
  assert '--host=0.0.0.0' in services_of(job)['rollout']
  assert f'--publish_root={tmp_path}/published' in services_of(job)['rollout']
  trainer = job.trainer.command
  assert f'--config.registry.directory={tmp_path}/registry' in trainer
  assert '--config.rollout.vllm.discover=4' in trainer
  assert f'--config.rollout.vllm.publish_dir={tmp_path}/published' in trainer
  (key,) = job.files.items()
  assert key[0] == f'{tmp_path}/registry/key' and len(key[1]) >= 32
  assert not any(key[1] in ' '.join(group.command) for group in job.groups)


def test_services_of_one_machine_listen_on_sockets_alone(tmp_path):
  layout = Layout(rollout_nodes=1, rollout_servers=2)
  job = compose('quickstart', VLLM, layout, workdir=tmp_path, one_machine=True)
  command = services_of(job)['rollout']
  assert '--host' not in command and '--publish_root' not in command


def test_sandbox_hosts_are_those_of_the_scorer_of_code(tmp_path):
  scorers = '[{"name":"tests","kind":"code","options":{}}]'
  layout = Layout(sandboxes=2, tls_cert='c.pem', tls_key='k.pem', ca_file='ca.pem')
  job = compose('quickstart', {'rewards.scorers': scorers}, layout, workdir=tmp_path)
  assert '--config.rewards.scorers.tests.options.discover="*"' in job.trainer.command
  assert f'--tls_cert={pathlib.Path.cwd()}/c.pem' in services_of(job)['scorer']
