"""Jobs as Kubernetes manifests: their text, the schema of JobSet, and what kubectl is told."""

import copy
import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import cluster_jobs
import hypothesis
import hypothesis.strategies as st
import pytest
import yaml
from paths import ROOT

from jaxrl_llm.app.cluster import jobset
from jaxrl_llm.app.cluster.job import ProcessGroup, ProcessResources
from jaxrl_llm.core.errors import UserError

GOLDEN = pathlib.Path(__file__).parent / 'golden'
SCHEMA = ROOT.parent / 'shared' / 'data' / 'jobset' / 'jobset.schema.json'
OPTIONS = jobset.JobsetOptions(image='example.org/jaxrl:1', claim='runs')
JOBS = {
  'cpu': (cluster_jobs.cpu_job(), OPTIONS),
  'gpus': (
    cluster_jobs.gpu_job(),
    dataclasses.replace(OPTIONS, gpu_type='nvidia-h100-80gb', shm_gib=64, queue='team', user=1000),
  ),
  'v5e-64': (
    cluster_jobs.tpu_job(),
    dataclasses.replace(OPTIONS, namespace='research', priority_class='high', shm_gib=32),
  ),
  'v5e-2x64': (cluster_jobs.tpu_job(slices=2), OPTIONS),
}


def parsed(job, options=OPTIONS) -> dict:
  """The JobSet of a job."""
  return list(yaml.safe_load_all(jobset.text(job, options)))[-1]


def replicated(job, options=OPTIONS) -> dict[str, dict]:
  return {entry['name']: entry for entry in parsed(job, options)['spec']['replicatedJobs']}


def pod(entry: dict) -> dict:
  return entry['template']['spec']['template']['spec']


def variables(entry: dict) -> dict[str, object]:
  return {
    variable['name']: variable.get('value', variable.get('valueFrom'))
    for variable in pod(entry)['containers'][0]['env']
  }


@pytest.mark.parametrize('name', JOBS)
def test_text_equals_the_golden_file(name):
  """After a change that is meant: python tests/app/cluster/jobset_test.py"""
  assert jobset.text(*JOBS[name]) == (GOLDEN / f'jobset-{name}.yaml').read_text()


def closed(schema: dict) -> dict:
  """The schema without unknown fields, which Kubernetes drops silently."""
  schema = copy.deepcopy(schema)
  pending = [schema]
  while pending:
    node = pending.pop()
    if 'properties' in node and not node.get('x-kubernetes-preserve-unknown-fields'):
      node.setdefault('additionalProperties', False)
    for inner in node.values():
      pending += [inner] if isinstance(inner, dict) else []
    pending += [inner for inner in node.get('properties', {}).values() if isinstance(inner, dict)]
  return schema


@pytest.fixture(scope='module')
def validator():
  if not SCHEMA.exists():
    pytest.skip('no ../shared/data/jobset beside the checkout')
  jsonschema = pytest.importorskip('jsonschema')
  return jsonschema.Draft202012Validator(closed(json.loads(SCHEMA.read_text())))


@pytest.mark.parametrize('name', JOBS)
def test_jobset_fits_the_schema(name, validator):
  assert [error.message for error in validator.iter_errors(parsed(*JOBS[name]))] == []


@pytest.mark.parametrize('field', ['sucessPolicy', 'replicas'])
def test_the_closed_schema_finds_an_unknown_field(field, validator):
  document = parsed(*JOBS['cpu'])
  document['spec'][field] = 1
  assert not validator.is_valid(document)


def expand(word: str, environment: dict[str, str]) -> str:
  """What Kubernetes makes of a word of a command (k8s.io/kubernetes/third_party/forked/golang/
  expansion): $$ is $, $(NAME) a variable where there is one.
  """
  found, i = [], 0
  while i < len(word):
    if word[i] != '$' or i + 1 == len(word):
      found.append(word[i])
      i += 1
    elif word[i + 1] == '$':
      found.append('$')
      i += 2
    elif word[i + 1] == '(' and ')' in word[i + 2 :]:
      name = word[i + 2 : word.index(')', i + 2)]
      found.append(environment.get(name, f'$({name})'))
      i += len(name) + 3
    else:
      found.append(word[i : i + 2])
      i += 2
  return ''.join(found)


def test_the_oracle_expands_as_kubernetes_documents():
  assert expand('$(A) $$(A) $(B) $x $', {'A': '1'}) == '1 $(A) $(B) $x $'


text_of_users = st.text(
  st.characters(exclude_categories=['Cs'], exclude_characters='\0') | st.sampled_from('$()\'"\n: ')
)


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(st.lists(text_of_users, max_size=4), text_of_users)
@hypothesis.example(list(cluster_jobs.HOSTILE), 'y')
def test_any_argument_and_value_arrives_as_it_was(arguments, value):
  value = value.replace('\n', '')
  trainer = ProcessGroup(name='trainer', command=('run', *arguments), env={'A': value, 'HOME': 'x'})
  container = pod(replicated(cluster_jobs.job(trainer=trainer))['trainer'])['containers'][0]
  given = {'HOME': 'x', 'A': value}
  assert [expand(word, given) for word in container['command']] == ['run', *arguments]
  assert expand({v['name']: v.get('value') for v in container['env']}['A'], given) == value


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(text_of_users)
@hypothesis.example(''.join(cluster_jobs.HOSTILE))
def test_a_file_is_in_the_secret_as_it_was(content):
  job = cluster_jobs.job(files={'/data/runs/quickstart/registry/key': content})
  secret, _ = yaml.safe_load_all(jobset.text(job, OPTIONS))
  assert secret['kind'] == 'Secret' and secret['stringData'] == {'file-0': content}


def test_every_string_is_quoted():
  """Another parser takes y, 1e3 and 0o17 for something else."""
  trainer = ProcessGroup(name='trainer', command=('y', '1e3', '0o17', '2026-11-24', 'null'))
  lines = jobset.text(cluster_jobs.job(trainer=trainer), OPTIONS).splitlines()
  values = [line.split('- ' if line.lstrip().startswith('- ') else ': ', 1)[-1] for line in lines]
  assert {"'y'", "'1e3'", "'0o17'", "'2026-11-24'", "'null'"} <= set(values)


def test_the_init_container_writes_files_that_only_their_owner_reads(tmp_path):
  """Its command, run here; a key that is there already stays."""
  path, kept = tmp_path / 'run' / 'registry' / "a 'key'", tmp_path / 'kept'
  kept.write_text('old')
  job = cluster_jobs.job(
    workdir=str(tmp_path / 'run'), files={str(path): 'secret\n', str(kept): 'new'}
  )
  options = dataclasses.replace(OPTIONS, mount=str(tmp_path))
  [init] = pod(replicated(job, options)['trainer'])['initContainers']
  command = [expand(word, {}) for word in init['command']]
  for i, content in enumerate(['new', 'secret\n']):
    (tmp_path / f'file-{i}').write_text(content)
  command = [word.replace('/run/jaxrl/files', str(tmp_path)) for word in command]
  for _ in range(2):
    subprocess.run(command, check=True, timeout=30)
    assert path.read_text() == 'secret\n' and path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert kept.read_text() == 'old'


def test_only_the_init_container_sees_the_secret():
  job, options = JOBS['gpus']
  job = dataclasses.replace(job, files={'/data/runs/gpus/registry/key': 'r5Vj2k'})
  secret, found = jobset.text(job, options).split('\n---\n')
  assert 'r5Vj2k' in secret and 'r5Vj2k' not in found
  for entry in yaml.safe_load(found)['spec']['replicatedJobs']:
    [container] = pod(entry)['containers']
    assert {mount['name'] for mount in container['volumeMounts']} == {'data', 'shm'}
    [volume] = [volume for volume in pod(entry)['volumes'] if 'secret' in volume]
    assert volume['secret'] == {'secretName': 'gpus-files', 'defaultMode': 0o400}


def test_trainers_find_each_other_and_services_are_not_of_their_job():
  entries = replicated(*JOBS['gpus'])
  found = variables(entries['trainer'])
  assert found['JAX_COORDINATOR_ADDRESS'] == 'gpus-trainer-0-0.gpus:8476'
  assert found['JAX_NUM_PROCESSES'] == '4'
  assert 'job-completion-index' in json.dumps(found['JAX_PROCESS_ID'])
  assert not [name for name in variables(entries['rollout']) if name.startswith('JAX_')]


def test_on_several_slices_jax_finds_the_job_itself():
  entry = replicated(*JOBS['v5e-2x64'])['trainer']
  assert not [name for name in variables(entry) if name.startswith('JAX_')]
  assert entry['replicas'] == 2 and entry['template']['spec']['completions'] == 16


def test_each_process_of_a_node_is_a_pod_with_its_own_gpus():
  trainer = ProcessGroup(
    name='trainer',
    command=('x',),
    nodes=2,
    processes_per_node=4,
    resources=ProcessResources(gpus=2),
  )
  entry = replicated(cluster_jobs.job(trainer=trainer))['trainer']
  assert entry['template']['spec']['parallelism'] == 8
  assert variables(entry)['JAX_NUM_PROCESSES'] == '8'
  assert pod(entry)['containers'][0]['resources']['limits'] == {'nvidia.com/gpu': '2'}


def test_unusable_input_ends_the_job_at_once_and_other_failures_restart_it():
  job = cluster_jobs.gpu_job()
  spec = parsed(job)['spec']
  assert spec['failurePolicy']['maxRestarts'] == job.restarts
  [rule] = spec['failurePolicy']['rules']
  assert rule['action'] == 'FailJobSet' and 'PodFailurePolicy' in rule['onJobFailureReasons']
  trainer, rollout = (entry['template']['spec'] for entry in spec['replicatedJobs'])
  for entry, hopeless in ((trainer, [1, 2]), (rollout, [2])):
    codes = entry['podFailurePolicy']['rules'][0]
    assert codes['action'] == 'FailJob' and codes['onExitCodes']['values'] == hopeless
  assert trainer['backoffLimit'] == 0 and rollout['backoffLimit'] > 0
  assert spec['successPolicy'] == {'operator': 'All', 'targetReplicatedJobs': ['trainer']}


def test_the_images_interpreter_replaces_that_of_this_machine():
  options = dataclasses.replace(OPTIONS, python='/opt/bin/python')
  for command, wanted in (
    ((sys.executable, '-P', '-m', 'a.b', '-x'), ['/opt/bin/python', '-P', '-m', 'a.b', '-x']),
    (('run', 'a', '-m'), ['run', 'a', '-m']),
    (('run',), ['run']),
  ):
    job = cluster_jobs.job(trainer=ProcessGroup(name='trainer', command=command))
    [container] = pod(replicated(job, options)['trainer'])['containers']
    assert container['command'] == wanted


@pytest.mark.parametrize('directory, wanted', [('/data/code', '/data/code'), ('/home/me', None)])
def test_the_current_directory_counts_where_pods_see_it(directory, wanted):
  entry = replicated(cluster_jobs.job(directory=directory))['trainer']
  assert pod(entry)['containers'][0].get('workingDir') == wanted


@pytest.mark.parametrize(
  'job, options, words',
  [
    (cluster_jobs.cpu_job(), {'image': None}, ['--image is missing', 'container image']),
    (cluster_jobs.cpu_job(), {'claim': None}, ['--claim is missing', 'PersistentVolumeClaim']),
    (cluster_jobs.cpu_job(), {'mount': '/mnt'}, ['/data/runs/cpu', '--mount=/mnt', '--workdir']),
    (
      cluster_jobs.job(trainer=ProcessGroup(name='trainer', command=('x',), nodes=2, slices=2)),
      {},
      ['--slices=2', 'no TPU'],
    ),
    (cluster_jobs.job('1job'), {}, ["begins with '1'", 'letter']),
    (cluster_jobs.job(workdir='/data/../etc'), {}, ['/data/../etc']),
    (cluster_jobs.job(files={'/etc/key': ''}), {}, ['the file /etc/key']),
    (cluster_jobs.job(env={'A': '\udc80'}), {}, ["'\\udc80'", 'not Unicode']),
    (
      cluster_jobs.job('j' * 40, services=[ProcessGroup(name='r' * 20, command=('x',))]),
      {},
      ['longer than', 'shorter name'],
    ),
    (cluster_jobs.tpu_job(nodes=5), {}, ['5 nodes for 1 x 8x8 = 64 chips', '16 or 8 nodes']),
    (cluster_jobs.tpu_job(topology='8by8'), {}, ["'8by8'", 'such as 4x4']),
    (cluster_jobs.tpu_job(rollout='4x4'), {}, ['group rollout', 'several nodes', '2x4']),
    (cluster_jobs.tpu_job(nodes=1, slices=2, topology='2x4'), {}, ['of one node each']),
  ],
)
def test_a_job_that_kubernetes_cannot_run_is_one_line(job, options, words):
  with pytest.raises(UserError) as raised:
    jobset.text(job, dataclasses.replace(OPTIONS, **options))
  assert '\n' not in str(raised.value)
  assert [word for word in words if word not in str(raised.value)] == []


@pytest.mark.parametrize(
  'options',
  [
    {'image': 'a b'},
    {'image': 'a\n'},
    {'claim': 'Runs'},
    {'namespace': '--all-namespaces'},
    {'namespace': 'a/b'},
    {'queue': 'a b'},
    {'gpu_type': '-'},
    {'node_selector': ('a',)},
    {'node_selector': ('a=b c',)},
    {'port': 80},
    {'shm_gib': 0},
    {'user': -1},
    {'mount': 'data'},
    {'mount': '/'},
    {'mount': '/data/../etc'},
    {'python': ''},
  ],
)
def test_an_option_that_kubernetes_refuses_is_named(options):
  with pytest.raises(UserError, match=f'--{next(iter(options))}='):
    jobset.JobsetOptions(**options)


STAND_IN = """\
#!{python}
import json, os, pathlib, sys
folder = pathlib.Path({folder!r})
stdin = sys.stdin.read() if '--filename=-' in sys.argv else ''
with (folder / 'calls').open('a') as file:
  file.write(json.dumps([sys.argv[1:], stdin]) + '\\n')
code, out, err = json.loads((folder / 'answers').read_text()).get(sys.argv[1], [0, '', ''])
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


class Kubectl:
  """A stand-in for kubectl, first in PATH, that records its calls and answers as told."""

  def __init__(self, folder: pathlib.Path):
    self._folder = folder
    program = folder / 'kubectl'
    program.write_text(STAND_IN.format(python=sys.executable, folder=str(folder)))
    program.chmod(0o755)
    self.answer()

  def answer(self, **answers: tuple[int, str, str]) -> None:
    """Sets (exit code, stdout, stderr) by command."""
    (self._folder / 'answers').write_text(json.dumps(answers))

  @property
  def calls(self) -> list[tuple[list[str], str]]:
    path = self._folder / 'calls'
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()]


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
  monkeypatch.setenv('PATH', str(tmp_path), prepend=os.pathsep)
  return Kubectl(tmp_path)


def test_submit_passes_the_manifest_to_kubectl(kubectl):
  job, options = JOBS['v5e-64']
  assert jobset.submit('manifest: é\n', job, options) == 'v5e-64'
  namespace = '--namespace=research'
  assert kubectl.calls == [
    (['get', 'jobset', 'v5e-64', '--ignore-not-found', '--output=name', namespace], ''),
    (['apply', '--filename=-', namespace], 'manifest: é\n'),
  ]


def test_submit_refuses_a_name_that_the_cluster_has(kubectl):
  kubectl.answer(get=(0, 'jobset.jobset.x-k8s.io/cpu\n', ''))
  with pytest.raises(UserError, match='a JobSet of this name; cancel it first'):
    jobset.submit('manifest', *JOBS['cpu'])
  assert [call[0][0] for call in kubectl.calls] == ['get']


def test_a_refused_manifest_leaves_nothing_behind(kubectl):
  kubectl.answer(
    apply=(1, '', 'E1124 03:12:35.8 log\nWarning: old\nerror: forbidden\nsecond line\n')
  )
  with pytest.raises(UserError, match=r'^kubectl apply: error: forbidden second line$'):
    jobset.submit('manifest', *JOBS['cpu'])
  assert kubectl.calls[-1][0] == [
    *('delete', 'jobset/cpu', 'secret/cpu-files', '--ignore-not-found', '--wait=false')
  ]


CONDITION = {'status': 'True', 'lastTransitionTime': '2026-11-24T00:00:00Z', 'reason': 'x'}


@pytest.mark.parametrize(
  'state, wanted',
  [
    ({}, 'PENDING; restarts 0'),
    (
      {
        'restarts': 2,
        'replicatedJobsStatus': [
          {'name': 'trainer', 'active': 1, 'ready': 1, 'succeeded': 0, 'failed': 0, 'suspended': 0}
        ],
      },
      'RUNNING; restarts 2; trainer: 1 active, 1 ready',
    ),
    (
      {'conditions': [{**CONDITION, 'type': 'Failed', 'message': 'two\nlines\x1b'}]},
      'FAILED since 2026-11-24T00:00:00Z: two lines\\x1b; restarts 0',
    ),
    (
      {
        'conditions': [
          {**CONDITION, 'type': 'Suspended', 'status': 'False', 'message': ''},
          {**CONDITION, 'type': 'Completed', 'message': 'done'},
        ]
      },
      'COMPLETED since 2026-11-24T00:00:00Z: done; restarts 0',
    ),
  ],
)
def test_status_is_one_line(kubectl, state, wanted):
  kubectl.answer(get=(0, json.dumps({'status': state}), ''))
  assert jobset.status('cpu', OPTIONS) == wanted
  assert kubectl.calls == [(['get', 'jobset', 'cpu', '--output=json'], '')]


@pytest.mark.parametrize('answer', ['', '[]', '{"status": []}', '{"status": {"conditions": [1]}}'])
def test_a_strange_answer_is_one_line(kubectl, answer):
  kubectl.answer(get=(0, answer, ''))
  with pytest.raises(UserError, match='wanted a JobSet'):
    jobset.status('cpu', OPTIONS)


def test_logs_are_those_of_all_pods(kubectl, capfd):
  kubectl.answer(logs=(0, '[pod/cpu-trainer-0-0/trainer] hello\n', ''))
  jobset.logs('cpu', OPTIONS)
  assert 'hello' in capfd.readouterr().out
  [(command, _)] = kubectl.calls
  assert command[:2] == ['logs', '--selector=jobset.sigs.k8s.io/jobset-name=cpu']
  assert '--tail=-1' in command


def test_cancel_deletes_the_jobset_and_its_secret(kubectl):
  kubectl.answer(delete=(0, 'jobset.jobset.x-k8s.io "cpu" deleted\n', ''))
  jobset.cancel('cpu', OPTIONS)
  assert kubectl.calls[0][0][:3] == ['delete', 'jobset/cpu', 'secret/cpu-files']
  kubectl.answer()
  with pytest.raises(UserError, match='no such JobSet'):
    jobset.cancel('cpu', OPTIONS)


@pytest.mark.parametrize('call', [jobset.status, jobset.logs, jobset.cancel])
@pytest.mark.parametrize('name', ['--all', 'a b', '', 'x/y'])
def test_a_name_that_is_none_reaches_no_kubectl(kubectl, call, name):
  with pytest.raises(UserError, match='wanted the name of a job'):
    call(name, OPTIONS)


def test_without_kubectl_there_is_one_line(monkeypatch, tmp_path):
  monkeypatch.setenv('PATH', str(tmp_path))
  with pytest.raises(UserError, match='kubectl: no such program in PATH'):
    jobset.submit('manifest', *JOBS['cpu'])


if __name__ == '__main__':
  for golden, wanted in JOBS.items():
    (GOLDEN / f'jobset-{golden}.yaml').write_text(jobset.text(*wanted))
