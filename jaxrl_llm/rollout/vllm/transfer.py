"""Transfer of published weights to a server. Either the server itself reads the published files, or
a sender process reads them and sends the weights to it.

Invariant: `Refused` means that a worker or the sender rejected the publication without writing any
weights. If the server has several workers, the other workers may have written weights. Any other
failure of `send` raises `Lost`, because the server's weights are then unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import shutil
import socket
from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from absl import logging

from jaxrl_llm.core.disk import scratch
from jaxrl_llm.core.net.client import Lost, Refused
from jaxrl_llm.core.process import job
from jaxrl_llm.core.process.child import Child
from jaxrl_llm.core.waits import WaitExpired
from jaxrl_llm.rollout.vllm.api import EngineServer
from jaxrl_llm.rollout.vllm.client import VllmClient
from jaxrl_llm.rollout.vllm.config import VllmConfig
from jaxrl_llm.rollout.vllm.publication import Publication
from jaxrl_llm.rollout.vllm.server import WORKER, WORKER_MODULE, check_transfer
from jaxrl_llm.weights.checksums import Slice

SENDER = pathlib.Path(__file__).with_name('sender.py')
_REFUSALS = (
  *('tensors missing', 'cannot be read', 'as read, announced was', 'published as'),
  'delta refused',
)
"""Texts that identify errors raised by a worker before it writes any weights. They contain no
paths, because vLLM replaces paths in messages with <path>.
"""
_LINE = 1 << 28
"""Maximum size in bytes of one line from a sender. The longest lines name all tensors."""
_CONNECT_S = 300.0
"""Maximum seconds for a sender to import vLLM and to form a communication group with the server's
workers.
"""
_LOOK_S = 0.01
_LAST_LINES = 5
"""Number of log lines in the error message when a sender ends unexpectedly."""


_Server = TypeVar('_Server', bound=EngineServer, contravariant=True)


@runtime_checkable
class Transfer(Protocol[_Server]):
  """Transfers publications to one server."""

  backend: str
  """Name of the transfer, used in messages and, for vLLM servers, as the backend in
  `--weight-transfer-config`.
  """

  async def connect(self, client: _Server) -> None:
    """Sets up the transfer. Called once after each start of the server, before the first `send`.

    Raises:
      Refused, Lost: the setup failed; the message has the reason.
    """
    ...

  async def send(self, client: _Server, publication: Publication, *, deadline_s: float) -> None:
    """Loads a publication into the paused server.

    Raises:
      Refused: the files differ from the announced digests, or do not fit the model. The worker that
        reports this has written nothing, but other workers of the server may have written weights.
      Lost: the server or the transfer failed. The server's weights are unknown.
    """
    ...

  async def close(self) -> None: ...


@runtime_checkable
class PreparingTransfer(Transfer[_Server], Protocol[_Server]):
  """Transfer whose longest part does not need the server to pause."""

  async def prepare(self, client: _Server, publication: Publication, *, deadline_s: float) -> None:
    """Prepares the server for a publication while the server still samples, for example by fetching
    the files to its host. Called before `send`, and possibly several times.

    Raises:
      Refused, Lost: the publication cannot be transferred; the message has the reason.
    """
    ...


def slice_of(tensor: Mapping[str, Any]) -> Slice | None:
  """Returns a worker's slice of a whole tensor, or None if the worker has the whole tensor.
  `tensor` is the worker's description of its part.
  """
  if tensor['slice'] is None:
    return None
  axis, start = tensor['slice']
  return Slice(axis, start, tensor['shape'][axis])


class FileTransfer:
  """File transfer: the server's workers read the published files themselves
  (`rollout.vllm.worker`). They verify whole weights before the server pauses.
  """

  backend = 'files'

  def __init__(self) -> None:
    self._can_verify = False
    """Whether the workers can verify files before an update. Workers of earlier releases cannot."""
    self._verified: Publication | None = None
    """Publication that the workers have verified but not loaded yet; None if there is none."""
    self._held: set[tuple[str, Slice]] = set()
    """Tensor names and slices of the parts that the server's workers hold."""

  async def connect(self, client: VllmClient) -> None:
    self._verified = None
    await client.init_transfer({})
    workers = await client.weights()
    self._can_verify = all(worker.get('verifies') for worker in workers)
    self._held = {
      (name, cut)
      for worker in workers
      for name, tensor in worker['tensors'].items()
      if (cut := slice_of(tensor)) is not None
    }

  async def prepare(
    self, client: VllmClient, publication: Publication, *, deadline_s: float
  ) -> None:
    # Adapters and deltas are small: they are verified when they are loaded.
    is_whole = bool(publication.files) and publication.adapter is None
    if is_whole and self._can_verify and publication != self._verified:
      await client.verify(self._info(publication), deadline_s=deadline_s)
      self._verified = publication

  def _info(self, publication: Publication) -> dict[str, Any]:
    """Returns the description of a publication that a worker gets (`worker.Update`)."""
    directory = str(publication.directory.absolute())
    info: dict[str, Any] = {'directory': directory, 'files': publication.files}
    if publication.files_label is not None:
      info['label'] = publication.files_label
    if publication.deltas:
      info['deltas'] = [
        {
          'before': delta.before,
          'label': delta.label,
          'directory': str(delta.directory.absolute()),
          'files': delta.files,
        }
        for delta in publication.deltas
      ]
    if publication.adapter is not None:
      info['adapter'] = publication.adapter
    slices: dict[str, list[list[Any]]] = {}
    for name, cut in sorted(self._held):
      if cut in (digests := publication.slices.get(name, {})):
        slices.setdefault(name, []).append([*cut, digests[cut]])
    if slices:  # With slices, each worker reads only its own part.
      info['slices'] = slices
    return info

  async def send(self, client: VllmClient, publication: Publication, *, deadline_s: float) -> None:
    self._verified = None  # A worker uses verified tensors once.
    await client.start_update()
    try:
      await client.update_weights(self._info(publication), deadline_s=deadline_s)
    except Lost as error:
      if any(words in str(error) for words in _REFUSALS):
        raise Refused(str(error)) from None
      raise
    try:
      await client.finish_update()
    except Refused as error:  # Weights were written before the failure.
      raise Lost(str(error)) from None
    if publication.adapter is not None:
      await client.load_adapter(publication, deadline_s=deadline_s)

  async def close(self) -> None: ...


class SenderTransfer:
  """Transfer over NCCL or CUDA IPC by a sender process (`rollout.vllm.sender`), which runs in
  vLLM's environment and reads the published files.

  The sender makes no HTTP calls. It asks the trainer's process to make vLLM's control calls with
  the server's client. If a call fails or the deadline passes, the sender is killed, because over
  NCCL it may be waiting for a server that never joins. The server must then be restarted. The run
  restarts an owned server; the operator of an attached server, which the run did not start, must
  restart it.

  This transfer has not been tested on hardware; `rollout.vllm.sender` lists the open questions.
  Data parallelism within a server is not supported, because the server reports only the workers of
  its first data-parallel group, and the communication group would wait for the workers of the other
  groups.
  """

  def __init__(
    self,
    backend: Literal['nccl', 'ipc'],
    python: pathlib.Path,
    *,
    log: pathlib.Path,
    host: str = '127.0.0.1',
    env: Mapping[str, str] | None = None,
    device: str = 'cuda',
    connect_deadline_s: float = _CONNECT_S,
  ):
    """
    Args:
      python: Python of vLLM's environment.
      log: file to which the sender's output is appended.
      host: address of this host at which the server's workers reach the sender (nccl).
      env: environment variables of the sender. CUDA_VISIBLE_DEVICES selects the GPU from which it
        sends. With nccl, this is a GPU that the server does not use; with ipc, it is the server's
        GPU.
      device: torch's name of the device from which the sender sends.
    """
    self.backend: str = backend
    self._python, self._log, self._host, self._device = python, log, host, device
    self._env = dict(env or {})
    self._connect_deadline_s = connect_deadline_s
    self._opened = contextlib.ExitStack()
    self._child: Child | None = None
    self._answers: asyncio.StreamReader
    self._orders: asyncio.StreamWriter

  @property
  def pid(self) -> int | None:
    """Process id of the guard process of the sender; None if there is no sender."""
    return self._child.pid if self._child else None

  async def connect(self, client: VllmClient) -> None:
    await self.close()
    workers = [worker['tensors'] for worker in await client.weights()]
    order = {
      'backend': self.backend,
      'host': self._host,
      'device': self._device,
      'workers': workers,
    }
    try:
      await self._start(client)
      await self._order(client, {'op': 'init', **order}, deadline_s=self._connect_deadline_s)
    except BaseException:
      await self._kill()
      raise

  async def send(self, client: VllmClient, publication: Publication, *, deadline_s: float) -> None:
    order = {'directory': str(publication.directory.absolute()), 'files': publication.files}
    try:
      await self._order(client, {'op': 'send', **order}, deadline_s=deadline_s)
    except Refused:
      raise
    except BaseException:
      await self._kill()
      raise

  async def close(self) -> None:
    """Kills the sender, which has no state to save. Raises WaitExpired if its guard process does
    not end.
    """
    child, self._child = self._child, None
    try:
      if child is not None:
        self._orders.close()
        await child.stop(owner='the fleet')
    finally:
      self._opened.close()

  async def _kill(self) -> None:
    """Closes the transfer after an error. A second error, during the closing, is only logged, so
    that callers see the first error.
    """
    try:
      await self.close()
    except WaitExpired as error:
      logging.warning('%s', error)

  async def _start(self, client: VllmClient) -> None:
    folder = self._opened.enter_context(scratch('jaxrl-sender-'))
    script = folder / 'jaxrl_llm_sender.py'
    shutil.copyfile(SENDER, script)
    shutil.copyfile(WORKER, folder / f'{WORKER_MODULE}.py')
    inherited = {
      name: value
      for name, value in job.outside(os.environ).items()
      if not name.startswith(('XLA_', 'JAX_'))
    }
    variables = {'PYTHONPATH': str(folder), 'VLLM_NO_USAGE_STATS': '1', 'HF_HUB_OFFLINE': '1'}
    child = Child(f'the sender of {client.name}', log=self._log, remove=(folder,), grace_s=0.0)
    try:
      ours, theirs = socket.socketpair()
      with theirs:
        self._answers, self._orders = await asyncio.open_connection(sock=ours, limit=_LINE)
        self._child = child
        child.start(
          [str(self._python), str(script)], {**inherited, **variables, **self._env}, channel=theirs
        )
    except OSError as error:
      raise Lost(f'{client.name}: its sender cannot be started ({error})') from None

  async def _order(
    self, client: VllmClient, order: Mapping[str, Any], *, deadline_s: float
  ) -> None:
    """Sends one order to the sender and makes the calls that the sender requests. Raises Refused if
    the sender rejects the publication before it requests a call, and Lost after any other failure.
    """
    child = self._child
    if child is None:
      raise Lost(f'{client.name}: its sender is gone')
    called = False
    try:
      async with asyncio.timeout(deadline_s):
        answer = await self._ask(client, child, order)
        while 'call' in answer:
          called = True
          await _perform(client, answer, deadline_s)
          answer = await self._ask(client, child, {'ok': True})
    except TimeoutError:
      raise Lost(
        f'{client.name}: its sender did not complete {order["op"]!r} within {deadline_s:g} s'
      ) from None
    if 'refused' in answer and not called:
      raise Refused(f'{client.name}: {answer["refused"]}')
    if answer != {'ok': True}:
      raise Lost(f'{client.name}: its sender: {answer.get("error", answer)}')

  async def _ask(
    self, client: VllmClient, child: Child, message: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Sends one message and returns the sender's answer. Raises Lost if the answer is unreadable
    or the sender ends first, for example by a concurrent `close`.
    """
    try:
      self._orders.write(json.dumps(message).encode() + b'\n')
      await self._orders.drain()
      # Wait 'sender': bounded by `transfer_deadline_s`.
      if line := await self._answers.readline():
        return dict(json.loads(line))
    except ConnectionError:
      pass  # The sender has closed its stdin.
    except ValueError as error:
      raise Lost(f'{client.name}: its sender: {error}') from None
    # Wait 'sender': bounded by `transfer_deadline_s`.
    while self._child is child and child.is_running():
      await asyncio.sleep(_LOOK_S)
    if self._child is not child:
      raise Lost(f'{client.name}: its sender was closed')
    last_lines = ' | '.join(child.lines()[-_LAST_LINES:])[-1000:]
    raise Lost(
      f'{client.name}: its sender ended with exit code {child.exit_code}; the last lines of '
      f'{self._log}: {last_lines}'
    )


async def _perform(client: VllmClient, message: Mapping[str, Any], deadline_s: float) -> None:
  """Makes a control call that the sender has requested. Raises Lost if the call fails or the server
  refuses it.
  """
  name, body = message['call'], message['body']
  try:
    if name == 'init_weight_transfer_engine':
      await client.init_transfer(body['init_info'], deadline_s=deadline_s)
    elif name == 'start_weight_update':
      await client.start_update(deadline_s=deadline_s)
    elif name == 'update_weights':
      await client.update_weights(body['update_info'], deadline_s=deadline_s)
    elif name == 'finish_weight_update':
      await client.finish_update(deadline_s=deadline_s)
    else:
      raise Lost(
        f'{client.name}: its sender asks for the call {name!r}, which is not one of the four'
      )
  except Refused as error:
    raise Lost(str(error)) from None


def build_transfer(config: VllmConfig, index: int, *, log: pathlib.Path) -> Transfer:
  """Builds the configured transfer of one server, which must be 'files', or have a sender.

  Args:
    index: index of the server.
    log: log file of the sender process, which the transfer 'files' does not have.

  Raises:
    UserError: the environment's vLLM does not support the transfer.
  """
  if config.transfer == 'files':
    return FileTransfer()
  python = check_transfer(config)
  device = config.sender_device
  if config.transfer == 'ipc':
    device = config.devices[index] if config.devices else None
  env = dict(config.env) if device is None else {**config.env, 'CUDA_VISIBLE_DEVICES': device}
  return SenderTransfer(config.transfer, python, log=log, host=config.sender_host, env=env)
