"""Builds the source of each stage's batches from the configuration."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable

from jaxrl_llm.app.composition.prepare import Prepared
from jaxrl_llm.app.composition.setup import Setup
from jaxrl_llm.app.composition.stages import build_processors
from jaxrl_llm.app.composition.static_rows import (
  demonstrations_file,
  held_out_file,
  static_file,
)
from jaxrl_llm.app.composition.stored_rows import write_own
from jaxrl_llm.app.composition.version_exchange import FollowedVersions
from jaxrl_llm.app.schema import StageConfig
from jaxrl_llm.app.sources import Followed, PastConfig, Recorded, Rollouts
from jaxrl_llm.data.streams import RowStream, all_rows
from jaxrl_llm.master.batches import (
  Batches,
  LateBatches,
  MixedBatches,
  RolloutBatches,
  StreamBatches,
)
from jaxrl_llm.master.experts import AddedExperts
from jaxrl_llm.master.exploring.config import ExplorerConfig
from jaxrl_llm.master.exploring.explorer import Explorer
from jaxrl_llm.master.exploring.past import Past
from jaxrl_llm.master.exploring.runner import GroupRunner
from jaxrl_llm.master.following import FollowedBatches, FollowedConfig
from jaxrl_llm.master.recorded import RecordedBatches, RecordedGroups
from jaxrl_llm.master.sharing import SharingBatches
from jaxrl_llm.master.trainer import Stage
from jaxrl_llm.replay.index import ReplayStore
from jaxrl_llm.replay.shared import SharedBatches, vocabulary_digest
from jaxrl_llm.rollout.untrusted import Bounds, checked_sample
from jaxrl_llm.rollout.workflow import completion_text
from jaxrl_llm.runtime import history
from jaxrl_llm.tasks.sampler import TaskSampler
from jaxrl_llm.weights.versions import VERSIONS, exported_digest

_LONGEST_ROW = 1 << 20
"""Maximum number of tokens of a sample that another run shares."""


def build_batches(
  setup: Setup,
  prepared: Prepared,
  stage: Stage,
  store: ReplayStore,
  runner: Callable[[ExplorerConfig], GroupRunner],
) -> Batches:
  """Builds the source of a stage's batches.

  Args:
    runner: function that returns the runner of groups, given the explorer's configuration.
  """
  config, workdir, events = setup.config, setup.workdir, setup.process.events
  seed = config.seed
  stage_config = next(configured for configured in config.stages if configured.name == stage.name)
  source = stage_config.source
  if isinstance(source, Recorded):
    groups = recorded_groups(workdir, stage_config, prepared)
    return RecordedBatches(groups, count=source.groups_per_batch, seed=seed, events=events)
  if isinstance(source, Followed):
    return _followed(setup, prepared, stage, source, store)
  if not isinstance(source, Rollouts):
    return _static(setup, prepared, stage_config)
  tasksets = [prepared.tasksets[name] for name in source.tasksets]
  explorer_config = _explorer_config(setup, stage, stage_config)
  explorer = Explorer(
    explorer_config,
    runner(explorer_config),
    sampler=TaskSampler(tasksets, source.sampler, seed=seed, share=source.share),
    store=store,
    events=events,
  )
  if source.follow is not None:
    versions = FollowedVersions(store.directory)
    return SharingBatches(
      explorer,
      store=store,
      version_of=versions.of,
      taken_versions=versions.taken,
      committed=lambda: max(setup.checkpoints.steps(), default=0),
    )
  if source.experts is None:
    return RolloutBatches(explorer, trains=stage.trains)
  return MixedBatches(
    explorer,
    _demonstrations(setup, stage, source),
    AddedExperts(store, max_uses=source.experts.max_uses, bounds=_bounds(setup, prepared)),
    rows=source.expert_rows,
  )


def _static(
  setup: Setup, prepared: Prepared, stage_config: StageConfig
) -> StreamBatches | LateBatches:
  """Builds the source of a stage whose rows are known in advance, or are selected from the store
  when the stage begins.
  """
  source, workdir, events = stage_config.source, setup.workdir, setup.process.events
  open_stream = functools.partial(
    RowStream,
    workdir,
    static_file(stage_config),
    rows=source.sequences,
    seed=setup.config.seed,
    unit=source.unit,
  )
  if stage_config.waits_for_rows:
    return LateBatches(_selecting(setup, prepared, stage_config, open_stream), events=events)
  stream = open_stream()
  measured = held_out_file(stage_config)
  held_out = all_rows(workdir, measured) if measured is not None else ()
  return StreamBatches(stream, held_out, events=events)


def _explorer_config(setup: Setup, stage: Stage, stage_config: StageConfig) -> ExplorerConfig:
  """Returns the settings with which the explorer collects a stage's rollouts."""
  config, source = setup.config, stage_config.source
  return ExplorerConfig(
    stage=stage.name,
    restarted=_restarted(setup.workdir),
    earlier=tuple(before.name for before in config.stages[: config.stages.index(stage_config)]),
    first_step=stage.start,
    groups_per_batch=source.groups_per_batch,
    group_size=source.group_size,
    max_steps=config.rollout.max_steps,
    bound=source.bound,
    batch_policy=source.batch_policy,
    batches=stage_config.steps,
    sampling=config.rollout.sampling(source.temperature),
    response_lengths=source.response_lengths,
    selection=source.selection,
    processors=build_processors(source.processors),
    past=_past(stage.name, source.past, config.seed),
    partial=config.rollout.partial,
    max_dropped_groups=source.max_dropped_groups,
    limits=source.limits,
    max_rounds=config.reward_model.max_rounds if config.reward_model is not None else 0,
    collect_deadline_s=config.rollout.collect_deadline_s,
  )


def _demonstrations(setup: Setup, stage: Stage, source: Rollouts) -> StreamBatches:
  """Builds the source of the demonstrations that are added to each batch of rollouts."""
  file = demonstrations_file(stage.name)
  stream = RowStream(setup.workdir, file, rows=source.expert_rows, seed=setup.config.seed)
  return StreamBatches(stream, events=setup.process.events)


def _bounds(setup: Setup, prepared: Prepared) -> Bounds:
  """Returns the limits on the run's sequences: vocabulary size and maximum length."""
  longest = setup.config.rollout.max_length
  return Bounds(vocab_size=prepared.spec.vocab_size, max_length=longest)


def _followed(
  setup: Setup, prepared: Prepared, stage: Stage, source: Followed, store: ReplayStore
) -> FollowedBatches:
  config, tokenizer = setup.config, prepared.tokenizer
  followed = FollowedConfig(
    stage=stage.name,
    where=f'stages.{stage.name}.source',
    groups_per_batch=source.groups_per_batch,
    group_size=source.group_size,
    bound=source.bound,
    longest=config.rollout.max_length,
    max_steps=config.rollout.max_steps,
    vocabulary=vocabulary_digest(tokenizer.vocabulary),
    deadline_s=config.rollout.collect_deadline_s,
    order=source.order,
  )
  # Samples that are too long for the stage are left out later. They must not be refused as invalid.
  bounds = Bounds(vocab_size=prepared.spec.vocab_size, max_length=_LONGEST_ROW)
  return FollowedBatches(
    followed,
    [
      SharedBatches(
        pathlib.Path(run).expanduser() / 'replay', functools.partial(checked_sample, bounds=bounds)
      )
      for run in source.runs
    ],
    store=store,
    tasks={task.uid: task for name in source.tasksets for task in prepared.tasksets[name].tasks},
    render=lambda task: tokenizer.render_prompt(task.prompt),
    text=lambda sample: completion_text(
      tokenizer, sample.tokens[sample.prompt_len :], sample.finish_reason
    ),
    exported=functools.partial(exported_digest, setup.workdir / VERSIONS),
    events=setup.process.events,
  )


def forget_later_rows(setup: Setup, step: int) -> None:
  """Removes the rows that were selected from the store for stages that have no completed step at
  `step`, from which the run resumes or branches. The rows are selected again when their stage
  begins.
  """
  for stage, config in zip(setup.stages, setup.config.stages, strict=True):
    if config.waits_for_rows and step <= stage.start:
      (setup.workdir / static_file(config)).unlink(missing_ok=True)


def _selecting(
  setup: Setup, prepared: Prepared, stage: StageConfig, open_stream: Callable[[], RowStream]
) -> Callable[[], RowStream]:
  """Returns a function that opens the stage's rows, after selecting them from the store if
  necessary.
  """

  def select() -> RowStream:
    write_own(stage, setup.config, prepared.tasksets, prepared.tokenizer, setup.workdir)
    return open_stream()

  return select


def _restarted(workdir: pathlib.Path) -> int:
  """Returns the step at which the run last branched with --reset_data; 0 if it never did."""
  return max(
    (
      entry.parent.step
      for entry in history.read(workdir)
      if entry.parent is not None and 'data' in entry.parent.reset
    ),
    default=0,
  )


def _past(stage: str, past: PastConfig | None, seed: int) -> Past | None:
  if past is None:
    return None
  return Past(stage=stage, groups=past.groups, max_uses=past.max_uses, config=past.draw, seed=seed)


def recorded_groups(
  workdir: pathlib.Path, stage: StageConfig, prepared: Prepared
) -> RecordedGroups:
  """Opens the file with the groups that were copied from another run for this stage."""
  tasks = {
    task.uid: task for name in stage.source.tasksets for task in prepared.tasksets[name].tasks
  }

  def text(sample):
    return completion_text(
      prepared.tokenizer, sample.tokens[sample.prompt_len :], sample.finish_reason
    )

  return RecordedGroups(workdir, static_file(stage), tasks=tasks, text=text)
