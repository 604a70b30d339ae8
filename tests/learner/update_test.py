"""The update: what may not change a gradient does not, what should stop an update does.

Gradients are compared in float64, where the contract is 1e-12, and against an independent
computation that packs nothing. What is said of the update alone is said on a bigram model, which
compiles in no time.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learning import (
  CHUNK,
  LIMITS,
  REWARDS,
  ROLLOUTS,
  SAMPLES,
  SETTING,
  SPECS,
  VOCAB,
  WIDTH,
  Case,
  Subject,
  assert_same,
  bigram,
  chosen,
  closed,
  compute,
  host_params,
  log_probabilities,
  padded,
  rollouts,
  write_samples,
)

from jaxrl_llm.batching.packing import pack
from jaxrl_llm.batching.plan import StepPlan
from jaxrl_llm.core.trees import flatten, unflatten
from jaxrl_llm.learner import forward
from jaxrl_llm.learner.algorithm import Algorithm
from jaxrl_llm.learner.forward import build_score
from jaxrl_llm.learner.optimizer import OptimizerConfig, build_optimizer
from jaxrl_llm.learner.policy_gradient import policy_gradient
from jaxrl_llm.learner.policy_options import GrpoConfig
from jaxrl_llm.learner.state import init_state
from jaxrl_llm.learner.supervised import SftConfig, sft
from jaxrl_llm.learner.update import build_update
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.attention import chosen as attention_of
from jaxrl_llm.models.spec import ModelOptions

MODES = ('token-mean', 'seq-mean-token-sum', 'seq-mean-token-mean', 'seq-mean-token-sum-norm')


def grpo(**fields) -> Algorithm:
  """Without weights against the sampler, whose logprobs are drawn here."""
  return policy_gradient(GrpoConfig(rollout_is='none', **fields), SETTING)


SUBJECTS = {
  name: Subject(algorithm, rollouts(), off_policy=False)
  for name, algorithm in {
    'sft': sft(SftConfig(), SETTING),
    **{mode: grpo(loss_agg_mode=mode, loss_scale_factor=0.3, entropy_coeff=0.01) for mode in MODES},
  }.items()
}
"""The policy's own logprobs are the proximal ones."""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('rows')
  write_samples(path)
  return path


def host_row(i: int, advantage: float):
  """Tokens, mask, temperature and advantage as the batch holds them: in float32, here padded to one
  length.
  """
  s = SAMPLES[i]
  return (
    padded(s.tokens),
    padded(s.loss_mask),
    float(np.float32(s.temperature)),
    float(np.float32(advantage)),
  )


def total(parts):
  return jax.tree.map(lambda *leaves: sum(np.asarray(leaf) for leaf in leaves), *parts)


@functools.cache
def unpacked():
  """Loss and gradient of token-mean GRPO, one sequence at a time, summed on the host."""
  model = build_model(SPECS['lm'], ModelOptions(dtype='float64'))
  tokens = sum(int(SAMPLES[i].loss_mask.sum()) for i in ROLLOUTS)

  def loss(tree, ids, mask, temperature, advantage):
    table = log_probabilities(model, tree, ids, temperature)
    logprobs, entropies = chosen(table, ids), -(jnp.exp(table) * table).sum(-1)
    ratio = jnp.exp(logprobs - jax.lax.stop_gradient(logprobs))
    return -((ratio * advantage + 0.01 * entropies) * mask[1:]).sum() / tokens

  with jax.enable_x64(True):
    tree = jax.tree.map(lambda x: x.astype(np.float64), host_params('decoder'))
    algorithm = SUBJECTS['token-mean'].algorithm
    advantages = algorithm.annotate(closed(algorithm, rollouts())).advantages
    function = jax.jit(jax.value_and_grad(loss))
    return total(
      [function(tree, *host_row(i, advantage)) for i, advantage in enumerate(advantages)]
    )


@pytest.mark.parametrize('precision', [pytest.param('float32', marks=pytest.mark.full), 'float64'])
def test_loss_and_gradient_are_those_of_unpacked_sequences(folder, precision):
  found = compute(folder, SUBJECTS['token-mean'], dtype=precision)
  loss, grads = unpacked()
  assert abs(loss) > 1e-3
  assert_same(found, found._replace(loss=loss, grads=grads), precision)


CUTS = [{'chunks': 1}, {'chunks': 12}, {'chunks': 3, 'chunk_len': 48, 'token_chunk': 8}]


@pytest.mark.parametrize(
  'name',
  [
    name if name in ('sft', 'token-mean') else pytest.param(name, marks=pytest.mark.full)
    for name in SUBJECTS
  ],
)
def test_micro_batches_chunks_and_padding_change_nothing(folder, name):
  first, second = (
    compute(folder, SUBJECTS[name], model='bigram', **cut) for cut in (CUTS[0], CUTS[2])
  )
  assert first.loss != 0.0
  assert_same(first, second)


def test_packing_changes_nothing_in_the_decoder(folder):
  assert_same(
    compute(folder, SUBJECTS['token-mean'], **CUTS[2]), compute(folder, SUBJECTS['token-mean'])
  )


def test_a_split_remainder_changes_nothing(folder):
  assert_split_as_whole(folder, model='bigram', chunks=4)


@pytest.mark.full
def test_a_split_remainder_changes_nothing_in_the_decoder_on_a_mesh(folder):
  assert_split_as_whole(folder, chunks=3, axes=(('fsdp', 2), ('sequence', 2), ('tensor', 2)))


def assert_split_as_whole(folder, **cut):
  """There are whole micro-batches and a remainder; also compares what is stored of each token."""
  subject = SUBJECTS['token-mean']
  packing = Case(folder, rows=subject.rows, split=True, **cut).packed(subject.algorithm)[0].packing
  assert packing.filled > packing.chunks and packing.filled % packing.chunks > 0
  split, whole = (compute(folder, subject, split=split, **cut) for split in (True, False))
  assert_same(split, whole)
  assert np.count_nonzero(whole.outputs) > 50
  np.testing.assert_allclose(split.outputs, whole.outputs, rtol=0, atol=1e-12)
  for name, stat in whole.stats.items():
    np.testing.assert_allclose(split.stats[name].total, stat.total, rtol=1e-9, atol=1e-12)


def test_the_logits_of_single_chunks_fill_the_memory_planned_for_a_micro_batch(folder, monkeypatch):
  computed, compute_logprobs = set(), forward.token_logprobs

  def watched(hidden, *args, token_chunk, **options):
    computed.add((len(hidden), token_chunk))
    return compute_logprobs(hidden, *args, token_chunk=token_chunk, **options)

  monkeypatch.setattr(forward, 'token_logprobs', watched)
  case = Case(folder, rows=rollouts(), model='bigram', dtype='float32', chunks=4, split=True)
  score = build_score(case.model, case.mesh, token_chunk=CHUNK // 8, splits_remainder=True)
  packed = case.packed(GRPO)[0]
  score.lower(case.params(), packed.chunks, packed.used)
  assert computed == {(4, CHUNK // 8), (1, CHUNK // 2)}


@pytest.mark.parametrize('axes', [(), (('fsdp', 2),)], ids=['one', 'sharded'])
def test_what_a_split_remainder_leaves_empty_is_not_computed(folder, axes):
  """The first chunk of the last micro-batch alone has rows, so the others are not looked at."""
  case = Case(
    folder, rows=rollouts(), model='bigram', dtype='float32', chunks=2, axes=axes, split=True
  )
  packed = case.packed(GRPO)[0]
  used = np.int32(3)
  score = build_score(case.model, case.mesh, token_chunk=CHUNK, splits_remainder=True)
  found = np.asarray(score(case.params(), packed.chunks, used))
  by_rank = found.reshape(len(found), case.shape.ranks, 2, CHUNK)
  whole = np.asarray(
    build_score(case.model, case.mesh, token_chunk=CHUNK)(
      case.params(), packed.chunks, packed.packing.micro_batches
    )
  ).reshape(by_rank.shape)
  assert np.abs(whole[1, :, 1]).max() > 0
  assert not by_rank[1, :, 1].any() and not by_rank[2:].any()
  np.testing.assert_allclose(by_rank[0], whole[0], atol=1e-6)
  np.testing.assert_allclose(by_rank[1, :, 0], whole[1, :, 0], atol=1e-6)


def test_order_changes_nothing(folder):
  found = compute(
    folder,
    SUBJECTS['token-mean'],
    order=(tuple(np.random.default_rng(1).permutation(12).tolist()),),
  )
  assert_same(found, compute(folder, SUBJECTS['token-mean']))


@pytest.mark.full
@pytest.mark.parametrize('cut', CUTS, ids=str)
@pytest.mark.parametrize(
  'name',
  [
    name if name == 'token-mean' else pytest.param(name, marks=pytest.mark.acceptance)
    for name in SUBJECTS
  ],
)
def test_packing_changes_nothing_in_the_decoder_under_any_loss(folder, name, cut):
  for precision in LIMITS:
    whole = compute(folder, SUBJECTS[name], dtype=precision)
    assert_same(compute(folder, SUBJECTS[name], dtype=precision, **cut), whole, precision)


def on_mesh(folder, axes, **options):
  return compute(
    folder, SUBJECTS['seq-mean-token-mean'], chunks=2, axes=tuple(axes.items()), **options
  )


@pytest.mark.parametrize('axes', [{'fsdp': 8}, {'data': 2, 'fsdp': 2, 'tensor': 2}], ids=str)
def test_the_mesh_changes_nothing(folder, axes):
  whole = compute(folder, SUBJECTS['seq-mean-token-mean'], model='bigram')
  assert_same(on_mesh(folder, axes, model='bigram'), whole)


@pytest.mark.parametrize(
  'axes',
  [
    pytest.param((('fsdp', 2), ('sequence', 2), ('tensor', 2)), marks=pytest.mark.full),
    pytest.param((('fsdp', 2), ('sequence', 4)), marks=pytest.mark.acceptance),
  ],
  ids=str,
)
def test_a_decoder_with_balanced_shards_has_the_same_gradient(folder, axes):
  whole = compute(folder, SUBJECTS['token-mean'])
  by_blocks = {'attention': 'blockwise', 'chunks': 2, 'axes': axes}
  case = Case(folder, rows=SUBJECTS['token-mean'].rows, **by_blocks)
  choice = attention_of(case.model.options, case.mesh, time=CHUNK, keys=CHUNK, same_tokens=True)
  assert choice.is_balanced
  assert_same(compute(folder, SUBJECTS['token-mean'], **by_blocks), whole)


MESHES = [
  {'fsdp': 8},
  {'sequence': 8},
  {'data': 2, 'fsdp': 2, 'tensor': 2},
  {'data': 2},
  {'tensor': 2},
]
IN_FULL = [(axes, 'float64') for axes in MESHES[:3]] + [(MESHES[2], 'float32')]
"""Two axes so long that they do not divide every dimension, and a mesh of the other axes
together.
"""


@pytest.mark.full
@pytest.mark.parametrize(
  ('axes', 'precision'),
  [
    pytest.param(
      axes, precision, marks=() if (axes, precision) in IN_FULL else pytest.mark.acceptance
    )
    for axes in MESHES
    for precision in LIMITS
  ],
  ids=str,
)
def test_no_mesh_changes_the_decoders_gradient(folder, axes, precision):
  whole = compute(folder, SUBJECTS['seq-mean-token-mean'], dtype=precision)
  assert_same(on_mesh(folder, axes, dtype=precision), whole, precision)


@pytest.mark.full
@pytest.mark.parametrize('options', [{'scan': True}, {'remat': 'full'}], ids=str)
def test_scan_and_remat_change_nothing(folder, options):
  assert_same(
    compute(folder, SUBJECTS['token-mean'], **options), compute(folder, SUBJECTS['token-mean'])
  )


@pytest.mark.full
def test_scan_and_remat_together_change_nothing_on_a_mesh(folder):
  found = on_mesh(folder, {'data': 2, 'fsdp': 2, 'tensor': 2}, scan=True, remat='full')
  assert_same(found, compute(folder, SUBJECTS['seq-mean-token-mean']))


CONFIG = OptimizerConfig(peak_lr=1e-2)
GRPO, SFT = grpo(), sft(SftConfig(), SETTING)


@functools.cache
def prepared(folder, algorithm, config, *, on_policy=('proximal_logprobs',), **options):
  """A case, its update, and what makes a fresh state for it; compiled once for all tests."""
  case = Case(folder, rows=rollouts(), **{'model': 'bigram', 'dtype': 'float32', **options})
  optimizer = build_optimizer(config, 10)

  def fresh(params=None):
    return init_state(params or case.params(), optimizer, case.mesh, offload=config.offloads)

  update = build_update(
    case.model,
    algorithm.loss,
    optimizer,
    config,
    case.mesh,
    fresh(),
    updates=10,
    token_chunk=CHUNK,
    on_policy=on_policy,
  )
  return case, update, fresh


def step(folder, *, algorithm=GRPO, config=CONFIG, rewards=REWARDS, state=None, **options):
  case, update, fresh = prepared(folder, algorithm, config, **options)
  case.plan = StepPlan(
    step=0, stage='x', rows=rollouts(rewards), optimizer_steps=case.plan.optimizer_steps
  )
  packed, constants = case.packed(algorithm)
  return update(state or fresh(), packed.chunks, packed.used, constants)


@pytest.mark.parametrize('model', ['bigram', pytest.param('decoder', marks=pytest.mark.full)])
def test_no_mixed_group_changes_no_bit_even_with_momentum(folder, model):
  state, report = step(folder, model=model)
  assert not report.empty and int(state.updates) == 1
  before = jax.device_get(state)
  assert any(np.abs(m).max() > 0 for m in jax.tree.leaves(before.opt_state))
  after, report = step(folder, model=model, rewards=(1.0,) * 4 + (0.0,) * 8, state=state)
  assert bool(report.empty) and not bool(report.skipped)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), before)


def test_unusable_gradients_are_skipped_and_counted_in_a_row(folder):
  config = OptimizerConfig(peak_lr=1e-2, skip_grad_norm=1e-9)
  state, report = step(folder, config=config)
  assert bool(report.skipped) and (
    int(report.in_a_row),
    int(state.skipped),
    int(state.updates),
  ) == (1, 1, 0)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), host_params('bigram'))
  state, report = step(folder, config=config, state=state)
  assert int(report.in_a_row) == int(state.skipped) == 2
  state, report = step(folder, state=state)
  assert not bool(report.skipped) and (
    int(report.in_a_row),
    int(state.skipped),
    int(state.updates),
  ) == (0, 0, 1)


def test_nan_parameters_never_reach_the_optimizer(folder):
  case, _, fresh = prepared(folder, GRPO, CONFIG)
  broken = case.params()
  broken['norm']['scale'] = broken['norm']['scale'].at[0].set(jnp.nan)
  state, report = step(folder, state=fresh(broken))
  assert bool(report.skipped)
  for leaf in jax.tree.leaves(jax.device_get(state.opt_state)):
    assert np.isfinite(leaf).all()


def test_unscorable_rows_leave_the_loss(folder):
  _, report = step(folder, rewards=(1.0, 0.0, None, 1.0, *(None,) * 8))
  assert float(report.stats['actor/entropy'].count) == sum(
    int(SAMPLES[i].loss_mask.sum()) for i in (0, 1, 3)
  )


def test_nothing_scorable_is_an_empty_update_without_a_nan(folder):
  state, report = step(folder, rewards=(None,) * 12)
  assert bool(report.empty) and not bool(report.skipped)
  assert float(report.stats['actor/loss'].total) == 0.0
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), host_params('bigram'))


@pytest.mark.full
def test_a_sharded_update_keeps_its_shardings_and_its_result(folder):
  plain, _ = step(folder, algorithm=SFT)
  _, _, fresh = prepared(folder, SFT, CONFIG, axes=(('fsdp', 2), ('tensor', 2)), chunks=2)
  before = jax.tree.map(lambda x: x.sharding, fresh())
  found, _ = step(folder, algorithm=SFT, axes=(('fsdp', 2), ('tensor', 2)), chunks=2)
  assert jax.tree.leaves(before) == jax.tree.leaves(jax.tree.map(lambda x: x.sharding, found))
  assert found.params['head']['kernel'].sharding.shard_shape((VOCAB, WIDTH)) == (
    VOCAB // 2,
    WIDTH // 2,
  )
  for name, wanted in flatten(jax.device_get(plain.params)).items():
    moved = np.linalg.norm(wanted - flatten(host_params('bigram'))[name])
    assert np.linalg.norm(np.asarray(flatten(found.params)[name]) - wanted) <= 1e-3 * moved


@pytest.mark.full
@pytest.mark.parametrize('axes', [(), (('fsdp', 2), ('tensor', 2))], ids=['one', 'sharded'])
def test_moments_in_host_memory_change_nothing(folder, axes):
  states = {}
  for offload in (False, True):
    config = dataclasses.replace(CONFIG, offload=offload)
    state, _ = step(folder, config=config, axes=axes, chunks=2)
    state, _ = step(folder, config=config, axes=axes, chunks=2, state=state)
    states[offload] = state
  kinds = {
    leaf.sharding.memory_kind for leaf in jax.tree.leaves(states[True].opt_state) if leaf.ndim
  }
  assert kinds == {'pinned_host'}
  assert 'pinned_host' not in {
    leaf.sharding.memory_kind for leaf in jax.tree.leaves(states[True].params)
  }
  # Other programs: products and sums may be rounded together in one and apart in the other.
  for found, wanted in zip(
    jax.tree.leaves(states[True]), jax.tree.leaves(states[False]), strict=True
  ):
    assert np.linalg.norm(np.asarray(found) - np.asarray(wanted)) <= 1e-6 * np.linalg.norm(wanted)


def test_packing_used_by_the_loader_is_the_planned_one(folder):
  packed, _ = Case(folder, rows=rollouts(), axes=(('fsdp', 2),), chunks=2).packed(SFT)
  own = [SAMPLES[i] for i in ROLLOUTS]
  planned_packing = pack(
    [len(s.tokens) for s in own], units=None, ranks=2, chunks=2, chunk_len=CHUNK
  )
  tokens = np.asarray(packed.chunks.tokens)
  for i, s in enumerate(own):
    start = planned_packing.offset[i]
    at = (
      planned_packing.micro_batch[i],
      planned_packing.chunk[i],
      slice(start, start + len(s.tokens)),
    )
    np.testing.assert_array_equal(tokens[at], s.tokens)
    np.testing.assert_array_equal(np.asarray(packed.chunks.positions)[at], np.arange(len(s.tokens)))


class NaiveLearner:
  """PPO and AdamW as the papers state them, in float64, on the host, one sequence at a time,
  nothing packed.
  """

  def __init__(self, config: OptimizerConfig, algorithm: GrpoConfig):
    self.config, self.algorithm = config, algorithm
    self.model = bigram(ModelOptions(dtype='float64'))
    self.params = flatten(jax.tree.map(lambda x: x.astype(np.float64), host_params('bigram')))
    self.m, self.v = ({name: np.zeros_like(p) for name, p in self.params.items()} for _ in range(2))
    self.updates, self.ratios = 0, []
    self.gradient = jax.jit(jax.value_and_grad(self.loss, has_aux=True))

  def logprobs(self, tree, tokens, temperature):
    return chosen(log_probabilities(self.model, unflatten(tree), tokens, temperature), tokens)

  def loss(self, tree, tokens, mask, temperature, advantage, old):
    """-min(r, 1 + high) A for a good sequence; for a bad one -max(r, 1 - low) A, but at most -c
    A.
    """
    low, high, c = (
      self.algorithm.clip_ratio_low,
      self.algorithm.clip_ratio_high,
      self.algorithm.clip_ratio_c,
    )
    ratio = jnp.exp(self.logprobs(tree, tokens, temperature) - old)
    capped = jnp.where(advantage > 0, jnp.minimum(ratio, 1 + high), jnp.clip(ratio, 1 - low, c))
    return -(capped * advantage * mask[1:]).sum(), ratio

  def step(self, rows, old, advantages):
    parts = []
    for i in rows:
      tokens, mask, temperature, advantage = host_row(i, advantages[i])
      (_, ratio), grads = self.gradient(self.params, tokens, mask, temperature, advantage, old[i])
      self.ratios += np.asarray(ratio)[mask[1:]].tolist()
      parts.append(grads)
    tokens = sum(int(SAMPLES[i].loss_mask.sum()) for i in rows)
    grads = {name: g / tokens for name, g in total(parts).items()}
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    self.adam({name: g * min(1.0, self.config.max_grad_norm / norm) for name, g in grads.items()})

  def adam(self, grads):
    c = self.config
    self.updates += 1
    for name, g in grads.items():
      self.m[name] = c.b1 * self.m[name] + (1 - c.b1) * g
      self.v[name] = c.b2 * self.v[name] + (1 - c.b2) * g**2
      m, v = self.m[name] / (1 - c.b1**self.updates), self.v[name] / (1 - c.b2**self.updates)
      decay = c.weight_decay * self.params[name] if name.endswith('kernel') else 0.0
      self.params[name] = self.params[name] - c.peak_lr * (m / (np.sqrt(v) + c.eps) + decay)


def test_two_optimizer_steps_on_one_batch_are_two_naive_updates(folder):
  """The second step's ratios are against the policy before the batch, not against the first step's
  result.
  """
  algorithm, config = grpo(), OptimizerConfig(peak_lr=0.05, weight_decay=0.1, max_grad_norm=0.05)
  order = ((0, 3, 5, 6, 9, 10), (1, 2, 4, 7, 8, 11), (0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11))
  with jax.enable_x64(True):
    case, update, fresh = prepared(
      folder, algorithm, config, dtype='float64', order=order, on_policy=(), chunks=2
    )
    score = build_score(case.model, case.mesh, token_chunk=8)
    packed = [case.packed(algorithm, number)[0] for number in range(len(order))]
    old = [score(case.params(), p.chunks, p.used) for p in packed]
    state, reports = fresh(), []
    for p, proximal in zip(packed, old, strict=True):
      state, report = update(state, p.chunks.replace(proximal_logprobs=proximal), p.used, {})
      reports.append(jax.device_get(report))
    naive = NaiveLearner(config, GrpoConfig())
    before = [np.asarray(naive.logprobs(naive.params, *host_row(i, 0.0)[::2])) for i in range(12)]
    advantages = case.annotation(algorithm).advantages
    for rows in order:
      naive.step(rows, before, advantages)
  # The case is worth something: most later ratios are away from 1, and both clips hold some tokens.
  clipped = [float(r.stats['actor/pg_clipfrac'].total) for r in reports]
  assert clipped[0] == 0 and min(clipped[1:]) > 0 and np.std(naive.ratios) > 0.05
  kl = [float(r.stats['actor/ppo_kl'].total) for r in reports]
  assert abs(kl[0]) < 1e-12 < 1e-3 < abs(kl[1])
  for name, found in flatten(jax.device_get(state.params)).items():
    np.testing.assert_allclose(found, naive.params[name], rtol=0, atol=1e-10, err_msg=name)
