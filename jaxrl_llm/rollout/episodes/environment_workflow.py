"""Workflow in which the policy acts in an environment."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from absl import logging

from jaxrl_llm.config.own import own_part
from jaxrl_llm.core.errors import RunError, UserError, one_line
from jaxrl_llm.core.extras import check_library
from jaxrl_llm.core.records.task import ChatMessage
from jaxrl_llm.rollout.episodes.calls import CallFailed, call_within
from jaxrl_llm.rollout.episodes.environment import Environment, Step
from jaxrl_llm.rollout.episodes.episode import (
  Episode,
  History,
  InvalidReward,
  UnreadableObservation,
)
from jaxrl_llm.rollout.episodes.games import GAMES
from jaxrl_llm.rollout.episodes.workflow import Episodes, act_blindly
from jaxrl_llm.rollout.hub import Hub
from jaxrl_llm.tasks.tokenizer import Tokenizer

T = TypeVar('T')
_CLOSE_S = 5.0
"""Maximum seconds for an environment to close."""


class EnvironmentFailed(Exception):
  """Raised when the environment raised an exception or did not respond in time."""


@functools.lru_cache(maxsize=16)
def _free_places(loop: asyncio.AbstractEventLoop, name: str, concurrency: int) -> asyncio.Semaphore:
  """Returns the semaphore that limits the open environments of this name. All workflows on the
  event loop share the semaphore.
  """
  return asyncio.Semaphore(concurrency)


class EnvironmentWorkflow(Episodes):
  """Workflow in which the policy acts in an environment until the episode is done.

  If a call of the environment exceeds its deadline, raises an exception or returns an invalid
  reward, or if an observation from the environment has no tokens or cannot be encoded, the sample
  is unscorable, because the policy is not at fault. A `UserError` raised by `reset` ends the run,
  because the configuration is at fault.
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
    history: History = 'keep',
    deadline_s: float = 60.0,
    concurrency: int = 256,
  ):
    """
    Args:
      environment: 'module:attribute' of a class or function that returns an `Environment`,
        'gymnasium:ID' (`GymnasiumGame`), or 'textworld:FILE' (`TextWorldGame`).
      options: keyword arguments for this class or function.
      max_turns: maximum number of turns of an episode.
      turn_tokens: maximum number of tokens of a turn. If None, a turn may use all tokens that the
        episode has left.
      stop: texts that end a turn, in addition to the tokenizer's end tokens. Each must be a single
        token.
      history: how messages are rendered if the chat template renders earlier turns differently from
        the tokens so far: 'keep' or 'template'. See `episode.History`.
      deadline_s: maximum seconds for each call of an environment's `reset` or `step`.
      concurrency: maximum number of environments that are open at a time in this process.
    """
    super().__init__(hub, tokenizer, max_tokens=max_tokens, history=history)
    for name, value in (
      ('max_turns', max_turns),
      ('turn_tokens', 1 if turn_tokens is None else turn_tokens),
      ('concurrency', concurrency),
      ('deadline_s', deadline_s),
    ):
      if not value > 0:
        raise UserError(f'rollout.workflow.options.{name}: got {value}, wanted above 0')
    self._make, self._name, self._options = (
      _maker(environment),
      environment,
      dict(options or {}),
    )
    self._max_turns, self._turn_tokens, self._stop = max_turns, turn_tokens, tuple(stop)
    self._deadline_s, self._concurrency = deadline_s, concurrency

  async def play(self, episode: Episode) -> None:
    free = _free_places(asyncio.get_running_loop(), self._name, self._concurrency)
    async with free, self._opened() as environment:
      try:
        first = await self._call('reset', environment.reset, episode.task)
      except EnvironmentFailed as failed:
        if isinstance(failed.__cause__, UserError):  # The error would recur for every task.
          raise RunError(f'{failed}; correct the configuration') from None
        await self._fail_before_the_first_turn(episode, str(failed))
        return
      episode.observe(as_messages(episode.task.prompt if first is None else first))
      for _ in range(self._max_turns):
        try:
          turn = await episode.act(self._turn_tokens, stop=self._stop)
        except UnreadableObservation as unreadable:
          line = f'environment {self._name}: {unreadable}'
          if episode.turns:
            episode.fail(line)
          elif first is None:  # The task's prompt is the first observation.
            raise
          else:
            await self._fail_before_the_first_turn(episode, line)
          return
        try:
          step = await self._call('step', environment.step, turn.text)
        except EnvironmentFailed as failed:
          episode.fail(str(failed))
          return
        if not isinstance(step, Step):
          raise RunError(
            f'environment {self._name}: step returned a {type(step).__name__}, wanted a Step'
          )
        try:
          episode.reward(step.reward, step.evidence)
        except InvalidReward as invalid:
          episode.fail(f'environment {self._name}: step: {invalid}')
          return
        if step.done:
          return
        episode.observe(as_messages(step.observation))

  @contextlib.asynccontextmanager
  async def _opened(self) -> AsyncIterator[Environment]:
    environment = self._make(**self._options)
    if not isinstance(environment, Environment):
      raise UserError(
        f'environment {self._name!r}: is a {type(environment).__name__}, wanted an object with '
        '`reset`, `step` and `close`'
      )
    try:
      yield environment
    finally:
      try:
        await call_within(_CLOSE_S, environment.close)
      except CallFailed as failed:
        logging.log_first_n(
          logging.WARNING, 'environment %s: did not close: %s', 5, self._name, failed
        )

  async def _fail_before_the_first_turn(self, episode: Episode, error: str) -> None:
    """Marks an episode that failed before its first turn as unscorable. First adds a completion of
    one token, because every sample needs a completion.
    """
    logging.log_first_n(logging.WARNING, 'task %s: %s', 5, episode.task.uid, one_line(error))
    await act_blindly(episode)
    episode.fail(error)

  async def _call(self, method: str, call: Callable[..., Awaitable[T]], argument: Any) -> T:
    try:
      return await call_within(self._deadline_s, functools.partial(call, argument))
    except CallFailed as failed:
      line = one_line(f'environment {self._name}: {method}: {failed}')
      raise EnvironmentFailed(line) from failed.__cause__


def as_messages(observation: str | Sequence[ChatMessage]) -> Sequence[ChatMessage]:
  if isinstance(observation, str):
    return [{'role': 'user', 'content': observation}]
  return observation


def _maker(name: str) -> Callable[..., Environment]:
  library, _, game = name.partition(':')
  if library not in GAMES:
    return own_part(name, 'environment')
  check_library(library, f'environment {name}')
  return functools.partial(GAMES[library], game)
