"""Sender process that transfers published weights to one vLLM server over NCCL or CUDA IPC. It uses
vLLM's own weight-transfer engines (`vllm.distributed.weight_transfer`).

Runs as a script in vLLM's environment, because the trainer's environment has no torch (see
`rollout.vllm.transfer`). It imports nothing from jaxrl_llm except `rollout.vllm.worker`, of which
a copy named `jaxrl_llm_worker` lies beside the script.

Protocol: each message is a line of JSON. The trainer writes orders to stdin. For each order, this
process writes one answer to stdout. Before the answer, it may ask the trainer to make calls to the
server.
  {"op": "init", "backend": "nccl" | "ipc", "host": …, "device": "cuda",
    "workers": [{NAME: {shape, dtype, slice}}, …]}
  {"op": "send", "directory": …, "files": {FILE: {NAME: DIGEST}}}
  call: {"call": one of vLLM's four control calls, "body": …}; the trainer replies
    {"ok": true} once the call has succeeded
  answer: {"ok": true}, {"refused": reason} or {"error": reason}
The process exits immediately when stdin closes, because the trainer has then stopped it or died.

Invariant: before any weights are sent or any call is requested for a `send` order, the whole
publication is read, its digests are verified, and its tensors are compared with the tensors of all
workers. After that, the answer is never `refused`.

Not tested on hardware: the sender was written against the API of vLLM 0.32 and tested with a
stand-in for vLLM's weight-transfer engines. The open questions are whether NCCL forms the group and
how long a transfer takes, whether the server's GPU has room for the buffers when
`gpu_memory_utilization` is large, and whether CUDA IPC works between containers.

With both backends, a vLLM worker uses its layerwise reload. `start_weight_update` moves the
parameters to the meta device. `load_weights` fills a layer once its tensors are complete and copies
the layer into the previous storage of its parameters. `finish_weight_update` restores the rest.
After a complete update, the live parameters are therefore where `jaxrl_llm_worker.hf_views` looks
for them. This was verified piece by piece with these functions on a CPU build: the storage is
unchanged, the digests are those of the publication, and the logprobs are those of a model with the
published weights. After an interrupted update, the model may be unusable, and the server must be
restarted.

Each server has one sender. In their communication group, the sender has rank 0, and the server's
workers have the ranks from 1 on.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO


def take_stdio() -> tuple[BinaryIO, BinaryIO]:
  """Reserves stdin and stdout for the protocol and returns them. Libraries that print to stdout
  then write to stderr, and their stdin is empty.
  """
  orders, answers = os.fdopen(os.dup(0), 'rb'), os.fdopen(os.dup(1), 'wb')
  os.dup2(2, 1)
  with open(os.devnull, 'rb') as nothing:
    os.dup2(nothing.fileno(), 0)
  return orders, answers


if __name__ == '__main__':
  # This must precede the imports below, because vLLM logs to stdout while it is imported.
  STDIO = take_stdio()

import torch  # noqa: E402
from jaxrl_llm_worker import View, read_checked  # noqa: E402
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource  # noqa: E402
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory  # noqa: E402
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo  # noqa: E402
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo  # noqa: E402

_BUFFER = 256 << 20
"""Size in bytes of the send buffer. vLLM's default of 1 GiB is too large for a GPU that a server
has nearly filled.
"""
Tensors = Mapping[str, Mapping[str, Any]]
"""A worker's tensors: shape, dtype and slice, keyed by Hugging Face name, as `jaxrl_weights`
returns them.
"""


class Trainer:
  """Connection to the trainer through stdin and stdout."""

  def __init__(self, orders: BinaryIO, answers: BinaryIO):
    self._answers = answers
    self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=self._listen, args=(orders,), daemon=True).start()

  def _listen(self, orders: BinaryIO) -> None:
    for line in orders:
      self._lines.put(line)
    # The process exits at once, because a thread that is blocked in NCCL cannot be interrupted.
    os._exit(0)

  def read(self) -> dict[str, Any]:
    # Wait 'order': unbounded: it lasts until the owner of this process sends a line or ends.
    return json.loads(self._lines.get())

  def write(self, message: Mapping[str, Any]) -> None:
    self._answers.write(json.dumps(message).encode() + b'\n')
    self._answers.flush()

  def call(self, name: str, body: Mapping[str, Any]) -> None:
    """Asks the trainer to call the server, and waits for the reply. If the call fails, the trainer
    kills this process. No lock is needed, because vLLM's weight-transfer engines make one call at a
    time.
    """
    self.write({'call': name, 'body': body})
    self.read()


class ForwardingClient:
  """Replacement for vLLM's `VLLMWeightSyncClient`. It forwards calls to the trainer, which has the
  server's address, key and TLS settings.
  """

  def __init__(self, trainer: Trainer):
    self._trainer = trainer

  def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
    self._trainer.call('init_weight_transfer_engine', {'init_info': init_info})

  def start_weight_update(self) -> None:
    self._trainer.call('start_weight_update', {})

  def update_weights(self, update_info: dict[str, Any]) -> None:
    self._trainer.call('update_weights', {'update_info': as_json(update_info)})

  def finish_weight_update(self, weight_version: str | None = None) -> None:
    # The version is not passed on: the trainer sets it after comparing the digests.
    self._trainer.call('finish_weight_update', {})


def as_json(update_info: dict[str, Any]) -> dict[str, Any]:
  """Encodes CUDA IPC handles, which are Python objects, as the base64 pickle that vLLM expects over
  HTTP.
  """
  if 'ipc_handles' not in update_info:
    return update_info
  other_fields = {name: value for name, value in update_info.items() if name != 'ipc_handles'}
  return {
    **other_fields,
    'ipc_handles_pickled': base64.b64encode(pickle.dumps(update_info['ipc_handles'])).decode(),
  }


class PublicationSource(WeightSource):
  """Tensors of the publication being sent, moved to the device one at a time."""

  def __init__(self, device: torch.device):
    self.tensors: dict[str, torch.Tensor] = {}
    self._device = device

  def metadata(self) -> list[ParamMeta]:
    return [
      ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()
    ]

  def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in self.tensors.items():
      yield name, tensor.to(self._device)


def by_layer(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
  """Sorts tensors by layer. A worker buffers the tensors of incomplete layers, so this order saves
  memory.
  """

  def layer(name: str) -> int:
    return next((int(part) for part in name.split('.') if part.isdecimal()), -1)

  return {name: tensors[name] for name in sorted(tensors, key=layer)}


def check_fit(tensors: Mapping[str, torch.Tensor], workers: Sequence[Tensors]) -> None:
  """Raises ValueError unless the tensors match every worker's tensors in name, shape and dtype.

  Without this check, vLLM would load the tensors that fit, and serve a mixture of old and new
  weights.
  """
  for worker in workers:
    missing, more = sorted(set(worker) - set(tensors)), sorted(set(tensors) - set(worker))
    if missing or more:
      raise ValueError(
        f'publication and model differ: tensors missing {missing[:4]}, unknown {more[:4]}'
      )
    for name, held in worker.items():
      part = torch.empty(held['shape'], dtype=getattr(torch, held['dtype']), device='meta')
      if not View(part, *(held['slice'] or ())).fits(tensors[name]):
        raise ValueError(
          f'{name}: published as {tuple(tensors[name].shape)} {tensors[name].dtype}, the model has '
          f'{tuple(part.shape)} {part.dtype}'
        )


def init_info(
  backend: str, host: str, workers: Sequence[Tensors]
) -> NCCLTrainerInitInfo | IPCTrainerInitInfo:
  """Returns the arguments for the trainer's side of vLLM's transfer engine. The engine derives the
  arguments for the server's side and sends them itself.
  """
  if backend == 'nccl':
    return NCCLTrainerInitInfo(
      rank=0,
      master_address=host,
      master_port=_free_port(host),
      world_size=1 + len(workers),
      packed=True,
      packed_buffer_size_bytes=_BUFFER,
    )
  # vLLM rejects tensors larger than the buffer.
  largest = max(
    torch.Size(t['shape']).numel() * getattr(torch, t['dtype']).itemsize
    for t in workers[0].values()
  )
  return IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=max(_BUFFER, largest))


def _free_port(host: str) -> int:
  """Returns a free port, at which rank 0 waits for the workers to join the communication group. Any
  process that can reach the port could join the communication.
  """
  with socket.socket() as probe:
    probe.bind((host, 0))
    return probe.getsockname()[1]


class Sender:
  """Sends weights to one server on the trainer's orders."""

  def __init__(self, trainer: Trainer):
    self._trainer = trainer
    self._engine: Any = None
    self._workers: list[Tensors] = []

  def init(self, order: Mapping[str, Any]) -> dict[str, Any]:
    self._workers, self._source = order['workers'], PublicationSource(torch.device(order['device']))
    info = init_info(order['backend'], order['host'], self._workers)
    client = ForwardingClient(self._trainer)
    self._engine = WeightTransferTrainerFactory.trainer_init(
      info, client=client, source=self._source
    )
    return {'ok': True}

  def send(self, order: Mapping[str, Any]) -> dict[str, Any]:
    try:
      tensors = read_checked(order['files'], order['directory'])
      check_fit(tensors, self._workers)
    except ValueError as error:
      return {'refused': str(error)}
    self._source.tensors = by_layer(tensors)
    try:
      self._engine.send_weights()
    finally:
      self._source.tensors = {}
    return {'ok': True}

  def serve(self) -> None:
    """Executes orders until stdin closes."""
    operations = {'init': self.init, 'send': self.send}
    while True:
      order = self._trainer.read()
      try:
        answer = operations[order['op']](order)
      except Exception as error:  # The trainer decides how to handle errors of vLLM's engines.
        traceback.print_exc(file=sys.stderr)
        answer = {'error': f'{type(error).__name__}: {" ".join(str(error).split())}'}
      self._trainer.write(answer)


if __name__ == '__main__':
  Sender(Trainer(*STDIO)).serve()
