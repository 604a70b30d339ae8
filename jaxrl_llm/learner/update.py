"""The jitted optimizer step. It accumulates gradients over micro-batches, and then applies them or
skips the update.

Every term of the loss is divided by its denominator over the whole optimizer step, so the gradient
does not depend on how sequences were packed or split into micro-batches. The number of
micro-batches or chunks in use is a run-time argument, so one compiled program serves every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.batching.chunks import Chunks
from jaxrl_llm.core.types import Params
from jaxrl_llm.learner.algorithm import AT_REFERENCE, Constants, Loss
from jaxrl_llm.learner.forward import Put, chunk_outputs, fold_used, micro_batch, split_ranks
from jaxrl_llm.learner.optimizer import OptimizerConfig, apply_update, clipped, learning_rate
from jaxrl_llm.learner.state import TrainState, trained_shardings
from jaxrl_llm.models import lora
from jaxrl_llm.models.api import Model
from jaxrl_llm.ops.reduce import Stat
from jaxrl_llm.parallel import rules


class Report(NamedTuple):
  """Results of an update that the host reads."""

  stats: dict[str, Stat]
  outputs: Float[Array, 'micro chunks ...']
  """Logprobs, values or scores of the model before the update."""
  skipped: Bool[Array, '']
  """Whether the update was skipped because its gradient norm was not finite or too large."""
  empty: Bool[Array, '']
  """Whether the update was skipped because its gradient was exactly zero."""
  in_a_row: Int[Array, '']
  """Number of consecutive updates, up to and including this one, that were skipped because of their
  gradient norm.
  """


class Gradients(NamedTuple):
  grads: Params
  loss: Float[Array, '']
  stats: dict[str, Stat]
  outputs: Float[Array, 'micro chunks ...']


OnPolicy = Sequence[Literal['proximal_logprobs', 'reference_logprobs']]


def gradients(
  model: Model,
  loss: Loss,
  params: Params,
  batch: Chunks,
  used: Int[Array, ''],
  constants: Constants,
  *,
  token_chunk: int,
  on_policy: OnPolicy = (),
  base: Params | None = None,
  ranks: int | None = None,
) -> Gradients:
  """Computes loss and gradient over the used part of an optimizer step's batch.

  Args:
    params: trainable parameters; gradients are taken with respect to them.
    batch: arrays `[micro_batches, chunks, ...]`. The part that is not used is empty: its loss_mask
      is False everywhere.
    used: number of micro-batches in use or, if the remainder is split, of chunks per rank.
    constants: constants that the loss reads, from the annotation of the batch. If they contain
      `AT_REFERENCE` with a value other than 0, the logprobs of this forward pass replace the
      reference logprobs in `batch`, so that the KL divergence is exactly 0.
    on_policy: fields of `batch` that must equal the logprobs of the policy before this update. The
      forward pass of this update computes these logprobs, so the fields are filled with them, as
      constants, without an extra pass.
    base: frozen base parameters, to which adapters are added; None if there are no adapters.
    ranks: `split_ranks` of `forward.fold_used`.
  """

  def outputs_of(params, chunks):
    whole = lora.join(params, base)
    planned = batch.tokens.shape[1]
    return chunk_outputs(model, whole, chunks, token_chunk=token_chunk, planned=planned)

  first = jax.eval_shape(lambda b: micro_batch(b, 0), batch)
  denominators = _denominators(loss, jax.eval_shape(outputs_of, params, first), batch, constants)

  def loss_fn(params, chunks):
    outputs = outputs_of(params, chunks)
    before = jax.lax.stop_gradient(outputs[0])
    chunks = chunks.replace(**dict.fromkeys(on_policy, before))
    if AT_REFERENCE in constants:
      reference = jnp.where(constants[AT_REFERENCE] != 0, before, chunks.reference_logprobs)
      chunks = chunks.replace(reference_logprobs=reference)
    terms, stats = loss(outputs, chunks, constants)
    total = sum(t.weight * t.numerator / denominators[name] for name, t in terms.items())
    # Each term is also a metric, whose numerator and denominator are summed over the step.
    stats |= {name: Stat(t.numerator, t.denominator) for name, t in terms.items()}
    return total, (stats, outputs[0])

  value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
  # Accumulate gradients with the sharding of the parameters, so that a device stores only its shard
  # of the gradients.
  shardings = None if model.mesh is None else trained_shardings(model, model.mesh)

  def placed(tree):
    return tree if shardings is None else jax.lax.with_sharding_constraint(tree, shardings)

  def step(total: Gradients, chunks: Chunks, put: Put) -> Gradients:
    (part, (stats, outputs)), grads = value_and_grad(params, chunks)
    return Gradients(
      placed(jax.tree.map(jnp.add, total.grads, grads)),
      total.loss + part,
      jax.tree.map(jnp.add, total.stats, stats),
      put(total.outputs, outputs),
    )

  part, (stats, outputs) = jax.eval_shape(loss_fn, params, first)
  start = Gradients(
    placed(jax.tree.map(jnp.zeros_like, params)),
    _zeros(part),
    jax.tree.map(_zeros, stats),
    jnp.zeros((batch.tokens.shape[0], *outputs.shape), outputs.dtype),
  )
  return fold_used(step, start, batch, used, split_ranks=ranks)


def _zeros(like: jax.ShapeDtypeStruct) -> Array:
  return jnp.zeros(like.shape, like.dtype)


def _denominators(
  loss: Loss, outputs: Any, batch: Chunks, constants: Constants
) -> dict[str, Float[Array, '']]:
  """Returns each term's denominator over the whole step. The denominators need no forward pass, so
  the loss is called with model outputs of zero.

  The denominator is 0 if no token counts. It is then replaced by 1, so that the term is 0 and not
  NaN.
  """

  def denominators(chunks: Chunks):
    terms, _ = loss(jax.tree.map(_zeros, outputs), chunks, constants)
    return {name: term.denominator for name, term in terms.items()}

  sums = jax.tree.map(lambda d: d.sum(), jax.vmap(denominators)(batch))
  return jax.tree.map(lambda d: jnp.where(d > 0, d, 1.0), sums)


Update = Callable[..., tuple[TrainState, Report]]
"""Function of (state, batch, used, constants, base=None). `state` is donated. `base` contains the
frozen base parameters of a model with adapters and is not donated.
"""


def build_update(
  model: Model,
  loss: Loss,
  optimizer: optax.GradientTransformation,
  config: OptimizerConfig,
  mesh: Mesh,
  state: TrainState,
  *,
  updates: int,
  token_chunk: int,
  on_policy: OnPolicy = (),
  metrics: str = 'actor',
  splits_remainder: bool = False,
) -> Update:
  """Builds the jitted optimizer step of one trained role in one stage. The step donates its state.

  An update is skipped and counted in `state.skipped` if its gradient norm is not finite or above
  `skip_grad_norm`. An update whose gradient is exactly zero is skipped too, but not counted: since
  there is nothing to learn, the optimizer's momentum must not move the weights.

  Args:
    state: a state that the step will be called with. All later states have the same shardings.
    updates: number of updates in the stage, from which the learning-rate schedule follows.
    on_policy: fields of the batch that receive logprobs of the policy before the update, see
      `gradients`.
    metrics: prefix of the metrics that all roles have (loss, grad_norm and lr).
    splits_remainder: see `forward.build_score`.
  """
  schedule = learning_rate(config, updates)
  shardings = jax.tree.map(lambda x: x.sharding, state)

  def update(
    state: TrainState,
    batch: Chunks,
    used: Int[Array, ''],
    constants: Constants,
    base: Params | None = None,
  ) -> tuple[TrainState, Report]:
    result = gradients(
      model,
      loss,
      state.params,
      batch,
      used,
      constants,
      token_chunk=token_chunk,
      on_policy=on_policy,
      base=base,
      ranks=split_ranks(mesh, splits_remainder),
    )
    norm = optax.tree.norm(result.grads)
    sound = jnp.isfinite(norm) & (norm <= config.skip_grad_norm)
    take = sound & (norm > 0)
    grads = clipped(result.grads, config)
    params, opt_state = apply_update(
      optimizer, grads, state.opt_state, state.params, shardings.opt_state, take=take
    )
    unit = jnp.ones((), jnp.float32)
    stats = result.stats | {
      f'{metrics}/loss': Stat(result.loss, unit),
      f'{metrics}/grad_norm': Stat(norm, unit),
      f'{metrics}/lr': Stat(jnp.asarray(schedule(state.updates), jnp.float32), unit),
    }
    state = TrainState(
      params=params,
      opt_state=opt_state,
      updates=state.updates + take,
      skipped=jnp.where(sound, 0, state.skipped + 1),
    )
    return state, Report(stats, result.outputs, ~sound, sound & (norm == 0), state.skipped)

  whole = rules.replicated(mesh)
  return jax.jit(update, donate_argnums=0, out_shardings=(shardings, whole))


Measure = Callable[[Params, Chunks, Int[Array, ''], Constants], dict[str, Stat]]


def build_measure(
  model: Model, loss: Loss, mesh: Mesh, *, token_chunk: int, splits_remainder: bool = False
) -> Measure:
  """Builds a jitted pass without gradient, with the arguments (params, batch, used, constants). It
  sums the terms and statistics of a loss over the used part of the batch.

  Args:
    splits_remainder: see `forward.build_score`.
  """

  def micro_stats(
    params: Params, chunks: Chunks, constants: Constants, planned: int
  ) -> dict[str, Stat]:
    outputs = chunk_outputs(model, params, chunks, token_chunk=token_chunk, planned=planned)
    terms, stats = loss(outputs, chunks, constants)
    return stats | {name: Stat(t.numerator, t.denominator) for name, t in terms.items()}

  def measure(
    params: Params, batch: Chunks, used: Int[Array, ''], constants: Constants
  ) -> dict[str, Stat]:
    def step(total: dict[str, Stat], chunks: Chunks, put: Put) -> dict[str, Stat]:
      return jax.tree.map(jnp.add, total, micro_stats(params, chunks, constants, planned))

    planned = batch.tokens.shape[1]
    first = jax.eval_shape(
      lambda b: micro_stats(params, micro_batch(b, 0), constants, planned), batch
    )
    start, ranks = jax.tree.map(_zeros, first), split_ranks(mesh, splits_remainder)
    return fold_used(step, start, batch, used, split_ranks=ranks)

  return jax.jit(measure, out_shardings=rules.replicated(mesh))
