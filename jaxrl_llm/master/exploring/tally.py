"""Tally of a stage's exploration: events of the batch that is collected, tokens by outcome, and the
time of scoring.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence

from jaxrl_llm.master.exploring.config import ExplorerConfig
from jaxrl_llm.master.exploring.finished import FinishedGroup
from jaxrl_llm.master.exploring.selection import Experience, sampled_tokens
from jaxrl_llm.master.exploring.started import StartedGroup, StartedGroups

SPLIT = 'split_trajectories'
"""Name of the counter that holds the number of trajectories with several steps in a batch. The
counter is absent if `max_steps` is 1.
"""


class Tally:
  """Counts what happens to the groups of a stage. A batch takes the counts of its events.

  Attributes:
    counts: number of events since the last batch was taken, keyed by name. Commits contain them.
    passed_over: number of groups that any batch has passed over, because later groups finished
      first.
  """

  def __init__(self, config: ExplorerConfig, take_tokens: Callable[[str], int] | None):
    """
    Args:
      take_tokens: see `GroupRunner`. If None, discarded tokens are not counted.
    """
    self._config, self._take_generated = config, take_tokens
    self.counts: collections.Counter[str] = collections.Counter()
    self.passed_over = 0
    self._tokens: collections.Counter[str] = collections.Counter()
    """Counts of tokens since the last call of `take_tokens`, with the same keys as its result."""
    self._scoring_s = 0.0

  def sampled(self, members: Sequence[Experience]) -> None:
    """Counts the tokens of samples that have been generated and are stored."""
    self._tokens['sampled'] += sampled_tokens(members)

  def generated(self, group: StartedGroup, members: Sequence[Experience]) -> None:
    """Counts the tokens of a group whose samples have been generated: those of the samples, and the
    discarded tokens. Must be called when the group begins to count as waiting, or is dropped.
    """
    self.discard(group, sampled_tokens(members))
    self.sampled(members)

  def dropped(self, members: Sequence[Experience]) -> None:
    """Counts the tokens of stored samples that no batch will contain."""
    self._tokens['dropped'] += sampled_tokens(members)

  def discard(self, group: StartedGroup, kept: int) -> None:
    """Adds to the count of discarded tokens those tokens that were generated for a group but are
    not kept. Resets the group's count of partial tokens.

    Args:
      kept: number of the group's tokens that are kept, in samples or as spans.
    """
    if self._take_generated is not None and not group.is_finished:
      generated = group.partial_tokens + self._take_generated(group.name)
      self._tokens['discarded'] += generated - kept
      group.partial_tokens = 0

  def finished(self, group: FinishedGroup) -> None:
    """Counts the samples and tokens of a finished group that will not be trained on, and what its
    processors did.
    """
    self._tokens['dropped'] += sampled_tokens(group.members) - sampled_tokens(group.chosen)
    self.counts.update({f'dropped/{reason}': len(uids) for reason, uids in group.dropped.items()})
    self.counts.update({f'processors/{name}': count for name, count in group.counts.items()})

  def pass_over(self, groups: int) -> None:
    """Counts the groups that the batch passes over."""
    self.counts['passed_over'] = groups
    self.passed_over += groups

  def join(self, groups: Sequence[StartedGroup], batch: Sequence[Experience]) -> None:
    """Counts the groups that have joined a batch.

    Args:
      batch: the samples selected from the groups.
    """
    if self._config.max_steps > 1:
      self.counts[SPLIT] = sum(len(member.steps) > 1 for member in batch)
    self._tokens['trained'] += sampled_tokens(batch)
    self._scoring_s += max(group.scored for group in groups) - max(
      group.rolled_out for group in groups
    )

  def take_counts(self, started: StartedGroups) -> dict[str, int]:
    """Returns the counts of events since the previous batch, keyed by name.

    Args:
      started: the groups that remain for later batches.
    """
    if self._config.partial is not None:
      for name in ('cut', 'continued', 'returned'):  # Every batch has these keys.
        self.counts[f'partial/{name}'] += 0
      self.counts['partial/open'] = len(started.parked)
    counts, self.counts = dict(self.counts), collections.Counter()
    return counts

  def restore(self, counts: Mapping[str, int]) -> None:
    """Restores the counts from a commit."""
    self.counts = collections.Counter(counts)

  def take_scoring(self) -> float:
    """See `Explorer.take_scoring`."""
    seconds, self._scoring_s = self._scoring_s, 0.0
    return seconds

  def take_tokens(self, groups: Sequence[StartedGroup]) -> dict[str, int]:
    """See `Explorer.take_tokens`.

    Args:
      groups: the groups whose tokens count as waiting and partial.
    """
    tokens, self._tokens = self._tokens, collections.Counter()
    return {
      **{name: tokens[name] for name in ('sampled', 'trained', 'dropped', 'discarded')},
      'waiting': sum(sampled_tokens(group.stored) for group in groups),
      'partial': sum(group.partial_tokens for group in groups),
    }
