"""How old trained tokens are: the real loop, gate, explorer and store around a simulated engine."""

import asyncio
import collections
import contextlib
import itertools
import json
import math
import random

import exploring
import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from jaxrl_llm.app.schema import AlgorithmConfig, StageConfig
from jaxrl_llm.app.sources import Rollouts
from jaxrl_llm.batching.plan import pack_step, plan_shape
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.data.load import PackedStep
from jaxrl_llm.learner.algorithm import Setting, plain
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.learner.policy_gradient import policy_gradient
from jaxrl_llm.learner.policy_options import GrpoConfig
from jaxrl_llm.learner.state import Learned, TrainState
from jaxrl_llm.master import loop
from jaxrl_llm.master.batches import Planner, RolloutBatches
from jaxrl_llm.master.process import Process
from jaxrl_llm.master.trainer import Batch, Optimization, Stage, Updated
from jaxrl_llm.parallel.coordinator import Coordinator
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.index import open_store
from jaxrl_llm.rollout.gatherer import Gatherer
from jaxrl_llm.rollout.publisher import Publisher

SETTINGS = [(0, 1), (1, 1), (1, 2), (2, 1), (2, 3), (4, 2)]
"""Bound and batches between publications."""
BATCHES = 12


class Trainer:
  """Changes nothing, and takes `turns` of the event loop for it, so that rollouts go on
  meanwhile.
  """

  def __init__(self, shape, turns):
    self._shape, self._turns = shape, turns

  def scoring_roles(self, plan):
    return frozenset()

  training_roles = scoring_roles

  async def annotate(self, learned, plan):
    packed = PackedStep(
      None,
      packing=pack_step(plan, 0, self._shape),
      rows=plan.optimizer_steps[0],
      grid=None,
      loss_mask=None,
    )
    return Batch(plan, plain(plan.rows), [packed])

  async def update(self, learned, batch):
    for _ in range(self._turns):
      await asyncio.sleep(0)
    return learned, Updated({}, {}, True)


class Ledger:
  """A Keeper that notes what was trained, and what a commit after each step would hold."""

  evaluating = False

  def __init__(self, batches):
    self._batches, self.plans, self.states = batches, [], {}

  async def start(self, state, stage):
    return state

  async def after_step(self, state, stage, batch, updated):
    self._batches.record(batch.plan)
    self._batches.trained(batch.plan)
    self.plans.append(batch.plan)
    self.states[state.step] = json.dumps(self._batches.state())
    return state

  async def leave(self, state, stage):
    pass

  async def settle(self):
    pass

  async def abandon(self, error):
    pass


async def go(
  exploration, *, publish_every, start=0, end=BATCHES, batches=BATCHES, state=None, turns=0
):
  """Runs batches [start, end) of a stage; the Ledger of them."""
  group, size = exploration.config.groups_per_batch, exploration.config.group_size
  shape = plan_shape(rows=group * size, ranks=1, chunks=8, chunk_len=16)
  stage = Stage(
    name='grpo',
    start=0,
    end=end,
    algorithm=policy_gradient(GrpoConfig(), Setting(max_response_length=4)),
    policy=Optimization(optax.sgd(1.0), OptimizerConfig(peak_lr=1.0)),
    keep_optimizer=False,
    shape=shape,
    token_chunk=16,
    minibatches=1,
    epochs=1,
    evaluate_every=None,
    explores=True,
    publish_every=publish_every,
  )
  rollouts = RolloutBatches(exploration.explorer)
  if state is not None:
    rollouts.restore(json.loads(state))
  exploration.engine._version = None  # Until the loop publishes.
  device = DeviceThread()
  with contextlib.closing(device):
    ledger = Ledger(rollouts)
    mesh = Mesh(np.array(jax.devices()[:1]), ('x',))
    train = TrainState(params={'w': jax.numpy.zeros(2)}, opt_state=(), updates=None, skipped=None)

    async def enter(stage, state):
      return Trainer(shape, turns), state

    parts = loop.Parts(
      stages=(stage,),
      process=Process(
        coordinator=Coordinator(device, on_signal=lambda signum: None), device=device, mesh=mesh
      ),
      publisher=Publisher(exploration.engine, Gatherer(mesh), device),
      keeper=ledger,
      enter_stage=enter,
      planner=Planner(
        seed=0,
        every_steps=10**6,
        every_minutes=1e6,
        stop=asyncio.get_running_loop().create_future(),
      ),
      batches={'grpo': rollouts},
    )
    state = loop.LoopState(Learned(train), start, moved=start, attempt=exploration.store.attempt)
    await asyncio.wait_for(loop.run(parts, state), 60)
  return ledger


def lags(ledger):
  return [plan.step - row.version_step for plan in ledger.plans for row in plan.rows]


def enumerated(bound, publish_every):
  """Batch b starts with the first publication that permits it: the least multiple of the interval
  from b - bound on.
  """

  def lag(b):
    return b - publish_every * math.ceil(max(0, b - bound) / publish_every)

  return collections.Counter(lag(b) for b in range(BATCHES))


@pytest.mark.parametrize(('bound', 'publish_every'), SETTINGS)
def test_lags_are_those_of_the_schedule_where_the_engine_answers_at_once(
  tmp_path, tokenizer, bound, publish_every
):
  """Two groups of two in a batch: each lag of the enumeration is found four times."""
  store = exploring.new_store(tmp_path / 'replay')
  exploration = exploring.Exploration(
    tokenizer,
    store,
    lambda attempt: 1.0,
    bound=bound,
    batches=BATCHES,
    tasks=exploring.make_tasks(32),
  )
  exploration.engine.prompt = True
  # What may start has ended before the trainer is done.
  ledger = asyncio.run(go(exploration, publish_every=publish_every, turns=200))
  assert collections.Counter(lags(ledger)) == {
    lag: 4 * n for lag, n in enumerated(bound, publish_every).items()
  }
  assert max(lags(ledger)) == bound
  assert [how for how, _ in exploration.engine.published] == ['load'] * math.ceil(
    BATCHES / publish_every
  )
  report = audit(store)
  assert report.ok and report.states['trained'] == report.issued == BATCHES * 4
  store.close()


@pytest.mark.parametrize(('bound', 'publish_every'), SETTINGS)
@pytest.mark.parametrize('seed', range(3))
def test_no_trained_token_is_older_than_the_bound_whatever_ends_when(
  tmp_path, tokenizer, bound, publish_every, seed
):
  """With a long tail of durations, cut completions, a fifth of the groups dropped and trainers of
  any speed.
  """
  store = exploring.new_store(tmp_path / 'replay')
  rng = random.Random(seed)
  verdicts = collections.defaultdict(lambda: None if rng.random() < 0.2 else 1.0)
  exploration = exploring.Exploration(
    tokenizer,
    store,
    lambda attempt: verdicts[attempt.task.uid],
    delays=seed,
    bound=bound,
    batches=BATCHES,
    tasks=exploring.make_tasks(60),
  )
  slow = {task.uid for task in exploration.tasks if rng.random() < 0.2}
  until = {}

  def hold(request):
    uid = request.uid.split('/')[1]
    if uid not in slow:
      return False
    until.setdefault(request.uid, exploration.engine.version.step + rng.randrange(2))
    behind = exploration.engine.version.step < until[request.uid]
    # Its batch's turn has come: what it waits for would never be published.
    return (
      behind and exploration.store.counts()['admitted'] > exploration.config.groups_per_batch * 2
    )

  exploration.engine.hold = hold
  ledger = asyncio.run(go(exploration, publish_every=publish_every, turns=rng.randrange(60)))
  assert min(lags(ledger)) >= 0 and max(lags(ledger)) <= bound
  report = audit(store)
  assert report.ok and report.live == () and report.states['trained'] == BATCHES * 4
  store.close()


@pytest.mark.parametrize('step', [1, 4, 7])
@pytest.mark.parametrize(('bound', 'publish_every'), [(1, 1), (4, 2)])
def test_a_run_killed_with_groups_in_flight_trains_every_task_once(
  tmp_path, tokenizer, bound, publish_every, step
):
  """Killed after `step` + 2 batches, it goes on from the commit at `step`: the batches have the
  tasks that they would have had, what had ended by the commit is not rolled out again, and the
  store adds up.
  """
  tasks = exploring.make_tasks(BATCHES * 2)

  def explore(directory, delays, commit=0):
    store = open_store(directory, synchronous='normal')
    store.recover(commit)

    def judge(attempt):
      return float(attempt.uid.endswith('1'))

    return exploring.Exploration(
      tokenizer, store, judge, delays=delays, bound=bound, batches=BATCHES, tasks=tasks
    ), store

  whole, store = explore(tmp_path / 'whole', 0)
  expected = asyncio.run(go(whole, publish_every=publish_every, turns=30))
  store.close()

  first, store = explore(tmp_path / 'replay', 1)
  before = asyncio.run(go(first, publish_every=publish_every, end=step + 2, turns=30))
  store.close()
  state = before.states[step]
  waiting = [g for g in json.loads(state)['explorer']['groups'] if g['ended']]
  again, store = explore(tmp_path / 'replay', 2, step)
  after = asyncio.run(go(again, publish_every=publish_every, start=step, state=state, turns=30))

  def groups(plans):
    return [row.group for plan in plans for row in plan.rows]

  assert groups(before.plans[:step] + after.plans) == groups(expected.plans)
  assert waiting, 'nothing waited for its batch at the commit: the test shows less than it says'
  asked = {request.uid for request in again.engine.requests}
  assert not asked & {f'grpo/{g["task"]}/{g["visit"]}' for g in waiting}
  assert max(lags(after)) <= bound and min(lags(after)) >= 0
  report = audit(store)
  assert report.ok and report.live == (), report.lines
  trained = collections.Counter(groups(before.plans[:step] + after.plans))
  assert set(trained.values()) == {2} and len(trained) == len(tasks), (
    'each task once, with both samples'
  )
  assert report.states['trained'] == 2 * len(tasks)
  store.close()


def test_a_group_in_flight_at_a_commit_is_asked_for_again_once_weights_are_served(
  tmp_path, tokenizer
):
  """Batch 1 has groups 2 and 3; at the commit after batch 0 group 2 had ended, and 3 never does in
  that attempt.
  """
  tasks = exploring.make_tasks(30)

  def name(i):
    return f'grpo/{tasks[i].uid}/0'

  def explore(hold, commit):
    store = open_store(tmp_path / 'replay', synchronous='normal')
    store.recover(commit)
    exploration = exploring.Exploration(
      tokenizer, store, lambda attempt: 1.0, bound=1, batches=BATCHES, tasks=tasks
    )
    exploration.engine.hold = lambda request: hold and request.uid == name(3)
    return exploration, store

  first, store = explore(True, 0)
  before = asyncio.run(go(first, publish_every=1, end=1, turns=200))
  store.close()
  flight = {g['number']: g['ended'] for g in json.loads(before.states[1])['explorer']['groups']}
  assert flight == {2: True, 3: False}
  again, store = explore(False, 1)
  after = asyncio.run(go(again, publish_every=1, start=1, end=2, state=before.states[1], turns=200))
  assert [row.group for row in after.plans[0].rows] == [name(2)] * 2 + [name(3)] * 2
  assert again.engine.requests[0].uid == name(3) and name(2) not in {
    r.uid for r in again.engine.requests
  }
  report = audit(store)
  assert report.ok and report.reasons['void(crash)'] >= 2, report.lines
  store.close()


def test_a_commit_after_a_signal_keeps_finished_groups(tmp_path, tokenizer):
  """Left in the middle, groups in flight are given up in the store, and a start from the commit has
  them again.
  """
  store = exploring.new_store(tmp_path / 'replay')
  exploration = exploring.Exploration(
    tokenizer, store, lambda attempt: 1.0, bound=3, batches=BATCHES, tasks=exploring.make_tasks(30)
  )
  ledger = asyncio.run(go(exploration, publish_every=1, end=4, turns=200))
  assert store.counts()['dropped'] == 3 * 4, 'three batches ahead were given up with the stage'
  store.close()
  store = open_store(tmp_path / 'replay', synchronous='normal')
  store.recover(4)
  assert store.counts()['dropped'] == 0 and store.counts()['admitted'] == 3 * 4
  again = exploring.Exploration(
    tokenizer, store, lambda attempt: 1.0, bound=3, batches=BATCHES, tasks=exploring.make_tasks(30)
  )
  after = asyncio.run(go(again, publish_every=1, start=4, end=6, state=ledger.states[4], turns=200))
  assert [plan.step for plan in after.plans] == [4, 5]
  assert not {row.group for plan in after.plans for row in plan.rows} & {
    r.uid for r in again.engine.requests
  }
  store.close()


STAGE = dict(name='rl', algorithm=AlgorithmConfig(name='grpo'), steps=4)


def test_an_interval_that_the_bound_does_not_permit_is_refused_with_the_arithmetic():
  for bound, publish_every in itertools.product(range(4), range(1, 6)):
    source = Rollouts(tasksets=('train',), bound=bound, publish_every=publish_every)
    if publish_every <= bound + 1:
      assert StageConfig(**STAGE, source=source).source.publish_every == publish_every
      continue
    with pytest.raises(UserError) as caught:
      StageConfig(**STAGE, source=source)
    message = str(caught.value)
    assert message.startswith(
      f'stages.rl.source.publish_every: {publish_every} > bound + 1 = {bound + 1}'
    )
    assert '\n' not in message
    assert f'raise bound to {publish_every - 1}' in message
