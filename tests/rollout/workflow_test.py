"""A workflow in the master's own process is held to what explorer processes are held to: each
sample wanted, once.
"""

import dataclasses

import exploring
import numpy as np
import pytest
from clocks import simulated

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.master.evaluation import Evaluator, SuiteConfig
from jaxrl_llm.replay.audit import audit
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.contract import checked_run
from jaxrl_llm.rollout.workflow import SingleTurn

TASK = exploring.make_tasks(1)[0]
GROUP = f'grpo/{TASK.uid}/0'


class Wrong:
  """What another workflow yields, in the order of the samples, after `change` of it."""

  def __init__(self, workflow, change):
    self._workflow, self._change, self.text = workflow, change, workflow.text

  async def run(self, task, visit, **how):
    runs = sorted(
      [one async for one in self._workflow.run(task, visit, **how)],
      key=lambda one: one[0].sample_index,
    )
    for one in self._change(runs):
      yield one


def longer(one):
  """Another sample under the same name."""
  sample, text = one
  grown = {
    name: np.r_[getattr(sample, name), getattr(sample, name)[-1:]] for name in ('tokens', 'role')
  }
  read = {
    name: np.r_[getattr(sample, name), np.zeros(1, getattr(sample, name).dtype)]
    for name in ('loss_mask', 'sampled', 'behaviour_logprobs')
  }
  return dataclasses.replace(sample, **grown, **read), f'{text}!'


def renamed(one, **changes):
  return dataclasses.replace(one[0], **changes), one[1]


def wrong(tokenizer, change):
  return Wrong(SingleTurn(exploring.FakeEngine(tokenizer), tokenizer, max_tokens=4), change)


WRONG = [
  (lambda runs: runs[:1], f'group {GROUP}: its workflow ended without sample 1 of 2'),
  (lambda runs: [], f'group {GROUP}: its workflow ended without sample 0 of 2'),
  (
    lambda runs: [runs[0], longer(runs[0])],
    f'group {GROUP}: its workflow ended without sample 1 of 2',
  ),
  (
    lambda runs: [renamed(runs[0], sample_index=2)],
    f'sample {GROUP}/0 has index 2, wanted 0 to 1',
  ),
  (
    lambda runs: [renamed(runs[0], sample_index=-1)],
    f'sample {GROUP}/0 has index -1, wanted 0 to 1',
  ),
  (
    lambda runs: [renamed(runs[0], sample_index=1)],
    f'sample {GROUP}/0 of group {GROUP}, wanted sample {GROUP}/1',
  ),
  (
    lambda runs: [renamed(runs[0], group_id='other')],
    f'sample {GROUP}/0 of group other, wanted sample {GROUP}/0',
  ),
]
NAMES = ['one missing', 'none', 'one twice', 'above', 'below', 'name of another', 'another group']


@pytest.mark.parametrize(('change', 'problem'), WRONG, ids=NAMES)
def test_samples_that_are_not_those_wanted_are_one_line(tokenizer, change, problem):
  async def check():
    workflow = wrong(tokenizer, change)
    runs = checked_run(
      workflow, TASK, 0, stage='grpo', samples=2, sampling=Sampling(temperature=1.0)
    )
    with pytest.raises(RunError) as caught:
      [one async for one in runs]
    assert str(caught.value).startswith('rollout.workflow: ') and problem in str(caught.value)
    assert '\n' not in str(caught.value)

  simulated(check())


@pytest.mark.parametrize(('change', 'problem'), WRONG, ids=NAMES)
def test_they_end_a_run_and_leave_nothing_that_the_audit_does_not_account_for(
  tokenizer, store, change, problem
):
  exploration = exploring.Exploration(tokenizer, store, lambda attempt: 1.0)
  exploration.runner.workflow = Wrong(exploration.runner.workflow, change)
  with pytest.raises(RunError, match=r'rollout\.workflow: '):
    simulated(exploration.batches(1))
  report = audit(store)
  assert report.ok and report.live == () and report.duplicates == 0
  assert report.reasons == {'dropped(given up)': report.issued}


def test_of_two_samples_of_one_index_the_first_is_scored_stored_and_trained(tokenizer, store):
  said = []

  def judge(attempt):
    said.append(attempt.completion)
    return float(attempt.completion.endswith('!'))

  exploration = exploring.Exploration(tokenizer, store, judge)
  exploration.runner.workflow = Wrong(
    exploration.runner.workflow, lambda runs: [*runs, longer(runs[0])]
  )
  ((batch, _),) = simulated(exploration.batches(1))
  assert len(batch) == len(said) == 4 and not any(text.endswith('!') for text in said)
  assert [member.reward.value for member in batch] == [0.0] * 4
  stored = store.read([member.sample.uid for member in batch])
  assert [one.tokens.tolist() for one in stored] == [
    member.sample.tokens.tolist() for member in batch
  ]
  report = audit(store)
  assert report.ok and (report.duplicates, report.rescored) == (0, 0)


@pytest.mark.parametrize(
  ('change', 'problem'), [WRONG[0], WRONG[1], WRONG[3]], ids=[NAMES[0], NAMES[1], NAMES[3]]
)
def test_evaluations_are_held_to_it_too(tokenizer, change, problem):
  scorers = exploring.FakeScorers(lambda attempt: 1.0)
  evaluator = Evaluator(workflow=wrong(tokenizer, change), scorers=scorers, rewards=scorers.config)
  suite = SuiteConfig(name='eval', taskset='eval', samples=2)
  with pytest.raises(BaseExceptionGroup) as caught:
    simulated(evaluator.run(suite, [TASK]))
  assert caught.group_contains(RunError, match=r'rollout\.workflow: ')
