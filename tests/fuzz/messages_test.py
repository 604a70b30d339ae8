"""Messages to every server of ours, changed in every way: a clear status each, no traceback, and
the next is served.
"""

import asyncio
import base64
import collections
import contextlib
import dataclasses
import json
import os
import re
import struct

import aiohttp
import hostile
import msgpack
import numpy as np
import pytest
import yarl
from clocks import LOOP_CLOCK, SimulatedLoop
from crews import Setting
from exploring import make_tasks
from fake_vllm.backends import Scripted
from fake_vllm.server import FakeServer
from fronts import AUTHORISED, TOKEN, Upstream, config, request_bytes
from fuzzing import (
  COUNTS,
  bounded,
  check_line,
  damaged,
  encoded,
  fuzz,
  json_bytes,
  msgpack_bytes,
  one_of_each,
  quiet,
  state_of,
)
from hypothesis import strategies as st

from jaxrl_llm.app.serve.reward import application
from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.files import parse_msgpack
from jaxrl_llm.core.net import server as server_module
from jaxrl_llm.core.net.front import (
  ADAPTER_PATH,
  ROUTES,
  RPC_METHODS,
  RPC_PATH,
  UPDATE_PATH,
  VERIFY,
  Front,
)
from jaxrl_llm.core.net.tickets import TicketKeys
from jaxrl_llm.core.records.sample import encode
from jaxrl_llm.master.reward_model import Batcher
from jaxrl_llm.parallel.device import DeviceThread
from jaxrl_llm.rewards.api import Attempt
from jaxrl_llm.rewards.sandbox.isolation import NoIsolation
from jaxrl_llm.rewards.sandbox.sandbox import Case, Ending, Limits, Sandboxes, Work
from jaxrl_llm.rewards.sandbox.server import SandboxServer, order_body
from jaxrl_llm.rollout.api import Request, Sampling
from jaxrl_llm.rollout.explorers import wire
from jaxrl_llm.rollout.explorers.arrivals import read_delivery
from jaxrl_llm.rollout.explorers.errands import BadDelivery, Errands, RequestCourier
from jaxrl_llm.rollout.explorers.explorer import Rejected
from jaxrl_llm.rollout.explorers.leases import Misbehaved
from jaxrl_llm.rollout.explorers.wire import Delivery
from jaxrl_llm.rollout.signed_answer import SignedPart
from jaxrl_llm.rollout.vllm.publication import digest
from jaxrl_llm.rollout.vllm.ticket_office import SignedParts, TicketOffice

ANSWERED = (200, 400, 401, 403, 404, 405, 408, 409, 410, 411, 413, 414, 415, 417, 422, 431, 505)
"""Statuses that blame the client, and 200."""


class Services:
  """Servers that live in one event loop, which runs while somebody waits for it."""

  def __init__(self, loop_factory=None):
    self._runner = asyncio.Runner(loop_factory=loop_factory)
    self._open = contextlib.AsyncExitStack()

  def run(self, coroutine):
    async def patiently():
      with bounded():
        return await coroutine

    return self._runner.run(patiently())

  def enter(self, context):
    return self.run(self._open.enter_async_context(context))

  def close(self):
    self.run(self._open.aclose())
    self._runner.close()


@pytest.fixture
def services():
  made = Services()
  yield made
  made.close()


def check_answer(status, text, *, allowed=ANSWERED):
  assert status in allowed, (status, text[:400])
  if status != 200:
    check_line(text.strip())


class Client:
  """Posts bodies to a service on a unix socket or a port."""

  def __init__(self, address, headers=None):
    self._address, self._headers = address, headers

  async def __aenter__(self):
    path = self._address.removeprefix('unix:')
    # A connection each: a server may close one without having said so.
    connector = aiohttp.UnixConnector(path, force_close=True) if path != self._address else None
    self._base = 'http://service' if connector else self._address
    self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
    return self

  async def __aexit__(self, *_):
    await self._session.close()

  async def ask(self, method, path, data=None, headers=None, params=None):
    """(status, text)"""
    where = self._base + path
    async with self._session.request(
      method, where, data=data, headers=headers, params=params
    ) as response:
      return response.status, (await response.read()).decode(
        'utf-8' if response.status != 200 else 'latin1'
      )


TASK, *_ = make_tasks(1)
QUESTION = {
  'model': 'helper',
  'messages': [{'role': 'user', 'content': 'a'}],
  'max_tokens': 7,
  'temperature': 0.5,
}
SAMPLE = '@sample@'
"""Stands in a message for a sample that was drawn for the lease."""


def explorers_message(path, order, samples):
  """An honest message of whoever has this order, and has drawn these samples."""
  request = Request(
    uid='r',
    prompt=(1, 2),
    max_tokens=3,
    stop_ids=(0,),
    samples=2,
    key=(1, 2),
    sampling=Sampling(top_k=5),
  )
  name = f'{order["stage"]}/{TASK.uid}/{order["visit"]}'
  attempt = Attempt(
    uid=f'{name}/1', task=TASK, completion='ab', finish_reason='stop', response_len=2
  )
  fields = {
    wire.ALIVE: {'leases': [order['lease'], 'another']},
    wire.DELIVER: {'lease': order['lease'], **Delivery('n', b'answer', b'signature')._asdict()},
    wire.SAMPLE: {'lease': order['lease'], 'steps': [encode(samples[0])]},
    wire.DONE: {'lease': order['lease']},
    wire.FAILED: {'lease': order['lease'], 'error': 'ValueError: it failed'},
    wire.GENERATE: {'lease': order['lease'], 'request': wire.request_row(request)},
    wire.SCORE: {
      'lease': order['lease'],
      'attempt': {**wire.attempt_row(attempt), 'task': order['task']},
    },
    wire.ASK: {'lease': order['lease'], **QUESTION},
  }
  return fields.get(path, {})


@COUNTS
def test_no_message_of_an_explorer_harms_another(tmp_path, monkeypatch, count):
  for module in ('crew', 'leases'):
    monkeypatch.setattr(f'jaxrl_llm.rollout.explorers.{module}.time', LOOP_CLOCK)
  services = Services(SimulatedLoop)

  async def start():
    setting = Setting(tmp_path, groups=1, silent_s=1e6, nobody_s=1e9)
    started = asyncio.create_task(setting.crew.start())
    while not setting.crew.address:
      await asyncio.sleep(0)
    first = setting.link('first')
    await first.call(wire.ALIVE, leases=[])
    await started
    return setting, first, await Client(setting.crew.address).__aenter__()

  def check(path, data):
    async def begin():
      wanted = asyncio.create_task(setting.samples(setting.crew, TASK))
      rogue = setting.link('rogue')  # With another secret each time.
      order = await rogue.call(wire.TAKE)
      return (
        wanted,
        rogue,
        order,
        sorted(await setting.made(rogue, order), key=lambda sample: sample.sample_index),
      )

    async def end(wanted, rogue, body):
      """The rogue's message, then the group's end at the hands of an honest explorer, if it is
      still wanted.
      """
      answer = await client.ask('POST', path, body)
      with contextlib.suppress(RunError):
        await rogue.call(wire.LEAVE)
      await rogue.close()
      taking = asyncio.create_task(honest.call(wire.TAKE))
      await asyncio.wait({wanted, taking}, return_when=asyncio.FIRST_COMPLETED)
      order = await taking if not wanted.done() else None
      if order:
        # One of the samples has come from the other, and was good.
        with contextlib.suppress(Rejected):
          for sample in await setting.made(honest, order):
            await honest.call(wire.SAMPLE, lease=order['lease'], steps=[encode(sample)])
          await honest.call(wire.DONE, lease=order['lease'])
      else:
        await asyncio.wait({taking})
      return answer, (await asyncio.gather(wanted, return_exceptions=True))[0]

    with quiet() as log:
      wanted, rogue, order, samples = services.run(begin())
      message = {**rogue.sender, **explorers_message(path, order, samples)}
      if path == wire.SAMPLE and data.draw(st.integers(0, 3)):
        (step,) = message['steps']
        message['steps'] = [data.draw(encoded(parse_msgpack(step), msgpack_bytes))]
        body = msgpack_bytes(message)
      else:
        body = data.draw(encoded(message, msgpack_bytes))
      (status, text), found = services.run(end(wanted, rogue, body))
    log.check()
    if status == 200:
      frames = msgpack.Unpacker()
      frames.feed(text.encode('latin1'))
      assert [*frames]
    else:
      check_answer(status, text, allowed=(400, 409, 410, 422))
    if isinstance(found, Exception):  # Only what a workflow may say ends a group.
      assert isinstance(found, RunError) and path in (wire.FAILED, wire.DONE), found
      check_line(str(found))
    else:
      assert len(found) == 3

  try:
    setting, honest, client = services.run(start())
    fuzz(check, count, path=st.sampled_from(wire.PATHS), data=st.data())
    services.run(honest.close())
    services.run(client.__aexit__())
    services.run(setting.crew.close())
  finally:
    services.close()


@COUNTS
def test_no_altered_delivery_is_accepted(count):
  """Whatever an explorer changes of signed parts, their signatures, order or errand."""
  keys, tokens = TicketKeys(TOKEN), np.arange(3, dtype=np.int32)
  begin = SignedPart(tokens=tokens, logprobs=np.zeros(3, np.float32)).encode()
  end = dataclasses.replace(SignedPart.decode(begin), finish='stop', spans=[('a', 0, 6)]).encode()
  office = TicketOffice('http://127.0.0.1:1', TOKEN, name='a', call=None, answers=None)
  how = {
    'read': lambda part, known, begun: part,
    'is_known': lambda: True,
    'arrived': lambda begun: None,
  }
  errand, _ = office.errand('0' * 32, b'body', 60.0, **how)
  ticket = keys.read(errand.authorization.encode())
  signing = keys.chain(ticket)
  signed = tuple((signing.sign(part), part) for part in (begin, end))
  honest = Delivery(ticket.nonce, parts=signed)
  accepted = 0

  async def deliver(data):
    nonlocal accepted
    parts = SignedParts(keys.chain(ticket), name='a', **how)
    body = data.draw(encoded(honest._asdict(), msgpack_bytes))
    errands = Errands(collections.Counter())
    courier = RequestCourier(errands, lambda errand: None, asyncio.get_running_loop())
    fetching = courier.fetch(dataclasses.replace(errand, parts=parts))
    waiting = asyncio.create_task(fetching)
    await asyncio.sleep(0)
    try:
      delivery = read_delivery(parse_msgpack(body))
      await errands.deliver(delivery)
    except (Misbehaved, BadDelivery) as error:
      check_line(str(error))
    except (ValueError, TypeError):
      pass  # The crew refuses what is not msgpack, or not a map.
    else:
      await asyncio.sleep(0)
      if errands.counts['direct_delivered']:
        accepted += 1
        assert (delivery.first, delivery.parts[:2]) == (0, signed)
        assert (await waiting).tokens.tolist() == [*tokens, *tokens]
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

  fuzz(lambda data: asyncio.run(deliver(data)), count, data=st.data())
  assert accepted, 'some of them are as they were'


class Lengths:
  """Stands in for a reward model."""

  max_length, sequences = 64, 8

  def __call__(self, sequences):
    return [float(len(sequence)) for sequence in sequences]


@COUNTS
def test_the_reward_service_answers_every_message(services, listen_to, tokenizer, count):
  device = DeviceThread()
  batcher = Batcher(Lengths(), device)

  async def start():
    return asyncio.create_task(batcher.run())

  running = services.run(start())
  client = listen_to(application(batcher, tokenizer, max_length=Lengths.max_length))
  good = json_bytes({'prompt': 'ab', 'completion': 'c'})
  wanted = services.run(client.ask('POST', '/', good))
  assert wanted[0] == 200
  messages = (
    {'prompt': 'ab', 'completion': 'cd', 'truth': None, 'fields': {'a': [1]}},
    {
      'prompt': [{'role': 'system', 'content': 'a'}, {'role': 'user', 'content': 'b'}],
      'completion': 'cab',
    },
  )

  def check(path, body):
    with quiet() as log:
      check_answer(*services.run(client.ask('POST', path, body)), allowed=(200, 400))
    log.check()
    assert services.run(client.ask('POST', '/', good)) == wanted

  fuzz(check, count, path=st.sampled_from(['/', '/score']), body=one_of_each(messages))

  async def stop():
    running.cancel()

  services.run(stop())
  device.close()


@pytest.fixture
def listen_to(services):
  """Serves an application on a unix socket; gives a client of it."""

  def serve(served):
    from jaxrl_llm.core.net.listener import listening

    address, _ = services.enter(listening(served, name='fuzzed', front=None, routes=()))
    return services.enter(Client(address))

  return serve


@COUNTS
def test_the_sandbox_host_answers_every_message(services, listen_to, count):
  try:
    server = SandboxServer(at_once=2)
  except NoIsolation as error:
    hostile.skip_where_this_machine_forbids(error)
  limits = Limits(wall_s=10.0, cpu_s=1)
  works = (
    Work(
      program='def f(x): return x + 1',
      tests=('assert f(1) == 2', 'assert f(2) == 3'),
      entry_point='f',
    ),
    Work(program='print(int(input()) + 1)', cases=(Case(stdin='1', stdout='2'),)),
  )
  orders = [order_body(work, limits) for work in works]
  try:
    client = listen_to(server.application())

    def passes(order):
      status, text = services.run(client.ask('POST', '/run', json_bytes(order)))
      return status == 200 and json.loads(text)['ended'] == 'passed'

    def check(body):
      with quiet() as log:
        check_answer(*services.run(client.ask('POST', '/run', body)), allowed=(200, 400))
      log.check()

    fuzz(check, count, body=one_of_each(orders))
    assert all(map(passes, orders))
  finally:
    server.close()


REPLIES = (
  {
    'value': {
      'f': {'ref': 0, 'class': 'function'},
      'g': {'ref': 1, 'class': 'type', 'raises': ['ValueError']},
    }
  },
  {'value': {'ref': 0, 'class': 'function'}},
  {'value': 3, 'changed': {'0': [1, 2]}},
  {'value': {'make': 'range', 'of': [0, 9, 1]}},
  {'value': {'make': 'datetime', 'of': [2024, 1, 2, 3, 4, 5, 6]}},
  {'value': {'dict': [['a', {'tuple': [1, {'set': [2]}]}]]}},
  {'value': {'int': '0xff'}},
  {'value': {'yours': 0}},
  {'value': {'ref': 2, 'class': 'module', 'module': 'math'}},
  {'raised': ['KeyError', 'LookupError', 'Exception', 'BaseException'], 'text': 'x', 'lines': 'y'},
  {'absent': True},
  {'do': 'call', 'of': 0, 'args': [1]},
)
"""Honest answers of a program's process to that of its tests; the last asks something itself."""
SPEAKING = """
import base64, os, stat
for number in range(3, 64):
  try:
    if stat.S_ISSOCK(os.fstat(number).st_mode): os.write(number, base64.b64decode(REPLIES))
  except OSError: pass
def f(x): return x + 1
def g(x): return [x]
"""


@st.composite
def framed(draw):
  """A few replies, one after the other; now and then their lengths are wrong."""
  parts = []
  for place in draw(st.lists(st.sampled_from(range(len(REPLIES))), min_size=1, max_size=4)):
    body = draw(encoded(REPLIES[place])) if draw(st.booleans()) else json_bytes(REPLIES[place])
    length = draw(st.sampled_from([len(body)] * 9 + [0, 1, len(body) + 1, (1 << 32) - 1]))
    parts.append(struct.pack('!I', length) + body)
  return b''.join(parts)


@COUNTS
def test_the_process_of_the_tests_survives_what_a_program_answers(count):
  """Its socket is the program's only way to the tests: nothing on it passes a test that fails, or
  ends the sandbox.
  """
  try:
    sandboxes = Sandboxes(Limits(wall_s=10.0, cpu_s=2, memory_mib=512))
  except NoIsolation as error:
    hostile.skip_where_this_machine_forbids(error)
  tests = ('assert f(2) == g(3)[0] and g(1) == [1]', 'assert f is not g', 'assert False')

  def check(replies, then):
    program = SPEAKING.replace('REPLIES', repr(base64.b64encode(replies))) + then
    with bounded():
      outcome = sandboxes.run_tests(program, tests, 'f')
    assert outcome.ended is not Ending.PASSED and outcome.passed < 3
    assert len(outcome.detail) <= 500

  with contextlib.closing(sandboxes):
    fuzz(check, count, replies=framed(), then=st.sampled_from(['', 'os._exit(0)']))
    assert (
      sandboxes.run_tests('def f(x): return x + 1', ['assert f(2) == 3'], 'f').ended
      is Ending.PASSED
    )


HELD = {'embed': np.arange(8, dtype=np.float32).reshape(4, 2), 'norm': np.ones(2, np.float32)}
"""What a server has loaded."""
GENERATE = '/inference/v1/generate'
GOOD = {
  'token_ids': [5, 6],
  'sampling_params': {'max_tokens': 3, 'temperature': 1.0, 'seed': 7, 'logprobs': 0},
}
WORKER = 'Call to collective_rpc method failed: '
"""How a server begins to say what its worker refused."""


def publication(folder):
  from safetensors.numpy import save_file

  tensors = {name: array * np.float32(2) for name, array in HELD.items()}
  save_file(tensors, folder / 'model.safetensors')
  return {
    'directory': str(folder),
    'files': {'model.safetensors': {name: digest(array) for name, array in tensors.items()}},
  }


@COUNTS
def test_the_fake_server_answers_every_message(services, tmp_path, count):
  """Also the protocol by which weights are published: a worker's refusal is its own status, 500, as
  on vLLM.
  """
  (tmp_path / 'published').mkdir()
  info = publication(tmp_path / 'published')
  before = state_of(tmp_path / 'published')
  whole = (tmp_path / 'published' / 'model.safetensors').read_bytes()

  def answer(prompt, params, index):
    count = params.max_tokens
    return [5] * count, [-1.0] * count

  # A token beyond the vocabulary ends the engine core, as on vLLM.
  server = FakeServer(Scripted(answer, HELD), max_model_len=64, vocab_size=10**10_000)
  services.run(server.start(uds=str(tmp_path / 'socket')))
  client = services.enter(Client(f'unix:{tmp_path}/socket'))
  bodies = {
    GENERATE: {**GOOD, 'model': 'policy', 'request_id': 'r', 'return_token_ids': True},
    '/pause': {},
    '/resume': {},
    '/abort_requests': {'request_ids': ['r']},
    '/init_weight_transfer_engine': {'init_info': {}},
    '/start_weight_update': {},
    '/update_weights': {'update_info': info},
    '/finish_weight_update': {'weight_version': '0.1'},
    '/update_weight_version': {'new_version': '0.2'},
    '/collective_rpc': {'method': 'jaxrl_digests'},
  }
  json_type = {'Content-Type': 'application/json'}

  async def ask(path, body, mode):
    if path in ('/update_weights', '/finish_weight_update'):
      await client.ask('POST', '/start_weight_update')
    params = {'mode': mode} if path == '/pause' else None
    said = await client.ask('POST', path, body, json_type, params)
    await client.ask('POST', '/finish_weight_update', b'{}')
    await client.ask('POST', '/resume')
    return said, await client.ask('POST', GENERATE, json_bytes(GOOD), json_type)

  def check(path, mode, data):
    file = (
      data.draw(damaged(whole)) if path == '/update_weights' and data.draw(st.booleans()) else whole
    )
    (tmp_path / 'published' / 'model.safetensors').write_bytes(file)
    body = data.draw(encoded(bodies[path]))
    with quiet() as log:
      (status, text), (after, _) = services.run(ask(path, body, mode))
    log.check()
    if status == 500:
      assert json.loads(text)['error']['message'].startswith(WORKER), text
    else:
      check_answer(status, text)
    assert after == 200 and not server._core.dead
    assert {
      name: (array.shape, array.dtype) for name, array in server._core.backend.tensors.items()
    } == {name: (array.shape, array.dtype) for name, array in HELD.items()}

  try:
    fuzz(
      check,
      count,
      path=st.sampled_from([*bodies, GENERATE, '/update_weights']),
      mode=st.sampled_from(['abort', 'wait', 'keep', '', '\0', 'x' * 300]),
      data=st.data(),
    )
    (tmp_path / 'published' / 'model.safetensors').write_bytes(whole)
    assert state_of(tmp_path / 'published') == before
  finally:
    services.run(server.close())


def guarded(services, tmp_path, **options):
  """(upstream, front) whose upstream answers what it is told."""
  upstream = services.enter(Upstream().running(tmp_path))
  return upstream, services.enter(
    Front(config(tmp_path), upstream=upstream.addresses['unix'], **options)
  )


@COUNTS
def test_the_front_passes_on_only_what_it_has_looked_through(services, tmp_path, count):
  """Bodies that name files stay below the folder of publications, whatever else is in them."""
  root = tmp_path / 'published'
  (root / 'v1').mkdir(parents=True)
  (root / 'v1' / 'model.safetensors').write_bytes(b'')
  (root / 'out').symlink_to(tmp_path)
  upstream, front = guarded(services, tmp_path, publish_roots=[str(root)])
  client = services.enter(Client(front.address, {'Authorization': f'Bearer {TOKEN}'}))
  bodies = {
    RPC_PATH: {
      'method': VERIFY,
      'args': [{'directory': str(root / 'v1'), 'files': {'model.safetensors': {'a': '0'}}}],
    },
    UPDATE_PATH: {
      'update_info': {'directory': str(root / 'v1'), 'files': {'model.safetensors': {'a': '0'}}}
    },
    ADAPTER_PATH: {'lora_name': 'a', 'lora_path': str(root / 'v1'), 'load_inplace': True},
  }

  places = (
    root / 'v1',
    root / 'out',
    root / '..',
    root / 'v1/../..',
    root / 'v1/../out/x',
    root,
    '/etc',
    'v1',
    '',
  )

  def check(path, data):
    del upstream.seen[:]
    place = str(data.draw(st.sampled_from(places)))
    named = json.loads(json.dumps(bodies[path]).replace(str(root / 'v1'), place))
    body = data.draw(st.one_of(st.just(json_bytes(named)), encoded(named)))
    with quiet() as log:
      status, text = services.run(client.ask('POST', path, body))
    log.check()
    check_answer(status, text)
    assert (status == 200) == bool(upstream.seen)
    if status == 200:
      passed = json.loads(json.loads(text)['body'])
      if path == RPC_PATH:
        assert passed['method'] in RPC_METHODS
        if passed['method'] == VERIFY:
          assert os.path.realpath(passed['args'][0]['directory']).startswith(f'{root}/')
      else:
        directory = (
          passed['update_info']['directory'] if path == UPDATE_PATH else passed['lora_path']
        )
        assert os.path.realpath(directory).startswith(f'{root}/')

  fuzz(check, count, path=st.sampled_from([*bodies]), data=st.data())


HEADERS = (
  'Host: x',
  'Connection: close',
  'Expect: 100-continue',
  'Content-Type: application/json',
  'Content-Encoding: gzip',
  'Upgrade: websocket',
  'Transfer-Encoding: chunked',
  'Transfer-Encoding: gzip, chunked',
  'Content-Length: 2',
  'Content-Length: -1',
  'Content-Length: 99999999999999999999',
  'Content-Length: 0x2',
  'Content-Length : 2',
  'X: ' + 'y' * 20_000,
  'Authorization: Bearer wrong',
  'Cookie: a=b',
  ': nameless',
  'no colon',
  ' folded',
  'X: \x00',
)
PATHS = (
  *{path for _, path in ROUTES},
  '/',
  '*',
  '//',
  '/v1/../pause',
  '/%2e',
  '/pause?mode=keep',
  '/pause?\x7f',
  'http://x',
)
METHODS = ('GET', 'POST', 'PUT', 'HEAD', 'OPTIONS', 'CONNECT', 'get', 'G T', '', 'X' * 300, 'PRI')
BODIES = (
  b'',
  b'{}',
  b'2\r\n{}\r\n0\r\n\r\n',
  b'fffffffffffffffff\r\n',
  b'-1\r\n\r\n',
  b'2;a=b\r\n{}\r\n0\r\nX: y\r\n\r\n',
)


@st.composite
def wire_bytes(draw):
  """Bytes that a client may send; now and then they are HTTP."""
  lines = draw(st.lists(st.sampled_from(HEADERS), max_size=4))
  if draw(st.booleans()):
    lines.insert(draw(st.integers(0, len(lines))), AUTHORISED)
  method, path, body = (draw(st.sampled_from(some)) for some in (METHODS, PATHS, BODIES))
  data = request_bytes(method, path, *lines) + body
  data = draw(damaged(data)) if draw(st.integers(0, 3)) == 0 else data
  return data * draw(st.sampled_from([1, 1, 1, 2]))


@COUNTS
def test_the_front_survives_what_is_not_http(services, tmp_path, monkeypatch, count):
  """Whatever is sent, half of it included: nothing that is no request reaches the server behind."""
  monkeypatch.setattr(server_module, '_KEEPALIVE_S', 0.2)
  upstream, front = guarded(services, tmp_path)
  url = yarl.URL(front.address)

  async def exchange(data):
    """Statuses and bodies of all answers. Those to half a request are not waited for."""
    reader, writer = await asyncio.open_connection(url.host, url.port)
    answers = []
    try:
      writer.write(data)
      with contextlib.suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError):
        async with asyncio.timeout(0.05):
          while True:
            head = (await reader.readuntil(b'\r\n\r\n')).decode()
            sizes = re.findall(r'content-length: (\d+)', head.lower())
            status = int(head.split()[1])
            answers.append(
              (
                status,
                await reader.readexactly(int(sizes[0]))
                if sizes and 'HEAD' not in str(data)
                else b'',
              )
            )
    finally:
      writer.close()
    return answers

  async def healthy():
    good = {'Authorization': f'Bearer {TOKEN}'}
    async with (
      aiohttp.ClientSession(headers=good) as session,
      session.get(f'{front.address}/health') as response,
    ):
      return response.status

  trusted = [False]

  def check(data):
    del upstream.seen[:]
    trusted.append(TOKEN.encode() in data)
    with quiet() as log:
      answers = services.run(exchange(data))
      log.check()
    for status, body in answers:
      assert status in (100, *ANSWERED), (status, body)
      if status >= 400 and body:
        check_line(json.loads(body)['error']['message'])
    # A request may arrive behind after its client has hung up.
    assert any(trusted[-2:]) or not upstream.seen
    assert {(method, path.partition('?')[0]) for method, path, _ in upstream.seen} <= {*ROUTES}
    assert services.run(healthy()) == 200

  fuzz(check, count, data=wire_bytes())
