"""What a stage does with a closed plan on the devices: annotate, then update. Runs alike in every process."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxrl_llm.batching.plan import Shape, StepPlan
from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.types import Params
from jaxrl_llm.data.load import PackedStep, RowLoader, unpack
from jaxrl_llm.learner.algorithm import Algorithm, Annotation
from jaxrl_llm.learner.forward import Score, build_score
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.learner.state import TrainState
from jaxrl_llm.learner.update import Update, build_update
from jaxrl_llm.models.api import Model
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.parallel.rules import replicated
from jaxrl_llm.runtime.metrics import Mean, Metric, Sum, merge
from jaxrl_llm.runtime.phases import PhaseManager


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
  """One stage as every process knows it."""

  name: str
  start: int
  """Completed batches of the run when it begins."""
  end: int
  algorithm: Algorithm
  optimizer: optax.GradientTransformation
  optimizer_config: OptimizerConfig
  keep_optimizer: bool
  """Go on with the optimizer of the stage before."""
  shape: Shape
  token_chunk: int
  minibatches: int
  epochs: int
  evaluate_every: int | None
  """Steps between evaluations inside the stage; one more is made at its end."""
  explores: bool

  @property
  def updates(self) -> int:
    return (self.end - self.start) * self.minibatches * self.epochs

  def evaluation_due(self, done: int) -> bool:
    """Whether the policy after `done` batches of the run is to be evaluated."""
    every = self.evaluate_every
    return done == self.end or (every is not None and (done - self.start) % every == 0)


class Batch(NamedTuple):
  """A plan's rows on the devices, annotated."""

  plan: StepPlan
  annotation: Annotation
  steps: list[PackedStep]


class Updated(NamedTuple):
  metrics: dict[str, Metric]
  logprobs: dict[int, Any]
  """Per-token logprobs of the policy before the batch, by row number of the plan.

  Only where a plan of several optimizer steps asks for no proximal pass (demonstrations): of the policy before the
  optimizer step that came to the row first.
  """


class StageTrainer:
  """The compiled programs of one stage, and the order in which they run."""

  def __init__(
    self,
    stage: Stage,
    *,
    model: Model,
    mesh: Mesh,
    loader: RowLoader,
    device: DeviceThread,
    phases: PhaseManager,
    state: TrainState,
    reference: Params | None,
  ):
    """
    Args:
      state: what `update` will be called with; gives the shardings.
      reference: frozen parameters, where the algorithm reads the reference.
    """
    self._stage, self._loader, self._device, self._phases = stage, loader, device, phases
    self._reference = reference
    # The proximal logprobs are dealt over the devices; each process has to hold all of them to read them.
    self._whole = jax.jit(lambda x: x, out_shardings=replicated(mesh))
    self._score: Score = build_score(model, mesh, token_chunk=stage.token_chunk)
    self._update: Update = build_update(
      model,
      stage.algorithm,
      stage.optimizer,
      stage.optimizer_config,
      mesh,
      state,
      updates=stage.updates,
      token_chunk=stage.token_chunk,
      on_policy=stage.minibatches * stage.epochs == 1,
    )

  async def annotate(self, state: TrainState, plan: StepPlan) -> Batch:
    """Advantages, the rows on the devices, and the forward passes that the plan and the algorithm ask for."""
    with self._phases.timed('adv'):
      annotation = self._stage.algorithm.annotate(plan.rows)
    steps = []
    for number in range(len(plan.optimizer_steps)):
      packed = await self._device.run(
        self._loader.load,
        plan,
        number,
        self._stage.shape,
        advantages=annotation.advantages,
        in_loss=annotation.in_loss,
      )
      chunks = packed.chunks
      if self._reference is not None:
        with self._phases.timed('ref'):
          logprobs = await self._device.run(self._score, self._reference, chunks, packed.used)
          chunks = chunks.replace(reference_logprobs=logprobs)
      if plan.proximal:
        with self._phases.timed('old_log_prob'):
          logprobs = await self._device.run(self._score, state.params, chunks, packed.used)
          chunks = chunks.replace(proximal_logprobs=logprobs)
      steps.append(packed._replace(chunks=chunks))
    return Batch(plan, annotation, steps)

  async def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, Updated]:
    """All optimizer steps of the batch; `state` is donated.

    Raises:
      RunError: after `max_skipped_updates` unusable gradients in a row.
    """
    metrics: dict[str, Metric] = {name: Mean(*pair) for name, pair in batch.annotation.metrics.items()}
    logprobs: dict[int, Any] = {}
    for packed in batch.steps:
      state, report = await self._device.run(self._update, state, packed.chunks, packed.used)
      report, in_a_row = await self._device.run(jax.device_get, (report, state.skipped))
      metrics = merge(metrics, {name: Mean(float(s.total), float(s.count)) for name, s in report.stats.items()})
      counts = {'run/skipped_updates': Sum(int(report.skipped)), 'run/empty_updates': Sum(int(report.empty))}
      metrics = merge(metrics, counts)
      if not logprobs.keys() >= set(packed.rows):
        before = report.logprobs
        if batch.plan.proximal:
          before = await self._device.run(self._gather, packed.chunks.proximal_logprobs)
        lengths = [batch.plan.rows[i].length for i in packed.rows]
        for i, values in zip(packed.rows, unpack(before, packed, lengths), strict=True):
          logprobs.setdefault(i, values)
      self._check(int(in_a_row), float(report.stats['actor/grad_norm'].total))
    return state, Updated(metrics, logprobs)

  def _gather(self, array: jax.Array) -> np.ndarray:
    return jax.device_get(self._whole(array))

  def _check(self, skipped: int, norm: float) -> None:
    limit = self._stage.optimizer_config.max_skipped_updates
    if skipped >= limit:
      raise RunError(
        f'stage {self._stage.name}: {skipped} updates in a row skipped, their gradients were not finite or above '
        f'skip_grad_norm={self._stage.optimizer_config.skip_grad_norm:g} (last norm {norm:g}); '
        'lower the learning rate or look at the last rollouts, then resume from the newest commit'
      )
