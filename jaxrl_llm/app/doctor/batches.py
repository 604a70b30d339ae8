"""Runs a few batches of each stage with the run's own components, and reports findings about them.

The stages follow each other as in the run, but each lasts only a few steps. A later stage therefore
starts from a policy that has at least begun to learn. All files are written to a temporary
directory.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import math
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
import psutil

from jaxrl_llm.app.composition.loop_parts import build_publisher, stage_entrance
from jaxrl_llm.app.composition.resources import Resources
from jaxrl_llm.app.composition.setup import Setup
from jaxrl_llm.app.doctor.divergence import kl_gradient
from jaxrl_llm.app.doctor.findings import Finding, failure, ok, warning
from jaxrl_llm.app.dry_run.compiled import Compilation, compile_program
from jaxrl_llm.app.dry_run.programs import Program
from jaxrl_llm.app.offline.reopen import Reopened
from jaxrl_llm.app.schema import StageConfig
from jaxrl_llm.app.sources import Followed, Rollouts
from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.learner.algorithm import Constants
from jaxrl_llm.learner.state import TrainState, copy_params
from jaxrl_llm.master.batches import Planner
from jaxrl_llm.master.exploring.endings import NothingToLearn
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.master.keeper import write_step
from jaxrl_llm.master.loop import LoopState, pass_over, publish, score_rollouts, take_step
from jaxrl_llm.master.trainer import Batch, Stage, StageTrainer, Updated
from jaxrl_llm.rollout.publisher import Publisher

_MEASURED = (3, 40, 5.0)
"""Budget of a stage: minimum number of measured steps, maximum number, and a duration in seconds.

The doctor stops after the maximum number, or earlier, when at least the minimum number of steps has
been measured and these steps have taken this long in total.
"""
_PREPARING = (2, 120, 12.0)
"""Budget, in the form of `_MEASURED`, of a stage that trains on static data and precedes another
stage.

It allows more steps than `_MEASURED`, because steps on static data are cheap. The more the policy
has learned, the more the next stage's samples resemble the samples of the real run.
"""
_TASKS = 128
"""Maximum number of tasks of each suite that are evaluated."""
_SLOW_H = 24.0 * 7
"""Estimated duration of a run in hours above which the doctor warns."""
_SCARCE = 0.9
"""Share of groups without signal (with equal rewards) above which the doctor warns."""
_TRUNCATED = 0.5
"""Share of samples truncated at the length limit above which the doctor warns."""
_FULL = 0.9
"""Used share of the memory above which the doctor warns, because a longer batch may not fit."""


@dataclasses.dataclass(kw_only=True)
class StageTrial:
  """Measurements of the batches of one stage."""

  stage: Stage
  first: bool
  """Whether the stage starts from the same policy as in the run. That is so if all earlier stages
  ran in full.
  """
  seconds: list[float] = dataclasses.field(default_factory=list)
  """Duration in seconds of each measured step, like the run's metric `perf/time_per_step`. Steps
  that compile programs are not measured.
  """
  writing: list[float] = dataclasses.field(default_factory=list)
  """Seconds for writing metrics and rollouts after each measured step."""
  rows: list[dict[str, float]] = dataclasses.field(default_factory=list)
  """Metrics of each step, as the run would write them."""
  exceeded: dict[str, str] = dataclasses.field(default_factory=dict)
  """Messages about exceeded limits in `rollout.mismatch`, which bound the differences between the
  trainer's and the sampler's logprobs. They are keyed by limit.
  """
  samples: list[Experience] = dataclasses.field(default_factory=list)
  """Scored rollouts in the batches of all steps."""
  dropped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
  programs: tuple[tuple[str, Callable[[], jax.stages.Lowered]], ...] = ()
  """Pairs of the name of an update program and the function that lowers it for compilation."""
  constants: Constants = dataclasses.field(default_factory=dict)
  """Scalars that the loss reads, as the algorithm computed them for the last batch."""

  @property
  def step_s(self) -> float:
    """Median duration of the measured steps in seconds; NaN if there are none."""
    return statistics.median(self.seconds) if self.seconds else math.nan

  @property
  def writing_s(self) -> float:
    """Median time in seconds for writing metrics and rollouts after a measured step; NaN if there
    are none.
    """
    return statistics.median(self.writing) if self.writing else math.nan


class Memory(NamedTuple):
  """Memory in use while the batches ran, in bytes."""

  process: int
  """Largest resident memory of this process, as measured after each step."""
  devices: int | None
  """Largest peak memory of any device. None if the devices do not report their memory."""
  limit: int | None


class StageTrials:
  """Runs a few batches of each stage.

  `findings` runs the stages, and yields the findings of each stage as soon as the stage has ended.
  """

  def __init__(self, setup: Reopened, resources: Resources):
    self._setup, self._resources = setup, resources
    self._publisher: Publisher = build_publisher(setup, resources.engine)
    self._planner = Planner(
      seed=setup.config.seed,
      every_steps=1 << 62,
      every_minutes=math.inf,
      stop=asyncio.get_running_loop().create_future(),
    )
    reward_model = setup.reward_model
    tokenizer = setup.prepared.tokenizer
    self._reward_model = reward_model and reward_model.role(leads=True, policy=tokenizer)
    self._process_bytes = 0
    self._state: LoopState | None = None
    """Newest state of training. Earlier states are unusable, because their buffers were donated to
    the updates.
    """
    self.trials: list[StageTrial] = []
    self.suites_s: dict[str, float] = {}
    """Estimated seconds for evaluating all tasks of a suite, keyed by the suite's name."""

  async def findings(self, state: LoopState) -> AsyncIterator[Finding]:
    # There are no commits to start from, so every stage continues with the weights of the stage
    # before it.
    enter = stage_entrance(self._setup, from_commits=False)
    configs = self._setup.config.stages
    complete, self._state = True, state
    for stage, config in zip(self._setup.stages, configs, strict=True):
      if config.waits_for_rows:
        # The stage's rows exist only after all batches of earlier stages, but the doctor runs only
        # a few batches of a stage.
        yield ok(f'batches of {stage.name}', 'not tried: its rows come from earlier stages')
        complete = False
        continue
      if isinstance(config.source, Followed):
        yield ok(f'batches of {stage.name}', 'not tried: another run explores for it')
        complete = False
        continue
      trial = StageTrial(stage=stage, first=complete)
      last = stage is self._setup.stages[-1]
      budget = _MEASURED if last or stage.explores else _PREPARING
      error, policy = None, None
      if stage.algorithm.head != self._setup.model.spec.head:
        # The stage turns the policy's weights into a reward model. Keep a copy of the policy for
        # later stages.
        params = self._state.learned.policy.params
        policy = await self._setup.process.device.run(copy_params, params)
      try:
        begun = dataclasses.replace(self._state, step=stage.start)
        trainer, self._state = await enter(stage, begun)
        await self._run(trial, trainer, budget, unmeasured=_unmeasured(stage, config))
      except NothingToLearn as caught:
        error = caught
      self.trials.append(trial)
      for finding in _of_trial(trial, config, error):
        yield finding
      complete = complete and self._state.step >= stage.end
      if policy is not None:
        kept = TrainState(params=policy, opt_state=None, updates=None, skipped=None)
        learned = self._state.learned._replace(policy=kept)
        self._state = dataclasses.replace(self._state, learned=learned)
    for finding in await self._evaluation(self._state):
      yield finding

  async def _run(
    self,
    trial: StageTrial,
    trainer: StageTrainer,
    budget: tuple[int, int, float],
    *,
    unmeasured: int,
  ) -> None:
    """Runs steps of one stage, and measures all but the first ones.

    Args:
      budget: limits of the measured steps, see `_MEASURED`.
      unmeasured: number of steps before the measured ones.
    """
    stage, stopwatch = trial.stage, self._setup.process.stopwatch
    least, most, enough_s = budget
    warm_up = stage.algorithm.critic_warmup if stage.trains else 0
    done = 0
    async with self._resources.logs.batches[stage.name].running():
      while self._state.step < stage.end:
        measured = trial.seconds
        if len(measured) >= most or (len(measured) >= least and sum(measured) >= enough_s):
          break
        if warm_up and done == 1:
          self._state = dataclasses.replace(self._state, step=stage.start + warm_up)
        with stopwatch.timed('step'):
          batch, updated = await self._step(stage, trainer, done)
        took, began = stopwatch.take(), time.monotonic()
        await self._record(trial, batch, updated, took)
        if done >= unmeasured:
          measured.append(took['step'])
          trial.writing.append(time.monotonic() - began)
        elif stage.trains:
          trial.programs = tuple(trainer.programs(self._state.learned, batch))
        done += 1
        if not all(
          math.isfinite(trial.rows[-1].get(k, 0.0)) for k in ('actor/loss', 'actor/grad_norm')
        ):
          break

  async def _step(self, stage: Stage, trainer: StageTrainer, done: int) -> tuple[Batch, Updated]:
    """Runs one step as the run's loop does, without an evaluation or a commit.

    Args:
      done: number of steps of the stage that have been run here.
    """
    process, batches = self._setup.process, self._resources.logs.batches[stage.name]
    with process.stopwatch.timed('gen'):
      stale = done % stage.publish_every if stage.explores else 0
      if stage.explores and not stale:
        # Mark the weights as changed, so that they are published in full, as they usually are in
        # the run. Otherwise they would not be sent if updates without signal left them unchanged.
        moved = dataclasses.replace(self._state, moved=self._state.step)
        with process.stopwatch.timed('update_weights'):
          await publish(self._publisher, moved)
      batches.advance(self._state.step, done - stale)
      if stage.explores and self._reward_model is not None:
        self._state = await score_rollouts(
          process, self._reward_model, self._state, self._planner, batches
        )
      plan = await self._planner.close(stage, self._state.step, batches)
    plan = dataclasses.replace(plan, evaluate=False, commit=False, held_out=())
    if stage.trains:
      self._state, batch, updated = await take_step(process, trainer, self._state, plan)
    else:
      self._state, batch, updated = pass_over(self._state, plan)
    return batch, updated

  async def _record(
    self, trial: StageTrial, batch: Batch, updated: Updated, seconds: Mapping[str, float]
  ) -> None:
    """Writes a step's metrics and rollouts as the run would, and stores them in `trial`."""
    logs = self._resources.logs
    taken = logs.batches[trial.stage.name].taken()
    trial.samples += {member.sample.uid: member for member in taken.values()}.values()
    row, exceeded = await write_step(
      logs, trial.stage, self._state.step, batch, updated, seconds, {}
    )
    # In the written row, None represents a value that is not finite.
    trial.rows.append({key: math.nan if value is None else value for key, value in row.items()})
    trial.exceeded |= exceeded
    trial.dropped.update({k: n for k, n in batch.plan.counts.items() if k.startswith('dropped/')})
    trial.constants = batch.annotation.constants
    self._process_bytes = max(self._process_bytes, psutil.Process().memory_info().rss)

  async def compilations(self) -> dict[str, Compilation]:
    """Compiles the update programs again and returns their statistics, keyed by program.

    The programs come from the compilation cache. Read the property `memory` before calling this
    method: the method itself uses memory that the run would not use.
    """
    device, mesh = self._setup.process.device, self._setup.process.mesh
    return {
      f'{name} of {trial.stage.name}': await device.run(
        compile_program, Program(name, lower, 0), mesh, None
      )
      for trial in self.trials
      for name, lower in trial.programs
    }

  async def _evaluation(self, state: LoopState) -> list[Finding]:
    """Evaluates a part of each suite and estimates how long the whole suite would take."""
    findings, logs = [], self._resources.logs
    if not logs.suites:
      return []
    await publish(self._publisher, state)
    for suite, tasks in logs.suites:
      tried, began = tasks[:_TASKS], time.monotonic()
      metrics, _ = await logs.evaluator.run(suite, tried)
      seconds = (time.monotonic() - began) * len(tasks) / len(tried)
      self.suites_s[suite.name] = seconds
      unscorable = metrics[f'val-aux/{suite.taskset}/unscorable']
      attempts = len(tried) * (1 + suite.samples)
      check = f'evaluation {suite.name}'
      detail = dict(
        suite=suite.name, tasks=len(tasks), seconds=seconds, unscorable=unscorable / attempts
      )
      if unscorable:
        findings.append(
          (failure if unscorable == attempts else warning)(
            check,
            f'{unscorable / attempts:.0%} of the completions cannot be scored',
            'look at the scorers and at the truths of its tasks (jaxrl score)',
            **detail,
          )
        )
      else:
        result = f'{len(tried)} of {len(tasks)} tasks tried; the suite takes about {seconds:,.1f} s'
        findings.append(ok(check, result, **detail))
    return findings

  @property
  def memory(self) -> Memory:
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [stat.get('peak_bytes_in_use') for stat in stats]
    limits = [stat.get('bytes_limit') for stat in stats]
    return Memory(
      self._process_bytes,
      None if None in peaks else max(peaks),
      None if None in limits else min(limits),
    )


def _unmeasured(stage: Stage, config: StageConfig) -> int:
  """Returns the number of steps at the beginning of a stage whose durations are not typical.

  The first step compiles programs. During a critic's warm-up, only the critic is updated; the first
  step after the warm-up compiles again. While programs compile, rollouts are generated for as many
  later batches as `Rollouts.bound` permits. The steps on these batches do not wait for rollouts.
  """
  warms_up = stage.trains and stage.algorithm.critic_warmup > 0
  ahead = config.source.bound if isinstance(config.source, Rollouts) else 0
  return 1 + warms_up + ahead


def _of_trial(trial: StageTrial, config: StageConfig, error: UserError | None) -> Iterator[Finding]:
  stage = trial.stage
  if error is not None:
    result, _, remedy = one_line(error, 1000).rpartition('; ')
    result += '' if trial.first else ', after stages that were cut short here'
    yield (failure if trial.first else warning)(
      f'signal {stage.name}', result, remedy, stage=stage.name
    )
  if not trial.rows:
    return
  if trial.samples and error is None:
    yield from _signal(trial, config)
  if trial.samples:
    yield from _samples(trial)
  yield from _mismatch(trial)
  if stage.trains:
    yield from _gradients(trial)
    if config.source.unit == 1:
      yield from kl_gradient(stage.name, stage.algorithm, trial.constants)
  if trial.seconds:
    yield ok(
      f'step_time {stage.name}',
      f'{trial.step_s:,.3g} s per step, the median of {len(trial.seconds)}, and '
      f'{trial.writing_s:,.2g} s between two steps',
      stage=stage.name,
      seconds=trial.step_s,
      writing_seconds=trial.writing_s,
      steps=len(trial.seconds),
    )


def _signal(trial: StageTrial, config: StageConfig) -> Iterator[Finding]:
  """Yields a finding on the share of groups whose rewards are all equal.

  From such groups, the policy learns nothing. If each group has only one sample, the rewards of all
  samples are compared with each other instead.
  """
  stage, source = trial.stage, config.source
  groups: dict[str, list[float]] = {}
  single = isinstance(source, Rollouts) and source.group_size == 1
  for member in trial.samples:
    if member.reward.total is not None:
      key = '' if single else member.sample.group_id
      groups.setdefault(key, []).append(member.reward.total)
  flat = sum(max(rewards) == min(rewards) for rewards in groups.values())
  kept, dropped = len(groups), trial.dropped['dropped/groups']
  if not kept:
    return
  share = (flat + dropped) / (kept + dropped)
  rewards = [reward for group in groups.values() for reward in group]
  detail = dict(
    stage=stage.name,
    groups=kept + dropped,
    without_signal=share,
    mean_reward=float(np.mean(rewards)),
  )
  check, what = f'signal {stage.name}', 'batch' if single else 'groups'
  result = (
    f'{share:.0%} of {kept + dropped} {what} have equal rewards (mean reward '
    f'{np.mean(rewards):.3g})'
  )
  remedy = (
    'train on demonstrations first, take easier or harder tasks (jaxrl curate), a larger '
    'group_size, or a reward with partial credit'
  )
  if share == 1.0 and trial.first and not (isinstance(source, Rollouts) and source.experts):
    yield failure(check, result, remedy, **detail)
  elif share > _SCARCE and not trial.first:
    yield ok(check, f'{result}; not judged, since the stages before it were cut short', **detail)
  elif share > _SCARCE:
    yield warning(check, result, remedy, **detail)
  else:
    yield ok(check, result, **detail)


def _samples(trial: StageTrial) -> Iterator[Finding]:
  """Yields findings on the shares of samples that are truncated or cannot be scored."""
  stage = trial.stage.name
  samples = trial.samples
  truncated = sum(sample.finish_reason.is_truncated for sample in samples) / len(samples)
  lengths = [sample.response_len for sample in samples]
  detail = dict(
    stage=stage,
    samples=len(samples),
    truncated=truncated,
    mean_response_tokens=float(np.mean(lengths)),
  )
  result = f'{truncated:.0%} of {len(samples)} samples reach the length limit'
  if truncated > _TRUNCATED:
    yield warning(
      f'truncated {stage}',
      result,
      'raise rollout.max_response_length, or check that the policy ends its answers (eos)',
      **detail,
    )
  else:
    yield ok(f'truncated {stage}', result, **detail)
  lost = trial.dropped['dropped/unscorable'] + trial.dropped['dropped/scorer_failed']
  inside = sum(member.reward.value is None for member in trial.samples)
  share = (lost + inside) / (len(samples) + lost)
  result = f'{share:.0%} of {len(samples) + lost} samples cannot be scored'
  detail = dict(stage=stage, unscorable=share)
  if share:
    yield (failure if share > 0.5 else warning)(
      f'unscorable {stage}',
      result,
      'look at the warnings of the scorers in the log, and try jaxrl score',
      **detail,
    )
  else:
    yield ok(f'unscorable {stage}', result, **detail)


def _mismatch(trial: StageTrial) -> Iterator[Finding]:
  stage, key = trial.stage.name, 'rollout_corr/k3_kl'
  worst = [row for row in trial.rows if key in row]
  if not worst:
    return
  k3 = max((row[key] for row in worst), key=lambda value: (math.isnan(value), value))
  most = max(row['sampling/sampling_logp_difference/max'] for row in worst)
  detail = dict(stage=stage, k3_kl=k3, max_difference=most)
  if trial.exceeded:
    result, _, remedy = '; '.join(trial.exceeded.values()).partition('; ')
    yield failure(f'mismatch {stage}', result, remedy, **detail)
  else:
    result = f'trainer and sampler differ by {k3:.2g} nats per token (k3), at most by {most:.2g}'
    yield ok(f'mismatch {stage}', result, **detail)


def _gradients(trial: StageTrial) -> Iterator[Finding]:
  stage, check = trial.stage.name, f'gradients {trial.stage.name}'
  norms = [row['actor/grad_norm'] for row in trial.rows if 'actor/grad_norm' in row]
  losses = [row['actor/loss'] for row in trial.rows if 'actor/loss' in row]
  skipped = sum(row.get('run/skipped_updates', 0.0) for row in trial.rows)
  detail = dict(stage=stage, skipped_updates=skipped, max_grad_norm=max(norms, default=math.nan))
  if skipped or not all(map(math.isfinite, [*norms, *losses])):
    yield failure(
      check,
      f'{skipped:.0f} updates were skipped; gradients or losses are not finite or too large '
      f'(largest norm {max(norms, default=math.nan):.3g})',
      'lower the learning rate, raise skip_grad_norm, or use float32 (policy.dtype)',
      **detail,
    )
  elif norms and not any(norms) and trial.first:
    remedy = 'give the rewards more variance, see signal'
    yield warning(check, 'every gradient is exactly zero', remedy, **detail)
  elif norms:
    yield ok(check, f'finite, norm {statistics.median(norms):.3g}', **detail)


def duration(
  setup: Setup, trials: Sequence[StageTrial], suites_s: dict[str, float]
) -> Iterator[Finding]:
  """Estimates the duration of the whole run from the measured steps and evaluations.

  Args:
    suites_s: estimated seconds for evaluating each suite in full, keyed by the suite's name.
  """
  total, unknown, evaluations = 0.0, [], 0
  for trial in trials:
    stage = trial.stage
    steps = stage.end - stage.start
    if trial.seconds:
      total += steps * (trial.step_s + trial.writing_s)
    else:
      unknown.append(stage.name)
    evaluations += sum(stage.evaluation_due(done) for done in range(stage.start + 1, stage.end + 1))
  evaluations += bool(suites_s)
  evaluating = evaluations * sum(suites_s.values())
  hours = (total + evaluating) / 3600
  detail = dict(hours=hours, training_hours=total / 3600, evaluation_hours=evaluating / 3600)
  result = (
    f'about {_time(total + evaluating)} for the whole run, of which {_time(evaluating)} for '
    'evaluations'
  )
  if unknown:
    yield warning(
      'duration',
      f'{result}, without {", ".join(unknown)}, whose steps could not be measured',
      'correct the problems that are reported for them above',
      **detail,
    )
  elif hours > _SLOW_H:
    yield warning('duration', result, 'use more devices, or fewer steps', **detail)
  else:
    yield ok('duration', result, **detail)


def memory(used: Memory, compilations: Mapping[str, Compilation]) -> Iterator[Finding]:
  """Compares the peak memory with the memory of a device. If devices do not report their memory,
  compares the memory of this process with the machine's memory.

  Args:
    compilations: statistics of the compiled update programs, keyed by program.
  """
  programs = {name: compiled.needed for name, compiled in compilations.items()}
  largest = max(programs, key=programs.get, default=None)
  detail = dict(
    process_bytes=used.process,
    device_peak_bytes=used.devices,
    device_limit_bytes=used.limit,
    program_bytes=programs,
  )
  program = f', the largest program {largest} {programs[largest] / 1e6:,.1f} MB' if largest else ''
  remedy = 'use policy.remat, fewer learner.chunks_per_rank, or more devices'
  if used.devices is not None:
    result = f'{used.devices / 1e9:,.2f} GB at the peak of a device{program}'
    limit = used.limit
  else:
    result = f'{used.process / 1e9:,.2f} GB in this process{program}'
    limit = psutil.virtual_memory().total
  most = used.process if used.devices is None else used.devices
  if limit is not None and most > _FULL * limit:
    yield warning('memory', f'{result} of {limit / 1e9:,.1f} GB', remedy, **detail)
  else:
    yield ok('memory', result, **detail)


def _time(seconds: float) -> str:
  if seconds < 120:
    return f'{seconds:,.0f} s'
  return f'{seconds / 60:,.0f} min' if seconds < 7200 else f'{seconds / 3600:,.1f} h'
