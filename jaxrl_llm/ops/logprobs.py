"""Logprobs, values and scores of tokens from hidden states. Logits `[batch, time, vocab]` are
materialised only for `token_chunk` positions of every row at a time.

Hidden state t predicts token t + 1. Only this module shifts tokens relative to hidden states.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxrl_llm.ops.reduce import segment_sums


class TokenLogprobs(NamedTuple):
  """Logprobs and entropies, aligned with tokens: entry t is for `tokens[t]` given `tokens[:t]`.
  Entries are 0 at padding, at the first token of a segment and at tokens that are not wanted.
  """

  logprobs: Float[Array, 'chunks time']
  entropy: Float[Array, 'chunks time']
  """Entry t is the entropy, in nats, of the model's distribution of the token at t."""


class TokenValues(NamedTuple):
  """Values before each token. Entry t is the value of the state `tokens[:t]`, before `tokens[t]`;
  it is 0 at the first token of a segment.
  """

  values: Float[Array, 'chunks time']


class StateValues(NamedTuple):
  """Values of every state of each segment, including the state after the last token."""

  values: Float[Array, 'chunks time']
  """Entry t is the value of the state `tokens[:t]`, as in `TokenValues`."""
  next_values: Float[Array, 'chunks time']
  """Entry t is the value of the state `tokens[:t + 1]`, after `tokens[t]`. It is 0 at padding."""


class SequenceScores(NamedTuple):
  """One score per segment, computed at the segment's last token; 0 for absent segments."""

  scores: Float[Array, 'chunks segments']


class TimeOrder(NamedTuple):
  """Order of the time axis of hidden states that differs from that of the tokens."""

  applied: Callable[[Shaped[Array, 'chunks time']], Shaped[Array, 'chunks time']]
  """Permutes rows from the order of the tokens to this order."""
  undone: Callable[[Shaped[Array, 'chunks time']], Shaped[Array, 'chunks time']]
  """Inverse of `applied`."""


class KernelShardings(NamedTuple):
  """Shardings of a head's kernel `[vocab, embed]` on a mesh."""

  stored: NamedSharding
  """Sharding of the parameter, and of its gradient."""
  used: NamedSharding
  """Sharding of the converted kernel in products with hidden states."""


def plan_token_chunk(
  *, chunks: int, time: int, vocab: int, budget_bytes: int, time_shards: int = 1
) -> int:
  """Returns the largest `token_chunk` (see `token_logprobs`) whose float32 logits fit in
  `budget_bytes`. The result is at least one position per time shard, even if the logits of these
  positions do not fit.

  Args:
    chunks: number of rows per device.
    time: number of positions in a whole row.
    vocab: vocabulary size per device, which is the size of the local shard if the vocabulary is
      sharded.
    budget_bytes: memory per device for the logits of `token_chunk` positions of every row.
    time_shards: as in `token_logprobs`.
  """
  part = time // time_shards
  fits = [n for n in range(1, part + 1) if part % n == 0 and chunks * n * vocab * 4 <= budget_bytes]
  return max(fits, default=1) * time_shards


def token_logprobs(
  hidden: Float[Array, 'chunks time embed'],
  kernel: Float[Array, 'vocab embed'],
  tokens: Int[Array, 'chunks time'],
  segment_ids: Int[Array, 'chunks time'],
  temperature: Float[Array, 'chunks time'],
  wanted: Bool[Array, 'chunks time'] | None = None,
  *,
  token_chunk: int,
  time_shards: int = 1,
  row_shards: int = 1,
  shardings: KernelShardings | None = None,
  order: TimeOrder | None = None,
) -> TokenLogprobs:
  """Computes the logprobs of the tokens under softmax(hidden @ kernel.T / temperature), and the
  entropy of this distribution.

  Positions are processed in chunks of `token_chunk` positions of every row. Logits are materialised
  for one chunk at a time, and recomputed in the backward pass. With `wanted`, the wanted positions
  are gathered first, and only as many chunks are computed as these positions fill. If memory
  allows, one chunk for all positions is preferable: a compiler that sees both passes then computes
  the logits only once. If the vocabulary axis of `kernel` is sharded, the logits are sharded
  likewise, and devices exchange only maxima, sums and the targets' logits.

  Statistics are computed in at least float32, regardless of the dtype of `hidden`. `hidden` and
  `kernel` have gradients, but the temperature has none.

  Args:
    hidden: states after the final norm. State t predicts token t + 1.
    kernel: the unembedding, `[vocab, embed]`.
    tokens: tokens to score.
    segment_ids: segment of each token; 0 for padding. The first token of each segment has no
      logprob, and its entry is 0.
    temperature: for each token, the temperature of its sample. Logits are divided by the
      temperature.
    wanted: tokens whose logprobs and entropies are computed; the entries of all other tokens are 0.
      If None, all are computed.
    token_chunk: number of positions that are computed at a time. It must divide `time`.
    time_shards: number of equal contiguous shards of time over devices. It must divide
      `token_chunk`. A chunk consists of equally many positions of each shard, so that no data move
      between shards.
    row_shards: number of shards of the rows over devices. It must divide the number of rows. The
      kernel's gradient is summed over row and time shards once, after all chunks, instead of in
      every chunk.
    shardings: shardings of the kernel on a mesh; None without a mesh. Devices gather the kernel
      after its conversion to the dtype of `hidden`, and each receives only its shard of the
      gradient.
    order: order of the time axis of `hidden`; None if it is that of the tokens. All other arguments
      and the results are in the order of the tokens.
  """
  rows, time = tokens.shape
  arranged, natural = order or (lambda x: x, lambda x: x)
  _check_shards(rows, time, token_chunk, time_shards, row_shards)
  parts = _Parts(rows, time, row_shards, time_shards)

  def following(x):
    return parts.split(arranged(jnp.roll(x, -1, axis=1)))

  states, targets, scale = parts.split(hidden), following(tokens), following(temperature)
  chunks, positions = time // token_chunk, token_chunk // time_shards * (rows // row_shards)
  split = _Split(positions, shardings)
  if wanted is None or chunks == 1:
    results = _head(split, states, kernel, targets, scale, jnp.int32(chunks))
  else:
    results = _wanted_first(split, states, kernel, targets, scale, following(wanted))
  aligned = (_delayed(natural(parts.join(x)), segment_ids) for x in results)
  return TokenLogprobs(*(x if wanted is None else jnp.where(wanted, x, 0.0) for x in aligned))


def _check_shards(
  rows: int, time: int, token_chunk: int, time_shards: int, row_shards: int
) -> None:
  if time % token_chunk:
    raise ValueError(f'token_chunk {token_chunk} does not divide the {time} positions of a chunk')
  if token_chunk % time_shards:
    raise ValueError(
      f'time_shards {time_shards} does not divide token_chunk {token_chunk}; a chunk has equally '
      'many positions of each shard'
    )
  if rows % row_shards:
    raise ValueError(f'row_shards {row_shards} does not divide the {rows} rows')


class _Parts(NamedTuple):
  """Division of `[rows, time]` into equal contiguous parts, which are the shards over devices."""

  rows: int
  time: int
  row_shards: int
  time_shards: int

  @property
  def _cut(self) -> tuple[int, int, int, int]:
    return (
      self.row_shards,
      self.rows // self.row_shards,
      self.time_shards,
      self.time // self.time_shards,
    )

  def split(self, x):
    """Converts `[rows, time, ...]` to `[row part, time part, position, ...]`."""
    shape = (self.row_shards, self.time_shards, -1, *x.shape[2:])
    return x.reshape(*self._cut, *x.shape[2:]).swapaxes(1, 2).reshape(shape)

  def join(self, x):
    """Converts `[row part, time part, position]` back to `[rows, time]`."""
    row_shards, rows, time_shards, time = self._cut
    x = x.reshape(row_shards, time_shards, rows, time)
    return x.swapaxes(1, 2).reshape(self.rows, self.time)


class _Split(NamedTuple):
  """Division of the work of `_head` over chunks and devices."""

  positions: int
  """Number of positions that a chunk contains from each part (see `_Parts`)."""
  shardings: KernelShardings | None

  def gathered(self, kernel, dtype):
    """Returns the kernel in `dtype`, sharded for products with hidden states."""
    converted = kernel.astype(dtype)
    if self.shardings is None:
      return converted

    def used(x):
      return _sharded(x, self.shardings.used)

    # Without the inner constraint, XLA:GPU would gather the kernel before the conversion, which
    # moves more bytes.
    return jax.lax.platform_dependent(
      converted, tpu=used, default=lambda x: used(_sharded(x, self.shardings.stored))
    )

  def summed(self, parts):
    """Returns the sum of the parts `[part, embed, vocab]` of the kernel's gradient, sharded like
    the parameter.

    On some slices, such as v5e:4x4, the TPU compiler turns this sum into an all-reduce, whose
    result has the size of the whole kernel. On TPUs, it is therefore computed for one block of the
    vocabulary at a time.
    """
    if self.shardings is None:
      return parts.sum(0)
    stored = self.shardings.stored

    def summed(parts):
      return _sharded(parts.sum(0).T, stored).T

    def in_blocks(parts):
      start = _sharded(jnp.zeros(parts.shape[:0:-1], parts.dtype), stored).T
      return _by_blocks(summed, parts, start)

    vocab_is_sharded = stored.spec[0] is not None
    tpu = summed if vocab_is_sharded else in_blocks
    return jax.lax.platform_dependent(parts, tpu=tpu, default=summed)

  def summed_first(self, d_hidden, d_kernel, *, once: bool):
    """Returns both gradients. On TPUs, and on GPUs if all tokens are computed at `once`, the
    kernel's gradient is summed over the devices before the gradient of the hidden states is used.

    Otherwise, the TPU compiler sums the kernel's gradient only after the backward pass of all
    layers. Until then, each device keeps the sum over its tokens, which has the size of the whole
    kernel. The GPU compiler even computes a single chunk's product only then, and no other product
    is left beside which the sum over the devices could run.
    """
    if self.shardings is None:
      return d_hidden, d_kernel

    def first(*gradients):
      return jax.lax.optimization_barrier(gradients)

    def unordered(*gradients):
      return gradients

    cuda = first if once else unordered
    return jax.lax.platform_dependent(d_hidden, d_kernel, tpu=first, cuda=cuda, default=unordered)


_sharded = jax.lax.with_sharding_constraint
_BLOCKS, _LANES = 8, 128
"""Number of blocks in `_by_blocks`. Their size is rounded up to a multiple of the number of lanes
of a TPU's vector registers.
"""


def _by_blocks(function, x, start):
  """Returns `function(x)`, computed for blocks of the last axis of `x`, one block after the other.

  Args:
    function: function that treats the elements of the last axis independently, and whose result has
      a last axis of the same size.
    start: array with the shape and dtype of the result. Its elements are not used.
  """
  width = x.shape[-1]
  size = min(width, -(-width // (_BLOCKS * _LANES)) * _LANES)

  def block(i, result):
    # The last block begins earlier if it would not be full.
    place = jnp.minimum(i * size, width - size)
    part = function(jax.lax.dynamic_slice_in_dim(x, place, size, axis=-1))
    return jax.lax.dynamic_update_slice_in_dim(result, part, place, axis=-1)

  return jax.lax.fori_loop(0, -(-width // size), block, start)


def _wanted_first(split, states, kernel, targets, temperature, wanted):
  """Moves the wanted positions of each part to the front of the part, and calls `_head` for the
  chunks that contain wanted positions. Returns the results of `_head` in the original order.
  """
  order = jnp.argsort(~wanted, axis=-1, stable=True)
  places = jnp.argsort(order, axis=-1)

  def first(x):
    return jnp.take_along_axis(x, order, axis=-1)

  used = -(-wanted.sum(-1).max() // split.positions)
  results = _head(
    split, _moved(states, order, places), kernel, first(targets), first(temperature), used
  )
  return (jnp.take_along_axis(x, places, axis=-1) for x in results)


def token_values(
  hidden: Float[Array, 'chunks time embed'],
  kernel: Float[Array, 'one embed'],
  segment_ids: Int[Array, 'chunks time'],
) -> TokenValues:
  """Computes the value before each token, hidden · kernel at the previous position, in at least
  float32.
  """
  return TokenValues(_delayed(_scalar(hidden, kernel), segment_ids))


def state_values(
  hidden: Float[Array, 'chunks time embed'],
  kernel: Float[Array, 'one embed'],
  segment_ids: Int[Array, 'chunks time'],
) -> StateValues:
  """Computes the values before and after each token, as hidden · kernel in at least float32."""
  after = _scalar(hidden, kernel)
  return StateValues(_delayed(after, segment_ids), jnp.where(segment_ids > 0, after, 0.0))


def sequence_scores(
  hidden: Float[Array, 'chunks time embed'],
  kernel: Float[Array, 'one embed'],
  segment_ids: Int[Array, 'chunks time'],
  *,
  segments: int,
) -> SequenceScores:
  """Computes hidden · kernel at each segment's last token, in at least float32.

  Args:
    segments: upper bound on the number of segments in a row.
  """
  last = (segment_ids > 0) & (segment_ids != jnp.roll(segment_ids, -1, axis=1))
  last = last.at[:, -1].set(segment_ids[:, -1] > 0)
  return SequenceScores(
    segment_sums(jnp.where(last, _scalar(hidden, kernel), 0.0), segment_ids, segments=segments)
  )


def _scalar(hidden, kernel):
  return jnp.einsum(
    'cte,oe->ct', hidden, kernel.astype(hidden.dtype), preferred_element_type=_wide(hidden)
  )


def _delayed(x, segment_ids):
  """Shifts entry t - 1 to t within each segment. The result is 0 at the first token of a segment
  and at padding.
  """
  continues = (segment_ids > 0) & (segment_ids == jnp.roll(segment_ids, 1, axis=1))
  continues &= jnp.arange(segment_ids.shape[1]) > 0
  return jnp.where(continues, jnp.roll(x, 1, axis=1), 0.0)


@jax.custom_vjp
def _moved(states, order, places):
  """Reorders the states of each part by `order`. `places` is the inverse permutation, by which the
  backward pass gathers the gradients instead of scattering them.
  """
  return jnp.take_along_axis(states, order[..., None], axis=2)


_moved.defvjp(
  lambda states, order, places: (_moved(states, order, places), places),
  lambda places, moved: (jnp.take_along_axis(moved, places[..., None], axis=2), None, None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _head(split, hidden, kernel, targets, temperature, used):
  """Returns the logprobs of `targets` and the entropies, both `[row part, time part, position]`
  like `targets`.

  `hidden` is `[row part, time part, position, embed]`. Each of the `used` chunks computes
  `split.positions` positions per part. The results of all other positions are 0.

  Let p be the softmax of the logits z = hidden · kernel / T, and H = -Σ p · log p its entropy. The
  derivative of log p[target] with respect to z is onehot(target) - p, as in any softmax
  cross-entropy. The derivative of H is -p · (log p + H), because ∂p[i] / ∂z[j] = p[i] · (δ[i, j] -
  p[j]). With cotangents g of the logprobs and h of the entropies, it follows that

    d(hidden · kernel) = (g · (onehot(target) - p) - h · p · (log p + H)) / T.

  Besides the arguments, with the kernel in the dtype of `hidden`, the only residuals are therefore
  each token's log-normalizer and H. Logits are recomputed, as in arXiv:2411.09009.
  """
  return _head_forward(split, hidden, kernel, targets, temperature, used)[0]


def _head_forward(split, hidden, kernel, targets, temperature, used):
  positions, compute = split.positions, split.gathered(kernel, hidden.dtype)

  def chunk(i, results):
    states, target, scale = _chunk((hidden, targets, temperature), i, positions)
    logits = _logits(states, compute, scale)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    logp = logits - normalizer[:, None]
    # If the vocabulary is sharded, a comparison and a sum are computed locally on each shard,
    # whereas a gather might not be.
    chosen = jnp.where(_is_target(logits, target), logits, 0.0).sum(-1)
    return _with_chunk(
      results, (chosen - normalizer, -(jnp.exp(logp) * logp).sum(-1), normalizer), i, positions
    )

  start = (jnp.zeros(targets.shape, _wide(hidden)),) * 3
  logprobs, entropy, normalizer = _repeat(used, chunk, start, once=positions == targets.shape[-1])
  # An empty array passes the kernel's dtype to the backward pass, because residuals must be arrays.
  kept = hidden, compute, jnp.empty(0, kernel.dtype), targets, temperature, used
  return (logprobs, entropy), (*kept, normalizer, entropy)


def _head_backward(split, kept, cotangents):
  hidden, compute, like, targets, temperature, used, *kept = kept
  positions = split.positions
  per_token = (targets, temperature, *kept, *(g / temperature for g in cotangents))

  def chunk(i, sums):
    d_hidden, d_kernel = sums
    states, target, scale, *rest = _chunk((hidden, *per_token), i, positions)
    normalizer, entropy, by_logprob, by_entropy = (x[:, None] for x in rest)
    logp = _logits(states, compute, scale) - normalizer
    d_logits = jnp.where(_is_target(logp, target), by_logprob, 0.0)
    d_logits = (d_logits - jnp.exp(logp) * (by_logprob + by_entropy * (logp + entropy))).astype(
      hidden.dtype
    )
    d_states = jnp.einsum('tv,ve->te', d_logits, compute, preferred_element_type=d_kernel.dtype)

    def by_part(x):
      return x.reshape(len(d_kernel), -1, x.shape[-1])

    d_kernel += jnp.einsum(
      'pte,ptv->pev', by_part(states), by_part(d_logits), preferred_element_type=d_kernel.dtype
    )
    return (*_with_chunk((d_hidden,), (d_states,), i, positions), d_kernel)

  # Accumulate the kernel's gradient as [embed, vocab], with the vocabulary last as in d_logits, so
  # that only the final sum needs a transposition. Until then, each part has a separate sum.
  start = jnp.zeros((math.prod(targets.shape[:2]), *compute.shape[::-1]), _wide(hidden))
  once = positions == targets.shape[-1]
  d_hidden, d_kernel = _repeat(used, chunk, (jnp.zeros_like(hidden), start), once=once)
  d_kernel = split.summed(d_kernel).T.astype(like.dtype)
  return *split.summed_first(d_hidden, d_kernel, once=once), None, None, None


_head.defvjp(_head_forward, _head_backward)


def _repeat(used, chunk, start, *, once: bool):
  """Runs the used chunks in sequence. A single chunk is run without a loop, so that compilers can
  reuse its logits in the backward pass.
  """
  return chunk(0, start) if once else jax.lax.fori_loop(0, used, chunk, start)


def _chunk(arrays, i, positions):
  """Returns chunk `i` of arrays `[row part, time part, position, ...]`. The positions of all parts
  are joined in the first axis of each result.
  """

  def part(x):
    return jax.lax.dynamic_slice_in_dim(x, i * positions, positions, axis=2)

  return [part(x).reshape(-1, *x.shape[3:]) for x in arrays]


def _with_chunk(arrays, chunks, i, positions):
  """Returns the arrays with chunk `i` replaced by `chunks`. This is the inverse of `_chunk`."""

  def part(x, chunk):
    return chunk.reshape(*x.shape[:2], positions, *x.shape[3:]).astype(x.dtype)

  def place(x, chunk):
    return jax.lax.dynamic_update_slice_in_dim(x, part(x, chunk), i * positions, axis=2)

  return tuple(place(x, chunk) for x, chunk in zip(arrays, chunks, strict=True))


def _logits(states, kernel, temperature):
  return (
    jnp.einsum('te,ve->tv', states, kernel, preferred_element_type=_wide(states))
    / temperature[..., None]
  )


def _is_target(logits, target):
  return jnp.arange(logits.shape[-1]) == target[..., None]


def _wide(x):
  return jnp.promote_types(x.dtype, jnp.float32)
