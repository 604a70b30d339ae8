"""Memory of the programs that cut, convert and gather weights for publishing, compiled for absent
devices.

  TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost ALLOW_MULTIPLE_LIBTPU_LOAD=true \\
    .venv-aot/bin/python benchmarks/publish_compiled.py --topology=v5e:4x8 --size=7b

One line for each kind of array: megabytes per device of its shard of the whole stack (argument), of
the part that is gathered, and of temporaries; both as a share of a layer's largest matrix in
bfloat16; and the collectives. Parameters are float32, sharded over all devices. First come the
programs with which every device gathers all parts, because process 0 writes alone, then those with
which each process gets the parts of its share. With --changed, the last programs are those with
which the devices compare a version with the previous one, if this share of the elements changes.
After each kind of program comes the number of bytes that a device receives in a whole publication.
"""

import sys

import jax
import optax
from absl import app, flags

from jaxrl_llm.learner.state import abstract_state
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.parallel.collectives import traffic
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.parallel.topology import topology_devices
from jaxrl_llm.rollout.device_image import DeviceImage
from jaxrl_llm.rollout.gatherer import Gatherer
from jaxrl_llm.weights.shares import parameters_of

SIZES = {
  '0.5b': ('qwen2', 896, 4864, 24, 14, 2, 64, 151_936),
  '7b': ('qwen2', 3584, 18_944, 28, 28, 4, 128, 152_064),
  '14b': ('qwen2', 5120, 13_824, 48, 40, 8, 128, 152_064),
  '70b': ('llama', 8192, 28_672, 80, 64, 8, 128, 128_256),
}
"""Family, hidden and intermediate size, layers, heads, key-value heads, head size, vocabulary."""
_TOPOLOGY = flags.DEFINE_string('topology', 'v5e:4x8', 'Devices, as of `jaxrl train --topology`.')
_SIZE = flags.DEFINE_enum('size', '7b', list(SIZES), 'Model.')
_TENSOR = flags.DEFINE_integer('tensor', 1, 'Size of the axis tensor; fsdp takes the rest.')

_CHANGED = flags.DEFINE_float('changed', None, 'Share of the elements that a version changes.')


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    sys.exit(f'argument {argv[1]!r} is not a flag')
  jax.config.update('jax_platforms', 'cpu')
  family, hidden, intermediate, layers, heads, kv_heads, head_dim, vocab = SIZES[_SIZE.value]
  spec = tiny(
    family,
    vocab,
    hidden_size=hidden,
    intermediate_size=intermediate,
    num_hidden_layers=layers,
    num_attention_heads=heads,
    num_key_value_heads=kv_heads,
    head_dim=head_dim,
    tie_word_embeddings=False,
  )
  devices = topology_devices(_TOPOLOGY.value)
  mesh = build_mesh(MeshConfig(fsdp=None, tensor=_TENSOR.value), devices)
  model = build_model(spec, ModelOptions(scan_layers=True, dtype='bfloat16'), mesh)
  params = abstract_state(model, optax.sgd(1.0), mesh).params
  largest = 2 * hidden * intermediate
  print(f'{_SIZE.value} on {_TOPOLOGY.value}, largest matrix of a layer {largest / 1e6:.1f} MB')
  gatherer = Gatherer(mesh, dtype='bfloat16', several=True)
  count = 1 + max(device.process_index for device in devices)
  shares = [parameters_of(spec, number, count) for number in range(count)]
  kinds = {
    'gathered': gatherer.counted_programs(params),
    f'exchanged among {count} processes': gatherer.counted_programs(params, shares),
  }
  if _CHANGED.value is not None:
    programs = DeviceImage(gatherer).counted_programs(params, shares, _CHANGED.value)
    kinds[f'compared, and exchanged among {count} processes'] = programs
  for kind, programs in kinds.items():
    received, calls_of_all = 0, 0
    for name, (lowered, calls) in programs.items():
      compiled = lowered.compile()
      memory, moved = compiled.memory_analysis(), traffic(compiled.as_text())
      part, temporary = memory.output_size_in_bytes, memory.temp_size_in_bytes
      received += calls * sum(of.bytes for of in moved.values())
      calls_of_all += calls
      collectives = '; '.join(
        f'{collective} {of.bytes / 1e6:.1f} MB, largest {of.largest}'
        for collective, of in moved.items()
      )
      print(
        f'{name}: argument {memory.argument_size_in_bytes / 1e6:.1f}, part {part / 1e6:.1f}, '
        f'temporary {temporary / 1e6:.1f}: {(part + temporary) / largest:.2f} of a layer; '
        f'{collectives or "no collective"}'
      )
    print(f'{kind}: a device receives {received / 1e6:,.0f} MB in {calls_of_all} calls')


if __name__ == '__main__':
  app.run(main)
