"""Cost of slow scorers in a step: seconds from the end of a batch's last rollout until the batch is
ready.

  .venv/bin/python benchmarks/scoring.py [--scoring_s=0.3] [--workers=8] \\
    [--groups=8] [--group_size=8]

Runs the quickstart's GRPO stage at bound 0, from random weights, attached to two fake servers that
add a lognormal delay to each completion. Scoring a completion takes `--scoring_s`: in worker
processes, by an awaited judge, and, in the control, one after the other once all rollouts of the
batch have ended. The rewards must be the same. The first batch of each run, which compiles
programs, is left out. The runs stay in `--directory`, if given.
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

from jaxrl_llm.runtime import events
from jaxrl_llm.runtime.events import Edge

_SCORING_S = flags.DEFINE_float('scoring_s', 0.3, 'Seconds that one completion takes to be scored.')
_WORKERS = flags.DEFINE_integer('workers', 8, 'Scorer processes.', lower_bound=1)
_GROUPS = flags.DEFINE_integer('groups', 8, 'Of a batch.', lower_bound=1)
_GROUP_SIZE = flags.DEFINE_integer('group_size', 8, 'Completions of a group.', lower_bound=2)
_STEPS = flags.DEFINE_integer('steps', 6, 'Batches of each run.', lower_bound=2)
_MEDIAN_S = flags.DEFINE_float(
  'median_s', 2.0, 'Median of what a completion takes longer, seconds.'
)
_SIGMA = flags.DEFINE_float('sigma', 0.5, 'Standard deviation of its logarithm.')
_DIRECTORY = flags.DEFINE_string(
  'directory', None, 'Where the runs are kept; by default they are thrown away.'
)


def measure(
  kind: str, folder: pathlib.Path, addresses: list[str]
) -> tuple[list[float], list[float], dict]:
  """Returns each batch's exposed and rollout seconds, and (completion, reward) by sample uid."""
  run = folder / kind
  options = {'seconds': _SCORING_S.value}
  if kind == 'serial':
    options['count'] = _GROUPS.value * _GROUP_SIZE.value
  slow = {
    'kind': f'slow_scorers:{kind}',
    'options': options,
    'deadline_s': 3600.0,
    'tasksets': ['train'],
  }
  scorers = [{'name': 'verifier', 'tasksets': ['eval']}, {'name': 'slow', **slow}]
  flags_of_run = {
    'rollout.engine': 'vllm',
    'rollout.vllm.addresses': json.dumps(addresses),
    'stages.0.steps': 1,
    'stages.1.steps': _STEPS.value,
    'stages.1.source.groups_per_batch': _GROUPS.value,
    'stages.1.source.group_size': _GROUP_SIZE.value,
    'stages.1.evaluate_every': 'null',
    'evaluation.held_out.tasks': 8,
    'checkpoint.every_steps': 1000,
    'rewards.scorers': json.dumps(scorers),
    'rewards.workers': _WORKERS.value,
  }
  given = [f'--config.{name}={value}' for name, value in flags_of_run.items()]
  command = [
    sys.executable,
    'launch/train.py',
    '--config=configs/quickstart.py',
    f'--workdir={run}',
    *given,
  ]
  environment = {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'PYTHONPATH': f'{ROOT}{os.pathsep}{ROOT / "benchmarks"}',
  }
  done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
  if done.returncode:
    raise SystemExit(f'the run {kind} ended with {done.returncode}:\n{done.stderr[-2000:]}')
  exposed, rollouts = batches(run)
  rows = [
    json.loads(line) for file in (run / 'rollouts' / 'grpo').glob('*.jsonl') for line in file.open()
  ]
  said = {row['uid']: (row['completion'], row['reward']) for row in rows}
  return exposed[1:], rollouts[1:], said


def batches(run: pathlib.Path) -> tuple[list[float], list[float]]:
  """Returns each batch's seconds from its last rollout's end to its fetch, and from its first
  request to that end.
  """
  exposed, rollouts, asked, ended = [], [], [], []
  for event in events.read(run / events.FILE):
    if event.edge == Edge.ROLLOUT:
      (asked if event.kind == 'request' else ended).append(event.t)
    if event.edge == Edge.FETCH and event.fields.get('source') == 'rollouts':
      exposed.append(event.t - max(ended))
      rollouts.append(max(ended) - min(asked))
      asked, ended = [], []
  return exposed, rollouts


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'{argv[1]}: unexpected argument')
  count = _GROUPS.value * _GROUP_SIZE.value
  slower = f'each {_MEDIAN_S.value:g} s slower at the median, sigma {_SIGMA.value:g}'
  print(
    f'{count} completions a batch, {slower}; {_SCORING_S.value:g} s to score one; {_WORKERS.value} '
    'workers'
  )
  print('scored      of the rollouts, s  exposed scoring, s  of serial')
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(_DIRECTORY.value or name)
    folder.mkdir(parents=True, exist_ok=True)
    said, control = {}, 0.0
    with fake_servers(
      pathlib.Path(name), median_s=_MEDIAN_S.value, sigma=_SIGMA.value
    ) as addresses:
      for kind in ('serial', 'computing', 'waiting'):
        exposed, rollouts, said[kind] = measure(kind, folder, addresses)
        control = control or statistics.mean(exposed)
        times = f'{statistics.mean(rollouts):18.2f}  {statistics.mean(exposed):18.2f}'
        print(f'{kind:10}  {times}  {statistics.mean(exposed) / control:9.1%}', flush=True)
  same = said['serial'] == said['computing'] == said['waiting']
  print(
    f'completions and rewards of {len(said["serial"])} samples: '
    f'{"identical" if same else "DIFFERENT"}'
  )
  if not same:
    raise SystemExit(1)


if __name__ == '__main__':
  app.run(main)
