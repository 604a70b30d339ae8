"""Publication of LoRA adapters. All processes of the trainer publish the base weights once, in
shares. Each version then consists of one adapter, which process 0 writes while its arrays arrive.

An adapter has one writer because vLLM reads it from one file, and because it is small: with rank 64
on all projections in float32, 0.65 GB for a 7b model and 3.3 GB for a 70b model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxrl_llm.core.disk import sync
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.net.token_server import FrontConfig
from jaxrl_llm.core.types import Version
from jaxrl_llm.models.spec import LoraConfig, ModelSpec
from jaxrl_llm.rollout.vllm.publication import Publication, PublicationFolder
from jaxrl_llm.rollout.vllm.shares import ShareOrder, ShareReport
from jaxrl_llm.weights.checksums import Slice
from jaxrl_llm.weights.peft import WEIGHTS, AdapterFile, open_adapter
from jaxrl_llm.weights.safetensors_files import writing


class AdapterFolder(PublicationFolder):
  """Folder of published adapter versions in PEFT format. The base weights are published once, with
  the first version.
  """

  def __init__(
    self,
    root: str | Path,
    spec: ModelSpec,
    *,
    lora: LoraConfig,
    dtype: str,
    private: bool = True,
    source: FrontConfig | None = None,
  ):
    super().__init__(root, spec, dtype=dtype, private=private, source=source)
    self._lora = lora
    self._base: Publication | None = None
    """Publication of the base weights; None until the first version."""
    self._written: tuple[Mapping[str, Mapping[str, str]], int] = {}, 0
    """Digests (see `Publication.files`) and size in bytes of the adapter that was written last."""

  def begin_shares(
    self, *, slices: Mapping[str, Collection[Slice]] | None = None, checksums: bool = False
  ) -> ShareOrder | None:
    """Returns the order for the base weights (see `PublicationFolder.begin_shares`), or None once
    they are published, because process 0 writes the adapters alone.
    """
    if self._base is not None:
      return None
    return super().begin_shares(slices=slices, checksums=checksums)

  def write(
    self,
    version: Version,
    leaves: Iterable[tuple[str, np.ndarray]],
    *,
    slices: Mapping[str, Collection[Slice]] | None = None,
    checksums: bool = False,
  ) -> Publication:
    """Publishes an adapter version. `leaves` contains the arrays of the base weights and of the
    adapter in the first call, and only the adapter's arrays in later calls. `slices` and
    `checksums` apply to the base weights.
    """
    with self._adapter() as adapter:
      others = adapter.others(leaves)
      if self._base is None:
        self._base = super().write(version, others, slices=slices, checksums=checksums)
      elif (other := next(others, None)) is not None:
        raise UserError(
          f'{other[0]}: not a parameter of an adapter, and only adapters are published; has '
          'the model changed since the start?'
        )
    return self._publish_adapter(version)

  def write_share(
    self, order: ShareOrder, count: int, leaves: Iterable[tuple[str, np.ndarray]]
  ) -> ShareReport:
    """Writes the share of process 0 of the base weights, and the adapter. `leaves` contains the
    arrays of both.
    """
    with self._adapter() as adapter:
      return super().write_share(order, count, adapter.others(leaves))

  def complete(self, version: Version, reports: Sequence[ShareReport]) -> Publication:
    self._base = super().complete(version, reports)
    return self._publish_adapter(version)

  @contextlib.contextmanager
  def _adapter(self) -> Iterator[AdapterFile]:
    """Opens the file of the next adapter. Its digests are known at the end of the `with` block."""
    with open_adapter(self._unfinished_adapter, self._spec, self._lora, base=None) as file:
      yield file
      self._written = {WEIGHTS: file.finish()}, file.nbytes

  @property
  def _unfinished_adapter(self) -> Path:
    return self.root / 'unfinished-adapter'

  def _publish_adapter(self, version: Version) -> Publication:
    """Makes the adapter visible that was written last, and returns its publication."""
    (files, nbytes), directory = self._written, self.root / f'adapter-{version}'
    with writing(self.root):
      for path in self._unfinished_adapter.iterdir():
        sync(path)
      if directory.exists():
        self._remove(directory)
      self._unfinished_adapter.rename(directory)
      sync(self.root)
    return Publication(
      version=version, directory=directory, files=files, nbytes=nbytes, base=self._base
    )
