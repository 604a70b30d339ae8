"""What process 0 decides for a step, and that a batch's state is as of the last completed batch whatever is drawn."""

import asyncio
import contextlib
import json
import signal

import exploring
import optax
import pytest

from jaxrl_llm.batching.plan import Row, StepPlan, plan_shape
from jaxrl_llm.data.streams import RowStream
from jaxrl_llm.experience.sample import encode
from jaxrl_llm.learner.algorithm import SftConfig, sft
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.master.stage import Planner, RolloutBatches, StreamBatches
from jaxrl_llm.master.trainer import Stage
from jaxrl_llm.replay.segments import SegmentReader, write_segment
from jaxrl_llm.rollout.workflow import demonstration_sample


def make_stage(**fields) -> Stage:
  defaults = dict(
    name='grpo',
    start=10,
    end=20,
    algorithm=sft(SftConfig()),
    optimizer=optax.sgd(1.0),
    optimizer_config=OptimizerConfig(peak_lr=1.0),
    keep_optimizer=False,
    shape=plan_shape(rows=4, ranks=1, chunks=2, chunk_len=16),
    token_chunk=16,
    minibatches=1,
    epochs=1,
    evaluate_every=None,
    explores=True,
  )
  return Stage(**{**defaults, **fields})


def make_row(i: int) -> Row:
  return Row(
    uid=f'r{i}', source='s', index=i, length=4, prompt_len=2, group='g', reward=1.0, is_expert=False, truncated=False,
    version_step=0,
  )  # fmt: skip


class FakeBatches:
  """Implements `Batches`: four rows as soon as `ready` is set."""

  explores = True

  def __init__(self):
    self.ready, self.cancelled, self.error = asyncio.Event(), False, None

  @contextlib.asynccontextmanager
  async def running(self):
    yield

  def advance(self, step, served):
    pass

  async def next(self, step):
    try:
      await self.ready.wait()
    except asyncio.CancelledError:
      self.cancelled = True
      raise
    if self.error is not None:
      raise self.error
    return [make_row(i) for i in range(4)], {'dropped/groups': 2}

  def taken(self):
    return {}

  def trained(self, plan):
    pass

  def state(self):
    return None

  def restore(self, state):
    pass


def close(step, stage=None, *, every_steps=100, every_minutes=1e6, ready=True, stop=None, error=None, seed=0):
  """The plan of one step, and the batches it was asked from."""

  async def main():
    batches, stopped = FakeBatches(), asyncio.get_running_loop().create_future()
    batches.error = error
    planner = Planner(seed=seed, every_steps=every_steps, every_minutes=every_minutes, stop=stopped)
    if ready:
      batches.ready.set()
    closing = asyncio.create_task(planner.close(stage or make_stage(), step, batches))
    if stop is not None:
      if not ready:
        await asyncio.sleep(0.01)
      stopped.set_result(stop)
    return await asyncio.wait_for(closing, 10), batches

  return asyncio.run(main())


def test_a_plan_names_the_rows_and_what_was_counted_and_survives_json():
  plan, _ = close(12)
  assert (plan.step, plan.stage, plan.stop) == (12, 'grpo', 0)
  assert [row.uid for row in plan.rows] == ['r0', 'r1', 'r2', 'r3']
  assert plan.counts == {'dropped/groups': 2}
  assert sorted(plan.optimizer_steps[0]) == [0, 1, 2, 3] and len(plan.optimizer_steps) == 1
  assert StepPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_commits_come_every_n_completed_batches_of_the_run():
  # Step 12 makes the 13th batch complete: 12 % 4 = 0 does not count, 13 % 4 != 0.
  committed = [step for step in range(10, 19) if close(step, every_steps=4)[0].commit]
  assert committed == [11, 15]


def test_evaluations_come_every_n_batches_of_the_stage_and_at_its_end_and_are_committed():
  stage = make_stage(evaluate_every=4)
  plans = {step: close(step, stage)[0] for step in range(10, 20)}
  # Completed batches of the stage: 4, 8 and all 10.
  assert [step for step, plan in plans.items() if plan.evaluate] == [13, 17, 19]
  assert [step for step, plan in plans.items() if plan.commit] == [13, 17, 19]
  assert not any(plan.commit_by_clock for plan in plans.values())
  assert [step for step in range(10, 20) if close(step)[0].evaluate] == [19]


def test_a_commit_for_the_clock_alone_is_flagged_and_changes_nothing_else():
  by_clock, _ = close(12, every_minutes=-1.0)
  assert by_clock.commit and by_clock.commit_by_clock
  undisturbed = close(12)[0].to_json()
  assert by_clock.to_json() == {**undisturbed, 'commit': True, 'commit_by_clock': True}
  # Due by steps as well: the clock decided nothing.
  due, _ = close(12, every_steps=13, every_minutes=-1.0)
  assert due.commit and not due.commit_by_clock


def test_the_clock_starts_again_at_every_commit(monkeypatch):
  now = 0.0
  monkeypatch.setattr('jaxrl_llm.master.stage.time.monotonic', lambda: now)

  async def main():
    nonlocal now
    planner = Planner(seed=0, every_steps=5, every_minutes=1.0, stop=asyncio.get_running_loop().create_future())
    batches = FakeBatches()
    batches.ready.set()
    found = []
    for step in range(10, 18):
      now += 25.0
      found.append((await planner.close(make_stage(), step, batches)).commit)
    return found

  # Seconds since the last commit: 25, 50, 75 (> 60: clock), 25, 50 (15 batches: steps), 25, 50, 75 (clock).
  assert asyncio.run(main()) == [False, False, True, False, True, False, False, True]


def test_a_stop_wins_over_a_finished_batch():
  plan, _ = close(12, stop=signal.SIGTERM)
  assert (plan.stop, plan.rows, plan.commit, plan.evaluate) == (signal.SIGTERM, (), False, False)


def test_a_stop_ends_the_wait_for_a_batch():
  plan, batches = close(12, ready=False, stop=signal.SIGINT)
  assert plan.stop == signal.SIGINT and batches.cancelled


def test_a_failure_of_the_batch_goes_through_unless_the_run_is_leaving():
  with pytest.raises(KeyError):
    close(12, error=KeyError('x'))
  assert close(12, error=KeyError('x'), stop=signal.SIGINT)[0].stop == signal.SIGINT


def test_minibatches_and_epochs_deal_every_row_once_per_epoch_and_ask_for_the_proximal_pass():
  plan, _ = close(12, make_stage(minibatches=2, epochs=3))
  assert [len(rows) for rows in plan.optimizer_steps] == [2] * 6
  for first, second in zip(plan.optimizer_steps[::2], plan.optimizer_steps[1::2], strict=True):
    assert sorted(first + second) == [0, 1, 2, 3]
  assert plan.proximal and '6 optimizer steps' in plan.proximal_reason
  assert not close(12)[0].proximal
  assert not close(12, make_stage(minibatches=2, explores=False))[0].proximal, 'demonstrations have no ratio'


def test_the_deal_is_a_function_of_seed_and_step():
  deal = lambda step, seed: close(step, make_stage(minibatches=2), seed=seed)[0].optimizer_steps
  assert deal(12, 0) == deal(12, 0)
  assert len({deal(step, seed) for step in range(10, 16) for seed in range(4)}) > 2


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  return exploring.make_tokenizer(tmp_path_factory.mktemp('tokenizer'))


def test_a_streams_state_is_of_the_last_completed_batch(tmp_path, tokenizer):
  samples = [demonstration_sample(t, 'ab', tokenizer, number=i) for i, t in enumerate(exploring.make_tasks(7))]
  write_segment(tmp_path, 'sft.arrayrecord', [encode(sample) for sample in samples])
  make = lambda: StreamBatches(RowStream(tmp_path, 'sft.arrayrecord', rows=3, seed=1))

  async def main():
    batches, drawn, states = make(), [], []
    for step in range(5):
      batches.advance(step, step)
      states.append(json.dumps(batches.state()))
      rows, counts = await batches.next(step)
      assert counts == {} and all(row.is_expert and row.reward is None for row in rows)
      assert json.dumps(batches.state()) == states[-1], 'drawn, not trained'
      drawn.append([row.uid for row in rows])
      batches.trained(StepPlan(step=step, stage='sft', rows=tuple(rows)))
    for step, state in enumerate(states):
      resumed = make()
      resumed.restore(json.loads(state))
      resumed.advance(step, step)
      rows, _ = await resumed.next(step)
      assert [row.uid for row in rows] == drawn[step]

  asyncio.run(main())


def test_rollouts_state_is_of_the_last_completed_batch_and_draws_the_same_again(tmp_path, tokenizer):
  """Task 1 is unscorable, so that the gate has a drop to remember."""
  stores = iter(exploring.new_store(tmp_path / str(i) / 'replay') for i in range(10))

  def make():
    judge = lambda attempt: None if exploration.number(attempt) == 1 else 1.0
    exploration = exploring.Exploration(tokenizer, next(stores), judge)
    return RolloutBatches(exploration.explorer, exploration.store, exploration.sampler, exploration.gate)

  async def step(batches, number):
    batches.advance(number, number)
    before = json.dumps(batches.state())
    rows, _ = await batches.next(number)
    assert json.dumps(batches.state()) == before, 'drawn, not trained'
    assert list(batches.taken()) == [row.uid for row in rows]
    batches.trained(StepPlan(step=number, stage='grpo', rows=tuple(rows)))
    return before, rows

  async def main():
    batches = make()
    async with batches.running():
      steps = [await step(batches, number) for number in range(3)]
    after = batches.state()
    # Batch 0 drew tasks 0, 1 (dropped) and 2; the other batches two each.
    assert after['sampler']['position'] == 7 and after['gate'] == {'started': 7, 'dropped': 1}
    for number in (1, 2):
      resumed = make()
      resumed.restore(json.loads(steps[number][0]))
      async with resumed.running():
        _, rows = await step(resumed, number)
      assert [row.uid for row in rows] == [row.uid for row in steps[number][1]]
    return steps

  ((_, rows), *_) = asyncio.run(main())
  reader = SegmentReader(tmp_path / '0')
  for row in rows:
    (sample,) = reader.read([(row.source, row.index)])
    assert (sample.uid, len(sample.tokens), sample.prompt_len) == (row.uid, row.length, row.prompt_len)
    assert row.truncated == (sample.finish_reason == 'length') and row.group == sample.group_id
    assert (row.reward, row.version_step, row.is_expert) == (1.0, 0, False)


def test_updates_of_a_stage_are_counted_over_minibatches_and_epochs():
  assert make_stage(minibatches=2, epochs=3).updates == 10 * 2 * 3
