"""Copies groups of rollouts recorded by another run into this run's directory, as static rows.

A file that exists is kept, so that a resumed run trains on the same groups.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from absl import logging

from jaxrl_llm.app.composition.initial_weights import model_directory
from jaxrl_llm.app.composition.static_rows import static_file
from jaxrl_llm.app.composition.stored_groups import StoredGroups
from jaxrl_llm.app.composition.workdir import TOKENIZER
from jaxrl_llm.app.schema import StageConfig
from jaxrl_llm.config.values import from_json
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.files import parse_json
from jaxrl_llm.master.exploring.selection import Experience
from jaxrl_llm.master.recorded import write_recorded
from jaxrl_llm.rewards.api import RewardsConfig
from jaxrl_llm.tasks.taskset import Taskset
from jaxrl_llm.tasks.tokenizer import Tokenizer


def copy_recorded(
  stage: StageConfig,
  longest: int,
  max_steps: int,
  tasksets: Mapping[str, Taskset],
  tokenizer: Tokenizer,
  workdir: pathlib.Path,
) -> None:
  """Copies the groups whose tasks are in the stage's tasksets to the stage's file of static rows.
  Does nothing if this file exists.

  Args:
    stage: stage whose source is `Recorded`.
    longest: maximum length of a sequence in tokens; groups with a longer sequence are left out.
    max_steps: maximum number of steps of a trajectory.

  Raises:
    UserError: the other run does not fit this one, or too few groups are left for a batch.
  """
  file, source = static_file(stage), stage.source
  if (workdir / file).exists():
    return
  run = pathlib.Path(source.run).expanduser()
  recorded = recorded_config(f'stages.{stage.name}.source.run', run)
  checkpoint = recorded.checkpoint
  vocabulary = run / TOKENIZER if checkpoint is None else model_directory(checkpoint)
  check_same_tokenizer(f'stages.{stage.name}.source', run, vocabulary, tokenizer)
  stored = StoredGroups(
    run=run,
    tasks={task.uid: task for name in source.tasksets for task in tasksets[name].tasks},
    rewards_of=recorded.rewards_of,
    tokenizer=tokenizer,
    longest=longest,
    max_steps=max_steps,
    where=f'stages.{stage.name}.source',
  )
  groups = [*stored.read(() if source.stage is None else (source.stage,))]
  if (largest := max(map(len, groups), default=0)) > source.group_size:
    raise UserError(
      f'stages.{stage.name}.source.group_size: {source.group_size}, but {source.run} stored groups '
      f'of {largest}; raise it'
    )
  left_out = dict(stored.left_out) or 'none'
  logging.info('%s: %d groups of %s; left out: %s', file, len(groups), source.run, left_out)
  _check_fills(stage, groups, left_out)
  write_recorded(workdir, file, groups)


def _check_fills(
  stage: StageConfig, groups: Sequence[Sequence[Experience]], left_out: Mapping[str, int] | str
) -> None:
  """Raises UserError if there are fewer groups than a batch needs, or if a batch may have fewer
  sequences than minibatches.
  """
  source = stage.source
  if len(groups) < source.groups_per_batch:
    raise UserError(
      f'stages.{stage.name}.source: {len(groups)} groups of {source.run} do not fill a batch of '
      f'{source.groups_per_batch} (left out: {left_out}); name the tasksets of that '
      'run, or lower groups_per_batch'
    )
  least = sum(sorted(map(len, groups))[: source.groups_per_batch])
  if least < stage.minibatches:
    raise UserError(
      f'stages.{stage.name}.minibatches: {stage.minibatches}, but the smallest '
      f'{source.groups_per_batch} groups of {source.run} have only {least} sequences; lower it'
    )


class RecordedConfig(NamedTuple):
  """Parts of another run's configuration that are needed to interpret its rollouts."""

  checkpoint: str | None
  """Checkpoint from which the policy began (`policy.init_from`); None for random weights."""
  rewards: RewardsConfig
  weights: Mapping[str, Mapping[str, float] | None]
  """Weights of the scorers in each stage (`Rollouts.rewards`), keyed by stage name and then by
  scorer name. None for a stage that sets no weights.
  """

  def rewards_of(self, stage: str) -> RewardsConfig:
    return self.rewards.weighted(self.weights.get(stage))


def recorded_config(where: str, run: pathlib.Path) -> RecordedConfig:
  """Reads the configuration of another run whose rollouts are used. Raises UserError if `run` is
  not the directory of a run; the message begins with `where`.
  """
  file = run / 'config.json'
  try:
    config = parse_json(file.read_text())
    checkpoint, rewards = config['policy']['init_from'], config['rewards']
    if not isinstance(checkpoint, str | None):
      raise ValueError('policy.init_from is not a string')
    weights = {of['name']: of.get('source', {}).get('rewards') for of in config['stages']}
    for name, by_scorer in weights.items():
      if not all(isinstance(weight, int | float) for weight in (by_scorer or {}).values()):
        raise ValueError(f'stages.{name}.source.rewards holds a weight that is not a number')
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
    reason = f'lacks {error}' if isinstance(error, KeyError) else error
    raise UserError(f'{where}: {run} is not the directory of a run ({reason})') from None
  return RecordedConfig(checkpoint, from_json(rewards, RewardsConfig, f'{file}: rewards'), weights)


def check_same_tokenizer(
  where: str, run: pathlib.Path, directory: pathlib.Path, tokenizer: Tokenizer
) -> None:
  """Raises UserError if the vocabulary of `tokenizer` differs from the vocabulary of a recorded
  run, so that the same token ids have different meanings. The message begins with `where`.

  Args:
    run: directory of the recorded run.
    directory: directory with the tokenizer of the recorded run.
    tokenizer: tokenizer of the policy that will be trained on the recorded rollouts.
  """
  if Tokenizer.from_directory(directory).vocabulary != tokenizer.vocabulary:
    raise UserError(
      f'{where}: {run} has another vocabulary ({directory}); start from its '
      'checkpoint, or use the same tasksets and policy.tokenizer'
    )
