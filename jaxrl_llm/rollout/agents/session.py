"""Session of an agent, whose calls to the policy become one trajectory.

Invariant: the policy's turns stay as they were sampled. An agent sends earlier turns back as
messages with role 'assistant'. The session recognises these messages and replaces them by the
sampled turns. A request that does not extend the previous conversation starts a new step.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Hashable, Mapping
from typing import Literal, NamedTuple

from jaxrl_llm.core.errors import RunError, UserError, one_line
from jaxrl_llm.core.files import check_depth
from jaxrl_llm.core.net.server import Refusal
from jaxrl_llm.core.records.sample import Finish
from jaxrl_llm.core.records.task import ChatMessage
from jaxrl_llm.core.types import Json
from jaxrl_llm.rewards.api import MAX_REWARD, Verdict
from jaxrl_llm.rollout.agents.chat import (
  Answer,
  ChatRequest,
  MessageReader,
  answer_key,
  read_message,
  read_request,
  same_message,
)
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.contract import check_limits
from jaxrl_llm.rollout.episodes.episode import (
  Episode,
  EpisodeOver,
  PromptTooLong,
  Turn,
  UnreadableObservation,
)
from jaxrl_llm.rollout.episodes.tool_calls import Parser, ToolCall

CALLS, REFUSED = 'agent_calls', 'agent_refused'
"""Names of two counts of an episode: calls to the policy, and refused requests."""
_MAX_REFUSED = 100_000
"""Number of refused requests that a session counts. Episodes may have several sessions, and a count
above `MAX_REWARD` would end the run.
"""
_LIMITS = {
  Finish.LENGTH: ('context_length_exceeded', 'of tokens (rollout.max_response_length)'),
  Finish.STEPS: ('too_many_steps', 'of conversations (rollout.max_steps)'),
}
"""Error code and description of each limit that ends an episode, keyed by finish reason."""
Filtered = Literal['reject', 'ignore', 'unscorable']
"""Treatment of requests for a sampling distribution other than the run's. 'reject': the request is
refused. 'ignore': the policy samples from the run's distribution. 'unscorable': as 'ignore', but
the sample is not trained on.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionOptions:
  """Options of a session, which determine how it answers the requests of its agent."""

  sampling: Sampling
  parser: Parser | None
  """Parser of tool calls; None if no parser fits the chat template."""
  turn_tokens: int | None = None
  """Maximum number of tokens of a turn, which applies even if a request permits more. If None, only
  the request and the episode's remaining tokens limit a turn.
  """
  filtered: Filtered = 'reject'
  takes_reward: bool = False
  """Whether the agent posts its own reward."""
  max_calls: int = 1
  """Maximum number of calls in flight. The session answers them one at a time. Concurrent calls
  rarely extend the same conversation, so each of them except the first usually starts a new step.
  """


class _Message(NamedTuple):
  """A message of the conversation."""

  agent: ChatMessage
  """The message in the form in which the agent sends or receives it."""
  policy: ChatMessage
  """The message as the chat template renders it."""


class Session:
  """Answers the calls of an agent with turns of the policy.

  Attributes:
    failure: reason why the session refuses further calls and the sample is unscorable; empty if the
      session has not failed.
    exclusion: reason why the sample is unscorable although the session continues; empty if there is
      none.
    over: exception for the run's limit that ended the trajectory; None if no limit was reached.
    is_unreadable: whether the tokenizer, the chat template or the engine has rejected a prompt.
    has_reward: whether the agent has posted a reward.
  """

  def __init__(self, episode: Episode, options: SessionOptions):
    self.failure, self.exclusion = '', ''
    self.is_unreadable, self.has_reward = False, False
    self.over: EpisodeOver | None = None
    self._episode, self._options = episode, options
    self._read_messages = MessageReader()
    self._asked: tuple[ChatMessage, ...] = ()
    """Messages of the request of the last call."""
    self._said: list[_Message] = []
    """Conversation of the last call, including the response."""
    self._answers: dict[Hashable, _Message] = {}
    """All responses of the session so far, keyed by `answer_key`. Of equal ones, the last."""
    self._refused, self._in_flight, self._turns = 0, 0, asyncio.Lock()
    self._acting: asyncio.Task[Turn] | None = None
    self._error: BaseException | None = None
    self._is_closed = False

  async def chat(self, body: Mapping[str, Json]) -> tuple[ChatRequest, Answer]:
    """Samples the policy's next turn for a request. Raises Refusal if no turn is possible."""
    self._in_flight += 1
    try:
      request = read_request(body, self._options.sampling, self._read_messages)
      self._check(request)
      async with self._turns:
        self._check_able()
        return request, await self._answered(request)
    except Refusal:
      if not self._is_closed and self._refused < _MAX_REFUSED:
        self._refused += 1
        self._episode.count(REFUSED)
      raise
    except Exception as error:  # `close` raises the error in the task that plays the episode.
      self._error = error
      raise Refusal(500, 'the run has failed') from None
    finally:
      self._in_flight -= 1

  async def _answered(self, request: ChatRequest) -> Answer:
    said = self._recognised(request.messages)
    self._episode.converse([message.policy for message in said], tools=request.tools)
    turn = await self._turn(request)
    self._episode.count(CALLS)
    answer = self._answer(request, turn)
    sampled = {'role': 'assistant', 'content': turn.text}
    response = _Message(read_message('answer', answer.message), sampled)
    self._answers[answer_key(response.agent)] = response
    self._asked, self._said = request.messages, [*said, response]
    return answer

  def _recognised(self, messages: tuple[ChatMessage, ...]) -> list[_Message]:
    """Returns the messages of a request. For those that repeat a turn of the policy, the chat
    template will render the sampled text.
    """
    known = len(self._asked)
    same = self._said[:known] if messages[:known] == self._asked else []
    later = [self._matched(i, messages[i]) for i in range(len(same), len(messages))]
    return [*same, *later]

  def _matched(self, index: int, message: ChatMessage) -> _Message:
    """Returns message `index` of a request, which may repeat a message of the last call."""
    if index < len(self._said) and same_message(self._said[index].agent, message):
      return self._said[index]
    answer = self._answers.get(answer_key(message)) if message['role'] == 'assistant' else None
    return answer or _Message(message, message)

  def reward(self, body: Mapping[str, Json]) -> None:
    """Adds a reward for the policy's last turn. Raises Refusal if the reward is malformed, if there
    is no turn yet, or if the run does not take rewards from agents.
    """
    if not self._options.takes_reward:
      raise Refusal(
        400,
        "the run's scorers give the reward; to post one, set rollout.workflow.options.reward to "
        "'agent'",
      )
    if not self._episode.turns:
      raise Refusal(400, 'the policy has not answered yet, so there is nothing to reward')
    value, evidence = body.get('value'), body.get('evidence', {})
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise Refusal(400, f'value is {one_line(value, 80)}, wanted a number')
    if not isinstance(evidence, Mapping):
      raise Refusal(400, f'evidence is a {type(evidence).__name__}, wanted an object')
    before = self._episode.verdict or Verdict(value=0.0)
    total = (before.value or 0.0) + value if abs(value) <= MAX_REWARD else value
    try:
      check_depth(dict(evidence))
      check_limits(
        dataclasses.replace(before, value=total, evidence={**before.evidence, **evidence}),
        'reward',
      )
    except ValueError as error:
      raise Refusal(400, one_line(error)) from None
    self._episode.reward(value, evidence)
    self.has_reward = True

  async def close(self) -> None:
    """Closes the session. If a call is in flight, ends the call and makes the sample unscorable. If
    a call has failed with an error that the agent did not cause, raises that error.
    """
    self._is_closed = True
    if self._is_acting:
      self._fail('the agent ended before its call was answered')
      self._let_go()
      try:
        # Wait 'completion': bounded by the engine's limits.
        await asyncio.wait({self._acting})
      except asyncio.CancelledError:
        self.cancel()
        raise
    if self._acting is not None and not self._acting.cancelled():
      self._note(self._acting.exception())
    if self._error is not None:
      raise self._error

  def cancel(self) -> None:
    """Cancels a call in flight, even in the first turn, because the sample is no longer needed."""
    if self._is_acting:
      self._acting.cancel()

  @property
  def _is_acting(self) -> bool:
    return self._acting is not None and not self._acting.done()

  def _let_go(self) -> None:
    """Cancels the turn in progress after its agent has disconnected. The first turn is not
    cancelled, because every sample needs a completion.
    """
    if self._episode.turns:
      self._acting.cancel()

  def _note(self, error: BaseException | None) -> None:
    """Records an error that ended a turn."""
    if isinstance(error, EpisodeOver):
      self.over = error
    elif isinstance(error, UnreadableObservation | PromptTooLong) or (
      isinstance(error, UserError) and not isinstance(error, RunError)
    ):
      # The tokenizer, the chat template or the engine has rejected the prompt.
      self.is_unreadable = True
      self._fail(str(error))
    elif error is not None:
      self._error = error

  def _fail(self, reason: str) -> None:
    self.failure = self.failure or reason

  def _check_able(self) -> None:
    """Raises Refusal if the session has ended, failed or reached a limit of the run."""
    if self._is_closed:
      raise Refusal(400, 'the session has ended')
    if self._error is not None:
      raise Refusal(500, 'the run has failed')
    if self.failure:
      raise Refusal(400, f'the session has failed: {self.failure}')
    if self.over is not None:
      limit = _LIMITS[self.over.finish]
      raise Refusal(400, f'the episode has reached its limit {limit[1]}', code=limit[0])

  def _check(self, request: ChatRequest) -> None:
    """Raises Refusal unless the session can answer the request."""
    self._check_able()
    if self._in_flight > self._options.max_calls:
      raise Refusal(
        400,
        f'too many calls of this session are in flight; the run permits {self._options.max_calls} '
        'at a time (more than one only if rollout.max_steps is above 1)',
        code='concurrent_calls',
      )
    if request.tools and self._options.parser is None:
      self._fail(
        'no parser of tool calls fits the chat template; name one in '
        'rollout.workflow.options.parser'
      )
      raise Refusal(400, self.failure)
    long = [f'stop={one_line(repr(text), 80)}' for text in request.stop if not self._is_token(text)]
    if asked := [*request.filters, *long]:
      self._check_filtered(', '.join(asked))

  def _is_token(self, text: str) -> bool:
    try:
      return len(self._episode.tokenizer.encode(text)) == 1
    except UserError:
      return False

  def _check_filtered(self, asked: str) -> None:
    if self._options.filtered == 'reject':
      raise Refusal(
        400,
        f'{asked}: the policy is trained on samples at temperature '
        f'{self._options.sampling.temperature:g}, without filters and with stop texts of one token '
        'each; leave it out, or set rollout.workflow.options.filtered',
        code='filtered_sampling',
      )
    if self._options.filtered == 'unscorable':
      self.exclusion = self.exclusion or f'the agent asked for {asked}'

  async def _turn(self, request: ChatRequest) -> Turn:
    limits = [request.max_tokens, self._options.turn_tokens]
    most = min([limit for limit in limits if limit is not None], default=None)
    stop = [text for text in request.stop if self._is_token(text)]
    self._acting = asyncio.ensure_future(self._episode.act(most, stop=stop))
    try:
      # Wait 'completion': bounded by the engine's limits.
      await asyncio.wait({self._acting})
    except asyncio.CancelledError:
      self._fail('the agent hung up before its call was answered')
      self._let_go()
      raise
    if not self._acting.cancelled():
      self._note(self._acting.exception())
    self._check_able()
    return self._acting.result()

  def _answer(self, request: ChatRequest, turn: Turn) -> Answer:
    text = turn.text
    calls = self._options.parser(text) if request.tools and request.may_call else []
    # If a call is malformed, the agent gets the whole text instead of calls.
    if any(call.error or not call.name for call in calls):
      calls = []
    finish = 'stop' if turn.finish == Finish.STOP else 'length'
    for stop in request.stop:
      text = text.removesuffix(stop) if turn.finish == Finish.STOP else text
    message: dict[str, Json] = {'role': 'assistant', 'content': text}
    number = self._episode.turns - 1
    if calls:
      finish = 'tool_calls' if finish == 'stop' else finish
      message['content'] = text.partition('<tool_call>')[0].strip() or None
      if message['content'] == text.strip():  # Without the tag, the whole text is calls.
        message['content'] = None
      message['tool_calls'] = [_call(call, f'call_{number}_{i}') for i, call in enumerate(calls)]
    return Answer(message, finish, number, turn.prompt_tokens, turn.completion_tokens)


def _call(call: ToolCall, uid: str) -> dict[str, Json]:
  arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
  return {'id': uid, 'type': 'function', 'function': {'name': call.name, 'arguments': arguments}}
