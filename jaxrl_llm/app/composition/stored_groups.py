"""Reads groups of rollouts, with their rewards, from the store of a run."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from jaxrl_llm.core import disk
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.master.exploring.recall import recall
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.replay.browse import open_copy
from jaxrl_llm.rewards.api import RewardsConfig
from jaxrl_llm.rollout.workflow import completion_text
from jaxrl_llm.tasks.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredGroups:
  """Groups of rollouts in the store of a run, in the order in which they were started."""

  run: pathlib.Path
  """Directory of the run, which is only read."""
  tasks: Mapping[str, Task]
  """Tasks whose groups are read, keyed by uid."""
  rewards_of: Callable[[str], RewardsConfig]
  """Function that takes the name of a stage of the run and returns the stage's scorers with their
  weights.
  """
  tokenizer: Tokenizer
  longest: int
  """Maximum length of a sequence in tokens. Groups with a longer sequence are left out."""
  max_steps: int = 1
  """Maximum number of steps of a trajectory."""
  is_own: bool = False
  """Whether the groups belong to this run. Their prompts are then not compared with the tasks'
  prompts, because the same workflow has encoded them.
  """
  where: str
  """Dotted key of the stage's source in the configuration, for messages."""
  left_out: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
  """Number of groups that were left out, keyed by the reason."""

  def read(self, stages: Collection[str]) -> Iterator[list[Experience]]:
    """Yields the sealed groups of some stages, or of all stages if `stages` is empty.

    Raises UserError if a group contains preference pairs or imitated answers, a trajectory has too
    many steps, or a prompt differs from the task's prompt as this run encodes it.
    """
    with disk.scratch('jaxrl_llm-stored-') as scratch:
      store = open_copy(self.run / 'replay', scratch / 'replay')
      with contextlib.closing(store):
        for uids in store.sealed():
          entry = store.entries(uids[:1])[uids[0]]
          stage = entry.group_id.partition('/')[0]
          if stages and stage not in stages:
            continue
          if entry.task_id not in self.tasks:
            self.left_out['other tasks'] += 1
            continue
          group = recall(
            store, uids, tasks=self.tasks.get, text=self._text, rewards=self.rewards_of(stage)
          )
          self._check(group, self.tasks[entry.task_id])
          if max(len(step.tokens) for member in group for step in member.steps) > self.longest:
            self.left_out['too long'] += 1
          else:
            yield group

  def _text(self, sample) -> str:
    tokens = sample.tokens[sample.prompt_len :]
    return completion_text(self.tokenizer, tokens, sample.finish_reason)

  def _check(self, group: Sequence[Experience], task: Task) -> None:
    if any(member.pair or member.imitated for member in group):
      raise UserError(
        f'{self.where}: {self.run} stored pairs or imitated answers; wanted whole groups'
      )
    if (most := max(len(member.steps) for member in group)) > self.max_steps:
      raise UserError(
        f'{self.where}: {self.run} stored trajectories of {most} steps, wanted at most '
        f'{self.max_steps}; set the source to Recorded, with rollout.max_steps={most}'
      )
    if self.is_own:
      return
    sample = group[0].sample
    if self.tokenizer.render_prompt(task.prompt) != sample.tokens[: sample.prompt_len].tolist():
      raise UserError(
        f'{self.where}: {self.run} encoded the prompt of {task.uid} differently; use its tokenizer '
        'and template (policy.init_from, or the same tasksets and policy.tokenizer)'
      )
