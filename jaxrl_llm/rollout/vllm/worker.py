"""Extension of vLLM's worker processes. It loads published weights from files and reports on the
loaded weights.

Invariants: a worker writes no parameter until it has read everything that it will load (whole
tensors, or its slices of them) and the digests match the trainer's. Reported checksums are computed
from the live parameters on their device, not from the files.

vLLM imports this module in its own environment, through the option `--worker-extension-cls
jaxrl_llm_worker.Worker` (see `rollout.vllm.server`). The module imports nothing from jaxrl_llm.
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, Protocol

import torch
import xxhash
from safetensors import SafetensorError, safe_open

BACKEND = 'files'
"""Name of this transfer backend in vLLM's option `--weight-transfer-config`."""
JAX = 'jax'
"""Device that a worker reports if its model is not a torch module. vLLM's servers on TPUs compute
with JAX, and take no weights through their workers (`update_weights` does nothing there).
"""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer data type that holds the bits of an element, keyed by the element's size in bytes."""
_SOON_S = 0.01
"""Seconds for which `jaxrl_verify` waits for the end of the verification, so that small files take
one call. The worker does not sample meanwhile.
"""
_LOOK_S = 1.0
"""Seconds between two checks of verified files that are not loaded yet."""
_SPIN_S = 0.001
"""Seconds for which a CPU worker busy-waits for the next command before it sleeps."""
_SLEEP_MS = 20
"""Maximum milliseconds for which a CPU worker sleeps before it looks for a command. vLLM notifies
it of each, but 11 of 20,000 notifications were lost in a trial, and vLLM itself looks after 5 s.
"""


class View(NamedTuple):
  """This worker's part of a Hugging Face tensor: the whole tensor, or a tensor-parallel slice of
  it.
  """

  tensor: torch.Tensor
  """Tensor that shares the memory of the live parameter, so writing to it changes the parameter."""
  dim: int | None = None
  """Axis along which the tensor is a slice; None if it is not sliced."""
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

  Modules are recognised by their attributes (`output_sizes`, `shard_indices`, …) and not by their
  class. If the server accepts adapters, vLLM wraps each layer in a module whose attribute
  `base_layer` is the layer; the names omit this attribute. Adapters themselves are left out.
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
    # Rows beyond the vocabulary are padding. A rank may have only padding.
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


def checksum(view: View) -> str:
  """Returns the checksum of the live elements of a view, as 16 hexadecimal digits.

  The checksum is defined in `jaxrl_llm.weights.checksums` and depends on the elements' positions in
  the whole tensor. It is computed block by block on the tensor's device. The sums are computed
  modulo 2^64, because torch's int64 wraps around.
  """
  tensor = view.tensor.detach()
  if tensor.numel() == 0:
    return f'{0:016x}'
  dim, start = (0, 0) if view.dim is None else (view.dim, view.start)
  matrix = tensor if tensor.dim() > 1 else tensor.reshape(-1, 1)
  lines, width = matrix.shape[:-1], matrix.shape[-1]
  each = max(1, tensor.element_size() // 4)  # Words per element.
  first = start if dim == len(lines) else 0
  columns = _odd(
    torch.arange(first * each, (first + width) * each, device=tensor.device) + _COLUMNS
  )
  # A line is a range along the last axis. `numbers` has the index of each line in the whole tensor.
  numbers = torch.zeros(lines, dtype=torch.int64, device=tensor.device)
  whole = [view.length or n if axis == view.dim else n for axis, n in enumerate(lines)]
  for axis, n in enumerate(lines):
    index = torch.arange(n, device=tensor.device) + (start if axis == dim else 0)
    stride = math.prod(whole[axis + 1 :])
    numbers += (index * stride).reshape([-1 if other == axis else 1 for other in range(len(lines))])
  total = 0
  step = max(1, _CHECKED // max(1, math.prod(matrix.shape[1:])))
  for at in range(0, len(matrix), step):
    words = _words(matrix[at : at + step].reshape(-1, width))
    of_lines = (words * columns).sum(1)
    total += int((of_lines * _odd(numbers[at : at + step].reshape(-1))).sum())
  return f'{total % (1 << 64):016x}'


_COLUMNS = 1 << 62
_CHECKED = 1 << 20
"""Number of elements whose words are in memory at a time, as integers of 8 bytes."""


def _signed(value: int) -> int:
  """Returns the int64 with the same bits as an unsigned integer."""
  return value - (1 << 64) if value >> 63 else value


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
  """Shifts int64 values to the right as unsigned integers, so that zeros are shifted in."""
  return (z >> bits) & ((1 << (64 - bits)) - 1)


def _odd(numbers: torch.Tensor) -> torch.Tensor:
  """Returns the factor odd(n) for each number n; see `jaxrl_llm.weights.checksums`."""
  z = (numbers + 1) * _signed(0x9E3779B97F4A7C15)
  z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
  z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
  return (z ^ _shifted(z, 31)) | 1


def _words(matrix: torch.Tensor) -> torch.Tensor:
  """Returns the checksum word of each element, as int64; see `jaxrl_llm.weights.checksums`."""
  size = min(matrix.element_size(), 4)
  words = matrix.contiguous().view(_INTEGERS[size]).to(torch.int64) & ((1 << (8 * size)) - 1)
  return words ^ (words >> 16) if size == 4 else words


def read_checked(
  files: Mapping[str, Mapping[str, str]],
  directory: str,
  cuts: Mapping[str, tuple[View, str]] | None = None,
) -> dict[str, torch.Tensor]:
  """Reads all tensors of a publication and verifies their digests.

  Args:
    files: digest of each tensor, keyed by file name, then by tensor name.
    directory: directory of the files.
    cuts: (view, digest) of each tensor from which this worker reads only its slice, keyed by tensor
      name; see `known_slices`. All other tensors are read as a whole.

  Raises:
    ValueError: a file is missing or truncated, or its tensor names or bytes differ from the
      announced ones.
  """
  tensors: dict[str, torch.Tensor] = {}
  for file, wanted in files.items():
    path = os.path.join(directory, file)
    announced = {**wanted, **{name: cut[1] for name, cut in (cuts or {}).items() if name in wanted}}
    try:
      with safe_open(path, 'pt') as opened:
        names = set(opened.keys())
        if names != set(wanted):
          raise ValueError(f'{path}: {_difference(names, set(wanted))}')
        for name in wanted:
          if name in (cuts or {}):
            view = cuts[name][0]
            stop = view.start + view.tensor.shape[view.dim]
            index = (*[slice(None)] * view.dim, slice(view.start, stop))
            tensors[name] = opened.get_slice(name)[index]
          else:
            tensors[name] = opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
      raise ValueError(f'{path}: cannot be read: {" ".join(str(error).split())}') from None
    for name, expected in announced.items():
      if (as_read := digest(tensors[name])) != expected:
        raise ValueError(f'{path}: {name} has digest {as_read} as read, announced was {expected}')
  return tensors


def known_slices(
  views: Mapping[str, View], slices: Mapping[str, list[list[Any]]]
) -> dict[str, tuple[View, str]]:
  """Returns (view, digest) for each tensor whose slice on this worker has a digest among `slices`.

  Args:
    slices: digests sent by the trainer, keyed by tensor name, as a list of [axis, start, length,
      digest] for the slices that workers hold.
  """
  known = {}
  for name, view in views.items():
    if view.dim is not None:
      held = [view.dim, view.start, view.tensor.shape[view.dim]]
      for *cut, value in slices.get(name, ()):
        if cut == held:
          known[name] = view, value
  return known


def _difference(names: set[str], wanted: set[str]) -> str:
  missing, more = sorted(wanted - names), sorted(names - wanted)
  return f'tensors missing {missing[:4]}, unknown {more[:4]}'


def load(
  views: Mapping[str, View], tensors: Mapping[str, torch.Tensor], cuts: Container[str] = ()
) -> None:
  """Copies verified tensors into the live parameters. Raises ValueError before the first write if a
  tensor does not fit.

  Args:
    cuts: names of the tensors that contain only this worker's slice. All others are whole tensors.
  """
  if set(tensors) != set(views):
    raise ValueError(f'publication and model differ: {_difference(set(tensors), set(views))}')
  parts = {}
  for name, view in views.items():
    tensor, wanted = tensors[name], view.tensor.shape if name in cuts else view.whole
    fits = view.tensor.shape == tensor.shape if name in cuts else view.fits(tensor)
    if not fits or tensor.dtype != view.tensor.dtype:
      raise ValueError(
        f'{name}: published as {tuple(tensor.shape)} {tensor.dtype}, the model has '
        f'{tuple(wanted)} {view.tensor.dtype}'
      )
    parts[name] = tensor if name in cuts else view.of(tensor)
  with torch.no_grad():
    for name, view in views.items():
      view.tensor.copy_(parts[name])


class Change(NamedTuple):
  """Elements that a delta changes in this worker's part of a tensor."""

  view: View
  positions: torch.Tensor
  """Positions in the part, in C order."""
  bits: torch.Tensor
  """New bits of these elements, as integers."""


def read_delta(
  views: Mapping[str, View], files: Mapping[str, Mapping[str, str]], directory: str
) -> list[Change]:
  """Reads a delta in the format of `jaxrl_llm.weights.deltas`, and checks that it fits the model.

  Raises:
    ValueError: the delta differs from the announced digests, or does not fit the model.
  """
  arrays = read_checked(files, directory)
  names = sorted({key.removesuffix('/gaps').removesuffix('/bits') for key in arrays})
  if len(arrays) != 2 * len(names):
    raise ValueError('delta refused: it has arrays other than gaps and bits of tensors')
  return [_change(name, views.get(name), arrays) for name in names]


def _change(name: str, view: View | None, arrays: Mapping[str, torch.Tensor]) -> Change:
  gaps, bits = arrays.get(f'{name}/gaps'), arrays.get(f'{name}/bits')
  if view is None or gaps is None or bits is None or None in view.whole:
    raise ValueError(f'delta refused: {name} is not a tensor of the model with gaps and bits')
  integers = _INTEGERS.get(view.tensor.element_size())
  if (gaps.dtype, gaps.dim(), bits.dtype, bits.dim()) != (torch.uint8, 1, integers, 1):
    raise ValueError(
      f'delta refused: {name} has gaps {gaps.dtype} {tuple(gaps.shape)} and bits {bits.dtype} '
      f'{tuple(bits.shape)}, wanted one row of torch.uint8 and one of {integers}'
    )
  # A byte below 255 ends a gap; each byte of 255 adds 255 to it.
  ends = gaps < 255
  if not len(gaps) or not ends[-1]:
    raise ValueError(f'delta refused: {name}: its last gap has no end')
  positions = gaps.cumsum(0, dtype=torch.int64)[ends]
  positions += torch.arange(len(positions))
  size = math.prod(view.whole)
  if len(positions) != len(bits) or positions[-1] >= size:
    raise ValueError(
      f'delta refused: {name} has {len(positions)} positions up to {int(positions[-1])} and '
      f'{len(bits)} values, the tensor has {size} elements'
    )
  if view.dim is not None:
    positions, held = _within(view, positions)
    bits = bits[held]
  return Change(view, positions, bits)


def _within(view: View, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
  """Converts positions in the whole tensor to positions in this worker's slice.

  Returns:
    (positions in the slice, mask). The mask is True for each given position that lies in the slice.
  """
  inner, length = math.prod(view.tensor.shape[view.dim + 1 :]), view.tensor.shape[view.dim]
  rows, column = positions // inner, positions % inner
  outer, along = rows // view.length, rows % view.length - view.start
  held = (along >= 0) & (along < length)
  return ((outer * length + along) * inner + column)[held], held


def apply(changes: Iterable[Change]) -> None:
  """Writes the elements that a delta changes into the live parameters."""
  with torch.no_grad():
    for view, positions, bits in changes:
      if len(positions):
        device = view.tensor.device
        at = torch.unravel_index(positions.to(device), view.tensor.shape)
        view.tensor.view(bits.dtype)[at] = bits.to(device)


class Update(Protocol):
  """A publication that the trainer sends to a worker; `UpdateInfo` describes the fields."""

  directory: str
  files: Mapping[str, Mapping[str, str]]
  slices: Mapping[str, list[list[Any]]]
  label: str
  deltas: Sequence[Mapping[str, Any]]


class Verification:
  """Reads and verifies the files of whole weights in a thread, while the server samples.

  Tensors that are read whole are views of the mapped files. They are therefore not used if a file
  has been overwritten since; the trainer overwrites files that it has released. Until
  `close` is called, the thread watches the files. If a file is removed or overwritten, the thread
  forgets the tensors, so that the file's memory is freed.
  """

  def __init__(self, views: Mapping[str, View], update: Update):
    self._update, self._cuts = update, known_slices(views, update.slices)
    self._lock = threading.Lock()
    """Lock that is held while `_tensors` and `_files` are taken or forgotten."""
    self._tensors: dict[str, torch.Tensor] | None = None
    self._files: list[BinaryIO] = []
    """The files, which are open so that changes of them are noticed even if they have no name."""
    self._stamps: list[tuple[int, int]] = []
    """Result of `_stamps_now` before the files were read."""
    self.error = ''
    """Reason for which the files cannot be used; empty if there is none."""
    self.done = threading.Event()
    """Event that is set when the verification has ended."""
    self._closed = threading.Event()
    self._thread = threading.Thread(target=self._run, name='verification', daemon=True)
    self._thread.start()

  def _run(self) -> None:
    self._read()
    self.done.set()
    while not self._closed.wait(_LOOK_S):
      with self._lock:
        if self._stamps_now() != self._stamps or self._is_removed():
          self._forget()

  def _read(self) -> None:
    directory = self._update.directory
    try:
      files = [_opened(os.path.join(directory, name)) for name in self._update.files]
      with self._lock:
        if self._closed.is_set():
          return
        self._files = files
        self._stamps = self._stamps_now()
      tensors = read_checked(self._update.files, directory, self._cuts)
      with self._lock:
        if not self._closed.is_set():
          self._tensors = tensors
    except Exception as error:  # `verified` reports it to the trainer.
      self.error = str(error) or type(error).__name__
      self.close()

  def tensors_of(self, update: Update) -> dict[str, torch.Tensor] | None:
    """Returns the verified tensors. Returns None if they belong to another update than `update`, if
    the verification has failed or is not complete, or if a file was overwritten since. Can be
    called until the verification is closed.
    """
    if not self.done.is_set():
      return None
    names = ('directory', 'files', 'slices')
    with self._lock:
      is_same = all(getattr(update, name) == getattr(self._update, name) for name in names)
      return self._tensors if is_same and self._stamps_now() == self._stamps else None

  def close(self) -> None:
    """Forgets the tensors, and closes the files."""
    with self._lock:
      self._forget()

  def _forget(self) -> None:
    self._tensors = None
    for file in self._files:
      file.close()
    self._files = []
    self._closed.set()

  def _stamps_now(self) -> list[tuple[int, int]]:
    """Returns the time of the last change and the size of each file; an empty list if a file on a
    network file system is gone.
    """
    try:
      statuses = [os.fstat(file.fileno()) for file in self._files]
    except OSError:
      return []
    return [(status.st_mtime_ns, status.st_size) for status in statuses]

  def _is_removed(self) -> bool:
    """Returns whether a file has no name any more, so that only open maps keep its memory."""
    return any(os.fstat(file.fileno()).st_nlink == 0 for file in self._files)


def _opened(path: str) -> BinaryIO:
  try:
    return open(path, 'rb')
  except OSError as error:
    raise ValueError(f'{path}: cannot be read: {error.strerror}') from None


class Receiver:
  """Loads whole weights and deltas into the live parameters of one worker."""

  def __init__(self) -> None:
    self.holds: str | None = None
    """Label of the version that the worker has loaded; None if it is unknown."""
    self._verification: Verification | None = None

  def verify(self, views: Mapping[str, View], update: Update) -> None:
    """Begins to verify the whole weights of a later update. Forgets the weights of an earlier
    verification.
    """
    if self._verification is not None:
      self._verification.close()
    self._verification = Verification(views, update)

  def verified(self, wait_s: float = 0.0) -> dict[str, Any]:
    """Returns the state of the latest verification: `done` is whether it has ended, and `error` is
    its error, '' if there is none. Waits at most `wait_s` seconds for its end.
    """
    if (verification := self._verification) is None:
      return {'done': True, 'error': 'nothing was verified'}
    return {'done': verification.done.wait(wait_s), 'error': verification.error}

  def receive(self, views: Mapping[str, View], update: Update) -> None:
    """Loads an update. Raises ValueError before the first write if the update cannot be used."""
    verification, self._verification = self._verification, None
    try:
      self._load(views, update, verification)
    finally:
      if verification is not None:
        verification.close()

  def _load(
    self, views: Mapping[str, View], update: Update, verification: Verification | None
  ) -> None:
    """Loads an update, with the tensors of a verification if they belong to it; see `receive`."""
    label, deltas = update.label if update.files else self.holds, []
    for delta in update.deltas:
      if label is None or delta['before'] != label:
        raise ValueError(
          f'delta refused: it applies to {delta["before"]}, this worker holds '
          f'{label or "no known version"}'
        )
      deltas.append(read_delta(views, delta['files'], delta['directory']))
      label = delta['label']
    # An error after the first write leaves the weights unknown.
    held, self.holds = self.holds, None
    if update.files or not deltas:
      cuts = known_slices(views, update.slices)
      try:
        tensors = verification.tensors_of(update) if verification is not None else None
        if tensors is None:
          tensors = read_checked(update.files, update.directory, cuts)
        load(views, tensors, cuts)
      except ValueError:  # Nothing was written.
        self.holds = held
        raise
    for changes in deltas:
      apply(changes)
    self.holds = label


class Worker:
  """Extension class of vLLM's worker. Every public method can be called through the server's
  endpoint `/collective_rpc`.
  """

  def jaxrl_weights(self) -> dict[str, Any]:
    """Returns the shape, dtype and slice of each parameter, keyed by Hugging Face name under
    'tensors', and settings of this worker such as its device.
    """
    model = self.model_runner.model
    if not isinstance(model, torch.nn.Module):
      return {'device': JAX, 'tensors': {}}
    views = hf_views(model)
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
      'verifies': True,
    }

  def _adapter_rank(self) -> int:
    """Returns the largest rank of adapters that this server can load at run time, or 0 if it cannot
    load adapters.
    """
    config = getattr(self.vllm_config, 'lora_config', None)
    allowed = os.environ.get('VLLM_ALLOW_RUNTIME_LORA_UPDATING', '').lower() in ('1', 'true')
    return config.max_lora_rank if config is not None and allowed else 0

  def jaxrl_verify(self, update_info: dict[str, Any]) -> dict[str, Any]:
    """Begins to read and verify the whole weights of a later update, while the server samples.
    Returns the same state as `jaxrl_verified`, after a short wait for the end.
    """
    engine = self.weight_transfer_engine
    engine.receiver.verify(hf_views(self.model_runner.model), engine.parse_update_info(update_info))
    return engine.receiver.verified(_SOON_S)

  def jaxrl_verified(self) -> dict[str, Any]:
    """Returns the state of the latest verification: `done` is whether it has ended, and `error` is
    its error, '' if there is none.
    """
    return self.weight_transfer_engine.receiver.verified()

  def jaxrl_digests(self) -> dict[str, str]:
    """Returns the digests of the live parameters, keyed by Hugging Face name. Digests are computed
    on the host, so they are used as the proof of an update only if the parameters are on the host.
    """
    return {name: digest(view.tensor) for name, view in hf_views(self.model_runner.model).items()}

  def jaxrl_checksums(self) -> dict[str, str]:
    """Returns the checksums of the live parameters, keyed by Hugging Face name."""
    return {name: checksum(view) for name, view in hf_views(self.model_runner.model).items()}


def _keep_weights(layer: torch.nn.Module, remove_weight: bool) -> None:
  layer.cpu_linear = torch.nn.functional.linear


def _wait_without_spinning() -> None:
  """Shortens the busy-wait of an idle worker, which is one second by default in vLLM, and its sleep
  afterwards. On a host without GPUs, the trainer needs the CPU core on which the worker waits.
  """
  from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

  wait = SpinCondition.wait

  def soon_idle(self, timeout_ms=None):
    self.busy_loop_s = min(self.busy_loop_s, _SPIN_S)
    wait(self, _SLEEP_MS if timeout_ms is None else min(timeout_ms, _SLEEP_MS))

  SpinCondition.wait = soon_idle


def _install() -> None:
  """Registers the transfer engine `FileTransferEngine` in vLLM, prevents vLLM from packing weights
  on CPUs, and shortens busy-waits on hosts without GPUs.
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
    """Name of the adapter in the files; empty if they contain whole weights. For an adapter, this
    worker only verifies the files, and vLLM itself loads them.
    """
    slices: dict[str, list[list[Any]]] = dataclasses.field(default_factory=dict)
    """Digests of the slices that workers hold; see `known_slices`."""
    label: str = ''
    """Label of the version in the files."""
    deltas: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Deltas to apply in order after the files: for each, the label of the version `before` it, the
    `label` of the version after it, its `directory` and its `files`. If there are no files, the
    deltas apply to the version that this worker holds.
    """

  class FileTransferEngine(WeightTransferEngine):
    """Loads weights from files that the trainer and this worker can both access, in shared memory
    or on a shared file system.
    """

    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def init_transfer_engine(self, init_info):
      self.receiver = Receiver()

    def start_weight_update(self):
      pass

    def receive_weights(self, update_info):
      if update_info.adapter:
        read_checked(update_info.files, update_info.directory)
        return
      self.receiver.receive(hf_views(self.model), update_info)

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
