"""Groups whose samples the trainer's reward model scores: when a round is due, what follows from
its verdicts, and how often rollouts are generated again.
"""

import exploring
import pytest
from clocks import simulated

from jaxrl_llm.core.records.score import Score, Status
from jaxrl_llm.master.exploring.endings import NothingToLearn
from jaxrl_llm.master.exploring.selection import SelectionConfig
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.rewards.api import ByTrainer, RewardsConfig, ScorerConfig, Verdict
from jaxrl_llm.rewards.pool.pool import ScorerPool


class Scorers(ScorerPool):
  """`judge` gives 1 to each attempt without a process; the trainer scores as `model`."""

  def __init__(self, delays=0, **model):
    configs = (ScorerConfig(name='model', weight=0.5, **model), ScorerConfig(name='judge'))
    scorers = {'model': ByTrainer(), 'judge': lambda attempt: None}
    super().__init__(scorers, RewardsConfig(scorers=configs))

  async def score(self, attempt):
    return (Score(uid=attempt.uid, scorer='judge', value=1.0),)


def run(main):
  return simulated(main, deadline_s=30)


def exploration_of(tokenizer, store, *, scorers=None, **config):
  scorers = scorers or Scorers()
  return exploring.Exploration(tokenizer, store, lambda attempt: None, scorers=scorers, **config)


async def collected(exploration, value, batches=1):
  """Plays the loop: (uids of each round, rewards by uid, counters) of each batch.

  Args:
    value: gives the reward model's value of a sample.
  """
  explorer, found = exploration.explorer, []
  async with explorer.running():
    for step in range(batches):
      explorer.advance(step, step)
      rounds = []
      while members := await explorer.unscored():
        rounds.append([member.sample.uid for member in members])
        started = len(exploration.engine.requests)
        verdicts = {m.sample.uid: value(m) for m in members}
        if await explorer.score(verdicts):
          assert len(exploration.engine.requests) == started, 'nothing starts during a round'
          explorer.proceed()
      batch, counts = await explorer.collect()
      uids = [member.sample.uid for member in batch]
      exploration.store.at(step).seal(uids)
      exploration.store.at(step).trained(uids)
      found.append((rounds, {m.sample.uid: m.reward.value for m in batch}, counts))
  return found


def uids_of(exploration, *numbers):
  tasks = exploration.tasks
  return sorted(f'grpo/{tasks[number].uid}/0/{i}' for number in numbers for i in range(2))


def test_a_batch_is_scored_in_one_round_in_order_of_uid_whatever_ends_first(tokenizer, tmp_path):
  found = []
  for delays in range(4):
    store = exploring.new_store(tmp_path / str(delays))
    exploration = exploration_of(tokenizer, store, delays=delays)
    found.append(run(collected(exploration, lambda m: Verdict(value=4.0), batches=2)))
    scores = store.scores(uids_of(exploration, 0, 1, 2, 3))
    assert audit(store).ok
    store.close()
    for of in scores.values():  # In the order of the configuration.
      assert [(score.scorer, score.value) for score in of] == [('model', 4.0), ('judge', 1.0)]
  assert all(each == found[0] for each in found)
  (first, rewards, _), (second, _, _) = found[0]
  assert first == [uids_of(exploration, 0, 1)] and second == [uids_of(exploration, 2, 3)]
  assert set(rewards.values()) == {0.5 * 4.0 + 1.0}


def test_groups_that_are_dropped_by_their_scores_are_replaced_in_another_round(tokenizer, store):
  """Task 1 has equal scores, so does task 2 that replaces it; task 3 has not."""
  exploration = exploration_of(tokenizer, store, selection=SelectionConfig(kind='mixed'))

  def value(member):
    same = member.task in exploration.tasks[1:3]
    return Verdict(value=0.0 if same else float(member.sample.sample_index))

  ((rounds, rewards, counts),) = run(collected(exploration, value))
  assert rounds == [uids_of(exploration, 0, 1), uids_of(exploration, 2), uids_of(exploration, 3)]
  assert sorted(rewards) == uids_of(exploration, 0, 3)
  assert counts['dropped/groups'] == 2 and counts['dropped/not_selected'] == 4
  report = audit(store)
  assert report.reasons == {'dropped(not selected)': 4} and report.states['trained'] == 4


@pytest.mark.parametrize('most', [0, 2])
def test_after_max_rounds_the_run_fails_with_one_line(tokenizer, store, most):
  selection = SelectionConfig(kind='mixed')
  exploration = exploration_of(tokenizer, store, selection=selection, max_rounds=most)
  with pytest.raises(NothingToLearn) as raised:
    run(collected(exploration, lambda member: Verdict(value=0.0)))
  assert '\n' not in str(raised.value)
  assert f'dropped in {most + 1} rounds' in str(raised.value)
  assert f'reward_model.max_rounds permits {most}' in str(raised.value)
  assert len(exploration.engine.requests) == 2 * (most + 1)
  assert audit(store).live == ()


@pytest.mark.parametrize(
  ('verdict', 'error'),
  [
    (Verdict(value=None, evidence={'error': 'too long'}), 'too long'),
    (Verdict(value=float('nan')), 'value nan'),
  ],
)
@pytest.mark.parametrize(
  ('on_failure', 'trained'), [('unscorable', 3), ('zero', 4), ('drop_group', 4)]
)
def test_a_sample_without_a_score_is_a_failure_of_the_scorer(
  tokenizer, store, verdict, error, on_failure, trained
):
  """The first sample of task 0; where its group is dropped, task 2 replaces it."""
  scorers = Scorers(on_failure=on_failure)
  exploration = exploration_of(tokenizer, store, scorers=scorers)
  failing = f'grpo/{exploration.tasks[0].uid}/0/0'

  def value(member):
    return verdict if member.sample.uid == failing else Verdict(value=1.0)

  ((rounds, rewards, _),) = run(collected(exploration, value))
  (score,) = [s for s in store.scores([failing])[failing] if s.scorer == 'model']
  assert score.status == Status.ERROR and error in score.evidence['error']
  assert score.value == (0.0 if on_failure == 'zero' else None)
  assert scorers.counts['model/error'] == 1
  assert len(rounds) == (2 if on_failure == 'drop_group' else 1)
  assert len(rewards) == trained
  assert rewards.get(failing) == (1.0 if on_failure == 'zero' else None)


def test_a_stage_without_the_scorer_has_no_rounds(tokenizer, store):
  async def main():
    exploration = exploration_of(tokenizer, store)
    exploration.scorers.config = exploration.scorers.config.weighted({'judge': 1.0})
    # As for a stage that names its rewards.
    exploration = exploration_of(tokenizer, store, scorers=exploration.scorers)
    async with exploration.explorer.running():
      exploration.explorer.advance(0, 0)
      assert await exploration.explorer.unscored() == []
      batch, _ = await exploration.explorer.collect()
    assert {member.reward.value for member in batch} == {1.0}

  run(main())
