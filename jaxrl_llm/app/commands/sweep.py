"""Runs the trials of a sweep file, keeps a ledger, and writes a page that compares them.

jaxrl sweep --sweep=quickstart_lr                                  # a shipped sweep, or FILE.py
jaxrl sweep --sweep=configs/sweeps/quickstart_lr.py --parallel=2 --config.stages.sft.steps=100
jaxrl sweep --sweep=quickstart_lr --dry_run                        # lists the trials, runs none
jaxrl sweep --sweep=quickstart_lr --status [--json]                # progress of the trials
jaxrl sweep --sweep=quickstart_lr --launcher=slurm [--submit]      # prints or submits a job array

--config.KEY=VALUE overrides a field of every trial. The same command continues a sweep that was
stopped or killed: each trial is a run in <sweepdir>/trials/<id> and resumes from its newest commit.
Exit code 0: all trials finished or were stopped early; 1: some failed; 2: the input is invalid; 130
and 143: stopped by Ctrl-C and SIGTERM, after the running trials committed.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Collection, Sequence

from absl import flags
from rich.console import Console
from rich.live import Live

from jaxrl_llm.app.cluster.job import ProcessResources
from jaxrl_llm.app.sweeps.array import (
  JobArray,
  array_text,
  check_installed,
  submit_array,
  task_arguments,
)
from jaxrl_llm.app.sweeps.ledger import Ledger, LedgerEntry, locked, values
from jaxrl_llm.app.sweeps.page import build_page
from jaxrl_llm.app.sweeps.plan import SweepPlan, load_plan, open_ledger, preview
from jaxrl_llm.app.sweeps.ranking import ranked
from jaxrl_llm.app.sweeps.runner import Machine, Runner
from jaxrl_llm.app.sweeps.table import (
  entry_json,
  ranking_table,
  state_json,
  state_table,
  trials_table,
)
from jaxrl_llm.app.sweeps.task import in_slurm_step
from jaxrl_llm.config.load import parse_flags, split_argv
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError

FLAGS = flags.FlagValues()
flags.DEFINE_string('sweep', None, 'Sweep file, or the name of a shipped sweep.', flag_values=FLAGS)
flags.DEFINE_string(
  'sweepdir', None, 'Directory of the sweep; by default runs/sweeps/<name>.', flag_values=FLAGS
)
flags.DEFINE_integer(
  'parallel',
  1,
  'Number of trials that run at the same time; with --launcher, the default is all.',
  flag_values=FLAGS,
)
flags.DEFINE_integer(
  'gpus_per_trial', 0, 'Number of GPUs that each trial sees; 0: all.', flag_values=FLAGS
)
flags.DEFINE_float(
  'grace_s', 600, 'Seconds that a trial has to commit when it is stopped.', flag_values=FLAGS
)
flags.DEFINE_bool('dry_run', False, 'List the trials; run none.', flag_values=FLAGS)
flags.DEFINE_bool('status', False, 'Print the progress of the trials.', flag_values=FLAGS)
flags.DEFINE_bool('json', False, 'With --dry_run or --status: print JSON.', flag_values=FLAGS)
flags.DEFINE_bool('retry_failed', False, 'Start failed trials again.', flag_values=FLAGS)
flags.DEFINE_enum(
  'launcher', None, ['slurm'], 'Run the trials as one job array of this system.', flag_values=FLAGS
)
flags.DEFINE_string(
  'launcher_options',
  '{}',
  'JSON of the launcher\'s own options, such as {"partition": "gpu"}.',
  flag_values=FLAGS,
)
flags.DEFINE_integer('cpus', None, 'With --launcher: cores of a trial.', flag_values=FLAGS)
flags.DEFINE_integer(
  'memory_gib', None, 'With --launcher: memory of a trial in GiB.', flag_values=FLAGS
)
flags.DEFINE_integer(
  'time_limit_s', None, 'With --launcher: maximum duration in seconds.', flag_values=FLAGS
)
flags.DEFINE_bool('submit', False, 'With --launcher: submit the job array.', flag_values=FLAGS)
flags.DEFINE_integer(
  'trial', None, 'Run this trial alone, as a task of a job array does.', flag_values=FLAGS
)

TRAIN = (sys.executable, '-m', 'jaxrl_llm', 'train')
"""Command that runs `jaxrl train` with this Python interpreter."""


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code."""
  return script.exit_code(lambda: _main(argv), as_json=script.asks_json(argv))


def _main(argv: Sequence[str]) -> int:
  flag_args, spec, overrides = split_argv(argv)
  parse_flags(flag_args, FLAGS, __doc__, takes_config=False)
  if spec is not None:
    raise UserError(
      f'--config={spec}: the sweep file names the configuration; wanted --config.KEY=VALUE'
    )
  if FLAGS.status and FLAGS.sweep is None and FLAGS.sweepdir is not None:
    return _print_status(pathlib.Path(FLAGS.sweepdir))
  if FLAGS.sweep is None:
    raise UserError('--sweep=FILE.py: missing; try --sweep=quickstart_lr --dry_run')
  _check_flags()
  plan = load_plan(FLAGS.sweep, overrides)
  sweepdir = pathlib.Path(FLAGS.sweepdir or f'runs/sweeps/{plan.path.stem}')
  if FLAGS.status:
    return _print_status(sweepdir)
  if FLAGS.dry_run:
    return _print_trials(plan, sweepdir)
  alone = FLAGS.trial is not None or FLAGS.launcher is not None
  if alone and plan.sweep.search == 'tpe':
    raise UserError("search='tpe' draws trials while the sweep runs; remove --trial and --launcher")
  if FLAGS.launcher is not None:
    return _launch(plan, sweepdir, argv)
  with locked(sweepdir, shared=FLAGS.trial is not None):
    ledger = open_ledger(plan, sweepdir)
    try:
      return _run(plan, ledger)
    finally:
      ledger.close()


def _check_flags() -> None:
  if sum([FLAGS.dry_run, FLAGS.status, FLAGS.trial is not None]) > 1:
    raise UserError('--dry_run, --status, --trial: cannot be combined; give one of them')
  if FLAGS.submit and FLAGS.launcher is None:
    raise UserError('--submit: needs --launcher=slurm')
  if FLAGS.json and not (FLAGS.dry_run or FLAGS.status):
    raise UserError('--json: needs --dry_run or --status')
  for name, least in (('parallel', 1), ('gpus_per_trial', 0), ('grace_s', 1)):
    if FLAGS[name].value < least:
      raise UserError(f'--{name}={FLAGS[name].value}: wanted at least {least}')
  machine = _machine()
  if machine.gpus_per_trial and len(machine.gpus(machine.parallel - 1)) < machine.gpus_per_trial:
    raise UserError(
      f'--gpus_per_trial={machine.gpus_per_trial}: --parallel={machine.parallel} trials need more '
      'GPUs than CUDA_VISIBLE_DEVICES has; lower one of them'
    )


def _machine() -> Machine:
  return Machine(
    parallel=FLAGS.parallel if FLAGS.trial is None else 1,
    gpus_per_trial=FLAGS.gpus_per_trial,
    grace_s=FLAGS.grace_s,
    in_step=FLAGS.trial is not None and in_slurm_step(),
  )


def _run(plan: SweepPlan, ledger: Ledger) -> int:
  if FLAGS.retry_failed:
    ledger.retry()
  console = Console(stderr=True, highlight=False, markup=False)
  numbers = _numbers(ledger.entries())
  table = console.is_terminal and FLAGS.trial is None
  with Live(console=console, auto_refresh=False, transient=True, screen=False) as live:
    runner = Runner(
      ledger,
      plan.sweep,
      TRAIN,
      _machine(),
      numbers=numbers,
      note=lambda text: live.console.print(text, soft_wrap=True),
      show=(lambda: live.update(_state(ledger), refresh=True)) if table else _nothing,
    )
    code = runner.run()
  if FLAGS.trial is None:
    _print_end(ledger)
  return code


def _launch(plan: SweepPlan, sweepdir: pathlib.Path, argv: Sequence[str]) -> int:
  """Prints or submits the job array of a sweep."""
  command = (*TRAIN[:-1], 'sweep', *task_arguments(argv[1:]), f'--sweepdir={sweepdir.absolute()}')
  array = JobArray(
    command=command,
    sweepdir=sweepdir.absolute(),
    resources=ProcessResources(
      cpus=FLAGS.cpus, memory_gib=FLAGS.memory_gib, gpus=FLAGS.gpus_per_trial
    ),
    grace_s=FLAGS.grace_s,
    time_limit_s=FLAGS.time_limit_s,
    at_once=FLAGS.parallel if FLAGS['parallel'].present else None,
    options=FLAGS.launcher_options,
  )
  if not FLAGS.submit:
    print(array_text(array, len(preview(plan, sweepdir))), end='')
    return 0
  check_installed()
  with locked(sweepdir, shared=False):
    ledger = open_ledger(plan, sweepdir)
    count = len(ledger.entries())
    ledger.close()
    print(f'submitted {submit_array(array, count)}: {count} trials in {sweepdir}')
  return 0


def _nothing() -> None:
  """Does nothing. Used in place of the function that updates the display if there is no display."""


def _state(ledger: Ledger):
  return state_table(ledger.entries(), ledger.reports(), ledger.meta())


def _numbers(entries: Sequence[LedgerEntry]) -> Collection[int]:
  """Returns the numbers of the trials to run: the number that --trial gives, or all numbers."""
  numbers = [entry.number for entry in entries]
  if FLAGS.trial is None:
    return numbers
  if FLAGS.trial not in numbers:
    raise UserError(f'--trial={FLAGS.trial}: the sweep has trials 0 to {len(numbers) - 1}')
  return [FLAGS.trial]


def _print_end(ledger: Ledger) -> None:
  console = Console(highlight=False, markup=False)
  _print_tables(console, ledger)
  if page := build_page(ledger):
    console.print(f'comparison: {page}', soft_wrap=True)


def _print_tables(console: Console, ledger: Ledger) -> None:
  entries, reports, meta = ledger.entries(), ledger.reports(), ledger.meta()
  console.print(state_table(entries, reports, meta, rows=len(entries)))
  groups = ranked(entries, values(entries, reports, meta), meta['direction'])
  console.print(ranking_table(groups))


def _print_status(sweepdir: pathlib.Path) -> int:
  ledger = Ledger(sweepdir)
  if FLAGS.json:
    script.print_json(state_json(ledger.entries(), ledger.reports(), ledger.meta()))
  else:
    _print_tables(Console(highlight=False, markup=False), ledger)
  ledger.close()
  return 0


def _print_trials(plan: SweepPlan, sweepdir: pathlib.Path) -> int:
  entries = preview(plan, sweepdir)
  if FLAGS.json:
    shown = [entry_json(entry, None) for entry in entries]
    script.print_json({'sweepdir': str(sweepdir), 'trials': shown, 'drawn_later': plan.drawn_later})
    return 0
  console = Console(highlight=False, markup=False)
  console.print(trials_table(entries))
  later = f' and {plan.drawn_later} to be drawn while the search runs' if plan.drawn_later else ''
  console.print(f'{len(entries)} trials{later}, in {sweepdir}', soft_wrap=True)
  return 0
