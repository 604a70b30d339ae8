"""Checks the sign of the KL gradient, on a policy whose KL to its reference is known exactly.

This policy is a single distribution over a few symbols, and so is the reference. Symbols are
sampled from the policy, and the algorithm's own loss is computed on their logprobs, with advantages
of zero. The gradient of this loss is computed twice: with the reference, and with the policy itself
in place of the reference. The difference of the two gradients is the contribution of the reference.
A small step against this difference must lower the exact KL.

An algorithm may instead subtract a KL penalty from the reward. This penalty is checked on the
advantages that the algorithm computes for a batch. Both checks work for any algorithm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_llm.app.doctor.findings import Finding, failure, ok, warning
from jaxrl_llm.batching.chunks import Chunks, shapes
from jaxrl_llm.batching.plan import Row
from jaxrl_llm.learner.algorithm import Algorithm, Closed, Constants
from jaxrl_llm.ops.logprobs import TokenLogprobs

_SYMBOLS = 8
_CHUNKS, _TIME = 16, 256
_LENGTH = 4
"""Number of tokens of a sequence. The first one is the prompt."""
_SIZE = 0.2
"""Standard deviation of the difference between the logits of policy and reference. It is small, so
that the gradients of all KL estimators point in similar directions.
"""
_STEP = 1e-2
"""Euclidean length of the step against the gradient, in logits."""
_CLEAR = 0.2
"""Absolute cosine or correlation below which the sign may be due to sampling noise."""


class _World(NamedTuple):
  """A policy over symbols, its reference, and symbols sampled from the policy, in the arrays that a
  loss reads.
  """

  logits: Float[Array, 'symbols']
  reference: Float[Array, 'symbols']
  symbols: Int[Array, 'chunks time']
  chunks: Chunks

  def logprobs(self, logits: Float[Array, 'symbols']) -> Float[Array, 'chunks time']:
    return jnp.where(self.chunks.loss_mask, jax.nn.log_softmax(logits)[self.symbols], 0.0)

  def kl(self, logits: Float[Array, 'symbols']) -> Float[Array, '']:
    """Returns the exact KL of a policy to the reference, in nats per symbol."""
    log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(self.reference)
    return (jnp.exp(log_p) * (log_p - log_q)).sum()


def _world() -> _World:
  rng = np.random.Generator(np.random.Philox(key=17))
  logits = rng.normal(size=_SYMBOLS).astype(np.float32)
  reference = (logits + _SIZE * rng.normal(size=_SYMBOLS)).astype(np.float32)
  chances = np.exp(logits.astype(np.float64))
  symbols = rng.choice(_SYMBOLS, (_CHUNKS, _TIME), p=chances / chances.sum())
  per_chunk = _TIME // _LENGTH
  fields = {
    name: np.zeros(like.shape, like.dtype)
    for name, like in shapes(_CHUNKS, time=_TIME, segments=per_chunk).items()
  }
  places = np.arange(_TIME)
  fields['tokens'] = symbols.astype(np.int32)
  fields['positions'] += (places % _LENGTH).astype(np.int32)
  fields['segment_ids'] += (places // _LENGTH + 1).astype(np.int32)
  fields['loss_mask'] |= places % _LENGTH > 0
  fields['reported'] = fields['loss_mask']
  fields['temperature'] += 1
  world = _World(
    jnp.asarray(logits), jnp.asarray(reference), jnp.asarray(symbols), Chunks(**fields)
  )
  logprobs = np.asarray(world.logprobs(world.logits))
  chunks = world.chunks.replace(behaviour_logprobs=logprobs, proximal_logprobs=logprobs)
  return world._replace(chunks=jax.tree.map(jnp.asarray, chunks))


def kl_gradient(stage: str, algorithm: Algorithm, constants: Constants) -> Iterator[Finding]:
  """Checks that the terms of an algorithm that use the reference lower the KL to the reference.

  Args:
    stage: name of the stage that uses the algorithm.
    constants: scalars that the loss reads, as the algorithm computed them for a batch.
  """
  if 'reference' not in algorithm.reads or algorithm.head != 'lm':
    return
  world, check = _world(), f'kl_gradient {stage}'
  through_loss, effect = _of_loss(world, algorithm, constants)
  through_reward = (
    _of_reward(world, algorithm) if 'reference_logprobs' in algorithm.on_host else None
  )
  detail = dict(
    stage=stage, cosine=through_loss, kl_change=effect, reward_correlation=through_reward
  )
  measured = [value for value in (through_loss, through_reward) if value is not None]
  if not all(map(np.isfinite, measured)):
    yield failure(
      check, 'the gradient is not finite', 'look for log(0) and 0 / 0 in the loss', **detail
    )
  elif any(value < -_CLEAR for value in measured):
    where = 'loss' if through_loss is not None and through_loss < -_CLEAR else 'reward'
    yield failure(
      check,
      f'a step against the gradient drives the policy away from its reference: the KL of '
      f'the {where} has the wrong sign',
      'the penalty is + coef · KL(policy ‖ reference) in the loss, and − coef · '
      'log(policy/reference) in the reward',
      **detail,
    )
  elif any(value > _CLEAR for value in measured):
    effects = (
      [] if effect is None else [f'a step against the gradient lowers it by {-effect:.2g} nats']
    )
    effects += [] if through_reward is None else ['the penalty in the reward discourages it']
    yield ok(check, f'KL to the reference: {", ".join(effects)}', **detail)
  else:
    yield warning(
      check,
      'the reference has no effect on the gradient',
      'kl_loss_type k1 has none on average; use k2 or k3, or a coefficient above 0',
      **detail,
    )


def _of_loss(
  world: _World, algorithm: Algorithm, constants: Constants
) -> tuple[float | None, float | None]:
  """Measures the contribution of the reference to the gradient of the loss.

  Returns the cosine between this contribution and the gradient of the exact KL, and the change of
  the exact KL after a small step against the contribution. Both are None if the reference does not
  contribute.
  """
  values = {name: jnp.float32(constants.get(name, 0.0)) for name in algorithm.constants}

  def loss(logits, reference_logits):
    logprobs = world.logprobs(logits)
    reference = world.logprobs(reference_logits)
    chunks = world.chunks.replace(reference_logprobs=jax.lax.stop_gradient(reference))
    terms, _ = algorithm.loss(TokenLogprobs(logprobs, jnp.zeros_like(logprobs)), chunks, values)
    return sum(t.weight * t.numerator / jnp.maximum(t.denominator, 1.0) for t in terms.values())

  gradient = jax.jit(jax.grad(loss))
  with_it, without = gradient(world.logits, world.reference), gradient(world.logits, world.logits)
  part = np.asarray(with_it - without, np.float64)
  size = np.linalg.norm(part)
  if size == 0.0:
    return None, None
  exact = np.asarray(jax.grad(world.kl)(world.logits), np.float64)
  cosine = float(part @ exact / size / np.linalg.norm(exact))
  moved = world.logits - _STEP * jnp.asarray(part / size, jnp.float32)
  return cosine, float(world.kl(moved) - world.kl(world.logits))


def _of_reward(world: _World, algorithm: Algorithm) -> float | None:
  """Measures the contribution of the reference to the advantages.

  Returns the negated correlation between this contribution and the log ratio of policy and
  reference. It is positive if the advantages discourage deviation from the reference, and None if
  the reference does not contribute.
  """
  mask = np.asarray(world.chunks.loss_mask).reshape(-1, _LENGTH)
  policy = np.asarray(world.logprobs(world.logits)).reshape(-1, _LENGTH)
  other = np.asarray(world.logprobs(world.reference)).reshape(-1, _LENGTH)
  rows = [
    Row(
      uid=f'doctor/{i}',
      source='',
      index=i,
      length=_LENGTH,
      prompt_len=1,
      group=f'doctor/{i // 4}',
      reward=0.0,
      is_expert=False,
      truncated=False,
      version_step=0,
      correct=False,
    )
    for i in range(len(policy))
  ]
  zeros = np.zeros_like(policy)
  columns = dict(
    loss_mask=mask,
    behaviour_logprobs=policy,
    proximal_logprobs=policy,
    values=zeros,
    next_values=zeros,
  )

  def advantages(reference):
    given = {
      name: [*column] for name, column in (columns | {'reference_logprobs': reference}).items()
    }
    on_host = {name: given[name] for name in algorithm.on_host}
    annotation = algorithm.annotate(Closed(rows, 0, on_host, None))
    return np.stack([np.broadcast_to(a, _LENGTH) * m for a, m in zip(annotation.advantages, mask)])

  caused = (advantages(other) - advantages(policy))[mask]
  ratio = (policy - other)[mask].astype(np.float64)
  caused, ratio = caused - caused.mean(), ratio - ratio.mean()
  size = np.linalg.norm(caused) * np.linalg.norm(ratio)
  return float(-(caused @ ratio) / size) if size else None
