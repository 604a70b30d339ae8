"""Where a repetition ends a completion, against a naive search, and however the tokens arrive."""

import numpy as np
import pytest

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rollout.api import Request, Sampling
from jaxrl_llm.rollout.repetition import RepetitionDetection


def rule(least, most, count):
  return RepetitionDetection(min_pattern_size=least, max_pattern_size=most, min_count=count)


def naive(tokens, least, most, count):
  tokens = list(tokens)
  for end in range(1, len(tokens) + 1):
    for size in range(least, most + 1):
      copies = tokens[max(0, end - size * count) : end]
      if copies == tokens[end - size : end] * count and len(copies) == size * count:
        return end
  return None


@pytest.mark.parametrize(
  ('tokens', 'sizes', 'end'),
  [
    ([7, 8, 8, 8, 9], (1, 8, 3), 4),  # 8 8 8
    ([1, 2, 3, 1, 2, 3, 1, 2, 3], (2, 3, 3), 9),
    ([1, 2, 3, 1, 2, 3], (2, 3, 3), None),  # twice, not three times
    ([1, 2, 1, 2, 1, 2, 1, 2], (2, 5, 4), 8),
    ([10, 20, 10, 20, 10, 20], (3, 5, 3), None),  # a pattern of two is too short
    ([5, 5, 5, 5], (2, 2, 2), 4),  # a pattern may repeat within itself
    ([], (1, 3, 2), None),
    ([4], (1, 3, 2), None),
  ],
)
def test_the_end_is_the_first_token_that_completes_the_copies(tokens, sizes, end):
  assert rule(*sizes).end(np.array(tokens, np.int32)) == end


def test_the_end_is_that_of_a_naive_search_however_the_tokens_arrive():
  random = np.random.default_rng(0)
  found = 0
  for _ in range(400):
    vocab, length = int(random.integers(1, 6)), int(random.integers(0, 40))
    least, count = int(random.integers(1, 5)), int(random.integers(2, 5))
    most = least + int(random.integers(0, 50))
    tokens = random.integers(0, vocab, length).astype(np.int32)
    wanted = naive(tokens, least, most, count)
    detection = rule(least, most, count)
    assert detection.end(tokens) == wanted
    start, end = 0, None
    while end is None and start < length:
      arrived = min(length, start + int(random.integers(1, 8)))
      end, start = detection.end(tokens[:arrived], start=start), arrived
    assert end == wanted
    found += wanted is not None
  assert 100 < found < 400


class CountedPrompt(tuple):
  """Prompt that records the number of tokens of each slice that is taken of it."""

  slices: list[int]

  def __getitem__(self, key):
    part = super().__getitem__(key)
    if isinstance(key, slice):
      self.slices.append(len(part))
    return part


def test_the_end_of_a_continued_completion_is_found_from_its_last_tokens_alone():
  random = np.random.default_rng(1)
  found = 0
  for _ in range(400):
    most, count = int(random.integers(1, 6)), int(random.integers(2, 4))
    begun, length = int(random.integers(0, 60)), int(random.integers(1, 20))
    tokens = random.integers(0, 3, begun + length).astype(np.int32)
    detection = rule(1, most, count)
    prompt = CountedPrompt([9, 9, *tokens[:begun].tolist()])
    prompt.slices = []
    request = Request(
      uid='x',
      prompt=prompt,
      begun=begun,
      max_tokens=length,
      sampling=Sampling(repetition_detection=detection),
      key=(0,),
    )
    start = int(random.integers(0, length))
    wanted = detection.end(tokens, start=begun + start)
    end = request.repetition_end(tokens[begun:], start=start)
    assert end == (None if wanted is None else wanted - begun)
    assert all(size <= most * count for size in prompt.slices)
    found += wanted is not None
  assert 100 < found < 400


@pytest.mark.parametrize('sizes', [(0, 2, 2), (3, 2, 2), (1, 2000, 2), (1, 2, 1), (1, 2, 5000)])
def test_a_rule_that_means_nothing_is_refused(sizes):
  with pytest.raises(UserError, match=r'repetition_detection: .* wanted'):
    rule(*sizes)
