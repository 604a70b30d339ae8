"""Tasks by digest; samples that cannot be wrong inside and come back bit for bit; scores."""

import dataclasses
import functools

import jaxtyping
import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.core.records.sample import Finish, Sample, Segment, Source, decode, encode
from jaxrl_llm.core.records.score import Score, Status
from jaxrl_llm.core.records.task import Media, Task, prompt_digest
from jaxrl_llm.core.types import Version

PER_TOKEN = ('tokens', 'role', 'loss_mask', 'sampled', 'behaviour_logprobs')
BAD = (ValueError, jaxtyping.TypeCheckError)


TASK = Task(
  taskset='sums',
  domain='math',
  prompt=({'role': 'user', 'content': 'één + 1?'},),
  truth='2',
  fields={'n': 1},
)
SAMPLE = Sample(
  uid='grpo/sums:ab/0/3',
  task_id='sums:ab',
  visit=0,
  sample_index=3,
  group_id='grpo/sums:ab/0',
  trajectory_id='grpo/sums:ab/0/3',
  taskset='sums',
  domain='math',
  source=Source.ROLLOUT,
  tokens=np.array([5, 6, 7, 8, 9], np.int32),
  prompt_len=2,
  role=np.array([0, 0, 1, 1, 1], np.uint8),
  loss_mask=np.array([False, False, True, True, True]),
  sampled=np.array([False, False, True, True, True]),
  behaviour_logprobs=np.array([0, 0, -0.5, -1.25, -3.0], np.float32),
  segments=(Segment(start=2, end=5, version=Version(1, 7), engine='embedded', finish='stop'),),
)
task = functools.partial(dataclasses.replace, TASK)
sample = functools.partial(dataclasses.replace, SAMPLE)
LOGPROBS = st.floats(width=32, allow_nan=False, allow_infinity=False)
TOKENS = st.lists(
  st.tuples(st.integers(0, 2**31 - 1), st.booleans(), LOGPROBS), min_size=1, max_size=20
)


def assert_equal(a: Sample, b: Sample) -> None:
  for field in dataclasses.fields(Sample):
    left, right = getattr(a, field.name), getattr(b, field.name)
    if isinstance(left, np.ndarray):
      assert left.dtype == right.dtype, field.name
      assert left.tobytes() == right.tobytes(), field.name
    else:
      assert left == right, field.name
      assert type(left) is type(right), field.name


def test_the_digest_is_that_of_the_prompts_canonical_json():
  canonical = '[{"content":"één + 1?","role":"user"}]'
  assert prompt_digest(task().prompt) == xxhash.xxh3_128_hexdigest(canonical.encode('utf-8'))
  assert task().uid == f'sums:{task().digest[:16]}'


def test_tasks_with_one_prompt_are_one_task_whatever_their_source():
  other = task(
    taskset='other',
    domain='code',
    truth=None,
    fields={},
    prompt=({'content': 'één + 1?', 'role': 'user'},),
  )
  assert other.digest == task().digest
  assert other.uid != task().uid


@pytest.mark.parametrize(
  'prompt',
  [
    ({'role': 'system', 'content': 'één + 1?'},),
    ({'role': 'user', 'content': 'één + 1? '},),
    ({'role': 'user', 'content': 'één'}, {'role': 'user', 'content': ' + 1?'}),
    (),
  ],
)
def test_another_prompt_is_another_task(prompt):
  assert prompt_digest(prompt) != task().digest


def test_a_sample_survives_its_bytes():
  full = sample(
    source=Source.EXPERT,
    finish_reason=Finish.LENGTH,
    temperature=0.7,
    step_index=2,
    preference={'pair_id': 'p', 'label': 'chosen'},
    media=({'kind': 'image', 'digest': 'd', 'span': [0, 2]},),
  )
  assert_equal(decode(encode(full)), full)
  assert encode(decode(encode(full))) == encode(full)
  assert full.response_len == 3


@given(TOKENS, st.text(max_size=10), st.data())
def test_any_sample_survives_its_bytes(rows, text, data):
  sampled = np.array([s for _, s, _ in rows])
  any_sample = sample(
    uid=text,
    tokens=np.array([t for t, _, _ in rows], np.int32),
    prompt_len=data.draw(st.integers(1, len(rows))),
    role=np.array(sampled, np.uint8),
    sampled=sampled,
    loss_mask=sampled & (np.arange(len(rows)) > 0),
    behaviour_logprobs=np.where(
      sampled, np.array([p for _, _, p in rows], np.float32), np.float32(0)
    ),
    temperature=data.draw(st.floats(0, 10)),
  )
  assert_equal(decode(encode(any_sample)), any_sample)


def test_the_bytes_are_msgpack_with_little_endian_arrays_whatever_the_memory_layout():
  strided = np.arange(10, dtype=np.int32)[::2]  # 0 2 4 6 8
  row = msgpack.unpackb(encode(sample(tokens=strided)))
  assert row['schema'] == 1
  assert row['tokens'] == b''.join(n.to_bytes(4, 'little') for n in (0, 2, 4, 6, 8))
  assert row['segments'] == [[2, 5, 1, 7, 'embedded', 'stop']]


@pytest.mark.parametrize('name', PER_TOKEN)
def test_per_token_arrays_of_another_length_are_refused(name):
  with pytest.raises(BAD):
    sample(**{name: getattr(sample(), name)[:-1]})


@pytest.mark.parametrize('prompt_len', [0, -1, 6])
def test_a_prompt_is_a_non_empty_part_of_the_tokens(prompt_len):
  with pytest.raises(ValueError, match='prompt_len'):
    sample(prompt_len=prompt_len)


def test_the_first_token_cannot_be_trained_on():
  with pytest.raises(ValueError, match='loss_mask'):
    sample(loss_mask=np.array([True, False, True, True, True]))


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_logprobs_are_finite(value):
  with pytest.raises(ValueError, match='finite'):
    sample(behaviour_logprobs=np.array([0, 0, -0.5, value, -1], np.float32))


def test_tokens_that_nobody_sampled_have_no_logprob():
  with pytest.raises(ValueError, match='sampled'):
    sample(behaviour_logprobs=np.array([0, -0.1, -0.5, -1, -1], np.float32))


@pytest.mark.parametrize(
  'media', [{'kind': 'image', 'digest': 'd'}, {'kind': 'image', 'digest': 'd', 'span': [3, 2]},
            {'kind': 'image', 'digest': 'd', 'span': [0, 6]}],
)  # fmt: skip
def test_media_stand_for_tokens_of_the_sample(media):
  with pytest.raises(ValueError, match='media'):
    sample(media=(media,))


def test_media_make_another_task_and_none_leave_its_digest_as_it_was():
  shown = Media(kind='image', digest='d', reference='a.png')
  assert task(media=()).digest == task().digest != task(media=(shown,)).digest
  moved = dataclasses.replace(shown, reference='elsewhere/b.png')
  assert task(media=(moved,)).digest == task(media=(shown,)).digest


@pytest.mark.parametrize('schema', [0, 2, None])
def test_a_record_of_another_schema_is_refused(schema):
  row = msgpack.unpackb(encode(sample()))
  with pytest.raises(ValueError, match='schema'):
    decode(msgpack.packb({**row, 'schema': schema}))


def test_a_score_without_a_value_is_not_zero():
  score = Score(uid='u', scorer='answer', value=None, status=Status.TIMEOUT)
  assert score.value is None
  assert str(score.status) == 'timeout'
  with pytest.raises(dataclasses.FrozenInstanceError):
    score.value = 0.0
