"""Prepares tasks, tokenizer and static rows before any work on the devices.

Only process 0 does this. The files go to the run directory.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence

from absl import logging

from jaxrl_llm.app.composition.initial_weights import checkpoint_directory, model_directory
from jaxrl_llm.app.composition.recorded_rows import copy_recorded
from jaxrl_llm.app.composition.static_rows import (
  check_fills,
  static_file,
  write_demonstrations,
  write_examples,
  write_pairs,
)
from jaxrl_llm.app.composition.stored_rows import write_others
from jaxrl_llm.app.composition.workdir import TOKENIZER
from jaxrl_llm.app.schema import Config, PreferenceSource, scored_tasksets, trained_tasksets
from jaxrl_llm.app.sources import (
  Demonstrations,
  Examples,
  ExpertsConfig,
  Pairs,
  Recorded,
  Rollouts,
  Stored,
)
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.data.streams import sample_lengths
from jaxrl_llm.master.evaluation import SuiteConfig
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rewards.api import RewardsConfig, in_force
from jaxrl_llm.rewards.scorers.verifier.scorer import check_verifiers
from jaxrl_llm.tasks.examples import ExampleSet, example_texts, load_examples
from jaxrl_llm.tasks.preferences import (
  Preferences,
  load_preferences,
  pairs_of_tasks,
)
from jaxrl_llm.tasks.processors import ProcessorContext, in_order, process
from jaxrl_llm.tasks.taskset import (
  Taskset,
  check_disjoint,
  drop_long,
  taskset_loader,
)
from jaxrl_llm.tasks.tokenizer import Tokenizer, build_tokenizer, task_texts
from jaxrl_llm.weights.hf import read_spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
  """Tasks, tokenizer and data of a run, which process 0 prepares before any work on the devices."""

  tasksets: Mapping[str, Taskset]
  tokenizer: Tokenizer
  spec: ModelSpec
  suites: Sequence[tuple[SuiteConfig, Sequence[Task]]]
  lengths: Mapping[str, Sequence[int]]
  """Sequence lengths in tokens of all rows or of a sample of them, keyed by the name of the stage.
  Contains only stages whose rows are known before the run begins.
  """


def prepare(
  config: Config, workdir: pathlib.Path, load: Callable[[str], Taskset] | None = None
) -> Prepared:
  """Loads the tasks, loads or builds the tokenizer, and writes the static rows that are known
  before the run begins.

  Static rows are demonstrations, examples, preference pairs and rollouts recorded by other runs.
  Files that exist already are kept.

  Args:
    load: returns the taskset with a given name; pass it to share loaded tasks with other code. If
      None, a loader that loads each taskset once is used.
  """
  load = load or taskset_loader(config.tasksets)
  tasksets = {c.name: load(c.name) for c in config.tasksets}
  suites = [(suite, _suite_tasks(suite, tasksets)) for suite in config.evaluation]
  check_names(config, tasksets)
  for suite in config.evaluation:
    check_scored(tasksets[suite.taskset], config.rewards)
  for stage in config.stages:
    for name in stage.source.tasksets if stage.explores else ():
      check_scored(tasksets[name], config.rewards_of(stage.name))
  for name in sorted(scored_tasksets(config)):
    check_verifiers(tasksets[name].tasks, config.rewards.scorers)
  preferences = load_all_preferences(config, tasksets)
  examples = load_all_examples(config)
  _check_held_out(config, preferences, examples, suites)
  for stage in config.stages:
    if stage.critic.init_from is not None:
      # Report a missing model now instead of at the start of its stage.
      model_directory(stage.critic.init_from)
  tokenizer = load_tokenizer(config, tasksets, preferences, examples, workdir)
  spec = _spec(config, tokenizer)
  tasksets = _fitting(config, tasksets, spec, tokenizer)
  suites = _fitting_suites(suites, tasksets, config.rollout.max_prompt_length)
  _write_rows(config, tasksets, preferences, examples, tokenizer, spec, workdir)
  lengths = {
    stage.name: sample_lengths(workdir, static_file(stage), unit=stage.source.unit)
    for stage in config.stages
    if stage.has_static_rows
  }
  return Prepared(tasksets=tasksets, tokenizer=tokenizer, spec=spec, suites=suites, lengths=lengths)


def _spec(config: Config, tokenizer: Tokenizer) -> ModelSpec:
  """Returns the policy's spec: the checkpoint's, or one for a new model with random weights.

  Raises UserError if the tokenizer has more tokens than the model.
  """
  checkpoint = checkpoint_directory(config)
  if checkpoint is not None:
    spec = read_spec(checkpoint)
    tokenizer.check_fits(spec.vocab_size, f'the model in {checkpoint}')
    return spec
  # A reward model also reads a stop token after an answer that reached the length limit, so its
  # sequences may be one token longer.
  scores = config.reward_model is not None and config.reward_model.stage is not None
  overrides = {
    'vocab_size': tokenizer.vocab_size,
    'max_position_embeddings': config.rollout.max_length + scores,
    **config.policy.model,
  }
  spec = tiny(config.policy.family, **overrides)
  if spec.vocab_size < tokenizer.vocab_size:
    raise UserError(
      f'policy.model.vocab_size: {spec.vocab_size}, and the tokenizer has {tokenizer.vocab_size} '
      'tokens; raise it, or leave it out'
    )
  tokenizer.check_fits(spec.vocab_size, 'the model')
  return spec


def _fitting(
  config: Config, tasksets: Mapping[str, Taskset], spec: ModelSpec, tokenizer: Tokenizer
) -> dict[str, Taskset]:
  """Returns the tasksets without the tasks that processors drop or whose prompts are too long.

  Raises UserError if a prompt has a token that the model lacks, or if a stage would train on a
  remaining task that also occurs in an evaluation.
  """
  limit = config.rollout.max_prompt_length

  def length(task: Task) -> int:
    tokens = tokenizer.render_prompt(task.prompt)
    if max(tokens, default=0) >= spec.vocab_size:
      raise UserError(
        f'taskset {task.taskset}: a prompt has token {max(tokens)}, and the model has '
        f'{spec.vocab_size} tokens; use the tokenizer of the model'
      )
    return len(tokens)

  tasksets = {name: drop_long(taskset, limit, length) for name, taskset in tasksets.items()}
  tasksets = _processed(config, tasksets, length)
  for stage in config.stages:
    for name in trained_tasksets(stage):
      for suite in config.evaluation:
        check_disjoint(tasksets[name], tasksets[suite.taskset])
  for taskset in tasksets.values():
    if too_long := taskset.counts['too_long']:
      logging.info('taskset %s: %d prompts longer than %d tokens', taskset.name, too_long, limit)
  return tasksets


def _fitting_suites(
  suites: Sequence[tuple[SuiteConfig, Sequence[Task]]], tasksets: Mapping[str, Taskset], limit: int
) -> list[tuple[SuiteConfig, Sequence[Task]]]:
  """Returns the suites without the tasks that are no longer in the tasksets.

  Raises UserError if a suite has no task left. `limit` is the maximum prompt length in tokens.
  """
  fitting = {task.uid for taskset in tasksets.values() for task in taskset.tasks}
  suites = [(suite, [task for task in tasks if task.uid in fitting]) for suite, tasks in suites]
  for suite, tasks in suites:
    if not tasks:
      raise UserError(
        f'evaluation.{suite.name}: every task was dropped by a processor or has a prompt of more '
        f'than {limit} tokens; raise the prompt limit, or take more tasks'
      )
  return suites


def _write_rows(
  config: Config,
  tasksets: Mapping[str, Taskset],
  preferences: Mapping[str, Preferences],
  examples: Mapping[str, ExampleSet],
  tokenizer: Tokenizer,
  spec: ModelSpec,
  workdir: pathlib.Path,
) -> None:
  """Writes the static rows that are known before the run begins to the run directory, unless their
  files exist.
  """
  longest = config.rollout.max_length
  for stage in config.stages:
    match stage.source:
      case Demonstrations() as shown:
        write_demonstrations(
          stage.name, shown, shown.sequences, tasksets, tokenizer, workdir, longest
        )
      case Rollouts(experts=ExpertsConfig() as experts, expert_rows=count):
        write_demonstrations(stage.name, experts, count, tasksets, tokenizer, workdir, longest)
      case Recorded():
        copy_recorded(stage, longest, config.rollout.max_steps, tasksets, tokenizer, workdir)
      case Stored(run=str()):
        write_others(stage, longest, tasksets, tokenizer, workdir)
  for source in config.preferences:
    write_pairs(source, preferences[source.name], tokenizer, workdir, longest)
  for example_set in examples.values():
    write_examples(example_set, tokenizer, spec, workdir, longest)
  for stage in config.stages:
    if isinstance(stage.source, Examples):
      check_fills(stage, workdir)


def load_all_preferences(config: Config, tasksets: Mapping[str, Taskset]) -> dict[str, Preferences]:
  """Loads the configured preferences, keyed by name."""
  return {source.name: _preferences(source, config, tasksets) for source in config.preferences}


def load_all_examples(config: Config) -> dict[str, ExampleSet]:
  """Loads the configured examples, keyed by name."""
  return {source.name: load_examples(source) for source in config.examples}


def load_tokenizer(
  config: Config,
  tasksets: Mapping[str, Taskset],
  preferences: Mapping[str, Preferences],
  examples: Mapping[str, ExampleSet],
  workdir: pathlib.Path,
) -> Tokenizer:
  """Loads the checkpoint's tokenizer. Without a checkpoint, loads the tokenizer in the run
  directory, after building it if it does not exist.
  """
  checkpoint = checkpoint_directory(config)
  if checkpoint is not None:
    return Tokenizer.from_directory(checkpoint)
  return _tokenizer(config, tasksets, preferences, examples, workdir)


def check_scored(taskset: Taskset, rewards: RewardsConfig) -> None:
  """Raises UserError if a domain of the taskset has no scorer, or is not judged by the scorer that
  `rewards.correct_by` names.
  """
  for domain in sorted({task.domain for task in taskset.tasks}):
    scorers = {scorer.name for scorer in in_force(rewards.scorers, domain, taskset.name)}
    if rewards.correct_by is not None and rewards.correct_by not in scorers:
      raise UserError(
        f'rewards.correct_by: {rewards.correct_by!r} does not judge domain {domain!r} of taskset '
        f'{taskset.name}, so no answer there would be correct; let it judge all domains, or '
        'remove correct_by'
      )


def _processed(
  config: Config, tasksets: Mapping[str, Taskset], length_of: Callable[[Task], int]
) -> dict[str, Taskset]:
  """Runs the processors of each taskset. The function `in_order` determines the order of the
  tasksets: tasksets for evaluation come first.
  """
  configured = {taskset.name: taskset.processors for taskset in config.tasksets}
  processed, kept = {}, []
  for name in in_order(configured, {suite.taskset for suite in config.evaluation}):
    processed[name] = process(tasksets[name], configured[name], ProcessorContext(kept, length_of))
    kept += processed[name].tasks
  return {name: processed[name] for name in tasksets}


def check_names(config: Config, tasksets: Mapping[str, Taskset]) -> None:
  """Raises UserError if a stage names tasksets, preferences or examples that are not configured."""
  for stage in config.stages:
    source = stage.source
    if isinstance(source, Examples | Pairs):
      kind = 'preferences' if isinstance(source, Pairs) else 'examples'
      known = sorted(configured.name for configured in getattr(config, kind))
      for name in (source.train, source.held_out):
        if name is not None and name not in known:
          raise UserError(f'stages.{stage.name}.source: no {kind} {name!r}; configured are {known}')
    for name in trained_tasksets(stage):
      if name not in tasksets:
        raise UserError(
          f'stages.{stage.name}.source.tasksets: no taskset {name!r}; configured are '
          f'{sorted(tasksets)}'
        )


def _check_held_out(
  config: Config,
  preferences: Mapping[str, Preferences],
  examples: Mapping[str, ExampleSet],
  suites: Sequence[tuple[SuiteConfig, Sequence[Task]]],
) -> None:
  """Raises UserError if a prompt of training pairs or examples also occurs in an evaluation suite
  or in the held-out data of the stage.
  """
  for stage in config.stages:
    source = stage.source
    if not isinstance(source, Examples | Pairs):
      continue
    kind = 'preferences' if isinstance(source, Pairs) else 'examples'
    measured = {suite.name: {task.digest for task in tasks} for suite, tasks in suites}
    trained, held_out = (
      {pair.task.digest for pair in preferences[name].pairs}
      if isinstance(source, Pairs)
      else {example.digest for example in examples[name].examples}
      for name in (source.train, source.held_out or source.train)
    )
    if source.held_out is not None:
      measured[source.held_out] = held_out
    for name, digests in measured.items():
      if common := trained & digests:
        raise UserError(
          f'stages.{stage.name}: {kind} {source.train} (training) and {name} (held out) share '
          f"{len(common)} prompts; give both the same holdout or fold, and split 'train' and 'eval'"
        )


def _suite_tasks(suite: SuiteConfig, tasksets: Mapping[str, Taskset]) -> Sequence[Task]:
  if suite.taskset not in tasksets:
    raise UserError(
      f'evaluation.{suite.name}.taskset: no taskset {suite.taskset!r}; configured are '
      f'{sorted(tasksets)}'
    )
  tasks = tasksets[suite.taskset].tasks
  if suite.tasks is not None and len(tasks) < suite.tasks:
    raise UserError(
      f'evaluation.{suite.name}.tasks: {suite.tasks} wanted, taskset {suite.taskset} has '
      f'{len(tasks)}; lower the number, or draw more (size)'
    )
  return tasks[: suite.tasks]


def _tokenizer(
  config: Config,
  tasksets: Mapping[str, Taskset],
  preferences: Mapping[str, Preferences],
  examples: Mapping[str, ExampleSet],
  workdir: pathlib.Path,
) -> Tokenizer:
  directory = workdir / TOKENIZER
  if not directory.exists():
    # The directory is renamed to its final name only when complete, so that a killed process leaves
    # no partial tokenizer.
    unfinished = workdir / f'{TOKENIZER}.tmp'
    shutil.rmtree(unfinished, ignore_errors=True)
    texts = [text for taskset in tasksets.values() for text in task_texts(taskset.tasks)]
    for pair in (pair for source in preferences.values() for pair in source.pairs):
      texts += [*task_texts([pair.task]), pair.chosen, pair.rejected]
    texts += [text for source in examples.values() for text in example_texts(source)]
    build_tokenizer(config.policy.tokenizer, texts, unfinished)
    unfinished.rename(directory)
  return Tokenizer.from_directory(directory)


_OF_TASKS = ('name', 'source', 'size', 'chosen', 'wrong')
"""Fields of `PreferenceSource` that may be set if the preferences are made from a taskset. The
taskset determines everything else.
"""


def _preferences(
  source: PreferenceSource, config: Config, tasksets: Mapping[str, Taskset]
) -> Preferences:
  if not source.source.startswith('taskset:'):
    if source.wrong:
      raise UserError(
        f'preferences.{source.name}.wrong: rows of a file contain rejected answers; use `rejected`'
      )
    return load_preferences(source)
  name = source.source.removeprefix('taskset:')
  if name not in tasksets:
    raise UserError(
      f'preferences.{source.name}.source: no taskset {name!r}; configured are {sorted(tasksets)}'
    )
  if next(taskset for taskset in config.tasksets if taskset.name == name).processors:
    raise UserError(
      f'preferences.{source.name}.source: taskset {name} has processors, which do not apply to '
      'pairs; use a taskset without processors'
    )
  if source.chosen is None or not source.wrong:
    raise UserError(
      f'preferences.{source.name}: pairs of a taskset need the templates chosen and wrong'
    )
  for field in dataclasses.fields(source):
    default = field.default if field.default is not dataclasses.MISSING else {}
    if field.name not in _OF_TASKS and getattr(source, field.name) != default:
      raise UserError(
        f'preferences.{source.name}.{field.name}: the taskset determines it; remove it'
      )
  return pairs_of_tasks(
    tasksets[name], chosen=source.chosen, rejected=source.wrong, count=source.size, name=source.name
  )
