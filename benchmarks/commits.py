"""Time for which a commit blocks training: if its files are written before training continues, and
if they are written while training continues. Both are measured in the same run.

  .venv/bin/python benchmarks/commits.py [--megabytes=1000] [--rounds=5] [--folder=DIRECTORY]

Prints medians in seconds: an update that donates the state; a commit that training waits for as a
whole; the blocking part of a commit that is written while training continues; the update after it,
which on CPUs writes to new memory because the commit still holds the old one; and the whole
duration of that commit.
"""

import functools
import pathlib
import statistics
import tempfile
import time

import jax
from absl import app, flags

from jaxrl_llm.runtime.checkpoint import CheckpointConfig, Checkpoints, Writing

_MEGABYTES = flags.DEFINE_integer('megabytes', 1000, 'Of float32 state, in 32 arrays.')
_ROUNDS = flags.DEFINE_integer('rounds', 5, 'Commits of each kind.', lower_bound=1)
_FOLDER = flags.DEFINE_string('folder', None, 'Where to commit; by default, in the system folder.')
_ARRAYS = 32


@functools.partial(jax.jit, donate_argnums=0)
def update(state):
  return jax.tree.map(lambda x: x * 0.999 + 1e-3, state)


def begin(kept: Checkpoints, step: int, state: dict[str, jax.Array]) -> Writing:
  return kept.begin(step, state, None)


def main(_) -> None:
  size = _MEGABYTES.value * 10**6 // 4 // _ARRAYS
  draw = jax.jit(lambda key: jax.random.normal(key, (size,)))
  state = {str(i): draw(jax.random.key(i)) for i in range(_ARRAYS)}
  seconds: dict[str, list[float]] = {}

  def timed(name, function, *args):
    begun = time.perf_counter()
    result = jax.block_until_ready(function(*args))
    seconds.setdefault(name, []).append(time.perf_counter() - begun)
    return result

  state = jax.block_until_ready(update(state))
  with tempfile.TemporaryDirectory(dir=_FOLDER.value) as folder:
    kept = Checkpoints(pathlib.Path(folder), CheckpointConfig(keep=1), leads=True)
    for step in range(1, 2 * _ROUNDS.value, 2):
      state = timed('an update', update, state)
      timed('a commit that training waits for', kept.save, step, state, None)
      begun = time.perf_counter()
      writing = timed('the blocking part of one beside training', begin, kept, step + 1, state)
      state = timed('the update after it', update, state)
      writing.finish()
      seconds.setdefault('all of that commit', []).append(time.perf_counter() - begun)
  device = jax.devices()[0]
  total = sum(x.nbytes for x in jax.tree.leaves(state))
  print(
    f'{device.device_kind}: {total / 1e9:.2f} GB of state, {_ROUNDS.value} commits of each kind'
  )
  medians = {name: statistics.median(values) for name, values in seconds.items()}
  for name, median in medians.items():
    print(f'{median:8.3f} s  {name}')
  before = medians['a commit that training waits for']
  blocked = medians['the blocking part of one beside training']
  slowed = blocked + medians['the update after it'] - medians['an update']
  print(
    f'blocked {before / blocked:.1f} times less than before; {before / slowed:.1f} times less, if'
  )
  print('what the update after it takes longer counts too (new memory, and shared processors)')


if __name__ == '__main__':
  app.run(main)
