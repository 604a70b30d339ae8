"""What explorers and the master exchange comes back as it was."""

import numpy as np
import pytest

from jaxrl_llm.core.files import parse_msgpack
from jaxrl_llm.core.records.sample import Finish, Segment
from jaxrl_llm.core.records.task import Media, Task
from jaxrl_llm.core.types import Version
from jaxrl_llm.rewards.api import Attempt, Reward
from jaxrl_llm.rollout.api import Completion, Request, Sampling
from jaxrl_llm.rollout.explorers import wire
from jaxrl_llm.rollout.repetition import RepetitionDetection

PICTURES = tuple(Media(kind='image', digest=f'{i:032x}', reference=f'{i}.png') for i in range(2))


def task(media=()):
  prompt = ({'role': 'system', 'content': 'be ä\n'}, {'role': 'user', 'content': 'what is it?'})
  fields = {'large': 10**30, 'deep': [{'a': None}]}
  return Task(
    taskset='train', domain='vision', prompt=prompt, truth=None, fields=fields, media=media
  )


def attempt(media=()):
  return Attempt(
    uid='a/0', task=task(media), completion='a cat', finish_reason='stop', response_len=2
  )


@pytest.mark.parametrize(
  ('row', 'read', 'value'),
  [
    (wire.task_row, wire.read_task, task()),
    (wire.task_row, wire.read_task, task(PICTURES)),
    (wire.attempt_row, wire.read_attempt, attempt(PICTURES)),
    (
      wire.request_row,
      wire.read_request,
      Request(
        uid='a',
        prompt=(3, 4),
        max_tokens=5,
        sampling=Sampling(
          top_p=0.5, repetition_detection=RepetitionDetection(max_pattern_size=8, min_count=3)
        ),
        stop_ids=(1,),
        samples=2,
        key=(7, 0),
      ),
    ),
    (
      wire.reward_row,
      wire.read_reward,
      Reward(value=0.5, parts={'judge': 0.5}, correct=None, turn_values=(1.0, 2.0)),
    ),
  ],
)
def test_a_record_comes_back_whole(row, read, value):
  assert read(parse_msgpack(wire.pack(row(value)))) == value


def test_a_task_that_came_back_is_the_same_task():
  read = wire.read_task(parse_msgpack(wire.pack(wire.task_row(task(PICTURES)))))
  assert read.uid == task(PICTURES).uid != task().uid


def test_a_completion_comes_back_bit_for_bit():
  logprobs = np.array([-0.1, np.finfo(np.float32).tiny, -0.0], np.float32)
  segments = tuple(
    Segment(start=start, end=end, version=Version(1, step), engine='e', finish='stop')
    for start, end, step in ((0, 1, 4), (1, 3, 5))
  )
  tokens = np.array([5, 2**31 - 1, 0], np.int32)
  made = Completion(tokens=tokens, logprobs=logprobs, finish=Finish.STOP, segments=segments)
  read = wire.read_completion(parse_msgpack(wire.pack(wire.completion_row(made))))
  assert read.tokens.tobytes() == tokens.tobytes() and read.logprobs.tobytes() == logprobs.tobytes()
  assert (read.finish, read.segments) == (made.finish, segments)
