"""Extension of vLLM's worker processes. It loads published weights from files and reports on the
loaded weights.

Invariants: no parameter is written before the whole publication has been read and its digests match
the trainer's. Reported digests are computed from the live parameters, not from the files.

vLLM imports this module in its own environment, through the option `--worker-extension-cls
jaxrl_llm_worker.Worker` (see `rollout.vllm.server`). The module imports nothing of jaxrl_llm.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open

BACKEND = 'files'
"""Name of this way of transfer in vLLM's option `--weight-transfer-config`."""
_SPIN_S = 0.001
"""Seconds for which a CPU worker busy-waits for the next command before it sleeps."""


class View(NamedTuple):
  """This worker's part of a Hugging Face tensor: the whole tensor, or a tensor-parallel slice of
  it.
  """

  tensor: torch.Tensor
  """Tensor that shares the memory of the live parameter, so writing to it changes the parameter."""
  dim: int | None = None
  """Axis along which the tensor is a slice; None if it is the whole tensor."""
  start: int = 0
  length: int | None = None
  """Length of the sliced axis in the whole tensor; None if it is unknown."""

  @property
  def whole(self) -> tuple[int | None, ...]:
    """Shape of the whole tensor, with None for an unknown length."""
    return tuple(self.length if axis == self.dim else n for axis, n in enumerate(self.tensor.shape))

  def of(self, whole: torch.Tensor) -> torch.Tensor:
    """Returns this worker's slice of a whole tensor."""
    return (
      whole if self.dim is None else whole.narrow(self.dim, self.start, self.tensor.shape[self.dim])
    )

  def fits(self, whole: torch.Tensor) -> bool:
    if whole.dim() != self.tensor.dim() or whole.dtype != self.tensor.dtype:
      return False
    if self.dim is not None and self.start + self.tensor.shape[self.dim] > whole.shape[self.dim]:
      return False
    return all(
      wanted in (None, length) for wanted, length in zip(self.whole, whole.shape, strict=True)
    )


def hf_views(model: torch.nn.Module) -> dict[str, View]:
  """Returns a view of every parameter, keyed by Hugging Face name. Projections that vLLM fuses are
  split into their parts.

  Modules are recognized by their attributes (`output_sizes`, `shard_indices`, …) and not by their
  class. If the server accepts adapters, vLLM makes each layer the attribute `base_layer` of a
  wrapper; the names omit this attribute. Adapters themselves are left out.
  """
  packed = getattr(model, 'packed_modules_mapping', None) or {}
  views: dict[str, View] = {}
  for name, parameter in model.named_parameters():
    if parameter.numel() == 0:
      raise RuntimeError(
        f'{name} is empty: packed away at load, so it can be neither updated nor digested'
      )
    *path, leaf = name.split('.')
    module = model.get_submodule('.'.join(path))
    path = [part for part in path if part != 'base_layer']
    parts = packed.get(path[-1]) if path else None
    for part, view in _parts(module, parameter.data, parts):
      views['.'.join([*path[:-1], part or path[-1], leaf]) if path else leaf] = view
  return views


def _parts(
  module: Any, data: torch.Tensor, parts: list[str] | None
) -> Iterator[tuple[str | None, View]]:
  """Yields (name of the part, view) for each part of a module's parameter. If the parameter is not
  fused, there is one part, whose name is None.
  """
  rank, size = getattr(module, 'tp_rank', 0), getattr(module, 'tp_size', 1)
  dim = 0 if size > 1 else None
  shard = getattr(module, 'shard_indices', None)
  if shard is not None:
    # Rows beyond the vocabulary are padding. A rank may hold nothing but padding.
    start, rows = (
      shard.org_vocab_start_index,
      shard.org_vocab_end_index - shard.org_vocab_start_index,
    )
    yield None, View(data[:rows], dim, start, module.org_vocab_size)
  elif parts is not None:
    rows = [n // size for n in module.output_sizes]
    if sum(rows) != data.shape[0]:
      raise RuntimeError(
        f'{type(module).__name__}: {data.shape[0]} rows, its parts {parts} have {rows}'
      )
    replicas = getattr(module, 'num_kv_head_replicas', 1)
    offset = 0
    for i, (part, n) in enumerate(zip(parts, rows, strict=True)):
      # With more ranks than KV heads, several ranks have the same weights for keys and values.
      copies = replicas if i else 1
      yield part, View(data[offset : offset + n], dim, rank // copies * n, n * size // copies)
      offset += n
  elif data.dim() == 2 and data.shape[1] < getattr(module, 'input_size', 0):
    yield None, View(data, 1, rank * data.shape[1], module.input_size)
  elif data.shape[0] < getattr(module, 'output_size', 0):
    yield None, View(data, 0, rank * data.shape[0], module.output_size)
  else:
    yield None, View(data)


def digest(tensor: torch.Tensor) -> str:
  """Returns the xxh3-128 digest of a tensor's bytes in C order."""
  data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
  return xxhash.xxh3_128_hexdigest(data.numpy())


def read_checked(files: Mapping[str, Mapping[str, str]], directory: str) -> dict[str, torch.Tensor]:
  """Reads all tensors of a publication and verifies their digests.

  Args:
    files: digest of each tensor, keyed by file name, then by tensor name.
    directory: directory of the files.

  Raises:
    ValueError: a file is missing or truncated, or its tensor names or bytes differ from the
      announced ones.
  """
  tensors: dict[str, torch.Tensor] = {}
  for file, wanted in files.items():
    path = os.path.join(directory, file)
    try:
      with safe_open(path, 'pt') as opened:
        names = set(opened.keys())
        if names != set(wanted):
          raise ValueError(f'{path}: {_difference(names, set(wanted))}')
        tensors.update({name: opened.get_tensor(name) for name in wanted})
    except (SafetensorError, OSError) as error:
      raise ValueError(f'{path}: cannot be read: {" ".join(str(error).split())}') from None
    for name, announced in wanted.items():
      if (as_read := digest(tensors[name])) != announced:
        raise ValueError(f'{path}: {name} has digest {as_read} as read, announced was {announced}')
  return tensors


def _difference(names: set[str], wanted: set[str]) -> str:
  missing, more = sorted(wanted - names), sorted(names - wanted)
  return f'tensors missing {missing[:4]}, unknown {more[:4]}'


def load(views: Mapping[str, View], tensors: Mapping[str, torch.Tensor]) -> None:
  """Copies verified tensors into the live parameters. Raises ValueError, before the first write, if
  a tensor does not fit.
  """
  if set(tensors) != set(views):
    raise ValueError(f'publication and model differ: {_difference(set(tensors), set(views))}')
  for name, view in views.items():
    if not view.fits(tensors[name]):
      raise ValueError(
        f'{name}: published as {tuple(tensors[name].shape)} {tensors[name].dtype}, the model has '
        f'{view.whole} {view.tensor.dtype}'
      )
  with torch.no_grad():
    for name, view in views.items():
      view.tensor.copy_(view.of(tensors[name]))


class Worker:
  """Extension class of vLLM's worker. Every public method can be called through the server's
  endpoint `/collective_rpc`.
  """

  def jaxrl_weights(self) -> dict[str, Any]:
    """Returns the shape, dtype and slice of each parameter, keyed by Hugging Face name under
    'tensors', and settings of this worker such as its device.
    """
    views = hf_views(self.model_runner.model)
    return {
      'adapter_rank': self._adapter_rank(),
      'device': next(iter(views.values())).tensor.device.type,
      'logprobs_mode': str(getattr(self.vllm_config.model_config, 'logprobs_mode', None)),
      'speculative': self.vllm_config.speculative_config is not None,
      'tensors': {
        name: {
          'shape': list(view.tensor.shape),
          'dtype': str(view.tensor.dtype).removeprefix('torch.'),
          'slice': None if view.dim is None else [view.dim, view.start],
        }
        for name, view in views.items()
      },
      'threads': torch.get_num_threads(),
    }

  def _adapter_rank(self) -> int:
    """Returns the largest rank of adapters that this server can load at run time, or 0 if it cannot
    load adapters.
    """
    config = getattr(self.vllm_config, 'lora_config', None)
    allowed = os.environ.get('VLLM_ALLOW_RUNTIME_LORA_UPDATING', '').lower() in ('1', 'true')
    return config.max_lora_rank if config is not None and allowed else 0

  def jaxrl_digests(self) -> dict[str, str]:
    """Returns the digests of the live parameters, keyed by Hugging Face name."""
    return {name: digest(view.tensor) for name, view in hf_views(self.model_runner.model).items()}


def _keep_weights(layer: torch.nn.Module, remove_weight: bool) -> None:
  layer.cpu_linear = torch.nn.functional.linear


def _wait_without_spinning() -> None:
  """Shortens the busy-wait of an idle worker, which is one second by default in vLLM. On a host
  without GPUs, the trainer needs that CPU core.
  """
  from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

  wait = SpinCondition.wait

  def soon_idle(self, timeout_ms=None):
    self.busy_loop_s = min(self.busy_loop_s, _SPIN_S)
    wait(self, timeout_ms)

  SpinCondition.wait = soon_idle


def _install() -> None:
  """Registers the transfer engine `FileTransferEngine` in vLLM, and prevents vLLM from packing
  weights on CPUs.
  """
  import vllm.model_executor.layers.utils as layers
  from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
  )
  from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

  # On CPUs, vLLM would pack linear weights into oneDNN handles and leave the parameters empty.
  layers.dispatch_cpu_unquantized_gemm = _keep_weights
  if torch.version.cuda is None:
    _wait_without_spinning()

  @dataclasses.dataclass
  class InitInfo(WeightTransferInitInfo):
    pass

  @dataclasses.dataclass
  class UpdateInfo(WeightTransferUpdateInfo):
    directory: str = ''
    files: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    adapter: str = ''
    """Name of the adapter in the files; empty if they contain whole weights. This worker only
    verifies the files of an adapter, which vLLM itself then loads.
    """

  class FileTransferEngine(WeightTransferEngine):
    """Loads weights from files that the trainer and this worker can both access, in shared memory
    or on a shared file system.
    """

    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def init_transfer_engine(self, init_info):
      pass

    def start_weight_update(self):
      pass

    def receive_weights(self, update_info):
      tensors = read_checked(update_info.files, update_info.directory)
      if not update_info.adapter:
        load(hf_views(self.model), tensors)

    def finish_weight_update(self):
      pass

    def shutdown(self):
      pass

  WeightTransferEngineFactory.register_engine(BACKEND, FileTransferEngine)


try:
  import vllm  # noqa: F401
except ImportError:
  pass  # The tests import this module without vLLM.
else:
  _install()
