"""Recovery of the servers of a fleet: watches them, takes failed ones out of service, restarts them
and loads the current version into them, or gives them up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable
from typing import Any

from absl import logging

from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.net.client import Lost, Refused, RemoteError
from jaxrl_llm.rollout.vllm.admission import Admission
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.vllm.discovery import Discovery
from jaxrl_llm.rollout.vllm.replica import Replica, ReplicaState, Unproven
from jaxrl_llm.rollout.vllm.roster import Roster
from jaxrl_llm.rollout.vllm.updates import Updates

_WATCH_S = 0.25
"""Seconds between checks of the owned servers' processes."""
_REFUSED_S, _MAX_REFUSED_S = 1.0, 60.0
"""Seconds until a version is sent again to a server that has refused it. They double with each
refusal, up to the maximum.
"""
_PATIENCE = 3
"""Number of consecutive failures beyond which a server is restarted even if its health checks
succeed.
"""


class Repairs:
  """Tasks that bring servers into service, at most one per server."""

  def __init__(
    self,
    roster: Roster,
    updates: Updates,
    admission: Admission,
    config: VllmConfig,
    discovery: Discovery | None,
  ):
    """
    Args:
      discovery: finds servers that join and leave. If None, a server that was given up stays in the
        fleet, and the fleet fails with its last server.
    """
    self._roster, self._updates, self._admission = roster, updates, admission
    self._config, self._discovery = config, discovery
    self._tasks: dict[Replica, asyncio.Task] = {}

  @property
  def tasks(self) -> tuple[asyncio.Task, ...]:
    """Tasks in progress."""
    return tuple(self._tasks.values())

  def cancel(self, replica: Replica) -> None:
    """Cancels the task of a server, if there is one."""
    if replica in self._tasks:
      self._tasks[replica].cancel()

  async def cancel_all(self) -> None:
    """Cancels the tasks in progress, and waits until they have ended."""
    tasks = self.tasks
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

  async def watch(self) -> None:
    """Watches the servers until the fleet ends: repairs an owned server whose process has ended,
    ends the fleet if no server has been available for too long, and removes the previous version's
    files once no server needs them.
    """
    roster, loop = self._roster, asyncio.get_running_loop()
    served = loop.time()
    while roster.failure is None:
      await asyncio.sleep(_WATCH_S)
      for replica in roster.replicas:
        lost = replica.server is not None and not replica.server.is_running()
        if lost and replica.state == ReplicaState.SERVING:
          self.repair(replica, 'its process ended')
      if roster.released is not None or any(
        replica.state in (ReplicaState.SERVING, ReplicaState.UPDATING) for replica in roster.holding
      ):
        served = loop.time()
      elif loop.time() - served > self._config.start_deadline_s:
        others = roster.in_state(ReplicaState.SERVING)
        which = ' for the longest sequences' if others else ''
        roster.fail(
          RunError(
            f'no engine left{which}: none served for '
            f'rollout.vllm.start_deadline_s={self._config.start_deadline_s:g} s; the last failure: '
            f'{roster.last_trouble}'
          )
        )
      try:
        roster.check_samplers()
      except UserError as error:
        roster.dispatcher.refuse_sampled(error)
      try:
        await self._updates.drop_earlier()
      except RunError as error:
        roster.fail(error)

  def repair(self, replica: Replica, reason: str) -> None:
    """Takes a server out of service, and starts a task that recovers or restarts it."""
    is_out = replica.state in (ReplicaState.GONE, ReplicaState.RELEASED)
    if replica in self._tasks or self._roster.failure is not None or is_out:
      return
    replica.state = ReplicaState.DOWN
    replica.failures += 1
    self._roster.note_trouble(replica, reason)
    logging.warning('engine %s: taken out of service: %s', replica.name, reason)
    self._begin(replica, self._bring_back(replica), 'repair')

  def bring_in(self, replica: Replica) -> None:
    """Starts a task that brings a server that has registered itself into service."""
    self._begin(replica, self._bring_in(replica), 'join')

  async def restore(self, replicas: Iterable[Replica]) -> None:
    """Brings released servers back into service, and waits until they serve or were given up."""
    replicas = tuple(replicas)
    for replica in replicas:
      replica.state = ReplicaState.DOWN
      self._begin(replica, self._wake(replica), 'restore')
    # Wait 'restored': bounded by `max_restarts` times `start_deadline_s`.
    await asyncio.gather(*(self._tasks[replica] for replica in replicas), return_exceptions=True)

  def _begin(self, replica: Replica, work: Coroutine[Any, Any, None], name: str) -> None:
    """Starts a task that brings the server into service. If the task fails, the server is closed
    and given up.

    Args:
      work: coroutine that brings the server into service.
    """
    task = asyncio.create_task(
      self._finish_or_end(replica, work), name=f'engine {replica.name}: {name}'
    )
    self._tasks[replica] = task
    task.add_done_callback(lambda done: self._done(replica, done))

  async def _finish_or_end(self, replica: Replica, work: Coroutine[Any, Any, None]) -> None:
    try:
      # Wait 'restored': bounded by `max_restarts` times `start_deadline_s`.
      await work
    except Exception:
      # The memory and cores become available to the other servers.
      await self._admission.end(replica)
      raise

  def _done(self, replica: Replica, task: asyncio.Task) -> None:
    del self._tasks[replica]
    if not task.cancelled() and (error := task.exception()) is not None:
      replica.state = ReplicaState.GONE
      if self._discovery is not None:
        self._give_up(replica, error)
      else:
        logging.error('engine %s: given up: %s', replica.name, error)
        if all(r.state == ReplicaState.GONE for r in self._roster.replicas):
          self._roster.fail(RunError(f'no engine left; the last failure: {error}'))
    self._roster.changed.set()
    self._roster.dispatcher.dispatch()

  def _give_up(self, replica: Replica, error: BaseException) -> None:
    """Removes a discovered server from the fleet. It may rejoin later unless it is unsuitable for
    the run.
    """
    self._roster.remove(replica)
    self._roster.note_trouble(replica, error)
    unsuited = isinstance(error, UserError) and not isinstance(error, RunError)
    if self._discovery.rest(replica, for_good=unsuited):
      self._discovery.tell(replica.name, 'refused' if unsuited else 'given up')
      logging.warning(
        'engine %s: %s: %s', replica.name, 'is ignored' if unsuited else 'given up', error
      )

  async def _bring_in(self, replica: Replica) -> None:
    await self._admission.await_attached(replica)
    await self._admission.start(replica)
    await self._catch_up(replica, works=True)
    self._roster.counts['joined'] += 1
    self._discovery.tell(replica.name, 'joined')

  async def _bring_back(self, replica: Replica) -> None:
    await self._catch_up(replica, works=await self._is_as_before(replica))

  async def _wake(self, replica: Replica) -> None:
    """Wakes or starts a server, and loads the current version into it."""
    works = False
    if replica.server is None or replica.server.is_running():
      try:
        await replica.wake_up(deadline_s=self._config.start_deadline_s)
        works = True
      except RemoteError as error:
        logging.warning('engine %s: does not wake up: %s', replica.name, error)
    await self._catch_up(replica, works=works, is_failure=False)

  async def _catch_up(self, replica: Replica, *, works: bool, is_failure: bool = True) -> None:
    """Loads the current version into a server and brings it into service. If `works` is False, the
    server is restarted first. If `is_failure`, this restart is counted in `counts`.

    A server may refuse the current version because its files were damaged after other servers had
    loaded it. It then waits for the next version, which has files of its own. Repeated refusals of
    one version count as one failed attempt.
    """
    updates = self._updates
    failures, refused, again_s = 0, set(), _REFUSED_S
    while True:
      current = updates.current
      try:
        if not works:
          await self._start_again(replica, is_failure=is_failure)
          works = is_failure = True
        if current is not None and replica.version != current.publication.version:
          await updates.transact(replica, current)
        if current is updates.current:
          break
      except (RemoteError, Unproven) as error:
        # A server that refuses an update still works. It refuses, for example, if a newer version
        # has replaced the file.
        works = isinstance(error, Refused)
        failures += not works
        is_refused = works and current is updates.current
        if is_refused:
          refused.add(current and current.publication.version)
        attempts = failures + len(refused)
        if attempts > self._config.max_restarts:
          raise
        self._roster.note_trouble(replica, error)
        logging.warning(
          'engine %s: attempt %d to bring it back failed: %s', replica.name, attempts, error
        )
        if is_refused:
          await updates.until_newer(current, again_s)
          again_s = min(2 * again_s, _MAX_REFUSED_S)
    logging.info('engine %s: in service, with version %s', replica.name, replica.version)
    self._roster.serve(replica)

  async def _is_as_before(self, replica: Replica) -> bool:
    """Returns whether a server has recovered from a failure by itself and still serves its last
    proven version.
    """
    if replica.failures > _PATIENCE or replica.version is None:
      return False
    if replica.server is not None and not replica.server.is_running():
      return False
    with contextlib.suppress(RemoteError):
      if await replica.client.served_label() == replica.label:
        return await replica.is_alive(deadline_s=self._config.latency_s)
    return False

  async def _start_again(self, replica: Replica, *, is_failure: bool) -> None:
    replica.forget()
    if replica.server is not None:
      self._roster.counts['restarts'] += is_failure
      await replica.server.stop()
    else:
      await self._admission.await_attached(replica)
    try:
      await self._admission.start(replica)
    except UserError as error:
      # A UserError is appropriate only at the start of a run. This server has worked before and may
      # recover.
      raise Lost(str(error)) from None
