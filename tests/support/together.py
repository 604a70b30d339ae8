"""Program of one of several processes, which publish and export a model together.

  together.py FOLDER PROCESSES PROCESS PORT

`FOLDER` has the publications in `whole`, `deltas`, `compared` (on the devices) and `lora`, and a
directory for each export; `killed` is the last, which process 1 does not survive. Prints one line
of JSON for each: the publications as process 0 describes them, what the export returned, or its
error. `digest` is the line of the digest of base weights.
"""

import asyncio
import functools
import json
import os
import pathlib
import signal
import sys
from typing import ClassVar

import jax
import numpy as np
from parameters import random_params

from jaxrl_llm.app.composition import state
from jaxrl_llm.app.composition.exporting import ModelExport, export_alone, export_together
from jaxrl_llm.config.values import to_json
from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.trees import flatten, unflatten
from jaxrl_llm.core.types import Version
from jaxrl_llm.learner.state import place_params
from jaxrl_llm.master.process import Process
from jaxrl_llm.models import lora
from jaxrl_llm.models.api import build_model, stack_layers
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import LoraConfig, ModelOptions
from jaxrl_llm.parallel.coordinator import Coordinator
from jaxrl_llm.parallel.device import DeviceThread, PeerFailed
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.rollout.device_image import DeviceImage
from jaxrl_llm.rollout.gatherer import Gatherer
from jaxrl_llm.rollout.publisher import Publisher
from jaxrl_llm.rollout.vllm.adapter_folder import AdapterFolder
from jaxrl_llm.rollout.vllm.delta_folder import DeltaFolder
from jaxrl_llm.rollout.vllm.publication import PublicationFolder
from jaxrl_llm.rollout.vllm.share_writer import VllmShareWriter
from jaxrl_llm.rollout.vllm.version_writer import VersionWriter
from jaxrl_llm.weights.hf import describe
from jaxrl_llm.weights.peft import WEIGHTS, export_adapter

SPEC = tiny('qwen2', 52, num_hidden_layers=3, tie_word_embeddings=False)
WHOLE = ModelOptions(scan_layers=True)
LORA = LoraConfig(rank=2, alpha=4, targets=('query', 'down'))
ADAPTED = ModelOptions(scan_layers=True, lora=LORA)
DEVICES = 2
"""Devices of each process."""
LOST = 2
"""Step before which the devices of process 1 lose the bits of the newest version."""

BLOCKED = {'failing': 2, 'failing first': 1}
"""Numbers of the files that cannot be written, keyed by the export's name."""
UNRENAMED = 'unrenamed'
"""Name of an export whose second file cannot get its final name."""
INCOMPLETE = 'incomplete'
"""Name of an export whose last step fails in process 0."""


def params_of(step):
  """Parameters of a version, of which two arrays differ from those of another step."""
  params = random_params(SPEC, seed=1)
  params['norm']['scale'][3:9] += step
  params['layers']['1']['mlp']['up']['kernel'][5] *= 1 + step
  return params


def adapters_of(step):
  """Adapters of a version, keyed by their flat names in the unrolled tree."""
  random = np.random.default_rng(1)
  shapes = flatten(lora.fresh(params_of(0), LORA, jax.random.key(1)))
  return {
    name: random.random(leaf.shape, np.float32) + np.float32(step * name.endswith('lora_b'))
    for name, leaf in sorted(shapes.items())
  }


class Folder:
  """Engine that keeps what is published in a folder."""

  name, version = 'folder', None

  def __init__(self, folder, device):
    self._writer, self.published = VersionWriter(folder, device.run), []

  async def begin_load(self):
    return await self._writer.begin(())

  async def load(self, weights):
    self.published.append(await self._writer.write(weights, ()))

  async def relabel(self, version): ...

  async def start(self): ...

  async def close(self): ...

  def generate(self, request): ...

  def take_metrics(self):
    return {}


def described(publication):
  """What a test compares with another publication."""
  return {
    'label': publication.label,
    'digests': publication.digests,
    'files': sorted(publication.files),
    'deltas': [sorted(delta.files) for delta in publication.deltas],
    'sent_bytes': publication.sent_bytes,
    'changed_fraction': publication.changed_fraction,
    'base': publication.base and described(publication.base),
  }


class Deadly(Gatherer):
  """Kills the process amid its parameters."""

  def share(self, params, shares, number):
    for count, leaf in enumerate(super().share(params, shares, number)):
      if count == 3:
        os.kill(os.getpid(), signal.SIGKILL)
      yield leaf


class Recording(Gatherer):
  """Records the names of the parameters that are copied to this process's host."""

  copied: ClassVar[list[str]] = []

  def leaves(self, params, names=None):
    for name, array in super().leaves(params, names):
      self.copied.append(name)
      yield name, array


async def main(folder, number):
  mesh = build_mesh(MeshConfig(fsdp=jax.process_count(), tensor=DEVICES))
  device = DeviceThread()
  coordinator = Coordinator(device, on_signal=lambda signum: None)
  process = Process(coordinator=coordinator, device=device, mesh=mesh)
  model = build_model(SPEC, ModelOptions(scan_layers=True), mesh)
  params = place_params(model, mesh, stack_layers(params_of(0)))

  # Their programs are compiled once for all publications and exports.
  publishing, exporting = Gatherer(mesh, dtype='bfloat16'), Gatherer(mesh)

  async def publish(name, folder, options=WHOLE, *, on_devices=False):
    engine = None if number else Folder(folder(), device)
    model = build_model(SPEC, options, mesh)
    image, copied = DeviceImage(publishing) if on_devices else None, []
    publisher = Publisher(
      engine,
      publishing,
      device,
      coordinator=coordinator,
      writer=VllmShareWriter(SPEC),
      image=image,
      changing=lambda params: lora.split(params, SPEC, options)[0],
    )
    for step in range(2 if options.lora is not None else 4):
      version = Version(0, step)
      params = params_of(step)
      if image is not None and (number, step) == (1, LOST):
        image.holds = None
      if options.lora is not None:
        params = lora.join(params_of(0), unflatten(adapters_of(step)))
      sent = place_params(model, mesh, stack_layers(params))
      await publisher.publish(sent, version, moved=version)
      copied.append(publisher.take_metrics().get('perf/publish_copied_bytes'))
    published = [described(publication) for publication in engine.published] if engine else None
    print(json.dumps({'name': name, 'published': published, 'copied': copied}), flush=True)

  async def export(name, gatherer=None, directory=None):
    directory = directory or folder / name
    model = ModelExport(
      directory=directory,
      gatherer=gatherer or exporting,
      params=params,
      spec=SPEC,
      dtype='bfloat16',
    )

    def begin():
      describe(
        directory, SPEC, dtype='bfloat16', tokenizer_dir=None, eos_ids=(1,), pad_id=0,
      )  # fmt: skip
      if name in BLOCKED:
        (directory / f'model-{BLOCKED[name]:05d}-of-00002.safetensors.unfinished').mkdir()
      if name == UNRENAMED:
        (directory / 'model-00002-of-00002.safetensors').mkdir()

    def complete(weights):
      raise OSError('cannot be completed')

    last = complete if name == INCOMPLETE and not number else None
    try:
      made = await export_together(
        process, model, None if number else begin, digests=True, complete=last
      )
      line = {'made': made and to_json(made)}
    except RunError as error:
      line = {'error': str(error)}
    print(json.dumps({'name': name, **line}), flush=True)

  async def export_adapters(name):
    adapters = stack_layers(lora.join(params_of(0), unflatten(adapters_of(0))))
    placed = place_params(build_model(SPEC, ADAPTED, mesh), mesh, adapters)
    trained, _ = lora.split(placed, SPEC, ADAPTED)
    if name == 'failing adapter' and not number:
      (folder / name / f'{WEIGHTS}.unfinished').mkdir(parents=True)
    write = functools.partial(export_adapter, folder / name, spec=SPEC, lora=LORA, base='org/base')
    line = {}
    try:
      await export_alone(process, exporting, trained, write)
    except RunError as error:
      line = {'error': str(error)}
    print(json.dumps({'name': name, **line}), flush=True)

  layout = {'spec': SPEC, 'dtype': 'bfloat16'}
  await publish('whole', lambda: PublicationFolder(folder / 'whole', **layout))
  await publish('deltas', lambda: DeltaFolder(folder / 'deltas', full_every=3, **layout))
  compared = functools.partial(DeltaFolder, folder / 'compared', full_every=3, **layout)
  await publish('compared', compared, on_devices=True)
  await publish('adapters', lambda: AdapterFolder(folder / 'lora', lora=LORA, **layout), ADAPTED)
  state.Gatherer = Recording
  digest = await device.run(state.base_digest, params, mesh)
  line = {'name': 'digest', 'digest': digest, 'copied': Recording.copied}
  print(json.dumps(line), flush=True)
  await export_adapters('adapter')
  await export_adapters('failing adapter')
  await export('seen')
  await export('unseen', directory=folder / ('elsewhere' if number else 'unseen'))
  await export('failing')
  await export('failing first')
  await export(UNRENAMED)
  await export(INCOMPLETE)
  await export('seen')
  await export('killed', Deadly(mesh) if number else None)


if __name__ == '__main__':
  root, count, own, port = sys.argv[1:]
  jax.distributed.initialize(
    f'127.0.0.1:{port}', int(count), int(own), heartbeat_timeout_seconds=10
  )
  try:
    asyncio.run(main(pathlib.Path(root), int(own)))
  except PeerFailed as error:
    print(json.dumps({'name': 'killed', 'error': str(error)}), flush=True)
    os._exit(error.exit_code)  # JAX would wait for the killed process.
