"""Presents a run's explorer processes as one workflow. An explorer with free capacity leases
(borrows) the next group, and sends back the group's samples.

An explorer has no model, scorer or file of the run. The master (the process that runs the engine)
serves the requests of the explorers' workflows for tokens, scores and replies of auxiliary models.
It also receives the finished samples. Only the master writes the index of the store.

Invariants: a message either takes full effect or is refused, and it affects no other explorer. An
explorer is evicted if it sends a message that a correct explorer never sends, and other explorers
take over its groups. The master does not accept the text of a sample from an explorer, but decodes
it from the tokens.

Explorers on other hosts connect through a `Front`, an HTTP server that requires a bearer token.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from absl import logging

from jaxrl_llm.core import background
from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.net.listener import listening
from jaxrl_llm.core.net.token_server import FrontConfig
from jaxrl_llm.core.process_clock import seconds_metrics
from jaxrl_llm.core.records.sample import Sample
from jaxrl_llm.core.records.task import Message, Task
from jaxrl_llm.core.waits import bounded
from jaxrl_llm.rollout.api import Completion, Sampling
from jaxrl_llm.rollout.explorers import wire
from jaxrl_llm.rollout.explorers.arrivals import (
  one_line,
  read_attempt,
  read_delivery,
  read_error,
  read_lease,
  read_leases,
  read_question,
  read_request,
  read_steps,
  read_verdict,
)
from jaxrl_llm.rollout.explorers.errands import BadDelivery, Errands, RequestCourier
from jaxrl_llm.rollout.explorers.leases import Gone, Leases, LentGroup, Misbehaved, SenderEvicted
from jaxrl_llm.rollout.explorers.process import ExplorerCommand, ExplorerProcess
from jaxrl_llm.rollout.explorers.receiver import Receiver, Reply, Send
from jaxrl_llm.rollout.explorers.wire import (
  completion_row,
  reward_row,
  sampling_row,
  task_row,
)
from jaxrl_llm.rollout.hub import Hub
from jaxrl_llm.rollout.signed_answer import BEAT_S, KEEP_S
from jaxrl_llm.rollout.untrusted import Bounds
from jaxrl_llm.rollout.workflow import Rollout

ROUTES = tuple(('POST', path) for path in wire.PATHS)
_CHECK_S = 0.25

Announce = Callable[[str], contextlib.AbstractAsyncContextManager[None]]
"""Function that announces an address of the master to explorers. The announcement lasts as long as
the block of the returned context manager.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplorersConfig:
  """Settings of explorer processes, which run the workflow in place of the master process."""

  processes: int = 1
  """Number of explorers that the run starts on its own machine. If 0, all explorers must connect
  through `listen`.
  """
  groups: int = 4
  """Number of groups that one explorer runs concurrently."""
  listen: FrontConfig | None = None
  """HTTP server for explorers on other hosts (`jaxrl serve --role=explorer`). If None, only local
  explorers can connect.
  """
  silent_s: float = 15.0
  """Seconds without a message after which an explorer is considered lost. Its groups are then given
  to other explorers.
  """
  nobody_s: float = 300.0
  """Maximum seconds for which groups wait without any connected explorer. After that, the run ends
  with an error.
  """
  direct: bool = False
  """Whether explorers fetch completions from the servers themselves. They get a ticket for each
  completion, and deliver it to the master with the signatures of the server's front. The master
  then neither parses the servers' answers nor sends tokens to explorers. Requires `rollout.engine`
  'vllm', servers behind fronts (`jaxrl serve --host`), and a token of the servers that explorers do
  not have.
  """
  tickets: int = 64
  """Maximum number of tickets that an explorer has at a time for each of its groups, if `direct`.
  Further requests of the group wait, without a place at a server. An explorer can thus keep at most
  `groups` × `tickets` places.
  """
  ticket_s: float = 30.0
  """Maximum age in seconds of the newest part of an answer that an explorer has delivered, or of a
  ticket for which it has delivered none, if `direct`. A ticket that is older expires: its place at
  the server is freed, later parts are refused, and the master obtains the answer itself. While a
  server works on an answer, its front signs a part at least every 5 s.
  """

  def __post_init__(self):
    if self.processes < 0 or self.groups < 1:
      raise UserError(
        f'rollout.explorers: processes {self.processes} and groups {self.groups}, wanted at least '
        '0 and at least 1'
      )
    if not self.processes and self.listen is None:
      raise UserError(
        'rollout.explorers.processes: 0, and no other explorer can connect; raise it, or set '
        'rollout.explorers.listen'
      )
    if not (self.silent_s >= 3 * wire.ALIVE_S and self.nobody_s > 0):
      raise UserError(
        f'rollout.explorers: silent_s {self.silent_s} and nobody_s {self.nobody_s}, wanted at '
        f'least {3 * wire.ALIVE_S:g} and more than 0, respectively'
      )
    if not (self.tickets >= 1 and 3 * BEAT_S <= self.ticket_s <= KEEP_S / 2):
      raise UserError(
        f'rollout.explorers: tickets {self.tickets} and ticket_s {self.ticket_s}, wanted at least '
        f'1, and {3 * BEAT_S:g} to {KEEP_S / 2:g}, respectively'
      )


class Crew:
  """Workflow that is run by explorer processes.

  Attributes:
    counts: the counts of `Leases` and `Errands`, and `repeated`, the number of samples that were
      ignored because they had already arrived.
    address: address for local explorers, set by `start`.
    front: address for explorers on other machines; None if they cannot connect.
  """

  def __init__(
    self,
    hub: Hub,
    config: ExplorersConfig,
    *,
    welcome: Mapping[str, Any],
    text: Callable[[Sample], str],
    turns: Callable[..., tuple[Message, ...]],
    bounds: Bounds,
    max_steps: int = 1,
    logs: pathlib.Path,
    command: ExplorerCommand,
    announce: Announce | None = None,
  ):
    """
    Args:
      hub: serves the requests that workflows send through the explorers.
      config: settings of the explorers.
      welcome: settings that an explorer needs to build the workflow (`explorer.Welcome`), as a
        mapping for msgpack.
      text: `Workflow.text`. It is called in a separate thread, for one sample at a time.
      turns: returns a trajectory's conversation after the prompt, given its steps (one or more
        samples). It is called in the same thread as `text`.
      bounds: limits on samples and requests.
      max_steps: maximum number of steps of a trajectory.
      logs: directory for the logs of local explorers.
      command: returns the command line of an explorer process.
      announce: announces `front` (or `address`, if `front` is None) to explorers until the crew is
        closed. If None, no address is announced.
    """
    self._leases = Leases(
      silent_s=config.silent_s,
      groups=config.groups,
      errands=functools.partial(Errands, tickets=config.tickets, ticket_s=config.ticket_s),
    )
    self.counts = self._leases.counts
    self.text, self.address, self.front, self._bounds = text, '', None, bounds
    self._turns, self._max_steps = turns, max_steps
    self._texts = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='explorer-texts')
    self._hub, self._config, self._welcome = hub, config, {**welcome, 'groups': config.groups}
    self._loop: asyncio.AbstractEventLoop
    """Event loop in which the crew was started, set by `start`."""
    self._logs, self._command, self._announce = logs, command, announce
    self._nobody_since = time.monotonic()
    self._reported: collections.Counter[str] = collections.Counter()
    """Copy of `counts` from the last time that metrics were taken."""
    self._failure: Exception | None = None
    self._opened = contextlib.AsyncExitStack()
    self._processes: list[ExplorerProcess] = []

  @property
  def explorers(self) -> int:
    """Number of connected explorers."""
    return len(self._leases.explorers)

  async def start(self) -> None:
    """Listens, starts the local explorers, and returns once the first explorer is ready for work.

    Raises:
      UserError: the address or port cannot be used.
      RunError: a local explorer exits repeatedly.
      WaitExpired: no explorer connects within `nobody_s`.
    """
    self._loop = asyncio.get_running_loop()
    application = self._receiver().application
    listener = listening(application, name='crew', front=self._config.listen, routes=ROUTES)
    self.address, self.front = await self._opened.enter_async_context(
      background.messages().entered(listener)
    )
    if self.front is not None:
      logging.info('explorers: others can connect to %s', self.front)
    if self._announce is not None:
      await self._opened.enter_async_context(self._announce(self.front or self.address))
    for number in range(self._config.processes):
      explorer = ExplorerProcess(f'explorer-{number}', self.address, self._logs, self._command)
      self._processes.append(explorer)
      explorer.start()
    self._opened.push_async_callback(self._stop_processes)
    watch = asyncio.create_task(self._watch())
    self._opened.push_async_callback(_cancelled, watch)
    await bounded(
      self._first_explorer(),
      name='first_explorer',
      owner='the run',
      waits_for='an explorer to connect (start one with jaxrl serve --role=explorer, or raise '
      'rollout.explorers.processes; the deadline is rollout.explorers.nobody_s)',
      deadline_s=self._config.nobody_s,
    )

  async def _first_explorer(self) -> None:
    while not self._leases.explorers:  # Wait 'first_explorer': bounded by the caller.
      if self._failure is not None:
        raise self._failure
      await asyncio.sleep(_CHECK_S / 5)

  async def close(self) -> None:
    """Stops local explorers and the listener."""
    await self._opened.aclose()
    self._texts.shutdown(wait=False, cancel_futures=True)

  async def _stop_processes(self) -> None:
    await asyncio.gather(*(process.stop() for process in self._processes))

  async def run(
    self, task: Task, visit: int, *, stage: str, samples: int, sampling: Sampling
  ) -> AsyncIterator[Rollout]:
    """Implements `Workflow.run`. Raises RunError if the workflow has failed in its explorer."""
    options = {
      'visit': visit,
      'stage': stage,
      'samples': samples,
      'sampling': sampling_row(sampling),
    }
    order = {'task': task_row(task), **options}
    group = LentGroup(
      order=order,
      name=f'{stage}/{task.uid}/{visit}',
      samples=samples,
      sampling=sampling,
      max_steps=self._max_steps,
    )
    await self._leases.offer(group)
    try:
      for _ in range(samples):
        self._check()
        # If the crew fails, `_watch` puts its error into this queue.
        # Wait 'sample': bounded by 'limits', 'collect' and 'suite' (docs/develop/waits.md).
        result = await group.handed_in.get()
        if isinstance(result, Exception):
          raise result
        yield result
    finally:
      self._leases.end(group)

  def take_metrics(self) -> dict[str, float]:
    counts = self.counts.copy()  # Another thread may add to the counts meanwhile.
    new, self._reported = counts - self._reported, counts
    direct = {
      'perf/direct_delivered': new['direct_delivered'],
      'perf/direct_undelivered': new['direct_undelivered'],
      'perf/direct_expired': new['direct_expired'],
      'perf/direct_late': new['direct_late'],
      'perf/direct_refused': sum(new[f'direct_{how}'] for how in ('unsigned', 'forged', 'unknown')),
    }
    return {
      'perf/explorers': float(self.explorers),
      'perf/explorers_lost_groups': float(new['lost']),
      **{name: float(count) for name, count in direct.items() if self._config.direct},
      **seconds_metrics('explorers', [self._leases.clock]),
    }

  def _receiver(self) -> Receiver:
    answers: Mapping[str, Callable] = {
      wire.HELLO: self._hello,
      wire.TAKE: self._take,
      wire.ALIVE: self._alive,
      wire.LEAVE: self._leave,
      wire.DONE: self._done,
      wire.FAILED: self._failed,
    }
    streams = {wire.GENERATE: self._generate, wire.SCORE: self._score, wire.ASK: self._ask}
    local: Mapping[str, Callable] = {wire.DELIVER: self._deliver, wire.SAMPLE: self._sample}
    return Receiver(
      {path: functools.partial(self._reply, path, answer) for path, answer in answers.items()},
      {
        path: functools.partial(self._reply, path, functools.partial(self._stream, frames))
        for path, frames in streams.items()
      },
      {path: functools.partial(self._reply, path, answer) for path, answer in local.items()},
    )

  async def _reply(
    self,
    path: str,
    answer: Callable[..., Awaitable[Any]],
    sender: str,
    body: dict[str, Any],
    *send: Send,
  ) -> Reply:
    """Answers a message, in the crew's event loop or in the receiver's. Turns a refusal into an
    HTTP error status, and evicts the sender if `answer` raises Misbehaved.
    """
    try:
      self._leases.admit(sender)
      return Reply(await answer(sender, body, *send))
    except Gone as gone:
      await background.call_in(self._loop, self._leases.note_late)
      return Reply(status=410, error=str(gone))
    except SenderEvicted as evicted:
      return Reply(status=wire.EVICTED, error=str(evicted))
    except Misbehaved as error:
      why = f'{path}: {error}'
      await background.run_in(self._loop, self._leases.evict(sender, why))
      return Reply(status=wire.EVICTED, error=f'{sender} was evicted: {why}')
    except UserError as error:
      return Reply(status=422, error=str(error))

  async def _hello(self, sender: str, body: dict[str, Any]) -> Any:
    logging.info('explorers: %s has connected', sender)
    return self._welcome

  async def _take(self, sender: str, body: dict[str, Any]) -> Any:
    group = await self._leases.take(sender)
    return None if group is None else {**group.order, 'lease': group.lease}

  async def _alive(self, sender: str, body: dict[str, Any]) -> Any:
    """Receives the leases that an explorer reports, and returns those that are no longer valid."""
    return await self._leases.reconcile(sender, read_leases(body))

  async def _leave(self, sender: str, body: dict[str, Any]) -> Any:
    await self._leases.give_up(sender, 'left')

  async def _deliver(self, sender: str, body: dict[str, Any]) -> Any:
    """Receives parts of a completion, and returns whether more are wanted. Called in the receiver's
    event loop.
    """
    errands, delivery = self._leases.errands(read_lease(body), sender), read_delivery(body)
    try:
      return await errands.deliver(delivery)
    except BadDelivery as error:
      raise Misbehaved(one_line(error)) from None

  async def _sample(self, sender: str, body: dict[str, Any]) -> Any:
    """Receives a trajectory. Called in the receiver's event loop."""
    lease = read_lease(body)
    group = self._leases.held(lease, sender)
    try:
      # A separate thread is used, because a long sample would block the event loop.
      result = await asyncio.get_running_loop().run_in_executor(
        self._texts, self._read_sample, lease, body, group
      )
    finally:
      # The lease may have ended meanwhile. The sample may then have been compared with completions
      # of a later lease, so a fault in it proves nothing.
      self._leases.held(lease, sender)
    await background.call_in(self._loop, self._hand_in, lease, sender, result)

  def _hand_in(self, lease: str, sender: str, result: Rollout | RunError) -> None:
    """Passes on a trajectory that has been checked, or the error with which the check ended. Raises
    Gone if the lease has ended, and Misbehaved if the group did not request the trajectory.
    """
    group = self._leases.held(lease, sender)
    if isinstance(result, RunError):
      group.fail(result)
      self._leases.end(group)
      return
    try:
      if not group.hand_in(result):
        self.counts['repeated'] += 1
    except ValueError as error:
      raise Misbehaved(one_line(error)) from None

  def _read_sample(self, lease: str, body: dict[str, Any], group: LentGroup) -> Rollout | RunError:
    """Checks and decodes the trajectory in a message. Returns an error if the workflow cannot
    decode the trajectory's text. Called in a separate thread. Raises Misbehaved if the message is
    invalid, and Gone if the lease has ended.
    """
    # Samples that an evicted explorer has sent must not delay those of others.
    if not self._leases.is_held(lease):
      raise Gone(lease)
    steps = read_steps(body, group, self._bounds)
    verdict = read_verdict(body, steps)
    try:
      text, turns = self.text(steps[-1]), self._turns(*steps)
    except Exception as error:  # The sample passed all checks, so the workflow has a bug.
      return RunError(
        one_line(f'rollout.workflow: text of {steps[-1].uid}: {type(error).__name__}: {error}')
      )
    return Rollout(steps[0], text, verdict, turns, tuple(steps[1:]))

  async def _done(self, sender: str, body: dict[str, Any]) -> Any:
    lease = read_lease(body)
    if not self._leases.is_held(lease):
      # The run may have ended the group when its last sample arrived.
      return
    group = self._leases.held(lease, sender)
    if problem := group.roster.incomplete():
      group.fail(RunError(f'explorer {group.holder}: {problem}'))
    self._leases.end(group)

  async def _failed(self, sender: str, body: dict[str, Any]) -> Any:
    group, error = self._leases.held(read_lease(body), sender), read_error(body)
    group.fail(RunError(f'explorer {group.holder}: its workflow failed: {error}'))
    self._leases.end(group)

  async def _stream(
    self,
    frames: Callable[[dict[str, Any], LentGroup, Send], AsyncIterator[Any]],
    sender: str,
    body: dict[str, Any],
    send: Send,
  ) -> None:
    """Sends the values of `frames` as they arrive. The stream ends with None, or with the message
    of a UserError. Any other error ends the group and is raised in `run`.
    """
    with self._leases.called(read_lease(body), sender) as group:
      answers = frames(body, group, send)
      try:
        async with contextlib.aclosing(answers):
          async for value in answers:
            send(value)
        send(None)
      except UserError as error:
        send(str(error))
      # The explorer's workflow does not see this error; `run` raises it instead.
      except Exception as error:
        group.fail(error)

  def _generate(self, body: dict[str, Any], group: LentGroup, send: Send) -> AsyncIterator[Any]:
    # Tokens are counted for the group that was lent to the explorer, even if the request states
    # another uid.
    courier = None
    if self._config.direct:
      courier = RequestCourier(group.errands, send, background.messages().loop)
    request = read_request(body, self._bounds)
    asked = dataclasses.replace(request, uid=group.name, courier=courier)
    generated = group.generated

    async def completions() -> AsyncIterator[tuple[int, Completion]]:
      async with contextlib.aclosing(self._hub.generate(asked)) as arriving:
        async for index, completion in arriving:
          generated.add(completion, asked.sampling)
          yield index, completion

    return _rows(completions()) if courier is None else courier.rows(completions())

  def _score(self, body: dict[str, Any], group: LentGroup, send: Send) -> AsyncIterator[Any]:
    attempt = read_attempt(body, group)

    async def frames() -> AsyncIterator[Any]:
      yield [0, reward_row(await self._hub.score(attempt))]

    return frames()

  def _ask(self, body: dict[str, Any], group: LentGroup, send: Send) -> AsyncIterator[Any]:
    model, messages, options = read_question(body)

    async def frames() -> AsyncIterator[Any]:
      yield [0, await self._hub.ask(model, messages, **options)]

    return frames()

  async def _watch(self) -> None:
    """Takes groups back from silent explorers, and restarts local explorers that have ended."""
    try:
      while True:
        began = time.monotonic()
        await asyncio.sleep(_CHECK_S)
        if time.monotonic() - began > _CHECK_S + self._config.silent_s / 2:
          # This process itself was suspended and has not yet read the messages that arrived
          # meanwhile.
          continue
        silent = await self._leases.give_up_silent()
        for explorer in self._processes:
          if any(name.startswith(f'{explorer.identity}/') for name in silent):
            explorer.terminate()  # The explorer is restarted once it has ended.
          if not explorer.is_running():
            for name in self._leases.explorers:
              if name.startswith(f'{explorer.identity}/'):
                await self._leases.give_up(name, 'ended')
            logging.warning('explorers: %s ended: %s', explorer.name, explorer.last_line())
            explorer.start_again()
        if self._leases.explorers or not self._leases.groups:
          self._nobody_since = time.monotonic()
        self._check()
    except Exception as error:  # `run` raises the error while it waits for samples.
      self._failure = error
      for group in self._leases.groups:
        group.fail(error)

  def _check(self) -> None:
    if self._failure is not None:
      raise self._failure
    if not self._leases.explorers and time.monotonic() - self._nobody_since > self._config.nobody_s:
      raise RunError(
        f'explorers: none connected for {self._config.nobody_s:g} s (rollout.explorers.nobody_s); '
        'start one with jaxrl serve --role=explorer, or raise rollout.explorers.processes'
      )


async def _rows(completions: AsyncIterator[tuple[int, Completion]]) -> AsyncIterator[Any]:
  async with contextlib.aclosing(completions):
    async for index, completion in completions:
      yield [index, completion_row(completion)]


async def _cancelled(task: asyncio.Task) -> None:
  task.cancel()
  await asyncio.gather(task, return_exceptions=True)
