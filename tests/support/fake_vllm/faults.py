"""Faults and latency of a fake server, set by tests."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable

import numpy as np

from fake_vllm.requests import GENERATE
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rollout.api import WORD


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latency:
  """Additional seconds of a completion, with a lognormal distribution: exp(N(log median_s,
  sigma²)).

  The seconds are spread over the tokens that the request allows. If the completion ends earlier,
  the remaining seconds pass at its end. The number of seconds depends only on `seed`, on the
  request's seed and on the sample's index.
  """

  median_s: float = 0.0
  """Median of the additional seconds; 0 for none."""
  sigma: float = 0.0
  """Standard deviation of the logarithm of the seconds. At 1, one completion in 100 takes at least
  ten times the median.
  """
  token_s: float = 0.0
  """Seconds between two tokens, in addition to the other delay."""
  seed: int = 0

  def __post_init__(self):
    if not all(0 <= value < math.inf for value in (self.median_s, self.sigma, self.token_s)):
      raise UserError(
        f'latency: median_s={self.median_s}, sigma={self.sigma} and token_s={self.token_s}, wanted '
        'finite numbers >= 0'
      )

  def seconds(self, request_seed: int, index: int) -> float:
    normal = np.random.default_rng([self.seed, request_seed % WORD**2, index]).standard_normal()
    return self.median_s * math.exp(self.sigma * normal)


class Fault(enum.StrEnum):
  """Kind of fault of a request."""

  INTERNAL_ERROR = '500'
  UNAVAILABLE = '503'
  HANG = 'hang'
  """The request is never answered, and its connection stays open."""
  CUT = 'cut'
  """The connection ends in the middle of the body. A stream ends when half of the tokens have been
  sent.
  """
  ABORT = 'abort'
  """Completions end half-way with finish_reason 'abort'. For generate requests only."""
  DELAY = 'delay'
  """`Faults.delay_s` seconds pass before the request is handled."""
  DIE = 'die'
  """The process is gone: it has no listening socket, and its connections are broken off."""
  CORE = 'core'
  """The engine core is gone. Waiting requests are answered with 500, and /health with 503. Soon
  afterwards, the server dies as with DIE.
  """


@dataclasses.dataclass(kw_only=True)
class Faults:
  """Faults of a server. A test can set any field at any time; it applies to later requests."""

  fault: Fault | None = None
  path: str = GENERATE
  """Path of the requests that meet the fault."""
  after: int = 0
  """Number of requests that are still served normally before the fault. Counts down."""
  times: int | None = None
  """Number of requests that still meet the fault. Counts down. If None, all requests meet it."""
  delay_s: float = 0.0
  """Seconds of Fault.DELAY."""
  stall_at: int | None = None
  """Number of tokens after which a completion stalls, until this is None again."""
  stale: str | None = None
  """Hugging Face name of a tensor that updates silently leave unchanged."""
  prompt_logprob_shift: float = 0.0
  """Constant that is added to the logprobs of prompts."""
  spoil: Callable[[bytes], bytes] | None = None
  """Called with each event of a stream, and returns the bytes to send instead. If None, events are
  unchanged.
  """
  die_in_update: bool = False
  """Whether the process dies when the next update has written its tensors."""

  def meets(self, path: str) -> Fault | None:
    """Returns the fault of the next request to `path`, and counts that request."""
    if self.fault is None or path != self.path or self.times == 0:
      return None
    if self.after > 0:
      self.after -= 1
      return None
    if self.times is not None:
      self.times -= 1
    return self.fault
