"""Runs from Python: `train` of a configuration value, in a script and where an event loop is
running.
"""

import json

import job
import pytest
import warm

pytestmark = pytest.mark.full

IN_A_NOTEBOOK = """
import asyncio, json, sys


async def in_a_notebook(config, workdir):
  return train(config, workdir)


if __name__ == '__main__':
  from jaxrl_llm.api import UserError, load_config, train

  spec, workdir, overrides = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
  in_loop = asyncio.run(in_a_notebook(load_config(spec, overrides), workdir))
  assert in_loop.finished and in_loop.model.is_dir() and in_loop.report.is_file()
  for changed in ({**overrides, 'seed': 1}, overrides):  # A refusal leaves the directory free.
    try:
      again = train(load_config(spec, changed), workdir)
    except UserError as error:
      print(error)
  assert again == in_loop
  print(json.dumps(again.metrics[-1]))
"""

INTERRUPTED = """
import json, os, pathlib, signal, sys, threading, time

if __name__ == '__main__':
  from jaxrl_llm.api import load_config, train

  config, workdir = load_config(sys.argv[1], json.loads(sys.argv[3])), sys.argv[2]

  def interrupt(due):
    while not due():
      time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

  def interrupted_train(due):
    threading.Thread(target=interrupt, args=(due,), daemon=True).start()
    return train(config, workdir)

  signal.signal(signal.SIGINT, signal.default_int_handler)  # Shells start background processes \
without it.
  try:
    at_once = interrupted_train(lambda: any(thread.name == 'train' \
for thread in threading.enumerate()))
    assert not at_once.finished, at_once
  except KeyboardInterrupt:  # It came before the run began.
    assert not pathlib.Path(workdir).exists()
  first = interrupted_train(lambda: list(pathlib.Path(workdir, 'checkpoints').glob('*/COMMIT')))
  assert not first.finished and first.metrics, first
  second = train(config, workdir)
  assert second.finished and len(second.metrics) > len(first.metrics)
"""


def run(tmp_path, program, overrides=None):
  """The program's lines, run with QUICK's flags as overrides."""
  flags = dict(flag.removeprefix('--config.').split('=', 1) for flag in job.QUICK[1:])
  (tmp_path / 'program.py').write_text(program)
  overrides = {**flags, 'compilation_cache': str(tmp_path / 'programs'), **(overrides or {})}
  arguments = 'quickstart', tmp_path / 'run', json.dumps(overrides)
  process = warm.start([tmp_path / 'program.py', *arguments], cwd=tmp_path, env=job.environment())
  out, err = process.communicate(timeout=600)
  assert process.returncode == 0, err
  return out.splitlines()


def test_a_run_in_a_notebook_is_that_of_the_command_line(tmp_path):
  """Bit for bit, and its programs are kept; another seed is refused; started again, it returns the
  same.
  """
  *lines, last_row = run(tmp_path, IN_A_NOTEBOOK)
  assert json.loads(last_row) == job.rows(tmp_path / 'run')[-1]
  assert any('seed' in line for line in lines), '|'.join(lines)[-900:]
  assert any((tmp_path / 'programs').iterdir())
  job.assert_equal_runs(tmp_path / 'run', job.quick_run())


def test_evaluations_beside_training_change_nothing_but_the_order_of_the_rows(tmp_path):
  """At bound 0, rollouts of one more batch are sampled beside the evaluation."""
  job.train(tmp_path / 'run', '--config.stages.grpo.overlap_evaluation=true')
  job.assert_equal_runs(tmp_path / 'run', job.quick_run())


def test_an_interrupt_ends_a_run_from_a_script_with_a_commit(tmp_path):
  shared = {'compilation_cache': str(job.session() / 'programs')}
  run(tmp_path, INTERRUPTED, shared)
  job.assert_equal_runs(tmp_path / 'run', job.quick_run())


@pytest.mark.parametrize(
  ('variables', 'program', 'line'),
  [
    (
      {
        'JAX_COORDINATOR_ADDRESS': '127.0.0.1:1',
        'JAX_NUM_PROCESSES': '2',
        'JAX_PROCESS_ID': '0',
      },
      '',
      'train: this process is one of the 2 processes of the job at 127.0.0.1:1',
    ),
    (
      {},
      'import multiprocessing\nmultiprocessing.parent_process = lambda: 1\n',
      'train: called while a scorer',
    ),
    (
      {},
      'import pathlib\nkey = pathlib.Path("x")\nload_config("quickstart", {"seed": key})\n',
      'override seed: ',
    ),
  ],
)
def test_impossible_settings_are_one_clear_line(tmp_path, variables, program, line):
  (tmp_path / 'program.py').write_text(
    f"from jaxrl_llm.api import load_config, train\n{program}train(load_config('quickstart'), "
    "'run')"
  )
  process = warm.start([tmp_path / 'program.py'], cwd=tmp_path, env=job.environment(**variables))
  _, err = process.communicate(timeout=300)
  assert f'UserError: {line}' in err and not (tmp_path / 'run').exists(), err
