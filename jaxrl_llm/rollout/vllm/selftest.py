"""Self-test of servers with speculative decoding: checks that tokens sampled at temperature 1
follow the distribution that the server's own forward pass computes without drafts.

vLLM 0.32 fails this test with n-gram drafts on CPUs, because it samples tokens of probability 0.
"""

from __future__ import annotations

import asyncio
import math

import numpy as np
from jaxtyping import Float, Int

from jaxrl_llm.core.errors import first_cause
from jaxrl_llm.core.net.client import Lost
from jaxrl_llm.rollout.api import Request
from jaxrl_llm.rollout.vllm.api import SpeculativeServer

_PROMPTS, _SAMPLES, _TOKENS, _AT_A_TIME = 8, 8, 48, 16
_PROMPT_TOKENS = 48
_RANKS = 4
"""Number of most probable tokens that are counted individually; all others are counted together."""
_MIN_DRAFTED = 200
"""Number of drafted tokens below which the test has no result."""
_DEVIATIONS = 3.09
"""Standard normal quantile for the significance level of the χ² test, 0.1 %."""


async def sampling_fault(
  server: SpeculativeServer, *, vocab: int, max_length: int, tolerance: float, deadline_s: float
) -> str | None:
  """Returns the reason why a server with speculative decoding must not serve requests with a
  temperature above 0, or None if it may. A server that crashes during the test fails the test.

  The server continues prompts that repeat themselves, at temperature 1. The reference is its own
  logprobs of the same sequences, sent as prompts: prompt logprobs are computed without drafts, and
  the probe has shown that they match the trainer's. For each rank (most probable token,
  second, …, all others together), a χ² test compares the number of sampled tokens with the sum of
  their probabilities. These counts vary less than multinomial counts, so the test rejects a correct
  server with a probability of at most 0.1 %.

  Args:
    vocab: size of the vocabulary.
    max_length: length of the longest sequence that the server accepts, in tokens.
    tolerance: maximum absolute difference between the logprobs of a sampled token and of the same
      token in a prompt.
    deadline_s: deadline of each request.
  """
  before = await server.drafted_tokens()
  places = asyncio.Semaphore(_AT_A_TIME)

  async def sample(request: Request, index: int) -> _Sampled:
    # Wait 'place': bounded by the deadlines of earlier requests.
    async with places:
      completion = await server.generate(request, index, seed=0, deadline_s=deadline_s)
      tokens = [*request.prompt, *completion.tokens.tolist()]
      logprobs, ranks, top = await server.ranked_logprobs(
        tokens, count=_RANKS, deadline_s=deadline_s
      )
    start = len(request.prompt)
    return completion.logprobs, logprobs[start:], ranks[start:], top[start:]

  try:
    async with asyncio.TaskGroup() as group:
      samples = [
        group.create_task(sample(request, index))
        for request in _requests(vocab, max_length)
        for index in range(_SAMPLES)
      ]
    drafted = await server.drafted_tokens() - before
  except BaseExceptionGroup as errors:
    if isinstance(error := first_cause(errors), Lost):
      return str(error)
    raise error from None
  reported, logprobs, ranks, top = (
    np.concatenate(parts) for parts in zip(*(s.result() for s in samples), strict=True)
  )
  worst = float(np.abs(reported - logprobs).max())
  if not worst <= tolerance:
    return (
      f'the logprob of a sampled token differs by {worst:.3g} from that of the same token in a '
      f'prompt, wanted at most {tolerance:g}'
    )
  statistic, limit = chi_square(ranks, np.exp(top.astype(np.float64)))
  if statistic > limit:
    return (
      f'{len(ranks)} sampled tokens do not follow the distribution without drafts: χ² '
      f'{statistic:.1f}, wanted at most {limit:.1f}'
    )
  if drafted < _MIN_DRAFTED:
    return (
      f'only {drafted:g} tokens were drafted in the self-test, wanted at least {_MIN_DRAFTED}, so '
      'the test has no result'
    )
  return None


_Sampled = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Four arrays with an entry for each sampled token: reported logprobs, logprobs in a prompt, ranks,
and logprobs of the most probable tokens.
"""


def _requests(vocab: int, max_length: int) -> list[Request]:
  """Returns requests whose prompts lead to drafts: repeated patterns, and random sequences of few
  distinct tokens.
  """
  rng = np.random.default_rng(0)
  length = max(1, min(_PROMPT_TOKENS, max_length // 2))
  requests = []
  for number in range(_PROMPTS):
    few = rng.integers(0, vocab, 6)
    tokens = np.tile(few, length)[:length] if number % 2 else rng.choice(few, length)
    requests.append(
      Request(
        uid=f'self-test/{number}',
        prompt=tuple(tokens.tolist()),
        max_tokens=max(1, min(_TOKENS, max_length - length)),
        samples=_SAMPLES,
        key=(number,),
      )
    )
  return requests


def chi_square(
  ranks: Int[np.ndarray, 'tokens'], probabilities: Float[np.ndarray, 'tokens count']
) -> tuple[float, float]:
  """Returns (χ² of the ranks of the sampled tokens, critical value of χ² at a significance level of
  0.1 %). The critical value is the approximation of Wilson and Hilferty (1931).

  Args:
    ranks: rank of each sampled token in its distribution, from 1.
    probabilities: probabilities of the most probable tokens of each distribution, in falling order.
  """
  count = probabilities.shape[1]
  expected = np.r_[probabilities.sum(0), len(ranks) - probabilities.sum()]
  counts = np.bincount(np.minimum(ranks, count + 1) - 1, minlength=count + 1)
  # A rank whose expected count is below 5 is merged with the rank before it.
  while len(expected) > 1 and expected.min() < 5:
    at = max(int(expected.argmin()), 1)
    expected = np.r_[expected[: at - 1], expected[at - 1] + expected[at], expected[at + 1 :]]
    counts = np.r_[counts[: at - 1], counts[at - 1] + counts[at], counts[at + 1 :]]
  freedom = max(1, len(expected) - 1)
  spread = 2 / (9 * freedom)
  limit = freedom * (1 - spread + _DEVIATIONS * math.sqrt(spread)) ** 3
  return float(((counts - expected) ** 2 / np.maximum(expected, 1e-9)).sum()), limit
