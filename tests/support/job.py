"""Starts the real training program as a user would, and reads the files that it wrote."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import json
import os
import pathlib
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import programs
import times
import warm
from paths import ROOT

SMALL = (
  '--config.policy.model={"hidden_size":64,"intermediate_size":96,"num_hidden_layers":2,'
  '"num_attention_heads":2,"num_key_value_heads":1,"head_dim":32}',
  '--config.tasksets.train.size=4000',
  '--config.tasksets.eval.size=4000',
  '--config.evaluation.held_out.tasks=24',
  '--config.rollout.embedded.slots=24',
  '--config.checkpoint.every_steps=3',
  # Rewards must differ within groups from the first step on.
  '--config.rewards.scorers.0.options={"partial_credit":true}',
)
"""Flags that make any shipped configuration small. The code is the same; only the numbers are
smaller.
"""
QUICK = (
  '--config=configs/quickstart.py',
  *SMALL,
  '--config.stages.sft.source.count=400',
  '--config.stages.sft.steps=12',
  '--config.stages.grpo.steps=8',
  '--config.stages.grpo.source.groups_per_batch=6',
  '--config.stages.grpo.source.group_size=4',
  '--config.stages.grpo.evaluate_every=4',
)
"""Flags of the quickstart's job, shortened to seconds."""
RIGHT = (
  '--config.rewards.scorers.0.kind=format',
  '--config.rewards.scorers.0.options={"template":"{x}a{y}"}',
)
"""Flags of a scorer whose rule is a word with one 'a' that is neither its first nor its last
letter. A policy after a few steps satisfies it now and then.
"""
PARTIAL = (
  '--config.rollout.partial=' + json.dumps({'budget': 3, 'max_spans': 4}),
  '--config.rollout.embedded.prefill_buckets=(6,12)',
)
"""Flags with a budget below the length of nearly all answers, which have up to 7 tokens."""
UNTIMED = (
  *('timing_s/', 'timing_per_token_ms/', 'perf/', 'goodput/seconds/', 'goodput/wall_s/'),
  # Number of tokens that engines generated since this start. A kill loses some of them, and some
  # are generated again.
  *('goodput/tokens/generated', 'goodput/tokens/evaluated'),
)
"""Beginnings of the names of metrics that may differ between two equal runs."""
SESSION = 'JAXRL_TEST_SESSION'
"""Name of the environment variable with the directory that all workers of a test session share."""


def small(config: str, *flags: str, steps: int = 6) -> tuple[str, ...]:
  """Returns the flags of a shipped configuration, shortened to seconds: a stage of demonstrations,
  then `steps` batches of 6 groups of 4 samples.
  """
  return (
    f'--config=configs/{config}',
    *SMALL,
    '--config.stages.0.source.count=400',
    '--config.stages.0.steps=12',
    f'--config.stages.1.steps={steps}',
    '--config.stages.1.source.groups_per_batch=6',
    '--config.stages.1.source.group_size=4',
    *flags,
  )


PPO = small(
  'ppo.py',
  '--config.stages.1.minibatches=2',
  '--config.stages.1.epochs=2',
  # A commit must keep all of this: a critic that warms up, a reference that is refreshed, and a
  # coefficient that adapts.
  '--config.stages.1.algorithm.options='
  + json.dumps(
    {
      'critic_warmup': 2,
      'kl_reward_coef': 0.05,
      'kl_target': 1e-4,
      'kl_horizon': 100.0,
      'reference': {'every': 4},
    }
  ),
  # The peak is a made-up number, because CPUs have none. One step is traced.
  '--config.logging.peak_tflops=0.05',
  '--config.logging.profile_steps=(14,)',
  steps=9,
)
PPO_OF_TWO = (
  *PPO,
  # Training continues during an evaluation.
  '--config.stages.1.evaluate_every=3',
  '--config.stages.1.overlap_evaluation=true',
  # The processes make a memory plan. With this much memory, it is the plan without remat.
  f'--config.learner.memory_bytes={10**12}',
)
"""Flags of PPO for two processes."""


def session() -> pathlib.Path:
  return pathlib.Path(os.environ[SESSION])


def environment(**extra: str) -> dict[str, str]:
  """Returns the environment of a job: one device, programs that compile quickly, and a fixed size
  of XLA's thread pool, as in the launch scripts.
  """
  fixed = {
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': programs.CHEAP,
    'NPROC': '2',
    'PYTHONPATH': str(ROOT),
  }
  return {**os.environ, **fixed, **extra}


def command(
  workdir: pathlib.Path,
  *flags: str,
  config: tuple[str, ...] = QUICK,
  processes: int = 1,
  script: str = 'launch/train.py',
) -> list[str]:
  programs = f'--config.compilation_cache={session() / "programs"}'
  train = [sys.executable, script, *config, programs, f'--workdir={workdir}', *flags]
  if processes == 1:
    return train
  return [sys.executable, 'launch/cluster/local.py', f'--processes={processes}', '--', *train]


def own_programs(workdir: pathlib.Path) -> str:
  """Returns the flag of a job that compiles all programs itself. This leaves time to kill the job
  half-way.
  """
  return f'--config.compilation_cache={workdir.parent / "programs"}'


def start(
  workdir: pathlib.Path, *flags: str, environ: Mapping[str, str] | None = None, **options
) -> warm.Process:
  """Starts a job. Its processes are forks that need no imports (see `warm`)."""
  env = environment() if environ is None else environ
  return warm.start(command(workdir, *flags, **options)[1:], cwd=ROOT, env=env)


def train(
  workdir: pathlib.Path, *flags: str, expect: int = 0, timeout_s: float = 600, **options
) -> subprocess.CompletedProcess:
  """Runs a job to its end. Raises AssertionError with its output if the exit code is not
  `expect`.
  """
  return _finish(start(workdir, *flags, **options), expect, timeout_s=timeout_s)


def call(
  script: str,
  *arguments: object,
  expect: int = 0,
  timeout_s: float = 600,
  environ: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess:
  """Runs a script of this repository to its end. Raises AssertionError with its output if the exit
  code is not `expect`.
  """
  env = environment() if environ is None else environ
  process = warm.start([script, *map(str, arguments)], cwd=ROOT, env=env)
  return _finish(process, expect, timeout_s=timeout_s)


def _finish(process: warm.Process, expect: int, *, timeout_s: float) -> subprocess.CompletedProcess:
  try:
    with times.phase('job'):
      out, err = process.communicate(timeout=timeout_s)
  except subprocess.TimeoutExpired:
    kill(process)
    raise
  if process.returncode != expect:
    raise AssertionError(
      f'exit code {process.returncode}, wanted {expect}\n--- stdout\n{out}\n--- stderr\n{err}'
    )
  return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def shared(name: str, build: Callable[[pathlib.Path], object]) -> pathlib.Path:
  """Returns a directory that is built once per test session, by the first worker that requests it.
  Afterwards it is read-only.

  Args:
    build: called with the path of the directory to make. If it fails, the next worker that requests
      the directory builds it again.
  """
  folder = session() / 'shared'
  folder.mkdir(exist_ok=True)
  with open(folder / f'{name}.lock', 'w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    done = folder / f'{name}.done'
    if not done.exists():
      shutil.rmtree(folder / name, ignore_errors=True)
      build(folder / name)
      done.touch()
  return folder / name


def finished(name: str, *flags: str, **options) -> pathlib.Path:
  """Returns the directory of a finished run, which is trained once per session. Its standard output
  is in a file next to it.
  """

  def build(workdir: pathlib.Path) -> None:
    workdir.with_suffix('.stdout').write_text(train(workdir, *flags, **options).stdout)

  return shared(name, build)


def printed(workdir: pathlib.Path) -> str:
  """Returns the standard output of a `finished` run."""
  return workdir.with_suffix('.stdout').read_text()


def quick_run() -> pathlib.Path:
  """Returns the directory of a finished run of QUICK."""
  return finished('quick')


def ppo_run() -> pathlib.Path:
  """Returns the directory of a finished run of PPO."""
  return finished('ppo', config=PPO)


def start_script(name: str, folder: pathlib.Path, *changes: str) -> str:
  """Runs a script of docs/start to its end, and returns its standard output."""
  cache = f'compilation_cache={session() / "programs"}'
  return call(f'docs/start/{name}.py', folder, cache, *changes).stdout


def chat_sft_run() -> pathlib.Path:
  """Returns the directory that docs/start/chat_sft.py writes with a third of its steps: rows,
  checkpoint and `run`.
  """
  steps = ('stages.sft.steps=60', 'stages.sft.evaluate_every=20')
  return shared('chat_sft', lambda folder: start_script('chat_sft', folder, *steps))


def reward_model_run() -> pathlib.Path:
  """Returns the directory of a finished run of configs/reward_model.py, with few pairs and
  steps.
  """
  shared = tuple(flag for flag in SMALL if 'policy.model' in flag or 'tasksets' in flag)
  pairs = ('--config.preferences.0.size=300', '--config.preferences.1.size=50')
  steps = ('--config.stages.0.steps=6', '--config.stages.0.evaluate_every=3')
  # This leaves room for the stop token after an answer that reached the policy's limit.
  longer = ('--config.rollout.max_response_length=12',)
  config = ('--config=configs/reward_model.py', *shared, *pairs, *steps, *longer)
  return finished('reward_model', config=config)


def killed_ppo_run() -> pathlib.Path:
  """Returns the directory of a PPO run that was killed twice and then finished. The kills come
  during the critic's warm-up and after a refresh of the reference.
  """
  return shared('killed_ppo', lambda workdir: killed_and_resumed(workdir, 16, 21, config=PPO))


def killed_and_resumed(
  workdir: pathlib.Path, *counts: int, flags: tuple[str, ...] = (), **options
) -> pathlib.Path:
  """Kills a run when metrics.jsonl has each of these numbers of rows, and then runs it to its
  end.
  """
  for count in counts:
    process = start(workdir, *flags, **options)
    wait_for_rows(workdir, count, process)
    kill(process)
  train(workdir, *flags, **options)
  return workdir


def copy(workdir: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
  """Copies a shared run to a directory that a test may change."""
  return shutil.copytree(workdir, target)


def rows(workdir: pathlib.Path) -> list[dict]:
  file = workdir / 'metrics.jsonl'
  if not file.exists():
    return []
  return [json.loads(line) for line in file.read_text().splitlines() if line.endswith('}')]


def wait_for_commit(
  workdir: pathlib.Path, process: warm.Process, *, timeout_s: float = 300
) -> None:
  """Waits until a commit is complete. Raises AssertionError if the process ends earlier."""
  deadline = time.monotonic() + timeout_s
  with times.phase('job'):
    while not commits(workdir):
      assert process.poll() is None, f'ended with {process.returncode} before its first commit'
      assert time.monotonic() < deadline, f'no commit in {timeout_s} s'
      time.sleep(0.02)


def count_rows(workdir: pathlib.Path) -> int:
  """Returns the number of `rows` without parsing them, which is cheap enough for polling."""
  file = workdir / 'metrics.jsonl'
  return file.read_bytes().count(b'}\n') if file.exists() else 0


def accuracies(workdir: pathlib.Path, taskset: str = 'eval') -> list[tuple[str, int, float]]:
  """Returns (stage, step, greedy accuracy) of each evaluation."""
  key = f'val-core/{taskset}/acc/greedy'
  return [(r['stage'], r['training/global_step'], r[key]) for r in rows(workdir) if key in r]


def wait_for_rows(
  workdir: pathlib.Path,
  count: int,
  process: warm.Process,
  *,
  timeout_s: float = 300,
) -> None:
  """Waits until metrics.jsonl has `count` rows. Raises AssertionError if the process ends
  earlier.
  """
  deadline = time.monotonic() + timeout_s
  with times.phase('job'):
    while (found := count_rows(workdir)) < count:
      if process.poll() is not None:
        raise AssertionError(
          f'ended with {process.returncode} before {count} rows:\n{process.communicate()[1]}'
        )
      if time.monotonic() > deadline:
        raise AssertionError(f'{found} rows of {count} after {timeout_s} s')
      time.sleep(0.02)


def kill(process: warm.Process) -> None:
  """Sends SIGKILL to the program and to everything that it started. It may have ended already."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  process.communicate()


def untimed(workdir: pathlib.Path) -> list[dict]:
  return [{k: v for k, v in row.items() if not k.startswith(UNTIMED)} for row in rows(workdir)]


def by_step(workdir: pathlib.Path) -> list[dict]:
  """Returns the rows without times, ordered by step. The order matters because an evaluation during
  training may end after any step.
  """
  return sorted(untimed(workdir), key=lambda row: row['training/global_step'])


def files(directory: pathlib.Path) -> dict[str, bytes]:
  return {
    str(p.relative_to(directory)): p.read_bytes()
    for p in sorted(directory.rglob('*'))
    if p.is_file()
  }


def assert_equal_runs(found: pathlib.Path, wanted: pathlib.Path) -> None:
  """Asserts that two runs are equal to the bit: parameters, optimizer state, rollouts, evaluations,
  and all metrics that are not times.
  """
  assert by_step(found) == by_step(wanted)
  for part in ('rollouts', 'evals', 'hf'):
    assert without_card(files(found / part)) == without_card(files(wanted / part)), part
  assert newest_arrays(found) == newest_arrays(wanted)


def without_card(contents: Mapping) -> dict:
  """Returns the files without the model card, which contains the directory of its run."""
  return {path: content for path, content in contents.items() if str(path) != 'README.md'}


def commits(workdir: pathlib.Path) -> list[int]:
  """Returns the committed steps in ascending order."""
  return sorted(int(path.parent.name) for path in (workdir / 'checkpoints').glob('*/COMMIT'))


Arrays = dict[str, tuple[str, tuple[int, ...], bytes]]


def newest_arrays(workdir: pathlib.Path) -> Arrays:
  """Returns the `arrays` of the newest commit."""
  return arrays(workdir, commits(workdir)[-1])


def arrays(workdir: pathlib.Path, step: int) -> Arrays:
  """Returns (dtype, shape, bytes) of every array of a commit (parameters and optimizer), keyed by
  path.
  """
  import jax
  import numpy as np
  import orbax.checkpoint as ocp

  folder = (workdir / 'checkpoints' / str(step) / 'arrays').absolute()
  with ocp.PyTreeCheckpointer() as checkpointer:
    shapes = checkpointer.metadata(folder).item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
    tree = checkpointer.restore(folder, restore_args=as_numpy)
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {
    jax.tree_util.keystr(path): (str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes())
    for path, leaf in leaves
  }


def kill_at_random(
  workdir: pathlib.Path, *flags: str, kills: int, seed: int, after: int = 0, **options
) -> None:
  """Starts a run, kills it at a random moment and checks its accounts, `kills` times. Then runs it
  to its end.

  Args:
    after: minimum number of rows before the first kill. A run of QUICK has 14 rows when its
      rollouts begin.
  """
  from jaxrl_llm.replay.audit import audit

  rng = random.Random(seed)
  for _ in range(kills):
    process = start(workdir, *flags, **options)
    wait_for_rows(workdir, max(after, len(rows(workdir))) + rng.randrange(1, 4), process)
    time.sleep(rng.random() * 0.2)
    kill(process)
    report = audit(workdir / 'replay')
    assert report.ok, report.lines
  train(workdir, *flags, **options)


def plans(workdir: pathlib.Path, stage: str) -> list[dict]:
  """Returns the recorded plans of a stage, ordered by step."""
  with contextlib.closing(sqlite3.connect(workdir / 'replay' / 'index.sqlite')) as db:
    found = [json.loads(text) for (text,) in db.execute('SELECT json FROM plans ORDER BY step')]
  return [plan for plan in found if plan['stage'] == stage]


ASYNCHRONOUS = (
  '--config.stages.grpo.source.bound=2',
  '--config.stages.grpo.source.publish_every=2',
)
PROCESSED = (
  '--config.stages.grpo.source.processors=[{"name":"mask_truncated"},{"name":"reward_std"}]',
  '--config.stages.grpo.source.past={"groups":6,"max_uses":3,"draw":{"order":"priority"}}',
)
"""Flags with processors and replay."""


def check_accounts(workdir: pathlib.Path, *, steps: int, processed: bool) -> None:
  """Checks the accounts of an ASYNCHRONOUS run whose batches have 6 new groups of 4 samples.
  `processed`: whether the run also had the flags PROCESSED.
  """
  from jaxrl_llm.replay.audit import audit

  report, grpo = audit(workdir / 'replay'), plans(workdir, 'grpo')
  assert report.ok and report.live == (), report.lines
  assert len(grpo) == steps
  uses = collections.Counter(
    group for plan in grpo for group in {row['group'] for row in plan['rows']}
  )
  tasks = collections.Counter(group.split('/')[1] for group in uses)
  assert set(tasks.values()) == {1}, 'no pass over the tasks is over: each was drawn once'
  assert len(uses) == 6 * steps, 'six new groups a batch'
  assert all(
    plan['step'] - row['version_step'] <= 2
    for plan in grpo
    for row in plan['rows']
    if uses[row['group']] == 1
  )
  steps_of = [row for row in rows(workdir) if 'staleness/max' in row]
  if processed:
    assert 2 <= max(uses.values()) <= 3 and any(
      'dropped(reward std)' in reason for reason in report.reasons
    )
    assert sum(row['run/past_groups'] for row in steps_of) == sum(uses.values()) - len(uses)
  else:
    assert set(uses.values()) == {1}
    assert (
      report.states['trained'] == steps * 6 * 4
      and max(row['staleness/max'] for row in steps_of) == 2
    )


def explorers(run):
  """Processes that explore for the run, by name; a guard's command line holds that of its
  explorer.
  """
  found = {}
  for entry in pathlib.Path('/proc').iterdir():
    if entry.name.isdecimal():
      try:
        words = (entry / 'cmdline').read_bytes().decode().split('\0')
        log = os.readlink(entry / 'fd' / '1')
      except OSError:
        continue
      names = [
        word.removeprefix('--name=') for word in words if word.startswith('--name=explorer-')
      ]
      own = 'jaxrl_llm.app.serve.explorer' in words and not any(
        'guard.py' in word for word in words
      )
      if names and own and pathlib.Path(log).is_relative_to(run):
        found[names[0].partition('.')[0]] = int(entry.name)
  return found
