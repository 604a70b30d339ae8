"""Partial rollouts: answers that are generated over several iterations, as in Kimi k1.5.

In each iteration (batch), a sample may generate a budget of tokens. When a sample of a group has
used up the budget, the group is parked: its new tokens are stored as spans, and a later iteration
continues it. The group is scored and trained on once, when all of its samples have finished.

Invariant: the budget is counted in tokens, so no clock decides where a sample is cut.

Source: "Kimi k1.5: Scaling Reinforcement Learning with LLMs" (arXiv:2501.12599), section 2.6.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Finish, Sample
from jaxrl_llm.core.records.span import Span, joined
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.rollout.api import BUDGET, Completion, Sampling
from jaxrl_llm.rollout.workflow import SingleTurn


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
  """Maximum number of groups that are being generated, wait to be continued, or have finished for
  coming batches. If None, it is `groups_per_batch` · (`bound` + 2), with the stage's values.
  """
  loss: Literal['current_only', 'last_k', 'all'] = 'current_only'
  """Tokens that enter the loss. Other tokens serve as context.

  'current_only': those sampled by the newest weights that sampled any token of their group. If the
  stage's `bound` is 0, these are the weights that the batch updates. 'last_k': those sampled by
  these weights, or by weights that are fewer than `last_k` updates older. 'all': all tokens, each
  corrected for the difference between the weights that sampled it and the weights that the batch
  updates. 'last_k' and 'all' need a `bound` above 0.
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


class GroupCut(Exception):
  """Raised when a later iteration must continue a group, because an unfinished sample has used up
  its token budget for this iteration, or because the batch is full.

  Attributes:
    spans: tokens that each sample generated in this iteration, keyed by sample index; empty if they
      are discarded, because the batch is full.
  """

  def __init__(self, spans: Mapping[int, Span]):
    super().__init__('the budget is spent')
    self.spans = spans


async def continue_group(
  workflow: SingleTurn,
  config: PartialConfig,
  task: Task,
  visit: int,
  *,
  stage: str,
  sampling: Sampling,
  spans: Sequence[Sequence[Span]],
) -> list[tuple[Sample, str]]:
  """Generates the next spans of a group. If all samples are then finished, returns them with their
  decoded texts.

  Args:
    spans: spans of earlier iterations, for each sample in order of index.

  Raises:
    GroupCut: a sample is unfinished and has used up its budget.
    UserError: a sample already has more tokens than the length limit, which was lowered meanwhile.
  """
  max_tokens = sampling.limit(workflow.max_tokens)
  before = {index: joined(of_sample) for index, of_sample in enumerate(spans) if of_sample}
  for index, span in before.items():
    most = max_tokens - (span.finish is None)
    if len(span.tokens) > most:
      raise UserError(
        f'rollout.max_response_length: got {max_tokens}, but the partial sample '
        f'{stage}/{task.uid}/{visit}/{index} {"continues after" if span.finish is None else "has"} '
        f'{len(span.tokens)} tokens; wanted the length with which it was begun, or branch with '
        '--reset_store'
      )
  budget = {}
  for index, of_sample in enumerate(spans):
    remaining = max_tokens - (len(before[index].tokens) if index in before else 0)
    if not of_sample or of_sample[-1].finish is None:
      budget[index] = (
        remaining if len(of_sample) + 1 >= config.max_spans else min(remaining, config.budget)
      )
  completions = await workflow.extend(
    task,
    visit,
    stage=stage,
    samples=len(spans),
    sampling=sampling,
    begun={index: span.tokens.tolist() for index, span in before.items()},
    budget=budget,
  )
  new = {
    index: _span(completion, before.get(index), max_tokens, sampling)
    for index, completion in completions.items()
  }
  whole = [
    joined([*of_sample, *([new[index]] if index in new else [])])
    for index, of_sample in enumerate(spans)
  ]
  if any(span.finish is None for span in whole):
    raise GroupCut(new)
  samples = [
    await workflow.sample(
      task,
      visit,
      index,
      Completion(
        tokens=span.tokens, logprobs=span.logprobs, finish=span.finish, segments=span.segments
      ),
      stage=stage,
      temperature=sampling.temperature,
    )
    for index, span in enumerate(whole)
  ]
  return [(sample, await workflow.decoded(sample)) for sample in mask_older(samples, config)]


def mask_older(samples: Sequence[Sample], config: PartialConfig) -> list[Sample]:
  """Returns a group's samples with loss masks that contain only the tokens that `config.loss`
  trains on. Ages count from the newest weights that generated any sample of the group.
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


def _span(completion: Completion, before: Span | None, max_tokens: int, sampling: Sampling) -> Span:
  """Returns the span that a completion adds to a sample. The engine treats the iteration's budget
  as its length limit, so this function determines whether and why the sample itself has finished.
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
