"""Attention of a TPU or GPU, compiled for devices that are not here: the choice, the work of each
device, the memory, and what devices exchange.

  TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost ALLOW_MULTIPLE_LIBTPU_LOAD=true \\
    .venv-aot/bin/python benchmarks/attention_compiled.py --topology=v5e:2x4 --time=2048,8192
  python benchmarks/attention_compiled.py --topology=v5e:2x4 --sequence=4 --nocompile

For each length, prints one line for the choice, and one for each order of shards and each row (one
long sequence; lognormal lengths): how many pairs of a block of queries and a block of keys each
device computes. Then, unless --nocompile, compiles the gradient of one layer's attention.
"""

import sys
import time as clock

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from jaxrl_llm.models.attention import KEYS, QUERIES, chosen, sharded_attention
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.ops.places import Places
from jaxrl_llm.parallel.balance import pieces
from jaxrl_llm.parallel.collectives import traffic
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh, data_parallel_ranks
from jaxrl_llm.parallel.rules import constrain, sharding
from jaxrl_llm.parallel.topology import topology_devices

_TOPOLOGY = flags.DEFINE_string('topology', 'v5e:2x4', 'Devices, as of `jaxrl train --topology`.')
_TIME = flags.DEFINE_list('time', ['512', '2048', '8192', '32768'], 'Tokens of a row.')
_SEQUENCE = flags.DEFINE_integer('sequence', 1, 'Shards of the time axis.')
_SHARDS = flags.DEFINE_enum(
  'shards', 'balanced', ['balanced', 'consecutive'], 'Order of the shards to compile.'
)
_HEADS = flags.DEFINE_list('heads', ['28', '4', '128'], 'Query heads, key heads, head size.')
_ROWS = flags.DEFINE_integer('rows', 1, 'Rows per data-parallel rank.')
_MEAN = flags.DEFINE_integer('mean', 1000, 'Mean length of packed sequences.')
_COMPILE = flags.DEFINE_bool('compile', True, 'Compiles the attention.')


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    sys.exit(f'argument {argv[1]!r} is not a flag')
  jax.config.update('jax_platforms', 'cpu')
  mesh = build_mesh(MeshConfig(sequence=_SEQUENCE.value), topology_devices(_TOPOLOGY.value))
  for time in map(int, _TIME.value):
    options = ModelOptions(dtype='bfloat16', sequence_shards=_SHARDS.value)
    choice = chosen(options, mesh, time=time, keys=time, same_tokens=True)
    print(f'{time}: {choice.implementation} in blocks of {choice.block} ({choice.reason})')
    for name, ids in rows(time).items():
      for order in ('consecutive', 'balanced')[: _SEQUENCE.value]:
        work = pairs(ids, choice.block, order)
        print(f'  {name}, {order}: {work}, at most {max(work) / np.mean(work):.2f} of the mean')
    if _COMPILE.value:
      began = clock.perf_counter()
      compiled = compiled_attention(mesh, time, choice)
      sent = ', '.join(
        f'{kind} {t.count} ({t.bytes / 1e6:,.1f} MB)'
        for kind, t in traffic(compiled.as_text()).items()
      )
      print(
        f'  temporaries {compiled.memory_analysis().temp_size_in_bytes / 1e6:,.0f} MB a device, '
        f'collectives: {sent or "none"}; compiled in {clock.perf_counter() - began:.0f} s',
        flush=True,
      )


def rows(time: int) -> dict[str, np.ndarray]:
  """Returns segment ids of rows: one long sequence, and packed sequences of lognormal lengths."""
  lengths = np.random.default_rng(0).lognormal(np.log(_MEAN.value) - 0.5, 1, time).astype(int) + 1
  packed = np.repeat(np.arange(len(lengths)) + 1, lengths)[:time]
  return {'one sequence': np.ones(time, int), f'{packed.max()} sequences': packed}


def pairs(ids: np.ndarray, block: int, order: str) -> list[int]:
  """Returns the number of pairs of blocks that each shard computes."""
  shards, blocks = _SEQUENCE.value, len(ids) // block
  low, high = ids.reshape(blocks, block).min(1), ids.reshape(blocks, block).max(1)
  seen = (low[:, None] <= high) & (low <= high[:, None]) & np.tri(blocks, dtype=bool)
  work = seen.sum(1)
  if order == 'balanced':
    work = work.reshape(2 * shards, -1)[pieces(shards)]
  return work.reshape(shards, -1).sum(1).tolist()


def compiled_attention(mesh, time: int, choice) -> jax.stages.Compiled:
  """Compiles the gradients of queries, keys and values."""
  heads, kv_heads, size = map(int, _HEADS.value)
  count = _ROWS.value * data_parallel_ranks(mesh)

  def of_rows(shape, dtype):
    axes = ('batch', 'time', 'heads', None)[: len(shape)]
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(mesh, axes, shape))

  query, key, value = (
    of_rows((count, time, n, size), jnp.bfloat16) for n in (heads, kv_heads, kv_heads)
  )
  numbers = of_rows((count, time), jnp.int32)

  def loss(query, key, value, places):
    query = constrain(query, mesh, *QUERIES)
    key, value = (constrain(x, mesh, *KEYS) for x in (key, value))
    mixed = sharded_attention(query, key, value, places, places, choice=choice, mesh=mesh)
    return mixed.astype(jnp.float32).sum()

  shardings = tuple(x.sharding for x in (query, key, value))
  gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), out_shardings=shardings)
  return gradients.lower(query, key, value, Places(numbers, numbers)).compile()


if __name__ == '__main__':
  app.run(main)
