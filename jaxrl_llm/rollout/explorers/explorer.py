"""An explorer process: leases groups from the master, runs the workflow, and hands in each sample
as it finishes.

Invariant: an explorer stores no state. If the master takes a group away, or the master or the
network fails, the work on the group is lost, and an explorer runs the group again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgpack
from absl import logging

from jaxrl_llm.core.disk import scratch
from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.files import parse_msgpack
from jaxrl_llm.core.net.client import Client, Lost, RemoteError, Response
from jaxrl_llm.core.records.sample import encode
from jaxrl_llm.core.records.task import Message
from jaxrl_llm.rewards.api import Attempt, Reward
from jaxrl_llm.rollout.api import Completion, Request
from jaxrl_llm.rollout.explorers import wire
from jaxrl_llm.rollout.explorers.fetching import Fetcher
from jaxrl_llm.rollout.explorers.wire import (
  attempt_row,
  pack,
  read_reward,
  read_sampling,
  read_task,
  request_row,
  verdict_row,
)
from jaxrl_llm.rollout.hub import Hub
from jaxrl_llm.rollout.signed_answer import Frame
from jaxrl_llm.rollout.workflow import Rollout, Workflow, WorkflowConfig
from jaxrl_llm.tasks.tokenizer import Tokenizer

_PATIENCE_S = 60.0
"""Seconds for which the master may be unreachable before the explorer ends."""
_AGAIN_S = 0.5
_SILENCE_S = 6 * wire.BEAT_S
"""Seconds without data in a response after which the master counts as unreachable."""
_MAX_BYTES = 1 << 30
"""Maximum size in bytes of a response, and of one value in a stream."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Welcome:
  """The run's settings that an explorer receives when it connects."""

  workflow: WorkflowConfig
  max_tokens: int
  """Maximum number of tokens of a sample after its prompt."""
  max_steps: int
  """Maximum number of steps of a trajectory."""
  max_prompt: int
  """Maximum number of tokens of an episode's first prompt."""
  tokenizer: Mapping[str, bytes]
  """Contents of the tokenizer files, keyed by file name."""

  def row(self) -> dict[str, Any]:
    # The options are encoded as JSON, because msgpack cannot represent integers of more than 64
    # bits.
    workflow = {'kind': self.workflow.kind, 'options': json.dumps(dict(self.workflow.options))}
    return {
      'workflow': workflow,
      'limits': (self.max_tokens, self.max_steps, self.max_prompt),
      'tokenizer': dict(self.tokenizer),
    }


BuildWorkflow = Callable[[WorkflowConfig, Hub, Tokenizer, int, int, int], Workflow]
"""Function of (configuration, hub, tokenizer, `max_tokens`, `max_steps`, `max_prompt`) that builds
a workflow. The last three arguments are the limits in `Welcome`.
"""


class MasterLost(Lost):
  """Raised when the master does not respond. A separate class is needed because workflows also call
  other services, whose loss fails only the workflow.
  """


class Rejected(MasterLost):
  """Raised when the master rejects a message, because the explorer has lost the lease or the group
  has ended.
  """


class Evicted(RunError):
  """Raised when the master refuses all messages of this explorer, because of an earlier message."""


class Link:
  """A connection to the master.

  Attributes:
    name: full name by which the master knows the explorer.
    sender: fields that identify the explorer in every message. They include a secret that only the
      explorer and the master know.
    fetcher: fetches completions from servers.

  Raises:
    MasterLost: the master does not respond. Any method may raise this.
    UserError: the master refuses the token.
    RunError: the master refuses the request.
    Evicted: the master refuses all further requests.
  """

  def __init__(self, address: str, *, key: str | None, ca_file: str | None, name: str):
    """
    Args:
      address: `unix:/path`, `http://host:port` or `https://host:port`.
      key: bearer token for HTTP addresses.
      ca_file: PEM file of the authority that signed the certificates of the master and of the
        servers' fronts. If None, the system's authorities are used.
      name: first part of the explorer's full name.

    Raises:
      UserError: the address or ca_file cannot be used.
    """
    secret = secrets.token_hex(16)
    self.name, self.sender = wire.identity(name, secret), {'name': name, 'secret': secret}
    self._client = Client(address, key=key, ca_file=ca_file, where='master', max_bytes=_MAX_BYTES)
    self.fetcher = Fetcher(ca_file)

  async def close(self) -> None:
    await self._client.close()
    await self.fetcher.close()

  async def call(self, path: str, *, deadline_s: float = 30.0, **body: Any) -> Any:
    async with self._posted(path, body, deadline_s) as response:
      return parse_msgpack(await response.read())

  async def stream(self, path: str, **body: Any) -> AsyncIterator[Any]:
    """Yields the values of a response as they arrive, until a final None. The response may take any
    time in total. Raises MasterLost if the response ends early or sends no data for `_SILENCE_S`
    seconds, and RunError if it contains an error message.
    """
    frames = msgpack.Unpacker(max_buffer_size=_MAX_BYTES)
    async with self._posted(path, body, None) as response:
      async for chunk in response.chunks():
        frames.feed(chunk)
        for value in frames:
          if value is None:
            return
          if isinstance(value, str):
            raise RunError(value)
          if value is not True:
            yield value
    raise MasterLost(f'{path}: the response ended early')

  @contextlib.asynccontextmanager
  async def _posted(
    self, path: str, body: Mapping[str, Any], deadline_s: float | None
  ) -> AsyncIterator[Response]:
    message = pack({**self.sender, **body})
    try:
      async with self._client.request(
        'POST', path, message, label=path, deadline_s=deadline_s, silence_s=_SILENCE_S
      ) as response:
        yield response
    except RemoteError as error:
      if error.refuses_key:
        raise UserError(
          f'master: refuses the token ({error.status}); --key_file must hold the token of its '
          'rollout.explorers.listen'
        ) from None
      if error.status == 410:
        raise Rejected(error.reason) from None
      if error.status == wire.EVICTED:
        raise Evicted(f'master: {error.reason}') from None
      if error.status is not None:
        raise RunError(f'master: {error}') from None
      raise MasterLost(str(error)) from None


class _LeasedHub:
  """Hub for the workflow of one leased group. It forwards all requests to the master."""

  def __init__(self, link: Link, lease: str):
    self._link, self._lease = link, lease

  async def generate(self, request: Request) -> AsyncIterator[tuple[int, Completion]]:
    answers: dict[str, list[Frame]] = {}
    errands: set[asyncio.Task] = set()
    try:
      async for frame in self._link.stream(
        wire.GENERATE, lease=self._lease, request=request_row(request)
      ):
        if isinstance(frame, dict):
          errands.add(asyncio.create_task(self._run_errand(frame, answers)))
          continue
        index, row = frame
        yield index, wire.joined_completion(row, answers)
    finally:
      for errand in errands:
        errand.cancel()
      await asyncio.gather(*errands, return_exceptions=True)

  async def _run_errand(self, errand: wire.Row, answers: dict[str, list[Frame]]) -> None:
    """Fetches the completion of an errand and delivers it to the master. Adds the frames of
    the server's answer to `answers`, keyed by nonce.
    """

    async def deliver(delivery: wire.Delivery) -> bool:
      # Retrying is safe, because the master ignores parts that have already arrived.
      return await _patiently(
        functools.partial(self._link.call, wire.DELIVER, lease=self._lease, **delivery._asdict())
      )

    frames = answers[errand['nonce']] = []
    try:
      await self._link.fetcher.fetch(errand, frames, deliver)
    except (MasterLost, RunError) as error:
      # The master ends the request, or fetches the completion itself.
      logging.info('a completion was not delivered: %s', error)

  async def score(self, attempt: Attempt) -> Reward:
    return read_reward(await self._one(wire.SCORE, attempt=attempt_row(attempt)))

  async def ask(
    self, model: str, messages: Sequence[Message], *, max_tokens: int, temperature: float = 0.0
  ) -> str:
    asked = {
      'messages': [dict(message) for message in messages],
      'max_tokens': max_tokens,
      'temperature': temperature,
    }
    return await self._one(wire.ASK, model=model, **asked)

  async def _one(self, path: str, **body: Any) -> Any:
    ((_, value),) = [frame async for frame in self._link.stream(path, lease=self._lease, **body)]
    return value


async def explore(link: Link, build: BuildWorkflow) -> None:
  """Leases groups from the master and runs them, until the master has been unreachable for a
  minute. Closes the link at the end. The exceptions may be raised inside an exception group.

  Args:
    link: connection to the master.
    build: creates a workflow that uses the given hub.

  Raises:
    UserError: the master refuses the token.
    RunError: the master is unreachable.
    Evicted: the master evicted this explorer.
  """
  try:
    welcome = await _patiently(lambda: link.call(wire.HELLO))
    tokenizer, config = _tokenizer(welcome['tokenizer']), _workflow(welcome['workflow'])
    under_way: dict[str, asyncio.Task] = {}

    def make(lease):
      return build(config, _LeasedHub(link, lease), tokenizer, *welcome['limits'])

    async with asyncio.TaskGroup() as tasks:
      tasks.create_task(_say_alive(link, under_way))
      for _ in range(welcome['groups']):
        tasks.create_task(_take_groups(link, make, under_way))
  finally:
    with contextlib.suppress(MasterLost, UserError):
      await link.call(wire.LEAVE, deadline_s=2.0)
    await link.close()


async def _take_groups(
  link: Link, make: Callable[[str], Workflow], under_way: dict[str, asyncio.Task]
) -> None:
  while True:
    order = await _patiently(lambda: link.call(wire.TAKE, deadline_s=wire.TAKE_S + 20.0))
    if order is None:
      continue
    lease = order.pop('lease')
    task = asyncio.create_task(_run(link, lease, make(lease), order))
    under_way[lease] = task
    try:
      # Wait 'explored': bounded: the master ends the lease when the group reaches its limits.
      await asyncio.wait({task})
      if not task.cancelled():
        task.result()
    finally:
      task.cancel()
      del under_way[lease]


async def _run(link: Link, lease: str, workflow: Workflow, order: dict[str, Any]) -> None:
  """Runs the workflow for one group and sends the samples to the master. If the workflow fails,
  sends its error instead. Raises Evicted if the master refuses all further messages.
  """
  options = {
    'stage': order['stage'],
    'samples': order['samples'],
    'sampling': read_sampling(order['sampling']),
  }
  try:
    async with contextlib.aclosing(
      workflow.run(read_task(order['task']), order['visit'], **options)
    ) as runs:
      async for yielded in runs:
        rollout = Rollout(*yielded)  # The master decodes the text from the tokens itself.
        handed_in = {
          'lease': lease,
          'steps': [encode(step) for step in rollout.steps],
          'verdict': verdict_row(rollout.verdict),
        }
        # Retrying is safe, because the master ignores a trajectory that has already arrived.
        await _patiently(functools.partial(link.call, wire.SAMPLE, **handed_in))
    await _patiently(lambda: link.call(wire.DONE, lease=lease))
  except MasterLost as lost:
    logging.info('a group of taskset %s is lost: %s', order['task']['taskset'], lost)
  except Evicted:
    raise
  except Exception as error:
    logging.exception('a group of taskset %s: its workflow failed', order['task']['taskset'])
    with contextlib.suppress(MasterLost):
      await link.call(wire.FAILED, lease=lease, error=_line(error))


async def _say_alive(link: Link, under_way: dict[int, asyncio.Task]) -> None:
  while True:
    gone = await _patiently(lambda: link.call(wire.ALIVE, leases=[*under_way]))
    for lease in gone:
      if lease in under_way:
        under_way[lease].cancel()
    await asyncio.sleep(wire.ALIVE_S)


async def _patiently(call: Callable[[], Any]) -> Any:
  """Returns the result of `call`. If the master is unreachable, retries for up to `_PATIENCE_S`
  seconds and then raises RunError.
  """
  loop = asyncio.get_running_loop()
  deadline = loop.time() + _PATIENCE_S
  while True:
    try:
      return await call()
    except Rejected:
      raise
    except MasterLost as lost:
      if loop.time() > deadline:
        raise RunError(f'the master has not answered for {_PATIENCE_S:g} s: {lost}') from None
    await asyncio.sleep(_AGAIN_S)


def _workflow(row: Mapping[str, Any]) -> WorkflowConfig:
  return WorkflowConfig(kind=row['kind'], options=json.loads(row['options']))


def _tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
  with scratch('jaxrl-explorer-') as directory:
    for name, data in files.items():
      (directory / name).write_bytes(data)
    return Tokenizer.from_directory(directory)


def _line(error: Exception) -> str:
  text = ' '.join(str(error).split())
  return text if isinstance(error, UserError) else f'{type(error).__name__}: {text}'
