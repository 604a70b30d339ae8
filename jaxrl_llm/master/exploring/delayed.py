"""Delayed rewards of a stage: parks the groups that wait for them, and ends these groups when the
rewards are complete or too late.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Sequence

from absl import logging

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.master.exploring.awaiting import POLL_S, Awaiting, store_verdicts
from jaxrl_llm.master.exploring.endings import Endings
from jaxrl_llm.master.exploring.finished import store_samples
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.master.exploring.started import StartedGroup

_MAX_FAILURES = 60
"""Number of consecutive failures to read the inbox after which the run ends."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedRewards:
  """Moves a stage's groups into and out of the wait for delayed rewards."""

  awaiting: Awaiting
  """Decides which groups wait, and which have complete rewards."""
  endings: Endings

  def park(self, group: StartedGroup, members: Sequence[Experience]) -> bool:
    """Stores the samples of a generated group and parks the group, but only if it must wait for
    delayed rewards. Returns whether it must.
    """
    waiting = self.awaiting.wait_of(members)
    if waiting is None:
      return False
    samples = self.endings.samples
    texts = {member.sample.uid: member.completion for member in waiting.members}
    store = functools.partial(store_samples, samples.writer, waiting.members)
    samples.store_awaiting(group.name, waiting.awaited, texts, store)
    group.waiting, group.is_parked = waiting, True
    self.endings.gate.park()
    return True

  def adopt(self, groups: Sequence[StartedGroup]) -> list[StartedGroup]:
    """Parks the groups whose samples already wait for rewards according to the store, because they
    began to wait after the last commit before a crash. Returns the other groups.
    """
    kept = self.awaiting.kept(self.endings.config.stage)
    for group in groups:
      if group.name in kept:
        group.waiting, group.is_parked = self.endings.samples.awaiting(group.uids), True
        self.endings.tally.sampled(group.stored)
        self.endings.gate.park()
    return [group for group in groups if not group.is_parked]

  def join(self, group: StartedGroup) -> None:
    """Finishes a group whose delayed rewards are complete, so that a batch can contain it. Raises
    NothingToLearn if too many groups were dropped.
    """
    self.endings.tally.counts['awaiting/joined'] += 1
    members, writer = self.awaiting.take(group), self.endings.samples.writer
    self.endings.finish(group, members, lambda: store_verdicts(writer, group, members))

  async def watch(self, progressed: Callable[[], None]) -> None:
    """Processes delayed rewards as they arrive, and drops groups that have waited too long. Does
    not return.

    Args:
      progressed: called after each look at the inbox.

    Raises:
      RunError: the inbox cannot be read.
      NothingToLearn: too many groups were dropped.
    """
    failures = 0
    while True:
      try:
        late, failures = self.awaiting.update(await self.awaiting.verdicts()), 0
      except RunError as error:
        late, failures = [], failures + 1
        if failures == _MAX_FAILURES:
          raise
        logging.log_first_n(logging.WARNING, '%s', 5, error)
      for group in late:
        self.endings.drop_late(group, self.awaiting.limits)
      progressed()
      await asyncio.sleep(POLL_S)
