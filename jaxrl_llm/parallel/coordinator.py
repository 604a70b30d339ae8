"""Agreement among the trainer's processes. Process 0 decides, and all processes get the same value
at the same point of the program.

While process 0 is busy, it exchanges heartbeats with the waiting processes. A dead process is
therefore noticed at the next heartbeat. Heartbeats also tell process 0 of a signal that only
another process received.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm.core.types import Json
from jaxrl_llm.core.waits import bounded
from jaxrl_llm.parallel.coordination import CoordinationConfig
from jaxrl_llm.parallel.device import DeviceThread, PeerFailed

_BLOCK = 1 << 16
"""Size of a block of a broadcast, in bytes. It is fixed, so that nothing is recompiled after the
first broadcast.
"""
_BEAT, _VALUE, _ABORT = 0, 1, 2


class Coordinator:
  """Broadcasts decisions in a `jax.distributed` job. With one process, decisions are returned
  directly.
  """

  def __init__(
    self,
    device: DeviceThread,
    *,
    on_signal: Callable[[int], None],
    beat_s: float = CoordinationConfig.beat_s,
    silence_s: float = CoordinationConfig.silence_s,
  ):
    """
    Args:
      device: thread that runs all collectives.
      on_signal: called in process 0 with the number of a signal that any process has reported. It
        is called again at every later exchange.
      beat_s: seconds between heartbeats while process 0 is busy.
      silence_s: maximum wait in seconds for another process at an exchange. It must exceed the
        longest work between two exchanges, such as the engine's start or compilation.
    """
    self._device, self._on_signal = device, on_signal
    self._beat_s, self._silence_s = beat_s, silence_s
    self._signal = 0

  @property
  def leads(self) -> bool:
    return jax.process_index() == 0

  def report_signal(self, signum: int) -> None:
    """Reports to process 0 a signal that this process received. The report is repeated at every
    exchange from the next one on.
    """
    self._signal = signum

  async def broadcast(self, decision: Awaitable[Json] | None) -> Any:
    """Returns in every process the value of process 0's `decision`.

    Args:
      decision: awaitable of a JSON value in process 0; None in the other processes.

    Raises:
      PeerFailed: another process is gone. If `decision` raises an exception, process 0 raises this
        exception, and the other processes raise PeerFailed.
      WaitExpired: another process does not reach the exchange within `silence_s`.
    """
    if jax.process_count() == 1:
      # Wait 'decision': bounded: every wait inside `decision` has a deadline.
      return await decision
    # Wait 'decision': bounded by 'exchange' or, in process 0, by `decision`'s deadlines.
    return await (self._lead(decision) if self.leads else self._follow())

  async def gather(self, value: Json) -> list[Any]:
    """Returns in every process the JSON values of all processes, in the order of the process
    numbers.

    Raises:
      PeerFailed: another process is gone.
      WaitExpired: another process does not reach the exchange within `silence_s`.
    """
    payload = json.dumps(value).encode()
    if jax.process_count() == 1:
      return [json.loads(payload)]
    # Wait 'exchange': bounded by `silence_s`.
    return [json.loads(part) for part in await self._exchange(_gather_bytes, payload)]

  async def _lead(self, decision: Awaitable[Json]) -> Json:
    task = asyncio.ensure_future(_encoded(decision))
    try:
      while not (await asyncio.wait({task}, timeout=self._beat_s))[0]:
        await self._headers(_BEAT, 0)
    finally:
      task.cancel()  # This has no effect on a finished task.
      # Wait 'decision': bounded: every wait inside `decision` has a deadline.
      await asyncio.gather(task, return_exceptions=True)
    if task.cancelled() or task.exception() is not None:
      await self._headers(_ABORT, 0)
    payload = task.result()
    await self._headers(_VALUE, len(payload))
    return json.loads(await self._exchange(_broadcast_bytes, payload, len(payload)))

  async def _follow(self) -> Json:
    while True:
      kind, length = await self._headers(_BEAT, 0)
      if kind == _ABORT:
        raise PeerFailed(
          f'process {jax.process_index()}: process 0 failed; its own message says why'
        )
      if kind == _VALUE:
        return json.loads(await self._exchange(_broadcast_bytes, b'', length))

  async def _headers(self, kind: int, length: int) -> tuple[int, int]:
    """Exchanges (kind, length, signal) among all processes and returns the kind and length of
    process 0.
    """
    header = np.array([kind, length, self._signal], np.int32)
    headers = await self._exchange(multihost_utils.process_allgather, header)
    signals = [int(s) for s in headers[:, 2] if s]
    if signals and self.leads:
      self._on_signal(signals[0])
    return int(headers[0, 0]), int(headers[0, 1])

  async def _exchange(self, collective: Callable[..., Any], *args: Any) -> Any:
    return await bounded(
      self._device.run(collective, *args),
      name='exchange',
      owner=f'process {jax.process_index()}',
      waits_for='the other processes to reach the same broadcast'
      if self.leads
      else "process 0's beat or decision",
      deadline_s=self._silence_s,
    )


async def _encoded(decision: Awaitable[Json]) -> bytes:
  # Wait 'decision': bounded: every wait inside `decision` has a deadline.
  value = await decision
  return json.dumps(value).encode()


def _gather_bytes(payload: bytes) -> list[bytes]:
  """Returns the payloads of all processes, which are exchanged one block at a time."""
  # Wait 'exchange': bounded by `silence_s`, which the caller enforces.
  lengths = multihost_utils.process_allgather(np.array([len(payload)], np.int32))[:, 0]
  blocks = -(-int(lengths.max()) // _BLOCK)
  buffer = np.zeros(blocks * _BLOCK, np.uint8)
  buffer[: len(payload)] = np.frombuffer(payload, np.uint8)
  received = []
  for block in buffer.reshape(blocks, _BLOCK):
    # Wait 'exchange': bounded by `silence_s`, which the caller enforces.
    received.append(multihost_utils.process_allgather(block))
  whole = np.concatenate(received, axis=1).astype(np.uint8)
  return [row.tobytes()[:length] for row, length in zip(whole, lengths, strict=True)]


def _broadcast_bytes(payload: bytes, length: int) -> bytes:
  """Broadcasts process 0's `payload` of `length` bytes to every process, one block at a time."""
  blocks = -(-length // _BLOCK)
  buffer = np.zeros(blocks * _BLOCK, np.uint8)
  buffer[: len(payload)] = np.frombuffer(payload, np.uint8)
  received = []
  for block in buffer.reshape(blocks, _BLOCK):
    # Wait 'exchange': bounded by `silence_s`, which the caller enforces.
    received.append(multihost_utils.broadcast_one_to_all(block))
  return np.concatenate(received).astype(np.uint8).tobytes()[:length]
