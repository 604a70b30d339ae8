"""Expected gradients by enumeration: the policy is so small that the sum runs over every batch it
can sample, in float64.

Nothing is sampled, so numbers that should be equal are equal up to rounding. `python
tests/support/enumeration.py` updates the tables and the examples of docs/reference/algorithms.md.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from fixtures import own_algorithm
from paths import FIXTURES, ROOT

from jaxrl_llm.advantages import tokens as by_token
from jaxrl_llm.batching.chunks import Chunks
from jaxrl_llm.batching.packing import pack
from jaxrl_llm.batching.plan import Row
from jaxrl_llm.learner.algorithm import Algorithm, Annotation, Closed, Constants, Setting
from jaxrl_llm.learner.catalogue import ALGORITHMS
from jaxrl_llm.ops.logprobs import token_logprobs

DOCUMENT = ROOT / 'docs' / 'reference' / 'algorithms.md'

VOCAB, END = 3, 0
RESPONSES = ((0,), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2))
"""All possible responses. Token 0 ends a response, and a response is cut after two tokens. The
prompt is one token, 0.
"""
REWARDS = (0.4, 1.7, -0.6, 0.1, 0.9, -1.3, 2.2)
CRITIC = (0.5, 0.2, 0.7)
"""Value of each prefix, keyed by the last token of the prefix."""
LONGEST = 3
"""Maximum number of tokens of a prompt and its response."""
CHUNKS, CHUNK_LEN, SEGMENTS = 2, 6, 3

# Logits `[prefix, token]`. The prefixes are: the prompt, token 1, token 2.
POLICY = np.array([[0.2, -0.4, 0.5], [0.3, 0.8, -0.9], [-0.2, 0.6, 0.1]])
OTHER = np.array([[-0.5, 0.4, 0.6], [0.9, -0.1, -0.3], [0.5, 0.2, -0.6]])
REFERENCE = np.array([[0.6, 0.1, -0.3], [-0.4, 0.5, 0.4], [0.1, -0.5, 0.8]])


class Policies(NamedTuple):
  """Logits of four policies: the updated policy, the policy that sampled, the proximal policy, and
  the reference.
  """

  policy: np.ndarray
  behaviour: np.ndarray
  proximal: np.ndarray
  reference: np.ndarray


ON_POLICY = Policies(POLICY, POLICY, POLICY, REFERENCE)
"""The first update on fresh samples."""
STALE = Policies(POLICY, OTHER, POLICY, REFERENCE)
"""The first update on samples of another policy. The off-policy correction is active, and no ratio
is clipped.
"""
MOVED = Policies(POLICY, OTHER, OTHER, REFERENCE)
"""A later update on fresh samples, or an update with `bypass_old_logprobs`. Ratios may be clipped,
and no off-policy correction is needed.
"""


def catalogue(name: str, **options: Any) -> Algorithm:
  kind, make = ALGORITHMS[name]
  return make(kind(**options), Setting(max_response_length=2))


def reinforce(**options: Any) -> Algorithm:
  """Returns the algorithm of the example in docs/reference/algorithms.md."""
  kind, make = own_algorithm.ALGORITHM
  return make(kind(**options), Setting(max_response_length=2))


def penalised(kind: by_token.Estimator, coef: float) -> Algorithm:
  """Returns REINFORCE on the returns-to-go of the reward minus a KL penalty at each token."""

  def annotate(closed: Closed) -> Annotation:
    names = ('loss_mask', 'proximal_logprobs', 'reference_logprobs')
    advantages = []
    for row, mask, own, reference in zip(
      closed.rows, *(closed.tokens[name] for name in names), strict=True
    ):
      penalty = by_token.kl_penalty(own, reference, mask, kind=kind, coef=coef)
      advantages.append(
        by_token.token_returns(by_token.place_rewards(mask, row.reward) + penalty, mask, gamma=1.0)
      )
    return Annotation(advantages, np.ones(len(closed.rows), bool), {})

  reads = frozenset({'proximal', 'reference'})
  on_host = frozenset({'loss_mask', 'proximal_logprobs', 'reference_logprobs'})
  return reinforce()._replace(annotate=annotate, reads=reads, on_host=on_host)


Group = tuple[int, ...]
"""Indices of a group's responses in RESPONSES."""


def batches(groups: int, size: int) -> Iterator[tuple[tuple[Group, ...], int]]:
  """Yields every batch without regard to order, with its number of orderings: of the groups, and of
  the samples of each group.
  """
  members = list(itertools.combinations_with_replacement(range(len(RESPONSES)), size))
  for batch in itertools.combinations_with_replacement(members, groups):
    yield batch, _orders(batch) * math.prod(_orders(group) for group in batch)


def _orders(items: Sequence[Any]) -> int:
  return math.factorial(len(items)) // math.prod(math.factorial(n) for n in Counter(items).values())


def expected_gradient(algorithm: Algorithm, policies: Policies, **options: Any) -> np.ndarray:
  """Returns `expected_gradients` for one setting."""
  (found,) = expected_gradients(algorithm, [policies], **options)
  return found


def expected_gradients(
  algorithm: Algorithm,
  settings: Sequence[Policies],
  *,
  groups: int = 1,
  size: int = 2,
  terms: Collection[str] | None = None,
) -> np.ndarray:
  """Returns E[∇ loss] with respect to the policy's logits, in each setting. The expectation is over
  all batches of `groups` groups of `size` samples.

  Each batch goes through `algorithm.annotate`, is packed, and goes through `algorithm.loss`, as in
  an update with one micro-batch. `terms`: names of the loss terms that count. If None, all terms
  count.
  """
  if algorithm.reference.every == 1:
    settings = [policies._replace(reference=policies.proximal) for policies in settings]
  listed, orders = zip(*batches(groups, size))
  parts, weights, annotated = [], [], None
  for policies in settings:
    columns = _columns(policies)
    if annotated is None or any(name.endswith('_logprobs') for name in algorithm.on_host):
      annotated = _annotated(algorithm, listed, columns)
    logprobs = columns['behaviour_logprobs'].sum(1)
    chances = orders * np.exp([logprobs[list(sum(batch, ()))].sum() for batch in listed])
    assert math.isclose(chances.sum(), 1.0, rel_tol=1e-12)
    parts.append(_packed(listed, columns, annotated))
    weights.append(chances)

  # JAX compiles each operation once per array size. All arrays are therefore filled up to one size,
  # with batches of weight 0.
  def filled_up(leaves):
    return np.resize(np.concatenate(leaves), (MOST, *leaves[0].shape[1:]))

  setting = filled_up([np.full(len(listed), number) for number in range(len(settings))])
  tables = np.resize([policies.policy for policies in settings], (3, *POLICY.shape))

  def expected(tables):
    def one(number, chunks):
      return _loss(algorithm, tables[number], chunks, annotated.constants, terms)

    return (weight * jax.vmap(one)(setting, chunks)).sum()

  with jax.enable_x64(True):
    chunks = jax.tree.map(lambda *leaves: jnp.asarray(filled_up(leaves)), *parts)
    weight = jnp.pad(np.concatenate(weights), (0, MOST - len(listed) * len(settings)))
    return np.asarray(jax.grad(expected)(jnp.asarray(tables)))[: len(settings)]


def _loss(
  algorithm: Algorithm, table, chunks: Chunks, constants: Constants, terms: Collection[str] | None
):
  # The prompt's token is 0, like the end token, after which nothing is predicted. The last token
  # therefore identifies the prefix.
  hidden = jax.nn.one_hot(chunks.tokens, VOCAB, dtype=table.dtype)
  ones = jnp.ones(chunks.tokens.shape, table.dtype)
  outputs = token_logprobs(
    hidden, table.T, chunks.tokens, chunks.segment_ids, ones, token_chunk=CHUNK_LEN
  )
  found, _ = algorithm.loss(outputs, chunks, constants)
  chosen = [term for name, term in found.items() if terms is None or name in terms]
  return sum(
    t.weight * t.numerator / jnp.where(t.denominator > 0, t.denominator, 1.0) for t in chosen
  )


class Annotated(NamedTuple):
  """Annotations of many batches, padded to the longest row."""

  advantages: np.ndarray
  """Array `[batches, rows, LONGEST]`."""
  in_loss: np.ndarray
  """Array `[batches, rows]`."""
  constants: Constants


def _annotated(
  algorithm: Algorithm, listed: Sequence[tuple[Group, ...]], columns: Columns
) -> Annotated:
  advantages, in_loss, constants = [], [], {}
  for batch in listed:
    members = [(f'g{number}', i) for number, group in enumerate(batch) for i in group]
    rows = [_row(number, group, i) for number, (group, i) in enumerate(members)]
    tokens = {
      name: [columns[name][i, : row.length] for row, (_, i) in zip(rows, members)]
      for name in algorithm.on_host
    }
    found = algorithm.annotate(Closed(rows, 0, tokens, None))
    own = np.zeros((len(rows), LONGEST))
    for row, advantage, line in zip(rows, found.advantages, own, strict=True):
      line[: row.length] = advantage
    advantages.append(own)
    in_loss.append(found.in_loss)
    constants = found.constants
  return Annotated(np.array(advantages), np.array(in_loss), constants)


MOST = 3 * sum(1 for _ in batches(2, 2))
"""Maximum number of batches in one sum: all batches of two groups of two samples, in three
settings.
"""


@functools.cache
def _row(number: int, group: str, i: int) -> Row:
  response = RESPONSES[i]
  return Row(
    uid=f's/{number}',
    source='rows.arrayrecord',
    index=number,
    length=1 + len(response),
    prompt_len=1,
    group=group,
    reward=REWARDS[i],
    is_expert=False,
    truncated=response[-1] != END,
    version_step=0,
  )


def _packed(listed: Sequence[tuple[Group, ...]], columns: Columns, annotated: Annotated) -> Chunks:
  """Returns the batches in the form that an update gets: arrays `[batches, chunks, ...]`."""
  members = np.array([sum(batch, ()) for batch in listed])
  places = [_places(tuple(1 + len(RESPONSES[i]) for i in own)) for own in members]
  row, position = np.array([p.row for p in places]), np.array([p.position for p in places])
  batch = np.arange(len(listed))[:, None, None]
  there = row >= 0

  def of_response(name):
    return np.where(there, columns[name][members[batch, row], position], 0)

  mask = of_response('loss_mask').astype(bool) & annotated.in_loss[batch, row]
  per_token = {name: of_response(name) for name in columns if name != 'loss_mask'}
  per_segment = (len(listed), CHUNKS, SEGMENTS)
  return Chunks(
    **per_token,
    positions=position,
    segment_ids=np.array([p.segment for p in places]),
    loss_mask=mask,
    reported=of_response('loss_mask').astype(bool),
    is_expert=np.zeros_like(there),
    advantages=np.where(mask, annotated.advantages[batch, row, position], 0.0),
    returns=np.zeros(there.shape),
    temperature=np.ones(per_segment),
    pair=np.zeros(per_segment, np.int32),
    label=np.zeros(per_segment),
  )


class Places(NamedTuple):
  """Contents of a packed batch: for each place, the row, its position and its segment. The arrays
  have the shape `[CHUNKS, CHUNK_LEN]`.
  """

  row: np.ndarray
  """Index of the row; -1 for padding."""
  position: np.ndarray
  segment: np.ndarray


@functools.cache
def _places(lengths: tuple[int, ...]) -> Places:
  packing = pack(lengths, ranks=1, chunks=CHUNKS, chunk_len=CHUNK_LEN)
  assert packing.micro_batches == 1
  places = Places(*(np.full((CHUNKS, CHUNK_LEN), filler, np.int32) for filler in (-1, 0, 0)))
  for row, length in enumerate(lengths):
    at = packing.chunk[row], slice(packing.offset[row], packing.offset[row] + length)
    places.row[at], places.position[at], places.segment[at] = (
      row,
      np.arange(length),
      packing.segment[row],
    )
  return places


Columns = dict[str, np.ndarray]
"""Arrays `[responses, LONGEST]`, keyed by field of Chunks. Entries after a response's end are 0."""


def _columns(policies: Policies) -> Columns:
  """Returns the columns of every response. Each response follows its prompt."""
  tokens, mask = (
    np.zeros((len(RESPONSES), LONGEST), np.int32),
    np.zeros((len(RESPONSES), LONGEST), bool),
  )
  for i, response in enumerate(RESPONSES):
    tokens[i, 1 : 1 + len(response)], mask[i, 1 : 1 + len(response)] = response, True
  before = np.roll(tokens, 1, axis=1)

  def of(table):
    return np.where(mask, _log_softmax(table)[before, tokens], 0.0)

  logprobs = {
    f'{name}_logprobs': of(getattr(policies, name))
    for name in ('behaviour', 'proximal', 'reference')
  }
  return {
    **logprobs,
    'tokens': tokens,
    'loss_mask': mask,
    'values': np.where(mask, np.array(CRITIC)[before], 0.0),
  }


def _log_softmax(table: np.ndarray) -> np.ndarray:
  return table - np.log(np.exp(table).sum(1, keepdims=True))


# Exact gradients, from the definitions alone.


def gradient_of(value: Callable[[Any], Any], table: np.ndarray = POLICY) -> np.ndarray:
  """Returns ∇ value(logprobs `[prefix, token]`) with respect to the logits."""
  with jax.enable_x64(True):
    return np.asarray(
      jax.grad(lambda logits: value(jax.nn.log_softmax(logits, axis=1)))(jnp.asarray(table))
    )


def response_logprobs(logprobs):
  """Returns an array `[responses]`: the sum of each response's token logprobs. `logprobs` has the
  shape `[prefix, token]`.
  """
  ways = np.zeros((len(RESPONSES), VOCAB, VOCAB))
  for way, response in zip(ways, RESPONSES):
    for prefix, token in itertools.pairwise((0, *response)):
      way[prefix, token] += 1
  return (ways * logprobs).sum((1, 2))


def expected_reward(logprobs):
  return (jnp.exp(response_logprobs(logprobs)) * np.array(REWARDS)).sum()


def sequence_kl(logprobs):
  """Returns KL(policy || reference) of whole responses."""
  own = response_logprobs(logprobs)
  return (jnp.exp(own) * (own - response_logprobs(_log_softmax(REFERENCE)))).sum()


def mirror_descent(logprobs, *, start: np.ndarray, size: int, tau: float):
  """Returns the expectation that OPMD minimises, on samples of the policy `start` in groups of
  `size`. `start` is also its reference.
  """
  old = response_logprobs(_log_softmax(start))
  ratio = response_logprobs(logprobs) - old
  advantages = (size - 1) / size * (np.array(REWARDS) - (np.exp(old) * REWARDS).sum())
  return (np.exp(old) * (-advantages * ratio + 0.5 * tau * ratio**2)).sum()


def conditional(per_prefix: Callable[[Any, Any], Any], sampler: np.ndarray) -> Callable[[Any], Any]:
  """Returns a function of the policy's logprobs: the sum over prefixes of `per_prefix(policy,
  reference)`, weighted by how often the policy `sampler` visits each prefix. The weights are
  constants.
  """
  first = np.exp(_log_softmax(sampler))[0]
  visits = np.array([1.0, first[1], first[2]])
  return lambda logprobs: (
    visits * per_prefix(logprobs, jnp.asarray(_log_softmax(REFERENCE)))
  ).sum()


def reverse_kl(p, q):
  """Returns KL(policy || reference) at each prefix."""
  return (jnp.exp(p) * (p - q)).sum(1)


def forward_kl(p, q):
  """Returns KL(reference || policy) at each prefix."""
  return (jnp.exp(q) * (q - p)).sum(1)


def entropy(p, q):
  return -(jnp.exp(p) * p).sum(1)


# The tables of docs/reference/algorithms.md.


def likeness(found: np.ndarray, exact: np.ndarray) -> tuple[float, float]:
  """Returns (cosine, ratio of norms). If `found` is zero, the cosine is NaN."""
  norms = np.linalg.norm(found), np.linalg.norm(exact)
  if norms[0] < 1e-12 * norms[1]:
    return math.nan, 0.0
  return float((found * exact).sum() / (norms[0] * norms[1])), float(norms[0] / norms[1])


SUM, MEAN = {'loss_agg_mode': 'seq-mean-token-sum'}, {'loss_agg_mode': 'seq-mean-token-mean'}
THREE, TWICE_TWO = {'groups': 1, 'size': 3}, {'groups': 2, 'size': 2}
ALGORITHM_ROWS: tuple[tuple[str, dict[str, Any], dict[str, int]], ...] = (
  ('rloo', {}, THREE),
  ('rloo', {'rollout_is': 'sequence', 'rollout_is_threshold': 100.0}, THREE),
  ('rloo', {'rollout_is': 'token', 'rollout_is_threshold': 100.0}, THREE),
  ('rloo', {'rollout_is': 'icepop'}, THREE),
  ('rloo', {'rollout_is': 'none'}, THREE),
  ('dr_grpo', {}, THREE),
  ('grpo', {}, THREE),
  ('grpo', {'norm_adv_by_std': False}, THREE),
  ('grpo', {'norm_adv_by_std': False, **MEAN}, THREE),
  ('grpo', SUM, THREE),
  ('grpo', {'mask_truncated': True}, THREE),
  ('gspo', {}, THREE),
  ('cispo', {}, THREE),
  ('sapo', {}, THREE),
  ('ppo', {}, THREE),
  ('opmd', {}, THREE),
  ('opmd', {'baseline': 'log_partition'}, THREE),
  ('grpo', {}, TWICE_TWO),
  ('dapo', {}, TWICE_TWO),
  ('reinforce_plus_plus', {}, TWICE_TWO),
  ('reinforce_plus_plus_baseline', {}, TWICE_TWO),
)


def algorithm_table() -> str:
  """Returns a Markdown table that compares each algorithm's expected gradient with ∇E[reward]."""
  exact = -gradient_of(expected_reward)
  made: list[tuple[str, dict[str, Any], dict[str, int], Algorithm]] = [
    ('the example below', {}, THREE, reinforce())
  ]
  made += [
    (f'`{name}`', options, shape, catalogue(name, **options))
    for name, options, shape in ALGORITHM_ROWS
  ]
  lines = [
    '| algorithm | options | batch | on-policy | stale | moved |',
    '|---|---|---|---|---|---|',
  ]
  for name, options, shape, algorithm in made:
    found = expected_gradients(algorithm, (ON_POLICY, STALE, MOVED), **shape)
    shown = ' | '.join(_shown(*likeness(one, exact)) for one in found)
    lines.append(
      f'| {name} | {_written(options)} | {shape["groups"]} × {shape["size"]} | {shown} |'
    )
  return '\n'.join(lines)


def kl_table() -> str:
  """Returns a Markdown table that compares the expected gradient of each KL term with the gradients
  of two functionals. The groups have two samples.
  """
  whole = gradient_of(sequence_kl)
  lines = [
    '| where | options | against the sequence KL | against the conditional KL | the same, moved |',
    '|---|---|---|---|---|',
  ]
  modes: tuple[dict[str, Any], ...] = (SUM, {'loss_agg_mode': 'token-mean'})
  kinds: tuple[dict[str, Any], ...] = (
    {'kl_loss_type': 'k1'},
    {'kl_loss_type': 'k2'},
    {'kl_loss_type': 'k3'},
    {'kl_loss_type': 'k3', 'kl_unbiased_gradient': False},
  )
  for kind, mode in itertools.product(kinds, modes):
    algorithm = catalogue('rloo', kl_loss_coef=1.0, allow_zero_gradient_kl=True, **kind, **mode)
    here, later = expected_gradients(algorithm, (ON_POLICY, MOVED), terms={'actor/kl_loss'})
    shown = [
      likeness(here, whole),
      likeness(here, gradient_of(conditional(reverse_kl, POLICY))),
      likeness(later, gradient_of(conditional(reverse_kl, OTHER))),
    ]
    lines.append(
      f'| loss | {_written(kind | mode)} | {" | ".join(_shown(*pair) for pair in shown)} |'
    )
  for kind in ('k1', 'k2', 'k3'):
    here = penalty_gradient(kind)
    shown = [likeness(here, whole), likeness(here, gradient_of(conditional(reverse_kl, POLICY)))]
    cells = ' | '.join(_shown(*pair) for pair in shown)
    lines.append(f'| reward | {_written({"kl_reward_type": kind})} | {cells} | |')
  return '\n'.join(lines)


@functools.cache
def penalty_gradient(kind: by_token.Estimator) -> np.ndarray:
  """Returns the contribution of a penalty in the reward to the expected gradient of the loss,
  without whitening.
  """
  return expected_gradient(penalised(kind, 1.0), ON_POLICY) - expected_gradient(
    penalised(kind, 0.0), ON_POLICY
  )


def _shown(cosine: float, ratio: float) -> str:
  """Formats a likeness. '1' means exactly 1: numbers near 1 are shown with more digits."""

  def digits(x):
    return '1' if abs(x - 1.0) < 1e-12 else f'{x:.3f}'.replace('1.000', f'{x:.5f}')

  return '0' if ratio == 0 else f'{digits(cosine)} × {digits(ratio)}'


def _written(options: dict[str, Any]) -> str:
  return ', '.join(f'`{name}={value}`' for name, value in options.items())


PARTS: dict[str, Callable[[], str]] = {
  'algorithms': algorithm_table,
  'divergences': kl_table,
  'own_algorithm.py': lambda: _source('own_algorithm.py'),
  'own_scorer.py': lambda: _source('own_scorer.py'),
}


def _source(name: str) -> str:
  return f'```python\n{(FIXTURES / name).read_text()}```'


def filled(document: str) -> str:
  """Returns the document with the text between each `<!-- begin: part -->` and `<!-- end: part -->`
  generated anew.
  """
  for part, make in PARTS.items():
    marked = re.compile(
      rf'(?<=<!-- begin: {re.escape(part)} -->\n).*?(?=<!-- end: {re.escape(part)} -->\n)',
      re.DOTALL,
    )
    if len(marked.findall(document)) != 1:
      raise ValueError(f'{DOCUMENT.name}: wanted exactly one part marked {part!r}')
    text = f'{make()}\n'
    document = marked.sub(lambda _, text=text: text, document)
  return document


if __name__ == '__main__':
  DOCUMENT.write_text(filled(DOCUMENT.read_text()))
