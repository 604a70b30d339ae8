"""Output of `--dry_run` and `--list`: what can be known before the first step."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import statistics
import tempfile
from collections.abc import Sequence

import jax
from rich.console import Console

from jaxrl_llm.app.composition.chosen import settle
from jaxrl_llm.app.composition.engines import engine_setting
from jaxrl_llm.app.composition.prepare import prepare
from jaxrl_llm.app.composition.scorers import SCORERS, build_scorers
from jaxrl_llm.app.composition.stages import build_stages, model_spec, policy_options
from jaxrl_llm.app.composition.state import critic_model
from jaxrl_llm.app.composition.workdir import has_commits
from jaxrl_llm.app.dry_run.compiled import compiled_line, held_table
from jaxrl_llm.app.dry_run.programs import Program, held, stage_programs
from jaxrl_llm.app.schema import Config, Rollouts
from jaxrl_llm.config.values import to_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.learner.catalogue import ALGORITHMS
from jaxrl_llm.master.exploring.processors import PROCESSORS as EXPERIENCE_PROCESSORS
from jaxrl_llm.master.trainer import Stage
from jaxrl_llm.models import lora
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.attention import chosen
from jaxrl_llm.models.families import FAMILIES
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.objectives.surrogates import SURROGATES
from jaxrl_llm.parallel.mesh import build_mesh
from jaxrl_llm.parallel.topology import CHIPS, parse_topology, topology_devices
from jaxrl_llm.rollout.catalogue import ENGINES
from jaxrl_llm.tasks.processors import PROCESSORS
from jaxrl_llm.tasks.sources import SOURCES
from jaxrl_llm.tasks.taskset import taskset_loader


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


def print_plan(config: Config, workdir: pathlib.Path, topology: str | None = None) -> None:
  """Prints the resolved configuration, derived numbers, parameters, memory by role and programs.

  Trains nothing and writes nothing to the run directory.

  Args:
    topology: target devices of the compilation ('v5e:4x4'), which may be absent; None: the devices
      of this process.

  Raises:
    UserError: a program does not fit the topology's devices; raised after all programs have been
      printed.
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
  chip = None if topology is None else parse_topology(topology)[0]
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
  for stage in stages:
    for program in stage_programs(stage, model, critic, mesh):
      line, fits = compiled_line(program, mesh, chip)
      console.print(f'{program.name} of {stage.name}: {line}')
      refused += [] if fits else [f'{program.name} of {stage.name}']
  for name, lowered in engine.programs(setting, devices[0]) if config.generates else ():
    line, fits = compiled_line(Program(name, lambda lowered=lowered: lowered, 0), mesh, chip)
    console.print(f'{name}, on one device: {line}')
    refused += [] if fits else [name]
  if refused:
    raise UserError(
      f'topology {topology}: {", ".join(refused)}: more memory than a device has (above, by how '
      'much); use more devices, policy.remat, policy.dtype=bfloat16, fewer '
      'learner.chunks_per_rank, or another engine'
    )


def _options(config: Config, chip: str | None) -> ModelOptions:
  """Returns the training options, without fused GPU attention, which compiles only on a GPU."""
  options = policy_options(config)
  absent = chip is not None and CHIPS[chip].platform == 'cuda'
  return (
    dataclasses.replace(options, attention='blockwise')
    if absent and options.attention == 'auto'
    else options
  )


def _sequences(config: Config, stage: Stage) -> str:
  source = next(s for s in config.stages if s.name == stage.name).source
  if not isinstance(source, Rollouts):
    return str(source.sequences)
  usual = source.groups_per_batch * source.selection.most(source.group_size)
  experts = f' + {source.expert_rows} of experts' if source.experts is not None else ''
  most = '' if source.selection.kind == 'all' else f', of which at most {usual} are learned from,'
  samples = source.groups_per_batch * source.group_size
  return f'{source.groups_per_batch} tasks × {source.group_size} = {samples}{most}{experts}'


def _known(lengths: Sequence[int] | None) -> str:
  if not lengths:
    return 'the longest'
  return (
    f'{len(lengths):,} lengths (median {statistics.median(lengths):.0f}, at most {max(lengths)})'
  )


def _arrays(stage: Stage) -> str:
  shape = stage.shape
  return (
    f'[≤{shape.micro_batches} micro-batches, {shape.ranks} ranks × {shape.chunks} chunks, '
    f'{shape.chunk_len} tokens]'
  )
