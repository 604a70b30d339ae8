"""What process 0 makes before the devices start: tasks, tokenizer, demonstrations; all of it in the run directory."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from collections.abc import Mapping, Sequence

from absl import logging

from jaxrl_llm.app.schema import Config, StageConfig
from jaxrl_llm.app.workdir import DATA, TOKENIZER
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.experience.sample import encode
from jaxrl_llm.experience.task import Task
from jaxrl_llm.master.evaluation import SuiteConfig
from jaxrl_llm.models.families import tiny
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.replay.segments import write_segment
from jaxrl_llm.rewards.api import in_force
from jaxrl_llm.rollout.workflow import demonstration_sample
from jaxrl_llm.runtime.writers import METRICS_FILE
from jaxrl_llm.tasks.taskset import Taskset, check_disjoint, demonstrations, drop_long, load_taskset
from jaxrl_llm.tasks.tokenizer import Tokenizer, build_tokenizer, task_texts
from jaxrl_llm.weights.hf import read_spec, resolve


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
  """Process 0's part of a run, before any device work."""

  tasksets: Mapping[str, Taskset]
  tokenizer: Tokenizer
  spec: ModelSpec
  suites: Sequence[tuple[SuiteConfig, Sequence[Task]]]


def checkpoint_directory(config: Config) -> pathlib.Path | None:
  """Where the policy's initial weights are; None for random ones. A run directory stands for its export."""
  source = config.policy.init_from
  if source is None:
    return None
  directory = resolve(source)
  if (directory / 'hf' / 'config.json').exists():
    return directory / 'hf'
  if (directory / METRICS_FILE).exists():
    raise UserError(f'{source}: a run that has not finished, so it has no export (hf/); finish it first')
  return directory


def prepare(config: Config, workdir: pathlib.Path) -> Prepared:
  """Loads the tasks, makes or loads the tokenizer, renders demonstrations; repeats nothing on resume."""
  tasksets = {c.name: load_taskset(c) for c in config.tasksets}
  suites = [(suite, _suite_tasks(suite, tasksets)) for suite in config.evaluation]
  _check_names(config, tasksets)
  for domain in sorted({task.domain for taskset in tasksets.values() for task in taskset.tasks}):
    in_force(config.rewards.scorers, domain)
  checkpoint = checkpoint_directory(config)
  if checkpoint is not None:
    tokenizer, spec = Tokenizer.from_directory(checkpoint), read_spec(checkpoint)
  else:
    tokenizer = _tokenizer(config, tasksets, workdir)
    overrides = {'max_position_embeddings': _longest(config), **config.policy.model}
    spec = tiny(config.policy.family, tokenizer.vocab_size, **overrides)
  limit = config.rollout.max_prompt_length
  length = lambda task: len(tokenizer.render_prompt(task.prompt))
  tasksets = {name: drop_long(taskset, limit, length) for name, taskset in tasksets.items()}
  fitting = {task.uid for taskset in tasksets.values() for task in taskset.tasks}
  suites = [(suite, [task for task in tasks if task.uid in fitting]) for suite, tasks in suites]
  for suite, tasks in suites:
    if not tasks:
      raise UserError(f'evaluation.{suite.name}: every prompt is longer than {limit} tokens; raise the prompt limit')
  for taskset in tasksets.values():
    if taskset.counts['too_long']:
      logging.info('taskset %s: %d prompts longer than %d tokens', taskset.name, taskset.counts['too_long'], limit)
  for stage in config.stages:
    if stage.demonstrations is not None:
      _write_demonstrations(stage, tasksets, tokenizer, workdir, _longest(config))
  return Prepared(tasksets=tasksets, tokenizer=tokenizer, spec=spec, suites=suites)


def _longest(config: Config) -> int:
  """Tokens of the longest sequence that this configuration lets through."""
  return config.rollout.max_prompt_length + config.rollout.max_response_length


def _check_names(config: Config, tasksets: Mapping[str, Taskset]) -> None:
  """Every taskset that is named exists, and no task is trained on and measured."""
  measured = [suite.taskset for suite in config.evaluation]
  for stage in config.stages:
    for name in stage.tasksets:
      if name not in tasksets:
        raise UserError(f'stages.{stage.name}.tasksets: no taskset {name!r}; configured are {sorted(tasksets)}')
      for evaluation in measured:
        check_disjoint(tasksets[name], tasksets[evaluation])


def _suite_tasks(suite: SuiteConfig, tasksets: Mapping[str, Taskset]) -> Sequence[Task]:
  if suite.taskset not in tasksets:
    raise UserError(f'evaluation.{suite.name}.taskset: no taskset {suite.taskset!r}; configured are {sorted(tasksets)}')
  tasks = tasksets[suite.taskset].tasks
  if suite.tasks is not None and len(tasks) < suite.tasks:
    raise UserError(
      f'evaluation.{suite.name}.tasks: {suite.tasks} wanted, taskset {suite.taskset} has {len(tasks)}; '
      'lower the number, or draw more (size)'
    )
  return tasks[: suite.tasks]


def _tokenizer(config: Config, tasksets: Mapping[str, Taskset], workdir: pathlib.Path) -> Tokenizer:
  directory = workdir / TOKENIZER
  if not directory.exists():
    # There whole or not at all, whenever this process is killed.
    unfinished = workdir / f'{TOKENIZER}.tmp'
    shutil.rmtree(unfinished, ignore_errors=True)
    texts = [text for taskset in tasksets.values() for text in task_texts(taskset.tasks)]
    build_tokenizer(config.policy.tokenizer, texts, unfinished)
    unfinished.rename(directory)
  return Tokenizer.from_directory(directory)


def demonstrations_file(stage: str) -> str:
  """Of an offline stage, relative to the run directory."""
  return f'{DATA}/{stage}.arrayrecord'


def _write_demonstrations(
  stage: StageConfig, tasksets: Mapping[str, Taskset], tokenizer: Tokenizer, workdir: pathlib.Path, longest: int
) -> None:
  file = workdir / demonstrations_file(stage.name)
  if file.exists():
    return
  pairs = [pair for name in stage.tasksets for pair in demonstrations(tasksets[name], stage.demonstrations)]
  samples = [demonstration_sample(task, answer, tokenizer, number=i) for i, (task, answer) in enumerate(pairs)]
  fitting = [sample for sample in samples if len(sample.tokens) <= longest]
  logging.info('stage %s: %d demonstrations, %d too long', stage.name, len(fitting), len(samples) - len(fitting))
  if len(fitting) < stage.sequences_per_batch:
    raise UserError(
      f'stages.{stage.name}: {len(fitting)} demonstrations of at most {longest} tokens do not fill a batch of '
      f'{stage.sequences_per_batch} sequences; draw more tasks, lower sequences_per_batch, or raise the lengths'
    )
  file.parent.mkdir(parents=True, exist_ok=True)
  write_segment(file.parent, file.name, [encode(sample) for sample in fitting])
