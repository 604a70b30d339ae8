"""Writes LoRA adapters in PEFT format (adapter_config.json and a weights file), which the `peft`
library, vLLM and other programs can load.

Invariant: tensor names derive from the table of parameter names (`weights.tables`), like the names
in model directories. The matrices A and B are written as they are trained: A is `[rank, in]` and B
is `[out, rank]`, as PEFT expects.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxrl_llm.core.trees import flatten
from jaxrl_llm.core.types import Params
from jaxrl_llm.models.spec import LoraConfig, ModelSpec
from jaxrl_llm.weights.hf_config import write_json
from jaxrl_llm.weights.safetensors_files import writing
from jaxrl_llm.weights.tables import TensorEntry, entries

CONFIG, WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
_PREFIX = 'base_model.model.'
_ARRAYS = {'lora_a': 'lora_A', 'lora_b': 'lora_B'}
_HEAD = 'score'
"""Name in transformers of the module that is the head of a model with one output."""


def to_peft(params: Params, spec: ModelSpec) -> Iterator[tuple[str, np.ndarray]]:
  """Yields (PEFT name, array) of each adapter matrix and of every other trainable parameter, such
  as the head. The layers of `params` may be stacked or separate.
  """
  flat = flatten(params)
  for entry in entries(spec):
    for name in {entry.path, entry.unrolled}:
      module, _, kind = name.rpartition('/')
      if name in flat:
        yield _PREFIX + entry.hf, np.ascontiguousarray(flat[name])
      elif kind == 'kernel':
        for ours, theirs in _ARRAYS.items():
          if (array := flat.get(f'{module}/{ours}')) is not None:
            stacked = name == entry.path
            yield (
              f'{_PREFIX}{_module(entry)}.{theirs}.weight',
              np.ascontiguousarray(array[entry.layer] if stacked else array),
            )


def export_adapter(
  directory: str | Path, params: Params, spec: ModelSpec, lora: LoraConfig, *, base: str | None
) -> None:
  """Writes an adapter directory. The weights are written last, so that their presence marks the
  directory as complete.

  Args:
    directory: output directory, created if missing.
    params: trainable parameters, as returned by `models.lora.split`. They are NumPy arrays or
      addressable JAX arrays.
    spec: spec of the model that the adapters belong to.
    lora: rank, alpha and targets of the adapters.
    base: directory or hub id of the base model, which is written to adapter_config.json. None if it
      is unknown.
  """
  directory = Path(directory)
  modules = {
    entry.path.split('/')[-2]: _module(entry)
    for entry in entries(spec)
    if entry.path.endswith('/kernel')
  }
  config: dict[str, Any] = {
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
  with writing(directory):
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / CONFIG, config)
    save_file(dict(to_peft(params, spec)), directory / WEIGHTS, metadata={'format': 'pt'})


def _module(entry: TensorEntry) -> str:
  return entry.hf.removesuffix('.weight')
