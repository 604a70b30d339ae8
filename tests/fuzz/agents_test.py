"""Requests of agents to the recording proxy, changed in every way: each is answered or is an error
of the API, nothing of it is logged as a traceback, and other sessions are served.
"""

import asyncio
import json

import exploring
from agents import calling
from fuzzing import COUNTS, check_line, fuzz, one_of_each, quiet
from hypothesis import strategies as st

from jaxrl_llm.rollout.agents.proxy import Proxy

USER = {'role': 'user', 'content': 'h'}
CALL = {'id': 'call_0', 'type': 'function', 'function': {'name': 'add', 'arguments': '{"a": 1}'}}
TOOL = {
  'type': 'function',
  'function': {'name': 'add', 'parameters': {'type': 'object', 'properties': {'a': {}}}},
}
REQUESTS = (
  {
    'model': 'gpt-x',
    'messages': [{'role': 'developer', 'content': 'a'}, USER],
    'temperature': 1,
    'max_tokens': 3,
    'stop': ['f'],
    'stream': True,
    'stream_options': {'include_usage': True},
  },
  {
    'messages': [
      {'role': 'user', 'content': [{'type': 'text', 'text': 'h'}]},
      {'role': 'assistant', 'content': None, 'tool_calls': [CALL]},
      {'role': 'tool', 'tool_call_id': 'call_0', 'content': 'd'},
    ],
    'tools': [TOOL],
    'tool_choice': 'auto',
    'logit_bias': {},
    'response_format': {'type': 'text'},
  },
  {'value': 1.0, 'evidence': {'why': ['right', {'a': None}]}},
)
PATHS = ('chat/completions', 'reward')


@COUNTS
def test_every_request_of_an_agent_is_answered_or_an_error_of_the_api(tokenizer, count):
  async def exchange(proxy, path, body):
    hub = exploring.FakeEngine(tokenizer)
    options = {'hub': hub, 'takes_reward': True, 'filtered': 'ignore', 'max_steps': 3}
    async with calling(proxy, tokenizer, **options) as agent:
      await agent.say(USER)
      status, answer = await agent.post(path, data=body)
      if status == 200 and isinstance(answer, str):
        assert answer.endswith('data: [DONE]\n\n')
      elif status != 200:
        check_line(answer['error']['message'])
        assert status in (400, 413)
      if not agent.session.failure:
        await agent.say(USER)
    rollout = agent.episode.end()
    assert sum(step.sampled.sum() for step in rollout.steps) >= 2
    json.dumps(dict(rollout.verdict.evidence), allow_nan=False)

  with asyncio.Runner() as runner:
    proxy = Proxy()
    runner.run(proxy.__aenter__())

    def check(path, body):
      with quiet() as log:
        runner.run(exchange(proxy, path, body))
      log.check()

    fuzz(check, count, path=st.sampled_from(PATHS), body=one_of_each(REQUESTS))
    runner.run(proxy.__aexit__())
