"""Effect of the staleness bound: seconds per step, and idle time of trainer and rollouts, at
several bounds.

  .venv/bin/python benchmarks/staleness.py [--bounds=0,1,2,4,8] [--steps=40] \\
    [--median_s=0.2] [--sigma=1.0]

Runs the quickstart's GRPO stage, from random weights, attached to two fake servers in their own
processes, which sample and add a lognormal delay to each completion: at sigma 1, one in a hundred
takes ten times the median or more. The first five steps of each run, which compile, are left out.
It does not measure learning; see docs/guides/staleness.md.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from absl import app, flags
from servers import ROOT, fake_servers

_BOUNDS = flags.DEFINE_list('bounds', ['0', '1', '2', '4', '8'], 'Each a run.')
_STEPS = flags.DEFINE_integer('steps', 40, 'Of each run.', lower_bound=8)
_MEDIAN_S = flags.DEFINE_float(
  'median_s', 0.2, 'Median of what a completion takes longer, seconds.'
)
_SIGMA = flags.DEFINE_float('sigma', 1.0, 'Standard deviation of its logarithm.')
_WARM_UP = 5


def measure(bound: int, folder: pathlib.Path, addresses: list[str]) -> list[dict]:
  """Returns the metric rows of a run's steps, without the first ones."""
  run = folder / f'run-{bound}'
  flags_of_run = {
    'rollout.engine': 'vllm',
    'rollout.vllm.addresses': json.dumps(addresses),
    'stages.0.steps': 1,
    'stages.1.steps': _STEPS.value,
    'stages.1.evaluate_every': 'null',
    'stages.1.source.bound': bound,
    'evaluation.held_out.tasks': 8,
    'checkpoint.every_steps': 1000,
    'rewards.scorers.0.options': '{"partial_credit":true}',
  }
  given = [f'--config.{name}={value}' for name, value in flags_of_run.items()]
  command = [
    sys.executable,
    'launch/train.py',
    '--config=configs/quickstart.py',
    f'--workdir={run}',
    *given,
  ]
  done = subprocess.run(
    command, cwd=ROOT, env={**os.environ, 'JAX_PLATFORMS': 'cpu'}, capture_output=True, text=True
  )
  if done.returncode:
    raise SystemExit(
      f'the run at bound {bound} ended with {done.returncode}:\n{done.stderr[-2000:]}'
    )
  rows = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
  return [row for row in rows if 'staleness/max' in row][_WARM_UP:]


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'{argv[1]}: unexpected argument')
  print(
    f'completions take {_MEDIAN_S.value:g} s longer at the median, sigma {_SIGMA.value:g}; two '
    'fake servers'
  )
  print('bound  s/step  of bound 0  trainer idle  rollouts idle  mean lag')
  first = None
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    with fake_servers(folder, median_s=_MEDIAN_S.value, sigma=_SIGMA.value) as addresses:
      for bound in map(int, _BOUNDS.value):
        rows = measure(bound, folder, addresses)
        seconds = sum(row['timing_s/step'] for row in rows)
        first = first or seconds
        idle = [
          sum(row[f'perf/{role}_idle_s'] for row in rows) / seconds
          for role in ('trainer', 'rollout')
        ]
        lag = statistics.mean(row['staleness/mean'] for row in rows)
        times = f'{bound:5}  {seconds / len(rows):6.2f}  {seconds / first:10.2f}'
        print(f'{times}  {idle[0]:12.0%}  {idle[1]:13.0%}  {lag:8.2f}', flush=True)


if __name__ == '__main__':
  app.run(main)
