"""Time and temporary memory of the head's forward and backward pass, computed in token chunks,
against full logits.

  .venv/bin/python benchmarks/logprobs.py [--vocabulary=32768 ...] [--dtype=bfloat16] [--rounds=3]

Each row of the table is a vocabulary: milliseconds (medians; the two alternate in one run) and
megabytes of temporaries as counted by the compiler, for the value and gradient of a loss on
logprobs and entropies, and both as ratios to full logits.
"""

import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from jaxrl_llm.ops.logprobs import token_logprobs

_VOCABULARIES = flags.DEFINE_multi_integer(
  'vocabulary', [2048, 32768, 131072], 'Words, for a row of the table each.'
)
_ROWS = flags.DEFINE_integer('rows', 16, 'Rows of the batch.')
_TIME = flags.DEFINE_integer('time', 128, 'Positions of a row.')
_EMBED = flags.DEFINE_integer('embed', 256, 'Width of the hidden states.')
_TOKEN_CHUNK = flags.DEFINE_integer(
  'token_chunk', 8, 'Positions of every row that are computed at a time.'
)
_DTYPE = flags.DEFINE_enum(
  'dtype', 'float32', ['float32', 'bfloat16'], 'Of the hidden states; the kernel is float32.'
)
_ROUNDS = flags.DEFINE_integer(
  'rounds', 3, 'Measured runs of each, after one that warms up.', lower_bound=1
)


def batch(vocab: int) -> list[jax.Array]:
  """Returns the arguments of `token_logprobs`."""
  rng, shape = np.random.default_rng(0), (_ROWS.value, _TIME.value)
  return [
    jnp.asarray(rng.standard_normal((*shape, _EMBED.value), np.float32), _DTYPE.value),
    jnp.asarray(rng.standard_normal((vocab, _EMBED.value), np.float32) / _EMBED.value**0.5),
    jnp.asarray(rng.integers(0, vocab, shape), jnp.int32),
    jnp.ones(shape, jnp.int32),
    jnp.ones(shape, jnp.float32),
  ]


def compiled(arguments: list[jax.Array], token_chunk: int):
  """Compiles value and gradients of a loss that weights every token's logprob and entropy
  differently.
  """
  weights = jnp.linspace(-1.0, 1.0, _TIME.value)

  def loss(*arguments):
    found = token_logprobs(*arguments, token_chunk=token_chunk)
    return (found.logprobs * weights + 1e-2 * found.entropy * weights**2).sum()

  return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arguments).compile()


def milliseconds(program, arguments: list[jax.Array]) -> float:
  before = time.perf_counter()
  jax.block_until_ready(program(*arguments))
  return 1e3 * (time.perf_counter() - before)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    sys.exit(f'argument {argv[1]!r} is not a flag')
  print(
    f'{_ROWS.value} rows of {_TIME.value} tokens, {_EMBED.value} wide, {_DTYPE.value}; '
    f'chunks of {_ROWS.value * _TOKEN_CHUNK.value} tokens, on {jax.devices()[0].device_kind}'
  )
  print('| vocabulary | full, ms | chunked, ms | ratio | full, MB | chunked, MB | ratio |')
  print('|---|---|---|---|---|---|---|')
  for vocab in _VOCABULARIES.value:
    arguments = batch(vocab)
    programs = [
      compiled(arguments, token_chunk) for token_chunk in (_TIME.value, _TOKEN_CHUNK.value)
    ]
    rounds = [
      [milliseconds(program, arguments) for program in programs] for _ in range(1 + _ROUNDS.value)
    ]
    full, chunked = map(statistics.median, zip(*rounds[1:]))
    wide, lean = (program.memory_analysis().temp_size_in_bytes / 1e6 for program in programs)
    cells = [vocab, f'{full:.0f}', f'{chunked:.0f}', f'{chunked / full:.2f}']
    cells += [f'{wide:.0f}', f'{lean:.0f}', f'{lean / wide:.3f}']
    print('|', ' | '.join(map(str, cells)), '|', flush=True)


if __name__ == '__main__':
  app.run(main)
