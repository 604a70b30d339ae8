"""Answers of a server: what is read of them, which are refused, and in which threads."""

import asyncio
import json
import threading

import fleets
import numpy as np
import pytest
import serving
from fake_vllm import FakeServer, Scripted

from jaxrl_llm.core import background
from jaxrl_llm.core.net.client import Malformed
from jaxrl_llm.core.records.sample import Finish
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.api import Request
from jaxrl_llm.rollout.vllm import answer
from jaxrl_llm.rollout.vllm.client import VllmClient

LONG = 16_384
LABELS = {'0.1': Version(0, 1), '0.2': Version(0, 2)}


def request(tokens=3):
  return Request(uid='r', prompt=(1, 2), max_tokens=tokens, stop_ids=(9,), key=(1,))


def body(tokens=(5, 6, 7), logprobs=(-0.5, -1.0, 0), **fields):
  content = [
    {'token_id': token, 'logprob': logprob, 'rank': None, 'top_logprobs': [{'token_id': token}]}
    for token, logprob in zip(tokens, logprobs, strict=True)
  ]
  choice = {
    'index': 0,
    'finish_reason': 'length',
    'token_ids': list(tokens),
    'logprobs': {'content': content},
    'weight_versions': [{'version': '0.1', 'start': 0, 'end': len(tokens)}],
    **fields,
  }
  return {'request_id': 'r', 'choices': [choice], 'prompt_logprobs': None, 'usage': {'n': 3}}


def read(data, tokens=3, **fields):
  return answer.read_completion(data, request(tokens), engine='vllm-0', labels=LABELS, **fields)


def test_logprobs_are_rounded_as_numpy_does():
  """Numbers of all magnitudes, with as many digits as servers write."""
  bits = np.random.default_rng(0).integers(0, 1 << 32, 4096, np.uint32)
  values = -np.abs(np.array([x for x in bits.view(np.float32) if abs(x) < 9000], np.float64))
  values = [*values.tolist(), -0.1, -1e-310, -1.0000000596046448, 0, -3]
  tokens = np.random.default_rng(1).integers(0, 2**31, len(values)).tolist()
  completion = read(json.dumps(body(tokens, values)).encode(), len(values))
  assert completion.tokens.dtype == np.int32 and completion.tokens.tolist() == tokens
  assert completion.logprobs.tobytes() == np.array(values, np.float32).tobytes()


@pytest.mark.parametrize('indent', [None, 2])
def test_what_is_read(indent):
  spans = [
    {'version': '0.1', 'start': 0, 'end': 2},
    {'version': '0.2', 'start': 2, 'end': 3},
  ]
  completion = read(json.dumps(body(weight_versions=spans), indent=indent).encode() + b'\n')
  assert completion.finish == Finish.LENGTH
  assert [(s.start, s.end, s.version, s.engine, s.finish) for s in completion.segments] == [
    (0, 2, Version(0, 1), 'vllm-0', 'load'),
    (2, 3, Version(0, 2), 'vllm-0', 'length'),
  ]
  (segment,) = read(json.dumps(body()).encode(), adapter='0.2').segments
  assert segment.version == Version(0, 2)


VALID = json.dumps(body()).encode()
HOSTILE = {
  'nothing': b'',
  'blanks': b' \n ',
  'no JSON': b'<html>',
  'half': VALID[: len(VALID) // 2],
  'two': VALID + VALID,
  'two lines': VALID + b'\n' + VALID,
  'a list': b'[]',
  'null': b'null',
  'no choices': b'{}',
  'null for choices': b'{"choices": null}',
  'an empty list': b'{"choices": []}',
  'null for a choice': b'{"choices": [null]}',
  'two choices': json.dumps({'choices': 2 * body()['choices']}).encode(),
  'an empty choice': b'{"choices": [{}]}',
  'nested': b'{"choices": ' + b'[' * 1_000_000,
  'nested aside': b'{"x": ' + b'[' * 1_000_000 + b']' * 1_000_000 + b', "choices": []}',
  'nested after a line break in a string': (
    b'{"e":"\\\\","a":"x\n","b":' + b'[' * 1_000_000 + b']' * 1_000_000 + b',"c":""}'
  ),
  'two after a line break in a string': b'{"e":"\\\\","a":"x\n","b":1}null{"c":""}',
  'a key twice': VALID.replace(b'"finish_reason"', b'"token_ids": [1], "finish_reason"'),
  'null for a token': json.dumps(body(token_ids=[5, None, 7])).encode(),
  'a float for a token': json.dumps(body(token_ids=[5, 6.5, 7])).encode(),
  'text for a token': json.dumps(body(token_ids=[5, '6', 7])).encode(),
  'a bool for a token': json.dumps(body(token_ids=[5, True, 7])).encode(),
  'a large token': json.dumps(body((5, 2**31, 7))).encode(),
  'a negative token': json.dumps(body((5, -6, 7))).encode(),
  'null for a logprob': json.dumps(body(logprobs=(-1.0, None, -1.0))).encode(),
  'NaN': json.dumps(body(logprobs=(-1.0, float('nan'), -1.0))).encode(),
  'infinity': json.dumps(body(logprobs=(-1.0, float('-inf'), -1.0))).encode(),
  'an overflow': VALID.replace(b'-0.5', b'-1e999'),
  'other tokens': json.dumps(body(token_ids=[5, 6, 8])).encode(),
  'more tokens': json.dumps(body(token_ids=[5, 6, 7, 8])).encode(),
  'no content': VALID.replace(b'"content"', b'"contents"'),
  'null for a version': json.dumps(
    body(weight_versions=[{'version': None, 'start': 0, 'end': 3}])
  ).encode(),
  'a span of nothing': json.dumps(body(weight_versions=[None])).encode(),
  'no UTF-8': VALID.replace(b'length', b'\xff\xfe'),
}


@pytest.mark.parametrize('data', HOSTILE.values(), ids=HOSTILE.keys())
def test_other_answers_are_one_line(data):
  with pytest.raises(Malformed) as caught:
    read(data)
  assert '\n' not in str(caught.value) and len(str(caught.value)) < 500


def test_line_breaks_in_strings_hide_nothing_from_the_checks_before_parsing():
  hidden = [data for name, data in HOSTILE.items() if 'after a line break' in name]
  for data, words in zip(hidden, ('nested more than', 'more than one JSON value'), strict=True):
    with pytest.raises(Malformed, match=words):
      read(data)


def test_flipped_bytes_are_read_or_refused():
  draws = np.random.default_rng(0)
  for _ in range(2000):
    data = bytearray(VALID)
    for place in draws.integers(0, len(data), draws.integers(1, 4)):
      data[place] = draws.integers(0, 256)
    try:
      completion = read(bytes(data))
    except Malformed:
      continue
    assert len(completion.tokens) == len(completion.logprobs) == 3
    assert np.isfinite(completion.logprobs).all() and (completion.tokens >= 0).all()


async def sample_long(tmp_path):
  """Has a server answer a completion of 16k tokens."""

  def script(prompt, params, index):
    return [5] * params.max_tokens, [-0.25] * params.max_tokens

  backend = Scripted(script, fleets.tensors(fleets.GARBAGE), piece=1 << 20)
  server = FakeServer(backend, max_model_len=LONG + 8, vocab_size=serving.VOCAB)
  client = VllmClient(await server.start(uds=str(tmp_path / 's')), name='vllm-0')
  client._labels['default'] = Version(0, 1)
  try:
    completion = await client.generate(request(LONG), 0, seed=0, deadline_s=60)
  finally:
    await client.close()
    await server.close()
  assert completion.tokens.tolist() == [5] * LONG
  assert set(completion.logprobs.tolist()) == {-0.25}


def test_a_long_answer_is_neither_received_nor_parsed_on_the_loops_thread(tmp_path, monkeypatch):
  seen, parse, run = {}, answer._parse, background.by_length

  def parse_noted(data):
    seen['parsed'] = threading.current_thread()
    return parse(data)

  async def run_noted(tokens, function, *args, **kwargs):
    seen['received'] = threading.current_thread()
    return await run(tokens, function, *args, **kwargs)

  monkeypatch.setattr(answer, '_parse', parse_noted)
  monkeypatch.setattr(background, 'by_length', run_noted)
  asyncio.run(sample_long(tmp_path))
  assert seen.keys() == {'parsed', 'received'}
  assert len({threading.main_thread(), *seen.values()}) == 3


def test_cancelling_a_request_hangs_up(tmp_path):
  async def main():
    backend = Scripted(lambda *_: ([5] * 8, [-1.0] * 8), fleets.tensors(fleets.GARBAGE))
    server = FakeServer(backend, max_model_len=64, vocab_size=serving.VOCAB)
    client = VllmClient(await server.start(uds=str(tmp_path / 's')), name='vllm-0')
    server.faults.stall_at = 1
    asking = asyncio.create_task(client.generate(request(8), 0, seed=0, deadline_s=60))
    await fleets.until(lambda: server.running)
    asking.cancel()
    await fleets.until(lambda: not server.running)
    assert server.finished == {'abort': 1} and asking.cancelled()
    await client.close()
    await server.close()

  fleets.run(main)
