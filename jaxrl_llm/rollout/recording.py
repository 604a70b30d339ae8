"""Recording of a sample during generation: its tokens, and who produced each of them. A trajectory
of several steps has one recording per step.

Invariant: tokens are only appended, so the policy's completions stay as the engine returned them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Int32

from jaxrl_llm.core.records.sample import (
  Finish,
  Role,
  Sample,
  Segment,
  Source,
  media_of,
  step_uid,
)
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.rollout.api import Completion


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
  """Identity of a trajectory in a run: its task, group and index within the group."""

  task: Task
  visit: int
  group: str
  index: int


class Recording:
  """Tokens of one sample: a prompt, then completions of the policy and observations between them.

  Attributes:
    turns: number of completions.
    finish: reason why the last completion ended.
  """

  def __init__(self, prompt: Sequence[int]):
    self.turns, self.finish, self._prompt_len = 0, Finish.STOP, len(prompt)
    self._tokens: list[np.ndarray] = [np.asarray(prompt, np.int32)]
    self._ids: list[int] = self._tokens[0].tolist()
    """The tokens of all parts, for `tokens`."""
    self._roles: list[Role] = [Role.PROMPT]
    self._logprobs: list[np.ndarray] = [np.zeros(len(prompt), np.float32)]
    self._segments: list[Segment] = []

  def __len__(self) -> int:
    return len(self._ids)

  @property
  def response_len(self) -> int:
    """Number of tokens after the prompt."""
    return len(self) - self._prompt_len

  @property
  def tokens(self) -> tuple[int, ...]:
    return tuple(self._ids)

  def observe(self, tokens: Sequence[int]) -> None:
    """Appends tokens that the policy did not sample, such as the result of a tool call."""
    self._append(np.asarray(tokens, np.int32), np.zeros(len(tokens), np.float32), Role.TOOL)

  def act(self, completion: Completion) -> None:
    """Appends a completion of the policy."""
    before = len(self)
    self._segments += [
      dataclasses.replace(s, start=s.start + before, end=s.end + before)
      for s in completion.segments
    ]
    self._append(completion.tokens, completion.logprobs, Role.POLICY)
    self.turns, self.finish = self.turns + 1, completion.finish

  def sample(self, place: Place, *, temperature: float, step: int = 0) -> Sample:
    """Returns the finished sample. Its position among the steps of the trajectory is `step`."""
    trajectory = f'{place.group}/{place.index}'
    role = np.repeat(np.array(self._roles, np.uint8), [len(part) for part in self._tokens])
    sampled = role == Role.POLICY
    return Sample(
      uid=step_uid(trajectory, step),
      task_id=place.task.uid,
      visit=place.visit,
      sample_index=place.index,
      group_id=place.group,
      trajectory_id=trajectory,
      step_index=step,
      taskset=place.task.taskset,
      domain=place.task.domain,
      source=Source.ROLLOUT,
      tokens=np.concatenate(self._tokens).astype(np.int32),
      prompt_len=self._prompt_len,
      role=role,
      loss_mask=sampled,
      sampled=sampled,
      behaviour_logprobs=np.concatenate(self._logprobs).astype(np.float32),
      segments=tuple(self._segments),
      temperature=temperature,
      finish_reason=self.finish,
      media=media_of(place.task),
    )

  def _append(
    self, tokens: Int32[np.ndarray, 'time'], logprobs: Float32[np.ndarray, 'time'], role: Role
  ) -> None:
    self._ids += tokens.tolist()
    self._tokens.append(tokens)
    self._logprobs.append(logprobs)
    self._roles.append(role)
