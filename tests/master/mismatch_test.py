"""Trainer against sampler: by hand, against a budget, and from logprobs that are those before the
batch.
"""

import asyncio
import dataclasses
import io
import json
import math

import exploring
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigrams import ROWS, SAMPLES, TAKEN, asked_for, bigram, forward, make_stage
from rich.console import Console

from jaxrl_llm.batching.plan import StepPlan, pack_step, plan_shape
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import encode
from jaxrl_llm.data.load import PackedStep, RowLoader
from jaxrl_llm.learner.algorithm import Annotation
from jaxrl_llm.learner.state import Learned, TrainState, init_state, place_params
from jaxrl_llm.master.evaluation import Evaluator
from jaxrl_llm.master.keeper import Logs, RunKeeper, Start
from jaxrl_llm.master.loop import LoopState
from jaxrl_llm.master.mismatch import MismatchConfig, mismatch_metrics, over_budget
from jaxrl_llm.master.process import Process
from jaxrl_llm.master.trainer import Batch, Roles, StageTrainer, Updated
from jaxrl_llm.parallel.coordinator import Coordinator
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh
from jaxrl_llm.replay.segments import write_segment
from jaxrl_llm.rollout.gatherer import Gatherer
from jaxrl_llm.rollout.publisher import Publisher
from jaxrl_llm.rollout.workflow import SingleTurn
from jaxrl_llm.runtime.checkpoint import CheckpointConfig, Checkpoints
from jaxrl_llm.runtime.metric_descriptions import METRICS, describe
from jaxrl_llm.runtime.metrics import resolve
from jaxrl_llm.runtime.progress import ProgressDisplay
from jaxrl_llm.runtime.writers import EvalsWriter, MetricsWriter, RolloutsWriter

LN2 = math.log(2.0)
# Trainer 1/4, 1/2 where the sampler says 1/2, 1/2; trainer 1 where it says 1/4. So r = -ln 2, 0 | 2
# ln 2.
HAND = [
  (-LN2 * np.array([2.0, 1.0]), -LN2 * np.array([1.0, 1.0])),
  (np.array([0.0]), np.array([-2 * LN2])),
]


def measured(pairs) -> dict[str, float]:
  return resolve(mismatch_metrics(pairs))


def test_two_sequences_by_hand():
  # Importance weights 1/2, 1, 4: sum 5.5, of squares 17.25. Perplexities: 2^1.5 and 1 against 2 and
  # 4.
  weights = {'mean': 5.5 / 3, 'max': 4.0, 'min': 0.5}
  assert measured(HAND) == pytest.approx(
    {
      **{f'rollout_corr/rollout_is_{kind}': value for kind, value in weights.items()},
      **{f'sampling/importance_sampling_ratio/{kind}': value for kind, value in weights.items()},
      'rollout_corr/rollout_is_eff_sample_size': 5.5**2 / (3 * 17.25),
      'rollout_corr/kl': -LN2 / 3,  # sampler - trainer: ln 2, 0, -2 ln 2
      'rollout_corr/k3_kl': (2.5 - LN2) / 3,  # e^r - r - 1: ln 2 - 1/2, 0, 3 - 2 ln 2
      'rollout_corr/training_ppl': (2**1.5 + 1) / 2,
      'rollout_corr/rollout_ppl': (2 + 4) / 2,
      'rollout_corr/log_ppl_diff': (0.5 - 2) * LN2 / 2,
      'rollout_corr/log_ppl_abs_diff': (0.5 + 2) * LN2 / 2,
      'rollout_corr/chi2_token': 17.25 / 3 - 1,
      'rollout_corr/chi2_seq': (0.25 + 16) / 2 - 1,
      'sampling/sampling_logp_difference/mean': LN2,
      'sampling/sampling_logp_difference/max': 2 * LN2,
    },
    rel=1e-12,
  )


def test_equal_logprobs_have_zero_mismatch():
  found = measured([(sampler, sampler) for _, sampler in HAND])
  ones = {
    'rollout_is_mean',
    'rollout_is_max',
    'rollout_is_min',
    'rollout_is_eff_sample_size',
    'mean',
    'max',
    'min',
  }
  for key, value in found.items():
    if not key.endswith('_ppl'):
      one = key.split('/')[-1] in ones and 'difference' not in key
      assert value == float(one), key


def test_float32_differences_near_its_resolution_are_not_lost():
  # k3 of a small r is r² / 2: 5e-15, which float32 has no way to tell from 0 beside 1.
  sampler = np.zeros(1000, np.float32)
  found = measured([(sampler - np.float32(1e-7), sampler)])
  assert found['rollout_corr/k3_kl'] == pytest.approx(5e-15, rel=1e-6)
  assert found['rollout_corr/kl'] == pytest.approx(1e-7, rel=1e-6)
  assert found['rollout_corr/chi2_token'] == pytest.approx(-2e-7, rel=1e-6)


def test_exponents_are_bounded_and_differences_are_not():
  found = measured(
    [(np.array([-1000.0]), np.array([-1.0])), (np.array([-1.0]), np.array([-1000.0]))]
  )
  assert all(math.isfinite(value) for key, value in found.items() if not key.endswith('_ppl')), (
    found
  )
  assert found['rollout_corr/rollout_is_max'] == pytest.approx(math.exp(20))
  assert found['rollout_corr/rollout_is_min'] == pytest.approx(math.exp(-20))
  assert found['sampling/sampling_logp_difference/max'] == 999.0
  assert found['rollout_corr/chi2_seq'] == pytest.approx(math.exp(40) / 2)


def test_a_broken_trainer_is_reported_not_hidden():
  found = measured([*HAND, (np.array([math.nan, -1.0]), np.array([-1.0, -1.0]))])
  assert [key for key, value in found.items() if not math.isnan(value)] == [
    'rollout_corr/rollout_ppl'
  ]
  found = measured([*HAND, (np.array([-math.inf, -1.0]), np.array([-1.0, -1.0]))])
  assert found['rollout_corr/kl'] == math.inf and found['rollout_corr/training_ppl'] == math.inf


def test_sequences_without_sampled_tokens_are_not_counted():
  empty = (np.zeros(0), np.zeros(0))
  assert mismatch_metrics([]) == {} == mismatch_metrics([empty])
  assert measured([*HAND, empty]) == measured(HAND)


def test_every_key_has_a_description_of_how_to_read_it():
  for key in measured(HAND):
    text = describe(key)
    assert text is not None and text != METRICS['rollout_corr/<name>'], key
  assert describe('run/mismatch_over_budget') != METRICS['run/<name>']


VALUES = {'rollout_corr/k3_kl': 0.02, 'sampling/sampling_logp_difference/max': 3.0}


@pytest.mark.parametrize(
  ('config', 'values', 'budgets'),
  [
    ({}, VALUES, ['warn_k3_kl']),
    ({'warn_k3_kl': 0.02}, VALUES, []),  # as large as the budget is inside it
    ({'warn_max_difference': 2.5}, VALUES, ['warn_k3_kl', 'warn_max_difference']),
    ({'warn_k3_kl': 0.1, 'warn_max_difference': 2.5}, VALUES, ['warn_max_difference']),
    (
      {'warn_max_difference': 2.5},
      dict.fromkeys(VALUES, math.nan),
      ['warn_k3_kl', 'warn_max_difference'],
    ),
    ({}, dict.fromkeys(VALUES, math.nan), ['warn_k3_kl']),
    ({'warn_max_difference': 0.0}, {}, []),
  ],
)
def test_budgets(config, values, budgets):
  assert list(over_budget(MismatchConfig(**config), values)) == budgets


def test_a_note_states_expectation_and_remedy_in_one_line():
  lines = over_budget(MismatchConfig(warn_max_difference=2.5), VALUES)
  for budget, words in {
    'warn_k3_kl': [
      'rollout_corr/k3_kl is 0.02 nats per token',
      'budget 0.01',
      'rollout.mismatch.warn_k3_kl',
    ],
    'warn_max_difference': [
      'difference/max is 3 nats',
      'budget 2.5',
      'rollout.mismatch.warn_max_difference',
    ],
  }.items():
    assert '\n' not in lines[budget]
    for word in (*words, 'float32', 'report'):
      assert word in lines[budget]


@pytest.mark.parametrize('value', [-1e-9, math.nan])
def test_a_budget_that_means_nothing_is_refused(value):
  for name in ('warn_k3_kl', 'warn_max_difference'):
    with pytest.raises(UserError, match=rf'^rollout\.mismatch\.{name}: .*wanted at least 0$'):
      MismatchConfig(**{name: value})


@pytest.mark.parametrize('epochs', [1, 2])
def test_logprobs_are_of_the_policy_before_the_batch_in_every_minibatch(tmp_path, epochs):
  """Two optimizer steps an epoch, and a learning rate at which each leaves the policy before it far
  behind.
  """
  write_segment(tmp_path, 'rows.arrayrecord', [encode(s) for s in SAMPLES])
  mesh, model = build_mesh(MeshConfig(fsdp=2), jax.devices()[:2]), bigram()
  start = jax.device_get(jax.jit(model.init)(jax.random.key(0)))
  stage = make_stage(epochs=epochs)
  plan = StepPlan(
    step=0,
    stage='grpo',
    rows=ROWS,
    optimizer_steps=((0, 2, 5, 7), (1, 3, 4, 6)) * epochs,
    proximal=True,
  )

  async def main():
    device = DeviceThread()
    learned = Learned(init_state(place_params(model, mesh, start), stage.policy.optimizer, mesh))
    trainer = StageTrainer(
      stage,
      Process(
        coordinator=Coordinator(device, on_signal=lambda signum: None), device=device, mesh=mesh
      ),
      roles=Roles(model, None),
      loader=RowLoader(tmp_path, mesh),
      learned=learned,
    )
    batch = await trainer.annotate(learned, plan)
    learned, updated = await trainer.update(learned, batch)
    device.close()
    return jax.device_get(learned.policy.params), updated

  after, updated = asyncio.run(main())
  assert sorted(updated.logprobs) == list(range(8))
  moved = [np.abs(forward(after, s) - forward(start, s)).max() for s in SAMPLES]
  assert min(moved) > 0.1, 'the updates would not be seen'
  for i, s in enumerate(SAMPLES):
    assert len(updated.logprobs[i]) == len(s.tokens)
    np.testing.assert_allclose(updated.logprobs[i][1:], asked_for(start, s), atol=1e-5)


class Taken:
  """Implements `Batches`: what `TAKEN` holds, or of a stage of demonstrations nothing."""

  explores = True
  held_out = ()

  def __init__(self, taken):
    self._taken = taken

  def taken(self):
    return self._taken

  def record(self, plan):
    pass

  def trained(self, plan):
    pass

  def running(self): ...
  def advance(self, step, served): ...
  async def next(self): ...
  def state(self): ...
  def restore(self, state): ...


def kept(workdir, tokenizer, differences, config, *, taken=TAKEN):
  """A keeper is told of one step per difference (of every token); the lines it shows and the rows
  it writes.
  """
  console = Console(file=io.StringIO(), width=400)
  plan = StepPlan(step=0, stage='grpo', rows=ROWS, optimizer_steps=(tuple(range(8)),))
  stage = make_stage(
    minibatches=1, epochs=1, shape=plan_shape(rows=8, ranks=2, chunks=2, chunk_len=16)
  )
  packing = pack_step(plan, 0, stage.shape)
  packed = PackedStep(
    None, packing=packing, rows=plan.optimizer_steps[0], grid=None, loss_mask=None
  )
  batch = Batch(plan, Annotation(np.zeros(8), np.ones(8, bool), {}), [packed])
  store, mesh = exploring.new_store(workdir / 'replay'), build_mesh(MeshConfig(), jax.devices()[:1])
  engine = exploring.FakeEngine(tokenizer)
  logs = Logs(
    metrics=MetricsWriter(workdir, committed=0),
    rollouts=RolloutsWriter(workdir),
    evals=EvalsWriter(workdir),
    progress=ProgressDisplay({'grpo': 100}, console=console, interval_s=1e9),
    store=store,
    batches={'grpo': Taken(taken)},
    evaluator=Evaluator(
      workflow=SingleTurn(engine, tokenizer, max_tokens=4),
      scorers=exploring.FakeScorers(lambda attempt: 1.0),
      rewards=exploring.REWARDS,
    ),
    suites=[],
    decode=str,
    machine_metrics=dict,
    mismatch=config,
  )

  async def main():
    device = DeviceThread()
    process = Process(
      coordinator=Coordinator(device, on_signal=lambda signum: None), device=device, mesh=mesh
    )
    keeper = RunKeeper(
      process,
      Start(stop=asyncio.get_running_loop().create_future()),
      publisher=Publisher(engine, Gatherer(mesh), device),
      checkpoints=Checkpoints(workdir / 'checkpoints', CheckpointConfig(), leads=True),
      logs=logs,
      generates=False,
    )
    train = TrainState(
      params={}, opt_state=(), updates=jnp.zeros((), jnp.int32), skipped=jnp.zeros((), jnp.int32)
    )
    for step, difference in enumerate(differences, start=1):
      timed = process.stopwatch.timed
      with timed('step'), timed('gen'), timed('update_weights'):
        trainer = {i: s.behaviour_logprobs + np.float32(difference) for i, s in enumerate(SAMPLES)}
      rows = tuple(dataclasses.replace(row, version_step=step - 1) for row in plan.rows)
      done = batch._replace(plan=dataclasses.replace(plan, step=step - 1, rows=rows))
      await keeper.after_step(
        LoopState(Learned(train), step), stage, done, Updated({}, trainer, True)
      )
    device.close()

  asyncio.run(main())
  logs.metrics.close()
  store.close()
  lines = [line for line in console.file.getvalue().splitlines() if 'mismatch' in line]
  return lines, [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]


def steps_of(lines, budget):
  return [int(line.split()[1]) for line in lines if f'rollout.mismatch.{budget})' in line]


def test_every_step_over_budget_is_counted_and_one_in_twenty_is_noted_for_each_budget(
  tmp_path, tokenizer
):
  # r² / 2 is over 0.01 from |r| = 0.15 on: k3 exceeds its budget in steps 5 ... 50, the difference
  # in 10 ... 45.
  differences = [0.0] * 4 + [0.2] * 5 + [0.5] * 36 + [0.2] * 5
  config = MismatchConfig(warn_max_difference=0.4)
  lines, rows = kept(tmp_path, tokenizer, differences, config)
  assert steps_of(lines, 'warn_k3_kl') == [5, 25, 45]
  assert steps_of(lines, 'warn_max_difference') == [10, 30]
  assert len(lines) == 5 and lines[0].startswith('step 5 (grpo): ')
  assert [row['run/mismatch_over_budget'] for row in rows] == [0.0] * 4 + [1.0] * 46
  assert [row['sampling/sampling_logp_difference/max'] for row in rows] == pytest.approx(
    differences
  )
  assert rows[4]['rollout_corr/k3_kl'] == pytest.approx(math.exp(0.2) - 1.2, rel=1e-5)


def test_inside_the_budget_nothing_is_said(tmp_path, tokenizer):
  lines, rows = kept(tmp_path, tokenizer, [0.1, -0.1, 0.0], MismatchConfig())
  assert lines == [] and [row['run/mismatch_over_budget'] for row in rows] == [0.0] * 3


def test_a_trainer_that_is_nan_is_over_budget(tmp_path, tokenizer):
  lines, rows = kept(tmp_path, tokenizer, [math.nan], MismatchConfig())
  assert len(lines) == 1 and 'is nan' in lines[0]
  assert (rows[0]['rollout_corr/k3_kl'], rows[0]['rollout_corr/k3_kl/nonfinite']) == (None, 'nan')
  assert rows[0]['run/mismatch_over_budget'] == 1.0


def test_demonstrations_have_no_sampler_to_differ_from(tmp_path, tokenizer):
  lines, rows = kept(tmp_path, tokenizer, [1.0], MismatchConfig(), taken={})
  assert lines == []
  assert not any(key.startswith(('rollout_corr/', 'sampling/', 'run/mismatch')) for key in rows[0])
