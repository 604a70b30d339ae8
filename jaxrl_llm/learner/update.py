"""One optimizer step: gradients accumulated over micro-batches inside one jitted program, applied or skipped there.

Every term is divided once, by its denominator over the whole optimizer step, so the gradient does not depend on how
sequences were packed or split into micro-batches. How many micro-batches are in use is a run-time number: one program
serves every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.batching.chunks import Chunks
from jaxrl_llm.core.types import Params
from jaxrl_llm.learner.algorithm import Algorithm
from jaxrl_llm.learner.forward import chunk_logprobs, micro_batch
from jaxrl_llm.learner.optimizer import OptimizerConfig, learning_rate
from jaxrl_llm.learner.state import TrainState
from jaxrl_llm.models.api import Model
from jaxrl_llm.ops.logprobs import TokenLogprobs
from jaxrl_llm.ops.reduce import Stat
from jaxrl_llm.parallel import rules


class Report(NamedTuple):
  """What an update tells the host."""

  stats: dict[str, Stat]
  logprobs: Float[Array, 'micro chunks time']
  """The policy's logprobs before the update."""
  skipped: Bool[Array, '']
  """Not taken, because the gradient was unusable."""
  empty: Bool[Array, '']
  """Not taken, because the gradient was exactly zero."""


class Gradients(NamedTuple):
  grads: Params
  loss: Float[Array, '']
  stats: dict[str, Stat]
  logprobs: Float[Array, 'micro chunks time']


def gradients(
  model: Model,
  algorithm: Algorithm,
  params: Params,
  batch: Chunks,
  used: Int[Array, ''],
  *,
  token_chunk: int,
  on_policy: bool,
) -> Gradients:
  """Loss and gradient of the first `used` micro-batches of one optimizer step.

  Args:
    batch: arrays `[micro_batches, chunks, ...]`; micro-batches from `used` on are empty (no loss_mask).
    on_policy: the proximal policy is the one being updated, so its logprobs are the update's own, held constant.
  """
  denominators = _denominators(algorithm, batch)

  def loss_fn(params, chunks):
    outputs = chunk_logprobs(model, params, chunks, token_chunk=token_chunk)
    if on_policy:
      chunks = chunks.replace(proximal_logprobs=jax.lax.stop_gradient(outputs.logprobs))
    terms, stats = algorithm.loss(outputs, chunks)
    loss = sum(t.weight * t.numerator / denominators[name] for name, t in terms.items())
    # A term's own metric: numerators are summed, the denominator counts once for the whole step.
    stats |= {name: Stat(t.numerator, t.denominator) for name, t in terms.items()}
    return loss, (stats, outputs.logprobs)

  value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)

  def body(i, total: Gradients) -> Gradients:
    (loss, (stats, logprobs)), grads = value_and_grad(params, micro_batch(batch, i))
    return Gradients(
      jax.tree.map(jnp.add, total.grads, grads),
      total.loss + loss,
      jax.tree.map(jnp.add, total.stats, stats),
      jax.lax.dynamic_update_index_in_dim(total.logprobs, logprobs, i, 0),
    )

  zeros = lambda like: jnp.zeros(like.shape, like.dtype)
  loss, (stats, logprobs) = jax.eval_shape(loss_fn, params, jax.eval_shape(lambda b: micro_batch(b, 0), batch))
  start = Gradients(
    jax.tree.map(jnp.zeros_like, params),
    zeros(loss),
    jax.tree.map(zeros, stats),
    jnp.zeros(batch.tokens.shape, logprobs.dtype),
  )
  return jax.lax.fori_loop(0, used, body, start)


def _denominators(algorithm: Algorithm, batch: Chunks) -> dict[str, Float[Array, '']]:
  """Each term's denominator over the whole optimizer step: the loss on zero outputs, which costs no forward pass.

  Where nothing is trained on, 1: such a term is 0, not 0 / 0.
  """

  def one(chunks: Chunks):
    zeros = jnp.zeros(chunks.tokens.shape, jnp.float32)
    terms, _ = algorithm.loss(TokenLogprobs(zeros, zeros), chunks)
    return {name: term.denominator for name, term in terms.items()}

  sums = jax.tree.map(lambda d: d.sum(), jax.vmap(one)(batch))
  return jax.tree.map(lambda d: jnp.where(d > 0, d, 1.0), sums)


Update = Callable[[TrainState, Chunks, Int[Array, '']], tuple[TrainState, Report]]


def build_update(
  model: Model,
  algorithm: Algorithm,
  optimizer: optax.GradientTransformation,
  config: OptimizerConfig,
  mesh: Mesh,
  state: TrainState,
  *,
  updates: int,
  token_chunk: int,
  on_policy: bool,
) -> Update:
  """The jitted, donating optimizer step of one stage.

  An update is skipped when its gradient is not finite or above `skip_grad_norm` (counted in `state.skipped`), and when
  it is exactly zero: with nothing to learn, the optimizer's momentum must not move the weights.

  Args:
    state: what it will be called with; gives the shardings.
    updates: of the whole stage (for the schedule).
  """
  schedule = learning_rate(config, updates)

  def update(state: TrainState, batch: Chunks, used: Int[Array, '']) -> tuple[TrainState, Report]:
    result = gradients(model, algorithm, state.params, batch, used, token_chunk=token_chunk, on_policy=on_policy)
    norm = optax.tree.norm(result.grads)
    sound = jnp.isfinite(norm) & (norm <= config.skip_grad_norm)
    take = sound & (norm > 0)
    steps, opt_state = optimizer.update(result.grads, state.opt_state, state.params)
    choose = lambda new, old: jax.tree.map(lambda a, b: jnp.where(take, a, b), new, old)
    one = jnp.ones((), jnp.float32)
    stats = result.stats | {
      'actor/loss': Stat(result.loss, one),
      'actor/grad_norm': Stat(norm, one),
      'actor/lr': Stat(jnp.asarray(schedule(state.updates), jnp.float32), one),
    }
    state = TrainState(
      params=choose(optax.apply_updates(state.params, steps), state.params),
      opt_state=choose(opt_state, state.opt_state),
      updates=state.updates + take,
      skipped=jnp.where(sound, 0, state.skipped + 1),
    )
    return state, Report(stats, result.logprobs, ~sound, sound & (norm == 0))

  whole = rules.replicated(mesh)
  shardings = jax.tree.map(lambda x: x.sharding, state)
  return jax.jit(update, donate_argnums=0, out_shardings=(shardings, whole))
