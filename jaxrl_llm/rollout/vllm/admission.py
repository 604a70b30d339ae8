"""Start, check and end of one server of a fleet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.core.net.client import RemoteError
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.vllm.replica import Replica, ReplicaState, Requirements

_ATTACHED_LOOK_S = 2.0
"""Seconds between health checks of an attached server that does not respond."""


class Admission:
  """Starts servers, checks that they suit the run, and ends them."""

  def __init__(
    self,
    config: VllmConfig,
    requirements: Requirements,
    check_tokenizer: Callable[[Replica], Awaitable[None]] | None,
  ):
    """
    Args:
      check_tokenizer: raises a UserError if a server tokenizes text differently from the policy.
    """
    self._config, self._requirements = config, requirements
    self._check_tokenizer = check_tokenizer

  async def start(self, replica: Replica) -> None:
    """Starts the server if the run owns it, and checks that it serves the policy's model. Loads no
    version yet.

    Raises:
      UserError: the server does not suit the run.
      RunError: the server of the run does not start.
      Lost: the server cannot be reached, or fails.
    """
    if replica.server is not None:
      replica.server.start()
      await replica.server.ready(deadline_s=self._config.start_deadline_s)
    await replica.admit(self._requirements, deadline_s=self._config.start_deadline_s)
    if self._check_tokenizer is not None:
      await self._check_tokenizer(replica)

  async def await_attached(self, replica: Replica) -> None:
    """Waits until an attached server answers. Raises RunError after `start_deadline_s`."""
    try:
      async with asyncio.timeout(self._config.start_deadline_s):
        while not await replica.client.is_healthy():
          await asyncio.sleep(_ATTACHED_LOOK_S)
    except TimeoutError:
      raise RunError(
        f'engine {replica.name}: {replica.client.address} has not answered for '
        f'rollout.vllm.start_deadline_s={self._config.start_deadline_s:g} s'
      ) from None

  async def end(self, replica: Replica) -> None:
    """Closes the connections to a server, and stops the server if the run owns it."""
    if replica.state == ReplicaState.RELEASED and replica.server is None:
      with contextlib.suppress(RemoteError):  # Other users may need the server after this run.
        await replica.wake_up(deadline_s=self._config.latency_s)
    replica.state = ReplicaState.GONE
    # Closes the transfer, the client and the server, in this order, even if one of them fails.
    async with contextlib.AsyncExitStack() as ends:
      if replica.server is not None:
        ends.push_async_callback(replica.server.close)
      ends.push_async_callback(replica.client.close)
      ends.push_async_callback(replica.transfer.close)
