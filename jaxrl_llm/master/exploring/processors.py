"""Processors: verify, shape and filter a finished group before it is trained on.

A stage's processors run in order on the scorable members of a group, before selection and
admission. Each is a pure function of the members and the number of completed batches: it changes
rewards, masks members or removes them. The processor's name is the reason under which removed
samples are dropped, and under which the store records every change to a sample (its lineage). A
group without members left is replaced with another.

Processors see what is known when a group ends: tokens, the sampler's logprobs, scores. The
trainer's quantities are computed after the batch is closed, too late to replace a group, so a
processor that asks for them is refused.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxrl_llm.config.annotations import nearest
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Finish
from jaxrl_llm.core.types import Json
from jaxrl_llm.master.exploring.selection import Experience

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
"""Names that the explorer itself uses for drop reasons, counters or store records."""
LATER = (
  'advantages',
  'entropy',
  'kl',
  'proximal_logprobs',
  'reference_logprobs',
  'returns',
  'values',
)
"""Quantities that the trainer computes after the batch is closed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessorConfig:
  """One processor of a stage."""

  name: str
  """Name in counters, drop reasons and lineage; unique in its stage."""
  kind: str | None = None
  """Key of `PROCESSORS`, or a custom 'module:attribute'; None: same as `name`."""
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Fields of the processor's options."""

  @property
  def implementation(self) -> str:
    return self.name if self.kind is None else self.kind


Processor = Callable[[Sequence[Experience], int], Sequence[Experience]]
"""Maps (members in order of issue, completed batches of the run) to the rest, in the same order."""


class Processed(NamedTuple):
  members: list[Experience]
  """Remaining members."""
  dropped: dict[str, list[str]]
  """uids of removed samples, keyed by processor name."""
  lineage: list[tuple[str, str, Json]]
  """(uid, processor name, change) for each changed sample, in order."""
  counts: dict[str, int]
  """Number of samples before and after each processor: `<processor>/in` and `<processor>/out`."""


def process(
  processors: Sequence[tuple[str, Processor]], members: Sequence[Experience], step: int
) -> Processed:
  """Runs named processors in order; stops when no member is left."""
  left, done = list(members), Processed([], {}, [], {})
  for name, processor in processors:
    if not left:
      break
    after = {member.sample.uid: member for member in processor(left, step)}
    gone = [member.sample.uid for member in left if member.sample.uid not in after]
    if gone:
      done.dropped[name] = gone
    for before in left:
      now = after.get(before.sample.uid)
      if now is not None and (change := _change(before, now)):
        done.lineage.append((now.sample.uid, name, change))
    done.counts.update({f'{name}/in': len(left), f'{name}/out': len(left) - len(gone)})
    left = [after[member.sample.uid] for member in left if member.sample.uid in after]
  return done._replace(members=left)


def _change(before: Experience, now: Experience) -> dict[str, Json]:
  change: dict[str, Json] = {}
  if before.reward.value != now.reward.value:
    change['reward'] = [before.reward.value, now.reward.value]
  if before.masked != now.masked:
    change['masked'] = now.masked
  return change


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nothing:
  """Options of a processor that takes none."""


def aligned(options: Nothing) -> Processor:
  """Drops inconsistent samples: those without any token of the policy, or with logprobs above 0."""

  def run(members: Sequence[Experience], step: int) -> Sequence[Experience]:
    def fine(member: Experience) -> bool:
      sample = member.sample
      drawn = sample.behaviour_logprobs[sample.sampled]
      covered = sum(segment.end - segment.start for segment in sample.segments)
      return bool(
        sample.loss_mask.any() and (drawn <= 1e-3).all() and covered == int(sample.sampled.sum())
      )

    return [member for member in members if fine(member)]

  return run


@dataclasses.dataclass(frozen=True, kw_only=True)
class FreshOptions:
  max_age: int = 0
  """Maximum age, in completed batches, of the oldest token's weights when the group ends."""


def fresh(options: FreshOptions) -> Processor:
  """Drops a group if the weights of any of its tokens are too old when the group ends."""

  def run(members: Sequence[Experience], step: int) -> Sequence[Experience]:
    oldest = min(segment.version.step for member in members for segment in member.sample.segments)
    return members if step - oldest <= options.max_age else []

  return run


@dataclasses.dataclass(frozen=True, kw_only=True)
class VarianceOptions:
  min_std: float = 0.0
  """Threshold that the population standard deviation of the group's rewards, turn rewards included,
  must exceed.
  """


def reward_std(options: VarianceOptions) -> Processor:
  """Drops a group whose rewards, as shaped by earlier processors, do not differ (Trinity-RFT's
  reward_std_filter).
  """

  def run(members: Sequence[Experience], step: int) -> Sequence[Experience]:
    rewards = np.array([member.reward.worth for member in members], np.float64)
    # Also compare max and min: due to rounding, equal rewards may have a tiny standard deviation
    # above 0.
    differ = rewards.max() > rewards.min() and rewards.std() > options.min_std
    return members if differ else []

  return run


def dynamic_sampling(options: Nothing) -> Processor:
  """Drops a group unless some but not all of its answers are correct (DAPO, arXiv:2503.14476)."""

  def run(members: Sequence[Experience], step: int) -> Sequence[Experience]:
    correct = sum(bool(member.reward.correct) for member in members)
    return members if 0 < correct < len(members) else []

  return run


def mask_truncated(options: Nothing) -> Processor:
  """Masks answers cut at the length limit: they stay in the baseline but are not trained on."""

  def run(members: Sequence[Experience], step: int) -> Sequence[Experience]:
    def cut(member):
      return member.masked or member.sample.finish_reason == Finish.LENGTH

    return [dataclasses.replace(member, masked=cut(member)) for member in members]

  return run


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeOptions:
  key: str
  """Scorer value or part, named as in the metrics: 'judge' or 'judge/quality'."""
  operation: Literal['add', 'subtract', 'multiply', 'divide'] = 'add'
  weight: float = 1.0
  offset: float = 0.0
  """Added to the key's value before weighting: -0.5 centres a score in [0, 1]."""


def shape(options: ShapeOptions) -> Processor:
  """reward ← reward ∘ weight · (value + offset), where ∘ is the configured operation.

  For reward shaping, and for quality scores as in Trinity-RFT (arXiv:2505.17826).
  """
  known_then(options.key, 'shape.key')

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
  """Weight before any batch is completed."""
  final_weight: float | None = None
  """Weight after `decay_steps` completed batches, interpolated linearly; None: same as `weight`."""
  decay_steps: int = 1


def diversity(options: DiversityOptions) -> Processor:
  """reward ← reward + weight · (1 − cos(e, mean of the group's e)); e counts token bigrams.

  After Trinity-RFT (arXiv:2505.17826, 3.4.2), whose e is a model's embedding. Adds 0 in a group of
  equal answers.
  """
  if options.decay_steps < 1:
    raise UserError(f'processor diversity: decay_steps {options.decay_steps}, wanted at least 1')

  def run(members: Sequence[Experience], step: int) -> Sequence[Experience]:
    final = options.weight if options.final_weight is None else options.final_weight
    weight = options.weight + (final - options.weight) * min(step / options.decay_steps, 1.0)
    bags = [_pairs(member.sample.tokens[member.sample.prompt_len :]) for member in members]
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
  """Cosine similarity of two bags; 1 if one is empty."""
  size = math.sqrt(sum(n * n for n in a.values()) * sum(n * n for n in b.values()))
  return min(1.0, sum(n * b.get(pair, 0) for pair, n in a.items()) / size) if size else 1.0


def with_reward(member: Experience, value: float) -> Experience:
  """Returns the member with that reward; the reward's parts and correctness stay as scored."""
  if not math.isfinite(value):
    raise UserError(
      f'processors: the reward of {member.sample.uid} became {value}; check their weights'
    )
  return dataclasses.replace(member, reward=dataclasses.replace(member.reward, value=value))


def known_then(key: str, where: str) -> None:
  """Raises UserError for a key that is known only after the batch is closed."""
  if key.split('/')[0] in LATER:
    raise UserError(
      f'processors: {where}={key!r} is computed by the trainer, after the batch is closed: a group '
      'that it drops could no longer be replaced; use a score, or an option of the algorithm'
    )


PROCESSORS: Mapping[str, tuple[type, Callable[..., Processor]]] = {
  'aligned': (Nothing, aligned),
  'diversity': (DiversityOptions, diversity),
  'dynamic_sampling': (Nothing, dynamic_sampling),
  'fresh': (FreshOptions, fresh),
  'mask_truncated': (Nothing, mask_truncated),
  'reward_std': (VarianceOptions, reward_std),
  'shape': (ShapeOptions, shape),
}
"""Options class and factory of each processor, keyed by kind."""


def check_processors(configs: Sequence[ProcessorConfig], where: str) -> None:
  """Raises UserError for repeated or reserved names or unknown kinds, prefixed with `where`."""
  names = [config.name for config in configs]
  for config in configs:
    if names.count(config.name) > 1:
      raise UserError(
        f'{where}: {names.count(config.name)} are called {config.name!r}; give each its own name '
        '(and kind)'
      )
    if config.name in RESERVED:
      raise UserError(
        f'{where}: the name {config.name!r} is taken; give it another name, and its kind'
      )
    kind = config.implementation
    if kind in LATER:
      known_then(kind, 'kind')
    if ':' not in kind and kind not in PROCESSORS:
      raise UserError(
        f'{where}: no processor {kind!r}; {nearest(kind, PROCESSORS)}; a custom one is '
        "'module:attribute'"
      )
