"""Token places, and the visibility rule that every attention implementation follows."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Bool, Int

MASKED, FLOOR = -1e30, -1e29
"""Score of an unseen key, and lower bound of a query's maximum score. exp(MASKED - FLOOR) is 0, so
unseen keys have weight 0 even if a query sees none. The scores of finite inputs are far above
both.
"""


class Places(NamedTuple):
  """Places of tokens in rows. Segment 0 is padding, which neither sees nor is seen by any token."""

  segment_ids: Int[Array, '*batch time']
  positions: Int[Array, '*batch time']
  """Position within the segment."""


def visible(
  of_queries: Places, of_keys: Places, *, window: int | None = None
) -> Bool[Array, '*batch time keys']:
  """Entry [..., t, s] is True if query t sees key s, which must be in its segment, not later, and
  within `window`.
  """
  segments, positions = (x[..., :, None] for x in of_queries)
  key_segments, key_positions = (x[..., None, :] for x in of_keys)
  seen = (segments == key_segments) & (segments > 0) & (key_positions <= positions)
  return seen if window is None else seen & (positions - key_positions < window)
