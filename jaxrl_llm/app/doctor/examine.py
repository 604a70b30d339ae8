"""The doctor: examines environment, data, scorers and a few batches of a run before it starts.

Invariant: the doctor only reads the run directory. The run's components write to a temporary
directory, which is removed at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping

import jax
import psutil
from absl import logging

from jaxrl_llm.app.composition.automatic import with_sized
from jaxrl_llm.app.composition.chosen import settle
from jaxrl_llm.app.composition.prepare import (
  check_names,
  load_all_examples,
  load_all_preferences,
  load_tokenizer,
)
from jaxrl_llm.app.composition.resources import Resources, open_resources
from jaxrl_llm.app.composition.reward_role import build_reward_model
from jaxrl_llm.app.composition.scorers import build_scorers
from jaxrl_llm.app.composition.state import (
  committed_state,
  critic_model,
  reward_params,
  untrained_reward_params,
)
from jaxrl_llm.app.composition.workdir import check_configuration, has_commits, is_live
from jaxrl_llm.app.doctor import data as texts
from jaxrl_llm.app.doctor import environment
from jaxrl_llm.app.doctor.batches import StageTrials, duration, memory
from jaxrl_llm.app.doctor.data import Data
from jaxrl_llm.app.doctor.findings import Findings, failure, ok, warning
from jaxrl_llm.app.doctor.scorers import truths
from jaxrl_llm.app.dry_run.programs import held
from jaxrl_llm.app.offline.reopen import Reopened, reopen, with_local_explorers
from jaxrl_llm.app.planning import check_kernel
from jaxrl_llm.app.schema import Config, scored_tasksets
from jaxrl_llm.core import disk
from jaxrl_llm.core.errors import RunError, UserError, first_cause, one_line
from jaxrl_llm.core.types import Params
from jaxrl_llm.master.loop import LoopState
from jaxrl_llm.runtime.log.config import LoggingConfig
from jaxrl_llm.tasks.taskset import Taskset, taskset_loader

_SPARE = 0.95
"""Share of a device's memory above which parameters, gradients and optimizers together are reported
as too large.
"""


_EXPLAINS = ('preferences', 'examples', 'tokenizer', 'template', 'lengths', 'leakage')
"""Checks that may explain why a run cannot be opened. If one of them has failed, no further failure
is reported when the run cannot be opened.
"""
_DECISIVE = ('template', 'vllm', 'shared_memory', 'sharing', 'memory', 'disk', 'servers', 'engine')
"""Checks that must pass before the doctor tries batches. If one of them fails, trying batches would
be impossible or pointless, and none is run.
"""


async def examine(config: Config, workdir: pathlib.Path, findings: Findings) -> None:
  """Examines the run of `config` in `workdir` and adds the result of each check to `findings`.

  An error that the run itself would raise becomes a failure among the findings.
  """
  load = taskset_loader(config.tasksets)
  with disk.scratch('jaxrl_llm-doctor-') as scratch:
    config = await asyncio.to_thread(_settled, config, workdir, load, findings)
    if config is None:
      return
    data = await asyncio.to_thread(_data, config, load, scratch, findings)
    if data is not None:
      await asyncio.to_thread(_texts, data, findings)
    same = False
    with findings.guarding('run_directory'):
      same = await asyncio.to_thread(check_configuration, workdir, config) is not None
    await asyncio.to_thread(_services, config, workdir, findings)
    with findings.guarding('configuration'):
      # The run directory's tokenizer is used if the directory belongs to this configuration.
      run = workdir if same else scratch / 'none'
      await _opened(with_local_explorers(config), run, load, data, workdir, findings)


def _settled(
  config: Config,
  workdir: pathlib.Path,
  load: Callable[[str], Taskset],
  findings: Findings,
) -> Config | None:
  """Loads the tasks and returns the configuration after choosing values for the scorer options that
  it leaves open.

  If that fails, adds a failure to the findings and returns None.
  """
  try:
    check_names(config, {taskset.name: load(taskset.name) for taskset in config.tasksets})
    resumed = has_commits(workdir)
    config = settle(config, workdir if resumed else None, logging.info, load)
    if resumed:
      check_kernel(config)
    config = with_sized(config, platform=jax.devices()[0].platform, spec=None)
    config.logging.check()
    build_scorers(config.rewards)
  except UserError as error:
    result, _, remedy = str(error).rpartition('; ')
    findings.add(failure('configuration', result or remedy, remedy if result else 'correct it'))
    return None
  return config


def _data(
  config: Config, load: Callable[[str], Taskset], scratch: pathlib.Path, findings: Findings
) -> Data | None:
  tasksets = {taskset.name: load(taskset.name) for taskset in config.tasksets}
  preferences = examples = None
  with findings.guarding('preferences'):
    preferences = load_all_preferences(config, tasksets)
  with findings.guarding('examples'):
    examples = load_all_examples(config)
  if preferences is None or examples is None:
    return None
  with findings.guarding('tokenizer'):
    tokenizer = load_tokenizer(config, tasksets, preferences, examples, scratch)
    result = f'{tokenizer.vocab_size:,} tokens'
    findings.add(ok('tokenizer', result, vocab_size=tokenizer.vocab_size))
    return Data(
      config=config,
      tasksets=tasksets,
      preferences=preferences,
      examples=examples,
      tokenizer=tokenizer,
    )
  return None


def _texts(data: Data, findings: Findings) -> None:
  for check in (texts.ends, texts.template, texts.lengths, texts.examples, texts.duplicates):
    with findings.guarding(check.__name__):
      findings.add(*check(data))


async def _opened(
  config: Config,
  run: pathlib.Path,
  load: Callable[[str], Taskset],
  data: Data | None,
  workdir: pathlib.Path,
  findings: Findings,
) -> None:
  """Opens the run as `jaxrl train` would, checks the machine, and tries a few batches.

  Args:
    run: directory from which the run is opened: the run directory if it belongs to the same
      configuration, otherwise one that does not exist.
    workdir: run directory.
  """
  async with contextlib.AsyncExitStack() as opened:
    try:
      past = await opened.enter_async_context(reopen(config, run, load))
      reward_model = build_reward_model(config, past.process.mesh, past.model)
      past = dataclasses.replace(past, reward_model=reward_model)
    except UserError as error:
      if data is not None:
        findings.add(*texts.leakage(data))
      if not findings.failed(*_EXPLAINS):
        result, _, remedy = str(error).rpartition('; ')
        findings.add(failure('configuration', result or remedy, remedy if result else 'correct it'))
      _cut_short(findings)
      return
    tasksets = past.prepared.tasksets
    kept = dataclasses.replace(data, config=config, tasksets=tasksets)
    findings.add(*await asyncio.to_thread(lambda: [*texts.leakage(kept)]))
    await asyncio.to_thread(_machine, past, workdir, findings)
    if findings.failed(*_DECISIVE):
      _cut_short(findings)
      return
    state = await _weights(past, findings)
    if state is not None:
      await _tried(past, kept, state, findings)


def _services(config: Config, workdir: pathlib.Path, findings: Findings) -> None:
  """Checks the environment of the run's other processes: servers, scorer workers and explorers."""
  findings.add(
    *environment.servers(config),
    *environment.sharing(config, jax.local_devices()),
    *environment.descriptors(config),
    *environment.cores(config),
  )
  with findings.guarding('engine'):
    if config.rollout.engine_spec().addresses and is_live(workdir):
      findings.add(
        failure(
          'servers',
          f'the attached servers serve the live run in {workdir}, and would get other weights',
          'wait for the run, or name other servers or another --workdir',
        )
      )
  if with_local_explorers(config) != config:
    findings.add(
      warning(
        'explorers',
        'explorers of other machines are left out',
        'nothing needs to be done if they use the same version and configuration',
      )
    )


def _machine(past: Reopened, workdir: pathlib.Path, findings: Findings) -> None:
  config, model = past.config, past.model
  parameters = sum(leaf.size for leaf in jax.tree.leaves(model.shapes()))
  mesh = past.process.mesh
  roles = held(past.stages, model, critic_model(model), mesh, past.reward_model)
  findings.add(
    *environment.accelerators(config, parameters),
    *environment.shared_memory(config, past.prepared.spec),
    *environment.disk(config, workdir, roles),
  )
  stats = jax.local_devices()[0].memory_stats() or {}
  limit = stats.get('bytes_limit')
  needed = sum(role.per_device for role in roles)
  where = 'a device'
  if limit is None:
    # Devices that report no limit are CPU devices, and all of them share the machine's memory.
    limit, where = psutil.virtual_memory().available, 'the machine'
    needed *= len(jax.local_devices())
  if needed > _SPARE * limit:
    findings.add(
      failure(
        'memory',
        f'parameters, gradients and optimizers take {needed / 1e9:,.1f} GB, {where} has '
        f'{limit / 1e9:,.1f} GB',
        'use more devices (learner.mesh.fsdp), optimizer.offload, or a smaller model',
        needed_bytes=needed,
        limit_bytes=limit,
      )
    )


async def _weights(past: Reopened, findings: Findings) -> LoopState | None:
  """Loads the initial weights and checks that they are finite.

  If they cannot be used, adds a failure to the findings and returns None.
  """
  with findings.guarding('weights'):
    state, _ = await past.process.device.run(committed_state, past, 0)
    learned = state.learned
    if past.reward_model is not None:
      reading = (
        functools.partial(reward_params, past)
        if past.reward_model.files is not None
        # The doctor has no weights of the stage that trains the model.
        else functools.partial(untrained_reward_params, past, learned.policy.params)
      )
      params = await past.process.device.run(reading)
      state = dataclasses.replace(state, learned=learned._replace(reward_model=params))
    bad = await past.process.device.run(_not_finite, learned.whole(learned.policy.params))
    if not bad:
      findings.add(ok('weights', past.config.policy.init_from or 'random'))
      return state
    findings.add(
      failure(
        'weights',
        f'{len(bad)} parameters have values that are not finite, such as {next(iter(bad))}',
        'fetch the checkpoint again, or use policy.param_dtype=float32',
        parameters=bad,
      )
    )
  _cut_short(findings)
  return None


def _not_finite(params: Params) -> Mapping[str, int]:
  """Returns the number of non-finite values of each parameter that has any, keyed by parameter."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(params)
  counts = {
    jax.tree_util.keystr(path, simple=True, separator='/'): int((~jax.numpy.isfinite(leaf)).sum())
    for path, leaf in leaves
  }
  return {name: count for name, count in counts.items() if count}


async def _tried(past: Reopened, data: Data, state: LoopState, findings: Findings) -> None:
  """Starts the run's scorers, workflow and engine, and tries a few batches of each stage."""
  # Turn off all log writers, because the batches of the doctor are not part of the run.
  config = dataclasses.replace(past.config, logging=LoggingConfig(tensorboard=False))
  resources = open_resources(dataclasses.replace(past, config=config), past.prepared, None)
  try:
    async with asyncio.TaskGroup() as starts:
      starts.create_task(_scorers(past, data, resources, findings))
      starts.create_task(_engine(resources, findings))
    if findings.failed('engine', 'scorers_start'):
      _cut_short(findings)
      return
    trials = StageTrials(past, resources)
    try:
      async with contextlib.aclosing(trials.findings(state)) as shown:
        async for finding in shown:
          findings.add(finding)
    except Exception as error:  # Any error that ends these batches would also end the run.
      cause = first_cause(error)
      if not isinstance(cause, UserError):
        logging.exception('doctor: a batch failed')
      result, _, remedy = one_line(cause, 1000).rpartition('; ')
      name = '' if isinstance(cause, RunError) else f'{type(cause).__name__}: '
      findings.add(
        failure('batch', f'{name}{result or remedy}', remedy if result else 'see the log above')
      )
    if trials.trials:
      used = trials.memory
      findings.add(*memory(used, await trials.compilations()))
      findings.add(*duration(past, trials.trials, trials.suites_s))
  finally:
    await resources.close()


async def _scorers(past: Reopened, data: Data, resources: Resources, findings: Findings) -> None:
  with findings.guarding('scorers_start'):
    await resources.scorers.start()
    if scored_tasksets(past.config):
      tasks = {name: taskset.tasks for name, taskset in data.tasksets.items()}
      async with contextlib.aclosing(truths(data, tasks, resources.scorers)) as shown:
        async for finding in shown:
          findings.add(finding)


async def _engine(resources: Resources, findings: Findings) -> None:
  if resources.engine is None:
    return
  with findings.guarding('engine'):
    await resources.rollouts.start()
    await resources.engine.start()
    findings.add(ok('engine', f'{resources.engine.name} has started'))


def _cut_short(findings: Findings) -> None:
  findings.add(
    warning(
      'batches', 'no batch was tried', 'correct the failures above, and start the doctor again'
    )
  )
