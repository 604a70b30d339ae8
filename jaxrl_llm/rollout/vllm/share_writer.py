"""Writers of the shares of the trainer's processes other than process 0."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import jax
import numpy as np
from absl import logging

from jaxrl_llm.core.disk import is_seen, scratch
from jaxrl_llm.core.errors import RunError, UserError
from jaxrl_llm.core.net.connections import is_loopback
from jaxrl_llm.core.net.token_server import FrontConfig
from jaxrl_llm.core.types import Json
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.api import Comparison
from jaxrl_llm.rollout.vllm.images import Decision, ShareImage
from jaxrl_llm.rollout.vllm.pull.bundle import Bundle, describe_file
from jaxrl_llm.rollout.vllm.pull.server import WeightServer
from jaxrl_llm.rollout.vllm.shares import (
  RemoteFile,
  ShareOrder,
  ShareReport,
  share_file,
  share_layout,
  write_share,
)
from jaxrl_llm.weights.mapped_files import MappedFiles
from jaxrl_llm.weights.safetensors_files import writing
from jaxrl_llm.weights.shares import parameters_of
from jaxrl_llm.weights.tensor_files import FileLayout

_MEMORY = '/dev/shm'
"""Directory in memory, in which processes that do not see process 0's directory write."""
_VERSIONS = 3
"""Maximum number of shares in memory: the newest version, the one before, and the next."""
_ANYWHERE = '0.0.0.0'
"""Address of all interfaces of a host."""


class VllmShareWriter:
  """Writes the share of one process of the trainer."""

  def __init__(self, spec: ModelSpec):
    """
    Args:
      spec: spec of the language model.
    """
    self._spec = spec
    self._maps = MappedFiles()
    """Maps of this process's files in the directory of process 0, which versions overwrite."""
    self._server: WeightServer | None = None
    """Server of this process's shares; None if process 0's directory is seen."""
    self._opened = contextlib.ExitStack()
    """Holds `_folder`, which is removed when the process exits."""
    self._folder: Path | None = None
    """Folder of this process's shares in memory; None before the first."""
    self._image: ShareImage | None = None
    """Image of this process's share; None if no deltas are published."""

  def can_write(self, order: Json, number: int, count: int) -> bool:
    """Returns whether this process, `number` of `count`, sees the directory into which process 0
    publishes, or can keep and serve its shares.
    """
    asked = ShareOrder.from_json(order)
    if is_seen(Path(asked.directory), asked.token):
      return True
    if asked.source is None or asked.image is not None:
      return False
    try:
      self._prepare(asked.source, share_layout(self._spec, number, count, asked.dtype), number)
    except (UserError, OSError) as error:
      logging.warning('process 0 writes all weights, since process %d cannot: %s', number, error)
      return False
    return True

  def _prepare(self, source: FrontConfig, layout: FileLayout, number: int) -> None:
    """Creates the folder of this process's shares, and starts their server.

    Raises:
      UserError: the server cannot listen.
      OSError: the folder cannot be created, or has too little space.
    """
    if self._folder is None:
      free, needed = shutil.disk_usage(_MEMORY).free, _VERSIONS * layout.size
      if free < needed:
        raise OSError(f'{_MEMORY} has {free:,} bytes free, {_VERSIONS} shares need {needed:,}')
      self._folder = self._opened.enter_context(scratch('jaxrl-shares-', _MEMORY))
    if self._server is None:
      # The address of process 0 may not be one of this host.
      host = source.host if is_loopback(source.host) else _ANYWHERE
      port = source.port and source.port + number
      self._server = WeightServer(dataclasses.replace(source, host=host, port=port))
    self._server.open()

  def comparison(self, order: Json) -> Comparison | None:
    """See `ShareWriter.comparison`. The image of process 0 belongs to its folder, and contains the
    version that the order names.
    """
    asked = ShareOrder.from_json(order)
    if asked.image is None:
      return None
    before = asked.image.before
    has = jax.process_index() == 0 or (self._image is not None and self._image.contains(before))
    return Comparison(before if has else None, asked.token)

  def names(self, number: int, count: int) -> Collection[str]:
    """Returns the names in the unrolled tree of the parameters that process `number` writes."""
    return parameters_of(self._spec, number, count)

  def write(
    self, order: Json, number: int, count: int, leaves: Iterable[tuple[str, np.ndarray]]
  ) -> Json:
    """Writes the share of process `number`. Returns the digests for process 0 or, if the share
    cannot be written, the error.

    Args:
      leaves: parameters of the share. All are consumed in any case, because gathering parameters
        needs all processes.
    """
    asked, leaves = ShareOrder.from_json(order), iter(leaves)
    try:
      if asked.image is not None:
        if self._image is None:
          self._image = ShareImage(self._spec, asked.dtype, number, count)
        return self._image.take(asked, leaves).to_json()
      if is_seen(Path(asked.directory), asked.token):
        proof = write_share(self._spec, asked, number, count, leaves, self._maps)
        return ShareReport(proof).to_json()
      return self._write_here(asked, number, count, leaves).to_json()
    except (RunError, UserError) as error:
      for _ in leaves:
        pass
      return {'error': str(error)}

  def awaits_decision(self, order: Json) -> bool:
    """Returns whether process 0 decides how the share is written once all processes have it."""
    return ShareOrder.from_json(order).image is not None

  def write_decided(self, decision: Json) -> Json:
    """Writes the share, or its changes, as process 0 has decided. Returns the digests of the arrays
    of the delta, or the error.
    """
    try:
      return {'digests': self._image.write(Decision.from_json(decision))}
    except RunError as error:
      return {'error': str(error)}

  def _write_here(
    self, order: ShareOrder, number: int, count: int, leaves: Iterator[tuple[str, np.ndarray]]
  ) -> ShareReport:
    """Writes a share into memory of this process's host, and serves it. Removes the shares of
    versions that are no longer published.
    """
    served = dict(self._server.served)
    for key, (directory, _) in list(served.items()):
      if directory.name not in order.keep:
        del served[key]
        shutil.rmtree(directory, ignore_errors=True)
    self._server.served = dict(served)
    directory = self._folder / order.token
    with writing(directory):
      directory.mkdir()
    proof = write_share(self._spec, order._replace(directory=str(directory)), number, count, leaves)
    file = describe_file(directory / share_file(number), proof.digests, proof.slices)
    bundle = Bundle((file,))
    self._server.served = {**served, bundle.id: (directory, bundle)}
    return ShareReport(proof, RemoteFile(self._server.address, file))
