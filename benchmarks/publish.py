"""Speed of publishing weights, against plain copies and writes on the same machine in the same run.

  .venv/bin/python benchmarks/publish.py [--megabytes=400] [--rounds=15] [--changed=0.01] [--server]

Per dtype, gigabytes of parameters per second (medians): a memcpy into existing memory, NumPy's own
cast and write of the same tensors to the same folder, and `PublicationFolder.write` (cast, digest,
write, rename); the last also if it writes to the file instead of storing to its mapped pages. All
are also given per CPU second of this process, which other load on the machine affects less. With
--changed, versions that each change this share of the elements are also
published as deltas, and versions are compared on the hosts and on the devices: CPU seconds of this
process, and megabytes copied from the devices. --server starts one real vLLM server and loads each
publication into it: how long it was paused, and how much of that was loading.
"""

import asyncio
import pathlib
import statistics
import sys
import tempfile
import time

import jax
import numpy as np
from absl import app, flags

from jaxrl_llm.core.trees import flatten, unflatten
from jaxrl_llm.core.types import Version
from jaxrl_llm.learner.state import place_params
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import ModelOptions, ModelSpec
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.rollout.device_image import DeviceImage
from jaxrl_llm.rollout.gatherer import Gatherer
from jaxrl_llm.rollout.vllm.client import VllmClient
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.vllm.delta_folder import DeltaFolder
from jaxrl_llm.rollout.vllm.publication import PublicationFolder
from jaxrl_llm.rollout.vllm.replica import Replica
from jaxrl_llm.rollout.vllm.server import OwnedServer, server_commands
from jaxrl_llm.weights.hf import write_config
from jaxrl_llm.weights.layout import dtype_of
from jaxrl_llm.weights.mapped_files import MappedFiles
from jaxrl_llm.weights.shares import parameters_of

_MEGABYTES = flags.DEFINE_integer('megabytes', 400, 'Of float32 parameters, about.')
_ROUNDS = flags.DEFINE_integer(
  'rounds', 15, 'Publications of each kind; the first six warm up.', lower_bound=7
)
_CHANGED = flags.DEFINE_float(
  'changed', None, 'Share of the elements that change between two versions that are deltas.'
)
_FOLDER = flags.DEFINE_string('folder', '/dev/shm', 'Where to publish.')
_SERVER = flags.DEFINE_bool('server', False, 'Also load each publication into a real vLLM server.')
_ENVIRONMENT = flags.DEFINE_string(
  'environment', VllmConfig.environment, 'Virtual environment that has vLLM.'
)
_WARM_UP = 6
"""Number of publications after which the pages of three files exist and are mapped."""


def spec_of(megabytes: int) -> ModelSpec:
  """Returns a Qwen2 whose float32 parameters take about this many megabytes."""
  shape = dict(
    hidden_size=512,
    intermediate_size=2048,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
  )
  layer = 4 * (512 * (512 + 2 * 256 + 512) + 3 * 512 * 2048)
  layers = max(1, round((megabytes * 1e6 - 4 * 16_000 * 512) / layer))
  return tiny('qwen2', 16_000, **shape, num_hidden_layers=layers, max_position_embeddings=512)


class Unmapped(MappedFiles):
  """Maps no file, so that files are written with write calls."""

  def map(self, file, size):
    return None


def rate(nbytes: int, seconds: list[float]) -> float:
  """GB/s of the median round after the warm-up."""
  return nbytes / statistics.median(seconds[_WARM_UP:]) / 1e9


def timed(work) -> tuple[float, object]:
  before = time.perf_counter()
  result = work()
  return time.perf_counter() - before, result


def measure(
  dtype: str, leaves: dict[str, np.ndarray], spec: ModelSpec, root: pathlib.Path, publish
) -> None:
  """Alternates the four measurements in one run, so that other load on the machine affects all of
  them.
  """
  nbytes, to = sum(leaf.nbytes for leaf in leaves.values()), dtype_of(dtype)
  copies = {name: leaf.copy() for name, leaf in leaves.items()}
  plain = root / 'plain'
  folders = {
    name: PublicationFolder(root / name, spec, dtype=dtype) for name in ('publish', 'unmapped')
  }
  folders['unmapped']._maps = Unmapped()
  kept, seconds = {name: [] for name in folders}, {'paused': [], 'loaded': []}

  def copy(step):
    for name, leaf in leaves.items():
      np.copyto(copies[name], leaf)

  def cast_and_write(step):
    with plain.open('r+b' if plain.exists() else 'wb', buffering=0) as file:
      for leaf in leaves.values():
        file.write(memoryview(leaf.astype(to, copy=False).reshape(-1).view(np.uint8)))

  def write(name):
    def published(step):
      publication = folders[name].write(Version(0, step), leaves.items())
      kept[name] = [*kept[name][-1:], publication]
      folders[name].keep_only(*kept[name])

    return published

  works = {'memcpy': copy, 'numpy': cast_and_write, **{name: write(name) for name in folders}}
  walls, cpus = {name: [] for name in works}, {name: [] for name in works}
  for step in range(_ROUNDS.value):
    for name, work in works.items():
      before = time.process_time()
      walls[name].append(timed(lambda work=work, step=step: work(step))[0])
      cpus[name].append(time.process_time() - before)
    if publish is not None:
      paused, loaded = publish(kept['publish'][-1])
      seconds['paused'].append(paused)
      seconds['loaded'].append(loaded)
  for clock, measured in (('second', walls), ('CPU second', cpus)):
    memcpy, numpy, published, unmapped = (rate(nbytes, measured[name]) for name in works)
    print(
      f'{dtype}, GB per {clock}: memcpy {memcpy:.2f}, NumPy cast and write {numpy:.2f}, publish '
      f'{published:.2f}: {published / memcpy:.2f} of memcpy, {published / numpy:.2f} of NumPy; '
      f'with write calls {unmapped:.2f}: {unmapped / memcpy:.2f} of memcpy'
    )
  if publish is not None:
    report_pauses(seconds)
  for folder in folders.values():
    folder.close()
  if _CHANGED.value is not None:
    measure_deltas(dtype, leaves, spec, root, publish)
    measure_compared(dtype, leaves, spec, root)


def report_pauses(seconds: dict[str, list[float]]) -> None:
  medians = (1e3 * statistics.median(seconds[name][_WARM_UP:]) for name in ('paused', 'loaded'))
  print(
    '  a server was paused {:.0f} ms per publication, {:.0f} ms of it for checking and '
    'loading'.format(*medians)
  )


def measure_deltas(
  dtype: str, leaves: dict[str, np.ndarray], spec: ModelSpec, root: pathlib.Path, publish
) -> None:
  rng = np.random.default_rng(0)
  folder = DeltaFolder(root / 'deltas', spec, dtype=dtype, full_every=_ROUNDS.value + _WARM_UP)
  seconds, nbytes = {'publish': [], 'paused': [], 'loaded': []}, []
  for step in range(_ROUNDS.value):
    for leaf in leaves.values():
      flat = leaf.reshape(-1)
      flat[rng.random(flat.size, np.float32) < _CHANGED.value] *= -1
    took, publication = timed(lambda step=step: folder.write(Version(1, step), leaves.items()))
    seconds['publish'].append(took)
    nbytes.append(publication.sent_bytes)
    if publish is not None:
      paused, loaded = publish(publication)
      seconds['paused'].append(paused)
      seconds['loaded'].append(loaded)
    folder.keep_only(publication)
  published = rate(sum(leaf.nbytes for leaf in leaves.values()), seconds['publish'])
  share = statistics.median(nbytes[_WARM_UP:]) / publication.nbytes
  print(
    f'{dtype}, deltas: publish {published:.2f} GB/s, {share:.4f} of the bytes with '
    f'{publication.changed_fraction:.4f} of the elements'
  )
  if publish is not None:
    report_pauses(seconds)
  folder.close()


def measure_compared(
  dtype: str, leaves: dict[str, np.ndarray], spec: ModelSpec, root: pathlib.Path
) -> None:
  """Compares versions on the hosts and on the devices, one after the other in each round."""
  mesh = build_mesh(MeshConfig(), jax.devices()[:1])
  model = build_model(spec, ModelOptions(), mesh)
  gatherer, rng = Gatherer(mesh, dtype=dtype), np.random.default_rng(0)
  image, names = DeviceImage(gatherer), [parameters_of(spec, 0, 1)]
  folders = {
    name: DeltaFolder(root / name, spec, dtype=dtype, full_every=_ROUNDS.value + _WARM_UP)
    for name in ('hosts', 'devices')
  }
  seconds, copied = {name: [] for name in folders}, {name: [] for name in folders}
  for step in range(_ROUNDS.value):
    for leaf in leaves.values():
      flat = leaf.reshape(-1)
      flat[rng.random(flat.size, np.float32) < _CHANGED.value] *= -1
    params, version = place_params(model, mesh, unflatten(leaves)), Version(2, step)

    def on_hosts(params=params, version=version):
      nbytes = 0

      def counted():
        nonlocal nbytes
        for name, array in gatherer.leaves(params):
          nbytes += array.nbytes
          yield name, array

      return folders['hosts'].write(version, counted()), nbytes

    def on_devices(params=params, version=version):
      folder, order = folders['devices'], folders['devices'].begin_shares()
      compared = image.share(params, names, 0, before=order.image.before, token=order.token)
      report = folder.write_share(order, 1, compared)
      decision = folder.decide([report])
      digests = [folder.write_decided(decision)]
      return folder.complete_decided(version, [report], decision, digests), image.copied_bytes

    labels = set()
    for name, publish in (('hosts', on_hosts), ('devices', on_devices)):
      before = time.process_time()
      publication, nbytes = publish()
      seconds[name].append(time.process_time() - before)
      copied[name].append(nbytes)
      labels.add(publication.label)
      folders[name].keep_only(publication)
    assert len(labels) == 1, 'both describe the same bits'
  for name, folder in folders.items():
    print(
      f'{dtype}, compared on {name}: {statistics.median(seconds[name][_WARM_UP:]):.2f} CPU s, '
      f'{statistics.median(copied[name][_WARM_UP:]) / 1e6:.2f} MB leave the devices'
    )
    folder.close()


class Loading:
  """A real vLLM server that loads publications."""

  def __init__(self, spec: ModelSpec, dtype: str, root: pathlib.Path):
    model = root / 'model'
    model.mkdir(exist_ok=True)
    write_config(model, spec, dtype=dtype, eos_ids=[1], pad_id=0)
    (command,) = server_commands(
      VllmConfig(environment=_ENVIRONMENT.value, servers=1), model, dtype=dtype, max_model_len=256
    )
    self._server = OwnedServer(command, name='vllm-0', log=root / 'vllm-0.log')
    self._replica = Replica(
      'vllm-0', client=VllmClient(self._server.address, name='vllm-0'), server=self._server
    )
    self._runner = asyncio.Runner()
    self._runner.run(self._start())

  async def _start(self) -> None:
    self._server.start()
    took = time.perf_counter()
    await self._server.ready(deadline_s=900)
    print(f'  server up after {time.perf_counter() - took:.0f} s')
    (worker,) = await self._replica.client.weights()
    self._replica.slices = [worker['tensors']]
    await self._replica.transfer.connect(self._replica.client)
    await self._replica.client.warm_up(sampled=False, deadline_s=600)

  def take(self, publication) -> tuple[float, float]:
    async def main():
      transfer, send = self._replica.transfer, self._replica.transfer.send
      loaded = 0.0

      async def timed_send(*args, **kwargs):
        nonlocal loaded
        before = time.perf_counter()
        await send(*args, **kwargs)
        loaded = time.perf_counter() - before

      transfer.send = timed_send
      await self._replica.take(publication, None, tolerance=1.0, deadline_s=600)
      transfer.send = send
      return self._replica.paused_s, loaded

    return self._runner.run(main())

  def close(self) -> None:
    async def main():
      await self._replica.client.close()
      await self._server.stop()

    self._runner.run(main())
    self._runner.close()


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    sys.exit(f'argument {argv[1]!r} is not a flag')
  spec = spec_of(_MEGABYTES.value)
  shapes = flatten(jax.eval_shape(build_model(spec, ModelOptions()).init, jax.random.key(0)))
  rng = np.random.default_rng(0)
  leaves = {
    name: rng.standard_normal(shape.shape, np.float32) for name, shape in sorted(shapes.items())
  }
  print(
    f'{sum(leaf.nbytes for leaf in leaves.values()) / 1e6:.0f} MB of float32 in {len(leaves)} '
    'arrays'
  )
  with tempfile.TemporaryDirectory(dir=_FOLDER.value) as scratch:
    root = pathlib.Path(scratch)
    for dtype in ('float32', 'bfloat16'):
      server = Loading(spec, dtype, root) if _SERVER.value else None
      try:
        measure(dtype, leaves, spec, root, server.take if server else None)
      finally:
        if server:
          server.close()


if __name__ == '__main__':
  app.run(main)
