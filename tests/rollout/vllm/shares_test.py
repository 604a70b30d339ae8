"""Weights that several processes of the trainer write together are those that one writes alone."""

import math
import shutil

import fronts
import pytest
from fleets import MODEL, A, B, fleet_over, places, run, tensors, versions, wave, weights
from parameters import random_params

from jaxrl_llm.core.disk import TOKEN
from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.core.types import Version
from jaxrl_llm.models.families import FAMILIES, tiny
from jaxrl_llm.rollout.api import SharedWrite, Weights
from jaxrl_llm.rollout.vllm.publication import PublicationFolder, read_published
from jaxrl_llm.rollout.vllm.shares import Proof, ShareOrder, VllmShareWriter, share_file
from jaxrl_llm.weights.checksums import Slice
from jaxrl_llm.weights.shares import share_of
from jaxrl_llm.weights.tables import entries

V1 = Version(0, 1)
SPEC = tiny('qwen3', 11, num_hidden_layers=3, hidden_size=16, intermediate_size=24, head_dim=8)
SLICES = {'model.norm.weight': {Slice(0, 8, 4)}, 'model.embed_tokens.weight': {Slice(0, 0, 5)}}


def leaves_of(spec, names=None):
  """Unrolled, as a gatherer yields them."""
  tree = dict(flatten(random_params(spec, seed=1)))
  for name in sorted(tree):
    if names is None or name in names:
      yield name, tree[name]


def written_by(folder, count, writers=None):
  """Publishes a version of which each process writes its share."""
  order = folder.begin_shares(slices=SLICES, checksums=True)
  received = ShareOrder.from_json(order.to_json())
  writer = VllmShareWriter(SPEC)
  assert writer.can_write(order.to_json(), 1, 2)
  reports = [
    writer.write(order.to_json(), i, count, leaves_of(SPEC, writer.names(i, count)))
    for i in range(1, count)
  ]
  mine = folder.write_share(received, count, leaves_of(SPEC, writer.names(0, count)))
  return folder.complete(V1, [mine, *(Proof.from_json(r['proof']) for r in reports)], {})


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('count', [1, 2, 3, 7])
def test_each_tensor_is_in_one_share_and_shares_are_alike(family, count):
  spec = tiny(family, 64, num_hidden_layers=8)
  shares = [share_of(spec, i, count) for i in range(count)]
  assert sorted(name for share in shares for name in share) == sorted(e.hf for e in entries(spec))
  sizes = {entry.hf: math.prod(entry.shape) for entry in entries(spec)}
  loads = [sum(sizes[name] for name in share) for share in shares]
  assert max(loads) - min(loads) <= max(sizes.values())


@pytest.mark.parametrize('count', [1, 2, 5])
def test_shares_make_the_version_that_one_process_writes(tmp_path, count):
  options = {'dtype': 'bfloat16'}
  alone = PublicationFolder(tmp_path / 'alone', SPEC, **options).write(
    V1, leaves_of(SPEC), slices=SLICES, checksums=True
  )
  together = written_by(PublicationFolder(tmp_path / 'together', SPEC, **options), count)
  assert set(together.files) == {share_file(i) for i in range(count)}
  assert together.digests == alone.digests and together.label == alone.label
  assert together.slices == alone.slices and together.checksums == alone.checksums
  assert together.nbytes == alone.nbytes
  read, wanted = read_published(together), read_published(alone)
  assert {name: tensor.tobytes() for name, tensor in read.items()} == {
    name: tensor.tobytes() for name, tensor in wanted.items()
  }
  assert not (together.directory / TOKEN).exists()


def test_the_next_version_overwrites_the_files_of_a_released_one(tmp_path):
  folder = PublicationFolder(tmp_path / 'w', SPEC, dtype='float32')
  first = written_by(folder, 2)
  inodes = {path.name: path.stat().st_ino for path in first.directory.glob('*.safetensors')}
  folder.keep_only()
  second = written_by(folder, 2)
  assert {p.name: p.stat().st_ino for p in second.directory.glob('*.safetensors')} == inodes
  read_published(second)


def test_a_process_that_does_not_see_the_directory_says_so(tmp_path):
  order = PublicationFolder(tmp_path / 'w', SPEC, dtype='float32').begin_shares()
  writer = VllmShareWriter(SPEC)
  assert writer.can_write(order.to_json(), 1, 2)
  (tmp_path / 'elsewhere').mkdir()
  (tmp_path / 'elsewhere' / TOKEN).write_text('of another job')
  for directory in ('elsewhere', 'nowhere'):
    assert not writer.can_write(order._replace(directory=str(tmp_path / directory)).to_json(), 1, 2)


def test_a_share_that_cannot_be_written_is_reported_and_all_parameters_are_taken(tmp_path):
  order = PublicationFolder(tmp_path / 'w', SPEC, dtype='float32').begin_shares()
  (tmp_path / 'w' / 'unfinished' / share_file(1)).mkdir()
  writer, taken = VllmShareWriter(SPEC), []

  def leaves():
    for leaf in leaves_of(SPEC, writer.names(1, 2)):
      taken.append(leaf[0])
      yield leaf

  report = writer.write(order.to_json(), 1, 2, leaves())
  assert 'Is a directory' in report['error'] and '\n' not in report['error']
  assert set(taken) == set(writer.names(1, 2))


def test_deltas_and_adapters_are_written_by_process_0_alone(tmp_path):
  assert (
    PublicationFolder(tmp_path / 'w', SPEC, dtype='float32', full_every=4).begin_shares() is None
  )


async def shared(fleet, version, *, error=None):
  """Weights of which a second process writes a share, or fails to."""
  order = await fleet.begin_load()
  writer = VllmShareWriter(MODEL.spec)
  values = tensors(version.step)

  def leaves(number):
    names = writer.names(number, 2)
    return [(e.unrolled, values[e.hf]) for e in entries(MODEL.spec) if e.unrolled in names]

  async def reports():
    return [None, error or writer.write(order, 1, 2, leaves(1))]

  shares = SharedWrite(order=order, count=2, reports=reports)
  probe = weights(version).probe
  return Weights(version=version, leaves=leaves(0), probe=probe, shares=shares)


def test_servers_load_versions_that_several_processes_wrote(tmp_path):
  async def main():
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path, first=None) as fleet:
      for version in (A, B):
        await fleet.load(await shared(fleet, version))
        assert versions(await wave(fleet)) == {version}
      assert len(fleet._current.publication.files) == 2

  run(main)


def test_an_error_of_another_process_names_it(tmp_path):
  async def main():
    async with places(tmp_path, 1) as made, fleet_over(made, tmp_path) as fleet:
      failed = await shared(fleet, B, error={'error': 'the disk is full'})
      with pytest.raises(RunError, match='process 1 could not write its share: the disk is full'):
        await fleet.load(failed)
      assert versions(await wave(fleet)) == {A}

  run(main)


def test_a_process_without_memory_for_its_shares_leaves_them_to_process_0(tmp_path, monkeypatch):
  source = fronts.config(tmp_path)
  order = PublicationFolder(tmp_path / 'w', SPEC, dtype='float32', source=source).begin_shares()
  elsewhere = order._replace(directory='/not/on/this/host').to_json()
  usage = shutil.disk_usage('/dev/shm')
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage._replace(free=10_000))
  assert not VllmShareWriter(SPEC).can_write(elsewhere, 1, 2)
  monkeypatch.undo()
  taken = {**elsewhere, 'source': {**elsewhere['source'], 'token_file': '/not/there'}}
  assert not VllmShareWriter(SPEC).can_write(taken, 1, 2)
  writer = VllmShareWriter(SPEC)
  assert writer.can_write(elsewhere, 1, 2) and writer.can_write(elsewhere, 1, 2)
  writer._server.close()
