"""Evaluation's estimators by hand and against brute force, and a suite run on a deterministic
engine.
"""

import asyncio
import itertools
import math

import exploring
import pytest
from clocks import simulated

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.score import Score
from jaxrl_llm.core.waits import WaitExpired
from jaxrl_llm.master.evaluation import (
  Evaluator,
  SuiteConfig,
  greedy_metrics,
  majority,
  pass_at_k,
  response_metrics,
  sampled_metrics,
  standard_error,
)
from jaxrl_llm.rollout.workflow import SingleTurn


def suite(**fields):
  return SuiteConfig(**{'name': 'held_out', 'taskset': 'eval', **fields})


def row(uid, score, answer='x', *, finish='stop', length=4):
  return {
    'uid': uid,
    'score': score,
    'answer': answer,
    'completion': 'text',
    'finish_reason': finish,
    'response_len': length,
  }


@pytest.mark.parametrize(
  ('n', 'correct', 'k', 'wanted'),
  [
    # 1 - C(3, 2) / C(5, 2) = 1 - 3/10
    (5, 2, 2, 0.7),
    # 1 - C(8, 4) / C(10, 4) = 1 - 70/210
    (10, 2, 4, 2 / 3),
    # k = 1 is the share of correct ones
    (8, 3, 1, 3 / 8),
    # fewer wrong ones than k: one of them must be right
    (4, 2, 3, 1.0),
    (4, 0, 4, 0.0),
    (4, 1, 4, 1.0),
  ],
)
def test_pass_at_k_by_hand(n, correct, k, wanted):
  assert pass_at_k(n, correct, k) == pytest.approx(wanted, abs=1e-15)


@pytest.mark.parametrize('n', range(1, 7))
def test_pass_at_k_is_the_share_of_k_subsets_that_hold_a_correct_one(n):
  for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
    subsets = list(itertools.combinations([i < correct for i in range(n)], k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_standard_error_by_hand():
  # Mean 0.5, squared deviations 4 * 0.25 = 1, over n - 1 = 3; root of a third, over root of 4.
  assert standard_error([0.0, 1.0, 1.0, 0.0]) == pytest.approx(math.sqrt(1 / 3) / 2)
  assert standard_error([0.7, 0.7, 0.7]) == pytest.approx(0.0)
  assert math.isnan(standard_error([1.0])) and math.isnan(standard_error([]))


@pytest.mark.parametrize(
  ('rows', 'wanted'),
  [
    ([('7', 1.0), ('7', 1.0), ('8', 0.0)], 1.0),
    ([('7', 1.0), ('8', 0.0), ('8', 0.0)], 0.0),
    # Two answers with two votes each, one of them correct; the third has too few.
    ([('7', 1.0), ('7', 1.0), ('8', 0.0), ('8', 0.0), ('9', 1.0)], 0.5),
    # An unscorable completion does not vote.
    ([('7', 1.0), ('8', None), ('8', None)], 1.0),
    # Without an answer, the text votes.
    ([(None, 0.0), (None, 0.0), ('7', 1.0)], 0.0),
    ([('7', None)], None),
  ],
)
def test_the_most_frequent_answer_decides(rows, wanted):
  assert majority(suite(), [row('a', score, answer) for answer, score in rows]) == wanted


def test_greedy_accuracy_is_the_share_solved_among_the_scorable():
  """Partial credit (0.5) does not solve; None is in neither numerator nor denominator: 2 of 4."""
  rows = [[row(uid, score)] for uid, score in zip('abcde', [1.0, 0.5, 0.0, None, 1.0])]
  found = greedy_metrics(suite(), rows)
  # Values 1 0 0 1: deviations 0.5 each, variance 4 * 0.25 / 3.
  assert found == {
    'val-core/eval/acc/greedy': 0.5,
    'val-core/eval/acc/greedy/stderr': pytest.approx(math.sqrt(1 / 3 / 4)),
  }
  assert greedy_metrics(suite(correct_at=0.5), rows)['val-core/eval/acc/greedy'] == 0.75


def test_an_accuracy_of_nothing_scorable_is_unknown_and_not_zero():
  rows = [[row('a', None), row('a', None)], [row('b', None), row('b', None)]]
  found = greedy_metrics(suite(), rows) | sampled_metrics(suite(samples=2), rows)
  assert len(found) == 7 and all(math.isnan(value) for value in found.values())


def test_mean_and_pass_over_tasks_by_hand():
  """n = 4. Task a: 2 of 4 right; b: 0 of 4; c: 1 of 2 scorable; d: none scorable."""
  rows = [
    [row('a', 1.0), row('a', 0.0), row('a', 1.0), row('a', 0.0)],
    [row('b', 0.0)] * 3 + [row('b', 0.9)],
    [row('c', 1.0), row('c', None), row('c', None), row('c', 0.0)],
    [row('d', None)] * 4,
  ]
  found = sampled_metrics(suite(samples=4), rows)
  assert found == {
    # Per task 1/2, 0, 1/2.
    'val-core/eval/acc/mean@4': pytest.approx(1 / 3),
    # Deviations 1/6, -1/3, 1/6: squares sum to 1/6, over 2, over 3.
    'val-core/eval/acc/mean@4/stderr': pytest.approx(math.sqrt(1 / 36)),
    # All four answers are the same: what decides is the share of correct ones.
    'val-core/eval/acc/maj@4': pytest.approx(1 / 3),
    'val-core/eval/acc/pass@1': pytest.approx(1 / 3),
    # a: 1 - C(2,2)/C(4,2) = 5/6; b: 0; c: of its two scorable 1 - 0/1 = 1.
    'val-core/eval/acc/pass@2': pytest.approx((5 / 6 + 0 + 1) / 3),
    # Only a and b have four: 1 and 0.
    'val-core/eval/acc/pass@4': pytest.approx(1 / 2),
  }


def test_truncated_and_unscorable_are_counted_apart_over_all_responses():
  rows = [
    row('a', 1.0, length=2),
    row('a', None, finish='length', length=8),
    row('b', 0.5, finish='length', length=8),
    row('b', None, length=6),
  ]
  assert response_metrics(suite(), rows) == {
    'val-aux/eval/num_tasks': 2.0,
    'val-aux/eval/score/mean': 0.75,
    'val-aux/eval/response_length/mean': 6.0,
    'val-aux/eval/truncated': 0.5,
    'val-aux/eval/unscorable': 2.0,
    'goodput/tokens/evaluated': 24.0,
  }


@pytest.mark.parametrize(
  ('fields', 'word'),
  [
    ({'tasks': 0}, 'tasks 0'),
    ({'samples': -1}, 'samples -1'),
    ({'samples': 2, 'temperature': 0.0}, 'temperature'),
    ({'samples': 2, 'top_p': 0.0}, 'top_p'),
  ],
)
def test_a_suite_that_measures_nothing_is_refused(fields, word):
  with pytest.raises(UserError, match=word):
    suite(**fields)


def evaluate(tokenizer, config, tasks, judge, *, delays=0):
  engine = exploring.FakeEngine(tokenizer, delays=delays)
  scorers = exploring.FakeScorers(judge, delays=delays + 1)
  workflow = SingleTurn(engine, tokenizer, max_tokens=4)
  evaluator = Evaluator(workflow=workflow, scorers=scorers, rewards=exploring.REWARDS)
  return engine, asyncio.run(evaluator.run(config, tasks))


def judge(attempt):
  """Unscorable, wrong or right by the first letter."""
  return {'a': None, 'b': 0.0}.get(attempt.completion[0], 1.0)


def test_a_suite_asks_each_task_once_greedily_and_n_times_sampled(tokenizer):
  tasks = exploring.make_tasks(5, 'eval')
  config = suite(samples=3, temperature=0.7, top_p=0.9, top_k=5)
  engine, (metrics, rows) = evaluate(tokenizer, config, tasks, judge)
  asked = [
    (r.samples, r.sampling.temperature, r.sampling.top_p, r.sampling.top_k) for r in engine.requests
  ]
  assert asked == [(1, 0.0, 1.0, -1)] * 5 + [(3, 0.7, 0.9, 5)] * 5
  named = [(r['uid'], r['mode'], r['sample_index']) for r in rows]
  assert named == [(t.uid, 'greedy', 0) for t in tasks] + [
    (t.uid, 'sample', i) for t in tasks for i in range(3)
  ]
  for r, task in zip(rows[:5], tasks, strict=True):
    assert (r['suite'], r['prompt'], r['truth']) == ('held_out', task.prompt[-1]['content'], 'a')
    assert r['score'] == {'a': None, 'b': 0.0}.get(r['completion'][0], 1.0)
  greedy = [r['score'] for r in rows[:5] if r['score'] is not None]
  assert metrics['val-core/eval/acc/greedy'] == pytest.approx(sum(greedy) / len(greedy))
  assert metrics['val-aux/eval/unscorable'] == sum(r['score'] is None for r in rows)
  assert metrics['val-aux/eval/truncated'] == pytest.approx(
    sum(r['finish_reason'] == 'length' for r in rows) / 20
  )


def test_an_evaluation_does_not_depend_on_the_order_of_completion(tokenizer):
  tasks = exploring.make_tasks(6, 'eval')
  first, *others = [
    evaluate(tokenizer, suite(samples=4), tasks, judge, delays=d)[1] for d in range(4)
  ]
  assert all(other == first for other in others)


def test_a_score_of_several_turns_is_the_reward_of_the_whole_sample(tokenizer, monkeypatch):
  """The last turn alone, at 0.25, would not be correct."""
  scored = Score(uid='u', scorer='judge', value=0.25, turn_values=(0.5, 0.25))
  monkeypatch.setattr(exploring.FakeScorers, 'score', lambda self, attempt: _soon((scored,)))
  _, (metrics, rows) = evaluate(tokenizer, suite(), exploring.make_tasks(1, 'eval'), judge)
  assert [(row['score'], row['correct']) for row in rows] == [(1.0, True)]
  assert metrics['val-core/eval/acc/greedy'] == metrics['val-aux/eval/score/mean'] == 1.0


async def _soon(value):
  return value


def test_greedy_only_asks_for_nothing_else(tokenizer):
  engine, (metrics, rows) = evaluate(
    tokenizer, suite(), exploring.make_tasks(3, 'eval'), lambda attempt: 1.0
  )
  assert len(engine.requests) == len(rows) == 3
  assert metrics['val-core/eval/acc/greedy'] == 1.0
  assert not any('@' in key for key in metrics)


def test_a_suite_without_progress_ends_with_one_line(tokenizer):
  engine = exploring.FakeEngine(tokenizer)
  engine.hold = lambda request: len(engine.requests) > 2
  scorers = exploring.FakeScorers(lambda attempt: 1.0)
  workflow = SingleTurn(engine, tokenizer, max_tokens=4)
  evaluator = Evaluator(
    workflow=workflow, scorers=scorers, rewards=exploring.REWARDS, deadline_s=5.0
  )
  with pytest.raises(
    WaitExpired,
    match=(
      r'^wait suite: evaluation held_out waited 5 s for the engine and the scorers to finish '
      'another of its tasks'
    ),
  ):
    simulated(evaluator.run(suite(), exploring.make_tasks(4, 'eval')))
  assert engine.cancelled
