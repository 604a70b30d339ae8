"""Messages from explorers: an honest message passes unchanged, and any other is refused with one
line.
"""

import dataclasses

import msgpack
import numpy as np
import pytest

from jaxrl_llm.core.files import parse_msgpack
from jaxrl_llm.core.records.sample import Finish, Segment, encode
from jaxrl_llm.core.records.task import Media, Task
from jaxrl_llm.core.types import Version
from jaxrl_llm.rewards.api import Attempt, Verdict
from jaxrl_llm.rollout.api import Completion, Request, Sampling
from jaxrl_llm.rollout.explorers import wire
from jaxrl_llm.rollout.explorers.arrivals import (
  one_line,
  read_attempt,
  read_error,
  read_question,
  read_request,
  read_sender,
  read_steps,
  read_verdict,
)
from jaxrl_llm.rollout.explorers.generated import Generated
from jaxrl_llm.rollout.explorers.leases import LentGroup, Misbehaved
from jaxrl_llm.rollout.untrusted import Bounds
from jaxrl_llm.rollout.workflow import Rollout, rollout_sample

BOUNDS = Bounds(vocab_size=10, max_length=8)
TASK = Task(
  taskset='sums',
  domain='math',
  prompt=({'role': 'user', 'content': 'ab'},),
  truth='a',
  fields={'large': 10**30, 'nan': float('nan')},
  media=(Media(kind='image', digest='0' * 32, reference='a.png'),),
)
NAME = f'grpo/{TASK.uid}/3'
VERSION = Version(0, 2)


COMPLETION = Completion(
  tokens=np.array([4, 9, 1], np.int32),
  logprobs=np.array([-0.5, -2.0, 0.0], np.float32),
  finish=Finish.STOP,
  segments=(Segment(start=0, end=3, version=VERSION, engine='engine', finish='stop'),),
)


def group():
  order = {'task': wire.task_row(TASK), 'visit': 3, 'stage': 'grpo', 'samples': 4}
  lent = LentGroup(order=order, name=NAME, samples=4)
  lent.generated.add(COMPLETION, Sampling())
  return lent


def sample():
  return rollout_sample(TASK, 3, 1, [2, 3], COMPLETION, group=NAME, temperature=1.0)


def read_one(data, lent):
  """Reads a message that hands in a trajectory of one step."""
  (step,) = read_steps({'steps': [data]}, lent, BOUNDS)
  return step


def row():
  return msgpack.unpackb(encode(sample()))


def read(row):
  return read_one(msgpack.packb(row), group())


def bytes_of(values, dtype):
  return np.array(values, dtype).tobytes()


def test_a_sample_that_was_drawn_for_the_lease_passes_as_it_is():
  read = read_one(encode(sample()), group())
  assert encode(read) == encode(sample())


def test_the_steps_of_a_trajectory_are_read_in_their_order_up_to_the_most_of_the_run():
  second = dataclasses.replace(sample(), uid=f'{NAME}/1/1', step_index=1)
  steps = [encode(sample()), encode(second)]
  lent = dataclasses.replace(group(), max_steps=2)
  assert [encode(step) for step in read_steps({'steps': steps}, lent, BOUNDS)] == steps
  assert lent.hand_in(Rollout(sample(), '', later=(second,)))
  for wrong, line in {
    (steps[0],) * 3: r'sample: 3 steps, wanted 1 … 2 \(rollout\.max_steps\)',
    (): 'sample: 0 steps, wanted 1',
    (steps[0], b''): 'sample: 0 bytes are not msgpack',
    (steps[0], 'x'): r'sample: steps\[1\] is str, wanted bytes',
  }.items():
    with pytest.raises(Misbehaved, match=line):
      read_steps({'steps': [*wrong]}, lent, BOUNDS)
  with pytest.raises(Misbehaved, match='sample: steps is bytes, wanted list'):
    read_steps({'steps': steps[0]}, lent, BOUNDS)
  for wrong in (sample(), dataclasses.replace(second, uid=f'{NAME}/1/2')):
    with pytest.raises(ValueError, match=f'wanted sample {NAME}/1/1 of group'):
      lent.hand_in(Rollout(sample(), '', later=(wrong,)))


@pytest.mark.parametrize('drawn', [[2], [2, 3], [3, 4], [4], [2, 4]])
def test_a_workflow_may_use_parts_of_a_completion(drawn):
  mask = np.isin(np.arange(5), drawn)
  logprobs = np.where(mask, sample().behaviour_logprobs, 0).astype(np.float32)
  part = dataclasses.replace(sample(), sampled=mask, loss_mask=mask, behaviour_logprobs=logprobs)
  assert encode(read_one(encode(part), group())) == encode(part)


def test_a_run_of_tokens_comes_from_one_completion():
  lent = group()
  lent.generated = Generated()
  for part in ([4, 9], [1], [9, 1]):
    count = len(part)
    lent.generated.add(
      dataclasses.replace(
        COMPLETION,
        tokens=np.array(part, np.int32),
        logprobs=COMPLETION.logprobs[[[4, 9, 1].index(token) for token in part]],
        segments=(dataclasses.replace(COMPLETION.segments[0], end=count),),
      ),
      Sampling(),
    )
  with pytest.raises(Misbehaved, match=r'tokens \[2, 5\) or their logprobs'):
    read_one(encode(sample()), lent)
  lent.generated.add(COMPLETION, Sampling())
  assert encode(read_one(encode(sample()), lent)) == encode(sample())


NARROW = Sampling(top_p=0.9)


@pytest.mark.parametrize('narrow', [NARROW, Sampling(top_k=5), Sampling(top_p=0.9, top_k=5)])
def test_tokens_of_a_narrowed_distribution_are_not_trained_on(narrow):
  lent = group()
  lent.generated = Generated()
  lent.generated.add(COMPLETION, narrow)
  with pytest.raises(Misbehaved, match=r'tokens \[2, 5\) are in loss_mask, but .* another top_p'):
    read_one(encode(sample()), lent)
  masked = dataclasses.replace(sample(), loss_mask=np.zeros(5, bool))
  assert encode(read_one(encode(masked), lent)) == encode(masked)
  # One token in the loss is enough.
  some = dataclasses.replace(sample(), loss_mask=np.arange(5) == 4)
  with pytest.raises(Misbehaved, match='in loss_mask'):
    read_one(encode(some), lent)
  lent.generated.add(COMPLETION, Sampling())
  assert encode(read_one(encode(sample()), lent)) == encode(sample())


@pytest.mark.parametrize(
  ('stage', 'asked', 'is_trainable'),
  [
    (NARROW, NARROW, True),
    (NARROW, Sampling(top_p=0.8), False),
    (NARROW, Sampling(top_p=0.9, top_k=3), False),
    (NARROW, Sampling(), True),
    (Sampling(), Sampling(temperature=0.0, top_p=0.9), True),
  ],
)
def test_what_counts_is_the_distribution_of_the_group(stage, asked, is_trainable):
  lent = group()
  lent.generated = Generated(stage)
  lent.generated.add(COMPLETION, asked)
  drawn = dataclasses.replace(sample(), temperature=asked.temperature)
  if is_trainable:
    assert encode(read_one(encode(drawn), lent)) == encode(drawn)
  else:
    with pytest.raises(Misbehaved, match='in loss_mask'):
      read_one(encode(drawn), lent)


SEGMENT = [2, 5, 0, 2, 'engine', 'stop']


@pytest.mark.parametrize(
  ('change', 'line'),
  [
    ({'tokens': bytes_of([2, 3, 4, 9, 10], '<i4')}, 'tokens has token 10, wanted 0 … 9'),
    ({'tokens': bytes_of([2, 3, 4, 9, -(2**31)], '<i4')}, 'tokens has token -2147483648'),
    ({'tokens': b'\0' * 19}, 'ValueError|buffer size'),
    ({'tokens': 'text'}, 'tokens is str, wanted bytes'),
    ({'tokens': b''}, 'tokens is empty'),
    ({'role': bytes_of([0, 0, 1, 1, 3], '|u1')}, 'role has 3, wanted at most 2'),
    ({'loss_mask': b'\0\0\1\1\x07'}, 'loss_mask has bytes other than 0 and 1'),
    ({'sampled': b'\0\0\1\1\xff'}, 'sampled has bytes other than 0 and 1'),
    (
      {'behaviour_logprobs': bytes_of([0, 0, -1, 5, 0], '<f4')},
      'behaviour_logprobs has 5.0, wanted at most 0',
    ),
    (
      {'behaviour_logprobs': bytes_of([0, 0, -1, np.nan, 0], '<f4')},
      'behaviour_logprobs are not finite',
    ),
    ({'uid': 7}, 'uid is int, wanted str'),
    ({'uid': 'u' * 2000}, 'uid has 2000 characters'),
    ({'task_id': 'sums:0'}, "task_id is 'sums:0', wanted 'sums:"),
    ({'visit': 4}, 'visit is 4, wanted 3'),
    ({'visit': True}, 'visit is bool, wanted int'),
    ({'visit': 2**63}, 'visit is 9223372036854775808, wanted 0'),
    ({'sample_index': 1.0}, 'sample_index is float, wanted int'),
    ({'step_index': -1}, 'step_index is -1'),
    ({'prompt_len': 6}, 'prompt_len is 6, wanted 1 to 5'),
    ({'prompt_len': 'x'}, 'prompt_len is str, wanted int'),
    ({'taskset': 'another'}, "taskset is 'another', wanted 'sums'"),
    ({'domain': 'code'}, "domain is 'code', wanted 'math'"),
    ({'source': 'expert'}, 'source is '),
    ({'source': 'nowhere'}, "'nowhere' is not a valid Source"),
    ({'preference': {'pair_id': 'p', 'label': 'chosen'}}, 'preference is '),
    ({'trajectory_id': 'grpo/another/3/1'}, 'trajectory_id is '),
    ({'temperature': float('nan')}, 'temperature is nan'),
    ({'temperature': -1.0}, 'temperature is -1.0'),
    ({'temperature': None}, 'temperature is None'),
    ({'finish_reason': 'tired'}, "'tired' is not a valid Finish"),
    (
      {'media': [{'kind': 'image', 'digest': '1' * 32, 'span': [0, 0]}]},
      "media differ from the task's",
    ),
    ({'media': [{'kind': 'image', 'digest': '0' * 32, 'span': [0, 99]}]}, 'media span'),
    ({'media': [7]}, r'media\[0\] is int, wanted dict'),
    ({'segments': []}, 'segments are missing'),
    ({'segments': None}, 'segments is NoneType, wanted list'),
    (
      {'segments': [[2, 5, 1, 2, 'engine', 'stop']]},
      r"version 1.2 of engine 'engine' .* wanted one of \[\('0.2', ",
    ),
    (
      {'segments': [[2, 5, 0, 2, 'another', 'stop']]},
      "version 0.2 of engine 'another' generated nothing for this lease",
    ),
    ({'segments': [[2, 5, 0, '2', 'engine', 'stop']]}, 'step is str, wanted int'),
    (
      {'segments': [[2, 99, 0, 2, 'engine', 'stop']]},
      r'segment \[2, 99\), wanted it inside \[0, 5\)',
    ),
    ({'segments': [[-1, 5, 0, 2, 'engine', 'stop']]}, 'start is -1, wanted 0'),
    ({'segments': [SEGMENT, SEGMENT]}, r'segment \[2, 5\), wanted it inside \[5, 5\)'),
    (
      {'segments': [[2, 4, 0, 2, 'engine', 'stop']]},
      'token 4 was sampled, but no segment covers it',
    ),
    (
      {'tokens': bytes_of([2, 3, 4, 8, 1], '<i4')},
      r"tokens \[2, 5\) or their logprobs are not what engine 'engine' generated as version 0.2",
    ),
    ({'tokens': bytes_of([2, 3, 9, 1, 4], '<i4')}, r'tokens \[2, 5\) or their logprobs'),
    (
      {'behaviour_logprobs': bytes_of([0, 0, -0.5, -2.5, 0], '<f4')},
      r'tokens \[2, 5\) or their logprobs',
    ),
    (
      {'sampled': b'\0\1\1\1\1', 'segments': [[1, 5, 0, 2, 'engine', 'stop']]},
      r'tokens \[1, 5\) or their logprobs',
    ),
    ({'loss_mask': b'\0\1\1\1\1'}, 'token 1 is in loss_mask, but was not sampled'),
    (
      {'temperature': 0.0},
      r'temperature is 0.0, wanted one at which tokens were requested: \[1.0\]',
    ),
    ({'schema': 99}, 'has schema 99'),
    ({'further': 1}, "unexpected keyword argument 'further'"),
  ],
)
def test_a_sample_with_any_other_field_is_refused_in_one_line(change, line):
  with pytest.raises(Misbehaved, match=f'sample: .*(?:{line})') as raised:
    read({**row(), **change})
  assert '\n' not in str(raised.value) and len(str(raised.value)) <= 400


def test_a_sample_without_a_field_is_refused():
  for name in row():
    with pytest.raises(Misbehaved, match='sample: '):
      read({field: value for field, value in row().items() if field != name})


@pytest.mark.parametrize(
  'data', [None, 'text', b'', b'\xc1', b'\x91' * 5000, msgpack.packb([1]), b'\0' * (2 << 20)]
)
def test_bytes_that_are_no_sample_are_refused(data):
  with pytest.raises(Misbehaved, match='sample'):
    read_one(data, group())


def test_a_sample_longer_than_the_limits_is_refused_by_their_names():
  one = sample()
  more = {
    name: np.pad(getattr(one, name), (0, 4))
    for name in ('tokens', 'role', 'loss_mask', 'sampled', 'behaviour_logprobs')
  }
  long = dataclasses.replace(one, **more)
  with pytest.raises(
    Misbehaved, match=r'9 tokens, wanted at most 8: rollout\.max_prompt_length and max_'
  ):
    read_one(encode(long), group())


def request(**changes):
  how = {
    'uid': 'g',
    'prompt': (1, 9),
    'max_tokens': 4,
    'stop_ids': (0,),
    'samples': 2,
    'key': (1, 2**32 - 1),
  }
  asked = Request(**how, sampling=Sampling(temperature=0.5, top_k=5))
  return parse_msgpack(wire.pack({'request': {**wire.request_row(asked), **changes}}))


SAMPLING = wire.sampling_row(Sampling())


def test_an_honest_request_passes_as_it_is():
  read = read_request(request(), BOUNDS)
  assert wire.pack(wire.request_row(read)) == wire.pack(request()['request'])


@pytest.mark.parametrize(
  ('change', 'line'),
  [
    ({'prompt': [10]}, 'prompt has token 10, wanted 0 … 9'),
    ({'prompt': [2**63]}, 'OverflowError|outside'),
    ({'prompt': []}, 'prompt is empty'),
    ({'prompt': 'abc'}, 'prompt is str, wanted list'),
    ({'prompt': [True]}, r'prompt\[0\] is bool, wanted int'),
    ({'prompt': 7}, 'prompt is int, wanted list'),
    ({'stop_ids': [-1]}, 'stop_ids has token -1'),
    ({'key': [0.5]}, r'key\[0\] is float, wanted int'),
    ({'key': [2**32]}, 'uint32'),
    ({'key': [0] * 65}, 'key has 65 words, wanted at most 64'),
    ({'max_tokens': 0}, 'max_tokens is 0, wanted 1'),
    ({'max_tokens': 1.5}, 'max_tokens is float, wanted int'),
    ({'max_tokens': 2**40}, 'max_tokens is 1099511627776'),
    ({'samples': 5000}, 'samples is 5000, wanted 1 … 4096'),
    ({'uid': None}, 'uid is NoneType, wanted str'),
    ({'uid': 'a\nforged line'}, 'all printable'),
    ({'sampling': {**SAMPLING, 'temperature': float('nan')}}, 'temperature is nan'),
    ({'sampling': {**SAMPLING, 'top_k': 2**40}}, 'top_k is 1099511627776'),
    ({'sampling': {**SAMPLING, 'top_k': 0.5}}, 'top_k is float, wanted int'),
    ({'sampling': {**SAMPLING, 'top_p': True}}, 'top_p is True'),
    ({'sampling': {**SAMPLING, 'max_response_length': 0}}, 'max_response_length is 0, wanted 1'),
    ({'sampling': {**SAMPLING, 'repetition_detection': 3}}, 'repetition_detection is int'),
    ({'sampling': {**SAMPLING, 'repetition_detection': {'min_count': 2**40}}}, 'min_count is'),
    ({'sampling': {**SAMPLING, 'repetition_detection': {'min_count': 1}}}, 'max_pattern_size'),
    ({'sampling': {}}, 'top_k is missing'),
    ({'sampling': 'hot'}, 'sampling is str, wanted dict'),
    ({'further': 1}, "unexpected keyword argument 'further'"),
  ],
)
def test_a_request_of_other_types_or_outside_the_vocabulary_is_refused(change, line):
  with pytest.raises(Misbehaved, match=f'request: .*(?:{line})'):
    read_request(request(**change), BOUNDS)


def attempt(**changes):
  made = Attempt(uid=f'{NAME}/1', task=TASK, completion='ab', finish_reason='stop', response_len=2)
  return {'attempt': {**wire.attempt_row(made), **changes}}


def test_an_honest_attempt_passes_after_the_way_to_the_explorer_and_back():
  order = parse_msgpack(wire.pack(group().order))
  sent = wire.task_row(wire.read_task(order['task']))
  read = read_attempt(parse_msgpack(wire.pack(attempt(task=sent))), group())
  assert (read.uid, read.completion, read.task.uid) == (f'{NAME}/1', 'ab', TASK.uid)


@pytest.mark.parametrize(
  ('change', 'line'),
  [
    (
      {'task': wire.task_row(dataclasses.replace(TASK, truth='b'))},
      "task differs from the lease's task",
    ),
    (
      {'task': wire.task_row(dataclasses.replace(TASK, fields={}))},
      "task differs from the lease's task",
    ),
    ({'task': None}, "task differs from the lease's task"),
    ({'uid': 'grpo/another/3/1'}, "uid is 'grpo/another/3/1', wanted grpo/"),
    ({'uid': 1}, 'uid is int, wanted str'),
    ({'completion': b'ab'}, 'completion is bytes, wanted str'),
    ({'finish_reason': None}, 'finish_reason is NoneType'),
    ({'response_len': -1}, 'response_len is -1'),
    ({'further': 1}, "unexpected keyword argument 'further'"),
  ],
)
def test_an_attempt_at_another_task_or_of_other_types_is_refused(change, line):
  with pytest.raises(Misbehaved, match=f'attempt: .*{line}'):
    read_attempt(attempt(**change), group())


QUESTION = {
  'model': 'helper',
  'messages': [{'role': 'user', 'content': 'a'}],
  'max_tokens': 7,
  'temperature': 0.5,
}


def test_an_honest_question_passes_as_it_is():
  assert read_question(QUESTION) == (
    'helper',
    QUESTION['messages'],
    {'max_tokens': 7, 'temperature': 0.5},
  )


@pytest.mark.parametrize(
  ('change', 'line'),
  [
    ({'model': ['helper']}, 'model is list, wanted str'),
    ({'messages': 'a'}, 'messages is str, wanted list'),
    ({'messages': ['a']}, r'messages\[0\] is str, wanted dict'),
    ({'messages': [{'content': b'a'}]}, 'TypeError'),
    ({'messages': [{'content': float('inf')}]}, 'JSON compliant'),
    ({'max_tokens': '7'}, 'max_tokens is str, wanted int'),
    ({'max_tokens': 0}, 'max_tokens is 0'),
    ({'temperature': None}, 'temperature is None'),
    ({'temperature': float('inf')}, 'temperature is inf'),
  ],
)
def test_a_question_that_no_server_could_be_asked_is_refused(change, line):
  with pytest.raises(Misbehaved, match=f'question: .*{line}'):
    read_question({**QUESTION, **change})


def test_a_name_is_of_use_only_with_its_secret():
  first, second = ({'name': 'a', 'secret': letter * 32} for letter in 'xy')
  assert read_sender(first) == read_sender({**first, 'lease': 'l'}) != read_sender(second)
  assert read_sender(first).startswith('a/') and 'x' not in read_sender(first)


@pytest.mark.parametrize(
  'body', [None, [], {}, {'name': 'a'}, {'name': 'a', 'secret': 'short'}, {'name': 7, 'secret': ''}]
)
def test_a_message_of_nobody_is_refused(body):
  with pytest.raises(ValueError, match=r'message|name|secret'):
    read_sender(body)


def test_what_a_workflow_raised_is_told_on_one_line():
  assert read_error({'error': 'first\nsecond\x1b[2J'}) == 'first second\N{REPLACEMENT CHARACTER}[2J'
  assert len(one_line('long ' * 10_000)) == 400


VERDICT = wire.verdict_row(
  Verdict(value=1.0, parts={'calls': 2.0}, turn_values=(0.5,), evidence={'large': 10**30})
)


def test_a_reward_of_the_environment_passes_the_way_to_the_master():
  body = parse_msgpack(wire.pack({'verdict': VERDICT}))
  read = read_verdict(body, [sample()])
  assert read == wire.read_verdict(VERDICT) and read.evidence == {'large': 10**30}
  assert read_verdict({'verdict': None}, [sample()]) is read_verdict({}, [sample()]) is None


@pytest.mark.parametrize(
  ('change', 'line'),
  [
    ({'value': float('nan')}, 'verdict has nan, wanted a number within'),
    ({'value': 1e7}, 'verdict has 10000000.0, wanted a number within'),
    ({'value': True}, 'verdict has True, wanted a number within'),
    ({'turn_values': [0.5] * 99}, 'verdict has 99 turn values'),
    ({'turn_values': ['1']}, "verdict has '1', wanted a number within"),
    ({'parts': {'a\nb': 1.0}}, 'name of a part has 3 characters'),
    ({'parts': {'a': float('inf')}}, 'verdict has inf, wanted a number within'),
    ({'evidence': '[]'}, 'evidence is not a JSON object'),
    ({'evidence': '{"a": NaN}'}, 'JSON has NaN'),
    ({'evidence': '{'}, 'verdict: '),
    ({'evidence': f'{{"a": "{"a" * (1 << 16)}"}}'}, 'evidence is not a JSON object of at most'),
    ({'other': 1}, 'verdict: TypeError'),
  ],
)
def test_a_hostile_reward_is_one_line(change, line):
  with pytest.raises(Misbehaved) as caught:
    read_verdict({'verdict': {**VERDICT, **change}}, [sample()])
  assert line in str(caught.value) and '\n' not in str(caught.value)
