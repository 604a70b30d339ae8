"""Selects rollouts from the store of a run, and writes them to a file in a run directory. They
become the static rows of a stage: demonstrations or preference pairs.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping

import numpy as np
from absl import logging

from jaxrl_llm.app.composition.initial_weights import model_directory
from jaxrl_llm.app.composition.recorded_rows import check_same_tokenizer, recorded_config
from jaxrl_llm.app.composition.static_rows import static_file
from jaxrl_llm.app.composition.stored_groups import StoredGroups
from jaxrl_llm.app.composition.workdir import TOKENIZER
from jaxrl_llm.app.schema import Config, StageConfig
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import Role, Sample, encode
from jaxrl_llm.master.exploring.selection import Experience, SelectionConfig, choose
from jaxrl_llm.replay.segments import write_segment
from jaxrl_llm.tasks.taskset import Taskset
from jaxrl_llm.tasks.tokenizer import Tokenizer


def write_own(
  stage: StageConfig,
  config: Config,
  tasksets: Mapping[str, Taskset],
  tokenizer: Tokenizer,
  workdir: pathlib.Path,
) -> None:
  """Writes the rows of a stage that learns from this run's own rollouts (`Stored`) to the stage's
  file of static rows. Does nothing if this file exists.

  Raises:
    UserError: the stored rollouts do not fit the stage, or none is selected.
  """
  groups = StoredGroups(
    run=workdir,
    tasks=_tasks(stage, tasksets),
    rewards_of=config.rewards_of,
    tokenizer=tokenizer,
    longest=config.rollout.max_length,
    is_own=True,
    where=f'stages.{stage.name}.source',
  )
  _write(stage, groups, workdir)


def write_others(
  stage: StageConfig,
  longest: int,
  tasksets: Mapping[str, Taskset],
  tokenizer: Tokenizer,
  workdir: pathlib.Path,
) -> None:
  """Writes the rows of a stage that learns from another run's rollouts (`Stored.run`) to the
  stage's file of static rows. Does nothing if this file exists.

  Args:
    longest: maximum length of a sequence in tokens; groups with a longer sequence are left out.

  Raises:
    UserError: the other run does not fit this one, or no rollout is selected.
  """
  run = pathlib.Path(stage.source.run).expanduser()
  recorded = recorded_config(f'stages.{stage.name}.source.run', run)
  checkpoint = recorded.checkpoint
  vocabulary = run / TOKENIZER if checkpoint is None else model_directory(checkpoint)
  check_same_tokenizer(f'stages.{stage.name}.source', run, vocabulary, tokenizer)
  groups = StoredGroups(
    run=run,
    tasks=_tasks(stage, tasksets),
    rewards_of=recorded.rewards_of,
    tokenizer=tokenizer,
    longest=longest,
    where=f'stages.{stage.name}.source',
  )
  _write(stage, groups, workdir)


def _tasks(stage: StageConfig, tasksets: Mapping[str, Taskset]):
  return {task.uid: task for name in stage.source.tasksets for task in tasksets[name].tasks}


def _write(stage: StageConfig, groups: StoredGroups, workdir: pathlib.Path) -> None:
  file, source = static_file(stage), stage.source
  path = workdir / file
  if path.exists():
    return
  rows, count = [], 0
  for group in groups.read(source.stages):
    count += 1
    rows += [encode(sample) for sample in selected_rows(source.selection, group)]
  left_out = dict(groups.left_out) or 'none'
  logging.info('%s: %d sequences of %d groups; left out: %s', *(file, len(rows), count, left_out))
  if not rows:
    raise UserError(
      f'{groups.where}: selection {source.selection.kind!r} accepts no sample of the {count} '
      f'groups of {", ".join(source.stages)} (left out: {left_out}); change the '
      'selection (with --branch_from), or let those stages explore longer'
    )
  if len(rows) < source.sequences:
    logging.warning(
      'stage %s: %d sequences do not fill a batch of %d, so batches repeat sequences',
      *(stage.name, len(rows), source.sequences),
    )
  path.parent.mkdir(parents=True, exist_ok=True)
  write_segment(path.parent, path.name, rows)


def selected_rows(selection: SelectionConfig, group: list[Experience]) -> Iterator[Sample]:
  """Yields the selected samples of a group as static rows. The two samples of a preference pair are
  adjacent.
  """
  scorable = [member for member in group if member.reward.value is not None]
  for choice in choose(selection, scorable):
    sample = _given(choice.sample)
    if choice.pair is not None:
      label = 'chosen' if choice.label == 1 else 'rejected'
      preference = {'pair_id': choice.pair, 'label': label}
      sample = dataclasses.replace(sample, uid=f'{choice.pair}/{label}', preference=preference)
    yield sample


def _given(sample: Sample) -> Sample:
  """Returns the sample as a demonstration. Its tokens are marked as not sampled, so that the loss
  does not scale the logits by a temperature and uses no logprobs of a sampling policy.
  """
  return dataclasses.replace(
    sample,
    loss_mask=sample.role == Role.POLICY,
    sampled=np.zeros_like(sample.sampled),
    behaviour_logprobs=np.zeros_like(sample.behaviour_logprobs),
    segments=(),
    temperature=1.0,
  )
