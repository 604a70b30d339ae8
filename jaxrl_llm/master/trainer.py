"""Device work of a stage: annotates a plan's batch (advantages, logprobs, values), then updates the
models.

Every process does the same work, each on its own devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
from absl import logging
from jax.sharding import Mesh
from jaxtyping import Array, Float, Shaped

from jaxrl_llm.batching.chunks import Chunks
from jaxrl_llm.batching.plan import Shape, StepPlan, units_of
from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.types import Params
from jaxrl_llm.data.load import PackedStep, RowLoader, unpack
from jaxrl_llm.learner.algorithm import (
  AT_REFERENCE,
  Algorithm,
  Annotation,
  Closed,
  Constants,
  Loss,
)
from jaxrl_llm.learner.forward import Score, Value, build_score, build_value
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.learner.state import Learned, TrainState, copy_params, renewed
from jaxrl_llm.learner.update import Report, Update, build_measure, build_update
from jaxrl_llm.master.process import Process
from jaxrl_llm.master.utilisation import Work, packed_flops
from jaxrl_llm.models.api import Model
from jaxrl_llm.parallel.rules import replicated
from jaxrl_llm.runtime.metrics import Mean, Metric, Sum, merge


class Optimization(NamedTuple):
  """Optimizer with which a stage trains one role, the policy or the critic."""

  optimizer: optax.GradientTransformation
  config: OptimizerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
  """Description of one stage, the same in every process."""

  name: str
  start: int
  """Number of batches that the run has completed when the stage begins."""
  end: int
  algorithm: Algorithm
  policy: Optimization
  critic: Optimization | None = None
  """Optimizer of the critic; None if the algorithm has no critic."""
  keep_optimizer: bool
  """Whether to continue with the optimizer state of the previous stage."""
  shape: Shape
  token_chunk: int
  minibatches: int
  epochs: int
  evaluate_every: int | None
  """Number of steps between evaluations; None to evaluate only at the end of the stage. The policy
  is always evaluated at the end of the stage.
  """
  overlap_evaluation: bool = False
  """Whether training continues while an evaluation runs. The evaluation at the end of the stage
  never overlaps with training.
  """
  explores: bool
  """Whether rollouts are generated for the stage's batches."""
  recorded: bool = False
  """Whether the stage's batches are rollouts of another run, imported once or followed while the
  other run explores.
  """
  trains: bool = True
  """Whether the stage trains on its batches. If False, they are only stored."""
  follows: bool = False
  """Whether the stage explores with exported weights of another run."""
  export_every: int | None = None
  """Number of batches between exports of the weights to the run whose rollouts this run trains on;
  None if there is no such run.
  """
  publish_every: int = 1
  """Number of batches between publications of the policy to the engine."""
  batches_ahead: int = 0
  """Number of further batches, after the next one, for which groups may start with the version that
  the engine serves.
  """
  held_out: str | None = None
  """Name of the preference set on which evaluations measure the policy; None if there is none."""

  @property
  def program_options(self) -> dict[str, Any]:
    """Keyword arguments with which the stage's forward passes and updates are built."""
    return {
      'token_chunk': self.token_chunk,
      'splits_remainder': self.shape.splits_remainder,
    }

  @property
  def updates(self) -> int:
    """Number of optimizer steps that the stage applies to the policy."""
    return self.critic_updates - self.algorithm.critic_warmup * self.minibatches * self.epochs

  @property
  def critic_updates(self) -> int:
    return (self.end - self.start) * self.minibatches * self.epochs

  @property
  def on_policy(self) -> tuple[str, ...]:
    """Names of the logprob fields that need no separate forward pass before the update.

    If a batch has only one optimizer step, the logprobs that this step computes are also those
    before the update.
    """
    if self.minibatches * self.epochs > 1:
      return ()
    reads, own_reference = self.algorithm.reads, self.algorithm.reference.every == 1
    computed = {
      'proximal_logprobs': 'proximal' in reads,
      'reference_logprobs': 'reference' in reads and own_reference,
    }
    return tuple(name for name, is_computed in computed.items() if is_computed)

  def evaluation_due(self, done: int) -> bool:
    """Returns whether an evaluation is due after `done` batches of the run."""
    every = self.evaluate_every
    return done == self.end or (every is not None and (done - self.start) % every == 0)


class Batch(NamedTuple):
  """The annotated rows of a plan, on the devices."""

  plan: StepPlan
  annotation: Annotation
  steps: list[PackedStep]


class Updated(NamedTuple):
  metrics: dict[str, Metric]
  logprobs: dict[int, Any] | None
  """Logprobs under the policy before the update, one array per row, keyed by plan row number.

  They are 0 for tokens that are not trained on. Rows left out of the loss are included. For a row
  in `late`, the policy is the one just before the first optimizer step on that row. The mapping is
  empty if the batch does not consist of rollouts, and None if the batch was not trained on.
  """
  moved: bool
  """Whether any optimizer step of the batch changed the policy."""
  late: frozenset[int] = frozenset()
  """Plan row numbers of the rows whose logprobs were computed after an optimizer step of this batch
  on other rows.
  """
  work: tuple[Work, ...] = ()
  """Floating-point operations of the batch's forward passes and updates."""


class Roles(NamedTuple):
  """Models of a stage, without their parameters."""

  model: Model
  """Model of the policy or, in a stage that trains a reward model, the reward model."""
  critic: Model | None


class _Trained(NamedTuple):
  """A role that the stage trains: the policy or its critic."""

  name: Literal['actor', 'critic']
  """Prefix of the role's metrics."""
  update: Update
  config: OptimizerConfig


def value_pass(stage: Stage, critic: Model, mesh: Mesh) -> Score | Value:
  """Builds the critic's forward pass. If the algorithm reads `next_values`, the pass also returns
  the value after each token.
  """
  if 'next_values' in stage.algorithm.on_host:
    return build_value(critic, mesh, splits_remainder=stage.shape.splits_remainder)
  return build_score(critic, mesh, **stage.program_options)


class StageTrainer:
  """Trains one stage: stores its compiled programs, and runs them in order."""

  def __init__(
    self, stage: Stage, process: Process, *, roles: Roles, loader: RowLoader, learned: Learned
  ):
    """
    Args:
      learned: state with which `update` will be called. It determines the programs' shardings.
    """
    self._stage, self._loader, self._roles = stage, loader, roles
    self._device, self._stopwatch, mesh = process.device, process.stopwatch, process.mesh
    # Replicates an array. Results are sharded over the devices of all processes, and a process can
    # read an array on the host only if its own devices have a full copy.
    self._whole = jax.jit(lambda x: x, out_shardings=replicated(mesh))
    self._score: Score = build_score(roles.model, mesh, **stage.program_options)
    algorithm = stage.algorithm
    self._own_reference = algorithm.reference.every == 1
    self._bootstraps = 'next_values' in algorithm.on_host

    def trained(
      name: str, model: Model, loss: Loss, by: Optimization, state: TrainState, **options: Any
    ) -> _Trained:
      fields = dict(metrics=name, **stage.program_options, **options)
      return _Trained(name, build_update(model, loss, *by, mesh, state, **fields), by.config)

    self._policy = trained(
      'actor',
      roles.model,
      algorithm.loss,
      stage.policy,
      learned.policy,
      updates=stage.updates,
      on_policy=stage.on_policy,
    )
    self._renew = jax.jit(
      lambda state: renewed(state, stage.policy.optimizer),
      donate_argnums=0,
      out_shardings=jax.tree.map(lambda x: x.sharding, learned.policy),
    )
    self._measure_loss = build_measure(roles.model, algorithm.loss, mesh, **stage.program_options)
    if roles.critic is not None:
      self._value: Score | Value = value_pass(stage, roles.critic, mesh)
      self._critic = trained(
        'critic',
        roles.critic,
        algorithm.critic_loss,
        stage.critic,
        learned.critic,
        updates=stage.critic_updates,
      )

  async def annotate(self, learned: Learned, plan: StepPlan) -> Batch:
    """Loads the plan's rows, runs the required forward passes and computes the advantages.

    The plan and the algorithm determine which passes run. They run once over the rows, packed as in
    the first epoch, and all epochs use their results.
    """
    stage, algorithm = self._stage, self._stage.algorithm
    steps: list[PackedStep] = []
    passed, next_values = self._passed(plan), []
    async with contextlib.aclosing(self._loaded(plan)) as loaded:
      async for packed in loaded:
        if len(steps) < stage.minibatches:
          packed, following = await self._passes(learned, plan, packed)
          next_values.append(following)
        steps.append(packed)
    columns, first = {}, steps[: stage.minibatches]
    for name in sorted(algorithm.on_host | (passed if stage.epochs > 1 else set())):
      arrays = (
        next_values if name == 'next_values' else [getattr(packed.chunks, name) for packed in first]
      )
      columns[name] = await self._device.run(self._column, arrays, plan, first)
    with self._stopwatch.timed('adv'):
      on_host = {name: columns[name] for name in algorithm.on_host}
      annotation = algorithm.annotate(
        Closed(plan.rows, plan.step - stage.start, on_host, learned.algorithm_state)
      )
    masked = np.array([row.masked for row in plan.rows], bool)
    annotation = annotation._replace(in_loss=annotation.in_loss & ~masked)
    derived: dict[str, Any] = {'advantages': annotation.advantages}
    if annotation.returns is not None:
      derived['returns'] = annotation.returns
    for number, packed in enumerate(steps):
      later = {name: columns[name] for name in passed} if number >= stage.minibatches else {}
      steps[number] = await self._device.run(
        self._loader.fill, packed, derived | later, annotation.in_loss
      )
    return Batch(plan, annotation, steps)

  async def _loaded(self, plan: StepPlan) -> AsyncGenerator[PackedStep]:
    """Yields the plan's optimizer steps, which are loaded ahead, and times the waits for them."""
    async with contextlib.aclosing(self._loader.ahead(plan, self._stage.shape)) as steps:
      for _ in plan.optimizer_steps:
        with self._stopwatch.timed('load'):
          packed = await anext(steps)
        yield packed

  def _passed(self, plan: StepPlan) -> set[str]:
    """Returns the names of the fields of `Chunks` (a packed batch) that forward passes fill before
    the update.
    """
    reads = self._stage.algorithm.reads
    fields = {
      'proximal_logprobs': plan.proximal,
      'reference_logprobs': 'reference' in reads and (plan.proximal or not self._own_reference),
      'values': 'values' in reads,
    }
    return {name for name, is_passed in fields.items() if is_passed}

  def scoring_roles(self, plan: StepPlan) -> frozenset[str]:
    """Returns the roles (`phases.roles_of`) with which `annotate` computes."""
    passed = self._passed(plan)
    roles = {
      'policy': 'proximal_logprobs' in passed,
      'reference': 'reference_logprobs' in passed and not self._own_reference,
      'critic': 'values' in passed,
    }
    roles['base'] = roles['policy'] or roles['reference']
    return frozenset(role for role, is_read in roles.items() if is_read)

  def training_roles(self, plan: StepPlan) -> frozenset[str]:
    """Returns the roles (`phases.roles_of`) that `update` changes or computes with."""
    algorithm = self._stage.algorithm
    averages = 'reference' in algorithm.reads and algorithm.reference.ema is not None
    roles = {'policy', 'optimizer', 'base', 'critic', 'critic optimizer'}
    if averages:
      roles.add('reference')
    return frozenset(roles) | (self.scoring_roles(plan) if plan.held_out else frozenset())

  async def _passes(
    self, learned: Learned, plan: StepPlan, packed: PackedStep
  ) -> tuple[PackedStep, Float[Array, 'micro chunks time'] | None]:
    """Runs the forward passes on one optimizer step's rows. Returns the step with their results,
    and the critic's values after each token, or None if the algorithm does not read these values.
    """
    chunks, passed, next_values = packed.chunks, self._passed(plan), None
    if 'proximal_logprobs' in passed:
      with self._stopwatch.timed('old_log_prob'):
        params = learned.whole(learned.policy.params)
        logprobs = await self._forward(self._score, params, chunks, packed)
        chunks = chunks.replace(proximal_logprobs=logprobs)
    if 'reference_logprobs' in passed:
      with self._stopwatch.timed('ref'):
        logprobs = chunks.proximal_logprobs
        if not self._own_reference:
          reference = learned.whole(learned.reference)
          logprobs = await self._forward(self._score, reference, chunks, packed)
        chunks = chunks.replace(reference_logprobs=logprobs)
    if 'values' in passed:
      with self._stopwatch.timed('values'):
        values = await self._forward(self._value, learned.critic.params, chunks, packed)
        if self._bootstraps:
          values, next_values = values
        chunks = chunks.replace(values=values)
    return packed._replace(chunks=chunks), next_values

  async def _forward(
    self, program: Score | Value, params: Params, chunks: Chunks, packed: PackedStep
  ) -> Any:
    """Runs a forward pass on one optimizer step's rows, and waits until it has ended: the caller
    measures its time, and few programs may be in flight (`DeviceThread`).
    """
    return await self._device.run(
      lambda: jax.block_until_ready(program(params, chunks, packed.used))
    )

  def _column(
    self,
    arrays: Sequence[Shaped[Array, 'micro chunks time']],
    plan: StepPlan,
    steps: Sequence[PackedStep],
  ) -> list[Shaped[np.ndarray, '_']]:
    """Splits packed arrays, one per optimizer step, into one array per row of the plan. Every
    process gets the arrays of all rows.
    """
    by_row: dict[int, Shaped[np.ndarray, '_']] = {}
    for array, packed in zip(arrays, steps, strict=True):
      by_row |= unpack(self._gather(array), packed)
    return [by_row[i] for i in range(len(plan.rows))]

  async def update(self, learned: Learned, batch: Batch) -> tuple[Learned, Updated]:
    """Runs all optimizer steps of the batch. Donates the train states in `learned`.

    Raises:
      RunError: `max_skipped_updates` updates in a row were skipped, because their gradients were
        not finite or too large.
    """
    algorithm, constants = self._stage.algorithm, _scalars(batch.annotation.constants)
    metrics: dict[str, Metric] = {
      name: Mean(*pair) for name, pair in batch.annotation.metrics.items()
    }
    if 'reference' in algorithm.reads:
      metrics['actor/reference_step'] = Mean(learned.reference_step, 1)
    logprobs: dict[int, Any] = {}
    late: set[int] = set()
    policy, critic, moved = learned.policy, learned.critic, False
    trains = batch.plan.step - self._stage.start >= algorithm.critic_warmup
    if algorithm.renew_optimizer and trains:
      policy = await self._device.run(self._renew, policy)
    for packed in batch.steps:
      if critic is not None:
        critic, report = await self._apply(self._critic, critic, batch.plan, packed, constants)
        metrics = merge(metrics, _report_metrics(report))
      outputs = packed.chunks.proximal_logprobs
      if trains:
        scalars = constants | self._at_reference(learned, batch, packed)
        policy, report = await self._apply(
          self._policy, policy, batch.plan, packed, scalars, learned.base
        )
        metrics = merge(metrics, _report_metrics(report))
        moved |= not (report.skipped or report.empty)
        outputs = outputs if batch.plan.proximal else report.outputs
      if (self._stage.explores or self._stage.recorded) and not logprobs.keys() >= set(packed.rows):
        if not batch.plan.proximal and packed is not batch.steps[0]:
          late |= set(packed.rows) - logprobs.keys()
        before = await self._device.run(self._gather, outputs)
        for i, values in unpack(before, packed).items():
          logprobs.setdefault(i, values)
    learned = learned._replace(policy=policy, critic=critic, algorithm_state=batch.annotation.state)
    if batch.plan.held_out:
      metrics |= await self._measured(learned, batch.plan, constants)
    learned = await self._device.run(self._refreshed, learned, batch.plan.step + 1)
    work = tuple(self._work(batch, trains=trains, frozen=learned.base is not None))
    return learned, Updated(metrics, logprobs, moved, frozenset(late), work)

  def _work(self, batch: Batch, *, trains: bool, frozen: bool) -> Iterator[Work]:
    """Yields the operations of `annotate` and `update` for the batch.

    Args:
      trains: whether the policy was updated.
      frozen: whether the policy consists of adapters on frozen weights.
    """
    packings = [packed.packing for packed in batch.steps]
    first, passed = packings[: self._stage.minibatches], self._passed(batch.plan)
    policy, critic = self._roles.model.spec, self._roles.critic
    if 'proximal_logprobs' in passed:
      yield Work('old_log_prob', 'actor_infer', packed_flops(policy, first, backward=False))
    if 'reference_logprobs' in passed and not self._own_reference:
      yield Work('ref', 'ref', packed_flops(policy, first, backward=False))
    if 'values' in passed:
      yield Work('values', 'critic_infer', packed_flops(critic.spec, first, backward=False))
    if critic is not None:
      yield Work('update_critic', 'critic', packed_flops(critic.spec, packings, backward=True))
    if trains:
      flops = packed_flops(policy, packings, backward=True, frozen=frozen)
      yield Work('update_actor', 'actor', flops)

  def _at_reference(
    self, learned: Learned, batch: Batch, packed: PackedStep
  ) -> dict[str, np.float32]:
    """Returns a dictionary with the scalar `AT_REFERENCE` of an optimizer step: 1 if the policy
    still equals the reference, else 0. The dictionary is empty if the learner keeps no reference.
    """
    if not self._stage.algorithm.keeps_reference:
      return {}
    step, rule = batch.plan.step, self._stage.algorithm.reference
    # A reference that is a moving average equals the policy only when the stage begins.
    is_reference = step == (learned.reference_step if rule.ema is None else self._stage.start)
    return _scalars({AT_REFERENCE: is_reference and packed is batch.steps[0]})

  async def _apply(
    self,
    role: _Trained,
    state: TrainState,
    plan: StepPlan,
    packed: PackedStep,
    constants: Constants,
    base: Params | None = None,
  ) -> tuple[TrainState, Report]:
    """Runs one optimizer step of a role and checks its report. The report's `outputs` stay on the
    devices.
    """
    with self._stopwatch.timed(f'update_{role.name}'):
      state, report = await self._device.run(
        role.update, state, packed.chunks, packed.used, constants, base
      )
      fetched = await self._device.run(jax.device_get, report._replace(outputs=None))
    if fetched.skipped:
      await self._device.run(self._name_cause, role, plan, packed, report.outputs)
    self._check(fetched, role)
    return state, fetched._replace(outputs=report.outputs)

  def _name_cause(
    self, role: _Trained, plan: StepPlan, packed: PackedStep, outputs: Float[Array, '...']
  ) -> None:
    """Logs, after a skipped update, the first row with an input or output that is not finite.

    Rows with non-finite values in the columns that `annotate` reads are already left out of the
    loss. Arrays that stay on the devices are not checked in each step, only here after an update
    was skipped.
    """
    inputs = ('behaviour_logprobs', 'proximal_logprobs', 'reference_logprobs', 'values', 'returns')
    arrays = {name: getattr(packed.chunks, name) for name in ('advantages', *inputs)}
    # Scores are not checked, because they have one entry per segment, not per token.
    if outputs.shape == packed.chunks.tokens.shape:
      arrays[f"the {role.name}'s output"] = outputs
    masks = unpack(self._gather(packed.chunks.loss_mask), packed)
    for name, array in arrays.items():
      for i, values in sorted(unpack(self._gather(array), packed).items()):
        bad = np.flatnonzero(masks[i] & ~np.isfinite(values))
        if len(bad):
          logging.warning(
            'stage %s: an update of the %s is skipped: %s of row %s is %s at token %d, and not '
            'finite at %d of its %d trained tokens',
            *(self._stage.name, role.name, name, plan.rows[i].uid, values[bad[0]], bad[0]),
            *(len(bad), masks[i].sum()),
          )
          return

  def programs(
    self, learned: Learned, batch: Batch
  ) -> Iterator[tuple[str, Callable[[], jax.stages.Lowered]]]:
    """Yields (name, function) for the update of each role.

    The function lowers the update for arrays with the same shapes and shardings as the given ones.
    It does not keep the given arrays in memory, and they may have been donated before.
    """

    def like(tree: Any) -> Any:
      return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
      )

    chunks, used = like(batch.steps[0].chunks), batch.steps[0].used
    constants = _scalars(batch.annotation.constants)
    scalars = constants | self._at_reference(learned, batch, batch.steps[0])

    def lowering(
      update: Update, state: TrainState, constants: Constants, base: Params | None = None
    ):
      return lambda: update.lower(state, chunks, used, constants, base)

    yield 'update', lowering(self._policy.update, like(learned.policy), scalars, like(learned.base))
    if learned.critic is not None:
      yield 'critic update', lowering(self._critic.update, like(learned.critic), constants)

  async def _measured(
    self, learned: Learned, plan: StepPlan, constants: Constants
  ) -> dict[str, Metric]:
    """Returns the policy's loss, and statistics of the loss, on the plan's held-out rows."""
    units, shape = units_of(plan.held_out), self._stage.shape
    unit = max(map(len, units))
    # Number of pairs (or single rows) that fit into the arrays of a training step even if all rows
    # have the maximum length.
    at_once = shape.ranks * max(
      1,
      min(
        shape.micro_batches * (shape.chunks * shape.rows_per_chunk // unit), shape.segments // unit
      ),
    )
    parts = [units[i : i + at_once] for i in range(0, len(units), at_once)]
    held_out = dataclasses.replace(
      plan,
      rows=plan.held_out,
      optimizer_steps=tuple(tuple(i for unit in part for i in unit) for part in parts),
    )
    metrics: dict[str, Metric] = {}
    params = learned.whole(learned.policy.params)
    with self._stopwatch.timed('testing'):
      async with contextlib.aclosing(self._loaded(held_out)) as loaded:
        async for packed in loaded:
          packed, _ = await self._passes(learned, held_out, packed)
          stats = await self._device.run(
            self._measure_loss, params, packed.chunks, packed.used, constants
          )
          stats = await self._device.run(jax.device_get, stats)
          metrics = merge(
            metrics, {name: Mean(float(s.total), float(s.count)) for name, s in stats.items()}
          )
    return {
      f'val-core/{self._stage.held_out}/{name.removeprefix("actor/")}': value
      for name, value in metrics.items()
    }

  def _refreshed(self, learned: Learned, done: int) -> Learned:
    """Updates the reference model if the algorithm's rule requires it after `done` completed
    batches, and waits until the update has ended. Returns the learned state.
    """
    rule = self._stage.algorithm.reference
    if 'reference' not in self._stage.algorithm.reads:
      return learned
    if rule.ema is not None:
      averaged = _averaged(learned.reference, learned.policy.params, rule.ema)
      return learned._replace(reference=jax.block_until_ready(averaged), reference_step=done)
    if rule.every is None or (done - self._stage.start) % rule.every:
      return learned
    kept = None if self._own_reference else copy_params(learned.policy.params)
    jax.block_until_ready(kept)
    return learned._replace(reference=kept, reference_step=done)

  def _gather(self, array: Shaped[Array, '*shape']) -> Shaped[np.ndarray, '*shape']:
    return jax.device_get(self._whole(array))

  def _check(self, report: Report, role: _Trained) -> None:
    if report.in_a_row >= role.config.max_skipped_updates:
      raise RunError(
        f'stage {self._stage.name}: {int(report.in_a_row)} updates of the {role.name} in a row '
        'were skipped: their gradients were not finite or above '
        f'skip_grad_norm={role.config.skip_grad_norm:g} (last norm '
        f'{float(report.stats[f"{role.name}/grad_norm"].total):g}); lower the learning rate or '
        'inspect the last rollouts, then resume from the newest commit'
      )


def _report_metrics(report: Report) -> dict[str, Metric]:
  metrics: dict[str, Metric] = {
    name: Mean(float(s.total), float(s.count)) for name, s in report.stats.items()
  }
  return metrics | {
    'run/skipped_updates': Sum(int(report.skipped)),
    'run/empty_updates': Sum(int(report.empty)),
  }


def _scalars(constants: Constants) -> dict[str, np.float32]:
  """Converts constants to NumPy scalars, so that a new value does not cause a recompilation."""
  return {name: np.float32(value) for name, value in constants.items()}


@functools.partial(jax.jit, donate_argnums=0)
def _averaged(old: Params, new: Params, weight: float | Float[Array, '']) -> Params:
  """Returns weight · old + (1 - weight) · new for each parameter."""
  return jax.tree.map(lambda a, b: (weight * a + (1.0 - weight) * b).astype(a.dtype), old, new)
