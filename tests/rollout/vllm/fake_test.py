"""The fake vLLM server: what was recorded from a real one, over a real socket, and every fault as
it says.
"""

import asyncio
import contextlib
import functools
import json
import math
import os
import signal
import subprocess
import sys

import aiohttp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clocks import simulated
from fake_vllm import Drawn, FakeServer, Fault, Faults, Latency, Sampled, Scripted
from paths import SUPPORT
from safetensors.numpy import save_file

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.core.types import Version
from jaxrl_llm.models.api import build_model
from jaxrl_llm.models.families import tiny
from jaxrl_llm.rollout.embedded.engine import EmbeddedConfig
from jaxrl_llm.rollout.embedded.sampling import draw, row_key
from jaxrl_llm.rollout.vllm.publication import FILE, PublicationFolder, digest
from jaxrl_llm.weights.hf import export

VOCAB, LENGTH, EOS = 40, 40, 1
# Wide kernels: logits that are far from uniform, so that other weights or another position show.
SPEC = tiny(
  'qwen3', VOCAB, hidden_size=32, intermediate_size=48, num_attention_heads=2, initializer_range=0.3
)
MODEL = build_model(SPEC)
V1, V2 = Version(0, 1), Version(0, 2)
GENERATE = '/inference/v1/generate'
HELD = {'embed': np.arange(8, dtype=np.float32).reshape(4, 2), 'norm': np.ones(2, np.float32)}
"""What a scripted server has loaded."""


@functools.cache
def params_of(version: Version):
  return jax.device_get(jax.jit(MODEL.init)(jax.random.key(version.step)))


class Client:
  """Asks a server, and gives (status, JSON or text)."""

  def __init__(self, uds, key=None):
    headers = {'Authorization': f'Bearer {key}'} if key else {}
    # A connection per request: a worker's error ends one without warning.
    connector = aiohttp.UnixConnector(str(uds), limit=0, force_close=True)
    self.session = aiohttp.ClientSession(connector=connector, headers=headers)

  async def ask(self, method, path, body=None, **params):
    async with self.session.request(
      method, f'http://server{path}', json=body, params=params
    ) as response:
      text = await response.text()
      return response.status, json.loads(
        text
      ) if response.content_type == 'application/json' else text

  async def get(self, path):
    status, answer = await self.ask('GET', path)
    assert status == 200, answer
    return answer

  async def post(self, path, body=None, **params):
    status, answer = await self.ask('POST', path, body, **params)
    assert status == 200, answer
    return answer

  async def generate(self, prompt, **params):
    return await self.post(GENERATE, asking(prompt, **params))

  async def load(self, directory, files, label=None):
    """The status of the update itself."""
    await self.post('/start_weight_update', {})
    info = {'update_info': {'directory': str(directory), 'files': files}}
    status, answer = await self.ask('POST', '/update_weights', info)
    if status == 200:
      await self.post('/finish_weight_update', {} if label is None else {'weight_version': label})
    return status, answer

  async def digests(self):
    return (await self.post('/collective_rpc', {'method': 'jaxrl_digests'}))['results'][0]


def asking(prompt, name='r1', **params):
  params = {
    'max_tokens': 8,
    'temperature': 1.0,
    'seed': 7,
    'logprobs': 0,
    'detokenize': False,
    **params,
  }
  return {'request_id': name, 'token_ids': list(prompt), 'sampling_params': params}


async def until(reached):
  async with asyncio.timeout(60):
    while not reached():
      await asyncio.sleep(0.002)


@pytest.fixture(scope='module')
def runner():
  with asyncio.Runner() as runner:
    yield runner


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return PublicationFolder(tmp_path_factory.mktemp('shm') / 'weights', SPEC, dtype='float32')


@pytest.fixture(scope='module')
def published(folder):
  return {
    version: folder.write(version, flatten(params_of(version)).items()) for version in (V1, V2)
  }


def sampled():
  config = EmbeddedConfig(
    slots=4, prefill_rows=2, prefill_buckets=(LENGTH,), decode_steps=4, max_stop_ids=4
  )
  backend = Sampled(SPEC, config=config, piece=4)
  return FakeServer(
    backend, max_model_len=LENGTH, vocab_size=VOCAB, eos_ids=(EOS,), root='/models/tiny'
  )


@pytest.fixture(scope='module')
def opened(runner, tmp_path_factory):
  """A server with a model, and its client; compiled once for all tests."""

  async def start():
    server, uds = sampled(), tmp_path_factory.mktemp('s') / 'v.sock'
    assert await server.start(uds=str(uds)) == f'unix:{uds}'
    return server, Client(uds)

  server, client = runner.run(start())
  first = runner.run(client.digests())
  yield server, client, first
  runner.run(client.session.close())
  runner.run(server.close())


@pytest.fixture
def model(runner, opened, published):
  """(server, client), on version 1, whatever the test before did."""
  server, client, _ = opened
  server.faults.stall_at = None
  assert runner.run(client.load(published[V1].directory, published[V1].files, str(V1)))[0] == 200
  return server, client


@jax.jit
def full_logits(params, tokens):
  tokens = tokens[None]
  hidden = MODEL.apply(params, tokens, jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens))
  return (hidden @ MODEL.head_kernel(params).T)[0]


def log_softmax(logits):
  top = logits.max(-1, keepdims=True)
  return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def logprobs_of(params, tokens, temperature=1.0):
  """Whole distributions: row t is that of tokens[t + 1], by the trainer's forward."""
  padded = np.zeros(LENGTH, np.int32)
  padded[: len(tokens)] = tokens
  return log_softmax(
    np.asarray(full_logits(params, padded), np.float64)[: len(tokens) - 1] / temperature
  )


def given_logprobs(choice):
  rows = choice['logprobs']['content']
  assert [row['token_id'] for row in rows] == choice['token_ids']
  assert all(
    row['top_logprobs'] == [{k: row[k] for k in ('token_id', 'logprob', 'rank')}] for row in rows
  )
  return np.array([row['logprob'] for row in rows])


def assert_drawn_by(params, prompt, choice, temperature=1.0, part=slice(None)):
  rows = logprobs_of(params, [*prompt, *choice['token_ids']], temperature)[len(prompt) - 1 :]
  wanted = rows[np.arange(len(rows)), choice['token_ids']]
  np.testing.assert_allclose(given_logprobs(choice)[part], wanted[part], atol=2e-5)


@pytest.mark.full
def test_what_is_loaded_is_what_was_published(runner, opened, published):
  _, client, first = opened

  async def main():
    for version, publication in published.items():
      await client.post('/init_weight_transfer_engine', {'init_info': {}})
      assert await client.load(publication.directory, publication.files) == (
        200,
        {'message': 'Weights updated'},
      )
      assert await client.digests() == publication.digests != first
      await client.post('/update_weight_version', {'new_version': str(version)})
      assert await client.get('/weight_info') == {'weight_version': str(version)}
      choice = (await client.generate([5, 6, 7], ignore_eos=True))['choices'][0]
      assert choice['weight_versions'] == [{'version': str(version), 'start': 0, 'end': 8}]
      assert_drawn_by(params_of(version), [5, 6, 7], choice)

  assert first.keys() == published[V1].digests.keys() and not set(first.values()) & set(
    published[V1].digests.values()
  )
  runner.run(main())


def test_the_worker_tells_names_shapes_and_dtypes(runner, model, published):
  (worker,) = runner.run(model[1].post('/collective_rpc', {'method': 'jaxrl_weights'}))['results']
  assert worker['tensors'].keys() == published[V1].digests.keys()
  assert worker['tensors']['model.embed_tokens.weight'] == {
    'shape': [VOCAB, 32],
    'dtype': 'float32',
    'slice': None,
  }
  assert (worker['threads'], worker['device']) == (1, 'cpu')


def corrupted(publication, published):
  data = bytearray((publication.directory / FILE).read_bytes())
  data[-100] ^= 1
  return bytes(data), publication.files


def truncated(publication, published):
  data = (publication.directory / FILE).read_bytes()
  return data[: len(data) * 2 // 3], publication.files


def other_version(publication, published):
  return (published[V1].directory / FILE).read_bytes(), publication.files


def one_less_announced(publication, published):
  files = {FILE: dict(list(publication.files[FILE].items())[1:])}
  return (publication.directory / FILE).read_bytes(), files


def nothing_announced(publication, published):
  return (publication.directory / FILE).read_bytes(), {}


@pytest.mark.parametrize(
  'spoil', [corrupted, truncated, other_version, one_less_announced, nothing_announced]
)
def test_a_bad_publication_changes_nothing(runner, model, published, tmp_path, spoil):
  _, client = model
  data, files = spoil(published[V2], published)
  (tmp_path / FILE).write_bytes(data)

  async def main():
    before = (await client.generate([5, 6]))['choices']
    status, answer = await client.load(tmp_path, files)
    assert status == 500 and answer['error']['type'] == 'InternalServerError'
    assert answer['error']['message'].startswith(
      'Call to collective_rpc method failed: Worker failed with error '
    )
    assert str(tmp_path) not in answer['error']['message']  # vLLM takes paths out of its messages.
    assert await client.get('/health') == ''
    assert await client.digests() == published[V1].digests
    assert (await client.generate([5, 6]))['choices'] == before
    # The session ended with the error: the next one begins with a start.
    status, _ = await client.ask('POST', '/finish_weight_update', {})
    assert status == 500
    assert await client.load(published[V2].directory, published[V2].files) == (
      200,
      {'message': 'Weights updated'},
    )
    assert await client.digests() == published[V2].digests

  runner.run(main())


def test_tensors_of_another_dtype_are_refused(runner, model, published, tmp_path):
  _, client = model
  other = PublicationFolder(tmp_path / 'half', SPEC, dtype='bfloat16').write(
    V2, flatten(params_of(V2)).items()
  )
  status, answer = runner.run(client.load(other.directory, other.files))
  assert (
    status == 500
    and 'published as (40, 32) torch.bfloat16, the model has (40, 32) torch.float32' in str(answer)
  )
  assert runner.run(client.digests()) == published[V1].digests


@pytest.mark.parametrize('temperature', [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_the_models_own_forward(runner, model, temperature):
  prompt = [5, 6, 7, 8, 9]
  n = 1 if temperature == 0 else 3
  answer = runner.run(
    model[1].generate(prompt, n=n, max_tokens=20, ignore_eos=True, temperature=temperature)
  )
  assert [choice['index'] for choice in answer['choices']] == list(range(n))
  for choice in answer['choices']:
    assert_drawn_by(params_of(V1), prompt, choice, temperature or 1.0)
    assert (choice['finish_reason'], choice['stop_reason'], len(choice['token_ids'])) == (
      'length',
      None,
      20,
    )
  if temperature == 0:
    whole = logprobs_of(params_of(V1), prompt + choice['token_ids'])[len(prompt) - 1 :]
    assert choice['token_ids'] == whole.argmax(-1).tolist()


def test_tokens_are_the_draws_of_their_counters_whatever_the_pieces(runner, model):
  prompt, seed = [5, 6, 7], 2**40 + 3
  for choice in runner.run(
    model[1].generate(prompt, seed=seed, n=2, max_tokens=18, ignore_eos=True)
  )['choices']:
    words = (seed + choice['index']) % 2**32, (seed + choice['index']) >> 32
    key, tokens = row_key(seed=0, words=words, sample_index=0), list(prompt)
    for _ in range(18):
      row = np.asarray(
        full_logits(params_of(V1), np.array(tokens + [0] * (LENGTH - len(tokens)), np.int32))
      )
      drawn = jax.jit(draw)(
        row[[len(tokens) - 1]], key[None], np.array([len(tokens)]), np.ones(1, np.float32)
      )
      tokens.append(int(drawn.tokens[0]))
    assert choice['token_ids'] == tokens[len(prompt) :]


def test_prompt_logprobs_and_ranks_are_at_temperature_1(runner, model):
  prompt = [5, 30, 7, 22, 9]
  answer = runner.run(
    model[1].generate(prompt, temperature=0.0, prompt_logprobs=0, max_tokens=1, logprobs=None)
  )
  first, *rows = answer['prompt_logprobs']
  wanted = logprobs_of(params_of(V1), prompt)
  assert first is None and len(rows) == 4 and answer['choices'][0]['logprobs'] is None
  for row, token, distribution in zip(rows, prompt[1:], wanted, strict=True):
    assert row.keys() == {str(token)} and row[str(token)]['decoded_token'] is None
    assert row[str(token)]['logprob'] == pytest.approx(distribution[token], abs=2e-5)
    assert row[str(token)]['rank'] == (distribution >= distribution[token]).sum()


def test_filters_are_honoured_and_logprobs_are_of_what_is_left(runner, model):
  prompt, params = (
    [5, 6, 7],
    {'temperature': 0.7, 'top_k': 5, 'top_p': 0.8, 'max_tokens': 30, 'ignore_eos': True},
  )
  (choice,) = runner.run(model[1].generate(prompt, **params))['choices']
  rows = logprobs_of(params_of(V1), prompt + choice['token_ids'], 0.7)[len(prompt) - 1 :]
  for row, token, given in zip(rows, choice['token_ids'], given_logprobs(choice), strict=True):
    order = np.argsort(-row)[:5]
    kept = np.exp(row[order]) / np.exp(row[order]).sum()
    kept = kept[: int((kept.cumsum() < 0.8).sum()) + 1]
    place = order.tolist().index(token)
    assert given == pytest.approx(np.log(kept[place] / kept.sum()), abs=1e-4)
  unfiltered = runner.run(model[1].generate(prompt, **params | {'top_k': 0, 'top_p': 1.0}))[
    'choices'
  ][0]
  assert unfiltered['token_ids'] != choice['token_ids']


def test_sample_i_is_the_first_of_the_seed_plus_i(runner, model):
  async def main():
    together = (await model[1].generate([5, 6], n=4, seed=3))['choices']
    alone = [(await model[1].generate([5, 6], seed=3 + i))['choices'][0] for i in range(4)]
    assert [c['token_ids'] for c in together] == [c['token_ids'] for c in alone]
    assert len({tuple(c['token_ids']) for c in together}) == 4
    free = [
      (await model[1].generate([5, 6], seed=None, max_tokens=30))['choices'][0]['token_ids']
      for _ in range(2)
    ]
    assert free[0] != free[1]

  runner.run(main())


def test_stop_tokens_end_a_completion_and_belong_to_it(runner, model):
  async def main():
    free = (await model[1].generate([5], n=16, max_tokens=30, ignore_eos=True))['choices']
    ended = (await model[1].generate([5], n=16, max_tokens=30))['choices']
    assert any(EOS in choice['token_ids'] for choice in free)
    for whole, choice in zip(free, ended, strict=True):
      tokens = whole['token_ids']
      cut = tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens
      assert choice['token_ids'] == cut
      reason = ('stop', EOS) if EOS in tokens else ('length', None)
      assert (choice['finish_reason'], choice['stop_reason']) == reason
    stop = free[0]['token_ids'][9]
    at = free[0]['token_ids'].index(stop)
    (own,) = (await model[1].generate([5], max_tokens=30, ignore_eos=True, stop_token_ids=[stop]))[
      'choices'
    ]
    assert own['token_ids'] == free[0]['token_ids'][: at + 1] and own['stop_reason'] == stop

  runner.run(main())


def test_a_request_that_spans_an_update_has_two_versions(runner, model, published):
  server, client = model
  prompt = [5, 6, 7]

  async def main():
    whole = (await client.generate(prompt, max_tokens=20, ignore_eos=True))['choices'][0]
    server.faults.stall_at = 8
    drawn = server.tokens
    task = asyncio.create_task(client.generate(prompt, max_tokens=20, ignore_eos=True))
    await until(lambda: server.tokens == drawn + 8)
    await client.post('/pause', mode='keep')
    assert await client.get('/is_paused') == {'is_paused': True}
    assert (await client.load(published[V2].directory, published[V2].files))[0] == 200
    await client.post('/update_weight_version', {'new_version': str(V2)})
    assert await client.post('/reset_prefix_cache', reset_running_requests='true') == {
      'success': True
    }
    server.faults.stall_at = None
    await client.post('/resume')
    (choice,) = (await task)['choices']
    return whole, choice

  whole, choice = runner.run(main())
  assert choice['weight_versions'] == [
    {'version': '0.1', 'start': 0, 'end': 8},
    {'version': '0.2', 'start': 8, 'end': 20},
  ]
  assert (
    choice['token_ids'][:8] == whole['token_ids'][:8] and choice['token_ids'] != whole['token_ids']
  )
  assert_drawn_by(params_of(V1), prompt, choice, part=slice(0, 8))
  assert_drawn_by(params_of(V2), prompt, choice, part=slice(8, 20))


def test_an_update_without_a_pause_is_between_two_tokens(runner, model, published):
  server, client = model

  async def main():
    server.faults.stall_at = 4
    drawn = server.tokens
    task = asyncio.create_task(client.generate([5], max_tokens=20, ignore_eos=True))
    await until(lambda: server.tokens == drawn + 4)
    assert (await client.load(published[V2].directory, published[V2].files, '0.2'))[0] == 200
    server.faults.stall_at = None
    return (await task)['choices'][0]

  choice = runner.run(main())
  assert [(s['version'], s['start'], s['end']) for s in choice['weight_versions']] == [
    ('0.1', 0, 4),
    ('0.2', 4, 20),
  ]
  assert_drawn_by(params_of(V2), [5], choice, part=slice(4, 20))


def test_a_client_that_goes_frees_what_it_held(runner, model):
  server, client = model

  async def main():
    server.faults.stall_at = 1
    tasks = [asyncio.create_task(client.generate([5], n=4)) for _ in range(3)]
    await until(lambda: server.running == 12)
    for task in tasks:
      task.cancel()
    await until(lambda: server.running == 0)
    server.faults.stall_at = None
    assert 'vllm:num_requests_running{engine="0",model_name="policy"} 0.0' in await client.get(
      '/metrics'
    )
    assert len((await client.generate([5], n=4))['choices']) == 4

  runner.run(main())


def script(prompt, params, index):
  """Counts up from the prompt's last token."""
  tokens = [(prompt[-1] + 1 + i) % VOCAB for i in range(params.max_tokens)]
  return tokens, [-0.5 - index] * len(tokens)


@contextlib.asynccontextmanager
async def served(backend, tmp_path, *, key=None, **options):
  """(server, client)"""
  options = {'max_model_len': LENGTH, 'vocab_size': VOCAB, 'eos_ids': (EOS,), **options}
  server, uds = FakeServer(backend, api_key=key, **options), tmp_path / 'v.sock'
  await server.start(uds=str(uds))
  client = Client(uds, key)
  try:
    yield server, client
  finally:
    await client.session.close()
    await server.close()


def scripted(tmp_path, answer=script, *, score=None, **options):
  return served(Scripted(answer, HELD, score=score), tmp_path, **options)


def publish(directory, scale):
  """Writes HELD times `scale`; the files with their digests."""
  directory.mkdir()
  tensors = {name: array * np.float32(scale) for name, array in HELD.items()}
  save_file(tensors, directory / FILE)
  return {FILE: {name: digest(array) for name, array in tensors.items()}}


def test_answers_have_the_recorded_form(tmp_path):
  async def main():
    async with scripted(tmp_path) as (server, client):
      assert await client.get('/health') == ''
      assert await client.get('/version') == {'version': '0.32.0'}
      assert await client.get('/weight_info') == {'weight_version': 'default'}
      assert await client.get('/is_paused') == {'is_paused': False}
      assert await client.get('/load') == {'server_load': 0}
      (listed,) = (await client.get('/v1/models'))['data']
      assert (listed['id'], listed['owned_by'], listed['max_model_len']) == (
        'policy',
        'vllm',
        LENGTH,
      )
      answer = await client.generate([5, 6], n=2, max_tokens=3, prompt_logprobs=0)
      metrics = await client.get('/metrics')
      return answer, metrics, server

  answer, metrics, server = asyncio.run(main())
  assert answer.pop('created') > 0
  content = [
    {
      'token_id': t,
      'logprob': -1.5,
      'rank': None,
      'top_logprobs': [{'token_id': t, 'logprob': -1.5, 'rank': None}],
    }
    for t in (7, 8, 9)
  ]
  second = {
    'index': 1,
    'finish_reason': 'length',
    'stop_reason': None,
    'token_ids': [7, 8, 9],
    'routed_experts': None,
    'sampling_mask': None,
    'weight_versions': [{'version': 'default', 'start': 0, 'end': 3}],
    'logprobs': {'content': content},
  }
  assert answer.pop('choices')[1] == second
  assert answer == {
    'request_id': 'generate-tokens-r1',
    'model': 'policy',
    'usage': {
      'prompt_tokens': 2,
      'total_tokens': 8,
      'completion_tokens': 6,
      'prompt_tokens_details': None,
      'completion_tokens_details': None,
    },
    'prompt_logprobs': [None, {'6': {'logprob': -1.0, 'rank': 1, 'decoded_token': None}}],
    'prompt_token_id_logprobs': None,
    'prompt_token_ids': None,
    'mm_placeholders': None,
    'metrics': None,
    'kv_transfer_params': None,
    'ec_transfer_params': None,
    'output_mode': 'tokens',
  }
  assert 'vllm:generation_tokens_total{engine="0",model_name="policy"} 6.0' in metrics
  assert (
    'vllm:request_success_total{engine="0",finished_reason="length",model_name="policy"} 2.0'
    in metrics
  )
  assert server.requests[GENERATE] == 1 and server.tokens == 6 and server.finished == {'length': 2}
  assert server.generate_bodies[0]['token_ids'] == [5, 6]


def test_a_stream_has_the_recorded_form(tmp_path):
  """`tests/jobs/vllm_test.py` compares the names in an event with those of a real server."""

  async def main():
    async with scripted(tmp_path) as (_, client):
      params = {'max_tokens': 3, 'logprobs': 0, 'stream_interval': 2}
      body = {'token_ids': [5, 6], 'stream': True, 'request_id': 'r1', 'sampling_params': params}
      return await client.post(GENERATE, body)

  *events, rest = asyncio.run(main()).split('\n\n')
  assert events.pop() == 'data: [DONE]' and not rest
  events = [json.loads(event.removeprefix('data: ')) for event in events]
  (first,) = events[0].pop('choices')
  assert events[0] == {
    'request_id': 'generate-tokens-r1',
    'usage': None,
    'output_mode': 'tokens',
  }
  row = {'token_id': 7, 'logprob': -0.5, 'rank': None}
  assert first == {
    'index': 0,
    'finish_reason': None,
    'stop_reason': None,
    'token_ids': [7],
    'routed_experts': None,
    'sampling_mask': None,
    'weight_versions': None,
    'logprobs': {'content': [{**row, 'top_logprobs': [row]}]},
  }
  (last,) = events[-1]['choices']
  assert len(events) == 2 and last['token_ids'] == [8, 9], 'the last token comes with the end'
  assert last['finish_reason'] == 'length'
  assert last['weight_versions'] == [{'version': 'default', 'start': 0, 'end': 3}]


@pytest.mark.parametrize(
  ('prompt', 'params', 'message'),
  [
    (
      [5] * 40,
      {},
      'The decoder prompt (length 40) plus the number of requested output tokens (at least 1) is '
      'longer',
    ),
    ([5] * 41, {}, 'The decoder prompt (length 41) is longer than the maximum model length of 40'),
    ([5, -1], {}, 'validation error'),
    ([], {}, 'validation error'),
    ([5], {'n': 2, 'temperature': 0.0}, 'n must be 1 when using greedy sampling, got 2.'),
    ([5], {'max_tokens': 0}, 'max_tokens must be at least 1, got 0.'),
    ([5], {'temperature': -1.0}, 'temperature must be non-negative, got -1.0.'),
    ([5], {'temperature': 2.5}, 'temperature must be in [0, 2], got 2.5.'),
    ([5], {'top_p': 0.0}, 'top_p must be in (0, 1], got 0.0.'),
    ([5], {'top_k': -2}, 'top_k must be 0 (disable), or at least 1, got -2.'),
    ([5], {'n': 0}, 'n must be at least 1, got 0.'),
    ([5], {'n': 200}, "n must be at most the server's max_num_seqs (128), got 200."),
    (
      [5],
      {'stop_token_ids': [99]},
      'token_id(s) [99] in stop_token_ids contain out-of-vocab token ids',
    ),
    ([5], {'logprobs': 3}, 'logprobs of the tokens alone'),
    ([5], {'max_tokens': '8'}, 'body.sampling_params.max_tokens'),
    ([5], {'temperature': [1]}, 'body.sampling_params.temperature'),
    ([5], {'temperature': math.nan}, 'temperature must be non-negative, got nan.'),
    ([5], {'seed': 1 << 64}, 'seed must have 64 bits'),
    ([5], {'n': True}, 'body.sampling_params.n'),
    ([5], {'stop_token_ids': ['5']}, 'body.sampling_params.stop_token_ids'),
    ([5], {'stop_token_ids': 5}, 'body.sampling_params.stop_token_ids'),
    ([5], {'min_p': 0.1}, "knows no sampling parameter 'min_p'"),
  ],
)
def test_requests_that_a_server_refuses(tmp_path, prompt, params, message):
  async def main():
    async with scripted(tmp_path) as (server, client):
      status, answer = await client.ask('POST', GENERATE, asking(prompt, **params))
      assert (
        status == 400 and answer['error']['code'] == 400 and message in answer['error']['message']
      )
      assert not server.generate_bodies and server.tokens == 0
      assert (await client.generate([5]))['choices'][0]['finish_reason'] == 'length'

  asyncio.run(main())


@pytest.mark.parametrize(
  ('path', 'body'),
  [
    (GENERATE, b'[' * 9999),
    (GENERATE, b'\xff'),
    (GENERATE, {'token_ids': 5, 'sampling_params': {}}),
    ('/abort_requests', []),
    ('/abort_requests', {'request_ids': 7}),
    ('/update_weights', {'update_info': True}),
    ('/update_weight_version', {'new_version': [1]}),
    ('/finish_weight_update', {'weight_version': 7}),
  ],
)
def test_a_body_of_another_form_is_refused_without_a_traceback(tmp_path, caplog, path, body):
  async def main():
    async with scripted(tmp_path) as (_, client):
      await client.post('/start_weight_update', {})
      data = body if isinstance(body, bytes) else json.dumps(body).encode()
      how = {'data': data, 'headers': {'Content-Type': 'application/json'}}
      async with client.session.post(f'http://server{path}', **how) as response:
        assert response.status == 400, await response.text()
      assert (await client.generate([5]))['choices'][0]['finish_reason'] == 'length'

  asyncio.run(main())
  assert not [record for record in caplog.records if record.exc_info]


def test_files_that_are_none_are_the_workers_error(tmp_path, caplog):
  async def main():
    async with scripted(tmp_path) as (_, client):
      for info in (
        {'files': [], 'directory': 'x'},
        {'files': {'a': 3}, 'directory': 'x'},
        {'files': {}, 'directory': 7},
      ):
        await client.post('/start_weight_update', {})
        status, answer = await client.ask('POST', '/update_weights', {'update_info': info})
        assert (
          status == 500 and 'update_info: wanted directory as text' in answer['error']['message']
        )

  asyncio.run(main())
  assert not [record for record in caplog.records if record.exc_info]


def test_other_things_that_a_server_refuses(tmp_path):
  async def main():
    async with scripted(tmp_path) as (server, client):
      assert await client.ask('GET', '/nothing') == (404, {'detail': 'Not Found'})
      assert await client.ask('GET', '/pause') == (405, {'detail': 'Method Not Allowed'})
      assert (await client.ask('POST', '/pause', mode='bad'))[0] == 400
      assert not server.paused
      assert (await client.ask('POST', GENERATE, {'token_ids': [5]}))[0] == 400
      assert (await client.ask('POST', GENERATE, {**asking([5]), 'model': 'other'}))[0] == 404
      assert (await client.ask('POST', '/collective_rpc', {}))[0] == 400
      assert (await client.ask('POST', '/update_weight_version', {}))[0] == 400
      status, answer = await client.ask('POST', '/collective_rpc', {'method': 'nope'})
      assert (
        status == 500 and "'CPUWorker' object has no attribute 'nope'" in answer['error']['message']
      )

  asyncio.run(main())


def test_a_completion_ends_where_the_longest_sequence_does(tmp_path):
  async def main():
    async with scripted(tmp_path) as (_, client):
      for params in ({'max_tokens': 100}, {'max_tokens': None}):
        (choice,) = (await client.generate([2, 3], ignore_eos=True, **params))['choices']
        assert len(choice['token_ids']) == LENGTH - 2 and choice['finish_reason'] == 'length'

  asyncio.run(main())


def test_a_script_that_ends_without_a_reason_is_an_error(tmp_path):
  async def main():
    async with scripted(tmp_path, lambda *_: ([5, 6], [-1.0, -1.0])) as (_, client):
      status, answer = await client.ask('POST', GENERATE, asking([5]))
      assert status == 500 and 'ended after 2 of 8 tokens' in answer['error']['message']
      assert (await client.generate([5], stop_token_ids=[6]))['choices'][0]['stop_reason'] == 6

  asyncio.run(main())


def test_updates_have_a_beginning_and_an_end(tmp_path):
  files = publish(tmp_path / '1', 2)
  info = {'update_info': {'directory': str(tmp_path / '1'), 'files': files}}

  async def main():
    async with scripted(tmp_path) as (_, client):
      before = await client.digests()
      assert (await client.ask('POST', '/update_weights', info))[0] == 500
      assert (await client.ask('POST', '/finish_weight_update', {}))[0] == 500
      assert (
        await client.digests() == before == {name: digest(array) for name, array in HELD.items()}
      )
      assert await client.post('/start_weight_update', {}) == {'message': 'Weight update started'}
      assert (await client.ask('POST', '/start_weight_update', {}))[0] == 500
      assert await client.post('/update_weights', info) == {'message': 'Weights updated'}
      assert await client.post('/finish_weight_update', {}) == {'message': 'Weight update finished'}
      assert await client.digests() == files[FILE]
      assert await client.get('/weight_info') == {'weight_version': 'default'}
      assert await client.post('/update_weight_version', {'new_version': '0.3'}) == {
        'success': True,
        'new_version': '0.3',
      }

  asyncio.run(main())


def test_a_workers_error_ends_the_connection_unannounced(tmp_path):
  async def main():
    async with scripted(tmp_path):
      reader, writer = await asyncio.open_unix_connection(str(tmp_path / 'v.sock'))
      writer.write(b'POST /finish_weight_update HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n')
      answer = await asyncio.wait_for(reader.read(), 60)
      writer.close()
      return answer.lower()

  answer = asyncio.run(main())
  assert (
    answer.startswith(b'http/1.1 500')
    and answer.endswith(b'}')
    and b'connection: close' not in answer
  )


class Slow(Scripted):
  """Loads when told to, and draws four tokens when told to: two with what was loaded before, two
  with what is now.
  """

  def __init__(self):
    super().__init__(script, HELD)
    self.may_load, self.may_draw, self.begun = asyncio.Event(), asyncio.Event(), asyncio.Event()

  async def load(self, tensors):
    self.begun.set()
    await self.may_load.wait()
    await super().load(tensors)

  async def draw(self, prompt, params, index):
    before = self.generation
    self.begun.set()
    await self.may_draw.wait()
    yield Drawn([6, 7, 8, 9], [-1.0] * 4, [before] * 2 + [self.generation] * 2)


def test_a_command_is_carried_out_though_its_client_has_gone(tmp_path):
  files = publish(tmp_path / '1', 2)

  async def main():
    backend = Slow()
    async with served(backend, tmp_path) as (_, client):
      task = asyncio.create_task(client.load(tmp_path / '1', files))
      await backend.begun.wait()
      task.cancel()
      await asyncio.wait({task})
      assert await client.digests() != files[FILE]
      backend.may_load.set()
      await until(lambda: backend.generation == 1)
      assert await client.digests() == files[FILE]
      await client.post('/finish_weight_update', {})

  asyncio.run(main())


def test_tokens_keep_the_label_of_the_weights_that_drew_them(tmp_path):
  files = publish(tmp_path / '1', 2)

  async def main():
    backend = Slow()
    backend.may_load.set()
    async with served(backend, tmp_path) as (_, client):
      for before, label in (('default', '0.2'), ('0.2', '0.3')):
        for event in (backend.begun, backend.may_draw):
          event.clear()
        task = asyncio.create_task(client.generate([5], max_tokens=4))
        await backend.begun.wait()
        assert (await client.load(tmp_path / '1', files))[0] == 200
        await client.post('/update_weight_version', {'new_version': label})
        backend.may_draw.set()
        spans = (await task)['choices'][0]['weight_versions']
        assert spans == [
          {'version': before, 'start': 0, 'end': 2},
          {'version': label, 'start': 2, 'end': 4},
        ]

  asyncio.run(main())


def test_keep_holds_running_and_new_requests(tmp_path):
  async def main():
    async with scripted(tmp_path, faults=Faults(stall_at=3)) as (server, client):
      old = asyncio.create_task(client.generate([5], name='old'))
      await until(lambda: server.tokens == 3)
      assert await client.post('/pause', mode='keep') == {'status': 'paused'}
      new = asyncio.create_task(client.generate([9], name='new'))
      await until(lambda: server.running == 2)
      server.faults.stall_at = None
      for _ in range(5):  # Whatever could go on has had its turn.
        assert await client.get('/is_paused') == {'is_paused': True}
      assert server.tokens == 3 and not old.done() and not new.done()
      assert 'vllm:num_requests_waiting{engine="0",model_name="policy"} 1.0' in await client.get(
        '/metrics'
      )
      assert await client.post('/resume') == {'status': 'resumed'}
      assert (await old)['choices'][0]['token_ids'] == list(range(6, 14))
      assert (await new)['choices'][0]['token_ids'] == list(range(10, 18))

  asyncio.run(main())


def test_abort_gives_the_tokens_so_far(tmp_path):
  async def main():
    async with scripted(tmp_path, faults=Faults(stall_at=3)) as (server, client):
      old = asyncio.create_task(client.generate([5], n=2))
      await until(lambda: server.tokens == 6)
      await client.post('/pause', mode='abort')
      for choice in (await old)['choices']:
        assert (choice['finish_reason'], choice['stop_reason'], choice['token_ids']) == (
          'abort',
          None,
          [6, 7, 8],
        )
        assert choice['weight_versions'] == [{'version': 'default', 'start': 0, 'end': 3}]
        assert len(choice['logprobs']['content']) == 3
      new = asyncio.create_task(client.generate([5]))
      await until(lambda: server.running == 1)
      await client.post('/pause', mode='abort')
      (choice,) = (await new)['choices']
      assert (choice['finish_reason'], choice['token_ids'], choice['weight_versions']) == (
        'abort',
        [],
        [],
      )
      assert server.finished == {'abort': 3}

  asyncio.run(main())


def test_wait_lets_running_requests_end(tmp_path):
  async def main():
    async with scripted(tmp_path, faults=Faults(stall_at=3)) as (server, client):
      old = asyncio.create_task(client.generate([5]))
      await until(lambda: server.tokens == 3)
      pause = asyncio.create_task(client.post('/pause', mode='wait'))
      await until(lambda: server.paused)
      new = asyncio.create_task(client.generate([9]))
      await until(lambda: server.running == 2)
      assert not pause.done()
      server.faults.stall_at = None
      await pause
      assert server.finished == {'length': 1} and server.tokens == 8
      assert (await old)['choices'][0]['finish_reason'] == 'length'
      assert not new.done()
      await client.post('/resume')
      assert len((await new)['choices'][0]['token_ids']) == 8

  asyncio.run(main())


def test_requests_are_aborted_by_the_id_that_the_server_gave(tmp_path):
  async def main():
    async with scripted(tmp_path, faults=Faults(stall_at=3)) as (server, client):
      tasks = [asyncio.create_task(client.generate([5], name=name)) for name in ('a', 'b', 'c')]
      await until(lambda: server.tokens == 9)
      assert await client.post('/abort_requests', {'request_ids': ['a']}) == {
        'status': 'aborted',
        'aborted': 1,
      }
      await client.post('/abort_requests', {'request_ids': ['generate-tokens-b']})
      await asyncio.wait({tasks[1]})
      assert server.running == 2
      assert await client.post('/abort_requests', {}) == {'status': 'aborted', 'aborted': 2}
      assert [(await task)['choices'][0]['finish_reason'] for task in tasks] == ['abort'] * 3

  asyncio.run(main())


def test_the_key_is_wanted_on_two_kinds_of_paths_only(tmp_path):
  async def main():
    async with scripted(tmp_path, key='secret') as (server, client):
      stranger = Client(tmp_path / 'v.sock', 'guess')
      assert await stranger.ask('POST', GENERATE, asking([5])) == (401, {'error': 'Unauthorized'})
      assert await stranger.ask('GET', '/v1/models') == (401, {'error': 'Unauthorized'})
      for path in ('/health', '/is_paused', '/metrics', '/weight_info'):
        assert (await stranger.ask('GET', path))[0] == 200
      assert (await stranger.ask('POST', '/pause', mode='keep'))[0] == 200
      await client.post('/resume')
      assert (await client.generate([5]))['choices'] and server.tokens == 8
      await stranger.session.close()

  asyncio.run(main())


def test_it_also_serves_at_a_port():
  async def main():
    server = FakeServer(Scripted(script, HELD), max_model_len=LENGTH, vocab_size=VOCAB)
    address = await server.start()
    assert address.startswith('http://127.0.0.1:')
    async with aiohttp.ClientSession() as session, session.get(f'{address}/version') as response:
      assert await response.json() == {'version': '0.32.0'}
    await server.close()

  asyncio.run(main())


def test_a_place_that_cannot_be_had_is_one_line(tmp_path):
  async def main():
    server = FakeServer(Scripted(script, HELD), max_model_len=LENGTH, vocab_size=VOCAB)
    with pytest.raises(UserError, match='cannot listen'):
      await server.start(uds=str(tmp_path / 'none' / 'v.sock'))

  asyncio.run(main())


async def refuses(uds):
  """Until nobody listens any more."""
  async with asyncio.timeout(60):
    while True:
      try:
        _, writer = await asyncio.open_unix_connection(str(uds))
      except OSError:
        return
      writer.close()
      await asyncio.sleep(0.01)


def test_a_token_out_of_vocabulary_ends_the_engine_core(tmp_path):
  """As on a server without a tokenizer; requests under way get its error, and soon nobody
  listens.
  """

  async def main():
    async with scripted(tmp_path, faults=Faults(stall_at=3)) as (server, client):
      running = asyncio.create_task(client.ask('POST', GENERATE, asking([5])))
      await until(lambda: server.tokens == 3)
      for status, answer in (await client.ask('POST', GENERATE, asking([5, VOCAB])), await running):
        assert status == 500 and answer['error']['message'].startswith(
          'EngineCore encountered an issue.'
        )
      await refuses(tmp_path / 'v.sock')
      assert server.ended.is_set()

  simulated(main())


@pytest.mark.parametrize(
  ('fault', 'status'), [(Fault.INTERNAL_ERROR, 500), (Fault.UNAVAILABLE, 503)]
)
def test_errors_come_after_so_many_requests_and_so_often(tmp_path, fault, status):
  async def main():
    async with scripted(tmp_path, faults=Faults(fault=fault, after=2, times=3)) as (server, client):
      found = [(await client.ask('POST', GENERATE, asking([5])))[0] for _ in range(7)]
      assert found == [200, 200, status, status, status, 200, 200]
      assert server.requests[GENERATE] == 7 and len(server.generate_bodies) == 4
      server.faults.times = None
      assert (await client.ask('POST', GENERATE, asking([5])))[0] == status
      server.faults.path = '/health'
      assert (await client.ask('GET', '/health'))[0] == status
      assert (await client.ask('POST', GENERATE, asking([5])))[0] == 200

  asyncio.run(main())


def test_hang_answers_never(tmp_path):
  async def main():
    async with scripted(tmp_path, faults=Faults(fault=Fault.HANG, times=1)) as (server, client):
      hung = asyncio.create_task(client.generate([5]))
      await until(lambda: server.requests[GENERATE] == 1)
      assert (await client.generate([5]))['choices'] and await client.get('/health') == ''
      assert not hung.done() and server.running == 0
      await server.die()
      with pytest.raises(aiohttp.ClientError):
        await hung

  asyncio.run(main())


def test_cut_ends_in_the_middle_of_the_body(tmp_path):
  async def main():
    async with scripted(tmp_path, faults=Faults(fault=Fault.CUT, times=1)) as (_, client):
      async with client.session.post(f'http://server{GENERATE}', json=asking([5])) as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
          await response.read()
      assert (await client.generate([5]))['choices']

  asyncio.run(main())


def test_abort_ends_completions_half_way(tmp_path):
  async def main():
    async with scripted(tmp_path, faults=Faults(fault=Fault.ABORT, times=1)) as (_, client):
      (choice,) = (await client.generate([5]))['choices']
      assert (choice['finish_reason'], choice['token_ids']) == ('abort', [6, 7, 8, 9])
      assert choice['weight_versions'] == [{'version': 'default', 'start': 0, 'end': 4}]
      assert len(choice['logprobs']['content']) == 4
      assert (await client.generate([5]))['choices'][0]['finish_reason'] == 'length'

  asyncio.run(main())


def test_delay_holds_a_request_back(tmp_path):
  async def main():
    async with scripted(tmp_path, faults=Faults(fault=Fault.DELAY, times=1, delay_s=1e6)) as (
      server,
      client,
    ):
      held = asyncio.create_task(client.generate([5]))
      await until(lambda: server.requests[GENERATE] == 1)
      assert (await client.generate([9]))['choices'][0]['token_ids'][0] == 10
      assert not held.done() and server.tokens == 8
      held.cancel()
      server.faults.times, server.faults.delay_s = 1, 1e-3
      assert (await client.generate([5]))['choices'][0]['token_ids'][0] == 6

  asyncio.run(main())


def test_die_breaks_everything_off(tmp_path):
  async def main():
    async with scripted(tmp_path, faults=Faults(stall_at=3)) as (server, client):
      running = asyncio.create_task(client.generate([5]))
      await until(lambda: server.tokens == 3)
      server.faults.fault = Fault.DIE
      for asked in (client.generate([5]), running):
        with pytest.raises(aiohttp.ClientError):
          await asked
      with pytest.raises(aiohttp.ClientError):
        await client.get('/health')
      assert server.ended.is_set() and os.path.exists(tmp_path / 'v.sock')
      await until(lambda: server.running == 0)

  asyncio.run(main())


def test_core_answers_errors_and_is_gone(tmp_path):
  async def main():
    async with scripted(tmp_path, faults=Faults(fault=Fault.CORE, after=1)) as (_, client):
      assert (await client.generate([5]))['choices']
      status, answer = await client.ask('POST', GENERATE, asking([5]))
      assert status == 500 and answer['error']['message'].startswith(
        'EngineCore encountered an issue.'
      )
      assert (await client.ask('GET', '/health'))[0] == 503
      await refuses(tmp_path / 'v.sock')

  simulated(main())


def test_a_stale_tensor_shows_in_the_digests_alone(tmp_path):
  files = publish(tmp_path / '1', 2)

  async def main():
    async with scripted(tmp_path, faults=Faults(stale='embed')) as (server, client):
      assert (await client.load(tmp_path / '1', files, '0.1'))[0] == 200
      found = await client.digests()
      assert found == {'embed': digest(HELD['embed']), 'norm': files[FILE]['norm']}
      server.faults.stale = None
      assert (await client.load(tmp_path / '1', files, '0.1'))[0] == 200
      assert await client.digests() == files[FILE]

  asyncio.run(main())


def test_a_stale_tensor_is_also_what_the_model_computes_with(runner, model, published):
  server, client = model
  name = 'model.embed_tokens.weight'

  async def main():
    server.faults.stale = name
    try:
      assert (await client.load(published[V2].directory, published[V2].files))[0] == 200
    finally:
      server.faults.stale = None
    found = await client.digests()
    assert {other for other in found if found[other] != published[V2].digests[other]} == {name}
    return (await client.generate([5, 6], ignore_eos=True))['choices'][0]

  choice = runner.run(main())
  assert_drawn_by({**params_of(V2), 'embed': params_of(V1)['embed']}, [5, 6], choice)


def test_prompt_logprobs_can_be_wrong(tmp_path):
  def score(tokens, held):
    return [-held['norm'][0] * token for token in tokens[1:]]

  async def main():
    async with scripted(tmp_path, score=score) as (server, client):
      for shift in (0.0, 0.25):
        server.faults.prompt_logprob_shift = shift
        rows = (await client.generate([5, 2, 3], prompt_logprobs=0))['prompt_logprobs']
        assert [row[token]['logprob'] for row, token in zip(rows[1:], '23')] == [
          -2 + shift,
          -3 + shift,
        ]

  asyncio.run(main())


def test_death_in_an_update(tmp_path):
  files = publish(tmp_path / '1', 2)

  async def main():
    async with scripted(tmp_path, faults=Faults(die_in_update=True)) as (server, client):
      with pytest.raises(aiohttp.ClientError):
        await client.load(tmp_path / '1', files)
      assert server.ended.is_set()
      await refuses(tmp_path / 'v.sock')

  asyncio.run(main())


def test_latency_is_a_function_of_its_seed_and_the_request(tmp_path):
  latency = Latency(median_s=2.0, sigma=0.8, seed=5)
  found = [[latency.seconds(seed, index) for index in range(4)] for seed in range(500)]
  assert found == [
    [Latency(median_s=2.0, sigma=0.8, seed=5).seconds(s, i) for i in range(4)] for s in range(500)
  ]
  assert found[0] != [Latency(median_s=2.0, sigma=0.8, seed=6).seconds(0, i) for i in range(4)]
  logs = np.log(found).ravel()
  # Standard errors over 2000 draws: 0.8 / √2000 = 0.018 of the mean, 0.8 / √4000 = 0.013 of the
  # deviation.
  assert abs(logs.mean() - math.log(2)) < 0.07 and abs(logs.std() - 0.8) < 0.05
  assert len(set(logs)) == 2000
  assert Latency().seconds(3, 0) == 0 and Latency(median_s=3.0).seconds(9, 1) == 3
  assert latency.seconds(-1, 0) > 0
  with pytest.raises(UserError, match='latency'):
    Latency(median_s=-1.0)


def test_latency_lies_between_the_tokens_and_its_rest_at_the_end(tmp_path):
  async def main():
    async with scripted(tmp_path, latency=Latency(median_s=1e6)) as (server, client):
      for stops in ([], [6]):
        before = server.tokens
        task = asyncio.create_task(client.generate([5], stop_token_ids=stops))
        await until(lambda before=before: server.tokens == before + 1)
        for _ in range(3):  # Whatever could go on has had its turn.
          await client.get('/health')
        assert not task.done() and server.running == 1
        await client.post('/abort_requests', {})
        assert (await task)['choices'][0]['token_ids'] == [6]
    async with scripted(tmp_path, latency=Latency(median_s=1e-3, sigma=1.0)) as (server, client):
      assert len((await client.generate([5]))['choices'][0]['token_ids']) == 8

  asyncio.run(main())


@pytest.mark.full
def test_it_runs_as_a_process(tmp_path):
  export(tmp_path / 'model', params_of(V1), SPEC, tokenizer_dir=None, eos_ids=[EOS], pad_id=None)
  command = [sys.executable, str(SUPPORT / 'fake_vllm'), f'--model={tmp_path / "model"}']
  command += [
    f'--uds={tmp_path / "v.sock"}',
    f'--max_model_len={LENGTH}',
    '--latency_median_s=0.001',
  ]
  process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
  try:
    assert process.stdout.readline() == f'fake vLLM server at unix:{tmp_path / "v.sock"}\n'

    async def main():
      client = Client(tmp_path / 'v.sock')
      answer = await client.generate([5, 6], n=2)
      await client.session.close()
      return answer

    assert len(asyncio.run(main())['choices']) == 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0 and not (tmp_path / 'v.sock').exists()
  finally:
    process.kill()
    process.wait()
