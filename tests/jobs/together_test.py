"""Real processes that write one model together."""

import json
import signal
import socket
from typing import NamedTuple

import job
import ml_dtypes
import pytest
import warm
import xxhash
from paths import SUPPORT
from safetensors.numpy import load_file
from together import DEVICES, LORA, SPEC, adapters_of, described, params_of

from jaxrl_llm.core.trees import flatten
from jaxrl_llm.core.types import Version
from jaxrl_llm.models.api import stack_layers
from jaxrl_llm.rollout.vllm.adapter_folder import AdapterFolder
from jaxrl_llm.rollout.vllm.delta_folder import DeltaFolder
from jaxrl_llm.rollout.vllm.publication import PublicationFolder
from jaxrl_llm.weights.hf import load_params, read_spec, save_params
from jaxrl_llm.weights.peft import WEIGHTS, export_adapter
from jaxrl_llm.weights.safetensors_files import plan_files
from jaxrl_llm.weights.versions import digest_of_file

pytestmark = pytest.mark.full


class Job(NamedTuple):
  folder: object
  codes: tuple[int, ...]
  lines: tuple[dict[str, dict], ...]
  """What each process printed, keyed by the export's name."""


@pytest.fixture(scope='module')
def done(tmp_path_factory):
  folder = tmp_path_factory.mktemp('together')
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    port = listener.getsockname()[1]
  devices = f'--xla_force_host_platform_device_count={DEVICES}'
  started = [
    warm.start(
      [SUPPORT / 'together.py', folder, 2, number, port],
      cwd=job.ROOT,
      env=job.environment(XLA_FLAGS=devices),
    )
    for number in range(2)
  ]
  ended = [process.communicate(timeout=600) for process in started]
  lines = [
    {
      line['name']: line
      for text in out.splitlines()
      if text[:1] == '{'
      for line in [json.loads(text)]
    }
    for out, _ in ended
  ]
  assert all('seen' in of_process for of_process in lines), ended
  return Job(folder, tuple(process.returncode for process in started), tuple(lines))


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
  """The tensors that one process exports."""
  directory = tmp_path_factory.mktemp('alone')
  save_params(directory, params_of(0), SPEC, dtype='bfloat16')
  return load_file(directory / 'model.safetensors')


def same_tensors(files, wanted):
  read = {name: tensor for path in files for name, tensor in load_file(path).items()}
  assert read.keys() == wanted.keys()
  assert all(read[name].tobytes() == wanted[name].tobytes() for name in wanted)


def weights_files(directory):
  return sorted(path.name for path in directory.iterdir() if 'safetensors' in path.name)


@pytest.mark.parametrize('kind', ['whole', 'deltas', 'compared'])
def test_processes_publish_versions_together_whose_bits_are_those_of_one(done, tmp_path, kind):
  folder = (
    PublicationFolder(tmp_path / kind, SPEC, dtype='bfloat16')
    if kind == 'whole'
    else DeltaFolder(tmp_path / kind, SPEC, dtype='bfloat16', full_every=3)
  )
  for step, made in enumerate(done.lines[0][kind]['published']):
    leaves = flatten(params_of(step)).items()
    wanted = described(folder.write(Version(0, step), leaves))
    assert made['files'] == ['weights-1.safetensors', 'weights.safetensors']
    assert len(made['deltas']) == len(wanted['deltas']) == (0 if kind == 'whole' else step % 3)
    for name in ('label', 'digests', 'sent_bytes', 'changed_fraction'):
      assert made[name] == wanted[name], (name, step)
  assert step == 3


def test_processes_whose_devices_compare_write_the_same_files(done):
  """All copy whole arrays of a version if one process has lost the bits of the version before."""
  for lines in done.lines:
    whole, first, lost, last = lines['compared']['copied']
    assert lost == whole > 4 * max(first, last), (whole, first, lost, last)
  hosts, devices = done.folder / 'deltas', done.folder / 'compared'
  names = {path.relative_to(hosts) for path in hosts.rglob('*') if path.is_file()}
  assert names == {path.relative_to(devices) for path in devices.rglob('*') if path.is_file()}
  assert len(names) == 2 * 3 + 2 * 3
  for name in names:
    assert (hosts / name).read_bytes() == (devices / name).read_bytes(), name


def test_base_weights_are_published_together_and_adapters_by_process_0(done, tmp_path):
  folder = AdapterFolder(tmp_path / 'lora', SPEC, lora=LORA, dtype='bfloat16')
  for step, made in enumerate(done.lines[0]['adapters']['published']):
    base = [] if step else flatten(params_of(0)).items()
    wanted = described(folder.write(Version(0, step), [*base, *adapters_of(step).items()]))
    written = made['base'].pop('files')
    assert written == ['weights-1.safetensors', 'weights.safetensors']
    del wanted['base']['files']
    assert made == wanted, step
  assert step == 1


def test_each_process_hashes_a_share_of_the_base_weights(done):
  """The digest is that of one process, in the form that commits have had from the beginning."""
  whole, digests = flatten(stack_layers(params_of(0))), xxhash.xxh3_128()
  for name, array in sorted(whole.items()):
    of_array = xxhash.xxh3_128_hexdigest(array.tobytes())
    digests.update(f'{name} {array.dtype} {array.shape} {of_array}\n'.encode())
  first, second = (lines['digest'] for lines in done.lines)
  assert first['digest'] == second['digest'] == digests.hexdigest()
  names = flatten(params_of(0)).keys()
  assert not set(first['copied']) & set(second['copied'])
  assert set(first['copied']) | set(second['copied']) == names
  sizes = [sum(array_bytes(name) for name in set(line['copied'])) for line in (first, second)]
  assert max(sizes) < 0.6 * sum(sizes)


def array_bytes(name):
  return flatten(params_of(0))[name].nbytes


def test_process_0_exports_adapters_as_they_are_trained(done, tmp_path):
  export_adapter(tmp_path, adapters_of(0).items(), SPEC, LORA, base='org/base')
  for name in ('adapter_config.json', WEIGHTS):
    assert (done.folder / 'adapter' / name).read_bytes() == (tmp_path / name).read_bytes()
  arrays, adapters = load_file(tmp_path / WEIGHTS), adapters_of(0)
  assert len(arrays) == len(adapters) == 4 * SPEC.num_hidden_layers
  name = 'base_model.model.model.layers.1.mlp.down_proj.lora_A.weight'
  assert arrays[name].tobytes() == adapters['layers/1/mlp/down/lora_a'].tobytes()


@pytest.mark.parametrize(
  ('name', 'reason', 'left'),
  [
    ('unrenamed', 'Is a directory', ['model-00001-of-00002.safetensors']),
    ('incomplete', 'cannot be completed', None),
    ('failing adapter', 'Is a directory', []),
  ],
)
def test_all_processes_learn_that_process_0_could_not_end_an_export(done, name, reason, left):
  first, second = (lines[name]['error'] for lines in done.lines)
  assert first == second and reason in first and '\n' not in first
  if left is not None:
    directory = done.folder / name
    assert [
      file
      for file in weights_files(directory)
      if (directory / file).is_file() and not file.endswith('.unfinished')
    ] == left


def test_each_process_exports_a_share_and_the_tensors_are_those_of_one(done, alone):
  plan = plan_files(SPEC, dtype='bfloat16', writers=2)
  names = sorted(plan.files)
  assert len(names) == 2 and all(len(files) == 1 for files in plan.writers)
  directory = done.folder / 'seen'
  assert weights_files(directory) == [*names, 'model.safetensors.index.json']
  assert not (directory / 'token').exists()
  same_tensors([directory / name for name in names], alone)
  made = done.lines[0]['seen']['made']
  assert {name: digest_of_file(directory / name).digest for name in names} == {
    name: file['digest'] for name, file in made['files'].items()
  }
  assert made['tensors'].keys() == alone.keys()
  assert read_spec(directory) == SPEC
  read = load_params(directory, SPEC, dtype='bfloat16')
  assert read['norm']['scale'].dtype == ml_dtypes.bfloat16


def test_process_0_exports_alone_if_another_does_not_see_the_directory(done, alone):
  directory = done.folder / 'unseen'
  assert weights_files(directory) == ['model.safetensors']
  same_tensors([directory / 'model.safetensors'], alone)
  assert not (done.folder / 'elsewhere').exists()


@pytest.mark.parametrize(('name', 'number'), [('failing', 1), ('failing first', 0)])
def test_an_export_that_one_process_cannot_write_fails_in_all_and_leaves_no_weights(
  done, name, number
):
  for lines in done.lines:
    assert f'process {number} could not write its share' in lines[name]['error']
    assert 'Is a directory' in lines[name]['error'] and '\n' not in lines[name]['error']
  blocked = [f'model-{number + 1:05d}-of-00002.safetensors.unfinished']
  assert weights_files(done.folder / name) == blocked


def test_an_export_whose_process_is_killed_is_no_model(done):
  # Process 0 ends with its own error, or JAX ends it.
  assert done.codes[1] == -signal.SIGKILL and done.codes[0] in (75, -signal.SIGABRT)
  left = weights_files(done.folder / 'killed')
  assert not [name for name in left if not name.endswith('.unfinished')]
