"""Output of `--check`, `--dry_run` and `--list`: what can be known before the first step."""

from __future__ import annotations

import pathlib
import sys

from rich.console import Console

from jaxrl_llm.app.composition.scorers import SCORERS
from jaxrl_llm.app.composition.workdir import check_configuration
from jaxrl_llm.app.dry_run.compiled import Compilation, compile_program, held_table
from jaxrl_llm.app.dry_run.plan import Plan, plan, resolved
from jaxrl_llm.app.dry_run.programs import Program, stage_programs
from jaxrl_llm.app.schema import Config
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.script import print_json
from jaxrl_llm.learner.catalogue import ALGORITHMS
from jaxrl_llm.master.exploring.processors import PROCESSORS as EXPERIENCE_PROCESSORS
from jaxrl_llm.models.families import FAMILIES
from jaxrl_llm.objectives.surrogates import SURROGATES
from jaxrl_llm.rollout.catalogue import ENGINES
from jaxrl_llm.tasks.processors import PROCESSORS
from jaxrl_llm.tasks.sources import SOURCES


def print_list() -> None:
  """Prints everything that a configuration can refer to by name, one item per line."""
  console = Console(markup=False, highlight=False, soft_wrap=True)

  def first(value):
    return ' '.join((value.__doc__ or '').partition('\n\n')[0].split())

  lines = [('family', name, family.description) for name, family in FAMILIES.items()]
  lines += [('algorithm', name, first(options)) for name, (options, _) in ALGORITHMS.items()]
  lines += [('surrogate', name, first(loss)) for name, (_, loss) in SURROGATES.items()]
  lines += [('engine', name, first(make)) for name, (_, make) in ENGINES.items()]
  lines += [('tasks', name, description) for name, description in SOURCES.items()]
  lines += [('of tasks', name, first(options)) for name, (options, _) in PROCESSORS.items()]
  lines += [('of groups', name, first(make)) for name, (_, make) in EXPERIENCE_PROCESSORS.items()]
  lines += [('scorer', name, first(make)) for name, make in SCORERS.items()]
  for kind, name, description in lines:
    console.print(f'{kind:10} {name:40} {description}')


def print_check(config: Config, workdir: pathlib.Path, *, as_json: bool = False) -> None:
  """Validates a configuration and prints it with its derived numbers, without compiling; see
  `print_plan`.

  Raises:
    UserError: the configuration, its data or an existing run directory cannot be used.
  """
  console = _console(as_json)
  checked = plan(config, workdir, console.print)
  check_configuration(workdir, checked.config)
  if as_json:
    print_json(checked.to_json())
  else:
    _print(checked, console)
    console.print(f'{config.name}: valid; --dry_run also compiles, --doctor also tries it')


def print_plan(
  config: Config, workdir: pathlib.Path, topology: str | None = None, *, as_json: bool = False
) -> int:
  """Prints the resolved configuration, derived numbers, parameters, memory by role and compiled
  programs; returns the exit code.

  Trains nothing and writes nothing to the run directory.

  Args:
    topology: target devices of the compilation ('v5e:4x4'), which may be absent; None: the devices
      of this process.
    as_json: whether to print one JSON document instead of text.

  Raises:
    UserError: the configuration or its data cannot be used; or, without `as_json`, a program does
      not fit the topology's devices, after all programs have been printed.
  """
  console = Console(markup=False, highlight=False, soft_wrap=True)
  devices = jax.devices() if topology is None else topology_devices(topology)
  mesh = build_mesh(config.learner.mesh, devices)
  load = taskset_loader(config.tasksets)
  config = settle(config, workdir if has_commits(workdir) else None, console.print, load)
  console.print_json(json.dumps(to_json(config)))
  build_scorers(config.rewards)
  with tempfile.TemporaryDirectory() as scratch:
    prepared = prepare(config, pathlib.Path(scratch), load)
  stages = build_stages(config, mesh, prepared.spec.vocab_size, prepared.lengths)
  chip = None if topology is None else parse_topology(topology).chip
  model = build_model(model_spec(config, prepared.spec), _options(config, chip), mesh)
  critic = critic_model(model)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  trained, _ = lora.split(shapes, model.spec, model.options)

  def count(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))

  adapters = f', of which {count(trained):,} are trained' if config.policy.lora is not None else ''
  console.print(f'run directory: {workdir}')
  console.print(
    f'policy: {prepared.spec.family}, {count(shapes):,} parameters{adapters}, vocabulary '
    f'{prepared.spec.vocab_size}'
  )
  time = stages[0].shape.chunk_len
  attention = chosen(model.options, mesh, time=time, keys=time, same_tokens=True)
  console.print(f'attention in training: {attention.implementation} ({attention.reason})')
  for taskset in prepared.tasksets.values():
    console.print(f'taskset {taskset.name}: {dict(taskset.counts)}')
  for stage in stages:
    console.print(
      f'stage {stage.name}: steps {stage.start}–{stage.end}, {stage.updates} updates, '
      f'{_sequences(config, stage)} sequences a batch, arrays {_arrays(stage)} planned on '
      f'{_known(prepared.lengths.get(stage.name))}, logits for {stage.token_chunk} of '
      f'{stage.shape.chunk_len} tokens at a time'
    )
  engine, setting = config.rollout.engine_spec(), engine_setting(config, workdir, prepared)
  if topology is None:
    for name, command in engine.commands(setting).items():
      console.print(f'engine {name}: {command}')
  console.print(held_table(mesh, held(stages, model, critic, mesh)))
  refused = []

  def report(name: str, compiled: Compilation) -> None:
    console.print(f'{name}: {compiled.line}')
    programs.append({'name': name, **compiled.to_json()})
    refused.extend([] if compiled.fits else [name])

  for stage in planned.stages:
    for program in stage_programs(stage, planned.model, planned.critic, planned.mesh):
      report(
        f'{program.name} of {stage.name}', compile_program(program, planned.mesh, planned.chip)
      )
  device = planned.mesh.devices.flat[0]
  engine = planned.config.rollout.engine_spec()
  for name, lowered in engine.programs(planned.setting, device) if config.generates else ():
    of_engine = Program(name, lambda lowered=lowered: lowered, 0)
    report(f'{name}, on one device', compile_program(of_engine, planned.mesh, planned.chip))
  error = ''
  if refused:
    error = (
      f'topology {topology}: {", ".join(refused)}: more memory than a device has (above, by how '
      'much); use more devices, policy.remat, policy.dtype=bfloat16, fewer '
      'learner.chunks_per_rank, or another engine'
    )
  if error and not as_json:
    raise UserError(error)
  if as_json:
    # One document, with the error in it.
    print_json({**planned.to_json(), 'programs': programs, **({'error': error} if error else {})})
  if error:
    sys.stderr.write(f'error: {error}\n')
  return UserError.exit_code if error else 0


def _console(as_json: bool) -> Console:
  """Returns the console for text: standard error if standard output holds a JSON document."""
  file = sys.stderr if as_json else None
  return Console(file=file, markup=False, highlight=False, soft_wrap=True)


def _print(planned: Plan, console: Console) -> None:
  console.print_json(resolved(planned.config))
  for line in planned.lines():
    console.print(line)
  console.print(held_table(planned.mesh, planned.held))
