"""Versions that are published as deltas: what servers hold after each is what whole weights would
have given them, and a delta that cannot be used costs nothing but whole weights.
"""

import dataclasses
import functools
import json
import re

import numpy as np
import pytest
from fake_vllm import Fault
from fleets import (
  MODEL,
  NORM,
  UPDATE,
  VOCAB,
  back,
  fleet_over,
  hasten,
  places,
  run,
  score,
  tensors,
  versions,
  wave,
)
from safetensors.numpy import load_file, save_file

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.client import Lost, Refused
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.api import Probe, Weights
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.vllm.delta_folder import DeltaFolder
from jaxrl_llm.rollout.vllm.publication import (
  FILE,
  PublicationFolder,
  digest,
  read_published,
)
from jaxrl_llm.rollout.vllm.replica import Replica
from jaxrl_llm.rollout.vllm.shares import delta_file
from jaxrl_llm.weights.checksums import Slice, checksums
from jaxrl_llm.weights.tables import entries

SPEC = MODEL.spec
EMBEDDING = 'model.embed_tokens.weight'
V = [Version(0, step) for step in range(9)]


@pytest.fixture(autouse=True)
def often(monkeypatch):
  hasten(monkeypatch)


@functools.cache
def near(step):
  """Tensors of a version, of which a step changes one element in about a hundred."""
  if step == 0:
    return tensors(0)
  random = np.random.default_rng(step)
  made = {name: tensor.copy() for name, tensor in near(step - 1).items()}
  for tensor in made.values():
    flat = tensor.reshape(-1)
    flat[random.random(flat.size) < 0.01] += 1
  return made | {NORM: np.full_like(made[NORM], step)}


def leaves_of(loaded):
  return [(entry.unrolled, loaded[entry.hf]) for entry in entries(SPEC)]


def weights(step):
  sequences = np.random.default_rng(0).integers(0, VOCAB, (2, 6), np.int32)
  logprobs = np.array([[0.0, *score(row, near(step))] for row in sequences], np.float32)
  probe = Probe(sequences=sequences, logprobs=logprobs)
  return Weights(version=V[step], leaves=leaves_of(near(step)), probe=probe)


def digests_of(step):
  return {name: digest(tensor) for name, tensor in near(step).items()}


def bits(loaded):
  return {name: tensor.tobytes() for name, tensor in loaded.items()}


# Files.


@pytest.mark.parametrize('full_every', [2, 4])
def test_each_version_is_described_and_read_as_if_it_were_whole(tmp_path, full_every):
  slices = {EMBEDDING: {Slice(0, 3, 20), Slice(1, 4, 5)}}
  plain = PublicationFolder(tmp_path / 'plain', SPEC, dtype='bfloat16')
  folder = DeltaFolder(tmp_path / 'w', SPEC, dtype='bfloat16', full_every=full_every)
  kept = []
  for step in range(9):
    wanted = plain.write(V[step], leaves_of(near(step)), slices=slices)
    publication = folder.write(V[step], leaves_of(near(step)), slices=slices)
    assert len(publication.deltas) == step % full_every
    assert publication.label == wanted.label and publication.digests == wanted.digests
    assert publication.slice_digests == wanted.slices and publication.nbytes == wanted.nbytes
    if publication.deltas:
      assert publication.sent_bytes < 0.1 * publication.nbytes
      assert publication.deltas[-1].before == kept[-1][0].label
      assert publication.deltas[-1].label == wanted.label
    else:
      assert publication.sent_bytes == wanted.nbytes
      assert (publication.directory / FILE).read_bytes() == (wanted.directory / FILE).read_bytes()
    kept = [*kept[-1:], (publication, bits(read_published(wanted)))]
    folder.keep_only(*(earlier for earlier, _ in kept))
    plain.keep_only(wanted)
    for held, wanted_bits in kept:
      assert bits(read_published(held)) == wanted_bits
    directories = {path for path in folder.root.iterdir() if path.name != 'unfinished'}
    assert directories == set.union(*(held.directories for held, _ in kept))


def test_the_changed_fraction_is_counted_whatever_is_sent(tmp_path):
  folder = DeltaFolder(tmp_path / 'w', SPEC, dtype='float32', full_every=9)
  first = folder.write(V[0], leaves_of(near(0)))
  sparse = folder.write(V[1], leaves_of(near(1)))
  dense = folder.write(V[2], leaves_of({name: -tensor for name, tensor in near(1).items()}))
  same = folder.write(V[3], leaves_of({name: -tensor for name, tensor in near(1).items()}))
  count = sum(tensor.size for tensor in near(0).values())
  changed = sum(int((near(0)[name] != near(1)[name]).sum()) for name in near(0))
  assert first.changed_fraction is None and sparse.changed_fraction == changed / count
  assert dense.changed_fraction == 1.0 and dense.deltas == (), 'its delta is no smaller'
  assert same.changed_fraction == 0.0 and same.sent_bytes == 0
  assert bits(read_published(same)) == bits({n: -tensor for n, tensor in near(1).items()})


def test_deltas_that_are_together_as_large_as_whole_weights_end_the_chain(tmp_path):
  folder = DeltaFolder(tmp_path / 'w', SPEC, dtype='float32', full_every=99)
  random, loaded, lengths = np.random.default_rng(0), near(0), []
  for step in range(8):
    publication = folder.write(V[step], leaves_of(loaded))
    lengths.append(len(publication.deltas))
    loaded = {
      name: np.where(random.random(tensor.shape) < 0.3, -tensor, tensor)
      for name, tensor in loaded.items()
    }
  # Each has 5 bytes for three tenths of the elements of 4: three are 1.125 of whole weights.
  assert lengths == [0, 1, 2, 3, 0, 1, 2, 3]


def test_after_a_write_that_failed_the_next_version_is_whole(tmp_path):
  folder = DeltaFolder(tmp_path / 'w', SPEC, dtype='float32', full_every=9)
  first = folder.write(V[0], leaves_of(near(0)))
  with pytest.raises(UserError, match='lack'):
    folder.write(V[1], leaves_of(near(1))[::2])
  with pytest.raises(ValueError, match='no longer the newest'):
    folder.write_whole(first)
  assert bits(read_published(first)) == bits(near(0))
  again = folder.write(V[2], leaves_of(near(2)))
  assert not again.deltas and again.changed_fraction is None
  assert folder.write(V[3], leaves_of(near(3))).deltas


def test_a_version_is_written_again_in_full_only_while_it_is_the_newest(tmp_path):
  folder = DeltaFolder(tmp_path / 'w', SPEC, dtype='float32', full_every=9)
  _, before, newest = (folder.write(V[step], leaves_of(near(step))) for step in range(3))
  with pytest.raises(ValueError, match=r'version 0\.1 is no longer the newest'):
    folder.write_whole(before)
  whole = folder.write_whole(newest)
  assert not whole.deltas and whole.label == newest.label
  assert bits(load_file(whole.directory / FILE)) == bits(near(2))
  assert folder.write_whole(newest) is whole, 'another server asks for it, too'
  (delta,) = folder.write(V[3], leaves_of(near(3))).deltas
  assert delta.before == newest.label


def test_what_a_server_needs_follows_from_what_it_holds(tmp_path):
  folder = DeltaFolder(tmp_path / 'w', SPEC, dtype='float32', full_every=9)
  made = [folder.write(V[step], leaves_of(near(step))) for step in range(4)]
  for held in range(3):
    needed = made[3].since(made[held].label)
    assert needed.files == {} and needed.deltas == made[3].deltas[held:]
    assert needed.label == made[3].label and needed.digests == made[3].digests
  for unknown in (None, 'another', made[3].label):
    assert made[3].since(unknown) == made[3]


# Servers.


@dataclasses.dataclass
class Asked:
  """What a server is told in its updates: files, and deltas."""

  updates: list

  @classmethod
  def of(cls, place):
    asked = cls([])
    update = place.server._worker.update

    async def watched(info):
      asked.updates.append((bool(info['files']), len(info.get('deltas', ()))))
      json.dumps(info)
      await update(info)

    place.server._worker.update = watched
    return asked


def test_servers_hold_after_each_delta_what_whole_weights_give(tmp_path):
  async def main():
    async with (
      places(tmp_path, 2) as made,
      fleet_over(made, tmp_path, first=None, full_every=2) as fleet,
    ):
      asked = [Asked.of(place) for place in made]
      for step in range(4):
        await fleet.load(weights(step))
        for place in made:
          assert await place.digests() == digests_of(step)
        assert versions(await wave(fleet, begin=10 * step)) == {V[step]}
        metrics = fleet.take_metrics()
        whole = sum(tensor.nbytes for tensor in near(0).values())
        assert (metrics['perf/publish_bytes'] < 0.1 * whole) == (step % 2 != 0)
        if step:
          assert 0.005 < metrics['perf/publish_changed_fraction'] < 0.03
        else:
          assert 'perf/publish_changed_fraction' not in metrics
      for each in asked:
        assert each.updates == [(True, 0), (False, 1)] * 2
      assert fleet.counts['void'] == fleet.counts['restarts'] == 0

  run(main)


def test_a_server_that_was_killed_catches_up_over_the_chain(tmp_path):
  async def main():
    async with (
      places(tmp_path, 2) as made,
      fleet_over(made, tmp_path, first=None, full_every=9) as fleet,
    ):
      for step in range(2):
        await fleet.load(weights(step))
      await made[0].server.die()
      for step in (2, 3):
        await fleet.load(weights(step))
        assert versions(await wave(fleet, begin=10 * step)) == {V[step]}
      await made[0].server.close()
      await made[0].start()
      asked = Asked.of(made[0])
      await back(fleet, made[0], V[3])
      assert await made[0].digests() == digests_of(3)
      # It may have begun with the version before.
      assert [files for files, _ in asked.updates] in ([True], [True, False])
      assert sum(deltas for _, deltas in asked.updates) == 3
      await fleet.load(weights(4))
      assert asked.updates[-1] == (False, 1)
      assert [await place.digests() for place in made] == [digests_of(4)] * 2

  run(main)


def test_damaged_files_below_the_deltas_are_replaced_for_a_server_that_needs_them(tmp_path):
  async def main():
    async with (
      places(tmp_path, 2) as made,
      fleet_over(made, tmp_path, first=None, full_every=9) as fleet,
    ):
      for step in range(2):
        await fleet.load(weights(step))
      await made[0].server.die()
      for step in (2, 3):
        await fleet.load(weights(step))
      path = fleet._updates.current.publication.directory / FILE
      path.write_bytes(path.read_bytes()[:-5])
      await made[0].server.close()
      await made[0].start()
      asked = Asked.of(made[0])
      await back(fleet, made[0], V[3])
      assert asked.updates[-1] == (True, 0) and await made[0].digests() == digests_of(3)

  run(main)


def rewritten(path, change):
  """The file after a change of its arrays, with digests as if they were announced."""
  arrays = load_file(path)
  change(arrays)
  save_file(arrays, path)
  return {delta_file(0): {name: digest(array) for name, array in arrays.items()}}


def outside(arrays):
  name = next(name for name in arrays if name.endswith('/gaps'))
  long = np.full(10_000, 255, np.uint8)
  arrays[name] = np.concatenate([long, arrays[name]])


def shorter(arrays):
  name = next(name for name in arrays if name.endswith('/bits'))
  arrays[name] = arrays[name][:-1]


def other_values(arrays):
  name = f'{EMBEDDING}/bits'
  arrays[name] = arrays[name] ^ 1


def spoiled(publication, kind):
  """The publication with its last delta as somebody else left it."""
  delta = publication.deltas[-1]
  path = delta.directory / delta_file(0)
  if kind == 'another base':
    delta = dataclasses.replace(delta, before=f'{delta.before}0')
  elif kind == 'truncated':
    path.write_bytes(path.read_bytes()[:-5])
  elif kind == 'missing':
    path.unlink()
  elif kind == 'another byte':
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
  else:
    change = {
      'positions outside': outside,
      'a value too few': shorter,
      'other values': other_values,
    }[kind]
    delta = dataclasses.replace(delta, files=rewritten(path, change))
  return dataclasses.replace(publication, deltas=(*publication.deltas[:-1], delta))


KINDS = {
  'another version on the server': 'delta refused: it applies to .*, this worker holds another',
  'another base': 'delta refused: it applies to',
  'truncated': 'cannot be read',
  'missing': 'cannot be read',
  'another byte': 'as read, announced was',
  'positions outside': 'delta refused: ',
  'a value too few': 'delta refused: ',
  'other values': '1 of .* loaded tensors differ from those published as 0.2: ' + EMBEDDING,
}


@pytest.mark.parametrize('kind', KINDS)
def test_a_delta_that_cannot_be_used_is_refused_and_whole_weights_follow(tmp_path, kind, caplog):
  async def main():
    async with (
      places(tmp_path, 2) as made,
      fleet_over(made, tmp_path, first=None, full_every=9) as fleet,
    ):
      for step in range(2):
        await fleet.load(weights(step))
      asked = [Asked.of(place) for place in made]
      write, resume = fleet._updates.folder.write, made[0].server._core.resume
      if kind == 'another version on the server':
        for place in made:
          place.server._worker.holds = 'another'
      else:
        fleet._updates.folder.write = lambda *args, **options: spoiled(
          write(*args, **options), kind
        )
      held = []
      made[0].server._core.resume = lambda: (
        held.append(int(made[0].policy.tensors[NORM][0])),
        resume(),
      )
      await fleet.load(weights(2))
      fleet._updates.folder.write = write
      for place, each in zip(made, asked, strict=True):
        assert await place.digests() == digests_of(2) and each.updates[-1] == (True, 0)
      assert versions(await wave(fleet)) == {V[2]}
      # A refusal leaves the version before; wrong values are never sampled from.
      assert set(held) <= ({2} if kind == 'other values' else {1, 2})
      sent = fleet.take_metrics()['perf/publish_bytes']
      assert sent > sum(tensor.nbytes for tensor in near(0).values())
      await fleet.load(weights(3))
      assert [await place.digests() for place in made] == [digests_of(3)] * 2
      assert [each.updates[-1] for each in asked] == [(False, 1)] * 2
      assert fleet.counts['restarts'] == fleet.counts['void'] == 0

  run(main)
  lines = [r.getMessage() for r in caplog.records if 'gets whole weights' in r.getMessage()]
  assert lines and all(re.search(KINDS[kind], line) and '\n' not in line for line in lines)


def test_a_server_that_dies_while_it_applies_a_delta_is_brought_back(tmp_path):
  async def main():
    async with (
      places(tmp_path, 2) as made,
      fleet_over(made, tmp_path, first=None, full_every=9) as fleet,
    ):
      for step in range(2):
        await fleet.load(weights(step))
      made[0].faults.fault, made[0].faults.path = Fault.DIE, UPDATE
      await fleet.load(weights(2))
      assert versions(await wave(fleet)) == {V[2]}
      made[0].faults.fault = None
      await made[0].restart()
      await back(fleet, made[0], V[2])
      assert await made[0].digests() == digests_of(2)

  run(main)


class Halves:
  """A server of two workers, of which the second refuses deltas after the first has written."""

  name, address, adapter = 'halves', 'unix:/halves', None

  def __init__(self):
    self.calls = []

  def __getattr__(self, name):
    async def call(*args, **options):
      self.calls.append(name)

    return call

  async def update_weights(self, info, *, deadline_s):
    self.calls.append('deltas' if info.get('deltas') else 'whole')
    if info.get('deltas'):
      raise Lost('halves: delta refused: it applies to another')

  async def digests(self, *, deadline_s):
    return [digests_of(1)] * 2

  async def checksums(self, *, deadline_s):
    return [{name: checksums(tensor)[None] for name, tensor in near(1).items()}] * 2


def test_a_server_whose_workers_disagree_about_a_delta_stays_paused_until_whole_weights(tmp_path):
  folder = DeltaFolder(tmp_path / 'w', SPEC, dtype='float32', full_every=9)
  first, second = (folder.write(V[step], leaves_of(near(step))) for step in range(2))

  async def main():
    client = Halves()
    replica = Replica('halves', client=client, server=None)
    replica.slices = [{name: {'slice': None} for name in near(0)}] * 2
    replica.version, replica.holds = V[0], first.label
    with pytest.raises(Refused, match='delta refused'):
      await replica.take(second, None, tolerance=1.0, deadline_s=60)
    assert replica.version is None and replica.holds is None and 'resume' not in client.calls
    assert client.calls == ['pause', 'start_update', 'deltas']
    await replica.take(folder.write_whole(second), None, tolerance=1.0, deadline_s=60)
    assert replica.proven == {V[1]} and client.calls[-1] == 'resume' and 'whole' in client.calls

  run(main)


@pytest.mark.parametrize(
  ('options', 'words'),
  [
    ({'full_every': 0}, 'rollout.vllm.full_every: 0, wanted at least 1'),
    ({'full_every': 2, 'transfer': 'nccl'}, 'no deltas are published with .*transfer=nccl'),
    ({'compare': 'devices'}, "compare: 'devices' .*full_every is 1"),
    ({'full_every': 2, 'lora': 'adapter'}, 'no deltas are published with .*lora=adapter'),
  ],
)
def test_deltas_are_refused_where_none_could_be_sent(options, words):
  with pytest.raises(UserError, match=words):
    VllmConfig(**options)
