"""Writes static rows to files in a run directory: demonstrations, preference pairs and examples.

A file that exists is kept, so that a resumed run trains on the same rows.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from absl import logging

from jaxrl_llm.app.composition.workdir import DATA
from jaxrl_llm.app.schema import PreferenceSource, StageConfig
from jaxrl_llm.app.sources import Demonstrations, Examples, ExpertsConfig, Pairs
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import encode
from jaxrl_llm.data.streams import count_rows
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.replay.segments import write_segment
from jaxrl_llm.rollout.workflow import demonstration_sample
from jaxrl_llm.tasks.example_tokens import example_samples
from jaxrl_llm.tasks.examples import ExampleSet
from jaxrl_llm.tasks.preferences import Preferences, preference_samples
from jaxrl_llm.tasks.taskset import Taskset, demonstrations
from jaxrl_llm.tasks.tokenizer import Tokenizer


def demonstrations_file(stage: str) -> str:
  """Returns the path of a stage's demonstrations, relative to the run directory."""
  return f'{DATA}/{stage}.arrayrecord'


def preferences_file(name: str) -> str:
  """Returns the path of preference samples, relative to the run directory. Chosen and rejected
  samples alternate.
  """
  return f'{DATA}/{name}.pairs.arrayrecord'


def examples_file(name: str) -> str:
  """Returns the path of the samples made from examples, relative to the run directory."""
  return f'{DATA}/{name}.examples.arrayrecord'


def static_file(stage: StageConfig) -> str:
  """Returns the path, relative to the run directory, of the static rows of a stage whose source is
  not `Rollouts`.
  """
  match stage.source:
    case Pairs(train=name):
      return preferences_file(name)
    case Examples(train=name):
      return examples_file(name)
  return demonstrations_file(stage.name)


def held_out_file(stage: StageConfig) -> str | None:
  """Returns the path of the held-out rows of a stage, relative to the run directory; None if there
  are none. Each evaluation of the stage measures the loss on examples, or the accuracy on pairs.
  """
  match stage.source:
    case Pairs(held_out=str() as name):
      return preferences_file(name)
    case Examples(held_out=str() as name):
      return examples_file(name)
  return None


def write_demonstrations(
  stage: str,
  config: Demonstrations | ExpertsConfig,
  batch: int,
  tasksets: Mapping[str, Taskset],
  tokenizer: Tokenizer,
  workdir: pathlib.Path,
  longest: int,
) -> None:
  """Writes the demonstrations of at most `longest` tokens to the stage's file of static rows, as
  samples. Does nothing if the file exists. Raises UserError if there are fewer than `batch` such
  demonstrations.
  """
  file, names = demonstrations_file(stage), config.tasksets
  path = workdir / file
  if path.exists():
    return
  pairs = [pair for name in names for pair in demonstrations(tasksets[name], config)]
  samples = [
    demonstration_sample(task, answer, tokenizer, number=i)
    for i, (task, answer) in enumerate(pairs)
  ]
  fitting = [sample for sample in samples if len(sample.tokens) <= longest]
  logging.info(
    '%s: %d demonstrations, %d too long', file, len(fitting), len(samples) - len(fitting)
  )
  if len(fitting) < batch:
    raise UserError(
      f'demonstrations of {", ".join(names)}: {len(fitting)} of at most {longest} tokens do not '
      f'fill a batch of {batch} sequences; draw more tasks, lower the batch, or raise the lengths'
    )
  path.parent.mkdir(parents=True, exist_ok=True)
  write_segment(path.parent, path.name, [encode(sample) for sample in fitting])


def write_pairs(
  source: PreferenceSource,
  preferences: Preferences,
  tokenizer: Tokenizer,
  workdir: pathlib.Path,
  longest: int,
) -> None:
  path = workdir / preferences_file(source.name)
  if path.exists():
    return
  samples = [preference_samples(pair, tokenizer) for pair in preferences.pairs]
  fitting = [both for both in samples if max(len(sample.tokens) for sample in both) <= longest]
  logging.info(
    'preferences %s: %d pairs, %d too long', source.name, len(fitting), len(samples) - len(fitting)
  )
  if not fitting:
    raise UserError(
      f'preferences.{source.name}: every pair has a side of more than {longest} tokens; raise the '
      'lengths'
    )
  path.parent.mkdir(parents=True, exist_ok=True)
  write_segment(path.parent, path.name, [encode(sample) for both in fitting for sample in both])


def write_examples(
  examples: ExampleSet, tokenizer: Tokenizer, spec: ModelSpec, workdir: pathlib.Path, longest: int
) -> None:
  """Writes the examples to a file in the run directory, as samples of at most `longest` tokens.
  `examples.config.too_long` determines whether a longer example is truncated, split, skipped or
  refused.
  """
  path = workdir / examples_file(examples.config.name)
  if path.exists():
    return
  samples, _ = example_samples(examples, tokenizer, longest)
  largest = max(int(sample.tokens.max()) for sample in samples)
  if largest >= spec.vocab_size:
    raise UserError(
      f'examples {examples.config.name}: a row has token {largest}, and the model has '
      f'{spec.vocab_size} tokens; use the tokenizer of the model'
    )
  path.parent.mkdir(parents=True, exist_ok=True)
  write_segment(path.parent, path.name, [encode(sample) for sample in samples])


def check_fills(stage: StageConfig, workdir: pathlib.Path) -> None:
  """Raises UserError if the stage has fewer sequences of examples than a batch needs. Otherwise
  logs the number of sequences, of steps per epoch and of epochs.
  """
  count = count_rows(workdir, static_file(stage))
  batch = stage.source.sequences
  if count < batch:
    raise UserError(
      f'stages.{stage.name}.source: {count} sequences of examples {stage.source.train} do not fill '
      f'a batch of {batch}; add rows, or lower sequences_per_batch'
    )
  logging.info(
    'stage %s: %d sequences, %.1f steps per epoch, %.1f epochs',
    *(stage.name, count, count / batch, stage.steps * batch / count),
  )
