"""References for the tests of the objectives: NumPy in float64, plain loops over tokens, written
from the formulas.

References never read masked tokens, so the values there cannot matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

ACCURACY = {'float32': 2e-5, 'float64': 1e-12}
SEGMENTS = 4


def packed(seed: int, *, extreme: bool = True) -> SimpleNamespace:
  """Returns three chunks of 20 tokens. Masked positions contain junk (NaN, ±infinity), except in
  the advantages.

  Chunk 0: a sequence with holes, a sequence of a single token, a fully masked one, one with zero
  advantages, and padding. Chunk 1: two fully masked sequences. Chunk 2: three sequences without
  padding, with advantages of either sign. `extreme` puts log ratios beyond ±20 into chunk 0 (the
  single token) and chunk 2.
  """
  rng = np.random.default_rng(seed)
  ids = np.array(
    [
      [1] * 7 + [2] + [3] * 4 + [4] * 5 + [0] * 3,
      [1] * 9 + [2] * 6 + [0] * 5,
      [1] * 5 + [2] * 9 + [3] * 6,
    ]
  )
  mask = np.zeros(ids.shape, bool)
  mask[0, [1, 2, 5, 6, 7, 13, 14, 15, 16]] = True
  mask[2] = rng.uniform(size=20) < 0.8
  mask[2, [0, 8, 15, 17]] = True

  def draw(scale):
    return rng.normal(size=ids.shape) * scale

  logprobs = -np.abs(draw(2.0)) - 0.05
  proximal, behaviour, reference = logprobs + draw(0.3), logprobs + draw(0.3), logprobs + draw(0.8)
  advantages = np.where(mask, draw(1.5), 0.0)
  advantages[0, 12:17] = 0.0
  if extreme:
    proximal[0, 7], behaviour[0, 7] = logprobs[0, 7] - 25.0, logprobs[0, 7] + 30.0
    proximal[2, [0, 8, 15]] = logprobs[2, [0, 8, 15]] + [-25.0, 31.0, -22.0]
    advantages[2, [0, 8, 15]] = [-1.0, -1.0, -0.5]
    # At position 17, the ratio exp(20) meets a positive advantage, so the clip limits it.
    proximal[2, 17], advantages[2, 17] = logprobs[2, 17] - 40.0, 2.0
  values, old_values, returns = draw(1.0), draw(1.0), draw(2.0)
  arrays = dict(logprobs=logprobs, proximal=proximal, behaviour=behaviour, reference=reference)
  arrays |= dict(values=values, old_values=old_values, returns=returns)
  junk = np.resize([np.nan, np.inf, -np.inf], ids.shape)
  arrays = {name: np.where(mask, x, junk) for name, x in arrays.items()}
  return SimpleNamespace(**arrays, advantages=advantages, mask=mask, ids=ids)


def replaced(batch: SimpleNamespace, **arrays) -> SimpleNamespace:
  return SimpleNamespace(**{**vars(batch), **arrays})


def on_device(batch: SimpleNamespace, dtype: str = 'float64') -> SimpleNamespace:
  def place(x):
    return jnp.asarray(x, dtype if x.dtype.kind == 'f' else x.dtype)

  return SimpleNamespace(**{name: place(x) for name, x in vars(batch).items()})


def evaluate(function: Callable, batch: SimpleNamespace, *, dtype: str):
  """Returns `function` of the batch on the device, computed in the given precision. Asserts that
  all float results have that precision.
  """
  with jax.enable_x64(True):
    found = function(on_device(batch, dtype))
    assert all(
      x.dtype == dtype for x in jax.tree.leaves(found) if jnp.issubdtype(x.dtype, jnp.floating)
    )
    return jax.tree.map(np.asarray, found)


def gradient_of(loss: Callable, batch: SimpleNamespace, name: str) -> np.ndarray:
  """Returns jax.grad of `loss(batch on the device)` with respect to one array, in float64."""
  with jax.enable_x64(True):
    there = on_device(batch)
    return np.asarray(jax.grad(lambda x: loss(replaced(there, **{name: x})))(getattr(there, name)))


def assert_gradient(
  loss: Callable, reference: Callable, batch: SimpleNamespace, name: str
) -> np.ndarray:
  """Compares the gradient of `loss` with respect to one array with central differences of
  `reference(batch of NumPy arrays)`.

  `reference` must hold constant what `loss` applies a stop-gradient to. Returns the gradient.
  """
  at, step = getattr(batch, name), 1e-6
  wanted = np.zeros(at.shape)
  for index in np.ndindex(*at.shape):
    shifted = [at.copy(), at.copy()]
    shifted[0][index] += step
    shifted[1][index] -= step
    up, down = (reference(replaced(batch, **{name: x})) for x in shifted)
    wanted[index] = (up - down) / (2 * step)
  found = gradient_of(loss, batch, name)
  np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)
  return found


def each(mask: np.ndarray, function: Callable[[tuple[int, int]], float]) -> np.ndarray:
  """Returns an array with `function(position)` where `mask` is True, and 0 elsewhere."""
  out = np.zeros(mask.shape)
  for at in zip(*np.nonzero(mask)):
    out[at] = function(at)
  return out


def clamp(x: float, low: float, high: float) -> float:
  return min(max(x, low), high)


def sequence(mask: np.ndarray, ids: np.ndarray, at: tuple[int, int]) -> list[tuple[int, int]]:
  """Returns the positions of the valid tokens in the sequence of the token at `at`."""
  row = at[0]
  return [(row, t) for t in range(ids.shape[1]) if mask[row, t] and ids[row, t] == ids[at]]


def mean_difference(first, second, mask, ids, at) -> float:
  members = sequence(mask, ids, at)
  return sum(first[m] - second[m] for m in members) / len(members)


def token_log_ratio(logprobs, proximal, mask, *, limit=20.0):
  return each(mask, lambda at: clamp(logprobs[at] - proximal[at], -limit, limit))


def sequence_log_ratio(logprobs, proximal, mask, ids, *, limit=10.0, held=None):
  """Returns the sequence log ratio of each token. `held`: logprobs under the stop-gradients. If
  None, they are `logprobs`.
  """
  held = logprobs if held is None else held

  def value(at):
    return logprobs[at] - held[at] + mean_difference(held, proximal, mask, ids, at)

  return each(mask, lambda at: min(value(at), limit))


def clipped_surrogate(log_ratio, advantages, mask, *, low, high, c):
  """Returns (loss, clipped, clipped_lower). The last two are 0 or 1."""

  def one(at):
    ratio, advantage = math.exp(log_ratio[at]), advantages[at]
    plain, clipped = -ratio * advantage, -clamp(ratio, 1 - low, 1 + high) * advantage
    loss = max(plain, clipped)
    lower = c is not None and advantage < 0 and loss > -c * advantage
    return -c * advantage if lower else loss, float(clipped > plain), float(lower)

  return tuple(each(mask, lambda at, i=i: one(at)[i]) for i in range(3))


def cispo(log_ratio, logprobs, advantages, mask, *, low, high):
  """Returns (loss, clipped). The weight is computed from `log_ratio`, which the caller holds
  constant.
  """

  def weight(at):
    return clamp(math.exp(log_ratio[at]), 1 - low, 1 + high)

  def cut(at):
    return float(not 1 - low <= math.exp(log_ratio[at]) <= 1 + high)

  return each(mask, lambda at: -weight(at) * advantages[at] * logprobs[at]), each(mask, cut)


def sapo(log_ratio, advantages, mask, *, tau_pos, tau_neg):
  def one(at):
    tau = tau_pos if advantages[at] > 0 else tau_neg
    return (
      -4 / tau / (1 + math.exp(min(-tau * (math.exp(log_ratio[at]) - 1), 700.0))) * advantages[at]
    )

  return each(mask, one)


def kl_estimate(logprobs, reference, mask, *, kind):
  def one(at):
    d = logprobs[at] - reference[at]
    if kind == 'k1':
      return d
    if kind == 'k2':
      return d * d / 2
    x = clamp(-d, -20.0, 20.0)
    return clamp(math.exp(x) - x - 1, -10.0, 10.0)

  return each(mask, one)


def value_loss(values, old_values, returns, mask, *, cliprange):
  """Returns (loss, clipped)."""

  def one(at):
    v, old, target = values[at], old_values[at], returns[at]
    plain = (v - target) ** 2
    near = (
      plain if cliprange is None else (clamp(v, old - cliprange, old + cliprange) - target) ** 2
    )
    return max(plain, near) / 2, float(near > plain)

  return tuple(each(mask, lambda at, i=i: one(at)[i]) for i in range(2))


def importance_weights(proximal, behaviour, mask, ids, *, mode, threshold, lower=None):
  def one(at):
    members = sequence(mask, ids, at) if mode == 'sequence' else [at]
    weight = math.exp(clamp(sum(proximal[m] - behaviour[m] for m in members), -20.0, 20.0))
    if mode == 'icepop':
      return weight if (0.5 if lower is None else lower) <= weight <= threshold else 0.0
    return max(min(weight, threshold), 0.0 if lower is None else lower)

  return np.where(mask, each(mask, one), 1.0)


def sequence_mask(proximal, behaviour, mask, ids, *, low, high):
  def inside(at):
    return low <= math.exp(mean_difference(proximal, behaviour, mask, ids, at)) <= high

  return ~mask | (each(mask, inside) > 0)


def negative_sequence_mask(old, new, advantages, mask, ids, *, threshold):
  def drop(at):
    return advantages[at] < 0 and mean_difference(old, new, mask, ids, at) > threshold

  return ~(each(mask, drop) > 0)


def pair_differences(values, pair, label) -> dict[int, float]:
  """Returns the chosen value minus the rejected value of each complete pair, keyed by the pair's
  number.
  """
  sides: dict[int, dict[int, float]] = {}
  for value, p, side in zip(values.ravel(), pair.ravel(), label.ravel()):
    if p:
      sides.setdefault(int(p), {})[int(side)] = value
  return {p: both[1] - both[-1] for p, both in sides.items() if len(both) == 2}


def log_sigmoid(x: float) -> float:
  return min(x, 0.0) - math.log1p(math.exp(-abs(x)))


def dpo_loss(h, *, beta, label_smoothing, kind):
  if kind == 'ipo':
    return np.array([(x - 1 / (2 * beta)) ** 2 for x in h])
  e = label_smoothing
  return np.array([-(1 - e) * log_sigmoid(beta * x) - e * log_sigmoid(-beta * x) for x in h])
