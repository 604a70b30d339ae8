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

  With `seen_until`, segments share prefixes. A segment may continue from an inner position of an
  earlier segment, so the segments of a row form trees. Segments are numbered in depth-first order:
  the other segments that share a token have the numbers that directly follow the number of the
  token's own segment.
  """

  segment_ids: Int[Array, '*batch time']
  positions: Int[Array, '*batch time']
  """Position in the sequence. Without `seen_until`, this is the position within the segment;
  otherwise, shared tokens before the segment count too.
  """
  seen_until: Int[Array, '*batch time'] | None = None
  """Number of the last segment that sees the token; 0 for padding. If None, each segment sees only
  its own tokens.
  """

  @property
  def last_segments(self) -> Int[Array, '*batch time']:
    """Number of the last segment that sees each token."""
    return self.segment_ids if self.seen_until is None else self.seen_until


def visible(
  of_queries: Places, of_keys: Places, *, window: int | None = None
) -> Bool[Array, '*batch time keys']:
  """Returns which keys each query sees. Entry [..., t, s] is True if key s is on the path of query
  t, is not later, and is within `window`. If `window` is None, the distance is not limited.

  The path consists of the query's own segment and of the prefixes that it shares. Shared tokens
  come before the segment's first position, so comparing positions is correct for both.
  """
  segments, positions = (x[..., :, None] for x in of_queries[:2])
  key_segments, key_positions = (x[..., None, :] for x in of_keys[:2])
  seen = (segments > 0) & (key_positions <= positions)
  if of_keys.seen_until is None:
    seen &= segments == key_segments
  else:
    seen &= (key_segments <= segments) & (segments <= of_keys.seen_until[..., None, :])
  return seen if window is None else seen & (positions - key_positions < window)
