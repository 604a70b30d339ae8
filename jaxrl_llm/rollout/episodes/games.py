"""Environments of Gymnasium and TextWorld, whose observations and actions are texts for the policy.

The methods are plain functions, which run in threads, because these libraries block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.task import ChatMessage, Task
from jaxrl_llm.rollout.episodes.environment import Step

_COLOURS = re.compile(r'\x1b\[[0-9;]*m')
"""Pattern of the escape sequences that set colours in a terminal."""
_PROMPT = re.compile(r'\n>[^\n]*\Z')
"""Pattern of the prompt and status line after which a TextWorld game waits for a command."""


class GymnasiumGame:
  """A Gymnasium environment whose actions are texts or choices (spaces Text and Discrete).

  The first prompt consists of the task's prompt and the first observation. An observation that is
  not text is rendered if `make` sets `render_mode='ansi'`, and otherwise converted with `str`. The
  environment's seed is the task's field `seed` or, if there is none, a number derived from the
  task. Hence all samples of a group begin in the same state.
  """

  def __init__(
    self,
    game: str,
    *,
    actions: Sequence[str] = (),
    make: Mapping[str, Any] | None = None,
    invalid_reward: float = 0.0,
  ):
    """
    Args:
      game: id of the environment, such as 'FrozenLake-v1', or 'module:id' if the module registers
        the id.
      actions: names of the choices, in the order of the choices' numbers. If empty, the policy
        writes the numbers.
      make: keyword arguments for `gymnasium.make`.
      invalid_reward: reward for a turn that is not a valid action. The environment does not step in
        this case.
    """
    self._id, self._options, self._invalid_reward = game, dict(make or {}), invalid_reward
    self._actions, self._is_text, self._game = tuple(actions), False, None

  def reset(self, task: Task) -> Sequence[ChatMessage]:
    seed = task.fields.get('seed')
    if not isinstance(seed, int):
      seed = int(task.digest, 16) & 0x7FFFFFFF
    self._game = self._made()
    observation, _ = self._game.reset(seed=seed)
    return with_first_observation(task, self._shown(observation))

  def step(self, action: str) -> Step:
    try:
      choice = self._choice(action.strip())
    except ValueError as error:
      return Step(f'error: {error}', self._invalid_reward, evidence={'invalid': True})
    observation, reward, terminated, truncated, _ = self._game.step(choice)
    return Step(
      self._shown(observation),
      float(reward),
      bool(terminated or truncated),
      {'truncated': bool(truncated)} if truncated else {},
    )

  def close(self) -> None:
    if self._game is not None:
      self._game.close()

  def _made(self) -> Any:
    import gymnasium

    try:
      game = gymnasium.make(self._id, **self._options)
    except gymnasium.error.Error as error:
      raise UserError(f'{type(error).__name__}: {error}') from error
    space = game.action_space
    self._is_text = isinstance(space, gymnasium.spaces.Text)
    if not (self._is_text or isinstance(space, gymnasium.spaces.Discrete)):
      raise UserError(f'its actions are {space}, wanted a space Text or Discrete')
    if self._actions and (self._is_text or len(self._actions) != space.n):
      raise UserError(f'got {len(self._actions)} names of actions, but its actions are {space}')
    return game

  def _shown(self, observation: Any) -> str:
    if isinstance(observation, str):
      return observation
    shown = self._game.render() if self._game.render_mode == 'ansi' else observation
    return _COLOURS.sub('', str(shown))

  def _choice(self, action: str) -> Any:
    """Converts the policy's text to an action of the environment. Raises ValueError if it is not a
    valid action.
    """
    space = self._game.action_space
    if self._is_text:
      if not space.contains(action):
        raise ValueError(f'the action is no text of {space}')
      return action
    if self._actions:
      if action not in self._actions:
        raise ValueError(f'the actions are {", ".join(self._actions)}')
      return int(space.start) + self._actions.index(action)
    first, last = int(space.start), int(space.start + space.n) - 1
    if not (action.isdecimal() and len(action) < 10 and first <= int(action) <= last):
      raise ValueError(f'the actions are {first} to {last}')
    return int(action)


class TextWorldGame:
  """A text game in a file that TextWorld can play. The reward of a turn is the increase of the
  score, as a fraction of the maximum score if the game has one.
  """

  def __init__(self, game: str = '', *, field: str = 'game', commands: bool = False):
    """
    Args:
      game: path of the game's file. If empty, the path is taken from the task's field `field`.
      commands: whether each observation ends with a list of the admissible commands.
    """
    self._path, self._field, self._commands = game, field, commands
    self._game: Any = None
    self._score = 0

  def reset(self, task: Task) -> Sequence[ChatMessage]:
    import textworld

    path = self._path or task.fields.get(self._field)
    if not isinstance(path, str):
      raise ValueError(f'the task has no field {self._field!r} with a path')
    names = ['objective', 'description', 'max_score', 'won', 'lost']
    if self._commands:
      names.append('admissible_commands')
    self._game = textworld.start(path, textworld.EnvInfos(**dict.fromkeys(names, True)))
    state = self._game.reset()
    texts = [state.get('objective'), state.get('description')]
    first = '\n\n'.join(text.strip() for text in texts if text) or state.feedback
    return with_first_observation(task, self._shown(first, state))

  def step(self, action: str) -> Step:
    state, score, done = self._game.step(' '.join(action.split()))
    gained, self._score = score - self._score, score
    most = state.get('max_score') or 1
    won, lost = bool(state.get('won')), bool(state.get('lost'))
    return Step(
      self._shown(state.feedback, state),
      gained / most,
      bool(done or won or lost),
      {'score': score, 'won': won},
    )

  def close(self) -> None:
    if self._game is not None:
      self._game.close()

  def _shown(self, text: str, state: Mapping[str, Any]) -> str:
    shown = _PROMPT.sub('', text).strip()
    if self._commands:
      shown = f'{shown}\n\nCommands: {", ".join(state.get("admissible_commands") or ())}'
    return shown


GAMES: Mapping[str, Callable[..., GymnasiumGame | TextWorldGame]] = {
  'gymnasium': GymnasiumGame,
  'textworld': TextWorldGame,
}
"""Environment classes for other libraries, keyed by the part of an environment's name before the
colon.
"""


def with_first_observation(task: Task, observation: str) -> Sequence[ChatMessage]:
  """Returns the task's prompt with the first observation appended to its last message, which is a
  user message.
  """
  *earlier, last = task.prompt
  text = f'{last["content"]}\n{observation}' if last['content'] else observation
  return [*earlier, {**last, 'content': text}]
