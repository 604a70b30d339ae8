"""Copies groups of rollouts recorded by another run into this run's directory, as static rows.

A file that exists is kept, so that a resumed run trains on the same groups.
"""

from __future__ import annotations

import collections
import contextlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from jaxrl_llm.app.composition.initial_weights import model_directory
from jaxrl_llm.app.composition.static_rows import static_file
from jaxrl_llm.app.composition.workdir import TOKENIZER
from jaxrl_llm.app.schema import Recorded, StageConfig
from jaxrl_llm.config.values import from_json
from jaxrl_llm.core import disk
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.files import parse_json
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.master.exploring.recall import recall
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.master.recorded import write_recorded
from jaxrl_llm.replay.browse import open_copy
from jaxrl_llm.rewards.api import RewardsConfig
from jaxrl_llm.rollout.workflow import completion_text
from jaxrl_llm.tasks.taskset import Taskset
from jaxrl_llm.tasks.tokenizer import Tokenizer


def copy_recorded(
  stage: StageConfig,
  longest: int,
  tasksets: Mapping[str, Taskset],
  tokenizer: Tokenizer,
  workdir: pathlib.Path,
) -> None:
  """Copies the groups whose tasks are in the stage's tasksets. Does nothing if their file exists.

  Args:
    stage: stage whose source is `Recorded`.
    longest: maximum length of a sequence in tokens; groups with longer ones are left out.

  Raises:
    UserError: the other run does not fit this one, or too few groups are left for a batch.
  """
  file, source = static_file(stage), stage.source
  if (workdir / file).exists():
    return
  run = pathlib.Path(source.run).expanduser()
  checkpoint, saved_rewards = _recorded_config(stage.name, run)
  _check_same_tokenizer(
    stage.name,
    run,
    run / TOKENIZER if checkpoint is None else model_directory(checkpoint),
    tokenizer,
  )
  rewards = from_json(saved_rewards, RewardsConfig, f'{run / "config.json"}: rewards')
  tasks = {task.uid: task for name in source.tasksets for task in tasksets[name].tasks}
  groups, left_out = _recorded_groups(stage.name, source, run, tasks, rewards, tokenizer, longest)
  logging.info(
    '%s: %d groups of %s; left out: %s', file, len(groups), source.run, left_out or 'none'
  )
  _check_fills(stage, groups, left_out)
  write_recorded(workdir, file, groups)


def _recorded_groups(
  stage: str,
  source: Recorded,
  run: pathlib.Path,
  tasks: Mapping[str, Task],
  rewards: RewardsConfig,
  tokenizer: Tokenizer,
  longest: int,
) -> tuple[list[list[Experience]], dict[str, int]]:
  """Reads the other run's groups, with the rewards that they had there.

  Returns:
    The groups of the given tasks, and the number of groups left out, keyed by the reason.
  """

  def text(sample):
    return completion_text(tokenizer, sample.tokens[sample.prompt_len :], sample.finish_reason)

  groups, left_out = [], collections.Counter()
  with disk.scratch('jaxrl_llm-recorded-') as scratch:
    store = open_copy(run / 'replay', scratch / 'replay')
    with contextlib.closing(store):
      for uids in store.sealed():
        entry = store.entries(uids[:1])[uids[0]]
        if source.stage is not None and not entry.group_id.startswith(f'{source.stage}/'):
          continue
        if entry.task_id not in tasks:
          left_out['other tasks'] += 1
          continue
        group = recall(store, uids, tasks=tasks.get, text=text, rewards=rewards)
        _check_group(stage, source, group, tasks[entry.task_id], tokenizer)
        if max(len(member.sample.tokens) for member in group) > longest:
          left_out['too long'] += 1
          continue
        if len(group) > source.group_size:
          raise UserError(
            f'stages.{stage}.source.group_size: {source.group_size}, and {source.run} stored '
            f'groups of {len(group)}; raise it'
          )
        groups.append(group)
  return groups, dict(left_out)


def _check_group(
  stage: str, source: Recorded, group: Sequence[Experience], task: Task, tokenizer: Tokenizer
) -> None:
  """Raises UserError if a group contains other samples than rollouts, or if this run's tokenizer
  would encode its prompt differently.
  """
  if any(member.pair or member.imitated for member in group):
    raise UserError(
      f'stages.{stage}.source: {source.run} stored pairs or imitated answers; wanted groups'
    )
  sample = group[0].sample
  if tokenizer.render_prompt(task.prompt) != sample.tokens[: sample.prompt_len].tolist():
    raise UserError(
      f'stages.{stage}.source: {source.run} encoded the prompt of {task.uid} differently; use its '
      'tokenizer and template (policy.init_from, or the same tasksets and policy.tokenizer)'
    )


def _check_fills(
  stage: StageConfig, groups: Sequence[Sequence[Experience]], left_out: Mapping[str, int]
) -> None:
  """Raises UserError if there are fewer groups than a batch needs, or if a batch may have fewer
  sequences than minibatches.
  """
  source = stage.source
  if len(groups) < source.groups_per_batch:
    raise UserError(
      f'stages.{stage.name}.source: {len(groups)} groups of {source.run} do not fill a batch of '
      f'{source.groups_per_batch} (left out: {left_out}); name the tasksets that it rolled '
      'out, or lower groups_per_batch'
    )
  least = sum(sorted(map(len, groups))[: source.groups_per_batch])
  if least < stage.minibatches:
    raise UserError(
      f'stages.{stage.name}.minibatches: {stage.minibatches}, and the smallest '
      f'{source.groups_per_batch} groups of {source.run} have {least} sequences; lower it'
    )


def _recorded_config(stage: str, run: pathlib.Path) -> tuple[str | None, Any]:
  """Returns another run's `policy.init_from`, which is None for random weights, and its rewards as
  JSON.
  """
  try:
    config = parse_json((run / 'config.json').read_text())
    checkpoint, rewards = config['policy']['init_from'], config['rewards']
    if not isinstance(checkpoint, str | None):
      raise ValueError('policy.init_from is not a string')
    return checkpoint, rewards
  except (OSError, ValueError, KeyError, TypeError) as error:
    reason = f'lacks {error}' if isinstance(error, KeyError) else error
    raise UserError(
      f'stages.{stage}.source.run: {run} is not the directory of a run ({reason})'
    ) from None


def _check_same_tokenizer(
  stage: str, run: pathlib.Path, directory: pathlib.Path, tokenizer: Tokenizer
) -> None:
  """Raises UserError if the recorded run had another vocabulary, in which its token ids have other
  meanings.
  """
  if Tokenizer.from_directory(directory).vocabulary != tokenizer.vocabulary:
    raise UserError(
      f'stages.{stage}.source: {run} had another vocabulary ({directory}); start from its '
      'checkpoint, or use the same tasksets and policy.tokenizer'
    )
