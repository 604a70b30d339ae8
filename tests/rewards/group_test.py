"""Scorers of whole groups: after all members' own scores, of one task alone, in training as in
evaluation.
"""

import asyncio
import itertools

import exploring
import pytest
from fixtures import rewards_scorers
from fixtures.rewards_scorers import attempt
from scoring import awaited, pool, started, using

from jaxrl_llm.core.records.score import Status
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.master.evaluation import Evaluator, SuiteConfig
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.rewards.api import PerGroup, Verdict
from jaxrl_llm.rollout.workflow import SingleTurn

RANKS = PerGroup(rewards_scorers.ranks)


async def length(a):
  """Unscorable where the completion is 'x'."""
  return Verdict(value=None if a.completion == 'x' else float(len(a.completion)))


LENGTH = awaited(length)


def group_scores(scorers, completions, **config):
  """Of a group of attempts with these completions: scores of each, and the pool's counts."""
  attempts = [attempt(text, uid=f'u{i}') for i, text in enumerate(completions)]

  async def use(one):
    own = [await one.score(a) for a in attempts]
    assert not any(score.scorer == 'ranks' for of in own for score in of)
    return await one.score_group(attempts, own), one.counts

  return using(pool(scorers, **config), use)


def test_a_group_is_judged_with_all_scores_of_its_members_the_unscorable_ones_too():
  scores, counts = group_scores(
    {'ranks': (RANKS, {}), 'length': (LENGTH, {})}, ['abc', 'x', 'ab', 'abc']
  )
  assert [[s.scorer for s in of] for of in scores] == [['ranks', 'length']] * 4, (
    'in the configuration’s order'
  )
  assert [of[0].value for of in scores] == [2.0, 0.0, 1.0, 2.0]
  assert [of[0].uid for of in scores] == ['u0', 'u1', 'u2', 'u3']
  assert len({str(of[0].evidence) for of in scores}) == 1
  assert scores[0][0].evidence == {
    'uids': ['u0', 'u1', 'u2', 'u3'],
    'truths': ['42'],
    'scores': [[['length', value, 'ok']] for value in (3.0, None, 2.0, 3.0)],
  }
  assert (counts['ranks/ok'], counts['length/ok'], counts['unscorable']) == (1, 4, 1), (
    'one call for a group'
  )


@pytest.mark.parametrize(
  ('scorer', 'status', 'text'),
  [
    (
      rewards_scorers.one_too_few,
      Status.ERROR,
      'ValueError: scorer returned 1 verdicts for a group of 2',
    ),
    (rewards_scorers.length, Status.ERROR, 'TypeError: '),
    (rewards_scorers.group_dies, Status.CRASHED, 'the worker process died'),
  ],
)
def test_its_failure_is_that_of_all_members(scorer, status, text):
  scorers = {
    'length': (LENGTH, {}),
    'bad': (PerGroup(scorer), {'on_failure': 'zero', 'retries': 1}),
  }
  scores, counts = group_scores(scorers, ['a', 'ab'])
  assert [(s.scorer, s.status, s.value) for _, s in scores] == [('bad', status, 0.0)] * 2
  assert all(
    of[1].evidence['error'].startswith(text) and of[1].evidence['calls'] == 2 for of in scores
  )
  assert (counts[f'bad/{status}'], counts['bad/zeroed'], counts['bad/retried']) == (2, 2, 1)


def test_attempts_at_two_tasks_are_no_group():
  async def use(one):
    others = [attempt(), attempt(prompt='And this?')]
    await one.score_group(others, [(), ()])

  with pytest.raises(ValueError, match='wanted attempts at one task'):
    using(pool({'length': (LENGTH, {})}), use)


def tasks_with_truths(count):
  tasks = exploring.make_tasks(count)
  return [
    Task(taskset=t.taskset, domain=t.domain, prompt=t.prompt, truth=f'truth {i}', fields={})
    for i, t in enumerate(tasks)
  ]


def explored(tokenizer, store, scorers, *, batches=1, **config):
  exploration = exploring.Exploration(
    tokenizer, store, None, scorers=scorers, tasks=tasks_with_truths(24), **config
  )

  async def main():
    async with started(scorers):
      return await exploration.batches(batches)

  return exploration, asyncio.run(asyncio.wait_for(main(), 60))


def test_a_scorer_never_sees_another_tasks_truth(tokenizer, store):
  """Eight groups at a time, whose samples end in any order: all that a scorer was given is of its
  own task.
  """
  seen = []

  async def tells(a):
    seen.append((a.uid.rpartition('/')[0], a.task.truth))
    return Verdict(value=1.0)

  scorers = pool({'tells': (awaited(tells), {}), 'ranks': (RANKS, {})}, workers=2)
  exploration, batches = explored(
    tokenizer, store, scorers, groups_per_batch=4, group_size=3, bound=1, batches=2
  )
  truths = {f'grpo/{task.uid}/0': task.truth for task in exploration.tasks}
  assert len(set(seen)) >= 8 and all(truths[group] == truth for group, truth in seen)
  members = [member for batch, _ in batches for member in batch]
  assert len(members) == 2 * 4 * 3
  for group, of in itertools.groupby(members, lambda m: m.sample.group_id):
    of = list(of)
    saw = of[0].scores[1].evidence
    assert saw['truths'] == [truths[group]] and saw['uids'] == [f'{group}/{i}' for i in range(3)]
    shorter = [sum(len(other.completion) < len(m.completion) for other in of) for m in of]
    assert [m.reward.value for m in of] == [1.0 + count for count in shorter]
    assert [m.reward.parts['ranks'] for m in of] == shorter
    assert all(store.scores([m.sample.uid])[m.sample.uid] == list(m.scores) for m in of)


def test_a_failure_that_drops_the_group_drops_all_of_it_with_its_reason(tokenizer, store):
  """Task 1's second sample makes the strict scorer fail: batch 0 is tasks 0 and 2, and task 1's
  group is not ranked.
  """

  async def strict(a):
    if a.task.truth == 'truth 1' and a.uid.endswith('/1'):
      raise OSError('lost')
    return Verdict(value=1.0)

  scorers = pool({'strict': (awaited(strict), {'on_failure': 'drop_group'}), 'ranks': (RANKS, {})})
  exploration, ((batch, counts),) = explored(tokenizer, store, scorers)
  assert [c.task.truth for c in batch] == ['truth 0', 'truth 0', 'truth 2', 'truth 2']
  assert {key: n for key, n in counts.items() if n} == {
    'dropped/scorer_failed': 2,
    'dropped/groups': 1,
  }
  report = audit(store)
  assert report.ok and report.reasons == {'dropped(scorer failed)': 2}
  assert (scorers.counts['strict/dropped_groups'], scorers.counts['strict/unscorable']) == (1, 0)
  given_up = [f'grpo/{exploration.tasks[1].uid}/0/{i}' for i in range(2)]
  assert [[s.scorer for s in of] for of in store.scores(given_up).values()] == [['strict']] * 2


def test_in_evaluation_the_samples_of_a_task_are_its_group(tokenizer):
  scorers = pool({'ranks': (RANKS, {})})
  workflow = SingleTurn(exploring.FakeEngine(tokenizer), tokenizer, max_tokens=4)
  evaluator = Evaluator(workflow=workflow, scorers=scorers, rewards=scorers.config)
  suite = SuiteConfig(name='held_out', taskset='eval', samples=4)
  _, rows = using(scorers, lambda one: evaluator.run(suite, tasks_with_truths(3)))
  assert [row['score'] for row in rows if row['mode'] == 'greedy'] == [0.0] * 3, 'a group of one'
  sampled = [row for row in rows if row['mode'] == 'sample']
  for row in sampled:
    of = [other for other in sampled if other['uid'] == row['uid']]
    assert len(of) == 4
    assert row['score'] == sum(len(other['completion']) < len(row['completion']) for other in of)
  assert len({row['score'] for row in sampled}) > 1


def test_in_evaluation_a_dropped_group_has_no_score(tokenizer):
  async def fails_once(a):
    if a.uid.endswith('/1'):
      raise OSError('lost')
    return Verdict(value=1.0)

  scorers = pool({'strict': (awaited(fails_once), {'on_failure': 'drop_group'})})
  workflow = SingleTurn(exploring.FakeEngine(tokenizer), tokenizer, max_tokens=4)
  evaluator = Evaluator(workflow=workflow, scorers=scorers, rewards=scorers.config)
  suite = SuiteConfig(name='held_out', taskset='eval', samples=2)
  metrics, rows = using(scorers, lambda one: evaluator.run(suite, tasks_with_truths(3)))
  assert [row['score'] for row in rows] == [1.0] * 3 + [None] * 6
  assert metrics['val-aux/eval/unscorable'] == 6.0
