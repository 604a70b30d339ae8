"""Episode: one attempt at a task over several turns of the policy and its environment.

The prompt of a turn consists of all earlier tokens and the new observations. The policy's
completions stay as they were sampled, and only the text after them is rendered and encoded. The
chat template may render the earlier turns differently, so that the rendered conversation does not
begin with the text so far. In that case, the new observations are rendered after a placeholder
conversation instead of the earlier turns.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.core.errors import RunError, one_line
from jaxrl_llm.core.records.sample import Finish, Role, Sample
from jaxrl_llm.core.records.task import ChatMessage
from jaxrl_llm.core.types import Json
from jaxrl_llm.rewards.api import MAX_REWARD, Attempt, Reward, Verdict
from jaxrl_llm.rollout.api import Completion, Request, Sampling
from jaxrl_llm.rollout.hub import Hub
from jaxrl_llm.rollout.recording import Place, Recording
from jaxrl_llm.rollout.workflow import Rollout, check_limits, completion_text, request_key, turns_of
from jaxrl_llm.tasks.tokenizer import Tokenizer

_MARK = '\ue000'
"""Placeholder that no chat template contains."""

_MAX_FAILURE = 2000
"""Maximum number of characters of the error that makes an episode unscorable."""

Observation = str | Sequence[int] | Sequence[ChatMessage]
"""Observation of the policy: text or tokens that are appended unchanged, or messages that the chat
template renders.
"""


class OutOfTokens(Exception):
  """The episode has no tokens left for another turn. `Episodes` catches this exception and ends the
  sample with the finish reason 'length'.
  """


class Turn(NamedTuple):
  """A completion of the policy within an episode."""

  text: str
  """Decoded completion, without the end token. The text of a custom `stop` is part of it."""
  finish: Finish


class Episode:
  """Builds the sample of one attempt at a task from observations and the policy's completions.

  Attributes:
    task: the attempted task.
    hub: access to scorers and auxiliary models.
    tokenizer: the policy's tokenizer.
    turns: number of completions so far.
  """

  def __init__(
    self,
    hub: Hub,
    tokenizer: Tokenizer,
    place: Place,
    *,
    sampling: Sampling,
    max_tokens: int,
    tools: Sequence[Mapping[str, Json]] = (),
  ):
    """
    Args:
      place: task, group and index of the sample.
      sampling: sampling parameters of every turn.
      max_tokens: maximum number of tokens after the first prompt, including observations.
      tools: JSON schemas of the tools, which the chat template describes to the policy.
    """
    self.task, self.hub, self.tokenizer, self.turns = place.task, hub, tokenizer, 0
    self._place, self._sampling, self._max_tokens = place, sampling, max_tokens
    self._tools = [dict(tool) for tool in tools]
    self._recording: Recording | None = None
    self._messages: list[ChatMessage] = []
    self._text = ''
    """Text of all tokens so far: rendered by the chat template, and continued by the policy."""
    self._is_raw = False
    """Whether an observation was raw text or tokens. After such an observation, the chat template
    cannot render further messages.
    """
    self._pending: list[Observation] = []
    self._rewards: list[float] = []
    """For each turn, the sum of its rewards."""
    self._evidence: dict[str, Json] = {}
    self._counts: dict[str, float] = {}
    self._failure: str | None = None
    self._ended = False

  @property
  def room(self) -> int:
    """Number of tokens that are left for observations and completions."""
    return self._max_tokens - (self._recording.response_len if self._recording else 0)

  @property
  def verdict(self) -> Verdict | None:
    """Verdict with the rewards so far; None if there were none. The reward for the last turn is its
    `value`, and the rewards for earlier turns are its `turn_values`.
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

  async def act(self, max_tokens: int | None = None, *, stop: Sequence[str] = ()) -> Turn:
    """Samples the policy's next turn, and returns it.

    Args:
      max_tokens: maximum number of tokens of this turn. If None, the turn may use all tokens that
        are left.
      stop: texts that end the turn, in addition to the tokenizer's end tokens. Each must be a
        single token.

    Raises:
      OutOfTokens: the observations leave no tokens for a turn.
      RunError: there was no observation since the last turn, or it has no token.
    """
    self._check_open('act')
    if not self._pending:
      raise RunError(f'{self._name}: act() follows no observation; call observe() first')
    stop_ids = (*self.tokenizer.stop_ids, *map(self._stop_id, stop))
    observed, text, messages = await self._rendered()
    if not observed:
      raise RunError(f'{self._name}: the observation has no token, wanted at least one')
    room = self.room - (len(observed) if self._recording else 0)
    most = room if max_tokens is None else min(room, max_tokens)
    if most < 1:
      raise OutOfTokens
    if self._recording is None:
      self._recording = Recording(observed)
    else:
      self._recording.observe(observed)
    self._pending.clear()
    self._messages = messages
    completion = await self._completion(most, stop_ids)
    self._recording.act(completion)
    self.turns += 1
    return self._turn(text, completion)

  def reward(self, value: float, evidence: Mapping[str, Json] | None = None) -> None:
    """Adds a reward for the last turn. Several rewards for a turn are summed.

    Args:
      value: finite reward.
      evidence: JSON details that explain the reward. They are stored with the score, and later
        entries replace earlier ones of the same name. Together, those of an episode may have up to
        65536 characters as JSON.
    """
    self._check_open('reward')
    if not self.turns:
      raise RunError(f'{self._name}: reward() precedes the first act(), so it belongs to no turn')
    if not (evidence is None or isinstance(evidence, Mapping)):
      raise RunError(
        f'{self._name}: the evidence of a reward is a {type(evidence).__name__}, wanted a mapping'
      )
    number = self._number('reward', value)
    self._rewards += [0.0] * (self.turns - len(self._rewards))
    self._rewards[-1] += number
    self._evidence.update(evidence or {})
    self._check_limits()

  def count(self, name: str, amount: float = 1.0) -> None:
    """Adds `amount` to the count `name` of the episode, such as its number of tool calls. In scores
    and metrics, counts are parts of the environment's reward, and do not change the reward's value.
    An episode may have up to 256 counts.
    """
    self._check_open('count')
    self._counts[name] = self._counts.get(name, 0.0) + self._number(f'count {name!r}', amount)
    self._check_limits()

  def fail(self, error: str) -> None:
    """Makes the sample unscorable, because of an error that is not the policy's fault."""
    self._check_open('fail')
    self._failure = one_line(error, _MAX_FAILURE)
    self._check_limits()

  async def score(self) -> Reward:
    """Scores the last turn with the run's scorers. The reward is returned and not stored."""
    sample = self._sample()
    return await self.hub.score(
      Attempt(
        uid=sample.uid,
        task=self.task,
        completion=response_text(self.tokenizer, sample),
        finish_reason=str(sample.finish_reason),
        response_len=sample.response_len,
        transcript=(*self.task.prompt, *turns_of(self.tokenizer, sample)),
        environment=self.verdict,
      )
    )

  def end(self, *, out_of_tokens: bool = False) -> Rollout:
    """Ends the episode, and returns its sample with the rewards.

    Args:
      out_of_tokens: whether the episode ends because it has no tokens left for another turn.

    Raises:
      RunError: the policy has not acted.
    """
    self._check_open('end')
    self._ended = True
    sample = self._sample()
    if out_of_tokens:
      sample = dataclasses.replace(sample, finish_reason=Finish.LENGTH)
    return Rollout(
      sample,
      response_text(self.tokenizer, sample),
      self.verdict,
      turns_of(self.tokenizer, sample),
    )

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
      raise RunError(
        f'{self._name}: {kind} is {one_line(repr(value), 100)}, wanted a number from '
        f'-{MAX_REWARD:g} to {MAX_REWARD:g}'
      )
    return number

  def _check_limits(self) -> None:
    try:
      check_limits(self.verdict, self._name)
    except ValueError as error:
      raise RunError(str(error)) from None

  def _sample(self) -> Sample:
    if self._recording is None or not self._recording.turns:
      raise RunError(f'{self._name}: has no turn of the policy; call act() at least once')
    return self._recording.sample(self._place, temperature=self._sampling.temperature)

  def _stop_id(self, text: str) -> int:
    ids = self.tokenizer.encode(text)
    if len(ids) != 1:
      raise RunError(f'{self._name}: stop {text!r} has {len(ids)} tokens, wanted one')
    return ids[0]

  async def _rendered(self) -> tuple[list[int], str, list[ChatMessage]]:
    """Returns (tokens of the pending observations, their text, all messages including them)."""
    conversations = [_is_conversation(observation) for observation in self._pending]
    if any(conversations) and (self._is_raw or not all(conversations)):
      raise RunError(
        f'{self._name}: turn {self.turns + 1}: observes messages together with or after raw text, '
        'which the chat template cannot render; observe messages only, or raw text from here on'
      )
    if not all(conversations):
      self._is_raw = True
      tokens = [token for part in self._pending for token in self._encoded(part)]
      return tokens, '', self._messages
    messages = [*self._messages, *(message for part in self._pending for message in part)]
    # If another process renders the template, that process may be slow or hang, so a thread waits
    # for it.
    if self.tokenizer.renders_elsewhere:
      whole = await asyncio.to_thread(self._render, messages)
    else:
      whole = self._render(messages)
    if whole.startswith(self._text):
      added = whole[len(self._text) :]
    else:
      added = self._rendered_alone(messages[len(self._messages) :])
    return self.tokenizer.encode(added), added, messages

  def _render(self, messages: Sequence[ChatMessage]) -> str:
    return self.tokenizer.render_chat(
      messages, add_generation_prompt=True, tools=self._tools or None
    ).text

  def _rendered_alone(self, observed: Sequence[ChatMessage]) -> str:
    """Returns the text that these messages add after an answer of the policy. To find this text,
    the messages are rendered after a placeholder conversation of a question and an answer.
    """
    exchange = [{'role': 'user', 'content': _MARK}, {'role': 'assistant', 'content': _MARK}]
    parts = self._render([*exchange, *observed]).split(_MARK, 2)
    if len(parts) != 3:
      raise RunError(
        f'{self._name}: turn {self.turns + 1}: the chat template omits the turn before an '
        'observation; observe text or tokens instead of messages'
      )
    # `end` begins with the end of the answer, such as '<|im_end|>\n'. If the policy has sampled
    # this end token, it is removed from `end`.
    end, last = parts[2], self._recording.tokens[-1]
    is_ended = last in self.tokenizer.stop_ids
    return end.removeprefix(self.tokenizer.token_text(last)) if is_ended else end

  def _encoded(self, observation: str | Sequence[int]) -> Sequence[int]:
    return self.tokenizer.encode(observation) if isinstance(observation, str) else observation

  async def _completion(self, max_tokens: int, stop_ids: tuple[int, ...]) -> Completion:
    request = Request(
      uid=f'{self._place.group}/{self._place.index}/turn {self.turns}',
      prompt=self._recording.tokens,
      max_tokens=max_tokens,
      sampling=self._sampling,
      stop_ids=stop_ids,
      first=self._place.index,
      # The key of the first turn is the same as in a single-turn workflow.
      key=request_key(self.task, self._place.visit, self.turns),
    )
    ((_, completion),) = [answer async for answer in self.hub.generate(request)]
    return completion

  def _turn(self, added: str, completion: Completion) -> Turn:
    text = completion_text(self.tokenizer, completion.tokens, completion.finish)
    turn = Turn(text, completion.finish)
    if not self._is_raw:
      tokens = completion.tokens.tolist()
      self._text += added + self.tokenizer.decode(tokens, skip_special=False)
      self._messages.append({'role': 'assistant', 'content': turn.text})
    return turn


def response_text(tokenizer: Tokenizer, sample: Sample) -> str:
  """Decodes the policy's last turn in a sample, as `Turn.text` does."""
  others = np.flatnonzero(sample.role != Role.POLICY)
  # The last turn of an episode that ran out of tokens may have ended with its end token, although
  # the episode's finish reason is 'length'.
  return completion_text(tokenizer, sample.tokens[others[-1] + 1 :], Finish.STOP)


def _is_conversation(observation: Observation) -> bool:
  return not isinstance(observation, str) and all(isinstance(part, Mapping) for part in observation)
