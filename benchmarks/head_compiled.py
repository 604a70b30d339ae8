"""How often a micro-batch reads and writes the gradient of the head's kernel, compiled for devices
that are not here.

  TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost ALLOW_MULTIPLE_LIBTPU_LOAD=true \\
    .venv-aot/bin/python benchmarks/head_compiled.py --topology=v5e:2x4 --size=7b

Compiles the logprobs and entropies of one micro-batch with their gradient, whose kernel is float32
and sharded over all devices. One line: the chunks of logits, how often a device reads and writes
the gradient `[vocab, hidden]` if all chunks are used, its bytes, and the temporaries.
"""

import math
import re
import sys

import jax
import jax.numpy as jnp
from absl import app, flags

from jaxrl_llm.app.composition.automatic import logits_budget
from jaxrl_llm.ops.logprobs import KernelShardings, plan_token_chunk, token_logprobs
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.parallel.rules import sharding
from jaxrl_llm.parallel.topology import CHIPS, parse_topology, topology_devices

SIZES = {'0.5b': (151_936, 896), '1.5b': (151_936, 1536), '7b': (152_064, 3584)}
"""Vocabulary and hidden size."""
_TOPOLOGY = flags.DEFINE_string('topology', 'h100:8', 'Devices, as of `jaxrl train --topology`.')
_SIZE = flags.DEFINE_enum('size', '7b', list(SIZES), 'Model.')
_ROWS = flags.DEFINE_integer('rows', 1, 'Rows per device in a micro-batch.')
_TIME = flags.DEFINE_integer('time', 2048, 'Tokens in a row.')
_BUDGET = flags.DEFINE_integer(
  'budget', None, 'learner.logits_budget_bytes; by default that of a large model on the chip.'
)
_OPERATION = re.compile(r'^(?:ROOT )?(%[\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$')
_COMPUTATION = re.compile(r'^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$')
_MOVES_NOTHING = ('parameter', 'get-tuple-element', 'tuple', 'bitcast', 'while', 'call')
"""Operations that neither read nor write the arrays that they name. The operations of loops and
calls are counted in the computations that they execute.
"""


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    sys.exit(f'argument {argv[1]!r} is not a flag')
  jax.config.update('jax_platforms', 'cpu')
  vocab, hidden = SIZES[_SIZE.value]
  chip = CHIPS[parse_topology(_TOPOLOGY.value).chip]
  budget = _BUDGET.value or logits_budget(chip.memory_bytes)
  rows, time = _ROWS.value, _TIME.value
  chunk = plan_token_chunk(chunks=rows, time=time, vocab=vocab, budget_bytes=budget)
  compiled = compiled_head(rows, time, vocab, hidden, chunk)
  size, chunks = vocab * hidden, time // chunk
  reads, writes = accesses(compiled.as_text(), size, chunks)
  memory = compiled.memory_analysis()
  print(
    f'head of {_SIZE.value} on {_TOPOLOGY.value}, {rows} × {time} tokens per device: '
    f'{chunks} chunks of logits, gradient of {4 * size / 1e6:,.0f} MB read {reads} and written '
    f'{writes} times, {4 * size * (reads + writes) / 1e9:,.1f} GB; temporaries '
    f'{memory.temp_size_in_bytes / 1e6:,.0f} MB'
  )


def compiled_head(rows: int, time: int, vocab: int, hidden: int, chunk: int) -> jax.stages.Compiled:
  """Compiles the gradients of hidden states and kernel for a micro-batch with `rows` rows per
  device, half of whose tokens are wanted.
  """
  devices = topology_devices(_TOPOLOGY.value)
  mesh = build_mesh(MeshConfig(), devices)
  rows *= len(devices)
  stored, used = (sharding(mesh, ('vocab', axis), (vocab, hidden)) for axis in ('embed', None))

  def of_rows(shape, dtype):
    axes = ('batch', 'time', None)[: len(shape)]
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(mesh, axes, shape))

  per_token = [of_rows((rows, time), dtype) for dtype in ('int32', 'int32', 'float32', 'bool')]
  states = of_rows((rows, time, hidden), jnp.bfloat16)
  kernel = jax.ShapeDtypeStruct((vocab, hidden), jnp.float32, sharding=stored)

  def loss(states, kernel, tokens, segment_ids, temperature, wanted):
    result = token_logprobs(
      states, kernel, tokens, segment_ids, temperature, wanted, token_chunk=chunk,
      row_shards=len(devices), shardings=KernelShardings(stored, used),
    )  # fmt: skip
    return result.logprobs.sum() + result.entropy.sum()

  gradients = jax.jit(jax.grad(loss, argnums=(0, 1)), out_shardings=(states.sharding, stored))
  return gradients.lower(states, kernel, *per_token).compile()


def accesses(text: str, elements: int, chunks: int) -> tuple[int, int]:
  """Returns how often a program reads and writes float32 arrays with this number of elements.

  Args:
    text: text of the compiled program.
    chunks: number of iterations of each loop.
  """
  fused = set(re.findall(r'(?:calls|to_apply)=%?([\w.\-]+)', text))
  bodies = set(re.findall(r'body=%?([\w.\-]+)', text))
  reads = writes = times = 0
  sizes: dict[str, int] = {}
  for line in map(str.strip, text.splitlines()):
    if began := _COMPUTATION.match(line):
      times, sizes = 0 if began[1] in fused else chunks if began[1] in bodies else 1, {}
    elif operation := _OPERATION.match(line):
      name, result, code, rest = operation.groups()
      shapes = re.findall(r'\bf32\[([\d,]+)\]', result)
      sizes[name] = max((math.prod(map(int, shape.split(','))) for shape in shapes), default=0)
      if code in _MOVES_NOTHING or code.endswith('-done'):
        continue
      operands = set(re.findall(r'%[\w.\-]+', re.split(r'\), ', rest, maxsplit=1)[0]))
      reads += times * sum(sizes.get(operand) == elements for operand in operands)
      writes += times * (sizes[name] == elements)
  return reads, writes


if __name__ == '__main__':
  app.run(main)
