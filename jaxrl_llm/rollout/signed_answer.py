"""The form in which a front signs a server's answer. It is used for completions that explorers
fetch (`rollout.api.Errand`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgpack
import numpy as np
from jaxtyping import Float32, Int32

from jaxrl_llm.core.files import parse_msgpack


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SignedAnswer:
  """A server's answer to a request for one sample, in the form that its front signs."""

  tokens: Int32[np.ndarray, 'time']
  logprobs: Float32[np.ndarray, 'time']
  finish: str | None
  """Reason that the server gave for the end of the completion."""
  spans: Sequence[tuple[str, int, int]]
  """(label of the weights, start, end) of each range of tokens that one version sampled."""

  def encode(self) -> bytes:
    return msgpack.packb(
      {
        'tokens': self.tokens.astype('<i4').tobytes(),
        'logprobs': self.logprobs.astype('<f4').tobytes(),
        'finish': self.finish,
        'spans': [list(span) for span in self.spans],
      }
    )

  @classmethod
  def decode(cls, data: bytes) -> SignedAnswer:
    """Returns the answer that `encode` has encoded. Raises ValueError, KeyError or TypeError if the
    data is not an encoded answer.
    """
    row = parse_msgpack(data)
    return cls(
      tokens=np.frombuffer(row['tokens'], '<i4').astype(np.int32),
      logprobs=np.frombuffer(row['logprobs'], '<f4').astype(np.float32),
      finish=row['finish'],
      spans=[(str(label), int(start), int(end)) for label, start, end in row['spans']],
    )
