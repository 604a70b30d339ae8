"""The workflow `external`: third-party agents play the episodes.

Invariant: no process of an agent outlives its episode, or the process that runs the workflow.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import shlex
from collections.abc import AsyncIterator
from typing import Literal, get_args

from absl import logging

from jaxrl_llm.core.disk import scratch
from jaxrl_llm.core.errors import RunError, UserError, one_line
from jaxrl_llm.core.process.child import Child
from jaxrl_llm.core.records.task import Task
from jaxrl_llm.core.types import Json
from jaxrl_llm.rollout.agents.proxy import Proxy
from jaxrl_llm.rollout.agents.session import CALLS, REFUSED, Filtered, Session, SessionOptions
from jaxrl_llm.rollout.api import Sampling
from jaxrl_llm.rollout.episodes.episode import Episode
from jaxrl_llm.rollout.episodes.tool_calls import Parser, choose_parser
from jaxrl_llm.rollout.episodes.workflow import Episodes, act_blindly
from jaxrl_llm.rollout.hub import Hub
from jaxrl_llm.rollout.workflow import Rollout
from jaxrl_llm.tasks.tokenizer import Tokenizer

TASK = 'JAXRL_TASK'
"""Environment variable with the agent's task, as JSON."""
MAX_TASK = 128_000
"""Maximum size of a task as JSON, in bytes. The kernel limits an environment variable to 128
KiB.
"""
_MAX_CALLS = 8
"""Maximum number of an agent's calls that are in flight together, if a trajectory may have several
steps.
"""
_TRIES = 3
"""Maximum number of times that an agent is started if it keeps ending before the policy's first
answer.
"""
_GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL for an agent."""
_LOG_BYTES = 4_000_000
"""Approximate maximum size on disk of an agent's output. Only the end of a longer output is
kept.
"""
_TAIL = 20
"""Number of lines at the end of a failed agent's output that are logged."""


class ExternalAgent(Episodes):
  """Workflow in which each sample is played by a command, which calls the policy through the OpenAI
  chat-completions protocol.

  The command gets the environment variables `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `JAXRL_TASK`
  (its task). Exit code 0 ends the episode; any other exit code makes the sample unscorable, unless
  a limit of the run has ended the episode. An agent that keeps ending before the policy's first
  answer ends the run. A call that does not extend the previous conversation starts a new step of
  the trajectory. The episode's reward has the parts `agent_calls` and `agent_refused`, the numbers
  of calls and refused requests.
  """

  def __init__(
    self,
    hub: Hub,
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    command: str,
    reward: Literal['scorers', 'agent'] = 'scorers',
    filtered: Filtered = 'reject',
    parser: str = 'auto',
    turn_tokens: int | None = None,
    with_truth: bool = False,
    deadline_s: float = 600.0,
    concurrency: int = 64,
  ):
    """
    Args:
      command: command line that starts the agent. It is split into words by the rules of a shell.
      reward: 'scorers' if only the run's scorers give rewards, or 'agent' if each agent must post a
        reward (`POST /v1/reward`), which the scorer `environment` reads.
      filtered: treatment of requests for a sampling distribution other than the run's, for example
        with another temperature or top_p. 'reject' refuses the request. 'ignore' samples from the
        run's distribution. 'unscorable' also does so, but excludes the sample from training.
      parser: parser of the tool calls in a turn's text, as in `ToolUse`.
      turn_tokens: maximum number of tokens of a turn. If None, a turn may use all tokens that the
        episode has left, unless the agent asks for fewer.
      with_truth: whether the agent's task contains the reference answer and the row's fields.
      deadline_s: maximum seconds that an agent may run. An agent that takes longer is killed, and
        its sample is unscorable, unless a limit of the run has ended the episode.
      concurrency: maximum number of agents of this workflow that run at a time. The master's
        process has one workflow; an explorer process has one for each group that it holds.
    """
    super().__init__(hub, tokenizer, max_tokens=max_tokens)
    self._command = _words(command)
    choices = (('reward', reward, ('scorers', 'agent')), ('filtered', filtered, get_args(Filtered)))
    for name, value, wanted in choices:
      if value not in wanted:
        raise UserError(
          f'rollout.workflow.options.{name}: got {value!r}, wanted one of {", ".join(wanted)}'
        )
    for name, value in (
      ('turn_tokens', 1 if turn_tokens is None else turn_tokens),
      ('deadline_s', deadline_s),
      ('concurrency', concurrency),
    ):
      if not value > 0:
        raise UserError(f'rollout.workflow.options.{name}: got {value}, wanted above 0')
    self._posts_reward, self._filtered, self._turn_tokens = reward == 'agent', filtered, turn_tokens
    self._parser = _parser(parser, tokenizer.template)
    self._with_truth, self._deadline_s = with_truth, deadline_s
    self._free = asyncio.Semaphore(concurrency)
    self._proxy: Proxy | None = None
    self._folder: pathlib.Path | None = None
    self._runs, self._closing = 0, contextlib.AsyncExitStack()
    self._opening = asyncio.Lock()

  async def run(
    self, task: Task, visit: int, *, stage: str, samples: int, sampling: Sampling
  ) -> AsyncIterator[Rollout]:
    async with self._serving():
      runs = super().run(task, visit, stage=stage, samples=samples, sampling=sampling)
      async with contextlib.aclosing(runs):
        async for rollout in runs:
          yield rollout

  async def play(self, episode: Episode) -> None:
    for name in (CALLS, REFUSED):
      episode.count(name, 0)
    options = SessionOptions(
      sampling=episode.sampling,
      parser=self._parser,
      turn_tokens=self._turn_tokens,
      filtered=self._filtered,
      takes_reward=self._posts_reward,
      max_calls=_MAX_CALLS if self.max_steps > 1 else 1,
    )
    async with self._free:
      for _ in range(_TRIES):
        session = Session(episode, options)  # Each start of the agent gets its own session.
        problem = await self._played_by_agent(episode, session)
        if episode.turns or session.failure:
          break
    if not episode.steps and session.is_unreadable:
      await act_blindly(episode)
      logging.log_first_n(
        logging.WARNING, 'task %s: %s: %s', 5, episode.task.uid, self._name, session.failure
      )
    if not episode.turns:
      reason = session.failure or problem or 'it made no call to the policy'
      raise RunError(
        f'{self._name}: ended before the first answer of the policy (task {episode.task.uid}): '
        f'{reason}; correct the agent'
      )
    if session.over is not None:
      if session.exclusion:
        episode.fail(f'{self._name}: {session.exclusion}')
      raise session.over
    if self._posts_reward and not session.has_reward:
      problem = problem or 'it posted no reward (POST /v1/reward)'
    if reason := session.failure or problem or session.exclusion:
      episode.fail(f'{self._name}: {reason}')

  @property
  def _name(self) -> str:
    return f'agent {one_line(shlex.join(self._command), 100)!r}'

  @contextlib.asynccontextmanager
  async def _serving(self) -> AsyncIterator[None]:
    """Keeps the proxy open while any group of this workflow is running."""
    self._runs += 1
    try:
      async with self._opening:
        if self._proxy is None:
          self._folder = self._closing.enter_context(scratch('jaxrl-agents-'))
          self._proxy = await self._closing.enter_async_context(Proxy())
      yield
    finally:
      self._runs -= 1
      if self._runs == 0:
        closing, self._closing = self._closing, contextlib.AsyncExitStack()
        self._proxy = None
        await closing.aclose()

  async def _played_by_agent(self, episode: Episode, session: Session) -> str:
    """Runs an agent until it ends or exceeds its deadline. Returns an error message of one line, or
    an empty string if there was no error.
    """
    async with self._proxy.open(session) as key:
      log = self._folder / f'{key}.log'
      child = Child('agent', log=log, log_bytes=_LOG_BYTES, grace_s=_GRACE_S)
      try:
        child.start(self._command, self._environment(episode.task, key))
        async with asyncio.timeout(self._deadline_s):
          code = await child.wait()
        lines = child.lines()
      except TimeoutError:
        code, lines = None, child.lines()
      finally:
        await child.stop(owner='the workflow')
        log.unlink(missing_ok=True)
    if code == 0:
      return ''
    why = f'exit code {code}' if code is not None else f'did not end within {self._deadline_s:g} s'
    logging.log_first_n(
      logging.WARNING, '%s: %s, its output ends:\n%s', 5, self._name, why, '\n'.join(lines[-_TAIL:])
    )
    return f'{why}: {lines[-1]}' if lines else why

  def _environment(self, task: Task, key: str) -> dict[str, str]:
    url = self._proxy.base_url
    # An HTTP proxy that is set in the environment cannot reach this machine's loopback interface.
    given = (os.environ.get('NO_PROXY'), os.environ.get('no_proxy'))
    direct = ','.join(dict.fromkeys(filter(None, (*given, '127.0.0.1'))))
    return {
      **os.environ,
      'NO_PROXY': direct,
      'no_proxy': direct,
      'OPENAI_API_BASE': url,
      'OPENAI_API_KEY': key,
      'OPENAI_BASE_URL': url,
      TASK: task_json(task, with_truth=self._with_truth),
    }


def task_json(task: Task, *, with_truth: bool) -> str:
  """Returns a task as JSON for an agent. Raises RunError if the JSON exceeds `MAX_TASK` bytes.

  Args:
    with_truth: whether to include the reference answer and the row's fields, which may contain it.
  """
  fields: dict[str, Json] = {
    'uid': task.uid,
    'taskset': task.taskset,
    'domain': task.domain,
    'prompt': [dict(message) for message in task.prompt],
  }
  if with_truth:
    fields |= {'truth': task.truth, 'fields': dict(task.fields)}
  text = json.dumps(fields)
  if len(text) > MAX_TASK:
    raise RunError(
      f'task {task.uid}: has {len(text)} bytes as JSON, wanted at most {MAX_TASK} for an external '
      'agent, which gets it in an environment variable; leave the task out'
    )
  return text


def _words(command: str) -> list[str]:
  try:
    words = shlex.split(command) if isinstance(command, str) else []
  except ValueError as error:
    raise UserError(f'rollout.workflow: command {command!r}: {error}') from None
  if not words:
    raise UserError(
      f"rollout.workflow: command {command!r} is empty, wanted one such as 'external:python "
      "agent.py'"
    )
  return words


def _parser(kind: str, template: str) -> Parser | None:
  """Returns the parser of tool calls. If 'auto' finds no parser for the chat template, the result
  is None, because agents without tools need none.
  """
  try:
    return choose_parser(kind, template)
  except UserError:
    if kind != 'auto':
      raise
    return None
