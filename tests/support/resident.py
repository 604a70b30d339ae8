"""Program of one process that loads a model, publishes it and exports it. It prints how much its
memory grows in each phase.

  resident.py DIRECTORY READER PROCESSES PROCESS PORT

DIRECTORY contains the folder `model`. READER is 'shards' for the project's own reader, or 'float32'
for one that first reads all weights in float32. Each phase prints a line of JSON: its name, the
bytes of the parameters on this process's devices, and the growth in bytes of anonymous memory, of
mapped files and of shared memory since just before the phase.
"""

import asyncio
import json
import os
import pathlib
import subprocess
import sys

SAMPLER = """
import sys, threading
pid, peaks, lock = sys.argv[1], {}, threading.Lock()
def now():
  lines = [line for line in open(f'/proc/{pid}/status') if line.startswith('Rss')]
  fields = dict(line.split(':', 1) for line in lines)
  return {name: 1024 * int(value.split()[0]) for name, value in fields.items()}
def answer():
  global peaks
  for _ in sys.stdin:
    with lock:
      print(' '.join(str(peaks[name]) for name in ('RssAnon', 'RssFile', 'RssShmem')), flush=True)
      peaks = now()
peaks = now()
threading.Thread(target=answer, daemon=True).start()
while True:
  try:
    levels = now()
  except (OSError, ValueError):
    break
  with lock:
    peaks = {name: max(level, peaks[name]) for name, level in levels.items()}
"""


def main(directory, reader, processes, process, port):
  import jax

  if processes > 1:
    jax.distributed.initialize(f'127.0.0.1:{port}', processes, process)
  import jax.numpy as jnp
  from together import Folder

  from jaxrl_llm.app.composition.exporting import ModelExport, export_together
  from jaxrl_llm.core.types import Version
  from jaxrl_llm.learner.loading import read_params
  from jaxrl_llm.learner.state import place_params
  from jaxrl_llm.master.process import Process
  from jaxrl_llm.models.api import build_model
  from jaxrl_llm.models.spec import ModelOptions
  from jaxrl_llm.parallel.coordinator import Coordinator
  from jaxrl_llm.parallel.device import DeviceThread
  from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
  from jaxrl_llm.rollout.gatherer import Gatherer
  from jaxrl_llm.rollout.publisher import Publisher
  from jaxrl_llm.rollout.vllm.publication import PublicationFolder
  from jaxrl_llm.rollout.vllm.share_writer import VllmShareWriter
  from jaxrl_llm.weights.hf import describe, load_params, read_spec

  spec = read_spec(directory / 'model')
  mesh = build_mesh(MeshConfig(fsdp=8))
  model = build_model(spec, ModelOptions(scan_layers=True, param_dtype='bfloat16'), mesh)
  jax.block_until_ready(jnp.zeros(8) + 1)

  def read():
    if reader == 'shards':
      return read_params(model, mesh, directory / 'model', spec)
    whole = load_params(directory / 'model', spec, scan_layers=True, dtype='float32')
    return place_params(model, mesh, jax.tree.map(lambda leaf: leaf.astype('bfloat16'), whole))

  gatherer, device = Gatherer(mesh, dtype='bfloat16'), DeviceThread()
  coordinator = Coordinator(device, on_signal=lambda signum: None)

  async def publish():
    engine = None
    if not process:
      folder = PublicationFolder(directory / 'published', spec, dtype='bfloat16')
      engine = Folder(folder, device)
    publisher = Publisher(
      engine, gatherer, device, coordinator=coordinator, writer=VllmShareWriter(spec)
    )
    await publisher.publish(params, Version(0, 1), moved=Version(0, 1))

  async def export_all():
    model = ModelExport(
      directory=directory / 'exported', gatherer=gatherer, params=params, spec=spec,
      dtype='bfloat16',
    )  # fmt: skip

    def begin():
      describe(model.directory, spec, dtype='bfloat16', tokenizer_dir=None, eos_ids=(1,), pad_id=0)

    these = Process(coordinator=coordinator, device=device, mesh=mesh)
    await export_together(these, model, None if process else begin, digests=False)

  command = [sys.executable, '-c', SAMPLER, str(os.getpid())]
  sampler = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

  def peaks():
    sampler.stdin.write('\n')
    sampler.stdin.flush()
    return [int(peak) for peak in sampler.stdout.readline().split()]

  def measured(phase, work):
    peaks()
    before = peaks()
    result = work()
    growth = [peak - level for peak, level in zip(peaks(), before, strict=True)]
    held = sum(
      shard.data.nbytes for leaf in jax.tree.leaves(params or result)
      for shard in leaf.addressable_shards
    )  # fmt: skip
    print(json.dumps({'phase': phase, 'held': held, 'growth': growth}), flush=True)
    return result

  params = None
  params = measured('load', lambda: jax.block_until_ready(read()))
  if reader == 'shards':
    measured('publish', lambda: asyncio.run(publish()))
    measured('export', lambda: asyncio.run(export_all()))
    device.close()
  sampler.kill()
  if processes > 1:
    jax.distributed.shutdown()


if __name__ == '__main__':
  folder, kind, *numbers = sys.argv[1:]
  main(pathlib.Path(folder), kind, *map(int, numbers))
