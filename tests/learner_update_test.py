"""The update on a tiny model: what may not change a gradient does not, what should stop an update does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.batching.packing import pack
from jaxrl_llm.batching.plan import Row, StepPlan, plan_shape
from jaxrl_llm.data.load import RowLoader
from jaxrl_llm.experience.sample import Sample, Source, encode
from jaxrl_llm.learner.algorithm import GrpoConfig, SftConfig, grpo, sft
from jaxrl_llm.learner.optimizer import OptimizerConfig, build_optimizer
from jaxrl_llm.learner.state import TrainState, init_state, place_params
from jaxrl_llm.learner.update import build_update, gradients
from jaxrl_llm.models.api import build_model, stack_layers
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import ModelOptions
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh, data_parallel_ranks
from jaxrl_llm.replay.segments import write_segment

VOCAB, CHUNK = 40, 24
SPEC = tiny('qwen3', VOCAB, num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=2)
MODES = ('token-mean', 'seq-mean-token-sum', 'seq-mean-token-mean', 'seq-mean-token-sum-norm')


def samples(count: int, seed: int = 0) -> list[Sample]:
  rng = np.random.default_rng(seed)
  made = []
  for i in range(count):
    prompt, answer = int(rng.integers(1, 8)), int(rng.integers(1, 16))
    sampled = np.r_[np.zeros(prompt, bool), np.ones(answer, bool)]
    made.append(
      Sample(
        uid=f's/{i}',
        task_id='t',
        visit=0,
        sample_index=i,
        group_id=f'g{i // 4}',
        trajectory_id=f's/{i}',
        taskset='x',
        domain='general',
        source=Source.ROLLOUT,
        tokens=rng.integers(0, VOCAB, prompt + answer).astype(np.int32),
        prompt_len=prompt,
        role=sampled.astype(np.uint8),
        loss_mask=sampled,
        sampled=sampled,
        behaviour_logprobs=np.where(sampled, -rng.uniform(1, 4, prompt + answer), 0).astype(np.float32),
        temperature=float(rng.choice([0.7, 1.0, 1.3])),
      )
    )
  return made


@functools.cache
def params():
  model = build_model(SPEC)
  noise = lambda x: np.asarray(x) + 0.05 * np.random.default_rng(x.size).normal(size=x.shape).astype(np.float32)
  return jax.tree.map(noise, model.init(jax.random.key(1)))


def mesh_of(**sizes):
  config = MeshConfig(**{'data': 1, 'fsdp': 1, 'tensor': 1, **sizes})
  count = config.data * config.fsdp * config.tensor
  return build_mesh(config, jax.devices()[:count])


class Run:
  """One optimizer step of `rows` on a mesh, however it is cut."""

  def __init__(self, tmp_path, rows, *, mesh, chunks=4, chunk_len=CHUNK, options=ModelOptions()):
    write_segment(tmp_path, 'rows.arrayrecord', [encode(s) for s in rows])
    self.mesh, self.model = mesh, build_model(SPEC, options)
    self.shape = plan_shape(rows=len(rows), ranks=data_parallel_ranks(mesh), chunks=chunks, chunk_len=chunk_len)
    self.plan = StepPlan(
      step=0,
      stage='x',
      rows=tuple(
        Row(
          uid=s.uid,
          source='rows.arrayrecord',
          index=i,
          length=len(s.tokens),
          prompt_len=s.prompt_len,
          group=s.group_id,
          reward=float(i % 3 == 0),
          is_expert=False,
          truncated=False,
          version_step=0,
        )
        for i, s in enumerate(rows)
      ),
      optimizer_steps=(tuple(range(len(rows))),),
    )
    self.loader = RowLoader(tmp_path, mesh)

  def packed(self, algorithm):
    annotation = algorithm.annotate(self.plan.rows)
    return self.loader.load(
      self.plan, 0, self.shape, advantages=annotation.advantages, in_loss=annotation.in_loss
    )

  def params(self):
    tree = params()
    return place_params(self.model, self.mesh, stack_layers(tree) if self.model.options.scan_layers else tree)

  def gradients(self, algorithm, *, token_chunk=CHUNK, on_policy=True):
    packed = self.packed(algorithm)
    compute = functools.partial(gradients, self.model, algorithm, token_chunk=token_chunk, on_policy=on_policy)
    return jax.device_get(jax.jit(compute)(self.params(), packed.chunks, packed.used))


def assert_same(a, b):
  """The contract: gradients to 1e-5 per tensor, losses to 1e-6."""
  assert abs(a.loss - b.loss) <= 1e-6 * max(1.0, abs(a.loss))
  from jaxrl_llm.core.trees import flatten

  found, wanted = flatten(a.grads), flatten(b.grads)
  assert found.keys() == wanted.keys()
  for name in wanted:
    scale = np.linalg.norm(wanted[name])
    # Key biases shift all scores of a query alike: their gradient is rounding, and has no relative error.
    if scale > 1e-7:
      assert np.linalg.norm(found[name] - wanted[name]) <= 1e-5 * scale, name


ALGORITHMS = {
  'sft': sft(SftConfig()),
  **{mode: grpo(GrpoConfig(loss_agg_mode=mode, loss_scale_factor=9.0, entropy_coeff=0.01)) for mode in MODES},
}


@pytest.mark.parametrize('name', ALGORITHMS)
def test_micro_batches_chunks_and_padding_change_nothing(tmp_path, name):
  rows, algorithm = samples(12), ALGORITHMS[name]
  whole = Run(tmp_path, rows, mesh=mesh_of(), chunks=12).gradients(algorithm)
  assert whole.loss != 0.0
  assert_same(Run(tmp_path, rows, mesh=mesh_of(), chunks=1).gradients(algorithm), whole)
  assert_same(Run(tmp_path, rows, mesh=mesh_of(), chunks=3, chunk_len=48).gradients(algorithm, token_chunk=8), whole)


@pytest.mark.parametrize('axes', [{'data': 2}, {'fsdp': 8}, {'tensor': 2}, {'data': 2, 'fsdp': 2, 'tensor': 2}], ids=str)
def test_the_mesh_changes_nothing(tmp_path, axes):
  rows, algorithm = samples(12), ALGORITHMS['seq-mean-token-mean']
  whole = Run(tmp_path, rows, mesh=mesh_of(), chunks=4).gradients(algorithm)
  assert_same(Run(tmp_path, rows, mesh=mesh_of(**axes), chunks=2).gradients(algorithm), whole)


@pytest.mark.parametrize('options', [ModelOptions(scan_layers=True), ModelOptions(remat='full')], ids=['scan', 'remat'])
def test_scan_and_remat_change_nothing(tmp_path, options):
  rows, algorithm = samples(8), ALGORITHMS['token-mean']
  whole = Run(tmp_path, rows, mesh=mesh_of()).gradients(algorithm)
  found = Run(tmp_path, rows, mesh=mesh_of(), options=options).gradients(algorithm)
  if options.scan_layers:
    whole = whole._replace(grads=jax.tree.map(np.asarray, stack_layers(whole.grads)))
  assert_same(found, whole)


def test_loss_and_gradient_against_unpacked_sequences(tmp_path):
  """An independent computation: one sequence at a time, no packing, logprobs by a plain log-softmax."""
  rows, algorithm = samples(8), grpo(GrpoConfig())
  run = Run(tmp_path, rows, mesh=mesh_of())
  found = run.gradients(algorithm)
  advantages = algorithm.annotate(run.plan.rows).advantages
  model, tokens = build_model(SPEC), sum(int(s.loss_mask.sum()) for s in rows)

  def loss(tree):
    total = 0.0
    for sample, advantage in zip(rows, advantages):
      ids = jnp.asarray(sample.tokens)[None]
      hidden = model.apply(tree, ids, jnp.arange(ids.shape[1])[None], jnp.ones_like(ids))
      logits = hidden @ model.head_kernel(tree).T / sample.temperature
      logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits[0, :-1]), ids[0, 1:, None], axis=-1)[:, 0]
      ratio = jnp.exp(logprobs - jax.lax.stop_gradient(logprobs))
      total -= (ratio * advantage)[jnp.asarray(sample.loss_mask[1:])].sum()
    return total / tokens

  value, grads = jax.value_and_grad(loss)(params())
  assert_same(found, found._replace(loss=value, grads=jax.device_get(grads)))


def step(tmp_path, algorithm, rows, *, rewards=None, config=OptimizerConfig(peak_lr=1e-2), state=None):
  run = Run(tmp_path, rows, mesh=mesh_of())
  if rewards is not None:
    plan_rows = tuple(Row(**{**r.__dict__, 'reward': reward}) for r, reward in zip(run.plan.rows, rewards))
    run.plan = StepPlan(step=0, stage='x', rows=plan_rows, optimizer_steps=run.plan.optimizer_steps)
  optimizer = build_optimizer(config, 10)
  state = state or init_state(run.params(), optimizer, run.mesh)
  update = build_update(
    run.model, algorithm, optimizer, config, run.mesh, state, updates=10, token_chunk=CHUNK, on_policy=True
  )
  packed = run.packed(algorithm)
  return update(state, packed.chunks, packed.used)


def test_no_mixed_group_changes_no_bit_even_with_momentum(tmp_path):
  rows, algorithm = samples(8), grpo(GrpoConfig())
  state, report = step(tmp_path, algorithm, rows)
  assert not report.empty and int(state.updates) == 1
  before = jax.device_get(state)
  assert any(np.abs(m).max() > 0 for m in jax.tree.leaves(before.opt_state))
  after, report = step(tmp_path, algorithm, rows, rewards=[1.0] * 4 + [0.0] * 4, state=state)
  assert bool(report.empty) and not bool(report.skipped)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), before)


def test_unusable_gradients_are_skipped_and_counted_in_a_row(tmp_path):
  rows, algorithm = samples(8), grpo(GrpoConfig())
  config = OptimizerConfig(peak_lr=1e-2, skip_grad_norm=1e-9)
  state, report = step(tmp_path, algorithm, rows, config=config)
  assert bool(report.skipped) and (int(state.skipped), int(state.updates)) == (1, 0)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), params())
  state, _ = step(tmp_path, algorithm, rows, config=config, state=state)
  assert int(state.skipped) == 2
  state, report = step(tmp_path, algorithm, rows, state=state)
  assert not bool(report.skipped) and (int(state.skipped), int(state.updates)) == (0, 1)


def test_nan_parameters_never_reach_the_optimizer(tmp_path):
  rows, algorithm = samples(4), grpo(GrpoConfig())
  run = Run(tmp_path, rows, mesh=mesh_of())
  optimizer = build_optimizer(OptimizerConfig(peak_lr=1e-2), 10)
  broken = jax.tree.map(lambda x: x, run.params())
  broken['norm']['scale'] = broken['norm']['scale'].at[0].set(jnp.nan)
  state, report = step(tmp_path, algorithm, rows, state=init_state(broken, optimizer, run.mesh))
  assert bool(report.skipped)
  for leaf in jax.tree.leaves(jax.device_get(state.opt_state)):
    assert np.isfinite(leaf).all()


def test_unscorable_rows_leave_the_loss(tmp_path):
  rows, algorithm = samples(8), grpo(GrpoConfig())
  _, report = step(tmp_path, algorithm, rows, rewards=[1.0, 0.0, None, 1.0, None, None, None, None])
  trained = [0, 1, 3]
  assert float(report.stats['actor/entropy'].count) == sum(int(rows[i].loss_mask.sum()) for i in trained)


def test_one_step_of_adam_by_hand(tmp_path):
  """First step of AdamW with bias correction: p - lr * (g / (|g| + eps) + wd * p), decay on matrices only."""
  rows, algorithm = samples(8), sft(SftConfig())
  config = OptimizerConfig(peak_lr=1e-2, weight_decay=0.1, max_grad_norm=1e9)
  state, _ = step(tmp_path, algorithm, rows, config=config)
  grads = Run(tmp_path, rows, mesh=mesh_of()).gradients(algorithm).grads

  def by_hand(p, g, new):
    decay = 0.1 * p if p.ndim > 1 else 0.0
    np.testing.assert_allclose(new, p - 1e-2 * (g / (np.abs(g) + 1e-8) + decay), atol=2e-4 * 1e-2 + 1e-7)

  big = lambda g: np.abs(g) > 1e-5
  jax.tree.map(
    lambda p, g, new: by_hand(p[big(g)], g[big(g)], new[big(g)]) if p.ndim == 1 else None,
    params(), grads, jax.device_get(state.params),
  )  # fmt: skip
  kernel = lambda tree: np.asarray(tree['layers']['0']['mlp']['down']['kernel'])
  sizable = big(kernel(grads))
  decayed = kernel(params()) - 1e-2 * (np.sign(kernel(grads)) + 0.1 * kernel(params()))
  np.testing.assert_allclose(kernel(jax.device_get(state.params))[sizable], decayed[sizable], atol=2e-5)


def test_packing_used_by_the_loader_is_the_planned_one(tmp_path):
  rows = samples(12)
  run = Run(tmp_path, rows, mesh=mesh_of(fsdp=2), chunks=2)
  packed = run.packed(ALGORITHMS['sft'])
  planned = pack([len(s.tokens) for s in rows], units=None, ranks=2, chunks=2, chunk_len=CHUNK)
  tokens = np.asarray(packed.chunks.tokens)
  for i, sample in enumerate(rows):
    at = (planned.micro_batch[i], planned.chunk[i], slice(planned.offset[i], planned.offset[i] + len(sample.tokens)))
    np.testing.assert_array_equal(tokens[at], sample.tokens)
    np.testing.assert_array_equal(np.asarray(packed.chunks.positions)[at], np.arange(len(sample.tokens)))


def test_train_state_is_a_pytree_of_arrays():
  assert {f for f in TrainState.__dataclass_fields__} == {'params', 'opt_state', 'updates', 'skipped'}
