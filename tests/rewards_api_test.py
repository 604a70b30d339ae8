"""Scores become one reward by weight; None is never 0; configurations and options say what is wrong with them."""

import pickle

import pytest
from fixtures.rewards_scorers import attempt

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.experience.score import Score
from jaxrl_llm.rewards.answer import answer_scorer
from jaxrl_llm.rewards.api import OverrunIsZero, RewardsConfig, ScorerConfig, combine, in_force
from jaxrl_llm.rewards.format import format_scorer
from jaxrl_llm.rewards.verifier import verifier_scorer

CONFIGS = (
  ScorerConfig(name='answer'),
  ScorerConfig(name='format', weight=0.25),
  ScorerConfig(name='judge', weight=-2.0),
)


def score(scorer, value, **parts):
  return Score(uid='u', scorer=scorer, value=value, parts=parts)


def test_reward_is_the_weighted_sum_and_keeps_unweighted_parts():
  # 1 · 1.0 + 0.25 · 0.5 − 2 · 0.3 = 0.525
  reward = combine([score('answer', 1.0), score('format', 0.5, tags=1.0), score('judge', 0.3)], CONFIGS)
  assert reward.value == pytest.approx(0.525, abs=1e-15)
  assert reward.parts == {'answer': 1.0, 'format': 0.5, 'format/tags': 1.0, 'judge': 0.3}


def test_a_scorer_that_was_not_asked_takes_no_part():
  assert combine([score('format', 1.0)], CONFIGS).value == 0.25


def test_one_none_makes_the_reward_none_and_keeps_the_other_parts():
  reward = combine([score('answer', 1.0), score('judge', None, clarity=0.5)], CONFIGS)
  assert reward.value is None
  assert reward.parts == {'answer': 1.0, 'judge/clarity': 0.5}


def test_no_scores_are_no_reward():
  assert combine([], CONFIGS).value is None


def test_scorers_are_chosen_by_domain():
  configs = (ScorerConfig(name='a', domains=('math', 'k12')), ScorerConfig(name='b', domains=('code',)))
  assert [c.name for c in in_force(configs, 'k12')] == ['a']
  assert [c.name for c in in_force((*configs, ScorerConfig(name='all')), 'code')] == ['b', 'all']
  with pytest.raises(UserError, match=r"no scorer judges domain 'chat' \(domains named: \['code', 'k12', 'math'\]\)"):
    in_force(configs, 'chat')


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: RewardsConfig(scorers=(ScorerConfig(name='a'), ScorerConfig(name='a'))), "two scorers are called 'a'"),
    (lambda: RewardsConfig(scorers=(ScorerConfig(name='a', deadline_s=0.0),)), 'deadline_s is 0.0'),
    (lambda: RewardsConfig(scorers=(ScorerConfig(name='a', weight=float('nan')),)), 'weight is nan'),
    (lambda: RewardsConfig(scorers=(), workers=0), 'rewards.workers is 0'),
    (lambda: answer_scorer(mod='exact'), "scorer 'answer': unknown option 'mod'; did you mean 'mode'"),
    (lambda: answer_scorer(mode='approximate'), "option mode is 'approximate', wanted one of"),
    (lambda: answer_scorer(relative_tolerance='1'), "option relative_tolerance is '1', wanted float"),
    (lambda: answer_scorer(absolute_tolerance=-1.0), 'absolute_tolerance is -1.0'),
    (lambda: answer_scorer(relative_tolerance=float('nan')), 'relative_tolerance is nan'),
    (lambda: answer_scorer(ignore_case=1), 'option ignore_case is 1, wanted bool'),
    (lambda: answer_scorer(absolute_tolerance=True), 'option absolute_tolerance is True, wanted float'),
    (lambda: verifier_scorer(zzz=1), "scorer 'verifier': unknown option 'zzz'; known: "),
    (lambda: format_scorer(tempalte=''), "scorer 'format': unknown option 'tempalte'; did you mean 'template'"),
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


@pytest.mark.parametrize('make', [answer_scorer, verifier_scorer])
def test_who_is_to_blame_for_an_overrun_is_an_option(make):
  assert isinstance(make(), OverrunIsZero)
  assert not isinstance(make(on_timeout='none'), OverrunIsZero)
