"""Starts the real training program as a person would, and reads what it left behind."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pathlib
import random
import signal
import sqlite3
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]
QUICK = (
  '--config=configs/quickstart.py',
  '--config.tasksets.train.size=4000',
  '--config.tasksets.eval.size=4000',
  '--config.stages.sft.demonstrations.count=400',
  '--config.stages.sft.steps=12',
  '--config.stages.grpo.steps=8',
  '--config.stages.grpo.groups_per_batch=6',
  '--config.stages.grpo.group_size=4',
  '--config.stages.grpo.evaluate_every=4',
  '--config.evaluation.held_out.tasks=24',
  '--config.rollout.embedded.slots=24',
  '--config.checkpoint.every_steps=3',
  # So that rewards differ inside groups from the first step on.
  '--config.rewards.scorers.0.options={"partial_credit":true}',
  '--config.policy.model={"hidden_size":64,"intermediate_size":96,"num_hidden_layers":2,'
  '"num_attention_heads":2,"num_key_value_heads":1,"head_dim":32}',
)
"""The quickstart's job in seconds: same code, smaller numbers."""
UNTIMED = ('timing_s/', 'timing_per_token_ms/', 'perf/')
"""Metrics that may differ between two equal runs."""
PROGRAMS = 'JAXRL_TEST_PROGRAMS'
"""Environment variable with the directory of compiled programs that all jobs of a test session share."""


def environment(**extra: str) -> dict[str, str]:
  """Without the test process's eight forced devices; XLA's pool pinned, as the launch scripts do."""
  env = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}
  return {**env, 'JAX_PLATFORMS': 'cpu', 'NPROC': '2', 'PYTHONPATH': str(ROOT), **extra}


def command(workdir: pathlib.Path, *flags: str, config: tuple[str, ...] = QUICK, processes: int = 1) -> list[str]:
  programs = f'--config.compilation_cache={os.environ[PROGRAMS]}'
  train = [sys.executable, 'launch/train.py', *config, programs, f'--workdir={workdir}', *flags]
  if processes == 1:
    return train
  return [sys.executable, 'launch/cluster/local.py', f'--processes={processes}', '--', *train]


def own_programs(workdir: pathlib.Path) -> str:
  """A flag for a job that shall compile what it runs: to one that is to be killed on its way, that gives time."""
  return f'--config.compilation_cache={workdir.parent / "programs"}'


def start(workdir: pathlib.Path, *flags: str, **options) -> subprocess.Popen:
  return subprocess.Popen(
    command(workdir, *flags, **options),
    cwd=ROOT,
    env=environment(),
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )


def train(workdir: pathlib.Path, *flags: str, expect: int = 0, **options) -> subprocess.CompletedProcess:
  """Runs to the end; raises with the output when the exit code is another than `expect`."""
  process = start(workdir, *flags, **options)
  out, err = process.communicate(timeout=600)
  if process.returncode != expect:
    raise AssertionError(f'exit code {process.returncode}, wanted {expect}\n--- stdout\n{out}\n--- stderr\n{err}')
  return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def rows(workdir: pathlib.Path) -> list[dict]:
  file = workdir / 'metrics.jsonl'
  if not file.exists():
    return []
  return [json.loads(line) for line in file.read_text().splitlines() if line.endswith('}')]


def accuracies(workdir: pathlib.Path, taskset: str = 'eval') -> list[tuple[str, int, float]]:
  """(stage, step, greedy accuracy) of each evaluation."""
  key = f'val-core/{taskset}/acc/greedy'
  return [(r['stage'], r['training/global_step'], r[key]) for r in rows(workdir) if key in r]


def wait_for_rows(workdir: pathlib.Path, count: int, process: subprocess.Popen, *, timeout_s: float = 300) -> None:
  """Returns when metrics.jsonl has `count` rows; raises when the process ends before."""
  deadline = time.monotonic() + timeout_s
  while len(rows(workdir)) < count:
    if process.poll() is not None:
      raise AssertionError(f'ended with {process.returncode} before {count} rows:\n{process.communicate()[1]}')
    if time.monotonic() > deadline:
      raise AssertionError(f'{len(rows(workdir))} rows of {count} after {timeout_s} s')
    time.sleep(0.01)


def kill(process: subprocess.Popen) -> None:
  """SIGKILL to the program and all that it started."""
  os.killpg(process.pid, signal.SIGKILL)
  process.communicate()


def untimed(workdir: pathlib.Path) -> list[dict]:
  return [{k: v for k, v in row.items() if not k.startswith(UNTIMED)} for row in rows(workdir)]


def files(directory: pathlib.Path) -> dict[str, bytes]:
  return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob('*')) if p.is_file()}


def assert_equal_runs(found: pathlib.Path, wanted: pathlib.Path) -> None:
  """Bit for bit: parameters, optimizer state, rollouts, evaluations, every metric that is not a time."""
  assert untimed(found) == untimed(wanted)
  for part in ('rollouts', 'evals', 'hf'):
    assert files(found / part) == files(wanted / part), part
  assert newest_arrays(found) == newest_arrays(wanted)


def newest_arrays(workdir: pathlib.Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
  """Every array of the newest commit (parameters and optimizer), as (dtype, shape, bytes) by path."""
  import jax
  import numpy as np
  import orbax.checkpoint as ocp

  step = max(int(p.parent.name) for p in (workdir / 'checkpoints').glob('*/COMMIT'))
  with ocp.PyTreeCheckpointer() as checkpointer:
    tree = checkpointer.restore(
      (workdir / 'checkpoints' / str(step) / 'arrays').absolute(),
      restore_args=jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray),
        checkpointer.metadata((workdir / 'checkpoints' / str(step) / 'arrays').absolute()).item_metadata.tree,
      ),
    )
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {
    jax.tree_util.keystr(path): (str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()) for path, leaf in leaves
  }


def kill_at_random(workdir: pathlib.Path, *flags: str, kills: int, seed: int, **options) -> list[int]:
  """Starts a run, kills it after a random while, checks its accounts, and again; then lets it end.

  Returns how many rows it had at each kill.
  """
  from jaxrl_llm.replay.audit import audit

  rng, at, flags = random.Random(seed), [], (*flags, own_programs(workdir))
  for _ in range(kills):
    process = start(workdir, *flags, **options)
    wait_for_rows(workdir, len(rows(workdir)) + rng.randrange(1, 4), process)
    time.sleep(rng.random())
    kill(process)
    at.append(len(rows(workdir)))
    report = audit(workdir / 'replay')
    assert report.ok, report.lines
  train(workdir, *flags, **options)
  return at


def plans(workdir: pathlib.Path, stage: str) -> list[dict]:
  """The stage's plans as the store has them, in order."""
  with contextlib.closing(sqlite3.connect(workdir / 'replay' / 'index.sqlite')) as db:
    found = [json.loads(text) for (text,) in db.execute('SELECT json FROM plans ORDER BY step')]
  return [plan for plan in found if plan['stage'] == stage]


ASYNCHRONOUS = ('--config.stages.grpo.bound=2', '--config.stages.grpo.publish_every=2')
PROCESSED = (
  '--config.stages.grpo.processors=[{"name":"mask_truncated"},{"name":"reward_std"}]',
  '--config.stages.grpo.past={"groups":6,"max_uses":3,"draw":{"order":"priority"}}',
)
"""Filters and replay."""


def check_accounts(workdir: pathlib.Path, *, steps: int, processed: bool) -> None:
  """Of a run of 6 new groups of 4 a batch that was ASYNCHRONOUS, and perhaps PROCESSED."""
  from jaxrl_llm.replay.audit import audit

  report, grpo = audit(workdir / 'replay'), plans(workdir, 'grpo')
  assert report.ok and report.live == (), report.lines
  assert len(grpo) == steps
  uses = collections.Counter(group for plan in grpo for group in {row['group'] for row in plan['rows']})
  tasks = collections.Counter(group.split('/')[1] for group in uses)
  assert set(tasks.values()) == {1}, 'no pass over the tasks is over: each was drawn once'
  assert len(uses) == 6 * steps, 'six new groups a batch'
  assert all(
    plan['step'] - row['version_step'] <= 2 for plan in grpo for row in plan['rows'] if uses[row['group']] == 1
  )
  steps_of = [row for row in rows(workdir) if 'staleness/max' in row]
  if processed:
    assert 2 <= max(uses.values()) <= 3 and any('dropped(reward std)' in reason for reason in report.reasons)
    assert sum(row['run/past_groups'] for row in steps_of) == sum(uses.values()) - len(uses)
  else:
    assert set(uses.values()) == {1}
    assert report.states['trained'] == steps * 6 * 4 and max(row['staleness/max'] for row in steps_of) == 2
