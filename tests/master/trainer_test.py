"""What a stage's trainer makes of closed batches, on a bigram model: which roles move, against
which references.

Whatever a pass should have found is computed again on the host, in float64, from the parameters of
that moment.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
from typing import Any, NamedTuple

import exploring
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigrams import ROWS, SAMPLES, asked_for, bigram, forward, make_stage

from jaxrl_llm.app.composition.state import restore_state
from jaxrl_llm.batching.plan import plan_shape
from jaxrl_llm.core.records.sample import encode
from jaxrl_llm.data.load import RowLoader, unpack
from jaxrl_llm.learner.algorithm import ReferenceRule, Setting
from jaxrl_llm.learner.opmd import OpmdConfig, opmd
from jaxrl_llm.learner.optimizer import OptimizerConfig, build_optimizer
from jaxrl_llm.learner.policy_gradient import policy_gradient
from jaxrl_llm.learner.policy_options import GrpoConfig, PpoConfig
from jaxrl_llm.learner.preference import DpoConfig, dpo
from jaxrl_llm.learner.state import Learned, abstract_state, init_state, place_params
from jaxrl_llm.master import trainer as trainer_module
from jaxrl_llm.master.batches import Planner
from jaxrl_llm.master.evaluation import Evaluator
from jaxrl_llm.master.keeper import Logs, RunKeeper, Start
from jaxrl_llm.master.loop import LoopState
from jaxrl_llm.master.process import Process
from jaxrl_llm.master.trainer import Batch, Optimization, Roles, Stage, StageTrainer, Updated
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.heads import with_head
from jaxrl_llm.parallel.coordinator import Coordinator
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.replay.segments import write_segment
from jaxrl_llm.rollout.gatherer import Gatherer
from jaxrl_llm.rollout.publisher import Publisher
from jaxrl_llm.rollout.workflow import SingleTurn
from jaxrl_llm.runtime.checkpoint import CheckpointConfig, Checkpoints
from jaxrl_llm.runtime.metric_descriptions import describe
from jaxrl_llm.runtime.metrics import resolve
from jaxrl_llm.runtime.progress import ProgressDisplay
from jaxrl_llm.runtime.writers import EvalsWriter, MetricsWriter, RolloutsWriter

SETTING = Setting(max_response_length=8)
OPTIMIZER = OptimizerConfig(peak_lr=0.05)
BEGIN = 10
"""Completed batches of the run when the stage begins."""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('rows')
  write_segment(path, 'rows.arrayrecord', [encode(s) for s in SAMPLES])
  return path


class Rows:
  """Batches of the same rows."""

  def __init__(self, rows, held_out):
    self.rows, self.held_out = rows, held_out

  async def next(self):
    return list(self.rows), {}


class Done(NamedTuple):
  """A batch, and what was learned before and after it (own copies)."""

  batch: Batch
  updated: Updated
  passes: set[str]
  """Of those that have a time of their own, what was done."""
  before: Any
  after: Any

  @property
  def metrics(self) -> dict[str, float]:
    return resolve(self.updated.metrics)


def own(tree):
  """A donated buffer's contents would be overwritten."""
  return jax.tree.map(lambda x: np.array(x) if isinstance(x, jax.Array) else x, tree)


def stage_of(algorithm, *, minibatches=1, epochs=1, optimizer=OPTIMIZER, **fields) -> Stage:
  """Of twenty batches."""
  made = Optimization(build_optimizer(optimizer, 20 * minibatches * epochs), optimizer)
  return make_stage(
    start=BEGIN,
    end=BEGIN + 20,
    algorithm=algorithm,
    policy=made,
    critic=made,
    minibatches=minibatches,
    epochs=epochs,
    **{'shape': plan_shape(rows=8 // minibatches, ranks=1, chunks=2, chunk_len=16), **fields},
  )


class Training:
  """A stage's trainer, and the batches that it makes of the same rows; one trainer serves every
  call of `run`.
  """

  def __init__(self, folder, stage: Stage):
    self._stage, self._mesh = stage, build_mesh(MeshConfig(), jax.devices()[:1])
    self._device = DeviceThread()
    coordinator = Coordinator(self._device, on_signal=lambda signum: None)
    self._process = Process(coordinator=coordinator, device=self._device, mesh=self._mesh)
    has_critic = stage.algorithm.critic_loss is not None
    self._roles = Roles(bigram(), bigram('value') if has_critic else None)

    def draw(model, seed):
      return jax.device_get(model.init(jax.random.key(seed)))

    self._policy = draw(self._roles.model, 0)
    self._critic = draw(self._roles.critic, 1) if has_critic else None
    self._trainer = StageTrainer(
      stage,
      self._process,
      roles=self._roles,
      loader=RowLoader(folder, self._mesh),
      learned=self.begin(),
    )

  def begin(self, policy=None, reference=None) -> Learned:
    """What the stage begins with; host arrays may be given instead."""
    policy, algorithm = self._policy if policy is None else policy, self._stage.algorithm

    def place(params):
      return place_params(self._roles.model, self._mesh, params)

    learned = Learned(
      init_state(place(policy), self._stage.policy.optimizer, self._mesh), reference_step=BEGIN
    )
    if self._critic is not None:
      critic = place_params(self._roles.critic, self._mesh, self._critic)
      learned = learned._replace(
        critic=init_state(critic, self._stage.critic.optimizer, self._mesh)
      )
    if 'reference' in algorithm.reads and algorithm.reference.every != 1:
      learned = learned._replace(reference=place(policy if reference is None else reference))
    return learned

  def run(
    self, count, *, rows=ROWS, held_out=(), change=lambda plan: plan, learned=None
  ) -> list[Done]:
    """The first `count` batches; `change` is what is made of each plan before it is trained by."""

    async def main():
      state = learned or self.begin()
      stop = asyncio.get_running_loop().create_future()
      planner = Planner(seed=0, every_steps=100, every_minutes=1e6, stop=stop)
      found = []
      for step in range(BEGIN, BEGIN + count):
        plan = change(await planner.close(self._stage, step, Rows(rows, held_out)))
        self._process.stopwatch.take()
        before = own(state)
        batch = await self._trainer.annotate(state, plan)
        state, updated = await self._trainer.update(state, batch)
        assert all(x.is_ready() for x in jax.tree.leaves((state.policy, state.reference)))
        passes = set(self._process.stopwatch.take()) & {'old_log_prob', 'ref', 'values', 'testing'}
        found.append(Done(batch, updated, passes, before, own(state)))
      return found

    return asyncio.run(main())

  def close(self):
    self._device.close()


@contextlib.contextmanager
def training(folder, stage: Stage):
  made = Training(folder, stage)
  yield made
  made.close()


def values_of(params, sample):
  """Of the critic, before each token but the first."""
  embed, head = (np.asarray(params[name]['kernel'], np.float64) for name in ('embed', 'head'))
  return embed[sample.tokens[:-1]] @ head[0]


def same(one, other) -> bool:
  """Bit for bit."""
  pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  return all(np.array_equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype for a, b in pairs)


def columns(batch: Batch, name: str) -> list[list[np.ndarray]]:
  """A field of Chunks as each optimizer step has it: by row of the plan, its trained tokens."""
  found = []
  for packed in batch.steps:
    parts = unpack(np.asarray(getattr(packed.chunks, name)), packed)
    found.append([(i, parts[i][SAMPLES[i].loss_mask]) for i in sorted(parts)])
  return found


def assert_column(batch: Batch, name: str, wanted):
  """In every optimizer step; `wanted(sample)` is of the tokens but the first."""
  steps = columns(batch, name)
  assert len(steps) == len(batch.plan.optimizer_steps)
  for i, values in itertools.chain(*steps):
    np.testing.assert_allclose(values, wanted(SAMPLES[i])[SAMPLES[i].loss_mask[1:]], atol=2e-5)


@pytest.fixture(scope='module')
def with_critic(folder):
  """Four batches of PPO in two minibatches and two epochs, of which the first two train the critic
  alone.
  """
  config = PpoConfig(critic_warmup=2, cliprange_value=None)
  with training(
    folder, stage_of(policy_gradient(config, SETTING), minibatches=2, epochs=2)
  ) as made:
    return made.run(4)


def test_while_the_critic_warms_up_it_alone_learns(with_critic):
  start = with_critic[0].before
  for done in with_critic[:2]:
    assert same(done.after.policy, start.policy), 'parameters, moments and counters'
    assert not same(done.after.critic.params, done.before.critic.params)
    assert done.updated.moved is False
    assert 'critic/vf_loss' in done.metrics and 'actor/pg_loss' not in done.metrics
    assert 'old_log_prob' in done.passes
    for i, sample in enumerate(SAMPLES):
      np.testing.assert_allclose(
        done.updated.logprobs[i][1:], asked_for(start.policy.params, sample), atol=2e-5
      )
  assert same(with_critic[2].before.policy, start.policy)
  for done in with_critic[2:]:
    assert done.updated.moved is True
    assert not same(done.after.policy.params, done.before.policy.params)
    assert not same(done.after.critic.params, done.before.critic.params)
    assert {
      'actor/pg_loss',
      'critic/vf_loss',
      'actor/grad_norm',
      'critic/grad_norm',
    } <= done.metrics.keys()
    assert [key for key in done.metrics if describe(key) is None] == []
  last = with_critic[3].after
  assert (int(last.policy.updates), int(last.critic.updates)) == (2 * 4, 4 * 4)


@pytest.mark.parametrize('whose', ['reference_logprobs', "the actor's output"])
def test_a_skipped_update_names_the_row_that_is_not_finite(folder, caplog, whose):
  """The token that makes a model NaN occurs in some rows alone."""
  config = GrpoConfig(kl_loss_coef=0.1)
  token = int(SAMPLES[3].tokens[-2])
  before = [i for i, s in enumerate(SAMPLES) if token in s.tokens[s.prompt_len - 1 : -1]]
  with training(folder, stage_of(policy_gradient(config, SETTING))) as made:
    sound = own(made.begin().policy.params)
    spoilt = jax.tree.map(np.copy, sound)
    spoilt['embed']['kernel'][token] = np.nan
    role = 'reference' if whose == 'reference_logprobs' else 'policy'
    learned = made.begin(**{'policy': sound, 'reference': sound, role: spoilt})
    (done,) = made.run(1, learned=learned._replace(reference_step=BEGIN - 1))
  assert done.metrics['run/skipped_updates'] == 1
  (line,) = [line for line in caplog.messages if 'an update of the actor is skipped' in line]
  assert f': {whose} of row s/{before[0]} is nan at token ' in line


@pytest.mark.parametrize('number', range(4))
def test_annotations_use_the_weights_before_the_batch_in_all_epochs(with_critic, number):
  """γ = λ = 1: the return of a token is its sample's reward, the advantage what the critic did not
  expect of it.
  """
  done = with_critic[number]
  assert len(done.batch.steps) == 4 and done.passes == {'old_log_prob', 'values'}
  policy, critic = done.before.policy.params, done.before.critic.params

  def reward(sample):
    return ROWS[sample.sample_index].reward

  def expected(sample):
    return values_of(critic, sample)

  assert_column(done.batch, 'values', expected)
  assert_column(done.batch, 'proximal_logprobs', lambda sample: forward(policy, sample))
  assert_column(
    done.batch, 'returns', lambda sample: np.full(len(sample.tokens) - 1, reward(sample))
  )
  surprise = np.concatenate([(reward(s) - expected(s))[s.loss_mask[1:]] for s in SAMPLES])

  def whitened(s):
    return (reward(s) - expected(s) - surprise.mean()) / np.sqrt(surprise.var(ddof=1) + 1e-8)

  assert_column(done.batch, 'advantages', whitened)
  moved = [np.abs(values_of(done.after.critic.params, s) - expected(s)).max() for s in SAMPLES]
  assert max(moved) > 0.01, 'the updates would not be seen'


def test_a_truncated_answer_ends_with_the_critics_value(folder):
  """γ = λ = 1: the return of a cut answer is its reward and the value of the state after its last
  token.
  """
  config = PpoConfig(bootstrap_truncated=True, cliprange_value=None)
  rows = [dataclasses.replace(row, truncated=i % 3 == 0) for i, row in enumerate(ROWS)]
  with training(
    folder, stage_of(policy_gradient(config, SETTING), minibatches=2, epochs=2)
  ) as made:
    (done,) = made.run(1, rows=rows)
  critic = done.before.critic.params
  embed, head = (np.asarray(critic[name]['kernel'], np.float64) for name in ('embed', 'head'))
  ahead = [row.truncated * float(embed[s.tokens[-1]] @ head[0]) for row, s in zip(rows, SAMPLES)]
  assert min(abs(ahead[i]) for i in (0, 3, 6)) > 0.1, 'the values would not be seen'

  def wanted(s):
    return np.full(len(s.tokens) - 1, rows[s.sample_index].reward + ahead[s.sample_index])

  assert_column(done.batch, 'returns', wanted)
  assert_column(done.batch, 'values', lambda sample: values_of(critic, sample))
  assert done.passes == {'old_log_prob', 'values'}


def slow(program):
  """The program, which ends only some time after it has been dispatched."""

  @jax.jit
  def compute(*args):
    square = jnp.ones((256, 256)) / 256
    product = jax.lax.fori_loop(0, 300, lambda _, x: x @ square, square)
    return jax.tree.map(lambda x: x + (product[0, 0] < 0), program(*args))

  return compute


def test_passes_before_the_update_are_timed_to_their_ends(folder, monkeypatch):
  stage, ended = stage_of(policy_gradient(PpoConfig(), SETTING)), []
  with training(folder, stage) as made:
    trainer, stopwatch = made._trainer, made._process.stopwatch
    timed, results = stopwatch.timed, []

    def watching(program):
      def begin(*args):
        results.append(program(*args))
        return results[-1]

      return begin

    @contextlib.contextmanager
    def watched(name):
      with timed(name):
        yield
        if name in ('old_log_prob', 'values'):
          ended.append((name, results[-1].is_ready()))

    async def main():
      stop = asyncio.get_running_loop().create_future()
      planner = Planner(seed=0, every_steps=100, every_minutes=1e6, stop=stop)
      plan = await planner.close(stage, BEGIN, Rows(ROWS, ()))
      await trainer.annotate(made.begin(), dataclasses.replace(plan, proximal=True))

    monkeypatch.setattr(stopwatch, 'timed', watched)
    for name in ('_score', '_value'):
      monkeypatch.setattr(trainer, name, watching(slow(getattr(trainer, name))))
    asyncio.run(main())
  assert ended == [('old_log_prob', True), ('values', True)]


def assert_referred(batch, params):
  """The reference's logprobs are those of the parameters, in every optimizer step."""
  assert_column(batch, 'reference_logprobs', lambda sample: forward(params, sample))


def test_a_pass_that_the_plan_asks_for_finds_what_the_one_update_would(folder):
  """The policy before the batch is the proximal one and the reference: KL 0, and no copy of it."""
  config = GrpoConfig(kl_loss_coef=0.2, reference=ReferenceRule(every=1))
  with training(folder, stage_of(policy_gradient(config, SETTING))) as made:
    spared, *_ = made.run(2)
    (asked,) = made.run(1, change=lambda plan: dataclasses.replace(plan, proximal=True))
  assert (asked.passes, spared.passes) == ({'old_log_prob', 'ref'}, set())
  assert_referred(asked.batch, asked.before.policy.params)
  for done in (asked, spared):
    assert done.before.reference is None and done.after.reference is None
    assert done.after.reference_step == BEGIN + 1
    assert done.metrics['actor/kl'] == pytest.approx(0.0, abs=1e-6)
    for i, sample in enumerate(SAMPLES):
      np.testing.assert_allclose(
        done.updated.logprobs[i][1:], asked_for(done.before.policy.params, sample), atol=2e-5
      )
  assert asked.metrics == pytest.approx(spared.metrics, abs=1e-5)
  for one, other in zip(
    jax.tree.leaves(asked.after.policy.params), jax.tree.leaves(spared.after.policy.params)
  ):
    np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(
  ('token_chunk', 'proximal'),
  [
    (4, False),
    (16, True),
    pytest.param(4, True, marks=pytest.mark.full),
    pytest.param(16, False, marks=pytest.mark.full),
  ],
)
def test_rows_that_the_loss_leaves_out_report_their_logprobs(folder, proximal, token_chunk):
  """What is compared with the sampler is what was sampled, whatever is learnt of it."""
  config = GrpoConfig(mask_truncated=True)
  rows = [dataclasses.replace(row, truncated=i == 0) for i, row in enumerate(ROWS)]
  with training(
    folder, stage_of(policy_gradient(config, SETTING), token_chunk=token_chunk)
  ) as made:
    (done,) = made.run(
      1, rows=rows, change=lambda plan: dataclasses.replace(plan, proximal=proximal)
    )
  assert not done.batch.annotation.in_loss[0] and any(done.batch.annotation.in_loss)
  for i, sample in enumerate(SAMPLES):
    np.testing.assert_allclose(
      done.updated.logprobs[i][1:], asked_for(done.before.policy.params, sample), atol=2e-5
    )


def test_the_policy_before_each_batch_is_the_reference_of_all_its_updates(folder):
  with training(folder, stage_of(opmd(OpmdConfig(), SETTING), minibatches=2, epochs=2)) as made:
    done = made.run(2)
  assert [at.after.reference_step - BEGIN for at in done] == [1, 2]
  for at in done:
    assert at.before.reference is None and at.after.reference is None
    assert at.passes == {'old_log_prob', 'ref'}
    assert_referred(at.batch, at.before.policy.params)
    for i, sample in enumerate(SAMPLES):
      np.testing.assert_allclose(
        at.updated.logprobs[i][1:], asked_for(at.before.policy.params, sample), atol=2e-5
      )
    assert abs(at.metrics['actor/log_ratio_sum']) > 1e-4, 'later updates are away from it'


def kl_by_hand(policy, reference) -> float:
  """k3 of the policy against the reference, mean over the trained tokens."""
  d = np.concatenate(
    [(forward(reference, s) - forward(policy, s))[s.loss_mask[1:]] for s in SAMPLES]
  )
  return float((np.exp(d) - d - 1).mean())


def test_resetting_the_reference_every_second_batch_restarts_the_kl(folder):
  """And the coefficient, which follows the KL, goes from batch to batch; so do the optimizer's
  moments.
  """
  config = GrpoConfig(
    kl_loss_coef=0.2, kl_target=1e-4, kl_horizon=100.0, reference=ReferenceRule(every=2)
  )
  with training(folder, stage_of(policy_gradient(config, SETTING))) as made:
    done = made.run(5)
  assert [at.after.reference_step - BEGIN for at in done] == [0, 2, 2, 4, 4]
  for number, at in enumerate(done):
    set_at = done[number - number % 2].before.policy.params
    assert same(at.before.reference, set_at)
    assert_referred(at.batch, set_at)
    kl = at.metrics['actor/kl']
    assert kl == pytest.approx(kl_by_hand(at.before.policy.params, set_at), abs=1e-5)
    assert (kl == 0) == (number % 2 == 0), 'the policy is the reference, to the bit'
  coefficients, states = (
    [at.metrics['actor/kl_coef'] for at in done],
    [at.after.algorithm_state for at in done],
  )
  assert coefficients == pytest.approx([0.2, *(state['kl_coef'] for state in states[:-1])])
  assert len(set(coefficients)) == 5 and json.loads(json.dumps(states)) == states
  assert [int(adam_of(at.after).count) for at in done] == [1, 2, 3, 4, 5]


def of_optimizer(learned, kind):
  nodes = jax.tree.leaves(learned.policy.opt_state, is_leaf=lambda node: isinstance(node, kind))
  (found,) = (node for node in nodes if isinstance(node, kind))
  return found


def adam_of(learned):
  return of_optimizer(learned, optax.ScaleByAdamState)


def test_an_averaged_reference_and_an_optimizer_that_starts_afresh(folder, monkeypatch):
  monkeypatch.setattr(trainer_module, '_averaged', slow(trainer_module._averaged))
  config = OpmdConfig(reference=ReferenceRule(ema=0.75))
  stage = stage_of(
    opmd(config, SETTING), optimizer=OptimizerConfig(peak_lr=0.05, schedule='linear')
  )
  with training(folder, stage) as made:
    done = made.run(3)
    # The same batch, by a stage that begins with what the third began with.
    begin = made.begin(done[2].before.policy.params, done[2].before.reference)
    (fresh,) = made.run(1, learned=begin, change=lambda plan: done[2].batch.plan)
  assert [at.after.reference_step - BEGIN for at in done] == [1, 2, 3]
  wanted = np.asarray(done[0].before.policy.params['embed']['kernel'], np.float64)
  for at in done:
    np.testing.assert_allclose(at.before.reference['embed']['kernel'], wanted, atol=1e-6)
    assert at.passes == {'ref'}
    assert_referred(at.batch, at.before.reference)
    wanted = 0.75 * wanted + 0.25 * np.asarray(
      at.after.policy.params['embed']['kernel'], np.float64
    )
    np.testing.assert_allclose(at.after.reference['embed']['kernel'], wanted, atol=1e-6)
    assert at.after.reference['embed']['kernel'].dtype == np.float32
  # The rate falls by a twentieth of its peak with each of twenty updates.
  assert [at.metrics['actor/lr'] for at in done] == pytest.approx(
    [0.05, 0.05 * 19 / 20, 0.05 * 18 / 20]
  )
  assert [int(of_optimizer(at.after, optax.ScaleByScheduleState).count) for at in done] == [1, 2, 3]
  assert [int(at.after.policy.updates) for at in done] == [1, 2, 3]
  assert [int(adam_of(at.after).count) for at in done] == [1, 1, 1]
  for name in ('mu', 'nu'):
    moments = [jax.tree.leaves(getattr(adam_of(at.after), name)) for at in (done[2], fresh)]
    for one, other in zip(*moments, strict=True):
      np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-9)
  assert fresh.metrics['actor/lr'] == pytest.approx(0.05), 'whose schedule is at its beginning'


def paired(rows):
  """Rows of preference pairs: each even one against the one after it."""

  def fields(i):
    return dict(pair=f'p{i // 2}', label=1 - 2 * (i % 2), reward=None)

  return tuple(dataclasses.replace(row, **fields(i)) for i, row in enumerate(rows))


@pytest.mark.parametrize('chunk_len', [16, 96])
def test_held_out_pairs_are_measured_where_the_plan_names_them(folder, chunk_len):
  """Four pairs held out where an optimizer step has room for one; the reference is the stage's
  first policy.

  A chunk of 96 tokens would take all of them, but the arrays have room for as many as a batch can
  bring.
  """
  algorithm = dpo(DpoConfig(beta=0.3), SETTING)
  shape = plan_shape(rows=2, ranks=1, chunks=2, chunk_len=chunk_len, unit=2)
  with training(
    folder, stage_of(algorithm, shape=shape, held_out='choices', evaluate_every=2)
  ) as made:
    done = made.run(4, rows=paired(ROWS[:2]), held_out=paired(ROWS))
  measured = [any(key.startswith('val-core/') for key in at.metrics) for at in done]
  assert measured == [False, True, False, True] == ['testing' in at.passes for at in done]
  start = done[0].before.policy.params
  for at in done:
    assert same(at.after.reference, start) and at.after.reference_step == BEGIN
  for at in (done[1], done[3]):
    summed = [
      (forward(at.after.policy.params, s) - forward(start, s))[s.loss_mask[1:]].sum()
      for s in SAMPLES
    ]
    margins = 0.3 * (np.array(summed[::2]) - np.array(summed[1::2]))
    assert np.abs(margins).min() > 1e-4
    prefix = 'val-core/choices'
    assert at.metrics[f'{prefix}/rewards/accuracies'] == pytest.approx((margins > 0).mean())
    assert at.metrics[f'{prefix}/rewards/margins'] == pytest.approx(margins.mean(), abs=1e-5)
    assert at.metrics[f'{prefix}/dpo_loss'] == pytest.approx(
      np.log1p(np.exp(-margins)).mean(), abs=1e-5
    )
    assert [key for key in at.metrics if describe(key) is None] == []


class Position:
  """Implements `Batches`, of which a commit asks the state alone."""

  explores, held_out = False, ()

  def state(self):
    return {'stream': 7}

  def running(self): ...
  def advance(self, step, served): ...
  async def next(self): ...
  def taken(self): ...
  def record(self, plan): ...
  def trained(self, plan): ...
  def restore(self, state): ...


def logs_of(folder, stage, tokenizer) -> Logs:
  engine = exploring.FakeEngine(tokenizer)
  return Logs(
    metrics=MetricsWriter(folder, committed=0),
    rollouts=RolloutsWriter(folder),
    evals=EvalsWriter(folder),
    progress=ProgressDisplay({stage.name: 100}),
    store=exploring.new_store(folder / 'replay'),
    batches={stage.name: Position()},
    evaluator=Evaluator(
      workflow=SingleTurn(engine, tokenizer, max_tokens=4),
      scorers=exploring.FakeScorers(lambda attempt: 1.0),
      rewards=exploring.REWARDS,
    ),
    suites=[],
    decode=str,
    machine_metrics=dict,
  )


def drawn(like, rng):
  """Arrays of those shapes, dtypes and shardings."""

  def of(x):
    return (100 * rng.standard_normal(x.shape)).astype(x.dtype)

  return jax.tree.map(lambda x: jax.device_put(of(x), x.sharding), like)


def test_a_commit_holds_all_that_is_learned(tmp_path):
  shape = dict(
    num_hidden_layers=1, hidden_size=16, intermediate_size=16, head_dim=8, num_attention_heads=2
  )
  model, mesh = (
    build_model(tiny('qwen3', 12, num_key_value_heads=1, **shape)),
    build_mesh(MeshConfig(), jax.devices()[:1]),
  )
  config, rng = PpoConfig(kl_loss_coef=0.1, kl_target=0.1), np.random.default_rng(0)
  stage = stage_of(policy_gradient(config, SETTING))
  policy = abstract_state(model, stage.policy.optimizer, mesh)
  critic = abstract_state(build_model(with_head(model.spec, 'value')), stage.critic.optimizer, mesh)
  learned = Learned(
    drawn(policy, rng),
    drawn(critic, rng),
    drawn(policy.params, rng),
    reference_step=BEGIN - 3,
    algorithm_state={'kl_coef': 0.12345678901234567},
  )
  checkpoints = Checkpoints(tmp_path / 'checkpoints', CheckpointConfig(), leads=True)
  logs = logs_of(tmp_path, stage, exploring.make_tokenizer(tmp_path / 'tokenizer'))

  async def main():
    device = DeviceThread()
    keeper = RunKeeper(
      Process(
        coordinator=Coordinator(device, on_signal=lambda signum: None), device=device, mesh=mesh
      ),
      Start(stop=asyncio.get_running_loop().create_future()),
      publisher=Publisher(None, Gatherer(mesh), device),
      checkpoints=checkpoints,
      logs=logs,
      generates=False,
    )
    await keeper.leave(LoopState(learned, BEGIN + 2, evaluated=True), stage)
    await keeper.settle()
    device.close()

  asyncio.run(main())
  logs.metrics.close()
  logs.store.close()
  restored = restore_state(stage, BEGIN + 2, checkpoints, model, mesh)
  assert same(own(restored.learned), own(learned))
  assert (restored.step, restored.evaluated, restored.moved, restored.stop) == (
    BEGIN + 2,
    True,
    0,
    0,
  )
  assert checkpoints.host(BEGIN + 2)['batches'] == {'stream': 7}
