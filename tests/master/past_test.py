"""Learning from earlier batches: whole groups come again, never more often than permitted, and
alike after a kill.
"""

import asyncio
import collections
import itertools
import json

import exploring
import pytest

from jaxrl_llm.app.schema import AlgorithmConfig, StageConfig
from jaxrl_llm.app.sources import PastConfig, Rollouts
from jaxrl_llm.batching.plan import StepPlan
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.types import Version
from jaxrl_llm.master.batches import RolloutBatches
from jaxrl_llm.master.exploring.past import Past
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.replay.draw import DrawConfig
from jaxrl_llm.replay.index import open_store

PRIORITY = DrawConfig(order='priority', decay=2.0, cooldown=1)


async def go(
  tokenizer,
  directory,
  *,
  steps,
  start=0,
  state=None,
  max_uses=4,
  groups=4,
  config=PRIORITY,
  delays=0,
  store_uses=None,
):
  """Batches of two new groups and up to `groups` earlier ones; (plans, states by completed batches,
  taken).
  """
  store = open_store(directory, max_uses=store_uses or max_uses, synchronous='normal')
  store.recover(start)
  past = Past(stage='grpo', groups=groups, max_uses=max_uses, config=config, seed=3)
  exploration = exploring.Exploration(
    tokenizer,
    store,
    lambda attempt: float(attempt.uid.endswith('1')),
    delays=delays,
    tasks=exploring.make_tasks(64),
    past=past,
  )
  batches = RolloutBatches(exploration.explorer)
  if state is not None:
    batches.restore(json.loads(state))
  plans, states, taken = [], {}, []
  async with batches.running():
    for step in range(start, steps):
      await exploration.engine.relabel(Version(0, step))
      batches.advance(step, step)
      rows, counts = await batches.next()
      assert counts['past_groups'] * 2 == len(rows) - 4
      plans.append(StepPlan(step=step, stage='grpo', rows=tuple(rows)))
      taken.append(batches.taken())
      batches.record(plans[-1])
      batches.trained(plans[-1])
      states[step + 1] = json.dumps(batches.state())
  report = audit(store)
  store.close()
  assert report.ok, report.lines
  return plans, states, taken, report


def run(*args, **kwargs):
  return asyncio.run(asyncio.wait_for(go(*args, **kwargs), 60))


def groups_of(plan):
  return [*dict.fromkeys(row.group for row in plan.rows)]


def test_a_stage_keeps_its_own_most_where_another_of_the_run_permits_more(tokenizer, tmp_path):
  plans, *_ = run(tokenizer, tmp_path / 'replay', steps=10, max_uses=2, store_uses=4)
  assert (
    max(collections.Counter(group for plan in plans for group in groups_of(plan)).values()) == 2
  )


@pytest.mark.parametrize('order', ['priority', 'newest', 'shuffled'])
def test_whole_groups_are_reused_at_most_max_uses_times(tokenizer, tmp_path, order):
  config = DrawConfig(order=order, cooldown=1, max_age=8)
  plans, _, taken, report = run(tokenizer, tmp_path / 'replay', steps=16, max_uses=3, config=config)
  uses = collections.Counter(group for plan in plans for group in groups_of(plan))
  assert max(uses.values()) == 3
  for plan, members in zip(plans, taken, strict=True):
    per_group = collections.Counter(row.group for row in plan.rows)
    assert set(per_group.values()) == {2}, 'both samples of each'
    assert [row.uid for row in plan.rows] == [*members]
    assert {row.reward for row in plan.rows} == {0.0, 1.0}
    assert all(plan.step - row.version_step <= 8 for row in plan.rows)
  last = {group: [plan.step for plan in plans if group in groups_of(plan)] for group in uses}
  assert all(b - a >= 2 for steps in last.values() for a, b in itertools.pairwise(steps)), (
    'a batch of rest in between'
  )
  assert report.uses == dict(
    collections.Counter({n: 2 * list(uses.values()).count(n) for n in set(uses.values())})
  )


def test_groups_are_drawn_up_to_the_age_that_is_permitted_and_no_further(tokenizer, tmp_path):
  config = DrawConfig(order='newest', cooldown=0, max_age=3)
  plans, *_ = run(tokenizer, tmp_path / 'replay', steps=7, max_uses=9, groups=9, config=config)
  for plan in plans:
    ages = collections.Counter(plan.step - row.version_step for row in plan.rows)
    assert ages == dict.fromkeys(range(min(plan.step, 3) + 1), 4), 'two groups of two of each age'


def test_priority_prefers_less_used_and_newer_groups(tokenizer, tmp_path):
  """Worked by hand. Batch 0: tasks 0 1. Batch 1: 2 3, for 0 1 rest. Batch 2: 4 5, and 1 0. Batch 3:
  6 7 and 3 2, for the others rest. Batch 4: 8 9, then 5 and 4 (version 2, used once: 0) before 1
  and 0 (version 0, twice: -4).
  """
  plans, *_ = run(tokenizer, tmp_path / 'replay', steps=5, groups=2)
  tasks = exploring.make_tasks(64)
  number = {f'grpo/{task.uid}/0': i for i, task in enumerate(tasks)}
  assert [[number[g] for g in groups_of(plan)] for plan in plans] == [
    [0, 1],
    [2, 3],
    [4, 5, 1, 0],
    [6, 7, 3, 2],
    [8, 9, 5, 4],
  ]


@pytest.mark.parametrize('step', [1, 4, 6])
def test_a_killed_run_draws_what_it_would_have_drawn(tokenizer, tmp_path, step):
  whole, *_ = run(tokenizer, tmp_path / 'whole', steps=9)
  before, states, *_ = run(tokenizer, tmp_path / 'replay', steps=step + 2, delays=1)
  after, _, _, report = run(
    tokenizer, tmp_path / 'replay', steps=9, start=step, state=states[step], delays=2
  )

  def strip(plans):
    return [[(row.uid, row.reward) for row in plan.rows] for plan in plans]

  assert strip(before[:step] + after) == strip(whole)
  assert max(report.uses) <= 4


def test_more_draws_than_there_can_be_are_refused_with_the_arithmetic():
  def source(past):
    rollouts = Rollouts(tasksets=('train',), groups_per_batch=4, past=past)
    return StageConfig(
      name='rl', algorithm=AlgorithmConfig(name='grpo'), source=rollouts, steps=4
    ).source

  assert source(PastConfig(groups=12, max_uses=4)).sequences == 16 * 8
  with pytest.raises(
    UserError,
    match=(
      r'stages\.rl\.source\.past\.groups: 13, but 4 new groups per batch, .* 3 more times, provide '
      r'only 12'
    ),
  ):
    source(PastConfig(groups=13, max_uses=4))
  with pytest.raises(UserError, match='max_uses: 1, wanted at least 2'):
    PastConfig(groups=1, max_uses=1)
