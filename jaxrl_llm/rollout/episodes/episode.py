"""Episode: one attempt at a task over several turns of the policy and its environment.

The prompt of a turn consists of all earlier tokens and the new observations. The policy's
completions stay as they were sampled, and only the text after them is rendered and encoded. The
chat template may render earlier turns differently from the sampled text, so that the rendered
conversation does not begin with the text so far. The option `history` selects the treatment of this
case.

An episode is recorded as a trajectory. A prompt that does not extend the previous tokens starts a
new step of the trajectory, which is a separate sample. The prompt of the new step is encoded as a
whole, and only the turns after it are trained on in this step.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxrl_llm.core.errors import RunError, UserError, one_line
from jaxrl_llm.core.records.sample import Finish, Role, Sample
from jaxrl_llm.core.records.task import ChatMessage
from jaxrl_llm.core.types import Json
from jaxrl_llm.rewards.api import MAX_REWARD, Reward, Verdict
from jaxrl_llm.rollout.api import Completion, Request, Sampling
from jaxrl_llm.rollout.contract import check_counts, check_limits
from jaxrl_llm.rollout.hub import Hub
from jaxrl_llm.rollout.recording import Place, Recording
from jaxrl_llm.rollout.workflow import Rollout, completion_text, request_key, turns_of
from jaxrl_llm.tasks.tokenizer import Tokenizer

_MARK = '\ue000'
"""Placeholder that no chat template contains."""

_MAX_FAILURE = 2000
"""Maximum number of characters of the error that makes an episode unscorable."""

Observation = str | Sequence[int] | Sequence[ChatMessage]
"""Observation of the policy: text or tokens that are appended unchanged, or messages that the chat
template renders.
"""


History = Literal['keep', 'template']
"""How messages are rendered if the chat template renders earlier turns differently from the tokens
so far. 'keep': the earlier tokens stay, and the new messages are rendered after a placeholder
conversation. 'template': the whole conversation is rendered, as a new step of the trajectory.
"""


class EpisodeOver(Exception):
  """Raised when a limit of the run rules out another turn. `Episodes` catches this exception and
  ends the trajectory with the finish reason `finish`.
  """

  finish: Finish


class OutOfTokens(EpisodeOver):
  """Raised when the step has no tokens left for another turn."""

  finish = Finish.LENGTH


class OutOfSteps(EpisodeOver):
  """Raised when the next turn would begin a new step, but the trajectory already has its maximum
  number of steps.
  """

  finish = Finish.STEPS


class UnreadableObservation(RunError):
  """Raised when an observation adds no tokens, when the tokenizer cannot encode it, or when the
  chat template cannot render it after the earlier turns.
  """


class InvalidReward(RunError):
  """Raised when a reward, its evidence or a count is malformed or exceeds the limits; see
  `check_limits`.
  """


class PromptTooLong(Exception):
  """Raised when the first prompt has more tokens than permitted. `Episodes` catches this exception
  and makes the sample unscorable. The message is one line.
  """


class Turn(NamedTuple):
  """A completion of the policy within an episode."""

  text: str
  """Decoded completion without the end token. A custom stop text at its end is included."""
  finish: Finish
  prompt_tokens: int
  """Number of tokens before the completion."""
  completion_tokens: int
  """Number of tokens of the completion, including an end token."""


class _Prompt(NamedTuple):
  """Text or messages that the policy reads before a turn."""

  tokens: Sequence[int]
  """Tokens of the new observations, or of the whole prompt of a new step."""
  text: str
  """Text of these tokens; empty if an observation is raw text or tokens."""
  messages: list[ChatMessage]
  """The conversation, including the new messages."""
  begins_step: bool


class Episode:
  """Builds the trajectory of one attempt at a task from observations and the policy's completions.

  Attributes:
    task: the attempted task.
    hub: access to scorers and auxiliary models.
    tokenizer: the policy's tokenizer.
    sampling: sampling parameters of every turn.
    turns: number of completions so far, in all steps.
  """

  def __init__(
    self,
    hub: Hub,
    tokenizer: Tokenizer,
    place: Place,
    *,
    sampling: Sampling,
    max_tokens: int,
    max_steps: int = 1,
    max_prompt: int | None = None,
    history: History = 'keep',
    tools: Sequence[Mapping[str, Json]] = (),
  ):
    """
    Args:
      place: task, group and index of the trajectory.
      sampling: sampling parameters of every turn.
      max_tokens: maximum number of tokens of a step after its prompt, including observations.
        With its prompt, a later step may have `max_tokens` tokens more than the first prompt.
      max_steps: maximum number of steps of the trajectory.
      max_prompt: maximum number of tokens of the first prompt; None if the engine alone limits it.
      tools: JSON schemas of the tools, which the chat template describes to the policy.
    """
    self.task, self.hub, self.tokenizer, self.turns = place.task, hub, tokenizer, 0
    self._place, self.sampling, self._history = place, sampling, history
    self._max_tokens, self._max_steps, self._max_prompt = max_tokens, max_steps, max_prompt
    self._tools = [dict(tool) for tool in tools]
    self._recordings: list[Recording] = []
    """Recording of each step."""
    self._restarts = True
    """Whether the next turn starts a new step."""
    self._messages: list[ChatMessage] = []
    self._text = ''
    """Text of the current step: the output of the chat template, continued by the policy's
    turns.
    """
    self._is_raw = False
    """Whether an observation was raw text or tokens. After such an observation, the chat template
    cannot render further messages.
    """
    self._pending: list[Observation] = []
    self._rewards: list[float] = []
    """Sum of the rewards of each turn."""
    self._evidence: dict[str, Json] = {}
    self._counts: dict[str, float] = {}
    self._failure: str | None = None
    self._ended = False

  @property
  def steps(self) -> int:
    """Number of steps so far."""
    return len(self._recordings)

  @property
  def room(self) -> int:
    """Number of tokens left in this step for observations and completions. After `restart`, the
    next prompt has not been subtracted yet.
    """
    if self._restarts:
      return self._max_tokens
    step = self._recordings[-1]
    return self._room_of(len(step) - step.response_len) - step.response_len

  def _room_of(self, prompt_len: int) -> int:
    """Returns the maximum number of tokens of a step after its prompt. This is less than
    `max_tokens` if the prompt is longer than the prompt of the first step, because all steps have
    the same maximum total length.
    """
    first = self._recordings[0] if self._recordings else None
    first_len = prompt_len if first is None else len(first) - first.response_len
    return min(self._max_tokens, first_len + self._max_tokens - prompt_len)

  @property
  def verdict(self) -> Verdict | None:
    """Verdict with the rewards and counts so far; None if there are neither. Its `value` is the
    reward for the last turn, and its `turn_values` are the rewards for earlier turns. After `fail`,
    `value` is None.
    """
    if self._failure is not None:
      evidence = {**self._evidence, 'error': self._failure}
      return Verdict(value=None, parts=dict(self._counts), evidence=evidence)
    if not self._rewards and not self._counts:
      return None
    given = [*self._rewards, *[0.0] * (self.turns - len(self._rewards))]
    earlier = given[:-1] if any(given[:-1]) else []
    return Verdict(
      value=given[-1] if given else 0.0,
      parts=dict(self._counts),
      turn_values=tuple(earlier),
      evidence=dict(self._evidence),
    )

  def observe(self, observation: Observation) -> None:
    """Adds an observation, which the policy reads before its next turn. Its tokens are never
    trained on.
    """
    self._check_open('observe')
    self._pending.append(observation)

  def restart(self, prompt: Observation) -> None:
    """Starts a new step: the policy's next turn depends only on `prompt` and later observations,
    not on anything earlier.
    """
    self._check_open('restart')
    self._restarts, self._is_raw, self._messages, self._text = True, False, [], ''
    self._pending = [prompt]

  def converse(
    self, messages: Sequence[ChatMessage], *, tools: Sequence[Mapping[str, Json]] | None = None
  ) -> None:
    """Sets the whole conversation before the policy's next turn, replacing any observations since
    the last turn. If `messages` begin with the conversation up to and including the last turn and
    add to it, the current step continues. Otherwise, a new step starts.

    Args:
      messages: the conversation. The policy's turns are messages with role 'assistant' whose
        content is `Turn.text`, without other keys.
      tools: JSON schemas of the tools from now on. If they differ from the previous ones, a new
        step starts. If None, the tools stay the same.
    """
    self._check_open('converse')
    tools = self._tools if tools is None else [dict(tool) for tool in tools]
    known = len(self._messages)
    extends = list(messages[:known]) == self._messages and len(messages) > known
    if extends and tools == self._tools and not self._is_raw:
      self._pending = [messages[known:]]
    else:
      self._tools = tools
      self.restart(messages)

  async def act(self, max_tokens: int | None = None, *, stop: Sequence[str] = ()) -> Turn:
    """Samples the policy's next turn, and returns it.

    Args:
      max_tokens: maximum number of tokens of this turn. If None, the turn may use all tokens that
        are left.
      stop: texts that end the turn, in addition to the tokenizer's end tokens. Each must be a
        single token.

    Raises:
      OutOfTokens: the observations leave no tokens for a turn.
      OutOfSteps: the turn would begin a new step, but the trajectory already has `max_steps` steps.
      PromptTooLong: the first prompt has more tokens than permitted.
      UnreadableObservation: the observations have no tokens, or cannot be rendered or encoded.
      RunError: there was no observation since the last turn, or a stop text is not a single token.
    """
    self._check_open('act')
    if not self._pending:
      raise RunError(f'{self._name}: act() follows no observation; call observe() first')
    stop_ids = (*self.tokenizer.stop_ids, *map(self._stop_id, stop))
    try:
      prompt = await self._rendered()
    except UserError as error:  # Raised by the chat template or the tokenizer.
      raise UnreadableObservation(f'{self._name}: turn {self.turns + 1}: {error}') from error
    if not prompt.tokens:
      raise UnreadableObservation(
        f'{self._name}: the observation has no tokens, wanted at least one'
      )
    if prompt.begins_step and self.steps == self._max_steps:
      raise OutOfSteps
    if not self._recordings:
      await self._check_prompt(prompt.tokens, stop_ids)
    observed = len(prompt.tokens)
    room = self._room_of(observed) if prompt.begins_step else self.room - observed
    most = room if max_tokens is None else min(room, max_tokens)
    if most < 1:
      raise OutOfTokens
    self._read(prompt)
    completion = await self._completion(most, stop_ids)
    self._recordings[-1].act(completion)
    self.turns += 1
    return self._turn(completion)

  def reward(self, value: float, evidence: Mapping[str, Json] | None = None) -> None:
    """Adds a reward for the last turn. Several rewards for a turn are summed.

    Args:
      value: finite reward.
      evidence: JSON details that explain the reward, which are stored with the score. Later entries
        replace earlier ones of the same name. All evidence of an episode together may have up to
        65536 characters as JSON.
    """
    self._check_open('reward')
    if not self.turns:
      raise RunError(f'{self._name}: reward() precedes the first act(), so it belongs to no turn')
    if not (evidence is None or isinstance(evidence, Mapping)):
      raise InvalidReward(
        f'{self._name}: the evidence of a reward is a {type(evidence).__name__}, wanted a mapping'
      )
    number = self._number('reward', value)
    self._rewards += [0.0] * (self.turns - len(self._rewards))
    self._rewards[-1] += number
    self._evidence.update(evidence or {})
    self._check_limits()

  def count(self, name: str, amount: float = 1.0) -> None:
    """Adds `amount` to the episode's count `name`, for example the number of tool calls. In scores
    and metrics, counts appear as parts of the environment's reward, but do not affect its value. An
    episode may have up to 256 counts.
    """
    self._check_open('count')
    self._counts[name] = self._counts.get(name, 0.0) + self._number(f'count {name!r}', amount)
    try:
      check_counts(self._counts, self._name)
    except ValueError as error:
      raise InvalidReward(str(error)) from None

  def fail(self, error: str) -> None:
    """Makes the trajectory unscorable. Use this for errors that are not the policy's fault."""
    self._check_open('fail')
    self._failure = one_line(error, _MAX_FAILURE)
    try:
      self._check_limits()
    except InvalidReward:  # Drop the evidence, because the error is more important.
      self._evidence.clear()

  async def score(self) -> Reward:
    """Scores the episode so far with the run's scorers, which receive the last turn as the
    completion. The reward is returned and not stored.
    """
    return await self.hub.score(self._rollout().attempt(self.task))

  def end(self, *, finish: Finish | None = None) -> Rollout:
    """Ends the episode, and returns its trajectory with the rewards.

    Args:
      finish: reason why the trajectory ended. If None, the reason why the last turn ended is used.

    Raises:
      RunError: the episode has no turn.
    """
    self._check_open('end')
    self._ended = True
    return self._rollout(finish)

  @property
  def _name(self) -> str:
    return f'rollout.workflow: episode {self._place.group}/{self._place.index}'

  def _check_open(self, method: str) -> None:
    if self._ended:
      raise RunError(f'{self._name}: {method}() follows end(); an episode ends once')

  def _number(self, kind: str, value: float) -> float:
    try:
      number = float(value) if abs(value) <= MAX_REWARD else math.nan
    except (TypeError, ValueError):
      number = math.nan
    if math.isnan(number):
      raise InvalidReward(
        f'{self._name}: {kind} is {one_line(repr(value), 100)}, wanted a number from '
        f'-{MAX_REWARD:g} to {MAX_REWARD:g}'
      )
    return number

  def _check_limits(self) -> None:
    try:
      check_limits(self.verdict, self._name)
    except ValueError as error:
      raise InvalidReward(str(error)) from None

  def _rollout(self, finish: Finish | None = None) -> Rollout:
    if not self.turns:
      raise RunError(f'{self._name}: has no turn of the policy; call act() at least once')
    # The last step has no turn if its generation failed or was cancelled.
    recordings = [recording for recording in self._recordings if recording.turns]
    steps = [
      recording.sample(self._place, temperature=self.sampling.temperature, step=step)
      for step, recording in enumerate(recordings)
    ]
    if finish is not None:
      steps[-1] = dataclasses.replace(steps[-1], finish_reason=finish)
    return Rollout(
      steps[0],
      response_text(self.tokenizer, steps[-1]),
      self.verdict,
      turns_of(self.tokenizer, *steps),
      tuple(steps[1:]),
    )

  def _stop_id(self, text: str) -> int:
    ids = self.tokenizer.encode(text)
    if len(ids) != 1:
      raise RunError(f'{self._name}: stop {text!r} has {len(ids)} tokens, wanted one')
    return ids[0]

  def _read(self, prompt: _Prompt) -> None:
    """Records the prompt, or the new observations, of the next turn."""
    if prompt.begins_step:
      self._recordings.append(Recording(prompt.tokens))
      self._text = ''
    else:
      self._recordings[-1].observe(prompt.tokens)
    self._restarts, self._messages = False, prompt.messages
    self._text += prompt.text
    self._pending.clear()

  async def _rendered(self) -> _Prompt:
    """Renders and encodes the pending observations."""
    conversations = [_is_conversation(observation) for observation in self._pending]
    if any(conversations) and (self._is_raw or not all(conversations)):
      raise RunError(
        f'{self._name}: turn {self.turns + 1}: observes messages together with or after raw text, '
        'which the chat template cannot render; observe messages only, or raw text from here on'
      )
    if not all(conversations):
      self._is_raw = True
      tokens = [token for part in self._pending for token in self._encoded(part)]
      return _Prompt(tokens, '', self._messages, self._restarts)
    messages = [*self._messages, *(message for part in self._pending for message in part)]
    # If another process renders the template, a thread waits for that process, which may be slow or
    # hang.
    if self.tokenizer.renders_elsewhere:
      return await asyncio.to_thread(self._extended, messages)
    return self._extended(messages)

  def _extended(self, messages: list[ChatMessage]) -> _Prompt:
    """Renders the whole conversation, and encodes the text that it adds to the text so far."""
    whole, begins_step = self._render(messages), self._restarts
    if whole.startswith(self._text):
      added = whole[len(self._text) :]
    elif self._history == 'template':
      added, begins_step = whole, True
    else:
      added = self._rendered_alone(messages[len(self._messages) :])
    return _Prompt(self.tokenizer.encode(added), added, messages, begins_step)

  async def _check_prompt(self, prompt: list[int], stop_ids: tuple[int, ...]) -> None:
    """Raises PromptTooLong if the first prompt is too long. The sample then records the permitted
    part of the prompt and a completion of one token, because every sample needs a completion.
    """
    if self._max_prompt is None or len(prompt) <= self._max_prompt:
      return
    self._recordings.append(Recording(prompt[: self._max_prompt]))
    self._recordings[-1].act(await self._completion(1, stop_ids))
    self.turns += 1
    raise PromptTooLong(
      f'the first prompt has {len(prompt)} tokens, wanted at most {self._max_prompt}; raise '
      'rollout.max_prompt_length, or shorten the first observation or the schemas of tools'
    )

  def _render(self, messages: Sequence[ChatMessage]) -> str:
    return self.tokenizer.render_chat(
      messages, add_generation_prompt=True, tools=self._tools or None
    ).text

  def _rendered_alone(self, observed: Sequence[ChatMessage]) -> str:
    """Returns the text that these messages add after an answer of the policy. It is obtained by
    rendering the messages after a placeholder conversation that consists of a question and an
    answer.
    """
    exchange = [{'role': 'user', 'content': _MARK}, {'role': 'assistant', 'content': _MARK}]
    parts = self._render([*exchange, *observed]).split(_MARK, 2)
    if len(parts) != 3:
      raise UnreadableObservation(
        f'{self._name}: turn {self.turns + 1}: the chat template omits the turn before an '
        'observation; observe text or tokens instead of messages'
      )
    # `end` begins with the end of the answer, such as '<|im_end|>\n'. If the policy has sampled
    # this end token, it is removed from `end`.
    end, last = parts[2], self._recordings[-1].tokens[-1]
    is_ended = last in self.tokenizer.stop_ids
    return end.removeprefix(self.tokenizer.token_text(last)) if is_ended else end

  def _encoded(self, observation: str | Sequence[int]) -> Sequence[int]:
    return self.tokenizer.encode(observation) if isinstance(observation, str) else observation

  async def _completion(self, max_tokens: int, stop_ids: tuple[int, ...]) -> Completion:
    request = Request(
      uid=f'{self._place.group}/{self._place.index}/turn {self.turns}',
      prompt=self._recordings[-1].tokens,
      max_tokens=max_tokens,
      sampling=self.sampling,
      stop_ids=stop_ids,
      first=self._place.index,
      # The key of the first turn is the same as in a single-turn workflow.
      key=request_key(self.task, self._place.visit, self.turns),
    )
    ((_, completion),) = [answer async for answer in self.hub.generate(request)]
    return completion

  def _turn(self, completion: Completion) -> Turn:
    text = completion_text(self.tokenizer, completion.tokens, completion.finish)
    completion_tokens = len(completion.tokens)
    prompt_tokens = len(self._recordings[-1]) - completion_tokens
    turn = Turn(text, completion.finish, prompt_tokens, completion_tokens)
    if not self._is_raw:
      self._text += self.tokenizer.decode(completion.tokens.tolist(), skip_special=False)
      self._messages.append({'role': 'assistant', 'content': turn.text})
    return turn


def response_text(tokenizer: Tokenizer, sample: Sample) -> str:
  """Returns the text of the policy's last turn in a sample, in the form of `Turn.text`."""
  others = np.flatnonzero(sample.role != Role.POLICY)
  # If a limit ended the episode, the sample's finish reason names the limit, but the last turn may
  # still end with an end token.
  return completion_text(tokenizer, sample.tokens[others[-1] + 1 :], Finish.STOP)


def _is_conversation(observation: Observation) -> bool:
  return not isinstance(observation, str) and all(isinstance(part, Mapping) for part in observation)
