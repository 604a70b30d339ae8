"""Which shared batch comes next, after any number of restarts of the run that shares them."""

import pytest

from jaxrl_llm.replay.shared import Opening, next_batch


def openings(*steps):
  return [
    Opening(store='s', attempt=i, step=step, vocabulary='v') for i, step in enumerate(steps, 1)
  ]


@pytest.mark.parametrize(
  ('starts', 'at', 'wanted'),
  [
    ((), (None, 0), None),
    ((3,), (None, 0), (1, 3, False)),
    ((0,), (1, 5), (1, 5, False)),
    # Restarted where the reader is, behind it, and ahead of it: batches 3 and 4 are not read yet.
    ((0, 5), (1, 5), (2, 5, False)),
    ((0, 3), (1, 5), (2, 3, True)),
    ((0, 5), (1, 3), (1, 3, False)),
    # Restarted again before it shared anything, and after.
    ((0, 3, 3), (1, 5), (3, 3, True)),
    ((0, 3, 4), (1, 5), (2, 3, True)),
    ((0, 3, 4), (2, 4), (3, 4, False)),
    # The reader first looks after restarts.
    ((0, 0), (None, 0), (2, 0, False)),
    ((0, 2), (None, 0), (1, 0, False)),
  ],
)
def test_the_next_batch(starts, at, wanted):
  assert next_batch(openings(*starts), *at) == wanted
