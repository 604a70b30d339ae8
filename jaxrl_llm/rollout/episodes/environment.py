"""Environments in which a policy acts over several turns, and the workflow that runs one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from absl import logging

from jaxrl_llm.config.own import own_part
from jaxrl_llm.core.errors import RunError, UserError, one_line
from jaxrl_llm.core.records.task import ChatMessage, Task
from jaxrl_llm.core.types import Json
from jaxrl_llm.rollout.episodes.episode import Episode
from jaxrl_llm.rollout.episodes.workflow import Episodes
from jaxrl_llm.rollout.hub import Hub
from jaxrl_llm.tasks.tokenizer import Tokenizer

T = TypeVar('T')
_CLOSE_S = 5.0
"""Maximum seconds for an environment to close."""


class Step(NamedTuple):
  """Response of an environment to an action."""

  observation: str | Sequence[ChatMessage]
  """Text or messages that the policy reads next. A text becomes a message of the user."""
  reward: float = 0.0
  done: bool = False
  """Whether the episode ends with this step. The policy then does not read the observation."""
  evidence: Mapping[str, Json] = {}
  """Details that explain the reward. They are stored with the reward."""


@runtime_checkable
class Environment(Protocol):
  """Environment of one episode. Each episode has its own environment, and many are open at a time.

  The methods must not block. Calls of a slow library belong in a thread or another process.
  """

  async def reset(self, task: Task) -> str | Sequence[ChatMessage] | None:
    """Begins an episode. Returns the first observation, or None if the task's prompt is the first
    observation. Its tokens count in `rollout.max_prompt_length`. The tasks were selected by the
    length of their own prompt, so an observation that is longer than this maximum ends the run.
    """
    ...

  async def step(self, action: str) -> Step:
    """Carries out an action of the policy, which is the text of its turn."""
    ...

  async def close(self) -> None:
    """Ends the episode and frees its resources. It is called once for each environment, in any
    case.
    """
    ...


class EnvironmentFailed(Exception):
  """The environment raised an exception or did not respond in time."""


class EnvironmentWorkflow(Episodes):
  """Workflow in which the policy acts in an environment until the episode is done.

  If a call of the environment exceeds its deadline or raises an exception, the sample is
  unscorable, because the policy is not at fault.
  """

  def __init__(
    self,
    hub: Hub,
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    environment: str,
    options: Mapping[str, Any] | None = None,
    max_turns: int = 16,
    turn_tokens: int | None = None,
    stop: Sequence[str] = (),
    deadline_s: float = 60.0,
    concurrency: int = 256,
  ):
    """
    Args:
      environment: 'module:attribute' of a class or function that returns an `Environment`.
      options: keyword arguments for this class or function.
      max_turns: maximum number of turns of an episode.
      turn_tokens: maximum number of tokens of a turn. If None, a turn may use all tokens that the
        episode has left.
      stop: texts that end a turn, in addition to the tokenizer's end tokens. Each must be a single
        token.
      deadline_s: maximum seconds for each call of an environment.
      concurrency: maximum number of environments of this workflow that are open at a time. The
        master's process has one workflow; an explorer process has one for each group that it holds.
    """
    super().__init__(hub, tokenizer, max_tokens=max_tokens)
    for name, value in (
      ('max_turns', max_turns),
      ('turn_tokens', 1 if turn_tokens is None else turn_tokens),
      ('concurrency', concurrency),
      ('deadline_s', deadline_s),
    ):
      if not value > 0:
        raise UserError(f'rollout.workflow.options.{name}: got {value}, wanted above 0')
    self._make, self._name, self._options = (
      own_part(environment, 'environment'),
      environment,
      dict(options or {}),
    )
    self._max_turns, self._turn_tokens, self._stop = max_turns, turn_tokens, tuple(stop)
    self._deadline_s, self._free = deadline_s, asyncio.Semaphore(concurrency)

  async def play(self, episode: Episode) -> None:
    async with self._free, self._opened() as environment:
      first = await self._begun(environment, episode.task)
      episode.observe(as_messages(episode.task.prompt if first is None else first))
      for _ in range(self._max_turns):
        turn = await episode.act(self._turn_tokens, stop=self._stop)
        try:
          step = await self._call('step', environment.step, turn.text)
        except EnvironmentFailed as failed:
          episode.fail(str(failed))
          return
        if not isinstance(step, Step):
          raise RunError(
            f'environment {self._name}: step returned a {type(step).__name__}, wanted a Step'
          )
        episode.reward(step.reward, step.evidence)
        if step.done:
          return
        episode.observe(as_messages(step.observation))

  @contextlib.asynccontextmanager
  async def _opened(self) -> AsyncIterator[Environment]:
    environment = self._make(**self._options)
    if not isinstance(environment, Environment):
      raise UserError(
        f'environment {self._name!r}: made a {type(environment).__name__}, which has no `reset`, '
        '`step` and `close`'
      )
    try:
      yield environment
    finally:
      try:
        async with asyncio.timeout(_CLOSE_S):
          await environment.close()
      except Exception as error:
        logging.log_first_n(
          logging.WARNING,
          'environment %s: did not close: %s: %s',
          5,
          self._name,
          type(error).__name__,
          error,
        )

  async def _begun(
    self, environment: Environment, task: Task
  ) -> str | Sequence[ChatMessage] | None:
    try:
      return await self._call('reset', environment.reset, task)
    except EnvironmentFailed as failed:
      raise RunError(
        f'{failed} (task {task.uid}); correct the environment, or raise '
        'rollout.workflow.options.deadline_s'
      ) from None

  async def _call(self, method: str, call: Callable[..., Awaitable[T]], argument: Any) -> T:
    try:
      async with asyncio.timeout(self._deadline_s) as limit:
        return await call(argument)
    except Exception as error:
      if isinstance(error, TimeoutError) and limit.expired():
        why = f'no answer within {self._deadline_s:g} s'
      else:
        why = f'{type(error).__name__}: {error}'
      line = one_line(f'environment {self._name}: {method}: {why}')
      raise EnvironmentFailed(line) from None


def as_messages(observation: str | Sequence[ChatMessage]) -> Sequence[ChatMessage]:
  if isinstance(observation, str):
    return [{'role': 'user', 'content': observation}]
  return observation
