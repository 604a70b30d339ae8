"""Checks of a run's data: tokenizer, chat template, lengths, duplicates, and leakage of evaluation
tasks into training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxrl_llm.app.doctor.findings import Finding, failure, ok, warning
from jaxrl_llm.app.schema import Config, scored_tasksets, trained_tasksets
from jaxrl_llm.app.sources import Demonstrations, Examples, Pairs, Rollouts
from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.records.sample import Finish
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.rollout.workflow import completion_text
from jaxrl_llm.tasks.example_tokens import example_samples
from jaxrl_llm.tasks.examples import ExampleSet
from jaxrl_llm.tasks.preferences import Preferences
from jaxrl_llm.tasks.processors import normalised
from jaxrl_llm.tasks.taskset import Taskset, demonstrations
from jaxrl_llm.tasks.tokenizer import Tokenizer

_RENDERED = 64
"""Maximum number of tasks of each taskset whose rendering by the chat template is checked."""
_MEASURED = 2000
"""Maximum number of tasks of each taskset whose lengths are measured."""
_MUCH = 0.1
"""Maximum share of prompts or answers that may exceed a length limit. If more do, the check fails,
because the run would drop them and thus train on other data than the user expects.
"""
_NEAR = 0.01
"""Share of near duplicates above which the doctor warns (within a taskset) or reports a failure
(evaluation tasks that are also trained on).
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
  """Tokenizer and texts of a run, before any text is dropped for its length."""

  config: Config
  tasksets: Mapping[str, Taskset]
  preferences: Mapping[str, Preferences]
  examples: Mapping[str, ExampleSet]
  tokenizer: Tokenizer

  @property
  def shown(self) -> dict[str, list[tuple[Task, str]]]:
    """(task, answer) pairs that each stage trains on as demonstrations or preference pairs, keyed
    by stage name. A preference pair contributes both its chosen and its rejected answer.

    At most the first `_MEASURED` preference pairs, or tasks of each taskset, are included.
    """
    answers = {}
    for stage in self.config.stages:
      source = stage.source
      if isinstance(source, Pairs):
        pairs = self.preferences[source.train].pairs[:_MEASURED]
        answers[stage.name] = [
          (pair.task, text) for pair in pairs for text in (pair.chosen, pair.rejected)
        ]
        continue
      given = source.experts if isinstance(source, Rollouts) else source
      if not isinstance(source, Demonstrations) and (
        not isinstance(source, Rollouts) or given is None
      ):
        continue
      answers[stage.name] = [
        pair
        for name in given.tasksets
        for pair in demonstrations(
          self.tasksets[name],
          dataclasses.replace(
            given, count=min(given.count or _MEASURED, _MEASURED, len(self.tasksets[name].tasks))
          ),
        )
      ]
    return answers

  @property
  def used(self) -> list[str]:
    """Names of the tasksets that stages train on or whose tasks the policy attempts, sorted."""
    names = {name for stage in self.config.stages for name in trained_tasksets(stage)}
    return sorted((names | scored_tasksets(self.config)) & self.tasksets.keys())


def spread(items: Sequence, count: int) -> list:
  """Returns at most `count` of the items, evenly spaced."""
  step = max(1, len(items) // count)
  return list(items[::step][:count])


def ends(data: Data) -> Iterator[Finding]:
  """Checks that the chat template ends an answer with a token at which generation stops."""
  tokenizer = data.tokenizer
  stops = ', '.join(repr(tokenizer.token_text(token)) for token in tokenizer.stop_ids)
  try:
    answer = next(iter(_answers(data)), None)
    task, text = answer or (_first_task(data), 'x')
    if task is None:
      return
    _, completion = tokenizer.render_answer(task.prompt, text)
  except UserError:
    return  # The check `template` reports this error.
  *before, _ = completion
  passed = []
  while before and (
    _is_special(tokenizer, before[-1]) or not tokenizer.token_text(before[-1]).strip()
  ):
    passed.append(before.pop())
  ending = [token for token in passed if _is_special(tokenizer, token)]
  if ending:
    name = tokenizer.token_text(ending[-1])
    yield failure(
      'eos',
      f'the chat template ends an answer with {name!r}, but rollouts stop only at {stops}, so that '
      'they run on to their length limit',
      f'make {name!r} the eos_token in tokenizer_config.json, or list it as eos_token_id in '
      'generation_config.json',
      token=name,
      stop_ids=list(tokenizer.stop_ids),
    )
  else:
    yield ok('eos', f'answers end with {stops}', stop_ids=list(tokenizer.stop_ids))


def template(data: Data) -> Iterator[Finding]:
  """Checks that the chat template and the tokenizer preserve the texts of prompts, demonstrations
  and reference answers.
  """
  tokenizer, seen, count = data.tokenizer, {}, 0
  remedy = 'correct the chat template or the tokenizer (tokenizer_config.json), or the texts'
  try:
    for name in data.used:
      for task in spread(data.tasksets[name].tasks, _RENDERED):
        tokens = tokenizer.render_prompt(task.prompt)
        count += 1
        content = task.prompt[-1]['content']
        if _words(content) not in _words(tokenizer.decode(tokens)):
          shown = tokenizer.decode(tokens)[-80:]
          result = f'prompt {content[-80:]!r} of taskset {name} is rendered as {shown!r}'
          yield failure('template', result, remedy, taskset=name)
          return
        other = seen.setdefault(tuple(tokens), task)
        if other.prompt != task.prompt:
          result = (
            f'two prompts of taskset {name} become the same tokens, such as {content[-80:]!r}'
          )
          yield failure('template', result, remedy, taskset=name)
          return
  except UserError as error:
    yield failure('template', *_parted(error))
    return
  stripped = ''
  try:
    for task, answer in spread(_answers(data), _RENDERED):
      prompt, completion = tokenizer.render_answer(task.prompt, answer)
      count += 1
      read = completion_text(tokenizer, np.array(completion), Finish.STOP)
      if prompt != tokenizer.render_prompt(task.prompt):
        yield failure('template', f'prompt of {task.uid} differs between rollouts and data', remedy)
        return
      if read.strip() != answer.strip():
        result = f'answer {answer[:80]!r} is rendered and read back as {read[:80]!r}'
        yield failure('template', result, remedy)
        return
      stripped = stripped or (answer if read != answer else '')
    for name in sorted(scored_tasksets(data.config) & data.tasksets.keys()):
      truths = [task.truth for task in spread(data.tasksets[name].tasks, _RENDERED) if task.truth]
      for truth in truths:
        read = tokenizer.decode(tokenizer.encode(truth), skip_special=False)
        count += 1
        if read.strip() != truth.strip():
          result = (
            f'truth {truth[:80]!r} of taskset {name} is encoded and read back as {read[:80]!r}'
          )
          yield failure('template', result, remedy, taskset=name)
          return
  except UserError as error:
    yield failure('template', *_parted(error))
    return
  if stripped:
    result = f'white space at the ends of answers is lost, such as in {stripped[:80]!r}'
    yield warning(
      'template', result, 'remove it from the answers, or from the template', texts=count
    )
  else:
    yield ok(
      'template', f'{count} texts keep their content through template and tokenizer', texts=count
    )


def lengths(data: Data) -> Iterator[Finding]:
  """Compares the lengths of prompts, sequences and reference answers with the run's limits."""
  rollout, tokenizer = data.config.rollout, data.tokenizer
  limits = {'prompt': rollout.max_prompt_length, 'sequence': rollout.max_length}
  shares, longest = {}, {}

  def measure(what: str, tokens: Sequence[int], limit: int) -> None:
    if tokens:
      shares[what] = sum(length > limit for length in tokens) / len(tokens)
      longest[what] = max(tokens)
      limits[what] = limit

  try:
    for name in data.used:
      tasks = spread(data.tasksets[name].tasks, _MEASURED)
      prompts = [len(tokenizer.render_prompt(task.prompt)) for task in tasks]
      measure(f'prompts of {name}', prompts, rollout.max_prompt_length)
    for stage, pairs in data.shown.items():
      rows = [
        tokenizer.render_answer(task.prompt, answer) for task, answer in spread(pairs, _MEASURED)
      ]
      sequences = [len(prompt) + len(completion) for prompt, completion in rows]
      measure(f'sequences of {stage}', sequences, rollout.max_length)
    for name in sorted(scored_tasksets(data.config) & data.tasksets.keys()):
      tasks = [task for task in data.tasksets[name].tasks if task.truth]
      # The added 1 is for the token that ends a response.
      truths = [len(tokenizer.encode(task.truth)) + 1 for task in spread(tasks, _MEASURED)]
      measure(f'truths of {name}', truths, rollout.max_response_length)
  except UserError as error:
    yield failure('lengths', *_parted(error))
    return
  detail = dict(longest_tokens=longest, over_limit=shares)
  over = {what: share for what, share in shares.items() if share}
  overlong = ', '.join(
    f'{share:.1%} of the {what} have more than {limits[what]} tokens (at most {longest[what]})'
    for what, share in over.items()
  )
  remedy = (
    'raise rollout.max_prompt_length or rollout.max_response_length, or leave such tasks out '
    '(tasksets.processors: length)'
  )
  if not over:
    most = ', '.join(f'{what} {length} of {limits[what]}' for what, length in longest.items())
    yield ok('lengths', f'longest {most} tokens', **detail)
  elif max(over.values()) > _MUCH:
    yield failure('lengths', overlong, remedy, **detail)
  else:
    yield warning('lengths', overlong, remedy, **detail)


def examples(data: Data) -> Iterator[Finding]:
  """Checks that the tokens of the answers in examples can be located, and that the examples are
  within the length limit. At most `_MEASURED` examples of each set are checked.
  """
  longest = data.config.rollout.max_length
  for name, example_set in data.examples.items():
    part = dataclasses.replace(example_set, examples=tuple(spread(example_set.examples, _MEASURED)))
    samples, counts = example_samples(part, data.tokenizer, longest)
    rows = len(part.examples)
    lost = {
      what: counts[what]
      for what in ('corrupt', 'too_long', 'truncated', 'without_loss')
      if counts[what]
    }
    tokens = sum(len(sample.tokens) for sample in samples)
    learned = sum(int(sample.loss_mask.sum()) for sample in samples)
    summary = f'{rows:,} rows have {tokens:,} tokens, {learned:,} of them in the loss'
    if lost:
      what = ', '.join(f'{count:,} {fate}' for fate, count in lost.items())
      worst = max(lost.values()) / rows
      yield (failure if worst > _MUCH else warning)(
        f'examples {name}',
        f'{summary}; {what} at {longest} tokens',
        'raise rollout.max_prompt_length or rollout.max_response_length, or correct the rows, '
        'which the log names',
        **counts,
      )
    else:
      yield ok(f'examples {name}', summary, **counts)


def duplicates(data: Data) -> Iterator[Finding]:
  """Counts duplicates among the tasks of each taskset.

  Exact duplicates were dropped when the taskset was loaded. Near duplicates, which differ only in
  case, spacing or punctuation, remain in the taskset.
  """
  near, exact, read = {}, 0, 0
  for name in data.used:
    taskset = data.tasksets[name]
    exact += taskset.counts.get('duplicate', 0)
    read += taskset.counts.get('read', 0)
    texts = [normalised(task) for task in taskset.tasks]
    near[name] = 1 - len(set(texts)) / len(texts)
  worst = max(near, key=near.get, default=None)
  detail = dict(dropped=exact, read=read, near_duplicates=near)
  result = f'{exact:,} of {read:,} rows repeat a prompt and are dropped'
  if worst is not None and near[worst] > _NEAR:
    yield warning(
      'duplicates',
      f'{result}; {near[worst]:.1%} of the tasks of {worst} differ from another only in case, '
      'spacing or punctuation',
      "drop them with tasksets.processors: TaskProcessorConfig(name='dedup')",
      **detail,
    )
  elif data.used:
    yield ok('duplicates', result, **detail)


def leakage(data: Data) -> Iterator[Finding]:
  """Checks whether tasks of evaluations are also trained on, exactly or as near duplicates."""
  suites = sorted({suite.taskset for suite in data.config.evaluation} & data.tasksets.keys())
  if not suites:
    return
  exact: dict[str, Task] = {}
  near: dict[str, Task] = {}
  measured = 0
  trained = _trained_tasks(data)
  digests = {task.digest for task in trained} | {
    example.digest
    for stage in data.config.stages
    if isinstance(stage.source, Examples)
    for example in data.examples[stage.source.train].examples
  }
  texts = {normalised(task) for task in trained}
  for name in suites:
    for task in data.tasksets[name].tasks:
      measured += 1
      if task.digest in digests:
        exact[task.uid] = task
      elif normalised(task) in texts:
        near[task.uid] = task
  detail = dict(evaluation_tasks=measured, exact=len(exact), near=len(near))
  if exact or near:
    task = next(iter((exact or near).values()))
    content = task.prompt[-1]['content'][:80]
    result = (
      f'of {measured:,} evaluation tasks {len(exact):,} are trained on and {len(near):,} differ '
      f'from a trained one only in case, spacing or punctuation, such as {content!r}'
    )
    remedy = (
      "give both tasksets the same holdout, and split 'train' and 'eval'; drop near duplicates "
      "from training with tasksets.processors: TaskProcessorConfig(name='dedup')"
    )
    few = not exact and len(near) / measured <= _NEAR
    yield (warning if few else failure)('leakage', result, remedy, **detail)
  else:
    yield ok('leakage', f'none of {measured:,} evaluation tasks is trained on', **detail)


def _trained_tasks(data: Data) -> list[Task]:
  tasks = []
  for stage in data.config.stages:
    if isinstance(stage.source, Pairs):
      tasks += [pair.task for pair in data.preferences[stage.source.train].pairs]
    for name in trained_tasksets(stage):
      tasks += data.tasksets[name].tasks
  return list({task.digest: task for task in tasks}.values())


def _answers(data: Data) -> list[tuple[Task, str]]:
  return [pair for pairs in data.shown.values() for pair in pairs]


def _first_task(data: Data) -> Task | None:
  return next((data.tasksets[name].tasks[0] for name in data.used), None)


def _is_special(tokenizer: Tokenizer, token: int) -> bool:
  return bool(tokenizer.token_text(token)) and not tokenizer.decode([token])


def _words(text: str) -> str:
  return ' '.join(text.split())


def _parted(error: UserError) -> tuple[str, str]:
  """Splits an error's message into (problem, remedy)."""
  result, _, remedy = one_line(error, 2000).rpartition('; ')
  return (result, remedy) if result else (remedy, 'correct it')
