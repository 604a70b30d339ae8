"""Workflows: a workflow turns a task into samples. The default, `SingleTurn`, samples several
completions of the task's prompt.

The completion tokens in a sample of `SingleTurn` are exactly the tokens that the engine returned. A
custom workflow is selected in `rollout.workflow`, by the name of a function that takes (hub,
tokenizer, max_tokens, **options) and returns a `Workflow`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from jaxrl_llm.core.background import by_length
from jaxrl_llm.core.records.sample import Finish, Role, Sample, Source, media_of
from jaxrl_llm.core.records.task import Message, Task
from jaxrl_llm.rewards.api import Attempt, Verdict
from jaxrl_llm.rollout.api import Completion, Generator, Request, Sampling
from jaxrl_llm.rollout.recording import Place, Recording
from jaxrl_llm.tasks.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkflowConfig:
  """Selects the workflow of a run."""

  kind: str = 'single_turn'
  """Kind of workflow: 'single_turn', 'environment', 'tools', 'external:COMMAND' for an agent
  program started by COMMAND, or 'module:attribute' for a function that builds a custom workflow.
  """
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Options of 'environment' (`EnvironmentWorkflow`), 'tools' (`ToolUse`) or 'external'
  (`ExternalAgent`), or keyword arguments of the function that builds a custom workflow.
  """


class Rollout(NamedTuple):
  """Finished trajectory that a workflow yields. Most trajectories consist of a single sample."""

  sample: Sample
  """The trajectory's first step."""
  text: str
  """The policy's response in the last step, as `Workflow.text` decodes it."""
  verdict: Verdict | None = None
  """Reward from the environment; None if the workflow has no environment. Its `turn_values` cover
  the turns of all steps.
  """
  turns: tuple[Message, ...] = ()
  """Conversation after the prompt, as `turns_of` returns it. It may be left empty if `text` is the
  whole conversation.
  """
  later: tuple[Sample, ...] = ()
  """The trajectory's later steps, in order. A step is a sample whose prompt does not extend the
  tokens of the previous step.
  """

  @property
  def steps(self) -> tuple[Sample, ...]:
    return (self.sample, *self.later)

  def attempt(self, task: Task) -> Attempt:
    """Returns the trajectory as an `Attempt`, the input of scorers."""
    said = self.turns or ({'role': 'assistant', 'content': self.text},)
    return Attempt(
      uid=self.sample.trajectory_id,
      task=task,
      completion=self.text,
      finish_reason=str(self.steps[-1].finish_reason),
      response_len=sum(step.response_len for step in self.steps),
      transcript=(*task.prompt, *said),
      environment=self.verdict,
    )


@runtime_checkable
class Workflow(Protocol):
  """Turns tasks into samples. `run` is called for many tasks concurrently."""

  def run(
    self, task: Task, visit: int, *, stage: str, samples: int, sampling: Sampling
  ) -> AsyncIterator[Rollout | tuple[Sample, str]]:
    """Yields each trajectory, with the decoded response of its last step, as soon as it finishes.
    The workflow must yield each index below `samples` once.

    Closing the iterator cancels the samples in flight.

    Args:
      task: the task to attempt.
      visit: number of the visit, from 0: the number of times that the task was drawn before, in
        this stage and earlier stages. The visits of tasks with the same prompt are numbered
        together, because the visit is part of the random key of every request.
      stage: name of the stage, the first part of the sample uid `<stage>/<task
        uid>/<visit>/<index>`. The group id is the sample uid without the index.
      samples: number of trajectories.
      sampling: sampling parameters. The workflow passes them on in its requests, and keeps to
        `sampling.max_response_length`.
    """
    ...

  def text(self, sample: Sample) -> str:
    """Decodes the policy's response."""
    ...


class SingleTurn:
  """Workflow with one prompt and one completion per sample."""

  def __init__(self, engine: Generator, tokenizer: Tokenizer, *, max_tokens: int):
    self._engine, self._tokenizer, self.max_tokens = engine, tokenizer, max_tokens

  async def run(
    self, task: Task, visit: int, *, stage: str, samples: int, sampling: Sampling
  ) -> AsyncIterator[tuple[Sample, str]]:
    request = await self._request(task, visit, stage=stage, samples=samples, sampling=sampling)

    def finished(index: int, completion: Completion) -> tuple[Sample, str]:
      sample = rollout_sample(
        task,
        visit,
        index,
        list(request.prompt),
        completion,
        group=request.uid,
        temperature=sampling.temperature,
      )
      return sample, self.text(sample)

    async for index, completion in self._engine.generate(request):
      yield await by_length(len(completion.tokens), finished, index, completion)

  async def _prompt(self, task: Task) -> list[int]:
    # If another process renders the prompt, a thread waits for that process, which may be slow or
    # hang.
    if self._tokenizer.renders_elsewhere:
      return await asyncio.to_thread(self._tokenizer.render_prompt, task.prompt)
    return self._tokenizer.render_prompt(task.prompt)

  async def _request(
    self, task: Task, visit: int, *, stage: str, samples: int, sampling: Sampling
  ) -> Request:
    return Request(
      uid=f'{stage}/{task.uid}/{visit}',
      prompt=tuple(await self._prompt(task)),
      max_tokens=sampling.limit(self.max_tokens),
      sampling=sampling,
      stop_ids=tuple(self._tokenizer.stop_ids),
      samples=samples,
      key=request_key(task, visit),
    )

  def text(self, sample: Sample) -> str:
    return completion_text(
      self._tokenizer, sample.tokens[sample.prompt_len :], sample.finish_reason
    )


def request_key(task: Task, visit: int, turn: int = 0) -> tuple[int, ...]:
  """Returns the random key of a request. The requests for different turns of a trajectory must have
  different keys, because equal keys draw equal random numbers.

  Args:
    turn: number of earlier turns of the trajectory.
  """
  digest = int(task.digest, 16)
  key = digest & 0xFFFFFFFF, digest >> 32 & 0xFFFFFFFF, visit
  return (*key, turn) if turn else key


def completion_text(tokenizer: Tokenizer, tokens: Int[np.ndarray, '...'], finish: Finish) -> str:
  """Decodes the policy's response without the end token at which it stopped. A custom stop token,
  which is not among `tokenizer.stop_ids`, is kept.
  """
  ids = tokens.tolist()
  is_ended = finish == Finish.STOP and ids[-1:] and ids[-1] in tokenizer.stop_ids
  return tokenizer.decode(ids[:-1] if is_ended else ids)


def turns_of(tokenizer: Tokenizer, sample: Sample, *later: Sample) -> tuple[Message, ...]:
  """Returns a trajectory's conversation after the prompt: the policy's turns (role 'assistant') and
  the text between them (role 'tool'). The whole prompt of each later step is treated as text
  between turns.
  """
  messages: list[Message] = []
  for step in (sample, *later):
    first = 0 if step is not sample else step.prompt_len
    bounds = [first, *(np.flatnonzero(np.diff(step.role[first:])) + 1 + first), len(step.tokens)]
    for start, end in itertools.pairwise(bounds):
      role = 'assistant' if step.role[start] == Role.POLICY else 'tool'
      text = tokenizer.decode(step.tokens[start:end].tolist())
      messages.append({'role': role, 'content': text})
  return tuple(messages)


def trained_turns(sample: Sample) -> int:
  """Returns the number of a sample's turns that are trained on, counted as runs of consecutive
  tokens in the loss.
  """
  return int(np.count_nonzero(np.diff(sample.loss_mask.astype(np.int8), prepend=0) == 1))


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
