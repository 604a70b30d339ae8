"""Weights that several processes of the trainer write together are those that one writes alone."""

import math
import shutil

import fronts
import pytest
from fleets import MODEL, A, B, fleet_over, places, run, tensors, versions, wave, weights
from mappings import maps_of
from parameters import random_params

from jaxrl_llm.core.disk import TOKEN
from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.core.types import Version
from jaxrl_llm.models.families import FAMILIES, tiny
from jaxrl_llm.rollout.api import SharedWrite, Weights
from jaxrl_llm.rollout.vllm.delta_folder import DeltaFolder
from jaxrl_llm.rollout.vllm.publication import PublicationFolder, read_published
from jaxrl_llm.rollout.vllm.share_writer import VllmShareWriter
from jaxrl_llm.rollout.vllm.shares import ShareOrder, ShareReport, delta_file, share_file
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


def written_by(folder, count, writer=None):
  """Publishes a version of which each process writes its share.

  Args:
    writer: writer of the other processes; None for a new one.
  """
  order = folder.begin_shares(slices=SLICES, checksums=True)
  received = ShareOrder.from_json(order.to_json())
  writer = writer or VllmShareWriter(SPEC)
  assert writer.can_write(order.to_json(), 1, 2)
  reports = [
    writer.write(order.to_json(), i, count, leaves_of(SPEC, writer.names(i, count)))
    for i in range(1, count)
  ]
  mine = folder.write_share(received, count, leaves_of(SPEC, writer.names(0, count)))
  return folder.complete(V1, [mine, *map(ShareReport.from_json, reports)])


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


@pytest.mark.parametrize('place', ['tmp_path', 'memory'])
def test_the_next_version_overwrites_the_files_of_a_released_one(request, place):
  folder = PublicationFolder(request.getfixturevalue(place) / 'w', SPEC, dtype='float32')
  writer = VllmShareWriter(SPEC)
  first = written_by(folder, 2, writer)
  inodes = {path.name: path.stat().st_ino for path in first.directory.glob('*.safetensors')}
  for _ in range(3):
    folder.keep_only()
    # Of the bytes that the files have, each must be written again.
    for path in (folder.root / 'unfinished').glob('*.safetensors'):
      with path.open('r+b') as file:
        file.write(b'\xff' * path.stat().st_size)
    following = written_by(folder, 2, writer)
    assert {p.name: p.stat().st_ino for p in following.directory.glob('*.safetensors')} == inodes
    read_published(following)
  assert maps_of(folder.root) == (2 if place == 'memory' else 0), 'one in each process'


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


NAMES = ('model.layers.1.mlp.up_proj.weight', 'model.norm.weight')
"""Tensors that change, in different shares of two."""


def changed(step):
  """Leaves of a version: a few elements of two tensors differ from the version before."""
  for name, leaf in leaves_of(SPEC):
    if name in {entry.unrolled for entry in entries(SPEC) if entry.hf in NAMES}:
      leaf = leaf.copy()
      leaf.reshape(-1)[: 3 * step : 3] += step
    yield name, leaf


class Processes:
  """Publishes versions of which each process takes its share, and writes it as decided."""

  def __init__(self, folder, count):
    self.folder, self.count = folder, count
    self.writers = [VllmShareWriter(SPEC) for _ in range(1, count)]

  def publish(self, version, leaves):
    order = self.folder.begin_shares(slices=SLICES, checksums=True)
    asked, tree = order.to_json(), dict(leaves)

    def share(number):
      names = VllmShareWriter(SPEC).names(number, self.count)
      return [(name, tree[name]) for name in sorted(names)]

    reports = []
    for number, writer in enumerate(self.writers, 1):
      assert writer.can_write(asked, number, self.count) and writer.awaits_decision(asked)
      reports.append(writer.write(asked, number, self.count, share(number)))
    mine = self.folder.write_share(ShareOrder.from_json(asked), self.count, share(0))
    reports = [mine, *map(ShareReport.from_json, reports)]
    decision = self.folder.decide(reports)
    # A release of earlier versions spares what is being written.
    self.folder.keep_only(*self.kept)
    digests = [writer.write_decided(decision.to_json())['digests'] for writer in self.writers]
    digests = [self.folder.write_decided(decision), *digests]
    self.kept = [self.folder.complete_decided(version, reports, decision, digests)]
    return self.kept[0]

  kept = ()


def bits(tensors):
  return {name: tensor.tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize('count', [2, 5])
def test_deltas_of_several_processes_are_those_of_one(tmp_path, count):
  options = {'dtype': 'bfloat16', 'full_every': 4}
  alone = DeltaFolder(tmp_path / 'alone', SPEC, **options)
  processes, label = Processes(DeltaFolder(tmp_path / 'w', SPEC, **options), count), None
  for step in range(7):
    wanted = alone.write(Version(0, step), changed(step), slices=SLICES, checksums=True)
    made = processes.publish(Version(0, step), changed(step))
    assert len(made.deltas) == len(wanted.deltas) == step % 4
    for name in ('label', 'digests', 'slice_digests', 'checksums', 'files_label', 'nbytes'):
      assert getattr(made, name) == getattr(wanted, name), name
    assert (made.sent_bytes, made.changed_fraction) == (wanted.sent_bytes, wanted.changed_fraction)
    assert bits(read_published(made)) == bits(read_published(wanted))
    if made.deltas:
      files = made.deltas[-1].files
      changing = {n for n in range(count) if share_of(SPEC, n, count) & {*NAMES}}
      assert files.keys() == {delta_file(number) for number in {0, *changing}}
      assert made.deltas[-1].before == label
    label = made.label
  whole = processes.folder.write_whole(made)
  assert not whole.deltas and whole.label == made.label == whole.files_label
  assert set(whole.files) == {share_file(number) for number in range(count)}
  assert bits(read_published(whole)) == bits(read_published(wanted))
  # The images still contain it.
  processes.kept = [whole]
  next_one = processes.publish(Version(0, 7), changed(7))
  assert next_one.deltas[-1].before == whole.label
  assert bits(read_published(next_one)) == bits(read_published(alone.write(V1, changed(7))))


def test_a_process_that_does_not_have_the_version_before_gets_the_next_one_published_whole(
  tmp_path,
):
  processes = Processes(DeltaFolder(tmp_path / 'w', SPEC, dtype='float32', full_every=9), 2)
  processes.publish(Version(0, 0), changed(0))
  assert processes.publish(Version(0, 1), changed(1)).deltas
  processes.writers = [VllmShareWriter(SPEC)]
  made = processes.publish(Version(0, 2), changed(2))
  assert not made.deltas and made.changed_fraction is None
  assert bits(read_published(made)) == {
    entry.hf: dict(changed(2))[entry.unrolled].tobytes() for entry in entries(SPEC)
  }
  assert processes.publish(Version(0, 3), changed(3)).deltas


def test_shares_that_cannot_be_restored_from_damaged_files_are_written_with_the_next_version(
  tmp_path,
):
  processes = Processes(DeltaFolder(tmp_path / 'w', SPEC, dtype='float32', full_every=9), 2)
  for step in range(3):
    made = processes.publish(Version(0, step), changed(step))
  path = made.deltas[0].directory / delta_file(1)
  content = bytearray(path.read_bytes())
  content[-1] ^= 1
  path.write_bytes(content)
  with pytest.raises(ValueError, match='as read, announced was'):
    processes.folder.write_whole(made)
  assert not processes.publish(Version(0, 3), changed(3)).deltas


def test_a_process_that_does_not_see_the_directory_writes_no_delta(tmp_path):
  folder = DeltaFolder(
    tmp_path / 'w', SPEC, dtype='float32', full_every=4, source=fronts.config(tmp_path)
  )
  order = folder.begin_shares()._replace(directory='/not/on/this/host')
  assert not VllmShareWriter(SPEC).can_write(order.to_json(), 1, 2)


async def shared(fleet, version, writer=None, *, error=None):
  """Weights of which a second process writes a share, or fails to."""
  order = await fleet.begin_load()
  writer = writer or VllmShareWriter(MODEL.spec)
  values, decisions = tensors(version.step), []

  def leaves(number):
    names = writer.names(number, 2)
    return [(e.unrolled, values[e.hf]) for e in entries(MODEL.spec) if e.unrolled in names]

  async def reports():
    if error is not None:
      return [None, error]
    return [
      None,
      writer.write_decided(decisions[-1]) if decisions else writer.write(order, 1, 2, leaves(1)),
    ]

  async def decide(decision):
    decisions.append(decision)

  shares = SharedWrite(order=order, count=2, reports=reports, decide=decide)
  probe = weights(version).probe
  return Weights(version=version, leaves=leaves(0), probe=probe, shares=shares)


def test_servers_load_deltas_that_several_processes_wrote(tmp_path):
  async def main():
    writer = VllmShareWriter(MODEL.spec)
    async with (
      places(tmp_path, 2) as made,
      fleet_over(made, tmp_path, first=None, full_every=9) as fleet,
    ):
      for number in range(3):
        version = Version(A.attempt + number, A.step)
        await fleet.load(await shared(fleet, version, writer))
        assert versions(await wave(fleet)) == {version}
        publication = fleet._updates.current.publication
        # The weights of these versions are the same.
        assert len(publication.deltas) == number and len(publication.files) == 2
        assert [await place.digests() for place in made] == [publication.digests] * 2
      # Those of the next version differ everywhere.
      await fleet.load(await shared(fleet, B, writer))
      assert versions(await wave(fleet)) == {B} and not fleet._updates.current.publication.deltas
      writer.write_decided = lambda decision: {'error': 'the disk is full'}
      with pytest.raises(RunError, match='process 1 could not write its share: the disk is full'):
        await fleet.load(await shared(fleet, Version(B.attempt + 1, B.step), writer))
      assert versions(await wave(fleet)) == {B}

  run(main)


def test_servers_load_versions_that_several_processes_wrote(tmp_path):
  async def main():
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path, first=None) as fleet:
      for version in (A, B):
        await fleet.load(await shared(fleet, version))
        assert versions(await wave(fleet)) == {version}
      assert len(fleet._updates.current.publication.files) == 2

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
