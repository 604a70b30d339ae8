"""Workflows: a workflow turns a task into samples. The built-in one samples several completions of
the task's prompt.

The completion tokens in a sample of the built-in workflow are exactly those that the engine
returned. A custom workflow is selected in `rollout.workflow`, by the name of a function of (hub,
tokenizer, max_tokens, **options) that returns a `Workflow`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from absl import logging
from jaxtyping import Int

from jaxrl_llm.core.errors import RunError, one_line
from jaxrl_llm.core.files import parse_json
from jaxrl_llm.core.records.sample import Finish, Role, Sample, Source, media_of
from jaxrl_llm.core.records.task import Message, Task
from jaxrl_llm.rewards.api import MAX_EVIDENCE, MAX_PART_NAME, MAX_PARTS, MAX_REWARD, Verdict
from jaxrl_llm.rollout.api import Completion, Generator, Request, Sampling
from jaxrl_llm.rollout.recording import Place, Recording
from jaxrl_llm.tasks.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkflowConfig:
  """Selects the workflow of a run."""

  kind: str = 'single_turn'
  """'single_turn', 'environment', 'tools', or 'module:attribute' of the function that builds a
  custom workflow.
  """
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Options of 'environment' (`EnvironmentWorkflow`) or 'tools' (`ToolUse`), or keyword arguments
  of the function that builds a custom workflow.
  """


class Rollout(NamedTuple):
  """A finished sample as a workflow yields it."""

  sample: Sample
  text: str
  """The policy's response, as `Workflow.text` decodes it."""
  verdict: Verdict | None = None
  """Reward of the environment; None if the workflow gives none."""
  turns: tuple[Message, ...] = ()
  """Conversation after the prompt, as `turns_of` returns it. It may be left empty if `text` is the
  whole conversation.
  """


@runtime_checkable
class Workflow(Protocol):
  """Turns tasks into samples. `run` is called for many tasks concurrently."""

  def run(
    self, task: Task, visit: int, *, stage: str, samples: int, sampling: Sampling
  ) -> AsyncIterator[Rollout | tuple[Sample, str]]:
    """Yields each sample with its decoded response as soon as the sample finishes. The
    workflow must yield each sample index below `samples` once.

    Closing the iterator cancels the samples in flight.

    Args:
      task: the task to attempt.
      visit: number of times that the task was drawn before, in this stage and earlier stages. It is
        part of the random key of every request.
      stage: name of the stage, the first part of the sample uid `<stage>/<task
        uid>/<visit>/<index>`. The group id is the sample uid without the index.
      samples: number of samples.
      sampling: sampling parameters.
    """
    ...

  def text(self, sample: Sample) -> str:
    """Decodes the policy's response."""
    ...


class Roster:
  """Record of the samples of a group that have arrived. Each index below `samples` is expected
  once.
  """

  def __init__(self, group: str, samples: int):
    """
    Args:
      group: id `<stage>/<task uid>/<visit>` of the group. It is the prefix of the uids of its
        samples.
      samples: number of expected samples.
    """
    self._seen: set[int] = set()
    self._group, self._samples = group, samples

  def take(self, sample: Sample) -> bool:
    """Records a sample and returns whether it is the first with its index. Raises ValueError if the
    sample does not belong to the group.
    """
    index = sample.sample_index
    if not 0 <= index < self._samples:
      raise ValueError(f'sample {sample.uid} has index {index}, wanted one of {self._samples}')
    wanted = f'{self._group}/{index}'
    if (sample.uid, sample.group_id) != (wanted, self._group):
      raise ValueError(
        f'sample {sample.uid} of group {sample.group_id}, wanted sample {wanted} of group '
        f'{self._group}'
      )
    if index in self._seen:
      return False
    self._seen.add(index)
    return True

  def incomplete(self) -> str:
    """Returns an error message that names a missing sample, or an empty string if none is
    missing.
    """
    missing = sorted({*range(self._samples)} - self._seen)
    return f'its workflow ended without sample {missing[0]} of {self._samples}' if missing else ''


def check_limits(verdict: Verdict, name: str) -> None:
  """Raises ValueError if an environment's reward exceeds the limits that the master sets for the
  rewards of explorers: those of its numbers, of its parts, and of its evidence, which is JSON.

  Args:
    name: name of the sample for messages.
  """
  numbers = [*verdict.turn_values, *verdict.parts.values()]
  for number in numbers if verdict.value is None else [verdict.value, *numbers]:
    if not abs(number) <= MAX_REWARD:
      raise ValueError(f'{name}: has reward {number}, wanted a number within ±{MAX_REWARD:g}')
  if len(verdict.parts) > MAX_PARTS:
    raise ValueError(
      f'{name}: has a reward of {len(verdict.parts)} counts, wanted at most {MAX_PARTS}'
    )
  for part in verdict.parts:
    if not (isinstance(part, str) and len(part) <= MAX_PART_NAME and part.isprintable()):
      raise ValueError(
        f'{name}: has a count {one_line(repr(part), 100)}, wanted a name of at most '
        f'{MAX_PART_NAME} characters, all printable'
      )
  try:
    evidence = json.dumps(dict(verdict.evidence), allow_nan=False)
    if len(evidence) <= MAX_EVIDENCE:
      parse_json(evidence)
  except (TypeError, ValueError, RecursionError) as error:
    raise ValueError(one_line(f'{name}: the evidence of a reward is not JSON: {error}')) from None
  if len(evidence) > MAX_EVIDENCE:
    raise ValueError(
      f'{name}: the evidence of a reward has {len(evidence)} characters as JSON, wanted at most '
      f'{MAX_EVIDENCE}'
    )


def check_verdict(rollout: Rollout) -> None:
  """Raises ValueError if the environment's reward of a rollout exceeds `check_limits`, or has more
  turn values than the sample has turns (runs of tokens in the loss).
  """
  sample, verdict = rollout.sample, rollout.verdict
  if verdict is None:
    return
  check_limits(verdict, f'sample {sample.uid}')
  turns = np.count_nonzero(np.diff(sample.loss_mask.astype(np.int8), prepend=0) == 1)
  if len(verdict.turn_values) > turns:
    raise ValueError(
      f'sample {sample.uid} has rewards for {len(verdict.turn_values)} turns, wanted at '
      f'most {turns}'
    )


async def checked_run(
  workflow: Workflow, task: Task, visit: int, *, stage: str, samples: int, sampling: Sampling
) -> AsyncIterator[Rollout]:
  """Runs a workflow and yields its samples. Of several samples with the same index, only the first
  is yielded.

  Raises:
    RunError: the workflow yields an unexpected sample or omits an expected one.
  """
  group = f'{stage}/{task.uid}/{visit}'
  roster = Roster(group, samples)
  runs = workflow.run(task, visit, stage=stage, samples=samples, sampling=sampling)
  async with contextlib.aclosing(runs):
    async for yielded in runs:
      rollout = Rollout(*yielded)
      try:
        is_first = roster.take(rollout.sample)
        check_verdict(rollout)
      except ValueError as error:
        raise RunError(f'rollout.workflow: {error}; correct the workflow') from None
      if is_first:
        yield rollout
      else:
        logging.log_first_n(
          logging.WARNING,
          'rollout.workflow: sample %s was yielded twice; the first one counts',
          5,
          rollout.sample.uid,
        )
  if problem := roster.incomplete():
    raise RunError(
      f'rollout.workflow: group {group}: {problem}; it must yield each index below {samples} once'
    )


class SingleTurn:
  """Workflow with one prompt and one completion per sample."""

  def __init__(self, engine: Generator, tokenizer: Tokenizer, *, max_tokens: int):
    self._engine, self._tokenizer, self.max_tokens = engine, tokenizer, max_tokens

  async def run(
    self, task: Task, visit: int, *, stage: str, samples: int, sampling: Sampling
  ) -> AsyncIterator[tuple[Sample, str]]:
    request = await self._request(task, visit, stage=stage, samples=samples, sampling=sampling)
    prompt = list(request.prompt)
    async for index, completion in self._engine.generate(request):
      sample = rollout_sample(
        task, visit, index, prompt, completion, group=request.uid, temperature=sampling.temperature
      )
      yield sample, self.text(sample)

  async def extend(
    self,
    task: Task,
    visit: int,
    *,
    stage: str,
    samples: int,
    sampling: Sampling,
    begun: Mapping[int, Sequence[int]],
    budget: Mapping[int, int],
  ) -> dict[int, Completion]:
    """Samples further tokens for unfinished samples of a group. Returns a completion with only the
    new tokens for each sample in `budget`, keyed by sample index.

    Args:
      begun: tokens of each sample so far, keyed by sample index; empty for a new group.
      budget: maximum number of further tokens of each unfinished sample, keyed by sample index.
    """
    request = await self._request(task, visit, stage=stage, samples=samples, sampling=sampling)
    if begun:
      requests = [
        dataclasses.replace(
          request,
          prompt=(*request.prompt, *begun[index]),
          begun=len(begun[index]),
          first=index,
          samples=1,
          max_tokens=most,
        )
        for index, most in sorted(budget.items())
      ]
    else:
      (most,) = set(budget.values())
      requests = [dataclasses.replace(request, max_tokens=most)]
    async with asyncio.TaskGroup() as group:
      asked = [group.create_task(_answers(self._engine, request)) for request in requests]
    return {index: completion for task in asked for index, completion in task.result()}

  async def sample(
    self,
    task: Task,
    visit: int,
    index: int,
    completion: Completion,
    *,
    stage: str,
    temperature: float,
  ) -> Sample:
    """Builds the sample record of a finished completion."""
    group, prompt = f'{stage}/{task.uid}/{visit}', await self._prompt(task)
    return rollout_sample(
      task, visit, index, prompt, completion, group=group, temperature=temperature
    )

  async def _prompt(self, task: Task) -> list[int]:
    # The prompt is rendered by another process, which may be slow or hang, so a thread waits for
    # it.
    if self._tokenizer.renders_elsewhere:
      return await asyncio.to_thread(self._tokenizer.render_prompt, task.prompt)
    return self._tokenizer.render_prompt(task.prompt)

  async def _request(
    self, task: Task, visit: int, *, stage: str, samples: int, sampling: Sampling
  ) -> Request:
    return Request(
      uid=f'{stage}/{task.uid}/{visit}',
      prompt=tuple(await self._prompt(task)),
      max_tokens=self.max_tokens,
      sampling=sampling,
      stop_ids=tuple(self._tokenizer.stop_ids),
      samples=samples,
      key=request_key(task, visit),
    )

  def text(self, sample: Sample) -> str:
    return completion_text(
      self._tokenizer, sample.tokens[sample.prompt_len :], sample.finish_reason
    )


async def _answers(engine: Generator, request: Request) -> list[tuple[int, Completion]]:
  async with contextlib.aclosing(engine.generate(request)) as completions:
    return [answer async for answer in completions]


def request_key(task: Task, visit: int, turn: int = 0) -> tuple[int, ...]:
  """Returns the random key of a request. No two requests of a sample may have the same key, because
  they would draw the same random numbers.

  Args:
    turn: number of requests for the same sample before this one.
  """
  digest = int(task.digest, 16)
  key = digest & 0xFFFFFFFF, digest >> 32 & 0xFFFFFFFF, visit
  return (*key, turn) if turn else key


def completion_text(tokenizer: Tokenizer, tokens: Int[np.ndarray, '...'], finish: Finish) -> str:
  """Decodes the policy's response without the end token at which it stopped. A custom stop token,
  which is not among `tokenizer.stop_ids`, stays.
  """
  ids = [int(token) for token in tokens]
  is_ended = finish == Finish.STOP and ids[-1:] and ids[-1] in tokenizer.stop_ids
  return tokenizer.decode(ids[:-1] if is_ended else ids)


def turns_of(tokenizer: Tokenizer, sample: Sample) -> tuple[Message, ...]:
  """Returns a sample's conversation after the prompt: the text of the policy's turns (role
  'assistant') and of what it read between them (role 'tool').
  """
  messages: list[Message] = []
  response = sample.role[sample.prompt_len :]
  bounds = [0, *(np.flatnonzero(np.diff(response)) + 1).tolist(), len(response)]
  for start, end in itertools.pairwise(bounds):
    role = 'assistant' if response[start] == Role.POLICY else 'tool'
    tokens = sample.tokens[sample.prompt_len + start : sample.prompt_len + end]
    messages.append({'role': role, 'content': tokenizer.decode(tokens.tolist())})
  return tuple(messages)


def rollout_sample(
  task: Task,
  visit: int,
  index: int,
  prompt: list[int],
  completion: Completion,
  *,
  group: str,
  temperature: float,
) -> Sample:
  """Builds the sample record of one completion."""
  recording = Recording(prompt)
  recording.act(completion)
  place = Place(task=task, visit=visit, group=group, index=index)
  return recording.sample(place, temperature=temperature)


def demonstration_sample(task: Task, answer: str, tokenizer: Tokenizer, *, number: int) -> Sample:
  """Builds the sample record of a demonstration, which is trained on but was not sampled."""
  prompt, completion = tokenizer.render_answer(task.prompt, answer)
  tokens = np.array([*prompt, *completion], np.int32)
  given = np.r_[np.zeros(len(prompt), bool), np.ones(len(completion), bool)]
  uid = f'{task.uid}/demonstration/{number}'
  return Sample(
    uid=uid,
    task_id=task.uid,
    visit=0,
    sample_index=number,
    group_id=uid,
    trajectory_id=uid,
    taskset=task.taskset,
    domain=task.domain,
    source=Source.EXPERT,
    tokens=tokens,
    prompt_len=len(prompt),
    role=np.where(given, Role.POLICY, Role.PROMPT).astype(np.uint8),
    loss_mask=given,
    sampled=np.zeros(len(tokens), bool),
    behaviour_logprobs=np.zeros(len(tokens), np.float32),
    media=media_of(task),
  )
