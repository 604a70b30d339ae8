"""What goes wrong at a fake server, and how slow it is, as tests set it."""

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
  """Seconds that a completion takes longer, lognormal: exp(N(log median_s, sigma²)).

  They are spread over the tokens that the request allows; what is left when it ends earlier is
  waited at its end. The number is a function of `seed`, the request's seed and the sample's index,
  whatever else is going on.
  """

  median_s: float = 0.0
  """0 = none."""
  sigma: float = 0.0
  """Of the logarithm: at 1, one completion in 100 takes ten times the median or more."""
  seed: int = 0

  def __post_init__(self):
    if not (0 <= self.median_s < math.inf and 0 <= self.sigma < math.inf):
      raise UserError(
        f'latency: median_s={self.median_s} and sigma={self.sigma}, wanted finite numbers >= 0'
      )

  def seconds(self, request_seed: int, index: int) -> float:
    normal = np.random.default_rng([self.seed, request_seed % WORD**2, index]).standard_normal()
    return self.median_s * math.exp(self.sigma * normal)


class Fault(enum.StrEnum):
  """What a request meets."""

  INTERNAL_ERROR = '500'
  UNAVAILABLE = '503'
  HANG = 'hang'
  """Never an answer, on an open connection."""
  CUT = 'cut'
  """The connection ends in the middle of the body, of a stream once half of the tokens are sent."""
  ABORT = 'abort'
  """Completions end half-way with finish_reason abort (generate only)."""
  DELAY = 'delay'
  """`Faults.delay_s` before the request is looked at."""
  DIE = 'die'
  """The process is gone: no listening socket, connections broken off."""
  CORE = 'core'
  """The engine core is gone: 500 to whoever waits, 503 on /health, and soon after that like DIE."""


@dataclasses.dataclass(kw_only=True)
class Faults:
  """What goes wrong; a test sets any of it at any time, and it holds for what comes then."""

  fault: Fault | None = None
  path: str = GENERATE
  """Whose requests meet the fault."""
  after: int = 0
  """Requests that are served well before; counts down."""
  times: int | None = None
  """Requests that meet the fault; counts down; None = all."""
  delay_s: float = 0.0
  """Of Fault.DELAY."""
  stall_at: int | None = None
  """A completion that has so many tokens gets no more until this is None again."""
  stale: str | None = None
  """Hugging Face name of a tensor that updates leave as it was, without a word."""
  prompt_logprob_shift: float = 0.0
  """Added to the logprobs of prompts."""
  spoil: Callable[[bytes], bytes] | None = None
  """Returns what a stream sends instead of an event."""
  die_in_update: bool = False
  """Whether the process is gone when the next update has written its tensors."""

  def meets(self, path: str) -> Fault | None:
    """What the next request to a path meets; counts it."""
    if self.fault is None or path != self.path or self.times == 0:
      return None
    if self.after > 0:
      self.after -= 1
      return None
    if self.times is not None:
      self.times -= 1
    return self.fault
