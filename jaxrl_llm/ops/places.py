"""Where tokens stand, and the one rule of who sees whom that every implementation of attention follows."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Bool, Int

MASKED, FLOOR = -1e30, -1e29
"""Score of a key that is not seen, and the least maximum of a row: exp(MASKED - FLOOR) is 0 even where a row sees
nothing, while no score of finite inputs comes near."""


class Places(NamedTuple):
  """Of the tokens of each row. Segment 0 is padding, which sees nothing and is seen by nobody."""

  segment_ids: Int[Array, '*batch time']
  positions: Int[Array, '*batch time']
  """Within the segment."""


def visible(of_queries: Places, of_keys: Places, *, window: int | None = None) -> Bool[Array, '*batch time keys']:
  """Entry [..., t, s]: query t sees key s, which is of the same segment, not later, and nearer than `window`."""
  segments, positions = (x[..., :, None] for x in of_queries)
  key_segments, key_positions = (x[..., None, :] for x in of_keys)
  seen = (segments == key_segments) & (segments > 0) & (key_positions <= positions)
  return seen if window is None else seen & (positions - key_positions < window)
