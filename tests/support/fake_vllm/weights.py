"""Weight updates as in vLLM's worker: one session at a time, and an update is only written if all
of it fits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from fake_vllm.core import Core
from jaxrl_llm.rollout.vllm.publication import digest, read_checked
from jaxrl_llm.weights.checksums import checksums
from jaxrl_llm.weights.deltas import apply

_SOON_S = 0.01
"""Seconds for which the worker waits for the end of a verification before it answers."""


class WorkerError(Exception):
  """Raised for an exception inside the worker. The worker continues."""


class Worker:
  """Executes the commands about weights."""

  def __init__(self, core: Core, *, device: str = 'cpu', verifies: bool = True):
    self._core, self._device, self._verifies = core, device, verifies
    self._updating = False
    self._writing = asyncio.Lock()
    self.holds: str | None = None
    """Label of the loaded version. None before the first update."""
    self._verification: asyncio.Task | None = None
    self._verified: dict[str, Any] = {}
    """Description of the update whose files were verified last."""

  def start(self) -> None:
    if self._updating:
      raise WorkerError(
        'start_weight_update called while a weight update is already active. Call '
        'finish_weight_update first.'
      )
    self._updating = True

  async def update(self, info: Mapping[str, Any]) -> None:
    """Reads and loads an update. If it cannot be loaded, ends the session and raises
    WorkerError.
    """
    async with self._writing:
      if not self._updating:
        raise WorkerError('start_weight_update must be called before update_weights.')
      held, stale = self._core.backend.tensors, self._core.faults.stale
      try:
        verified = None
        if self._verification is not None and info == self._verified:
          verified = await self._verification  # Raises what the worker found.
        self._verification = None
        tensors, label = await asyncio.to_thread(_read, info, held, self.holds, verified)
      except ValueError as error:
        self._updating = False
        raise WorkerError(str(error)) from None
      if stale is not None:
        tensors[stale] = held[stale]
      await self._core.load(tensors)
      self.holds = label

  def finish(self) -> None:
    if not self._updating:
      raise WorkerError('finish_weight_update called without a matching start_weight_update.')
    self._updating = False

  async def call(self, method: str, *args: Any) -> dict[str, Any]:
    """Returns the answer of the method `method` of `rollout.vllm.worker`."""
    held = self._core.backend.tensors
    if method == 'jaxrl_verify' and self._verifies:
      (self._verified,) = args
      self._verification = asyncio.create_task(
        asyncio.to_thread(read_checked, self._verified['files'], self._verified['directory'])
      )
      await asyncio.wait([self._verification], timeout=_SOON_S)
    if method in ('jaxrl_verify', 'jaxrl_verified') and self._verifies:
      if (verification := self._verification) is None:
        return {'done': True, 'error': 'nothing was verified'}
      error = verification.done() and verification.exception()
      return {'done': verification.done(), 'error': str(error or '')}
    if method == 'jaxrl_digests':
      return await asyncio.to_thread(
        lambda: {name: digest(tensor) for name, tensor in held.items()}
      )
    if method == 'jaxrl_checksums':
      return await asyncio.to_thread(
        lambda: {name: checksums(tensor)[None] for name, tensor in held.items()}
      )
    if method == 'jaxrl_weights':
      tensors = {
        name: {'shape': list(tensor.shape), 'dtype': tensor.dtype.name, 'slice': None}
        for name, tensor in held.items()
      }
      return {
        'tensors': tensors,
        'threads': 1,
        'device': self._device,
        'verifies': self._verifies,
      }
    raise WorkerError(f"'CPUWorker' object has no attribute '{method}'")


def _read(
  info: Mapping[str, Any],
  held: Mapping[str, np.ndarray],
  label: str | None,
  verified: dict[str, np.ndarray] | None,
) -> tuple[dict[str, np.ndarray], str | None]:
  """Returns the tensors of an update, and their label. Raises ValueError, with the worker's
  message, for an update that `rollout.vllm.worker` would refuse. `verified`: tensors of
  files that were verified already. If None, the files are read here.
  """
  unknown = sorted(set(info) - {'directory', 'files', 'label', 'deltas'})
  if unknown:
    raise ValueError(
      'Invalid update_info for FileTransferEngine: _install.<locals>.UpdateInfo.__init__() got an '
      'unexpected keyword '
      f"argument '{unknown[0]}'"
    )
  files, directory = info.get('files', {}), info.get('directory', '')
  listed = isinstance(files, dict) and all(
    isinstance(digests, dict) and all(isinstance(text, str) for text in digests.values())
    for digests in files.values()
  )
  if not listed or not isinstance(directory, str):
    raise ValueError(
      'update_info: wanted directory as text, and files as digests of tensors by file'
    )
  if files or not info.get('deltas'):
    tensors = read_checked(files, directory) if verified is None else dict(verified)
    label = info.get('label')
  else:
    tensors = dict(held)
  if set(tensors) != set(held):
    missing, more = sorted(set(held) - set(tensors)), sorted(set(tensors) - set(held))
    raise ValueError(
      f'publication and model differ: tensors missing {missing[:4]}, unknown {more[:4]}'
    )
  for name, tensor in held.items():
    found = tensors[name]
    if found.shape != tensor.shape or found.dtype != tensor.dtype:
      raise ValueError(
        f'{name}: published as {found.shape} torch.{found.dtype.name}, the model has '
        f'{tensor.shape} torch.{tensor.dtype.name}'
      )
  tensors = {name: np.array(tensor) for name, tensor in tensors.items()}
  for delta in info.get('deltas', ()):
    if label is None or delta['before'] != label:
      raise ValueError(
        f'delta refused: it applies to {delta["before"]}, this worker holds '
        f'{label or "no known version"}'
      )
    apply(tensors, read_checked(delta['files'], delta['directory']))
    label = delta['label']
  return tensors, label
