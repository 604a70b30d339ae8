"""Episodes in environments: rewards of turns and of the end, and environments that fail or hang."""

import asyncio
import copy
import math
import sys
import threading

import exploring
import pytest
from clocks import simulated

from jaxrl_llm.app.composition.workflows import build_workflow
from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.records.score import Score, Status
from jaxrl_llm.rewards.api import RewardsConfig, ScorerConfig, Verdict, combine
from jaxrl_llm.rewards.pool.pool import ScorerPool
from jaxrl_llm.rewards.scorers.environment import environment_scorer
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.contract import checked_run
from jaxrl_llm.rollout.episodes.environment import Step
from jaxrl_llm.rollout.workflow import WorkflowConfig

TASK = exploring.make_tasks(1)[0]
OPEN = []
"""Environments that are open now."""


class Counting:
  """Rewards each turn with its number, and ends after `turns`; `trouble` says what goes wrong."""

  def __init__(self, *, turns=3, trouble=''):
    self._turns, self._trouble, self._turn = turns, trouble, 0
    OPEN.append(self)

  async def reset(self, task):
    if self._trouble == 'reset':
      raise OSError('no such game')
    return None

  async def step(self, action):
    self._turn += 1
    if self._trouble == 'hang':
      await asyncio.sleep(3600)
    if self._trouble == 'step':
      raise OSError('the game\nfell over')
    if self._trouble == 'tuple':
      return 'h', 1.0, True
    if self._trouble == 'nan':
      return Step('h', math.nan)
    if self._trouble == 'evidence':
      return Step('h', 1.0, evidence={'set': {1}})
    return Step('h', float(self._turn), self._turn == self._turns, {'turn': self._turn})

  async def close(self):
    OPEN.remove(self)
    if self._trouble == 'close':
      await asyncio.sleep(3600)


def counting(
  tokenizer, *, max_tokens=40, environment='environment_test:Counting', engine=None, **options
):
  how = {'max_turns': 5, 'turn_tokens': 4, 'deadline_s': 2.0}
  names = {name: options.pop(name) for name in [*options] if name in (*how, 'concurrency')}
  config = WorkflowConfig(
    kind='environment',
    options={'environment': environment, 'options': options, **how, **names},
  )
  engine = engine or exploring.FakeEngine(tokenizer)
  return build_workflow(config, engine, tokenizer, max_tokens)


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
  monkeypatch.setitem(sys.modules, 'environment_test', sys.modules[__name__])
  OPEN.clear()


async def samples_of(workflow, samples, sampling=None):
  sampling = sampling or Sampling()
  runs = checked_run(workflow, TASK, 0, stage='grpo', samples=samples, sampling=sampling)
  return sorted([rollout async for rollout in runs], key=lambda each: each.sample.sample_index)


async def rollouts(workflow, samples=2):
  found = await samples_of(workflow, samples)
  assert not OPEN, 'every environment is closed'
  return found


def test_the_policy_acts_until_the_environment_is_done(tokenizer):
  for sample, _, verdict, *_ in simulated(rollouts(counting(tokenizer))):
    assert verdict == Verdict(value=3.0, turn_values=(1.0, 2.0), evidence={'turn': 3})
    assert len(sample.segments) == 3


@pytest.mark.parametrize('environment', ['Counting', 'Plain'])
def test_no_token_of_the_policy_is_encoded_again(tokenizer, monkeypatch, environment):
  """Counted: as many tokens are encoded as the sample has of others than the policy."""
  # The fake engine encodes its answers with `tokenizer`.
  listening, encoded = copy.copy(tokenizer), []

  def encode(*args, **kwargs):
    encoded.append(tokenizer.encode(*args, **kwargs))
    return encoded[-1]

  monkeypatch.setattr(listening, 'encode', encode)
  names = {'environment': f'environment_test:{environment}'}
  workflow = counting(listening, engine=exploring.FakeEngine(tokenizer), **names)
  ((sample, *_),) = simulated(rollouts(workflow, samples=1))
  sampled = int(sample.loss_mask.sum())
  assert len(sample.segments) == 3 and sampled > 3
  assert sum(map(len, encoded)) == len(sample.tokens) - sampled


def test_an_episode_ends_at_the_limit_of_turns(tokenizer):
  for sample, _, verdict, *_ in simulated(rollouts(counting(tokenizer, max_turns=2))):
    assert len(sample.segments) == 2 and verdict.value == 2.0


def test_an_episode_ends_at_the_stages_limit_of_tokens(tokenizer):
  """Turns and observations together have as many tokens as a stage permits."""
  short = Sampling(max_response_length=6)
  found = simulated(samples_of(counting(tokenizer, max_turns=40), 2, short))
  whole = simulated(samples_of(counting(tokenizer, max_turns=40), 2))
  for cut, rollout in zip(found, whole, strict=True):
    assert cut.sample.response_len <= 6 < rollout.sample.response_len


RELEASED = threading.Event()
"""Set when the steps that block may end."""


class Plain(Counting):
  """Its methods are plain functions, which run in threads; a step may block or exit."""

  def reset(self, task):
    if self._trouble.startswith('reset writes'):
      return self._trouble
    return [{'role': 'user', 'content': 'gh' * (40 if self._trouble == 'long' else 1)}]

  def step(self, action):
    assert threading.current_thread() is not threading.main_thread()
    self._turn += 1
    if self._trouble == 'block':
      RELEASED.wait(60)
    if self._trouble == 'exit':
      sys.exit(3)
    observation = {'silence': ''}.get(self._trouble, 'h')
    if self._trouble.startswith('step writes'):
      observation = self._trouble
    return Step(observation, float(self._turn), self._turn == self._turns)

  def close(self):
    OPEN.remove(self)


def plain(tokenizer, max_prompt=None, **options):
  workflow = counting(tokenizer, environment='environment_test:Plain', **options)
  workflow.max_prompt = max_prompt
  return asyncio.run(rollouts(workflow))


def test_an_environment_of_plain_functions_runs_in_threads(tokenizer):
  for sample, _, verdict, *_ in plain(tokenizer):
    assert verdict == Verdict(value=3.0, turn_values=(1.0, 2.0))
    assert len(sample.segments) == 3


@pytest.mark.parametrize(
  ('trouble', 'line'),
  [
    ('block', 'environment environment_test:Plain: step: no result within 2 s'),
    ('exit', 'environment environment_test:Plain: step: RuntimeError: SystemExit: 3'),
  ],
)
def test_a_plain_step_that_blocks_or_exits_makes_the_sample_unscorable(tokenizer, trouble, line):
  for _, _, verdict, *_ in plain(tokenizer, trouble=trouble):
    assert verdict == Verdict(value=None, evidence={'error': line})
  RELEASED.set()


def test_a_step_that_observes_nothing_makes_the_sample_unscorable(tokenizer):
  for _, _, verdict, *_ in plain(tokenizer, trouble='silence'):
    assert verdict.value is None
    assert 'Plain: rollout.workflow: episode' in verdict.evidence['error']
    assert verdict.evidence['error'].endswith('the observation has no tokens, wanted at least one')


def test_a_first_prompt_that_is_too_long_makes_the_sample_unscorable(tokenizer):
  for sample, _, verdict, *_ in plain(tokenizer, trouble='long', max_prompt=10):
    assert sample.prompt_len == 10
    line = f'task {TASK.uid}: the first prompt has 80 tokens, wanted at most 10; raise rollout.max'
    assert verdict.value is None and verdict.evidence['error'].startswith(line)
  for _, _, verdict, *_ in plain(tokenizer, trouble='long', max_prompt=80):
    assert verdict.value == 3.0


@pytest.mark.parametrize(
  ('trouble', 'line'),
  [
    ('step', 'environment environment_test:Counting: step: OSError: the game fell over'),
    ('hang', 'environment environment_test:Counting: step: no result within 2 s'),
  ],
)
def test_what_an_environment_does_wrong_makes_the_sample_unscorable(tokenizer, trouble, line):
  for _, _, verdict, *_ in simulated(rollouts(counting(tokenizer, trouble=trouble))):
    assert verdict == Verdict(value=None, evidence={'error': line})


@pytest.mark.parametrize(
  ('trouble', 'says'),
  [
    ('nan', 'reward is nan, wanted a number from -1e+06 to 1e+06'),
    ('evidence', 'the evidence of a reward is not JSON: Object of type set is not JSON'),
  ],
)
def test_a_reward_that_is_no_number_makes_the_sample_unscorable(tokenizer, trouble, says):
  for sample, _, verdict, *_ in simulated(rollouts(counting(tokenizer, trouble=trouble))):
    line = f'environment environment_test:Counting: step: rollout.workflow: episode {sample.uid}: '
    assert verdict.value is None and verdict.evidence['error'].startswith(line + says)


def test_an_environment_that_does_not_begin_makes_the_sample_unscorable(tokenizer):
  for sample, _, verdict, *_ in simulated(rollouts(counting(tokenizer, trouble='reset'))):
    line = 'environment environment_test:Counting: reset: OSError: no such game'
    assert verdict == Verdict(value=None, evidence={'error': line})
    assert sample.prompt_len == 1 and len(sample.segments) == 1


@pytest.mark.parametrize('trouble', ['reset writes \ud800', 'step writes \ud800'])
def test_an_observation_that_cannot_be_encoded_makes_the_sample_unscorable(tokenizer, trouble):
  for sample, _, verdict, *_ in plain(tokenizer, trouble=trouble):
    assert verdict.value is None
    error = verdict.evidence['error']
    assert error.startswith('environment environment_test:Plain: ') and '\n' not in error
    assert 'tokenizer' in error and sample.response_len >= 1


def test_an_environment_that_returns_no_step_ends_the_run_with_one_line(tokenizer):
  with pytest.raises(RunError, match='Counting: step returned a tuple, wanted a Step'):
    simulated(rollouts(counting(tokenizer, trouble='tuple')))


def test_an_environment_that_does_not_close_is_left_after_its_deadline(tokenizer):
  assert len(simulated(rollouts(counting(tokenizer, trouble='close')))) == 2


def test_no_more_environments_are_open_than_permitted_by_all_workflows_together(tokenizer):
  most = 0

  async def check():
    nonlocal most
    workflows = [counting(tokenizer, concurrency=3) for _ in range(2)]
    running = asyncio.gather(*(samples_of(workflow, 6) for workflow in workflows))
    while not running.done():
      most = max(most, len(OPEN))
      await asyncio.sleep(0)
    assert [len(found) for found in running.result()] == [6, 6]

  simulated(check())
  assert most == 3


@pytest.mark.parametrize(
  ('options', 'line'),
  [
    ({'max_turns': 0}, 'rollout.workflow.options.max_turns: got 0, wanted above 0'),
    ({'environment': 'environment_test:Absent'}, "no 'Absent'"),
  ],
)
def test_an_impossible_option_is_one_line(tokenizer, options, line):
  with pytest.raises(UserError) as caught:
    counting(tokenizer, **options)
  assert line in str(caught.value) and '\n' not in str(caught.value)


ENVIRONMENT = RewardsConfig(scorers=(ScorerConfig(name='environment', weight=2.0),))


def explored(tokenizer, store, workflow):
  async def check():
    pool = ScorerPool({'environment': environment_scorer()}, ENVIRONMENT)
    exploration = exploring.Exploration(tokenizer, store, lambda attempt: 1.0, scorers=pool)
    exploration.runner.workflow = workflow
    await pool.start()
    try:
      return await exploration.batches(1)
    finally:
      await pool.close()

  ((batch, counts),) = asyncio.run(check())
  return batch, counts


def test_rewards_of_the_environment_are_stored_as_a_score_and_weighted(tokenizer, store):
  batch, _ = explored(tokenizer, store, counting(tokenizer))
  assert len(batch) == 4
  for member in batch:
    assert (member.reward.value, member.reward.turn_values) == (6.0, (2.0, 4.0))
    (score,) = store.scores([member.sample.uid])[member.sample.uid]
    assert (score.scorer, score.value, score.turn_values) == ('environment', 3.0, (1.0, 2.0))
    assert score.status == Status.OK and score.evidence == {'turn': 3}


def test_a_reward_that_no_scorer_reads_is_one_line(tokenizer, store):
  exploration = exploring.Exploration(tokenizer, store, lambda attempt: 1.0)
  exploration.runner.workflow = counting(tokenizer)
  with pytest.raises(RunError, match='has a reward of the environment, which no scorer'):
    simulated(exploration.batches(1))


def test_an_episode_that_fails_without_a_scorer_to_record_it_is_one_line(tokenizer, store):
  exploration = exploring.Exploration(tokenizer, store, lambda attempt: 1.0)
  exploration.runner.workflow = counting(tokenizer, trouble='step')
  with pytest.raises(RunError) as caught:
    simulated(exploration.batches(1))
  assert 'its episode failed: environment environment_test:Counting: step: OSE' in str(caught.value)
  assert "add ScorerConfig(name='environment', weight=0) to rewards.scorers" in str(caught.value)
  assert '\n' not in str(caught.value)


def test_a_scorer_of_the_environment_wants_a_workflow_with_one(tokenizer, store):
  exploration = exploring.Exploration(tokenizer, store, lambda attempt: 1.0)
  with pytest.raises(RunError, match=r"has no reward, and rewards\.scorers has 'environment'"):
    explored(tokenizer, store, exploration.runner.workflow)


def test_scorers_see_the_whole_conversation(tokenizer, store):
  seen = []

  def judge(attempt):
    seen.append(attempt)
    return float(len(attempt.transcript))

  class Quiet(Counting):
    async def step(self, action):
      return (await super().step(action))._replace(reward=0.0)

  exploration = exploring.Exploration(tokenizer, store, judge)
  workflow = counting(tokenizer)
  workflow._make = Quiet
  exploration.runner.workflow = workflow
  simulated(exploration.batches(1))
  for attempt in seen:
    roles = [message['role'] for message in attempt.transcript]
    assert roles == ['user', 'assistant', 'tool', 'assistant', 'tool', 'assistant']
    assert attempt.transcript[2]['content'].endswith('h')
    assert attempt.transcript[-1]['content'] == attempt.completion


VALUES = {'a': -0.5, 'b': 0.8, 'c': 1.5}
WORTHS = {'a': 0.5, 'b': 1.1, 'c': 1.5}


@pytest.mark.parametrize(
  ('combines', 'value', 'turns'),
  [
    (('sum', 'sum', 'sum'), -0.5 * 2 + 0.8 * 3 + 1.5, (2.0 + 0.3, 0.6)),
    (('sum', 'product', 'sum'), (-0.5 * 2 + 1.5) * (1.1 * 3), (2.0 * 3.3,)),
    (('product', 'sum', 'sum'), 0.5 * 2 * (0.8 * 3 + 1.5), (0.3, 0.6)),
    (('sum', 'sum', 'gate'), -0.5 * 2 + 0.8 * 3, (2.0 + 0.3, 0.6)),
    (('sum', 'gate', 'sum'), -0.5 * 2 + 1.5, (2.0,)),
    (('gate', 'sum', 'sum'), 0.0, (0.0, 0.0)),
    (('product', 'product', 'gate'), 0.5 * 2 * 1.1 * 3, ()),
  ],
)
def test_scores_are_added_multiplied_or_gate_the_rest(combines, value, turns):
  """Weights are 2, 3 and 1; `a` has a turn value of 1, `b` of 0.1 and 0.2."""
  config = RewardsConfig(
    scorers=tuple(
      ScorerConfig(name=name, weight=weight, combine=combine)
      for name, weight, combine in zip('abc', (2.0, 3.0, 1.0), combines)
    )
  )
  given = {'a': (1.0,), 'b': (0.1, 0.2), 'c': ()}
  scores = [
    Score(uid='u', scorer=name, value=VALUES[name], turn_values=given[name]) for name in 'abc'
  ]
  reward = combine(scores, config)
  assert reward.value == pytest.approx(value)
  assert reward.turn_values == pytest.approx(turns)
  assert reward.parts == pytest.approx(WORTHS)
  assert reward.correct is False, 'the first scorer decides, and its total is below 1'
