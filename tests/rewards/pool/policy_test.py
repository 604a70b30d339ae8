"""What a scorer's own failure is worth is its policy; all of it is counted, and told without a
flood.
"""

import asyncio

import pytest
from fixtures import rewards_scorers
from fixtures.rewards_scorers import attempt
from scoring import awaited, pool, using

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.score import Score, Status
from jaxrl_llm.rewards.api import (
  OverrunIsZero,
  RewardsConfig,
  ScorerConfig,
  Verdict,
  combine,
  drops_group,
)


def failing(times):
  """A scorer that raises so often, and then answers with the number of its call."""
  calls = 0

  async def call(a):
    nonlocal calls
    calls += 1
    if calls <= times:
      raise OSError(f'call {calls}')
    return Verdict(value=float(calls))

  return awaited(call)


def scored(scorer, **fields):
  async def use(one):
    (score,) = await one.score(attempt())
    return score, dict(one.counts), one.take_metrics()

  return using(pool({'s': (scorer, fields)}), use)


@pytest.mark.parametrize(
  ('policy', 'value', 'made'),
  [
    ('unscorable', None, {'s/unscorable': 1, 'unscorable': 1}),
    ('zero', 0.0, {'s/zeroed': 1}),
    ('drop_group', None, {'unscorable': 1}),
  ],
)
def test_a_failure_is_worth_what_the_policy_says(policy, value, made):
  score, counts, metrics = scored(failing(1), on_failure=policy)
  assert (score.status, score.value) == (Status.ERROR, value)
  assert score.evidence['error'] == 'OSError: call 1' and score.evidence['caused_by'] == 'scorer'
  assert counts == {'error': 1, 's/error': 1, **made}
  assert metrics == {f'run/scorers/{key}': 1.0 for key in counts if '/' in key}


@pytest.mark.parametrize(
  ('failures', 'retries', 'calls'), [(0, 2, 1), (1, 2, 2), (2, 2, 3), (3, 2, 3), (1, 0, 1)]
)
def test_a_failed_call_is_repeated_as_often_as_permitted(failures, retries, calls):
  score, counts, _ = scored(failing(failures), retries=retries, on_failure='zero')
  succeeded = failures <= retries
  assert (score.status, score.value) == ((Status.OK, calls) if succeeded else (Status.ERROR, 0.0))
  assert (counts.get('s/error', 0), counts.get('s/retried', 0)) == (
    min(failures, retries + 1),
    calls - 1,
  )
  assert (counts.get('s/ok', 0), counts.get('s/zeroed', 0)) == ((1, 0) if succeeded else (0, 1))
  assert succeeded or score.evidence['calls'] == calls


@pytest.mark.full
def test_a_call_is_repeated_whether_it_crashed_raised_or_ran_too_long(tmp_path):
  fields = {'log': str(tmp_path / 'log')}

  async def use(one):
    return (await one.score(attempt(fields=fields)))[0], one.counts

  score, counts = using(
    pool({'s': (rewards_scorers.fails_first, {'retries': 3, 'deadline_s': 3.0})}), use
  )
  assert (score.status, score.value) == (Status.OK, 4.0)
  assert [counts[f's/{key}'] for key in ('crashed', 'error', 'timeout', 'ok', 'retried')] == [
    1,
    1,
    1,
    1,
    3,
  ]


@pytest.mark.parametrize('policy', ['drop_group', 'unscorable', 'zero'])
def test_what_the_completion_causes_is_neither_repeated_nor_subject_to_the_policy(policy):
  scorer = OverrunIsZero(rewards_scorers.spin_in_python)
  score, counts, _ = scored(scorer, retries=3, on_failure=policy, deadline_s=0.5)
  assert (score.status, score.value, score.evidence['caused_by']) == (
    Status.TIMEOUT,
    0.0,
    'completion',
  )
  assert counts == {'timeout': 1, 's/timeout': 1}


@pytest.mark.parametrize('overruns', [rewards_scorers.allocates, rewards_scorers.nests])
def test_memory_and_stack_that_a_completion_uses_up_are_its_own_doing(overruns):
  score, counts, _ = scored(OverrunIsZero(overruns), retries=3, on_failure='drop_group')
  assert (score.status, score.value, score.evidence['caused_by']) == (
    Status.ERROR,
    0.0,
    'completion',
  )
  assert counts == {'error': 1, 's/error': 1}
  assert scored(overruns)[0].value is None
  assert scored(OverrunIsZero(rewards_scorers.raises))[0].value is None, (
    'a bug of the scorer is not'
  )


@pytest.mark.parametrize('limit', [600, 700])
def test_a_completion_that_leaves_no_memory_at_all_is_to_blame_and_not_the_death_of_its_worker(
  limit,
):
  async def use(one):
    return (await one.score(attempt()))[0]

  scorer = OverrunIsZero(rewards_scorers.allocates_bit_by_bit)
  score = using(pool({'s': (scorer, {})}, memory_limit_mib=limit), use)
  assert (score.status, score.value, score.evidence['caused_by']) == (
    Status.ERROR,
    0.0,
    'completion',
  )
  assert (
    score.evidence['error'] == 'MemoryError: ' and 'rewards_scorers.py:' in score.evidence['where']
  )


def test_a_value_of_none_is_no_failure():
  async def unsure(a):
    return Verdict(value=None, evidence={'reason': 'the task has no truth'})

  score, counts, metrics = scored(awaited(unsure), retries=3, on_failure='zero')
  assert (score.status, score.value) == (Status.OK, None)
  assert counts == {'ok': 1, 's/ok': 1, 'unscorable': 1} and metrics == {}


def test_metrics_are_of_the_time_since_the_last_look_and_begin_with_the_first_failure():
  async def use(one):
    found = [one.take_metrics()]
    for _ in range(3):
      await one.score(attempt())
    found.append(one.take_metrics())
    await one.score(attempt())
    return [*found, one.take_metrics()]

  keys = ('run/scorers/s/error', 'run/scorers/s/unscorable')
  before, first, then = using(pool({'s': (failing(2), {})}), use)
  assert (before, first, then) == ({}, dict.fromkeys(keys, 2.0), dict.fromkeys(keys, 0.0))


def test_a_scorer_that_always_fails_is_told_ever_more_rarely(caplog):
  async def use(one):
    for i in range(20):
      await one.score(attempt(uid=f'u{i}'))
    return one.counts

  counts = using(pool({'s': (failing(100), {'on_failure': 'zero', 'retries': 0})}), use)
  lines = [
    record.getMessage()
    for record in caplog.records
    if record.getMessage().startswith('Scorer s on')
  ]
  assert [line.partition(':')[0] for line in lines] == [
    f'Scorer s on u{i}' for i in (0, 1, 3, 7, 15)
  ]
  assert lines[2].startswith("Scorer s on u3: error (4 so far; zero): {'error': 'OSError: call 4'")
  assert not any('\n' in line for line in lines) and counts['s/error'] == counts['s/zeroed'] == 20


def test_a_retry_says_so(caplog):
  scored(failing(1), retries=2)
  (line,) = [
    record.getMessage()
    for record in caplog.records
    if record.getMessage().startswith('Scorer s on')
  ]
  assert line.startswith('Scorer s on u: error (1 so far; trying again (1 of 3 calls made)): ')


def test_only_the_failure_of_a_scorer_that_says_so_drops_a_group():
  config = RewardsConfig(
    scorers=(ScorerConfig(name='strict', on_failure='drop_group'), ScorerConfig(name='lax'))
  )

  def score(scorer, status, value):
    return Score(uid='u', scorer=scorer, status=status, value=value)

  assert drops_group([score('lax', Status.OK, 1.0), score('strict', Status.CRASHED, None)], config)
  for kept in [
    ('strict', Status.OK, None),
    ('strict', Status.TIMEOUT, 0.0),
    ('lax', Status.ERROR, None),
  ]:
    assert not drops_group([score(*kept)], config)


def test_a_zero_for_a_failure_enters_the_reward_with_its_weight():
  config = RewardsConfig(
    scorers=(ScorerConfig(name='a', weight=2.0), ScorerConfig(name='b', on_failure='zero'))
  )

  async def use(one):
    return await one.score(attempt('123'))

  async def length(a):
    return Verdict(value=float(len(a.completion)))

  fields = {'a': (awaited(length), {'weight': 2.0}), 'b': (failing(1), {'on_failure': 'zero'})}
  reward = combine(using(pool(fields), use), config)
  assert (reward.value, reward.parts) == (6.0, {'a': 3.0, 'b': 0.0})


def test_a_policy_that_cannot_be_is_refused():
  with pytest.raises(UserError, match="'a': retries is -1, wanted 0 or more"):
    RewardsConfig(scorers=(ScorerConfig(name='a', retries=-1),))


def test_calls_of_one_scorer_are_repeated_beside_those_of_others():
  """The one that fails is repeated while the other's score is there already."""
  order = []

  async def quick(a):
    order.append('quick')
    return Verdict(value=1.0)

  async def slow(a):
    order.append('slow')
    if order.count('slow') < 3:
      raise OSError
    return Verdict(value=2.0)

  async def use(one):
    return await asyncio.gather(*(one.score(attempt(uid=uid)) for uid in 'ab'))

  scores = using(
    pool({'quick': (awaited(quick), {}), 'slow': (awaited(slow), {'retries': 2})}), use
  )
  assert [[s.value for s in of] for of in scores] == [[1.0, 2.0]] * 2 and order.count('quick') == 2
