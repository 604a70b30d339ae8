"""Processors: verify, shape and filter a finished group before it is trained on.

A stage's processors run in order on the scorable members of a group, before selection and
admission. Each processor changes rewards, masks members or removes members. It is a pure function
of the members and the number of completed batches, or asks a model about the members (`verifying`).
Removed samples are dropped with the processor's name as the reason. The store also records every
change to a sample under the processor's name; these records are the sample's lineage. If a group
has no members left, another group replaces it.

A processor can read the quantities that are known when a group ends: tokens, the sampler's logprobs
and scores. The trainer computes other quantities, such as advantages, only after the batch is
complete, when it is too late to replace a group. A processor that is configured to read such a
quantity is rejected.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
import itertools
import math
import pathlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxrl_llm.config.annotations import nearest
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Finish, Sample
from jaxrl_llm.core.types import Json
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.master.exploring.verifying import (
  Asking,
  JudgeProcessorOptions,
  ModelProcessor,
  judge,
)

RESERVED = (
  'experience',
  'given_up',
  'groups',
  'not_selected',
  'scorer_failed',
  'straggler',
  'timeout',
  'unscorable',
)
"""Names that processors may not have, because the explorer uses them for drop reasons, counters or
records in the store.
"""
LATER = (
  'advantages',
  'entropy',
  'kl',
  'proximal_logprobs',
  'reference_logprobs',
  'returns',
  'values',
)
"""Quantities that the trainer computes only after the batch is complete."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessorConfig:
  """Configuration of one processor of a stage."""

  name: str
  """Name in counters, drop reasons and lineage. It must be unique in the stage."""
  kind: str | None = None
  """Key of `PROCESSORS`, or 'module:attribute' for a custom processor. If None, `name` is the
  kind.
  """
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Values for the fields of the processor's options class."""

  @property
  def implementation(self) -> str:
    return self.name if self.kind is None else self.kind


Processor = Callable[[Sequence[Experience], int], Sequence[Experience]]
"""Function of (members of a group ordered by sample index, number of batches that the run has
completed). It returns the remaining members in the same order.
"""


class Processed(NamedTuple):
  members: list[Experience]
  """Members that no processor removed."""
  dropped: dict[str, list[str]]
  """uids of removed samples, keyed by processor name."""
  lineage: list[tuple[str, str, Json]]
  """(uid, processor name, change) for each change to a sample, in the order of the changes."""
  counts: dict[str, int]
  """Number of samples before and after each processor: `<processor>/in` and `<processor>/out`."""


def process(
  processors: Sequence[tuple[str, Processor]], members: Sequence[Experience], step: int
) -> Processed:
  """Runs processors in order. Stops when no member is left."""
  processed = Processed(list(members), {}, [], {})
  for name, processor in processors:
    if processed.members:
      processed = _passed(processed, name, processor(processed.members, step), {})
  return processed


class Processors:
  """Processors of a stage, including those that ask a model."""

  def __init__(self, processors: Sequence[tuple[str, Processor | ModelProcessor]]):
    self._processors = processors
    self._opened: list[tuple[str, Processor | Asking]] = []

  @contextlib.asynccontextmanager
  async def opened(self, journals: pathlib.Path, stage: str) -> AsyncIterator[None]:
    """Opens the processors that ask a model, and closes them at the end of the block.

    Args:
      journals: directory of these processors' journals.
      stage: name of the stage.
    """
    async with contextlib.AsyncExitStack() as models:
      self._opened = []
      for name, processor in self._processors:
        if isinstance(processor, ModelProcessor):
          journal = journals / f'{stage}-{name}.jsonl'
          processor = await models.enter_async_context(processor.open(journal))
        self._opened.append((name, processor))
      yield

  async def run(self, members: Sequence[Experience], step: int) -> Processed | None:
    """Runs the processors like `process` if any of them asks a model. Otherwise returns None: the
    caller then runs them with `process`, which needs no wait.
    """
    if not any(isinstance(processor, ModelProcessor) for _, processor in self._processors):
      return None
    processed = Processed(list(members), {}, [], {})
    for name, processor in self._opened:
      if processed.members:
        result = processor(processed.members, step)
        # Wait 'judge': bounded by the processor's `deadline_s`.
        after, notes = await result if inspect.isawaitable(result) else (result, {})
        processed = _passed(processed, name, after, notes)
    return processed


def _passed(
  processed: Processed,
  name: str,
  result: Sequence[Experience],
  notes: Mapping[str, dict[str, Json]],
) -> Processed:
  """Adds the result of the next processor to `processed`."""
  remaining = processed.members
  after = {member.sample.uid: member for member in result}
  removed = [member.sample.uid for member in remaining if member.sample.uid not in after]
  if removed:
    processed.dropped[name] = removed
  for before in remaining:
    uid = before.sample.uid
    now = after.get(uid)
    change = {**notes.get(uid, {}), **({} if now is None else _change(before, now))}
    if change:
      processed.lineage.append((uid, name, change))
  processed.counts.update(
    {f'{name}/in': len(remaining), f'{name}/out': len(remaining) - len(removed)}
  )
  return processed._replace(
    members=[after[member.sample.uid] for member in remaining if member.sample.uid in after]
  )


def _change(before: Experience, now: Experience) -> dict[str, Json]:
  change: dict[str, Json] = {}
  if before.reward.value != now.reward.value:
    change['reward'] = [before.reward.value, now.reward.value]
  if before.masked != now.masked:
    change['masked'] = now.masked
  return change


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nothing:
  """Options class of a processor that has no options."""


def aligned(options: Nothing) -> Processor:
  """Returns a processor that drops inconsistent samples, each with its whole trajectory.

  These are samples without tokens to train on (unless they are masked as a whole), with a logprob
  above 0 (apart from rounding), or whose segments (ranges of tokens, each sampled by one version of
  the weights) do not cover exactly the sampled tokens.
  """

  def run(members: Sequence[Experience], step: int) -> Sequence[Experience]:
    def fine(sample: Sample, masked: bool) -> bool:
      drawn = sample.behaviour_logprobs[sample.sampled]
      covered = sum(segment.end - segment.start for segment in sample.segments)
      trainable = masked or sample.loss_mask.any()
      return bool(trainable and (drawn <= 1e-3).all() and covered == int(sample.sampled.sum()))

    return [m for m in members if all(fine(step, m.masked) for step in m.steps)]

  return run


@dataclasses.dataclass(frozen=True, kw_only=True)
class FreshOptions:
  max_age: int = 0
  """Maximum age of a group: the number of batches that the run completes between the oldest weights
  that generated any of the group's trained tokens and the end of the group.
  """


def fresh(options: FreshOptions) -> Processor:
  """Returns a processor that drops a group if weights older than `max_age` batches generated any of
  its trained tokens.
  """

  def run(members: Sequence[Experience], step: int) -> Sequence[Experience]:
    versions = [
      segment.version.step
      for member in members
      for step_sample in member.steps
      for segment in step_sample.segments
      if step_sample.loss_mask[segment.start : segment.end].any()
    ]
    return members if step - min(versions, default=step) <= options.max_age else []

  return run


@dataclasses.dataclass(frozen=True, kw_only=True)
class VarianceOptions:
  min_std: float = 0.0
  """Lower limit of the population standard deviation of a group's rewards, turn rewards included. A
  group is dropped unless its standard deviation exceeds this limit.
  """


def reward_std(options: VarianceOptions) -> Processor:
  """Returns a processor that drops a group whose rewards do not differ enough (Trinity-RFT's
  reward_std_filter). The rewards include the changes that earlier processors have made.
  """

  def run(members: Sequence[Experience], step: int) -> Sequence[Experience]:
    rewards = np.array([member.reward.total for member in members], np.float64)
    # The maximum and minimum are compared too, because rounding may make the standard deviation of
    # equal rewards slightly larger than 0.
    differ = rewards.max() > rewards.min() and rewards.std() > options.min_std
    return members if differ else []

  return run


def dynamic_sampling(options: Nothing) -> Processor:
  """Returns a processor that drops a group unless some but not all of its answers are correct
  (DAPO, arXiv:2503.14476).
  """

  def run(members: Sequence[Experience], step: int) -> Sequence[Experience]:
    correct = sum(bool(member.reward.correct) for member in members)
    return members if 0 < correct < len(members) else []

  return run


def mask_truncated(options: Nothing) -> Processor:
  """Returns a processor that masks truncated answers, which ended at the limit on tokens or steps.
  Masked answers still count in the group's baseline, but are not trained on.
  """

  def run(members: Sequence[Experience], step: int) -> Sequence[Experience]:
    def cut(member):
      return member.masked or member.finish_reason.is_truncated

    return [dataclasses.replace(member, masked=cut(member)) for member in members]

  return run


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepetitionOptions:
  penalty: float = 1.0
  """Amount by which the reward is reduced, at least 0."""
  mask: bool = False
  """Whether to mask the answers: they then count in the group's baseline, but are not trained
  on.
  """


def repetition(options: RepetitionOptions) -> Processor:
  """Returns a processor that penalises or masks answers that ended because of
  `rollout.repetition_detection`.
  """
  if not 0 <= options.penalty < math.inf:
    raise UserError(
      f'processor repetition: penalty {options.penalty}, wanted a finite number of at least 0'
    )

  def run(members: Sequence[Experience], step: int) -> Sequence[Experience]:
    return [
      dataclasses.replace(
        with_reward(member, member.reward.value - options.penalty),
        masked=member.masked or options.mask,
      )
      if member.finish_reason == Finish.REPETITION
      else member
      for member in members
    ]

  return run


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeOptions:
  key: str
  """Name of a scorer, or of a part of its score, as in the metrics: 'judge' or 'judge/quality'."""
  operation: Literal['add', 'subtract', 'multiply', 'divide'] = 'add'
  weight: float = 1.0
  offset: float = 0.0
  """Number added to the value of `key` before it is weighted. For example, -0.5 centres a score
  that lies in [0, 1].
  """


def shape(options: ShapeOptions) -> Processor:
  """Returns a processor that sets reward ← reward ∘ (weight · (value + offset)), where ∘ is the
  configured operation.

  This is meant for reward shaping, and for adding quality scores as in Trinity-RFT
  (arXiv:2505.17826).
  """
  check_known_in_time(options.key, 'shape.key')

  def run(members: Sequence[Experience], step: int) -> Sequence[Experience]:
    return [with_reward(member, _shaped(options, member)) for member in members]

  return run


def _shaped(options: ShapeOptions, member: Experience) -> float:
  if options.key not in member.reward.parts:
    raise UserError(
      f'processor shape: {member.sample.uid} has no score {options.key!r}; it has '
      f'{sorted(member.reward.parts)}'
    )
  reward, by = (
    member.reward.value,
    options.weight * (member.reward.parts[options.key] + options.offset),
  )
  match options.operation:
    case 'add':
      return reward + by
    case 'subtract':
      return reward - by
    case 'multiply':
      return reward * by
    case 'divide':
      if by == 0:
        raise UserError(
          f'processor shape: {member.sample.uid} would be divided by 0 ({options.key}); set an '
          'offset'
        )
      return reward / by


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiversityOptions:
  weight: float = 0.5
  """Weight of the diversity term at the start of the run."""
  final_weight: float | None = None
  """Weight after `decay_steps` completed batches, reached linearly from `weight`. If None, the
  weight is constant.
  """
  decay_steps: int = 1


def diversity(options: DiversityOptions) -> Processor:
  """Returns a processor that rewards answers that differ from the others in their group: it sets
  reward ← reward + weight · (1 − cos(e, ē)).

  e is the vector of an answer's token bigram counts, and ē is the mean of e over the group. In a
  group of equal answers, the term is 0. The formula follows Trinity-RFT (arXiv:2505.17826, section
  3.4.2), where e is the answer's embedding by a model.
  """
  if options.decay_steps < 1:
    raise UserError(f'processor diversity: decay_steps {options.decay_steps}, wanted at least 1')

  def run(members: Sequence[Experience], step: int) -> Sequence[Experience]:
    final = options.weight if options.final_weight is None else options.final_weight
    weight = options.weight + (final - options.weight) * min(step / options.decay_steps, 1.0)
    bags = [
      sum((_pairs(s.tokens[s.prompt_len :]) for s in member.steps), collections.Counter())
      for member in members
    ]
    mean: collections.Counter[tuple[int, int]] = sum(bags, collections.Counter())
    far = [1.0 - _cosine(bag, mean) for bag in bags]
    return [
      with_reward(m, m.reward.value + weight * distance)
      for m, distance in zip(members, far, strict=True)
    ]

  return run


def _pairs(tokens: Sequence[int] | np.ndarray) -> collections.Counter[tuple[int, int]]:
  ids = [-1, *(int(token) for token in tokens)]
  return collections.Counter(itertools.pairwise(ids))


def _cosine(a: Mapping[Any, int], b: Mapping[Any, int]) -> float:
  """Returns the cosine similarity of two count vectors; 1 if one of them is empty."""
  size = math.sqrt(sum(n * n for n in a.values()) * sum(n * n for n in b.values()))
  return min(1.0, sum(n * b.get(pair, 0) for pair, n in a.items()) / size) if size else 1.0


def with_reward(member: Experience, value: float) -> Experience:
  """Returns a copy of the member with `value` as its reward. The reward's parts and correctness
  stay as they are. Raises UserError if the value is not finite.
  """
  if not math.isfinite(value):
    raise UserError(
      f'processors: the reward of {member.sample.uid} became {value}; check the weights and '
      "offsets in the processors' options"
    )
  return dataclasses.replace(member, reward=dataclasses.replace(member.reward, value=value))


def check_known_in_time(key: str, where: str) -> None:
  """Raises UserError if `key` names a quantity that is known only after the batch is complete.

  Args:
    key: name of a quantity, such as 'judge' or 'kl', or of a part of a score, such as
      'judge/quality'.
    where: name of the option that contains the key, for the error message.
  """
  if key.split('/')[0] in LATER:
    raise UserError(
      f'processors: the trainer computes {where}={key!r} after the batch is closed, when a dropped '
      'group could no longer be replaced; use a score, or an option of the algorithm'
    )


PROCESSORS: Mapping[str, tuple[type, Callable[..., Processor | ModelProcessor]]] = {
  'aligned': (Nothing, aligned),
  'diversity': (DiversityOptions, diversity),
  'dynamic_sampling': (Nothing, dynamic_sampling),
  'fresh': (FreshOptions, fresh),
  'judge': (JudgeProcessorOptions, judge),
  'mask_truncated': (Nothing, mask_truncated),
  'repetition': (RepetitionOptions, repetition),
  'reward_std': (VarianceOptions, reward_std),
  'shape': (ShapeOptions, shape),
}
"""Options class and factory of each processor, keyed by kind."""


def check_processors(configs: Sequence[ProcessorConfig], where: str) -> None:
  """Raises UserError if a name is repeated or reserved, or if a kind is unknown or in `LATER`. The
  message starts with `where`, except for a kind in `LATER`.
  """
  names = [config.name for config in configs]
  for config in configs:
    if names.count(config.name) > 1:
      raise UserError(
        f'{where}: {names.count(config.name)} are called {config.name!r}; give each a unique name, '
        'and set its kind'
      )
    if config.name in RESERVED:
      raise UserError(
        f'{where}: the name {config.name!r} is reserved; choose another name, and set kind'
      )
    kind = config.implementation
    if kind in LATER:
      check_known_in_time(kind, 'kind')
    if ':' not in kind and kind not in PROCESSORS:
      raise UserError(
        f'{where}: no processor {kind!r}; {nearest(kind, PROCESSORS)}; a custom one is '
        "'module:attribute'"
      )
