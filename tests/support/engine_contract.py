"""Requirements on every engine, whatever its source of tokens: the body of the contract tests."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from serving import LENGTH, VOCAB, ask, distributions, forward, request, weights_of

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.records.sample import Finish
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.api import Engine, Request, Sampling
from jaxrl_llm.rollout.repetition import RepetitionDetection

A, B, C, D, E = (Version(0, step) for step in range(5))


async def hold(engine: Engine, model, *, atol: float) -> None:
  """Checks a started engine that has no weights yet.

  Args:
    model: model of VOCAB tokens that allows sequences of 400 tokens.
    atol: absolute tolerance of logprobs against the model's own forward pass.
  """
  assert isinstance(engine, Engine)
  init = jax.jit(model.init)
  first, second = (init(jax.random.key(seed)) for seed in (1, 2))
  assert engine.version is None
  with pytest.raises(RuntimeError):
    await ask(engine, request(0))
  host = jax.tree.map(np.array, first)
  await engine.load(weights_of(model, host, A))
  for leaf in jax.tree.leaves(host):
    leaf[...] = 0.0  # The engine must have its own copy.
  assert engine.version == A
  await _tokens_are_the_policys(engine, model, first, A, atol)
  await engine.load(weights_of(model, second, B))
  assert engine.version == B
  await _tokens_are_the_policys(engine, model, second, B, atol)
  await _samples_do_not_depend_on_their_number(engine)
  await _repetition_ends_a_completion(engine)
  await completions_continue(engine, model, second, atol=atol)
  await _bad_requests_are_refused(engine)
  await _weights_may_get_another_name(engine, model, first, atol)
  await _a_caller_may_leave(engine)
  assert all(isinstance(value, float) for value in engine.take_metrics().values())


async def _tokens_are_the_policys(engine, model, params, version, atol) -> None:
  for temperature, samples in ((0.0, 1), (0.7, 4), (1.0, 4)):
    # A quarter of the vocabulary are stop ids, so that some completions stop and some do not.
    asked = request(
      5,
      max_tokens=6,
      samples=samples,
      sampling=Sampling(temperature=temperature),
      stop_ids=tuple(range(0, VOCAB, 4)),
    )
    for completion in await ask(engine, asked):
      tokens = completion.tokens.tolist()
      stopped = tokens[-1] in asked.stop_ids
      assert completion.finish == (Finish.STOP if stopped else Finish.LENGTH)
      assert stopped or len(tokens) == 6
      assert not set(tokens[:-1]) & set(asked.stop_ids)
      assert [s.version for s in completion.segments] == [version]
      wanted = forward(model, params, [*asked.prompt, *tokens], temperature=temperature or 1.0)[
        len(asked.prompt) :
      ]
      np.testing.assert_allclose(completion.logprobs, wanted, atol=atol)
      if temperature == 0:
        best = _most_probable(model, params, [*asked.prompt, *tokens])[len(asked.prompt) :]
        assert (np.exp(wanted) >= best - 1e-3).all(), 'greedy takes the most probable token'


def _most_probable(model, params, tokens) -> np.ndarray:
  """Returns the greatest probability of any token at each position. The first entry is 0."""
  positions = np.arange(LENGTH)[None]
  padded = np.pad(np.asarray(tokens, np.int32), (0, LENGTH - len(tokens)))[None]
  hidden = jax.jit(model.apply)(
    params, padded, positions, (positions < len(tokens)).astype(np.int32)
  )
  probabilities = jax.nn.softmax(hidden[0] @ model.head_kernel(params).T)
  return np.r_[0.0, np.asarray(probabilities).max(-1)[: len(tokens) - 1]]


async def _samples_do_not_depend_on_their_number(engine) -> None:
  two, four = await ask(engine, request(6, samples=2)), await ask(engine, request(6, samples=4))
  for one, same in zip(two, four[:2], strict=True):
    assert one.tokens.tolist() == same.tokens.tolist()
  assert len({tuple(c.tokens.tolist()) for c in four}) > 1, 'samples differ'
  other = await ask(engine, request(6, key=(7, 9)))
  assert other[0].tokens.tolist() != four[0].tokens.tolist(), 'the key counts'


async def _repetition_ends_a_completion(engine) -> None:
  """A completion must end at the first token that completes a repetition, in every engine."""
  found = set()
  for size, count in ((1, 2), (3, 2)):
    rule = RepetitionDetection(min_pattern_size=1, max_pattern_size=size, min_count=count)
    for number in range(2):
      asked = {'max_tokens': 40, 'samples': 4, 'stop_ids': (1,)}
      free = await ask(engine, request(number, **asked))
      ended = await ask(
        engine, request(number, **asked, sampling=Sampling(repetition_detection=rule))
      )
      for whole, cut in zip(free, ended, strict=True):
        tokens = whole.tokens.tolist()
        ends = [
          end
          for end in range(1, len(tokens))
          if any(
            tokens[end - k * count : end] == tokens[end - k : end] * count
            for k in range(1, size + 1)
            if k * count <= end
          )
        ]
        assert cut.tokens.tolist() == tokens[: ends[0] if ends else None]
        assert cut.finish == (Finish.REPETITION if ends else whole.finish)
        assert cut.segments[-1].end == len(cut.tokens)
        found.add(cut.finish)
  assert Finish.REPETITION in found


async def completions_continue(engine, model, params, *, atol: float, count: int = 240) -> None:
  """Checks that completions can be continued after any number of tokens, on an engine that serves
  `params`.

  Args:
    atol: absolute tolerance of logprobs against the model's own forward pass.
    count: number of completions of the χ² test.
  """
  greedy = request(12, max_tokens=24, sampling=Sampling(temperature=0.0))
  (whole,) = await ask(engine, greedy)
  tokens, logprobs = [], []
  while len(tokens) < 24:
    part = continued(greedy, 0, tokens, max_tokens=min(7, 24 - len(tokens)))
    (found,) = await ask_indexed(engine, part)
    assert found[1].segments[0].start == 0
    tokens += found[1].tokens.tolist()
    logprobs += found[1].logprobs.tolist()
  known = distributions(model, params, [*greedy.prompt, *tokens])[len(greedy.prompt) - 1 : -1]
  np.testing.assert_allclose(logprobs, known[np.arange(24), tokens], atol=atol)
  if tokens != whole.tokens.tolist():
    at = np.flatnonzero(whole.tokens != tokens)[0]
    best = np.sort(known[at])[-2:]
    assert best[1] - best[0] < 1e-4, f'another token at {at}, with a margin of {best[1] - best[0]}'
  await _first_tokens_after_a_cut_are_new(engine, model, params, count)


async def _first_tokens_after_a_cut_are_new(engine, model, params, count) -> None:
  """Checks that tokens after a cut use new random numbers, with a χ² test of a table of quartiles:
  the quartile of each completion's first token in its distribution, and the quartile of its first
  token after the cut. If the random numbers were repeated, the counts would lie on the diagonal.
  """
  asked = request(8, max_tokens=3, samples=count)
  begun = await ask(engine, asked)
  parts = [continued(asked, i, c.tokens.tolist(), max_tokens=1) for i, c in enumerate(begun)]
  after = await asyncio.gather(*(ask_indexed(engine, part) for part in parts))
  rows = [
    [*asked.prompt, *c.tokens.tolist(), *further.tokens.tolist()]
    for c, ((_, further),) in zip(begun, after, strict=True)
  ]
  tokens = np.array(rows, np.int32)
  positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  hidden = jax.jit(model.apply)(params, tokens, positions, np.ones_like(tokens))
  probabilities = np.asarray(jax.nn.softmax(hidden @ model.head_kernel(params).T), np.float64)

  def quartiles(at):
    """Returns, per row, the quartile in which the token at position `at` lies. The token's share of
    the distribution is spread evenly.
    """
    row, drawn = probabilities[:, at - 1], tokens[:, at]
    below = np.array([p[:token].sum() for p, token in zip(row, drawn)])
    own = row[np.arange(count), drawn]
    spread = np.random.default_rng(at).random(count)
    return np.minimum(4 * (below + spread * own), 3).astype(int)

  table = np.zeros((4, 4))
  np.add.at(table, (quartiles(5), quartiles(8)), 1)
  for margin in (table.sum(0), table.sum(1)):
    assert ((margin - count / 4) ** 2 / (count / 4)).sum() < 16.27, '3 degrees of freedom, 0.1 %'
  expected = np.outer(table.sum(1), table.sum(0)) / count
  assert ((table - expected) ** 2 / expected).sum() < 27.88, '9 degrees of freedom, 0.1 %'


def continued(asked: Request, index: int, begun: Sequence[int], **fields) -> Request:
  """Returns the request that continues one completion after its first tokens, `begun`."""
  return dataclasses.replace(
    asked, prompt=(*asked.prompt, *begun), begun=len(begun), first=index, samples=1, **fields
  )


async def ask_indexed(engine, asked: Request) -> list:
  return [pair async for pair in engine.generate(asked)]


async def _bad_requests_are_refused(engine) -> None:
  with pytest.raises(UserError, match='exceed the maximum length of 400'):
    await ask(engine, request(1, length=390, max_tokens=24))
  with pytest.raises(UserError, match=f'vocabulary of {VOCAB}'):
    await ask(engine, request(1, prompt=(3, VOCAB)))


async def _weights_may_get_another_name(engine, model, params, atol) -> None:
  """Relabelling changes only the version: of new completions and of those in progress, until the
  next load.
  """
  asked = request(10, samples=2, max_tokens=8)
  before = await ask(engine, asked)
  waiting = asyncio.create_task(ask(engine, request(11, samples=2, max_tokens=200)))
  await asyncio.sleep(0)
  await engine.relabel(C)
  assert engine.version == C
  assert {s.version for completion in await waiting for s in completion.segments} == {C}
  await engine.relabel(D)
  for old, new in zip(before, await ask(engine, asked), strict=True):
    assert ([s.version for s in old.segments], [s.version for s in new.segments]) == ([B], [D])
    assert new.tokens.tolist() == old.tokens.tolist()
    np.testing.assert_allclose(new.logprobs, old.logprobs, atol=atol)
  await engine.load(weights_of(model, params, E))
  assert engine.version == E
  for completion in await ask(engine, asked):
    assert [s.version for s in completion.segments] == [E]
    wanted = forward(model, params, [*asked.prompt, *completion.tokens.tolist()])[
      len(asked.prompt) :
    ]
    np.testing.assert_allclose(completion.logprobs, wanted, atol=atol)


async def _a_caller_may_leave(engine) -> None:
  async for _ in engine.generate(request(8, samples=8, max_tokens=200)):
    break
  assert len(await ask(engine, request(9))) == 1


async def hold_closed(engine: Engine) -> None:
  await engine.close()
  with pytest.raises(RunError, match='closed'):
    await ask(engine, request(1))
