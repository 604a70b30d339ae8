"""The self-test of speculative decoding, on servers that sample rightly and in wrong ways."""

import asyncio

import numpy as np
import pytest

from jaxrl_llm.core.net.client import Malformed
from jaxrl_llm.core.records.sample import Finish, Segment
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.api import Completion
from jaxrl_llm.rollout.vllm.selftest import chi_square, sampling_fault

VOCAB = 20


class Bigrams:
  """A server whose next token depends on the last one.

  Its drafts name the most probable token. As a fault, it can accept drafts without drawing, keep a
  rejected draft's probability, report the drafts' logprobs, or draft nothing.
  """

  def __init__(self, fault=None):
    logits = 1.5 * np.random.default_rng(1).normal(size=(VOCAB, VOCAB))
    self.logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    self.fault, self.drafted = fault, 0

  async def drafted_tokens(self):
    return float(self.drafted)

  def draw(self, rng, last):
    p = np.exp(self.logprobs[last])
    draft = int(p.argmax())
    if self.fault != 'no drafts':
      self.drafted += 1
    if self.fault == 'greedy' and rng.random() < 0.3:
      return draft
    if self.fault == 'with replacement' and rng.random() < p[draft]:
      return draft
    return int(rng.choice(VOCAB, p=p / p.sum()))

  async def generate(self, request, index, *, seed, deadline_s):
    if self.fault == 'malformed':
      raise Malformed('a token of probability 0 was drawn')
    rng = np.random.default_rng([seed, *request.key, index])
    tokens = [request.prompt[-1]]
    for _ in range(request.max_tokens):
      tokens.append(self.draw(rng, tokens[-1]))
    logprobs = self.logprobs[tokens[:-1], tokens[1:]].astype(np.float32)
    if self.fault == 'logprobs':
      logprobs[::3] = 0
    segment = Segment(
      start=0, end=len(logprobs), version=Version(0, 0), engine='x', finish='length'
    )
    return Completion(
      tokens=np.array(tokens[1:], np.int32),
      logprobs=logprobs,
      finish=Finish.LENGTH,
      segments=(segment,),
    )

  async def ranked_logprobs(self, tokens, *, count, deadline_s):
    rows = self.logprobs[tokens[:-1]]
    logprobs = rows[np.arange(len(rows)), tokens[1:]]
    ranks = 1 + (rows > logprobs[:, None]).sum(1)
    top = -np.sort(-rows, axis=1)[:, :count]
    return (
      np.r_[0, logprobs].astype(np.float32),
      np.r_[1, ranks].astype(np.int32),
      np.r_[top[:1], top].astype(np.float32),
    )


def fault_of(server):
  return asyncio.run(
    sampling_fault(server, vocab=VOCAB, max_length=400, tolerance=1e-3, deadline_s=10)
  )


def test_exact_sampling_passes():
  assert fault_of(Bigrams()) is None


@pytest.mark.parametrize(
  ('fault', 'words'),
  [
    ('greedy', 'do not follow the distribution without drafts: χ²'),
    ('with replacement', 'do not follow the distribution'),
    ('logprobs', 'the logprob of a sampled token differs by'),
    ('malformed', 'a token of probability 0 was drawn'),
    ('no drafts', 'only 0 tokens were drafted in the self-test, wanted at least 200'),
  ],
)
def test_wrong_sampling_is_found(fault, words):
  assert words in fault_of(Bigrams(fault))


def test_the_test_rejects_right_samples_seldom():
  """At a level of 0.1 %, of 2,000 tests of distributions that differ from token to token."""
  rng = np.random.default_rng(0)
  probabilities = -np.sort(-rng.dirichlet(np.full(8, 0.6), 400), axis=1)
  cumulative = probabilities.cumsum(1)
  rejected = 0
  for _ in range(2000):
    ranks = 1 + (cumulative < rng.random((400, 1))).sum(1)
    statistic, limit = chi_square(np.minimum(ranks, 8), probabilities[:, :4])
    rejected += statistic > limit
  assert rejected <= 8


@pytest.mark.parametrize(('freedom', 'wanted'), [(1, 10.83), (4, 18.47)])
def test_the_limit_is_the_quantile_of_the_distribution(freedom, wanted):
  probabilities = np.full((1000, freedom), 1 / (freedom + 1))
  ranks = np.tile(np.arange(freedom + 1) + 1, 1000)[:1000]
  assert chi_square(ranks, probabilities)[1] == pytest.approx(wanted, rel=0.04)
