"""Gain from packing: GRPO updates of rows of lognormal lengths, packed against one row per padded
chunk.

  .venv/bin/python benchmarks/packing.py [--rows=512] [--trained=128] [--rounds=3]

Lengths have mean 139 and are at most 512 tokens, the chunk length. For several numbers of
data-parallel ranks and of chunks per micro-batch, the script prints the share of an optimizer
step's arrays that holds tokens (least and mean of 20 draws of `--rows` lengths). Then, on one
device, it prints the tokens per second of updates of `--trained` rows, without padding: medians of
alternating rounds. The model has 6.4 million parameters, as in benchmarks/steps.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from absl import flags
from updates import SHAPES, Learner, lognormal_lengths, pack_rows, random_rows

from jaxrl_llm.batching.packing import pack
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.models.families import tiny

_ROWS = flags.DEFINE_integer(
  'rows', 512, 'Of an optimizer step whose utilisation is printed.', lower_bound=1
)
_TRAINED = flags.DEFINE_integer(
  'trained', 128, 'Rows of an optimizer step that is timed.', lower_bound=1
)
_ROUNDS = flags.DEFINE_integer('rounds', 3, 'Timed updates of each kind.', lower_bound=1)
_CHUNKS = flags.DEFINE_integer('chunks', 4, 'Of a micro-batch in timed updates.', lower_bound=1)
_TINY = flags.DEFINE_bool(
  'tiny', False, 'A model that shows that this script works, and nothing else.'
)


def utilisations(rows: int, *, chunk_len: int, draws: int = 20, **sizes: int) -> list[float]:
  """Returns, for each draw, the fraction of the token slots computed in an optimizer step of `rows`
  rows that contain a token.

  Args:
    sizes: further arguments of `pack`.
  """
  lengths = [lognormal_lengths(rows, longest=chunk_len, seed=seed) for seed in range(draws)]
  return [pack(some, chunk_len=chunk_len, **sizes).utilisation for some in lengths]


def alternated(works: Sequence[Callable[[], object]], rounds: int) -> list[float]:
  """Returns the median seconds of each work; all run once as a warm-up, then in turns."""
  seconds: list[list[float]] = [[] for _ in works]
  for number in range(rounds + 1):
    for work, found in zip(works, seconds):
      before = time.perf_counter()
      work()
      if number:
        found.append(time.perf_counter() - before)
  return [statistics.median(times) for times in seconds]


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise UserError(f'argument {argv[1]!r} is not a flag')
  chunk_len = 64 if _TINY.value else 512
  for splits in (False, True):
    for ranks in (1, 2, 4, 8):
      parts = []
      for chunks in (1, 2, 4, 8, 16):
        sizes = {'ranks': ranks, 'chunks': chunks, 'splits_remainder': splits}
        found = utilisations(_ROWS.value, chunk_len=chunk_len, **sizes)
        parts.append(f'{chunks}: {min(found):.3f} {statistics.mean(found):.3f}')
      print(
        f'{_ROWS.value} rows, {ranks} ranks{", remainder split" if splits else ""}, by chunks of a '
        f'micro-batch (least, mean): {"; ".join(parts)}'
      )
  spec = tiny('qwen2', 256) if _TINY.value else SHAPES['S']
  rows = random_rows(
    lognormal_lengths(_TRAINED.value, longest=chunk_len), prompt_len=32, vocab=spec.vocab_size
  )
  learner = Learner(spec, token_chunk=chunk_len)
  batches = [
    pack_rows(rows, chunks=_CHUNKS.value, chunk_len=chunk_len, apart=apart)
    for apart in (False, True)
  ]
  packed, padded = alternated(
    [lambda batch=batch: learner.step(batch) for batch in batches], _ROUNDS.value
  )
  tokens = sum(len(row.tokens) for row in rows)
  print(
    f'{_TRAINED.value} rows, {tokens} tokens: packed {batches[0].packing.utilisation:.3f} full, '
    f'{tokens / packed:.0f} tokens/s; padded {tokens / padded:.0f} tokens/s ({padded:.2f} s): '
    f'ratio {padded / packed:.2f}'
  )


if __name__ == '__main__':
  script.run(main)
