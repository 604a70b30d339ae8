"""Training steps, logprob pass and generation against TRL's and Tunix's, on the same weights and
the same rows.

  bash launch/install_peers.sh
  .venv/bin/python benchmarks/steps.py [--rounds=5] [--works=grpo,dpo] [--peers=.venv-peers]

Each library runs in its own process and does one work at a time on request, alternating, so that
other load on the machine affects all of them; the others wait. The script prints the least wall and
process CPU seconds of `--rounds` rounds and their ratios. Shape S (against TRL) is a Qwen2 of 6.4
million parameters, shape T (against Tunix) one of 8.9 million; a batch is 64 rows of 32 prompt and
64 completion tokens, or of lognormal lengths (mean 139, longest 512). All compute in float32 and
keep all activations; each has the micro-batch that served it best. Before measuring, each work runs
once, and its result (gradient norm, mean logprob, number of completions) must be the same on both
sides.

Works: grpo: loss, gradient, clipping, AdamW. dpo: the same on 32 pairs, and the reference's
logprobs. logprobs: logprobs of the completions. generate: 64 completions of 64 tokens, without a
stop token. generate_groups: the same, eight of each of eight prompts of 256 tokens. groups,
short_groups, lognormal_groups: grpo on 64 rows of which eight have the same prompt, of 256 + 64 and
of 32 + 64 tokens, and of 256 tokens with completions of lognormal lengths (mean 125, longest 256);
each with the prompt computed once per group, and once per row, as in TRL. Their lines also give the
peak memory of a call above the memory of the process before the call.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import NamedTuple

import jax
import numpy as np
import own_steps
from absl import flags
from updates import SHAPES, Learner, Row, grouped_rows, lognormal_lengths, random_rows

from jaxrl_llm.core import script
from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.weights.hf import export

GROUPS = {file: (work, work + own_steps.APART) for work, file in own_steps.GROUPS.items()}
"""Works on the rows of each file of groups: with shared prompts, and without."""
WORKS = (
  'logprobs',
  'generate',
  'generate, groups',
  'grpo',
  'grpo, lognormal lengths',
  'dpo',
  *sum(GROUPS.values(), ()),
)
GROUP_SIZE = 8
HERE = pathlib.Path(__file__).parent

_PEERS = flags.DEFINE_string('peers', '.venv-peers', 'Environment of TRL and Tunix.')
_ROUNDS = flags.DEFINE_integer(
  'rounds', 5, 'Measured calls of each work on each side.', lower_bound=1
)
_AGAINST = flags.DEFINE_list('against', ['trl', 'tunix'], 'Libraries.')
_WORKS = flags.DEFINE_list(
  'works',
  ['logprobs', 'generate', 'generate_groups', 'grpo', 'lognormal', 'dpo', *GROUPS],
  'What is measured.',
)
_CHUNKS = flags.DEFINE_integer('chunks', 16, 'Rows of a micro-batch here.')
_TRL_MICRO_BATCH = flags.DEFINE_integer('trl_micro_batch', 64, 'Rows of a micro-batch there.')
_TUNIX_MICRO_BATCH = flags.DEFINE_integer('tunix_micro_batch', 64, 'Rows of a micro-batch there.')
_TINY = flags.DEFINE_bool(
  'tiny', False, 'A shape that shows that this script works, and nothing else.'
)
_WARM_UP = 2
"""Calls between the first one and the measured ones; a peer compiles until its third."""


class Size(NamedTuple):
  rows: int
  prompt_len: int
  new: int
  longest: int
  """Maximum number of tokens, prompt included, for lognormal lengths."""
  long_prompt: int
  """Number of prompt tokens of the groups whose prompts are long."""


class Side:
  """A process that runs works by name."""

  def __init__(self, name: str, python: str, arguments: list[str], folder: pathlib.Path):
    self.name, self.log = name, folder / f'{name}.log'
    environment = os.environ | {
      'PYTHONPATH': os.pathsep.join(sys.path[1:]) if python == sys.executable else ''
    }
    with self.log.open('w') as log:
      self._process = subprocess.Popen(
        [python, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=environment,
      )

  def works(self) -> list[str]:
    return self._answer()

  def do(self, work: str) -> dict[str, float]:
    print(work, file=self._process.stdin, flush=True)
    return self._answer()

  def _answer(self):
    line = self._process.stdout.readline()
    if not line:
      last = [text for text in self.log.read_text().splitlines() if text.strip()][-1:]
      raise RunError(f'{self.name} ended with status {self._process.wait()}: {" ".join(last)}')
    return json.loads(line)

  def close(self) -> None:
    self._process.stdin.close()
    self._process.wait()


def write_job(folder: pathlib.Path, spec: ModelSpec, size: Size) -> None:
  """Writes the weights and rows that all sides read."""
  learner = Learner(spec, token_chunk=1)
  export(
    folder / 'model',
    jax.device_get(learner.state.params),
    spec,
    tokenizer_dir=None,
    eos_ids=[1],
    pad_id=0,
  )
  lengths = {
    'equal': [size.prompt_len + size.new] * size.rows,
    'ragged': lognormal_lengths(size.rows, longest=size.longest),
  }
  for name, of in lengths.items():
    rows = random_rows(of, prompt_len=size.prompt_len, vocab=spec.vocab_size)
    write_rows(folder / f'{name}.npz', rows)
  completions = {
    'groups': (size.long_prompt, [size.new] * size.rows),
    'short_groups': (size.prompt_len, [size.new] * size.rows),
    'lognormal_groups': (
      size.long_prompt,
      [min(n, size.longest // 2) for n in lognormal_lengths(size.rows, longest=size.longest)],
    ),
  }
  for name, (prompt_len, of) in completions.items():
    rows = grouped_rows(of, group_size=GROUP_SIZE, prompt_len=prompt_len, vocab=spec.vocab_size)
    write_rows(folder / f'{name}.npz', rows)


def write_rows(path: pathlib.Path, rows: list[Row]) -> None:
  np.savez(
    path,
    tokens=np.concatenate([row.tokens for row in rows]),
    lengths=[len(row.tokens) for row in rows],
    prompt_lens=[row.prompt_len for row in rows],
    advantages=[row.advantage for row in rows],
    groups=[-1 if row.group is None else row.group for row in rows],
  )


def compare(own: Side, peer: Side, works: list[str]) -> None:
  """Prints a line for each work."""
  for work in works:
    first = [side.do(work)['value'] for side in (own, peer)]
    if all(map(math.isfinite, first)) and not math.isclose(*first, rel_tol=1e-3):
      raise RunError(
        f'{work}: {own.name} found {first[0]:g} and {peer.name} {first[1]:g}: not the same work'
      )
    for side in (own, peer):
      for _ in range(_WARM_UP):
        side.do(work)
    costs = {side.name: [] for side in (own, peer)}
    for _ in range(_ROUNDS.value):
      for side in (own, peer):
        costs[side.name].append(side.do(work))
    least = {
      name: {kind: min(c[kind] for c in found) for kind in ('wall', 'cpu', 'memory')}
      for name, found in costs.items()
    }
    ours, theirs = least[own.name], least[peer.name]
    print(
      f'{work}: {peer.name} {theirs["wall"]:.2f} s, {theirs["cpu"]:.2f} CPU-s; here '
      f'{ours["wall"]:.2f} s, {ours["cpu"]:.2f} CPU-s; ratio {theirs["wall"] / ours["wall"]:.2f}, '
      f'CPU {theirs["cpu"] / ours["cpu"]:.2f} (both found {first[0]:.5g} and {first[1]:.5g})'
      + (memory(theirs['memory'], ours['memory']) if work.startswith('grpo, groups') else '')
      + f'; load {os.getloadavg()[0]:.1f}',
      flush=True,
    )


def memory(theirs: float, ours: float) -> str:
  return f'; peak memory {theirs / 1e6:.0f} MB there, {ours / 1e6:.0f} MB here'


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise UserError(f'argument {argv[1]!r} is not a flag')
  python = pathlib.Path(_PEERS.value) / 'bin/python'
  if not python.exists():
    raise UserError(
      f'--peers: no {python}; make it by bash launch/install_peers.sh, or name where it is'
    )
  works = {work: (work,) for work in ('logprobs', 'generate', 'grpo', 'dpo')}
  works |= {'lognormal': ('grpo, lognormal lengths',), **GROUPS}
  works['generate_groups'] = ('generate, groups',)
  if unknown := [name for name in _WORKS.value if name not in works]:
    raise UserError(f'--works: {unknown[0]!r} is unknown; wanted some of {", ".join(works)}')
  wanted = {work for name in _WORKS.value for work in works[name]}
  size = Size(8, 8, 16, 48, 24) if _TINY.value else Size(64, 32, 64, 512, 256)
  peers = {'trl': ('S', _TRL_MICRO_BATCH.value), 'tunix': ('T', _TUNIX_MICRO_BATCH.value)}
  for name in _AGAINST.value:
    if name not in peers:
      raise UserError(f'--against: {name!r} is unknown; wanted some of {", ".join(peers)}')
    shape, micro_batch = peers[name]
    spec = tiny('qwen2', 256) if _TINY.value else SHAPES[shape]
    with tempfile.TemporaryDirectory() as scratch:
      folder = pathlib.Path(scratch)
      write_job(folder, spec, size)
      print(
        f'shape {shape}: {size.rows} rows of {size.prompt_len} + {size.new} tokens, against {name}',
        flush=True,
      )
      own = Side(
        'jaxrl_llm',
        sys.executable,
        [str(HERE / 'own_steps.py'), scratch, str(_CHUNKS.value)],
        folder,
      )
      arguments = [
        str(HERE / 'peers' / f'{name}_steps.py'),
        scratch,
        str(min(micro_batch, size.rows)),
      ]
      peer = Side(name, str(python), arguments, folder)
      try:
        both = set(own.works()) & set(peer.works())
        compare(own, peer, [work for work in WORKS if work in wanted and work in both])
      finally:
        own.close()
        peer.close()


if __name__ == '__main__':
  script.run(main)
