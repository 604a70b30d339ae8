"""The loop with its real keeper: which evaluations and commits a run makes, left by a signal and
started again.
"""

import asyncio
import contextlib
import json
import math
import signal

import exploring
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.batching.plan import Row, StepPlan, pack_step, plan_shape
from jaxrl_llm.core.errors import RunError, first_cause
from jaxrl_llm.data.load import PackedStep
from jaxrl_llm.learner.algorithm import Setting, plain
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.learner.state import Learned, TrainState
from jaxrl_llm.learner.supervised import SftConfig, sft
from jaxrl_llm.master import loop
from jaxrl_llm.master.batches import Planner
from jaxrl_llm.master.evaluation import Evaluator, SuiteConfig
from jaxrl_llm.master.keeper import Logs, RunKeeper, Start
from jaxrl_llm.master.process import Process
from jaxrl_llm.master.trainer import Batch, Optimization, Stage, Updated
from jaxrl_llm.parallel.coordinator import Coordinator
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.replay.index import open_store
from jaxrl_llm.rollout.gatherer import Gatherer
from jaxrl_llm.rollout.publisher import Publisher
from jaxrl_llm.rollout.workflow import SingleTurn
from jaxrl_llm.runtime.checkpoint import CheckpointConfig, Checkpoints
from jaxrl_llm.runtime.progress import ProgressDisplay
from jaxrl_llm.runtime.writers import EvalsWriter, MetricsWriter, RolloutsWriter

SHAPE = plan_shape(rows=2, ranks=1, chunks=2, chunk_len=8)
SUITES = ('one', 'two')
TASKS = exploring.make_tasks(4, 'eval')


def stages(*, steps=2, explores=False, evaluate_every=None, **options):
  def make(name, start):
    return Stage(
      name=name,
      start=start,
      end=start + steps,
      algorithm=sft(SftConfig(), Setting(max_response_length=8)),
      policy=Optimization(optax.sgd(1.0), OptimizerConfig(peak_lr=1.0)),
      keep_optimizer=False,
      shape=SHAPE,
      token_chunk=8,
      minibatches=1,
      epochs=1,
      evaluate_every=evaluate_every,
      explores=explores,
      **options,
    )

  return make('first', 0), make('second', steps)


ROW = dict(
  source='s',
  length=4,
  prompt_len=2,
  group='g',
  reward=None,
  is_expert=True,
  truncated=False,
  version_step=None,
)


class Rows:
  """Implements `Batches`: the same two rows at each step; its state is the number of batches
  trained. `asked` receives the number of each batch that the loop asks for.
  """

  explores = False
  held_out = ()

  def __init__(self, asked, wait=None):
    self.count, self.asked, self.wait = 0, asked, wait

  def running(self):
    return contextlib.nullcontext()

  def advance(self, step, served):
    self.asked.append(step)

  async def next(self):
    if self.wait is not None:
      await self.wait(self.asked[-1])
    return [Row(uid=f'{i}', index=i, **ROW) for i in range(2)], {}

  def taken(self):
    return {}

  def record(self, plan: StepPlan):
    pass

  def trained(self, plan: StepPlan):
    self.count += 1

  def state(self):
    return self.count

  def restore(self, state):
    self.count = state


class Trainer:
  """Adds one to the parameter at each step that `moves`."""

  def __init__(self, moves):
    self._moves = moves

  def scoring_roles(self, plan):
    return frozenset()

  training_roles = scoring_roles

  async def annotate(self, learned, plan):
    packing = pack_step(plan, 0, SHAPE)
    packed = PackedStep(
      None, packing=packing, rows=plan.optimizer_steps[0], grid=None, loss_mask=None
    )
    return Batch(plan, plain(plan.rows), [packed])

  async def update(self, learned, batch):
    moved, policy = self._moves(batch.plan.step), learned.policy
    if moved:
      policy = policy.replace(params=jax.tree.map(lambda x: x + 1, policy.params))
    return learned._replace(policy=policy), Updated({}, {}, moved)


class Run:
  """One start of a run of two stages of two steps, in `workdir`, from its newest commit.

  `interrupt` says of an evaluation (step, suite) whether the signal comes while it runs; `hold`,
  whether a request that is asked for waits; `moves`, of a batch, whether it changes the policy.
  `options` are those of the stages.
  """

  def __init__(
    self,
    workdir,
    tokenizer,
    *,
    interrupt=lambda step, suite: False,
    judge=lambda attempt: 1.0,
    moves=lambda step: True,
    suites=SUITES,
    hold=lambda: False,
    versions=None,
    wait=None,
    every_steps=100,
    **options,
  ):
    self.workdir, self.tokenizer, self.interrupt, self.judge = workdir, tokenizer, interrupt, judge
    self.moves, self.suites = moves, suites
    self.stages, self.hold, self.versions = stages(**options), hold, versions
    self.wait, self.every_steps = wait, every_steps
    self.entered, self.asked = [], []

  async def main(self):
    device = DeviceThread()
    stop = asyncio.get_running_loop().create_future()
    self.engine = engine = exploring.FakeEngine(self.tokenizer)

    def hold(request):
      step = engine.version.step
      if (
        self.interrupt(step, request.uid.split('/')[0].removeprefix('evaluation-'))
        and not stop.done()
      ):
        stop.set_result(int(signal.SIGTERM))
      return stop.done() or self.hold()

    engine.hold = hold
    mesh = Mesh(np.array(jax.devices()[:1]), ('x',))
    process = Process(
      coordinator=Coordinator(device, on_signal=lambda signum: None), device=device, mesh=mesh
    )
    checkpoints = Checkpoints(self.workdir / 'checkpoints', CheckpointConfig(keep=50), leads=True)
    step = max(checkpoints.steps(), default=0)
    host = checkpoints.host(step) if step else None
    store = open_store(self.workdir / 'replay', synchronous='normal')
    store.recover(step)
    params = {
      'w': jax.device_put(jnp.full(2, step, jnp.float32), NamedSharding(mesh, PartitionSpec()))
    }
    train = TrainState(
      params=params,
      opt_state=(),
      updates=jnp.zeros((), jnp.int32),
      skipped=jnp.zeros((), jnp.int32),
    )
    batches = {stage.name: Rows(self.asked, self.wait) for stage in self.stages}
    logs = Logs(
      metrics=MetricsWriter(self.workdir, committed=host['metrics_offset'] if host else 0),
      rollouts=RolloutsWriter(self.workdir),
      evals=EvalsWriter(self.workdir),
      progress=ProgressDisplay({stage.name: stage.end - stage.start for stage in self.stages}),
      store=store,
      batches=batches,
      evaluator=Evaluator(
        workflow=SingleTurn(engine, self.tokenizer, max_tokens=4),
        scorers=exploring.FakeScorers(self.judge),
        rewards=exploring.REWARDS,
      ),
      suites=[(SuiteConfig(name=name, taskset=name), TASKS) for name in self.suites],
      decode=str,
      machine_metrics=dict,
    )
    best = tuple(host['best']) if host and host['best'] else None
    keeper = RunKeeper(
      process,
      Start(stop=stop, best=best),
      publisher=(publisher := Publisher(engine, Gatherer(mesh), device)),
      checkpoints=checkpoints,
      logs=logs,
      generates=bool(self.suites),
    )

    async def enter(stage, state):
      self.entered.append((stage.name, state.step))
      return Trainer(self.moves), state

    parts = loop.Parts(
      stages=self.stages,
      process=process,
      publisher=publisher,
      keeper=keeper,
      enter_stage=enter,
      planner=Planner(seed=0, every_steps=self.every_steps, every_minutes=1e6, stop=stop),
      batches=batches,
      versions=self.versions,
    )
    state = loop.LoopState(
      Learned(train),
      step,
      attempt=store.attempt,
      evaluated=bool(host and host['evaluated']),
      bests=host['bests'] if host else {},
    )
    with logs.progress:
      outcome = await asyncio.wait_for(loop.run(parts, state), 30)
    logs.metrics.close()
    store.close()
    self.commits = {step: checkpoints.host(step) for step in checkpoints.steps()}
    device.close()
    return outcome

  def start(self):
    return asyncio.run(self.main())


def written(workdir):
  """(stage, step, 'train' or the suite) of each row of metrics.jsonl."""
  rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]

  def kind(row):
    return next((s for s in SUITES if f'val-core/{s}/acc/greedy' in row), 'train')

  return [(row['stage'], row['training/global_step'], kind(row)) for row in rows]


WHOLE = [
  ('first', 0, 'one'),
  ('first', 0, 'two'),
  ('first', 1, 'train'),
  ('first', 2, 'train'),
  ('first', 2, 'one'),
  ('first', 2, 'two'),
  ('second', 3, 'train'),
  ('second', 4, 'train'),
  ('second', 4, 'one'),
  ('second', 4, 'two'),
]
"""Evaluated at the start and after each stage, under the name of the stage that made the
weights.
"""


def test_an_uninterrupted_run_and_a_finished_one_started_again(tmp_path, tokenizer):
  first = Run(tmp_path, tokenizer)
  outcome = first.start()
  assert (outcome.stop, outcome.state.step, outcome.state.evaluated) == (0, 4, True)
  assert written(tmp_path) == WHOLE
  assert {step: (host['stage'], host['evaluated']) for step, host in first.commits.items()} == {
    2: ('first', True),
    4: ('second', True),
  }
  again = Run(tmp_path, tokenizer)
  assert again.start().stop == 0
  assert again.entered == [] and written(tmp_path) == WHOLE


@pytest.mark.parametrize('suite', SUITES)
@pytest.mark.parametrize('step', [0, 2, 4])
def test_an_interrupted_evaluation_is_repeated_at_the_next_start(tmp_path, tokenizer, step, suite):
  left = Run(tmp_path, tokenizer, interrupt=lambda at, name: (at, name) == (step, suite))
  outcome = left.start()
  assert (outcome.stop, outcome.state.step, outcome.state.evaluated) == (
    signal.SIGTERM,
    step,
    False,
  )
  assert written(tmp_path) == [
    row for row in WHOLE if row[1] < step or (row[1] == step and row[2] == 'train')
  ]
  assert step == 0 or left.commits[step]['evaluated'] is False
  outcome = Run(tmp_path, tokenizer).start()
  assert (outcome.stop, outcome.state.step) == (0, 4)
  assert outcome.state.learned.policy.params['w'].tolist() == [4.0, 4.0]
  assert written(tmp_path) == WHOLE


def test_every_commit_names_the_best_evaluation_so_far(tmp_path, tokenizer):
  """The first suite's accuracy counts: 0.5 after the first stage, 0 before and after."""
  half = {task.uid for task in TASKS[:2]}

  def judge(attempt):
    good = attempt.uid.startswith('evaluation-two/') or (run.at == 2 and attempt.task.uid in half)
    return float(good)

  def watch(step, suite):
    run.at = step
    return (step, suite) == (4, 'two')

  run = Run(tmp_path, tokenizer, interrupt=watch, judge=judge)
  run.start()
  assert {step: host['best'] for step, host in run.commits.items()} == {2: [0.5, 2], 4: [0.5, 2]}


def test_each_stage_has_a_best_evaluation_and_the_earliest_of_equal_ones_counts(
  tmp_path, tokenizer
):
  """The policy of the run's start, which is always right, is that of no stage."""
  at = None

  def judge(attempt):
    return float(at == 0 or (at in (1, 2, 4) and attempt.task is TASKS[0]))

  def start(*interrupted):
    def watch(step, suite):
      nonlocal at
      at = step
      return (step, suite) in interrupted

    run = Run(tmp_path, tokenizer, interrupt=watch, judge=judge, evaluate_every=1)
    run.start()
    return run

  left = start((3, 'two'))
  assert max(left.commits) == 3 and not left.commits[3]['evaluated']
  run = start()
  assert {step: host['bests'] for step, host in run.commits.items()} == {
    1: {'first': [0.25, 1]},
    2: {'first': [0.25, 1]},
    3: {'first': [0.25, 1]},
    4: {'first': [0.25, 1], 'second': [0.25, 4]},
  }


def test_an_accuracy_of_nothing_scorable_is_null_and_never_the_best(tmp_path, tokenizer):
  run = Run(tmp_path, tokenizer, judge=lambda attempt: None)
  assert run.start().stop == 0
  assert [host['best'] for host in run.commits.values()] == [None, None]
  assert [host['bests'] for host in run.commits.values()] == [{}, {}]
  rows = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
  measured = [row for row in rows if 'val-core/one/acc/greedy' in row]
  assert [row['val-core/one/acc/greedy'] for row in measured] == [None] * 3
  assert [row['val-aux/one/unscorable'] for row in measured] == [4.0] * 3
  assert not any(isinstance(v, float) and math.isnan(v) for row in rows for v in row.values())


def test_a_batch_that_is_passed_over_changes_nothing_and_has_no_logprobs_of_the_trainer():
  rows = tuple(Row(**{**ROW, 'uid': f'{i}', 'index': i, 'length': 4 + i}) for i in range(2))
  plan = StepPlan(step=3, stage='first', rows=rows, optimizer_steps=((0, 1),))
  state = loop.LoopState(Learned(None), 3, moved=2, evaluated=True)
  after, batch, updated = loop.pass_over(state, plan)
  assert (after.step, after.moved, after.evaluated) == (
    4,
    2,
    False,
  ) and after.learned is state.learned
  assert not batch.annotation.in_loss.any() and batch.steps == [] and not updated.moved
  assert updated.logprobs is None and not updated.metrics


def published(run):
  return [(how, (version.attempt, version.step)) for how, version in run.engine.published]


def test_weights_that_no_batch_moved_are_published_by_name_alone(tmp_path, tokenizer):
  """Evaluated at 0, 2 and 4; batch 1 of the second stage moves the policy, those of the first do
  not.
  """
  whole = Run(tmp_path / 'whole', tokenizer, moves=lambda step: step == 3)
  outcome = whole.start()
  assert (outcome.state.moved, outcome.state.learned.policy.params['w'].tolist()) == (4, [1.0, 1.0])
  assert published(whole) == [('load', (1, 0)), ('relabel', (1, 2)), ('load', (1, 4))]
  assert whole.engine.version.step == 4


def test_a_stage_that_explores_names_the_weights_before_each_batch(tmp_path, tokenizer):
  """Batches 0 to 3, of which 1 alone moves the policy; a version that an evaluation has published
  is not again.
  """
  run = Run(tmp_path, tokenizer, moves=lambda step: step == 1, explores=True)
  assert run.start().state.moved == 2
  kinds = ['load', 'relabel', 'load', 'relabel', 'relabel']
  assert published(run) == [(kind, (1, step)) for step, kind in enumerate(kinds)]


def test_a_new_attempt_always_publishes_its_weights(tmp_path, tokenizer):
  Run(tmp_path, tokenizer, moves=lambda step: False, interrupt=lambda at, name: at == 2).start()
  again = Run(tmp_path, tokenizer, moves=lambda step: False)
  assert again.start().stop == 0
  assert published(again) == [('load', (2, 2)), ('relabel', (2, 4))]


def test_without_suites_nothing_is_published_and_evaluations_count_as_made(tmp_path, tokenizer):
  run = Run(tmp_path, tokenizer, suites=())
  outcome = run.start()
  assert (outcome.state.step, outcome.state.evaluated) == (4, True)
  assert published(run) == [] and [host['evaluated'] for host in run.commits.values()] == [
    True,
    True,
  ]


def test_a_failing_scorer_in_an_evaluation_ends_the_run(tmp_path, tokenizer):
  def judge(attempt):
    raise RunError('scorer pool: broke')

  with pytest.raises(ExceptionGroup) as caught:
    Run(tmp_path, tokenizer, judge=judge).start()
  assert caught.group_contains(RunError, match='scorer pool: broke')


OVERLAPPED = dict(steps=8, explores=True, evaluate_every=4, overlap_evaluation=True)


class Held:
  """Holds the evaluation at step 4 until the loop has asked for batch `last`, and for a while after
  that. `asked` has the batches for which the loop asked meanwhile.
  """

  def __init__(self, last):
    self.last, self.run, self.polls, self.asked = last, None, 0, []

  def __call__(self):
    if self.run.engine.version.step != 4 or self.polls > 20:
      return False
    self.asked = [step for step in self.run.asked if step >= 4]
    self.polls += self.last in self.asked
    return True


@pytest.mark.parametrize(
  'bound, last, published_steps',
  [
    (0, 4, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
    (1, 5, [0, 1, 2, 3, 4, 6, 7, 8]),
    (3, 7, [0, 1, 2, 3, 4, 8]),
    (9, 7, [0, 1, 2, 3, 4, 8]),
  ],
)
def test_training_continues_beside_an_evaluation_as_far_as_the_bound_permits(
  tmp_path, tokenizer, bound, last, published_steps
):
  """At the latest, the end of the stage waits for the evaluation."""
  held = Held(last)
  run = held.run = Run(tmp_path, tokenizer, hold=held, batches_ahead=bound, **OVERLAPPED)
  outcome = run.start()
  assert (outcome.stop, outcome.state.step) == (0, 16)
  assert held.asked == [*range(4, last + 1)]
  assert [step for _, (_, step) in published(run)][: len(published_steps)] == published_steps
  first = [row[1:] for row in written(tmp_path) if row[0] == 'first']
  assert sorted(first) == sorted(
    [(step, 'train') for step in range(1, 9)] + [(step, s) for step in (0, 4, 8) for s in SUITES]
  )
  assert first.index((last, 'train')) < first.index((4, 'one')) < first.index((8, 'one'))
  commits = {step: (host['evaluated'], host['bests']) for step, host in run.commits.items()}
  assert commits[4] == (False, {}) and commits[8] == (True, {'first': [1.0, 4]})
  assert commits[16][1] == {'first': [1.0, 4], 'second': [1.0, 12]}


def test_a_stage_without_rollouts_trains_on_until_the_next_evaluation(tmp_path, tokenizer):
  held = Held(7)
  run = held.run = Run(tmp_path, tokenizer, hold=held, **{**OVERLAPPED, 'explores': False})
  assert run.start().stop == 0
  assert held.asked == [4, 5, 6, 7]
  assert [step for _, (_, step) in published(run)] == [0, 4, 8, 12, 16]


def test_a_deferred_publication_follows_the_evaluation_and_not_only_the_schedule(
  tmp_path, tokenizer
):
  """A publication is due before batch 6, and the evaluation ends while this batch is collected."""

  async def wait(step):
    while step == 6 and ('first', 4, 'two') not in written(tmp_path):
      held.polls = 99
      await asyncio.sleep(0.01)

  held = Held(6)
  options = {**OVERLAPPED, 'batches_ahead': 9, 'publish_every': 2}
  run = held.run = Run(tmp_path, tokenizer, hold=held, wait=wait, **options)
  assert run.start().stop == 0
  assert [step for _, (_, step) in published(run)][:5] == [0, 2, 4, 7, 8]


def test_a_commit_waits_for_the_evaluation_and_contains_its_result(tmp_path, tokenizer):
  held = Held(5)
  options = {**OVERLAPPED, 'batches_ahead': 9}
  run = held.run = Run(tmp_path, tokenizer, hold=held, every_steps=6, **options)
  assert run.start().stop == 0
  assert held.asked == [4, 5], 'the commit of step 6 follows batch 5'
  assert run.commits[6]['bests'] == {'first': [1.0, 4]}


class Versions:
  """Another run whose weights never change."""

  async def follow(self, stage, state):
    return state


@pytest.mark.parametrize(
  'options', [{'overlap_evaluation': False}, {'follows': True}], ids=['not asked for', 'follows']
)
def test_training_waits_for_an_evaluation_without_the_option_and_where_another_run_is_followed(
  tmp_path, tokenizer, options
):
  held = Held(4)

  def hold():
    held.polls += 1
    return held()

  options = {**OVERLAPPED, 'batches_ahead': 9, **options}
  run = held.run = Run(tmp_path, tokenizer, hold=hold, versions=Versions(), **options)
  assert run.start().stop == 0 and held.asked == []


def test_an_evaluation_interrupted_beside_training_is_repeated_with_the_steps_after_it(
  tmp_path, tokenizer
):
  run = Run(
    tmp_path,
    tokenizer,
    hold=lambda: run.engine.version.step == 4,
    interrupt=lambda step, suite: step == 4 and 6 in run.asked,
    batches_ahead=9,
    **OVERLAPPED,
  )
  outcome = run.start()
  assert outcome.stop == signal.SIGTERM and outcome.state.step > 4
  assert {step: host['evaluated'] for step, host in run.commits.items()} == {4: False}
  again = Run(tmp_path, tokenizer, batches_ahead=9, **OVERLAPPED)
  assert again.start().state.learned.policy.params['w'].tolist() == [16.0, 16.0]
  rows = [row[1:] for row in written(tmp_path)]
  assert len(rows) == len(set(rows)) == 16 + 5 * 2
  assert published(again)[0] == ('load', (2, 4)) and again.commits[16]['best'] == [1.0, 0]


def test_an_evaluation_that_fails_beside_training_ends_the_run(tmp_path, tokenizer):
  def judge(attempt):
    if run.engine.version.step == 4 and 6 in run.asked:
      raise RunError('the judge is gone')
    return 1.0

  run = Run(
    tmp_path,
    tokenizer,
    judge=judge,
    hold=lambda: run.engine.version.step == 4 and 6 not in run.asked,
    batches_ahead=9,
    **OVERLAPPED,
  )
  with pytest.raises(ExceptionGroup) as raised:
    run.start()
  assert str(first_cause(raised.value)) == 'the judge is gone'
