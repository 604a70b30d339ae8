"""The master as workflows meet it: what they ask for goes to the run's own scorers and models, and
into its events.
"""

import asyncio
import contextlib
import dataclasses
import json

import exploring
import pytest
from scoring import awaited, pool, started
from services import HANG, Service, chat

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.master.exploring.hub import MasterHub
from jaxrl_llm.rewards.api import Attempt, RewardsConfig, ScorerConfig, Verdict
from jaxrl_llm.rollout.auxiliary import AuxiliaryConfig, AuxiliaryModel
from jaxrl_llm.runtime.events import EventLog

(TASK,) = exploring.make_tasks(1)
ATTEMPT = Attempt(
  uid='grpo/t/0/1', task=TASK, completion='said', finish_reason='stop', response_len=4
)
MESSAGES = [{'role': 'user', 'content': 'and you?'}]


async def measure(one: Attempt) -> Verdict:
  if one.completion == 'hang':
    await asyncio.Event().wait()
  return Verdict(value=float(len(one.completion)))


class Setting:
  def __init__(self, directory, answer=lambda body: chat('fine')):
    self.service = Service(answer)
    self._directory = directory

  @contextlib.asynccontextmanager
  async def running(self):
    """The hub, opened; its events are in `rows` afterwards."""
    weighed = ScorerConfig(name='measure', weight=0.5)
    events = EventLog(self._directory, attempt=0)
    async with contextlib.AsyncExitStack() as stack:
      stack.callback(events.close)
      await stack.enter_async_context(self.service.running())
      scorers = await stack.enter_async_context(
        started(pool({'measure': (awaited(measure), {'weight': 0.5})}))
      )
      options = {'addresses': (self.service.address,), 'first_wait_s': 0.01, 'retries': 1}
      helper = AuxiliaryModel(AuxiliaryConfig(name='helper', model='some-7b', **options))
      auxiliary = {'helper': await stack.enter_async_context(helper)}
      rewards = RewardsConfig(scorers=(weighed,))
      yield MasterHub(None, scorers, lambda stage: rewards, auxiliary=auxiliary, events=events)

  def run(self, use):
    async def main():
      async with self.running() as hub:
        return await use(hub)

    return asyncio.run(asyncio.wait_for(main(), 30))

  @property
  def rows(self):
    """(edge, kind, what it says of the request or the reply), in order."""
    fields = ('sample', 'model', 'value', 'characters', 'given_up')
    lines = map(json.loads, (self._directory / 'events.jsonl').read_text().splitlines())
    return [
      (row['edge'], row['kind'], {name: row[name] for name in fields if name in row})
      for row in lines
    ]


def test_a_score_is_that_of_the_runs_scorers_with_their_weights(tmp_path):
  setting = Setting(tmp_path)
  reward = setting.run(lambda hub: hub.score(ATTEMPT))
  assert (reward.value, reward.parts) == (2.0, {'measure': 4.0})
  asked = ('auxiliary_score', 'request', {'sample': 'grpo/t/0/1'})
  assert setting.rows == [asked, ('auxiliary_score', 'reply', {'value': 2.0})]


def test_another_model_is_asked_as_it_is_called_where_it_is_served(tmp_path):
  setting = Setting(tmp_path)
  assert (
    setting.run(lambda hub: hub.ask('helper', MESSAGES, max_tokens=9, temperature=0.5)) == 'fine'
  )
  assert setting.service.seen == [
    {'model': 'some-7b', 'messages': MESSAGES, 'max_tokens': 9, 'temperature': 0.5}
  ]
  asked = ('auxiliary_model', 'request', {'model': 'helper'})
  assert setting.rows == [asked, ('auxiliary_model', 'reply', {'characters': 4})]


def test_a_model_that_nobody_configured_is_refused_before_anything_is_asked(tmp_path):
  setting = Setting(tmp_path)
  with pytest.raises(
    RunError, match=r"calls auxiliary model 'oracle'; rollout.auxiliary has helper; add it there"
  ):
    setting.run(lambda hub: hub.ask('oracle', MESSAGES, max_tokens=9))
  assert not setting.service.seen and not setting.rows


@pytest.mark.parametrize(
  'answer, text',
  [
    (503, 'auxiliary model helper: 2 tries: '),
    (
      {'choices': []},
      "auxiliary model helper: answered {'choices': \\[\\]}, wanted a chat completion with a text",
    ),
    (chat(None), 'auxiliary model helper: answered .*None.*, wanted a chat completion with a text'),
  ],
)
def test_a_missing_answer_is_reported_and_its_request_given_up(tmp_path, answer, text):
  setting = Setting(tmp_path, lambda body: answer)
  with pytest.raises(RunError, match=text):
    setting.run(lambda hub: hub.ask('helper', MESSAGES, max_tokens=9))
  assert setting.rows[1:] == [('auxiliary_model', 'reply', {'given_up': True})]


def test_cancelled_requests_are_reported_as_given_up(tmp_path):
  setting = Setting(tmp_path, lambda body: HANG)

  async def use(hub):
    score = hub.score(dataclasses.replace(ATTEMPT, completion='hang'))
    pending = [
      asyncio.create_task(score),
      asyncio.create_task(hub.ask('helper', MESSAGES, max_tokens=9)),
    ]
    while not setting.service.now:
      await asyncio.sleep(0.01)
    for one in pending:
      one.cancel()
    await asyncio.wait(pending)
    assert all(one.cancelled() for one in pending)

  setting.run(use)
  replies = [(edge, fields) for edge, kind, fields in setting.rows if kind == 'reply']
  assert sorted(replies, key=lambda r: r[0]) == [
    (f'auxiliary_{of}', {'given_up': True}) for of in ('model', 'score')
  ]
