"""Writes LoRA adapters in PEFT format (adapter_config.json and a weights file), which the `peft`
library, vLLM and other programs can load.

Invariant: tensor names derive from the table of parameter names (`weights.tables`), like the names
in model directories. The matrices A and B are written as they are trained: A is `[rank, in]` and B
is `[out, rank]`, as PEFT expects.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.models.spec import LoraConfig, ModelSpec
from jaxrl_llm.weights.hf_config import write_json
from jaxrl_llm.weights.safetensors_files import unfinished_file, writing
from jaxrl_llm.weights.tables import TensorEntry, entries
from jaxrl_llm.weights.tensor_files import FileLayout, TensorWriter

CONFIG, WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
_PREFIX = 'base_model.model.'
_DTYPE = 'float32'
"""Hugging Face name of the data type of the file's tensors. Adapters are trained in float32, and a
head in a narrower type loses nothing.
"""
_HEAD = 'score'
"""Name in transformers of the module that is the head of a model with one output."""


def adapter_entries(spec: ModelSpec, lora: LoraConfig) -> list[TensorEntry]:
  """Returns an entry for each tensor of an adapter file: the matrices A and B of each target, and
  the head of a model without a language model's head, which is trained with the adapters.
  """
  tensors = []
  for entry in entries(spec):
    module, _, kind = entry.path.rpartition('/')
    if kind == 'kernel' and module.rpartition('/')[2] in lora.targets:
      features, inputs = entry.shape
      for ours, theirs, shape in (
        ('lora_a', 'lora_A', (lora.rank, inputs)),
        ('lora_b', 'lora_B', (features, lora.rank)),
      ):
        name, path = f'{_PREFIX}{_module(entry)}.{theirs}.weight', f'{module}/{ours}'
        tensors.append(TensorEntry(hf=name, path=path, layer=entry.layer, shape=shape))
    elif spec.head != 'lm' and module == 'head':
      tensors.append(dataclasses.replace(entry, hf=_PREFIX + entry.hf))
  return tensors


class AdapterFile:
  """Adapter file that is written while its arrays arrive; see `open_adapter`."""

  def __init__(self, tensors: Iterable[TensorEntry], writer: TensorWriter, nbytes: int):
    """
    Args:
      tensors: tensors of the file.
      writer: writer in which the file is open.
      nbytes: total size of the tensors in bytes.
    """
    self.nbytes = nbytes
    self._writer, self._tensors = writer, {entry.hf: entry for entry in tensors}
    self._by_name: dict[str, list[TensorEntry]] = {}
    """Tensors of each parameter, keyed by its name in the stacked and in the unrolled tree."""
    for entry in self._tensors.values():
      for name in {entry.path, entry.unrolled}:
        self._by_name.setdefault(name, []).append(entry)
    self._rows: collections.Counter[str] = collections.Counter()
    """Number of rows of each tensor that have arrived."""

  def holds(self, name: str) -> bool:
    """Returns whether a parameter belongs to the file, given its name in the tree."""
    return name in self._by_name

  def add(self, name: str, array: Shaped[np.ndarray, '...']) -> None:
    """Adds a parameter. Its layers may be stacked; if they are not, the parameter may come in
    several consecutive parts along its first axis. The array must not be modified until `finish`
    has returned.

    Raises:
      UserError: the array does not fit the model and the configuration of its adapters.
    """
    targets = self._by_name.get(name)
    if targets is None:
      raise UserError(f'{name}: is not among the parameters of {WEIGHTS}')
    is_stacked = targets[0].layer is not None and name == targets[0].path
    for entry in targets:
      rows = np.asarray(array[entry.layer] if is_stacked else array)
      self._rows[entry.hf] += len(rows)
      if rows.shape[1:] != entry.shape[1:] or self._rows[entry.hf] > entry.shape[0]:
        raise UserError(
          f'{name}: has shape {rows.shape}, wanted {entry.shape}; is the model or the rank another?'
        )
      self._writer.add(entry.hf, rows, whole=rows.shape == entry.shape)

  def others(self, leaves: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """Adds those of the given parameters that belong to the file, and yields the others."""
    for name, leaf in leaves:
      if self.holds(name):
        self.add(name, leaf)
      else:
        yield name, leaf

  def finish(self) -> dict[str, str]:
    """Waits until everything is written. Returns the xxh3-128 digest of each tensor's bytes, keyed
    by PEFT name. Raises UserError if a tensor is missing.
    """
    missing = [name for name, entry in self._tensors.items() if self._rows[name] < entry.shape[0]]
    if missing:
      raise UserError(f'the adapters lack {missing[:4]} ({len(missing)} of {len(self._tensors)})')
    return self._writer.finish()


@contextlib.contextmanager
def open_adapter(
  directory: str | Path, spec: ModelSpec, lora: LoraConfig, *, base: str | None
) -> Iterator[AdapterFile]:
  """Opens the file of a new adapter directory. The file gets its final name at the end of the
  `with` block, so that its presence marks the directory as complete.

  Args:
    directory: output directory, created if missing.
    spec: spec of the model that the adapters belong to.
    lora: rank, alpha and targets of the adapters.
    base: directory or hub id of the base model, which is written to adapter_config.json. None if it
      is unknown.

  Raises:
    UserError: parameters are missing.
    RunError: the directory cannot be written.
  """
  directory, tensors = Path(directory), adapter_entries(spec, lora)
  path = unfinished_file(directory, WEIGHTS)
  with writing(directory):
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / CONFIG, _config(spec, lora, base))
    try:
      with TensorWriter(_DTYPE) as writer, open(path, 'wb', buffering=0) as file:
        layout = FileLayout({entry.hf: entry.shape for entry in tensors}, _DTYPE)
        writer.open(file, layout)
        opened = AdapterFile(tensors, writer, layout.nbytes)
        yield opened
        opened.finish()
      path.replace(directory / WEIGHTS)
    finally:
      with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def export_adapter(
  directory: str | Path,
  leaves: Iterable[tuple[str, np.ndarray]],
  spec: ModelSpec,
  lora: LoraConfig,
  *,
  base: str | None,
) -> None:
  """Writes an adapter directory; see `open_adapter` for the other arguments and the errors.

  Args:
    leaves: (name in the tree, array) of each trainable parameter (`models.lora.split`), in any
      order. Each array is written as it arrives.
  """
  with open_adapter(directory, spec, lora, base=base) as file:
    for name, leaf in leaves:
      file.add(name, leaf)


def _config(spec: ModelSpec, lora: LoraConfig, base: str | None) -> dict[str, Any]:
  """Returns the content of adapter_config.json."""
  modules = {
    entry.path.split('/')[-2]: _module(entry)
    for entry in entries(spec)
    if entry.path.endswith('/kernel')
  }
  return {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM' if spec.head == 'lm' else 'SEQ_CLS',
    'base_model_name_or_path': base,
    'r': lora.rank,
    'lora_alpha': lora.alpha,
    'lora_dropout': 0.0,
    'bias': 'none',
    'target_modules': [modules[target].rpartition('.')[2] for target in lora.targets],
    'modules_to_save': None if spec.head == 'lm' else [_HEAD],
    'fan_in_fan_out': False,
    'inference_mode': True,
  }


def _module(entry: TensorEntry) -> str:
  return entry.hf.removesuffix('.weight')
