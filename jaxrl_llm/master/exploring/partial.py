"""Partial rollouts: answers that are generated over several iterations, as in Kimi k1.5.

In each iteration (batch), a sample may generate a budget of tokens. If a sample of a group uses up
the budget, the group is parked at the end of the iteration: its new tokens are stored as spans, and
a later iteration continues the group. The group is scored and trained on once, when all of its
samples have finished.

Workflows need no code for partial rollouts. In each iteration, the workflow of a group runs from
its beginning, in this process or in an explorer, and `PartialGroup` answers its requests. Requests
that earlier iterations have answered get the stored tokens; other requests get tokens from the
engine. Once a sample has used up its budget, its further requests get no answer in this iteration.
When every unfinished sample of the group has an unanswered request, the workflow is stopped.

Invariant: the budget is counted in tokens, so no clock decides where a sample is cut. This holds
only for workflows that make the requests of a sample one after another and independently of other
samples, and that repeat the same requests when they get the same answers.

Source: "Kimi k1.5: Scaling Reinforcement Learning with LLMs" (arXiv:2501.12599), section 2.6.2.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import itertools
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from absl import logging

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Finish, Sample
from jaxrl_llm.core.records.score import Score
from jaxrl_llm.core.records.span import Piece, Span, by_request, joined
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.rewards.api import Reward
from jaxrl_llm.rollout.api import BUDGET, Completion, Request, Sampling
from jaxrl_llm.rollout.workflow import Rollout, trained_turns


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialConfig:
  """Settings of partial rollouts, which spread long answers over several batches."""

  budget: int
  """Number of tokens that a sample may generate before its group waits for the next batch. If too
  few groups have finished for a batch and no more may start, the waiting groups get this budget
  again.
  """
  max_spans: int = 8
  """Maximum number of spans of a sample: the first one and its continuations. The last span has no
  budget and runs to the end of the sample.
  """
  groups: int | None = None
  """Maximum number of groups that are being generated, wait to be continued, or have finished but
  are not part of a batch yet. If None, it is `groups_per_batch` · (`bound` + 2), where both are
  values of the stage.
  """
  loss: Literal['current_only', 'last_k', 'all'] = 'current_only'
  """Tokens that enter the loss. Other tokens serve as context.

  'current_only': tokens sampled by the newest of the weights that generated the group. If the
  stage's `bound` is 0, these are the weights that the batch updates. 'last_k': tokens sampled by
  these newest weights, or by weights that are fewer than `last_k` batches older. 'all': all tokens,
  each corrected for the difference between the weights that sampled it and the weights that the
  batch updates. 'last_k' and 'all' need a `bound` above 0.
  """
  last_k: int | None = None
  """Number of consecutive versions of the weights whose tokens enter the loss. Set it if `loss` is
  'last_k', and only then. The value 1 has the same effect as 'current_only'.
  """

  def __post_init__(self):
    for name in ('budget', 'max_spans', 'last_k'):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise UserError(f'rollout.partial.{name}: got {value}, wanted at least 1')
    if (self.last_k is not None) != (self.loss == 'last_k'):
      raise UserError(
        f'rollout.partial.last_k: got {self.last_k} with loss {self.loss!r}; wanted a number with '
        "loss 'last_k', none otherwise"
      )

  def max_groups(self, groups_per_batch: int, bound: int) -> int:
    return (bound + 2) * groups_per_batch if self.groups is None else self.groups

  def oldest(self, newest: int) -> int:
    """Returns the step of the oldest weights whose tokens enter the loss.

    Args:
      newest: step of the newest weights with which the group was sampled.
    """
    return {'current_only': newest, 'last_k': newest + 1 - (self.last_k or 1), 'all': 0}[self.loss]


_UNLIMITED = PartialConfig(budget=1, max_spans=1)
"""Settings without budgets: each sample has a single span, which runs to the end of the sample."""
_IDLE_S = 60.0
"""Number of idle seconds after which the workflow of a group is stopped. A group is idle if it has
no new requests or answers, the engine works on none of its requests, and a sample that has used up
its budget waits for an answer. Without this limit, workflows whose samples wait for each other
would hang.
"""
SampleFunction = Callable[[Request], AsyncIterator[tuple[int, Completion]]]


class GroupCut(Exception):
  """Raised when a later iteration (batch) must continue a group, because an unfinished sample has
  used up its token budget for this iteration, or because the batch is full.

  Attributes:
    spans: tokens that each sample generated in this iteration, keyed by sample index; empty if they
      are discarded, because the batch is full.
    by_clock: whether the iteration ended because there was no request or answer for `_IDLE_S`
      seconds.
  """

  def __init__(self, spans: Mapping[int, Span], *, by_clock: bool = False):
    super().__init__('the budget is spent')
    self.spans, self.by_clock = spans, by_clock


class _Call(NamedTuple):
  """Request of a workflow, with the tokens that earlier iterations generated for it."""

  request: Request
  digest: str
  before: Mapping[int, Span]
  """Tokens of earlier iterations, keyed by sample index. Samples without such tokens are left
  out.
  """

  def so_far(self, index: int) -> int:
    """Returns the number of tokens that earlier iterations generated for a sample."""
    return len(self.before[index].tokens) if index in self.before else 0


class PartialGenerator:
  """Generator that answers the requests of the groups that `collect` and `keep` run, and passes
  other requests on to the engine.
  """

  def __init__(self, sample: SampleFunction):
    """
    Args:
      sample: yields the completions of a request that the engine generates, with their indices.
    """
    self._sample = sample
    self._groups: dict[str, PartialGroup] = {}

  def generate(self, request: Request) -> AsyncIterator[tuple[int, Completion]]:
    """Yields completions with their indices; see `Generator.generate`."""
    group = self._groups.get(request.group)
    if group is None or not group.covers(request):
      return self._sample(request)
    return group.generate(request)

  async def collect(
    self,
    name: str,
    config: PartialConfig,
    spans: Sequence[Sequence[Span]],
    rollouts: AsyncIterator[Rollout],
  ) -> list[Rollout]:
    """Runs a group for one iteration. Returns its trajectories in order of index.

    Args:
      name: id of the group.
      spans: spans of earlier iterations, for each sample in order of index.
      rollouts: the trajectories of the group's workflow, whose requests this object answers.

    Raises:
      GroupCut: a sample is unfinished and has used up its budget.
      UserError: the length limit was lowered, so that the tokens of earlier iterations exceed it or
        leave no room to continue a sample.
    """
    group = self._groups[name] = PartialGroup(self._sample, config, name, spans)
    try:
      return await group.collect(rollouts)
    finally:
      del self._groups[name]
      await group.close()

  async def keep(
    self, name: str, samples: int, rollouts: AsyncIterator[Rollout]
  ) -> AsyncIterator[Rollout]:
    """Runs a group without budgets, and yields its trajectories as they arrive. If the explorer
    that runs the group's workflow is lost, the workflow runs again from its beginning. Its requests
    then get the completions that the engine has generated for them or is generating. For the
    arguments, see `collect`.
    """
    group = self._groups[name] = PartialGroup(self._sample, _UNLIMITED, name, [()] * samples)
    try:
      async with contextlib.aclosing(rollouts):
        async for rollout in rollouts:
          yield rollout
    finally:
      del self._groups[name]
      await group.close()


class PartialGroup:
  """Answers the requests of a group's workflow in one iteration, within the samples' budgets."""

  def __init__(
    self,
    sample: SampleFunction,
    config: PartialConfig,
    name: str,
    spans: Sequence[Sequence[Span]],
  ):
    """
    Args:
      sample: yields the completions of a request that the engine generates, with their indices.
      config: token budget of a sample per iteration, and maximum number of its spans.
      name: id of the group.
      spans: spans of earlier iterations, for each sample in order of index.
    """
    self._sample, self._name = sample, name
    self._stored = [by_request(of_sample) for of_sample in spans]
    """Completions of earlier iterations, keyed by the digest of the request, for each sample."""
    self._budgets: list[float] = [
      math.inf if len(of_sample) + 1 >= config.max_spans else config.budget for of_sample in spans
    ]
    """Number of tokens that each sample may still generate."""
    self._new: list[dict[str, Span]] = [{} for _ in spans]
    """Tokens of this iteration, keyed by the digest of the request, for each sample."""
    self._answers: dict[tuple[int, str, int], asyncio.Future[Completion]] = {}
    """Completion of each request, keyed by sample index, digest and maximum length. A future stays
    pending if the sample has used up its budget.
    """
    self._generating: collections.Counter[int] = collections.Counter()
    """Number of requests that the engine is working on, keyed by sample index."""
    self._held: set[int] = set()
    """Indices of the samples with a request that this iteration does not answer."""
    self._finished: set[int] = set()
    self._changes = 0
    """Number of requests, answers and trajectories so far."""
    self._tasks: set[asyncio.Task] = set()
    """Tasks that wait for the engine."""
    self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    """Future that completes when no sample can continue in this iteration."""

  async def close(self) -> None:
    """Cancels the requests that the engine is working on."""
    for task in self._tasks:
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)
    self._ended.cancel()

  def covers(self, request: Request) -> bool:
    """Returns whether the request is for samples of the group. This is checked because an explorer
    may send any sample index.
    """
    return request.first + request.samples <= len(self._new)

  async def generate(self, request: Request) -> AsyncIterator[tuple[int, Completion]]:
    """Yields completions with their indices; see `Generator.generate`. The completion of a sample
    that has used up its budget is not yielded. A repeated request gets the same completions.
    Closing the iterator does not cancel unfinished completions, since another explorer may repeat
    the request.
    """
    digest, limit = _digest(request), request.max_tokens
    indices = range(request.first, request.first + request.samples)
    self._begin(request, digest, [i for i in indices if (i, digest, limit) not in self._answers])
    pending = {self._answers[index, digest, limit]: index for index in indices}
    while pending:
      # Wait 'completion': bounded by the waits 'limits' and 'collect'.
      done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
      for answer in sorted(done, key=pending.__getitem__):
        yield pending.pop(answer), answer.result()

  async def collect(self, rollouts: AsyncIterator[Rollout]) -> list[Rollout]:
    """Runs the group for one iteration. Returns its trajectories in order of sample index. Raises
    GroupCut if some trajectories are still missing at the end of the iteration.
    """
    arrived: dict[int, Rollout] = {}

    async def gather() -> None:
      async with contextlib.aclosing(rollouts):
        async for rollout in rollouts:
          index = rollout.sample.sample_index
          # A workflow may give up waiting for a completion that the budget has cut, and return the
          # sample. This trajectory is ignored, because a later iteration continues the sample.
          if index not in self._held:
            arrived[index] = rollout
            self._finished.add(index)
          self._changed()

    gathering, is_idle = asyncio.create_task(gather()), False
    try:
      while not (gathering.done() or self._ended.done() or is_idle):
        before = self._changes
        await asyncio.wait(
          {gathering, self._ended}, timeout=_IDLE_S, return_when=asyncio.FIRST_COMPLETED
        )
        is_idle = before == self._changes and bool(self._held) and not self._generating.total()
      if gathering.done():
        gathering.result()
    finally:
      gathering.cancel()  # This has no effect on a completed task.
      await asyncio.gather(gathering, return_exceptions=True)
    if not is_idle:
      self._warn_of_unused_tokens()
    if len(arrived) < len(self._new):
      spans = {index: _span(new) for index, new in enumerate(self._new) if new}
      raise GroupCut(spans, by_clock=is_idle)
    return [arrived[index] for index in sorted(arrived)]

  def _warn_of_unused_tokens(self) -> None:
    """Logs a warning if the workflow has not repeated all requests of earlier iterations."""
    asked = {(index, digest) for index, digest, _ in self._answers}
    if any(
      digest and (index, digest) not in asked
      for index, stored in enumerate(self._stored)
      for digest in stored
    ):
      logging.log_first_n(
        logging.WARNING,
        'rollout.partial: group %s made other requests than in an earlier batch, so tokens of that '
        'batch are wasted; its environment, tools and prompts should repeat themselves',
        5,
        self._name,
      )

  def _begin(self, request: Request, digest: str, indices: Sequence[int]) -> None:
    """Answers new requests from the stored tokens, or has the engine work on them."""
    call = _Call(request, digest, self._stored_tokens(digest, indices))
    for index, before in call.before.items():
      if call.so_far(index) > request.max_tokens - (before.finish is None):
        raise UserError(
          f'rollout.max_response_length: got {request.max_tokens}, but the partial sample '
          f'{self._name}/{index} {"continues after" if before.finish is None else "has"} '
          f'{len(before.tokens)} tokens; wanted the length with which it was begun, or branch with '
          '--reset_store'
        )
    limits: dict[int, int] = {}
    for index in indices:
      answer = asyncio.get_running_loop().create_future()
      self._answers[index, digest, request.max_tokens] = answer
      if index in call.before and call.before[index].finish is not None:
        answer.set_result(_completion(call.before[index]))
      elif self._budgets[index] < 1:
        self._held.add(index)
      else:
        limits[index] = int(min(request.max_tokens - call.so_far(index), self._budgets[index]))
    for index in [index for index in limits if index in call.before]:
      begun = call.before[index].tokens.tolist()
      part = dataclasses.replace(request, prompt=(*request.prompt, *begun), begun=len(begun))
      self._start(call, part, [index], limits[index])
    # New completions are requested together, so that the engine computes their prompt once.
    new = [index for index in limits if index not in call.before]
    places = {index: place for place, index in enumerate(new)}
    for (limit, _), run in itertools.groupby(new, lambda i: (limits[i], i - places[i])):
      self._start(call, request, [*run], limit)
    self._changed()

  def _stored_tokens(self, digest: str, indices: Sequence[int]) -> dict[int, Span]:
    """Returns the tokens that earlier iterations generated for a request, keyed by sample index."""
    tokens: dict[int, Span] = {}
    for index in indices:
      stored = self._stored[index]
      # A record without digests belongs to a sample that makes only one request.
      if (span := stored.get('' if '' in stored else digest)) is not None:
        tokens[index] = span
    return tokens

  def _start(self, call: _Call, part: Request, indices: Sequence[int], limit: int) -> None:
    """Has the engine generate up to `limit` tokens for consecutive samples. `part` is the request
    of `call` with the tokens of earlier iterations appended to its prompt.
    """
    part = dataclasses.replace(part, first=indices[0], samples=len(indices), max_tokens=limit)
    self._generating.update(indices)
    task = asyncio.create_task(self._generate(call, part))
    self._tasks.add(task)
    task.add_done_callback(self._tasks.discard)

  async def _generate(self, call: _Call, part: Request) -> None:
    """Answers a request with the tokens of earlier iterations and those that the engine generates
    for `part`. A completion that the budget has cut does not answer the request. If the engine
    raises an error, the workflow's request raises the same error and may then be repeated.
    """
    unanswered = {*range(part.first, part.first + part.samples)}
    try:
      async with contextlib.aclosing(self._sample(part)) as completions:
        async for index, completion in completions:
          self._take(call, index, completion)
          unanswered.discard(index)
    except Exception as error:
      for index in unanswered:
        self._generating[index] -= 1
        answer = self._answers.pop((index, call.digest, call.request.max_tokens))
        answer.set_exception(error)
        # Reading the error keeps asyncio from logging it if the workflow no longer waits for the
        # answer.
        answer.exception()
      self._changed()

  def _take(self, call: _Call, index: int, completion: Completion) -> None:
    """Records the tokens that the engine has generated for a sample, and answers the request if the
    completion has ended.
    """
    before, limit = call.before.get(index), call.request.max_tokens
    new = _new_span(completion, before, limit, call.request.sampling)
    self._new[index][call.digest] = new
    self._budgets[index] -= len(new.tokens)
    self._generating[index] -= 1
    if new.finish is None:
      self._held.add(index)
    else:
      whole = new if before is None else joined([before, new])
      self._answers[index, call.digest, limit].set_result(_completion(whole))
    self._changed()

  def _changed(self) -> None:
    """Counts a request, answer or trajectory. Ends the iteration if no sample can continue and some
    samples are unfinished.
    """
    self._changes += 1
    stuck = {index for index in self._held if not self._generating[index]} - self._finished
    if stuck and len(stuck) + len(self._finished) == len(self._new) and not self._ended.done():
      self._ended.set_result(None)


def _completion(span: Span) -> Completion:
  return Completion(
    tokens=span.tokens, logprobs=span.logprobs, finish=span.finish, segments=span.segments
  )


def _digest(request: Request) -> str:
  """Returns a digest of a request for a completion. A repeated request has the same digest in all
  iterations.
  """
  # The digest covers the sampling parameters, because an explorer may repeat a request with
  # different parameters.
  sampling = request.sampling
  filters = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_detection)
  how = (request.key, filters, request.stop_ids)
  digest = hashlib.blake2b(repr(how).encode(), digest_size=8)
  digest.update(np.array(request.prompt, '<i4').tobytes())
  return digest.hexdigest()


def _span(new: Mapping[str, Span]) -> Span:
  """Joins the tokens that one sample generated in one iteration, keyed by request digest, into a
  single span.
  """
  ends = itertools.accumulate(len(span.tokens) for span in new.values())
  pieces = [
    Piece(digest, end, span.finish) for (digest, span), end in zip(new.items(), ends, strict=True)
  ]
  return joined([*new.values()], pieces)


def keep_loss(members: Sequence[Experience], config: PartialConfig) -> list[Experience]:
  """Returns a scored group in which only the tokens that `config.loss` trains on enter the loss.

  A sample without any of these tokens is masked. The rewards of turns that leave the loss are added
  to the reward of the first remaining turn or, if none remains, to the reward of the sample, so
  that the sum stays the same.
  """
  samples = mask_older([member.sample for member in members], config)
  return [
    dataclasses.replace(
      member,
      sample=sample,
      masked=member.masked or not sample.loss_mask.any(),
      scores=[_without_turns(score, hidden) for score in member.scores],
      reward=_without_turns(member.reward, hidden),
    )
    for member, sample in zip(members, samples, strict=True)
    for hidden in [trained_turns(member.sample) - trained_turns(sample)]
  ]


_Valued = TypeVar('_Valued', Reward, Score)


def _without_turns(reward: _Valued, hidden: int) -> _Valued:
  """Adds the values of the first `hidden` turns to the value of the next turn or, if there is none,
  to the value of the whole sample.
  """
  if not hidden or not reward.turn_values:
    return reward
  earlier, later = math.fsum(reward.turn_values[:hidden]), reward.turn_values[hidden:]
  if later:
    return dataclasses.replace(reward, turn_values=(earlier + later[0], *later[1:]))
  value = None if reward.value is None else reward.value + earlier
  return dataclasses.replace(reward, value=value, turn_values=())


def mask_older(samples: Sequence[Sample], config: PartialConfig) -> list[Sample]:
  """Returns a group's samples with loss masks that contain only the tokens that `config.loss`
  trains on. Ages are measured from the newest weights that generated any sample of the group.
  """
  oldest = config.oldest(max(s.version.step for sample in samples for s in sample.segments))
  return [
    dataclasses.replace(sample, loss_mask=sample.loss_mask & _sampled_since(sample, oldest))
    for sample in samples
  ]


def _sampled_since(sample: Sample, step: int) -> np.ndarray:
  mask = np.zeros(len(sample.tokens), bool)
  for segment in sample.segments:
    mask[segment.start : segment.end] = segment.version.step >= step
  return mask


def _new_span(
  completion: Completion, before: Span | None, max_tokens: int, sampling: Sampling
) -> Span:
  """Returns the span that an answer of the engine adds to the completion of a request.

  The length limit of the engine is the budget of the iteration, so an answer that reaches it does
  not always end the completion. This function determines whether the completion has ended, and why.
  """
  finish: Finish | None = completion.finish
  tokens = completion.tokens if before is None else np.r_[before.tokens, completion.tokens]
  if finish == Finish.LENGTH and len(tokens) < max_tokens:
    detection, begun = sampling.repetition_detection, len(tokens) - len(completion.tokens)
    repeats = detection is not None and detection.end(tokens, start=begun) == len(tokens)
    finish = Finish.REPETITION if repeats else None
  segments = completion.segments
  if finish != completion.finish:
    last = dataclasses.replace(segments[-1], finish=BUDGET if finish is None else finish)
    segments = (*segments[:-1], last)
  return Span(
    tokens=completion.tokens, logprobs=completion.logprobs, segments=segments, finish=finish
  )
