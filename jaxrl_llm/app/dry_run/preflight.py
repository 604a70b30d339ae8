"""Prints the output of `--list`, and of `--check` and `--dry_run`, which describe a run before its
first step.
"""

from __future__ import annotations

import pathlib
import sys

from rich.console import Console

from jaxrl_llm.app.composition.branch import Branch, find_origin
from jaxrl_llm.app.composition.scorers import SCORERS
from jaxrl_llm.app.composition.workdir import check_configuration
from jaxrl_llm.app.dry_run.compiled import Compilation, compile_program, held_table
from jaxrl_llm.app.dry_run.phases import phases_table
from jaxrl_llm.app.dry_run.plan import (
  RunPlan,
  plan,
  resolved,
  with_memory_plan,
  with_proven_attention,
)
from jaxrl_llm.app.dry_run.programs import (
  Program,
  publishing_program,
  scoring_program,
  stage_programs,
)
from jaxrl_llm.app.schema import Config
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.script import print_json
from jaxrl_llm.core.types import Json
from jaxrl_llm.learner.catalogue import ALGORITHMS
from jaxrl_llm.master.exploring.processors import PROCESSORS as EXPERIENCE_PROCESSORS
from jaxrl_llm.models.families import FAMILIES
from jaxrl_llm.objectives.surrogates import SURROGATES
from jaxrl_llm.parallel.mesh import leading_devices
from jaxrl_llm.rollout.catalogue import ENGINES
from jaxrl_llm.tasks.processors import PROCESSORS
from jaxrl_llm.tasks.sources import SOURCES


def print_list() -> None:
  """Prints the shipped parts that a configuration can name, such as algorithms and scorers, one per
  line.
  """
  console = Console(markup=False, highlight=False, soft_wrap=True)

  def first(value):
    return ' '.join((value.__doc__ or '').partition('\n\n')[0].split())

  lines = [('family', name, family.description) for name, family in FAMILIES.items()]
  lines += [('algorithm', name, first(options)) for name, (options, _) in ALGORITHMS.items()]
  lines += [('surrogate', name, first(loss)) for name, (_, loss) in SURROGATES.items()]
  lines += [('engine', name, first(make)) for name, (_, make) in ENGINES.items()]
  lines += [('task source', name, description) for name, description in SOURCES.items()]
  lines += [('task processor', name, first(options)) for name, (options, _) in PROCESSORS.items()]
  lines += [('processor', name, first(make)) for name, (_, make) in EXPERIENCE_PROCESSORS.items()]
  lines += [('scorer', name, first(make)) for name, make in SCORERS.items()]
  for kind, name, description in lines:
    console.print(f'{kind:14} {name:40} {description}')


def print_check(
  config: Config, workdir: pathlib.Path, branch: Branch | None = None, *, as_json: bool = False
) -> None:
  """Validates a configuration and prints it with its derived numbers, without compiling; see
  `print_plan`.

  Args:
    branch: commit of another run from which the run would start.

  Raises:
    UserError: the configuration, its data or an existing run directory cannot be used.
  """
  console = _console(as_json)
  resumed = branch is None or branch.made(workdir)
  scored_as = None if resumed else branch.scored_as
  checked = plan(config, workdir, console.print, scored_as=scored_as)
  if resumed:
    run, changes = workdir, check_configuration(workdir, checked.config) or ()
  else:
    run, changes = branch.run, find_origin(branch, checked.config).changes
  if as_json:
    print_json(checked.to_json() | {'changes': [list(change) for change in changes]})
  else:
    _print(checked, console)
    for change in changes:
      console.print(f'changes {run}: {change}')
    console.print(f'{config.name}: valid; --dry_run also compiles, --doctor also tries it')


def print_plan(
  config: Config, workdir: pathlib.Path, topology: str | None = None, *, as_json: bool = False
) -> int:
  """Prints the resolved configuration, derived numbers, parameters, memory by role and compiled
  programs; returns the exit code.

  Trains nothing and writes nothing to the run directory.

  Args:
    topology: target devices of the compilation, such as 'v5e:4x4', which may be absent; None for
      the devices of this process.
    as_json: whether to print one JSON document instead of text.

  Raises:
    UserError: the configuration or its data cannot be used; or, without `as_json`, a program does
      not fit the target devices. In the latter case, all programs are printed first.
  """
  console = _console(as_json)
  checked, attention = with_proven_attention(plan(config, workdir, console.print, topology))
  if attention:
    console.print(attention)
  planned, search, compiled = with_memory_plan(checked)
  if not as_json:
    _print(planned, console)
  for line in search.lines() if search else ():
    console.print(line)
  programs: list[Json] = []
  refused = []

  def report(name: str, compiled: Compilation) -> None:
    console.print(f'{name}: {compiled.line}')
    programs.append({'name': name, **compiled.to_json()})
    refused.extend([] if compiled.fits else [name])

  for stage in planned.stages:
    for program in stage_programs(stage, planned.model, planned.critic, planned.mesh):
      name = f'{program.name} of {stage.name}'
      report(name, compiled.get(name) or compile_program(program, planned.mesh, planned.chip))
  if planned.reward_model is not None:
    scoring = scoring_program(planned.reward_model, planned.mesh)
    report(scoring.name, compile_program(scoring, planned.mesh, planned.chip))
  if config.generates and topology is not None:
    publishing = publishing_program(planned.config, planned.model, planned.mesh)
    report(publishing.name, compile_program(publishing, planned.mesh, planned.chip))
  devices = leading_devices(planned.mesh)
  engine = planned.config.rollout.engine_spec()
  for name, lowered in engine.programs(planned.setting, devices) if config.generates else ():
    of_engine = Program(name, lambda lowered=lowered: lowered, 0)
    report(name, compile_program(of_engine, planned.mesh, planned.chip))
  error = ''
  if refused:
    error = (
      f'topology {topology}: {", ".join(refused)}: more memory than a device has (by the amounts '
      'above); use more devices, policy.remat, policy.dtype=bfloat16, fewer '
      'learner.chunks_per_rank, or another engine'
    )
  if error and not as_json:
    raise UserError(error)
  if as_json:
    # Print a single JSON document, which contains the error if there is one.
    plans = search.to_json() if search else None
    document = {**planned.to_json(), 'memory_plans': plans, 'programs': programs}
    print_json({**document, **({'error': error} if error else {})})
  if error:
    sys.stderr.write(f'error: {error}\n')
  return UserError.exit_code if error else 0


def _console(as_json: bool) -> Console:
  """Returns the console for text. It writes to standard error if standard output is for a JSON
  document.
  """
  file = sys.stderr if as_json else None
  return Console(file=file, markup=False, highlight=False, soft_wrap=True)


def _print(planned: RunPlan, console: Console) -> None:
  console.print_json(resolved(planned.config))
  for line in planned.lines():
    console.print(line)
  console.print(held_table(planned.mesh, planned.held))
  if (phases := planned.phases) is not None:
    console.print(phases_table(phases))
