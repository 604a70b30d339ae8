"""Streamed answers: what of them is kept when their server is lost, and which are refused."""

import asyncio
import json

import fleets
import numpy as np
import pytest
from fake_vllm import Fault
from fleets import A, B, fleet_over, places, run, until
from following import GREEDY, LONG, Greedy, check, recognised, until_sent
from serving import ask, request

from jaxrl_llm.core.net.client import Malformed
from jaxrl_llm.core.process_clock import TOKENS
from jaxrl_llm.core.records.sample import Finish
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.api import Request, Sampling
from jaxrl_llm.rollout.repetition import RepetitionDetection
from jaxrl_llm.rollout.vllm import answer, stream
from jaxrl_llm.rollout.vllm.client import sampler_seed

LABELS = {'0.1': Version(0, 1), '0.2': Version(0, 2)}


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch):
  monkeypatch.setattr(stream, '_LOOK_S', 0.0)


@pytest.fixture
def backend(monkeypatch):
  monkeypatch.setattr(fleets, 'Marked', Greedy)


@pytest.mark.parametrize('fault', ['die', 'core', 'cut', 'abort', 'stall'])
def test_an_answer_goes_on_after_what_has_arrived(tmp_path, backend, fault):
  async def main():
    config = {'stream': 4, 'dispatch': 'uniform'}
    if fault == 'stall':
      config |= {'latency_s': 1.0, 'min_tokens_per_s': 10_000.0}
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path, **config) as fleet:
      first, second = made
      faults = first.faults
      if fault in ('cut', 'abort'):
        faults.fault, faults.times = Fault(fault), 1
      else:
        faults.stall_at = 31
      asked = request(1, max_tokens=LONG, sampling=GREEDY)
      asking = asyncio.create_task(ask(fleet, asked))
      if fault not in ('cut', 'abort'):
        await until_sent(first, 31)
        await recognised(fleet, made[0])
      if fault == 'die':
        await first.server.die()
      elif fault == 'core':
        await first.server.kill_core()
      (completion,) = await asking
      faults.stall_at = None
      check(asked, completion)
      whole = request(2, max_tokens=LONG, sampling=GREEDY)
      check(whole, (await ask(fleet, whole))[0])
      assert fleet.counts['retries'] == 1
      kept = fleet.counts['kept_tokens']
      if fault in ('cut', 'abort') and not kept:
        return  # The server was lost before it had told its label.
      begun, end = completion.segments
      assert (begun.start, begun.end, begun.engine, begun.finish) == (0, kept, 'vllm-0', 'lost')
      assert (end.start, end.end, end.engine, end.finish) == (kept, LONG, 'vllm-1', 'length')
      assert begun.version == end.version == A
      assert fleet.counts['continued'] == 1 and fleet.counts['lost_tokens'] == 0
      assert kept == (29 if fault not in ('cut', 'abort') else kept), '1 + 7 events of 4'
      (body,) = [b for b in second.server.generate_bodies if b.get('request_id') == 'r1/0']
      assert body['token_ids'] == [*asked.prompt, *completion.tokens[:kept].tolist()]
      assert body['sampling_params']['max_tokens'] == LONG - kept
      metrics = fleet.take_metrics()
      assert metrics['run/engine_continued'] == 1 and metrics['run/engine_kept_tokens'] == kept
      assert metrics[f'{TOKENS}generated'] == 2 * LONG, 'each token is counted once'

  run(main)


def test_random_numbers_are_not_drawn_again_after_what_has_arrived(tmp_path):
  async def main():
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path, stream=4) as fleet:
      made[0].faults.stall_at = made[1].faults.stall_at = 10
      asked = request(1, max_tokens=LONG)
      asking = asyncio.create_task(ask(fleet, asked))
      await until(lambda: any(place.asked for place in made))
      (first,) = (place for place in made if place.asked)
      (second,) = (place for place in made if place is not first)
      await until(lambda: first.server.tokens >= 10)
      await recognised(fleet, first)
      second.faults.stall_at = None
      await first.server.die()
      (completion,) = await asking
      before, after = (
        next(b for b in place.server.generate_bodies if b.get('request_id'))
        for place in (first, second)
      )
      seed, later = (body['sampling_params']['seed'] for body in (before, after))
      kept = fleet.counts['kept_tokens']
      assert seed == sampler_seed(3, asked, 0) != later
      assert completion.tokens.tolist() == [
        *fleets.script(seed, kept),
        *fleets.script(later, LONG - kept),
      ]
      assert 0 < kept <= 10

  run(main)


def test_three_servers_may_answer_one_request(tmp_path, backend):
  async def main():
    config = {'stream': 4, 'dispatch': 'uniform'}
    async with places(tmp_path, 3) as made, fleet_over(made, tmp_path, **config) as fleet:
      made[0].faults.stall_at, made[1].faults.stall_at = 10, 20
      asked = request(1, max_tokens=LONG, sampling=GREEDY)
      asking = asyncio.create_task(ask(fleet, asked))
      for place, count in ((made[0], 10), (made[1], 20)):
        await until_sent(place, count)
        await recognised(fleet, place)
        await place.server.die()
      (completion,) = await asking
      check(asked, completion)
      assert [s.engine for s in completion.segments] == ['vllm-0', 'vllm-1', 'vllm-2']
      assert [s.end for s in completion.segments] == [9, 9 + 17, LONG]
      assert fleet.counts['continued'] == 2 and fleet.counts['kept_tokens'] == 26

  run(main)


def test_only_what_arrived_before_an_update_is_kept(tmp_path, backend):
  async def main():
    config = {'stream': 4, 'dispatch': 'uniform'}
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path, **config) as fleet:
      first = made[0]
      first.faults.stall_at = 20
      asked = request(1, max_tokens=LONG, sampling=GREEDY)
      asking = asyncio.create_task(ask(fleet, asked))
      await until_sent(first, 20)
      await recognised(fleet, made[0])
      await fleet.load(fleets.weights(B))
      first.faults.stall_at = 40
      await until_sent(first, 40)
      await asyncio.sleep(0.05)
      await first.server.die()
      (completion,) = await asking
      check(asked, completion)
      begun, end = completion.segments
      assert (begun.end, begun.version, begun.finish) == (17, A, 'lost') and end.version == B
      assert fleet.counts['kept_tokens'] == 17 and fleet.counts['lost_tokens'] == 20

  run(main)


def test_an_answer_that_an_update_interrupts_has_its_versions_from_the_server(tmp_path, backend):
  async def main():
    async with places(tmp_path, 1) as made, fleet_over(made, tmp_path, stream=4) as fleet:
      made[0].faults.stall_at = 20
      asked = request(1, max_tokens=LONG, sampling=GREEDY)
      asking = asyncio.create_task(ask(fleet, asked))
      await until_sent(made[0], 20)
      await fleet.load(fleets.weights(B))
      made[0].faults.stall_at = None
      (completion,) = await asking
      check(asked, completion)
      assert [(s.end, s.version, s.finish) for s in completion.segments] == [
        (20, A, 'load'),
        (LONG, B, 'length'),
      ]

  run(main)


def test_nothing_is_kept_of_a_process_that_nobody_published_to(tmp_path, backend):
  async def main():
    config = {'stream': 4, 'dispatch': 'uniform', 'max_restarts': 10**6}
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path, **config) as fleet:
      first = made[0]
      await first.restart()
      first.faults.stall_at = 20
      asked = request(1, max_tokens=LONG, sampling=GREEDY)
      asking = asyncio.create_task(ask(fleet, asked))
      await until_sent(first, 20)
      recognition = fleet.replicas[0].client._recognition
      await until(lambda: first.server.requests['/weight_info'] and recognition.looking is None)
      await first.server.die()
      (completion,) = await asking
      check(asked, completion)
      assert [s.engine for s in completion.segments] == ['vllm-1']
      assert fleet.counts['continued'] == 0 and fleet.counts['lost_tokens'] == 17

  run(main)


def test_without_streams_an_answer_is_sampled_again_from_its_beginning(tmp_path, backend):
  async def main():
    config = {'stream': None, 'dispatch': 'uniform'}
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path, **config) as fleet:
      made[0].faults.stall_at = 20
      asked = request(1, max_tokens=LONG, sampling=GREEDY)
      asking = asyncio.create_task(ask(fleet, asked))
      await until_sent(made[0], 20)
      await made[0].server.die()
      check(asked, (await asking)[0])
      bodies = [b for p in made for b in p.server.generate_bodies if 'request_id' in b]
      assert not any('stream' in body for body in bodies)
      assert [b['token_ids'] for b in bodies] == [list(asked.prompt)] * 2
      assert fleet.counts['continued'] == fleet.counts['kept_tokens'] == 0

  run(main)


def foreign(event):
  return event.replace(b'generate-tokens-r1/0', b'generate-tokens-r2/0')


def longer(event):
  """Twice as many tokens as were drawn."""
  body = json.loads(event.removeprefix(b'data: '))
  (choice,) = body['choices']
  choice['token_ids'] *= 2
  choice['logprobs']['content'] *= 2
  return b'data: ' + json.dumps(body).encode() + b'\n\n'


def twice(event):
  return event * 2


def torn(event):
  return event[:-10] + b'\n\n'


def strange(event):
  """A token that would end the engine of the server that continues."""
  body = json.loads(event.removeprefix(b'data: '))
  (choice,) = body['choices']
  if choice['finish_reason'] is None:
    choice['token_ids'][0] = choice['logprobs']['content'][0]['token_id'] = 10**6
  return b'data: ' + json.dumps(body).encode() + b'\n\n'


@pytest.mark.parametrize('spoil', [foreign, longer, twice, torn])
def test_a_hostile_stream_is_repeated_elsewhere_from_the_beginning(tmp_path, backend, spoil):
  async def main():
    config = {'stream': 4, 'dispatch': 'uniform'}
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path, **config) as fleet:
      made[0].faults.spoil = spoil
      asked = request(1, max_tokens=LONG, sampling=GREEDY)
      (completion,) = await ask(fleet, asked)
      check(asked, completion)
      assert [s.engine for s in completion.segments] == ['vllm-1']
      assert fleet.counts['continued'] == 0 and fleet.counts['retries'] == 1
      made[0].faults.spoil = None

  run(main)


def test_a_token_outside_the_vocabulary_reaches_no_other_server(tmp_path, backend):
  async def main():
    config = {'stream': 4, 'dispatch': 'uniform'}
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path, **config) as fleet:
      made[0].faults.spoil, made[0].faults.stall_at = strange, 20
      asked = request(1, max_tokens=LONG, sampling=GREEDY)
      asking = asyncio.create_task(ask(fleet, asked))
      await until_sent(made[0], 20)
      await recognised(fleet, made[0])
      await made[0].server.die()
      check(asked, (await asking)[0])
      assert fleet.counts['continued'] == 0 and fleet.counts['lost_tokens'] == 17

  run(main)


def asked_for(tokens=6, **fields):
  return Request(uid='r', prompt=(1, 2), max_tokens=tokens, stop_ids=(9,), key=(1,), **fields)


def events(*parts, finish='length', done=True, spans=None):
  """A stream whose events have these tokens; the last has `finish`, unless it is None."""
  made = []
  if spans is None:
    spans = [{'version': '0.1', 'start': 0, 'end': sum(map(len, parts))}]
  for number, part in enumerate(parts):
    last = finish is not None and number == len(parts) - 1
    content = [{'token_id': t, 'logprob': -0.5, 'rank': 1, 'top_logprobs': []} for t in part]
    choice = {
      'index': 0,
      'finish_reason': finish if last else None,
      'stop_reason': None,
      'token_ids': list(part),
      'routed_experts': None,
      'sampling_mask': None,
      'weight_versions': spans if last else None,
      'logprobs': {'content': content},
    }
    made.append({'request_id': 'n', 'usage': None, 'output_mode': 'tokens', 'choices': [choice]})
  text = b''.join(b'data: ' + json.dumps(event).encode() + b'\n\n' for event in made)
  return text + b'data: [DONE]\n\n' if done else text


def read(data, asked=None, known=None):
  return answer.read_stream(
    data,
    asked or asked_for(),
    known=len(data) if known is None else known,
    name='n',
    engine='vllm-0',
    labels=LABELS,
  )


def test_a_stream_wherever_it_is_cut_gives_its_complete_events():
  data = events([3], [4, 5], [6, 7, 8])
  ends = [0, *(i + 2 for i in range(len(data)) if data[i : i + 2] == b'\n\n')]
  whole = read(data)
  assert whole.tokens.tolist() == [3, 4, 5, 6, 7, 8] and whole.finish == Finish.LENGTH
  assert whole.segments[0].version == Version(0, 1)
  for cut in range(len(data)):
    found, number = read(data[:cut]), sum(end <= cut for end in ends[1:])
    tokens = [3, 4, 5, 6, 7, 8][: [0, 1, 3, 6, 6][number]]
    assert found.tokens.tolist() == tokens and len(found.logprobs) == len(tokens)
    assert isinstance(found, answer.Begun) == (number < 3)
    assert number == 3 or found.lost == 0
    part = read(data[: ends[2]], known=min(cut, ends[2]))
    assert part.tokens.tolist() == [3, 4, 5][: [0, 1, 3][min(number, 2)]]
    assert part.lost == 3 - len(part.tokens)


def test_the_end_of_an_engine_is_told_and_what_came_before_is_kept():
  error = {'error': {'message': 'EngineCore is gone', 'type': 'InternalServerError', 'code': 500}}
  data = events([3], [4], finish=None, done=False)
  found = read(data + b'data: ' + json.dumps(error).encode() + b'\n\ndata: [DONE]\n\n')
  assert found.tokens.tolist() == [3, 4] and 'EngineCore is gone' in found.reason
  aborted = read(events([3], [4], [], finish='abort'))
  assert aborted.tokens.tolist() == [3, 4] and aborted.reason == 'abort'


ONE = events([3], done=False, finish=None)
HOSTILE = {
  'no event': b'<html>\n\n',
  'a comment': b': ping\n\n',
  'another field': b'event: x\n' + ONE,
  'no JSON': b'data: {"choices": \n\n',
  'not an object': b'data: 3\n\n',
  'several values': b'data: {} {}\n\n',
  'a list in pieces': b'data: {}]} \n\ndata: {"a":[{}\n\n',
  'nested deeply': b'data: ' + b'{"a":' * 500 + b'1' + b'}' * 500 + b'\n\n',
  'another request': ONE.replace(b'"n"', b'"m"'),
  'no request': ONE.replace(b'"n"', b'null'),
  'no choice': ONE.replace(ONE[ONE.index(b'[{') : -4], b'[]'),
  'two choices': ONE.replace(b'"choices": [', b'"choices": [{"index": 0}, '),
  'a null choice': b'data: {"request_id": "n", "choices": null}\n\n',
  'null tokens': ONE.replace(b'"token_ids": [3]', b'"token_ids": null'),
  'a null token': ONE.replace(b'"token_ids": [3]', b'"token_ids": [null]'),
  'no logprobs': ONE.replace(b'"logprobs": {', b'"others": {'),
  'logprobs of other tokens': ONE.replace(b'"token_id": 3', b'"token_id": 4'),
  'more tokens than logprobs': ONE.replace(b'"token_ids": [3]', b'"token_ids": [3, 4]'),
  'a negative token': events([-3], finish=None, done=False),
  'a token of probability 0': ONE.replace(b'-0.5', b'-9999.0'),
  'tokens after the end': events([3, 4, 5, 6, 7, 8], done=False) + ONE,
  'the end twice': events([3, 4, 5, 6, 7, 8], done=False) * 2,
  'tokens after done': events([3], [4], finish=None) + ONE,
  'too many tokens': events([3] * 7, finish=None, done=False),
  'all tokens without an end': events([3] * 6, finish=None, done=False),
  'on after a stop': events([3, 9, 4], finish=None, done=False),
  'a stop that is none': events([3, 4], finish='stop'),
  'too few': events([3, 4]),
  'another reason': events([3, 4], finish='error'),
  'another version': events([3] * 6, spans=[{'version': '0.3', 'start': 0, 'end': 6}]),
  'no version of some': events([3] * 6, spans=[{'version': '0.1', 'start': 0, 'end': 5}]),
  'no version': events([3] * 6, spans=[]),
}


@pytest.mark.parametrize('data', HOSTILE.values(), ids=HOSTILE.keys())
def test_other_streams_are_one_line(data):
  with pytest.raises(Malformed, match=r'^vllm-0: answer to r: [^\n]*$'):
    read(data)


def test_flipped_bytes_are_read_or_refused():
  valid = events([3], [4, 5], [6, 7, 8])
  draws = np.random.default_rng(0)
  for _ in range(2000):
    data = bytearray(valid)
    for place in draws.integers(0, len(data), draws.integers(1, 4)):
      data[place] = draws.integers(0, 256)
    try:
      found = read(bytes(data[: draws.integers(1, len(data) + 1)]))
    except Malformed:
      continue
    assert len(found.tokens) == len(found.logprobs) <= 6


def test_a_repetition_across_a_cut_ends_the_answer():
  sampling = Sampling(
    repetition_detection=RepetitionDetection(max_pattern_size=2, min_pattern_size=1, min_count=3)
  )
  asked = asked_for(8, sampling=sampling)
  made = stream.Answer(asked)
  made.add(read(events([5, 6], [7, 7], finish=None, done=False), asked), A, 'vllm-0')
  assert made.whole is None and made.missing.begun == 4 and made.missing.max_tokens == 4
  begun = read(events([7], [8], finish=None, done=False), made.missing)
  assert begun.tokens.tolist() == [7] and begun.lost == 1
  made.add(begun, B, 'vllm-1')
  assert made.whole.tokens.tolist() == [5, 6, 7, 7, 7]
  assert made.whole.finish == Finish.REPETITION
  assert [(s.end, s.version, s.finish) for s in made.whole.segments] == [
    (4, A, 'lost'),
    (5, B, 'repetition'),
  ]


def test_kills_cost_no_more_than_what_had_not_arrived(tmp_path, backend, record_property):
  """Fifteen deaths of servers, each with several answers under way."""

  async def main():
    config = {'stream': 8, 'max_restarts': 10**6, 'max_retries': 100}
    async with places(tmp_path, 2) as made, fleet_over(made, tmp_path, **config) as fleet:
      random, lost, kept = np.random.default_rng(0), [], []
      asked = [request(i, max_tokens=LONG, sampling=GREEDY) for i in range(8)]
      for number in range(15):
        place, before = made[number % 2], fleet.counts['kept_tokens']
        for each in made:
          each.faults.stall_at = int(random.integers(20, 60))
        asking = [asyncio.create_task(ask(fleet, one)) for one in asked]
        await until_stalled(place)
        await recognised(fleet, place)
        place.faults.stall_at += 8  # All answers have begun, and the server is looked at again.
        await until_stalled(place)
        await recognised(fleet, place)
        drawn = [len(sample.tokens) for sample in open_samples(place)]
        await place.server.die()
        for each in made:
          each.faults.stall_at = None
        for one, found in zip(asked, await asyncio.gather(*asking), strict=True):
          check(one, found[0])
        kept.append(fleet.counts['kept_tokens'] - before)
        lost.append(sum(drawn) - kept[-1])
        assert lost[-1] < 8 * len(drawn), 'fewer than an event of each answer'
        await place.start()
        await fleets.back(fleet, place, A)
      record_property('kept', str(kept))
      record_property('lost', str(lost))
      assert fleet.counts['lost_tokens'] == 0 and fleet.counts['continued'] >= 15

  run(main)


def open_samples(place):
  return [sample for call in place.server._core.calls for sample in call.samples]


async def until_stalled(place):
  def is_stalled():
    samples = open_samples(place)
    return len(samples) == 4 and all(len(s.tokens) >= place.faults.stall_at for s in samples)

  await until(is_stalled)
