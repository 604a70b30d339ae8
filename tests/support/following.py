"""Servers whose answers are greedy: each token is a function of the tokens before it. A continued
answer can thus be compared with an uninterrupted one.
"""

import asyncio

import fleets
import numpy as np
from fake_vllm import Drawn
from fleets import Marked, until

from jaxrl_llm.core.records.sample import Finish
from jaxrl_llm.rollout.api import Sampling

GREEDY = Sampling(temperature=0.0)
LONG = 96


def follower(tokens):
  """Returns the next token of a greedy answer, given the prompt and the tokens so far."""
  return 2 + (sum(tokens) * 7 + len(tokens)) % (fleets.VOCAB - 2)


def greedy(prompt, count):
  tokens = list(prompt)
  for _ in range(count):
    tokens.append(follower(tokens))
  return tokens[len(prompt) :]


def logprob_of(token, step):
  return -(token * 8 + step) / 256


class Greedy(Marked):
  """Draws greedy tokens. The logprob of each identifies the token and the weights."""

  drawn = 0
  """Number of tokens drawn for a test's newest request. The fleet's own requests do not count."""

  async def draw(self, prompt, params, index):
    tokens = list(prompt)
    is_of_test = len(prompt) > 2 and params.max_tokens > 1
    self.drawn = 0 if is_of_test else self.drawn
    for _ in range(params.max_tokens):
      tokens.append(follower(tokens))
      step = int(self.tensors[fleets.NORM][0])
      self.drawn += is_of_test
      yield Drawn([tokens[-1]], [logprob_of(tokens[-1], step)], [self.generation])


def check(request, completion):
  """Checks that tokens and logprobs are those of an uninterrupted greedy answer, under the versions
  of the segments.
  """
  assert completion.tokens.tolist() == greedy(request.prompt, request.max_tokens)
  steps = [s.version.step for s in completion.segments for _ in range(s.start, s.end)]
  wanted = [logprob_of(t, step) for t, step in zip(completion.tokens.tolist(), steps, strict=True)]
  assert completion.logprobs.tolist() == np.array(wanted, np.float32).tolist()
  assert completion.finish == Finish.LENGTH


async def recognised(fleet, place):
  """Waits until the tokens that the server has sent have arrived and would be kept if it were
  lost.
  """
  recognition = fleet.replicas[place.number].client._recognition
  looks = place.server.requests['/weight_info']
  await until(lambda: looks < place.server.requests['/weight_info'] or recognition.recognised > 0)
  await until(lambda: recognition.looking is None)
  await asyncio.sleep(0.05)


async def until_sent(place, count):
  await until(lambda: place.policy.drawn >= count)
