"""Published weights: the trainer's bits under a version's name, whole or not at all, whatever stops
the writer.
"""

import json
import os
import pathlib
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from mappings import maps_of
from parameters import random_params
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.core.types import Version
from jaxrl_llm.models.api import stack_layers
from jaxrl_llm.models.families import FAMILIES, tiny
from jaxrl_llm.rollout.vllm.publication import (
  FILE,
  PublicationFolder,
  digest,
  read_checked,
)
from jaxrl_llm.weights import tensor_files
from jaxrl_llm.weights.checksums import Slice, checksums
from jaxrl_llm.weights.hf import write_config
from jaxrl_llm.weights.layout import DTYPES, to_hf
from jaxrl_llm.weights.tables import entries

MODELS = [(family, tied) for family in FAMILIES for tied in (True, False)]
V1, V2, V3 = (Version(0, step) for step in (1, 2, 3))


def bits(tensors):
  return {
    name: (tensor.dtype.name, tensor.shape, tensor.tobytes()) for name, tensor in tensors.items()
  }


def small(layers=2):
  return tiny(
    'qwen3', 11, num_hidden_layers=layers, hidden_size=16, intermediate_size=24, head_dim=8
  )


def published_bits(publication):
  return bits(load_file(publication.directory / FILE))


def wanted_bits(params, spec, dtype='float32'):
  return bits({name: tensor.astype(DTYPES[dtype]) for name, tensor in to_hf(params, spec)})


def awkward(params):
  """With the numbers that a conversion could get wrong, in the first places of one array."""
  ties = np.array(
    [0x3F808000, 0x3F818000, 0x3F80FFFF, 0x7F7FFFFF, 1, 0x80000001, 0x00007FFF], np.uint32
  )
  numbers = np.r_[np.float32([np.nan, -np.nan, np.inf, -np.inf, -0.0, 0.0]), ties.view(np.float32)]
  params['embed']['kernel'].reshape(-1)[: len(numbers)] = numbers
  return params


@pytest.mark.parametrize('scanned', [True, False])
@pytest.mark.parametrize(('family', 'tied'), MODELS)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_files_hold_the_parameters_bit_for_bit(tmp_path, dtype, family, tied, scanned):
  # Three layers, biases wherever the family may have some, and a vocabulary that is longer than one
  # block.
  bias, mlp_bias = FAMILIES[family].attention_bias, FAMILIES[family].mlp_bias
  biases = {'qkv_bias': bias != 'never', 'o_bias': bias == 'optional', 'mlp_bias': mlp_bias}
  spec = tiny(family, 9001, num_hidden_layers=3, tie_word_embeddings=tied, **biases)
  params = awkward(random_params(spec))
  leaves = flatten(stack_layers(params) if scanned else params)
  publication = PublicationFolder(tmp_path / 'w', spec, dtype=dtype).write(V1, leaves.items())
  wanted = wanted_bits(params, spec, dtype)
  assert ('lm_head.weight' in wanted) is not tied
  assert published_bits(publication) == wanted
  assert publication.directory == tmp_path / 'w' / '0.1'
  assert publication.nbytes == sum(len(data) for _, _, data in wanted.values())
  with safe_open(publication.directory / FILE, 'np') as file:
    assert file.metadata() == {'format': 'pt'}
  assert (publication.directory / FILE).stat().st_mode & 0o777 == 0o644, (
    'servers of other users read it'
  )


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_digests_are_of_what_lies_in_the_file(tmp_path, dtype):
  spec = small()
  leaves = flatten(random_params(spec))
  publication = PublicationFolder(tmp_path / 'w', spec, dtype=dtype).write(V1, leaves.items())
  tensors = load_file(publication.directory / FILE)
  assert publication.files == {FILE: {name: digest(tensor) for name, tensor in tensors.items()}}
  assert (
    publication.digests == publication.files[FILE] and len(set(publication.digests.values())) > 10
  )
  assert list(publication.digests) == [entry.hf for entry in entries(spec)]
  assert bits(read_checked(publication.files, publication.directory)) == bits(tensors)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('rows', [1, 5, 100])
def test_digests_of_slices_are_those_of_what_a_worker_holds(tmp_path, monkeypatch, dtype, rows):
  """Along either axis, overlapping, empty, and across the blocks that are written at a time."""
  monkeypatch.setattr(tensor_files, '_BLOCK', 4 * 16 * 3)  # Three rows of 16 float32.
  spec = small()
  leaves = flatten(random_params(spec))
  slices = {
    'model.embed_tokens.weight': {Slice(0, 0, 6), Slice(0, 6, 5), Slice(0, 4, 1), Slice(0, 11, 0)},
    'model.layers.1.mlp.down_proj.weight': {Slice(1, 0, 12), Slice(1, 12, 12), Slice(0, 3, 9)},
    'model.norm.weight': {Slice(0, 4, 8)},
  }
  parts = (
    (name, leaf[at : at + rows])
    for name, leaf in leaves.items()
    for at in range(0, len(leaf), rows)
  )
  publication = PublicationFolder(tmp_path / 'w', spec, dtype=dtype).write(
    V1, parts, slices=slices, checksums=True
  )
  tensors = load_file(publication.directory / FILE)
  assert publication.slices == {
    name: {
      cut: digest(tensors[name].take(range(cut.start, cut.start + cut.length), cut.axis))
      for cut in cuts
    }
    for name, cuts in slices.items()
  }
  assert publication.digests == {name: digest(tensor) for name, tensor in tensors.items()}
  assert publication.checksums == {
    name: checksums(tensor, slices.get(name, ())) for name, tensor in tensors.items()
  }
  manifest = json.loads((publication.directory / 'manifest.json').read_text())
  assert manifest['checksums']['model.norm.weight'] == checksums(tensors['model.norm.weight'])[None]
  cut = Slice(0, 4, 8)
  (described,) = manifest['slices']['model.norm.weight']
  assert described[:3] == [*cut]
  assert described[3] == publication.slices['model.norm.weight'][cut]
  assert described[4] == publication.checksums['model.norm.weight'][cut]


def test_a_digest_is_of_bytes_in_c_order():
  array = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
  assert digest(array.T) == digest(np.array(array.T, order='C')) != digest(array)
  assert digest(array[:, 0]) == digest(array[:, 0].copy())
  narrow = array.astype(ml_dtypes.bfloat16)
  assert digest(narrow) == digest(narrow.view(np.uint16)) != digest(array)


def test_leaves_may_be_of_any_order_kind_and_stride(tmp_path):
  spec = small(layers=3)
  params = random_params(spec)
  folder, wanted = (
    PublicationFolder(tmp_path / 'w', spec, dtype='float32'),
    wanted_bits(params, spec),
  )
  orders = [flatten(params), flatten(stack_layers(params))]
  for step, leaves in enumerate([*orders, *orders]):
    names = list(leaves)
    np.random.default_rng(step).shuffle(names)
    assert (
      published_bits(folder.write(Version(0, step), ((name, leaves[name]) for name in names)))
      == wanted
    )
  transposed = {name: np.asfortranarray(leaf) for name, leaf in orders[1].items()}
  assert published_bits(folder.write(Version(0, 9), transposed.items())) == wanted
  narrow = {name: leaf.astype(ml_dtypes.bfloat16) for name, leaf in orders[0].items()}
  as_wide = {name: leaf.astype(np.float32) for name, leaf in narrow.items()}
  found = published_bits(folder.write(Version(0, 10), narrow.items()))
  assert found == published_bits(folder.write(Version(0, 11), as_wide.items())) != wanted


def test_an_array_may_come_in_parts(tmp_path):
  spec = small()
  params = random_params(spec)

  def parts(at):
    for name, leaf in flatten(params).items():
      yield name, leaf[:at]
      if len(leaf) > at:
        yield name, leaf[at:]

  for at in (1, 3, 10):
    publication = PublicationFolder(tmp_path / 'w', spec, dtype='bfloat16').write(V1, parts(at))
    assert published_bits(publication) == wanted_bits(params, spec, 'bfloat16')
    assert read_checked(publication.files, publication.directory)
  with pytest.raises(UserError, match=r'embed/kernel: .* \(12, 16\), .* has \(11, 16\)'):
    leaf = params['embed']['kernel']
    PublicationFolder(tmp_path / 'w', spec, dtype='bfloat16').write(
      V1, [('embed/kernel', leaf), ('embed/kernel', leaf[:1])]
    )


def missing(leaves):
  return {
    name: leaf for name, leaf in leaves.items() if name != 'norm/scale'
  }, r"lack \['model\.norm\.weight'\]"


def unknown(leaves):
  return {
    **leaves,
    'norm/bias': leaves['norm/scale'],
  }, 'norm/bias: not a parameter of the qwen3 model'


def head_of_a_tied_model(leaves):
  return {**leaves, 'head/kernel': leaves['embed/kernel']}, 'head/kernel: not a parameter'


def another_vocabulary(leaves):
  return {
    **leaves,
    'embed/kernel': leaves['embed/kernel'][:-1],
  }, r'embed/kernel: .* \(10, 16\), .* has \(11, 16\)'


def transposed(leaves):
  name = next(name for name in leaves if name.endswith('mlp/up/kernel'))
  return {
    **leaves,
    name: leaves[name].swapaxes(-1, -2),
  }, r'mlp/up/kernel: .* \(.*16, 24\), .* has \(.*24, 16\)'


def of_layers(change):
  name = 'layers/mlp_norm/scale'

  def changed(leaves):
    return {**leaves, name: change(leaves[name])}, f'{name}: .* has '

  return changed


WRONG = [missing, unknown, head_of_a_tied_model, another_vocabulary, transposed]
WRONG_LAYERS = [
  of_layers(lambda leaf: leaf[:-1]),
  of_layers(lambda leaf: np.r_[leaf, leaf]),
  of_layers(lambda a: a[0]),
]


@pytest.mark.parametrize(
  ('scanned', 'spoil'),
  [*((False, w) for w in WRONG), *((True, w) for w in WRONG + WRONG_LAYERS)],
)
def test_arrays_of_another_model_are_not_published(tmp_path, scanned, spoil):
  spec = small()
  params, other = random_params(spec), random_params(spec, seed=1)
  folder = PublicationFolder(tmp_path / 'w', spec, dtype='float32')
  first = folder.write(V1, flatten(params).items())
  leaves, message = spoil(flatten(stack_layers(other) if scanned else other))
  for version in (V2, V1):
    with pytest.raises(UserError, match=message) as raised:
      folder.write(version, leaves.items())
    assert '\n' not in str(raised.value)
  assert not (tmp_path / 'w' / str(V2)).exists()
  assert published_bits(first) == wanted_bits(params, spec)
  assert published_bits(folder.write(V2, flatten(params).items())) == wanted_bits(params, spec)


def versions_in(folder):
  return {path.name for path in folder.root.iterdir()} - {'unfinished'}


@pytest.mark.parametrize('place', ['tmp_path', 'memory'])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_file_that_is_written_over_shows_nothing_of_what_it_held(request, dtype, place):
  spec, root = small(), request.getfixturevalue(place) / 'w'
  folder, kept, seen = PublicationFolder(root, spec, dtype=dtype), [], []
  for step in range(12):
    params = random_params(spec, seed=step)
    if step % 3 == 2:  # A version that fails half-way leaves its bytes behind.
      half = list(flatten(random_params(spec, seed=100 + step)).items())[::2]
      with pytest.raises(UserError, match='lack'):
        folder.write(Version(0, step), half)
    if step % 4 == 3:  # So does a longer file, of whatever kind.
      with (folder.root / 'unfinished' / FILE).open('ab') as file:
        file.write(bytes(100_000))
    publication = folder.write(Version(0, step), flatten(params).items())
    seen.append((publication.directory / FILE).stat().st_ino)
    kept = [*kept[-1:], (publication, wanted_bits(params, spec, dtype))]
    for held, wanted in kept:
      assert published_bits(held) == wanted
      assert (held.directory / FILE).stat().st_size < publication.nbytes + 10_000
    folder.keep_only(*(held for held, _ in kept))
    assert versions_in(folder) == {str(held.version) for held, _ in kept}
  assert len(set(seen)) == 3, 'files are written over, not made anew'
  assert maps_of(root) == (3 if place == 'memory' else 0)
  folder.keep_only()
  assert maps_of(root) == (place == 'memory'), 'those of removed files are gone'
  folder.close()
  assert maps_of(root) == 0


def test_a_folder_may_be_closed_while_a_version_is_written(memory):
  """A run that ends does not wait for the thread that writes."""
  spec = small()
  folder = PublicationFolder(memory / 'w', spec, dtype='float32')
  params = list(flatten(random_params(spec)).items())
  folder.write(V1, params)
  folder.keep_only()

  def closing():
    yield from params[:3]
    assert maps_of(folder.root) == 1
    folder.close()
    yield from params[3:]

  with pytest.raises(RunError, match=r'w: .*No such file'):
    folder.write(V2, closing())
  assert not folder.root.exists()


def test_a_reader_that_has_a_kept_file_open_sees_nothing_of_the_next(tmp_path):
  spec = small()
  folder = PublicationFolder(tmp_path / 'w', spec, dtype='float32')
  first, second = (
    folder.write(v, flatten(random_params(spec, seed=i)).items()) for i, v in enumerate((V1, V2))
  )
  data = np.memmap(second.directory / FILE, mode='r')
  before = data.tobytes()
  folder.keep_only(second)
  third = folder.write(V3, flatten(random_params(spec, seed=3)).items())
  assert data.tobytes() == before != (third.directory / FILE).read_bytes()
  assert not first.directory.exists()


def test_a_version_is_published_again_in_its_place(tmp_path):
  spec = small()
  folder = PublicationFolder(tmp_path / 'w', spec, dtype='float32')
  folder.write(V1, flatten(random_params(spec)).items())
  again = random_params(spec, seed=1)
  assert published_bits(folder.write(V1, flatten(again).items())) == wanted_bits(again, spec)
  assert versions_in(folder) == {'0.1'}


def test_what_is_not_kept_goes(tmp_path):
  spec = small()
  folder = PublicationFolder(tmp_path / 'w', spec, dtype='float32')
  leaves = flatten(random_params(spec))
  publications = [folder.write(Version(1, step), leaves.items()) for step in range(4)]
  folder.keep_only(publications[1], publications[3])
  assert versions_in(folder) == {'1.1', '1.3'}
  folder.keep_only(publications[3])
  assert versions_in(folder) == {'1.3'}
  folder.keep_only()
  assert versions_in(folder) == set()
  assert len(list(folder.root.rglob(FILE))) == 1, 'one file is left to be written over'
  folder.close()
  assert not folder.root.exists()
  folder.close()


KILLED = """
import os, pathlib, signal, sys

import numpy as np

from jaxrl_llm.core.types import Version
from jaxrl_llm.models.families import tiny
from jaxrl_llm.rollout.vllm.publication import PublicationFolder, read_checked
from jaxrl_llm.weights.tables import entries
from jaxrl_llm.weights.checksums import Slice

root = pathlib.Path(sys.argv[1])
spec = tiny('qwen3', 11, hidden_size=16, intermediate_size=24, head_dim=8)


def leaves(seed):
  random = np.random.default_rng(seed)
  return [(entry.unrolled, random.normal(size=entry.shape).astype(np.float32)) \
for entry in entries(spec)]


def die(work, at):
  # Each step is a moment: files made, opened, renamed and removed, arrays asked for, \
data sent to the disk.
  passed = []

  def moment(kind):
    passed.append(kind)
    if len(passed) > at:
      print(kind, flush=True)
      os.kill(os.getpid(), signal.SIGKILL)

  def told(event, args):
    written = event == 'open' and args[2] & (os.O_WRONLY | os.O_RDWR)
    if written or event in ('os.mkdir', 'os.rename', 'os.rmdir', 'os.remove'):
      moment(event)

  def asked(seed):
    for leaf in leaves(seed):
      moment('leaf')
      yield leaf

  sync = os.fsync
  os.fsync = lambda handle: (moment('fsync'), sync(handle))
  sys.addaudithook(told)
  work(asked)
  os._exit(0)


def attempt(name, at):
  folder = PublicationFolder(root, spec, dtype='float32')
  assert list(root.iterdir()) == [], 'what was left is gone'
  first, second, third = (folder.write(Version(0, step), leaves(step)) for step in (1, 2, 3))
  whole = {'0.1': [first], '0.2': [second], '0.3': [third]}
  if name == 'new':
    folder.keep_only(second, third)
    del whole['0.1']
    whole['0.4'] = [control(Version(0, 4))]
    work = lambda asked: folder.write(Version(0, 4), asked(9))
  elif name == 'again':
    whole['0.3'].append(control(Version(0, 3)))
    work = lambda asked: folder.write(Version(0, 3), asked(9))
  else:
    work = lambda asked: folder.keep_only(third)
  pid = os.fork()
  if pid == 0:
    die(work, at)
  _, status = os.waitpid(pid, 0)
  found = {directory.name: directory for directory in root.iterdir()}
  for version in found.keys() - {'unfinished', 'discarded'}:
    assert any(is_whole(publication, found[version]) for publication in whole[version]), found
  assert '0.3' in found or name == 'again', 'what is kept stays'
  if os.WIFSIGNALED(status):
    assert os.WTERMSIG(status) == signal.SIGKILL
    return True
  assert os.waitstatus_to_exitcode(status) == 0
  left = {'new': {'0.2', '0.3', '0.4'}, 'again': {'0.1', '0.2', '0.3'}, \
'keep': {'0.3', 'unfinished'}}
  assert found.keys() == left[name]
  return False


def is_whole(publication, directory):
  try:
    read_checked(publication.files, directory)
  except ValueError:
    return False
  return True


def control(version):
  return PublicationFolder(root.with_name('control'), spec, dtype='float32').write(version, \
leaves(9))


for name in ('new', 'again', 'keep'):
  at = 0
  while attempt(name, at):
    at += 1
"""


@pytest.mark.full
def test_whoever_is_killed_leaves_no_version_that_is_not_whole(tmp_path):
  ran = subprocess.run(
    [sys.executable, '-c', KILLED, tmp_path / 'w'], capture_output=True, text=True, timeout=300
  )
  assert ran.returncode == 0, ran.stderr
  moments = ran.stdout.split()
  arrays = len(entries(tiny('qwen3', 11)))
  assert moments.count('leaf') == 2 * arrays
  # Renamed: a new version; one away and one into its place; one to be written over and one away.
  assert moments.count('os.rename') == 5 and moments.count('fsync') == 4
  assert {'open', 'os.mkdir', 'os.rmdir', 'os.remove'} <= set(moments)


def test_a_full_disk_is_one_line(tmp_path):
  if not pathlib.Path('/dev/full').exists():
    pytest.skip('there is no /dev/full here')
  spec = small()
  folder = PublicationFolder(tmp_path / 'w', spec, dtype='float32')
  first = folder.write(V1, flatten(random_params(spec)).items())
  (folder.root / 'unfinished').mkdir()
  (folder.root / 'unfinished' / FILE).symlink_to('/dev/full')
  with pytest.raises(
    RunError, match=r'w: weights cannot be written \(.*No space left on device'
  ) as raised:
    folder.write(V2, flatten(random_params(spec, seed=1)).items())
  assert '\n' not in str(raised.value)
  assert versions_in(folder) == {'0.1'} and published_bits(first) == wanted_bits(
    random_params(spec), spec
  )


def test_what_a_disk_does_not_take_at_once_is_offered_again(tmp_path, monkeypatch):
  write = os.pwrite
  # Few bytes at a time, as a disk does that is nearly full.
  monkeypatch.setattr(os, 'pwrite', lambda file, data, offset: write(file, data[:300], offset))
  spec = small()
  params = random_params(spec)
  publication = PublicationFolder(tmp_path / 'w', spec, dtype='float32').write(
    V1, flatten(params).items()
  )
  assert published_bits(publication) == wanted_bits(params, spec)


@pytest.mark.full
def test_a_disk_that_fills_up_keeps_what_it_has(tmp_path):
  spec = tiny('llama', 500)
  params = random_params(spec)
  leaves, nbytes = flatten(params), 4 * sum(leaf.size for leaf in flatten(params).values())
  mount = tmp_path / 'small'
  mount.mkdir()
  size = f'size={int(nbytes * 1.6)}'
  if subprocess.run(
    ['mount', '-t', 'tmpfs', '-o', size, 'tmpfs', mount], capture_output=True
  ).returncode:
    pytest.skip('mounting needs root')
  try:
    folder = PublicationFolder(mount / 'w', spec, dtype='float32')
    first = folder.write(V1, leaves.items())
    for _ in range(2):
      with pytest.raises(RunError, match=r'weights cannot be written .*No space left') as raised:
        folder.write(V2, leaves.items())
      assert '\n' not in str(raised.value)
      assert versions_in(folder) == {'0.1'} and published_bits(first) == wanted_bits(params, spec)
    subprocess.run(['mount', '-o', f'remount,size={nbytes * 3}', mount], check=True)
    assert published_bits(folder.write(V2, leaves.items())) == wanted_bits(params, spec)
  finally:
    subprocess.run(['umount', mount], check=True)


def test_a_root_that_cannot_be_made_is_one_line(tmp_path):
  (tmp_path / 'file').write_text('in the way')
  with pytest.raises(RunError, match='weights cannot be written') as raised:
    PublicationFolder(tmp_path / 'file' / 'w', small(), dtype='float32')
  assert '\n' not in str(raised.value)


def spoilt(folder, kind):
  """A publication, and what is announced of it, of which one is not as the other says."""
  spec = small()
  publication = folder.write(V1, flatten(random_params(spec)).items())
  path, files = publication.directory / FILE, {FILE: dict(publication.files[FILE])}
  if kind == 'cut short':
    os.truncate(path, path.stat().st_size - 1)
  if kind == 'another byte':
    with path.open('r+b') as file:
      file.seek(-1, os.SEEK_END)
      last = file.read(1)
      file.seek(-1, os.SEEK_END)
      file.write(bytes([last[0] ^ 1]))
  if kind == 'one less':
    files[FILE]['more'] = '0' * 32
  if kind == 'one more':
    del files[FILE]['model.norm.weight']
  if kind == 'gone':
    path.unlink()
  return publication, files


@pytest.mark.parametrize(
  ('kind', 'message'),
  [
    ('cut short', 'cannot be read'),
    ('another byte', 'has digest [0-9a-f]{32} as read, announced was'),
    ('one less', r"tensors missing \['more'\], unknown \[\]"),
    ('one more', r"tensors missing \[\], unknown \['model.norm.weight'\]"),
    ('gone', 'cannot be read'),
  ],
)
def test_what_is_not_as_announced_is_not_read(tmp_path, kind, message):
  publication, files = spoilt(PublicationFolder(tmp_path / 'w', small(), dtype='float32'), kind)
  with pytest.raises(ValueError, match=message):
    read_checked(files, publication.directory)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize(('family', 'tied'), MODELS)
def test_transformers_loads_a_published_file(tmp_path, family, tied, dtype):
  torch = pytest.importorskip('torch')
  import transformers

  spec = tiny(family, 50, tie_word_embeddings=tied)
  params = random_params(spec)
  publication = PublicationFolder(tmp_path / 'w', spec, dtype=dtype).write(
    V1, flatten(params).items()
  )
  write_config(tmp_path, spec, dtype=dtype, eos_ids=(1,), pad_id=0)
  (tmp_path / 'model.safetensors').symlink_to(publication.directory / FILE)
  model, report = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, output_loading_info=True
  )
  assert not any(
    report[kind] for kind in ('missing_keys', 'unexpected_keys', 'mismatched_keys', 'error_msgs')
  ), report
  assert model.dtype == getattr(torch, dtype)
  found = dict(model.named_parameters())
  assert found.keys() == publication.digests.keys()
  for name, tensor in to_hf(params, spec):
    assert torch.equal(found[name], torch.from_numpy(tensor).to(model.dtype)), name


@pytest.mark.parametrize('private', [True, False])
def test_a_private_folder_is_its_users_alone(tmp_path, private):
  PublicationFolder(tmp_path / 'w', small(), dtype='float32', private=private)
  others = (tmp_path / 'w').stat().st_mode & 0o077
  assert (others == 0) == private
