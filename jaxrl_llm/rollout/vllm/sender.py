"""Sends published weights into one vLLM server by vLLM's own trainer engines, over NCCL or as CUDA memory (IPC).

Runs by its file path in vLLM's environment, as a process beside a trainer that has no torch (see `rollout.transfer`);
imports nothing of jaxrl_llm but `rollout.vllm.worker`, which lies beside it as `jaxrl_llm_worker`.

Speaks JSON lines: orders on stdin, and on stdout one answer to each, with calls for the trainer to make before it.
  {"op": "init", "backend": "nccl" | "ipc", "host": …, "device": "cuda", "workers": [{NAME: {shape, dtype, slice}}, …]}
  {"op": "send", "directory": …, "files": {FILE: {NAME: DIGEST}}}
  call: {"call": one of vLLM's four control calls, "body": …}; the trainer says {"ok": true} when it was made
  answer: {"ok": true}, {"refused": reason} or {"error": reason}
The end of stdin ends the process at once, whatever it does: that is the trainer's order to stop, or its death.

Invariant: nothing is sent, and no call is asked for, before all of a publication was read, found to be what was
announced, and found to fit all workers of the server; only then can the answer not be `refused` any more.

Not tried on hardware: written to vLLM 0.32's API, and tested against a stand-in for its engines. What that leaves open:
whether NCCL forms the group and what a transfer costs; whether the server's GPU has room for the buffers beside a
large `gpu_memory_utilization`; CUDA IPC between containers. A worker of vLLM takes both backends by its layerwise
reload: `start_weight_update` puts the parameters on the meta device, `load_weights` fills a layer once all of it has
come, and copies it into the storage that the parameter had before; `finish_weight_update` puts what is left back. So
after a whole update the live parameters are where `jaxrl_llm_worker.hf_views` looks (seen with these functions on a CPU
build, in several pieces: same storage, digests and logprobs of what was published), and after a broken one the model
may be unusable: the server must then be started again. One server has one sender, which is rank 0 of their group, with
the server's workers from rank 1 on.
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
  """stdin and stdout for the protocol alone: what libraries print goes to stderr, and they have nothing to read."""
  orders, answers = os.fdopen(os.dup(0), 'rb'), os.fdopen(os.dup(1), 'wb')
  os.dup2(2, 1)
  with open(os.devnull, 'rb') as nothing:
    os.dup2(nothing.fileno(), 0)
  return orders, answers


if __name__ == '__main__':
  # Before the imports below: vLLM logs to stdout while it is imported.
  STDIO = take_stdio()

import torch  # noqa: E402
from jaxrl_llm_worker import View, read_checked  # noqa: E402
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource  # noqa: E402
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory  # noqa: E402
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo  # noqa: E402
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo  # noqa: E402

_BUFFER = 256 << 20
"""Bytes that travel at a time. vLLM's default, 1 GiB, is much beside a server that was given most of its GPU."""
Tensors = Mapping[str, Mapping[str, Any]]
"""What a worker holds, as its `jaxrl_weights` tells: shape, dtype and slice by Hugging Face name."""


class Trainer:
  """The other end of the pipes."""

  def __init__(self, orders: BinaryIO, answers: BinaryIO):
    self._answers = answers
    self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=self._listen, args=(orders,), daemon=True).start()

  def _listen(self, orders: BinaryIO) -> None:
    for line in orders:
      self._lines.put(line)
    # A thread that waits in NCCL does not come back by itself.
    os._exit(0)

  def read(self) -> dict[str, Any]:
    return json.loads(self._lines.get())  # wait order: none, the end of stdin ends this process

  def write(self, message: Mapping[str, Any]) -> None:
    self._answers.write(json.dumps(message).encode() + b'\n')
    self._answers.flush()

  def call(self, name: str, body: Mapping[str, Any]) -> None:
    """Has the server called; vLLM's engines never have two calls under way. On a failure the trainer ends us."""
    self.write({'call': name, 'body': body})
    self.read()


class Client:
  """vLLM's `VLLMWeightSyncClient`: the calls are the trainer's to make, who has the address, the key and the TLS."""

  def __init__(self, trainer: Trainer):
    self._trainer = trainer

  def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
    self._trainer.call('init_weight_transfer_engine', {'init_info': init_info})

  def start_weight_update(self) -> None:
    self._trainer.call('start_weight_update', {})

  def update_weights(self, update_info: dict[str, Any]) -> None:
    self._trainer.call('update_weights', {'update_info': as_json(update_info)})

  def finish_weight_update(self, weight_version: str | None = None) -> None:
    # The trainer names the version itself, once it has compared digests.
    self._trainer.call('finish_weight_update', {})


def as_json(update_info: dict[str, Any]) -> dict[str, Any]:
  """CUDA IPC handles are Python objects, which vLLM takes over HTTP as a pickle in base64."""
  if 'ipc_handles' not in update_info:
    return update_info
  rest = {name: value for name, value in update_info.items() if name != 'ipc_handles'}
  return {**rest, 'ipc_handles_pickled': base64.b64encode(pickle.dumps(update_info['ipc_handles'])).decode()}


class Source(WeightSource):
  """The tensors of the publication that is being sent; they come onto the device one at a time."""

  def __init__(self, device: torch.device):
    self.tensors: dict[str, torch.Tensor] = {}
    self._device = device

  def metadata(self) -> list[ParamMeta]:
    return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

  def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in self.tensors.items():
      yield name, tensor.to(self._device)


def by_layer(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
  """In the order of layers: a worker keeps what came of a layer aside until all of it is there."""

  def layer(name: str) -> int:
    return next((int(part) for part in name.split('.') if part.isdecimal()), -1)

  return {name: tensors[name] for name in sorted(tensors, key=layer)}


def check_fit(tensors: Mapping[str, torch.Tensor], workers: Sequence[Tensors]) -> None:
  """ValueError if what is to be sent is not all that each worker holds, in its shapes and dtypes.

  vLLM itself would load what there is, and serve a mixture.
  """
  for worker in workers:
    missing, more = sorted(set(worker) - set(tensors)), sorted(set(tensors) - set(worker))
    if missing or more:
      raise ValueError(f'publication and model differ: tensors missing {missing[:4]}, unknown {more[:4]}')
    for name, held in worker.items():
      part = torch.empty(held['shape'], dtype=getattr(torch, held['dtype']), device='meta')
      if not View(part, *(held['slice'] or ())).fits(tensors[name]):
        raise ValueError(
          f'{name}: published as {tuple(tensors[name].shape)} {tensors[name].dtype}, the model has '
          f'{tuple(part.shape)} {part.dtype}'
        )


def init_info(backend: str, host: str, workers: Sequence[Tensors]) -> NCCLTrainerInitInfo | IPCTrainerInitInfo:
  """What vLLM's engine of this process is made from; the engine itself tells the server its part."""
  if backend == 'nccl':
    return NCCLTrainerInitInfo(
      rank=0,
      master_address=host,
      master_port=_free_port(host),
      world_size=1 + len(workers),
      packed=True,
      packed_buffer_size_bytes=_BUFFER,
    )
  # vLLM refuses a tensor that is larger than the buffer.
  largest = max(torch.Size(t['shape']).numel() * getattr(torch, t['dtype']).itemsize for t in workers[0].values())
  return IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=max(_BUFFER, largest))


def _free_port(host: str) -> int:
  """Of the group's rendezvous, which rank 0 opens. Whoever reaches it meanwhile could speak to the group."""
  with socket.socket() as probe:
    probe.bind((host, 0))
    return probe.getsockname()[1]


class Sender:
  """Carries out the trainer's orders."""

  def __init__(self, trainer: Trainer):
    self._trainer = trainer
    self._engine: Any = None
    self._workers: list[Tensors] = []

  def init(self, order: Mapping[str, Any]) -> dict[str, Any]:
    self._workers, self._source = order['workers'], Source(torch.device(order['device']))
    info = init_info(order['backend'], order['host'], self._workers)
    self._engine = WeightTransferTrainerFactory.trainer_init(info, client=Client(self._trainer), source=self._source)
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
    """Until stdin ends."""
    operations = {'init': self.init, 'send': self.send}
    while True:
      order = self._trainer.read()
      try:
        answer = operations[order['op']](order)
      except Exception as error:  # Whatever vLLM's engines raise is the trainer's to judge.
        traceback.print_exc(file=sys.stderr)
        answer = {'error': f'{type(error).__name__}: {" ".join(str(error).split())}'}
      self._trainer.write(answer)


if __name__ == '__main__':
  Sender(Trainer(*STDIO)).serve()
