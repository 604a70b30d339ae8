"""What process 0 decides for a step, and that a batch's state is as of the last completed batch
whatever is drawn.
"""

import asyncio
import collections
import contextlib
import itertools
import json
import signal

import exploring
import optax
import pytest
from clocks import simulated
from stored import make_sample

from jaxrl_llm.batching.plan import Row, StepPlan, plan_shape
from jaxrl_llm.core.records.sample import encode
from jaxrl_llm.data.streams import RowStream
from jaxrl_llm.learner.algorithm import Algorithm, ReferenceRule, Setting
from jaxrl_llm.learner.mix import MixConfig, mix
from jaxrl_llm.learner.opmd import OpmdConfig, opmd
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.learner.policy_gradient import policy_gradient
from jaxrl_llm.learner.policy_options import GrpoConfig, PpoConfig, ReinforcePlusPlusConfig
from jaxrl_llm.learner.preference import DpoConfig, dpo
from jaxrl_llm.learner.supervised import SftConfig, sft
from jaxrl_llm.master.batches import (
  Batches,
  LateBatches,
  MixedBatches,
  Planner,
  RolloutBatches,
  StreamBatches,
)
from jaxrl_llm.master.experts import AddedExperts
from jaxrl_llm.master.exploring.selection import SelectionConfig
from jaxrl_llm.master.trainer import Optimization, Stage
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.experts import ExpertRow, add, as_expert
from jaxrl_llm.replay.segments import SegmentReader, write_segment
from jaxrl_llm.rollout.untrusted import Bounds
from jaxrl_llm.rollout.workflow import demonstration_sample

SETTING = Setting(max_response_length=16)
GRPO = policy_gradient(GrpoConfig(), SETTING)
SFT = sft(SftConfig(), SETTING)


def make_stage(**fields) -> Stage:
  defaults = dict(
    name='grpo',
    start=10,
    end=20,
    algorithm=GRPO,
    policy=Optimization(optax.sgd(1.0), OptimizerConfig(peak_lr=1.0)),
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
    uid=f'r{i}', source='s', index=i, length=4, prompt_len=2, group='g', reward=1.0,
    is_expert=False, truncated=False, version_step=0,
  )  # fmt: skip


class FakeBatches:
  """Implements `Batches`: four rows as soon as `ready` is set."""

  explores = True

  def __init__(self):
    self.held_out = ()
    self.ready, self.cancelled, self.error = asyncio.Event(), False, None

  @contextlib.asynccontextmanager
  async def running(self):
    yield

  def advance(self, step, served):
    pass

  async def next(self):
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

  def record(self, plan):
    pass

  def trained(self, plan):
    pass

  def state(self):
    return None

  def restore(self, state):
    pass


def close(
  step,
  stage=None,
  *,
  every_steps=100,
  every_minutes=1e6,
  ready=True,
  stop=None,
  error=None,
  seed=0,
  held_out=(),
):
  """The plan of one step, and the batches it was asked from."""

  async def main():
    batches, stopped = FakeBatches(), asyncio.get_running_loop().create_future()
    batches.error, batches.held_out = error, held_out
    planner = Planner(seed=seed, every_steps=every_steps, every_minutes=every_minutes, stop=stopped)
    if ready:
      batches.ready.set()
    closing = asyncio.create_task(planner.close(stage or make_stage(), step, batches))
    if stop is not None:
      if not ready:
        await asyncio.sleep(0.01)
      stopped.set_result(stop)
    return await asyncio.wait_for(closing, 10), batches

  return simulated(main())


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
  monkeypatch.setattr('jaxrl_llm.master.batches.time.monotonic', lambda: now)

  async def main():
    nonlocal now
    planner = Planner(
      seed=0, every_steps=5, every_minutes=1.0, stop=asyncio.get_running_loop().create_future()
    )
    batches = FakeBatches()
    batches.ready.set()
    found = []
    for step in range(10, 18):
      now += 25.0
      found.append((await planner.close(make_stage(), step, batches)).commit)
    return found

  # Seconds since the last commit: 25, 50, 75 (> 60: clock), 25, 50 (15 batches: steps), 25, 50, 75
  # (clock).
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


def test_each_epoch_contains_every_row_once_and_requires_the_proximal_pass():
  plan, _ = close(12, make_stage(minibatches=2, epochs=3))
  assert [len(rows) for rows in plan.optimizer_steps] == [2] * 6
  for first, second in zip(plan.optimizer_steps[::2], plan.optimizer_steps[1::2], strict=True):
    assert sorted(first + second) == [0, 1, 2, 3]
  assert plan.proximal and '6 optimizer steps' in plan.proximal_reason
  assert not close(12)[0].proximal
  assert not close(12, make_stage(minibatches=2, algorithm=SFT))[0].proximal, (
    'demonstrations have no ratio'
  )


def family(config=GrpoConfig, **fields) -> Algorithm:
  return policy_gradient(config(**fields), SETTING)


EVERY, FIXED = ReferenceRule(every=1), ReferenceRule()
WARMUP = 'the policy is not updated'
ON_HOST = 'annotation reads'


@pytest.mark.parametrize(
  ('algorithm', 'steps', 'reason'),
  [
    # One optimizer step finds the policy as it was before the batch: its own logprobs serve.
    (GRPO, 1, ''),
    (GRPO, 2, '2 optimizer steps'),
    (mix(MixConfig(), SETTING), 3, '3 optimizer steps'),
    # Not where the sampler's logprobs are the proximal ones; nor where there is no ratio.
    (family(bypass_old_logprobs=True), 4, ''),
    (SFT, 4, ''),
    (dpo(DpoConfig(), SETTING), 4, ''),
    # The reference is the policy before the batch, or a copy of its own.
    (opmd(OpmdConfig(), SETTING), 1, ''),
    (opmd(OpmdConfig(), SETTING), 2, '2 optimizer steps'),
    (opmd(OpmdConfig(reference=FIXED), SETTING), 2, ''),
    (family(bypass_old_logprobs=True, kl_loss_coef=0.1, reference=EVERY), 1, ''),
    (family(bypass_old_logprobs=True, kl_loss_coef=0.1, reference=EVERY), 2, '2 optimizer steps'),
    (family(bypass_old_logprobs=True, kl_loss_coef=0.1, reference=FIXED), 2, ''),
    # Rewards and coefficients are made on the host, before there is any update.
    (family(ReinforcePlusPlusConfig, kl_reward_coef=0.1), 1, ON_HOST),
    (family(kl_loss_coef=0.1, kl_target=0.05), 1, ON_HOST),
    (family(ReinforcePlusPlusConfig, kl_reward_coef=0.1, bypass_old_logprobs=True), 1, ''),
    (
      family(
        ReinforcePlusPlusConfig, kl_reward_coef=0.1, bypass_old_logprobs=True, reference=EVERY
      ),
      1,
      ON_HOST,
    ),
    (
      family(kl_loss_coef=0.1, kl_target=0.05, bypass_old_logprobs=True, reference=EVERY),
      1,
      ON_HOST,
    ),
    # A critic's values are a pass of their own.
    (family(PpoConfig), 1, ''),
    (family(PpoConfig), 2, '2 optimizer steps'),
    (family(PpoConfig, critic_warmup=2), 1, ''),
  ],
)
def test_the_proximal_pass_is_made_where_no_update_could_serve(algorithm, steps, reason):
  plan, _ = close(12, make_stage(algorithm=algorithm, minibatches=steps))
  assert len(plan.optimizer_steps) == steps
  assert (
    plan.proximal == bool(reason)
    and reason in plan.proximal_reason
    and (reason or not plan.proximal_reason)
  )


def test_while_the_critic_warms_up_a_pass_gives_the_logprobs():
  stage = make_stage(algorithm=family(PpoConfig, critic_warmup=2))
  reasons = [close(step, stage)[0].proximal_reason for step in range(10, 14)]
  assert [WARMUP in reason for reason in reasons] == [True, True, False, False] and reasons[2:] == [
    '',
    '',
  ]


def test_a_step_with_an_evaluation_lists_the_held_out_rows():
  held_out = tuple(make_row(i) for i in range(7, 9))
  plans = {
    step: close(step, make_stage(evaluate_every=4), held_out=held_out)[0] for step in range(10, 20)
  }
  assert {step for step, plan in plans.items() if plan.held_out} == {13, 17, 19}
  assert plans[13].held_out == held_out and not {row.uid for row in held_out} & {
    row.uid for row in plans[13].rows
  }
  assert StepPlan.from_json(json.loads(json.dumps(plans[13].to_json()))) == plans[13]


def test_the_split_is_a_function_of_seed_and_step():
  def deal(step, seed):
    return close(step, make_stage(minibatches=2), seed=seed)[0].optimizer_steps

  assert deal(12, 0) == deal(12, 0)
  assert len({deal(step, seed) for step in range(10, 16) for seed in range(4)}) > 2


@pytest.mark.parametrize('late', [False, True])
def test_a_streams_state_is_of_the_last_completed_batch(tmp_path, tokenizer, late):
  samples = [
    demonstration_sample(t, 'ab', tokenizer, number=i)
    for i, t in enumerate(exploring.make_tasks(7))
  ]
  write_segment(tmp_path, 'sft.arrayrecord', [encode(sample) for sample in samples])

  def open_stream():
    return RowStream(tmp_path, 'sft.arrayrecord', rows=3, seed=1)

  def make():
    return LateBatches(open_stream) if late else StreamBatches(open_stream())

  async def main():
    batches, drawn, states = make(), [], []
    async with batches.running():
      for step in range(5):
        batches.advance(step, step)
        states.append(json.dumps(batches.state()))
        rows, counts = await batches.next()
        assert counts == {} and all(row.is_expert and row.reward is None for row in rows)
        assert json.dumps(batches.state()) == states[-1], 'drawn, not trained'
        drawn.append([row.uid for row in rows])
        batches.record(StepPlan(step=step, stage='sft', rows=tuple(rows)))
        batches.trained(StepPlan(step=step, stage='sft', rows=tuple(rows)))
    for step, state in enumerate(states):
      resumed = make()
      resumed.restore(json.loads(state))
      resumed.advance(step, step)
      rows, _ = await resumed.next()
      assert [row.uid for row in rows] == drawn[step]

  asyncio.run(main())


def rollouts_of(exploration) -> RolloutBatches:
  return RolloutBatches(exploration.explorer)


def test_rollouts_state_is_of_the_last_completed_batch_and_draws_the_same_again(
  tmp_path, tokenizer
):
  """Task 1 is unscorable, so that the gate has a drop to remember."""
  stores = iter(exploring.new_store(tmp_path / str(i) / 'replay') for i in range(10))

  def make():
    def judge(attempt):
      return None if exploration.number(attempt) == 1 else 1.0

    exploration = exploring.Exploration(tokenizer, next(stores), judge)
    return rollouts_of(exploration)

  async def step(batches, number):
    batches.advance(number, number)
    before = json.dumps(batches.state())
    rows, _ = await batches.next()
    assert json.dumps(batches.state()) == before, 'drawn, not trained'
    assert list(batches.taken()) == [row.uid for row in rows]
    batches.record(StepPlan(step=number, stage='grpo', rows=tuple(rows)))
    batches.trained(StepPlan(step=number, stage='grpo', rows=tuple(rows)))
    return before, rows

  async def main():
    batches = make()
    async with batches.running():
      steps = [await step(batches, number) for number in range(3)]
    after = batches.state()
    # Batch 0 drew tasks 0, 1 (dropped) and 2; the other batches two each.
    assert after['sampler']['pools'] == [{'position': 7}] and after['gate'] == {
      'started': 7,
      'dropped': 1,
      'parked': 0,
    }
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
    assert (sample.uid, len(sample.tokens), sample.prompt_len) == (
      row.uid,
      row.length,
      row.prompt_len,
    )
    assert row.truncated == (sample.finish_reason == 'length') and row.group == sample.group_id
    assert (row.reward, row.version_step, row.is_expert) == (1.0, 0, False)


def experts_file(workdir, tokenizer, count=7) -> str:
  samples = [
    demonstration_sample(t, 'ab', tokenizer, number=i)
    for i, t in enumerate(exploring.make_tasks(count))
  ]
  write_segment(workdir, 'experts.arrayrecord', [encode(sample) for sample in samples])
  return 'experts.arrayrecord'


def mixed(explorer, store, stream: RowStream, rows: int) -> MixedBatches:
  bounds = Bounds(vocab_size=40, max_length=16)
  added = AddedExperts(store, max_uses=1, bounds=bounds)
  return MixedBatches(explorer, StreamBatches(stream), added, rows=rows)


def test_a_mixed_batch_has_fixed_numbers_of_both_and_resumes_exactly(tmp_path, tokenizer):
  """Four rollouts and three experts a step, which go round seven experts in an order of their
  own.
  """
  source, stores = experts_file(tmp_path, tokenizer), itertools.count()

  def make():
    store = exploring.new_store(tmp_path / str(next(stores)) / 'replay')

    def judge(attempt):
      return None if exploration.number(attempt) == 1 else 1.0

    exploration = exploring.Exploration(tokenizer, store, judge)
    stream = RowStream(tmp_path, source, rows=3, seed=5)
    return mixed(exploration.explorer, store, stream, 3), store

  async def step(batches, number):
    batches.advance(number, number)
    before = json.dumps(batches.state())
    rows, counts = await batches.next()
    assert json.dumps(batches.state()) == before, 'drawn, not trained'
    assert [row.is_expert for row in rows] == [False] * 4 + [True] * 3
    assert list(batches.taken()) == [row.uid for row in rows[:4]], (
      'what the experts wrote was not sampled'
    )
    assert all(row.version_step is None and row.reward is None for row in rows[4:])
    batches.record(StepPlan(step=number, stage='mix', rows=tuple(rows)))
    batches.trained(StepPlan(step=number, stage='mix', rows=tuple(rows)))
    return before, [row.uid for row in rows], counts

  async def main():
    batches, store = make()
    assert isinstance(batches, Batches) and batches.explores and batches.held_out == ()
    async with batches.running():
      steps = [await step(batches, number) for number in range(4)]
    report = audit(store)
    assert report.ok and report.live == (), report.lines
    assert report.states['trained'] == 4 * 4 + 7 and report.reasons == {'dropped(unscorable)': 2}
    assert report.partitions == {'usual': 4 * 4 + 2, 'expert': 7}
    wanted = collections.Counter(f'mix/{uid}' for _, uids, _ in steps for uid in set(uids[4:]))
    assert {uid: entry.uses for uid, entry in store.entries([*wanted]).items()} == wanted and max(
      wanted.values()
    ) == 2
    assert steps[0][2]['dropped/groups'] == 1
    store.close()
    for number in (1, 2, 3):
      resumed, store = make()
      resumed.restore(json.loads(steps[number][0]))
      async with resumed.running():
        assert (await step(resumed, number))[:2] == steps[number][:2]
      store.close()
    return [uids for _, uids, _ in steps]

  batches = asyncio.run(main())
  experts = [uid for uids in batches for uid in uids[4:]]
  assert len(set(experts[:7])) == 7 and experts[7:] != experts[:5], 'each epoch once, shuffled anew'


def test_added_rows_come_before_demonstrations_which_lose_no_row_of_their_epoch(
  tmp_path, tokenizer
):
  """Three expert rows a step: none, two and four have been added before the steps, so that the
  demonstrations fill three, one, none and two places; without added rows they are the same, in the
  same order.
  """
  source = experts_file(tmp_path, tokenizer)
  alone = RowStream(tmp_path, source, rows=3, seed=5)
  order = [row.uid for _ in range(3) for row in alone.next()]
  prompts = [make_sample(f'added/{i}', 8) for i in range(6)]
  uids = [as_expert(sample).uid for sample in prompts]

  async def main():
    store = exploring.new_store(tmp_path / 'replay')
    exploration = exploring.Exploration(tokenizer, store, lambda attempt: 1.0)
    stream = RowStream(tmp_path, source, rows=3, seed=5)
    batches, found = mixed(exploration.explorer, store, stream, 3), []
    async with batches.running():
      for step, arriving in enumerate([[], prompts[:2], prompts[2:], []]):
        rows = [ExpertRow(sample=sample, who='ann', origin={}) for sample in arriving]
        add(store.directory, rows)
        batches.advance(step, step)
        rows, counts = await batches.next()
        plan = StepPlan(step=step, stage='mix', rows=tuple(rows))
        batches.record(plan)
        batches.trained(plan)
        chosen = [row for row in rows if row.is_expert]
        assert len(chosen) == 3 and list(batches.taken()) == [row.uid for row in rows[:4]]
        found.append([row.uid for row in chosen])
        counted = tuple(counts[f'experts/{name}'] for name in ('arrived', 'added', 'waiting'))
        assert counted == [(0, 0, 0), (2, 2, 0), (4, 3, 1), (0, 1, 0)][step]
        for row in chosen:
          (sample,) = SegmentReader(tmp_path).read([(row.source, row.index)])
          assert sample.uid == row.uid and sample.loss_mask.sum() == row.length - row.prompt_len
    report = audit(store)
    assert report.ok and report.experts.endswith('trained: 1 times 6'), report.lines
    store.close()
    return found

  assert asyncio.run(main()) == [
    order[:3],
    [*uids[:2], order[3]],
    uids[2:5],
    [uids[5], *order[4:6]],
  ]


@pytest.mark.parametrize('minibatches', [1, 2])
def test_each_minibatch_has_its_share_of_both_kinds(tmp_path, tokenizer, minibatches):
  async def main():
    store = exploring.new_store(tmp_path / 'replay')
    exploration = exploring.Exploration(tokenizer, store, lambda attempt: 1.0)
    stream = RowStream(tmp_path, experts_file(tmp_path, tokenizer), rows=2, seed=5)
    batches = mixed(exploration.explorer, store, stream, 2)
    planner = Planner(
      seed=0, every_steps=9, every_minutes=1e6, stop=asyncio.get_running_loop().create_future()
    )
    async with batches.running():
      batches.advance(0, 0)
      plan = await planner.close(make_stage(start=0, minibatches=minibatches), 0, batches)
      batches.record(plan)
      batches.trained(plan)
    store.close()
    return plan

  plan = asyncio.run(main())
  shares = [[plan.rows[i].is_expert for i in numbers] for numbers in plan.optimizer_steps]
  assert [(kinds.count(False), kinds.count(True)) for kinds in shares] == [
    (4 // minibatches, 2 // minibatches)
  ] * minibatches


def test_rows_of_one_sample_share_its_place_and_its_pairs_stay_together(tmp_path, tokenizer):
  """Pairs of rollouts: the correct sample 2 of each group against both wrong ones, two pairs in
  each minibatch.
  """

  async def main():
    store = exploring.new_store(tmp_path / 'replay')

    def judge(attempt):
      return float(attempt.uid.endswith('/2'))

    selection = SelectionConfig(kind='pairs', pairs_per_group=2)
    batches = rollouts_of(
      exploring.Exploration(tokenizer, store, judge, group_size=3, selection=selection)
    )
    planner = Planner(
      seed=0, every_steps=9, every_minutes=1e6, stop=asyncio.get_running_loop().create_future()
    )
    async with batches.running():
      batches.advance(0, 0)
      plan = await planner.close(make_stage(start=0, minibatches=2), 0, batches)
      assert len(plan.rows) == 8 and len(batches.taken()) == 6
      batches.record(plan)
      batches.trained(plan)
    report = audit(store)
    assert report.ok and report.states['trained'] == 6, report.lines
    store.close()
    return plan

  plan = asyncio.run(main())
  by_uid = {}
  for row in plan.rows:
    by_uid.setdefault(row.uid, set()).add((row.source, row.index))
  assert all(len(places) == 1 for places in by_uid.values())
  for numbers in plan.optimizer_steps:
    pairs = [plan.rows[i].pair for i in numbers]
    assert len(numbers) == 4 and sorted(pairs) == sorted(2 * sorted(set(pairs)))


def test_updates_of_a_stage_are_counted_over_minibatches_and_epochs():
  assert make_stage(minibatches=2, epochs=3).updates == 10 * 2 * 3
