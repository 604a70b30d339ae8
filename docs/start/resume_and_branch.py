"""A run that is interrupted, branched and resumed with other values.

  python docs/start/resume_and_branch.py DIRECTORY [KEY=VALUE …]

KEY=VALUE changes the configuration, such as policy.dtype=bfloat16. The script needs PyTorch beside
jaxrl_llm, because transformers makes the checkpoint (tiny.py).
"""

import json
import pathlib
import subprocess
import sys
import time

import tiny

from jaxrl_llm.api import load_config, train


def interrupt(command: list[str], commit: pathlib.Path) -> None:
  """Starts a command and kills it once there is a commit, as when its machine fails."""
  process = subprocess.Popen(command)
  while not commit.exists():
    if process.poll() is not None:
      raise SystemExit(f'{command[0]} ended with code {process.returncode} before its commit')
    time.sleep(0.05)
  process.kill()
  process.wait()


def main(directory: pathlib.Path, changes: dict[str, str]) -> None:
  questions = tiny.questions()
  rows = [{'prompt': question, 'completion': f' {right}'} for question, right, _ in questions]
  tiny.write_rows(directory / 'rows.jsonl', rows)
  asked = [question for question, *_ in questions]
  tiny.make_checkpoint(directory / 'checkpoint', 'qwen2', asked)
  values = {
    'policy.init_from': str(directory / 'checkpoint'),
    'stages.sft.steps': '40',
    'stages.sft.evaluate_every': '20',
    'checkpoint.every_steps': '10',
    **changes,
  }
  spec, run = f'sft:{directory / "rows.jsonl"}', directory / 'run'

  # A first start, killed after its commit at step 10.
  flags = [f'--config.{key}={value}' for key, value in values.items()]
  start = [sys.executable, '-m', 'jaxrl_llm', 'train', f'--config={spec}', f'--workdir={run}']
  interrupt([*start, *flags], run / 'checkpoints' / '10' / 'COMMIT')

  # A branch goes on from that commit with a third of the learning rate and fresh moments of Adam.
  lower = load_config(spec, {**values, 'stages.sft.optimizer.peak_lr': '1e-3'})
  branch = train(lower, directory / 'branch', branch_from=f'{run}:10', reset=['optimizer'])

  # The run itself is resumed from the same commit, with more steps and another learning rate.
  longer = {'stages.sft.steps': '60', 'stages.sft.optimizer.peak_lr': '2e-3'}
  resumed = train(load_config(spec, {**values, **longer}), run)

  for result in (branch, resumed):
    last = result.metrics[-1]
    loss = last['val-core/held_out/sft_loss']
    print(f'{result.workdir}: {loss:.3f} on held-out rows at step {last["training/global_step"]}')
    for line in (result.workdir / 'history.jsonl').read_text().splitlines():
      entry = json.loads(line)
      print(f'  from step {entry["step"]} on:', entry['changes'], entry['parent'] or '')


if __name__ == '__main__':
  main(*tiny.arguments(__doc__))
