"""Places of tokens, and the visibility rule that every attention implementation follows."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Bool, Int

MASKED, FLOOR = -1e30, -1e29
"""MASKED is the score of an unseen key, and FLOOR is the lower bound of a query's maximum score.
exp(MASKED - FLOOR) is 0, so unseen keys have weight 0 even for a query that sees no key. The scores
of finite inputs are far above both constants.
"""


class Places(NamedTuple):
  """Places of tokens in rows. Segment 0 is padding: no token sees padding, and padding sees no
  token.
  """

  segment_ids: Int[Array, '*batch time']
  positions: Int[Array, '*batch time']
  """Position within the segment."""


def visible(
  of_queries: Places, of_keys: Places, *, window: int | None = None
) -> Bool[Array, '*batch time keys']:
  """Returns which keys each query sees. Entry [..., t, s] is True if key s is in the same segment
  as query t, is not later, and is within `window`. If `window` is None, the distance is not
  limited.
  """
  segments, positions = (x[..., :, None] for x in of_queries)
  key_segments, key_positions = (x[..., None, :] for x in of_keys)
  seen = (segments == key_segments) & (segments > 0) & (key_positions <= positions)
  return seen if window is None else seen & (positions - key_positions < window)
