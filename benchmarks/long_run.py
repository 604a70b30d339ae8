"""Growth of a long run: memory, threads, open files, and the sizes of its files by kind.

  .venv/bin/python benchmarks/long_run.py [--steps=N] [--every=N] [--folder=DIRECTORY] [-- FLAG]

Trains the quickstart's task with a policy of one layer, four groups of four to a batch. Prints a
line after every `--every` steps, and at the end the bytes per million tokens of each kind of file,
over the second half of the run. Arguments after `--` are flags of `jaxrl train`.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from absl import app, flags

_STEPS = flags.DEFINE_integer('steps', 10_000, 'Number of steps.', lower_bound=2)
_EVERY = flags.DEFINE_integer('every', 1000, 'Steps between two lines.', lower_bound=1)
_FOLDER = flags.DEFINE_string('folder', None, 'Where to run; by default, in the system folder.')
_MODEL = {
  **dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1),
  **dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16),
}
ROOT = pathlib.Path(__file__).resolve().parents[1]


def command(workdir: pathlib.Path, more: list[str]) -> list[str]:
  config = {
    'policy.model': _MODEL,
    'stages.sft.steps': 1,
    'stages.grpo.steps': _STEPS.value - 1,
    'stages.grpo.evaluate_every': 1000,
    'stages.grpo.source.groups_per_batch': 4,
    'stages.grpo.source.group_size': 4,
    'stages.grpo.source.selection.kind': 'all',
    'stages.grpo.optimizer.peak_lr': 1e-4,
    'rollout.embedded.slots': 16,
    'checkpoint.every_steps': 100,
    'evaluation.held_out.tasks': 16,
    'compilation_cache': str(workdir.parent / 'programs'),
  }
  values = [
    f'--config.{key}={value if isinstance(value, str) else json.dumps(value)}'
    for key, value in config.items()
  ]
  script = str(ROOT / 'launch/train.py')
  return [sys.executable, script, '--config=quickstart', f'--workdir={workdir}', *values, *more]


def sizes(workdir: pathlib.Path) -> dict[str, int]:
  """Returns the bytes of the run's files, keyed by the first two parts of their path."""
  found: dict[str, int] = {}
  for path in workdir.rglob('*'):
    try:
      size = path.stat().st_size if path.is_file() else None
    except FileNotFoundError:
      continue
    if size is not None:
      first, *rest = path.relative_to(workdir).parts
      kind = f'{first}/{rest[0]}' if first == 'replay' else first
      found[kind] = found.get(kind, 0) + size
  return found


def rows(file: pathlib.Path) -> Iterator[dict | None]:
  """Yields the rows of a file that grows, and None whenever there is no new row."""
  while not file.exists():
    yield None
  with file.open() as lines:
    line = ''
    while True:
      line += lines.readline()
      if line.endswith('\n'):
        yield json.loads(line)
        line = ''
      else:
        yield None


def main(argv: list[str]) -> None:
  with tempfile.TemporaryDirectory(dir=_FOLDER.value) as folder:
    workdir = pathlib.Path(folder) / 'run'
    with open(pathlib.Path(folder) / 'output', 'wb') as output:
      process = subprocess.Popen(command(workdir, argv[1:]), stdout=output, stderr=output)
    try:
      watch(process, workdir)
    finally:
      process.kill()


def watch(process: subprocess.Popen, workdir: pathlib.Path) -> None:
  begun, tokens, half = time.monotonic(), 0, None
  proc = pathlib.Path('/proc') / str(process.pid)
  print(
    f'{"step":>7} {"s":>6} {"MB":>7} {"threads":>7} {"open":>5} {"files":>6} {"MB on disk":>10}'
  )
  for row in rows(workdir / 'metrics.jsonl'):
    if row is None:
      if process.poll() is not None:
        raise SystemExit(f'the run ended: {(workdir.parent / "output").read_text()[-2000:]}')
      time.sleep(0.01)
      continue
    tokens += row.get('perf/total_num_tokens', 0)
    step = row['training/global_step']
    if 'perf/time_per_step' not in row or step % _EVERY.value:
      continue
    status = dict(
      line.split(':', 1) for line in (proc / 'status').read_text().splitlines() if ':' in line
    )
    by_kind = sizes(workdir)
    print(
      f'{step:7} {time.monotonic() - begun:6.0f} {int(status["VmRSS"].split()[0]) / 1e3:7.0f} '
      f'{status["Threads"].strip():>7} {len([*(proc / "fd").iterdir()]):5} '
      f'{sum(path.is_file() for path in workdir.rglob("*")):6} {sum(by_kind.values()) / 1e6:10.1f}',
      flush=True,
    )
    if step == _STEPS.value // 2 // _EVERY.value * _EVERY.value:
      half = tokens, by_kind
    if step >= _STEPS.value // _EVERY.value * _EVERY.value:
      break
  before, kinds = half
  millions = (tokens - before) / 1e6
  print(f'{millions:.3f} million tokens trained on in the second half; MB per million of them:')
  for kind, size in sorted(by_kind.items(), key=lambda item: -item[1]):
    print(f'{(size - kinds.get(kind, 0)) / 1e6 / millions:9.1f}  {kind} ({size / 1e6:.1f} MB)')


if __name__ == '__main__':
  app.run(main)
