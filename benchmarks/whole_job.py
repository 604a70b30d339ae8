"""Time from the start of the process to a given accuracy: the quickstart's GRPO here and in TRL.

  bash launch/install_peers.sh
  .venv/bin/python benchmarks/whole_job.py [--accuracies=0.85,0.9,0.95] [--steps=280] \\
    [--evaluate_every=20] [--rounds=1] [--workdir=DIRECTORY]

First, the quickstart's policy is trained by SFT and exported, once. Each side then starts from this
model in a process of its own, in turn: the same training and evaluation tasks, 16 prompts of 8
samples a step, learning rates, clipping, loss, and exact answers as rewards. Tasks are drawn in
different orders, and samples with different random numbers. Time includes imports, compilation
(there is no cache of compiled programs) and the greedy evaluations of 512 tasks, which both sides
make after the same steps. An accuracy counts as reached at the first evaluation that has it.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

_ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(_ROOT))

from absl import app, flags  # noqa: E402

_ACCURACIES = flags.DEFINE_list('accuracies', ['0.85', '0.9', '0.95'], 'Accuracies to reach.')
_STEPS = flags.DEFINE_integer('steps', 280, 'Steps of GRPO, over which the learning rate falls.')
_EVALUATE_EVERY = flags.DEFINE_integer('evaluate_every', 20, 'Steps between two evaluations.')
_ROUNDS = flags.DEFINE_integer('rounds', 1, 'Runs of each side.')
_WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the runs; if None, a temporary one.')
_PEERS = flags.DEFINE_string('peers', str(_ROOT / '.venv-peers'), 'Environment of TRL.')
_EVALUATION = re.compile(r'evaluation \S+ at step (\d+) \(grpo\): greedy accuracy ([\d.]+)')


def configuration(name: str):
  """Returns the quickstart's configuration with only the stage `name`."""
  from jaxrl_llm.api import load_config

  config = load_config(str(_ROOT / 'configs' / 'quickstart.py'))
  stages = tuple(stage for stage in config.stages if stage.name == name)
  return dataclasses.replace(config, stages=stages, compilation_cache=None)


def train_sft(folder: str) -> None:
  """Trains the model from which both sides start."""
  from jaxrl_llm.api import train

  train(configuration('sft'), f'{folder}/sft')


def train_grpo(folder: str, run: str) -> None:
  """Trains this project's side."""
  from jaxrl_llm.api import PolicyConfig, train

  config = configuration('grpo')
  stages = [
    dataclasses.replace(stage, steps=_STEPS.value, evaluate_every=_EVALUATE_EVERY.value)
    for stage in config.stages
  ]
  policy = PolicyConfig(init_from=f'{folder}/sft/hf')
  train(dataclasses.replace(config, policy=policy, stages=tuple(stages)), run)


def write_job(folder: pathlib.Path) -> None:
  """Writes what TRL's side needs: tasks and parameters."""
  from jaxrl_llm.tasks.taskset import load_taskset

  config = configuration('grpo')
  (stage,), (suite,) = config.stages, config.evaluation
  tasks = {
    taskset.name: [
      {'prompt': task.prompt[-1]['content'], 'truth': task.truth}
      for task in load_taskset(taskset).tasks
    ]
    for taskset in config.tasksets
  }
  optimizer = stage.optimizer
  job = {
    'train': tasks['train'],
    'eval': tasks['eval'][: suite.tasks],
    'steps': _STEPS.value,
    'evaluate_every': _EVALUATE_EVERY.value,
    'groups': stage.source.groups_per_batch,
    'group_size': stage.source.group_size,
    'max_tokens': config.rollout.max_response_length,
    'learning_rate': optimizer.peak_lr,
    'end_learning_rate': optimizer.peak_lr * optimizer.end_lr_fraction,
    'betas': [optimizer.b1, optimizer.b2],
    'max_grad_norm': optimizer.max_grad_norm,
    'clip': [0.2, stage.algorithm.options['clip_ratio_high']],
    'seed': config.seed,
  }
  (folder / 'job.json').write_text(json.dumps(job))


def evaluations(command: list[str]) -> list[tuple[float, int, float]]:
  """Runs a command. Returns (seconds since its start, step, accuracy) of each evaluation that it
  prints.
  """
  began, printed, lines = time.perf_counter(), [], []
  with subprocess.Popen(
    command,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    env=os.environ | {'TRANSFORMERS_NO_ADVISORY_WARNINGS': '1', 'PYTHONUNBUFFERED': '1'},
  ) as process:
    for line in process.stdout:
      lines.append(line)
      if match := _EVALUATION.search(line):
        printed.append((time.perf_counter() - began, int(match[1]), float(match[2])))
        print(f'  {printed[-1][0]:7.1f} s, step {match[1]}: {match[2]}', flush=True)
  if process.returncode:
    raise SystemExit(''.join(lines[-30:]) + f'{command[1]}: exit {process.returncode}')
  return printed


def seconds_to(accuracy: float, printed: list[tuple[float, int, float]]) -> float:
  """Returns the seconds to the first evaluation of at least this accuracy; inf if there is none."""
  return min((at for at, _, reached in printed if reached >= accuracy), default=float('inf'))


def compare(folder: pathlib.Path) -> None:
  here = [sys.executable, __file__, f'--steps={_STEPS.value}']
  here.append(f'--evaluate_every={_EVALUATE_EVERY.value}')
  if not (folder / 'sft' / 'hf').exists():
    evaluations([*here, 'sft', str(folder)])  # It prints none of this stage.
  write_job(folder)
  trl = [f'{_PEERS.value}/bin/python', str(_ROOT / 'benchmarks/peers/trl_job.py'), str(folder)]
  for number in range(_ROUNDS.value):
    sides = {}
    for name, command in (
      ('TRL', trl),
      ('here', [*here, 'grpo', str(folder), str(folder / f'grpo-{number}')]),
    ):
      print(f'{name}:', flush=True)
      sides[name] = evaluations(command)
    print('| accuracy | TRL | here | ratio |\n|---|---|---|---|')
    for accuracy in map(float, _ACCURACIES.value):
      row(accuracy, *(seconds_to(accuracy, sides[name]) for name in ('TRL', 'here')))
    last = [sides[name][-1] for name in ('TRL', 'here')]
    accuracies = ' and '.join(f'{accuracy}' for _, _, accuracy in last)
    row(f'the last step ({accuracies})', *(at for at, _, _ in last))


def row(name: object, there: float, here: float) -> None:
  print(f'| {name} | {there:.1f} s | {here:.1f} s | {there / here:.2f} |')


def main(argv: list[str]) -> None:
  role, *arguments = argv[1:] or ['compare']
  if role == 'sft':
    train_sft(*arguments)
  elif role == 'grpo':
    train_grpo(*arguments)
  else:
    with contextlib.ExitStack() as stack:
      folder = _WORKDIR.value or stack.enter_context(tempfile.TemporaryDirectory())
      pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
      compare(pathlib.Path(folder))


if __name__ == '__main__':
  app.run(main)
