"""The recording proxy over real sockets: what agents send, what they get, and what is recorded."""

import asyncio
import json

import aiohttp
import numpy as np
import pytest
from agents import calling, opened
from scripted import Scripted

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.records.sample import Role
from jaxrl_llm.rewards.api import Verdict
from jaxrl_llm.rollout.agents import proxy as proxy_module
from jaxrl_llm.rollout.agents import session as session_module
from jaxrl_llm.rollout.agents.proxy import Proxy
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.tasks.tokenizer import build_character_tokenizer

USER = {'role': 'user', 'content': 'h'}
TOOL = {'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object'}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
NAMELESS = '<tool_call>{"name": "", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture(scope='module')
def chat(tmp_path_factory):
  texts = ['abcdefgh error: ', CALL]
  return build_character_tokenizer(texts, tmp_path_factory.mktemp('chat'), template='chatml')


def read_by(tokenizer, sample):
  """Text that the policy read after its first turn."""
  tokens = sample.tokens[sample.role == Role.TOOL].tolist()
  return tokenizer.decode(tokens, skip_special=False)


def test_two_calls_are_one_sample_token_by_token(chat):
  async def check():
    async with opened(chat, 'ab$', 'c$') as agent:
      first, finish = await agent.say(USER)
      assert (first['content'], finish) == ('ab', 'stop')
      second, _ = await agent.say(USER, first, {'role': 'user', 'content': 'g'})
      assert second['content'] == 'c'
      return agent.episode.end(), agent.hub.requests

  (sample, _, verdict, turns, _), requests = asyncio.run(check())
  messages = [USER, {'role': 'assistant', 'content': 'ab'}, {'role': 'user', 'content': 'g'}]
  messages += [{'role': 'assistant', 'content': 'c'}]
  whole = chat.encode(chat.render_chat(messages, add_generation_prompt=False).text)
  assert sample.tokens.tolist() == whole[:-1]  # The template adds a line break.
  assert list(requests[1].prompt) == sample.tokens[: len(requests[1].prompt)].tolist()
  assert sample.sampled.sum() == 5 and np.array_equal(sample.sampled, sample.loss_mask)
  assert verdict.parts == {'agent_calls': 2.0}
  assert [turn['role'] for turn in turns] == ['assistant', 'tool', 'assistant']


def test_a_call_of_a_tool_is_given_to_the_agent_and_its_turn_is_never_encoded_again(chat):
  async def check():
    async with opened(chat, f'ab {CALL}$', 'c$') as agent:
      answer, finish = await agent.say(USER, tools=[TOOL])
      assert (answer['content'], finish) == ('ab', 'tool_calls')
      (call,) = answer['tool_calls']
      assert call['function'] == {'name': 'add', 'arguments': '{"a": 1}'}
      # Agents build the message anew, with other blanks in the arguments and keys of their own.
      call = {**call, 'function': {**call['function'], 'arguments': '{"a":1}'}}
      again = {'role': 'assistant', 'content': 'ab ', 'tool_calls': [call], 'annotations': []}
      result = {'role': 'tool', 'tool_call_id': call['id'], 'content': 'd'}
      await agent.say(USER, again, result, tools=[TOOL])
      return agent.episode.end().sample

  sample = asyncio.run(check())
  assert read_by(chat, sample) == '\n<|im_start|>tool\nd<|im_end|>\n<|im_start|>assistant\n'
  assert chat.decode(sample.tokens[sample.sampled].tolist()) == f'ab {CALL}c'


@pytest.mark.parametrize(
  ('body', 'text', 'content', 'calls'),
  [
    ({'tools': [TOOL]}, CALL, None, 1),
    ({'tools': [TOOL], 'tool_choice': 'none'}, CALL, CALL, 0),
    ({}, CALL, CALL, 0),
    ({'tools': [TOOL]}, '<tool_call>a', '<tool_call>a', 0),
    ({'tools': [TOOL]}, NAMELESS, NAMELESS, 0),
    ({}, ' ', ' ', 0),
  ],
)
def test_calls_are_parsed_if_the_agent_has_tools_and_all_can_be_read(
  chat, body, text, content, calls
):
  async def check():
    async with opened(chat, f'{text}$') as agent:
      return await agent.say(USER, **body)

  answer, finish = asyncio.run(check())
  assert (answer['content'], len(answer.get('tool_calls', []))) == (content, calls)
  assert finish == ('tool_calls' if calls else 'stop')


def test_limits_stop_texts_and_usage_are_those_of_the_request(chat):
  async def check():
    async with opened(chat, 'abc', 'abf', turn_tokens=3) as agent:
      status, body = await agent.post(messages=[USER], max_completion_tokens=2, max_tokens=9)
      (choice,) = body['choices']
      assert (status, choice['message']['content'], choice['finish_reason']) == (
        200,
        'ab',
        'length',
      )
      prompt = len(agent.hub.requests[0].prompt)
      usage = {'prompt_tokens': prompt, 'completion_tokens': 2, 'total_tokens': prompt + 2}
      assert body['usage'] == usage and body['model'] == 'policy'
      answer = {'role': 'assistant', 'content': [{'type': 'text', 'text': 'ab'}]}
      answer, finish = await agent.say(USER, answer, USER, stop='f', model='gpt-x')
      assert (answer['content'], finish) == ('ab', 'stop')
      assert [request.max_tokens for request in agent.hub.requests] == [2, 3]

  asyncio.run(check())


def test_a_stream_holds_the_answer_its_calls_and_its_usage(chat):
  async def check():
    async with opened(chat, f'ab{CALL}$', 'c$') as agent:
      options = {'stream': True, 'stream_options': {'include_usage': True}, 'tools': [TOOL]}
      status, text = await agent.post(messages=[USER], **options)
      events = [line.removeprefix('data: ') for line in text.split('\n\n') if line]
      assert status == 200 and events.pop() == '[DONE]'
      *deltas, usage = map(json.loads, events)
      assert deltas[0]['choices'][0]['delta'] == {'role': 'assistant', 'content': 'ab'}
      (call,) = deltas[1]['choices'][0]['delta']['tool_calls']
      assert (call['index'], call['function']['name']) == (0, 'add')
      assert deltas[2]['choices'][0]['finish_reason'] == 'tool_calls'
      assert usage['usage']['completion_tokens'] == len(f'ab{CALL}') + 1
      del call['index']
      answer = {'role': 'assistant', 'content': 'ab', 'tool_calls': [call]}
      await agent.say(USER, answer, {'role': 'tool', 'content': 'd'}, tools=[TOOL])

  asyncio.run(check())


@pytest.mark.parametrize(
  ('asked', 'line'),
  [
    ({'top_p': 0.9}, 'top_p=0.9'),
    ({'temperature': 0.7}, 'temperature=0.7'),
    ({'n': 2}, 'n=2'),
    ({'logit_bias': {'1': 5}}, 'logit_bias='),
    ({'response_format': {'type': 'json_object'}}, 'response_format='),
    ({'tool_choice': 'required'}, 'tool_choice="required"'),
    ({'stop': ['abc']}, "stop='abc'"),
    ({'stop': ['a' * 10**5]}, f"stop='{'a' * 78}…"),
  ],
)
def test_filtered_sampling_is_refused_ignored_or_not_trained_on(chat, asked, line):
  async def check():
    async with opened(chat, 'ab$') as agent:
      status, body = await agent.post(messages=[USER], **asked)
      assert (status, body['error']['code']) == (400, 'filtered_sampling')
      assert line in body['error']['message'] and not agent.hub.requests
      # The session goes on, and a request may repeat the run's own parameters.
      await agent.say(USER, temperature=1.0, top_p=1, n=1, seed=3, user='me', logit_bias={})
      assert agent.session.failure == agent.session.exclusion == ''
    for filtered, wanted in (('ignore', ''), ('unscorable', line)):
      async with opened(chat, 'ab$', 'c$', filtered=filtered) as agent:
        answer, _ = await agent.say(USER, **asked)
        assert agent.hub.requests[0].sampling == Sampling()
        await agent.say(USER, answer, USER)
        assert wanted in agent.session.exclusion and bool(wanted) == bool(agent.session.exclusion)

  asyncio.run(check())


@pytest.mark.parametrize(
  ('body', 'line'),
  [
    ({}, 'messages is null, wanted a list of messages'),
    ({'messages': 'h'}, 'messages is "h", wanted a list of messages'),
    ({'messages': [{'role': 'king', 'content': 'h'}]}, 'messages[0] has role "king", wanted one'),
    ({'messages': [USER, {'role': 'user'}]}, "messages[1] of 'user' has no content"),
    (
      {'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]},
      'messages[0] has content with part',
    ),
    ({'messages': [USER], 'tools': [{}]}, 'tools is [{}], wanted a list of'),
    ({'messages': [USER], 'max_tokens': 0}, 'max_tokens is 0, wanted a number of at least 1'),
    ({'messages': [USER], 'stop': [1]}, 'stop is [1], wanted a text'),
    ({'messages': [USER], 'stream': 'yes'}, 'stream is "yes", wanted a bool'),
    ({'messages': [USER], 'logprobs': True}, 'logprobs is not supported'),
  ],
)
def test_a_malformed_request_is_one_line_and_loses_nothing(chat, body, line):
  async def check():
    async with opened(chat, 'ab$') as agent:
      status, answer = await agent.post(**body)
      assert status == 400 and line in answer['error']['message']
      assert '\n' not in answer['error']['message']
      await agent.say(USER)
      assert agent.episode.end().verdict.parts == {'agent_refused': 1.0, 'agent_calls': 1.0}

  asyncio.run(check())


def test_refused_requests_are_counted_up_to_a_maximum(chat, monkeypatch):
  monkeypatch.setattr(session_module, '_MAX_REFUSED', 3)

  async def check():
    async with opened(chat, 'ab$') as agent:
      for _ in range(5):
        status, answer = await agent.post(messages=[])
        assert status == 400 and 'wanted a list of messages' in answer['error']['message']
      await agent.say(USER)
      assert agent.episode.end().verdict.parts == {'agent_refused': 3.0, 'agent_calls': 1.0}

  asyncio.run(check())


def test_what_is_no_json_too_large_or_on_no_route_is_refused(chat, monkeypatch):
  monkeypatch.setattr(proxy_module, 'MAX_BODY', 5000)

  async def check():
    async with opened(chat, 'ab$') as agent:
      for data, status in (
        (b'{', 400),
        (b'[]', 400),
        (b'"' + b'a' * 5000 + b'"', 413),
      ):
        found, body = await agent.post(data=data)
        assert found == status and body['error']['message'], data[:10]
      for data in (
        b'{"a":' + b'[' * 100 + b']' * 100 + b'}',
        b'{"a":' * 60 + b'[' * 60 + b']' * 60 + b'}' * 60,
      ):
        status, body = await agent.post(data=data)
        assert status == 400 and 'nested more than 100 levels' in body['error']['message']
      assert (await agent.post('responses'))[0] == 403
      assert (await agent.post('models'))[0] == 405
      await agent.say(USER)

  asyncio.run(check())


def test_a_key_belongs_to_one_session_while_it_is_open(chat):
  async def check():
    async with Proxy() as proxy:
      async with calling(proxy, chat, 'ab$') as first, calling(proxy, chat, 'cd$') as second:
        status, body = await first.post(messages=[USER], headers={'Authorization': 'Bearer x'})
        assert status == 401 and 'the key of an open session' in body['error']['message']
        assert (await first.post(messages=[USER], headers={}))[0] == 401
        assert (await first.say(USER))[0]['content'] == 'ab'
        assert len(first.hub.requests) == 1 and not second.hub.requests
        # Another client's conversation is none of the second session's.
        answer = {'role': 'assistant', 'content': 'ab'}
        assert (await second.say(USER, answer, USER))[0]['content'] == 'cd'
      assert (await first.post(messages=[USER]))[0] == 401

  asyncio.run(check())


def test_models_lists_the_policy(chat):
  async def check():
    async with (
      opened(chat) as agent,
      aiohttp.ClientSession(headers=agent.headers) as http,
      http.get(f'{agent.url}/models') as response,
    ):
      assert [model['id'] for model in (await response.json())['data']] == ['policy']

  asyncio.run(check())


def test_a_characters_that_the_tokenizer_lacks_end_the_session_with_one_line(chat):
  async def check():
    async with opened(chat, 'ab$') as agent:
      answer, _ = await agent.say(USER)
      status, body = await agent.post(messages=[USER, answer, {'role': 'user', 'content': 'ß'}])
      assert status == 400 and "lacks 'ß'" in body['error']['message']
      status, body = await agent.post(messages=[USER, answer, USER])
      assert status == 400 and 'the session has failed' in body['error']['message']
      assert 'lacks' in agent.session.failure

  asyncio.run(check())


def test_messages_without_a_token_end_the_session_and_not_the_run(tokenizer):
  """The plain template renders texts alone."""

  async def check():
    async with opened(tokenizer, 'ab$') as agent:
      answer, _ = await agent.say(USER)
      status, body = await agent.post(messages=[USER, answer, {'role': 'user', 'content': ''}])
      assert status == 400 and 'the observation has no tokens' in body['error']['message']
      assert 'has no token' in agent.session.failure

  asyncio.run(check())


def test_a_parser_that_raises_ends_the_run(chat):
  def parser(text):
    raise OSError('no parser today')

  async def check():
    with pytest.raises(OSError, match='no parser today'):
      async with opened(chat, 'ab$', parser=parser) as agent:
        assert (await agent.post(messages=[USER], tools=[TOOL]))[0] == 500

  asyncio.run(check())


def test_an_episode_without_room_is_over_and_says_so(chat):
  async def check():
    async with opened(chat, 'ab$', max_tokens=5) as agent:
      answer, _ = await agent.say(USER)
      for _ in range(2):
        status, body = await agent.post(messages=[USER, answer, USER])
        assert (status, body['error']['code']) == (400, 'context_length_exceeded')
      assert agent.session.over.finish == 'length' and not agent.session.failure

  asyncio.run(check())


def test_an_edited_history_starts_a_step_in_which_earlier_turns_are_only_read(chat):
  edited = [{'role': 'user', 'content': 'g'}, {'role': 'assistant', 'content': 'ab'}, USER]

  async def check():
    async with opened(chat, 'ab$', 'c$', 'd$', max_steps=2) as agent:
      await agent.say(USER)
      answer, _ = await agent.say(*edited)
      # The new step goes on as the first would have.
      await agent.say(*edited, answer, USER)
      status, body = await agent.post(messages=[USER])
      assert (status, body['error']['code']) == (400, 'too_many_steps')
      assert agent.session.over.finish == 'steps'
      return agent.episode.end().steps

  first, second = asyncio.run(check())
  assert chat.decode(first.tokens[first.sampled].tolist()) == 'ab'
  assert chat.decode(second.tokens[second.sampled].tolist()) == 'cd'
  prompt = chat.render_chat(edited, add_generation_prompt=True).text
  assert second.tokens[: second.prompt_len].tolist() == chat.encode(prompt)


def test_turns_are_recognised_at_other_places_of_an_edited_history(chat):
  async def check():
    async with opened(chat, f'ab {CALL}$', 'c$', max_steps=2) as agent:
      answer, _ = await agent.say(USER, tools=[TOOL])
      result = {'role': 'tool', 'tool_call_id': answer['tool_calls'][0]['id'], 'content': 'd'}
      await agent.say({'role': 'user', 'content': 'g'}, USER, answer, result, tools=[TOOL])
      return agent.episode.end().steps

  (second,) = asyncio.run(check())[1:]
  prompt = chat.decode(second.tokens[: second.prompt_len].tolist(), skip_special=False)
  assert f'<|im_start|>assistant\nab {CALL}<|im_end|>' in prompt


def test_other_tools_than_before_start_a_step(chat):
  async def check():
    async with opened(chat, 'ab$', 'c$', max_steps=2) as agent:
      answer, _ = await agent.say(USER, tools=[TOOL])
      await agent.say(USER, answer, USER)
      return len(agent.episode.end().steps)

  assert asyncio.run(check()) == 2


class Slow(Scripted):
  """Its policy writes when it may."""

  def __init__(self, *args):
    super().__init__(*args)
    self.asked, self.may, self.cancelled = asyncio.Event(), asyncio.Event(), False

  async def generate(self, request):
    self.asked.set()
    try:
      await self.may.wait()
    except asyncio.CancelledError:
      self.cancelled = True
      raise
    async for answer in super().generate(request):
      yield answer


def test_a_second_call_at_the_same_time_is_refused_and_the_first_goes_on(chat):
  async def check():
    async with opened(chat, hub=Slow(chat, 'ab$')) as agent:
      first = asyncio.ensure_future(agent.say(USER))
      await agent.hub.asked.wait()
      status, body = await agent.post(messages=[USER])
      assert (status, body['error']['code']) == (400, 'concurrent_calls')
      agent.hub.may.set()
      assert (await first)[0]['content'] == 'ab' and not agent.session.failure

  asyncio.run(check())


def test_calls_of_sub_agents_at_the_same_time_are_steps_of_their_own(chat):
  async def check():
    hub = Slow(chat, 'ab$', 'cd$')
    async with opened(chat, hub=hub, max_steps=2, max_calls=2) as agent:
      calls = [asyncio.ensure_future(agent.say({'role': 'user', 'content': c})) for c in 'gh']
      await hub.asked.wait()
      while agent.session._in_flight < 2:
        await asyncio.sleep(0.01)
      assert (await agent.post(messages=[USER]))[1]['error']['code'] == 'concurrent_calls'
      hub.may.set()
      answers = {(await call)[0]['content'] for call in calls}
      return answers, [chat.decode(s.tokens[s.sampled].tolist()) for s in agent.episode.end().steps]

  answers, steps = asyncio.run(check())
  assert answers == {'ab', 'cd'} and steps == ['ab', 'cd']


@pytest.mark.parametrize('stream', [True, False])
def test_a_client_that_hangs_up_loses_its_sample_and_nothing_else(chat, stream):
  async def check():
    async with Proxy() as proxy:
      hub = Slow(chat, 'ab$', 'c$')
      async with calling(proxy, chat, hub=hub) as agent, calling(proxy, chat, 'cd$') as other:
        hub.may.set()
        answer, _ = await agent.say(USER)
        hub.may.clear(), hub.asked.clear()
        messages = [USER, answer, USER]
        call = asyncio.ensure_future(agent.post(messages=messages, stream=stream))
        await hub.asked.wait()
        call.cancel()
        await asyncio.wait({call})
        while not hub.cancelled:
          await asyncio.sleep(0.01)
        assert agent.session.failure == 'the agent hung up before its call was answered'
        assert (await agent.post(messages=messages))[0] == 400
        assert (await other.say(USER))[0]['content'] == 'cd'
      sample = agent.episode.end().sample
      assert sample.sampled.sum() == 3

  asyncio.run(check())


def test_the_first_turn_of_a_client_that_hangs_up_is_sampled_so_that_there_is_a_sample(chat):
  async def check():
    hub = Slow(chat, 'ab$')
    async with opened(chat, hub=hub) as agent:
      call = asyncio.ensure_future(agent.post(messages=[USER]))
      await hub.asked.wait()
      call.cancel()
      await asyncio.wait({call})
      while not agent.session.failure:
        await asyncio.sleep(0.01)
      hub.may.set()
    assert agent.episode.end().sample.sampled.sum() == 3 and not hub.cancelled

  asyncio.run(check())


def test_the_first_turn_ends_at_once_if_nobody_wants_the_sample(chat):
  hub = Slow(chat, 'ab$')

  async def main():
    async with opened(chat, hub=hub) as agent:
      await agent.post(messages=[USER])

  async def check():
    running = asyncio.ensure_future(main())
    await hub.asked.wait()
    running.cancel()
    await asyncio.wait({running}, timeout=10)
    assert running.cancelled() and hub.cancelled

  asyncio.run(check())


class Failing(Scripted):
  async def generate(self, request):
    raise RunError('no engine is left')
    yield


def test_a_failure_of_the_run_is_raised_where_the_episode_is_played(chat):
  async def check():
    with pytest.raises(RunError, match='no engine is left'):
      async with opened(chat, hub=Failing(chat)) as agent:
        status, body = await agent.post(messages=[USER])
        assert status == 500 and 'engine' not in body['error']['message']

  asyncio.run(check())


def test_rewards_of_the_agent_belong_to_its_last_turn(chat):
  async def check():
    async with opened(chat, 'ab$', 'c$', takes_reward=True) as agent:
      assert (await agent.post('reward', value=1.0))[0] == 400  # No turn yet.
      answer, _ = await agent.say(USER)
      assert (await agent.post('reward', value=0.5))[0] == 200
      await agent.say(USER, answer, USER)
      assert (await agent.post('reward', value=1, evidence={'why': 'right'}))[0] == 200
      for wrong in (
        {},
        {'value': True},
        {'value': 'high'},
        {'value': 2e6},
        {'value': 1, 'evidence': []},
        {'value': 1, 'evidence': {'log': 'x' * 65536}},
      ):
        status, body = await agent.post('reward', **wrong)
        assert status == 400 and '\n' not in body['error']['message'], wrong
      assert (await agent.post('reward', data=b'{"value": NaN}'))[0] == 400
      return agent.episode.end().verdict

  wanted = Verdict(
    value=1.0, turn_values=(0.5,), parts={'agent_calls': 2.0}, evidence={'why': 'right'}
  )
  assert asyncio.run(check()) == wanted


def test_a_reward_of_an_agent_is_refused_if_the_scorers_give_it(chat):
  async def check():
    async with opened(chat, 'ab$') as agent:
      await agent.say(USER)
      status, body = await agent.post('reward', value=1.0)
      assert status == 400 and 'rollout.workflow.options.reward' in body['error']['message']

  asyncio.run(check())
