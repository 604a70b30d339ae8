"""Speculative decoding: the samples of plain decoding, in fewer steps."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_contract import ask_indexed, continued
from fit import assert_fits

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Finish
from jaxrl_llm.rollout.api import Request, Sampling
from jaxrl_llm.rollout.embedded.speculation import SpeculationConfig, propose
from jaxrl_llm.rollout.repetition import RepetitionDetection
from tests.rollout.embedded import engine_test
from tests.rollout.embedded.engine_test import (
  LENGTH,
  V1,
  VOCAB,
  ask,
  ask_all,
  assert_same,
  crowd,
  log_softmax,
  request,
)

runner, params = engine_test.runner, engine_test.params
# Patterns of one token are common in answers of 40 possible tokens.
SPECULATION = SpeculationConfig(tokens=3, ngram_min=1, ngram_max=3)


@pytest.fixture(scope='module')
def engines(runner, params):
  """A plain engine and one with speculative decoding."""
  opened = [
    engine_test.make(runner, params, slots=16, speculation=speculation)[0]
    for speculation in (None, SPECULATION)
  ]
  yield opened
  for engine in opened:
    runner.run(engine.close())


def drafts_of(tokens, config):
  """The drafts after `tokens`, naively."""
  for size in range(config.ngram_max, config.ngram_min - 1, -1):
    for end in range(len(tokens) - 1, size - 1, -1):
      if tokens[end - size : end] == tokens[-size:]:
        copied = list(tokens)
        for i in range(config.tokens):
          copied.append(copied[end + i])
        return copied[len(tokens) :]
  return None


def test_drafts_are_those_of_a_naive_lookup():
  rng = np.random.default_rng(0)
  lengths = rng.integers(1, 24, 600)
  history = rng.integers(0, rng.integers(2, 12, 600)[:, None], (600, 24)).astype(np.int32)
  config = SpeculationConfig(tokens=5, ngram_min=2, ngram_max=4)
  drafts, has_draft = jax.jit(propose, static_argnums=2)(
    jnp.asarray(history), jnp.asarray(lengths - 1, jnp.int32), config
  )
  wanted = [drafts_of(row[:length].tolist(), config) for row, length in zip(history, lengths)]
  assert has_draft.tolist() == [draft is not None for draft in wanted]
  assert 100 < sum(has_draft.tolist()) < 500
  for draft, expected in zip(drafts.tolist(), wanted):
    assert expected is None or draft == expected


@pytest.mark.parametrize(
  'sampling',
  [
    Sampling(),
    Sampling(temperature=0.0),
    Sampling(temperature=1.3, top_k=5, top_p=0.9),
    Sampling(
      temperature=0.5, repetition_detection=RepetitionDetection(max_pattern_size=3, min_count=3)
    ),
  ],
  ids=['sampled', 'greedy', 'filtered', 'repetition'],
)
def test_answers_are_those_of_plain_decoding(runner, engines, sampling):
  asked = [
    request(i, 5, samples=4, max_tokens=30, sampling=sampling, stop_ids=(i, 7)) for i in range(6)
  ]
  plain, speculative = (
    [c for answers in runner.run(ask_all(engine, asked)) for c in answers] for engine in engines
  )
  for completion, wanted in zip(speculative, plain, strict=True):
    assert completion.tokens.tolist() == wanted.tokens.tolist()
    assert completion.finish == wanted.finish
    np.testing.assert_allclose(completion.logprobs, wanted.logprobs, atol=1e-5)
  finishes = {completion.finish for completion in speculative}
  assert finishes >= {Finish.STOP, Finish.LENGTH}
  assert (Finish.REPETITION in finishes) == (sampling.repetition_detection is not None)
  metrics = engines[1].take_metrics()
  assert metrics['speculation/tokens_per_step'] > 1
  assert 0 < metrics['speculation/accepted_ratio'] < 1
  assert not any(key.startswith('speculation/') for key in engines[0].take_metrics())


@pytest.mark.parametrize('top_k', [-1, 4])
def test_samples_follow_the_distribution_of_the_policy(runner, engines, params, top_k):
  """χ² of the three tokens that follow a prompt for which there are drafts, jointly."""
  sampling, count = Sampling(temperature=0.6, top_k=top_k), 2500
  asked = Request(
    uid='χ²', prompt=(3, 4, 5, 3, 4), max_tokens=3, samples=count, key=(1, 2), sampling=sampling
  )
  engine = engines[1]
  engine.take_metrics()
  before = engine.counts.copy()
  completions = runner.run(ask(engine, asked))
  since = engine.counts - before
  assert since['accepted'] > 100 and since['drafted'] - since['accepted'] > 100
  weights = params[V1]

  def probabilities(tokens):
    """Logprobs of the next token after a prompt and `tokens`, by the trainer's forward."""
    logits = engine_test.logits_after(weights, [*asked.prompt, *tokens])[-1] / 0.6
    if top_k > 0:
      logits = np.where(logits >= np.sort(logits)[-top_k], logits, -np.inf)
    return np.exp(log_softmax(logits))

  first = probabilities(())
  second = np.zeros((VOCAB, VOCAB))
  for token in np.flatnonzero(first):
    second[token] = probabilities((token,))
  joint = (first[:, None] * second).reshape(-1)
  tokens = np.stack([completion.tokens for completion in completions])
  assert_fits(tokens[:, 0] * VOCAB + tokens[:, 1], joint)
  common = np.bincount(tokens[:, 0] * VOCAB + tokens[:, 1]).argmax()
  begun = divmod(int(common), VOCAB)
  third = tokens[(tokens[:, :2] == begun).all(axis=1), 2]
  assert len(third) > 100
  assert_fits(third, probabilities(begun))
  of_policy = np.log(first[tokens[:, 0]])
  np.testing.assert_allclose([c.logprobs[0] for c in completions], of_policy, atol=1e-4)


def test_a_request_is_the_same_alone_and_in_any_company(runner, engines):
  asked = [request(i, 4 + i, samples=3, max_tokens=24) for i in range(2)]
  alone = [runner.run(ask(engines[1], each)) for each in asked]
  for seed in range(2):
    found = runner.run(ask_all(engines[1], [*crowd(seed, 12), *asked]))
    for completions, wanted in zip(found[-2:], alone, strict=True):
      assert_same(completions, wanted)


def test_a_completion_in_parts_is_the_completion_in_one_go(runner, engines):
  asked = request(2, samples=4, max_tokens=16)
  whole = runner.run(ask(engines[1], asked))
  for index, wanted in enumerate(whole):
    tokens = wanted.tokens[:6].tolist()
    while len(tokens) < 16:
      part = continued(asked, index, tokens, max_tokens=5)
      ((_, completion),) = runner.run(ask_indexed(engines[1], part))
      tokens += completion.tokens.tolist()
    assert tokens == wanted.tokens.tolist()


def test_a_window_may_reach_beyond_the_longest_sequence(runner, engines):
  asked = request(3, 5, max_tokens=LENGTH - 5, sampling=Sampling(temperature=0.0))
  plain, speculative = (runner.run(ask(engine, asked)) for engine in engines)
  assert speculative[0].tokens.tolist() == plain[0].tokens.tolist()
  assert len(plain[0].tokens) == LENGTH - 5


def test_a_caller_that_leaves_frees_its_slots(runner, engines):
  async def leave():
    stream = engines[1].generate(request(4, samples=20, max_tokens=30))
    await anext(stream)
    await stream.aclose()
    while engines[1].free_slots < 16:
      await asyncio.sleep(0.01)

  runner.run(leave())


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'tokens': 0}, 'tokens: got 0, wanted 1 to 32'),
    ({'tokens': 33}, 'tokens: got 33'),
    ({'ngram_min': 0}, 'ngram_min 0'),
    ({'ngram_min': 3, 'ngram_max': 2}, 'ngram_min 3 and ngram_max 2'),
    ({'ngram_max': 17}, 'ngram_max 17'),
  ],
)
def test_config_refuses_impossible_drafts(fields, message):
  with pytest.raises(UserError, match=f'rollout.embedded.speculation.*{message}'):
    SpeculationConfig(**fields)
