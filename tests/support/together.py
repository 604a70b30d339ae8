"""Program of one of several processes, which export a model together.

  together.py FOLDER PROCESSES PROCESS PORT

Each directory of `FOLDER` is an export; `killed` is the last, which process 1 does not survive.
Prints one line of JSON for each: what the export returned, or its error.
"""

import asyncio
import json
import os
import pathlib
import signal
import sys

import jax
from parameters import random_params

from jaxrl_llm.app.composition.exporting import ModelExport, export_together
from jaxrl_llm.config.values import to_json
from jaxrl_llm.core.errors import RunError
from jaxrl_llm.learner.state import place_params
from jaxrl_llm.master.process import Process
from jaxrl_llm.models.api import build_model, stack_layers
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.parallel.coordinator import Coordinator
from jaxrl_llm.parallel.device import DeviceThread, PeerFailed
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.rollout.publisher import Gatherer
from jaxrl_llm.weights.hf import describe

SPEC = tiny('qwen2', 52, num_hidden_layers=3, tie_word_embeddings=False)
DEVICES = 2
"""Devices of each process."""


BLOCKED = {'failing': 2, 'failing first': 1}
"""Numbers of the files that cannot be written, keyed by the export's name."""


class Deadly(Gatherer):
  """Kills the process amid its parameters."""

  def leaves(self, params, names=None):
    for number, leaf in enumerate(super().leaves(params, names)):
      if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
      yield leaf


async def main(folder, number):
  mesh = build_mesh(MeshConfig(fsdp=jax.process_count(), tensor=DEVICES))
  device = DeviceThread()
  coordinator = Coordinator(device, on_signal=lambda signum: None)
  process = Process(coordinator=coordinator, device=device, mesh=mesh)
  model = build_model(SPEC, ModelOptions(scan_layers=True), mesh)
  params = place_params(model, mesh, stack_layers(random_params(SPEC, seed=1)))

  async def export(name, gatherer=None, directory=None):
    directory = directory or folder / name
    model = ModelExport(
      directory=directory,
      gatherer=gatherer or Gatherer(mesh),
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

    try:
      made = await export_together(process, model, None if number else begin, digests=True)
      line = {'made': made and to_json(made)}
    except RunError as error:
      line = {'error': str(error)}
    print(json.dumps({'name': name, **line}), flush=True)

  await export('seen')
  await export('unseen', directory=folder / ('elsewhere' if number else 'unseen'))
  await export('failing')
  await export('failing first')
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
