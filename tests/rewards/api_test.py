"""Scores become one reward by weight; None is never 0; configurations and options say what is wrong
with them.
"""

import dataclasses
import pickle

import pytest
from fixtures.rewards_scorers import attempt

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.score import Score
from jaxrl_llm.rewards.api import (
  OverrunIsZero,
  Reward,
  RewardsConfig,
  ScorerConfig,
  combine,
  in_force,
)
from jaxrl_llm.rewards.scorers.answer.scorer import answer_scorer
from jaxrl_llm.rewards.scorers.format import format_scorer
from jaxrl_llm.rewards.scorers.k12 import k12_scorer
from jaxrl_llm.rewards.scorers.verifier.scorer import verifier_scorer

CONFIG = RewardsConfig(
  scorers=(
    ScorerConfig(name='answer'),
    ScorerConfig(name='format', weight=0.25),
    ScorerConfig(name='judge', weight=-2.0),
  )
)


def score(scorer, value, *turn_values, **parts):
  return Score(uid='u', scorer=scorer, value=value, parts=parts, turn_values=turn_values)


def test_reward_is_the_weighted_sum_and_keeps_unweighted_parts():
  # 1 · 1.0 + 0.25 · 0.5 − 2 · 0.3 = 0.525
  reward = combine(
    [score('answer', 1.0), score('format', 0.5, tags=1.0), score('judge', 0.3)], CONFIG
  )
  assert reward.value == pytest.approx(0.525, abs=1e-15)
  assert reward.parts == {'answer': 1.0, 'format': 0.5, 'format/tags': 1.0, 'judge': 0.3}


def test_a_scorer_that_was_not_asked_takes_no_part():
  assert combine([score('format', 1.0)], CONFIG).value == 0.25


def test_one_none_makes_the_reward_none_and_keeps_the_other_parts():
  reward = combine([score('answer', 1.0), score('judge', None, clarity=0.5)], CONFIG)
  assert reward.value is None
  assert reward.parts == {'answer': 1.0, 'judge/clarity': 0.5}


def test_no_scores_are_no_reward():
  assert combine([], CONFIG) == Reward(value=None, parts={})


@pytest.mark.parametrize(
  ('correct_by', 'scores', 'correct'),
  [
    # The first that judges it, at 1 and above, whatever the others and the weights make of it.
    (None, [score('answer', 1.0), score('format', 0.0)], True),
    (None, [score('answer', 0.999), score('format', 1.0)], False),
    (None, [score('answer', -1.0)], False),
    (None, [score('judge', 1.5), score('answer', 0.0)], True),
    # Named: neither its place nor its weight counts.
    ('judge', [score('answer', 0.0), score('judge', 1.0)], True),
    ('judge', [score('answer', 1.0), score('judge', 0.5)], False),
    # Turns count, in either direction.
    ('judge', [score('judge', 0.0, 0.5, 0.5)], True),
    ('judge', [score('judge', 1.0, -0.5)], False),
    # It does not judge this domain; or nobody can say what the attempt is worth.
    ('judge', [score('answer', 1.0)], None),
    (None, [score('answer', 1.0), score('judge', None)], None),
    (None, [score('answer', None)], None),
    (None, [], None),
  ],
)
def test_one_scorer_says_what_is_correct(correct_by, scores, correct):
  assert combine(scores, dataclasses.replace(CONFIG, correct_by=correct_by)).correct is correct


def test_turn_values_are_weighted_sums_of_each_turn():
  # 1 · 1 + 0.25 · 2 − 2 · 0.1;  1 · 3 + 0.25 · 4;  0.25 · 6
  scores = [
    score('answer', 0.0, 1.0, 3.0),
    score('format', 1.0, 2.0, 4.0, 6.0),
    score('judge', 0.5, 0.1),
  ]
  reward = combine(scores, CONFIG)
  assert reward.turn_values == pytest.approx((1.0 + 0.5 - 0.2, 3.0 + 1.0, 1.5), abs=1e-15)
  assert reward.value == pytest.approx(0.25 - 1.0), 'turns are beside the value, not in it'


def test_turn_values_are_empty_where_nobody_gives_any_or_the_reward_is_none():
  assert combine([score('answer', 1.0), score('judge', 1.0)], CONFIG).turn_values == ()
  assert combine([score('answer', 1.0, 2.0), score('judge', None)], CONFIG).turn_values == ()


def test_scorers_are_chosen_by_domain():
  configs = (
    ScorerConfig(name='a', domains=('math', 'k12')),
    ScorerConfig(name='b', domains=('code',)),
  )
  assert [c.name for c in in_force(configs, 'k12', 't')] == ['a']
  assert [c.name for c in in_force((*configs, ScorerConfig(name='all')), 'code', 't')] == [
    'b',
    'all',
  ]
  with pytest.raises(
    UserError,
    match=(
      r"no scorer judges domain 'chat' in taskset 't' "
      r"\(configured domains: \['code', 'k12', 'math'\]\)"
    ),
  ):
    in_force(configs, 'chat', 't')


def test_a_taskset_may_have_a_composition_of_its_own():
  """R1's: accuracy and format on the one, accuracy alone on the other; rewards are of what judges
  the task.
  """
  configs = (
    ScorerConfig(name='answer'),
    ScorerConfig(name='format', weight=0.5, tasksets=('reasoning',)),
  )
  assert [c.name for c in in_force(configs, 'math', 'reasoning')] == ['answer', 'format']
  assert [c.name for c in in_force(configs, 'math', 'plain')] == ['answer']
  with pytest.raises(UserError, match="in taskset 'plain'"):
    in_force(configs[1:], 'math', 'plain')


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (
      lambda: RewardsConfig(scorers=(ScorerConfig(name='a'), ScorerConfig(name='a'))),
      "two scorers are called 'a'",
    ),
    (lambda: RewardsConfig(scorers=(ScorerConfig(name='a', deadline_s=0.0),)), 'deadline_s is 0.0'),
    (
      lambda: RewardsConfig(scorers=(ScorerConfig(name='a', weight=float('nan')),)),
      'weight is nan',
    ),
    (
      lambda: RewardsConfig(scorers=(ScorerConfig(name='a', weight=-1e300),)),
      'weight is -1e+300, wanted a number',
    ),
    (lambda: RewardsConfig(scorers=(), workers=0), 'rewards.workers is 0'),
    (
      lambda: RewardsConfig(scorers=(ScorerConfig(name='a'),), correct_by='b'),
      "rewards.correct_by: no scorer 'b'; configured are ['a']",
    ),
    (
      lambda: answer_scorer(mod='exact'),
      "scorer 'answer'.mod: AnswerOptions has no field 'mod'; did you mean 'mode'",
    ),
    (
      lambda: answer_scorer(mode='approximate'),
      "scorer 'answer'.mode: got 'approximate' (str), wanted one of",
    ),
    (
      lambda: answer_scorer(relative_tolerance='1'),
      "relative_tolerance: got '1' (str), wanted a number",
    ),
    (lambda: answer_scorer(absolute_tolerance=-1.0), 'absolute_tolerance is -1.0'),
    (lambda: answer_scorer(relative_tolerance=float('nan')), 'relative_tolerance: got nan'),
    (lambda: answer_scorer(extraction=()), 'option extraction is empty'),
    (lambda: answer_scorer(extraction=('boxed', 'box')), "extraction.1: got 'box'"),
    (lambda: answer_scorer(ignore_case=1), 'ignore_case: got 1 (int), wanted true or false'),
    (
      lambda: answer_scorer(absolute_tolerance=True),
      'absolute_tolerance: got True (bool), wanted a number',
    ),
    (
      lambda: verifier_scorer(zzz=1),
      "scorer 'verifier'.zzz: VerifierOptions has no field 'zzz'; available: ",
    ),
    (
      lambda: format_scorer(tempalte=''),
      "FormatOptions has no field 'tempalte'; did you mean 'template'",
    ),
  ],
)
def test_a_wrong_configuration_is_refused_in_one_line(make, message):
  with pytest.raises(UserError) as raised:
    make()
  assert message in str(raised.value) and '\n' not in str(raised.value)


def test_a_name_stands_for_its_implementation_unless_kind_is_given():
  assert ScorerConfig(name='answer').implementation == 'answer'
  assert ScorerConfig(name='math', kind='answer').implementation == 'answer'


def test_scorers_survive_pickling_with_their_options():
  scorer = pickle.loads(pickle.dumps(answer_scorer(mode='numeric', extraction='tags', tag='x')))
  assert scorer(attempt('<x>42.0</x>')).value == 1.0
  assert scorer(attempt('<x>43</x>')).value == 0.0
  scorer = pickle.loads(pickle.dumps(format_scorer(template='<a>{x}</a>')))
  assert [scorer(attempt(text)).value for text in ('<a>1</a>', '<b>1</b>')] == [1.0, 0.0]


@pytest.mark.parametrize('make', [answer_scorer, k12_scorer, verifier_scorer])
def test_who_is_to_blame_for_an_overrun_is_an_option(make):
  assert isinstance(make(), OverrunIsZero)
  assert not isinstance(make(on_timeout='none'), OverrunIsZero)
