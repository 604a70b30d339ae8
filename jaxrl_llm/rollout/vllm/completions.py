"""Generation of completions by the servers of a fleet, with retries.

Invariant: each completion is returned once, and its tokens were sampled under versions that the
server was proven to have loaded. Requests in flight on a lost server are retried. If their answers
are streamed, the retries continue after the tokens that have arrived (see `stream`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.net.client import Lost
from jaxrl_llm.core.types import Version
from jaxrl_llm.rollout.api import Completion, Request, Undelivered
from jaxrl_llm.rollout.vllm.answer import Begun
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.vllm.replica import Replica, ReplicaState
from jaxrl_llm.rollout.vllm.roster import Roster
from jaxrl_llm.rollout.vllm.stream import Answer, Broken
from jaxrl_llm.rollout.vllm.updates import Served


class Completions:
  """Samples the completions of requests on the servers that serve the current version."""

  def __init__(
    self,
    roster: Roster,
    config: VllmConfig,
    served: Served,
    *,
    seed: int,
    repair: Callable[[Replica, str], None],
    named: Callable[[Completion], Completion],
  ):
    """
    Args:
      seed: seed of all sampling, combined with each request's key.
      repair: takes a server that has lost a request out of service, given the reason, and recovers
        or restarts it in the background.
      named: returns a completion with its versions renamed (see `Updates.named`).
    """
    self._roster, self._config, self._served = roster, config, served
    self._seed, self._repair, self._named = seed, repair, named

  async def generate(self, request: Request) -> AsyncIterator[tuple[int, Completion]]:
    """Yields (index of the sample, completion) of each sample of a request as it ends.

    Raises:
      UserError: the servers cannot sample the request.
      RunError: a sample was lost too often, or the fleet has ended.
    """
    counts = self._roster.counts
    self._check(request)
    results: asyncio.Queue[tuple[int, Completion] | Exception] = asyncio.Queue()
    samples = [
      asyncio.create_task(self._sample(request, i, results))
      for i in range(request.first, request.first + request.samples)
    ]
    try:
      for _ in samples:
        # Wait 'completion': bounded: each of `max_retries` tries has a deadline.
        result = await results.get()
        if isinstance(result, Exception):
          raise result
        counts['delivered_tokens'] += len(result[1].tokens)
        yield result
    finally:
      for sample in samples:
        sample.cancel()
      await asyncio.gather(*samples, return_exceptions=True)
      while not results.empty():
        result = results.get_nowait()
        if not isinstance(result, Exception):
          counts['unwanted_tokens'] += len(result[1].tokens)

  def _check(self, request: Request) -> None:
    where, length = f'request {request.uid}', len(request.prompt)
    if length + request.max_tokens > self._served.max_length:
      raise UserError(
        f'{where}: {length} prompt tokens and max_tokens {request.max_tokens} exceed the maximum '
        f'length of {self._served.max_length} of engine {self._roster.name}; raise '
        'rollout.max_prompt_length or max_response_length, or request fewer'
      )
    tokens = (*request.prompt, *request.stop_ids)
    if min(tokens) < 0 or max(tokens) >= self._served.vocab_size:
      raise UserError(
        f"{where}: token ids outside the vocabulary of {self._served.vocab_size}; use the model's "
        'tokenizer'
      )
    if reason := self._config.unsupported(request.sampling):
      raise UserError(f'{where}: {reason}')
    if request.sampling.temperature > 0:
      self._roster.check_samplers()

  async def _sample(self, request: Request, index: int, results: asyncio.Queue) -> None:
    try:
      results.put_nowait((index, await self._complete(request, index)))
    except Exception as error:  # `generate` raises the error again.
      results.put_nowait(error)

  async def _complete(self, request: Request, index: int) -> Completion:
    """Generates one completion, with up to `max_retries` retries, each of which continues after the
    tokens that have arrived. Retries after a server has left the fleet do not count.

    If the request's courier has not even requested the completion, the fleet fetches it itself. It
    does not repair the server because of that, and the retry does not count.
    """
    roster, config = self._roster, self._config
    answer = Answer(request)
    error: Exception | None = None
    failures = 0
    while failures <= config.max_retries:
      roster.counts['retries'] += error is not None
      roster.check_alive()
      missing = answer.missing
      deadline_s = config.latency_s + missing.max_tokens / config.min_tokens_per_s
      try:
        async with self._place(missing) as (replica, life):
          version = replica.sampled_with
          try:
            completion = await replica.generate(
              missing, index, seed=self._seed, deadline_s=deadline_s, stream=config.stream
            )
            # Wait 'settled': bounded by the deadlines of the calls that publish a version.
            await replica.settled.wait()
            if replica.life == life and all(
              segment.version in replica.proven for segment in completion.segments
            ):
              replica.failures = 0
              return self._accept(answer.complete(completion))
            roster.counts['void'] += 1
            roster.counts['void_tokens'] += len(completion.tokens)
            error = Lost(
              f'{replica.name}: returned tokens of a version it was not proven to have loaded'
            )
          except Lost as lost:
            error = lost
            if replica.state == ReplicaState.SERVING and replica.life == life:
              self._repair(replica, str(lost))
            if isinstance(lost, Broken) and self._keep(answer, lost.begun, version, replica.name):
              return self._accept(answer.whole)
      except Undelivered as undelivered:
        error = undelivered
        answer.missing = dataclasses.replace(answer.missing, courier=None)
        continue
      failures += replica in roster.replicas
    raise RunError(
      f'request {request.uid}, sample {index}: lost {config.max_retries + 1} times; the '
      f'last error: {error}'
    )

  @contextlib.asynccontextmanager
  async def _place(self, request: Request) -> AsyncIterator[tuple[Replica, int]]:
    """Yields (server for a request for one sample, the server's `life` at the time of dispatch).
    The request counts as in flight on the server during the block.

    Raises:
      Undelivered: the request's courier runs no more errands.
    """
    courier, dispatcher = request.courier, self._roster.dispatcher
    # The request must not take a place at a server while it waits for its courier.
    # Wait 'errand': bounded by the time limits of the courier's earlier errands.
    async with contextlib.nullcontext() if courier is None else courier.place():
      # Wait 'place': bounded by the deadlines of earlier requests and by `Repairs.watch`.
      assignment = await dispatcher.acquire(request)
      try:
        yield assignment.replica, assignment.life
      finally:
        dispatcher.release(assignment)

  def _keep(self, answer: Answer, begun: Begun, version: Version | None, engine: str) -> bool:
    """Appends the tokens of a streamed answer that broke off. Returns whether the answer is now
    complete.

    Args:
      version: version that sampled the tokens. It may be None if there are no tokens.
      engine: name of the server.
    """
    counts, count = self._roster.counts, len(begun.tokens)
    # A token outside the vocabulary in a prompt would end the engine of another server.
    is_kept = count > 0 and int(begun.tokens.max()) < self._served.vocab_size
    counts['lost_tokens'] += begun.lost + (0 if is_kept else count)
    if is_kept:
      counts['continued'] += 1
      counts['kept_tokens'] += count
      answer.add(begun, version, engine)
    return answer.whole is not None

  def _accept(self, completion: Completion) -> Completion:
    self._roster.counts['completions'] += 1
    self._roster.counts['tokens'] += len(completion.tokens)
    return self._named(completion)
