"""Trains a configuration: `jaxrl train --config=configs/quickstart.py [--workdir=DIR]
[--config.field=value ...]`.

The same command resumes the run from its newest commit, with the current values of the
configuration. --branch_from starts a new run from a commit of another run. Exit codes: 0, the run
finished; 130 and 143, Ctrl-C or SIGTERM stopped it after a commit; 1, the run failed; 2, the input
is invalid. In the last two cases, a one-line error is printed, or a traceback if the error is
unexpected.

--check validates the configuration in seconds, --dry_run also compiles all programs, and --doctor
also runs a few batches. None of them writes to the run directory. --doctor prints one line per
check (ok, warning or failure, with a remedy). Its exit code is 1 if any check fails.
"""

from __future__ import annotations

import faulthandler
import os
import pathlib
import sys
import traceback
from collections.abc import Sequence

import jax
from absl import flags, logging

from jaxrl_llm.app.composition.branch import RESETS, Branch
from jaxrl_llm.app.composition.choices import recorded_flags
from jaxrl_llm.app.composition.sharing import use_releasing_allocator
from jaxrl_llm.app.doctor.command import diagnose
from jaxrl_llm.app.dry_run.preflight import print_check, print_list, print_plan
from jaxrl_llm.app.run import run
from jaxrl_llm.app.schema import Config
from jaxrl_llm.config.load import apply_overrides, load_file, parse_flags, split_argv
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import RunError, UserError, first_cause
from jaxrl_llm.core.process.job import unjoined
from jaxrl_llm.core.process.xla_flags import platform_here, set_flags
from jaxrl_llm.parallel.job import Membership, join, this_job
from jaxrl_llm.parallel.mesh import available_devices, build_mesh
from jaxrl_llm.parallel.topology import CHIPS, has_compiler, parse_topology
from jaxrl_llm.runtime.machine import use_compilation_cache

FLAGS = flags.FlagValues()
flags.DEFINE_string(
  'workdir', None, 'Run directory; by default runs/<name of the configuration>.', flag_values=FLAGS
)
flags.DEFINE_string(
  'init_from',
  None,
  "Hugging Face directory, hub id or another run's directory to start from.",
  flag_values=FLAGS,
)
flags.DEFINE_string(
  'branch_from', None,
  "RUN[:STEP]: start a new run from that run's commit at STEP, by default its newest.",
  flag_values=FLAGS,
)  # fmt: skip
flags.DEFINE_bool(
  'reset_optimizer', False,
  "With --branch_from: reset the optimizer's moments, but not the schedule.",
  flag_values=FLAGS,
)  # fmt: skip
flags.DEFINE_bool(
  'reset_data', False, 'With --branch_from: restart the data of the stage.', flag_values=FLAGS
)
flags.DEFINE_bool(
  'reset_store', False, 'With --branch_from: start with an empty store.', flag_values=FLAGS
)
flags.DEFINE_bool(
  'dry_run', False,
  'Print the resolved configuration, derived numbers, memory and shapes; train nothing.',
  flag_values=FLAGS,
)  # fmt: skip
flags.DEFINE_bool(
  'check', False, 'Validate configuration, data and mesh, and print them; compile nothing.',
  flag_values=FLAGS,
)  # fmt: skip
flags.DEFINE_bool(
  'doctor', False, 'Try the run: environment, data, scorers, and a few batches of each stage.',
  flag_values=FLAGS,
)  # fmt: skip
flags.DEFINE_bool(
  'json', False, 'With --check, --dry_run or --doctor: print one JSON document.', flag_values=FLAGS
)
flags.DEFINE_string(
  'topology', None,
  'With --dry_run: compile for these devices, which may be absent: v5e:4x4, 2*v5e:4x4, h100:8, …',
  flag_values=FLAGS,
)  # fmt: skip
flags.DEFINE_bool(
  'list', False, 'Print all names that a configuration can use, and exit.', flag_values=FLAGS
)
flags.DEFINE_string(
  'coordinator', None,
  'HOST:PORT of process 0 of a job; overrides JAX_COORDINATOR_ADDRESS and detection.',
  flag_values=FLAGS,
)  # fmt: skip
flags.DEFINE_integer(
  'num_processes', None,
  'Number of processes of the job; overrides JAX_NUM_PROCESSES and detection.',
  lower_bound=1, flag_values=FLAGS,
)  # fmt: skip
flags.DEFINE_integer(
  'process_id', None, 'Number of this process, from 0; overrides JAX_PROCESS_ID and detection.',
  lower_bound=0, flag_values=FLAGS,
)  # fmt: skip
flags.DEFINE_integer(
  'verbosity', 0, 'absl log level: -1 warning, 0 info, 1 debug.', flag_values=FLAGS
)

AOT_ENVIRONMENT = '.venv-aot'
"""Directory of the environment with compilers for other devices, made by `jaxrl install
--environment=aot`.
"""


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code."""
  try:
    return _main(argv)
  except Exception as error:
    cause = first_cause(error)
    if isinstance(cause, UserError):
      return _fail(cause, as_json=script.asks_json(argv))
    if jax.distributed.is_initialized():
      traceback.print_exc()
      script.leave_at_once(1)
    raise


def _main(argv: Sequence[str]) -> int:
  flag_args, config_spec, overrides = split_argv(argv)
  parse_flags(flag_args, FLAGS, __doc__)
  if FLAGS.list:
    print_list()
    return 0
  if FLAGS.topology:
    _compile_elsewhere(FLAGS.topology, dry_run=FLAGS.dry_run)
  modes = [name for name in ('check', 'dry_run', 'doctor') if FLAGS[name].value]
  if len(modes) > 1:
    raise UserError(f'--{modes[1]}: cannot be combined with --{modes[0]}; give one of them')
  if FLAGS.json and not modes:
    raise UserError('--json: needs --check, --dry_run or --doctor; a run writes metrics.jsonl')
  branch = _branch()
  if branch is not None and set(modes) - {'check'}:
    raise UserError(f'--branch_from: cannot be combined with --{modes[0]}; give one of them')
  if config_spec is None:
    raise UserError('--config=FILE.py[:VARIANT]: missing; try --config=configs/quickstart.py')
  if FLAGS.init_from:
    overrides = {**overrides, 'policy.init_from': FLAGS.init_from}
  config = apply_overrides(load_file(config_spec, Config), overrides)
  workdir = pathlib.Path(FLAGS.workdir or f'runs/{config.name}')
  logging.set_verbosity(FLAGS.verbosity)
  platform = (
    CHIPS[parse_topology(FLAGS.topology).chip].platform
    if FLAGS.topology
    else platform_here(os.environ)
  )
  compiler_flags = set_flags(platform, recorded=recorded_flags(workdir))
  if platform != 'cpu':
    logging.info('compiler flags for %s: %s', platform, compiler_flags)
  faulthandler.enable()
  use_releasing_allocator(config)
  membership = _join(config)
  available_devices()
  if not FLAGS.topology:
    build_mesh(config.learner.mesh)  # Rejects an invalid mesh before anything is written.
  # The cache is not used for absent devices, because their compiled programs cannot be read back.
  if config.compilation_cache and not FLAGS.topology:
    use_compilation_cache(config.compilation_cache)
  if FLAGS.check:
    print_check(config, workdir, branch, as_json=FLAGS.json)
    return 0
  if FLAGS.dry_run:
    return print_plan(config, workdir, FLAGS.topology, as_json=FLAGS.json)
  if FLAGS.doctor:
    return diagnose(config, workdir, as_json=FLAGS.json)
  code = script.run_async(run(config, workdir, branch=branch))
  if membership is not None:
    membership.leave(workdir)
  return code


def _branch() -> Branch | None:
  """Returns the commit that --branch_from names; None without the flag."""
  reset = [name for name in RESETS if FLAGS[f'reset_{name}'].value]
  if FLAGS.branch_from is None:
    if reset:
      raise UserError(f'--reset_{reset[0]}: needs --branch_from')
    return None
  if FLAGS.init_from:
    raise UserError(
      '--init_from: cannot be combined with --branch_from, which takes the weights of its commit'
    )
  return Branch.parse(FLAGS.branch_from, reset)


def _compile_elsewhere(topology: str, *, dry_run: bool) -> None:
  """Re-executes the command with the Python of the environment that has the target chip's compiler.
  Does nothing if this Python has the compiler.
  """
  chip = parse_topology(topology).chip
  if not dry_run:
    raise UserError('--topology: needs --dry_run, because it only compiles')
  jax.config.update('jax_platforms', 'cpu')
  if has_compiler(chip):
    return
  prefix = pathlib.Path(sys.prefix).resolve()
  # Look in the directory that contains this process's environment, and in the current directory.
  environments = [folder / AOT_ENVIRONMENT for folder in (prefix.parent, pathlib.Path.cwd())]
  pythons = [env / 'bin' / 'python' for env in environments if env.resolve() != prefix]
  python = next((path for path in pythons if path.exists()), None)
  if python is None:
    raise UserError(
      f'--topology={topology}: needs the compilers of {AOT_ENVIRONMENT}, which does not exist; '
      'create it with '
      "'jaxrl install --environment=aot'"
    )
  # By default, libtpu queries the machine's position in a TPU slice, and lets only one process use
  # it at a time. These variables turn off both.
  libtpu = {
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': 'true',
  }
  os.execve(
    python, [str(python), *sys.orig_argv[1:]], {**os.environ, **libtpu, 'JAX_PLATFORMS': 'cpu'}
  )


def _join(config: Config) -> Membership | None:
  """Joins the job of several processes that flags, environment variables or the cluster system
  describe. Returns None if there is no such job.
  """
  facts = dict(
    coordinator=FLAGS.coordinator, processes=FLAGS.num_processes, process=FLAGS.process_id
  )
  job = this_job(**facts)
  if job is not None:
    return join(job, config.coordination)
  if reason := unjoined(os.environ):
    logging.warning('%s', reason)
  return None


def _fail(error: UserError, *, as_json: bool = False) -> int:
  kind = 'run stopped' if isinstance(error, RunError) else 'error'
  sys.stderr.write(f'{kind}: {error}\n')
  if as_json:
    script.print_json({'error': str(error)})
  if jax.distributed.is_initialized():
    script.leave_at_once(error.exit_code)
  return error.exit_code
