"""Explorers that come and go: what the master gets of them is what it would have made itself."""

import asyncio
import contextlib
import dataclasses
import re
import socket
import threading
import time

import aiohttp
import numpy as np
import pytest
from clocks import LOOP_CLOCK, simulated
from crews import TOKEN, Setting
from exploring import make_tasks
from fleets import until
from serving import children_of

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.files import parse_msgpack
from jaxrl_llm.core.net.client import Lost
from jaxrl_llm.core.records.sample import encode
from jaxrl_llm.core.records.task import Media
from jaxrl_llm.core.types import Version
from jaxrl_llm.core.waits import WaitExpired
from jaxrl_llm.rewards.api import Attempt, Reward
from jaxrl_llm.rollout.api import Request, Sampling
from jaxrl_llm.rollout.explorers import crew, wire
from jaxrl_llm.rollout.explorers import explorer as exploring
from jaxrl_llm.rollout.explorers.crew import ExplorersConfig
from jaxrl_llm.rollout.explorers.explorer import Evicted, Link, explore
from jaxrl_llm.rollout.explorers.wire import Delivery, pack, request_row
from jaxrl_llm.rollout.workflow import SingleTurn, WorkflowConfig

REQUEST = Request(
  uid='g', prompt=(1,), max_tokens=4, stop_ids=(0,), samples=1, key=(1,), sampling=Sampling()
)


@pytest.fixture(autouse=True)
def _clock_of_the_loop(monkeypatch):
  for module in ('crew', 'leases'):
    monkeypatch.setattr(f'jaxrl_llm.rollout.explorers.{module}.time', LOOP_CLOCK)


@contextlib.contextmanager
def posting(setting, path, message):
  """Sends a message to the crew, and disconnects at the end without reading the answer."""
  body = pack(message)
  head = f'POST {path} HTTP/1.1\r\nHost: master\r\nContent-Length: {len(body)}\r\n\r\n'
  with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(setting.crew.address.removeprefix('unix:'))
    connection.sendall(head.encode() + body)
    yield


async def with_lease(setting, name):
  """Lets a new explorer, the only one, take the group. Returns (samples to come, link, order)."""
  await setting.dismiss('a')
  wanted = asyncio.create_task(setting.samples(setting.crew, make_tasks(1)[0]))
  link = setting.link(name)
  return wanted, link, await link.call(wire.TAKE)


def test_the_samples_are_those_of_the_workflow_in_the_master(tmp_path):
  async def check():
    async with Setting(tmp_path, groups=2).running('a', 'b') as setting:
      own = SingleTurn(setting.engine, setting.tokenizer, max_tokens=4)
      tasks = make_tasks(7)
      found = await asyncio.gather(
        *(setting.samples(setting.crew, task, visit=3) for task in tasks)
      )
      wanted = [await setting.samples(own, task, visit=3) for task in tasks]
      assert found == wanted and all(len(group) == 3 for group in found)
      assert setting.crew.explorers == 2 and not any(setting.crew.counts.values())

  simulated(check())


def test_groups_of_an_explorer_that_falls_silent_go_to_another_and_no_sample_comes_twice(tmp_path):
  async def check():
    async with Setting(tmp_path, groups=1).running('a') as setting:
      own = SingleTurn(setting.engine, setting.tokenizer, max_tokens=4)
      (task,) = make_tasks(1)
      theirs = await setting.samples(own, task)
      await setting.dismiss('a')
      quiet = Link(setting.crew.address, key=None, ca_file=None, name='quiet')
      wanted = asyncio.create_task(setting.samples(setting.crew, task))
      order = await quiet.call(wire.TAKE)
      first, *_ = await setting.made(quiet, order)

      def hand_in():
        return quiet.call(
          wire.SAMPLE, lease=order['lease'], steps=[encode(first)], text='of the quiet one'
        )

      await hand_in()
      await hand_in()
      setting.come('b')
      found = await wanted
      with pytest.raises(Lost, match='is no longer held'):
        await hand_in()
      await quiet.close()
      assert found == theirs, 'the text is that of the tokens, whatever was sent'
      assert setting.crew.counts == {'lost': 1, 'repeated': 2, 'late': 1}

  simulated(check())


def test_what_a_silent_explorer_was_asking_for_is_cancelled(tmp_path):
  async def check():
    async with Setting(tmp_path, groups=1).running('a') as setting:
      await setting.dismiss('a')
      quiet = Link(setting.crew.address, key=None, ca_file=None, name='quiet')
      (task,) = make_tasks(1)
      wanted = asyncio.create_task(setting.samples(setting.crew, task))
      order = await quiet.call(wire.TAKE)
      setting.engine.hold = lambda request: len(setting.engine.requests) == 1
      asked = {'lease': order['lease'], 'request': request_row(REQUEST)}

      async def ask():
        return [frame async for frame in quiet.stream(wire.GENERATE, **asked)]

      # It asks, and its connection stays; but it says no more that it is alive.
      asking = asyncio.create_task(ask())
      while not setting.engine.requests:
        await asyncio.sleep(0.01)
      while setting.crew.explorers:
        await asyncio.sleep(0.01)
      with pytest.raises(Lost):
        await asking
      assert setting.engine.cancelled == 1
      setting.come('b')
      assert len(await wanted) == 3
      await quiet.close()

  simulated(check())


def test_an_explorer_that_leaves_gives_its_groups_back_at_once(tmp_path):
  async def check():
    async with Setting(tmp_path, groups=1).running('first') as setting:
      setting.engine.hold = lambda request: len(setting.engine.requests) < 2
      (task,) = make_tasks(1)
      wanted = asyncio.create_task(setting.samples(setting.crew, task))
      while not setting.engine.requests:
        await asyncio.sleep(0.01)
      setting.explorers['first'].cancel()  # It says that it leaves.
      setting.come('second')
      assert len(await wanted) == 3
      assert setting.crew.counts['lost'] == 1 and setting.crew.explorers == 1

  simulated(check())


def test_what_a_workflow_asks_for_reaches_the_hub_and_comes_back_whole(tmp_path):
  answers = []

  class Asking(SingleTurn):
    def __init__(self, hub, tokenizer, max_tokens):
      super().__init__(hub, tokenizer, max_tokens=max_tokens)
      self._hub = hub

    async def run(self, task, visit, **how):
      async for sample, text in super().run(task, visit, **how):
        attempt = Attempt(
          uid=sample.uid, task=task, completion=text, finish_reason='stop', response_len=2
        )
        answers.append(await self._hub.score(attempt))
        answers.append(await self._hub.ask('helper', task.prompt, max_tokens=7, temperature=0.5))
        yield sample, text

  async def check():
    def build(config, hub, tokenizer, most, *_):
      return Asking(hub, tokenizer, most)

    async with Setting(tmp_path, build).running('a') as setting:
      (task,) = make_tasks(1)
      shown = (Media(kind='image', digest='0' * 32, reference='a.png'),)
      task = dataclasses.replace(task, fields={'large': 10**30, 'deep': [{'a': None}]}, media=shown)
      assert len(await setting.samples(setting.crew, task, samples=1)) == 1
      assert answers == [
        Reward(value=0.5, parts={'judge': 0.5}, correct=False, turn_values=(1.0, 2.0)),
        'an answer',
      ]
      assert [attempt.task for attempt in setting.hub.scored] == [task]
      assert setting.hub.asked == [('helper', [dict(m) for m in task.prompt], 7, 0.5)]

  simulated(check())


@pytest.mark.parametrize(
  ('error', 'line'),
  [
    (RunError('no engine is left'), ': its workflow failed: no engine is left'),
    (ZeroDivisionError('by zero'), ': its workflow failed: ZeroDivisionError: by zero'),
    # Of a service that the workflow calls: the master is there.
    (Lost('http://tools: no answer'), ': its workflow failed: Lost: http://tools: no answer'),
  ],
)
def test_a_workflow_that_fails_ends_the_wait_with_its_error(tmp_path, error, line):
  class Failing(SingleTurn):
    async def run(self, task, visit, **how):
      raise error
      yield

  async def check():
    def build(config, hub, tokenizer, most, *_):
      return Failing(hub, tokenizer, max_tokens=most)

    async with Setting(tmp_path, build).running('a') as setting:
      with pytest.raises(RunError) as raised:
        await setting.samples(setting.crew, make_tasks(1)[0])
      assert re.fullmatch(f'explorer a/[0-9a-f]{{16}}{line}', str(raised.value))

  simulated(check())


def test_what_the_engine_raises_is_told(tmp_path):
  async def check():
    async with Setting(tmp_path).running('a') as setting:
      setting.engine.fail_at, setting.engine.error = 0, UserError('prompt is too long')
      with pytest.raises(
        RunError, match=r'explorer a/\w+: its workflow failed: prompt is too long'
      ):
        await setting.samples(setting.crew, make_tasks(1)[0])

  simulated(check())


def test_what_breaks_the_engine_ends_the_wait_as_itself(tmp_path):
  async def check():
    async with Setting(tmp_path).running('a') as setting:
      setting.engine.fail_at, setting.engine.error = 0, ZeroDivisionError('in the engine')
      with pytest.raises(ZeroDivisionError, match='in the engine'):
        await setting.samples(setting.crew, make_tasks(1)[0])

  simulated(check())


def test_a_group_that_its_explorer_lost_goes_to_another(tmp_path):
  async def check():
    async with Setting(tmp_path, groups=1).running('a') as setting:
      await setting.dismiss('a')
      forgetful = Link(setting.crew.address, key=None, ca_file=None, name='forgetful')
      wanted = asyncio.create_task(setting.samples(setting.crew, make_tasks(1)[0]))
      await forgetful.call(wire.TAKE)
      setting.come('b')
      while not wanted.done():
        await forgetful.call(wire.ALIVE, leases=[])
        await asyncio.sleep(0.1)
      assert len(await wanted) == 3 and setting.crew.counts['lost'] == 1
      await forgetful.close()

  simulated(check())


def test_an_explorer_that_dies_while_it_is_answered_harms_nobody_else(tmp_path):
  """Its connection is closed, and the engine's next completions come before the event loop has seen
  that.
  """

  async def check():
    async with Setting(tmp_path, groups=1).running('a') as setting:
      await setting.dismiss('a')
      answered = asyncio.Event()
      plain = setting.engine.generate

      async def together(request):
        await answered.wait()
        async for completion in plain(request):
          yield completion

      setting.engine.prompt, setting.hub.generate = True, together
      dying = Link(setting.crew.address, key=None, ca_file=None, name='dying')
      wanted = asyncio.create_task(setting.samples(setting.crew, make_tasks(1)[0]))
      order = await dying.call(wire.TAKE)
      request = Request(uid='x', prompt=(3,), max_tokens=4, stop_ids=(1,), samples=3, key=(1,))
      message = {**dying.sender, 'lease': order['lease'], 'request': request_row(request)}
      with posting(setting, wire.GENERATE, message):
        await asyncio.sleep(0.2)
      answered.set()
      await asyncio.sleep(0.2)
      setting.come('b')
      assert len(await wanted) == 3 and setting.crew.counts['lost'] == 1
      await dying.close()

  simulated(check())


def test_a_sample_whose_lease_ends_while_it_is_checked_is_not_accepted(tmp_path):
  async def check():
    async with Setting(tmp_path, groups=1).running('a') as setting:
      wanted, slow, order = await with_lease(setting, 'slow')
      first, *_ = await setting.made(slow, order)
      message = {**slow.sender, 'lease': order['lease'], 'steps': [encode(first)]}
      with posting(setting, wire.SAMPLE, message):
        time.sleep(0.3)  # Another thread checks the sample, which is not handed in yet.
        await setting.crew._leases.give_up(slow.name, 'ended')
        await until(lambda: setting.crew.counts['late'])
      setting.come('b')
      assert len(await wanted) == 3
      assert setting.crew.counts == {'lost': 1, 'late': 1}
      await slow.close()

  asyncio.run(check())


@pytest.mark.parametrize('path', [wire.DELIVER, wire.SAMPLE])
def test_an_explorer_that_misbehaves_and_disconnects_is_evicted(tmp_path, path):
  """Also if the crew's event loop is busy meanwhile."""

  async def check():
    async with Setting(tmp_path, groups=1).running('a') as setting:
      wanted, rogue, order = await with_lease(setting, 'rogue')
      fields = {'lease': order['lease'], 'steps': [b''], **Delivery('unknown')._asdict()}
      with posting(setting, path, {**rogue.sender, **fields}):
        time.sleep(0.2)  # The message is read in another thread.
      time.sleep(0.2)
      await until(lambda: setting.crew.counts['evicted'])
      setting.come('b')
      assert len(await wanted) == 3 and setting.crew.counts['lost'] == 1
      await rogue.close()

  asyncio.run(check())  # Messages are received in another thread.


def test_a_workflow_that_forgets_a_sample_is_told(tmp_path):
  class Short(SingleTurn):
    async def run(self, task, visit, *, samples, **how):
      async for run in super().run(task, visit, samples=samples - 1, **how):
        yield run

  async def check():
    def build(config, hub, tokenizer, most, *_):
      return Short(hub, tokenizer, max_tokens=most)

    async with Setting(tmp_path, build).running('a') as setting:
      with pytest.raises(RunError, match='ended without sample 2 of 3'):
        await setting.samples(setting.crew, make_tasks(1)[0])

  simulated(check())


def test_a_group_that_is_lost_again_and_again_ends_the_run_with_the_reason(tmp_path):
  async def check():
    async with Setting(tmp_path, groups=1).running('a') as setting:
      await setting.dismiss('a')
      wanted = asyncio.create_task(setting.samples(setting.crew, make_tasks(1)[0]))
      deadly = Link(setting.crew.address, key=None, ca_file=None, name='deadly')
      for _ in range(5):
        assert await deadly.call(wire.TAKE)
        await deadly.call(wire.LEAVE)
      with pytest.raises(
        RunError,
        match=r'a group of taskset train was lost 5 times, most recently because deadly/\w+ left',
      ):
        await wanted
      await deadly.close()

  simulated(check())


def test_a_slow_answer_says_that_it_is_still_to_come(tmp_path, monkeypatch):
  monkeypatch.setattr(wire, 'BEAT_S', 0.5)
  monkeypatch.setattr(exploring, '_SILENCE_S', 2.0)

  async def check():
    async with Setting(tmp_path).running('a') as setting:
      until = asyncio.get_running_loop().time() + 3.0
      setting.engine.hold = lambda request: asyncio.get_running_loop().time() < until
      assert len(await setting.samples(setting.crew, make_tasks(1)[0])) == 3
      assert setting.crew.counts['lost'] == 0

  simulated(check())


def test_a_group_that_is_given_up_ends_in_its_explorer_and_at_the_engine(tmp_path):
  async def check():
    async with Setting(tmp_path, groups=1).running('a') as setting:
      setting.engine.hold = lambda request: len(setting.engine.requests) == 1
      first, second = make_tasks(2)
      with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
          await setting.samples(setting.crew, first)
      # Its only explorer is free again.
      assert len(await setting.samples(setting.crew, second)) == 3
      assert setting.engine.cancelled == 1

  simulated(check())


def test_nobody_gets_in_without_the_token(tmp_path):
  async def check():
    async with Setting(tmp_path).running('a') as setting:
      address = setting.crew.front
      for key in (None, 'another-token-0123456789'):
        link = Link(address, key=key, ca_file=None, name='stranger')
        with pytest.raises(UserError, match='refuses the token'):
          await link.call(wire.TAKE)
        await link.close()
      setting.come('guest', address, TOKEN)
      while setting.crew.explorers < 2:
        await asyncio.sleep(0.01)
      setting.explorers.pop('a').cancel()
      assert len(await setting.samples(setting.crew, make_tasks(1)[0])) == 3
      good = {'Authorization': f'Bearer {TOKEN}'}
      async with (
        aiohttp.ClientSession(headers=good) as session,
        session.post(f'{address}/inference/v1/generate') as response,
      ):
        assert response.status == 403, 'what a front of vLLM lets through is not for explorers'

  simulated(check())


ANONYMOUS = [pack({'name': name, 'secret': 's' * 32}) for name in ('', 'a\nb', 'a' * 200, 7)]


@pytest.mark.parametrize(
  'body', [b'', b'\xc1', b'\x81\xa4name', b'\x90', b'\x91' * 5000, pack({'name': 'a'}), *ANONYMOUS]
)
def test_a_malformed_message_is_refused_and_harms_nothing(tmp_path, body):
  async def check():
    async with Setting(tmp_path).running('a') as setting:
      connector = aiohttp.UnixConnector(setting.crew.address.removeprefix('unix:'))
      async with aiohttp.ClientSession(connector=connector) as session:
        for path in wire.PATHS:
          async with session.post(f'http://master{path}', data=body) as response:
            assert response.status == 400, path
      assert len(await setting.samples(setting.crew, make_tasks(1)[0])) == 3

  simulated(check())


def test_a_lease_that_was_lost_is_worth_nothing(tmp_path):
  async def check():
    async with Setting(tmp_path).running('a') as setting:
      link = Link(setting.crew.address, key=None, ca_file=None, name='late')
      for path in (wire.SAMPLE, wire.SCORE, wire.ASK, wire.FAILED, wire.GENERATE):
        with pytest.raises(Lost, match='lease 99 is no longer held'):
          await link.call(path, lease='99', steps=[], error='')
      assert await link.call(wire.ALIVE, leases=['99']) == ['99']
      await link.close()

  simulated(check())


def altered(sample, **fields):
  """The sample's bytes with other fields; a function gets the old value."""
  row = parse_msgpack(encode(sample))
  return pack(
    {
      **row,
      **{name: value(row[name]) if callable(value) else value for name, value in fields.items()},
    }
  )


BAD_SAMPLES = {
  'negative token': (
    lambda one: altered(one, tokens=lambda old: b'\xff' * 4 + old[4:]),
    'tokens has token -1, wanted 0',
  ),
  'long': (
    lambda one: encode(dataclasses.replace(one, **LONG)),
    '10000 tokens, wanted at most 16: rollout.max_prompt',
  ),
  'uid': (
    lambda one: altered(one, uid='another'),
    r'sample another of group grpo/\S+, wanted sample grpo/',
  ),
  'index': (lambda one: altered(one, sample_index=3), 'has index 3, wanted 0 to 2'),
  'version': (
    lambda one: encode(dataclasses.replace(one, segments=OLDER(one))),
    r"version 0\.9 of engine 'fake' generated noth",
  ),
  'no bytes': (lambda one: 'text', r'steps\[0\] is str, wanted bytes'),
}
LONG = {
  'tokens': np.zeros(10_000, np.int32),
  'role': np.zeros(10_000, np.uint8),
  'loss_mask': np.zeros(10_000, bool),
  'sampled': np.zeros(10_000, bool),
  'behaviour_logprobs': np.zeros(10_000, np.float32),
}


def OLDER(one):
  return tuple(dataclasses.replace(segment, version=Version(0, 9)) for segment in one.segments)


def test_a_text_that_fails_is_the_workflows_fault_and_no_explorers(tmp_path):
  def text(sample):
    raise ZeroDivisionError('by a bug')

  async def check():
    async with Setting(tmp_path, groups=1).running('a') as setting:
      setting.crew.text = text
      (task,) = make_tasks(1)
      with pytest.raises(
        RunError, match=r'^rollout.workflow: text of grpo/\S+: ZeroDivisionError: by a bug$'
      ):
        await setting.samples(setting.crew, task)
      assert setting.crew.explorers and not setting.crew.counts['evicted']

  simulated(check())


@pytest.mark.parametrize(('change', 'line'), BAD_SAMPLES.values(), ids=BAD_SAMPLES)
def test_an_explorer_whose_sample_is_none_is_evicted_and_another_gets_its_groups(
  tmp_path, caplog, change, line
):
  async def check():
    async with Setting(tmp_path, groups=1).running('a') as setting:
      reference = SingleTurn(setting.engine, setting.tokenizer, max_tokens=4)
      (task,) = make_tasks(1)
      await setting.dismiss('a')
      rogue = setting.link('rogue')
      wanted = asyncio.create_task(setting.samples(setting.crew, task))
      order = await rogue.call(wire.TAKE)
      good, bad, *_ = await setting.made(rogue, order)
      await rogue.call(wire.SAMPLE, lease=order['lease'], steps=[encode(good)])
      with pytest.raises(Evicted, match=line):
        await rogue.call(wire.SAMPLE, lease=order['lease'], steps=[change(bad)])
      for path in (wire.HELLO, wire.TAKE, wire.ALIVE, wire.SAMPLE, wire.FAILED):
        with pytest.raises(Evicted, match=line):
          await rogue.call(path, lease=order['lease'], leases=[], error='', steps=[encode(bad)])
      assert not setting.crew.explorers
      setting.come('b')
      assert await wanted == await setting.samples(reference, task)
      assert (setting.crew.counts['evicted'], setting.crew.counts['lost']) == (1, 1)
      (logged,) = [r.getMessage() for r in caplog.records if 'evicted' in r.getMessage()]
      assert re.search(f'explorers: {rogue.name} was evicted: /sample: .*{line}', logged), logged
      assert logged.endswith('; 1 groups go to others') and '\n' not in logged
      await rogue.close()

  simulated(check())


@pytest.mark.parametrize(
  'path', [wire.FAILED, wire.DONE, wire.SAMPLE, wire.GENERATE, wire.SCORE, wire.ASK]
)
def test_whoever_uses_the_lease_of_another_is_evicted_and_the_other_goes_on(tmp_path, path):
  async def check():
    async with Setting(tmp_path, groups=1).running('a') as setting:
      await setting.dismiss('a')
      honest, thief = setting.link('honest'), setting.link('thief')
      (task,) = make_tasks(1)
      wanted = asyncio.create_task(setting.samples(setting.crew, task))
      order = await honest.call(wire.TAKE)
      made = await setting.made(honest, order)
      with pytest.raises(
        Evicted, match=f'{thief.name} was evicted: {path}: used a lease of {honest.name}'
      ):
        await thief.call(path, lease=order['lease'], error='not mine', steps=[encode(made[0])])
      for sample in made:
        await honest.call(wire.SAMPLE, lease=order['lease'], steps=[encode(sample)])
      assert len(await wanted) == 3
      assert setting.crew.counts == {'evicted': 1}
      await asyncio.gather(honest.close(), thief.close())

  simulated(check())


def test_nobody_can_leave_in_the_name_of_another(tmp_path):
  async def check():
    async with Setting(tmp_path, groups=1).running('a') as setting:
      await setting.dismiss('a')
      honest, impostor = setting.link('honest'), setting.link('honest')
      wanted = asyncio.create_task(setting.samples(setting.crew, make_tasks(1)[0]))
      order = await honest.call(wire.TAKE)
      for name in ('honest', honest.name):
        await impostor.call(wire.LEAVE, name=name)
      for sample in await setting.made(honest, order):
        await honest.call(wire.SAMPLE, lease=order['lease'], steps=[encode(sample)])
      assert len(await wanted) == 3 and not any(setting.crew.counts.values())
      await asyncio.gather(honest.close(), impostor.close())

  simulated(check())


BAD_MESSAGES = [
  (wire.ALIVE, {}, 'leases is missing'),
  (wire.ALIVE, {'leases': [7]}, r'leases\[0\] is int, wanted str'),
  (wire.SAMPLE, {'lease': 7}, 'lease is int, wanted str'),
  (wire.SAMPLE, {'lease': None}, 'lease is NoneType, wanted str'),
  (wire.DONE, {'lease': {}}, 'lease is dict, wanted str'),
  (wire.FAILED, {'error': 7}, 'error is int, wanted str'),
  (wire.GENERATE, {'request': {}}, 'request: sampling is missing'),
  (
    wire.GENERATE,
    {'request': {**request_row(REQUEST), 'prompt': [-1]}},
    'prompt has token -1, wanted 0',
  ),
  (
    wire.GENERATE,
    {'request': {**request_row(REQUEST), 'samples': 10**9}},
    'samples is 1000000000, wanted 1 … 4096',
  ),
  (wire.SCORE, {'attempt': {'task': None}}, "attempt: task differs from the lease's task"),
  (
    wire.ASK,
    {'model': 'm', 'messages': [{'content': b''}], 'max_tokens': 1},
    'question: TypeError',
  ),
]


@pytest.mark.parametrize(('path', 'body', 'line'), BAD_MESSAGES)
def test_a_message_of_other_types_or_beyond_the_limits_evicts_its_sender_alone(
  tmp_path, path, body, line
):
  async def check():
    async with Setting(tmp_path, groups=1).running('a') as setting:
      await setting.dismiss('a')
      rogue = setting.link('rogue')
      wanted = asyncio.create_task(setting.samples(setting.crew, make_tasks(1)[0]))
      order = await rogue.call(wire.TAKE)
      with pytest.raises(Evicted, match=f'{rogue.name} was evicted: {path}: .*{line}'):
        await rogue.call(path, **{'lease': order['lease'], **body})
      setting.come('b')
      assert len(await wanted) == 3
      assert setting.crew.counts == {'evicted': 1, 'lost': 1}
      await rogue.close()

  simulated(check())


def test_an_explorer_that_is_evicted_ends_and_the_others_do_its_work(tmp_path):
  class Renaming(SingleTurn):
    async def run(self, task, visit, **how):
      async for sample, text in super().run(task, visit, **how):
        yield dataclasses.replace(sample, uid='x'), text

  async def check():
    def build(config, hub, tokenizer, most, *_):
      return Renaming(hub, tokenizer, max_tokens=most)

    async with Setting(tmp_path, build, groups=2).running('bad') as setting:
      wanted = [asyncio.create_task(setting.samples(setting.crew, task)) for task in make_tasks(3)]
      with pytest.raises(BaseExceptionGroup) as ended:
        await setting.explorers.pop('bad')
      assert ended.group_contains(Evicted, match=r'bad/\w+ was evicted: /sample: sample x')
      setting.build = lambda config, hub, tokenizer, most, *_: SingleTurn(
        hub, tokenizer, max_tokens=most
      )
      setting.come('good')
      assert [len(samples) for samples in await asyncio.gather(*wanted)] == [3, 3, 3]

  simulated(check())


def test_texts_are_decoded_from_the_tokens_outside_the_event_loop(tmp_path):
  threads = []

  async def check():
    setting = Setting(tmp_path)
    plain = setting.crew.text

    def text(sample):
      threads.append(threading.get_ident())
      return plain(sample).upper()

    setting.crew.text = text
    async with setting.running('a'):
      samples = await setting.samples(setting.crew, make_tasks(1)[0])
    assert all(text and text == text.upper() for _, text in samples.values())

  simulated(check())
  assert len(threads) == 3 and threading.get_ident() not in threads


def test_a_sample_that_is_read_after_its_lease_has_ended_is_no_reason_to_evict(tmp_path):
  """The completions of the group are then those of another lease."""
  goes_on, reading = threading.Event(), threading.Event()

  async def check():
    async with Setting(tmp_path, groups=1).running('a') as setting:
      await setting.dismiss('a')
      plain = setting.crew.text

      def text(sample):
        reading.set()
        assert goes_on.wait(30)
        return plain(sample)

      slow = setting.link('slow')
      wanted = asyncio.create_task(setting.samples(setting.crew, make_tasks(1)[0]))
      order = await slow.call(wire.TAKE)
      first, second, _ = await setting.made(slow, order)
      setting.crew.text = text

      def hand_in(sample):
        lease, steps = order['lease'], [encode(sample)]
        return asyncio.create_task(slow.call(wire.SAMPLE, lease=lease, steps=steps))

      handing_in = [hand_in(first)]
      while not reading.is_set():
        await asyncio.sleep(0)
      handing_in.append(hand_in(second))
      while not setting.crew._texts._work_queue.qsize():
        await asyncio.sleep(0)
      await setting.crew._leases.give_up(slow.name, 'was slow')
      setting.come('b')
      while not setting.crew._leases._lent:
        await asyncio.sleep(0)
      goes_on.set()
      for call in handing_in:
        with pytest.raises(Lost, match='is no longer held'):
          await call
      assert len(await wanted) == 3 and setting.crew.counts['evicted'] == 0
      await slow.close()

  asyncio.run(check())


def test_no_sample_is_checked_whose_lease_has_ended(tmp_path, monkeypatch):
  """An evicted explorer may have sent any number, and those of others would have to wait."""
  goes_on, evicted, checked = threading.Event(), threading.Event(), []
  read = crew.read_steps

  def read_steps(body, *rest):
    checked.append(body['lease'])
    assert (goes_on if len(checked) == 1 else evicted).wait(30)
    return read(body, *rest)

  monkeypatch.setattr(crew, 'read_steps', read_steps)

  async def check():
    async with Setting(tmp_path, groups=1).running('a') as setting:
      await setting.dismiss('a')
      rogue = setting.link('rogue')
      wanted = asyncio.create_task(setting.samples(setting.crew, make_tasks(1)[0]))
      order = await rogue.call(wire.TAKE)
      message = {'lease': order['lease'], 'steps': [b'not a sample']}
      calls = [asyncio.create_task(rogue.call(wire.SAMPLE, **message)) for _ in range(5)]
      while not checked or setting.crew._texts._work_queue.qsize() < 4:
        await asyncio.sleep(0)
      goes_on.set()
      while not setting.crew.counts['evicted']:
        await asyncio.sleep(0)
      evicted.set()
      await asyncio.gather(*calls, return_exceptions=True)
      assert len(checked) <= 2, 'the second was begun before the eviction'
      setting.come('b')
      assert len(await wanted) == 3
      await rogue.close()

  asyncio.run(check())


def test_a_run_to_which_no_explorer_comes_ends_with_a_line(tmp_path):
  async def check():
    setting = Setting(tmp_path, nobody_s=4 * crew._CHECK_S)
    with pytest.raises(
      WaitExpired, match='wait first_explorer: the run waited 1 s for an explorer to connect'
    ):
      async with setting.running():
        pass

  simulated(check())


def test_a_run_that_all_explorers_have_left_ends_with_a_line(tmp_path):
  async def check():
    async with Setting(tmp_path, nobody_s=1.0).running('a') as setting:
      await setting.dismiss('a')
      with pytest.raises(RunError, match='none connected for 1 s'):
        await setting.samples(setting.crew, make_tasks(1)[0])

  simulated(check())


@pytest.mark.full
def test_an_explorer_that_is_stopped_is_killed_and_the_one_started_in_its_place_does_its_groups(
  tmp_path,
):
  async def check():
    async with Setting(tmp_path, processes=1, listen=None).running() as setting:
      (first,) = setting.crew._leases.explorers
      (explorer,) = children_of(setting.crew._processes[0]._child.pid)
      explorer.suspend()
      assert len(await setting.samples(setting.crew, make_tasks(1)[0])) == 3
      assert not explorer.is_running() and first not in setting.crew._leases.explorers

  asyncio.run(check())


def test_an_explorer_ends_when_the_master_stays_away(tmp_path, monkeypatch):
  monkeypatch.setattr(exploring, '_PATIENCE_S', 0.2)

  async def check():
    link = Link(f'unix:{tmp_path}/nobody.sock', key=None, ca_file=None, name='a')
    with pytest.raises(RunError, match='the master has not answered for'):
      await explore(link, lambda *parts: None)

  simulated(check())


def test_configurations_that_nobody_could_work_for_are_refused():
  with pytest.raises(UserError, match='processes: 0, and no other explorer can connect'):
    ExplorersConfig(processes=0)
  with pytest.raises(UserError, match='groups 0'):
    ExplorersConfig(groups=0)
  with pytest.raises(UserError, match='silent_s 1'):
    ExplorersConfig(silent_s=1.0)


@pytest.mark.parametrize('address', ['10.0.0.5:8500', 'unix:master.sock', ''])
def test_an_address_that_is_none_is_refused_at_once(address):
  async def check():
    with pytest.raises(UserError, match='wanted http://HOST:PORT'):
      Link(address, key=None, ca_file=None, name='a')

  simulated(check())


@pytest.mark.parametrize('text', [None, 'no certificate'])
def test_a_ca_file_that_cannot_be_used_is_refused(tmp_path, text):
  async def check():
    if text is not None:
      (tmp_path / 'ca.pem').write_text(text)
    with pytest.raises(UserError, match='the certificates cannot be read'):
      Link('https://127.0.0.1:1', key=None, ca_file=str(tmp_path / 'ca.pem'), name='a')

  simulated(check())


@pytest.mark.full
def test_an_explorer_finds_the_modules_that_the_run_finds(tmp_path, monkeypatch):
  (tmp_path / 'own').mkdir()
  (tmp_path / 'own' / 'beside.py').write_text(
    'from jaxrl_llm.rollout.workflow import SingleTurn as Own'
  )
  monkeypatch.syspath_prepend(tmp_path / 'own')
  workflow = WorkflowConfig(kind='beside:Own')

  async def check():
    async with Setting(tmp_path, workflow=workflow, processes=1).running() as setting:
      assert len(await setting.samples(setting.crew, make_tasks(1)[0])) == 3

  asyncio.run(check())


def test_an_explorer_that_trains_on_narrowed_samples_is_evicted(tmp_path):
  async def check():
    async with Setting(tmp_path, groups=1).running('honest') as setting:
      wanted = await setting.samples(setting.crew, make_tasks(1)[0])
      await setting.dismiss('honest')
      making = asyncio.create_task(setting.samples(setting.crew, make_tasks(1)[0]))
      rogue = setting.link('rogue')
      order = await rogue.call(wire.TAKE)
      order['sampling']['top_p'] = 0.5
      first, *_ = await setting.made(rogue, order)
      with pytest.raises(Evicted, match='in loss_mask, but were drawn with another top_p'):
        steps = [encode(first)]
        await rogue.call(wire.SAMPLE, lease=order['lease'], steps=steps, verdict=None)
      await rogue.close()
      setting.come('honest')
      assert await making == wanted

  simulated(check())
